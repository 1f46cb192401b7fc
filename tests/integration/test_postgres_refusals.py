"""Tables and rollbacks that are refused, and the ways out that the messages name."""

import pytest

from icestream.errors import SchemaRejected
from tests.integration.pipelines import Shell, assert_refused
from tests.integration.postgres_world import NAMESPACE, World

LOST = 3


def test_a_key_of_inexact_numbers(world: World):
    """I8, P7: the table is named, and an index that identifies rows is the way out."""
    world.sql(
        "create table f(v double precision primary key, id int not null)",
        "create unique index f_id on f(id)",
        "insert into f values (0.5, 1), (1.5, 2)",
    )
    with pytest.raises(SchemaRejected, match="f cannot be identified by column v"):
        world.run(["public.f"])
    world.sql("alter table f replica identity using index f_id")
    world.run(["public.f"])
    world.sql("delete from f where id = 1", "update f set v = 2.5 where id = 2")
    world.run(["public.f"])
    assert world.assert_equal("f", "v, id") == [(2.5, 2)]


def test_a_column_that_readers_give_themselves(world: World):
    """I10, Mend a5: no table that Spark cannot read is made."""
    world.sql("create table f(id int primary key, _pos int)", "insert into f values (1, 1)")
    with pytest.raises(SchemaRejected, match="no column may be called _pos"):
        world.run(["public.f"])
    world.sql("alter table f rename _pos to pos")
    world.run(["public.f"])
    assert world.assert_equal("f", "id, pos") == [(1, 1)]


def test_a_rollback_that_the_slot_does_not_reach_back_to(world: World, shell: Shell):
    """E8: a replay is refused before it changes anything; both ways out help."""
    world.sql("create table f(id int primary key)", "create table g(id int primary key)")
    both = ["public.f", "public.g"]
    for number in range(4):
        world.sql(f"insert into f values ({number})", f"insert into g values ({number})")
        world.run(both)
    document = shell.write(world.document(both))
    for table in ("f", "g"):
        earlier = world.snapshots(table)[-3].snapshot_id
        world.lake.sql(
            f"CALL {world.lake.name}.system.rollback_to_snapshot('{NAMESPACE}.{table}', {earlier})"
        )
    refused = shell("rollback", document, "--table", "public.f", "--replay")
    assert_refused(refused, LOST, "undone epochs of table public.f", "--accept", "drop this")
    assert shell("rollback", document, "--table", "public.f", "--accept").code == 0
    world.lake.sql(f"DROP TABLE {world.lake.table(f'{NAMESPACE}.g')}")
    world.sql("insert into f values (9)", "insert into g values (9)")
    world.run(both)
    assert world.lake_rows("f", "id") == [(0,), (1,), (9,)]
    world.assert_equal("g", "id")
