"""Keys and values of records in Avro and Protobuf, which are decoded apart and then meet."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from icestream.formats.decoding import decoded
from icestream.formats.options import RegistryOptions, ValueOptions
from icestream.formats.rows import Records
from tests.registry import StandInRegistry

CONTRADICTION = "the record's key and its value do not agree about column id"
PROTO = 'syntax = "proto3"; message %s { optional %s id = 1; }'
VARINT, LENGTH = b"\x08", b"\x0a"


@dataclass(frozen=True)
class Written:
    """A registry, and records written with its schemas."""

    registry: StandInRegistry

    def avro(self, kind: Any, *ids: Any, inside: str = "") -> list[bytes | None]:
        """Objects with an id of this type, or events that have such an object as a member."""
        schema: Any = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": kind}]}
        if inside:
            fields = [{"name": "op", "type": "string"}, {"name": inside, "type": schema}]
            schema = {"type": "record", "name": "Event", "fields": fields}
        number = self.registry.register("avro", json.dumps(schema))
        parsed = fastavro.parse_schema(schema)

        def record(value: Any) -> bytes:
            out = io.BytesIO()
            event = {"op": "d" if inside == "before" else "c", inside: {"id": value}}
            fastavro.schemaless_writer(out, parsed, event if inside else {"id": value})
            return _header(number) + out.getvalue()

        return [record(value) for value in ids]

    def protobuf(self, kind: str, *ids: int | bytes | None) -> list[bytes | None]:
        """Messages with an id of this type; None is one that was not set."""
        number = self.registry.register("protobuf", PROTO % ("Row", kind), "PROTOBUF")

        def field(value: int | bytes | None) -> bytes:
            if value is None:
                return b""
            return VARINT + bytes([value]) if isinstance(value, int) else LENGTH + _sized(value)

        return [_header(number) + b"\0" + field(value) for value in ids]

    def rejected(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        options: ValueOptions,
    ) -> dict[int, str]:
        """Why records are rejected, by their places; the others are changes of one row each."""
        records = Records(
            keys=pa.array(keys, pa.binary()),
            values=pa.array(values, pa.binary()),
            offsets=np.arange(len(values), dtype=np.int64),
            timestamps=np.zeros(len(values), dtype=np.int64),
        )
        parts = list(decoded(records, options, RegistryOptions(url=self.registry.url)))
        taken = [place for part in parts for place in part.rows.records.tolist()]
        found = {place: why for part in parts for place, why in part.rejected.items()}
        assert sorted([*taken, *found]) == list(range(len(values)))
        return found


def _header(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def _sized(content: bytes) -> bytes:
    return bytes([len(content)]) + content


@pytest.fixture
def written() -> Iterator[Written]:
    """Records of a registry of the test's own."""
    with StandInRegistry() as registry:
        yield Written(registry)


def logical(kind: str, of: str, **more: int) -> dict[str, Any]:
    """An Avro type that means more than its bytes."""
    return {"type": of, "logicalType": kind, **more}


ONE, OTHER = (UUID(int=number) for number in (1, 2))


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("long", 22, 21),
        ("string", "22", "x"),
        (["null", "long"], 22, None),
        (logical("decimal", "bytes", precision=9, scale=2), Decimal("1.50"), Decimal("1.51")),
        (logical("date", "int"), date(2026, 1, 1), date(2026, 1, 2)),
        (logical("uuid", "string"), ONE, OTHER),
        ("bytes", b"\0\x01", b"\0\x02"),
    ],
    ids=["long", "string", "null", "decimal", "date", "uuid", "bytes"],
)
@pytest.mark.parametrize("inside", ["", "after", "before"])
def test_a_key_in_avro_that_its_value_contradicts_is_rejected(written, kind, right, wrong, inside):
    """K3, Mend b10: values of any type, of a row alone and in Debezium's events."""
    options = ValueOptions(format="avro", envelope="debezium" if inside else "upsert")
    values = written.avro(kind, right, right, inside=inside)
    found = written.rejected(written.avro(kind, right, wrong), values, options)
    assert found == {1: CONTRADICTION}


@pytest.mark.parametrize(
    ("kind", "right", "wrong"), [("int64", 22, 21), ("string", b"22", b"x"), ("bytes", b"\0", b"")]
)
def test_a_key_in_protobuf_that_its_value_contradicts_is_rejected(written, kind, right, wrong):
    """K3, Mend b10: values that are told from those that were not set."""
    options = ValueOptions(format="protobuf", envelope="upsert")
    values = written.protobuf(kind, right, right)
    found = written.rejected(written.protobuf(kind, right, wrong), values, options)
    assert found == {1: CONTRADICTION}


Make = Callable[[Written], list[bytes | None]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (lambda w: w.avro("int", 22), lambda w: w.avro("long", 22)),
        (lambda w: w.avro("string", "22"), lambda w: w.avro("long", 22)),
        (lambda w: w.avro("double", 22.0), lambda w: w.avro("long", 22)),
        (
            lambda w: w.avro(logical("decimal", "bytes", precision=5, scale=1), Decimal("1.5")),
            lambda w: w.avro(logical("decimal", "bytes", precision=9, scale=3), Decimal("1.500")),
        ),
        (lambda w: w.avro("string", str(ONE)), lambda w: w.avro(logical("uuid", "string"), ONE)),
        (lambda w: w.avro("long", 22), lambda w: w.protobuf("int32", 22)),
        (lambda w: w.protobuf("string", b"22"), lambda w: w.protobuf("int64", 22)),
    ],
    ids=["int", "text", "double", "decimal", "uuid", "avro and protobuf", "protobuf"],
)
def test_a_key_of_another_type_is_the_same_value(written: Written, key: Make, value: Make) -> None:
    """K3, Mend b10: what the table cannot tell apart does not contradict."""
    keys, values = key(written), value(written)
    options = ValueOptions(format="avro", envelope="upsert")
    assert written.rejected(keys, values, options) == {}


@pytest.mark.parametrize("make", ["avro", "protobuf"])
def test_a_text_key_is_held_against_the_value(written, make):
    """K3, Mend b10: `key_format: string`, with the column that `key` names."""
    options = ValueOptions(format=make, key_format="string", envelope="upsert", key=["id"])
    values = getattr(written, make)("long" if make == "avro" else "int64", 22, 22, 22)
    assert written.rejected([b"22", b"21", None], values, options) == {1: CONTRADICTION}
