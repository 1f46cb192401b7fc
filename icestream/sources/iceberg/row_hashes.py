"""A hash of 64 bits for each row of Arrow columns.

Rows that are equal bit by bit, in columns of the same types, have the same hash. Rows that differ
share one once in 10^19.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from icestream.kernels import WORD_BYTES, Bytes, kernel, load_word, part, pointer

Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

# The constants are those of MurmurHash3, which is in the public domain.
_FIRST, _SECOND = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_FINAL, _LAST = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_ADDED = np.uint64(0x52DCE729)
_NULL = np.uint64(0x9E3779B97F4A7C15)
_FIVE, _EIGHT = np.uint64(5), np.uint64(8)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)
_WORD_BITS = 64
_DECIMAL_BYTES = 16
_EVERYTHING: Mask = np.zeros(0, dtype=np.bool_)


def row_hashes(columns: Iterable[pa.Array], count: int) -> Hashes:
    """The hashes of `count` rows; the order of the columns matters."""
    hashes = np.zeros(count, dtype=np.uint64)
    for column in columns:
        _add(hashes, column)
    _finish(hashes)
    return hashes


def _add(hashes: Hashes, column: pa.Array) -> None:
    """Mix the values of a column into the hashes of their rows."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    valid = _valid(column)
    if pa.types.is_null(kind):
        _add_words(hashes, np.zeros(len(column), dtype=np.uint64), valid)
    elif pa.types.is_struct(kind):
        # Asked this way what lies beneath a null struct is null as well.
        parts = [pc.struct_field(column, [number]) for number in range(kind.num_fields)]
        _add_words(hashes, row_hashes(parts, len(column)), valid)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        _add_lists(hashes, _offsets(column), row_hashes(_items(column), _end(column)), valid)
    elif _is_bytes(kind):
        _add_bytes(hashes, _offsets(column), _content(column), valid)
    elif pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        _add(hashes, column.cast(pa.binary()))
    else:
        for words in _words(column):
            _add_words(hashes, words, valid)


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _valid(column: pa.Array) -> Mask:
    """Which values are not null; nothing at all stands for every one of them."""
    if not column.null_count:
        return _EVERYTHING
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def _words(column: pa.Array) -> list[npt.NDArray[np.uint64]]:
    """The bits of values of a fixed size, as one number for each 64 of them."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.uint8()), pa.uint8()
    size = kind.bit_width // 8
    if size > _WORD_BITS // 8:
        content = _fixed(column, size, np.dtype(np.uint64)).reshape(-1, size // WORD_BYTES)
        return [np.ascontiguousarray(content[:, part]) for part in range(content.shape[1])]
    content = _fixed(column, size, np.dtype(f"u{size}"))
    return [content.astype(np.uint64, copy=False)]


def _fixed(column: pa.Array, size: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    buffer = column.buffers()[1]
    first, count = column.offset * size, len(column) * size
    content = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    return content[first : first + count].view(kind)


def _offsets(column: pa.Array) -> npt.NDArray[np.int64]:
    """Where each value begins and the last one ends."""
    wide = pa.types.is_large_list(column.type) or pa.types.is_large_string(column.type)
    kind = np.dtype(np.int64 if wide or pa.types.is_large_binary(column.type) else np.int32)
    if not len(column):
        return np.zeros(1, dtype=np.int64)
    whole = np.frombuffer(column.buffers()[1], kind)
    return whole[column.offset : column.offset + len(column) + 1].astype(np.int64, copy=False)


def _content(column: pa.Array) -> Bytes:
    buffer = column.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer else np.zeros(0, np.uint8)


def _items(column: pa.Array) -> list[pa.Array]:
    """What lists or maps hold, from the beginning of their buffers on."""
    parts = [column.keys, column.items] if pa.types.is_map(column.type) else [column.values]
    return [each.slice(0, _end(column)) for each in parts]


def _end(column: pa.Array) -> int:
    return int(_offsets(column)[-1])


@part
def _mixed(so_far: np.uint64, word: np.uint64) -> np.uint64:
    word *= _FIRST
    word = (word << _LEFT) | (word >> _RIGHT)
    so_far ^= word * _SECOND
    so_far = (so_far << _LEFT) | (so_far >> _RIGHT)
    return so_far * _FIVE + _ADDED


@kernel
def _add_words(hashes: Hashes, words: npt.NDArray[np.uint64], valid: Mask) -> None:
    everything = valid.size == 0
    for row in range(hashes.size):
        word = words[row] if everything or valid[row] else _NULL
        # Null and the number that stands for it must not be the same.
        mark = np.uint64(1) if everything or valid[row] else np.uint64(2)
        hashes[row] = _mixed(hashes[row] + mark, word)


@kernel
def _add_lists(hashes: Hashes, offsets: npt.NDArray[np.int64], items: Hashes, valid: Mask) -> None:
    everything = valid.size == 0
    for row in range(hashes.size):
        if not everything and not valid[row]:
            hashes[row] = _mixed(hashes[row] + np.uint64(2), _NULL)
            continue
        start, end = offsets[row], offsets[row + 1]
        found = _mixed(hashes[row] + np.uint64(1), np.uint64(end - start))
        for place in range(start, end):
            found = _mixed(found, items[place])
        hashes[row] = found


@kernel
def _add_bytes(hashes: Hashes, offsets: npt.NDArray[np.int64], content: Bytes, valid: Mask) -> None:
    data = pointer(content)
    everything = valid.size == 0
    for row in range(hashes.size):
        if not everything and not valid[row]:
            hashes[row] = _mixed(hashes[row] + np.uint64(2), _NULL)
            continue
        place, end = offsets[row], offsets[row + 1]
        found = _mixed(hashes[row] + np.uint64(1), np.uint64(end - place))
        while end - place >= WORD_BYTES:
            found = _mixed(found, load_word(data, place))
            place += WORD_BYTES
        if place < end:
            word = np.uint64(0)
            while place < end:
                word = (word << _EIGHT) | np.uint64(data[place])
                place += 1
            found = _mixed(found, word)
        hashes[row] = found


@kernel
def _finish(hashes: Hashes) -> None:
    """Let every bit of a hash depend on all that was mixed into it."""
    for row in range(hashes.size):
        found = hashes[row]
        found = (found ^ (found >> _RIGHT)) * _FINAL
        found = (found ^ (found >> _RIGHT)) * _LAST
        hashes[row] = found ^ (found >> _RIGHT)
