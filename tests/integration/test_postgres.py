"""Copies and changes of a real PostgreSQL come into the lake whole, once, and in order."""

import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from icestream import failpoints
from icestream.errors import DataRejected, SchemaRejected
from icestream.failpoints import FailpointError
from icestream.sources.postgres import segments, stream
from icestream.sources.postgres.connection import Connection
from icestream.sources.postgres.copies import Copies
from icestream.sources.postgres.framing import State
from tests.integration.postgres_world import Load, Published, World, lsn, session
from tests.servers import wait_until

ITEM, PART = "id, amount, note", "code, number, note"
BOTH = ["public.item", "public.part"]
# Rounds of a few pages, so that a small table takes several.
SMALL_ROUNDS = {"epoch_bytes_max": 16 * 8192}


def loaded(world: World, seed: int, rows: int) -> Load:
    """A load over two tables that are there already."""
    load = Load(session(world.dsn), random.Random(seed), rows)
    load.create()
    return load


def assert_as_of(world: World, load: Load, table: str, snapshot: Published) -> None:
    """The table as of a snapshot is the database's at the snapshot's position."""
    columns = ITEM if table == "item" else PART
    rows = set(world.lake_rows(table, columns, snapshot.snapshot_id))
    states = [
        set((noted.items if table == "item" else noted.parts).values())
        for noted in load.possible(snapshot.lsn)
    ]
    assert rows in states, f"{table} at {snapshot}: {[len(rows ^ s) for s in states]} rows differ"


@pytest.mark.spark_jobs
def test_copy_and_stream_under_load_equal_the_database_at_every_position(world: World):
    """P1 P2 P4 P5: changes go on during the copy; each snapshot is a state the database had."""
    load = loaded(world, 1, 1500)
    options = {"chunk_pages": 4, "cadence": SMALL_ROUNDS}
    with load.running(), world.following(BOTH, **options) as following:
        following.wait_copied()
        for _ in range(4):
            following.wait_past("public.item", load.noted[-1].after)
    world.run(BOTH, **options)
    assert len(load.noted) > 20
    world.assert_equal("item", ITEM)
    world.assert_equal("part", PART)
    assert sum(not each.copied for each in world.snapshots("item")) >= 2
    for table in ("item", "part"):
        published = [each for each in world.snapshots(table) if each.copied]
        for snapshot in published[1:5]:
            assert_as_of(world, load, table, snapshot)


