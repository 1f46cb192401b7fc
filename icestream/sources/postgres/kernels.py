"""Compiled loops over values of PostgreSQL; `decode` says what they are for.

They answer with counts of damaged and of unfit values, because numba's exceptions carry no facts,
and write a zero where a value is not of the wanted form. No read leaves the buffer.
"""

from enum import IntEnum
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
    part,
    pointer,
    store_word,
)

Positions = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
# What the kernels see of one column: starts, lengths and forms.
Places = tuple[Positions, Lengths, Bytes]

DECIMAL_DIGITS_MAX = 38
# Days from Iceberg's epoch, 1970-01-01, to PostgreSQL's, 2000-01-01.
EPOCH_DAYS = 10_957
DAY_MICROS = 86_400_000_000
# PostgreSQL keeps these for infinity, and so does the table.
DAYS_MIN, DAYS_MAX = -(2**31), 2**31 - 1
MICROS_MIN, MICROS_MAX = -(2**63), 2**63 - 1
UUID_BYTES, UUID_TEXT_BYTES = 16, 36


class Form(IntEnum):
    """How a value was sent; `UNSENT` is a large value that an update did not touch."""

    NULL = 0
    TEXT = 1
    BINARY = 2
    UNSENT = 3


_NULL, _TEXT, _BINARY, _UNSENT = (int(form) for form in Form)
_COPY_DATA = ord("d")
_SIGNATURE = np.frombuffer(b"PGCOPY\n\xff\r\n\0", dtype=np.uint8)
_SIGNATURE_BYTES, _HEADER_BYTES = 11, 19
_MARK_NULL, _MARK_UNSENT, _MARK_TEXT, _MARK_BINARY = (ord(mark) for mark in "nutb")
_ZERO, _NINE, _MINUS, _PLUS, _POINT, _COLON, _SPACE = (ord(mark) for mark in "09-+.: ")
_OPEN, _CLOSE, _BRACKET, _EQUALS, _QUOTE, _BACKSLASH = (ord(mark) for mark in '{}[="\\')
_LOWER_I, _LOWER_T, _LOWER_F, _LOWER_X, _UPPER_B = (ord(mark) for mark in "itfxB")
_UPPER_I, _UPPER_N = (ord(mark) for mark in "IN")
_HEX = np.full(256, -1, dtype=np.int16)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)

# A numeric is a header of four 16-bit numbers and digits to the base 10,000.
_NUMERIC_HEADER_BYTES = 8
_GROUP = 4
_NEGATIVE, _NAN, _INFINITE, _MINUS_INFINITE = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL_TEXTS = np.frombuffer(b"NaN      Infinity -Infinity", dtype=np.uint8).reshape(3, 9)
_SPECIAL_SIZES = np.array([3, 8, 9])
_DISPLAY_SCALE_MASK = 0x3FFF

