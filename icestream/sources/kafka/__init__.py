"""Kafka topics: each epoch is a range of offsets per partition.

Offsets are the frontier, and the destination remembers it; what a consumer group has committed is
a mirror for lag tools and never the truth. An epoch ends at the offsets that were stable when it
was minted, so that it holds whole transactions only, and workers read its ranges by themselves.

A position is `(next offset, first offset)`: the second is where reading began, so that an epoch
that must be read again is read from the same place. The name of a partition holds its topic's id:
a topic that was deleted and created anew counts from zero again and must not be taken for the old
one.
"""

import logging
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from icestream import dead_letters
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, IcestreamError
from icestream.frontier import Frontier
from icestream.schema import TableShape, joined_shapes
from icestream.sources import Source, SplitsLost
from icestream.sources.kafka.changes import no_key
from icestream.sources.kafka.client import Cluster, Topic
from icestream.sources.kafka.consumer import PartitionStalled, Range
from icestream.sources.kafka.envelope import REGISTERED, ValueOptions
from icestream.sources.kafka.partitions import balanced, recreated, refuse_lost
from icestream.sources.kafka.partitions import partition_name as _name
from icestream.sources.kafka.partitions import partition_parts as _parts
from icestream.sources.kafka.registry import RegistryOptions
from icestream.sources.kafka.split import (
    KafkaSplit,
    Partition,
    RangeRead,
    RangesTooLarge,
    Reading,
)

log = logging.getLogger(__name__)

