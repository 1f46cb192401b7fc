"""The writer leaves exactly the net effect of its changes, in files that only its task writes."""

import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    IcebergType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.change import AT, BEFORE, OP, SEQ, Op
from icestream.errors import SchemaRejected
from icestream.iceberg.closed import DATA, EQUALITY_DELETES, FileClosed
from icestream.iceberg.target import SortColumn
from icestream.schema import arrow_schema
from icestream.sinks.iceberg import writer
from tests.property.tables import GLOBAL_SPEC_ID, SPEC_ID, LocalTable, partitions

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(3, "region", StringType(), required=False),
    NestedField(5, "amount", LongType(), required=False),
)
REGION = [("region", IdentityTransform())]
EU, US = {"region": "eu"}, {"region": "us"}


def changes(*rows: dict[str, object], op: Op = Op.UPSERT) -> pa.Table:
    """One change for each row, in this order; `op` and `before` may be in a row."""
    data = [{OP: row.get("op", op), AT: n, SEQ: 0, **row} for n, row in enumerate(rows)]
    columns = {
        OP: pa.array([row[OP] for row in data], pa.int8()),
        AT: pa.array([row[AT] for row in data], pa.int64()),
        SEQ: pa.array([row[SEQ] for row in data], pa.int64()),
        "id": pa.array([row["id"] for row in data], pa.int64()),
        "region": pa.array([row.get("region") for row in data], pa.string()),
        "amount": pa.array([row.get("amount") for row in data], pa.int64()),
    }
    if any("before" in row for row in rows):
        columns[BEFORE] = pa.array(
            [row.get("before") for row in data], pa.struct([("region", pa.string())])
        )
    return pa.table(columns)


def table(folder: Path, **options: object) -> LocalTable:
    return LocalTable(folder=folder, schema=SCHEMA, key=["id"], **options)


def content(files: list[FileClosed], kind: str) -> list[dict[str, object]]:
    read = [pq.read_table(file.path).to_pylist() for file in files if file.kind == kind]
    return sorted((row for rows in read for row in rows), key=lambda row: row["id"])


def test_upserts_become_a_data_file_and_a_delete_file(tmp_path):
    """I8: update is both a delete and an insert."""
    files = table(tmp_path).write(changes({"id": 1, "region": "eu"}, {"id": 2, "amount": 5}))
    assert content(files, DATA) == [
        {"id": 1, "region": "eu", "amount": None},
        {"id": 2, "region": None, "amount": 5},
    ]
    assert content(files, EQUALITY_DELETES) == [{"id": 1}, {"id": 2}]


def test_inserts_that_are_new_write_no_delete_file(tmp_path):
    """I4, I8: append when there are only data files."""
    files = table(tmp_path).write(changes({"id": 1}, {"id": 2}, op=Op.INSERT))
    assert [file.kind for file in files] == [DATA]


def test_deletes_write_no_data_file(tmp_path):
    """I8: delete writes an equality delete by the identifier columns."""
    files = table(tmp_path).write(changes({"id": 1}, op=Op.DELETE))
    assert [file.kind for file in files] == [EQUALITY_DELETES]


def test_no_file_deletes_a_row_of_its_own_commit(tmp_path):
    """I8: two changes of a key in one epoch leave one row, not none and not two."""
    local = table(tmp_path)
    local.write(changes({"id": 1, "amount": 1}))
    local.write(changes({"id": 1, "amount": 2}, {"id": 1, "op": Op.DELETE}, {"id": 1, "amount": 3}))
    assert local.rows() == [{"id": 1, "region": None, "amount": 3}]


def test_files_lie_where_only_their_attempt_writes(tmp_path):
    """I2, I17: job, epoch and shard are in the path, generation and attempt in the shard."""
    reports = table(tmp_path).writer(epoch=7, run="g3.1").write("t", "00002", changes({"id": 1}))
    paths = [FileClosed.of(report).path for report in reports]
    folder = f"{tmp_path}/data/icestream/job=orders/epoch=7/shard=g3.1-00002-"
    assert [path[: len(folder)] for path in paths] == [folder, folder]
    rests = [path.removeprefix(folder).partition("/") for path in paths]
    assert [rest for _, _, rest in rests] == ["data-00000.parquet", "deletes/eqdel-00000.parquet"]
    assert len({attempt for attempt, _, _ in rests}) == 1


