"""Fields over Arrow arrays: parts, joins, text, and casts that are exact or refused."""

import json
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
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
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import SchemaRejected
from icestream.formats.arrow_fields import ArrowField, arrow_field
from icestream.schema import arrow_schema

EVERYTHING = pa.struct(
    [
        ("long", pa.int64()),
        ("text", pa.large_string()),
        ("ratio", pa.float64()),
        ("flag", pa.bool_()),
        ("raw", pa.large_binary()),
        ("list", pa.large_list(pa.int32())),
        ("map", pa.map_(pa.large_string(), pa.float64())),
        ("nothing", pa.null()),
    ]
)
ROWS = [
    {
        "long": 1,
        "text": 'a "b"\\\n\x01é',
        "ratio": 1.5,
        "flag": True,
        "raw": b"\x00\xff",
        "list": [1, None],
        "map": [("k", 2.5), ("l", None)],
        "nothing": None,
    },
    None,
    {
        "long": None,
        "text": "",
        "ratio": None,
        "flag": False,
        "raw": b"",
        "list": [],
        "map": [],
        "nothing": None,
    },
    {
        "long": -5,
        "text": None,
        "ratio": -0.5,
        "flag": None,
        "raw": None,
        "list": None,
        "map": None,
        "nothing": None,
    },
]


def everything() -> ArrowField:
    return arrow_field(pa.array(ROWS, EVERYTHING))


def target(kind: IcebergType) -> pa.DataType:
    """The Arrow type in which a table of that column is written."""
    return arrow_schema(Schema(NestedField(1, "c", kind))).field("c").type


def cast(values: pa.Array, kind: IcebergType) -> list[Any]:
    found = arrow_field(values).cast("c", kind, target(kind))
    assert found.type == target(kind)
    found.validate(full=True)
    shown: list[Any] = found.to_pylist()
    return shown


def test_members_know_where_their_record_is_null():
    """K3: missing is not null."""
    field = everything()
    members = field.members()
    assert list(members) == [each.name for each in EVERYTHING]
    assert field.missing().tolist() == [False] * 4
    assert members["long"].missing().tolist() == [False, True, False, False]
    assert members["long"].null().tolist() == [False, True, True, False]
    assert members["nothing"].type() is None
    assert members["long"].members() == {}
    taken = members["long"].take(np.array([3, 1, 3]))
    assert taken.array.to_pylist() == [-5, None, -5]
    assert taken.missing().tolist() == [False, True, False]


def test_fields_of_any_type_are_joined():
    """K3: values of one field where chosen, of the other elsewhere."""
    ours, theirs = everything(), everything().take(np.array([3, 2, 1, 0]))
    chosen = np.array([True, False, False, True])
    assert ours.where(chosen, theirs).array.to_pylist() == [ROWS[0], ROWS[2], None, ROWS[3]]
    member = ours.members()["map"].where(chosen, theirs.members()["map"])
    assert member.missing().tolist() == [False, False, True, False]
    uuids = pa.array([UUID(int=1).bytes] * 2, pa.binary(16))
    extended = arrow_field(pa.ExtensionArray.from_storage(pa.uuid(), uuids))
    assert len(extended.where(np.array([True, False]), extended)) == 2


def test_what_is_always_null_is_joined_with_anything():
    """K3: one of two schemas may not have a type for a field."""
    nothing = arrow_field(pa.nulls(2))
    longs = arrow_field(pa.array([1, 2]))
    chosen = np.array([True, False])
    assert longs.where(chosen, nothing).array.to_pylist() == [1, None]
    assert nothing.where(chosen, longs).array.to_pylist() == [None, 2]
    assert nothing.where(chosen, longs).type() == LongType()
    with pytest.raises(SchemaRejected, match="cannot be joined"):
        longs.where(chosen, arrow_field(pa.array(["a", "b"])))


