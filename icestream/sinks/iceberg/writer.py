"""The worker's half of the Iceberg sink: changes in, data and equality-delete files out.

    changes ──fold──► kept ─────► by partition ──► data-<n>.parquet
                  └─► deleted ──► by old partition, or global ──► deletes/eqdel-<n>.parquet

Folding comes first, so that no file deletes a row of its own commit: an equality delete reaches
only rows of older snapshots, and of two rows with one key in one commit both would stay.

The obvious place for a delete, the new row's partition, is wrong: an update may move a row to
another partition and would leave the old copy behind. A delete is bound to a partition only when
the key or a before-image proves where the old row lies and all rows of the table follow the same
partition spec; every other delete is written under the unpartitioned spec and reaches everywhere.

Files lie at `<table>/data/icestream/job=<pipeline>/epoch=<n>/shard=<task>-<attempt>/`. The task's
name holds the run's generation, and each attempt at a task draws a name of its own. So nobody ever
writes under a name that was reported: neither a task of an older run, nor a retried or speculative
one, however late it ends and however its input was batched. What a failed attempt leaves is an
orphan that nobody sees.
"""

import dataclasses
import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import MonthTransform, Transform, YearTransform
from pyiceberg.types import IcebergType, NestedField, StructType

from icestream.change import AT, BEFORE, OP, SEQ, fold
from icestream.errors import SchemaRejected
from icestream.iceberg.closed import DATA, EQUALITY_DELETES, FileClosed
from icestream.iceberg.files import Closed, ParquetFolder
from icestream.iceberg.target import SortColumn, WriteTarget
from icestream.names import TableNames
from icestream.report import Report
from icestream.schema import arrow_schema, calendar_day, renamed_type, schema_from_json

_FRACTION_DIGITS = {"us": 6, "ns": 9}
# What a change batch has beside the table's own columns.
_MARKS = (OP, AT, SEQ, BEFORE)
# 64 bits: no two of the few attempts at a task draw the same.
_ATTEMPT_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergWriter:
    """Writes one epoch's files for any of its tables; see the module.

    `feeders` says by Iceberg table which source table feeds it, and what another one is told;
    `refusals` say by source table why it is refused. Changes of the tables in `only_read` are read,
    which tells rows from dead letters, and not written: these tables have them.
    """

    pipeline: str
    epoch: int
    run: str
    targets: Mapping[str, WriteTarget]
    names: TableNames = dataclasses.field(default_factory=TableNames)
    feeders: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only_read: frozenset[str] = frozenset()

    def tables(self) -> Collection[str]:
        """The tables that it writes to."""
        return self.targets.keys()

    def refused(self, table: str) -> str | None:
        """Why records cannot have a table of this name; None when they can."""
        feeder, reason = self.feeders.get(self.names.of(table), (table, ""))
        taken = reason if feeder != table else None
        return self.names.unusable(table) or self.refusals.get(table) or taken

    def schema_json(self, table: str) -> str:
        """The schema that changes of the table must be read with, under the source's names."""
        target = self.targets[table]
        return target.source_schema_json or target.schema_json

    def key(self, table: str) -> Sequence[str]:
        """The columns that identify a row, by the source's names."""
        target = self.targets[table]
        if not target.source_schema_json:
            return target.equality_columns
        schema = schema_from_json(target.schema_json)
        ids = {field.name: field.field_id for field in schema.fields}
        seen = schema_from_json(target.source_schema_json)
        names = {field.field_id: field.name for field in seen.fields}
        return [names[ids[name]] for name in target.equality_columns]

    def reads(self, table: str) -> None:
        """Nothing is selected: every column counts."""
        return None

    def write(
        self, table: str, shard: str, changes: pa.Table, each_key_once: bool = False
    ) -> Iterator[Report]:
        """Fold the changes and write what remains; reports each file when it is closed."""
        if table in self.only_read:
            return
        target = self.targets[table]
        share = _Share(self, table, f"{self.run}-{shard}")
        named = _by_table_names(changes, target)
        folded = fold(named, target.equality_columns, each_key_once)
        yield from share.write_data(folded.kept)
        yield from share.write_deletes(folded.deleted)


