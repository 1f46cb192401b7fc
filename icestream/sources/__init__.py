"""What a source is: something ordered that can be cut into epochs and read again.

A source names boundaries up to which everything has arrived (`available`), hands out the parts of
an epoch (`plan`), and is told what is durable (`ack`). It never acknowledges by itself.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
from pyiceberg.types import IcebergType
from pyspark.sql import DataFrame

from icestream.epoch import Epoch
from icestream.errors import IcestreamError, SourceUnavailable
from icestream.frontier import START, Frontier
from icestream.schema import Column, Reads, TableShape
from icestream.sources.named_columns import ColumnsSeen


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
        """The same split, given a table's rows that it asked for, beside those it has of others.

        None, before the split asks: the table is not at the epoch's start. What is written for it
        is discarded, so values that it lacks are no error.
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
class FrameSplit(Part, Protocol):
    """A part that is relational work: its changes come out of Spark, not of a reader.

    The changes are events as `icestream.sources.iceberg.changelog` describes them.
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

    def frame(self) -> DataFrame | None:
        """The changes, or None when there are none; asked on the coordinator."""
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
    if isinstance(part, Split | FrameSplit):
        return
    kind = FrameSplit if hasattr(part, "frame") else Split
    # What the protocol asks for, by its own list of it.
    lacking = sorted(name for name in members(kind) if not hasattr(part, name))
    name = type(part).__name__
    raise TypeError(f"{name} is no {kind.__name__}: it lacks {', '.join(lacking)}")


def members(protocol: type) -> frozenset[str]:
    """The names that a protocol asks for, also those of its bases."""
    own = (base for base in protocol.__mro__ if getattr(base, "_is_protocol", False))
    found = {name for base in own for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return frozenset(name for name in found if not name.startswith("_"))


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


class Letters(Protocol):
    """Dead letters that are tried again in one epoch."""

    def after(self, lower: Frontier) -> Frontier:
        """The upper bound of that epoch."""
        ...


CALLED_BY_EPOCHS = frozenset({"shape", "meet", "learn", "summary"})
"""What the threads in which epochs are written ask a source, beside the loop's own thread."""

CALLED_ALONE = frozenset({"available", "catch_up", "letters", "give_up"})
"""What the loop asks a source only while no epoch is being written."""


