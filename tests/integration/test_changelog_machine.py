"""A fixed number of random plays; `python -m tests.integration.changelog_machine` goes on."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from icestream.sources.iceberg import changelog, rewritten
from tests.integration.changelog_machine import opened, play

# Each way in which rows of a large step are compared has its turn among three.
PLAYS = 3
STEPS = 4
LONG_PLAYS = 30
FIRST_SEED = 1
LARGE_BYTES = changelog._LARGE_BYTES


def test_every_changelog_leads_from_one_state_to_the_next(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3, O4, O5, O7: whatever a few seeds bring."""
    play_seeds(range(FIRST_SEED, FIRST_SEED + PLAYS), spark, tmp_path, monkeypatch, STEPS)


@pytest.mark.long(kept_by="test_every_changelog_leads_from_one_state_to_the_next")
def test_every_changelog_of_many_seeds_leads_from_one_state_to_the_next(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3, O4, O5, O7: whatever many seeds bring."""
    play_seeds(range(FIRST_SEED, FIRST_SEED + LONG_PLAYS), spark, tmp_path, monkeypatch)


def play_seeds(
    seeds: range,
    spark: SparkSession,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int | None = None,
) -> None:
    """A play for each seed."""
    lake, catalog = opened(spark, folder)
    for seed in seeds:
        # These tables are tiny: two of three are taken for large ones, whose hashes come first, be
        # they Spark's or those of plain files.
        monkeypatch.setattr(changelog, "_LARGE_BYTES", 0 if seed % 3 else LARGE_BYTES)
        monkeypatch.setattr(rewritten, "_LEFT_MAX", 1.0 if seed % 3 == 1 else -1.0)
        assert play(seed, lake, catalog, steps)
