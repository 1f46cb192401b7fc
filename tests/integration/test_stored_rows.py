"""Rows as the table holds them, by their keys: what a source needs when it is not sent a value."""

import datetime as dt
import uuid
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
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
from pyspark.sql import SparkSession

from icestream.change import Op
from icestream.errors import ConfigInvalid, HistoryLost
from icestream.frontier import Frontier
from icestream.iceberg.rows import VALUES_MAX
from icestream.schema import NAME_MAPPING, arrow_schema, new_schema
from icestream.sinks.iceberg.options import TableOptions
from tests.integration.hand_fed import HandFed, array, gone, put, shape
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import RestCatalog, S3Server

MIDNIGHT = dt.datetime(2024, 2, 29, 0, 0, 0, 1)
KEYS: list[tuple[IcebergType, list[Any]]] = [
    (IntegerType(), [1, -2, 3]),
    (LongType(), [1, 2**60, -(2**60)]),
    (StringType(), ["a", "", "o'x\\\"é"]),
    (UUIDType(), [uuid.UUID(int=1), uuid.UUID(int=2**127 + 5), uuid.UUID(int=77)]),
    (BinaryType(), [b"a", b"", b"\xff\x00"]),
    (DecimalType(12, 3), [Decimal("1.500"), Decimal("-0.001"), Decimal("999999999.999")]),
    (DecimalType(38, 0), [Decimal(1), Decimal(10**37), Decimal(-(10**37))]),
    (DateType(), [dt.date(1969, 12, 31), dt.date(2024, 2, 29), dt.date(1, 1, 2)]),
    (TimestampType(), [MIDNIGHT, MIDNIGHT.replace(year=1960), MIDNIGHT.replace(month=3)]),
    (
        TimestamptzType(),
        [
            d.replace(tzinfo=dt.UTC)
            for d in (MIDNIGHT, MIDNIGHT.replace(year=1960), dt.datetime.max)
        ],
    ),
    (BooleanType(), [True, False, None]),
]


def keys(fed: HandFed, table: str, **columns: Sequence[Any]) -> pa.Table:
    """Keys in the types that the source hands rows over with."""
    fields = arrow_schema(new_schema(fed.shapes[table]))
    return pa.table({name: array(v, fields.field(name).type) for name, v in columns.items()})


def found(fed: HandFed, table: str, wanted: pa.Table, *columns: str) -> list[dict[str, Any]]:
    rows = fed.sink.stored(table, wanted, columns)
    fields = arrow_schema(new_schema(fed.shapes[table]))
    assert rows.schema.names == [*wanted.column_names, *columns]
    assert rows.schema.types == [fields.field(name).type for name in rows.schema.names]
    return sorted(rows.to_pylist(), key=lambda row: str([row[n] for n in wanted.column_names]))


@pytest.mark.parametrize(("kind", "values"), KEYS, ids=lambda value: str(value)[:20])
def test_a_row_is_found_by_a_key_of_any_type(
    spark: SparkSession, embedded: dict[str, str], kind: IcebergType, values: list[Any]
) -> None:
    """P7: the stored row after updates and deletes; keys that are not there are left out."""
    values = [value for value in values if value is not None]
    fed = HandFed(spark, embedded, {"t": shape(["k"], k=kind, v=StringType(), w=LongType())})
    fed.commit({"t": [put(k=value, v=f"old {n}", w=n) for n, value in enumerate(values)]})
    changes = [put(k=values[0], v="new", w=9), gone(k=values[1])]
    fed.commit({"t": changes})
    rows = fed.sink.stored("t", keys(fed, "t", k=values), ["v"]).to_pylist()
    expected = [
        (values[0], "new"),
        *((value, f"old {n + 2}") for n, value in enumerate(values[2:])),
    ]
    assert sorted((str(row["k"]), row["v"]) for row in rows) == sorted(
        (str(value), v) for value, v in expected
    )
    assert found(fed, "t", keys(fed, "t", k=[values[1]]), "v") == []


