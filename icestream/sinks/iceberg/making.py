"""How a source table's Iceberg table is made, and by which columns its rows are identified."""

import json
import logging
from collections.abc import Callable, Sequence

from pyiceberg.types import (
    DoubleType,
    FixedType,
    FloatType,
    NestedField,
)

from icestream import dead_letters
from icestream.errors import (
    ConfigInvalid,
)
from icestream.iceberg.handle import TableName
from icestream.iceberg.new_table import NewTable
from icestream.iceberg.table import OWNER_PROPERTY, Table
from icestream.names import ANY_TABLE
from icestream.schema import (
    NAME_MAPPING,
    TableShape,
    new_schema,
    refuse_unknown,
    schema_from_json,
    table_names,
)
from icestream.sinks.iceberg.options import (
    IcebergSinkOptions,
    TableOptions,
)
from icestream.sinks.iceberg.owners import (
    TableOwner,
)
from icestream.sinks.iceberg.state import TableState

log = logging.getLogger(__name__)

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


def new_table(
    options: IcebergSinkOptions, owner: TableOwner, name: TableName, shape: TableShape
) -> NewTable:
    """How a source table's Iceberg table is made."""
    given = table_options(options, owner.table or "")
    refuse_unknown(owner.table or str(name), shape.columns)
    # Catalogs have deleted old metadata inside a commit to many tables that then failed.
    unsafe = {DELETES_METADATA} if options.atomic else set()
    properties = {
        "format-version": str(options.format_version),
        KEY_PROPERTY: json.dumps(list(shape.key)),
        **{n: value for n, value in _NEW_TABLE_PROPERTIES.items() if n not in unsafe},
        **options.properties,
        **given.properties,
        OWNER_PROPERTY: owner.to_text(),
    }
    return NewTable(
        schema_json=new_schema(shape, str(name)).model_dump_json(),
        partition_by=given.partition_by,
        sort_by=given.sort_by,
        properties={str(key): str(value) for key, value in properties.items()},
        location=given.location or None,
    )


def table_options(options: IcebergSinkOptions, table: str) -> TableOptions:
    """The options of a source table; tables of dead letters take none that are not their own."""
    tables = options.tables
    anyhow = None if table.endswith(dead_letters.SUFFIX) else tables.get(ANY_TABLE)
    return tables.get(table) or anyhow or TableOptions()


def warn_of_deleted_metadata(options: IcebergSinkOptions, handle: Table) -> None:
    """A catalog may delete old metadata of some tables before it refuses the commit to all."""
    if options.atomic and handle.properties().get(DELETES_METADATA) == "true":
        log.warning(
            "table %s has %s = true, and a commit to many tables that fails may damage it; "
            "set it to false",
            handle.name,
            DELETES_METADATA,
            extra={"table": str(handle.name)},
        )


def own_schema(state: TableState) -> bool:
    """Whether a table that never took an epoch still has the schema that icestream gave it.

    What others have changed is as they want it.
    """
    properties = state.handle.properties()
    if state.progress.epoch or KEY_PROPERTY not in properties:
        return False
    return state.handle.schema_id() == int(properties.get(SCHEMA_PROPERTY, 0))


def key_of(
    options: IcebergSinkOptions,
    table: str,
    handle: Table,
    shape: Callable[[], TableShape | None],
) -> Sequence[str]:
    """The columns that identify a row by their names in the table, in the source's order."""
    given = table_options(options, table).equality_delete_by or options.equality_delete_by
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


def _refuse_vague(column: NestedField, table: str) -> None:
    """Iceberg forbids deletes by numbers that are not exact; Spark misses those by fixed bytes."""
    if isinstance(column.field_type, FloatType | DoubleType | FixedType):
        raise ConfigInvalid(
            f"rows of table {table} cannot be deleted by column {column.name}",
            detail=f"It is a {column.field_type}, and readers would still show deleted rows.",
            hint="Name other columns in `equality_delete_by`.",
        )
