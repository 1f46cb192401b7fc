"""Dead letters that are tried again: what of them is taken now, and what it does to its table.

    letters ──decode, route, cast──► taken ──► keys ──► the log from the first letter on ──► changes
                               └──► still rejected         (only records of these keys)

A letter is old: later records of its key may have come, and the table does not tell how new its
row is. So the log is read again from the letter up to where the pipeline is, and all changes of the
letters' keys are applied, of which the last wins. That is what the table would hold had the letter
been taken in its turn. Where every record is a row of its own the letters alone are added.

When the topic was given partitions since, the key may have moved: then all partitions are read from
the time of the first letter on, and times order the changes (`icestream.sources.kafka.growth`).

A letter is settled when every table that it belongs to has taken it; it leaves the letters in the
same epoch.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icestream import dead_letters
from icestream.change import OP, SEQ, Op
from icestream.errors import IcestreamError
from icestream.formats.rows import Indices, Mask, Records
from icestream.frontier import Frontier, Position
from icestream.sources import LettersTried, Targets, ValuesNeeded, joined_needs
from icestream.sources.kafka.changes import replacing
from icestream.sources.kafka.consumer import Range, read_range
from icestream.sources.kafka.partitions import Partition
from icestream.sources.kafka.split import (
    BATCH_BYTES,
    Reading,
    RecordRouter,
    running_maximum,
)

# Letters travel to workers through the coordinator, which should not have to hold many.
GROUP_BYTES_MAX = 64 * 1024**2
# A topic's name holds no slash, so no partition in a frontier is called like this.
REPLAYED = "/replayed "
_POSITION = r"^(?P<topic>.+)/(?P<partition>[0-9]+)/(?P<offset>[0-9]+)$"
_MICROSECONDS = 1000
# Bits of a position.
_AS_IS, _BY_OFFSET = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterGroup:
    """Letters that are tried in one epoch: from one of a table's letters to another, in order.

    They are named by a snapshot, so that the epoch is read again as it was even when the letters
    have left the table. `as_is` applies the letters without a look at the log. `by_offset` says
    that letters of a partition are counted in the order of their offsets. Older versions counted
    them in the order of their texts: `t/0/10` came before `t/0/9`.
    """

    table: str
    snapshot_id: int
    start: int
    end: int
    as_is: bool
    by_offset: bool = True

    def after(self, lower: Frontier) -> Frontier:
        """The frontier of the epoch that tries them; the offsets stay where they are.

        The position begins with the number of such epochs of the table.
        """
        name = REPLAYED + self.table
        number = lower[name][0] if lower[name] else 0
        ways = _AS_IS * self.as_is | _BY_OFFSET * self.by_offset
        position = (number + 1, self.snapshot_id, self.start, self.end, ways)
        return Frontier({**lower.positions, name: position})

    @staticmethod
    def at(name: str, position: Position) -> "LetterGroup":
        """The group of a frontier's position."""
        _, snapshot_id, start, end, ways = position
        return LetterGroup(
            table=name.removeprefix(REPLAYED),
            snapshot_id=snapshot_id,
            start=start,
            end=end,
            as_is=bool(ways & _AS_IS),
            by_offset=bool(ways & _BY_OFFSET),
        )

    def spans(self, known: pa.Table) -> dead_letters.Spans:
        """The spans of its letters among all that are known, which come in the order of texts."""
        mine = _with_places(known)
        if self.by_offset:
            mine = mine.take(_order(mine))
        mine = mine.slice(self.start, self.end - self.start)
        lengths = pc.utf8_length(mine.column(dead_letters.POSITION))
        ends = (
            mine.append_column("length", lengths)
            .group_by(["topic", "partition", "length"], use_threads=False)
            .aggregate([(dead_letters.POSITION, "min"), (dead_letters.POSITION, "max")])
        )
        names = [f"{dead_letters.POSITION}_{end}" for end in ("min", "max")]
        least, greatest = (ends.column(name).to_pylist() for name in names)
        return list(zip(least, greatest, strict=True))


