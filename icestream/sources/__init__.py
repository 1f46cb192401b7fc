"""What a source is: something ordered that can be cut into epochs and read again.

A source names boundaries up to which everything has arrived (`available`), hands out the parts of
an epoch (`plan`), and is told what is durable (`ack`). It never acknowledges by itself.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
from pyspark.sql import DataFrame

from icestream.abilities import members
from icestream.epoch import Epoch, Progress
from icestream.errors import IcestreamError, SourceUnavailable
from icestream.frontier import START, Frontier
from icestream.schema import Column, Reads, TableShape
from icestream.sources.named_columns import ColumnsSeen

# The columns of a frame of changes; see `FramePart.frame`.
FRAME_OP, FRAME_ID, FRAME_ROW = "op", "id", "row"


class SplitsLost(SourceUnavailable):
    """What a split was to read is gone, but the source can serve its changes in another way.

    Everything that is not committed yet is given up, and the source is asked anew.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much an epoch may hold: it ends at the source's first boundary after one of these."""

    rows: int
    bytes: int

    def spent(self, rows: int, size_bytes: int) -> bool:
        """Whether so much fills an epoch."""
        return rows >= self.rows or size_bytes >= self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Rows of a table that are to be looked up by their keys, and the columns that are wanted."""

    table: str
    keys: pa.Table
    columns: Sequence[str]


class ValuesNeeded(Exception):
    """Changes leave out values that did not change, and that only the destination has.

    The coordinator looks up the rows of each need, which is of another table, once all earlier
    epochs are committed, and has the split read again with what it found (`Split.with_stored`).
    """

    def __init__(self, *needs: Need):
        super().__init__(f"changes of {', '.join(need.table for need in needs)} leave out values")
        self.needs = needs

    def __reduce__(self) -> tuple[Any, ...]:
        return ValuesNeeded, self.needs


def joined_needs(needed: Sequence[ValuesNeeded]) -> ValuesNeeded:
    """What all of them ask for, each table once."""
    by_table: dict[str, list[Need]] = {}
    for need in (need for each in needed for need in each.needs):
        by_table.setdefault(need.table, []).append(need)
    together = []
    for table, own in sorted(by_table.items()):
        columns = sorted({column for need in own for column in need.columns})
        keys = pa.concat_tables([need.keys for need in own], promote_options="permissive")
        together.append(Need(table=table, keys=keys, columns=columns))
    return ValuesNeeded(*together)


class TablesUnready(Exception):
    """What tables lack that a split has changes of, found by reading all of it.

    `shapes` are tables that are not there, `gaps` columns that others lack. The coordinator sees to
    it, and everything is read again.
    """

    def __init__(self, shapes: Mapping[str, TableShape], gaps: Mapping[str, Sequence[Column]] = {}):
        super().__init__(f"tables {', '.join([*shapes, *gaps])} do not take all changes yet")
        self.shapes = shapes
        self.gaps = gaps

    def __reduce__(self) -> tuple[Any, ...]:
        return TablesUnready, (self.shapes, self.gaps)


class Targets(Protocol):
    """The tables that changes are read for, as they are now."""

    def tables(self) -> Collection[str]:
        """Their names at the source."""
        ...

    def schema_json(self, table: str) -> str:
        """The schema that changes of the table must be read with."""
        ...

    def key(self, table: str) -> Sequence[str]:
        """The columns that identify a row; empty when rows are only ever added."""
        ...

    def reads(self, table: str) -> Reads | None:
        """What the table's select has use for; None without one: every column counts."""
        ...

    def refused(self, table: str) -> str | None:
        """Why a table of this name, which records give, cannot be; None when it can."""
        ...


class Part(Protocol):
    """A part of an epoch."""

    @property
    def tables(self) -> Collection[str]:
        """The tables, by their names at the source, that it is known to have changes of.

        Empty when only reading tells.
        """
        ...

    @property
    def size_bytes(self) -> int:
        """How much of the source reading it takes, as far as that is known."""
        ...


@runtime_checkable
class Split(Part, Protocol):
    """A part that workers read: twice, on any of them, it gives the same changes."""

    @property
    def each_key_once(self) -> bool:
        """Whether no key has two changes in the epoch; then they need not be brought together."""
        ...

    def changes(self, targets: Targets) -> Iterator[tuple[str, pa.Table]]:
        """Change batches, each with its table's name, in the columns of the table's schema.

        Raises `SchemaGap` for columns that a table lacks, `TablesUnready` for all that is
        lacking, `SchemaRejected` for values that do not fit, `DataRejected` for what
        cannot be read, `SourceUnavailable` when it may work later, `ValuesNeeded` for values that
        only the destination has.
        """
        ...

    def with_stored(self, table: str, values: pa.Table | None) -> "Split":
        """The same split with the rows of a table that it asked for by `ValuesNeeded`.

        Rows of other tables that it was given before are kept. `values` is None for a table that
        does not stand where the epoch begins: its changes are read, and what is written for it is
        discarded. So the split need not ask for its values.
        """
        ...

    def learned(self) -> Any:
        """What reading has taught that the source may want to know; None for nothing."""
        ...


