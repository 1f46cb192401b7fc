"""Which table a change belongs to and which row it means, when keys and names change."""

import pytest

from icestream.errors import HistoryLost, SchemaRejected
from icestream.sources.postgres import watch
from tests.integration.pipelines import Shell, assert_refused
from tests.integration.postgres_world import World
from tests.servers import wait_until

OPERATOR = 3
BOTH = ["public.wide", "public.other"]
CHANGED = "the replica identity of table public.wide has changed"
TABLE = "(id int primary key, a int not null default 0, v text)"
WIDEN = (
    "begin",
    "alter table wide drop constraint wide_pkey",
    "alter table wide add primary key (id, a)",
    "commit",
)
NARROW = (
    "begin",
    "alter table wide drop constraint wide_pkey",
    "alter table wide add primary key (id)",
    "commit",
)
WRITE = (
    "insert into wide values (1, 1, 'new'), (2, 1, 'new'), (3, 1, 'new')",
    "update wide set v = 'newer' where id = 1 and a = 1",
    "delete from wide where id = 2 and a = 1",
)


def wide_table(world: World, identity: str = "default") -> None:
    """Twenty rows with the key `id`, and another table."""
    world.sql(
        f"create table wide{TABLE}",
        f"alter table wide replica identity {identity}",
        "insert into wide select g, 0, 'old' from generate_series(1, 20) g",
        "create table other(id int primary key)",
        "insert into other values (1)",
    )


def assert_stops(world: World, *commands: str, said: str = CHANGED, **options: object) -> None:
    """A running pipeline stops with an error when this happens."""
    with pytest.raises((SchemaRejected, HistoryLost), match=said):
        with world.following(BOTH, **options) as following:
            following.wait_copied()
            world.sql(*commands)
            wait_until(lambda: following.error is not None, 60, "the pipeline stops")


def copied_anew_under_the_new_key(world: World) -> None:
    """What the hint says: once without the table, its Iceberg table dropped, then with it."""
    world.sql("insert into other values (2)")
    world.run(["public.other"])
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.wide')}")
    world.run(BOTH)
    world.sql("delete from wide where id = 1 and a = 1", "update wide set v = 'x' where a = 0")
    world.run(BOTH)
    world.assert_equal("wide", "id, a, v")
    world.assert_equal("other", "id")


@pytest.mark.parametrize("identity", ["default", "full"])
def test_key_that_grows_while_it_is_followed(world: World, shell: Shell, identity: str):
    """P7, Mend F1: deletes by the old key would take other rows with them."""
    wide_table(world, identity)
    assert_stops(world, *WIDEN, *WRITE)
    old = [(n, 0, "old") for n in range(1, 21)]
    assert sorted(world.lake_rows("wide", "id, a, v")) == old
    # Nor does another start write anything.
    hint = "drop its Iceberg table before you add it"
    assert_refused(shell.run(world.document(BOTH)), OPERATOR, "table public.wide", "id, a", hint)
    assert sorted(world.lake_rows("wide", "id, a, v")) == old
    copied_anew_under_the_new_key(world)


def test_key_that_grew_and_shrank_while_nothing_ran(world: World, shell: Shell):
    """P7, Mend F1: the stream tells which key a change was made under, not the catalog."""
    wide_table(world)
    world.run(BOTH)
    world.sql(*WIDEN, *WRITE, "delete from wide where a = 1", *NARROW)
    refused = shell.run(world.document(BOTH))
    assert_refused(refused, OPERATOR, CHANGED, "id, a", "then add it again")
    assert len(world.lake_rows("wide", "id")) == 20
    # What the hint says helps; the lake's key is the table's again.
    world.sql("insert into other values (2)")
    world.run(["public.other"])
    world.run(BOTH)
    assert len(world.assert_equal("wide", "id, a, v")) == 20


def test_unique_index_that_goes_while_whole_rows_are_sent(world: World):
    """P7, Mend F1: nothing says any more that a row is the only one with its key."""
    wide_table(world, "full")
    assert_stops(
        world,
        "alter table wide drop constraint wide_pkey",
        "insert into wide values (1, 1, 'twin')",
        "delete from wide where id = 1 and a = 1",
    )
    assert len(world.lake_rows("wide", "id")) == 20
    world.sql("alter table wide add primary key (id)", "insert into other values (2)")
    world.run(["public.other"])
    world.run(BOTH)
    assert len(world.assert_equal("wide", "id, a, v")) == 20


