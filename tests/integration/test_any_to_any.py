"""Every source into every sink: what arrives is what the source has, crashes and selects included.

Sources into Iceberg have their own files; here are indices of documents behind all sources, and
Iceberg tables into Iceberg tables. What is expected is asked of the source itself, or of an oracle.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.config import open_pipeline, parse
from icestream.connectors import SINKS, SOURCES
from icestream.errors import ConfigInvalid, DataRejected, SchemaRejected
from icestream.failpoints import FailpointError
from tests.faults.crashing import crashes
from tests.integration.pipelines import Document, Shell, assert_refused, embedded_catalog
from tests.integration.postgres_world import Load, World, session
from tests.integration.searching import Search
from tests.integration.test_toys import GROWTH, TABLES, counting, expected, folder_rows
from tests.integration.topics import Topics
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.servers import OpenSearch
from tests.toys.counter import CounterOptions
from tests.toys.folder import FolderOptions

EXIT_OPERATOR = 3

NAMESPACE = "copies"
DOCUMENTS_MAX = 10_000
SECONDS_MAX = 60.0
AROUND_THE_COMMIT = (
    failpoints.AFTER_WRITE,
    failpoints.BEFORE_PUBLISH,
    failpoints.AFTER_PUBLISH,
)

Arm = Callable[[str], None]
Rows = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source and a sink from outside of the package."""
    monkeypatch.setattr(SOURCES, "_added", {})  # other tests of this process shall not meet them
    monkeypatch.setattr(SINKS, "_added", {})  # here neither
    SOURCES.add("counter", CounterOptions)
    SINKS.add("folder", FolderOptions)


@pytest.fixture
def prefix(namespace: str) -> str:
    """What the indices of a test begin with: all tests share the node."""
    return namespace.lower()


def into_indices(node: OpenSearch, prefix: str, **options: Any) -> Document:
    """The sink of a pipeline file."""
    index = prefix + '-${getMetadata("iceberg_table_name")}'
    own = {"hosts": [node.url], "index": index, "progress_index": f"{prefix}-progress"}
    return {"opensearch": {**own, **options}}


def documents(node: OpenSearch, index: str) -> Rows:
    """All documents of an index by their ids."""
    requests.post(f"{node.url}/{index}/_refresh", timeout=SECONDS_MAX).raise_for_status()
    path = f"{node.url}/{index}/_search?size={DOCUMENTS_MAX}"
    hits = requests.get(path, timeout=SECONDS_MAX).json()["hits"]["hits"]
    return {hit["_id"]: hit["_source"] for hit in hits}


def run(spark: SparkSession, pipelines: Document) -> None:
    """Take all that is there."""
    open_pipeline(parse(pipelines).pipelines[0], spark).run(once=True)


def run_with_failures(
    spark: SparkSession, document: Document, fail: Arm, more: Callable[[], None]
) -> None:
    """Fail before and after an epoch is committed, each time with more to do, then run on."""
    for place in AROUND_THE_COMMIT:
        more()
        fail(f"{place}=error")
        with pytest.raises(FailpointError, match=place):
            run(spark, document)
    fail("")
    more()
    run(spark, document)


# The toy source


def counted(node: OpenSearch, prefix: str, table: str) -> dict[int, int]:
    """A table of the counter as its index has it."""
    found = documents(node, f"{prefix}-{table}")
    assert all(id_ == str(row["id"]) for id_, row in found.items())
    return {row["id"]: row["count"] for row in found.values()}


def test_a_counter_that_crashes_everywhere_fills_indices_exactly(
    spark: SparkSession, node: OpenSearch, prefix: str
):
    """E3, O12: documents of a run that died are those of the next one, or are gone."""
    upto = 0
    for place in failpoints.PLACES:
        upto += GROWTH
        document = counting(upto, into_indices(node, prefix))
        pipeline = open_pipeline(parse(document).pipelines[0], spark)
        assert crashes(pipeline, f"{place}=crash"), place
    run(spark, counting(upto, into_indices(node, prefix)))
    for table, every in TABLES.items():
        assert counted(node, prefix, table) == expected(every, upto)


