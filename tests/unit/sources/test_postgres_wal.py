"""The change stream's reader over a socket: what it takes, and what it refuses to go on from."""

import fcntl
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from icestream.errors import HistoryLost, SourceUnavailable
from icestream.sources import Budget
from icestream.sources.postgres import connection
from icestream.sources.postgres.changes import Relation
from icestream.sources.postgres.connection import Inbox, parse_dsn
from icestream.sources.postgres.wal import Start, WalReader, Witness, epochs
from tests.servers import wait_until

LAST = Witness(at=1000, xid=7, time=5_000_000)
START = 2000
SMALL = Budget(rows=10_000, bytes=1024**2)
PATIENCE_SECONDS = 60.0


class Wire:
    """Both ends of a stream: this one is the server's, the other one is read."""

    def __init__(self) -> None:
        self.server, self.client = socket.socketpair()
        self.told: list[tuple[int, int]] = []

    def send_status(self, received: int, confirmed: int, reply: bool) -> None:
        self.told.append((received, confirmed))

    def close(self) -> None:
        for end in (self.server, self.client):
            end.close()

    def write(self, message: bytes) -> None:
        self._send(b"w" + struct.pack(">qqq", 0, 0, 0) + message)

    def keep_alive(self, at: int, reply: bool = False) -> None:
        self._send(b"k" + struct.pack(">qqb", at, 0, reply))

    def transaction(self, found: Witness, *messages: bytes) -> None:
        self.write(b"B" + struct.pack(">qqI", found.at, found.time, found.xid))
        for message in messages:
            self.write(message)
        self.write(b"C" + struct.pack(">bqqq", 0, found.at, found.at + 10, found.time))

    def _send(self, body: bytes) -> None:
        self.server.sendall(b"d" + struct.pack(">i", len(body) + 4) + body)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def reader(
    wire: Wire,
    folder: Path,
    witness: Witness | None = LAST,
    silence_seconds: float = 60.0,
    budget: Budget = SMALL,
    describe: Callable[[bytes], Relation | None] = lambda message: None,
) -> WalReader:
    """A reader that goes on from START."""
    return WalReader(
        lambda: (wire, Inbox(wire.client)),  # type: ignore[arg-type, return-value]
        describe,
        folder,
        Start(lsn=START, witness=witness, silence_seconds=silence_seconds),
        budget,
    )


def relation(oid: int) -> bytes:
    return b"R" + struct.pack(">I", oid)


def insert(oid: int, value: bytes) -> bytes:
    """A row of one column."""
    column = b"t" + struct.pack(">i", len(value)) + value
    return b"I" + struct.pack(">I", oid) + b"N" + struct.pack(">h", 1) + column


@pytest.mark.parametrize(
    "budget", [Budget(rows=8, bytes=1024**3), Budget(rows=10**6, bytes=8 * len(insert(1, b"v")))]
)
def test_an_epoch_ends_with_the_transaction_that_fills_it(
    wire: Wire, tmp_path: Path, budget: Budget
):
    """E9, Mend c10: 20 transactions of a row are two epochs of 8 rows and one of what is left."""
    known = Relation(oid=1, table="t", columns=[], key=())
    wire.transaction(LAST)
    placed = [Witness(at=3000 + 100 * number, xid=number, time=number) for number in range(20)]
    for number, each in enumerate(placed):
        wire.transaction(each, *([relation(1)] if not number else []), insert(1, b"v"))
    wire.keep_alive(placed[-1].at + 10)
    read = reader(wire, tmp_path, budget=budget, describe=lambda message: known)
    wait_until(lambda: read.sent_lsn > placed[-1].at, PATIENCE_SECONDS, "all transactions")
    found = epochs(read.segments(), budget)
    assert [sum(segment.rows for segment in each) for each in found] == [8, 8, 4]
    assert [each[-1].upper for each in found] == [placed[n].at + 10 for n in (7, 15, 19)]
    assert read.full(START) and read.full(found[0][-1].upper)
    assert not read.full(found[1][-1].upper)
    read.close()


def test_reading_pauses_while_two_epochs_wait(wire: Wire, tmp_path: Path):
    """E14, Mend c10: a source that is faster than the lake fills no disk."""
    known = Relation(oid=1, table="t", columns=[], key=())
    budget = Budget(rows=4, bytes=1024**3)
    read = reader(wire, tmp_path, budget=budget, describe=lambda message: known)
    wire.transaction(LAST)
    for number in range(8):
        at = 3000 + 100 * number
        first = [relation(1)] if not number else []
        wire.transaction(Witness(at=at, xid=number, time=1), *first, insert(1, b"v"))
    wait_until(lambda: sum(s.rows for s in read.segments()) == 8, PATIENCE_SECONDS, "two epochs")
    assert read.paused()
    read.confirm(read.segments()[3].upper, LAST.at)
    assert not read.paused()
    wire.transaction(Witness(at=9000, xid=9, time=1), insert(1, b"v"))
    wait_until(lambda: sum(s.rows for s in read.segments()) == 9, PATIENCE_SECONDS, "the next row")
    read.close()


