"""A table follows its source's schema: it gains, widens and loosens columns, and finds them by
Iceberg's name mapping; what is not safe stops before anything is changed."""

import json
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
)
from pyspark.sql import SparkSession

from icestream.errors import CommitConflict, SchemaRejected
from icestream.schema import NAME_MAPPING, Column, TableShape, gaps, schema_from_json
from icestream.sinks.iceberg.making import SCHEMA_PROPERTY
from icestream.sinks.iceberg.options import TableOptions
from icestream.sinks.iceberg.sink import RENAMES_MAX
from tests.integration.hand_fed import HandFed, gone, put, shape
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import RestCatalog


def follow(fed: HandFed, table: str, columns: TableShape) -> list[Column]:
    """What a source does when its table has changed: say what the table lacks."""
    writer = fed.write({table: []}).writer
    fed.number -= 1
    assert writer is not None
    seen = schema_from_json(writer.schema_json(table))
    missing = gaps(seen, columns.columns, writer.key(table))
    if missing:
        fed.sink.evolve(table, missing)
    return missing


def schemas(fed: HandFed, table: str) -> list[dict[str, Any]]:
    metadata = fed.sink._states[table].handle.java.operations().refresh()
    return [json.loads(schema_json(fed, schema)) for schema in metadata.schemas()]


def schema_json(fed: HandFed, schema: object) -> str:
    parser = fed.sink._catalog._jvm.org.apache.iceberg.SchemaParser
    return str(parser.toJson(schema))


def columns(lake: Lake, name: str) -> dict[str, str]:
    return {row["col_name"]: row["data_type"] for row in lake.sql(f"DESCRIBE {lake.table(name)}")}


def by_id(lake: Lake, name: str, key: str = "id") -> dict[Any, dict[str, Any]]:
    found = lake.rows(name)
    assert len({row[key] for row in found}) == len(found)
    return {row.pop(key): row for row in found}


def struct(**fields: IcebergType) -> StructType:
    return StructType(
        *(
            NestedField(field_id=number, name=name, field_type=kind, required=False)
            for number, (name, kind) in enumerate(fields.items(), start=1)
        )
    )


def list_of(kind: IcebergType) -> ListType:
    return ListType(element_id=1, element_type=kind, element_required=False)


def map_of(kind: IcebergType) -> MapType:
    return MapType(
        key_id=1, key_type=StringType(), value_id=2, value_type=kind, value_required=False
    )


