"""Cells agree with `json.loads` about what is JSON and what it says, and survive garbage."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from icestream.formats.json_cells import (
    Cells,
    Kind,
    MalformedJson,
    elements,
    entries,
    items,
    lines,
    members,
    values,
)

# Compiling the kernels falls into whichever example comes first.

ABSENT = object()


class Number(str):
    """A number as it was written."""


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A lone surrogate counts even where a later duplicate hides it.
    json.dumps(pairs, ensure_ascii=False).encode()
    return dict(pairs)


def loads(text: str) -> Any:
    """The oracle: `json.loads` without NaN and lone surrogates, digits kept as written."""
    value = json.loads(
        text,
        parse_int=Number,
        parse_float=Number,
        parse_constant=refuse,
        object_pairs_hook=distinct,
    )
    json.dumps(value, ensure_ascii=False).encode()
    return value


def kind_of(value: Any) -> Kind:
    if value is ABSENT:
        return Kind.MISSING
    if value is None:
        return Kind.NULL
    if isinstance(value, bool):
        return Kind.TRUE if value else Kind.FALSE
    if isinstance(value, Number):
        return Kind.NUMBER
    return {str: Kind.STRING, dict: Kind.OBJECT, list: Kind.ARRAY}[type(value)]


def assert_same(cells: Cells, values: list[Any]) -> None:
    """The cells say what the values say, all the way down."""
    assert [Kind(kind) for kind in cells.kinds] == [kind_of(value) for value in values]
    text, written = cells.text(), cells.json()
    text.validate(full=True)
    written.validate(full=True)
    for value, shown, raw in zip(values, text.to_pylist(), written.to_pylist(), strict=True):
        if value is None or value is ABSENT:
            assert shown is None and raw is None
            continue
        assert loads(raw) == value
        assert shown == (value if isinstance(value, str) else raw)
    assert_same_members(cells, values)
    assert_same_elements(cells, values)


def assert_same_members(cells: Cells, values: list[Any]) -> None:
    rows = [row for row, value in enumerate(values) if kind_of(value) in (0, 1, Kind.OBJECT)]
    objects = [values[row] if isinstance(values[row], dict) else {} for row in rows]
    columns = members(cells.take(np.array(rows, dtype=np.int64)))
    assert list(columns) == list(dict.fromkeys(name for row in objects for name in row))
    for name, column in columns.items():
        assert_same(column, [row.get(name, ABSENT) for row in objects])


def assert_same_elements(cells: Cells, values: list[Any]) -> None:
    rows = [row for row, value in enumerate(values) if kind_of(value) in (0, 1, Kind.ARRAY)]
    arrays = [values[row] if isinstance(values[row], list) else [] for row in rows]
    columns = elements(cells.take(np.array(rows, dtype=np.int64)))
    assert len(columns) == max(map(len, arrays), default=0)
    for place, column in enumerate(columns):
        assert_same(column, [row[place] if place < len(row) else ABSENT for row in arrays])


def assert_judged_alike(data: bytes) -> None:
    """The whole buffer is accepted, or refused in the same row, as by the oracle."""
    rows = [line for line in data.split(b"\n") if line.strip(b" \t\r")]
    values = []
    for row in rows:
        try:
            values.append(loads(row.decode()))
        except ValueError:
            break
    try:
        cells = lines(data)
    except MalformedJson as error:
        assert len(values) < len(rows)
        assert 0 <= error.offset <= len(data)
        if error.reason != "invalid UTF-8":
            assert error.row == len(values)
    else:
        assert len(values) == len(rows)
        assert_same(cells, values)


def between(opening: str, parts: list[str], closing: str) -> str:
    return opening + ",".join(parts) + closing


spaces = st.sampled_from(["", "", " ", "\t", " \r"])
numbers = st.from_regex(
    r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,3})?", fullmatch=True
)
plain = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), max_size=20
)
escapes = st.sampled_from([*map("\\".__add__, '"\\/bfnrt'), "\\u0000", "\\u00E9", "\\ud83d\\uDE00"])
strings = st.lists(plain | escapes, max_size=4).map(lambda pieces: '"' + "".join(pieces) + '"')
names = st.sampled_from(['"a"', '"b"', '"ab"', '"\\u0061"', '"a\\""', '""']) | strings
scalars = st.sampled_from(["null", "true", "false"]) | numbers | strings


def containers(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    padded = st.tuples(spaces, values, spaces).map("".join)
    named = st.tuples(spaces, names, spaces, st.just(":"), padded).map("".join)
    return st.one_of(
        st.lists(padded, max_size=5).map(lambda parts: between("[", parts, "]")),
        st.lists(named, max_size=5).map(lambda parts: between("{", parts, "}")),
        spaces.map(lambda space: between("[", [space], "]")),
        spaces.map(lambda space: between("{", [space], "}")),
    )


documents = st.recursive(scalars, containers, max_leaves=12)
endings = st.sampled_from(["\n", "\r\n", "\n\n", " \n\t\n"])
files = st.lists(st.tuples(spaces, documents, endings).map("".join), max_size=6).map("".join)
tokens = st.sampled_from(
    [
        *(mark.encode() for mark in '{}[],:"\\ \n0123456789-+.eEu'),
        *(b"null", b"true", b"false", b"nul", b"NaN", b'"a"', b'"a":', b'{"a":', b"[1,", b"\\u"),
        *(b"\\ud83d", b"\\ude00", b"0041", b"\xc3\xa9", b"\xc3", b"\xff", b"\0", b"\t", b"\r"),
    ]
)


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(files).encode())
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 3))
        data[start : start + size] = draw(tokens | st.just(b""))
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


@given(files)
def test_random_documents_mean_what_they_mean_to_json_loads(text):
    assert len(lines(text.encode())) == len([line for line in text.split("\n") if line.strip()])
    assert_judged_alike(text.encode())


@given(damaged_files())
def test_damaged_documents_are_refused_exactly_when_json_loads_refuses_them(data):
    assert_judged_alike(data)


@given(st.lists(tokens, max_size=30).map(b"".join))
def test_heaps_of_tokens_are_refused_exactly_when_json_loads_refuses_them(data):
    assert_judged_alike(data)


@given(st.binary(max_size=100))
def test_random_bytes_never_crash(data):
    assert_judged_alike(data)


def parsed(text: bytes | None) -> Any:
    """The oracle of `values`: what a text says, or that it is none."""
    if text is None:
        return ABSENT
    try:
        return loads(text.decode())
    except ValueError:
        return ValueError


broken_texts = st.binary(max_size=20) | st.lists(tokens, max_size=8).map(b"".join)
padded_texts = st.tuples(st.sampled_from(["", "\n", " \r\n"]), documents).map("\n".join)
some_texts = st.lists(
    st.none() | st.one_of(documents, padded_texts).map(str.encode) | broken_texts, max_size=8
)


@given(some_texts, st.integers(0, 8), st.integers(0, 8))
def test_each_text_is_rejected_or_means_what_it_means_to_json_loads(rows, start, size):
    part = rows[start : start + size]
    cells, rejected = values(pa.array(rows, pa.binary()).slice(start, size))
    said = [parsed(text) for text in part]
    assert list(rejected) == [row for row, value in enumerate(said) if value is ValueError]
    assert_same(cells, [ABSENT if value is ValueError else value for value in said])


@given(st.binary(max_size=60), st.data())
def test_cells_over_a_buffer_that_nobody_checked_never_crash(data, draws):
    rows = draws.draw(st.integers(0, 4))
    spans = st.tuples(st.integers(0, len(data)), st.integers(0, len(data))).map(sorted)
    starts, ends = (
        np.array(draws.draw(st.lists(spans, min_size=rows, max_size=rows)), dtype=np.int32)
        .reshape(rows, 2)
        .T
    )
    kind = draws.draw(st.sampled_from(Kind))
    array = np.frombuffer(data, dtype=np.uint8)
    cells = Cells(
        data=array,
        kinds=np.full(rows, kind, dtype=np.uint8),
        starts=np.ascontiguousarray(starts),
        ends=np.ascontiguousarray(ends),
    )
    cells.text()
    cells.json()
    for cut in (members, elements, items, entries):
        try:
            cut(cells)
        except (MalformedJson, UnicodeDecodeError):
            continue
