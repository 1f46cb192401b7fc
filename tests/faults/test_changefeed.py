"""Kill -9 of a pipeline that reads a changefeed's topics: between and in epochs, and at random."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from tests.faults.changefeed_kills import FeedVictim
from tests.faults.killing import MakePlace, places_in, play
from tests.servers import KafkaBroker

SEED = 5
KILLS = 3


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A real broker."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> MakePlace:
    """Makes a place for each test."""
    return places_in(tmp_path_factory.mktemp("kills"), spark)


def test_every_timestamp_is_one_snapshot_although_the_pipeline_is_killed_everywhere(
    broker: KafkaBroker, place: MakePlace
):
    """C2, C4, E3: before, during and after the commit, with one of two tables committed."""
    victim = FeedVictim(place=place(), broker=broker)
    writer = victim.writer(seed=1)
    writer.start()
    try:
        for where in (failpoints.AFTER_WRITE, failpoints.BEFORE_PUBLISH):
            victim.run_until_killed(f"{where}=kill@2")
        victim.run_until_killed(f"{failpoints.AFTER_PUBLISH}=kill@1")
        victim.run_until_killed(f"{failpoints.AFTER_COMMIT}=kill@1")
    finally:
        writer.stop()
    victim.finish()
    victim.assert_equal()


def test_random_kills_leave_one_snapshot_for_each_timestamp(broker: KafkaBroker, place: MakePlace):
    """C2, X5: repeatable by the seed; `python -m tests.faults.changefeed_kills` plays more."""
    assert play(FeedVictim(place=place(), broker=broker), SEED, KILLS)
