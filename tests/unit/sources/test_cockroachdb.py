"""A folder of changefeed files becomes epochs: every row once, by its own timestamp."""

import gzip
import io
import json
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DecimalType,
    DoubleType,
    IcebergType,
    LongType,
    NestedField,
    StringType,
)

from icestream.change import AT, BEFORE, OP, SEQ, Op
from icestream.epoch import Epoch
from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    HistoryLost,
    SchemaRejected,
    SourceUnavailable,
)
from icestream.formats.json_cells import lines, members
from icestream.formats.json_columns import infer_type
from icestream.frontier import START, Frontier
from icestream.schema import Reads, SchemaGap
from icestream.sources.cockroachdb import CockroachdbOptions, file_index, file_split, folder
from icestream.sources.cockroachdb.feed_file import FeedFile
from icestream.sources.cockroachdb.file_index import IndexTask
from icestream.sources.cockroachdb.file_split import FileSplit
from icestream.sources.cockroachdb.files import CockroachdbFiles
from icestream.sources.cockroachdb.hlc import (
    after,
    file_time,
    format_hlc,
    parse_file_time,
    parse_hlc,
    resolved_of,
)
from tests.asking import EPOCH, remembered
from tests.captures import FeedFolder
from tests.changefeed import UNBOUNDED

SECOND = 1_000_000_000
NOON = 1_700_000_000 * SECOND
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "amt", DecimalType(38, 2), required=False),
)

AMOUNTS = Reads(columns=frozenset(["id", "amt"]), named=frozenset(["id", "amt"]))


def hlc(seconds: float, logical: int = 0) -> str:
    return format_hlc((NOON + int(seconds * SECOND), logical))


def wrapped(key: int, seconds: float, /, **columns: Any) -> str:
    """A row as a changefeed sends it; without columns it is a delete."""
    row = {"id": key, **columns} if columns else None
    message = {"after": row, "key": [key], "updated": hlc(seconds)}
    return json.dumps(message, sort_keys=True)


def bare(key: list[object] | None, seconds: float, /, **columns: Any) -> str:
    meta = {"updated": hlc(seconds), **({"key": key} if key is not None else {})}
    return json.dumps({"__crdb__": meta, **columns})


def source(folder: Path | str, **options: Any) -> CockroachdbFiles:
    """The source, whose index tasks run in this process."""
    given = CockroachdbOptions(files=str(folder), **options)
    return CockroachdbFiles(given, "p", lambda tasks: [task.run() for task in tasks], UNBOUNDED)


def feed(path: Path, *, compression: str = "") -> FeedFolder:
    return FeedFolder(path, compression)


def at(seconds: float) -> tuple[int, int]:
    return NOON + int(seconds * SECOND), 0


def epochs(feed_source: CockroachdbFiles, lower: Frontier = START) -> list[Epoch]:
    """The epochs that the source has after a frontier."""
    found = []
    for number, upper in enumerate(feed_source.available(lower), start=1):
        found.append(Epoch(number=number, lower=lower, upper=upper))
        lower = upper
    return found


def read(
    split: FileSplit,
    schema: Schema = SCHEMA,
    key: Sequence[str] = ("id",),
    reads: Reads | None = None,
) -> list[dict]:
    """The changes of a split as plain rows."""
    batches = list(split.read(schema.model_dump_json(), list(key), reads))
    return [row for batch in batches for row in batch.to_pylist()]


def rows_of(folder: Path, lines_: Sequence[str], **options: Any) -> list[dict]:
    """The changes of a folder with one file and one marker after it."""
    writer = FeedFolder(folder)
    writer.data("t", lines_, at(0))
    writer.resolved(at(100))
    feed_source = source(folder, **options)
    (epoch,) = epochs(feed_source)
    (split,) = feed_source.plan(epoch).parts
    return read(split)


def names(splits: Sequence[FileSplit]) -> list[str]:
    return [PurePosixPath(file.path).name for split in splits for file in split.files]


# Timestamps


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("1701102296662969433.0000000000", (1701102296662969433, 0)),
        ("1794771197409527775.2147483647", (1794771197409527775, 2147483647)),
        ("1701102296662969433.0000000007?", (1701102296662969433, 7)),
        ("0.0000000000", (0, 0)),
    ],
)
def test_a_timestamp_is_a_pair_of_whole_numbers(text, position):
    """C3: HLC pairs, never floats; a synthetic timestamp is marked with a question mark."""
    assert parse_hlc(text) == position
    assert format_hlc(position) == text.rstrip("?")


@pytest.mark.parametrize(
    "text", ["", "1701102296662969433", "1.5", "1e9.0000000000", " 1.0000000000", "-1.0000000000"]
)
def test_what_is_not_a_timestamp_is_refused(text):
    """C3: a timestamp that cannot be read stops the pipeline."""
    with pytest.raises(DataRejected, match="is not a CockroachDB timestamp"):
        parse_hlc(text)


def test_the_time_in_a_file_name_has_nanoseconds_and_a_logical_part():
    """C1: 14 digits of date and time in UTC, 9 of nanoseconds, 10 of the logical counter."""
    assert parse_file_time("202004022058072107140000000000000") == (1585861087210714000, 0)
    assert parse_file_time("197001010000000000000012147483647") == (1, 2147483647)
    position = (NOON + 123456789, 42)
    assert parse_file_time(file_time(position)) == position


@pytest.mark.parametrize("logical", [0, 7, 2147483647])
def test_a_frontier_includes_its_resolved_timestamp(logical):
    """C2: exactly the changes up to and with R."""
    resolved = (NOON, logical)
    assert after(resolved)["resolved"] > resolved
    assert resolved_of(after(resolved)) == resolved
    assert resolved_of(START) is None


# File names

STEM = "202004022058072107140000000000000-56087568dba1e6b8-1-72-00000000"


@pytest.mark.parametrize(
    ("name", "topic", "format", "compression"),
    [
        (f"{STEM}-test_table-1.ndjson", "test_table", "ndjson", ""),
        (f"{STEM}-a-b-1.ndjson.gz", "a-b", "ndjson", ".gz"),
        (f"{STEM}-a-1-2.ndjson.zst", "a-1", "ndjson", ".zst"),
        (f"{STEM}-defaultdb.public.t-1f.parquet", "defaultdb.public.t", "parquet", ""),
        (f"{STEM}-t+family-1.ndjson", "t+family", "ndjson", ""),
        (f"{STEM}-00000001-x-1.ndjson", "00000001-x", "ndjson", ""),
        (f"{STEM}-.ndjson-3.ndjson", ".ndjson", "ndjson", ""),
        (f"{STEM[:33]}-$001-{STEM[34:]}-t-1.ndjson", "t", "ndjson", ""),
    ],
)
def test_a_data_file_tells_its_table_by_its_name(name, topic, format, compression):
    """C1: the name is read from both ends, what lies between is not looked at."""
    file = FeedFile.parse(f"bucket/2020-04-02/{name}", 10)
    assert file is not None
    assert (file.topic, file.format, file.compression) == (topic, format, compression)
    assert file.at == (1585861087210714000, 0)


