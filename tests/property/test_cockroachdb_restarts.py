"""A folder of changefeed files, whatever tables are taken, and wherever runs are killed."""

import random

import pytest

from icestream.errors import HistoryLost, SourceUnavailable
from icestream.sinks.iceberg import state
from icestream.sinks.iceberg.publishing import EpochPublisher
from tests.unit.sources.test_cockroachdb import at, wrapped
from tests.unit.sources.test_cockroachdb_restarts import Crash, Shop

TABLES = ("a", "b", "c", "d")
SEEDS = 20
DELETED = 1000


def some(rng: random.Random, share: float) -> list[str]:
    return [table for table in TABLES if rng.random() < share]


def rounds(shop: Shop, rng: random.Random, first: int, expected: dict[str, list[int]]) -> int:
    """Up to three resolved timestamps, with rows of some tables and deletes of others."""
    for number in range(first, first + rng.randint(0, 3)):
        filled = some(rng, 0.6)
        for table in set(some(rng, 0.3)) - set(filled):
            shop.feed.data(table, [wrapped(DELETED + number, 10 * number + 1)], at(10 * number + 1))
        for table in filled:
            expected[table].append(number)
        shop.round(number, *filled)
        first = number + 1
    return first


def brought(shop: Shop, table: str) -> list[int]:
    if not any(name.name == table for name in shop.lake.tables):
        return []
    return [i for ids in shop.snapshots(table) for i in ids if i < DELETED]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_row_comes_once_and_in_order(tmp_path, monkeypatch, seed):
    """E4, C8, Mend, read F2: after kills between commits, with tables left out and put back."""
    rng = random.Random(seed)
    shop, expected, number = Shop(tmp_path), {table: [] for table in TABLES}, 0
    commits_left: list[int] = []
    publish = EpochPublisher._publish

    def killed(self, table, commit):
        if commits_left:
            commits_left[0] -= 1
            if commits_left[0] < 0:
                raise Crash
        publish(self, table, commit)

    monkeypatch.setattr(EpochPublisher, "_publish", killed)  # a kill between two commits
    monkeypatch.setattr(state, "COMMITS_IN_PARALLEL", 1)  # in order: a seed tells which is killed
    for _ in range(rng.randint(3, 6)):
        number = rounds(shop, rng, number, expected)
        commits_left[:] = rng.choice([[], [], [0], [1], [2], [3], [4]])
        taken = rng.choice([(), TABLES, some(rng, 0.6)])
        try:
            shop.run(*taken)
        except Crash:
            pass
        except SourceUnavailable:
            assert number == 0
        except HistoryLost as lost:
            # A table that lacks a part of an epoch was left out; it is there when it is put back.
            assert "no longer has all of epoch" in str(lost) and 0 < len(taken) < len(TABLES)
    commits_left.clear()
    if number:
        shop.run(*TABLES)
    assert {table: brought(shop, table) for table in TABLES} == expected
