"""Compiled loops over numerics: to decimals of 128 bits, and to PostgreSQL's own text form.

They answer with counts of damaged and of unfit values, because numba's exceptions carry no facts,
and write a zero where a value is not of the wanted form. No read leaves the buffer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from icestream.kernels import Bytes, int16, kernel, part, pointer
from icestream.kernels.decimals import negated
from icestream.sources.postgres.values.places import Places, Positions

Words = npt.NDArray[np.uint64]

_ZERO, _NINE, _MINUS, _POINT, _UPPER_I, _UPPER_N = (ord(mark) for mark in "09-.IN")

# A numeric is a header of four 16-bit numbers and digits to the base 10,000.
_NUMERIC_HEADER_BYTES = 8
_GROUP = 4
_NEGATIVE, _NAN, _INFINITE, _MINUS_INFINITE = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL_TEXTS = np.frombuffer(b"NaN      Infinity -Infinity", dtype=np.uint8).reshape(3, 9)
_SPECIAL_SIZES = np.array([3, 8, 9])
_DISPLAY_SCALE_MASK = 0x3FFF

# Arithmetic on unsigned words: numba makes a float of an unsigned and a signed number.
_HALF, _MASK = np.uint64(32), np.uint64(0xFFFF_FFFF)
_NONE = np.uint64(0)
_TEN = np.uint64(10)
_POWERS = np.array([1, 10, 100, 1000, 10_000], dtype=np.uint64)
# Ten times this, and a digit, still fit one word.
_ROOMY = np.uint64(10**18)
# A higher word would overflow when it is multiplied by that power of ten.
_HIGHS_MAX = np.uint64(2**63 - 1) // _POWERS


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
        low, high = negated(low, high)
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
