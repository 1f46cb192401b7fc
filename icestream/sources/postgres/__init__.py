"""The PostgreSQL source: a consistent copy of every table, then every change.

    slot and snapshot ──► copies, round by round ──► change stream from the slot's point on

The frontier has one position for the stream, an LSN, and one for each table's copy. Copies and
changes are never in one epoch; a copy's epoch leaves the stream where it is. The first copies read
the snapshot that the slot was created with and come before any change. A copy that begins later (a
table was added, a crash ended the snapshot) alternates with the stream: see `backfill`.

The names of positions carry the cluster's and the table's identity, so that another server behind
the same DSN, or a table that was dropped and created anew, is never mistaken for the old one.
"""

import contextlib
import logging
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyiceberg.types import IcebergType
from tqdm import tqdm

from icestream import failpoints, metrics
from icestream.epoch import Epoch
from icestream.errors import (
    ConfigInvalid,
    HistoryLost,
    IcestreamError,
    NeedsOperator,
    SchemaRejected,
    SourceUnavailable,
    check,
)
from icestream.frontier import Frontier, Position
from icestream.schema import TableShape, parse_type
from icestream.sources import (
    Budget,
    EpochPlan,
    Purpose,
    Remembered,
    Source,
    Split,
    SplitsLost,
    Standing,
    StartPlan,
    always,
    never,
)
from icestream.sources.postgres.backfill import (
    LOCK_SECONDS,
    PAGE_BYTES,
    SPLIT_PAGES,
    SPLITS_PER_ROUND,
    CopySplit,
    Holder,
    Round,
    rounds,
    shares,
)
from icestream.sources.postgres.changes import (
    COPY_TABLE_ANEW,
    Origin,
    Relation,
    RelationColumn,
    SpoolPart,
    WalSplit,
    other_identity,
    relation_columns,
)
from icestream.sources.postgres.connection import (
    Connection,
    Inbox,
    LockTimeout,
    NotAccepting,
    lsn_text,
    parse_dsn,
)
from icestream.sources.postgres.decode import TYPES_QUERY, PgType, in_binary, kinds_by_oid
from icestream.sources.postgres.options import PostgresOptions
from icestream.sources.postgres.publications import Coverage, left_out, waiting
from icestream.sources.postgres.server import PgTable, Server, Slot, table_name
from icestream.sources.postgres.spool import Spool, SpoolUnreadable
from icestream.sources.postgres.wal import (
    SILENCE_SECONDS,
    Segment,
    Start,
    WalReader,
    Witness,
    epochs,
)

log = logging.getLogger(__name__)

# States of a table's copy, the second part of its position; the first counts the copies.
_EMPTYING, _COPYING, _DONE = 0, 1, 2
_POLL_SECONDS = 0.05
# How often the slot is looked at.
_SLOT_SECONDS = 10.0
# A reader that has just ended may hold the slot for a moment.
_SLOT_FREE_SECONDS_MAX = 5.0
# A transaction may be in the stream before it is over for other sessions; that ends soon.
_SNAPSHOT_ATTEMPTS_MAX = 100
# How long one look for changes waits for transactions that hold up a copy, before it says so.
_SETTLE_SECONDS_MAX = 5.0
_SPLIT_BYTES = 64 * 1024**2
_SPLITS_MAX = 16
# Tables that are altered just when their first copy begins make it begin anew.
_BEGIN_ATTEMPTS_MAX = 5
_PROTOCOL = "1"
# The server keeps its log from the witness on. When this much has come since the last transaction
# that was sent, because other tables are busy, a message of our own becomes the witness.
_UNWITNESSED_BYTES_MAX = 16 * 1024**2


@dataclass(slots=True, kw_only=True)
class _LaterRound:
    """A round that reads a snapshot of its own once the stream has passed it."""

    table: PgTable
    holder: Holder
    plan: Round
    copy_number: int
    taken_at: int
    ready_at: int


