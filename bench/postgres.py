"""PostgreSQL: copying and following, against the server's own tools and Spark's JDBC reader."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measure import repeat
from icestream.config import open_pipeline, parse
from icestream.samples.postgres import EmbeddedPostgres, Programs
from icestream.sources.postgres.connection import Connection, lsn_text, parse_dsn
from tests.servers import S3Server

if TYPE_CHECKING:
    from bench.__main__ import Bench

JDBC_DRIVER = "org.postgresql:postgresql:42.7.7"
COPY_ROWS = 5_000_000
STREAM_CHANGES = 1_000_000
CHANGES_PER_TRANSACTION = 10
WARM_UPS, REPETITIONS = 1, 2
SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "16GB",
    "synchronous_commit": "off",
    "autovacuum": "off",
}
TABLE = """CREATE TABLE {name} (id bigint PRIMARY KEY, customer bigint, quantity int,
  price numeric(12, 2), weight double precision, status text, note text, city text, paid boolean,
  created_at timestamptz)"""
FILL = """INSERT INTO {name} SELECT g, g * 7919 % 1000000, g % 100, (g % 100000) / 100.0, g / 8.0,
  (ARRAY['new', 'paid', 'sent', 'done', 'returned'])[1 + (g % 5)::int], 'order note ' || g,
  'city-' || g % 300, g % 2 = 0, '2026-01-01'::timestamptz + g * interval '1 second'
  FROM generate_series(1::bigint, {count}) g"""
CHANGE = """DO $$ BEGIN FOR n IN 1..{transactions} LOOP
  INSERT INTO {name} SELECT {base} + n * 10 + g, n, g, 1.5, 2.5, 'new', 'order note', 'city', true,
    now() FROM generate_series(1, 3) g;
  UPDATE {name} SET price = price + 1, status = 'sent' WHERE id BETWEEN n * 6 AND n * 6 + 5;
  DELETE FROM {name} WHERE id = {rows} - n;
  COMMIT; END LOOP; END $$"""


class PostgresBench:
    """One server with the tables that are copied and changed."""

    def __init__(self, bench: "Bench", folder: Path, scale: float):
        self._bench = bench
        self._rows, self._changes = int(COPY_ROWS * scale), int(STREAM_CHANGES * scale)
        self._server = EmbeddedPostgres(folder / "postgres", SETTINGS)
        self._programs = Programs().folder
        self._store = S3Server(folder / "store")

    def run(self) -> None:
        """Measure both phases."""
        with self._server, self._store:
            self._store.create_bucket("spools")
            self._sql(TABLE.format(name="orders"), FILL.format(name="orders", count=self._rows))
            self._sql("VACUUM ANALYZE orders", "CHECKPOINT")
            self._copy()
            self._follow()

    def _copy(self) -> None:
        ours = repeat(self._copy_ours, WARM_UPS, REPETITIONS)
        floor = repeat(lambda _: self._copy_into_nothing(), WARM_UPS, REPETITIONS)
        jdbc = repeat(self._copy_by_jdbc, WARM_UPS, REPETITIONS)
        note = self._bench.note
        note("copy against COPY into nothing, 2 connections", ours, floor, 0.5, cpu=False)
        note("copy against Spark JDBC", ours, jdbc, 2.0, cpu=False)

    def _copy_ours(self, number: int) -> None:
        self._pipeline(f"copy{number}", "orders")
        self._sql(f"SELECT pg_drop_replication_slot('icestream_copy{number}')")

    def _copy_into_nothing(self) -> None:
        half = self._rows // 2
        readers = []
        for condition in ("<=", ">"):
            query = f"SELECT * FROM orders WHERE id {condition} {half}"
            command = f"COPY ({query}) TO STDOUT (FORMAT binary)"
            program = [str(self._programs / "psql"), "-X", self._server.dsn, "-c", command]
            readers.append(subprocess.Popen(program, stdout=subprocess.DEVNULL))
        for reader in readers:
            if reader.wait() != 0:
                raise RuntimeError("psql could not copy")

    def _copy_by_jdbc(self, number: int) -> None:
        dsn = parse_dsn(self._server.dsn)
        spark = self._bench.spark
        rows = (
            spark.read.format("jdbc")
            .option("url", f"jdbc:postgresql://{dsn.host}:{dsn.port}/{dsn.database}")
            .option("driver", "org.postgresql.Driver")
            .option("user", dsn.user)
            .option("password", dsn.password)
            .option("dbtable", "orders")
            .option("partitionColumn", "id")
            .option("lowerBound", 1)
            .option("upperBound", self._rows)
            .option("numPartitions", 2)
            .option("fetchsize", 10_000)
            .load()
        )
        rows.writeTo(f"bench.db.jdbc{number}").using("iceberg").create()

    def _follow(self) -> None:
        ours, remote, floor = [], [], []
        spool = {"spool": "s3://spools/bench", "spool_storage": self._store.iceberg_properties()}
        for number in range(WARM_UPS + REPETITIONS):
            name, other = f"follow{number}", f"follow{number}_s3"
            self._sql(TABLE.format(name=name), FILL.format(name=name, count=self._changes))
            self._pipeline(name, name)
            self._pipeline(other, name, **spool)
            self._sql(
                f"SELECT pg_create_logical_replication_slot('floor{number}', 'pgoutput')",
                CHANGE.format(
                    name=name,
                    transactions=self._changes // CHANGES_PER_TRANSACTION,
                    base=10 * self._changes,
                    rows=self._changes,
                ),
            )
            end = lsn_text(self._position())
            ours.append(repeat(lambda _, n=name: self._pipeline(n, n), 0, 1))
            remote.append(repeat(lambda _, n=name, o=other: self._pipeline(o, n, **spool), 0, 1))
            floor.append(repeat(lambda _, n=number, e=end: self._receive(n, e), 0, 1))
            for slot in (f"icestream_{name}", f"icestream_{other}", f"floor{number}"):
                self._sql(f"SELECT pg_drop_replication_slot('{slot}')")
            self._sql(f"DROP TABLE {name}")
        local, in_store, bare = (
            min(found[WARM_UPS:], key=lambda each: each.wall_seconds)
            for found in (ours, remote, floor)
        )
        note = self._bench.note
        note("following against pg_recvlogical", local, bare, 0.9, cpu=False)
        note("following with the spool on S3 against a local one", in_store, local, 0.8, cpu=False)

    def _receive(self, number: int, end: str) -> None:
        """PostgreSQL's own reader of the same changes, into nothing."""
        options = {
            "proto_version": "1",
            "publication_names": f'"icestream_follow{number}"',
            "binary": "true",
        }
        command = [
            str(self._programs / "pg_recvlogical"),
            *("--dbname", self._server.dsn, "--slot", f"floor{number}", "--start", "--no-loop"),
            *("--endpos", end, "--file", "/dev/null"),
            *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
        ]
        subprocess.run(command, check=True, capture_output=True)

    def _pipeline(self, name: str, table: str, **source: Any) -> None:
        tables = [f"public.{table}"]
        document = {
            name: {
                "source": {"postgres": {"dsn": self._server.dsn, "tables": tables, **source}},
                "sink": {
                    "iceberg": {
                        "catalog": self._bench.catalog,
                        "namespace": "db",
                        "tables": {f"public.{table}": {"table": name}},
                    }
                },
                "commit_interval": 1,
            }
        }
        open_pipeline(parse(document).pipelines[0], self._bench.spark).run(once=True)

    def _position(self) -> int:
        with Connection(parse_dsn(self._server.dsn)) as connection:
            connection.rows("SET synchronous_commit = on")
            connection.rows("SELECT pg_logical_emit_message(true, 'bench', '')")
            return int(connection.one("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))

    def _sql(self, *commands: str) -> None:
        with Connection(parse_dsn(self._server.dsn)) as connection:
            for command in commands:
                connection.rows(command)
