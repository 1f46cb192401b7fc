"""Dead letters: rows of a source that no table takes, kept in a table beside theirs.

A table `<table>__dead_letters` is like any other: its rows belong to the epoch of the source that
they were found in, and are committed with it. Nothing of a row depends on when it was read, so a
task that runs twice writes the same rows into two files, and one of these counts. A letter that is
tried again and taken leaves the table by its position (`icestream replay`).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.types import BinaryType, StringType, TimestamptzType

from icestream.change import AT, OP, SEQ, Op
from icestream.schema import Column, TableShape

SUFFIX = "__dead_letters"
POSITION = "position"
SHAPE = TableShape(
    columns=[
        Column(name=POSITION, type=StringType()),
        Column(name="error", type=StringType()),
        Column(name="key", type=BinaryType()),
        Column(name="payload", type=BinaryType()),
        Column(name="at", type=TimestamptzType()),
    ],
    key=[POSITION],
)
_MICROSECONDS = 1000


Spans = Sequence[tuple[str, str]]
"""First and last positions, both included. A span holds positions that are as long as its ends:
among texts of one length the order is that of the offsets in them."""


class LetterBox(Protocol):
    """The letters that a destination holds, as of any of its snapshots."""

    def newest(self, table: str) -> int | None:
        """The newest snapshot of a table of letters; None when it has none, or is not there."""
        ...

    def positions(self, table: str, snapshot_id: int) -> pa.Table:
        """Position, size in bytes and time (`at`) of each letter, ordered by position."""
        ...

    def read(self, table: str, snapshot_id: int, spans: Spans) -> pa.Table:
        """The letters whose positions lie in one of the spans, ordered by position."""
        ...


def table_of(table: str) -> str:
    """The name of a table's dead letters."""
    return f"{table}{SUFFIX}"


def counterpart(table: str) -> str:
    """The table of a table's letters, or of a table of letters the one that they belong to."""
    return table.removesuffix(SUFFIX) if table.endswith(SUFFIX) else table_of(table)


def letters(
    positions: Sequence[str],
    errors: Sequence[str],
    keys: pa.Array,
    payloads: pa.Array,
    milliseconds: npt.NDArray[np.int64],
) -> pa.Table:
    """Change batch of the rows; `milliseconds` is the source's own time of each, -1 if unknown."""
    count = len(positions)
    times = pa.array(milliseconds * _MICROSECONDS, mask=milliseconds < 0)
    return pa.table(
        {
            **_marks(Op.INSERT, count),
            POSITION: pa.array(positions, pa.large_string()),
            "error": pa.array(errors, pa.large_string()),
            "key": keys.cast(pa.large_binary()),
            "payload": payloads.cast(pa.large_binary()),
            "at": times.cast(pa.timestamp("us", tz="UTC")),
        }
    )


def replaced(letters: pa.Table) -> pa.Table:
    """Change batch that puts letters in the place of those at the same positions."""
    return pa.table({**_marks(Op.UPSERT, letters.num_rows), **_columns(letters)})


def added(letters: pa.Table) -> pa.Table:
    """Change batch that adds letters which were in another table until now."""
    return pa.table({**_marks(Op.INSERT, letters.num_rows), **_columns(letters)})


def removed(positions: pa.Array) -> pa.Table:
    """Change batch that takes the letters at these positions away."""
    return pa.table({**_marks(Op.DELETE, len(positions)), POSITION: positions})


def _columns(letters: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {column.name: letters.column(column.name) for column in SHAPE.columns}


def _marks(op: Op, count: int) -> dict[str, pa.Array]:
    return {
        OP: pa.array(np.full(count, int(op), dtype=np.int8)),
        AT: pa.array(np.zeros(count, dtype=np.int64)),
        SEQ: pa.array(np.arange(count, dtype=np.int64)),
    }
