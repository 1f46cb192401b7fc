"""Reads ranges of a partition's offsets on workers, into columns.

A range is read by a consumer of its own that belongs to no group and commits nothing: what was
read is known by what the pipeline has committed. Only records of committed transactions are seen,
so a range that lies below the last stable offset gives the same records every time.

The client's Python binding makes an object of every record. Here the C library below it hands over
addresses of records by the thousand, and compiled loops copy what is there into columns. For a
million records of 280 bytes this takes a quarter of the processor time.

Where a range ends is not told by a count: the last offsets may hold nothing, because they belong
to aborted transactions, to the marks that end transactions, or to records that compaction took
away. So reading goes on until the range's last offset was seen, or a later one, or the end of the
log after it.
"""

import ctypes
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from icestream.errors import HistoryLost, IcestreamError, check, shown
from icestream.formats.rows import Records
from icestream.kernels.arrays import validity
from icestream.patience import Deadline
from icestream.sources import SplitsLost
from icestream.sources.kafka.errors import (
    keep_settings_secret,
    needs_operator,
    setting_refused,
    translated,
)
from icestream.sources.kafka.kernels import (
    Addresses,
    Binary,
    copy_records,
    copy_timestamps,
    destroy,
    measure,
)
from icestream.sources.kafka.librdkafka import (
    CONSUMER,
    ERROR_TEXT_BYTES,
    PARTITION_END,
    ErrorCallback,
    LogCallback,
    Message,
    StatisticsCallback,
    library,
)

# Enough that calls cost nothing beside the records, few enough that their addresses stay in cache.
MESSAGES_MAX = 8_192
# The offsets of Arrow's binary columns have 32 bits.
BATCH_BYTES_MAX = 2**30
# How long one call into the library lasts, so that errors are noticed meanwhile.
POLL_SECONDS = 0.1
# For facts that only make an error clearer.
QUERY_SECONDS = 5.0
# What is fetched ahead stays in the processor's cache; larger fetches take more of its time.
FETCH_BYTES = 4 * 1024**2
AHEAD_BYTES = 2 * FETCH_BYTES
# Never the bound: what is fetched ahead is bounded by its bytes.
QUEUED_MESSAGES_MAX = 10_000_000