class TableSplit:
    """What a split of one table has in common with all others: the base class of such splits."""

    table: str

    @property
    def tables(self) -> Collection[str]:
        """The one table."""
        return (self.table,)

    def changes(self, targets: Targets) -> Iterator[tuple[str, pa.Table]]:
        """The change batches that `read` gives; see `Split.changes`."""
        schema_json, key = targets.schema_json(self.table), targets.key(self.table)
        reads = targets.reads(self.table)
        return ((self.table, changes) for changes in self.read(schema_json, key, reads))

    @abstractmethod
    def read(
        self, schema_json: str, key: Sequence[str], reads: Reads | None = None
    ) -> Iterator[pa.Table]:
        """Change batches in the columns of the schema, those that are not read left out or null."""
        ...


@runtime_checkable
class ComparedSplit(Protocol):
    """A split whose rows may lack columns that a select names; see `named_columns`."""

    def columns_seen(self) -> ColumnsSeen:
        """What its rows tell of these columns, once it was read, in the table's first epoch.

        Only together with other splits of the epoch does it tell whether a column is gone.
        """
        ...


@runtime_checkable
class FramePart(Part, Protocol):
    """A part that is relational work: its changes come out of Spark, not of a reader.

    No row of the table has two changes in it.
    """

    @property
    def table(self) -> str:
        """The table that the changes are of."""
        ...

    @property
    def version(self) -> int:
        """What orders the changes of one row: later ones have higher numbers."""
        ...

    @property
    def identified(self) -> bool:
        """Whether every change names the row that it belongs to."""
        ...

    @property
    def columns(self) -> Sequence[Column]:
        """The columns of its rows."""
        ...

    def frame(self) -> DataFrame | None:
        """The changes, or None when there are none; asked on the coordinator.

        Its columns are `FRAME_OP` (a number of `icestream.change.Op`), `FRAME_ID` (a text that
        names the row, or null) and `FRAME_ROW` (a struct; of a delete the key counts alone).
        """
        ...

    def close(self) -> None:
        """The frame is no longer used."""
        ...


def never(durable: Frontier) -> bool:
    """An epoch is no milestone, whatever is durable."""
    return False


