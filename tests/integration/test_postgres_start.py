"""What is missing at a PostgreSQL is said at the start with what to run; passing trouble is not."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from icestream import metrics
from icestream.errors import HistoryLost
from icestream.samples.postgres import EmbeddedPostgres
from icestream.sources.postgres import watch
from icestream.sources.postgres.copies import Copies
from tests.integration.pipelines import Shell, assert_refused
from tests.integration.postgres_world import World, administrator, lsn
from tests.servers import free_port, wait_until

INVALID, OPERATOR, PASSING = 2, 3, 1
ONE = ["public.one"]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """Another server, which writes no logical changes until it is told to."""
    folder = tmp_path_factory.mktemp("replica")
    with EmbeddedPostgres(folder, {"wal_level": "replica"}) as server:
        yield server


def one_table(world: World) -> None:
    """A small table."""
    world.sql("create table one(id int primary key, v text)", "insert into one values (1, 'a')")


def refused(world: World, shell: Shell, code: int, *texts: str, **options: object) -> str:
    """The run ends with the code and says these things; returns all it said."""
    tables = options.pop("tables", ONE)
    answer = shell.run(world.document(tables, **options))  # type: ignore[arg-type]
    assert_refused(answer, code, *texts)
    return answer.err


def test_server_that_writes_no_logical_changes(
    world: World, shell: Shell, replica: EmbeddedPostgres
):
    """P10: wal_level."""
    hint = "ALTER SYSTEM SET wal_level = logical"
    refused(world, shell, INVALID, "does not write logical changes", hint, dsn=replica.dsn)


def test_role_lacks_privileges(world: World, shell: Shell):
    """P10: REPLICATION, SELECT, and ownership of the tables for the publication."""
    one_table(world)
    role = f"r_{world.name[-20:]}"
    world.sql(f"create role {role} login password 'secret-word'")
    dsn = world.dsn.replace("postgres:" + world.server.password, f"{role}:secret-word")
    try:
        said = refused(world, shell, INVALID, f'ALTER ROLE "{role}" REPLICATION', dsn=dsn)
        assert "secret-word" not in said
        world.sql(f"alter role {role} replication")
        refused(world, shell, INVALID, 'GRANT SELECT ON "public"."one"', dsn=dsn)
        world.sql(
            f"grant select on one to {role}", f"grant connect on database {world.name} to {role}"
        )
        refused(world, shell, INVALID, "CREATE PUBLICATION", dsn=dsn)
        world.sql("create publication theirs for table one with (publish_via_partition_root)")
        answer = shell.run(world.document(ONE, dsn=dsn, publication="theirs"))
        assert answer.code == 0, answer.err
        world.assert_equal("one", "id, v")
    finally:
        world.sql(f"drop owned by {role}", f"drop role {role}")


def test_wrong_configuration(world: World, shell: Shell):
    """P10 U3: names, DSNs and passwords that are wrong; no password is ever shown."""
    one_table(world)
    world.sql("create table orders(id int primary key)")
    refused(world, shell, INVALID, "has no table", "public.orders", tables=["public.oders"])
    refused(world, shell, INVALID, "has no table", tables=["nowhere.*"])
    refused(world, shell, INVALID, "DSN is not understood", dsn="mysql://x@y/z")
    refused(world, shell, INVALID, "DSN is not understood", dsn="postgresql://u@h:port/db")
    refused(world, shell, INVALID, "parameter", dsn=f"{world.dsn}?sslmod=require")
    said = refused(
        world, shell, INVALID, "password", dsn=world.dsn.replace(world.server.password, "wrong-one")
    )
    assert "wrong-one" not in said
    refused(world, shell, INVALID, "nosuchdb", dsn=world.dsn.replace(world.name, "nosuchdb"))
    refused(world, shell, INVALID, "does not speak TLS", dsn=f"{world.dsn}?sslmode=require")
    away = world.dsn.replace(f":{world.server.port}/", f":{free_port()}/")
    refused(world, shell, PASSING, "could not reach PostgreSQL", dsn=away)


def test_publication_of_the_users_own(world: World, shell: Shell):
    """P10: it is used as it is, and must be there, and must have the tables."""
    one_table(world)
    refused(world, shell, INVALID, "no publication mine", "CREATE PUBLICATION", publication="mine")
    world.sql("create publication mine with (publish_via_partition_root)")
    refused(world, shell, INVALID, "lacks table public.one", "ADD TABLE", publication="mine")
    world.sql("alter publication mine add table one (id) where (id < 100)")
    world.sql("insert into one values (500, 'filtered')")
    world.run(ONE, publication="mine")
    world.sql("insert into one values (2, 'x'), (600, 'filtered')")
    world.run(ONE, publication="mine")
    assert world.lake_rows("one", "*") == [(1,), (2,)]


def test_publication_that_leaves_changes_out(world: World, shell: Shell):
    """P10: operations or partitions that it does not publish as the tables need; hints help."""
    one_table(world)
    world.sql(
        "create table sale(id int primary key, n int) partition by range (id)",
        "create table sale_1 partition of sale for values from (0) to (100)",
        "insert into sale values (1, 1)",
        "create publication mine for table one, sale with (publish = 'insert, update, delete')",
    )
    tables = ["public.one", "public.sale"]
    options: dict[str, object] = {"tables": tables, "publication": "mine"}
    said = "mine does not publish all changes"
    hint = "(publish = 'insert, update, delete, truncate')"
    refused(world, shell, INVALID, said, f'ALTER PUBLICATION "mine" SET {hint}', **options)
    world.sql("alter publication mine set (publish = 'insert, update, truncate')")
    refused(world, shell, INVALID, said, hint, **options)
    world.sql(f"alter publication mine set {hint}")
    root = "(publish_via_partition_root = true)"
    refused(world, shell, INVALID, "partitions under their own names", root, **options)
    checked = shell("check", shell.write(world.document(tables, publication="mine")))
    assert checked.code == INVALID and root in checked.err + checked.out
    world.sql(f"alter publication mine set {root}")
    world.run(tables, publication="mine")
    world.sql("insert into sale values (2, 2)", "update sale set n = 3", "truncate one")
    world.run(tables, publication="mine")
    assert world.assert_equal("sale", "id, n") == [(1, 3), (2, 3)]
    assert world.assert_equal("one", "id, v") == []


def test_table_without_key_that_would_be_copied_beside_the_stream(world: World, shell: Shell):
    """P7 P9 P10: its rows could come twice, so it is refused, unless it has none or a key."""
    one_table(world)
    world.sql("create table log(line text)", "create table empty(line text)")
    world.run(ONE)
    world.sql("insert into log values ('first')", "alter table log replica identity full")
    said = "table public.log has no key and cannot be copied beside the stream"
    refused(world, shell, OPERATOR, said, "identifier_columns", tables=["public.one", "public.log"])
    world.run(["public.one", "public.empty"])
    world.sql("insert into empty values ('later'), ('later')")
    world.run(["public.one", "public.empty"])
    assert world.lake_rows("empty", "line") == [("later",), ("later",)]
    # What the hint says helps.
    world.run(
        ["public.one", "public.empty", "public.log"], identifier_columns={"public.log": ["line"]}
    )
    world.assert_equal("log", "line")
    world.assert_equal("one", "id, v")


@pytest.mark.parametrize("rows", ["still none", "rows since"])
def test_keyless_table_that_an_earlier_version_copied_without_rows(
    world: World, shell: Shell, monkeypatch: pytest.MonkeyPatch, rows: str
):
    """E7 P9: its Iceberg table says nothing of the copy, as one that was made anew and not filled.

    So it is copied again, which needs a key when there are rows. Without rows nothing is asked.
    """
    one_table(world)
    world.sql("create table log(line text)")
    tables = ["public.one", "public.log"]
    # Earlier versions did not note in a table that it was copied without rows.
    with monkeypatch.context() as earlier:
        earlier.setattr(Copies, "ends_one", lambda self, epoch: False)
        world.run(tables, cadence={"heartbeat_interval": 0})
    assert not world.lake.epochs("shop.log")
    if rows == "rows since":
        world.sql("insert into log values ('first'), ('first')")
        said = "table public.log has no key and cannot be copied beside the stream"
        hint = "by a pipeline of its own, into an Iceberg table of another name"
        refused(world, shell, OPERATOR, said, "earlier version", hint, tables=tables)
        # What the hint says helps, and the other table need not be copied.
        tables, name = ONE, "lines"
        sink = {"tables": {"public.log": {"table": name}}}
        own = {f"{world.name}_log": world.document(["public.log"], sink=sink)[world.name]}
    else:
        own, name = world.document(tables), "log"
    for line in ("later", "last"):
        world.run(tables)
        world.open(own).run(once=True)
        world.assert_equal("log", "line", lake_table=name)
        world.assert_equal("one", "id, v")
        world.sql(f"insert into log values ('{line}')", f"update one set v = '{line}'")


def test_slot_that_no_longer_serves(world: World, shell: Shell):
    """E7 P10: a slot that was dropped or moved on by someone else is never skipped over."""
    one_table(world)
    world.run(ONE)
    world.sql("insert into one values (2, 'b')")
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")
    world.sql(f"select pg_replication_slot_advance('{world.slot}', pg_current_wal_insert_lsn())")
    refused(world, shell, OPERATOR, "no longer has the changes", "moved the slot on", "copied anew")
    world.sql(f"select pg_drop_replication_slot('{world.slot}')")
    refused(world, shell, OPERATOR, "no longer has the changes", "does not exist")
    # What the hint says helps.
    world.spark.sql(f"DROP TABLE {world.lake.table('shop.one')}")
    world.run(ONE)
    world.assert_equal("one", "id, v")


def test_slot_whose_log_the_server_removed(world: World, shell: Shell):
    """E7 P11: max_slot_wal_keep_size has passed; the lag was a metric before."""
    one_table(world)
    lag = metrics.SLOT_LAG_BYTES.labels(world.slot)
    lag.set(-1)
    world.run(ONE)
    assert lag._value.get() >= 0
    world.sql("insert into one values (2, 'b')")
    try:
        world.sql("alter system set max_slot_wal_keep_size = '1MB'", "select pg_reload_conf()")

        def lost() -> bool:
            world.sql("select pg_logical_emit_message(false, 'x', repeat('x', 9000000))")
            world.sql("select pg_switch_wal()", "checkpoint")
            return bool(world.slot_row("wal_status") == "lost")

        wait_until(lost, 60, "the slot is lost")
        refused(world, shell, OPERATOR, "no longer has the changes", "max_slot_wal_keep_size")
    finally:
        world.sql("alter system reset max_slot_wal_keep_size", "select pg_reload_conf()")


def test_slot_about_to_be_lost_is_a_warning(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """P11: said once, while the slot still serves and the pipeline has nothing to commit."""
    one_table(world)
    # The time between two looks at the slot would only be waited out.
    monkeypatch.setattr(watch, "_SLOT_SECONDS", 0.05)
    lag = metrics.SLOT_LAG_BYTES.labels(world.slot)

    def write(size: int) -> None:
        """Add to the log what concerns no table, and wait until the slot was looked at."""
        before = lag._value.get()
        world.sql(f"select pg_logical_emit_message(false, 'x', repeat('x', {size}))")
        wait_until(lambda: lag._value.get() >= before + size, 60, "a look at the slot")

    def warnings() -> int:
        return caplog.text.count(f"slot {world.slot} is about to be lost")

    with world.following(ONE) as following:
        following.wait_copied()
        try:
            world.sql("alter system set max_slot_wal_keep_size = '64MB'", "select pg_reload_conf()")
            write(9_000_000)
            assert warnings() == 0
            for _ in range(6):
                write(9_000_000)
            wait_until(lambda: warnings() > 0, 60, "the warning")
            for _ in range(3):
                write(1000)
            assert warnings() == 1
            assert world.slot_row("wal_status") in ("reserved", "extended")
        finally:
            world.sql("alter system reset max_slot_wal_keep_size", "select pg_reload_conf()")
        world.change(following, ONE, "insert into one values (2, 'b')")
    world.assert_equal("one", "id, v")


def test_another_server_behind_the_same_dsn(
    world: World, shell: Shell, postgres_server: EmbeddedPostgres, tmp_path_factory
):
    """P10 E7: another cluster is not mistaken for the one that was copied."""
    one_table(world)
    world.run(ONE)
    with EmbeddedPostgres(tmp_path_factory.mktemp("other")) as other:
        with administrator(other) as admin:
            admin.run("create table one(id int primary key, v text)")
        refused(
            world, shell, OPERATOR, "another PostgreSQL answers", "Correct the DSN", dsn=other.dsn
        )


def test_table_dropped_and_created_anew(world: World, shell: Shell):
    """P10: the lake's rows are another table's; what the hint says helps."""
    one_table(world)
    world.sql("create table two(id int primary key)", "insert into two values (1)")
    both = ["public.one", "public.two"]
    world.run(both)
    # The server's log goes on without a change: where it stands is written down in table `one`
    # alone, and told to the slot. The way out must not need another table to know it.
    world.sql("select pg_switch_wal()")
    world.run(both)
    world.sql("drop table one")
    one_table(world)
    refused(world, shell, OPERATOR, "was dropped and created anew", tables=both)
    world.run(["public.two"])
    world.run(both)
    world.assert_equal("one", "id, v")
    world.assert_equal("two", "id")


def test_table_dropped_and_created_anew_while_it_is_followed(world: World):
    """P10: the stream goes on with another table of the same name, and the pipeline stops."""
    one_table(world)
    world.sql("create table two(id int primary key)", "insert into two values (1)")
    with pytest.raises(HistoryLost, match="dropped and created anew"):
        with world.following(["public.one", "public.two"]) as following:
            following.wait_copied()
            world.sql("drop table one")
            one_table(world)
            world.sql(f'alter publication "icestream_{world.name}" add table one')
            world.sql("insert into one values (2, 'b')")
            wait_until(lambda: following.error is not None, 60, "the pipeline stops")


def test_a_column_may_be_declared_once_its_values_were_refused(world: World, shell: Shell):
    """Mend c7, P8: the table was made by then, empty; the guide's way goes on from there."""
    world.sql(
        "create table price (id int primary key, v numeric(10, 2))",
        "insert into price values (1, 1.50), (2, 'NaN')",
    )
    tables = ["public.price"]
    refused(world, shell, OPERATOR, "column v", tables=tables)
    world.run(tables, columns={"public.price": {"v": "string"}})
    assert world.lake_rows("price", "id, v") == [(1, "1.50"), (2, "NaN")]


