"""What a worker reads of an epoch: ranges of offsets, decoded, routed to tables, cast.

    range ──client──► records ──decode──► rows ──route──► rows of a table ──cast──► changes
                                    └─► rejected ──► an error, or the table's dead letters

Changes whose values were not sent come last, with the values (`held_back`).

Read twice, anywhere, a range gives the same changes: offsets never change what they stand for.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.types import IcebergType

from icestream import dead_letters
from icestream.change import Op
from icestream.errors import DataRejected
from icestream.formats.decoding import decoded
from icestream.formats.envelope import SEND_WHOLE_ROWS
from icestream.formats.options import RegistryOptions, ValueOptions
from icestream.formats.rows import Decoded, Indices, Mask, Records, Rows
from icestream.schema import Column, SchemaGap, TableShape, joined_columns, joined_shapes
from icestream.sources import Need, SplitsLost, TablesUnready, Targets, ValuesNeeded
from icestream.sources.kafka.changes import TableFit, not_stored, ordered, replacing, shape_of
from icestream.sources.kafka.consumer import Range, read_range
from icestream.sources.kafka.held_back import Held, HeldBack, Opened
from icestream.sources.kafka.partitions import Partition
from icestream.sources.kafka.route import Route
from icestream.sources.named_columns import ColumnsSeen, NamedColumns

BATCH_BYTES = 16 * 1024**2
# Missing tables and columns are looked for in at least this much of a split before it is read anew.
SAMPLE_BYTES = 24 * 1024**2


class RangesTooLarge(SplitsLost):
    """Ranges hold more bytes than an epoch may; `reached` says how far each was read."""

    def __init__(self, reached: Mapping[Partition, int]):
        super().__init__(
            "an epoch holds more bytes than it may", hint="Raise `epoch_bytes_max` if it stays so."
        )
        self.reached = reached

    def __reduce__(self) -> tuple[Any, ...]:
        return RangesTooLarge, (self.reached,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """What reading a range has taught: its size, and the times of its newest and oldest record.

    -1 for both where there is none.
    """

    range: Range
    rows: int
    bytes: int
    newest: int
    oldest: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The columns that identify rows, as far as the configuration names them."""

    by_table: Mapping[str, Sequence[str]]
    otherwise: Sequence[str]

    def of(self, table: str) -> Sequence[str]:
        """The columns for a table; empty when its records have to tell."""
        return self.by_table.get(table) or self.otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How records are read and what becomes of them; the same for all splits of a pipeline.

    `declared` are types that the configuration gives, by table and column.
    """

    settings: Mapping[str, str] = field(repr=False)
    value: ValueOptions
    registry: RegistryOptions | None
    route: Route
    keys: Keys
    declared: Mapping[str, Mapping[str, IcebergType]]
    read_timeout: float
    dead_letters: bool
    keyed: bool

    @property
    def only_added(self) -> bool:
        """Whether every record is a new row, whatever was there."""
        return self.value.envelope == "none"

    def promises_new_rows(self, topic: str) -> bool:
        """Whether the row of an insert is a new one.

        Snapshots and retries repeat inserts: only who names them in `operations` promises that they
        do not. Where records may be rejected, the delete before an insert may have been.
        """
        return bool(self.value_of(topic).operations) and not self.dead_letters

    @property
    def whole_rows(self) -> bool:
        """Whether a column that a record lacks is none of its table's; in plain JSON it is null."""
        return self.value.envelope == "debezium" or self.value.format in ("avro", "protobuf")

    @property
    def may_withhold(self) -> bool:
        """Whether records may leave out values that other changes of their split have."""
        return self.value.envelope == "debezium" and self.keyed

    def value_of(self, topic: str) -> ValueOptions:
        """What records of a topic are, with the key that its table is given."""
        tables = [topic] if self.route.by_topic() else list(self.route.tables)
        keys = {tuple(self.keys.of(table)) for table in tables} or {tuple(self.keys.otherwise)}
        given = keys.pop() if len(keys) == 1 else ()
        return self.value if self.value.key else replace(self.value, key=given)