def always(durable: Frontier) -> bool:
    """An epoch is a milestone, whatever is durable."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """What an epoch consists of, as its source says before anything of it is read.

    `parts` hold the epoch's changes; there are none when it has no changes. Tables of `truncated`
    lose all older rows in this epoch, and its parts hold only what came after that. `milestone`
    says, given what is durable when the epoch is written, whether the epoch is made durable at
    once, even when it brings no change. `committed_at` is when the oldest change was committed at
    the source, in seconds since 1970: None for rows that a copy brings, whose age is no delay, and
    when the source does not tell.
    """

    parts: Sequence[Part] = ()
    truncated: frozenset[str] = frozenset()
    milestone: Callable[[Frontier], bool] = never
    committed_at: float | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            _refuse_unfinished(part)


def _refuse_unfinished(part: Part) -> None:
    """Raise for a class that is neither kind of part: by a lacking member it would be skipped."""
    if isinstance(part, Split | FramePart):
        return
    kind = FramePart if hasattr(part, "frame") else Split
    # A member may be a field, which the instance has.
    lacking = sorted(name for name in members(kind) if not hasattr(part, name))
    name = type(part).__name__
    raise TypeError(f"{name} is no {kind.__name__}: it lacks {', '.join(lacking)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LettersTried:
    """What became of dead letters that were tried again; `rejected` counts those left by reason.

    `part` tells those of one table apart that were tried in different places.
    """

    table: str
    part: str
    read: int
    taken: int
    rejected: Mapping[str, int]


class LetterSpan(Protocol):
    """Dead letters that are tried again in one epoch."""

    def after(self, lower: Frontier) -> Frontier:
        """The upper bound of that epoch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What the destination remembers when a run starts.

    `progress` is that of each table of the pipeline which is there, and `durable` the frontier up
    to which all are complete. The destination has nothing of the tables in `missing`: they are new,
    or someone dropped them, and what was said to be durable of them is not there.
    """

    progress: Mapping[str, Progress]
    durable: Frontier
    missing: Sequence[str] = ()

    def upper(self, table: str) -> Frontier:
        """What the table itself remembers; the start for one that is not there."""
        mine = self.progress.get(table)
        return mine.upper if mine else START


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """What a start means for tables, as the source says.

    Tables in `rebuilt` are brought as a whole, from their beginning on: an epoch that only some
    tables carry is not finished in these. Those of `behind` must be read from the frontier given
    here before all go on. Tables in `unfed` are at the destination and get no changes from the
    source as things are now: one that lies behind is left as it is.
    """

    rebuilt: frozenset[str] = frozenset()
    behind: Mapping[str, Frontier] = field(default_factory=dict)
    unfed: frozenset[str] = frozenset()


def without_history(
    tables: Iterable[str],
    remembered: Remembered,
    has_history: Callable[[str, Frontier], bool],
) -> dict[str, Frontier]:
    """Tables that took no epoch yet although the source may still serve changes before `durable`.

    They were added to the pipeline, or dropped and created anew: what the source still has of them
    must come first, or something would silently be missing. Mostly a table lies behind because it
    had no changes, and then it lacks nothing.
    """
    new = [table for table in tables if remembered.upper(table) == START]
    return {table: START for table in new if has_history(table, remembered.durable)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """Bounds are wanted for a table that lies behind, up to what is durable in the others."""

    table: str
    durable: Frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """An epoch that some tables carry is planned next, with the bounds that it has.

    No limit on how much an epoch may hold can cut it any more.
    """

    epoch: Epoch


Purpose = CatchUp | Finish
"""What bounds are wanted for, when it is not the stream that all tables follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a frontier stands, for people, for metrics and for the end of a single run.

    `position` is the frontier in the source's own words. `lag_seconds` is how far it is behind the
    newest change that is known. `caught_up` says that it has reached the end that the source had
    when it was first asked: a run with `--once` ends there although more keeps coming. It is false
    when only `available` can tell. `trouble` is what keeps a part of the source from being read
    while the rest goes on.
    """

    position: str
    lag_seconds: float | None = None
    caught_up: bool = False
    trouble: IcestreamError | None = None


class Source(Protocol):
    """Where changes come from. Used by the coordinator alone.

    Each method says by which thread it is called. The loop's thread calls one method after the
    other. Threads of epochs call theirs at the same time as each other, and as the loop's thread
    calls any other: what these share must bear that. What is called while no epoch is written may
    change all.

    Where a method may raise passing trouble (`Retryable`, such as `SourceUnavailable`), the loop
    waits and calls it again. All other errors end the run.

    A source subclasses it. `icestream.sources.abilities` has what some can do beyond this.
    """

    key_in_one_split: bool
    """All changes of a key are in one split of an epoch; else they are brought together first."""

    @abstractmethod
    def tables(self) -> Sequence[str]:
        """The tables known so far; more may appear with later epochs.

        Thread: the loop's, while no epoch is written. Raises `Retryable`, `ConfigInvalid`.
        """
        ...

    @abstractmethod
    def shape(self, table: str) -> TableShape | None:
        """Columns and key for a table that must be created, known once an epoch has parts of it.

        None if only deletes were seen so far: they need no table.
        Thread: those of epochs. Raises `ConfigInvalid`, `SchemaRejected`, `Retryable`.
        """
        ...

    @abstractmethod
    def resume(self, remembered: Remembered) -> StartPlan:
        """Told at the start what the destination remembers; answers what that means for tables.

        Asked before the tables are claimed, and once more after that; the missing tables are the
        same both times.
        Thread: the loop's, while no epoch is written. Raises `Retryable`, `ConfigInvalid`.
        """
        ...

    @abstractmethod
    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """Upper bounds of the next epochs after `lower`, ascending; empty when nothing is new.

        Thread: the loop's, while no epoch is written. Raises `HistoryLost` when the source can no
        longer serve `lower`, `Retryable`, and what an operator must decide.
        """
        ...

    @abstractmethod
    def plan(self, epoch: Epoch) -> EpochPlan:
        """What the epoch consists of.

        Thread: the loop's, also beside epochs. Raises as `available`.
        """
        ...

    def was_read(self, epoch: Epoch, lessons: Sequence[Any]) -> Mapping[str, str]:
        """Told what reading an epoch has taught: what `Split.learned` returned, of each split.

        Returns entries of its own that the source wants in the summary of the epoch's snapshots.
        Values are format strings: the Iceberg sink fills in `{data}` and `{delete}`, the numbers of
        files, and `{batch}`. A brace that is meant as such is doubled, or the commit fails.
        Asked without lessons for an epoch that only publishes a frontier.
        Thread: those of epochs, and the loop's. Raises nothing.
        """
        return {}

    @abstractmethod
    def standing(self, frontier: Frontier) -> Standing:
        """Where a frontier stands; also asked before anything else, by `icestream status`.

        Thread: the loop's, also beside epochs. Raises nothing.
        """
        ...

    def ack(self, durable: Frontier) -> None:
        """Everything before `durable` is committed and may be forgotten.

        Thread: the loop's, also beside epochs. Raises nothing that could be waited for: what
        cannot be told now is told with the next one.
        """
        return None

    def close(self) -> None:
        """Let go of connections.

        Thread: the loop's, while no epoch is written, as the last call. Raises nothing.
        """
        return None
