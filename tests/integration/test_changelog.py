"""The changes between snapshots, one situation at a time; random ones are in the machine's test."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from py4j.clientserver import ClientServerConnection
from py4j.protocol import MEMORY_COMMAND_NAME
from pyspark.sql import DataFrame, SparkSession

from icestream.errors import ConfigInvalid, HistoryLost, RolledBack
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.handle import TableName
from icestream.iceberg.snapshots import History, Stage
from icestream.iceberg.table import Table
from icestream.sources.iceberg import changelog as changes
from icestream.sources.iceberg import rewritten
from icestream.sources.iceberg.changelog import Changelog, changelog
from tests.examples import with_more
from tests.integration.changelog_machine import opened
from tests.integration.equality_deletes import commit_by_hand
from tests.integration.hand_fed import HandFed, gone, put, shape
from tests.lake import Lake

Event = tuple[Any, ...]
VERSIONS = (2, 3)
MODES = ("copy-on-write", "merge-on-read")
TABLES = with_more(
    [(2, "copy-on-write"), (3, "merge-on-read")], [(2, "merge-on-read"), (3, "copy-on-write")]
)
# How rows that were carried over are found: row by row, or, where much was rewritten, by Spark's
# hashes of rows, or by those of plain files.
WAYS = ("rows", "hashes", "files")


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Take one of the ways in this test; returns a list that grows by each time files were used."""
    # These tables are tiny, and most of their rows change.
    monkeypatch.setattr(changes, "_LARGE_BYTES", changes._LARGE_BYTES if way == "rows" else 0)
    monkeypatch.setattr(rewritten, "_LEFT_MAX", 1.0 if way == "files" else -1.0)
    used: list[bool] = []

    def noted(*arguments: Any) -> Any:
        rows = rewritten.what_differs(*arguments)
        used.append(rows is not None)
        return rows

    # Both ways give the same rows, so that only this tells which one was taken.
    monkeypatch.setattr(changes, "what_differs", noted)
    return used


def _events(found: DataFrame) -> list[Event]:
    rows = found.collect()
    actions = {"DELETE": "DELETE", "UPDATE_BEFORE": None}
    assert all(row["bulk_action"] == actions.get(row["iceberg_operation"], "INDEX") for row in rows)
    events = [(each["iceberg_operation"], each["document_id"], *each["row"]) for each in rows]
    return sorted(events, key=repr)


class World:
    """One table at a time, in a catalog of a folder."""

    def __init__(self, lake: Lake, catalog: Catalog, folder: Path):
        self.lake = lake
        self.catalog = catalog
        self.folder = folder
        self.spark = lake.spark
        self.name = lake.table("db.t")

    def create(self, columns: str, version: int = 2, mode: str = MODES[0], by: str = "") -> None:
        """Make the table."""
        modes = ", ".join(f"'write.{verb}.mode'='{mode}'" for verb in ("delete", "update", "merge"))
        self.sql(
            f"CREATE TABLE {self.name} ({columns}) USING iceberg {by} "
            f"TBLPROPERTIES ('format-version'='{version}', {modes})"
        )

    def sql(self, text: str) -> None:
        """Run a statement; `t` after a blank stands for the table."""
        self.spark.sql(text.replace(" t ", f" {self.name} "))

    def insert(self, *rows: str) -> None:
        """Insert rows into one file."""
        values = ", ".join(f"({row})" for row in rows)
        self.sql(f"INSERT INTO t SELECT /*+ COALESCE(1) */ * FROM VALUES {values}")

    def call(self, procedure: str, options: str) -> None:
        """Call one of Iceberg's procedures."""
        self.sql(f"CALL {self.lake.name}.system.{procedure}(table => 'db.t', {options})")

    @property
    def table(self) -> Table:
        """The table as it is now."""
        found = self.catalog.load(TableName(namespace=("db",), name="t"))
        assert found is not None
        return found

    def ids(self) -> list[int]:
        """All snapshots in their order."""
        snapshots = sorted(self.table.java.snapshots(), key=lambda each: each.sequenceNumber())
        return [int(each.snapshotId()) for each in snapshots]

    def changes(self, *key: str, last: int = 1, net: bool = False) -> list[Event]:
        """What the last snapshots changed: operation, document id, then the row's values.

        What was before an update is left out; `updates` has it.
        """
        ids: list[int | None] = [None, *self.ids()]
        return self.between(ids[-1 - last], ids[-1] or 0, key, net)

    def updates(self, *key: str, last: int = 1) -> list[Event]:
        """All that the last snapshots changed together, with what was before updates."""
        ids: list[int | None] = [None, *self.ids()]
        found = changelog(self.spark, self.table, ids[-1 - last], ids[-1] or 0, key, net=last > 1)
        return _events(found)

    def documents(self, *key: str) -> list[Event]:
        """What the last snapshot changed, as the source has it."""
        log = Changelog(self.spark, self.table, key)
        older, newer = (log.history.snapshot(number) for number in self.ids()[-2:])
        assert newer is not None
        stage = Stage(self.table, newer.schema_id)
        found = log.changes(older, [newer], stage)
        events = _events(found) if found is not None else []
        stage.close()
        return events

    def between(
        self, start: int | None, end: int, key: Sequence[str] = (), net: bool = False
    ) -> list[Event]:
        """The same between two snapshots."""
        found = changelog(self.spark, self.table, start, end, key, net)
        return [event for event in _events(found) if event[0] != "UPDATE_BEFORE"]

    def files(self) -> list[Path]:
        """The data files that lie in the table's folder."""
        return sorted((self.folder / "db" / "t" / "data").rglob("*.parquet"))


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> Iterator[World]:
    """A catalog of its own."""
    lake, catalog = opened(spark, tmp_path)
    yield World(lake, catalog, tmp_path)
    catalog.close()


