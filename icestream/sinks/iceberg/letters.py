"""The dead letters of a pipeline's tables, read by Spark through Iceberg as of a snapshot."""

from collections.abc import Callable, Mapping

import pyarrow as pa

from icestream import dead_letters
from icestream.dead_letters import Spans
from icestream.errors import HistoryLost
from icestream.iceberg.rows import from_spark
from icestream.iceberg.staged import staged_name
from icestream.iceberg.table import Table
from icestream.schema import arrow_schema, schema_from_json
from icestream.sinks.iceberg.sink import IcebergSink

ReadStaged = Callable[[str, Mapping[str, str], str, Spans], pa.Table]
"""Reads staged rows; `icestream.spark.staged_rows` on a Spark session."""


class IcebergLetterBox:
    """See `icestream.dead_letters.LetterBox`."""

    def __init__(self, sink: IcebergSink, pipeline: str, read: ReadStaged):
        self._sink = sink
        self._pipeline = pipeline
        self._read = read

    def newest(self, table: str) -> int | None:
        """The newest snapshot of the branch that the pipeline writes to."""
        handle = self._sink.existing(table)
        return handle.head(self._pipeline, self._sink.branch).snapshot_id if handle else None

    def positions(self, table: str, snapshot_id: int) -> pa.Table:
        """Position, size and time of each letter."""
        handle = self._handle(table)
        names = _staged_names(handle)
        sizes = [f"coalesce(octet_length({names[part]}), 0)" for part in ("key", "payload")]
        columns = {
            dead_letters.POSITION: names[dead_letters.POSITION],
            "size": " + ".join(sizes),
            "at": names["at"],
        }
        at = arrow_schema(schema_from_json(handle.schema_json())).field("at").type
        schema = pa.schema(
            [(dead_letters.POSITION, pa.large_string()), ("size", pa.int64()), ("at", at)]
        )
        return self._rows(handle, snapshot_id, columns, schema, [])

    def read(self, table: str, snapshot_id: int, spans: Spans) -> pa.Table:
        """The letters whose positions lie in spans."""
        handle = self._handle(table)
        names = _staged_names(handle)
        columns = {column.name: names[column.name] for column in dead_letters.SHAPE.columns}
        fields = arrow_schema(schema_from_json(handle.schema_json()))
        schema = pa.schema([(name, fields.field(name).type) for name in columns])
        return self._rows(handle, snapshot_id, columns, schema, spans)

    def _handle(self, table: str) -> Table:
        handle = self._sink.existing(table)
        if handle is None:
            raise HistoryLost(
                f"table {self._sink.table_name(table)} is gone",
                detail="Its letters were tried again in an epoch that has to be read once more.",
                hint="Restore the table.",
            )
        return handle

    def _rows(
        self,
        handle: Table,
        snapshot_id: int,
        columns: Mapping[str, str],
        schema: pa.Schema,
        spans: Spans,
    ) -> pa.Table:
        with handle.staged(self._sink.branch, {}, snapshot_id) as staged:
            if staged is None:
                return schema.empty_table()
            position = columns[dead_letters.POSITION]
            found = self._read(staged, columns, position, spans)
        arrays = [from_spark(found.column(field.name), field.type) for field in schema]
        return pa.table(arrays, schema=schema)


def _staged_names(handle: Table) -> dict[str, str]:
    fields = schema_from_json(handle.schema_json()).fields
    return {field.name: staged_name(field.field_id) for field in fields}
