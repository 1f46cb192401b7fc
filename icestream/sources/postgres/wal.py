"""The change stream: framed and spooled by the coordinator, decoded by workers.

    socket ──walk──► rows of whole messages ──by key hash──► segment file ──► WalSplit on a worker

The coordinator only finds out where each message begins, which transaction it belongs to and which
share of the keys it concerns; that is compiled code over whole buffers. Segments are Arrow files of
raw messages, cut at transaction ends. Nothing is acknowledged here but what the source was told is
durable, and the server's keep-alives are answered however long an epoch takes to be written.

A position is an LSN. A transaction belongs to the span `[lower, upper)` that its commit record
lies in, and the end of a commit record is a valid upper bound. It is remembered with its
`witness`.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from icestream.errors import (
    Broken,
    DataRejected,
    HistoryLost,
    IcestreamError,
    SourceUnavailable,
)
from icestream.sources import Budget
from icestream.sources.postgres.changes import Relation
from icestream.sources.postgres.connection import Connection, Inbox, server_error
from icestream.sources.postgres.framing import State, Stop, walk
from icestream.sources.postgres.segments import Segment, SegmentWriter, epochs, fills_epoch
from icestream.sources.postgres.witness import StreamStart, Witness
from icestream.sources.spool import Spool

log = logging.getLogger(__name__)

# Full epochs that may wait: reading goes on while one of them is written.
_EPOCHS_WAITING = 2
_STATUS_SECONDS = 5.0
_POLL_SECONDS = 0.2
_XIDS_KEPT = 1 << 16


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
        spool: Spool,
        start: StreamStart,
        budget: Budget,
    ):
        self.relations: list[Relation] = []
        self.sent_lsn = start.lsn
        self.first: Witness | None = None
        self._connect = connect
        self._describe = describe
        self._budget = budget
        self._durable = start.lsn
        self._passed = start.lsn
        self._confirmed = start.begin
        self._start = start
        self._known: dict[int, int] = {}
        self._written = SegmentWriter(spool, start.lsn, budget)
        self._state = self._written.state
        self._state[State.FLOOR] = start.lsn
        self._state[State.AWAITED] = start.begin if start.witness or start.adopts else 0
        self._xids = np.zeros(_XIDS_KEPT, dtype=np.int64)
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self.failed: IcestreamError | None = None
        self._stopped = False
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
                    self._written.cut(self.sent_lsn)
                except SourceUnavailable as error:
                    self._fail(error)
            return list(self._written.closed)

    def full(self, after: int) -> bool:
        """Whether as much has come after a position as an epoch may hold."""
        with self._lock:
            return self._written.full(after)

    def paused(self) -> bool:
        """Whether so much waits that nothing more is read until some of it is durable."""
        with self._lock:
            # What is durable may be kept for a copy's round, which waits for what follows.
            taken = max(self._durable, self._passed)
            waiting = [segment for segment in self._written.closed if segment.upper > taken]
            found = epochs(waiting, self._budget)
            return sum(fills_epoch(each, self._budget) for each in found) >= _EPOCHS_WAITING

    def serves(self, start: int, until: int) -> bool:
        """Whether what follows `start`, at least up to `until`, is here or is still to come."""
        with self._lock:
            last = self._written.upper
            comes = self.failed is None or (last > start and last >= until)
            return self._written.lower <= start and comes

    def may_have_reached(self, position: int) -> bool:
        """Whether it makes sense to look for a position in `segments`, which closes the open one.

        Many small segments would be read by one worker, and be as many files of the spool.
        """
        with self._lock:
            come = max(self.sent_lsn, int(self._state[State.END_LSN]))
            return self.failed is not None or come >= position

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
            self._written.forget(before)
            self._wake.notify_all()

    def lose(self, error: SourceUnavailable) -> None:
        """Some of what has come cannot be read back: all of it must come again, by another one."""
        with self._lock:
            self._fail(error)
            self._written.remove_closed()

    def let_go(self) -> None:
        """End the connection, from any thread; what has come stays, and reading fails."""
        self._connection.close()

    def close(self) -> None:
        """Stop reading and remove what has come."""
        with self._lock:
            self._stopped = True
            self._wake.notify_all()
        self._connection.close()
        self._thread.join()
        with self._lock:
            self._written.drop_open()
            self._written.remove_closed()

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
            self._written.drop_open()
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
            buffer = (self._written.rows, self._written.content, self._xids)
            used, stop = walk(raw, self._state, self._walk_tables, buffer)
            self._inbox.consume(used)
            if stop == Stop.FULL:
                needed = int.from_bytes(raw[used + 1 : used + 5].tobytes())
                self._written.make_room(needed, self.sent_lsn)
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
            raise self._start.other_history("The server has no such transaction there.")
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
            raise self._start.other_history(f"The server has {found}.")
        self.first = found
        self._state[State.AWAITED] = 0
        self._state[State.COMMIT_LSN], self._state[State.XID] = at, xid
        self._state[State.INSIDE] = 1

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
        numbers = [self._known[oid] for oid in oids]
        keys = [self.relations[number].key if number >= 0 else () for number in numbers]
        self._walk_tables = (
            np.array(oids, dtype=np.int64),
            np.array(numbers, dtype=np.int64),
            np.cumsum([0, *(len(key) for key in keys)]).astype(np.int64),
            np.array([number for key in keys for number in key], dtype=np.int64),
        )

    def _truncate(self, message: bytes) -> None:
        if self._state[State.COMMIT_LSN] < self._state[State.FLOOR]:
            return
        count = struct.unpack_from(">i", message, 1)[0]
        oids = struct.unpack_from(f">{count}I", message, 6)
        numbers = [self._known.get(oid, -1) for oid in oids]
        self._written.truncate([number for number in numbers if number >= 0])
