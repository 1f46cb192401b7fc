"""All changes of a key in one place: cut by the hash of the key, shuffled, written together.

    split 0 ──► pieces by bucket ══╗
                                   ╠══ shuffle ══► a bucket, whole and in order ──► write
    split 1 ──► pieces by bucket ══╝

An update that a table takes before the insert of the same row leaves two rows or none. So where the
changes of a key may lie in several splits of an epoch, they are brought together first.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icestream.report import Row, encode
from icestream.sinks import Writer
from icestream.sources import Split, TableSplit
from icestream.worker.outcome import errors_as_messages

# A row with changes that are to be brought together by key; every other row is a message.
CHANGES = "changes"

# Changes travel through the shuffle in pieces that neither side has to hold many of.
PIECE_ROWS = 65_536
# Where a piece comes from: task, batch, row. Pieces arrive in any order, and a file must come out
# the same however often its task is run.
_PLACE = struct.Struct(">III")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Which tables' changes must be brought together by key, and in which buckets.

    A table that is not in `starts` has the changes of a key in one split. Bucket 0 carries what is
    not shared by key: reports, and the changes of such tables.
    """

    starts: Mapping[str, int]
    each: int

    def table(self, bucket: int) -> str:
        """The table that a bucket belongs to."""
        return next(t for t, start in self.starts.items() if start <= bucket < start + self.each)


def shares_of(
    splits: Sequence[Split], writer: Writer, key_in_one_split: bool, parallelism: int
) -> Shares:
    """The tables whose changes are brought together by key, each with its buckets.

    None, if the source has all changes of a key in one split. Else the tables with a key that two
    or more splits may have changes of.
    """
    if key_in_one_split:
        return Shares(starts={}, each=parallelism)
    named = Counter(table for split in splits for table in split.tables)
    # A split of many tables may meet more of them than it knows.
    anything = sum(not isinstance(split, TableSplit) for split in splits)
    shared = [
        table
        for table in sorted(writer.tables())
        if named[table] + anything > 1 and writer.key(table)
    ]
    starts = {table: 1 + number * parallelism for number, table in enumerate(shared)}
    return Shares(starts=starts, each=parallelism)


def by_bucket(
    table: str, changes: pa.Table, place: tuple[int, int], key: Sequence[str], shares: Shares
) -> Iterator[Row]:
    """Cut changes by the hash of their key; the pieces travel as Arrow streams.

    `place` is the number of the task and of the batch.
    """
    if changes.num_rows == 0:
        return
    start, buckets = shares.starts[table], shares.each
    hashes = hashes_of(changes, key, buckets)
    order = np.argsort(hashes, kind="stable")
    cuts = np.searchsorted(hashes[order], np.arange(buckets + 1, dtype=np.uint64))
    for bucket in range(buckets):
        indices = order[cuts[bucket] : cuts[bucket + 1]]
        for first in range(0, len(indices), PIECE_ROWS):
            piece = changes.take(pa.array(indices[first : first + PIECE_ROWS]))
            sink = pa.BufferOutputStream()
            sink.write(_PLACE.pack(*place, first))
            with pa.ipc.new_stream(sink, piece.schema) as stream:
                stream.write_table(piece)
            yield CHANGES, start + bucket, sink.getvalue().to_pybytes()


def hashes_of(changes: pa.Table, key: Sequence[str], buckets: int) -> np.ndarray:
    """The bucket of each change: the same for the same key, in whatever batch it is."""
    # Takes seconds to import, and only a worker needs it.
    import pandas as pd

    # Next to a null, pandas would make a whole number a float, with another hash.
    columns = {name: _without_nulls(_numbered(changes.column(name))) for name in key}
    keys = pa.table(columns).to_pandas()
    hashes: np.ndarray = pd.util.hash_pandas_object(keys, index=False).to_numpy()
    return hashes % np.uint64(buckets)


def _numbered(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Days and moments as whole numbers: Python has none before the year 1 or after 9999."""
    if pa.types.is_date32(column.type) or pa.types.is_time32(column.type):
        return column.cast(pa.int32())
    return column.cast(pa.int64()) if pa.types.is_temporal(column.type) else column


def _without_nulls(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return pc.fill_null(column, pa.scalar(0).cast(column.type))
    return column


def write_gathered(rows: Iterator[Row], writer: Writer, shares: Shares) -> Iterator[Row]:
    """Write each bucket's changes once all of them have come; other rows pass by."""
    current, pieces = 0, list[bytes]()
    for kind, bucket, payload in rows:
        if kind != CHANGES:
            yield kind, bucket, payload
            continue
        if bucket != current and pieces:
            yield from _write_bucket(current, pieces, writer, shares)
            pieces = []
        current = bucket
        pieces.append(payload)
    if pieces:
        yield from _write_bucket(current, pieces, writer, shares)


def _write_bucket(
    bucket: int, pieces: list[bytes], writer: Writer, shares: Shares
) -> Iterator[Row]:
    table = shares.table(bucket)

    def write() -> Iterator[Row]:
        streams = [pa.py_buffer(piece).slice(_PLACE.size) for piece in sorted(pieces)]
        batches = [pa.ipc.open_stream(stream).read_all() for stream in streams]
        changes = pa.concat_tables(batches, promote_options="permissive")
        yield from map(encode, writer.write(table, f"b{bucket:05d}", changes))

    # The rows that follow must pass by even if this bucket cannot be written.
    yield from errors_as_messages(write())
