"""The Iceberg sink: which tables a pipeline has, who owns them, and what an epoch brings them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pyarrow as pa
import pytest
from pyiceberg.types import LongType, NestedField, StringType, StructType

from icestream import dead_letters, patience
from icestream.epoch import Epoch, Progress, resume_point
from icestream.errors import (
    Broken,
    ConfigInvalid,
    Fenced,
    RolledBack,
    SchemaRejected,
    TargetUnavailable,
)
from icestream.frontier import START, Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.catalog import catalog_properties
from icestream.iceberg.closed import DATA, EQUALITY_DELETES, FileClosed
from icestream.iceberg.handle import TableName
from icestream.iceberg.new_table import NewTable
from icestream.metrics import FILES_CLOSED
from icestream.schema import Column, TableShape, new_schema
from icestream.sinks import StaleWrite, Written
from icestream.sinks.iceberg.making import DELETES_METADATA
from icestream.sinks.iceberg.options import IcebergSinkOptions, TableOptions
from icestream.sinks.iceberg.publishing import collect
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sinks.shaped import shaped
from icestream.sources.iceberg.source import Anything
from tests.property.memory import Lake, MemoryCatalog, Wire

T = TypeVar("T")

SHAPE = TableShape(
    columns=[Column(name="id", type=LongType()), Column(name="note", type=StringType())],
    key=["id"],
)


def name(table: str) -> TableName:
    return TableName(namespace=("shop",), name=table)


def sink(lake: Lake, wire: Wire | None = None, **options: object) -> IcebergSink:
    given = IcebergSinkOptions(**{"namespace": "shop", **options})
    return IcebergSink(MemoryCatalog(lake, wire), given, "p")


def epoch(number: int, lower: int, upper: int) -> Epoch:
    start = Frontier({"log": (lower,)}) if lower else START
    return Epoch(number=number, lower=start, upper=Frontier({"log": (upper,)}))


def report(table: str, number: int, path: str | None = None, **changes: object) -> str:
    file = FileClosed(
        table=table,
        epoch=number,
        worker="w",
        schema_id=0,
        spec_id=0,
        path=path or f"{table}-{number}.parquet",
        kind=DATA,
        record_count=1,
        size_bytes=1,
        partition={},
    )
    return replace(file, **changes).report()


def commit(owner: IcebergSink, at: Epoch, *tables: str, **changes: object) -> list[str]:
    """Have an epoch written and committed; returns the tables that took it."""
    for table in tables:
        owner.prepare(table, lambda: SHAPE)
    given = {
        "epoch": at,
        "reports": [report(table, at.number) for table in tables],
        "writer": owner.writer(at, tables),
        "labels": {},
    }
    return [result.table for result in owner.commit(Written(**{**given, **changes}))]


def paths(lake: Lake, table: str) -> list[str]:
    history = list(lake.tables[name(table)].ancestry())[::-1]
    return [path for snapshot in history for path in snapshot.paths]


def remembered(lake: Lake, table: str) -> Progress | None:
    found = MemoryCatalog(lake).load(name(table))
    return found.head("p", "main").progress if found else None


class Down(Wire):
    """Answers nothing while it is `away`."""

    away = False

    def ask(self, request: Callable[[], T]) -> T:
        if self.away:
            raise TargetUnavailable("the catalog did not answer")
        return request()


class Interrupted(Wire):
    """Does something else once, just before the question of a given number."""

    def __init__(self, question: int, what: Callable[[], object]):
        self._left = question
        self._what = what

    def ask(self, request: Callable[[], T]) -> T:
        self._left -= 1
        if self._left == 0:
            self._what()
        return request()


def test_a_report_that_comes_twice_is_taken_once():
    """I4: a repeated path is dropped."""
    again = report("a", 3)
    tables = collect([again, report("b", 3), again, report("a", 3, "x.parquet")], 3)
    assert {table: [file.path for file in files] for table, files in tables.items()} == {
        "a": ["a-3.parquet", "x.parquet"],
        "b": ["b-3.parquet"],
    }


def test_two_different_files_under_one_path_are_refused():
    """I4: a repeated path with another hash means that a task did not write the same twice."""
    with pytest.raises(Broken, match=r"two different files were reported under a-3\.parquet"):
        collect([report("a", 3), report("a", 3, record_count=2)], 3)


def test_a_file_of_another_epoch_is_refused():
    """I4: files are collected by table and epoch."""
    with pytest.raises(Broken, match="belongs to epoch 4"):
        collect([report("a", 3)], 4)


def test_nothing_reported_is_nothing_collected():
    """E9: an epoch with no change makes no snapshot."""
    assert collect([], 1) == {}


def test_the_embedded_catalog_is_the_default_with_absolute_paths(monkeypatch, tmp_path):
    """I1: a SQLite catalog named icestream and a warehouse under ./icestream-data."""
    # The paths depend on where the program runs.
    monkeypatch.chdir(tmp_path)
    properties = catalog_properties({})
    assert properties["name"] == "icestream"
    assert properties["uri"] == f"jdbc:sqlite:{tmp_path}/icestream-data/catalog.db"
    assert properties["warehouse"] == f"{tmp_path}/icestream-data/warehouse"
    assert properties["jdbc.schema-version"] == "V1"


def test_a_given_catalog_is_handed_on_as_it_is():
    """I1: configured as a plain map handed to Iceberg."""
    given = {"type": "rest", "uri": "http://localhost:8181", "warehouse": "s3://lake/", "x": 1}
    expected = {**given, "x": "1"}
    assert catalog_properties(given) == expected
    named = {"type": "rest", "uri": "http://localhost:8181", "warehouse": "prod"}
    assert catalog_properties(named) == named


def test_relative_paths_of_a_local_catalog_become_absolute(monkeypatch, tmp_path):
    """U7: every process means the same place."""
    # The paths depend on where the program runs.
    monkeypatch.chdir(tmp_path)
    given = {"type": "jdbc", "uri": "jdbc:sqlite:lake.db", "warehouse": "./warehouse"}
    properties = catalog_properties(given)
    assert properties["uri"] == f"jdbc:sqlite:{tmp_path}/lake.db"
    assert properties["warehouse"] == str(Path(tmp_path, "warehouse"))


def test_a_source_table_takes_the_last_part_of_its_name_or_the_given_one():
    """I10: names in the catalog."""
    owner = sink(Lake(), namespace="a.b", tables={"db.public.t": TableOptions(table="orders")})
    assert owner.table_name("db.public.u") == TableName(namespace=("a", "b"), name="u")
    assert owner.table_name("db.public.t").name == "orders"


def test_two_source_tables_that_go_into_one_are_refused():
    """U3: the configuration says which name to change."""
    with pytest.raises(ConfigInvalid, match="two source tables go into one") as caught:
        sink(Lake()).claim(["a.orders", "b.orders"])
    assert "a.orders, b.orders" in caught.value.detail


def test_a_table_is_created_from_the_source_with_what_the_options_say():
    """I10: identifier fields, properties; a table's own options win."""
    lake = Lake()
    owner = sink(
        lake,
        format_version=3,
        properties={"a": "1", "b": "1"},
        tables={"t": TableOptions(properties={"b": "2"})},
    )
    owner.claim([])
    assert owner.prepare("t", lambda: SHAPE)
    metadata = lake.tables[name("t")]
    assert metadata.properties["format-version"] == "3"
    assert (metadata.properties["a"], metadata.properties["b"]) == ("1", "2")
    assert json.loads(metadata.schema_json)["identifier-field-ids"] == [1]
    assert json.loads(metadata.properties["icestream.key"]) == ["id"]