def refusal(read: WalReader) -> Exception:
    """What the reader ended with."""
    wait_until(lambda: read.failed is not None, PATIENCE_SECONDS, "the reader ends")
    assert read.failed is not None
    return read.failed


def test_history_goes_on_behind_the_witness(wire: Wire, tmp_path: Path):
    """Mend b1, P12: the witness comes first; positions name the newest one."""
    wire.keep_alive(900)
    truncate = b"T" + struct.pack(">ibI", 1, 0, 99)
    wire.transaction(LAST, b"M" + bytes(20), truncate)
    wire.keep_alive(2500)
    read = reader(wire, tmp_path)
    wait_until(lambda: bool(read.segments()), PATIENCE_SECONDS, "movement")
    (moved,) = read.segments()
    assert (moved.lower, moved.upper, moved.witness, moved.empty) == (START, 2500, LAST, True)
    newer = Witness(at=3000, xid=9, time=6_000_000)
    wire.transaction(newer)
    wait_until(lambda: read.segments()[-1].upper > 2500, PATIENCE_SECONDS, "the next transaction")
    assert read.segments()[-1].witness == newer
    read.close()
    assert {confirmed for _, confirmed in wire.told} <= {0, LAST.at}


@pytest.mark.parametrize(
    "found",
    [
        Witness(at=LAST.at, xid=8, time=LAST.time),
        Witness(at=LAST.at, xid=LAST.xid, time=LAST.time + 1),
        Witness(at=LAST.at + 8, xid=LAST.xid, time=LAST.time),
        Witness(at=START + 8, xid=11, time=9_000_000),
    ],
)
def test_another_transaction_than_the_witness(wire: Wire, tmp_path: Path, found: Witness):
    """Mend b1, P12: it differs in id, time or place, or lies behind the start already."""
    wire.transaction(found)
    error = refusal(reader(wire, tmp_path))
    assert isinstance(error, HistoryLost) and "history is not the one" in str(error)
    assert "copied anew" in str(error)


def test_log_that_passes_the_witness_without_it(wire: Wire, tmp_path: Path):
    """Mend b1, P12: a restored server on which only tables that nobody follows were written to."""
    wire.keep_alive(LAST.at)
    wire.keep_alive(LAST.at + 1)
    assert isinstance(refusal(reader(wire, tmp_path)), HistoryLost)


def test_transaction_between_the_witness_and_the_start(wire: Wire, tmp_path: Path):
    """Mend b1, P12: something is where the lake knows of nothing."""
    wire.transaction(LAST)
    wire.transaction(Witness(at=LAST.at + 100, xid=8, time=6_000_000))
    assert isinstance(refusal(reader(wire, tmp_path)), HistoryLost)


def test_start_without_a_witness(wire: Wire, tmp_path: Path):
    """Mend b1, P12: progress of an earlier version goes on, and has a witness from then on."""
    newer = Witness(at=START, xid=9, time=6_000_000)
    wire.transaction(newer)
    read = reader(wire, tmp_path, None)
    wait_until(lambda: bool(read.segments()), PATIENCE_SECONDS, "the transaction")
    assert read.segments()[-1].witness == newer
    read.close()


def test_server_that_asks_is_told_what_has_come(wire: Wire, tmp_path: Path):
    """Mend e2, P13: a server that shuts down asks until all is received."""
    read = reader(wire, tmp_path, None)
    wire.keep_alive(5000, reply=True)
    wait_until(lambda: (5000, 0) in wire.told, PATIENCE_SECONDS, "the answer")
    read.confirm(4000, 3000)
    wait_until(lambda: (5000, 3000) in wire.told, PATIENCE_SECONDS, "what is durable")
    read.close()
    assert {confirmed for _, confirmed in wire.told} == {0, START, 3000}


def test_server_that_goes_deaf_is_given_up(wire: Wire, tmp_path: Path):
    """Mend e3, P6: the connection stands, but nobody answers."""
    wire.keep_alive(900)
    error = refusal(reader(wire, tmp_path, silence_seconds=0.5))
    assert isinstance(error, SourceUnavailable) and "silent" in str(error)


def test_descriptors_above_1023(wire: Wire):
    """Mend e3, P6: a process with many open files can wait for its socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    high = fcntl.fcntl(wire.client.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)
    with socket.socket(fileno=high) as client:
        inbox = Inbox(client)
        assert not inbox.ready(0)
        wire.keep_alive(1)
        assert inbox.ready(PATIENCE_SECONDS)


def test_sockets_notice_a_host_that_is_gone():
    """Mend e3, P6: keep-alives and the user timeout, by default and as the DSN says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        plain = f"host=127.0.0.1 port={port} user=u sslmode=disable"
        for text, idle, timeout in ((plain, 30, 60_000), (plain + " keepalives_idle=7", 7, 60_000)):
            with connection._open_socket(parse_dsn(text)) as opened:
                assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
                assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == timeout
