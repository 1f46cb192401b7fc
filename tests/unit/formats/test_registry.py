"""Schemas by id from a registry, and batches cut by the ids of their records."""

import json

import pyarrow as pa
import pytest

from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.formats.options import RegistryOptions
from icestream.formats.payloads import payloads_of
from icestream.formats.registry import Registry, UnknownSchema, framed
from tests.registry import StandInRegistry


def header(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def body(payloads, place: int) -> bytes:
    return payloads.content[payloads.starts[place] : payloads.ends[place]].tobytes()


def test_records_are_cut_by_schema_and_their_headers_are_gone():
    """K3: the records of each id keep their order and places."""
    values = [header(7) + b"a", None, header(258) + b"bb", header(7), header(2**31 + 5) + b"c"]
    found = framed(payloads_of(pa.array(values, pa.binary())))
    assert set(found.by_id) == {7, 258, 2**31 + 5}
    places, payloads = found.by_id[7]
    assert places.tolist() == [0, 3]
    assert [body(payloads, 0), body(payloads, 1)] == [b"a", b""]
    assert body(found.by_id[258][1], 0) == b"bb"
    assert found.absent.tolist() == [1]
    assert found.rejected == {}


def test_a_record_without_a_header_is_rejected_and_hides_no_other():
    """K3: too short, and with another first byte."""
    values = [b"", b"\0\0\0\0", b'{"a": 1}', header(1) + b"x"]
    found = framed(payloads_of(pa.array(values, pa.binary())))
    assert set(found.rejected) == {0, 1, 2}
    assert "fewer than the header" in found.rejected[1]
    assert "zero byte" in found.rejected[2]
    assert found.by_id[1][0].tolist() == [3]


def test_slices_of_an_array_are_read_at_their_place():
    """K3: an array may begin in the middle of its buffers, and be large."""
    for kind in (pa.binary(), pa.large_binary()):
        values = pa.array([b"zzzzzz", header(3) + b"q", None], kind)[1:]
        found = framed(payloads_of(values))
        assert body(found.by_id[3][1], 0) == b"q"
        assert found.absent.tolist() == [1]
    assert framed(payloads_of(pa.array([], pa.binary()))).by_id == {}
    assert framed(payloads_of(pa.nulls(2, pa.binary()))).absent.tolist() == [0, 1]


def test_a_schema_is_asked_for_once():
    """K3: ids are immutable."""
    with StandInRegistry() as server:
        number = server.register("orders-value", '"string"')
        registry = Registry(RegistryOptions(url=server.url + "/"))
        first, second = registry.schema(number), registry.schema(number)
        registry.close()
        assert first is second
        assert (first.kind, first.text, first.id) == ("AVRO", '"string"', number)
        assert server.requests == [f"/schemas/ids/{number}"]


def test_imports_are_resolved_with_those_that_others_build_on_first():
    """K3: references lead to other subjects, whose names may need escapes."""
    with StandInRegistry() as server:
        server.register("money/v1", "message Money {}", "PROTOBUF")
        inner = [{"name": "money.proto", "subject": "money/v1", "version": 1}]
        server.register("line", "message Line {}", "PROTOBUF", inner)
        outer = [{"name": "line.proto", "subject": "line", "version": 1}, *inner]
        number = server.register("order", "message Order {}", "PROTOBUF", outer)
        registry = Registry(RegistryOptions(url=server.url))
        found = registry.schema(number)
        registry.close()
        assert found.kind == "PROTOBUF"
        assert list(found.references) == ["money.proto", "line.proto"]


def test_an_import_that_is_gone_says_which():
    """K3: the error names subject and version."""
    with StandInRegistry() as server:
        lost = [{"name": "x", "subject": "gone", "version": 3}]
        number = server.register("order", json.dumps("string"), references=lost)
        with pytest.raises(ConfigInvalid, match="version 3 of subject gone"):
            Registry(RegistryOptions(url=server.url)).schema(number)


def test_an_id_that_the_registry_does_not_have_is_told_apart_from_trouble():
    """K3: the records of that id are rejected, the others are not."""
    with StandInRegistry() as server:
        number = server.register("s", '"long"')
        registry = Registry(RegistryOptions(url=server.url))
        found, lacking = registry.schemas([number, 99])
        assert list(found) == [number]
        assert "id 99" in lacking[99]
        assert "check" in lacking[99]
        with pytest.raises(UnknownSchema):
            registry.schema(99)
        registry.close()


def test_what_is_lacking_is_asked_for_again():
    """K3: a schema may be registered after its first record was seen."""
    with StandInRegistry() as server:
        registry = Registry(RegistryOptions(url=server.url))
        with pytest.raises(UnknownSchema):
            registry.schema(1)
        assert server.register("s", '"long"') == 1
        assert registry.schema(1).text == '"long"'
        registry.close()


def test_credentials_are_sent_and_never_shown():
    """K3: basic authentication."""
    with StandInRegistry(username="reader", password="hunter22") as server:
        number = server.register("s", '"long"')
        options = RegistryOptions(url=server.url, username="reader", password="hunter22")
        registry = Registry(options)
        assert registry.schema(number).text == '"long"'
        registry.close()
        assert "hunter22" not in repr(options)
        wrong = RegistryOptions(url=server.url, username="reader", password="not-this-one")
        with pytest.raises(ConfigInvalid, match="refuses access") as caught:
            Registry(wrong).schema(number)
        assert "not-this-one" not in str(caught.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_trouble_that_may_pass_is_retried_by_the_pipeline(status):
    """K3: the registry is busy or broken."""
    with StandInRegistry() as server:
        server.fail_with = status
        with pytest.raises(SourceUnavailable, match="could not answer"):
            Registry(RegistryOptions(url=server.url)).schema(1)


def test_a_registry_that_is_down_may_come_back():
    """K3: nothing listens at the address."""
    with StandInRegistry() as server:
        url = server.url
    with pytest.raises(SourceUnavailable, match="could not reach"):
        Registry(RegistryOptions(url=url)).schema(1)


def test_something_else_at_the_address_is_a_matter_of_configuration():
    """K3: a 404 of another server says nothing about schemas."""
    with StandInRegistry() as server:
        with pytest.raises(ConfigInvalid, match="no schema registry"):
            Registry(RegistryOptions(url=server.url + "/elsewhere")).schema(1)
    with pytest.raises(ConfigInvalid, match="not an address"):
        Registry(RegistryOptions(url="registry:8081"))
    with pytest.raises(ConfigInvalid, match="credentials in it") as caught:
        Registry(RegistryOptions(url="http://me:secret99@registry:8081"))
    assert "secret99" not in str(caught.value)
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        Registry(RegistryOptions(url="https://registry:8081", cert="no-such-file.pem"))


def test_a_registry_without_tls_at_a_secure_address_is_a_matter_of_configuration():
    """K3: TLS that cannot be set up never becomes plain text."""
    with StandInRegistry() as server:
        secure = server.url.replace("http://", "https://")
        with pytest.raises(ConfigInvalid, match="no secure connection"):
            Registry(RegistryOptions(url=secure)).schema(1)
