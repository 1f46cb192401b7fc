"""A stand-in for a schema registry, over HTTP: the part of Confluent's API that is needed.

It numbers schemas as registries do: the same schema has the same id under every subject. It is a
stand-in because no real one was found among Python's packages or in the usual jar repository.
"""

import json
import ssl
from base64 import b64encode
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

SUBJECT_NOT_FOUND, VERSION_NOT_FOUND, SCHEMA_NOT_FOUND = 40401, 40402, 40403


class StandInRegistry:
    """Started by `with`; `requests` are the paths that were asked for, `fail_with` a status."""

    def __init__(self, username: str = "", password: str = "", certificate: Path | None = None):
        self.requests: list[str] = []
        self.fail_with: int | None = None
        self._schemas: list[dict[str, Any]] = []
        self._subjects: dict[str, list[int]] = {}
        pair = b64encode(f"{username}:{password}".encode()).decode()
        self._authorization = f"Basic {pair}" if username else None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._answering())
        self._server.daemon_threads = True
        self._scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"

    def __enter__(self) -> "StandInRegistry":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def register(
        self, subject: str, schema: str, kind: str = "AVRO", references: Sequence[Any] = ()
    ) -> int:
        """The id of a schema, which it gets if it has none yet."""
        entry: dict[str, Any] = {"schema": schema}
        if kind != "AVRO":
            entry["schemaType"] = kind
        if references:
            entry["references"] = list(references)
        if entry not in self._schemas:
            self._schemas.append(entry)
        number = self._schemas.index(entry) + 1
        versions = self._subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return number

    def _found(self, path: str) -> tuple[int, dict[str, Any]]:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["schemas", "ids"] and len(parts) == 3:
            number = int(parts[2])
            if 1 <= number <= len(self._schemas):
                return 200, self._schemas[number - 1]
            return 404, {"error_code": SCHEMA_NOT_FOUND, "message": "Schema not found"}
        if parts[0] == "subjects" and parts[2:3] == ["versions"] and len(parts) == 4:
            versions = self._subjects.get(parts[1])
            if versions is None:
                return 404, {"error_code": SUBJECT_NOT_FOUND, "message": "Subject not found."}
            version = len(versions) if parts[3] == "latest" else int(parts[3])
            if not 1 <= version <= len(versions):
                return 404, {"error_code": VERSION_NOT_FOUND, "message": "Version not found."}
            number = versions[version - 1]
            known = {"subject": parts[1], "version": version, "id": number}
            return 200, {**known, **self._schemas[number - 1]}
        return 404, {"message": "HTTP 404 Not Found"}

    # The class inside has a self of its own.
    def _answering(registry) -> type[BaseHTTPRequestHandler]:
        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.requests.append(self.path)
                if registry.fail_with is not None:
                    status, body = registry.fail_with, {"message": "it was told to fail"}
                elif registry._authorization not in (None, self.headers.get("Authorization")):
                    status, body = 401, {"error_code": 40101, "message": "Unauthorized"}
                else:
                    status, body = registry._found(self.path)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Tests speak for themselves."""

        return Answering
