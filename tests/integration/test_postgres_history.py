"""A PostgreSQL in another state than the lake's is never followed in silence."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from icestream.errors import HistoryLost
from icestream.samples.postgres import EmbeddedPostgres
from tests.integration.pipelines import Shell, assert_refused
from tests.integration.postgres_world import World, lsn
from tests.servers import wait_until

OPERATOR = 3
ONE = ["public.one"]


@pytest.fixture
def own(
    spark: SparkSession, embedded: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A world on a server of its own, whose data may be replaced."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("restored")) as server:
        world = World(server, "restored", spark, embedded)
        yield world
        world.close()


def one_table(world: World) -> None:
    """A small table and one that nobody follows."""
    world.sql("create table one(id int primary key, v text)", "insert into one values (1, 'a')")
    world.sql("create table other(id int)")


def stop(world: World) -> None:
    """End the server in good order."""
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")
    world.db.close()
    world.server.stop()
    world.reconnect()


def copied(world: World, to: Path) -> None:
    """Copy the data of a server that is down; its owner and modes are kept."""
    subprocess.run(["cp", "-a", str(world.server.folder / "data"), str(to)], check=True)


def put_back(world: World, copy: Path, promoted: bool) -> None:
    """Start the server from a copy of its data."""
    data = world.server.folder / "data"
    shutil.rmtree(data)
    subprocess.run(["cp", "-a", str(copy), str(data)], check=True)
    if promoted:
        (data / "standby.signal").touch()
    world.server.start()
    if promoted:
        world.sql("select pg_promote()")
        wait_until(lambda: not world.sql("select pg_is_in_recovery()")[0][0], 60, "promotion")


def write_past(world: World, position: int) -> None:
    """Write what nobody follows until the log has passed a position."""
    while world.position() <= position:
        world.sql("insert into other select generate_series(1, 1000)")


@pytest.mark.parametrize("promoted", [False, True])
def test_server_in_an_earlier_state(own: World, shell: Shell, tmp_path: Path, promoted: bool):
    """Mend b1, P12 E7: a restored copy, or a standby that was promoted too early, with the slot in
    it. It is noticed before and after its log has passed the lake; what the hint says helps."""
    one_table(own)
    own.run(ONE)
    stop(own)
    copied(own, tmp_path / "copy")
    own.server.start()
    own.sql("insert into other select generate_series(1, 10000)")
    own.sql("insert into one values (2, 'lost'), (3, 'lost')")
    own.run(ONE)
    reached = own.position()
    stop(own)
    put_back(own, tmp_path / "copy", promoted)
    own.sql("insert into one values (2, 'new'), (4, 'new')")
    assert own.position() < reached
    answer = shell.run(own.document(ONE))
    assert_refused(answer, OPERATOR, "log ends at", "older copy", "copied anew")
    write_past(own, reached)
    own.sql("insert into one values (5, 'new')")
    answer = shell.run(own.document(ONE))
    assert_refused(answer, OPERATOR, "history is not the one", "older copy", "copied anew")
    assert own.lake_rows("one", "id, v") == [(1, "a"), (2, "lost"), (3, "lost")]
    # What the hint says helps.
    wait_until(lambda: not own.slot_row("active"), 60, "the server notices the run's end")
    own.sql(f"select pg_drop_replication_slot('{own.slot}')")
    own.spark.sql(f"DROP TABLE {own.lake.table('shop.one')}")
    own.run(ONE)
    own.assert_equal("one", "id, v")
    own.sql("insert into one values (6, 'newer')")
    own.run(ONE)
    own.assert_equal("one", "id, v")


def test_server_restored_to_the_very_state_of_the_lake(own: World, tmp_path: Path):
    """Mend b1, P12: a copy that was taken after the last run has lost nothing, and is followed."""
    one_table(own)
    own.run(ONE)
    stop(own)
    copied(own, tmp_path / "copy")
    put_back(own, tmp_path / "copy", promoted=False)
    own.sql("insert into one values (2, 'b')")
    own.run(ONE)
    own.assert_equal("one", "id, v")


def test_slot_created_anew_under_its_old_name(world: World, shell: Shell):
    """Mend b1, P12: it begins later than the lake; what came in between is not skipped over."""
    one_table(world)
    world.run(ONE)
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")
    world.sql(f"select pg_drop_replication_slot('{world.slot}')", "insert into one values (2, 'b')")
    world.sql(f"select pg_create_logical_replication_slot('{world.slot}', 'pgoutput')")
    answer = shell.run(world.document(ONE))
    assert_refused(
        answer, OPERATOR, "no longer has the changes", "moved the slot on", "copied anew"
    )


def test_moved_slot_when_one_of_two_tables_is_dropped(world: World, shell: Shell):
    """E7, Mend of 018: the table that is left lacks a change that the slot has passed. It is not
    healed in silence, however often the run is started; what the hint says helps."""
    one_table(world)
    world.sql("create table two(id int primary key, v text)", "insert into two values (1, 'a')")
    both = ["public.one", "public.two"]
    world.run(both)
    world.sql("insert into two values (2, 'passed over')")
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")
    world.sql(f"select pg_replication_slot_advance('{world.slot}', pg_current_wal_insert_lsn())")
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.one')}")
    for _ in range(2):
        with pytest.raises(HistoryLost, match="not where this pipeline left it"):
            world.run(both)
    assert_refused(
        shell.run(world.document(both)), OPERATOR, "not where this pipeline left it", "copied anew"
    )
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")
    world.sql(f"select pg_drop_replication_slot('{world.slot}')")
    for table in ("one", "two"):
        world.spark.sql(f"DROP TABLE IF EXISTS {world.lake.table(f'shop.{table}')}")
    world.run(both)
    world.sql("insert into two values (3, 'c')")
    world.run(both)
    for table in ("one", "two"):
        world.assert_equal(table, "id, v")


def test_witness_does_not_hold_the_log_back(world: World):
    """Mend b1, P11: while only other tables are busy the slot follows, in some megabytes."""
    one_table(world)
    with world.following(ONE, cadence={"heartbeat_interval": 0.2}) as following:
        following.wait_copied()
        before = world.position()
        for _ in range(2):
            world.sql("insert into other select generate_series(1, 200000)")
        assert world.position() > before + 20_000_000

        def follows() -> bool:
            following.raise_error()
            return lsn(world.slot_row("confirmed_flush_lsn::text")) > before

        wait_until(follows, 60, "the slot moves")
        world.change(following, ONE, "insert into one values (2, 'b')")
    world.run(ONE)
    world.assert_equal("one", "id, v")
