"""What a table must become to take a source's columns, and under which names it has them."""

import json

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
    UUIDType,
)

from icestream.change import AT, OP
from icestream.errors import SchemaRejected
from icestream.schema import (
    Change,
    Column,
    TableShape,
    arrow_schema,
    declared_shape,
    distinct_columns,
    evolution,
    gaps,
    grown,
    new_schema,
    refuse_doubles,
    renamed_type,
    source_schema,
    table_names,
)


def table(*fields: NestedField, key: int | None = None) -> Schema:
    return Schema(*fields, identifier_field_ids=[key] if key else [])


def field(number: int, name: str, kind: IcebergType, required: bool = False) -> NestedField:
    return NestedField(field_id=number, name=name, field_type=kind, required=required)


def struct(*fields: NestedField) -> StructType:
    return StructType(*fields)


def list_of(kind: IcebergType, number: int = 50, required: bool = False) -> ListType:
    return ListType(element_id=number, element_type=kind, element_required=required)


def map_of(key: IcebergType, value: IcebergType) -> MapType:
    return MapType(key_id=60, key_type=key, value_id=61, value_type=value, value_required=False)


def steps(schema: Schema, *columns: Column, key: tuple[str, ...] = ()) -> list[tuple[object, ...]]:
    found = evolution(schema, columns, key, "shop.orders")
    return [(step.change, step.field_id, step.column.name, step.column.type) for step in found]


HELD = [
    (LongType(), IntegerType()),
    (DoubleType(), FloatType()),
    (DoubleType(), IntegerType()),
    (DecimalType(12, 2), DecimalType(10, 2)),
    (DecimalType(12, 4), DecimalType(10, 2)),
    (DecimalType(5, 5), DecimalType(4, 4)),
    (DecimalType(19, 0), LongType()),
    (DecimalType(10, 0), IntegerType()),
    (StringType(), UUIDType()),
    (StringType(), struct(field(1, "a", LongType()))),
    (BinaryType(), FixedType(4)),
    (DateType(), DateType()),
]
WIDENED = [
    (IntegerType(), LongType(), LongType()),
    (FloatType(), DoubleType(), DoubleType()),
    (FloatType(), IntegerType(), DoubleType()),
    (DecimalType(10, 2), DecimalType(12, 2), DecimalType(12, 2)),
    (DecimalType(10, 4), DecimalType(10, 2), DecimalType(12, 4)),
    (DecimalType(9, 2), LongType(), DecimalType(21, 2)),
]
REFUSED = [
    (IntegerType(), StringType()),
    (LongType(), DecimalType(20, 0)),
    (LongType(), DoubleType()),
    (DoubleType(), LongType()),
    (FloatType(), LongType()),
    (DecimalType(10, 2), DecimalType(10, 3)),
    (DecimalType(38, 20), DecimalType(38, 2)),
    (DecimalType(10, 2), DoubleType()),
    (TimestampType(), TimestamptzType()),
    (DateType(), TimestampType()),
    (BooleanType(), IntegerType()),
    (FixedType(4), FixedType(5)),
    (LongType(), list_of(LongType())),
    (list_of(LongType()), struct(field(1, "a", LongType()))),
    (map_of(IntegerType(), StringType()), map_of(LongType(), StringType())),
]


@pytest.mark.parametrize(("have", "want"), HELD, ids=str)
def test_a_column_that_is_wide_enough_is_left_alone(have: IcebergType, want: IcebergType) -> None:
    """I11: it takes every value of the source already."""
    schema = table(field(1, "x", have))
    assert steps(schema, Column(name="x", type=want)) == []
    assert gaps(schema, [Column(name="x", type=want)]) == []


@pytest.mark.parametrize(("have", "want", "becomes"), WIDENED, ids=str)
def test_a_column_is_widened_as_far_as_iceberg_can(
    have: IcebergType, want: IcebergType, becomes: IcebergType
) -> None:
    """I11: int to long, float to double, decimal precision at the same scale."""
    schema = table(field(1, "x", have))
    assert steps(schema, Column(name="x", type=want)) == [(Change.WIDEN, 1, "x", becomes)]
    assert gaps(schema, [Column(name="x", type=want)]) == [Column(name="x", type=want)]


@pytest.mark.parametrize(("have", "want"), REFUSED, ids=str)
def test_what_is_not_safe_is_refused_with_both_types(have: IcebergType, want: IcebergType) -> None:
    """I11: the error names column and types and says what to do; it is a gap until then."""
    schema = table(field(1, "x", have))
    with pytest.raises(SchemaRejected, match=r"column x(\.key)? of table shop\.orders") as caught:
        steps(schema, Column(name="x", type=want))
    assert caught.value.hint
    assert "has it as" in str(caught.value.detail)
    assert gaps(schema, [Column(name="x", type=want)]) == [Column(name="x", type=want)]


