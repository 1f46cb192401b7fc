"""Topics that are given more partitions: the records of a key then lie in several of them.

    partition 0   k@1  k@2 ·······················    k moves when its producer learns of
    partition 3             ▲    k@3  k@4 ········    partition 3
                            └ the topic grows ────── span ──────► until

Around the growth, in its span, a topic is read in the order of time: all its partitions end an
epoch at one common time, and one split reads them all, so that no change of a key is applied before
an older one. After the span each partition is read by itself again. The frontier remembers the span
(`/grown <topic> <id>: (until, grown, passed)`), so that a restart reads in the same way.

At a first start nobody knows whether the topic has grown before. But a partition has no record from
before it was made. An example: the first records of partitions 0, 1 and 2 are from 9:00, 9:00 and
12:00. Partition 2 was made by 12:00. Records after 12:00, plus ten minutes for producers that learn
of it late, are read partition by partition. Older ones are read in the order of time.

A record's time is the greatest timestamp up to it in its partition: it never goes back there, and
the broker finds the first record of a time without reading (decision 020).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from icestream.epoch import Epoch
from icestream.frontier import Frontier, Position
from icestream.sources.kafka.client import Topic

GROWN = "/grown "
# Producers ask for the partitions of a topic every five minutes; some ask less often.
GRACE_MS = 10 * 60 * 1000
# Records of one producer reach two partitions in any order, but not at times far apart.
SETTLE_SECONDS = 1.0
# So few rows are read at once, although only the first of them need the order of time.
SMALL_ROWS = 20_000
# Answers of the brokers to find one time; halving the milliseconds of a century takes 42.
_QUESTIONS_MAX = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Records of a topic before the time `until` (ms) are read in the order of time.

    `grown` tells a growth that was seen from a first start. `passed`: all of them were read.
    """

    until: int
    grown: bool
    passed: bool

    def position(self) -> Position:
        """The span as a position of a frontier; a later one is greater."""
        return (self.until, int(self.grown), int(self.passed))


def span_name(topic: str, topic_id: str) -> str:
    """The name of a topic's span in a frontier."""
    return f"{GROWN}{topic} {topic_id}"


def span_of(frontier: Frontier, topic: Topic) -> Span | None:
    """The newest span of a topic that a frontier knows."""
    at = frontier[span_name(topic.name, topic.id)]
    return Span(until=at[0], grown=bool(at[1]), passed=bool(at[2])) if at else None


def topics_by_time(epoch: Epoch) -> set[str]:
    """Topics whose records must be read in the order of time in an epoch; the epoch tells alone."""
    return {
        name.removeprefix(GROWN).split(" ")[0]
        for name, at in epoch.upper.positions.items()
        if name.startswith(GROWN) and not (at == epoch.lower[name] and at[2])
    }


def end_of_unknown(firsts: Mapping[int, int], now: int) -> int:
    """Until when a topic may have grown, by the times of its partitions' first records.

    A partition without records (-1) may have been made just now. Producers learn of partitions
    late; a topic that was in use for a moment only has no such producers. No partition was made
    later than now, whatever time its first record gives.
    """
    known = [min(at, now) for at in firsts.values() if at >= 0]
    newest = now if len(known) < len(firsts) else max(known, default=now)
    oldest = min(known, default=newest)
    return newest + min(GRACE_MS, newest - oldest)


class TimeCuts:
    """Cuts partitions at common times; `offsets_at` names each one's first offset of a time.

    `low` is a time before which nothing is left. Records from the time `high` on are in the last
    cut.
    """

    def __init__(self, offsets_at: Callable[[int], Mapping[str, int]], low: int, high: int):
        self._offsets_at = offsets_at
        self._low = low
        self._high = high

    def next(self, now: Mapping[str, int], ends: Mapping[str, int], rows: int) -> dict[str, int]:
        """Offsets of the latest time found up to which there are at most so many rows.

        Where a single millisecond has more, nothing tells their order: so many of them.
        """
        below, above = 0, sum(ends[name] - now[name] for name in now)
        if above <= rows:
            return dict(ends)
        low, high, best = self._low, max(self._high, self._low + 2), None
        beyond = dict(ends)
        for question in range(_QUESTIONS_MAX):
            if high - low <= 1:
                break
            # Records are spread evenly, or else halving finds them.
            wanted = (0.75 * rows - below) / max(1, above - below)
            share = 0.5 if question % 2 else min(max(wanted, 0.0), 1.0)
            middle = min(max(low + int((high - low) * share), low + 1), high - 1)
            at = self._clamped(self._offsets_at(middle), now, ends)
            found = sum(at[name] - now[name] for name in now)
            if found > rows:
                high, above, beyond = middle, found, at
                continue
            low, below = middle, found
            best = at if found else best
            if 2 * found >= rows:
                break
        self._low = low
        return best or advanced(now, beyond, rows)

    @staticmethod
    def _clamped(
        at: Mapping[str, int], now: Mapping[str, int], ends: Mapping[str, int]
    ) -> dict[str, int]:
        return {name: min(max(at[name], now[name]), ends[name]) for name in now}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGroup:
    """Partitions, by their names in frontiers, that are read in the order of time.

    `border` is where each leaves the span; None while that is not known, and where there is no end.
    """

    names: Sequence[str]
    cuts: TimeCuts
    border: Mapping[str, int] | None = None
    span: Span | None = None
    topic: Topic | None = None

    def passed(self, now: Mapping[str, int]) -> bool:
        """Whether the span lies before these offsets."""
        return self.border is not None and all(now[n] >= self.border[n] for n in self.names)

    def moved(self, now: Mapping[str, int], ends: Mapping[str, int], rows: int) -> dict[str, int]:
        """Offsets of a later common time, at most so many rows away.

        What lies after the span is left for later, unless it is little.
        """
        now, ends = ({name: each[name] for name in self.names} for each in (now, ends))
        small = min(SMALL_ROWS, rows)
        if self.border is not None and sum(ends[n] - now[n] for n in self.names) > small:
            ends = {name: min(ends[name], max(now[name], self.border[name])) for name in ends}
        return self.cuts.next(now, ends, rows)

    def positions(self, now: Mapping[str, int]) -> dict[str, Position]:
        """The span in a frontier at these offsets."""
        if self.span is None or self.topic is None:
            return {}
        here = replace(self.span, passed=self.passed(now))
        return {span_name(self.topic.name, self.topic.id): here.position()}


def advanced(now: Mapping[str, int], ends: Mapping[str, int], rows: int) -> dict[str, int]:
    """All partitions moved on by so many rows together, those with few left by all of them."""
    left = dict(sorted(((n, ends[n] - now[n]) for n in now), key=lambda item: item[1]))
    moved = {}
    for number, (name, count) in enumerate(left.items()):
        share = min(count, max(1, rows // (len(left) - number))) if count else 0
        moved[name] = now[name] + share
        rows = max(0, rows - share)
    return moved