def test_a_table_of_which_nothing_is_known_is_not_created():
    """C5: deletes of unknown keys do not make a table."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    assert not owner.prepare("t", lambda: None)
    assert lake.tables == {}


def test_the_key_is_the_given_one_then_the_remembered_one_then_the_sources():
    """I8: equality_delete_by, else the identifier columns."""
    lake = Lake()
    first = sink(lake)
    first.claim([])
    commit(first, epoch(1, 0, 5), "t")
    for options, key in [
        ({}, ["id"]),
        ({"equality_delete_by": ["note"]}, ["note"]),
        ({"tables": {"t": TableOptions(equality_delete_by=["note", "id"])}}, ["note", "id"]),
    ]:
        owner = sink(lake, **options)
        owner.claim(["t"])
        owner.prepare("t", lambda: None)
        assert list(owner.writer(epoch(2, 5, 6), ["t"]).key("t")) == key


def test_an_existing_table_is_identified_by_its_own_columns():
    """I10: an existing table that the configuration names is used as it is."""
    lake = Lake()
    schema = new_schema(SHAPE).model_dump_json()
    MemoryCatalog(lake).create(name("t"), NewTable(schema_json=schema))
    owner = sink(lake, tables={"t": TableOptions(table="t")})
    owner.claim(["t"])
    owner.prepare("t", lambda: None)
    assert list(owner.writer(epoch(1, 0, 1), ["t"]).key("t")) == ["id"]


def test_a_column_of_any_shape_is_refused_with_a_way_out():
    """I6, U5: no table is made without it, and none gets it later."""
    v = Column(name="v", type=Anything())
    inside = Column(name="s", type=StructType(NestedField(1, "v", Anything(), required=False)))
    owner = sink(Lake())
    owner.claim([])
    for column in (v, inside):
        with pytest.raises(SchemaRejected, match=f"column {column.name} of table t") as caught:
            owner.prepare("t", lambda c=column: replace(SHAPE, columns=[*SHAPE.columns, c]))
        assert "leaves the column out" in str(caught.value.hint)
    owner.prepare("t", lambda: SHAPE)
    with pytest.raises(SchemaRejected, match="column v of table t"):
        owner.evolve("t", [v])


def unasked() -> TableShape:
    raise AssertionError("the source is asked for a shape that nobody needs")


def test_a_source_is_not_asked_for_the_shape_of_a_table_that_says_all_by_itself():
    """C5, I10: reading samples takes time, and some sources refuse to tell a key."""
    lake = Lake()
    schema = new_schema(SHAPE).model_dump_json()
    MemoryCatalog(lake).create(name("t"), NewTable(schema_json=schema))
    owner = sink(lake, tables={"t": TableOptions(table="t", equality_delete_by=["id"])})
    owner.claim(["t"])
    assert owner.prepare("t", unasked)
    assert list(owner.writer(epoch(1, 0, 1), ["t"]).key("t")) == ["id"]


def test_a_table_that_is_its_own_source_is_refused_by_its_identity():
    """U5: a catalog may be told in two ways, so that names do not show it."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    owner.prepare("t", lambda: SHAPE)
    uuid = owner.existing("t").uuid()
    owner.refuse_itself("t", "another")
    for into in (owner, shaped(owner, SimpleNamespace(of_all=""))):
        with pytest.raises(ConfigInvalid, match="would be filled from itself"):
            into.refuse_itself("t", uuid)


