"""One change log gives the same tables, whatever files, folders, names and places it comes in."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files
from pyspark.sql import SparkSession

from tests.captures import FeedFolder
from tests.integration.changelog import Change, Changelog, by_key, hlc_text
from tests.integration.pipelines import document, run_once
from tests.lake import Lake
from tests.servers import RestCatalog, S3Server

COLUMNS = {"price": "decimal(12,2)", "born": "date", "seen": "timestamptz"}
PARQUET_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.decimal128(12, 2)),
        ("born", pa.date32()),
        ("seen", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
        ("__crdb__event_type", pa.string()),
        ("__crdb__updated", pa.string()),
        ("__crdb__mvcc_timestamp", pa.string()),
    ]
)
Write = Callable[[FeedFolder, str, Sequence[Change]], object]


def order(number: int, name: str | None) -> dict[str, Any]:
    """A row of many types."""
    return {
        "id": number,
        "name": name,
        "price": Decimal(number).scaleb(-2) if number % 4 else None,
        "born": date(1969, 12, 30) + timedelta(days=number),
        "seen": datetime(2024, 2, 29, 23, 59, 59, number, tzinfo=UTC),
        "ok": number % 2 == 0,
    }


def write_log(log: Changelog, write: Write) -> None:
    """Three epochs of one table: rows come, change, go and come again."""
    log.put("orders", *(order(number, f"näme {number}") for number in range(8)))
    write_epoch(log, write)
    log.put("orders", order(1, None), order(2, 'quoted "\\ text'), order(1, "twice"))
    log.remove("orders", 3, 4, 99)
    write_epoch(log, write)
    log.remove("orders", 1, 5)
    log.put("orders", order(5, "back"), order(20, ""))
    write_epoch(log, write)


def write_epoch(log: Changelog, write: Write) -> None:
    changes = log.take()
    # Rows come out of order, spread over files, and some of them twice.
    write(log.folder, "orders", [*changes[1::2], changes[0]])
    write(log.folder, "orders", changes[0::2])
    log.mark()


def wrapped(folder: FeedFolder, topic: str, changes: Sequence[Change]) -> None:
    folder.data(topic, [change.wrapped() for change in changes], changes[0].at)


def bare(folder: FeedFolder, topic: str, changes: Sequence[Change]) -> None:
    folder.data(topic, [change.bare() for change in changes], changes[0].at)


def parquet(folder: FeedFolder, topic: str, changes: Sequence[Change]) -> None:
    """Columns at top level, an event type, the timestamp as text; a delete has only its key."""
    rows = [
        {
            **(change.row or {"id": change.key[0]}),
            "__crdb__event_type": "d" if change.row is None else "c",
            "__crdb__updated": hlc_text(change.at),
            "__crdb__mvcc_timestamp": hlc_text(change.at),
        }
        for change in changes
    ]
    name = folder.data_name(topic, changes[0].at, 1, ".parquet")
    path = folder.path / f"{name[:4]}-{name[4:6]}-{name[6:8]}" / name
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=PARQUET_SCHEMA), path)


def hourly(folder: Path) -> None:
    """Move files from `<day>/` to `<day>/<hour>/`."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        target = path.parent / path.name[8:10] / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)


def flat(folder: Path) -> None:
    """Move files from `<day>/` up."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.rename(folder / path.name)


def daily(folder: Path) -> None:
    """Files are written so."""


@dataclass(frozen=True)
class Form:
    """How a feed's files are written, packed and arranged."""

    write: Write
    compression: str
    arrange: Callable[[Path], None]


