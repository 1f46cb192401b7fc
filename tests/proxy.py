"""An HTTP/1.1 reverse proxy on loopback that loses, delays and refuses requests on command.

    client ──► Proxy ──► server      with Proxy(catalog.uri) as proxy:
                │                        proxy.on("POST", "/tables/orders$").lose_answer()
              rules

Relies on the standard library; each connection has a thread of its own.

Guarantees: path, headers (Host too, which S3 signatures cover) and body reach the server as they
were sent; a request is forwarded at most once, and only after it has arrived whole, so that a
client which leaves then does not stop it; it is in `requests` before its client can see the
answer. Bodies past a megabyte wait on disk.

A request takes the matching rules in the order they were added, up to and including the first
one that decides its answer; the others wait for later requests. A server that is not there
shows as a cut connection, never as an answer of the proxy's own.
"""

import http.client
import json
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer
from typing import IO, NamedTuple, Self, cast
from urllib.parse import urlsplit

from tests.servers import LOOPBACK, POLL_SECONDS, free_port

BLOCK_BYTES = 65_536
BODY_MEMORY_BYTES_MAX = 1_048_576
CHUNK_LINE_BYTES_MAX = 1_024
IDLE_SECONDS_MAX = 300.0
FORWARD_SECONDS_MAX = 300.0
HOLD_SECONDS_MAX = 300.0
LISTEN_BACKLOG = 128

# These headers speak about one connection, and the proxy has two.
CONNECTION_HEADERS = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")
)


class Request(NamedTuple):
    """What was asked, and the status the client was told: None when it got no answer."""

    method: str
    path: str
    status: int | None
    request_bytes: int


class Refusal(NamedTuple):
    """An answer made by the proxy, its body in the form of an Iceberg REST error."""

    status: int

    def body(self) -> bytes:
        reason = http.client.responses.get(self.status, "Unknown")
        error = {"message": f"{reason} (by the test proxy)", "type": reason, "code": self.status}
        return json.dumps({"error": error}).encode()


class ConnectionCut(Exception):
    """The client gets no answer: its connection is closed."""


# How an exchange ends without an answer: by a rule, by a network error, by a broken answer.
LOST = (ConnectionCut, OSError, http.client.HTTPException)

Answer = http.client.HTTPResponse | Refusal
# What a rule does to a request on its way there or to its answer on the way back: None lets it
# pass, a refusal takes the answer's place, ConnectionCut ends the connection.
Fault = Callable[["_Conversation"], Refusal | None]


@dataclass(slots=True, eq=False)
class Rule:
    """A fault for the next `times` requests that match; until removed when `times` is None.

    One of the methods that name a fault arms it. `reached` is set when the fault first happens to
    a request: with `stall_after` the server has answered by then.
    """

    proxy: "Proxy"
    method: str | None
    path: re.Pattern[str]
    times: int | None
    token: str | None = None
    before: Fault | None = None
    after: Fault | None = None
    decides: bool = False
    taken: int = 0
    reached: threading.Event = field(default_factory=threading.Event)

    def cut_before(self) -> Self:
        """Close the connection; the server never hears of the request."""
        return self._arm(before=_cut, decides=True)

    def refuse(self, status: int) -> Self:
        """Answer with the status; the server never hears of the request."""
        return self._arm(before=lambda _: Refusal(status), decides=True)

    def stall(self, until: float | threading.Event) -> Self:
        """Hold the request, for so many seconds or until the event is set, then forward it."""
        return self._arm(before=lambda conversation: conversation.hold(until))

    def call_before(self, callback: Callable[[], object]) -> Self:
        """Run the callback, then forward the request. What it raises, closing the proxy raises."""
        return self._arm(before=lambda _: self.proxy._call(callback))

    def lose_answer(self) -> Self:
        """Forward the request and await the answer, then close the connection instead."""
        return self._arm(after=_cut, decides=True)

    def answer_500_after(self, status: int = 500) -> Self:
        """Forward the request and await the answer, then answer with the status instead."""
        return self._arm(after=lambda _: Refusal(status), decides=True)

    def stall_after(self, until: float | threading.Event) -> Self:
        """Forward the request at once and hold its answer."""
        return self._arm(after=lambda conversation: conversation.hold(until))

    def remove(self) -> None:
        self.proxy._remove(self)

    def matches(self, method: str, path: str, authorization: str | None) -> bool:
        if self.token is not None and authorization == f"Bearer {self.token}":
            return False
        return self.method in (None, method) and self.path.search(path) is not None

    def _arm(
        self, *, before: Fault | None = None, after: Fault | None = None, decides: bool = False
    ) -> Self:
        if self.before or self.after:
            raise ValueError("the rule has its fault already: add another rule")
        self.before, self.after, self.decides = before, after, decides
        self.proxy._add(self)
        return self


