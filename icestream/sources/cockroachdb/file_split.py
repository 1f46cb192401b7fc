"""Files of one table, read by a worker: the rows of a span of timestamps become changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.types import IcebergType

from icestream.change import AT, OP, SEQ, Op, only_within
from icestream.errors import SchemaRejected
from icestream.formats.json_cells import MalformedJson, lines
from icestream.frontier import Position
from icestream.iceberg.files import filesystem
from icestream.schema import Column, Reads, SchemaGap, cast_text, schema_from_json
from icestream.sources import TableSplit
from icestream.sources.cockroachdb.feed import refuse_other_key
from icestream.sources.cockroachdb.feed_file import PARQUET, PARQUET_UPDATED, FeedFile
from icestream.sources.cockroachdb.rows import (
    Reader,
    no_key,
    no_timestamps,
    rows_of,
    split_hlc,
    top_of,
)
from icestream.sources.named_columns import ColumnsSeen, Seen

_PARQUET_EVENT = ("__crdb__event_type", "__crdb_event_type__")


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
            self._note_span(file, changes)
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

    def _note_span(self, file: FeedFile, changes: pa.Table) -> None:
        at = changes.column(AT).combine_chunks().to_numpy(zero_copy_only=False)
        if len(at) == 0:
            self.ranges[file.path] = ((0, 0), (0, 0))
            return
        self.ranges[file.path] = ((int(at.min()), 0), (int(at.max()) + 1, 0))


class _FileReader(Reader):
    """Decodes the content of data files of one table into change batches."""

    def read(self, file: FeedFile, content: bytes) -> pa.Table:
        """All rows of a file, whatever its format."""
        if file.format == PARQUET:
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
        if event is None or PARQUET_UPDATED not in table.column_names:
            raise no_timestamps(file)
        at, seq = split_hlc(file, table.column(PARQUET_UPDATED).combine_chunks())
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
                kind = column_type(values.type, self.declared, name)
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


def column_type(kind: pa.DataType, declared: Mapping[str, IcebergType], name: str) -> IcebergType:
    """The type of a column of a Parquet file: the declared one, or the file's."""
    if name in declared:
        return declared[name]
    from pyiceberg.io.pyarrow import _ConvertToIcebergWithoutIDs, visit_pyarrow

    return cast(IcebergType, visit_pyarrow(kind, _ConvertToIcebergWithoutIDs()))
