"""What a split of topics does with tables that are not there yet."""

import json

import numpy as np
import pyarrow as pa
import pytest

from icestream.sources import TablesUnready
from icestream.sources.kafka import split as splits
from icestream.sources.kafka.consumer import Range
from icestream.sources.kafka.envelope import ValueOptions
from icestream.sources.kafka.route import Route
from icestream.sources.kafka.rows import Records
from icestream.sources.kafka.split import KafkaSplit, Keys, Reading


class NoTables:
    """Targets before anything was made."""

    def tables(self):
        return ()


def records(*pairs: tuple[object, object]) -> Records:
    written = [[None if part is None else json.dumps(part).encode() for part in p] for p in pairs]
    return Records(
        keys=pa.array([key for key, _ in written], pa.binary()),
        values=pa.array([value for _, value in written], pa.binary()),
        offsets=np.arange(len(pairs)),
        timestamps=np.zeros(len(pairs), dtype=np.int64),
    )


def lacking(monkeypatch, *batches: Records) -> TablesUnready:
    """What a split says that reads these batches."""
    reading = Reading(
        settings={},
        value=ValueOptions(envelope="upsert"),
        registry=None,
        route=Route(),
        keys=Keys(by_table={}, otherwise=()),
        declared={},
        read_timeout=1.0,
        dead_letters=False,
        keyed=True,
    )
    # A broker is read in the integration tests; what comes from it is chosen here.
    monkeypatch.setattr(splits, "read_range", lambda *_, **__: iter(batches))
    wanted = Range(topic="t", partition=0, start=0, end=10)
    split = KafkaSplit(ranges=[wanted], reading=reading, tables=(), bytes_max=10**6)
    with pytest.raises(TablesUnready) as caught:
        list(split.changes(NoTables()))
    return caught.value


def test_what_is_lacking_is_told_before_everything_is_read(monkeypatch):
    """K7: what comes later is read when the table is there; news is waited for once more."""
    # The batches are tiny.
    monkeypatch.setattr(splits, "SAMPLE_BYTES", 0)
    one = records(({"id": 1}, {"id": 1, "v": 1}))
    news = records(({"id": 2}, {"id": 2, "w": "x"}))
    unready = lacking(
        monkeypatch, one, news, one, one, one, records(({"id": 3}, {"id": 3, "z": 1}))
    )
    assert [column.name for column in unready.shapes["t"].columns] == ["id", "v", "w"]


def test_a_table_is_made_from_all_records_that_are_read(monkeypatch):
    """K7: not from the first batch alone."""
    one = records(({"id": 1}, {"id": 1, "v": 1}))
    other = records(({"id": 2}, {"id": 2, "v": 1.5, "w": "x"}))
    shape = lacking(monkeypatch, one, other).shapes["t"]
    found = {column.name: str(column.type) for column in shape.columns}
    assert found == {"id": "long", "v": "double", "w": "string"}
    assert list(shape.key) == ["id"]


def test_deletes_are_never_dropped_because_their_table_is_not_there_yet(monkeypatch):
    """E3, E5: an epoch before it, on its way at the same time, may hold the rows they delete."""
    shape = lacking(monkeypatch, records(({"id": 1}, None), ({"id": 2}, None))).shapes["t"]
    assert [column.name for column in shape.columns] == ["id"]