def test_deleting_by_a_column_that_the_table_lacks_is_refused():
    """U3: the error names the columns there are."""
    owner = sink(Lake(), equality_delete_by=["idd"])
    owner.claim([])
    with pytest.raises(ConfigInvalid, match="has no column idd") as caught:
        owner.prepare("t", lambda: SHAPE)
    assert "id, note" in caught.value.detail


def test_an_epoch_is_one_snapshot_in_each_of_its_tables():
    """E1, I14: only tables with changes commit, and each knows how many take part."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    assert commit(owner, epoch(1, 0, 5), "a", "b") == ["a", "b"]
    assert commit(owner, epoch(2, 5, 9), "a") == ["a"]
    assert (paths(lake, "a"), paths(lake, "b")) == (["a-1.parquet", "a-2.parquet"], ["b-1.parquet"])
    assert [remembered(lake, table).tables for table in ("a", "b")] == [1, 2]
    assert remembered(lake, "a").upper == Frontier({"log": (9,)})


def test_tables_that_carry_the_epoch_already_are_counted():
    """I14: the tables of an epoch agree about how many they are."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a", "b")
    commit(owner, epoch(1, 0, 5), "c")
    assert [remembered(lake, table).tables for table in ("a", "b", "c")] == [3, 3, 3]
    assert len({remembered(lake, table).members for table in ("a", "b", "c")}) == 1
    assert [len(paths(lake, table)) for table in ("a", "b", "c")] == [1, 1, 1]


