"""Compiled loops over arrays: their elements, found in the binary form and in the text form.

They answer with counts of damaged and of unfit values, because numba's exceptions carry no facts,
and write a zero where a value is not of the wanted form. No read leaves the buffer.
"""

from icestream.kernels import Bytes, int32, kernel, part, pointer
from icestream.sources.postgres.values.places import Places, Positions, SentAs

_NULL, _TEXT, _BINARY, _ = (int(form) for form in SentAs)
_OPEN, _CLOSE, _BRACKET, _EQUALS, _QUOTE, _BACKSLASH = (ord(mark) for mark in '{}[="\\')


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
