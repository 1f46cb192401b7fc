"""Compiled parts that copy and check runs of bytes; kernels of all formats are made of them."""

from typing import Any

import numpy as np

from icestream.kernels.compiling import part
from icestream.kernels.memory import WORD_BYTES, Bytes, load_word, store_word

# What each byte means as a hexadecimal digit, -1 if it is none.
HEX = np.full(256, -1, dtype=np.int16)
for _digit in "0123456789abcdefABCDEF":
    HEX[ord(_digit)] = int(_digit, 16)

_HIGH_BITS = np.uint64(0x8080_8080_8080_8080)


@part
def copy_span(data: Bytes, span: tuple[Any, Any, Any], target: Bytes, size: Any) -> Any:
    """Write these bytes as they are; returns the target's new size.

    `span` is where they begin and end, and the last position from which a whole word can be read.
    Whole words, because most texts are one or two. What the last one holds too much is overwritten
    by the next text, and the target has a word to spare for the last text.
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
def is_utf8(data: Bytes, at: int, end: int) -> bool:
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