def test_a_table_that_is_added_later_is_brought_forward_in_its_index(
    spark: SparkSession, node: OpenSearch, prefix: str, fail: Arm
):
    """E4: also when the run dies after its index is named, and between two of its own epochs."""
    end = into_indices(node, prefix)
    run(spark, counting(2 * GROWTH, end, tables={"ones": 1}))
    for place, passes in ((failpoints.AFTER_WRITE, 1), (failpoints.AFTER_PUBLISH, 2)):
        fail(f"{place}=error@{passes}")
        with pytest.raises(FailpointError, match=place):
            run(spark, counting(3 * GROWTH, end))
    fail("")
    run(spark, counting(3 * GROWTH, end))
    for table, every in TABLES.items():
        assert counted(node, prefix, table) == expected(every, 3 * GROWTH)
    run(spark, counting(4 * GROWTH, end))
    for table, every in TABLES.items():
        assert counted(node, prefix, table) == expected(every, 4 * GROWTH)


def test_new_columns_of_a_source_become_fields_of_its_documents(
    spark: SparkSession, node: OpenSearch, prefix: str
):
    """O8, I11: what the source had before is remembered with the index."""
    end = into_indices(node, prefix)
    run(spark, counting(GROWTH, end))
    run(spark, counting(2 * GROWTH, end, notes=True))
    found = documents(node, f"{prefix}-ones")
    assert counted(node, prefix, "ones") == expected(1, 2 * GROWTH)
    later = [row for row in found.values() if row["count"] >= GROWTH]
    assert later and all(row["note"] == str(row["count"]) for row in later)
    mapping = requests.get(f"{node.url}/{prefix}-ones/_mapping", timeout=SECONDS_MAX).json()
    fields = mapping[f"{prefix}-ones"]["mappings"]["properties"]
    assert (fields["note"]["type"], fields["count"]["type"]) == ("text", "long")


# PostgreSQL


def in_database(world: World, table: str, columns: str, key: str) -> Rows:
    """Rows of the database as documents, by an id that PostgreSQL makes."""
    text = f"select {key}, to_jsonb(r) from (select {columns} from {table}) r"
    rows = world.sql(text)
    return {
        str(id_): {name: value for name, value in row.items() if value is not None}
        for id_, row in rows
    }


def test_postgres_fills_indices_exactly(
    world: World, spark: SparkSession, node: OpenSearch, prefix: str, fail: Arm
):
    """E1, P3, P6, P7: the copy, the stream, a truncated table, one without rows, a late one."""
    load = Load(session(world.dsn), random.Random(3), 300)
    load.create()
    world.sql("create table nothing(id int primary key)")
    tables = ["public.item", "public.part", "public.nothing"]

    def document() -> Document:
        made = world.document(tables)
        made[world.name]["sink"] = into_indices(node, prefix)
        return made

    def more() -> None:
        for _ in range(5):
            load.transact()

    def assert_equal() -> None:
        item = in_database(world, "item", "id, note", "id::text")
        found = documents(node, f"{prefix}-public.item")
        told = {
            id_: {name: row[name] for name in ("id", "note") if name in row}
            for id_, row in found.items()
        }
        assert told == item
        part = in_database(world, "part", "code, number, note", "code || '|' || number")
        assert documents(node, f"{prefix}-public.part") == part

    run_with_failures(spark, document(), fail, more)
    assert_equal()
    run_with_failures(spark, document(), fail, more)
    assert_equal()
    assert documents(node, f"{prefix}-public.nothing") == {}
    world.transaction("truncate part", "insert into part values ('c1', 1, 'after all')")
    fail(f"{failpoints.BEFORE_PUBLISH}=error")
    with pytest.raises(FailpointError):
        run(spark, document())
    fail("")
    run(spark, document())
    found = documents(node, f"{prefix}-public.part")
    assert [row["note"] for row in found.values()] == ["after all"]
    world.sql("create table late(id int primary key, n int)", "insert into late values (1, 1)")
    tables.append("public.late")
    run(spark, document())
    world.sql("update late set n = 2")
    run(spark, document())
    assert documents(node, f"{prefix}-public.late") == {"1": {"id": 1, "n": 2}}
    assert_equal()


