"""Requests to OpenSearch over kept-alive connections, several hosts tried in turn.

What comes back is sorted by what its caller can do: an answer; `TargetUnavailable` when no host
was reached and so nothing can have happened; `CommitUnknown` when the request was sent and its
answer lost. What a person must put right (credentials, certificates, an address at which something
else lives) is `ConfigInvalid`.
"""

import json
import random
import ssl
import time
from base64 import b64encode
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InsecureRequestWarning,
    NewConnectionError,
    SSLError,
)

from icestream.errors import CommitUnknown, ConfigInvalid, IcestreamError, TargetUnavailable
from icestream.sinks.opensearch.options import OpenSearchOptions
from icestream.sinks.opensearch.signing import (
    Credentials,
    Request,
    Scope,
    from_environment,
    signature,
)

CONNECT_SECONDS_MAX = 10.0
# A node under load answers a bulk request late; OpenSearch itself gives up after a minute.
READ_SECONDS_MAX = 90.0
REASON_CHARACTERS_MAX = 500
# The coordinator prepares as many tables side by side.
CONNECTIONS_KEPT = 8

OK, CREATED = 200, 201
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, TOO_LARGE = 400, 401, 403, 404, 409, 413
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500

JSON = "application/json"
LINES = "application/x-ndjson"


def passing(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status == TOO_MANY_REQUESTS or status >= SERVER_ERROR


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host said."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as data; an empty map when it is something else."""
        try:
            return json.loads(self.body)
        except ValueError:
            return {}

    @property
    def error_kind(self) -> str:
        """OpenSearch's own name of the error, such as `index_not_found_exception`."""
        return _error(self.json())[0]

    @property
    def reason(self) -> str:
        """Why a request failed, in OpenSearch's words."""
        kind, reason = _error(self.json())
        text = (
            f"{kind}: {reason}"
            if kind
            else self.body[:REASON_CHARACTERS_MAX].decode(errors="replace")
        )
        return f"{self.status} {text[:REASON_CHARACTERS_MAX]}".strip()


def _error(body: Any) -> tuple[str, str]:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("type", "")), str(error.get("reason", ""))
    return ("", "") if error is None else ("error", str(error))