class _Share:
    """One attempt's share of one table: the folder it writes to and the numbers of its files."""

    def __init__(self, writer: IcebergWriter, table: str, worker: str):
        self.writer = writer
        self.table = table
        self.worker = worker
        self.target = writer.targets[table]
        self.schema = schema_from_json(self.target.schema_json)
        self.spec = PartitionSpec.model_validate(json.loads(self.target.spec_json))
        self.attempt = uuid.uuid4().hex[:_ATTEMPT_CHARACTERS]
        folder = (
            f"{self.target.location}/icestream/job={writer.pipeline}"
            f"/epoch={writer.epoch}/shard={worker}-{self.attempt}"
        )
        self.files = ParquetFolder(folder, self.target.io_properties, self.target.properties)
        self._numbers = {DATA: 0, EQUALITY_DELETES: 0}

    def write_data(self, rows: pa.Table) -> Iterator[Report]:
        if rows.num_rows == 0:
            return
        complete = _complete(rows, self.schema)
        for partition, part in _by_partition(complete, complete, self.spec, self.schema):
            ordered = _sorted(part, self.target.sort_columns)
            for closed in self._close(ordered, self.schema, DATA):
                yield self._report(closed, DATA, self.target.spec_id, partition)

    def write_deletes(self, rows: pa.Table) -> Iterator[Report]:
        if rows.num_rows == 0:
            return
        key_schema = self.schema.select(*self.target.equality_columns)
        keys = _complete(rows, key_schema)
        for spec_id, partition, part in self._delete_groups(rows, keys):
            for closed in self._close(part, key_schema, EQUALITY_DELETES):
                yield self._report(closed, EQUALITY_DELETES, spec_id, partition)

    def _delete_groups(
        self, rows: pa.Table, keys: pa.Table
    ) -> Iterator[tuple[int, dict[str, Any], pa.Table]]:
        """Deletes by the partition in which the old row is known to lie; the rest are global."""
        target = self.target
        if self.spec.is_unpartitioned() or not target.one_spec:
            yield target.global_spec_id, {}, keys
            return
        sources = [self.schema.find_column_name(field.source_id) for field in self.spec.fields]
        if set(sources) <= set(target.equality_columns):
            for partition, part in _by_partition(keys, keys, self.spec, self.schema):
                yield target.spec_id, partition, part
            return
        needed = {_path(self.schema.fields, field.source_id)[0] for field in self.spec.fields}
        if BEFORE not in rows.column_names or not needed <= _names(rows.column(BEFORE).type):
            yield target.global_spec_id, {}, keys
            return
        before = rows.column(BEFORE).combine_chunks()
        known = pc.is_valid(before)
        images = pa.Table.from_struct_array(before.filter(known))
        for partition, part in _by_partition(keys.filter(known), images, self.spec, self.schema):
            yield target.spec_id, partition, part
        unknown = keys.filter(pc.invert(known))
        if unknown.num_rows:
            yield target.global_spec_id, {}, unknown

    def _close(self, rows: pa.Table, schema: Schema, kind: str) -> Iterator[Closed]:
        for closed in self.files.write(rows, schema, kind, self._numbers[kind]):
            self._numbers[kind] += 1
            yield closed

    def _report(self, closed: Closed, kind: str, spec_id: int, partition: dict[str, Any]) -> Report:
        deletes = kind == EQUALITY_DELETES
        columns = self.target.equality_columns if deletes else ()
        return FileClosed(
            table=self.table,
            epoch=self.writer.epoch,
            worker=self.worker,
            attempt=self.attempt,
            schema_id=self.target.schema_id,
            spec_id=spec_id,
            path=closed.path,
            kind=kind,
            record_count=closed.record_count,
            size_bytes=closed.size_bytes,
            partition=partition,
            equality_ids=[self.schema.find_field(name).field_id for name in columns],
            metrics=closed.metrics,
            split_offsets=closed.split_offsets,
            sort_order_id=self.target.sort_order_id if self.target.sort_columns else 0,
        ).report()


def _by_table_names(changes: pa.Table, target: WriteTarget) -> pa.Table:
    """The changes with their columns called as the table calls them, before-images included."""
    if not target.source_schema_json:
        return changes
    seen, schema = (
        StructType(*schema_from_json(text).fields)
        for text in (target.source_schema_json, target.schema_json)
    )
    known = {field.name for field in seen.fields}
    names = [name for name in changes.column_names if name in known or name in _MARKS]
    columns, fields = [], []
    for name in names:
        column = changes.column(name)
        row = pa.struct([changes.schema.field(name)])
        if name == BEFORE:
            field = pa.field(name, renamed_type(column.type, seen, schema))
        else:
            field = renamed_type(row, seen, schema).field(0)
        if field.type != column.type:
            # The same buffers under another type: nothing is copied.
            parts = [part.view(field.type) for part in column.chunks]
            column = pa.chunked_array(parts, field.type)
        columns.append(column)
        fields.append(field)
    return pa.table(columns, schema=pa.schema(fields))


def _complete(rows: pa.Table, schema: Schema) -> pa.Table:
    """The rows with exactly the table's columns, with field ids; what is absent is null."""
    columns = []
    fields = arrow_schema(schema)
    for field in fields:
        if field.name in rows.column_names:
            column = rows.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(rows.num_rows, field.type)]))
        if not field.nullable and columns[-1].null_count:
            raise SchemaRejected(
                f"column {field.name} is required but the source has no value for it",
                hint="Make the table's column optional, or fill it at the source.",
            )
    return pa.table(columns, schema=fields)