def test_a_report_has_what_the_commit_needs(tmp_path):
    """I3: table, epoch, batch id, worker, schema, spec, counts, equality ids, metrics."""
    data, deletes = table(tmp_path).write(changes({"id": 1}, {"id": 2}))
    for file in (data, deletes):
        assert (file.table, file.epoch) == ("t", 1)
        assert (file.worker, file.schema_id, file.spec_id) == ("g1.0-00000", 5, GLOBAL_SPEC_ID)
        assert file.size_bytes == Path(file.path).stat().st_size
        assert file.record_count == 2
        assert file.metrics["value-counts"]["values"][0] == 2
    assert list(data.equality_ids) == []
    assert list(deletes.equality_ids) == [1]


def test_a_delete_file_holds_the_key_columns_with_their_field_ids(tmp_path):
    """I8: readers match deletes by field id."""
    local = LocalTable(folder=tmp_path, schema=SCHEMA, key=["region", "id"])
    *_, deletes = local.write(changes({"id": 1, "region": "eu"}, op=Op.DELETE))
    schema = pq.read_schema(deletes.path)
    found = {field.name: int(field.metadata[b"PARQUET:field_id"]) for field in schema}
    assert found == {"id": 1, "region": 3}
    assert list(deletes.equality_ids) == [3, 1]


def test_a_late_twin_of_a_task_leaves_the_reported_files_alone(tmp_path):
    """I17, E3, Mend c5: the same rows in other batches are another file under the same name."""
    local = table(tmp_path, terms=REGION)
    rows = [{"id": n, "region": "ab"[n % 2], "amount": n} for n in range(2000)]
    whole = changes(*rows)
    batches = pa.concat_tables([whole.slice(n, 7) for n in range(0, len(rows), 7)])
    first = [FileClosed.of(report) for report in local.writer().write("t", "0", whole)]
    committed = {file.path: Path(file.path).read_bytes() for file in first}
    twin = [FileClosed.of(report) for report in local.writer().write("t", "0", batches)]
    assert not {file.path for file in twin} & committed.keys()
    assert {path: Path(path).read_bytes() for path in committed} == committed
    assert [file.size_bytes for file in first] == [len(found) for found in committed.values()]
    for one, other in zip(first, twin, strict=True):
        assert pq.read_table(one.path).equals(pq.read_table(other.path))


def test_runs_never_write_the_same_path(tmp_path):
    """E6, I2: a late task of an older run cannot touch what a newer run has committed."""
    local = table(tmp_path)
    paths = [
        FileClosed.of(report).path
        for run in ("g1.0", "g1.1", "g2.0")
        for report in local.writer(run=run).write("t", "00000", changes({"id": 1}))
    ]
    assert len(set(paths)) == len(paths) == 6


def test_a_missing_column_is_null_and_an_unknown_one_is_left_out(tmp_path):
    """I11: a dropped source column stays and becomes null."""
    narrow = changes({"id": 1}).drop_columns(["amount"]).append_column("other", pa.array([1]))
    files = table(tmp_path).write(narrow)
    assert content(files, DATA) == [{"id": 1, "region": None, "amount": None}]


def test_a_required_column_without_a_value_is_refused(tmp_path):
    """I11: what the table cannot hold stops with a clear error."""
    required = Schema(
        SCHEMA.fields[0], NestedField(3, "region", StringType(), required=True), SCHEMA.fields[2]
    )
    local = LocalTable(folder=tmp_path, schema=required, key=["id"])
    with pytest.raises(SchemaRejected, match="column region is required"):
        local.write(changes({"id": 1, "region": "eu"}, {"id": 2}))
    local.write(changes({"id": 3}, op=Op.DELETE))
    assert list(tmp_path.rglob("data-*.parquet")) == []


