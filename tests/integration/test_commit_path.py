"""The commit path: what it asks of storage, how many jobs and commits an epoch takes, what a
summary says, and what expiry, compaction and silence do to progress."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from pyiceberg.types import LongType, StringType
from pyspark.sql import SparkSession

from icestream.epoch import batch_id
from icestream.errors import HistoryLost
from icestream.frontier import Frontier
from icestream.schema import schema_from_json
from icestream.spark import job_count
from tests.examples import with_more
from tests.integration.changelog import Changelog, by_key
from tests.integration.hand_fed import HandFed, put, shape
from tests.integration.pipelines import document, run_once
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.proxy import Proxy
from tests.servers import RestCatalog, S3Server

HOUR = 3600


def test_committing_neither_lists_storage_nor_reads_data_or_delete_files(
    spark: SparkSession,
    rest: RestCatalog,
    store: S3Server,
    lake: Lake,
    namespace: str,
    tmp_path: Path,
) -> None:
    """I4: the coordinator works from what workers report; requests are counted at the S3 server."""
    feed = RandomFeed.create(tmp_path / "feed", 5)
    for _ in range(3):
        feed.epoch(12)
    with Proxy(store.endpoint) as proxy:
        storage = store.iceberg_properties(endpoint=proxy.url)
        catalog = rest.catalog_properties(storage=storage)
        run_once(spark, document(feed.folder.path, catalog, namespace))
        requests = [r._replace(path=unquote(r.path)) for r in proxy.requests]
    files = [r for r in requests if "/data/icestream/" in r.path]
    written = {r.path.partition("?")[0] for r in files if r.method in ("PUT", "POST")}
    committed = lake.sql(f"SELECT file_path FROM {lake.table(namespace + '.orders')}.all_files")
    assert committed, "the pipeline has committed files"
    paths = {re.sub(r"^s3://", "/", row["file_path"]) for row in committed}
    assert paths <= written, "the proxy has seen the files being written"
    # Arrow asks for the bucket's folders before an upload; whatever it is, it is not a file.
    read = [r for r in files if r.method in ("GET", "HEAD") and r.path.partition("?")[0] in paths]
    assert read == []
    lists = [r for r in requests if r.method == "GET" and "list-type" in r.path]
    assert lists == []


@pytest.mark.spark_jobs
@pytest.mark.parametrize("count", with_more([50], [200]))
def test_an_epoch_of_many_tables_is_one_spark_job_and_one_commit_per_table(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path, count: int
) -> None:
    """E1: one Spark job for all tables of an epoch; only tables with changes commit."""
    tables = [f"t{number:03d}" for number in range(count)]
    feed = RandomFeed.create(tmp_path / "feed", 6, tables=tables)
    feed.epoch(5 * count)
    pipelines = document(feed.folder.path, embedded)
    before = job_count(spark)
    run_once(spark, pipelines)
    assert job_count(spark) - before == 1
    # A table that is only deleted from has never been there: there is nothing to make of it.
    changed = sorted({c.table for c in feed.log if c.row is not None and c.at <= feed.resolved[0]})
    assert len(changed) > 0.75 * count
    for table in changed[:3]:
        epochs = local.epochs(f"shop.{table}")
        assert len(epochs) == 1
        assert epochs[0]["summary"]["icestream.epoch-tables"] == str(len(changed))


def test_the_summary_says_what_the_snapshot_holds(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """I5, I7: pipeline, generation, epoch, batch id, bounds, counts, CockroachDB's names."""
    feed = RandomFeed.create(tmp_path / "feed", 7)
    first, second = feed.epoch(10), feed.epoch(10)
    run_once(spark, document(feed.folder.path, rest.catalog_properties(), namespace))
    summary = lake.epochs(f"{namespace}.orders")[-1]["summary"]
    lower, upper = ([at[0], at[1] + 1] for at in (first, second))
    assert summary["icestream.pipeline"] == "feed"
    assert summary["icestream.generation"] == "1"
    assert summary["icestream.epoch"] == "2"
    assert json.loads(summary["icestream.lower"])["resolved"] == lower
    frontier = json.loads(summary["icestream.frontier"])
    assert frontier["resolved"] == upper
    assert summary["icestream.epoch-tables"] == "1"
    expected = batch_id("feed", "orders", Frontier.from_json(frontier))
    assert summary["icestream.batch-id"] == summary["crdb.batch_id"] == expected
    assert summary["crdb.job_id"] == "feed"
    assert summary["crdb.resolved_hlc"] == f"{second[0]}.{second[1]:010d}"
    assert summary["icestream.data-files"] == summary["crdb.data_file_count"] == "1"
    assert summary["icestream.delete-files"] == summary["crdb.delete_file_count"] == "1"
    assert summary["added-data-files"] == "1"
    assert summary["added-equality-delete-files"] == "1"


