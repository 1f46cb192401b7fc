"""The change stream's reader over a socket: what it takes, and what it refuses to go on from."""

import fcntl
import itertools
import pickle
import resource
import shutil
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from icestream.epoch import Epoch
from icestream.errors import HistoryLost, SourceUnavailable
from icestream.frontier import Frontier
from icestream.sources import Budget, SplitsLost
from icestream.sources.postgres import connection, stream
from icestream.sources.postgres.changes import Relation, RelationColumn, WalSplit
from icestream.sources.postgres.connection import Connection, Inbox, parse_dsn
from icestream.sources.postgres.copies import Copies
from icestream.sources.postgres.run import PostgresRun
from icestream.sources.postgres.segments import epochs
from icestream.sources.postgres.server import Server
from icestream.sources.postgres.slot import ReplicationSlot, Slot
from icestream.sources.postgres.source import PostgresOptions, PostgresSource
from icestream.sources.postgres.stream import ChangeStream
from icestream.sources.postgres.tables import PgTable
from icestream.sources.postgres.values.kinds import PgType
from icestream.sources.postgres.wal import WalReader
from icestream.sources.postgres.witness import StreamStart, Witness
from icestream.sources.spool import SpoolUnreadable
from icestream.sources.spool.local import LocalSpool
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
        LocalSpool(str(folder), "p"),
        StreamStart(lsn=START, witness=witness, silence_seconds=silence_seconds),
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


def test_a_segment_tells_when_its_oldest_change_was_committed(wire: Wire, tmp_path: Path):
    """E15: the first transaction with rows counts, however many follow and whatever came before."""
    known = Relation(oid=1, table="t", columns=[], key=())
    read = reader(wire, tmp_path, describe=lambda message: known)
    wire.transaction(LAST)
    # A message of somebody's, which is no change.
    wire.transaction(Witness(at=3000, xid=8, time=10_000_000))
    for number, rows in ((20, 2), (30, 1)):
        placed = Witness(at=3000 + number, xid=number, time=number * 1_000_000)
        wire.transaction(placed, relation(1), *([insert(1, b"v")] * rows))
    wire.keep_alive(3100)
    wait_until(lambda: read.sent_lsn == 3100, PATIENCE_SECONDS, "both transactions")
    in_2000 = 946_684_800
    first = next(segment for segment in read.segments() if segment.rows)
    assert (first.first_committed_at, first.committed_at) == (in_2000 + 20, in_2000 + 30)
    wire.transaction(Witness(at=3200, xid=40, time=40_000_000), insert(1, b"v"))
    wire.keep_alive(3300)
    wait_until(lambda: read.sent_lsn == 3300, PATIENCE_SECONDS, "the last transaction")
    assert read.segments()[-1].first_committed_at == in_2000 + 40
    read.close()


def test_the_content_of_a_message_is_not_held(wire: Wire, tmp_path: Path):
    """E14, Mend e2: another client's message of 64 MB takes no memory; what follows it comes.

    Nothing but the transaction around a message counts.
    """
    known = Relation(oid=1, table="t", columns=[], key=())
    read = reader(wire, tmp_path, describe=lambda message: known)
    wire.transaction(LAST)
    wire.keep_alive(2500)
    # Compiled code takes memory of its own when it is first used.
    wait_until(lambda: read.sent_lsn == 2500, PATIENCE_SECONDS, "the beginning")
    piece, pieces = bytes(1024**2), 64
    placed = Witness(at=3000, xid=8, time=1)
    head = b"w" + struct.pack(">qqq", 0, 0, 0)
    message = b"M" + struct.pack(">bq", 1, 0) + b"other\0" + struct.pack(">i", len(piece) * pieces)
    size = len(head) + len(message) + len(piece) * pieces
    tracemalloc.start()
    try:
        wire.write(b"B" + struct.pack(">qqI", placed.at, placed.time, placed.xid))
        wire.server.sendall(b"d" + struct.pack(">i", size + 4) + head + message)
        for _ in range(pieces):
            wire.server.sendall(piece)
        wire.write(relation(1))
        wire.write(insert(1, b"v"))
        wire.write(b"C" + struct.pack(">bqqq", 0, placed.at, placed.at + 10, placed.time))
        wire.keep_alive(3100)
        wait_until(lambda: read.sent_lsn == 3100, PATIENCE_SECONDS, "the transaction")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(segment.rows for segment in read.segments()) == 1
    assert most < 8 * len(piece)
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


