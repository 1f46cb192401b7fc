"""What a sink is: a destination that takes an epoch and its frontier in one atomic step.

What a writer does is invisible or idempotent; only `commit` makes it visible. Progress is whatever
the destination says it is, and nothing else remembers it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from icestream.epoch import Epoch, Progress
from icestream.frontier import Frontier
from icestream.report import Report
from icestream.schema import Column, Reads, TableShape
from icestream.transform import TableSelect

# Under this name `Sink.durable` and `Sink.claim` tell of progress that lies beside the tables.
BESIDE = ""


class Writer(Protocol):
    """Runs on workers; plain data."""

    def tables(self) -> Collection[str]:
        """The tables that it writes to."""
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

    def write(
        self, table: str, shard: str, changes: pa.Table, each_key_once: bool = False
    ) -> Iterator[Report]:
        """Write changes and report what was written.

        A second call with the same changes writes the same rows into files of other names, or sends
        the same documents, which changes nothing. `shard` says whose changes these are: of all
        calls of an epoch for a table only a second attempt with the same changes has the same. The
        commit takes one attempt of each.
        """
        ...


@runtime_checkable
class WritesDocuments(Protocol):
    """A `Writer` that takes documents instead of rows.

    Its changes have `OP`, `AT` and the columns `id` and `document` of `icestream.documents`; a
    delete has no document. `AT` is the version of the document. Of two versions the higher stays,
    whichever comes first.
    """

    @property
    def version(self) -> int:
        """The version of documents that are made of rows of this epoch.

        A later epoch has a higher one, and so has every epoch of a newer run.
        """
        ...


@runtime_checkable
class SelectingWriter(Writer, Protocol):
    """A writer whose changes have passed a select, table by table.

    `schema_json` and `key` are the source's; `inner` takes what the selects give.
    """

    @property
    def selects(self) -> Sequence[TableSelect]:
        """The selects of tables that have one, each at its place in the frame of changes."""
        ...

    @property
    def inner(self) -> Writer:
        """Who takes the results."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What one table got from an epoch."""

    table: str
    snapshot_id: int | None
    duplicate: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An epoch whose files are written and that waits for its commit.

    `labels` are the source's own entries for the summaries. Their values are format strings that
    may name `data`, `delete` and `batch`; see `Source.was_read`.
    `catching_up` says that these tables still lie behind the others.
    `changes` are those that were read, as the source counts them: an update is one.
    `truncated` names tables whose rows all go before the epoch's files are added; they commit even
    without files, and count among the epoch's tables.
    """

    epoch: Epoch
    reports: Sequence[Report]
    writer: Writer | None
    labels: Mapping[str, str]
    catching_up: bool = False
    truncated: frozenset[str] = frozenset()
    changes: int = 0


class Sink(Protocol):
    """Where changes go. Used by the coordinator alone.

    The loop's thread calls one method after the other. Threads of epochs call theirs one at a time,
    beside the loop's thread, but for `stored`, which may come beside any other; `prepare` is called
    for several tables at once. While a start finishes an epoch or has tables catch up, the loop's
    thread is the thread of these epochs. Where a method may raise passing trouble (`Retryable`,
    `CommitUnknown`), the loop waits and calls it again.

    `Evolves`, `LooksUpRows`, `RemembersSources` and `RefusesItself` are what some sinks can do
    beyond this.
    """

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """The progress of each of the pipeline's tables that exist; nothing is claimed.

        A sink that keeps progress beside its tables tells it under `BESIDE`. So a frontier is known
        before the first table is there.
        Thread: the loop's, while no epoch is written. Raises `ProgressLost` (`RolledBack` is one),
        `HistoryLost` when a table lacks epochs that others have, `ConfigInvalid`, `Retryable`.
        """
        ...

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Take the pipeline over: publish the next generation in every table that exists.

        Returns the progress of each, as it is once the table is claimed. Until then an older run
        may commit to it; from then on it cannot.
        Thread: the loop's, while no epoch is written. Raises `ProgressLost`, `RolledBack` when a
        table's last commit is no longer in its history, `ConfigInvalid`, `Fenced`, `Retryable`,
        `CommitUnknown`.
        """
        ...

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Make sure that the table is there, claimed, and its key known.

        The sink calls `shape` in three cases: the table is not there; it has no epoch yet; it does
        not tell its key. If `shape` returns None, the sink makes no table. It returns False if the
        table is not there. It also returns False if the table has no epoch and no unfinished epoch
        needs it.
        Thread: those of epochs. Raises `Fenced`, `SchemaRejected`, `ConfigInvalid`, `Retryable`.
        """
        ...

    def writer(self, epoch: Epoch, tables: Sequence[str]) -> Writer:
        """A writer for the epoch's files of these tables, as they are now.

        A sink that `RemembersSources` has one more argument, `read_otherwise`. Files of one writer
        never overwrite those of another.
        Thread: those of epochs. Raises `Fenced`, `SchemaRejected`, `Retryable`.
        """
        ...

    def commit(self, written: Written) -> Sequence[Committed]:
        """Make the epoch durable in every table with reports or truncated, each with its progress.

        A table that carries the epoch already keeps it as it is. When this returns, all tables
        that carry the epoch say the same of which ones they are.
        Thread: the loop's, also beside epochs. Raises `Fenced`, `ProgressLost`, `Retryable`,
        `StaleWrite` when the files no longer fit a table, and
        `CommitUnknown` when even reading back does not tell what happened.
        """
        ...

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Make the frontier of an epoch without changes durable, in one table.

        False when there is no table yet that could remember it.
        Thread: the loop's, also beside epochs. Raises as `commit`.
        """
        ...

    def close(self) -> None:
        """Let go of connections. Thread: the loop's, as the last call. Raises nothing."""
        ...


