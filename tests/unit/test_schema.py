"""Text is cast to a column's type exactly, or refused without showing the value."""

import json
import pickle
from datetime import UTC, date, datetime, time
from decimal import Decimal
from uuid import UUID

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
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import ConfigInvalid, SchemaRejected
from icestream.schema import (
    Column,
    SchemaGap,
    TableShape,
    arrow_schema,
    cast_text,
    infer_number,
    joined_shapes,
    new_schema,
    parse_type,
    schema_from_json,
)


def list_of(kind: IcebergType) -> ListType:
    return ListType(element_id=2, element=kind, element_required=False)


def struct_of(kind: IcebergType) -> StructType:
    return StructType(NestedField(3, "x", kind, required=False))


STRUCT = StructType(
    NestedField(3, "a", LongType(), required=False),
    NestedField(4, "b", list_of(DoubleType()), required=False),
)
MAP = MapType(5, StringType(), 6, DoubleType(), value_required=False)
ID = "00112233-4455-6677-8899-aabbccddeeff"


def cast(kind: IcebergType, *texts: str | None) -> pa.Array:
    schema = Schema(NestedField(1, "c", kind, required=False))
    arrow_type = arrow_schema(schema).field("c").type
    result = cast_text(pa.array(texts, pa.string()), "c", kind, arrow_type)
    assert result.type == arrow_type
    return result


EXACT = [
    (BooleanType(), "true", True),
    (IntegerType(), "-2147483648", -(2**31)),
    (LongType(), "9223372036854775807", 2**63 - 1),
    (LongType(), "-0", 0),
    (FloatType(), "0.1", 0.10000000149011612),
    (FloatType(), "16777216", 16777216.0),
    (FloatType(), "3.4028235e38", 3.4028234663852886e38),
    (FloatType(), "Infinity", float("inf")),
    (DoubleType(), "0.1", 0.1),
    (DoubleType(), "1e5", 1e5),
    (DoubleType(), "9007199254740992", 2.0**53),
    (DoubleType(), "0.30000000000000004", 0.30000000000000004),
    (DoubleType(), "100000000000000000000", 1e20),
    (DoubleType(), "1.7976931348623157e+308", 1.7976931348623157e308),
    (DoubleType(), "5e-324", 5e-324),
    (DoubleType(), "-Infinity", float("-inf")),
    (DoubleType(), "-0.0", 0.0),
    (DecimalType(10, 2), "14.20", Decimal("14.20")),
    (DecimalType(10, 2), "14.2", Decimal("14.20")),
    (DecimalType(10, 2), "1.000", Decimal("1.00")),
    (DecimalType(10, 2), "1e2", Decimal("100.00")),
    (DecimalType(38, 0), "9" * 38, Decimal("9" * 38)),
    (DateType(), "2020-02-29", date(2020, 2, 29)),
    (TimeType(), "23:59:59.999999", time(23, 59, 59, 999999)),
    (TimeType(), "12:00", time(12)),
    (TimestampType(), "2020-01-02T03:04:05.000006", datetime(2020, 1, 2, 3, 4, 5, 6)),
    (TimestamptzType(), "2020-01-02T03:04:05Z", datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)),
    (TimestamptzType(), "2020-01-02T03:04:05+02:00", datetime(2020, 1, 2, 1, 4, 5, tzinfo=UTC)),
    (StringType(), "", ""),
    (StringType(), 'ä "quoted" \\ text', 'ä "quoted" \\ text'),
    (UUIDType(), ID, UUID(ID)),
    (UUIDType(), ID.replace("-", "").upper(), UUID(ID)),
    (BinaryType(), "\\x00ff10", b"\x00\xff\x10"),
    (BinaryType(), "\\x", b""),
    (FixedType(2), "\\x00ff", b"\x00\xff"),
    (list_of(LongType()), "[1, null, 3]", [1, None, 3]),
    (list_of(LongType()), "[]", []),
    (list_of(DoubleType()), "[0.1, 1e5]", [0.1, 1e5]),
    (list_of(FloatType()), "[0.5]", [0.5]),
    (list_of(DecimalType(10, 2)), "[1.50]", [Decimal("1.50")]),
    (list_of(StringType()), r'["a\n\u00e4", "\\x00", ""]', ["a\nä", "\\x00", ""]),
    (list_of(BooleanType()), "[true, false]", [True, False]),
    (list_of(DateType()), '["2020-02-29"]', [date(2020, 2, 29)]),
    (list_of(TimeType()), '["12:00:00"]', [time(12)]),
    (list_of(TimestampType()), '["2020-01-02T03:04:05"]', [datetime(2020, 1, 2, 3, 4, 5)]),
    (list_of(UUIDType()), f'["{ID}"]', [UUID(ID)]),
    (list_of(BinaryType()), r'["\\x00ff"]', [b"\x00\xff"]),
    (list_of(list_of(StringType())), '[["a"], [], null]', [["a"], [], None]),
    (STRUCT, '{"b": [1.5], "a": 1}', {"a": 1, "b": [1.5]}),
    (STRUCT, '{"a": null}', {"a": None, "b": None}),
    (STRUCT, "{}", {"a": None, "b": None}),
    (MAP, "{}", []),
    (MAP, '{"x": 1.5, "y": null}', [("x", 1.5), ("y", None)]),
]

