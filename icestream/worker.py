"""What a worker does with an epoch: read a split, bring keys together, write files, report.

    split ──read──► changes ──► write                          (all changes of a key in one split)
    split ──read──► changes ──► by key hash ══shuffle══► write  (else)
    split ──read──► columns ──► select ──► as above            (transformed tables)

What a worker tells is typed in `icestream.report`. Errors that a person must decide on are reported
as values: a task that raised them would be retried for nothing and its message lost in Spark's. So
are icestream's own defects. A task reports that it is done only after all its files are reported.
"""

import itertools
import json
import struct
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from icestream import failpoints
from icestream.change import AT, OP, SEQ, Op
from icestream.errors import Broken, DataRejected, IcestreamError, check
from icestream.iceberg.rows import from_spark, to_spark
from icestream.report import Done, Raised, Report, Row, decode, encode, encode_counts
from icestream.schema import SchemaGap, arrow_schema, schema_from_json
from icestream.sinks import Writer
from icestream.sinks.transformed import TransformingWriter
from icestream.sources import (
    ComparedSplit,
    FrameSplit,
    Split,
    TableSplit,
    TablesUnready,
    ValuesNeeded,
    joined_needs,
)
from icestream.sources.iceberg import changelog
from icestream.sources.named_columns import refuse_gone
from icestream.spark import (
    as_retryable,
    as_rows,
    attempt_number,
    run_frame,
    run_tasks,
    task_frame,
)
from icestream.transform import (
    BUCKET,
    CHANGE_AT,
    CHANGE_OP,
    CHANGE_SEQ,
    KIND,
    PAYLOAD,
    ROW,
    TASK,
    Selects,
    struct_name,
)
from icestream.transform.spark_schema import in_arrow

# A row with changes that are to be brought together by key; every other row is a message.
CHANGES = "changes"

# Changes travel through the shuffle in pieces that neither side has to hold many of.
_PIECE_ROWS = 65_536
# One that holds large values has fewer rows: Spark's workers and its JVM hold two at a time.
_PIECE_BYTES = 32 * 1024**2
# Changes whose keys occur once are written when this much has gathered, so that memory is bounded.
_WRITE_BYTES = 256 * 1024**2
# Where a piece comes from: task, batch, row. Pieces arrive in any order, and a file must come out
# the same however often its task is run.
_PLACE = struct.Struct(">III")
# What no second attempt makes go away: the same changes give them again, on every worker.
_DEFECTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
# What a split asks for, and what a person must decide.
_TOLD = (IcestreamError, SchemaGap, TablesUnready, ValuesNeeded)
_FRAMES_SHOWN = 3
# ISO 8601, to the microsecond; a timestamp with a zone is shown in UTC.
_JSON_FORMATS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One split and how it is to be handled."""

    number: int
    split: Split
    writer: Writer
    shares: "Shares"
    typed: "Typed | None" = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
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


class Unready(Exception):
    """The tables do not take an epoch yet: what each split found lacking, columns or tables."""

    def __init__(self, lacks: Sequence[SchemaGap | TablesUnready]):
        super().__init__("; ".join(map(str, lacks)))
        self.lacks = lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all tasks of an epoch reported."""

    reports: Sequence[Report]
    rows: int
    learned: Sequence[object]


def write_epoch(
    spark: SparkSession, splits: Sequence[Split], writer: Writer, keyed: bool, description: str
) -> Outcome:
    """Read and write all splits of an epoch in one Spark job; raises the first error reported.

    What tables lack is reported by all splits before it is raised, as one `Unready`.
    """
    shares = _shares(splits, writer, keyed, spark.sparkContext.defaultParallelism)
    tasks = [
        Task(number=number, split=split, writer=writer, shares=shares)
        for number, split in enumerate(splits)
    ]

    def gather(rows: Iterator[Row]) -> Iterator[Row]:
        return _counted(_write_gathered(rows, writer, shares))

    rows = run_tasks(spark, tasks, _work, gather if shares.starts else None, description)
    return _outcome(rows, len(tasks))


