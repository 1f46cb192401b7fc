"""Files appear as a whole, roll at the table's size, and are reported with what a commit needs."""

import dataclasses
import json
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DateType,
    DoubleType,
    ListType,
    LongType,
    NestedField,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    UUIDType,
)

from icestream.errors import Broken, TargetUnavailable
from icestream.iceberg.closed import DATA, EQUALITY_DELETES, FileClosed
from icestream.iceberg.files import Closed, ParquetFolder, filesystem
from icestream.report import Report, decode, encode
from icestream.schema import arrow_schema

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(4, "name", StringType(), required=False),
    NestedField(7, "score", DoubleType(), required=False),
    NestedField(
        9,
        "tags",
        ListType(element_id=12, element=StringType(), element_required=False),
        required=False,
    ),
)
REPORT = FileClosed(
    table="orders",
    epoch=3,
    worker="g1.0-00000",
    schema_id=0,
    spec_id=1,
    path="/lake/data-00000.parquet",
    kind=DATA,
    record_count=2,
    size_bytes=100,
    partition={"1000": "eu"},
    metrics={"value-counts": {"keys": [1], "values": [2]}},
    split_offsets=(4,),
)


def rows(count: int, **columns: list[object]) -> pa.Table:
    """Rows of the table; columns that are not given hold what cannot be compressed away."""
    data = {
        "id": list(range(count)),
        "name": [f"name {number}" for number in range(count)],
        "score": [number / 7 for number in range(count)],
        "tags": [[f"tag {number}"] for number in range(count)],
    }
    return pa.table({**data, **columns}, schema=arrow_schema(SCHEMA))


def write(
    folder: Path, table: pa.Table, kind: str = DATA, first: int = 0, **properties: str
) -> list[Closed]:
    named = {name.replace("__", ".").replace("_", "-"): text for name, text in properties.items()}
    return list(ParquetFolder(str(folder), {}, named).write(table, SCHEMA, kind, first))


def metric(closed: Closed, name: str) -> dict[int, object]:
    pairs = closed.metrics[name]
    return dict(zip(pairs["keys"], pairs["values"], strict=True))


def test_a_report_is_read_as_it_was_sent():
    """I3: a worker hands the coordinator all that a commit needs."""
    (sent,) = decode([encode(REPORT.report())])
    read = FileClosed.of(sent)
    assert read.sha256 == REPORT.digest()
    assert sent == REPORT.report()
    assert (sent.table, sent.kind, sent.rows, sent.size_bytes) == ("orders", DATA, 2, 100)
    for field in dataclasses.fields(FileClosed):
        if field.name != "sha256":
            assert getattr(read, field.name) == getattr(REPORT, field.name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("table", "other"), ("epoch", 4), ("worker", "w"), ("schema_id", 1)],
        *[("spec_id", 0), ("path", "/lake/other.parquet"), ("kind", EQUALITY_DELETES)],
        *[("record_count", 3), ("size_bytes", 101), ("partition", {"1000": "us"})],
        *[("equality_ids", [1]), ("metrics", {}), ("split_offsets", [8]), ("sort_order_id", 1)],
    ],
)
def test_a_report_that_was_altered_is_refused(field, value):
    """I3: the hash covers everything that is reported."""
    sent = REPORT.report()
    assert getattr(sent.payload, field) != value
    altered = dataclasses.replace(sent.payload, **{field: value})
    with pytest.raises(Broken, match="arrives as it was sent"):
        FileClosed.of(dataclasses.replace(sent, payload=altered))


@pytest.mark.parametrize(
    ("field", "value"),
    [("table", "other"), ("kind", EQUALITY_DELETES), ("rows", 3), ("size_bytes", 101)],
)
def test_a_report_that_tells_of_another_file_is_refused(field, value):
    """I3: what everybody reads of a report is what its file says."""
    altered = dataclasses.replace(REPORT.report(), **{field: value})
    with pytest.raises(Broken, match="arrives as it was sent"):
        FileClosed.of(altered)


def test_a_report_of_another_sink_is_refused():
    """I3: a table takes files alone."""
    with pytest.raises(Broken, match="reports of its files"):
        FileClosed.of(Report(table="t", kind="documents", rows=1, size_bytes=1))


def test_a_report_with_another_hash_is_refused():
    """I3: nor may the hash itself be altered."""
    sent = REPORT.report()
    altered = dataclasses.replace(sent.payload, sha256="0" * 64)
    with pytest.raises(Broken):
        FileClosed.of(dataclasses.replace(sent, payload=altered))


def test_the_hash_does_not_depend_on_the_order_of_maps():
    """I3: the same report has the same hash wherever it was made."""
    one = dataclasses.replace(REPORT, partition={"1000": "eu", "1001": 3})
    other = dataclasses.replace(REPORT, partition={"1001": 3, "1000": "eu"})
    assert one.digest() == other.digest()


