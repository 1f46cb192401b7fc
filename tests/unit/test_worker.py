"""Workers bring the changes of a key together, write each share once, and report all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, UUIDType
from pyspark.sql.types import StructType

from icestream.change import AT, OP, SEQ, Op
from icestream.errors import Broken, DataRejected, SchemaRejected, SourceUnavailable
from icestream.iceberg.closed import FileClosed
from icestream.report import REPORT
from icestream.schema import Column, SchemaGap, TableShape
from icestream.sources import Need, TableSplit, TablesUnready, ValuesNeeded
from icestream.sources.named_columns import ColumnsSeen, Seen
from icestream.transform import TableSelect
from icestream.worker import Outcome, Unready, _through_spark, map_tasks, wide, write_epoch
from icestream.worker.by_key import Shares, hashes_of
from icestream.worker.wide import WideFrame, write_wide
from tests.property.local_spark import LocalSpark, travelled
from tests.property.tables import LocalTable

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "value", LongType(), required=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSplit(TableSplit):
    """Changes that were given as `(at, id, value)`, in batches."""

    table: str = "t"
    batches: Sequence[Sequence[tuple[int, int, int | None]]] = ()
    error: Exception | None = None
    seen: dict[str, int] = field(default_factory=dict)
    each_key_once: bool = False

    def read(
        self, schema_json: str, key: Sequence[str], reads: object = None
    ) -> Iterator[pa.Table]:
        assert "value" in schema_json
        for batch in self.batches:
            self.seen["rows"] = self.seen.get("rows", 0) + len(batch)
            yield changes(batch)
        if self.error:
            raise self.error

    def learned(self) -> dict[str, int]:
        return self.seen


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingSplit(ListSplit):
    """Changes of a table's first epoch, whose select names the column `a`."""

    columns: Seen

    def columns_seen(self) -> ColumnsSeen:
        return {("t", "a"): self.columns}


def changes(rows: Sequence[tuple[int, int, int | None]]) -> pa.Table:
    """A change batch; a value of None is a delete."""
    return pa.table(
        {
            OP: pa.array([Op.DELETE if v is None else Op.UPSERT for _, _, v in rows], pa.int8()),
            AT: pa.array([at for at, _, _ in rows], pa.int64()),
            SEQ: pa.array([0] * len(rows), pa.int64()),
            "id": pa.array([key for _, key, _ in rows], pa.int64()),
            "value": pa.array([value for _, _, value in rows], pa.int64()),
        }
    )


def run(
    local: LocalTable, *splits: ListSplit, keyed: bool = False, parallelism: int = 2, seed: int = 0
) -> Outcome:
    spark = LocalSpark(parallelism, seed)
    outcome = write_epoch(spark, travelled(splits), travelled(local.writer()), keyed, "epoch 1")
    assert spark.sparkContext.descriptions == (["epoch 1"] if splits else [])
    local.commits.append([FileClosed.of(report) for report in outcome.reports])
    return outcome


def table(folder: Path, key: Sequence[str] = ("id",)) -> LocalTable:
    return LocalTable(folder=folder, schema=SCHEMA, key=list(key))


def content(local: LocalTable) -> dict[int, int]:
    rows = local.rows()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["value"] for row in rows}


def shards(local: LocalTable) -> set[str]:
    return {file.worker.partition("-")[2] for file in local.commits[-1]}


def test_each_split_is_written_by_its_own_task_when_the_source_is_keyed(tmp_path):
    """E1, I2: no shuffle when all changes of a key are in one split."""
    local = table(tmp_path)
    outcome = run(
        local,
        ListSplit(batches=[[(1, 1, 10)], [(2, 1, 20)]]),
        ListSplit(batches=[[(1, 2, 30)]]),
        keyed=True,
    )
    assert content(local) == {1: 20, 2: 30}
    assert outcome.rows == 3
    assert outcome.learned == [{"rows": 2}, {"rows": 1}]
    assert shards(local) == {"00000", "00001"}


