"""From Iceberg tables into OpenSearch: the index equals the table, whatever happens to either."""

import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from icestream import patience, pipeline
from icestream.change import AT, OP, Op
from icestream.config import load, open_pipeline, open_source
from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    HistoryLost,
    ProgressLost,
    Retryable,
    RolledBack,
    TargetUnavailable,
)
from icestream.failpoints import FailpointError
from icestream.frontier import Frontier
from icestream.iceberg.snapshots import History
from icestream.sinks.opensearch.sink import OpenSearchWriter
from tests.examples import THOROUGH
from tests.faults.shop import Process
from tests.integration.changelog import Changelog
from tests.integration.pipelines import Shell, assert_refused, run_once
from tests.integration.pipelines import document as feed_document
from tests.integration.searching import PIPELINE, TABLE, Search, sent, since
from tests.lake import Lake
from tests.proxy import Proxy
from tests.running import running, wait_for_state
from tests.servers import OpenSearch, wait_until

OTHER = "shop.customers"
FOLLOWING = 1
LOADING = 0
WAIT_SECONDS_MAX = 120.0
# The worker waits for some seconds; a busy machine needs its time, too.
TOLD_SECONDS_MAX = 40.0
EXIT_CONFIG, EXIT_OPERATOR = 2, 3
EXIT_OPERATOR = 3
EXIT_FENCED = 4
# As the RFC of Data Prepper's source has it, but for the addresses.
DATA_PREPPER = """
version: "2"
search:
  source:
    iceberg:
      tables:
        - table_name: "shop.orders"
          catalog:
            {catalog}
          disable_export: false
          polling_interval: "PT30S"
          identifier_columns: ["id"]
  sink:
    - opensearch:
        hosts: ["{host}"]
        index: "${{getMetadata(\\"iceberg_table_name\\")}}"
        document_id_field: "document_id"
        action: "${{getMetadata(\\"bulk_action\\")}}"
        insecure: true
"""
EVERY_TYPE = """
  id BIGINT, name STRING, price DECIMAL(38, 18), at TIMESTAMP, local TIMESTAMP_NTZ, day DATE,
  ratio DOUBLE, share FLOAT, paid BOOLEAN, count INT, raw BINARY, tags MAP<STRING, INT>,
  buyer STRUCT<age: INT, names: ARRAY<STRING>>, items ARRAY<STRUCT<cost: DECIMAL(5, 2)>>
"""
# Every tenth row is null wherever it can be.
EVERY_VALUE = """
  SELECT id, concat('"ä\\\\\\n', id) AS name, cast(id AS DECIMAL(38, 18)) / 3 AS price,
    timestamp_micros(1700000000123456 + id * 86400000001) AS at,
    cast(timestamp_micros(-1700000000123456 + id) AS TIMESTAMP_NTZ) AS local,
    date_add(DATE '1969-12-30', cast(id AS INT)) AS day,
    CASE id WHEN 3 THEN double('NaN') WHEN 4 THEN double('-Infinity') ELSE id / 7 END AS ratio,
    cast(id / 7 AS FLOAT) AS share, id % 2 = 0 AS paid, cast(id AS INT) AS count,
    cast(concat('z', id) AS BINARY) AS raw, map('a', cast(id AS INT), 'b', NULL) AS tags,
    named_struct('age', if(id % 3 = 0, NULL, 3), 'names', array('q', NULL)) AS buyer,
    array(named_struct('cost', cast(id / 100 AS DECIMAL(5, 2)))) AS items
  FROM range(40) WHERE id % 10 <> 0
  UNION ALL
  SELECT id, NULL, cast('0.000000000000000001' AS DECIMAL(38, 18)), NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL
  FROM range(40) WHERE id % 10 = 0
"""


@pytest.fixture
def proxy(node: OpenSearch) -> Iterator[Proxy]:
    with Proxy(node.url) as proxy:
        yield proxy


@pytest.fixture
def search(local: Lake, embedded: dict[str, str], node: OpenSearch) -> Search:
    """A pipeline that never ran, on a node where nothing of another test is left."""
    local.sql(f"CREATE NAMESPACE {local.name}.shop")
    return Search(lake=local, catalog=embedded, node=node)


def change_in_every_way(search: Search) -> Iterator[str]:
    """Change the table by all that Spark can do to it; yields after each snapshot or few."""
    for mode in ("copy-on-write", "merge-on-read"):
        search.sql(
            f"ALTER TABLE {TABLE} SET TBLPROPERTIES ('write.delete.mode' = '{mode}', "
            f"'write.update.mode' = '{mode}', 'write.merge.mode' = '{mode}')"
        )
        search.sql(f"UPDATE {TABLE} SET name = '{mode}', ratio = 0.5 WHERE id % 10 = 1")
        search.sql(f"DELETE FROM {TABLE} WHERE id IN (2, {4 if mode == 'copy-on-write' else 5})")
        search.sql(
            f"MERGE INTO {TABLE} t USING (SELECT id FROM range(6, 50, 40)) s ON t.id = s.id "
            "WHEN MATCHED THEN UPDATE SET count = t.count + 1 "
            "WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.id, 'merged')"
        )
        yield mode
    search.sql(f"ALTER TABLE {TABLE} ADD COLUMN note STRING")
    search.sql(f"UPDATE {TABLE} SET note = 'new' WHERE id = 7")
    yield "a new column"
    search.sql(f"ALTER TABLE {TABLE} SET TBLPROPERTIES ('format-version' = '3')")
    search.sql(f"UPDATE {TABLE} SET name = 'vectors' WHERE id IN (8, 11)")
    search.sql(f"DELETE FROM {TABLE} WHERE id = 9")
    yield "deletion vectors"
    search.sql(f"CALL system.rewrite_data_files('{TABLE}')")
    search.sql(f"DELETE FROM {TABLE} WHERE id = 12")
    yield "compaction"


# The index equals the table


