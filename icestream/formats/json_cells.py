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

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from icestream.formats.json_cutting import copy_texts, cut, flatten, number_texts
from icestream.formats.json_grammar import (
    DEPTH_MAX,
    FINE,
    REASONS,
    TEXT_REASONS,
    TOO_WIDE,
    UNFIT,
    Kind,
    Spans,
    count_lines,
    find_invalid_utf8,
    scan_lines,
    scan_values,
)
from icestream.kernels import WORD_BYTES, Bytes
from icestream.kernels.arrays import BUFFER_BYTES_MAX, Positions, frozen, texts_of, validity

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

# Every name costs nine bytes per row; a feed with more names than this has data for names.
WIDTH_MAX = 16_384
# Texts that repeat over long runs of rows have few distinct ones; more are not told apart.
DISTINCT_MAX = 1024


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
            data, shift = frozen(np.concatenate([self.data, other.data])), self.data.size
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


def lines(data: bytes | memoryview | pa.Buffer) -> Cells:
    """Each line that is not blank as one cell, checked to its innermost value."""
    array = np.frombuffer(data, dtype=np.uint8)
    if array.size > BUFFER_BYTES_MAX:
        raise ValueError(f"cannot index {array.size} bytes of JSON, at most {BUFFER_BYTES_MAX}")
    _check_utf8(frozen(array))
    rows_max = int(count_lines(array))
    found = (
        np.empty(rows_max, dtype=np.uint8),
        np.empty(rows_max, dtype=np.int32),
        np.empty(rows_max, dtype=np.int32),
    )
    closers = np.empty(DEPTH_MAX, dtype=np.uint8)
    code, row, offset = scan_lines(array, found, closers)
    if code != FINE:
        raise MalformedJson(REASONS[code], row, offset)
    kinds, starts, ends = found
    return Cells(data=array, kinds=kinds[:row], starts=starts[:row], ends=ends[:row])


def values(array: pa.Array) -> tuple[Cells, dict[int, str]]:
    """Each text of a binary or string array as one cell, and the rows that are none, with why.

    A text holds one value, with whatever JSON counts as blank around and inside it, newlines too.
    Rows without a text and rows that are rejected are `MISSING`; one broken text costs no other.
    Cells point into the array's own buffer. Where cells of two arrays are to be mixed, let them be
    one array (`pa.concat_arrays`), whose cells are then taken apart.
    """
    data, offsets, valid = texts_of(array)
    rows = len(valid)
    found = (
        np.zeros(rows, dtype=np.uint8),
        np.zeros(rows, dtype=np.int32),
        np.zeros(rows, dtype=np.int32),
    )
    faults = np.zeros(rows, dtype=np.uint8)
    if not _whole_utf8(data):
        find_invalid_utf8(data, offsets, valid, faults)
    closers = np.empty(DEPTH_MAX, dtype=np.uint8)
    scan_values(data, offsets, valid, found, closers, faults)
    kinds, starts, ends = found
    broken = np.flatnonzero(faults)
    reasons = [TEXT_REASONS[code] for code in faults[broken].tolist()]
    rejected = dict(zip(broken.tolist(), reasons, strict=True))
    return Cells(data=data, kinds=kinds, starts=starts, ends=ends), rejected


def invalid_utf8(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Which texts of a binary array are not UTF-8."""
    data, offsets, valid = texts_of(array)
    faults = np.zeros(len(valid), dtype=np.uint8)
    # Unlike JSON, a text may end inside a character that the next one completes.
    find_invalid_utf8(data, offsets, valid, faults)
    return np.asarray(faults != FINE)


def distinct(cells: Cells) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Which text each cell has, and for each such text a row that has it.

    Meant for texts that repeat over long runs of rows. Texts are numbered in the order first seen;
    null and missing cells have -1, and so has what comes after the first `DISTINCT_MAX` texts.
    """
    numbers = np.full(len(cells), -1, dtype=np.int32)
    firsts = np.zeros(DISTINCT_MAX, dtype=np.int64)
    count = number_texts(cells.data, (cells.kinds, cells.starts, cells.ends), numbers, firsts)
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
    count = flatten(cells.data, spans, int(container), offsets, nothing, nothing)
    names, parts = _empty_spans(count), _empty_spans(count)
    flatten(cells.data, spans, int(container), offsets, names, parts)
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
    flatten(cells.data, spans, int(Kind.OBJECT), offsets, nothing, nothing)
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
        code, row, offset, count = cut(cells.data, spans, int(container), names, parts)
        if code != TOO_WIDE or width >= width_max:
            break
        width = min(2 * width, width_max)
    if code == TOO_WIDE:
        raise TooWide(f"more than {width_max} distinct member names or elements", row, offset)
    if code == UNFIT:
        article = "an object" if container is Kind.OBJECT else "an array"
        raise MalformedJson(f"expected {article}", row, offset)
    if code != FINE:
        raise MalformedJson(REASONS[code], row, offset)
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
    size = copy_texts(
        cells.data,
        (cells.kinds, cells.starts, cells.ends),
        raw,
        np.frombuffer(offsets, dtype=np.int32),
        np.frombuffer(target, dtype=np.uint8),
    )
    absent = rows - int(np.count_nonzero(present))
    content = target.slice(0, size)
    return pa.StringArray.from_buffers(rows, offsets, content, validity(present), absent)


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
