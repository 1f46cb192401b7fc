"""Whose table is it: strangers' tables are never touched, and no table has two source tables.

The strangers' tables are made by Spark SQL, and Spark SQL says what became of them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.errors import ConfigInvalid, DataRejected
from icestream.iceberg.table import OWNER_PROPERTY
from tests.captures import FeedFolder
from tests.integration.pipelines import Shell, assert_refused, document, run_once
from tests.integration.topics import NAMESPACE
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.running import running, wait_for_state
from tests.servers import RestCatalog, wait_until

CONFIG = 2
UPSERT = {"value": {"envelope": "upsert"}}
ROUTE = {"route": {"field": "tab"}}


def strangers_table(lake: Lake, name: str) -> list[dict[str, Any]]:
    """A table that someone else made and filled; returns its rows."""
    lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {lake.name}.{name.split('.')[0]}")
    lake.sql(f"CREATE TABLE {lake.table(name)} (id BIGINT, amount BIGINT) USING iceberg")
    lake.sql(f"INSERT INTO {lake.table(name)} VALUES (1, 100), (2, 200)")
    return lake.rows(name)


def snapshots(lake: Lake, name: str) -> int:
    return len(lake.snapshots(name))


def assert_holds(lake: Lake, name: str, feed: RandomFeed, resolved: Any) -> None:
    expected = feed.expected("orders", resolved)
    found = {row["id"]: row for row in lake.rows(name)}
    assert found.keys() == expected.keys()
    assert {key: {n: found[key][n] for n in row} for key, row in expected.items()} == expected


def test_a_strangers_table_keeps_its_rows(
    spark: SparkSession,
    rest: RestCatalog,
    lake: Lake,
    namespace: str,
    tmp_path: Path,
    shell: Shell,
) -> None:
    """I16, Mend a1: source table `orders` goes into `orders_cdc`, and `orders` is a stranger's."""
    strange, own = f"{namespace}.orders", f"{namespace}.orders_cdc"
    before = strangers_table(lake, strange)
    feed = RandomFeed.create(tmp_path / "feed", 30)
    catalog = rest.catalog_properties()
    sink = {"tables": {"orders": {"table": "orders_cdc"}}}
    pipelines = document(feed.folder.path, catalog, namespace, sink=sink)
    feed.epoch(20)
    assert shell("check", shell.write(pipelines)).code == 0
    run_once(spark, pipelines)
    resolved = feed.epoch(20)
    run_once(spark, pipelines)
    assert_holds(lake, own, feed, resolved)
    [row] = shell("status", shell.write(pipelines), "--json").rows()
    assert (row["table"], row["source_table"]) == (own, "orders")
    # Without the option both would have the name.
    plain = document(feed.folder.path, catalog, namespace)
    for command in (["check"], ["run", "--once"]):
        answer = shell(command[0], shell.write(plain), *command[1:])
        assert_refused(answer, CONFIG, f"{strange} is there already", "{table: orders}")
    assert lake.rows(strange) == before
    assert snapshots(lake, strange) == 1


def test_a_table_is_adopted_by_naming_it_and_given_away_by_its_property(
    spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str, tmp_path: Path
) -> None:
    """I16, Mend a1: the ways out that the hints name."""
    name = f"{namespace}.orders"
    strangers_table(lake, name)
    lake.sql(f"DELETE FROM {lake.table(name)}")
    feed = RandomFeed.create(tmp_path / "feed", 31)
    resolved = feed.epoch(20)
    sink = {
        "tables": {"orders": {"table": "orders"}},
        "equality_delete_by": ["id"],
    }
    pipelines = document(feed.folder.path, rest.catalog_properties(), namespace, sink=sink)
    run_once(spark, pipelines)
    assert_holds(lake, name, feed, resolved)
    [owner] = lake.sql(f"SHOW TBLPROPERTIES {lake.table(name)} ('{OWNER_PROPERTY}')")
    assert json.loads(owner["value"]) == {"pipeline": "feed", "table": "orders"}
    other = {"other": pipelines["feed"]}
    with pytest.raises(ConfigInvalid, match="belongs to someone else") as caught:
        run_once(spark, other)
    assert "pipeline feed, source table orders" in caught.value.detail
    given_away = f"ALTER TABLE {name} SET TBLPROPERTIES ('{OWNER_PROPERTY}' = '')"
    assert given_away in caught.value.hint
    lake.sql(given_away.replace(name, lake.table(name)))
    run_once(spark, other)
    assert_holds(lake, name, feed, resolved)
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        run_once(spark, pipelines)


