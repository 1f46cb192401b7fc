"""When an epoch of a running pipeline begins: at its time, or when it is full."""

import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from icestream.status import StatusServer
from tests.integration.postgres_world import PATIENCE_SECONDS, World
from tests.servers import wait_until

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
        # The copy of the last table, what its end found, the full epoch, and what had come behind
        # that one when the source was asked.
        assert max(streamed(world)) <= 4
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


def freshness(address: str, pipeline: str) -> dict[str, float]:
    """What a reader of /metrics sees: the sum, the count, and the counts by upper bound."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = [each for each in families if each.name == "icestream_freshness_seconds"]
    assert [each.type for each in found] == ["histogram"]
    return {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
        for sample in found[0].samples
        if sample.labels["pipeline"] == pipeline
    }


def test_freshness_is_measured_for_every_epoch_of_the_stream(world: World):
    """E15: a histogram at /metrics, from the commit at the source on, of all epochs with changes.

    Rows of a copy are as old as they are, which is no measure of the pipeline: none is counted.
    """
    four_tables(world)
    with world.following(TABLES) as following:
        server = StatusServer("127.0.0.1", 0, [following.pipeline])
        try:
            following.wait_copied()
            begun = time.time()
            for number in range(1, 4):
                commands = [f"insert into {table} values ({number})" for table in TABLES]
                world.change(following, TABLES, *commands)
            # Health tells of a commit a moment before the metrics do.
            wait_until(
                lambda: freshness(server.address, world.name)["count"] >= 3,
                PATIENCE_SECONDS,
                "the last epoch's freshness",
            )
            seen, seconds = freshness(server.address, world.name), time.time() - begun
        finally:
            server.close()
    published = [each for table in TABLES for each in world.snapshots(table.partition(".")[2])]
    copied_at = min(each.lsn for each in published)
    assert seen["count"] == seen["+Inf"] == 3
    assert len({each.epoch for each in published if each.lsn > copied_at}) == 3
    # Each change was made once the one before was durable.
    assert 0 < seen["sum"] <= seconds
