"""Columns of source tables, what a table must become to take them, and exact casts from text.

A source's columns find the table's by Iceberg's name mapping first, then by name; `source_schema`
gives the table's schema under the source's names. `gaps` says what the table lacks, `evolution`
how it gets there: only by steps that keep every row as it is.

Sources that carry no types (JSON) deliver text. Casting it is exact or refused: a value that does
not fit its column without loss raises `SchemaRejected`, it is never rounded, cut or made null.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson
from pyiceberg.exceptions import ValidationError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import ConfigInvalid, SchemaRejected

# The table property that holds Iceberg's name mapping.
NAME_MAPPING = "schema.name-mapping.default"
# The digits that any whole number of the type has at most.
_WHOLE_DIGITS: dict[type, int] = {IntegerType: 10, LongType: 19}
_DECIMAL_DIGITS_MAX = 38
# Iceberg's readers add columns of these names to every table, and refuse tables that have them.
_RESERVED_NAMES = frozenset(
    {
        "_file",
        "_pos",
        "_deleted",
        "_spec_id",
        "_partition",
        "_row_id",
        "_last_updated_sequence_number",
    }
)
# Days before 1970-01-01 of the first day of the year 0.
_FIRST_OF_YEAR_0 = -719_528
# Types of a table's column that hold every value of another type, beside the type itself.
_HELD_BY: dict[type, tuple[type, ...]] = {
    IntegerType: (LongType, DoubleType),
    FloatType: (DoubleType,),
    FixedType: (BinaryType,),
    TimestampType: (TimestampNanoType,),
    TimestamptzType: (TimestamptzNanoType,),
}
# Pairs of numbers that JSON writes alike.
_FRACTIONS = ({IntegerType, DoubleType}, {LongType, DoubleType}, {DecimalType, DoubleType})
# Any decimal text of at most this many digits survives the way through the type and back.
_DIGITS_EXACT = {pa.float32(): 6, pa.float64(): 15}
# Leaves that Arrow's JSON reader gets right; it rounds floats and does not know the others.
_READ_BY_ARROW = (
    BooleanType,
    IntegerType,
    LongType,
    DecimalType,
    StringType,
    TimestampType,
    TimestamptzType,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a source table as it would be created in Iceberg.

    `absent` says that the source has no such column any more: the table's must become optional.
    """

    name: str
    type: IcebergType
    required: bool = False
    absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """What a source knows of a table: its columns and the names of its key.

    `table_id` tells the table from another one that comes to bear its name; empty where the source
    tells no such thing.
    """

    columns: Sequence[Column]
    key: Sequence[str]
    table_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a table's select has use for: the columns that are read, and those that it names.

    A column that `*` stands for is read and not named. A row without a column that is named must
    not pass. With `beginning` the table takes its first epoch: there, rows may be older than a
    column. `hidden` columns are read by an expression, and the table does not hold them as they
    are: their values cannot be looked up there.
    """

    columns: frozenset[str]
    named: frozenset[str]
    beginning: bool = False
    hidden: frozenset[str] = frozenset()


class SchemaGap(Exception):
    """The table does not take these columns yet; the coordinator evolves it and reads again."""

    def __init__(self, table: str, columns: Sequence[Column]):
        super().__init__(f"table {table} lacks {', '.join(column.name for column in columns)}")
        self.table = table
        self.columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        return SchemaGap, (self.table, self.columns)


def calendar_day(number: int) -> tuple[int, int, int]:
    """Year, month and day of a day counted from 1970-01-01; the year before 1 is 0.

    Tables hold days of many more years than Python's own dates do.
    """
    year, month, day = str(np.datetime64(number, "D")).removeprefix("-").split("-")
    return int(year) if number >= _FIRST_OF_YEAR_0 else -int(year), int(month), int(day)


def parse_type(text: str) -> IcebergType:
    """The Iceberg type that a configuration names, such as `decimal(20,4)` or `timestamptz`."""
    try:
        field = {"id": 1, "name": "x", "type": text.strip().lower(), "required": False}
        return NestedField.model_validate(field).field_type
    except (ValueError, ValidationError) as error:
        raise ConfigInvalid(
            f"there is no type {text!r}",
            hint="Use Iceberg's names: boolean, int, long, float, double, decimal(p,s), date, "
            "time, timestamp, timestamptz, string, uuid, binary.",
        ) from error


class Names:
    """The full names of all fields, as readers tell them apart: the case of letters does not count.

    A dot joins the name of a field to that of the column that it lies in.
    """

    def __init__(self, fields: Iterable[NestedField] = ()):
        self._known: dict[str, str] = {}
        for field in fields:
            self.add(Column(name=field.name, type=field.field_type))

    def __len__(self) -> int:
        return len(self._known)

    def copy(self) -> "Names":
        """The same names, to be tried with others."""
        names = Names()
        names._known = dict(self._known)
        return names

    def clash(self, column: Column, inside: str = "") -> tuple[str, str] | None:
        """A name of the column or of a field in it that is taken, and the name that takes it."""
        own: dict[str, str] = {}
        for name in _full_names(column.name, column.type, inside):
            other = self._known.get(name.lower(), own.get(name.lower()))
            if other is not None:
                return name, other
            own[name.lower()] = name
        return None

    def add(self, column: Column, inside: str = "") -> None:
        """Take the names of the column and of all fields in it."""
        for name in _full_names(column.name, column.type, inside):
            self._known.setdefault(name.lower(), name)


def _full_names(name: str, kind: IcebergType, inside: str = "") -> Iterator[str]:
    whole = f"{inside}.{name}" if inside else name
    yield whole
    for field in _fields_inside(kind):
        yield from _full_names(field.name, field.field_type, whole)


def field_count(column: Column) -> int:
    """How many fields a column adds to its table: itself and those inside of it."""
    return sum(1 for _ in _full_names(column.name, column.type))


def distinct_columns(columns: Iterable[Column], fields_max: int | None = None) -> list[Column]:
    """The columns whose names readers can tell apart; of two that they cannot, the first.

    None whose name is reserved. No more than have `fields_max` fields together.
    """
    names, found = Names(), []
    for column in columns:
        room = fields_max is None or len(names) + field_count(column) <= fields_max
        if room and names.clash(column) is None and reserved(column) is None:
            names.add(column)
            found.append(column)
    return found


def reserved(column: Column) -> str | None:
    """Why no table may have a column of this name; None when it may."""
    if column.name.lower() not in _RESERVED_NAMES:
        return None
    return f"no column may be called {column.name}: readers of Iceberg give that name themselves"


def _refuse_reserved(table: str, column: Column) -> None:
    if why := reserved(column):
        raise SchemaRejected(
            f"{why} (table {table})", hint="Rename the column at the source, or leave it out."
        )


def clashing(table: str, names: tuple[str, str]) -> SchemaRejected:
    """The error for two names that readers do not tell apart."""
    new, known = names
    return SchemaRejected(
        f"columns {known} and {new} of table {table} cannot be told apart",
        detail="Readers do not mind the case of letters, and a dot joins a column to its field.",
        hint="Rename one of the two at the source, or leave it out.",
    )


def new_schema(shape: TableShape, table: str = "") -> Schema:
    """The Iceberg schema for a table that is created from its source.

    Raises `SchemaRejected` for names that readers do not tell apart or give themselves, and for a
    key that Iceberg does not allow.
    """
    names = Names()
    for column in shape.columns:
        _refuse_reserved(table, column)
        if column.name in shape.key and isinstance(column.type, FloatType | DoubleType):
            raise SchemaRejected(
                f"rows of table {table} cannot be identified by column {column.name}",
                detail=f"Its type is {column.type}, and Iceberg deletes no row by such a value.",
                hint="Let other columns identify the rows: give the table another key (in "
                "PostgreSQL a unique index and `REPLICA IDENTITY USING INDEX` will do), or name "
                "the columns with `keys` where the source has that option. Or leave it out.",
            )
        if taken := names.clash(column):
            raise clashing(table, taken)
        names.add(column)
    key = set(shape.key)
    fields = [
        NestedField(
            field_id=number,
            name=column.name,
            field_type=column.type,
            required=column.required or column.name in key,
        )
        for number, column in enumerate(shape.columns, start=1)
    ]
    # Sources number the fields inside a column as they like.
    numbered = assign_fresh_schema_ids(Schema(*fields)).fields
    identifiers = [field.field_id for field in numbered if field.name in key]
    return Schema(*numbered, identifier_field_ids=identifiers)


def column_schema(column: Column) -> Schema:
    """A schema with this column alone, optional, and its inner fields numbered without a clash."""
    alone = NestedField(field_id=1, name=column.name, field_type=column.type, required=False)
    return assign_fresh_schema_ids(Schema(alone))


class Change(StrEnum):
    """How a step changes a schema."""

    ADD = "add"
    WIDEN = "widen"
    LOOSEN = "loosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
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
) -> list[Step]:
    """The steps after which the table takes the columns; none when it does already.

    Columns of the key stay required. Raises `SchemaRejected` when no safe step leads there.
    """
    fixed = _fixed_fields(schema, key)
    held = {field.name: field for field in schema.fields}
    steps: list[Step] = []
    for column in columns:
        field = held.get(column.name)
        if field is not None:
            steps += _field_steps(field, column, fixed, table)
        elif not column.absent:
            steps.append(Step(change=Change.ADD, field_id=None, column=column))
    _refuse_clashes(schema, steps, table)
    return steps


def _refuse_clashes(schema: Schema, steps: Sequence[Step], table: str) -> None:
    """Raise `SchemaRejected` for an addition whose name readers take for that of another field."""
    added = [step for step in steps if step.change is Change.ADD]
    names = Names(schema.fields if added else ())
    for step in added:
        inside = "" if step.field_id is None else schema.find_column_name(step.field_id) or ""
        if not inside:
            _refuse_reserved(table, step.column)
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
    return TableShape(columns=list(held.values()), key=shape.key)


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
            shape = TableShape(columns=columns, key=shape.key)
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
    return _widened(have, want) or have


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


def _field_steps(field: NestedField, column: Column, fixed: set[int], table: str) -> Iterator[Step]:
    if field.required and not column.required and field.field_id not in fixed:
        yield Step(change=Change.LOOSEN, field_id=field.field_id, column=column)
    have, want = field.field_type, column.type
    if isinstance(have, StringType) or column.absent:
        return
    inner = _inner_fields(have, want)
    if inner is not None:
        yield from _inner_steps(field, inner, column.name, fixed, table)
        return
    wide = _widened(have, want)
    if wide is None:
        raise _rejected(table, column.name, have, want)
    if wide != have:
        widened = Column(name=column.name, type=wide, required=column.required)
        yield Step(change=Change.WIDEN, field_id=field.field_id, column=widened)


def _inner_fields(
    have: IcebergType, want: IcebergType
) -> tuple[list[NestedField], list[NestedField]] | None:
    """The fields inside two types of the same shape; None for all other types."""
    for kind in (StructType, ListType, MapType):
        if isinstance(have, kind) and isinstance(want, kind):
            return _fields_inside(have), _fields_inside(want)
    return None


def _fields_inside(kind: IcebergType) -> list[NestedField]:
    if isinstance(kind, ListType):
        return [kind.element_field]
    if isinstance(kind, MapType):
        return [kind.key_field, kind.value_field]
    return list(kind.fields) if isinstance(kind, StructType) else []


def _inner_steps(
    field: NestedField,
    inner: tuple[list[NestedField], list[NestedField]],
    path: str,
    fixed: set[int],
    table: str,
) -> Iterator[Step]:
    """The steps inside a struct, list or map, whose source side is known as a whole."""
    have, want = ({part.name: part for part in parts} for parts in inner)
    for name, part in want.items():
        column = Column(name=f"{path}.{name}", type=part.field_type, required=part.required)
        if name not in have:
            bare = Column(name=name, type=part.field_type)
            yield Step(change=Change.ADD, field_id=field.field_id, column=bare)
            continue
        steps = list(_field_steps(have[name], column, fixed, table))
        if steps and isinstance(field.field_type, MapType) and name == "key":
            # Iceberg never changes what a map is keyed by.
            raise _rejected(table, column.name, have[name].field_type, part.field_type)
        yield from steps
    for name in have.keys() - want.keys():
        if have[name].required:
            gone = Column(name=f"{path}.{name}", type=have[name].field_type, absent=True)
            yield Step(change=Change.LOOSEN, field_id=have[name].field_id, column=gone)


def _widened(have: IcebergType, want: IcebergType) -> IcebergType | None:
    """The narrowest type that Iceberg lets a column become and that holds the source's values."""
    promotions: list[IcebergType] = [have]
    if isinstance(have, IntegerType):
        promotions.append(LongType())
    if isinstance(have, FloatType):
        promotions.append(DoubleType())
    whole = _whole_digits(want)
    if isinstance(have, DecimalType) and whole is not None:
        digits = have.scale + max(have.precision - have.scale, whole)
        if digits <= _DECIMAL_DIGITS_MAX:
            promotions.append(DecimalType(digits, have.scale))
    return next((kind for kind in promotions if _holds(kind, want)), None)


