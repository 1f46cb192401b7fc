"""A toy source and a toy sink from outside of the package, with each other and with real ones.

What came of it is read by Spark SQL and held against an oracle that counts by itself; the folder's
files are found by its newest progress file, as any reader would.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.types import IntegerType, LongType
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.config import open_pipeline, parse
from icestream.connectors import SINKS, SOURCES
from icestream.epoch import Epoch, Progress
from icestream.errors import CommitConflict, ConfigInvalid, DataRejected, Fenced, SchemaRejected
from icestream.failpoints import FailpointError
from icestream.frontier import START, Frontier
from icestream.pipeline import Pipeline
from icestream.schema import Column, Reads, SchemaGap, TableShape, new_schema
from icestream.sinks import Sink, Written
from icestream.sources import Budget, Remembered
from tests.faults.crashing import crashes
from tests.integration.pipelines import Document, Shell, assert_refused
from tests.integration.postgres_world import Load, World, session
from tests.integration.topics import Topics
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.toys.counter import Counter, CounterOptions, CounterSplit
from tests.toys.folder import FolderOptions, Head, ProgressFiles

PIPELINE, NAMESPACE = "toys", "toys"
# An epoch is 20 numbers, so that the second table has no change in some of them.
TABLES = {"ones": 1, "thirties": 30}
EPOCH_NUMBERS = 20
GROWTH = 60
# A crash here comes before, and a crash there after an epoch of a real source is visible.
AROUND_THE_COMMIT = (failpoints.BEFORE_PUBLISH, failpoints.AFTER_PUBLISH)

Rows = dict[int, int]
Arm = Callable[[str], None]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys are added as CONTRIBUTING.md tells."""
    monkeypatch.setattr(SOURCES, "_added", {})  # other tests of this process shall not meet them
    monkeypatch.setattr(SINKS, "_added", {})  # here neither
    SOURCES.add("counter", CounterOptions)
    SINKS.add("folder", FolderOptions)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the folder sink writes."""
    return tmp_path / "out"


def expected(every: int, upto: int) -> Rows:
    """The counter's table once it has counted so far: each row's id and its last number."""
    rows: Rows = {}
    for step, number in enumerate(range(0, upto, every)):
        group, change = divmod(step, 3)
        if change == 0:
            rows[group] = number
        elif change == 1:
            rows[group // 2] = number
        else:
            rows.pop(group // 3, None)
    return rows


def counting(upto: int, sink: Mapping[str, Any], **source: Any) -> Document:
    """A pipeline file: a counter that has come so far; changes of a key lie in several splits."""
    counter = {"tables": TABLES, "upto": upto, "splits": 2, **source}
    ends = {"source": {"counter": counter}, "sink": dict(sink)}
    return {PIPELINE: {**ends, "epoch_rows_max": EPOCH_NUMBERS}}


def into_folder(out: Path) -> Document:
    """The sink of a pipeline file."""
    return {"folder": {"path": str(out)}}


def into_lake(catalog: Mapping[str, str]) -> Document:
    """The same for Iceberg tables."""
    return {"iceberg": {"catalog": dict(catalog), "namespace": NAMESPACE}}


def opened(spark: SparkSession, pipelines: Document) -> Pipeline:
    """A new run of the only pipeline of a file."""
    return open_pipeline(parse(pipelines).pipelines[0], spark)


def run(spark: SparkSession, pipelines: Document) -> None:
    """Take all that is there."""
    opened(spark, pipelines).run(once=True)


def progress_files(out: Path, pipeline: str = PIPELINE) -> list[dict[str, Any]]:
    """What the progress files say, the oldest first."""
    paths = sorted((out / pipeline / "progress").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def folder_rows(
    spark: SparkSession, out: Path, table: str, columns: str, pipeline: str = PIPELINE
) -> list[tuple[Any, ...]]:
    """Columns of a table of the folder, sorted: of each key the row of the last epoch."""
    said = progress_files(out, pipeline)[-1]["tables"][table]
    if not said["files"]:
        return []
    paths = [str(out / pipeline / "files" / name) for name in said["files"]]
    spark.read.parquet(*paths).createOrReplaceTempView("folder_files")
    key = ", ".join(f"`{name}`" for name in said["key"])
    rows = spark.sql(
        f"SELECT {columns} FROM (SELECT *, row_number() OVER (PARTITION BY {key} "
        "ORDER BY _epoch DESC, _deleted) AS place FROM folder_files) "
        "WHERE place = 1 AND NOT _deleted"
    ).collect()
    return sorted((tuple(row) for row in rows), key=repr)


def counted_in_folder(spark: SparkSession, out: Path, table: str) -> Rows:
    """A table of the counter as the folder has it."""
    rows = folder_rows(spark, out, table, "id, `count`")
    assert len({row[0] for row in rows}) == len(rows)
    return dict(rows)


def counted_in_lake(lake: Lake, table: str) -> Rows:
    """A table of the counter as Iceberg has it."""
    rows = lake.sql(f"SELECT id, `count` FROM {lake.table(f'{NAMESPACE}.{table}')}")
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["count"] for row in rows}


def assert_folder_exact(spark: SparkSession, out: Path) -> None:
    """Each table has what the counter gave up to the number that its progress says."""
    for table, said in progress_files(out)[-1]["tables"].items():
        upto = said["progress"]["upper"]["count"][0]
        assert counted_in_folder(spark, out, table) == expected(TABLES[table], upto), table


def assert_each_file_once(out: Path) -> None:
    """A table's files are only ever added to, and none is named twice."""
    files: dict[str, list[str]] = {}
    epochs: dict[str, int] = {}
    for said in progress_files(out):
        assert said["tables"].keys() >= files.keys()
        for table, now in said["tables"].items():
            before = files.get(table, [])
            assert now["files"][: len(before)] == before
            assert len(set(now["files"])) == len(now["files"])
            moved = now["progress"]["epoch"] - epochs.get(table, 0)
            assert moved > 0 or now["files"] == before
            files[table], epochs[table] = now["files"], now["progress"]["epoch"]


