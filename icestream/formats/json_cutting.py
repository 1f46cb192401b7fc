"""Compiled kernels that cut JSON texts into cells, and cells into columns and texts.

They rely on `json_grammar` having checked every byte: no fault is looked for here, and so a value
is skipped faster than it was checked. Still no read leaves the buffer, whatever is in it.
"""

import numpy as np
import numpy.typing as npt

from icestream.formats.json_grammar import (
    BACKSLASH,
    BACKSLASHES,
    COMMA,
    FINE,
    KIND_OF,
    MARKS,
    NEWLINE,
    NULL_KIND,
    OBJECT_KIND,
    QUOTE,
    SPACE,
    STOPS,
    STRING_KIND,
    TOO_WIDE,
    UNESCAPED,
    UNFIT,
    Spans,
    code_unit,
    holds,
    skip_blanks,
    skip_plain,
)
from icestream.kernels import WORD_BYTES, Bytes, kernel, load_word, part, pointer, store_word
from icestream.kernels.arrays import Positions
from icestream.kernels.texts import copy_span


@kernel
def cut(
    array: Bytes,
    cells: Spans,
    container: int,
    names: npt.NDArray[np.int64],
    parts: Spans,
) -> tuple[int, int, int, int]:
    """Cut checked containers into columns; returns code, row, position, number of columns.

    `names` holds three numbers per column: where its name starts, where it ends, and which column
    came next when it was last seen, nearly always the one that comes next again. The column after
    the last stands for the start of a row.
    """
    kinds, starts, ends = cells
    part_kinds, part_starts, part_ends = parts
    data, known, width = pointer(array), pointer(names), part_kinds.shape[0]
    count = 0
    for row in range(kinds.size):
        if kinds[row] != container:
            if kinds[row] > NULL_KIND:
                return UNFIT, row, starts[row], count
            continue
        end = ends[row] - 1
        position = skip_blanks(data, starts[row] + 1, end, NEWLINE)
        column = width if container == OBJECT_KIND else -1
        while position < end:
            if container == OBJECT_KIND:
                column, position = _find_name(data, position, end, (known, count, column))
            else:
                column += 1
            if column >= width:
                return TOO_WIDE, row, position, count
            count = max(count, column + 1)
            part_kinds[column, row] = KIND_OF[data[position]]
            part_starts[column, row] = position
            position = _skip_value(data, position, end)
            part_ends[column, row] = position
            position = skip_blanks(data, position, end, NEWLINE)
            # The comma between two parts; after the last one this steps onto the end.
            position = skip_blanks(data, position + 1, end, NEWLINE)
    return FINE, 0, 0, count


@kernel
def flatten(
    array: Bytes,
    cells: Spans,
    container: int,
    offsets: Positions,
    names: Spans,
    parts: Spans,
) -> int:
    """Note where each row's parts begin, and the parts if there is room; returns their number."""
    kinds, starts, ends = cells
    data, room = pointer(array), parts[0].size
    count = 0
    for row in range(kinds.size):
        offsets[row] = count
        if kinds[row] != container:
            continue
        end = int(ends[row]) - 1
        position = skip_blanks(data, int(starts[row]) + 1, end, NEWLINE)
        while position < end:
            start = position
            if container == OBJECT_KIND:
                position = _skip_string(data, position + 1, end)
                if count < room:
                    _note(names, count, STRING_KIND, start, position)
                position = min(skip_blanks(data, position, end, NEWLINE) + 1, end)
                position = start = skip_blanks(data, position, end, NEWLINE)
            position = _skip_value(data, start, end)
            if count < room:
                _note(parts, count, KIND_OF[data[start]], start, position)
            count += 1
            position = skip_blanks(data, position, end, NEWLINE)
            # The comma between two parts; after the last one this steps onto the end.
            position = skip_blanks(data, position + 1, end, NEWLINE)
    offsets[kinds.size] = count
    return count


@part
def _note(cells: Spans, place: int, kind: int, start: int, end: int) -> None:
    kinds, starts, ends = cells
    kinds[place] = kind
    starts[place] = start
    ends[place] = end


@part
def _find_name(
    data: Bytes, position: int, end: int, known: tuple[npt.NDArray[np.int64], int, int]
) -> tuple[int, int]:
    """The column of the name at this position, a new one if need be, and where its value is."""
    names, count, previous = known
    column = names[3 * previous + 2]
    for _ in range(count):
        if column >= count:
            column = 0
        size = names[3 * column + 1] - names[3 * column]
        if position + size <= end and _same(data, names[3 * column], position, size):
            break
        column += 1
    else:
        column = count
        size = _skip_string(data, position + 1, end) - position
        names[3 * column] = position
        names[3 * column + 1] = position + size
    names[3 * previous + 2] = column
    # The colon is the first byte after the name that is not blank.
    position = min(skip_blanks(data, position + size, end, NEWLINE) + 1, end)
    return column, skip_blanks(data, position, end, NEWLINE)