def test_rows_with_any_uuid_are_found_and_deleted(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I8, P7: readers and Parquet order uuids differently; bounds would hide rows and deletes."""
    fed = HandFed(spark, embedded, {"t": shape(["k"], k=UUIDType(), v=StringType())}, namespace="s")
    low, middle, high = (uuid.UUID(int=number) for number in (1, 77, 2**127 + 5))
    fed.commit({"t": [(Op.INSERT, {"k": key, "v": "old"}) for key in (low, middle, high)]})
    fed.commit({"t": [put(k=middle, v="new"), gone(k=low)]})
    rows = {row["k"]: row["v"] for row in local.rows("s.t")}
    assert rows == {str(middle): "new", str(high): "old"}
    assert len(local.rows("s.t")) == len(rows)
    for key, value in rows.items():
        found = local.sql(f"SELECT v FROM {local.table('s.t')} WHERE k = '{key}'")
        assert found == [{"v": value}]


def test_a_key_that_readers_do_not_delete_by_is_refused(
    spark: SparkSession, embedded: dict[str, str]
) -> None:
    """I8: fixed bytes, which Spark compares wrongly, and floating point, which Iceberg forbids."""
    kinds = {"f": FixedType(3), "d": DoubleType()}
    for name in kinds:
        known = shape(["id"], id=LongType(), **kinds)
        fed = HandFed(spark, embedded, {"t": known}, equality_delete_by=[name])
        with pytest.raises(ConfigInvalid, match=f"cannot be deleted by column {name}"):
            fed.sink.prepare("t", lambda known=known: known)


def test_every_type_of_column_comes_back_as_it_was_written(
    spark: SparkSession, embedded: dict[str, str]
) -> None:
    """P7: also those that Spark has another type for, inside lists, maps and structs too."""
    inner = StructType(
        NestedField(field_id=1, name="A b", field_type=UUIDType(), required=False),
        NestedField(field_id=2, name="n", field_type=DecimalType(9, 2), required=False),
    )
    uuids = ListType(element_id=1, element_type=UUIDType(), element_required=False)
    texts = MapType(
        key_id=1, key_type=StringType(), value_id=2, value_type=BinaryType(), value_required=False
    )
    kinds: dict[str, IcebergType] = {
        "id": LongType(),
        "u": UUIDType(),
        "f": FixedType(2),
        "b": BinaryType(),
        "d": DecimalType(20, 4),
        "x": DoubleType(),
        "ts": TimestampType(),
        "tz": TimestamptzType(),
        "l": ListType(element_id=1, element_type=StringType(), element_required=False),
        "m": texts,
        "s": StructType(
            NestedField(field_id=1, name="when", field_type=DateType(), required=False)
        ),
    }
    fed = HandFed(spark, embedded, {"t": shape(["id"], **kinds, us=uuids, si=inner)})
    row = {
        "u": uuid.UUID(int=5),
        "f": b"\x00\xff",
        "b": b"",
        "d": Decimal("1.2345"),
        "x": -0.0,
        "ts": MIDNIGHT,
        "tz": MIDNIGHT.replace(tzinfo=dt.UTC),
        "l": ["a", None, ""],
        "m": [("k", b"v")],
        "s": {"when": dt.date(2024, 1, 1)},
    }
    fed.commit({"t": [put(id=1, **row), put(id=2)]})
    names = [name for name in kinds if name != "id"]
    rows = fed.sink.stored("t", keys(fed, "t", id=[1, 2]), names).sort_by("id")
    assert rows.drop_columns(["id"]).to_pylist() == [row, dict.fromkeys(names)]
    nested = fed.sink.stored("t", keys(fed, "t", id=[1, 2]), ["us", "si"])
    assert nested.column("us").null_count == nested.column("si").null_count == 2


def test_a_table_with_types_that_spark_does_not_know_is_read_without_them(
    spark: SparkSession, embedded: dict[str, str]
) -> None:
    """P7: Spark refuses a table with a time of day, whichever columns are asked for."""
    fed = HandFed(
        spark, embedded, {"t": shape(["id"], id=LongType(), at=TimeType(), v=StringType())}
    )
    fed.commit({"t": [put(id=1, at=dt.time(1, 2, 3), v="a"), put(id=2, v="b")]})
    assert found(fed, "t", keys(fed, "t", id=[1]), "v") == [{"id": 1, "v": "a"}]


def test_odd_names_of_tables_and_columns_are_just_names(
    spark: SparkSession, embedded: dict[str, str]
) -> None:
    """P7: blanks, quotes, dots, upper case."""
    odd = {"Id": LongType(), "a.b": StringType(), "`q\"'": StringType(), "i d": StringType()}
    shapes = {"odd": shape(["Id", "a.b"], **odd)}
    tables = {"odd": TableOptions(table='ta.b "le`', properties={})}
    fed = HandFed(spark, embedded, shapes, namespace="Name space", tables=tables)
    one = {"Id": 1, "a.b": "x", "`q\"'": "q", "i d": "low"}
    fed.commit({"odd": [put(**one), put(**{**one, "Id": 2})]})
    wanted = keys(fed, "odd", **{"Id": [1, 2, 2], "a.b": ["x", "x", "y"]})
    rows = found(fed, "odd", wanted, "`q\"'", "i d")
    assert rows == [one, {**one, "Id": 2}]


@pytest.mark.parametrize("partition_by", [[], ["bucket(3, a)"], ["v"]], ids=str)
def test_many_keys_of_several_columns_are_found_exactly(
    spark: SparkSession, embedded: dict[str, str], partition_by: list[str]
) -> None:
    """P7: past the few that are listed to Iceberg, by a range and a join; pairs, not products."""
    count = VALUES_MAX + 50
    tables = {"t": TableOptions(partition_by=partition_by)}
    shapes = {"t": shape(["a", "b"], a=LongType(), b=StringType(), v=StringType())}
    fed = HandFed(spark, embedded, shapes, tables=tables)
    rows = [put(a=a, b=b, v=f"{a}{b}") for a in range(count) for b in ("x", "y")]
    fed.commit({"t": rows})
    fed.commit({"t": [gone(a=7, b="x"), put(a=8, b="x", v="new")]})
    wanted = keys(fed, "t", a=range(count + 5), b=["x"] * (count + 5))
    expected = {a: "new" if a == 8 else f"{a}x" for a in range(count) if a != 7}
    assert {row["a"]: row["v"] for row in found(fed, "t", wanted, "v")} == expected


def test_the_branch_is_read_and_a_mapped_column_goes_by_the_sources_name(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """P7, I11, I13: rows of another branch are not seen."""
    shapes = {"t": shape(["id"], id=LongType(), v=StringType())}
    main = HandFed(spark, embedded, shapes, namespace="shop")
    main.commit({"t": [put(id=1, v="main"), put(id=2, v="both")]})
    names = '[{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["v"]}]'
    table = local.table("shop.t")
    local.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('{NAME_MAPPING}' = '{names}')")
    local.sql(f"ALTER TABLE {table} RENAME COLUMN v TO other")
    fed = HandFed(spark, embedded, shapes, namespace="shop", branch="audit")
    fed.commit({"t": [put(id=1, v="audit")]})
    wanted = keys(fed, "t", id=[1, 2])
    assert [row["v"] for row in found(fed, "t", wanted, "v")] == ["audit", "both"]
    assert [row["v"] for row in found(main, "t", wanted, "v")] == ["main", "both"]


def test_a_table_is_read_as_it_was_before_it_took_an_epoch(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """P7, I14: beneath claims and what others did since; columns go by the names they have now."""
    shapes = {"t": shape(["id"], id=LongType(), v=StringType())}
    fed = HandFed(spark, embedded, shapes, namespace="shop")
    fed.commit({"t": [put(id=1, v="old"), put(id=2, v="old")]})
    fed.commit({"t": [put(id=1, v="new"), gone(id=2), put(id=3, v="new")]})
    table = local.table("shop.t")
    local.sql(f"INSERT INTO {table} VALUES (4, 'foreign')")
    local.sql(f"ALTER TABLE {table} ADD COLUMN w STRING")
    again = HandFed(spark, embedded, shapes, namespace="shop")
    assert again.sink.prepare("t", lambda: shapes["t"])
    wanted = keys(fed, "t", id=[1, 2, 3, 4])

    def at(number: int) -> dict[int, str]:
        rows = again.sink.stored("t", wanted, ["v"], Frontier({"hand": (number,)}))
        return {row["id"]: row["v"] for row in rows.to_pylist()}

    assert at(2) == {1: "new", 3: "new", 4: "foreign"}
    assert at(1) == {1: "old", 2: "old"}
    assert at(0) == {}
    first = local.epochs("shop.t")[0]["snapshot_id"]
    handle = again.sink.heads(["t"])["t"][0]
    handle.java.expireSnapshots().expireSnapshotId(first).commit()
    assert at(2) == {1: "new", 3: "new", 4: "foreign"}
    with pytest.raises(HistoryLost, match="no longer has the snapshot"):
        at(1)


def test_no_key_and_no_row_are_no_rows(spark: SparkSession, embedded: dict[str, str]) -> None:
    """P7: a table without files is not scanned, and without keys nothing is asked."""
    fed = HandFed(spark, embedded, {"t": shape(["id"], id=LongType(), v=StringType())})
    assert fed.sink.prepare("t", lambda: fed.shapes["t"])
    assert found(fed, "t", keys(fed, "t", id=[1]), "v") == []
    fed.commit({"t": [put(id=1, v="a")]})
    assert found(fed, "t", keys(fed, "t", id=[]), "v") == []
    assert found(fed, "t", keys(fed, "t", id=[2]), "v") == []


def test_only_files_that_may_hold_a_key_are_opened(
    spark: SparkSession, rest: RestCatalog, store: S3Server, namespace: str
) -> None:
    """P7: few keys by their values, many by their range; requests are counted at the S3 server."""
    shapes = {"t": shape(["id"], id=LongType(), v=StringType())}
    with Proxy(store.endpoint) as proxy:
        catalog = rest.catalog_properties(storage=store.iceberg_properties(endpoint=proxy.url))
        fed = HandFed(spark, catalog, shapes, namespace=namespace)
        for start in (0, 1000, 2000):
            rows = [(Op.INSERT, {"id": start + n, "v": "x" * 50}) for n in range(500)]
            fed.commit({"t": rows})
        for wanted in ([3, 2001], range(1000, 1000 + VALUES_MAX + 1)):
            proxy.clear()
            assert len(found(fed, "t", keys(fed, "t", id=wanted), "v")) == len(wanted)
            read = {
                unquote(r.path).split("/epoch=")[1][0]
                for r in proxy.requests
                if r.method == "GET" and "/data/icestream/" in unquote(r.path)
            }
            assert read == {str(1 + number // 1000) for number in wanted}