def _by_partition(
    rows: pa.Table, images: pa.Table, spec: PartitionSpec, schema: Schema
) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Cut rows by the partitions that their images fall into."""
    if spec.is_unpartitioned():
        yield {}, rows
        return
    if rows.num_rows == 0:
        return
    values = {}
    for field in spec.fields:
        kind = schema.find_type(field.source_id)
        column = _plain(_column(images, _path(schema.fields, field.source_id)))
        values[str(field.field_id)] = transformed(column, field.transform, kind)
    names = list(values)
    # Void gives nulls of the source's type; dictionary codes make any column comparable.
    codes = pa.table({name: _codes(array) for name, array in values.items()}).append_column(
        "row", pa.array(np.arange(rows.num_rows, dtype=np.int64))
    )
    groups = codes.group_by(names, use_threads=False).aggregate([("row", "list")])
    result_types = {
        str(f.field_id): f.transform.result_type(schema.find_type(f.source_id)) for f in spec.fields
    }
    for indices in groups.column("row_list"):
        first = indices.values[0].as_py()
        partition = {
            name: partition_value(_value(values[name][first]), str(result_types[name]), name, spec)
            for name in names
        }
        yield partition, rows.take(indices.values)


def transformed(column: pa.Array, transform: Transform[Any, Any], kind: IcebergType) -> pa.Array:
    """The column's partition values.

    For years and months of days far away the library has null, and readers would look elsewhere.
    """
    if not isinstance(transform, YearTransform | MonthTransform):
        return transform.pyarrow_transform(kind)(column)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    dated = pa.types.is_date32(column.type)
    numbers = column.cast(pa.int32() if dated else pa.int64()).fill_null(0).to_numpy()
    if not dated:
        numbers = numbers // (86_400 * 10 ** _FRACTION_DIGITS[column.type.unit])
    unit = "Y" if isinstance(transform, YearTransform) else "M"
    found = numbers.astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.int64)
    return pa.array(found.astype(np.int32), mask=nulls)


def _path(fields: Sequence[NestedField], field_id: int) -> list[str]:
    """The names that lead to a field, from the outermost struct to itself; empty if not there."""
    for field in fields:
        if field.field_id == field_id:
            return [field.name]
        if isinstance(field.field_type, StructType):
            if inner := _path(field.field_type.fields, field_id):
                return [field.name, *inner]
    return []


def _column(rows: pa.Table, path: Sequence[str]) -> pa.Array:
    column = rows.column(path[0]).combine_chunks()
    return pc.struct_field(column, path[1:]) if path[1:] else column


def _names(struct: pa.StructType) -> set[str]:
    return {field.name for field in struct}


def _plain(column: pa.Array) -> pa.Array:
    """The column in a type that transforms and sorting know."""
    if isinstance(column, pa.ExtensionArray):
        return column.storage
    return column.cast(pa.binary()) if pa.types.is_large_binary(column.type) else column


def _codes(array: pa.Array) -> pa.Array:
    return pc.fill_null(pc.dictionary_encode(array).indices, -1)


def _value(scalar: pa.Scalar) -> Any:
    """A value as Python has it; days and timestamps, which may lie beyond its years, as texts."""
    kind = scalar.type
    if scalar.is_valid and pa.types.is_date32(kind):
        return iso_day(scalar.value)
    if scalar.is_valid and pa.types.is_timestamp(kind):
        digits = _FRACTION_DIGITS[kind.unit]
        day, rest = divmod(scalar.value, 86_400 * 10**digits)
        second, fraction = divmod(rest, 10**digits)
        clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        return f"{iso_day(day)}T{clock}.{fraction:0{digits}d}{'+00:00' if kind.tz else ''}"
    return scalar.as_py()


def iso_day(number: int) -> str:
    """A day, counted from 1970-01-01, as ISO 8601 writes it in any year."""
    year, month, day = calendar_day(number)
    shown = f"{year:04d}" if 0 <= year <= 9999 else f"{year:+05d}"
    return f"{shown}-{month:02d}-{day:02d}"


def partition_value(value: Any, result_type: str, field_id: str, spec: PartitionSpec) -> Any:
    """A partition value in Iceberg's JSON form of single values."""
    if value is None:
        return None
    transform = str(next(f.transform for f in spec.fields if str(f.field_id) == field_id))
    if transform == "day":
        return value if isinstance(value, str) else iso_day(value)
    if isinstance(value, bytes):
        if result_type == "uuid":
            text = value.hex()
            return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
        return value.hex().upper()
    if hasattr(value, "isoformat"):
        text = value.isoformat(timespec="microseconds") if hasattr(value, "hour") else str(value)
        return text
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _sorted(rows: pa.Table, columns: Sequence[SortColumn]) -> pa.Table:
    """The rows in the table's order; to Iceberg not-a-number is greater than any number.

    Each key costs time: nulls and not-a-numbers have one of their own only where there are any.
    """
    if not columns:
        return rows
    keys: list[tuple[pa.Array, bool]] = []
    for name, ascending, nulls_first in columns:
        values = _plain(_column(rows, [name]))
        if values.null_count:
            keys.append((pc.is_null(values), not nulls_first))
        if pa.types.is_floating(values.type):
            no_number = pc.fill_null(pc.is_nan(values), False)
            if pc.any(no_number).as_py():
                keys.append((no_number, ascending))
        keys.append((values, ascending))
    plain = pa.table([values for values, _ in keys], names=list(map(str, range(len(keys)))))
    order = [
        (str(number), "ascending" if ascending else "descending")
        for number, (_, ascending) in enumerate(keys)
    ]
    return rows.take(pc.sort_indices(plain, sort_keys=order))
