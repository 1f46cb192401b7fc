"""Connections to PostgreSQL: SQL, COPY streams and the replication stream over one socket each.

pg8000 signs on over a socket that is made here (TLS included) and speaks SQL. COPY and replication
then use the socket directly: the server sends one message per row, and a library that hands them
out one by one would cost more than decoding them.
"""

import getpass
import os
import select
import shlex
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
from pg8000.exceptions import DatabaseError, InterfaceError
from pg8000.native import Connection as SqlConnection
from pg8000.native import literal

from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    IcestreamError,
    NeedsOperator,
    SourceUnavailable,
    keep_secret,
)
from icestream.sources.postgres.values.tuples import Tuples, copy_tuples

# Values come in the forms that the decoder knows, whatever the server's or the role's settings.
_SESSION = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "statement_timeout": "0",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "0",
}
_CONNECT_SECONDS = 20.0
# Longest silence of a server that owes an answer or rows; waits that may be longer are not left to
# the socket.
_ANSWER_SECONDS_MAX = 600.0
_ANSWER_POLL_SECONDS = 0.2
_NETWORK = ("keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")
_SSL_REQUEST = struct.pack(">ii", 8, 80877103)
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_INBOX_BYTES = 8 * 1024**2
_MESSAGE_BYTES_MAX = 2**31
_READY = b"Z\x00\x00\x00\x05"
_PASSING_CODES = ("08", "53", "57", "58", "55006", "55P03", "40")
_LOCK_TIMEOUT = "55P03"
_NOT_ACCEPTING = "57P03"
_REFUSED_CODES = ("28", "3D")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dsn:
    """Where a PostgreSQL is and who signs on; the password is never shown.

    A host that is gone without a word is noticed by the system: it asks after `keepalives_idle`
    seconds of silence, and waits `tcp_user_timeout` milliseconds for what it sent to arrive.
    """

    host: str = "localhost"
    port: int = 5432
    database: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    sslmode: str = "prefer"
    sslrootcert: str = ""
    sslcert: str = ""
    sslkey: str = ""
    connect_seconds: float = _CONNECT_SECONDS
    keepalives_idle: int = 30
    keepalives_interval: int = 10
    keepalives_count: int = 3
    tcp_user_timeout: int = 60_000
    application_name: str = "icestream"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.database}"


def parse_dsn(text: str) -> Dsn:
    """A DSN as libpq takes it: a `postgresql://` URL or `host=... dbname=...`."""
    try:
        given = _from_url(text) if "://" in text else _from_words(text)
        port = int(given.get("port") or os.environ.get("PGPORT") or 5432)
        seconds = float(given.get("connect_timeout") or _CONNECT_SECONDS)
        network: dict[str, Any] = {n: int(given[n]) for n in _NETWORK if given.get(n)}
    except ValueError as error:
        raise _not_a_dsn() from error
    known = {"host", "port", "dbname", "user", "password", "connect_timeout", "application_name"}
    tls = {"sslmode", "sslrootcert", "sslcert", "sslkey"}
    allowed = known | tls | set(_NETWORK)
    for name in given:
        if name not in allowed:
            raise ConfigInvalid(
                f"the DSN has a parameter {name} that is not known",
                hint=f"Known: {', '.join(sorted(allowed))}.",
            )
    secured: dict[str, Any] = {name: given[name] for name in tls - {"sslmode"} if name in given}
    user = given.get("user") or os.environ.get("PGUSER") or getpass.getuser()
    password = given.get("password") or os.environ.get("PGPASSWORD", "")
    keep_secret(password)
    mode = given.get("sslmode", "prefer")
    if mode not in _SSL_MODES:
        raise ConfigInvalid(
            f"the DSN's sslmode {mode} is not known", hint=f"Known: {', '.join(_SSL_MODES)}."
        )
    return Dsn(
        host=given.get("host") or os.environ.get("PGHOST") or "localhost",
        port=port,
        database=given.get("dbname") or os.environ.get("PGDATABASE") or user,
        user=user,
        password=password,
        sslmode=mode,
        connect_seconds=seconds,
        **network,
        **secured,
    )


def _from_url(text: str) -> dict[str, str]:
    parts = urlsplit(text)
    if parts.scheme not in ("postgres", "postgresql"):
        raise ValueError("another scheme")
    given = {
        "host": unquote(parts.hostname or ""),
        "port": str(parts.port or ""),
        "dbname": unquote(parts.path.lstrip("/")),
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    return {**given, **dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))}