@pytest.mark.parametrize(
    "name",
    [
        f"{STEM[:33]}.RESOLVED",
        f"{STEM}-t-1.part",
        f"{STEM}-t-1.tmp",
        f"{STEM}-t-1.ndjson.part",
        f".{STEM}-t-1.ndjson",
        "README",
        f"{STEM[1:]}-t-1.ndjson",
        f"{STEM}-t.ndjson",
    ],
)
def test_other_files_are_no_data_files(name):
    """C1: markers, foreign files and half written ones are left alone."""
    assert FeedFile.parse(f"bucket/{name}", 10) is None


# Epochs


def test_each_marker_ends_an_epoch_with_exactly_its_rows(tmp_path):
    """C2, C3: rows are chosen by their own timestamp, never by file or arrival."""
    writer = feed(tmp_path)
    writer.data("t", [wrapped(1, 1, name="a"), wrapped(2, 15, name="early")], at(0))
    writer.resolved(at(10))
    writer.data("t", [wrapped(3, 20, name="on the mark"), wrapped(1, 5, name="late")], at(10))
    writer.resolved(at(20))
    feed_source = source(tmp_path)
    first, second = epochs(feed_source)
    keys = [
        sorted(row["id"] for split in feed_source.plan(epoch).parts for row in read(split))
        for epoch in (first, second)
    ]
    assert keys == [[1, 1], [2, 3]]
    assert resolved_of(first.upper) == at(10)
    assert feed_source.standing(second.upper).position == hlc(20)


def test_nothing_new_is_no_epoch(tmp_path):
    """E9: a source that stands still has no boundary to offer."""
    writer = feed(tmp_path)
    writer.data("t", [wrapped(1, 1, name="a")], at(0))
    writer.resolved(at(10))
    feed_source = source(tmp_path)
    (epoch,) = epochs(feed_source)
    assert list(feed_source.available(epoch.upper)) == []


def test_a_later_marker_is_found_by_the_next_look(tmp_path):
    """C2: one boundary for each resolved timestamp after the frontier."""
    writer = feed(tmp_path)
    writer.resolved(at(10))
    feed_source = source(tmp_path)
    (first,) = feed_source.available(START)
    writer.resolved(at(20))
    writer.resolved((at(20)[0], 5))
    found = feed_source.available(first)
    assert [resolved_of(upper) for upper in found] == [at(20), (at(20)[0], 5)]


def test_an_empty_folder_has_nothing(tmp_path):
    """E9: a feed that has not begun yet is no error."""
    feed_source = source(tmp_path)
    assert (list(feed_source.tables()), list(feed_source.available(START))) == ([], [])


def test_files_without_a_marker_wait_for_their_first_resolved_timestamp(tmp_path):
    """C4: without R nobody knows what is complete."""
    feed(tmp_path).data("t", [wrapped(1, 1, name="a")], at(0))
    with pytest.raises(SourceUnavailable, match="no resolved timestamp") as caught:
        source(tmp_path).available(START)
    assert "WITH updated, resolved" in caught.value.hint


def test_a_folder_that_cannot_be_listed_is_told(tmp_path):
    """E12: the source may come back."""
    feed_source = source(tmp_path / "missing", tables=["t"])
    with pytest.raises(SourceUnavailable, match="could not list"):
        feed_source.available(START)
    assert list(feed_source.known_tables()) == ["t"]


@pytest.mark.parametrize(
    ("every", "chosen"), [(0.0, [1, 2, 3, 9, 10, 30]), (5.0, [1, 9, 30]), (100.0, [1, 30])]
)
def test_resolved_timestamps_are_thinned_out(tmp_path, every, chosen):
    """C2: resolved_every; the last one is taken when its time is over."""
    writer = feed(tmp_path)
    for seconds in (1, 2, 3, 9, 10, 30):
        writer.resolved(at(seconds))
    found = source(tmp_path, resolved_every=every).available(START)
    assert [resolved_of(upper) for upper in found] == [at(seconds) for seconds in chosen]


def test_thinning_counts_from_the_durable_frontier(tmp_path):
    """C2: a restart does not begin to count anew."""
    writer = feed(tmp_path)
    for seconds in (10, 12, 16):
        writer.resolved(at(seconds))
    found = source(tmp_path, resolved_every=5.0).available(after(at(10)))
    assert [resolved_of(upper) for upper in found] == [at(16)]


def test_a_lone_marker_waits_for_its_time(tmp_path):
    """C2: a feed that is running is not cut at every marker."""
    now = time.time_ns()
    writer = feed(tmp_path)
    writer.resolved((now - 3600 * SECOND, 0))
    writer.resolved((now, 0))
    found = source(tmp_path, resolved_every=7200.0).available(START)
    assert [resolved_of(upper) for upper in found] == [(now - 3600 * SECOND, 0)]


def test_only_files_that_may_hold_rows_of_the_epoch_are_in_its_splits(tmp_path):
    """E4: catching up over many markers does not read every file for every epoch."""
    writer = feed(tmp_path)
    early = writer.data("t", [wrapped(1, 1, name="a")], at(0))
    both = writer.data("t", [wrapped(2, 5, name="b"), wrapped(3, 15, name="c")], at(0))
    writer.resolved(at(10))
    late = writer.data("t", [wrapped(4, 12, name="d")], at(10))
    writer.resolved(at(20))
    feed_source = source(tmp_path)
    first, second = epochs(feed_source)
    assert sorted(names(feed_source.plan(first).parts)) == [early.name, both.name]
    assert sorted(names(feed_source.plan(second).parts)) == sorted([both.name, late.name])


def test_what_reading_has_taught_spares_the_next_epoch_the_file(tmp_path):
    """E4: a file whose rows are all durable is not read again."""
    writer = feed(tmp_path)
    old = writer.data("t", [wrapped(1, 1, name="a")], at(0))
    writer.resolved(at(10))
    feed_source = source(tmp_path)
    (first,) = epochs(feed_source)
    (split,) = feed_source.plan(first).parts
    read(split)
    feed_source.was_read(EPOCH, [split.learned()])
    new = writer.data("t", [wrapped(2, 12, name="b")], at(10))
    writer.resolved(at(20))
    (second,) = epochs(feed_source, first.upper)
    assert names(feed_source.plan(second).parts) == [new.name]
    assert old.name != new.name


def test_a_file_spelled_otherwise_is_read_for_every_epoch_that_it_may_belong_to(tmp_path):
    """C3, E3: the index sees timestamps by their spelling; what it cannot see is not ruled out."""
    odd = wrapped(2, 15, name="b").replace('"updated": ', '"updated" : ')
    assert odd != wrapped(2, 15, name="b")
    writer = feed(tmp_path)
    writer.data("t", [wrapped(1, 1, name="a"), odd], at(0))
    writer.resolved(at(10))
    writer.resolved(at(20))
    feed_source = source(tmp_path)
    _, second = epochs(feed_source)
    assert [row["id"] for s in feed_source.plan(second).parts for row in read(s)] == [2]


