"""Rows as places in a buffer: of an answer to COPY ... (FORMAT binary), and of pgoutput messages.

No place leads out of the buffer, whatever is in it. The buffer must not change while tuples point
into it. What is not a row is refused by `DataRejected`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from icestream.errors import DataRejected
from icestream.kernels import Bytes
from icestream.sources.postgres.values.places import (
    Lengths,
    Positions,
    SentAs,
    new_places,
    readable,
)
from icestream.sources.postgres.values.walk_kernels import count_messages, walk_copy, walk_tuples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuples:
    """Rows as places in one buffer: per column and row where the value is and in which form.

    Made by `copy_tuples` and `tuples_at`, which have checked that no place leads out of it.
    """

    content: Bytes
    starts: Positions
    lengths: Lengths
    forms: Bytes

    def __len__(self) -> int:
        return int(self.starts.shape[1])

    def take(self, indices: npt.NDArray[Any]) -> "Tuples":
        """The rows at these indices, in this order."""
        return Tuples(
            content=self.content,
            starts=np.take(self.starts, indices, axis=1),
            lengths=np.take(self.lengths, indices, axis=1),
            forms=np.take(self.forms, indices, axis=1),
        )


def copy_tuples(raw: Bytes, columns: int, texts: Collection[int] = ()) -> tuple[Tuples, int]:
    """The rows of the whole CopyData messages at the front, and how many bytes they take.

    Ends before the first message that is incomplete or another one. `texts` are the numbers of
    the columns that `copy_expression` selected by their text form.
    """
    content = readable(raw)
    messages, end = count_messages(content)
    if messages < 0:
        raise _damaged_copy()
    places = new_places(columns, messages)
    form_of = np.full(columns, SentAs.BINARY, dtype=np.uint8)
    form_of[list(texts)] = SentAs.TEXT
    rows = walk_copy(content, end, form_of, places)
    if rows < 0:
        raise _damaged_copy()
    starts, lengths, forms = places
    found = Tuples(
        content=content,
        starts=starts[:, :rows],
        lengths=lengths[:, :rows],
        forms=forms[:, :rows],
    )
    return found, int(end)


def tuples_at(content: Bytes, places: Positions, columns: int) -> Tuples:
    """The pgoutput tuples at these places, all of them null where the place is -1.

    A tuple with fewer columns leaves the rest null.
    """
    view = readable(content)
    starts, lengths, forms = found = new_places(columns, len(places))
    wanted = np.ascontiguousarray(places, dtype=np.int64)
    if not walk_tuples(view, wanted, found):
        raise DataRejected(
            "a replication message does not hold the tuple that it should",
            detail=f"It is one of {len(places)} messages with {columns} columns.",
        )
    return Tuples(content=view, starts=starts, lengths=lengths, forms=forms)


def _damaged_copy() -> DataRejected:
    return DataRejected(
        "the answer to COPY is not in binary format",
        detail="A message does not hold exactly one row with the columns that were asked for.",
    )
