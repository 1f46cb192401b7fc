"""The stream's bytes walked by compiled code: messages, transactions, keys, tuples.

Works on whole buffers of the replication protocol (CopyData of XLogData and keep-alives) with
pgoutput's messages inside. Every length is checked against the message it lies in.
"""

from enum import IntEnum

import numpy as np
from numba import njit

# Keys are dealt out to this many shares by their hash.
SHARES = 16


class Stop(IntEnum):
    """Why the walk ended."""

    NEED_MORE = 0
    MESSAGE = 1  # A message that only the caller understands is next.
    FULL = 2  # The buffer has no room for the next row.
    ENDED = 3  # What follows is no longer part of the stream.
    DAMAGED = 4


class State:
    """What the walk carries from call to call; names for the places of an array."""

    COMMIT_LSN, ROWS, ROWS_WHOLE, END_LSN, SENT_LSN, REPLY, XID, INSIDE, TIME, BYTES = range(10)
    # Transactions seen, and whether rows of the one that is open were written out already.
    TRANSACTIONS, TORN = 10, 11


@njit(cache=True, nogil=True)
def _int32(raw, place):  # type: ignore[no-untyped-def]
    return (
        (np.int64(raw[place]) << 24)
        | (np.int64(raw[place + 1]) << 16)
        | (np.int64(raw[place + 2]) << 8)
        | np.int64(raw[place + 3])
    )


@njit(cache=True, nogil=True)
def _int64(raw, place):  # type: ignore[no-untyped-def]
    return (_int32(raw, place) << 32) | _int32(raw, place + 4)


@njit(cache=True, nogil=True)
def _tuple_end(raw, place, end):  # type: ignore[no-untyped-def]
    """Where the tuple that begins at `place` ends; -1 when it runs past the message."""
    if place + 2 > end:
        return -1
    columns = (np.int64(raw[place]) << 8) | np.int64(raw[place + 1])
    place += 2
    for _ in range(columns):
        if place >= end:
            return -1
        form = raw[place]
        place += 1
        if form == ord("t") or form == ord("b"):
            if place + 4 > end:
                return -1
            place += 4 + _int32(raw, place)
    return place if place <= end else -1


@njit(cache=True, nogil=True)
def _cell(raw, place, column):  # type: ignore[no-untyped-def]
    """Form, start and length of one column of a tuple that is known to be whole."""
    columns = (np.int64(raw[place]) << 8) | np.int64(raw[place + 1])
    place += 2
    if column >= columns:
        return np.int64(ord("n")), np.int64(0), np.int64(0)
    for _ in range(column):
        form = raw[place]
        place += 1
        if form == ord("t") or form == ord("b"):
            place += 4 + _int32(raw, place)
    form = np.int64(raw[place])
    if form == ord("t") or form == ord("b"):
        return form, np.int64(place + 5), _int32(raw, place + 1)
    return form, np.int64(0), np.int64(0)


@njit(cache=True, nogil=True)
def _key_hash(raw, place, other, keys, first, last):  # type: ignore[no-untyped-def]
    """A hash of the key's bytes; a value that was not sent is taken from the other tuple."""
    hashed = np.uint64(14695981039346656037)
    for number in range(first, last):
        form, start, length = _cell(raw, place, keys[number])
        if form == ord("u") and other >= 0:
            form, start, length = _cell(raw, other, keys[number])
        for offset in range(length):
            hashed = (hashed ^ np.uint64(raw[start + offset])) * np.uint64(1099511628211)
        hashed = (hashed ^ np.uint64(length + 257)) * np.uint64(1099511628211)
    return hashed ^ (hashed >> np.uint64(29))


@njit(cache=True, nogil=True)
def _key_moved(raw, old, new, keys, first, last):  # type: ignore[no-untyped-def]
    """Whether two tuples differ in their key."""
    for number in range(first, last):
        new_form, new_start, new_length = _cell(raw, new, keys[number])
        if new_form == ord("u"):
            continue
        _, old_start, old_length = _cell(raw, old, keys[number])
        if old_length != new_length:
            return True
        for offset in range(new_length):
            if raw[old_start + offset] != raw[new_start + offset]:
                return True
    return False


