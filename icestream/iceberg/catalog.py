"""Tables of any Iceberg catalog, through Iceberg's own Java library in the coordinator's JVM.

`Table.head` reads fresh metadata; `Table.publish` swaps in one snapshot against exactly that
metadata, and `Catalog.publish_together` those of several tables in one request. The obvious way,
`commit()` of an append or a transaction, rebases silently onto newer metadata, so a check made
before it says nothing about what is swapped. Here the snapshot is only applied (its manifests are
written), the new metadata is built from the checked one, and the catalog's compare-and-swap
decides.

Data and delete files are described by what workers reported; they are never listed nor opened here.
"""

import json
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyiceberg.types import IcebergType, PrimitiveType

from icestream import failpoints
from icestream.epoch import Progress, batch_id
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    ConfigInvalid,
    FrontierLost,
    HistoryLost,
    IcestreamError,
    NeedsOperator,
    ProgressLost,
    SchemaRejected,
    TableReplaced,
    TargetUnavailable,
)
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.files import DATA, FileClosed
from icestream.iceberg.rows import Bound
from icestream.schema import (
    NAME_MAPPING,
    Change,
    Column,
    SchemaStep,
    column_schema,
    evolution,
    refuse_doubles,
    schema_from_json,
    source_schema,
)

# Without an own limit a request to a silent catalog would wait for ever.
_REST_DEFAULTS = {
    "rest.client.connection-timeout-ms": "20000",
    "rest.client.socket-timeout-ms": "60000",
}
_REFUSED = ("CommitFailedException",)
_CERTAIN = (
    "NotAuthorizedException",
    "ForbiddenException",
    "BadRequestException",
    "ValidationException",
    "UnprocessableEntityException",
    "NoSuchTableException",
    "NoSuchNamespaceException",
)
# How Iceberg's library refuses metadata of another table under the same name.
_UUID_DIFFERS = "UUID does not match"
# How the libraries of the storages say that a file is not there.
_NO_FILE = ("NotFoundException", "NoSuchKeyException", "FileNotFoundException")
_FOR_EVER_MS = 2**63 - 1
ANCESTORS_MAX = 100_000
VERSION_WITHOUT_LINEAGE = 2
# Each further try means that somebody else changed the table in between.
EVOLUTIONS_MAX = 20
_MANY_TABLES = "commitTransaction"
# Who feeds a table, as JSON; see `icestream.sinks.iceberg.owners`.
OWNER_PROPERTY = "icestream.owner"
# In metadata that are only read; it stands at the snapshot whose rows are wanted.
_STAGED_BRANCH = "icestream-staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableName:
    """A table's name in its catalog, part by part: any part may hold dots, blanks or quotes."""

    namespace: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One state of a table as a pipeline sees it; `metadata` is what a swap is made against.

    `forgotten` says that the frontiers of the snapshot that the table was rolled back to are no
    longer kept, or that its history is not: there may be a progress then, but nobody knows it.
    `bounds` names the frontiers that are kept.
    """

    uuid: str
    snapshot_id: int | None
    schema_id: int
    spec_id: int
    progress: Progress | None
    batch_id: str | None
    claim_id: str | None
    progress_snapshot_id: int | None
    rolled_back_from: Progress | None
    forgotten: bool = False
    bounds: frozenset[str | None] = frozenset()
    metadata: Any = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A snapshot whose manifests are written and that nobody sees until its metadata is swapped."""

    table: TableName
    snapshot_id: int
    base: Any = field(repr=False)
    new: Any = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """All that a worker needs to write files of a table; plain data.

    `source_schema_json` is the schema under the source's names, where they are others.
    """

    table: str
    uuid: str
    location: str
    schema_id: int
    schema_json: str
    spec_id: int
    spec_json: str
    global_spec_id: int
    one_spec: bool
    sort_columns: Sequence["SortColumn"]
    sort_order_id: int
    properties: Mapping[str, str]
    io_properties: Mapping[str, str]
    equality_columns: Sequence[str]
    source_schema_json: str = ""


class SortColumn(NamedTuple):
    """A column of a table's sort order."""

    name: str
    ascending: bool
    nulls_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A moment of a table's history: before a pipeline took what lies past a frontier."""

    pipeline: str
    before: Frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTable:
    """How a table is made when it does not exist yet."""

    schema_json: str
    partition_by: Sequence[str] = ()
    sort_by: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    location: str | None = None