def adopting(wire: Wire, folder: Path) -> WalReader:
    """A reader that goes on from a slot at START and does not know the transaction there."""
    return WalReader(
        lambda: (wire, Inbox(wire.client)),  # type: ignore[arg-type, return-value]
        lambda message: Relation(oid=1, table="t", columns=[], key=()),
        LocalSpool(str(folder), "p"),
        StreamStart(lsn=START, adopts=True),
        SMALL,
    )


def test_slot_that_stands_at_a_transaction_is_adopted(wire: Wire, tmp_path: Path):
    """E7, Mend of 018: the transaction is the witness from then on; its own rows come too."""
    there = Witness(at=START, xid=9, time=6_000_000)
    wire.transaction(there, relation(1), insert(1, b"v"))
    wire.keep_alive(START + 10)
    read = adopting(wire, tmp_path)
    wait_until(lambda: bool(read.segments()), PATIENCE_SECONDS, "the transaction")
    assert read.first == read.segments()[-1].witness == there
    assert read.segments()[0].rows == 1
    read.close()


@pytest.mark.parametrize("at", [START - 8, START + 8])
def test_slot_that_stands_elsewhere_is_refused(wire: Wire, tmp_path: Path, at: int):
    """E7, Mend of 018: the first transaction that comes lies before or behind the slot's place."""
    wire.transaction(Witness(at=at, xid=9, time=6_000_000))
    error = refusal(adopting(wire, tmp_path))
    assert isinstance(error, HistoryLost) and "not where this pipeline left it" in str(error)


def test_log_that_passes_the_slot_without_a_transaction(wire: Wire, tmp_path: Path):
    """E7, Mend of 018: a keep-alive behind the slot's place says that nothing is there."""
    wire.keep_alive(START)
    wire.keep_alive(START + 1)
    assert isinstance(refusal(adopting(wire, tmp_path)), HistoryLost)


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


# --- the source waits for its reader ------------------------------------------------------------

WAL = "wal one"
ONE = Relation(
    table="public.one",
    oid=99,
    columns=[RelationColumn(name="id", type=PgType(oid=23, name="int4"), typmod=-1)],
    key=[0],
)
TABLE = PgTable(
    name=ONE.table,
    oid=ONE.oid,
    schema="public",
    relation="one",
    columns=ONE.columns,
    key=["id"],
    leaves=[],
)
RELATION = b"R" + struct.pack(">I", ONE.oid) + b"public\0one\0d" + struct.pack(">h", 1)
RELATION += b"\1id\0" + struct.pack(">Ii", 23, -1)
INSERT = b"I" + struct.pack(">I", ONE.oid) + b"N" + struct.pack(">hciI", 1, b"b", 4, 7)


NO_ROOM = "No space left on device."
EPOCH = Epoch(number=1, lower=Frontier({WAL: (START,)}), upper=Frontier({WAL: (2510,)}))


class WiredSlot(ReplicationSlot):
    """A slot of which only the log's end is real."""

    log_end = 1_000_000

    def look(self) -> Slot:
        return Slot(
            name="s",
            confirmed=0,
            log_end=self.log_end,
            sender_seconds=0.0,
            active=False,
            wal_status="reserved",
            plugin="pgoutput",
            lag_bytes=0,
            safe_bytes=None,
        )


class WiredServer(Server):
    """A server that only its wires and its slot are real of."""

    def __init__(self, *about: Any):
        super().__init__(*about)
        self.slot = WiredSlot(self.dsn, "s")

    def mark(self) -> int:
        return 0


class WiredRun(PostgresRun):
    """A run that counts the looks at what has come."""

    looks = 0

    def pause(self) -> None:
        self.looks += 1
        super().pause()


