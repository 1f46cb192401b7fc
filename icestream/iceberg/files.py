"""Parquet files of Iceberg tables: where they lie, how they are written, what they hold.

A file is written under a name that only its own attempt at a task can write, in one atomic step: a
reader never meets half of it, and no second attempt touches it. What a commit must know of a file
is in `iceberg.closed`.
"""

import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    match_metrics_mode,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DateType,
    PrimitiveType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    UUIDType,
)

from icestream.errors import TargetUnavailable
from icestream.iceberg.closed import DATA

_TARGET_FILE_BYTES = 512 * 1024 * 1024
_ROW_GROUP_BYTES = 128 * 1024 * 1024
_PAGE_BYTES = 1024 * 1024
_DICTIONARY_BYTES = 2 * 1024 * 1024
_NUMBERED = (DateType, TimestampType, TimestamptzType, TimestampNanoType, TimestamptzNanoType)
# Code points that no text may hold.
_SURROGATES = range(0xD800, 0xE000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What closing one Parquet file tells: its place, size, row count and column metrics."""

    path: str
    record_count: int
    size_bytes: int
    metrics: Mapping[str, Any]
    split_offsets: Sequence[int]


class ParquetFolder:
    """Writes Parquet files of one table into one task's folder, by the table's own properties."""

    def __init__(
        self, folder: str, io_properties: Mapping[str, str], properties: Mapping[str, str]
    ):
        self.folder = folder
        self._io_properties = dict(io_properties)
        self._properties = dict(properties)

    def write(
        self, rows: pa.Table, schema: Schema, kind: str, first_number: int
    ) -> Iterator[Closed]:
        """Write rows, cut into files of the table's target size, numbered from `first_number`."""
        stem = "data-" if kind == DATA else "deletes/eqdel-"
        group_rows = self._rows_per_group(rows)
        start, number = 0, first_number
        while start < rows.num_rows:
            path = f"{self.folder}/{stem}{number:05d}.parquet"
            written, closed = self._write_one(path, rows.slice(start), schema, group_rows)
            yield closed
            start, number = start + written, number + 1

    def _write_one(
        self, path: str, rows: pa.Table, schema: Schema, group_rows: int
    ) -> tuple[int, Closed]:
        target_bytes = self._integer("write.target-file-size-bytes", _TARGET_FILE_BYTES)
        written = 0
        with _atomic_output(path, self._io_properties) as stream:
            with pq.ParquetWriter(stream, rows.schema, **self._writer_options(schema)) as writer:
                while written < rows.num_rows and (written == 0 or stream.tell() < target_bytes):
                    group = rows.slice(written, group_rows)
                    writer.write_table(group, row_group_size=group_rows)
                    written += group.num_rows
            size_bytes = stream.tell()
        metadata = writer.writer.metadata
        statistics = _metrics(metadata, schema, rows.slice(0, written), self._properties)
        offsets = statistics.pop("split_offsets")
        return written, Closed(
            path=path,
            record_count=written,
            size_bytes=size_bytes,
            metrics=statistics,
            split_offsets=offsets,
        )

    def _rows_per_group(self, rows: pa.Table) -> int:
        group_bytes = self._integer("write.parquet.row-group-size-bytes", _ROW_GROUP_BYTES)
        row_bytes = max(1, rows.nbytes // max(1, rows.num_rows))
        target_bytes = self._integer("write.target-file-size-bytes", _TARGET_FILE_BYTES)
        # Files are cut between row groups, so a group must not be larger than a file.
        return int(max(1, min(group_bytes, target_bytes) // row_bytes))

    def _writer_options(self, schema: Schema) -> dict[str, Any]:
        codec = self._properties.get("write.parquet.compression-codec", "zstd")
        level = self._properties.get("write.parquet.compression-level")
        return {
            "compression": "none" if codec == "uncompressed" else codec,
            "compression_level": None if level in (None, "null") else int(level),
            "data_page_size": self._integer("write.parquet.page-size-bytes", _PAGE_BYTES),
            "dictionary_pagesize_limit": self._integer(
                "write.parquet.dict-size-bytes", _DICTIONARY_BYTES
            ),
            "use_dictionary": self._properties.get("write.parquet.dict-enabled", "true") == "true",
            "store_schema": False,
            "store_decimal_as_integer": True,
            "write_statistics": _ordered_alike(schema),
        }

    def _integer(self, name: str, default: int) -> int:
        return int(self._properties.get(name, default))


def _ordered_alike(schema: Schema) -> bool | list[str]:
    """The columns that may have bounds: all but uuids.

    Parquet orders a uuid by its bytes, Iceberg's Java library as two signed numbers. By such bounds
    it passes over rows that a filter asks for, and over deletes that reach them.
    """
    paths = parquet_path_to_id_mapping(schema)
    uuids = {path for path, number in paths.items() if schema.find_type(number) == UUIDType()}
    return [path for path in paths if path not in uuids] if uuids else True


def _metrics(
    metadata: pq.FileMetaData, schema: Schema, rows: pa.Table, properties: dict[str, str]
) -> dict[str, Any]:
    """Iceberg's column metrics in its JSON form, by the table's metrics modes."""
    plan = compute_statistics_plan(schema, properties)
    field_ids = parquet_path_to_id_mapping(schema)
    none = match_metrics_mode("none")
    uuids = [
        column
        for column in schema.fields
        if column.field_type == UUIDType() and plan[column.field_id].mode != none
    ]
    for field_id, column in plan.items():
        if column.iceberg_type == UUIDType():
            plan[field_id] = replace(column, mode=none)
    # Python has no date before the year 1 or after 9999, and no nanoseconds: these bounds stay
    # numbers.
    counts = match_metrics_mode("counts")
    numbered = {
        field_id: column.iceberg_type
        for field_id, column in plan.items()
        if isinstance(column.iceberg_type, _NUMBERED) and column.mode not in (none, counts)
    }
    for field_id in numbered:
        plan[field_id] = replace(plan[field_id], mode=counts)
    found = data_file_statistics_from_parquet_metadata(metadata, plan, field_ids)
    for field_id in _without_bounds(metadata, field_ids):
        found.column_aggregates.pop(field_id, None)
    for aggregate in found.column_aggregates.values():
        if isinstance(aggregate.current_max, str) and aggregate.trunc_length is not None:
            aggregate.current_max = upper_text(aggregate.current_max, aggregate.trunc_length)
    statistics = found.to_serialized_dict()
    counted = set(statistics["value_counts"])
    bounds = _numbered_bounds(metadata, field_ids, numbered)
    values = {column.field_id: rows.num_rows for column in uuids}
    nulls = {column.field_id: rows.column(column.name).null_count for column in uuids}
    nan_counts = {
        column.field_id: pc.sum(pc.is_nan(rows.column(column.name)), min_count=0).as_py()
        for column in schema.fields
        if column.field_id in counted and pa.types.is_floating(rows.schema.field(column.name).type)
    }
    return {
        "column-sizes": _pairs(statistics["column_sizes"]),
        "value-counts": _pairs({**statistics["value_counts"], **values}),
        "null-value-counts": _pairs({**statistics["null_value_counts"], **nulls}),
        "nan-value-counts": _pairs(nan_counts),
        "lower-bounds": _hex_pairs({**statistics["lower_bounds"], **bounds[0]}),
        "upper-bounds": _hex_pairs({**statistics["upper_bounds"], **bounds[1]}),
        "split_offsets": statistics["split_offsets"],
    }


def _numbered_bounds(
    metadata: pq.FileMetaData, field_ids: Mapping[str, int], kinds: Mapping[int, PrimitiveType]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Lower and upper bounds of dates and timestamps, in Iceberg's form of single values."""
    ends: dict[int, list[int]] = {}
    unknown = set()
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            field_id, statistics = field_ids[column.path_in_schema], column.statistics
            if field_id not in kinds:
                continue
            if statistics is None:
                unknown.add(field_id)
            elif statistics.has_min_max:
                ends.setdefault(field_id, []).extend([statistics.min_raw, statistics.max_raw])
    known = {number: found for number, found in ends.items() if number not in unknown}
    sizes = {number: 4 if isinstance(kinds[number], DateType) else 8 for number in known}

    def written(end: Callable[[list[int]], int]) -> dict[int, bytes]:
        return {
            number: end(found).to_bytes(sizes[number], "little", signed=True)
            for number, found in known.items()
        }

    return written(min), written(max)


def _without_bounds(metadata: pq.FileMetaData, field_ids: Mapping[str, int]) -> set[int]:
    """Columns with a value so long that its row group has no statistics.

    The bounds of the other row groups would hide that value from readers with a filter.
    """
    columns = set()
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            statistics = column.statistics
            if column.physical_type != "BYTE_ARRAY" or statistics is None:
                continue
            if not statistics.has_min_max and statistics.null_count < column.num_values:
                columns.add(field_ids[column.path_in_schema])
    return columns


def upper_text(value: str, length_max: int) -> str | None:
    """An upper bound of at most `length_max` characters: the last one is raised, if any can be."""
    cut = value[:length_max]
    if cut == value:
        return value
    while cut:
        successor = ord(cut[-1]) + 1
        if successor == _SURROGATES.start:
            successor = _SURROGATES.stop
        if successor <= sys.maxunicode:
            return cut[:-1] + chr(successor)
        cut = cut[:-1]
    return None


def _pairs(values: Mapping[int, int]) -> dict[str, list[int]]:
    return {"keys": list(values), "values": list(values.values())}


def _hex_pairs(values: Mapping[int, bytes]) -> dict[str, list[Any]]:
    return {"keys": list(values), "values": [bound.hex() for bound in values.values()]}


def filesystem(location: str, io_properties: Mapping[str, str]) -> tuple[pafs.FileSystem, str]:
    """The Arrow file system that reaches a location, and the location's path in it."""
    # Table names may hold "?" and "#", which a URL parser would cut off.
    scheme, separator, rest = location.partition("://")
    if not separator:
        return pafs.LocalFileSystem(), os.path.abspath(location.removeprefix("file:"))
    if scheme == "file":
        return pafs.LocalFileSystem(), rest
    authority = rest.partition("/")[0]
    files = PyArrowFileIO(properties=dict(io_properties)).fs_by_scheme(scheme, authority)
    return files, rest.removeprefix(authority) if scheme in ("hdfs", "viewfs") else rest


@contextmanager
def _atomic_output(path: str, io_properties: Mapping[str, str]) -> Iterator[pa.NativeFile]:
    """A stream whose content appears under `path` as a whole or not at all."""
    try:
        files, inner = filesystem(path, io_properties)
        if not isinstance(files, pafs.LocalFileSystem):
            # Object stores show an object when its upload completes.
            with files.open_output_stream(inner) as stream:
                yield stream
            return
        os.makedirs(os.path.dirname(inner), exist_ok=True)
        staged = f"{inner}.{uuid.uuid4().hex}.tmp"
        try:
            with files.open_output_stream(staged) as stream:
                yield stream
            os.replace(staged, inner)
        except BaseException:
            if os.path.exists(staged):
                os.remove(staged)
            raise
    except OSError as error:
        raise TargetUnavailable(
            "could not write a file of the table",
            detail=f"{path}: {error}",
            hint="Check the storage's credentials, permissions and free space.",
        ) from error
