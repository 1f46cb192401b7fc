"""Mend d2: no compiled reader looks beyond the bytes that it was given, whatever they say.

What lies around the bytes differs from reading to reading. A reader that looks beyond its message
sees other bytes each time, and answers otherwise.
"""

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icestream.formats import avro, protobuf
from icestream.formats.binary_texts import (
    SCALE_MAX,
    SCALE_MIN,
    TEXT_BYTES_MAX,
    decimal_texts,
    decoded_bytes,
)
from icestream.formats.json_cells import MalformedJson, members, values
from icestream.sources.postgres.framing import State, Stop, row_tuples, walk
from tests.examples import examples
from tests.property.test_avro import damaged, encoded
from tests.property.test_protobuf import PROTO3, WIRE

MANY = examples(300)
AROUND = (0, 1, 0x64, 0xFF)
LSN = 0x1_0000_0002


def copy_data(body: bytes) -> bytes:
    return b"d" + struct.pack("!i", len(body) + 4) + body


def wal_data(message: bytes) -> bytes:
    return copy_data(b"w" + bytes(24) + message)


def tuple_of(*cells: bytes) -> bytes:
    parts = [b"t" + struct.pack("!i", len(cell)) + cell for cell in cells]
    return struct.pack("!h", len(cells)) + b"".join(parts)


BEGIN = b"B" + struct.pack("!qqi", LSN, 5, 7)
INSERT = b"I" + struct.pack("!I", 99) + b"N" + tuple_of(b"1", b"one")
UPDATE = b"U" + struct.pack("!I", 99) + b"K" + tuple_of(b"1") + b"N" + tuple_of(b"2", b"two")
DELETE = b"D" + struct.pack("!I", 99) + b"O" + tuple_of(b"2", b"two")
COMMIT = b"C" + struct.pack("!bqqq", 0, LSN, LSN + 8, 11)
KEEP_ALIVE = b"k" + struct.pack("!qqb", LSN, 3, 1)
MESSAGES = [BEGIN, INSERT, UPDATE, DELETE, COMMIT]


def in_the_middle(content: bytes, around: int) -> np.ndarray:
    """The same bytes in the middle of others."""
    whole = bytes([around]) * 64 + content + bytes([around]) * 64
    return np.frombuffer(whole, dtype=np.uint8)[64:-64]


def walked(content: bytes, around: int) -> tuple[Any, ...]:
    """All that a walk over a stream says and leaves behind."""
    state = np.zeros(len(State), dtype=np.int64)
    rows, bytes_, xids = np.zeros((7, 8), np.int64), np.zeros(512, np.uint8), np.zeros(4, np.int64)
    numbers = partial(np.array, dtype=np.int64)
    tables = numbers([99]), numbers([0]), numbers([0, 1]), numbers([0])
    used, stop = walk(in_the_middle(content, around), state, tables, (rows, bytes_, xids))
    return used, stop, state.tolist(), rows.tolist(), bytes_.tolist(), xids.tolist()


def agreed(read: Callable[[int], Any]) -> Any:
    """What a reader says, which is the same whatever lies around the bytes."""
    first, *others = [read(around) for around in AROUND]
    assert all(other == first for other in others)
    return first


def test_a_whole_stream_is_walked():
    """P4: the bytes of the other tests are right ones before they are damaged."""
    content = b"".join([copy_data(KEEP_ALIVE), *map(wal_data, MESSAGES)])
    used, stop, state, *_ = agreed(partial(walked, content))
    assert (used, stop) == (len(content), Stop.NEED_MORE)
    assert state[State.ROWS_WHOLE] == 3 and state[State.END_LSN] == LSN + 8
    assert state[State.SENT_LSN] == LSN and state[State.REPLY] == 1


@pytest.mark.parametrize(
    "message", [*MESSAGES, b""], ids="begin insert update delete commit none".split()
)
def test_a_short_message_of_the_stream_is_damaged(message):
    """Mend d2, K3: fields beyond a message's end are not read, whatever follows it."""
    for size in range(len(message) or 1):
        used, stop, state, *_ = agreed(partial(walked, wal_data(message[:size])))
        assert (used, stop) == (0, Stop.DAMAGED)
        assert not any(state)


def test_what_is_neither_data_nor_a_keep_alive_is_damaged():
    """Mend d2, K3: a message without the header of the stream is not read as one that has it."""
    for size in range(len(KEEP_ALIVE)):
        assert agreed(partial(walked, copy_data(KEEP_ALIVE[:size])))[:2] == (0, Stop.DAMAGED)
    for kind in b"BCIUDx":
        content = copy_data(bytes([kind]) + bytes(60))
        assert agreed(partial(walked, content))[:2] == (0, Stop.DAMAGED)
    inside = agreed(partial(walked, wal_data(KEEP_ALIVE)))
    assert inside[1] == Stop.MESSAGE and not any(inside[2])


