"""What a publication leaves out never comes: it is noticed, and nothing is healed in silence."""

from collections.abc import Sequence

import pytest

from icestream.errors import HistoryLost
from icestream.sources.postgres import copies, watch
from tests.integration.pipelines import Shell, assert_refused
from tests.integration.postgres_world import World, session
from tests.servers import wait_until

OPERATOR = 3
BOTH = ["public.one", "public.two"]
SAID = "may have left out changes of public.one"


def two_tables(world: World) -> None:
    """Two small tables."""
    for name in ("one", "two"):
        world.sql(f"create table {name}(id int primary key, v text)")
        world.sql(f"insert into {name} values (1, 'a')")


def copied_anew(world: World, tables: Sequence[str], **options: object) -> None:
    """The way out that the hint names: only the tables that lack changes are dropped."""
    for table in tables:
        world.spark.sql(f"DROP TABLE {world.lake.table(f'shop.{table}')}")
    world.run(BOTH, **options)
    for name in ("one", "two"):
        world.assert_equal(name, "id, v")


def ways(publication: str) -> dict[str, list[str]]:
    """What someone may do to a publication, with a change of table one that is not published."""
    hidden = "update one set v = v || '!' where id = 1"
    return {
        "taken out and put back": [
            f"alter publication {publication} drop table one",
            hidden,
            f"alter publication {publication} add table one",
        ],
        "taken out": [f"alter publication {publication} drop table one", hidden],
        "a row filter for a while": [
            f"alter publication {publication} set table one where (id > 1), two",
            hidden,
            f"alter publication {publication} set table one, two",
        ],
    }


@pytest.mark.parametrize("how", ways(""))
def test_own_publication_that_left_out_a_table(world: World, shell: Shell, how: str):
    """P12, Mend b2: the table was not published for a while; the start does not put it back."""
    two_tables(world)
    world.run(BOTH)
    world.sql(*ways(f'"icestream_{world.name}"')[how], "insert into two values (2, 'b')")
    document = world.document(BOTH)
    assert_refused(shell.run(document), OPERATOR, SAID, "copied anew")
    assert_refused(shell("check", shell.write(document)), OPERATOR, SAID)
    copied_anew(world, ["one"])


def test_publication_that_left_out_operations(world: World, shell: Shell):
    """P12, Mend b2: `publish` was narrower for a while; all its tables are concerned."""
    two_tables(world)
    world.run(BOTH)
    own = f'"icestream_{world.name}"'
    world.sql(f"alter publication {own} set (publish = 'insert')", "delete from two")
    said = "may have left out changes of public.one, public.two"
    assert_refused(shell.run(world.document(BOTH)), OPERATOR, said, "was altered")
    copied_anew(world, ["one", "two"])
    world.sql("insert into two values (7, 'c')", "delete from one", "delete from two where id = 1")
    world.run(BOTH)
    assert world.assert_equal("two", "id, v") == [(7, "c")]


def test_publication_of_everything_that_was_made_anew(world: World, shell: Shell):
    """P12, Mend b2: FOR ALL TABLES has no row per table; it was dropped and made again."""
    two_tables(world)
    everything = "create publication mine for all tables with (publish_via_partition_root)"
    world.sql(everything)
    world.run(BOTH, publication="mine")
    world.sql("insert into one values (2, 'b')")
    world.run(BOTH, publication="mine")
    world.sql("drop publication mine", everything, "insert into one values (3, 'c')")
    said = f"publication mine {SAID}"
    assert_refused(shell.run(world.document(BOTH, publication="mine")), OPERATOR, said, "anew")
    copied_anew(world, ["one", "two"], publication="mine")


def test_publication_that_changes_while_it_is_followed(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P12, Mend b2: nobody restarts; the pipeline stops although its stream goes on."""
    # The time between two looks would only be waited out.
    monkeypatch.setattr(watch, "_SLOT_SECONDS", 0.1)
    two_tables(world)
    world.sql("create publication mine for table one, two with (publish_via_partition_root)")
    with pytest.raises(HistoryLost, match=SAID):
        with world.following(BOTH, publication="mine") as following:
            following.wait_copied()
            world.change(following, ["public.one"], "insert into one values (2, 'b')")
            world.sql(*ways("mine")["taken out and put back"])
            wait_until(lambda: following.error is not None, 60, "the pipeline stops")
    with pytest.raises(HistoryLost, match=SAID):
        world.run(BOTH, publication="mine")
    copied_anew(world, ["one"], publication="mine")


def test_other_tables_of_a_publication_come_and_go(world: World, shell: Shell):
    """P12, Mend b2: a table that is added or taken away concerns only itself."""
    two_tables(world)
    world.sql("create table three(id int primary key)")
    world.run(["public.one"])
    world.run(BOTH)
    world.sql("insert into one values (2, 'b')", "insert into two values (2, 'b')")
    world.run(["public.one"])
    world.sql("drop table two", "insert into one values (3, 'c')")
    world.run(["public.one", "public.three"])
    world.assert_equal("one", "id, v")
    assert shell.run(world.document(["public.one", "public.three"])).code == 0


def test_transaction_that_wrote_before_its_table_was_published(
    world: World, monkeypatch: pytest.MonkeyPatch, shell: Shell
):
    """P13, Mend b3: it ends later; its rows would be in neither copy nor stream."""
    # The time before it says that it waits would only be waited out.
    monkeypatch.setattr(copies, "_SETTLE_SECONDS_MAX", 0.5)
    two_tables(world)
    world.sql("create publication mine for table one with (publish_via_partition_root)")
    world.run(["public.one"], publication="mine")
    other = session(world.dsn)
    other.run("begin")
    other.run("insert into two values (2, 'written before')")
    pid = int(other.run("select pg_backend_pid()")[0][0])
    world.sql("alter publication mine add table two")
    said = "waiting for transactions to end before table public.two can be copied"
    answer = shell.run(world.document(BOTH, publication="mine"))
    assert answer.code == 1 and said in answer.err and str(pid) in answer.err
    with world.following(BOTH, publication="mine") as following:
        health = following.pipeline.health
        wait_until(lambda: health.to_json()["state"] == "stalled", 60, "it says that it waits")
        assert said in str(health.to_json()["error"])
        # The other table goes on, and nothing is locked.
        world.change(following, ["public.one"], "insert into one values (2, 'meanwhile')")
        held = "select count(*) from pg_locks where relation = 'two'::regclass and pid <> :pid"
        assert world.db.run(held, pid=pid)[0][0] == 0
        world.sql("set lock_timeout = '20s'", "alter table one add column w int")
        other.run("commit")
        following.wait_copied()
        world.change(following, ["public.two"], "insert into two values (3, 'after')")
    for name in ("one", "two"):
        world.assert_equal(name, "id, v")


def test_transaction_that_is_open_at_the_first_start(world: World):
    """P13, Mend b3: publication, then slot; the slot waits for the transaction, the copy has it."""
    two_tables(world)
    other = session(world.dsn)
    other.run("begin")
    other.run("insert into one values (2, 'written before')")
    world.sql("create publication mine for table one, two with (publish_via_partition_root)")
    with world.following(BOTH, publication="mine") as following:
        creating = "select count(*) from pg_replication_slots where slot_name = :name"
        wait_until(
            lambda: world.db.run(creating, name=world.slot)[0][0] == 1, 60, "a slot in the making"
        )
        other.run("commit")
        following.wait_copied()
        world.change(following, ["public.one"], "insert into one values (3, 'after')")
    world.assert_equal("one", "id, v")