# Arithmetic on unsigned words: numba makes a float of an unsigned and a signed number.
_HALF, _MASK = np.uint64(32), np.uint64(0xFFFF_FFFF)
_ONE, _NONE = np.uint64(1), np.uint64(0)
_TEN = np.uint64(10)
_POWERS = np.array([1, 10, 100, 1000, 10_000], dtype=np.uint64)
# Ten times this, and a digit, still fit one word.
_ROOMY = np.uint64(10**18)
# A higher word would overflow when it is multiplied by that power of ten.
_HIGHS_MAX = np.uint64(2**63 - 1) // _POWERS
# For each precision the least number that has too many digits, high and low word.
DECIMAL_LIMITS = np.array(
    [divmod(10**digits, 2**64) for digits in range(DECIMAL_DIGITS_MAX + 1)], dtype=np.uint64
)
_LAST_DAY, _LAST_MICROS = divmod(MICROS_MAX, DAY_MICROS)
# The least number of 64 bits without its last digit, which is 8.
_NEAR_MIN = -(2**63 // 10)
_MICROS_SHIFT = EPOCH_DAYS * DAY_MICROS
_DAY_MICROS = DAY_MICROS
# Any year that needs more digits is no date of PostgreSQL.
_YEAR_DIGITS_MAX = 7


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
def shift_timestamps(micros: Positions) -> int:
    """From PostgreSQL's epoch to Iceberg's, in place; returns how many leave the range."""
    unfit = 0
    for row in range(micros.size):
        value = micros[row]
        if value != MICROS_MIN and value != MICROS_MAX:
            if value >= MICROS_MAX - _MICROS_SHIFT:
                unfit += 1
            else:
                micros[row] = value + _MICROS_SHIFT
    return unfit


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
        start, fine = starts[row], forms[row] == form and lengths[row] == UUID_TEXT_BYTES
        damaged += forms[row] == form and not fine
        at = 0
        for place in range(UUID_BYTES):
            values[row, place] = 0
            if not fine:
                continue
            if at == 8 or at == 13 or at == 18 or at == 23:
                at += 1
            both = _HEX[data[start + at]] * 16 + _HEX[data[start + at + 1]]
            if _HEX[data[start + at]] < 0 or _HEX[data[start + at + 1]] < 0:
                damaged += 1
                fine = False
            else:
                values[row, place] = both
            at += 2
    return damaged


@part
def _copy(data: Bytes, span: tuple[int, int, int], target: Bytes, size: int) -> int:
    """Write these bytes as they are; returns the target's new size.

    Whole words, because most texts are one or two. What the last one holds too much is
    overwritten by the next text, and the target has a word to spare for the last text. Words are
    read up to the position `span[2]`.
    """
    position, end, last = span
    while position < end and position <= last:
        store_word(target, size, load_word(data, position))
        position += WORD_BYTES
        size += WORD_BYTES
    while position < end:
        target[size] = data[position]
        position += 1
        size += 1
    return size - (position - end)


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
                size = _copy(data, (start + prefix, end, last), target, size)
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
            high, low = _HEX[data[at]], _HEX[data[at + 1]]
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
        if not fine or (not negative and value == MICROS_MIN):
            damaged += 1
        else:
            values[row] = value if negative else -value
    return damaged


@part
def _times_plus(high: Any, low: Any, factor: Any, more: Any) -> tuple[Any, Any]:
    """Two words times a factor of at most 10,000, and some more."""
    first = (low & _MASK) * factor + more
    second = (low >> _HALF) * factor + (first >> _HALF)
    return high * factor + (second >> _HALF), (second << _HALF) | (first & _MASK)


@part
def _scaled(high: Any, low: Any, places: int) -> tuple[Any, Any, bool]:
    """Two words times a power of ten, and whether they hold it."""
    while places > 0 and (high | low) != _NONE:
        step = min(places, _GROUP)
        if high > _HIGHS_MAX[step]:
            return high, low, False
        high, low = _times_plus(high, low, _POWERS[step], _NONE)
        places -= step
    return high, low, True


@part
def _put_decimal(
    words: Words, row: int, value: tuple[Any, Any], negative: bool, limit: Words
) -> bool:
    """Write two words as a signed number, and say whether it has few enough digits."""
    high, low = value
    if high > limit[0] or (high == limit[0] and low >= limit[1]):
        return False
    if negative:
        low = ~low + _ONE
        high = ~high + (_ONE if low == _NONE else _NONE)
    words[row, 0] = low
    words[row, 1] = high
    return True


@part
def _numeric_size(data: Bytes, start: int, length: int) -> int:
    """How many groups of digits a numeric has, -1 if it is damaged."""
    if length < _NUMERIC_HEADER_BYTES:
        return -1
    groups = int16(data, start)
    if groups < 0 or length != _NUMERIC_HEADER_BYTES + 2 * groups:
        return -1
    sign = int16(data, start + 4) & 0xFFFF
    plain = sign == 0 or sign == _NEGATIVE
    special = sign == _NAN or sign == _INFINITE or sign == _MINUS_INFINITE
    if not plain and not special:
        return -1
    for group in range(groups):
        digits = int16(data, start + _NUMERIC_HEADER_BYTES + 2 * group)
        if digits < 0 or digits > 9999:
            return -1
    return groups


@part
def _numeric_value(data: Bytes, start: int, groups: int, scale: int) -> tuple[Any, Any, bool]:
    """The digits up to the scale as two words, and whether there are no others."""
    high = low = _NONE
    # The power of ten of the group at hand, in units of the last digit that is kept.
    power = _GROUP * int16(data, start + 2) + scale
    for group in range(groups):
        digits = np.uint64(int16(data, start + _NUMERIC_HEADER_BYTES + 2 * group))
        kept = min(_GROUP, max(0, _GROUP + power))
        if high > _HIGHS_MAX[kept]:
            return high, low, False
        if kept < _GROUP:
            cut = _POWERS[_GROUP - kept]
            if digits % cut != _NONE:
                return high, low, False
            digits //= cut
        high, low = _times_plus(high, low, _POWERS[kept], digits)
        power -= _GROUP
    return _scaled(high, low, power + _GROUP)


@kernel
def read_numerics(
    content: Bytes, places: Places, wanted: tuple[int, int], limit: Words, words: Words
) -> tuple[int, int]:
    """Numerics as decimals of the scale `wanted[1]`, below the limit."""
    starts, lengths, forms = places
    form, scale = wanted
    data = pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        words[row, 0] = words[row, 1] = 0
        if forms[row] != form:
            continue
        start = starts[row]
        groups = _numeric_size(data, start, lengths[row])
        if groups < 0:
            damaged += 1
            continue
        sign = int16(data, start + 4) & 0xFFFF
        if sign != 0 and sign != _NEGATIVE:
            unfit += 1
            continue
        high, low, fits = _numeric_value(data, start, groups, scale)
        if not fits or not _put_decimal(words, row, (high, low), sign == _NEGATIVE, limit):
            unfit += 1
    return damaged, unfit


@kernel
def parse_numerics(
    content: Bytes, places: Places, wanted: tuple[int, int], limit: Words, words: Words
) -> tuple[int, int]:
    """Decimal numbers as decimals of the scale `wanted[1]`, below the limit."""
    starts, lengths, forms = places
    form, scale = wanted
    data = pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        words[row, 0] = words[row, 1] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        negative = at < end and data[at] == _MINUS
        at += negative
        if at < end and (data[at] == _UPPER_N or data[at] == _UPPER_I):
            unfit += 1
            continue
        high, low, missing, code = _decimal_value(data, at, end, scale)
        if code == 0:
            high, low, fits = _scaled(high, low, missing)
            if not fits or not _put_decimal(words, row, (high, low), negative, limit):
                unfit += 1
        else:
            damaged += code < 0
            unfit += code > 0
    return damaged, unfit


@part
def _decimal_value(data: Bytes, at: int, end: int, scale: int) -> tuple[Any, Any, int, int]:
    """The digits as two words, how many are missing to the scale, and a code.

    The code is 0, or 1 if there are more digits than are kept, or -1 if it is no number.
    """
    high = low = _NONE
    missing, fraction, code = scale, False, 0
    if at >= end or data[end - 1] == _POINT:
        return high, low, missing, -1
    while at < end:
        byte = data[at]
        at += 1
        if byte == _POINT and not fraction:
            fraction = True
            continue
        if byte < _ZERO or byte > _NINE:
            return high, low, missing, -1
        digit = np.uint64(byte - _ZERO)
        if fraction and missing == 0:
            if digit != _NONE:
                code = 1
        elif high == _NONE and low < _ROOMY:
            low = low * _TEN + digit
            missing -= fraction
        elif high > _HIGHS_MAX[1]:
            code = 1
        else:
            high, low = _times_plus(high, low, _TEN, digit)
            missing -= fraction
    return high, low, missing, code


@kernel
def size_numerics(content: Bytes, places: Places, form: int, sizes: Positions) -> tuple[int, int]:
    """At most how many bytes each numeric takes as text; returns how many are damaged."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        sizes[row] = 0
        if forms[row] == form:
            if _numeric_size(data, starts[row], lengths[row]) < 0:
                damaged += 1
                continue
            weight = int16(data, starts[row] + 2)
            scale = int16(data, starts[row] + 6) & _DISPLAY_SCALE_MASK
            # A sign, the groups before the point, the point, the groups after it.
            sizes[row] = 2 + _GROUP * max(weight + 1, 2) + scale + _GROUP
    return damaged, 0


@kernel
def show_numerics(
    content: Bytes, places: Places, form: int, offsets: Positions, texts: Bytes
) -> int:
    """Write numerics with all their digits, as PostgreSQL does; returns the size of all."""
    starts, _, forms = places
    data, target = pointer(content), pointer(texts)
    size = 0
    for row in range(forms.size):
        offsets[row] = size
        if forms[row] == form:
            sign = int16(data, starts[row] + 4) & 0xFFFF
            if sign != 0 and sign != _NEGATIVE:
                special = 0 if sign == _NAN else 1 if sign == _INFINITE else 2
                for place in range(_SPECIAL_SIZES[special]):
                    target[size] = _SPECIAL_TEXTS[special, place]
                    size += 1
            else:
                if sign == _NEGATIVE:
                    target[size] = _MINUS
                    size += 1
                size = _show_numeric(data, starts[row], target, size)
    offsets[forms.size] = size
    return size


@part
def _show_numeric(data: Bytes, start: int, target: Bytes, size: int) -> int:
    groups, weight = int16(data, start), int16(data, start + 2)
    scale = int16(data, start + 6) & _DISPLAY_SCALE_MASK
    first = size
    for group in range(weight + 1):
        value = _group_at(data, start, groups, group)
        size = _show_group(value, target, size)
        if group == 0:
            # The first group has no zeros in front, but one digit at least.
            zeros = (value < 10) + (value < 100) + (value < 1000)
            for place in range(zeros, _GROUP):
                target[first + place - zeros] = target[first + place]
            size -= zeros
    if weight < 0:
        target[size] = _ZERO
        size += 1
    if scale:
        target[size] = _POINT
        size += 1
        stop = size + scale
        group = weight + 1
        while size < stop:
            size = _show_group(_group_at(data, start, groups, group), target, size)
            group += 1
        size = stop
    return size


@part
def _group_at(data: Bytes, start: int, groups: int, group: int) -> int:
    if group < 0 or group >= groups:
        return 0
    return int16(data, start + _NUMERIC_HEADER_BYTES + 2 * group)


@part
def _show_group(value: int, target: Bytes, size: int) -> int:
    target[size] = _ZERO + value // 1000
    target[size + 1] = _ZERO + value // 100 % 10
    target[size + 2] = _ZERO + value // 10 % 10
    target[size + 3] = _ZERO + value % 10
    return size + _GROUP


@part
def _two_digits(data: Bytes, at: int, end: int) -> int:
    """The number that two digits make, or one so negative that no sum hides it."""
    if at + 2 > end:
        return -1_000_000
    tens, ones = int(data[at]) - _ZERO, int(data[at + 1]) - _ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1_000_000


@part
def _parse_day(data: Bytes, at: int, end: int, before: bool) -> tuple[int, int]:
    """The days since 1970 of a date before or after Christ, and the position after it or -1."""
    year = digits = 0
    while at < end and _ZERO <= data[at] <= _NINE:
        year = year * 10 + (int(data[at]) - _ZERO)
        digits += 1
        at += 1
        if digits > _YEAR_DIGITS_MAX:
            return 0, -1
    if digits < 4 or end - at < 6 or data[at] != _MINUS or data[at + 3] != _MINUS:
        return 0, -1
    month, day = _two_digits(data, at + 1, end), _two_digits(data, at + 4, end)
    if month < 1 or month > 12 or day < 1 or day > 31:
        return 0, -1
    if before:
        year = 1 - year
    # Years that begin in March end with the leap day; 146,097 days make 400 years.
    year -= month <= 2
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + (9 if month <= 2 else -3)) + 2) // 5 + day - 1
    days = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days, at + 6


@part
def _parse_clock(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The microseconds of a time of day, and the position after it or -1."""
    hours, minutes = _two_digits(data, at, end), _two_digits(data, at + 3, end)
    seconds = _two_digits(data, at + 6, end)
    if hours < 0 or minutes < 0 or seconds < 0 or hours > 24 or minutes > 59 or seconds > 60:
        return 0, -1
    if data[at + 2] != _COLON or data[at + 5] != _COLON:
        return 0, -1
    micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
    at += 8
    if at < end and data[at] == _POINT:
        at += 1
        weight = 100_000
        while at < end and _ZERO <= data[at] <= _NINE:
            if weight == 0:
                return 0, -1
            micros += (int(data[at]) - _ZERO) * weight
            weight //= 10
            at += 1
    return micros, at


@part
def _parse_zone(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The microseconds east in +hh, +hh:mm or +hh:mm:ss, and the position after it or -1."""
    if at >= end or (data[at] != _PLUS and data[at] != _MINUS):
        return 0, at
    negative = data[at] == _MINUS
    total, unit, at = 0, 3600, at + 1
    while unit > 0:
        number = _two_digits(data, at, end)
        if number < 0:
            return 0, -1
        total += number * unit
        unit //= 60
        at += 2
        if at >= end or data[at] != _COLON:
            break
        at += 1
    return (-total if negative else total) * 1_000_000, at


@part
def _infinity(data: Bytes, at: int, end: int) -> int:
    """1 for infinity, -1 for -infinity, else 0."""
    if end - at == 8 and data[at] == _LOWER_I:
        return 1
    return -1 if end - at == 9 and data[at] == _MINUS and data[at + 1] == _LOWER_I else 0


@part
def _end_of_moment(data: Bytes, at: int, end: int) -> int:
    """Where the text ends without the era before Christ."""
    return end - 3 if end - at > 3 and data[end - 2] == _UPPER_B else end


@kernel
def parse_dates(content: Bytes, places: Places, form: int, values: Lengths) -> int:
    """ISO dates as days since 1970; returns how many are not."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        endless = _infinity(data, at, end)
        if endless:
            values[row] = DAYS_MAX if endless > 0 else DAYS_MIN
            continue
        stop = _end_of_moment(data, at, end)
        days, at = _parse_day(data, at, stop, stop != end)
        values[row] = days
        damaged += at != stop
    return damaged


@kernel
def parse_times(content: Bytes, places: Places, form: int, values: Positions) -> int:
    """Times of day in microseconds; returns how many are not."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] == form:
            end = starts[row] + lengths[row]
            values[row], at = _parse_clock(data, starts[row], end)
            damaged += at != end
    return damaged


@kernel
def parse_timestamps(
    content: Bytes, places: Places, form: int, values: Positions
) -> tuple[int, int]:
    """ISO timestamps, with or without a zone, as microseconds since 1970."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        endless = _infinity(data, at, end)
        if endless:
            values[row] = MICROS_MAX if endless > 0 else MICROS_MIN
            continue
        stop = _end_of_moment(data, at, end)
        days, at = _parse_day(data, at, stop, stop != end)
        if at < 0 or at >= stop or data[at] != _SPACE:
            damaged += 1
            continue
        micros, at = _parse_clock(data, at + 1, stop)
        if at >= 0:
            shift, at = _parse_zone(data, at, stop)
            micros -= shift
        if at != stop:
            damaged += 1
        elif days > _LAST_DAY or (days == _LAST_DAY and micros >= _LAST_MICROS):
            unfit += 1
        else:
            values[row] = days * _DAY_MICROS + micros
    return damaged, unfit


@kernel
def count_elements(content: Bytes, places: Places, form: int, counts: Positions) -> tuple[int, int]:
    """How many elements each array has; those of several dimensions do not fit."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        counts[row] = 0
        if forms[row] != form:
            continue
        start, length = starts[row], lengths[row]
        dimensions = int32(data, start) if length >= 12 else -1
        if dimensions > 1:
            unfit += 1
        elif dimensions < 0 or length < 12 + 8 * dimensions:
            damaged += 1
        elif dimensions == 1:
            count = int32(data, start + 12)
            # Each element has a length at least, so a damaged count takes no memory.
            if count < 0 or 4 * count > length - 20:
                damaged += 1
            else:
                counts[row] = count
    return damaged, unfit


@kernel
def find_elements(content: Bytes, places: Places, form: int, elements: Places) -> int:
    """Note the elements of all arrays; returns how many arrays are damaged."""
    starts, lengths, forms = places
    element_starts, element_lengths, element_forms = elements
    data = pointer(content)
    damaged = element = 0
    for row in range(forms.size):
        if forms[row] != form or int32(data, starts[row]) == 0:
            continue
        at, end = starts[row] + 20, starts[row] + lengths[row]
        for _ in range(int32(data, starts[row] + 12)):
            size = int32(data, at) if at + 4 <= end else -2
            at += 4
            if size < -1 or size > end - at:
                return damaged + 1
            element_starts[element] = at
            element_lengths[element] = max(size, 0)
            element_forms[element] = _BINARY if size >= 0 else _NULL
            at += max(size, 0)
            element += 1
        damaged += at != end
    return damaged


@part
def _enter(data: Bytes, at: int, end: int) -> int:
    """The position after the opening brace, behind lower bounds if there are any, or -1."""
    if at < end and data[at] == _BRACKET:
        while at < end and data[at] != _EQUALS:
            at += 1
        at += 1
    if at >= end or data[at] != _OPEN or data[end - 1] != _CLOSE or end - at < 2:
        return -1
    return at + 1


@part
def _skip_element(data: Bytes, at: int, end: int, delimiter: int) -> int:
    """The position after an element, or -1; `end` is that of the closing brace."""
    if at < end and data[at] == _QUOTE:
        at += 1
        while at < end and data[at] != _QUOTE:
            at += 2 if data[at] == _BACKSLASH else 1
        at += 1
        return at if at <= end and (at == end or data[at] == delimiter) else -1
    first = at
    while at < end and data[at] != delimiter:
        byte = data[at]
        if byte == _QUOTE or byte == _BACKSLASH or byte == _OPEN or byte == _CLOSE:
            return -1
        at += 1
    return at if at > first else -1


@kernel
def count_written(
    content: Bytes, places: Places, wanted: tuple[int, int], counts: Positions
) -> tuple[int, int]:
    """How many elements each array has; those of several dimensions do not fit."""
    starts, lengths, forms = places
    form, delimiter = wanted
    data = pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        counts[row] = 0
        if forms[row] != form:
            continue
        end = starts[row] + lengths[row]
        at = _enter(data, starts[row], end)
        end -= 1
        if at < 0:
            damaged += 1
        elif at < end and data[at] == _OPEN:
            unfit += 1
        else:
            count = 0
            while at < end:
                at = _skip_element(data, at, end, delimiter)
                # A delimiter at the very end leaves one element too few.
                if at < 0 or at == end - 1:
                    at = -1
                    break
                at += 1
                count += 1
            damaged += at < 0
            counts[row] = count
    return damaged, unfit


@part
def _is_null(data: Bytes, at: int, size: int) -> bool:
    """Whether a word that is not quoted means null; or-ing 32 makes letters lower."""
    return (
        size == 4
        and data[at] | 32 == 110
        and data[at + 1] | 32 == 117
        and data[at + 2] | 32 == 108
        and data[at + 3] | 32 == 108
    )


@kernel
def unescape_elements(
    content: Bytes, places: Places, wanted: tuple[int, int], elements: Places, texts: Bytes
) -> None:
    """Write the elements of arrays that `count_written` has checked one after the other."""
    starts, lengths, forms = places
    form, delimiter = wanted
    element_starts, element_lengths, element_forms = elements
    data, target = pointer(content), pointer(texts)
    size = element = 0
    for row in range(forms.size):
        if forms[row] != form:
            continue
        end = starts[row] + lengths[row]
        at = _enter(data, starts[row], end)
        end -= 1
        while at < end:
            stop = _skip_element(data, at, end, delimiter)
            element_starts[element] = size
            element_forms[element] = _TEXT
            if data[at] == _QUOTE:
                at += 1
                while at < stop - 1:
                    at += data[at] == _BACKSLASH
                    target[size] = data[at]
                    size += 1
                    at += 1
            elif _is_null(data, at, stop - at):
                element_forms[element] = _NULL
            else:
                while at < stop:
                    target[size] = data[at]
                    size += 1
                    at += 1
            element_lengths[element] = size - element_starts[element]
            element += 1
            at = stop + 1