def _from_words(text: str) -> dict[str, str]:
    words = [word.partition("=") for word in shlex.split(text)]
    if not words or any(not separator for _, separator, _ in words):
        raise ValueError("not `name=value` words")
    return {name: value for name, _, value in words}


def _not_a_dsn() -> ConfigInvalid:
    # The text itself is not shown: it may hold a password.
    return ConfigInvalid(
        "the PostgreSQL DSN is not understood",
        hint="Write postgresql://user@host:5432/database, or host=... dbname=... user=....",
    )


def quoted(*names: str) -> str:
    """A name, or a qualified one, as SQL takes it whatever its characters."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def text_literal(value: str) -> str:
    """A text value as SQL takes it, for commands that have no parameters."""
    return str(literal(value))


class Connection:
    """One session; used by one thread at a time."""

    def __init__(self, dsn: Dsn, *, replication: bool = False):
        self._dsn = dsn
        self.server = str(dsn)
        self._socket = _open_socket(dsn)
        try:
            self._sql = SqlConnection(
                dsn.user,
                database=dsn.database,
                password=dsn.password or None,
                application_name=dsn.application_name,
                replication="database" if replication else None,
                # A slot's creation waits for transactions as for locks: see `answer`.
                startup_params=_SESSION | ({"lock_timeout": "0"} if replication else {}),
                sock=self._socket,
                ssl_context=False,  # Done already, as the DSN wants it.
            )
        except Exception as error:
            self._socket.close()
            raise _translated(error, f"could not sign on to PostgreSQL at {dsn}") from error
        self._socket.settimeout(_ANSWER_SECONDS_MAX)
        self._inbox = Inbox(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, sql: str, **parameters: Any) -> list[list[Any]]:
        """The rows that a query gives; parameters are written `:name` in it."""
        try:
            return self._sql.run(sql, **parameters) or []
        except (DatabaseError, InterfaceError, OSError, struct.error) as error:
            raise _translated(error, f"a query failed at PostgreSQL {self.server}") from error

    def one(self, sql: str, **parameters: Any) -> Any:
        """The only value of the only row."""
        return self.rows(sql, **parameters)[0][0]

    def answer(self, command: str, waiting: Callable[[], None]) -> list[list[str]]:
        """The rows, as text, that a command gives; without parameters.

        `waiting` is called several times a second until they come, and may raise.
        """
        self.send_query(command)
        found: list[list[str]] = []
        while True:
            while self._inbox.peek() is None and not self._inbox.ready(_ANSWER_POLL_SECONDS):
                waiting()
            kind, body = self._inbox.message()
            self._refuse_error(kind, body)
            if kind == ord("D"):
                found.append(_text_row(body))
            elif kind == ord("Z"):
                return found

    def copy(self, query: str, columns: int, texts: Collection[int]) -> Iterator[Tuples]:
        """The rows of a query in binary form, some megabytes at a time.

        `texts` are the columns that the query gives by their text form. What is handed out is
        overwritten by the next step.
        """
        self.send_query(f"COPY ({query}) TO STDOUT (FORMAT binary)")
        self._refuse_error(*self._inbox.message())
        while True:
            self._inbox.fill(until=_READY)
            tuples, used = copy_tuples(self._inbox.view(), columns, texts)
            if len(tuples):
                yield tuples
            self._inbox.consume(used)
            kind_next = self._inbox.peek()
            if kind_next is not None and kind_next != ord("d"):
                self._finish()
                return
            if not used:
                # The next row is larger than the buffer: more of it makes the buffer grow.
                self._inbox.fill()

    def start_replication(self, slot: str, at: int, options: Mapping[str, str]) -> "Inbox":
        """Turn the session into a stream of changes that are committed from `at` on."""
        given = ", ".join(f"{name} {text_literal(value)}" for name, value in options.items())
        self.send_query(f"START_REPLICATION SLOT {quoted(slot)} LOGICAL {lsn_text(at)} ({given})")
        kind, body = self._inbox.message()
        self._refuse_error(kind, body)
        return self._inbox

    def send_query(self, sql: str) -> None:
        """Send a simple query; its answer is read from the inbox."""
        body = sql.encode() + b"\0"
        self._send(b"Q" + struct.pack(">i", len(body) + 4) + body)

    def send_status(self, received: int, confirmed: int, reply: bool) -> None:
        """Tell the server what has come and up to where all is durable (0: not said); callable
        while another thread reads."""
        # The server's clock starts in 2000; nobody looks at the time but monitoring.
        now = int((time.time() - 946_684_800) * 1_000_000)
        body = struct.pack(">cqqqqb", b"r", received, confirmed, confirmed, now, reply)
        self._send(b"d" + struct.pack(">i", len(body) + 4) + body)

    def close(self) -> None:
        """Close the session; a transaction that is open is rolled back by the server."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _send(self, content: bytes) -> None:
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise _translated(error, f"lost PostgreSQL at {self.server}") from error

    def _finish(self) -> None:
        """Read the answer's end."""
        while True:
            kind, body = self._inbox.message()
            self._refuse_error(kind, body)
            if kind == ord("Z"):
                return

    def _refuse_error(self, kind: int, body: bytes) -> None:
        if kind == ord("E"):
            raise server_error(_fields(body), f"PostgreSQL at {self.server} refused")


