"""A table that its source truncates: one snapshot without the old rows, and the old ones behind."""

import re
from typing import Any
from urllib.parse import unquote

import pytest
from pyiceberg.types import LongType, StringType
from pyspark.sql import SparkSession

from icestream.sinks.iceberg.options import TableOptions
from tests.integration.hand_fed import HandFed, gone, put, shape
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import RestCatalog, S3Server

ORDERS = shape(["id"], id=LongType(), region=StringType())
FORMATS = [2, 3]
LAYOUTS: list[list[str]] = [[], ["region"], ["bucket(4, id)"]]


def rows_of(lake: Lake, name: str, at: int | None = None) -> dict[int, str]:
    found = lake.rows(name, at)
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["region"] for row in found}


def hand_fed(spark: SparkSession, catalog: dict[str, str], **options: Any) -> HandFed:
    return HandFed(spark, catalog, {"orders": ORDERS}, namespace="shop", **options)


def with_deletes(fed: HandFed) -> None:
    """Two epochs, the second with equality deletes in the table."""
    fed.commit({"orders": [put(id=i, region="eu" if i % 2 else "us") for i in range(6)]})
    fed.commit({"orders": [put(id=1, region="us"), gone(id=2), put(id=6, region="eu")]})


@pytest.mark.parametrize("format_version", FORMATS)
@pytest.mark.parametrize("partition_by", LAYOUTS, ids=str)
def test_exactly_the_new_rows_are_there_after_a_truncate_and_the_old_ones_behind_it(
    spark: SparkSession,
    embedded: dict[str, str],
    local: Lake,
    format_version: int,
    partition_by: list[str],
) -> None:
    """P7: v2 and v3, partitioned or not, with equality deletes; then epochs go on as ever."""
    tables = {"orders": TableOptions(partition_by=partition_by)}
    fed = hand_fed(spark, embedded, format_version=format_version, tables=tables)
    with_deletes(fed)
    before = rows_of(local, "shop.orders")
    assert before == {0: "us", 1: "us", 3: "eu", 4: "us", 5: "eu", 6: "eu"}
    old = local.snapshots("shop.orders")[-1]["snapshot_id"]
    # The source's changes after the truncate are upserts, whose deletes have nothing to do.
    result = fed.commit({"orders": [put(id=1, region="new"), put(id=9, region="eu")]}, ["orders"])
    assert rows_of(local, "shop.orders") == {1: "new", 9: "eu"}
    assert rows_of(local, "shop.orders", old) == before
    snapshot = local.snapshots("shop.orders")[-1]
    assert [snapshot["snapshot_id"]] == [committed.snapshot_id for committed in result]
    assert snapshot["parent_id"] == old
    summary = snapshot["summary"]
    assert summary["icestream.epoch"] == "3"
    assert summary["icestream.delete-files"] == "0"
    assert summary["total-records"] == "2"
    assert summary["total-equality-deletes"] == "0"
    assert local.references("shop.orders")["icestream-hand"] == snapshot["snapshot_id"]
    fed.commit({"orders": [put(id=9, region="us"), gone(id=1), put(id=3, region="eu")]})
    assert rows_of(local, "shop.orders") == {9: "us", 3: "eu"}


def test_a_truncate_without_any_row_after_it_is_an_epoch_of_its_own(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """P7, E3: it commits without files, counts among the epoch's tables, and is remembered."""
    shapes = {"orders": ORDERS, "people": ORDERS}
    fed = HandFed(spark, embedded, shapes, namespace="shop")
    with_deletes(fed)
    fed.commit({"people": [put(id=7, region="x")]}, truncated=["orders"])
    assert local.rows("shop.orders") == []
    assert rows_of(local, "shop.people") == {7: "x"}
    for table in ("shop.orders", "shop.people"):
        assert local.epochs(table)[-1]["summary"]["icestream.epoch-tables"] == "2"
    again = HandFed(spark, embedded, shapes, namespace="shop")
    assert again.number == 3
    again.commit({"orders": [put(id=1, region="y")]}, truncated=["orders"])
    assert rows_of(local, "shop.orders") == {1: "y"}


def test_a_table_without_rows_can_be_truncated(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """P7: the first epoch of a table may begin with a truncate."""
    fed = hand_fed(spark, embedded)
    fed.commit({}, truncated=["orders"])
    assert local.rows("shop.orders") == []
    fed.commit({"orders": [put(id=1, region="a")]}, truncated=["orders"])
    assert rows_of(local, "shop.orders") == {1: "a"}


def test_a_truncate_on_a_branch_leaves_the_main_branch_alone(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """P7, I13: only the branch that the pipeline commits to is emptied."""
    main = hand_fed(spark, embedded)
    with_deletes(main)
    before = rows_of(local, "shop.orders")
    fed = hand_fed(spark, embedded, branch="audit")
    fed.commit({"orders": [put(id=1, region="new")]}, truncated=["orders"])
    assert rows_of(local, "shop.orders") == before
    audit = local.sql(f"SELECT * FROM {local.table('shop.orders')} VERSION AS OF 'audit'")
    assert audit == [{"id": 1, "region": "new"}]


def test_a_repeated_commit_of_a_truncate_changes_nothing(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """P7, I5: the batch id is found, whether or not the epoch had files."""
    fed = hand_fed(spark, embedded)
    with_deletes(fed)
    written = fed.write({}, truncated=["orders"])
    first = fed.sink.commit(written)
    again = fed.sink.commit(written)
    assert [one.duplicate for one in (*first, *again)] == [False, True]
    assert first[0].snapshot_id == again[0].snapshot_id
    assert len(local.epochs("shop.orders")) == 3


def test_truncating_opens_no_data_file(
    spark: SparkSession,
    rest: RestCatalog,
    store: S3Server,
    lake: Lake,
    namespace: str,
) -> None:
    """P7, I4: manifests alone tell what goes; requests are counted at the S3 server."""
    with Proxy(store.endpoint) as proxy:
        catalog = rest.catalog_properties(storage=store.iceberg_properties(endpoint=proxy.url))
        fed = HandFed(spark, catalog, {"orders": ORDERS}, namespace=namespace)
        with_deletes(fed)
        proxy.clear()
        fed.commit({}, truncated=["orders"])
        requests = [(r.method, unquote(r.path)) for r in proxy.requests]
    assert requests
    assert [path for _, path in requests if re.search(r"/data/icestream/", path)] == []
    assert lake.rows(f"{namespace}.orders") == []
