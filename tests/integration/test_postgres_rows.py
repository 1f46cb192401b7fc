"""The lake's rows are the source's: deletes reach their row, no table's part is left out."""

import pytest

from icestream.errors import ConfigInvalid, SchemaRejected
from icestream.sources.postgres import watch
from tests.integration.pipelines import Shell, assert_refused
from tests.integration.postgres_world import World
from tests.servers import wait_until

INVALID, OPERATOR = 2, 3
MANY = ["public.many"]


def many_rows(world: World) -> None:
    """Twenty rows in five groups."""
    world.sql(
        "create table many(id int primary key, grp int not null, v text)",
        "insert into many select g, g % 5, 'v' from generate_series(1, 20) g",
    )


def test_delete_columns_that_the_source_does_not_send(world: World, shell: Shell):
    """P7, Mend b5: deletes lack these columns, and would leave their rows."""
    many_rows(world)
    by_group = world.document(MANY, sink={"equality_delete_by": ["grp"]})
    said = "rows of table public.many cannot be identified by grp"
    assert_refused(shell("check", shell.write(by_group)), INVALID, said, "REPLICA IDENTITY FULL")
    assert_refused(shell.run(by_group), INVALID, said)
    # With FULL they are sent, but a group is not one row.
    world.sql("alter table many replica identity full")
    assert_refused(shell.run(by_group), INVALID, said, "No unique index", "its key, id")
    named = world.document(MANY, identifier_columns={"public.many": ["grp"]})
    assert_refused(shell("check", shell.write(named)), INVALID, said, "No unique index")
    # What the hints say helps: the key, also with more columns.
    with_key = {"tables": {"public.many": {"equality_delete_by": ["grp", "id"]}}}
    world.run(MANY, sink=with_key)
    world.sql("delete from many where id in (1, 2)", "update many set v = 'new' where id = 3")
    world.sql("update many set grp = 77 where id = 4")
    world.run(MANY, sink=with_key)
    assert len(world.assert_equal("many", "id, grp, v")) == 18


def test_table_that_remembers_other_delete_columns(world: World):
    """P7, Mend b5: the Iceberg table was made for another key than the source has now."""
    many_rows(world)
    world.run(MANY)
    world.sql(
        "alter table many add constraint one_v unique (grp, id)",
        "alter table many replica identity using index one_v",
        "delete from many where id = 1",
    )
    with pytest.raises((ConfigInvalid, SchemaRejected)):
        world.run(MANY)
    assert len(world.lake_rows("many", "id")) == 20


@pytest.mark.parametrize("how", ["index", "full"])
def test_replica_identity_that_changes_while_it_is_followed(world: World, how: str):
    """P7, Mend b5: noticed before a row is written, unless deletes still name their row."""
    many_rows(world)
    world.sql(
        "create table other(id int primary key)",
        "insert into other values (1)",
        "alter table many add column code int not null default 0",
        "update many set code = 100 + id",
        "create unique index by_code on many(code)",
    )
    tables = ["public.many", "public.other"]
    change = {"index": "using index by_code", "full": "full"}[how]
    commands = [f"alter table many replica identity {change}", "delete from many where id = 1"]
    if how == "full":
        with world.following(tables) as following:
            following.wait_copied()
            world.change(following, ["public.many"], *commands)
        world.assert_equal("many", "id, grp, v")
        return
    with pytest.raises(SchemaRejected, match="the replica identity of table"):
        with world.following(tables) as following:
            following.wait_copied()
            world.sql(*commands)
            wait_until(lambda: following.error is not None, 60, "the pipeline stops")
    assert len(world.lake_rows("many", "id")) == 20
    # What the hint says helps.
    world.sql("alter table many replica identity default", "insert into other values (2)")
    world.run(["public.other"])
    world.run(tables)
    world.sql("delete from many where id = 2")
    world.run(tables)
    assert len(world.assert_equal("many", "id, grp, v")) == 18


