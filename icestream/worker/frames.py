"""Parts that are Spark frames: their changes come out of relational work, not of a reader.

    frame (op, id, row) ──select──► rows ──────────────► write        (a writer of rows)
                                  └─► id and document ──► write        (a writer of documents)

Each row of such a frame is one change, and no row of the table has two. So nothing is brought
together by key, and every partition is written as it comes, by a task with a name of its own:
`f<frame>.<partition>`. Of two tasks with one name a sink takes the files of one alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from icestream import failpoints
from icestream.change import AT, OP, SEQ, Op
from icestream.documents import DOCUMENT, ID, document, numbered_document
from icestream.errors import DataRejected, SchemaRejected
from icestream.iceberg.rows import from_spark
from icestream.report import Done, Row, encode
from icestream.schema import (
    Reads,
    SchemaGap,
    arrow_schema,
    gaps,
    refuse_unknown,
    schema_from_json,
)
from icestream.sinks import SelectingWriter, Writer, WritesDocuments
from icestream.sources import FRAME_ID, FRAME_OP, FRAME_ROW, FramePart
from icestream.spark import as_retryable, attempt_number, in_session, run_frame
from icestream.transform import (
    CHANGE_AT,
    CHANGE_OP,
    CHANGE_SEQ,
    Selects,
    TableSelect,
    struct_name,
)
from icestream.transform.spark_schema import spark_type
from icestream.worker.outcome import Outcome, Unready, errors_as_messages, outcome_of, with_counts
from icestream.worker.wide import WRITE_BYTES, aligned, refuse_null_ids

_STRUCT = struct_name(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partition:
    """What a worker must know to write a partition of one table's changes.

    `frame` is the frame's number among those of its epoch.
    """

    frame: int
    table: str
    identified: bool
    writer: Writer
    select: TableSelect | None

    def inner(self) -> Writer:
        """Who takes the changes, behind selects or not."""
        return self.writer.inner if isinstance(self.writer, SelectingWriter) else self.writer


def write_frames(
    selects: Selects | None, parts: Sequence[FramePart], writer: Writer, description: str
) -> Outcome:
    """Have the changes of frames written by workers, a Spark job for each; the first error raises.

    Raises `Unready` when a table lacks columns that a frame has.
    """
    outcomes = []
    for number, part in enumerate(parts):
        try:
            with as_retryable(f"could not read the changes of table {part.table}"):
                frame = part.frame()
            if frame is not None:
                partition = _partition(number, part, writer)
                outcomes.append(_write_frame(selects, part, frame, partition, description))
        finally:
            part.close()
    reports = [report for outcome in outcomes for report in outcome.reports]
    return Outcome(reports=reports, rows=sum(each.rows for each in outcomes), learned=[])


def _partition(number: int, part: FramePart, writer: Writer) -> _Partition:
    chosen = writer.selects if isinstance(writer, SelectingWriter) else ()
    select = next((each for each in chosen if each.table == part.table), None)
    return _Partition(
        frame=number, table=part.table, identified=part.identified, writer=writer, select=select
    )


def _write_frame(
    selects: Selects | None,
    part: FramePart,
    frame: DataFrame,
    partition: _Partition,
    description: str,
) -> Outcome:
    writer, select = partition.writer, partition.select
    documents = isinstance(partition.inner(), WritesDocuments)
    if select or not documents:
        _refuse_lacking(part, writer)
    if select or not documents:
        _refuse_unread(part, frame, writer.reads(part.table))
    changes = frame.select(
        F.col(FRAME_OP).cast("tinyint").alias(CHANGE_OP),
        F.lit(part.version).cast("long").alias(CHANGE_AT),
        F.lit(0).cast("long").alias(CHANGE_SEQ),
        F.col(FRAME_ID).cast("string").alias(ID),
        (_numbered(frame, select) if select else F.col(FRAME_ROW)).alias(_STRUCT),
    )
    if select and selects:
        changes = in_session(selects.spark, changes)
        # A delete that no key leads to is refused by who writes; it must not be dropped here.
        changes = selects.applied(changes, [select], identified=True)
    if documents:
        changes = _as_documents(changes, select)
    rows = run_frame(changes, partial(_write_partition, partition), description)
    return outcome_of(rows, 0)


def _refuse_lacking(part: FramePart, writer: Writer) -> None:
    """Raise `Unready` for columns that the table, or what is known of the source, lacks."""
    schema = schema_from_json(writer.schema_json(part.table))
    lacking = gaps(schema, part.columns, writer.key(part.table))
    if lacking:
        raise Unready([SchemaGap(part.table, lacking)])


def _refuse_unread(part: FramePart, frame: DataFrame, reads: Reads | None) -> None:
    """A column that Spark does not read would be null in every row, and nobody would know."""
    there = _names(frame)
    names = [column.name for column in part.columns]
    needed = [name for name in names if reads is None or name in reads.columns]
    unread = [name for name in needed if name not in there]
    if unread:
        raise SchemaRejected(
            f"column {unread[0]} of table {part.table} has a type that Spark does not read",
            hint="Give the table a `transform` that leaves the column out.",
        )
    refuse_unknown(part.table, (column for column in part.columns if column.name in needed))


def _names(frame: DataFrame) -> set[str]:
    kind = frame.schema[FRAME_ROW].dataType
    assert isinstance(kind, T.StructType)
    return set(kind.names)


def _numbered(frame: DataFrame, select: TableSelect) -> SparkColumn:
    """The row with its columns by number, as selects take it; what the frame lacks is null."""
    there = _names(frame)
    fields = schema_from_json(select.source_json).fields
    values = [
        F.col(FRAME_ROW).getField(field.name)
        if field.name in there
        else F.lit(None).cast(spark_type(field.field_type))
        for field in fields
    ]
    return F.struct(*(value.alias(f"f{number}") for number, value in enumerate(values)))


def _as_documents(changes: DataFrame, select: TableSelect | None) -> DataFrame:
    """The changes as what a writer of documents takes; a delete has no document."""
    kind, row = changes.schema[_STRUCT].dataType, F.col(_STRUCT)
    assert isinstance(kind, T.StructType)
    text = numbered_document(row, kind, select.outputs) if select else document(row, kind)
    alive = F.col(CHANGE_OP) != int(Op.DELETE)
    shown = F.when(alive, text).alias(DOCUMENT)
    return changes.select(CHANGE_OP, CHANGE_AT, CHANGE_SEQ, ID, shown)


def _write_partition(partition: _Partition, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Everything that happens to one partition on its worker."""
    if attempt_number() == 0:
        failpoints.reach(failpoints.IN_WORKER)
    return with_counts(errors_as_messages(_write_batches(partition, batches)))


