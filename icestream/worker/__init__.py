"""The way of an epoch's changes: read a part, pass a select, bring keys together, write, report.

    split ──read──► changes ───────────────────────────────────► write   (a key lies in one split)
    split ──read──► changes ──► by key hash ══ shuffle ══► ─────► write   (`by_key`)
    split ──read──► wide frame ──► select, documents ──► as above         (`wide`)
    frame ─────────────────────► select, documents ────────────► write   (`frames`)

`write_epoch` is all of it on one page. What a part is (`icestream.sources`) decides where its line
begins. What the writer takes (`icestream.sinks`) decides whether rows become documents. Nobody here
knows which source or which sink it is.

Changes of a table that passes no select, and goes to a writer of rows, never leave the task that
has read them: they go from reader to writer as Arrow batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from icestream import failpoints
from icestream.errors import ConfigInvalid
from icestream.report import Done, Row, encode
from icestream.sinks import SelectingWriter, Writer, WritesDocuments
from icestream.sources import ComparedSplit, FramePart, Part, Split
from icestream.spark import attempt_number, run_frame, run_tasks, task_frame
from icestream.transform import BUCKET, ROW, TASK, Selects, TableSelect
from icestream.transform.spark_schema import in_arrow
from icestream.worker.by_key import Shares, by_bucket, shares_of, write_gathered
from icestream.worker.frames import write_frames
from icestream.worker.outcome import Outcome, Unready, errors_as_messages, outcome_of, with_counts
from icestream.worker.wide import WRITE_BYTES, WideFrame, WideRows, as_documents, write_wide

__all__ = ["Outcome", "Runnable", "Unready", "map_tasks", "write_epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One split and how it is to be handled; `wide` when some changes pass through Spark."""

    number: int
    split: Split
    writer: Writer
    shares: Shares
    wide: WideFrame | None = None


def write_epoch(
    spark: SparkSession,
    parts: Sequence[Part],
    writer: Writer,
    key_in_one_split: bool,
    description: str,
    selects: Selects | None = None,
) -> Outcome:
    """Have all parts of an epoch read and written by workers; raises the first error reported.

    Splits take one Spark job together, each frame one of its own. What tables lack is reported by
    all splits before it is raised, as one `Unready`.
    """
    frames = [part for part in parts if isinstance(part, FramePart)]
    # `EpochPlan` has refused what is neither.
    splits = [cast(Split, part) for part in parts if not isinstance(part, FramePart)]
    if frames:
        outcome = write_frames(selects, frames, writer, description)
        return _joined(
            outcome, write_epoch(spark, splits, writer, key_in_one_split, description, selects)
        )
    if splits:
        _refuse_contradiction(writer, selects)
    shares = shares_of(splits, writer, key_in_one_split, spark.sparkContext.defaultParallelism)
    if selects and splits and isinstance(writer, SelectingWriter) and writer.selects:
        rows = _through_spark(selects, splits, writer, shares, description)
    else:
        rows = _straight(spark, splits, writer, shares, description)
    return outcome_of(rows, len(splits))


def _refuse_contradiction(writer: Writer, selects: Selects | None) -> None:
    """Refuse a sink whose options say that writers take documents, and whose writer does not.

    The other way round, too. With `documents` every table passes a select of the whole row.
    """
    inner = writer.inner if isinstance(writer, SelectingWriter) else writer
    said, found = bool(selects and selects.of_all), isinstance(inner, WritesDocuments)
    if said == found:
        return
    lacks = "has no `version`" if said else "has a `version`, as a writer of documents"
    raise ConfigInvalid(
        "the options and the writer of the sink contradict each other",
        detail=f"`documents` of the options is {said}, and {type(inner).__name__} {lacks}.",
        hint="Change the class of the options or that of the writer; see `WritesDocuments` in "
        "`icestream.sinks`.",
    )


def _straight(
    spark: SparkSession,
    splits: Sequence[Split],
    writer: Writer,
    shares: Shares,
    description: str,
) -> list[Row]:
    """Each split from reader to writer in one task, or to who has the bucket of its keys."""
    tasks = [
        Task(number=number, split=split, writer=writer, shares=shares)
        for number, split in enumerate(splits)
    ]

    def gather(rows: Iterator[Row]) -> Iterator[Row]:
        return with_counts(write_gathered(rows, writer, shares))

    return run_tasks(spark, tasks, _work, gather if shares.starts else None, description)


