"""Protobuf messages read as columns say what Google's library reads, and damage stays there."""

import re
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from icestream.formats.protobuf import _files, _message_at, decode
from tests.examples import examples

MANY = examples(100)
FEW = examples(20)

MEMBERS = """
  double f1 = 1; float f2 = 2; int32 f3 = 3; int64 f4 = 4; uint32 f5 = 5; uint64 f6 = 6;
  sint32 f7 = 7; sint64 f8 = 8; fixed32 f9 = 9; fixed64 f10 = 10; sfixed32 f11 = 11;
  sfixed64 f12 = 12; bool f13 = 13; string f14 = 14; bytes f15 = 15; Color f16 = 16;
"""
PARTS = """
  Inner inner = 17; repeated Inner inners = 18; repeated int32 ints = 19;
  repeated double doubles = 20 [packed = false]; repeated string texts = 21;
  map<string, int64> longs = 22; map<int32, Inner> by_number = 23; repeated Color colors = 24;
  google.protobuf.Int64Value wrapped = 25; google.protobuf.StringValue word = 26;
  oneof choice { string chosen = 27; Inner inside = 28; sint32 number = 29; Mid mid = 2000000; }
  repeated bool flags = 30; repeated sint64 signs = 31; map<bool, string> named = 32;
  repeated fixed32 fixes = 33; repeated google.protobuf.BoolValue wraps = 34;
"""
INNER = """
enum Color { RED = 0; GREEN = 1; BLUE = 5; MINUS = -1; }
"""
PROTO3 = f"""syntax = "proto3"; import "google/protobuf/wrappers.proto";
message Every {{ {MEMBERS} {PARTS} optional int32 maybe = 35; }}
message Inner {{ string a = 1; repeated sint64 b = 2; optional Color c = 3; }}
message Mid {{ repeated Inner below = 1; Inner one = 2; map<string, Inner> m = 3; }}
{INNER}"""


def proto2_members(text: str) -> str:
    """The fields with the labels that proto2 asks for."""
    fields = [each.strip() for each in text.split(";") if each.strip()]
    labelled = [
        f if f.startswith(("repeated", "map", "oneof")) else f"optional {f}" for f in fields
    ]
    return "; ".join(labelled) + ";"


PARTS_BEFORE, ONEOF, PARTS_AFTER = (
    PARTS.partition("oneof")[0],
    "oneof" + PARTS.partition("oneof")[2].partition("}")[0] + "}",
    PARTS.partition("}")[2],
)
PROTO2 = f"""syntax = "proto2"; import "google/protobuf/wrappers.proto";
message Every {{ {proto2_members(MEMBERS)} {proto2_members(PARTS_BEFORE)} {ONEOF}
  {proto2_members(PARTS_AFTER)} optional int32 maybe = 35 [default = 7]; }}
message Inner {{ optional string a = 1; repeated sint64 b = 2; optional Color c = 3; }}
message Mid {{ repeated Inner below = 1; optional Inner one = 2; map<string, Inner> m = 3; }}
{INNER}"""


# Google's library takes a map's entry for unknown as a whole if a field in it is; others do not.
WITHOUT_MAPS = {schema: re.sub(r"map<[^;]*;", "", schema) for schema in (PROTO3, PROTO2)}


@cache
def message_class(schema: str) -> Any:
    """Google's own class for the first message of a file."""
    return GetMessageClass(_message_at(_files(schema, ()), (0,)))


def shown(field: Any, value: Any) -> Any:
    """A value of Google's library as our columns show it."""
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else str(value)
    if field.message_type is not None:
        if field.message_type.full_name.startswith("google.protobuf."):
            return value.value
        return row(value)
    if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64):
        return Decimal(value)
    if field.type == field.TYPE_STRING and isinstance(value, bytes):
        # What is no text comes as bytes; as a column it would have to be one.
        raise DecodeError
    return value


def row(message: Any) -> dict[str, Any]:
    """A message of Google's library as our columns show it."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            kind = field.message_type.fields_by_name["value"]
            found[field.name] = sorted((key, shown(kind, value[key])) for key in value)
        elif field.is_repeated:
            found[field.name] = [shown(field, each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = shown(field, value)
    return found


def sorted_maps(value: Any) -> Any:
    """The order of a map's entries says nothing."""
    if isinstance(value, dict):
        return {key: sorted_maps(each) for key, each in value.items()}
    if isinstance(value, list):
        inside = [sorted_maps(each) for each in value]
        return sorted(inside) if inside and isinstance(inside[0], tuple) else inside
    return tuple(map(sorted_maps, value)) if isinstance(value, tuple) else value


def varint(number: int) -> bytes:
    """A number as Protobuf writes it."""
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


