"""A fixed budget of random plays; `python -m tests.integration.select_machine` goes on."""

import itertools
import time
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.integration.changelog_machine import quick
from tests.integration.select_machine import play
from tests.integration.topics import Topics

# A play takes half a minute: no other one begins after this.
BUDGET_SECONDS = 20
FIRST_SEED = 1


@pytest.fixture
def quick_spark(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, for tables of a few rows."""
    with quick(spark):
        yield spark


def test_every_epoch_of_a_select_is_the_select_over_the_source(
    quick_spark: SparkSession, topics: Topics
) -> None:
    """E11, E3, E10, P7, Mend h1, h2, h3: whatever a seed brings; budgeted."""
    deadline = time.monotonic() + BUDGET_SECONDS
    for seed in itertools.count(FIRST_SEED):
        assert play(seed, topics)
        if time.monotonic() > deadline:
            break