def test_rows_are_sorted_by_the_tables_order(tmp_path):
    """I10: the sort order of the table is kept within a file and reported."""
    local = table(
        tmp_path, sort_columns=[SortColumn("amount", False, False), SortColumn("id", True, True)]
    )
    data, deletes = local.write(
        changes({"id": 3, "amount": 1}, {"id": 1, "amount": 2}, {"id": 2, "amount": 2})
    )
    assert pq.read_table(data.path).column("id").to_pylist() == [1, 2, 3]
    assert (data.sort_order_id, "sort-order-id" in deletes.content_json()) == (4, False)


@pytest.mark.parametrize(
    ("ascending", "nulls_first", "order"),
    [
        (True, True, [2, 5, 1, 4, 3]),
        (True, False, [5, 1, 4, 3, 2]),
        (False, True, [2, 3, 4, 1, 5]),
        (False, False, [3, 4, 1, 5, 2]),
    ],
)
def test_nulls_and_what_is_no_number_have_their_place_in_the_order(
    ascending, nulls_first, order, tmp_path
):
    """I10, Mend h10: the order that is reported is the order of the rows."""
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "x", DoubleType(), required=False),
    )
    order_by = [SortColumn("x", ascending, nulls_first)]
    local = LocalTable(folder=tmp_path, schema=schema, key=["id"], sort_columns=order_by)
    values = [1.0, None, float("nan"), 3.0, -1.0]
    rows = changes(*({"id": n} for n in range(1, 6)), op=Op.INSERT).select([OP, AT, SEQ, "id"])
    (data,) = local.write(rows.append_column("x", pa.array(values)))
    assert pq.read_table(data.path).column("id").to_pylist() == order


MOMENT = datetime(2020, 1, 2, 3, 4, 5, 6)
ID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
# Values and the partition they fall into, in Iceberg's JSON form of single values.
TRANSFORMS = [
    (LongType(), IdentityTransform(), 5, 5),
    (StringType(), IdentityTransform(), "a b", "a b"),
    (BooleanType(), IdentityTransform(), True, True),
    (DoubleType(), IdentityTransform(), 1.5, 1.5),
    (DateType(), IdentityTransform(), date(1969, 12, 31), "1969-12-31"),
    (TimeType(), IdentityTransform(), time(1, 2, 3), "01:02:03.000000"),
    (TimestampType(), IdentityTransform(), MOMENT, "2020-01-02T03:04:05.000006"),
    (
        TimestamptzType(),
        IdentityTransform(),
        MOMENT.replace(tzinfo=UTC),
        "2020-01-02T03:04:05.000006+00:00",
    ),
    (DecimalType(10, 2), IdentityTransform(), Decimal("14.20"), "14.20"),
    (UUIDType(), IdentityTransform(), ID, str(ID)),
    (BinaryType(), IdentityTransform(), b"\x00\xff", "00FF"),
    (FixedType(2), IdentityTransform(), b"\x00\xff", "00FF"),
    # Hashes as in the appendix of the Iceberg specification, over 2 ** 31 - 1.
    (LongType(), BucketTransform(16), 34, 2017239379 % 16),
    (StringType(), BucketTransform(16), "iceberg", 1210000089 % 16),
    (DecimalType(9, 2), BucketTransform(16), Decimal("14.20"), (-500754589 & 0x7FFFFFFF) % 16),
    (DateType(), BucketTransform(16), date(2017, 11, 16), (-653330422 & 0x7FFFFFFF) % 16),
    (
        UUIDType(),
        BucketTransform(16),
        uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7"),
        1488055340 % 16,
    ),
    (BinaryType(), BucketTransform(16), b"\x00\x01\x02\x03", (-188683207 & 0x7FFFFFFF) % 16),
    (LongType(), TruncateTransform(10), -1, -10),
    (StringType(), TruncateTransform(3), "iceberg", "ice"),
    (DecimalType(9, 2), TruncateTransform(50), Decimal("10.65"), "10.50"),
    (BinaryType(), TruncateTransform(3), b"\x01\x02\x03\x04\x05", "010203"),
    (DateType(), YearTransform(), date(1969, 6, 1), -1),
    (TimestampType(), YearTransform(), MOMENT, 50),
    (DateType(), MonthTransform(), date(1969, 12, 1), -1),
    (TimestamptzType(), MonthTransform(), MOMENT.replace(tzinfo=UTC), 600),
    (DateType(), DayTransform(), date(2020, 1, 2), "2020-01-02"),
    (TimestampType(), DayTransform(), datetime(1969, 12, 31, 23), "1969-12-31"),
    (TimestampType(), HourTransform(), MOMENT, 438315),
    (TimestamptzType(), HourTransform(), datetime(1969, 12, 31, 23, tzinfo=UTC), -1),
    (LongType(), VoidTransform(), 5, None),
    (StringType(), VoidTransform(), "x", None),
]