@kernel
def number_texts(
    array: Bytes, cells: Spans, numbers: npt.NDArray[np.int32], firsts: npt.NDArray[np.int64]
) -> int:
    """Number the distinct texts; returns how many there are."""
    kinds, starts, ends = cells
    data = pointer(array)
    count = number = 0
    for row in range(kinds.size):
        if kinds[row] <= NULL_KIND:
            continue
        start, size = int(starts[row]), int(ends[row] - starts[row])
        # Nearly always the text of the row before.
        for _ in range(count):
            known = firsts[number]
            if ends[known] - starts[known] == size and _same(data, starts[known], start, size):
                break
            number = number + 1 if number + 1 < count else 0
        else:
            if count == firsts.size:
                continue
            number = count
            firsts[number] = row
            count += 1
        numbers[row] = number
    return count


@part
def _same(data: Bytes, one: int, other: int, size: int) -> bool:
    # Quotes included: no string is the beginning of another, so equal bytes are equal names.
    place = 0
    while place + WORD_BYTES <= size:
        if load_word(data, one + place) != load_word(data, other + place):
            return False
        place += WORD_BYTES
    while place < size:
        if data[one + place] != data[other + place]:
            return False
        place += 1
    return True


@part
def _skip_string(data: Bytes, position: int, end: int) -> int:
    """The position after a checked string whose opening quote has been read."""
    position = skip_plain(data, position, end)
    while position < end:
        byte = data[position]
        if STOPS[byte] == 0:
            position += 1
        elif byte == QUOTE:
            return position + 1
        else:
            position += 2
    return end


@part
def _skip_value(data: Bytes, position: int, end: int) -> int:
    """The position after a checked value inside a container that closes at `end`."""
    kind = KIND_OF[data[position]]
    position += 1
    if kind == STRING_KIND:
        return _skip_string(data, position, end)
    if kind < OBJECT_KIND:
        while position < end and data[position] > SPACE and data[position] != COMMA:
            position += 1
        return position
    depth = 1
    while position < end and depth > 0:
        mark = MARKS[data[position]]
        position += 1
        if mark == 0:
            continue
        if mark == 2:
            position = _skip_string(data, position, end)
        else:
            depth += mark
    return position


@kernel
def copy_texts(
    array: Bytes,
    cells: Spans,
    raw: bool,
    offsets: Positions,
    texts: Bytes,
) -> int:
    """Write the cells' texts one after the other, and where each begins; returns the size."""
    kinds, starts, ends = cells
    data, target = pointer(array), pointer(texts)
    # Up to here a whole word can be read.
    last = array.size - WORD_BYTES
    size = 0
    for row in range(kinds.size):
        offsets[row] = size
        start, end = int(starts[row]), int(ends[row])
        if kinds[row] == STRING_KIND and not raw and end - start >= 2:
            size = _unescape(data, (start + 1, end - 1, last), target, size)
        elif kinds[row] > NULL_KIND:
            size = copy_span(data, (start, end, last), target, size)
    offsets[kinds.size] = size
    return size


@part
def _unescape(data: Bytes, span: tuple[int, int, int], target: Bytes, size: int) -> int:
    """Write the checked string between these positions; returns the target's new size."""
    position, end, last = span
    # As in `copy_span`, up to the first word with an escape in it.
    while position < end and position <= last:
        word = load_word(data, position)
        if holds(word, BACKSLASHES):
            break
        store_word(target, size, word)
        position += WORD_BYTES
        size += WORD_BYTES
    if position >= end:
        return size - (position - end)
    while position < end:
        if data[position] != BACKSLASH:
            target[size] = data[position]
            size += 1
            position += 1
            continue
        point = code_unit(data, position, end)
        if point < 0:
            target[size] = UNESCAPED[data[position + 1]]
            size += 1
            position += 2
            continue
        position += 6
        if point >= 0xD800 and point <= 0xDFFF:
            point = 0x10000 + ((point - 0xD800) << 10) + code_unit(data, position, end) - 0xDC00
            position += 6
        size = _encode(point, target, size)
    return size


@part
def _encode(point: int, target: Bytes, size: int) -> int:
    """Write a code point as UTF-8; returns the target's new size."""
    if point < 0x80:
        target[size] = point
        return size + 1
    extra = 1 + (point > 0x7FF) + (point > 0xFFFF)
    # The lead byte has as many leading ones as the sequence has bytes.
    target[size] = (0xFF00 >> (extra + 1)) & 0xFF | point >> (6 * extra)
    for place in range(extra, 0, -1):
        target[size + place] = 0x80 | point & 0x3F
        point >>= 6
    return size + extra + 1