NUMBERS = st.one_of(st.integers(0, 40), st.sampled_from([2_000_000, 2_000_001, 2**29 - 1]))
VARINTS = st.one_of(st.integers(0, 10), st.integers(-(2**63), 2**64 - 1)).map(varint)
SMALL_TEXT = st.text(max_size=4).map(str.encode)


def field_bytes(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A field with any number, in any form that exists."""
    runs = st.one_of(SMALL_TEXT, inner, st.lists(VARINTS, max_size=4).map(b"".join))
    forms = st.one_of(
        st.tuples(st.just(0), VARINTS),
        st.tuples(st.just(1), st.binary(min_size=8, max_size=8)),
        st.tuples(st.just(2), runs.map(lambda run: varint(len(run)) + run)),
        st.tuples(st.just(5), st.binary(min_size=4, max_size=4)),
    )
    plain = st.tuples(NUMBERS, forms).map(lambda f: varint(f[0] << 3 | f[1][0]) + f[1][1])
    # Google's library does not look at numbers in groups that it skips; ours does.
    content = st.lists(st.integers(1, 40).map(lambda n: varint(n << 3) + b"\1"), max_size=3)
    grouped = st.tuples(st.integers(50, 60), content.map(b"".join)).map(
        lambda f: varint(f[0] << 3 | 3) + f[1] + varint(f[0] << 3 | 4)
    )
    return plain | grouped


def messages(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Fields in any order, some of them twice."""
    return st.lists(field_bytes(inner), max_size=5).map(b"".join)


WIRE = st.recursive(st.just(b""), messages, max_leaves=12)
ANYTHING = st.one_of(
    WIRE,
    st.lists(WIRE, max_size=4).map(b"".join),
    st.tuples(WIRE, st.binary(max_size=6)).map(b"".join),
)


def compare(schema: str, records: list[bytes]) -> None:
    """Each record is what Google's library says, and rejected exactly when it says nothing."""
    field, rejected = decode(pa.array(records, pa.binary()), schema)
    field.array.validate(full=True)
    for at, found in enumerate(field.array.to_pylist()):
        try:
            expected = row(message_class(schema).FromString(records[at]))
        except (DecodeError, UnicodeDecodeError):
            assert at in rejected
            continue
        assert at not in rejected, rejected[at]
        assert repr(sorted_maps(found)) == repr(sorted_maps(expected))


@MANY
@given(st.lists(ANYTHING, max_size=5))
def test_columns_say_what_googles_library_says(records):
    """K3: valid, merged, unknown and damaged fields, as proto3."""
    compare(WITHOUT_MAPS[PROTO3], records)


@MANY
@given(st.lists(ANYTHING, max_size=5))
def test_columns_say_what_googles_library_says_of_proto2(records):
    """K3: the same with presence, closed enums and unpacked lists."""
    compare(WITHOUT_MAPS[PROTO2], records)


@pytest.mark.parametrize("schema", [PROTO3, PROTO2])
@FEW
@given(data=st.data())
def test_messages_that_the_library_wrote_are_read(schema, data):
    """K3: random values in every field."""
    records = []
    for _ in range(data.draw(st.integers(1, 4))):
        message = message_class(schema)()
        fill(message, data.draw)
        records.append(message.SerializeToString())
    compare(schema, records)


def fill(message: Any, draw: Any, depth: int = 0) -> None:
    """Random values in some fields of a message."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()) or depth > 2:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fill_map(field.message_type.fields, getattr(message, field.name), draw, depth)
        elif field.message_type is not None:
            target = getattr(message, field.name)
            target = target.add() if field.is_repeated else target
            target.SetInParent()
            fill(target, draw, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values(field), max_size=3)))
        else:
            setattr(message, field.name, draw(values(field)))


def fill_map(entry: Any, target: Any, draw: Any, depth: int) -> None:
    """Random entries in a map."""
    for key in draw(st.lists(values(entry[0]), max_size=3)):
        if entry[1].message_type is not None:
            fill(target[key], draw, depth + 1)
        else:
            target[key] = draw(values(entry[1]))


def values(field: Any) -> st.SearchStrategy[Any]:
    """Values of a scalar field."""
    if field.enum_type is not None:
        return st.sampled_from([0, 1, 5, -1])
    if field.cpp_type == field.CPPTYPE_STRING:
        return st.text(max_size=9) if field.type == field.TYPE_STRING else st.binary(max_size=9)
    ranges = {
        field.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        field.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
        field.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
        field.CPPTYPE_DOUBLE: st.floats(),
        field.CPPTYPE_FLOAT: st.floats(width=32),
        field.CPPTYPE_BOOL: st.booleans(),
    }
    return ranges[field.cpp_type]
