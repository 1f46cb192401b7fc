"""Epochs, the unit of commit, and the progress a destination remembers of them.

An example in numbers: a pipeline with the tables a, b and c, whose source counts positions from 0.
Epoch 7 is `[60, 70)` and changes a and c. Epoch 8 is `[70, 80)` and changes a and b. Both say so in
what they commit: epoch 8 has two tables, its members are a and b. Then the process is killed. What
`resume_point` makes of the progress that a start finds:

| a | b | c | unfinished | goes on at | why |
|--:|--:|--:|---|--:|---|
| 8 | 8 | 7 | none | 80 | all members of epoch 8 carry it; c was merely idle |
| 8 | 5 | 7 | 8, `[70, 80)` | 70 | b lacks it: 8 is minted again with these bounds, for b alone |
| 7 | 5 | 7 | none | 70 | nobody saw epoch 8, so its files are nobody's: it is minted anew |
| 8 | dropped | 7 | none | 80 | b is built anew as a whole, it needs no epoch |
| 8 | 8 | 5 | raises | | epoch 8 remembers that c had taken 7: somebody set c back |
| 8 | 8 | 5, catching up | none | 80 | c lies behind, its own frontier counts until it is level |

The smallest frontier over the tables would be the wrong place to go on. In the first row it is 70,
and where c stays idle it stays 70 for ever, long after the source has rightly forgotten it.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from icestream.errors import HistoryLost, ProgressLost, check
from icestream.frontier import START, Frontier

# Any fixed namespace serves; this one was drawn once and must never change, or a restart would
# not recognise what an earlier version published.
_BATCH_NAMESPACE = uuid.UUID("6d2f0b4e-8f5a-5d0b-9a53-3c1d5e0f7a11")
# A part of a table's identity is enough to tell the tables of one pipeline apart.
_ID_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A half-open span `[lower, upper)` of the source; it becomes one commit per table."""

    number: int
    lower: Frontier
    upper: Frontier

    def __post_init__(self) -> None:
        check(self.number > 0, "epochs are numbered from one")
        check(self.upper.covers(self.lower), f"epoch {self.number} does not run backwards")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a table says is durable; written in the same commit as the data it describes.

    `tables` counts the tables that take part in the epoch and `members` has their ids, so that a
    restart can tell an epoch that all of them carry from one that was cut short, and a table that
    lacks the epoch from one that was dropped since. `members` is empty in what older versions
    wrote, which named the tables otherwise, and where somebody removed it. Epoch 0 means that no
    epoch was committed yet.
    `catching_up` marks a table whose own frontier counts and not the pipeline's: it was rolled back
    and its operator asked for `--replay`. `schema_id` is the schema that it had for the epoch:
    it decided which records became rows. `before` has the epochs that the pipeline's tables were at
    before this one, by their ids, so that a table that was set back to an older state is noticed.
    `names` are ids of the names of the pipeline's tables: one that cannot be read is known by it.
    `table_id` is the id of the table that the progress was read from; it is not a part of what the
    table remembers.
    """

    pipeline: str
    generation: int = 0
    epoch: int = 0
    lower: Frontier = START
    upper: Frontier = START
    tables: int = 0
    catching_up: bool = False
    members: frozenset[str] = frozenset()
    schema_id: int | None = None
    names: frozenset[str] = frozenset()
    before: Mapping[str, int] = field(default_factory=dict, compare=False)
    table_id: str = field(default="", compare=False)

    def same_epoch(self, other: "Progress") -> bool:
        """Whether both speak of one epoch, whatever they say of its tables."""
        mine, others = (self.epoch, self.lower, self.upper), (other.epoch, other.lower, other.upper)
        return mine == others


def table_id(table_uuid: str) -> str:
    """The id of a table among those of its pipeline; one that is made anew has another id."""
    # Some catalogs draw uuids that begin with the time: of tables made at once they begin alike.
    return hashlib.sha256(table_uuid.encode()).hexdigest()[:_ID_DIGITS]


def name_id(name: str) -> str:
    """The id of a table's name; some catalogs take names that differ in case for one."""
    return hashlib.sha256(name.casefold().encode()).hexdigest()[:_ID_DIGITS]


