"""When an epoch of a running pipeline begins: at its time, or when it is full."""

import time

from tests.integration.postgres_world import World

TABLES = [f"public.t{number}" for number in range(4)]
HOUR = "PT1H"


def four_tables(world: World) -> None:
    """Four tables with a row each."""
    for table in TABLES:
        world.sql(f"create table {table}(id int primary key)", f"insert into {table} values (0)")


def write(world: World, first: int, last: int) -> None:
    """One transaction for each number; each writes to all tables."""
    for number in range(first, last):
        world.transaction(*(f"insert into {table} values ({number})" for table in TABLES))


def streamed(world: World) -> list[int]:
    """How many snapshots of the stream each table has."""
    tables = [table.partition(".")[2] for table in TABLES]
    return [sum(each.copied for each in world.snapshots(table)) for table in tables]


def test_an_epoch_that_is_full_begins_before_its_time(world: World):
    """E9, Mend c10: 600 rows are what the end of the copy finds, 400 together, and what waits."""
    four_tables(world)
    cadence = {"commit_interval": HOUR, "epoch_rows_max": 400}
    with world.following(TABLES, cadence=cadence) as following:
        following.wait_copied()
        write(world, 1, 50)
        before = world.position()
        write(world, 50, 151)
        for table in TABLES:
            following.wait_past(table, before)
        # The copy of the last table, what its end found, and the full epoch.
        assert max(streamed(world)) <= 3
    assert 100 <= len(world.lake_rows("t0", "id")) <= 151
    world.run(TABLES)
    for table in TABLES:
        world.assert_equal(table, "id")


def test_snapshots_come_at_the_interval_under_steady_load(world: World):
    """E9, Mend c10: a table is given one snapshot an interval, however often it is written to."""
    four_tables(world)
    interval = 2.0
    with world.following(TABLES, cadence={"commit_interval": interval}) as following:
        following.wait_copied()
        begun, number = time.monotonic(), 0
        while time.monotonic() - begun < 6 * interval:
            number += 1
            write(world, number, number + 1)
        seconds = time.monotonic() - begun
        found = max(streamed(world))
    assert 2 <= found <= seconds / interval + 2
    assert number > 10 * found
