"""Changefeeds that write to Kafka: one epoch per resolved timestamp that has come everywhere.

    partition 0   row row R1 row row R2 row          R1 is complete when every partition has
    partition 1   row R1 row row ............        a marker at R1 or later: here, not R2

A resolved timestamp is written to every partition, and says of that partition alone that nothing
new up to it will follow there. So R is complete once the last marker of each partition reaches it.

Nothing else orders the records. Rows later than R may stand before R's marker, and what was
delivered may be delivered again after it. Hence an epoch reads each partition up to its marker,
from the first place on where something later than the epoch before may stand, and takes rows by
their own timestamps. A frontier holds both places beside R, so that an epoch can be read again,
and a restart needs nothing else:

    resolved: (wall, logical + 1)    "<topic> <partition> <topic id>": (end, low, first)

`first` is where reading began, so that a first epoch is read again from the same place too. Topics
that are left out stay where they are, and R does not hold for them: their positions go on with the
timestamp that they were left at, `(end, low, first, wall, logical + 1)`, and from then on with R.
"""

import bisect
import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from icestream.epoch import Epoch
from icestream.errors import IcestreamError, SourceUnavailable
from icestream.frontier import Frontier, Position
from icestream.schema import TableShape
from icestream.sources import (
    Budget,
    EpochPlan,
    Purpose,
    Remembered,
    SplitsLost,
    Standing,
    StartPlan,
    without_history,
)
from icestream.sources.cockroachdb import CockroachdbOptions, TopicsOptions
from icestream.sources.cockroachdb.feed import Changefeed, packed
from icestream.sources.cockroachdb.hlc import RESOLVED, after, resolved_of
from icestream.sources.cockroachdb.index import (
    EARLIEST,
    Indexed,
    IndexRanges,
    PartitionIndex,
    RowRun,
)
from icestream.sources.cockroachdb.topic_split import WRITE_AS, TopicSplit, shape_from
from icestream.sources.kafka.client import Cluster, Topic
from icestream.sources.kafka.consumer import PartitionStalled, Range
from icestream.sources.kafka.partitions import (
    Partition,
    balanced,
    partition_name,
    partition_parts,
    recreated,
    refuse_lost,
)

log = logging.getLogger(__name__)

# Boundaries that are named at once; the next ones are named when these are used up.
EPOCHS_AHEAD = 100
# How far the index may run ahead: many epochs, and yet little to remember.
RECORDS_AHEAD = 1_000_000
# What one worker looks through at a time.
INDEX_RECORDS = 100_000

# A position has three offsets, and a timestamp if its topic was ever left out.
_PLACE = 3

IndexTopics = Callable[[Sequence[IndexRanges]], Sequence[Sequence[Indexed]]]


