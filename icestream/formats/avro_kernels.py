"""The compiled loop that reads Avro records by a program; `avro` makes programs and says why.

A program is a table of steps, each a code and its arguments. It has no recursion: every list of
the schema is one loop, whose state lies in `loops` at the list's domain. A record ends at a fault,
at the program's last step, or asks for room; each step back is an item of a list, and a list has
no more items than the record has bytes or `EMPTY_ITEMS_MAX`.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from icestream.formats.columns import ABSENT, Slots, Words
from icestream.formats.wire import (
    Fault,
    restore,
    zigzag,
)
from icestream.kernels import Bytes, kernel, load_word, part, pointer
from icestream.kernels.decimals import big_endian, within
from icestream.kernels.texts import is_utf8

# Items without bytes (of type null, or of records without fields) could be claimed without end.
EMPTY_ITEMS_MAX = 256


class Code(IntEnum):
    """What a step does; `Step` names its arguments."""

    END = 0
    NUMBER = 1
    BOOLEAN = 2
    FLOAT = 3
    DOUBLE = 4
    BYTES = 5
    TEXT = 6
    FIXED = 7
    DECIMAL = 8
    CHOICE = 9
    JUMP = 10
    LIST = 11
    BLOCK = 12
    NEXT = 13


_END, _NUMBER, _BOOLEAN, _FLOAT, _DOUBLE, _BYTES, _TEXT, _FIXED, _DECIMAL = range(9)
_CHOICE, _JUMP, _LIST, _BLOCK, _NEXT = range(9, 14)
# The arguments of a step. Numbers have bounds and a factor; fixed values a width and decimals a
# precision; choices a place in the jumps and a number of branches; lists a domain of their items,
# where they go on, and the least bytes of an item.
CODE, SLOT, DOMAIN, FIRST, SECOND, THIRD = range(6)
STEP_SIZE = 6
# Steps one after the other, and where the branches of choices begin.
Program = tuple[Words, Words]

_CUT, _TRAILING, _RANGE = int(Fault.CUT), int(Fault.TRAILING), int(Fault.RANGE)
_NOT_TEXT, _BRANCH, _COUNT, _DIGITS = (
    int(Fault.TEXT),
    int(Fault.BRANCH),
    int(Fault.COUNT),
    int(Fault.DIGITS),
)
_FLOAT_BYTES, _DOUBLE_BYTES = 4, 8
_COUNT_MIN = -(2**62)
# What a record says that asks for room, beyond all faults.
_ROOM = 1000


@part
def _block(data: Bytes, at: int, end: int, item_bytes: int, so_far: int) -> tuple[int, int]:
    """How many items come next and where they begin; the position is a negative fault if none."""
    count, at = zigzag(data, at, end)
    if at < 0:
        return 0, -_CUT
    if count < 0:
        size, at = zigzag(data, at, end)
        if at < 0 or size < 0 or size > end - at:
            return 0, -_CUT
        if count < _COUNT_MIN:
            return 0, -_COUNT
        count = -count
    most = (end - at) // item_bytes if item_bytes > 0 else EMPTY_ITEMS_MAX - so_far
    return (count, at) if count <= most else (0, -_COUNT)


@part
def _run(steps: Words, step: int, data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Where a run of bytes begins and how long it is; its length is a negative fault if damaged."""
    size = steps[step + FIRST]
    if size < 0:
        size, at = zigzag(data, at, end)
        if at < 0:
            return 0, -_CUT
    if size < 0 or size > end - at:
        return 0, -_CUT
    if steps[step + CODE] == _TEXT and not is_utf8(data, at, at + size):
        return 0, -_NOT_TEXT
    return at, size


