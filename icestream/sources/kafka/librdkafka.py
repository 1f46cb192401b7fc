"""The C library under the Kafka client, for the data path: what is declared of it, and where it is.

The wheel of confluent-kafka carries librdkafka; a client that was built from source uses the
machine's. Declared here is what `consumer` calls, in the words of the library's public header
`rdkafka.h`, whose layout and calls are stable over versions 1 and 2.
"""

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from icestream.errors import ConfigInvalid

VERSION_MIN = 0x02020000
CONSUMER = 1
PARTITION_END = -191
ERROR_TEXT_BYTES = 512

ErrorCallback = CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_void_p)
StatisticsCallback = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
LogCallback = CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_char_p)


class Message(ctypes.Structure):
    """`rd_kafka_message_t`: a record, or an error or event about the partition."""

    _fields_ = (
        ("err", c_int32),
        ("rkt", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("len", c_size_t),
        ("key", c_void_p),
        ("key_len", c_size_t),
        ("offset", c_int64),
        ("private", c_void_p),
    )

    @classmethod
    def place(cls, field: str) -> int:
        """Where a field is, counted in bytes from the message's address."""
        offset: int = getattr(cls, field).offset
        return offset

    @classmethod
    def size(cls) -> int:
        """How many bytes a message has, without its key and value."""
        return ctypes.sizeof(cls)


# Without the prefix `rd_kafka_` that all have: what a function answers, then what it takes.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "version": (c_int,),
    "conf_new": (c_void_p,),
    "conf_set": (c_int, c_void_p, c_char_p, c_char_p, c_char_p, c_size_t),
    "conf_set_error_cb": (None, c_void_p, ErrorCallback),
    "conf_set_stats_cb": (None, c_void_p, StatisticsCallback),
    "conf_set_log_cb": (None, c_void_p, LogCallback),
    "conf_destroy": (None, c_void_p),
    "new": (c_void_p, c_int, c_void_p, c_char_p, c_size_t),
    "destroy": (None, c_void_p),
    "set_log_queue": (c_int, c_void_p, c_void_p),
    "poll": (c_int, c_void_p, c_int),
    "last_error": (c_int,),
    "err2name": (c_char_p, c_int),
    "err2str": (c_char_p, c_int),
    "queue_new": (c_void_p, c_void_p),
    "queue_destroy": (None, c_void_p),
    "topic_new": (c_void_p, c_void_p, c_char_p, c_void_p),
    "topic_destroy": (None, c_void_p),
    "consume_start_queue": (c_int, c_void_p, c_int32, c_int64, c_void_p),
    "consume_stop": (c_int, c_void_p, c_int32),
    "consume_batch_queue": (c_ssize_t, c_void_p, c_int, c_void_p, c_size_t),
    "message_errstr": (c_char_p, c_void_p),
    "message_timestamp": (c_int64, c_void_p, c_void_p),
    "message_destroy": (None, c_void_p),
    "query_watermark_offsets": (
        *(c_int, c_void_p, c_char_p, c_int32, c_void_p, c_void_p),
        c_int,
    ),
}


class Library:
    """The loaded library: every declared function by its name without the prefix."""

    def __init__(self, path: str):
        loaded = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        for name, (answer, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"rd_kafka_{name}")
            function.restype, function.argtypes = answer, arguments
            self._functions[name] = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = self._functions[name]
        return function

    def address(self, name: str) -> int:
        """Where a function is, for kernels that call it."""
        return ctypes.cast(self._functions[name], c_void_p).value or 0


@cache
def library() -> Library:
    """The library that the client uses too; `ConfigInvalid` when there is none that will do."""
    path = _path()
    try:
        loaded = Library(path)
    except (OSError, AttributeError) as error:
        raise _not_found(f"{path} cannot be used: {error}.") from error
    version = loaded.version()
    if version < VERSION_MIN:
        raise _not_found(f"{path} has version {version:#x}, older than {VERSION_MIN:#x}.")
    return loaded


def _package() -> Path:
    client = importlib.util.find_spec("confluent_kafka")
    if client is None or client.origin is None:
        raise _not_found("The package confluent-kafka is not installed.")
    return Path(client.origin).parent


def _path() -> str:
    package = _package()
    # Where the tools that make wheels self-contained put libraries, on Linux and on macOS.
    bundled = [
        *package.with_name("confluent_kafka.libs").glob("librdkafka*.so*"),
        *(package / ".dylibs").glob("librdkafka*.dylib"),
    ]
    # A part of the client's wheel is the C++ interface, which is not the one that is wanted.
    found = sorted(str(path) for path in bundled if "++" not in path.name)
    if found:
        return found[0]
    if installed := ctypes.util.find_library("rdkafka"):
        return installed
    raise _not_found(f"Neither beside {package} nor on the machine.")


def _not_found(detail: str) -> ConfigInvalid:
    return ConfigInvalid(
        "cannot find the library librdkafka",
        detail=detail,
        hint="Install confluent-kafka as a wheel, or librdkafka 2.2 or newer.",
    )