def test_connections_that_are_cut_are_made_again(world: World):
    """P6 P4: the walsender, and every other session of the pipeline, is ended by someone."""
    one_table(world)
    with world.following(ONE) as following:
        following.wait_copied()
        for number in range(2, 5):
            world.sql(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and application_name = 'icestream'"
            )
            world.change(following, ONE, f"insert into one values ({number}, 'b')")
    world.assert_equal("one", "id, v")


def test_copy_goes_on_when_its_snapshot_is_ended(world: World):
    """P3: the session that holds the first snapshot dies between two rounds."""
    world.sql("create table one(id int primary key, v text)")
    world.sql("insert into one select g, repeat('x', 200) from generate_series(1, 2000) g")
    pipeline = world.open(
        world.document(ONE, cadence={"epoch_bytes_max": 16 * 8192}, chunk_pages=4)
    )
    write, seen = pipeline._write_epoch, []

    def cut(splits, *rest):  # type: ignore[no-untyped-def]
        seen.append(len(splits))
        if len(seen) == 2:
            world.sql(
                "update one set v = 'changed' where id % 2 = 0", "delete from one where id = 5"
            )
            world.sql(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and application_name = 'icestream'"
            )
        return write(splits, *rest)

    # The sessions must end between two rounds: no client can aim at that.
    pipeline._write_epoch = cut
    pipeline.run(once=True)
    world.run(ONE)
    world.assert_equal("one", "id, v")


