"""Bytes as PostgreSQL sends them become exact values, and damaged ones are refused."""

import itertools
import pickle
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    StringType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import DataRejected, NeedsOperator, SchemaRejected
from icestream.sources.postgres.values.decode import decode
from icestream.sources.postgres.values.kinds import (
    TYPE_RULES,
    PgType,
    copy_expression,
    iceberg_type,
    in_binary,
    kinds_by_oid,
)
from icestream.sources.postgres.values.places import SentAs
from icestream.sources.postgres.values.tuples import Tuples, copy_tuples, tuples_at

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = struct.pack("!h", -1)
BUILTIN = {
    "bool": 16,
    "bytea": 17,
    "int8": 20,
    "int2": 21,
    "int4": 23,
    "text": 25,
    "float8": 701,
    "inet": 869,
    "date": 1082,
    "time": 1083,
    "timestamptz": 1184,
    "numeric": 1700,
    "uuid": 2950,
    "jsonb": 3802,
}
ARRAYS = {f"{name}[]": 10_000 + oid for name, oid in BUILTIN.items()}
SCALAR_ROWS = [[oid, n, "b", 0, -1, 0, ",", f"pg_catalog.{n}_out"] for n, oid in BUILTIN.items()]
ARRAY_ROWS = [
    [oid, n, "b", 0, -1, oid - 10_000, ",", "pg_catalog.array_out"] for n, oid in ARRAYS.items()
]
TYPES = {kind.name: kind for kind in kinds_by_oid(SCALAR_ROWS + ARRAY_ROWS).values()}
ARROW = {
    BooleanType(): pa.bool_(),
    BinaryType(): pa.large_binary(),
    IntegerType(): pa.int32(),
    LongType(): pa.int64(),
    FloatType(): pa.float32(),
    DoubleType(): pa.float64(),
    StringType(): pa.large_string(),
    DateType(): pa.date32(),
    TimeType(): pa.time64("us"),
    TimestamptzType(): pa.timestamp("us", tz="UTC"),
    UUIDType(): pa.uuid(),
}


def arrow_of(to: IcebergType) -> pa.DataType:
    if isinstance(to, ListType):
        return pa.large_list(arrow_of(to.element_type))
    if isinstance(to, DecimalType):
        return pa.decimal128(to.precision, to.scale)
    return ARROW[to]


def natural(name: str) -> IcebergType:
    return iceberg_type(TYPES[name], -1, itertools.count(1))


def message(payload: bytes) -> bytes:
    return b"d" + struct.pack("!i", len(payload) + 4) + payload


def row(values: Sequence[bytes | None]) -> bytes:
    fields = [struct.pack("!i", -1) if v is None else struct.pack("!i", len(v)) + v for v in values]
    return struct.pack("!h", len(values)) + b"".join(fields)


def copied(rows: Sequence[Sequence[bytes | None]]) -> bytes:
    """The messages of COPY, the header and the first row in one of them."""
    first, *others = [row(each) for each in rows] or [b""]
    return b"".join(map(message, [HEADER + first, *others, TRAILER]))


def tuple_data(values: Sequence[tuple[str, bytes]]) -> bytes:
    """A tuple of pgoutput from marks and values."""
    fields = [
        mark.encode() + (struct.pack("!i", len(value)) + value if mark in "tb" else b"")
        for mark, value in values
    ]
    return struct.pack("!h", len(values)) + b"".join(fields)


def array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8)


def column(values: Sequence[bytes | None], mark: str) -> Tuples:
    """One column of tuples, all in one form."""
    parts = [tuple_data([(mark, v) if v is not None else ("n", b"")]) for v in values]
    places = np.cumsum([0, *map(len, parts)])[:-1]
    return tuples_at(array(b"".join(parts)), places, 1)


def decoded(
    name: str, values: Sequence[bytes | None], mark: str, to: IcebergType | None = None
) -> pa.Array:
    to = to or natural(name)
    found = decode(column(values, mark), 0, TYPES[name], to, arrow_of(to), "v")
    found.validate(full=True)
    return found


