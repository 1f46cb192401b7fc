"""The grammar of JSON, compiled: kernels that check bytes nobody has looked at.

`scan_lines` and `scan_values` check texts down to their innermost value, and note what each is and
where it lies. What they let through is safe for `json_cutting`, which checks nothing again. They
answer with codes, of which `REASONS` and `TEXT_REASONS` tell people. No read leaves the buffer.
"""

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from icestream.kernels import WORD_BYTES, Bytes, kernel, load_word, part, pointer
from icestream.kernels.arrays import Positions
from icestream.kernels.texts import HEX, is_utf8

# Nesting that no changefeed comes near, and that keeps the scanner's stack in one small array.
DEPTH_MAX = 256

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


# What a kernel found wrong. Codes instead of exceptions, because numba's exceptions carry no facts.
FINE, _ENDED, _TRAILING, _NO_VALUE, _NO_NAME, _NO_COLON, _NO_COMMA = range(7)
_UNTERMINATED, _CONTROL, _ESCAPE, _SURROGATE, _NUMBER, _TOO_DEEP, TOO_WIDE, UNFIT = range(7, 15)
_EMPTY, _NOT_UTF8 = range(15, 17)
REASONS = {
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
TEXT_REASONS = REASONS | {
    _ENDED: "text ends inside a value",
    _EMPTY: "empty text",
    _NOT_UTF8: "invalid UTF-8",
}

QUOTE, BACKSLASH, COMMA, _COLON, NEWLINE = (ord(mark) for mark in '"\\,:\n')
_ZERO, _NINE, _MINUS, _PLUS, _POINT = (ord(mark) for mark in "09-+.")
_CLOSE_BRACE, _LOWER_E, _LOWER_U = (ord(mark) for mark in "}eu")
SPACE, _TAB, _RETURN = (ord(mark) for mark in " \t\r")
NULL_KIND, _NUMBER_KIND = int(Kind.NULL), int(Kind.NUMBER)
STRING_KIND, OBJECT_KIND = int(Kind.STRING), int(Kind.OBJECT)


def _table(entries: Mapping[str, int], otherwise: int) -> npt.NDArray[np.int16]:
    table = np.full(256, otherwise, dtype=np.int16)
    for mark, entry in entries.items():
        table[ord(mark)] = entry
    return table


KIND_OF = _table(
    dict.fromkeys("-0123456789", Kind.NUMBER)
    | {"n": Kind.NULL, "f": Kind.FALSE, "t": Kind.TRUE}
    | {'"': Kind.STRING, "{": Kind.OBJECT, "[": Kind.ARRAY},
    otherwise=Kind.MISSING,
)
UNESCAPED = _table(
    {mark: ord(meant) for mark, meant in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)},
    otherwise=-1,
)
_LITERALS = np.frombuffer(b"null\0falsetrue\0", dtype=np.uint8).reshape(3, 5)
# Where a scan through a string has to look twice.
STOPS = _table(dict.fromkeys([*map(chr, range(32)), '"', "\\"], 1), otherwise=0)
# Where a skip through checked containers has to look twice.
MARKS = _table({'"': 2, "{": 1, "[": 1, "}": -1, "]": -1}, otherwise=0)


# One value in all eight bytes of a word.
_ONES, _HIGHS, _SPACES, _QUOTES, BACKSLASHES = (
    np.uint64(int.from_bytes(bytes([byte] * WORD_BYTES)))
    for byte in (0x01, 0x80, SPACE, QUOTE, BACKSLASH)
)


@kernel
def count_lines(data: Bytes) -> int:
    """How many lines there are, the last one whether it has a newline or not."""
    count = 1
    for byte in data:
        count += byte == NEWLINE
    return count


@part
def skip_blanks(data: Bytes, position: int, end: int, newline: int) -> int:
    """The next byte that is not blank.

    A newline is blank where it is given as such; where it ends the row, a space is given instead.
    """
    while position < end:
        byte = data[position]
        if byte != SPACE and byte != _TAB and byte != _RETURN and byte != newline:
            break
        position += 1
    return position


@kernel
def scan_lines(array: Bytes, cells: Spans, brackets: Bytes) -> tuple[int, int, int]:
    """Check all lines and note their cells; returns code, rows so far and position."""
    kinds, starts, ends = cells
    data, end = pointer(array), array.size
    closers = pointer(brackets)
    position = row = 0
    while True:
        position = skip_blanks(data, position, end, SPACE)
        if position == end:
            return FINE, row, position
        if data[position] == NEWLINE:
            position += 1
            continue
        kinds[row] = KIND_OF[data[position]]
        starts[row] = position
        position, code = _check_value(data, position, end, closers, SPACE)
        if code == FINE:
            ends[row] = position
            position = skip_blanks(data, position, end, SPACE)
            if position < end and data[position] != NEWLINE:
                code = _TRAILING
        elif position >= end or data[position] == NEWLINE:
            # Most of all a file cut short, whatever token the cut went through.
            code = _UNTERMINATED if code == _UNTERMINATED else _ENDED
        if code != FINE:
            return code, row, position
        row += 1