def test_a_table_follows_every_safe_change_of_its_source_in_one_step(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I11: add (also nested), widen (the key too), make optional; old rows and deletes hold."""
    old = TableShape(
        columns=[
            Column(name="id", type=IntegerType(), required=True),
            Column(name="n", type=IntegerType(), required=True),
            Column(name="f", type=FloatType()),
            Column(name="d", type=DecimalType(5, 2)),
            Column(name="s", type=struct(a=IntegerType())),
            Column(name="l", type=list_of(struct(a=StringType()))),
            Column(name="m", type=map_of(struct(a=StringType()))),
            Column(name="lost", type=StringType(), required=True),
            Column(name="any", type=StringType()),
        ],
        key=["id"],
    )
    fed = HandFed(spark, embedded, {"t": old}, namespace="shop")
    first = {"n": 1, "f": 0.5, "d": Decimal("1.50"), "s": {"a": 1}, "lost": "x", "any": "y"}
    nested = {"l": [{"a": "p"}], "m": [("k", {"a": "q"})]}
    fed.commit({"t": [put(id=number, **first, **nested) for number in (1, 2, 3)]})
    fed.commit({"t": [gone(id=3)]})
    new = shape(
        ["id"],
        id=LongType(),
        n=LongType(),
        f=DoubleType(),
        d=DecimalType(12, 2),
        s=struct(a=LongType(), b=StringType()),
        l=list_of(struct(a=StringType(), b=LongType())),
        m=map_of(struct(a=StringType(), b=LongType())),
        any=LongType(),
        **{'odd. `name"': struct(x=list_of(LongType()))},
    )
    before = len(schemas(fed, "t"))
    missing = follow(fed, "t", new)
    assert {c.name for c in missing} == {"id", "n", "f", "d", "s", "l", "m", "lost", 'odd. `name"'}
    assert len(schemas(fed, "t")) == before + 1
    assert follow(fed, "t", new) == []
    wide = {"n": None, "f": 1e300, "d": Decimal("1234567890.25"), "s": {"a": 2**40, "b": "z"}}
    inner = {"l": [{"a": "p", "b": 1}], "m": [("k", {"a": "q", "b": 2})]}
    extra = {'odd. `name"': {"x": [1, 2]}}
    fed.commit({"t": [put(id=2**40, **wide, **inner, **extra), put(id=2, **wide), gone(id=1)]})
    found = by_id(local, "shop.t")
    assert set(found) == {2, 2**40}
    assert found[2**40] == {
        **wide,
        **extra,
        "l": inner["l"],
        "m": {"k": {"a": "q", "b": 2}},
        "lost": None,
        "any": None,
    }
    assert found[2]["d"] == wide["d"]


def test_an_unsafe_change_stops_and_the_table_stays_as_it_is(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I11: nothing is changed when one of the columns cannot be taken."""
    fed = HandFed(spark, embedded, {"t": shape(["id"], id=LongType(), n=LongType())}, namespace="s")
    fed.commit({"t": [put(id=1, n=1)]})
    before = schemas(fed, "t")
    changed = shape(["id"], id=LongType(), n=StringType(), extra=LongType())
    with pytest.raises(SchemaRejected, match=r"column n of table .* cannot become string") as error:
        follow(fed, "t", changed)
    assert "long" in str(error.value.detail)
    assert schemas(fed, "t") == before
    local.sql(f"ALTER TABLE {local.table('s.t')} RENAME COLUMN n TO n_old")
    follow(fed, "t", changed)
    fed.commit({"t": [put(id=2, n="two", extra=2)]})
    assert by_id(local, "s.t") == {
        1: {"n_old": 1, "n": None, "extra": None},
        2: {"n_old": None, "n": "two", "extra": 2},
    }


def test_a_rivals_schema_change_in_between_is_taken_into_account(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str
) -> None:
    """I11: both changes are there; a column that the rival has added is not added again."""
    name = f"{namespace}.t"
    with Proxy(rest.uri) as proxy:
        catalog = rest.catalog_properties(uri=proxy.url)
        shapes = {"t": shape(["id"], id=LongType())}
        fed = HandFed(spark, catalog, shapes, namespace=namespace)
        fed.commit({"t": [put(id=1)]})

        def rival() -> None:
            lake.sql(f"ALTER TABLE {lake.table(name)} ADD COLUMNS (theirs STRING, both BIGINT)")

        proxy.on("POST", "/tables/t$").call_before(rival)
        wanted = [Column(name="both", type=LongType()), Column(name="ours", type=LongType())]
        fed.sink.evolve("t", wanted)
        assert list(columns(lake, name))[:4] == ["id", "theirs", "both", "ours"]
        fed.commit({"t": [put(id=2, both=3, ours=4)]})
    assert by_id(lake, name)[2] == {"theirs": None, "both": 3, "ours": 4}


def test_a_schema_that_does_not_come_to_rest_is_not_fought_for_ever(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str
) -> None:
    """I11: a bounded number of tries, then an error that says why."""
    with Proxy(rest.uri) as proxy:
        catalog = rest.catalog_properties(uri=proxy.url)
        fed = HandFed(spark, catalog, {"t": shape(["id"], id=LongType())}, namespace=namespace)
        fed.commit({"t": [put(id=1)]})
        refusals = proxy.on("POST", "/tables/t$", times=None).refuse(409)
        with pytest.raises(CommitConflict, match="does not come to rest"):
            fed.sink.evolve("t", [Column(name="n", type=LongType())])
        refusals.remove()
        fed.sink.evolve("t", [Column(name="n", type=LongType())])
    assert "n" in columns(lake, f"{namespace}.t")


def test_a_schema_that_icestream_gives_a_new_table_is_noted_in_the_same_commit(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str
) -> None:
    """I10, Mend, leftover: a kill between two commits would leave a table that looks as if somebody
    else had changed it, and it would never take the types that are declared later."""
    commits: list[None] = []
    with Proxy(rest.uri) as proxy:
        catalog = rest.catalog_properties(uri=proxy.url)
        proxy.on("POST", "/tables/t$", times=None).call_before(lambda: commits.append(None))

        def started(**types: IcebergType) -> HandFed:
            fed = HandFed(spark, catalog, {"t": shape(["id"], **types)}, namespace=namespace)
            commits.clear()
            return fed

        def noted(fed: HandFed) -> bool:
            handle = fed.sink._states["t"].handle
            return int(handle.properties()[SCHEMA_PROPERTY]) == handle.schema_id() > 0

        first = started(id=LongType(), v=DoubleType())
        assert first.sink.prepare("t", lambda: first.shapes["t"])
        second = started(id=StringType(), v=LongType())
        assert second.sink.prepare("t", lambda: second.shapes["t"])
        assert (len(commits), noted(second)) == (1, True)
        second.sink.evolve("t", [Column(name="w", type=LongType())])
        assert (len(commits), noted(second)) == (2, True)
        # Each of them could have been the last one of its run.
        third = started(id=IntegerType(), v=StringType())
        third.commit({"t": [put(id=1, v="one")]})
    assert by_id(lake, f"{namespace}.t") == {1: {"v": "one", "w": None}}


def mapped(lake: Lake, name: str, mapping: list[dict[str, Any]]) -> None:
    text = json.dumps(mapping)
    lake.sql(f"ALTER TABLE {lake.table(name)} SET TBLPROPERTIES ('{NAME_MAPPING}' = '{text}')")


def test_columns_are_found_by_the_tables_name_mapping(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I11: key, partition column and nested fields under other names than the source's."""
    local.sql(f"CREATE NAMESPACE {local.name}.shop")
    local.sql(
        f"CREATE TABLE {local.table('shop.t')} (customer_id BIGINT, region STRING, "
        "home STRUCT<town: STRING, zip: INT>, plain STRING) USING iceberg PARTITIONED BY (region) "
        "TBLPROPERTIES ('format-version' = '2')"
    )
    mapped(
        local,
        "shop.t",
        [
            {"field-id": 1, "names": ["cust_id"]},
            {"field-id": 2, "names": ["area"]},
            {"field-id": 3, "names": ["address"], "fields": [{"field-id": 5, "names": ["city"]}]},
        ],
    )
    source = shape(
        ["cust_id"],
        cust_id=LongType(),
        area=StringType(),
        address=struct(city=StringType(), zip=IntegerType()),
        plain=StringType(),
    )
    named = {"t": TableOptions(table="t")}
    fed = HandFed(spark, embedded, {"t": source}, namespace="shop", tables=named)
    assert follow(fed, "t", source) == []
    home = {"city": "rome", "zip": 1}
    fed.commit({"t": [put(cust_id=1, area="eu", address=home, plain="a"), put(cust_id=2)]})
    fed.commit(
        {"t": [put(cust_id=1, area="us", address={"city": None, "zip": 2}), gone(cust_id=2)]}
    )
    assert by_id(local, "shop.t", "customer_id") == {
        1: {"region": "us", "home": {"town": None, "zip": 2}, "plain": None}
    }
    wide = struct(city=StringType(), zip=LongType(), street=StringType())
    more = shape(
        ["cust_id"], cust_id=LongType(), area=StringType(), address=wide, plain=StringType(),
        extra=LongType(),
    )  # fmt: skip
    assert [column.name for column in follow(fed, "t", more)] == ["address", "extra"]
    assert follow(fed, "t", more) == []
    moved = {"city": "oslo", "zip": 2**40, "street": "s"}
    fed.commit({"t": [put(cust_id=1, area="eu", address=moved, extra=5)]})
    found = by_id(local, "shop.t", "customer_id")[1]
    assert found["home"] == {"town": "oslo", "zip": 2**40, "street": "s"}
    assert (found["region"], found["extra"]) == ("eu", 5)
    assert list(columns(local, "shop.t"))[:5] == ["customer_id", "region", "home", "plain", "extra"]
    kept = json.loads(fed.sink._states["t"].handle.properties()[NAME_MAPPING])
    assert "extra" in [name for entry in kept for name in entry["names"]]


def test_a_column_renamed_in_the_table_and_then_at_the_source_stays_one_column(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I11: Iceberg keeps both names in the mapping; either of them is understood, in any order."""
    old = shape(["id"], id=LongType(), cust=StringType())
    fed = HandFed(spark, embedded, {"t": old}, namespace="shop")
    fed.commit({"t": [put(id=1, cust="a")]})
    mapped(local, "shop.t", [{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["cust"]}])
    local.sql(f"ALTER TABLE {local.table('shop.t')} RENAME COLUMN cust TO customer")
    fed = HandFed(spark, embedded, {"t": old}, namespace="shop")
    assert follow(fed, "t", old) == []
    fed.commit({"t": [put(id=2, cust="b")]})
    new = shape(["id"], id=LongType(), customer=StringType())
    before = schemas(fed, "t")
    assert [column.name for column in follow(fed, "t", new)] == ["customer"]
    assert follow(fed, "t", new) == []
    assert schemas(fed, "t") == before
    fed.commit({"t": [put(id=3, customer="c")]})
    assert follow(fed, "t", old) != []
    fed.commit({"t": [put(id=4, cust="d")]})
    names = {number: row["customer"] for number, row in by_id(local, "shop.t").items()}
    assert names == {1: "a", 2: "b", 3: "c", 4: "d"}


def test_two_columns_of_the_source_never_take_each_others_place_for_ever(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I11: a mapping that leads both to one column is refused, told at once or one by one."""
    both = shape(["id"], id=LongType(), a=StringType(), b=StringType())
    fed = HandFed(spark, embedded, {"t": shape(["id"], id=LongType(), a=StringType())})
    fed.commit({"t": [put(id=1, a="a")]})
    mapped(local, "default.t", [{"field-id": 2, "names": ["a", "b"]}])
    fed = HandFed(spark, embedded, {"t": shape(["id"], id=LongType(), a=StringType())})
    with pytest.raises(SchemaRejected, match="a and b of the source both go into column"):
        fed.sink.prepare("t", lambda: both)
        fed.sink.evolve("t", both.columns)
    with pytest.raises(SchemaRejected, match="both go into column"):
        for _ in range(RENAMES_MAX + 2):
            assert follow(fed, "t", both) != []
