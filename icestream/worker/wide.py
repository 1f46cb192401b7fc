"""The wide frame: changes of tables that pass a select, or become documents, as columns in Spark.

    split ──read──► rows of a wide frame ──select──► ──documents──► by key ──► write

One frame has the changes of all such tables, each table's columns in a struct of their own; all
else that tasks give (reports, changes of other tables) passes by in the same frame. So an epoch is
one Spark job, however many tables it has.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from icestream.change import AT, OP, SEQ, Op, last_of_each
from icestream.documents import DOCUMENT, ID, document_id, numbered_document
from icestream.errors import DataRejected
from icestream.iceberg.rows import from_spark, to_spark
from icestream.report import Row, encode
from icestream.schema import arrow_schema, schema_from_json
from icestream.sinks import SelectingWriter, Writer, WritesDocuments
from icestream.spark import as_rows
from icestream.transform import (
    BUCKET,
    CHANGE_AT,
    CHANGE_OP,
    CHANGE_SEQ,
    KIND,
    PAYLOAD,
    ROW,
    TASK,
    TableSelect,
    struct_name,
)
from icestream.worker.by_key import PIECE_ROWS, Shares, hashes_of
from icestream.worker.outcome import errors_as_messages

# A piece that holds large values has fewer rows: Spark's workers and its JVM hold two at a time.
_PIECE_BYTES = 32 * 1024**2
# Changes whose keys occur once are written when this much has gathered, so that memory is bounded.
WRITE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class WideFrame:
    """Tables whose changes pass through Spark as columns, each in a struct of one wide frame.

    Each table has `width` buckets from `start` on: those in `shared` have their changes brought
    together by key, the others have a bucket for each split. `once` are splits with each key once.
    """

    tables: Sequence[str]
    shared: frozenset[str]
    start: int
    width: int
    once: frozenset[int]
    schema: pa.Schema

    def bucket(self, table: str, number: int) -> int:
        """A bucket of the table's own."""
        return self.start + self.tables.index(table) * self.width + number