def column_of(kind: IcebergType, values: list[object]) -> pa.Array:
    schema = Schema(NestedField(1, "c", kind, required=False))
    arrow_type = arrow_schema(schema).field("c").type
    if isinstance(kind, UUIDType):
        plain = pa.array([value and value.bytes for value in values], pa.binary(16))
        return pa.ExtensionArray.from_storage(arrow_type, plain)
    return pa.array(values, arrow_type)


@pytest.mark.parametrize(("kind", "transform", "value", "partition"), TRANSFORMS, ids=str)
def test_rows_go_to_the_partition_of_their_value(kind, transform, value, partition, tmp_path):
    """I9: every transform, on every type; null has a partition of its own."""
    schema = Schema(
        NestedField(1, "id", LongType(), required=True), NestedField(2, "c", kind, required=False)
    )
    local = LocalTable(folder=tmp_path, schema=schema, key=["id"], terms=[("c", transform)])
    rows = changes({"id": 1}, {"id": 2}, {"id": 3}, op=Op.INSERT).select([OP, AT, SEQ, "id"])
    files = local.write(rows.append_column("c", column_of(kind, [value, None, value])))
    found = {
        file.partition["1000"]: sorted(pq.read_table(file.path).column("id").to_pylist())
        for file in files
    }
    assert found == ({partition: [1, 3], None: [2]} if partition is not None else {None: [1, 2, 3]})
    assert {file.spec_id for file in files} == {SPEC_ID}


def test_several_partition_terms_make_one_partition(tmp_path):
    """I9: each combination of values has files of its own."""
    terms = [("region", IdentityTransform()), ("amount", TruncateTransform(10))]
    files = table(tmp_path, terms=terms).write(
        changes(
            {"id": 1, "region": "eu", "amount": 5},
            {"id": 2, "region": "eu", "amount": 15},
            {"id": 3, "region": "us", "amount": 7},
            {"id": 4, "region": "eu", "amount": 9},
            op=Op.INSERT,
        )
    )
    found = {(f.partition["1000"], f.partition["1001"]): f.record_count for f in files}
    assert found == {("eu", 0): 2, ("eu", 10): 1, ("us", 0): 1}


def test_a_table_can_be_partitioned_by_a_nested_column(tmp_path):
    """I9: the source of a partition field may lie inside a struct."""
    inner = StructType(NestedField(3, "region", StringType(), required=False))
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "place", inner, required=False),
    )
    terms = [("place.region", IdentityTransform())]
    local = LocalTable(folder=tmp_path, schema=schema, key=["id"], terms=terms)
    rows = changes({"id": 1}, {"id": 2}, {"id": 3}).select([OP, AT, SEQ, "id"])
    files = local.write(rows.append_column("place", pa.array([EU, US, None])))
    assert partitions(files, DATA) == ["eu", "us", None]
    assert partitions(files, EQUALITY_DELETES) == [{}]