def write_transformed(
    selects: Selects, splits: Sequence[Split], writer: Writer, keyed: bool, description: str
) -> Outcome:
    """Read and write all splits of an epoch, some of whose tables are transformed, in one job.

    Changes of these tables are rows of a frame that the selects are applied to; all else passes by
    as it does in `write_epoch`.
    """
    spark = selects.spark
    if not isinstance(writer, TransformingWriter) or not writer.selects or not splits:
        return write_epoch(spark, splits, writer, keyed, description)
    parallelism = spark.sparkContext.defaultParallelism
    shares = _shares(splits, writer, keyed, parallelism)
    schema = selects.schema(writer.selects)
    tables = [each.table for each in writer.selects]
    typed = Typed(
        tables=tables,
        shared=frozenset(tables).intersection(shares.starts),
        start=1 + len(shares.starts) * parallelism,
        width=max(parallelism, len(splits)),
        once=frozenset(number for number, split in enumerate(splits) if split.each_key_once),
        schema=in_arrow(schema),
    )
    tasks = [
        Task(number=number, split=split, writer=writer, shares=shares, typed=typed)
        for number, split in enumerate(splits)
    ]
    frame = selects.applied(task_frame(spark, tasks, _typed_work, schema), writer.selects)
    if shares.starts:
        together = frame.repartition(parallelism, BUCKET)
        frame = together.sortWithinPartitions(BUCKET, TASK, ROW)

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
        rows = _write_typed(batches, writer, typed)
        return _counted(_write_gathered(rows, writer, shares))

    return _outcome(run_frame(frame, write, description), len(tasks))


def _outcome(rows: Iterable[Row], tasks: int) -> Outcome:
    """What all tasks reported; raises the first error among it."""
    messages = decode(rows)
    errors = [message.error for message in messages if isinstance(message, Raised)]
    for error in errors:
        if isinstance(error, IcestreamError):
            raise error
    needed = [error for error in errors if isinstance(error, ValuesNeeded)]
    lacks = [error for error in errors if isinstance(error, SchemaGap | TablesUnready)]
    check(len(needed) + len(lacks) == len(errors), "a worker tells what the coordinator knows")
    if lacks:
        raise Unready(lacks)
    if needed:
        raise joined_needs(needed)
    done = [message for message in messages if isinstance(message, Done)]
    check(len(done) >= tasks, "every task of the epoch reports that it is done")
    refuse_gone([each.columns_seen for each in done])
    return Outcome(
        reports=[message for message in messages if isinstance(message, Report)],
        rows=sum(each.rows for each in done),
        learned=[each.learned for each in done],
    )


def _told(work: Iterator[Any]) -> Iterator[Any]:
    """What a task gives; an error that no second attempt makes go away is its last message."""
    try:
        yield from work
    except _TOLD as error:
        yield encode(Raised(error))
    except _DEFECTS as error:
        yield encode(Raised(_broken(error)))


def _counted(work: Iterator[Any]) -> Iterator[Any]:
    """What a task gives, and then what it has counted."""
    yield from work
    yield from encode_counts()


def write_events(
    spark: SparkSession,
    splits: Sequence[FrameSplit],
    writer: Writer,
    keyed: bool,
    description: str,
) -> Outcome:
    """Have the events of frames written as documents by workers; raises the first error reported.

    Spark makes the documents, so that they reach the writer as columns of ready text.
    """
    outcomes = []
    for split in splits:
        try:
            with as_retryable(f"could not read the changes of table {split.table}"):
                frame = split.frame()
            if frame is None:
                continue
            send = partial(_send, split.table, split.identified, writer)
            rows = run_frame(_documents(frame, split.version), send, description)
            outcomes.append(_outcome(rows, 0))
        finally:
            split.close()
    reports = [report for outcome in outcomes for report in outcome.reports]
    return Outcome(reports=reports, rows=sum(each.rows for each in outcomes), learned=[])


def events_as_json(events: DataFrame) -> Iterator[dict[str, Any]]:
    """Events as plain data, one after the other; only a part of them is held at a time."""
    exact = F.col(changelog.ROW).cast(_exact_in_json(events.schema[changelog.ROW].dataType))
    whole = F.struct(*events.drop(changelog.ROW).columns, exact.alias(changelog.ROW))
    texts = events.select(F.to_json(whole, {**_JSON_FORMATS, "ignoreNullFields": "false"}))
    for line in texts.toLocalIterator():
        yield json.loads(line[0])