def numeric_bytes(value: Decimal) -> bytes:
    """A numeric as the server's numeric_send writes it."""
    if not value.is_finite():
        sign = 0xC000 if value.is_nan() else 0xF000 if value < 0 else 0xD000
        return struct.pack("!hhHh", 0, 0, sign, 0)
    sign, digits, exponent = value.as_tuple()
    scale = max(-exponent, 0)
    number = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    # The point must lie between two groups.
    number *= 10 ** (-scale % 4)
    groups = []
    while number:
        number, group = divmod(number, 10_000)
        groups.insert(0, group)
    weight = len(groups) - 1 - (scale + -scale % 4) // 4
    while groups and groups[-1] == 0:
        groups.pop()
    sign = 0x4000 if sign and groups else 0
    head = struct.pack("!hhHh", len(groups), weight if groups else 0, sign, scale)
    return head + b"".join(struct.pack("!h", group) for group in groups)


decimals = st.builds(
    lambda sign, digits, exponent: Decimal((sign, tuple(digits), exponent)),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=45),
    st.integers(-45, 6),
)


def shown(value: Decimal) -> str:
    # PostgreSQL has no negative zero.
    return format(value if value else abs(value), "f")


@given(st.lists(decimals, min_size=1))
def test_a_numeric_of_any_size_is_its_digits(values):
    """P8: with as many zeros after the point as PostgreSQL keeps."""
    found = decoded("numeric", [numeric_bytes(value) for value in values], "b", StringType())
    assert found.to_pylist() == [shown(value) for value in values]


@given(decimals, st.integers(1, 38), st.data())
def test_a_numeric_is_a_decimal_or_refused(value, precision, data):
    """P8: both forms agree, and nothing is rounded or cut."""
    scale = data.draw(st.integers(0, precision))
    digits = int("".join(map(str, value.as_tuple().digits)))
    exponent = value.as_tuple().exponent + scale
    whole = exponent >= 0 or digits % 10**-exponent == 0
    unscaled = digits * 10**exponent if exponent >= 0 else digits // 10**-exponent
    fits = whole and unscaled < 10**precision
    to = DecimalType(precision, scale)
    for mark, sent in (("b", numeric_bytes(value)), ("t", shown(value).encode())):
        if fits:
            [found] = decoded("numeric", [sent], mark, to).to_pylist()
            assert found == value and -found.as_tuple().exponent == scale
        else:
            with pytest.raises(SchemaRejected):
                decoded("numeric", [sent], mark, to)


@pytest.mark.parametrize("special", ["NaN", "Infinity", "-Infinity"])
def test_special_numerics_are_text_and_no_decimals(special):
    """P8: the error tells how to keep them."""
    sent = {"b": numeric_bytes(Decimal(special)), "t": special.encode()}
    for mark, value in sent.items():
        assert decoded("numeric", [value], mark, StringType()).to_pylist() == [special]
        with pytest.raises(SchemaRejected) as refused:
            decoded("numeric", [value], mark, DecimalType(10, 2))
        assert "string" in (refused.value.hint or "")


def array_text(values: Sequence[str | None]) -> bytes:
    """An array as the server's array_out writes it."""

    def element(value: str | None) -> str:
        if value is None:
            return "NULL"
        if not value or value.upper() == "NULL" or set(value) & set('{}",\\ \t\n\r\v\f'):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return value

    return ("{" + ",".join(map(element, values)) + "}").encode()


def array_bytes(values: Sequence[bytes | None], element: str) -> bytes:
    """An array as the server's array_send writes it."""
    if not values:
        return struct.pack("!iii", 0, 0, BUILTIN[element])
    head = struct.pack("!iiiii", 1, None in values, BUILTIN[element], len(values), 1)
    return head + row(values)[2:]


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)


@given(st.lists(st.none() | st.lists(st.none() | texts | st.sampled_from(["NULL", "null", ""]))))
def test_arrays_of_text_hold_their_elements(rows):
    """P8: quotes, backslashes, braces, empty texts and the word NULL included."""
    to = ListType(1, StringType(), element_required=False)
    written = [None if values is None else array_text(values) for values in rows]
    assert decoded("text[]", written, "t", to).to_pylist() == rows
    sent = [
        None
        if values is None
        else array_bytes([None if v is None else v.encode() for v in values], "text")
        for values in rows
    ]
    assert decoded("text[]", sent, "b", to).to_pylist() == rows


