"""A toy sink: a local folder with files of changes, and a row of progress files.

    <path>/<pipeline>/files/<table>/*.parquet       what workers write; nobody looks for it there
    <path>/<pipeline>/progress/0000000012.json      what is true: the one with the highest number

A progress file has everything that is durable: the generation, and for each table its schema, its
key, its progress and the names of its files. It never changes. The next one is made whole under
another name, and linked to its number: the system refuses a name that is taken. So of two runs that
have read the same progress only one comes next, which is the compare-and-swap that
`icestream.commit_protocol` asks for. Old progress files stay, or a number could be taken twice.

A file of a table has its columns and two more: `_epoch`, and `_deleted` for a row that has only the
key. Of a key the row with the highest epoch counts, and within one epoch the row that is not
deleted. So a reader needs the list of files and nothing else.

A process may end at any moment; a power failure is not thought of. The folder has none of the
abilities `Evolves`, `LooksUpRows` and `RemembersSources`.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from icestream import failpoints
from icestream.change import fold
from icestream.commit_protocol import Move, Subject, bounded, insist, publish
from icestream.epoch import Epoch, Progress
from icestream.errors import (
    CommitConflict,
    ConfigInvalid,
    IcestreamError,
    TargetUnavailable,
    check,
)
from icestream.frontier import Frontier
from icestream.report import Report
from icestream.schema import TableShape, arrow_schema, new_schema, schema_from_json
from icestream.sinks import Committed, Sink, Written
from icestream.sinks.options import SinkOptions

EPOCH, DELETED = "_epoch", "_deleted"
# So names of progress files sort as their numbers do.
NUMBER_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions(SinkOptions):
    """Options of the folder."""

    path: str = field(default="", metadata={"doc": "The folder, which all workers can reach."})

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigInvalid("the folder sink needs a path", hint="Write `path: ...`.")

    def open(self, pipeline: str, spark: Any) -> Sink:
        """The sink; see `SinkOptions.open`."""
        return FolderSink(Path(self.path) / pipeline, pipeline)

    def status(self, sink: Any, tables: Sequence[str], pipeline: str) -> list[dict[str, Any]]:
        """What the newest progress file says; see `SinkOptions.status`."""
        return [
            {
                "pipeline": pipeline,
                "table": str(sink.folder / table),
                "source_table": table,
                "state": "ok",
                "generation": progress.generation,
                "epoch": progress.epoch,
                "upper": progress.upper,
                "committed_at": None,
                "snapshot_id": None,
                "trouble": None,
            }
            for table, progress in sorted(sink.durable(tables).items())
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as a progress file has it."""

    schema_json: str
    key: Sequence[str]
    progress: Progress
    files: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A progress file: number 0 stands for none."""

    number: int
    generation: int
    tables: Mapping[str, Table]


class ProgressFiles:
    """Reads the newest progress file of a pipeline, and puts the next one after it."""

    def __init__(self, folder: Path, pipeline: str):
        self._folder = folder
        self.pipeline = pipeline

    def read(self) -> Head:
        """What is true now."""
        with _as_retryable():
            number = max((int(path.stem) for path in self._folder.glob("*.json")), default=0)
            text = self._path(number).read_text() if number else ""
        if not text:
            return Head(number=0, generation=0, tables={})
        said = json.loads(text)
        check(said["pipeline"] == self.pipeline, "a progress file names its own pipeline")
        generation = int(said["generation"])
        tables = {
            name: Table(
                schema_json=json.dumps(table["schema"]),
                key=table["key"],
                files=table["files"],
                progress=self._progress(table["progress"], generation),
            )
            for name, table in said["tables"].items()
        }
        return Head(number=number, generation=generation, tables=tables)

    def swap(self, head: Head, new: Head, labels: Mapping[str, str]) -> None:
        """Put a progress file after the one that was read, and after no other.

        Raises `CommitConflict` when another one has come there, `TargetUnavailable` when the disk
        does not take it.
        """
        whole = self._folder / f"{uuid.uuid4().hex}.made"
        with _as_retryable():
            self._folder.mkdir(parents=True, exist_ok=True)
            whole.write_text(json.dumps(self._said(new, labels), indent=1))
        failpoints.reach(failpoints.BEFORE_SWAP)
        with _as_retryable():
            try:
                os.link(whole, self._path(head.number + 1))
            except FileExistsError as error:
                raise CommitConflict(
                    f"the progress of pipeline {self.pipeline} was replaced meanwhile"
                ) from error
            finally:
                whole.unlink()
        failpoints.reach(failpoints.AFTER_SWAP)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:0{NUMBER_DIGITS}d}.json"

    def _said(self, head: Head, labels: Mapping[str, str]) -> dict[str, Any]:
        tables = {
            name: {
                "schema": json.loads(table.schema_json),
                "key": list(table.key),
                "files": list(table.files),
                "progress": {
                    "epoch": table.progress.epoch,
                    "lower": table.progress.lower.to_json(),
                    "upper": table.progress.upper.to_json(),
                    "tables": table.progress.tables,
                    "catching_up": table.progress.catching_up,
                },
            }
            for name, table in sorted(head.tables.items())
        }
        return {
            "pipeline": self.pipeline,
            "generation": head.generation,
            "labels": dict(labels),
            "tables": tables,
        }

    def _progress(self, said: Mapping[str, Any], generation: int) -> Progress:
        return Progress(
            pipeline=self.pipeline,
            generation=generation,
            epoch=int(said["epoch"]),
            lower=Frontier.from_json(said["lower"]),
            upper=Frontier.from_json(said["upper"]),
            tables=int(said["tables"]),
            catching_up=bool(said["catching_up"]),
        )


class FolderSink:
    """See the module and `icestream.sinks.Sink`."""

    def __init__(self, folder: Path, pipeline: str):
        self.folder = folder / "files"
        self._heads = ProgressFiles(folder / "progress", pipeline)
        self._pipeline = pipeline
        self._generation = 0
        # What this run last saw or made; tables that were prepared and hold nothing yet, too.
        self._tables: dict[str, Table] = {}
        self._fed: set[str] = set()

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """All tables of the pipeline, also those that are not asked for; see `Sink.durable`."""
        return {name: table.progress for name, table in self._heads.read().tables.items()}

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Publish the next generation, for all tables at once; see `Sink.claim`."""

        def attempt(attempted: bool) -> Head:
            head = self._heads.read()
            new = _claimed(head)
            self._heads.swap(head, new, {})
            return new

        head = insist(attempt, bounded())
        self._generation = head.generation
        self._tables, self._fed = dict(head.tables), set(tables)
        failpoints.reach(failpoints.AFTER_CLAIM)
        return {name: table.progress for name, table in head.tables.items()}

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Know the table's schema and key; its first commit makes them durable."""
        self._fed.add(table)
        if table in self._tables:
            return True
        known = shape()
        if known is None:
            return False
        self._tables[table] = Table(
            schema_json=new_schema(known, table).model_dump_json(),
            key=list(known.key),
            progress=Progress(pipeline=self._pipeline, generation=self._generation),
        )
        return True

    def writer(self, epoch: Epoch, tables: Sequence[str]) -> "FolderWriter":
        """A writer for the epoch's files; see `Sink.writer`."""
        return FolderWriter(
            folder=str(self.folder),
            epoch=epoch.number,
            schemas={table: self._tables[table].schema_json for table in tables},
            keys={table: self._tables[table].key for table in tables},
        )

    def commit(self, written: Written) -> Sequence[Committed]:
        """Name the epoch's files, and how far it goes, in one progress file; see `Sink.commit`."""
        files: dict[str, list[str]] = {table: [] for table in sorted(written.truncated)}
        for (table, _), name in _of_one_attempt(written.reports).items():
            files.setdefault(table, []).append(name)
        return self._publish(written, files)

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Publish the frontier of an epoch without changes; see `Sink.heartbeat`."""
        # A table that lies behind must not say that it has come to where the others are.
        level = [t for t in self._fed & self._tables.keys() if not self._is_behind(t)]
        where = table or min(level, default=None)
        if where not in self._tables:
            return False
        nothing = Written(epoch=epoch, reports=[], writer=None, labels=labels)
        self._publish(nothing, {where: []})
        return True

    def close(self) -> None:
        """Nothing is held open."""

    def _is_behind(self, table: str) -> bool:
        return self._tables[table].progress.catching_up

    def _publish(self, written: Written, files: Mapping[str, list[str]]) -> list[Committed]:
        started, epoch = time.monotonic(), written.epoch
        if not files:
            return []
        progress = Progress(
            pipeline=self._pipeline,
            generation=self._generation,
            epoch=epoch.number,
            lower=epoch.lower,
            upper=epoch.upper,
            tables=len(files),
            catching_up=written.catching_up,
        )
        new = {
            name: replace(self._tables[name], progress=progress, files=added)
            for name, added in files.items()
        }
        moves = {
            name: Move(
                expected=self._tables[name].progress, new=progress, subject=self._subject(name)
            )
            for name in files
        }
        landed = publish(_Publishing(self._heads, new, written), moves, bounded())
        self._tables.update(new)
        seconds = time.monotonic() - started
        return [
            Committed(
                table=name,
                snapshot_id=None,
                duplicate=landed[name].result is None,
                seconds=seconds,
            )
            for name in files
        ]

    def _subject(self, table: str) -> Subject:
        return Subject(
            name=f"table {table}", over=f" table {table}", meddling=f"writes to {self.folder}"
        )


Seen = tuple[Head, str]


class _Publishing:
    """What `icestream.commit_protocol` asks of the progress files; a key is a table's name.

    `new` has the tables as they are to be, each with the files that are added.
    """

    def __init__(self, heads: ProgressFiles, new: Mapping[str, Table], written: Written):
        self._files = heads
        self._new = new
        self._written = written

    def heads(self, keys: Collection[str]) -> dict[str, Seen]:
        """The newest progress file, the same for all tables."""
        head = self._files.read()
        return {key: (head, key) for key in keys}

    def progress(self, head: Seen) -> Progress:
        """The progress of the table; the generation also of a table that is not there yet."""
        whole, table = head
        if table in whole.tables:
            return whole.tables[table].progress
        return Progress(pipeline=self._files.pipeline, generation=whole.generation)

    def refuse_broken_history(self, key: str, head: Seen, broken: IcestreamError | None) -> None:
        """A progress file has all of it."""

    def fits(self, key: str, head: Seen) -> None:
        """A table's schema never changes, so its files always fit."""

    def swap(self, heads: Mapping[str, Seen]) -> dict[str, int]:
        """Publish all tables of the epoch by one progress file."""
        head = next(iter(heads.values()))[0]
        tables = {**head.tables, **{name: self._after(head, name) for name in heads}}
        failpoints.reach(failpoints.BEFORE_PUBLISH)
        self._files.swap(head, replace(head, tables=tables), self._written.labels)
        failpoints.reach(failpoints.AFTER_PUBLISH)
        return dict.fromkeys(heads, head.number + 1)

    def _after(self, head: Head, name: str) -> Table:
        new = self._new[name]
        kept = name in head.tables and name not in self._written.truncated
        return replace(new, files=[*(head.tables[name].files if kept else ()), *new.files])


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWriter:
    """Writes an epoch's files on workers; plain data. See `icestream.sinks.Writer`."""

    folder: str
    epoch: int
    schemas: Mapping[str, str]
    keys: Mapping[str, Sequence[str]]

    def tables(self) -> Collection[str]:
        """The tables that it writes to."""
        return self.schemas.keys()

    def schema_json(self, table: str) -> str:
        """The schema that changes of the table must be read with."""
        return self.schemas[table]

    def key(self, table: str) -> Sequence[str]:
        """The columns that identify a row."""
        return self.keys[table]

    def reads(self, table: str) -> None:
        """Nothing is selected: every column counts."""
        return None

    def refused(self, table: str) -> None:
        """A folder takes tables of every name."""
        return None

    def write(
        self, table: str, shard: str, changes: pa.Table, each_key_once: bool = False
    ) -> Iterator[Report]:
        """Fold the changes and write what remains into one file, under a name of its own."""
        folded = fold(changes, self.keys[table], each_key_once)
        rows = pa.concat_tables(
            [self._rows(table, folded.deleted, True), self._rows(table, folded.kept, False)]
        )
        if rows.num_rows == 0:
            return
        # Each attempt at a task draws its own name, so nobody overwrites what was reported.
        name = f"{quote(table, safe='')}/{self.epoch}-{shard}-{uuid.uuid4().hex}.parquet"
        path = Path(self.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path)
        yield Report(
            table=table,
            kind="file",
            rows=rows.num_rows,
            size_bytes=path.stat().st_size,
            payload=(shard, name),
        )

    def _rows(self, table: str, rows: pa.Table, deleted: bool) -> pa.Table:
        """The rows in all columns of the table; what they do not have is null."""
        columns: dict[str, Any] = {
            EPOCH: pa.repeat(pa.scalar(self.epoch, pa.int64()), rows.num_rows),
            DELETED: pa.repeat(pa.scalar(deleted), rows.num_rows),
        }
        for each in arrow_schema(schema_from_json(self.schemas[table])):
            there = each.name in rows.column_names
            columns[each.name] = (
                rows.column(each.name).cast(each.type)
                if there
                else pa.nulls(rows.num_rows, each.type)
            )
        return pa.table(columns)


def _of_one_attempt(reports: Sequence[Report]) -> dict[tuple[str, str], str]:
    """The file of each table and shard. Of a task that ran twice the first report counts.

    An attempt writes one file of a shard, so the name of the file stands for the attempt.
    """
    names: dict[tuple[str, str], str] = {}
    for report in reports:
        shard, name = cast(tuple[str, str], report.payload)
        names.setdefault((report.table, shard), name)
    return names


def _claimed(head: Head) -> Head:
    """The same of the next generation."""
    generation = head.generation + 1
    tables = {
        name: replace(table, progress=replace(table.progress, generation=generation))
        for name, table in head.tables.items()
    }
    return Head(number=head.number + 1, generation=generation, tables=tables)


@contextmanager
def _as_retryable() -> Iterator[None]:
    """A disk that is full or away may be back."""
    try:
        yield
    except OSError as error:
        raise TargetUnavailable(
            "the folder of the pipeline does not answer", detail=error.strerror
        ) from error
