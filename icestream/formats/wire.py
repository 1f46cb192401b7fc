"""Compiled parts that read values of binary formats; kernels of Avro and Protobuf are made of them.

Each is given where the value begins and where the record ends, and answers -1 as the position after
the value when it does not lie before that end. No read leaves the record.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from icestream.formats.columns import ABSENT, Words
from icestream.kernels import Bytes, part
from icestream.kernels.decimals import DECIMAL_DIGITS_MAX


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
_SEVEN, _LAST_SHIFT = np.uint64(7), np.uint64(63)
_NONE, _ONE, _PAYLOAD, _MORE = np.uint64(0), np.uint64(1), np.uint64(127), np.uint64(128)


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
def restore(entries: Words, saved: Words) -> None:
    """Forget the items of a record that cannot be read."""
    for domain in range(1, entries.size):
        entries[domain] = saved[domain]
