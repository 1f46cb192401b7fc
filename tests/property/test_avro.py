"""Avro records read as columns say what fastavro reads from them, and damage stays where it is."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from icestream.formats.avro import decode
from tests.examples import examples

SLOW = examples(150)


@dataclass(frozen=True)
class Kind:
    """A type of Avro: its schema, values for it, and how our columns show what fastavro reads."""

    schema: Any
    values: st.SearchStrategy[Any]
    shown: Callable[[Any], Any] = lambda value: value


INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=12)
SCALARS = [
    Kind("null", st.none()),
    Kind("boolean", st.booleans()),
    Kind("int", INTS),
    Kind("long", LONGS),
    Kind("float", st.floats(width=32, allow_nan=False)),
    Kind("double", st.floats(allow_nan=False)),
    Kind("bytes", st.binary(max_size=20)),
    Kind("string", TEXTS),
]
BRANCHES = {kind.schema: kind for kind in SCALARS if kind.schema not in ("int", "float")}
PYTHON_TYPES = {bool: "boolean", int: "long", float: "double", bytes: "bytes", str: "string"}
LOGICAL = [
    Kind(
        {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 3},
        st.integers(-(10**20) + 1, 10**20 - 1).map(lambda whole: Decimal(whole).scaleb(-3)),
    ),
    Kind({"type": "int", "logicalType": "date"}, st.dates()),
    Kind(
        {"type": "long", "logicalType": "time-micros"},
        st.times(),
    ),
    Kind(
        {"type": "long", "logicalType": "local-timestamp-micros"},
        st.datetimes(),
    ),
    Kind({"type": "string", "logicalType": "uuid"}, st.uuids(), str),
]


def named(draw: Callable[[Any], Any], kinds: st.SearchStrategy[Kind]) -> Kind:
    """A type with a name, which must be unique in a schema."""
    name = "N" + draw(st.uuids()).hex
    form = draw(st.sampled_from(["record", "enum", "fixed", "decimal"]))
    if form == "enum":
        symbols = draw(
            st.lists(st.from_regex(r"[a-z]{1,4}", fullmatch=True), min_size=1, max_size=4)
        )
        symbols = list(dict.fromkeys(symbols))
        return Kind({"type": "enum", "name": name, "symbols": symbols}, st.sampled_from(symbols))
    if form == "fixed":
        size = draw(st.integers(1, 20))
        schema = {"type": "fixed", "name": name, "size": size}
        return Kind(schema, st.binary(min_size=size, max_size=size))
    if form == "decimal":
        schema = {"type": "fixed", "name": name, "size": 13, "logicalType": "decimal"}
        wholes = st.integers(-(10**30) + 1, 10**30 - 1)
        values = wholes.map(lambda whole: Decimal(whole).scaleb(-7, fastavro_context()))
        return Kind({**schema, "precision": 30, "scale": 7}, values)
    members = draw(st.lists(kinds, max_size=4))
    fields = [{"name": f"f{at}", "type": kind.schema} for at, kind in enumerate(members)]
    shown = {f"f{at}": kind.shown for at, kind in enumerate(members)}
    return Kind(
        {"type": "record", "name": name, "fields": fields},
        st.fixed_dictionaries({f"f{at}": kind.values for at, kind in enumerate(members)}),
        lambda value: {key: shown[key](each) for key, each in value.items()},
    )


def fastavro_context() -> Any:
    """Python's default arithmetic keeps 28 digits only."""
    import decimal

    return decimal.Context(prec=40)


def union(names: list[str]) -> Kind:
    """A union of types that Python tells apart."""
    real = [name for name in names if name != "null"]

    def shown(value: Any) -> Any:
        if value is None or len(real) < 2:
            return value
        return {name: value if PYTHON_TYPES[type(value)] == name else None for name in real}

    return Kind(names, st.one_of([BRANCHES[name].values for name in names]), shown)


@st.composite
def nested(draw: Callable[[Any], Any], kinds: st.SearchStrategy[Kind]) -> Kind:
    """A type made of others."""
    form = draw(st.sampled_from(["named", "named", "array", "map", "optional", "union"]))
    if form == "named":
        return named(draw, kinds)
    if form == "union":
        names = st.lists(st.sampled_from(sorted(BRANCHES)), min_size=1, max_size=4, unique=True)
        return union(draw(names))
    inner = draw(kinds)
    if form == "array":
        values = st.lists(inner.values, max_size=4)
        schema = {"type": "array", "items": inner.schema}
        return Kind(schema, values, lambda value: [inner.shown(each) for each in value])
    if form == "map":
        values = st.dictionaries(TEXTS, inner.values, max_size=4)
        schema = {"type": "map", "values": inner.schema}
        return Kind(schema, values, lambda v: [(k, inner.shown(each)) for k, each in v.items()])
    if inner.schema == "null" or isinstance(inner.schema, list):
        return inner
    branches = draw(st.permutations(["null", inner.schema]))
    optional = st.none() | inner.values
    return Kind(branches, optional, lambda v: None if v is None else inner.shown(v))


PLAIN = st.recursive(st.sampled_from(SCALARS), nested, max_leaves=8)
EVERY = st.recursive(st.sampled_from(SCALARS + LOGICAL), nested, max_leaves=8)


def encoded(schema: Any, value: Any) -> bytes:
    """A record as fastavro writes it."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def read(schema: Any, content: bytes) -> tuple[Any, int]:
    """A record as fastavro reads it, and the bytes that it leaves."""
    source = io.BytesIO(content)
    value = fastavro.schemaless_reader(source, fastavro.parse_schema(schema))
    return value, len(content) - source.tell()


@SLOW
@given(st.data())
def test_columns_say_what_another_reader_of_avro_says(data):
    """K3: random schemas and records, against fastavro."""
    kind = data.draw(EVERY)
    records = [encoded(kind.schema, each) for each in data.draw(st.lists(kind.values, max_size=6))]
    field, rejected = decode(pa.array(records, pa.binary()), json.dumps(kind.schema))
    assert rejected == {}
    field.array.validate(full=True)
    assert field.array.to_pylist() == [kind.shown(read(kind.schema, r)[0]) for r in records]


@SLOW
@given(st.data())
def test_a_damaged_record_changes_no_other_and_is_never_read_as_something_it_is_not(data):
    """K3: whatever is accepted is what fastavro reads from all of the record's bytes."""
    kind = data.draw(PLAIN)
    values = data.draw(st.lists(kind.values, min_size=1, max_size=5))
    records = [encoded(kind.schema, each) for each in values]
    place = data.draw(st.integers(0, len(records) - 1))
    records[place] = data.draw(damaged(records[place]))
    field, rejected = decode(pa.array(records, pa.binary()), json.dumps(kind.schema))
    field.array.validate(full=True)
    assert set(rejected) <= {place}
    found = field.array.to_pylist()
    for at, record in enumerate(records):
        if at in rejected:
            assert found[at] is None
        else:
            value, left = read(kind.schema, record)
            assert left == 0
            assert repr(found[at]) == repr(kind.shown(value))


def damaged(record: bytes) -> st.SearchStrategy[bytes]:
    """The record cut, lengthened, with some bytes changed, or something else altogether."""
    spot = st.integers(0, max(len(record) - 1, 0))
    return st.one_of(
        spot.map(lambda at: record[:at]),
        st.binary(min_size=1, max_size=4).map(lambda more: record + more),
        st.tuples(spot, st.binary(min_size=1, max_size=10)).map(
            lambda change: record[: change[0]] + change[1] + record[change[0] + len(change[1]) :]
        ),
        st.binary(max_size=40),
    )
