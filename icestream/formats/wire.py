"""Compiled parts that read values of binary formats; kernels of Avro and Protobuf are made of them.

Each is given where the value begins and where the record ends, and answers -1 as the position after
the value when it does not lie before that end. No read leaves the record.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from icestream.formats.columns import ABSENT, DECIMAL_DIGITS_MAX, Words
from icestream.kernels import WORD_BYTES, Bytes, load_word, part


class Fault(IntEnum):
    """Why a record cannot be read; `REASONS` says it to people."""

    NONE = 0
    CUT = 1
    TRAILING = 2
    RANGE = 3
    TEXT = 4
    BRANCH = 5
    COUNT = 6
    DIGITS = 7
    TAG = 8
    NANOS = 9
    TWICE = 10


REASONS = {
    Fault.CUT: "it ends inside a value",
    Fault.TRAILING: "it has bytes beyond its end",
    Fault.RANGE: "a number is outside the range of its type, or no symbol of its enum",
    Fault.TEXT: "a text is not UTF-8",
    Fault.BRANCH: "a union has a branch that its schema does not have",
    Fault.COUNT: "a list or map claims more items than the record has room for",
    Fault.DIGITS: f"a decimal has more digits than its schema says, or than {DECIMAL_DIGITS_MAX}",
    Fault.TAG: "a field has a number or form that its format does not have",
    Fault.NANOS: "a timestamp has nanoseconds, which its column does not keep, or is out of range",
    Fault.TWICE: "a message that is kept as bytes occurs twice where one belongs",
}

# Arithmetic on unsigned words: numba makes a float of an unsigned and a signed number.
_SEVEN, _EIGHT, _LAST_SHIFT = np.uint64(7), np.uint64(8), np.uint64(63)
_NONE, _ONE, _PAYLOAD, _MORE = np.uint64(0), np.uint64(1), np.uint64(127), np.uint64(128)
_HIGH_BITS = np.uint64(0x8080_8080_8080_8080)
_TOP = np.uint64(56)
# For each precision the least number that has too many digits, high and low word.
_DECIMAL_LIMITS = np.array(
    [divmod(10**digits, 2**64) for digits in range(DECIMAL_DIGITS_MAX + 1)], dtype=np.uint64
)


def rejections(faults: Bytes, what: str) -> Mapping[int, str]:
    """The reasons of faults by the place of their records."""
    places = np.flatnonzero((faults != Fault.NONE) & (faults != ABSENT))
    return {int(place): f"{what} is damaged: {REASONS[Fault(faults[place])]}" for place in places}


@part
def varint(data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """A number of seven bits a byte as an unsigned word, and the position after it."""
    value, shift = _NONE, _NONE
    while at < end:
        byte = np.uint64(data[at])
        at += 1
        value |= (byte & _PAYLOAD) << shift
        if byte < _MORE:
            # The tenth byte has room for one bit.
            return value, (-1 if shift == _LAST_SHIFT and byte > _ONE else at)
        if shift == _LAST_SHIFT:
            break
        shift += _SEVEN
    return value, -1


@part
def zigzag(data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """A signed number whose lowest bit is its sign, and the position after it."""
    value, at = varint(data, at, end)
    return np.int64((value >> _ONE) ^ (_NONE - (value & _ONE))), at


@part
def _follows(data: Bytes, at: int, end: int, count: int) -> bool:
    """Whether so many continuation bytes are here."""
    if end - at < count:
        return False
    for place in range(count):
        if data[at + place] & 0xC0 != 0x80:
            return False
    return True


@part
def _well_formed(data: Bytes, at: int, end: int) -> bool:
    """Whether bytes are UTF-8: nothing overlong, no surrogate, nothing beyond the last plane."""
    while at < end:
        byte = data[at]
        if byte < 0x80:
            at += 1
            continue
        size = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
        if byte < 0xC2 or byte > 0xF4 or not _follows(data, at + 1, end, size):
            return False
        second = data[at + 1]
        if (byte == 0xE0 and second < 0xA0) or (byte == 0xED and second > 0x9F):
            return False
        if (byte == 0xF0 and second < 0x90) or (byte == 0xF4 and second > 0x8F):
            return False
        at += 1 + size
    return True


@part
def utf8(data: Bytes, at: int, end: int) -> bool:
    """Whether bytes are UTF-8; plain ASCII is seen eight bytes at a time."""
    while end - at >= WORD_BYTES:
        if load_word(data, at) & _HIGH_BITS:
            return _well_formed(data, at, end)
        at += WORD_BYTES
    while at < end:
        if data[at] & 0x80:
            return _well_formed(data, at, end)
        at += 1
    return True


@part
def decimal(data: Bytes, at: int, end: int) -> tuple[Any, Any, Any]:
    """A big-endian number in two's complement as low and high word, and whether these hold it."""
    sign = _NONE - _ONE if end > at and data[at] & 0x80 else _NONE
    low = high = sign
    fits = True
    while at < end:
        # What is shifted out at the top must say no more than the sign.
        fits = fits and (high >> _TOP) == (sign >> _TOP)
        high = (high << _EIGHT) | (low >> _TOP)
        low = (low << _EIGHT) | np.uint64(data[at])
        at += 1
    return low, high, fits and (high >> _LAST_SHIFT) == (sign & _ONE)


@part
def within(low: Any, high: Any, precision: int) -> Any:
    """Whether a number of two words has at most so many digits."""
    if high >> _LAST_SHIFT:
        low = ~low + _ONE
        high = ~high + (_ONE if low == _NONE else _NONE)
    limit_high, limit_low = _DECIMAL_LIMITS[precision, 0], _DECIMAL_LIMITS[precision, 1]
    return high < limit_high or (high == limit_high and low < limit_low)


@part
def restore(entries: Words, saved: Words) -> None:
    """Forget the items of a record that cannot be read."""
    for domain in range(1, entries.size):
        entries[domain] = saved[domain]