class WiredStream(ChangeStream):
    """A stream whose connections are wires, one after the other."""

    wires: list[Wire]

    def _connect(self, start: int) -> tuple[Connection, Inbox]:
        wire = self.wires.pop(0)
        return wire, Inbox(wire.client)  # type: ignore[return-value]

    def _describe(self, message: bytes) -> Relation | None:
        return ONE


class WiredSource(PostgresSource):
    """A source whose streams are wires, one after the other."""

    def __init__(self, folder: Path, *wires: Wire, budget: Budget = SMALL):
        options = PostgresOptions(
            dsn="postgresql://u@nowhere/db", tables=["public.one"], spool=str(folder)
        )
        super().__init__(options, "p", budget)
        run = WiredRun(**{each.name: getattr(self._run, each.name) for each in fields(self._run)})
        run.server = WiredServer(parse_dsn(options.dsn), "p", "", "")
        run.tables.identity = "one"
        run.tables.by_name = {ONE.table: TABLE}
        self._run = run
        # Nobody looks at the slot from time to time.
        self.stream = self._stream = WiredStream(run, lambda _: None, lambda: None)
        self.stream.wires = list(wires)
        self._copies = Copies(run, self.stream)

    @property
    def looks(self) -> int:
        """How often it has looked again at what has come."""
        return self._run.looks

    def has(self, upper: int) -> bool:
        """Whether its reader has come to a position."""
        reader = self.stream._reader
        found = reader.segments() if reader else []
        return bool(found) and found[-1].upper >= upper

    def reach(self, upper: int) -> None:
        """Ask for the parts of an epoch that begins at START and was minted by an earlier run."""
        bounds = (Frontier({WAL: (START,)}), Frontier({WAL: (upper,)}))
        epoch = Epoch(number=1, lower=bounds[0], upper=bounds[1])
        if not self.stream.reading:
            # As `available`, which is asked first, has done.
            self.stream.read((START,))
        self.plan(epoch)
        segments = self.stream._between(START, upper)
        assert segments[0].lower <= START and segments[-1].upper >= upper