class Source(Protocol):
    """Where changes come from. Used by the coordinator alone, by these threads:

    - The loop's thread calls all methods, one after the other.
    - Threads of epochs call those of `CALLED_BY_EPOCHS`, at the same time as each other and as the
      loop's thread calls any other. What these share with others must bear that.
    - Those of `CALLED_ALONE` come while there is no thread of an epoch: they may change all.
    - `interrupt` comes at any moment, and `keyed` never changes.

    A source subclasses it. What is not abstract has the answer of a source that the question does
    not concern: it keeps nothing, has nothing to say or to let go. Whether there
    is history has no such answer, because a wrong "no" would lose rows.
    """

    keyed: bool
    """All changes of a key are in one split of an epoch; else they are brought together first."""

    @abstractmethod
    def tables(self) -> Sequence[str]:
        """The tables known so far; more may appear with later epochs."""
        ...

    def known_tables(self) -> Sequence[str]:
        """The tables that can be named without asking where the changes come from."""
        return ()

    def feeds(self, table: str) -> bool:
        """Whether a table that the destination has gets its changes from here, as things are now.

        One that lies behind and does not is left as it is: no epoch is brought to it.
        """
        return table in self.tables()

    @abstractmethod
    def shape(self, table: str) -> TableShape | None:
        """Columns and key for a table that must be created, known once it has splits.

        None if only deletes were seen so far: they need no table.
        """
        ...

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives columns of the table."""
        return {}

    @abstractmethod
    def has_history(self, table: str, before: Frontier) -> bool:
        """Whether the source may still serve changes of the table that lie before a frontier."""
        ...

    def read_from(self, table: str, own: Frontier, durable: Frontier) -> Frontier | None:
        """From where a table must be read before all go on from `durable`; None if it need not.

        `own` is what the table remembers. Mostly it lies behind because it had no changes; one
        that took no epoch yet has all the history before it.
        """
        return START if own == START and self.has_history(table, durable) else None

    @abstractmethod
    def available(self, lower: Frontier) -> Sequence[Frontier]:
        """Upper bounds of the next epochs after `lower`, ascending; empty when nothing is new.

        Raises `HistoryLost` when the source can no longer serve `lower`.
        """
        ...

    def backlog(self, lower: Frontier) -> bool:
        """Whether the next epoch shall begin at once, and not when its time has come.

        So it is while as much waits after `lower` as an epoch may hold, and while tables are
        copied. It is asked about once a second and has to be cheap. A source that names everything
        that it has in one answer of `available` need not answer it.
        """
        return False

    def catch_up(self, table: str, lower: Frontier, durable: Frontier) -> Sequence[Frontier]:
        """Extra bounds that a lagging table must reach, before those of `available`."""
        return ()

    def letters(self, durable: Frontier, table: str | None, as_is: bool) -> Sequence[Letters]:
        """The dead letters of one table, or of all, in groups that fit into an epoch each."""
        return ()

    def tried(self) -> Sequence[LettersTried]:
        """What became of dead letters that this run has tried again, by table."""
        return ()

    def verify(self, durable: Frontier) -> None:
        """Raise what would stop a run that goes on from `durable`; nothing is changed."""
        return None

    def verify_table(self, table: str, durable: Frontier) -> None:
        """As `verify`, but for one table, and only what is told without much work."""
        return None

    def caught_up(self, frontier: Frontier) -> bool:
        """Whether a frontier has reached the end that the source had when it was first asked.

        A run with `--once` ends there although more keeps coming. False when only `available` can
        tell.
        """
        return False

    def give_up(self, lost: SplitsLost) -> None:
        """Told what made splits be given up: what is not durable will be asked for anew."""
        return None

    def trouble(self) -> IcestreamError | None:
        """What keeps a part of the source from being read while the rest goes on."""
        return None

    def meet(self, shapes: Mapping[str, TableShape]) -> None:
        """Told of tables that reading has found changes of, and how they would be created."""
        return None

    def finish(self, epoch: Epoch) -> None:
        """Told that some tables carry an epoch: it is planned with the bounds it has.

        No limit on how much an epoch may hold can cut it any more.
        """
        return None

    @abstractmethod
    def plan(self, epoch: Epoch) -> EpochPlan:
        """What the epoch consists of."""
        ...

    def unclaimed(self, tables: Sequence[str]) -> Collection[str]:
        """Told at the start: the destination has nothing of these tables.

        They are new, or someone dropped them: what was said to be durable of them is not there.
        Returns those that the source will bring as a whole, from their beginning on. An epoch that
        only some tables carry is not finished in these.
        """
        return ()

    def found(self, tables: Collection[str]) -> None:
        """Told at the start which tables of the pipeline the destination has."""
        return None

    def learn(self, learned: Any) -> None:
        """Take in what reading a split has taught; called with what its `learned()` returned."""
        return None

    def summary(self, epoch: Epoch) -> Mapping[str, str]:
        """Entries of its own that the source wants in the summary of the epoch's snapshots."""
        return {}

    @abstractmethod
    def position(self, frontier: Frontier) -> str:
        """A frontier in the source's own words, for people."""
        ...

    def lag_seconds(self, durable: Frontier) -> float | None:
        """How far behind the newest known change the durable frontier is."""
        return None

    def ack(self, durable: Frontier) -> None:
        """Everything before `durable` is committed and may be forgotten."""
        return None

    def interrupt(self) -> None:
        """Told, from any thread, that the run is being stopped: waits should end within seconds."""
        return None

    def close(self) -> None:
        """Let go of connections."""
        return None