class Catalog:
    """A catalog opened by Iceberg's library from the map of properties in the configuration."""

    def __init__(self, jvm: Any, hadoop_configuration: Any, properties: Mapping[str, str]):
        self._jvm = jvm
        given = {str(name): str(value) for name, value in properties.items()}
        settings = {**_REST_DEFAULTS, **given} if given.get("type") == "rest" else given
        self.label = given.get("uri") or given.get("warehouse") or given.get("type", "catalog")
        arguments = jvm.java.util.HashMap()
        for name, value in settings.items():
            arguments.put(name, value)
        with as_unavailable(f"could not open the catalog at {self.label}"):
            self._catalog = jvm.org.apache.iceberg.CatalogUtil.buildIcebergCatalog(
                given.get("name", "icestream"), arguments, hadoop_configuration
            )

    def load(self, name: TableName) -> "Table | None":
        """The table, or None when there is none of that name."""
        with as_unavailable(f"could not load table {name}"):
            identifier = self._identifier(name)
            if not self._catalog.tableExists(identifier):
                return None
            return Table(self._jvm, name, self._catalog.loadTable(identifier))

    def load_listed(self, name: TableName) -> "Table | None":
        """A table that `names` has listed, by one request; None when it is gone again."""
        with as_unavailable(f"could not load table {name}"):
            try:
                return Table(self._jvm, name, self._catalog.loadTable(self._identifier(name)))
            except Py4JJavaError as error:
                if "NoSuchTableException" in _class_names(error):
                    return None
                raise

    def create(self, name: TableName, new: NewTable) -> "Table":
        """Create the table, and its namespace when needed; one made meanwhile is taken as it is."""
        jvm = self._jvm
        with as_unavailable(f"could not create table {name}"):
            self._create_namespace(name.namespace)
            schema = jvm.org.apache.iceberg.SchemaParser.fromJson(new.schema_json)
            builder = self._catalog.buildTable(self._identifier(name), schema)
            with _as_config(f"cannot partition or sort table {name}"):
                builder = builder.withPartitionSpec(_partition_spec(jvm, schema, new.partition_by))
                if new.sort_by:
                    builder = builder.withSortOrder(_sort_order(jvm, schema, new.sort_by))
            for key, value in new.properties.items():
                builder = builder.withProperty(key, value)
            if new.location:
                builder = builder.withLocation(new.location)
            try:
                return Table(jvm, name, builder.create())
            except Py4JJavaError as error:
                if "AlreadyExistsException" not in _class_names(error):
                    raise
                return Table(jvm, name, self._catalog.loadTable(self._identifier(name)))

    def names(self, namespace: tuple[str, ...]) -> list[TableName]:
        """The tables of a namespace; none when the namespace does not exist."""
        with as_unavailable(f"could not list the tables of {'.'.join(namespace)}"):
            try:
                found = self._catalog.listTables(self._namespace(namespace))
            except Py4JJavaError as error:
                if "NoSuchNamespaceException" in _class_names(error):
                    return []
                raise
            return [TableName(namespace=namespace, name=str(table.name())) for table in found]

    def require_transactions(self) -> None:
        """Raise `ConfigInvalid` unless the catalog commits to many tables at once."""
        methods = {method.getName() for method in self._catalog.getClass().getMethods()}
        supported = _MANY_TABLES in methods
        if supported:
            try:
                # An empty list is refused by the client itself, once it has found the endpoint.
                with _as_py4j():
                    self._catalog.commitTransaction(self._jvm.java.util.ArrayList())
            except Py4JJavaError as error:
                supported = "UnsupportedOperationException" not in _class_names(error)
        if not supported:
            raise ConfigInvalid(
                f"the catalog at {self.label} cannot commit to many tables at once",
                hint="Use a REST catalog that supports transactions, or leave out `atomic`: each "
                "table then gets a commit of its own.",
            )

    def publish_together(self, prepared: Sequence[Prepared]) -> None:
        """Make the snapshots of all these tables visible, or none of them.

        Raises `CommitConflict` when one of the tables is no longer as it was, and `CommitUnknown`
        when the answer was lost. Nothing is deleted in either case.
        """
        iceberg = self._jvm.org.apache.iceberg
        commits = self._jvm.java.util.ArrayList()
        for one in prepared:
            identifier = self._identifier(one.table)
            commits.add(iceberg.catalog.TableCommit.create(identifier, one.base, one.new))
        names = ", ".join(sorted(str(one.table) for one in prepared))
        with _commit_outcomes(f"tables {names}"):
            failpoints.reach(failpoints.BEFORE_SWAP)
            try:
                self._catalog.commitTransaction(commits)
            except Py4JJavaError as error:
                if "NoSuchTableException" not in _class_names(error):
                    raise
                # Which one is gone, a fresh look at each of them tells.
                raise CommitConflict(
                    f"the catalog refused a commit to tables {names}", detail=_reason(error)
                ) from error
            failpoints.reach(failpoints.AFTER_SWAP)

    def close(self) -> None:
        """Give back what the catalog's client holds."""
        if hasattr(self._catalog, "close"):
            try:
                self._catalog.close()
            except Py4JError:
                return

    def _create_namespace(self, namespace: tuple[str, ...]) -> None:
        if not self._catalog.namespaceExists(self._namespace(namespace)):
            try:
                self._catalog.createNamespace(self._namespace(namespace))
            except Py4JJavaError as error:
                if "AlreadyExistsException" not in _class_names(error):
                    raise

    def _identifier(self, name: TableName) -> Any:
        namespace = self._namespace(name.namespace)
        return self._jvm.org.apache.iceberg.catalog.TableIdentifier.of(namespace, name.name)

    def _namespace(self, parts: tuple[str, ...]) -> Any:
        return self._jvm.org.apache.iceberg.catalog.Namespace.of(_strings(self._jvm, parts))


