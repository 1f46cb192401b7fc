"""What some sources can do beyond the questions that every source answers; see `abilities`.

A source has an ability when its class has all methods of it; nothing is registered.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from pyiceberg.types import IcebergType

from icestream.frontier import Frontier
from icestream.schema import TableShape
from icestream.sources import LetterSpan, LettersTried, Source, SplitsLost


@runtime_checkable
class KnowsTables(Protocol):
    """Names tables without asking where the changes come from, for `icestream status`."""

    def known_tables(self) -> Sequence[str]:
        """The tables that can be named. Thread: outside of runs. Raises nothing."""
        ...


@runtime_checkable
class Verifies(Protocol):
    """Tells what would stop a run, for `icestream check` and `icestream rollback`."""

    def verify(self, durable: Frontier) -> None:
        """Raise what would stop a run that goes on from `durable`; nothing is changed.

        Thread: outside of runs. Raises what `Source.available` raises.
        """
        ...


@runtime_checkable
class VerifiesTables(Protocol):
    """Tells what would stop a run at one table, for `icestream status`."""

    def verify_table(self, table: str, durable: Frontier) -> None:
        """As `Verifies.verify`, but for one table, and only what is told without much work.

        Thread: outside of runs. Raises what `Source.available` raises.
        """
        ...


@runtime_checkable
class DeclaresColumns(Protocol):
    """Has types that the configuration gives columns."""

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The declared types of the table's columns. Thread: any. Raises nothing."""
        ...


@runtime_checkable
class IdentifiesTables(Protocol):
    """Reads tables that may be a destination too, and tells which ones they are."""

    def table_id(self, table: str) -> str:
        """What tells the table from all others, whatever its name. Thread: those of epochs.

        Raises nothing.
        """
        ...


@runtime_checkable
class HasBacklog(Protocol):
    """Tells that a whole epoch waits.

    A source that names everything that it has in one answer of `available` need not.
    """

    def backlog(self, lower: Frontier) -> bool:
        """Whether the next epoch shall begin at once, and not when its time has come.

        So it is while as much waits after `lower` as an epoch may hold, and while tables are
        copied. It is asked about once a second and has to be cheap.
        Thread: the loop's, also beside epochs. Raises nothing.
        """
        ...


@runtime_checkable
class FindsTables(Protocol):
    """Meets tables only by reading: its splits raise `TablesUnready` with their shapes."""

    def tables_met(self, shapes: Mapping[str, TableShape]) -> None:
        """Told of tables that reading has found changes of, and how they would be created.

        Thread: those of epochs. Raises `ConfigInvalid` and `SchemaRejected` for tables that cannot
        be made.
        """
        ...


@runtime_checkable
class RegroupsSplits(Protocol):
    """Serves what its splits lost in another way; others are simply asked again."""

    def give_up(self, lost: SplitsLost) -> None:
        """Told what made splits be given up: what is not durable will be asked for anew.

        Thread: the loop's, while no epoch is written. Raises nothing.
        """
        ...


@runtime_checkable
class TakesLetters(Protocol):
    """Has dead letters that can be tried again, for `icestream replay`."""

    def letters(self, durable: Frontier, table: str | None, as_is: bool) -> Sequence[LetterSpan]:
        """The dead letters of one table, or of all, in groups that fit into an epoch each.

        Thread: the loop's, while no epoch is written. Raises what keeps them from being tried.
        """
        ...

    def tried(self) -> Sequence[LettersTried]:
        """What became of letters that this run has tried again, by table.

        Thread: the loop's, while no epoch is written. Raises nothing.
        """
        ...


@runtime_checkable
class Interruptible(Protocol):
    """Waits for others at length, and can be told to end that."""

    def interrupt(self) -> None:
        """Told that the run is being stopped: waits should end within seconds.

        Thread: any, at any moment. Raises nothing.
        """
        ...


SOURCE_ABILITIES = (
    KnowsTables,
    Verifies,
    VerifiesTables,
    DeclaresColumns,
    IdentifiesTables,
    HasBacklog,
    FindsTables,
    RegroupsSplits,
    TakesLetters,
    Interruptible,
)
"""All of them, for the check of halves."""


def known_tables(source: Source) -> Sequence[str]:
    """The tables that a source can name without asking anybody."""
    return source.known_tables() if isinstance(source, KnowsTables) else ()


def verify(source: Source, durable: Frontier) -> None:
    """Raise what would stop a run, if the source can tell."""
    if isinstance(source, Verifies):
        source.verify(durable)


def verify_table(source: Source, table: str, durable: Frontier) -> None:
    """Raise what would stop a run at a table, if the source can tell."""
    if isinstance(source, VerifiesTables):
        source.verify_table(table, durable)


def declared(source: Source, table: str) -> Mapping[str, IcebergType]:
    """The types that the configuration gives columns of the table."""
    return source.declared(table) if isinstance(source, DeclaresColumns) else {}
