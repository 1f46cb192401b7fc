"""Where epochs of topics end: at offsets that are stable, within what an epoch may hold.

Where keys may be in several partitions, these are cut at common times instead: see `growth`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from icestream.errors import IcestreamError
from icestream.frontier import Frontier
from icestream.patience import let_pass
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.growth import (
    GRACE_MS,
    SETTLE_SECONDS,
    Span,
    TimeCuts,
    TimedGroup,
    advanced,
    end_of_unknown,
    span_of,
)
from icestream.sources.kafka.options import LATEST
from icestream.sources.kafka.partitions import (
    Partition,
    at_offsets,
    of_partitions,
    partition_name,
    partition_parts,
)
from icestream.sources.kafka.reads import ReadSoFar
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.split import RangesTooLarge
from icestream.sources.kafka.topics import TopicsNow

log = logging.getLogger(__name__)

# Bounds of epochs that are named at once; the next ones are named when these are used up.
EPOCHS_AHEAD = 16


class Boundaries:
    """Where the next epochs end. Thread: the loop's."""

    def __init__(self, run: KafkaRun, topics: TopicsNow, reads: ReadSoFar):
        self._run = run
        self._topics = topics
        self._reads = reads
        # What was stable when the source was first asked.
        self._goal: Frontier | None = None
        self._shortened: dict[Partition, int] = {}
        # Topics that are read in the order of time now, and how many rows at once at most.
        self._in_time: frozenset[str] = frozenset()
        self._timed_rows: int | None = None
        # What is durable in other tables, while one that lies behind is read again.
        self.ahead = Frontier()
        # Where `start: latest` begins, until a table remembers it.
        self._begun: dict[str, int] = {}
        self._more = False

    def after(self, lower: Frontier) -> list[Frontier]:
        """Bounds of epochs up to what is stable now, each within the budget."""
        self._begin(lower)
        spans = self._spans(lower)
        readable = self._topics.readable([name for name, span in spans.items() if span.grown])
        now = {
            partition_name(topic, number): self._first(topic, number, lower)
            for topic, number in readable
        }
        ends = {
            partition_name(t, n): self._end(t, n, now[partition_name(t, n)]) for t, n in readable
        }
        if now != ends:
            ends = self._settled_ends(ends, spans)
        first = {name: lower[name][1] if lower[name] else offset for name, offset in now.items()}
        if self._goal is None:
            self._goal = at_offsets(lower, {name: ends[name] for name in now}, first)
        frontiers: list[Frontier] = []
        if now and self.begins_at_end(lower):
            # The beginning is an epoch of its own, without records: see `KafkaSource.plan`.
            frontiers.append(at_offsets(lower, now, first))
        groups = self._groups(ends, spans) if now != ends else []
        while now != ends and len(frontiers) < EPOCHS_AHEAD:
            now = self._moved(now, ends, groups)
            passed = {name: at for group in groups for name, at in group.positions(now).items()}
            frontiers.append(Frontier({**at_offsets(lower, now, first).positions, **passed}))
        self._more = now != ends
        return frontiers

    def backlog(self, lower: Frontier) -> bool:
        """Whether records wait that were left out of the last answer, or fill an epoch.

        One that cannot be answered waits for its time, when `available` tells why.
        """
        if self._more:
            return True
        begun = {
            partition_parts(name)[:2]: at[0] for name, at in of_partitions(lower).items() if at
        }
        try:
            ends = self._run.cluster.stable_ends(
                [place for place in self._topics.bounds if place in begun]
            )
        except IcestreamError:
            return False
        waiting = sum(max(0, end - begun[place]) for place, end in ends.items())
        return waiting >= self._reads.rows_at_once()

    def shorten(self, lost: RangesTooLarge) -> None:
        """End epochs before they grow too large."""
        rows = self._rows_in_time()
        if rows > 1 and not self._in_time.isdisjoint(topic for topic, _ in lost.reached):
            # Offsets at which reading ended are of no common time.
            self._timed_rows = rows // 2
        else:
            self._shortened.update(lost.reached)

    def passed_goal(self, frontier: Frontier) -> bool:
        """Whether all records that were stable at the start lie before a frontier."""
        goal, left_out = self._goal, self._topics.left_out
        return goal is not None and all(
            frontier[name] >= at for name, at in goal.positions.items() if name not in left_out
        )

    def begins_at_end(self, lower: Frontier) -> bool:
        """Whether only what comes after the first start is wanted.

        A partition that appears later begins at its beginning, whatever the option says.
        """
        return self._run.options.start == LATEST and not of_partitions(lower)

    def _begin(self, lower: Frontier) -> None:
        """Note where `start: latest` begins; a table that is read again begins there once more."""
        if not self.begins_at_end(lower) or self._begun:
            return
        ahead = {name: at[1] for name, at in of_partitions(self.ahead).items() if at}
        ends = {
            partition_name(topic, number): self._topics.bounds[topic.name, number][1]
            for topic, number in self._topics.partitions()
        }
        self._begun = ahead or ends

    def _first(self, topic: Topic, number: int, lower: Frontier) -> int:
        """Where reading goes on, or begins."""
        position = lower[partition_name(topic, number)]
        if position:
            return position[0]
        earliest, _ = self._topics.bounds[topic.name, number]
        return self._begun.get(partition_name(topic, number), earliest)

    def _end(self, topic: Topic, number: int, first: int) -> int:
        """How far a partition may be read, for now."""
        end = max(first, self._topics.bounds[topic.name, number][1])
        shortened = self._shortened.get((topic.name, number))
        if shortened is None or shortened <= first:
            self._shortened.pop((topic.name, number), None)
            return end
        return min(end, shortened)

    # --- the order of time --------------------------------------------------------------------

    def _spans(self, lower: Frontier) -> dict[str, Span]:
        """The topics that are to be read in the order of time from a frontier on."""
        if not self._run.ordered:
            return {}
        found = {}
        for topic in self._topics.by_name.values():
            span = self._span(topic, lower)
            if span is not None and not span.passed:
                found[topic.name] = span
        return found

    def _span(self, topic: Topic, lower: Frontier) -> Span | None:
        known = span_of(lower, topic)
        if lower != self.ahead and self.ahead.covers(lower):
            # A table that lies behind is read again as it was, or more carefully.
            ahead = span_of(self.ahead, topic)
            if ahead is None or (known is not None and known.until >= ahead.until):
                return known
            return replace(ahead, passed=False)
        missing = {n for n in range(topic.partitions) if not lower[partition_name(topic, n)]}
        now = self._run.now_ms()
        if len(missing) == topic.partitions:
            if topic.partitions == 1 or self.begins_at_end(lower):
                return None
            partitions = [(topic.name, number) for number in range(topic.partitions)]
            times = self._run.cluster.offsets_at(partitions, 0)
            firsts = {number: times[topic.name, number][1] for number in range(topic.partitions)}
            return Span(until=end_of_unknown(firsts, now), grown=False, passed=False)
        if any(not self._topics.was_left_out((topic.name, number)) for number in missing):
            log.info("topic %s has more partitions than before", topic.name)
            return Span(until=now + GRACE_MS, grown=True, passed=False)
        return known

    def _settled_ends(self, ends: dict[str, int], spans: Mapping[str, Span]) -> dict[str, int]:
        """Ends of one moment: records of a producer reach its partitions in any order.

        What is from before the moment and arrives a little later counts as well.
        """
        moment = self._run.now_ms() + 1
        growing = {name for name, span in spans.items() if span.grown and moment < span.until}
        names = [
            name for name in ends if self._run.unordered or partition_parts(name)[0] in growing
        ]
        if not names:
            return ends
        let_pass(SETTLE_SECONDS)
        partitions = [partition_parts(name)[:2] for name in names]
        bounds = self._run.cluster.bounds(partitions)
        later = self._offsets_at(
            names, {n: bounds[partition_parts(n)[:2]][1] for n in names}, moment
        )
        return {**ends, **{name: max(ends[name], later[name]) for name in names}}

    def _offsets_at(
        self, names: Sequence[str], ends: Mapping[str, int], moment: int
    ) -> dict[str, int]:
        """The first offset of a time in each partition; its end where there is none."""
        places = {name: partition_parts(name)[:2] for name in names}
        found = self._run.cluster.offsets_at(list(places.values()), moment)
        offsets = {name: found[place][0] for name, place in places.items()}
        return {n: min(at, ends[n]) if at >= 0 else ends[n] for n, at in offsets.items()}

    def _groups(self, ends: Mapping[str, int], spans: Mapping[str, Span]) -> list[TimedGroup]:
        """The partitions that are cut at common times."""
        groups = []
        for topic in self._topics.by_name.values():
            names = [n for k in range(topic.partitions) if (n := partition_name(topic, k)) in ends]
            span = spans.get(topic.name)
            if span is not None and names:
                # Before its end nobody knows which records a span will have.
                over = self._run.now_ms() >= span.until + 1000 * SETTLE_SECONDS
                border = self._offsets_at(names, ends, span.until) if over else None
                cuts = self._cuts(names, ends)
                groups.append(
                    TimedGroup(names=names, cuts=cuts, border=border, span=span, topic=topic)
                )
        if self._run.unordered and len(ends) > 1:
            groups.append(TimedGroup(names=list(ends), cuts=self._cuts(list(ends), ends)))
        self._in_time = frozenset(
            partition_parts(name)[0] for group in groups for name in group.names
        )
        if not groups:
            self._timed_rows = None
        return groups

    def _cuts(self, names: Sequence[str], ends: Mapping[str, int]) -> TimeCuts:
        found = self._run.cluster.offsets_at([partition_parts(name)[:2] for name in names], 0)
        low = min((at for _, at in found.values() if at >= 0), default=0)

        def offsets_at(moment: int) -> Mapping[str, int]:
            return self._offsets_at(names, ends, moment)

        return TimeCuts(offsets_at, low, self._run.now_ms() + 1)

    def _moved(
        self, now: Mapping[str, int], ends: Mapping[str, int], groups: Sequence[TimedGroup]
    ) -> dict[str, int]:
        """All partitions moved on by as many rows as an epoch may have."""
        timed = [group for group in groups if not group.passed(now)]
        in_time = {name for group in timed for name in group.names}
        rest = {name: offset for name, offset in now.items() if name not in in_time}
        waiting = [g for g in timed if any(now[name] < ends[name] for name in g.names)]
        idle = all(rest[name] == ends[name] for name in rest)
        share = max(1, self._reads.rows_at_once() // max(1, len(waiting) + (not idle)))
        moved = {**now, **advanced(rest, ends, share)}
        for group in waiting:
            rows = min(share, self._rows_in_time())
            moved.update(group.moved(now, ends, rows))
        return moved

    def _rows_in_time(self) -> int:
        """Rows of a topic that one worker reads, or of all with `keyed: false`, at most."""
        rows = self._reads.rows_at_once() // (self._run.workers if self._run.options.keyed else 1)
        return max(1, min(rows, self._timed_rows or rows))
