"""Records of a topic become changes by their envelope, or are rejected with a reason."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    IntegerType,
    StringType,
    TimestamptzType,
)

from icestream.change import Op
from icestream.errors import ConfigInvalid
from icestream.formats import envelope
from icestream.formats.envelope import decode, take_off_envelope, withheld
from icestream.formats.options import ENVELOPES, UNAVAILABLE_VALUE, ValueOptions
from icestream.formats.rows import Decoded, Records
from icestream.formats.text_fields import TextField
from icestream.schema import Column, arrow_schema, column_schema

Bytes = bytes | None
SECRET = "hunter2-secret"


def written(value: Any) -> Bytes:
    if value is None or isinstance(value, bytes):
        return value
    return json.dumps(value, separators=(",", ":")).encode()


def records(*pairs: tuple[Any, Any]) -> Records:
    keys, values = zip(*pairs, strict=True) if pairs else ((), ())
    return Records(
        keys=pa.array(map(written, keys), pa.binary()),
        values=pa.array(map(written, values), pa.binary()),
        offsets=np.arange(100, 100 + len(pairs)),
        timestamps=np.full(len(pairs), -1),
    )


def shown(decoded: Decoded) -> list[tuple[int, Op, dict[str, str]]]:
    """Each change with its record and the texts of the columns that are not null."""
    rows = decoded.rows
    texts = {name: column.text().to_pylist() for name, column in rows.columns.items()}
    return [
        (
            int(record),
            Op(op),
            {name: text[place] for name, text in texts.items() if text[place] is not None},
        )
        for place, (record, op) in enumerate(zip(rows.records, rows.ops, strict=True))
    ]


def rejected(decoded: Decoded, *reasons: tuple[int, str]) -> None:
    """Exactly these records are rejected, for reasons that have these words and no content."""
    assert sorted(decoded.rejected) == [place for place, _ in reasons]
    for place, words in reasons:
        assert words in decoded.rejected[place]
        assert SECRET not in decoded.rejected[place]


def typed(decoded: Decoded, name: str) -> tuple[Any, list[Any]]:
    column = decoded.rows.columns[name]
    kind = column.type()
    assert kind is not None
    alone = column_schema(Column(name=name, type=kind))
    return kind, column.cast(name, kind, arrow_schema(alone).field(name).type).to_pylist()


NONE = ValueOptions()
UPSERT = ValueOptions(envelope="upsert")
CDC = ValueOptions(envelope="cdc_field", cdc_field="_op")
DEBEZIUM = ValueOptions(envelope="debezium")


def event(op: str, before: Any, after: Any, **more: Any) -> dict[str, Any]:
    """A change event of Debezium's connector for PostgreSQL, without its schema."""
    source = {
        "version": "3.0.0.Final",
        "connector": "postgresql",
        "name": "shop",
        "ts_ms": 1559033904863,
        "snapshot": "false",
        "db": "postgres",
        "sequence": '["24023119","24023128"]',
        "schema": "public",
        "table": "customers",
        "txId": 555,
        "lsn": 24023128,
        "xmin": None,
    }
    return {
        "before": before,
        "after": after,
        "source": source,
        "op": op,
        "ts_ms": 1559033904863,
        **more,
    }


ROW_FIELDS = [
    {"type": "int32", "optional": False, "field": "id"},
    {"type": "string", "optional": False, "field": "name"},
    {
        "type": "bytes",
        "optional": True,
        "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1,
        "parameters": {"scale": "2", "connect.decimal.precision": "10"},
        "field": "amount",
    },
    {
        "type": "int32",
        "optional": True,
        "name": "io.debezium.time.Date",
        "version": 1,
        "field": "born",
    },
    {
        "type": "string",
        "optional": True,
        "name": "io.debezium.time.ZonedTimestamp",
        "version": 1,
        "field": "at",
    },
]


