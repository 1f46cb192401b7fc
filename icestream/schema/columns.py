"""Columns of source tables, their names, and the Iceberg schema that is made from them.

Readers of Iceberg do not mind the case of letters, and join a column to its fields by dots: names
that they would take for one another are refused, as are those that they give themselves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import (
    DoubleType,
    FloatType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    StructType,
    UnknownType,
)

from icestream.errors import SchemaRejected

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


def refuse_unknown(table: str, columns: Iterable[Column]) -> None:
    """Raise `SchemaRejected` for a column whose values may have any shape, such as a variant."""
    for column in columns:
        if _unknown(column.type):
            raise SchemaRejected(
                f"column {column.name} of table {table} has a type that icestream does not know",
                detail="Its values may have any shape, and a column of a table has one.",
                hint="Give the table a `transform` that names the columns it wants and leaves the "
                "column out.",
            )


def _unknown(kind: IcebergType) -> bool:
    if isinstance(kind, StructType):
        return any(_unknown(field.field_type) for field in kind.fields)
    if isinstance(kind, ListType):
        return _unknown(kind.element_type)
    if isinstance(kind, MapType):
        return _unknown(kind.key_type) or _unknown(kind.value_type)
    return isinstance(kind, UnknownType)


class SchemaGap(Exception):
    """The table does not take these columns yet; the coordinator evolves it and reads again."""

    def __init__(self, table: str, columns: Sequence[Column]):
        super().__init__(f"table {table} lacks {', '.join(column.name for column in columns)}")
        self.table = table
        self.columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        return SchemaGap, (self.table, self.columns)


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
    for field in fields_inside(kind):
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
    if "\0" in column.name:
        # Columns of the engine's own begin with one: see `icestream.change`.
        return f"no column may be called {column.name!r}: its name has a zero byte"
    if column.name.lower() not in _RESERVED_NAMES:
        return None
    return f"no column may be called {column.name}: readers of Iceberg give that name themselves"


def refuse_reserved(table: str, column: Column) -> None:
    """Raise `SchemaRejected` for a column that readers of Iceberg would not tell from their own."""
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
        refuse_reserved(table, column)
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


def fields_inside(kind: IcebergType) -> list[NestedField]:
    """The fields of a struct, the element of a list, the key and value of a map."""
    if isinstance(kind, ListType):
        return [kind.element_field]
    if isinstance(kind, MapType):
        return [kind.key_field, kind.value_field]
    return list(kind.fields) if isinstance(kind, StructType) else []