class CockroachdbTopics(Changefeed):
    """The source over topics of a changefeed; see the module and `Source`."""

    def __init__(
        self,
        options: CockroachdbOptions,
        pipeline: str,
        index: IndexTopics,
        parallelism: Callable[[], int],
        budget: Budget,
    ):
        super().__init__(options, pipeline, budget)
        assert options.kafka is not None
        self._kafka: TopicsOptions = options.kafka
        self._index = index
        self._parallelism = parallelism
        self._cluster = Cluster(self._kafka.settings())
        self._group = self._kafka.group_id or f"icestream-{pipeline}"
        self._topics: Mapping[str, Topic] = {}
        self._bounds: Mapping[Partition, tuple[int, int]] = {}
        self._indexes: dict[str, PartitionIndex] = {}
        self._goal_ends: Mapping[str, int] | None = None
        self._goal: Position | None = None
        self._shapes: dict[str, TableShape] = {}
        self._samples: dict[str, list[TopicSplit]] = {}
        self._written: set[str] = set()
        self._waiting: list[Partition] = []
        self._more = False
        self._stalled: tuple[float, PartitionStalled] | None = None

    # What there is

    def tables(self) -> Sequence[str]:
        """One for each topic."""
        if not self._topics:
            self._look()
        return sorted(self._topics)

    def known_tables(self) -> Sequence[str]:
        """The topics that the configuration names; the brokers are asked for a pattern alone."""
        named = [topic for topic in self._kafka.topics if self._wanted(topic)]
        if not self._kafka.topic_pattern:
            return named
        try:
            return self.tables()
        except SourceUnavailable:
            return named

    def shape(self, table: str) -> TableShape | None:
        """Columns and key from the rows of the table's first epochs; None if these only delete."""
        if table not in self._shapes:
            shape = shape_from(self._samples.get(table, ()))
            if shape is None:
                return None
            self._shapes[table] = shape
            self._samples.pop(table, None)
        return self._shapes[table]

    def resume(self, remembered: Remembered) -> StartPlan:
        """Tables that are new to the lake are read from the beginning of their topics."""
        tables = self.tables()
        behind = without_history(tables, remembered, self._has_history)
        return StartPlan(behind=behind, unfed=frozenset(remembered.progress.keys() - {*tables}))

    def _has_history(self, table: str, before: Frontier) -> bool:
        """Whether the topic still has records that were read before.

        A topic that a frontier does not name is read from its beginning by the next epoch anyway.
        """
        topic = self._topics.get(table)
        if topic is None:
            return False
        return any(
            position[0] > self._bounds[topic.name, number][0]
            for number in range(topic.partitions)
            if (position := before[partition_name(topic, number)])
        )

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """One boundary for each resolved timestamp after `lower` that has come everywhere.

        They are thinned by `resolved_every`; all that bring no row are left out but the last.
        """
        if self._stalled is not None and time.monotonic() < self._stalled[0]:
            return []
        self._look()
        self.verify(lower)
        self._align(lower)
        chosen = self._boundaries(lower)
        while not chosen and self._index_more():
            chosen = self._boundaries(lower)
        self._set_goal(lower)
        self._refuse_unresolved()
        if chosen and self._listed() != self._topics:
            # Rows that a marker speaks of may be in a partition that was not there a moment ago.
            return self.available(lower)
        self._more = len(chosen) > EPOCHS_AHEAD or (bool(chosen) and bool(self._unindexed()))
        return [self._frontier(lower, resolved) for resolved in chosen[:EPOCHS_AHEAD]]

    def backlog(self, lower: Frontier) -> bool:
        """Whether the last answer of `available` left out a part of what was there."""
        return self._more

    def standing(self, frontier: Frontier) -> Standing:
        """The resolved timestamp; caught up is what had come everywhere at the start."""
        return Standing(
            position=self._position(frontier),
            lag_seconds=self._lag_seconds(frontier),
            caught_up=self._goal is not None and frontier[RESOLVED] > self._goal,
            trouble=self._trouble(),
        )

    def verify(self, durable: Frontier) -> None:
        """Refuse a frontier whose records are gone, or are no longer the ones it counted."""
        if not self._topics:
            self._look()
        for name, position in durable.positions.items():
            if name == RESOLVED or not position:
                continue
            topic, number, topic_id = partition_parts(name)
            now = self._topics.get(topic)
            if now is None:
                log.warning("topic %s is gone", topic)
            elif now.id != topic_id:
                raise recreated(
                    topic, "Read it into new tables under another pipeline name, from its start."
                )
            elif (topic, number) in self._bounds:
                end, low = position[:2]
                refuse_lost(topic, number, low, self._bounds[topic, number])
                refuse_lost(topic, number, end, self._bounds[topic, number])

    def plan(self, epoch: Epoch) -> EpochPlan:
        """Where rows of the epoch are, or may be, in splits of one table each."""
        lowers, uppers = _reached_by(epoch.lower), _reached_by(epoch.upper)
        spans = {topic: (lowers.get(topic, EARLIEST), upper) for topic, upper in uppers.items()}
        pieces: dict[str, list[tuple[Range, int]]] = {}
        for name, position in _partitions_of(epoch.upper).items():
            topic, number, _ = partition_parts(name)
            end, _, first = position[:3]
            start = epoch.lower[name][1] if epoch.lower[name] else first
            whole = Range(topic=topic, partition=number, start=start, end=end)
            lower, upper = spans[topic]
            if start < end and lower < upper:
                pieces.setdefault(topic, []).extend(self._pieces(name, whole, lower, upper))
        splits = [
            self._split(topic, group, *spans[topic])
            for topic in sorted(pieces)
            for group in packed(
                sorted(pieces[topic], key=lambda piece: str(piece[0])),
                operator.itemgetter(1),
                self._options.split_bytes,
            )
        ]
        for split in splits:
            # Later epochs are planned before this one is written: its rows must stay in the sample.
            if split.table not in self._shapes and split.table not in self._written:
                self._samples.setdefault(split.table, []).append(split)
        return EpochPlan(parts=splits)

    # What was read

    def was_read(self, epoch: Epoch, lessons: Sequence[str]) -> Mapping[str, str]:
        """Reading goes on; a table that was written to needs no sample of its rows any more."""
        for table in lessons:
            self._stalled = None
            self._written.add(table)
            self._samples.pop(table, None)
        return self._labels(epoch)

    def give_up(self, lost: SplitsLost) -> None:
        """Wait for a partition that gives nothing: without it no timestamp is complete."""
        if isinstance(lost, PartitionStalled):
            self._stalled = (time.monotonic() + self._kafka.read_timeout, lost)

    def _trouble(self) -> IcestreamError | None:
        """What holds the resolved timestamp back."""
        # An epoch that is read meanwhile takes it away.
        stalled = self._stalled
        if stalled is not None:
            return stalled[1]
        if not self._waiting:
            return None
        topic, number = self._waiting[0]
        others = f" So have {len(self._waiting) - 1} more." if len(self._waiting) > 1 else ""
        return SourceUnavailable(
            f"partition {number} of topic {topic} has no resolved timestamp yet",
            detail=f"It holds back all other partitions.{others}",
            hint="A changefeed notices new partitions after about a minute. Leave topics out that "
            "no changefeed writes to.",
        )

    def _lag_seconds(self, durable: Frontier) -> float | None:
        """Time from the durable resolved timestamp to the newest one that was seen."""
        resolved = resolved_of(durable)
        seen = [last for index in self._indexes.values() if (last := index.last())]
        if resolved is None or not seen:
            return None
        return max(0.0, (max(seen)[0] - resolved[0]) / 1e9)

    def ack(self, durable: Frontier) -> None:
        """Mirror progress in the consumer group."""
        offsets = {
            (topic.name, number): position[0]
            for topic, number in self._partitions()
            if (position := durable[partition_name(topic, number)])
        }
        self._cluster.commit_offsets(self._group, offsets)

    def close(self) -> None:
        """Let go of the brokers."""
        self._cluster.close()

    # Own: what the brokers have

    def _look(self) -> None:
        self._topics = self._listed()
        partitions = [(topic.name, number) for topic, number in self._partitions()]
        self._bounds = self._cluster.bounds(partitions)

    def _listed(self) -> Mapping[str, Topic]:
        found = self._cluster.topics(self._kafka.topics, self._kafka.topic_pattern or None)
        return {name: topic for name, topic in found.items() if self._wanted(name)}

    def _partitions(self) -> list[tuple[Topic, int]]:
        return [(t, number) for t in self._topics.values() for number in range(t.partitions)]

    # Own: the index

    def _align(self, lower: Frontier) -> None:
        """Have an index for each partition that begins where reading after `lower` does."""
        indexes = {}
        for topic, number in self._partitions():
            name = partition_name(topic, number)
            earliest = self._bounds[topic.name, number][0]
            start = earliest
            if position := lower[name]:
                end, low = position[:2]
                # The marker before the end may speak of later timestamps as well.
                start = max(earliest, min(low, end - 1))
            index = self._indexes.get(name)
            if index is None or index.start > start:
                index = PartitionIndex(start)
            index.forget(start)
            indexes[name] = index
        self._indexes = indexes

    def _unindexed(self) -> dict[Partition, tuple[PartitionIndex, int]]:
        """The partitions that have records after what is indexed, and how far these go."""
        found = {}
        for topic, number in self._partitions():
            index = self._indexes[partition_name(topic, number)]
            _, end = self._bounds[topic.name, number]
            if index.end < end:
                found[topic.name, number] = (index, end)
        return found

    def _index_more(self) -> bool:
        """Have workers look through what comes next; False when all that is there is known."""
        ahead = self._unindexed()
        if not ahead:
            return False
        share = max(1, RECORDS_AHEAD // len(ahead))
        ranges = [
            Range(topic=topic, partition=number, start=start, end=min(start + INDEX_RECORDS, stop))
            for (topic, number), (index, end) in ahead.items()
            for stop in [min(end, index.end + share)]
            for start in range(index.end, stop, INDEX_RECORDS)
        ]
        tasks = [
            IndexRanges(
                settings=self._kafka.settings(),
                read_timeout=self._kafka.read_timeout,
                ranges=group,
            )
            for group in balanced(ranges, self._parallelism())
        ]
        found = list(itertools.chain.from_iterable(self._index(tasks)))
        for each in sorted(found, key=lambda each: each.range.start):
            ahead[each.range.topic, each.range.partition][0].add(each)
        return True

    def _reached(self, lower: Frontier) -> Position | None:
        """The timestamp up to which everything has come, in all partitions."""
        known = resolved_of(lower)
        lasts: dict[Partition, Position | None] = {}
        for topic, number in self._partitions():
            name = partition_name(topic, number)
            last = self._indexes[name].last()
            if known is not None and lower[name]:
                last = max(last or known, known)
            lasts[topic.name, number] = last
        self._waiting = [partition for partition, last in lasts.items() if last is None]
        reached = [last for last in lasts.values() if last is not None]
        return min(reached) if reached and not self._waiting else None

    def _refuse_unresolved(self) -> None:
        """Rows without any resolved timestamp are not what a changefeed was asked for."""
        indexes = self._indexes.values()
        everywhere = len(self._waiting) == len(indexes)
        if everywhere and any(index.runs for index in indexes):
            raise SourceUnavailable(
                f"there is no resolved timestamp in {', '.join(sorted(self._topics))}",
                detail="There are rows, and nothing that says up to when they are complete.",
                hint=f"Write the topics with {WRITE_AS}; or wait for its first one.",
            )

    def _set_goal(self, lower: Frontier) -> None:
        """Note what was complete when the source was first asked, once that is indexed."""
        if self._goal_ends is None:
            self._goal_ends = {
                partition_name(topic, number): self._bounds[topic.name, number][1]
                for topic, number in self._partitions()
            }
        ends = {name: end for name, end in self._goal_ends.items() if name in self._indexes}
        if self._goal is not None or any(self._indexes[n].end < end for n, end in ends.items()):
            return
        known = resolved_of(lower) or EARLIEST
        lasts = [
            max((m.resolved for m in self._indexes[n].markers if m.offset < end), default=known)
            for n, end in ends.items()
        ]
        self._goal = min(lasts, default=known)

    def _boundaries(self, lower: Frontier) -> list[Position]:
        """The timestamps after `lower` that become ends of epochs."""
        start, reached = lower[RESOLVED], self._reached(lower)
        if reached is None or reached < start:
            return []
        starts = _reached_by(lower)
        waiting = sorted(
            {
                marker.resolved
                for index in self._indexes.values()
                for marker in index.markers
                if start <= marker.resolved <= reached
            }
        )
        runs = [
            run
            for name, index in self._indexes.items()
            for run in index.runs
            if run.last >= starts.get(partition_parts(name)[0], EARLIEST)
        ]
        sizes = [(0, 0)] * len(waiting)
        for run in runs:
            number = bisect.bisect_left(waiting, run.last)
            if number < len(waiting):
                rows, size = sizes[number]
                sizes[number] = rows + run.end - run.start, size + run.size_bytes
        chosen = self.thinned(start, waiting, sizes, more_to_come=bool(self._unindexed()))
        return _with_rows(chosen, runs)

    def _frontier(self, lower: Frontier, resolved: Position) -> Frontier:
        reached = after(resolved)
        places = {
            # What is left out stays, with the time that it was left at.
            name: at if len(at) > _PLACE else (*at, *lower[RESOLVED])
            for name, at in _partitions_of(lower).items()
        }
        for name, index in self._indexes.items():
            end, low = index.place(resolved)
            known = lower[name] or (index.start, index.start, index.start)
            time_of_its_own = reached[RESOLVED] if len(known) > _PLACE else ()
            places[name] = (max(end, known[0]), max(low, known[1]), known[2], *time_of_its_own)
        return Frontier({**reached.positions, **places})

    # Own: splits

    def _pieces(
        self, name: str, whole: Range, lower: Position, upper: Position
    ) -> Iterator[tuple[Range, int]]:
        """The parts of a range that may have rows within the bounds, and their size in bytes."""
        index = self._indexes.get(name)
        runs = index.runs_within(whole, lower, upper) if index else None
        if runs is None:
            yield whole, 0
            return
        start, size = 0, 0
        for number, run in enumerate(runs):
            start = start if size else max(run.start, whole.start)
            size += run.size_bytes
            if size >= self._options.split_bytes or number + 1 == len(runs):
                yield replace(whole, start=start, end=min(run.end, whole.end)), size
                size = 0

    def _split(
        self, topic: str, pieces: Sequence[tuple[Range, int]], lower: Position, upper: Position
    ) -> TopicSplit:
        return TopicSplit(
            table=topic,
            settings=self._kafka.settings(),
            read_timeout=self._kafka.read_timeout,
            ranges=[piece for piece, _ in pieces],
            lower=lower,
            upper=upper,
            declared=self.declared(topic),
            source_key=self.named_key(topic),
            size_bytes=sum(size for _, size in pieces),
        )


def _partitions_of(frontier: Frontier) -> dict[str, Position]:
    return {name: at for name, at in frontier.positions.items() if name != RESOLVED and at}


def _reached_by(frontier: Frontier) -> dict[str, Position]:
    """By topic: rows from this timestamp on are new.

    A topic that is not in it is new as a whole: a table that is added to a changefeed is scanned as
    of a time that may have been passed.
    """
    reached: dict[str, Position] = {}
    for name, at in _partitions_of(frontier).items():
        topic = partition_parts(name)[0]
        time_reached = at[_PLACE:] or frontier[RESOLVED]
        reached[topic] = min(reached.get(topic, time_reached), time_reached)
    return reached


def _with_rows(chosen: Sequence[Position], runs: Sequence[RowRun]) -> list[Position]:
    """Those of the timestamps that may bring rows, and the last: idle time costs one epoch."""
    change = np.zeros(len(chosen) + 1, dtype=np.int64)
    for run in runs:
        first = bisect.bisect_left(chosen, run.first)
        last = bisect.bisect_left(chosen, run.last)
        if first < len(chosen):
            change[first] += 1
            change[min(last, len(chosen) - 1) + 1] -= 1
    held = np.cumsum(change)[:-1] > 0
    return [
        resolved
        for number, resolved in enumerate(chosen)
        if held[number] or number + 1 == len(chosen)
    ]
