"""Kill -9 of a pipeline that reads topics: at every place, and at random."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from tests.faults.kafka_kills import TopicVictim
from tests.faults.killing import MakePlace, places_in, play
from tests.servers import KafkaBroker

SEED = 7
KILLS = 2


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A real broker."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> MakePlace:
    """Makes a place for each test."""
    return places_in(tmp_path_factory.mktemp("kills"), spark)


def test_a_pipeline_that_is_killed_everywhere_loses_and_doubles_nothing(
    broker: KafkaBroker, place: MakePlace
):
    """K6, E3: before, during and after the commit, with some tables committed and others not."""
    victim = TopicVictim(place=place(), broker=broker, only_added=True)
    writer = victim.writer(seed=1)
    writer.start()
    try:
        for where in failpoints.PLACES:
            victim.run_until_killed(f"{where}=kill@{2 if where == failpoints.AFTER_SWAP else 1}")
    finally:
        writer.stop()
    victim.finish()
    victim.assert_equal()


def test_random_kills_lose_and_double_nothing(broker: KafkaBroker, place: MakePlace):
    """K6, X5: repeatable by the seed; `python -m tests.faults.kafka_kills` plays more."""
    assert play(TopicVictim(place=place(), broker=broker, only_added=False), SEED, KILLS)
