"""The stream of changes as the loop sees it: where epochs can end, and what is in each.

    reader (`wal`) ──► segments in the spool ──► bounds of epochs ──► splits by table and share

One reader is there at a time. One that has failed is replaced by another, which reads from the
beginning of what is not durable: the server still has it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from icestream.epoch import Epoch
from icestream.errors import IcestreamError, SourceUnavailable, check
from icestream.frontier import Frontier, Position
from icestream.sources import Split
from icestream.sources.postgres.changes import Relation, SpoolPart, TableAtServer, WalSplit
from icestream.sources.postgres.connection import Connection, Inbox
from icestream.sources.postgres.positions import position_after, with_witness, witness_of
from icestream.sources.postgres.relation_messages import TextNeeded, all_in_binary, described
from icestream.sources.postgres.run import PostgresRun
from icestream.sources.postgres.segments import Segment, epochs
from icestream.sources.postgres.slot import Slot
from icestream.sources.postgres.wal import WalReader
from icestream.sources.postgres.witness import SILENCE_SECONDS, StreamStart, Witness
from icestream.sources.spool import Spool, SpoolUnreadable

log = logging.getLogger(__name__)

_PROTOCOL = "1"
_SPLIT_BYTES = 64 * 1024**2
_SPLITS_MAX = 16
# The server keeps its log from the witness on. When this much has come since the last transaction
# that was sent, because other tables are busy, a message of our own becomes the witness.
_UNWITNESSED_BYTES_MAX = 16 * 1024**2


class ChangeStream:
    """What has come of the stream, and what is still to come.

    Thread: the loop's, but for `let_go`, which any may call. `opened` is told the slot before each
    reader is made, `closed` that a reader is gone.
    """

    def __init__(
        self, run: PostgresRun, opened: Callable[[Slot | None], None], closed: Callable[[], None]
    ):
        self._run = run
        self._opened = opened
        self._closed = closed
        self._spool: Spool | None = None
        self._unreadable: SourceUnavailable | None = None
        self._reader: WalReader | None = None
        self._segments: list[Segment] = []
        self._in_binary = True
        # Where the stream was when the run first read it: `--once` ends behind that.
        self.target = 0
        self._marked_at = 0
        # Where the slot began, when no position says where to go on.
        self.first: Position = (0,)

    # --- reading ------------------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        """Whether there is a reader."""
        return self._reader is not None

    def read(self, position: Position, until: int = 0, adopts: bool = False) -> None:
        """Have a reader that serves what follows a position, at least up to another one."""
        start, witness = position[0], self._witness_of(position)
        reader = self._reader
        if reader is not None:
            if reader.serves(start, until):
                return
            self._close_reader()
            if reader.failed is not None and not isinstance(reader.failed, SourceUnavailable):
                raise reader.failed
        slot = self._run.server.slot.free()
        if witness is None and len(position) > 1:
            log.warning("the publication is another one: PostgreSQL's history is not checked")
        silence = max(SILENCE_SECONDS, 2 * slot.sender_seconds if slot else 0)
        begin = StreamStart(lsn=start, witness=witness, adopts=adopts, silence_seconds=silence)
        self._run.server.slot.require_history(slot, start, begin.begin)
        self._opened(slot)
        self.target = max(self.target, self._run.server.mark())
        self._segments = []
        columns = [column for table in self._run.tables.all() for column in table.columns]
        self._in_binary = self._in_binary and all_in_binary(columns)
        self._reader = WalReader(
            lambda: self._connect(begin.begin),
            lambda message: self._describe(message),
            self._ready_spool(),
            begin,
            self._run.budget,
        )
        # The server gives the stream to one reader, and that is this one now.
        self._ready_spool().reap()

    def slot_position(self, known: Position) -> Position:
        """Where the slot stands, when a table that the lake has lost may have known it alone.

        An example: tables a and b are followed. Only b had changes in epoch 9, up to LSN 900.
        Somebody drops b. Table a says 800, the slot says 900. Table a lacks nothing, for epoch 9
        had no change of a. So the stream begins at 900, and b is copied anew. The pipeline leaves
        the slot at a transaction that is sent: a slot elsewhere was moved by someone else.
        """
        slot = self._run.server.slot.free()
        if slot is None or slot.wal_status == "lost" or slot.confirmed <= known[0]:
            return (0,)
        position = (slot.confirmed,)
        if len(known) > 1 and self._witness_of(known) is None:
            # Under other publications the server may not send that transaction.
            return position
        self.read(position, adopts=True)
        assert self._reader is not None
        while (found := self._reader.first) is None:
            failed = self._reader.failed
            if failed is not None:
                self._close_reader()
                raise failed
            self._run.pause()
        return with_witness(slot.confirmed, found, self._run.server.publications.names_hash)

    def verify(self, position: Position) -> None:
        """Raise when the server no longer has what follows a position."""
        slot, witness = self._run.server.slot, self._witness_of(position)
        slot.require_history(slot.look(), position[0], witness.at if witness else position[0])

    def recent_xids(self) -> set[int]:
        """The transactions that were streamed last."""
        assert self._reader is not None
        return self._reader.recent_xids()

    def lose(self, lost: SpoolUnreadable) -> None:
        """Told that workers could not read the spool: all that is not durable is read again."""
        if self._reader is not None:
            self._unreadable = SourceUnavailable(lost.message, detail=lost.detail, hint=lost.hint)
            self._reader.lose(self._unreadable)
            self._segments = []

    def refuse_unreadable(self) -> None:
        """Tell once that the spool could not be read; it may be readable the next time."""
        unreadable, self._unreadable = self._unreadable, None
        if unreadable is not None:
            raise unreadable

    def ack(self, position: Position, kept_from: int) -> None:
        """Let the server forget what comes before a position, and the spool what no copy needs."""
        if position and self._reader is not None:
            # What has no witness yet is told with the next one: each start writes one to the log.
            witness = self._witness_of(position)
            self._reader.confirm(position[0], witness.at if witness else 0)
            self._reader.forget(min(position[0], kept_from))

    def let_go(self) -> None:
        """End the connection to a server that shuts down; what has come stays."""
        reader = self._reader
        if reader is not None:
            reader.let_go()

    def close(self) -> None:
        """Stop reading, and remove the spool."""
        if self._reader is not None:
            self._reader.close()
        if self._spool is not None:
            self._spool.close()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._closed()

    def _witness_of(self, position: Position) -> Witness | None:
        return witness_of(position, self._run.server.publications.names_hash)

    def _ready_spool(self) -> Spool:
        """A place of this run's own, which workers reach."""
        if self._spool is None:
            self._spool = self._run.open_spool()
        self._spool.renew()
        return self._spool

    def _connect(self, start: int) -> tuple[Connection, Inbox]:
        server = self._run.server
        connection = Connection(server.dsn, replication=True)
        quoted = ('"' + name.replace('"', '""') + '"' for name in server.publications.names)
        options = {
            "proto_version": _PROTOCOL,
            "publication_names": ",".join(quoted),
            "binary": "true" if self._in_binary else "false",
            # Marks of our own are transactions that are sent, and so can be witnesses.
            "messages": "true",
        }
        try:
            return connection, connection.start_replication(server.slot.name, start, options)
        except BaseException:
            connection.close()
            raise

    def _describe(self, message: bytes) -> Relation | None:
        try:
            return described(message, self._run, self._in_binary)
        except TextNeeded:
            self._in_binary = False
            raise

    # --- where epochs can end -----------------------------------------------------------------

    def bounds(self, at: Frontier, until: int) -> list[Frontier]:
        """Ends of epochs after `at`; waits while the stream has not come to `until`.

        No clock ends the wait, because nobody knows how long a transaction is: the server has
        written `until` to its log, and the reader fails when the server falls silent.
        """
        assert self._reader is not None
        wal = self._run.wal
        position = at[wal][0]
        while True:
            self._reader.read_past(position)
            self._segments = self._reader.segments()
            later = [segment for segment in self._segments if segment.upper > position]
            if isinstance(self._reader.failed, TextNeeded) and not later:
                self.read(at[wal])
                continue
            if self._reader.failed is not None and not later:
                raise self._reader.failed
            if later or position >= until:
                self._renew_witness()
                told = self._run.server.publications.names_hash
                groups = epochs(later, self._run.budget)
                ends = [position_after(group[-1], told) for group in groups]
                return [at.join(Frontier({wal: end})) for end in ends]
            self._run.pause()

    def _renew_witness(self) -> None:
        """Have a witness near the stream's end, so that the server need not keep its log for an
        old one; nothing is written to the log of a server that is idle."""
        assert self._reader is not None
        unwitnessed = self._reader.unwitnessed_bytes()
        if unwitnessed > _UNWITNESSED_BYTES_MAX and self._reader.sent_lsn >= self._marked_at:
            # What fails here fails again where changes are read, and is told there.
            with contextlib.suppress(IcestreamError):
                self._marked_at = self._run.server.mark()

    def full(self, after: Position) -> bool:
        """Whether as much has come after a position as an epoch may hold."""
        return self._reader is not None and self._reader.full((after or (0,))[0])

    def passed_target(self, position: Position) -> bool:
        """Whether a position lies behind where the stream was at the start."""
        return 0 < self.target <= (position[0] if position else 0)

    def lag_seconds(self, position: Position) -> float:
        """Age of the oldest transaction that has come and is not durable."""
        waiting = [s for s in self._segments if not s.empty and position and s.upper > position[0]]
        if not waiting:
            return 0.0
        return max(0.0, time.time() - waiting[0].first_committed_at)

    # --- what is in an epoch ------------------------------------------------------------------

    def span(self, epoch: Epoch) -> tuple[int, int]:
        """The part of the stream that an epoch covers; the first one begins where the slot does."""
        upper = epoch.upper[self._run.wal][0]
        lower = epoch.lower[self._run.wal]
        return max(lower[0] if lower else 0, self.first[0]), upper

    def committed_at(self, epoch: Epoch) -> float | None:
        """The time of the oldest transaction in an epoch of the stream; a copy spans none."""
        segments = [s for s in self._between(*self.span(epoch)) if not s.empty]
        return segments[0].first_committed_at if segments else None

    def truncated(self, epoch: Epoch) -> set[str]:
        """Tables that were truncated within an epoch."""
        lower, upper = self.span(epoch)
        return {
            self._relations[number].table
            for segment in self._between(lower, upper)
            for number, (at, _) in segment.truncated.items()
            if lower <= at < upper
        }

    def splits(self, epoch: Epoch) -> list[Split]:
        """The changes of each table, by shares of its keys where there are many."""
        lower, upper = self.span(epoch)
        self._wait_for(epoch)
        segments = self._between(lower, upper)
        check(
            segments and segments[0].lower <= lower and segments[-1].upper >= upper,
            "the spool holds the whole epoch",
        )
        sizes: dict[str, int] = {}
        for segment in segments:
            for number, size in segment.bytes_by_relation.items():
                name = self._relations[number].table
                sizes[name] = sizes.get(name, 0) + size
        splits: list[Split] = []
        for name, size in sorted(sizes.items()):
            count = self._shares(name, segments, size)
            for number in range(count):
                share = None if count == 1 else (number, count)
                split = self._split(name, segments, (lower, upper), share, size // count)
                if split is not None:
                    splits.append(replace(split, at_server=self._at_server(name)))
        return splits

    def changes_between(self, table: str, lower: int, upper: int) -> WalSplit | None:
        """All changes of a table in a span that has come; None when there are none."""
        return self._split(table, self._between(lower, upper), (lower, upper), None, None)

    def _shares(self, table: str, segments: Sequence[Segment], size: int) -> int:
        """Into how many splits a table's changes are cut.

        Shares go by the bytes of the key. A key of another type has other bytes: 5 takes four of
        them as an `integer` and eight as a `bigint`. So a table whose key changed is not cut.
        """
        whole = any(self._relations[number].table == table for s in segments for number in s.moved)
        used = {n for s in segments for batch in s.batches for n in batch.relations}
        keys = {_key_layout(r) for r in map(self._relations.__getitem__, used) if r.table == table}
        if whole or len(keys) > 1 or any(batch.share < 0 for s in segments for batch in s.batches):
            return 1
        count = max(1, min(_SPLITS_MAX, -(-size // _SPLIT_BYTES)))
        if size >= _SPLIT_BYTES // 16:
            count = max(count, min(_SPLITS_MAX, self._run.parallelism()))
        return count

    @property
    def _relations(self) -> Sequence[Relation]:
        assert self._reader is not None
        return self._reader.relations

    def _between(self, lower: int, upper: int) -> list[Segment]:
        return [s for s in self._segments if s.upper > lower and s.lower < upper]

    def _at_server(self, name: str) -> TableAtServer:
        """Where to read rows that the lake lacks.

        Not only while the table is copied: a change before the copy's end may have been left out
        because its row had moved on, and the change that moved it comes after the copy's end.
        """
        return TableAtServer(dsn=self._run.server.dsn, oid=self._run.tables.by_name[name].oid)

    def _wait_for(self, epoch: Epoch) -> None:
        """An epoch that is minted again may end where the stream has not come to yet.

        As in `bounds` no clock ends the wait. A reader that has failed is not asked again: another
        one reads the epoch from its beginning.
        """
        lower, upper = self.span(epoch)
        if self._reaches(upper):
            return
        # A server whose log ends before would be waited for without end.
        slot = self._run.server.slot
        slot.require_history(slot.look(), upper, upper)
        known = epoch.lower[self._run.wal]
        self.read(known if known[:1] == (lower,) else (lower,), upper)
        assert self._reader is not None
        self._reader.read_past(upper)
        while True:
            if self._reader.may_have_reached(upper):
                self._segments = self._reader.segments()
                if self._reaches(upper):
                    return
                if self._reader.failed is not None:
                    raise self._reader.failed
            self._run.pause()

    def _reaches(self, upper: int) -> bool:
        return bool(self._segments) and self._segments[-1].upper >= upper

    def _split(
        self,
        table: str,
        segments: Sequence[Segment],
        span: tuple[int, int],
        share: tuple[int, int] | None,
        size: int | None,
    ) -> WalSplit | None:
        """One table's changes in these segments; with `share` the n-th part of m of its keys."""
        numbers = {n for n, relation in enumerate(self._relations) if relation.table == table}
        parts = []
        for segment in segments:
            batches = [
                batch.number
                for batch in segment.batches
                if batch.relations & numbers
                and (share is None or batch.share % share[1] == share[0])
            ]
            if batches:
                parts.append(SpoolPart(path=segment.path, batches=batches))
        if not parts:
            return None
        truncations = [
            place
            for segment in segments
            for number, place in segment.truncated.items()
            if number in numbers and span[0] <= place[0] < span[1]
        ]
        used = {n for s in segments for b in s.batches for n in b.relations} & numbers
        return WalSplit(
            table=table,
            parts=parts,
            relations={number: self._relations[number] for number in sorted(used)},
            lower=span[0],
            upper=span[1],
            size_bytes=size or 0,
            emptied_at=max(truncations, default=None) if size is not None else None,
            append_only=not self._run.tables.by_name[table].key,
            storage=self._spool.storage if self._spool else {},
        )


def _key_layout(relation: Relation) -> tuple[tuple[str, int, int], ...]:
    """What the bytes of a relation's keys depend on."""
    columns = [relation.columns[number] for number in relation.key]
    return tuple((column.name, column.type.oid, column.typmod) for column in columns)