def united(one: IcebergType, other: IcebergType) -> IcebergType:
    """The narrowest type for the values of two types; text when there is no other.

    Whole numbers among fractions are doubles; one that no double holds is refused when it comes.
    """
    if isinstance(one, StructType) and isinstance(other, StructType):
        return _united_structs(one, other)
    if isinstance(one, ListType) and isinstance(other, ListType):
        element = united(one.element_type, other.element_type)
        return ListType(element_id=one.element_id, element_type=element, element_required=False)
    if {type(one), type(other)} in _FRACTIONS:
        return DoubleType()
    return _widened(one, other) or _widened(other, one) or StringType()


def _united_structs(one: StructType, other: StructType) -> StructType:
    fields = {field.name: field for field in other.fields}
    fields.update({field.name: field for field in one.fields})
    there = {field.name: field.field_type for field in other.fields}
    both = {field.name for field in one.fields} & there.keys()
    # Numbers of fields are the source's own affair; those of two types may clash.
    return StructType(
        *(
            NestedField(
                field_id=number,
                name=name,
                field_type=united(field.field_type, there[name])
                if name in both
                else field.field_type,
                required=False,
            )
            for number, (name, field) in enumerate(fields.items(), start=1)
        )
    )


def _holds(kind: IcebergType, want: IcebergType) -> bool:
    """Whether every value of a source's type has its place in a type, unchanged."""
    if kind == want or isinstance(kind, StringType):
        return True
    if isinstance(kind, DecimalType):
        scale = want.scale if isinstance(want, DecimalType) else 0
        whole = _whole_digits(want)
        return whole is not None and whole <= kind.precision - kind.scale and scale <= kind.scale
    return isinstance(kind, _HELD_BY.get(type(want), ()))


