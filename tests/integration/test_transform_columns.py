"""Selects over columns that come, go and are called otherwise at the source."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from icestream.errors import SchemaRejected
from tests.integration.changelog import Changelog
from tests.integration.pipelines import document, run_once
from tests.integration.postgres_world import World
from tests.integration.topics import created, updated
from tests.lake import Lake

PERSON = "public.person"
OTHER = "public.other"


def told(text: str) -> dict[str, Any]:
    """The options of a pipeline whose table `person` has a select."""
    return {"cadence": {"transform": {PERSON: text}}}


def people(world: World) -> None:
    """Six rows, of which four are in the region that selects ask for."""
    world.sql(
        "create table person (id int primary key, name text, region text)",
        "insert into person select g, 'n' || g, case when g > 4 then 'us' else 'eu' end "
        "from generate_series(1, 6) g",
        "create table other (id int primary key)",
        "insert into other values (1)",
    )


GONE = {
    "renamed, in the condition": (
        "select id, name from changes where region = 'eu'",
        "alter table person rename column region to area",
        "region",
    ),
    "dropped, in an expression": (
        "select id, upper(c.name) as name from changes c",
        "alter table person drop column name",
        "name",
    ),
    "renamed, although it is left out": (
        "select * except (REGION) from changes",
        "alter table person rename column region to area",
        "region",
    ),
}


@pytest.mark.parametrize("case", GONE)
def test_a_column_that_a_select_names_and_that_is_gone_stops_the_pipeline(world: World, case: str):
    """E11, Mend h2: no null stands in for it; the table stays as it was, and the error says why."""
    text, statement, column = GONE[case]
    people(world)
    world.run([PERSON], **told(text))
    before = world.lake_rows("person", "id, name")
    world.sql(statement, "update person set id = id where id < 6")
    with pytest.raises(SchemaRejected) as caught:
        world.run([PERSON], **told(text))
    said = str(caught.value)
    assert f"the transform of table {PERSON} reads column {column}" in said
    assert "renamed or dropped" in said and caught.value.hint
    assert world.lake_rows("person", "id, name") == before


def test_a_column_that_no_select_names_may_go(world: World):
    """E11, Mend h2: also one that only `*` stands for: null in rows written since."""
    people(world)
    named, every = told("select id, name from changes"), told("select * from changes")
    world.run([PERSON], **named)
    world.sql("alter table person rename column region to area", "update person set name = 'x'")
    world.run([PERSON], **named)
    assert world.lake_rows("person", "id, name") == [(n, "x") for n in range(1, 7)]
    world.sql("alter table person drop column area", "update person set name = 'y' where id = 1")
    world.run([PERSON], **every)
    rows = [(1, "y", None, None), *((n, "x", None, None) for n in range(2, 7))]
    assert world.lake_rows("person", "id, name, region, area") == rows


def test_a_renamed_column_is_named_anew(world: World):
    """E11, Mend h2: the first way out, after changes under the new name alone."""
    people(world)
    world.run([PERSON], **told("select id, name from changes where region = 'eu'"))
    world.sql(
        "alter table person rename column region to area",
        "update person set area = 'us' where id = 1",
        "update person set name = 'x' where id = 2",
    )
    with pytest.raises(SchemaRejected, match="reads column region") as caught:
        world.run([PERSON], **told("select id, name from changes where region = 'eu'"))
    assert "Name it in the select as the source does" in str(caught.value.hint)
    world.run([PERSON], **told("select id, name from changes where area = 'eu'"))
    assert world.lake_rows("person", "id, name") == [(2, "x"), (3, "n3"), (4, "n4")]
    # Before any row of the table comes under it, too.
    world.sql("alter table person rename column area to zone")
    world.run([PERSON], **told("select id, name from changes where zone = 'eu'"))
    world.sql("update person set zone = 'us' where id = 2")
    world.run([PERSON], **told("select id, name from changes where zone = 'eu'"))
    assert world.lake_rows("person", "id, name") == [(3, "n3"), (4, "n4")]


def test_changes_from_before_a_rename_are_never_read_under_the_new_name(world: World):
    """E11, Mend h2: the second way out: the table is copied anew."""
    people(world)
    old, new = (f"select id, name from changes where {c} = 'eu'" for c in ("region", "area"))
    world.run([PERSON, OTHER], **told(old))
    world.sql(
        "update person set region = 'eu' where id = 5",
        "alter table person rename column region to area",
        "update person set area = 'us' where id = 1",
    )
    for text, column in ((old, "region"), (new, "area")):
        with pytest.raises(SchemaRejected, match=f"reads column {column}") as caught:
            world.run([PERSON, OTHER], **told(text))
        assert "copied anew" in str(caught.value.hint)
    world.sql("insert into other values (2)")
    world.run([OTHER])
    world.run([PERSON, OTHER], **told(new))
    assert world.lake_rows("person", "id") == [(2,), (3,), (4,), (5,)]


def test_changes_that_are_older_than_a_column_have_null_in_it(world: World):
    """E11, Mend h2: the select names the column although not all changes can have it."""
    people(world)
    world.run([PERSON], **told("select id, name from changes"))
    world.sql(
        "update person set name = 'old' where id < 4",
        "alter table person add column grade int",
        "update person set grade = 7 where id in (3, 4)",
    )
    world.run([PERSON], **told("select id, name, grade * 2 as twice from changes"))
    there = world.sql("select id, name, grade * 2 from person")
    assert world.lake_rows("person", "id, name, twice") == sorted(map(tuple, there), key=repr)


def test_a_value_that_only_a_select_has_seen_stops_with_a_way_out(world: World):
    """E11, P8, Mend k2: whole rows from here on, and the table copied anew for what came before."""
    world.sql(
        "create table person (id int primary key, name text, doc text, region text)",
        "alter table person alter column doc set storage external",
        "insert into person select g, 'n' || g, repeat('d', 4000 + g), "
        "case when g > 4 then 'us' else 'eu' end from generate_series(1, 6) g",
        "create table other (id int primary key)",
    )
    options = told("select id, name, length(doc) as size from changes where region = 'eu'")
    world.run([PERSON, OTHER], **options)
    world.sql("update person set name = 'x' where id in (1, 6)")
    with pytest.raises(SchemaRejected, match="leave out values of column doc") as caught:
        world.run([PERSON, OTHER], **options)
    for step in ("REPLICA IDENTITY FULL", "once without the table in `tables`", "copied anew"):
        assert step in str(caught.value.hint)
    world.sql("alter table person replica identity full", "insert into other values (1)")
    world.run([OTHER])
    world.run([PERSON, OTHER], **options)
    world.sql("update person set name = 'y' where id in (2, 5)")
    world.run([PERSON, OTHER], **options)
    there = world.sql("select id, name, length(doc) from person where region = 'eu'")
    assert world.lake_rows("person", "id, name, size") == sorted(map(tuple, there), key=repr)


def test_values_that_a_select_does_not_read_are_not_asked_for(world: World):
    """E11, P8, Mend h3: one job for the epoch, and nobody looks into the source's table."""
    world.sql(
        "create table person (id int primary key, n int, doc text)",
        "alter table person alter column doc set storage external",
        "insert into person select g, g, repeat('d' || g, 3000) from generate_series(1, 30) g",
    )
    options = told("select id, n * 2 as twice from changes where n <> 7")
    world.run([PERSON], **options)

    def scans() -> int:
        world.sql("select pg_stat_force_next_flush()")
        found = world.sql(
            "select seq_scan + idx_scan from pg_stat_user_tables where relname = 'person'"
        )
        return int(found[0][0])

    world.sql("update person set n = n + 1", "update person set id = 100 where id = 1")
    before = scans()
    pipeline = world.open(world.document([PERSON], **options))
    jobs, write = [], pipeline._write_epoch

    def counted(splits: Any, *rest: Any) -> Any:
        jobs.append(len(splits))
        return write(splits, *rest)

    # How many jobs an epoch takes is seen nowhere else: one that looks values up takes two.
    pipeline._write_epoch = counted
    pipeline.run(once=True)
    assert len([size for size in jobs if size]) == 1
    assert scans() == before
    there = world.sql("select id, n * 2 from person where n <> 7")
    assert world.lake_rows("person", "id, twice") == sorted(map(tuple, there), key=repr)


