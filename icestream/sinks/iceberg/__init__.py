"""The Iceberg sink: one snapshot per table and epoch, with the frontier in its summary.

Only tables with changes commit an epoch, in parallel, or with `atomic` all in one request. The
tables of a pipeline are those that its source tables are mapped to (`icestream.names`), and those
in its namespace that say they are its own (`owners`); every other table is a stranger's.
"""

import itertools
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from icestream import dead_letters, failpoints, metrics
from icestream.epoch import Epoch, Progress, batch_id, furthest, lacking_tables, name_id, table_id
from icestream.errors import Broken, ConfigInvalid, NeedsOperator, TargetUnavailable, check
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.files import DATA, FileClosed
from icestream.iceberg.handle import TableName
from icestream.iceberg.head import Head, Past
from icestream.iceberg.table import OWNER_PROPERTY, Table
from icestream.iceberg.target import WriteTarget
from icestream.report import Report
from icestream.schema import (
    NAME_MAPPING,
    Column,
    TableShape,
    doubled,
    new_schema,
    schema_from_json,
    source_schema,
)
from icestream.sinks import Committed, StaleWrite, Written
from icestream.sinks.iceberg.commit import (
    Commit,
    publish_claim,
    publish_epoch,
    publish_together,
    refuse_rollback,
    refuse_successor,
    rival_run,
)
from icestream.sinks.iceberg.making import (
    SCHEMA_PROPERTY,
    key_of,
    new_table,
    own_schema,
    warn_of_deleted_metadata,
)
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.own_tables import OwnTables
from icestream.sinks.iceberg.owners import (
    Owner,
    TableRefused,
    TableToClaim,
    owner_of,
    refuse_stranger,
)
from icestream.sinks.iceberg.rollback import Rollback, settle
from icestream.sinks.iceberg.state import TableState, each
from icestream.sinks.iceberg.stored import ReadRows, Wanted, look_up
from icestream.sinks.iceberg.writer import IcebergWriter

log = logging.getLogger(__name__)


# Each further listing means that another run made tables meanwhile; that ends with its claim.
LISTINGS_MAX = 10
# A source whose columns change their names meets this many between two commits, and not more.
RENAMES_MAX = 8


