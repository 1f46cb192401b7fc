"""What files that were rewritten do not have in common, found from their columns on workers.

    file ──► a hash for each row ══ by hash ══► as often before as after: carried over
                                                     │ places of all others
    file ──► the rows at these places ◄──────────────┘

Copy-on-write rewrites a file for one row; the rest is carried over and cancels out. Spark could
bring the rows together as well, but for each it handles many objects, and here twelve bytes travel.
What is left is compared once more, row by row, by the caller: too much may be left, never too
little.

Only plain files are read here: Parquet with field ids and no deletes. All others, and what Arrow
reads otherwise than Iceberg does, are left to Iceberg's reader.
"""

import logging
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from icestream.iceberg.files import filesystem
from icestream.iceberg.snapshots import PlainFile
from icestream.iceberg.staged import staged_name
from icestream.report import Row
from icestream.schema import arrow_schema, schema_from_json
from icestream.sources.iceberg.row_hashes import row_hashes
from icestream.spark import run_tasks

log = logging.getLogger(__name__)

SIGN = "sign"
# Of so many rows, more than this part being different: reading them here gains nothing.
_LEFT_MAX = 0.25
_BATCH_ROWS = 65_536
# A worker compares so many rows at a time; each takes some thirty bytes.
_BUCKET_ROWS = 2_000_000
_HASHES, _LEFT, _UNFIT = "hashes", "left", "unfit"
_FIELD_ID = b"PARQUET:field_id"
_NUMBER = struct.Struct("<I")
_PLACE_BYTES = 4
_HASH_BYTES = 8
_FILE_BITS = np.uint64(32)
_PLACE_MASK = np.uint64(0xFFFF_FFFF)

Places = npt.NDArray[np.uint64]
"""Rows as the number of their file in the high half and their place in it in the low half."""


class Unfit(Exception):
    """A file is none of those that are read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Files before the change (-1) or after it (1)."""

    files: Sequence[PlainFile]
    sign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The schema that rows are read in, and its columns that Spark knows, as they are staged."""

    schema_json: str
    staged: T.StructType
    partitioned_by: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads plain files in the columns of one schema, by field id.

    `written` are the types as Iceberg has them in files, `types` those that Spark takes.
    """

    io_properties: Mapping[str, str]
    written: Mapping[int, pa.DataType]
    types: Mapping[int, pa.DataType]
    partitioned_by: frozenset[int]

    def batches(self, path: str, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a file, or of some of its row groups, with columns called by their ids."""
        with _opened(path, self.io_properties) as file:
            names = self._names(file)
            chosen = range(file.num_row_groups) if groups is None else groups
            wanted = list(names.values())
            # Spark runs a task on each core already.
            for batch in file.iter_batches(
                _BATCH_ROWS, list(chosen), columns=wanted, use_threads=False
            ):
                yield self._as_spark_has(batch, names)

    def group_rows(self, path: str) -> list[int]:
        """How many rows each row group of a file has."""
        with _opened(path, self.io_properties) as file:
            metadata = file.metadata
            return [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]

    def _names(self, file: pq.ParquetFile) -> dict[int, str]:
        """What the file calls the columns that it has."""
        found = {_field_id(each): each for each in file.schema_arrow}
        if None in found or len(set(file.schema_arrow.names)) < len(found):
            raise Unfit("a file tells no field ids")
        for number, kind in self.written.items():
            if number not in found and number in self.partitioned_by:
                raise Unfit("a file leaves out what its partition tells")
            if number in found and not _same_parts(found[number].type, kind):
                raise Unfit("a file has parts of a column that the table has not, or lacks some")
        return {number: found[number].name for number in self.types if number in found}

    def _as_spark_has(self, batch: pa.RecordBatch, names: Mapping[int, str]) -> pa.RecordBatch:
        columns = [
            _cast(batch.column(names[number]), kind)
            if number in names
            else pa.nulls(batch.num_rows, kind)
            for number, kind in self.types.items()
        ]
        return pa.record_batch(columns, names=[staged_name(number) for number in self.types])


@contextmanager
def _opened(path: str, io_properties: Mapping[str, str]) -> Iterator[pq.ParquetFile]:
    files, inner = filesystem(path, io_properties)
    with files.open_input_file(inner) as source, pq.ParquetFile(source) as file:
        yield file


def _field_id(field: pa.Field) -> int | None:
    text = (field.metadata or {}).get(_FIELD_ID)
    return int(text) if text is not None else None


def _same_parts(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether nested types are made of the same fields; plain ones are cast."""
    if not pa.types.is_nested(want):
        return not pa.types.is_nested(have)
    if have.num_fields != want.num_fields or pa.types.is_struct(have) != pa.types.is_struct(want):
        return False
    pairs = [(have.field(n), want.field(n)) for n in range(want.num_fields)]
    named = not pa.types.is_struct(want) or all(one.name == other.name for one, other in pairs)
    return named and all(
        _field_id(one) == _field_id(other) and _same_parts(one.type, other.type)
        for one, other in pairs
    )


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)


