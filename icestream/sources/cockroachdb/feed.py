"""What changefeeds have in common, however their messages are delivered.

Where a changefeed says that all up to a timestamp R is delivered, an epoch may end. Which rows
belong to it is told by their own timestamps, never by where or when they came.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from pyiceberg.types import IcebergType

from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid
from icestream.frontier import Frontier, Position
from icestream.schema import parse_type
from icestream.sources import Budget, Source
from icestream.sources.cockroachdb import CockroachdbOptions
from icestream.sources.cockroachdb.hlc import format_hlc, resolved_of
from icestream.sources.cockroachdb.tables_read import names_of

T = TypeVar("T")


class Changefeed(Source):
    """The base of all sources over changefeeds."""

    key_in_one_split = False

    def __init__(self, options: CockroachdbOptions, pipeline: str, budget: Budget):
        self._options = options
        self._pipeline = pipeline
        self._budget = budget
        self._declared = {
            table: {name: parse_type(kind) for name, kind in columns.items()}
            for table, columns in options.columns.items()
        }

    def _labels(self, epoch: Epoch) -> Mapping[str, str]:
        """What a CockroachDB sink would say of an epoch."""
        resolved = resolved_of(epoch.upper)
        return {
            "crdb.job_id": self._pipeline,
            "crdb.batch_id": "{batch}",
            "crdb.resolved_hlc": format_hlc(resolved) if resolved else "",
            "crdb.data_file_count": "{data}",
            "crdb.delete_file_count": "{delete}",
        }

    def _position(self, frontier: Frontier) -> str:
        """The resolved timestamp of a frontier."""
        resolved = resolved_of(frontier)
        return format_hlc(resolved) if resolved else ""

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives a table's columns."""
        return _said_of(table, self._declared, {})

    def named_key(self, table: str) -> list[str]:
        """The key that the configuration gives a table; empty when its rows have to tell."""
        return list(_said_of(table, self._options.keys, ()))

    def thinned(
        self,
        start: Position,
        waiting: Sequence[Position],
        sizes: Sequence[tuple[int, int]],
        more_to_come: bool = False,
    ) -> list[Position]:
        """Those of the waiting timestamps that are far enough apart, or have an epoch between them.

        `sizes` are the rows and the bytes that each adds to those before it. A last one that stays
        alone is taken when its time is over, unless more is known to come.
        """
        spacing = int(self._options.resolved_every * 1e9)
        chosen: list[Position] = []
        last, rows, size = (start[0] if start else 0), 0, 0
        for resolved, (rows_added, size_added) in zip(waiting, sizes, strict=True):
            rows, size = rows + rows_added, size + size_added
            if resolved[0] - last >= spacing or self._budget.spent(rows, size):
                chosen.append(resolved)
                last, rows, size = resolved[0], 0, 0
        quiet = waiting and not more_to_come and time.time_ns() - waiting[-1][0] >= spacing
        if quiet and waiting[-1] not in chosen:
            chosen.append(waiting[-1])
        return chosen

    def _wanted(self, topic: str) -> bool:
        wanted = self._options.tables
        return not wanted or any(name in wanted for name in names_of(topic))


def _said_of(table: str, options: Mapping[str, T], nothing: T) -> T:
    """What the options say of a table, by its full name or by the last part of it."""
    return next((options[name] for name in names_of(table) if name in options), nothing)


def packed(parts: Sequence[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """The parts in groups, each as large as the limit allows; a larger part is alone."""
    group: list[T] = []
    size = 0
    for part in parts:
        if group and size + size_of(part) > limit:
            yield group
            group, size = [], 0
        group.append(part)
        size += size_of(part)
    if group:
        yield group


def refuse_other_key(table: str, source_key: Sequence[str], key: Sequence[str]) -> None:
    """A delete tells its key and nothing else: by other columns it would miss its row."""
    if source_key and key and set(source_key) != set(key):
        raise ConfigInvalid(
            f"rows of table {table} cannot be deleted by {', '.join(key)}",
            detail=f"Its key is {', '.join(source_key)}.",
            hint="Leave `equality_delete_by` out, or name the key's columns there.",
        )