def test_an_epoch_remembers_the_schema_that_its_records_were_read_by(
    spark: SparkSession, embedded: dict[str, str], local: Lake
) -> None:
    """I17, Mend c3: so letters that the table lacks are told by it, whatever is changed since."""
    shapes = {"t": shape(["id"], id=LongType(), v=StringType())}
    fed = HandFed(spark, embedded, shapes, namespace="shop")
    fed.commit({"t": [put(id=1, v="a")]})
    for change in ("RENAME COLUMN id TO number", "ADD COLUMN w STRING"):
        local.sql(f"ALTER TABLE {local.table('shop.t')} {change}")
    handle, head = fed.sink.heads(["t"])["t"]
    assert head.progress is not None
    now = handle.target("main", ["number"])
    then = handle.target("main", ["number"], head.progress.schema_id)
    names = [
        [field.name for field in schema_from_json(target.schema_json).fields]
        for target in (now, then)
    ]
    assert names == [["number", "v", "w"], ["id", "v"]]
    assert (now.equality_columns, then.equality_columns) == (["number"], ["id"])
    with pytest.raises(HistoryLost, match="no longer has schema 99"):
        handle.target("main", ["number"], 99)


def test_a_table_that_is_registered_again_from_an_older_file_is_noticed(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """E8, E4: other tables remember which epoch it had; dropped, it is built anew."""
    log = Changelog.at(tmp_path / "feed")
    pipelines = document(tmp_path / "feed", embedded)
    files = []
    for number in range(3):
        log.put("orders", {"id": number})
        log.put("people", {"id": number})
        log.resolve()
        run_once(spark, pipelines)
        entries = local.sql(
            f"SELECT file FROM {local.table('shop.orders')}.metadata_log_entries ORDER BY timestamp"
        )
        files.append(entries[-1]["file"])
    local.sql(f"DROP TABLE {local.table('shop.orders')}")
    local.sql(f"CALL {local.name}.system.register_table('shop.orders', '{files[0]}')")
    for _ in range(2):
        with pytest.raises(HistoryLost, match="table orders was set back"):
            run_once(spark, pipelines)
    local.sql(f"DROP TABLE {local.table('shop.orders')}")
    run_once(spark, pipelines)
    for table in ("orders", "people"):
        assert by_key(local.rows(f"shop.{table}"), ["id"]) == log.expected(table)


def test_progress_survives_expiry_and_compaction_between_runs(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """E4, I7: the tag keeps the last commit, `replace` snapshots are stepped over."""
    feed = RandomFeed.create(tmp_path / "feed", 8)
    pipelines = document(feed.folder.path, rest.catalog_properties(), namespace)
    name = f"{namespace}.orders"
    feed.epoch(15)
    feed.epoch(15)
    run_once(spark, pipelines)
    tagged = lake.sql(f"SELECT * FROM {lake.table(name)}.refs WHERE name = 'icestream-feed'")
    assert tagged[0]["snapshot_id"] == lake.epochs(name)[-1]["snapshot_id"]
    arguments = f"table => '{name}', options => map('rewrite-all', 'true')"
    lake.sql(f"CALL {lake.name}.system.rewrite_data_files({arguments})")
    assert lake.snapshots(name)[-1]["operation"] == "replace"
    lake.sql(
        f"CALL {lake.name}.system.expire_snapshots(table => '{name}', "
        "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)"
    )
    kept = {snapshot["snapshot_id"] for snapshot in lake.snapshots(name)}
    assert tagged[0]["snapshot_id"] in kept
    resolved = feed.epoch(15)
    run_once(spark, pipelines)
    rows = {row["id"]: row for row in lake.rows(name)}
    assert {
        key: {n: rows[key][n] for n in row}
        for key, row in feed.expected("orders", resolved).items()
    } == feed.expected("orders", resolved)
    assert len(rows) == len(feed.expected("orders", resolved))
    assert lake.epochs(name)[-1]["summary"]["icestream.generation"] == "2"


def test_a_run_without_anything_new_leaves_the_tables_alone(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """E9: no change, no snapshot: not even a claim."""
    feed = RandomFeed.create(tmp_path / "feed", 9)
    feed.epoch(10)
    pipelines = document(feed.folder.path, embedded)
    run_once(spark, pipelines)
    before = local.snapshots("shop.orders")
    run_once(spark, pipelines)
    assert local.snapshots("shop.orders") == before


def test_a_heartbeat_publishes_the_frontier_of_epochs_without_changes(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """E9: with `heartbeat_interval` a silent source's frontier becomes durable; without it not."""
    feed = RandomFeed.create(tmp_path / "feed", 10)
    feed.epoch(10)
    feed._early.clear()
    # Less than the hour of the feed after which an idle frontier is published anyway.
    quiet = (feed.now + HOUR // 2 * 10**9, 0)
    feed.folder.resolved(quiet)
    pipelines = document(feed.folder.path, embedded)
    run_once(spark, pipelines)
    last = local.snapshots("shop.orders")[-1]["summary"]["icestream.frontier"]
    assert json.loads(last)["resolved"] < [quiet[0], 0]
    pipelines["feed"]["heartbeat_interval"] = 1e-9
    run_once(spark, pipelines)
    last = local.snapshots("shop.orders")[-1]["summary"]["icestream.frontier"]
    assert json.loads(last)["resolved"] == [quiet[0], 1]