class Table:
    """One table of the catalog."""

    def __init__(self, jvm: Any, name: TableName, table: Any):
        self._jvm = jvm
        self._table = table
        self._views: dict[tuple[int, int, str], Any] = {}
        self.name = name

    @property
    def jvm(self) -> Any:
        """The gateway, for the modules of this package."""
        return self._jvm

    @property
    def java(self) -> Any:
        """Iceberg's own object, for the modules of this package."""
        return self._table

    def head(self, pipeline: str, branch: str) -> Head:
        """Fresh metadata, and what the pipeline's newest snapshot in the branch's history says.

        Snapshots of others, compactions among them, are stepped over.
        """
        with as_unavailable(f"could not read the metadata of table {self.name}"):
            metadata = self.fresh_metadata()
            snapshot = _latest(metadata, branch)
            tagged = self._tagged(metadata, pipeline)
            older = _OlderMetadata(self._jvm, self._table.io(), metadata) if tagged else None
            newest, complete = self._newest_own(metadata, snapshot, pipeline, older)
            # What lies between the tag and the head may be expired, and rolled back beneath others.
            # Where no older metadata file tells it either, nobody but a person can.
            rolled_back = tagged is not None and (
                newest is None or newest.snapshotId() != tagged.snapshotId()
            )
            if newest is None and tagged is None:
                self._refuse_untagged(metadata, pipeline)
            progress, forgotten = self._progress_unless(rolled_back, metadata, newest)
            bounds = summaries.BOUNDS_PROPERTY
            return Head(
                uuid=metadata.uuid(),
                snapshot_id=snapshot.snapshotId() if snapshot else None,
                schema_id=metadata.currentSchemaId(),
                spec_id=metadata.defaultSpecId(),
                progress=progress,
                batch_id=newest.summary().get(summaries.BATCH_ID) if newest else None,
                claim_id=newest.summary().get(summaries.CLAIM) if newest else None,
                progress_snapshot_id=newest.snapshotId() if newest else None,
                rolled_back_from=self._progress(metadata, tagged) if rolled_back else None,
                forgotten=forgotten or (rolled_back and not complete),
                bounds=frozenset(one.summary().get(bounds) for one in (newest, tagged) if one),
                metadata=metadata,
            )

    def publish(
        self,
        head: Head,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        emptied: bool = False,
    ) -> int:
        """Make one snapshot of these files visible, if the table still is as `head` saw it.

        The pipeline's tag moves in the same swap. Raises `CommitConflict` when the catalog refused
        it and `CommitUnknown` when the answer was lost. Nothing is deleted in either case.
        """
        return self.swap(self.prepare(head, branch, files, entries, emptied))

    def prepare(
        self,
        head: Head,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        emptied: bool = False,
    ) -> Prepared:
        """Write the manifests of one snapshot and build the metadata that shows it.

        With `emptied` all that the branch holds is gone in that snapshot but these files.
        """
        base = head.metadata
        if not failpoints.rule_on(failpoints.RULE_SWAP):
            base = self._table.operations().refresh()
        # Nothing is committed yet when the manifests cannot be written: that outcome is known.
        with as_unavailable(f"could not write the manifests of table {self.name}"):
            snapshot = self._apply(branch, files, entries.summary, emptied)
            parent = _latest(base, branch)
            if snapshot.parentId() != (parent.snapshotId() if parent else None):
                raise CommitConflict(f"the head of table {self.name} moved before the swap")
            new = self._with_snapshot(base, branch, snapshot, entries, head.bounds)
            return Prepared(
                table=self.name, snapshot_id=int(snapshot.snapshotId()), base=base, new=new
            )

    def _with_snapshot(
        self,
        base: Any,
        branch: str,
        snapshot: Any,
        entries: summaries.Entries,
        needed: Collection[str | None],
    ) -> Any:
        """The metadata that show a snapshot, with the pipeline's tag, and its frontiers where they
        are too large for a summary."""
        iceberg = self._jvm.org.apache.iceberg
        pipeline = entries.summary[summaries.PIPELINE]
        # Without an age of its own it would get the table's, and expiry would remove it.
        tag = iceberg.SnapshotRef.tagBuilder(snapshot.snapshotId()).maxRefAgeMs(_FOR_EVER_MS)
        known = self._properties(base)
        changed = {
            name: value
            for name, value in {
                **entries.properties,
                summaries.tagged_property(pipeline): "true",
            }.items()
            if known.get(name) != value
        }
        given = self._jvm.java.util.HashMap()
        for name, value in changed.items():
            given.put(name, value)
        outdated = self._jvm.java.util.HashSet()
        for name in summaries.outdated(known, entries, needed):
            outdated.add(name)
        new = (
            iceberg.TableMetadata.buildFrom(base)
            .setBranchSnapshot(snapshot, branch)
            .setRef(summaries.tag_name(pipeline), tag.build())
            .setProperties(given)
            .removeProperties(outdated)
            .build()
        )
        self._assert_schema_and_spec(base, new)
        return new

    def _assert_schema_and_spec(self, base: Any, new: Any) -> None:
        """Have a REST catalog refuse the new metadata when the table got another schema or spec.

        It is sent the changes, and asserts only what the library derives from them: the
        references that move. Two changes that change nothing bring the other assertions. The
        library's builder leaves such changes out, so they are put in behind its back.
        """
        update = self._jvm.org.apache.iceberg.MetadataUpdate
        changes = self._jvm.java.util.ArrayList()
        changes.add(update.SetCurrentSchema(base.currentSchemaId()))
        changes.add(update.SetDefaultPartitionSpec(base.defaultSpecId()))
        changes.addAll(new.changes())
        held = new.getClass().getDeclaredField("changes")
        held.setAccessible(True)
        held.set(new, changes)

    def swap(self, prepared: Prepared) -> int:
        """Replace the metadata that was checked by the prepared one; returns the snapshot's id."""
        with _commit_outcomes(f"table {self.name}"):
            failpoints.reach(failpoints.BEFORE_SWAP)
            self._table.operations().commit(prepared.base, prepared.new)
            failpoints.reach(failpoints.AFTER_SWAP)
            return prepared.snapshot_id

    def target(
        self, branch: str, equality_columns: Sequence[str], schema_id: int | None = None
    ) -> WriteTarget:
        """What workers need to write files that this table can take as it is now.

        With the number of an older schema it is for reading alone: as changes were read then.
        """
        with as_unavailable(f"could not prepare table {self.name}"):
            global_spec_id = self._global_spec_id()
            metadata = self._table.operations().current()
            iceberg = self._jvm.org.apache.iceberg
            order = metadata.sortOrder()
            schema = self._schema(metadata, schema_id)
            properties = summaries.without_frontiers(self._properties(metadata))
            return WriteTarget(
                table=str(self.name),
                uuid=metadata.uuid(),
                location=_data_location(metadata.location(), properties),
                schema_id=schema.schemaId(),
                schema_json=iceberg.SchemaParser.toJson(schema),
                spec_id=metadata.defaultSpecId(),
                spec_json=iceberg.PartitionSpecParser.toJson(metadata.spec()),
                global_spec_id=global_spec_id,
                one_spec=self._one_spec(branch),
                sort_columns=_plain_sort_columns(metadata.schema(), order),
                sort_order_id=order.orderId(),
                properties=properties,
                io_properties=self.io_properties(),
                equality_columns=list(equality_columns)
                if schema_id is None
                else _names_in(schema, metadata.schema(), equality_columns),
            )

    def _schema(self, metadata: Any, schema_id: int | None) -> Any:
        """The schema of this number, or the current one."""
        schema = metadata.schema() if schema_id is None else metadata.schemasById().get(schema_id)
        if schema is None:
            raise HistoryLost(
                f"table {self.name} no longer has schema {schema_id}",
                detail="Its last epoch was written with it, and the letters of that epoch are "
                "missing.",
                hint="Drop the table and its table of dead letters, and start anew: they are then "
                "built from the source.",
            )
        return schema

    def has_tag(self, pipeline: str) -> bool:
        """Whether the pipeline has ever committed to the table."""
        with self._readable():
            metadata = self._table.operations().current()
            return metadata.ref(summaries.tag_name(pipeline)) is not None

    def uuid(self) -> str:
        """What tells the table from every other one, whatever its name is."""
        with self._readable():
            return str(self._table.operations().current().uuid())

    def owner(self) -> str | None:
        """Who feeds the table, as its property said when it was seen last."""
        with self._readable():
            found = self._table.operations().current().property(OWNER_PROPERTY, None)
            return None if found is None else str(found)

    def pipelines(self) -> list[str]:
        """The pipelines that have ever committed to the table, by their tags."""
        prefix = summaries.tag_name("")
        with self._readable():
            refs = self._table.operations().current().refs()
            return sorted(
                str(name).removeprefix(prefix)
                for name in refs.keySet()
                if str(name).startswith(prefix) and refs.get(name).isTag()
            )

    def fed(self, pipeline: str, branch: str, table: str) -> bool | None:
        """Whether the pipeline's last epoch was of this source table; None when that is gone."""
        snapshot_id = self.last_epoch_snapshot(pipeline, branch)
        if snapshot_id is None:
            return None
        try:
            with as_unavailable(f"could not read the progress of table {self.name}"):
                metadata = self._table.operations().current()
                snapshot = metadata.snapshot(snapshot_id)
                upper = self._progress(metadata, snapshot).upper
                known = snapshot.summary().get(summaries.BATCH_ID)
        except FrontierLost:
            return None
        return bool(batch_id(pipeline, table, upper) == known)

    def io_properties(self) -> dict[str, str]:
        """How the table's files are reached."""
        with self._readable():
            return _dictionary(self._table.io().properties())

    def partitioned_by(self) -> frozenset[int]:
        """The ids of the columns that the table is or was partitioned by."""
        with self._readable():
            specs = self._table.specs().values()
            return frozenset(int(field.sourceId()) for spec in specs for field in spec.fields())

    def properties(self) -> dict[str, str]:
        """The table's properties."""
        with self._readable():
            return self._properties(self._table)

    def schema_json(self) -> str:
        """The current schema as Iceberg prints it."""
        with self._readable():
            return str(self._jvm.org.apache.iceberg.SchemaParser.toJson(self._table.schema()))

    def schema_id(self) -> int:
        """The number of the schema, which rises with every change; 0 as the table was made."""
        with self._readable():
            return int(self._table.schema().schemaId())

    def identifier_columns(self) -> list[str]:
        """The names of the identifier fields."""
        with self._readable():
            return sorted(self._table.schema().identifierFieldNames())

    def evolve(
        self, columns: Sequence[Column], key: Sequence[str], noted: str | None = None
    ) -> bool:
        """Let the table take these columns of the source, in one commit; False if it does already.

        `key` names columns of the table that stay required, and `noted` the property that says the
        number of the new schema, if any. A schema that somebody else changes meanwhile is looked at
        again. Raises `SchemaRejected` when no safe change leads there.
        """
        for _ in range(EVOLUTIONS_MAX):
            with as_unavailable(f"could not change the schema of table {self.name}"):
                self._table.refresh()
                steps = self._steps(columns, key)
                if not steps:
                    return False
                try:
                    self._change_schema([partial(self._with_steps, steps)], noted)
                    return True
                except Py4JJavaError as error:
                    if not _class_names(error) & set(_REFUSED):
                        raise
        raise CommitConflict(
            f"the schema of table {self.name} does not come to rest",
            detail=f"Somebody else changed the table {EVOLUTIONS_MAX} times in a row.",
            hint="Find out who changes the table.",
        )

    def never_held_rows(self) -> bool:
        """Whether no snapshot that the table knows has a file."""
        held = ("total-data-files", "total-delete-files")
        with self._readable():
            snapshots = self.fresh_metadata().snapshots()
            summaries = [_dictionary(each.summary()) for each in snapshots]
        return not any(int(each.get(name, 0)) for each in summaries for name in held)

    def shape_anew(self, columns: Sequence[Column], noted: str) -> list[str]:
        """Give columns that have other types the ones given; for a table that never held rows.

        Returns their names. A column is dropped and added again under its name, which is no safe
        change where there are rows. One that is part of the identifier leaves it for a moment. All
        is one commit, as is the property `noted`, which gets the number of the new schema.
        """
        with as_unavailable(f"could not change the schema of table {self.name}"):
            self._table.refresh()
            schema = schema_from_json(self.schema_json())
            known = {field.name: field for field in schema.fields}
            other = [
                Column(name=c.name, type=c.type, required=known[c.name].required)
                for c in columns
                if c.name in known and _other_type(known[c.name].field_type, c.type)
            ]
            if not other:
                return []
            identifier = self.identifier_columns()
            names = [column.name for column in other]
            kept = [name for name in identifier if name not in names]
            changes: list[Callable[[Any], Any]] = [
                partial(self._retyped, other, kept),
                lambda update: update.setIdentifierFields(_list(self._jvm, identifier)),
            ]
            self._change_schema(changes, noted)
            return names

    def _retyped(self, columns: Sequence[Column], identifier: Sequence[str], update: Any) -> Any:
        parser = self._jvm.org.apache.iceberg.SchemaParser
        update = update.allowIncompatibleChanges()
        update = update.setIdentifierFields(_list(self._jvm, identifier))
        for column in columns:
            alone = parser.fromJson(column_schema(column).model_dump_json())
            add = update.addRequiredColumn if column.required else update.addColumn
            update.deleteColumn(column.name)
            add(None, column.name, alone.columns()[0].type())
        return update

    def remember(self, name: str, value: str) -> None:
        """Set a property of the table, unless it has the value already."""
        with as_unavailable(f"could not set a property of table {self.name}"):
            self._table.refresh()
            if self.properties().get(name) != value:
                self._table.updateProperties().set(name, value).commit()

    def _steps(self, columns: Sequence[Column], key: Sequence[str]) -> list[SchemaStep]:
        schema = schema_from_json(self.schema_json())
        mapping = self.properties().get(NAME_MAPPING)
        refuse_doubles(schema, mapping, columns, str(self.name))
        there = {column.name: column.type for column in columns if not column.absent}
        seen = source_schema(schema, mapping, there)
        ids = {column.field_id for column in schema.fields if column.name in key}
        names = [column.name for column in seen.fields if column.field_id in ids]
        return evolution(seen, columns, names, str(self.name))

    def _change_schema(self, changes: Sequence[Callable[[Any], Any]], noted: str | None) -> None:
        """Commit changes of the schema, unless somebody else was faster; with the number of the new
        schema in the property `noted` as one commit, so that a kill leaves all of it or nothing."""
        transaction = self._table.newTransaction() if noted else None
        try:
            with _as_py4j():
                for change in changes:
                    change((transaction or self._table).updateSchema()).commit()
                if transaction:
                    number = str(transaction.table().schema().schemaId())
                    transaction.updateProperties().set(noted, number).commit()
                    transaction.commitTransaction()
        except Py4JJavaError as error:
            if "IllegalArgumentException" not in _class_names(error):
                raise
            raise SchemaRejected(
                f"table {self.name} cannot take the source's columns",
                detail=_reason(error),
                hint="Change the table's schema so that it takes them.",
            ) from error

    def _with_steps(self, steps: Sequence[SchemaStep], update: Any) -> Any:
        parser, schema = self._jvm.org.apache.iceberg.SchemaParser, self._table.schema()
        for step in steps:
            # Names are asked by id, for the source may have others.
            number = step.field_id
            path = schema.findColumnName(number) if number is not None else None
            alone = parser.fromJson(column_schema(step.column).model_dump_json())
            kind = alone.columns()[0].type()
            if step.change == Change.LOOSEN:
                update = update.makeColumnOptional(path)
            elif step.change == Change.WIDEN:
                update = update.updateColumn(path, kind)
            else:
                # The parent is named (or none) so that a dot in the name is not taken for a path.
                update = update.addColumn(path, step.column.name, kind)
        return update

    @contextmanager
    def staged(
        self, branch: str, bounds: Mapping[int, Bound], at: Past | int | None = None
    ) -> Iterator[str | None]:
        """Let Spark read the branch's rows within these bounds, by field id, as long as it lasts.

        Yields the name to read from, or None when no file has such rows. Columns are called by
        `staged_name`, so that no name can clash or need quotes; those that Spark knows no type for
        are not there. `at` is a moment of the past, or the id of a snapshot, if not the newest one.
        """
        with as_unavailable(f"could not plan a scan of table {self.name}"):
            metadata = self.fresh_metadata()
            snapshot = self._snapshot_at(metadata, branch, at)
            table = self._renamed(metadata, snapshot)
            tasks = self._planned(table, bounds) if snapshot else None
            staged_id = str(uuid.uuid4())
            cache = self.table_cache()
            manager = self._jvm.org.apache.iceberg.spark.ScanTaskSetManager.get()
        if tasks is None or tasks.isEmpty():
            yield None
            return
        cache.add(staged_id, table)
        manager.stageTasks(table, staged_id, tasks)
        try:
            yield staged_id
        finally:
            manager.removeTasks(table, staged_id)
            cache.remove(staged_id)

    def holding(self, snapshot_id: int, bounds: Mapping[int, Bound]) -> Any:
        """Scan tasks of the files of a snapshot that may have rows within these bounds."""
        with as_unavailable(f"could not plan a scan of table {self.name}"):
            metadata = self._table.operations().current()
            table = self._renamed(metadata, metadata.snapshot(snapshot_id))
            schema = metadata.schema()
            # Nothing can be said of a column that was dropped since.
            known = {at: each for at, each in bounds.items() if schema.findField(at) is not None}
            return self._planned(table, known)

    def _snapshot_at(self, metadata: Any, branch: str, at: Past | int | None) -> Any:
        """The branch's head, its state at a moment of the past, or the snapshot of an id."""
        if isinstance(at, Past):
            return self._snapshot_before(metadata, _latest(metadata, branch), at)
        if at is None:
            return _latest(metadata, branch)
        if metadata.snapshot(at) is None:
            raise _forgotten(self.name)
        return metadata.snapshot(at)

    def _snapshot_before(self, metadata: Any, snapshot: Any, past: Past) -> Any:
        """The newest snapshot on the way back from one that has not passed a frontier, or None.

        Those of others stay where no snapshot of the pipeline's own beneath them has passed it.
        """
        found = snapshot
        for _ in range(ANCESTORS_MAX):
            if snapshot is None:
                return found
            parent = snapshot.parentId()
            if snapshot.summary().get(summaries.PIPELINE) == past.pipeline:
                if past.before.covers(self._past_progress(metadata, snapshot).upper):
                    return found
                found = metadata.snapshot(parent) if parent is not None else None
                if found is None and parent is not None:
                    raise _forgotten(self.name)
            snapshot = metadata.snapshot(parent) if parent is not None else None
        raise _forgotten(self.name)

    def _planned(self, table: Any, bounds: Mapping[int, Bound]) -> Any:
        """The files that may hold rows within the bounds, as the staged branch has them."""
        scan = table.newScan().useRef(_STAGED_BRANCH)
        for number, bound in bounds.items():
            scan = scan.filter(self._expression(staged_name(number), bound))
        found = self._jvm.java.util.ArrayList()
        guava = self._jvm.org.apache.iceberg.relocated.com.google.common
        tasks = scan.planFiles()
        try:
            guava.collect.Iterables.addAll(found, tasks)
        finally:
            tasks.close()
        return found

    def viewed(self, schema_id: int, without_lineage: bool = False) -> Any:
        """A table for reading alone, with this one's columns called by their ids.

        `without_lineage` makes one of a format version that knows no row ids; None when that
        version does not know all the columns' types either.
        """
        metadata = self._table.operations().current()
        version = VERSION_WITHOUT_LINEAGE if without_lineage else metadata.formatVersion()
        made_of = (schema_id, version, metadata.location())
        if made_of not in self._views:
            self._views[made_of] = self._view(metadata, *made_of)
        return self._views[made_of]

    def _view(self, metadata: Any, schema_id: int, version: int, location: str) -> Any:
        """See `viewed`; None when the format version does not know the type of a column."""
        iceberg = self._jvm.org.apache.iceberg
        fields = self._renamed_fields(self._table.schemas().get(schema_id), optional=True)
        try:
            with _as_py4j():
                new = (
                    iceberg.TableMetadata.buildFromEmpty(version)
                    .assignUUID()
                    .setLocation(location)
                    .setCurrentSchema(iceberg.Schema(fields), metadata.lastColumnId())
                    .setDefaultPartitionSpec(iceberg.PartitionSpec.unpartitioned())
                    .setDefaultSortOrder(iceberg.SortOrder.unsorted())
                    .build()
                )
        except Py4JJavaError:
            if version < metadata.formatVersion():
                return None
            raise
        return iceberg.BaseTable(
            iceberg.StaticTableOperations(new, self._table.io()), str(self.name)
        )

    def _renamed(self, metadata: Any, snapshot: Any) -> Any:
        """The table with its columns called by their ids; never committed, only read.

        It has a branch at the snapshot: a branch is read with the table's schema, and a snapshot
        with the one of its time, in which columns have their own names.
        """
        iceberg = self._jvm.org.apache.iceberg
        schema = iceberg.Schema(self._renamed_fields(metadata.schema()))
        new = iceberg.TableMetadata.buildFrom(metadata).setCurrentSchema(
            schema, metadata.lastColumnId()
        )
        if snapshot is not None:
            branch = iceberg.SnapshotRef.branchBuilder(snapshot.snapshotId()).build()
            new = new.setRef(_STAGED_BRANCH, branch)
        operations = iceberg.StaticTableOperations(new.build(), self._table.io())
        return iceberg.BaseTable(operations, str(self.name))

    def _renamed_fields(self, schema: Any, optional: bool = False) -> Any:
        fields = self._jvm.java.util.ArrayList()
        for column in schema.columns():
            if self._known_to_spark(column):
                nested = self._jvm.org.apache.iceberg.types.Types.NestedField
                copy = getattr(nested, "from")(column).withName(staged_name(column.fieldId()))
                fields.add((copy.asOptional() if optional else copy).build())
        return fields

    def _known_to_spark(self, column: Any) -> bool:
        try:
            with _as_py4j():
                self._jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert(column.type())
            return True
        except Py4JJavaError as error:
            if "UnsupportedOperationException" not in _class_names(error):
                raise
            return False

    def _expression(self, name: str, bound: Bound) -> Any:
        expressions = self._jvm.org.apache.iceberg.expressions.Expressions
        if bound.ranged:
            low, high = bound.values
            return getattr(expressions, "and")(
                expressions.greaterThanOrEqual(name, low), expressions.lessThanOrEqual(name, high)
            )
        values = self._jvm.java.util.ArrayList()
        for value in bound.values:
            values.add(value)
        return getattr(expressions, "in")(name, values)

    def table_cache(self) -> Any:
        """Where Spark finds a staged table; the gateway cannot tell the two `get`s apart."""
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        kind = loader.loadClass("org.apache.iceberg.spark.SparkTableCache")
        return kind.getMethod("get", None).invoke(None, None)

    def last_epoch_snapshot(self, pipeline: str, branch: str) -> int | None:
        """The snapshot of the pipeline's last epoch: claims and foreign snapshots come after it."""
        with self._readable():
            metadata = self._table.operations().current()
            snapshot = _latest(metadata, branch)
            for _ in range(ANCESTORS_MAX):
                if snapshot is None:
                    return None
                summary = snapshot.summary()
                if summary.get(summaries.PIPELINE) == pipeline and summary.get(summaries.BATCH_ID):
                    return int(snapshot.snapshotId())
                parent = snapshot.parentId()
                snapshot = metadata.snapshot(parent) if parent is not None else None
        return None

    def snapshot_time_ms(self, snapshot_id: int) -> int:
        """When a snapshot was committed, in milliseconds since 1970."""
        with self._readable():
            metadata = self._table.operations().current()
            return int(metadata.snapshot(snapshot_id).timestampMillis())

    def read_side_file(self, path: str) -> bytes:
        """The content of a file beside the metadata; raises `FileNotFoundError` if it is gone."""
        try:
            with _as_py4j():
                stream = self._table.io().newInputFile(path).newStream()
                try:
                    return bytes(stream.readAllBytes())
                finally:
                    stream.close()
        except Py4JJavaError as error:
            if _class_names(error) & set(_NO_FILE):
                raise FileNotFoundError(path) from error
            raise

    def fresh_metadata(self) -> Any:
        """The metadata as they are now; raises `ProgressLost` when this table is no more."""
        try:
            metadata = self._table.operations().refresh()
        except Py4JJavaError as error:
            if "NoSuchTableException" in _class_names(error):
                raise _gone(f"table {self.name}") from error
            if _UUID_DIFFERS in _reason(error):
                raise replaced(self.name) from error
            raise
        if metadata is None:
            raise _gone(f"table {self.name}")
        return metadata

    def _apply(
        self, branch: str, files: Sequence[FileClosed], summary: Mapping[str, str], emptied: bool
    ) -> Any:
        """Write the manifests of one snapshot; rows that are all removed need no delete file."""
        added = [file for file in files if file.kind == DATA] if emptied else files
        update, add_data = self._update(added, emptied)
        jackson = self._jvm.org.apache.iceberg.shaded.com.fasterxml.jackson
        mapper = jackson.databind.ObjectMapper()
        # A table may be partitioned by a number that is none, or infinite.
        special = jackson.core.json.JsonReadFeature.ALLOW_NON_NUMERIC_NUMBERS
        mapper.configure(special.mappedFeature(), True)
        parser = self._jvm.org.apache.iceberg.ContentFileParser
        specs = self._table.specs()
        for file in added:
            content = parser.fromJson(mapper.readTree(file.content_json()), specs)
            update = getattr(update, add_data if file.kind == DATA else "addDeletes")(content)
        for key, value in summary.items():
            update = update.set(key, value)
        return update.toBranch(branch).apply()

    def _update(self, files: Sequence[FileClosed], emptied: bool) -> tuple[Any, str]:
        """The kind of update that these files need, and its method that takes a data file."""
        if emptied:
            everything = self._jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
            return self._table.newOverwrite().overwriteByRowFilter(everything), "addFile"
        if any(file.kind != DATA for file in files):
            return self._table.newRowDelta(), "addRows"
        return self._table.newAppend(), "appendFile"

    def _newest_own(
        self, metadata: Any, snapshot: Any, pipeline: str, older: "_OlderMetadata | None"
    ) -> tuple[Any, bool]:
        """The pipeline's newest snapshot on the way back from `snapshot`, and whether that way is
        whole: ancestors that were expired and that no older metadata have cut it short."""
        for _ in range(ANCESTORS_MAX):
            if snapshot is None:
                return None, True
            if snapshot.summary().get(summaries.PIPELINE) == pipeline:
                return snapshot, True
            parent = snapshot.parentId()
            if parent is None:
                return None, True
            snapshot = metadata.snapshot(parent)
            if snapshot is None and older is not None:
                snapshot = older.snapshot(parent)
            if snapshot is None:
                return None, False
        raise NeedsOperator(
            f"the last {ANCESTORS_MAX} snapshots of table {self.name} are all foreign",
            hint="Expire old snapshots of the table.",
        )

    def _tagged(self, metadata: Any, pipeline: str) -> Any:
        reference = metadata.ref(summaries.tag_name(pipeline))
        return metadata.snapshot(reference.snapshotId()) if reference else None

    def _refuse_untagged(self, metadata: Any, pipeline: str) -> None:
        """Raise `ProgressLost` when the pipeline has committed here and nothing of it is left."""
        if metadata.properties().containsKey(summaries.tagged_property(pipeline)):
            raise ProgressLost(
                f"the last commit of pipeline {pipeline} is no longer in table {self.name}",
                detail=f"Neither the tag {summaries.tag_name(pipeline)} is there, nor a snapshot "
                "of the pipeline in the branch's history.",
                hint="Make the tag again at the pipeline's last snapshot, or drop the table and "
                "start anew: it is then built from the source.",
            )

    def _progress_unless(
        self, rolled_back: bool, metadata: Any, newest: Any
    ) -> tuple[Progress | None, bool]:
        """The progress of a snapshot, and whether it is forgotten: it may be after a rollback."""
        try:
            return self._progress(metadata, newest) if newest else None, False
        except FrontierLost:
            if not rolled_back:
                raise
            return None, True

    def _past_progress(self, metadata: Any, snapshot: Any) -> Progress:
        try:
            return self._progress(metadata, snapshot)
        except FrontierLost as error:
            raise _forgotten(self.name) from error

    def _progress(self, metadata: Any, snapshot: Any) -> Progress:
        summary = snapshot.summary()
        entries = {name: summary.get(name) for name in summaries.KEYS}
        found = {name: value for name, value in entries.items() if value is not None}
        properties = self._properties(metadata) if summaries.BOUNDS_PROPERTY in found else {}
        return summaries.from_summary(found, properties, self.read_side_file, str(self.name))

    def _readable(self) -> AbstractContextManager[None]:
        """What the library knows already, it may ask the catalog again after a failed commit."""
        return as_unavailable(f"could not read the metadata of table {self.name}")

    def _properties(self, owner: Any) -> dict[str, str]:
        """The properties of a table or its metadata in one call: there may be many."""
        jackson = self._jvm.org.apache.iceberg.shaded.com.fasterxml.jackson
        text = jackson.databind.ObjectMapper().writeValueAsString(owner.properties())
        return dict(json.loads(text))

    def _global_spec_id(self) -> int:
        """The id of an unpartitioned spec, whose equality deletes reach every partition."""
        for spec in self._table.specs().values():
            if spec.isUnpartitioned():
                return int(spec.specId())
        update = self._table.updateSpec()
        for partition_field in self._table.spec().fields():
            update = update.removeField(partition_field.name())
        update.addNonDefaultSpec().commit()
        self._table.refresh()
        return next(
            int(spec.specId()) for spec in self._table.specs().values() if spec.isUnpartitioned()
        )

    def _one_spec(self, branch: str) -> bool:
        """Whether all rows of the branch lie in files of the default spec.

        The manifest list says so; a delete bound to a partition would miss rows of another spec.
        """
        metadata = self._table.operations().current()
        snapshot = _latest(metadata, branch)
        if snapshot is None:
            return True
        manifests = snapshot.dataManifests(self._table.io())
        spec_id = metadata.defaultSpecId()
        return all(manifest.partitionSpecId() == spec_id for manifest in manifests)