class Inbox:
    """Bytes from the server in one buffer that is used again and again."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._content = np.empty(_INBOX_BYTES, dtype=np.uint8)
        self._start = 0
        self._end = 0
        self._unwanted = 0

    def view(self) -> np.ndarray:
        """What has come and was not consumed; valid until the next `fill`."""
        return self._content[self._start : self._end]

    def consume(self, count: int) -> None:
        """Drop bytes at the front; what has not come yet of them is dropped when it comes."""
        held = min(count, self._end - self._start)
        self._unwanted += count - held
        self._start += held
        if self._start == self._end:
            self._start = self._end = 0

    def peek(self) -> int | None:
        """The kind of the next message, if any of it has come."""
        return int(self._content[self._start]) if self._end > self._start else None

    def fill(self, until: bytes = b"") -> None:
        """Wait for more; with `until` until the buffer is nearly full or ends like an answer."""
        if not until:
            self._receive()
            return
        while self._end - self._start < self._content.size // 4 * 3:
            tail = self._content[max(self._start, self._end - 6) : self._end].tobytes()
            if tail.startswith(until) or self.peek() == ord("E"):
                return
            self._receive()

    def ready(self, seconds: float) -> bool:
        """Whether something can be received within this time."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        # Not `select`: it knows no descriptor above 1023.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def message(self) -> tuple[int, bytes]:
        """The next whole message: its kind and body."""
        while True:
            if self._end - self._start >= 5:
                size = int.from_bytes(self._content[self._start + 1 : self._start + 5].tobytes())
                if self._end - self._start >= size + 1:
                    place = self._start
                    body = self._content[place + 5 : place + 1 + size].tobytes()
                    self.consume(size + 1)
                    return int(self._content[place]), body
            self._receive()

    def _receive(self) -> None:
        self._make_room()
        try:
            count = self._socket.recv_into(self._content[self._end :].data)
        except (OSError, ValueError) as error:
            raise SourceUnavailable("lost the connection to PostgreSQL", detail=str(error)) from (
                error
            )
        if count == 0:
            raise SourceUnavailable("PostgreSQL closed the connection")
        self._end += count
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, 0
            self.consume(unwanted)

    def _make_room(self) -> None:
        """Move what is left to the front; a message larger than the buffer makes it grow."""
        if self._start > 0:
            held = self._end - self._start
            self._content[:held] = self._content[self._start : self._end].copy()
            self._start, self._end = 0, held
        if self._end == self._content.size:
            if self._content.size >= _MESSAGE_BYTES_MAX:
                raise DataRejected("a message of PostgreSQL is larger than two gigabytes")
            grown = np.empty(self._content.size * 2, dtype=np.uint8)
            grown[: self._end] = self._content[: self._end]
            self._content = grown


def lsn_text(lsn: int) -> str:
    """A position in the log as PostgreSQL writes it: `16/B374D848`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """The inverse of `lsn_text`."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def _open_socket(dsn: Dsn) -> socket.socket:
    message = f"could not reach PostgreSQL at {dsn}"
    try:
        if dsn.host.startswith("/"):
            local = socket.socket(socket.AF_UNIX)
            local.settimeout(dsn.connect_seconds)
            local.connect(f"{dsn.host}/.s.PGSQL.{dsn.port}")
            return local
        plain = socket.create_connection((dsn.host, dsn.port), dsn.connect_seconds)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_silence(plain, dsn)
        return _secured(plain, dsn)
    except ssl.SSLError as error:
        raise ConfigInvalid(
            f"the TLS connection to PostgreSQL at {dsn} failed",
            detail=f"{error.reason or error}.",
            hint="Check sslmode, sslrootcert and the server's certificate.",
        ) from error
    except OSError as error:
        raise SourceUnavailable(
            message,
            detail=f"{error.strerror or error}.",
            hint="Check host and port in the DSN, and that the server is running.",
        ) from error


