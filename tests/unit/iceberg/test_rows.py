"""Keys and rows on their way to Spark and back: nothing is lost, and bounds never hide a row."""

import uuid
from datetime import date, time
from decimal import Decimal

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    IcebergType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestamptzNanoType,
    TimeType,
    UUIDType,
)

from icestream.iceberg.rows import VALUES_MAX, Bound, bound, for_spark, from_spark, to_spark
from icestream.schema import arrow_schema


def arrow_type(kind: IcebergType) -> pa.DataType:
    field = NestedField(field_id=1, name="x", field_type=kind, required=False)
    return arrow_schema(Schema(field)).field("x").type


UUIDS = [uuid.UUID(int=number) for number in (0, 77, 2**127 + 5, 2**128 - 1)]


def uuid_column(values: list[uuid.UUID | None]) -> pa.ChunkedArray:
    kind = arrow_type(UUIDType())
    storage = pa.array([v.bytes if v else None for v in values], pa.binary(16))
    return pa.chunked_array([pa.ExtensionArray.from_storage(kind, storage)])


def test_uuids_are_text_for_spark_and_come_back_the_same():
    """P7: also nulls, and a part of a longer column."""
    column = uuid_column([*UUIDS, None])
    text = for_spark(column)
    assert text.to_pylist() == [*map(str, UUIDS), None]
    assert from_spark(text, column.type).equals(column)
    assert for_spark(column.slice(2, 2)).to_pylist() == [str(UUIDS[2]), str(UUIDS[3])]


def test_large_and_fixed_columns_are_plain_for_spark():
    """P7: Spark's Arrow has neither."""
    assert for_spark(pa.chunked_array([pa.array(["a"], pa.large_string())])).type == pa.string()
    assert for_spark(pa.chunked_array([pa.array([b"a"], pa.large_binary())])).type == pa.binary()
    assert for_spark(pa.chunked_array([pa.array([b"ab"], pa.binary(2))])).type == pa.binary()


def test_nested_columns_come_back_in_the_tables_types():
    """P7: uuids inside lists, maps and structs, and nulls at every depth."""
    inner = StructType(
        NestedField(field_id=2, name="u", field_type=UUIDType(), required=False),
        NestedField(field_id=3, name="b", field_type=BinaryType(), required=False),
    )
    kind = StructType(
        NestedField(
            field_id=4,
            name="l",
            field_type=ListType(element_id=5, element_type=inner, element_required=False),
            required=False,
        ),
        NestedField(
            field_id=6,
            name="m",
            field_type=MapType(key_id=7, key_type=StringType(), value_id=8, value_type=UUIDType()),
            required=False,
        ),
    )
    one = str(UUIDS[2])
    read = pa.array(
        [
            {"l": [{"u": one, "b": b"x"}, None, {"u": None, "b": None}], "m": [("k", one)]},
            None,
            {"l": None, "m": None},
            {"l": [], "m": []},
        ],
        pa.struct(
            [
                ("l", pa.list_(pa.struct([("u", pa.string()), ("b", pa.binary())]))),
                ("m", pa.map_(pa.string(), pa.string())),
            ]
        ),
    )
    wanted = arrow_type(kind)
    found = from_spark(pa.chunked_array([read]), wanted)
    assert found.type == wanted
    rows = found.to_pylist()
    assert rows[0]["l"] == [{"u": UUIDS[2], "b": b"x"}, None, {"u": None, "b": None}]
    assert rows[0]["m"] == [("k", UUIDS[2])]
    assert rows[1:] == [None, {"l": None, "m": None}, {"l": [], "m": []}]


def test_few_keys_are_told_by_value_and_many_by_their_range():
    """P7: values go over in a form that Iceberg understands."""
    few = pa.chunked_array([pa.array([date(2024, 1, 2), date(2023, 1, 1), date(2024, 1, 2)])])
    assert bound(few) == Bound(values=["2024-01-02", "2023-01-01"])
    numbers = pa.chunked_array([pa.array([Decimal(n) for n in range(VALUES_MAX + 1)])])
    assert bound(numbers) == Bound(values=["0", str(VALUES_MAX)], ranged=True)


def test_keys_that_bounds_could_hide_have_none():
    """P7: nulls match without being compared, and readers order uuids otherwise than writers."""
    assert bound(pa.chunked_array([pa.array([1, None])])) is None
    assert bound(uuid_column(list(UUIDS))) is None
    many = pa.chunked_array([pa.array([float(n) for n in range(VALUES_MAX + 1)])])
    assert bound(many) is None
    assert arrow_type(LongType()) == pa.int64()


def test_types_that_spark_lacks_go_over_as_text_and_come_back_the_same_at_every_depth():
    """E11: uuid, time, nanoseconds; in structs and lists, and in parts of them."""
    inner = StructType(
        NestedField(1, "u", UUIDType(), required=False),
        NestedField(2, "t", TimeType(), required=False),
        NestedField(3, "n", TimestampNanoType(), required=False),
        NestedField(4, "z", TimestamptzNanoType(), required=False),
    )
    texts = pa.struct([(name, pa.string()) for name in "utnz"])
    kind = arrow_type(inner)
    leaves = [
        uuid_column([*UUIDS[:3], None]).chunk(0),
        pa.array([time(0), time(23, 59, 59, 999999), None, time(1)], kind.field("t").type),
        pa.array([0, -1, 1_700_000_000_123_456_789, None], kind.field("n").type),
        pa.array([0, -1, 1_700_000_000_123_456_789, None], kind.field("z").type),
    ]
    structs = pa.StructArray.from_arrays(
        leaves, fields=list(kind), mask=pa.array([False, False, False, True])
    )
    offsets = pa.array([0, 1, 3, 3, 4], pa.int64())
    nested = arrow_type(ListType(element_id=9, element_type=inner, element_required=False))
    lists = pa.LargeListArray.from_arrays(offsets, structs, type=nested)
    for column, plain in (
        (structs, texts),
        (lists, pa.list_(texts)),
        (lists[1:3], pa.list_(texts)),
    ):
        over = to_spark(pa.chunked_array([column]), plain)
        assert over.type == plain
        back = from_spark(over, column.type)
        assert stored(back.combine_chunks()) == stored(column)


def stored(column: pa.Array) -> list[object]:
    """Values with uuids as bytes, which Arrow shows otherwise inside of structs."""
    return [str(value) for value in column.to_pylist()]


def test_fields_of_structs_find_their_place_by_name():
    """E11: a table's struct may have them in another order, and more of them."""
    wanted = pa.struct([("b", pa.int64()), ("more", pa.string()), ("a", pa.large_string())])
    column = pa.chunked_array([pa.array([{"a": "x", "b": 1}, None])])
    assert from_spark(column, wanted, by_name=True).to_pylist() == [
        {"b": 1, "more": None, "a": "x"},
        None,
    ]
