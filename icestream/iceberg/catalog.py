"""Tables of any Iceberg catalog, through Iceberg's own Java library in the coordinator's JVM.

`Table.head` reads fresh metadata; `Table.publish` swaps in one snapshot against exactly that
metadata. The obvious way, `commit()` of an append or a transaction, rebases silently onto newer
metadata, so a check made before it says nothing about what is swapped. Here the snapshot is only
applied (its manifests are written), the new metadata is built from the checked one, and the
catalog's compare-and-swap decides.

Data and delete files are described by what workers reported; they are never listed nor opened here.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

from icestream import failpoints
from icestream.epoch import Progress
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    ConfigInvalid,
    IcestreamError,
    NeedsOperator,
    ProgressLost,
    SchemaRejected,
    TargetUnavailable,
)
from icestream.iceberg import progress as summaries
from icestream.iceberg.files import DATA, FileClosed
from icestream.schema import Column

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
ANCESTORS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableName:
    """A table's name in its catalog, part by part: any part may hold dots, blanks or quotes."""

    namespace: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One state of a table as a pipeline sees it; `metadata` is what a swap is made against."""

    uuid: str
    snapshot_id: int | None
    schema_id: int
    spec_id: int
    progress: Progress | None
    batch_id: str | None
    claim_id: str | None
    progress_snapshot_id: int | None
    rolled_back_from: Progress | None
    metadata: Any = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """All that a worker needs to write files of a table; plain data."""

    table: str
    uuid: str
    location: str
    schema_id: int
    schema_json: str
    spec_id: int
    spec_json: str
    global_spec_id: int
    one_spec: bool
    sort_columns: Sequence[tuple[str, bool]]
    sort_order_id: int
    properties: Mapping[str, str]
    io_properties: Mapping[str, str]
    equality_columns: Sequence[str]


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
        with _as_unavailable(f"could not open the catalog at {self.label}"):
            self._catalog = jvm.org.apache.iceberg.CatalogUtil.buildIcebergCatalog(
                given.get("name", "icestream"), arguments, hadoop_configuration
            )

    def load(self, name: TableName) -> "Table | None":
        """The table, or None when there is none of that name."""
        with _as_unavailable(f"could not load table {name}"):
            identifier = self._identifier(name)
            if not self._catalog.tableExists(identifier):
                return None
            return Table(self._jvm, name, self._catalog.loadTable(identifier))

    def create(self, name: TableName, new: NewTable) -> "Table":
        """Create the table, and its namespace when needed; one made meanwhile is taken as it is."""
        jvm = self._jvm
        with _as_unavailable(f"could not create table {name}"):
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
        with _as_unavailable(f"could not list the tables of {'.'.join(namespace)}"):
            try:
                found = self._catalog.listTables(self._namespace(namespace))
            except Py4JJavaError as error:
                if "NoSuchNamespaceException" in _class_names(error):
                    return []
                raise
            return [TableName(namespace=namespace, name=str(table.name())) for table in found]

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
        self.name = name

    def head(self, pipeline: str, branch: str) -> Head:
        """Fresh metadata, and what the pipeline's newest snapshot in the branch's history says.

        Snapshots of others, compactions among them, are stepped over.
        """
        with _as_unavailable(f"could not read the metadata of table {self.name}"):
            metadata = self._fresh_metadata()
            snapshot = _latest(metadata, branch)
            newest, complete = self._newest_own(metadata, snapshot, pipeline)
            tagged = self._tagged(metadata, pipeline)
            rolled_back_from = None
            if tagged is not None and (
                newest is None or newest.snapshotId() != tagged.snapshotId()
            ):
                if complete or tagged.sequenceNumber() > snapshot.sequenceNumber():
                    rolled_back_from = self._progress(tagged)
                else:
                    # The history between the head and the tag was expired: the tag is what is left.
                    newest = tagged
            return Head(
                uuid=metadata.uuid(),
                snapshot_id=snapshot.snapshotId() if snapshot else None,
                schema_id=metadata.currentSchemaId(),
                spec_id=metadata.defaultSpecId(),
                progress=self._progress(newest) if newest else None,
                batch_id=newest.summary().get(summaries.BATCH_ID) if newest else None,
                claim_id=newest.summary().get(summaries.CLAIM) if newest else None,
                progress_snapshot_id=newest.snapshotId() if newest else None,
                rolled_back_from=rolled_back_from,
                metadata=metadata,
            )

    def publish(
        self, head: Head, branch: str, files: Sequence[FileClosed], summary: Mapping[str, str]
    ) -> int:
        """Make one snapshot of these files visible, if the table still is as `head` saw it.

        The pipeline's tag moves in the same swap. Raises `CommitConflict` when the catalog refused
        it and `CommitUnknown` when the answer was lost. Nothing is deleted in either case.
        """
        base = head.metadata
        if not failpoints.rule_on(failpoints.RULE_SWAP):
            base = self._table.operations().refresh()
        # Nothing is committed yet when the manifests cannot be written: that outcome is known.
        with _as_unavailable(f"could not write the manifests of table {self.name}"):
            snapshot = self._apply(branch, files, summary)
        with _commit_outcomes(self.name):
            parent = _latest(base, branch)
            if snapshot.parentId() != (parent.snapshotId() if parent else None):
                raise CommitConflict(f"the head of table {self.name} moved before the swap")
            iceberg = self._jvm.org.apache.iceberg
            tag = iceberg.SnapshotRef.tagBuilder(snapshot.snapshotId()).build()
            new = (
                iceberg.TableMetadata.buildFrom(base)
                .setBranchSnapshot(snapshot, branch)
                .setRef(summaries.tag_name(summary[summaries.PIPELINE]), tag)
                .build()
            )
            failpoints.reach(failpoints.BEFORE_SWAP)
            self._table.operations().commit(base, new)
            failpoints.reach(failpoints.AFTER_SWAP)
            return int(snapshot.snapshotId())

    def target(self, branch: str, equality_columns: Sequence[str]) -> WriteTarget:
        """What workers need to write files that this table can take as it is now."""
        with _as_unavailable(f"could not prepare table {self.name}"):
            global_spec_id = self._global_spec_id()
            metadata = self._table.operations().current()
            iceberg = self._jvm.org.apache.iceberg
            order = metadata.sortOrder()
            properties = _dictionary(metadata.properties())
            return WriteTarget(
                table=str(self.name),
                uuid=metadata.uuid(),
                location=_data_location(metadata.location(), properties),
                schema_id=metadata.currentSchemaId(),
                schema_json=iceberg.SchemaParser.toJson(metadata.schema()),
                spec_id=metadata.defaultSpecId(),
                spec_json=iceberg.PartitionSpecParser.toJson(metadata.spec()),
                global_spec_id=global_spec_id,
                one_spec=self._one_spec(branch),
                sort_columns=_plain_sort_columns(metadata.schema(), order),
                sort_order_id=order.orderId(),
                properties=properties,
                io_properties=_dictionary(self._table.io().properties()),
                equality_columns=list(equality_columns),
            )

    def has_tag(self, pipeline: str) -> bool:
        """Whether the pipeline has ever committed to the table."""
        return self._table.operations().current().ref(summaries.tag_name(pipeline)) is not None

    def properties(self) -> dict[str, str]:
        """The table's properties."""
        return _dictionary(self._table.properties())

    def schema_json(self) -> str:
        """The current schema as Iceberg prints it."""
        return str(self._jvm.org.apache.iceberg.SchemaParser.toJson(self._table.schema()))

    def identifier_columns(self) -> list[str]:
        """The names of the identifier fields."""
        return sorted(self._table.schema().identifierFieldNames())

    def add_columns(self, columns: Sequence[Column]) -> None:
        """Add optional columns; a column that is there meanwhile is left as it is."""
        iceberg = self._jvm.org.apache.iceberg
        with _as_unavailable(f"could not add columns to table {self.name}"):
            self._table.refresh()
            update = self._table.updateSchema()
            existing = {field.name() for field in self._table.schema().columns()}
            for column in columns:
                if column.name in existing:
                    continue
                field_json = {
                    "type": "struct",
                    "schema-id": 0,
                    "fields": [
                        {
                            "id": 1,
                            "name": column.name,
                            "required": False,
                            "type": json.loads(column.type.model_dump_json()),
                        }
                    ],
                }
                parsed = iceberg.SchemaParser.fromJson(json.dumps(field_json))
                # The parent is named (none) so that a dot in the name is not taken for a path.
                update = update.addColumn(None, column.name, parsed.columns()[0].type())
            update.commit()

    def last_epoch_snapshot(self, pipeline: str, branch: str) -> int | None:
        """The snapshot of the pipeline's last epoch: claims and foreign snapshots stand behind."""
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
        return int(self._table.operations().current().snapshot(snapshot_id).timestampMillis())

    def write_side_file(self, name: str, content: bytes) -> str:
        """Store a small file beside the table's metadata and return its path."""
        path = self._table.operations().metadataFileLocation(f"icestream/{name}")
        stream = self._table.io().newOutputFile(path).createOrOverwrite()
        try:
            stream.write(content)
        finally:
            stream.close()
        return str(path)

    def read_side_file(self, path: str) -> bytes:
        """The content of a side file."""
        stream = self._table.io().newInputFile(path).newStream()
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def _fresh_metadata(self) -> Any:
        try:
            metadata = self._table.operations().refresh()
        except Py4JJavaError as error:
            if "NoSuchTableException" in _class_names(error):
                raise _gone(self.name) from error
            if _UUID_DIFFERS in _reason(error):
                raise replaced(self.name) from error
            raise
        if metadata is None:
            raise _gone(self.name)
        return metadata

    def _apply(self, branch: str, files: Sequence[FileClosed], summary: Mapping[str, str]) -> Any:
        deletes = [file for file in files if file.kind != DATA]
        update = self._table.newRowDelta() if deletes else self._table.newAppend()
        jackson = self._jvm.org.apache.iceberg.shaded.com.fasterxml.jackson
        mapper = jackson.databind.ObjectMapper()
        # A table may be partitioned by a number that is none, or infinite.
        special = jackson.core.json.JsonReadFeature.ALLOW_NON_NUMERIC_NUMBERS
        mapper.configure(special.mappedFeature(), True)
        parser = self._jvm.org.apache.iceberg.ContentFileParser
        specs = self._table.specs()
        for file in files:
            content = parser.fromJson(mapper.readTree(file.content_json()), specs)
            if file.kind != DATA:
                update = update.addDeletes(content)
            else:
                update = update.addRows(content) if deletes else update.appendFile(content)
        for key, value in summary.items():
            update = update.set(key, value)
        return update.toBranch(branch).apply()

    def _newest_own(self, metadata: Any, snapshot: Any, pipeline: str) -> tuple[Any, bool]:
        """The pipeline's newest snapshot on the way back from `snapshot`, and whether that way is
        whole: expired ancestors cut it short."""
        for _ in range(ANCESTORS_MAX):
            if snapshot is None:
                return None, True
            if snapshot.summary().get(summaries.PIPELINE) == pipeline:
                return snapshot, True
            parent = snapshot.parentId()
            if parent is None:
                return None, True
            snapshot = metadata.snapshot(parent)
            if snapshot is None:
                return None, False
        raise NeedsOperator(
            f"the last {ANCESTORS_MAX} snapshots of table {self.name} are all foreign",
            hint="Expire old snapshots of the table.",
        )

    def _tagged(self, metadata: Any, pipeline: str) -> Any:
        reference = metadata.ref(summaries.tag_name(pipeline))
        return metadata.snapshot(reference.snapshotId()) if reference else None

    def _progress(self, snapshot: Any) -> Progress:
        summary = snapshot.summary()
        names = (*summaries.KEYS, *summaries.side_file_keys())
        entries = {name: summary.get(name) for name in names}
        found = {name: value for name, value in entries.items() if value is not None}
        return summaries.from_summary(found, self.read_side_file)

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