def test_no_table_takes_an_epoch_twice_whoever_asks():
    """E3, Mend c3: also when the second writing of the epoch has other tables than the first."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a", "b")
    assert commit(owner, epoch(1, 0, 5), "a") == ["a"]
    again = sink(lake)
    again.claim(["a", "b"])
    assert commit(again, epoch(1, 0, 5), "b", "a", "c") == ["a", "b", "c"]
    assert (paths(lake, "a"), paths(lake, "b")) == (["a-1.parquet"], ["b-1.parquet"])
    with pytest.raises(Fenced, match="is ahead of this run"):
        commit(again, epoch(1, 0, 3), "a")


LETTERS = "a__dead_letters"


def half_committed(lake: Lake) -> IcebergSink:
    """A sink whose table `a` has an epoch that its letters lack; then somebody changes `a`."""
    owner = sink(lake)
    owner.claim([])
    owner.prepare(LETTERS, lambda: dead_letters.SHAPE)
    at, tables = epoch(1, 0, 5), ["a", LETTERS]
    owner.prepare("a", lambda: SHAPE)
    writer = owner.writer(at, tables)
    lake.evolve(name(LETTERS))
    with pytest.raises(StaleWrite):
        commit(owner, at, *tables, writer=writer)
    lake.evolve(name("a"))
    return owner


@pytest.mark.parametrize("restarted", [False, True])
def test_a_table_is_read_as_it_was_when_its_letters_lack_the_epoch(restarted):
    """I17, Mend c3: by another schema a record would be row and letter, or neither."""
    lake = Lake()
    owner = half_committed(lake)
    assert (paths(lake, "a"), paths(lake, LETTERS)) == (["a-1.parquet"], [])
    if restarted:
        owner = sink(lake)
        owner.claim(["a", LETTERS])
        for table in ("a", LETTERS):
            owner.prepare(table, lambda: SHAPE)
    again = owner.writer(epoch(1, 0, 5), ["a", LETTERS])
    schemas = {table: target.schema_id for table, target in again.targets.items()}
    assert (schemas, again.only_read) == ({"a": 0, LETTERS: 1}, {"a"})
    assert list(again.write("a", "0", pa.table({}))) == []
    given = {"reports": [report(LETTERS, 1, schema_id=1)], "writer": again}
    assert commit(owner, epoch(1, 0, 5), "a", LETTERS, **given) == [LETTERS]
    assert owner.writer(epoch(2, 5, 9), ["a", LETTERS]).only_read == frozenset()


@pytest.mark.parametrize(("first", "later"), [("a", LETTERS), (LETTERS, "a")])
def test_what_had_no_part_in_an_epoch_gets_none_by_another_schema(first, later):
    """I17, Mend c3: records that were all rows are no letters, and the other way round."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    owner.prepare("a", lambda: SHAPE)
    owner.prepare(LETTERS, lambda: dead_letters.SHAPE)
    commit(owner, epoch(1, 0, 5), first)
    assert commit(owner, epoch(1, 0, 5), first, later, "b") == [first, "b"]
    assert (paths(lake, first), paths(lake, later)) == ([f"{first}-1.parquet"], [])
    assert commit(owner, epoch(2, 5, 9), later) == [later]


def test_an_epoch_names_hundreds_of_tables_and_one_of_them_may_be_dropped():
    """E4, Mend c2: summaries stay small, and what is left is whole for a restart."""
    lake, tables = Lake(), [f"t{number:03d}" for number in range(300)]
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), *tables)
    head = lake.tables[name("t000")].head("main")
    assert sum(map(len, head.summary.values())) < 1024
    assert (remembered(lake, "t000").tables, len(remembered(lake, "t000").members)) == (300, 300)
    lake.drop(name("t123"))
    found = sink(lake).claim(tables)
    assert resume_point(found).unfinished is None