class _OlderMetadata:
    """Snapshots that were expired, as the metadata files before the current one have them.

    They are asked for from the newest to the oldest, and so are the files read, each once.
    """

    def __init__(self, jvm: Any, io: Any, metadata: Any):
        self._jvm = jvm
        self._io = io
        self._metadata = metadata
        self._paths: list[str] | None = None

    def snapshot(self, snapshot_id: int) -> Any:
        """The snapshot of this id, or None when no file that is left has it."""
        if self._paths is None:
            self._paths = [str(entry.file()) for entry in self._metadata.previousFiles()]
        found = self._metadata.snapshot(snapshot_id)
        while found is None and self._paths:
            self._metadata = self._read(self._paths.pop()) or self._metadata
            found = self._metadata.snapshot(snapshot_id)
        return found

    def _read(self, path: str) -> Any:
        try:
            with _as_py4j():
                return self._jvm.org.apache.iceberg.TableMetadataParser.read(self._io, path)
        except Py4JJavaError as error:
            if _class_names(error) & set(_NO_FILE):
                return None
            raise


def _names_in(older: Any, schema: Any, names: Sequence[str]) -> list[str]:
    """What columns were called in an older schema."""
    return [older.findColumnName(schema.findField(name).fieldId()) or name for name in names]


def staged_name(field_id: int) -> str:
    """What a column is called where its rows are staged for Spark."""
    return f"c{field_id}"