def test_columns_that_still_identify_a_row(world: World):
    """P7, Mend F1: a smaller key, an index beside it, and columns that are taken on trust."""
    wide_table(world, "full")
    world.sql(
        "alter table other add column a int, add column v int not null default 7",
        "alter table other drop constraint other_pkey",
        "alter table other replica identity full",
    )
    wide_by = {"public.wide": ["id", "a"], "public.other": ["id"]}
    with world.following(BOTH, identifier_columns=wide_by) as following:
        following.wait_copied()
        # From (id) to another index over it, with DDL that has every relation described anew.
        world.sql(
            "create unique index by_id on wide(id)",
            "alter table wide drop constraint wide_pkey",
            "alter table other drop column a",
        )
        world.change(following, ["public.wide"], "delete from wide where id = 1")
        world.change(following, ["public.other"], "update other set v = 8 where id = 1")
    world.assert_equal("wide", "id, a, v")
    world.assert_equal("other", "id, v")


AWAY_AND_BACK = {
    "name": ("alter table wide rename to narrow", "narrow", "alter table narrow rename to wide"),
    "schema": (
        "alter table wide set schema away",
        "away.wide",
        "alter table away.wide set schema public",
    ),
}


@pytest.mark.parametrize("how", AWAY_AND_BACK)
@pytest.mark.parametrize("when", ["running", "in one transaction", "stopped"])
def test_table_that_has_another_name_for_a_while(world: World, how: str, when: str):
    """P12, Mend F2: it is the same table, and what is written meanwhile goes where it belongs."""
    wide_table(world)
    world.sql("create schema away")
    leave, name, back = AWAY_AND_BACK[how]
    commands = [
        leave,
        f"insert into {name} values (21, 0, 'new')",
        f"update {name} set v = 'newer' where id = 1",
        f"delete from {name} where id = 2",
        back,
    ]
    if when == "in one transaction":
        commands = ["begin", *commands, "commit"]
    if when == "stopped":
        world.run(BOTH)
        world.sql(*commands)
        world.run(BOTH)
    else:
        with world.following(BOTH) as following:
            following.wait_copied()
            world.sql(*commands)
            world.change(following, ["public.wide"], "update wide set v = 'last' where id = 3")
    assert len(world.assert_equal("wide", "id, a, v")) == 20


def test_table_whose_name_another_one_takes(
    world: World, shell: Shell, monkeypatch: pytest.MonkeyPatch
):
    """P12, Mend F2: the new table's rows would be missing; once it is gone, all goes on."""
    monkeypatch.setattr(watch, "_SLOT_SECONDS", 0.1)  # ten seconds would only be waited out
    wide_table(world)
    said = "table public.wide was dropped and created anew at the source"
    assert_stops(
        world,
        "alter table wide rename to narrow",
        "insert into narrow values (21, 0, 'kept')",
        f"create table wide{TABLE}",
        "insert into wide values (1, 0, 'stranger')",
        said=said,
    )
    world.sql("insert into narrow values (22, 0, 'kept')")
    assert_refused(shell.run(world.document(BOTH)), OPERATOR, said)
    world.sql("drop table wide", "alter table narrow rename to wide")
    world.run(BOTH)
    assert len(world.assert_equal("wide", "id, a, v")) == 22


def test_text_that_becomes_a_number(world: World, shell: Shell):
    """P8, Mend F5: the lake's column is a string; the hint says how numbers get into it."""
    world.sql("create table wide(id int primary key, a text)", "insert into wide values (1, '10')")
    world.run(["public.wide"])
    world.sql("alter table wide alter a type int using a::int", "insert into wide values (2, 20)")
    document = world.document(["public.wide"])
    hint = "columns: {<schema.table>: {a: string}}"
    for _ in range(2):
        refused = shell.run(document)
        assert_refused(refused, OPERATOR, "column a of type int4", "string", hint)
    assert world.lake_rows("wide", "id, a") == [(1, "10")]
    world.run(["public.wide"], columns={"public.wide": {"a": "string"}})
    assert world.lake_rows("wide", "id, a") == [(1, "10"), (2, "20")]


def test_texts_that_become_numbers(world: World, shell: Shell):
    """P8, Mend F5: no list can be declared; the table is copied anew, as the hint says."""
    world.sql(
        "create table wide(id int primary key, a text[])",
        "insert into wide values (1, '{10}')",
        "create table other(id int primary key)",
        "insert into other values (1)",
    )
    world.run(BOTH)
    world.sql("alter table wide alter a type int[] using a::int[]")
    world.sql("insert into wide values (2, '{20}')")
    refused = shell.run(world.document(BOTH))
    assert_refused(refused, OPERATOR, "column a", "drop its Iceberg table, and add it again")
    assert world.lake_rows("wide", "id, a") == [(1, ["10"])]
    world.sql("insert into other values (2)")
    world.run(["public.other"])
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.wide')}")
    world.run(BOTH)
    assert world.lake_rows("wide", "id, a") == [(1, [10]), (2, [20])]
