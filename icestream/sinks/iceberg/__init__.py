"""The Iceberg sink: one snapshot per table and epoch, with the frontier in its summary.

Only tables with changes commit an epoch, in parallel, or with `atomic` all in one request. The
tables of a pipeline are those that its source tables are mapped to (`icestream.names`), and those
in its namespace that say they are its own (`owners`); every other table is a stranger's.
"""

import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    NestedField,
    StringType,
)

from icestream import dead_letters, failpoints, metrics
from icestream.epoch import (
    Epoch,
    Progress,
    batch_id,
    furthest,
    known_names,
    lacking_tables,
    name_id,
    table_id,
)
from icestream.errors import (
    Broken,
    ConfigInvalid,
    HistoryLost,
    IcestreamError,
    NeedsOperator,
    Retryable,
    TargetUnavailable,
    check,
)
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.files import DATA, FileClosed
from icestream.iceberg.handle import TableName
from icestream.iceberg.head import Head, Past
from icestream.iceberg.new_table import NewTable
from icestream.iceberg.rows import bound, for_spark, from_spark
from icestream.iceberg.staged import staged_name
from icestream.iceberg.table import OWNER_PROPERTY, Table
from icestream.iceberg.target import WriteTarget
from icestream.names import ANY_TABLE
from icestream.report import Report
from icestream.schema import (
    NAME_MAPPING,
    Column,
    TableShape,
    arrow_schema,
    doubled,
    new_schema,
    schema_from_json,
    source_schema,
    table_names,
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
from icestream.sinks.iceberg.options import IcebergSinkOptions, TableOptions
from icestream.sinks.iceberg.owners import (
    Owner,
    TableRefused,
    TableToClaim,
    owner_of,
    refuse_stranger,
)
from icestream.sinks.iceberg.writer import IcebergWriter

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")

COMMITS_IN_PARALLEL = 8
# Each further listing means that another run made tables meanwhile; that ends with its claim.
LISTINGS_MAX = 10
# The key in the source's order: identifier fields are a set and forget it.
KEY_PROPERTY = "icestream.key"
# The schema that icestream itself gave a table last, before its first epoch; 0 if there is none.
SCHEMA_PROPERTY = "icestream.schema-id"
# Every commit writes a metadata file that lists all snapshots; without these they pile up.
DELETES_METADATA = "write.metadata.delete-after-commit.enabled"
_NEW_TABLE_PROPERTIES = {
    DELETES_METADATA: "true",
    "write.metadata.previous-versions-max": "100",
}
# A source whose columns change their names meets this many between two commits, and not more.
RENAMES_MAX = 8
# Seconds between tries to read a table that nobody named; then it is passed over.
UNREADABLE_PAUSES = (0.5, 1.0)


ReadRows = Callable[[str, pa.Table, Sequence[str]], pa.Table]
"""Reads staged rows by their keys; `icestream.spark.stored_rows` on a Spark session."""


class _TableState:
    """What this run knows of one table.

    `proven`: every newer run is sure to find this table. `certain`: its source table is known, and
    not guessed of what an earlier version made. `key` has the table's names, and `columns` are the
    source's as far as they had to be asked, those that were met last at the end.
    """

    __slots__ = (
        *("certain", "columns", "committed", "handle", "key"),
        *("progress", "proven", "renames", "target"),
    )

    def __init__(self, handle: Table, progress: Progress, certain: bool = True):
        self.handle = handle
        self.progress = progress
        self.certain = certain
        self.committed: Committed | None = None
        self.proven = False
        self.key: Sequence[str] | None = None
        self.target: WriteTarget | None = None
        self.columns: dict[str, IcebergType] = {}
        self.renames = 0

    def meet(self, columns: Sequence[Column]) -> None:
        """Remember what the source calls its columns, for those that go by several names."""
        for column in columns:
            if not column.absent:
                self.columns.pop(column.name, None)
                self.columns[column.name] = column.type

    def source_names(self) -> dict[int, str]:
        """The names of the table's columns at the source, by field id."""
        return {field.field_id: field.name for field in self.source_schema(()).fields}

    def source_schema(self, names: Iterable[str]) -> Schema:
        """The table's schema by the source's names, among them these."""
        mapping = self.handle.properties().get(NAME_MAPPING)
        schema = schema_from_json(self.handle.schema_json())
        return source_schema(
            schema, mapping, {**self.columns, **dict.fromkeys(names, StringType())}
        )


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
        self._states: dict[str, _TableState] = {}
        self._writers = itertools.count()
        self._names = options.table_names()
        self._namespace = tuple(options.namespace.split("."))
        # Tables of the namespace that were looked at and are not the pipeline's.
        self._strangers: set[TableName] = set()
        self._unread: dict[TableName, IcestreamError] = {}
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
        return TableName(namespace=self._namespace, name=self._names.of(table))

    def existing(self, table: str) -> Table | None:
        """The Iceberg table of a source table, if it is there and the pipeline's."""
        handle = self._catalog.load(self.table_name(table))
        return handle if handle is not None and self._is_own(handle) else None

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
        self._refuse_unread(found)
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
            handles = self._existing(tables) if handles else {}
            if handles.keys() <= self._states.keys():
                break
        else:
            raise rival_run(max(handles))
        states = dict(self._states)
        for state in states.values():
            state.proven = True
        found = {table: state.progress for table, state in states.items()}
        self._refuse_unread(found)
        return found

    def _take_over(self, handles: Mapping[str, Table]) -> None:
        certain = self._each(handles, self._certain)
        claimed = self._each(handles, lambda t, handle: self._claim(handle, t, certain[t]))
        for table, handle in handles.items():
            self._states[table] = _TableState(handle, claimed[table], certain[table])
        failpoints.reach(failpoints.AFTER_CLAIM)

    def heads(self, tables: Sequence[str], refuse: bool = True) -> dict[str, tuple[Table, Head]]:
        """The pipeline's tables that exist, each with its head; nothing is claimed.

        Raises `ConfigInvalid` for source tables whose place is taken, unless not to `refuse`.
        """
        handles = self._existing(tables, refuse)
        branch = self._options.branch
        heads = self._each(handles, lambda _, handle: handle.head(self._pipeline, branch))
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
            self._warn_of_deleted_metadata(state.handle)
            state.key = self._key(table, state.handle, shape)
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
        """Let the table take these columns of the source; see `Sink.evolve`."""
        state = self._states[table]
        before = state.source_names()
        noted = SCHEMA_PROPERTY if self._own_schema(state) else None
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
        for table, target in self._each(missing, self._target).items():
            targets[table] = self._states[table].target = target
        lacking = self._lacking_letters(epoch, tables)
        decided = {t: s for t, s in lacking.items() if t not in read_otherwise}
        targets.update(self._each(decided, self._target_of_epoch))
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
        """The branch's rows under these keys, by the source's names; see `Sink.stored`."""
        read_rows = self._read_rows
        if read_rows is None:
            raise Broken("the sink was given no way to read rows")
        names = list(dict.fromkeys([*keys.column_names, *columns]))
        seen = self._states[table].source_schema(names)
        places = {field.name: staged_name(field.field_id) for field in seen.fields}
        fields = arrow_schema(seen)
        result = pa.schema([fields.field(name) for name in names])
        if keys.num_rows == 0:
            return result.empty_table()
        bounds = {
            seen.find_field(name).field_id: limit
            for name in keys.column_names
            if (limit := bound(keys.column(name))) is not None
        }
        wanted = pa.table(
            {places[name]: for_spark(keys.column(name)) for name in keys.column_names}
        )
        handle = self._states[table].handle
        past = None if before is None else Past(pipeline=self._pipeline, before=before)
        with handle.staged(self._options.branch, bounds, past) as staged:
            if staged is None:
                return result.empty_table()
            found = read_rows(staged, wanted, [places[name] for name in names])
        arrays = [from_spark(found.column(places[field.name]), field.type) for field in result]
        return pa.table(arrays, schema=result)

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
        if replay and head.forgotten:
            raise HistoryLost(
                f"the epochs after the snapshot that table {table} was rolled back to cannot be "
                "applied again",
                detail="The table keeps large frontiers of its newest snapshots only, and what was "
                "expired only as long as older metadata files are there.",
                hint="Run `icestream rollback --accept` to leave the undone epochs undone, or roll "
                "the table back to a newer snapshot, or drop it and start anew.",
            )
        older = head.progress or Progress(pipeline=self._pipeline)
        if replay:
            _refuse_unserved(table, older.upper, verify)
        kept = replace(older, replaying=True) if replay else newer
        newest = max(older.generation, newer.generation)
        progress = replace(kept, generation=newest + 1)
        entries = summaries.to_entries(progress).plus({summaries.CLAIM: self._claim_id})
        handle.publish(head, branch, [], entries)
        return progress

    def _missed(self, table: str) -> Progress | None:
        """The last epoch, when a table lacks epochs before it; None when it lacks nothing."""
        heads = {name: head for name, (_, head) in self.heads([table], refuse=False).items()}
        nothing = Progress(pipeline=self._pipeline)
        progress = {
            name: replace(head.progress or nothing, table_id=table_id(head.uuid))
            for name, head in heads.items()
        }
        return furthest(progress.values()) if table in lacking_tables(progress) else None

    def _existing(self, tables: Sequence[str], refuse: bool = True) -> dict[str, Table]:
        """The pipeline's tables that exist, by their names at the source.

        Raises `ConfigInvalid` when the place of one of these source tables is taken. Tables that no
        source table is mapped to are looked at once: what is a stranger's stays a stranger's.
        """
        known = {*tables, *self._options.tables} - {ANY_TABLE}
        wanted = self._names.by_name(known) if refuse else {self._names.of(t): t for t in known}
        required = set(tables) if refuse else set()
        named = {TableName(namespace=self._namespace, name=n): t for n, t in wanted.items()}
        listed = {*self._catalog.names(self._namespace)} - self._strangers - named.keys()
        loaded = self._each(dict.fromkeys(named), lambda name, _: self._catalog.load(name))
        loaded |= self._each(dict.fromkeys(sorted(listed, key=str)), self._look_at)
        found = {}
        for name, handle in loaded.items():
            if handle is None:
                continue
            table = named.get(name)
            if table is not None and table in required:
                mine = Owner(pipeline=self._pipeline, table=table)
                refuse_stranger(name, owner_of(handle), mine, self._names)
                found[table] = handle
            elif own := self._feeder(handle, table):
                found[own[0]] = own[1]
            elif table is None:
                self._strangers.add(name)
        return found

    def _look_at(self, name: TableName, _: object) -> Table | None:
        """A table that was listed; one that cannot be read is passed over, for it is not named.

        If the last epoch knew a table of that name, the start ends all the same. Should it be the
        pipeline's nevertheless, then its first change finds what it holds and stops: nothing is
        written twice.
        """
        for pause in (*UNREADABLE_PAUSES, None):
            try:
                return self._catalog.load_listed(name)
            except (Retryable, NeedsOperator) as error:
                problem: IcestreamError = error
            if pause is None or isinstance(problem, NeedsOperator):
                break
            time.sleep(pause)
        log.warning("table %s is passed over: %s", name, problem, extra={"table": str(name)})
        self._strangers.add(name)
        self._unread[name] = problem
        return None

    def _refuse_unread(self, progress: Mapping[str, Progress]) -> None:
        """Raise for a table that could not be read and that the last epoch knew by its name."""
        known = known_names(progress.values())
        own = {name: error for name, error in self._unread.items() if name_id(name.name) in known}
        if own:
            # The next try looks at them again.
            self._strangers -= own.keys()
            self._unread = {n: error for n, error in self._unread.items() if n not in own}
            raise _unreadable(*min(own.items(), key=str))

    def _is_own(self, handle: Table) -> bool:
        owner = owner_of(handle)
        return owner is not None and owner.pipeline == self._pipeline

    def _feeder(self, handle: Table, table: str | None) -> tuple[str, Table] | None:
        """The source table of a table that says it is the pipeline's, and that table under the name
        that the source table gives it; None when it is not the pipeline's.

        Tables of earlier versions do not say it: it is taken to be `table`, or the one of the same
        name, until another source table proves to be the one.
        """
        owner = owner_of(handle)
        if owner is None or owner.pipeline != self._pipeline:
            return None
        found = owner.table or table or handle.name.name
        if self._names.of(found) == handle.name.name:
            return found, handle
        if spelled := self._spelled_otherwise(handle, self.table_name(found)):
            return found, spelled
        log.warning(
            "table %s is left as it is: source table %s goes into %s",
            handle.name,
            found,
            self.table_name(found),
            extra={"table": str(handle.name)},
        )
        return None

    def _spelled_otherwise(self, handle: Table, name: TableName) -> Table | None:
        """The same table under a name that differs in case, in a catalog that folds names."""
        if name.name.casefold() != handle.name.name.casefold():
            return None
        found = self._catalog.load(name)
        return found if found is not None and found.uuid() == handle.uuid() else None

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

    def _target_of_epoch(self, table: str, state: _TableState) -> WriteTarget:
        """The target by the schema that the table had for its last epoch."""
        return self._target(table, state, state.progress.schema_id)

    def _target(self, table: str, state: _TableState, schema_id: int | None = None) -> WriteTarget:
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
            for handle in self._existing(()).values():
                if handle.name not in own and handle.has_tag(self._pipeline):
                    raise rival_run(str(handle.name))
        looked_at = {table: handles[table] for table in proven or handles}
        heads = self._each(looked_at, lambda _, handle: handle.head(self._pipeline, branch))
        for table, head in heads.items():
            refuse_successor(head, table, self._generation)
        for _, state in states:
            state.proven = True

    def _state(self, table: str, shape: Callable[[], TableShape | None]) -> _TableState | None:
        """The state of a source table's Iceberg table, which is claimed or made if need be."""
        known = self._states.get(table)
        if known is not None:
            return known if known.certain else self._assured(table, table)
        name = self.table_name(table)
        if holder := self._holder(lambda state: state.handle.name == name):
            return self._assured(holder, table)
        self._names.by_name([table])
        handle = self._catalog.load(name) or self._create(table, shape())
        if handle is None:
            return None
        self._refuse_stranger(handle, table)
        there = table_id(handle.uuid())
        # A catalog that folds names has one table for several spellings.
        if holder := self._holder(lambda state: state.progress.table_id == there):
            return self._assured(holder, table)
        if handle.name in self._unread and handle.has_tag(self._pipeline):
            raise _unread(handle.name)
        state = _TableState(handle, self._claim(handle, table, certain=True))
        if state.progress.epoch:
            raise rival_run(table)
        self._states[table] = state
        return state

    def _holder(self, wanted: Callable[[_TableState], bool]) -> str | None:
        """The source table whose Iceberg table is the wanted one, as far as this run knows."""
        return next((t for t, state in list(self._states.items()) if wanted(state)), None)

    def _refuse_stranger(self, handle: Table, table: str) -> None:
        mine = Owner(pipeline=self._pipeline, table=table)
        try:
            refuse_stranger(handle.name, owner_of(handle), mine, self._names)
        except TableRefused as refused:
            self._taken[handle.name.name] = ("", refused.reason)
            raise

    def _assured(self, holder: str, table: str) -> _TableState:
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

    def _warn_of_deleted_metadata(self, handle: Table) -> None:
        """A catalog may delete old metadata of some tables before it refuses the commit to all."""
        if self._options.atomic and handle.properties().get(DELETES_METADATA) == "true":
            log.warning(
                "table %s has %s = true, and a commit to many tables that fails may damage it; "
                "set it to false",
                handle.name,
                DELETES_METADATA,
                extra={"table": str(handle.name)},
            )

    def _create(self, table: str, shape: TableShape | None) -> Table | None:
        if shape is None:
            return None
        options = self._table_options(table)
        # Catalogs have deleted old metadata inside a commit to many tables that then failed.
        unsafe = {DELETES_METADATA} if self._options.atomic else set()
        properties = {
            "format-version": str(self._options.format_version),
            KEY_PROPERTY: json.dumps(list(shape.key)),
            **{n: value for n, value in _NEW_TABLE_PROPERTIES.items() if n not in unsafe},
            **self._options.properties,
            **options.properties,
            OWNER_PROPERTY: Owner(pipeline=self._pipeline, table=table).to_text(),
        }
        new = NewTable(
            schema_json=new_schema(shape, str(self.table_name(table))).model_dump_json(),
            partition_by=options.partition_by,
            sort_by=options.sort_by,
            properties={str(name): str(value) for name, value in properties.items()},
            location=options.location or None,
        )
        return self._catalog.create(self.table_name(table), new)

    def _shaped(
        self, table: str, state: _TableState, shape: Callable[[], TableShape | None]
    ) -> bool:
        """Let a table that an earlier run made, and that never took an epoch, have new types.

        Its operator has declared columns since, because their values were refused. False while
        nobody knows the types that it should have; but in an epoch that other tables carry already
        it takes its part as it is, for that part may be deletes alone, which tell no types.
        """
        if not self._own_schema(state) or not state.handle.never_held_rows():
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

    def _own_schema(self, state: _TableState) -> bool:
        """Whether a table that never took an epoch still has the schema that icestream gave it.

        What others have changed is as they want it.
        """
        properties = state.handle.properties()
        if state.progress.epoch or KEY_PROPERTY not in properties:
            return False
        return state.handle.schema_id() == int(properties.get(SCHEMA_PROPERTY, 0))

    def _key(
        self, table: str, handle: Table, shape: Callable[[], TableShape | None]
    ) -> Sequence[str]:
        """The columns that identify a row by their names in the table, in the source's order."""
        given = self._table_options(table).equality_delete_by or self._options.equality_delete_by
        remembered = handle.properties().get(KEY_PROPERTY)
        key = list(given) or (json.loads(remembered) if remembered else [])
        if table.endswith(dead_letters.SUFFIX):
            # Whatever its properties say: older versions made it without a key.
            key = list(dead_letters.SHAPE.key)
        if not key:
            known = shape()
            if known is None:
                return handle.identifier_columns()
            key = list(known.key)
        schema = schema_from_json(handle.schema_json())
        names = table_names(schema, handle.properties().get(NAME_MAPPING), key)
        missing = [name for name in key if name not in names]
        if missing:
            columns = sorted(column.name for column in schema.fields)
            raise ConfigInvalid(
                f"table {handle.name} has no column {missing[0]} to delete by",
                detail=f"Its columns are {', '.join(columns)}.",
                hint="Correct `equality_delete_by`.",
            )
        for name in names.values():
            _refuse_vague(schema.find_field(name), str(handle.name))
        return [names[name] for name in key]

    def _commit(
        self, table: str, new: Progress, files: Sequence[FileClosed], written: Written
    ) -> Commit:
        writer = written.writer
        target = writer.targets.get(table) if isinstance(writer, IcebergWriter) else None
        new = replace(new, schema_id=target.schema_id if target else None)
        emptied = table in written.truncated
        # Where no older row stays there is nothing to delete.
        kept = [file for file in files if not emptied or file.kind == DATA]
        return Commit(
            table=table,
            branch=self._options.branch,
            expected=self._states[table].progress,
            new=new,
            files=kept,
            written_for=(target.uuid, target.schema_id, target.spec_id) if target else None,
            labels=written.labels,
            emptied=emptied,
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

    def _lacking_letters(self, epoch: Epoch, tables: Sequence[str]) -> dict[str, _TableState]:
        carriers = frozenset(self._carriers(epoch))
        return {
            t: s for t in carriers.intersection(tables) if (s := self._lacks_letters(t, carriers))
        }

    def _lacks_letters(self, table: str, carriers: Collection[str]) -> _TableState | None:
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
        self._each(corrected, self._publish)

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
        self._each({t: c for t, c in commits.items() if t not in letters}, self._publish)
        self._each(letters, self._publish)

    def _publish_together(self, commits: Mapping[str, Commit]) -> None:
        handles = {table: self._states[table].handle for table in commits}
        committed = publish_together(self._catalog, handles, commits, self._each)
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

    def _table_options(self, table: str) -> TableOptions:
        options = self._options.tables
        anyhow = None if table.endswith(dead_letters.SUFFIX) else options.get(ANY_TABLE)
        return options.get(table) or anyhow or TableOptions()

    def _each(self, items: Mapping[K, V], work: Callable[[K, V], R]) -> dict[K, R]:
        """Run over the items in parallel; all are awaited, then the worst error is raised."""
        if len(items) <= 1:
            return {key: work(key, value) for key, value in items.items()}
        with ThreadPoolExecutor(max_workers=min(COMMITS_IN_PARALLEL, len(items))) as pool:
            futures = {key: pool.submit(work, key, value) for key, value in items.items()}
        errors = [error for future in futures.values() if (error := future.exception())]
        if errors:
            raise max(errors, key=lambda error: getattr(error, "exit_code", 9))
        return {key: future.result() for key, future in futures.items()}


def _unreadable(name: TableName, problem: IcestreamError) -> IcestreamError:
    kind = NeedsOperator if isinstance(problem, NeedsOperator) else TargetUnavailable
    return kind(
        f"table {name} could not be read, and it is the pipeline's",
        detail=f"What it holds decides where the pipeline goes on. {problem.message}. "
        f"{problem.detail or ''}".rstrip(),
        hint="Make it readable and start again. If it is lost, drop it; if another table has its "
        "name, rename that one.",
    )


def _unread(name: TableName) -> TargetUnavailable:
    return TargetUnavailable(
        f"table {name} could not be read when the pipeline started",
        detail="It is the pipeline's, and what it holds decides where the pipeline goes on.",
        hint="Start the pipeline again.",
    )


def _refuse_unserved(table: str, after: Frontier, verify: Callable[[Frontier], None]) -> None:
    """Raise `HistoryLost` when the source no longer has what a replay would need."""
    try:
        verify(after)
    except HistoryLost as lost:
        raise HistoryLost(
            f"the undone epochs of table {table} cannot be applied again: {lost.message}",
            detail=lost.detail,
            hint="Run `icestream rollback --accept` to leave them undone, or drop this one table: "
            "the pipeline then builds it anew from what the source has.",
        ) from lost


def _refuse_vague(column: NestedField, table: str) -> None:
    """Iceberg forbids deletes by numbers that are not exact; Spark misses those by fixed bytes."""
    if isinstance(column.field_type, FloatType | DoubleType | FixedType):
        raise ConfigInvalid(
            f"rows of table {table} cannot be deleted by column {column.name}",
            detail=f"It is a {column.field_type}, and readers would still show deleted rows.",
            hint="Name other columns in `equality_delete_by`.",
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