@pytest.fixture
def hours_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the source an hour passes between two looks at the clock; for the reader it does not."""
    hours = itertools.count(0, 3600)
    clock: Any = SimpleNamespace(**vars(time))
    clock.monotonic = lambda: float(next(hours))
    monkeypatch.setattr(stream, "time", clock)  # a real wait of hours would take hours


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)


def slowly(wire: Wire, source: WiredSource) -> None:
    """A transaction that comes row by row; the source looks again and again before it is whole."""
    found = Witness(at=3000, xid=9, time=6_000_000)
    wire.write(b"B" + struct.pack(">qqI", found.at, found.time, found.xid))
    wire.write(RELATION)
    for _ in range(5):
        wire.write(INSERT)
        looked = source.looks
        wait_until(lambda: source.looks > looked, PATIENCE_SECONDS, "another look")  # noqa: B023
    wire.write(b"C" + struct.pack(">bqqq", 0, found.at, found.at + 10, found.time))


def test_epoch_that_comes_slowly_is_waited_for(wire: Wire, tmp_path: Path, hours_fly: None):
    """E3, Mend c6: no clock ends the wait for an epoch that some tables carry already."""
    source = WiredSource(tmp_path, wire)
    with meanwhile(lambda: slowly(wire, source)):
        source.reach(3010)
    source.close()


def transactions_one_by_one(wire: Wire, source: WiredSource) -> None:
    """Five transactions; the source looks again between them."""
    for number in range(5):
        found = Witness(at=3000 + 100 * number, xid=9 + number, time=6_000_000)
        wire.write(b"B" + struct.pack(">qqI", found.at, found.time, found.xid))
        if number == 0:
            wire.write(RELATION)
        wire.write(INSERT)
        wire.write(b"C" + struct.pack(">bqqq", 0, found.at, found.at + 10, found.time))
        looked = source.looks
        if number < 4:
            wait_until(lambda: source.looks > looked, PATIENCE_SECONDS, "a look")  # noqa: B023


def test_epoch_that_comes_slowly_is_not_cut_at_each_look(wire: Wire, tmp_path: Path):
    """P5, E14: small segments are read by one worker, and each is a file of the spool."""
    source = WiredSource(tmp_path, wire)
    with meanwhile(lambda: transactions_one_by_one(wire, source)):
        source.reach(3410)
    assert len(source.stream._segments) == 1
    source.close()


def test_stream_that_comes_slowly_is_waited_for(wire: Wire, tmp_path: Path, hours_fly: None):
    """E3, Mend c6: nor does one end the wait for what follows."""
    source = WiredSource(tmp_path, wire)
    at = Frontier({WAL: (START,)})
    source.stream.read(at[WAL])
    with meanwhile(lambda: slowly(wire, source)):
        (bound,) = source.stream.bounds(at, 3000)
    assert bound[WAL][0] == 3010
    source.close()


def test_server_that_falls_silent_ends_the_wait(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """P6, Mend c6: a wait without a clock is not one without an end."""
    monkeypatch.setattr(stream, "SILENCE_SECONDS", 0.5)  # the real silence is two minutes
    source = WiredSource(tmp_path, wire)
    with pytest.raises(SourceUnavailable, match="silent"):
        source.reach(3010)
    source.close()


def test_wait_ends_when_the_run_is_stopped(wire: Wire, tmp_path: Path):
    """P13, Mend c6: within a moment."""
    source = WiredSource(tmp_path, wire)
    source.interrupt()
    with pytest.raises(SourceUnavailable, match="stopped"):
        source.reach(3010)
    source.close()


def test_epoch_beyond_the_log_of_the_server(wire: Wire, tmp_path: Path):
    """P12, Mend c6: a restored server that answers but will never come there is not waited for."""
    source = WiredSource(tmp_path, wire)
    with pytest.raises(HistoryLost, match="log ends at"):
        source.reach(WiredSlot.log_end + 1)
    source.close()


def full_disk(source: WiredSource) -> Path:
    """The spool's folder, where the next file finds no room; once it is removed there is some."""
    folder = Path(source.stream._ready_spool().where)
    (folder / "00000001.arrow").symlink_to("/dev/full")
    return folder


@pytest.mark.parametrize("budget", [SMALL, Budget(rows=1, bytes=1)])
def test_full_spool_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture, budget: Budget):
    """E13 E3, Mend F4: the folder, the reason and the way out are told, whoever finds no room, the
    reader or the one who asks. Another reader brings everything once there is room again."""
    cut, whole = Wire(), Wire()
    source = WiredSource(tmp_path, cut, whole, budget=budget)
    folder = full_disk(source)
    placed = [Witness(at=at, xid=at, time=at) for at in (2500, 3000)]
    for wire in (cut, whole):
        for each in placed:
            wire.transaction(each, RELATION, INSERT)
    source.stream.read((START,))
    reader = source.stream._reader
    assert reader is not None

    def ended() -> bool:
        return not reader.segments() and reader.failed is not None

    wait_until(ended, PATIENCE_SECONDS, "no room")
    failed = reader.failed
    assert isinstance(failed, SourceUnavailable) and failed.detail == NO_ROOM
    assert failed.message == f"could not write the spool in {folder}"
    assert "`spool`" in str(failed.hint)
    assert not list(folder.glob("*.arrow"))
    source.reach(3010)
    assert sum(segment.rows for segment in source.stream._between(START, 3010)) == 2
    source.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_full_spool_when_the_run_ends(wire: Wire, tmp_path: Path):
    """E13, Mend F4: what cannot be written cannot be closed well either, and that is no error."""
    source = WiredSource(tmp_path, wire)
    full_disk(source)
    wire.transaction(Witness(at=2500, xid=8, time=8), RELATION, INSERT)
    with pytest.raises(SourceUnavailable, match="could not write the spool"):
        source.reach(2510)
    source.close()
    assert list(tmp_path.iterdir()) == []


