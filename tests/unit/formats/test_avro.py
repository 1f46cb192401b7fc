"""Types of Avro, as Kafka Connect and Debezium write them, and records that claim too much."""

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.types import (
    DateType,
    DecimalType,
    LongType,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import SchemaRejected
from icestream.formats.avro import decode


def number(value: int) -> bytes:
    """A long as Avro writes it."""
    word = (value << 1) ^ (value >> 63)
    out = bytearray()
    while word > 127:
        out.append(word & 127 | 128)
        word >>= 7
    return bytes([*out, word])


def text(value: bytes) -> bytes:
    return number(len(value)) + value


def read(schema: Any, *records: bytes | None) -> tuple[Any, dict[int, str]]:
    field, rejected = decode(pa.array(records, pa.binary()), json.dumps(schema))
    field.array.validate(full=True)
    return field, dict(rejected)


DEBEZIUM = "io.debezium.time."
CONNECT = "org.apache.kafka.connect.data."
MOMENT = datetime(2024, 2, 29, 12, 30, 15, 250_000)
MILLIS = int(MOMENT.replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("schema", "value", "kind", "shown"),
    [
        ({"type": "int", "logicalType": "date"}, 19_782, DateType(), date(2024, 2, 29)),
        ({"type": "int", "connect.name": DEBEZIUM + "Date"}, 19_782, DateType(), date(2024, 2, 29)),
        ({"type": "int", "logicalType": "time-millis"}, 61_001, TimeType(), time(0, 1, 1, 1000)),
        ({"type": "int", "connect.name": DEBEZIUM + "Time"}, 1, TimeType(), time(0, 0, 0, 1000)),
        ({"type": "int", "connect.name": CONNECT + "Time"}, 1, TimeType(), time(0, 0, 0, 1000)),
        ({"type": "long", "connect.name": DEBEZIUM + "MicroTime"}, 7, TimeType(), time(0, 0, 0, 7)),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            *(MILLIS, TimestamptzType(), MOMENT.replace(tzinfo=UTC)),
        ),
        (
            {"type": "long", "connect.name": CONNECT + "Timestamp"},
            *(MILLIS, TimestamptzType(), MOMENT.replace(tzinfo=UTC)),
        ),
        (
            {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": False},
            *(MILLIS * 1000, TimestampType(), MOMENT),
        ),
        (
            {"type": "long", "logicalType": "local-timestamp-millis"},
            *(MILLIS, TimestampType(), MOMENT),
        ),
        (
            {"type": "long", "connect.name": DEBEZIUM + "Timestamp"},
            *(MILLIS, TimestampType(), MOMENT),
        ),
        (
            {"type": "long", "connect.name": DEBEZIUM + "MicroTimestamp"},
            *(MILLIS * 1000, TimestampType(), MOMENT),
        ),
        ({"type": "long", "connect.name": DEBEZIUM + "MicroDuration"}, 5, LongType(), 5),
    ],
)
def test_numbers_are_what_their_names_say(schema, value, kind, shown):
    """K3: logical types, and the names of Connect and Debezium."""
    field, rejected = read(schema, number(value))
    assert rejected == {}
    assert field.type() == kind
    assert field.array.to_pylist() == [shown]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "long", "logicalType": "timestamp-nanos"}, TimestamptzNanoType()),
        ({"type": "long", "logicalType": "local-timestamp-nanos"}, TimestampNanoType()),
        ({"type": "long", "connect.name": DEBEZIUM + "NanoTimestamp"}, TimestampNanoType()),
    ],
)
def test_nanoseconds_are_kept_or_refused(schema, kind):
    """K3: a column of microseconds takes only what loses no digit."""
    field, _ = read(schema, number(1_700_000_000_123_456_789))
    assert field.type() == kind
    assert field.array.cast(pa.int64()).to_pylist() == [1_700_000_000_123_456_789]
    micros, arrow = TimestampType(), pa.timestamp("us", field.array.type.tz)
    with pytest.raises(SchemaRejected):
        field.cast("at", micros, arrow)
    whole, _ = read(schema, number(1_700_000_000_123_456_000))
    assert whole.cast("at", micros, arrow).cast(pa.int64()).to_pylist() == [1_700_000_000_123_456]


def test_nanoseconds_of_a_day_are_kept_or_refused():
    """K3: Iceberg's time has microseconds."""
    schema = {"type": "long", "connect.name": DEBEZIUM + "NanoTime"}
    field, _ = read(schema, number(1_000))
    assert field.cast("t", TimeType(), pa.time64("us")).to_pylist() == [time(0, 0, 0, 1)]
    field, _ = read(schema, number(1_001))
    with pytest.raises(SchemaRejected):
        field.cast("t", TimeType(), pa.time64("us"))