REFUSED = [
    (BooleanType(), "yes"),
    (IntegerType(), "2147483648"),
    (LongType(), "9223372036854775808"),
    (LongType(), "1.0"),
    (LongType(), "1e2"),
    (LongType(), " 1"),
    (LongType(), ""),
    (LongType(), "NaN"),
    (FloatType(), "16777217"),
    (FloatType(), "1.23456789012"),
    (FloatType(), "1e39"),
    (FloatType(), "1e-60"),
    (DoubleType(), "9007199254740993"),
    (DoubleType(), "0.12345678901234567"),
    (DoubleType(), "12345678901234567890123"),
    (DoubleType(), "1e400"),
    (DoubleType(), "1e-400"),
    (DoubleType(), "abc"),
    (DecimalType(10, 2), "1.005"),
    (DecimalType(10, 2), "123456789.00"),
    (DecimalType(10, 2), "NaN"),
    (DecimalType(10, 2), "1e-3"),
    (DecimalType(38, 0), "1" * 39),
    (DateType(), "2020-02-30"),
    (DateType(), "2020-01-01T00:00:00"),
    (DateType(), "infinity"),
    (TimeType(), "24:00:00"),
    (TimeType(), "12:00:00.1234567"),
    (TimeType(), "12:00:00Z"),
    (TimestampType(), "2020-01-01T00:00:00.1234567"),
    (TimestampType(), "2020-01-01T00:00:00Z"),
    (TimestamptzType(), "2020-01-01T00:00:00"),
    (UUIDType(), "00112233"),
    (UUIDType(), ID.replace("0", "g")),
    (BinaryType(), "00ff"),
    (BinaryType(), "\\x0"),
    (BinaryType(), "\\x0 0f"),
    (BinaryType(), "\\xgg"),
    (FixedType(2), "\\x00"),
    (FixedType(2), "\\x000000"),
    (list_of(LongType()), "[1.5]"),
    (list_of(LongType()), "5"),
    (list_of(LongType()), "{}"),
    (list_of(LongType()), "[1"),
    (list_of(IntegerType()), "[3000000000]"),
    (list_of(DoubleType()), "[9007199254740993]"),
    (list_of(DoubleType()), "[0.12345678901234567890]"),
    (list_of(FloatType()), "[16777217]"),
    (list_of(DecimalType(10, 2)), "[1.505]"),
    (list_of(BinaryType()), '["00ff"]'),
    (list_of(UUIDType()), '["zz"]'),
    (list_of(TimestampType()), '["2020-01-01T00:00:00.1234567"]'),
    # Mend h8: as the same texts alone.
    (list_of(TimestampType()), '["2020-01-01T00:00:00+02:00"]'),
    (list_of(TimestamptzType()), '["2020-01-01T00:00:00"]'),
    (struct_of(TimestampType()), '{"x": "2020-01-01T00:00:00Z"}'),
    (struct_of(list_of(TimestamptzType())), '{"x": ["2020-01-01T00:00:00"]}'),
    (STRUCT, '{"a": 1, "unknown": 2}'),
    (STRUCT, '{"b": [9007199254740993]}'),
    (STRUCT, "[1]"),
    (MAP, '{"x": "1"}x'),
]


@pytest.mark.parametrize(("kind", "text", "value"), EXACT, ids=str)
def test_a_value_that_fits_is_cast_exactly(kind, text, value):
    """I11: what is safe goes through, nulls stay nulls."""
    assert cast(kind, text, None, text).to_pylist() == [value, None, value]


@pytest.mark.parametrize(("kind", "text"), REFUSED, ids=str)
def test_a_value_that_does_not_fit_is_refused(kind, text):
    """I11: never rounded, cut or made null; what is not safe stops with a clear error."""
    with pytest.raises(SchemaRejected, match="column c does not fit its type") as caught:
        cast(kind, None, text)
    assert caught.value.detail == "1 of 2 values do not fit."
    assert "columns: {c: ...}" in caught.value.hint


def test_not_a_number_is_a_double_and_a_float():
    """C5: NaN comes as a string in columns of floats."""
    for kind in (DoubleType(), FloatType()):
        (value,) = cast(kind, "NaN").to_pylist()
        assert value != value