def test_server_that_crashes_comes_back(world: World):
    """P4 P6: the server dies and starts again; the pipeline waits, then goes on."""
    one_table(world)
    with world.following(ONE) as following:
        following.wait_copied()
        world.change(following, ONE, "insert into one values (2, 'b')")
        world.server.stop("immediate")
        wait_until(lambda: following.pipeline.health.to_json()["state"] == "stalled", 60, "stalled")
        world.server.start()
        world.reconnect()
        world.change(following, ONE, "insert into one values (3, 'c')")
    world.assert_equal("one", "id, v")


def test_full_spool_is_waited_for(world: World, tmp_path: Path):
    """E13, Mend F4: health names the folder and the reason; with room again nothing is missing."""
    one_table(world)
    with world.following(ONE, spool=str(tmp_path)) as following:
        following.wait_copied()
        (folder,) = tmp_path.glob("icestream-spool-*")
        # A file that has no room, whatever its number is.
        files = [folder / f"{number:08d}.arrow" for number in range(1, 500)]
        for file in files:
            with suppress(FileExistsError):
                file.symlink_to("/dev/full")
        world.sql("insert into one values (2, 'b')")
        health = following.pipeline.health
        wait_until(lambda: health.to_json()["state"] == "stalled", 60, "stalled")
        said = str(health.to_json()["error"])
        assert str(folder) in said and "No space left on device" in said
        for file in files:
            if file.is_symlink():
                file.unlink(missing_ok=True)
        world.change(following, ONE, "insert into one values (3, 'c')")
        assert health.to_json()["state"] == "running"
    world.assert_equal("one", "id, v")


def test_slot_moves_only_behind_what_is_durable(world: World, monkeypatch: pytest.MonkeyPatch):
    """P6: before the commit the slot stands still, after it the slot follows."""
    one_table(world)
    world.run(ONE)
    before = world.position()
    world.sql("insert into one values (2, 'b')")
    pipeline = world.open(world.document(ONE))
    commit, seen = pipeline._sink.commit, []

    def watched(written):  # type: ignore[no-untyped-def]
        seen.append(lsn(world.slot_row("confirmed_flush_lsn::text")))
        return commit(written)

    # The slot is looked at when all is written and nothing is committed.
    monkeypatch.setattr(pipeline._sink, "commit", watched)
    pipeline.run(once=True)
    assert len(seen) == 1 and seen[0] <= before
    world.assert_equal("one", "id, v")
    with world.following(ONE) as following:
        world.change(following, ONE, "insert into one values (3, 'c')")
        after = world.position()
        world.change(following, ONE, "insert into one values (4, 'd')")
        wait_until(
            lambda: lsn(world.slot_row("confirmed_flush_lsn::text")) >= after, 60, "the slot moves"
        )