def mysql_schema(fields: Sequence[Mapping[str, Any]] = ROW_FIELDS) -> dict[str, Any]:
    """The schema of change events as the connector for MySQL writes it."""
    row = {"type": "struct", "fields": fields, "optional": True, "name": "dbserver1.t.Value"}
    source = {"type": "struct", "fields": [{"type": "string", "field": "version"}]}
    return {
        "type": "struct",
        "fields": [
            row | {"field": "before"},
            row | {"field": "after"},
            source | {"field": "source"},
            {"type": "string", "optional": False, "field": "op"},
            {"type": "int64", "optional": True, "field": "ts_ms"},
        ],
        "optional": False,
        "name": "dbserver1.t.Envelope",
    }


KEY_SCHEMA = {
    "type": "struct",
    "fields": [{"type": "int32", "optional": False, "field": "id"}],
    "optional": False,
    "name": "dbserver1.t.Key",
}


def with_schema(schema: Any, payload: Any) -> dict[str, Any]:
    return {"schema": schema, "payload": payload}


def test_appended_records_are_inserts_and_keys_are_ignored():
    """K3: a record without an envelope is a row."""
    decoded = decode(
        records(({"k": 1}, {"a": 1}), (b"\xff", {"a": 2, "b": "x"}), (None, None)), NONE
    )
    assert shown(decoded) == [(0, Op.INSERT, {"a": "1"}), (1, Op.INSERT, {"a": "2", "b": "x"})]
    assert decoded.rows.key == []
    rejected(decoded, (2, "no value"))


def test_broken_records_are_rejected_one_by_one():
    """K8: the others go through, and no reason quotes a record."""
    broken = [
        *(b"{", b"", b'{"a":1}{}', b'{"a":"\xff"}', b"5", b"[1]", b'"text"', b"{}", b"null"),
        b'{"a":' + SECRET.encode(),
    ]
    mixed = [pair for each in broken for pair in ((None, each), (None, {"a": 1}))]
    decoded = decode(records(*mixed), NONE)
    places = range(0, len(mixed), 2)
    assert [record for record, _, _ in shown(decoded)] == [place + 1 for place in places]
    rejected(decoded, *((place, "") for place in places))
    assert decoded.rejected[2] == "the record's value is not JSON: empty text"


def test_upserts_replace_by_key_and_null_deletes():
    """K3: the key's columns come from the key, the value's win where both have them."""
    decoded = decode(
        records(
            ({"id": 1}, {"id": 1, "name": "a"}),
            ({"id": 2}, {"name": "b"}),
            ({"id": 1}, None),
            ({"id": 3}, b"null"),
            (None, {"id": 4}),
            (None, None),
            (b"{", {"id": 5}),
            ({}, None),
            ([6], None),
        ),
        UPSERT,
    )
    assert shown(decoded) == [
        (0, Op.UPSERT, {"id": "1", "name": "a"}),
        (1, Op.UPSERT, {"id": "2", "name": "b"}),
        (2, Op.DELETE, {"id": "1"}),
        (3, Op.DELETE, {"id": "3"}),
    ]
    assert decoded.rows.key == ["id"]
    rejected(
        decoded,
        *((4, "no key"), (5, "no key"), (6, "key is not JSON"), (7, "no key"), (8, "no key")),
    )


def test_a_key_that_is_a_plain_value_is_the_column_that_the_option_names():
    """K3: JSON scalars, and text of any kind with `key_format: string`."""
    options = ValueOptions(envelope="upsert", key=["id"])
    decoded = decode(records((7, {"a": 1}), ("x", None), ({"id": "y"}, None), ({}, None)), options)
    assert shown(decoded) == [
        (0, Op.UPSERT, {"a": "1", "id": "7"}),
        (1, Op.DELETE, {"id": "x"}),
        (2, Op.DELETE, {"id": "y"}),
    ]
    rejected(decoded, (3, "no key"))
    options = ValueOptions(envelope="upsert", key=["id"], key_format="string")
    texts = ["null", '"q" \\ é\x01\n', "7", "{"]
    decoded = decode(
        records(*((text.encode(), None) for text in texts), (b"\xff", None), (None, None)), options
    )
    assert [row["id"] for _, _, row in shown(decoded)] == texts
    rejected(decoded, (4, "invalid UTF-8"), (5, "no key"))


