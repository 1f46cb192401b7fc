"""Frontiers form a lattice, and survive JSON."""

import json

from hypothesis import given
from hypothesis import strategies as st

from icestream.epoch import batch_id
from icestream.frontier import START, Frontier

positions = st.lists(st.integers(0, 5) | st.integers(0, 2**63), max_size=2).map(tuple)
frontiers = st.dictionaries(st.sampled_from("abcd"), positions, max_size=4).map(Frontier)


@given(frontiers)
def test_the_start_is_the_bottom(one):
    """E4: every frontier covers the start and itself."""
    assert one.covers(START)
    assert one.covers(one)
    assert one.join(START) == one


@given(frontiers, frontiers)
def test_covering_each_other_is_equality(one, other):
    """E4: the order is antisymmetric, and equal frontiers have equal hashes."""
    both = one.covers(other) and other.covers(one)
    assert both == (one == other)
    if both:
        assert hash(one) == hash(other)
        assert one.to_json() == other.to_json()


@given(frontiers, frontiers, frontiers)
def test_covering_is_transitive(one, other, third):
    """E4: what is included stays included."""
    if one.covers(other) and other.covers(third):
        assert one.covers(third)
    assert one.join(other).join(third).covers(third)


@given(frontiers, frontiers)
def test_a_join_is_the_least_that_covers_both(one, other):
    """E4: join is commutative and idempotent, and nothing smaller covers both."""
    joined = one.join(other)
    assert joined.covers(one)
    assert joined.covers(other)
    assert joined == other.join(one)
    assert joined.join(one) == joined
    for name, position in joined.positions.items():
        assert position in (one[name], other[name])


@given(frontiers, frontiers, frontiers)
def test_a_join_is_associative(one, other, third):
    """E4: the order in which progress is gathered makes no difference."""
    assert one.join(other).join(third) == one.join(other.join(third))


@given(frontiers)
def test_a_frontier_survives_json(one):
    """I7: bounds are stored as JSON."""
    assert Frontier.from_json(json.loads(json.dumps(one.to_json()))) == one


@given(frontiers, frontiers, st.text(max_size=5), st.text(max_size=5))
def test_a_batch_id_is_the_same_for_equal_frontiers_only(one, other, pipeline, table):
    """I5: every attempt at an epoch has the same id, and no other epoch has it."""
    same = batch_id(pipeline, table, one) == batch_id(pipeline, table, other)
    assert same == (one == other)
    again = Frontier(dict(reversed(list(one.positions.items()))))
    assert batch_id(pipeline, table, again) == batch_id(pipeline, table, one)
