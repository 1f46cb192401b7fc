"""A pipeline that reads topics dies: at every place, and at random.

Everywhere by a crash in this process, at the swap by kill -9 of a real one.
"""

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from tests.faults.kafka_kills import TopicVictim
from tests.faults.killing import places_in, play
from tests.servers import KafkaBroker

MakeVictim = Callable[..., TopicVictim]
SEED = 7
KILLS = 2
CRASHES = 4


@pytest.fixture(scope="module")
def make_victim(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeVictim]:
    """Makes a topic on a real broker, with a pipeline of its own."""
    place = places_in(tmp_path_factory.mktemp("kills"), spark)
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:

        def make(*, here: bool, only_added: bool) -> TopicVictim:
            return TopicVictim(place=place(), here=here, broker=broker, only_added=only_added)

        yield make


def die_everywhere(victim: TopicVictim) -> None:
    with victim.changing(seed=1):
        for where in failpoints.PLACES:
            victim.run_until_killed(where, 2 if where == failpoints.AFTER_SWAP else 1)
    victim.finish()
    victim.assert_equal()


def test_a_pipeline_that_crashes_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """K6, E3: before, during and after the commit, with some tables committed and others not."""
    die_everywhere(make_victim(here=True, only_added=True))


@pytest.mark.long(kept_by="test_a_pipeline_that_crashes_everywhere_loses_and_doubles_nothing")
def test_random_crashes_lose_and_double_nothing(make_victim: MakeVictim):
    """K6, X5: records that replace and delete rows, repeatable by the seed."""
    assert play(make_victim(here=True, only_added=False), SEED, CRASHES)


def test_kill_9_at_the_swap_loses_and_doubles_nothing(make_victim: MakeVictim):
    """K6, E3: a process and its JVM die with one of three tables published."""
    victim = make_victim(here=False, only_added=True)
    with victim.changing(seed=2):
        victim.run_until_killed(failpoints.BEFORE_PUBLISH, 2)
    victim.finish()
    victim.assert_equal()


@pytest.mark.long(kept_by="test_a_pipeline_that_crashes_everywhere_loses_and_doubles_nothing")
def test_a_pipeline_that_is_killed_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """K6, E3: the same places, by kill -9."""
    die_everywhere(make_victim(here=False, only_added=True))


@pytest.mark.long(kept_by="test_a_pipeline_that_crashes_everywhere_loses_and_doubles_nothing")
def test_random_kills_lose_and_double_nothing(make_victim: MakeVictim):
    """K6, X5: repeatable by the seed; `python -m tests.faults.kafka_kills` plays more."""
    assert play(make_victim(here=False, only_added=False), SEED, KILLS)