def test_a_start_takes_the_next_generation_in_every_table():
    """E6: found by the pipeline's tag, also when the source does not name them yet."""
    lake = Lake()
    first = sink(lake)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a", "b")
    second = sink(lake)
    progress = second.claim(["a"])
    assert {table: mine.generation for table, mine in progress.items()} == {"a": 2, "b": 2}
    assert {mine.epoch for mine in progress.values()} == {1}


def test_a_table_that_others_feed_is_left_alone():
    """E6: only named tables and those that bear the pipeline's tag are claimed."""
    lake = Lake()
    schema = new_schema(SHAPE).model_dump_json()
    MemoryCatalog(lake).create(name("foreign"), NewTable(schema_json=schema))
    assert sink(lake).claim([]) == {}
    assert list(lake.tables[name("foreign")].ancestry()) == []


def test_what_is_durable_is_read_without_claiming():
    """C6: status and a run without work leave the tables as they are."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a")
    before = lake.tables[name("a")]
    assert sink(lake).durable(["a", "b"])["a"] == remembered(lake, "a")
    assert lake.tables[name("a")] is before


@pytest.mark.parametrize("question", range(1, 9))
def test_a_start_while_another_run_goes_on_takes_no_table_for_one_that_was_set_back(question):
    """E8, E4, Mend, leftover: the tables are read one after the other, so some may look older."""
    lake = Lake()
    running = sink(lake)
    running.claim(["a", "b"])
    commit(running, epoch(1, 0, 5), "a", "b")

    def go_on() -> None:
        commit(running, epoch(2, 5, 9), "a", "b")
        commit(running, epoch(3, 9, 12), "b")

    started = sink(lake, Interrupted(question, go_on))
    try:
        found = started.durable(["a", "b"])
    except TargetUnavailable as error:
        assert "while they were read" in error.message
        found = started.durable(["a", "b"])
    assert resume_point(found).number in (1, 2, 3)
    assert resume_point(started.claim(["a", "b"])).number in (1, 3)


def test_a_run_that_was_succeeded_cannot_commit():
    """E6: a zombie that wakes up after its successor started can never commit."""
    lake = Lake()
    zombie = sink(lake)
    zombie.claim([])
    commit(zombie, epoch(1, 0, 5), "a")
    sink(lake).claim([])
    with pytest.raises(Fenced):
        commit(zombie, epoch(2, 5, 9), "a")
    assert paths(lake, "a") == ["a-1.parquet"]


def test_a_run_that_was_succeeded_cannot_begin_a_new_table():
    """E6: a new table is on no successor's list, so the run looks at a table that is."""
    lake = Lake()
    zombie = sink(lake)
    zombie.claim([])
    commit(zombie, epoch(1, 0, 5), "a")
    sink(lake).claim([])
    with pytest.raises(Fenced, match="newer run of pipeline p has taken over table a"):
        commit(zombie, epoch(2, 5, 9), "b")
    assert paths(lake, "b") == []


@pytest.mark.parametrize("question", range(1, 12))
def test_a_table_made_while_a_successor_starts_is_claimed_or_refused(question):
    """E6: whenever it is made, either the successor finds it or the older run is refused."""
    lake = Lake()
    older = sink(lake)
    older.claim([])
    commit(older, epoch(1, 0, 5), "a")
    made: list[str] = []

    def make() -> None:
        try:
            made.extend(commit(older, epoch(2, 5, 9), "b"))
        except Fenced:
            made.append("refused")

    claimed = sink(lake, Interrupted(question, make)).claim(["a"])
    if made == ["b"]:
        assert claimed["b"].epoch == 2
    assert made == ["b"] or "b" not in claimed or claimed["b"].epoch == 0
    with pytest.raises(Fenced):
        commit(older, epoch(3, 9, 12), "a", "b")