def _latest(metadata: Any, branch: str) -> Any:
    """The branch's head; a branch that does not exist yet starts at the table's current state."""
    reference = metadata.ref(branch)
    return metadata.snapshot(reference.snapshotId()) if reference else metadata.currentSnapshot()


def _gone(name: TableName) -> ProgressLost:
    return ProgressLost(
        f"table {name} is gone",
        detail="It was dropped or renamed while the pipeline was running.",
        hint="Restore the table, or start the pipeline anew to build it from the source.",
    )


def replaced(name: object) -> ProgressLost:
    """The error for a table that is another one than the pipeline has written to."""
    return ProgressLost(
        f"table {name} was dropped and created anew",
        detail="The table of this name is another one than the pipeline has written to.",
        hint="Start the pipeline anew to continue with the new table from its own progress, "
        "or restore the old one.",
    )


def _data_location(location: str, properties: Mapping[str, str]) -> str:
    return properties.get("write.data.path", f"{location.rstrip('/')}/data").rstrip("/")


def _plain_sort_columns(schema: Any, order: Any) -> list[tuple[str, bool]]:
    """The order's columns and whether they ascend; none when it sorts by a transform."""
    columns = []
    for sort_field in order.fields():
        if str(sort_field.transform()) != "identity":
            return []
        name = schema.findColumnName(sort_field.sourceId())
        columns.append((str(name), str(sort_field.direction()) == "asc"))
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
def _commit_outcomes(name: TableName) -> Iterator[None]:
    """Sort what a swap may raise: refused, certain to have failed, or unknown."""
    try:
        yield
    except Py4JJavaError as error:
        names = _class_names(error)
        if names & set(_REFUSED) and "CommitStateUnknownException" not in names:
            raise CommitConflict(
                f"the catalog refused a commit to table {name}", detail=_reason(error)
            ) from error
        if "NoSuchTableException" in names:
            raise _gone(name) from error
        if names & set(_CERTAIN):
            raise NeedsOperator(
                f"the catalog does not take commits to table {name}",
                detail=_reason(error),
                hint="Check the catalog's privileges and the table's properties.",
            ) from error
        raise CommitUnknown(
            f"the answer to a commit to table {name} was lost", detail=_reason(error)
        ) from error
    except Py4JNetworkError as error:
        raise CommitUnknown(
            f"the answer to a commit to table {name} was lost", detail="the JVM is gone"
        ) from error


@contextmanager
def _as_unavailable(message: str) -> Iterator[None]:
    """Turn the library's exceptions into errors that say who may help."""
    try:
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
        yield
    except Py4JJavaError as error:
        raise SchemaRejected(
            message, detail=_reason(error), hint="Name columns that the table has."
        ) from error


def local_path(location: str) -> str:
    """A location without a scheme as an absolute path, so that every process means the same."""
    return location if ":" in location else os.path.abspath(location)