def what_differs(
    spark: SparkSession, sides: Sequence[Side], columns: Columns, io_properties: Mapping[str, str]
) -> DataFrame | None:
    """The rows that are not as often after as before, in the staged columns, with their sign.

    None when the files must be read in another way.
    """
    reader = _reader(columns, io_properties)
    if reader is None:
        return None
    files = [(file, side.sign) for side in sides for file in side.files]
    left = _left(spark, reader, files)
    if left is None or len(left) > _LEFT_MAX * sum(file.rows for file, _ in files):
        return None
    return _rows(spark, reader, files, left, columns.staged)


def _reader(columns: Columns, io_properties: Mapping[str, str]) -> _Reader | None:
    """A reader of these columns; None if Arrow would read one otherwise than Spark has it."""
    if '"initial-default"' in columns.schema_json:
        return None
    try:
        schema = schema_from_json(columns.schema_json)
        wanted = arrow_schema(schema)
        staged = to_arrow_schema(columns.staged)
    except (ValueError, TypeError, NotImplementedError, PySparkException):
        return None
    kinds = {field.field_id: each.type for field, each in zip(schema.fields, wanted, strict=True)}
    known = {number: kind for number, kind in kinds.items() if staged_name(number) in staged.names}
    if len(known) < len(staged) or any(map(_has_uuid, known.values())):
        return None
    return _Reader(
        io_properties=io_properties,
        written=known,
        types={number: staged.field(staged_name(number)).type for number in known},
        partitioned_by=columns.partitioned_by,
    )


def _has_uuid(kind: pa.DataType) -> bool:
    """Whether there is a value that Spark has as text and a file as bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return True
    return any(_has_uuid(kind.field(n).type) for n in range(kind.num_fields))


def _left(
    spark: SparkSession, reader: _Reader, files: Sequence[tuple[PlainFile, int]]
) -> Places | None:
    """The places of the rows that are not carried over; None when a file is unfit."""
    workers = spark.sparkContext.defaultParallelism
    rows = sum(file.rows for file, _ in files)
    buckets = max(4 * workers, rows // _BUCKET_ROWS)
    signs = np.array([sign for _, sign in files], dtype=np.int64)

    def work(number: int) -> Iterator[Row]:
        return _hashed(reader, number, files[number][0], buckets)

    def gather(found: Iterator[Row]) -> Iterator[Row]:
        return _compared(found, signs)

    tasks = range(len(files))
    left = []
    for kind, _, payload in run_tasks(spark, tasks, work, gather, "rows carried over"):
        if kind == _UNFIT:
            log.info("rewritten files are read row by row: %s", payload.decode())
            return None
        left.append(np.frombuffer(payload, np.uint64))
    return np.sort(np.concatenate(left)) if left else np.zeros(0, dtype=np.uint64)


def _hashed(reader: _Reader, number: int, file: PlainFile, buckets: int) -> Iterator[Row]:
    """The hashes of a file's rows and their places, bucket by bucket."""
    try:
        hashes = [
            row_hashes(batch.columns, batch.num_rows) for batch in reader.batches(file.location)
        ]
    except (Unfit, OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        yield _UNFIT, 0, str(error).encode()
        return
    whole = np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.uint64)
    chosen = (whole % np.uint64(buckets)).astype(np.uint16)
    order = np.argsort(chosen, kind="stable").astype(np.uint32)
    cuts = np.searchsorted(chosen[order], np.arange(buckets + 1, dtype=np.uint16))
    ordered = whole[order]
    for bucket in range(buckets):
        first, last = cuts[bucket], cuts[bucket + 1]
        if first < last:
            parts = _NUMBER.pack(number), ordered[first:last].data, order[first:last].data
            yield _HASHES, bucket, b"".join(parts)


