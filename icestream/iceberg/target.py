"""What a worker needs to write files that a table can take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from icestream.errors import HistoryLost
from icestream.iceberg import progress as summaries
from icestream.iceberg.gateway import as_unavailable, dictionary
from icestream.iceberg.handle import TableHandle, latest


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


def write_target(
    handle: TableHandle, branch: str, equality_columns: Sequence[str], schema_id: int | None = None
) -> WriteTarget:
    """What workers need to write files that this table can take as it is now.

    With the number of an older schema it is for reading alone: as changes were read then.
    """
    with as_unavailable(f"could not prepare table {handle.name}"):
        global_spec_id = _global_spec_id(handle)
        metadata = handle.java.operations().current()
        iceberg = handle.jvm.org.apache.iceberg
        order = metadata.sortOrder()
        schema = _schema(handle, metadata, schema_id)
        properties = summaries.without_frontiers(handle.properties_of(metadata))
        return WriteTarget(
            table=str(handle.name),
            uuid=metadata.uuid(),
            location=_data_location(metadata.location(), properties),
            schema_id=schema.schemaId(),
            schema_json=iceberg.SchemaParser.toJson(schema),
            spec_id=metadata.defaultSpecId(),
            spec_json=iceberg.PartitionSpecParser.toJson(metadata.spec()),
            global_spec_id=global_spec_id,
            one_spec=_one_spec(handle, branch),
            sort_columns=_plain_sort_columns(metadata.schema(), order),
            sort_order_id=order.orderId(),
            properties=properties,
            io_properties=dictionary(handle.java.io().properties()),
            equality_columns=list(equality_columns)
            if schema_id is None
            else _names_in(schema, metadata.schema(), equality_columns),
        )


def _schema(handle: TableHandle, metadata: Any, schema_id: int | None) -> Any:
    """The schema of this number, or the current one."""
    schema = metadata.schema() if schema_id is None else metadata.schemasById().get(schema_id)
    if schema is None:
        raise HistoryLost(
            f"table {handle.name} no longer has schema {schema_id}",
            detail="Its last epoch was written with it, and the letters of that epoch are missing.",
            hint="Drop the table and its table of dead letters, and start anew: they are then "
            "built from the source.",
        )
    return schema


def _global_spec_id(handle: TableHandle) -> int:
    """The id of an unpartitioned spec, whose equality deletes reach every partition."""
    for spec in handle.java.specs().values():
        if spec.isUnpartitioned():
            return int(spec.specId())
    update = handle.java.updateSpec()
    for partition_field in handle.java.spec().fields():
        update = update.removeField(partition_field.name())
    update.addNonDefaultSpec().commit()
    handle.java.refresh()
    return next(
        int(spec.specId()) for spec in handle.java.specs().values() if spec.isUnpartitioned()
    )


def _one_spec(handle: TableHandle, branch: str) -> bool:
    """Whether all rows of the branch lie in files of the default spec.

    The manifest list says so; a delete bound to a partition would miss rows of another spec.
    """
    metadata = handle.java.operations().current()
    snapshot = latest(metadata, branch)
    if snapshot is None:
        return True
    manifests = snapshot.dataManifests(handle.java.io())
    spec_id = metadata.defaultSpecId()
    return all(manifest.partitionSpecId() == spec_id for manifest in manifests)


def _names_in(older: Any, schema: Any, names: Sequence[str]) -> list[str]:
    """What columns were called in an older schema."""
    return [older.findColumnName(schema.findField(name).fieldId()) or name for name in names]


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