def test_an_object_is_never_the_value_of_the_column_that_plain_keys_are_for():
    """K3: in either order of plain keys and objects without that column."""
    options = ValueOptions(envelope="upsert", key=["id"])
    decoded = decode(records(({"t": 1}, None), (5, None), ({"t": 1}, {"id": 6})), options)
    assert shown(decoded) == [(1, Op.DELETE, {"id": "5"}), (2, Op.UPSERT, {"id": "6"})]
    rejected(decoded, (0, "no key"))


def test_columns_of_the_key_may_be_named_by_the_option():
    """K3: a topic whose records have no key can still be upserted by columns of the value."""
    options = ValueOptions(envelope="upsert", key=["a", "b"])
    decoded = decode(records((None, {"a": 1, "b": 2}), (None, {"a": 1}), ({"z": 1}, None)), options)
    assert shown(decoded) == [(0, Op.UPSERT, {"a": "1", "b": "2"})]
    assert decoded.rows.key == ["a", "b"]
    rejected(decoded, (1, "no key"), (2, "no key"))


@pytest.mark.parametrize("key", [{"id": 21}, {"id": "x"}, {"id": None}, {"id": True}])
@pytest.mark.parametrize(
    ("options", "value"),
    [
        (ValueOptions(envelope="upsert"), {"id": 22, "v": 1}),
        (ValueOptions(envelope="upsert", key=["id"]), {"id": 22, "v": 1}),
        (ValueOptions(envelope="cdc_field", cdc_field="op"), {"id": 22, "op": "U"}),
        (ValueOptions(envelope="debezium"), event("c", None, {"id": 22, "v": 1})),
        (ValueOptions(envelope="debezium"), event("d", {"id": 22, "v": 1}, None)),
    ],
    ids=["upsert", "named key", "field", "debezium", "debezium delete"],
)
def test_a_key_that_its_value_contradicts_is_rejected(options, value, key):
    """K3, Mend b10: nobody knows which of the two is meant, so the record is not taken."""
    found = decode(records(({"id": 22}, value), (key, value)), options)
    assert [record for record, _, _ in shown(found)] == [0]
    rejected(found, (1, "key and its value do not agree about column id"))


def test_a_value_without_the_id_that_its_key_has_is_no_contradiction():
    """K3: but one that says null is."""
    pairs = [({"id": 1}, {"v": 1}), ({"id": 2}, {"id": None, "v": 1}), ({"id": 3}, None)]
    found = decode(records(*pairs), ValueOptions(envelope="upsert"))
    assert [row["id"] for _, _, row in shown(found)] == ["1", "3"]
    rejected(found, (1, "do not agree about column id"))


@pytest.mark.parametrize(
    ("key", "value"), [(b"21", 21), (b'"21"', 21), (b"21.0", 21), (b"2.1e1", 21), (b"1.50", "1.5")]
)
def test_two_spellings_of_a_key_are_the_same(key, value):
    """K3: what the table cannot tell apart does not contradict."""
    options = ValueOptions(envelope="upsert", key=["id"])
    found = decode(records((key, {"id": value, "v": 1})), options)
    assert len(shown(found)) == 1 and not found.rejected


def test_keys_of_several_shapes_are_told_apart():
    """K3, K4: records of a topic may belong to tables with different keys."""
    odd = ({"id": 1, "x": 2}, None)
    decoded = decode(records(({"id": 1}, None), odd, ({"id": 2}, None), ({"x": 3}, None)), UPSERT)
    assert [record for record, _, _ in shown(decoded)] == [0, 1, 2, 3]
    assert decoded.rows.key == []
    assert decoded.rows.take(np.array([0, 2])).key == ["id"]
    assert decoded.rows.take(np.array([1])).key == ["id", "x"]
    assert decoded.rows.take(np.array([3])).key == ["x"]