@kernel
def scan_values(
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
        if not valid[row] or faults[row] != FINE:
            continue
        end = int(offsets[row + 1])
        start = skip_blanks(data, int(offsets[row]), end, NEWLINE)
        if start == end:
            faults[row] = _EMPTY
            continue
        position, code = _check_value(data, start, end, closers, NEWLINE)
        after = skip_blanks(data, position, end, NEWLINE)
        if code == FINE and after == end:
            kinds[row] = KIND_OF[data[start]]
            starts[row] = start
            ends[row] = position
        elif code == FINE:
            faults[row] = _TRAILING
        elif position >= end:
            # Most of all a text cut short, whatever token the cut went through.
            faults[row] = _UNTERMINATED if code == _UNTERMINATED else _ENDED
        else:
            # What ends a line is just another control character here.
            faults[row] = _CONTROL if code == _UNTERMINATED else code


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
            if code != FINE:
                return position, code
        kind = KIND_OF[data[position]] if position < end else 0
        if kind < OBJECT_KIND:
            position, code = _check_scalar(data, position, end, kind)
            if code != FINE:
                return position, code
        else:
            if depth == DEPTH_MAX:
                return position, _TOO_DEEP
            # In ASCII both closing brackets come two places after their opening ones.
            closers[depth] = data[position] + 2
            depth += 1
            position = skip_blanks(data, position + 1, end, newline)
            if position >= end or data[position] != closers[depth - 1]:
                named = closers[depth - 1] == _CLOSE_BRACE
                continue
            position += 1
            depth -= 1
        while depth > 0:
            position = skip_blanks(data, position, end, newline)
            if position >= end or data[position] != closers[depth - 1]:
                break
            position += 1
            depth -= 1
        if depth == 0:
            return position, FINE
        if position >= end or data[position] != COMMA:
            return position, _NO_COMMA
        position = skip_blanks(data, position + 1, end, newline)
        named = closers[depth - 1] == _CLOSE_BRACE


@part
def _check_name(data: Bytes, position: int, end: int, newline: int) -> tuple[int, int]:
    """Check a member name and its colon; returns the position of the value."""
    if position >= end or data[position] != QUOTE:
        return position, _NO_NAME
    position, code = _check_string(data, position + 1, end)
    if code != FINE:
        return position, code
    position = skip_blanks(data, position, end, newline)
    if position >= end or data[position] != _COLON:
        return position, _NO_COLON
    return skip_blanks(data, position + 1, end, newline), FINE


@part
def _check_scalar(data: Bytes, position: int, end: int, kind: int) -> tuple[int, int]:
    if kind == STRING_KIND:
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
    return position, FINE


@part
def holds(word: np.uint64, mark: np.uint64) -> np.uint64:
    """Not zero if a byte of the word is the mark, which is given in all bytes."""
    difference = word ^ mark
    return (difference - _ONES) & ~difference & _HIGHS


@part
def skip_plain(data: Bytes, position: int, end: int) -> int:
    """Up to the first word with a byte in it where a string ends or needs a closer look."""
    while position + WORD_BYTES <= end:
        word = load_word(data, position)
        controls = (word - _SPACES) & ~word & _HIGHS
        if controls | holds(word, _QUOTES) | holds(word, BACKSLASHES):
            break
        position += WORD_BYTES
    return position


@part
def _check_string(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Check the rest of a string whose opening quote has been read."""
    position = skip_plain(data, position, end)
    while position < end:
        byte = data[position]
        if STOPS[byte] == 0:
            position += 1
        elif byte == QUOTE:
            return position + 1, FINE
        elif byte == BACKSLASH:
            position, code = _check_escape(data, position, end)
            if code != FINE:
                return position, code
        else:
            return position, _UNTERMINATED if byte == NEWLINE else _CONTROL
    return position, _UNTERMINATED


@part
def _check_escape(data: Bytes, position: int, end: int) -> tuple[int, int]:
    if position + 1 >= end or data[position + 1] == NEWLINE:
        return position + 1, _UNTERMINATED
    if data[position + 1] != _LOWER_U:
        if UNESCAPED[data[position + 1]] < 0:
            return position, _ESCAPE
        return position + 2, FINE
    unit = code_unit(data, position, end)
    if unit < 0:
        return position, _ESCAPE
    if unit < 0xD800 or unit > 0xDFFF:
        return position + 6, FINE
    low = code_unit(data, position + 6, end)
    if unit > 0xDBFF or low < 0xDC00 or low > 0xDFFF:
        return position, _SURROGATE
    return position + 12, FINE


@part
def code_unit(data: Bytes, position: int, end: int) -> int:
    r"""The UTF-16 code unit of a \uXXXX escape, -1 if there is none here."""
    if position + 6 > end or data[position] != BACKSLASH or data[position + 1] != _LOWER_U:
        return -1
    unit = 0
    for place in range(position + 2, position + 6):
        digit = HEX[data[place]]
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
    return position, FINE


@kernel
def find_invalid_utf8(
    array: Bytes, offsets: Positions, valid: npt.NDArray[np.bool_], faults: Bytes
) -> None:
    """Note which texts are not UTF-8."""
    data = pointer(array)
    for row in range(valid.size):
        if valid[row] and not is_utf8(data, int(offsets[row]), int(offsets[row + 1])):
            faults[row] = _NOT_UTF8
