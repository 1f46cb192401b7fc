"""Records decoded in columns are what they are when each is read by itself with `json.loads`."""

import json
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from icestream.change import Op
from icestream.formats.envelope import USUAL_OPERATIONS, decode
from icestream.formats.options import ValueOptions
from icestream.formats.rows import Records
from tests.examples import examples

# Compiling the kernels falls into whichever example comes first.
patient = examples(200)

REJECTED = "rejected"
SKIPPED = "skipped"
OPS = {"insert": Op.INSERT, "update": Op.UPSERT, "delete": Op.DELETE}
SCHEMAS: list[Any] = [
    None,
    {"type": "struct", "fields": [{"type": "int64", "field": "a"}]},
    {"type": "struct", "fields": [{"type": "string", "field": "a"}], "name": "x"},
]


class Number(str):
    """A number as it was written."""


class Broken(Exception):
    """The record must be rejected."""


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def loads(text: bytes | None) -> Any:
    if text is None:
        return None
    try:
        found = json.loads(
            text.decode(), parse_int=Number, parse_float=Number, parse_constant=refuse
        )
        json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:
        raise Broken from error
    if isinstance(found, dict) and found.keys() == {"schema", "payload"}:
        if found["schema"] is None:
            return found["payload"]
        if isinstance(found["schema"], dict):
            if found["schema"].get("type") != "struct":
                raise Broken
            return found["payload"]
    return found


def expected(key: bytes | None, value: bytes | None, options: ValueOptions) -> Any:
    """The oracle: one record, read by itself."""
    try:
        identity = None if options.envelope == "none" else loads(key)
        said = loads(value)
        op, row = opened(said, options)
        return keyed(op, row, identity, options)
    except Broken:
        return REJECTED


def opened(said: Any, options: ValueOptions) -> tuple[Any, Any]:
    if said is None:
        if options.envelope == "none":
            raise Broken
        return Op.DELETE, {}
    if options.envelope == "none":
        return Op.INSERT, said
    if options.envelope == "upsert":
        return Op.UPSERT, said
    if not isinstance(said, dict):
        raise Broken
    if options.envelope == "cdc_field":
        told = said.get("op")
        told = json.dumps(told) if told is not None and not isinstance(told, str) else told
        if told is None or told.lower() not in USUAL_OPERATIONS:
            raise Broken
        return OPS[USUAL_OPERATIONS[told.lower()]], said
    return event(said)


def event(said: dict[str, Any]) -> tuple[Any, Any]:
    before, after = said.get("before"), said.get("after")
    op = said.get("op")
    if op == "m":
        return SKIPPED, {}
    if op == "d" and after is None:
        return Op.DELETE, before if isinstance(before, dict) else {}
    if op not in ("c", "r", "u") or after is None:
        raise Broken
    return Op.UPSERT, after


def keyed(op: Any, row: Any, identity: Any, options: ValueOptions) -> Any:
    if op == SKIPPED:
        return SKIPPED
    if op != Op.DELETE and (not isinstance(row, dict) or not row):
        raise Broken
    row = dict(row) if isinstance(row, dict) else {}
    if options.envelope != "none":
        if isinstance(identity, dict):
            told = {"id": identity["id"]} if "id" in identity else {}
        else:
            plain = options.key and identity is not None and not isinstance(identity, list)
            told = {"id": identity} if plain else {}
        if "id" in told and "id" in row and not agree(told["id"], row["id"]):
            raise Broken
        row = told | row
        # Without the option it is the record's own key that identifies the row.
        if op != Op.INSERT and (row.get("id") is None or not (told or options.key)):
            raise Broken
    return op, {name: value for name, value in row.items() if value is not None}


def agree(one: Any, other: Any) -> bool:
    """Whether a key and its value say the same of a column."""
    if one is None or other is None:
        return one is other
    texts = [part if isinstance(part, str) else json.dumps(part) for part in (one, other)]
    numbers = all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) for text in texts)
    return texts[0] == texts[1] or (numbers and Decimal(texts[0]) == Decimal(texts[1]))


def decoded(pairs: list[tuple[bytes | None, bytes | None]], options: ValueOptions) -> list[Any]:
    """What the columns say of each record, in the shape of the oracle's answer."""
    keys, values = zip(*pairs, strict=True) if pairs else ((), ())
    found = decode(
        Records(
            keys=pa.array(keys, pa.binary()),
            values=pa.array(values, pa.binary()),
            offsets=np.arange(len(pairs)),
            timestamps=np.zeros(len(pairs), dtype=np.int64),
        ),
        options,
    )
    answers: list[Any] = [SKIPPED] * len(pairs)
    for place in found.rejected:
        answers[place] = REJECTED
    texts = {name: column.text().to_pylist() for name, column in found.rows.columns.items()}
    for column in found.rows.columns.values():
        column.type()
    for place, record in enumerate(found.rows.records.tolist()):
        row = {name: text[place] for name, text in texts.items() if text[place] is not None}
        assert answers[record] == SKIPPED
        answers[record] = (Op(found.rows.ops[place]), row)
    assert found.rows.records.tolist() == sorted(set(found.rows.records.tolist()))
    return answers


