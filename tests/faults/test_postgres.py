"""A pipeline that copies and follows PostgreSQL dies: at every place, and at random.

Everywhere by a crash in this process, at the swap by kill -9 of a real one.
"""

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.samples.postgres import EmbeddedPostgres
from tests.faults.killing import places_in, play
from tests.faults.kills import DatabaseVictim, database

MakeVictim = Callable[..., DatabaseVictim]
# Chosen for what they hold: kills in the copy and in the stream.
SEED = 4
KILLS = 2
CRASHES = 4


@pytest.fixture(scope="module")
def make_victim(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeVictim]:
    """Makes a database on a real PostgreSQL, with a pipeline of its own."""
    place = places_in(tmp_path_factory.mktemp("kills"), spark)
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres")) as server:

        def make(*, here: bool) -> DatabaseVictim:
            where = place()
            return DatabaseVictim(place=where, here=here, dsn=database(server.dsn, where.name))

        yield make


def die_everywhere_in_the_copy(victim: DatabaseVictim) -> None:
    with victim.changing(seed=1):
        victim.run_until_killed(failpoints.AFTER_SLOT, 1)
        for place in failpoints.PLACES:
            victim.run_until_killed(place, 2)
    victim.finish()
    victim.assert_equal()


def die_everywhere_in_the_stream(victim: DatabaseVictim) -> None:
    victim.finish()
    with victim.changing(seed=2):
        for place in failpoints.PLACES:
            victim.run_until_killed(place, 1)
    victim.finish()
    victim.assert_equal()


def die_at_the_swap(victim: DatabaseVictim, *places: str) -> None:
    with victim.changing(seed=3):
        for place in places:
            victim.run_until_killed(place, 2)
    victim.finish()
    victim.assert_equal()


def test_a_copy_that_crashes_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P3, P4: whatever was committed stays, the rest is read again beside the stream."""
    die_everywhere_in_the_copy(make_victim(here=True))


def test_a_stream_that_crashes_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P6, E3: the slot moves only behind the commit, so what a crash leaves undone comes again."""
    die_everywhere_in_the_stream(make_victim(here=True))


@pytest.mark.long(kept_by="test_a_copy_that_crashes_everywhere_loses_and_doubles_nothing")
def test_random_crashes_lose_and_double_nothing(make_victim: MakeVictim):
    """P3, P6, X5: in the copy and after it, repeatable by the seed."""
    assert play(make_victim(here=True), SEED, CRASHES)


def test_kill_9_at_the_swap_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P3, P6, E3: a process and its JVM die in the copy, and never hear of what they committed."""
    die_at_the_swap(make_victim(here=False), failpoints.AFTER_PUBLISH)


@pytest.mark.long(kept_by="test_a_copy_that_crashes_everywhere_loses_and_doubles_nothing")
def test_a_copy_that_is_killed_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P3, P4: the same places, by kill -9."""
    die_everywhere_in_the_copy(make_victim(here=False))


@pytest.mark.long(kept_by="test_a_stream_that_crashes_everywhere_loses_and_doubles_nothing")
def test_a_stream_that_is_killed_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P6, E3: the same places, by kill -9."""
    die_everywhere_in_the_stream(make_victim(here=False))


@pytest.mark.long(kept_by="test_a_stream_that_crashes_everywhere_loses_and_doubles_nothing")
def test_random_kills_lose_and_double_nothing(make_victim: MakeVictim):
    """P3, P6, X5: repeatable by the seed; `python -m tests.faults.kills` plays as many as asked."""
    assert play(make_victim(here=False), SEED, KILLS)