def interrupted_copy(world: World, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a copy of many rounds and end the run after the second of them."""
    # The run must end in the middle, and those after it must not.
    with monkeypatch.context() as patch:
        # Passes are counted for the life of a process, and other tests have run in it.
        patch.setattr(failpoints, "_passes", {})
        patch.setenv("ICESTREAM_FAILPOINTS", "after-commit=error@2")
        with pytest.raises(FailpointError):
            world.run(BOTH, chunk_pages=1, cadence={"epoch_bytes_max": 8 * 8192})
    # Rows move to other pages, behind and ahead of what was copied.
    load.db.run("update item set note = note || '!' where id % 3 = 0")
    load.db.run("delete from item where id % 10 = 1")
    load.db.run("vacuum item")
    load.db.run("insert into item select g, 1, 'late' from generate_series(50001, 50100) g")
    load.db.run("update part set number = number + 100000 where number % 5 = 0")
    load.items = {row[0]: tuple(row) for row in load.db.run(f"select {ITEM} from item")}
    load.parts = {(row[0], row[1]): tuple(row) for row in load.db.run(f"select {PART} from part")}


def test_copy_that_was_ended_in_the_middle_goes_on_without_loss_or_duplicate(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P3: changes meanwhile and during the rest reach copied rows and others alike."""
    load = loaded(world, 2, 1500)
    interrupted_copy(world, load, monkeypatch)
    before = len(world.snapshots("item")) + len(world.snapshots("part"))
    options = {"chunk_pages": 3, "cadence": {"epoch_bytes_max": 32 * 8192}}
    with load.running(), world.following(BOTH, **options) as following:
        following.wait_copied()
    world.run(BOTH, **options)
    world.assert_equal("item", ITEM)
    world.assert_equal("part", PART)
    assert before == 2


def change_behind_snapshots(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows change between the snapshot of each later round and its mark in the log."""
    begin = Copies._begin_later

    def begin_and_change(self, at, table):  # type: ignore[no-untyped-def]
        mark = self._run.server.mark

        def after_changes() -> int:
            load.db.run("delete from item where id % 7 = 0 or id = (select max(id) from item)")
            load.db.run("update part set note = note || '+'")
            return mark()

        self._run.server.mark = after_changes
        try:
            return begin(self, at, table)
        finally:
            self._run.server.mark = mark

    # The changes must come after the snapshot and before the mark: no client can aim at that.
    monkeypatch.setattr(Copies, "_begin_later", begin_and_change)


def test_later_rounds_leave_out_what_the_stream_has_changed_since(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P3: changes between a round's snapshot and its mark are the newer ones."""
    load = loaded(world, 3, 1500)
    interrupted_copy(world, load, monkeypatch)
    change_behind_snapshots(load, monkeypatch)
    world.run(BOTH)
    world.assert_equal("item", ITEM)
    rows = world.assert_equal("part", PART)
    assert all(row[2].endswith("++") for row in rows)


def test_without_the_rule_of_touched_keys_later_rounds_undo_changes(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P3: the rule is needed: without it a later round brings back what was changed since."""
    load = loaded(world, 3, 1500)
    interrupted_copy(world, load, monkeypatch)
    change_behind_snapshots(load, monkeypatch)
    # A rule that no option switches off, taken out to show that it is needed.
    monkeypatch.setattr(Copies, "_touched", lambda *_: None)
    world.run(BOTH)
    with pytest.raises(AssertionError, match="only in the lake"):
        world.assert_equal("part", PART)


def test_copy_lets_go_when_someone_waits_for_its_lock(
    world: World, caplog: pytest.LogCaptureFixture
):
    """P3: a command that must have the table alone gets it, and the copy goes on behind it."""
    load = loaded(world, 8, 500)
    pipeline = world.open(world.document(BOTH, chunk_pages=4, cadence=SMALL_ROUNDS))
    write, written = pipeline._write_epoch, []
    other = session(world.dsn)
    command = threading.Thread(
        target=other.run, args=("alter table item add column extra int default 7",), daemon=True
    )

    def write_behind(splits, *rest):  # type: ignore[no-untyped-def]
        if any(split.table == "public.item" for split in splits) and command.ident is None:
            command.start()
            waiting = "select from pg_locks where not granted and relation = 'item'::regclass"
            wait_until(lambda: len(world.sql(waiting)) > 0, 60, "the command waits")
        written.append(len(splits))
        return write(splits, *rest)

    # The command must come between two rounds: no client can aim at that.
    pipeline._write_epoch = write_behind
    with load.running():
        pipeline.run(once=True)
    command.join(60)
    assert not command.is_alive()
    assert "someone waits for a lock on table public.item" in caplog.text
    world.run(BOTH)
    world.assert_equal("item", f"{ITEM}, extra")
    world.assert_equal("part", PART)


def test_single_run_ends_although_changes_go_on(world: World):
    """U2 P4: it takes what was there when it began; what comes meanwhile may wait."""
    load = loaded(world, 9, 200)
    with load.running():
        for _ in range(2):
            begun = load.noted[-1]
            world.run(BOTH)
            written = len(load.noted)
            # Whatever the run took, the load was not through when it ended.
            wait_until(lambda count=written: len(load.noted) > count + 3, 60, "more changes")
            for table in ("item", "part"):
                last = world.snapshots(table)[-1]
                assert_as_of(world, load, table, last)
            newest = max(world.snapshots(table)[-1].lsn for table in ("item", "part"))
            assert newest >= begun.after
    world.run(BOTH)
    world.assert_equal("item", ITEM)
    world.assert_equal("part", PART)


# --- tables come and go -----------------------------------------------------------------------


def test_table_added_later_is_copied_while_the_others_go_on(world: World):
    """P9: the copy of an added table and the changes of both end up right, under load."""
    load = loaded(world, 4, 800)
    with load.running():
        world.run(["public.item"])
        with world.following(BOTH, chunk_pages=4, cadence=SMALL_ROUNDS) as following:
            following.wait_copied()
            following.wait_past("public.item", load.noted[-1].after)
    world.run(BOTH)
    world.assert_equal("item", ITEM)
    world.assert_equal("part", PART)


def test_table_that_was_away_comes_back_as_it_is_now(world: World):
    """P9 P3: what was changed and deleted while the table was not in the configuration is seen."""
    load = loaded(world, 5, 200)
    world.run(BOTH)
    load.db.run("update item set note = 'changed' where id = 1")
    alone = world.run(["public.item"])
    # It is not counted among the tables that are yet to be copied.
    tables: Any = alone.health.to_json()["tables"]
    assert "to copy" not in tables["public.item"]["position"]
    load.db.run("delete from part where number % 2 = 0")
    load.db.run("update part set note = 'changed' where number % 3 = 0")
    load.db.run("insert into part values ('new', 1, 'row')")
    load.db.run("update item set note = 'other' where id < 10")
    world.run(["public.item"])
    world.run(BOTH)
    world.assert_equal("part", PART)
    load.db.run("update part set note = 'after'")
    world.run(BOTH)
    world.assert_equal("part", PART)
    world.assert_equal("item", ITEM)


def test_iceberg_table_that_someone_dropped_is_copied_anew(world: World):
    """P3 P9: the lake's table is gone; its rows come again, the other table's do not."""
    load = loaded(world, 6, 200)
    world.run(BOTH)
    snapshots = len(world.snapshots("item"))
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.part')} PURGE")
    load.db.run("delete from part where number % 2 = 0")
    world.run(BOTH)
    world.assert_equal("part", PART)
    world.assert_equal("item", ITEM)
    assert len(world.snapshots("item")) == snapshots


def test_iceberg_table_that_committed_last_is_dropped(world: World):
    """P3 P9 E7: it alone knew how far the pipeline was; the others lack nothing and go on."""
    load = loaded(world, 7, 200)
    # No heartbeat tells the other table.
    never = {"cadence": {"heartbeat_interval": 0}}
    world.run(BOTH, **never)
    load.db.run("update part set note = 'only here'")
    with world.following(BOTH, **never) as following:
        known = lsn(world.slot_row("confirmed_flush_lsn::text"))
        wait_until(
            lambda: lsn(world.slot_row("confirmed_flush_lsn::text")) > known, 60, "the slot moves"
        )
        following.raise_error()
    confirmed = lsn(world.slot_row("confirmed_flush_lsn::text"))
    assert world.snapshots("item")[-1].lsn < confirmed <= world.snapshots("part")[-1].lsn
    snapshots = len(world.snapshots("item"))
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.part')} PURGE")
    load.db.run("delete from part where number % 2 = 0")
    world.run(BOTH, **never)
    world.assert_equal("part", PART)
    world.assert_equal("item", ITEM)
    assert len(world.snapshots("item")) == snapshots
    load.db.run("update item set note = 'after'")
    load.db.run("update part set note = 'after'")
    world.run(BOTH, **never)
    world.assert_equal("part", PART)
    world.assert_equal("item", ITEM)


def test_iceberg_table_that_shared_the_last_epoch_is_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """E4, Mend c2: the epoch counts as whole, the dropped table is copied, the other goes on."""
    load = loaded(world, 8, 200)
    never = {"cadence": {"heartbeat_interval": 0}}
    world.run(BOTH, **never)
    load.db.run("begin")
    load.db.run("update part set note = 'both'")
    load.db.run("update item set note = 'both'")
    load.db.run("commit")
    with world.following(BOTH, **never) as following:
        confirmed = lsn(world.slot_row("confirmed_flush_lsn::text"))
        following.wait_past("public.part", world.snapshots("part")[-1].lsn)
        wait_until(
            lambda: lsn(world.slot_row("confirmed_flush_lsn::text")) > confirmed,
            60,
            "the slot moves",
        )
        following.raise_error()
    assert world.snapshots("item")[-1].lsn == world.snapshots("part")[-1].lsn
    snapshots = len(world.snapshots("item"))
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.part')} PURGE")
    load.db.run("delete from part where number % 2 = 0")
    # The first start makes the table and is cut short before it is filled.
    # Passes of earlier runs in this process do not count.
    monkeypatch.setattr("icestream.failpoints._passes", {})
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", "before-write=error")
    with pytest.raises(FailpointError):
        world.run(BOTH, **never)
    monkeypatch.delenv("ICESTREAM_FAILPOINTS")  # This start goes through.
    world.run(BOTH, **never)
    world.assert_equal("part", PART)
    world.assert_equal("item", ITEM)
    assert world.snapshots("item")[-1].lsn == world.snapshots("item")[snapshots - 1].lsn
    for table in ("part", "item"):
        world.spark.sql(f"DROP TABLE {world.lake.table('shop.' + table)} PURGE")
    load.db.run("update item set note = 'all were dropped'")
    world.run(BOTH, **never)
    world.assert_equal("part", PART)
    world.assert_equal("item", ITEM)


# --- kinds of changes -------------------------------------------------------------------------


def test_truncate_removes_what_came_before_it_and_nothing_else(world: World):
    """P7: alone, between inserts of its transaction, and of two tables at once."""
    for name in ("alone", "between", "two", "three"):
        world.sql(
            f"create table {name}(id int primary key, v text)",
            f"insert into {name} select g, 'old' from generate_series(1, 20) g",
        )
    names = ["alone", "between", "two", "three"]
    world.run(["public.*"])
    world.sql("update alone set v = 'gone'", "truncate alone")
    world.transaction(
        "insert into between values (100, 'before')",
        "truncate between",
        "insert into between values (101, 'after')",
    )
    world.transaction("insert into two values (100, 'before')", "truncate two, three")
    world.sql("insert into three values (5, 'new')")
    world.run(["public.*"])
    rows = {name: world.assert_equal(name, "id, v") for name in names}
    assert rows == {"alone": [], "between": [(101, "after")], "two": [], "three": [(5, "new")]}


TOASTED = "id, n, md5(big), md5(other)"


def toasted(world: World, name: str, identity: str) -> None:
    """A table with values that are stored apart and not sent again when they did not change."""
    world.sql(
        f"create table {name}(id int primary key, code text not null unique, n int, big text, "
        "other text)",
        f"alter table {name} alter big set storage external, alter other set storage external",
        f"insert into {name} select g, 'k' || g, g, repeat(chr(96 + g), 9000), "
        "repeat(chr(64 + g), 9000) from generate_series(1, 20) g",
        f"alter table {name} replica identity {identity}",
    )


@pytest.mark.spark_jobs
def test_values_that_were_not_sent_are_kept(world: World):
    """P7: unchanged TOAST under every replica identity, after key changes, twice in one epoch."""
    toasted(world, "plain", "default")
    toasted(world, "entire", "full")
    toasted(world, "indexed", "using index indexed_code_key")
    world.run(["public.*"])
    for name in ("plain", "entire", "indexed"):
        world.sql(
            f"update {name} set n = n + 100 where id <= 10",
            f"update {name} set n = n + 1000 where id <= 5",
            f"update {name} set id = id + 500, code = code || 'x' where id in (3, 4, 15)",
            f"update {name} set n = 7 where id in (503, 515)",
            f"update {name} set id = id + 500, code = code || 'y' where id = 503",
            f"update {name} set big = repeat('z', 9100) where id = 6",
            f"update {name} set n = 8 where id = 6",
            f"update {name} set other = null where id = 7",
            f"update {name} set n = 9 where id = 7",
            f"delete from {name} where id = 8",
            f"insert into {name} values (8, 'k8', 1, repeat('new', 4000), null)",
            f"update {name} set n = 2 where id = 8",
            f"insert into {name} values (30, 'k30', 1, repeat('q', 9000), repeat('r', 9000))",
            f"update {name} set id = 31, code = 'k31' where id = 30",
            # A key that another row had a moment ago.
            f"update {name} set id = 3, code = 'k3' where id = 12",
        )
    world.run(["public.*"])
    for name in ("plain", "entire", "indexed"):
        world.assert_equal(name, TOASTED)
        world.sql(f"update {name} set n = -1")
    world.run(["public.*"])
    for name in ("plain", "entire", "indexed"):
        world.assert_equal(name, TOASTED)


def test_values_that_were_not_sent_of_rows_not_yet_copied(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P3 P7: an update before the row's copy does not send it whole, and the lake has no row yet"""
    toasted(world, "plain", "default")
    toasted(world, "added", "default")
    world.run(["public.plain"])
    begin = Copies._begin_later

    def begin_and_change(self, at, table):  # type: ignore[no-untyped-def]
        found = begin(self, at, table)
        world.sql(
            "update added set n = n + 100 where id <= 5",
            "update added set id = id + 500 where id in (2, 12)",
        )
        found.ready_at = self._run.server.mark()
        return found

    world.sql("update added set n = n + 1000 where id > 10")
    # The changes must come after the snapshot and before the round: no client can aim at that.
    monkeypatch.setattr(Copies, "_begin_later", begin_and_change)
    world.run(["public.plain", "public.added"])
    world.assert_equal("added", TOASTED)
    world.sql("update added set n = n + 5")
    world.run(["public.plain", "public.added"])
    world.assert_equal("added", TOASTED)


def test_values_that_were_not_sent_of_a_row_that_moved_on_before_its_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P3 P7: its key changes behind the copy, and the lake has it under neither key."""
    toasted(world, "added", "default")
    world.sql("create table first(id int primary key)", "insert into first values (1)")
    world.run(["public.first"])
    pipeline = world.open(world.document(["public.first", "public.added"]))
    begin, write, later = Copies._begin_later, pipeline._write_epoch, []

    def begin_and_change(self, at, table):  # type: ignore[no-untyped-def]
        found = begin(self, at, table)
        world.sql("update added set n = n + 100 where id <= 5")
        found.ready_at = self._run.server.mark()
        # All of it is one epoch, so that the round is the next one.
        ends = [State.END_LSN, State.SENT_LSN]
        state = self._stream._reader._state
        wait_until(lambda: max(state[ends]) >= found.ready_at, 60, "the mark in the stream")
        return found

    def write_and_change(splits, *rest):  # type: ignore[no-untyped-def]
        if splits and not later:
            later.append(world.sql("update added set id = id + 500 where id = 2"))
        return write(splits, *rest)

    # One change must come after the snapshot and before the mark, the other behind the copy.
    monkeypatch.setattr(Copies, "_begin_later", begin_and_change)
    monkeypatch.setattr(pipeline, "_write_epoch", write_and_change)
    pipeline.run(once=True)
    assert later
    world.run(["public.first", "public.added"])
    world.assert_equal("added", TOASTED)


def test_values_that_were_not_sent_come_from_the_table_and_not_from_its_children(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P7, Mend b4: a child may have a row of the same key, which is another table's."""
    toasted(world, "plain", "default")
    toasted(world, "added", "default")
    world.sql(
        "create table child(primary key (id)) inherits (added)",
        "insert into child select id, code, n, 'a child', 'of it' from added",
    )
    options: dict[str, Any] = {"parents_alone": ["public.added"]}
    world.run(["public.plain"], **options)
    begin = Copies._begin_later

    def begin_and_change(self, at, table):  # type: ignore[no-untyped-def]
        found = begin(self, at, table)
        world.sql("update only added set n = n + 100 where id <= 5")
        found.ready_at = self._run.server.mark()
        return found

    # The changes must come after the snapshot and before the round: no client can aim at that.
    monkeypatch.setattr(Copies, "_begin_later", begin_and_change)
    world.run(["public.plain", "public.added"], **options)
    world.assert_equal("only added", TOASTED, lake_table="added")


def test_table_rewritten_under_a_copy_whose_session_was_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """P1, P3: a reader of the older snapshot sees a table without rows; nothing may be lost."""
    load = loaded(world, 9, 300)
    copy, rewritten = Connection.copy, []

    def copy_rewritten(self, query, *rest):  # type: ignore[no-untyped-def]
        if '"item"' in query and not rewritten:
            sessions = "select pg_terminate_backend(pid) from pg_locks where granted and pid <> "
            rewritten.append(
                world.sql(f"{sessions} pg_backend_pid() and relation = 'item'::regclass")
            )
            world.sql("alter table item add column extra float default random()")
        return copy(self, query, *rest)

    # The rewrite must come between a reader's snapshot and its first row: no client can aim there.
    monkeypatch.setattr(Connection, "copy", copy_rewritten)
    world.run(BOTH)
    assert rewritten and "was rewritten or truncated while it was copied" in caplog.text
    assert len(world.assert_equal("item", ITEM)) == len(load.items)


def test_a_key_that_gets_another_type_within_an_epoch(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """P5, P7: changes of a key stay together, although its bytes are others: 5 as int, and as
    bigint."""
    world.sql(
        "create table grown(id int primary key, v text)",
        "insert into grown select g, 'first' from generate_series(1, 50) g",
    )
    world.run(["public.grown"])
    world.sql(
        "update grown set v = 'second'",
        "delete from grown where id > 40",
        "alter table grown alter id type bigint",
        "update grown set v = 'third' where id % 2 = 0",
        "insert into grown select g, 'new' from generate_series(45, 60) g",
    )
    # As many bytes as these say would take a test minutes.
    monkeypatch.setattr(segments, "_SHARED_BYTES_MIN", 1)
    monkeypatch.setattr(stream, "_SPLIT_BYTES", 64)
    world.run(["public.grown"])
    assert len(world.assert_equal("grown", "id, v")) == 56


def test_a_session_that_has_read_a_table_reads_it_right_when_its_key_is_wider(world: World):
    """I11, P7: Iceberg's reader would keep the deletes by the key's former type."""
    world.sql(
        "create table wider(id int primary key, v text)",
        "insert into wider select g, 'first' from generate_series(1, 20) g",
    )
    world.run(["public.wider"])
    world.sql("update wider set v = 'second'", "delete from wider where id > 15")
    world.run(["public.wider"])
    world.assert_equal("wider", "id, v")
    world.sql("alter table wider alter id type bigint", "update wider set v = 'third' where id < 9")
    world.run(["public.wider"])
    assert len(world.assert_equal("wider", "id, v")) == 15


def test_partitioned_table_is_one_table(world: World):
    """P7: rows that move between partitions, and partitions that come and go."""
    world.sql(
        "create table sale(id int, region text, n int, primary key (id, region)) "
        "partition by list (region)",
        "create table sale_north partition of sale for values in ('north')",
        "create table sale_south partition of sale for values in ('south') partition by range (id)",
        "create table sale_south_1 partition of sale_south for values from (0) to (50)",
        "create table sale_south_2 partition of sale_south for values from (50) to (1000)",
        "insert into sale select g, case when g % 2 = 0 then 'north' else 'south' end, g "
        "from generate_series(1, 100) g",
    )
    world.run(["public.sale"])
    world.assert_equal("sale", "id, region, n")
    world.sql(
        "update sale set region = 'south' where id % 10 = 0",
        "update sale set id = id + 100 where id < 20 and region = 'south'",
        "create table sale_west partition of sale for values in ('west')",
        "insert into sale select g, 'west', g from generate_series(500, 510) g",
        "update sale set region = 'west' where id = 22",
        "update sale_west set n = -1",
    )
    world.run(["public.sale"])
    assert len(world.assert_equal("sale", "id, region, n")) == 111
    world.sql("truncate sale", "insert into sale values (1000, 'west', 1)")
    world.run(["public.sale"])
    assert world.assert_equal("sale", "id, region, n") == [(1000, "west", 1)]


def test_tables_without_key_take_rows_only_and_do_not_disturb_the_source(world: World):
    """P7 P10: no key: appended; a key by `identifier_columns` and FULL: followed; generated ones"""
    world.sql(
        "create table log(at int, line text)",
        "insert into log values (1, 'one'), (1, 'one')",
        "create table named(a int, b text, v text)",
        "alter table named replica identity full",
        "insert into named select g, 'b' || g, 'v' from generate_series(1, 10) g",
        "create table made(id int primary key, n int, m int generated always as (n * 2) stored)",
        "insert into made(id, n) values (1, 1), (2, 2)",
    )
    options = {"identifier_columns": {"public.named": ["a", "b"]}}
    world.run(["public.*"], **options)
    world.sql(
        "update log set line = 'changed'",
        "delete from log where at = 7",
        "insert into log values (2, 'two')",
        "update named set v = 'new' where a < 4",
        "update named set b = 'moved' where a = 5",
        "delete from named where a = 6",
        "update made set n = 5 where id = 1",
        "insert into made(id, n) values (3, 3)",
    )
    world.run(["public.*"], **options)
    world.assert_equal("named", "a, b, v")
    world.assert_equal("made", "id, n")
    assert world.lake_rows("log", "at, line") == [(1, "one"), (1, "one"), (2, "two")]


def test_odd_names_reach_the_lake(world: World):
    """P7 I10: blanks, dots, quotes and upper case in names of schemas, tables and columns."""
    name = '"My Schema"."Odd ta.ble ""x"""'
    world.sql(
        'create schema "My Schema"',
        f'create table {name}("a b" int primary key, "c.d" text, "UPPER" int, "q""t" text)',
        f"insert into {name} values (1, 'x', 1, 'y')",
    )
    shown = 'My Schema."Odd ta.ble ""x"""'
    options = {"sink": {"tables": {shown: {"table": "odd"}}}}
    world.run(['"My Schema"."Odd ta.ble ""x"""'], **options)
    world.sql(f"insert into {name} values (2, 'y', 2, 'z')", f'update {name} set "UPPER" = 7')
    world.run(['"My Schema".*'], **options)
    rows = world.lake_rows("odd", '`a b`, `c.d`, `UPPER`, `q"t`')
    assert rows == [(1, "x", 7, "y"), (2, "y", 7, "z")]


def test_table_changes_its_shape_while_it_is_followed(world: World):
    """P7 I11: columns come, grow and go, also inside a transaction, also of types sent as text."""
    world.sql(
        "create table shape(id int primary key, n int, short varchar(5), going text)",
        "insert into shape values (1, 1, 'a', 'g')",
        "create table other(id int primary key)",
        "insert into other values (0)",
    )
    tables = ["public.shape", "public.other"]
    columns = "id, n, short"
    with world.following(tables) as following:
        following.wait_copied()
        insert = "insert into shape(id, n, short) values"
        world.change(following, tables[:1], f"{insert} (2, 2, 'b')")
        world.change(
            following,
            tables[:1],
            f"{insert} (3, 3, 'c')",
            "alter table shape add column extra int",
            "insert into shape values (4, 4, 'd', 'g', 4)",
            "insert into other values (1)",
        )
        world.sql("alter table shape alter n type bigint")
        world.change(following, tables[:1], f"{insert} (5, 5000000000, 'e')")
        world.sql("alter table shape alter short type varchar(50)", "alter table shape drop going")
        world.change(following, tables[:1], f"{insert} (6, 6, 'longer than before')")
        world.sql("alter table shape add column address inet")
        world.change(
            following,
            tables[:1],
            "update shape set address = '10.0.0.1' where id = 6",
            "update shape set extra = 2 where id = 1",
        )
        world.sql("create type mood as enum ('good', 'bad')")
        world.sql("alter table shape add column mood mood")
        world.change(following, tables[:1], "update shape set mood = 'bad' where id = 2")
    world.assert_equal(
        "shape",
        f"{columns}, extra, host(address), mood::text",
        lake_columns=f"{columns}, extra, address, mood",
    )
    world.run(tables)
    world.assert_equal("other", "id")


def test_type_that_is_gone_when_its_changes_are_read(world: World):
    """P7 P8: a column's type was made, used and dropped between two runs."""
    world.sql("create table brief(id int primary key)", "insert into brief values (1)")
    world.run(["public.brief"])
    world.sql(
        "create type mood as enum ('good', 'bad')",
        "alter table brief add column mood mood",
        "insert into brief values (2, 'bad')",
        "alter table brief drop column mood",
        "drop type mood",
        "insert into brief values (3)",
    )
    world.run(["public.brief"])
    world.assert_equal("brief", "id")


# --- sizes ------------------------------------------------------------------------------------


def peak_bytes() -> int:
    """The largest resident size of this process since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


@pytest.mark.spark_jobs
def test_transaction_larger_than_an_epoch_arrives_whole(world: World):
    """P5: a million rows in one transaction are one snapshot, and memory stays bounded."""
    world.sql("create table many(id int primary key, v text)", "insert into many values (0, 'v')")
    world.run(["public.many"])
    world.sql("insert into many select g, 'v' || g from generate_series(1, 1000000) g")
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    world.run(["public.many"], cadence={"epoch_bytes_max": 4 * 1024**2})
    assert peak_bytes() - before < 512 * 1024**2
    name = world.lake.table("shop.many")
    counted = world.spark.sql(f"SELECT count(*), count(DISTINCT id), max(id) FROM {name}")
    assert tuple(counted.collect()[0]) == (1_000_001, 1_000_001, 1_000_000)
    assert len(world.snapshots("many")) == 2


def test_row_larger_than_every_buffer(world: World):
    """P5 P7: a value of thirty million bytes is copied, and streamed."""
    world.sql("create table wide(id int primary key, v text)")
    world.sql("insert into wide values (1, repeat('ab', 15000000))")
    world.run(["public.wide"])
    world.sql("insert into wide values (2, repeat('cde', 15000000)), (3, 'small')")
    world.run(["public.wide"], cadence={"epoch_bytes_max": 1024**2})
    world.assert_equal("wide", "id, md5(v)")


@pytest.mark.spark_jobs
def test_many_tables_of_one_epoch_are_one_job(world: World):
    """E1 P5: the changes of many tables are written by one Spark job."""
    count = 12
    for number in range(count):
        world.sql(f"create table t{number}(id int primary key)")
    world.run(["public.*"])
    world.sql("begin", *(f"insert into t{n} values ({n})" for n in range(count)), "commit")
    pipeline = world.open(world.document(["public.*"]))
    write, jobs = pipeline._write_epoch, []

    def counted(splits, *rest):  # type: ignore[no-untyped-def]
        jobs.append(len(splits))
        return write(splits, *rest)

    # How many jobs an epoch takes is seen nowhere else.
    pipeline._write_epoch = counted
    pipeline.run(once=True)
    assert [size for size in jobs if size] == [count]
    assert world.lake_rows("t7", "id") == [(7,)]
    assert world.lake_rows(f"t{count - 1}", "id") == [(count - 1,)]


def test_copy_and_stream_are_transformed(world: World):
    """E11, P2, P8: rows move in and out of the filter, keys change, unsent values are looked up."""
    world.sql(
        "create table person (id int primary key, mail text, region text, born time, doc text)",
        "alter table person alter column doc set storage external",
        "insert into person select g, 'm' || g, case when g % 3 = 0 then 'us' else 'eu' end, "
        "time '08:00' + make_interval(mins => g), repeat('d' || g, 3000) "
        "from generate_series(1, 30) g",
    )
    select = (
        "select id as person_id, left(mail, 1) as mail, left(born, 5) as born, doc from changes "
        "where region = 'eu'"
    )
    told = {"cadence": {"transform": {"public.person": select}}}
    world.run(["public.person"], **told)

    def compare() -> None:
        columns = "id, left(mail, 1), to_char(born, 'HH24:MI'), doc"
        there = world.sql(f"select {columns} from person where region = 'eu'")
        here = world.lake_rows("person", "person_id, mail, born, doc")
        assert here == sorted(map(tuple, there), key=repr)

    compare()
    world.transaction(
        "update person set region = 'us' where id in (1, 2)",
        "update person set region = 'eu' where id = 3",
        "update person set mail = 'x' where id in (4, 6)",
        "update person set id = id + 100 where id in (7, 9)",
        "delete from person where id in (10, 12)",
        "insert into person values (50, 'new', 'eu', '01:00', 'short'), (51, 'n', 'us', null, '')",
    )
    world.run(["public.person"], **told)
    compare()
    world.sql("alter table person add column extra int", "update person set extra = 1")
    world.sql("truncate person", "insert into person values (1, 'again', 'eu', null, 'x', 5)")
    world.run(["public.person"], **told)
    compare()


def test_values_left_out_are_measured_before_they_are_looked_up(world: World):
    """Mend d4, P8: what would not fit into the coordinator's memory is refused, with a way out."""
    world.sql(
        "create table page (id int primary key, n int, doc text)",
        "alter table page alter column doc set storage external",
        "insert into page select g, 1, repeat('x', 4000) from generate_series(1, 100) g",
    )
    small, large = ({"lookup_bytes_max": size} for size in (300_000, 500_000))
    world.run(["public.page"])
    world.sql("update page set n = 2")
    with pytest.raises(DataRejected, match="more values than can be looked up at once") as caught:
        world.run(["public.page"], sink=small)
    assert "100 rows of the table would bring 40" in str(caught.value.detail)
    assert "lookup_bytes_max" in str(caught.value.hint)
    assert world.lake_rows("page", "sum(n)") == [(100,)]
    world.run(["public.page"], sink=large)
    world.assert_equal("page", "id, n, doc")


def test_a_value_that_was_not_sent_and_is_stored_masked_stops_the_pipeline(world: World):
    """E11, P8: the table holds only what the select made of it; nothing is made up."""
    world.sql(
        "create table person (id int primary key, n int, doc text)",
        "alter table person alter column doc set storage external",
        "insert into person values (1, 1, repeat('secret', 2000))",
    )
    told = {
        "cadence": {
            "transform": {"public.person": "select id, n, sha2(doc, 256) as doc from changes"}
        }
    }
    world.run(["public.person"], **told)
    world.sql("update person set n = 2")
    with pytest.raises(SchemaRejected, match="leave out values of column doc") as caught:
        world.run(["public.person"], **told)
    assert "REPLICA IDENTITY FULL" in str(caught.value)
    # A column that the select does not read needs no value.
    told = {"cadence": {"transform": {"public.person": "select id, n from changes"}}}
    world.run(["public.person"], **told)
    assert world.lake_rows("person", "id, n") == [(1, 2)]
