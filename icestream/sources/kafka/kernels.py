"""Compiled loops over messages of librdkafka; `consumer` says what they are for.

Messages are addresses of librdkafka's `rd_kafka_message_t`, whose layout is declared in
`librdkafka`. Functions of librdkafka come as addresses too.
"""

import numpy as np
import numpy.typing as npt

from icestream.kernels import (
    Bytes,
    at_address,
    call,
    copy_bytes,
    kernel,
    own_int32,
    own_int64,
    part,
    pointer,
)
from icestream.sources.kafka.librdkafka import Message

Addresses = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int64]
# What the kernels write of the values, or of the keys: where each begins, which ones are not null,
# and their bytes.
Binary = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], Bytes]

_MESSAGE_BYTES = Message.size()
_ERROR, _OFFSET = Message.place("err"), Message.place("offset")
_VALUE, _VALUE_SIZE = Message.place("payload"), Message.place("len")
_KEY, _KEY_SIZE = Message.place("key"), Message.place("key_len")
_NO_ERROR = 0
_NO_TIMESTAMP = -1
_TIMESTAMP_NOT_AVAILABLE = 0


@kernel
def measure(messages: Addresses, end: int, room: int, at_least: int) -> tuple[int, int, int]:
    """How many records come first that lie below `end`, and the bytes of their values and keys.

    Stops at a message that is no record, and before one that does not fit into `room`, if there
    are `at_least` so many.
    """
    value_bytes = key_bytes = 0
    for place in range(messages.size):
        message = at_address(messages[place], _MESSAGE_BYTES)
        value_size, key_size = own_int64(message, _VALUE_SIZE), own_int64(message, _KEY_SIZE)
        fits = value_bytes + key_bytes + value_size + key_size <= room or place < at_least
        failed = own_int32(message, _ERROR) != _NO_ERROR
        if failed or not fits or own_int64(message, _OFFSET) >= end:
            return place, value_bytes, key_bytes
        value_bytes += value_size
        key_bytes += key_size
    return messages.size, value_bytes, key_bytes


@part
def _append(message: Bytes, fields: tuple[int, int], row: int, column: Binary) -> None:
    starts, valid, content = column
    address, size = own_int64(message, fields[0]), own_int64(message, fields[1])
    valid[row] = address != 0
    if address != 0:
        copy_bytes(pointer(content), starts[row], at_address(address, size), size)
    starts[row + 1] = starts[row] + (size if address != 0 else 0)


@kernel
def copy_records(messages: Addresses, values: Binary, keys: Binary, offsets: Integers) -> None:
    """Write what records hold into columns of the sizes that `measure` told.

    Both begin with a start of zero.
    """
    for row in range(messages.size):
        message = at_address(messages[row], _MESSAGE_BYTES)
        _append(message, (_VALUE, _VALUE_SIZE), row, values)
        _append(message, (_KEY, _KEY_SIZE), row, keys)
        offsets[row] = own_int64(message, _OFFSET)


@kernel
def copy_timestamps(
    messages: Addresses, timestamp_of: int, kind: npt.NDArray[np.int32], timestamps: Integers
) -> None:
    """Write the milliseconds of each record, -1 where it has none.

    `timestamp_of` is the address of rd_kafka_message_timestamp, which writes to `kind`.
    """
    for row in range(messages.size):
        milliseconds = call(timestamp_of, messages[row], kind.ctypes.data)
        timestamps[row] = _NO_TIMESTAMP if kind[0] == _TIMESTAMP_NOT_AVAILABLE else milliseconds


@kernel
def destroy(messages: Addresses, destroy_message: int) -> None:
    """Give messages back to librdkafka, by the address of rd_kafka_message_destroy."""
    for place in range(messages.size):
        call(destroy_message, messages[place], 0)