@pytest.mark.parametrize(
    "kind",
    [
        *[LongType(), DoubleType(), FloatType(), DecimalType(10, 2), BooleanType(), DateType()],
        *[TimeType(), TimestampType(), TimestamptzType(), UUIDType(), BinaryType(), FixedType(4)],
        *[list_of(LongType()), list_of(DoubleType()), STRUCT, MAP],
    ],
    ids=str,
)
def test_an_error_never_shows_the_value(kind):
    """I11: rows are nobody's business in a log, neither in the message nor in the detail."""
    secret = "hunter2-9007199254740993"
    with pytest.raises(SchemaRejected) as caught:
        cast(kind, secret)
    assert "hunter2" not in str(caught.value)


def test_the_number_of_values_that_do_not_fit_is_told():
    """I11: an operator learns whether it is one row or all of them."""
    with pytest.raises(SchemaRejected) as caught:
        cast(LongType(), *["1", "x"] * 10, "2.5")
    assert caught.value.detail == "11 of 21 values do not fit."


@pytest.mark.parametrize("kind", [kind for kind, _, _ in EXACT], ids=str)
def test_no_values_and_only_nulls_are_cast(kind):
    """I11: an empty batch and a column of nulls fit every type."""
    assert cast(kind).to_pylist() == []
    assert cast(kind, None, None).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-25"], LongType()),
        (["-9223372036854775808", "9223372036854775807"], LongType()),
        (["9223372036854775808"], DecimalType(38, 0)),
        (["1.5", "2"], DoubleType()),
        (["1e5"], DoubleType()),
        (["1.0e5"], DoubleType()),
        (["1.50"], DecimalType(38, 2)),
        (["1.50", "1.234"], DecimalType(38, 3)),
        (["1.50", "7"], DecimalType(38, 2)),
        ([], LongType()),
    ],
)
def test_the_type_of_json_numbers_holds_all_of_them(texts, kind):
    """I10: a table is created from values when the source carries no types."""
    assert infer_number(pa.array(texts, pa.string())) == kind
    assert cast(kind, *texts).null_count == 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("decimal(20,4)", DecimalType(20, 4)),
        (" Decimal(20, 4) ", DecimalType(20, 4)),
        ("TIMESTAMPTZ", TimestamptzType()),
        ("int", IntegerType()),
        ("fixed[4]", FixedType(4)),
        ("uuid", UUIDType()),
    ],
)
def test_a_type_is_named_as_iceberg_does(text, kind):
    """I10: types in the configuration."""
    assert parse_type(text) == kind


@pytest.mark.parametrize("text", ["varchar", "", "decimal", "decimal(39,0)", "list<int>", "int,"])
def test_a_type_that_iceberg_does_not_know_is_refused_with_the_known_ones(text):
    """U3: a wrong configuration says what would be right."""
    with pytest.raises(ConfigInvalid, match="there is no type") as caught:
        parse_type(text)
    assert "timestamptz" in caught.value.hint


def test_a_new_schema_has_the_key_as_required_identifier():
    """I10: identifier fields from the source's key."""
    columns = [Column(name="a", type=StringType()), Column(name="id", type=LongType())]
    schema = new_schema(TableShape(columns=columns, key=["id"]))
    assert schema.identifier_field_names() == {"id"}
    assert [(f.field_id, f.name, f.required) for f in schema.fields] == [
        (1, "a", False),
        (2, "id", True),
    ]


def test_a_schema_survives_its_json():
    """I10: workers get the schema as Iceberg's library prints it."""
    columns = [Column(name="id", type=LongType(), required=True), Column(name="s", type=STRUCT)]
    schema = new_schema(TableShape(columns=columns, key=["id"]))
    assert schema_from_json(json.dumps(json.loads(schema.model_dump_json()))) == schema


def test_a_schema_gap_keeps_its_columns_through_pickling():
    """I11: a worker tells the coordinator which columns to add."""
    gap = pickle.loads(pickle.dumps(SchemaGap("t", [Column(name="x", type=LongType())])))
    assert (gap.table, [column.name for column in gap.columns]) == ("t", ["x"])
    assert str(gap) == "table t lacks x"


def test_shapes_seen_in_two_places_are_joined():
    """K7: the types of a new table hold what all records have."""

    def shape(**kinds):
        columns = [Column(name=name, type=kind) for name, kind in kinds.items()]
        return TableShape(columns=columns, key=["id"])

    one = {"t": shape(id=LongType(), a=LongType(), b=StringType())}
    other = {"t": shape(id=LongType(), a=DoubleType(), c=BooleanType()), "u": shape(x=LongType())}
    joined = joined_shapes(one, other)
    found = {column.name: str(column.type) for column in joined["t"].columns}
    assert found == {"id": "long", "a": "double", "b": "string", "c": "boolean"}
    assert joined["u"] == other["u"]
    assert list(joined["t"].key) == ["id"]