def groups(sizes: Sequence[int], rows_max: int, bytes_max: int) -> list[tuple[int, int]]:
    """Spans of letters of these sizes, each with at most so many rows and bytes."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    spans, start = [], 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + bytes_max, side="right"))
        end = min(max(start + 1, fitting), start + rows_max, len(ends))
        spans.append((start, end))
        start = end
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLetter:
    """The least offset of letters of a partition, and their least time in ms, -1 if unknown."""

    topic: str
    partition: int
    offset: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLetters:
    """Letters of one partition: the records that they are, in order, and the table's rows."""

    topic: str
    partition: int
    records: Records
    rows: pa.Table

    @property
    def place(self) -> Partition:
        """The partition."""
        return self.topic, self.partition

    def first(self) -> FirstLetter:
        """Where they begin; there must be one."""
        return FirstLetter(
            topic=self.topic,
            partition=self.partition,
            offset=int(self.records.offsets[0]),
            at=int(self.records.timestamps.min()),
        )

    def before(self, offset: int) -> "PartitionLetters":
        """Those that lie before an offset."""
        count = int(np.searchsorted(self.records.offsets, offset))
        if count == len(self.records):
            return self
        records = Records(
            keys=self.records.keys.slice(0, count),
            values=self.records.values.slice(0, count),
            offsets=self.records.offsets[:count],
            timestamps=self.records.timestamps[:count],
        )
        return replace(self, records=records, rows=self.rows.slice(0, count))


def places(positions: pa.Array) -> pa.Table:
    """Topic, partition and offset of each position; null where it is none of ours."""
    parts = pc.extract_regex(positions.cast(pa.string()), _POSITION)
    topic, partition, offset = (pc.struct_field(parts, [n]) for n in range(3))
    return pa.table(
        {
            "topic": topic,
            "partition": partition.cast(pa.int64()),
            "offset": offset.cast(pa.int64()),
        }
    )


def order(known: pa.Table) -> pa.Array:
    """The numbers of letters, those of a partition in the order of their offsets."""
    return _order(_with_places(known))


def _order(placed: pa.Table) -> pa.Array:
    return pc.sort_indices(placed, [(name, "ascending") for name in placed.column_names])


def _with_places(known: pa.Table) -> pa.Table:
    """The positions of letters: topic, partition, offset, and the text itself."""
    positions = known.column(dead_letters.POSITION).combine_chunks()
    return places(positions).append_column(dead_letters.POSITION, positions)


def first_letters(known: pa.Table) -> list[FirstLetter]:
    """The first letters of each partition by positions and times, topic by topic."""
    where = places(known.column(dead_letters.POSITION).combine_chunks())
    at = pa.array(_milliseconds(known.column("at")))
    firsts = (
        where.append_column("at", at)
        .filter(pc.is_valid(where.column("topic")))
        .group_by(["topic", "partition"], use_threads=False)
        .aggregate([("offset", "min"), ("at", "min")])
        .sort_by([("topic", "ascending"), ("partition", "ascending")])
    )
    return [
        FirstLetter(
            topic=each["topic"],
            partition=each["partition"],
            offset=each["offset_min"],
            at=each["at_min"],
        )
        for each in firsts.to_pylist()
    ]


def _milliseconds(at: pa.ChunkedArray) -> Indices:
    """Times of letters, -1 where they are not known."""
    micros = at.combine_chunks().cast(pa.int64())
    return np.asarray(pc.fill_null(micros, -_MICROSECONDS)) // _MICROSECONDS


