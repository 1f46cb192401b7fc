"""What the options of a sink answer: they open it, and say what holds for pipelines that feed it.

Each sink is a folder here. Its `options.py` has a dataclass of options that is a `SinkOptions`, and
names it `OPTIONS`; the folder's name is the kind that pipeline files use. No other module has to
import the folder: `icestream.connectors` finds it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from icestream.dead_letters import LetterBox
from icestream.destination import Destination
from icestream.errors import ConfigInvalid
from icestream.sinks import Sink


class SinkOptions(Protocol):
    """A frozen dataclass of options (see `icestream.options`) that opens its sink."""

    __slots__ = ()

    url_form: ClassVar[str] = ""
    """How a sink is written as one text, `<kind>://...`; empty when it cannot be."""

    documents: ClassVar[bool] = False
    """Its writers take documents, which Spark makes of rows; see `icestream.sinks`."""

    keeps_letters: ClassVar[bool] = False
    """Records that cannot be taken are kept by it, and read again; see `letter_box`."""

    def open(self, pipeline: str, spark: Any) -> Sink:
        """The pipeline's sink; `spark` is the session."""
        ...

    def status(self, sink: Any, tables: Sequence[str], pipeline: str) -> list[dict[str, Any]]:
        """What is durable: a row for each table of an opened sink, without claiming anything.

        Each has `pipeline`, `table`, `source_table`, `state`, `generation`, `epoch`, `upper` (the
        frontier, or None), `committed_at` (seconds, or None), `snapshot_id` (or None), and in
        `trouble` the error that the next run would stop with.
        """
        ...

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The options that a text says. A sink with a `url_form` has its own; others refuse."""
        raise ConfigInvalid(f"{cls.__name__} cannot be read from one text", hint="Write a map.")

    def destination(self) -> Destination:
        """What a source may want to know of the tables."""
        return Destination()

    def catalogs(self) -> Sequence[Mapping[str, str]]:
        """The Iceberg catalogs that it writes to, whose jars the session must have."""
        return ()

    def catalog_of(self, table: str) -> Mapping[str, str] | None:
        """The Iceberg catalog that has a table; None when the sink writes to none."""
        return None

    def refuse_itself(self, table: str, catalog: Mapping[str, str]) -> None:
        """Raise `ConfigInvalid` when a table of this catalog would be filled from itself."""
        return None

    def letter_box(self, sink: Any, pipeline: str, spark: Any) -> LetterBox | None:
        """Where dead letters of an opened sink are read again; None when it keeps none."""
        return None

    def cadence(self) -> Mapping[str, Any]:
        """Fields of `icestream.pipeline.Cadence` that the sink decides, whatever a file says."""
        return {}

    def refuse_rollback(self, pipeline: str) -> None:
        """Raise `ConfigInvalid`, as is the default. A sink that has `settle_rollback` overrides it.

        Asked by `icestream rollback`, which then calls `settle_rollback` of the opened sink.
        """
        raise ConfigInvalid(f"pipeline {pipeline} does not write to tables that can be rolled back")