def test_records_as_text_are_json():
    """K3: a string column takes anything."""
    shown = everything().text().to_pylist()
    assert shown[1] is None
    expected = dict(ROWS[0] or {}, raw="\\x00ff", map={"k": 2.5, "l": None})
    assert json.loads(shown[0]) == expected
    assert json.loads(shown[2])["list"] == []
    assert json.loads(shown[2])["map"] == {}
    assert json.loads(shown[3])["map"] is None
    sliced = arrow_field(pa.array(ROWS, EVERYTHING)[2:])
    assert json.loads(sliced.text().to_pylist()[0])["text"] == ""
    assert arrow_field(pa.array([{}, None], pa.struct([]))).text().to_pylist() == ["{}", None]
    assert arrow_field(pa.array([[float("nan")]])).text().to_pylist() == ['["nan"]']
    assert arrow_field(pa.nulls(1)).text().to_pylist() == [None]
    assert cast(pa.array([5, None]), StringType()) == ["5", None]
    assert cast(pa.array([True]), StringType()) == ["true"]
    assert cast(pa.array([b"\xab", None, b""])[1:], StringType()) == [None, "\\x"]


def test_slices_of_lists_and_maps_are_shown_and_cast_at_their_place():
    """K3: arrays may begin anywhere in their buffers."""
    field = everything().members()
    for name, kind in (
        ("list", ListType(2, LongType(), False)),
        ("map", MapType(2, StringType(), 3, DoubleType(), False)),
    ):
        whole, part = field[name].array, field[name].array[2:]
        assert arrow_field(part).text().to_pylist() == arrow_field(whole).text().to_pylist()[2:]
        assert cast(part, kind) == cast(whole, kind)[2:]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (pa.array([1, None], pa.int32()), LongType(), [1, None]),
        (pa.array([5], pa.int64()), IntegerType(), [5]),
        (pa.array([2**53]), DoubleType(), [2.0**53]),
        (pa.array([1.5], pa.float32()), DoubleType(), [1.5]),
        (pa.array([1.5, None]), FloatType(), [1.5, None]),
        (pa.array([3.0]), LongType(), [3]),
        (pa.array([123, -7]), DecimalType(5, 2), [Decimal("123.00"), Decimal("-7.00")]),
        (pa.array([2**63 - 1]), DecimalType(38, 10), [Decimal(2**63 - 1).quantize(Decimal(1))]),
        (pa.array([Decimal("1.50")]), DecimalType(38, 5), [Decimal("1.50000")]),
        (pa.array([Decimal("1.50")]), DecimalType(2, 1), [Decimal("1.5")]),
        (pa.array([Decimal("2.00")]), LongType(), [2]),
        (pa.array([Decimal("0.5")]), DoubleType(), [0.5]),
        (pa.array([b"abc"]), FixedType(3), [b"abc"]),
        (pa.array([b"abc"], pa.binary(3)), BinaryType(), [b"abc"]),
        (pa.array([bytes(16)], pa.binary(16)), UUIDType(), [UUID(int=0)]),
        (pa.array([7], pa.timestamp("us")), TimestampNanoType(), None),
        (pa.array([1000], pa.time64("ns")), TimeType(), [time(0, 0, 0, 1)]),
        (pa.array(["12"]), LongType(), [12]),
        (pa.nulls(1), LongType(), [None]),
    ],
)
def test_values_fit_a_wider_column(values, kind, expected):
    """K3: and a narrower one if each of them does."""
    found = cast(values, kind) if expected else arrow_field(values).cast("c", kind, target(kind))
    assert expected is None or found == expected


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([2**31]), IntegerType()),
        (pa.array([2**53 + 1]), DoubleType()),
        (pa.array([2**24 + 1], pa.int32()), FloatType()),
        (pa.array([0.1]), FloatType()),
        (pa.array([1.5]), LongType()),
        (pa.array([1.5]), DecimalType(5, 2)),
        (pa.array([1000]), DecimalType(5, 2)),
        (pa.array([Decimal("1.55")]), DecimalType(3, 1)),
        (pa.array([Decimal("1.5")]), LongType()),
        (pa.array([Decimal("0.1234567890123456789")]), DoubleType()),
        (pa.array([b"abcd"]), FixedType(3)),
        (pa.array([b"abcd"]), UUIDType()),
        (pa.array([1]), BooleanType()),
        (pa.array([True]), LongType()),
        (pa.array([1]), DateType()),
        (pa.array([1]), TimestampType()),
        (pa.array([7], pa.timestamp("us")), TimestamptzType()),
        (pa.array([7], pa.timestamp("us", "UTC")), TimestampType()),
        (pa.array([7], pa.timestamp("ns")), TimestampType()),
        (pa.array([2**62], pa.timestamp("us")), TimestampNanoType()),
        (pa.array([7], pa.time64("ns")), TimeType()),
        (pa.array(["x"]), LongType()),
        (pa.array([[1]]), LongType()),
        (pa.array([1]), ListType(2, LongType(), False)),
        (pa.array([{"a": 1}]), MapType(2, StringType(), 3, LongType(), False)),
        (pa.array([{"a": 1, "b": 2}]), StructType(NestedField(2, "a", LongType()))),
    ],
)
def test_what_does_not_fit_is_refused_and_never_shown(values, kind):
    """K3: nothing is rounded, cut or made null."""
    with pytest.raises(SchemaRejected) as caught:
        cast(values, kind)
    assert "abcd" not in str(caught.value)