def _whole_digits(kind: IcebergType) -> int | None:
    """How many digits before the point a number may need; None for what is not exact."""
    if isinstance(kind, DecimalType):
        return int(kind.precision - kind.scale)
    return _WHOLE_DIGITS.get(type(kind))


def joined_shapes(
    one: Mapping[str, TableShape], other: Mapping[str, TableShape]
) -> dict[str, TableShape]:
    """The shapes of tables that rows were seen of in two places."""
    joined = dict(one)
    for table, shape in other.items():
        known = joined.get(table)
        joined[table] = _joined_shape(known, shape) if known else shape
    return joined


def _joined_shape(one: TableShape, other: TableShape) -> TableShape:
    columns = joined_columns(one.columns, other.columns)
    return TableShape(columns=columns, key=one.key or other.key)


def joined_columns(one: Sequence[Column], other: Sequence[Column]) -> list[Column]:
    """Columns that values were seen of in two places, each of a type for all of them."""
    columns = {column.name: column for column in one}
    for column in other:
        known = columns.setdefault(column.name, column)
        if known is column:
            continue
        columns[column.name] = Column(
            name=column.name,
            type=united(known.type, column.type),
            required=known.required and column.required,
            absent=known.absent and column.absent,
        )
    return list(columns.values())


def _rejected(table: str, path: str, have: IcebergType, want: IcebergType) -> SchemaRejected:
    return SchemaRejected(
        f"column {path} of table {table} cannot become {want}",
        detail=f"The table has it as {have}, and not every value of the source fits into that.",
        hint="Rename the table's column so that a new one is added beside it, or change the "
        "source's column back; a table's column of type string takes any value.",
    )


