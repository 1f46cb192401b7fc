"""A fixed number of random plays; `python -m tests.integration.select_machine` goes on."""

import pytest

from tests.integration.select_machine import play
from tests.integration.topics import Topics

# A play takes half a minute.
SEEDS = (1,)
MANY_SEEDS = range(1, 11)


def test_every_epoch_of_a_select_is_the_select_over_the_source(topics: Topics) -> None:
    """E11, E3, E10, P7, Mend h1, h2, h3: whatever a seed brings."""
    for seed in SEEDS:
        assert play(seed, topics)


@pytest.mark.long(kept_by="test_every_epoch_of_a_select_is_the_select_over_the_source")
def test_every_epoch_of_a_select_is_the_select_over_the_source_with_many_seeds(
    topics: Topics,
) -> None:
    """E11, E3, E10, P7, Mend h1, h2, h3: whatever many seeds bring."""
    for seed in MANY_SEEDS:
        assert play(seed, topics)
