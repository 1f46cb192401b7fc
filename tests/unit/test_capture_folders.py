"""Captures of a real server are played into folders that the source reads like a bucket."""

import json

import pytest

from icestream.epoch import Epoch
from icestream.frontier import START
from icestream.sources.cockroachdb import CockroachdbOptions
from icestream.sources.cockroachdb.files import CockroachdbFiles
from icestream.sources.cockroachdb.hlc import resolved_of as resolved_of_frontier
from tests.captures import FeedFolder, capture, capture_names, play, resolved_of, with_key
from tests.changefeed import UNBOUNDED


@pytest.mark.parametrize("name", capture_names())
def test_a_capture_is_rows_and_resolved_timestamps(name):
    """C1: what a CockroachDB v22.2.10 server sent."""
    rows = capture(name)
    assert rows
    for row in rows:
        if row.table is None:
            assert resolved_of(row.value) is not None


def test_a_row_without_its_key_gets_it_as_cloud_storage_has_it():
    """C1: key_in_value is automatic there."""
    row = next(row for row in capture("02_wrapped_plain.jsonl") if row.table)
    value = json.loads(with_key(row))
    assert value["key"] == json.loads(row.key)
    assert "after" in value


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_played_capture_is_read_back_epoch_by_epoch(tmp_path, compression):
    """C2: one epoch per resolved timestamp, with the changes up to it."""
    rows = capture("01_wrapped_updated_diff_mvcc_resolved.jsonl")
    markers = list(play(rows, FeedFolder(tmp_path, compression)))
    source = CockroachdbFiles(
        CockroachdbOptions(files=str(tmp_path)),
        "p",
        lambda tasks: [task.run() for task in tasks],
        UNBOUNDED,
    )
    uppers = source.available(START)
    assert [resolved_of_frontier(upper) for upper in uppers] == sorted(set(markers))
    whole = Epoch(number=1, lower=START, upper=uppers[-1])
    assert [split.table for split in source.plan(whole).parts] == ["t"]
    shape = source.shape("t")
    assert shape is not None
    assert list(shape.key) == ["id"]
    assert {column.name: str(column.type) for column in shape.columns} == {
        "amt": "decimal(38, 2)",
        "id": "long",
        "name": "string",
    }


def test_a_folder_never_shows_half_a_file(tmp_path):
    """C1: object stores show an object when it is whole."""
    folder = FeedFolder(tmp_path)
    path = folder.data("t", ["{}"], (1_700_000_000 * 10**9, 0))
    assert path.read_text() == "{}\n"
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]
    assert path.parent.name == "2023-11-14"