VALID_THROUGH = "icestream.valid-through"
EARLIEST = "earliest"
LATEST = "latest"
STOP = "stop"
GO_ON = "continue"
# Bounds of epochs that are named at once; the next ones are named when these are used up.
EPOCHS_AHEAD = 16
# Before anything was read a record is taken to be this large.
RECORD_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaOptions:
    """Options of the Kafka source."""

    bootstrap_servers: str = field(
        default="", metadata={"doc": "Brokers to begin with, as `host:port,host:port`."}
    )
    topics: Sequence[str] = field(default=(), metadata={"doc": "Topics to read."})
    topic_pattern: str = field(
        default="",
        metadata={"doc": "Regular expression; topics that match it as a whole are read as well."},
    )
    value: ValueOptions = field(
        default_factory=ValueOptions, metadata={"doc": "What records are, and what they mean."}
    )
    schema_registry: RegistryOptions | None = field(
        default=None, metadata={"doc": "Where the schemas of Avro and Protobuf records are."}
    )
    keys: Mapping[str, Sequence[str]] = field(
        default_factory=dict,
        metadata={"doc": "Columns that identify a row, by table; the record's key by default."},
    )
    columns: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict,
        metadata={"doc": "Iceberg types by table and column, where records do not tell them."},
    )
    keyed: bool = field(
        default=True,
        metadata={
            "doc": "All records of a key are in one partition. When that is not so, `false` has "
            "changes ordered by the records' timestamps, at the price of a shuffle."
        },
    )
    start: str = field(
        default=EARLIEST,
        metadata={
            "doc": "Where partitions begin that are there at the first run: `earliest`, `latest`."
        },
    )
    group_id: str = field(
        default="",
        metadata={"doc": "Consumer group that mirrors progress; `icestream-<pipeline>` if empty."},
    )
    read_timeout: float = field(
        default=60.0,
        metadata={
            "doc": "A partition that gives nothing for so long is left out for a while.",
            "unit": "duration",
        },
    )
    on_recreated: str = field(
        default=STOP,
        metadata={
            "doc": "When a topic was deleted and created anew: `stop`, or `continue` with the new "
            "one from its beginning."
        },
    )
    properties: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"doc": "Settings of the Kafka client (librdkafka), such as `sasl.username`."},
    )

    def __post_init__(self) -> None:
        if not self.bootstrap_servers or not (self.topics or self.topic_pattern):
            lacking = "topics" if self.bootstrap_servers else "bootstrap_servers"
            raise ConfigInvalid(
                f"the Kafka source lacks `{lacking}`",
                hint="Write `kafka: {bootstrap_servers: localhost:9092, topics: [orders]}`.",
            )
        formats = {self.value.format, self.value.keys_format()}
        if not formats.isdisjoint(REGISTERED) and not (
            self.schema_registry and self.schema_registry.url
        ):
            raise ConfigInvalid(
                f"records in {self.value.format} need a schema registry",
                hint="Write `schema_registry: {url: http://localhost:8081}`.",
            )
        _refuse_unknown("start", self.start, (EARLIEST, LATEST))
        _refuse_unknown("on_recreated", self.on_recreated, (STOP, GO_ON))
        try:
            re.compile(self.topic_pattern)
        except re.error as error:
            raise ConfigInvalid(
                "topic_pattern is not a regular expression", detail=f"{error}."
            ) from error

    def settings(self) -> dict[str, str]:
        """What the client is told."""
        return {**self.properties, "bootstrap.servers": self.bootstrap_servers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much an epoch may hold."""

    rows: int
    bytes: int


class KafkaSource(Source):
    """See the module and `icestream.sources.Source`."""

    def __init__(
        self, options: KafkaOptions, pipeline: str, reading: Reading, budget: Budget, workers: int
    ):
        self.keyed = options.keyed
        self._options = options
        self._reading = reading
        self._budget = budget
        self._workers = max(1, workers)
        self._cluster = Cluster(options.settings())
        self._group = options.group_id or f"icestream-{pipeline}"
        self._topics: Mapping[str, Topic] = {}
        self._bounds: Mapping[Partition, tuple[int, int]] = {}
        self._goal: Frontier | None = None
        self._shapes: dict[str, TableShape] = {}
        self._found: set[str] = set()
        self._record_bytes = float(RECORD_BYTES)
        self._shortened: dict[Partition, int] = {}
        self._stalled: dict[Partition, tuple[float, PartitionStalled]] = {}
        # Epochs are read side by side, and each tells what it has learned.
        self._lock = threading.Lock()
        self._reads: dict[Partition, list[RangeRead]] = {}

    # What there is

    def tables(self) -> Sequence[str]:
        """The tables that the route names, or one for each topic, and those met on the way."""
        if not self._topics:
            self._look()
        named = self._topics if self._reading.route.by_topic() else self._reading.route.tables
        letters = map(dead_letters.table_of, {*named, *self._topics})
        return sorted({*named, *self._shapes, *(letters if self._reading.dead_letters else ())})

    def known_tables(self) -> Sequence[str]:
        """Those that the configuration names."""
        named = self._options.topics if self._reading.route.by_topic() else ()
        return [*named, *self._reading.route.tables]

    def shape(self, table: str) -> TableShape | None:
        """What its records have shown so far."""
        return self._shapes.get(table)

    def meet(self, shapes: Mapping[str, TableShape]) -> None:
        """Remember tables that records were found for; rows that change need a key."""
        with self._lock:
            self._shapes = joined_shapes(self._shapes, shapes)
            self._found = {*self._found, *shapes}
        for table in shapes:
            letters = table.endswith(dead_letters.SUFFIX)
            if not letters and not self._reading.only_added and not self._shapes[table].key:
                raise no_key(table)

    def found(self, tables: Collection[str]) -> None:
        """Remember which tables the destination has."""
        self._found = {*self._found, *tables}

    def has_history(self, table: str, before: Frontier) -> bool:
        """Whether the table's topic still has records that were read before."""
        topic = self._topics.get(table) if self._reading.route.by_topic() else None
        if topic is None:
            return False
        return any(
            before[_name(topic, number)][0] > self._bounds[topic.name, number][0]
            for number in range(topic.partitions)
            if (topic.name, number) in self._bounds and before[_name(topic, number)]
        )

    def available(self, lower: Frontier) -> Sequence[Frontier]:
        """Bounds of epochs up to what is stable now, each within the budget."""
        self._look()
        self.verify(lower)
        now = {
            _name(topic, number): self._first(topic, number, lower)
            for topic, number in self._readable()
        }
        ends = {_name(t, n): self._end(t, n, now[_name(t, n)]) for t, n in self._readable()}
        first = {name: lower[name][1] if lower[name] else offset for name, offset in now.items()}
        if self._goal is None:
            self._goal = _frontier(lower, {name: ends[name] for name in now}, first)
        frontiers: list[Frontier] = []
        while now != ends and len(frontiers) < EPOCHS_AHEAD:
            now = _advanced(now, ends, self._rows_at_once())
            frontiers.append(_frontier(lower, now, first))
        return frontiers

    def caught_up(self, frontier: Frontier) -> bool:
        """Whether all records that were stable at the start lie before a frontier."""
        goal = self._goal
        left_out = {_name(self._topics[t], n) for t, n in self._stalled if t in self._topics}
        return goal is not None and all(
            frontier[name] >= at for name, at in goal.positions.items() if name not in left_out
        )

    def verify(self, durable: Frontier) -> None:
        """Refuse a frontier whose records are gone, or are no longer the ones it counted."""
        if not self._topics:
            self._look()
        for name, position in durable.positions.items():
            if not position:
                continue
            topic, number, topic_id = _parts(name)
            now = self._topics.get(topic)
            if now is None:
                log.warning("topic %s is gone", topic)
            elif now.id != topic_id:
                self._refuse_recreated(topic)
            elif (topic, number) in self._bounds:
                refuse_lost(topic, number, position[0], self._bounds[topic, number])

    def splits(self, epoch: Epoch) -> Sequence[KafkaSplit]:
        """Ranges of all partitions, in as many splits as there are workers."""
        ranges = self._ranges(epoch)
        groups = balanced(ranges, self._workers)
        return [
            KafkaSplit(
                ranges=group,
                reading=self._reading,
                tables=frozenset(self._tables_of(group)),
                # Averages have outliers, and an epoch that is read again must fit again.
                bytes_max=max(1, 2 * self._budget.bytes // len(groups)),
            )
            for group in groups
        ]

    # What was read

    def learn(self, learned: Sequence[RangeRead]) -> None:
        """Note how large records are and how new, for the epochs to come."""
        rows, size = sum(read.rows for read in learned), sum(read.bytes for read in learned)
        with self._lock:
            if rows:
                self._record_bytes = 0.5 * self._record_bytes + 0.5 * size / rows
            for read in learned:
                partition = (read.range.topic, read.range.partition)
                self._reads.setdefault(partition, []).append(read)

    def give_up(self, lost: SplitsLost) -> None:
        """Leave out a partition that gives nothing, or end epochs before they grow too large."""
        if isinstance(lost, PartitionStalled):
            again = time.monotonic() + self._options.read_timeout
            self._stalled[lost.topic, lost.partition] = (again, lost)
        if isinstance(lost, RangesTooLarge):
            self._shortened.update(lost.reached)

    def trouble(self) -> IcestreamError | None:
        """A partition that is left out."""
        return next((error for _, error in self._stalled.values()), None)

    def summary(self, epoch: Epoch) -> Mapping[str, str]:
        """The time up to which all partitions were read; absent when that is not known."""
        newest = []
        for topic, number in self._partitions():
            position = epoch.upper[_name(topic, number)]
            with self._lock:
                reads = list(self._reads.get((topic.name, number), []))
            known = [r.newest for r in reads if position and r.range.end <= position[0]]
            newest.append(max(known, default=-1))
        if self._stalled or min(newest, default=-1) < 0:
            return {}
        moment = datetime.fromtimestamp(min(newest) / 1000, UTC)
        return {VALID_THROUGH: moment.isoformat(timespec="milliseconds")}

    def position(self, frontier: Frontier) -> str:
        """Offsets by topic and partition."""
        named = sorted((*_parts(name)[:2], at) for name, at in frontier.positions.items() if at)
        return ", ".join(f"{topic}/{number}@{at[0]}" for topic, number, at in named)

    def lag_seconds(self, durable: Frontier) -> float | None:
        """The age of the newest record that is durable, while there are others."""
        behind = any(
            durable[_name(topic, number)] < (self._bounds[topic.name, number][1],)
            for topic, number in self._readable()
        )
        with self._lock:
            newest = [read.newest for reads in self._reads.values() for read in reads]
        if not behind or not newest:
            return 0.0
        return max(0.0, time.time() - max(newest) / 1000)

    def ack(self, durable: Frontier) -> None:
        """Mirror progress in the consumer group, and forget what only earlier epochs needed."""
        offsets = {}
        for topic, number in self._partitions():
            position = durable[_name(topic, number)]
            if position:
                offsets[topic.name, number] = position[0]
                self._forget((topic.name, number), position[0])
        self._cluster.commit_offsets(self._group, offsets)

    def close(self) -> None:
        """Let go of the brokers."""
        self._cluster.close()

    # Own

    def _forget(self, partition: Partition, durable: int) -> None:
        """Keep of durable ranges only the one with the newest record."""
        with self._lock:
            reads = self._reads.get(partition, [])
            done = [read for read in reads if read.range.end <= durable]
            if done:
                newest = max(done, key=lambda read: read.newest)
                later = [read for read in reads if read.range.end > durable]
                self._reads[partition] = [newest, *later]

    def _look(self) -> None:
        """Ask the brokers what there is now."""
        options = self._options
        self._topics = self._cluster.topics(options.topics, options.topic_pattern or None)
        everything = [(topic.name, number) for topic, number in self._partitions()]
        self._bounds = self._cluster.bounds(everything)
        now = time.monotonic()
        for partition in [p for p, (again, _) in self._stalled.items() if again <= now]:
            del self._stalled[partition]

    def _partitions(self) -> list[tuple[Topic, int]]:
        return [(t, number) for t in self._topics.values() for number in range(t.partitions)]

    def _readable(self) -> list[tuple[Topic, int]]:
        """All partitions but those that are left out for now."""
        return [
            (topic, number)
            for topic, number in self._partitions()
            if (topic.name, number) in self._bounds and (topic.name, number) not in self._stalled
        ]

    def _first(self, topic: Topic, number: int, lower: Frontier) -> int:
        """Where reading goes on, or begins."""
        position = lower[_name(topic, number)]
        if position:
            return position[0]
        earliest, end = self._bounds[topic.name, number]
        # A partition that appears later begins at its beginning, whatever the option says.
        return end if self._options.start == LATEST and not lower.positions else earliest

    def _end(self, topic: Topic, number: int, first: int) -> int:
        """How far a partition may be read, for now."""
        end = max(first, self._bounds[topic.name, number][1])
        shortened = self._shortened.get((topic.name, number))
        if shortened is None or shortened <= first:
            self._shortened.pop((topic.name, number), None)
            return end
        return min(end, shortened)

    def _rows_at_once(self) -> int:
        return max(1, min(self._budget.rows, int(self._budget.bytes / self._record_bytes)))

    def _ranges(self, epoch: Epoch) -> list[Range]:
        ranges = []
        for name, upper in epoch.upper.positions.items():
            topic, number, _ = _parts(name)
            start = epoch.lower[name][0] if epoch.lower[name] else upper[1]
            if start < upper[0]:
                ranges.append(Range(topic=topic, partition=number, start=start, end=upper[0]))
        return ranges

    def _tables_of(self, ranges: Sequence[Range]) -> set[str]:
        """The tables among those known that records of the ranges may be for."""
        if not self._reading.route.by_topic():
            return set(self._found)
        topics = {each.topic for each in ranges}
        return {table for table in self._found if table.removesuffix(dead_letters.SUFFIX) in topics}

    def _refuse_recreated(self, topic: str) -> None:
        if self._options.on_recreated == GO_ON:
            return
        raise recreated(
            topic,
            "Set `on_recreated: continue` to go on with the new topic from its beginning; "
            "rows of the old one stay in the table.",
        )


def _frontier(lower: Frontier, offsets: Mapping[str, int], first: Mapping[str, int]) -> Frontier:
    """The frontier at these offsets; partitions that are not among them stay where they are."""
    ahead = {name: (offset, first[name]) for name, offset in offsets.items()}
    return Frontier({**lower.positions, **ahead})


def _advanced(now: Mapping[str, int], ends: Mapping[str, int], rows: int) -> dict[str, int]:
    """All partitions moved on by so many rows together, those with few left by all of them."""
    left = dict(sorted(((n, ends[n] - now[n]) for n in now), key=lambda item: item[1]))
    moved = {}
    for number, (name, count) in enumerate(left.items()):
        share = min(count, max(1, rows // (len(left) - number))) if count else 0
        moved[name] = now[name] + share
        rows = max(0, rows - share)
    return moved


def _refuse_unknown(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigInvalid(
            f"source.kafka.{option} cannot be `{value}`", hint=f"Known: {', '.join(known)}."
        )
