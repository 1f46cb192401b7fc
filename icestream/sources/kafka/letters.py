"""Dead letters that are tried again: which there are, and which part of the log belongs to them.

A record that became a letter enters its table only through `icestream replay`. What a worker does
with letters is in `replay`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pyarrow as pa

from icestream import dead_letters
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, DataRejected, HistoryLost, IcestreamError
from icestream.formats.rows import Indices
from icestream.frontier import Frontier
from icestream.sources import CatchUp, LettersTried
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.consumer import Range
from icestream.sources.kafka.growth import span_of
from icestream.sources.kafka.known_tables import KnownTables
from icestream.sources.kafka.partitions import (
    Partition,
    partition_name,
    read_ends,
    recreated_partitions,
)
from icestream.sources.kafka.replay import (
    GROUP_BYTES_MAX,
    REPLAYED,
    FirstLetter,
    LetterGroup,
    LetterSplit,
    PartitionLetters,
    by_partition,
    first_letters,
    groups,
    order,
    places,
    together,
)
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.topics import TopicsNow


class TriedAgain:
    """Letters that are tried again, and those that a table which lies behind skips in the log.

    Thread: the loop's, but for `note`, which those of epochs call.
    """

    def __init__(self, run: KafkaRun, topics: TopicsNow, tables: KnownTables):
        self._run = run
        self._topics = topics
        self._tables = tables
        self._skipped: Mapping[Partition, Indices] = {}
        self._catching_up: CatchUp | None = None
        self._tried: dict[tuple[str, str], LettersTried] = {}

    def waiting(self, durable: Frontier, table: str | None, as_is: bool) -> Sequence[LetterGroup]:
        """Groups of letters, each within the budget; raises what keeps them from being tried."""
        self._topics.find()
        bytes_max = min(self._run.budget.bytes, GROUP_BYTES_MAX)
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
                for start, end in groups(sizes, self._run.budget.rows, bytes_max)
            ]
        return found

    def note(self, learned: LettersTried) -> None:
        """Note what became of letters."""
        self._tried[learned.table, learned.part] = learned

    def tried(self) -> Sequence[LettersTried]:
        """What became of letters, by table."""
        return together(self._tried.values())

    def first(self, behind: CatchUp, lower: Frontier) -> Sequence[Frontier]:
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
        if self._run.reading.only_added:
            owners = {table, *self._topics.by_name}
            boxes = {*map(dead_letters.table_of, owners)} & {*self._tables.of_letters()}
            self._skipped = _joined([self._letter_offsets(name) for name in sorted(boxes)])
            if mixed := sorted(self._skipped.keys() & recreated_partitions(durable)):
                raise DataRejected(
                    f"letters of the old and of the new topic {mixed[0][0]} cannot be told apart",
                    detail=f"Table {table} is to be read again, without what lies among them.",
                    hint="Delete the letters that are not wanted from their table by hand.",
                )

    def skipped(self, ranges: Sequence[Range]) -> dict[Partition, Indices]:
        """The offsets in ranges that are skipped, because letters are there, or may be."""
        return _within(self._skipped, ranges)

    def splits(self, epoch: Epoch) -> list[LetterSplit]:
        """Letters that an epoch tries again, a split for each partition."""
        moved = [n for n, at in epoch.upper.positions.items() if at > epoch.lower[n]]
        names = [name for name in moved if name.startswith(REPLAYED)]
        return [split for name in names for split in self._splits_of(name, epoch)]

    def _splits_of(self, name: str, epoch: Epoch) -> list[LetterSplit]:
        """Letters of one table."""
        before, at = epoch.lower[name], epoch.upper[name]
        ends = read_ends(epoch.lower)
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
        letters: Sequence[PartitionLetters],
        logs: Sequence[Range] | None,
        problem: IcestreamError | None,
    ) -> LetterSplit:
        owner = group.table.removesuffix(dead_letters.SUFFIX)
        route = self._run.reading.route
        topics = {each.topic for each in letters} or {owner}
        return LetterSplit(
            letters_table=group.table,
            owner=owner if owner in route.tables else None,
            letters=letters,
            logs=logs,
            reading=self._run.reading,
            tables=frozenset({group.table, *self._tables.of_topics(topics)}),
            problem=problem,
        )

    def _box(self) -> dead_letters.LetterBox:
        assert self._run.letter_box is not None, "who tries letters again says where they are"
        return self._run.letter_box

    def _letter_tables(self, table: str | None) -> list[str]:
        """The tables of letters that the destination has: all, or the one of a table."""
        known = self._tables.of_letters()
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
        several = self._run.reading.route.tables
        if self._run.reading.only_added and owner in self._topics.by_name and owner in several:
            raise ConfigInvalid(
                f"letters of topic {owner} and of table {owner} lie in one table, {name}",
                detail="Nothing tells whether other tables have taken a record.",
                hint="Give the table another name in `route.tables`.",
            )
        if not self._held_against_log(as_is):
            return
        if not self._run.options.keyed:
            raise ConfigInvalid(
                "with `keyed: false` nothing tells whether a letter is older than its row",
                hint="Use --as-is: letters then replace the rows of their keys.",
            )
        for own, moved in self._tried_together(first_letters(known), durable):
            _, problem = self._logs_of(own, moved, durable)
            if problem:
                raise problem

    def _held_against_log(self, as_is: bool) -> bool:
        return not self._run.reading.only_added and not as_is

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
        now = self._topics.by_name.get(topic)
        span = span_of(durable, now) if now is not None and self._run.ordered else None
        return span is not None and since < span.until

    def _logs_of(
        self, firsts: Sequence[FirstLetter], moved: bool, durable: Frontier
    ) -> tuple[list[Range], IcestreamError | None]:
        """The log from the first letters of partitions up to a frontier, or why there is none."""
        topic = self._topics.by_name.get(firsts[0].topic)
        anew = recreated_partitions(durable)
        for each in firsts:
            place = (each.topic, each.partition)
            end = durable[partition_name(topic, each.partition)] if topic else ()
            if topic is None or not end or place in anew:
                why = "The topic is not there any more, or was deleted and created anew."
                return [], _log_lost(place, why)
            begins = self._topics.bounds.get(place, (each.offset, 0))[0]
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
                end=durable[partition_name(topic, each.partition)][0],
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
            if (at := durable[partition_name(topic, number)])
        }
        oldest = self._run.cluster.offsets_at(list(read), 0)
        later = self._run.cluster.offsets_at(list(read), max(since, 0))
        ranges = []
        for place, (end, first) in read.items():
            begins = self._topics.bounds.get(place, (first, 0))[0]
            if begins > first and not 0 <= oldest[place][1] < since:
                why = f"It begins at offset {begins}, and keys of letters may have moved to it."
                return [], _log_lost(place, why)
            start = max(first, later[place][0] if later[place][0] >= 0 else end)
            if start < end:
                ranges.append(Range(topic=place[0], partition=place[1], start=start, end=end))
        return ranges, None


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