def _through_spark(
    selects: Selects,
    splits: Sequence[Split],
    writer: SelectingWriter,
    shares: Shares,
    description: str,
) -> list[Row]:
    """Changes of selected tables as columns of a wide frame; all else passes by in it."""
    # Not asked again: workers come and go, and rows are in the buckets that were counted before.
    parallelism = shares.each
    schema = selects.schema(writer.selects)
    tables = [each.table for each in writer.selects]
    wide = WideFrame(
        tables=tables,
        shared=frozenset(tables).intersection(shares.starts),
        start=1 + len(shares.starts) * parallelism,
        width=max(parallelism, len(splits)),
        once=frozenset(number for number, split in enumerate(splits) if split.each_key_once),
        schema=in_arrow(schema),
    )
    tasks = [
        Task(number=number, split=split, writer=writer, shares=shares, wide=wide)
        for number, split in enumerate(splits)
    ]
    frame: DataFrame = task_frame(selects.spark, tasks, _wide_work, schema)
    frame = selects.applied(frame, writer.selects)
    if isinstance(writer.inner, WritesDocuments):
        _refuse_keyless(writer.selects)
        frame = as_documents(frame, writer.selects)
    if shares.starts:
        together = frame.repartition(parallelism, BUCKET)
        frame = together.sortWithinPartitions(BUCKET, TASK, ROW)

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
        rows = write_wide(batches, writer, wide)
        return with_counts(write_gathered(rows, writer, shares))

    return run_frame(frame, write, description)


def _refuse_keyless(selects: Sequence[TableSelect]) -> None:
    """Without a key nothing says which document a row is, nor that it was sent before."""
    for each in selects:
        if not each.key:
            raise ConfigInvalid(
                f"table {each.table} has no key, so nothing says which document a row is",
                hint="Give the table a key at the source, or name the columns that identify a row "
                "with `identifier_columns` of the sink.",
            )


def _joined(one: Outcome, other: Outcome) -> Outcome:
    return Outcome(
        reports=[*one.reports, *other.reports],
        rows=one.rows + other.rows,
        learned=[*one.learned, *other.learned],
    )


def _work(task: Task, columns: WideRows | None = None) -> Iterator[Any]:
    """Everything that happens to one split on its worker: rows, and batches of `columns`."""
    if attempt_number() == 0:
        failpoints.reach(failpoints.IN_WORKER)
    return with_counts(errors_as_messages(_read_and_write(task, columns)))


def _wide_work(task: Task) -> Iterator[pa.RecordBatch]:
    """What happens to one split, as rows of the wide frame."""
    assert task.wide is not None
    columns = WideRows(task.number, task.writer, task.shares, task.wide)
    for each in _work(task, columns):
        yield each if isinstance(each, pa.RecordBatch) else columns.passing(each)


def _read_and_write(task: Task, columns: WideRows | None) -> Iterator[Any]:
    read, gathered = 0, 0
    pieces: dict[str, list[pa.Table]] = {}
    for batch, (table, changes) in enumerate(task.split.changes(task.writer)):
        read += changes.num_rows
        if columns is not None and columns.takes(table):
            yield from columns.batches(table, changes)
        elif table in task.shares.starts:
            place, key = (task.number, batch), task.writer.key(table)
            yield from by_bucket(table, changes, place, key, task.shares)
        elif changes.num_rows:
            pieces.setdefault(table, []).append(changes)
            gathered += changes.nbytes
        if task.split.each_key_once and gathered >= WRITE_BYTES:
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


def map_tasks(spark: SparkSession, tasks: Sequence["Runnable"]) -> list[object]:
    """Run small tasks of a source's own on workers and return their results, in any order."""
    rows = run_tasks(spark, tasks, _run, description="index")
    return list(outcome_of(rows, len(tasks)).learned)


class Runnable(Protocol):
    """A picklable piece of work."""

    def run(self) -> object:
        """Do it, on a worker."""
        ...


def _run(task: Runnable) -> Iterator[Row]:
    def run() -> Iterator[Row]:
        yield encode(Done(learned=task.run()))

    return with_counts(errors_as_messages(run()))
