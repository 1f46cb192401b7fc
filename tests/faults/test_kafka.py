"""Kill -9 of a pipeline that reads topics: at every place, and at random."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from tests.faults.kafka_kills import Victim, Writer, play
from tests.faults.kills import catalog_in
from tests.lake import Lake
from tests.servers import KafkaBroker

MakeVictim = Callable[[bool], Victim]
SEED = 7
KILLS = 2


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A real broker."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="module")
def make_victim(
    broker: KafkaBroker, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> MakeVictim:
    """Makes a topic with a pipeline of its own."""
    folder = tmp_path_factory.mktemp("kills")
    catalog = catalog_in(folder)
    lake = Lake(spark, catalog)
    numbers = itertools.count()

    def make(only_added: bool) -> Victim:
        number = next(numbers)
        return Victim(
            broker=broker,
            folder=folder / str(number),
            lake=lake,
            catalog=catalog,
            name=f"kills{number}",
            only_added=only_added,
        )

    return make


def test_a_pipeline_that_is_killed_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """K6, E3: before, during and after the commit, with some tables committed and others not."""
    victim = make_victim(True)
    writer = Writer(victim.broker, victim.name, seed=1)
    writer.start()
    try:
        for place in failpoints.PLACES:
            victim.run_until_killed(f"{place}=kill@{2 if place == failpoints.AFTER_SWAP else 1}")
    finally:
        writer.stop()
    assert sum("killed" in each for each in victim.story) >= len(failpoints.PLACES) - 1
    victim.finish()
    victim.assert_equal()


def test_random_kills_lose_and_double_nothing(make_victim: MakeVictim):
    """K6, X5: repeatable by the seed; `python -m tests.faults.kafka_kills` plays more."""
    assert play(make_victim(False), SEED, KILLS)
