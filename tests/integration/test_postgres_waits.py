"""An epoch that an earlier run left half committed comes again, however long its changes take."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from icestream.epoch import Epoch
from icestream.frontier import START, Frontier
from icestream.samples.postgres import EmbeddedPostgres
from icestream.sources import Budget
from icestream.sources.postgres.changes import WalSplit
from icestream.sources.postgres.source import PostgresOptions, PostgresSource
from tests.integration.postgres_world import lsn, session
from tests.servers import wait_until

PATIENCE_SECONDS = 60.0
NAME = "waits"
# Each row fills an epoch: reading pauses when two of them wait to be taken.
BUDGET = Budget(rows=1, bytes=1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, with one table."""
    with EmbeddedPostgres(tmp_path / "server") as server:
        ask(server, "create table one(id int primary key, v text)")
        yield server


def ask(server: EmbeddedPostgres, sql: str) -> list[list[object]]:
    """What a client that is not icestream is told."""
    with session(server.dsn) as db:
        return list(db.run(sql) or [])


@contextmanager
def opened(server: EmbeddedPostgres) -> Iterator[PostgresSource]:
    """The source of a run; the pipeline is left out."""
    options = PostgresOptions(dsn=server.dsn, tables=["public.one"])
    source = PostgresSource(options, NAME, BUDGET)
    try:
        yield source
    finally:
        source.close()


def copied(source: PostgresSource) -> Frontier:
    """The position behind the copy, which is taken as committed."""
    at = START
    while not source.standing(at).caught_up:
        at = [at, *source.available(at)][-1]
        source.ack(at)
    return at


def written(server: EmbeddedPostgres, lower: Frontier, *ids: int) -> Epoch:
    """Transactions of one row each, and the epoch of an earlier run that has them all."""
    for number in ids:
        ask(server, f"insert into one values ({number}, 'x')")
    end = lsn(str(ask(server, "select pg_current_wal_lsn()::text")[0][0]))
    name = next(name for name in lower.positions if name.startswith("wal "))
    return Epoch(number=2, lower=lower, upper=lower.join(Frontier({name: (end,)})))


def messages(source: PostgresSource, epoch: Epoch) -> int:
    """How many changes workers find in the epoch."""
    found = 0
    for split in source.plan(epoch).parts:
        assert isinstance(split, WalSplit)
        for part in split.parts:
            spooled = pa.ipc.open_file(part.path)
            for number in part.batches:
                commits = spooled.get_batch(number).column("at").to_numpy()
                found += int(((commits >= split.lower) & (commits < split.upper)).sum())
    return found


def has(source: PostgresSource, epoch: Epoch) -> bool:
    """Whether the changes of an epoch have come."""
    found = source._stream._reader.segments() if source._stream._reader else []
    return bool(found) and found[-1].upper >= source._stream.span(epoch)[1]


def test_epoch_beyond_what_may_wait(server: EmbeddedPostgres):
    """E3, Mend c6: more than the spool may hold lies before the epoch's end; nobody takes it before
    the whole epoch has come, so reading must not pause. The next epoch comes as well, although what
    was finished is not acknowledged before it."""
    with opened(server) as source:
        at = copied(source)
    with opened(server) as source:
        source.available(at)
        for number in (1, 2):
            epoch = written(server, at, number)
            wait_until(lambda: has(source, epoch), PATIENCE_SECONDS, "the row")  # noqa: B023
        assert source._stream._reader is not None and source._stream._reader.paused()
        epoch = written(server, at, 3)
        assert messages(source, epoch) == 3
        ask(server, "insert into one values (4, 'y')")
        bounds: list[Frontier] = []

        def more() -> bool:
            bounds.extend(source.available(epoch.upper))
            return bool(bounds)

        wait_until(more, PATIENCE_SECONDS, "what follows")
        assert messages(source, Epoch(number=3, lower=epoch.upper, upper=bounds[-1])) == 1


def test_stream_that_the_server_cuts_in_the_middle_of_an_epoch(server: EmbeddedPostgres):
    """E3 P6, Mend c6: its parts are asked for once more, and are read by another connection."""
    with opened(server) as source:
        at = copied(source)
    with opened(server) as source:
        source.available(at)
        written(server, at, 1)
        ask(server, "select pg_terminate_backend(active_pid) from pg_replication_slots")
        reader = source._stream._reader
        wait_until(
            lambda: reader is not None and reader.failed is not None, PATIENCE_SECONDS, "its end"
        )
        epoch = written(server, at, 2, 3)
        assert messages(source, epoch) == 3