def test_columns_are_added_at_every_depth() -> None:
    """I11: to the table, to a struct, to the structs in a list and in a map's values."""
    inner = struct(field(3, "a", LongType()))
    schema = table(
        field(1, "id", LongType(), True),
        field(2, "s", inner),
        field(4, "l", list_of(inner, 5)),
        field(8, "m", map_of(StringType(), inner)),
        key=1,
    )
    wide = struct(field(1, "a", LongType()), field(2, "b", StringType(), True))
    columns = [
        Column(name="id", type=LongType()),
        Column(name="s", type=wide),
        Column(name="l", type=list_of(wide)),
        Column(name="m", type=map_of(StringType(), wide)),
        Column(name="new.dot", type=wide, required=True),
    ]
    assert steps(schema, *columns) == [
        (Change.ADD, 2, "b", StringType()),
        (Change.ADD, 5, "b", StringType()),
        (Change.ADD, 61, "b", StringType()),
        (Change.ADD, None, "new.dot", wide),
    ]
    assert [column.name for column in gaps(schema, columns)] == ["s", "l", "m", "new.dot"]


def test_required_columns_become_optional_but_for_the_key() -> None:
    """I11: also inside structs and lists, and for what the source has no longer."""
    schema = table(
        field(1, "id", LongType(), True),
        field(2, "part", LongType(), True),
        field(3, "kept", LongType(), True),
        field(4, "free", LongType(), True),
        field(5, "lost", LongType(), True),
        field(6, "s", struct(field(7, "a", LongType(), True), field(8, "b", LongType(), True))),
        field(9, "l", list_of(LongType(), 10, required=True)),
        field(11, "silent", LongType()),
        key=1,
    )
    columns = [
        Column(name="id", type=LongType()),
        Column(name="part", type=LongType()),
        Column(name="kept", type=LongType(), required=True),
        Column(name="free", type=LongType()),
        Column(name="s", type=struct(field(1, "a", LongType()))),
        Column(name="l", type=list_of(LongType())),
    ]
    found = gaps(schema, columns, ["part"])
    assert [(column.name, column.absent) for column in found] == [
        ("free", False),
        ("s", False),
        ("l", False),
        ("lost", True),
    ]
    changes = steps(schema, *found, key=("part",))
    assert [change[:2] for change in changes] == [
        (Change.LOOSEN, 4),
        (Change.LOOSEN, 7),
        (Change.LOOSEN, 8),
        (Change.LOOSEN, 10),
        (Change.LOOSEN, 5),
    ]


def test_a_shape_grows_as_a_table_does() -> None:
    """E11, I11: after that nothing is lacking; what a table would refuse is refused."""
    inner = struct(field(1, "a", IntegerType(), True), field(2, "gone", LongType(), True))
    shape = TableShape(
        columns=[
            Column(name="id", type=IntegerType(), required=True),
            Column(name="n", type=IntegerType(), required=True),
            Column(name="s", type=inner),
            Column(name="l", type=list_of(inner)),
            Column(name="m", type=map_of(StringType(), inner)),
        ],
        key=["id"],
    )
    wide = struct(field(1, "a", LongType()), field(2, "b", StringType(), True))
    columns = [
        Column(name="id", type=LongType()),
        Column(name="n", type=IntegerType(), absent=True),
        Column(name="s", type=wide),
        Column(name="l", type=list_of(wide)),
        Column(name="m", type=map_of(StringType(), wide)),
        Column(name="new", type=wide, required=True),
        Column(name="never", type=LongType(), absent=True),
    ]
    there = grown(shape, columns, "t")
    assert [column.name for column in there.columns] == ["id", "n", "s", "l", "m", "new"]
    assert [column.required for column in there.columns] == [True, *[False] * 5]
    present = [column for column in columns if not column.absent]
    assert gaps(new_schema(there), present, ["id"]) == []
    with pytest.raises(SchemaRejected):
        grown(shape, [Column(name="n", type=StringType())], "t")


