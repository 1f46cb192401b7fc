"""Hashes of rows: equal for equal rows, however their columns lie in memory, and else different."""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from icestream.sources.iceberg.row_hashes import row_hashes

NUMBERS = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-3, 3)
TEXTS = st.text(st.sampled_from("abé\0"), max_size=20)
LISTED = st.lists(st.none() | SMALL, max_size=3)
MAPS = st.dictionaries(TEXTS, st.none() | SMALL, max_size=3).map(lambda m: sorted(m.items()))
DECIMALS = st.integers(-(10**30), 10**30).map(lambda n: Decimal(n).scaleb(-3))
TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1))
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "long": (pa.int64(), NUMBERS | SMALL),
    "int": (pa.int32(), SMALL),
    "flag": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.floats()),
    "decimal": (pa.decimal128(38, 3), DECIMALS),
    "at": (pa.timestamp("us", tz="UTC"), TIMES.map(lambda at: at.replace(tzinfo=UTC))),
    "text": (pa.string(), TEXTS),
    "long_text": (pa.large_string(), TEXTS),
    "bytes": (pa.binary(), st.binary(max_size=20)),
    "fixed": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "list": (pa.list_(pa.int64()), LISTED),
    "lists": (pa.list_(pa.list_(pa.int64())), st.lists(st.none() | LISTED, max_size=3)),
    "map": (pa.map_(pa.string(), pa.int64()), MAPS),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | SMALL, "b": st.none() | TEXTS}),
    ),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], list[pa.Array]]:
    """Some rows, and the same as columns."""
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
    row = st.tuples(*(st.none() | COLUMNS[name][1] for name in names))
    rows = draw(st.lists(row, min_size=1, max_size=30))
    # Rows that differ in one value only, and rows that are there twice.
    rows += draw(st.lists(st.sampled_from(rows), max_size=10))
    columns = [
        pa.array([each[number] for each in rows], COLUMNS[name][0])
        for number, name in enumerate(names)
    ]
    return rows, columns


def bits(value: Any) -> Any:
    """A value that equals another one only when their bits do."""
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, dict):
        # A struct has its members by name; the order in which they are listed means nothing.
        return tuple((name, bits(item)) for name, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(bits, value))
    return (type(value), value)


@given(tables())
def test_rows_have_the_same_hash_only_if_they_are_the_same(
    table: tuple[list[tuple[Any, ...]], list[pa.Array]],
) -> None:
    """O3: what is carried over cancels out, and nothing else does."""
    rows, columns = table
    hashes = row_hashes(columns, len(rows)).tolist()
    by_row: dict[Any, set[int]] = {}
    for row, found in zip(rows, hashes, strict=True):
        by_row.setdefault(bits(row), set()).add(found)
    assert all(len(found) == 1 for found in by_row.values())
    assert len({next(iter(found)) for found in by_row.values()}) == len(by_row)


@given(tables(), st.integers(0, 10), st.integers(1, 10))
def test_slices_have_the_hashes_of_the_whole(
    table: tuple[list[tuple[Any, ...]], list[pa.Array]], first: int, count: int
) -> None:
    """O3: a file's batches may lie anywhere in their buffers."""
    rows, columns = table
    whole = row_hashes(columns, len(rows))
    parts = [column.slice(first, count) for column in columns]
    assert np.array_equal(row_hashes(parts, len(parts[0])), whole[first : first + count])


def test_a_null_is_not_what_stands_for_it() -> None:
    """O3: no value of any type hashes like a null, and no null like another column's."""
    numbers = pa.array([None, -7046029254386353131, 0, 2, 1], pa.int64())
    assert len(set(row_hashes([numbers], len(numbers)).tolist())) == len(numbers)
    crossed = [pa.array([None, "x"]), pa.array(["x", None])]
    assert len(set(row_hashes(crossed, 2).tolist())) == 2