def test_a_delete_whose_old_partition_is_unknown_is_global(tmp_path):
    """I9: an update that moves a row to another partition leaves no copy behind."""
    local = table(tmp_path, terms=REGION)
    local.write(changes({"id": 1, "region": "eu"}, {"id": 2, "region": "eu"}))
    files = local.write(changes({"id": 1, "region": "us"}))
    deletes = [file for file in files if file.kind == EQUALITY_DELETES]
    assert [(file.spec_id, dict(file.partition)) for file in deletes] == [(GLOBAL_SPEC_ID, {})]
    assert sorted((row["id"], row["region"]) for row in local.rows()) == [(1, "us"), (2, "eu")]


def test_a_delete_is_scoped_when_the_key_decides_the_partition(tmp_path):
    """I9: the key proves where the old row lies."""
    local = LocalTable(folder=tmp_path, schema=SCHEMA, key=["region", "id"], terms=REGION)
    local.write(changes({"id": 1, "region": "eu"}, {"id": 1, "region": "us"}))
    files = local.write(changes({"id": 1, "region": "eu", "amount": 7}))
    (delete,) = [file for file in files if file.kind == EQUALITY_DELETES]
    assert (delete.spec_id, delete.partition) == (SPEC_ID, {"1000": "eu"})
    assert sorted((row["region"], row["amount"] or 0) for row in local.rows()) == [
        ("eu", 7),
        ("us", 0),
    ]


def test_a_delete_is_scoped_by_the_before_image(tmp_path):
    """I9: the old partition is known from a before-image, the new row goes elsewhere."""
    local = table(tmp_path, terms=REGION)
    local.write(changes({"id": 1, "region": "eu"}, {"id": 2, "region": "us"}, op=Op.INSERT))
    files = local.write(
        changes(
            {"id": 1, "region": "us", "before": EU},
            {"id": 2, "op": Op.DELETE, "before": US},
            {"id": 3, "region": "asia", "before": None},
        )
    )
    deletes = {
        (file.spec_id, file.partition.get("1000")): content([file], EQUALITY_DELETES)
        for file in files
        if file.kind == EQUALITY_DELETES
    }
    assert deletes == {
        (SPEC_ID, "eu"): [{"id": 1}],
        (SPEC_ID, "us"): [{"id": 2}],
        (GLOBAL_SPEC_ID, None): [{"id": 3}],
    }
    assert sorted((row["id"], row["region"]) for row in local.rows()) == [(1, "us"), (3, "asia")]


def test_the_first_before_image_of_an_epoch_tells_the_old_partition(tmp_path):
    """I9: later before-images show rows that were never in the table."""
    local = table(tmp_path, terms=REGION)
    local.write(changes({"id": 1, "region": "eu"}, op=Op.INSERT))
    files = local.write(
        changes({"id": 1, "region": "us", "before": EU}, {"id": 1, "region": "asia", "before": US})
    )
    assert partitions(files, EQUALITY_DELETES) == ["eu"]
    assert [row["region"] for row in local.rows()] == ["asia"]


def test_a_before_image_without_the_partition_column_proves_nothing(tmp_path):
    """I9: a column that the image lacks may have had any value; the delete is global."""
    local = table(tmp_path, terms=REGION)
    local.write(changes({"id": 1, "region": "eu"}, op=Op.INSERT))
    images = pa.array([{"amount": 5}], pa.struct([("amount", pa.int64())]))
    files = local.write(changes({"id": 1, "region": "us"}).append_column(BEFORE, images))
    assert [file.spec_id for file in files if file.kind == EQUALITY_DELETES] == [GLOBAL_SPEC_ID]
    assert [row["region"] for row in local.rows()] == ["us"]


