"""A stand-in for a changefeed that writes to Kafka, and what its log says of every table.

What a real server sends is taken from captures; how it is spread over partitions, repeated and
interleaved is made up here, within what CockroachDB promises. The oracle applies the log one by
one in plain Python; it shares no code with icestream.
"""

import json
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from icestream.errors import HistoryLost
from icestream.formats.rows import Records
from icestream.sources import Budget
from icestream.sources.cockroachdb import (
    CockroachdbOptions,
    TopicsOptions,
    index,
    topic_split,
    topics,
)
from icestream.sources.cockroachdb.topics import CockroachdbTopics
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.consumer import Range
from tests.captures import Row, capture

PARTITIONS_MAX = 5
UNBOUNDED = Budget(rows=2**63, bytes=2**63)

Hlc = tuple[int, int]
Key = tuple[Any, ...]
Message = tuple[bytes | None, bytes | None]
"""Key and value."""
Send = Callable[[str, int, Sequence[Message]], None]
"""Appends messages to a partition of a topic."""


def hlc(text: str) -> Hlc:
    """A timestamp's two numbers."""
    wall, logical = text.rstrip("?").split(".")
    return int(wall), int(logical)


def hlc_text(at: Hlc) -> str:
    """The inverse."""
    return f"{at[0]}.{at[1]:010d}"


def marker(at: Hlc, bare: bool = False) -> Message:
    """A resolved timestamp, as the server writes it."""
    resolved = {"resolved": hlc_text(at)}
    message = {"__crdb__": resolved} if bare else resolved
    return None, json.dumps(message, separators=(",", ":")).encode()


def wrapped(key: Sequence[Any], row: Mapping[str, Any] | None, at: Hlc, **more: Any) -> Message:
    """A row of the default envelope."""
    value = {"after": row, **more, "updated": hlc_text(at)}
    return json.dumps(list(key)).encode(), json.dumps(value).encode()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change that was written, as plain Python reads it."""

    table: str
    key: Key
    at: Hlc
    row: dict[str, Any] | None


def resolved_in(message: Message) -> Hlc:
    """The timestamp of a marker."""
    said = json.loads(message[1] or b"")
    return hlc(said.get("__crdb__", said)["resolved"])


def change_of(table: str, message: Message) -> Change:
    """What a row's message says, wrapped or bare."""
    key, value = (json.loads(part or b"null", parse_float=Decimal) for part in message)
    meta = value.pop("__crdb__", value)
    row = value["after"] if "after" in value else value or None
    return Change(table=table, key=tuple(key), at=hlc(meta["updated"]), row=row)


@dataclass(kw_only=True)
class Feed:
    """Writes rows to the partition of their key, and resolved timestamps to all; keeps the log."""

    send: Send
    partitions: dict[str, int]
    changes: list[Change] = field(default_factory=list)
    resolved: list[Hlc] = field(default_factory=list)

    def row(self, table: str, message: Message) -> None:
        """Write a row."""
        self.changes.append(change_of(table, message))
        self.send(table, self.partition(table, message), [message])

    def partition(self, table: str, message: Message) -> int:
        """The partition of a row's key."""
        return zlib.crc32(message[0] or b"") % self.partitions[table]

    def resolve(self, at: Hlc, bare: bool = False, but: Iterable[tuple[str, int]] = ()) -> None:
        """Write a resolved timestamp to all partitions, but for some that lag behind."""
        self.resolved.append(at)
        late = set(but)
        for table, count in self.partitions.items():
            for number in range(count):
                if (table, number) not in late:
                    self.send(table, number, [marker(at, bare)])

    def play(self, name: str) -> None:
        """Write a capture of a real server."""
        for each in capture(name):
            self.message(each)

    def message(self, each: Row) -> None:
        """Write one message of a capture."""
        if each.table is not None:
            self.row(each.table, (each.key.encode(), each.value.encode()))
            return
        self.resolve(resolved_in((None, each.value.encode())), "__crdb__" in each.value)

    def expected(self, table: str, at: Hlc) -> dict[Key, dict[str, Any]]:
        """The last version up to a timestamp of each key; a delete removes it."""
        return expected(self.changes, table, at)

    def published(self, table: str, resolved: Sequence[Hlc] | None = None) -> list[Hlc]:
        """The resolved timestamps with changes of the table since the one before."""
        return published(self.changes, table, self.resolved if resolved is None else resolved)


