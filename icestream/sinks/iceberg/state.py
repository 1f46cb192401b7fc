"""What a run knows of each table, and work on several tables at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pyiceberg.schema import Schema
from pyiceberg.types import (
    IcebergType,
    StringType,
)

from icestream.epoch import (
    Progress,
)
from icestream.iceberg.table import Table
from icestream.iceberg.target import WriteTarget
from icestream.schema import (
    NAME_MAPPING,
    Column,
    schema_from_json,
    source_schema,
)
from icestream.sinks import Committed

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")

COMMITS_IN_PARALLEL = 8


class TableState:
    """What this run knows of one table.

    `proven`: every newer run is sure to find this table. `certain`: its source table is known, and
    not guessed of what an earlier version made. `key` has the table's names, and `columns` are the
    source's as far as they had to be asked, those that were met last at the end.
    """

    __slots__ = (
        *("certain", "columns", "committed", "handle", "key"),
        *("progress", "proven", "renames", "target"),
    )

    def __init__(self, handle: Table, progress: Progress, certain: bool = True):
        self.handle = handle
        self.progress = progress
        self.certain = certain
        self.committed: Committed | None = None
        self.proven = False
        self.key: Sequence[str] | None = None
        self.target: WriteTarget | None = None
        self.columns: dict[str, IcebergType] = {}
        self.renames = 0

    def note_source_columns(self, columns: Sequence[Column]) -> None:
        """Remember what the source calls its columns, for those that go by several names."""
        for column in columns:
            if not column.absent:
                self.columns.pop(column.name, None)
                self.columns[column.name] = column.type

    def source_names(self) -> dict[int, str]:
        """The names of the table's columns at the source, by field id."""
        return {field.field_id: field.name for field in self.source_schema(()).fields}

    def source_schema(self, names: Iterable[str]) -> Schema:
        """The table's schema by the source's names, among them these."""
        mapping = self.handle.properties().get(NAME_MAPPING)
        schema = schema_from_json(self.handle.schema_json())
        return source_schema(
            schema, mapping, {**self.columns, **dict.fromkeys(names, StringType())}
        )


def in_parallel(items: Mapping[K, V], work: Callable[[K, V], R]) -> dict[K, R]:
    """Run over the items in parallel; all are awaited, then the worst error is raised."""
    if len(items) <= 1:
        return {key: work(key, value) for key, value in items.items()}
    with ThreadPoolExecutor(max_workers=min(COMMITS_IN_PARALLEL, len(items))) as pool:
        futures = {key: pool.submit(work, key, value) for key, value in items.items()}
    errors = [error for future in futures.values() if (error := future.exception())]
    if errors:
        raise max(errors, key=lambda error: getattr(error, "exit_code", 9))
    return {key: future.result() for key, future in futures.items()}