def by_partition(rows: pa.Table) -> list[PartitionLetters]:
    """Rows of a table of letters, partition by partition, each in the order of its offsets."""
    where = places(rows.column(dead_letters.POSITION).combine_chunks())
    numbered = where.append_column("row", pa.array(np.arange(rows.num_rows, dtype=np.int64)))
    known = numbered.filter(pc.is_valid(numbered.column("topic"))).sort_by(
        [("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
    )
    found = known.group_by(["topic", "partition"], use_threads=False).aggregate(
        [("row", "list"), ("offset", "list")]
    )
    return [
        PartitionLetters(
            topic=each["topic"],
            partition=each["partition"],
            records=_records(rows.take(each["row_list"]), each["offset_list"]),
            rows=rows.take(each["row_list"]),
        )
        for each in found.to_pylist()
    ]


def _records(rows: pa.Table, offsets: Sequence[int]) -> Records:
    return Records(
        keys=rows.column("key").combine_chunks().cast(pa.binary()),
        values=rows.column("payload").combine_chunks().cast(pa.binary()),
        offsets=np.asarray(offsets, dtype=np.int64),
        timestamps=_milliseconds(rows.column("at")),
    )


@dataclass(slots=True, kw_only=True)
class LetterSplit:
    """Letters of some partitions, and the parts of the log that they have to be held against.

    There is one partition, or with `by_time` all those of a topic whose keys may have moved.
    Without `logs` (None) the letters are applied as they are. `owner` is the one table that they
    are for; None when they may be for any. `problem` is raised when the split is read: what cannot
    be tried again concerns its tables, and no others.
    """

    letters_table: str
    owner: str | None
    letters: Sequence[PartitionLetters]
    logs: Sequence[Range] | None
    reading: Reading
    tables: Collection[str]
    by_time: bool = False
    problem: IcestreamError | None = None
    each_key_once: bool = False
    tried: LettersTried | None = None
    stored: Mapping[str, pa.Table | None] = field(default_factory=dict, repr=False)

    @property
    def size_bytes(self) -> int:
        """What the letters hold."""
        return sum(each.rows.nbytes for each in self.letters)

    def with_stored(self, table: str, values: pa.Table | None) -> "LetterSplit":
        """The same split with rows of a table that it asked for.

        They are as new as the log's end. What was sent since the letter is found in the log, and
        what was not has not changed since.
        """
        return replace(self, stored={**self.stored, table: values})

    def learned(self) -> LettersTried | None:
        """What became of the letters."""
        return self.tried

    def changes(self, targets: Targets) -> Iterator[tuple[str, pa.Table]]:
        """The changes of the letters that are taken, and how the letters change by that."""
        if self.problem:
            raise self.problem
        verdicts = self._verdicts(targets)
        yield from self._effects(verdicts, targets)
        for each in verdicts:
            yield from self._letters(each)
        self.tried = replace(
            together(each.counted() for each in verdicts)[0], part=verdicts[0].part()
        )

    def _verdicts(self, targets: Targets) -> list["_Verdicts"]:
        """What tables say of the letters, for each partition; raises what is lacking for any."""
        verdicts: list[_Verdicts] = []
        needed: list[ValuesNeeded] = []
        lacking = self._tables(targets)
        for letters in self.letters:
            tables = self._tables(targets)
            tables.letters_of = partial(self._letters_of, letters.topic)
            whole = tables.by_table(_span(letters), letters.records, _times(letters))
            try:
                verdicts.append(_Verdicts(self, letters, chain(whole, tables.completed())))
            except ValuesNeeded as need:
                needed.append(need)
            lacking.lack(tables.missing, tables.gaps)
        lacking.refuse_unready()
        if needed:
            raise joined_needs(needed)
        return verdicts

    def _tables(self, targets: Targets) -> RecordRouter:
        tables = RecordRouter(self.reading, targets, self.stored)
        tables.by_time |= self.by_time
        tables.tries_letters = True
        return tables

    def _letters_of(self, topic: str, table: str) -> str:
        """Where a letter belongs that a table refuses, or nobody understands (its topic)."""
        # Where a record has one table it has one place for its letter too.
        own = not self.reading.route.tables or table in (self.owner, topic)
        return self.letters_table if own else dead_letters.table_of(table)

    def _effects(
        self, verdicts: Sequence["_Verdicts"], targets: Targets
    ) -> Iterator[tuple[str, pa.Table]]:
        """What the letters do to their tables, held against the log where there is one.

        Compaction may have taken a letter's record out of the log. That happens only when a later
        record of the same key came. If the log has no later record either, the later one was a
        delete. If the later record is itself one that no table takes, the letter is the newest
        change that can be taken.
        """
        taken = _all_taken(each.taken() for each in verdicts)
        if self.logs is None:
            for table, batch in taken.items():
                yield table, replacing(batch) if targets.key(table) else batch
            return
        for table, batch in taken.items():
            # Compaction takes deletes out of the log too, although nothing may have followed them.
            yield table, batch.filter(pc.equal(batch.column(OP), int(Op.DELETE)))
        if not taken:
            return
        tables = self._tables(targets)
        tables.only = {
            table: _Keys(batch, targets.key(table)).among for table, batch in taken.items()
        }
        logged = chain.from_iterable(self._logged(log, tables) for log in self.logs)
        for table, batch in chain(logged, tables.completed()):
            yield table, replacing(batch)
        tables.refuse_unready()
        keys = pa.chunked_array(tables.passed_over, pa.binary()).unique()
        for table, batch in _all_taken(each.of_records(keys) for each in verdicts).items():
            yield table, replacing(batch)

    def _logged(self, log: Range, tables: RecordRouter) -> Iterator[tuple[str, pa.Table]]:
        newest = -1
        for records in read_range(
            self.reading.settings,
            log,
            read_timeout=self.reading.read_timeout,
            batch_bytes=BATCH_BYTES,
        ):
            at, newest = running_maximum(records.timestamps, newest)
            yield from tables.by_table(log, records, at)

    def _letters(self, verdicts: "_Verdicts") -> Iterator[tuple[str, pa.Table]]:
        rows = verdicts.letters.rows
        yield (
            self.letters_table,
            dead_letters.removed(
                rows.column(dead_letters.POSITION).filter(pa.array(verdicts.leaving()))
            ),
        )
        for home, reasons in verdicts.rejected.items():
            numbers = np.array(sorted(reasons), dtype=np.int64)
            texts = [reasons[number] for number in numbers.tolist()]
            stayed = rows.take(pa.array(numbers))
            renewed = pa.array(texts, stayed.column("error").type)
            place = stayed.column_names.index("error")
            with_reasons = stayed.set_column(place, "error", renewed)
            if home != self.letters_table:
                yield home, dead_letters.added(with_reasons)
                continue
            differ = pc.fill_null(pc.not_equal(stayed.column("error"), renewed), True)
            yield home, dead_letters.replaced(with_reasons.filter(differ))


class _Verdicts:
    """What tables said of letters of one partition; letters are known by their numbers."""

    def __init__(
        self, split: LetterSplit, letters: PartitionLetters, found: Iterator[tuple[str, pa.Table]]
    ):
        self._split = split
        self.letters = letters
        self._offsets = letters.records.offsets
        self._batches: dict[str, list[pa.Table]] = {}
        # Letters that rows were found in, for any table, whether it took them or not.
        self._routed = np.zeros(len(self._offsets), dtype=np.bool_)
        self._owned = np.zeros(len(self._offsets), dtype=np.bool_)
        self.rejected: dict[str, dict[int, str]] = {}
        for table, batch in found:
            if table.endswith(dead_letters.SUFFIX):
                self._reject(table, batch)
            else:
                self._take(table, batch)
        if split.owner is not None:
            self._keep_strangers(split.owner)

    def _reject(self, home: str, letters: pa.Table) -> None:
        numbers = self._numbers(_offsets(letters))
        if self._split.owner is not None and home != self._split.letters_table:
            # Another table's rejection: that one has a letter of its own.
            self._routed[numbers] = True
            return
        errors = letters.column("error").to_pylist()
        self.rejected.setdefault(home, {}).update(zip(numbers.tolist(), errors, strict=True))

    def _take(self, table: str, batch: pa.Table) -> None:
        numbers = self._numbers(batch.column(SEQ).combine_chunks().to_numpy())
        self._routed[numbers] = True
        if self._split.owner in (None, table):
            self._owned[numbers] = True
            self._batches.setdefault(table, []).append(batch)

    def _keep_strangers(self, owner: str) -> None:
        """Letters whose records belong to other tables now stay where they are."""
        rejected = self.rejected.setdefault(self._split.letters_table, {})
        for number in np.flatnonzero(self._routed & ~self._owned).tolist():
            rejected.setdefault(number, f"the record no longer belongs to table {owner}")

    def _numbers(self, offsets: Indices) -> Indices:
        return np.searchsorted(self._offsets, offsets)

    def taken(self) -> Mapping[str, Sequence[pa.Table]]:
        """The changes of each table that takes any, in batches."""
        return self._batches

    def of_records(self, keys: pa.Array) -> Mapping[str, Sequence[pa.Table]]:
        """As `taken`, of records that have one of the keys."""
        known = pc.and_(
            pc.is_in(self.letters.records.keys, keys), self.letters.records.keys.is_valid()
        )

        def chosen(batch: pa.Table) -> pa.Table:
            numbers = self._numbers(batch.column(SEQ).combine_chunks().to_numpy())
            return batch.filter(known.take(pa.array(numbers)))

        return {table: [chosen(b) for b in batches] for table, batches in self._batches.items()}

    def leaving(self) -> Mask:
        """The letters that do not stay in their table."""
        gone = np.ones(len(self._offsets), dtype=np.bool_)
        gone[list(self.rejected.get(self._split.letters_table, {}))] = False
        return gone

    def part(self) -> str:
        """The place of the first letter."""
        return f"{self.letters.topic}/{self.letters.partition}/{self._offsets[0]}"

    def counted(self) -> LettersTried:
        """How many were taken, and why others were not."""
        reasons = Counter(text for each in self.rejected.values() for text in each.values())
        refused = {number for each in self.rejected.values() for number in each}
        return LettersTried(
            table=self._split.letters_table,
            part=self.part(),
            read=len(self._offsets),
            taken=len(self._offsets) - len(refused),
            rejected=reasons,
        )


def _all_taken(taken: Iterable[Mapping[str, Sequence[pa.Table]]]) -> dict[str, pa.Table]:
    """The changes of each table that takes any of the letters, of all partitions."""
    batches: dict[str, list[pa.Table]] = {}
    for each in taken:
        for table, found in each.items():
            batches.setdefault(table, []).extend(found)
    return {
        table: pa.concat_tables(found, promote_options="permissive")
        for table, found in batches.items()
    }


def together(tried: Iterable[LettersTried]) -> list[LettersTried]:
    """What became of the letters of each table."""
    tables: dict[str, LettersTried] = {}
    for one in tried:
        other = tables.get(one.table)
        if other is not None:
            rejected = Counter(one.rejected) + Counter(other.rejected)
            read, taken = one.read + other.read, one.taken + other.taken
            one = replace(one, part="", read=read, taken=taken, rejected=rejected)
        tables[one.table] = one
    return [tables[name] for name in sorted(tables)]


class _Keys:
    """The keys of some changes, to find others of the same keys."""

    def __init__(self, changes: pa.Table, key: Sequence[str]):
        self._key = list(key)
        self._values = [_plain(changes.column(name)).unique() for name in self._key]
        self._pairs: list[Any] = []
        codes = self._codes(changes, 0)
        for number in range(1, len(self._key)):
            pairs = _paired(codes, self._codes(changes, number))
            self._pairs.append(np.unique(pairs))
            codes = np.searchsorted(self._pairs[-1], pairs)
        self._whole = np.unique(codes)

    def among(self, changes: pa.Table) -> Mask:
        """Which of the changes have one of the keys."""
        codes = self._codes(changes, 0)
        known = codes >= 0
        for number, pairs_known in enumerate(self._pairs, start=1):
            other = self._codes(changes, number)
            pairs = _paired(codes, other)
            places = np.minimum(np.searchsorted(pairs_known, pairs), len(pairs_known) - 1)
            known &= (other >= 0) & (pairs_known[places] == pairs)
            codes = places
        return known & np.isin(codes, self._whole)

    def _codes(self, changes: pa.Table, number: int) -> Indices:
        """The place of each value of a part of the key among the known ones, -1 for none."""
        column = _plain(changes.column(self._key[number]))
        found = pc.fill_null(pc.index_in(column, value_set=self._values[number]), -1)
        return np.asarray(found.combine_chunks().to_numpy(), dtype=np.int64)


def _paired(codes: Indices, others: Indices) -> Indices:
    """One number for each pair; there are less than 2**31 of either."""
    return (codes << 32) | (others + 1)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if isinstance(column.type, pa.BaseExtensionType):
        return column.cast(column.type.storage_type)
    return column


def _offsets(letters: pa.Table) -> Indices:
    where = places(letters.column(dead_letters.POSITION).combine_chunks())
    return np.asarray(where.column("offset").combine_chunks().to_numpy())


def _span(letters: PartitionLetters) -> Range:
    offsets = letters.records.offsets
    return Range(
        topic=letters.topic,
        partition=letters.partition,
        start=int(offsets[0]),
        end=int(offsets[-1]) + 1,
    )


def _times(letters: PartitionLetters) -> Indices:
    return np.asarray(np.maximum.accumulate(letters.records.timestamps))