def _cut(_: "_Conversation") -> None:
    raise ConnectionCut


class Proxy:
    """Stands before the server at `target`, on a port of its own, and does what its rules say."""

    def __init__(self, target: str) -> None:
        address = urlsplit(target)
        if address.hostname is None or address.port is None:
            raise ValueError(f"not an address with a port: {target}")
        self.target = (address.hostname, address.port)
        self.port = free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []
        self._failures: list[BaseException] = []
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.down()
        if self._failures and error is None:
            raise self._failures[0]

    @property
    def requests(self) -> list[Request]:
        """Every request since the start or the last `clear`, in the order they were answered."""
        with self._lock:
            return list(self._requests)

    def clear(self) -> None:
        """Forget the recorded requests; rules stay."""
        with self._lock:
            self._requests.clear()

    def count(self, method: str, path: str) -> int:
        """How many recorded requests have the method and match the regular expression."""
        pattern = re.compile(path)
        return sum(
            seen.method == method and bool(pattern.search(seen.path)) for seen in self.requests
        )

    def on(self, method: str | None = None, path: str = "", *, times: int | None = 1) -> Rule:
        """A rule for requests by method (None is any) and regular expression on path and query."""
        return Rule(self, method, re.compile(path), times)

    def require_token(self, token: str) -> Rule:
        """Answer 401 to every request that does not bear the token."""
        rule = self.on(times=None)
        rule.token = token
        return rule.refuse(http.client.UNAUTHORIZED)

    def down(self) -> None:
        """Refuse connections and cut those that are open, with what they were waiting for."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections, self._connections = self._connections, set()
        if listener is not None:
            # Closing alone would leave the accepting thread asleep in its call.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def up(self) -> None:
        """Accept connections on the same port as ever."""
        with self._lock:
            if self._listener is not None:
                return
            listener = socket.create_server((LOOPBACK, self.port), backlog=LISTEN_BACKLOG)
            self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _add(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _remove(self, rule: Rule) -> None:
        with self._lock, suppress(ValueError):
            self._rules.remove(rule)

    def _take_rules(self, method: str, path: str, authorization: str | None) -> list[Rule]:
        """The rules that this request takes, used up by it as far as they are counted."""
        taken: list[Rule] = []
        with self._lock:
            for rule in list(self._rules):
                if not rule.matches(method, path, authorization):
                    continue
                rule.taken += 1
                if rule.times is not None and rule.taken >= rule.times:
                    self._rules.remove(rule)
                taken.append(rule)
                if rule.decides:
                    break
        return taken

    def _record(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except BaseException as error:
            with self._lock:
                self._failures.append(error)
            raise ConnectionCut from error

    def _connected(self, connection: socket.socket) -> bool:
        with self._lock:
            return connection in self._connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            with self._lock:
                accepted = self._listener is listener
                if accepted:
                    self._connections.add(connection)
            if accepted:
                threading.Thread(
                    target=self._converse, args=(connection, address), daemon=True
                ).start()
            else:
                connection.close()

    def _converse(self, connection: socket.socket, address: tuple[str, int]) -> None:
        with connection, suppress(OSError):
            try:
                _Conversation(connection, address, self)
            finally:
                with self._lock:
                    self._connections.discard(connection)


class _Conversation(BaseHTTPRequestHandler):
    """One client connection: its requests, one after the other."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS_MAX
    disable_nagle_algorithm = True

    def __init__(self, connection: socket.socket, address: tuple[str, int], proxy: Proxy) -> None:
        self.proxy = proxy
        # The parent class serves the whole connection in here, and only stores its server.
        super().__init__(connection, address, cast(BaseServer, proxy))

    def log_message(self, format: str, *args: object) -> None:
        """The proxy keeps its own record."""

    def handle_expect_100(self) -> bool:
        # Asked for when the body is read, so that parsing alone answers nothing.
        return True

    def serve(self) -> None:
        # `self.path` has its leading slashes folded, and signatures cover the path as sent.
        path = self.requestline.split()[1]
        # A connection for each request: a kept one may be closed by the server just when it is
        # used, and then nobody knows whether to send the request again.
        upstream = http.client.HTTPConnection(*self.proxy.target, timeout=FORWARD_SECONDS_MAX)
        with tempfile.SpooledTemporaryFile(BODY_MEMORY_BYTES_MAX) as body, closing(upstream):
            try:
                self._read_body(body)
            except (OSError, ValueError):
                self._close()
                return
            request_bytes = body.tell()
            body.seek(0)
            try:
                answer = self._answer(upstream, path, body)
            except LOST:
                self.proxy._record(Request(self.command, path, None, request_bytes))
                self._close()
                return
            self.proxy._record(Request(self.command, path, answer.status, request_bytes))
            try:
                self._send(answer)
            except LOST:
                self._close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = serve

    def hold(self, until: float | threading.Event) -> None:
        """Wait as a stall asks; a proxy that goes down meanwhile cuts what it holds."""
        if isinstance(until, threading.Event):
            released, seconds = until, HOLD_SECONDS_MAX
        else:
            released, seconds = threading.Event(), until
        deadline = time.monotonic() + seconds
        while self.proxy._connected(self.connection):
            left = max(deadline - time.monotonic(), 0.0)
            if released.wait(min(POLL_SECONDS, left)):
                return
            if left == 0.0:
                if released is until:
                    break
                return
        raise ConnectionCut

    def _answer(self, upstream: http.client.HTTPConnection, path: str, body: IO[bytes]) -> Answer:
        rules = self.proxy._take_rules(self.command, path, self.headers.get("Authorization"))
        if refusal := self._suffer((rule, rule.before) for rule in rules):
            return refusal
        answer = self._forward(upstream, path, body)
        return self._suffer((rule, rule.after) for rule in rules) or answer

    def _suffer(self, faults: Iterable[tuple[Rule, Fault | None]]) -> Refusal | None:
        for rule, fault in faults:
            if fault is not None:
                rule.reached.set()
                if refusal := fault(self):
                    return refusal
        return None

    def _read_body(self, body: IO[bytes]) -> None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(http.client.CONTINUE)
            self.end_headers()
        if not self._chunked():
            self._copy_body(int(self.headers.get("Content-Length", 0)), body)
            return
        while size := int(self.rfile.readline(CHUNK_LINE_BYTES_MAX).split(b";")[0], 16):
            self._copy_body(size, body)
            self.rfile.readline(CHUNK_LINE_BYTES_MAX)
        while self.rfile.readline(CHUNK_LINE_BYTES_MAX).strip():
            """Trailers are dropped."""

    def _chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    def _copy_body(self, size: int, body: IO[bytes]) -> None:
        while size:
            block = self.rfile.read(min(size, BLOCK_BYTES))
            if not block:
                raise ConnectionResetError("the client left in the middle of its request")
            body.write(block)
            size -= len(block)

    def _forward(
        self, upstream: http.client.HTTPConnection, path: str, body: IO[bytes]
    ) -> http.client.HTTPResponse:
        upstream.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in CONNECTION_HEADERS:
                upstream.putheader(name, value)
        upstream.putheader("Connection", "close")
        if self._chunked():
            upstream.putheader("Transfer-Encoding", "chunked")
        # A server that refuses early stops reading; its answer counts, not the broken pipe.
        with suppress(BrokenPipeError, ConnectionResetError):
            upstream.endheaders(body, encode_chunked=self._chunked())
        return upstream.getresponse()

    def _send(self, answer: Answer) -> None:
        if isinstance(answer, Refusal):
            body = answer.body()
            self.send_response_only(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            return
        with answer:
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in CONNECTION_HEADERS:
                    self.send_header(name, value)
            self._send_body(answer)

    def _send_body(self, answer: http.client.HTTPResponse) -> None:
        empty = self.command == "HEAD" or answer.status in (
            http.client.NO_CONTENT,
            http.client.NOT_MODIFIED,
        )
        expected = answer.getheader("Content-Length")
        chunked = not empty and expected is None
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if empty:
            return
        sent = 0
        while block := answer.read(BLOCK_BYTES):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            sent += len(block)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")
        elif sent != int(expected or 0):
            raise ConnectionCut

    def _close(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