def test_a_broken_table_of_a_stranger_stops_nobody(
    spark: SparkSession, local: Lake, embedded: dict[str, str], tmp_path: Path
) -> None:
    """I16, Mend a6: its metadata are gone; the pipeline is not mapped to it."""
    strangers_table(local, "shop.broken")
    shutil.rmtree(Path(embedded["warehouse"], "shop", "broken", "metadata"))
    feed = RandomFeed.create(tmp_path / "feed", 32)
    resolved = feed.epoch(10)
    pipelines = document(feed.folder.path, embedded)
    run_once(spark, pipelines)
    run_once(spark, pipelines)
    assert_holds(local, "shop.orders", feed, resolved)


def test_a_second_topic_of_the_same_table_halts_a_running_pipeline(topics):
    """I16, K2, Mend a2: nothing of the second is written, and its name is the way out."""
    eu = topics.create("eu.orders")
    topics.send("eu.orders", [({"id": 1}, {"id": 1, "v": "eu"})])
    pattern = {"topic_pattern": eu.replace("eu.orders", "(eu|us).orders"), **UPSERT}
    document = topics.document(pattern, commit_interval="PT0.2S")
    pipeline = topics.pipeline(document)
    with pytest.raises(ConfigInvalid) as caught, running(pipeline):
        wait_until(lambda: bool(topics.epochs("orders")), 90, "the first epoch")
        us = topics.create("us.orders")
        topics.send("us.orders", [({"id": 1}, {"id": 1, "v": "us"})])
        wait_for_state(pipeline, "halted")
    assert caught.value.message == "two source tables go into one Iceberg table"
    assert eu in caught.value.detail
    assert us in caught.value.detail
    assert topics.rows("orders") == [{"id": 1, "v": "eu"}]
    with pytest.raises(ConfigInvalid, match="two source tables"):
        topics.run(document)
    topics.run(topics.document(pattern, {"tables": {us: {"table": "us_orders"}}}))
    assert topics.rows("orders") == [{"id": 1, "v": "eu"}]
    assert topics.rows("us_orders") == [{"id": 1, "v": "us"}]


def routed(*tabs: str, first: int = 0) -> list[tuple[Any, Any]]:
    """Records that name their tables."""
    return [({"id": n}, {"id": n, "tab": tab}) for n, tab in enumerate(tabs, first)]


def test_tables_with_dotted_names_take_part_in_every_run(topics, monkeypatch):
    """I16, I14, Mend a3: after a kill in the first commit each of them gets its rows, once."""
    topics.create("all", 2)
    tables = [f"shop.t{n}" for n in range(10)]
    topics.send("all", routed(*tables * 3))
    document = topics.document({"topics": ["all"], **UPSERT}, ROUTE)
    swaps = []

    def crash(place: str) -> None:
        if place == failpoints.AFTER_SWAP:
            swaps.append(place)
        # Ten claims come first; after the first epoch's first swap nothing goes on.
        if len(swaps) > 10:
            raise MemoryError("the coordinator dies here")

    # A failpoint in this process: the same place as in a killed one.
    monkeypatch.setattr(failpoints, "reach", crash)
    with pytest.raises(MemoryError):
        topics.run(document)
    # From here on nothing dies.
    monkeypatch.undo()
    carriers = [number for number in range(10) if topics.epochs(f"t{number}")]
    assert 0 < len(carriers) < 10
    topics.run(document)
    topics.send("all", routed(*tables, first=30))
    topics.run(document)
    topics.run(document)
    for number in range(10):
        found = sorted(row["id"] for row in topics.rows(f"t{number}"))
        assert found == [number, number + 10, number + 20, number + 30]


