"""Partitions of topics in frontiers: their names, and what it means when they are not as they were.

A name holds the topic's id, so that a topic that was deleted and created anew, whose offsets count
from zero again, is never taken for the old one.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from icestream.errors import HistoryLost
from icestream.frontier import Frontier, Position
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.consumer import Range

Partition = tuple[str, int]
"""A topic's name and the number of a partition of it."""


def partition_name(topic: Topic, number: int) -> str:
    """A partition's name in a frontier; a topic's name holds no blank."""
    return f"{topic.name} {number} {topic.id}"


def partition_parts(name: str) -> tuple[str, int, str]:
    """Topic, number and topic id of a name."""
    topic, number, topic_id = name.split(" ")
    return topic, int(number), topic_id


def recreated(topic: str, hint: str) -> HistoryLost:
    """The error for a topic that has another id than it had."""
    return HistoryLost(
        f"topic {topic} was deleted and created anew",
        detail="Its offsets count from zero again; what the old one still held is gone.",
        hint=hint,
    )


def refuse_lost(topic: str, number: int, offset: int, bounds: tuple[int, int]) -> None:
    """Raise `HistoryLost` when a partition no longer reaches from an offset on, or up to it."""
    earliest, end = bounds
    where = f"partition {number} of topic {topic}"
    if offset < earliest:
        raise HistoryLost(
            f"{where} no longer has offset {offset}",
            detail=f"It begins at {earliest}: {earliest - offset} offsets are lost.",
            hint="Restore them, or build the tables anew under another pipeline name. "
            "Raise the topic's retention.",
        )
    if offset > end:
        raise HistoryLost(
            f"{where} ends at offset {end}, before {offset} where it was read up to",
            detail="Records that were read are gone from the broker, or it is another one.",
            hint="Check `bootstrap_servers`. If the partition lost records, build the tables anew "
            "under another pipeline name: rows of lost records are in the old ones.",
        )


def balanced(
    ranges: Sequence[Range], groups: int, together: Collection[str] = ()
) -> list[list[Range]]:
    """The ranges in at most so many groups of about the same number of records.

    Ranges of a topic in `together` come into one group.
    """
    units = [[each] for each in ranges if each.topic not in together]
    units += [found for t in together if (found := [each for each in ranges if each.topic == t])]
    filled: list[tuple[int, list[Range]]] = [(0, []) for _ in range(min(groups, len(units)))]
    for unit in sorted(units, key=lambda u: (-_rows(u), u[0].topic, u[0].partition)):
        lightest = min(range(len(filled)), key=lambda number: filled[number][0])
        rows, group = filled[lightest]
        filled[lightest] = (rows + _rows(unit), [*group, *unit])
    return [group for _, group in filled]


def _rows(ranges: Sequence[Range]) -> int:
    return sum(each.end - each.start for each in ranges)


def of_partitions(frontier: Frontier) -> dict[str, Position]:
    """The positions of partitions; no topic has a name like those of the others."""
    return {n: at for n, at in frontier.positions.items() if not n.startswith("/")}


def in_words(frontier: Frontier) -> str:
    """Offsets by topic and partition."""
    named = sorted(
        (*partition_parts(name)[:2], at) for name, at in of_partitions(frontier).items() if at
    )
    return ", ".join(f"{topic}/{number}@{at[0]}" for topic, number, at in named)


def read_ends(frontier: Frontier) -> dict[Partition, int]:
    """How far each partition was read, whichever topic of the name it belonged to."""
    ends: dict[Partition, int] = {}
    for name, at in of_partitions(frontier).items():
        if at:
            topic, number, _ = partition_parts(name)
            ends[topic, number] = max(at[0], ends.get((topic, number), 0))
    return ends


def recreated_partitions(frontier: Frontier) -> set[Partition]:
    """Partitions of which a frontier knows an older topic of the same name as well."""
    known = Counter(partition_parts(name)[:2] for name, at in of_partitions(frontier).items() if at)
    return {partition for partition, topics in known.items() if topics > 1}


def at_offsets(lower: Frontier, offsets: Mapping[str, int], first: Mapping[str, int]) -> Frontier:
    """The frontier at these offsets; partitions that are not among them stay where they are."""
    ahead = {name: (offset, first[name]) for name, offset in offsets.items()}
    return Frontier({**lower.positions, **ahead})
