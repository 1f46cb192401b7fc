"""PostgreSQL's stream: whatever bytes come, and wherever they are cut, the walk stays in them.

In checked mode (`test_checked_kernels`) a read or a write outside of its array is an error.
"""

import itertools
import struct
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icestream.sources.postgres.framing import State, Stop, gather, row_tuples, walk
from tests.examples import examples
from tests.property.test_hostile_bytes import (
    BEGIN,
    COMMIT,
    DELETE,
    INSERT,
    KEEP_ALIVE,
    UPDATE,
    copy_data,
    tuple_of,
    wal_data,
)

MANY = examples(300)
ROWS, CONTENT, XIDS = 64, 4096, 4
numbers = partial(np.array, dtype=np.int64)

CELLS = st.lists(st.binary(max_size=12), max_size=4).map(lambda cells: tuple_of(*cells))
UNSENT = st.sampled_from([b"\0\2nu", b"\0\1u", b"\0\0", b"\0\2t\0\0\0\1xn"])
TUPLES = CELLS | UNSENT
RELATIONS = st.sampled_from([99, 100, 7, 2**32 - 1]).map(lambda oid: struct.pack("!I", oid))
OLD = st.just(b"") | st.builds(lambda mark, row: mark + row, st.sampled_from([b"K", b"O"]), TUPLES)
ROW_MESSAGES = st.builds(
    lambda kind, oid, old, new: kind + oid + old + (b"" if kind == b"D" and old else b"N" + new),
    st.sampled_from([b"I", b"U", b"D"]),
    RELATIONS,
    OLD,
    TUPLES,
)
PLAIN = st.sampled_from([BEGIN, INSERT, UPDATE, DELETE, COMMIT, b"M" + bytes(14), b"R" + bytes(9)])
GARBAGE = st.binary(max_size=40)
MESSAGES = st.one_of(
    (PLAIN | ROW_MESSAGES | GARBAGE).map(wal_data), st.just(copy_data(KEEP_ALIVE)), GARBAGE
)
STREAMS = st.lists(MESSAGES, max_size=12).map(b"".join)
# Two tables, the second of no interest, and the key columns of each; the last is beyond any row.
TABLES = (
    numbers([99, 100, 2**32 - 1]),
    numbers([0, -1, 1]),
    numbers([0, 2, 2, 3]),
    numbers([0, 1, 9]),
)


def buffer_of(rows: int = ROWS, content: int = CONTENT):
    return np.zeros((7, rows), np.int64), np.zeros(content, np.uint8), np.zeros(XIDS, np.int64)


def walked(pieces: list[bytes], buffer) -> tuple[int, int, np.ndarray]:
    """How far a walk comes that is given a stream piece by piece, why it stops, and its state."""
    state, pending, used, stop = np.zeros(len(State), np.int64), b"", 0, Stop.NEED_MORE
    for piece in pieces:
        pending += piece
        if used > len(pending):
            continue
        taken, stop = walk(np.frombuffer(pending, np.uint8)[used:], state, TABLES, buffer)
        used += taken
        if stop != Stop.NEED_MORE:
            break
    return used, Stop(stop), state


@MANY
@given(STREAMS, st.lists(st.integers(0, 600), max_size=4))
def test_a_stream_says_the_same_however_it_is_cut(stream, cuts):
    """K3, P4: a message is taken whole or not at all, and none is taken twice."""
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(edges)]
    whole, cut = buffer_of(), buffer_of()
    used, stop, state = walked([stream], whole)
    used_cut, stop_cut, state_cut = walked(pieces, cut)
    assert (used, stop, state.tolist()) == (used_cut, stop_cut, state_cut.tolist())
    for one, other in zip(whole, cut, strict=True):
        assert np.array_equal(one, other)


@MANY
@given(STREAMS)
def test_rows_of_any_stream_lie_inside_it(stream):
    """K3: what was taken is a message of the stream, and its tuples lie inside of it."""
    buffer = buffer_of()
    _, _, state = walked([stream], buffer)
    rows, content, _ = buffer
    count, used = state[State.ROWS], state[State.BYTES]
    assert state[State.ROWS_WHOLE] <= count <= ROWS and used <= CONTENT
    starts, lengths = rows[3, :count].copy(), rows[4, :count].copy()
    assert np.array_equal(starts, np.cumsum(lengths) - lengths) and lengths.sum() == used
    assert all(content[s : s + n].tobytes() in stream for s, n in zip(starts, lengths, strict=True))
    old, new, damaged = row_tuples(content, starts, starts + lengths)
    assert damaged == -1
    assert np.all(old < used) and np.all(new < used)
    out = np.zeros(used, np.uint8)
    gather(content, starts, lengths, out)
    assert np.array_equal(out, content[:used])


@MANY
@given(st.binary(max_size=80), st.integers(0, 80), st.integers(0, 80))
def test_tuples_are_looked_for_in_their_message_alone(content, one, other):
    """K3: any bytes at all, and any part of them, as a row's message."""
    start, end = sorted(min(edge, len(content)) for edge in (one, other))
    _, new, damaged = row_tuples(np.frombuffer(content, np.uint8), numbers([start]), numbers([end]))
    if damaged < 0:
        assert new[0] < end


@pytest.mark.parametrize(("rows", "content"), [(1, CONTENT), (ROWS, 40), (0, 0)])
def test_a_full_buffer_takes_no_further_row(rows, content):
    """E14: the walk stops before a row that the buffer has no room for."""
    stream = b"".join(wal_data(message) for message in (BEGIN, INSERT, UPDATE, DELETE, COMMIT))
    used, stop, state = walked([stream], buffer_of(rows, content))
    assert stop == Stop.FULL and used < len(stream)
    assert state[State.ROWS] <= rows and state[State.BYTES] <= content