def test_values_with_the_same_last_part_do_not_share_a_table(topics):
    """I16, K4, Mend a3: the records of the second are rejected, nothing is overwritten."""
    name = topics.create("all")
    topics.send("all", routed("a.orders", "a.items"))
    stopping = topics.document({"topics": ["all"], **UPSERT}, ROUTE)
    topics.run(stopping)
    topics.send("all", [({"id": 0}, {"id": 0, "tab": "b.orders"})])
    with pytest.raises(DataRejected, match="cannot be taken") as caught:
        topics.run(stopping)
    assert "shop.orders is fed by source table a.orders" in caught.value.detail
    keeping = topics.document({"topics": ["all"], **UPSERT}, ROUTE, on_error="dead_letter")
    topics.send("all", routed("a.orders", "b.items", "b.items", first=5))
    topics.run(keeping)
    topics.run(keeping)
    assert [row["id"] for row in topics.rows("orders", "id")] == [0, 5]
    assert {row["tab"] for row in topics.rows("orders")} == {"a.orders"}
    assert [row["id"] for row in topics.rows("items")] == [1]
    letters = topics.rows("all__dead_letters", "position")
    assert [row["position"] for row in letters] == [f"{name}/0/{n}" for n in (2, 4, 5)]


def test_values_with_the_same_last_part_may_come_at_once(topics):
    """I16, Mend a3: one of them gets the table, the records of the other are letters."""
    topics.create("all", 2)
    topics.send("all", routed(*["a.t", "b.t"] * 10))
    document = topics.document({"topics": ["all"], **UPSERT}, ROUTE, on_error="dead_letter")
    topics.run(document)
    topics.run(document)
    assert len({row["tab"] for row in topics.rows("t")}) == 1
    assert len(topics.rows("t")) == len(topics.rows("all__dead_letters")) == 10


def test_values_that_cannot_be_names_are_letters(topics):
    """I16, K4, Mend a4: the pipeline goes on, and no file lies in another table's folder."""
    topics.create("all")
    strangers_table(topics.lake, f"{NAMESPACE}.strange")
    odd = ["..", ".", "shop.", "x" * 300, "a\x00b", "a\n", "a/b", "a\\b", " a", "x__dead_letters"]
    odd += ["a#b", "all__dead_letters", "strange", ""]
    topics.send("all", routed("a", *odd, "a"))
    document = topics.document({"topics": ["all"], **UPSERT}, ROUTE)
    with pytest.raises(DataRejected, match="cannot be taken"):
        topics.run(document)
    keeping = topics.document({"topics": ["all"], **UPSERT}, ROUTE, on_error="dead_letter")
    topics.run(keeping)
    topics.run(keeping)
    assert [row["id"] for row in topics.rows("a", "id")] == [0, len(odd) + 1]
    assert len(topics.rows("all__dead_letters")) == len(odd)
    tables = topics.lake.sql(f"SHOW TABLES IN {topics.lake.name}.{NAMESPACE}")
    assert {row["tableName"] for row in tables} == {"a", "all__dead_letters", "strange"}
    assert snapshots(topics.lake, f"{NAMESPACE}.strange") == 1


def test_a_changefeeds_table_without_a_usable_name_is_refused(
    spark: SparkSession, embedded: dict[str, str], tmp_path: Path
) -> None:
    """I16, U3, Mend a4: another name is the way out."""
    folder = FeedFolder(tmp_path / "feed")
    wall = 1_700_000_000_000_000_000
    updated = f"{wall + 1}.0000000000"
    row = json.dumps({"after": {"id": 1}, "key": [1], "updated": updated})
    folder.data("shop.", [row], (wall, 0))
    folder.resolved((wall + 10, 0))
    with pytest.raises(ConfigInvalid, match="cannot become an Iceberg table") as caught:
        run_once(spark, document(folder.path, embedded))
    assert "tables: {shop.: {table: <name>}}" in caught.value.hint
    sink = {"tables": {"shop.": {"table": "orders"}}}
    run_once(spark, document(folder.path, embedded, sink=sink))
    assert [row["id"] for row in Lake(spark, embedded).rows("shop.orders")] == [1]
