"""The tables of a pipeline that this run owns: found, claimed, made, and held against rivals.

A run claims every table that exists when it starts, and each one that it makes later. Two runs that
are active at once never both own a table: `ClaimedTables.claim` and `ClaimedTables.refuse_rivals`
say why. Which tables are the pipeline's at all is said by `own_tables`.
"""

import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from icestream import failpoints
from icestream.epoch import Progress, furthest, lacking_tables, table_id
from icestream.errors import NeedsOperator, TargetUnavailable
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.handle import TableName
from icestream.iceberg.head import TableHead
from icestream.iceberg.table import OWNER_PROPERTY, Table
from icestream.schema import (
    TableShape,
)
from icestream.sinks.iceberg.commit import (
    publish_claim,
    refuse_rollback,
    refuse_successor,
    rival_run,
)
from icestream.sinks.iceberg.making import (
    new_table,
)
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.own_tables import OwnTables
from icestream.sinks.iceberg.owners import (
    TableOwner,
    TableRefused,
    TableToClaim,
    owner_of,
    refuse_stranger,
)
from icestream.sinks.iceberg.state import TableState, in_parallel

# Each further listing means that another run made tables meanwhile; that ends with its claim.
LISTINGS_MAX = 10


class ClaimedTables:
    """What this run knows of the pipeline's tables; `states` are those that it has claimed.

    Tables are prepared in several threads, so whoever goes through `states` takes a copy first.
    """

    def __init__(self, catalog: Catalog, options: IcebergSinkOptions, pipeline: str):
        self.generation = 0
        self.claim_id = str(uuid.uuid4())
        self.states: dict[str, TableState] = {}
        self._catalog = catalog
        self._options = options
        self._branch = options.branch
        self._pipeline = pipeline
        self._own = OwnTables(catalog, options, pipeline)
        self.names = self._own.names
        # Tables that the source has; others are known because they say that they are ours.
        self._sources: frozenset[str] = frozenset()
        route = options.route
        self.named_by_records = bool(route and route.field and not route.tables)
        # What records are told whose tables cannot be: by Iceberg table, by source table.
        self._taken: dict[str, tuple[str, str]] = {}

    def table_name(self, table: str) -> TableName:
        """The name in the catalog of a source table."""
        return self._own.table_name(table)

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
        self.states = {}
        self._sources = frozenset(tables)
        self.claim_id = str(uuid.uuid4())
        heads = self.heads(tables)
        for table, (_, head) in heads.items():
            refuse_rollback(head, table, self._pipeline)
        generations = [head.progress.generation for _, head in heads.values() if head.progress]
        self.generation = 1 + max(generations, default=0)
        handles = {table: heads[table][0] for table in sorted(heads)}
        # The first table decides between two runs that start at once: claiming all tables in
        # parallel could give each run some of them and stop both.
        self._take_over(dict(itertools.islice(handles.items(), 1)))
        for _ in range(LISTINGS_MAX):
            self._take_over({t: handle for t, handle in handles.items() if t not in self.states})
            # A run that is still active may have made tables since they were listed; from the
            # claims on it makes no more (`refuse_rivals`).
            handles = self._own.existing(tables) if handles else {}
            if handles.keys() <= self.states.keys():
                break
        else:
            raise rival_run(max(handles))
        states = dict(self.states)
        for state in states.values():
            state.proven = True
        found = {table: state.progress for table, state in states.items()}
        self._own.refuse_unread(found)
        return found

    def _take_over(self, handles: Mapping[str, Table]) -> None:
        certain = in_parallel(handles, self._certain)
        claimed = in_parallel(handles, lambda t, handle: self._claim(handle, t, certain[t]))
        for table, handle in handles.items():
            self.states[table] = TableState(handle, claimed[table], certain[table])
        failpoints.reach(failpoints.AFTER_CLAIM)

    def heads(
        self, tables: Sequence[str], refuse: bool = True
    ) -> dict[str, tuple[Table, TableHead]]:
        """The pipeline's tables that exist, each with its head; nothing is claimed.

        Raises `ConfigInvalid` for source tables whose place is taken, unless not to `refuse`.
        """
        handles = self._own.existing(tables, refuse)
        branch = self._branch
        heads = in_parallel(handles, lambda _, handle: handle.head(self._pipeline, branch))
        return {table: (handle, heads[table]) for table, handle in handles.items()}

    def existing(self, table: str) -> Table | None:
        """The Iceberg table of a source table, if it is there and the pipeline's."""
        handle = self._catalog.load(self._own.table_name(table))
        return handle if handle is not None and self._own.is_own(handle) else None

    def missed(self, table: str) -> Progress | None:
        """The last epoch, when a table lacks epochs before it; None when it lacks nothing."""
        heads = {name: head for name, (_, head) in self.heads([table], refuse=False).items()}
        nothing = Progress(pipeline=self._pipeline)
        progress = {
            name: replace(head.progress or nothing, table_id=table_id(head.uuid))
            for name, head in heads.items()
        }
        return furthest(progress.values()) if table in lacking_tables(progress) else None

    def feeders(self) -> dict[str, tuple[str, str]]:
        """By Iceberg table the source table that feeds it, and what another one is told."""
        found = dict(self._taken)
        for table, state in list(self.states.items()):
            if state.certain:
                name = state.handle.name
                found[name.name] = (table, f"table {name} is fed by source table {table}")
        return found

    def is_fed(self, table: str) -> bool:
        """Whether the source still feeds a table of the pipeline, as far as can be known."""
        prepared = self.states[table].key is not None
        return table in self._sources or prepared or self.named_by_records

    def refuse_rivals(self) -> None:
        """Make sure that this run still owns the pipeline before it writes to new tables.

        An example: run 3 makes table t after run 4 has listed the tables. Run 3 claims t, then
        reads table a, which every run claims. Run 4 claims a, then lists again. Either run 3 sees
        generation 4 in a and stops, or run 4 finds t in its second list. As long as no table is
        known to be claimed by every run, each run looks at all that there are.
        """
        branch = self._branch
        # Other tables are prepared meanwhile.
        states = list(self.states.items())
        handles = {table: state.handle for table, state in states}
        proven = [table for table, state in states if state.proven][:1]
        if not proven:
            own = {handle.name for handle in handles.values()}
            for handle in self._own.existing(()).values():
                if handle.name not in own and handle.has_tag(self._pipeline):
                    raise rival_run(str(handle.name))
        looked_at = {table: handles[table] for table in proven or handles}
        heads = in_parallel(looked_at, lambda _, handle: handle.head(self._pipeline, branch))
        for table, head in heads.items():
            refuse_successor(head, table, self.generation)
        for _, state in states:
            state.proven = True

    def state(self, table: str, shape: Callable[[], TableShape | None]) -> TableState | None:
        """The state of a source table's Iceberg table, which is claimed or made if need be."""
        known = self.states.get(table)
        if known is not None:
            return known if known.certain else self._assured(table, table)
        name = self._own.table_name(table)
        if holder := self._holder(lambda state: state.handle.name == name):
            return self._assured(holder, table)
        self.names.by_name([table])
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
        self.states[table] = state
        return state

    def _holder(self, wanted: Callable[[TableState], bool]) -> str | None:
        """The source table whose Iceberg table is the wanted one, as far as this run knows."""
        return next((t for t, state in list(self.states.items()) if wanted(state)), None)

    def _refuse_stranger(self, handle: Table, table: str) -> None:
        mine = TableOwner(pipeline=self._pipeline, table=table)
        try:
            refuse_stranger(handle.name, owner_of(handle), mine, self.names)
        except TableRefused as refused:
            self._taken[handle.name.name] = ("", refused.reason)
            raise

    def _assured(self, holder: str, table: str) -> TableState:
        """The state of a table that was found before the source named it, under some name.

        A table of an earlier version does not tell its source table, but its last epoch proves it.
        Which tables carry an epoch was found out under the other name, so a new start is needed.
        """
        state = self.states[holder]
        handle, mine = state.handle, TableOwner(pipeline=self._pipeline, table=table)
        other = TableOwner(
            pipeline=self._pipeline, table=holder if state.certain else "another one"
        )
        if state.certain or not handle.fed(self._pipeline, self._branch, table):
            refuse_stranger(handle.name, other, mine, self.names)
        handle.remember(OWNER_PROPERTY, mine.to_text())
        raise NeedsOperator(
            f"table {handle.name} is fed by source table {table}, and remembers it from now on",
            detail="An earlier version of icestream made the table and did not write it down.",
            hint="Start the pipeline again.",
        )

    def _create(self, table: str, name: TableName, shape: TableShape | None) -> Table | None:
        if shape is None:
            return None
        owner = TableOwner(pipeline=self._pipeline, table=table)
        return self._catalog.create(name, new_table(self._options, owner, name, shape))

    def _certain(self, table: str, handle: Table) -> bool:
        """Whether it is known that a table of the pipeline is fed by this source table."""
        owner = owner_of(handle)
        if table in self._sources or (owner is not None and owner.table is not None):
            return True
        return handle.fed(self._pipeline, self._branch, table) is not False

    def _claim(self, handle: Table, table: str, certain: bool) -> Progress:
        claim = Progress(pipeline=self._pipeline, generation=self.generation)
        mine = TableOwner(pipeline=self._pipeline, table=table if certain else None)
        owned = TableToClaim(handle, mine, self.names)
        return publish_claim(owned, self._branch, claim, self.claim_id)


def _unread(name: TableName) -> TargetUnavailable:
    return TargetUnavailable(
        f"table {name} could not be read when the pipeline started",
        detail="It is the pipeline's, and what it holds decides where the pipeline goes on.",
        hint="Start the pipeline again.",
    )
