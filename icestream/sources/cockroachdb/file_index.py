"""What files hold, found by workers: spans of timestamps, and whether there are rows at all.

Several epochs that wait would otherwise all have to read the same files.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from icestream.errors import DataRejected
from icestream.formats.json_cells import MalformedJson, lines
from icestream.frontier import Position
from icestream.iceberg.files import filesystem
from icestream.sources.cockroachdb.feed_file import PARQUET, PARQUET_UPDATED, FeedFile
from icestream.sources.cockroachdb.rows import rows_of, split_hlc, top_of

_UPDATED_IN_BYTES = re.compile(rb'"updated": ?"(\d+)\.(\d{10})\??"')
_MAYBE_DELETE = re.compile(rb'"after": ?null|^\{"__crdb__".*\}\}$', re.MULTILINE)


class FileIndexed(NamedTuple):
    """What a file holds: a span `[first, last)` of all its timestamps, and whether any row."""

    path: str
    first: Position = (0, 0)
    last: Position = (2**62, 0)
    only_deletes: bool = False


IndexFiles = Callable[[Sequence[Any]], Sequence[FileIndexed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTask:
    """A file whose span of timestamps is wanted."""

    location: str
    storage: Mapping[str, str]
    file: FeedFile

    def run(self) -> FileIndexed:
        """What the file holds, as far as can be seen."""
        files, _ = filesystem(self.location, self.storage)
        content = self.file.content(files)
        if self.file.format == PARQUET:
            return self._parquet(content)
        # A text that only looks like a timestamp widens the span, which costs a reading at worst.
        found = _UPDATED_IN_BYTES.findall(content)
        rows = content.count(b"\n") + (not content.endswith(b"\n"))
        only_deletes = has_only_deletes(self.file, content, rows)
        if len(found) < rows:
            # Some row spells its timestamp otherwise, and may have any.
            return FileIndexed(self.file.path, only_deletes=only_deletes)
        walls = [int(wall) for wall, _ in set(found)]
        return FileIndexed(self.file.path, (min(walls), 0), (max(walls) + 1, 0), only_deletes)

    def _parquet(self, content: bytes) -> FileIndexed:
        try:
            column = pq.read_table(pa.BufferReader(content), columns=[PARQUET_UPDATED])
        except (pa.ArrowInvalid, OSError) as error:
            raise self.file.damaged(str(error)) from error
        if not column.num_columns or not column.num_rows:
            return FileIndexed(self.file.path)
        walls, _ = split_hlc(self.file, column.column(0).combine_chunks())
        edges = pc.min_max(walls).as_py()
        return FileIndexed(self.file.path, (edges["min"], 0), (edges["max"] + 1, 0))


def has_only_deletes(file: FeedFile, content: bytes, rows: int) -> bool:
    """Whether a file of JSON has no row but deletes; only one that may be such is parsed."""
    if file.format == PARQUET or len(_MAYBE_DELETE.findall(content)) < rows:
        return False
    try:
        return bool(rows_of(file, top_of(lines(content))).deleted.all())
    except (MalformedJson, DataRejected):
        # Whoever reads its rows says what is wrong.
        return False
