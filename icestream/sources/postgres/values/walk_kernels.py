"""Compiled loops that find where values lie, in answers to COPY and in pgoutput messages.

They answer with counts of damaged and of unfit values, because numba's exceptions carry no facts,
and write a zero where a value is not of the wanted form. No read leaves the buffer.
"""

import numpy as np

from icestream.kernels import Bytes, int16, int32, kernel, part, pointer
from icestream.sources.postgres.values.places import Places, Positions, SentAs

_NULL, _TEXT, _BINARY, _UNSENT = (int(form) for form in SentAs)
_COPY_DATA = ord("d")
_SIGNATURE = np.frombuffer(b"PGCOPY\n\xff\r\n\0", dtype=np.uint8)
_SIGNATURE_BYTES, _HEADER_BYTES = 11, 19
_MARK_NULL, _MARK_UNSENT, _MARK_TEXT, _MARK_BINARY = (ord(mark) for mark in "nutb")


@kernel
def count_messages(raw: Bytes) -> tuple[int, int]:
    """How many whole CopyData messages come first and where they end; -1 if one is damaged."""
    data = pointer(raw)
    position = count = 0
    while position + 5 <= raw.size and data[position] == _COPY_DATA:
        size = int32(data, position + 1)
        if size < 4:
            return -1, position
        if size > raw.size - position - 1:
            break
        position += 1 + size
        count += 1
    return count, position


@part
def _skip_header(data: Bytes, at: int, stop: int) -> int:
    """The position after the header of COPY, if it is here; no row has as many columns."""
    if stop - at < _HEADER_BYTES:
        return at
    for place in range(_SIGNATURE_BYTES):
        if data[at + place] != _SIGNATURE[place]:
            return at
    extension = int32(data, at + _HEADER_BYTES - 4)
    # Beyond the message if the length is damaged, which the caller finds out.
    return at + _HEADER_BYTES + (extension if extension >= 0 else stop)


@kernel
def walk_copy(raw: Bytes, end: int, form_of: Bytes, places: Places) -> int:
    """Note the values of all rows up to `end`; returns the number of rows, -1 if one is damaged."""
    starts, lengths, forms = places
    data, columns = pointer(raw), form_of.size
    position = row = 0
    while position < end:
        stop = position + 1 + int32(data, position + 1)
        at = _skip_header(data, position + 5, stop)
        position = stop
        if at == stop:
            continue
        if at + 2 > stop:
            return -1
        count = int16(data, at)
        at += 2
        if count == -1 and at == stop:
            continue
        if count != columns:
            return -1
        for column in range(columns):
            if at + 4 > stop:
                return -1
            size = int32(data, at)
            at += 4
            if size < -1 or size > stop - at:
                return -1
            starts[column, row] = at
            lengths[column, row] = max(size, 0)
            forms[column, row] = _NULL if size < 0 else form_of[column]
            at += max(size, 0)
        if at != stop:
            return -1
        row += 1
    return row


@kernel
def walk_tuples(content: Bytes, wanted: Positions, places: Places) -> bool:
    """Note the values of the tuples at these places; returns whether none is damaged."""
    starts, lengths, forms = places
    data, end, columns = pointer(content), content.size, starts.shape[0]
    for row in range(wanted.size):
        at, count = wanted[row], 0
        if at != -1:
            if at < 0 or at + 2 > end:
                return False
            count = int16(data, at)
            at += 2
            if count < 0 or count > columns:
                return False
        for column in range(count):
            if at >= end:
                return False
            mark = data[at]
            at += 1
            size = 0
            form = _UNSENT if mark == _MARK_UNSENT else _NULL
            if mark == _MARK_TEXT or mark == _MARK_BINARY:
                form = _TEXT if mark == _MARK_TEXT else _BINARY
                if at + 4 > end:
                    return False
                size = int32(data, at)
                at += 4
                if size < 0 or size > end - at:
                    return False
            elif mark != _MARK_NULL and mark != _MARK_UNSENT:
                return False
            starts[column, row] = at
            lengths[column, row] = size
            forms[column, row] = form
            at += size
        for column in range(count, columns):
            starts[column, row] = 0
            lengths[column, row] = 0
            forms[column, row] = _NULL
    return True
