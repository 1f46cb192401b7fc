"""JSON texts as columns of cells, without a Python loop over rows.

`lines` checks a whole buffer once, against the JSON grammar and as UTF-8, and cuts it into one cell
per line; `values` does the same for the texts of an Arrow array, and sets broken ones aside instead
of stopping. `members`, `elements`, `items` and `entries` cut cells into further cells. A cell is a
kind and a span of the shared buffer, so nothing is converted until a column is asked for its text.

Promise: what gets through is JSON down to the innermost value, digits come out as they were
written, and garbage raises `MalformedJson` with the row and byte where it was found. No read
leaves the buffer, whatever is in it. The buffer must not change while cells point into it.

`pyarrow.json` is the obvious way and does not fit: it refuses a column that holds `1.5` in one
row and `"NaN"` in another, turns decimals into doubles and wants the types before it has seen
the rows. Parsers that work row by row build Python objects: `json.loads` is more than
ten times slower, and orjson, four times slower, turns decimals into doubles too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from icestream.kernels import (
    WORD_BYTES,
    Bytes,
    kernel,
    load_word,
    part,
    pointer,
    store_word,
)

__all__ = [
    "Cells",
    "Kind",
    "MalformedJson",
    "distinct",
    "elements",
    "entries",
    "invalid_utf8",
    "items",
    "lines",
    "members",
    "values",
]

# Nesting that no changefeed comes near, and that keeps the scanner's stack in one small array.
DEPTH_MAX = 256
# Every name costs nine bytes per row; a feed with more names than this has data for names.
WIDTH_MAX = 16_384
# Texts that repeat over long runs of rows have few distinct ones; more are not told apart.
DISTINCT_MAX = 1024
# Arrow's offsets and the spans are 32 bits wide.
BUFFER_BYTES_MAX = 2**31 - 1

Positions = npt.NDArray[np.int32]
# What the kernels see of cells: kinds, starts and ends.
Spans = tuple[Bytes, Positions, Positions]


class Kind(IntEnum):
    """What a cell holds; `MISSING` means that the row has no such member or element."""

    MISSING = 0
    NULL = 1
    FALSE = 2
    TRUE = 3
    NUMBER = 4
    STRING = 5
    OBJECT = 6
    ARRAY = 7


class MalformedJson(ValueError):
    """The buffer is not the JSON it should be; `row` counts cells, `offset` bytes, both from 0."""

    def __init__(self, reason: str, row: int, offset: int) -> None:
        # All three go to args, so that the error survives pickling on its way from a worker.
        super().__init__(reason, row, offset)
        self.reason = reason
        self.row = row
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.reason} in row {self.row} at byte {self.offset}"


class TooWide(MalformedJson):
    """There are more distinct names, or elements, than may be; `row` is the first that has them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """One JSON value per row, as spans of a shared buffer.

    Made by the functions of this module, which rely on `lines` or `values` having checked it.
    """

    data: Bytes
    kinds: Bytes
    starts: Positions
    ends: Positions

    def __post_init__(self) -> None:
        # Kernels index without bounds checks, so no span may lead out of the buffer.
        if not len(self.kinds) == len(self.starts) == len(self.ends):
            raise ValueError("cells need as many kinds as starts and ends")
        if len(self.kinds) and (
            self.starts.min() < 0
            or self.ends.max() > self.data.size
            or bool(np.any(self.ends < self.starts))
        ):
            raise ValueError("cells must lie inside their buffer")

    def __len__(self) -> int:
        return len(self.kinds)

    def text(self) -> pa.StringArray:
        """Strings unescaped and without quotes, other values as written, null as Arrow null."""
        return _texts(self, raw=False)

    def json(self) -> pa.StringArray:
        """Every value as written, strings with quotes and escapes, null as Arrow null."""
        return _texts(self, raw=True)

    def take(self, indices: npt.NDArray[Any]) -> "Cells":
        """The cells at these rows, in this order."""
        return Cells(
            data=self.data,
            kinds=self.kinds[indices],
            starts=self.starts[indices],
            ends=self.ends[indices],
        )

    def where(self, chosen: npt.NDArray[np.bool_], other: "Cells") -> "Cells":
        """Its own cells where `chosen`, elsewhere those of other cells of as many rows.

        Free of copies only when both lie in one buffer, as all cells cut from the same ones do.
        """
        data, shift = self.data, 0
        if not _one_buffer(self.data, other.data):
            data, shift = _frozen(np.concatenate([self.data, other.data])), self.data.size
            if data.size > BUFFER_BYTES_MAX:
                raise ValueError(f"cannot index {data.size} bytes, at most {BUFFER_BYTES_MAX}")
        return Cells(
            data=data,
            kinds=np.where(chosen, self.kinds, other.kinds),
            starts=np.where(chosen, self.starts, other.starts + np.int32(shift)),
            ends=np.where(chosen, self.ends, other.ends + np.int32(shift)),
        )

    def only(self, *kinds: Kind) -> "Cells":
        """The same cells, but missing where they are of no such kind."""
        wanted = np.zeros(256, dtype=np.bool_)
        wanted[list(kinds)] = True
        fitting = wanted[self.kinds]
        if fitting.all():
            return self
        missing = np.uint8(Kind.MISSING)
        return Cells(
            data=self.data,
            kinds=np.where(fitting, self.kinds, missing),
            starts=self.starts,
            ends=self.ends,
        )


