"""Kill -9 at random while PostgreSQL is copied and followed, then compare lake and database.

    python -m tests.faults.kills [--kills 50] [--seed N]

A writer changes two tables all the time: inserts, updates, deletes, key changes, values that are
too large for a page, in transactions over both. The database itself is the oracle.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from icestream import failpoints
from icestream.samples.postgres import EmbeddedPostgres
from icestream.sources.postgres.connection import Connection, parse_dsn
from tests.faults.killing import Place, Victim, kill_and_compare

TABLES = ("accounts", "entries")
ROWS = 3000
# Small rounds, so that a kill finds a copy in the middle.
SOURCE = {"tables": ["public.accounts", "public.entries"], "chunk_pages": 4}
CADENCE = {"commit_interval": "PT0.2S", "epoch_bytes_max": 262_144}
# A killed run must find work, but not more than the next one can do while the writer goes on.
PAUSE_SECONDS = 0.02
LARGE_SHARE = 0.1
# The pipeline's connections have the name of the program.
WRITER = "writer"


class DatabaseWriter(threading.Thread):
    """Changes both tables until it is stopped."""

    def __init__(self, dsn: str, seed: int):
        super().__init__(name="writer", daemon=True)
        self._connection = Connection(replace(parse_dsn(dsn), application_name=WRITER))
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._next = 10 * ROWS
        self.transactions, self.transactions_max = 0, sys.maxsize

    def run(self) -> None:
        """One small transaction after another."""
        while not self._ended.wait(PAUSE_SECONDS):
            if self.transactions >= self.transactions_max:
                continue
            self._connection.rows("BEGIN")
            for _ in range(self._random.randrange(1, 4)):
                self._connection.rows(self._change(self._random.choice(TABLES)))
            self._connection.rows("ROLLBACK" if self._random.random() < 0.05 else "COMMIT")
            self.transactions += 1

    def _change(self, table: str) -> str:
        number, other = self._random.randrange(ROWS), self._random.randrange(ROWS)
        self._next += 1
        large = "(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 300))"
        note = large if self._random.random() < LARGE_SHARE else f"'note {self._next}'"
        return self._random.choice(
            [
                f"INSERT INTO {table} VALUES ({self._next}, {number}, 1.5, {note})",
                f"UPDATE {table} SET amount = amount + 1 WHERE id = {number}",
                f"UPDATE {table} SET note = {note} WHERE id IN ({number}, {other})",
                f"UPDATE {table} SET id = {self._next} WHERE id = {number}",
                f"DELETE FROM {table} WHERE id = {other}",
            ]
        )

    def stop(self) -> None:
        """End after the transaction it is in."""
        self._ended.set()
        self.join()
        self._connection.close()


@dataclass(kw_only=True)
class DatabaseVictim(Victim):
    """One database, and the pipeline that copies and follows it."""

    dsn: str
    places: ClassVar[Sequence[str]] = (*failpoints.PLACES, failpoints.AFTER_SLOT)

    def __post_init__(self) -> None:
        with Connection(parse_dsn(self.dsn)) as connection:
            for table in TABLES:
                connection.rows(
                    f"CREATE TABLE {table} (id bigint PRIMARY KEY, owner int, "
                    "amount numeric(12, 2), note text)"
                )
                connection.rows(
                    f"INSERT INTO {table} SELECT g, g % 100, g * 0.5, repeat('n', g % 90) "
                    f"FROM generate_series(0, {ROWS - 1}) g"
                )

    def pipeline(self) -> Mapping[str, Any]:
        """Copies in small rounds, then follows in small epochs."""
        sink = {"catalog": dict(self.place.catalog), "namespace": self.place.name}
        # A run that crashes here leaves its spool, as a killed one does.
        source = {"dsn": self.dsn, "spool": str(self.place.folder), **SOURCE}
        return {"source": {"postgres": source}, "sink": {"iceberg": sink}, **CADENCE}

    def writer(self, seed: int) -> "DatabaseWriter":
        """Changes both tables."""
        return DatabaseWriter(self.dsn, seed)

    def bury(self) -> None:
        """A killed process has no connections; its locks, snapshots and the slot are free."""
        with Connection(parse_dsn(self.dsn)) as connection:
            connection.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                "pg_backend_pid() AND datname = current_database() AND application_name <> :name",
                name=WRITER,
            )

    def assert_equal(self) -> None:
        """The lake has what the database has."""
        with Connection(parse_dsn(self.dsn)) as connection:
            for table in TABLES:
                rows = connection.rows(f"SELECT id, owner, amount, note FROM {table}")
                wanted = {row[0]: tuple(row[1:]) for row in rows}
                found = self.place.lake.rows(f"{self.place.name}.{table}")
                ids = [row["id"] for row in found]
                assert len(ids) == len(set(ids)), f"{table} has rows twice: {self.story}"
                have = {r["id"]: (r["owner"], r["amount"], r["note"]) for r in found}
                differ = {k for k in wanted.keys() | have.keys() if wanted.get(k) != have.get(k)}
                assert not differ, f"{table} differs in {sorted(differ)[:5]}: {self.story}"


@contextmanager
def victims(folder: Path) -> Iterator[Callable[[Place, int], Victim]]:
    """A PostgreSQL, and databases of their own on it."""
    with EmbeddedPostgres(folder) as server:
        yield lambda place, seed: DatabaseVictim(place=place, dsn=database(server.dsn, place.name))


def database(dsn: str, name: str) -> str:
    """Make a database of its own; returns its DSN."""
    with Connection(parse_dsn(dsn)) as connection:
        connection.rows(f"CREATE DATABASE {name}")
    return dsn.rsplit("/", 1)[0] + f"/{name}"


if __name__ == "__main__":
    sys.exit(kill_and_compare("tests.faults.kills", victims))
