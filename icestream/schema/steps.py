"""What a table must become to take a source's columns.

`gaps` says what the table lacks, `evolution` how it gets there: only by steps that keep every row
as it is. A column is added, widened to a type that holds all of its values, or made optional.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StringType, StructType

from icestream.errors import SchemaRejected
from icestream.schema.columns import (
    Column,
    Names,
    TableShape,
    clashing,
    fields_inside,
    new_schema,
    refuse_reserved,
)
from icestream.schema.widening import widened


class Change(StrEnum):
    """How a step changes a schema."""

    ADD = "add"
    WIDEN = "widen"
    LOOSEN = "loosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaStep:
    """One change of a table's schema that keeps every row as it is.

    `field_id` is the field that is widened or made optional; for an addition the struct that gains
    `column`, or None for the table itself.
    """

    change: Change
    field_id: int | None
    column: Column


def gaps(schema: Schema, columns: Sequence[Column], key: Sequence[str] = ()) -> list[Column]:
    """The columns that the table must gain, widen or make optional before it takes the source's.

    `columns` are all that the source has; `schema` has the source's names. A column that the table
    can never take is among them, so that evolving the table says so. A required column of the table
    that the source lacks is there as `absent`. Empty when the table takes rows as it is.
    """
    found = [column for column in columns if not _fits(schema, column, key)]
    fixed, known = _fixed_fields(schema, key), {column.name for column in columns}
    lost = [
        Column(name=field.name, type=field.field_type, absent=True)
        for field in schema.fields
        if field.required and field.name not in known and field.field_id not in fixed
    ]
    return [*found, *lost]


def evolution(
    schema: Schema, columns: Iterable[Column], key: Sequence[str] = (), table: str = ""
) -> list[SchemaStep]:
    """The steps after which the table takes the columns; none when it does already.

    Columns of the key stay required. Raises `SchemaRejected` when no safe step leads there.
    """
    fixed = _fixed_fields(schema, key)
    held = {field.name: field for field in schema.fields}
    steps: list[SchemaStep] = []
    for column in columns:
        field = held.get(column.name)
        if field is not None:
            steps += _field_steps(field, column, fixed, table)
        elif not column.absent:
            steps.append(SchemaStep(change=Change.ADD, field_id=None, column=column))
    _refuse_clashes(schema, steps, table)
    return steps


def _refuse_clashes(schema: Schema, steps: Sequence[SchemaStep], table: str) -> None:
    """Raise `SchemaRejected` for an addition whose name readers take for that of another field."""
    added = [step for step in steps if step.change is Change.ADD]
    names = Names(schema.fields if added else ())
    for step in added:
        inside = "" if step.field_id is None else schema.find_column_name(step.field_id) or ""
        if not inside:
            refuse_reserved(table, step.column)
        if taken := names.clash(step.column, inside):
            raise clashing(table, taken)
        names.add(step.column, inside)


def grown(shape: TableShape, columns: Sequence[Column], table: str) -> TableShape:
    """The shape after `evolution` has let it take the columns; raises as that does."""
    evolution(new_schema(shape), columns, shape.key, table)
    held = {column.name: column for column in shape.columns}
    for column in columns:
        have = held.get(column.name)
        if have is not None:
            kind = have.type if column.absent else _grown_type(have.type, column.type)
            required = have.required and (column.required or column.name in shape.key)
            held[column.name] = Column(name=column.name, type=kind, required=required)
        elif not column.absent:
            held[column.name] = Column(name=column.name, type=column.type)
    return replace(shape, columns=list(held.values()))


def declared_shape(shape: TableShape, types: Mapping[str, IcebergType], table: str) -> TableShape:
    """The shape with columns of the types that were declared for them.

    A type that holds every value of the declared one stays: the column has grown since.
    """
    for number, column in enumerate(shape.columns):
        if column.name not in types:
            continue
        wanted = replace(column, type=types[column.name])
        try:
            shape = grown(shape, [wanted], table)
        except SchemaRejected:
            columns = [*shape.columns[:number], wanted, *shape.columns[number + 1 :]]
            shape = replace(shape, columns=columns)
    return shape


def _grown_type(have: IcebergType, want: IcebergType) -> IcebergType:
    if isinstance(have, StructType) and isinstance(want, StructType):
        return StructType(*_grown_fields(have.fields, want.fields))
    if isinstance(have, ListType) and isinstance(want, ListType):
        element = _grown_type(have.element_type, want.element_type)
        required = have.element_required and want.element_required
        return ListType(element_id=have.element_id, element_type=element, element_required=required)
    if isinstance(have, MapType) and isinstance(want, MapType):
        return MapType(
            key_id=have.key_id,
            key_type=have.key_type,
            value_id=have.value_id,
            value_type=_grown_type(have.value_type, want.value_type),
            value_required=have.value_required and want.value_required,
        )
    return widened(have, want) or have


def _grown_fields(
    have: Sequence[NestedField], want: Sequence[NestedField]
) -> Iterator[NestedField]:
    asked = {field.name: field for field in want}
    for field in have:
        other = asked.pop(field.name, None)
        kind = _grown_type(field.field_type, other.field_type) if other else field.field_type
        required = field.required and other is not None and other.required
        yield NestedField(
            field_id=field.field_id, name=field.name, field_type=kind, required=required
        )
    for field in asked.values():
        yield NestedField(
            field_id=field.field_id, name=field.name, field_type=field.field_type, required=False
        )


def _fits(schema: Schema, column: Column, key: Sequence[str]) -> bool:
    try:
        return not evolution(schema, [column], key)
    except SchemaRejected:
        return False


def _fixed_fields(schema: Schema, key: Sequence[str]) -> set[int]:
    """Fields that identify a row; they are never null."""
    named = {field.field_id for field in schema.fields if field.name in key}
    return {*schema.identifier_field_ids, *named}


def _field_steps(
    field: NestedField, column: Column, fixed: set[int], table: str
) -> Iterator[SchemaStep]:
    if field.required and not column.required and field.field_id not in fixed:
        yield SchemaStep(change=Change.LOOSEN, field_id=field.field_id, column=column)
    have, want = field.field_type, column.type
    if isinstance(have, StringType) or column.absent:
        return
    inner = _inner_fields(have, want)
    if inner is not None:
        yield from _inner_steps(field, inner, column.name, fixed, table)
        return
    wide = widened(have, want)
    if wide is None:
        raise _rejected(table, column.name, have, want)
    if wide != have:
        wider = Column(name=column.name, type=wide, required=column.required)
        yield SchemaStep(change=Change.WIDEN, field_id=field.field_id, column=wider)


def _inner_fields(
    have: IcebergType, want: IcebergType
) -> tuple[list[NestedField], list[NestedField]] | None:
    """The fields inside two types of the same shape; None for all other types."""
    for kind in (StructType, ListType, MapType):
        if isinstance(have, kind) and isinstance(want, kind):
            return fields_inside(have), fields_inside(want)
    return None


def _inner_steps(
    field: NestedField,
    inner: tuple[list[NestedField], list[NestedField]],
    path: str,
    fixed: set[int],
    table: str,
) -> Iterator[SchemaStep]:
    """The steps inside a struct, list or map, whose source side is known as a whole."""
    have, want = ({part.name: part for part in parts} for parts in inner)
    for name, part in want.items():
        column = Column(name=f"{path}.{name}", type=part.field_type, required=part.required)
        if name not in have:
            bare = Column(name=name, type=part.field_type)
            yield SchemaStep(change=Change.ADD, field_id=field.field_id, column=bare)
            continue
        steps = list(_field_steps(have[name], column, fixed, table))
        if steps and isinstance(field.field_type, MapType) and name == "key":
            # Iceberg never changes what a map is keyed by.
            raise _rejected(table, column.name, have[name].field_type, part.field_type)
        yield from steps
    for name in have.keys() - want.keys():
        if have[name].required:
            gone = Column(name=f"{path}.{name}", type=have[name].field_type, absent=True)
            yield SchemaStep(change=Change.LOOSEN, field_id=have[name].field_id, column=gone)


def _rejected(table: str, path: str, have: IcebergType, want: IcebergType) -> SchemaRejected:
    return SchemaRejected(
        f"column {path} of table {table} cannot become {want}",
        detail=f"The table has it as {have}, and not every value of the source fits into that.",
        hint="Rename the table's column so that a new one is added beside it, or change the "
        "source's column back; a table's column of type string takes any value.",
    )
