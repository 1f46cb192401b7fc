"""Changefeeds that write files to cloud storage: one epoch per resolved timestamp.

A changefeed writes data files and, now and then, a marker `<timestamp>.RESOLVED`: every change up
to that timestamp R is in files that were there before the marker. So an epoch is the span between
two markers, and it may be read as soon as its marker was seen.

What looks like order is none: a file's name gives a lower bound of its rows at best, rows within
it are unsorted, rows later than R lie in files that sort before R's marker, and everything may be
delivered again at any time. Hence rows are chosen by their own `updated` timestamp alone, never by
file name or arrival, and duplicates vanish because two changes of a key at one timestamp are one.

The obvious listing is a race: a file and a marker that appear while the pages of a listing are
fetched may show the marker and hide the file. Files are therefore taken from a second listing that
began after the marker had been seen.

What was removed before it was read is history lost, never a gap: the marker of the last committed
timestamp must be there when a later one is, and so must every number of a file that may be needed
(`icestream.sources.cockroachdb.numbered`).
"""

import bisect
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyiceberg.types import IcebergType

from icestream.change import AT, OP, SEQ, Op, only_within
from icestream.epoch import Epoch
from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    HistoryLost,
    SchemaRejected,
    SourceUnavailable,
)
from icestream.formats.json_cells import Cells, MalformedJson, lines
from icestream.formats.json_columns import infer_type
from icestream.frontier import START, Frontier, Position
from icestream.iceberg.files import filesystem
from icestream.schema import (
    Column,
    Reads,
    SchemaGap,
    TableShape,
    cast_text,
    schema_from_json,
)
from icestream.sources import (
    Budget,
    EpochPlan,
    Purpose,
    Remembered,
    Standing,
    StartPlan,
    TableSplit,
)
from icestream.sources.cockroachdb import CockroachdbOptions
from icestream.sources.cockroachdb.feed import Changefeed, packed, refuse_other_key
from icestream.sources.cockroachdb.hlc import (
    FILE_NAME_DIGITS,
    RESOLVED,
    after,
    file_time,
    format_hlc,
    parse_file_time,
    resolved_of,
)
from icestream.sources.cockroachdb.numbered import (
    FOLDER,
    FORGOTTEN,
    Numbered,
    Numbers,
    beginning,
    number_of,
    remembered,
)
from icestream.sources.cockroachdb.rows import (
    KeySearch,
    Reader,
    key_parts,
    no_key,
    no_timestamps,
    rows_of,
    split_hlc,
    timestamps,
    top_of,
)
from icestream.sources.cockroachdb.taken import only_deletes, taken, takes, without_rows
from icestream.sources.named_columns import ColumnsSeen, Seen

log = logging.getLogger(__name__)

MARKER_SUFFIX = ".RESOLVED"
_DATA_NAME = re.compile(
    r"(?P<at>\d{33})-(?P<uniquer>.+?)-(?P<file>[0-9a-f]{8})-(?P<topic>.+)-(?P<schema>[0-9a-f]+)"
    r"\.(?P<format>[a-z]+)(?P<compression>\.gz|\.zst)?"
)
_FORMATS = ("ndjson", "parquet")
# Names that copying leaves behind for a moment.
_UNFINISHED = ("part", "tmp", "crc")
_UPDATED_IN_BYTES = re.compile(rb'"updated": ?"(\d+)\.(\d{10})\??"')
_MAYBE_DELETE = re.compile(rb'"after": ?null|^\{"__crdb__".*\}\}$', re.MULTILINE)
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_PARQUET_EVENT = ("__crdb__event_type", "__crdb_event_type__")
_PARQUET_UPDATED = "__crdb__updated"

