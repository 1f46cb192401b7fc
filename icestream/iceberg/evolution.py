"""Changes of a table's schema, each as one commit; `icestream.schema` says what may change."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyiceberg.types import IcebergType, PrimitiveType

from icestream.errors import CommitConflict, SchemaRejected
from icestream.iceberg.gateway import (
    REFUSED,
    JavaError,
    as_py4j,
    as_unavailable,
    class_names,
    dictionary,
    java_list,
    reason,
)
from icestream.iceberg.handle import TableHandle
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

# Each further try means that somebody else changed the table in between.
EVOLUTIONS_MAX = 20


def evolve(
    handle: TableHandle, columns: Sequence[Column], key: Sequence[str], noted: str | None = None
) -> bool:
    """Let the table take these columns of the source, in one commit; False if it does already.

    `key` names columns of the table that stay required, and `noted` the property that says the
    number of the new schema, if any. A schema that somebody else changes meanwhile is looked at
    again. Raises `SchemaRejected` when no safe change leads there.
    """
    for _ in range(EVOLUTIONS_MAX):
        with as_unavailable(f"could not change the schema of table {handle.name}"):
            handle.java.refresh()
            steps = _steps(handle, columns, key)
            if not steps:
                return False
            try:
                _change_schema(handle, [partial(_with_steps, handle, steps)], noted)
                return True
            except JavaError as error:
                if not class_names(error) & set(REFUSED):
                    raise
    raise CommitConflict(
        f"the schema of table {handle.name} does not come to rest",
        detail=f"Somebody else changed the table {EVOLUTIONS_MAX} times in a row.",
        hint="Find out who changes the table.",
    )


def shape_anew(handle: TableHandle, columns: Sequence[Column], noted: str) -> list[str]:
    """Give columns that have other types the ones given; for a table that never held rows.

    Returns their names. A column is dropped and added again under its name, which is no safe
    change where there are rows. One that is part of the identifier leaves it for a moment. All
    is one commit, as is the property `noted`, which gets the number of the new schema.
    """
    with as_unavailable(f"could not change the schema of table {handle.name}"):
        handle.java.refresh()
        schema = schema_from_json(handle.schema_json())
        known = {field.name: field for field in schema.fields}
        other = [
            Column(name=c.name, type=c.type, required=known[c.name].required)
            for c in columns
            if c.name in known and _other_type(known[c.name].field_type, c.type)
        ]
        if not other:
            return []
        identifier = sorted(handle.java.schema().identifierFieldNames())
        names = [column.name for column in other]
        kept = [name for name in identifier if name not in names]
        changes: list[Callable[[Any], Any]] = [
            partial(_retyped, handle, other, kept),
            lambda update: update.setIdentifierFields(java_list(handle.jvm, identifier)),
        ]
        _change_schema(handle, changes, noted)
        return names


def never_held_rows(handle: TableHandle) -> bool:
    """Whether no snapshot that the table knows has a file."""
    held = ("total-data-files", "total-delete-files")
    with handle.readable():
        snapshots = handle.fresh_metadata().snapshots()
        summaries = [dictionary(each.summary()) for each in snapshots]
    return not any(int(each.get(name, 0)) for each in summaries for name in held)


def _steps(handle: TableHandle, columns: Sequence[Column], key: Sequence[str]) -> list[SchemaStep]:
    schema = schema_from_json(handle.schema_json())
    mapping = handle.properties_of(handle.java).get(NAME_MAPPING)
    refuse_doubles(schema, mapping, columns, str(handle.name))
    there = {column.name: column.type for column in columns if not column.absent}
    seen = source_schema(schema, mapping, there)
    ids = {column.field_id for column in schema.fields if column.name in key}
    names = [column.name for column in seen.fields if column.field_id in ids]
    return evolution(seen, columns, names, str(handle.name))


def _change_schema(
    handle: TableHandle, changes: Sequence[Callable[[Any], Any]], noted: str | None
) -> None:
    """Commit changes of the schema, unless somebody else was faster; with the number of the new
    schema in the property `noted` as one commit, so that a kill leaves all of it or nothing."""
    transaction = handle.java.newTransaction() if noted else None
    try:
        with as_py4j():
            for change in changes:
                change((transaction or handle.java).updateSchema()).commit()
            if transaction:
                number = str(transaction.table().schema().schemaId())
                transaction.updateProperties().set(noted, number).commit()
                transaction.commitTransaction()
    except JavaError as error:
        if "IllegalArgumentException" not in class_names(error):
            raise
        raise SchemaRejected(
            f"table {handle.name} cannot take the source's columns",
            detail=reason(error),
            hint="Change the table's schema so that it takes them.",
        ) from error


def _with_steps(handle: TableHandle, steps: Sequence[SchemaStep], update: Any) -> Any:
    parser, schema = handle.jvm.org.apache.iceberg.SchemaParser, handle.java.schema()
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


def _retyped(
    handle: TableHandle, columns: Sequence[Column], identifier: Sequence[str], update: Any
) -> Any:
    parser = handle.jvm.org.apache.iceberg.SchemaParser
    update = update.allowIncompatibleChanges()
    update = update.setIdentifierFields(java_list(handle.jvm, identifier))
    for column in columns:
        alone = parser.fromJson(column_schema(column).model_dump_json())
        add = update.addRequiredColumn if column.required else update.addColumn
        update.deleteColumn(column.name)
        add(None, column.name, alone.columns()[0].type())
    return update


def _other_type(found: IcebergType, wanted: IcebergType) -> bool:
    """Whether two types differ; what lies inside of nested ones is told by ids, and passes."""
    if isinstance(found, PrimitiveType) or isinstance(wanted, PrimitiveType):
        return found != wanted
    return type(found) is not type(wanted)