def assert_every_snapshot_exact(lake: Lake, table: str) -> None:
    """Each epoch of an Iceberg table is there once, and holds what the counter gave until then."""
    name = f"{NAMESPACE}.{table}"
    ends = {
        each["snapshot_id"]: json.loads(each["summary"]["icestream.frontier"])["count"][0]
        for each in lake.epochs(name)
    }
    assert list(ends.values()) == sorted(set(ends.values()))
    states: dict[int, list[tuple[int, int]]] = {snapshot: [] for snapshot in ends}
    selects = [
        f"SELECT {snapshot} AS at, id, `count` FROM {lake.table(name)} VERSION AS OF {snapshot}"
        for snapshot in ends
    ]
    for row in lake.sql(" UNION ALL ".join(selects)):
        states[row["at"]].append((row["id"], row["count"]))
    for snapshot, end in ends.items():
        assert sorted(states[snapshot]) == sorted(expected(TABLES[table], end).items()), end


# The toy source and the toy sink together


def test_a_counter_fills_a_folder_and_goes_on_where_it_was(spark: SparkSession, out: Path):
    """E1, E4: what the folder remembers is all that a new run needs."""
    for upto in (GROWTH, GROWTH + 1, 3 * GROWTH):
        run(spark, counting(upto, into_folder(out)))
        for table, every in TABLES.items():
            assert counted_in_folder(spark, out, table) == expected(every, upto)
    before = len(progress_files(out))
    run(spark, counting(3 * GROWTH, into_folder(out)))
    # Nothing is new, so nothing is claimed either.
    assert len(progress_files(out)) == before
    assert_each_file_once(out)


def test_a_counter_that_crashes_everywhere_fills_a_folder_exactly_once(
    spark: SparkSession, out: Path
):
    """E3: nothing is lost and nothing doubled, and at no moment is an epoch visible in part."""
    upto = 0
    for place in failpoints.PLACES:
        upto += GROWTH
        assert crashes(opened(spark, counting(upto, into_folder(out))), f"{place}=crash"), place
        if progress_files(out):
            assert_folder_exact(spark, out)
    run(spark, counting(upto, into_folder(out)))
    for table, every in TABLES.items():
        assert counted_in_folder(spark, out, table) == expected(every, upto)
    assert_each_file_once(out)


def test_the_command_line_knows_toys_as_all_others(shell: Shell, spark: SparkSession, out: Path):
    """U2, U3: run, check, status, and the nearest key for a wrong one."""
    document = counting(GROWTH, into_folder(out))
    ran = shell.run(document)
    assert ran.code == 0, ran.err
    file = shell.write(document)
    checked = shell("check", file)
    assert checked.code == 0, checked.err
    rows = shell("status", file, "--json").rows()
    # The last epoch, from 40 on, has no change of the second table.
    found = {row["source_table"]: (row["position"], row["state"]) for row in rows}
    assert found == {"ones": ("60", "ok"), "thirties": ("40", "ok")}
    wrong = counting(GROWTH, into_folder(out), upt=5)
    assert_refused(shell.run(wrong), 2, "unknown key `upt`", "Did you mean `upto`?")


