"""Kafka Connect's schemas as its JSON converter writes them, and what values under them mean.

A schema has a kind and, for some, the name of a logical type: Connect's own or Debezium's. Values
come out exactly or are refused (`ValueError`, `pa.ArrowInvalid`):

- a decimal of more than 38 digits, and one whose scale differs from row to row, is text;
- a time outside of a day, as MySQL has, fits no Iceberg type: such a column must be `long`;
- nanoseconds become microseconds where nothing is lost, and are refused otherwise. A column that is
  `timestamp_ns` or `long` takes them all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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

from icestream.formats.binary_texts import (
    decimal_texts,
    decimals,
    decoded_bytes,
)
from icestream.formats.json_cells import Cells, Kind, members
from icestream.kernels.decimals import DECIMAL_DIGITS_MAX
from icestream.schema import cast_text

DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE_SCALE_DECIMAL = "io.debezium.data.VariableScaleDecimal"
_DAY_MICROSECONDS = 86_400_000_000
_FIELDS_MAX = 10_000

_PLAIN: dict[str, IcebergType] = {
    "int8": IntegerType(),
    "int16": IntegerType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "float": FloatType(),
    "float32": FloatType(),
    "double": DoubleType(),
    "float64": DoubleType(),
    "boolean": BooleanType(),
    "string": StringType(),
    "bytes": BinaryType(),
}
_KINDS: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), (Kind.NUMBER,)),
    # What is not a number (NaN) and the infinities come as strings.
    **dict.fromkeys(("float", "float32", "double", "float64"), (Kind.NUMBER, Kind.STRING)),
    "boolean": (Kind.TRUE, Kind.FALSE),
    "string": (Kind.STRING,),
    "bytes": (Kind.STRING,),
    "struct": (Kind.OBJECT,),
    "array": (Kind.ARRAY,),
    "map": (Kind.OBJECT, Kind.ARRAY),
}
_FLOATS = ("float", "float32", "double", "float64")


@dataclass(frozen=True, slots=True)
class _Clock:
    """A number that counts days or parts of a second since midnight or since 1970."""

    type: IcebergType
    unit: str
    kind: str


_CLOCKS = {
    "org.apache.kafka.connect.data.Date": _Clock(DateType(), "d", "int32"),
    "org.apache.kafka.connect.data.Time": _Clock(TimeType(), "ms", "int32"),
    # Connect's own is a point in time; Debezium's are what a clock on the wall shows.
    "org.apache.kafka.connect.data.Timestamp": _Clock(TimestamptzType(), "ms", "int64"),
    "io.debezium.time.Date": _Clock(DateType(), "d", "int32"),
    "io.debezium.time.Time": _Clock(TimeType(), "ms", "int32"),
    "io.debezium.time.MicroTime": _Clock(TimeType(), "us", "int64"),
    "io.debezium.time.NanoTime": _Clock(TimeType(), "ns", "int64"),
    "io.debezium.time.Timestamp": _Clock(TimestampType(), "ms", "int64"),
    "io.debezium.time.MicroTimestamp": _Clock(TimestampType(), "us", "int64"),
    "io.debezium.time.NanoTimestamp": _Clock(TimestampType(), "ns", "int64"),
}
# Strings that are more than that. A time with a zone has no Iceberg type and stays text.
_STRINGS: dict[str, IcebergType] = {
    "io.debezium.time.ZonedTimestamp": TimestamptzType(),
    "io.debezium.time.IsoDate": DateType(),
    "io.debezium.time.IsoTime": TimeType(),
    "io.debezium.time.IsoTimestamp": TimestampType(),
    "io.debezium.data.Uuid": UUIDType(),
}
# These end in a Z that says nothing: their values have no zone.
_WITHOUT_ZONE = (
    "io.debezium.time.IsoDate",
    "io.debezium.time.IsoTime",
    "io.debezium.time.IsoTimestamp",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectSchema:
    """What matters of a schema: two that mean the same for values are equal.

    `name` is empty unless it is that of a logical type which changes what values mean.
    """

    kind: str
    name: str = ""
    scale: int = 0
    precision: int = DECIMAL_DIGITS_MAX
    fields: tuple[tuple[str, "ConnectSchema"], ...] = ()
    keys: "ConnectSchema | None" = None
    items: "ConnectSchema | None" = None

    def field(self, name: str) -> "ConnectSchema | None":
        """The schema of a struct's member; None when it has none of that name."""
        return dict(self.fields).get(name)

    @property
    def nested(self) -> bool:
        """Whether values have parts that Iceberg has a place for each."""
        return self.kind in ("struct", "array", "map") and self.name != VARIABLE_SCALE_DECIMAL