def source_schema(
    schema: Schema, mapping: str | None, known: Mapping[str, IcebergType] = {}
) -> Schema:
    """The table's schema under the names that its columns have at the source.

    A field is called what Iceberg's name mapping calls it; of several names the last one in `known`
    is taken. A field is left out if its name now belongs to another field.
    """
    names = _mapped_names(json.loads(mapping)) if mapping else {}
    if not names:
        return schema
    fields = _source_fields(schema.fields, names, known)
    kept = {field.field_id for field in fields}
    identifiers = [number for number in schema.identifier_field_ids if number in kept]
    return Schema(*fields, schema_id=schema.schema_id, identifier_field_ids=identifiers)


def table_names(schema: Schema, mapping: str | None, names: Sequence[str]) -> dict[str, str]:
    """Maps the source's names to the table's; a name that the table lacks is left out."""
    own = {field.field_id: field.name for field in schema.fields}
    seen = source_schema(schema, mapping, dict.fromkeys(names, StringType()))
    return {field.name: own[field.field_id] for field in seen.fields if field.name in names}


def refuse_doubles(
    schema: Schema, mapping: str | None, columns: Sequence[Column], table: str
) -> None:
    """Raise `SchemaRejected` when two columns of the source go into one column of the table."""
    names = _mapped_names(json.loads(mapping)) if mapping else {}
    there = {column.name for column in columns if not column.absent}
    for field in schema.fields:
        both = sorted(there.intersection([*names.get(field.field_id, ()), field.name]))
        if len(both) > 1 and names:
            raise doubled(table, field.name, both)