def test_a_changefeed_row_without_a_column_that_a_select_names_stops_the_pipeline(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Any
):
    """E11, C5, Mend h2: rows are sent whole; one that lacks it was written after it had gone."""
    log = Changelog.at(tmp_path / "feed")

    def run(text: str, **source: Any) -> None:
        file = document(tmp_path / "feed", embedded, source=source)
        file["feed"]["transform"] = {"person": text}
        run_once(spark, file)

    def rows() -> list[tuple[Any, ...]]:
        found = sorted(local.rows("shop.person"), key=lambda row: row["id"])
        return [(row["id"], row["name"]) for row in found]

    # The first rows are older than the column.
    log.put("person", {"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    log.put(
        "person", {"id": 2, "name": "b", "region": "eu"}, {"id": 3, "name": None, "region": "eu"}
    )
    log.resolve()
    old, new = (f"select id, name from changes where {c} = 'eu'" for c in ("region", "area"))
    run(old)
    assert rows() == [(2, "b"), (3, None)]
    log.put("person", {"id": 4, "name": "d", "region": "eu"})
    log.put("person", {"id": 2, "name": "x", "area": "eu"}, {"id": 3, "name": "y", "area": "us"})
    log.remove("person", 9)
    log.resolve()
    for text, column in ((old, "region"), (new, "area")):
        with pytest.raises(SchemaRejected, match=f"person reads column {column}, which") as caught:
            run(text)
        assert "declare it in the source's `columns`" in str(caught.value.hint)
        assert rows() == [(2, "b"), (3, None)]
    both = {"region": "string", "area": "string"}
    run(
        "select id, name from changes where coalesce(area, region) = 'eu'",
        columns={"person": both},
    )
    assert rows() == [(2, "x"), (4, "d")]


@pytest.mark.parametrize("later", [{"name": "x", "area": "eu"}, {"name": "x"}])
def test_splits_of_the_first_epoch_are_held_against_each_other(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Any, later: dict[str, Any]
):
    """E11, C5, Mend h2: renamed or dropped between files that two workers read."""
    log = Changelog.at(tmp_path / "feed")

    def written(*rows: dict[str, Any]) -> None:
        log.put("person", *rows)
        pending = log.take()
        log.folder.data("person", [each.wrapped() for each in pending], pending[0].at)

    written(*({"id": n, "name": "a", "region": "eu"} for n in (1, 2)))
    written({"id": 2, **later})
    log.mark()
    file = document(tmp_path / "feed", embedded, source={"split_bytes": 1})
    file["feed"]["transform"] = {"person": "select id, name from changes where region = 'eu'"}
    with pytest.raises(SchemaRejected, match="person reads column region, which"):
        run_once(spark, file)
    assert not local.rows("shop.person")


def test_a_record_without_a_column_that_a_select_names_stops_the_pipeline(topics):
    """E11, K3, Mend h2: an event of Debezium has all columns of its table."""
    name = topics.create("orders")
    source = {"topics": ["orders"], "value": {"format": "json", "envelope": "debezium"}}

    def run(column: str, **more: Any) -> None:
        text = f"select id, 'in' as state from changes where {column} = 'eu'"
        topics.run(topics.document({**source, **more}, transform={name: text}))

    topics.send("orders", [created(1, n=1, region="eu")])
    run("region")
    topics.send("orders", [updated(1, n=2, area="eu")])
    with pytest.raises(SchemaRejected, match="reads column region, which"):
        run("region")
    assert [row["id"] for row in topics.rows("orders")] == [1]
    run("area")
    topics.send("orders", [updated(1, n=3, region="eu")])
    both = {name: {"region": "string", "area": "string"}}
    run("coalesce(area, region)", columns=both)
    assert [row["id"] for row in topics.rows("orders")] == [1]


def test_a_field_that_plain_json_leaves_out_is_null(topics):
    """E11, K3, Mend h2: writers of JSON leave out what is null."""
    name = topics.create("orders")
    value = {"value": {"format": "json", "envelope": "upsert"}}
    text = "select id, n from changes where region = 'eu' or region is null"
    document = topics.document({"topics": ["orders"], **value}, transform={name: text})
    rows = [{"id": 1, "n": 1, "region": "eu"}, {"id": 2, "n": 2, "region": "us"}]
    topics.send("orders", [({"id": row["id"]}, row) for row in rows])
    topics.run(document)
    topics.send("orders", [({"id": 2}, {"id": 2, "n": 3})])
    topics.run(document)
    assert {row["id"]: row["n"] for row in topics.rows("orders")} == {1: 1, 2: 3}
