"""Compiled loops over values of one piece: whole numbers, booleans, UUIDs, texts and bytes.

They answer with counts of damaged and of unfit values, because numba's exceptions carry no facts,
and write a zero where a value is not of the wanted form. No read leaves the buffer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from icestream.kernels import (
    WORD_BYTES,
    Bytes,
    int16,
    int32,
    int64,
    kernel,
    load_word,
    pointer,
    store_word,
)
from icestream.kernels.texts import HEX, copy_span
from icestream.sources.postgres.values.places import Places, Positions, SentAs

UUID_BYTES, _UUID_TEXT_BYTES = 16, 36
_TEXT = int(SentAs.TEXT)
_ZERO, _MINUS, _BACKSLASH = (ord(mark) for mark in "0-\\")
_LOWER_T, _LOWER_F, _LOWER_X = (ord(mark) for mark in "tfx")
_NONE = np.uint64(0)
_INT64_MIN = -(2**63)
# The least number of 64 bits without its last digit, which is 8.
_NEAR_MIN = -(2**63 // 10)


@kernel
def read_fixed(
    content: Bytes, places: Places, wanted: tuple[int, int], values: npt.NDArray[Any]
) -> int:
    """Signed numbers of `wanted[1]` bytes, 2, 4 or 8; returns how many have another size."""
    starts, lengths, forms = places
    form, width = wanted
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        if forms[row] != form:
            values[row] = 0
        elif lengths[row] != width:
            damaged += 1
        elif width == 8:
            values[row] = int64(data, starts[row])
        elif width == 4:
            values[row] = int32(data, starts[row])
        else:
            values[row] = int16(data, starts[row])
    return damaged


@kernel
def read_bools(content: Bytes, places: Places, form: int, values: Bytes) -> int:
    """One byte, or a word that begins with t or f; returns how many are neither."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] == form:
            mark = data[starts[row]] if lengths[row] == 1 else 255
            yes, no = (_LOWER_T, _LOWER_F) if form == _TEXT else (1, 0)
            values[row] = mark == yes
            damaged += mark != yes and mark != no
    return damaged


@kernel
def read_uuids(content: Bytes, places: Places, form: int, values: Bytes) -> int:
    """Sixteen bytes each; returns how many have another size."""
    starts, lengths, forms = places
    data, target = pointer(content), pointer(values)
    damaged = 0
    for row in range(forms.size):
        if forms[row] == form and lengths[row] == UUID_BYTES:
            for word in range(0, UUID_BYTES, WORD_BYTES):
                store_word(target, row * UUID_BYTES + word, load_word(data, starts[row] + word))
        else:
            damaged += forms[row] == form
            for word in range(0, UUID_BYTES, WORD_BYTES):
                store_word(target, row * UUID_BYTES + word, _NONE)
    return damaged


@kernel
def parse_uuids(content: Bytes, places: Places, form: int, values: Bytes) -> int:
    """Thirty-two digits with dashes between; returns how many are not."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        start, fine = starts[row], forms[row] == form and lengths[row] == _UUID_TEXT_BYTES
        damaged += forms[row] == form and not fine
        at = 0
        for place in range(UUID_BYTES):
            values[row, place] = 0
            if not fine:
                continue
            if at == 8 or at == 13 or at == 18 or at == 23:
                at += 1
            both = HEX[data[start + at]] * 16 + HEX[data[start + at + 1]]
            if HEX[data[start + at]] < 0 or HEX[data[start + at + 1]] < 0:
                damaged += 1
                fine = False
            else:
                values[row, place] = both
            at += 2
    return damaged


@kernel
def copy_values(
    content: Bytes, places: Places, wanted: tuple[int, int], offsets: Positions, texts: Bytes
) -> tuple[int, int]:
    """Write values one after the other; returns their size and how many are damaged.

    `wanted[1]` is the size of a prefix that is left out: the version that jsonb has, which is 1.
    """
    starts, lengths, forms = places
    form, prefix = wanted
    data, target = pointer(content), pointer(texts)
    last = content.size - WORD_BYTES
    size = damaged = 0
    for row in range(forms.size):
        offsets[row] = size
        if forms[row] == form:
            start, end = starts[row], starts[row] + lengths[row]
            if prefix and (start == end or data[start] != 1):
                damaged += 1
            else:
                size = copy_span(data, (start + prefix, end, last), target, size)
    offsets[forms.size] = size
    return size, damaged


@kernel
def parse_hex(
    content: Bytes, places: Places, form: int, offsets: Positions, values: Bytes
) -> tuple[int, int]:
    """Bytes written as \\x and digits; returns their size and how many values are damaged."""
    starts, lengths, forms = places
    data = pointer(content)
    size = damaged = 0
    for row in range(forms.size):
        offsets[row] = size
        if forms[row] != form:
            continue
        start, length = starts[row], lengths[row]
        if length < 2 or length % 2 or data[start] != _BACKSLASH or data[start + 1] != _LOWER_X:
            damaged += 1
            continue
        wrong = False
        for at in range(start + 2, start + length, 2):
            high, low = HEX[data[at]], HEX[data[at + 1]]
            wrong |= high < 0 or low < 0
            values[size] = (high * 16 + low) & 255
            size += 1
        damaged += wrong
    offsets[forms.size] = size
    return size, damaged


@kernel
def parse_integers(content: Bytes, places: Places, form: int, values: Positions) -> int:
    """Whole decimal numbers of 64 bits; returns how many are not."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        negative = at < end and data[at] == _MINUS
        at += negative
        # Below zero there is one number more.
        value, fine = 0, at < end and end - at <= 19
        while at < end and fine:
            digit = int(data[at]) - _ZERO
            fine = 0 <= digit <= 9 and (value > _NEAR_MIN or (value == _NEAR_MIN and digit <= 8))
            value = value * 10 - digit
            at += 1
        if not fine or (not negative and value == _INT64_MIN):
            damaged += 1
        else:
            values[row] = value if negative else -value
    return damaged