@pytest.mark.parametrize("before", [EU, None])
def test_deletes_are_global_right_after_the_partition_spec_changed(before, tmp_path):
    """I9: rows of another spec lie in partitions that no delete of the new spec reaches."""
    old = table(tmp_path, terms=REGION)
    old.write(changes({"id": 1, "region": "eu"}, op=Op.INSERT))
    new = old.repartitioned([("id", BucketTransform(4))])
    files = new.write(changes({"id": 1, "region": "us", "before": before}))
    assert [file.spec_id for file in files if file.kind == EQUALITY_DELETES] == [GLOBAL_SPEC_ID]
    assert [row["region"] for row in new.rows()] == ["us"]


def test_deletes_of_an_unpartitioned_table_use_its_own_spec(tmp_path):
    """I9: without partitions every delete reaches everywhere."""
    files = table(tmp_path).write(changes({"id": 1}))
    assert {file.spec_id for file in files} == {GLOBAL_SPEC_ID}
    assert all(file.partition == {} for file in files)


def test_rows_without_a_key_are_only_added(tmp_path):
    """I8: nothing identifies them, so nothing is deleted."""
    local = LocalTable(folder=tmp_path, schema=SCHEMA, key=[])
    local.write(changes({"id": 1}, {"id": 1}))
    local.write(changes({"id": 1}))
    assert len(local.rows()) == 3


def test_a_uuid_can_be_the_key(tmp_path):
    """I8: the most common key of all."""
    schema = Schema(NestedField(1, "id", UUIDType(), required=True))
    local = LocalTable(
        folder=tmp_path, schema=schema, key=["id"], terms=[("id", BucketTransform(4))]
    )
    ids = [uuid.UUID(int=number) for number in (1, 2, 1)]
    rows = changes({"id": 1}, {"id": 2}, {"id": 3}).select([OP, AT, SEQ])
    local.write(rows.append_column("id", column_of(UUIDType(), ids)))
    local.write(rows.slice(0, 1).append_column("id", column_of(UUIDType(), ids[:1])))
    assert sorted(row["id"] for row in local.rows()) == ids[:2]


def test_sorting_by_a_uuid_works(tmp_path):
    """I10: any column may be in the sort order."""
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "u", UUIDType(), required=False),
    )
    local = LocalTable(
        folder=tmp_path, schema=schema, key=["id"], sort_columns=[SortColumn("u", True, True)]
    )
    rows = changes({"id": 1}, {"id": 2}, op=Op.INSERT).select([OP, AT, SEQ, "id"])
    ids = [uuid.UUID(int=9), uuid.UUID(int=3)]
    (data,) = local.write(rows.append_column("u", column_of(UUIDType(), ids)))
    assert pq.read_table(data.path).column("id").to_pylist() == [2, 1]


def test_partitions_of_days_that_python_has_not():
    """P8, Mend d3: endless dates fall into the years, months and days that readers compute."""
    days = [2**31 - 1, -(2**31), 0, -1, None, -719_529, 18_000]
    dates = pa.array(days, pa.int32()).cast(pa.date32())
    times = pa.array([2**63 - 1, -(2**63), 0, -1, None], pa.int64()).cast(pa.timestamp("us", "UTC"))
    near = dates.slice(2)
    for transform in (YearTransform(), MonthTransform()):
        found = writer.transformed(near, transform, DateType())
        assert found.to_pylist() == transform.pyarrow_transform(DateType())(near).to_pylist()
    years = writer.transformed(dates, YearTransform(), DateType()).to_pylist()
    assert years[:2] == [5_881_580 - 1970, -5_877_641 - 1970]
    months = writer.transformed(dates, MonthTransform(), DateType()).to_pylist()
    assert months[:2] == [(5_881_580 - 1970) * 12 + 6, (-5_877_641 - 1970) * 12 + 5]
    years = writer.transformed(times, YearTransform(), TimestamptzType()).to_pylist()
    assert years == [294_247 - 1970, -290_308 - 1970, 0, -1, None]
    texts = [writer.iso_day(day) for day in days if day is not None]
    assert texts[:2] == ["+5881580-07-11", "-5877641-06-23"]
    assert texts[2:] == ["1970-01-01", "1969-12-31", "-0001-12-31", "2019-04-14"]
