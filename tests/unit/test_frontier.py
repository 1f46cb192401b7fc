"""A frontier says per partition how far a source was read."""

import pytest

from icestream.errors import Broken
from icestream.frontier import START, Frontier


def test_a_partition_that_is_not_named_stands_at_its_minimum():
    """E4: new partitions of a source start from their beginning."""
    frontier = Frontier({"a": (5,)})
    assert frontier["a"] == (5,)
    assert frontier["b"] == ()
    assert Frontier({"a": (5,), "b": ()}) == frontier
    assert hash(Frontier({"a": (5,), "b": ()})) == hash(frontier)


def test_positions_compare_from_left_to_right_as_whole_numbers():
    """C3: HLC pairs are never floats: neighbours that a double cannot tell apart differ."""
    wall = 1701102296662969433
    lower, upper = Frontier({"r": (wall, 0)}), Frontier({"r": (wall, 1)})
    assert upper.covers(lower)
    assert not lower.covers(upper)
    assert Frontier({"r": (wall + 1, 0)}).covers(upper)


def test_frontiers_that_are_ahead_in_different_partitions_cover_neither_each_other():
    """E4: progress is per partition, not a single number."""
    left, right = Frontier({"a": (2,), "b": (1,)}), Frontier({"a": (1,), "b": (2,)})
    assert not left.covers(right)
    assert not right.covers(left)
    assert left.join(right) == Frontier({"a": (2,), "b": (2,)})


def test_every_frontier_covers_the_start():
    """E4: the start includes nothing."""
    assert Frontier({"a": (0,)}).covers(START)
    assert not START.covers(Frontier({"a": (0,)}))
    assert START.covers(START)


def test_a_frontier_is_not_equal_to_something_else():
    """E4: comparing with plain data is a mistake, never true by accident."""
    assert Frontier({"a": (1,)}) != {"a": (1,)}


def test_json_leaves_minimum_partitions_out_and_is_sorted():
    """I7: the same frontier is always spelled the same way."""
    assert Frontier({"b": (1, 2), "a": (3,), "c": ()}).to_json() == {"a": [3], "b": [1, 2]}
    assert list(Frontier({"b": (1,), "a": (3,)}).to_json()) == ["a", "b"]
    assert Frontier.from_json({"b": [1, 2]}) == Frontier({"b": (1, 2)})


@pytest.mark.parametrize("position", [1, "1", [1.5], ["1"], None, {"at": 1}])
def test_a_position_that_is_not_a_list_of_integers_is_refused(position):
    """E2: a summary that somebody altered is not taken for progress."""
    with pytest.raises(Broken, match="position of partition p"):
        Frontier.from_json({"p": position})