def test_a_data_file_in_the_form_that_iceberg_reads():
    """I4: the coordinator never opens the file."""
    sorted_file = dataclasses.replace(REPORT, sort_order_id=2)
    assert json.loads(sorted_file.content_json()) == {
        "spec-id": 1,
        "content": "data",
        "file-path": "/lake/data-00000.parquet",
        "file-format": "parquet",
        "partition": {"1000": "eu"},
        "file-size-in-bytes": 100,
        "record-count": 2,
        "split-offsets": [4],
        "value-counts": {"keys": [1], "values": [2]},
        "sort-order-id": 2,
    }


def test_a_delete_file_names_its_equality_columns_and_no_sort_order():
    """I8: equality deletes by the identifier columns."""
    deletes = dataclasses.replace(
        REPORT, kind=EQUALITY_DELETES, equality_ids=(1, 4), sort_order_id=2
    )
    content = json.loads(deletes.content_json())
    assert content["content"] == "equality-deletes"
    assert content["equality-ids"] == [1, 4]
    assert "sort-order-id" not in content


def test_files_lie_under_deterministic_names(tmp_path):
    """I2: data-<seq>.parquet and deletes/eqdel-<seq>.parquet."""
    (data,) = write(tmp_path, rows(3), first=7)
    (deletes,) = write(tmp_path, rows(3), kind=EQUALITY_DELETES)
    assert data.path == f"{tmp_path}/data-00007.parquet"
    assert deletes.path == f"{tmp_path}/deletes/eqdel-00000.parquet"
    found = sorted(str(path) for path in tmp_path.rglob("*") if path.is_file())
    assert found == sorted([data.path, deletes.path])


def test_a_file_holds_the_rows_with_the_tables_field_ids(tmp_path):
    """I1: readers find columns by field id, nested ones too."""
    table = rows(5, score=[1.5, None, -2.0, 0.0, 9.0])
    (closed,) = write(tmp_path, table)
    read = pq.read_table(closed.path)
    assert (
        read.select(["id", "name", "score"]).to_pylist()
        == table.select(["id", "name", "score"]).to_pylist()
    )
    schema = pq.read_schema(closed.path)
    ids = {field.name: int(field.metadata[b"PARQUET:field_id"]) for field in schema}
    assert ids == {"id": 1, "name": 4, "score": 7, "tags": 9}
    element = schema.field("tags").type.value_field
    assert int(element.metadata[b"PARQUET:field_id"]) == 12
    assert not schema.field("id").nullable


def test_what_is_reported_is_what_was_written(tmp_path):
    """I3: record count, size and split offsets are the file's own."""
    (closed,) = write(tmp_path, rows(50))
    metadata = pq.read_metadata(closed.path)
    assert closed.record_count == metadata.num_rows == 50
    assert closed.size_bytes == Path(closed.path).stat().st_size
    starts = [metadata.row_group(n).column(0) for n in range(metadata.num_row_groups)]
    assert list(closed.split_offsets) == [
        min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in starts
    ]


def test_files_roll_at_the_tables_target_size(tmp_path):
    """I12: write.target-file-size-bytes is honoured, and no row is lost between two files."""
    target = 20_000
    table = rows(5_000)
    closed = write(tmp_path, table, write__target_file_size_bytes=str(target))
    assert len(closed) > 2
    assert [Path(file.path).name for file in closed] == [
        f"data-{number:05d}.parquet" for number in range(len(closed))
    ]
    assert all(file.size_bytes < 4 * target for file in closed)
    read = pa.concat_tables([pq.read_table(file.path) for file in closed])
    assert read.column("id").to_pylist() == list(range(5_000))
    assert sum(file.record_count for file in closed) == 5_000
    # Metrics of a rolled file are about its own rows.
    lowers = [bytes.fromhex(metric(file, "lower-bounds")[1]) for file in closed]
    firsts = [pq.read_table(file.path).column("id")[0].as_py() for file in closed]
    assert [struct.unpack("<q", lower)[0] for lower in lowers] == firsts


def test_parquet_settings_of_the_table_are_honoured(tmp_path):
    """I12: compression, dictionary and row-group size are settable."""
    properties = {
        "write.parquet.compression-codec": "gzip",
        "write.parquet.compression-level": "9",
        "write.parquet.dict-enabled": "false",
        "write.parquet.row-group-size-bytes": "10000",
    }
    folder = ParquetFolder(str(tmp_path), {}, properties)
    (closed,) = folder.write(rows(1_000), SCHEMA, DATA, 0)
    metadata = pq.read_metadata(closed.path)
    assert metadata.num_row_groups > 3
    column = metadata.row_group(0).column(1)
    assert column.compression == "GZIP"
    assert not column.has_dictionary_page


