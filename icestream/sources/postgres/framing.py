"""The stream's bytes walked by compiled code: messages, transactions, keys, tuples.

Works on whole buffers of the replication protocol (CopyData of XLogData and keep-alives) with
pgoutput's messages inside. Every length is checked against the message it lies in.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from icestream.kernels import Bytes, int32, int64, kernel, part, pointer

Numbers = npt.NDArray[np.int64]
# Python's numbers and numpy's are one to compiled code, but not to a type checker.
Number = Any
# Keys are dealt out to this many shares by their hash.
SHARES = 16
# The header of XLogData, and the least bytes of messages: a keep-alive, a begin, a commit, and a
# row with its kind, its relation, a mark and the number of its columns.
_HEADER_BYTES, _KEEP_ALIVE_BYTES, _BEGIN_BYTES, _COMMIT_BYTES, _ROW_BYTES = 25, 18, 21, 26, 8
# Oids and transaction ids use all 32 bits.
_UNSIGNED = 0xFFFF_FFFF


class Stop(IntEnum):
    """Why the walk ended."""

    NEED_MORE = 0
    MESSAGE = 1  # A message that only the caller understands is next.
    FULL = 2  # The buffer has no room for the next row.
    ENDED = 3  # What follows is no longer part of the stream.
    DAMAGED = 4


class State(IntEnum):
    """What the walk carries from call to call: the places of an array.

    `COMMIT_LSN` and `XID` belong to the transaction that is open (`INSIDE`), `END_LSN` and `TIME`
    to the last whole one; `ROWS_WHOLE` of the `ROWS` in the buffer belong to whole ones. `TORN`
    says that rows of the open one were written out already. `LAST_LSN` and `LAST_XID` are the last
    whole one's commit record and id. `FIRST_TIME` is the time of the first one with rows since the
    caller has set it to 0.

    Rows of transactions before `FLOOR` are passed over: they are durable. The caller is shown the
    beginning of each such transaction, and of every one while `AWAITED` is not 0.
    """

    COMMIT_LSN = 0
    ROWS = 1
    ROWS_WHOLE = 2
    END_LSN = 3
    SENT_LSN = 4
    REPLY = 5
    XID = 6
    INSIDE = 7
    TIME = 8
    BYTES = 9
    TRANSACTIONS = 10
    TORN = 11
    LAST_LSN = 12
    LAST_XID = 13
    FLOOR = 14
    AWAITED = 15
    FIRST_TIME = 16


# Compiled code knows numbers, not names.
_COMMIT_LSN, _ROWS, _ROWS_WHOLE, _END_LSN, _SENT_LSN, _REPLY, *_others = map(int, State)
_XID, _INSIDE, _TIME, _BYTES, _TRANSACTIONS, _TORN, *_latest = _others
_LAST_LSN, _LAST_XID, _FLOOR, _AWAITED, _FIRST_TIME = _latest
_NEED_MORE, _MESSAGE, _FULL, _ENDED, _DAMAGED = map(int, Stop)
# What is known of each table, by its place in the sorted oids: its number (-1: of no interest),
# and where its key's columns begin in a list of them all.
Tables = tuple[Numbers, Numbers, Numbers, Numbers]
# Rows (table, kind, commit LSN, start, length, share of the key, share of the old key or -1),
# their bytes, and the transactions seen.
Buffer = tuple[npt.NDArray[np.int64], Bytes, Numbers]


@part
def _tuple_end(raw: Bytes, place: Number, end: int) -> Number:
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
            length = int32(pointer(raw), place)
            if length < 0:
                return -1
            place += 4 + length
    return place if place <= end else -1


@part
def _cell(raw: Bytes, place: int, column: int) -> tuple[Number, Number, Number]:
    """Form, start and length of one column of a tuple that is known to be whole."""
    columns = (np.int64(raw[place]) << 8) | np.int64(raw[place + 1])
    place += 2
    if column >= columns:
        return np.int64(ord("n")), np.int64(0), np.int64(0)
    for _ in range(column):
        form = raw[place]
        place += 1
        if form == ord("t") or form == ord("b"):
            place += 4 + int32(pointer(raw), place)
    form = np.int64(raw[place])
    if form == ord("t") or form == ord("b"):
        return form, np.int64(place + 5), int32(pointer(raw), place + 1)
    return form, np.int64(0), np.int64(0)


@part
def _key_hash(raw: Bytes, place: int, other: int, key: Numbers) -> Any:
    """A hash of the key's bytes; a value that was not sent is taken from the other tuple."""
    hashed = np.uint64(14695981039346656037)
    for column in key:
        form, start, length = _cell(raw, place, column)
        if form == ord("u") and other >= 0:
            form, start, length = _cell(raw, other, column)
        for offset in range(length):
            hashed = (hashed ^ np.uint64(raw[start + offset])) * np.uint64(1099511628211)
        hashed = (hashed ^ np.uint64(length + 257)) * np.uint64(1099511628211)
    return hashed ^ (hashed >> np.uint64(29))


@part
def _key_moved(raw: Bytes, old: int, new: int, key: Numbers) -> bool:
    """Whether two tuples differ in their key."""
    for column in key:
        new_form, new_start, new_length = _cell(raw, new, column)
        if new_form == ord("u"):
            continue
        _, old_start, old_length = _cell(raw, old, column)
        if old_length != new_length:
            return True
        for offset in range(new_length):
            if raw[old_start + offset] != raw[new_start + offset]:
                return True
    return False