def test_rows_of_old_files_come_back_after_a_restart_only_by_their_time(tmp_path):
    """E4: resuming lists little more than what is new; rows decide what is new in it."""
    writer = feed(tmp_path)
    writer.data("t", [wrapped(1, -7200, name="old")], at(-7201))
    writer.resolved(at(-7000))
    recent = writer.data("t", [wrapped(2, 1, name="a"), wrapped(3, 15, name="b")], at(0))
    writer.resolved(at(9))
    writer.resolved(at(10))
    writer.resolved(at(20))
    feed_source = source(tmp_path)
    feed_source.tables()
    (epoch,) = epochs(feed_source, after(at(10)))
    splits = feed_source.plan(epoch).parts
    assert names(splits) == [recent.name]
    assert [row["id"] for split in splits for row in read(split)] == [3]


@pytest.mark.parametrize("layout", ["flat", "daily", "hourly"])
def test_files_are_found_in_every_layout_of_folders(tmp_path, layout):
    """C1: partition_format flat, daily and hourly."""
    folder = {"flat": "", "daily": "2023-11-14", "hourly": "2023-11-14/22"}[layout]
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    stem = f"{file_time(at(0))}-56087568dba1e6b8-1-72-00000000-t-1"
    (tmp_path / folder / f"{stem}.ndjson").write_text(wrapped(1, 1, name="a") + "\n")
    (tmp_path / folder / f"{file_time(at(5))}.RESOLVED").write_text("{}")
    feed_source = source(tmp_path)
    (epoch,) = epochs(feed_source)
    assert len(feed_source.plan(epoch).parts) == 1


def test_splits_are_packed_by_size_and_hold_one_table(tmp_path):
    """E5: workers share the epoch."""
    writer = feed(tmp_path)
    for number in range(4):
        writer.data("t", [wrapped(number, 1, name="x" * 100)], at(0))
    writer.data("u", [wrapped(9, 1, name="y")], at(0))
    writer.resolved(at(10))
    feed_source = source(tmp_path, split_bytes=400)
    (epoch,) = epochs(feed_source)
    splits = feed_source.plan(epoch).parts
    assert [(split.table, len(split.files)) for split in splits] == [("t", 2), ("t", 2), ("u", 1)]


def test_a_split_reads_the_same_twice_and_on_another_machine(tmp_path):
    """E3: replayed and speculative tasks."""
    writer = feed(tmp_path)
    writer.data("t", [wrapped(2, 1, name="a"), wrapped(1, 1, name="b")], at(0))
    writer.resolved(at(10))
    feed_source = source(tmp_path)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    assert read(pickle.loads(pickle.dumps(split))) == read(split) == read(split)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([], ["a", "d.public.b"]),
        (["a"], ["a"]),
        (["b"], ["d.public.b"]),
        (["d.public.b"], ["d.public.b"]),
    ],
)
def test_tables_can_be_chosen_by_their_full_or_short_name(tmp_path, wanted, found):
    """C1: feeds may be created with full table names."""
    writer = feed(tmp_path)
    for topic in ("a", "d.public.b"):
        writer.data(topic, [wrapped(1, 1, name="x")], at(0))
    writer.resolved(at(10))
    feed_source = source(tmp_path, tables=wanted)
    assert list(feed_source.tables()) == found
    assert [split.table for split in feed_source.plan(epochs(feed_source)[0]).parts] == found


@pytest.mark.parametrize("form", ["full", "short"])
def test_keys_and_types_hold_for_a_table_by_its_full_or_short_name(tmp_path, form):
    """U3: what is said of a table is not passed over because of how its feed names it."""
    writer = feed(tmp_path)
    writer.data("d.public.t", [wrapped(1, 1, other=1, price="1.5")], at(0))
    writer.resolved(at(10))
    table = {"full": "d.public.t", "short": "t"}[form]
    options = {"keys": {table: ["id"]}, "columns": {table: {"price": "decimal(10,2)"}}}
    feed_source = source(tmp_path, tables=["t"], **options)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    shape = feed_source.shape("d.public.t")
    assert shape is not None
    assert list(shape.key) == list(split.source_key) == ["id"]
    assert {column.name: column.type for column in shape.columns}["price"] == DecimalType(10, 2)


def test_the_summary_says_what_a_cockroachdb_sink_would(tmp_path):
    """I7: crdb.batch_id, crdb.job_id, crdb.resolved_hlc and counts."""
    epoch = Epoch(number=1, lower=START, upper=after(at(10)))
    assert source(tmp_path).was_read(epoch, []) == {
        "crdb.job_id": "p",
        "crdb.batch_id": "{batch}",
        "crdb.resolved_hlc": hlc(10),
        "crdb.data_file_count": "{data}",
        "crdb.delete_file_count": "{delete}",
    }


def test_lag_is_the_time_to_the_newest_marker(tmp_path):
    """U5: lag in seconds."""
    writer = feed(tmp_path)
    for seconds in (10, 25):
        writer.resolved(at(seconds))
    feed_source = source(tmp_path)
    feed_source.available(START)
    assert feed_source.standing(START).lag_seconds is None
    assert feed_source.standing(after(at(10))).lag_seconds == 15.0
    assert feed_source.standing(after(at(25))).lag_seconds == 0.0


def test_history_is_what_files_began_before_a_frontier(tmp_path):
    """E7: a table that is added later is caught up from what the folder still has."""
    writer = feed(tmp_path)
    writer.data("old", [wrapped(1, 1, name="a")], at(0))
    writer.data("new", [wrapped(1, 15, name="a")], at(12))
    writer.resolved(at(20))
    feed_source = source(tmp_path)
    assert [*feed_source.resume(remembered(durable=after(at(10)))).behind] == ["old"]


def test_what_comes_until_the_claim_is_history_of_a_table_that_is_added(tmp_path):
    """E7: the run that was overtaken went past the table's first file, and did not want it."""
    writer = feed(tmp_path)
    writer.data("old", [wrapped(1, 11, name="a")], at(10))
    writer.resolved(at(20))
    feed_source = source(tmp_path)
    assert "late" not in feed_source.resume(remembered(durable=after(at(20)))).behind
    writer.data("late", [wrapped(1, 21, name="a")], at(20))
    writer.resolved(at(30))
    assert "late" in feed_source.resume(remembered(durable=after(at(30)))).behind


# The listing


