"""Binary values as places in one buffer, so that a header is skipped without copying anything."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from icestream.formats.rows import Indices, Mask
from icestream.kernels import Bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payloads:
    """Where each value begins and ends in `content`; `absent` where a record has none.

    Made by `payloads_of`: no place leads out of the buffer, and no value ends before it begins.
    """

    content: Bytes
    starts: Indices
    ends: Indices
    absent: Mask

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Indices) -> "Payloads":
        """The values at these places, in this order."""
        return Payloads(
            content=self.content,
            starts=self.starts[indices],
            ends=self.ends[indices],
            absent=self.absent[indices],
        )

    def beyond(self, starts: Indices) -> "Payloads":
        """The values from these positions on, which must lie inside of them."""
        return Payloads(
            content=self.content,
            starts=np.minimum(starts, self.ends),
            ends=self.ends,
            absent=self.absent,
        )


def payloads_of(values: pa.Array) -> Payloads:
    """The places of an Arrow array of binary values or text, large or not."""
    large = pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)
    _, offsets_buffer, content_buffer = values.buffers()
    if len(values) == 0 or offsets_buffer is None:
        offsets = np.zeros(len(values) + 1, dtype=np.int64)
    else:
        whole = np.frombuffer(offsets_buffer, dtype=np.int64 if large else np.int32)
        offsets = whole[values.offset : values.offset + len(values) + 1].astype(np.int64)
    content = np.frombuffer(content_buffer or b"", dtype=np.uint8)
    absent = values.is_null().to_numpy(zero_copy_only=False)
    return Payloads(content=content, starts=offsets[:-1], ends=offsets[1:], absent=absent)
