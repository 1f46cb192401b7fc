"""Dead letters: rows of a source that no table takes, kept in a table beside theirs.

A table `<table>__dead_letters` is like any other: its rows belong to the epoch of the source that
they were found in, and are committed with it. Nothing of a row depends on when it was read, so a
task that runs twice writes the same file twice.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.types import BinaryType, StringType, TimestamptzType

from icestream.change import AT, OP, SEQ, Op
from icestream.schema import Column, TableShape

SUFFIX = "__dead_letters"
SHAPE = TableShape(
    columns=[
        Column(name="position", type=StringType()),
        Column(name="error", type=StringType()),
        Column(name="key", type=BinaryType()),
        Column(name="payload", type=BinaryType()),
        Column(name="at", type=TimestamptzType()),
    ],
    key=[],
)
_MICROSECONDS = 1000


def table_of(table: str) -> str:
    """The name of a table's dead letters."""
    return f"{table}{SUFFIX}"


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
            OP: pa.array(np.full(count, int(Op.INSERT), dtype=np.int8)),
            AT: pa.array(np.zeros(count, dtype=np.int64)),
            SEQ: pa.array(np.arange(count, dtype=np.int64)),
            "position": pa.array(positions, pa.large_string()),
            "error": pa.array(errors, pa.large_string()),
            "key": keys.cast(pa.large_binary()),
            "payload": payloads.cast(pa.large_binary()),
            "at": times.cast(pa.timestamp("us", tz="UTC")),
        }
    )