def _compared(found: Iterator[Row], signs: npt.NDArray[np.int64]) -> Iterator[Row]:
    """What is left of each bucket; other rows pass by."""
    current, pieces = 0, list[bytes]()
    for kind, bucket, payload in found:
        if kind != _HASHES:
            yield kind, bucket, payload
            continue
        if bucket != current and pieces:
            yield _LEFT, 0, _uncancelled(pieces, signs).tobytes()
            pieces = []
        current = bucket
        pieces.append(payload)
    if pieces:
        yield _LEFT, 0, _uncancelled(pieces, signs).tobytes()


def _uncancelled(pieces: Sequence[bytes], signs: npt.NDArray[np.int64]) -> Places:
    """The places of rows whose hash does not come as often before as after."""
    hashes, places, marks = [], [], []
    for piece in pieces:
        (number,) = _NUMBER.unpack_from(piece)
        count = (len(piece) - _NUMBER.size) // (_HASH_BYTES + _PLACE_BYTES)
        hashes.append(np.frombuffer(piece, np.uint64, count, _NUMBER.size))
        inside = np.frombuffer(piece, np.uint32, count, _NUMBER.size + count * _HASH_BYTES)
        places.append(inside.astype(np.uint64) | (np.uint64(number) << _FILE_BITS))
        marks.append(np.full(count, signs[number]))
    whole = np.concatenate(hashes)
    order = np.argsort(whole)
    ordered = whole[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    more = np.add.reduceat(np.concatenate(marks)[order], first)
    sizes = np.diff(np.append(first, len(ordered)))
    left: Places = np.concatenate(places)[order[np.repeat(more != 0, sizes)]]
    return left


def _rows(
    spark: SparkSession,
    reader: _Reader,
    files: Sequence[tuple[PlainFile, int]],
    left: Places,
    columns: T.StructType,
) -> DataFrame:
    """The rows at these places, each with the sign of its file."""
    counted = Counter((left >> _FILE_BITS).tolist())
    numbers = sorted(counted)
    inside = {
        number: (left[left >> _FILE_BITS == number] & _PLACE_MASK).astype(np.int64)
        for number in numbers
    }

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                file, sign = files[numbers[task]]
                for rows in _at(reader, file.location, inside[numbers[task]]):
                    marks = pa.array(np.full(rows.num_rows, sign, dtype=np.int32))
                    names = [*rows.schema.names, SIGN]
                    yield pa.record_batch([*rows.columns, marks], names=names)

    schema = T.StructType([*columns.fields, T.StructField(SIGN, T.IntegerType())])
    return spark.range(0, len(numbers), 1, max(1, len(numbers))).mapInArrow(read, schema)


def _at(reader: _Reader, path: str, places: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """The rows of a file at these places, in order; row groups without any are not read."""
    starts = np.concatenate([[0], np.cumsum(reader.group_rows(path))])
    cuts = np.searchsorted(places, starts)
    groups = np.flatnonzero(np.diff(cuts))
    # The chosen groups follow one another: a place counts from the first of them.
    skipped = starts[groups] - np.concatenate([[0], np.cumsum(np.diff(starts)[groups])])[:-1]
    shift = np.repeat(skipped, np.diff(cuts)[groups])
    wanted, begin = places - shift, 0
    for batch in reader.batches(path, groups.tolist()):
        end = begin + batch.num_rows
        first, last = np.searchsorted(wanted, (begin, end))
        if first < last:
            yield batch.take(pa.array(wanted[first:last] - begin))
        begin = end