@dataclass(slots=True, kw_only=True)
class KafkaSplit:
    """Some ranges, each of another partition; records at offsets in `skipped` are left out.

    With `by_time` a key may be in several of them: its changes are in the order of time.
    """

    ranges: Sequence[Range]
    reading: Reading
    tables: Collection[str]
    bytes_max: int
    skipped: Mapping[Partition, Indices] = field(default_factory=dict)
    by_time: bool = False
    each_key_once: bool = False
    reads: list[RangeRead] = field(default_factory=list)
    stored: Mapping[str, pa.Table | None] = field(default_factory=dict, repr=False)
    seen: ColumnsSeen = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What was read, once it was."""
        return sum(read.bytes for read in self.reads)

    def changes(self, targets: Targets) -> Iterator[tuple[str, pa.Table]]:
        """The changes of every table, batch by batch; see `Split.changes`."""
        self.reads = []
        tables = RecordRouter(self.reading, targets, self.stored)
        tables.by_time |= self.by_time
        for each in self.ranges:
            rows = size = 0
            newest = oldest = -1
            for records in self._records(each):
                if oldest < 0 and len(records):
                    oldest = int(records.timestamps[0])
                rows, size = rows + len(records), size + records.keys.nbytes + records.values.nbytes
                if self.size_bytes + size > self.bytes_max and len(records) < rows:
                    raise RangesTooLarge(self._reached(each, int(records.offsets[0])))
                at, newest = running_maximum(records.timestamps, newest)
                yield from tables.by_table(each, *self._left(each, records, at))
                if tables.has_seen_enough(self.size_bytes + size):
                    tables.refuse_unready()
            self.reads.append(
                RangeRead(range=each, rows=rows, bytes=size, newest=newest, oldest=oldest)
            )
        tables.refuse_unready()
        yield from tables.completed()
        tables.refuse_unready()
        self.seen = tables.columns_seen()

    def with_stored(self, table: str, values: pa.Table | None) -> "KafkaSplit":
        """The same split with rows of a table that it asked for."""
        return replace(self, stored={**self.stored, table: values})

    def learned(self) -> Sequence[RangeRead]:
        """What each range held."""
        return self.reads

    def columns_seen(self) -> ColumnsSeen:
        """What its records tell of columns; see `ComparedSplit`."""
        return self.seen

    def _records(self, each: Range) -> Iterator[Records]:
        return read_range(
            self.reading.settings,
            each,
            read_timeout=self.reading.read_timeout,
            batch_bytes=min(BATCH_BYTES, self.bytes_max),
        )

    def _left(self, each: Range, records: Records, at: Indices) -> tuple[Records, Indices]:
        """The records that are not left out, and their times."""
        skipped = self.skipped.get((each.topic, each.partition))
        if skipped is None:
            return records, at
        places = np.flatnonzero(~np.isin(records.offsets, skipped))
        taken = pa.array(places)
        left = Records(
            keys=records.keys.take(taken),
            values=records.values.take(taken),
            offsets=records.offsets[places],
            timestamps=records.timestamps[places],
        )
        return left, at[places]

    def _reached(self, current: Range, offset: int) -> dict[Partition, int]:
        """How far all ranges may go; those that were not begun wait for a later epoch."""
        done = [read.range for read in self.reads]
        ends = {(r.topic, r.partition): r.end if r in done else r.start for r in self.ranges}
        return {**ends, (current.topic, current.partition): offset}


class RecordRouter:
    """The tables that records are for, and what is not there yet.

    With `only` no other tables are looked at, and in them only changes that it chooses. Records
    that cannot be taken are passed over then: they are dead letters already, and `passed_over` has
    their keys. `letters_of` names the table of a table's letters. With `by_time` times order the
    changes of a key, else offsets. With `tries_letters` a record without a column that a select
    names is one that cannot be taken, and else a reason to stop.
    """

    def __init__(
        self, reading: Reading, targets: Targets, stored: Mapping[str, pa.Table | None] = {}
    ):
        self._reading = reading
        self._targets = targets
        self._stored = stored
        self._rows: dict[str, TableFit] = {}
        self._held: dict[str, HeldBack] = {}
        self.only: Mapping[str, Callable[[pa.Table], Mask]] | None = None
        self.passed_over: list[pa.Array] = []
        self.letters_of = dead_letters.table_of
        self.by_time = not reading.keyed
        self.tries_letters = False
        self._named: dict[str, NamedColumns] = {}
        self.missing: dict[str, TableShape] = {}
        self.gaps: dict[str, Sequence[Column]] = {}
        self._news: frozenset[tuple[str, str, str]] = frozenset()
        self._news_at = 0

    def has_seen_enough(self, read_bytes: int) -> bool:
        """Whether tables or columns are missing, and the bytes read doubled without a new one.

        Example: the last new column came after 30 MB, and 60 MB are read now. The rest is better
        read once the tables are made: all of it is read again then.
        """
        shapes = {table: shape.columns for table, shape in self.missing.items()}
        news = frozenset(
            (table, column.name, str(column.type))
            for lacking in (shapes, self.gaps)
            for table, columns in lacking.items()
            for column in columns
        )
        if news != self._news:
            self._news, self._news_at = news, read_bytes
        return bool(news) and read_bytes >= max(SAMPLE_BYTES, 2 * self._news_at)

    def by_table(
        self, where: Range, records: Records, at: Indices
    ) -> Iterator[tuple[str, pa.Table]]:
        """The changes in some records; `at` is a time for each that never goes back."""
        route = self._reading.route
        for part in decoded(records, self._reading.value_of(where.topic), self._reading.registry):
            rows, rejected = self._decided(part)
            strays = rows.records[route.strays(rows)].tolist()
            rejected = {**rejected, **dict.fromkeys(strays, "the record belongs to no table")}
            yield from self._letters(where.topic, where, records, rejected)
            for table, own in route.cut(where.topic, rows):
                reason = self._refused(table)
                if reason is None:
                    yield from self._changes_of(table, where, records, own, at)
                else:
                    nowhere = dict.fromkeys(own.records.tolist(), reason)
                    yield from self._letters(where.topic, where, records, nowhere)

    def _refused(self, table: str) -> str | None:
        """Why records that name a table cannot have it; None when they can."""
        if not self._reading.route.by_records():
            return None
        # Tables of dead letters are there as well, and no record's.
        known = table in self._targets.tables() and not table.endswith(dead_letters.SUFFIX)
        return None if known else self._targets.refused(table)

    def _decided(self, part: Decoded) -> tuple[Rows, Mapping[int, str]]:
        """The rows whose table is known, and why others cannot be handled."""
        rows = part.rows
        if not rows.withheld and not rows.lost:
            return rows, part.rejected
        unknown = np.zeros(len(rows), dtype=np.bool_)
        unknown[self._reading.route.undecided(rows)] = True
        if not unknown.any():
            return rows, part.rejected
        reason = f"the value that tells the table was not sent; {SEND_WHOLE_ROWS}"
        rejected = dict.fromkeys(rows.records[unknown].tolist(), reason)
        return rows.take(np.flatnonzero(~unknown)), {**part.rejected, **rejected}

    def _changes_of(
        self, table: str, where: Range, records: Records, rows: Rows, at: Indices
    ) -> Iterator[tuple[str, pa.Table]]:
        if not len(rows) or (self.only is not None and table not in self.only):
            return
        if table not in self._targets.tables():
            reasons = self._miss(table, rows)
            yield from self._letters(
                table, where, records, {int(rows.records[n]): why for n, why in reasons.items()}
            )
            return
        refused = self._unknowable(table, rows)
        if self.tries_letters:
            refused |= self._incomplete(table, rows)
        if refused:
            yield from self._letters(table, where, records, refused)
            rows = rows.take(np.flatnonzero(~np.isin(rows.records, list(refused))))
        if not len(rows):
            return
        try:
            found = self._table(table).fitted(rows)
        except SchemaGap as gap:
            # Later records may tell more of the same columns.
            self.gaps[table] = joined_columns(self.gaps.get(table, ()), gap.columns)
            return
        if not self.tries_letters:
            self._refuse_gone(table, where, records, rows.take(found.accepted), at)
        places = rows.records[found.accepted]
        reasons = {int(rows.records[n]): reason for n, reason in found.rejected.items()}
        yield from self._letters(table, where, records, reasons)
        offsets = records.offsets[places]
        order = (at[places], offsets) if self.by_time else (offsets, offsets)
        batch, withheld = ordered(found.batch, *order), self._wanted(table, found.withheld)
        if self._targets.key(table) and not self._reading.promises_new_rows(where.topic):
            batch = replacing(batch)
        if self.only is not None:
            chosen = self.only[table](batch)
            batch, places = batch.filter(pa.array(chosen)), places[chosen]
            withheld = {name: mask[chosen] for name, mask in withheld.items()}
        if self._reading.may_withhold:
            back = self._back(table)
            if withheld:
                lacking = np.logical_or.reduce([*withheld.values()])
                held = Held(
                    changes=batch.filter(pa.array(lacking)),
                    withheld={name: mask[lacking] for name, mask in withheld.items()},
                    where=where,
                    records=records.take(places[lacking]),
                )
                back.hold(held)
                batch = batch.filter(pa.array(~lacking))
            back.see(batch)
        yield table, batch

    def _wanted(self, table: str, withheld: Mapping[str, Mask]) -> Mapping[str, Mask]:
        """Of the values that were not sent those that the table's select reads."""
        reads = self._targets.reads(table)
        return {n: mask for n, mask in withheld.items() if reads is None or n in reads.columns}

    def _unknowable(self, table: str, rows: Rows) -> dict[int, str]:
        """Why rows cannot be taken that lack a value which nobody can look up.

        Where changes of a key come from several partitions, nobody knows before all are brought
        together which of them is the one before.
        """
        found = {
            int(record): f"the row's key has changed, and the value of column {name} was not sent; "
            f"{SEND_WHOLE_ROWS}"
            for name, mask in self._wanted(table, rows.lost).items()
            for record in rows.records[mask]
        }
        wanted = self._wanted(table, rows.withheld)
        if self._reading.keyed or not wanted:
            return found
        lacking = np.logical_or.reduce([*wanted.values()])
        reason = (
            "a value did not change and was not sent, and with `keyed: false` the change "
            f"before it is not known; {SEND_WHOLE_ROWS}"
        )
        return {**dict.fromkeys(rows.records[lacking].tolist(), reason), **found}

    def _incomplete(self, table: str, rows: Rows) -> dict[int, str]:
        """Why letters cannot be taken that lack a column which the table's select names."""
        present = _present(rows)
        named = self._named_columns(table)
        lacking = named.lacking(present, rows.ops != Op.DELETE) if named else {}
        return {
            int(rows.records[place]): f"the record has no column {name}, which the select reads"
            for name, places in lacking.items()
            for place in places.tolist()
        }

    def _refuse_gone(
        self, table: str, where: Range, records: Records, rows: Rows, at: Indices
    ) -> None:
        named = self._named_columns(table)
        if named:
            # Offsets say nothing of other partitions; times do, as far as clocks agree.
            orders = {
                f"{where.topic}/{where.partition}": records.offsets[rows.records],
                where.topic: at[rows.records],
            }
            named.look(_present(rows), rows.ops != Op.DELETE, orders)

    def columns_seen(self) -> ColumnsSeen:
        """What was seen of the columns that selects name; see `named_columns`."""
        return dict(each for named in self._named.values() for each in named.seen.items())

    def _named_columns(self, table: str) -> NamedColumns | None:
        if not self._reading.whole_rows:
            return None
        if table not in self._named:
            declared = self._reading.declared.get(table, ())
            self._named[table] = NamedColumns(table, self._targets.reads(table), declared)
        return self._named[table]

    def _back(self, table: str) -> HeldBack:
        if table not in self._held:
            self._held[table] = HeldBack(self._targets.key(table))
        return self._held[table]

    def completed(self) -> Iterator[tuple[str, pa.Table]]:
        """The changes that were held back, with their values, once everything is read.

        Raises `ValuesNeeded` for what only the destination has. What it has not either is rejected,
        unless the destination could not be asked: then nobody will see what is written here.
        """
        held = {table: back.opened() for table, back in self._held.items() if back}
        needs = [
            Need(table=table, keys=each.completion.keys(), columns=self._stored_as_is(table, each))
            for table, each in held.items()
        ]
        unanswered = [
            need
            for need in needs
            if need.columns and need.keys.num_rows and not self._answers(need)
        ]
        if unanswered:
            raise ValuesNeeded(*unanswered)
        for need in needs:
            # What asks for no row needs none.
            stored = self._stored.get(need.table, need.keys)
            for filled in held[need.table].filled(stored):
                lost = np.logical_or.reduce([*filled.lost.values()])
                if stored is not None:
                    where, records = filled.held.where, filled.held.records
                    yield from self._letters(need.table, where, records, _reasons(filled.lost))
                yield need.table, filled.changes.filter(pa.array(~lost))

    def _stored_as_is(self, table: str, held: Opened) -> list[str]:
        """The columns whose values are wanted and that the destination may have."""
        reads = self._targets.reads(table)
        hidden = reads.hidden if reads else ()
        return [name for name in held.completion.columns() if name not in hidden]

    def _answers(self, need: Need) -> bool:
        """Whether the rows that a need asks for were looked up, as far as they can be."""
        if need.table not in self._stored:
            return False
        stored = self._stored[need.table]
        return stored is None or {*need.columns} <= {*stored.column_names}

    def lack(self, missing: Mapping[str, TableShape], gaps: Mapping[str, Sequence[Column]]) -> None:
        """Note what others have found lacking."""
        self.missing = joined_shapes(self.missing, missing)
        for table, columns in gaps.items():
            self.gaps[table] = joined_columns(self.gaps.get(table, ()), columns)

    def refuse_unready(self) -> None:
        """Raise what tables lack, if they lack anything."""
        if self.missing or self.gaps:
            raise TablesUnready(self.missing, self.gaps)

    def _table(self, table: str) -> TableFit:
        if table not in self._rows:
            schema_json, key = self._targets.schema_json(table), self._targets.key(table)
            declared = self._reading.declared.get(table, {})
            limit = self._reading.value.columns_max
            self._rows[table] = TableFit(table, schema_json, key, declared, limit)
            self._rows[table].refuse_unfit(only_added=self._reading.only_added)
        return self._rows[table]

    def _miss(self, table: str, rows: Rows) -> Mapping[int, str]:
        """Note what a table needs that is not there; returns rows that it could not take.

        Deletes count as well: the rows that they delete may be in an epoch that is on its way.
        """
        key = () if self._reading.only_added else self._reading.keys.of(table) or rows.key
        declared = self._reading.declared.get(table, {})
        shape, rejected = shape_of(rows, key, declared, self._reading.value.columns_max)
        if len(rejected) < len(rows):
            self.missing = joined_shapes(self.missing, {table: shape})
        return rejected

    def _letters(
        self, table: str, where: Range, records: Records, reasons: Mapping[int, str]
    ) -> Iterator[tuple[str, pa.Table]]:
        """Rejected records as dead letters of a table; an error where these are not wanted."""
        if not reasons:
            return
        places = np.array(sorted(reasons), dtype=np.int64)
        if self.only is not None:
            self.passed_over.append(records.keys.take(pa.array(places)))
            return
        offsets = records.offsets[places].tolist()
        texts = [reasons[place] for place in places.tolist()]
        if not self._reading.dead_letters:
            raise DataRejected(
                f"a record of topic {where.topic} cannot be taken",
                detail=f"Partition {where.partition}, offset {offsets[0]}: {texts[0]}.",
                hint="Set `on_error: dead_letter` to keep such records aside and go on.",
            )
        name = self.letters_of(table)
        if name not in self._targets.tables():
            self.missing = {**self.missing, name: dead_letters.SHAPE}
            return
        positions = [f"{where.topic}/{where.partition}/{offset}" for offset in offsets]
        taken = pa.array(places)
        keys, values = records.keys.take(taken), records.values.take(taken)
        times = records.timestamps[places]
        yield name, dead_letters.letters(positions, texts, keys, values, times)


def _present(rows: Rows) -> dict[str, Mask]:
    """Which rows have a column; a value that was not sent is one that the row has."""
    return {name: ~each.missing() | rows.unsent(name) for name, each in rows.columns.items()}


def _reasons(lost: Mapping[str, Mask]) -> dict[int, str]:
    """Why changes are rejected that lack a value, by their places."""
    reasons: dict[int, str] = {}
    for name, mask in lost.items():
        for place in np.flatnonzero(mask).tolist():
            reasons.setdefault(place, not_stored(name))
    return reasons


def running_maximum(timestamps: Indices, newest: int) -> tuple[Indices, int]:
    """Times that never go back within a partition, and the newest so far."""
    if not len(timestamps):
        return timestamps, newest
    running = np.maximum(np.maximum.accumulate(timestamps), newest)
    return running, int(running[-1])
