"""The compiled loop that reads Protobuf messages by tables; `protobuf` makes them and says why.

Every message of the schema has a row in one table, every field one in another. Messages inside
messages lie on a stack that is as deep as the schema; a step reads at least one byte, so a record
ends after as many steps as it has bytes.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from icestream.formats.columns import ABSENT, Slots, Words
from icestream.formats.wire import Fault, restore, varint, zigzag
from icestream.kernels import Bytes, kernel, load_word, part, pointer
from icestream.kernels.texts import is_utf8


class Code(IntEnum):
    """How a value is written; those up to `FIXED_WORD` are one word, the others runs of bytes."""

    INT32 = 0
    WORD = 1
    UINT32 = 2
    SINT32 = 3
    SINT64 = 4
    BOOLEAN = 5
    CLOSED_ENUM = 6
    SFIXED32 = 7
    FIXED32 = 8
    FIXED_WORD = 9
    TEXT = 10
    BYTES = 11
    SEALED = 12
    MESSAGE = 13


_INT32, _WORD, _UINT32, _SINT32, _SINT64, _BOOLEAN, _CLOSED_ENUM = range(7)
_SFIXED32, _FIXED32, _FIXED_WORD, _TEXT, _BYTES, _SEALED, _MESSAGE = range(7, 14)
# The columns of the table of fields. A field has the slot and domain of its values, the domain of
# its message, a slot that says how often (and the next one, from where on) or whether it is there,
# the message or the enum behind it, and the slots that a message in a oneof has.
NUMBER, CODE, WIRE, SLOT, DOMAIN, PARENT, COUNT, PRESENT, WORD, INSIDE, FROM, TO = range(12)
FIELD_SIZE = 12
# The columns of the table of messages: where its fields begin and end, and the slot of the seconds
# if it is a timestamp.
FIRST, LAST, SECONDS = range(3)
MESSAGE_SIZE = 3
DEPTH_MAX = 64
# What is kept for each level: where it ends, its field, the next field, and the group's number.
_STACKS = 4
# Fields, messages, and the numbers of closed enums, each with how many they are in front.
Tables = tuple[Words, Words, Words, Words]

_VARINT, _EIGHT_BYTES, _RUN, _GROUP, _GROUP_END, _FOUR_BYTES = range(6)
_NUMBER_MAX = 2**29 - 1
_SECONDS_MIN, _SECONDS_MAX = -62_135_596_800, 253_402_300_799
_NANOS_MAX = 999_999_999
_CUT, _NOT_TEXT, _TAG = int(Fault.CUT), int(Fault.TEXT), int(Fault.TAG)
_RANGE = int(Fault.RANGE)
_NANOS, _TWICE = int(Fault.NANOS), int(Fault.TWICE)
_LOW_HALF = np.uint64(0xFFFF_FFFF)
_ONE, _NONE, _THREE, _SEVEN = np.uint64(1), np.uint64(0), np.uint64(3), np.uint64(7)
_HALF = np.int64(32)
# What a record says that asks for room, beyond all faults.
_ROOM = 1000
# A value of a closed enum that its schema does not have is as if it were not there.
_UNKNOWN_VALUE = -1


@part
def _size(data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """How many bytes follow, and where; the position is -1 if these are not there."""
    size, at = varint(data, at, end)
    if at < 0 or size > np.uint64(end - at):
        return 0, -1
    return np.int64(size), at


@part
def _beyond(data: Bytes, at: int, end: int, wire: int) -> int:
    """The position after a value that is no group, -1 if it is not whole."""
    size = 0
    if wire == _VARINT:
        _, at = varint(data, at, end)
    elif wire == _RUN:
        size, at = _size(data, at, end)
    elif wire == _EIGHT_BYTES:
        size = 8
    elif wire == _FOUR_BYTES:
        size = 4
    else:
        return -1
    return at + size if at >= 0 and size <= end - at else -1


@part
def _tag(data: Bytes, at: int, end: int) -> tuple[Any, Any, int]:
    """The number and the form of a field, and the position after them; -1 if there is none."""
    tag, at = varint(data, at, end)
    number = np.int64(tag >> _THREE)
    if number < 1 or number > _NUMBER_MAX:
        at = -1
    return number, np.int64(tag & _SEVEN), at


@part
def _skip(data: Bytes, at: int, end: int, wire: int, groups: Words) -> int:
    """The position after a field that the schema does not have; `groups` begins with its number."""
    if wire != _GROUP:
        return _beyond(data, at, end, wire)
    depth = 1
    while depth > 0:
        number, wire, at = _tag(data, at, end)
        if at < 0:
            return -1
        if wire == _GROUP:
            if depth == DEPTH_MAX:
                return -1
            groups[depth] = number
            depth += 1
        elif wire == _GROUP_END:
            depth -= 1
            if groups[depth] != number:
                return -1
        else:
            at = _beyond(data, at, end, wire)
            if at < 0:
                return -1
    return at


@part
def _found(fields: Words, first: int, last: int, guess: int, number: int) -> int:
    """The place of a field in the table, -1 if its message has none; fields come in order."""
    for place in range(guess, min(guess + 2, last)):
        if fields[place * FIELD_SIZE + NUMBER] == number:
            return place
    while first < last:
        middle = (first + last) // 2
        if fields[middle * FIELD_SIZE + NUMBER] < number:
            first = middle + 1
        else:
            last = middle
    return first


@part
def _number(code: int, value: Any) -> Any:
    """The word of a value that is written as a varint."""
    if code == _INT32 or code == _CLOSED_ENUM:
        return (np.int64(value) << _HALF) >> _HALF
    if code == _UINT32:
        return np.int64(value & _LOW_HALF)
    if code == _BOOLEAN:
        return np.int64(value != _NONE)
    if code == _SINT32:
        value &= _LOW_HALF
    if code == _SINT32 or code == _SINT64:
        return np.int64((value >> _ONE) ^ (_NONE - (value & _ONE)))
    return np.int64(value)


@part
def _scalar(code: int, data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """A value of one word, and the position after it, -1 if it is not whole."""
    if code < _SFIXED32:
        value, at = varint(data, at, end)
        return _number(code, value), at
    size = 8 if code == _FIXED_WORD else 4
    if end - at < size:
        return 0, -1
    if code == _FIXED_WORD:
        return np.int64(load_word(data, at)), at + size
    word = np.int64(0)
    for place in range(4):
        word |= np.int64(data[at + place]) << np.int64(8 * place)
    return ((word << _HALF) >> _HALF if code == _SFIXED32 else word), at + size


@part
def _named(enums: Words, start: int, word: int) -> bool:
    """Whether a closed enum has a value of this number."""
    for place in range(start + 1, start + 1 + enums[start]):
        if enums[place] == word:
            return True
    return False


@part
def _claim(fields: Words, field: int, slots: Slots) -> int:
    """Where a value of a field goes, which is thereby there; -1 if room for it is lacking."""
    words, starts, room, entries = slots
    domain, here = fields[field + DOMAIN], entries[fields[field + PARENT]]
    count, present = fields[field + COUNT], fields[field + PRESENT]
    if count >= 0:
        if entries[domain] >= room[domain]:
            return -1
        if words[starts[count] + here] == 0:
            words[starts[count + 1] + here] = entries[domain]
        words[starts[count] + here] += 1
    elif present >= 0:
        words[starts[present] + here] = fields[field + WORD]
    return int(entries[domain])


@part
def _scalars(
    tables: Tables, field: int, place: tuple[Bytes, int, int], packed: bool, slots: Slots
) -> tuple[int, int]:
    """Read one value, or all of a packed run; the position after it, and 0 or a fault."""
    fields, _, enums, _ = tables
    data, at, end = place
    words, starts, _, entries = slots
    if packed:
        size, at = _size(data, at, end)
        if at < 0:
            return 0, _CUT
        end = at + size
    code, domain = fields[field + CODE], fields[field + DOMAIN]
    while at < end:
        word, at = _scalar(code, data, at, end)
        if at < 0:
            return 0, _CUT
        if code != _CLOSED_ENUM or _named(enums, fields[field + INSIDE], word):
            index = _claim(fields, field, slots)
            if index < 0:
                return 0, _ROOM + int(domain)
            words[starts[fields[field + SLOT]] + index] = word
            if fields[field + COUNT] >= 0:
                entries[domain] += 1
        elif fields[field + COUNT] < 0 and fields[field + PRESENT] < 0:
            # The value of a map: without it, its key would be there alone.
            return 0, _RANGE
        if not packed:
            return at, 0
    return at, 0 if packed else _CUT


@part
def _run(fields: Words, field: int, place: tuple[Bytes, int, int], slots: Slots) -> tuple[int, int]:
    """Read text or bytes; the position after it, and 0 or a fault."""
    data, at, end = place
    words, starts, _, entries = slots
    size, at = _size(data, at, end)
    if at < 0:
        return 0, _CUT
    if fields[field + CODE] == _TEXT and not is_utf8(data, at, at + size):
        return 0, _NOT_TEXT
    slot, domain, present = fields[field + SLOT], fields[field + DOMAIN], fields[field + PRESENT]
    if fields[field + CODE] == _SEALED and fields[field + COUNT] < 0 and present >= 0:
        if words[starts[present] + entries[fields[field + PARENT]]] == fields[field + WORD]:
            return 0, _TWICE
    index = _claim(fields, field, slots)
    if index < 0:
        return 0, _ROOM + int(domain)
    words[starts[slot] + index], words[starts[slot + 1] + index] = at, size
    if fields[field + COUNT] >= 0:
        entries[domain] += 1
    return at + size, 0


@part
def _displace(tables: Tables, field: int, slots: Slots) -> None:
    """Forget a message of a oneof if another member was set after it."""
    fields, _, _, domain_of = tables
    words, starts, _, entries = slots
    present, domain = fields[field + PRESENT], fields[field + DOMAIN]
    if present >= 0 and fields[field + COUNT] < 0:
        set_to = words[starts[present] + entries[domain]]
        if set_to != 0 and set_to != fields[field + WORD]:
            for slot in range(fields[field + FROM], fields[field + TO]):
                if domain_of[slot] == domain:
                    words[starts[slot] + entries[domain]] = 0


@part
def _exact(messages: Words, message: int, domain: int, slots: Slots) -> bool:
    """Whether a message that ends here is no timestamp, or one that microseconds keep."""
    words, starts, _, entries = slots
    slot = messages[message + SECONDS]
    if slot < 0:
        return True
    seconds = words[starts[slot] + entries[domain]]
    nanos = words[starts[slot + 1] + entries[domain]]
    return bool(
        seconds >= _SECONDS_MIN
        and seconds <= _SECONDS_MAX
        and nanos >= 0
        and nanos <= _NANOS_MAX
        and nanos % 1000 == 0
    )


@part
def _record(tables: Tables, place: tuple[Bytes, int, int], slots: Slots, stacks: Tables) -> int:
    """Read one message; a fault, 0 if there is none, or `_ROOM` and the domain that needs it."""
    fields, messages = tables[0], tables[1]
    data, at, end = place
    entries = slots[3]
    ends, entered, guesses, groups = stacks
    depth = message = 0
    ends[0], entered[0], guesses[0] = end, -1, messages[FIRST]
    while True:
        if at == ends[depth]:
            field = entered[depth]
            if field < 0:
                return 0
            if not _exact(messages, message, fields[field + DOMAIN], slots):
                return _NANOS
            if fields[field + COUNT] >= 0:
                entries[fields[field + DOMAIN]] += 1
            depth -= 1
            above = entered[depth]
            message = fields[above + INSIDE] * MESSAGE_SIZE if above >= 0 else 0
            continue
        number, wire, at = _tag(data, at, ends[depth])
        if at < 0:
            return _TAG
        first, last = messages[message + FIRST], messages[message + LAST]
        found = _found(fields, first, last, guesses[depth], number)
        field = found * FIELD_SIZE
        known = found < last and fields[field + NUMBER] == number
        code = fields[field + CODE] if known else _MESSAGE
        packed = wire == _RUN and code <= _FIXED_WORD and known and fields[field + COUNT] >= 0
        if not known or (wire != fields[field + WIRE] and not packed):
            groups[0] = number
            at = _skip(data, at, ends[depth], wire, groups)
            if at < 0:
                return _CUT
            continue
        guesses[depth] = found
        fault = 0
        if code <= _FIXED_WORD:
            at, fault = _scalars(tables, field, (data, at, ends[depth]), packed, slots)
        elif code != _MESSAGE:
            at, fault = _run(fields, field, (data, at, ends[depth]), slots)
        else:
            size, at = _size(data, at, ends[depth])
            if at < 0:
                return _CUT
            _displace(tables, field, slots)
            if _claim(fields, field, slots) < 0:
                return _ROOM + int(fields[field + DOMAIN])
            depth += 1
            message = fields[field + INSIDE] * MESSAGE_SIZE
            ends[depth], entered[depth], guesses[depth] = (
                at + size,
                field,
                messages[message + FIRST],
            )
        if fault != 0:
            return fault


def walk(
    tables: Tables,
    content: Bytes,
    places: tuple[Words, Words],
    slots: Slots,
    faults: Bytes,
) -> int:
    """Read records from the first unread one on; the domain that needs room, or -1 at the end.

    Records are skipped where `faults` says that they are absent; for others it is written.
    """
    stacks = np.zeros((_STACKS, DEPTH_MAX + 2), np.int64)
    return _walk(tables, content, places, slots, faults, (np.zeros_like(slots[3]), stacks))


@kernel
def _walk(
    tables: Tables,
    content: Bytes,
    places: tuple[Words, Words],
    slots: Slots,
    faults: Bytes,
    scratch: tuple[Words, Words],
) -> int:
    """As `walk`; `scratch` has room for one number per domain, and for the stacks."""
    fields, messages, enums, domain_of = tables
    bare = pointer(fields), pointer(messages), pointer(enums), pointer(domain_of)
    starts, ends = places
    words, bases, room, entries = slots
    inside = pointer(words), pointer(bases), pointer(room), pointer(entries)
    data = pointer(content)
    saved, depths = scratch
    stacks = pointer(depths[0]), pointer(depths[1]), pointer(depths[2]), pointer(depths[3])
    while entries[0] < starts.size:
        row = entries[0]
        if faults[row] != ABSENT:
            saved[:] = entries
            fault = _record(bare, (data, starts[row], ends[row]), inside, stacks)
            if fault != 0:
                # Values that are absent are what was never written.
                for slot in range(domain_of.size):
                    base, domain = bases[slot], domain_of[slot]
                    stop = min(entries[domain] + 1, room[domain])
                    words[base + saved[domain] : base + stop] = 0
                restore(entries, saved)
            if fault >= _ROOM:
                return int(fault - _ROOM)
            faults[row] = fault
        entries[0] += 1
    return -1


@kernel
def read_indexes(content: Bytes, places: tuple[Words, Words], indexes: Words) -> None:
    """Read the list in front of each message that says which of its file it is.

    `indexes` gets where the message begins, -1 if the list is damaged, then how many they are, and
    the indexes themselves.
    """
    starts, ends = places
    data, most = pointer(content), indexes.shape[1] - 2
    for row in range(starts.size):
        count, at = zigzag(data, starts[row], ends[row])
        if at < 0 or count < 0 or count > most:
            indexes[row, 0] = -1
            continue
        # The commonest list, of the first message alone, is written as an empty one.
        indexes[row, 1] = max(count, 1)
        for place in range(count):
            index, at = zigzag(data, at, ends[row])
            if at < 0 or index < 0:
                at = -1
                break
            indexes[row, 2 + place] = index
        indexes[row, 0] = at
