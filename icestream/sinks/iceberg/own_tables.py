"""Which tables of the catalog are the pipeline's, and which are a stranger's.

A pipeline's tables are those that its source tables are mapped to (`icestream.names`), and those in
its namespace that say they are its own (`owners`). Every other table is a stranger's.
"""

import logging
from collections.abc import Mapping, Sequence

from icestream.epoch import (
    Progress,
    known_names,
    name_id,
)
from icestream.errors import (
    IcestreamError,
    NeedsOperator,
    Retryable,
    TargetUnavailable,
)
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.handle import TableName
from icestream.iceberg.table import Table
from icestream.names import ANY_TABLE
from icestream.patience import bridged
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.owners import (
    TableOwner,
    owner_of,
    refuse_stranger,
)
from icestream.sinks.iceberg.state import in_parallel

log = logging.getLogger(__name__)


class OwnTables:
    """The pipeline's tables, found by their names and by what they say of themselves.

    `unread` are tables of the namespace that could not be read, each with what went wrong.
    """

    def __init__(self, catalog: Catalog, options: IcebergSinkOptions, pipeline: str):
        self._catalog = catalog
        self._namespace = tuple(options.namespace.split("."))
        self._pipeline = pipeline
        self.names = options.table_names()
        self._given = frozenset(options.tables)
        # Tables of the namespace that were looked at and are not the pipeline's.
        self._strangers: set[TableName] = set()
        self.unread: dict[TableName, IcestreamError] = {}

    def table_name(self, table: str) -> TableName:
        """The name in the catalog of a source table."""
        return TableName(namespace=self._namespace, name=self.names.of(table))

    def existing(self, tables: Sequence[str], refuse: bool = True) -> dict[str, Table]:
        """The pipeline's tables that exist, by their names at the source.

        Raises `ConfigInvalid` when the place of one of these source tables is taken. Tables that no
        source table is mapped to are looked at once: what is a stranger's stays a stranger's.
        """
        known = {*tables, *self._given} - {ANY_TABLE}
        wanted = self.names.by_name(known) if refuse else {self.names.of(t): t for t in known}
        required = set(tables) if refuse else set()
        named = {TableName(namespace=self._namespace, name=n): t for n, t in wanted.items()}
        listed = {*self._catalog.names(self._namespace)} - self._strangers - named.keys()
        loaded = in_parallel(dict.fromkeys(named), lambda name, _: self._catalog.load(name))
        loaded |= in_parallel(dict.fromkeys(sorted(listed, key=str)), self._look_at)
        found = {}
        for name, handle in loaded.items():
            if handle is None:
                continue
            table = named.get(name)
            if table is not None and table in required:
                mine = TableOwner(pipeline=self._pipeline, table=table)
                refuse_stranger(name, owner_of(handle), mine, self.names)
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
        try:
            return bridged(lambda: self._catalog.load_listed(name))
        except (Retryable, NeedsOperator) as error:
            log.warning("table %s is passed over: %s", name, error, extra={"table": str(name)})
            self._strangers.add(name)
            self.unread[name] = error
            return None

    def refuse_unread(self, progress: Mapping[str, Progress]) -> None:
        """Raise for a table that could not be read and that the last epoch knew by its name."""
        known = known_names(progress.values())
        own = {name: error for name, error in self.unread.items() if name_id(name.name) in known}
        if own:
            # The next try looks at them again.
            self._strangers -= own.keys()
            self.unread = {n: error for n, error in self.unread.items() if n not in own}
            raise _unreadable(*min(own.items(), key=str))

    def is_own(self, handle: Table) -> bool:
        """Whether a table says that it is the pipeline's."""
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
        if self.names.of(found) == handle.name.name:
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


def _unreadable(name: TableName, problem: IcestreamError) -> IcestreamError:
    kind = NeedsOperator if isinstance(problem, NeedsOperator) else TargetUnavailable
    return kind(
        f"table {name} could not be read, and it is the pipeline's",
        detail=f"What it holds decides where the pipeline goes on. {problem.message}. "
        f"{problem.detail or ''}".rstrip(),
        hint="Make it readable and start again. If it is lost, drop it; if another table has its "
        "name, rename that one.",
    )