def _one_buffer(one: Bytes, other: Bytes) -> bool:
    return one is other or (one.ctypes.data == other.ctypes.data and one.size == other.size)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # Numba compiles once more for writable arrays, so all buffers look read-only to it.
    array.flags.writeable = False
    return array


def lines(data: bytes | memoryview | pa.Buffer) -> Cells:
    """Each line that is not blank as one cell, checked to its innermost value."""
    array = np.frombuffer(data, dtype=np.uint8)
    if array.size > BUFFER_BYTES_MAX:
        raise ValueError(f"cannot index {array.size} bytes of JSON, at most {BUFFER_BYTES_MAX}")
    _check_utf8(_frozen(array))
    rows_max = int(_count_lines(array))
    found = (
        np.empty(rows_max, dtype=np.uint8),
        np.empty(rows_max, dtype=np.int32),
        np.empty(rows_max, dtype=np.int32),
    )
    closers = np.empty(DEPTH_MAX, dtype=np.uint8)
    code, row, offset = _scan_lines(array, found, closers)
    if code != _FINE:
        raise MalformedJson(_REASONS[code], row, offset)
    kinds, starts, ends = found
    return Cells(data=array, kinds=kinds[:row], starts=starts[:row], ends=ends[:row])


def values(array: pa.Array) -> tuple[Cells, dict[int, str]]:
    """Each text of a binary or string array as one cell, and the rows that are none, with why.

    A text holds one value, with whatever JSON counts as blank around and inside it, newlines too.
    Rows without a text and rows that are rejected are `MISSING`; one broken text costs no other.
    Cells point into the array's own buffer. Where cells of two arrays are to be mixed, let them be
    one array (`pa.concat_arrays`), whose cells are then taken apart.
    """
    data, offsets, valid = _texts_of(array)
    rows = len(valid)
    found = (
        np.zeros(rows, dtype=np.uint8),
        np.zeros(rows, dtype=np.int32),
        np.zeros(rows, dtype=np.int32),
    )
    faults = np.zeros(rows, dtype=np.uint8)
    if not _whole_utf8(data):
        _find_invalid_utf8(data, offsets, valid, faults)
    closers = np.empty(DEPTH_MAX, dtype=np.uint8)
    _scan_values(data, offsets, valid, found, closers, faults)
    kinds, starts, ends = found
    broken = np.flatnonzero(faults)
    reasons = [_TEXT_REASONS[code] for code in faults[broken].tolist()]
    rejected = dict(zip(broken.tolist(), reasons, strict=True))
    return Cells(data=data, kinds=kinds, starts=starts, ends=ends), rejected