@njit(cache=True, nogil=True)
def tuples_of(raw, place, end):  # type: ignore[no-untyped-def]
    """Where the old and the new tuple of a row message begin (-1: none), and whether it is whole.

    The message begins at `place` with its kind and the relation.
    """
    kind = raw[place]
    place += 5
    if place >= end:
        return np.int64(-1), np.int64(-1), False
    mark = raw[place]
    old, new = np.int64(-1), np.int64(-1)
    if mark == ord("K") or mark == ord("O"):
        old = np.int64(place + 1)
        place = _tuple_end(raw, old, end)
        if place < 0:
            return old, new, False
        if kind == ord("D"):
            return old, new, place == end
        if place >= end:
            return old, new, False
    new = np.int64(place + 1)
    return old, new, _tuple_end(raw, new, end) == end


@njit(cache=True, nogil=True)
def _take_row(raw, at, end, state, tables, buffer):  # type: ignore[no-untyped-def]
    """Take one row message into the buffer; returns why it could not be taken, 0 when it was."""
    relations, slots, key_edges, keys = tables
    rows, content, _ = buffer
    oid = _int32(raw, at + 1)
    found = np.searchsorted(relations, oid)
    if found >= relations.size or relations[found] != oid:
        return 1
    slot = slots[found]
    if slot < 0:
        return 0
    row, used, length = state[1], state[9], end - at
    if row >= rows.shape[1] or used + length > content.size:
        return 2
    old, new, whole = tuples_of(raw, at, end)
    if not whole:
        return 4
    first, last = key_edges[found], key_edges[found + 1]
    hashed = _key_hash(raw, new if new >= 0 else old, old, keys, first, last)
    rows[0, row] = slot
    rows[1, row] = raw[at]
    rows[2, row] = state[0]
    rows[3, row] = used
    rows[4, row] = length
    rows[5, row] = np.int64(hashed % np.uint64(SHARES))
    rows[6, row] = -1
    if new >= 0 and old >= 0 and _key_moved(raw, old, new, keys, first, last):
        moved = _key_hash(raw, old, -1, keys, first, last)
        rows[6, row] = np.int64(moved % np.uint64(SHARES))
    content[used : used + length] = raw[at:end]
    state[9] = used + length
    state[1] = row + 1
    return 0


@njit(cache=True, nogil=True)
def walk(raw, state, tables, buffer):  # type: ignore[no-untyped-def]
    """Take whole messages from the front of `raw` into the buffer: rows, their bytes, and the
    transactions seen.

    `state` is read and written: see `State`. Returns (consumed, why it ended).
    """
    place = 0
    xids = buffer[2]
    while True:
        if place + 5 > raw.size:
            return place, 0
        if raw[place] != ord("d"):
            return place, 3
        end = place + 1 + _int32(raw, place + 1)
        if end > raw.size:
            return place, 0
        body = place + 5
        at = body + 25
        kind = raw[at] if raw[body] == ord("w") else raw[body]
        if kind == ord("k"):
            state[4] = max(state[4], _int64(raw, body + 1))
            state[5] |= raw[body + 17]
        elif kind == ord("B"):
            state[0] = _int64(raw, at + 1)
            state[6] = _int32(raw, at + 17)
            state[7] = 1
        elif kind == ord("C"):
            state[3] = _int64(raw, at + 10)
            state[8] = _int64(raw, at + 18)
            state[2] = state[1]
            state[7] = 0
            xids[state[10] % xids.size] = state[6]
            state[10] += 1
            state[11] = 0
        elif kind == ord("I") or kind == ord("U") or kind == ord("D"):
            refused = _take_row(raw, at, end, state, tables, buffer)
            if refused:
                return place, refused
        else:
            return place, 1
        place = end


@njit(cache=True, nogil=True)
def gather(content, starts, lengths, out):  # type: ignore[no-untyped-def]
    """Copy pieces behind each other."""
    place = 0
    for number in range(starts.size):
        length = lengths[number]
        out[place : place + length] = content[starts[number] : starts[number] + length]
        place += length


@njit(cache=True, nogil=True)
def row_tuples(content, starts, ends):  # type: ignore[no-untyped-def]
    """The places of each message's old and new tuple, and of the first damaged message or -1."""
    old = np.empty(starts.size, dtype=np.int64)
    new = np.empty(starts.size, dtype=np.int64)
    for number in range(starts.size):
        old[number], new[number], whole = tuples_of(content, starts[number], ends[number])
        if not whole:
            return old, new, number
    return old, new, -1
