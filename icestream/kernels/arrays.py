"""Arrow arrays as what kernels read, and what kernels wrote as Arrow arrays."""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from icestream.kernels.memory import Bytes

Array = TypeVar("Array", bound=npt.NDArray[Any])
Positions = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
# Arrow's offsets, and the positions that kernels note, are 32 bits wide.
BUFFER_BYTES_MAX = 2**31 - 1


def frozen(array: Array) -> Array:
    """The same array, read-only: numba compiles once more for those that can be written to."""
    array.flags.writeable = False
    return array


def texts_of(array: pa.Array) -> tuple[Bytes, Positions, Mask]:
    """The bytes of an array's texts, where each begins and the last one ends, and which are there.

    Without copying, unless the array is of a type with other offsets. ValueError when the texts are
    larger than `BUFFER_BYTES_MAX`.
    """
    large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    if not (large or pa.types.is_binary(array.type) or pa.types.is_string(array.type)):
        array = array.cast(pa.binary())
    valid = np.ones(len(array), dtype=np.bool_)
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    _, places, content = array.buffers()
    if len(array) == 0 or places is None:
        return frozen(np.zeros(0, np.uint8)), frozen(np.zeros(1, np.int32)), frozen(valid)
    whole = np.frombuffer(places, dtype=np.int64 if large else np.int32)
    offsets: npt.NDArray[Any] = whole[array.offset : array.offset + len(array) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > BUFFER_BYTES_MAX:
        raise ValueError(f"cannot index {last - first} bytes of texts, at most {BUFFER_BYTES_MAX}")
    texts = np.frombuffer(content or b"", dtype=np.uint8)[first:last]
    if first or large:
        offsets = (offsets - first).astype(np.int32)
    return frozen(texts), frozen(offsets), frozen(valid)


def validity(present: npt.NDArray[Any]) -> pa.Buffer | None:
    """Arrow's bitmap of the rows that are there; None when all are."""
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