class Bucket(pafs.FileSystemHandler):
    """An object store in memory, which may change while it is being listed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.after_listing: list[Callable[[], None]] = []
        self.listings = 0

    def get_file_info_selector(self, selector):
        self.listings += 1
        shown = [
            pafs.FileInfo(path, pafs.FileType.File, size=len(content))
            for path, content in self.objects.items()
            if str(PurePosixPath(path).parent) == selector.base_dir
        ]
        if self.after_listing:
            self.after_listing.pop(0)()
        return shown

    def open_input_stream(self, path):
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.PythonFile(io.BytesIO(self.objects[path]), mode="r")

    def get_type_name(self):
        return "bucket"

    def normalize_path(self, path):
        return path

    def _refuse(self, *arguments, **options):
        raise NotImplementedError

    get_file_info = open_input_file = open_output_stream = open_append_stream = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = _refuse


@pytest.fixture
def bucket(monkeypatch) -> Bucket:
    """A bucket that every part of the source reads from."""
    made = Bucket()
    files = pafs.PyFileSystem(made)
    for module in (folder, file_index, file_split):
        # No folder on disk can count listings, or show files late.
        monkeypatch.setattr(module, "filesystem", lambda location, storage: (files, "feed"))
    return made


def put(bucket: Bucket, seconds: float, number: int, *rows: str) -> str:
    """A data file appears in the bucket."""
    path = f"feed/{file_time(at(seconds))}-56087568dba1e6b8-1-72-{number - 1:08x}-t-1.ndjson"
    bucket.objects[path] = "".join(f"{row}\n" for row in rows).encode()
    return path


def put_marker(bucket: Bucket, seconds: float) -> None:
    bucket.objects[f"feed/{file_time(at(seconds))}.RESOLVED"] = b"{}"


def test_a_file_that_a_listing_missed_although_it_shows_the_marker_is_in_the_epoch(bucket):
    """C2, E3: pages of a listing may show the marker and hide the file that came before it."""
    put(bucket, 0, 1, wrapped(1, 1, name="a"))
    put_marker(bucket, 10)
    bucket.after_listing = [lambda: put(bucket, 0, 2, wrapped(2, 2, name="b")) and None]
    feed_source = source("bucket://feed")
    (epoch,) = epochs(feed_source)
    found = [row["id"] for split in feed_source.plan(epoch).parts for row in read(split)]
    assert sorted(found) == [1, 2]


def test_the_race_is_also_lost_by_no_later_look(bucket):
    """C2, E3: the same holds for every marker that is new."""
    put(bucket, 0, 1, wrapped(1, 1, name="a"))
    put_marker(bucket, 10)
    feed_source = source("bucket://feed")
    feed_source.tables()
    (first,) = epochs(feed_source)

    put_marker(bucket, 20)
    bucket.after_listing = [lambda: put(bucket, 10, 2, wrapped(2, 12, name="b")) and None]
    (second,) = epochs(feed_source, first.upper)
    found = [row["id"] for split in feed_source.plan(second).parts for row in read(split)]
    assert found == [2]


def test_a_marker_that_only_the_second_listing_shows_waits_for_the_next_look(bucket):
    """C2: its files may be missing from that listing as they were from the first."""
    put_marker(bucket, 10)
    bucket.after_listing = [lambda: put_marker(bucket, 20)]
    feed_source = source("bucket://feed")
    assert [resolved_of(upper) for upper in feed_source.available(START)] == [at(10)]
    assert [resolved_of(u) for u in feed_source.available(after(at(10)))] == [at(20)]


def test_a_look_without_a_new_marker_lists_once(bucket):
    """E9: waiting costs one listing."""
    put_marker(bucket, 10)
    feed_source = source("bucket://feed")
    (upper,) = feed_source.available(START)
    before = bucket.listings
    assert list(feed_source.available(upper)) == []
    assert bucket.listings == before + 1


def test_a_file_that_is_gone_when_it_is_read_is_history_lost(bucket):
    """E7: never skipped silently."""
    path = put(bucket, 0, 1, wrapped(1, 1, name="a"))
    put_marker(bucket, 10)
    feed_source = source("bucket://feed")
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    del bucket.objects[path]
    with pytest.raises(HistoryLost, match="of the changefeed is gone") as caught:
        read(split)
    assert path in caught.value.message


# What was removed


def fed(folder: Path, *, rounds: int, start: int = 0) -> FeedFolder:
    """A folder with a file and a marker for each round, ten seconds apart."""
    writer = feed(folder)
    for number in range(start, start + rounds):
        more(writer, number)
    return writer


def more(writer: FeedFolder, number: int) -> tuple[Path, Path]:
    """One more round: its file and its marker."""
    row = wrapped(number, 10 * number + 5, name=f"row {number}")
    return writer.data("t", [row], at(10 * number)), writer.resolved(at(10 * number + 10))


def committed(folder: Path) -> Frontier:
    """The frontier of the last resolved timestamp that a run over the folder would commit, as the
    summary of a snapshot has it."""
    text = json.dumps(source(folder).available(START)[-1].to_json())
    return Frontier.from_json(json.loads(text))


def refused(feed_source: CockroachdbFiles, lower: Frontier) -> HistoryLost:
    with pytest.raises(HistoryLost, match=r"were removed from .* before they were read") as caught:
        feed_source.available(lower)
    return caught.value


@pytest.mark.parametrize("running", [True, False])
def test_removed_files_and_markers_are_history_lost(tmp_path, running):
    """Mend b6, C8: R1 is committed, R1 and R2 are removed, R3 is there: R2 is not passed over."""
    writer = fed(tmp_path, rounds=1)
    feed_source = source(tmp_path)
    (lower,) = feed_source.available(START)
    old = list(tmp_path.rglob("*-t-1.ndjson")) + list(tmp_path.rglob("*.RESOLVED"))
    for path in (*old, *more(writer, 1)):
        path.unlink()
    more(writer, 2)
    error = refused(feed_source if running else source(tmp_path), lower)
    assert f"{file_time(at(10))}.RESOLVED" in (error.detail or "")
    assert f"accept_lost_after: {hlc(10)}" in (error.hint or "")


def test_a_removed_file_is_missed_although_all_markers_are_there(tmp_path):
    """Mend b6, C8: numbers of a writer leave none out."""
    writer = fed(tmp_path, rounds=2)
    lower = committed(tmp_path)
    gone, _ = more(writer, 2)
    more(writer, 3)
    gone.unlink()
    error = refused(source(tmp_path), lower)
    assert "File 00000002, of the writer of " in (error.detail or "")


def test_a_removed_file_is_missed_even_when_none_of_its_writer_followed(tmp_path):
    """Mend b6, C8: what the folder had at a commit, and may be needed, is known by number."""
    fed(tmp_path, rounds=1)
    early = feed(tmp_path / "other")
    row = wrapped(7, 15, name="later than its marker")
    path = early.data("t", [row], at(1))
    path = path.rename(next(tmp_path.glob("2*")) / path.name.replace("-1-72-", "-2-73-"))
    lower = committed(tmp_path)
    path.unlink()
    feed(tmp_path).resolved(at(20))
    assert "File 00000000" in (refused(source(tmp_path), lower).detail or "")


def test_a_new_writer_begins_at_its_first_file(tmp_path):
    """Mend b6, C8: a changefeed that was started again counts anew, from its first file on."""
    fed(tmp_path, rounds=2)
    lower = committed(tmp_path)
    other = feed(tmp_path / "other")
    files = [more(other, number)[0] for number in (2, 3)]
    day = next(tmp_path.glob("2*"))
    moved = [path.rename(day / path.name.replace("-1-72-", "-1-73-")) for path in files]
    feed(tmp_path).resolved(at(40))
    assert [resolved_of(u) for u in source(tmp_path).available(lower)] == [at(30), at(40)]
    moved[0].unlink()
    assert "File 00000000" in (refused(source(tmp_path), lower).detail or "")


def test_a_first_run_wants_the_folder_from_its_beginning(tmp_path):
    """Mend b6, C8: a table that began in the middle would lack rows without a word."""
    fed(tmp_path, rounds=3)
    min(tmp_path.rglob("*-t-1.ndjson")).unlink()
    assert "accept_lost_after: start" in (refused(source(tmp_path), START).hint or "")
    accepting = source(tmp_path, accept_lost_after="start")
    assert len(accepting.available(START)) == 3


def test_what_was_read_may_go_once_a_later_timestamp_is_committed(tmp_path):
    """Mend b6, C8: the rule for retention that the guide gives."""
    writer = fed(tmp_path, rounds=2)
    feed_source = source(tmp_path)
    lower = START
    for number in range(2, 6):
        (*_, upper) = feed_source.available(lower)
        for split in feed_source.plan(Epoch(number=number, lower=lower, upper=upper)).parts:
            read(split)
            feed_source.was_read(EPOCH, [split.learned()])
        lower = upper
        more(writer, number)
    # The last commit is that of 50; 40 is the one before it.
    for path in [*tmp_path.rglob("*.ndjson"), *tmp_path.rglob("*.RESOLVED")]:
        named = parse_file_time(path.name)
        if named < at(40):
            path.unlink()
    assert resolved_of(lower) == at(50)
    assert [resolved_of(u) for u in source(tmp_path).available(lower)] == [at(60)]


def test_an_accepted_loss_holds_for_its_place_alone(tmp_path):
    """Mend b6, C8: the way out that the hint names."""
    writer = fed(tmp_path, rounds=1)
    lower = committed(tmp_path)
    min(tmp_path.rglob("*.RESOLVED")).unlink()
    more(writer, 1)
    accepting = source(tmp_path, accept_lost_after=hlc(10))
    (upper,) = accepting.available(lower)
    min(tmp_path.rglob("*.RESOLVED")).unlink()
    more(writer, 2)
    refused(accepting, upper)


def test_a_removed_marker_loses_nothing_while_nothing_follows(tmp_path):
    """Mend b6, C8: an idle folder is not complained about; only a step over a gap is."""
    fed(tmp_path, rounds=1)
    lower = committed(tmp_path)
    min(tmp_path.rglob("*.RESOLVED")).unlink()
    (tmp_path / f"{file_time(at(5))}.RESOLVED").write_text("{}")
    assert list(source(tmp_path).available(lower)) == []


def test_an_idle_frontier_is_published_once_an_hour_of_the_feed(tmp_path):
    """Mend b6, C8: the marker that the lake stands at does not grow old, also in single runs."""
    fed(tmp_path, rounds=1)
    lower = committed(tmp_path)
    for minutes in (30, 59, 61, 90):
        feed(tmp_path).resolved(at(10 + 60 * minutes))
    feed_source = source(tmp_path)
    found = epochs(feed_source, lower)
    milestones = [feed_source.plan(epoch).milestone for epoch in found]
    assert [is_due(lower) for is_due in milestones] == [False, False, True, True]
    assert not milestones[3](found[2].upper)


def test_frontiers_of_an_earlier_version_are_taken(tmp_path):
    """Mend b6, C8: they remember no numbers; the marker counts, and numbers that are left out."""
    writer = fed(tmp_path, rounds=2)
    min(tmp_path.rglob("*-t-1.ndjson")).unlink()
    gone, _ = more(writer, 2)
    assert [resolved_of(u) for u in source(tmp_path).available(after(at(20)))] == [at(30)]
    more(writer, 3)
    gone.unlink()
    refused(source(tmp_path), after(at(20)))


def test_a_name_that_comes_while_others_are_listed_is_not_missed(bucket):
    """Mend b6, C8: pages of a listing may show a file and hide the one before it."""
    put(bucket, 0, 1, wrapped(1, 1, name="a"))
    put_marker(bucket, 10)
    (lower,) = source("bucket://feed").available(START)
    put(bucket, 10, 3, wrapped(3, 13, name="c"))
    put_marker(bucket, 20)
    feed_source = source("bucket://feed")
    feed_source.tables()
    bucket.after_listing = [lambda: put(bucket, 10, 2, wrapped(2, 12, name="b")) and None]
    assert [resolved_of(u) for u in feed_source.available(lower)] == [at(20)]


# What cannot be read


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "avro"])
def test_files_of_other_formats_are_refused(tmp_path, ending):
    """Mend b7, C1: a file of the feed is read or refused, never passed over."""
    writer = fed(tmp_path, rounds=1)
    name = writer.data_name("t", at(11), 1, f".{ending}")
    next(tmp_path.glob("2*")).joinpath(name).write_text("1,a\n")
    with pytest.raises(ConfigInvalid, match=f"have the format {ending[:3]}") as caught:
        source(tmp_path).tables()
    assert "format=json or format=parquet" in (caught.value.hint or "")
    assert list(source(tmp_path, tables=["other"]).tables()) == []


def test_column_families_are_refused_before_anything_is_made(tmp_path):
    """Mend b7, C1: one error, at once, whose ways out work."""
    writer = fed(tmp_path, rounds=1)
    one = {"after": {"id": 1, "a": 2}, "key": [1], "updated": hlc(15)}
    writer.data("f+one", [json.dumps(one)], at(10))
    two = {"after": {"b": 3}, "key": [1], "updated": hlc(15)}
    writer.data("f+two", [json.dumps(two)], at(10))
    writer.resolved(at(20))
    with pytest.raises(ConfigInvalid, match="splits table f into column families") as caught:
        source(tmp_path).tables()
    assert "`source.cockroachdb.tables`" in (caught.value.hint or "")
    assert list(source(tmp_path, tables=["t"]).tables()) == ["t"]
    named = source(tmp_path, tables=["t", "f+two"], keys={"f+two": ["id"]})
    assert list(named.tables()) == ["f+two", "t"]
    (_, epoch) = epochs(named)
    (split,) = named.plan(epoch).parts
    shape = named.shape("f+two")
    assert shape is not None
    assert [column.name for column in shape.columns] == ["b", "id"]
    schema = Schema(
        NestedField(1, "b", LongType(), required=False),
        NestedField(2, "id", LongType(), required=True),
    )
    assert [(row["id"], row["b"]) for row in read(split, schema)] == [(1, 3)]


# Rows


def test_wrapped_rows_become_upserts_and_deletes(tmp_path):
    """C5: the wrapped envelope; a delete has its key and nothing else."""
    found = rows_of(tmp_path, [wrapped(1, 1, name="a", amt=1), wrapped(2, 2)])
    assert found == [
        {OP: Op.UPSERT, AT: at(1)[0], SEQ: 0, "id": 1, "name": "a", "amt": found[0]["amt"]},
        {OP: Op.DELETE, AT: at(2)[0], SEQ: 0, "id": 2, "name": None, "amt": None},
    ]
    assert str(found[0]["amt"]) == "1.00"


def test_timestamps_keep_every_digit(tmp_path):
    """C3: nanoseconds and the logical counter of rows."""
    row = wrapped(1, 1, name="a").replace(hlc(1), "1700000001123456789.2147483646?")
    (found,) = rows_of(tmp_path, [row])
    assert (found[AT], found[SEQ]) == (1700000001123456789, 2147483646)


def test_a_bound_is_compared_by_its_logical_part_too(tmp_path):
    """C2, C3: a row at R is in the epoch, one right after it is not."""
    writer = feed(tmp_path)
    rows = [wrapped(n, 5, name="a").replace(hlc(5), hlc(5, n)) for n in (3, 4)]
    writer.data("t", rows, at(0))
    writer.resolved((at(5)[0], 3))
    feed_source = source(tmp_path)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    assert [row["id"] for row in read(split)] == [3]


def test_bare_rows_become_upserts(tmp_path):
    """C5: the bare envelope has its columns beside the metadata."""
    found = rows_of(tmp_path, [bare([1], 1, id=1, name="a", amt=3.5), bare([2], 2)])
    assert [(row[OP], row["id"], row["name"]) for row in found] == [
        (Op.UPSERT, 1, "a"),
        (Op.DELETE, 2, None),
    ]


def test_a_bare_row_of_nulls_could_be_a_delete_and_is_refused(tmp_path):
    """C5: newer servers send a delete as its key and nulls."""
    with pytest.raises(DataRejected, match="cannot tell a delete from a row of nulls") as caught:
        rows_of(tmp_path, [bare([1], 1, id=1, name=None, amt=None)])
    assert "envelope=wrapped" in caught.value.hint


def test_rows_without_an_envelope_are_refused(tmp_path):
    """C5: neither wrapped nor bare."""
    with pytest.raises(DataRejected, match="none of the envelopes"):
        rows_of(tmp_path, ['{"id": 1, "name": "a"}'])


@pytest.mark.parametrize(
    "row",
    [
        '{"after": {"id": 1}, "key": [1]}',
        '{"after": {"id": 1}, "key": [1], "updated": null}',
        '{"__crdb__": {"key": [1]}, "id": 1, "name": "a"}',
    ],
)
def test_rows_without_a_timestamp_are_refused(tmp_path, row):
    """C3: without `updated` nobody can tell which change is the later one."""
    with pytest.raises(DataRejected, match="no `updated` timestamp") as caught:
        rows_of(tmp_path, [row])
    assert "WITH updated" in caught.value.hint


def test_a_timestamp_that_is_none_is_told_without_the_row(tmp_path):
    """C3: the file is damaged; its rows are nobody's business."""
    row = wrapped(1, 1, name="hunter2").replace(hlc(1), "yesterday")
    with pytest.raises(DataRejected, match="is damaged") as caught:
        rows_of(tmp_path, [row])
    assert "hunter2" not in str(caught.value)