def test_compression_is_zstd_by_default_and_can_be_switched_off(tmp_path):
    """I12: Iceberg's default codec."""
    (default,) = write(tmp_path / "a", rows(3))
    (plain,) = write(tmp_path / "b", rows(3), write__parquet__compression_codec="uncompressed")
    codecs = [pq.read_metadata(c.path).row_group(0).column(0).compression for c in (default, plain)]
    assert codecs == ["ZSTD", "UNCOMPRESSED"]


def test_metrics_count_values_nulls_and_not_a_numbers(tmp_path):
    """I3: value, null and NaN counts by field id."""
    nan = float("nan")
    (closed,) = write(tmp_path, rows(4, score=[nan, 1.0, None, nan], name=["a", None, None, "b"]))
    assert metric(closed, "value-counts")[1] == 4
    assert metric(closed, "null-value-counts") == {1: 0, 4: 2, 7: 1, 12: 0}
    assert metric(closed, "nan-value-counts") == {7: 2}
    assert set(metric(closed, "column-sizes")) == {1, 4, 7, 12}


def test_bounds_leave_not_a_number_out(tmp_path):
    """I3: a NaN is neither the lowest nor the highest value."""
    (closed,) = write(tmp_path, rows(3, score=[float("nan"), -1.5, 2.5]))
    assert bytes.fromhex(metric(closed, "lower-bounds")[7]) == struct.pack("<d", -1.5)
    assert bytes.fromhex(metric(closed, "upper-bounds")[7]) == struct.pack("<d", 2.5)


def test_bounds_of_text_are_truncated_and_still_bounds(tmp_path):
    """I12: truncate(16) by default; a cut upper bound is raised above every value."""
    low, high = "a" * 40, "b" * 40
    (closed,) = write(tmp_path, rows(2, name=[low, high]))
    lower = bytes.fromhex(metric(closed, "lower-bounds")[4]).decode()
    upper = bytes.fromhex(metric(closed, "upper-bounds")[4]).decode()
    assert (len(lower), len(upper)) == (16, 16)
    assert lower <= low < high <= upper


@pytest.mark.parametrize("kind", [TimestampNanoType(), TimestamptzNanoType()], ids=str)
def test_bounds_of_nanoseconds_are_whole(kind, tmp_path):
    """I12, Mend h7: readers with a filter pass over files by their bounds."""
    schema = Schema(NestedField(field_id=1, name="t", field_type=kind, required=False))
    fields = arrow_schema(schema)
    moments = [1_700_000_000_123_456_789, 1_700_000_000_123_456_001, None]
    table = pa.table([pa.array(moments, pa.int64()).cast(fields.field("t").type)], schema=fields)
    (closed,) = ParquetFolder(str(tmp_path), {}, {}).write(table, schema, DATA, 0)
    lower, upper = metric(closed, "lower-bounds"), metric(closed, "upper-bounds")
    assert bytes.fromhex(lower[1]) == struct.pack("<q", 1_700_000_000_123_456_001)
    assert bytes.fromhex(upper[1]) == struct.pack("<q", 1_700_000_000_123_456_789)


def test_bounds_of_dates_that_python_has_not(tmp_path):
    """P8, Mend d3: endless dates, and dates before the year 1 or after 9999."""
    schema = Schema(
        NestedField(field_id=1, name="d", field_type=DateType(), required=False),
        NestedField(field_id=2, name="t", field_type=TimestamptzType(), required=False),
        NestedField(
            field_id=3,
            name="l",
            field_type=ListType(element_id=4, element_type=DateType(), element_required=False),
            required=False,
        ),
        NestedField(field_id=5, name="n", field_type=TimestampType(), required=False),
    )
    fields = arrow_schema(schema)
    days, times = [2**31 - 1, -(2**31), None], [2**63 - 1, None, -(2**63)]
    table = pa.table(
        [
            pa.array(days, pa.int32()).cast(pa.date32()),
            pa.array(times, pa.int64()).cast(fields.field("t").type),
            pa.array([days, [], None], pa.list_(pa.int32())).cast(fields.field("l").type),
            pa.nulls(3, fields.field("n").type),
        ],
        schema=fields,
    )
    properties = {"write.parquet.row-group-size-bytes": "1"}
    for each in ({}, properties):
        (closed,) = ParquetFolder(str(tmp_path), {}, each).write(table, schema, DATA, 0)
        lower, upper = metric(closed, "lower-bounds"), metric(closed, "upper-bounds")
        assert {k: bytes.fromhex(v) for k, v in lower.items()} == {
            1: struct.pack("<i", -(2**31)),
            2: struct.pack("<q", -(2**63)),
        }
        assert bytes.fromhex(upper[1]) == struct.pack("<i", 2**31 - 1)
        assert bytes.fromhex(upper[2]) == struct.pack("<q", 2**63 - 1)
        assert metric(closed, "value-counts")[1] == 3
    for off in ("none", "counts"):
        modes = {"write.metadata.metrics.default": off}
        (closed,) = ParquetFolder(str(tmp_path), {}, modes).write(table, schema, DATA, 0)
        assert metric(closed, "lower-bounds") == {}