# The toy source into Iceberg


def test_a_counter_that_crashes_everywhere_fills_a_lake_exactly_once(
    spark: SparkSession, local: Lake, embedded: dict[str, str]
):
    """E3, E4: every snapshot of every table holds what the counter gave until then."""
    upto = 0
    for place in failpoints.PLACES:
        upto += GROWTH
        document = counting(upto, into_lake(embedded))
        assert crashes(opened(spark, document), f"{place}=crash"), place
    run(spark, counting(upto, into_lake(embedded)))
    for table, every in TABLES.items():
        assert counted_in_lake(local, table) == expected(every, upto)
        assert_every_snapshot_exact(local, table)


@pytest.mark.parametrize("sink", ["folder", "lake"])
def test_a_table_that_is_added_later_is_brought_forward(
    spark: SparkSession, local: Lake, embedded: dict[str, str], out: Path, sink: str
):
    """E4: it gets what the counter gave before it was there, in epochs of its own."""
    end = into_folder(out) if sink == "folder" else into_lake(embedded)
    run(spark, counting(2 * GROWTH, end, tables={"ones": 1}))
    run(spark, counting(3 * GROWTH, end))
    for table, every in TABLES.items():
        found = (
            counted_in_folder(spark, out, table)
            if sink == "folder"
            else counted_in_lake(local, table)
        )
        assert found == expected(every, 3 * GROWTH)


# Real sources into the toy sink


def run_with_failures(spark: SparkSession, document: Document, fail: Arm, more: Callable) -> None:
    """Fail before and after an epoch is visible, each time with more to do, then run to the end."""
    for place in AROUND_THE_COMMIT:
        more()
        fail(f"{place}=error")
        with pytest.raises(FailpointError, match=place):
            run(spark, document)
    fail("")
    more()
    run(spark, document)


def test_postgres_fills_a_folder_exactly_once(
    world: World, spark: SparkSession, out: Path, fail: Arm
):
    """E1, P3, P6, P7: the copy, the stream, a truncated table, and one that has no rows."""
    load = Load(session(world.dsn), random.Random(3), 300)
    load.create()
    world.sql("create table nothing(id int primary key)")
    document = world.document(["public.item", "public.part", "public.nothing"])
    document[world.name]["sink"] = into_folder(out)

    def more() -> None:
        for _ in range(5):
            load.transact()

    def assert_equal() -> None:
        for table, columns in (("item", "id, amount, note"), ("part", "code, number, note")):
            found = folder_rows(spark, out, f"public.{table}", columns, world.name)
            assert found == world.source_rows(table, columns)

    run_with_failures(spark, document, fail, more)
    assert_equal()
    run_with_failures(spark, document, fail, more)
    assert_equal()
    assert progress_files(out, world.name)[-1]["tables"]["public.nothing"]["files"] == []
    world.transaction("truncate part", "insert into part values ('c1', 1, 'after all')")
    run(spark, document)
    assert folder_rows(spark, out, "public.part", "note", world.name) == [("after all",)]


def test_kafka_fills_a_folder_exactly_once(
    topics: Topics, spark: SparkSession, out: Path, fail: Arm
):
    """E1, K1, K6: upserts and tombstones of a topic with several partitions."""
    topics.create("orders", 3)
    generator = random.Random(4)
    upserts = {"topics": ["orders"], "value": {"envelope": "upsert"}}
    document = topics.document(upserts, epoch_rows_max=50)
    ((pipeline, body),) = document.items()
    body["sink"] = into_folder(out)

    def more() -> None:
        keys = [generator.randrange(60) for _ in range(120)]
        rows = [
            None if generator.random() < 0.2 else {"id": key, "v": number}
            for number, key in enumerate(keys)
        ]
        topics.send("orders", [({"id": key}, row) for key, row in zip(keys, rows, strict=True)])

    run_with_failures(spark, document, fail, more)
    last = {key["id"]: row for key, row in topics.log("orders", 3)}
    (table,) = progress_files(out, pipeline)[-1]["tables"]
    found = dict(folder_rows(spark, out, table, "id, v", pipeline))
    assert found == {key: row["v"] for key, row in last.items() if row}