@given(st.lists(st.lists(st.none() | st.integers(-(2**31), 2**31 - 1))))
def test_arrays_of_numbers_hold_their_elements(rows):
    """P8: in both forms, also when the table's elements are wider."""
    to = ListType(1, LongType(), element_required=False)
    written = [array_text([None if v is None else str(v) for v in values]) for values in rows]
    assert decoded("int4[]", written, "t", to).to_pylist() == rows
    sent = [
        array_bytes([None if v is None else struct.pack("!i", v) for v in values], "int4")
        for values in rows
    ]
    assert decoded("int4[]", sent, "b", to).to_pylist() == rows


SAMPLES: dict[str, tuple[bytes, bytes, Any]] = {
    "bool": (b"t", b"\1", True),
    "int2": (b"-2", struct.pack("!h", -2), -2),
    "int4": (b"70000", struct.pack("!i", 70000), 70000),
    "int8": (b"-9223372036854775808", struct.pack("!q", -(2**63)), -(2**63)),
    "float8": (b"1e+300", struct.pack("!d", 1e300), 1e300),
    "text": ("né".encode(), "né".encode(), "né"),
    "jsonb": (b'{"a": 1}', b'\1{"a": 1}', '{"a": 1}'),
    "bytea": (b"\\x00ff", b"\0\xff", b"\0\xff"),
}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_forms_may_change_from_row_to_row(name):
    """P8: some values of one stream come as text, others in binary, some not at all."""
    text, binary, value = SAMPLES[name]
    parts = [
        tuple_data([each])
        for each in [("t", text), ("b", binary), ("n", b""), ("u", b""), ("b", binary), ("t", text)]
    ]
    places = np.array([-1, *np.cumsum([0, *map(len, parts)])[:-1]])
    tuples = tuples_at(array(b"".join(parts)), places, 2)
    to = natural(name)
    found = decode(tuples, 0, TYPES[name], to, arrow_of(to), "v")
    assert found.to_pylist() == [None, value, value, None, None, value, value]
    forms = [
        SentAs.NULL,
        SentAs.TEXT,
        SentAs.BINARY,
        SentAs.NULL,
        SentAs.UNSENT,
        SentAs.BINARY,
        SentAs.TEXT,
    ]
    assert list(tuples.forms[0]) == forms
    assert not tuples.forms[1].any()
    chosen = tuples.take(np.array([5, 3]))
    assert len(chosen) == 2
    assert decode(chosen, 0, TYPES[name], to, arrow_of(to), "v").to_pylist() == [value, None]


DAMAGED = [
    *[("bool", "b", b""), ("bool", "b", b"\2"), ("bool", "t", b"x")],
    *[("int4", "b", b"\0\0\0"), ("int4", "t", b""), ("int4", "t", b"-"), ("int4", "t", b"1x")],
    *[("int8", "t", b"9223372036854775808"), ("int8", "t", b"-9223372036854775809")],
    *[("float8", "b", bytes(4)), ("float8", "t", b"one"), ("uuid", "b", bytes(15))],
    *[
        ("uuid", "t", b"0" * 32),
        ("uuid", "t", b"g" * 36),
        ("jsonb", "b", b""),
        ("jsonb", "b", b"{}"),
    ],
    *[("bytea", "t", b"00"), ("bytea", "t", b"\\x0"), ("bytea", "t", b"\\xzz")],
    *[("text", "t", b"\xff"), ("text", "b", b"\xff"), ("numeric", "b", bytes(7))],
    *[("numeric", "b", struct.pack("!hhHh", 1, 0, 0, 0)), ("numeric", "b", b"\xff" * 8)],
    *[("numeric", "b", struct.pack("!hhHhh", 1, 0, 0, 0, 10_000))],
    *[("date", "t", b"2020-13-01"), ("date", "t", b"20-01-01"), ("date", "t", b"2020-01-01x")],
    *[("date", "t", b"01/02/2020"), ("time", "t", b"12:00"), ("time", "t", b"12:00:00.1234567")],
    *[("timestamptz", "t", b"2020-01-01"), ("timestamptz", "t", b"2020-01-01 00:00:00+0")],
    *[("int4[]", "b", b""), ("int4[]", "b", struct.pack("!iiiii", 1, 0, 23, 2**31 - 1, 1))],
    *[("int4[]", "b", array_bytes([b"\0\0\0\1"], "int4") + b"\0")],
    *[
        ("int4[]", "t", b""),
        ("int4[]", "t", b"{"),
        ("int4[]", "t", b"{1,}"),
        ("int4[]", "t", b"{,}"),
    ],
    *[("text[]", "t", b'{"a}'), ("text[]", "t", b'{"a"b}'), ("text[]", "t", b'{"a\\"}')],
    *[("text[]", "t", b"[1:1"), ("text[]", "t", b"{a}{b}")],
]


