"""Types of Protobuf, the well-known ones among them, and what producers may import."""

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from pyiceberg.types import BinaryType, DecimalType, LongType, StringType, TimestamptzType

from icestream.errors import SchemaRejected
from icestream.formats.protobuf import decode

HEAD = 'syntax = "proto3";\n'
LISTS = "message I { repeated int32 x = 1; }"
MOMENTS = HEAD + (
    'import "google/protobuf/timestamp.proto";\n'
    "message M { google.protobuf.Timestamp at = 1; repeated google.protobuf.Timestamp more = 2; }"
)


def field(number: int, content: bytes) -> bytes:
    """A field with a run of bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def read(schema: str, *records: bytes | None, **options):
    found, rejected = decode(pa.array(records, pa.binary()), schema, **options)
    found.array.validate(full=True)
    return found, dict(rejected)


def test_timestamps_are_instants():
    """K3: from the first year to the last, and before 1970."""
    moments = [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2024, 2, 29, 12, 0, 0, 250_000, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ]
    records = []
    for moment in moments:
        written = Timestamp()
        written.FromDatetime(moment)
        content = written.SerializeToString()
        records.append(field(1, content) + field(2, content) + field(2, b""))
    found, rejected = read(MOMENTS, *records, b"")
    assert rejected == {}
    assert found.members()["at"].type() == TimestamptzType()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert found.array.to_pylist() == [
        *({"at": moment, "more": [moment, epoch]} for moment in moments),
        {"at": None, "more": []},
    ]


@pytest.mark.parametrize(
    "content",
    [
        Timestamp(seconds=5, nanos=1).SerializeToString(),
        Timestamp(seconds=5, nanos=-1000).SerializeToString(),
        Timestamp(seconds=5, nanos=1_000_000_000).SerializeToString(),
        Timestamp(seconds=253_402_300_800).SerializeToString(),
    ],
)
def test_a_timestamp_that_cannot_be_kept_rejects_its_record(content):
    """K3: no digit is lost silently."""
    found, rejected = read(MOMENTS, field(1, content), field(2, content), field(1, b""))
    assert set(rejected) == {0, 1}
    assert "timestamp" in rejected[0]
    assert found.null().tolist() == [True, True, False]


def test_unsigned_numbers_of_64_bits_are_decimals():
    """K3: Iceberg has no such type."""
    schema = HEAD + "message M { uint64 u = 1; repeated fixed64 f = 2; }"
    found, _ = read(schema, b"\x08" + b"\xff" * 9 + b"\x01" + field(2, b"\xff" * 8))
    assert found.members()["u"].type() == DecimalType(20, 0)
    most = Decimal(2**64 - 1)
    assert found.array.to_pylist() == [{"u": most, "f": [most]}]


def test_what_contains_itself_is_kept_as_it_was_written():
    """K3: no struct has as many levels."""
    schema = HEAD + (
        'import "google/protobuf/struct.proto";\n'
        "message M { string name = 1; M next = 2; google.protobuf.Struct free = 3; }"
    )
    inner = field(1, b"b") + field(2, field(1, b"c"))
    whole = field(1, b"a") + field(2, inner)
    found, rejected = read(schema, whole, field(3, b"\x01\x02"), whole + field(2, b""))
    assert set(rejected) == {2}
    assert "twice" in rejected[2]
    assert found.members()["next"].type() == BinaryType()
    assert found.array.to_pylist()[:2] == [
        {"name": "a", "next": inner, "free": None},
        {"name": "", "next": None, "free": b"\x01\x02"},
    ]


def test_durations_and_any_are_structs():
    """K3: of the fields that they have."""
    schema = HEAD + (
        'import "google/protobuf/duration.proto"; import "google/protobuf/any.proto";\n'
        "message M { google.protobuf.Duration d = 1; google.protobuf.Any a = 2; }"
    )
    found, _ = read(schema, field(1, b"\x08\x03") + field(2, field(1, b"x") + field(2, b"\xff")))
    assert found.array.to_pylist() == [
        {"d": {"seconds": 3, "nanos": 0}, "a": {"type_url": "x", "value": b"\xff"}}
    ]


def test_enums_are_names_and_numbers_without_one_are_digits():
    """K3: proto3's enums are open."""
    schema = HEAD + "message M { E e = 1; } enum E { NONE = 0; FIVE = 5; }"
    found, _ = read(schema, b"\x08\x05", b"\x08\x06", b"")
    assert found.members()["e"].type() == StringType()
    assert found.array.to_pylist() == [{"e": "FIVE"}, {"e": "6"}, {"e": "NONE"}]


