"""Folding and applying equals applying the changes one by one."""

from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from icestream.change import AT, OP, SEQ, Op, fold, only_within

Row = tuple[Op, int, int, str, int | None]
Table = dict[str, int]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Table, list[Row], Table]:
    """A table, changes that a database could have made to it, and what it holds after them."""
    before = draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4))
    rows: list[Row] = []
    after = dict(before)
    clock = (1, 0)
    for _ in range(draw(st.integers(0, 12))):
        wall, logical = clock
        clock = draw(st.sampled_from([(wall + 1, 0), (wall, logical + 1)]))
        key, value = draw(st.sampled_from("abcd")), draw(st.integers(0, 99))
        # Only a key that is not there can be inserted; everything else may happen to any key.
        insert = key not in after and draw(st.booleans())
        op = Op.INSERT if insert else draw(st.sampled_from([Op.UPSERT, Op.DELETE]))
        rows.append((op, *clock, key, None if op == Op.DELETE else value))
        after.pop(key, None)
        if op != Op.DELETE:
            after[key] = value
    return before, rows, after


def change_table(rows: list[Row]) -> pa.Table:
    return pa.table(
        {
            OP: pa.array([row[0] for row in rows], pa.int8()),
            AT: pa.array([row[1] for row in rows], pa.int64()),
            SEQ: pa.array([row[2] for row in rows], pa.int64()),
            "key": pa.array([row[3] for row in rows], pa.string()),
            "value": pa.array([row[4] for row in rows], pa.int64()),
        }
    )


def delivered(draw: st.DrawFn, rows: list[Row]) -> list[Row]:
    """The changes as a source may deliver them: some twice, in any order."""
    twice = draw(st.lists(st.sampled_from(rows), max_size=4)) if rows else []
    return draw(st.permutations([*rows, *twice]))


@given(histories(), st.data())
def test_folding_equals_applying_one_by_one(history, data):
    """I8, C3: deletes first, then rows; whatever the order of arrival and however often."""
    before, rows, after = history
    arrived = delivered(data.draw, rows)
    folded = fold(change_table(arrived), ["key"])
    deleted = folded.deleted.column("key").to_pylist()
    kept = folded.kept.select(["key", "value"]).to_pylist()
    assert len(set(deleted)) == len(deleted)
    assert len({row["key"] for row in kept}) == len(kept)
    result = {key: value for key, value in before.items() if key not in deleted}
    for row in kept:
        # A row that is written beside an older one of its key would be there twice.
        assert row["key"] not in result
        result[row["key"]] = row["value"]
    assert result == after


@given(histories(), st.data())
def test_folding_twice_changes_nothing(history, data):
    """I8: what was folded is folded."""
    _, rows, _ = history
    once = fold(change_table(delivered(data.draw, rows)), ["key"]).kept
    assert fold(once, ["key"]).kept.to_pylist() == once.to_pylist()


@given(histories(), st.data())
def test_cutting_a_history_into_epochs_loses_and_doubles_nothing(history, data):
    """C2: half-open spans that join on to each other hold each change once."""
    _, rows, _ = history
    places = sorted({(row[1], row[2]) for row in rows} | {(0, 0), (10**6, 0)})
    cuts = sorted({places[0], places[-1], *data.draw(st.lists(st.sampled_from(places)))})
    table = change_table(rows)
    parts = [only_within(table, lower, upper) for lower, upper in pairwise(cuts)]
    found = [row for part in parts for row in part.to_pylist()]
    assert sorted(found, key=str) == sorted(table.to_pylist(), key=str)