def test_spool_that_is_removed_is_made_again(tmp_path: Path):
    """E13, Mend F4: workers do not find what they shall read; it is told once, then read again."""
    first, again = Wire(), Wire()
    source = WiredSource(tmp_path, first, again)
    for wire in (first, again):
        wire.transaction(Witness(at=2500, xid=8, time=8), RELATION, INSERT)
    source.reach(2510)
    (split,) = source.plan(EPOCH).parts
    assert isinstance(split, WalSplit)
    shutil.rmtree(Path(source.stream._ready_spool().where))
    with pytest.raises(SpoolUnreadable, match="could not read") as lost:
        list(split._rows())
    source.give_up(pickle.loads(pickle.dumps(lost.value)))
    with pytest.raises(SourceUnavailable, match="could not read") as told:
        source.available(EPOCH.lower)
    assert not isinstance(told.value, SplitsLost) and "No such file" in str(told.value.detail)
    source.stream.read((START,))
    source.reach(2510)
    (split,) = source.plan(EPOCH).parts
    assert isinstance(split, WalSplit)
    assert sum(len(rows.kind) for rows in split._rows()) == 1
    source.close()


def test_slot_past_the_lake_is_told_without_naming_who_moved_it(tmp_path: Path):
    """E7, Mend F7b: icestream itself moved it when a table was rolled back after its epoch."""
    source = WiredSource(tmp_path)
    slot = replace(source._run.server.slot.look(), confirmed=0x2000)
    with pytest.raises(HistoryLost) as refused:
        source._run.server.slot.require_history(slot, 0x1500, 0x1000)
    assert "stands at 0/2000, past 0/1000" in refused.value.detail
    assert "rolled back" in refused.value.detail and "someone else" in refused.value.detail
    source.close()


def test_reader_that_died_is_not_asked_again(tmp_path: Path):
    """E3, Mend c6: the same epoch is read by another one, from its beginning."""
    cut, whole = Wire(), Wire()
    source = WiredSource(tmp_path, cut, whole)
    early = Witness(at=2500, xid=8, time=5_500_000)
    late = Witness(at=3000, xid=9, time=6_000_000)
    cut.transaction(early, RELATION, INSERT)
    cut.server.close()
    for each in (early, late):
        whole.transaction(each, RELATION, INSERT)
    # The reader ends before it is asked, or meanwhile: then whoever asks tries again.
    with suppress(SourceUnavailable):
        source.reach(3010)
    source.reach(3010)
    # What has come stays good although its reader is dead.
    whole.server.close()
    wait_until(
        lambda: source.stream._reader.failed is not None, PATIENCE_SECONDS, "the reader ends"
    )
    source.stream._segments = []
    source.reach(3010)
    source.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda source: source.reach(9000),
        lambda source: source.stream.bounds(Frontier({WAL: (6000,)}), 9000),
    ],
)
def test_epoch_larger_than_the_spool_may_be(
    wire: Wire, tmp_path: Path, ask: Callable[[WiredSource], object]
):
    """E3, Mend c6: reading pauses when much is waiting, but not before the end of what is asked
    for, nor for what was taken and not yet acknowledged."""
    source = WiredSource(tmp_path, wire, budget=Budget(rows=1, bytes=1))
    source.stream.read((START,))
    for number in (1, 2):
        wire.transaction(Witness(at=3000 * number - 10, xid=1, time=1), RELATION, INSERT)
        wait_until(lambda: source.has(3000 * number), PATIENCE_SECONDS, "it comes")  # noqa: B023
    assert source.stream._reader is not None and source.stream._reader.paused()
    # What is told from now on is told by a reader that has noticed.
    source.stream._reader.confirm(START, START + 1)
    wait_until(
        lambda: any(confirmed == START + 1 for _, confirmed in wire.told),
        PATIENCE_SECONDS,
        "the pause",
    )
    wire.transaction(Witness(at=8990, xid=3, time=3), RELATION, INSERT)
    with meanwhile(lambda: ask(source)):
        wait_until(lambda: source.has(9000), PATIENCE_SECONDS, "what was asked for")
    source.close()
