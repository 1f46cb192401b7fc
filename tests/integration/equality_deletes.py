"""Equality deletes and rows committed by hand, as an engine other than Spark might write them.

Files are written by pyarrow with the columns' ids, and hold nothing but the columns given; those
that are missing read as null.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from icestream.iceberg.catalog import local_path
from icestream.iceberg.table import Table

Values = Mapping[int, Any]
_KINDS = {"long": pa.int64(), "int": pa.int32(), "string": pa.string(), "boolean": pa.bool_()}


def commit_by_hand(
    table: Table,
    deleted: Sequence[Values],
    added: Sequence[Values] = (),
    partition: str = "",
    files: int = 1,
) -> None:
    """Commit one snapshot that deletes rows by these values, by field id, and adds some.

    Both reach the whole table, or one partition of its current spec; the rows added can be spread
    over many files.
    """
    iceberg, java = table.jvm.org.apache.iceberg, table.java
    spec = java.spec()
    if not partition:
        spec = next(each for each in java.specs().values() if each.isUnpartitioned())
    update = java.newRowDelta()
    if deleted:
        array = _integers(table, sorted(deleted[0]))
        builder = iceberg.FileMetadata.deleteFileBuilder(spec).ofEqualityDeletes(array)
        update = update.addDeletes(_described(builder, _written(table, deleted), partition))
    for number in range(files if added else 0):
        builder = iceberg.DataFiles.builder(spec)
        written = _written(table, added[number::files])
        update = update.addRows(_described(builder, written, partition))
    update.commit()
    java.refresh()


def _written(table: Table, rows: Sequence[Values]) -> tuple[Path, int]:
    fields = []
    for number in sorted(rows[0]):
        column = table.java.schema().findField(number)
        kind = _KINDS[str(column.type().toString())]
        metadata = {"PARQUET:field_id": str(number)}
        fields.append(pa.field(str(column.name()), kind, metadata=metadata))
    folder = Path(local_path(str(table.java.location()))) / "data"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"by-hand-{uuid.uuid4()}.parquet"
    columns = [
        pa.array([row[number] for row in rows], each.type)
        for number, each in zip(sorted(rows[0]), fields, strict=True)
    ]
    pq.write_table(pa.table(columns, schema=pa.schema(fields)), path)
    return path, len(rows)


def _described(builder: Any, written: tuple[Path, int], partition: str) -> Any:
    path, count = written
    if partition:
        builder = builder.withPartitionPath(partition)
    return (
        builder.withPath(str(path))
        .withFormat("PARQUET")
        .withFileSizeInBytes(path.stat().st_size)
        .withRecordCount(count)
        .build()
    )


def _integers(table: Table, numbers: Sequence[int]) -> Any:
    integer = table.jvm.java.lang.Integer.TYPE
    array = table.jvm.java.lang.reflect.Array.newInstance(integer, len(numbers))
    for place, number in enumerate(numbers):
        array[place] = number
    return array