def _write_batches(partition: _Partition, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    documents = isinstance(partition.inner(), WritesDocuments)
    # Documents are sent as they come. Rows gather, so that files do not become small.
    enough = 0 if documents else WRITE_BYTES
    task = f"f{partition.frame}.{_partition_number()}"
    read, held, size, written = 0, list[pa.RecordBatch](), 0, 0
    for batch in batches:
        read += batch.num_rows
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if held and size >= enough:
            yield from _write(partition, held, f"{task}.{written}")
            held, size, written = [], 0, written + 1
    if held:
        yield from _write(partition, held, f"{task}.{written}")
    yield encode(Done(rows=read))


def _partition_number() -> int:
    """Which partition of its frame this worker has; every attempt at it has the same."""
    context = TaskContext.get()
    return context.partitionId() if context else 0


def _write(partition: _Partition, batches: Sequence[pa.RecordBatch], shard: str) -> Iterator[Row]:
    rows = pa.Table.from_batches(batches)
    _refuse_nameless(partition, rows)
    documents = DOCUMENT in rows.column_names
    columns = _documents(rows) if documents else _columns(partition, rows)
    marks = {
        OP: rows.column(CHANGE_OP),
        AT: rows.column(CHANGE_AT),
        SEQ: rows.column(CHANGE_SEQ),
    }
    changes = pa.table({**marks, **columns})
    written = partition.writer.write(partition.table, shard, changes, each_key_once=True)
    yield from map(encode, written)


def _documents(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {ID: rows.column(ID), DOCUMENT: rows.column(DOCUMENT)}


def _columns(partition: _Partition, rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The table's columns in its own types."""
    writer, select = partition.inner(), partition.select
    fields = arrow_schema(schema_from_json(writer.schema_json(partition.table)))
    structs = rows.column(_STRUCT).chunks
    names = list(select.outputs) if select else [field.name for field in structs[0].type]
    found = {}
    for number, name in enumerate(names):
        parts = pa.chunked_array([pc.struct_field(struct, [number]) for struct in structs])
        found[name] = from_spark(parts, fields.field(name).type, by_name=True)
    for name in writer.key(partition.table):
        found[name] = aligned(found[name])
    return found


def _refuse_nameless(partition: _Partition, rows: pa.Table) -> None:
    """A change that does not say which row it belongs to must not be lost in silence."""
    if DOCUMENT not in rows.column_names:
        keyless = not partition.inner().key(partition.table)
        if keyless and pc.any(pc.not_equal(rows.column(CHANGE_OP), int(Op.INSERT))).as_py():
            raise _nothing_says(partition.table, "row")
        return
    if partition.identified:
        refuse_null_ids(partition.table, rows.column(ID))
    elif pc.any(pc.equal(rows.column(CHANGE_OP), int(Op.DELETE))).as_py():
        raise _nothing_says(partition.table, "document")


def _nothing_says(table: str, what: str) -> DataRejected:
    columns = "identifier columns" if what == "row" else "identifier columns and no row ids"
    version = "" if what == "row" else ", or upgrade it to format version 3"
    return DataRejected(
        f"a row of table {table} was deleted or updated, and nothing says which {what} it is",
        detail=f"The table has no {columns}.",
        hint=f"Set `identifier_columns` of the table{version}.",
    )