FORMS = {
    "ndjson-daily": Form(wrapped, "", daily),
    "gzip-hourly": Form(wrapped, ".gz", hourly),
    "zstd-flat": Form(wrapped, ".zst", flat),
    "bare-hourly": Form(bare, "", hourly),
    "parquet-flat": Form(parquet, "", flat),
    "parquet-daily": Form(parquet, "", daily),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_file_format_and_folder_layout_gives_the_same_tables(
    form: Form, spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C1, C3: JSON plain and packed, both envelopes, Parquet; daily, hourly and flat folders."""
    log = Changelog(folder=FeedFolder(tmp_path / "feed", form.compression))
    write_log(log, form.write)
    form.arrange(tmp_path / "feed")
    source = {"keys": {"orders": ["id"]}, "columns": {"orders": COLUMNS}}
    run_once(spark, document(tmp_path / "feed", embedded, "shop", source))
    epochs = local.epochs("shop.orders")
    times = [epoch["summary"]["crdb.resolved_hlc"] for epoch in epochs]
    assert times == [hlc_text(at) for at in log.published("orders")]
    for at, epoch in zip(log.resolved, epochs, strict=True):
        rows = local.rows("shop.orders", epoch["snapshot_id"])
        assert by_key(rows, ["id"]) == log.expected("orders", at)
    kinds = dict(spark.table(local.table("shop.orders")).dtypes)
    assert kinds == {
        "born": "date",
        "id": "bigint",
        "name": "string",
        "ok": "boolean",
        "price": "decimal(12,2)",
        "seen": "timestamp",
    }


ODD_COLUMNS = [
    "a blank",
    "dotted.name",
    'quo"ted',
    "sin'gle",
    "back`tick",
    "ünïcødé ☃",
    "dash-ed",
    "UPPER",
    "select",
    "_op",
    "$op",
    "$at",
    "$seq",
    "$before",
    "$row",
    "key",
    "after",
    "row",
    "100%{x}",
    "back\\slash",
    "sla/sh",
]
ODD_TABLES = ["my table", "UPPER-lower", "select", "ünï☃", 'quo"te', "sin'gle", "100%", "a=b&d"]


def write_odd(folder: Path, tables: Sequence[str]) -> Changelog:
    """Tables of odd names with columns of odd names, an odd key among them, in two epochs."""
    log = Changelog.at(folder, key=("the.key column", "$op"), with_before=True)

    def row(number: int, text: str) -> dict[str, Any]:
        values = {name: f"{text} {name}" for name in ODD_COLUMNS}
        return {**values, "$op": f"op {number}", "the.key column": number}

    for table in tables:
        log.put(table, row(1, "one"), row(2, "two"), row(3, "three"))
    log.resolve()
    for table in tables:
        log.put(table, row(2, "changed"))
        log.remove(table, (1, "op 1"))
    log.resolve()
    return log


def sql_name(lake: Lake, namespace: str, table: str) -> str:
    """A table's name in SQL, whatever characters it has."""
    return f"{lake.name}.`{namespace}`.`{table}`"


def all_rows(lake: Lake, namespace: str, table: str) -> list[dict[str, Any]]:
    return lake.sql(f"SELECT * FROM {sql_name(lake, namespace, table)}")


def test_odd_names_of_tables_and_columns_come_through_on_local_disk(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C1, I10: names with blanks, dots, quotes, signs, capitals and keywords, in one folder."""
    tables = [*ODD_TABLES, "a?b#c", "dotted.table"]
    log = write_odd(tmp_path / "feed", tables)
    # Readers of S3 locations cut them at ? and #, so the table needs another name.
    named = {"dotted.table": {"table": "dotted.table"}, "a?b#c": {"table": "a b c"}}
    run_once(spark, document(tmp_path / "feed", embedded, "shop", sink={"tables": named}))
    for table in tables:
        lake_table = named.get(table, {}).get("table", table)
        assert by_key(all_rows(local, "shop", lake_table), log.key) == log.expected(table)


def test_odd_names_of_tables_and_columns_come_through_a_rest_catalog_on_s3(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """C1, I10: the same where names travel in URLs and object keys."""
    # Jetty, in the reference server, takes no percent sign in a path.
    url_safe = [table for table in ODD_TABLES if "%" not in table]
    log = write_odd(tmp_path / "feed", url_safe)
    run_once(spark, document(tmp_path / "feed", rest.catalog_properties(), namespace))
    for table in url_safe:
        assert by_key(all_rows(lake, namespace, table), log.key) == log.expected(table)


def test_tables_are_named_by_the_last_part_of_a_full_name_or_by_the_configuration(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C1, U3: full_table_name topics, a choice of tables, and another name in the catalog."""
    log = Changelog.at(tmp_path / "feed")
    topics = ["shop.public.orders", "shop.public.clients", "shop.public.unwanted"]
    for topic in topics:
        log.put(topic, {"id": 1, "from": topic}, {"id": 2, "from": topic})
    log.resolve()
    log.remove(topics[0], 1)
    log.put(topics[1], {"id": 2, "from": "changed"})
    log.resolve()
    source = {"tables": ["orders", "shop.public.clients"]}
    sink = {"tables": {"shop.public.clients": {"table": "customers"}}}
    run_once(spark, document(tmp_path / "feed", embedded, "shop", source, sink))
    found = {row["tableName"] for row in local.sql(f"SHOW TABLES IN {local.name}.shop")}
    assert found == {"orders", "customers"}
    assert by_key(local.rows("shop.orders"), ["id"]) == log.expected(topics[0])
    assert by_key(local.rows("shop.customers"), ["id"]) == log.expected(topics[1])


def upload(folder: Path, store: S3Server, target: str) -> None:
    """Copy a feed's folder into the bucket."""
    bucket = S3FileSystem(**store.arrow_options())
    copy_files(
        str(folder), target, source_filesystem=LocalFileSystem(), destination_filesystem=bucket
    )


def test_a_feed_on_s3_is_taken_through_a_sink_url_into_a_rest_catalog(
    spark: SparkSession,
    store: S3Server,
    rest: RestCatalog,
    lake: Lake,
    namespace: str,
    tmp_path: Path,
) -> None:
    """C7, C1, I1: files, warehouse and catalog all remote; a second upload is picked up."""
    log = Changelog(folder=FeedFolder(tmp_path / "feed", ".gz"))
    prefix = f"lake/feeds/{namespace}"
    storage = store.iceberg_properties()
    parameters = {"warehouse": rest.warehouse, "equality_delete_by": "id", **storage}
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
    address = rest.uri.removeprefix("http://")
    pipelines = {
        "feed": {
            "source": {"cockroachdb": {"files": f"s3://{prefix}/", "storage": storage}},
            "sink": f"iceberg://{address}/{namespace}/bought?{query}",
        }
    }
    log.put("orders", *(order(number, "first") for number in range(5)))
    log.resolve()
    upload(log.folder.path, store, prefix)
    run_once(spark, pipelines)
    log.put("orders", order(2, "second"))
    log.remove("orders", 4)
    log.resolve()
    upload(log.folder.path, store, prefix)
    run_once(spark, pipelines)
    found = by_key(lake.rows(f"{namespace}.bought"), ["id"])
    assert {key: row["name"] for key, row in found.items()} == {
        (0,): "first",
        (1,): "first",
        (2,): "second",
        (3,): "first",
    }
    assert len(lake.epochs(f"{namespace}.bought")) == 2


def test_rows_of_a_tables_first_epoch_stay_when_its_next_epochs_only_delete(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """E3, E5, I10: later epochs are planned while the first one still makes the table."""
    log = Changelog.at(tmp_path / "feed")
    log.put("orders", *({"id": number, "name": f"n{number}"} for number in range(4)))
    log.resolve()
    for number in range(3):
        log.remove("orders", number)
        log.resolve()
    run_once(spark, document(tmp_path / "feed", embedded))
    assert len(local.epochs("shop.orders")) == 4
    assert by_key(local.rows("shop.orders"), ["id"]) == log.expected("orders")


def test_several_tables_in_one_folder_each_get_their_own_snapshots_at_shared_timestamps(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """C2, E1: a table commits the resolved timestamps with changes of its own, and no others."""
    log = Changelog.at(tmp_path / "feed")
    for number in range(6):
        log.put("a", {"id": number, "n": -number - 1})
        if number % 2:
            log.put("b", {"id": number, "n": -number - 1})
        if number == 4:
            log.put("late", {"id": 1, "n": 2})
        log.resolve()
    run_once(spark, document(tmp_path / "feed", rest.catalog_properties(), namespace))
    for table in log.tables():
        epochs = lake.epochs(f"{namespace}.{table}")
        times = [epoch["summary"]["crdb.resolved_hlc"] for epoch in epochs]
        assert times == [hlc_text(at) for at in log.published(table)]
        middle = json.loads(epochs[0]["summary"]["icestream.frontier"])["resolved"]
        rows = lake.rows(f"{namespace}.{table}", epochs[0]["snapshot_id"])
        assert by_key(rows, ["id"]) == log.expected(table, (middle[0], middle[1] - 1))
        assert by_key(lake.rows(f"{namespace}.{table}"), ["id"]) == log.expected(table)
