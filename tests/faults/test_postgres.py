"""Kill -9 of a pipeline that copies and follows PostgreSQL: at every place, and at random."""

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.samples.postgres import EmbeddedPostgres
from tests.faults.killing import places_in, play
from tests.faults.kills import DatabaseVictim, database

MakeVictim = Callable[[], DatabaseVictim]
# Chosen for what they hold: kills in the copy and in the stream.
SEED = 4
KILLS = 2


@pytest.fixture(scope="module")
def make_victim(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeVictim]:
    """Makes a database on a real PostgreSQL, with a pipeline of its own."""
    place = places_in(tmp_path_factory.mktemp("kills"), spark)
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres")) as server:

        def make() -> DatabaseVictim:
            where = place()
            return DatabaseVictim(place=where, dsn=database(server.dsn, where.name))

        yield make


def test_a_copy_that_is_killed_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P3, P4: whatever was committed stays, the rest is read again beside the stream."""
    victim = make_victim()
    writer = victim.writer(seed=1)
    writer.start()
    try:
        victim.run_until_killed(f"{failpoints.AFTER_SLOT}=kill@1")
        for place in failpoints.PLACES:
            victim.run_until_killed(f"{place}=kill@2")
    finally:
        writer.stop()
    victim.finish()
    victim.assert_equal()


def test_a_stream_that_is_killed_everywhere_loses_and_doubles_nothing(make_victim: MakeVictim):
    """P6, E3: the slot moves only behind the commit, so what a kill leaves undone comes again."""
    victim = make_victim()
    victim.finish()
    writer = victim.writer(seed=2)
    writer.start()
    try:
        for place in failpoints.PLACES:
            victim.run_until_killed(f"{place}=kill@1")
    finally:
        writer.stop()
    victim.finish()
    victim.assert_equal()


def test_random_kills_lose_and_double_nothing(make_victim: MakeVictim):
    """P3, P6, X5: repeatable by the seed; `python -m tests.faults.kills` plays as many as asked."""
    assert play(make_victim(), SEED, KILLS)
