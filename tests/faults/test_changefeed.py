"""A pipeline that reads a changefeed's topics dies: between and in epochs, and at random.

Everywhere by a crash in this process, at the swap by kill -9 of a real one.
"""

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from tests.faults.changefeed_kills import FeedVictim
from tests.faults.killing import places_in, play
from tests.servers import KafkaBroker

MakeVictim = Callable[..., FeedVictim]
SEED = 5
KILLS = 3
CRASHES = 4
# With the second pass one of two tables, or one of several epochs, is behind the place already.
SECOND_PASS = {failpoints.AFTER_WRITE, failpoints.BEFORE_PUBLISH}
AROUND_THE_COMMIT = (
    failpoints.AFTER_WRITE,
    failpoints.BEFORE_PUBLISH,
    failpoints.AFTER_PUBLISH,
    failpoints.AFTER_COMMIT,
)


@pytest.fixture(scope="module")
def make_victim(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeVictim]:
    """Makes topics on a real broker, with a pipeline of their own."""
    place = places_in(tmp_path_factory.mktemp("kills"), spark)
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield lambda *, here: FeedVictim(place=place(), here=here, broker=broker)


def die(victim: FeedVictim, *places: str) -> None:
    with victim.changing(seed=1):
        for where in places:
            victim.run_until_killed(where, 2 if where in SECOND_PASS else 1)
    victim.finish()
    victim.assert_equal()


def test_every_timestamp_is_one_snapshot_although_the_pipeline_crashes_everywhere(
    make_victim: MakeVictim,
):
    """C2, C4, E3: before, during and after the commit, with one of two tables committed."""
    die(make_victim(here=True), *AROUND_THE_COMMIT)


def test_every_timestamp_is_one_snapshot_although_the_pipeline_is_killed_at_the_swap(
    make_victim: MakeVictim,
):
    """C2, C4, E3: a process and its JVM die with one of two tables committed."""
    die(make_victim(here=False), failpoints.BEFORE_PUBLISH)


@pytest.mark.long(
    kept_by="test_every_timestamp_is_one_snapshot_although_the_pipeline_crashes_everywhere"
)
def test_every_timestamp_is_one_snapshot_although_the_pipeline_is_killed_everywhere(
    make_victim: MakeVictim,
):
    """C2, C4, E3: the same places, by kill -9."""
    die(make_victim(here=False), *AROUND_THE_COMMIT)


@pytest.mark.long(
    kept_by="test_every_timestamp_is_one_snapshot_although_the_pipeline_crashes_everywhere"
)
def test_random_crashes_leave_one_snapshot_for_each_timestamp(make_victim: MakeVictim):
    """C2, X5: repeatable by the seed."""
    assert play(make_victim(here=True), SEED, CRASHES)


@pytest.mark.long(
    kept_by="test_every_timestamp_is_one_snapshot_although_the_pipeline_crashes_everywhere"
)
def test_random_kills_leave_one_snapshot_for_each_timestamp(make_victim: MakeVictim):
    """C2, X5: repeatable by the seed; `python -m tests.faults.changefeed_kills` plays more."""
    assert play(make_victim(here=False), SEED, KILLS)