@pytest.mark.parametrize(("name", "mark", "sent"), DAMAGED)
def test_a_damaged_value_is_refused(name, mark, sent):
    """P8: never read as something else, and never shown."""
    with pytest.raises(DataRejected) as refused:
        decoded(name, [sent], mark)
    assert "column v" in refused.value.message


def surrounded(content: bytes, around: int) -> np.ndarray:
    """The same bytes in the middle of others."""
    whole = bytes([around]) * 64 + content + bytes([around]) * 64
    return array(whole)[64:-64]


def outcome(read: Any) -> Any:
    try:
        return read()
    except NeedsOperator as error:
        return type(error).__name__, error.message, error.detail


COLUMNS = ["int4", "text", "numeric", "timestamptz", "uuid", "int4[]", "jsonb"]


def all_columns(tuples: Tuples) -> list[Any]:
    found = []
    for number, name in enumerate(COLUMNS):
        to = DecimalType(20, 4) if name == "numeric" else natural(name)
        if isinstance(to, ListType):
            to = ListType(1, IntegerType(), element_required=False)
        kind, wanted = TYPES[name], arrow_of(to)
        found.append(
            outcome(lambda n=number, k=kind, t=to, w=wanted: decode(tuples, n, k, t, w, "v"))
        )
    return [each if isinstance(each, tuple) else plain_values(each) for each in found]


def plain_values(column: pa.Array) -> list[Any]:
    """The values; timestamps as numbers, for damage may make years that Python does not know."""
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    return list(column.to_pylist())


WHOLE = [
    struct.pack("!i", 7),
    b"some text",
    numeric_bytes(Decimal("-12345.678")),
    struct.pack("!q", 10**15),
    bytes(range(16)),
    array_bytes([b"\0\0\0\1", None, b"\0\0\0\2"], "int4"),
    b'\1{"a": [1]}',
]
WRITTEN = [
    *(b"7", b"some text", b"-12345.678", b"2031-09-09 01:46:40+00"),
    *(b"00010203-0405-0607-0809-0a0b0c0d0e0f", b"{1,NULL,2}", b'{"a": [1]}'),
]


@given(st.data())
def test_damaged_input_never_leads_out_of_the_buffer(data):
    """P8: whatever the bytes, the outcome depends on them alone, and is rows or a refusal."""
    binary = data.draw(st.booleans())
    copy = binary and data.draw(st.booleans())
    values = WHOLE if binary else WRITTEN
    intact = copied([values, values]) if copy else tuple_data([("tb"[binary], v) for v in values])
    content = bytearray(intact)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = (
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )

    def read(around: int) -> Any:
        buffer = surrounded(bytes(content), around)
        if copy:
            tuples, used = copy_tuples(buffer, len(COLUMNS))
            assert used <= len(content)
        else:
            tuples = tuples_at(buffer, np.zeros(1, dtype=np.int64), len(COLUMNS))
        return all_columns(tuples)

    outcomes = [outcome(lambda a=around: read(a)) for around in (0, 255, ord("}"))]
    assert repr(outcomes[0]) == repr(outcomes[1]) == repr(outcomes[2])
    if bytes(content) == intact:
        assert outcomes[0][0][0] == 7 and outcomes[0][1][0] == "some text"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"\xff\xff",
        struct.pack("!h", 2) + b"n",
        struct.pack("!h", 1) + b"x",
        struct.pack("!h", 1) + b"t\0\0",
        struct.pack("!h", 1) + b"t\0\0\0\2a",
        struct.pack("!h", 1) + b"t\xff\xff\xff\xff",
        struct.pack("!h", 3) + b"nnn",
    ],
)
def test_a_tuple_that_runs_past_its_end_is_refused(content):
    """P8: nor may a tuple have more columns than its relation."""
    with pytest.raises(DataRejected):
        tuples_at(array(content), np.zeros(1, dtype=np.int64), 2)