@pytest.mark.compiled_plans
def test_a_file_of_data_prepper_keeps_the_index_equal_to_the_table(
    search: Search, tmp_path: Path
) -> None:
    """O1, O3, O4, O6, O7, O8, O10, O13: it loads unchanged, whatever Spark does to the table."""
    catalog = "\n            ".join(f"{key}: {value}" for key, value in search.catalog.items())
    file = tmp_path / "pipelines.yaml"
    file.write_text(DATA_PREPPER.format(catalog=catalog, host=search.node.url))
    (config,) = load(file).pipelines
    search.create(EVERY_TYPE, rest="PARTITIONED BY (bucket(2, id))")
    search.sql(f"INSERT INTO {TABLE} {EVERY_VALUE}")
    open_pipeline(config, search.lake.spark).run(once=True)
    assert len(search.documents()) == 40
    search.assert_equal()
    for way in change_in_every_way(search):
        open_pipeline(config, search.lake.spark).run(once=True)
        assert search.documents() == search.expected(), way
    mapping = search.ask("GET", f"/{TABLE}/_mapping")[TABLE]["mappings"]["properties"]
    kinds = {name: kind.get("type") for name, kind in mapping.items()}
    assert kinds["price"] == "keyword"
    assert kinds["ratio"] == "double"
    assert kinds["at"] == kinds["day"] == "date"
    assert kinds["note"] == "text"


@pytest.mark.parametrize("key", [("id",), ("id", "region")])
def test_equality_deletes_of_another_pipeline_are_followed(
    search: Search, tmp_path: Path, key: tuple[str, ...]
) -> None:
    """O4, O9: written by icestream's own sink, by the identifier columns and by others."""
    feed = Changelog.at(tmp_path / "feed")
    into = feed_document(feed.folder.path, search.catalog)
    search.tables = {TABLE: {"identifier_columns": list(key)}}
    feed.put("orders", *({"id": number, "region": "eu|us", "n": 1} for number in range(20)))
    feed.resolve()
    run_once(search.lake.spark, into)
    search.run()
    feed.put("orders", *({"id": number, "region": "eu|us", "n": 2} for number in (1, 2, 30)))
    feed.remove("orders", 3, 4, 99)
    feed.resolve()
    feed.put("orders", {"id": 3, "region": "asia", "n": 3}, {"id": 1, "region": "asia", "n": 3})
    feed.remove("orders", 2)
    feed.resolve()
    run_once(search.lake.spark, into)
    files = search.sql(f"SELECT content FROM {TABLE}.all_delete_files")
    assert 2 in {row["content"] for row in files}, "there are equality deletes"
    search.run()
    expected = search.expected(key=key)
    # What stands between the columns must not be taken for a part of them.
    assert search.documents() == {
        id_.replace("eu|us", "eu\\|us"): document for id_, document in expected.items()
    }


# Loading and following


def test_variants_of_any_shape_are_kept(search: Search) -> None:
    """O10, Mend g6: a number, then an object, a text, a list; none is refused for the others."""
    search.create("id BIGINT, v VARIANT, s STRUCT<v: VARIANT>", version=3)
    values = ["1", '{"a": {"b": 1}}', '"text"', '[1, {"a": "x"}]', '{"a": "other"}']
    for number, value in enumerate(values):
        parsed = f"parse_json('{value}')"
        search.sql(f"INSERT INTO {TABLE} VALUES ({number}, {parsed}, named_struct('v', {parsed}))")
        search.run()
    search.sql(f"UPDATE {TABLE} SET v = parse_json('[\"now a list\"]') WHERE id = 0")
    search.run()
    values[0] = '["now a list"]'
    held = [json.loads(value) for value in values]
    documents = search.documents()
    assert [documents[str(number)]["v"] for number in range(5)] == held
    assert documents["1"]["s"] == {"v": held[1]}
    mapping = search.ask("GET", f"/{TABLE}/_mapping")[TABLE]["mappings"]["properties"]
    assert mapping["v"] == {"type": "object", "enabled": False}


def test_without_export_only_later_changes_come(search: Search) -> None:
    """O1: `disable_export` begins with what is there, and sends nothing of it."""
    search.create()
    search.insert(1, 2)
    search.tables[TABLE]["disable_export"] = True
    search.run()
    assert not search.exists()
    assert search.positions() == {TABLE: [search.sequence_number(), FOLLOWING]}
    search.insert(3)
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 1")
    search.run()
    rows = search.expected()
    assert search.documents() == {"1": rows["1"], "3": rows["3"]}


def test_a_table_without_snapshots_gets_its_first_one_later(search: Search) -> None:
    """O1, O2: nothing is there to be loaded, and whatever comes is a change."""
    search.create()
    search.run()
    assert not search.exists()
    search.insert(1)
    search.insert(2, name="second")
    search.sql(f"DELETE FROM {TABLE} WHERE id = 1")
    search.run()
    assert set(search.documents()) == {"2"}
    search.assert_equal()


def test_a_first_snapshot_that_expired_before_it_was_read_is_missed(search: Search) -> None:
    """O6, E7: a table that had no snapshot has a history as well."""
    search.create()
    search.run()
    search.insert(1)
    search.insert(2)
    expire(search)
    with pytest.raises(HistoryLost) as lost:
        search.run()
    assert "loaded anew" in str(lost.value.hint)


def test_a_load_goes_on_where_it_was_stopped(search: Search, proxy: Proxy) -> None:
    """O1, E2: group by group, and what was committed meanwhile follows exactly once."""
    search.create()
    for number in range(4):
        search.insert(number, 10 + number)
    loaded = search.sequence_number()
    search.url, search.source["load_bytes"] = proxy.url, 1
    begun, before = search.pipeline(), sent()
    # The claim and the begin of the load come first.
    stop_at_commit(proxy, begun, after_bulk=2)
    begun.run(once=True)
    assert search.positions() == {TABLE: [loaded, LOADING, 2]}
    assert since(before) == {"indexed": 4}
    search.insert(5, name="meanwhile")
    search.sql(f"UPDATE {TABLE} SET name = 'meanwhile' WHERE id IN (0, 3)")
    search.sql(f"DELETE FROM {TABLE} WHERE id IN (1, 13)")
    search.run()
    # Four rows of the other files, then one insert, two updates and two deletes.
    assert since(before) == {"indexed": 4 + 4 + 3, "deleted": 2}
    assert search.positions() == {TABLE: [loaded + 3, FOLLOWING]}
    search.assert_equal()
    search.run()
    assert since(before) == {"indexed": 11, "deleted": 2}