def test_a_select_stands_before_an_index(
    world: World, spark: SparkSession, node: OpenSearch, prefix: str
):
    """E11, O8: rows that leave the condition go, a derived column has its own type."""
    world.sql(
        "create table person(id int primary key, name text, age int)",
        "insert into person values (1, 'Ann', 30), (2, 'Ben', 10), (3, 'Cy', 40)",
    )
    document = world.document(["public.person"])
    document[world.name]["sink"] = into_indices(node, prefix)
    document[world.name]["transform"] = {
        "public.person": "select id as number, upper(name) as name, age / 10 as tens "
        "from changes where age >= 18"
    }
    run(spark, document)
    index = f"{prefix}-public.person"
    assert documents(node, index) == {
        "1": {"number": 1, "name": "ANN", "tens": 3.0},
        "3": {"number": 3, "name": "CY", "tens": 4.0},
    }
    world.sql(
        "update person set age = 17 where id = 1",
        "update person set age = 20 where id = 2",
        "delete from person where id = 3",
    )
    run(spark, document)
    assert documents(node, index) == {"2": {"number": 2, "name": "BEN", "tens": 2.0}}


def test_values_of_all_types_become_what_json_has_for_them(
    world: World, spark: SparkSession, node: OpenSearch, prefix: str
):
    """O8, P9: nothing is rounded on the way."""
    world.sql(
        "create table kinds(id uuid primary key, d numeric(30, 10), t timestamptz, n timestamp, "
        "b bytea, j jsonb, a int[], day date, f float8, big bigint)",
        "insert into kinds values ('0f8fad5b-d9cb-469f-a165-70867728950e', 12.5, "
        "'2020-01-02 03:04:05.123456+02', '2020-01-02 03:04:05', '\\x00ff', '{\"a\": 1}', "
        "'{1,2}', '1999-12-31', 0.1, 9007199254740993)",
    )
    document = world.document(["public.kinds"])
    document[world.name]["sink"] = into_indices(node, prefix)
    run(spark, document)
    ((id_, row),) = documents(node, f"{prefix}-public.kinds").items()
    assert id_ == row["id"] == "0f8fad5b-d9cb-469f-a165-70867728950e"
    assert row["d"] == "12.5000000000"
    assert row["t"] == "2020-01-02T01:04:05.123456Z"
    assert row["n"] == "2020-01-02T03:04:05.000000"
    assert (row["b"], row["a"], row["day"], row["f"]) == ("AP8=", [1, 2], "1999-12-31", 0.1)
    assert row["big"] == 9007199254740993


def test_a_table_without_a_key_is_refused_unless_the_sink_names_one(
    world: World, spark: SparkSession, node: OpenSearch, prefix: str
):
    """O4, U5: the way out that the message names is taken."""
    world.sql("create table plain(id int, n int)", "insert into plain values (1, 1), (2, 2)")
    document = world.document(["public.plain"])
    document[world.name]["sink"] = into_indices(node, prefix)
    with pytest.raises(ConfigInvalid, match="has no key, so nothing says which") as caught:
        run(spark, document)
    assert "`identifier_columns` of the sink" in str(caught.value.hint)
    world.sql("alter table plain replica identity full")
    named = into_indices(node, prefix, identifier_columns={"public.plain": ["id"]})
    document[world.name]["sink"] = named
    run(spark, document)
    world.sql("update plain set n = 3 where id = 1", "delete from plain where id = 2")
    run(spark, document)
    assert documents(node, f"{prefix}-public.plain") == {"1": {"id": 1, "n": 3}}


def test_values_that_were_not_sent_are_refused_with_a_way_out(
    world: World, spark: SparkSession, node: OpenSearch, prefix: str
):
    """P8, U5: documents can be seen before they count, so no row is looked up in them."""
    world.sql(
        "create table person(id int primary key, n int, doc text)",
        "alter table person alter column doc set storage external",
        "insert into person values (1, 1, repeat('long', 2000))",
    )
    document = world.document(["public.person"])
    document[world.name]["sink"] = into_indices(node, prefix)
    run(spark, document)
    world.sql("update person set n = 2")
    with pytest.raises(DataRejected, match="leave out values, and the sink cannot") as caught:
        run(spark, document)
    assert "REPLICA IDENTITY FULL" in str(caught.value.hint)
    world.sql("alter table person replica identity full", "update person set n = 3")
    with pytest.raises(DataRejected, match="leave out values"):
        run(spark, document)
    found = documents(node, f"{prefix}-public.person")
    assert [(row["n"], len(row["doc"])) for row in found.values()] == [(1, 8000)]