class IcebergSink:
    """See the module and `icestream.sinks.Sink`."""

    def __init__(
        self,
        catalog: Catalog,
        options: IcebergSinkOptions,
        pipeline: str,
        read_rows: ReadRows | None = None,
    ):
        self._catalog = catalog
        self._read_rows = read_rows
        self._options = options
        self._pipeline = pipeline
        self._generation = 0
        self._claim_id = str(uuid.uuid4())
        self._states: dict[str, TableState] = {}
        self._writers = itertools.count()
        self._own = OwnTables(catalog, options, pipeline)
        self._names = self._own.names
        # Tables that the source has; others are known because they say that they are ours.
        self._sources: frozenset[str] = frozenset()
        route = options.route
        self._named_by_records = bool(route and route.field and not route.tables)
        # What records are told whose tables cannot be: by Iceberg table, by source table.
        self._taken: dict[str, tuple[str, str]] = {}
        self._refusals: dict[str, str] = {}
        self.branch = options.branch
        if options.atomic:
            catalog.require_transactions()
            log.warning(
                "atomic: the catalog must commit to many tables all or none, and not every one does"
            )

    def table_name(self, table: str) -> TableName:
        """The name in the catalog of a source table."""
        return self._own.table_name(table)

    def existing(self, table: str) -> Table | None:
        """The Iceberg table of a source table, if it is there and the pipeline's."""
        handle = self._catalog.load(self.table_name(table))
        return handle if handle is not None and self._own.is_own(handle) else None

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """What the tables remember; see `Sink.durable`."""
        found = self._remembered(tables)
        if lost := lacking_tables(found):
            # Another run may have gone on while they were read one after the other. What is read
            # after all others lacks nothing then.
            again = self._remembered(tables)
            for table, error in lost.items():
                if table in again and table in lacking_tables({**found, table: again[table]}):
                    raise error
            raise TargetUnavailable(
                "the tables were written to while they were read",
                detail="Another run of the pipeline is active.",
                hint="Nothing is lost; start again.",
            )
        self._own.refuse_unread(found)
        return found

    def _remembered(self, tables: Sequence[str]) -> dict[str, Progress]:
        found = {}
        for table, (_, head) in self.heads(tables).items():
            refuse_rollback(head, table, self._pipeline)
            progress = head.progress or Progress(pipeline=self._pipeline)
            found[table] = replace(progress, table_id=table_id(head.uuid))
        return found

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Take the pipeline over in every table that exists; see `Sink.claim`."""
        # A call that failed on the way may have claimed some tables; this one claims them anew.
        self._states = {}
        self._sources = frozenset(tables)
        self._claim_id = str(uuid.uuid4())
        heads = self.heads(tables)
        for table, (_, head) in heads.items():
            refuse_rollback(head, table, self._pipeline)
        generations = [head.progress.generation for _, head in heads.values() if head.progress]
        self._generation = 1 + max(generations, default=0)
        handles = {table: heads[table][0] for table in sorted(heads)}
        # The first table decides between two runs that start at once: claiming all tables in
        # parallel could give each run some of them and stop both.
        self._take_over(dict(itertools.islice(handles.items(), 1)))
        for _ in range(LISTINGS_MAX):
            self._take_over({t: handle for t, handle in handles.items() if t not in self._states})
            # A run that is still active may have made tables since they were listed; from the
            # claims on it makes no more (`_refuse_rivals`).
            handles = self._own.existing(tables) if handles else {}
            if handles.keys() <= self._states.keys():
                break
        else:
            raise rival_run(max(handles))
        states = dict(self._states)
        for state in states.values():
            state.proven = True
        found = {table: state.progress for table, state in states.items()}
        self._own.refuse_unread(found)
        return found

    def _take_over(self, handles: Mapping[str, Table]) -> None:
        certain = each(handles, self._certain)
        claimed = each(handles, lambda t, handle: self._claim(handle, t, certain[t]))
        for table, handle in handles.items():
            self._states[table] = TableState(handle, claimed[table], certain[table])
        failpoints.reach(failpoints.AFTER_CLAIM)

    def heads(self, tables: Sequence[str], refuse: bool = True) -> dict[str, tuple[Table, Head]]:
        """The pipeline's tables that exist, each with its head; nothing is claimed.

        Raises `ConfigInvalid` for source tables whose place is taken, unless not to `refuse`.
        """
        handles = self._own.existing(tables, refuse)
        branch = self._options.branch
        heads = each(handles, lambda _, handle: handle.head(self._pipeline, branch))
        return {table: (handle, heads[table]) for table, handle in handles.items()}

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Make sure that the table is there, claimed, and its key known; see `Sink.prepare`."""
        try:
            state = self._state(table, shape)
        except TableRefused as refused:
            if not self._named_by_records or table.endswith(dead_letters.SUFFIX):
                raise
            # The records that name the table are rejected, each for itself.
            self._refusals[table] = refused.reason
            return False
        if state is None:
            return False
        if state.key is None:
            if not self._shaped(table, state, shape):
                return False
            warn_of_deleted_metadata(self._options, state.handle)
            state.key = key_of(self._options, table, state.handle, shape)
            if NAME_MAPPING in state.handle.properties() and (known := shape()):
                state.meet(known.columns)
        return True

    def recalled(self, table: str, name: str) -> str | None:
        """A property of a table that is prepared."""
        return self._states[table].handle.properties().get(name)

    def remember(self, table: str, name: str, value: str) -> None:
        """Set a property of a table that is prepared."""
        self._states[table].handle.remember(name, value)

    def evolve(self, table: str, columns: Sequence[Column]) -> None:
        """Let the table take these columns of the source; see `Evolves.evolve`."""
        state = self._states[table]
        before = state.source_names()
        noted = SCHEMA_PROPERTY if own_schema(state) else None
        if state.handle.evolve(columns, state.key or (), noted):
            log.info("columns %s evolved", [c.name for c in columns], extra={"table": table})
            state.renames = 0
        state.meet(columns)
        state.target = None
        now = state.source_names()
        changed = [number for number in before.keys() & now.keys() if before[number] != now[number]]
        if changed:
            # Each of two columns would take the other's place for ever.
            state.renames += 1
            if state.renames > RENAMES_MAX:
                both = [before[changed[0]], now[changed[0]]]
                raise doubled(str(state.handle.name), both[0], both)

    def writer(
        self, epoch: Epoch, tables: Sequence[str], read_otherwise: Collection[str] = ()
    ) -> IcebergWriter:
        """A writer for the epoch's files of these tables, as they are now.

        A table that carries the epoch while its dead letters lack it is read as it was when it took
        the epoch: what was no row then is a letter. Not so those that are `read_otherwise`.
        """
        if not all(self._states[table].proven for table in tables):
            self._refuse_rivals()
        # A commit that finds another schema takes targets back at any moment, in its own thread.
        known = {table: self._states[table].target for table in tables}
        targets = {table: target for table, target in known.items() if target is not None}
        missing = {table: self._states[table] for table in tables if table not in targets}
        for table, target in each(missing, self._target).items():
            targets[table] = self._states[table].target = target
        lacking = self._lacking_letters(epoch, tables)
        decided = {t: s for t, s in lacking.items() if t not in read_otherwise}
        targets.update(each(decided, self._target_of_epoch))
        return IcebergWriter(
            pipeline=self._pipeline,
            epoch=epoch.number,
            run=f"g{self._generation}.{next(self._writers)}",
            targets=targets,
            batch_ids={table: batch_id(self._pipeline, table, epoch.upper) for table in tables},
            names=self._names,
            taken=self._feeders() if self._named_by_records else {},
            refusals=dict(self._refusals),
            only_read=frozenset(decided),
        )

    def decided(self, epoch: Epoch, tables: Sequence[str]) -> Collection[str]:
        """The tables that have this epoch already, while their dead letters lack it.

        Which records are letters was decided when the table took it, and must not change.
        """
        return self._lacking_letters(epoch, tables).keys()

    def commit(self, written: Written) -> Sequence[Committed]:
        """Publish the epoch in every table that it changes; see `Sink.commit`.

        Tables come before their dead letters: a table that has the epoch says which records are
        letters, and letters that have it say that all rows are there. So an epoch that is written
        again by another schema brings no record twice, and none is left out.
        """
        epoch = written.epoch
        carriers, complete = self._carriers(epoch), self._complete(epoch)
        files = collect(written.reports, epoch.number)
        files.update({table: files.get(table, []) for table in sorted(written.truncated)})
        files = {table: closed for table, closed in files.items() if table not in complete}
        new = replace(self._progress_of(epoch, {*carriers, *files}), replaying=written.replaying)
        commits = {
            table: self._commit(table, new, closed, written)
            for table, closed in files.items()
            if table not in carriers
        }
        self._make_known(commits)
        try:
            if self._options.atomic and len(commits) > 1:
                self._publish_together(commits)
            else:
                self._publish_in_turn(commits)
        except StaleWrite:
            for state in list(self._states.values()):
                state.target = None
            raise
        self._recount(epoch, new)
        found = {table: self._states[table].committed or _kept(table) for table in files}
        return [replace(one, duplicate=True) if t in carriers else one for t, one in found.items()]

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Publish the frontier of an epoch without changes, in the first table by default.

        Only in a table that the source feeds: one that left the configuration stays as it is, and
        so does one that lies behind.
        """
        up_to_date = [t for t, state in list(self._states.items()) if not state.progress.replaying]
        where = table or min(filter(self._is_fed, up_to_date), default=None)
        if where not in self._states:
            return False
        self._make_known([where])
        new = self._progress_of(epoch, {where})
        nothing = Written(epoch=epoch, reports=[], writer=None, labels=labels)
        self._publish(where, self._commit(where, new, [], nothing))
        return True

    def stored(
        self, table: str, keys: pa.Table, columns: Sequence[str], before: Frontier | None = None
    ) -> pa.Table:
        """The branch's rows under these keys, by the source's names; see `LooksUpRows.stored`."""
        if self._read_rows is None:
            raise Broken("the sink was given no way to read rows")
        past = None if before is None else Past(pipeline=self._pipeline, before=before)
        wanted = Wanted(keys=keys, columns=columns, past=past)
        return look_up(self._states[table], self._options.branch, wanted, self._read_rows)

    def close(self) -> None:
        """Let go of the catalog's connections."""
        self._catalog.close()

    def settle_rollback(
        self, table: str, replay: bool, verify: Callable[[Frontier], None] = lambda _: None
    ) -> Progress:
        """Settle a rollback: replay from the older progress, or keep the newer one and go on.

        The same for a table that lacks epochs because it was set back or away. `verify` raises when
        the source can no longer serve what follows a frontier.
        """
        handle = self.existing(table)
        if handle is None:
            raise ConfigInvalid(
                f"the pipeline has no table {self.table_name(table)}",
                hint="`icestream status` shows the pipeline's tables.",
            )
        branch = self._options.branch
        head = handle.head(self._pipeline, branch)
        newer = head.rolled_back_from or self._missed(table)
        if newer is None:
            raise ConfigInvalid(f"table {self.table_name(table)} was not rolled back")
        rollback = Rollback(
            table=table, handle=handle, head=head, newer=newer, claim_id=self._claim_id
        )
        return settle(rollback, self._pipeline, branch, replay, verify)

    def _missed(self, table: str) -> Progress | None:
        """The last epoch, when a table lacks epochs before it; None when it lacks nothing."""
        heads = {name: head for name, (_, head) in self.heads([table], refuse=False).items()}
        nothing = Progress(pipeline=self._pipeline)
        progress = {
            name: replace(head.progress or nothing, table_id=table_id(head.uuid))
            for name, head in heads.items()
        }
        return furthest(progress.values()) if table in lacking_tables(progress) else None

    def _certain(self, table: str, handle: Table) -> bool:
        """Whether it is known that a table of the pipeline is fed by this source table."""
        owner = owner_of(handle)
        if table in self._sources or (owner is not None and owner.table is not None):
            return True
        return handle.fed(self._pipeline, self._options.branch, table) is not False

    def _feeders(self) -> dict[str, tuple[str, str]]:
        """By Iceberg table the source table that feeds it, and what another one is told."""
        found = dict(self._taken)
        for table, state in list(self._states.items()):
            if state.certain:
                name = state.handle.name
                found[name.name] = (table, f"table {name} is fed by source table {table}")
        return found

    def _is_fed(self, table: str) -> bool:
        """Whether the source still feeds a table of the pipeline, as far as can be known."""
        prepared = self._states[table].key is not None
        return table in self._sources or prepared or self._named_by_records

    def _target_of_epoch(self, table: str, state: TableState) -> WriteTarget:
        """The target by the schema that the table had for its last epoch."""
        return self._target(table, state, state.progress.schema_id)

    def _target(self, table: str, state: TableState, schema_id: int | None = None) -> WriteTarget:
        target = state.handle.target(self._options.branch, state.key or (), schema_id)
        schema = schema_from_json(target.schema_json)
        seen = source_schema(schema, target.properties.get(NAME_MAPPING), state.columns)
        if seen == schema:
            return target
        return replace(target, source_schema_json=seen.model_dump_json())

    def _refuse_rivals(self) -> None:
        """Make sure that this run still owns the pipeline before it writes to new tables.

        A new table is on no successor's list. So it is claimed first, and then a table that every
        successor claims is looked at; a successor claims first, and then lists tables again. Either
        this run sees the claim or the successor sees the table. As long as there is no such table,
        each run looks at all that there are.
        """
        branch = self._options.branch
        # Other tables are prepared meanwhile.
        states = list(self._states.items())
        handles = {table: state.handle for table, state in states}
        proven = [table for table, state in states if state.proven][:1]
        if not proven:
            own = {handle.name for handle in handles.values()}
            for handle in self._own.existing(()).values():
                if handle.name not in own and handle.has_tag(self._pipeline):
                    raise rival_run(str(handle.name))
        looked_at = {table: handles[table] for table in proven or handles}
        heads = each(looked_at, lambda _, handle: handle.head(self._pipeline, branch))
        for table, head in heads.items():
            refuse_successor(head, table, self._generation)
        for _, state in states:
            state.proven = True

    def _state(self, table: str, shape: Callable[[], TableShape | None]) -> TableState | None:
        """The state of a source table's Iceberg table, which is claimed or made if need be."""
        known = self._states.get(table)
        if known is not None:
            return known if known.certain else self._assured(table, table)
        name = self.table_name(table)
        if holder := self._holder(lambda state: state.handle.name == name):
            return self._assured(holder, table)
        self._names.by_name([table])
        handle = self._catalog.load(name) or self._create(table, name, shape())
        if handle is None:
            return None
        self._refuse_stranger(handle, table)
        there = table_id(handle.uuid())
        # A catalog that folds names has one table for several spellings.
        if holder := self._holder(lambda state: state.progress.table_id == there):
            return self._assured(holder, table)
        if handle.name in self._own.unread and handle.has_tag(self._pipeline):
            raise _unread(handle.name)
        state = TableState(handle, self._claim(handle, table, certain=True))
        if state.progress.epoch:
            raise rival_run(table)
        self._states[table] = state
        return state

    def _holder(self, wanted: Callable[[TableState], bool]) -> str | None:
        """The source table whose Iceberg table is the wanted one, as far as this run knows."""
        return next((t for t, state in list(self._states.items()) if wanted(state)), None)

    def _refuse_stranger(self, handle: Table, table: str) -> None:
        mine = Owner(pipeline=self._pipeline, table=table)
        try:
            refuse_stranger(handle.name, owner_of(handle), mine, self._names)
        except TableRefused as refused:
            self._taken[handle.name.name] = ("", refused.reason)
            raise

    def _assured(self, holder: str, table: str) -> TableState:
        """The state of a table that was found before the source named it, under some name.

        A table of an earlier version does not tell its source table, but its last epoch proves it.
        Which tables carry an epoch was found out under the other name, so a new start is needed.
        """
        state = self._states[holder]
        handle, mine = state.handle, Owner(pipeline=self._pipeline, table=table)
        other = Owner(pipeline=self._pipeline, table=holder if state.certain else "another one")
        if state.certain or not handle.fed(self._pipeline, self._options.branch, table):
            refuse_stranger(handle.name, other, mine, self._names)
        handle.remember(OWNER_PROPERTY, mine.to_text())
        raise NeedsOperator(
            f"table {handle.name} is fed by source table {table}, and remembers it from now on",
            detail="An earlier version of icestream made the table and did not write it down.",
            hint="Start the pipeline again.",
        )

    def _claim(self, handle: Table, table: str, certain: bool) -> Progress:
        claim = Progress(pipeline=self._pipeline, generation=self._generation)
        mine = Owner(pipeline=self._pipeline, table=table if certain else None)
        owned = TableToClaim(handle, mine, self._names)
        return publish_claim(owned, self._options.branch, claim, self._claim_id)

    def _create(self, table: str, name: TableName, shape: TableShape | None) -> Table | None:
        if shape is None:
            return None
        owner = Owner(pipeline=self._pipeline, table=table)
        return self._catalog.create(name, new_table(self._options, owner, name, shape))

    def _shaped(
        self, table: str, state: TableState, shape: Callable[[], TableShape | None]
    ) -> bool:
        """Let a table that an earlier run made, and that never took an epoch, have new types.

        Its operator has declared columns since, because their values were refused. False while
        nobody knows the types that it should have; but in an epoch that other tables carry already
        it takes its part as it is, for that part may be deletes alone, which tell no types.
        """
        if not own_schema(state) or not state.handle.never_held_rows():
            return True
        known = shape()
        if known is None:
            last = furthest(each.progress for each in list(self._states.values()))
            return last is not None and state.progress.table_id in last.members
        columns = [Column(name=c.name, type=c.field_type) for c in new_schema(known).fields]
        changed = state.handle.shape_anew(columns, SCHEMA_PROPERTY)
        if changed:
            log.info("columns %s have new types", changed, extra={"table": table})
        return True

    def _commit(
        self, table: str, new: Progress, files: Sequence[FileClosed], written: Written
    ) -> Commit:
        writer = written.writer
        target = writer.targets.get(table) if isinstance(writer, IcebergWriter) else None
        new = replace(new, schema_id=target.schema_id if target else None)
        truncated = table in written.truncated
        # Where no older row stays there is nothing to delete.
        kept = [file for file in files if not truncated or file.kind == DATA]
        return Commit(
            table=table,
            branch=self._options.branch,
            expected=self._states[table].progress,
            new=new,
            files=kept,
            written_for=(target.uuid, target.schema_id, target.spec_id) if target else None,
            labels=written.labels,
            truncated=truncated,
        )

    def _progress_of(self, epoch: Epoch, tables: Collection[str]) -> Progress:
        """The progress that an epoch of these tables makes durable."""
        ids = frozenset(self._states[table].progress.table_id for table in tables)
        known = [state.progress for state in list(self._states.values())]
        before = {
            # A table that has taken the epoch already knows where it was before.
            each.table_id: each.before.get(each.table_id, 0)
            if each.epoch == epoch.number
            else each.epoch
            for each in known
        }
        new = summaries.progress_of(epoch, self._pipeline, self._generation, len(tables))
        before = {name: number for name, number in before.items() if number}
        return replace(new, members=ids, before=before, names=self._own_names())

    def _own_names(self) -> frozenset[str]:
        states = list(self._states.values())
        return frozenset(name_id(state.handle.name.name) for state in states)

    def _make_known(self, tables: Iterable[str]) -> None:
        """Have a table of the last epoch name tables that are new, before they take an epoch.

        Where records name the tables only the tables themselves tell which ones there are. A start
        that cannot read one of them must know that it is there: it may hold the last epoch alone.
        """
        if not self._named_by_records:
            return
        states = list(self._states.items())
        last = furthest(state.progress for _, state in states)
        new = {name_id(self._states[table].handle.name.name) for table in tables}
        if last is None or new <= last.names:
            return
        witness = next(table for table, state in states if state.progress is last)
        naming = self._correction(witness, replace(last, names=last.names | self._own_names()))
        self._publish(witness, naming)

    def _carriers(self, epoch: Epoch) -> list[str]:
        """The tables that have taken the epoch already: in this run, or before a restart."""
        span = Progress(
            pipeline=self._pipeline, epoch=epoch.number, lower=epoch.lower, upper=epoch.upper
        )
        return [t for t, state in list(self._states.items()) if state.progress.same_epoch(span)]

    def _complete(self, epoch: Epoch) -> set[str]:
        """Tables without a part in the epoch, as their letters say, or the other way round.

        An older writing found no row, or no letter; this one may, if the schema has changed.
        """
        carriers, complete = self._carriers(epoch), set()
        for table in carriers:
            other = dead_letters.counterpart(table)
            state, members = self._states.get(other), self._states[table].progress.members
            if state is not None and members and other not in carriers:
                complete |= {other} if state.progress.table_id not in members else set()
        return complete

    def _lacking_letters(self, epoch: Epoch, tables: Sequence[str]) -> dict[str, TableState]:
        carriers = frozenset(self._carriers(epoch))
        return {
            t: s for t in carriers.intersection(tables) if (s := self._lacks_letters(t, carriers))
        }

    def _lacks_letters(self, table: str, carriers: Collection[str]) -> TableState | None:
        """The state of a table that carries an epoch which its dead letters have yet to take."""
        letters = self._states.get(dead_letters.table_of(table))
        if letters is None or dead_letters.table_of(table) in carriers:
            return None
        state = self._states[table]
        lacking = letters.progress.table_id in state.progress.members
        return state if lacking and state.progress.schema_id is not None else None

    def _recount(self, epoch: Epoch, new: Progress) -> None:
        """Have all tables of an epoch say the same of its tables.

        An epoch that is written a second time may have other tables than the first time. What the
        tables said that took it then is corrected, by commits without files. The source is told
        that the epoch is durable only afterwards, so whoever finds an epoch whose tables do not
        agree can write it once more.
        """
        corrected = {}
        for table in self._carriers(epoch):
            state = self._states[table]
            right = replace(state.progress, tables=new.tables, members=new.members)
            if right != state.progress:
                corrected[table] = self._correction(table, right)
        each(corrected, self._publish)

    def _correction(self, table: str, right: Progress) -> Commit:
        """A commit without files, with which a table says something else of its last epoch."""
        return Commit(
            table=table,
            branch=self._options.branch,
            expected=self._states[table].progress,
            new=right,
            files=[],
            written_for=None,
            labels={},
            recount=True,
        )

    def _publish(self, table: str, commit: Commit) -> None:
        self._note(commit, publish_epoch(self._states[table].handle, commit))

    def _publish_in_turn(self, commits: Mapping[str, Commit]) -> None:
        """Publish the epoch in its tables, and then in those of their dead letters."""
        letters = {t: c for t, c in commits.items() if t.endswith(dead_letters.SUFFIX)}
        each({t: c for t, c in commits.items() if t not in letters}, self._publish)
        each(letters, self._publish)

    def _publish_together(self, commits: Mapping[str, Commit]) -> None:
        handles = {table: self._states[table].handle for table in commits}
        committed = publish_together(self._catalog, handles, commits, each)
        for table, commit in commits.items():
            self._note(commit, committed[table])

    def _note(self, commit: Commit, committed: Committed) -> None:
        """Remember what a table holds now that its commit is durable."""
        state, new = self._states[commit.table], commit.new
        if committed.duplicate:
            # An earlier attempt brought the epoch, and may have said something else of its tables.
            new = state.handle.head(self._pipeline, self._options.branch).progress or new
        state.progress = replace(new, table_id=state.progress.table_id)
        if commit.recount:
            return
        state.committed = committed
        state.renames = 0
        table = commit.table
        for file in commit.files:
            metrics.ROWS_WRITTEN.labels(table, file.kind).inc(file.record_count)
            metrics.BYTES_WRITTEN.labels(table, file.kind).inc(file.size_bytes)