def stop_at_commit(proxy: Proxy, begun: pipeline.Pipeline, after_bulk: int) -> None:
    """Let a run end after the commit of the group whose bulk is this one."""
    seen = iter(range(1, 1000))

    def count() -> None:
        if next(seen) == after_bulk:
            begun.stop()

    proxy.on("POST", "_bulk", times=None).call_before(count)


def test_two_tables_are_followed_and_one_that_is_added_is_loaded(search: Search) -> None:
    """O1, O2, O13: each has its own catalog, key and position."""
    search.create()
    search.insert(1, 2)
    search.run()
    own = {"catalog": dict(search.catalog), "identifier_columns": ["name", "id"]}
    search.tables[OTHER] = own
    search.source["catalog"] = {}
    search.tables[TABLE]["catalog"] = dict(search.catalog)
    search.create(table=OTHER, mode="merge-on-read")
    search.insert(1, 2, table=OTHER)
    search.insert(3)
    search.run()
    search.assert_equal()
    search.assert_equal(OTHER, ("name", "id"))
    search.sql(f"UPDATE {OTHER} SET id = 7 WHERE id = 1")
    search.sql(f"DELETE FROM {TABLE} WHERE id = 1")
    search.sql(f"UPDATE {OTHER} SET name = 'second' WHERE id = 2")
    before, other = sent(), sent(OTHER)
    search.run()
    assert since(before) == {"deleted": 1}
    assert since(other, OTHER) == {"indexed": 2, "deleted": 2}
    search.assert_equal()
    search.assert_equal(OTHER, ("name", "id"))
    numbers = {name: [search.sequence_number(name), FOLLOWING] for name in (TABLE, OTHER)}
    assert search.positions() == numbers


@pytest.mark.compiled_plans
@pytest.mark.parametrize("options", [{"group_bytes": 0}, {}, {"net_changes": True}])
def test_several_snapshots_between_two_looks(search: Search, options: dict[str, Any]) -> None:
    """O2, O8: one after the other, or several at once as the difference that they make."""
    search.source.update(options)
    search.create(mode="merge-on-read")
    search.insert(1, 2, 3)
    search.run()
    before = sent()
    search.insert(4)
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id IN (1, 4)")
    search.sql(f"UPDATE {TABLE} SET name = 'third' WHERE id = 1")
    search.insert(5)
    search.sql(f"DELETE FROM {TABLE} WHERE id IN (2, 5)")
    search.run()
    search.assert_equal()
    alone, last = "group_bytes" in options, search.sequence_number()
    one_by_one = {"indexed": 1 + 2 + 1 + 1, "deleted": 2}
    assert since(before) == (one_by_one if alone else {"indexed": 2, "deleted": 1})
    assert search.versions() == {
        "1": last - 2 if alone else last,
        "3": 1,
        "4": 3 if alone else last,
    }


def test_many_small_snapshots_take_no_more_steps_than_few(search: Search, proxy: Proxy) -> None:
    """O2, Mend g5: a step costs as much for 20 snapshots as for one."""
    search.url = proxy.url
    search.create(mode="merge-on-read")
    search.insert(*range(20))
    search.run()
    for many in (2, 20):
        before = proxy.count("POST", "_bulk"), proxy.count("PUT", "_doc/search")
        for number in range(many):
            search.sql(f"UPDATE {TABLE} SET name = 'of {many}' WHERE id = {number}")
        search.run()
        search.assert_equal()
        asked = proxy.count("POST", "_bulk"), proxy.count("PUT", "_doc/search")
        # Progress: the claim, the choice of the snapshots, and their end.
        assert (asked[0] - before[0], asked[1] - before[1]) == (1, 3)


def test_snapshots_that_are_small_are_read_apart_from_large_and_replaced_ones(
    search: Search, proxy: Proxy
) -> None:
    """O2, O6, Mend g5: what a compaction has rewritten is not read because of its neighbours."""
    search.url = proxy.url
    search.create(mode="copy-on-write")
    search.insert(*range(10))
    search.run()
    before, already = sent(), proxy.count("POST", "_bulk")
    search.insert(11)
    search.insert(12)
    search.sql(
        f"CALL system.rewrite_data_files(table => '{TABLE}', options => map('rewrite-all', 'true'))"
    )
    search.sql(f"DELETE FROM {TABLE} WHERE id IN (3, 11)")
    search.insert(13)
    search.run()
    search.assert_equal()
    assert since(before) == {"indexed": 3, "deleted": 2}
    assert proxy.count("POST", "_bulk") - already == 2


# Which document a row is


def test_rows_without_identity_are_inserted_and_never_deleted(
    search: Search, caplog: pytest.LogCaptureFixture
) -> None:
    """O9: a warning at the start; a delete stops the pipeline, and nothing is acknowledged."""
    search.tables = {TABLE: {}}
    search.create()
    search.insert(1, 1, 2)
    with caplog.at_level(logging.WARNING, "icestream"):
        search.run()
    assert "no identifier columns" in caplog.text
    search.insert(3)
    search.run()
    assert sorted(document["id"] for document in search.documents().values()) == [1, 1, 2, 3]
    durable = search.positions()
    search.sql(f"DELETE FROM {TABLE} WHERE id = 2")
    with pytest.raises(DataRejected) as refused:
        search.run()
    assert "identifier_columns" in str(refused.value.hint)
    assert search.positions() == {TABLE: [*durable[TABLE], search.sequence_number()]}
    assert len(search.documents()) == 4


@pytest.mark.parametrize("mode", ["copy-on-write", "merge-on-read"])
def test_rows_without_identity_are_there_once_though_they_were_sent_twice(
    search: Search, proxy: Proxy, fail: Callable[[str], None], mode: str
) -> None:
    """O9, O12, Mend g4: after lost answers and a run that died, in the load and in later steps."""
    search.tables, search.url = {TABLE: {}}, proxy.url
    search.create(mode=mode)
    search.insert(1, 1, 2)
    proxy.on("POST", "_bulk").lose_answer()
    fail("after-write=error")
    with pytest.raises(FailpointError):
        search.run()
    fail("")
    search.run()
    search.insert(3, 3)
    # Rewrites the files of others, which are carried over.
    search.sql(
        f"MERGE INTO {TABLE} t USING (SELECT explode(array(3, 4, 4)) AS id) s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET name = t.name "
        "WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.id, 'first')"
    )
    search.sql(f"CALL system.rewrite_data_files('{TABLE}', options => map('rewrite-all', 'true'))")
    search.insert(5)
    proxy.on("POST", "_bulk", times=2).lose_answer()
    search.run()
    found = sorted(document["id"] for document in search.documents().values())
    assert found == [1, 1, 2, 3, 3, 4, 4, 5]