def _documents(events: DataFrame, version: int) -> DataFrame:
    """Events as what a writer of documents takes: operation, version, id and the row as JSON."""
    deleted = F.col(changelog.ACTION) == changelog.DELETE
    added = F.col(changelog.OPERATION) == changelog.INSERT
    op = F.when(deleted, int(Op.DELETE)).when(added, int(Op.INSERT)).otherwise(int(Op.UPSERT))
    row = F.col(changelog.ROW)
    kind = events.schema[changelog.ROW].dataType
    text = F.to_json(row.cast(_exact_in_json(kind)), _JSON_FORMATS)
    return events.select(
        op.cast("tinyint").alias("op"),
        F.lit(version).cast("long").alias("at"),
        F.col(changelog.DOCUMENT_ID).alias("id"),
        F.when(~deleted, text).alias("document"),
    )


def _exact_in_json(kind: T.DataType) -> T.DataType:
    """The same type with decimals as text: who reads a JSON number may round it."""
    if isinstance(kind, T.DecimalType):
        return T.StringType()
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_exact_in_json(kind.elementType), kind.containsNull)
    if isinstance(kind, T.MapType):
        values = _exact_in_json(kind.valueType)
        return T.MapType(_exact_in_json(kind.keyType), values, kind.valueContainsNull)
    if isinstance(kind, T.StructType):
        fields = [T.StructField(f.name, _exact_in_json(f.dataType), f.nullable) for f in kind]
        return T.StructType(fields)
    return kind


def _send(
    table: str, identified: bool, writer: Writer, batches: Iterable[pa.RecordBatch]
) -> Iterator[Row]:
    """Everything that happens to one partition of documents on its worker."""
    if attempt_number() == 0:
        failpoints.reach(failpoints.IN_WORKER)
    return _counted(_told(_send_batches(table, identified, writer, batches)))


def _send_batches(
    table: str, identified: bool, writer: Writer, batches: Iterable[pa.RecordBatch]
) -> Iterator[Row]:
    read = 0
    for number, batch in enumerate(batches):
        changes = pa.table(batch.columns, names=[OP, AT, "id", "document"])
        _refuse_nameless(table, identified, changes)
        read += changes.num_rows
        if changes.num_rows:
            yield from map(encode, writer.write(table, f"{number}", changes, each_key_once=True))
    yield encode(Done(rows=read))


def _refuse_nameless(table: str, identified: bool, changes: pa.Table) -> None:
    """A change that does not say which row it belongs to must not be lost in silence."""
    nameless = changes.column("id").is_null()
    if identified:
        if pc.any(nameless).as_py():
            raise DataRejected(
                f"a row of table {table} has no identifier",
                detail="Its identifier column is null, or it has no row id yet.",
                hint="Choose identifier columns that are never null.",
            )
    elif pc.any(pc.equal(changes.column(OP), int(Op.DELETE))).as_py():
        raise DataRejected(
            f"a row of table {table} was deleted or updated, and nothing says which document it is",
            detail="The table has no identifier columns and no row ids.",
            hint="Set `identifier_columns` of the table, or upgrade it to format version 3.",
        )


def _shares(splits: Sequence[Split], writer: Writer, keyed: bool, parallelism: int) -> Shares:
    """Tables whose changes lie in one split need no shuffle, whatever the source promises."""
    if keyed:
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


def _work(task: Task, columns: "_Columns | None" = None) -> Iterator[Any]:
    """Everything that happens to one split on its worker: rows, and batches of `columns`."""
    if attempt_number() == 0:
        failpoints.reach(failpoints.IN_WORKER)
    return _counted(_told(_read_and_write(task, columns)))


def _read_and_write(task: Task, columns: "_Columns | None") -> Iterator[Any]:
    read, gathered = 0, 0
    pieces: dict[str, list[pa.Table]] = {}
    for batch, (table, changes) in enumerate(task.split.changes(task.writer)):
        read += changes.num_rows
        if columns is not None and columns.takes(table):
            yield from columns.batches(table, changes)
        elif table in task.shares.starts:
            yield from _by_bucket(table, changes, batch, task)
        elif changes.num_rows:
            pieces.setdefault(table, []).append(changes)
            gathered += changes.nbytes
        if task.split.each_key_once and gathered >= _WRITE_BYTES:
            yield from _write(task, f"{task.number:05d}.{batch}", pieces)
            pieces, gathered = {}, 0
    yield from _write(task, f"{task.number:05d}", pieces)
    seen = task.split.columns_seen() if isinstance(task.split, ComparedSplit) else {}
    yield encode(Done(rows=read, learned=task.split.learned(), columns_seen=seen))


