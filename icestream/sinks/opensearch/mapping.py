"""What an index must know of a table's columns, so that OpenSearch does not guess it from values.

A guess makes doubles floats and timestamps plain text. Only what an index lacks is added; what is
mapped there already stays as its owner wants it. The type of a field can never be changed, so a
column that may be widened later, int to long or float to double, has the wide type from the start.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UnknownType,
    UUIDType,
)

from icestream.errors import SchemaRejected
from icestream.schema import Column

_DATE = {"type": "date", "format": "strict_date_optional_time"}
_LEAVES: dict[type, dict[str, Any]] = {
    BooleanType: {"type": "boolean"},
    IntegerType: {"type": "long"},
    LongType: {"type": "long"},
    # JSON has no NaN and no infinity: they come as text, which stays in the source unindexed.
    FloatType: {"type": "double", "ignore_malformed": True},
    DoubleType: {"type": "double", "ignore_malformed": True},
    # OpenSearch has no exact decimal.
    DecimalType: {"type": "keyword"},
    DateType: _DATE,
    TimestampType: _DATE,
    TimestamptzType: _DATE,
    TimestampNanoType: _DATE,
    TimestamptzNanoType: _DATE,
    TimeType: {"type": "keyword"},
    StringType: {
        "type": "text",
        "fields": {"keyword": {"type": "keyword", "ignore_above": 256}},
    },
    UUIDType: {"type": "keyword"},
    BinaryType: {"type": "binary"},
    FixedType: {"type": "binary"},
    UnknownType: {"type": "keyword"},
}
# Values of these hold no fields.
_SCALARS = {leaf["type"] for leaf in _LEAVES.values()}
# Types of an index that do not hold every value of a column.
_TOO_NARROW: dict[type, set[str]] = {
    IntegerType: {"byte", "short"},
    LongType: {"byte", "short", "integer"},
    FloatType: {"half_float"},
    DoubleType: {"half_float", "float"},
}


def field_mapping(kind: IcebergType) -> dict[str, Any]:
    """How OpenSearch is to hold values of an Iceberg type."""
    if isinstance(kind, ListType):
        return field_mapping(kind.element_type)
    if isinstance(kind, StructType):
        return {"properties": {f.name: field_mapping(f.field_type) for f in kind.fields}}
    if isinstance(kind, MapType):
        return {"type": "object"}
    # Of a type that is not known anything may come: it is kept and not indexed.
    return dict(_LEAVES.get(type(kind), {"type": "object", "enabled": False}))


def properties(columns: Sequence[Column]) -> dict[str, Any]:
    """The mapping of a table's columns; a dot in a name makes an object, as OpenSearch does it."""
    found: dict[str, Any] = {}
    for column in columns:
        if column.absent:
            continue
        *path, name = column.name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {}).setdefault("properties", {})
        place[name] = field_mapping(column.type)
    return found


def missing(
    wanted: Mapping[str, Any], present: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """What of the wanted properties an index lacks; raises `SchemaRejected` where both collide.

    Another type of a single value is its owner's choice. An object is none where a value comes.
    """
    lacking = {}
    for name, field in wanted.items():
        here = present.get(name)
        if here is None:
            lacking[name] = field
            continue
        inner, held = "properties" in field, "properties" in here
        if (inner and here.get("type") in _SCALARS) or (held and field.get("type") in _SCALARS):
            raise SchemaRejected(
                f"field {path}{name} is {'an object' if inner else 'a value'} in the table and "
                f"{'a value' if inner else 'an object'} in the index",
                hint="Let the table go to an index of another name, or correct the mapping.",
            )
        if inner and held:
            below = missing(field["properties"], here["properties"], f"{path}{name}.")
            if below:
                lacking[name] = {"properties": below}
    return lacking


def narrower(columns: Sequence[Column], present: Mapping[str, Any]) -> list[str]:
    """The fields of an index whose types do not hold every value of the table's columns."""
    fields = [(column.name, column.type) for column in columns if not column.absent]
    return [path for name, kind in fields for path in _narrower(kind, present, name)]


def _narrower(kind: IcebergType, present: Mapping[str, Any], path: str) -> list[str]:
    if isinstance(kind, ListType):
        return _narrower(kind.element_type, present, path)
    if isinstance(kind, StructType):
        inner = [(field.field_type, f"{path}.{field.name}") for field in kind.fields]
        return [found for each, below in inner for found in _narrower(each, present, below)]
    here: Mapping[str, Any] = {"properties": present}
    for part in path.split("."):
        here = here.get("properties", {}).get(part, {})
    return [path] if here.get("type") in _TOO_NARROW.get(type(kind), ()) else []