# Kafka and CockroachDB


def test_kafka_fills_an_index_exactly(
    topics: Topics, spark: SparkSession, node: OpenSearch, prefix: str, fail: Arm
):
    """E1, K1, K6: upserts and tombstones of a topic with several partitions."""
    topics.create("orders", 3)
    generator = random.Random(4)
    upserts = {"topics": ["orders"], "value": {"envelope": "upsert"}}
    document = topics.document(upserts, epoch_rows_max=50)
    ((_, body),) = document.items()
    body["sink"] = into_indices(node, prefix)

    def more() -> None:
        keys = [generator.randrange(60) for _ in range(120)]
        rows = [
            None if generator.random() < 0.2 else {"id": key, "v": number}
            for number, key in enumerate(keys)
        ]
        topics.send("orders", [({"id": key}, row) for key, row in zip(keys, rows, strict=True)])

    run_with_failures(spark, document, fail, more)
    last = {key["id"]: row for key, row in topics.log("orders", 3)}
    found = documents(node, f"{prefix}-{topics.name('orders')}")
    assert found == {str(key): row for key, row in last.items() if row}


def test_cockroachdb_fills_an_index_exactly(
    spark: SparkSession, tmp_path: Path, node: OpenSearch, prefix: str, fail: Arm
):
    """E1, C2, C3: files of a changefeed, with repeated and early rows."""
    feed = RandomFeed.create(tmp_path / "feed", 5)
    files = {"cockroachdb": {"files": str(tmp_path / "feed"), "tables": ["orders"]}}
    document = {"feed": {"source": files, "sink": into_indices(node, prefix)}}
    run_with_failures(spark, document, fail, lambda: feed.epoch(40))
    wanted = {
        str(key): {name: value for name, value in row.items() if value is not None}
        for key, row in feed.expected("orders", feed.resolved[-1]).items()
    }
    assert documents(node, f"{prefix}-orders") == wanted


def test_a_table_that_was_left_out_for_a_while_lacks_nothing(
    spark: SparkSession, tmp_path: Path, node: OpenSearch, prefix: str
):
    """E4, C3: what came while it was not in the configuration comes when it is back."""
    feed = RandomFeed.create(tmp_path / "feed", 6, tables=("orders", "parts"))

    def run_with(*tables: str) -> None:
        files = {"cockroachdb": {"files": str(tmp_path / "feed"), "tables": list(tables)}}
        run(spark, {"feed": {"source": files, "sink": into_indices(node, prefix)}})

    for tables in (("orders", "parts"), ("orders",), ("orders", "parts")):
        feed.epoch(40)
        run_with(*tables)
    for table in ("orders", "parts"):
        wanted = {
            str(key): {name: value for name, value in row.items() if value is not None}
            for key, row in feed.expected(table, feed.resolved[-1]).items()
        }
        assert documents(node, f"{prefix}-{table}") == wanted


def test_ids_are_not_made_of_other_columns_later(
    world: World, spark: SparkSession, node: OpenSearch, prefix: str
):
    """O4, U5: the old documents would stay for ever."""
    world.sql(
        "create table pair(a int not null, b int not null, primary key (a, b))",
        "insert into pair values (1, 2)",
    )
    document = world.document(["public.pair"])
    document[world.name]["sink"] = into_indices(node, prefix)
    run(spark, document)
    world.sql("insert into pair values (3, 4)")
    turned = into_indices(node, prefix, identifier_columns={"public.pair": ["b", "a"]})
    document[world.name]["sink"] = turned
    with pytest.raises(ConfigInvalid, match="are called by other columns so far"):
        run(spark, document)
    document[world.name]["sink"] = into_indices(node, prefix)
    run(spark, document)
    assert documents(node, f"{prefix}-public.pair").keys() == {"1|2", "3|4"}


# Iceberg tables


@pytest.fixture
def search(
    spark: SparkSession, local: Lake, embedded: dict[str, str], node: OpenSearch, tmp_path: Path
) -> Search:
    """Iceberg tables that Spark changes."""
    return Search(lake=local, catalog=embedded, node=node)