def test_records_are_rejected_for_any_number_of_reasons():
    """K8: each record has its own reason, here the name of its column."""
    pairs = [({f"c{n}": 1}, {f"c{n}": 2}) for n in range(300)]
    decoded = decode(records(*pairs), UPSERT)
    assert len(decoded.rows) == 0
    assert {record: told.rpartition(" ")[2] for record, told in decoded.rejected.items()} == {
        n: f"c{n}" for n in range(300)
    }


@pytest.mark.parametrize(
    ("told", "op"),
    [
        *(("I", Op.INSERT), ("i", Op.INSERT), ("c", Op.INSERT), ("r", Op.INSERT)),
        *(("Insert", Op.INSERT), ("U", Op.UPSERT), ("update", Op.UPSERT), ("UPDATE", Op.UPSERT)),
        *(("D", Op.DELETE), ("delete", Op.DELETE)),
    ],
)
def test_a_field_tells_the_operation(told, op):
    """K3: by the usual spellings, in any case of letters."""
    decoded = decode(records(({"id": 1}, {"_op": told, "id": 1})), CDC)
    assert shown(decoded) == [(0, op, {"_op": told, "id": "1"})]


def test_operations_can_be_spelled_by_option_and_lie_deep():
    """K3: with a path and a mapping of its own, in which case counts."""
    options = ValueOptions(
        envelope="cdc_field", cdc_field="meta.op", operations={"+": "update", "-": "delete"}
    )
    decoded = decode(
        records(
            ({"id": 1}, {"meta": {"op": "+"}}),
            ({"id": 1}, {"meta": {"op": "-"}}),
            ({"id": 1}, {"meta": {"op": SECRET}}),
            ({"id": 1}, {"meta": {"op": None}}),
            ({"id": 1}, {"meta": 5}),
            ({"id": 1}, {"x": 5}),
            ({"id": 1}, None),
        ),
        options,
    )
    assert [(record, op) for record, op, _ in shown(decoded)] == [
        (0, Op.UPSERT),
        (1, Op.DELETE),
        (6, Op.DELETE),
    ]
    rejected(decoded, (2, "no operation"), *((place, "lacks the member") for place in (3, 4, 5)))


def test_inserts_need_no_key_but_updates_and_deletes_do():
    """K3: a topic without keys can be appended to."""
    decoded = decode(
        records((None, {"_op": "I", "a": 1}), (None, {"_op": "U"}), (None, {"_op": "D"})), CDC
    )
    assert [record for record, _, _ in shown(decoded)] == [0]
    rejected(decoded, (1, "no key"), (2, "no key"))


def test_without_the_field_in_any_record_only_tombstones_are_left():
    """K3: the member that tells the operation may be missing everywhere."""
    decoded = decode(records(({"id": 1}, {"a": 1}), ({"id": 2}, None)), CDC)
    assert shown(decoded) == [(1, Op.DELETE, {"id": "2"})]
    rejected(decoded, (0, "lacks the member _op"))


def test_debezium_events_are_upserts_and_deletes():
    """K3: events of PostgreSQL without schemas, tombstones among them."""
    row = {"id": 1, "name": "Anne"}
    decoded = decode(
        records(
            ({"id": 1}, event("r", None, row)),
            ({"id": 1}, event("c", None, row)),
            ({"id": 1}, event("u", {"id": 1, "name": None}, {"id": 1, "name": "Ann"})),
            ({"id": 1}, event("d", {"id": 1, "name": "Ann"}, None)),
            ({"id": 1}, None),
            ({"id": 2}, event("d", None, None)),
            (None, event("m", None, None, message={"prefix": "p", "content": "AA=="})),
            ({}, event("t", None, None)),
        ),
        DEBEZIUM,
    )
    assert shown(decoded) == [
        (0, Op.UPSERT, {"id": "1", "name": "Anne"}),
        (1, Op.UPSERT, {"id": "1", "name": "Anne"}),
        (2, Op.UPSERT, {"id": "1", "name": "Ann"}),
        (3, Op.DELETE, {"id": "1", "name": "Ann"}),
        (4, Op.DELETE, {"id": "1"}),
        (5, Op.DELETE, {"id": "2"}),
    ]
    assert decoded.rows.key == ["id"]
    rejected(decoded, (7, "truncated"))