def test_a_declared_type_counts_unless_the_column_holds_all_of_it() -> None:
    """E11, Mend k1: text for a number; what has grown stays, and the key stays required."""
    shape = TableShape(
        columns=[
            Column(name="id", type=LongType(), required=True),
            Column(name="v", type=LongType()),
            Column(name="s", type=StringType()),
            Column(name="n", type=IntegerType()),
        ],
        key=["id"],
    )
    types = {"v": StringType(), "s": IntegerType(), "n": LongType(), "new": LongType()}
    there = declared_shape(shape, {**types, "id": IntegerType()}, "t")
    assert there == TableShape(
        columns=[
            Column(name="id", type=LongType(), required=True),
            Column(name="v", type=StringType()),
            Column(name="s", type=StringType()),
            Column(name="n", type=LongType()),
        ],
        key=["id"],
    )
    assert declared_shape(shape, {}, "t") == shape
    turned = declared_shape(shape, {"id": StringType()}, "t")
    assert turned.columns[0] == Column(name="id", type=StringType(), required=True)


def test_an_absent_column_that_the_table_lacks_too_is_not_added() -> None:
    """I11: somebody may have dropped it meanwhile."""
    schema = table(field(1, "id", LongType()))
    assert steps(schema, Column(name="lost", type=LongType(), absent=True)) == []


def mapping(*entries: dict[str, object]) -> str:
    return json.dumps(list(entries))


def names(number: int, *aliases: str, fields: list[dict[str, object]] = []) -> dict[str, object]:
    return {"field-id": number, "names": list(aliases), "fields": fields}


SHOP = table(
    field(1, "id", LongType(), True),
    field(2, "customer_id", LongType()),
    field(3, "home", struct(field(4, "town", StringType()), field(5, "zip", StringType()))),
    field(6, "stops", list_of(struct(field(8, "at", LongType())), 7)),
    key=1,
)


def test_without_a_mapping_the_schema_is_the_tables_own() -> None:
    """I11: nothing changes, nothing is copied."""
    assert source_schema(SHOP, None) is SHOP
    assert source_schema(SHOP, "[]") is SHOP


def test_a_mapped_column_has_the_sources_name_at_every_depth() -> None:
    """I11: name mapping first, then the name."""
    text = mapping(
        names(1, "id"),
        names(2, "cust_id"),
        names(3, "address", fields=[names(4, "city")]),
        names(
            6, "stops", fields=[{"field-id": 7, "names": ["element"], "fields": [names(8, "t")]}]
        ),
    )
    seen = source_schema(SHOP, text)
    assert [each.name for each in seen.fields] == ["id", "cust_id", "address", "stops"]
    assert seen.find_field("address.city").field_id == 4
    assert seen.find_field("address.zip").field_id == 5
    assert seen.find_field("stops.element.t").field_id == 8
    assert seen.identifier_field_ids == [1]
    known = [Column(name=each.name, type=each.field_type) for each in seen.fields]
    assert gaps(seen, known) == []
    assert table_names(SHOP, text, ["cust_id", "id", "other"]) == {
        "cust_id": "customer_id",
        "id": "id",
    }


def test_of_several_names_the_one_that_the_source_uses_is_taken() -> None:
    """I11: known columns decide, the last one first; else a name that is not the table's own."""
    text = mapping(names(1, "id", "key"), names(2, "customer_id", "cust_id", "client"))
    assert source_schema(SHOP, text).find_field(2).name == "cust_id"
    known: dict[str, IcebergType] = {"client": LongType(), "customer_id": LongType()}
    assert source_schema(SHOP, text, known).find_field(2).name == "customer_id"
    assert table_names(SHOP, text, ["key"]) == {"key": "id"}


def test_a_name_that_the_mapping_gives_to_another_column_does_not_reach_its_own() -> None:
    """I11: mapping first: the column that is called so in the table is left out."""
    schema = table(field(1, "a", LongType()), field(2, "b", StringType()))
    seen = source_schema(schema, mapping(names(1, "b")))
    assert [(each.field_id, each.name) for each in seen.fields] == [(1, "b")]


def test_two_columns_of_the_source_that_go_to_one_of_the_table_are_refused() -> None:
    """I11: one would overwrite the other; a column that is only said to be absent does no harm."""
    text = mapping(names(2, "cust_id", "client"))
    both = [Column(name="cust_id", type=LongType()), Column(name="client", type=LongType())]
    with pytest.raises(SchemaRejected, match="client and cust_id"):
        refuse_doubles(SHOP, text, both, "shop.orders")
    gone = Column(name="client", type=LongType(), absent=True)
    refuse_doubles(SHOP, text, [both[0], gone], "shop.orders")
    refuse_doubles(SHOP, None, both, "shop.orders")


