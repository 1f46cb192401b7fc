"""A toy source that counts: every number is a change, and a run goes on at the next number.

A table has a change at each number that its own one divides, so some epochs leave a table out. The
changes of a table come in threes: a row is inserted, a row is updated, a row is deleted. An update
of a row that was deleted brings it back, and a delete of a row that is gone does nothing.

    number (table `twos`, every 2)   0       2       4       6       8       10      12
    its changes                      +row 0  ~row 0  -row 0  +row 1  ~row 0  -row 0  +row 2

Nothing is stored anywhere: the same numbers give the same changes, on every worker, at any time.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyiceberg.types import LongType, StringType

from icestream.change import AT, OP, SEQ, Op
from icestream.destination import Destination
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, HistoryLost
from icestream.frontier import START, Frontier
from icestream.schema import (
    Column,
    Reads,
    SchemaGap,
    TableShape,
    arrow_schema,
    gaps,
    schema_from_json,
)
from icestream.sources import (
    Budget,
    EpochPlan,
    Purpose,
    Remembered,
    Source,
    Standing,
    StartPlan,
    TableSplit,
    without_history,
)
from icestream.sources.named_columns import gone
from icestream.sources.options import Opening, SourceOptions

# The one partition of the frontier: the first number that is not included.
PARTITION = "count"
CHANGES_OF_A_GROUP = 3
CHANGE_BYTES = 8

ID, COUNT, NOTE = "id", "count", "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterOptions(SourceOptions):
    """Options of the counter."""

    tables: Mapping[str, int] = field(
        default_factory=dict,
        metadata={"doc": "The tables; each changes at the numbers that its own one divides."},
    )
    upto: int = field(
        default=0, metadata={"doc": "How far the counter has come: this number is not there yet."}
    )
    splits: int = field(
        default=1, metadata={"doc": "Parts that each table's numbers of an epoch are cut into."}
    )
    notes: bool = field(default=False, metadata={"doc": "Rows have a column `note` as well."})

    def __post_init__(self) -> None:
        if not self.tables or min(self.tables.values()) < 1 or self.splits < 1 or self.upto < 0:
            raise ConfigInvalid(
                "the counter has no table, or counts in steps that lead nowhere",
                hint="Write `tables: {ones: 1}`; `splits` is at least 1 and `upto` at least 0.",
            )

    def open(self, opening: Opening) -> Source:
        """The source; see `SourceOptions.open`."""
        return Counter(self, opening.budget)

    def named(self) -> Sequence[str]:
        """The tables; see `SourceOptions.named`."""
        return list(self.tables)

    def possible(self, destination: Destination) -> Sequence[str]:
        """There are no others; see `SourceOptions.possible`."""
        return list(self.tables)


class Counter(Source):
    """See the module and `icestream.sources.Source`."""

    # A table's numbers may be cut into several splits, and an update comes long after its insert.
    key_in_one_split = False

    def __init__(self, options: CounterOptions, budget: Budget):
        self._options = options
        self._budget = budget

    def known_tables(self) -> Sequence[str]:
        """For `icestream status`; see `icestream.sources.abilities.KnowsTables`."""
        return list(self._options.tables)

    def tables(self) -> Sequence[str]:
        """The tables of the options."""
        return list(self._options.tables)

    def shape(self, table: str) -> TableShape:
        """The same columns for all."""
        return TableShape(columns=_columns(self._options.notes), key=[ID])

    def resume(self, remembered: Remembered) -> StartPlan:
        """A table that was added later lacks all numbers up to what is durable in the others.

        A table that the options no longer name gets no changes.
        """

        def has_history(table: str, durable: Frontier) -> bool:
            return durable != START

        return StartPlan(
            behind=without_history(self.tables(), remembered, has_history),
            unfed=frozenset(remembered.progress.keys() - {*self.tables()}),
        )

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """All that is there, in epochs of as many numbers as one may hold."""
        at, upto, step = number_at(lower), self._options.upto, self._budget.rows
        if at > upto:
            raise HistoryLost(
                f"the counter is at {upto} and was at {at} before",
                hint="Let it count on to where it was.",
            )
        ends = [*range(at + step, upto, step), upto] if at < upto else []
        return [Frontier({PARTITION: (end,)}) for end in ends]

    def plan(self, epoch: Epoch) -> EpochPlan:
        """The splits of each table that has a change among the numbers."""
        first, end = number_at(epoch.lower), number_at(epoch.upper)
        parts = [
            CounterSplit(table=table, every=every, first=one, end=other, notes=self._options.notes)
            for table, every in self._options.tables.items()
            for one, other in _cut(-(-first // every), -(-end // every), self._options.splits)
        ]
        return EpochPlan(parts=parts)

    def standing(self, frontier: Frontier) -> Standing:
        """A number says it all."""
        at = number_at(frontier)
        return Standing(position=str(at), caught_up=at >= self._options.upto)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSplit(TableSplit):
    """Changes of one table, counted from its own first one: `[first, end)`."""

    table: str
    every: int
    first: int
    end: int
    notes: bool
    each_key_once: bool = False

    @property
    def size_bytes(self) -> int:
        """As if a number were read for each change."""
        return CHANGE_BYTES * (self.end - self.first)

    def read(
        self, schema_json: str, key: Sequence[str], reads: Reads | None = None
    ) -> Iterator[pa.Table]:
        """All changes in one batch; see `TableSplit.read`."""
        schema, columns = schema_from_json(schema_json), _columns(self.notes)
        _refuse_other_key(self.table, key)
        _refuse_gone(self.table, columns, reads)
        # Columns that the table lacks, and columns whose type is too narrow.
        if lacking := gaps(schema, columns, key):
            raise SchemaGap(self.table, lacking)
        fields = arrow_schema(schema)
        steps = np.arange(self.first, self.end, dtype=np.int64)
        numbers = pa.array(steps * self.every)
        groups, kinds = np.divmod(steps, CHANGES_OF_A_GROUP)
        inserted, updated = kinds == 0, kinds == 1
        ops = np.select([inserted, updated], [int(Op.INSERT), int(Op.UPSERT)], int(Op.DELETE))
        ids = np.select([inserted, updated], [groups, groups // 2], groups // 3)
        rows = {ID: pa.array(ids), COUNT: numbers}
        if self.notes:
            rows[NOTE] = numbers.cast(pa.string())
        yield pa.table(
            {
                OP: pa.array(ops, pa.int8()),
                AT: numbers,
                SEQ: pa.array(np.zeros(len(steps), np.int64)),
                **{name: column.cast(fields.field(name).type) for name, column in rows.items()},
            }
        )

    def with_stored(self, table: str, values: pa.Table | None) -> "CounterSplit":
        """Itself: no change leaves a value out."""
        return self

    def learned(self) -> None:
        """Reading teaches nothing."""
        return None


def _columns(notes: bool) -> list[Column]:
    """The columns of every table."""
    columns = [Column(name=ID, type=LongType()), Column(name=COUNT, type=LongType())]
    return [*columns, Column(name=NOTE, type=StringType())] if notes else columns


def _refuse_other_key(table: str, key: Sequence[str]) -> None:
    """A sink may delete by other columns than the key; a delete of the counter has only the key."""
    if list(key) != [ID]:
        raise ConfigInvalid(
            f"rows of table {table} cannot be deleted by {', '.join(key) or 'no column'}",
            detail=f"A delete of the counter names its row by {ID}.",
            hint="Leave `equality_delete_by` out.",
        )


def _refuse_gone(table: str, columns: Sequence[Column], reads: Reads | None) -> None:
    """A column that the table's select names must be there: a null would be a wrong value."""
    lacking = sorted(reads.named - {column.name for column in columns}) if reads else []
    if lacking:
        raise gone(table, lacking[0], "Set `notes`, or leave the column out of the select.")


def number_at(frontier: Frontier) -> int:
    """The first number that a frontier does not include."""
    return frontier[PARTITION][0] if frontier[PARTITION] else 0


def _cut(first: int, end: int, parts: int) -> Iterator[tuple[int, int]]:
    """A span in so many parts, without those that are empty."""
    cuts = [first + (end - first) * number // parts for number in range(parts + 1)]
    return ((one, other) for one, other in itertools.pairwise(cuts) if one < other)
