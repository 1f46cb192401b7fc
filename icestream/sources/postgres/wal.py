"""The change stream: framed and spooled by the coordinator, decoded by workers.

    socket ──walk──► rows of whole messages ──by key hash──► segment file ──► WalSplit on a worker

The coordinator only finds out where each message begins, which transaction it belongs to and which
share of the keys it concerns; that is compiled code over whole buffers. Segments are Arrow files of
raw messages, cut at transaction ends. Nothing is acknowledged here but what the source was told is
durable, and the server's keep-alives are answered however long an epoch takes to be written.

A position is an LSN. A transaction belongs to the span `[lower, upper)` that its commit record
lies in, and the end of a commit record is a valid upper bound.

An LSN alone does not tell in which state the server is: a restored copy of it writes other changes
at the same places. So a position is remembered with its witness, the last transaction that came
before it. The server is told only that what comes before the witness is durable. It therefore
sends the witness once more at the next start, and nothing between it and the position. When
anything else comes, the server's history is not the lake's.
"""

import contextlib
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from icestream.errors import (
    Broken,
    DataRejected,
    HistoryLost,
    IcestreamError,
    SourceUnavailable,
)
from icestream.sources import Budget
from icestream.sources.postgres.changes import MOVED_IN, MOVED_OUT, Relation
from icestream.sources.postgres.connection import Connection, Inbox, lsn_text, server_error
from icestream.sources.postgres.framing import SHARES, State, Stop, gather, walk
from icestream.sources.postgres.spool import create_private, remove, written_later

log = logging.getLogger(__name__)