def _write(task: Task, shard: str, pieces: Mapping[str, Sequence[pa.Table]]) -> Iterator[Row]:
    """Write changes that need no others of their keys."""
    once = task.split.each_key_once
    for table, changes in pieces.items():
        together = pa.concat_tables(changes, promote_options="permissive")
        yield from map(encode, task.writer.write(table, shard, together, once))


def _by_bucket(table: str, changes: pa.Table, batch: int, task: Task) -> Iterator[Row]:
    """Cut changes by the hash of their key; the pieces travel as Arrow streams."""
    if changes.num_rows == 0:
        return
    start, buckets = task.shares.starts[table], task.shares.each
    hashes = _hashes(changes, task.writer.key(table), buckets)
    order = np.argsort(hashes, kind="stable")
    cuts = np.searchsorted(hashes[order], np.arange(buckets + 1, dtype=np.uint64))
    for bucket in range(buckets):
        indices = order[cuts[bucket] : cuts[bucket + 1]]
        for first in range(0, len(indices), _PIECE_ROWS):
            piece = changes.take(pa.array(indices[first : first + _PIECE_ROWS]))
            sink = pa.BufferOutputStream()
            sink.write(_PLACE.pack(task.number, batch, first))
            with pa.ipc.new_stream(sink, piece.schema) as stream:
                stream.write_table(piece)
            yield CHANGES, start + bucket, sink.getvalue().to_pybytes()


def _hashes(changes: pa.Table, key: Sequence[str], buckets: int) -> np.ndarray:
    # Next to a null, pandas would make a whole number a float, with another hash.
    columns = {name: _without_nulls(changes.column(name)) for name in key}
    keys = pa.table(columns).to_pandas()
    hashes: np.ndarray = pd.util.hash_pandas_object(keys, index=False).to_numpy()
    return hashes % np.uint64(buckets)