def test_what_debezium_writes_beside_events_is_rejected_by_its_name():
    """K8: records of other topics that came into a pattern say what they are."""
    decoded = decode(
        records(
            ({"databaseName": "shop"}, {"source": {}, "ts_ms": 1, "ddl": f"CREATE TABLE {SECRET}"}),
            ({"serverName": "shop"}, {"ts_ms": 1}),
            ({"id": "571"}, {"status": "BEGIN", "id": "571", "ts_ms": 1}),
            ({"id": 1}, {"id": 1, "name": SECRET}),
            ({"id": 1}, event("x", None, {"id": 1})),
            ({"id": 1}, event("u", {"id": 1}, None)),
            ({"id": 1}, event("c", None, SECRET)),
            ({"id": 1}, b"5"),
        ),
        DEBEZIUM,
    )
    rejected(
        decoded,
        *((0, "schema change"), (1, "heartbeat"), (2, "transaction"), (3, "no `op`")),
        *((4, "none of Debezium's"), (5, "no row after"), (6, "no object"), (7, "no `op`")),
    )
    assert len(decoded.rows) == 0


def test_debezium_events_without_a_key_need_the_option():
    """K3: a table without a primary key has null keys."""
    pair = (None, event("c", None, {"id": 1}))
    rejected(decode(records(pair), DEBEZIUM), (0, "name the columns"))
    options = ValueOptions(envelope="debezium", key=["id"])
    assert shown(decode(records(pair), options)) == [(0, Op.UPSERT, {"id": "1"})]


def test_debezium_events_with_schemas_are_typed():
    """K3: events of MySQL as Connect's JSON converter writes them, schema and payload."""
    row = {
        "id": 1004,
        "name": "Anne",
        "amount": base64.b64encode((-12345).to_bytes(3, "big", signed=True)).decode(),
        "born": 10957,
        "at": "2018-06-20T13:37:03Z",
    }
    key = with_schema(KEY_SCHEMA, {"id": 1004})
    decoded = decode(
        records(
            (key, with_schema(mysql_schema(), event("c", None, row))),
            (key, with_schema(mysql_schema(), event("d", row | {"name": "x"}, None))),
            (key, None),
            (key, with_schema({"type": "unheard"}, event("c", None, row))),
        ),
        DEBEZIUM,
    )
    rejected(decoded, (3, "schema"))
    assert [op for _, op, _ in shown(decoded)] == [Op.UPSERT, Op.DELETE, Op.DELETE]
    kinds = {name: typed(decoded, name) for name in decoded.rows.columns}
    assert kinds["id"] == (IntegerType(), [1004, 1004, 1004])
    assert kinds["name"] == (StringType(), ["Anne", "x", None])
    amounts = kinds["amount"]
    assert (amounts[0], [str(each) for each in amounts[1]]) == (
        DecimalType(10, 2),
        ["-123.45", "-123.45", "None"],
    )
    assert kinds["born"][0] == DateType()
    assert kinds["at"][0] == TimestamptzType()