@pytest.mark.parametrize("place", [-2, 1, 2**62])
def test_a_place_outside_the_buffer_is_refused(place):
    """P8: -1 alone means that there is no tuple."""
    with pytest.raises(DataRejected):
        tuples_at(array(struct.pack("!h", 0)), np.array([place]), 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"\0",
        row([b"a"]),
        row([b"a", b"b"]) + b"\0",
        row([b"a", b"b"]) * 2,
        row([b"a", b"b"])[:-1],
        TRAILER + b"\0",
        HEADER[:-4] + struct.pack("!i", -5),
        HEADER[:-4] + struct.pack("!i", 5),
    ],
)
def test_a_copy_message_that_is_not_one_row_is_refused(payload):
    """P8: with exactly the columns that were asked for."""
    with pytest.raises(DataRejected):
        copy_tuples(array(message(payload)), 2)


def test_a_copy_ends_before_what_is_not_a_row():
    """P2: rows come as far as whole messages go, and the header's extension is skipped."""
    extended = HEADER[:-4] + struct.pack("!i", 3) + b"xyz"
    content = b"".join(map(message, [extended, row([b"a", None]), row([b"", b"b"]), TRAILER]))
    for rest in (b"c\0\0\0\4", b"d\0\0", message(row([b"c", b"d"]))[:-1], b""):
        tuples, used = copy_tuples(array(content + rest), 2, texts=(1,))
        assert used == len(content) and len(tuples) == 2
        assert tuples.forms.tolist() == [[SentAs.BINARY, SentAs.BINARY], [SentAs.NULL, SentAs.TEXT]]
    with pytest.raises(DataRejected):
        copy_tuples(array(b"d\0\0\0\3"), 2)


def test_errors_show_no_values():
    """P8: rows are nobody's business in a log."""
    for name, mark, sent in DAMAGED:
        if len(sent) > 3:
            with pytest.raises(DataRejected) as refused:
                decoded(name, [sent], mark)
            assert sent.decode("latin-1") not in str(refused.value)


def test_types_travel_to_workers():
    """P2: a type and all that it is made of survives pickling."""
    for kind in TYPES.values():
        assert pickle.loads(pickle.dumps(kind)) == kind


def test_what_is_not_decoded_in_binary_is_asked_for_as_text():
    """P8: by the type's own output function, with names quoted."""
    assert copy_expression('a"b', TYPES["int4"], IntegerType()) == '"a""b"'
    asked = copy_expression("ip", TYPES["inet"], StringType())
    assert asked == 'pg_catalog.textin(pg_catalog.inet_out("ip"))'
    assert not in_binary(TYPES["int4"], StringType())
    assert in_binary(TYPES["numeric"], StringType())
    assert in_binary(TYPES["int4[]"], ListType(1, LongType(), element_required=False))
    assert not in_binary(TYPES["inet[]"], ListType(1, StringType(), element_required=False))
    assert not in_binary(TYPES["int4[]"], StringType())


@pytest.mark.parametrize("typmod", [(39 << 16 | 2) + 4, (3 << 16 | 0x7FE) + 4, (2 << 16 | 5) + 4])
def test_numerics_beyond_iceberg_are_strings(typmod):
    """P8: more than 38 digits, a negative scale, more places than digits."""
    assert iceberg_type(TYPES["numeric"], typmod, itertools.count()) == StringType()


def test_a_domain_keeps_the_modifier_of_what_it_is_made_of():
    """P8: also through another domain, and in an array's elements."""
    typmod = (12 << 16 | 2) + 4
    kinds = kinds_by_oid(
        [
            [9003, "deeper", "d", 9001, -1, 0, ",", "pg_catalog.numeric_out"],
            [9001, "cents", "d", 1700, typmod, 0, ",", "pg_catalog.numeric_out"],
            [9002, "_cents", "b", 0, -1, 9001, ",", "pg_catalog.array_out"],
            [1700, "numeric", "b", 0, -1, 0, ",", "pg_catalog.numeric_out"],
        ]
    )
    wanted = DecimalType(12, 2)
    for oid in (9001, 9003):
        assert iceberg_type(kinds[oid], -1, itertools.count()) == wanted
    assert iceberg_type(kinds[9002], -1, itertools.count(5)) == ListType(5, wanted, False)
    assert isinstance(kinds[9003], PgType) and kinds[9003].name == "deeper"


def test_every_rule_names_an_iceberg_type():
    """P8, U8: the documented table is whole."""
    assert all(source and target for source, target, _ in TYPE_RULES)
    assert {target for _, target, _ in TYPE_RULES} >= {"long", "decimal(p,s)", "string", "uuid"}