def _without_nulls(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return pc.fill_null(column, pa.scalar(0).cast(column.type))
    return column


def _typed_work(task: Task) -> Iterator[pa.RecordBatch]:
    """What happens to one split, as rows of the frame that selects are applied to."""
    columns = _Columns(task)
    for each in _work(task, columns):
        yield each if isinstance(each, pa.RecordBatch) else columns.passing(each)


class _Columns:
    """The changes of one split's transformed tables as rows of a wide frame."""

    def __init__(self, task: Task):
        assert task.typed is not None
        self._task = task
        self._typed = task.typed
        self._rows = 0

    def takes(self, table: str) -> bool:
        """Whether the table's changes go this way."""
        return table in self._typed.tables

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
        typed, number = self._typed, self._task.number
        local = np.full(changes.num_rows, number)
        if table in typed.shared:
            local = _hashes(changes, self._task.writer.key(table), self._task.shares.each)
        places = np.arange(self._rows, self._rows + changes.num_rows)
        self._rows += changes.num_rows
        struct = struct_name(typed.tables.index(table))
        whole = pa.table(
            {
                TASK: pa.array(np.full(changes.num_rows, number), pa.int32()),
                BUCKET: pa.array(local.astype(np.int32) + typed.bucket(table, 0), pa.int32()),
                ROW: pa.array(places, pa.int64()),
                CHANGE_OP: changes.column(OP).cast(pa.int8()),
                CHANGE_AT: changes.column(AT).cast(pa.int64()),
                CHANGE_SEQ: changes.column(SEQ).cast(pa.int64()),
                struct: self._struct(table, changes, typed.schema.field(struct).type),
            }
        )
        row_bytes = max(1, changes.nbytes // changes.num_rows)
        rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES // row_bytes))
        for piece in whole.to_batches(max_chunksize=rows):
            named = dict(zip(whole.column_names, piece.columns, strict=True))
            yield self._batch(piece.num_rows, named)

    def _struct(self, table: str, changes: pa.Table, kind: pa.StructType) -> pa.ChunkedArray:
        """The changes' columns in the types that Spark has for them; what is absent is null."""
        fields = schema_from_json(self._task.writer.schema_json(table)).fields
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
            for field in self._typed.schema
        ]
        return pa.record_batch(arrays, schema=self._typed.schema)


def _write_typed(
    batches: Iterable[pa.RecordBatch], writer: TransformingWriter, typed: Typed
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
            number = (bucket - typed.start) % typed.width
            if number != current:
                yield from _write_held(held, "", writer, typed)
                held, current, size, part = {}, number, 0, 0
            held.setdefault(bucket, []).append(run)
            if _piecemeal(bucket, typed):
                size += run.nbytes
            if size >= _WRITE_BYTES:
                whole = {bucket: runs for bucket, runs in held.items() if _piecemeal(bucket, typed)}
                yield from _write_held(whole, f".{part}", writer, typed)
                held = {bucket: runs for bucket, runs in held.items() if bucket not in whole}
                size, part = 0, part + 1
    yield from _write_held(held, "", writer, typed)


def _write_held(
    held: Mapping[int, Sequence[pa.RecordBatch]],
    suffix: str,
    writer: TransformingWriter,
    typed: Typed,
) -> Iterator[Row]:
    for bucket, runs in held.items():
        yield from _write_selected(bucket, runs, suffix, writer, typed)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch in runs of one bucket; bucket 0 is for what is not shared by key."""
    if batch.num_rows == 0:
        return
    typed = pc.is_null(batch.column(KIND)).to_numpy(zero_copy_only=False)
    buckets = np.where(typed, batch.column(BUCKET).to_numpy(zero_copy_only=False), 0)
    cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), batch.num_rows]
    for first, last in itertools.pairwise(cuts):
        yield int(buckets[first]), batch.slice(first, last - first)


def _piecemeal(bucket: int, typed: Typed) -> bool:
    """Whether a bucket's changes may be written in parts, because no key is in two of them."""
    place, number = divmod(bucket - typed.start, typed.width)
    return typed.tables[place] not in typed.shared and number in typed.once


def _write_selected(
    bucket: int,
    pieces: Sequence[pa.RecordBatch],
    suffix: str,
    writer: TransformingWriter,
    typed: Typed,
) -> Iterator[Row]:
    place, number = divmod(bucket - typed.start, typed.width)
    table = typed.tables[place]
    shard = f"b{bucket:05d}" if table in typed.shared else f"{number:05d}{suffix}"

    def write() -> Iterator[Row]:
        changes = _selected(pieces, place, writer)
        yield from map(encode, writer.write(table, shard, changes, _piecemeal(bucket, typed)))

    # The rows that follow must pass by even if this table cannot be written.
    yield from _told(write())


def _selected(pieces: Sequence[pa.RecordBatch], place: int, writer: TransformingWriter) -> pa.Table:
    """The rows of a table's select as a change batch in the table's types."""
    rows = pa.Table.from_batches(pieces)
    select = writer.selects[place]
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
        columns[name] = _aligned(columns[name])
    return pa.table(columns)


def _aligned(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A copy: Spark's buffers are unaligned, and Arrow cannot group by such a column."""
    parts = [part.take(pa.array(np.arange(len(part)))) for part in column.chunks]
    return pa.chunked_array(parts, column.type)


def _write_gathered(rows: Iterator[Row], writer: Writer, shares: Shares) -> Iterator[Row]:
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
    yield from _told(write())


def _broken(error: Exception) -> Broken:
    """Where a worker broke; what the error says is left out, for it may quote a row."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return Broken(
        "a worker met an error that nobody foresaw",
        detail=f"{type(error).__name__} at {', '.join(places)}.",
        hint="Nothing of the epoch was committed. Please report this as a defect of icestream.",
    )


def map_tasks(spark: SparkSession, tasks: Sequence["Runnable"]) -> list[object]:
    """Run small tasks of a source's own on workers and return their results, in any order."""
    rows = run_tasks(spark, tasks, _run, description="index")
    return list(_outcome(rows, len(tasks)).learned)


class Runnable(Protocol):
    """A picklable piece of work."""

    def run(self) -> object:
        """Do it, on a worker."""
        ...


def _run(task: Runnable) -> Iterator[Row]:
    def run() -> Iterator[Row]:
        yield encode(Done(learned=task.run()))

    return _counted(_told(run()))