def test_a_schema_that_gains_a_column_keeps_earlier_rows():
    """K7: rows before and after an ALTER TABLE come in one batch, in their order."""
    wide = mysql_schema([*ROW_FIELDS, {"type": "int64", "optional": True, "field": "points"}])
    key = with_schema(KEY_SCHEMA, {"id": 1})
    row = {"id": 1, "name": "a", "amount": None, "born": None, "at": None}
    decoded = decode(
        records(
            (key, with_schema(mysql_schema(), event("c", None, row))),
            (key, with_schema(wide, event("u", None, row | {"points": 7}))),
            (key, with_schema(mysql_schema(), event("u", None, row))),
        ),
        DEBEZIUM,
    )
    assert typed(decoded, "points")[1] == [None, 7, None]
    assert typed(decoded, "id") == (IntegerType(), [1, 1, 1])


@pytest.mark.parametrize(
    "stand_in",
    [
        UNAVAILABLE_VALUE,
        base64.b64encode(UNAVAILABLE_VALUE.encode()).decode(),
        [UNAVAILABLE_VALUE],
        list(UNAVAILABLE_VALUE.encode()),
        {UNAVAILABLE_VALUE: UNAVAILABLE_VALUE},
    ],
)
def test_a_value_that_was_not_sent_is_never_stored_as_its_stand_in(stand_in):
    """K3, P7: the change says which values it lacks; they tell no type and are not to be seen."""
    row = {"id": 1, "text": stand_in, "note": "a"}
    pairs = [({"id": 1}, event("u", None, row)), ({"id": 1}, event("u", None, {"id": 1}))]
    loose = json.dumps(pairs[0][1], indent=2).encode()
    for first in (pairs[0], ({"id": 1}, loose)):
        decoded = decode(records(first, pairs[1]), DEBEZIUM)
        rejected(decoded)
        assert shown(decoded) == [
            (0, Op.UPSERT, {"id": "1", "note": "a"}),
            (1, Op.UPSERT, {"id": "1"}),
        ]
        assert told(decoded) == {"text": [True, False]}
        assert decoded.rows.columns["text"].type() is None


def test_a_value_not_sent_has_the_type_that_its_schema_says():
    """K7: a column is made of its type, whatever stands in for its value."""
    fields = [*ROW_FIELDS, {"type": "bytes", "optional": True, "field": "big"}]
    stand_in = base64.b64encode(UNAVAILABLE_VALUE.encode()).decode()
    row = {"id": 1, "name": None, "amount": None, "born": None, "at": None, "big": stand_in}
    value = with_schema(mysql_schema(fields), event("u", None, row))
    decoded = decode(records((with_schema(KEY_SCHEMA, {"id": 1}), value)), DEBEZIUM)
    assert typed(decoded, "big") == (BinaryType(), [None])
    assert told(decoded) == {"big": [True]}


@pytest.mark.parametrize("op", ["c", "r"])
def test_the_values_of_a_row_that_changed_its_key_are_lost_where_they_were_not_sent(op):
    """P7: they are those of the old key's row, to which nothing leads."""
    row = {"id": 2, "text": UNAVAILABLE_VALUE}
    decoded = decode(records(({"id": 2}, event(op, None, row))), DEBEZIUM)
    rejected(decoded)
    assert (told(decoded), decoded.rows.lost["text"].tolist()) == ({}, [True])
    assert decoded.rows.take(np.arange(0)).lost == {}


def test_a_delete_needs_no_value_that_was_not_sent():
    """P7: its before-image is there to find the row."""
    row = {"id": 1, "text": UNAVAILABLE_VALUE}
    decoded = decode(records(({"id": 1}, event("d", row, None))), DEBEZIUM)
    rejected(decoded)
    assert shown(decoded) == [(0, Op.DELETE, {"id": "1"})]
    assert told(decoded) == {}


