"""An Iceberg sink fed by hand: epochs of changes that a test writes down, without a source."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from icestream.change import AT, OP, SEQ, Op
from icestream.epoch import Epoch
from icestream.frontier import Frontier
from icestream.iceberg.catalog import Catalog
from icestream.schema import Column, TableShape, arrow_schema, schema_from_json
from icestream.sinks import Committed, Written
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sinks.iceberg.writer import IcebergWriter
from icestream.spark import stored_rows

Change = tuple[Op, Mapping[str, Any]]

PIPELINE = "hand"


def put(**row: Any) -> Change:
    """A row that takes the place of whatever has its key."""
    return Op.UPSERT, row


def gone(**key: Any) -> Change:
    """The row of this key is deleted."""
    return Op.DELETE, key


class HandFed:
    """A sink, and where its pipeline has got to."""

    def __init__(
        self,
        spark: SparkSession,
        properties: Mapping[str, str],
        shapes: Mapping[str, TableShape],
        *,
        frontier: Callable[[int], Frontier] = lambda number: Frontier({"hand": (number,)}),
        pipeline: str = PIPELINE,
        **options: Any,
    ):
        self.shapes = dict(shapes)
        self.frontier = frontier
        given = IcebergSinkOptions(catalog=properties, **options)
        hadoop = spark._jsparkSession.sessionState().newHadoopConf()
        catalog = Catalog(spark._jvm, hadoop, properties)
        self.sink = IcebergSink(catalog, given, pipeline, partial(stored_rows, spark))
        found = self.sink.claim(list(shapes)).values()
        self.number = max((progress.epoch for progress in found), default=0)

    def write(
        self, changes: Mapping[str, Sequence[Change]], truncated: Sequence[str] = ()
    ) -> Written:
        """Have the next epoch's files written; nothing is committed."""
        self.number += 1
        bounds = [self.frontier(number) for number in (self.number - 1, self.number)]
        epoch = Epoch(number=self.number, lower=bounds[0], upper=bounds[1])
        tables = sorted({*changes, *truncated})
        for table in tables:
            assert self.sink.prepare(table, lambda t=table: self.shapes[t])
        writer = self.sink.writer(epoch, tables)
        reports = [
            report
            for table, rows in changes.items()
            if rows
            for report in writer.write(table, "00000", batch(writer, table, rows))
        ]
        return Written(
            epoch=epoch,
            reports=reports,
            writer=writer,
            labels={},
            truncated=frozenset(truncated),
        )

    def commit(
        self, changes: Mapping[str, Sequence[Change]], truncated: Sequence[str] = ()
    ) -> Sequence[Committed]:
        """Write and commit the next epoch."""
        return self.sink.commit(self.write(changes, truncated))


def batch(writer: IcebergWriter, table: str, rows: Sequence[Change]) -> pa.Table:
    """Changes as a source would hand them over: by the names it reads, in the table's types."""
    fields = arrow_schema(schema_from_json(writer.schema_json(table)))
    known = {name for _, row in rows for name in row}
    columns: dict[str, pa.Array] = {
        OP: pa.array([int(op) for op, _ in rows], pa.int8()),
        AT: pa.array(range(len(rows)), pa.int64()),
        SEQ: pa.array([0] * len(rows), pa.int64()),
    }
    for field in fields:
        if field.name in known:
            columns[field.name] = array([row.get(field.name) for _, row in rows], field.type)
    return pa.table(columns)


def array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as an Arrow array; uuids, which Arrow does not take, among them."""
    if isinstance(kind, pa.BaseExtensionType):
        storage = pa.array([v if v is None else v.bytes for v in values], kind.storage_type)
        return pa.ExtensionArray.from_storage(kind, storage)
    return pa.array(values, kind)


def shape(key: Sequence[str], **columns: Any) -> TableShape:
    """A table's shape from its key and the Iceberg types of its columns."""
    return TableShape(
        columns=[Column(name=name, type=kind) for name, kind in columns.items()], key=key
    )