@pytest.mark.parametrize(("version", "mode"), TABLES)
def test_an_update_of_one_row_is_one_change(world: World, version: int, mode: str) -> None:
    """O3, O4, O5: not six of the file's three rows, in whatever way the table is written."""
    world.create("id BIGINT, s STRING, m MAP<STRING, INT>", version, mode)
    world.insert("1, 'a', map('k', 1)", "2, 'b', map('k', 1)", "3, 'c', map('k', 1)")
    world.sql("UPDATE t SET s = 'B' WHERE id = 2")
    assert world.changes("id") == [("UPDATE_AFTER", "2", 2, "B", {"k": 1})]
    if version == 2:
        whole = [("DELETE", None, 2, "b", {"k": 1}), ("INSERT", None, 2, "B", {"k": 1})]
    else:
        whole = [("UPDATE_AFTER", "1", 2, "B", {"k": 1})]
    assert world.changes() == whole
    world.sql("DELETE FROM t WHERE id = 2")
    assert world.changes("id") == [("DELETE", "2", 2, "B", {"k": 1})]
    # The file has a delete before this one.
    world.sql("DELETE FROM t WHERE id = 3")
    assert world.changes("id") == [("DELETE", "3", 3, "c", {"k": 1})]
    assert [event[0] for event in world.changes()] == ["DELETE"]
    assert world.changes("id", last=3, net=True) == [
        ("DELETE", "2", 2, "b", {"k": 1}),
        ("DELETE", "3", 3, "c", {"k": 1}),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_moves_to_another_partition_is_one_update(world: World, mode: str) -> None:
    """O3: it is gone from one file and comes in another."""
    world.create("id BIGINT, region STRING", mode=mode, by="PARTITIONED BY (region)")
    world.insert("1, 'eu'", "2, 'eu'")
    world.sql("UPDATE t SET region = 'us' WHERE id = 1")
    assert world.changes("id") == [("UPDATE_AFTER", "1", 1, "us")]


@pytest.mark.parametrize("mode", MODES)
def test_equal_rows_are_counted(world: World, mode: str) -> None:
    """O3: one of three more and two of three less are that many changes."""
    world.create("a INT, b STRING", mode=mode)
    world.insert("1, 'x'", "1, 'x'", "1, 'x'", "2, 'y'")
    world.sql("DELETE FROM t WHERE a = 1")
    assert world.changes() == [("DELETE", None, 1, "x")] * 3
    world.sql("INSERT OVERWRITE t SELECT * FROM VALUES (2, 'y'), (2, 'y'), (1, 'x')")
    assert world.changes() == [("INSERT", None, 1, "x"), ("INSERT", None, 2, "y")]


@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_moves_between_columns_is_a_change(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """O3: Spark's hashes pass over nulls, and the same values in other columns must differ."""
    take(way, monkeypatch)
    world.create("id BIGINT, a STRING, b STRING, c ARRAY<STRING>, d ARRAY<ARRAY<INT>>")
    arrays = "array('x'), array(array(1), array(2))"
    world.insert(f"1, NULL, 'x', {arrays}", f"2, NULL, 'x', {arrays}", f"3, NULL, 'x', {arrays}")
    world.sql("UPDATE t SET a = 'x', b = NULL WHERE id = 1")
    assert [event[:2] for event in world.changes("id")] == [("UPDATE_AFTER", "1")]
    assert [event[0] for event in world.changes()] == ["DELETE", "INSERT"]
    world.sql("UPDATE t SET c = array('x', NULL) WHERE id = 2")
    assert [event[:2] for event in world.changes("id")] == [("UPDATE_AFTER", "2")]
    world.sql("UPDATE t SET d = array(array(1, 2)) WHERE id = 3")
    assert [event[:2] for event in world.changes("id")] == [("UPDATE_AFTER", "3")]


ALL_TYPES = {
    "flag BOOLEAN": "true",
    "small INT": "7",
    "ratio DOUBLE": "double('NaN')",
    "price DECIMAL(38, 3)": "-1234567890.125",
    "day DATE": "DATE '2024-02-29'",
    "at TIMESTAMP": "TIMESTAMP '2024-02-29 01:02:03.123456Z'",
    "local TIMESTAMP_NTZ": "TIMESTAMP_NTZ '1969-12-31 23:59:59.999999'",
    "raw BINARY": "X'00ff'",
    "list ARRAY<STRING>": "array('a', NULL)",
    "pairs MAP<STRING, INT>": "map('k', 1)",
    "part STRUCT<a: INT, b: ARRAY<DOUBLE>>": "named_struct('a', 1, 'b', array(0.5))",
}


def test_plain_files_are_compared_on_workers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """O3: rows of every type come out of rewritten files as Iceberg's own reader gives them."""
    used = take("files", monkeypatch)
    world.create(f"id BIGINT, {', '.join(ALL_TYPES)}", by="PARTITIONED BY (bucket(2, id))")
    nulls = ", ".join(["NULL"] * len(ALL_TYPES))
    values = ", ".join(ALL_TYPES.values())
    world.insert(*(f"{n}, {values}" for n in range(20)), *(f"{n}, {nulls}" for n in range(20, 30)))
    world.sql("UPDATE t SET small = 8 WHERE id IN (3, 25)")
    # NaN is not equal to itself, so the rows are compared as text.
    expected = [
        ("UPDATE_AFTER", str(row["id"]), repr(tuple(row)))
        for row in world.spark.sql(f"SELECT * FROM {world.name} WHERE small = 8").collect()
    ]
    events = world.changes("id")
    assert sorted((*event[:2], repr(event[2:])) for event in events) == sorted(expected)
    assert len(expected) == 2
    world.sql("DELETE FROM t WHERE id = 4")
    assert [event[:2] for event in world.changes("id")] == [("DELETE", "4")]
    assert len(world.changes()) == 1
    assert used == [True] * 3


def test_files_that_are_not_plain_are_read_by_iceberg(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3, O7: deletes, defaults and files of another engine without field ids."""
    used = take("files", monkeypatch)
    world.create("id BIGINT, s STRING", mode=MODES[1])
    world.insert("1, 'a'", "2, 'b'", "3, 'c'")
    world.sql("DELETE FROM t WHERE id = 1")
    world.sql("ALTER TABLE t SET TBLPROPERTIES ('write.update.mode'='copy-on-write')")
    world.sql("UPDATE t SET s = 'B' WHERE id = 2")
    assert world.changes("id") == [("UPDATE_AFTER", "2", 2, "B")]
    assert used == []
    foreign = world.folder / "foreign"
    world.spark.sql("SELECT 4L AS id, 'd' AS s UNION ALL SELECT 5L, 'e'").coalesce(1).write.parquet(
        str(foreign)
    )
    world.call("add_files", f"source_table => '`parquet`.`{foreign}`'")
    world.sql("UPDATE t SET s = 'D' WHERE id = 4")
    assert world.changes("id") == [("UPDATE_AFTER", "4", 4, "D")]
    assert used == [False]


# Every way, every mode and every version, though not each with each.
SHARED_IDENTIFIERS = (
    ("rows", "copy-on-write", 2),
    ("hashes", "merge-on-read", 3),
    ("files", "copy-on-write", 3),
)


@pytest.mark.parametrize(("way", "mode", "version"), SHARED_IDENTIFIERS)
def test_a_row_that_shares_its_identifier_survives_the_other(
    world: World, version: int, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8, Mend g1: in the same file, in another one, step by step and net; the last one goes."""
    take(way, monkeypatch)
    share_an_identifier(world, version, mode)


@pytest.mark.long(kept_by="test_a_row_that_shares_its_identifier_survives_the_other")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_shares_its_identifier_survives_the_other_in_any_table(
    world: World, version: int, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8, Mend g1: every way, mode and version together."""
    take(way, monkeypatch)
    share_an_identifier(world, version, mode)


def share_an_identifier(world: World, version: int, mode: str) -> None:
    world.create("id BIGINT, s STRING", version, mode)
    world.insert("1, 'a'", "1, 'b'", "2, 'x'", "3, 'y'")
    world.insert("1, 'c'")
    world.sql("DELETE FROM t WHERE s IN ('a', 'x')")
    for net in (False, True):
        removed, kept = world.changes("id", net=net)
        assert removed == ("DELETE", "2", 2, "x")
        assert kept[:3] == ("UPDATE_AFTER", "1", 1) and kept[3] in ("b", "c")
    world.sql("DELETE FROM t WHERE s = 'b'")
    assert world.changes("id") == [("UPDATE_AFTER", "1", 1, "c")]
    assert world.changes("id", last=2, net=True) == [
        ("DELETE", "2", 2, "x"),
        ("UPDATE_AFTER", "1", 1, "c"),
    ]
    # By the identifier, all of its rows are gone.
    world.sql("DELETE FROM t WHERE id = 1")
    assert world.changes("id") == [("DELETE", "1", 1, "c")]
    assert world.changes("id", last=3, net=True)[0][:2] == ("DELETE", "1")


@pytest.mark.parametrize("mode", MODES)
def test_many_rows_that_share_their_identifiers(world: World, mode: str) -> None:
    """O8, Mend g1: more deleted than are named one by one to find their files."""
    world.create("id BIGINT, part STRING, s STRING", 2, mode)
    world.sql("INSERT INTO t SELECT id, if(id < 5, NULL, 'p'), 'a' FROM range(1000)")
    world.sql("INSERT INTO t SELECT id * 100, 'p', 'b' FROM range(100)")
    world.insert("2, NULL, 'b'")
    world.sql("DELETE FROM t WHERE s = 'a'")
    events = world.changes("id", "part")
    assert len(events) == 1000
    kept = sorted(event[1:] for event in events if event[0] == "UPDATE_AFTER")
    assert kept == sorted(
        [(f"{n}|p", n, "p", "b") for n in range(100, 1000, 100)] + [(r"2|\N", 2, None, "b")]
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_equality_deletes_by_the_identifier_read_no_data_file(world: World, version: int) -> None:
    """O4: it works although every older file is gone from the disk."""
    world.create("id BIGINT, s STRING", version)
    world.insert("1, 'a'", "2, 'b'", "3, 'c'")
    for file in world.files():
        file.unlink()
    commit_by_hand(world.table, [{1: 1}, {1: 2}], [{1: 2, 2: "B"}])
    assert world.documents("id") == [("DELETE", "1", 1, None), ("UPDATE_AFTER", "2", 2, "B")]


@pytest.mark.parametrize(("version", "last"), with_more([(2, 1), (3, 2)], [(2, 2), (3, 1)]))
def test_equality_deletes_tell_what_was_there(world: World, version: int, last: int) -> None:
    """O8, Mend g3: of keys that no row had they are no change, and a row that comes is new."""
    world.create("id BIGINT, s STRING", version)
    world.insert("1, 'a'", "2, 'b'", "3, 'c'")
    world.insert("4, 'd'")
    ids = [1, 2, 3, 7, 8]
    commit_by_hand(world.table, [{1: n} for n in ids], [{1: n, 2: "new"} for n in (2, 7)])
    new = [("INSERT", "4", 4, "d")] if last > 1 else []
    assert world.updates("id", last=last) == [
        ("DELETE", "1", 1, "a"),
        ("DELETE", "3", 3, "c"),
        *new,
        ("INSERT", "7", 7, "new"),
        ("UPDATE_AFTER", "2", 2, "new"),
        ("UPDATE_BEFORE", "2", 2, "b"),
    ]


@pytest.mark.parametrize(("version", "mode"), TABLES)
def test_an_update_tells_what_was_before(world: World, version: int, mode: str) -> None:
    """O8, Mend g3: by identifier and by row id; a row that shares its identifier comes after."""
    world.create("id BIGINT, s STRING", version, mode)
    world.insert("1, 'a'", "2, 'b'")
    world.insert("2, 'c'")
    world.sql("UPDATE t SET s = 'A' WHERE id = 1")
    updated = [("UPDATE_AFTER", "1", 1, "A"), ("UPDATE_BEFORE", "1", 1, "a")]
    assert world.updates("id") == updated
    by_row = [("UPDATE_AFTER", 1, "A"), ("UPDATE_BEFORE", 1, "a")]
    if version == 2:
        by_row = [("DELETE", 1, "a"), ("INSERT", 1, "A")]
    assert [(event[0], *event[2:]) for event in world.updates()] == by_row
    world.sql("DELETE FROM t WHERE s = 'b'")
    assert world.updates("id") == [("UPDATE_AFTER", "2", 2, "c"), ("UPDATE_BEFORE", "2", 2, "b")]


@pytest.mark.parametrize("way", WAYS)
def test_both_zeros_are_told_apart(world: World, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O3, Mend g6: rows are compared by their bits, at every depth and as identifiers."""
    take(way, monkeypatch)
    world.create("id BIGINT, d DOUBLE, n ARRAY<STRUCT<f: FLOAT>>")
    nested = "array(named_struct('f', CAST({}0.0 AS FLOAT)))"
    rows = [f"{n}, 0.0D, {nested.format('')}" for n in (1, 2)]
    world.insert(*rows, f"3, 1.0D, {nested.format('')}")
    world.sql("UPDATE t SET d = -0.0D WHERE id = 1")
    assert [(each[0], str(each[3])) for each in world.updates("id")] == [
        ("UPDATE_AFTER", "-0.0"),
        ("UPDATE_BEFORE", "0.0"),
    ]
    assert [event[:2] for event in world.changes()] == [("DELETE", None), ("INSERT", None)]
    by_zero = [event[:2] for event in world.changes("d")]
    assert by_zero == [("INSERT", "-0.0"), ("UPDATE_AFTER", "0.0")]
    negative = "array(named_struct('f', CAST('-0.0' AS FLOAT)))"
    world.sql(f"UPDATE t SET n = {negative} WHERE id = 2")
    assert [event[:2] for event in world.changes("id")] == [("UPDATE_AFTER", "2")]


def test_an_upsert_of_a_row_that_is_all_null_is_a_change(world: World) -> None:
    """O4: what the delete file does not say is no value that could cancel out the new row."""
    world.create("id BIGINT, s STRING")
    world.insert("1, 'a'")
    commit_by_hand(world.table, [{1: 7}, {1: 1}], [{1: 7, 2: None}, {1: 1, 2: None}])
    assert world.documents("id") == [
        ("UPDATE_AFTER", "1", 1, None),
        ("UPDATE_AFTER", "7", 7, None),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_equality_deletes_by_other_columns_are_looked_up(world: World, version: int) -> None:
    """O4: the ids of the rows that they took are found in the files."""
    world.create("id BIGINT, s STRING", version)
    world.insert("1, 'a'", "2, 'b'", "3, 'a'")
    world.insert("4, 'a'", "5, NULL")
    commit_by_hand(world.table, [{2: "a"}, {2: None}], [{1: 6, 2: "a"}])
    expected = [
        ("DELETE", "1", 1, "a"),
        ("DELETE", "3", 3, "a"),
        ("DELETE", "4", 4, "a"),
        ("DELETE", "5", 5, None),
        ("INSERT", "6", 6, "a"),
    ]
    assert world.changes("id") == expected
    assert [(each[0], *each[2:]) for each in world.changes()] == [
        (each[0], *each[2:]) for each in expected
    ]


def test_deletes_by_value_of_one_partition_leave_the_others(world: World) -> None:
    """O4: an id that lives in another partition than the delete file does is still there."""
    world.create("id BIGINT, region STRING", by="PARTITIONED BY (region)")
    world.insert("1, 'eu'", "2, 'us'")
    commit_by_hand(world.table, [{1: 1}, {1: 2}], partition="region=eu")
    assert world.changes("id") == [("DELETE", "1", 1, "eu")]


def test_what_the_sink_has_written_reads_back(world: World) -> None:
    """O4: upserts and deletes of icestream's own, read from the table they made."""
    properties = {"type": "hadoop", "warehouse": str(world.folder)}
    shapes = {"t": shape(["id"], id="long", s="string")}
    fed = HandFed(world.spark, properties, shapes, namespace="db")
    fed.commit({"t": [put(id=1, s="a"), put(id=2, s="b")]})
    fed.commit({"t": [put(id=2, s=None), gone(id=1), put(id=3, s="c"), put(id=3, s="d")]})
    changes = world.documents("id")
    assert [(each[1], *each[2:]) for each in changes] == [
        ("1", 1, None),
        ("2", 2, None),
        ("3", 3, "d"),
    ]
    assert [each[0] == "DELETE" for each in changes] == [True, False, False]
    assert world.updates("id") == [
        ("DELETE", "1", 1, "a"),
        ("INSERT", "3", 3, "d"),
        ("UPDATE_AFTER", "2", 2, None),
        ("UPDATE_BEFORE", "2", 2, "b"),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_maintenance_changes_nothing(world: World, version: int) -> None:
    """O6: compaction of data and of deletes, alone, in between, and net over both."""
    world.create("id BIGINT, s STRING", version, MODES[1])
    world.insert("1, 'a'", "2, 'b'", "3, 'c'")
    world.sql("DELETE FROM t WHERE id = 1")
    everything = "options => map('rewrite-all', 'true')"
    world.call("rewrite_data_files", everything)
    assert world.changes("id") == world.changes() == world.changes("id", net=True) == []
    world.sql("DELETE FROM t WHERE id = 2")
    world.call("rewrite_position_delete_files", everything)
    ids = world.ids()
    assert world.between(ids[2], ids[-1], ["id"], net=True) == [("DELETE", "2", 2, "b")]
    both = [("DELETE", "1", 1, "a"), ("DELETE", "2", 2, "b")]
    assert world.between(ids[0], ids[-1], ["id"]) == both


def test_a_compaction_below_newer_deletes_is_no_change(world: World) -> None:
    """O6: the file that it wrote is older than the deletes over it."""
    world.create("id BIGINT, s STRING")
    world.insert("1, 'a'", "2, 'b'")
    commit_by_hand(world.table, [{1: 1}])
    world.call("rewrite_data_files", "options => map('rewrite-all', 'true')")
    assert world.changes("id", net=True) == []
    assert world.changes(net=True) == []
    assert world.changes("id", last=2, net=True) == [("DELETE", "1", 1, "a")]


@pytest.mark.parametrize(
    ("mode", "way"),
    with_more(
        [(MODES[0], "rows"), (MODES[1], "hashes"), (MODES[0], "files")],
        [(MODES[1], "rows"), (MODES[0], "hashes"), (MODES[1], "files")],
    ),
)
def test_columns_are_followed_by_their_ids(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str, way: str
) -> None:
    """O7: added, renamed, widened, reordered, dropped and put back under another type."""
    take(way, monkeypatch)
    world.create("id INT, a INT, gone STRING", mode=mode)
    world.insert("1, 10, 'x'", "2, 20, 'y'", "3, 30, 'z'")
    for change in (
        "ADD COLUMN more STRING",
        "RENAME COLUMN a TO b",
        "ALTER COLUMN b TYPE BIGINT",
        "RENAME COLUMN id TO number",
        "ALTER COLUMN more FIRST",
        "DROP COLUMN gone",
        "ADD COLUMN gone INT",
    ):
        world.sql(f"ALTER TABLE t {change}")
    world.sql("UPDATE t SET b = 20000000000 WHERE number = 2")
    assert world.changes("number") == [("UPDATE_AFTER", "2", None, 2, 20_000_000_000, None)]
    assert world.changes("number", last=2, net=True) == [
        ("INSERT", "1", None, 1, 10, None),
        ("INSERT", "2", None, 2, 20_000_000_000, None),
        ("INSERT", "3", None, 3, 30, None),
    ]
    assert len(world.changes("number", last=2)) == 4
    with pytest.raises(ConfigInvalid, match="has no column id"):
        world.changes("id")


def test_an_identifier_that_came_later_is_refused_for_what_was_before(world: World) -> None:
    """O9: rows without it cannot be told apart; snapshots that have it can be read."""
    world.create("a INT")
    world.insert("1")
    world.sql("ALTER TABLE t ADD COLUMN id INT")
    world.insert("2, 2")
    first, second = world.ids()
    assert world.between(first, second, ["id"]) == [("INSERT", "2", 2, 2)]
    with pytest.raises(ConfigInvalid, match="cannot be told apart"):
        world.between(None, first, ["id"])


def test_several_identifier_columns_do_not_run_into_one_another(world: World) -> None:
    """O9: whatever they hold, nulls among it."""
    world.create("a STRING, b STRING, v INT")
    keys = [("x|", "y"), ("x", "|y"), ("x\\", "|y"), ("x\\|", "y"), ("", ""), ("\\N", "y")]
    nulls = [(None, "y"), ("y", None), (None, None)]

    def text(value: str | None) -> str:
        return "NULL" if value is None else "'" + value.replace("\\", "\\\\") + "'"

    world.insert(*(f"{text(a)}, {text(b)}, 1" for a, b in [*keys, *nulls]))
    events = world.changes("a", "b")
    assert {(each[2], each[3]) for each in events} == {*keys, *nulls}
    assert len({each[1] for each in events}) == len(keys) + len(nulls)
    assert None not in {each[1] for each in events}
    world.sql("UPDATE t SET v = 2 WHERE a IS NULL AND b = 'y'")
    assert [each[0] for each in world.changes("a", "b")] == ["UPDATE_AFTER"]


def test_what_cannot_be_asked_is_refused(world: World) -> None:
    """O6, O9: snapshots that are not there or not on the way, columns, old formats."""
    world.create("id BIGINT")
    world.insert("1")
    world.insert("2")
    world.insert("3")
    first, second, third = world.ids()
    for start, end in ((third, second), (first, 42), (None, 42), (42, third)):
        with pytest.raises(ConfigInvalid):
            world.between(start, end)
    assert world.between(third, third) == []
    with pytest.raises(ConfigInvalid, match="has no column nope"):
        world.between(first, second, ["nope"])
    world.call("expire_snapshots", f"snapshot_ids => array({first})")
    for start in (first, None):
        with pytest.raises(ConfigInvalid):
            world.between(start, third)
    assert world.between(second, third) == [("INSERT", None, 3)]
    world.sql("DROP TABLE t ")
    world.create("id BIGINT", version=1)
    with pytest.raises(ConfigInvalid, match="format version 1"):
        History(world.table)


def test_a_history_that_was_rolled_back_or_expired_is_told(world: World) -> None:
    """O6, E7, E8: from the sequence number that was read last."""
    world.create("id BIGINT")
    for number in range(4):
        world.insert(str(number))
    ids = world.ids()
    history = History(world.table)
    assert [each.id for each in history.since("main", 1)] == ids[1:]
    assert history.since("main", 4) == []
    assert history.at("main", 2).id == ids[1]
    world.call("rollback_to_snapshot", f"snapshot_id => {ids[1]}")
    world.insert("9")
    with pytest.raises(RolledBack):
        history.since("main", 4)
    with pytest.raises(RolledBack):
        history.since("main", 3)
    assert [each.id for each in history.since("main", 2)] == [world.ids()[-1]]
    assert world.between(ids[1], world.ids()[-1]) == [("INSERT", None, 9)]
    world.call("expire_snapshots", f"snapshot_ids => array({ids[0]})")
    with pytest.raises(HistoryLost):
        history.since("main", 1)


def test_the_way_to_a_snapshot_that_was_rolled_back_is_told(world: World) -> None:
    """O6, E7, Mend g5: an epoch was planned up to a snapshot that has left the branch since."""
    world.create("id BIGINT")
    for number in range(4):
        world.insert(str(number))
    history, ids = History(world.table), world.ids()
    older, newer = history.path("main", 1, 3)
    assert (older.id if older else None, [each.id for each in newer]) == (ids[0], ids[1:3])
    assert [each.id for each in history.path("main", None, 2)[1]] == ids[:2]
    world.call("rollback_to_snapshot", f"snapshot_id => {ids[1]}")
    assert [each.id for each in history.path("main", 1, 2)[1]] == [ids[1]]
    for start in (None, 1, 2):
        with pytest.raises(RolledBack):
            history.path("main", start, 3)


def test_a_long_history_is_listed_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2, Mend g5: looking for what is new asks the JVM as often, however many snapshots wait."""
    world.create("id BIGINT")
    asked = 0
    send = ClientServerConnection.send_command

    def counted(connection: ClientServerConnection, command: str) -> str:
        nonlocal asked
        # Python lets go of the JVM's objects when it likes.
        asked += not command.startswith(MEMORY_COMMAND_NAME)
        return str(send(connection, command))

    def calls(snapshots: int) -> int:
        nonlocal asked
        for _ in range(snapshots):
            world.table.java.newAppend().commit()
        history, before = History(world.table), asked
        assert len(history.since("main", None)) == history.head("main").sequence_number
        assert len(history.path("main", 1, 4)[1]) == 3
        return asked - before

    monkeypatch.setattr(ClientServerConnection, "send_command", counted)  # it counts, and sends
    few = calls(5)
    assert calls(40) <= few


def test_a_gap_in_the_history_is_no_rollback(world: World) -> None:
    """O6, E8: the snapshot that was read last is still kept, but one after it is not."""
    world.create("id BIGINT")
    for number in range(3):
        world.insert(str(number))
    world.call("expire_snapshots", f"snapshot_ids => array({world.ids()[1]})")
    with pytest.raises(HistoryLost):
        History(world.table).since("main", 1)


@pytest.mark.parametrize("count", with_more([300], [2000]))
def test_a_snapshot_of_many_files(world: World, count: int) -> None:
    """O2: files are picked inside the JVM and read together."""
    world.create("id BIGINT, s STRING")
    _append_small_files(world, count)
    events = world.changes("id")
    assert {event[2] for event in events} == set(range(count))
    assert len(events) == count
    world.sql(f"DELETE FROM t WHERE id >= {count - 3}")
    assert [event[2] for event in world.changes("id")] == [count - 3, count - 2, count - 1]


def _append_small_files(world: World, count: int) -> None:
    commit_by_hand(world.table, [], [{1: n, 2: "x"} for n in range(count)], files=count)


def test_names_of_columns_may_be_anything(world: World) -> None:
    """O7: those that Spark, Iceberg or the changelog use themselves among them."""
    names = ["row", "key", "document_id", "a.b", "C d", "q`t", "c1", "hash", "H1", '"x"']
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    world.create(", ".join(f"{name} INT" for name in quoted))
    world.insert(", ".join("1" for _ in names), ", ".join("2" for _ in names))
    world.sql("UPDATE t SET `a.b` = 3 WHERE `key` = 2")
    found = changelog(world.spark, world.table, world.ids()[0], world.ids()[1], ["a.b", "q`t"])
    events = {each["document_id"]: each for each in found.collect()}
    assert {key: each["iceberg_operation"] for key, each in events.items()} == {
        "2|2": "DELETE",
        "3|2": "INSERT",
    }
    assert events["3|2"]["row"].__fields__ == names


def test_columns_may_bear_the_names_of_marks(world: World) -> None:
    """O7: Spark can write such a table anew, if not update it."""
    world.create("`_pos` INT, `_file` STRING, `_deleted` BOOLEAN")
    world.insert("1, 'a', true", "2, 'b', true")
    world.sql("INSERT OVERWRITE t SELECT * FROM VALUES (2, 'b', true), (1, 'a', false)")
    assert world.changes("_pos") == [("UPDATE_AFTER", "1", 1, "a", False)]


def test_types_that_spark_lacks_are_left_out_and_refused_as_identifiers(world: World) -> None:
    """O7, O9: uuid and fixed are read as text and bytes, a time is not there at all."""
    types = world.spark._jvm.org.apache.iceberg.types.Types
    world.create("id BIGINT")
    update = world.table.java.updateSchema()
    update.addColumn("u", types.UUIDType.get())
    update.addColumn("f", types.FixedType.ofLength(2))
    update.addColumn("t", types.TimeType.get())
    update.commit()
    commit_by_hand(world.table, [], [{1: 1}])
    assert world.changes("id") == [("INSERT", "1", 1, None, None)]
    assert len(world.changes("u")) == 1
    with pytest.raises(ConfigInvalid, match="cannot be told apart"):
        world.changes("t")


def test_types_and_defaults_of_version_three(world: World) -> None:
    """O5, O7: variants are compared; a default value is that of rows from before."""
    world.create("id BIGINT, v VARIANT", 3)
    world.insert("1, parse_json('{\"a\": 1}')", "2, parse_json('{\"a\": 1}')")
    iceberg = world.spark._jvm.org.apache.iceberg
    update = world.table.java.updateSchema()
    seven = iceberg.expressions.Expressions.lit(7)
    update.addColumn("n", iceberg.types.Types.IntegerType.get(), None, seven)
    update.commit()
    world.sql("UPDATE t SET v = parse_json('{\"a\": 2}') WHERE id = 2")
    assert [(*each[:3], each[4]) for each in world.changes("id")] == [("UPDATE_AFTER", "2", 2, 7)]
    assert [(*each[:3], each[4]) for each in world.changes()] == [("UPDATE_AFTER", "1", 2, 7)]
    commit_by_hand(world.table, [{1: 1}])
    assert world.documents("id") == [("DELETE", "1", 1, None, None)]


@pytest.mark.parametrize("mode", MODES)
def test_a_table_upgraded_to_version_three_goes_on(world: World, mode: str) -> None:
    """O5: its rows have no ids before the first snapshot after the upgrade."""
    world.create("id BIGINT, s STRING", 2, mode)
    world.insert("1, 'a'", "2, 'b'", "2, 'b'", "3, 'c'")
    world.sql("ALTER TABLE t SET TBLPROPERTIES ('format-version'='3')")
    world.sql("DELETE FROM t WHERE id = 2")
    assert world.changes() == [("DELETE", None, 2, "b")] * 2
    world.sql("UPDATE t SET s = 'C' WHERE id = 3")
    (event,) = world.changes()
    assert (event[0], *event[2:]) == ("UPDATE_AFTER", 3, "C")
    assert event[1] is not None
    world.sql("UPDATE t SET s = 'A' WHERE id = 2 ")
    assert world.changes() == []
    assert world.changes("id", last=3, net=True) == [
        ("DELETE", "2", 2, "b"),
        ("UPDATE_AFTER", "3", 3, "C"),
    ]


def test_a_partition_column_that_was_dropped_later(world: World) -> None:
    """O7: files of that time are read by the spec they were written with."""
    world.create("id BIGINT, region STRING", by="PARTITIONED BY (region)")
    world.insert("1, 'eu'", "2, 'us'")
    world.sql("ALTER TABLE t DROP PARTITION FIELD region")
    world.sql("ALTER TABLE t DROP COLUMN region")
    world.sql("DELETE FROM t WHERE id = 1")
    assert world.changes("id") == [("DELETE", "1", 1)]
    assert [each[:3] for each in world.between(None, world.ids()[0], ["id"])] == [
        ("INSERT", "1", 1),
        ("INSERT", "2", 2),
    ]
