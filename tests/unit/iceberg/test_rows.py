"""Keys and rows on their way to Spark and back: nothing is lost, and bounds never hide a row."""

import uuid
from datetime import date
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
    UUIDType,
)

from icestream.iceberg.rows import VALUES_MAX, Bound, bound, for_spark, from_spark
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