def test_arrow_columns_are_renamed_without_touching_their_values() -> None:
    """I11: structs, lists and maps get the table's names inside as well."""
    point = struct(field(2, "x", LongType()), field(3, "u", UUIDType()))
    have = struct(field(1, "p", list_of(point)), field(9, "m", map_of(StringType(), point)))
    other = struct(field(2, "left", LongType()), field(3, "id", UUIDType()))
    want = struct(field(1, "points", list_of(other)), field(9, "by", map_of(StringType(), other)))
    arrow = pa.struct(list(arrow_schema(Schema(*have.fields))))
    found = renamed_type(arrow, have, want)
    assert [each.name for each in found] == ["points", "by"]
    assert [each.name for each in found.field(0).type.value_type] == ["left", "id"]
    assert [each.name for each in found.field(1).type.item_type] == ["left", "id"]
    assert renamed_type(found, want, have) == arrow


def test_a_new_tables_inner_fields_get_ids_of_their_own() -> None:
    """I10: sources number nested fields as they like."""
    inner = struct(field(1, "a", LongType()), field(1, "b", list_of(StringType(), 1)))
    shape = TableShape(
        columns=[Column(name="s", type=inner), Column(name="id", type=LongType())], key=["id"]
    )
    schema = new_schema(shape)
    assert len(schema._lazy_id_to_name) == 5
    assert [schema.find_column_name(number) for number in schema.identifier_field_ids] == ["id"]


CLASHES = [
    ([("v", LongType()), ("V", LongType())], "v and V"),
    ([("a.b", LongType()), ("a", struct(field(1, "b", LongType())))], "a.b and a.b"),
    ([("s", struct(field(1, "x", LongType()), field(2, "X", LongType())))], "s.x and s.X"),
    ([("l", list_of(struct(field(1, "x", LongType()), field(2, "X", LongType()))))], "element.X"),
]


@pytest.mark.parametrize(("columns", "words"), CLASHES)
def test_names_that_readers_do_not_tell_apart_make_no_table(columns, words):
    """I10, Mend a5: Spark cannot read such a table at all, whatever source has the columns."""
    wanted = [Column(name=name, type=kind) for name, kind in columns]
    with pytest.raises(SchemaRejected, match="cannot be told apart") as caught:
        new_schema(TableShape(columns=wanted, key=[]), "shop.orders")
    assert words in str(caught.value) and "shop.orders" in str(caught.value)
    # The way out that the hint names.
    assert new_schema(TableShape(columns=wanted[:1], key=[])) if len(wanted) > 1 else True


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (field(1, "v", LongType()), Column(name="V", type=LongType())),
        (
            field(1, "s", struct(field(2, "x", LongType()))),
            Column(name="s", type=struct(field(1, "X", LongType()))),
        ),
        (
            field(1, "a", struct(field(2, "b", LongType()))),
            Column(name="A.B", type=LongType()),
        ),
    ],
)
def test_no_column_is_added_that_readers_take_for_another(have, want):
    """I10, I11, Mend a5: at any depth."""
    with pytest.raises(SchemaRejected, match="cannot be told apart"):
        evolution(table(have), [want], (), "shop.orders")


@pytest.mark.parametrize("name", ["_file", "_POS", "_row_id", "_partition", OP, AT, "a\0b"])
def test_no_column_has_a_name_that_readers_or_the_engine_give_themselves(name):
    """I10, Mend a5: Spark reads no table with such a column; inside a struct it is fine.

    A JSON record may name its member like the column of the engine that holds the operation.
    """
    column = Column(name=name, type=LongType())
    with pytest.raises(SchemaRejected, match="no column may be called"):
        new_schema(TableShape(columns=[column], key=[]), "shop.orders")
    with pytest.raises(SchemaRejected, match="no column may be called"):
        evolution(table(field(1, "v", LongType())), [column], (), "shop.orders")
    assert distinct_columns([column, Column(name="v", type=LongType())])[0].name == "v"
    inner = Column(name="s", type=struct(field(1, name, LongType())))
    assert new_schema(TableShape(columns=[inner], key=[]))


@pytest.mark.parametrize("kind", [FloatType(), DoubleType()])
def test_a_key_of_inexact_numbers_is_refused_by_name(kind):
    """I8: Iceberg deletes no row by such a value."""
    columns = [Column(name="price", type=kind), Column(name="id", type=LongType())]
    with pytest.raises(SchemaRejected, match="orders cannot be identified by column price"):
        new_schema(TableShape(columns=columns, key=["price"]), "shop.orders")
    assert new_schema(TableShape(columns=columns, key=["id"]))


def test_a_table_that_has_such_names_already_is_left_as_it_is():
    """I10: it was made by someone who knows how to read it."""
    schema = table(field(1, "v", LongType()), field(2, "V", LongType()))
    assert steps(schema, Column(name="w", type=LongType())) == [(Change.ADD, None, "w", LongType())]