def _unread(name: TableName) -> TargetUnavailable:
    return TargetUnavailable(
        f"table {name} could not be read when the pipeline started",
        detail="It is the pipeline's, and what it holds decides where the pipeline goes on.",
        hint="Start the pipeline again.",
    )


def _kept(table: str) -> Committed:
    """The result for a table that took the epoch in an earlier run."""
    return Committed(table=table, snapshot_id=None, duplicate=True, seconds=0.0)


def collect(reports: Iterable[Report], epoch: int) -> dict[str, list[FileClosed]]:
    """Reported files by table; a repeated report is dropped, one that differs is refused.

    Of a task that ran twice the files of one attempt count: the first that is met.
    """
    by_path: dict[str, FileClosed] = {}
    attempts: dict[tuple[str, str], str] = {}
    for report in reports:
        file = FileClosed.of(report)
        check(file.epoch == epoch, f"{file.path} belongs to epoch {epoch}")
        if attempts.setdefault((file.table, file.worker), file.attempt) != file.attempt:
            continue
        known = by_path.get(file.path)
        if known is not None and known.sha256 != file.sha256:
            raise Broken(
                f"two different files were reported under {file.path}",
                detail="A task that ran twice did not write the same file twice.",
            )
        if known is None:
            by_path[file.path] = file
            metrics.FILES_CLOSED.labels(file.table, file.kind).inc()
    tables: dict[str, list[FileClosed]] = {}
    for _, file in sorted(by_path.items()):
        tables.setdefault(file.table, []).append(file)
    return tables