def _latest(metadata: Any, branch: str) -> Any:
    """The branch's head; a branch that does not exist yet starts at the table's current state."""
    reference = metadata.ref(branch)
    return metadata.snapshot(reference.snapshotId()) if reference else metadata.currentSnapshot()


def _forgotten(name: TableName) -> HistoryLost:
    return HistoryLost(
        f"table {name} no longer has the snapshot that an epoch began with",
        detail="The epoch was committed in part, and has to be written again for other tables.",
        hint="Keep snapshots for longer than a pipeline may stand still.",
    )


def _gone(where: str) -> ProgressLost:
    return ProgressLost(
        f"{where} is gone",
        detail="It was dropped or renamed while the pipeline was running.",
        hint="Restore the table, or start the pipeline anew to build it from the source.",
    )


def replaced(name: object) -> TableReplaced:
    """The error for a table that is another one than the pipeline has written to."""
    return TableReplaced(
        f"table {name} was dropped and created anew",
        detail="The table of this name is another one than the pipeline has written to.",
        hint="Start the pipeline anew to continue with the new table from its own progress, "
        "or restore the old one.",
    )


def _data_location(location: str, properties: Mapping[str, str]) -> str:
    return properties.get("write.data.path", f"{location.rstrip('/')}/data").rstrip("/")


