"""A small fixed budget of random rounds; `make test-faults` plays as many as one likes."""

import random
from pathlib import Path

import pytest

from tests.faults import rounds
from tests.lake import Lake
from tests.servers import RestCatalog

# Chosen for what they hold: kills, lost answers and rivals, in several tables. A place that is
# added to `failpoints.PLACES` changes what a seed brings: choose again when no run is killed.
SEED = 59
OTHER_SEED = 38
FAULTY_RUNS = 1


@pytest.mark.long(
    kept_by="tests/faults/test_crashes.py::test_kill_9_at_every_place_and_the_restarts_end_exact"
)
def test_a_round_of_random_faults_ends_exact(lake: Lake, rest: RestCatalog, tmp_path: Path) -> None:
    """E3, X5: whatever a seed brings, and repeatable by it."""
    assert "killed" in rounds.play(SEED, lake, rest, tmp_path, FAULTY_RUNS)


@pytest.mark.long(
    kept_by="tests/faults/test_crashes.py::test_kill_9_at_every_place_and_the_restarts_end_exact"
)
def test_rounds_of_more_random_faults_end_exact(
    lake: Lake, rest: RestCatalog, tmp_path: Path
) -> None:
    """E3, X5: a second seed, and one that nobody has seen before."""
    new = random.SystemRandom().randrange(10**6)
    assert "killed" in rounds.play(OTHER_SEED, lake, rest, tmp_path / "other", FAULTY_RUNS)
    assert rounds.play(new, lake, rest, tmp_path / "new"), f"seed {new}"