def test_text_that_is_something_else_wants_its_column():
    """K3: Debezium writes instants and uuids as text."""
    field, _ = read(
        {"type": "string", "connect.name": DEBEZIUM + "ZonedTimestamp"},
        text(b"2024-02-29T12:30:15.250000Z"),
    )
    assert field.type() == TimestamptzType()
    cast = field.cast("at", TimestamptzType(), pa.timestamp("us", "UTC"))
    assert cast.to_pylist() == [MOMENT.replace(tzinfo=UTC)]
    field, _ = read(
        {"type": "string", "connect.name": "io.debezium.data.Uuid"},
        text(b"12345678-9abc-def0-1234-56789abcdef0"),
    )
    assert field.type() == UUIDType()
    cast = field.cast("id", UUIDType(), pa.binary(16))
    assert cast.to_pylist() == [bytes.fromhex("123456789abcdef0123456789abcdef0")]


def test_connects_decimals_are_read_with_all_digits_that_iceberg_has():
    """K3: Connect declares 64 digits when nobody says how many there are."""
    schema = {
        "type": "bytes",
        "scale": 2,
        "precision": 64,
        "logicalType": "decimal",
        "connect.name": CONNECT + "Decimal",
        "connect.parameters": {"scale": "2"},
    }
    most = (10**38 - 1).to_bytes(16, "big")
    least = (-(10**38) + 1).to_bytes(17, "big", signed=True)
    over = (10**38).to_bytes(16, "big")
    far = (2**200).to_bytes(26, "big")
    records = [text(each) for each in (most, least, over, b"", b"\xff" * 20, far)]
    field, rejected = read(schema, *records)
    assert field.type() == DecimalType(38, 2)
    limit = "9" * 36 + ".99"
    expected = [Decimal(limit), Decimal("-" + limit), None, Decimal(0), Decimal("-0.01"), None]
    assert field.array.to_pylist() == expected
    assert set(rejected) == {2, 5}
    assert "digits" in rejected[2]


def test_numbers_of_any_scale_become_text():
    """K3: Debezium's numeric without a declared scale."""
    schema = {
        "type": "record",
        "name": "VariableScaleDecimal",
        "namespace": "io.debezium.data",
        "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
        "connect.name": "io.debezium.data.VariableScaleDecimal",
    }
    pairs = [(0, 17), (2, -1250), (5, 1), (-3, 12), (50, 7)]
    records = [
        number(scale) + text(value.to_bytes(4, "big", signed=True)) for scale, value in pairs
    ]
    field, rejected = read(["null", schema], *(number(1) + each for each in records), number(0))
    assert rejected == {}
    assert field.type() == StringType()
    shown = field.text().to_pylist()
    assert shown[-1] is None
    assert [Decimal(each) for each in shown[:-1]] == [
        Decimal(value).scaleb(-scale) for scale, value in pairs
    ]


def test_blocks_with_their_size_in_bytes_are_read():
    """K3: writers may say how many bytes a block has, by a negative count."""
    schema = {"type": "array", "items": "long"}
    items = number(5) + number(6)
    sized = number(-2) + number(len(items)) + items
    field, rejected = read(schema, sized + number(1) + number(7) + number(0), number(0))
    assert rejected == {}
    assert field.array.to_pylist() == [[5, 6, 7], []]
    mapped = number(-1) + number(3) + text(b"k") + number(9) + number(0)
    field, _ = read({"type": "map", "values": "long"}, mapped)
    assert field.array.to_pylist() == [[("k", 9)]]


def test_of_equal_keys_the_last_counts():
    """K3: Iceberg's maps have distinct keys."""
    pairs = text(b"a") + number(1) + text(b"b") + number(2) + text(b"a") + number(3)
    one = number(1) + text(b"a") + number(4) + number(0)
    field, _ = read({"type": "map", "values": "long"}, number(3) + pairs + number(0), None, one)
    assert field.array.to_pylist() == [[("b", 2), ("a", 3)], None, [("a", 4)]]


@pytest.mark.parametrize(
    ("schema", "record"),
    [
        ("string", number(2**60)),
        ("bytes", number(-1)),
        ({"type": "array", "items": "long"}, number(2**60) + b"\0" * 9),
        ({"type": "array", "items": "long"}, number(-(2**63)) + number(4) + b"\0" * 9),
        ({"type": "array", "items": "null"}, number(2**60) + number(0)),
        ({"type": "array", "items": {"type": "map", "values": "null"}}, number(2**60)),
        ("long", b"\xff" * 11),
        ("long", b"\xff" * 9 + b"\x02"),
        ("int", number(2**31)),
        ("boolean", b"\2"),
        (["null", "long"], number(2)),
        (["null", "long"], number(-1)),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, number(1)),
        ({"type": "int", "logicalType": "time-millis"}, number(86_400_000)),
        ({"type": "long", "logicalType": "timestamp-millis"}, number(2**62)),
        ("string", text(b"\xed\xa0\x80")),
        ("string", text(b"\xc0\x80")),
        ("string", text(b"abcdefgh\xf4\x90\x80\x80")),
        ("long", b""),
        ("double", b"\0" * 7),
    ],
)
def test_what_a_record_cannot_mean_rejects_it_and_no_other(schema, record):
    """K3: nothing is allocated for what a record merely claims."""
    good = {"string": text("é".encode()), "bytes": text(b"x")}.get(str(schema))
    field, rejected = read(schema, record, *([good] if good else []))
    assert set(rejected) == {0}
    assert field.null().tolist() == [True] + [False] * bool(good)