def test_changes_of_a_key_in_several_splits_are_brought_together(tmp_path):
    """C3, I8: files of a changefeed are not keyed; the last change wins wherever it lies."""
    local = table(tmp_path)
    many = [(at, at % 5, at) for at in range(60)]
    outcome = run(
        local,
        ListSplit(batches=[many[3::7], [], many[0::7]]),
        ListSplit(batches=[many[5::7], many[1::7]]),
        ListSplit(batches=[many[2::7], many[4::7], many[6::7], [(99, 3, None)]]),
    )
    assert content(local) == {0: 55, 1: 56, 2: 57, 4: 59}
    assert outcome.rows == 61


def test_the_order_of_a_shuffle_does_not_show_in_the_files(tmp_path):
    """I4, I17: a task that runs again writes the same bytes, under a name of its own."""
    # As in a feed's first scan, where all rows have one timestamp and nothing else orders them.
    splits = [ListSplit(batches=[[(1, key, key)] for key in range(n, 60, 3)]) for n in range(3)]
    local = table(tmp_path)

    def written(seed: int) -> list[bytes]:
        reports = run(local, *splits, seed=seed).reports
        return sorted(Path(FileClosed.of(r).path).read_bytes() for r in reports)

    first = written(seed=1)
    assert first
    for seed in (2, 3, 4):
        assert written(seed=seed) == first


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_tables_are_kept_apart_in_a_shuffle(tmp_path, parallelism):
    """E1: one Spark job per epoch, whatever the number of tables."""
    locals_ = {name: table(tmp_path / name) for name in ("t", "u")}
    targets = {name: local.target() for name, local in locals_.items()}
    writer = locals_["t"].writer()
    writer = type(writer)(pipeline="p", epoch=1, run="g1.0", targets=targets)
    splits = [
        ListSplit(table=name, batches=[[(at, key, at + offset)]])
        for name, offset in (("t", 0), ("u", 1000))
        for at, key in ((1, 1), (2, 1), (3, 2), (4, 3))
    ]
    outcome = write_epoch(LocalSpark(parallelism), splits, writer, False, "x")
    for name, local in locals_.items():
        files = [FileClosed.of(report) for report in outcome.reports]
        local.commits.append([file for file in files if file.table == name])
    assert content(locals_["t"]) == {1: 2, 2: 3, 3: 4}
    assert content(locals_["u"]) == {1: 1002, 2: 1003, 3: 1004}


def test_a_table_with_a_single_split_needs_no_shuffle(tmp_path):
    """E1: a needless crossing is the most expensive step of a pipeline."""
    local = table(tmp_path)
    run(local, ListSplit(batches=[[(1, 1, 1)], [(2, 2, 2)]]))
    assert shards(local) == {"00000"}


def test_a_key_has_one_bucket_whatever_its_batch_holds():
    """I8, Mend h10: a null beside a whole number does not change where the number belongs."""
    for kind, value in ((pa.int64(), 2**60 + 1), (pa.bool_(), True), (pa.string(), "x")):
        alone = pa.table({"k": pa.array([value], kind)})
        beside = pa.table({"k": pa.array([value, None], kind)})
        found = [hashes_of(each, ["k"], 1 << 30)[0] for each in (alone, beside)]
        assert found[0] == found[1], kind


@pytest.mark.parametrize(
    ("kind", "early"),
    [(pa.date32(), -800_000), (pa.timestamp("us"), -(10**17)), (pa.timestamp("us", "UTC"), 10**18)],
    ids=str,
)
def test_a_key_may_be_a_day_or_moment_that_python_has_no_name_for(kind, early):
    """I8, P8: before the year 1 and after 9999; a null beside it does not change its bucket."""
    alone = pa.table({"k": pa.array([early], kind)})
    beside = pa.table({"k": pa.array([early, None, early + 1], kind)})
    found = [hashes_of(each, ["k"], 1 << 30) for each in (alone, beside)]
    assert found[0][0] == found[1][0] != found[1][2]


