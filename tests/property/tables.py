"""A table in a local folder, written by the real writer and read back by hand.

Reading applies equality deletes as the Iceberg specification says, in plain Python: a delete file
reaches the rows of earlier commits, in its own partition, or everywhere when its spec has none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import Transform

from icestream.iceberg.closed import DATA, FileClosed
from icestream.iceberg.target import SortColumn, WriteTarget
from icestream.sinks.iceberg.writer import IcebergWriter

GLOBAL_SPEC_ID = 99
SPEC_ID = 1


@dataclass(kw_only=True)
class LocalTable:
    """The table; `terms` are its partition terms as `(column, transform)`."""

    folder: Path
    schema: Schema
    key: Sequence[str]
    terms: Sequence[tuple[str, Transform[Any, Any]]] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    one_spec: bool = True
    sort_columns: Sequence[SortColumn] = ()
    commits: list[list[FileClosed]] = field(default_factory=list)

    def target(self) -> WriteTarget:
        """What the catalog would hand to workers."""
        fields = [
            PartitionField(
                self.schema.find_field(column).field_id, 1000 + number, term, f"p{number}"
            )
            for number, (column, term) in enumerate(self.terms)
        ]
        spec_id = SPEC_ID if fields else GLOBAL_SPEC_ID
        return WriteTarget(
            table="shop.orders",
            uuid="3f1c",
            location=f"{self.folder}/data",
            schema_id=5,
            schema_json=self.schema.model_dump_json(),
            spec_id=spec_id,
            spec_json=PartitionSpec(*fields, spec_id=spec_id).model_dump_json(),
            global_spec_id=GLOBAL_SPEC_ID,
            one_spec=self.one_spec,
            sort_columns=self.sort_columns,
            sort_order_id=4 if self.sort_columns else 0,
            properties=self.properties,
            io_properties={},
            equality_columns=self.key,
        )

    def writer(self, epoch: int = 1, run: str = "g1.0") -> IcebergWriter:
        """A writer for one epoch."""
        return IcebergWriter(
            pipeline="orders",
            epoch=epoch,
            run=run,
            targets={"t": self.target()},
        )

    def write(self, changes: pa.Table, shard: str = "00000") -> list[FileClosed]:
        """Have changes written as the next epoch and take its files into the table."""
        writer = self.writer(epoch=len(self.commits) + 1)
        files = [FileClosed.of(report) for report in writer.write("t", shard, changes)]
        self.commits.append(files)
        return files

    def rows(self) -> list[dict[str, Any]]:
        """The rows that a reader sees."""
        found = []
        for number, files in enumerate(self.commits):
            for file in files:
                if file.kind == DATA:
                    gone = self._deleted(number, file)
                    read = pq.read_table(file.path).to_pylist()
                    found += [row for row in read if self._key(row) not in gone]
        return found

    def _deleted(self, number: int, data: FileClosed) -> set[tuple[Any, ...]]:
        """The keys that later commits delete from a data file."""
        deletes = [
            file
            for files in self.commits[number + 1 :]
            for file in files
            if file.kind != DATA and self._reaches(file, data)
        ]
        return {self._key(row) for file in deletes for row in pq.read_table(file.path).to_pylist()}

    def _reaches(self, delete: FileClosed, data: FileClosed) -> bool:
        if delete.spec_id == GLOBAL_SPEC_ID:
            return True
        return (delete.spec_id, delete.partition) == (data.spec_id, data.partition)

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    def repartitioned(self, terms: Sequence[tuple[str, Transform[Any, Any]]]) -> "LocalTable":
        """The same table after its partition spec was changed."""
        return replace(self, terms=terms, one_spec=False)


def partitions(files: Sequence[FileClosed], kind: str) -> list[Any]:
    """The partitions of the files of one kind, sorted; each as its only value, or all of them."""
    found = [file.partition for file in files if file.kind == kind]
    values = [next(iter(p.values())) if len(p) == 1 else dict(p) for p in found]
    return sorted(values, key=lambda value: json.dumps(value, sort_keys=True))