@part
def _tuples_of(raw: Bytes, place: int, end: int) -> tuple[Number, Number, bool]:
    """Where the old and the new tuple of a row message begin (-1: none), and whether it is whole.

    The message begins at `place` with its kind and the relation.
    """
    if end - place < _ROW_BYTES:
        return np.int64(-1), np.int64(-1), False
    kind = raw[place]
    place += 5
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


@part
def _take_row(
    raw: Bytes, span: tuple[int, int], state: Numbers, tables: Tables, buffer: Buffer
) -> int:
    """Take one row message into the buffer; returns why it could not be taken."""
    at, end = span
    if end - at < _ROW_BYTES:
        return _DAMAGED
    oids, numbers, key_edges, keys = tables
    rows, content, _ = buffer
    oid = int32(pointer(raw), at + 1) & _UNSIGNED
    found = np.searchsorted(oids, oid)
    if found >= oids.size or oids[found] != oid:
        return _MESSAGE
    number = numbers[found]
    if number < 0 or state[_COMMIT_LSN] < state[_FLOOR]:
        return _NEED_MORE
    row, used, length = state[_ROWS], state[_BYTES], end - at
    if row >= rows.shape[1] or used + length > content.size:
        return _FULL
    old, new, whole = _tuples_of(raw, at, end)
    if not whole:
        return _DAMAGED
    key = keys[key_edges[found] : key_edges[found + 1]]
    hashed = _key_hash(raw, new if new >= 0 else old, old, key)
    rows[0, row] = number
    rows[1, row] = raw[at]
    rows[2, row] = state[_COMMIT_LSN]
    rows[3, row] = used
    rows[4, row] = length
    rows[5, row] = np.int64(hashed % np.uint64(SHARES))
    rows[6, row] = -1
    if new >= 0 and old >= 0 and _key_moved(raw, old, new, key):
        moved = _key_hash(raw, old, -1, key)
        rows[6, row] = np.int64(moved % np.uint64(SHARES))
    content[used : used + length] = raw[at:end]
    state[_BYTES] = used + length
    state[_ROWS] = row + 1
    return _NEED_MORE


@kernel
def walk(raw: Bytes, state: Numbers, tables: Tables, buffer: Buffer) -> tuple[int, int]:
    """Take whole messages from the front of `raw` into the buffer: rows, their bytes, and the
    transactions seen.

    `state` is read and written: see `State`. Returns (consumed, why it ended). Consumed may be a
    logical message that has yet to come in full: nothing of it is wanted.
    """
    place = 0
    xids = buffer[2]
    while True:
        if place + 5 > raw.size:
            return place, _NEED_MORE
        if raw[place] != ord("d"):
            return place, _ENDED
        size = int32(pointer(raw), place + 1)
        if size < 5:
            return place, _DAMAGED
        end = place + 1 + size
        body = place + 5
        at = body + _HEADER_BYTES
        if end > raw.size:
            # Nobody reads a logical message: the rest of it need not be waited for.
            if at < raw.size and raw[body] == ord("w") and raw[at] == ord("M"):
                return end, _NEED_MORE
            return place, _NEED_MORE
        if raw[body] == ord("k"):
            if end - body < _KEEP_ALIVE_BYTES:
                return place, _DAMAGED
            state[_SENT_LSN] = max(state[_SENT_LSN], int64(pointer(raw), body + 1))
            state[_REPLY] |= raw[body + 17]
            place = end
            continue
        if raw[body] != ord("w") or at >= end:
            return place, _DAMAGED
        kind = raw[at]
        if kind == ord("B"):
            if end - at < _BEGIN_BYTES:
                return place, _DAMAGED
            if state[_AWAITED] or int64(pointer(raw), at + 1) < state[_FLOOR]:
                return place, _MESSAGE
            state[_COMMIT_LSN] = int64(pointer(raw), at + 1)
            state[_XID] = int32(pointer(raw), at + 17) & _UNSIGNED
            state[_INSIDE] = 1
        elif kind == ord("C"):
            if end - at < _COMMIT_BYTES:
                return place, _DAMAGED
            state[_END_LSN] = int64(pointer(raw), at + 10)
            state[_TIME] = int64(pointer(raw), at + 18)
            state[_LAST_LSN] = state[_COMMIT_LSN]
            state[_LAST_XID] = state[_XID]
            if state[_FIRST_TIME] == 0 and state[_ROWS] > state[_ROWS_WHOLE]:
                state[_FIRST_TIME] = state[_TIME]
            state[_ROWS_WHOLE] = state[_ROWS]
            state[_INSIDE] = 0
            xids[state[_TRANSACTIONS] % xids.size] = state[_XID]
            state[_TRANSACTIONS] += 1
            state[_TORN] = 0
        elif kind == ord("I") or kind == ord("U") or kind == ord("D"):
            refused = _take_row(raw, (at, end), state, tables, buffer)
            if refused != _NEED_MORE:
                return place, refused
        elif kind == ord("M"):
            pass  # Only the transaction around a message counts.
        else:
            return place, _MESSAGE
        place = end


@kernel
def gather(content: Bytes, starts: Numbers, lengths: Numbers, out: Bytes) -> None:
    """Copy pieces one after the other."""
    place = 0
    for number in range(starts.size):
        length = lengths[number]
        out[place : place + length] = content[starts[number] : starts[number] + length]
        place += length


@kernel
def row_tuples(content: Bytes, starts: Numbers, ends: Numbers) -> tuple[Numbers, Numbers, int]:
    """The places of each message's old and new tuple, and of the first damaged message or -1."""
    old = np.empty(starts.size, dtype=np.int64)
    new = np.empty(starts.size, dtype=np.int64)
    for number in range(starts.size):
        old[number], new[number], whole = _tuples_of(content, starts[number], ends[number])
        if not whole:
            return old, new, number
    return old, new, -1