@MANY
@given(st.sampled_from(MESSAGES).flatmap(damaged), st.sampled_from(MESSAGES))
def test_a_damaged_stream_is_walked_within_its_bytes(message, before):
    """Mend d2, K3: whatever a message says of its own lengths."""
    content = wal_data(before) + wal_data(message)
    agreed(partial(walked, content))
    agreed(partial(walked, content[:-3]))
    ends = np.array([len(message)])

    def tuples(around: int) -> Any:
        old, new, broken = row_tuples(in_the_middle(message, around), np.array([0]), ends)
        return broken, None if broken >= 0 else (old.tolist(), new.tolist())

    agreed(tuples)


def between(record: bytes, around: int) -> pa.BinaryArray:
    """A record between two that are null, whose bytes are there all the same."""
    junk = bytes([around]) * 40
    offsets = np.cumsum([0, len(junk), len(record), len(junk)]).astype(np.int32)
    buffers = [pa.py_buffer(b"\2"), pa.py_buffer(offsets), pa.py_buffer(junk + record + junk)]
    return pa.Array.from_buffers(pa.binary(), 3, buffers)


SCHEMA = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "a", "type": "long"},
        {"name": "b", "type": ["null", "string", "double"]},
        {"name": "c", "type": {"type": "array", "items": {"type": "map", "values": "bytes"}}},
        {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9}},
        {"name": "e", "type": {"type": "fixed", "name": "f", "size": 12}},
    ],
}
RECORD = encoded(
    SCHEMA, {"a": 2**40, "b": "text", "c": [{"k": b"v"}, {}], "d": b"\1\2", "e": bytes(12)}
)


@MANY
@given(damaged(RECORD))
def test_a_damaged_avro_record_is_read_within_its_bytes(record):
    """Mend d2, K3: counts and lengths that reach beyond the record."""

    def read(around: int) -> Any:
        field, rejected = avro.decode(between(record, around), json.dumps(SCHEMA))
        field.array.validate(full=True)
        return repr(field.array.to_pylist()), rejected

    agreed(read)


@examples(100)
@given(WIRE.flatmap(damaged))
def test_a_damaged_protobuf_message_is_read_within_its_bytes(record):
    """Mend d2, K3: lengths, groups and tags that reach beyond the message."""

    def read(around: int) -> Any:
        field, rejected = protobuf.decode(between(record, around), PROTO3)
        field.array.validate(full=True)
        return repr(field.array.to_pylist()), rejected

    agreed(read)


@MANY
@given(damaged(b'{"a": [1, -2.5e3, "\\u00e4\\\\"], "b": {"c": null}, "d": tru}'))
def test_damaged_json_is_read_within_its_bytes(record):
    """Mend d2, K3: strings, numbers and words that are cut short."""

    def read(around: int) -> Any:
        cells, rejected = values(between(record, around))
        try:
            texts = {name: cell.text().to_pylist() for name, cell in members(cells).items()}
        except MalformedJson as error:
            texts = {"": [str(error)]}
        return cells.kinds.tolist(), texts, rejected

    agreed(read)


@MANY
@given(damaged(b"AQIDBAUGBwgJCg=="))
def test_damaged_base64_is_read_within_its_bytes(record):
    """Mend d2, K3: texts without their padding."""

    def read(around: int) -> Any:
        try:
            return decoded_bytes(between(record, around)).to_pylist()
        except ValueError as error:
            return str(error)

    agreed(read)


@pytest.mark.parametrize("scale", [SCALE_MAX + 1, SCALE_MIN - 1, 2**31 - 1, -(2**31)])
def test_an_impossible_scale_is_refused(scale):
    """Mend d2, K3: no database has such a number."""
    with pytest.raises(ValueError, match="impossible scale"):
        decimal_texts(pa.array([b"\1"], pa.binary()), np.array([scale], np.int32))


@pytest.mark.parametrize("scale", [SCALE_MAX, SCALE_MIN, 0, 1])
def test_the_largest_scales_are_exact(scale):
    """K3: each zero is written."""
    found = decimal_texts(pa.array([b"\xff", b"\x0c"], pa.binary()), np.full(2, scale, np.int32))
    zeros = "0" * abs(scale)
    if scale < 0:
        assert found.to_pylist() == [f"-1{zeros}", f"12{zeros}"]
    elif scale > 1:
        assert found.to_pylist() == [f"-0.{zeros[1:]}1", f"0.{zeros[2:]}12"]


def test_decimals_that_become_too_large_together_are_refused_before_memory_is_taken():
    """Mend d2, K3: 0.8 MB of short numbers with large scales took 2.2 GB, and positions wrapped."""
    count = TEXT_BYTES_MAX // SCALE_MAX + 1
    many = pa.array([b"\1"] * count, pa.binary())
    with pytest.raises(ValueError, match="too many digits together"):
        decimal_texts(many, np.full(count, SCALE_MAX, np.int32))
    # What is null takes nothing.
    absent = pa.array([None] * count, pa.binary())
    assert decimal_texts(absent, np.full(count, SCALE_MAX, np.int32)).null_count == count