def test_cockroachdb_fills_a_folder_exactly_once(
    spark: SparkSession, tmp_path: Path, out: Path, fail: Arm
):
    """E1, C2, C3: files of a changefeed, with repeated and early rows."""
    feed = RandomFeed.create(tmp_path / "feed", 5)
    files = {"cockroachdb": {"files": str(tmp_path / "feed"), "tables": ["orders"]}}
    document = {PIPELINE: {"source": files, "sink": into_folder(out)}}
    run_with_failures(spark, document, fail, lambda: feed.epoch(40))
    names = ["id", "region", "note", "amount", "ok"]
    found = [
        dict(zip(names, row, strict=True))
        for row in folder_rows(spark, out, "orders", ", ".join(names))
    ]
    wanted = feed.expected("orders", feed.resolved[-1])
    assert {row["id"]: row for row in found} == wanted
    assert len(found) == len(wanted)


# What the toy sink cannot


def test_a_sink_that_cannot_evolve_stops_at_a_new_column_and_says_so(
    spark: SparkSession, local: Lake, embedded: dict[str, str], out: Path
):
    """I11, E1: a new column is refused with a sentence, and one that can takes it."""
    run(spark, counting(GROWTH, into_folder(out)))
    more = counting(2 * GROWTH, into_folder(out), notes=True)
    with pytest.raises(SchemaRejected, match="does not take all columns of its source") as caught:
        run(spark, more)
    assert caught.value.detail == "Columns: note. The sink cannot change what a table takes."
    assert "a sink that evolves its tables" in str(caught.value.hint)
    assert counted_in_folder(spark, out, "ones") == expected(1, GROWTH)
    run(spark, counting(GROWTH, into_lake(embedded)))
    run(spark, counting(2 * GROWTH, into_lake(embedded), notes=True))
    notes = local.sql(f"SELECT `count`, note FROM {local.table(f'{NAMESPACE}.ones')}")
    assert len(notes) == len(expected(1, 2 * GROWTH))
    assert all(row["note"] == str(row["count"]) for row in notes if row["count"] >= GROWTH)
    assert all(row["note"] is None for row in notes if row["count"] < GROWTH)


def test_a_sink_that_gives_no_rows_back_stops_at_a_value_that_was_left_out_and_says_so(
    world: World, spark: SparkSession, out: Path
):
    """P7, E1: the value that PostgreSQL did not send never becomes null."""
    world.sql(
        "create table person(id int primary key, n int, doc text)",
        "alter table person alter column doc set storage external",
        "insert into person values (1, 1, repeat('long', 2000))",
    )
    document = world.document(["public.person"])
    document[world.name]["sink"] = into_folder(out)
    run(spark, document)
    world.sql("update person set n = 2")
    with pytest.raises(DataRejected, match="leave out values, and the sink cannot") as caught:
        run(spark, document)
    assert "REPLICA IDENTITY FULL" in str(caught.value.hint)
    found = folder_rows(spark, out, "public.person", "n, length(doc)", world.name)
    assert found == [(1, 8000)]


def test_a_select_before_a_folder_is_refused_with_a_sentence(
    shell: Shell, spark: SparkSession, out: Path
):
    """E11, U3: it does not remember the source's columns; `check` says so, and a run does."""
    document = counting(GROWTH, into_folder(out))
    document[PIPELINE]["transform"] = {"ones": "select * from changes"}
    with pytest.raises(ConfigInvalid, match="cannot stand behind a transform"):
        opened(spark, document)
    assert_refused(shell("check", shell.write(document)), 2, "cannot stand behind a transform")


# The rules of a commit, in the folder


def written(sink: Sink, number: int, lower: Frontier, upto: int) -> Written:
    """An epoch of the counter whose files are written; it waits for its commit."""
    source = Counter(CounterOptions(tables=TABLES, upto=upto), Budget(rows=10**6, bytes=10**9))
    epoch = Epoch(number=number, lower=lower, upper=source.available(lower)[-1])
    parts: Sequence[Any] = source.plan(epoch).parts
    tables = sorted(part.table for part in parts)
    for table in tables:
        assert sink.prepare(table, lambda name=table: source.shape(name))
    writer = sink.writer(epoch, tables)
    reports = [
        report
        for part in parts
        for table, changes in part.changes(writer)
        for report in writer.write(table, "00000", changes)
    ]
    return Written(epoch=epoch, reports=reports, writer=writer, labels={})


def claimed(out: Path) -> Sink:
    """The sink of a new run."""
    sink = FolderOptions(path=str(out)).open(PIPELINE, None)
    sink.claim(list(TABLES))
    return sink