def invalid_utf8(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Which texts of a binary array are not UTF-8."""
    data, offsets, valid = _texts_of(array)
    faults = np.zeros(len(valid), dtype=np.uint8)
    # Unlike JSON, a text may end inside a character that the next one completes.
    _find_invalid_utf8(data, offsets, valid, faults)
    return np.asarray(faults != _FINE)


def _texts_of(array: pa.Array) -> tuple[Bytes, Positions, npt.NDArray[np.bool_]]:
    """The bytes of an array's texts, where each begins and the last one ends, and which are there.

    Without copying, unless the array is of a type with other offsets.
    """
    large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    if not (large or pa.types.is_binary(array.type) or pa.types.is_string(array.type)):
        array = array.cast(pa.binary())
    valid = np.ones(len(array), dtype=np.bool_)
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    _, places, content = array.buffers()
    if len(array) == 0 or places is None:
        return _frozen(np.zeros(0, np.uint8)), _frozen(np.zeros(1, np.int32)), _frozen(valid)
    whole = np.frombuffer(places, dtype=np.int64 if large else np.int32)
    offsets = whole[array.offset : array.offset + len(array) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > BUFFER_BYTES_MAX:
        raise ValueError(f"cannot index {last - first} bytes of JSON, at most {BUFFER_BYTES_MAX}")
    bytes_ = np.frombuffer(content or b"", dtype=np.uint8)[first:last]
    if first or large:
        offsets = (offsets - first).astype(np.int32)
    return _frozen(bytes_), _frozen(offsets), _frozen(valid)


def distinct(cells: Cells) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Which text each cell has, and for each such text a row that has it.

    Meant for texts that repeat over long runs of rows. Texts are numbered in the order first seen;
    null and missing cells have -1, and so has what comes after the first `DISTINCT_MAX` texts.
    """
    numbers = np.full(len(cells), -1, dtype=np.int32)
    firsts = np.zeros(DISTINCT_MAX, dtype=np.int64)
    count = _number_texts(cells.data, (cells.kinds, cells.starts, cells.ends), numbers, firsts)
    return numbers, firsts[:count]


def items(cells: Cells) -> tuple[npt.NDArray[np.int32], Cells]:
    """The elements of all array cells one after the other, and where each row's begin and end.

    Cells that are no arrays have no elements.
    """
    offsets, _, flat = _flattened(cells, Kind.ARRAY)
    return offsets, flat


def entries(cells: Cells) -> tuple[npt.NDArray[np.int32], Cells, Cells]:
    """The members of all object cells one after the other, as cells of names and of values.

    With where each row's begin and end. Cells that are no objects have no members.
    """
    return _flattened(cells, Kind.OBJECT)


def _flattened(cells: Cells, container: Kind) -> tuple[npt.NDArray[np.int32], Cells, Cells]:
    spans = (cells.kinds, cells.starts, cells.ends)
    offsets = np.zeros(len(cells) + 1, dtype=np.int32)
    nothing = _empty_spans(0)
    count = _flatten(cells.data, spans, int(container), offsets, nothing, nothing)
    names, parts = _empty_spans(count), _empty_spans(count)
    _flatten(cells.data, spans, int(container), offsets, names, parts)
    named, flat = (
        Cells(data=cells.data, kinds=kinds, starts=starts, ends=ends)
        for kinds, starts, ends in (names, parts)
    )
    return offsets, named, flat


def _empty_spans(rows: int) -> Spans:
    return np.zeros(rows, np.uint8), np.zeros(rows, np.int32), np.zeros(rows, np.int32)


def members(cells: Cells, names_max: int = WIDTH_MAX) -> dict[str, Cells]:
    """The members of object cells by name, names in the order first seen, last duplicate wins.

    Rows without the member, and rows that are null or missing themselves, are `MISSING`. Raises
    `TooWide` when there are more names than so many.
    """
    names, columns = _split(cells, Kind.OBJECT, names_max)
    found: dict[str, Cells] = {}
    for name, column in zip(names.text().to_pylist(), columns, strict=True):
        # The kernel tells names apart as written; escapes can spell one name in several ways.
        found[name] = _latest(found[name], column) if name in found else column
    return found


def crowded(cells: Cells, names_max: int) -> npt.NDArray[np.bool_]:
    """The rows to leave out, so that the objects of all others have at most so many names.

    Rows that have more by themselves, and then those that bring a name after so many others.
    """
    spans, offsets = (cells.kinds, cells.starts, cells.ends), np.zeros(len(cells) + 1, np.int32)
    nothing = _empty_spans(0)
    _flatten(cells.data, spans, int(Kind.OBJECT), offsets, nothing, nothing)
    left_out: npt.NDArray[np.bool_] = np.diff(offsets) > names_max
    left = cells.where(~left_out, cells.only())
    try:
        members(left, names_max)
    except TooWide as error:
        before, rest = (
            left.take(np.arange(*ends)) for ends in ((error.row,), (error.row, len(left)))
        )
        known = pa.array(list(members(before, names_max)), pa.string())
        starts, names, _ = entries(rest)
        new = ~pc.is_in(names.text(), value_set=known).to_numpy(zero_copy_only=False)
        count = np.concatenate([[0], np.cumsum(new)])
        left_out[error.row :] |= count[starts[1:]] > count[starts[:-1]]
    return left_out


def elements(cells: Cells) -> list[Cells]:
    """The first elements of array cells, the second ones, and so on to the longest array.

    Rows with a shorter array, and rows that are null or missing themselves, are `MISSING`.
    """
    _, columns = _split(cells, Kind.ARRAY)
    return columns


def _split(cells: Cells, container: Kind, width_max: int = WIDTH_MAX) -> tuple[Cells, list[Cells]]:
    """The cells of each column of these containers, and the names of the columns as cells."""
    rows = len(cells)
    spans = (cells.kinds, cells.starts, cells.ends)
    width = min(16, width_max)
    while True:
        names = np.zeros((width + 1, 3), dtype=np.int64)
        # Pages of zeros cost nothing until the kernel writes to them, so width can be generous.
        parts = (
            np.zeros((width, rows), dtype=np.uint8),
            np.zeros((width, rows), dtype=np.int32),
            np.zeros((width, rows), dtype=np.int32),
        )
        code, row, offset, count = _cut(cells.data, spans, int(container), names, parts)
        if code != _TOO_WIDE or width >= width_max:
            break
        width = min(2 * width, width_max)
    if code == _TOO_WIDE:
        raise TooWide(f"more than {width_max} distinct member names or elements", row, offset)
    if code == _UNFIT:
        article = "an object" if container is Kind.OBJECT else "an array"
        raise MalformedJson(f"expected {article}", row, offset)
    if code != _FINE:
        raise MalformedJson(_REASONS[code], row, offset)
    columns = [
        Cells(data=cells.data, kinds=kinds, starts=starts, ends=ends)
        for kinds, starts, ends in zip(*(part[:count] for part in parts), strict=True)
    ]
    kinds = np.full(count, Kind.STRING, dtype=np.uint8)
    starts, ends, _ = names[:count].T.astype(np.int32, order="C")
    return Cells(data=cells.data, kinds=kinds, starts=starts, ends=ends), columns


def _latest(one: Cells, other: Cells) -> Cells:
    """Per row the cell that comes later in the buffer; a missing one starts at byte 0."""
    later = other.starts > one.starts
    return Cells(
        data=one.data,
        kinds=np.where(later, other.kinds, one.kinds),
        starts=np.where(later, other.starts, one.starts),
        ends=np.where(later, other.ends, one.ends),
    )


def _texts(cells: Cells, *, raw: bool) -> pa.StringArray:
    rows = len(cells)
    present = cells.kinds > Kind.NULL
    # Unescaping only shrinks, so the spans bound what the kernel writes.
    bytes_max = int(np.sum(cells.ends, dtype=np.int64) - np.sum(cells.starts, dtype=np.int64))
    if bytes_max > BUFFER_BYTES_MAX:
        raise ValueError(f"cannot hold {bytes_max} bytes in one Arrow array")
    # Arrow's pool hands out pages that are already mapped; fresh ones cost as much as the copying.
    offsets = pa.allocate_buffer((rows + 1) * np.dtype(np.int32).itemsize)
    target = pa.allocate_buffer(bytes_max + WORD_BYTES)
    size = _copy_texts(
        cells.data,
        (cells.kinds, cells.starts, cells.ends),
        raw,
        np.frombuffer(offsets, dtype=np.int32),
        np.frombuffer(target, dtype=np.uint8),
    )
    absent = rows - int(np.count_nonzero(present))
    validity = pa.py_buffer(np.packbits(present, bitorder="little")) if absent else None
    return pa.StringArray.from_buffers(rows, offsets, target.slice(0, size), validity, absent)


def _whole_utf8(data: Bytes) -> bool:
    """Whether the buffer is UTF-8 from end to end, which Arrow checks at memory speed."""
    span = pa.py_buffer(np.array([0, data.size], dtype=np.int32))
    try:
        pa.StringArray.from_buffers(1, span, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _check_utf8(data: Bytes) -> None:
    if _whole_utf8(data):
        return
    # Python's slower decoder is only asked where it broke.
    text = data.tobytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start
        earlier = text[: text.rfind(b"\n", 0, offset) + 1].split(b"\n")
        row = sum(1 for line in earlier if line.strip(b" \t\r"))
        raise MalformedJson("invalid UTF-8", row, offset) from error
    raise MalformedJson("invalid UTF-8", 0, 0)


# What a kernel found wrong. Codes instead of exceptions, because numba's exceptions carry no facts.
_FINE, _ENDED, _TRAILING, _NO_VALUE, _NO_NAME, _NO_COLON, _NO_COMMA = range(7)
_UNTERMINATED, _CONTROL, _ESCAPE, _SURROGATE, _NUMBER, _TOO_DEEP, _TOO_WIDE, _UNFIT = range(7, 15)
_EMPTY, _NOT_UTF8 = range(15, 17)
_REASONS = {
    _ENDED: "line ends inside a value",
    _TRAILING: "unexpected text after the value",
    _NO_VALUE: "expected a value",
    _NO_NAME: "expected a member name in quotes",
    _NO_COLON: "expected a colon after the member name",
    _NO_COMMA: "expected a comma or the closing bracket",
    _UNTERMINATED: "unterminated string",
    _CONTROL: "raw control character in a string",
    _ESCAPE: "invalid escape in a string",
    _SURROGATE: "unmatched surrogate in a string",
    _NUMBER: "invalid number",
    _TOO_DEEP: f"more than {DEPTH_MAX} levels of nesting",
}
_TEXT_REASONS = _REASONS | {
    _ENDED: "text ends inside a value",
    _EMPTY: "empty text",
    _NOT_UTF8: "invalid UTF-8",
}

_QUOTE, _BACKSLASH, _COMMA, _COLON, _NEWLINE = (ord(mark) for mark in '"\\,:\n')
_ZERO, _NINE, _MINUS, _PLUS, _POINT = (ord(mark) for mark in "09-+.")
_CLOSE_BRACE, _LOWER_E, _LOWER_U = (ord(mark) for mark in "}eu")
_SPACE, _TAB, _RETURN = (ord(mark) for mark in " \t\r")
_NULL_KIND, _NUMBER_KIND = int(Kind.NULL), int(Kind.NUMBER)
_STRING_KIND, _OBJECT_KIND = int(Kind.STRING), int(Kind.OBJECT)


def _table(entries: Mapping[str, int], otherwise: int) -> npt.NDArray[np.int16]:
    table = np.full(256, otherwise, dtype=np.int16)
    for mark, entry in entries.items():
        table[ord(mark)] = entry
    return table


_KIND_OF = _table(
    dict.fromkeys("-0123456789", Kind.NUMBER)
    | {"n": Kind.NULL, "f": Kind.FALSE, "t": Kind.TRUE}
    | {'"': Kind.STRING, "{": Kind.OBJECT, "[": Kind.ARRAY},
    otherwise=Kind.MISSING,
)
_HEX = _table({digit: int(digit, 16) for digit in "0123456789abcdefABCDEF"}, otherwise=-1)
_UNESCAPED = _table(
    {mark: ord(meant) for mark, meant in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)},
    otherwise=-1,
)
_LITERALS = np.frombuffer(b"null\0falsetrue\0", dtype=np.uint8).reshape(3, 5)
# Where a scan through a string has to look twice.
_STOPS = _table(dict.fromkeys([*map(chr, range(32)), '"', "\\"], 1), otherwise=0)
# Where a skip through checked containers has to look twice.
_MARKS = _table({'"': 2, "{": 1, "[": 1, "}": -1, "]": -1}, otherwise=0)


# One value in all eight bytes of a word.
_ONES, _HIGHS, _SPACES, _QUOTES, _BACKSLASHES = (
    np.uint64(int.from_bytes(bytes([byte] * WORD_BYTES)))
    for byte in (0x01, 0x80, _SPACE, _QUOTE, _BACKSLASH)
)


@kernel
def _count_lines(data: Bytes) -> int:
    """How many lines there are, the last one whether it has a newline or not."""
    count = 1
    for byte in data:
        count += byte == _NEWLINE
    return count


@part
def _skip_blanks(data: Bytes, position: int, end: int, newline: int) -> int:
    """The next byte that is not blank.

    A newline is blank where it is given as such; where it ends the row, a space is given instead.
    """
    while position < end:
        byte = data[position]
        if byte != _SPACE and byte != _TAB and byte != _RETURN and byte != newline:
            break
        position += 1
    return position


@kernel
def _scan_lines(array: Bytes, cells: Spans, brackets: Bytes) -> tuple[int, int, int]:
    """Check all lines and note their cells; returns code, rows so far and position."""
    kinds, starts, ends = cells
    data, end = pointer(array), array.size
    closers = pointer(brackets)
    position = row = 0
    while True:
        position = _skip_blanks(data, position, end, _SPACE)
        if position == end:
            return _FINE, row, position
        if data[position] == _NEWLINE:
            position += 1
            continue
        kinds[row] = _KIND_OF[data[position]]
        starts[row] = position
        position, code = _check_value(data, position, end, closers, _SPACE)
        if code == _FINE:
            ends[row] = position
            position = _skip_blanks(data, position, end, _SPACE)
            if position < end and data[position] != _NEWLINE:
                code = _TRAILING
        elif position >= end or data[position] == _NEWLINE:
            # Most of all a file cut short, whatever token the cut went through.
            code = _UNTERMINATED if code == _UNTERMINATED else _ENDED
        if code != _FINE:
            return code, row, position
        row += 1


@kernel
def _scan_values(
    array: Bytes,
    offsets: Positions,
    valid: npt.NDArray[np.bool_],
    cells: Spans,
    brackets: Bytes,
    faults: Bytes,
) -> None:
    """Check each text by itself, and note its cell or what is wrong with it.

    Rows that have a fault already, or no text, stay as they are.
    """
    kinds, starts, ends = cells
    data, closers = pointer(array), pointer(brackets)
    for row in range(valid.size):
        if not valid[row] or faults[row] != _FINE:
            continue
        end = int(offsets[row + 1])
        start = _skip_blanks(data, int(offsets[row]), end, _NEWLINE)
        if start == end:
            faults[row] = _EMPTY
            continue
        position, code = _check_value(data, start, end, closers, _NEWLINE)
        after = _skip_blanks(data, position, end, _NEWLINE)
        if code == _FINE and after == end:
            kinds[row] = _KIND_OF[data[start]]
            starts[row] = start
            ends[row] = position
        elif code == _FINE:
            faults[row] = _TRAILING
        elif position >= end:
            # Most of all a text cut short, whatever token the cut went through.
            faults[row] = _UNTERMINATED if code == _UNTERMINATED else _ENDED
        else:
            # What ends a line is just another control character here.
            faults[row] = _CONTROL if code == _UNTERMINATED else code


@kernel
def _find_invalid_utf8(
    array: Bytes, offsets: Positions, valid: npt.NDArray[np.bool_], faults: Bytes
) -> None:
    data = pointer(array)
    for row in range(valid.size):
        if valid[row] and not _is_utf8(data, int(offsets[row]), int(offsets[row + 1])):
            faults[row] = _NOT_UTF8


@part
def _is_utf8(data: Bytes, position: int, end: int) -> bool:
    while position < end:
        lead = int(data[position])
        position += 1
        if lead < 0x80:
            continue
        extra = (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
        if lead < 0xC2 or lead > 0xF4 or position + extra > end:
            return False
        point = lead & (0x3F >> extra)
        for place in range(position, position + extra):
            if data[place] & 0xC0 != 0x80:
                return False
            point = point << 6 | int(data[place]) & 0x3F
        overlong = (extra == 2 and point < 0x800) or (extra == 3 and point < 0x10000)
        if overlong or (point >= 0xD800 and point <= 0xDFFF) or point > 0x10FFFF:
            return False
        position += extra
    return True


@kernel
def _number_texts(
    array: Bytes, cells: Spans, numbers: npt.NDArray[np.int32], firsts: npt.NDArray[np.int64]
) -> int:
    """Number the distinct texts; returns how many there are."""
    kinds, starts, ends = cells
    data = pointer(array)
    count = number = 0
    for row in range(kinds.size):
        if kinds[row] <= _NULL_KIND:
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
def _check_value(
    data: Bytes, position: int, end: int, closers: Bytes, newline: int
) -> tuple[int, int]:
    """Check one value with all that is in it; returns the position after it, or of the fault.

    `closers` is the stack of brackets that have yet to come.
    """
    depth = 0
    named = False
    while True:
        if named:
            position, code = _check_name(data, position, end, newline)
            if code != _FINE:
                return position, code
        kind = _KIND_OF[data[position]] if position < end else 0
        if kind < _OBJECT_KIND:
            position, code = _check_scalar(data, position, end, kind)
            if code != _FINE:
                return position, code
        else:
            if depth == DEPTH_MAX:
                return position, _TOO_DEEP
            # In ASCII both closing brackets come two places after their opening ones.
            closers[depth] = data[position] + 2
            depth += 1
            position = _skip_blanks(data, position + 1, end, newline)
            if position >= end or data[position] != closers[depth - 1]:
                named = closers[depth - 1] == _CLOSE_BRACE
                continue
            position += 1
            depth -= 1
        while depth > 0:
            position = _skip_blanks(data, position, end, newline)
            if position >= end or data[position] != closers[depth - 1]:
                break
            position += 1
            depth -= 1
        if depth == 0:
            return position, _FINE
        if position >= end or data[position] != _COMMA:
            return position, _NO_COMMA
        position = _skip_blanks(data, position + 1, end, newline)
        named = closers[depth - 1] == _CLOSE_BRACE


@part
def _check_name(data: Bytes, position: int, end: int, newline: int) -> tuple[int, int]:
    """Check a member name and its colon; returns the position of the value."""
    if position >= end or data[position] != _QUOTE:
        return position, _NO_NAME
    position, code = _check_string(data, position + 1, end)
    if code != _FINE:
        return position, code
    position = _skip_blanks(data, position, end, newline)
    if position >= end or data[position] != _COLON:
        return position, _NO_COLON
    return _skip_blanks(data, position + 1, end, newline), _FINE


@part
def _check_scalar(data: Bytes, position: int, end: int, kind: int) -> tuple[int, int]:
    if kind == _STRING_KIND:
        return _check_string(data, position + 1, end)
    if kind == _NUMBER_KIND:
        return _check_number(data, position, end)
    if kind == 0:
        return position, _NO_VALUE
    for byte in _LITERALS[kind - 1]:
        if byte == 0:
            break
        if position >= end or data[position] != byte:
            return position, _NO_VALUE
        position += 1
    return position, _FINE


@part
def _holds(word: np.uint64, mark: np.uint64) -> np.uint64:
    """Not zero if a byte of the word is the mark, which is given in all bytes."""
    difference = word ^ mark
    return (difference - _ONES) & ~difference & _HIGHS


@part
def _skip_plain(data: Bytes, position: int, end: int) -> int:
    """Up to the first word with a byte in it where a string ends or needs a closer look."""
    while position + WORD_BYTES <= end:
        word = load_word(data, position)
        controls = (word - _SPACES) & ~word & _HIGHS
        if controls | _holds(word, _QUOTES) | _holds(word, _BACKSLASHES):
            break
        position += WORD_BYTES
    return position


@part
def _check_string(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Check the rest of a string whose opening quote has been read."""
    position = _skip_plain(data, position, end)
    while position < end:
        byte = data[position]
        if _STOPS[byte] == 0:
            position += 1
        elif byte == _QUOTE:
            return position + 1, _FINE
        elif byte == _BACKSLASH:
            position, code = _check_escape(data, position, end)
            if code != _FINE:
                return position, code
        else:
            return position, _UNTERMINATED if byte == _NEWLINE else _CONTROL
    return position, _UNTERMINATED


@part
def _check_escape(data: Bytes, position: int, end: int) -> tuple[int, int]:
    if position + 1 >= end or data[position + 1] == _NEWLINE:
        return position + 1, _UNTERMINATED
    if data[position + 1] != _LOWER_U:
        if _UNESCAPED[data[position + 1]] < 0:
            return position, _ESCAPE
        return position + 2, _FINE
    unit = _code_unit(data, position, end)
    if unit < 0:
        return position, _ESCAPE
    if unit < 0xD800 or unit > 0xDFFF:
        return position + 6, _FINE
    low = _code_unit(data, position + 6, end)
    if unit > 0xDBFF or low < 0xDC00 or low > 0xDFFF:
        return position, _SURROGATE
    return position + 12, _FINE


@part
def _code_unit(data: Bytes, position: int, end: int) -> int:
    r"""The UTF-16 code unit of a \uXXXX escape, -1 if there is none here."""
    if position + 6 > end or data[position] != _BACKSLASH or data[position + 1] != _LOWER_U:
        return -1
    unit = 0
    for place in range(position + 2, position + 6):
        digit = _HEX[data[place]]
        if digit < 0:
            return -1
        unit = unit * 16 + digit
    return unit


@part
def _skip_digits(data: Bytes, position: int, end: int) -> int:
    while position < end and data[position] >= _ZERO and data[position] <= _NINE:
        position += 1
    return position


@part
def _check_number(data: Bytes, position: int, end: int) -> tuple[int, int]:
    if data[position] == _MINUS:
        position += 1
    whole = position
    position = _skip_digits(data, position, end)
    if position == whole:
        return position, _NUMBER
    if data[whole] == _ZERO and position > whole + 1:
        return whole, _NUMBER
    if position < end and data[position] == _POINT:
        fraction = position + 1
        position = _skip_digits(data, fraction, end)
        if position == fraction:
            return position, _NUMBER
    # Or-ing 32 makes an upper case letter lower.
    if position < end and data[position] | 32 == _LOWER_E:
        position += 1
        if position < end and (data[position] == _PLUS or data[position] == _MINUS):
            position += 1
        exponent = position
        position = _skip_digits(data, exponent, end)
        if position == exponent:
            return position, _NUMBER
    return position, _FINE


@kernel
def _cut(
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
            if kinds[row] > _NULL_KIND:
                return _UNFIT, row, starts[row], count
            continue
        end = ends[row] - 1
        position = _skip_blanks(data, starts[row] + 1, end, _NEWLINE)
        column = width if container == _OBJECT_KIND else -1
        while position < end:
            if container == _OBJECT_KIND:
                column, position = _find_name(data, position, end, (known, count, column))
            else:
                column += 1
            if column >= width:
                return _TOO_WIDE, row, position, count
            count = max(count, column + 1)
            part_kinds[column, row] = _KIND_OF[data[position]]
            part_starts[column, row] = position
            position = _skip_value(data, position, end)
            part_ends[column, row] = position
            position = _skip_blanks(data, position, end, _NEWLINE)
            # The comma between two parts; after the last one this steps onto the end.
            position = _skip_blanks(data, position + 1, end, _NEWLINE)
    return _FINE, 0, 0, count


@kernel
def _flatten(
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
        position = _skip_blanks(data, int(starts[row]) + 1, end, _NEWLINE)
        while position < end:
            start = position
            if container == _OBJECT_KIND:
                position = _skip_string(data, position + 1, end)
                if count < room:
                    _note(names, count, _STRING_KIND, start, position)
                position = min(_skip_blanks(data, position, end, _NEWLINE) + 1, end)
                position = start = _skip_blanks(data, position, end, _NEWLINE)
            position = _skip_value(data, start, end)
            if count < room:
                _note(parts, count, _KIND_OF[data[start]], start, position)
            count += 1
            position = _skip_blanks(data, position, end, _NEWLINE)
            # The comma between two parts; after the last one this steps onto the end.
            position = _skip_blanks(data, position + 1, end, _NEWLINE)
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
    position = min(_skip_blanks(data, position + size, end, _NEWLINE) + 1, end)
    return column, _skip_blanks(data, position, end, _NEWLINE)


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
    position = _skip_plain(data, position, end)
    while position < end:
        byte = data[position]
        if _STOPS[byte] == 0:
            position += 1
        elif byte == _QUOTE:
            return position + 1
        else:
            position += 2
    return end


@part
def _skip_value(data: Bytes, position: int, end: int) -> int:
    """The position after a checked value inside a container that closes at `end`."""
    kind = _KIND_OF[data[position]]
    position += 1
    if kind == _STRING_KIND:
        return _skip_string(data, position, end)
    if kind < _OBJECT_KIND:
        while position < end and data[position] > _SPACE and data[position] != _COMMA:
            position += 1
        return position
    depth = 1
    while position < end and depth > 0:
        mark = _MARKS[data[position]]
        position += 1
        if mark == 0:
            continue
        if mark == 2:
            position = _skip_string(data, position, end)
        else:
            depth += mark
    return position


@kernel
def _copy_texts(
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
        if kinds[row] == _STRING_KIND and not raw and end - start >= 2:
            size = _unescape(data, (start + 1, end - 1, last), target, size)
        elif kinds[row] > _NULL_KIND:
            size = _copy(data, (start, end, last), target, size)
    offsets[kinds.size] = size
    return size


@part
def _copy(data: Bytes, span: tuple[int, int, int], target: Bytes, size: int) -> int:
    """Write these bytes as they are; returns the target's new size.

    Whole words, because most cells are one or two. What the last one holds too much is
    overwritten by the next cell, and the target has a word to spare for the last cell.
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
def _unescape(data: Bytes, span: tuple[int, int, int], target: Bytes, size: int) -> int:
    """Write the checked string between these positions; returns the target's new size."""
    position, end, last = span
    # As in `_copy`, up to the first word with an escape in it.
    while position < end and position <= last:
        word = load_word(data, position)
        if _holds(word, _BACKSLASHES):
            break
        store_word(target, size, word)
        position += WORD_BYTES
        size += WORD_BYTES
    if position >= end:
        return size - (position - end)
    while position < end:
        if data[position] != _BACKSLASH:
            target[size] = data[position]
            size += 1
            position += 1
            continue
        point = _code_unit(data, position, end)
        if point < 0:
            target[size] = _UNESCAPED[data[position + 1]]
            size += 1
            position += 2
            continue
        position += 6
        if point >= 0xD800 and point <= 0xDFFF:
            point = 0x10000 + ((point - 0xD800) << 10) + _code_unit(data, position, end) - 0xDC00
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