def test_the_key_array_and_the_columns_must_agree(tmp_path):
    """C5: rows that carry their key twice prove the key's columns and order."""
    row = json.dumps({"after": {"id": 1, "name": "a"}, "key": ["b"], "updated": hlc(1)})
    with pytest.raises((DataRejected, SchemaRejected)) as caught:
        rows_of(tmp_path, [row], keys={"t": ["name"]})
    assert "the key of table t is not name in this order" in caught.value.message


@pytest.mark.parametrize("key", ["[]", "[1, 2]", "[null]", "null"])
def test_a_key_with_another_number_of_parts_is_refused(tmp_path, key):
    """C5: a row that nothing identifies cannot be applied."""
    row = f'{{"after": {{"id": 1}}, "key": {key}, "updated": "{hlc(1)}"}}'
    with pytest.raises(DataRejected, match="has no key") as caught:
        rows_of(tmp_path, [row], keys={"t": ["id"]})
    assert "key_in_value" in caught.value.hint


def test_a_row_without_a_key_is_refused(tmp_path):
    """C5: cloud storage carries the key in the value."""
    with pytest.raises(DataRejected, match="has no key"):
        rows_of(tmp_path, [f'{{"after": {{"id": 1}}, "updated": "{hlc(1)}"}}'], keys={"t": ["id"]})


