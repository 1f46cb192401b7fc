"""The source never blocks its PostgreSQL: not when it starts, not when the server wants to end."""

import logging
import re
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pg8000.native
import pytest

from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.frontier import START, Frontier
from icestream.samples.postgres import STOP_SECONDS_MAX, EmbeddedPostgres, Programs
from icestream.sources import Budget
from icestream.sources.postgres import watch
from icestream.sources.postgres.source import PostgresOptions, PostgresSource
from tests.integration.postgres_world import session
from tests.servers import wait_until

PATIENCE_SECONDS = 120.0
# Far above what it takes on a busy machine, far below the server's own limits.
SOON_SECONDS = 30.0
NAME = "harm"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, with one table."""
    with EmbeddedPostgres(tmp_path / "server") as server:
        with_session(server, lambda db: db.run("create table one(id int primary key, v text)"))
        with_session(server, lambda db: db.run("insert into one values (1, 'a')"))
        yield server


@pytest.fixture
def source(server: EmbeddedPostgres) -> Iterator[PostgresSource]:
    """A source of that table; the pipeline is left out."""
    options = PostgresOptions(dsn=server.dsn, tables=["public.one"])
    source = PostgresSource(options, NAME, Budget(rows=10_000, bytes=1024**2))
    yield source
    source.close()


def with_session(server: EmbeddedPostgres, use: Callable[[pg8000.native.Connection], object]):
    """Use a session of a client that is not icestream."""
    db = session(server.dsn)
    try:
        return use(db)
    finally:
        with suppress(Exception):
            db.close()


def ask(server: EmbeddedPostgres, sql: str) -> list[list[object]]:
    return list(with_session(server, lambda db: db.run(sql)) or [])


class Asked(threading.Thread):
    """The source is asked for what is next, in a thread of its own."""

    def __init__(self, source: PostgresSource):
        super().__init__(daemon=True)
        self.source = source
        self.bounds: list[Frontier] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.bounds = list(self.source.available(START))
        except Exception as error:
            self.error = error

    def done(self) -> list[Frontier]:
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.bounds


def creating(server: EmbeddedPostgres) -> bool:
    """Whether the slot is being created and waits for someone."""
    waits = (
        "select 1 from pg_stat_activity where query like 'CREATE_REPL%' and wait_event is not null"
    )
    return bool(ask(server, waits))


def test_transaction_that_alters_a_table_while_the_slot_waits_for_it(
    server: EmbeddedPostgres, source: PostgresSource
):
    """Mend e1, P13: nothing is locked while the slot waits, so the table's owner goes on; the copy
    begins as of a moment at which the table is as it is read."""
    owner = session(server.dsn)
    owner.run("begin")
    owner.run("insert into one values (2, 'b')")
    asked = Asked(source)
    wait_until(lambda: creating(server), PATIENCE_SECONDS, "the slot waits")
    owner.run("set local lock_timeout = '20s'")
    owner.run("alter table one alter column v type varchar(9) using 'x' || v")
    owner.run("commit")
    owner.close()
    bounds = asked.done()
    assert bounds and bounds[-1].positions
    assert source.shape("public.one").columns[1].name == "v"
    # The locks are held now, and let go when someone wants them.
    assert ask(
        server,
        "select 1 from pg_locks l join pg_class c on c.oid = l.relation "
        "where c.relname = 'one' and l.mode = 'AccessShareLock' and l.granted",
    )


def test_start_that_is_stopped_while_the_slot_waits(
    server: EmbeddedPostgres, source: PostgresSource
):
    """Mend e1, P13: the run ends within seconds; no session, no slot and no lock stay behind."""
    owner = session(server.dsn)
    owner.run("begin")
    owner.run("insert into one values (2, 'b')")
    asked = Asked(source)
    wait_until(lambda: creating(server), PATIENCE_SECONDS, "the slot waits")
    began = time.monotonic()
    source.interrupt()
    with pytest.raises(SourceUnavailable, match="stopped"):
        asked.done()
    assert time.monotonic() - began < SOON_SECONDS
    wait_until(lambda: not creating(server), SOON_SECONDS, "the session ends")
    assert not ask(server, "select 1 from pg_replication_slots")
    owner.run("commit")
    owner.close()


def test_table_rewritten_between_the_slot_and_its_lock(
    server: EmbeddedPostgres, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
):
    """Mend e1, P1: readers pinned to the older snapshot would see no rows: all begins anew."""
    hold, times = source._copies._hold, []

    def late(*arguments):  # type: ignore[no-untyped-def]
        times.append(1)
        if len(times) == 1:
            ask(server, "truncate one")
            ask(server, "insert into one values (7, 'new')")
        return hold(*arguments)

    # The truncation must come between two statements of one start: no client can aim at that.
    monkeypatch.setattr(source._copies, "_hold", late)
    Asked(source).done()
    assert len(times) == 2
    assert len(ask(server, "select 1 from pg_replication_slots")) == 1


def test_table_that_stays_locked(server: EmbeddedPostgres, source: PostgresSource):
    """Mend e1, P13: the start says so in time, keeps no slot, and works once the lock is gone."""
    owner = session(server.dsn)
    owner.run("begin")
    owner.run("lock table one in access exclusive mode")
    with pytest.raises(SourceUnavailable, match="lock"):
        Asked(source).done()
    assert not ask(server, "select 1 from pg_replication_slots")
    owner.run("rollback")
    owner.close()
    assert Asked(source).done()


def test_server_ends_while_an_idle_source_is_connected(
    server: EmbeddedPostgres, source: PostgresSource
):
    """Mend e2, P6: an orderly stop takes seconds although not all that was sent is durable, and the
    source goes on when the server is back."""
    at = copied(source)
    ask(server, "create table other(id int)")
    ask(server, "insert into other select generate_series(1, 1000)")
    sends = "select 1 from pg_stat_replication where state = 'streaming'"
    wait_until(lambda: bool(ask(server, sends)), PATIENCE_SECONDS, "the stream")
    began = time.monotonic()
    server.stop("fast")
    assert time.monotonic() - began < STOP_SECONDS_MAX, "it ended by itself"
    server.start()
    ask(server, "insert into one values (2, 'b')")

    def found() -> bool:
        with suppress(SourceUnavailable):
            return bool(source.available(at))
        return False

    wait_until(found, PATIENCE_SECONDS, "changes")


def test_server_ends_while_the_source_does_not_read(
    server: EmbeddedPostgres, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
):
    """Mend e2, P13: the spool is full because nothing can be committed; the stream is let go."""
    # The time between two looks at the server would only be waited out.
    monkeypatch.setattr(watch, "_SLOT_SECONDS", 0.2)
    at = copied(source)
    for _ in range(20):
        ask(server, "insert into one select max(id) + 1, repeat('x', 4000000) from one")
    waits = "select 1 from pg_stat_replication where sent_lsn < pg_current_wal_lsn()"
    wait_until(lambda: bool(source.available(at)), PATIENCE_SECONDS, "changes")
    assert ask(server, waits), "the source reads on"
    began = time.monotonic()
    server.stop("fast")
    assert time.monotonic() - began < STOP_SECONDS_MAX, "it ended by itself"


def test_large_message_of_another_client(server: EmbeddedPostgres, source: PostgresSource):
    """E14, P13: a message of 100 MB in the log takes none of our memory, and the rows around it
    come."""
    at = copied(source)

    def rows_came() -> bool:
        # Bounds also come when the log has grown and nothing else.
        bounds = source.available(at)
        return bool(bounds and source.plan(Epoch(number=1, lower=at, upper=bounds[-1])).parts)

    assert not rows_came()
    tracemalloc.start()
    try:
        ask(
            server,
            "with said as (select pg_logical_emit_message(true, 'other', repeat('x', 100000000))) "
            "insert into one select 2, 'b' from said",
        )
        wait_until(rows_came, PATIENCE_SECONDS, "the row beside the message")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * 1024**2


@contextmanager
def standby(server: EmbeddedPostgres, folder: Path) -> Iterator[None]:
    """A standby that says at once what it has flushed; no slot holds the log for it."""
    folder.mkdir()
    programs = Programs()
    receive = [str(programs.folder / "pg_receivewal"), "--dbname", server.dsn, "--synchronous"]
    with subprocess.Popen([*receive, "--directory", str(folder)]) as process:
        try:
            yield
        finally:
            process.terminate()


def test_clients_of_a_synchronous_server_do_not_wait_for_the_lake(
    server: EmbeddedPostgres,
    source: PostgresSource,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """P13, Mend of 018: the server takes any standby (`*`), and the source came first. A client's
    commit waits for the standby alone, whether its change is durable in the lake or not."""
    at = copied(source)
    ask(server, "alter system set synchronous_standby_names = '*'")
    ask(server, "select pg_reload_conf()")
    states = "select application_name, sync_state from pg_stat_replication order by 1"
    with standby(server, tmp_path / "standby"):
        expected = [["icestream", "async"], ["pg_receivewal", "sync"]]
        wait_until(lambda: ask(server, states) == expected, PATIENCE_SECONDS, "one standby counts")
        for number in (2, 3):
            began = time.monotonic()
            with_session(server, lambda db, n=number: db.run(f"insert into one values ({n}, 'b')"))
            assert time.monotonic() - began < SOON_SECONDS
            before = ask(server, "select confirmed_flush_lsn from pg_replication_slots")
            wait_until(lambda at=at: bool(source.available(at)), PATIENCE_SECONDS, "the change")
            at = source.available(at)[-1]
            source.ack(at)
            wait_until(
                lambda was=before: (
                    ask(server, "select confirmed_flush_lsn from pg_replication_slots") != was
                ),
                PATIENCE_SECONDS,
                "the slot moves",
            )
            wait_until(lambda: ask(server, states) == expected, PATIENCE_SECONDS, "as before")
    with caplog.at_level(logging.WARNING):
        other = PostgresOptions(dsn=server.dsn, tables=["public.one"])
        PostgresSource(other, NAME, Budget(rows=1, bytes=1)).tables()
    assert "icestream does not count as one" in caplog.text


def test_slot_under_the_name_of_an_earlier_version(server: EmbeddedPostgres):
    """P10, Mend of names: it is not left behind in silence, and another pipeline's is not taken;
    both ways that the hint names lead on."""
    former, budget = "icestream_orders_eu", Budget(rows=10_000, bytes=1024**2)
    ask(server, f"select pg_create_logical_replication_slot('{former}', 'pgoutput')")
    plain = PostgresOptions(dsn=server.dsn, tables=["public.one"])
    with pytest.raises(ConfigInvalid, match=f"slot {former} may be this pipeline's") as refused:
        PostgresSource(plain, "orders-eu", budget).tables()
    named = re.findall(r"`slot: (\w+)`", str(refused.value))
    assert len(set(named)) == 2 and named[0] == former
    PostgresSource(plain, "orders_eu", budget).tables()
    for slot in named:
        PostgresSource(replace(plain, slot=slot), "orders-eu", budget).tables()
    ask(server, f"select pg_create_logical_replication_slot('{named[1]}', 'pgoutput')")
    PostgresSource(plain, "orders-eu", budget).tables()


def copied(source: PostgresSource) -> Frontier:
    """Ask until the copies are done, as if all were committed; returns the stream's position."""
    at = START
    for _ in range(10):
        bounds = source.available(at)
        at = bounds[-1] if bounds else at
        source.ack(at)
        if source.standing(at).caught_up:
            return at
    raise AssertionError("the copies do not end")
