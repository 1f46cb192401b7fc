"""Kafka topics: each epoch is a range of offsets per partition.

Offsets are the frontier, and the destination remembers it; what a consumer group has committed is
a mirror for lag tools and never the truth. An epoch ends at the offsets that were stable when it
was minted, so that it holds whole transactions only, and workers read its ranges by themselves.

A position is `(next offset, first offset)`: the second is where reading began, so that an epoch
that must be read again is read from the same place. The name of a partition holds its topic's id:
a topic that was deleted and created anew counts from zero again and must not be taken for the old
one. Beside partitions a frontier names tables of dead letters, once these were tried again; such an
epoch leaves the offsets where they are (`icestream.sources.kafka.replay`). It also names spans in
which a topic is read in the order of time, because keys have moved to other partitions
(`icestream.sources.kafka.growth`).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby

import numpy as np
import pyarrow as pa
from pyiceberg.types import IcebergType

from icestream import dead_letters
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, DataRejected, HistoryLost, IcestreamError
from icestream.formats.rows import Indices
from icestream.frontier import Frontier, Position
from icestream.names import TableNames
from icestream.schema import TableShape, distinct_columns, joined_shapes
from icestream.sources import (
    Budget,
    CatchUp,
    EpochPlan,
    Finish,
    LettersTried,
    Part,
    Purpose,
    Remembered,
    Source,
    SplitsLost,
    Standing,
    StartPlan,
    always,
    never,
    without_history,
)
from icestream.sources.kafka.changes import no_key
from icestream.sources.kafka.client import Cluster, Topic
from icestream.sources.kafka.consumer import PartitionStalled, Range
from icestream.sources.kafka.growth import (
    GRACE_MS,
    SETTLE_SECONDS,
    Span,
    TimeCuts,
    TimedGroup,
    advanced,
    end_of_unknown,
    span_of,
    topics_by_time,
)
from icestream.sources.kafka.options import GO_ON, LATEST, KafkaOptions
from icestream.sources.kafka.partitions import balanced, recreated, refuse_lost
from icestream.sources.kafka.partitions import partition_name as _name
from icestream.sources.kafka.partitions import partition_parts as _parts
from icestream.sources.kafka.replay import (
    GROUP_BYTES_MAX,
    REPLAYED,
    FirstLetter,
    LetterGroup,
    Letters,
    LetterSplit,
    by_partition,
    first_letters,
    groups,
    order,
    places,
    together,
)
from icestream.sources.kafka.split import (
    KafkaSplit,
    Partition,
    RangeRead,
    RangesTooLarge,
    Reading,
)

log = logging.getLogger(__name__)

VALID_THROUGH = "icestream.valid-through"
# Bounds of epochs that are named at once; the next ones are named when these are used up.
EPOCHS_AHEAD = 16
# Before anything was read a record is taken to be this large.
RECORD_BYTES = 1024


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
        # Topics that are read in the order of time now, and how many rows at once at most.
        self._in_time: frozenset[str] = frozenset()
        self._timed_rows: int | None = None
        self._ahead = Frontier()
        self._left_out: set[Partition] = set()
        # Where `start: latest` begins, until a table remembers it.
        self._begun: dict[str, int] = {}
        # Compacted topics that an earlier run has read, and how long they keep deletes.
        self._compacted: Mapping[str, int] | None = None
        self._stalled: dict[Partition, tuple[float, PartitionStalled]] = {}
        # Epochs are read side by side, and each tells what it has learned.
        self._lock = threading.Lock()
        self._reads: dict[Partition, list[RangeRead]] = {}
        self.letter_box: dead_letters.LetterBox | None = None
        self.table_names: TableNames | None = None
        self._skipped: Mapping[Partition, Indices] = {}
        self._more = False
        self._unfinished: Epoch | None = None
        self._catching_up: CatchUp | None = None
        self._tried: dict[tuple[str, str], LettersTried] = {}

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

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives columns of the table."""
        return self._reading.declared.get(table, {})

    def tables_met(self, shapes: Mapping[str, TableShape]) -> None:
        """Remember tables that records were found for; rows that change need a key."""
        with self._lock:
            joined = joined_shapes(self._shapes, shapes)
            limit = self._reading.value.columns_max
            # Workers do not know of each other's columns: what clashes is refused later.
            self._shapes = {
                table: replace(shape, columns=distinct_columns(shape.columns, limit))
                for table, shape in joined.items()
            }
            self._found = {*self._found, *shapes}
        for table in shapes:
            letters = table.endswith(dead_letters.SUFFIX)
            if not letters and not self._reading.only_added and not self._shapes[table].key:
                raise no_key(table)

    def resume(self, remembered: Remembered) -> StartPlan:
        """Remember which tables the destination has.

        A table is fed when its topic or the route names it, any table where records name theirs.
        """
        tables = self.tables()
        self._found = {*self._found, *remembered.progress}
        unfed = set() if self._reading.route.by_records() else {*remembered.progress} - {*tables}
        behind = without_history(tables, remembered, self._has_history)
        return StartPlan(behind=behind, unfed=frozenset(unfed))

    def _has_history(self, table: str, before: Frontier) -> bool:
        """Whether the table's topic still has records that were read before."""
        topic = self._topics.get(table) if self._reading.route.by_topic() else None
        if topic is None:
            return False
        return any(
            # What lies before the place where reading began was never wanted.
            at[0] > max(at[1], self._bounds[topic.name, number][0])
            for number in range(topic.partitions)
            if (topic.name, number) in self._bounds and (at := before[_name(topic, number)])
        )

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """Bounds of epochs up to what is stable now, each within the budget.

        An epoch that is finished is as large as it is: other workers or limits may have cut it.
        """
        if isinstance(purpose, Finish):
            self._unfinished = purpose.epoch
        if isinstance(purpose, CatchUp) and (letters := self._letters_first(purpose, lower)):
            return letters
        self._look()
        self.verify(lower)
        self._begin(lower)
        if self._compacted is None:
            read = {_parts(name)[0] for name, at in _of_partitions(lower).items() if at}
            self._compacted = self._cluster.delete_retention(read & self._topics.keys())
        spans = self._spans(lower)
        readable = self._readable([name for name, span in spans.items() if span.grown])
        now = {
            _name(topic, number): self._first(topic, number, lower) for topic, number in readable
        }
        ends = {_name(t, n): self._end(t, n, now[_name(t, n)]) for t, n in readable}
        if now != ends:
            ends = self._settled_ends(ends, spans)
        first = {name: lower[name][1] if lower[name] else offset for name, offset in now.items()}
        if self._goal is None:
            self._goal = _frontier(lower, {name: ends[name] for name in now}, first)
        frontiers: list[Frontier] = []
        if now and self._begins_at_end(lower):
            # The beginning is an epoch of its own, without records: see `plan`.
            frontiers.append(_frontier(lower, now, first))
        groups = self._groups(ends, spans) if now != ends else []
        while now != ends and len(frontiers) < EPOCHS_AHEAD:
            now = self._moved(now, ends, groups)
            passed = {name: at for group in groups for name, at in group.positions(now).items()}
            frontiers.append(Frontier({**_frontier(lower, now, first).positions, **passed}))
        self._more = now != ends
        return frontiers

    def backlog(self, lower: Frontier) -> bool:
        """Whether records wait that were left out of the last answer, or fill an epoch.

        One that cannot be answered waits for its time, when `available` tells why.
        """
        if self._more:
            return True
        begun = {_parts(name)[:2]: at[0] for name, at in _of_partitions(lower).items() if at}
        try:
            ends = self._cluster.stable_ends([place for place in self._bounds if place in begun])
        except IcestreamError:
            return False
        waiting = sum(max(0, end - begun[place]) for place, end in ends.items())
        return waiting >= self._rows_at_once()

    def standing(self, frontier: Frontier) -> Standing:
        """Offsets by topic and partition; trouble is a partition that is left out."""
        return Standing(
            position=_position(frontier),
            lag_seconds=self._lag_seconds(frontier),
            caught_up=self._caught_up(frontier),
            trouble=next((error for _, error in self._stalled.values()), None),
        )

    def _caught_up(self, frontier: Frontier) -> bool:
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
        for name, position in _of_partitions(durable).items():
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

    def plan(self, epoch: Epoch) -> EpochPlan:
        """Ranges of all partitions, in as many splits as there are workers, or dead letters.

        Where `start: latest` begins is a milestone: a restart must not begin anywhere else.
        """
        replayed = [
            split
            for name, at in epoch.upper.positions.items()
            if name.startswith(REPLAYED) and at > epoch.lower[name]
            for split in self._letter_splits(name, epoch)
        ]
        parts: list[Part] = [*self._range_splits(epoch), *replayed]
        milestone = always if self._begins_at_end(epoch.lower) else never
        return EpochPlan(parts=parts, milestone=milestone)

    def _range_splits(self, epoch: Epoch) -> list[KafkaSplit]:
        in_time = topics_by_time(epoch) if self._ordered else set()
        shares = balanced(self._ranges(epoch), self._workers, in_time)
        # A topic that is read in the order of time has one split, which must fit into a worker.
        parts = self._workers if in_time else len(shares)
        # Averages have outliers, and an epoch that is read again must fit again.
        bytes_max = max(1, 2 * self._budget.bytes // parts) if parts else 1
        if epoch == self._unfinished:
            bytes_max = 2**63 - 1
        return [
            KafkaSplit(
                ranges=group,
                reading=self._reading,
                tables=frozenset(self._tables_of(group)),
                bytes_max=bytes_max,
                skipped=_within(self._skipped, group),
                by_time=not in_time.isdisjoint(each.topic for each in group),
            )
            for group in shares
        ]

    # Dead letters

    def letters(self, durable: Frontier, table: str | None, as_is: bool) -> Sequence[LetterGroup]:
        """Groups of letters, each within the budget; raises what keeps them from being tried."""
        if not self._topics:
            self._look()
        bytes_max = min(self._budget.bytes, GROUP_BYTES_MAX)
        found: list[LetterGroup] = []
        for name in self._letter_tables(table):
            snapshot_id = self._box().newest(name)
            known = self._box().positions(name, snapshot_id) if snapshot_id is not None else None
            if snapshot_id is None or known is None or not known.num_rows:
                continue
            self._refuse_letters(name, known, durable, as_is)
            sizes = known.column("size").take(order(known)).to_numpy()
            found += [
                LetterGroup(table=name, snapshot_id=snapshot_id, start=start, end=end, as_is=as_is)
                for start, end in groups(sizes, self._budget.rows, bytes_max)
            ]
        return found

    def tried(self) -> Sequence[LettersTried]:
        """What became of letters, by table."""
        return together(self._tried.values())

    def _letters_first(self, behind: CatchUp, lower: Frontier) -> Sequence[Frontier]:
        """Let a table first take the letters that it took before; it skips all others in the log.

        A record that became a letter enters its table only through `icestream replay`. Else a table
        whose every record is a row would have it twice.
        """
        if behind != self._catching_up:
            self._skip_letters(behind.table, behind.durable)
            self._catching_up = behind
        ahead = {
            name: at
            for name, at in behind.durable.positions.items()
            if name.startswith(REPLAYED) and at > lower[name]
        }
        return [Frontier({**lower.positions, **ahead})] if ahead else []

    def _skip_letters(self, table: str, durable: Frontier) -> None:
        """Leave out records of the log that are letters of the table, or may be."""
        self._skipped = {}
        self._ahead = durable
        if self._reading.only_added:
            owners = {table, *self._topics}
            boxes = [name for name in map(dead_letters.table_of, owners) if name in self._found]
            self._skipped = _joined([self._letter_offsets(name) for name in boxes])
            if mixed := sorted(self._skipped.keys() & _recreated(durable)):
                raise DataRejected(
                    f"letters of the old and of the new topic {mixed[0][0]} cannot be told apart",
                    detail=f"Table {table} is to be read again, without what lies among them.",
                    hint="Delete the letters that are not wanted from their table by hand.",
                )

    # What was read

    def was_read(
        self, epoch: Epoch, lessons: Sequence[Sequence[RangeRead] | LettersTried]
    ) -> Mapping[str, str]:
        """Note how large records are and how new, for the epochs to come."""
        for learned in lessons:
            self._learn(learned)
        return self._labels(epoch)

    def _learn(self, learned: Sequence[RangeRead] | LettersTried) -> None:
        if isinstance(learned, LettersTried):
            self._tried[learned.table, learned.part] = learned
            return
        self._warn_of_lost_deletes(learned)
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
            self._left_out.add((lost.topic, lost.partition))
        if isinstance(lost, RangesTooLarge):
            rows = self._rows_in_time()
            if rows > 1 and not self._in_time.isdisjoint(topic for topic, _ in lost.reached):
                # Offsets at which reading ended are of no common time.
                self._timed_rows = rows // 2
            else:
                self._shortened.update(lost.reached)

    def _labels(self, epoch: Epoch) -> Mapping[str, str]:
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

    def _lag_seconds(self, durable: Frontier) -> float | None:
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

    def _warn_of_lost_deletes(self, reads: Sequence[RangeRead]) -> None:
        """Say when a compacted topic is read later than it keeps deletes: some may be gone."""
        for read in reads:
            kept = (self._compacted or {}).get(read.range.topic)
            if kept is not None and 0 <= read.oldest < _milliseconds() - kept:
                log.warning(
                    "topic %s is compacted and was read later than it keeps deletes: rows that "
                    "were deleted meanwhile may have stayed; raise delete.retention.ms, and build "
                    "the table anew to be sure",
                    read.range.topic,
                )
                self._compacted = {
                    topic: kept
                    for topic, kept in (self._compacted or {}).items()
                    if topic != read.range.topic
                }

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
        topics = self._cluster.topics(options.topics, options.topic_pattern or None)
        known: Mapping[str, Topic] | None = None
        # Ends must be from before a topic grows: keys that have moved are read in another way.
        while topics != known:
            known = topics
            everything = [
                (t.name, number) for t in known.values() for number in range(t.partitions)
            ]
            self._bounds = self._cluster.bounds(everything)
            topics = self._cluster.topics(options.topics, options.topic_pattern or None)
        self._topics = topics
        self._refuse_names()
        now = time.monotonic()
        for partition in [p for p, (again, _) in self._stalled.items() if again <= now]:
            del self._stalled[partition]

    def _refuse_names(self) -> None:
        """Refuse topics that cannot be tables of their own, as soon as they are there."""
        by_topic = self._reading.route.by_topic()
        for name in {*self._topics, *self._reading.route.tables}:
            if name.endswith(dead_letters.SUFFIX):
                raise ConfigInvalid(
                    f"{'topic' if name in self._topics else 'table'} {name} has a name of dead "
                    "letters",
                    detail=f"Tables that end with {dead_letters.SUFFIX} hold records that others "
                    "do not take.",
                    hint="Leave the topic out, or give the table of `route.tables` another name.",
                )
        if self.table_names is not None:
            self.table_names.by_name(self._topics if by_topic else self._reading.route.tables)

    def _partitions(self) -> list[tuple[Topic, int]]:
        return [(t, number) for t in self._topics.values() for number in range(t.partitions)]

    def _readable(self, whole: Collection[str] = ()) -> list[tuple[Topic, int]]:
        """All partitions but those that are left out for now.

        In topics of `whole` keys may be in any partition: all are read or none is.
        """
        held = {topic for topic, _ in self._stalled if topic in whole}
        return [
            (topic, number)
            for topic, number in self._partitions()
            if (topic.name, number) in self._bounds
            and (topic.name, number) not in self._stalled
            and topic.name not in held
        ]

    # The order of time

    @property
    def _ordered(self) -> bool:
        """Whether partitions are read by themselves, and keys that move have to be looked for."""
        return self.keyed and not self._reading.only_added

    def _spans(self, lower: Frontier) -> dict[str, Span]:
        """The topics that are to be read in the order of time from a frontier on."""
        if not self._ordered:
            return {}
        found = {}
        for topic in self._topics.values():
            span = self._span(topic, lower)
            if span is not None and not span.passed:
                found[topic.name] = span
        return found

    def _span(self, topic: Topic, lower: Frontier) -> Span | None:
        known = span_of(lower, topic)
        if lower != self._ahead and self._ahead.covers(lower):
            # A table that lies behind is read again as it was, or more carefully.
            ahead = span_of(self._ahead, topic)
            if ahead is None or (known is not None and known.until >= ahead.until):
                return known
            return replace(ahead, passed=False)
        missing = {n for n in range(topic.partitions) if not lower[_name(topic, n)]}
        now = _milliseconds()
        if len(missing) == topic.partitions:
            if topic.partitions == 1 or self._begins_at_end(lower):
                return None
            partitions = [(topic.name, number) for number in range(topic.partitions)]
            times = self._cluster.offsets_at(partitions, 0)
            firsts = {number: times[topic.name, number][1] for number in range(topic.partitions)}
            return Span(until=end_of_unknown(firsts, now), grown=False, passed=False)
        if any((topic.name, number) not in self._left_out for number in missing):
            log.info("topic %s has more partitions than before", topic.name)
            return Span(until=now + GRACE_MS, grown=True, passed=False)
        return known

    def _settled_ends(self, ends: dict[str, int], spans: Mapping[str, Span]) -> dict[str, int]:
        """Ends of one moment: records of a producer reach its partitions in any order.

        What is from before the moment and arrives a little later counts as well.
        """
        moment = _milliseconds() + 1
        growing = {name for name, span in spans.items() if span.grown and moment < span.until}
        every = not self.keyed and not self._reading.only_added
        names = [name for name in ends if every or _parts(name)[0] in growing]
        if not names:
            return ends
        time.sleep(SETTLE_SECONDS)
        partitions = [_parts(name)[:2] for name in names]
        bounds = self._cluster.bounds(partitions)
        later = self._offsets_at(names, {n: bounds[_parts(n)[:2]][1] for n in names}, moment)
        return {**ends, **{name: max(ends[name], later[name]) for name in names}}

    def _offsets_at(
        self, names: Sequence[str], ends: Mapping[str, int], moment: int
    ) -> dict[str, int]:
        """The first offset of a time in each partition; its end where there is none."""
        places = {name: _parts(name)[:2] for name in names}
        found = self._cluster.offsets_at(list(places.values()), moment)
        offsets = {name: found[place][0] for name, place in places.items()}
        return {n: min(at, ends[n]) if at >= 0 else ends[n] for n, at in offsets.items()}

    def _groups(self, ends: Mapping[str, int], spans: Mapping[str, Span]) -> list[TimedGroup]:
        """The partitions that are cut at common times."""
        groups = []
        for topic in self._topics.values():
            names = [n for k in range(topic.partitions) if (n := _name(topic, k)) in ends]
            span = spans.get(topic.name)
            if span is not None and names:
                # Before its end nobody knows which records a span will have.
                over = _milliseconds() >= span.until + 1000 * SETTLE_SECONDS
                border = self._offsets_at(names, ends, span.until) if over else None
                cuts = self._cuts(names, ends)
                groups.append(
                    TimedGroup(names=names, cuts=cuts, border=border, span=span, topic=topic)
                )
        if not self.keyed and not self._reading.only_added and len(ends) > 1:
            groups.append(TimedGroup(names=list(ends), cuts=self._cuts(list(ends), ends)))
        self._in_time = frozenset(_parts(name)[0] for group in groups for name in group.names)
        if not groups:
            self._timed_rows = None
        return groups

    def _cuts(self, names: Sequence[str], ends: Mapping[str, int]) -> TimeCuts:
        found = self._cluster.offsets_at([_parts(name)[:2] for name in names], 0)
        low = min((at for _, at in found.values() if at >= 0), default=0)

        def offsets_at(moment: int) -> Mapping[str, int]:
            return self._offsets_at(names, ends, moment)

        return TimeCuts(offsets_at, low, _milliseconds() + 1)

    def _moved(
        self, now: Mapping[str, int], ends: Mapping[str, int], groups: Sequence[TimedGroup]
    ) -> dict[str, int]:
        """All partitions moved on by as many rows as an epoch may have."""
        timed = [group for group in groups if not group.passed(now)]
        in_time = {name for group in timed for name in group.names}
        rest = {name: offset for name, offset in now.items() if name not in in_time}
        waiting = [g for g in timed if any(now[name] < ends[name] for name in g.names)]
        idle = all(rest[name] == ends[name] for name in rest)
        share = max(1, self._rows_at_once() // max(1, len(waiting) + (not idle)))
        moved = {**now, **advanced(rest, ends, share)}
        for group in waiting:
            rows = min(share, self._rows_in_time())
            moved.update(group.moved(now, ends, rows))
        return moved

    def _rows_in_time(self) -> int:
        """Rows of a topic that one worker reads, or of all with `keyed: false`, at most."""
        rows = self._rows_at_once() // (self._workers if self.keyed else 1)
        return max(1, min(rows, self._timed_rows or rows))

    def _first(self, topic: Topic, number: int, lower: Frontier) -> int:
        """Where reading goes on, or begins."""
        position = lower[_name(topic, number)]
        if position:
            return position[0]
        earliest, _ = self._bounds[topic.name, number]
        return self._begun.get(_name(topic, number), earliest)

    def _begins_at_end(self, lower: Frontier) -> bool:
        """Whether only what comes after the first start is wanted.

        A partition that appears later begins at its beginning, whatever the option says.
        """
        return self._options.start == LATEST and not _of_partitions(lower)

    def _begin(self, lower: Frontier) -> None:
        """Note where `start: latest` begins; a table that is read again begins there once more."""
        if not self._begins_at_end(lower) or self._begun:
            return
        ahead = {name: at[1] for name, at in _of_partitions(self._ahead).items() if at}
        ends = {
            _name(topic, number): self._bounds[topic.name, number][1]
            for topic, number in self._partitions()
        }
        self._begun = ahead or ends

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
        for name, upper in _of_partitions(epoch.upper).items():
            topic, number, _ = _parts(name)
            start = epoch.lower[name][0] if epoch.lower[name] else upper[1]
            if start < upper[0]:
                ranges.append(Range(topic=topic, partition=number, start=start, end=upper[0]))
        return ranges

    def _tables_of(self, ranges: Sequence[Range]) -> set[str]:
        """The tables among those known that records of the ranges may be for."""
        return self._tables_of_topics({each.topic for each in ranges})

    def _tables_of_topics(self, topics: Collection[str]) -> set[str]:
        if not self._reading.route.by_topic():
            return set(self._found)
        known = {t for t in self._found if t.removesuffix(dead_letters.SUFFIX) in topics}
        # A table that was dropped is not known, though its letters may be, or tables beside it.
        return {*known, *topics} if known else set()

    def _box(self) -> dead_letters.LetterBox:
        assert self.letter_box is not None, "who tries letters again says where they are"
        return self.letter_box

    def _letter_tables(self, table: str | None) -> list[str]:
        """The tables of letters that the destination has: all, or the one of a table."""
        known = sorted(name for name in self._found if name.endswith(dead_letters.SUFFIX))
        if table is None:
            return known
        wanted = dead_letters.table_of(table.removesuffix(dead_letters.SUFFIX))
        if wanted not in known:
            named = ", ".join(name.removesuffix(dead_letters.SUFFIX) for name in known)
            raise ConfigInvalid(
                f"table {table} has no dead letters",
                hint=f"Tables that have: {named}." if named else "No table of the pipeline has.",
            )
        return [wanted]

    def _letter_offsets(self, name: str) -> Mapping[Partition, Indices]:
        """Where all letters of a table are in the log."""
        snapshot_id = self._box().newest(name)
        if snapshot_id is None:
            return {}
        known = self._box().positions(name, snapshot_id)
        where = places(known.column(dead_letters.POSITION).combine_chunks())
        lists = where.group_by(["topic", "partition"]).aggregate([("offset", "list")])
        return {
            (each["topic"].as_py(), each["partition"].as_py()): each[
                "offset_list"
            ].values.to_numpy()
            for each in lists.to_struct_array()
            if each["topic"].is_valid
        }

    def _refuse_letters(self, name: str, known: pa.Table, durable: Frontier, as_is: bool) -> None:
        """Raise what keeps letters from being tried again, before anything is done."""
        positions = known.column(dead_letters.POSITION).combine_chunks()
        if len(positions.unique()) < len(positions):
            raise DataRejected(
                f"table {name} has two letters of one position",
                detail="A topic was deleted and created anew, and both had such a record.",
                hint="Delete the letters that are not wanted from the table by hand.",
            )
        owner = name.removesuffix(dead_letters.SUFFIX)
        several = self._reading.route.tables
        if self._reading.only_added and owner in self._topics and owner in several:
            raise ConfigInvalid(
                f"letters of topic {owner} and of table {owner} lie in one table, {name}",
                detail="Nothing tells whether other tables have taken a record.",
                hint="Give the table another name in `route.tables`.",
            )
        if not self._held_against_log(as_is):
            return
        if not self.keyed:
            raise ConfigInvalid(
                "with `keyed: false` nothing tells whether a letter is older than its row",
                hint="Use --as-is: letters then replace the rows of their keys.",
            )
        for own, moved in self._tried_together(first_letters(known), durable):
            _, problem = self._logs_of(own, moved, durable)
            if problem:
                raise problem

    def _held_against_log(self, as_is: bool) -> bool:
        return not self._reading.only_added and not as_is

    def _tried_together(
        self, firsts: Sequence[FirstLetter], durable: Frontier
    ) -> list[tuple[list[FirstLetter], bool]]:
        """Partitions whose letters are tried in one split, and whether their keys may have moved.

        It is one partition, or all of a topic whose keys may have. The first letters of each are
        given, those of a topic one after the other.
        """
        found: list[tuple[list[FirstLetter], bool]] = []
        for topic, own in groupby(firsts, lambda first: first.topic):
            partitions = list(own)
            if self._may_have_moved(topic, min(each.at for each in partitions), durable):
                found.append((partitions, True))
            else:
                found += [([each], False) for each in partitions]
        return found

    def _may_have_moved(self, topic: str, since: int, durable: Frontier) -> bool:
        """Whether keys of a time may have later records in other partitions, up to a frontier."""
        now = self._topics.get(topic)
        span = span_of(durable, now) if now is not None and self._ordered else None
        return span is not None and since < span.until

    def _logs_of(
        self, firsts: Sequence[FirstLetter], moved: bool, durable: Frontier
    ) -> tuple[list[Range], IcestreamError | None]:
        """The log from the first letters of partitions up to a frontier, or why there is none."""
        topic = self._topics.get(firsts[0].topic)
        recreated_partitions = _recreated(durable)
        for each in firsts:
            place = (each.topic, each.partition)
            end = durable[_name(topic, each.partition)] if topic else ()
            if topic is None or not end or place in recreated_partitions:
                why = "The topic is not there any more, or was deleted and created anew."
                return [], _log_lost(place, why)
            begins = self._bounds.get(place, (each.offset, 0))[0]
            if begins > each.offset:
                why = f"A letter is at offset {each.offset}, and the partition begins at {begins}."
                return [], _log_lost(place, why)
        assert topic is not None
        if moved:
            return self._logs_since(topic, min(each.at for each in firsts), durable)
        ranges = [
            Range(
                topic=topic.name,
                partition=each.partition,
                start=each.offset,
                end=durable[_name(topic, each.partition)][0],
            )
            for each in firsts
        ]
        return ranges, None

    def _logs_since(
        self, topic: Topic, since: int, durable: Frontier
    ) -> tuple[list[Range], IcestreamError | None]:
        """The log of a whole topic from a time up to a frontier, or why it cannot be read.

        Without the time (-1) it is all that was read. What lies before the place where reading
        began was never taken.
        """
        read = {
            (topic.name, number): at
            for number in range(topic.partitions)
            if (at := durable[_name(topic, number)])
        }
        oldest = self._cluster.offsets_at(list(read), 0)
        later = self._cluster.offsets_at(list(read), max(since, 0))
        ranges = []
        for place, (end, first) in read.items():
            begins = self._bounds.get(place, (first, 0))[0]
            if begins > first and not 0 <= oldest[place][1] < since:
                why = f"It begins at offset {begins}, and keys of letters may have moved to it."
                return [], _log_lost(place, why)
            start = max(first, later[place][0] if later[place][0] >= 0 else end)
            if start < end:
                ranges.append(Range(topic=place[0], partition=place[1], start=start, end=end))
        return ranges, None

    def _letter_splits(self, name: str, epoch: Epoch) -> list[LetterSplit]:
        """Letters of an epoch, a split for each partition."""
        before, at = epoch.lower[name], epoch.upper[name]
        ends = _ends(epoch.lower)
        if not ends:
            # A table that begins anew finds all of them in the log.
            return []
        group = LetterGroup.at(name, at)
        if at[0] - (before[0] if before else 0) > 1:
            return [self._letter_split(group, [], None, _replays_lost(group.table))]
        try:
            rows = self._letter_rows(group)
        except HistoryLost as lost:
            return [self._letter_split(group, [], None, lost)]
        # What lies beyond is read from the log in its turn.
        known = [each.before(ends.get(each.place, 0)) for each in by_partition(rows)]
        letters = {each.place: each for each in known if len(each.records)}
        splits = []
        firsts = [each.first() for each in letters.values()]
        for own, moved in self._tried_together(firsts, epoch.lower):
            logs, problem = None, None
            if self._held_against_log(group.as_is):
                logs, problem = self._logs_of(own, moved, epoch.lower)
            together = [letters[each.topic, each.partition] for each in own]
            split = self._letter_split(group, together, logs, problem)
            splits.append(replace(split, by_time=moved))
        return splits

    def _letter_rows(self, group: LetterGroup) -> pa.Table:
        known = self._box().positions(group.table, group.snapshot_id)
        return self._box().read(group.table, group.snapshot_id, group.spans(known))

    def _letter_split(
        self,
        group: LetterGroup,
        letters: Sequence[Letters],
        logs: Sequence[Range] | None,
        problem: IcestreamError | None,
    ) -> LetterSplit:
        owner = group.table.removesuffix(dead_letters.SUFFIX)
        route = self._reading.route
        topics = {each.topic for each in letters} or {owner}
        return LetterSplit(
            letters_table=group.table,
            owner=owner if owner in route.tables else None,
            letters=letters,
            logs=logs,
            reading=self._reading,
            tables=frozenset({group.table, *self._tables_of_topics(topics)}),
            problem=problem,
        )

    def _refuse_recreated(self, topic: str) -> None:
        if self._options.on_recreated == GO_ON:
            return
        raise recreated(
            topic,
            "Set `on_recreated: continue` to go on with the new topic from its beginning; "
            "rows of the old one stay in the table.",
        )


def _of_partitions(frontier: Frontier) -> dict[str, Position]:
    """The positions of partitions; no topic has a name like those of the others."""
    return {n: at for n, at in frontier.positions.items() if not n.startswith("/")}


def _position(frontier: Frontier) -> str:
    """Offsets by topic and partition."""
    named = sorted((*_parts(name)[:2], at) for name, at in _of_partitions(frontier).items() if at)
    return ", ".join(f"{topic}/{number}@{at[0]}" for topic, number, at in named)


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _ends(frontier: Frontier) -> dict[Partition, int]:
    """How far each partition was read, whichever topic of the name it belonged to."""
    ends: dict[Partition, int] = {}
    for name, at in _of_partitions(frontier).items():
        if at:
            topic, number, _ = _parts(name)
            ends[topic, number] = max(at[0], ends.get((topic, number), 0))
    return ends


def _recreated(frontier: Frontier) -> set[Partition]:
    """Partitions of which a frontier knows an older topic of the same name as well."""
    known = Counter(_parts(name)[:2] for name, at in _of_partitions(frontier).items() if at)
    return {partition for partition, topics in known.items() if topics > 1}


def _within(
    skipped: Mapping[Partition, Indices], ranges: Sequence[Range]
) -> dict[Partition, Indices]:
    """The offsets that lie in one of the ranges."""
    found = {}
    for each in ranges:
        offsets = skipped.get((each.topic, each.partition))
        if offsets is not None:
            inside = offsets[(offsets >= each.start) & (offsets < each.end)]
            if len(inside):
                found[each.topic, each.partition] = inside
    return found


def _joined(parts: Sequence[Mapping[Partition, Indices]]) -> dict[Partition, Indices]:
    partitions = {partition for part in parts for partition in part}
    return {
        partition: np.concatenate([part[partition] for part in parts if partition in part])
        for partition in partitions
    }


def _log_lost(place: Partition, why: str) -> HistoryLost:
    topic, partition = place
    return HistoryLost(
        f"partition {partition} of topic {topic} no longer reaches back to dead letters",
        detail=f"{why} Nothing tells whether later records changed the same rows.",
        hint="Use --as-is: letters then replace the rows of their keys, whatever is there. "
        "Or delete the letters from their table.",
    )


def _replays_lost(table: str) -> HistoryLost:
    return HistoryLost(
        f"several replays of {table} lie after the point that a table was rolled back to",
        detail="Which letters the first of them took is no longer known.",
        hint="Roll the table back to after the first replay, or run `icestream rollback --accept`; "
        "or drop the table to have it built anew from its topic.",
    )


def _frontier(lower: Frontier, offsets: Mapping[str, int], first: Mapping[str, int]) -> Frontier:
    """The frontier at these offsets; partitions that are not among them stay where they are."""
    ahead = {name: (offset, first[name]) for name, offset in offsets.items()}
    return Frontier({**lower.positions, **ahead})