def parse_schema(document: Any) -> ConnectSchema:
    """The schema in a record's `schema`; ValueError when it is none that Connect writes."""
    if not isinstance(document, Mapping) or document.get("type") not in _KINDS:
        raise ValueError("not a schema of Kafka Connect")
    kind = str(document["type"])
    name = _logical_name(kind, str(document.get("name") or ""))
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError("a schema's parameters are no object")
    return ConnectSchema(
        kind=kind,
        name=name,
        scale=int(parameters.get("scale", 0)) if name == DECIMAL else 0,
        precision=int(parameters.get("connect.decimal.precision", DECIMAL_DIGITS_MAX)),
        fields=tuple(_parse_fields(document)) if kind == "struct" else (),
        keys=parse_schema(document.get("keys")) if kind == "map" else None,
        items=_parse_items(document, kind),
    )


def _parse_fields(document: Mapping[str, Any]) -> Iterator[tuple[str, ConnectSchema]]:
    fields = document.get("fields") or []
    if not isinstance(fields, list) or len(fields) > _FIELDS_MAX:
        raise ValueError("a struct has no list of fields")
    for field in fields:
        schema = parse_schema(field)
        yield str(field["field"] if "field" in field else ""), schema


def _parse_items(document: Mapping[str, Any], kind: str) -> ConnectSchema | None:
    if kind == "array":
        return parse_schema(document.get("items"))
    return parse_schema(document.get("values")) if kind == "map" else None


def _logical_name(kind: str, name: str) -> str:
    """The name, if values of this kind mean something else under it."""
    known = (
        (name in _CLOCKS and _CLOCKS[name].kind == kind)
        or (name in _STRINGS and kind == "string")
        or (name == DECIMAL and kind == "bytes")
        or (name == VARIABLE_SCALE_DECIMAL and kind == "struct")
    )
    return name if known else ""


def iceberg_type(schema: ConnectSchema, ids: Iterator[int]) -> IcebergType:
    """The type of a column for values of that schema; inner fields are numbered by `ids`."""
    if schema.name in _CLOCKS:
        return _CLOCKS[schema.name].type
    if schema.name in _STRINGS:
        return _STRINGS[schema.name]
    if schema.name == DECIMAL:
        return _decimal_type(schema)
    if schema.name == VARIABLE_SCALE_DECIMAL:
        return StringType()
    if schema.kind == "struct":
        return _struct_type(schema, ids)
    if schema.kind in ("array", "map") and schema.items is not None:
        number, other = next(ids), next(ids)
        inner = iceberg_type(schema.items, ids)
        if schema.keys is None:
            return ListType(element_id=number, element_type=inner, element_required=False)
        return MapType(
            key_id=number,
            key_type=iceberg_type(schema.keys, ids),
            value_id=other,
            value_type=inner,
            value_required=False,
        )
    return _PLAIN[schema.kind]


def _decimal_type(schema: ConnectSchema) -> IcebergType:
    scale = max(schema.scale, 0)
    # A negative scale means zeros before the point, which take digits as well.
    precision = schema.precision - min(schema.scale, 0)
    if max(scale, 1) <= precision <= DECIMAL_DIGITS_MAX:
        return DecimalType(precision, scale)
    return StringType()


def _struct_type(schema: ConnectSchema, ids: Iterator[int]) -> IcebergType:
    fields = [
        NestedField(
            field_id=next(ids), name=name, field_type=iceberg_type(inner, ids), required=False
        )
        for name, inner in schema.fields
    ]
    # Iceberg has no struct without fields.
    return StructType(*fields) if fields else StringType()