@pytest.fixture
def copy(spark: SparkSession, tmp_path: Path) -> tuple[Lake, Mapping[str, str]]:
    """Another catalog."""
    (tmp_path / "copy").mkdir()
    catalog = embedded_catalog(tmp_path / "copy")
    return Lake(spark, catalog), catalog


def copying(search: Search, catalog: Mapping[str, str], **top: Any) -> Document:
    """A pipeline file that keeps tables of one catalog equal in another."""
    ((_, body),) = [(k, v) for k, v in search.document().items() if k != "spark"]
    sink = {"iceberg": {"catalog": dict(catalog), "namespace": NAMESPACE}}
    return {"copies": {**body, "sink": sink, **top}}


def both(search: Search, lake: Lake, columns: str) -> tuple[list[Any], list[Any]]:
    """Rows of the table and of its copy, sorted."""
    texts = (
        f"SELECT {columns} FROM {search.lake.table('shop.orders')}",
        f"SELECT {columns} FROM {lake.table(f'{NAMESPACE}.orders')}",
    )
    found = [[tuple(row.values()) for row in lake.sql(text)] for text in texts]
    return sorted(found[0], key=repr), sorted(found[1], key=repr)


@pytest.mark.parametrize(
    ("mode", "version"), [("copy-on-write", 2), ("merge-on-read", 2), ("merge-on-read", 3)]
)
def test_a_table_of_another_catalog_is_kept_equal(
    search: Search,
    copy: tuple[Lake, Mapping[str, str]],
    spark: SparkSession,
    fail: Arm,
    mode: str,
    version: int,
):
    """E1, O2, O5: a load, updates, deletes, merges, new columns, nested ones among them."""
    lake, catalog = copy
    search.create(
        "id BIGINT, name STRING, at TIMESTAMP, s STRUCT<a: INT>, l ARRAY<DECIMAL(9,2)>",
        mode=mode,
        version=version,
    )
    document = copying(search, catalog)
    steps = [
        "INSERT INTO shop.orders SELECT id, concat('n', id), TIMESTAMP'2020-01-01 00:00:00', "
        "named_struct('a', int(id)), array(1.25, null) FROM range(50)",
        "UPDATE shop.orders SET name = 'changed', s = null WHERE id % 3 = 0",
        "DELETE FROM shop.orders WHERE id % 5 = 0",
        "ALTER TABLE shop.orders ADD COLUMNS (extra DOUBLE AFTER id, s.b STRING)",
        "MERGE INTO shop.orders t USING (SELECT id FROM range(40, 60)) u ON t.id = u.id "
        "WHEN MATCHED THEN UPDATE SET extra = 0.5, s = named_struct('a', 1, 'b', 'x') "
        "WHEN NOT MATCHED THEN INSERT (id, name, extra) VALUES (u.id, 'new', 1.5)",
    ]
    for number, step in enumerate(steps):
        search.sql(step)
        if number % 2:
            continue
        fail(f"{failpoints.BEFORE_PUBLISH}=error")
        with pytest.raises(FailpointError):
            run(spark, document)
        fail("")
        run(spark, document)
        there, here = both(search, lake, "*" if number < 3 else "id, name, at, extra, l, s.a, s.b")
        assert here == there
    # Nothing is new.
    before = lake.epochs(f"{NAMESPACE}.orders")
    run(spark, document)
    assert lake.epochs(f"{NAMESPACE}.orders") == before


