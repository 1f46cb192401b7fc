"""Parts that are frames: what Spark does not read is not null in silence."""

from types import SimpleNamespace
from typing import Any

import pytest
from pyiceberg.types import LongType, TimeType
from pyspark.sql import types as T

from icestream.errors import SchemaRejected
from icestream.schema import Column, Reads
from icestream.sources import FRAME_ROW
from icestream.worker.frames import _refuse_unread

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