def test_a_member_of_a_oneof_that_was_displaced_leaves_nothing_behind():
    """K3: not even the items of its lists, which others lie next to."""
    schema = (
        HEAD + "message M { oneof c { I a = 1; I b = 2; } } message I { repeated int32 x = 1; }"
    )
    items = field(1, b"\1\2")
    records = [
        field(1, items) + field(2, field(1, b"\3")),
        field(1, items) + field(2, b"") + field(1, field(1, b"\4")),
        field(1, items) + field(1, field(1, b"\5")),
    ]
    found, _ = read(schema, *records)
    assert found.array.to_pylist() == [
        {"a": None, "b": {"x": [3]}},
        {"a": {"x": [4]}, "b": None},
        {"a": {"x": [1, 2, 5]}, "b": None},
    ]


def test_long_lists_make_room_and_keep_what_is_written():
    """K3: items lie in buffers that grow, and a record that is damaged leaves none."""
    schema = (
        HEAD + "message M { int32 id = 3; repeated I i = 1; } message I { repeated int32 x = 1; }"
    )
    part = field(1, field(1, b"\7\7"))
    records = [b"\x18\x01" + part * count for count in range(120)]
    damaged = [record + field(1, b"\x08") for record in records]
    mixed = [record for pair in zip(records, damaged, strict=True) for record in pair]
    found, rejected = read(schema, *mixed)
    assert sorted(rejected) == list(range(1, 240, 2))
    expected = [{"id": 1, "i": [{"x": [7, 7]}] * count} for count in range(120)]
    assert found.array.to_pylist()[::2] == expected


def test_files_that_confluents_serializers_import_are_known():
    """K3: their registry never asks for them."""
    schema = HEAD + (
        'import "confluent/meta.proto"; import "confluent/type/decimal.proto";\n'
        'message M { confluent.type.Decimal d = 1 [(confluent.field_meta) = { doc: "x" }]; }'
    )
    found, _ = read(schema, field(1, field(1, b"\x05") + b"\x10\x0a\x18\x02"))
    assert found.array.to_pylist() == [{"d": {"value": b"\x05", "precision": 10, "scale": 2}}]


def test_imports_come_from_the_registry_and_never_from_the_machine(tmp_path):
    """K3: a name that leads out of the folder is refused."""
    outside = tmp_path / "outside.proto"
    outside.write_text(HEAD + "message O { int64 x = 1; }")
    schema = HEAD + 'import "a/b.proto"; message M { p.O o = 1; }'
    text = HEAD + "package p; message O { int64 x = 1; }"
    found, _ = read(schema, field(1, b"\x08\x01"), references={"a/b.proto": text})
    assert found.members()["o"].members()["x"].type() == LongType()
    for name in (str(outside), "../outside.proto"):
        with pytest.raises(SchemaRejected):
            read(HEAD + f'import "{name}"; message M {{ O o = 1; }}', references={name: text})
    with pytest.raises(SchemaRejected, match="protoc does not take it"):
        read(schema)


def test_groups_and_messages_that_are_not_there_are_refused():
    """K3: in words, not by a failure inside."""
    with pytest.raises(SchemaRejected, match="is a group"):
        read('syntax = "proto2"; message M { optional group G = 1 { optional int32 x = 2; } }')
    with pytest.raises(SchemaRejected, match="does not have the message"):
        read(HEAD + "message M {}", message=(1,))
    found, _ = read(HEAD + "message M {}", b"\x08\x01", None)
    assert found.array.to_pylist() == [{}, None]


def test_messages_are_counted_without_those_of_maps():
    """K3: as the serializers for Java do."""
    schema = HEAD + "message M { map<string, int32> m = 1; message N { int32 n = 1; } }"
    found, _ = read(schema, b"\x08\x07", message=(0, 0))
    assert found.array.to_pylist() == [{"n": 7}]


def test_a_map_with_a_value_that_its_closed_enum_lacks_rejects_its_record():
    """K3: readers differ in what they do about it, so nothing is guessed."""
    schema = 'syntax = "proto2"; message M { map<int32, E> m = 1; } enum E { NONE = 0; ONE = 1; }'
    found, rejected = read(schema, field(1, b"\x08\x07\x10\x01"), field(1, b"\x08\x07\x10\x09"))
    assert set(rejected) == {1}
    assert found.array.to_pylist() == [{"m": [(7, "ONE")]}, None]


def test_a_field_inside_a_maps_entry_that_the_schema_does_not_have_is_skipped():
    """K3: key and value count."""
    schema = HEAD + "message M { map<int32, int32> m = 1; }"
    found, _ = read(schema, field(1, b"\x08\x07\x18\x05\x10\x02") + field(1, b""))
    assert found.array.to_pylist() == [{"m": [(7, 2), (0, 0)]}]