def _plain_sort_columns(schema: Any, order: Any) -> list[SortColumn]:
    """The order's columns; none when it sorts by a transform."""
    columns = []
    for sort_field in order.fields():
        if str(sort_field.transform()) != "identity":
            return []
        name = schema.findColumnName(sort_field.sourceId())
        ascending = str(sort_field.direction()) == "asc"
        nulls_first = sort_field.nullOrder().name() == "NULLS_FIRST"
        columns.append(SortColumn(str(name), ascending, nulls_first))
    return columns


def _partition_spec(jvm: Any, schema: Any, terms: Sequence[str]) -> Any:
    builder = jvm.org.apache.iceberg.PartitionSpec.builderFor(schema)
    for term in terms:
        transform, arguments = _call(term)
        method = getattr(builder, transform)
        builder = method(*arguments)
    return builder.build()


def _sort_order(jvm: Any, schema: Any, terms: Sequence[str]) -> Any:
    builder = jvm.org.apache.iceberg.SortOrder.builderFor(schema)
    for term in terms:
        column, _, direction = term.strip().partition(" ")
        builder = builder.desc(column) if direction.lower() == "desc" else builder.asc(column)
    return builder.build()


_TRANSFORMS = {
    "identity": "identity",
    "bucket": "bucket",
    "truncate": "truncate",
    "year": "year",
    "month": "month",
    "day": "day",
    "hour": "hour",
    "void": "alwaysNull",
}


