"""Bytes and exact numbers as Kafka Connect writes them into JSON, for whole columns at once.

Bytes are base64. A decimal is the bytes of its unscaled value, two's complement and big-endian; its
scale is told apart from it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from icestream.kernels import Bytes, kernel, pointer
from icestream.kernels.arrays import Mask, Positions, texts_of, validity
from icestream.kernels.decimals import DECIMAL_DIGITS_MAX, big_endian, within

# More digits after the point, or zeros before it, are no number that a database has.
SCALE_MAX = 16_383
SCALE_MIN = -1_000
# A few bytes and a large scale make a long text: so much may the decimals of one column become,
# which is less than positions of 32 bits can tell.
TEXT_BYTES_MAX = 256 * 1024 * 1024

Words = npt.NDArray[np.uint64]

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SIX_BITS = np.full(256, -1, dtype=np.int16)
_SIX_BITS[np.frombuffer(_ALPHABET, dtype=np.uint8)] = np.arange(64)
_PAD, _MINUS, _ZERO, _POINT = (ord(mark) for mark in "=-0.")


def decoded_bytes(text: pa.StringArray) -> pa.BinaryArray:
    """The bytes that each text stands for; ValueError when one is not base64 with its padding."""
    data, offsets, valid = texts_of(text)
    target = np.empty(data.size // 4 * 3 + 3, dtype=np.uint8)
    ends = np.zeros(len(text) + 1, dtype=np.int32)
    if not _decode_bytes(data, offsets, valid, target, ends):
        raise ValueError("a text is not base64")
    return _array(pa.binary(), ends, target, valid)


def decimals(unscaled: pa.BinaryArray, scale: int) -> pa.Decimal128Array:
    """Unscaled numbers as decimals of that scale; ValueError when one has more than 38 digits."""
    words, wide, valid = _whole_numbers(unscaled)
    if wide.any():
        raise ValueError("a decimal has too many digits")
    kind = pa.decimal128(DECIMAL_DIGITS_MAX, scale)
    return _decimal_array(words, valid, kind)


def decimal_texts(unscaled: pa.BinaryArray, scales: npt.NDArray[np.int32]) -> pa.StringArray:
    """Unscaled numbers and their scales in plain notation, all digits of them.

    ValueError when a scale is impossible, or the texts become larger than `TEXT_BYTES_MAX`.
    """
    if np.any((scales > SCALE_MAX) | (scales < SCALE_MIN)):
        raise ValueError("a decimal has an impossible scale")
    words, wide, valid = _whole_numbers(unscaled)
    digits = _decimal_array(words, valid, pa.decimal128(DECIMAL_DIGITS_MAX, 0)).cast(pa.string())
    if wide.any():
        # Rare: no more digits than fit a decimal are what databases have nearly always.
        places = np.flatnonzero(wide)
        numbers = [
            str(int.from_bytes(each, signed=True))
            for each in unscaled.take(pa.array(places)).to_pylist()
        ]
        digits = pa.array(_replaced(digits.to_pylist(), places.tolist(), numbers), pa.string())
    return _with_points(digits, scales)


def _replaced(texts: list[Any], places: list[int], others: list[str]) -> list[Any]:
    for place, other in zip(places, others, strict=True):
        texts[place] = other
    return texts


def _whole_numbers(unscaled: pa.BinaryArray) -> tuple[Words, Mask, Mask]:
    """Numbers as two words each, low one first; which do not fit; which are there."""
    data, offsets, valid = texts_of(unscaled)
    words = np.zeros((len(valid), 2), dtype=np.uint64)
    wide = np.zeros(len(valid), dtype=np.bool_)
    if not _read_numbers(data, offsets, valid, words, wide):
        raise ValueError("a decimal has no bytes")
    return words, wide, valid


def _decimal_array(words: Words, valid: Mask, kind: pa.DataType) -> pa.Decimal128Array:
    return pa.Array.from_buffers(kind, len(valid), [validity(valid), pa.py_buffer(words)])


def _with_points(digits: pa.StringArray, scales: npt.NDArray[np.int32]) -> pa.StringArray:
    data, offsets, valid = texts_of(digits)
    room = data.size + int(np.abs(scales[valid].astype(np.int64)).sum()) + 2 * len(digits)
    if room > TEXT_BYTES_MAX:
        raise ValueError("decimals have too many digits together")
    target = np.empty(room, dtype=np.uint8)
    ends = np.zeros(len(digits) + 1, dtype=np.int32)
    _write_points(data, offsets, valid, scales, target, ends)
    return _array(pa.string(), ends, target, valid)


def _array(kind: pa.DataType, ends: Positions, target: Bytes, valid: Mask) -> pa.Array:
    content = pa.py_buffer(target[: ends[-1]])
    return pa.Array.from_buffers(kind, len(valid), [validity(valid), pa.py_buffer(ends), content])


@kernel
def _decode_bytes(
    array: Bytes, offsets: Positions, valid: Mask, target: Bytes, ends: Positions
) -> bool:
    """Write the bytes of all texts; false when one is not base64."""
    data = pointer(array)
    size = 0
    for row in range(valid.size):
        ends[row] = size
        if not valid[row]:
            continue
        start, end = int(offsets[row]), int(offsets[row + 1])
        if (end - start) % 4:
            return False
        pads = 0
        while pads < 2 and end > start and data[end - 1] == _PAD:
            pads += 1
            end -= 1
        bits = count = 0
        for place in range(start, end):
            six = int(_SIX_BITS[data[place]])
            if six < 0:
                return False
            bits = (bits << 6 | six) & 0xFFFFFF
            count += 6
            if count >= 8:
                count -= 8
                target[size] = (bits >> count) & 0xFF
                size += 1
        # What the padding cuts off is zero in the one right spelling.
        if bits & ((1 << count) - 1) or (pads == 0 and count) or (pads and count == 0):
            return False
    ends[valid.size] = size
    return True


@kernel
def _read_numbers(array: Bytes, offsets: Positions, valid: Mask, words: Words, wide: Mask) -> bool:
    """Read big-endian numbers, and mark those with too many digits; false when one is empty."""
    data = pointer(array)
    for row in range(valid.size):
        start, end = int(offsets[row]), int(offsets[row + 1])
        if not valid[row]:
            continue
        if start == end:
            return False
        low, high, fits = big_endian(data, start, end)
        if fits and within(low, high, DECIMAL_DIGITS_MAX):
            words[row, 0] = low
            words[row, 1] = high
        else:
            wide[row] = True
    return True


@kernel
def _write_points(
    array: Bytes,
    offsets: Positions,
    valid: Mask,
    scales: Positions,
    target: Bytes,
    ends: Positions,
) -> None:
    """Write whole numbers with their last digits after a point, or with zeros at their end."""
    data = pointer(array)
    size = 0
    for row in range(valid.size):
        ends[row] = size
        if not valid[row]:
            continue
        start, end, scale = int(offsets[row]), int(offsets[row + 1]), int(scales[row])
        if data[start] == _MINUS:
            target[size] = _MINUS
            size += 1
            start += 1
        count = end - start
        # The point comes before this digit; zeros fill up to it on either side.
        for place in range(min(0, count - scale - 1), count):
            if scale > 0 and place == count - scale:
                target[size] = _POINT
                size += 1
            target[size] = data[start + place] if place >= 0 else _ZERO
            size += 1
        if scale < 0 and not (count == 1 and data[start] == _ZERO):
            for _ in range(-scale):
                target[size] = _ZERO
                size += 1
    ends[valid.size] = size
