"""What the options of a source answer: they open it, and say what holds for pipelines that read it.

Each source is a folder here. Its `options.py` has a dataclass of options that is a `SourceOptions`,
and names it `OPTIONS`; the folder's name is the kind that pipeline files use. No other module has
to import the folder: `icestream.connectors` finds it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from icestream.dead_letters import LetterBox
from icestream.destination import Destination
from icestream.errors import ConfigInvalid
from icestream.sources import Budget, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a source is opened with.

    `spark` is the session. `run_tasks` runs tasks on workers and returns what each has found.
    `transformed` are the tables that pass a select, which may give columns other names. With
    `dead_letters` a record that cannot be taken is kept; `letter_box` reads those that were.
    """

    pipeline: str
    budget: Budget
    spark: Any
    run_tasks: Callable[[Sequence[Any]], Sequence[Any]]
    destination: Destination
    transformed: frozenset[str] = frozenset()
    dead_letters: bool = False
    letter_box: LetterBox | None = None

    def parallelism(self) -> int:
        """How many tasks the workers run at the same time; on a cluster workers come and go."""
        return max(1, int(self.spark.sparkContext.defaultParallelism))

    @property
    def workers_elsewhere(self) -> bool:
        """Whether workers may run on other machines than the coordinator."""
        return not str(self.spark.sparkContext.master).startswith("local")


class SourceOptions(Protocol):
    """A frozen dataclass of options (see `icestream.options`) that opens its source.

    A source whose options only tell where it is has `open`; the rest is for those that differ.
    """

    __slots__ = ()

    from_topics: ClassVar[bool] = False
    """Its changes are records of topics, which a sink may route to tables."""

    frames: ClassVar[bool] = False
    """Its parts are Spark frames of events, not splits that workers read."""

    def open(self, opening: Opening) -> Source:
        """The source; nothing is asked of its server yet."""
        ...

    @classmethod
    def stands_for(cls, given: Mapping[str, Any], place: str) -> Mapping[str, Any] | None:
        """Another `{kind: options}` that these options of a file mean; None when they are as is."""
        return None

    def named(self) -> Sequence[str]:
        """The tables that the options name one by one."""
        return ()

    def possible(self, destination: Destination) -> Sequence[str] | None:
        """The names, or patterns, of all tables that there may be; None when they are open."""
        return None

    def heartbeat_seconds(self) -> float | None:
        """The default of `heartbeat_interval`; None for the engine's own."""
        return None

    def cadence(self) -> Mapping[str, Any]:
        """Fields of `icestream.pipeline.Cadence` that the source decides, whatever a file says."""
        return {}

    def catalogs(self) -> Sequence[Mapping[str, str]]:
        """The Iceberg catalogs that it reads from, whose jars the session must have."""
        return ()

    def catalog_of(self, table: str) -> Mapping[str, str] | None:
        """The Iceberg catalog that has a table; None when the source reads none."""
        return None

    def refuse_dead_letters(self, pipeline: str) -> None:
        """Raise `ConfigInvalid` unless single records can be kept as dead letters."""
        raise refused_for_topics(pipeline, "on_error")


def refused_for_topics(pipeline: str, option: str) -> ConfigInvalid:
    """The error about an option that is for records of topics alone."""
    return ConfigInvalid(
        f"pipeline {pipeline} sets `{option}`, which is for Kafka sources",
        hint="Leave it out: other sources tell the table of each row, and stop at rows that "
        "cannot be taken.",
    )