def doubled(table: str, column: str, names: Sequence[str]) -> SchemaRejected:
    """The error for columns of the source that Iceberg's name mapping leads to the same place."""
    return SchemaRejected(
        f"columns {' and '.join(names)} of the source both go into column {column} of {table}",
        detail=f"The table's property {NAME_MAPPING} gives it both names.",
        hint="Take one of the names out of the mapping.",
    )


def _mapped_names(mapping: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for entry in mapping:
        if "field-id" in entry:
            found[entry["field-id"]] = list(entry.get("names", ()))
        found.update(_mapped_names(entry.get("fields", ())))
    return found


def _source_fields(
    fields: Sequence[NestedField], names: dict[int, list[str]], known: Mapping[str, IcebergType]
) -> list[NestedField]:
    taken = {name for field in fields for name in names.get(field.field_id, ())}
    order = {name: place for place, name in enumerate(known)}
    found = []
    for field in fields:
        aliases = list(names.get(field.field_id, ()))
        if field.name not in taken:
            aliases.append(field.name)
        if aliases:
            # A name other than the table's own is there for a source that still uses it.
            usual = next((name for name in aliases if name != field.name), aliases[0])
            name = max(aliases, key=lambda alias: order.get(alias, -1))
            name = name if name in known else usual
            found.append(_named(field, name, names, known.get(name)))
    return found


def _named(
    field: NestedField, name: str, names: dict[int, list[str]], known: IcebergType | None
) -> NestedField:
    kind = _source_type(field.field_type, names, known)
    return NestedField(
        field_id=field.field_id, name=name, field_type=kind, required=field.required, doc=field.doc
    )


def _source_type(
    kind: IcebergType, names: dict[int, list[str]], known: IcebergType | None
) -> IcebergType:
    if isinstance(kind, StructType):
        inner = known.fields if isinstance(known, StructType) else ()
        fields = {field.name: field.field_type for field in inner}
        return StructType(*_source_fields(kind.fields, names, fields))
    if isinstance(kind, ListType):
        element = known.element_type if isinstance(known, ListType) else None
        return ListType(
            element_id=kind.element_id,
            element_type=_source_type(kind.element_type, names, element),
            element_required=kind.element_required,
        )
    if isinstance(kind, MapType):
        key, value = _key_and_value(known)
        return MapType(
            key_id=kind.key_id,
            key_type=_source_type(kind.key_type, names, key),
            value_id=kind.value_id,
            value_type=_source_type(kind.value_type, names, value),
            value_required=kind.value_required,
        )
    return kind


def _key_and_value(kind: IcebergType | None) -> tuple[IcebergType | None, IcebergType | None]:
    return (kind.key_type, kind.value_type) if isinstance(kind, MapType) else (None, None)


def renamed_type(arrow: pa.DataType, have: IcebergType, want: IcebergType) -> pa.DataType:
    """An Arrow type whose fields, known by their names in `have`, are called as in `want`.

    The two types are the same fields under other names; what `have` does not know stays.
    """
    if pa.types.is_struct(arrow) and isinstance(have, StructType) and isinstance(want, StructType):
        return pa.struct([_renamed_field(field, have, want) for field in arrow])
    if isinstance(have, ListType) and isinstance(want, ListType):
        inner = renamed_type(arrow.value_type, have.element_type, want.element_type)
        element = arrow.value_field.with_type(inner)
        return pa.large_list(element) if pa.types.is_large_list(arrow) else pa.list_(element)
    if pa.types.is_map(arrow) and isinstance(have, MapType) and isinstance(want, MapType):
        key = renamed_type(arrow.key_type, have.key_type, want.key_type)
        item = renamed_type(arrow.item_type, have.value_type, want.value_type)
        return pa.map_(arrow.key_field.with_type(key), arrow.item_field.with_type(item))
    return arrow


def _renamed_field(field: pa.Field, have: StructType, want: StructType) -> pa.Field:
    ids = {each.name: each for each in have.fields}
    targets = {each.field_id: each for each in want.fields}
    known = ids.get(field.name)
    if known is None or known.field_id not in targets:
        return field
    target = targets[known.field_id]
    inner = renamed_type(field.type, known.field_type, target.field_type)
    return field.with_name(target.name).with_type(inner)


def arrow_schema(schema: Schema) -> pa.Schema:
    """The Arrow schema that the table's columns are written with, field ids included."""
    return schema_to_pyarrow(schema)


def infer_number(text: pa.Array) -> IcebergType:
    """A type that holds these JSON numbers exactly; a guess that later values may refuse.

    Whole numbers are long. A trailing zero after the point (`1.50`) is what a decimal with a fixed
    scale prints and a float never does, so it means decimal; other fractions are double.
    """
    fractional = pc.match_substring_regex(text, r"[.eE]")
    if not pc.any(fractional, min_count=0).as_py():
        longest = pc.max(pc.utf8_length(pc.utf8_ltrim(text, "-"))).as_py() or 0
        return LongType() if longest <= 18 or _fits_long(text) else DecimalType(38, 0)
    if pc.any(pc.match_substring_regex(text, r"\.\d*0$"), min_count=0).as_py():
        fraction = pc.extract_regex(text, r"\.(?P<fraction>\d+)$")
        scale = pc.max(pc.utf8_length(pc.struct_field(fraction, 0))).as_py()
        return DecimalType(38, scale)
    return DoubleType()


def _fits_long(text: pa.Array) -> bool:
    try:
        pc.cast(text, pa.int64())
        return True
    except pa.ArrowInvalid:
        return False


def cast_text(text: pa.Array, column: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    """Text of one column as the table's type; raises `SchemaRejected` when a value does not fit."""
    try:
        return _cast(text, kind, arrow_type)
    except (pa.ArrowInvalid, ValueError, InvalidOperation) as error:
        raise SchemaRejected(
            f"a value of column {column} does not fit its type {kind}",
            # Arrow quotes the value it fails on; rows are nobody's business in a log.
            detail=f"{_failing_rows(text, kind, arrow_type)} of {len(text)} values do not fit.",
            hint=f"Declare the column's type with `columns: {{{column}: ...}}` before the table is "
            "created, or change the table's column to a type that holds the source's values.",
        ) from error


def _failing_rows(text: pa.Array, kind: IcebergType, arrow_type: pa.DataType) -> int:
    """How many values fail, found by halving, at most the first thousand."""
    failing, pending = 0, [text]
    while pending and failing < 1000:
        part = pending.pop()
        try:
            _cast(part, kind, arrow_type)
        except (pa.ArrowInvalid, ValueError, InvalidOperation):
            if len(part) == 1:
                failing += 1
            else:
                half = len(part) // 2
                pending += [part[half:], part[:half]]
    return failing


def _cast(text: pa.Array, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    if isinstance(kind, ListType | MapType | StructType):
        return _nested(text, kind, arrow_type)
    special: dict[type, Callable[[pa.Array, pa.DataType], pa.Array]] = {
        StringType: lambda values, to: values.cast(to),
        FloatType: _exact_floats,
        DoubleType: _exact_floats,
        TimeType: lambda values, to: _times(values),
        UUIDType: lambda values, to: _uuids(values, to),
        BinaryType: lambda values, to: _bytes(values).cast(to),
        FixedType: lambda values, to: _bytes(values).cast(to),
    }
    convert = special.get(type(kind))
    return convert(text, arrow_type) if convert else pc.cast(text, arrow_type)


def _exact_floats(text: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    values = pc.cast(text, arrow_type)
    shown = pc.cast(values, pa.string())
    long = pc.greater(pc.utf8_length(text), _DIGITS_EXACT[arrow_type])
    # An exponent leads out of the range that the type has digits for, however short the text is.
    doubtful = pc.or_(long, pc.match_substring_regex(text, "[eE]"))
    differs = pc.and_(doubtful, pc.not_equal(shown, text))
    # The same number has several spellings; only what is spelled otherwise is compared by value.
    for original, shortest in zip(
        text.filter(differs).to_pylist(), shown.filter(differs).to_pylist(), strict=True
    ):
        if Decimal(original).is_finite() and Decimal(original) != Decimal(shortest):
            raise ValueError("a number has more digits than its type keeps")
    return values


def _times(text: pa.Array) -> pa.Array:
    midnight = pa.scalar("1970-01-01T")
    joined = pc.binary_join_element_wise(midnight, text, pa.scalar(""))
    return pc.cast(pc.cast(joined, pa.timestamp("us")), pa.time64("us"))


def _uuids(text: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    digits = pc.replace_substring(text, "-", "")
    lengths = pc.utf8_length(digits)
    if not pc.all(pc.equal(lengths, 32), min_count=0).as_py():
        raise ValueError("a uuid has another length")
    storage = _from_hex(digits).cast(pa.binary(16))
    if isinstance(arrow_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow_type, storage)
    return storage


def _bytes(text: pa.Array) -> pa.Array:
    if not pc.all(pc.starts_with(text, "\\x"), min_count=0).as_py():
        raise ValueError("a binary value does not start with \\x")
    return _from_hex(pc.utf8_slice_codeunits(text, 2))


def _from_hex(digits: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.utf8_length(digits), 0).to_numpy(zero_copy_only=False)
    if (lengths % 2).any():
        raise ValueError("an odd number of hexadecimal digits")
    whole = "".join(pc.fill_null(digits, "").to_pylist())
    content = bytes.fromhex(whole)
    if 2 * len(content) != len(whole):
        raise ValueError("blanks between hexadecimal digits")
    offsets = np.zeros(len(digits) + 1, dtype=np.int32)
    np.cumsum(lengths // 2, out=offsets[1:])
    mask = pc.is_null(digits)
    values = pa.Array.from_buffers(
        pa.binary(), len(digits), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )
    return pc.if_else(mask, pa.scalar(None, pa.binary()), values)


def _nested(text: pa.Array, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    """JSON text of lists, maps and structs."""
    if not _read_by_arrow(kind):
        return _assembled([_loads(each) for each in text.to_pylist()], kind, arrow_type)
    if len(text) == 0:
        return pa.array([], arrow_type)
    lines = pc.binary_join_element_wise(
        pa.scalar('{"v":'), pc.fill_null(text, "null"), pa.scalar("}\n"), pa.scalar("")
    )
    content = "".join(lines.to_pylist()).encode()
    plain = _small(arrow_type)
    parsed = pajson.read_json(
        pa.py_buffer(content),
        read_options=pajson.ReadOptions(block_size=max(len(content), 1)),
        parse_options=pajson.ParseOptions(
            explicit_schema=pa.schema([("v", plain)]), unexpected_field_behavior="error"
        ),
    )
    return parsed.column("v").combine_chunks().cast(arrow_type)


def _read_by_arrow(kind: IcebergType) -> bool:
    if isinstance(kind, ListType):
        return _read_by_arrow(kind.element_type)
    if isinstance(kind, StructType):
        return all(_read_by_arrow(field.field_type) for field in kind.fields)
    return isinstance(kind, _READ_BY_ARROW)


def _loads(text: str | None) -> Any:
    """A JSON value whose numbers are the digits as they were written."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return dict(pairs)

    if text is None:
        return None
    return json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=distinct)


def _assembled(values: Sequence[Any], kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    """A column put together from its leaves, each of which is cast as a column of its own."""
    if isinstance(kind, StructType):
        return _assembled_structs(values, kind, arrow_type)
    if isinstance(kind, ListType | MapType):
        return _assembled_lists(values, kind, arrow_type)
    _refuse_unless(all(value is None or isinstance(value, str | bool) for value in values))
    texts = [str(value).lower() if isinstance(value, bool) else value for value in values]
    return _cast(pa.array(texts, pa.string()), kind, arrow_type)


def _assembled_structs(
    values: Sequence[Any], kind: StructType, arrow_type: pa.DataType
) -> pa.Array:
    names = {field.name for field in kind.fields}
    _refuse_unless(all(v is None or (isinstance(v, dict) and v.keys() <= names) for v in values))
    columns = [
        _assembled(
            [None if value is None else value.get(field.name) for value in values],
            field.field_type,
            arrow_type.field(field.name).type,
        )
        for field in kind.fields
    ]
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(arrow_type), mask=missing)


def _assembled_lists(
    values: Sequence[Any], kind: ListType | MapType, arrow_type: pa.DataType
) -> pa.Array:
    wanted = list if isinstance(kind, ListType) else dict
    _refuse_unless(all(value is None or isinstance(value, wanted) for value in values))
    missing = pa.array([value is None for value in values], pa.bool_())
    offsets = np.cumsum([0, *(len(value or ()) for value in values)])
    flat = [item for value in values for item in value or ()]
    if isinstance(kind, ListType):
        items = _assembled(flat, kind.element_type, arrow_type.value_type)
        array = pa.LargeListArray if pa.types.is_large_list(arrow_type) else pa.ListArray
        return array.from_arrays(offsets, items, type=arrow_type, mask=missing)
    keys = _assembled(flat, kind.key_type, arrow_type.key_type)
    under = [item for value in values for item in (value or {}).values()]
    items = _assembled(under, kind.value_type, arrow_type.item_type)
    return pa.MapArray.from_arrays(offsets, keys, items, type=arrow_type, mask=missing)


def _refuse_unless(fits: bool) -> None:
    if not fits:
        raise ValueError("a value has another shape than its type")


def _small(kind: pa.DataType) -> pa.DataType:
    """What Arrow's JSON reader is asked for: it knows neither large nor extension types.

    Timestamps are read as text: it would shift those with a zone and give a zone to others, where
    the cast refuses them.
    """
    if pa.types.is_large_string(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(pa.field("element", _small(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _small(field.type)) for field in kind])
    return kind


def schema_from_json(text: str) -> Schema:
    """The schema as Iceberg's library prints it."""
    return Schema.model_validate(json.loads(text))