def test_an_upgrade_that_would_rename_documents_stops_the_pipeline(
    search: Search, shell: Shell
) -> None:
    """O5, O9, Mend i3: at the next look of a run and at a start; loaded anew it goes on."""
    search.tables = {TABLE: {}}
    search.create()
    search.insert(1, 2)
    search.run()
    source = open_source(search.config(), search.lake.spark)
    at = Frontier({name: tuple(each) for name, each in search.progress()["upper"].items()})
    source.verify(at)
    search.sql(f"ALTER TABLE {TABLE} SET TBLPROPERTIES ('format-version' = '3')")
    search.insert(3)
    said = f"table {TABLE} was upgraded to format version 3"
    with pytest.raises(ConfigInvalid, match=said):
        source.verify(at)
    assert_refused(shell.run(search.document()), EXIT_CONFIG, said, "loaded anew")
    assert len(search.documents()) == 2
    for path in (TABLE, "icestream-progress"):
        search.ask("DELETE", f"/{path}")
    search.run()
    search.sql(f"DELETE FROM {TABLE} WHERE id = 2")
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 1")
    search.run()
    rows = search.sql(f"SELECT _row_id AS place, id, name FROM {TABLE}")
    assert search.documents() == {str(row.pop("place")): row for row in rows}


def test_a_branch_that_is_not_there_is_refused(search: Search, shell: Shell) -> None:
    """O2, E7, Mend i3: by `check`, at a start and when it is dropped; its table's are named."""
    search.create()
    search.insert(1)
    search.sql(f"ALTER TABLE {TABLE} CREATE BRANCH audit")
    search.sql(f"ALTER TABLE {TABLE} CREATE TAG frozen")
    for branch in ("audti", "frozen"):
        search.source["branch"] = branch
        said = (f"table {TABLE} has no branch {branch}", "There are: audit, main.")
        assert_refused(shell("check", shell.write(search.document())), EXIT_CONFIG, *said)
        assert_refused(shell.run(search.document()), EXIT_CONFIG, *said)
    search.source["branch"] = "audit"
    search.run()
    search.assert_equal()
    search.sql(f"ALTER TABLE {TABLE} DROP BRANCH audit")
    with pytest.raises(ConfigInvalid, match="has no branch audit"):
        search.run()


@pytest.mark.compiled_plans
def test_row_ids_stand_for_identifier_columns(search: Search) -> None:
    """O5, O9: in a table of format version 3, by copy-on-write and by deletion vectors."""
    search.tables = {TABLE: {}}
    search.create(version=3)
    search.insert(1, 1, 2)
    search.insert(3)
    search.run()
    before = set(search.documents())
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 2")
    search.sql(f"ALTER TABLE {TABLE} SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')")
    search.sql(f"DELETE FROM {TABLE} WHERE id = 3")
    search.sql(f"INSERT INTO {TABLE} VALUES (4, 'fourth')")
    search.run()
    rows = search.sql(f"SELECT _row_id AS place, id, name FROM {TABLE}")
    expected = {str(row.pop("place")): row for row in rows}
    assert search.documents() == expected
    assert len(before & set(expected)) == 3, "an update keeps its document"