@pytest.mark.parametrize("placeholder", ["", "x", "(not sent)"])
def test_any_text_may_stand_for_a_value_that_was_not_sent(placeholder):
    """K3: Debezium's option, and none at all."""
    options = ValueOptions(envelope="debezium", unavailable_value=placeholder)
    texts = [placeholder, f"{placeholder}!", "", "x", UNAVAILABLE_VALUE, [], {}, [[]]]
    pairs = [({"id": 1}, event("u", None, {"id": 1, "text": text})) for text in texts]
    expected = [text == placeholder != "" for text in texts]
    assert told(decode(records(*pairs), options)) == ({"text": expected} if any(expected) else {})


def told(decoded: Decoded) -> dict[str, list[bool]]:
    return {name: mask.tolist() for name, mask in decoded.rows.withheld.items()}


def test_values_not_sent_are_known_by_column_and_change():
    """K3: the stand-in is an option of Debezium's."""
    options = ValueOptions(envelope="debezium", unavailable_value="(unknown)")
    rows = [{"id": 1, "a": UNAVAILABLE_VALUE}, {"id": 2, "a": "x"}]
    decoded = decode(
        records(*(({"id": row["id"]}, event("u", None, row)) for row in rows)), options
    )
    found = withheld(decoded.rows, UNAVAILABLE_VALUE)
    assert {name: mask.tolist() for name, mask in found.items()} == {"a": [True, False]}


def test_envelopes_work_on_fields_of_any_format():
    """K3: Avro and Protobuf bring fields of their own."""
    keys = TextField(array=pa.array(["a", None, "c"], pa.string()))
    nothing = TextField(array=pa.nulls(3, pa.string()))
    decoded = take_off_envelope(nothing, keys, ValueOptions(envelope="upsert", key=["id"]))
    assert shown(decoded) == [(0, Op.DELETE, {"id": "a"}), (2, Op.DELETE, {"id": "c"})]
    rejected(decoded, (1, "no key"))


def test_plain_text_is_a_row_of_key_and_value():
    """K3: whatever the text is, as long as it is UTF-8."""
    decoded = decode(
        records((b"k", b"{not json"), (None, "é".encode()), (b"k", b"\xff"), (b"\xff", b"v")),
        ValueOptions(format="string"),
    )
    assert shown(decoded) == [
        (0, Op.INSERT, {"key": "k", "value": "{not json"}),
        (1, Op.INSERT, {"value": "é"}),
    ]
    assert typed(decoded, "value") == (StringType(), ["{not json", "é"])
    rejected(decoded, (2, "value is not UTF-8"), (3, "key is not UTF-8"))
    rejected(decode(records((b"k", None)), ValueOptions(format="string")), (0, "no value"))


@pytest.mark.parametrize("options", [NONE, UPSERT, CDC, DEBEZIUM, ValueOptions(format="string")])
def test_no_records_are_no_changes(options):
    """K3: an empty batch is fine, and so is one of tombstones alone."""
    decoded = decode(records(), options)
    assert (len(decoded.rows), decoded.rejected) == (0, {})
    decoded = decode(records((None, None), (None, None)), options)
    assert (len(decoded.rows), sorted(decoded.rejected)) == (0, [0, 1])


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"format": "jsn"}, "Did you mean `json`?"),
        ({"envelope": "debesium"}, "Did you mean `debezium`?"),
        ({"key_format": "text"}, "Known: json, string"),
        ({"envelope": "cdc_field"}, "Name the member"),
        ({"cdc_field": "op"}, "Name the member"),
        (
            {"envelope": "cdc_field", "cdc_field": "op", "operations": {"X": "upsert"}},
            "Known: insert",
        ),
        ({"format": "string", "envelope": "upsert"}, "Use `envelope: none`"),
    ],
)
def test_wrong_options_say_what_is_known(options, hint):
    """K3: a typing error is found before the first record is read."""
    with pytest.raises(ConfigInvalid) as caught:
        ValueOptions(**options)
    assert hint in (caught.value.hint or "")


def test_each_envelope_that_a_file_may_name_can_be_taken_off():
    """K2: options name envelopes without importing what takes them off."""
    assert tuple(envelope._ENVELOPES) == ENVELOPES