def test_a_run_that_was_overtaken_cannot_commit_to_a_folder(out: Path):
    """E6: neither to a table that is there nor to one that it would make."""
    first = claimed(out)
    waiting = written(first, 1, START, GROWTH)
    second = claimed(out)
    with pytest.raises(Fenced, match="a newer run of pipeline toys has taken over"):
        first.commit(waiting)
    again = written(second, 1, START, GROWTH)
    second.commit(again)
    third = claimed(out)
    late = written(second, 2, again.epoch.upper, 2 * GROWTH)
    with pytest.raises(Fenced, match="a newer run of pipeline toys has taken over"):
        second.commit(late)
    uppers = {progress.upper for progress in third.durable([]).values()}
    assert uppers == {again.epoch.upper}


def test_an_epoch_that_is_committed_twice_is_there_once(out: Path):
    """E3: it is found to be there by reading back."""
    sink = claimed(out)
    epoch = written(sink, 1, START, GROWTH)
    assert [each.duplicate for each in sink.commit(epoch)] == [False, False]
    said = progress_files(out)[-1]
    assert [each.duplicate for each in sink.commit(epoch)] == [True, True]
    assert progress_files(out)[-1] == said
    assert_each_file_once(out)


def test_of_a_shard_that_was_written_twice_a_folder_takes_one_attempt(out: Path):
    """E3: a task that Spark ran twice is reported twice, and its rows are there once."""
    sink = claimed(out)
    first, second = (written(sink, 1, START, GROWTH) for _ in range(2))
    together = [*first.reports, *second.reports, *first.reports]
    sink.commit(replace(first, reports=together))
    found = {name: said["files"] for name, said in progress_files(out)[-1]["tables"].items()}
    names = {report.table: str(report.payload[1]) for report in first.reports}
    assert found == {table: [name] for table, name in names.items()}


def test_of_two_that_have_read_the_same_progress_one_comes_next(out: Path):
    """E3: the swap is refused to the other, and nothing of it is left."""
    heads = ProgressFiles(out / PIPELINE / "progress", PIPELINE)
    empty = heads.read()
    new = Head(number=1, generation=1, tables={})
    heads.swap(empty, new, {"run": "one"})
    with pytest.raises(CommitConflict):
        heads.swap(empty, new, {"run": "other"})
    (said,) = progress_files(out)
    assert said["labels"] == {"run": "one"}
    assert len(list((out / PIPELINE / "progress").iterdir())) == 1


# What the toy source refuses


def read_anew(columns: Sequence[Column], key: Sequence[str], reads: Reads | None = None) -> None:
    """Read an epoch of the counter, which has no notes, for a table with these columns."""
    source = Counter(CounterOptions(tables={"ones": 1}, upto=3), Budget(rows=9, bytes=99))
    epoch = Epoch(number=1, lower=START, upper=source.available(START)[-1])
    schema_json = new_schema(TableShape(columns=columns, key=["id"]), "ones").model_dump_json()
    for part in source.plan(epoch).parts:
        assert isinstance(part, CounterSplit)
        assert sum(batch.num_rows for batch in part.read(schema_json, key, reads)) == 3


def test_a_counter_refuses_what_a_table_or_a_select_wants_otherwise():
    """I11, E11: a type too narrow is a gap; another key, and a named column that is gone, stop."""
    own = [Column(name="id", type=LongType()), Column(name="count", type=LongType())]
    read_anew(own, ["id"])
    with pytest.raises(SchemaGap) as caught:
        read_anew([own[0], Column(name="count", type=IntegerType())], ["id"])
    assert [column.name for column in caught.value.columns] == ["count"]
    with pytest.raises(ConfigInvalid, match="cannot be deleted by count"):
        read_anew(own, ["count"])
    read = frozenset({"id", "note"})
    with pytest.raises(SchemaRejected, match="reads column note"):
        read_anew(own, ["id"], Reads(columns=read, named=read))


def test_a_counter_tells_which_tables_it_does_not_feed():
    """E4: a table that the options no longer name stays as it is."""
    source = Counter(CounterOptions(tables={"ones": 1}), Budget(rows=9, bytes=99))
    upper = Frontier({"count": (5,)})
    mine = Progress(pipeline=PIPELINE, generation=1, epoch=1, upper=upper, tables=2)
    start = source.resume(Remembered(progress={"ones": mine, "twos": mine}, durable=upper))
    assert (start.unfed, start.behind) == ({"twos"}, {})