@pytest.mark.parametrize("question", range(2, 12))
def test_of_two_first_runs_that_begin_with_different_tables_one_is_refused(question):
    """E6: without a common table each looks at all that there are."""
    lake = Lake()
    other = sink(lake)
    other.claim([])
    outcomes: list[str] = []

    def begin(owner: IcebergSink, table: str) -> None:
        try:
            outcomes.extend(commit(owner, epoch(1, 0, 5), table))
        except Fenced:
            outcomes.append("refused")

    one = sink(lake, Interrupted(question, lambda: begin(other, "b")))
    one.claim([])
    begin(one, "a")
    if len(outcomes) == 1:
        begin(other, "b")
    assert len(outcomes) == 2
    assert "refused" in outcomes


def test_a_table_that_another_run_has_filled_meanwhile_stops_the_run():
    """E6: its changes would be applied twice."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    filled = Progress(pipeline="p", epoch=1, upper=Frontier({"log": (5,)}), tables=1)
    rival = summaries.to_entries(filled).summary
    schema = new_schema(SHAPE).model_dump_json()
    MemoryCatalog(lake).create(name("t"), NewTable(schema_json=schema))
    lake.foreign_commit(name("t"), "append", rival)
    with pytest.raises(Fenced, match="another run of the same pipeline"):
        owner.prepare("t", lambda: SHAPE)


def test_a_changed_schema_is_told_and_then_taken():
    """I6, I11: files that a table no longer takes are written again for its new schema."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a")
    stale = owner.writer(epoch(2, 5, 9), ["a"])
    lake.evolve(name("a"))
    with pytest.raises(StaleWrite):
        commit(owner, epoch(2, 5, 9), "a", writer=stale)
    assert commit(owner, epoch(2, 5, 9), "a") == ["a"]
    assert paths(lake, "a") == ["a-1.parquet", "a-2.parquet"]


def test_added_columns_are_in_the_next_writers_schema():
    """I11: add column."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    owner.prepare("a", lambda: SHAPE)
    assert "extra" not in owner.writer(epoch(1, 0, 5), ["a"]).schema_json("a")
    owner.evolve("a", [Column(name="extra", type=LongType())])
    assert "extra" in owner.writer(epoch(1, 0, 5), ["a"]).schema_json("a")


def test_a_claim_that_failed_on_the_way_can_be_made_again():
    """E6: tables that the first call has claimed are claimed anew, under one generation."""
    lake = Lake()
    first = sink(lake)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a", "b")

    def fail() -> None:
        raise TargetUnavailable("the catalog did not answer")

    # The claims are published by then, and tables are listed once more.
    failing = Interrupted(8, fail)
    owner = sink(lake, failing)
    with pytest.raises(TargetUnavailable):
        owner.claim([])
    assert 2 in {remembered(lake, table).generation for table in ("a", "b")}
    found = owner.claim([])
    assert {progress.generation for progress in found.values()} == {3}
    assert {remembered(lake, table) for table in ("a", "b")} == set(found.values())
    assert commit(owner, epoch(2, 5, 9), "a", "b") == ["a", "b"]


def test_files_that_are_published_at_the_second_try_are_counted_once(monkeypatch):
    """U5, E13: the loop calls `commit` again with the same files when trouble has passed."""
    # The pauses of a catalog that is away would only cost time.
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.0,))
    wire = Down()
    owner = sink(Lake(), wire)
    owner.claim([])
    for table in ("twice-a", "twice-b"):
        owner.prepare(table, lambda: SHAPE)
    reports = [report(table, 1) for table in ("twice-a", "twice-b")]
    at = epoch(1, 0, 5)
    written = Written(epoch=at, reports=reports, writer=owner.writer(at, ["twice-a"]), labels={})
    wire.away = True
    with pytest.raises(TargetUnavailable):
        owner.commit(written)
    wire.away = False
    assert len(owner.commit(written)) == 2
    assert [FILES_CLOSED.labels(f"twice-{name}", DATA)._value.get() for name in "ab"] == [1, 1]


def test_an_emptied_table_commits_without_files_and_without_deletes():
    """P7: it counts among the epoch's tables; delete files have nothing to delete any more."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a", "b")
    delete = report("b", 2, "d.parquet", kind=EQUALITY_DELETES)
    reports = [report("b", 2), delete]
    assert commit(
        owner, epoch(2, 5, 9), "a", "b", reports=reports, truncated=frozenset(["a", "b"])
    ) == ["b", "a"]
    heads = {table: lake.tables[name(table)].head("main") for table in ("a", "b")}
    assert {table: list(head.paths) for table, head in heads.items()} == {
        "a": [],
        "b": ["b-2.parquet"],
    }
    assert all(head.truncated for head in heads.values())
    assert {head.summary[summaries.EPOCH_TABLES] for head in heads.values()} == {"2"}
    assert {head.summary[summaries.DELETE_FILES] for head in heads.values()} == {"0"}