# Rows are written out when this much has gathered; a segment in shares can be decoded in parallel.
_BUFFER_BYTES = 32 * 1024**2
_BUFFER_ROWS = 1 << 18
# A segment below this is not worth being cut into shares.
_SHARED_BYTES_MIN = 4 * 1024**2
# An epoch is made of segments, so that it ends not long after it is full.
_SEGMENTS_PER_EPOCH = 4
# Full epochs that may wait: reading goes on while one of them is written.
_EPOCHS_WAITING = 2
_STATUS_SECONDS = 5.0
# The server is asked for an answer with every status; one that says nothing for so long is gone.
SILENCE_SECONDS = 120.0
_POLL_SECONDS = 0.2
_XIDS_KEPT = 1 << 16
_SPOOL_SCHEMA = pa.schema(
    [
        ("relation", pa.int32()),
        ("kind", pa.uint8()),
        ("at", pa.int64()),
        ("seq", pa.int64()),
        ("message", pa.large_binary()),
    ]
)
_EPOCH_2000 = 946_684_800
COPY_ANEW = (
    "Drop the slot if it is still there, drop the pipeline's Iceberg tables, and start again: all "
    "tables are copied anew."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A transaction that the server sent: its commit record's place, its id, its time in
    microseconds since 2000."""

    at: int
    xid: int
    time: int

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time / 1e6 + _EPOCH_2000, UTC)
        return f"transaction {self.xid} at {lsn_text(self.at)}, committed {when:%Y-%m-%d %H:%M:%S}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where reading goes on, and for how long the server may be silent before it is given up.

    With `adopts` the witness is not known, but must lie just where reading goes on.
    """

    lsn: int
    witness: Witness | None = None
    adopts: bool = False
    silence_seconds: float = SILENCE_SECONDS

    @property
    def begin(self) -> int:
        """From where on the server is asked to send."""
        return self.witness.at if self.witness else self.lsn

    def expects(self, found: Witness) -> bool:
        """Whether this transaction is the one that must come first."""
        return found.at == self.lsn if self.adopts else found == self.witness


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One record batch of a segment's file: a share of the keys, or all of them (-1)."""

    number: int
    share: int
    relations: frozenset[int]


@dataclass(slots=True, kw_only=True)
class Segment:
    """Whole transactions in a file; the unit in which the stream is handed on."""

    path: str
    lower: int
    upper: int = 0
    batches: list[Batch] = field(default_factory=list)
    bytes_by_relation: dict[int, int] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    truncated: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: int = 0
    first_committed_at: float = 0.0
    committed_at: float = 0.0
    witness: Witness | None = None

    @property
    def size_bytes(self) -> int:
        """The size of its messages."""
        return sum(self.bytes_by_relation.values())

    @property
    def empty(self) -> bool:
        """Whether the segment moves the frontier and nothing else."""
        return not self.batches and not self.truncated


def epochs(segments: Sequence[Segment], budget: Budget) -> list[list[Segment]]:
    """Segments in groups, each of which but the last is as much as an epoch may hold."""
    found: list[list[Segment]] = []
    for segment in segments:
        if found and not _full(found[-1], budget):
            found[-1].append(segment)
        else:
            found.append([segment])
    return found


def _full(segments: Sequence[Segment], budget: Budget) -> bool:
    rows, size = sum(each.rows for each in segments), sum(each.size_bytes for each in segments)
    return budget.spent(rows, size)


class WalReader:
    """Reads the stream in a thread of its own and hands out whole segments.

    `describe` turns a relation message into a `Relation`, or None for a table of no interest.
    Reading pauses when two full epochs wait: one that is written, and the next; what was asked to
    be read past does not count. The stream that `connect` opens begins where `start` says, and must
    show its witness before anything else. A server that says nothing for long ends the reading.
    """

    def __init__(
        self,
        connect: Callable[[], tuple[Connection, Inbox]],
        describe: Callable[[bytes], Relation | None],
        folder: Path,
        start: Start,
        budget: Budget,
    ):
        self.relations: list[Relation] = []
        self.sent_lsn = start.lsn
        self.first: Witness | None = None
        self._connect = connect
        self._describe = describe
        self._folder = folder
        self._budget = budget
        self._durable = start.lsn
        self._passed = start.lsn
        self._confirmed = start.begin
        self._start = start
        self._known: dict[int, int] = {}
        # A segment is closed only where the buffer is full.
        rows, size = (n // _SEGMENTS_PER_EPOCH for n in (budget.rows, budget.bytes))
        self._rows = np.empty((7, max(1, min(_BUFFER_ROWS, rows))), dtype=np.int64)
        self._content = np.empty(max(1, min(_BUFFER_BYTES, size)), dtype=np.uint8)
        self._state = np.zeros(len(State), dtype=np.int64)
        self._state[State.FLOOR] = start.lsn
        self._state[State.AWAITED] = start.begin if start.witness or start.adopts else 0
        self._xids = np.zeros(_XIDS_KEPT, dtype=np.int64)
        self._truncates: list[tuple[int, int, int]] = []
        self._seq = 0
        self._number = 0
        self._file: Any = None
        self._closed: deque[Segment] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self.failed: IcestreamError | None = None
        self._stopped = False
        self._open = self._new_segment(start.lsn)
        self._tables_changed()
        self._connection, self._inbox = connect()
        self._thread = threading.Thread(target=self._run, name="wal", daemon=True)
        self._thread.start()

    def segments(self) -> list[Segment]:
        """All whole transactions that have come, as closed segments, oldest first.

        They stay until `forget`. After a failure only what came before it is there.
        """
        with self._lock:
            if self.failed is None:
                try:
                    self._cut()
                except SourceUnavailable as error:
                    self._fail(error)
            return list(self._closed)

    def full(self, after: int) -> bool:
        """Whether as much has come after a position as an epoch may hold."""
        with self._lock:
            closed = [segment for segment in self._closed if segment.upper > after]
            rows = sum(segment.rows for segment in closed)
            size = sum(segment.size_bytes for segment in closed)
            if not self._state[State.TORN]:
                rows += self._open.rows + int(self._state[State.ROWS_WHOLE])
                size += self._open.size_bytes + int(self._state[State.BYTES])
            return self._budget.spent(rows, size)

    def paused(self) -> bool:
        """Whether so much waits that nothing more is read until some of it is durable."""
        with self._lock:
            # What is durable may be kept for a copy's round, which waits for what follows.
            taken = max(self._durable, self._passed)
            waiting = [segment for segment in self._closed if segment.upper > taken]
            found = epochs(waiting, self._budget)
            return sum(_full(each, self._budget) for each in found) >= _EPOCHS_WAITING

    def serves(self, start: int, until: int) -> bool:
        """Whether what follows `start`, at least up to `until`, is here or is still to come."""
        with self._lock:
            first = self._closed[0].lower if self._closed else self._open.lower
            last = self._closed[-1].upper if self._closed else 0
            return first <= start and (self.failed is None or (last > start and last >= until))

    def read_past(self, position: int) -> None:
        """Go on reading after a position, however much of what comes before it is kept."""
        with self._lock:
            self._passed = position
            self._wake.notify_all()

    def recent_xids(self) -> set[int]:
        """The transactions that were streamed last."""
        with self._lock:
            count = min(int(self._state[State.TRANSACTIONS]), _XIDS_KEPT)
            return {int(xid) for xid in self._xids[:count]}

    def confirm(self, durable: int, witness: int) -> None:
        """Everything before `durable` is committed: let the server forget what is before the
        witness of that."""
        with self._lock:
            self._durable = max(self._durable, durable)
            self._confirmed = max(self._confirmed, witness)
            self._wake.notify_all()

    def unwitnessed_bytes(self) -> int:
        """How much of the log has come since the last transaction that was sent."""
        with self._lock:
            last = int(self._state[State.LAST_LSN]) or self._start.lsn
            return max(0, self.sent_lsn - last)

    def forget(self, before: int) -> None:
        """Remove the files of segments that end at or before this position."""
        with self._lock:
            while self._closed and self._closed[0].upper <= before:
                remove(self._closed.popleft().path)
            self._wake.notify_all()

    def lose(self, error: SourceUnavailable) -> None:
        """Some of what has come cannot be read back: all of it must come again, by another one."""
        with self._lock:
            self._fail(error)
            self._remove_closed()

    def let_go(self) -> None:
        """End the connection, from any thread; what has come stays, and reading fails."""
        self._connection.close()

    def close(self) -> None:
        """Stop reading and remove the spool."""
        with self._lock:
            self._stopped = True
            self._wake.notify_all()
        self._connection.close()
        self._thread.join()
        with self._lock:
            self._drop_open()
            self._remove_closed()

    def _run(self) -> None:
        try:
            self._read()
        except IcestreamError as error:
            self._fail(error)
        except Exception as error:
            # Nobody would hear of it in this thread, and wait for the stream in vain.
            log.exception("the change stream broke")
            self._fail(Broken("the change stream broke", detail=f"{type(error).__name__}."))
        finally:
            self._connection.close()

    @property
    def _ended(self) -> bool:
        """Whether nothing more is to be read: whoever asked for segments may have failed."""
        return self._stopped or self.failed is not None

    def _fail(self, error: IcestreamError) -> None:
        with self._lock:
            if self.failed is not None:
                return
            if not self._stopped:
                log.warning("the change stream ended: %s", error)
            self.failed = error
            # Its last transaction may be cut short; it is read again from the last whole segment.
            self._drop_open()
            self._wake.notify_all()

    def _read(self) -> None:
        told = time.monotonic() - _STATUS_SECONDS
        confirmed = -1
        heard = time.monotonic()
        while True:
            with self._lock:
                if self._ended:
                    return
                full = self.paused()
                if full:
                    self._wake.wait(_POLL_SECONDS)
                due = time.monotonic() - told >= _STATUS_SECONDS
                moved, reply = self._confirmed != confirmed, bool(self._state[State.REPLY])
                confirmed = self._confirmed
            received = max(confirmed, int(self._state[State.SENT_LSN]))
            if moved:
                self._connection.send_status(received, confirmed, reply=False)
            if moved or due or reply:
                # One who does not say what is flushed is no synchronous standby, so that no client
                # waits for the lake. A server that shuts down waits until all is flushed, or, by
                # such a one, received. The slot keeps what it was told.
                self._connection.send_status(received, 0, reply=due)
                self._state[State.REPLY] = 0
            if due:
                told = time.monotonic()
            if full:
                heard = time.monotonic()
            elif self._inbox.ready(_POLL_SECONDS):
                self._inbox.fill()
                heard = time.monotonic()
                with self._lock:
                    self._take()
            elif time.monotonic() - heard > self._start.silence_seconds:
                raise SourceUnavailable(
                    "PostgreSQL is silent",
                    detail=f"Nothing came for {self._start.silence_seconds:.0f} s.",
                )

    def _take(self) -> None:
        """Take all whole messages out of the inbox."""
        while not self._ended:
            raw = self._inbox.view()
            buffer = (self._rows, self._content, self._xids)
            used, stop = walk(raw, self._state, self._walk_tables, buffer)
            self._inbox.consume(used)
            if stop == Stop.FULL:
                self._make_room(raw, used)
            elif stop == Stop.MESSAGE:
                self._message()
            elif stop == Stop.DAMAGED:
                raise self._damaged()
            elif stop == Stop.ENDED:
                self._refuse_end()
            else:
                break
        if self._ended:
            return
        if 0 < self._state[State.AWAITED] < self._state[State.SENT_LSN]:
            raise self._other_history("The server has no such transaction there.")
        if not self._state[State.INSIDE]:
            self.sent_lsn = max(self.sent_lsn, int(self._state[State.SENT_LSN]))

    def _message(self) -> None:
        """Handle a message that the walk leaves to us."""
        _, body = self._inbox.message()
        message = body[25:]
        kind = chr(message[0])
        try:
            if kind == "B":
                self._begin(message)
            elif kind == "R":
                self._relation(message)
            elif kind == "T":
                self._truncate(message)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise self._damaged() from error
        if kind not in "BRTYO":
            raise DataRejected(f"the change stream has a message {kind!r} that is not known")

    def _begin(self, message: bytes) -> None:
        """A transaction that must be the witness: it is awaited, or lies before the start."""
        at, when, xid = struct.unpack_from(">qqI", message, 1)
        found = Witness(at=at, xid=xid, time=when)
        if not self._start.expects(found) or not self._state[State.AWAITED]:
            raise self._other_history(f"The server has {found}.")
        self.first = found
        self._state[State.AWAITED] = 0
        self._state[State.COMMIT_LSN], self._state[State.XID] = at, xid
        self._state[State.INSIDE] = 1

    def _other_history(self, found: str) -> HistoryLost:
        if self._start.adopts:
            return HistoryLost(
                "the replication slot is not where this pipeline left it",
                detail=f"It stands at {lsn_text(self._start.lsn)}, past the position of the other "
                f"tables. {found} Someone moved it on or made it anew, and these tables may lack "
                "changes.",
                hint=COPY_ANEW,
            )
        known = f"The lake is at {lsn_text(self._start.lsn)}"
        if self._start.witness is not None:
            known += f", where the last change was {self._start.witness}"
        return HistoryLost(
            "PostgreSQL's history is not the one that the lake was made from",
            detail=f"{known}. {found} The server was restored from an older copy, or was promoted "
            "before it had everything: the lake may hold rows that the server never had.",
            hint=COPY_ANEW,
        )

    def _damaged(self) -> DataRejected:
        """The error for a message that is shorter than what it says it holds."""
        at = int(self._state[State.COMMIT_LSN])
        return DataRejected(
            "a message of the change stream is damaged",
            detail="The transaction that it lies in, or follows, is committed at "
            f"{at >> 32:X}/{at & 0xFFFF_FFFF:X}.",
            hint="Nothing of it was committed. Start again; if it stays so, something between "
            "icestream and PostgreSQL changes the stream.",
        )

    def _refuse_end(self) -> None:
        kind, body = self._inbox.message()
        if kind == ord("E"):
            fields = {p[:1].decode(): p[1:].decode(errors="replace") for p in body.split(b"\0")}
            if fields.get("C") in ("42704", "55000", "58P01"):
                raise HistoryLost(
                    "PostgreSQL no longer serves the change stream",
                    detail=f"{fields.get('M')}.",
                    hint="See `icestream check` for what is missing.",
                )
            raise server_error(fields, "PostgreSQL ended the change stream")
        raise SourceUnavailable("PostgreSQL ended the change stream")

    def _relation(self, message: bytes) -> None:
        oid = struct.unpack_from(">I", message, 1)[0]
        relation = self._describe(message)
        if relation is None:
            self._known[oid] = -1
        else:
            self.relations.append(relation)
            self._known[oid] = len(self.relations) - 1
        self._tables_changed()

    def _tables_changed(self) -> None:
        """Rebuild what the walk knows of relations."""
        oids = sorted(self._known)
        slots = [self._known[oid] for oid in oids]
        keys = [self.relations[slot].key if slot >= 0 else () for slot in slots]
        self._walk_tables = (
            np.array(oids, dtype=np.int64),
            np.array(slots, dtype=np.int64),
            np.cumsum([0, *(len(key) for key in keys)]).astype(np.int64),
            np.array([number for key in keys for number in key], dtype=np.int64),
        )

    def _truncate(self, message: bytes) -> None:
        if self._state[State.COMMIT_LSN] < self._state[State.FLOOR]:
            return
        count = struct.unpack_from(">i", message, 1)[0]
        oids = struct.unpack_from(f">{count}I", message, 6)
        at = int(self._state[State.COMMIT_LSN])
        # Rows that came so far are older, those that follow are newer.
        seq = self._seq + int(self._state[State.ROWS])
        for oid in oids:
            slot = self._known.get(oid, -1)
            if slot >= 0:
                self._truncates.append((slot, at, seq))

    def _make_room(self, raw: np.ndarray, used: int) -> None:
        """Write rows out, and close the segment when it is large enough."""
        state = self._state
        if state[State.ROWS_WHOLE]:
            self._flush(int(state[State.ROWS_WHOLE]), closing=False)
            rows, size = _SEGMENTS_PER_EPOCH * self._open.rows, self._open.size_bytes
            if self._budget.spent(rows, _SEGMENTS_PER_EPOCH * size):
                self._cut()
        elif state[State.ROWS]:
            # The open transaction is larger than the buffer: what came before it goes on alone.
            self._cut()
            self._flush(int(state[State.ROWS]), closing=False)
            state[State.TORN] = 1
        else:
            needed = int.from_bytes(raw[used + 1 : used + 5].tobytes())
            self._content = np.empty(max(needed, 2 * self._content.size), dtype=np.uint8)

    def _cut(self) -> None:
        """Close the segment after the last whole transaction, if there is anything to close."""
        state = self._state
        if state[State.TORN]:
            return
        upper = int(state[State.END_LSN])
        if not state[State.INSIDE]:
            upper = max(upper, self.sent_lsn)
        segment = self._open
        if upper <= segment.lower:
            return
        if state[State.ROWS_WHOLE]:
            self._flush(int(state[State.ROWS_WHOLE]), closing=True)
        if self._file is not None:
            with written_later(self._folder):
                self._file.close()
            self._file = None
        segment.truncated = {slot: (at, seq) for slot, at, seq in self._truncates if at < upper}
        self._truncates = [each for each in self._truncates if each[1] >= upper]
        segment.upper = upper
        if state[State.LAST_LSN]:
            last = (State.LAST_LSN, State.LAST_XID, State.TIME)
            at, xid, when = (int(state[each]) for each in last)
            segment.witness = Witness(at=at, xid=xid, time=when)
        segment.committed_at = float(state[State.TIME]) / 1e6 + _EPOCH_2000
        first = state[State.FIRST_TIME] or state[State.TIME]
        segment.first_committed_at = float(first) / 1e6 + _EPOCH_2000
        state[State.FIRST_TIME] = 0
        if segment.empty and self._closed and self._closed[-1].empty:
            # Nothing but movement: one segment that says so is enough.
            segment.lower = self._closed.pop().lower
        self._closed.append(segment)
        self._open = self._new_segment(upper)

    def _flush(self, count: int, closing: bool) -> None:
        """Write the first rows of the buffer to the segment's file and keep the rest."""
        rows, used = self._rows, int(self._state[State.BYTES])
        total = int(self._state[State.ROWS])
        size = int(rows[3, count]) if count < total else used
        # In an epoch with other segments, it would keep these from being decoded in parallel.
        alone = not self._open.batches and all(each.empty for each in self._closed)
        small = closing and alone and size < _SHARED_BYTES_MIN
        if self._file is None:
            with written_later(self._folder):
                create_private(self._open.path)
                self._file = pa.ipc.new_file(self._open.path, _SPOOL_SCHEMA)
        self._write_batches(rows[:, :count], self._content[:size], 1 if small else SHARES)
        self._seq += count
        self._open.rows += count
        rest = total - count
        rows[:, :rest] = rows[:, count:total].copy()
        rows[3, :rest] -= size
        self._content[: used - size] = self._content[size:used].copy()
        self._state[State.ROWS] = rest
        self._state[State.ROWS_WHOLE] = max(0, int(self._state[State.ROWS_WHOLE]) - count)
        self._state[State.BYTES] = used - size

    def _write_batches(self, rows: np.ndarray, content: np.ndarray, shares: int) -> None:
        slot, kind, at, start, length, share, moved = rows
        numbers = np.arange(len(slot), dtype=np.int64)
        leaving = moved >= 0
        order = np.concatenate([numbers, numbers[leaving]])
        kinds = np.concatenate(
            [np.where(leaving, MOVED_IN, kind), np.full(int(leaving.sum()), MOVED_OUT)]
        )
        target = np.concatenate([share, moved[leaving]]) if shares > 1 else np.zeros(len(order))
        self._open.moved.update(int(each) for each in np.unique(slot[leaving]))
        for each in np.unique(slot):
            size = int(length[slot == each].sum())
            known = self._open.bytes_by_relation
            known[int(each)] = known.get(int(each), 0) + size
        for number in np.unique(target):
            chosen = np.flatnonzero(target == number)
            # Within a share changes stay in the order in which they came.
            chosen = chosen[np.argsort(order[chosen], kind="stable")]
            picked = order[chosen]
            batch = _spool_batch(
                slot[picked],
                kinds[chosen],
                at[picked],
                self._seq + picked,
                _messages(content, start[picked], length[picked]),
            )
            with written_later(self._folder):
                self._file.write_batch(batch)
            self._open.batches.append(
                Batch(
                    number=len(self._open.batches),
                    share=int(number) if shares > 1 else -1,
                    relations=frozenset(int(each) for each in np.unique(slot[picked])),
                )
            )

    def _new_segment(self, lower: int) -> Segment:
        self._number += 1
        return Segment(path=str(self._folder / f"{self._number:08d}.arrow"), lower=lower)

    def _drop_open(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # A file that could not be written cannot be closed well either; it is removed.
            with contextlib.suppress(OSError):
                file.close()
        remove(self._open.path)

    def _remove_closed(self) -> None:
        for segment in self._closed:
            remove(segment.path)
        self._closed.clear()


def _messages(content: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Pieces of a buffer as an Arrow column."""
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = np.empty(int(offsets[-1]), dtype=np.uint8)
    gather(content, starts, lengths, out)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.large_binary(), len(starts), buffers)


def _spool_batch(
    relation: np.ndarray, kind: np.ndarray, at: np.ndarray, seq: np.ndarray, messages: pa.Array
) -> pa.RecordBatch:
    columns = [
        pa.array(relation.astype(np.int32)),
        pa.array(kind.astype(np.uint8)),
        pa.array(at),
        pa.array(seq),
        messages,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SPOOL_SCHEMA)