def _notice_silence(plain: socket.socket, dsn: Dsn) -> None:
    """Have the system find out that the other side is gone, where it can be told when."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": dsn.keepalives_idle,
        "TCP_KEEPINTVL": dsn.keepalives_interval,
        "TCP_KEEPCNT": dsn.keepalives_count,
        "TCP_USER_TIMEOUT": dsn.tcp_user_timeout,
    }
    for name, value in wanted.items():
        if value > 0 and hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _secured(plain: socket.socket, dsn: Dsn) -> socket.socket:
    """The socket under TLS as the DSN's sslmode wants it."""
    if dsn.sslmode in ("disable", "allow"):
        return plain
    plain.sendall(_SSL_REQUEST)
    if plain.recv(1) != b"S":
        if dsn.sslmode == "prefer":
            return plain
        raise ConfigInvalid(
            f"PostgreSQL at {dsn} does not speak TLS",
            hint="Turn `ssl` on at the server, or use sslmode=disable.",
        )
    context = ssl.create_default_context(cafile=dsn.sslrootcert or None)
    context.check_hostname = dsn.sslmode == "verify-full"
    if not dsn.sslmode.startswith("verify"):
        context.verify_mode = ssl.CERT_NONE
    if dsn.sslcert:
        context.load_cert_chain(dsn.sslcert, dsn.sslkey or None)
    return context.wrap_socket(plain, server_hostname=dsn.host)


def _text_row(body: bytes) -> list[str]:
    """The values of a row in text form; null is the empty text."""
    count, place, values = struct.unpack_from(">h", body)[0], 2, []
    for _ in range(count):
        length = struct.unpack_from(">i", body, place)[0]
        place += 4
        values.append(body[place : place + max(0, length)].decode())
        place += max(0, length)
    return values


def _fields(body: bytes) -> dict[str, str]:
    """The fields of an error message by their one-letter codes."""
    parts = [part.decode(errors="replace") for part in body.split(b"\0") if part]
    return {part[0]: part[1:] for part in parts}


def server_error(fields: Mapping[str, str], message: str) -> IcestreamError:
    """The server's own error as one of ours, sorted by what can be done about it."""
    code = fields.get("C", "")
    detail = " ".join(
        part for part in (f"{fields.get('M', 'no reason given')}.", fields.get("D", "")) if part
    )
    hint = fields.get("H") or None
    kind: type[IcestreamError] = PostgresError
    if code == _LOCK_TIMEOUT:
        kind = LockTimeout
    elif code == _NOT_ACCEPTING:
        kind = NotAccepting
    elif code.startswith(_PASSING_CODES):
        kind = SourceUnavailable
    elif code.startswith(_REFUSED_CODES):
        kind, hint = ConfigInvalid, hint or "Check user, password and database in the DSN."
    elif code == "42501":
        kind, hint = ConfigInvalid, hint or "Grant the privilege to the role in the DSN."
    error = kind(message, detail=detail, hint=hint)
    if isinstance(error, PostgresError):
        error.code = code
    return error


class NotAccepting(SourceUnavailable):
    """The server takes no new sessions: it shuts down, or has yet to start up."""


class LockTimeout(SourceUnavailable):
    """A lock could not be had in the time that the session allows."""


class PostgresError(NeedsOperator):
    """The server refused for a reason that a second attempt will not change."""

    code = ""


def _translated(error: Exception, message: str) -> IcestreamError:
    if isinstance(error, IcestreamError):
        return error
    if isinstance(error, DatabaseError) and error.args and isinstance(error.args[0], dict):
        return server_error(error.args[0], message)
    if isinstance(error, InterfaceError) and "network" not in str(error).lower():
        return ConfigInvalid(message, detail=f"{error}.", hint="Check the DSN.")
    return SourceUnavailable(message, detail=f"{error}.")