def _call(term: str) -> tuple[str, list[Any]]:
    """`day(created_at)`, `bucket(16, id)` or a bare column as a call of Iceberg's spec builder."""
    name, opening, rest = term.strip().partition("(")
    if not opening:
        return "identity", [term.strip()]
    parts = [part.strip() for part in rest.removesuffix(")").split(",")]
    transform = _TRANSFORMS.get(name.strip().lower().removesuffix("s"))
    if transform is None or not rest.endswith(")"):
        raise ConfigInvalid(
            f"cannot partition by {term!r}",
            hint="Use a column, or identity, bucket(n, column), truncate(n, column), year, month, "
            "day, hour or void of a column.",
        )
    if transform in ("bucket", "truncate"):
        if len(parts) != 2 or not parts[0].isdigit():
            raise ConfigInvalid(
                f"cannot partition by {term!r}", hint=f"Write {name}(16, column): a number first."
            )
        return transform, [parts[1], int(parts[0])]
    return transform, parts


def _other_type(found: IcebergType, wanted: IcebergType) -> bool:
    """Whether two types differ; what lies inside of nested ones is told by ids, and passes."""
    if isinstance(found, PrimitiveType) or isinstance(wanted, PrimitiveType):
        return found != wanted
    return type(found) is not type(wanted)


