"""A database of a test's own on the shared PostgreSQL, a pipeline that follows it, and the lake."""

import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pg8000.native
from pyspark.sql import SparkSession

from icestream.config import open_pipeline, parse
from icestream.pipeline import Pipeline
from icestream.samples.postgres import EmbeddedPostgres
from tests.integration.pipelines import Document
from tests.lake import Lake
from tests.running import for_pipelines
from tests.servers import wait_until

# A busy machine is no reason to fail.
PATIENCE_SECONDS = 120.0
NAMESPACE = "shop"
# A copy in tiny rounds must be faster than the table grows.
PAUSE_SECONDS = 0.02

Row = tuple[Any, ...]


def session(dsn: str) -> pg8000.native.Connection:
    """A session of a client that is not icestream."""
    at = urlparse(dsn)
    return pg8000.native.Connection(
        user=at.username,
        password=at.password,
        host=at.hostname,
        port=at.port,
        database=at.path.lstrip("/"),
        # Without this each session would load the system's certificates first.
        ssl_context=False,
    )


def lsn(text: str) -> int:
    """A position in the log as a number."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


class World:
    """One database, one lake, one pipeline, named alike."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        name: str,
        spark: SparkSession,
        catalog: Mapping[str, str],
    ):
        self.server = server
        self.name = name
        self.dsn = server.dsn.rsplit("/", 1)[0] + f"/{name}"
        self.slot = f"icestream_{name}"
        self.spark = spark
        self.catalog = dict(catalog)
        self.lake = Lake(spark, catalog)
        with administrator(server) as admin:
            admin.run(f"create database {name} template template0")
        self._session: pg8000.native.Connection | None = None

    @property
    def db(self) -> pg8000.native.Connection:
        """The test's own session."""
        if self._session is None:
            self._session = session(self.dsn)
        return self._session

    def reconnect(self) -> None:
        """Take a new session: the server was restarted."""
        self._session = None

    def sql(self, *commands: str) -> list[list[Any]]:
        """Run commands one after the other; returns the last one's rows."""
        rows: list[list[Any]] = []
        for command in commands:
            rows = self.db.run(command) or []
        return rows

    def transaction(self, *commands: str) -> None:
        """Run commands as one transaction."""
        self.sql("begin", *commands, "commit")

    def document(
        self,
        tables: Sequence[str],
        sink: Mapping[str, Any] = {},
        cadence: Mapping[str, Any] = {},
        **source: Any,
    ) -> Document:
        """The pipeline file."""
        iceberg = {"catalog": self.catalog, "namespace": NAMESPACE, **sink}
        return {
            self.name: {
                "source": {"postgres": {"dsn": self.dsn, "tables": list(tables), **source}},
                "sink": {"iceberg": iceberg},
                "commit_interval": 0.1,
                **cadence,
            }
        }

    def open(self, pipelines: Document) -> Pipeline:
        """The pipeline of a file, not yet running."""
        return open_pipeline(parse(pipelines).pipelines[0], for_pipelines(self.spark))

    def run(self, tables: Sequence[str], **options: Any) -> Pipeline:
        """Take all that is there now."""
        pipeline = self.open(self.document(tables, **options))
        pipeline.run(once=True)
        return pipeline

    @contextmanager
    def following(self, tables: Sequence[str], **options: Any) -> Iterator["Following"]:
        """A pipeline that runs until the block ends; its error is raised there."""
        following = Following(self.open(self.document(tables, **options)))
        following.thread.start()
        try:
            yield following
        finally:
            following.pipeline.stop()
            following.thread.join(PATIENCE_SECONDS)
        assert not following.thread.is_alive()
        if following.error is not None:
            raise following.error

    def lake_rows(self, table: str, columns: str, snapshot_id: int | None = None) -> list[Row]:
        """Columns of a table of the lake, sorted."""
        at = f" VERSION AS OF {snapshot_id}" if snapshot_id is not None else ""
        name = f"{self.lake.name}.{NAMESPACE}.`{table}`"
        rows = self.spark.sql(f"SELECT {columns} FROM {name}{at}").collect()
        return sorted((tuple(row) for row in rows), key=repr)

    def source_rows(self, table: str, columns: str) -> list[Row]:
        """Columns of a table of the database, sorted."""
        rows = self.db.run(f"select {columns} from {table}") or []
        return sorted((tuple(map(_plain, row)) for row in rows), key=repr)

    def assert_equal(
        self, table: str, columns: str, lake_table: str = "", lake_columns: str = ""
    ) -> list[Row]:
        """The lake's table has the rows of the database's, no more and no fewer."""
        there = self.source_rows(table, columns)
        plain = table.rpartition(".")[2].strip('"')
        here = self.lake_rows(lake_table or plain, lake_columns or columns.replace('"', "`"))
        assert here == there, differences(here, there)
        return here

    def change(self, following: "Following", tables: Sequence[str], *commands: str) -> None:
        """One transaction; returns once it is in the lake's tables, which it must have changed."""
        self.sql("begin", *commands)
        before = self.position()
        self.sql("commit")
        for table in tables:
            following.wait_past(table, before)

    def position(self) -> int:
        """The end of the database's log."""
        return lsn(str(self.sql("select pg_current_wal_insert_lsn()::text")[0][0]))

    def snapshots(self, table: str) -> list["Published"]:
        """The snapshots of a table that publish changes or rows of a copy, in order."""
        epochs = self.lake.epochs(f"{NAMESPACE}.{table}")
        # A frontier that is published without changes adds no file and takes none away.
        files = ("added-data-files", "added-delete-files", "deleted-data-files")
        found = [each for each in epochs if any(name in each["summary"] for name in files)]
        return [Published.of(snapshot) for snapshot in found]

    def slot_row(self, column: str) -> Any:
        """What the server says of the pipeline's slot."""
        rows = self.sql(
            f"select {column} from pg_replication_slots where slot_name = '{self.slot}'"
        )
        return rows[0][0] if rows else None

    def backends(self) -> list[int]:
        """The processes that serve icestream in this database."""
        rows = self.sql(
            "select pid from pg_stat_activity where datname = current_database() "
            "and application_name = 'icestream'"
        )
        return [int(row[0]) for row in rows]

    def close(self) -> None:
        """Remove database and slot."""
        if self._session is not None:
            with suppress(Exception):
                self._session.close()
            self._session = None
        with administrator(self.server) as admin:
            admin.run(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = :name",
                name=self.name,
            )
            _drop_slots(admin, self.name)
            admin.run(f"drop database {self.name} with (force)")


