"""JSON lines become columns exactly, and what is not JSON is refused with its place."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from icestream.formats import json_cells
from icestream.formats.json_cells import (
    Cells,
    Kind,
    MalformedJson,
    distinct,
    elements,
    entries,
    invalid_utf8,
    items,
    lines,
    members,
    values,
)
from icestream.formats.json_cutting import copy_texts, cut
from icestream.formats.json_grammar import count_lines, scan_lines

# Lines that CockroachDB v22.2.10 sent.
WRAPPED = (
    rb'{"after": {"amt": 1.50, "id": 1, "name": "a"}, "before": null, "key": [1], '
    rb'"mvcc_timestamp": "1794771121610841838.0000000000", "topic": "t", '
    rb'"updated": "1794771121629977500.0000000000"}'
)
DELETED = (
    rb'{"after": null, "before": {"amt": null, "id": 2, "name": "b"}, "key": [2], '
    rb'"mvcc_timestamp": "1794771125633127004.0000000000", "topic": "t", '
    rb'"updated": "1794771125633127004.0000000000"}'
)
RESOLVED = rb'{"resolved":"1794771197409527775.2147483647"}'
BARE = (
    rb'{"__crdb__": {"key": [30], "mvcc_timestamp": "1794771127132020265.0000000000", '
    rb'"updated": "1794771154697382785.0000000000"}, "amt": 3.00, "id": 30, "name": "x2"}'
)
TYPED = (
    rb'{"after": {"arr": [1, null, 3], "b": true, "by": "\\x00ff10", "d": 123.4500, "f": 1.5, '
    rb'"i2": -5, "i8": 9223372036854775807, "j": {"a": null, "b": [1, "x"]}}}'
)
NOT_FINITE = (
    rb'{"after": {"arr": null, "b": null, "by": null, "d": "Infinity", "f": "NaN", '
    rb'"i2": null, "i8": null, "j": null}}'
)


def cells_of(*texts: str) -> Cells:
    return lines("\n".join(texts).encode())


def texts(cells: Cells) -> list[str | None]:
    array = cells.text()
    array.validate(full=True)
    return array.to_pylist()


def jsons(cells: Cells) -> list[str | None]:
    array = cells.json()
    array.validate(full=True)
    return array.to_pylist()


def kinds(cells: Cells) -> list[Kind]:
    return [Kind(kind) for kind in cells.kinds]


def refused(data: bytes) -> MalformedJson:
    with pytest.raises(MalformedJson) as caught:
        lines(data)
    return caught.value


def test_a_wrapped_changefeed_becomes_columns():
    top = members(lines(b"\n".join([WRAPPED, DELETED, RESOLVED]) + b"\n"))
    assert list(top) == [
        *("after", "before", "key", "mvcc_timestamp", "topic", "updated", "resolved")
    ]
    assert kinds(top["after"]) == [Kind.OBJECT, Kind.NULL, Kind.MISSING]
    assert kinds(top["before"]) == [Kind.NULL, Kind.OBJECT, Kind.MISSING]
    after = members(top["after"])
    assert {name: texts(column) for name, column in after.items()} == {
        "amt": ["1.50", None, None],
        "id": ["1", None, None],
        "name": ["a", None, None],
    }
    assert kinds(members(top["before"])["amt"]) == [Kind.MISSING, Kind.NULL, Kind.MISSING]
    assert [texts(column) for column in elements(top["key"])] == [["1", "2", None]]


def test_an_hlc_keeps_its_ten_logical_digits():
    top = members(lines(RESOLVED + b"\n" + WRAPPED))
    assert texts(top["resolved"]) == ["1794771197409527775.2147483647", None]
    assert texts(top["updated"]) == [None, "1794771121629977500.0000000000"]


def test_a_bare_changefeed_has_its_columns_beside_the_metadata():
    top = members(lines(BARE))
    assert {name: texts(top[name]) for name in ("amt", "id", "name")} == {
        "amt": ["3.00"],
        "id": ["30"],
        "name": ["x2"],
    }
    assert texts(elements(members(top["__crdb__"])["key"])[0]) == ["30"]


def test_a_column_may_hold_numbers_in_one_row_and_strings_in_another():
    after = members(members(lines(TYPED + b"\n" + NOT_FINITE))["after"])
    assert kinds(after["d"]) == [Kind.NUMBER, Kind.STRING]
    assert texts(after["d"]) == ["123.4500", "Infinity"]
    assert texts(after["f"]) == ["1.5", "NaN"]
    assert texts(after["b"]) == ["true", None]
    assert texts(after["by"]) == ["\\x00ff10", None]
    assert texts(after["i8"]) == ["9223372036854775807", None]


def test_nested_values_come_out_as_they_were_written():
    after = members(members(lines(TYPED))["after"])
    assert texts(after["j"]) == ['{"a": null, "b": [1, "x"]}']
    assert texts(after["arr"]) == ["[1, null, 3]"]
    assert [kinds(column) for column in elements(after["arr"])] == [
        [Kind.NUMBER],
        [Kind.NULL],
        [Kind.NUMBER],
    ]


@pytest.mark.parametrize(
    "number",
    ["0", "-0", "1.50", "1e5", "1E+5", "1.0e-07", "123456789012345678901234567890.10", "-0.0"],
)
def test_numbers_keep_their_digits(number):
    cells = cells_of(number, f" {number} ", f'{{"a":{number}}}', f"[{number}]")
    assert texts(cells)[:2] == [number, number]
    assert texts(members(cells.take(np.array([2])))["a"]) == [number]
    assert texts(elements(cells.take(np.array([3])))[0]) == [number]


@pytest.mark.parametrize(
    "number",
    [
        "01",
        "-01",
        "1.",
        ".5",
        "+1",
        "-",
        "1e",
        "1e+",
        "1.e1",
        "--1",
        "0x1",
        "1_0",
        "NaN",
        "Infinity",
    ],
)
@pytest.mark.parametrize("frame", ["%s", '{"a": %s}', '{"a": [1, {"b": %s}]}', "[%s, 1]"])
def test_numbers_outside_the_grammar_are_refused(number, frame):
    refused((frame % number).encode())


def test_all_escapes_are_undone_in_text_and_kept_in_json():
    written = r'"\" \\ \/ \b \f \n \r \t \u0041 \u00e9 \u20AC \ud83d\ude00 \u0000 end"'
    cells = cells_of(written)
    assert texts(cells) == ['" \\ / \b \f \n \r \t A é € 😀 \0 end']
    assert jsons(cells) == [written]


@pytest.mark.parametrize("length", range(20))
def test_an_escape_is_found_at_any_place_in_a_string(length):
    for rest in range(20):
        cells = cells_of(f'"{"x" * length}\\n{"y" * rest}"')
        assert texts(cells) == ["x" * length + "\n" + "y" * rest]


@pytest.mark.parametrize("place", range(20))
def test_a_control_character_is_found_at_any_place_in_a_string(place):
    text = "x" * place + "%s" + "y" * (19 - place)
    assert refused(f'"{text % chr(0)}"'.encode()).offset == place + 1
    assert refused(f'"{text % chr(31)}"'.encode()).offset == place + 1
    assert texts(cells_of(f'"{text % chr(32)}"', f'"{text % chr(127)}"')) == [
        text % chr(32),
        text % chr(127),
    ]


@pytest.mark.parametrize("point", [0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF])
def test_escaped_code_points_at_the_edges_of_utf8_lengths_come_out_right(point):
    assert texts(cells_of(f'"\\u{point:04x}"')) == [chr(point)]


@pytest.mark.parametrize("point", [0x10000, 0x103FF, 0x10FC00, 0x10FFFF])
def test_surrogate_pairs_become_one_code_point(point):
    assert texts(cells_of(json.dumps(chr(point)))) == [chr(point)]


def test_unicode_passes_through_names_and_values():
    columns = members(cells_of('{"größe": "日本語", "😀": "é"}'))
    assert {name: texts(column) for name, column in columns.items()} == {
        "größe": ["日本語"],
        "😀": ["é"],
    }


def test_json_keeps_quotes_and_has_null_for_null_and_missing():
    columns = members(cells_of('{"a": "x", "b": null}', '{"a": 1}'))
    assert jsons(columns["a"]) == ['"x"', "1"]
    assert jsons(columns["b"]) == [None, None]
    assert kinds(columns["b"]) == [Kind.NULL, Kind.MISSING]


def test_an_empty_string_is_not_null():
    column = members(cells_of('{"": ""}', "{}"))[""]
    assert texts(column) == ["", None]
    assert column.text().null_count == 1


def test_empty_containers_have_no_columns():
    assert members(cells_of("{}", "{ }", "null")) == {}
    assert elements(cells_of("[]", "[ ]", "null")) == []


def test_no_input_has_no_rows():
    for data in (b"", b"\n", b" \r\n\t\n"):
        cells = lines(data)
        assert len(cells) == 0
        assert members(cells) == {}
        assert texts(cells) == []


def test_blank_lines_and_carriage_returns_are_tolerated():
    cells = lines(b'\r\n{"a": 1}\r\n\n  \n\t{"a": 2} \r\n{"a":\t3\r}')
    assert texts(members(cells)["a"]) == ["1", "2", "3"]


@pytest.mark.parametrize(
    "given", [bytes, memoryview, pa.py_buffer, lambda data: memoryview(bytearray(data))]
)
def test_any_kind_of_buffer_will_do(given):
    assert texts(members(lines(given(WRAPPED)))["topic"]) == ["t"]


def test_members_may_change_their_order_and_come_and_go():
    columns = members(
        cells_of(
            '{"a": 1, "b": 2}', '{"b": 3, "a": 4}', '{"c": 5}', '{"b": 6}', '{"ab": 7, "a": 8}'
        )
    )
    assert {name: texts(column) for name, column in columns.items()} == {
        "a": ["1", "4", None, None, "8"],
        "b": ["2", "3", None, "6", None],
        "c": [None, None, "5", None, None],
        "ab": [None, None, None, None, "7"],
    }
    assert list(columns) == ["a", "b", "c", "ab"]


def test_the_last_of_duplicate_names_wins():
    assert texts(members(cells_of('{"a": 1, "b": 2, "a": 3}'))["a"]) == ["3"]


def test_the_last_of_duplicate_names_wins_however_it_is_spelled():
    columns = members(
        cells_of(r'{"a": 1, "\u0061": 2}', r'{"\u0061": 3, "a": 4}', r'{"\u0061": 5}', '{"a": 6}')
    )
    assert list(columns) == ["a"]
    assert texts(columns["a"]) == ["2", "4", "5", "6"]


def test_names_with_quotes_and_brackets_are_told_apart():
    columns = members(cells_of(r'{"a\"": 1, "a": 2, "}{][,:": 3, "a\\": 4}'))
    assert {name: texts(column) for name, column in columns.items()} == {
        'a"': ["1"],
        "a": ["2"],
        "}{][,:": ["3"],
        "a\\": ["4"],
    }


def test_brackets_inside_nested_strings_close_nothing():
    columns = members(cells_of(r'{"a": {"x": "}]\"}"}, "b": [["]", "[{\\"]], "c": 1}'))
    assert texts(columns["a"]) == [r'{"x": "}]\"}"}']
    assert texts(columns["b"]) == [r'[["]", "[{\\"]]']
    assert texts(columns["c"]) == ["1"]


def test_more_names_than_first_made_room_for_are_all_found():
    rows = [{f"column {number}": number for number in range(first, 300)} for first in (290, 0, 7)]
    columns = members(lines("\n".join(map(json.dumps, rows)).encode()))
    assert len(columns) == 300
    for number in range(300):
        expected = [str(number) if number >= first else None for first in (290, 0, 7)]
        assert texts(columns[f"column {number}"]) == expected


def test_elements_of_arrays_of_different_lengths_are_missing_where_shorter():
    columns = elements(cells_of('[1, "a"]', "[]", "null", "[2,[3],{}]"))
    assert [texts(column) for column in columns] == [
        ["1", None, None, "2"],
        ["a", None, None, "[3]"],
        [None, None, None, "{}"],
    ]
    assert kinds(columns[1]) == [Kind.STRING, Kind.MISSING, Kind.MISSING, Kind.ARRAY]


def test_long_arrays_are_cut_completely():
    columns = elements(lines(json.dumps(list(range(1000))).encode()))
    assert [texts(column) for column in columns] == [[str(number)] for number in range(1000)]


def test_take_picks_repeats_and_reorders_rows():
    column = members(cells_of('{"a": "x"}', "{}", '{"a": 3}'))["a"]
    taken = column.take(np.array([2, 0, 0, 1]))
    assert texts(taken) == ["3", "x", "x", None]
    assert texts(column.take(np.array([], dtype=np.int64))) == []


def test_members_of_missing_rows_are_missing():
    inner = members(members(cells_of('{"a": {"b": 1}}', "{}", '{"a": null}'))["a"])["b"]
    assert kinds(inner) == [Kind.NUMBER, Kind.MISSING, Kind.MISSING]


@pytest.mark.parametrize(
    ("line", "reason", "offset"),
    [
        ('{"a": 1', "line ends inside a value", 7),
        ('{"a": ', "line ends inside a value", 6),
        ('{"a"', "line ends inside a value", 4),
        ("[1, ", "line ends inside a value", 4),
        ('{"a": tru', "line ends inside a value", 9),
        ("-", "line ends inside a value", 1),
        ('{"a": "x', "unterminated string", 8),
        ('"\\', "unterminated string", 2),
        ("{} {}", "unexpected text after the value", 3),
        ("1 2", "unexpected text after the value", 2),
        ("{}]", "unexpected text after the value", 2),
        ("nul1", "expected a value", 3),
        ("True", "expected a value", 0),
        ("[1,]", "expected a value", 3),
        ('{"a": }', "expected a value", 6),
        ("\ufeff{}", "expected a value", 0),
        ("{1: 2}", "expected a member name in quotes", 1),
        ('{"a": 1,}', "expected a member name in quotes", 8),
        ('{"a" 1}', "expected a colon after the member name", 5),
        ("[1 2]", "expected a comma or the closing bracket", 3),
        ('{"a": [1}', "expected a comma or the closing bracket", 8),
        ('"a\tb"', "raw control character in a string", 2),
        (r'"\x41"', "invalid escape in a string", 1),
        (r'"\u00g0"', "invalid escape in a string", 1),
        (r'"\u00"', "invalid escape in a string", 1),
        (r'"\ud800"', "unmatched surrogate in a string", 1),
        (r'"\ud800\u0041"', "unmatched surrogate in a string", 1),
        (r'"\udc00\udc00"', "unmatched surrogate in a string", 1),
        (r'"\udc00\ud800"', "unmatched surrogate in a string", 1),
        (r'{"\ud800": 1}', "unmatched surrogate in a string", 2),
        ("01", "invalid number", 0),
        ("1.x", "invalid number", 2),
    ],
)
def test_a_fault_is_reported_with_its_reason_row_and_byte(line, reason, offset):
    before = b'{"a": 1}\n\n[]\r\n'
    error = refused(before + line.encode() + b"\n" + b"{}\n")
    assert error.reason == reason
    assert (error.row, error.offset) == (2, len(before) + offset)
    assert str(error) == f"{reason} in row 2 at byte {len(before) + offset}"
    # The same at the end of a file without a newline.
    assert refused(before + line.encode()).reason == reason


def test_a_fault_deep_inside_a_value_that_is_never_descended_into_is_found():
    refused(b'{"a": {"b": [1, {"c": [01]}]}}')
    refused(b'{"a": {"b": [1, {"c": "\\q"}]}}')


def test_every_cut_through_a_file_is_noticed():
    data = WRAPPED + b"\n" + TYPED
    for size in range(len(WRAPPED) + 2, len(data)):
        assert refused(data[:size]).row == 1


def test_text_that_is_not_utf8_is_refused_with_its_place():
    for wrong in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80"):
        error = refused(b'{}\n \n{"a": "x' + wrong + b'"}\n')
        assert (error.reason, error.row, error.offset) == ("invalid UTF-8", 1, 13)


def test_nesting_up_to_the_limit_is_fine_and_beyond_it_is_refused():
    assert len(lines(b"[" * 256 + b"]" * 256)) == 1
    error = refused(b"[" * 257 + b"]" * 257)
    assert (error.reason, error.offset) == ("more than 256 levels of nesting", 256)
    assert refused(b'{"a":' * 300).reason == "more than 256 levels of nesting"


def test_a_kind_that_does_not_fit_is_refused():
    with pytest.raises(MalformedJson, match="expected an object in row 1 at byte 3"):
        members(cells_of("{}", "[1]"))
    with pytest.raises(MalformedJson, match="expected an array in row 0 at byte 0"):
        elements(cells_of('"x"'))


def test_more_names_than_any_table_has_are_refused():
    rows = (f'{{"name {number}": 1}}' for number in range(16_385))
    with pytest.raises(MalformedJson, match="more than 16384 distinct member names"):
        members(cells_of("{" + ",".join(row[1:-1] for row in rows) + "}"))


def test_a_buffer_of_two_gibibytes_is_refused():
    with pytest.raises(ValueError, match="cannot index 2147483648 bytes"):
        # Pages of zeros that are never touched take no memory.
        lines(memoryview(np.zeros(2**31, dtype=np.uint8)))


def test_more_text_than_an_arrow_array_holds_is_refused():
    cells = lines(b'"' + b"x" * 2**20 + b'"')
    with pytest.raises(ValueError, match="in one Arrow array"):
        cells.take(np.zeros(2**11, dtype=np.int64)).text()


def test_cells_cannot_point_outside_their_buffer():
    cells = cells_of("1")
    for starts, ends in (([0], [2]), ([-1], [1]), ([1], [0]), ([0, 0], [1, 1])):
        with pytest.raises(ValueError, match="cells"):
            Cells(
                data=cells.data,
                kinds=cells.kinds,
                starts=np.array(starts, dtype=np.int32),
                ends=np.array(ends, dtype=np.int32),
            )


def test_an_error_survives_pickling():
    error = refused(b"{")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "line ends inside a value in row 0 at byte 1"
    assert (again.row, again.offset) == (0, 1)


def test_kernels_are_kept_on_disk_for_the_next_process():
    members(cells_of('{"a": 1}'))["a"].text()
    for kernel in (count_lines, scan_lines, cut, copy_texts):
        name = kernel.__name__
        assert len(kernel.signatures) == 1, f"{name} was compiled for more than one kind of array"
        kept = f"{kernel.__module__.rpartition('.')[2]}.{name}-*.nbi"
        assert list(Path(kernel.stats.cache_path).glob(kept))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty text"),
        (b" \n\t", "empty text"),
        (b"{}{}", "unexpected text after the value"),
        (b"1 2", "unexpected text after the value"),
        (b'{"a":', "text ends inside a value"),
        (b'{"a', "unterminated string"),
        (b'"a\nb"', "raw control character in a string"),
        (b'"\xff"', "invalid UTF-8"),
        (b'"\xc3"', "invalid UTF-8"),
        (b'"\xed\xa0\x80"', "invalid UTF-8"),
        (b'"\xc0\xaf"', "invalid UTF-8"),
        (b"nope", "expected a value"),
        (b"01", "invalid number"),
        (b"\x00", "expected a value"),
    ],
)
def test_a_broken_text_is_rejected_and_costs_no_other(text, reason):
    around = [b'{"a": 1}', text, None, b'"\xc3\xa9"', text]
    cells, rejected = values(pa.array(around, pa.binary()))
    assert rejected == {1: reason, 4: reason}
    kept = [Kind.OBJECT, Kind.MISSING, Kind.MISSING, Kind.STRING, Kind.MISSING]
    assert kinds(cells) == kept
    assert texts(cells) == ['{"a": 1}', None, None, "é", None]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.binary_view()])
def test_values_of_any_slice_of_any_array_are_the_same(kind):
    whole = pa.array([b"[0]", b"not", None, b'\n{"a":\n1\n,"b" :[\n]}\n', b"7"], pa.binary())
    array = whole.cast(kind)
    for start in range(6):
        for size in range(6 - start):
            cells, rejected = values(array.slice(start, size))
            expected = ["[0]", None, None, '{"a":\n1\n,"b" :[\n]}', "7"][start : start + size]
            assert jsons(cells) == expected
            assert list(rejected) == ([1 - start] if start <= 1 < start + size else [])


def test_a_character_cut_in_two_by_two_texts_is_valid_in_neither():
    assert invalid_utf8(pa.array([b"\xc3", b"\xa9", b"\xc3\xa9", None])).tolist() == [
        *(True, True, False, False)
    ]
    assert list(values(pa.array([b'"\xc3', b'\xa9"']))[1]) == [0, 1]


def test_newlines_are_blanks_inside_a_value():
    cells, _ = values(pa.array([b'{\n"a"\n:\n[\n1\n,\n2\n]\n,\r\n"b":{\n}\n}'], pa.binary()))
    parts = members(cells)
    assert {name: jsons(part) for name, part in parts.items()} == {
        "a": ["[\n1\n,\n2\n]"],
        "b": ["{\n}"],
    }
    assert [jsons(part) for part in elements(parts["a"])] == [["1"], ["2"]]


def test_items_and_entries_flatten_containers():
    texts_ = ['[1, "a", null]', "[]", "5", "null", '{"x": [2], "\\u0079":null}', "[[3]]"]
    offsets, flat = items(cells_of(*texts_))
    assert (offsets.tolist(), jsons(flat)) == ([0, 3, 3, 3, 3, 3, 4], ["1", '"a"', None, "[3]"])
    offsets, names, parts = entries(cells_of(*texts_))
    assert offsets.tolist() == [0, 0, 0, 0, 0, 2, 2]
    assert (texts(names), jsons(parts)) == (["x", "y"], ["[2]", None])


def test_distinct_texts_are_numbered_in_the_order_seen():
    cells = cells_of('{"a":1}', '{"a":1}', "null", '{"a":2}', '{"a":1}', '{"a": 1}')
    numbers, firsts = distinct(cells)
    assert (numbers.tolist(), firsts.tolist()) == ([0, 0, -1, 1, 0, 2], [0, 3, 5])


def test_more_distinct_texts_than_are_told_apart_have_no_number():
    numbers, firsts = distinct(cells_of(*map(str, range(json_cells.DISTINCT_MAX + 2)), "1"))
    assert len(firsts) == json_cells.DISTINCT_MAX
    assert numbers[-3:].tolist() == [-1, -1, 1]


def test_cells_of_two_buffers_can_be_mixed():
    one, other = cells_of("1", '"b"', "null"), cells_of('"x"', "2", "{}")
    chosen = np.array([True, False, False])
    assert jsons(one.where(chosen, other)) == ["1", "2", "{}"]
    assert jsons(one.where(chosen, one)) == ["1", '"b"', None]
    assert jsons(other.only(Kind.OBJECT)) == [None, None, "{}"]