# Between a table and its column family, in the names of files.
FAMILY_MARK = "+"
# What `accept_lost_after` says when nothing was read yet.
FROM_THE_START = "start"
# A feed that restarts from its checkpoint may name files somewhat earlier than the last marker.
# An hour of files is looked at again after a restart; rows decide what is new in them.
REWIND_SECONDS = 3600
# A frontier without changes is published after so much of the feed's time: the marker that the lake
# stands at must not grow so old that a lifecycle rule takes it.
PUBLISHED_SECONDS = 3600
# Compressed rows take about this many times their size once read.
_COMPRESSION_RATIO = 6
_SAMPLE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedFile:
    """One data file of the feed, as its name tells it."""

    path: str
    topic: str
    at: Position
    format: str
    compression: str
    size_bytes: int
    writer: int = 0
    number: int = 0

    @staticmethod
    def parse(path: str, size_bytes: int) -> "FeedFile | None":
        """The data file of that name, or None if the name is not one of a data file."""
        found = _DATA_NAME.fullmatch(PurePosixPath(path).name)
        if not found or found["format"] in _UNFINISHED:
            return None
        return FeedFile(
            path=path,
            topic=found["topic"],
            at=parse_file_time(found["at"]),
            format=found["format"],
            compression=found["compression"] or "",
            size_bytes=size_bytes,
            writer=number_of(found["uniquer"]),
            number=int(found["file"], 16),
        )

    @property
    def name(self) -> str:
        """Where it lies."""
        return self.path

    def row_bytes(self) -> int:
        """About how much the file holds once it is unpacked."""
        packed = self.compression or self.format == "parquet"
        return self.size_bytes * (_COMPRESSION_RATIO if packed else 1)

    def content(self, files: pafs.FileSystem) -> bytes:
        """The whole content, unpacked."""
        try:
            with files.open_input_stream(
                self.path, compression=_CODECS.get(self.compression)
            ) as stream:
                return bytes(stream.read())
        except (OSError, pa.ArrowInvalid) as error:
            if isinstance(error, FileNotFoundError):
                raise HistoryLost(
                    f"file {self.path} of the changefeed is gone",
                    detail="It was there when the epoch was planned and may hold its changes.",
                    hint="Restore it from the bucket's versions, or keep files until icestream has "
                    "committed them.",
                ) from error
            if _corrupt(error):
                raise self.damaged(str(error)) from error
            raise SourceUnavailable(
                f"could not read {self.path}",
                detail=str(error),
                hint="Check the storage's credentials and that it can be reached.",
            ) from error

    def damaged(self, what: str) -> DataRejected:
        """The error for a file whose content is not what its name says."""
        return DataRejected(
            f"file {self.path} of the changefeed is damaged",
            detail=what,
            # It may be needed although its rows are in the lake: a new table is made from it.
            hint="What is committed stays, and nothing more is until the file can be read. Restore "
            "it and start again. If `icestream status` shows a later time, it may be one that the "
            "guide's rule on removing files lets you remove.",
        )