def test_rows_without_a_key_need_no_shuffle(tmp_path):
    """I8: nothing has to be brought together."""
    local = table(tmp_path, key=())
    run(local, ListSplit(batches=[[(1, 1, 1)]]), ListSplit(batches=[[(1, 1, 1)]]))
    assert shards(local) == {"00000", "00001"}
    assert len(local.rows()) == 2


def test_uuid_keys_are_brought_together(tmp_path):
    """I8: keys of every type are hashed."""
    schema = Schema(
        NestedField(1, "id", UUIDType(), required=True),
        NestedField(2, "value", LongType(), required=False),
    )
    local = LocalTable(folder=tmp_path, schema=schema, key=["id"])

    @dataclass(frozen=True)
    class UuidSplit(TableSplit):
        number: int
        table: str = "t"
        each_key_once: bool = False

        def read(self, schema_json, key, reads=None):
            plain = pa.array([bytes([n] * 16) for n in range(4)], pa.binary(16))
            rows = changes([(self.number, n, self.number) for n in range(4)])
            ids = pa.ExtensionArray.from_storage(pa.uuid(), plain)
            yield rows.set_column(rows.schema.get_field_index("id"), "id", ids)

        def learned(self):
            return None

    splits = [UuidSplit(1), UuidSplit(2)]
    outcome = write_epoch(LocalSpark(), splits, local.writer(), False, "x")
    local.commits.append([FileClosed.of(report) for report in outcome.reports])
    assert sorted(row["value"] for row in local.rows()) == [2, 2, 2, 2]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "error",
    [
        DataRejected("damaged", detail="Here.", hint="Restore it."),
        SourceUnavailable("gone for now"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_split_is_raised_as_it_was(tmp_path, error, count):
    """E12: a task that raised it would be retried for nothing and its message lost."""
    splits = [ListSplit(batches=[[(1, 1, 1)]], error=error)] * count
    with pytest.raises(type(error)) as caught:
        run(table(tmp_path), *splits)
    assert str(caught.value) == str(error)


def test_what_splits_have_seen_of_columns_is_held_against_each_other(tmp_path):
    """E11, Mend h2: before anything is committed; each of the splits is right by itself."""
    before = SeeingSplit(batches=[[(1, 1, 1)]], columns=Seen(first_with={"": 1}))
    after = SeeingSplit(batches=[[(2, 2, 2)]], columns=Seen(last_without={"": 2}))
    assert run(table(tmp_path / "one"), before, ListSplit()).rows == 1
    assert run(table(tmp_path / "other"), after, after).rows == 2
    with pytest.raises(SchemaRejected, match="t reads column a, which"):
        run(table(tmp_path / "both"), before, after)


def test_what_all_splits_find_lacking_is_raised_at_once(tmp_path):
    """I11: an epoch of many tables is not written again for each of their columns."""
    gap = SchemaGap("t", [Column(name="x", type=LongType())])
    missing = TablesUnready({"u": TableShape(columns=gap.columns, key=[])})
    splits = [ListSplit(batches=[[(1, 1, 1)]], error=error) for error in (gap, missing)]
    with pytest.raises(Unready) as caught:
        run(table(tmp_path), *splits)
    found = {str(lack) for lack in caught.value.lacks}
    assert found == {str(gap), str(missing)}


def test_what_all_splits_ask_for_is_raised_at_once_by_table(tmp_path):
    """P7: however many tables leave values out, an epoch is read once more and not for each."""

    def asks(table: str, column: str, *keys: int) -> ValuesNeeded:
        ids = pa.table({"id": pa.array(keys, pa.int64())})
        return ValuesNeeded(Need(table=table, keys=ids, columns=[column]))

    errors = asks("t", "b", 1, 2), asks("u", "x", 7), asks("t", "a", 3)
    splits = [ListSplit(batches=[[(1, 1, 1)]], error=error) for error in errors]
    with pytest.raises(ValuesNeeded) as caught:
        run(table(tmp_path), *splits, keyed=True)
    found = {n.table: (n.keys.column("id").to_pylist(), n.columns) for n in caught.value.needs}
    assert found == {"t": ([1, 2, 3], ["a", "b"]), "u": ([7], ["x"])}


def test_an_error_of_the_writer_is_raised_as_it_was(tmp_path):
    """I11: also when it is met behind the shuffle."""
    required = Schema(SCHEMA.fields[0], NestedField(2, "value", LongType(), required=True))
    local = LocalTable(folder=tmp_path, schema=required, key=["id"])
    rows = changes([(1, 1, 1)]).set_column(4, "value", pa.nulls(1, pa.int64()))

    @dataclass(frozen=True)
    class NullSplit(TableSplit):
        table: str = "t"
        each_key_once: bool = False

        def read(self, schema_json, key, reads=None):
            yield rows

        def learned(self):
            return None

    for splits in ([NullSplit()], [NullSplit(), NullSplit()]):
        with pytest.raises(Exception, match="column value is required"):
            write_epoch(LocalSpark(), splits, local.writer(), False, "x")


def test_an_epoch_without_splits_is_an_empty_outcome(tmp_path):
    """E9: an epoch with no change makes no snapshot."""
    outcome = run(table(tmp_path))
    assert (list(outcome.reports), outcome.rows, list(outcome.learned)) == ([], 0, [])


def test_a_task_that_is_not_done_is_noticed(tmp_path):
    """I3: a worker reports done for its share only after all its files are reported."""

    class Forgetful(LocalSpark):
        def range(self, start, end, step, slices):
            return super().range(start, end - 1, step, slices)

    splits = [ListSplit(batches=[[(1, 1, 1)]]), ListSplit(batches=[[(1, 2, 1)]])]
    with pytest.raises(Broken, match="every task of the epoch reports that it is done"):
        write_epoch(Forgetful(), splits, table(tmp_path).writer(), True, "x")


def test_arrow_has_nothing_to_say_about_where_spark_put_a_buffer(capfd):
    """U5, Mend f4: it grouped such columns with two lines on stderr for each batch."""
    somewhere = pa.py_buffer(b"..." + np.arange(100).tobytes()).slice(3)
    column = pa.Array.from_buffers(pa.int64(), 100, [None, somewhere])
    table = pa.table({"key": column, "value": column})
    assert table.group_by("key").aggregate([("value", "sum")]).num_rows == 100
    assert capfd.readouterr().err == ""


@dataclass(frozen=True)
class Square:
    number: int

    def run(self) -> int:
        if self.number < 0:
            raise DataRejected("negative")
        return self.number**2


def test_small_tasks_of_a_source_run_on_workers():
    """E4: files are indexed by all workers at once."""
    assert sorted(map_tasks(LocalSpark(), [Square(n) for n in range(9)])) == [
        n**2 for n in range(9)
    ]
    assert map_tasks(LocalSpark(), []) == []
    with pytest.raises(DataRejected, match="negative"):
        map_tasks(LocalSpark(), [Square(1), Square(-1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A writer of a transformed table that notes what it is given."""

    calls: list[tuple[str, list[int], bool]] = field(default_factory=list)
    selects: Sequence[TableSelect] = (
        TableSelect(table="t", source_json="", outputs=["id"], key=["id"], kinds=[LongType()]),
    )

    @property
    def inner(self) -> "Noted":
        return self

    def schema_json(self, table: str) -> str:
        return SCHEMA.model_dump_json()

    def write(self, table: str, shard: str, changes: pa.Table, once: bool) -> Iterator[str]:
        self.calls.append((shard, changes.column("id").to_pylist(), once))
        yield shard


def selected(*rows: tuple[int, int]) -> pa.RecordBatch:
    """Rows of a frame of changes as `(bucket, id)`; bucket zero is a report that passes by."""
    kind = pa.struct([("f0", pa.int64())])
    ids = pa.array([{"f0": key} if bucket else None for bucket, key in rows], kind)
    columns = {
        "kind": pa.array([None if bucket else REPORT for bucket, _ in rows], pa.string()),
        "bucket": pa.array([bucket for bucket, _ in rows], pa.int32()),
        "payload": pa.array([None if bucket else b"x" for bucket, _ in rows], pa.binary()),
        "op": pa.array([1] * len(rows), pa.int8()),
        "at": pa.array([0] * len(rows)),
        "seq": pa.array([0] * len(rows)),
        "t0": ids,
        "t1": ids,
    }
    return pa.record_batch(columns)


def test_selected_rows_are_written_by_bucket_and_in_parts_where_no_key_comes_twice(monkeypatch):
    """E11, E10: memory is bounded where that is safe; the names of files say nothing of chance."""
    monkeypatch.setattr(wide, "WRITE_BYTES", 1)  # real parts have hundreds of megabytes
    layout = WideFrame(
        tables=["t"],
        shared=frozenset(),
        start=10,
        width=4,
        once=frozenset([1]),
        schema=pa.schema([]),
    )
    batches = [selected((10, 1), (10, 2), (0, 0), (11, 3)), selected((11, 4), (12, 5)), selected()]
    writer = Noted()
    rows = list(write_wide(batches, writer, layout))
    assert writer.calls == [
        ("00000", [1, 2], False),
        ("00001.0", [3], True),
        ("00001.1", [4], True),
        ("00002", [5], False),
    ]
    assert [payload for _, _, payload in rows].count(b"x") == 1
    shared = Noted()
    list(write_wide(batches, shared, replace(layout, shared=frozenset(["t"]))))
    assert shared.calls == [
        ("b00010", [1, 2], False),
        ("b00011", [3, 4], False),
        ("b00012", [5], False),
    ]


def test_rows_go_to_the_buckets_that_were_counted_first(monkeypatch):
    """U7: executors may be lost between two steps of an epoch; each table keeps its own buckets."""

    class TakenError(Exception):
        """Carries the tasks to the test."""

    def taken(spark, tasks, *_):
        raise TakenError(tasks)

    # What follows needs Spark; the tasks alone are looked at.
    monkeypatch.setattr("icestream.worker.task_frame", taken)
    shares = Shares(starts={"t": 1, "u": 9}, each=8)
    selects = SimpleNamespace(spark=LocalSpark(parallelism=2), schema=lambda _: StructType())
    writer = SimpleNamespace(selects=[SimpleNamespace(table="t"), SimpleNamespace(table="u")])
    with pytest.raises(TakenError) as found:
        _through_spark(selects, [ListSplit(), ListSplit()], writer, shares, "x")
    wide = found.value.args[0][0].wide
    assert wide.start == 17 and wide.width >= 8


def test_tables_that_come_in_turn_are_each_written_once(monkeypatch):
    """E11, Mend h1: a key's changes are folded together, wherever they lie in their split."""
    layout = WideFrame(
        tables=["t", "u"],
        shared=frozenset(),
        start=10,
        width=4,
        once=frozenset([1]),
        schema=pa.schema([]),
    )
    writer = Noted(selects=[replace(Noted().selects[0], table=table) for table in ("t", "u")])
    in_turn = [selected((10, 1), (14, 2), (10, 3)), selected((14, 4), (0, 0), (11, 5), (15, 6))]
    list(write_wide(in_turn, writer, layout))
    assert writer.calls == [
        ("00000", [1, 3], False),
        ("00000", [2, 4], False),
        ("00001", [5], True),
        ("00001", [6], True),
    ]
    monkeypatch.setattr(wide, "WRITE_BYTES", 1)  # real parts have hundreds of megabytes
    in_parts = Noted(selects=writer.selects)
    list(write_wide([selected((11, 1), (15, 2)), selected((11, 3))], in_parts, layout))
    assert in_parts.calls == [
        ("00001.0", [1], True),
        ("00001.1", [2], True),
        ("00001.2", [3], True),
    ]