def _list(jvm: Any, texts: Sequence[str]) -> Any:
    found = jvm.java.util.ArrayList()
    for text in texts:
        found.add(text)
    return found


def _strings(jvm: Any, parts: Sequence[str]) -> Any:
    array = jvm.java.lang.reflect.Array.newInstance(
        jvm.java.lang.Class.forName("java.lang.String"), len(parts)
    )
    for number, part in enumerate(parts):
        array[number] = part
    return array


def _dictionary(java_map: Any) -> dict[str, str]:
    return {str(entry.getKey()): str(entry.getValue()) for entry in java_map.entrySet()}


def _class_names(error: Py4JJavaError) -> set[str]:
    names: set[str] = set()
    cause = error.java_exception
    while cause is not None and len(names) < 16:
        names.add(cause.getClass().getSimpleName())
        cause = cause.getCause()
    return names


def _reason(error: Py4JError) -> str:
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.getMessage() or error.java_exception.toString())
        return text.splitlines()[0] if text else type(error).__name__
    return str(error).splitlines()[0]


@contextmanager
def _commit_outcomes(where: str) -> Iterator[None]:
    """Sort what a swap may raise: refused, certain to have failed, or unknown."""
    try:
        with _as_py4j():
            yield
    except Py4JJavaError as error:
        names = _class_names(error)
        if names & set(_REFUSED) and "CommitStateUnknownException" not in names:
            raise CommitConflict(
                f"the catalog refused a commit to {where}", detail=_reason(error)
            ) from error
        if "NoSuchTableException" in names:
            raise _gone(where) from error
        if names & set(_CERTAIN):
            raise NeedsOperator(
                f"the catalog does not take commits to {where}",
                detail=_reason(error),
                hint="Check the catalog's privileges and the table's properties.",
            ) from error
        raise CommitUnknown(
            f"the answer to a commit to {where} was lost", detail=_reason(error)
        ) from error
    except Py4JNetworkError as error:
        raise CommitUnknown(
            f"the answer to a commit to {where} was lost", detail="the JVM is gone"
        ) from error


@contextmanager
def _as_py4j() -> Iterator[None]:
    """Let all of Java's exceptions look alike: Spark's library raises some of them as its own."""
    try:
        yield
    except Exception as error:
        origin = getattr(error, "_origin", None)
        if origin is None:
            raise
        raise Py4JJavaError("the library raised an exception", origin) from error


@contextmanager
def as_unavailable(message: str) -> Iterator[None]:
    """Turn the library's exceptions into errors that say who may help."""
    try:
        with _as_py4j():
            yield
    except Py4JJavaError as error:
        raise _translated(error, message) from error
    except Py4JNetworkError as error:
        raise TargetUnavailable(message, detail="the JVM is gone") from error


def _translated(error: Py4JJavaError, message: str) -> IcestreamError:
    names, reason = _class_names(error), _reason(error)
    if "NoSuchTableException" in names:
        return ProgressLost(message, detail=reason, hint="Restore the table, or start anew.")
    if names & {"NotAuthorizedException", "ForbiddenException", "OAuthException"}:
        return ConfigInvalid(
            message, detail=reason, hint="Check the catalog's credentials (token, credential)."
        )
    if names & {"IllegalArgumentException", "ClassNotFoundException", "NoSuchMethodException"}:
        return ConfigInvalid(
            message, detail=reason, hint="Check the catalog's type and its properties."
        )
    if "BadRequestException" in names:
        return ConfigInvalid(message, detail=reason, hint="The catalog refuses the request.")
    if "ValidationException" in names:
        return NeedsOperator(message, detail=reason, hint="Check the table's properties.")
    return TargetUnavailable(
        message, detail=reason, hint="Check that the catalog and its storage can be reached."
    )


@contextmanager
def _as_config(message: str) -> Iterator[None]:
    try:
        with _as_py4j():
            yield
    except Py4JJavaError as error:
        raise SchemaRejected(
            message, detail=_reason(error), hint="Name columns that the table has."
        ) from error


DEFAULT_CATALOG = {
    "type": "jdbc",
    "name": "icestream",
    "uri": "jdbc:sqlite:icestream-data/catalog.db",
    "warehouse": "icestream-data/warehouse",
    "jdbc.schema-version": "V1",
}


def catalog_properties(catalog: Mapping[str, str]) -> dict[str, str]:
    """The catalog's properties, with the embedded default and local paths made absolute."""
    given = {str(name): str(value) for name, value in catalog.items()}
    properties = given or dict(DEFAULT_CATALOG)
    if properties.get("type") == "jdbc":
        properties.setdefault("jdbc.schema-version", "V1")
        prefix = "jdbc:sqlite:"
        uri = properties.get("uri", "")
        if uri.startswith(prefix) and not uri.startswith(f"{prefix}file:"):
            properties["uri"] = prefix + local_path(uri.removeprefix(prefix))
    if "warehouse" in properties and "/" in properties["warehouse"]:
        properties["warehouse"] = local_path(properties["warehouse"])
    return properties


def local_path(location: str) -> str:
    """A location without a scheme as an absolute path, so that every process means the same."""
    return location if ":" in location else os.path.abspath(location)