def test_a_record_with_bytes_beyond_its_end_is_rejected():
    """K3: it was written with another schema."""
    _, rejected = read("long", number(1) + b"\0", number(1))
    assert rejected == {0: "an Avro record is damaged: it has bytes beyond its end"}


def test_long_lists_make_room_and_keep_what_is_written():
    """K3: items lie in buffers that grow."""
    schema = {"type": "array", "items": {"type": "array", "items": "string"}}

    def inner(count: int) -> bytes:
        return number(count) + text(b"item") * count + number(0) if count else number(0)

    records = [number(3) + inner(size) + inner(0) + inner(1) + number(0) for size in range(1, 90)]
    field, rejected = read(schema, *records)
    assert rejected == {}
    expected = [[["item"] * size, [], ["item"]] for size in range(1, 90)]
    assert field.array.to_pylist() == expected


def test_a_type_may_be_named_again_and_defined_elsewhere():
    """K3: names are resolved in their namespace, and in schemas that this one refers to."""
    inner = {"type": "record", "name": "P", "fields": [{"name": "x", "type": "long"}]}
    fields = [{"name": "a", "type": inner}, {"name": "b", "type": ["null", "n.P"]}]
    schema = {"type": "record", "name": "R", "namespace": "n", "fields": fields}
    field, _ = read(schema, number(1) + number(1) + number(2), number(3) + number(0))
    assert field.array.to_pylist() == [
        {"a": {"x": 1}, "b": {"x": 2}},
        {"a": {"x": 3}, "b": None},
    ]
    values = pa.array([number(4)], pa.binary())
    apart, _ = decode(values, '"m.P"', [json.dumps({**inner, "namespace": "m"})])
    assert apart.array.to_pylist() == [{"x": 4}]


def test_a_type_that_contains_itself_is_refused():
    """K3: it has no columns."""
    members = [{"name": "next", "type": ["null", "Node"]}]
    with pytest.raises(SchemaRejected, match="Node contains itself"):
        read({"type": "record", "name": "Node", "fields": members})


@pytest.mark.parametrize(
    "schema",
    [{"type": "wrong"}, [], {"type": "fixed", "name": "F"}, {"type": "record", "name": "R"}, 5],
)
def test_a_schema_that_says_nothing_is_refused(schema):
    """K3: in words, not by a failure inside."""
    with pytest.raises(SchemaRejected, match="cannot be read"):
        read(schema)


def test_a_schema_that_multiplies_itself_is_refused():
    """K3: a few lines can describe more columns than memory holds."""
    types: list[Any] = []
    below: Any = "long"
    for level in range(30):
        fields = [{"name": "a", "type": below}, {"name": "b", "type": below}]
        types.append(json.dumps({"type": "record", "name": f"L{level}", "fields": fields}))
        below = f"L{level}"
    with pytest.raises(SchemaRejected, match="more than"):
        decode(pa.array([b""], pa.binary()), types[-1], types[:-1])


def test_members_of_a_record_that_is_not_there_are_missing():
    """K3: a null value, a rejected record, and a null member are told apart."""
    row = {"type": "record", "name": "Row", "fields": [{"name": "x", "type": ["null", "long"]}]}
    schema = {"type": "record", "name": "E", "fields": [{"name": "after", "type": ["null", row]}]}
    records = [number(1) + number(1) + number(5), number(1) + number(0), number(0), None, b"\7"]
    field, rejected = read(schema, *records)
    assert set(rejected) == {4}
    after = field.members()["after"]
    member = after.members()["x"]
    assert isinstance(after.type(), StructType)
    assert after.missing().tolist() == [False, False, False, True, True]
    assert after.null().tolist() == [False, False, True, True, True]
    assert member.missing().tolist() == [False, False, True, True, True]
    assert member.null().tolist() == [False, True, True, True, True]
    assert member.array.to_pylist() == [5, None, None, None, None]


def test_a_union_of_several_types_is_a_struct_of_which_one_member_is_set():
    """K3: under the types' names."""
    record = {"type": "record", "name": "Row", "namespace": "n.m", "fields": []}
    field, _ = read(["null", "long", record], number(0), number(1) + number(3), number(2))
    assert field.array.to_pylist() == [None, {"long": 3, "Row": None}, {"long": None, "Row": {}}]