def same(answer: Any, wanted: Any) -> bool:
    if not isinstance(wanted, tuple) or not isinstance(answer, tuple):
        return answer == wanted
    (op, texts), (wanted_op, row) = answer, wanted
    return (
        op == wanted_op
        and texts.keys() == row.keys()
        and all(
            texts[name] == value if isinstance(value, str) else as_written(texts[name]) == value
            for name, value in row.items()
        )
    )


def as_written(text: str) -> Any:
    return json.loads(text, parse_int=Number, parse_float=Number)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.text(max_size=6), st.just(1.5)
)
nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from(["id", "a", "b", "c", "schema"]), nested, max_size=4)
rows = objects | objects.map(lambda row: row | {"id": 7}) | scalars
ops = st.sampled_from([*"crudtmxIUD", "insert", "DELETE", None, 5])
events = st.fixed_dictionaries(
    {"before": st.none() | rows, "after": st.none() | rows, "op": st.sampled_from("crudtm") | ops},
    optional={"source": st.just({"lsn": 5}), "ts_ms": st.just(1), "ddl": st.just("x")},
)
others = st.dictionaries(st.sampled_from(["op", "ts_ms", "ddl", "before", "after"]), scalars)
operated = st.builds(lambda row, op: row | {"op": op}, objects, ops)
said = {
    "none": rows,
    "upsert": rows,
    "cdc_field": operated | operated | rows,
    "debezium": events | events | others,
}
odd_schemas = st.just({"schema": {"type": "none"}, "payload": {"id": 1}})


def written(document: Any, indent: int | None) -> bytes:
    return json.dumps(document, indent=indent, ensure_ascii=False).encode()


broken = st.binary(max_size=8) | st.sampled_from(
    [b"", b"{", b'{"a":1}}', b'"\xff"', b"nan", b"NaN"]
)


def values(envelope: str) -> st.SearchStrategy[bytes | None]:
    """Values that mostly are what the envelope wants."""
    payloads = said[envelope]
    wrapped = st.builds(
        lambda schema, payload: {"schema": schema, "payload": payload},
        st.sampled_from(SCHEMAS),
        payloads,
    )
    whole = st.builds(written, payloads | wrapped | odd_schemas, st.sampled_from([None, None, 1]))
    cut = st.builds(lambda text, size: text[: len(text) * size // 10], whole, st.integers(0, 9))
    return st.one_of(whole, whole, whole, cut, broken, st.none())


identities = st.just({}) | st.builds(lambda value: {"id": value}, scalars)
# Keys of several shapes are judged by the batch they come in, so all have one.
keys = st.one_of(
    identities.map(lambda key: written(key, None)),
    st.integers(0, 9).map(lambda number: written({"id": number}, None)),
    st.builds(lambda key: written({"schema": None, "payload": key}, None), identities),
    (scalars | st.just([1])).map(lambda key: written(key, None)),
    broken,
    st.none(),
)
options = st.sampled_from(
    [
        ValueOptions(),
        ValueOptions(envelope="upsert"),
        ValueOptions(envelope="upsert", key=["id"]),
        ValueOptions(envelope="cdc_field", cdc_field="op"),
        ValueOptions(envelope="cdc_field", cdc_field="op", key=["id"]),
        ValueOptions(envelope="debezium"),
        ValueOptions(envelope="debezium", key=["id"]),
    ]
)
whole_rows = objects.map(lambda row: row | {"id": 7})
fitting = {
    "none": whole_rows,
    "upsert": whole_rows,
    "cdc_field": st.builds(
        lambda row, op: row | {"op": op}, whole_rows, st.sampled_from(["I", "u", "Delete"])
    ),
    "debezium": st.one_of(
        st.builds(
            lambda row, op: {"op": op, "before": None, "after": row},
            whole_rows,
            st.sampled_from("cru"),
        ),
        st.builds(lambda row: {"op": "d", "before": row, "after": None}, whole_rows | st.none()),
    ),
}


def some_records(envelope: str) -> st.SearchStrategy[list[tuple[bytes | None, bytes | None]]]:
    """Batches in which what fits and what does not lie side by side."""
    # Mapped, because alternatives inside of alternatives would all weigh the same.
    good = fitting[envelope].map(lambda document: written(document, None)) | st.none()
    key = st.sampled_from([7, 7, 7, 8]).map(lambda number: written({"id": number}, None))
    anything = st.tuples(keys, values(envelope)).map(tuple)
    mixed = st.tuples(key | st.none(), good).map(tuple)
    odd_key = st.tuples(keys, good).map(tuple)
    return st.lists(st.one_of(mixed, mixed, odd_key, anything), max_size=6)


batches = options.flatmap(lambda how: st.tuples(st.just(how), some_records(how.envelope)))


@patient
@given(batches)
def test_columns_say_what_each_record_says_by_itself(batch):
    """K3, K8: the same changes in the same order, and the same records rejected."""
    how, pairs = batch
    answers = decoded(pairs, how)
    wanted = [expected(*pair, how) for pair in pairs]
    for answer, each, pair in zip(answers, wanted, pairs, strict=True):
        assert same(answer, each), (answer, each, pair)


@patient
@given(batches, st.integers(0, 6))
def test_where_a_batch_is_cut_does_not_matter(batch, place):
    """K3: what a record is does not depend on its neighbours."""
    how, pairs = batch
    whole = decoded(pairs, how)
    assert decoded(pairs[:place], how) + decoded(pairs[place:], how) == whole