def expected(changes: Iterable[Change], table: str, at: Hlc) -> dict[Key, dict[str, Any]]:
    """What a log leaves of a table as of a timestamp."""
    last: dict[Key, Change] = {}
    for change in changes:
        known = last.get(change.key)
        if change.table == table and change.at <= at and (not known or known.at <= change.at):
            last[change.key] = change
    return {key: change.row for key, change in last.items() if change.row is not None}


def published(changes: Sequence[Change], table: str, resolved: Sequence[Hlc]) -> list[Hlc]:
    """Of ascending timestamps those that bring changes to a table."""
    spans = zip([(0, 0), *resolved], resolved, strict=False)
    times = [change.at for change in changes if change.table == table]
    return [upper for lower, upper in spans if any(lower < at <= upper for at in times)]


def tables_of(name: str) -> list[str]:
    """The tables that a capture has rows of."""
    return sorted({each.table for each in capture(name) if each.table is not None})


@dataclass
class RandomChangefeed:
    """A changefeed that keeps its promises and no more.

    Every change is delivered before a resolved timestamp at or after it; everything may be
    delivered again at any time, in any order; partitions may miss a timestamp or get it late, and
    more of them may appear.
    """

    random: random.Random
    feed: Feed
    add_partition: Callable[[str, int], None]
    now: int = 1_700_000_000_000_000_000
    delivered: list[tuple[str, int, Message]] = field(default_factory=list)
    held: list[tuple[str, Message]] = field(default_factory=list)
    # No value is taken for a key.
    number: int = 100

    def step(self) -> None:
        """One of the things that happen."""
        chance = self.random.random()
        if chance < 0.55:
            self.change()
        elif chance < 0.7:
            self.deliver(self.random.randrange(3))
        elif chance < 0.8:
            self.repeat()
        elif chance < 0.97:
            self.resolve()
        else:
            self.grow()

    def change(self) -> None:
        """A change is made; it is delivered now, or later."""
        table, key = self.random.choice(list(self.feed.partitions)), self.random.randrange(6)
        self.now += self.random.choice([0, 1, 1000])
        self.number += 1
        at = (self.now, self.number)
        row = {"id": key, "n": self.number} if self.random.random() < 0.7 else None
        self.held.append((table, wrapped([key], row, at)))
        if self.random.random() < 0.6:
            self.deliver(self.random.randrange(1, 4))

    def repeat(self) -> None:
        """Some of what was delivered is delivered again, in any order."""
        for table, partition, message in self.random.sample(
            self.delivered, min(3, len(self.delivered))
        ):
            # Since then the key may have moved to another partition.
            now = self.random.choice([partition, self.feed.partition(table, message)])
            self.feed.send(table, now, [message])

    def deliver(self, count: int) -> None:
        """Some changes that wait are written, those of a key in order, of other keys in any."""
        for _ in range(min(count, len(self.held))):
            table, some = self.random.choice(self.held)
            first = next(n for n, (t, m) in enumerate(self.held) if (t, m[0]) == (table, some[0]))
            table, message = self.held.pop(first)
            self.feed.row(table, message)
            self.delivered.append((table, self.feed.partition(table, message), message))

    def resolve(self) -> None:
        """All that was delivered is declared complete, up to before the first that waits."""
        waiting = [json.loads(message[1] or b"")["updated"] for _, message in self.held]
        if waiting:
            wall, logical = map(int, min(waiting).split("."))
            at: Hlc = (wall, logical - 1) if logical else (wall - 1, 2147483647)
        else:
            at = (self.now, self.number)
        at = self.random.choice([at, at, (at[0], max(0, at[1] - 1))])
        if self.feed.resolved and at <= self.feed.resolved[-1]:
            # A feed that was started again repeats itself.
            table = next(iter(self.feed.partitions))
            self.feed.send(table, 0, [marker(self.random.choice(self.feed.resolved))])
            return
        partitions = [(t, n) for t, count in self.feed.partitions.items() for n in range(count)]
        late = [each for each in partitions if self.random.random() < 0.1]
        self.feed.resolve(at, bare=self.random.random() < 0.2, but=late)

    def catch_up(self) -> None:
        """All that waits is delivered, and every partition has a timestamp that says so."""
        self.deliver(len(self.held))
        self.now += 1
        self.feed.resolve((self.now, 2147483647))
        # Nothing may follow that is not later.
        self.now += 1

    def grow(self) -> None:
        """A topic gets one more partition, and keys move."""
        table = self.random.choice(list(self.feed.partitions))
        if self.feed.partitions[table] < PARTITIONS_MAX:
            self.feed.partitions[table] += 1
            self.add_partition(table, self.feed.partitions[table])