def test_partition_with_another_replica_identity(world: World, shell: Shell):
    """P7, Mend b5: a partition's own identity decides what its deletes send."""
    world.sql(
        "create table sale(id int primary key, code int not null) partition by range (id)",
        "create table sale_1 partition of sale for values from (0) to (100)",
        "create unique index by_code on sale_1(code)",
        "alter table sale_1 replica identity using index by_code",
        "insert into sale values (1, 1), (2, 2)",
    )
    said = "rows of table public.sale cannot be identified by id"
    assert_refused(shell.run(world.document(["public.sale"])), INVALID, said, "partition")
    world.sql("alter table sale_1 replica identity default")
    with pytest.raises(SchemaRejected, match="does not send its key"):
        with world.following(["public.sale"]) as following:
            following.wait_copied()
            world.sql(
                "alter table sale_1 replica identity using index by_code",
                "delete from sale where id = 1",
            )
            wait_until(lambda: following.error is not None, 60, "the pipeline stops")
    assert world.lake_rows("sale", "id, code") == [(1, 1), (2, 2)]
    # What the hint says helps, although the pipeline has no other table.
    world.sql("alter table sale_1 replica identity default")
    begin_anew(world, "sale")
    world.run(["public.sale"])
    world.assert_equal("sale", "id, code")


def begin_anew(world: World, table: str) -> None:
    """The way out for a pipeline of one table: slot and Iceberg table are dropped."""
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")
    world.sql(f"select pg_drop_replication_slot('{world.slot}')")
    world.spark.sql(f"DROP TABLE {world.lake.table(f'shop.{table}')}")


# What takes a table's key away, and what gives it back.
KEYS = {
    "index": (
        ["drop index by_id"],
        [
            "create unique index by_id on many(id)",
            "alter table many replica identity using index by_id",
        ],
    ),
    "nothing": (
        ["alter table many replica identity nothing"],
        ["alter table many replica identity using index by_id"],
    ),
}


@pytest.mark.parametrize("publication", ["", "mine"])
@pytest.mark.parametrize("how", KEYS)
def test_key_that_is_lost_while_nothing_runs(
    world: World, shell: Shell, how: str, publication: str
):
    """P7, Mend b5: told as that, and not as a publication's fault; the hint helps.

    What was written without a key stays in the log: the key alone does not help.
    """
    world.sql(
        "create table many(id int not null, v text)",
        "create unique index by_id on many(id)",
        "alter table many replica identity using index by_id",
        "insert into many values (1, 'a'), (2, 'b')",
        "create table other(id int primary key)",
        "insert into other values (1)",
    )
    if publication:
        world.sql("create publication mine for table many, other")
    options = {"publication": publication} if publication else {}
    both = ["public.many", "public.other"]
    world.run(both, **options)
    lose, restore = KEYS[how]
    world.sql("update many set v = 'c' where id = 1", *lose, "insert into many values (3, 'd')")
    said = "the replica identity of table public.many has changed"
    hint = "Give the table its key or replica identity back"
    refused = shell.run(world.document(both, **options))
    assert_refused(refused, OPERATOR, said, hint, "then add it again")
    assert "publication" not in refused.err
    assert world.lake_rows("many", "id, v") == [(1, "a"), (2, "b")]
    world.sql(*restore, "insert into other values (2)")
    assert_refused(shell.run(world.document(both, **options)), OPERATOR, said, hint)
    world.run(["public.other"], **options)
    world.run(both, **options)
    world.sql("delete from many where id = 2")
    world.run(both, **options)
    assert world.assert_equal("many", "id, v") == [(1, "c"), (3, "d")]


@pytest.mark.parametrize("how", ["made anew", "key lost"])
def test_pipeline_of_one_table_is_copied_anew(world: World, shell: Shell, how: str):
    """P9, Mend b5: no pipeline runs without its only table, so the hint names another way."""
    many_rows(world)
    world.run(MANY)
    if how == "made anew":
        world.sql("delete from many where id = 1", "drop table many")
        many_rows(world)
        said = "table public.many was dropped and created anew at the source"
    else:
        world.sql("alter table many drop constraint many_pkey", "insert into many values (21, 1)")
        said = "the replica identity of table public.many has changed"
    hint = "drop its Iceberg table and the replication slot instead, and start again"
    assert_refused(shell.run(world.document(MANY)), OPERATOR, said, "only table", hint)
    if how == "key lost":
        world.sql("alter table many add primary key (id)")
    begin_anew(world, "many")
    world.run(MANY)
    world.sql("delete from many where id = 2")
    world.run(MANY)
    world.assert_equal("many", "id, grp, v")