def convert(
    cells: Cells, schema: ConnectSchema, name: str, kind: IcebergType, arrow_type: pa.DataType
) -> pa.Array:
    """Values without parts, as their schema means them, in the type of a table's column."""
    _refuse_others(cells, schema)
    if schema.name == VARIABLE_SCALE_DECIMAL:
        return cast_text(_variable_decimals(cells), name, kind, arrow_type)
    if schema.name == DECIMAL:
        return _cast_decimals(cells, schema, name, kind, arrow_type)
    if schema.name in _CLOCKS:
        return _clocks(cells, _CLOCKS[schema.name], kind, arrow_type)
    text = cells.text()
    if schema.name in _WITHOUT_ZONE and not isinstance(kind, StringType):
        text = pc.utf8_rtrim(text, "Z")
    if schema.kind in _FLOATS and isinstance(kind, FloatType | DoubleType):
        # They were floats before they were text, so whatever the digits are, they lead back.
        return pc.cast(text, arrow_type)
    if schema.kind == "bytes" and isinstance(kind, BinaryType | FixedType):
        return decoded_bytes(text).cast(arrow_type)
    return cast_text(text, name, kind, arrow_type)


def _refuse_others(cells: Cells, schema: ConnectSchema) -> None:
    wanted = _KINDS[schema.kind]
    if schema.name == DECIMAL:
        # Connect's converter writes numbers when it is told `decimal.format=NUMERIC`.
        wanted = (Kind.STRING, Kind.NUMBER)
    if not np.isin(cells.kinds, (Kind.MISSING, Kind.NULL, *wanted)).all():
        raise ValueError("a value is of another kind than its schema says")


def _cast_decimals(
    cells: Cells, schema: ConnectSchema, name: str, kind: IcebergType, arrow_type: pa.DataType
) -> pa.Array:
    if (cells.kinds == Kind.NUMBER).any():
        if (cells.kinds == Kind.STRING).any():
            raise ValueError("some decimals are numbers and others are bytes")
        return cast_text(cells.text(), name, kind, arrow_type)
    unscaled = decoded_bytes(cells.text())
    if isinstance(kind, DecimalType) and 0 <= schema.scale <= DECIMAL_DIGITS_MAX:
        return decimals(unscaled, schema.scale).cast(arrow_type)
    scales = np.full(len(cells), schema.scale, dtype=np.int32)
    return cast_text(decimal_texts(unscaled, scales), name, kind, arrow_type)


def _variable_decimals(cells: Cells) -> pa.StringArray:
    """Numbers that have their scale with them, in plain notation."""
    parts = members(cells)
    if not {"scale", "value"} <= parts.keys():
        if (cells.kinds == Kind.OBJECT).any():
            raise ValueError("a decimal lacks its scale or its value")
        return pa.nulls(len(cells), pa.string())
    scale, value = parts["scale"].only(Kind.NUMBER), parts["value"].only(Kind.STRING)
    here = cells.kinds == Kind.OBJECT
    if np.any(here & ((scale.kinds == Kind.MISSING) | (value.kinds == Kind.MISSING))):
        raise ValueError("a decimal lacks its scale or its value")
    scales = pc.fill_null(pc.cast(scale.text(), pa.int32()), 0).to_numpy(zero_copy_only=False)
    return decimal_texts(decoded_bytes(value.text()), np.ascontiguousarray(scales))


def _clocks(cells: Cells, clock: _Clock, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    numbers = pc.cast(cells.text(), pa.int64())
    if isinstance(kind, IntegerType | LongType):
        return numbers.cast(arrow_type)
    if isinstance(clock.type, DateType):
        days = numbers.cast(pa.int32()).cast(pa.date32())
        return days.cast(arrow_type)
    if isinstance(clock.type, TimeType):
        return _times(numbers, clock.unit).cast(arrow_type)
    zone = "UTC" if isinstance(clock.type, TimestamptzType) else None
    zoned = (TimestampType, TimestamptzType, TimestampNanoType, TimestamptzNanoType)
    if isinstance(kind, zoned):
        zone = arrow_type.tz
    return numbers.cast(pa.timestamp(clock.unit, tz=zone)).cast(arrow_type)


def _times(numbers: pa.Array, unit: str) -> pa.Array:
    if unit == "ms":
        numbers = pc.multiply_checked(numbers, 1000)
    if unit == "ns":
        micros = pc.divide(numbers, 1000)
        if not pc.all(pc.equal(pc.multiply(micros, 1000), numbers), min_count=0).as_py():
            raise ValueError("a time has nanoseconds")
        numbers = micros
    inside = pc.and_(
        pc.greater_equal(numbers, 0), pc.less(numbers, pa.scalar(_DAY_MICROSECONDS, pa.int64()))
    )
    if not pc.all(inside, min_count=0).as_py():
        raise ValueError("a time is not one of a day")
    return numbers.cast(pa.time64("us"))