def test_nested_values_are_cast_inside():
    """K3: structs, lists and maps, with members that the table has beside them."""
    inner = StructType(NestedField(3, "a", LongType()), NestedField(4, "more", StringType()))
    values = pa.array([[{"a": 1}, None], None, []], pa.list_(pa.struct([("a", pa.int32())])))
    assert cast(values, ListType(2, inner, False)) == [[{"a": 1, "more": None}, None], None, []]
    maps = pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int32()))
    assert cast(maps, MapType(2, StringType(), 3, LongType(), False)) == [[("x", 1)], None]
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    zoned = pa.array([{"at": moment}, None], pa.struct([("at", pa.timestamp("us", "UTC"))]))
    kind = StructType(NestedField(2, "at", TimestamptzType()))
    assert cast(zoned, kind) == [{"at": moment}, None]


STAND_IN = "(left out)"
SPELLINGS = [
    STAND_IN,
    f'["{STAND_IN}"]',
    f"[{','.join(map(str, STAND_IN.encode()))}]",
    f"\\x{STAND_IN.encode().hex()}",
    f'{{"{STAND_IN}":"{STAND_IN}"}}',
]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), [STAND_IN, "(left OUT)", "", None]),
        (pa.large_string(), [STAND_IN, f"{STAND_IN} ", None]),
        (pa.binary(), [STAND_IN.encode(), b"x" * len(STAND_IN), b"", None]),
        (pa.large_binary(), [STAND_IN.encode(), None]),
        (pa.binary(len(STAND_IN)), [STAND_IN.encode(), b"x" * len(STAND_IN), None]),
        (pa.list_(pa.string()), [[STAND_IN], [STAND_IN, STAND_IN], [], [None], None]),
        (pa.large_list(pa.int32()), [list(STAND_IN.encode()), [40], [], None]),
        (pa.map_(pa.string(), pa.string()), [[(STAND_IN, STAND_IN)], [("a", "b")], [], None]),
        (pa.int64(), [None, 1]),
        (pa.uuid(), [None, bytes(16)]),
        (pa.struct([("a", pa.string())]), [None, {"a": STAND_IN}]),
        (pa.null(), [None, None]),
    ],
    ids=str,
)
def test_values_are_found_and_taken_out_by_what_they_say(kind, values):
    """K3, P7: what stands for a value that was not sent, in a column of any type."""
    column = arrow_field(pa.array(values, kind))
    found = column.is_any(SPELLINGS)
    first = [values[0] is not None, *[False] * (len(values) - 1)]
    assert found.tolist() == first
    without = column.without(found)
    assert without.null().tolist() == (found | column.null()).tolist()
    assert without.missing().tolist() == found.tolist()
    assert without.type() == column.type()
    assert without.array.slice(1).equals(column.array.slice(1))
