"""Rows of a later copy whose keys the stream has changed since are left out."""

import numpy as np
import pyarrow as pa
import pytest

from icestream.sources.postgres.backfill import _without


@pytest.mark.parametrize("name", ["id", ".id", "a.b", "a[0]"])
def test_rows_of_touched_keys_are_left_out_whatever_the_key_is_called(name: str):
    """P3, P8: Arrow takes some names for paths."""
    rows = pa.table({name: [5, 3, 4, 1], "v": ["e", "c", "d", "a"]})
    left = _without(rows, pa.table({name: np.array([3, 1, 9])}), [name])
    assert left.to_pydict() == {name: [5, 4], "v": ["e", "d"]}


def test_rows_with_equal_parts_of_a_key_are_told_apart():
    """P3: all columns of a key count."""
    rows = pa.table({"a": [1, 1, 2], "b": ["x", "y", "x"]})
    assert _without(rows, pa.table({"a": [1], "b": ["x"]}), ["a", "b"]).to_pydict() == {
        "a": [1, 2],
        "b": ["y", "x"],
    }