@pytest.mark.parametrize("net", [False, True])
def test_rows_that_share_an_identifier_have_a_document_until_the_last_is_gone(
    search: Search, net: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """O8, Mend g1: it is one of them, after the load and after each delete, and this is told."""
    search.source["net_changes"] = net
    search.create(mode="merge-on-read")
    search.insert(1, 2, name="one")
    search.insert(1, name="other")
    search.run()
    assert search.documents()["1"]["name"] in ("one", "other")
    assert "1 identifiers of table shop.orders are on several rows" in caplog.text
    for name, left in (("one", {"1": "other"}), ("other", {})):
        search.sql(f"DELETE FROM {TABLE} WHERE name = '{name}'")
        search.run()
        documents = search.documents()
        assert {id_: documents[id_]["name"] for id_ in documents} == left
    assert "shared their identifiers" in caplog.text


@pytest.mark.parametrize("apart", [False, True])
def test_a_refused_row_does_not_take_the_document_of_a_row_that_shares_its_identifier(
    search: Search, apart: bool
) -> None:
    """O8, E10, Mend g1: in a load and in a step; the refused one is a letter."""
    own = {"mappings": {"properties": {"name": {"type": "long"}}}}
    body = {"index_patterns": ["shop.*"], "priority": 1, "template": own}
    search.ask("PUT", "/_index_template/own", body)
    search.sink["on_error"] = "dead_letter"
    search.create(mode="merge-on-read")
    search.insert(1, 2, name="7")
    if apart:
        search.run()
    # The row that is refused comes last: files are loaded in the order of their commits.
    search.insert(1, name="refused")
    search.run()
    documents = search.documents()
    assert {id_: documents[id_]["name"] for id_ in documents} == {"1": "7", "2": "7"}
    (letter,) = search.documents(f"{TABLE}__dead_letters").values()
    assert letter["document_id"] == "1"


def test_a_load_that_is_tried_again_looks_once_for_shared_identifiers(
    search: Search, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """O8, E13, Mend g1: it reads the identifiers of the whole table."""
    search.create()
    search.insert(1, 1)
    search.url = proxy.url
    refused = proxy.on("POST", "_bulk", times=None).refuse(503)
    loading = search.pipeline()
    with running(loading):
        wait_for_state(loading, "stalled", "")
        tried = proxy.count("POST", "_bulk")
        wait_for(lambda: proxy.count("POST", "_bulk") > 2 * tried)
        refused.remove()
        wait_for(lambda: len(search.documents()) == 1)
    assert caplog.text.count("are on several rows") == 1


def load_anew(search: Search) -> None:
    """The way out of most trouble: without progress and index the table is loaded again."""
    search.ask("DELETE", f"/icestream-progress/_doc/{PIPELINE}")
    search.ask("DELETE", f"/{TABLE}")
    search.run()


def test_a_null_in_an_identifier_column_stops_the_pipeline(search: Search) -> None:
    """O9, O12: with an error that says so, and nothing is acknowledged."""
    search.create()
    search.insert(1)
    search.run()
    durable = search.positions()
    search.sql(f"INSERT INTO {TABLE} VALUES (NULL, 'nobody')")
    with pytest.raises(DataRejected) as refused:
        search.run()
    assert "null" in str(refused.value.detail)
    assert "never null" in str(refused.value.hint)
    # The choice of the snapshot is durable, and nothing of it.
    assert search.positions() == {TABLE: [*durable[TABLE], search.sequence_number()]}
    search.sql(f"DELETE FROM {TABLE} WHERE id IS NULL")
    load_anew(search)
    search.assert_equal()


def test_an_id_that_opensearch_does_not_take(search: Search) -> None:
    """O11, O12: stops the pipeline, or becomes a dead letter while all others pass."""
    search.tables = {TABLE: {"identifier_columns": ["name"]}}
    search.create()
    search.sql(f"INSERT INTO {TABLE} VALUES (1, repeat('ä', 256)), (2, repeat('ä', 257))")
    with pytest.raises(DataRejected) as refused:
        search.run()
    assert "512 bytes" in str(refused.value.detail)
    assert "dead_letter" in str(refused.value.hint)
    search.sink["on_error"] = "dead_letter"
    search.run()
    assert [document["id"] for document in search.documents().values()] == [1]
    (letter,) = search.documents(f"{TABLE}__dead_letters").values()
    assert letter["error_type"] == "illegal_id"
    assert '"id":2' in letter["document"]
    assert search.positions() == {TABLE: [1, FOLLOWING]}
    # What never came in need not be deleted.
    search.sql(f"DELETE FROM {TABLE} WHERE id = 2")
    search.run()
    search.assert_equal(key=("name",))


def test_names_that_are_nowhere_are_refused(search: Search) -> None:
    """O9, O13: an identifier column or a table that does not exist."""
    search.create()
    search.tables[TABLE]["identifier_columns"] = ["number"]
    with pytest.raises(ConfigInvalid) as refused:
        search.run()
    assert "no column number" in str(refused.value)
    assert "id, name" in str(refused.value.hint)
    search.tables = {OTHER: {}}
    with pytest.raises(ConfigInvalid) as refused:
        search.run()
    assert f"no table {OTHER}" in str(refused.value)
    assert search.progress() == {}


# What was lost is noticed


def expire(search: Search) -> None:
    search.sql(
        f"CALL system.expire_snapshots(table => '{TABLE}', retain_last => 1, "
        "older_than => TIMESTAMP '2999-01-01 00:00:00')"
    )


def expired(search: Search) -> None:
    search.insert(3)
    search.insert(4)
    expire(search)


def rolled_back(search: Search) -> None:
    first = search.snapshot_ids()[0]
    search.sql(f"CALL system.rollback_to_snapshot('{TABLE}', {first})")
    search.insert(5)


def made_anew(search: Search) -> None:
    search.sql(f"DROP TABLE {TABLE}")
    search.create()
    for number in range(4):
        search.insert(number)


def replaced(search: Search) -> None:
    search.sql(f"CREATE OR REPLACE TABLE {TABLE} USING iceberg AS SELECT 9 AS id, 'x' AS name")


def index_deleted(search: Search) -> None:
    search.ask("DELETE", f"/{TABLE}")
    search.insert(6)


def index_made_anew(search: Search) -> None:
    search.ask("DELETE", f"/{TABLE}")
    search.ask("PUT", f"/{TABLE}")
    search.insert(6)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (index_deleted, (f"index {TABLE} is gone", "Restore the index", f"document {PIPELINE}")),
        (index_made_anew, (f"index {TABLE} has been made anew", f"document {PIPELINE}")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_was_lost_is_noticed_and_left_to_a_person(
    search: Search, shell: Shell, harm: Callable[[Search], None], said: tuple[str, ...]
) -> None:
    """O6, E7, E8: with what to do about it; nothing is skipped in silence."""
    search.create()
    search.insert(1)
    search.insert(2)
    search.run()
    documents, durable = search.documents(), search.positions()
    harm(search)
    answer = shell.run(search.document())
    assert_refused(answer, EXIT_OPERATOR, *said)
    assert search.positions() == durable
    if search.exists():
        assert search.documents() in (documents, {})


def test_a_table_that_was_made_anew_is_not_loaded_over_the_old_ones_documents(
    search: Search, shell: Shell
) -> None:
    """O15, O6, Mend i1: its versions are lower; without progress nobody knows what is stale."""
    search.create()
    for number in range(5):
        search.insert(number)
    search.run()
    (uuid,) = {partition.split()[2] for partition in search.progress()["upper"]}
    owner = {"pipeline": PIPELINE, "table": TABLE, "table_id": uuid}
    meta = search.ask("GET", f"/{TABLE}/_mapping")[TABLE]["mappings"]["_meta"]
    assert meta == {"icestream": owner}
    search.sql(f"DROP TABLE {TABLE}")
    search.create()
    search.insert(3, 7, name="anew")
    search.ask("DELETE", f"/icestream-progress/_doc/{PIPELINE}")
    said = ("knows nothing of them", "There are 5", uuid, "delete the index")
    file = shell.write(search.document())
    for command in (("check", file), ("run", "--once", file)):
        assert_refused(shell(*command), EXIT_OPERATOR, *said)
    status = shell("status", file)
    assert (status.code, status.out.endswith("  lost\n")) == (EXIT_OPERATOR, True)
    assert all(each in status.err for each in said)
    assert search.progress() == {}
    search.ask("DELETE", f"/{TABLE}")
    search.run()
    search.assert_equal()


def table_gone(search: Search) -> None:
    search.sql(f"DROP TABLE {TABLE}")


@pytest.mark.parametrize(
    ("harm", "state", "said", "code"),
    [
        (rolled_back, "rolled back", "was rolled back", EXIT_OPERATOR),
        (expired, "history lost", "has been expired", EXIT_OPERATOR),
        (made_anew, "lost", "created anew", EXIT_OPERATOR),
        (index_deleted, "lost", f"index {TABLE} is gone", EXIT_OPERATOR),
        (table_gone, "halted", f"no table {TABLE}", EXIT_CONFIG),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_status_says_what_would_stop_the_next_run(
    search: Search,
    shell: Shell,
    harm: Callable[[Search], None],
    state: str,
    said: str,
    code: int,
) -> None:
    """U2, E8, E13, Mend f1: of the table that it would stop at, in words and by its exit code."""
    search.tables[OTHER] = {"identifier_columns": ["id"]}
    for table in (TABLE, OTHER):
        search.create(table=table)
        search.insert(1, table=table)
        search.insert(2, table=table)
    search.run()
    file = shell.write(search.document())
    before = shell("status", "--json", file)
    assert before.code == 0
    assert [(row["state"], row["trouble"]) for row in before.rows()] == [("ok", None)] * 2
    harm(search)
    ran = shell("run", "--once", file)
    assert_refused(ran, code, said)
    as_json, as_text = shell("status", "--json", file), shell("status", file)
    assert as_json.code == as_text.code == code
    other, row = as_json.rows()
    assert (other["source_table"], other["state"], other["trouble"]) == (OTHER, "ok", None)
    assert (row["source_table"], row["state"]) == (TABLE, state)
    assert said in row["trouble"]["message"]
    assert row["trouble"]["hint"]
    first, second = as_text.out.splitlines()
    assert first.endswith("  ok")
    assert second.endswith(f"  {state}")
    # In the very words of the run, with what to do.
    for line in (row["trouble"]["message"], row["trouble"]["hint"]):
        assert line in ran.err
        assert line in as_text.err


def test_status_of_a_source_that_is_away_says_so_and_does_not_fail(
    search: Search, shell: Shell
) -> None:
    """U2, E12, Mend f1: what is durable is known all the same."""
    search.create()
    search.insert(1)
    search.run()
    # Nothing listens at this port.
    search.catalog = {"type": "rest", "uri": "http://127.0.0.1:9", "name": "away"}
    answer = shell("status", "--json", shell.write(search.document()))
    (row,) = answer.rows()
    assert answer.code == 0, answer.err
    assert (row["state"], row["position"]) == ("source away", f"{TABLE} 1")
    assert "could not" in row["trouble"]["message"]
    assert row["trouble"]["message"] in answer.err


def test_other_identifier_columns_are_refused(search: Search, shell: Shell) -> None:
    """O9: documents under the old identifiers would stay for ever."""
    search.create()
    search.insert(1)
    search.run()
    durable = search.positions()
    search.tables[TABLE] = {"identifier_columns": ["id", "name"]}
    search.insert(2)
    said = ("other identifier columns", "Put them back", "loaded anew")
    assert_refused(shell.run(search.document()), EXIT_CONFIG, *said)
    assert search.positions() == durable


def test_a_running_pipeline_waits_for_a_catalog_and_stops_for_another_table(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2, O6, E8, E12: a table that was made anew is not taken for a catalog that is away."""
    search.create()
    search.insert(1)
    search.source["polling_interval"] = 0.2
    running, errors, away = search.pipeline(), list[Exception](), threading.Event()

    def run() -> None:
        try:
            running.run()
        except Exception as error:
            errors.append(error)

    def head(history: History, branch: str, known: Any = History.head) -> Any:
        if away.is_set():
            raise TargetUnavailable("could not read the history")
        return known(history, branch)

    def stalled() -> bool:
        return running.health.to_json()["state"] == "stalled"

    # An embedded catalog is never away.
    monkeypatch.setattr(History, "head", head)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: search.exists() and len(search.documents()) == 1)
        away.set()
        wait_for(stalled)
        search.insert(2)
        away.clear()
        wait_for(lambda: len(search.documents()) == 2 and not stalled())
        away.set()
        wait_for(stalled)
        made_anew(search)
        away.clear()
        wait_for(lambda: not thread.is_alive())
    finally:
        running.stop()
        thread.join(WAIT_SECONDS_MAX)
    (error,) = errors
    assert isinstance(error, ProgressLost)
    assert "created anew" in str(error)
    assert "than the pipeline has read" in str(error.detail)
    assert "loaded anew" in str(error.hint)
    assert running.health.to_json()["state"] == "halted"


@pytest.mark.parametrize("what", ["load", "insert", "delete"])
def test_files_that_cannot_be_read_for_a_while_are_waited_for(search: Search, what: str) -> None:
    """E13, Mend f2: whichever of the step's queries meets them; a single run ends in time."""
    search.create(mode="merge-on-read")
    search.insert(1, 2)
    before = set() if what == "load" else files(search)
    if what != "load":
        search.run()
    if what == "insert":
        search.insert(3)
    away = before if what == "delete" else files(search) - before
    if what == "delete":
        search.sql(f"DELETE FROM {TABLE} WHERE id = 1")
    for file in away:
        file.rename(f"{file}.away")
    with pytest.raises(Retryable) as stopped:
        search.run()
    assert "FileNotFoundException" in str(stopped.value.detail)
    for file in away:
        Path(f"{file}.away").rename(file)
    search.run()
    search.assert_equal()


def files(search: Search) -> set[Path]:
    """The data files of the table as it is."""
    listed = search.sql(f"SELECT file_path FROM {TABLE}.files WHERE content = 0")
    return {Path(row["file_path"].removeprefix("file:")) for row in listed}


def test_history_that_expires_while_documents_are_refused_is_missed(
    search: Search, proxy: Proxy
) -> None:
    """E7, E13, O6: files that are gone for good are not waited for."""
    search.create()
    search.insert(1)
    search.run()
    search.url, search.source["polling_interval"] = proxy.url, 0.2
    refused = proxy.on("POST", "_bulk", times=None).refuse(503)
    following = search.pipeline()
    with pytest.raises(HistoryLost) as lost, running(following):
        search.insert(2)
        wait_for_state(following, "stalled", "")
        search.sql(f"INSERT OVERWRITE {TABLE} VALUES (9, 'nine')")
        expire(search)
        refused.remove()
        wait_for(lambda: following.health.to_json()["state"] == "halted")
    assert "loaded anew" in str(lost.value.hint)


# Runs that die, and runs that come back


@pytest.mark.parametrize("net", [False, True])
def test_a_run_that_died_anywhere_is_made_good_by_the_next(
    search: Search, fail: Callable[[str], None], net: bool
) -> None:
    """O12, E2: the same changes again, after the table has gone on, leave no trace of the first."""
    search.source["net_changes"] = net
    search.create()
    search.insert(1, 2)
    search.run()
    # The claim and the choice of a snapshot come first.
    points = ["before-swap=error@3", "after-swap=error@3", "after-claim=error"]
    points += ["after-write=error@1", "after-write=error@2", "after-commit=error@1"]
    points += ["after-commit=error@2"]
    # Net changes are told apart by their snapshots; where else a run dies makes no difference.
    points = points[::3] if net and not THOROUGH else points
    for number, point in enumerate(points, start=10):
        search.insert(number)
        fail(point)
        with pytest.raises(FailpointError):
            search.run()
        fail("")
        search.sql(f"DELETE FROM {TABLE} WHERE id = {number}")
        search.sql(f"UPDATE {TABLE} SET name = '{point}' WHERE id = 1")
        search.run()
        search.assert_equal()
        assert search.versions() == {"1": search.sequence_number(), "2": 1}


@pytest.fixture
def died_with_documents(
    search: Search, proxy: Proxy, fail: Callable[[str], None]
) -> Callable[[], None]:
    """Runs until documents were sent, and dies before they are durable."""

    def die() -> None:
        search.url = proxy.url
        proxy.on("POST", "_bulk").call_before(lambda: fail("before-publish=error"))
        with pytest.raises(FailpointError):
            search.run()
        fail("")

    return die


def rolled_back_unfinished(search: Search, die: Callable[[], None]) -> None:
    """An update of row 1 is sent, never becomes durable, and is undone."""
    search.create()
    search.insert(1)
    search.run()
    kept = search.snapshot_ids()[-1]
    search.sql(f"UPDATE {TABLE} SET name = 'undone' WHERE id = 1")
    die()
    assert search.documents()["1"]["name"] == "undone"
    search.sql(f"CALL system.rollback_to_snapshot('{TABLE}', {kept})")


@pytest.mark.parametrize("net", [False, True])
def test_documents_of_a_snapshot_that_was_rolled_back_unfinished_do_not_stay(
    search: Search, shell: Shell, died_with_documents: Callable[[], None], net: bool
) -> None:
    """O6, O12, E7, Mend i2: the next run stops; the way out that it names loads the table anew."""
    search.source["net_changes"] = net
    rolled_back_unfinished(search, died_with_documents)
    file = shell.write(search.document())
    assert_refused(shell("check", file), EXIT_OPERATOR, "sequence number 2", "loaded anew")
    search.insert(6)
    with pytest.raises(RolledBack) as stopped:
        search.run()
    assert "sequence number 2" in str(stopped.value.detail)
    assert "loaded anew" in str(stopped.value.hint)
    load_anew(search)
    search.assert_equal()
    assert set(search.documents()) == {"1", "6"}


def test_a_snapshot_that_was_rolled_back_unfinished_goes_on_when_it_comes_back(
    search: Search, died_with_documents: Callable[[], None]
) -> None:
    """O6, O12, Mend i2: the other way out; what was sent is sent again and finished."""
    rolled_back_unfinished(search, died_with_documents)
    with pytest.raises(RolledBack) as stopped:
        search.run()
    assert "Roll the branch forward again" in str(stopped.value.hint)
    undone = search.snapshot_ids()[-1]
    search.sql(f"CALL system.set_current_snapshot('{TABLE}', {undone})")
    search.insert(6)
    search.run()
    search.assert_equal()
    assert search.documents()["1"]["name"] == "undone"


def test_a_step_over_several_snapshots_is_finished_when_steps_become_single(
    search: Search, died_with_documents: Callable[[], None]
) -> None:
    """O2, O12, Mend i2: versions of the larger step are never met by smaller ones."""
    search.source["net_changes"] = True
    search.create()
    search.insert(1, 2, 3)
    search.run()
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 1")
    search.sql(f"UPDATE {TABLE} SET name = 'third' WHERE id = 1")
    died_with_documents()
    search.source["net_changes"] = False
    search.sql(f"UPDATE {TABLE} SET name = 'fourth' WHERE id = 1")
    before = sent()
    search.run()
    search.assert_equal()
    assert since(before) == {"indexed": 2}


# The claim, the choice of the snapshot and the name of the index come first.
@pytest.mark.parametrize("point", ["before-swap=error@4", "after-write=error@2"])
def test_a_load_that_died_before_its_first_commit_is_finished_as_it_began(
    search: Search, fail: Callable[[str], None], point: str
) -> None:
    """O1, O12: documents of rows that are deleted before the next run do not stay behind."""
    search.create()
    search.insert(1, 2)
    search.insert(3)
    fail(point)
    with pytest.raises(FailpointError):
        search.run()
    fail("")
    assert set(search.documents()) == {"1", "2", "3"}
    search.sql(f"DELETE FROM {TABLE} WHERE id = 1")
    search.run()
    search.assert_equal()


def test_a_process_that_was_killed_is_made_good_by_the_next(search: Search, shell: Shell) -> None:
    """O12, E2: killed between the bulk request and the commit."""
    be_killed(search, shell, "before-publish=kill@2")


@pytest.mark.long(kept_by="test_a_run_that_died_anywhere_is_made_good_by_the_next")
def test_a_process_that_was_killed_after_its_commit_is_made_good_by_the_next(
    search: Search, shell: Shell
) -> None:
    """O12, E2: killed before it heard of the commit."""
    be_killed(search, shell, "after-publish=kill@2")


def be_killed(search: Search, shell: Shell, point: str) -> None:
    search.create()
    search.insert(1, 2)
    file = shell.write(search.document())
    ended = Process(["run", "--once", file], point).wait()
    ended.assert_killed_at(point)
    search.sql(f"DELETE FROM {TABLE} WHERE id = 1")
    search.run()
    search.assert_equal()


def test_a_writer_that_wakes_up_late_changes_nothing(search: Search) -> None:
    """O12, E6: neither what was updated nor what was deleted since."""
    search.create()
    search.insert(1, 2, 3)
    search.run()
    late = pickle.dumps(OpenSearchWriter(options=search.config().sink, indices={TABLE: TABLE}))
    version = search.sequence_number()
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 1")
    search.sql(f"DELETE FROM {TABLE} WHERE id = 2")
    search.run()
    changes = pa.table(
        {
            OP: pa.array([Op.UPSERT, Op.UPSERT], pa.int8()),
            AT: pa.array([version, version], pa.int64()),
            "id": ["1", "2"],
            "document": ['{"id": 1, "name": "first"}', '{"id": 2, "name": "first"}'],
        }
    )
    (report,) = pickle.loads(late).write(TABLE, "0", changes)
    assert report.payload.superseded == 2
    search.assert_equal()


def test_of_two_runs_the_older_is_fenced(search: Search, proxy: Proxy, shell: Shell) -> None:
    """O12, E6: also when its last request comes after all that the newer one has done."""
    search.create()
    search.insert(1, 2)
    search.run()
    search.insert(3)
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 1")
    older = shell.write({**search.document(), PIPELINE: through(search, proxy)})

    def newer() -> None:
        search.sql(f"UPDATE {TABLE} SET name = 'third' WHERE id = 3")
        search.sql(f"DELETE FROM {TABLE} WHERE id = 2")
        search.run()

    proxy.on("POST", "_bulk").call_before(newer)
    answer = shell("run", "--once", older)
    assert_refused(answer, EXIT_FENCED, "a newer run of pipeline search has taken over")
    search.assert_equal()
    assert search.progress()["generation"] == 3


def through(search: Search, proxy: Proxy) -> dict[str, Any]:
    """The pipeline on another way to the node."""
    pipeline = search.document()[PIPELINE]
    pipeline["sink"][0]["opensearch"]["hosts"] = [proxy.url]
    return dict(pipeline)


# The command line


def test_commands_show_where_a_pipeline_is_and_what_changed(search: Search, shell: Shell) -> None:
    """O3, O8, O14, E12, Mend g3: for people and for programs; an updated row, as it was and is."""
    search.create()
    search.insert(1, 2, 3)
    first = search.snapshot_ids()[-1]
    file = shell.write(search.document())
    assert shell("check", file).out == f"search: ok, tables ['{TABLE}']\n"
    assert shell("run", "--once", file).code == 0
    search.sql(f"UPDATE {TABLE} SET name = 'second' WHERE id = 2")
    (row,) = shell("status", "--json", file).rows()
    assert (row["table"], row["state"], row["position"]) == (TABLE, "ok", f"{TABLE} 1")
    line = shell("status", file).out
    assert line.startswith(f"search  {TABLE}  epoch {row['epoch']}  at {TABLE} 1  committed ")
    changes = ("changes", TABLE, "--file", file, "--by", "id", "--from", str(first))
    last = search.snapshot_ids()[-1]
    before, after = shell(*changes, "--json").rows()
    common = {"iceberg_table_name": TABLE, "iceberg_snapshot_id": last, "document_id": "2"}
    assert before == {
        **common,
        "iceberg_operation": "UPDATE_BEFORE",
        "bulk_action": None,
        "row": {"id": 2, "name": "first"},
    }
    assert after == {
        **common,
        "iceberg_operation": "UPDATE_AFTER",
        "bulk_action": "INDEX",
        "row": {"id": 2, "name": "second"},
    }
    assert shell(*changes).out.splitlines() == [
        f"{last}  UPDATE_BEFORE  2  id=2  name=first",
        f"{last}  UPDATE_AFTER   2  id=2  name=second",
    ]
    search.ask("DELETE", f"/{TABLE}")
    (row,) = shell("status", "--json", file).rows()
    assert row["state"] == "lost"


def test_changes_are_read_from_the_tables_own_catalog(search: Search, shell: Shell) -> None:
    """O13, O14: the one that the pipeline file gives to the table alone."""
    search.create()
    search.insert(1)
    search.tables[TABLE]["catalog"] = dict(search.catalog)
    search.source["catalog"] = {"type": "hadoop", "warehouse": "/nowhere"}
    answer = shell("changes", TABLE, "--file", shell.write(search.document()), "--json")
    assert [row["row"] for row in answer.rows()] == [{"id": 1, "name": "first"}], answer.err


# A cluster in trouble


def test_a_busy_cluster_gets_the_same_documents_later(search: Search, proxy: Proxy) -> None:
    """O11, O12: 429 for a while, an answer that was lost, and each document there once."""
    search.create()
    search.insert(1, 2)
    search.url = proxy.url
    proxy.on("POST", "_bulk", times=2).refuse(429)
    proxy.on("PUT", "_doc/search").lose_answer()
    search.run()
    assert proxy.count("POST", "_bulk") >= 3
    search.assert_equal()
    assert search.versions() == {"1": 1, "2": 1}


def test_a_node_that_is_away_for_a_while_gets_everything(
    search: Search, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O11, O12: killed in the middle of a load and started again."""
    monkeypatch.setattr(patience, "TRIES_MAX", 10)  # the product's own: the node takes its time
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.5)  # the product's own
    monkeypatch.setattr(patience, "RETRY_SECONDS_MAX", 30.0)  # the product's own
    search.create()
    for number in range(3):
        search.insert(number, 10 + number)
    search.url, search.source["load_bytes"] = proxy.url, 1
    back = threading.Thread(target=search.node.start)

    def away() -> None:
        search.node.stop()
        back.start()

    proxy.on("POST", "_bulk").call_before(away)
    search.run()
    back.join()
    search.assert_equal()
    assert search.versions() == dict.fromkeys(search.expected(), search.sequence_number())


def test_a_node_that_is_away_is_told_at_once_and_waited_for(
    search: Search, proxy: Proxy, shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    """E13, Mend f2, f4: stalled within seconds, in the log too; a single run ends with exit 1."""
    search.create()
    search.insert(1)
    search.url, search.source["polling_interval"] = proxy.url, 0.2
    running_pipeline = search.pipeline()
    with running(running_pipeline):
        wait_for(lambda: search.exists() and len(search.documents()) == 1)
        proxy.down()
        search.insert(2)
        began = time.monotonic()
        wait_for_state(running_pipeline, "stalled", "could not reach any host")
        assert time.monotonic() - began < TOLD_SECONDS_MAX
        assert "stalled: could not reach any host" in caplog.text
        answer = shell("run", shell.write(search.document()), "--once")
        assert_refused(answer, 1, "could not reach any host of OpenSearch")
        proxy.up()
        wait_for(lambda: len(search.documents()) == 2)
        wait_for_state(running_pipeline, "running")
    search.assert_equal()


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, WAIT_SECONDS_MAX, "what a test waits for")
