"""Where values lie in a buffer, and in which form: what walks write and decoding reads."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from icestream.kernels import Bytes

Positions = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
# What the kernels see of one column: starts, lengths and forms.
Places = tuple[Positions, Lengths, Bytes]


class SentAs(IntEnum):
    """How a value was sent; `UNSENT` is a large value that an update did not touch."""

    NULL = 0
    TEXT = 1
    BINARY = 2
    UNSENT = 3


def new_places(columns: int, rows: int) -> Places:
    """Room for the places of so many values."""
    return (
        np.empty((columns, rows), dtype=np.int64),
        np.empty((columns, rows), dtype=np.int32),
        np.empty((columns, rows), dtype=np.uint8),
    )


def readable(content: Bytes) -> Bytes:
    """A buffer as all kernels take it."""
    # Numba compiles once more for writable arrays, so all buffers look read-only to it.
    view = np.ascontiguousarray(content).view()
    view.flags.writeable = False
    return view