@part
def _scalar(steps: Words, step: int, data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """A value of one word, and the position after it; a negative fault if it is damaged."""
    code = steps[step + CODE]
    if code == _NUMBER:
        value, at = zigzag(data, at, end)
        if at < 0:
            return 0, -_CUT
        if value < steps[step + FIRST] or value > steps[step + SECOND]:
            return 0, -_RANGE
        return value * steps[step + THIRD], at
    size = 1 if code == _BOOLEAN else _FLOAT_BYTES if code == _FLOAT else _DOUBLE_BYTES
    if end - at < size:
        return 0, -_CUT
    if code == _DOUBLE:
        return np.int64(load_word(data, at)), at + size
    value = np.int64(0)
    for place in range(size):
        value |= np.int64(data[at + place]) << np.int64(8 * place)
    if code == _BOOLEAN and value > 1:
        return 0, -_RANGE
    return value, at + size


@part
def _record(program: Program, place: tuple[Bytes, int, int], slots: Slots, loops: Words) -> int:
    """Read one record; a fault, 0 if there is none, or `_ROOM` and the domain that needs it."""
    steps, jumps = program
    data, at, end = place
    words, starts, room, entries = slots
    number = 0
    while True:
        step = number * STEP_SIZE
        code, slot = steps[step + CODE], steps[step + SLOT]
        here = starts[slot] + entries[steps[step + DOMAIN]]
        number += 1
        if code <= _DOUBLE and code != _END:
            value, at = _scalar(steps, step, data, at, end)
            if at < 0:
                return -at
            words[here] = value
        elif code <= _DECIMAL and code != _END:
            start, size = _run(steps, step, data, at, end)
            if size < 0:
                return -size
            at = start + size
            second = starts[slot + 1] + entries[steps[step + DOMAIN]]
            words[here], words[second] = start, size
            if code == _DECIMAL:
                low, high, fits = big_endian(data, start, at)
                if not fits or not within(low, high, steps[step + SECOND]):
                    return _DIGITS
                words[here], words[second] = np.int64(low), np.int64(high)
        elif code == _CHOICE:
            branch, at = zigzag(data, at, end)
            if at < 0:
                return _CUT
            if branch < 0 or branch >= steps[step + SECOND]:
                return _BRANCH
            words[here] = branch + 1
            number = jumps[steps[step + FIRST] + branch]
        elif code == _JUMP:
            number = steps[step + FIRST]
        elif code == _LIST:
            words[here] = 0
            loops[steps[step + FIRST]] = 0
        elif code == _BLOCK:
            domain = steps[step + FIRST]
            if loops[domain] == 0:
                loops[domain], at = _block(data, at, end, steps[step + THIRD], words[here])
                if at < 0:
                    return -at
                if loops[domain] == 0:
                    number = steps[step + SECOND]
                    continue
            if entries[domain] >= room[domain]:
                return _ROOM + int(domain)
            loops[domain] -= 1
        elif code == _NEXT:
            entries[steps[step + FIRST]] += 1
            words[here] += 1
            number = steps[step + SECOND]
        else:
            return 0 if at == end else _TRAILING


def walk(
    program: Program,
    content: Bytes,
    places: tuple[Words, Words],
    slots: Slots,
    faults: Bytes,
) -> int:
    """Read records from the first unread one on; the domain that needs room, or -1 at the end.

    Records are skipped where `faults` says that they are absent; for others it is written.
    """
    scratch = np.zeros_like(slots[3]), np.zeros_like(slots[3])
    return _walk(program, content, places, slots, faults, scratch)


@kernel
def _walk(
    program: Program,
    content: Bytes,
    places: tuple[Words, Words],
    slots: Slots,
    faults: Bytes,
    scratch: tuple[Words, Words],
) -> int:
    """As `walk`; `scratch` has room for two numbers per domain."""
    bare = pointer(program[0]), pointer(program[1])
    starts, ends = places
    words, bases, room, entries = slots
    inside = pointer(words), pointer(bases), pointer(room), pointer(entries)
    data = pointer(content)
    loops, saved = scratch
    while entries[0] < starts.size:
        row = entries[0]
        if faults[row] != ABSENT:
            saved[:] = entries
            fault = _record(bare, (data, starts[row], ends[row]), inside, pointer(loops))
            if fault != 0:
                restore(entries, saved)
            if fault >= _ROOM:
                return fault - _ROOM
            faults[row] = fault
        entries[0] += 1
    return -1
