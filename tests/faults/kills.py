"""Kill -9 at random while PostgreSQL is copied and followed, then compare lake and database.

    python -m tests.faults.kills [--kills 50] [--seed N]

A writer changes two tables all the time: inserts, updates, deletes, key changes, values that are
too large for a page, in transactions over both. The pipeline runs as a process of its own and is
killed at a failpoint, or whenever the seed says; at the end a last run takes what is left. The
database itself is the oracle.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from icestream import failpoints
from icestream.errors import IcestreamError
from icestream.samples.postgres import EmbeddedPostgres
from icestream.sources.postgres.connection import Connection, parse_dsn
from icestream.spark import session
from tests.faults.shop import KILLED, SPARK, Process, random_seed
from tests.lake import Lake

TABLES = ("accounts", "entries")
ROWS = 3000
PLACES = (*failpoints.PLACES, failpoints.AFTER_SLOT)
# Small rounds, so that a kill finds a copy in the middle.
SOURCE = {"tables": ["public.accounts", "public.entries"], "chunk_pages": 4}
CADENCE = {"commit_interval": "PT0.2S", "epoch_bytes_max": 262_144}
# A killed run must find work, but not more than the next one can do while the writer goes on.
PAUSE_SECONDS = 0.02
LARGE_SHARE = 0.1


class Writer(threading.Thread):
    """Changes both tables until it is stopped."""

    def __init__(self, dsn: str, seed: int):
        super().__init__(name="writer", daemon=True)
        self._connection = Connection(parse_dsn(dsn))
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._next = 10 * ROWS
        self.transactions = 0

    def run(self) -> None:
        """One small transaction after another."""
        while not self._ended.wait(PAUSE_SECONDS):
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
class Victim:
    """One database, its pipeline and the lake that it fills."""

    dsn: str
    folder: Path
    lake: Lake
    catalog: Mapping[str, str]
    namespace: str
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
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

    def start(self, *arguments: str, failpoint: str = "") -> Process:
        """Start the pipeline."""
        source = {"postgres": {"dsn": self.dsn, **SOURCE}}
        sink = {"iceberg": {"catalog": dict(self.catalog), "namespace": self.namespace}}
        document = {
            self.namespace: {"source": source, "sink": sink, **CADENCE},
            "spark": SPARK,
        }
        file = self.folder / "pipelines.yaml"
        file.write_text(yaml.safe_dump(document))
        return Process(["run", *arguments, str(file)], failpoint)

    def run_until_killed(self, failpoint: str) -> None:
        """Run, be killed at a failpoint; a run that never comes there ends by itself."""
        ended = self.start("--once", failpoint=failpoint).wait()
        self.story.append(f"{failpoint} {'killed' if ended.exit_code == KILLED else ''}".strip())
        assert ended.exit_code in (0, KILLED), ended.stderr[-3000:]

    def finish(self) -> None:
        """Let a last run take what is left."""
        ended = self.start("--once").wait()
        assert ended.exit_code == 0, ended.stderr[-3000:]

    def assert_equal(self) -> None:
        """The lake has what the database has: no row more, none less, none other."""
        with Connection(parse_dsn(self.dsn)) as connection:
            for table in TABLES:
                rows = connection.rows(f"SELECT id, owner, amount, note FROM {table}")
                wanted = {row[0]: tuple(row[1:]) for row in rows}
                found = self.lake.rows(f"{self.namespace}.{table}")
                ids = [row["id"] for row in found]
                assert len(ids) == len(set(ids)), f"{table} has rows twice: {self.story}"
                have = {r["id"]: (r["owner"], r["amount"], r["note"]) for r in found}
                differ = {k for k in wanted.keys() | have.keys() if wanted.get(k) != have.get(k)}
                assert not differ, f"{table} differs in {sorted(differ)[:5]}: {self.story}"


def play(victim: Victim, seed: int, kills: int) -> str:
    """Kill so many times at random places, then compare; returns what happened."""
    generator = random.Random(seed)
    writer = Writer(victim.dsn, seed)
    writer.start()
    try:
        for _ in range(kills):
            place = generator.choice(PLACES)
            victim.run_until_killed(f"{place}=kill@{generator.choice([1, 1, 2, 3, 5, 8])}")
    finally:
        writer.stop()
    victim.finish()
    victim.assert_equal()
    return f"{writer.transactions} transactions; {', '.join(victim.story)}"


def catalog_in(folder: Path) -> dict[str, str]:
    """A SQLite catalog and a warehouse in a folder."""
    return {
        "type": "jdbc",
        "name": "kills",
        "uri": f"jdbc:sqlite:{folder / 'catalog.db'}",
        "warehouse": str(folder / "warehouse"),
        "jdbc.schema-version": "V1",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill so many times in a row, ten for each database; 1 when lake and database differ."""
    parser = argparse.ArgumentParser(description="Kill at random, then compare with PostgreSQL.")
    parser.add_argument("--kills", type=int, default=50, help="how often")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first ten")
    options = parser.parse_args(arguments)
    seed = random_seed() if options.seed is None else options.seed
    say(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="icestream-kills-") as name:
        folder = Path(name)
        catalog = catalog_in(folder)
        spark = session([catalog], "local[2]")
        try:
            lake = Lake(spark, catalog)
            with EmbeddedPostgres(folder / "postgres") as server:
                for number, start in enumerate(range(0, options.kills, 10)):
                    begun = time.monotonic()
                    kills = min(10, options.kills - start)
                    victim = Victim(
                        dsn=database(server.dsn, f"d{number}"),
                        folder=folder / str(number),
                        lake=lake,
                        catalog=catalog,
                        namespace=f"kills{number}",
                    )
                    line = play(victim, seed + number, kills)
                    seconds = time.monotonic() - begun
                    say(f"{start + kills} kills, seed {seed + number}: {seconds:.0f} s, {line}")
        except (AssertionError, IcestreamError) as error:
            say(f"{error}\nagain: python -m tests.faults.kills --kills 10 --seed {seed + number}")
            return 1
        finally:
            spark.stop()
    say(f"{options.kills} kills, lake and database equal")
    return 0


def database(dsn: str, name: str) -> str:
    """Make a database of its own; returns its DSN."""
    with Connection(parse_dsn(dsn)) as connection:
        connection.rows(f"CREATE DATABASE {name}")
    return dsn.rsplit("/", 1)[0] + f"/{name}"


def say(line: str) -> Any:
    """One line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
