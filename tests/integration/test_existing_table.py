"""Tables that are there and named are used as they are: keys, order, properties, branches."""

from pathlib import Path

from pyspark.sql import SparkSession

from tests.captures import FeedFolder
from tests.integration.pipelines import document, run_once
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.servers import RestCatalog

WALL = 1_700_000_000_000_000_000


def test_identifier_fields_sort_order_and_properties_of_a_table_are_honoured(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """I10, I12: several files by the target size, sorted rows, the codec and metrics asked for."""
    name, table = f"{namespace}.orders", lake.table(f"{namespace}.orders")
    lake.sql(f"CREATE NAMESPACE {lake.name}.{namespace}")
    lake.sql(
        f"CREATE TABLE {table} (id BIGINT NOT NULL, region STRING, note STRING, amount BIGINT, "
        "ok BOOLEAN) USING iceberg TBLPROPERTIES ('write.parquet.compression-codec'='gzip', "
        "'write.target-file-size-bytes'='2000', 'write.metadata.metrics.default'='none', "
        "'write.metadata.metrics.column.id'='full')"
    )
    lake.sql(f"ALTER TABLE {table} SET IDENTIFIER FIELDS id")
    lake.sql(f"ALTER TABLE {table} WRITE ORDERED BY amount DESC")
    feed = RandomFeed.create(tmp_path / "feed", 30, keys=300)
    resolved = feed.epoch(600)
    named = {"tables": {"orders": {"table": "orders"}}}
    run_once(spark, document(feed.folder.path, rest.catalog_properties(), namespace, sink=named))
    expected = feed.expected("orders", resolved)
    assert {row["id"]: row for row in lake.rows(name)} == expected
    files = lake.sql(f"SELECT * FROM {table}.data_files ORDER BY file_path")
    assert len(files) > 1
    assert {tuple(file["lower_bounds"]) for file in files} == {(1,)}
    assert {file["sort_order_id"] for file in files} == {1}
    stored = lake.sql(f"SELECT amount FROM {table} ORDER BY _file, _pos")
    amounts = [row["amount"] for row in stored]
    assert amounts == sorted(amounts, reverse=True)


def test_commits_go_to_the_named_branch_and_leave_main_alone(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """I13: progress, claims and data are the branch's."""
    feed = RandomFeed.create(tmp_path / "feed", 31)
    catalog = rest.catalog_properties()
    name = f"{namespace}.orders"
    feed.epoch(10)
    run_once(spark, document(feed.folder.path, catalog, namespace))
    main_before = lake.rows(name)
    to_branch = document(feed.folder.path, catalog, namespace, sink={"branch": "audit"})
    feed.epoch(10)
    run_once(spark, to_branch)
    resolved = feed.epoch(10)
    run_once(spark, to_branch)
    branch = lake.sql(f"SELECT * FROM {lake.table(name)} VERSION AS OF 'audit'")
    expected = feed.expected("orders", resolved)
    found = {row["id"]: row for row in branch}
    assert found.keys() == expected.keys()
    assert {k: {n: found[k][n] for n in row} for k, row in expected.items()} == expected
    assert sorted(lake.rows(name), key=str) == sorted(main_before, key=str)


def test_a_key_of_several_columns_is_found_and_deletes_reach_their_rows(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I8: the key array's order is remembered, also when an epoch brings nothing but deletes."""
    folder = FeedFolder(tmp_path / "feed")

    def row(city: str, number: int, wall: int, deleted: bool = False) -> str:
        after = "null" if deleted else f'{{"zone": "{city}", "id": {number}, "n": {wall % 100}}}'
        return f'{{"after": {after}, "key": ["{city}", {number}], "updated": "{wall}.0000000000"}}'

    rows = [row("rome", 1, WALL + 1), row("rome", 2, WALL + 2), row("oslo", 1, WALL + 3)]
    folder.data("places", rows, (WALL, 0))
    folder.resolved((WALL + 10, 0))
    pipelines = document(folder.path, embedded)
    run_once(spark, pipelines)
    folder.data("places", [row("rome", 1, WALL + 11, deleted=True)], (WALL + 11, 0))
    folder.resolved((WALL + 20, 0))
    run_once(spark, pipelines)
    found = {(r["zone"], r["id"]) for r in local.rows("shop.places")}
    assert found == {("rome", 2), ("oslo", 1)}


def test_columns_that_appear_later_are_added_and_older_rows_have_none(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I10: a member without a column becomes an optional column; nothing of the epoch is lost."""
    folder = FeedFolder(tmp_path / "feed")
    line = '{"after": %s, "key": [%d], "updated": "%d.0000000000"}'
    folder.data("t", [line % ('{"id": 1}', 1, WALL + 1)], (WALL, 0))
    folder.resolved((WALL + 10, 0))
    pipelines = document(folder.path, embedded)
    run_once(spark, pipelines)
    added = line % ('{"id": 2, "price": 1.50, "odd name.x": true}', 2, WALL + 11)
    folder.data("t", [added], (WALL + 11, 0), schema=2)
    folder.resolved((WALL + 20, 0))
    run_once(spark, pipelines)
    rows = {row["id"]: row for row in local.rows("shop.t")}
    assert rows[1]["price"] is None
    assert str(rows[2]["price"]) == "1.50"
    assert rows[2]["odd name.x"] is True
