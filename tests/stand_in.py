"""A stand-in for OpenSearch on loopback, for answers that a real node gives only in distress.

Each request takes the next answer of a script; when the script has ended, bulk requests are taken
whole. What was asked is kept.
"""

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from tests.servers import LOOPBACK, POLL_SECONDS


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    headers: http.client.HTTPMessage
    body: bytes

    def lines(self) -> list[Any]:
        """A bulk request's lines as data."""
        return [json.loads(line) for line in self.body.split(b"\n")[:-1]]

    def ids(self) -> list[str | None]:
        """The ids of a bulk request's operations, in order."""
        actions = [next(iter(line.items())) for line in self.lines() if is_action(line)]
        return [target.get("_id") for _, target in actions]


class Said(NamedTuple):
    """An answer: None in place of a status closes the connection."""

    status: int | None
    body: bytes = b"{}"


Answering = Callable[[Asked], Said]


def is_action(line: Any) -> bool:
    """Whether a line of a bulk request names an operation and its target."""
    name, target = next(iter(line.items()), ("", None))
    return name in ("index", "delete", "create") and isinstance(target, dict)


def status(code: int | None) -> Answering:
    """The same answer for the whole request."""
    error = {"error": {"type": f"status_{code}", "reason": "by the stand-in"}, "status": code}
    return lambda _: Said(code, json.dumps(error).encode())


def items(by_id: dict[str | None, tuple[int, str]]) -> Answering:
    """An answer by item: the status and the error's kind for some ids, success for the others."""

    def answer(asked: Asked) -> Said:
        results = []
        for id_ in asked.ids():
            code, kind = by_id.get(id_, (201, ""))
            error = {"error": {"type": kind, "reason": f"{kind} by the stand-in"}} if kind else {}
            results.append({"index": {"status": code, **error}})
        errors = any("error" in result["index"] for result in results)
        return Said(
            200, json.dumps({"errors": errors, "items": results}, separators=(",", ":")).encode()
        )

    return answer


def too_large(bytes_max: int) -> Answering:
    """An answer with an empty body, as OpenSearch gives it, to requests beyond a size."""
    return lambda asked: Said(413, b"") if len(asked.body) > bytes_max else items({})(asked)


class StandIn:
    """Answers by its script; `always` is said when the script has ended."""

    def __init__(
        self,
        script: Iterable[Answering] = (),
        always: Answering | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.asked: list[Asked] = []
        self._script = list(script)
        self._always = always or items({})
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((LOOPBACK, 0), _conversation(self))
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://{LOOPBACK}:{self._server.server_port}"

    def __enter__(self) -> Self:
        # It looks that often whether it shall end.
        serve = partial(self._server.serve_forever, poll_interval=POLL_SECONDS)
        threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, asked: Asked) -> Said:
        """The next answer of the script."""
        with self._lock:
            self.asked.append(asked)
            answering = self._script.pop(0) if self._script else self._always
        return answering(asked)


def _conversation(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Conversation(BaseHTTPRequestHandler):
        """One connection, kept alive."""

        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """What was asked is kept elsewhere."""

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            said = stand_in.answer(Asked(self.command, self.path, self.headers, body))
            if said.status is None:
                self.close_connection = True
                return
            self.send_response_only(said.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said.body)))
            self.end_headers()
            self.wfile.write(said.body)

        do_GET = do_PUT = do_POST = do_DELETE = serve

    return Conversation
