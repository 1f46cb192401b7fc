"""Values under Kafka Connect's schemas come out exactly, or are refused."""

import base64
import itertools
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
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
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import SchemaRejected
from icestream.formats.connect import iceberg_type, parse_schema
from icestream.formats.json_cells import values
from icestream.formats.json_fields import JsonField, with_schemas
from icestream.schema import Column, arrow_schema, column_schema

TIME = "io.debezium.time."
DATA = "io.debezium.data."
CONNECT = "org.apache.kafka.connect.data."


def encoded(number: int) -> str:
    size = number.bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def schema(kind: str, name: str = "", **parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": kind, "optional": True}
    if name:
        found |= {"name": name, "version": 1}
    if parameters:
        found["parameters"] = {key.replace("_", "."): str(v) for key, v in parameters.items()}
    return found


def wrapped(document: Any, *payloads: Any) -> JsonField:
    texts = [json.dumps({"schema": document, "payload": each}).encode() for each in payloads]
    field, rejected = with_schemas(values(pa.array(texts, pa.binary()))[0])
    assert rejected == {}
    return field


def plain(*payloads: Any) -> JsonField:
    texts = [json.dumps(each).encode() for each in payloads]
    cells, rejected = values(pa.array(texts, pa.binary()))
    assert rejected == {}
    return JsonField.untyped(cells)


def cast(field: JsonField, kind: IcebergType | None = None) -> list[Any]:
    kind = kind or field.type()
    assert kind is not None
    alone = column_schema(Column(name="x", type=kind))
    array = field.cast("x", alone.fields[0].field_type, arrow_schema(alone).field("x").type)
    array.validate(full=True)
    assert array.type == arrow_schema(alone).field("x").type
    return array.to_pylist()


POINT = {
    "type": "struct",
    "name": f"{DATA}geometry.Point",
    "fields": [
        schema("double") | {"field": "x"},
        schema("double") | {"field": "y"},
        schema("bytes") | {"field": "wkb"},
        schema("int32") | {"field": "srid"},
    ],
}
VARIABLE = {
    "type": "struct",
    "name": f"{DATA}VariableScaleDecimal",
    "fields": [schema("int32") | {"field": "scale"}, schema("bytes") | {"field": "value"}],
}
CASES = [
    (schema("int8"), -128, IntegerType(), -128),
    (schema("int16"), 32767, IntegerType(), 32767),
    (schema("int32"), -(2**31), IntegerType(), -(2**31)),
    (schema("int64"), 2**63 - 1, LongType(), 2**63 - 1),
    (schema("float"), 0.5, FloatType(), 0.5),
    (schema("double"), 1e-300, DoubleType(), 1e-300),
    (schema("double"), "Infinity", DoubleType(), float("inf")),
    (schema("boolean"), True, BooleanType(), True),
    (schema("string"), 'é"\n', StringType(), 'é"\n'),
    (schema("string"), "123", StringType(), "123"),
    (schema("bytes"), "AP8Q", BinaryType(), b"\x00\xff\x10"),
    (schema("bytes"), "", BinaryType(), b""),
    (schema("bytes", f"{DATA}Bits", length=12), "Bw8=", BinaryType(), b"\x07\x0f"),
    (
        schema("bytes", f"{CONNECT}Decimal", scale=2, connect_decimal_precision=10),
        encoded(-12345),
        DecimalType(10, 2),
        Decimal("-123.45"),
    ),
    (schema("bytes", f"{CONNECT}Decimal", scale=0), encoded(0), DecimalType(38, 0), Decimal(0)),
    (
        schema("bytes", f"{CONNECT}Decimal", scale=4),
        encoded(10**38 - 1),
        DecimalType(38, 4),
        Decimal("9" * 34 + ".9999"),
    ),
    (
        schema("bytes", f"{CONNECT}Decimal", scale=2, connect_decimal_precision=5),
        1.5,
        DecimalType(5, 2),
        Decimal("1.50"),
    ),
    (
        schema("bytes", f"{CONNECT}Decimal", scale=-2, connect_decimal_precision=5),
        encoded(12),
        DecimalType(7, 0),
        Decimal(1200),
    ),
    (
        schema("bytes", f"{CONNECT}Decimal", scale=30, connect_decimal_precision=65),
        encoded(10**64 + 1),
        StringType(),
        "1" + "0" * 34 + "." + "0" * 29 + "1",
    ),
    (VARIABLE, {"scale": 3, "value": encoded(-5)}, StringType(), "-0.005"),
    (VARIABLE, {"scale": -3, "value": encoded(7)}, StringType(), "7000"),
    (VARIABLE, {"scale": 0, "value": encoded(10**40)}, StringType(), "1" + "0" * 40),
    (schema("int32", f"{CONNECT}Date"), 19_000, DateType(), date(2022, 1, 8)),
    (schema("int32", f"{CONNECT}Time"), 3_723_004, TimeType(), time(1, 2, 3, 4000)),
    (
        schema("int64", f"{CONNECT}Timestamp"),
        1_529_507_596_945,
        TimestamptzType(),
        datetime(2018, 6, 20, 15, 13, 16, 945000, UTC),
    ),
    (schema("int32", f"{TIME}Date"), -1, DateType(), date(1969, 12, 31)),
    (schema("int32", f"{TIME}Time"), 0, TimeType(), time(0)),
    (schema("int64", f"{TIME}MicroTime"), 86_399_999_999, TimeType(), time(23, 59, 59, 999999)),
    (schema("int64", f"{TIME}NanoTime"), 1_000, TimeType(), time(0, 0, 0, 1)),
    (
        schema("int64", f"{TIME}Timestamp"),
        -1,
        TimestampType(),
        datetime(1969, 12, 31, 23, 59, 59, 999000),
    ),
    (
        schema("int64", f"{TIME}MicroTimestamp"),
        1_529_507_596_945_104,
        TimestampType(),
        datetime(2018, 6, 20, 15, 13, 16, 945104),
    ),
    (
        schema("int64", f"{TIME}NanoTimestamp"),
        1_529_507_596_945_104_000,
        TimestampType(),
        datetime(2018, 6, 20, 15, 13, 16, 945104),
    ),
    (
        schema("string", f"{TIME}ZonedTimestamp"),
        "2018-06-20T15:13:16.945104+02:00",
        TimestamptzType(),
        datetime(2018, 6, 20, 13, 13, 16, 945104, UTC),
    ),
    (
        schema("string", f"{TIME}ZonedTimestamp"),
        "2018-06-20T13:37:03Z",
        TimestamptzType(),
        datetime(2018, 6, 20, 13, 37, 3, 0, UTC),
    ),
    (schema("string", f"{TIME}ZonedTime"), "10:15:30+01:00", StringType(), "10:15:30+01:00"),
    (schema("string", f"{TIME}IsoDate"), "2017-09-15Z", DateType(), date(2017, 9, 15)),
    (schema("string", f"{TIME}IsoTime"), "12:05:11.5Z", TimeType(), time(12, 5, 11, 500000)),
    (
        schema("string", f"{TIME}IsoTimestamp"),
        "2016-06-20T15:00:00.123Z",
        TimestampType(),
        datetime(2016, 6, 20, 15, 0, 0, 123000),
    ),
    (schema("int32", f"{TIME}Year"), 2024, IntegerType(), 2024),
    (schema("string", f"{TIME}Interval"), "P1Y2M3DT4H5M6.78S", StringType(), "P1Y2M3DT4H5M6.78S"),
    (schema("int64", f"{TIME}MicroDuration"), 37091106000000, LongType(), 37091106000000),
    (schema("string", f"{DATA}Json"), '{"a": 1}', StringType(), '{"a": 1}'),
    (schema("string", f"{DATA}Xml"), "<a/>", StringType(), "<a/>"),
    (
        schema("string", f"{DATA}Uuid"),
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        UUIDType(),
        UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ),
    (schema("string", f"{DATA}Enum", allowed="a,b"), "b", StringType(), "b"),
    (schema("string", f"{DATA}EnumSet", allowed="a,b"), "a,b", StringType(), "a,b"),
]


def identity(case: Any) -> str:
    return f"{case[0].get('name', case[0]['type']).rsplit('.', 1)[-1]}={str(case[1])[:20]}"


@pytest.mark.parametrize("case", CASES, ids=map(identity, CASES))
def test_a_value_under_its_schema_is_exactly_what_the_schema_says(case):
    """K3: every kind and logical type, beside a null."""
    document, payload, kind, expected = case
    field = wrapped(document, payload, None)
    assert field.type() == kind
    assert cast(field) == [expected, None]


def test_a_column_of_nulls_has_the_type_of_its_schema():
    """K7: a table can be made before the first value has come."""
    assert wrapped(schema("int32", f"{TIME}Date"), None, None).text().to_pylist() == [None, None]
    document = {"type": "struct", "fields": [schema("int32", f"{TIME}Date") | {"field": "d"}]}
    part = wrapped(document, {"d": None}).members()["d"]
    assert part.type() == DateType()
    assert cast(part) == [None]


REFUSED = [
    (schema("int32"), "7"),
    (schema("int32"), 1.5),
    (schema("int32"), 2**31),
    (schema("boolean"), 1),
    (schema("string"), 7),
    (schema("bytes"), "AP8"),
    (schema("bytes"), "A*=="),
    (schema("bytes", f"{CONNECT}Decimal", scale=2, connect_decimal_precision=4), encoded(12345)),
    (schema("bytes", f"{CONNECT}Decimal", scale=0), encoded(10**38)),
    (schema("bytes", f"{CONNECT}Decimal", scale=0), ""),
    (VARIABLE, {"scale": 3}),
    (VARIABLE, {"scale": 10**9, "value": encoded(1)}),
    (schema("int32", f"{TIME}Time"), -1),
    (schema("int64", f"{TIME}MicroTime"), 86_400_000_000),
    (schema("int64", f"{TIME}NanoTime"), 1_001),
    (schema("int64", f"{TIME}NanoTimestamp"), 1_529_507_596_945_104_001),
    (schema("int64", f"{TIME}Timestamp"), 2**62),
    (schema("string", f"{TIME}ZonedTimestamp"), "2018-06-20T13:37:03.1234567Z"),
    (schema("string", f"{TIME}ZonedTimestamp"), "+292278994-08-17T07:12:55.807Z"),
    (schema("string", f"{DATA}Uuid"), "a0eebc99"),
    ({"type": "array", "items": schema("int32")}, {"a": 1}),
    ({"type": "array", "items": schema("int32")}, ["x"]),
]


@pytest.mark.parametrize("case", REFUSED, ids=map(identity, REFUSED))
def test_a_value_that_does_not_fit_its_schema_is_refused_and_never_rounded(case):
    """K8: the record goes to the dead letters; the error does not show the value."""
    document, payload = case
    with pytest.raises(SchemaRejected) as caught:
        cast(wrapped(document, payload))
    assert not payload or str(payload) not in str(caught.value)


def test_values_that_no_timestamp_holds_fit_a_column_of_longs_or_nanoseconds():
    """K3: what cannot be exact in microseconds has another way into a table."""
    nanos = wrapped(schema("int64", f"{TIME}NanoTimestamp"), 1_529_507_596_945_104_001)
    assert cast(nanos, LongType()) == [1_529_507_596_945_104_001]
    assert [int(each.value) for each in cast(nanos, TimestampNanoType())] == [
        1_529_507_596_945_104_001
    ]
    hours = wrapped(schema("int64", f"{TIME}MicroTime"), -3_020_399_000_000)
    assert cast(hours, LongType()) == [-3_020_399_000_000]


def test_any_value_fits_a_column_of_text():
    """K7: a table's column of type string takes what the schema makes of a value."""
    for document, payload, shown in [
        (schema("int32", f"{TIME}Date"), 19_000, "2022-01-08"),
        (schema("bytes", f"{CONNECT}Decimal", scale=2), encoded(-5), "-0.05"),
        (schema("bytes"), "AP8Q", "AP8Q"),
        ({"type": "array", "items": schema("int32")}, [1, 2], "[1, 2]"),
        (schema("boolean"), True, "true"),
    ]:
        assert cast(wrapped(document, payload, None), StringType()) == [shown, None]


def test_containers_hold_converted_values():
    """K3: decimals and dates inside of arrays, maps and structs are converted as well."""
    decimal = schema("bytes", f"{CONNECT}Decimal", scale=1, connect_decimal_precision=9)
    listed = wrapped({"type": "array", "items": decimal}, [encoded(15), None], [], None)
    assert isinstance(listed.type(), ListType)
    assert cast(listed) == [[Decimal("1.5"), None], [], None]
    named = {"type": "map", "keys": schema("string"), "values": schema("int32", f"{TIME}Date")}
    mapped = wrapped(named, {"a": 0, "b": None}, {}, None)
    assert isinstance(mapped.type(), MapType)
    assert cast(mapped) == [[("a", date(1970, 1, 1)), ("b", None)], [], None]
    paired = {"type": "map", "keys": schema("int32"), "values": schema("string")}
    assert cast(wrapped(paired, [[1, "x"], [2, None]], [], None)) == [
        [(1, "x"), (2, None)],
        [],
        None,
    ]
    point = wrapped(POINT, {"x": 1.5, "y": -2.0, "wkb": "AQ==", "srid": None}, None)
    assert isinstance(point.type(), StructType)
    assert cast(point) == [{"x": 1.5, "y": -2.0, "wkb": b"\x01", "srid": None}, None]


def test_a_schema_that_changes_keeps_rows_in_order_and_widens_the_type():
    """K7: records of a topic may come under several schemas, each parsed once."""
    one, two = schema("int32"), schema("int64")
    texts = [
        json.dumps({"schema": document, "payload": number}).encode()
        for number, document in enumerate([one, two, one, two, two, one])
    ]
    texts[3] = b'{"schema": null, "payload": 3}'
    field, _ = with_schemas(values(pa.array([*texts, None], pa.binary()))[0])
    assert len(field.schemas) == 3
    assert field.type() == LongType()
    assert cast(field) == [0, 1, 2, 3, 4, 5, None]
    assert cast(field.take(np.array([5, 1]))) == [5, 1]
    other = plain(*"abcdefg")
    mixed = field.where(np.array([True, False] * 3 + [False]), other)
    assert cast(mixed, StringType()) == ["0", "b", "2", "d", "4", "f", "g"]


@pytest.mark.parametrize(
    "document",
    [
        *(
            {},
            {"type": "int33"},
            {"type": "array"},
            {"type": []},
            {"type": "int32", "parameters": 5},
        ),
        *({"type": "struct", "fields": [5]}, {"type": "map", "keys": {"type": "string"}}),
    ],
)
def test_a_schema_that_is_none_rejects_its_records_alone(document):
    """K8: other records of the batch are not hurt."""
    texts = [{"schema": document, "payload": 1}, {"schema": schema("int32"), "payload": 2}]
    array = pa.array([json.dumps(text).encode() for text in texts], pa.binary())
    _, rejected = with_schemas(values(array)[0])
    assert list(rejected) == [0]


def test_an_object_that_only_looks_like_a_pair_is_left_alone():
    """K3: a row may have columns called schema and payload, beside others."""
    row = {"schema": {"type": "int32"}, "payload": 1, "id": 5}
    field, rejected = with_schemas(values(pa.array([json.dumps(row).encode()], pa.binary()))[0])
    assert (list(field.members()), rejected) == (["schema", "payload", "id"], {})


@pytest.mark.parametrize(
    ("payloads", "kind", "expected"),
    [
        ([1, None, 2], LongType(), [1, None, 2]),
        ([1, 1.5], DoubleType(), [1.0, 1.5]),
        ([1, "a", None], StringType(), ["1", "a", None]),
        ([True, 1], StringType(), ["true", "1"]),
        ([True, False], BooleanType(), [True, False]),
        ([{}, {}], StringType(), ["{}", "{}"]),
        ([{"a": None}], StringType(), ['{"a": null}']),
        ([{"a": 1}, "x"], StringType(), ['{"a": 1}', "x"]),
        ([2**63], DecimalType(38, 0), [Decimal(2**63)]),
    ],
)
def test_values_without_a_schema_tell_their_type(payloads, kind, expected):
    """K7: numbers, strings, and text for what disagrees."""
    field = plain(*payloads)
    assert field.type() == kind
    assert cast(field) == expected


def test_nested_values_without_a_schema_are_structs_and_lists():
    """K7: with fields that all rows together have, and without those that nobody has seen."""
    field = plain(
        {"a": 1, "b": None, "c": [{"d": 1.5}]}, {"a": None, "c": []}, None, {"c": [{"d": None}]}
    )
    kind = field.type()
    assert isinstance(kind, StructType)
    assert [inner.name for inner in kind.fields] == ["a", "c"]
    assert cast(field) == [
        {"a": 1, "c": [{"d": 1.5}]},
        {"a": None, "c": []},
        None,
        {"a": None, "c": [{"d": None}]},
    ]
    assert cast(plain([], [None]), None) == [[], [None]]


def test_a_member_that_the_tables_struct_lacks_is_refused():
    """K8: nothing is left out in silence."""
    kind = plain({"a": 1}).type()
    with pytest.raises(SchemaRejected):
        cast(plain({"a": 1, "b": 2}), kind)
    assert cast(plain({"a": 1, "b": None}), kind) == [{"a": 1}]


def test_fields_of_nested_types_have_numbers_of_their_own():
    """K7: a schema's inner fields do not clash."""
    document = {
        "type": "struct",
        "fields": [
            POINT | {"field": "at"},
            {"type": "array", "items": POINT, "field": "way"},
        ],
    }
    kind = iceberg_type(parse_schema(document), itertools.count(1))
    numbers: list[int] = []

    def walk(inner: IcebergType) -> None:
        if isinstance(inner, StructType):
            for each in inner.fields:
                numbers.append(each.field_id)
                walk(each.field_type)
        if isinstance(inner, ListType):
            numbers.append(inner.element_id)
            walk(inner.element_type)

    walk(kind)
    assert len(numbers) == len(set(numbers)) == 11