class MemoryTopics:
    """Topics without a broker: what a cluster says of them, and their records."""

    def __init__(self, **partitions: int):
        self.counts = dict(partitions)
        self.ids = dict.fromkeys(partitions, "id")
        self.earliest: dict[tuple[str, int], int] = defaultdict(int)
        self.logs: dict[tuple[str, int], list[Message]] = defaultdict(list)
        self.mirrored: dict[str, dict[tuple[str, int], int]] = {}
        self.reads: list[Range] = []
        self.batch_records = 7

    def send(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Append to a partition."""
        self.logs[topic, partition] += messages

    def topics(self, names: Iterable[str], pattern: str | None = None) -> dict[str, Topic]:
        """See `Cluster`; every topic is wanted."""
        return {
            name: Topic(name=name, id=self.ids[name], partitions=count)
            for name, count in self.counts.items()
        }

    def bounds(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Any]:
        """See `Cluster`."""
        return {each: (self.earliest[each], len(self.logs[each])) for each in partitions}

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """See `Cluster`."""
        self.mirrored[group] = dict(offsets)

    def close(self) -> None:
        """See `Cluster`."""

    def read_range(self, _settings: object, wanted: Range, **_: object) -> Iterator[Records]:
        """The records of a range, few at a time."""
        self.reads.append(wanted)
        if wanted.start < self.earliest[wanted.topic, wanted.partition]:
            raise HistoryLost(f"cannot read {wanted}: the broker does not have them")
        log = self.logs[wanted.topic, wanted.partition]
        for start in range(wanted.start, wanted.end, self.batch_records):
            stop = min(start + self.batch_records, wanted.end)
            keys, values = zip(*log[start:stop], strict=True)
            yield Records(
                keys=pa.array(keys, pa.binary()),
                values=pa.array(values, pa.binary()),
                offsets=np.arange(start, stop, dtype=np.int64),
                timestamps=np.full(stop - start, -1, dtype=np.int64),
            )

    @contextmanager
    def in_place_of_kafka(self) -> Iterator[None]:
        """Have sources talk to these topics."""
        with (
            # A broker takes seconds to start; real ones are asked in the integration tests.
            patch.object(topics, "Cluster", lambda settings: self),
            patch.object(topic_split, "read_range", self.read_range),
            patch.object(index, "read_range", self.read_range),
        ):
            yield

    def source(self, workers: int = 2, **options: Any) -> CockroachdbTopics:
        """A source over all topics, whose index tasks run at once."""
        given = TopicsOptions(bootstrap_servers="x:1", topics=list(self.counts))
        return CockroachdbTopics(
            CockroachdbOptions(kafka=given, **options),
            "p",
            lambda tasks: [task.run() for task in tasks],
            lambda: workers,
            UNBOUNDED,
        )
