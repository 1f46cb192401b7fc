"""Batches of records with schemas in a registry, of several schemas and formats at once."""

import json

import pyarrow as pa

from icestream.formats.options import RegistryOptions
from icestream.formats.registered import decode
from icestream.formats.registry import Registry
from tests.registry import StandInRegistry

PROTO = """syntax = "proto3"; package shop; import "money.proto";
message Other { string label = 1; message Deep { int32 n = 1; } }
message Order { int64 id = 1; money.Money price = 2; }
"""
MONEY = 'syntax = "proto3"; package money; message Money { int64 cents = 1; }'


def header(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def test_every_record_is_in_one_portion_or_rejected():
    """K3: Avro and Protobuf side by side, with records that nobody can read among them."""
    with StandInRegistry() as server:
        fields = [{"name": "x", "type": "long"}]
        record = server.register("a", json.dumps({"type": "record", "name": "R", "fields": fields}))
        server.register("money", MONEY, "PROTOBUF")
        reference = {"name": "money.proto", "subject": "money", "version": 1}
        order = server.register("o", PROTO, "PROTOBUF", [reference])
        json_schema = server.register("j", "{}", "JSON")
        circle = [{"name": "next", "type": ["null", "C"]}]
        endless = server.register(
            "c", json.dumps({"type": "record", "name": "C", "fields": circle})
        )
        values = [
            header(record) + b"\x02",
            None,
            header(order) + b"\x02\x02" + b"\x08\x05\x12\x02\x08\x07",
            b"plain text",
            header(record) + b"\x04\x04",
            header(order) + b"\x00" + b"\x0a\x01a",
            header(order) + b"\x04\x00\x00" + b"\x08\x09",
            header(order) + b"\x81",
            header(77),
            header(json_schema) + b"{}",
            header(endless) + b"\0",
            header(record) + b"\x06",
        ]
        registry = Registry(RegistryOptions(url=server.url))
        portions, rejected = decode(pa.array(values, pa.binary()), registry)
        registry.close()
    found = {
        place: (portion.schema_id, value)
        for portion in portions
        for place, value in zip(portion.places, portion.field.array.to_pylist(), strict=True)
    }
    assert found == {
        0: (record, {"x": 1}),
        1: (None, None),
        2: (order, {"id": 5, "price": {"cents": 7}}),
        5: (order, {"label": "a"}),
        6: (order, {"n": 9}),
        11: (record, {"x": 3}),
    }
    assert set(rejected) == {3, 4, 7, 8, 9, 10}
    assert "beyond its end" in rejected[4]
    assert "which message" in rejected[7]
    assert "id 77" in rejected[8]
    assert "JSON" in rejected[9]
    assert "contains itself" in rejected[10]


def test_a_message_that_the_schema_does_not_have_rejects_the_records_that_name_it():
    """K3: and no others."""
    with StandInRegistry() as server:
        money = server.register("money", MONEY, "PROTOBUF")
        broken = server.register("broken", "message {", "PROTOBUF")
        bodies = [(money, b"\x02\x0a\x08\x05"), (broken, b"\0"), (money, b"\0")]
        values = [header(number) + content for number, content in bodies]
        registry = Registry(RegistryOptions(url=server.url))
        portions, rejected = decode(pa.array(values, pa.binary()), registry)
        registry.close()
    assert set(rejected) == {0, 1}
    assert "does not have the message" in rejected[0]
    assert "protoc does not take it" in rejected[1]
    assert [portion.places.tolist() for portion in portions] == [[2]]
