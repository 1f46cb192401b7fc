"""Parts that are frames: nothing of them is lost in silence, no column and no partition."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, TimeType
from pyspark.sql import types as T

from icestream.change import Op
from icestream.documents import ID
from icestream.errors import SchemaRejected
from icestream.report import Report, decode
from icestream.schema import Column, Reads
from icestream.sinks.iceberg.publishing import collect
from icestream.sources import FRAME_ROW
from icestream.sources.iceberg.source import _columns
from icestream.transform import CHANGE_AT, CHANGE_OP, CHANGE_SEQ, struct_name
from icestream.worker import frames
from icestream.worker.frames import _Partition, _refuse_unread, _write_partition
from tests.property.tables import LocalTable

COLUMNS = [Column(name="id", type=LongType()), Column(name="at", type=TimeType())]


def frame(*names: str) -> Any:
    row = T.StructType([T.StructField(name, T.LongType()) for name in names])
    return SimpleNamespace(schema=T.StructType([T.StructField(FRAME_ROW, row)]))


def reading(*names: str) -> Reads:
    return Reads(columns=frozenset(names), named=frozenset(), beginning=False, hidden=frozenset())


def test_a_column_that_spark_does_not_read_is_refused_where_it_is_needed():
    """O8, E11, U5: a select that leaves it out is the way out that the message names."""
    part: Any = SimpleNamespace(table="t", columns=COLUMNS)
    for reads in (None, reading("id", "at")):
        with pytest.raises(SchemaRejected, match="column at of table t") as caught:
            _refuse_unread(part, frame("id"), reads)
        assert "leaves the column out" in str(caught.value.hint)
        _refuse_unread(part, frame("id", "at"), reads)
    _refuse_unread(part, frame("id"), reading("id"))


def test_a_column_of_any_shape_is_refused_where_it_is_needed():
    """O8, E11, U5: also where Spark reads it; a table of rows has no type for it."""
    part: Any = SimpleNamespace(table="t", columns=_columns(schema("variant")))
    for reads in (None, reading("id", "v")):
        with pytest.raises(SchemaRejected, match="column v of table t") as caught:
            _refuse_unread(part, frame("id", "v"), reads)
        assert "leaves the column out" in str(caught.value.hint)
    _refuse_unread(part, frame("id", "v"), reading("id"))


def schema(kind: str) -> str:
    """A table with a column of some type, as Iceberg prints it."""
    fields = [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "v", "required": False, "type": kind},
    ]
    return json.dumps({"type": "struct", "schema-id": 0, "fields": fields})


def inserts(ids: Sequence[int]) -> pa.RecordBatch:
    """A batch of a frame that adds rows with these ids."""
    columns = {
        CHANGE_OP: pa.array([int(Op.INSERT)] * len(ids), pa.int8()),
        CHANGE_AT: pa.array([1] * len(ids), pa.int64()),
        CHANGE_SEQ: pa.array([0] * len(ids), pa.int64()),
        ID: pa.array(map(str, ids)),
        struct_name(0): pa.StructArray.from_arrays([pa.array(ids, pa.int64())], names=["id"]),
    }
    return pa.record_batch(columns)


def test_rows_of_all_partitions_of_all_frames_are_committed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """E1, I17: tasks with other rows have other names, a second attempt has those of the first."""
    monkeypatch.setattr(frames, "WRITE_BYTES", 1)  # each batch is enough for files
    schema = Schema(NestedField(1, "id", LongType(), required=True))
    writer = LocalTable(folder=tmp_path, schema=schema, key=["id"]).writer()
    rows: dict[tuple[int, int, int], Sequence[Sequence[int]]] = {
        # Frame, partition and attempt.
        (0, 0, 0): [[1], [2, 3]],
        (0, 1, 0): [[4, 5, 6]],
        (0, 1, 1): [[4, 5, 6]],
        (1, 1, 0): [[7]],
    }
    reports = []
    for (frame_number, number, _), batches in rows.items():
        monkeypatch.setattr(frames, "_partition_number", lambda n=number: n)  # as Spark says it
        part = _Partition(
            frame=frame_number, table="t", identified=True, writer=writer, select=None
        )
        found = decode(_write_partition(part, map(inserts, batches)))
        reports += [message for message in found if isinstance(message, Report)]
    (files,) = collect(reports, 1).values()
    assert sum(file.record_count for file in files) == 7