@pytest.mark.parametrize(("mode", "counts"), [("full", {2: 3}), ("none", {})])
def test_uuids_are_counted_but_have_no_bounds(tmp_path, mode, counts, caplog):
    """I3, I8: readers order them otherwise than Parquet, and would pass over rows and deletes."""
    schema = Schema(
        NestedField(field_id=1, name="id", field_type=LongType(), required=True),
        NestedField(field_id=2, name="a.u", field_type=UUIDType(), required=False),
    )
    fields = arrow_schema(schema)
    storage = pa.array([bytes(16), b"\xff" * 16, None], pa.binary(16))
    uuids = pa.ExtensionArray.from_storage(fields.field("a.u").type, storage)
    table = pa.table([pa.array([1, 2, 3], pa.int64()), uuids], schema=fields)
    folder = ParquetFolder(str(tmp_path), {}, {"write.metadata.metrics.default": mode})
    (closed,) = folder.write(table, schema, DATA, 0)
    assert {k: v for k, v in metric(closed, "value-counts").items() if k == 2} == counts
    assert metric(closed, "null-value-counts").get(2) == (1 if counts else None)
    assert 2 not in metric(closed, "lower-bounds")
    statistics = [pq.read_metadata(closed.path).row_group(0).column(n).statistics for n in (0, 1)]
    assert statistics[0].has_min_max
    assert statistics[1] is None
    assert caplog.records == []


def test_metrics_modes_of_the_table_are_honoured(tmp_path):
    """I12: none, counts, truncate(n) and full, by table and by column."""
    properties = {
        "write.metadata.metrics.default": "counts",
        "write.metadata.metrics.column.name": "truncate(3)",
        "write.metadata.metrics.column.score": "none",
        "write.metadata.metrics.column.id": "full",
    }
    folder = ParquetFolder(str(tmp_path), {}, properties)
    (closed,) = folder.write(rows(2, name=["abcdef", "abcxyz"]), SCHEMA, DATA, 0)
    assert set(metric(closed, "value-counts")) == {1, 4, 12}
    assert metric(closed, "nan-value-counts") == {}
    assert set(metric(closed, "lower-bounds")) == {1, 4}
    assert bytes.fromhex(metric(closed, "lower-bounds")[4]) == b"abc"
    assert bytes.fromhex(metric(closed, "upper-bounds")[4]) == b"abd"


def test_writing_twice_gives_the_same_bytes(tmp_path):
    """I2: a retried task overwrites its own output and never adds to it."""
    (first,) = write(tmp_path, rows(100))
    content = Path(first.path).read_bytes()
    (second,) = write(tmp_path, rows(100))
    assert second == first
    assert Path(first.path).read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_could_not_be_finished_leaves_nothing_behind(tmp_path):
    """I2: a reader never meets half a file, and the old one stays."""
    (closed,) = write(tmp_path, rows(3))
    before = Path(closed.path).read_bytes()
    with pytest.raises(pa.ArrowInvalid, match="contains nulls"):
        write(tmp_path, rows(3, id=[1, None, 3]))
    assert Path(closed.path).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_storage_that_cannot_be_written_is_told(tmp_path):
    """I6: an unreachable storage may come back; nothing was committed."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TargetUnavailable, match="could not write a file") as caught:
        write(tmp_path / "file" / "folder", rows(1))
    assert str(tmp_path) in caught.value.detail


@pytest.mark.parametrize(
    ("location", "inner"),
    [
        ("/lake/a?b#c/d", "/lake/a?b#c/d"),
        ("file:///lake/a b", "/lake/a b"),
        ("file:/lake/t", "/lake/t"),
    ],
)
def test_local_locations_keep_odd_characters(location, inner):
    """I1: table names may hold characters that a URL parser would cut off."""
    files, path = filesystem(location, {})
    assert isinstance(files, pafs.LocalFileSystem)
    assert path == inner


def test_an_object_store_is_reached_by_its_bucket_and_key():
    """I1: any storage that Arrow's file systems reach."""
    properties = {
        "s3.endpoint": "http://127.0.0.1:1",
        "s3.access-key-id": "a",
        "s3.secret-access-key": "b",
        "s3.region": "us-east-1",
    }
    files, path = filesystem("s3://lake/a/t?x", properties)
    assert files.type_name == "s3"
    assert path == "lake/a/t?x"