def test_a_copy_has_the_rows_of_every_task_that_read_some(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """E1, I17: where there is much to read, many files here, a frame has several partitions."""
    lake, catalog = copy
    search.create()
    rows = "SELECT /*+ REPARTITION(40) */ id, 'first' FROM range(80)"
    search.sql(f"INSERT INTO shop.orders {rows}")
    run(spark, copying(search, catalog))
    there, here = both(search, lake, "*")
    assert len(here) == 80 and here == there


def test_a_copy_that_was_dropped_is_loaded_anew_and_no_other(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """O1, E4: its table has changed since, or has not; the other copy remembers both."""
    lake, catalog = copy
    other = "shop.parts"
    search.tables = {t: {"identifier_columns": ["id"]} for t in ("shop.orders", other)}
    for table in search.tables:
        search.create(table=table)
        search.insert(1, 2, table=table)
    document = copying(search, catalog)
    run(spark, document)
    search.insert(3, table=other)
    for change in (True, False):
        lake.sql(f"DROP TABLE {lake.table(f'{NAMESPACE}.orders')}")
        if change:
            search.sql("DELETE FROM shop.orders WHERE id = 1")
        run(spark, document)
        there, here = both(search, lake, "*")
        assert here == there
    search.insert(4)
    run(spark, document)
    there, here = both(search, lake, "*")
    assert here == there and len(here) == 2
    # The load, and one insert.
    assert len(lake.epochs(f"{NAMESPACE}.parts")) == 2


def test_a_source_table_that_was_made_anew_is_told_although_its_copy_is_gone(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession, shell: Shell
):
    """E7, O6, U2: the other copy remembers the old one; with all copies gone it is loaded anew."""
    lake, catalog = copy
    search.tables = {t: {"identifier_columns": ["id"]} for t in ("shop.orders", "shop.parts")}
    for table in search.tables:
        search.create(table=table)
        search.insert(1, table=table)
    document = copying(search, catalog)
    run(spark, document)
    search.sql("DROP TABLE shop.orders")
    search.create()
    search.insert(5)
    lake.sql(f"DROP TABLE {lake.table(f'{NAMESPACE}.orders')}")
    file = shell.write(document)
    status = shell("status", file)
    assert status.code == EXIT_OPERATOR
    assert "shop.orders was dropped and created anew" in status.err
    assert "drop all of them" in status.err
    assert "shop.orders  epoch 0" in status.out
    assert_refused(shell.run(document), EXIT_OPERATOR, "was dropped and created anew", "hint: ")
    lake.sql(f"DROP TABLE {lake.table(f'{NAMESPACE}.parts')}")
    run(spark, document)
    assert both(search, lake, "id") == ([(5,)], [(5,)])


def test_a_copy_without_a_load_takes_all_that_comes_after_its_first_start(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """O1, E4: the copy is made at once, for it remembers where it began."""
    lake, catalog = copy
    search.create()
    search.insert(1)
    search.tables["shop.orders"]["disable_export"] = True
    document = copying(search, catalog)
    run(spark, document)
    assert both(search, lake, "id") == ([(1,)], [])
    search.insert(2)
    run(spark, document)
    assert both(search, lake, "id") == ([(1,), (2,)], [(2,)])


def test_a_column_of_any_shape_is_left_out_by_a_select(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """E11, U5: the way out that the message names is taken."""
    lake, catalog = copy
    search.create("id BIGINT, v VARIANT, name STRING", version=3)
    search.sql("INSERT INTO shop.orders VALUES (1, parse_json('[1]'), 'one')")
    for transform in ({}, {"shop.orders": "select * from changes"}):
        with pytest.raises(SchemaRejected, match="column v of table shop") as caught:
            run(spark, copying(search, catalog, transform=transform))
        assert "leaves the column out" in str(caught.value.hint)
    document = copying(search, catalog, transform={"shop.orders": "select id, name from changes"})
    run(spark, document)
    search.sql("INSERT INTO shop.orders VALUES (2, parse_json('{}'), 'two')")
    run(spark, document)
    there, here = both(search, lake, "id, name")
    assert here == there and len(here) == 2


def test_a_copy_passes_a_select(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """E11: rows that leave the condition are deleted, and new columns arrive."""
    lake, catalog = copy
    search.create()
    search.insert(1, 2, 3)
    text = "select id, upper(name) as name from changes where name <> 'secret'"
    document = copying(search, catalog, transform={"shop.orders": text})
    run(spark, document)
    search.sql("UPDATE shop.orders SET name = 'secret' WHERE id = 2")
    search.sql("ALTER TABLE shop.orders ADD COLUMNS (n INT)")
    search.sql("INSERT INTO shop.orders VALUES (4, 'secret', 1), (5, 'open', 1)")
    run(spark, document)
    rows = lake.sql(f"SELECT * FROM {lake.table(f'{NAMESPACE}.orders')} ORDER BY id")
    assert [tuple(row.values()) for row in rows] == [(1, "FIRST"), (3, "FIRST"), (5, "OPEN")]


def test_a_copy_without_identifier_columns_takes_what_is_added_and_refuses_the_rest(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """O4, U5: the way out that the message names is taken."""
    lake, catalog = copy
    search.create()
    search.tables = {"shop.orders": {}}
    search.insert(1, 2)
    search.insert(2)
    run(spark, copying(search, catalog))
    there, here = both(search, lake, "id, name")
    assert here == there
    search.sql("DELETE FROM shop.orders WHERE id = 1")
    with pytest.raises(DataRejected, match="nothing says which row it is") as caught:
        run(spark, copying(search, catalog))
    assert "Set `identifier_columns`" in str(caught.value.hint)
    # A select does not make the delete go unnoticed.
    whole = {"shop.orders": "select * from changes where id > 0"}
    with pytest.raises(DataRejected, match="nothing says which row it is"):
        run(spark, copying(search, catalog, transform=whole))


def test_source_and_sink_must_agree_about_what_identifies_a_row(
    search: Search, copy: tuple[Lake, Mapping[str, str]], spark: SparkSession
):
    """U5: deletes name the source's columns and no others."""
    _, catalog = copy
    search.create()
    search.insert(1)
    document = copying(search, catalog)
    document["copies"]["sink"]["iceberg"]["equality_delete_by"] = ["name"]
    with pytest.raises(ConfigInvalid, match="name other columns that identify a row"):
        run(spark, document)


def test_a_table_is_not_filled_from_itself(search: Search, spark: SparkSession):
    """U5: it would grow for ever."""
    search.create()
    search.insert(1)
    document = copying(search, search.catalog)
    into = document["copies"]["sink"]["iceberg"]
    into.update(namespace="shop", tables={"shop.orders": {"table": "orders"}})
    for transform in ({}, {"shop.orders": "select * from changes"}):
        document["copies"]["transform"] = transform
        with pytest.raises(ConfigInvalid, match="would be filled from itself"):
            run(spark, document)
    assert len(search.snapshot_ids()) == 1
    # The same catalog, told in another way: the table itself shows it.
    into["catalog"] = {**search.catalog, "cache-enabled": "false"}
    with pytest.raises(ConfigInvalid, match="would be filled from itself"):
        run(spark, document)


def test_a_select_stands_between_a_table_and_its_index(
    search: Search, spark: SparkSession, prefix: str
):
    """E11, O2: in a table whose rows are known by their row ids, too."""
    for table, options in (("shop.orders", {"identifier_columns": ["id"]}), ("shop.byid", {})):
        search.create(table=table, version=3)
        search.tables = {table: options}
        search.insert(1, 2, 3, table=table)
        document = search.document()
        ((name, body),) = [(k, v) for k, v in document.items() if k != "spark"]
        body["sink"] = into_indices(search.node, prefix)
        text = "select id * 10 as tens, id, name from changes where name <> 'secret'"
        body["transform"] = {table: text}
        pipeline = {f"{name}{table}": body}
        run(spark, pipeline)
        search.sql(f"UPDATE {table} SET name = 'secret' WHERE id = 2")
        search.sql(f"UPDATE {table} SET name = 'open' WHERE id = 3")
        run(spark, pipeline)
        found = documents(search.node, f"{prefix}-{table}").values()
        rows = sorted((row["id"], row["tens"], row["name"]) for row in found)
        assert rows == [(1, 10, "first"), (3, 30, "open")]


def test_a_table_fills_a_folder(search: Search, spark: SparkSession, tmp_path: Path):
    """E1: a sink from outside of the package takes what a frame gives."""
    search.create()
    search.insert(1, 2, 3)
    out = tmp_path / "out"
    ((_, body),) = [(k, v) for k, v in search.document().items() if k != "spark"]
    document = {"folders": {**body, "sink": {"folder": {"path": str(out)}}}}
    run(spark, document)
    search.sql("UPDATE shop.orders SET name = 'two' WHERE id = 2")
    search.sql("DELETE FROM shop.orders WHERE id = 3")
    run(spark, document)
    found = folder_rows(spark, out, "shop.orders", "id, name", "folders")
    assert found == [(1, "first"), (2, "two")]