_REQUIRED = {
    "isolation.level": "read_committed",
    "enable.auto.commit": "false",
    "auto.offset.reset": "error",
    "enable.partition.eof": "true",
    "check.crcs": "true",
    "allow.auto.create.topics": "false",
    # Log lines come through our own calls, not from the library's threads and not to stderr.
    "log.queue": "true",
}
_OUT_OF_RANGE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The offsets of a partition from `start` up to, but not including, `end`."""

    topic: str
    partition: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"offsets {self.start} to {self.end} of partition {self.partition} of {self.topic}"


class PartitionStalled(SplitsLost):
    """A partition gave nothing for too long; others may still be read."""

    def __init__(
        self, topic: str, partition: int, *, detail: str | None = None, hint: str | None = None
    ):
        super().__init__(
            f"could not go on reading partition {partition} of topic {topic}",
            detail=detail,
            hint=hint,
        )
        self.topic = topic
        self.partition = partition

    def __reduce__(self) -> tuple[Any, ...]:
        return _stalled, (self.topic, self.partition, self.detail, self.hint)


def _stalled(topic: str, partition: int, detail: str | None, hint: str | None) -> PartitionStalled:
    return PartitionStalled(topic, partition, detail=detail, hint=hint)


def read_range(
    settings: Mapping[str, str], wanted: Range, *, read_timeout: float, batch_bytes: int
) -> Iterator[Records]:
    """All committed records of a range in order, keys and values of `batch_bytes` at a time.

    A batch holds more only when a single record does. Read twice, a range gives the same records,
    though the batches may end elsewhere.

    Raises `PartitionStalled` when nothing comes for `read_timeout` seconds, `HistoryLost` when the
    broker no longer has the start of the range, `SourceUnavailable` when it does not know the
    partition, `ConfigInvalid` when it refuses the client.
    """
    check(0 <= wanted.start <= wanted.end, "a range does not end before its start")
    check(0 < batch_bytes <= BATCH_BYTES_MAX, "a batch fits into a binary column")
    if wanted.start == wanted.end:
        return
    watched = {"statistics.interval.ms": str(max(int(read_timeout * 1000 / 4), 1))}
    tuned = {**_tuned(read_timeout), **settings, **_REQUIRED, **watched}
    with _Consumer(tuned, wanted) as consumer:
        parts: list[Records] = []
        room = batch_bytes
        while consumer.wait_for_record(read_timeout):
            part = consumer.take(room, at_least=0 if parts else 1)
            if len(part):
                parts.append(part)
                room -= _size(part)
            else:
                yield _joined(parts)
                parts, room = [], batch_bytes
        if parts:
            yield _joined(parts)


def _tuned(read_timeout: float) -> dict[str, str]:
    """Settings that the user's own may replace."""
    return {
        "fetch.message.max.bytes": str(FETCH_BYTES),
        "queued.max.messages.kbytes": str(AHEAD_BYTES // 1024),
        "queued.min.messages": str(QUEUED_MESSAGES_MAX),
        # A topic that is gone is told before reading counts as stalled.
        "topic.metadata.propagation.max.ms": str(int(read_timeout * 1000 / 2)),
        # What is asked for is there already: only the wait for the end of the log takes this long.
        "fetch.wait.max.ms": "50",
        # A queue that was full is empty a moment later. The default would wait for a second.
        "fetch.queue.backoff.ms": "5",
        "reconnect.backoff.max.ms": "2000",
    }


def _size(records: Records) -> int:
    return int(records.values.nbytes + records.keys.nbytes)


def _joined(parts: Sequence[Records]) -> Records:
    if len(parts) == 1:
        return parts[0]
    return Records(
        keys=pa.concat_arrays([part.keys for part in parts]),
        values=pa.concat_arrays([part.values for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        timestamps=np.concatenate([part.timestamps for part in parts]),
    )


class _Consumer:
    """One consumer for one range, used by one thread.

    `_messages` holds addresses of what the library has handed over; those from `_first` up to
    `_stop` are still to be looked at and to be given back.
    """

    def __init__(self, settings: Mapping[str, str], wanted: Range):
        keep_settings_secret(settings)
        self._wanted = wanted
        self._position = wanted.start
        self._fetched = wanted.start
        self._trouble: tuple[str, str] | None = None
        self._messages: Addresses = np.empty(MESSAGES_MAX, dtype=np.int64)
        self._first = self._stop = 0
        self._library = library()
        # The library calls these as long as it lives, so they must not go before it.
        self._callbacks = (
            ErrorCallback(self._note_trouble),
            StatisticsCallback(self._note_progress),
            LogCallback(_log),
        )
        self._client = self._new_client(settings)
        self._library.set_log_queue(self._client, None)
        self._queue = self._library.queue_new(self._client)
        self._topic = self._library.topic_new(self._client, wanted.topic.encode(), None)
        # There is no topic when its name cannot be one.
        if not self._topic or self._library.consume_start_queue(
            self._topic, wanted.partition, wanted.start, self._queue
        ):
            code = self._library.last_error()
            error = self._translated(code, self._library.err2str(code).decode())
            self._let_go()
            raise error

    def _new_client(self, settings: Mapping[str, str]) -> int:
        known = self._library
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        conf = known.conf_new()
        known.conf_set_error_cb(conf, self._callbacks[0])
        known.conf_set_stats_cb(conf, self._callbacks[1])
        known.conf_set_log_cb(conf, self._callbacks[2])
        refused = any(
            known.conf_set(conf, name.encode(), value.encode(), text, ERROR_TEXT_BYTES)
            for name, value in settings.items()
        )
        client: int | None = None
        if not refused:
            client = known.new(CONSUMER, conf, text, ERROR_TEXT_BYTES)
        if client is None:
            # A client owns its configuration, but there is none.
            known.conf_destroy(conf)
            raise setting_refused(text.value.decode(errors="replace"))
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A client waits for all its messages before it goes.
        self._give_back(self._stop)
        self._library.consume_stop(self._topic, self._wanted.partition)
        self._let_go()

    def _let_go(self) -> None:
        self._library.queue_destroy(self._queue)
        if self._topic:
            self._library.topic_destroy(self._topic)
        self._library.destroy(self._client)

    def wait_for_record(self, seconds: float) -> bool:
        """Whether the range has a record left, which is then the first of `_messages`."""
        deadline = Deadline(seconds)
        seen = self._position, self._fetched
        while self._position < self._wanted.end:
            if self._first < self._stop or self._fill():
                message = Message.from_address(int(self._messages[self._first]))
                if not message.err:
                    return bool(message.offset < self._wanted.end)
                self._pass_event(message)
            if seen != (self._position, self._fetched):
                seen = self._position, self._fetched
                deadline = Deadline(seconds)
            elif deadline.passed:
                raise self._stalled(seconds)
        return False

    def _fill(self) -> bool:
        """Take over what has come; whether anything has, after a short wait."""
        start = self._messages.ctypes.data
        consume = self._library.consume_batch_queue
        # The library waits until all places are filled: wait for one, then take what is there.
        count = consume(self._queue, int(POLL_SECONDS * 1000), start, 1)
        if count > 0:
            rest = start + self._messages.itemsize
            count += max(consume(self._queue, 0, rest, MESSAGES_MAX - 1), 0)
        # Errors that concern no record, and log lines.
        self._library.poll(self._client, 0)
        self._first, self._stop = 0, max(count, 0)
        return self._stop > 0

    def _pass_event(self, message: Message) -> None:
        """Take note of the log's end; raise any other error that comes in place of a record."""
        code, offset = message.err, message.offset
        reason = (self._library.message_errstr(ctypes.addressof(message)) or b"").decode()
        self._give_back(self._first + 1)
        if code != PARTITION_END:
            raise self._translated(code, reason)
        self._position = max(self._position, offset)

    def take(self, room: int, at_least: int) -> Records:
        """The records that come next, as far as they are here and fit into `room` bytes."""
        messages = self._messages[self._first : self._stop]
        count, value_bytes, key_bytes = measure(messages, self._wanted.end, room, at_least)
        messages = messages[:count]
        values, keys = _empty(count, value_bytes), _empty(count, key_bytes)
        offsets, timestamps = np.empty(count, np.int64), np.empty(count, np.int64)
        copy_records(messages, values, keys, offsets)
        kind = np.zeros(1, np.int32)
        copy_timestamps(messages, self._library.address("message_timestamp"), kind, timestamps)
        self._give_back(self._first + count)
        if count:
            ascending = bool(np.all(offsets[1:] > offsets[:-1]))
            check(ascending and offsets[0] >= self._position, "records come in order, each once")
            self._position = int(offsets[-1]) + 1
            self._trouble = None
        return Records(
            keys=_binary(keys), values=_binary(values), offsets=offsets, timestamps=timestamps
        )

    def _give_back(self, stop: int) -> None:
        destroy(self._messages[self._first : stop], self._library.address("message_destroy"))
        self._first = stop

    def _note_trouble(self, _client: Any, code: int, reason: bytes, _opaque: Any) -> None:
        """Remember why nothing comes; what only the operator can mend says more than the rest."""
        name = self._library.err2name(code).decode()
        if self._trouble is None or not needs_operator(self._trouble[0]):
            self._trouble = name, reason.decode(errors="replace")

    def _note_progress(self, _client: Any, text: int, size: int, _opaque: Any) -> int:
        fetched = fetched_offset(ctypes.string_at(text, size), self._wanted)
        self._fetched = max(self._fetched, fetched)
        # Tells the library that the text is its own to free.
        return 0

    def _stalled(self, seconds: float) -> IcestreamError:
        if self._trouble is not None and needs_operator(self._trouble[0]):
            return translated(*self._trouble, f"read {self._wanted}")
        why = "" if self._trouble is None else f" Kafka says {': '.join(self._trouble)}."
        return PartitionStalled(
            self._wanted.topic,
            self._wanted.partition,
            detail=f"Nothing came from offset {self._position} on for {seconds:g} seconds.{why}",
            hint="Check that the partition's leader runs and can be reached from here.",
        )

    def _translated(self, code: int, reason: str) -> IcestreamError:
        name = self._library.err2name(code).decode()
        if name not in _OUT_OF_RANGE:
            return translated(name, reason, f"read {self._wanted}")
        return HistoryLost(
            f"cannot read {self._wanted}: the broker does not have them",
            detail=f"Offset {self._position} was asked for. {self._served()}",
            hint="Retention removed records before they were read, or the topic was created anew. "
            "Read it from its start again; a longer retention gives more time.",
        )

    def _served(self) -> str:
        first, last = ctypes.c_int64(), ctypes.c_int64()
        failed = self._library.query_watermark_offsets(
            self._client,
            self._wanted.topic.encode(),
            self._wanted.partition,
            ctypes.byref(first),
            ctypes.byref(last),
            int(QUERY_SECONDS * 1000),
        )
        # Negative ones are no offsets: the broker does not know them yet.
        unknown = failed or min(first.value, last.value) < 0
        return "" if unknown else f"The broker has offsets {first.value} to {last.value}."


def fetched_offset(statistics: bytes, wanted: Range) -> int:
    """How far the library has fetched a partition, by its statistics; -1 if it does not say.

    It may pass over much that holds no record for us, and that is progress too.
    """
    topics = json.loads(statistics).get("topics", {})
    partitions = topics.get(wanted.topic, {}).get("partitions", {})
    return int(partitions.get(str(wanted.partition), {}).get("next_offset", -1))


def _log(_client: Any, _level: int, _facility: bytes, text: bytes) -> None:
    # The library tells of each of many tries; what matters is raised.
    logger.debug("kafka client: %s", shown(text.decode(errors="replace")))


def _empty(count: int, size: int) -> Binary:
    starts = np.empty(count + 1, np.int32)
    starts[0] = 0
    return starts, np.empty(count, np.bool_), np.empty(size, np.uint8)


def _binary(column: Binary) -> pa.Array:
    starts, valid, content = column
    buffers = [validity(valid), pa.py_buffer(starts), pa.py_buffer(content)]
    nulls = int(len(valid) - np.count_nonzero(valid))
    return pa.Array.from_buffers(pa.binary(), len(valid), buffers, null_count=nulls)