class PostgresSource(Source):
    """See the module and `icestream.sources.Source`."""

    keyed = True

    def __init__(
        self,
        options: PostgresOptions,
        pipeline: str,
        budget: Budget,
        parallelism: int = 2,
        delete_columns: Callable[[str], Sequence[str]] = lambda _: (),
    ):
        self._options = options
        self._parallelism = parallelism
        self._delete_columns = delete_columns
        self._budget = budget
        self._server = Server(parse_dsn(options.dsn), pipeline, options.slot, options.publication)
        self._pipeline = pipeline
        self._spool: Spool | None = None
        self._unreadable: SourceUnavailable | None = None
        self._tables: dict[str, PgTable] = {}
        self._identity = ""
        self._seen_at = 0
        self._settled = False
        self._waiting: SourceUnavailable | None = None
        self._covered: dict[str, Coverage] = {}
        self._refused: NeedsOperator | None = None
        self._missing: frozenset[str] | None = None
        self._unclaimed: set[str] = set()
        self._again: dict[str, Position] = {}
        self._any_gone = False
        self._reader: WalReader | None = None
        self._initial: Holder | None = None
        self._later: _LaterRound | None = None
        self._close_at = 0
        self._plans: dict[tuple[str, Position], tuple[PgTable, Round, str]] = {}
        self._in_binary = True
        self._target = 0
        self._marked_at = 0
        self._first: Position = (0,)
        self._initial_at = 0
        self._rows_copied = 0
        self._segments: list[Segment] = []
        self._bar: tqdm | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._stopping = threading.Event()
        self._watch: threading.Thread | None = None
        self._slot_danger = ""

    # --- what the pipeline asks ---------------------------------------------------------------

    def tables(self) -> Sequence[str]:
        """The tables that the configuration names, found at the server."""
        if not self._tables:
            self._server.check()
            self._identity = self._server.identity()
            found = self._server.tables(self._options.tables, self._identifiers, self._declared())
            strays = self._server.strays(found, self._options.parents_alone)
            if strays is not None:
                raise strays
            for table in found:
                if not table.key:
                    log.warning(
                        "table %s has no key: rows are only added, updates and deletes of it are "
                        "not followed",
                        table.name,
                    )
            self._tables = {table.name: table for table in found}
        return list(self._tables)

    def _identifiers(self, table: str) -> Sequence[str]:
        """The columns that the configuration says to identify a row; none for the table's key."""
        given = self._options.identifier_columns.get(table, ())
        deleted_by = self._delete_columns(table)
        if given and deleted_by and set(given) != set(deleted_by):
            raise ConfigInvalid(
                f"`identifier_columns` and `equality_delete_by` differ for table {table}",
                hint="Leave one of them out: both say which columns identify a row.",
            )
        return given or deleted_by

    def known_tables(self) -> Sequence[str]:
        """Those that the configuration names in full."""
        return [name for name in self._options.tables if not set(name) & set("*?[")]

    def shape(self, table: str) -> TableShape | None:
        """Columns and key of a table that must be created."""
        found = self._tables[table]
        relation = _relation(found)
        return TableShape(columns=relation_columns(relation, found.key), key=found.key)

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives columns of the table."""
        return self._declared().get(table, {})

    def resume(self, remembered: Remembered) -> StartPlan:
        """Tables that the lake has nothing of are copied, again if need be."""
        if self._missing is None:
            # Told twice, and taken up once: copies may have begun in between.
            self._missing = frozenset(remembered.missing)
            self._unclaimed = set(remembered.missing)
        unfed = remembered.progress.keys() - {*self.tables()}
        return StartPlan(rebuilt=self._missing, unfed=frozenset(unfed))

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """The next rounds of copies, or the ends of what has come of the stream."""
        self.tables()
        if self._refused is not None:
            raise self._refused
        unreadable, self._unreadable = self._unreadable, None
        if unreadable is not None:
            # Told once: then the changes are read again, and may be readable this time.
            raise unreadable
        at = self._started(lower)
        emptying = self._emptied_first(at)
        if emptying is not None:
            return [emptying]
        if self._initial is not None and not self._initial.alive():
            log.warning("the snapshot of the first copies is gone; they go on without it")
            self._end_initial(complete=False)
        if self._initial is not None:
            bounds = self._initial_rounds(at)
            if bounds:
                return bounds
            self._end_initial()
        if self._later is not None and at[_copy_name(self._later.table)] >= self._later_end():
            self._end_later()
        pending = [t for t in self._tables.values() if at[_copy_name(t)][1:2] != (_DONE,)]
        if pending:
            return self._later_bounds(at, pending[0])
        return self._stream_bounds(at, self._target)

    def backlog(self, lower: Frontier) -> bool:
        """Whether tables are being copied, or the stream holds a full epoch after `lower`."""
        if self._initial is not None or self._later is not None:
            # Snapshots are held open until the copy is seen to be complete.
            return True
        if self._waiting is None and not self._copied(lower):
            return True
        return self._reader is not None and self._reader.full((lower[self._wal] or (0,))[0])

    def _ends_a_copy(self, epoch: Epoch) -> bool:
        """Whether the copy of a table ends with this epoch: it shall never be made again."""
        names = map(_copy_name, self._tables.values())
        ends = [
            [bound[name][1:2] == (_DONE,) for bound in (epoch.lower, epoch.upper)] for name in names
        ]
        return [False, True] in ends

    def _copied(self, frontier: Frontier) -> bool:
        names = (_copy_name(table) for table in self._tables.values())
        return all(frontier[name][1:2] == (_DONE,) for name in names)

    def standing(self, frontier: Frontier) -> Standing:
        """The LSN; trouble are transactions that a copy waits for."""
        return Standing(
            position=self._position(frontier),
            lag_seconds=self._lag_seconds(frontier),
            caught_up=self._caught_up(frontier),
            trouble=self._waiting,
        )

    def _caught_up(self, frontier: Frontier) -> bool:
        """Whether every table is copied and the stream has passed where it was at the start."""
        position = frontier[self._wal]
        passed = 0 < self._target <= (position[0] if position else 0)
        return passed and self._copied(frontier)

    def verify(self, durable: Frontier) -> None:
        """Raise what would stop a run: checks of the server, and whether its history is there."""
        self.tables()
        self._refuse_other_server(durable)
        self._refuse_left_out(durable)
        self._server.verify_publication(list(self._tables.values()))
        if durable[self._wal]:
            needed = self._witness_of(durable[self._wal])
            position = durable[self._wal][0]
            self._server.require_history(
                self._server.slot(), position, needed.at if needed else position
            )

    def give_up(self, lost: SplitsLost) -> None:
        """Let go of the snapshots: someone may wait for the locks that come with them.

        What could not be read back from the spool is read from the server again.
        """
        self._end_initial(complete=False)
        self._end_later()
        if isinstance(lost, SpoolUnreadable) and self._reader is not None:
            self._unreadable = SourceUnavailable(lost.message, detail=lost.detail, hint=lost.hint)
            self._reader.lose(self._unreadable)
            self._segments = []

    def plan(self, epoch: Epoch) -> EpochPlan:
        """Ranges of pages for an epoch of a copy, shares of keys for one of the stream."""
        lower, upper = self._span(epoch)
        # First: the segments of the stream are there once its splits are known.
        parts = self._copy_splits(epoch) if lower == upper else self._wal_splits(epoch)
        return EpochPlan(
            parts=parts,
            truncated=self._truncated(epoch),
            milestone=always if self._ends_a_copy(epoch) else never,
            committed_at=self._committed_at(epoch),
        )

    def _truncated(self, epoch: Epoch) -> frozenset[str]:
        """Tables that were truncated, or that a repeated copy fills anew."""
        again = {
            table.name
            for table in self._tables.values()
            if _begins_again(epoch.lower[_copy_name(table)], epoch.upper[_copy_name(table)])
        }
        lower, upper = self._span(epoch)
        truncated = {
            self._relations[slot].table
            for segment in self._between(lower, upper)
            for slot, (at, _) in segment.truncated.items()
            if lower <= at < upper
        }
        return frozenset(again | truncated)

    def _span(self, epoch: Epoch) -> tuple[int, int]:
        """The part of the stream that an epoch covers; the first one begins where the slot does."""
        upper = epoch.upper[self._wal][0]
        lower = epoch.lower[self._wal]
        return max(lower[0] if lower else 0, self._first[0]), upper

    def was_read(self, epoch: Epoch, lessons: Sequence[Any]) -> Mapping[str, str]:
        """Show how far the copy is; the position is for those who read the table's history."""
        for learned in filter(None, lessons):
            if self._bar is not None:
                with self._lock:
                    self._bar.update(learned["bytes"])
                    self._rows_copied += learned["rows"]
                    self._bar.set_postfix_str(f"{self._rows_copied:,} rows")
        position = epoch.upper[self._wal]
        return {"postgres.lsn": lsn_text(position[0])} if position else {}

    def _position(self, frontier: Frontier) -> str:
        """The LSN, and how many tables are not yet copied."""
        lsn = next((at for name, at in frontier.positions.items() if name.startswith("wal ")), ())
        if not lsn:
            return ""
        copies = [at for name, at in frontier.positions.items() if name.startswith("copy ")]
        # A table that is to be emptied first is not followed now.
        open_copies = sum(at[1:2] == (_COPYING,) for at in copies)
        return lsn_text(lsn[0]) + (f", {open_copies} tables to copy" if open_copies else "")

    def _lag_seconds(self, durable: Frontier) -> float | None:
        """Age of the oldest transaction that has come and is not durable."""
        position = durable[self._wal] if self._identity else ()
        waiting = [s for s in self._segments if not s.empty and position and s.upper > position[0]]
        if not waiting:
            return 0.0
        return max(0.0, time.time() - waiting[0].first_committed_at)

    def _committed_at(self, epoch: Epoch) -> float | None:
        """The time of the oldest transaction in an epoch of the stream; a copy spans none."""
        segments = [s for s in self._between(*self._span(epoch)) if not s.empty]
        return segments[0].first_committed_at if segments else None

    def ack(self, durable: Frontier) -> None:
        """Let the server forget what is durable."""
        position = durable[self._wal]
        if position and self._reader is not None:
            # What has no witness yet is told with the next one: each start writes one to the log.
            witness = self._witness_of(position)
            self._reader.confirm(position[0], witness.at if witness else 0)
            kept = self._later.taken_at if self._later else position[0]
            self._reader.forget(min(position[0], kept))

    def interrupt(self) -> None:
        """End waits for the server soon: the run is being stopped."""
        self._stopping.set()

    def close(self) -> None:
        """Let go of connections and of the spool."""
        self._closed.set()
        for holder in (self._initial, self._later and self._later.holder):
            if holder:
                holder.close()
        if self._reader is not None:
            self._reader.close()
        if self._bar is not None:
            self._bar.close()
        if self._spool is not None:
            self._spool.close()

    # --- starting -----------------------------------------------------------------------------

    @property
    def _wal(self) -> str:
        return f"wal {self._identity}"

    def _declared(self) -> dict[str, dict[str, Any]]:
        return {
            table: {column: parse_type(kind) for column, kind in kinds.items()}
            for table, kinds in self._options.columns.items()
        }

    def _started(self, lower: Frontier) -> Frontier:
        """Be ready to serve what follows `lower`; returns it with what the start decided."""
        self._refuse_other_server(lower)
        if self._reader is None and self._initial is None:
            self._refuse_left_out(lower)
            self._server.publish(list(self._tables.values()))
            # Before all that is read: what changes from now on is found to be another one.
            self._covered = self._server.coverage(list(self._tables.values()))
            self._seen_at = self._seen_at or self._server.next_transaction()
            published = self._server.published(list(self._tables.values()))
            self._tables = {table.name: table for table in published}
        at = self._known_tables(lower)
        if not at[self._wal]:
            self._first = (self._begin(),)
        elif self._any_gone and self._reader is None:
            self._first = self._slot_position(at[self._wal])
        at = at.join(Frontier({self._wal: self._first}))
        self._read_stream(at[self._wal])
        return at

    def _witness_of(self, position: Position) -> Witness | None:
        """The witness that a position of the stream is remembered with, if it has one.

        Under other publications the server would send other transactions: then there is none.
        """
        if len(position) < 5 or position[4] != self._publications_hash():
            return None
        return Witness(at=position[1], xid=position[2], time=position[3])

    def _position_after(self, segment: Segment) -> Position:
        """The end of a segment with its witness."""
        witness = segment.witness
        if witness is None:
            return (segment.upper,)
        told = self._publications_hash()
        return (segment.upper, witness.at, witness.xid, witness.time, told)

    def _publications_hash(self) -> int:
        return zlib.crc32("\0".join(self._server.publications).encode())

    def _refuse_left_out(self, lower: Frontier) -> None:
        """Stop when a publication was not the same all the time since a table's copy."""
        followed = [
            table
            for table in self._tables.values()
            if self._stamped(lower, table)
            and lower[_copy_name(table)][1:2] != (_EMPTYING,)
            and table.name not in self._unclaimed
            and _copy_name(table) not in self._again
        ]
        before = {table.name: lower[_published_name(table)][1:] for table in followed}
        unkeyed = self._server.unkeyed(before, followed)
        if unkeyed:
            raise other_identity(unkeyed[0], "It had a key and has none now.")
        lost = self._lost(before, followed) if followed else None
        if lost is not None:
            raise lost

    def _lost(
        self, before: Mapping[str, Coverage], tables: Sequence[PgTable]
    ) -> HistoryLost | None:
        """What publications may have left out of these tables, by what covered them before."""
        now = self._server.coverage(tables)
        for publication in self._server.publications:
            pairs = {
                t.name: (before[t.name], now[t.name])
                for t in tables
                if t.name in now and self._server.publication_of(t) == publication
            }
            lost = left_out(publication, pairs)
            if lost is not None:
                return lost
        return None

    def _stamped(self, at: Frontier, table: PgTable) -> bool:
        """Whether the frontier remembers what published the table since its present copy."""
        stamp = at[_published_name(table)]
        return bool(stamp) and stamp[:1] == at[_copy_name(table)][:1]

    def _slot_position(self, known: Position) -> Position:
        """Where the slot stands, when a table that the lake has lost may have known it alone.

        The slot moves only to the ends of commits, and a table that an epoch concerns takes part in
        it. So the tables that are left lack nothing, and the lost one is copied anew. The pipeline
        leaves the slot at a transaction that is sent: a slot elsewhere was moved by someone else.
        """
        slot = self._free_slot()
        if slot is None or slot.wal_status == "lost" or slot.confirmed <= known[0]:
            return (0,)
        position = (slot.confirmed,)
        if len(known) > 1 and self._witness_of(known) is None:
            # Under other publications the server may not send that transaction.
            return position
        self._read_stream(position, adopts=True)
        assert self._reader is not None
        while (found := self._reader.first) is None:
            failed = self._reader.failed
            if failed is not None:
                self._close_reader()
                raise failed
            self._pause()
        return (*position, found.at, found.xid, found.time, self._publications_hash())

    def _refuse_other_server(self, lower: Frontier) -> None:
        others = [n for n in lower.positions if n.startswith("wal ") and n != self._wal]
        if others and self._wal not in lower.positions:
            raise HistoryLost(
                f"another PostgreSQL answers at {self._server.dsn}",
                detail=f"Its identity is {self._identity}, the lake's is {others[0][4:]}.",
                hint="Correct the DSN. If the server was replaced, drop the pipeline's Iceberg "
                "tables and start again.",
            )
        names = {_copy_name(table): table.name for table in self._tables.values()}
        for name in lower.positions:
            if not name.startswith("copy ") or name in names:
                continue
            table = name[5:].rsplit(" ", 1)[0]
            if table in self._tables and lower[name][1:2] != (_EMPTYING,):
                raise _made_anew(table, "What the lake holds is the old table.")

    def _known_tables(self, lower: Frontier) -> Frontier:
        """The frontier with a position for every table, and retired ones marked for later."""
        positions: dict[str, Position] = {}
        names = {_copy_name(table): table for table in self._tables.values()}
        for name, table in names.items():
            at = lower[name]
            if not at:
                former = [n for n in lower.positions if n.startswith(f"copy {table.name} ")]
                positions[name] = (1, _EMPTYING) if former else (0, _COPYING, 0, 0)
            elif table.name in self._unclaimed:
                # The lake lost it, or never got it: unless its copy has yet to begin, another does.
                self._any_gone = True
                stamp = lower[_published_name(table)]
                other = bool(stamp) and stamp[1:] != self._covered.get(table.name)
                if at[1:] != (_COPYING, 0, 0) or other:
                    self._again[name] = (at[0] + 1, _EMPTYING)
        for name in lower.positions:
            if name.startswith("copy ") and name not in names and lower[name][1:2] != (_EMPTYING,):
                # Its changes are no longer followed: if it comes back, it is copied anew.
                positions[name] = (lower[name][0] + 1, _EMPTYING)
        self._unclaimed = set()
        found = lower.join(Frontier({**positions, **self._again}))
        stamps = {
            _published_name(table): (*found[name][:1], *self._covered[table.name])
            for name, table in names.items()
            if table.name in self._covered and not self._stamped(found, table)
        }
        return found.join(Frontier(stamps))

    def _begin(self) -> int:
        """Create the slot, with a snapshot for the first copies; an existing one is adopted."""
        if self._initial is not None:
            return self._initial_at
        slot = self._server.slot()
        if slot is not None:
            log.info("using slot %s that exists already", slot.name)
            self._server.require_history(slot, slot.confirmed, slot.confirmed)
            return slot.confirmed
        for _ in range(_BEGIN_ATTEMPTS_MAX):
            connection, point, exported = self._server.create_slot(self._stopping)
            # What it exports is there until the holder has taken it over.
            with connection:
                holder = self._held_since(exported)
            if holder is not None:
                break
        else:
            raise SourceUnavailable("tables are altered again and again while their copy begins")
        failpoints.reach(failpoints.AFTER_SLOT)
        self._initial, self._initial_at = holder, point
        self._show_bar()
        return point

    def _held_since(self, exported: str) -> Holder | None:
        """The holder of the slot's snapshot; None, and no slot, when a table changed its layout
        before the locks were had: its rows could not be read as of the snapshot."""
        try:
            found = self._server.tables(list(self._tables), self._identifiers, self._declared())
            self._tables = {table.name: table for table in self._server.published(found)}
            holder = self._hold(list(self._tables.values()), exported)
            if self._unaltered(holder, found):
                return holder
        except BaseException:
            with contextlib.suppress(IcestreamError):
                self._server.drop_slot()
            raise
        log.info("a table was altered while its copy began: it begins anew")
        self._server.drop_slot()
        return None

    def _unaltered(self, holder: Holder, tables: Sequence[PgTable]) -> bool:
        """Whether tables are laid out as in the holder's snapshot; if not, the holder is closed."""
        oids = {table.oid for table in tables}
        oids |= {leaf.oid for table in tables for leaf in table.leaves}
        same = False
        try:
            same = holder.layout(sorted(oids)) == self._server.layout(sorted(oids))
        finally:
            if not same:
                holder.close()
        return same

    def _hold(self, tables: Sequence[PgTable], exported: str | None = None) -> Holder:
        """Locks on tables and a snapshot; nothing is held while a lock cannot be had."""
        names = [(table.schema, table.relation) for table in tables]
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return Holder(self._server.dsn, names, exported)
            except LockTimeout:
                if time.monotonic() > deadline:
                    raise
            self._pause()

    def _pause(self) -> None:
        """A moment between two looks; raises when the run is being stopped."""
        if self._stopping.wait(_POLL_SECONDS):
            raise SourceUnavailable("the run is being stopped")

    def _read_stream(self, position: Position, until: int = 0, adopts: bool = False) -> None:
        """Have a reader that serves what follows a position, at least up to another one."""
        start, witness = position[0], self._witness_of(position)
        reader = self._reader
        if reader is not None:
            if reader.serves(start, until):
                return
            self._close_reader()
            if reader.failed is not None and not isinstance(reader.failed, SourceUnavailable):
                raise reader.failed
        slot = self._free_slot()
        if witness is None and len(position) > 1:
            log.warning("the publication is another one: PostgreSQL's history is not checked")
        silence = max(SILENCE_SECONDS, 2 * slot.sender_seconds if slot else 0)
        begin = Start(lsn=start, witness=witness, adopts=adopts, silence_seconds=silence)
        self._server.require_history(slot, start, begin.begin)
        self._note_slot(slot)
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_slot, name="slot", daemon=True)
            self._watch.start()
        self._target = max(self._target, self._server.mark())
        self._segments = []
        self._in_binary = self._in_binary and self._all_in_binary(self._tables.values())
        self._reader = WalReader(
            lambda: self._open_stream(begin.begin),
            self._describe,
            self._spool_folder(),
            begin,
            self._budget,
        )

    def _spool_folder(self) -> Path:
        """A folder of this run's own."""
        if self._spool is None:
            self._spool = Spool(self._options.spool, self._pipeline)
        self._spool.renew()
        return self._spool.folder

    def _free_slot(self) -> Slot | None:
        """The slot, once the server has noticed that its last reader is gone."""
        deadline = time.monotonic() + _SLOT_FREE_SECONDS_MAX
        while (slot := self._server.slot()) and slot.active and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return slot

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        # A round that waits for the stream needs all of it since its snapshot was taken.
        self._end_later()

    def _open_stream(self, start: int) -> tuple[Connection, Inbox]:
        connection = Connection(self._server.dsn, replication=True)
        names = ",".join('"' + name.replace('"', '""') + '"' for name in self._server.publications)
        options = {
            "proto_version": _PROTOCOL,
            "publication_names": names,
            "binary": "true" if self._in_binary else "false",
            # Marks of our own are transactions that are sent, and so can be witnesses.
            "messages": "true",
        }
        try:
            return connection, connection.start_replication(self._server.slot_name, start, options)
        except BaseException:
            connection.close()
            raise

    def _all_in_binary(self, tables: Any) -> bool:
        return all(in_binary(c.type, c.iceberg()) for table in tables for c in table.columns)

    def _describe(self, message: bytes) -> Relation | None:
        """A relation message as the pipeline's table, None for others.

        A table that has another name now is still the one with its oid.
        """
        oid, called, sent, in_full, columns = _parse_relation(message)
        table = next((each for each in self._tables.values() if each.oid == oid), None)
        if table is None and called in self._tables:
            raise _made_anew(called, "The stream goes on with another table of the same name.")
        if table is None:
            return None
        if called != table.name:
            log.warning("table %s is called %s now: it is followed as before", table.name, called)
        types = self._server.types
        if any(kind not in types for _, kind, _ in columns):
            with Connection(self._server.dsn) as connection:
                types = self._server.types = kinds_by_oid(connection.rows(TYPES_QUERY))
        declared = {column.name: column.declared for column in table.columns}
        described = [
            RelationColumn(
                name=column,
                # A type that was dropped since is known by its text form alone.
                type=types.get(kind) or PgType(oid=kind, name=f"type {kind}"),
                typmod=typmod,
                declared=declared.get(column),
            )
            for column, kind, typmod in columns
        ]
        names = [column.name for column in described]
        missing = [column for column in table.key if column not in names]
        if missing:
            raise SchemaRejected(
                f"table {table.name} lost column {missing[0]} of its key",
                hint="Give the table its key back, or copy it anew under another pipeline.",
            )
        if not set(table.key) <= set(sent):
            raise other_identity(
                table.name, f"Its changes no longer name their row by {', '.join(table.key)}."
            )
        reason = self._server.unidentified(table, None if in_full else sent) if table.key else ""
        if reason:
            raise other_identity(table.name, reason)
        if self._in_binary and not all(in_binary(c.type, c.iceberg()) for c in described):
            self._in_binary = False
            raise _TextNeeded(f"table {table.name} has a type that is read as text")
        return Relation(
            table=table.name,
            oid=oid,
            columns=described,
            key=[names.index(column) for column in table.key],
            to_come=self._to_come(table, names),
        )

    def _to_come(self, table: PgTable, names: Sequence[str]) -> frozenset[str]:
        """Columns of the table that are younger than a version of it with these columns.

        New columns stand behind all others, and a renamed one stays where it is. So they are
        those behind the version's own, if it still has all of these under their names.
        """
        if list(names) == [column.name for column in table.columns]:
            return frozenset()
        now = self._server.column_names(table.oid)
        if not set(names) <= set(now):
            return frozenset()
        return frozenset(now[1 + max(now.index(name) for name in names) :])

    # --- copies -------------------------------------------------------------------------------

    def _emptied_first(self, at: Frontier) -> Frontier | None:
        """The bound after which tables that are copied once more are empty."""
        again = {
            _copy_name(table): (at[_copy_name(table)][0], _COPYING, 0, 0)
            for table in self._tables.values()
            if at[_copy_name(table)][1:2] == (_EMPTYING,)
        }
        return at.join(Frontier(again)) if again else None

    def _initial_rounds(self, at: Frontier) -> list[Frontier]:
        """All rounds of the first copies, tables side by side."""
        assert self._initial is not None
        waiting = []
        for table in sorted(self._tables.values(), key=lambda table: -table.pages):
            position = at[_copy_name(table)]
            if position[1:2] == (_COPYING,):
                plan = self._rounds(table, position)
                waiting.append([(table, position[0], each) for each in plan])
        bounds, frontier = [], at
        active = [waiting.pop(0) for _ in range(min(len(waiting), self._in_parallel))]
        while active:
            for queue in list(active):
                table, number, plan_round = queue.pop(0)
                after = _after(number, plan_round)
                self._plans[_copy_name(table), after] = table, plan_round, self._initial.snapshot
                frontier = frontier.join(Frontier({_copy_name(table): after}))
                bounds.append(frontier)
                if not queue:
                    active.remove(queue)
                    if waiting:
                        active.append(waiting.pop(0))
        return bounds

    @property
    def _in_parallel(self) -> int:
        return self._options.tables_in_parallel

    def _rounds(self, table: PgTable, position: Position) -> list[Round]:
        pages_max = max(1, min(SPLIT_PAGES * SPLITS_PER_ROUND, self._budget.bytes // PAGE_BYTES))
        begin = (position[2], position[3])
        return rounds(table.leaves, begin, self._options.chunk_pages, pages_max)

    def _end_initial(self, complete: bool = True) -> None:
        if self._initial is not None:
            self._initial.close()
            self._initial = None
            if complete:
                log.info("the copy of all tables is complete")
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _later_bounds(self, at: Frontier, table: PgTable) -> Sequence[Frontier]:
        """Bounds of the stream until it has passed the round's snapshot, then the round itself."""
        if self._later is not None and not self._later.holder.alive():
            self._end_later()
        if self._later is None and not self._may_copy(at, table):
            bounds = self._stream_until_settled(at, table)
            if bounds or not self._settled:
                return bounds
        if self._later is None:
            # All of the stream since the snapshot is kept until the round is committed, so the
            # snapshot is taken when the stream has come close.
            self._close_at = self._close_at or self._server.mark()
            if at[self._wal][0] < self._close_at:
                return self._stream_bounds(at, self._close_at)
            self._later, self._close_at = self._begin_later(at, table), 0
        later = self._later
        if at[self._wal][0] < later.ready_at:
            return self._stream_bounds(at, later.ready_at)
        after = _after(later.copy_number, later.plan)
        key = _copy_name(later.table), after
        self._plans[key] = later.table, later.plan, later.holder.snapshot
        return [at.join(Frontier({key[0]: after}))]

    def _may_copy(self, at: Frontier, table: PgTable) -> bool:
        """Whether all transactions have ended that began before the table was seen published."""
        begun = at[_copy_name(table)][2:4] != (0, 0)
        return self._settled or begun

    def _stream_until_settled(self, at: Frontier, table: PgTable) -> Sequence[Frontier]:
        """Bounds of the stream while a copy waits for transactions; no lock is held meanwhile."""
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        while True:
            pids = self._server.running(self._seen_at)
            if pids is None:
                self._settled, self._waiting = True, None
                return []
            bounds = self._stream_bounds(at, 0)
            if time.monotonic() > deadline:
                self._waiting = waiting(table.name, pids)
            if bounds or self._waiting is not None:
                return bounds
            time.sleep(_POLL_SECONDS)

    def _begin_later(self, at: Frontier, table: PgTable) -> _LaterRound:
        """Pin a snapshot that holds all that was streamed up to `at`."""
        assert self._reader is not None
        fresh = self._server.tables([table.name], self._identifiers, self._declared())
        if fresh[0].oid != table.oid:
            raise _made_anew(table.name, "Another table bears its name now.")
        self._tables[table.name] = table = self._server.published(fresh)[0]
        for _ in range(_SNAPSHOT_ATTEMPTS_MAX):
            holder = self._hold([table])
            try:
                seen = holder.lacks(self._reader.recent_xids())
            except BaseException:
                holder.close()
                raise
            if not seen:
                self._refuse_keyless(table, holder)
                break
            # A transaction that we have seen is not over for others.
            holder.close()
            self._pause()
        else:
            raise SourceUnavailable(
                f"could not take a snapshot of table {table.name} that has what was streamed"
            )
        position = at[_copy_name(table)]
        if self._bar is None:
            self._show_bar()
        return _LaterRound(
            table=table,
            holder=holder,
            plan=self._rounds(table, position)[0],
            copy_number=position[0],
            taken_at=at[self._wal][0],
            ready_at=self._server.mark(),
        )

    def _refuse_keyless(self, table: PgTable, holder: Holder) -> None:
        """Rows without a key cannot be told apart: those that the stream brought as well would be
        there twice."""
        if table.key or not holder.any_row(table.schema, table.relation):
            return
        holder.close()
        raise NeedsOperator(
            f"table {table.name} has no key and cannot be copied beside the stream",
            detail="It was added later, its first copy was cut short, or it was empty when an "
            "earlier version copied it.",
            hint="Give it a primary key or `identifier_columns`. Or follow it by a pipeline of its "
            "own, into an Iceberg table of another name: there its copy comes before the stream. "
            "Or drop the slot and all Iceberg tables of this pipeline, and start again: all tables "
            "are copied anew.",
        )

    def _later_end(self) -> Position:
        assert self._later is not None
        return _after(self._later.copy_number, self._later.plan)

    def _end_later(self) -> None:
        if self._later is not None:
            self._later.holder.close()
            self._later = None

    def _copy_splits(self, epoch: Epoch) -> list[Split]:
        """The splits of a copy's epoch: it moves the position of one table."""
        moved = [
            name
            for name in epoch.upper.positions
            if name.startswith("copy ") and epoch.upper[name] != epoch.lower[name]
        ]
        planned = [(name, epoch.upper[name]) for name in moved if epoch.upper[name][1] > _EMPTYING]
        found = [self._plans[key] for key in planned if key in self._plans]
        splits: list[Split] = []
        for table, plan, snapshot in found:
            touched = self._touched(table, epoch) if self._later is not None else None
            splits += [
                CopySplit(
                    table=table.name,
                    dsn=self._server.dsn,
                    snapshot=snapshot,
                    ranges=share,
                    relation=_relation(table),
                    row_filter=table.row_filter,
                    replaces=self._later is not None,
                    touched=touched,
                )
                for share in shares(plan.ranges, max(SPLITS_PER_ROUND, self._parallelism))
            ]
        return splits

    def _touched(self, table: PgTable, epoch: Epoch) -> WalSplit | None:
        """The changes of a table that were streamed since the round's snapshot was taken."""
        assert self._later is not None
        lower, upper = self._later.taken_at, epoch.lower[self._wal][0]
        segments = self._between(lower, upper)
        return self._wal_split(table.name, segments, (lower, upper), None, None)

    def _show_bar(self) -> None:
        if not sys.stderr.isatty():
            return
        total = sum(table.pages for table in self._tables.values()) * PAGE_BYTES
        self._bar = tqdm(
            total=total, unit="B", unit_scale=True, desc="copying", file=sys.stderr, leave=False
        )

    # --- the stream ---------------------------------------------------------------------------

    def _stream_bounds(self, at: Frontier, until: int) -> list[Frontier]:
        """Ends of epochs after `at`; waits while the stream has not come to `until`.

        No clock ends the wait, because nobody knows how long a transaction is: the server has
        written `until` to its log, and the reader fails when the server falls silent.
        """
        assert self._reader is not None
        position = at[self._wal][0]
        while True:
            self._reader.read_past(position)
            self._segments = self._reader.segments()
            later = [segment for segment in self._segments if segment.upper > position]
            if isinstance(self._reader.failed, _TextNeeded) and not later:
                self._read_stream(at[self._wal])
                continue
            if self._reader.failed is not None and not later:
                raise self._reader.failed
            if later or position >= until:
                self._renew_witness()
                groups = epochs(later, self._budget)
                ends = [self._position_after(group[-1]) for group in groups]
                return [at.join(Frontier({self._wal: end})) for end in ends]
            self._pause()

    def _renew_witness(self) -> None:
        """Have a witness near the stream's end, so that the server need not keep its log for an
        old one; nothing is written to the log of a server that is idle."""
        assert self._reader is not None
        unwitnessed = self._reader.unwitnessed_bytes()
        if unwitnessed > _UNWITNESSED_BYTES_MAX and self._reader.sent_lsn >= self._marked_at:
            # What fails here fails again where changes are read, and is told there.
            with contextlib.suppress(IcestreamError):
                self._marked_at = self._server.mark()

    @property
    def _relations(self) -> Sequence[Relation]:
        assert self._reader is not None
        return self._reader.relations

    def _between(self, lower: int, upper: int) -> list[Segment]:
        return [s for s in self._segments if s.upper > lower and s.lower < upper]

    def _wal_splits(self, epoch: Epoch) -> list[Split]:
        lower, upper = self._span(epoch)
        self._wait_for(epoch)
        segments = self._between(lower, upper)
        check(
            segments and segments[0].lower <= lower and segments[-1].upper >= upper,
            "the spool holds the whole epoch",
        )
        sizes: dict[str, int] = {}
        for segment in segments:
            for slot, size in segment.bytes_by_relation.items():
                name = self._relations[slot].table
                sizes[name] = sizes.get(name, 0) + size
        splits: list[Split] = []
        for name, size in sorted(sizes.items()):
            whole = any(self._relations[slot].table == name for s in segments for slot in s.moved)
            whole = whole or any(b.share < 0 for s in segments for b in s.batches)
            count = 1 if whole else max(1, min(_SPLITS_MAX, -(-size // _SPLIT_BYTES)))
            if not whole and size >= _SPLIT_BYTES // 16:
                count = max(count, min(_SPLITS_MAX, self._parallelism))
            for number in range(count):
                share = None if count == 1 else (number, count)
                split = self._wal_split(name, segments, (lower, upper), share, size // count)
                if split is not None:
                    splits.append(replace(split, origin=self._origin(name)))
        return splits

    def _origin(self, name: str) -> Origin:
        """Where to read rows that the lake lacks.

        Not only while the table is copied: a change before the copy's end may have been left out
        because its row had moved on, and the change that moved it comes after the copy's end.
        """
        table = self._tables[name]
        return Origin(dsn=self._server.dsn, oid=table.oid)

    def _wait_for(self, epoch: Epoch) -> None:
        """An epoch that is minted again may end where the stream has not come to yet.

        As in `_stream_bounds` no clock ends the wait. A reader that has failed is not asked again:
        another one reads the epoch from its beginning.
        """
        lower, upper = self._span(epoch)
        if self._reaches(upper):
            return
        # A server whose log ends before would be waited for without end.
        self._server.require_history(self._server.slot(), upper, upper)
        known = epoch.lower[self._wal]
        self._read_stream(known if known[:1] == (lower,) else (lower,), upper)
        assert self._reader is not None
        self._reader.read_past(upper)
        while True:
            self._segments = self._reader.segments()
            if self._reaches(upper):
                return
            if self._reader.failed is not None:
                raise self._reader.failed
            self._pause()

    def _reaches(self, upper: int) -> bool:
        return bool(self._segments) and self._segments[-1].upper >= upper

    def _wal_split(
        self,
        table: str,
        segments: Sequence[Segment],
        span: tuple[int, int],
        share: tuple[int, int] | None,
        size: int | None,
    ) -> WalSplit | None:
        """One table's changes in these segments; with `share` the n-th part of m of its keys."""
        slots = {n for n, relation in enumerate(self._relations) if relation.table == table}
        parts = []
        for segment in segments:
            numbers = [
                batch.number
                for batch in segment.batches
                if batch.relations & slots and (share is None or batch.share % share[1] == share[0])
            ]
            if numbers:
                parts.append(SpoolPart(path=segment.path, batches=numbers))
        if not parts:
            return None
        emptied = [
            place
            for segment in segments
            for slot, place in segment.truncated.items()
            if slot in slots and span[0] <= place[0] < span[1]
        ]
        used = {n for s in segments for b in s.batches for n in b.relations} & slots
        return WalSplit(
            table=table,
            parts=parts,
            relations={number: self._relations[number] for number in sorted(used)},
            lower=span[0],
            upper=span[1],
            size_bytes=size or 0,
            emptied_at=max(emptied, default=None) if size is not None else None,
            append_only=not self._tables[table].key,
        )

    def _watch_slot(self) -> None:
        """Look at the slot from time to time, also while epochs wait: it grows old just then."""
        while not self._closed.wait(_SLOT_SECONDS):
            try:
                self._yield_locks()
                self._note_slot(self._server.slot())
                self._note_publications()
            except NotAccepting:
                # It shuts down, and would wait until all of its log is sent; we may not read now.
                reader = self._reader
                if reader is not None:
                    reader.let_go()
            except IcestreamError:
                pass  # A server that does not answer is told of where changes are read.

    def _yield_locks(self) -> None:
        """Let go of a copy's locks that someone waits for, whatever the copy itself waits for."""
        later = self._later
        for holder in (self._initial, later.holder if later else None):
            if holder is not None and self._server.blocks(holder.pid, LOCK_SECONDS):
                log.info("someone waits for a lock of the copy: it goes on with another snapshot")
                holder.close()

    def _note_publications(self) -> None:
        """Notice what is no longer published, or was never asked for; `available` then stops."""
        covered = dict(self._covered)
        tables = [table for table in list(self._tables.values()) if table.name in covered]
        strays = self._server.strays(tables, self._options.parents_alone)
        other = self._server.supplanted(tables)
        anew = _made_anew(other, "Another table bears its name now.") if other else None
        self._refused = self._lost(covered, tables) or anew or strays

    def _note_slot(self, slot: Slot | None) -> None:
        """The slot's lag as a metric, and a warning before the server gives it up."""
        if slot is None:
            return
        metrics.SLOT_LAG_BYTES.labels(slot.name).set(slot.lag_bytes)
        if slot.danger and slot.danger != self._slot_danger:
            log.warning("slot %s is about to be lost: %s", slot.name, slot.danger)
        self._slot_danger = slot.danger


class _TextNeeded(SourceUnavailable):
    """The stream must be read again, as text."""


def _copy_name(table: PgTable) -> str:
    return f"copy {table.name} {table.oid}"


def _published_name(table: PgTable) -> str:
    return f"published {table.name} {table.oid}"


def _after(number: int, plan: Round) -> Position:
    return (number, _DONE) if plan.after is None else (number, _COPYING, *plan.after)


def _begins_again(lower: Position, upper: Position) -> bool:
    """Whether a copy that is not the first one begins within an epoch."""
    return lower != upper and upper[:1] > (0,) and upper[1:] == (_COPYING, 0, 0)


def _relation(table: PgTable) -> Relation:
    names = [column.name for column in table.columns]
    return Relation(
        table=table.name,
        oid=table.oid,
        columns=table.columns,
        key=[names.index(column) for column in table.key],
    )


def _made_anew(table: str, detail: str) -> HistoryLost:
    return HistoryLost(
        f"table {table} was dropped and created anew at the source",
        detail=detail,
        hint=f"If it only got another name, give it its name back. {COPY_TABLE_ANEW}",
    )


def _parse_relation(message: bytes) -> tuple[int, str, list[str], bool, list[tuple[str, int, int]]]:
    """A relation message: oid, name, columns that a row that goes sends, whether these are all
    because the replica identity is the whole row, and all columns (name, type, typmod)."""
    oid = struct.unpack_from(">I", message, 1)[0]
    place = 5

    def text() -> str:
        nonlocal place
        end = message.index(b"\0", place)
        found = message[place:end].decode()
        place = end + 1
        return found

    schema, name = text() or "pg_catalog", text()
    in_full = message[place : place + 1] == b"f"
    count = struct.unpack_from(">h", message, place + 1)[0]
    place += 3
    columns, sent = [], []
    for _ in range(count):
        flagged = message[place] & 1
        place += 1
        column = text()
        kind, typmod = struct.unpack_from(">Ii", message, place)
        place += 8
        columns.append((column, kind, typmod))
        if flagged or in_full:
            sent.append(column)
    return oid, table_name(schema, name), sent, in_full, columns