def _corrupt(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("zlib", "zstd", "gzip", "truncated", "corrupt", "inflate"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSplit(TableSplit):
    """Some files of one table, of which the rows within `[lower, upper)` are read."""

    table: str
    location: str
    storage: Mapping[str, str]
    files: Sequence[FeedFile]
    lower: Position
    upper: Position
    declared: Mapping[str, IcebergType]
    source_key: Sequence[str]
    ranges: dict[str, tuple[Position, Position]] = field(default_factory=dict, compare=False)
    seen: dict[tuple[str, str], Seen] = field(default_factory=dict, compare=False)
    each_key_once: bool = False

    def read(
        self, schema_json: str, key: Sequence[str], reads: Reads | None = None
    ) -> Iterator[pa.Table]:
        """Change batches, one for each file."""
        schema = schema_from_json(schema_json)
        lower = self.lower or (0, 0)
        span = (lower[0], lower[1]), (self.upper[0], self.upper[1])
        own_key = list(self.source_key or key)
        reader = _FileReader(self.table, schema, own_key, self.declared, reads, span)
        files, _ = filesystem(self.location, self.storage)
        for file in self.files:
            changes = reader.read(file, file.content(files))
            self._learn(file, changes)
            refuse_other_key(self.table, self.source_key, key)
            yield only_within(changes, *span)
        self.seen.update(reader.seen)

    @property
    def size_bytes(self) -> int:
        """The size of its files as they lie in storage."""
        return sum(file.size_bytes for file in self.files)

    def with_stored(self, table: str, values: pa.Table | None) -> "FileSplit":
        """Itself: a changefeed leaves nothing out."""
        return self

    def learned(self) -> dict[str, tuple[Position, Position]]:
        """The span of timestamps in each file that was read."""
        return self.ranges

    def columns_seen(self) -> ColumnsSeen:
        """What its rows tell of columns; see `ComparedSplit`."""
        return self.seen

    def _learn(self, file: FeedFile, changes: pa.Table) -> None:
        at = changes.column(AT).combine_chunks().to_numpy(zero_copy_only=False)
        if len(at) == 0:
            self.ranges[file.path] = ((0, 0), (0, 0))
            return
        self.ranges[file.path] = ((int(at.min()), 0), (int(at.max()) + 1, 0))


class _FileReader(Reader):
    """Decodes the content of data files of one table into change batches."""

    def read(self, file: FeedFile, content: bytes) -> pa.Table:
        """All rows of a file, whatever its format."""
        if file.format == "parquet":
            return self._read_parquet(file, content)
        try:
            return self.read_rows(file, rows_of(file, top_of(lines(content))))
        except MalformedJson as error:
            raise file.damaged(f"Row {error.row + 1}, byte {error.offset}: {error}.") from error

    def _read_parquet(self, file: FeedFile, content: bytes) -> pa.Table:
        try:
            table = pq.read_table(pa.BufferReader(content))
        except (pa.ArrowInvalid, OSError) as error:
            raise file.damaged(str(error)) from error
        event = next((name for name in _PARQUET_EVENT if name in table.column_names), None)
        if event is None or _PARQUET_UPDATED not in table.column_names:
            raise no_timestamps(file)
        at, seq = split_hlc(file, table.column(_PARQUET_UPDATED).combine_chunks())
        deleted = pc.equal(table.column(event), "d").combine_chunks()
        ops = pc.if_else(deleted, pa.scalar(int(Op.DELETE), pa.int8()), int(Op.UPSERT))
        columns = {OP: ops.cast(pa.int8()), AT: at, SEQ: seq}
        unknown = []
        for name in table.column_names:
            if name.startswith("__crdb_"):
                continue
            values = table.column(name)
            if name in self.kinds:
                columns[name] = _cast_column(values, name, self.kinds[name], self.arrow)
            elif values.null_count < len(values):
                kind = _iceberg_type(values.type, self.declared, name)
                unknown.append(Column(name=name, type=kind))
        if unknown:
            raise SchemaGap(self.table, unknown)
        every = np.ones(table.num_rows, dtype=bool)
        leaving = deleted.to_numpy(zero_copy_only=False)
        self._refuse_gone(dict.fromkeys(table.column_names, every), leaving, at, seq)
        for name in self.key:
            if name not in columns or pa.table({"k": columns[name]}).column("k").null_count:
                raise no_key(file, self.table, self.key, 0)
        return pa.table(columns)


def _cast_column(
    values: pa.ChunkedArray, name: str, kind: IcebergType, schema: pa.Schema
) -> pa.ChunkedArray:
    target = schema.field(name).type
    if values.type == target:
        return values
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        text = values.cast(pa.string()).combine_chunks()
        return pa.chunked_array([cast_text(text, name, kind, target)])
    try:
        return values.cast(target)
    except pa.ArrowInvalid as error:
        raise SchemaRejected(
            f"values of column {name} do not fit its type {kind}",
            hint="Change the table's column to a type that holds the source's values.",
        ) from error


def _iceberg_type(kind: pa.DataType, declared: Mapping[str, IcebergType], name: str) -> IcebergType:
    if name in declared:
        return declared[name]
    from pyiceberg.io.pyarrow import _ConvertToIcebergWithoutIDs, visit_pyarrow

    return cast(IcebergType, visit_pyarrow(kind, _ConvertToIcebergWithoutIDs()))


@dataclass(slots=True)
class _Listing:
    """What the folder has: files and markers that may matter, and all numbers and markers."""

    files: dict[str, FeedFile] = field(default_factory=dict)
    markers: set[Position] = field(default_factory=set)
    numbers: Numbers = field(default_factory=Numbers)
    marked: set[Position] = field(default_factory=set)


class Indexed(NamedTuple):
    """What a file holds: a span `[first, last)` of all its timestamps, and whether any row."""

    path: str
    first: Position = (0, 0)
    last: Position = (2**62, 0)
    only_deletes: bool = False


IndexFiles = Callable[[Sequence[Any]], Sequence[Indexed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTask:
    """A file whose span of timestamps is wanted."""

    location: str
    storage: Mapping[str, str]
    file: FeedFile

    def run(self) -> Indexed:
        """What the file holds, as far as can be seen."""
        files, _ = filesystem(self.location, self.storage)
        content = self.file.content(files)
        if self.file.format == "parquet":
            return self._parquet(content)
        # A text that only looks like a timestamp widens the span, which costs a reading at worst.
        found = _UPDATED_IN_BYTES.findall(content)
        rows = content.count(b"\n") + (not content.endswith(b"\n"))
        only_deletes = _only_deletes(self.file, content, rows)
        if len(found) < rows:
            # Some row spells its timestamp otherwise, and may have any.
            return Indexed(self.file.path, only_deletes=only_deletes)
        walls = [int(wall) for wall, _ in set(found)]
        return Indexed(self.file.path, (min(walls), 0), (max(walls) + 1, 0), only_deletes)

    def _parquet(self, content: bytes) -> Indexed:
        try:
            column = pq.read_table(pa.BufferReader(content), columns=[_PARQUET_UPDATED])
        except (pa.ArrowInvalid, OSError) as error:
            raise self.file.damaged(str(error)) from error
        if not column.num_columns or not column.num_rows:
            return Indexed(self.file.path)
        walls, _ = split_hlc(self.file, column.column(0).combine_chunks())
        edges = pc.min_max(walls).as_py()
        return Indexed(self.file.path, (edges["min"], 0), (edges["max"] + 1, 0))


def _only_deletes(file: FeedFile, content: bytes, rows: int) -> bool:
    """Whether a file of JSON has no row but deletes; only one that may be such is parsed."""
    if file.format == "parquet" or len(_MAYBE_DELETE.findall(content)) < rows:
        return False
    try:
        return bool(rows_of(file, top_of(lines(content))).deleted.all())
    except (MalformedJson, DataRejected):
        # Whoever reads its rows says what is wrong.
        return False


class CockroachdbFiles(Changefeed):
    """The source over a folder of changefeed files; see the module and `Source`.

    The files are the feed's and stay, so nothing is given up. What they hold of a
    table that is new to the lake is found by `resume`, and a truncation is told row by row.
    """

    def __init__(
        self,
        options: CockroachdbOptions,
        pipeline: str,
        index: IndexFiles,
        budget: Budget,
    ):
        super().__init__(options, pipeline, budget)
        self._index = index
        self._files: dict[str, FeedFile] = {}
        self._markers: set[Position] = set()
        self._spans: dict[str, tuple[Position, Position]] = {}
        self._shapes: dict[str, TableShape] = {}
        self._samples: dict[str, Sequence[FeedFile]] = {}
        # Tables that this run has read and that had only deletes so far.
        self._without_rows: set[str] = set()
        # Files that have nothing but deletes.
        self._deletes: set[str] = set()
        # Tables that were written to: what they look like is known.
        self._written: set[str] = set()
        # A listing of everything, kept while a start asks for one table after the other.
        self._whole: _Listing | None = None
        self._resumed = False
        self._filesystem, self._folder = filesystem(options.files, options.storage)

    def tables(self) -> Sequence[str]:
        """The tables that the folder has files of."""
        if not self._files:
            listing = self._everything()
            self._files, self._markers = listing.files, listing.markers
        found = sorted({file.topic for file in self._files.values()})
        return [topic for topic in found if self._wanted(topic)]

    def known_tables(self) -> Sequence[str]:
        """The tables, as far as they can be known; none when the folder cannot be read."""
        try:
            return self.tables()
        except SourceUnavailable:
            return list(self._options.tables)

    def shape(self, table: str) -> TableShape | None:
        """Columns and key from the rows of the table's first epoch; None if it only deletes."""
        if table not in self._shapes:
            shape = self._infer_shape(table, self._with_rows(self._samples.get(table, ())))
            if shape is None:
                self._without_rows.add(table)
                return None
            self._without_rows.discard(table)
            self._shapes[table] = shape
            self._samples.pop(table, None)
        return self._shapes[table]

    def resume(self, remembered: Remembered) -> StartPlan:
        """Tables that lack rows which the folder still has are read from there.

        A table is fed when `tables` names it; the files that are known now may be the newest alone.
        Asked again after the claim, the folder is listed anew: until then another run may have
        gone past the first file of a table that it did not want.
        """
        if self._resumed:
            self._files, self._whole = {}, None
        self._resumed = True
        places = {
            table: self._read_from(table, remembered.upper(table), remembered.durable)
            for table in self.tables()
        }
        return StartPlan(
            behind={table: at for table, at in places.items() if at is not None},
            unfed=frozenset(itertools.filterfalse(self._wanted, remembered.progress)),
        )

    def _has_history(self, table: str, before: Frontier) -> bool:
        """Whether the folder has files of the table that were begun before a frontier."""
        files = self._everything().files.values()
        return any(file.topic == table and file.at < before[RESOLVED] for file in files)

    def _read_from(self, table: str, own: Frontier, durable: Frontier) -> Frontier | None:
        """What the table remembers, also when `tables` did not name it for a while.

        A table that is not there is read from the beginning, or from where it is known to have had
        nothing but deletes. It may also be new, and then nothing lies before; but in a folder that
        lacks files nobody can tell, and `available` has to ask.
        """
        if own != START:
            away = not own.covers(durable) and not takes(durable, table)
            return own if away else None
        if durable == START:
            return None
        known = without_rows(durable, table)
        if known == START:
            known = beginning(durable)
        else:
            self._without_rows.add(table)
        unsure = self._has_history(table, durable) or self._lost(known, self._everything())
        return known if unsure else None

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """One boundary for each resolved timestamp after `lower`, thinned by `resolved_every`."""
        start = lower[RESOLVED]
        self._whole = None
        listing = self._list(start)
        markers = listing.markers
        if markers - self._markers:
            # Files that were uploaded before a marker are sure to be in a listing begun after it.
            listing = self._list(start)
        files = listing.files
        self._files, self._markers = files, markers
        self._forget_but(files)
        if files and not markers:
            raise SourceUnavailable(
                f"there is no resolved timestamp in {self._options.files}",
                detail=f"It holds {len(files)} data files and no {MARKER_SUFFIX} file.",
                hint="Create the changefeed WITH updated, resolved; or wait for its first one.",
            )
        waiting = sorted(m for m in markers if (m[0], m[1] + 1) > start)
        if waiting:
            self._refuse_gap(lower, listing)
        boundaries = self.thinned(
            start, waiting, [(0, size) for size in self._bytes_before(waiting)]
        )
        if boundaries:
            self._index_unknown(start, several=len(boundaries) > 1)
        return self._frontiers(boundaries, lower)

    def plan(self, epoch: Epoch) -> EpochPlan:
        """The files that hold rows of the epoch, or may, in splits of one table each."""
        return EpochPlan(parts=self._splits(epoch), milestone=partial(_long_idle, epoch))

    def _splits(self, epoch: Epoch) -> list[FileSplit]:
        lower, upper = epoch.lower[RESOLVED], epoch.upper[RESOLVED]
        wanted: dict[str, list[FeedFile]] = {}
        begun: dict[str, list[FeedFile]] = {}
        for file in sorted(self._files.values(), key=lambda file: file.path):
            first, last = self._spans.get(file.path, ((), (2**62, 0)))
            if self._wanted(file.topic) and first < upper:
                begun.setdefault(file.topic, []).append(file)
                if last > lower:
                    wanted.setdefault(file.topic, []).append(file)
        for table in wanted:
            # Later epochs are planned before this one is written: its rows must stay in the sample,
            # or a table whose next epoch only deletes would seem to be nothing yet. Files that were
            # read before tell the key, where the rows of one epoch may not.
            if table not in self._shapes and table not in self._written:
                sample = dict.fromkeys([*self._samples.get(table, ()), *begun[table]])
                self._samples[table] = self._with_rows(sample)
        return [
            self._split(table, files, lower, upper)
            for table, whole in wanted.items()
            for files in packed(whole, FeedFile.row_bytes, self._options.split_bytes)
        ]

    def verify(self, durable: Frontier) -> None:
        """Look once for what comes next."""
        self.available(durable)

    def was_read(
        self, epoch: Epoch, lessons: Sequence[Mapping[str, tuple[Position, Position]]]
    ) -> Mapping[str, str]:
        """Remember the span of timestamps of files that were read, so that none is read in vain.

        Only files of tables that are there are read, and these need no sample any more.
        """
        for learned in lessons:
            self._learn(learned)
        return self._labels(epoch)

    def standing(self, frontier: Frontier) -> Standing:
        """The resolved timestamp of a frontier."""
        return Standing(position=self._position(frontier), lag_seconds=self._lag_seconds(frontier))

    def _learn(self, learned: Mapping[str, tuple[Position, Position]]) -> None:
        self._spans.update(learned)
        for table in {file.topic for path in learned if (file := FeedFile.parse(path, 0))}:
            self._written.add(table)
            self._without_rows.discard(table)
            self._samples.pop(table, None)

    def _lag_seconds(self, durable: Frontier) -> float | None:
        """Time from the durable resolved timestamp to the newest one in the folder."""
        resolved = resolved_of(durable)
        if resolved is None or not self._markers:
            return None
        return max(0.0, (max(self._markers)[0] - resolved[0]) / 1e9)

    def _refuse_gap(self, lower: Frontier, listing: _Listing) -> None:
        """Raise `HistoryLost` when the folder lacks what lies between `lower` and what is there."""
        if lost := self._lost(lower, listing):
            reached = _named_place(lower)
            raise HistoryLost(
                f"files of the changefeed were removed from {self._options.files} before they "
                "were read",
                detail=f"{lost} What was read ends at {reached}.",
                hint="Restore them from the bucket's versions. If you know that no row is lost, or "
                f"accept it, set `source.cockroachdb.accept_lost_after: {reached}`; else let a new "
                "changefeed write to a new folder, and read it into new tables.",
            )

    def _lost(self, lower: Frontier, listing: _Listing) -> str:
        """What the folder lacks for who goes on after `lower`; empty if nothing, or accepted."""
        resolved = resolved_of(lower)
        lost = ""
        if resolved and resolved not in listing.marked:
            marker = f"{file_time(resolved)}{MARKER_SUFFIX}"
            lost = f"The marker {marker}, which was committed last, is gone; later ones are there."
        needed = listing.numbers.needed(lower)
        if not lost and listing.numbers.first_gone(needed):
            # Older folders were not looked into, and a name may have come while others were listed.
            if gone := self._list(()).numbers.first_gone(needed):
                lost = self._gone(*gone)
        if lost and self._options.accept_lost_after == _named_place(lower):
            log.warning("going on although files were removed: %s", lost)
            return ""
        return lost

    def _gone(self, writer: int, number: int) -> str:
        """What is said of a file that is missed; its writer is told by another file's name."""
        if writer == FORGOTTEN:
            return "So many writers are idle that the first ones are forgotten; files may be gone."
        names = sorted(path for path, file in self._files.items() if file.writer == writer)
        beside = f", of the writer of {PurePosixPath(names[0]).name}" if names else ""
        return f"File {number:08x}{beside}, is gone; later ones are there."

    def _frontiers(self, boundaries: Sequence[Position], lower: Frontier) -> list[Frontier]:
        """The frontiers of resolved timestamps, with what the folder must keep after each."""
        files = [
            Numbered(
                writer=file.writer,
                number=file.number,
                at=file.at,
                **({"last": self._spans[path][1][0]} if path in self._spans else {}),
                # Nobody reads it after this frontier.
                **({} if self._wanted(file.topic) else {"last": 0}),
            )
            for path, file in self._files.items()
        ]
        known = sorted(self._markers)
        reached = [after(boundary) for boundary in boundaries]
        earliest = [_earliest(known, at[RESOLVED]) for at in reached]
        since = [max(0, at[0]) if at else 0 for at in earliest]
        folders = remembered(boundaries, files, lower, since)
        seen = self._seen_without_rows([at[RESOLVED] for at in reached], lower)
        return [
            Frontier({**at.positions, FOLDER: folder})
            .join(taken(at[RESOLVED], self._options.tables, lower))
            .join(only_deletes(at[RESOLVED], tables, lower))
            for at, folder, tables in zip(reached, folders, seen, strict=True)
        ]

    def _seen_without_rows(
        self, bounds: Sequence[Position], lower: Frontier
    ) -> list[dict[str, Position]]:
        """For each bound the tables that only had deletes, and up to when that is sure.

        Mostly up to the bound before: what lies there may be removed by now, and the start asks for
        what came since. But epochs are planned ahead, and a row may wait in one of them.
        """
        candidates = set(self._without_rows)
        if not lower[RESOLVED]:
            candidates |= {file.topic for file in self._files.values() if self._wanted(file.topic)}
        first_row: dict[str, Position] = {}
        for path, file in self._files.items():
            if file.topic in candidates and path not in self._deletes:
                first = self._spans[path][0] if path in self._spans else file.at
                first_row[file.topic] = min(first, first_row.get(file.topic, first))
        seen = {t: at for t in candidates if (at := without_rows(lower, t)[RESOLVED])}
        found = []
        for before in [lower[RESOLVED], *bounds][:-1]:
            sure = {t for t in candidates if t not in first_row or before <= first_row[t]}
            seen = seen | (dict.fromkeys(sure, before) if before else {})
            found.append(seen)
        return found

    def _forget_but(self, files: Collection[str]) -> None:
        """Keep what is known of these files alone; other threads may learn meanwhile."""
        self._spans = {p: span for p, span in list(self._spans.items()) if p in files}
        for table, sample in list(self._samples.items()):
            self._samples[table] = self._with_rows(sample)
        self._deletes = {path for path in list(self._deletes) if path in files}

    def _with_rows(self, files: Iterable[FeedFile]) -> list[FeedFile]:
        """Those of the files that may have a row."""
        return [file for file in files if file.path not in self._deletes]

    def _everything(self) -> _Listing:
        """All that the folder has."""
        if self._whole is None:
            self._whole = self._list(())
        return self._whole

    def _list(self, start: Position) -> _Listing:
        """Data files and markers of the folder, but for what lies well before `start`."""
        earliest = _earliest(sorted(self._markers), start)
        listing = _Listing()
        for path, size_bytes in self._walk(earliest):
            name = PurePosixPath(path).name
            if name.endswith(MARKER_SUFFIX) and name[:FILE_NAME_DIGITS].isdigit():
                listing.marked.add(parse_file_time(name))
            elif file := FeedFile.parse(path, size_bytes):
                listing.numbers.add(file.writer, file.number, file.at)
                if file.at >= earliest:
                    self._refuse_unreadable(file)
                    listing.files[path] = file
        listing.markers = {marker for marker in listing.marked if marker >= earliest}
        return listing

    def _refuse_unreadable(self, file: FeedFile) -> None:
        """A file of a table that is wanted is read or refused, never passed over."""
        if not self._wanted(file.topic):
            return
        if file.format not in _FORMATS:
            raise ConfigInvalid(
                f"files of the changefeed in {self._options.files} have the format {file.format}",
                detail=f"{PurePosixPath(file.path).name} cannot be read.",
                hint="Create the changefeed with format=json or format=parquet, into a new folder.",
            )
        if FAMILY_MARK in file.topic and file.topic not in self._options.tables:
            table, _, family = file.topic.rpartition(FAMILY_MARK)
            raise ConfigInvalid(
                f"the changefeed splits table {table} into column families",
                detail=f"{PurePosixPath(file.path).name} has the columns of family {family} alone. "
                "Each file has a part of its rows, and no table is made of the parts.",
                hint="Name the tables to take in `source.cockroachdb.tables` and leave this one "
                f"out; or name families there as tables of their own, such as `{file.topic}`, with "
                f"the primary key in `source.cockroachdb.keys: {{{file.topic}: [...]}}`.",
            )

    def _walk(self, earliest: Position) -> Iterator[tuple[str, int]]:
        """All files of the folder; dated folders before `earliest` are not entered."""
        pending = [self._folder]
        oldest_day = datetime.fromtimestamp(earliest[0] / 1e9, UTC).date() if earliest else None
        while pending:
            try:
                entries = self._filesystem.get_file_info(pafs.FileSelector(pending.pop()))
            except OSError as error:
                raise SourceUnavailable(
                    f"could not list {self._options.files}",
                    detail=str(error),
                    hint="Check that the folder exists, and the storage's credentials.",
                ) from error
            for entry in entries:
                if entry.type == pafs.FileType.File:
                    yield entry.path, entry.size
                elif entry.type == pafs.FileType.Directory:
                    if _current(entry.base_name, oldest_day):
                        pending.append(entry.path)

    def _bytes_before(self, markers: Sequence[Position]) -> list[int]:
        """About how many bytes each marker brings: those of files begun since the one before."""
        sizes = [0] * len(markers)
        for file in self._files.values():
            number = bisect.bisect_left(markers, file.at)
            if number < len(markers):
                sizes[number] += file.size_bytes
        return sizes

    def _index_unknown(self, start: Position, several: bool) -> None:
        """Learn the spans of files that several pending epochs would otherwise all have to read.

        And of those begun before `start`: most have nothing new, which spares the epoch to read
        them, and the frontier to say that they must stay.
        """
        unknown = [
            IndexTask(location=self._options.files, storage=self._options.storage, file=file)
            for file in self._files.values()
            if file.path not in self._spans
            and self._wanted(file.topic)
            and (several or file.at < start)
        ]
        for path, first, last, rowless in self._index(unknown) if unknown else ():
            self._spans[path] = (first, last)
            if rowless:
                self._deletes.add(path)

    def _split(
        self, table: str, files: Sequence[FeedFile], lower: Position, upper: Position
    ) -> FileSplit:
        return FileSplit(
            table=table,
            location=self._options.files,
            storage=self._options.storage,
            files=files,
            lower=lower,
            upper=upper,
            declared=self.declared(table),
            source_key=self.named_key(table),
        )

    def _infer_shape(self, table: str, sample: Sequence[FeedFile]) -> TableShape | None:
        """Columns and key of a table from its first rows."""
        declared = self.declared(table)
        columns: dict[str, Column] = {}
        key = self.named_key(table)
        read = 0
        for file in sample:
            if read > _SAMPLE_BYTES and columns and key:
                break
            content = file.content(self._filesystem)
            read += len(content)
            found, file_key = self._sampled(table, file, content, declared, key)
            if not found and _only_deletes(file, content, rows=0):
                self._deletes.add(file.path)
            columns.update({c.name: c for c in found if c.name not in columns})
            key = key or file_key
        if not columns or not key:
            return None
        return TableShape(columns=[columns[name] for name in sorted(columns)], key=key)

    def _sampled(
        self,
        table: str,
        file: FeedFile,
        content: bytes,
        declared: Mapping[str, IcebergType],
        key: Sequence[str],
    ) -> tuple[list[Column], list[str]]:
        if file.format == "parquet":
            return _sample_parquet(table, file, content, declared, bool(key)), []
        try:
            rows = rows_of(file, top_of(lines(content)))
            # A table must not be made from rows that no epoch can take.
            timestamps(file, rows)
            # Rows of a column family may have their key beside them alone.
            cells_by_name = {
                **(_named(key_parts(rows.key, key), key) if rows.columns else {}),
                **rows.columns,
            }
            kinds = {
                name: declared.get(name) or infer_type(cells)
                for name, cells in cells_by_name.items()
            }
            columns = [Column(name=name, type=kind) for name, kind in kinds.items() if kind]
            search = KeySearch()
            if not key:
                search.look(file, table, rows)
            return columns, search.key(table)
        except MalformedJson as error:
            raise file.damaged(f"Row {error.row + 1}, byte {error.offset}: {error}.") from error


def _long_idle(epoch: Epoch, durable: Frontier) -> bool:
    """Whether so much time of the feed has passed that an idle frontier is published."""
    before, now = durable[RESOLVED], epoch.upper[RESOLVED]
    return bool(before) and now[0] - before[0] >= PUBLISHED_SECONDS * 10**9


def _earliest(markers: Sequence[Position], start: Position) -> Position:
    """Files named earlier than this hold nothing from `start` on; the markers are ascending.

    A file is begun after the marker before the one that closes it. So whatever may reach past
    `start` was begun after the last marker before it; some time is added for restarted feeds.
    """
    place = bisect.bisect_left(markers, start, key=lambda marker: (marker[0], marker[1] + 1))
    return (markers[place - 1][0] - REWIND_SECONDS * 10**9, 0) if place else ()


def _named_place(frontier: Frontier) -> str:
    """How `accept_lost_after` names the place that a frontier stands at."""
    resolved = resolved_of(frontier)
    return format_hlc(resolved) if resolved else FROM_THE_START


def _named(cells: Mapping[str, Cells], names: Sequence[str]) -> dict[str, Cells]:
    return {name: cells[name] for name in names if name in cells}


def _current(folder: str, oldest_day: Any) -> bool:
    """Whether a folder may hold current files: dated ones by their date, others always."""
    if oldest_day is None or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", folder):
        return True
    return folder >= str(oldest_day)


def _sample_parquet(
    table: str,
    file: FeedFile,
    content: bytes,
    declared: Mapping[str, IcebergType],
    key_known: bool,
) -> list[Column]:
    if not key_known:
        raise ConfigInvalid(
            f"the key of table {table} is not known",
            detail="Parquet files of a changefeed do not tell it.",
            hint=f"Name the primary key's columns: `source.cockroachdb.keys: {{{table}: [...]}}`.",
        )
    try:
        schema = pq.read_schema(pa.BufferReader(content))
    except (pa.ArrowInvalid, OSError) as error:
        raise file.damaged(str(error)) from error
    if _PARQUET_UPDATED not in schema.names:
        raise no_timestamps(file)
    return [
        Column(name=column.name, type=_iceberg_type(column.type, declared, column.name))
        for column in schema
        if not column.name.startswith("__crdb_")
    ]