def test_writers_of_one_run_never_share_a_name():
    """I2: files of one writer never overwrite those of another."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    owner.prepare("a", lambda: SHAPE)
    runs = {owner.writer(epoch(1, 0, 5), ["a"]).run for _ in range(3)}
    assert len(runs) == 3


def test_a_heartbeat_makes_a_frontier_durable_without_files():
    """E9: an empty commit on the first table."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    assert not owner.heartbeat(epoch(1, 0, 3), {})
    commit(owner, epoch(1, 0, 5), "b", "a")
    assert owner.heartbeat(epoch(2, 5, 9), {})
    assert remembered(lake, "a").upper == Frontier({"log": (9,)})
    assert remembered(lake, "b").upper == Frontier({"log": (5,)})
    assert not owner.heartbeat(epoch(3, 9, 10), {}, "unknown")


def rolled_back() -> Lake:
    """A table with three epochs that somebody set back to its first."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    for number in (1, 2, 3):
        commit(owner, epoch(number, 5 * (number - 1), 5 * number), "a")
    first = [s for s in lake.tables[name("a")].ancestry() if "a-1.parquet" in s.paths]
    lake.roll_back(name("a"), first[0].id)
    return lake


def test_a_rollback_stops_every_start_until_it_is_settled():
    """E8: say so and offer both ways."""
    lake = rolled_back()
    for start in (sink(lake).claim, sink(lake).durable):
        with pytest.raises(RolledBack, match="table a was rolled back"):
            start([])


def test_a_rollback_can_be_replayed():
    """E8: replay from the older frontier."""
    lake = rolled_back()
    progress = sink(lake).settle_rollback("a", replay=True)
    assert (progress.epoch, progress.catching_up) == (1, True)
    (claimed,) = sink(lake).claim([]).values()
    assert (claimed.upper, claimed.catching_up) == (Frontier({"log": (5,)}), True)


def test_a_rollback_can_be_accepted():
    """E8: accept the rollback and go on."""
    lake = rolled_back()
    progress = sink(lake).settle_rollback("a", replay=False)
    assert (progress.epoch, progress.catching_up) == (3, False)
    (claimed,) = sink(lake).claim([]).values()
    assert claimed.upper == Frontier({"log": (15,)})
    assert paths(lake, "a") == ["a-1.parquet"]


def test_a_run_from_before_the_rollback_cannot_go_on():
    """E6, E8: settling takes the next generation."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a")
    lake.roll_back(name("a"), None)
    sink(lake).settle_rollback("a", replay=False)
    with pytest.raises(Fenced):
        commit(owner, epoch(2, 5, 9), "a")


@pytest.mark.parametrize("table", ["a", "missing"])
def test_there_is_nothing_to_settle_without_a_rollback(table):
    """E8: the command refuses what it was not made for."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a")
    with pytest.raises(ConfigInvalid):
        sink(lake).settle_rollback(table, replay=True)


def test_the_worst_error_of_several_tables_is_raised():
    """E6: being fenced in one table weighs more than lost progress in another."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    commit(owner, epoch(1, 0, 5), "a", "b")
    for table, changed in (("a", {"tables": 7}), ("b", {"generation": 9})):
        progress = replace(remembered(lake, table), **changed)
        lake.foreign_commit(name(table), "append", summaries.to_entries(progress).summary)
    with pytest.raises(Fenced, match="taken over table b"):
        commit(owner, epoch(2, 5, 9), "a", "b")
    assert len(paths(lake, "a")) == len(paths(lake, "b")) == 1