def test_key_that_includes_other_columns(world: World):
    """P7, Mend b5: columns that an index merely includes are not sent with a delete."""
    world.sql(
        "create table wide(id int, v text, primary key (id) include (v))",
        "insert into wide values (1, 'a'), (2, 'b'), (3, 'c')",
    )
    world.run(["public.wide"])
    world.sql("delete from wide where id = 1", "update wide set v = 'x' where id = 2")
    world.run(["public.wide"])
    assert world.assert_equal("wide", "id, v") == [(2, "x"), (3, "c")]


def test_inheritance_children_that_nobody_follows(
    world: World, shell: Shell, monkeypatch: pytest.MonkeyPatch
):
    """P12, Mend b4: a child's rows are the parent's too, but come under the child's name."""
    # The time between two looks would only be waited out.
    monkeypatch.setattr(watch, "_SLOT_SECONDS", 0.1)
    world.sql(
        "create table city(id int primary key, name text)",
        "create table capital(primary key (id)) inherits (city)",
        "insert into city values (1, 'Bergen')",
        "insert into capital values (2, 'Oslo')",
    )
    said = "table public.city has inheritance children that are not followed"
    document = world.document(["public.city"])
    assert_refused(shell("check", shell.write(document)), INVALID, said, "public.capital")
    assert_refused(shell.run(document), INVALID, said, "parents_alone")
    # Both ways out, and a child that appears later.
    both = ["public.city", "public.capital"]
    with pytest.raises(ConfigInvalid, match=said):
        with world.following(both) as following:
            following.wait_copied()
            world.sql("create table village(primary key (id)) inherits (city)")
            wait_until(lambda: following.error is not None, 60, "the pipeline stops")
    assert_refused(shell.run(world.document(both)), INVALID, said, "public.village")
    world.sql("insert into village values (3, 'Flåm')", "insert into city values (4, 'Molde')")
    world.run(both, parents_alone=["public.city"])
    world.run([*both, "public.village"])
    for name in ("city", "capital", "village"):
        world.assert_equal(f"only {name}", "id, name", lake_table=name)


ENDLESS = (
    "unix_date(d), unix_micros(cast(t as timestamp)), unix_micros(z), "
    "transform(days, x -> unix_date(x)), transform(times, x -> unix_micros(cast(x as timestamp)))"
)


@pytest.mark.parametrize("sent", ["binary", "text"])
def test_dates_without_end_and_before_the_year_one(world: World, sent: str):
    """P8, Mend d3: in a copy, in the stream, in arrays, as keys and in partitions of days."""
    span = "period daterange" if sent == "text" else "span int"
    world.sql(
        "create table ends(d date primary key, t timestamp, z timestamptz, days date[], "
        f"times timestamp[], big text, {span})",
        "alter table ends alter column big set storage external",
        "insert into ends values ('infinity', '-infinity', 'infinity', '{infinity,-infinity}', "
        "'{-infinity}', repeat('x', 9000), null)",
    )
    options = {"sink": {"tables": {"public.ends": {"partition_by": ["day(d)"]}}}}
    world.run(["public.ends"], **options)
    world.sql(
        "insert into ends values ('-infinity', 'infinity', '-infinity', '{}', '{infinity}', 'b', "
        "null)",
        "insert into ends values ('0044-03-15 BC', '0044-03-15 12:00 BC', '0044-03-15 12:00+0 BC',"
        " '{4713-01-01 BC}', '{4713-01-01 BC}', 'c', null)",
        "insert into ends values ('12345-01-02', '12345-01-02', '12345-01-02 0:0+0', null, null, "
        "'d', null)",
        "update ends set t = '2020-01-01' where d = 'infinity'",
    )
    world.run(["public.ends"], **options)
    world.sql("delete from ends where d = '12345-01-02'")
    world.run(["public.ends"], **options)
    least, greatest = -(2**63), 2**63 - 1
    days = world.sql("select date '0044-03-15 BC' - date '1970-01-01'")[0][0]
    older = world.sql("select date '4713-01-01 BC' - date '1970-01-01'")[0][0]
    micros = 86_400_000_000
    found = world.lake_rows("ends", f"{ENDLESS}, length(big)")
    new = world.sql("select date '2020-01-01' - date '1970-01-01'")[0][0] * micros
    assert sorted(found) == [
        (-(2**31), greatest, least, [], [greatest], 1),
        (
            days,
            days * micros + micros // 2,
            days * micros + micros // 2,
            [older],
            [older * micros],
            1,
        ),
        (2**31 - 1, new, greatest, [2**31 - 1, -(2**31)], [least], 9000),
    ]