def batch_id(pipeline: str, table: str, upper: Frontier) -> str:
    """The name under which an epoch is published in a table: the same for every attempt at it."""
    text = json.dumps(upper.to_json(), sort_keys=True, separators=(",", ":"))
    return str(uuid.uuid5(_BATCH_NAMESPACE, f"{pipeline}:{table}:{text}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a starting pipeline goes on.

    `number` is the highest epoch in use and `at` the frontier up to which all tables are complete.
    `unfinished` is an epoch that only its `carriers` have: it is minted again with the same bounds
    for the others. `tables` is the number of its tables and `lacking` has the names of those that
    need it; None when only their number is known. `behind` are tables that lie behind because they
    were rolled back.
    """

    number: int
    at: Frontier
    unfinished: Epoch | None
    carriers: frozenset[str]
    tables: int
    behind: Mapping[str, Progress]
    lacking: frozenset[str] | None = None


def furthest(progress: Iterable[Progress]) -> Progress | None:
    """The progress of the last epoch; None when there is no epoch yet."""
    started = [mine for mine in progress if mine.epoch]
    return reduce(_further, started) if started else None


def known_names(progress: Iterable[Progress]) -> frozenset[str]:
    """The ids of the names that the pipeline's tables had at the last epoch."""
    found = list(progress)
    last = furthest(found)
    carriers = [mine for mine in found if last is not None and mine.same_epoch(last)]
    return frozenset[str]().union(*(mine.names for mine in carriers))


def resume_point(progress: Mapping[str, Progress]) -> Resume:
    """Derive from what the tables remember where to go on.

    Epoch n starts to be committed only when every table of n-1 has committed, so all before the
    highest epoch found is complete. An example: epoch 8 names its tables, a and b. It is complete
    if a and b both carry it. A table that was dropped does not count, for it is built anew as a
    whole. Tables of an epoch are made before its first commit, so one that is not there was
    dropped. Older versions wrote only the number, 2: then any two tables that carry epoch 8 are
    enough. Carriers that name different tables show that the epoch was cut short while it was
    written a second time. Whether a table that was rolled back took part is unknown; it gets the
    epoch as it catches up. The module has an example with numbers.
    """
    last = furthest(progress.values())
    if last is None:
        return Resume(
            number=0,
            at=START,
            unfinished=None,
            carriers=frozenset(),
            tables=0,
            behind={},
        )
    carriers = {name: mine for name, mine in progress.items() if mine.epoch == last.epoch}
    ids = {mine.table_id for mine in carriers.values()}
    counted = any(ids <= mine.members for mine in carriers.values())
    counted = counted or len({mine.tables for mine in carriers.values()}) == 1
    if not counted or not all(mine.same_epoch(last) for mine in carriers.values()):
        raise ProgressLost(
            f"the tables of pipeline {last.pipeline} do not agree about epoch {last.epoch}",
            detail=f"Tables: {', '.join(sorted(carriers))}.",
            hint="Two pipelines of one name write to different tables; rename one of them.",
        )
    for lost in lacking_tables(progress).values():
        raise lost
    catching_up = {name: mine for name, mine in progress.items() if mine.catching_up}
    behind = {name: m for name, m in catching_up.items() if not m.upper.covers(last.upper)}
    complete, lacking = _completeness(progress, carriers)
    epoch = Epoch(number=last.epoch, lower=last.lower, upper=last.upper)
    return Resume(
        number=max(mine.epoch for mine in progress.values()),
        at=last.upper if complete else last.lower,
        unfinished=None if complete else epoch,
        # What has caught up past the epoch must not get it once more.
        carriers=frozenset({*carriers, *catching_up} - {*behind}),
        tables=min(mine.tables for mine in carriers.values()),
        lacking=lacking,
        behind=behind,
    )


def lacking_tables(progress: Mapping[str, Progress]) -> dict[str, HistoryLost]:
    """Tables that lack epochs which the pipeline itself does not miss, and how that is known.

    Somebody put older metadata in the place of the table's own, or the table was away (renamed,
    dropped and restored) when the last epoch was committed: that one knows all tables that were
    there. A rollback is noticed before, by what the metadata itself keeps of it.
    """
    last, found = furthest(progress.values()), {}
    carriers = [mine for mine in progress.values() if last and mine.epoch == last.epoch]
    known = frozenset[str]().union(*(mine.members | mine.before.keys() for mine in carriers))
    for name, mine in sorted(progress.items()):
        if last is None or mine.catching_up:
            continue
        had = last.before.get(mine.table_id, 0)
        if mine.epoch < had:
            found[name] = _lacking(
                f"table {name} was set back to an older state",
                f"It had taken epoch {had} of pipeline {last.pipeline}, and is at epoch "
                f"{mine.epoch}: what came between is no longer in it.",
            )
        elif mine.epoch not in (0, last.epoch) and last.members and mine.table_id not in known:
            found[name] = _lacking(
                f"table {name} was away while the pipeline went on",
                f"It is at epoch {mine.epoch}, and was not there at epoch {last.epoch} of pipeline "
                f"{last.pipeline}: what came between is not in it.",
            )
    return found


def _lacking(message: str, detail: str) -> HistoryLost:
    return HistoryLost(
        message,
        detail=detail,
        hint="Bring its newest state back, or drop the table and start again: it is then built "
        "anew from the source. Or run `icestream rollback --replay` to apply what it lacks, if the "
        "source has it, or `icestream rollback --accept` to leave that out.",
    )


def _completeness(
    progress: Mapping[str, Progress], carriers: Mapping[str, Progress]
) -> tuple[bool, frozenset[str] | None]:
    """Whether all tables of an epoch carry it, and which lack it for sure, if that is known."""
    agreed = len({(mine.tables, mine.members) for mine in carriers.values()}) == 1
    if not all(mine.members for mine in carriers.values()):
        return agreed and all(len(carriers) >= m.tables for m in carriers.values()), None
    needed = frozenset.intersection(*(mine.members for mine in carriers.values()))
    there = {name for name, mine in progress.items() if mine.table_id in needed}
    lacking = frozenset(there - carriers.keys())
    return agreed and not lacking, lacking


def _further(one: Progress, other: Progress) -> Progress:
    """The further of two; epochs of a table that catches up have high numbers and old bounds."""
    if one.upper == other.upper:
        return max(one, other, key=lambda mine: mine.epoch)
    return one if one.upper.covers(other.upper) else other