def test_atomic_commits_leave_old_metadata_to_others(caplog):
    """I14, Mend c9: a catalog deleted metadata inside a commit to many tables that then failed."""
    lake = Lake()
    with caplog.at_level("WARNING"):
        owner = sink(lake, atomic=True)
        owner.claim([])
        commit(owner, epoch(1, 0, 5), "a")
    made = lake.tables[name("a")].properties
    assert DELETES_METADATA not in made
    assert made["write.metadata.previous-versions-max"] == "100"
    assert [r.getMessage() for r in caplog.records] == [
        "atomic: the catalog must commit to many tables all or none, and not every one does"
    ]
    plain = sink(lake)
    plain.claim([])
    commit(plain, epoch(2, 5, 9), "b")
    assert lake.tables[name("b")].properties[DELETES_METADATA] == "true"


def test_an_atomic_pipeline_warns_of_a_table_whose_metadata_is_deleted(caplog):
    """I14, Mend c9: once a run for each table, with the property to change."""
    lake = Lake()
    plain = sink(lake)
    plain.claim([])
    commit(plain, epoch(1, 0, 5), "a")
    owner = sink(lake, atomic=True)
    owner.claim([])
    with caplog.at_level("WARNING"):
        commit(owner, epoch(2, 5, 9), "a")
        commit(owner, epoch(3, 9, 12), "a")
    _, warned = [r.getMessage() for r in caplog.records]
    assert warned.startswith(f"table shop.a has {DELETES_METADATA} = true")


def test_tables_are_prepared_while_another_commit_takes_its_targets_back():
    """I6, Mend c8: a dictionary that grows while it is looked through raised an error."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    for number in range(50):
        owner.prepare(f"t{number}", lambda: SHAPE)
    at = epoch(1, 0, 5)
    written = owner.writer(at, ["t0"])
    lake.evolve(name("t0"))
    grown = []

    class Growing(type(owner._states["t0"])):
        """The first state that is taken back has another table prepared meanwhile."""

        __slots__ = ()

        def __setattr__(self, attribute, value):
            if attribute == "target" and not grown:
                grown.append(owner.prepare("late", lambda: SHAPE))
            super().__setattr__(attribute, value)

    for state in owner._states.values():
        state.__class__ = Growing
    with pytest.raises(StaleWrite):
        commit(owner, at, "t0", writer=written)
    assert grown == [True]


def test_a_writer_has_all_its_tables_even_when_targets_are_taken_back_meanwhile():
    """I6, Mend c8: a table without a target would have had no files in its epoch."""
    lake = Lake()
    owner = sink(lake)
    owner.claim([])
    for table in ("a", "b"):
        owner.prepare(table, lambda: SHAPE)
    owner.writer(epoch(1, 0, 5), ["a"])
    asked = owner._target

    def taken_back(table, state, schema_id=None):
        owner._states["a"].target = None
        return asked(table, state, schema_id)

    owner._target = taken_back
    assert set(owner.writer(epoch(2, 5, 9), ["a", "b"]).tables()) == {"a", "b"}


def test_of_two_attempts_at_a_task_one_counts():
    """I4, I17, Mend c5: their names differ, so both would be committed and every row doubled."""
    first = [report("t", 1, f"x/{n}", attempt="x") for n in (1, 2)]
    second = [report("t", 1, f"y/{n}", attempt="y") for n in (1, 2)]
    other = report("t", 1, "z/1", attempt="y", worker="v")
    found = collect([first[0], *second, first[1], other], 1)
    assert [file.path for file in found["t"]] == ["x/1", "x/2", "z/1"]
