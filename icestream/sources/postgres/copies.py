"""Which copies of tables are due, and what each round of them reads.

    first copies    read the snapshot that the slot was created with, before any change
    later copies    (a table was added, a crash ended the first snapshot) read a snapshot of their
                    own, and alternate with the stream, which must have passed the snapshot first

How the pages are cut and read is in `backfill`.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from icestream import failpoints
from icestream.epoch import Epoch
from icestream.errors import IcestreamError, NeedsOperator, SourceUnavailable
from icestream.frontier import Frontier, Position
from icestream.patience import Deadline
from icestream.sources import Split
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
from icestream.sources.postgres.changes import WalSplit
from icestream.sources.postgres.connection import LockTimeout
from icestream.sources.postgres.copy_bar import CopyBar
from icestream.sources.postgres.positions import (
    COPY,
    COPYING,
    EMPTYING,
    after_round,
    begins_again,
    copy_name,
    is_copied,
)
from icestream.sources.postgres.publications import waiting
from icestream.sources.postgres.relation_messages import relation_of
from icestream.sources.postgres.run import PostgresRun
from icestream.sources.postgres.stream import ChangeStream
from icestream.sources.postgres.tables import PgTable

log = logging.getLogger(__name__)

# A transaction may be in the stream before it is over for other sessions; that ends soon.
_SNAPSHOT_ATTEMPTS_MAX = 100
# How long one look for changes waits for transactions that hold up a copy, before it says so.
_SETTLE_SECONDS_MAX = 5.0
# Tables that are altered just when their first copy begins make it begin anew.
_BEGIN_ATTEMPTS_MAX = 5


@dataclass(slots=True, kw_only=True)
class _LaterRound:
    """A round that reads a snapshot of its own once the stream has passed it."""

    table: PgTable
    holder: Holder
    plan: Round
    copy_number: int
    taken_at: int
    ready_at: int


class Copies:
    """The copies of all tables, first and later ones.

    Thread: the loop's, but for `yield_locks`, which that of the watch calls, and `show`, which
    those of epochs call.
    """

    def __init__(self, run: PostgresRun, stream: ChangeStream):
        self._run = run
        self._stream = stream
        self._initial: Holder | None = None
        self._initial_at = 0
        self._later: _LaterRound | None = None
        self._close_at = 0
        self._plans: dict[tuple[str, Position], tuple[PgTable, Round, str]] = {}
        self._published_at = 0
        self._settled = False
        self._bar = CopyBar()
        # What a copy waits for while the rest goes on.
        self.trouble: SourceUnavailable | None = None

    # --- what is due --------------------------------------------------------------------------

    @property
    def first_begun(self) -> bool:
        """Whether the snapshot of the first copies is held."""
        return self._initial is not None

    def complete(self, frontier: Frontier) -> bool:
        """Whether all tables are copied."""
        return all(is_copied(frontier, table) for table in self._run.tables.all())

    def under_way(self, lower: Frontier) -> bool:
        """Whether a copy goes on after `lower`, and waits for nobody."""
        if self._initial is not None or self._later is not None:
            # Snapshots are held open until the copy is seen to be complete.
            return True
        return self.trouble is None and not self.complete(lower)

    def published_now(self) -> None:
        """Told that all tables are published: transactions that began before may lack in it."""
        self._published_at = self._published_at or self._run.server.publications.next_transaction()

    def bounds(self, at: Frontier) -> Sequence[Frontier] | None:
        """The next bounds while tables are to be copied; None when all are."""
        emptying = self._emptied_first(at)
        if emptying is not None:
            return [emptying]
        if self._initial is not None and not self._initial.alive():
            log.warning("the snapshot of the first copies is gone; they go on without it")
            self._end_first(complete=False)
        if self._initial is not None:
            bounds = self._first_rounds(at, self._initial)
            if bounds:
                return bounds
            self._end_first(complete=True)
        if self._later is not None:
            end = after_round(self._later.copy_number, self._later.plan)
            if at[copy_name(self._later.table)] >= end:
                self.end_later()
        pending = [table for table in self._run.tables.all() if not is_copied(at, table)]
        return self._later_bounds(at, pending[0]) if pending else None

    def _emptied_first(self, at: Frontier) -> Frontier | None:
        """The bound after which tables that are copied once more are empty."""
        again = {
            copy_name(table): (at[copy_name(table)][0], COPYING, 0, 0)
            for table in self._run.tables.all()
            if at[copy_name(table)][1:2] == (EMPTYING,)
        }
        return at.join(Frontier(again)) if again else None

    def _rounds(self, table: PgTable, position: Position) -> list[Round]:
        """What is left of a table, in rounds that an epoch may hold."""
        budget = self._run.budget.bytes
        pages_max = max(1, min(SPLIT_PAGES * SPLITS_PER_ROUND, budget // PAGE_BYTES))
        begin = (position[2], position[3])
        return rounds(table.leaves, begin, self._run.options.chunk_pages, pages_max)

    # --- first copies -------------------------------------------------------------------------

    def begin(self) -> int:
        """Create the slot, with a snapshot for the first copies; an existing one is adopted.

        Returns where the stream begins.
        """
        if self._initial is not None:
            return self._initial_at
        slot = self._run.server.slot.look()
        if slot is not None:
            log.info("using slot %s that exists already", slot.name)
            self._run.server.slot.require_history(slot, slot.confirmed, slot.confirmed)
            return slot.confirmed
        for _ in range(_BEGIN_ATTEMPTS_MAX):
            connection, point, exported = self._run.server.slot.create(self._run.stopping)
            # What it exports is there until the holder has taken it over.
            with connection:
                holder = self._held_since(exported)
            if holder is not None:
                break
        else:
            raise SourceUnavailable("tables are altered again and again while their copy begins")
        failpoints.reach(failpoints.AFTER_SLOT)
        self._initial, self._initial_at = holder, point
        self._bar.show(self._run.tables.all())
        return point

    def _held_since(self, exported: str) -> Holder | None:
        """The holder of the slot's snapshot; None, and no slot, when a table changed its layout
        before the locks were had: its rows could not be read as of the snapshot."""
        try:
            found = self._run.tables.renew_all()
            holder = self._hold(self._run.tables.all(), exported)
            if self._unaltered(holder, found):
                return holder
        except BaseException:
            with contextlib.suppress(IcestreamError):
                self._run.server.slot.drop()
            raise
        log.info("a table was altered while its copy began: it begins anew")
        self._run.server.slot.drop()
        return None

    def _unaltered(self, holder: Holder, tables: Sequence[PgTable]) -> bool:
        """Whether tables are laid out as in the holder's snapshot; if not, the holder is closed."""
        oids = {table.oid for table in tables}
        oids |= {leaf.oid for table in tables for leaf in table.leaves}
        same = False
        try:
            same = holder.layout(sorted(oids)) == self._run.server.tables.layout(sorted(oids))
        finally:
            if not same:
                holder.close()
        return same

    def _hold(self, tables: Sequence[PgTable], exported: str | None = None) -> Holder:
        """Locks on tables and a snapshot; nothing is held while a lock cannot be had."""
        names = [(table.schema, table.relation) for table in tables]
        deadline = Deadline(LOCK_SECONDS)
        while True:
            try:
                return Holder(self._run.server.dsn, names, exported)
            except LockTimeout:
                if deadline.passed:
                    raise
            self._run.pause()

    def _first_rounds(self, at: Frontier, holder: Holder) -> list[Frontier]:
        """All rounds of the first copies, tables side by side."""
        queued = []
        for table in sorted(self._run.tables.all(), key=lambda table: -table.pages):
            position = at[copy_name(table)]
            if position[1:2] == (COPYING,):
                plan = self._rounds(table, position)
                queued.append([(table, position[0], each) for each in plan])
        bounds, frontier = [], at
        beside = self._run.options.tables_in_parallel
        active = [queued.pop(0) for _ in range(min(len(queued), beside))]
        while active:
            for queue in list(active):
                table, number, plan_round = queue.pop(0)
                after = after_round(number, plan_round)
                self._plans[copy_name(table), after] = table, plan_round, holder.snapshot
                frontier = frontier.join(Frontier({copy_name(table): after}))
                bounds.append(frontier)
                if not queue:
                    active.remove(queue)
                    if queued:
                        active.append(queued.pop(0))
        return bounds

    def _end_first(self, complete: bool) -> None:
        if self._initial is not None:
            self._initial.close()
            self._initial = None
            if complete:
                log.info("the copy of all tables is complete")
        self._bar.close()

    # --- later copies -------------------------------------------------------------------------

    def _later_bounds(self, at: Frontier, table: PgTable) -> Sequence[Frontier]:
        """Bounds of the stream until it has passed the round's snapshot, then the round itself."""
        if self._later is not None and not self._later.holder.alive():
            self.end_later()
        if self._later is None and not self._may_copy(at, table):
            bounds = self._stream_until_settled(at, table)
            if bounds or not self._settled:
                return bounds
        position = at[self._run.wal][0]
        if self._later is None:
            # All of the stream since the snapshot is kept until the round is committed, so the
            # snapshot is taken when the stream has come close.
            self._close_at = self._close_at or self._run.server.mark()
            if position < self._close_at:
                return self._stream.bounds(at, self._close_at)
            self._later, self._close_at = self._begin_later(at, table), 0
        later = self._later
        if position < later.ready_at:
            return self._stream.bounds(at, later.ready_at)
        after = after_round(later.copy_number, later.plan)
        key = copy_name(later.table), after
        self._plans[key] = later.table, later.plan, later.holder.snapshot
        return [at.join(Frontier({key[0]: after}))]

    def _may_copy(self, at: Frontier, table: PgTable) -> bool:
        """Whether all transactions have ended that began before the table was seen published."""
        begun = at[copy_name(table)][2:4] != (0, 0)
        return self._settled or begun

    def _stream_until_settled(self, at: Frontier, table: PgTable) -> Sequence[Frontier]:
        """Bounds of the stream while a copy waits for transactions; no lock is held meanwhile."""
        deadline = Deadline(_SETTLE_SECONDS_MAX)
        while True:
            pids = self._run.server.publications.running(self._published_at)
            if pids is None:
                self._settled, self.trouble = True, None
                return []
            bounds = self._stream.bounds(at, 0)
            if deadline.passed:
                self.trouble = waiting(table.name, pids)
            if bounds or self.trouble is not None:
                return bounds
            deadline.look_again()

    def _begin_later(self, at: Frontier, table: PgTable) -> _LaterRound:
        """Pin a snapshot that holds all that was streamed up to `at`."""
        table = self._run.tables.renew(table)
        for _ in range(_SNAPSHOT_ATTEMPTS_MAX):
            holder = self._hold([table])
            try:
                seen = holder.lacks(self._stream.recent_xids())
            except BaseException:
                holder.close()
                raise
            if not seen:
                _refuse_keyless(table, holder)
                break
            # A transaction that we have seen is not over for others.
            holder.close()
            self._run.pause()
        else:
            raise SourceUnavailable(
                f"could not take a snapshot of table {table.name} that has what was streamed"
            )
        position = at[copy_name(table)]
        self._bar.show(self._run.tables.all())
        return _LaterRound(
            table=table,
            holder=holder,
            plan=self._rounds(table, position)[0],
            copy_number=position[0],
            taken_at=at[self._run.wal][0],
            ready_at=self._run.server.mark(),
        )

    def end_later(self) -> None:
        """Give a later round up: it needs all of the stream since its snapshot was taken."""
        if self._later is not None:
            self._later.holder.close()
            self._later = None

    # --- what is in an epoch ------------------------------------------------------------------

    def splits(self, epoch: Epoch) -> list[Split]:
        """The splits of a copy's epoch: it moves the position of one table."""
        moved = [
            name
            for name in epoch.upper.positions
            if name.startswith(COPY) and epoch.upper[name] != epoch.lower[name]
        ]
        planned = [(name, epoch.upper[name]) for name in moved if epoch.upper[name][1] > EMPTYING]
        found = [self._plans[key] for key in planned if key in self._plans]
        splits: list[Split] = []
        for table, plan, snapshot in found:
            touched = self._touched(table, epoch) if self._later is not None else None
            splits += [
                CopySplit(
                    table=table.name,
                    dsn=self._run.server.dsn,
                    snapshot=snapshot,
                    ranges=share,
                    relation=relation_of(table),
                    row_filter=table.row_filter,
                    replaces=self._later is not None,
                    touched=touched,
                )
                for share in shares(plan.ranges, max(SPLITS_PER_ROUND, self._run.parallelism()))
            ]
        return splits

    def begun_again(self, epoch: Epoch) -> set[str]:
        """Tables that a repeated copy fills anew from this epoch on."""
        return {
            table.name
            for table in self._run.tables.all()
            if begins_again(epoch.lower[copy_name(table)], epoch.upper[copy_name(table)])
        }

    def ends_one(self, epoch: Epoch) -> bool:
        """Whether the copy of a table ends with this epoch: it shall never be made again."""
        return any(
            not is_copied(epoch.lower, table) and is_copied(epoch.upper, table)
            for table in self._run.tables.all()
        )

    def _touched(self, table: PgTable, epoch: Epoch) -> WalSplit | None:
        """The changes of a table that were streamed since the round's snapshot was taken."""
        assert self._later is not None
        upper = epoch.lower[self._run.wal][0]
        return self._stream.changes_between(table.name, self._later.taken_at, upper)

    # --- beside the copies --------------------------------------------------------------------

    def kept_from(self, position: int) -> int:
        """From where on a round needs the stream; the position when there is none."""
        later = self._later
        return later.taken_at if later else position

    def show(self, lessons: Sequence[Any]) -> None:
        """Show how far the copy is."""
        self._bar.move(lessons)

    def yield_locks(self) -> None:
        """Let go of a copy's locks that someone waits for, whatever the copy itself waits for."""
        later = self._later
        for holder in (self._initial, later.holder if later else None):
            if holder is not None and self._run.server.blocks(holder.pid, LOCK_SECONDS):
                log.info("someone waits for a lock of the copy: it goes on with another snapshot")
                holder.close()

    def give_up(self) -> None:
        """Let go of snapshots: someone may wait for the locks that come with them."""
        self._end_first(complete=False)
        self.end_later()

    def close(self) -> None:
        """Let go of snapshots and locks."""
        later = self._later
        for holder in (self._initial, later.holder if later else None):
            if holder is not None:
                holder.close()
        self._bar.close()


def _refuse_keyless(table: PgTable, holder: Holder) -> None:
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