class Client:
    """Connections to the hosts; safe between threads."""

    def __init__(self, options: OpenSearchOptions, credentials: Credentials | None = None):
        options.guard_secrets()
        self._options = options
        self._headers = _authorization(options)
        self._credentials = credentials or (from_environment() if options.aws_sigv4 else None)
        if self._credentials is not None:
            self._credentials.guard()
        self._pools = [self._pool(host) for host in options.hosts]
        self._at = random.randrange(len(self._pools))

    def ask(
        self, method: str, path: str, body: bytes | memoryview | None = None, kind: str = JSON
    ) -> Answer:
        """Send a request once, to the first host that can be reached.

        Raises `TargetUnavailable` when it was not sent, `CommitUnknown` when its answer was lost.
        """
        unreached: Exception | None = None
        for _ in self._pools:
            pool = self._pools[self._at % len(self._pools)]
            try:
                answer = pool.urlopen(
                    method,
                    path,
                    # Any buffer will do; the library's types do not say so.
                    body=cast(bytes, body),
                    headers=self._signed(method, path, body, kind, pool),
                    retries=False,
                    redirect=False,
                )
                return self._checked(Answer(answer.status, answer.data), pool)
            except (NewConnectionError, ConnectTimeoutError) as error:
                unreached = error
            except SSLError as error:
                self._at += 1
                raise self._tls_failed(pool, error) from error
            except (HTTPError, OSError) as error:
                # The next try goes to another host, whatever is wrong with this one.
                self._at += 1
                raise CommitUnknown(
                    f"the answer of {pool.host} was lost", detail=str(error)
                ) from error
            self._at += 1
        raise TargetUnavailable(
            "could not reach any host of OpenSearch",
            detail=f"Hosts: {', '.join(self._options.hosts)}. {unreached}",
            hint="Check `hosts`, and that the cluster is up.",
        ) from unreached

    def call(self, method: str, path: str, body: object = None) -> Answer:
        """A small request that can be repeated; trouble that passes is `TargetUnavailable`."""
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = self.ask(method, path, content)
        except CommitUnknown as error:
            raise TargetUnavailable(error.message, detail=error.detail) from error
        if passing(answer.status):
            raise unavailable(answer)
        return answer

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            pool.close()

    def _signed(
        self,
        method: str,
        path: str,
        body: bytes | memoryview | None,
        kind: str,
        pool: urllib3.HTTPConnectionPool,
    ) -> dict[str, str]:
        headers = {**self._headers, "Content-Type": kind}
        if self._credentials is None:
            return headers
        host = pool.host if pool.port in (80, 443) else f"{pool.host}:{pool.port}"
        request = Request(method=method, host=host, path=path, body=body or b"")
        scope = Scope(region=self._options.aws_region, service="es")
        return {**headers, **signature(request, scope, self._credentials, time.time())}

    def _checked(self, answer: Answer, pool: urllib3.HTTPConnectionPool) -> Answer:
        if answer.status in (UNAUTHORIZED, FORBIDDEN):
            raise refused(answer.reason)
        if 300 <= answer.status < 400:
            raise ConfigInvalid(
                f"host {pool.host} answers with a redirection",
                detail=answer.reason,
                hint="Name in `hosts` the address at which OpenSearch itself answers.",
            )
        if answer.status >= SERVER_ERROR:
            self._at += 1
        return answer

    def _pool(self, host: str) -> urllib3.HTTPConnectionPool:
        address = urlsplit(host if "://" in host else f"https://{host}")
        try:
            port = address.port
        except ValueError:
            port = 0
        if address.scheme not in ("http", "https") or not address.hostname or port == 0:
            raise ConfigInvalid(
                f"{host!r} is not the address of a host",
                hint="Write it like `https://search.example.com:9200`.",
            )
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS_MAX, read=READ_SECONDS_MAX)
        if address.scheme == "http":
            return urllib3.HTTPConnectionPool(
                address.hostname, port or 80, timeout=timeout, maxsize=CONNECTIONS_KEPT
            )
        insecure = self._options.insecure
        if insecure:
            # The option says it already, and a warning for each request says no more.
            urllib3.disable_warnings(InsecureRequestWarning)
        return urllib3.HTTPSConnectionPool(
            address.hostname,
            port or 443,
            timeout=timeout,
            maxsize=CONNECTIONS_KEPT,
            cert_reqs="CERT_NONE" if insecure else "CERT_REQUIRED",
            assert_hostname=False if insecure else None,
            ssl_context=_tls(self._options),
        )

    def _tls_failed(self, pool: urllib3.HTTPConnectionPool, error: SSLError) -> IcestreamError:
        cause = error.args[0] if error.args else error
        if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return CommitUnknown(f"the answer of {pool.host} was lost", detail=str(error))
        return ConfigInvalid(
            f"no secure connection to host {pool.host} can be made",
            detail=str(error),
            hint="Name the authority's certificate with `cert`, or use `insecure: true` to leave "
            "it unchecked. A host without TLS is written `http://...`.",
        )


def unavailable(answer: Answer) -> TargetUnavailable:
    """The error for an answer that may be another one later."""
    return TargetUnavailable(
        "OpenSearch could not take a request",
        detail=answer.reason,
        hint="The cluster is too busy or not whole; look at its health.",
    )


def foreign(reason: str) -> ConfigInvalid:
    """The error for an answer that OpenSearch never gives."""
    return ConfigInvalid(
        "a host does not answer as OpenSearch does", detail=reason, hint="Check `hosts`."
    )


def refused(reason: str) -> ConfigInvalid:
    """The error for credentials, or rights, that do not suffice."""
    return ConfigInvalid(
        "OpenSearch refuses access",
        detail=reason,
        hint="Check `username` and `password` or `api_key`, that the user may write the indices, "
        "and that they are not set to be read only.",
    )


def _tls(options: OpenSearchOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.cert or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            f"the certificates in {options.cert} cannot be read",
            detail=str(error),
            hint="`cert` names a file in PEM form.",
        ) from error
    if options.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _authorization(options: OpenSearchOptions) -> dict[str, str]:
    if options.api_key:
        return {"Authorization": f"ApiKey {options.api_key}"}
    if options.username:
        pair = f"{options.username}:{options.password}".encode()
        return {"Authorization": f"Basic {b64encode(pair).decode()}"}
    return {}