def with_before(key: int, seconds: float, before: dict[str, Any] | None, **columns: Any) -> str:
    message = json.loads(wrapped(key, seconds, **columns))
    return json.dumps({**message, "before": before})


def test_before_images_are_read_in_the_tables_types(tmp_path):
    """I9: what diff adds tells the old partition; an insert has none."""
    full = {"id": 1, "name": "old", "amt": 1.5, "dropped": 1}
    found = rows_of(
        tmp_path, [with_before(1, 1, full, name="n"), with_before(2, 2, None, name="m")]
    )
    image = found[0][BEFORE]
    assert (image["id"], image["name"], str(image["amt"])) == (1, "old", "1.50")
    assert "dropped" not in image
    assert found[1][BEFORE] is None


def test_a_before_image_that_lacks_a_column_of_the_table_proves_nothing(tmp_path):
    """I9, I11: a column dropped at the source still has its old value in the table."""
    whole = {"id": 1, "name": "old", "amt": 1}
    found = rows_of(
        tmp_path,
        [
            with_before(1, 1, whole, name="n"),
            with_before(2, 2, {"id": 2, "name": "old"}, name="m"),
        ],
    )
    assert found[0][BEFORE]["name"] == "old"
    assert found[1][BEFORE] is None


def test_before_images_that_all_lack_a_column_prove_nothing(tmp_path):
    """I9, I11: the same when no row of the file has it."""
    found = rows_of(tmp_path, [with_before(1, 1, {"id": 1, "name": "old"}, name="n")])
    assert found[0][BEFORE] is None


def test_new_columns_are_told_with_their_types(tmp_path):
    """I11: add column; what is only null yet is no column."""
    rows = [wrapped(1, 1, name="a", extra=5, price=1.5, empty=None)]
    with pytest.raises(SchemaGap) as caught:
        rows_of(tmp_path, rows, columns={"t": {"price": "decimal(10,2)"}})
    found = {column.name: column.type for column in caught.value.columns}
    assert found == {"extra": LongType(), "price": DecimalType(10, 2)}


def test_a_row_without_a_column_that_a_select_names_is_refused(tmp_path):
    """E11, C5, Mend h2: not so a delete, nor a row of another epoch that the file holds too."""
    writer = feed(tmp_path)
    writer.data("t", [wrapped(1, 1, name="a"), wrapped(2, 20, amt="1.50"), wrapped(3, 20)], at(0))
    writer.resolved(at(10))
    writer.resolved(at(100))
    feed_source = source(tmp_path)
    (first,), (second,) = (feed_source.plan(epoch).parts for epoch in epochs(feed_source))
    with pytest.raises(SchemaRejected, match="t reads column amt, which"):
        read(first, reads=AMOUNTS)
    assert [row["id"] for row in read(second, reads=AMOUNTS)] == [2, 3]


def test_a_column_of_nulls_that_the_table_lacks_is_passed_over(tmp_path):
    """I11: nothing is lost by leaving it out."""
    assert rows_of(tmp_path, [wrapped(1, 1, name="a", empty=None)])[0]["name"] == "a"


def test_a_value_that_does_not_fit_is_refused(tmp_path):
    """I11: what is not safe stops with a clear error."""
    with pytest.raises(SchemaRejected, match="column amt does not fit"):
        rows_of(tmp_path, [wrapped(1, 1, amt=1.005)])


def test_an_empty_file_has_no_rows(tmp_path):
    """C1: a feed may close a file without rows."""
    assert rows_of(tmp_path, []) == []