def of_tables(progress: Mapping[str, Progress]) -> dict[str, Progress]:
    """What a sink tells of its tables alone."""
    return {table: mine for table, mine in progress.items() if table != BESIDE}


@runtime_checkable
class Evolves(Protocol):
    """Can change what a table takes. Without it a new or wider column stops the pipeline."""

    def evolve(self, table: str, columns: Sequence[Column]) -> None:
        """Let the table take columns of the source that it lacks or holds too narrowly.

        Thread: those of epochs. Raises `SchemaRejected` when no safe change leads there,
        `Retryable`.
        """
        ...


@runtime_checkable
class LooksUpRows(Protocol):
    """Can give rows back. Without it a change that leaves values out stops the pipeline."""

    def stored(
        self, table: str, keys: pa.Table, columns: Sequence[str], before: Frontier | None = None
    ) -> pa.Table:
        """The rows that the destination holds under these keys: the key and the wanted columns.

        Keys that it does not hold are left out. A table that has taken what lies past `before` is
        read as it was until then, so that an epoch that is written once more comes out the same.
        Thread: those of epochs. Raises `HistoryLost` when the table no longer knows, `Retryable`.
        """
        ...


@runtime_checkable
class RemembersSources(Protocol):
    """Can stand behind selects: it keeps what `icestream.sinks.shaped` must know of a source.

    Such a sink must have `Evolves` too. Its `writer` also takes `read_otherwise`, the tables whose
    changes are read by another schema than their own. Without both abilities the pipeline file may
    have no `transform`. A sink whose writers take documents needs both for every source of splits:
    rows become documents by a select of the whole row.
    """

    def recalled(self, table: str, name: str) -> str | None:
        """The text that a table keeps under a name; None when there is none, or no table yet.

        Thread: those of epochs. Raises `Retryable`.
        """
        ...

    def remember(self, table: str, name: str, value: str) -> None:
        """Keep a text with a prepared table.

        Thread: those of epochs. Raises `Retryable`, `ConfigInvalid`.
        """
        ...

    def decided(self, epoch: Epoch, tables: Sequence[str]) -> Collection[str]:
        """The tables that have taken this epoch already, so that it must be read as it was then.

        Thread: those of epochs. Raises nothing.
        """
        ...


@runtime_checkable
class RefusesItself(Protocol):
    """Has tables that may be a source too: none is filled from itself, for it would grow for ever.

    See `icestream.sources.abilities.IdentifiesTables`.
    """

    def refuse_itself(self, table: str, table_id: str) -> None:
        """Raise `ConfigInvalid` when a prepared table is the one of this id.

        Thread: those of epochs. Raises `Retryable` as well.
        """
        ...


SINK_ABILITIES = (Evolves, LooksUpRows, RemembersSources, RefusesItself)
"""All of them, for the check of halves."""


class StaleWrite(Exception):
    """Someone changed a table's schema or partitioning after its files were written."""