class WideRows:
    """The changes of one split's tables as rows of the wide frame, batch by batch."""

    def __init__(self, number: int, writer: Writer, shares: Shares, wide: WideFrame):
        self._number = number
        self._writer = writer
        self._shares = shares
        self._wide = wide
        self._rows = 0

    def takes(self, table: str) -> bool:
        """Whether the table's changes go this way."""
        return table in self._wide.tables

    def passing(self, row: Row) -> pa.RecordBatch:
        """A row that only passes by."""
        kind, bucket, payload = row
        columns = {
            KIND: pa.array([kind]),
            BUCKET: pa.array([bucket], pa.int32()),
            PAYLOAD: pa.array([payload], pa.binary()),
        }
        return self._batch(1, columns)

    def batches(self, table: str, changes: pa.Table) -> Iterator[pa.RecordBatch]:
        """The changes in pieces that neither side has to hold many of."""
        if changes.num_rows == 0:
            return
        wide, number = self._wide, self._number
        local = np.full(changes.num_rows, number)
        if table in wide.shared:
            local = hashes_of(changes, self._writer.key(table), self._shares.each)
        places = np.arange(self._rows, self._rows + changes.num_rows)
        self._rows += changes.num_rows
        struct = struct_name(wide.tables.index(table))
        whole = pa.table(
            {
                TASK: pa.array(np.full(changes.num_rows, number), pa.int32()),
                BUCKET: pa.array(local.astype(np.int32) + wide.bucket(table, 0), pa.int32()),
                ROW: pa.array(places, pa.int64()),
                CHANGE_OP: changes.column(OP).cast(pa.int8()),
                CHANGE_AT: changes.column(AT).cast(pa.int64()),
                CHANGE_SEQ: changes.column(SEQ).cast(pa.int64()),
                struct: self._struct(table, changes, wide.schema.field(struct).type),
            }
        )
        row_bytes = max(1, changes.nbytes // changes.num_rows)
        rows = max(1, min(PIECE_ROWS, _PIECE_BYTES // row_bytes))
        for piece in whole.to_batches(max_chunksize=rows):
            named = dict(zip(whole.column_names, piece.columns, strict=True))
            yield self._batch(piece.num_rows, named)

    def _struct(self, table: str, changes: pa.Table, kind: pa.StructType) -> pa.ChunkedArray:
        """The changes' columns in the types that Spark has for them; what is absent is null."""
        fields = schema_from_json(self._writer.schema_json(table)).fields
        there = set(changes.column_names)
        parts = [
            to_spark(changes.column(field.name), inner.type)
            if field.name in there
            else pa.chunked_array([pa.nulls(changes.num_rows, inner.type)])
            for field, inner in zip(fields, kind, strict=True)
        ]
        # Columns may be cut into chunks at different places; batches are cut alike.
        batches = pa.table(parts, names=[inner.name for inner in kind]).to_batches()
        return pa.chunked_array([b.to_struct_array() for b in batches], kind)

    def _batch(self, rows: int, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in self._wide.schema
        ]
        return pa.record_batch(arrays, schema=self._wide.schema)


def write_wide(
    batches: Iterable[pa.RecordBatch], writer: SelectingWriter, wide: WideFrame
) -> Iterator[Row]:
    """Write what selects made of changes, bucket by bucket; other rows pass by.

    Without a shuffle the buckets of one split come in turn, as its tables do. Each is written when
    the split has ended, which the bucket of another one shows.
    """
    held, current, size, part = dict[int, list[pa.RecordBatch]](), -1, 0, 0
    for batch in batches:
        for bucket, run in _runs(batch):
            if not bucket:
                yield from as_rows([run])
                continue
            number = (bucket - wide.start) % wide.width
            if number != current:
                yield from _write_held(held, "", writer, wide)
                held, current, size, part = {}, number, 0, 0
            held.setdefault(bucket, []).append(run)
            if _piecemeal(bucket, wide):
                size += run.nbytes
            if size >= WRITE_BYTES:
                whole = {bucket: runs for bucket, runs in held.items() if _piecemeal(bucket, wide)}
                yield from _write_held(whole, f".{part}", writer, wide)
                held = {bucket: runs for bucket, runs in held.items() if bucket not in whole}
                size, part = 0, part + 1
    yield from _write_held(held, "", writer, wide)


def _write_held(
    held: Mapping[int, Sequence[pa.RecordBatch]],
    suffix: str,
    writer: SelectingWriter,
    wide: WideFrame,
) -> Iterator[Row]:
    for bucket, runs in held.items():
        yield from _write_selected(bucket, runs, suffix, writer, wide)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch in runs of one bucket; bucket 0 is for what is not shared by key."""
    if batch.num_rows == 0:
        return
    changes = pc.is_null(batch.column(KIND)).to_numpy(zero_copy_only=False)
    buckets = np.where(changes, batch.column(BUCKET).to_numpy(zero_copy_only=False), 0)
    cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), batch.num_rows]
    for first, last in itertools.pairwise(cuts):
        yield int(buckets[first]), batch.slice(first, last - first)


def _piecemeal(bucket: int, wide: WideFrame) -> bool:
    """Whether a bucket's changes may be written in parts, because no key is in two of them."""
    place, number = divmod(bucket - wide.start, wide.width)
    return wide.tables[place] not in wide.shared and number in wide.once


def _write_selected(
    bucket: int,
    pieces: Sequence[pa.RecordBatch],
    suffix: str,
    writer: SelectingWriter,
    wide: WideFrame,
) -> Iterator[Row]:
    place, number = divmod(bucket - wide.start, wide.width)
    table = wide.tables[place]
    shard = f"b{bucket:05d}" if table in wide.shared else f"{number:05d}{suffix}"

    def write() -> Iterator[Row]:
        once = _piecemeal(bucket, wide)
        changes = _selected(pieces, place, writer, once)
        yield from map(encode, writer.write(table, shard, changes, once))

    # The rows that follow must pass by even if this table cannot be written.
    yield from errors_as_messages(write())


def _selected(
    pieces: Sequence[pa.RecordBatch], place: int, writer: SelectingWriter, once: bool
) -> pa.Table:
    """The rows of a table's select as a change batch in the table's types, or as documents."""
    rows = pa.Table.from_batches(pieces)
    select = writer.selects[place]
    if isinstance(writer.inner, WritesDocuments):
        return _documents(rows, place, select.table, writer.inner.version, once)
    fields = arrow_schema(schema_from_json(writer.inner.schema_json(select.table)))
    columns = {
        OP: rows.column(CHANGE_OP),
        AT: rows.column(CHANGE_AT),
        SEQ: rows.column(CHANGE_SEQ),
    }
    structs = rows.column(struct_name(place)).chunks
    for number, name in enumerate(select.outputs):
        parts = pa.chunked_array([pc.struct_field(struct, [number]) for struct in structs])
        columns[name] = from_spark(parts, fields.field(name).type, by_name=True)
    for name in select.key:
        columns[name] = aligned(columns[name])
    return pa.table(columns)


def _documents(rows: pa.Table, place: int, table: str, version: int, once: bool) -> pa.Table:
    """Documents that Spark has made, the last of each id, all of the epoch's version."""
    structs = rows.column(struct_name(place)).chunks
    ids, texts = (
        pa.chunked_array([pc.struct_field(struct, [number]) for struct in structs])
        for number in range(2)
    )
    refuse_null_ids(table, ids)
    changes = pa.table(
        {
            OP: rows.column(CHANGE_OP),
            AT: rows.column(CHANGE_AT),
            SEQ: rows.column(CHANGE_SEQ),
            ID: aligned(ids),
            # More than 2 GiB of text may come together.
            DOCUMENT: texts.cast(pa.large_string()),
        }
    )
    last = changes if once else last_of_each(changes, [ID])
    at = pa.array(np.full(last.num_rows, version), pa.int64())
    return last.set_column(last.column_names.index(AT), AT, at)


def refuse_null_ids(table: str, ids: pa.ChunkedArray) -> None:
    """Raise `DataRejected` for a row whose key is null."""
    if ids.null_count:
        raise DataRejected(
            f"a row of table {table} has no identifier",
            detail="Its identifier column is null, or it has no row id yet.",
            hint="Choose identifier columns that are never null.",
        )


def as_documents(frame: DataFrame, selects: Sequence[TableSelect]) -> DataFrame:
    """The wide frame with an id and a document in each table's struct; a delete has no document.

    The struct has the columns of the table's select. The id is made of those of the key.
    """
    changed = {name: F.col(name) for name in frame.columns}
    for place, each in enumerate(selects):
        name = struct_name(place)
        struct, kind = F.col(name), frame.schema[name].dataType
        assert isinstance(kind, T.StructType)
        places = [list(each.outputs).index(column) for column in each.key]
        key = [(struct.getField(f"f{n}"), kind.fields[n].dataType) for n in places]
        text = numbered_document(struct, kind, each.outputs)
        alive = F.col(CHANGE_OP) != int(Op.DELETE)
        both = F.struct(document_id(key).alias(ID), F.when(alive, text).alias(DOCUMENT))
        changed[name] = F.when(struct.isNotNull(), both)
    return frame.select(*(column.alias(name) for name, column in changed.items()))


def aligned(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A copy: Spark's buffers are unaligned, and Arrow cannot group by such a column."""
    parts = [part.take(pa.array(np.arange(len(part)))) for part in column.chunks]
    return pa.chunked_array(parts, column.type)