# Damage


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_compressed_files_are_read(tmp_path, compression):
    """C1: gzip and zstd."""
    writer = feed(tmp_path, compression=compression)
    writer.data("t", [wrapped(1, 1, name="a")], at(0))
    writer.resolved(at(10))
    feed_source = source(tmp_path)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    assert [row["id"] for row in read(split)] == [1]


@pytest.mark.parametrize(
    ("compression", "damage"),
    [
        (".gz", lambda content: content[:-12]),
        (".gz", lambda content: b"not gzip at all"),
        (".gz", lambda content: content[:15] + b"\xff\xff\xff\xff" + content[19:]),
        (".zst", lambda content: content[: len(content) // 2]),
        (".zst", lambda content: b"not zstd at all"),
        ("", lambda content: content[:-10]),
        ("", lambda content: content.replace(b'"key"', b'"key\xff"')),
        ("", lambda content: b"\x00" * len(content)),
    ],
)
def test_a_damaged_file_stops_the_pipeline_and_is_named(tmp_path, compression, damage):
    """E3, E7: nothing of its epoch is committed, and trying again would not help."""
    writer = feed(tmp_path, compression=compression)
    rows = [wrapped(number, 1, name=f"some text {number * 7919}") for number in range(50)]
    path = writer.data("t", rows, at(0))
    writer.resolved(at(10))
    path.write_bytes(damage(path.read_bytes()))
    feed_source = source(tmp_path)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    with pytest.raises(DataRejected, match="is damaged") as caught:
        read(split)
    assert path.name in caught.value.message


def test_a_malformed_row_is_told_by_its_number_and_not_by_its_content(tmp_path):
    """E10: row and byte, never the value."""
    with pytest.raises(DataRejected, match="is damaged") as caught:
        rows_of(tmp_path, [wrapped(1, 1, name="a"), wrapped(2, 1, name="hunter2")[:-1]])
    assert "Row 2" in caught.value.detail
    assert "hunter2" not in str(caught.value)


# Parquet


def parquet_rows(**columns: list[Any]) -> bytes:
    count = max(map(len, columns.values()))
    given = {
        "id": list(range(count)),
        "__crdb__event_type": ["c"] * count,
        "__crdb__updated": [hlc(1)] * count,
        **columns,
    }
    sink = io.BytesIO()
    pq.write_table(pa.table({name: values for name, values in given.items() if values}), sink)
    return sink.getvalue()


def parquet_feed(folder: Path, content: bytes, **options: Any) -> CockroachdbFiles:
    stem = f"{file_time(at(0))}-56087568dba1e6b8-1-72-00000000-t-1"
    (folder / f"{stem}.parquet").write_bytes(content)
    (folder / f"{file_time(at(10))}.RESOLVED").write_bytes(b"{}")
    return source(folder, **options)


def parquet_changes(folder: Path, content: bytes, **options: Any) -> list[dict]:
    feed_source = parquet_feed(folder, content, **options)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    return read(split)


@pytest.mark.parametrize("event", ["__crdb__event_type", "__crdb_event_type__"])
def test_parquet_rows_become_upserts_and_deletes(tmp_path, event):
    """C1: Parquet, with either name that the event's column has had."""
    columns = {"__crdb__event_type": [], event: ["c", "u", "d"], "name": ["a", "b", None]}
    found = parquet_changes(tmp_path, parquet_rows(**columns))
    assert [(row[OP], row["id"], row["name"]) for row in found] == [
        (Op.UPSERT, 0, "a"),
        (Op.UPSERT, 1, "b"),
        (Op.DELETE, 2, None),
    ]
    assert {(row[AT], row[SEQ]) for row in found} == {at(1)}


def test_text_in_parquet_is_cast_exactly(tmp_path):
    """I11: a decimal without precision arrives as text."""
    (found,) = parquet_changes(tmp_path, parquet_rows(amt=["1.50"]))
    assert str(found["amt"]) == "1.50"
    with pytest.raises(SchemaRejected):
        parquet_changes(tmp_path, parquet_rows(amt=["1.505"]))


def test_numbers_in_parquet_are_never_cut(tmp_path):
    """I11: a value that does not fit its column is refused."""
    with pytest.raises(SchemaRejected, match="column id do not fit"):
        parquet_changes(tmp_path, parquet_rows(id=[1.5]))


@pytest.mark.parametrize("missing", ["__crdb__event_type", "__crdb__updated"])
def test_parquet_without_metadata_is_refused(tmp_path, missing):
    """C3: without `updated` nobody can tell which change is the later one."""
    with pytest.raises(DataRejected, match="no `updated` timestamp"):
        parquet_changes(tmp_path, parquet_rows(name=["a"], **{missing: []}))


def test_a_parquet_row_without_its_key_is_refused(tmp_path):
    """C5: a row that nothing identifies cannot be applied."""
    with pytest.raises(DataRejected, match="has no key"):
        parquet_changes(tmp_path, parquet_rows(id=[1, None], name=["a", "b"]))


@pytest.mark.parametrize("event", ["c", "d"])
def test_a_parquet_file_without_a_column_that_a_select_names_is_refused(tmp_path, event):
    """E11, C5, Mend h2: its rows lack the column; deletes need no value."""
    content = parquet_rows(__crdb__event_type=[event], name=["a"])
    feed_source = parquet_feed(tmp_path, content)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    if event == "d":
        assert [row[OP] for row in read(split, reads=AMOUNTS)] == [Op.DELETE]
        return
    with pytest.raises(SchemaRejected, match="t reads column amt, which"):
        read(split, reads=AMOUNTS)


def test_a_damaged_parquet_file_is_named(tmp_path):
    """E3: nothing of its epoch is committed."""
    content = parquet_rows(name=["a"])
    with pytest.raises(DataRejected, match="is damaged"):
        parquet_changes(tmp_path, content[: len(content) // 2])


def test_parquet_files_are_indexed_by_their_timestamps(tmp_path):
    """E4: catching up reads a file only for its own epochs."""
    content = parquet_rows(__crdb__updated=[hlc(12), hlc(15)], name=["a", "b"])
    feed_source = parquet_feed(tmp_path, content)
    (tmp_path / f"{file_time(at(20))}.RESOLVED").write_bytes(b"{}")
    first, second = epochs(feed_source)
    assert feed_source.plan(first).parts == []
    assert len(feed_source.plan(second).parts) == 1


def test_a_parquet_table_needs_its_key_named(tmp_path):
    """C1: Parquet files of a changefeed do not tell the key."""
    feed_source = parquet_feed(tmp_path, parquet_rows(name=["a"]))
    feed_source.plan(epochs(feed_source)[0])
    with pytest.raises(ConfigInvalid, match="key of table t is not known"):
        feed_source.shape("t")


def test_a_parquet_table_has_the_files_columns(tmp_path):
    """I10: types come from the file, or from the configuration."""
    feed_source = parquet_feed(
        tmp_path,
        parquet_rows(name=["a"], ok=[True]),
        keys={"t": ["id"]},
        columns={"t": {"name": "uuid"}},
    )
    feed_source.plan(epochs(feed_source)[0])
    shape = feed_source.shape("t")
    assert shape is not None
    found = {column.name: str(column.type) for column in shape.columns}
    assert found == {"id": "long", "name": "uuid", "ok": "boolean"}


# Shapes


def shape_of(folder: Path, rows: Sequence[str], **options: Any) -> Any:
    writer = FeedFolder(folder)
    writer.data("t", rows, at(0))
    writer.resolved(at(10))
    feed_source = source(folder, **options)
    feed_source.plan(epochs(feed_source)[0])
    return feed_source.shape("t")


def test_a_table_is_shaped_by_its_first_rows(tmp_path):
    """I10: columns with types that hold the values, and the key in its order."""
    rows = [
        json.dumps({"after": row, "key": [row["city"], row["id"]], "updated": hlc(1)})
        for row in (
            {"id": 1, "city": "rome", "ok": True, "note": None},
            {"id": 2, "city": "oslo", "ok": None, "note": None},
        )
    ]
    shape = shape_of(tmp_path, rows)
    assert list(shape.key) == ["city", "id"]
    found = {column.name: column.type for column in shape.columns}
    assert found == {"city": StringType(), "id": LongType(), "ok": BooleanType()}


def test_a_table_that_is_only_deleted_from_has_no_shape(tmp_path):
    """C5: deletes of unknown keys."""
    assert shape_of(tmp_path, [wrapped(1, 1)]) is None


def test_a_key_that_fits_two_columns_must_be_named(tmp_path):
    """C5: nothing is guessed."""
    rows = [wrapped(n, 1, copy=n, name="a") for n in (1, 2)]
    with pytest.raises(ConfigInvalid, match="cannot tell which columns are the key") as caught:
        shape_of(tmp_path, rows)
    assert "id" in caught.value.detail and "copy" in caught.value.detail
    assert "keys: {t: [...]}" in caught.value.hint
    assert list(shape_of(tmp_path, rows, keys={"t": ["id"]}).key) == ["id"]


def test_a_key_that_fits_no_column_must_be_named(tmp_path):
    """C5: column families may not hold the key's columns."""
    row = json.dumps({"after": {"name": "a"}, "key": [1], "updated": hlc(1)})
    with pytest.raises(ConfigInvalid, match="cannot tell which columns are the key") as caught:
        shape_of(tmp_path, [row])
    assert "no column" in caught.value.detail


def test_more_rows_tell_two_columns_apart(tmp_path):
    """C5: one row in which they differ is enough."""
    rows = [wrapped(1, 1, copy=1), wrapped(2, 1, copy=3)]
    assert list(shape_of(tmp_path, rows).key) == ["id"]


def test_a_table_is_not_made_from_rows_that_no_epoch_can_take(tmp_path):
    """C3, I10: rows without a timestamp are refused before anything is created."""
    with pytest.raises(DataRejected, match="no `updated`"):
        shape_of(tmp_path, ['{"after": {"id": 1, "name": "a"}, "key": [1]}'])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ("null, null", None),
        ("true, null", BooleanType()),
        ("1, 2", LongType()),
        ("1.5, 2", DoubleType()),
        ("1.50, 2", DecimalType(38, 2)),
        ('1.5, "NaN", "-Infinity"', DoubleType()),
        ('1, "Infinity"', DoubleType()),
        ('1.50, "NaN"', StringType()),
        ('1, "a"', StringType()),
        ('"a", null', StringType()),
        ("1, true", StringType()),
        ("[1], [2]", StringType()),
        ('{"a": 1}', StringType()),
    ],
)
def test_a_column_gets_a_type_that_holds_all_its_values(values, kind: IcebergType | None):
    """I10: text for what is not all of one kind; None while all are null."""
    content = "\n".join(f'{{"x": {value}}}' for value in _split(values))
    assert infer_type(members(lines(content.encode()))["x"]) == kind


def _split(values: str) -> list[str]:
    return [json.dumps(v) if not isinstance(v, float) else t for v, t in _both(values)]


def _both(values: str) -> list[tuple[Any, str]]:
    """Each value and how it is written; digits must stay as they are."""
    parsed = json.loads(f"[{values}]")
    written = json.loads(f"[{values}]", parse_float=str)
    return [(value, text) for value, text in zip(parsed, written, strict=True)]


# The index


def test_the_index_finds_the_span_of_a_files_timestamps(tmp_path):
    """E4: a span that holds all of them."""
    path = feed(tmp_path).data("t", [wrapped(1, 5, name="a"), wrapped(2, 2)], at(0))
    file = FeedFile.parse(str(path), 10)
    assert file is not None
    task = IndexTask(location=str(tmp_path), storage={}, file=file)
    _, first, last, _ = task.run()
    assert first <= at(2) <= at(5) < last


@pytest.mark.parametrize("content", [b"", b"garbage\n", b'{"after": null, "key": [1]}\n'])
def test_a_file_whose_timestamps_cannot_be_seen_may_hold_any(tmp_path, content):
    """E3: it is read for every epoch, where the reader says what is wrong with it."""
    path = feed(tmp_path).data("t", [], at(0))
    path.write_bytes(content)
    file = FeedFile.parse(str(path), 10)
    assert file is not None
    _, first, last, _ = IndexTask(location=str(tmp_path), storage={}, file=file).run()
    assert first <= (0, 0)
    assert last > at(10**6)


@pytest.mark.parametrize(
    ("rows", "only_deletes"),
    [
        ([wrapped(1, 1), wrapped(2, 2)], True),
        ([wrapped(1, 1), wrapped(2, 2, name="x")], False),
        ([wrapped(1, 1, name={"after": None})], False),
        ([wrapped(1, 1), wrapped(2, 2, name='"after": null, "after": null')], False),
        ([bare([1], 1)], True),
        ([bare([1], 1, id=1, name={"a": {}})], False),
        (['{"after": null'], False),
    ],
)
def test_the_index_tells_a_file_that_only_deletes(tmp_path, rows, only_deletes):
    """C8, Mend, read F6: by parsing what looks like one, for values may look like anything."""
    path = feed(tmp_path).data("t", rows, at(0))
    file = FeedFile.parse(str(path), 10)
    assert file is not None
    indexed = IndexTask(location=str(tmp_path), storage={}, file=file).run()
    assert indexed.only_deletes == only_deletes


def test_a_packed_file_counts_with_what_it_holds():
    """E5: splits are cut by what workers will hold in memory."""
    plain = FeedFile.parse(f"{STEM}-t-1.ndjson", 100)
    packed = FeedFile.parse(f"{STEM}-t-1.ndjson.gz", 100)
    assert plain is not None and packed is not None
    assert packed.row_bytes() > plain.row_bytes() == 100


def test_gzip_members_that_follow_each_other_are_all_read(tmp_path):
    """C1: a gzip file may be made of several members."""
    writer = feed(tmp_path, compression=".gz")
    path = writer.data("t", [wrapped(1, 1, name="a")], at(0))
    more = gzip.compress((wrapped(2, 1, name="b") + "\n").encode())
    path.write_bytes(path.read_bytes() + more)
    writer.resolved(at(10))
    feed_source = source(tmp_path)
    (split,) = feed_source.plan(epochs(feed_source)[0]).parts
    assert [row["id"] for row in read(split)] == [1, 2]
