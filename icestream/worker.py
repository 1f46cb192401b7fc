"""What a worker does with an epoch: read a split, bring keys together, write files, report.

    split ──read──► changes ──► write                          (all changes of a key in one split)
    split ──read──► changes ──► by key hash ══shuffle══► write  (else)

Errors that a person must decide on are reported as values: a task that raised them would be
retried for nothing and its message lost in Spark's. So are icestream's own defects. A task reports
that it is done only after all its files are reported.
"""

import json
import pickle
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
from icestream.change import AT, OP, Op
from icestream.errors import Broken, DataRejected, IcestreamError, check
from icestream.schema import SchemaGap
from icestream.sinks import Writer
from icestream.sources import FrameSplit, Need, Split, TableSplit, TablesUnready, ValuesNeeded
from icestream.sources.iceberg import changelog
from icestream.spark import Row, attempt_number, run_frame, run_tasks

FILE = "file"
DONE = "done"
ERROR = "error"
CHANGES = "changes"
NEEDED = "needed"
LACKS = "lacks"

# Changes travel through the shuffle in pieces that neither side has to hold many of.
_PIECE_ROWS = 65_536
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Which tables' changes must be brought together by key, and in which buckets.

    A table that is not in `starts` has the changes of a key in one split. Bucket zero is for rows
    that only pass by.
    """

    starts: Mapping[str, int]
    each: int

    def table(self, bucket: int) -> str:
        """The table that a bucket belongs to."""
        return next(t for t, start in self.starts.items() if start <= bucket < start + self.each)


class Unready(Exception):
    """The tables do not take an epoch yet: what each split found lacking, columns or tables."""

    def __init__(self, lacks: Sequence[SchemaGap | TablesUnready]):
        super().__init__("; ".join(map(str, lacks)))
        self.lacks = lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all tasks of an epoch reported."""

    reports: Sequence[str]
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
        return _write_gathered(rows, writer, shares)

    rows = run_tasks(spark, tasks, _work, gather if shares.starts else None, description)
    reports, learned, needed, lacks, read, done = [], [], [], [], 0, 0
    for kind, _, payload in rows:
        if kind == ERROR:
            raise pickle.loads(payload)
        if kind == NEEDED:
            needed.append(pickle.loads(payload))
        if kind == LACKS:
            lacks.append(pickle.loads(payload))
        if kind == FILE:
            reports.append(payload.decode())
        if kind == DONE:
            report = pickle.loads(payload)
            read, done = read + report["rows"], done + 1
            learned.append(report["learned"])
    if lacks:
        raise Unready(lacks)
    if needed:
        raise _together(needed)
    check(done >= len(tasks), "every task of the epoch reports that it is done")
    return Outcome(reports=reports, rows=read, learned=learned)


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
    reports, read = [], 0
    for split in splits:
        try:
            frame = split.frame()
            if frame is None:
                continue
            send = partial(_send, split.table, split.identified, writer)
            for kind, _, payload in run_frame(_documents(frame, split.version), send, description):
                if kind == ERROR:
                    raise pickle.loads(payload)
                if kind == FILE:
                    reports.append(payload.decode())
                if kind == DONE:
                    read += pickle.loads(payload)
        finally:
            split.close()
    return Outcome(reports=reports, rows=read, learned=[])


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
    row = F.col(changelog.ROW)
    kind = events.schema[changelog.ROW].dataType
    text = F.to_json(row.cast(_exact_in_json(kind)), _JSON_FORMATS)
    return events.select(
        F.when(deleted, int(Op.DELETE)).otherwise(int(Op.UPSERT)).cast("tinyint").alias("op"),
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
    read = 0
    try:
        for number, batch in enumerate(batches):
            changes = pa.table(batch.columns, names=[OP, AT, "id", "document"])
            _refuse_nameless(table, identified, changes)
            read += changes.num_rows
            if changes.num_rows:
                for report in writer.write(table, f"{number}", changes, each_key_once=True):
                    yield FILE, 0, report.encode()
        yield DONE, 0, pickle.dumps(read)
    except IcestreamError as error:
        yield ERROR, 0, pickle.dumps(error)
    except _DEFECTS as error:
        yield ERROR, 0, pickle.dumps(_broken(error))


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


def _together(needed: Sequence[ValuesNeeded]) -> ValuesNeeded:
    """What all splits ask for, each table once."""
    by_table: dict[str, list[Need]] = {}
    for need in (need for each in needed for need in each.needs):
        by_table.setdefault(need.table, []).append(need)
    together = []
    for table, own in sorted(by_table.items()):
        columns = sorted({column for need in own for column in need.columns})
        keys = pa.concat_tables([need.keys for need in own], promote_options="permissive")
        together.append(Need(table=table, keys=keys, columns=columns))
    return ValuesNeeded(*together)


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


def _work(task: Task) -> Iterator[Row]:
    """Everything that happens to one split on its worker."""
    if attempt_number() == 0:
        failpoints.reach(failpoints.IN_WORKER)
    try:
        read, gathered = 0, 0
        pieces: dict[str, list[pa.Table]] = {}
        for batch, (table, changes) in enumerate(task.split.changes(task.writer)):
            read += changes.num_rows
            if table in task.shares.starts:
                yield from _by_bucket(table, changes, batch, task)
            elif changes.num_rows:
                pieces.setdefault(table, []).append(changes)
                gathered += changes.nbytes
            if task.split.each_key_once and gathered >= _WRITE_BYTES:
                yield from _write(task, f"{task.number:05d}.{batch}", pieces)
                pieces, gathered = {}, 0
        yield from _write(task, f"{task.number:05d}", pieces)
        yield DONE, 0, pickle.dumps({"rows": read, "learned": task.split.learned()})
    except ValuesNeeded as need:
        yield NEEDED, 0, pickle.dumps(need)
    except (SchemaGap, TablesUnready) as lack:
        yield LACKS, 0, pickle.dumps(lack)
    except IcestreamError as error:
        yield ERROR, 0, pickle.dumps(error)
    except _DEFECTS as error:
        yield ERROR, 0, pickle.dumps(_broken(error))


def _write(task: Task, shard: str, pieces: Mapping[str, Sequence[pa.Table]]) -> Iterator[Row]:
    """Write changes that need no others of their keys."""
    once = task.split.each_key_once
    for table, changes in pieces.items():
        together = pa.concat_tables(changes, promote_options="permissive")
        for report in task.writer.write(table, shard, together, once):
            yield FILE, 0, report.encode()


def _by_bucket(table: str, changes: pa.Table, batch: int, task: Task) -> Iterator[Row]:
    """Cut changes by the hash of their key; the pieces travel as Arrow streams."""
    if changes.num_rows == 0:
        return
    start, buckets = task.shares.starts[table], task.shares.each
    keys = changes.select(list(task.writer.key(table))).to_pandas()
    hashes = pd.util.hash_pandas_object(keys, index=False).to_numpy() % np.uint64(buckets)
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
    try:
        streams = [pa.py_buffer(piece).slice(_PLACE.size) for piece in sorted(pieces)]
        batches = [pa.ipc.open_stream(stream).read_all() for stream in streams]
        changes = pa.concat_tables(batches, promote_options="permissive")
        for report in writer.write(table, f"b{bucket:05d}", changes):
            yield FILE, 0, report.encode()
    except IcestreamError as error:
        yield ERROR, 0, pickle.dumps(error)
    except _DEFECTS as error:
        yield ERROR, 0, pickle.dumps(_broken(error))


def _broken(error: Exception) -> Broken:
    """Where a worker broke; what the error says is left out, for it may quote a row."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return Broken(
        "a worker met an error that nobody foresaw",
        detail=f"{type(error).__name__} at {', '.join(places)}.",
        hint="Nothing of the epoch was committed. Please report this as a defect of icestream.",
    )


def describe(reports: Sequence[str]) -> dict[str, int]:
    """Counts of what was reported, for the log."""
    files = [json.loads(report) for report in reports]
    return {
        "files": len(files),
        "rows": sum(file["record_count"] for file in files),
        "bytes": sum(file["size_bytes"] for file in files),
    }


def map_tasks(spark: SparkSession, tasks: Sequence["Runnable"]) -> list[object]:
    """Run small tasks of a source's own on workers and return their results, in any order."""
    results = []
    for kind, _, payload in run_tasks(spark, tasks, _run, description="index"):
        value = pickle.loads(payload)
        if kind == ERROR:
            raise value
        results.append(value)
    return results


class Runnable(Protocol):
    """A picklable piece of work."""

    def run(self) -> object:
        """Do it, on a worker."""
        ...


def _run(task: Runnable) -> Iterator[Row]:
    try:
        yield DONE, 0, pickle.dumps(task.run())
    except IcestreamError as error:
        yield ERROR, 0, pickle.dumps(error)
    except _DEFECTS as error:
        yield ERROR, 0, pickle.dumps(_broken(error))
