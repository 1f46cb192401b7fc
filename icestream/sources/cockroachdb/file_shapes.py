"""What tables look like before they are made, by the files of their first epochs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyiceberg.types import IcebergType

from icestream.errors import ConfigInvalid
from icestream.formats.json_cells import Cells, MalformedJson, lines
from icestream.formats.json_columns import infer_type
from icestream.schema import Column, TableShape
from icestream.sources.cockroachdb.feed_file import PARQUET, PARQUET_UPDATED, FeedFile
from icestream.sources.cockroachdb.file_index import has_only_deletes
from icestream.sources.cockroachdb.file_split import column_type
from icestream.sources.cockroachdb.rows import (
    KeySearch,
    key_parts,
    no_timestamps,
    rows_of,
    timestamps,
    top_of,
)

_SAMPLE_BYTES = 4 * 1024 * 1024


class FileShapes:
    """Files that tell what a table looks like, kept until it was written to.

    Thread: the loop's keeps them, those of epochs ask for shapes and tell what was written.
    """

    def __init__(
        self,
        files: pafs.FileSystem,
        declared: Callable[[str], Mapping[str, IcebergType]],
        named_key: Callable[[str], Sequence[str]],
    ):
        self._filesystem = files
        self._declared = declared
        self._named_key = named_key
        self._shapes: dict[str, TableShape] = {}
        self._files: dict[str, Sequence[FeedFile]] = {}
        # Tables that were written to: what they look like is known.
        self._written: set[str] = set()
        # Tables that this run has read and that had only deletes so far.
        self.without_rows: set[str] = set()
        # Files that have nothing but deletes.
        self.deletes: set[str] = set()

    def shape(self, table: str) -> TableShape | None:
        """Columns and key from the rows of the table's first epoch; None if it only deletes."""
        if table not in self._shapes:
            shape = self._inferred(table, self._with_rows(self._files.get(table, ())))
            if shape is None:
                self.without_rows.add(table)
                return None
            self.without_rows.discard(table)
            self._shapes[table] = shape
            self._files.pop(table, None)
        return self._shapes[table]

    def keep(self, table: str, files: Sequence[FeedFile]) -> None:
        """Keep files of an epoch that is planned.

        Later epochs are planned before this one is written: its rows must stay in the sample, or a
        table whose next epoch only deletes would seem to be nothing yet. Files that were read
        before tell the key, where the rows of one epoch may not.
        """
        if table not in self._shapes and table not in self._written:
            sample = dict.fromkeys([*self._files.get(table, ()), *files])
            self._files[table] = self._with_rows(sample)

    def written(self, table: str) -> None:
        """Told that a table was written to: it needs no sample any more."""
        self._written.add(table)
        self.without_rows.discard(table)
        self._files.pop(table, None)

    def forget_but(self, files: Collection[str]) -> None:
        """Keep what is known of these files alone; other threads may learn meanwhile."""
        for table, sample in list(self._files.items()):
            self._files[table] = self._with_rows(sample)
        self.deletes = {path for path in list(self.deletes) if path in files}

    def _with_rows(self, files: Iterable[FeedFile]) -> list[FeedFile]:
        """Those of the files that may have a row."""
        return [file for file in files if file.path not in self.deletes]

    def _inferred(self, table: str, sample: Sequence[FeedFile]) -> TableShape | None:
        """Columns and key of a table from its first rows."""
        declared = self._declared(table)
        columns: dict[str, Column] = {}
        key = list(self._named_key(table))
        read = 0
        for file in sample:
            if read > _SAMPLE_BYTES and columns and key:
                break
            content = file.content(self._filesystem)
            read += len(content)
            found, file_key = self._sampled(table, file, content, declared, key)
            if not found and has_only_deletes(file, content, rows=0):
                self.deletes.add(file.path)
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
        if file.format == PARQUET:
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


def _named(cells: Mapping[str, Cells], names: Sequence[str]) -> dict[str, Cells]:
    return {name: cells[name] for name in names if name in cells}


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
    if PARQUET_UPDATED not in schema.names:
        raise no_timestamps(file)
    return [
        Column(name=column.name, type=column_type(column.type, declared, column.name))
        for column in schema
        if not column.name.startswith("__crdb_")
    ]
