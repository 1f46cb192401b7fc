"""The Iceberg sink: one snapshot per table and epoch, with the frontier in its summary.

Only tables with changes commit an epoch, in parallel, or with `atomic` all in one request.

| module | promise |
|---|---|
| `own_tables`, `owners` | which tables are the pipeline's, and which are a stranger's |
| `claimed` | which of them this run owns, and that no other run does |
| `making`, `state` | a new table, and what this run knows of each one |
| `writer` | changes become files that nobody sees |
| `publishing` | an epoch becomes a snapshot in each of its tables |
| `commit` | one snapshot is published exactly once, by the rules of every commit |
| `rollback`, `letters`, `stored`, `status` | what commands and sources ask of the tables |
"""

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from icestream import dead_letters
from icestream.epoch import Epoch, Progress, furthest
from icestream.errors import Broken, ConfigInvalid
from icestream.frontier import Frontier
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.handle import TableName
from icestream.iceberg.head import Past, TableHead
from icestream.iceberg.table import Table
from icestream.iceberg.target import WriteTarget
from icestream.schema import (
    NAME_MAPPING,
    Column,
    TableShape,
    doubled,
    new_schema,
    refuse_unknown,
    schema_from_json,
    source_schema,
)
from icestream.sinks import Committed, Written
from icestream.sinks.iceberg.claimed import ClaimedTables
from icestream.sinks.iceberg.making import (
    SCHEMA_PROPERTY,
    key_of,
    own_schema,
    warn_of_deleted_metadata,
)
from icestream.sinks.iceberg.options import IcebergSinkOptions, filled_from_itself
from icestream.sinks.iceberg.owners import (
    TableRefused,
)
from icestream.sinks.iceberg.publishing import EpochPublisher
from icestream.sinks.iceberg.rollback import Rollback, settle
from icestream.sinks.iceberg.state import TableState, in_parallel
from icestream.sinks.iceberg.stored import ReadRows, Wanted, look_up
from icestream.sinks.iceberg.writer import IcebergWriter

log = logging.getLogger(__name__)


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
        self._writers = itertools.count()
        self._tables = ClaimedTables(catalog, options, pipeline)
        self._publisher = EpochPublisher(catalog, options, pipeline, self._tables)
        # Why records cannot have the table that they name.
        self._refusals: dict[str, str] = {}
        self.branch = options.branch
        if options.atomic:
            catalog.require_transactions()
            log.warning(
                "atomic: the catalog must commit to many tables all or none, and not every one does"
            )

    @property
    def _states(self) -> dict[str, TableState]:
        return self._tables.states

    def table_name(self, table: str) -> TableName:
        """The name in the catalog of a source table."""
        return self._tables.table_name(table)

    def existing(self, table: str) -> Table | None:
        """The Iceberg table of a source table, if it is there and the pipeline's."""
        return self._tables.existing(table)

    def heads(
        self, tables: Sequence[str], refuse: bool = True
    ) -> dict[str, tuple[Table, TableHead]]:
        """The pipeline's tables that exist, each with its head; nothing is claimed.

        Raises `ConfigInvalid` for source tables whose place is taken, unless not to `refuse`.
        """
        return self._tables.heads(tables, refuse)

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """What the tables remember; see `Sink.durable`."""
        return self._tables.durable(tables)

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Take the pipeline over in every table that exists; see `Sink.claim`."""
        return self._tables.claim(tables)

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Make sure that the table is there, claimed, and its key known; see `Sink.prepare`."""
        try:
            state = self._tables.state(table, shape)
        except TableRefused as refused:
            if not self._tables.named_by_records or table.endswith(dead_letters.SUFFIX):
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
                state.note_source_columns(known.columns)
        return True

    def refuse_itself(self, table: str, table_id: str) -> None:
        """Raise for a table that would be filled from itself; see `RefusesItself`."""
        state = self._states[table]
        if not state.progress.epoch and state.handle.uuid() == table_id:
            raise filled_from_itself(table)

    def recalled(self, table: str, name: str) -> str | None:
        """A property of a table; None of one that is not prepared."""
        state = self._states.get(table)
        return state.handle.properties().get(name) if state else None

    def remember(self, table: str, name: str, value: str) -> None:
        """Set a property of a table that is prepared."""
        self._states[table].handle.remember(name, value)

    def evolve(self, table: str, columns: Sequence[Column]) -> None:
        """Let the table take these columns of the source; see `Evolves.evolve`."""
        refuse_unknown(table, columns)
        state = self._states[table]
        before = state.source_names()
        noted = SCHEMA_PROPERTY if own_schema(state) else None
        if state.handle.evolve(columns, state.key or (), noted):
            log.info("columns %s evolved", [c.name for c in columns], extra={"table": table})
            state.renames = 0
        state.note_source_columns(columns)
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
            self._tables.refuse_rivals()
        # A commit that finds another schema takes targets back at any moment, in its own thread.
        known = {table: self._states[table].target for table in tables}
        targets = {table: target for table, target in known.items() if target is not None}
        missing = {table: self._states[table] for table in tables if table not in targets}
        for table, target in in_parallel(missing, self._target).items():
            targets[table] = self._states[table].target = target
        lacking = self._publisher.lacking_letters(epoch, tables)
        decided = {t: s for t, s in lacking.items() if t not in read_otherwise}
        targets.update(in_parallel(decided, self._target_of_epoch))
        return IcebergWriter(
            pipeline=self._pipeline,
            epoch=epoch.number,
            run=f"g{self._tables.generation}.{next(self._writers)}",
            targets=targets,
            names=self._tables.names,
            feeders=self._tables.feeders() if self._tables.named_by_records else {},
            refusals=dict(self._refusals),
            only_read=frozenset(decided),
        )

    def decided(self, epoch: Epoch, tables: Sequence[str]) -> Collection[str]:
        """The tables that have this epoch already, while their dead letters lack it.

        Which records are letters was decided when the table took it, and must not change.
        """
        return self._publisher.lacking_letters(epoch, tables).keys()

    def commit(self, written: Written) -> Sequence[Committed]:
        """Publish the epoch in every table that it changes; see `Sink.commit`."""
        return self._publisher.commit(written)

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Publish the frontier of an epoch without changes, in the first table by default."""
        return self._publisher.heartbeat(epoch, labels, table)

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
        newer = head.rolled_back_from or self._tables.missed(table)
        if newer is None:
            raise ConfigInvalid(f"table {self.table_name(table)} was not rolled back")
        rollback = Rollback(
            table=table, handle=handle, head=head, newer=newer, claim_id=self._tables.claim_id
        )
        return settle(rollback, self._pipeline, branch, replay, verify)

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