def _drop_slots(admin: pg8000.native.Connection, database: str) -> None:
    def dropped() -> bool:
        try:
            admin.run(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
                "where database = :name",
                name=database,
            )
            return True
        except pg8000.native.DatabaseError:
            return False  # The walsender has not noticed yet that nobody listens.

    wait_until(dropped, PATIENCE_SECONDS, "the slot is dropped")


@contextmanager
def administrator(server: EmbeddedPostgres) -> Iterator[pg8000.native.Connection]:
    """A superuser's session outside of any test's database."""
    admin = session(server.dsn)
    try:
        yield admin
    finally:
        admin.close()


class Following:
    """A pipeline in a thread of its own."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="pipeline", daemon=True)

    def _run(self) -> None:
        try:
            self.pipeline.run()
        except Exception as error:
            self.error = error

    def wait_copied(self) -> None:
        """Return once a snapshot says that all copies are complete; no table may be empty."""

        def copied() -> bool:
            self.raise_error()
            tables: Any = self.pipeline.health.to_json()["tables"]
            return any("to copy" not in str(each["position"]) for each in tables.values())

        wait_until(copied, PATIENCE_SECONDS, "the copy of all tables")

    def wait_past(self, table: str, position: int) -> None:
        """Return once the table's last snapshot lies behind a position of the source."""

        def passed() -> bool:
            self.raise_error()
            at = self._position(table)
            return bool(at) and lsn(at.partition(",")[0]) > position

        wait_until(passed, PATIENCE_SECONDS, f"changes of {table}")

    def _position(self, table: str) -> str:
        tables: Any = self.pipeline.health.to_json()["tables"]
        return str(tables.get(table, {}).get("position", ""))

    def raise_error(self) -> None:
        """Fail at once when the pipeline did."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A snapshot of a table and what its summary says of the source."""

    snapshot_id: int
    lsn: int
    copied: bool
    epoch: int

    @staticmethod
    def of(snapshot: Mapping[str, Any]) -> "Published":
        summary = snapshot["summary"]
        frontier = json.loads(summary["icestream.frontier"])
        copies = [at for name, at in frontier.items() if name.startswith("copy ")]
        return Published(
            snapshot_id=snapshot["snapshot_id"],
            lsn=lsn(summary["postgres.lsn"]),
            copied=bool(copies) and all(at[1] == 2 for at in copies),
            epoch=int(summary["icestream.epoch"]),
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def differences(here: Sequence[Row], there: Sequence[Row]) -> str:
    """Rows that one side has and the other has not, or has more often."""
    left, right = list(map(repr, here)), list(map(repr, there))
    extra = sorted(set(left) - set(right))[:5]
    lost = sorted(set(right) - set(left))[:5]
    return (
        f"{len(left)} rows in the lake ({len(set(left))} distinct), {len(right)} in the database;"
        f" only in the lake {extra}; only in the database {lost}"
    )


# --- a load whose every state is known ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The state after a transaction; its commit record lies in `[before, after)`."""

    before: int
    after: int
    items: Mapping[int, Row]
    parts: Mapping[tuple[str, int], Row]


@dataclass
class Load:
    """Random transactions over two tables, with the state after each of them.

    `item(id int primary key, amount numeric, note text)` and
    `part(code text, number int, note text, primary key (code, number))`.
    """

    db: pg8000.native.Connection
    random: random.Random
    rows: int
    note_bytes: int = 60
    items: dict[int, Row] = field(default_factory=dict)
    parts: dict[tuple[str, int], Row] = field(default_factory=dict)
    noted: list[Noted] = field(default_factory=list)
    error: Exception | None = None

    def create(self) -> None:
        """Make the tables with their first rows."""
        self.db.run("create table item(id int primary key, amount numeric(12,2), note text)")
        self.db.run(
            "create table part(code text, number int, note text, primary key (code, number))"
        )
        pad = "x" * self.note_bytes
        self.db.run(
            f"insert into item select g, g * 1.25, '{pad}' from generate_series(1, {self.rows}) g"
        )
        self.db.run(
            f"insert into part select 'c' || g % 7, g, '{pad}' "
            f"from generate_series(1, {self.rows}) g"
        )
        for row in self.db.run("select id, amount, note from item") or []:
            self.items[row[0]] = tuple(row)
        for row in self.db.run("select code, number, note from part") or []:
            self.parts[row[0], row[1]] = tuple(row)
        at = self._at()
        self._note(at, at)

    def transact(self) -> None:
        """One transaction of a few random changes, and what it leads to."""
        self.db.run("begin")
        for _ in range(self.random.choice((1, 1, 2, 5, 20))):
            self.random.choice((self._item, self._item, self._part))()
        before = self._at()
        self.db.run("commit")
        self._note(before, self._at())

    def until(self, end: threading.Event) -> None:
        """Transactions until told to stop; for a thread."""
        try:
            while not end.wait(PAUSE_SECONDS):
                self.transact()
        except Exception as error:
            self.error = error

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load in a thread for as long as the block takes."""
        end = threading.Event()
        thread = threading.Thread(target=self.until, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error

    def possible(self, at: int) -> list[Noted]:
        """The states that the database may have at a position: one, rarely two."""
        done = [noted for noted in self.noted if noted.after <= at]
        open_now = [noted for noted in self.noted if noted.before < at < noted.after]
        return done[-1:] + open_now

    def _note(self, before: int, after: int) -> None:
        self.noted.append(
            Noted(before=before, after=after, items=dict(self.items), parts=dict(self.parts))
        )

    def _at(self) -> int:
        return lsn(str(self.db.run("select pg_current_wal_insert_lsn()::text")[0][0]))

    def _text(self) -> str:
        size = self.random.choice((3, self.note_bytes, 3 * self.note_bytes))
        return "".join(self.random.choices("abcdefgh", k=size))

    def _item(self) -> None:
        note, amount = self._text(), Decimal(self.random.randrange(10**6)) / 100
        action = self.random.random()
        number = self.random.choice(list(self.items)) if self.items else 1
        if action < 0.3 or not self.items:
            number = max([self.rows, *self.items]) + self.random.choice((1, 1, 10))
            self.db.run("insert into item values (:i, :a, :n)", i=number, a=amount, n=note)
        elif action < 0.7:
            self.db.run(
                "update item set amount = :a, note = :n where id = :i", i=number, a=amount, n=note
            )
        elif action < 0.85:
            self.db.run("delete from item where id = :i", i=number)
            del self.items[number]
            return
        else:
            other = max(self.items) + 1
            if self.random.random() < 0.3 and number - 1 not in self.items and number > 1:
                other = number - 1
            row = self.items.pop(number)
            self.db.run("update item set id = :o where id = :i", o=other, i=number)
            self.items[other] = (other, *row[1:])
            return
        self.items[number] = (number, amount.quantize(Decimal("0.01")), note)

    def _part(self) -> None:
        note = self._text()
        action = self.random.random()
        if action < 0.3 or not self.parts:
            number = max([self.rows, *(key[1] for key in self.parts)]) + 1
            key = (f"c{self.random.randrange(7)}", number)
            self.db.run("insert into part values (:c, :i, :n)", c=key[0], i=key[1], n=note)
            self.parts[key] = (*key, note)
            return
        key = self.random.choice(list(self.parts))
        if action < 0.6:
            self.db.run(
                "update part set note = :n where code = :c and number = :i",
                n=note,
                c=key[0],
                i=key[1],
            )
            self.parts[key] = (*key, note)
        elif action < 0.8:
            self.db.run("delete from part where code = :c and number = :i", c=key[0], i=key[1])
            del self.parts[key]
        else:
            other = (f"c{self.random.randrange(7)}", key[1])
            self.db.run(
                "update part set code = :o where code = :c and number = :i",
                o=other[0],
                c=key[0],
                i=key[1],
            )
            row = self.parts.pop(key)
            self.parts[other] = (*other, row[2])


def free_name(path: Path) -> str:
    """A database's name from a test's own folder."""
    letters = [letter if letter.isalnum() else "_" for letter in path.name.lower()]
    return "w_" + "".join(letters)[-40:]
