"""What a source is: something ordered that can be cut into epochs and read again.

A source names boundaries up to which everything has arrived (`available`), hands out the parts of
an epoch (`splits`), and is told what is durable (`ack`). It never acknowledges by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from icestream.epoch import Epoch
from icestream.frontier import Frontier
from icestream.schema import TableShape


class Split(Protocol):
    """A part of an epoch for one table: read twice, on any worker, it gives the same changes."""

    @property
    def table(self) -> str:
        """The table's name at the source."""
        ...

    @property
    def size_bytes(self) -> int:
        """How much of the source reading it takes."""
        ...

    def read(self, schema_json: str, key: Sequence[str]) -> Iterator[pa.Table]:
        """Change batches in the columns of the table's schema.

        Raises `SchemaGap` for columns that the table lacks, `SchemaRejected` for values that do
        not fit, `DataRejected` for what cannot be read, `SourceUnavailable` when it may work later.
        """
        ...

    def learned(self) -> Any:
        """What reading has taught that the source may want to know; None for nothing."""
        ...


class Source(Protocol):
    """Where changes come from. Used by the coordinator alone, from one thread at a time."""

    keyed: bool
    """All changes of a key are in one split of an epoch; else they are brought together first."""

    def tables(self) -> Sequence[str]:
        """The tables known so far; more may appear with later epochs."""
        ...

    def shape(self, table: str) -> TableShape | None:
        """Columns and key for a table that must be created, known once it has splits.

        None when its splits so far do nothing to a table that does not exist.
        """
        ...

    def has_history(self, table: str, before: Frontier) -> bool:
        """Whether the source may still serve changes of the table that lie before a frontier."""
        ...

    def available(self, lower: Frontier) -> Sequence[Frontier]:
        """Upper bounds of the next epochs after `lower`, ascending; empty when nothing is new.

        Raises `HistoryLost` when the source can no longer serve `lower`.
        """
        ...

    def splits(self, epoch: Epoch) -> Sequence[Split]:
        """The parts that hold the epoch's changes; empty when it has none."""
        ...

    def learn(self, learned: Any) -> None:
        """Take in what reading a split has taught; called with what its `learned()` returned."""
        ...

    def summary(self, epoch: Epoch) -> Mapping[str, str]:
        """Entries of its own that the source wants in the summary of the epoch's snapshots."""
        ...

    def position(self, frontier: Frontier) -> str:
        """A frontier in the source's own words, for people."""
        ...

    def lag_seconds(self, durable: Frontier) -> float | None:
        """How far behind the newest known change the durable frontier is."""
        ...

    def ack(self, durable: Frontier) -> None:
        """Everything before `durable` is committed and may be forgotten."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
