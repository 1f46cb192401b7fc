"""The main job end to end, with embedded parts: a busy PostgreSQL into a local lake.

A shop is opened in an embedded PostgreSQL and trades without a pause while a pipeline copies its
tables and then follows their changes. At the end the shop closes, the pipeline is started once more
to take what is left, from what the lake remembers alone, and every row and column of the source is
compared with the lake, which Spark SQL reads.
"""

import json
import shutil
import signal
import statistics
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    FractionalType,
    TimestampNTZType,
    TimestampType,
)

from icestream.config import Config, catalogs, open_pipeline, open_session, parse
from icestream.errors import ConfigInvalid
from icestream.pipeline import Pipeline
from icestream.samples.postgres import EmbeddedPostgres
from icestream.samples.shop import TABLES, Business, open_shop
from icestream.sources.postgres.connection import (
    Connection,
    lsn_text,
    parse_dsn,
    parse_lsn,
    quoted,
)
from icestream.spark import attach_catalog

SECONDS = 20.0
SEED = 7
_MARK = ".icestream-demo"
_CATALOG, _NAMESPACE = "icestream", "shop"
_COMMIT_SECONDS = 1.0
_PAUSE_SECONDS = 0.08
_LOOK_SECONDS = 0.2
_STATUS_SECONDS = 5.0
# The shop trades at least for this long after its tables are copied, unless that takes too long.
_STREAM_SECONDS_MIN = 5.0
_COPY_SECONDS_MAX = 120.0
_HEADINGS = ("state", "table", "LSN", "epoch", "snapshot", "lag")

Row = tuple[Any, ...]


class Served(Protocol):
    """A status server that has been started."""

    address: str

    def close(self) -> None:
        """Stop serving."""


def run_demo(
    folder: str, seconds: float | None, serve: Callable[[Sequence[Pipeline]], Served]
) -> int:
    """Run the demo; returns 0 only when source and lake are equal."""
    home = _fresh_folder(Path(folder))
    limit = seconds if seconds is not None else (None if sys.stdout.isatty() else SECONDS)
    _say(f"starting PostgreSQL in {home / 'postgres'} and opening a shop in it ...")
    with EmbeddedPostgres(home / "postgres") as server:
        open_shop(server.dsn)
        _say("starting Spark (the first start also fetches Iceberg's jar) ...")
        config = configuration(home, server.dsn)
        spark = open_session(config, config.pipelines)
        try:
            attach_catalog(spark, _CATALOG, catalogs(config.pipelines)[0])
            return _Demo(config, spark, server.dsn).run(limit, serve)
        finally:
            spark.stop()


class _Demo:
    def __init__(self, config: Config, spark: SparkSession, dsn: str):
        self._config = config
        self._spark = spark
        self._dsn = dsn
        self._pipeline = open_pipeline(config.pipelines[0], spark)
        self._shop = Business(dsn, SEED, _PAUSE_SECONDS)
        self._error: Exception | None = None
        self._interrupted = threading.Event()
        self._shown: set[object] = set()
        self._durable_at: dict[int, float] = {}
        self._copied_at: float | None = None

    def run(self, limit: float | None, serve: Callable[[Sequence[Pipeline]], Served]) -> int:
        """Trade for `limit` seconds, or until Ctrl-C, then compare."""
        started = time.time()
        with closing(serve([self._pipeline])) as served:
            _say(f"status: {served.address}/health and {served.address}/metrics")
            _say("the shop trades" + ("" if limit is not None else "; Ctrl-C closes it"))
            worker = threading.Thread(target=self._run_pipeline, name="pipeline")
            self._shop.open()
            worker.start()
            try:
                self._watch(started, limit)
            finally:
                self._shop.close()
                closed_at = time.time()
                self._pipeline.stop()
                worker.join()
        self._raise_errors()
        _say("the shop is closed; the pipeline starts again and takes what is left ...")
        self._pipeline = open_pipeline(self._config.pipelines[0], self._spark)
        self._pipeline.run(once=True)
        self._show_commits()
        self._show_status()
        equal = self._compare()
        self._report(started, closed_at)
        sys.stdout.write("source and lake are equal\n" if equal else "source and lake differ\n")
        return 0 if equal else 1

    def _run_pipeline(self) -> None:
        try:
            self._pipeline.run()
        except Exception as error:
            self._error = error

    def _raise_errors(self) -> None:
        for error in (self._error, self._shop.failed):
            if error is not None:
                raise error

    def _watch(self, started: float, limit: float | None) -> None:
        """Show what happens until it is time to end."""
        # Spark's own way with Ctrl-C cancels its jobs, and the epoch that is being written.
        former = signal.signal(signal.SIGINT, lambda *_: self._interrupted.set())
        shown = time.time()
        try:
            while not self._interrupted.wait(_LOOK_SECONDS):
                if self._error is not None or self._shop.failed is not None:
                    return
                self._show_commits()
                if time.time() - shown > _STATUS_SECONDS:
                    shown = time.time()
                    self._show_status()
                if limit is not None and time.time() - started >= limit and self._seen(started):
                    return
        finally:
            signal.signal(signal.SIGINT, former)

    def _seen(self, started: float) -> bool:
        """Whether there was something to see of the stream, or no hope of it."""
        if self._copied_at is None:
            return time.time() - started > _COPY_SECONDS_MAX
        return time.time() - self._copied_at > _STREAM_SECONDS_MIN

    def _show_commits(self) -> None:
        for table, commit in sorted(_tables(self._pipeline).items()):
            if commit["snapshot_id"] in self._shown:
                continue
            self._shown.add(commit["snapshot_id"])
            lsn, at = _lsn(commit), float(commit["committed_at"])
            self._durable_at[lsn] = min(at, self._durable_at.get(lsn, at))
            if self._copied_at is None and "to copy" not in str(commit["position"]):
                self._copied_at = at
            _say(
                f"  committed {commit['position']}  ->  {table}  epoch {commit['epoch']}  "
                f"snapshot {commit['snapshot_id']}"
            )

    def _show_status(self) -> None:
        rows: list[tuple[str, ...]] = [_HEADINGS]
        for table, commit in sorted(_tables(self._pipeline).items()):
            lsn, at = _lsn(commit), float(commit["committed_at"])
            place = bisect_left(self._shop.sales, lsn, key=lambda sale: sale.lsn)
            lag = f"{at - self._shop.sales[place - 1].at:.1f} s" if place else ""
            cells = (commit["state"], table, lsn_text(lsn), commit["epoch"], commit["snapshot_id"])
            rows.append((*map(str, cells), lag))
        if len(rows) > 1:
            _say(_as_table(rows))

    def _compare(self) -> bool:
        equal = True
        with Connection(parse_dsn(self._dsn)) as connection:
            for table in TABLES:
                difference = compare(self._spark, connection, table)
                equal = equal and not difference.texts
                verdict = "; ".join(difference.texts) or "equal to the source"
                _say(f"  {table:10}{difference.rows:>8,} rows: {verdict}")
        return equal

    def _report(self, started: float, closed_at: float) -> None:
        """Say what was moved, how fast, and how long it took to be durable."""
        histories = [_history(self._spark, table) for table in TABLES]
        # A copy leaves the stream where it is, so the first LSN is that of all copies.
        first = min(lsn for history in histories for lsn, _ in history)
        copied = sum(rows for history in histories for lsn, rows in history if lsn == first)
        snapshots = sum(len(history) for history in histories)
        sales = [sale for sale in self._shop.sales if sale.lsn > first]
        changes, trading = sum(sale.changes for sale in sales), closed_at - started
        events = ", ".join(f"{count} x {name}" for name, count in self._shop.events.items())
        lags = self._lags(first)
        lines = [
            f"{copied:,} rows of {len(TABLES)} tables copied"
            + (f" in {self._copied_at - started:.1f} s" if self._copied_at else ""),
            f"{changes:,} changes in {len(sales):,} transactions streamed in {trading:.0f} s "
            f"({changes / trading:,.0f} a second), among them {events}",
            f"{snapshots} snapshots, one per epoch and table that changed",
        ]
        if lags:
            lines.append(
                f"a transaction was durable after {statistics.median(lags):.1f} s (median), "
                f"{max(lags):.1f} s (longest); the commit interval is {_COMMIT_SECONDS:g} s"
            )
        sys.stdout.write("".join(f"{line}\n" for line in lines))

    def _lags(self, first: int) -> list[float]:
        """For each transaction of the stream the time until a commit covered it."""
        bounds = sorted(self._durable_at)
        lags = []
        for sale in self._shop.sales:
            place = bisect_left(bounds, sale.lsn + 1)
            if sale.lsn > first and place < len(bounds):
                lags.append(max(0.0, self._durable_at[bounds[place]] - sale.at))
        return lags


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What comparing a table has shown: its rows in the lake, and no texts when all is equal."""

    rows: int
    texts: Sequence[str]


def compare(spark: SparkSession, connection: Connection, table: str) -> Difference:
    """Compare every column of every row of a table, each side read by its own SQL."""
    lake = spark.table(f"{_CATALOG}.{_NAMESPACE}.{table}")
    names = [
        str(row[0])
        for row in connection.rows(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = CAST(:name AS regclass) "
            "AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum",
            name=table,
        )
    ]
    other = sorted(set(names) ^ set(lake.columns))
    if other:
        return Difference(rows=lake.count(), texts=[f"columns on one side only: {other}"])
    kinds = {name: lake.schema[name].dataType for name in names}
    arrays = {n for n, name in enumerate(names) if isinstance(kinds[name], ArrayType)}
    ours = lake.selectExpr(*(_in_lake(name, kinds[name]) for name in names)).collect()
    theirs = connection.rows(
        f"SELECT {', '.join(_in_source(name, kinds[name]) for name in names)} FROM {quoted(table)}"
    )
    found = Counter(_comparable(row, arrays) for row in ours)
    wanted = Counter(_comparable(row, arrays) for row in theirs)
    missing, surplus = wanted - found, found - wanted
    texts = []
    if missing or surplus:
        columns = [
            name
            for n, name in enumerate(names)
            if Counter(row[n] for row in missing.elements())
            != Counter(row[n] for row in surplus.elements())
        ]
        texts = [
            f"{missing.total()} rows only in the source, {surplus.total()} only in the lake, "
            f"with differences in {', '.join(columns)}"
        ]
    return Difference(rows=len(ours), texts=texts)


def _comparable(row: Sequence[Any], arrays: set[int]) -> Row:
    """A row with its arrays, which come as JSON, in one spelling."""
    return tuple(
        json.dumps(json.loads(value)) if n in arrays and value is not None else value
        for n, value in enumerate(row)
    )


def _in_lake(name: str, kind: DataType) -> str:
    """Spark SQL for a column's value in a form that PostgreSQL can give as well."""
    column = f"`{name}`"
    if isinstance(kind, BinaryType):
        return f"lower(hex({column}))"
    if isinstance(kind, TimestampType):
        return f"unix_micros({column})"
    if isinstance(kind, TimestampNTZType):
        return f"date_format({column}, 'yyyy-MM-dd HH:mm:ss.SSSSSS')"
    if isinstance(kind, ArrayType):
        return f"to_json({column})"
    if isinstance(kind, FractionalType) and not isinstance(kind, DecimalType):
        return f"double({column})"
    return f"string({column})"


def _in_source(name: str, kind: DataType) -> str:
    """PostgreSQL's counterpart of `_in_lake`."""
    column = quoted(name)
    if isinstance(kind, BinaryType):
        return f"encode({column}, 'hex')"
    if isinstance(kind, TimestampType):
        return f"(extract(epoch FROM {column}) * 1000000)::bigint"
    if isinstance(kind, TimestampNTZType):
        return f"to_char({column}, 'YYYY-MM-DD HH24:MI:SS.US')"
    if isinstance(kind, ArrayType):
        return f"array_to_json({column})::text"
    if isinstance(kind, FractionalType) and not isinstance(kind, DecimalType):
        return f"{column}::float8"
    if isinstance(kind, BooleanType):
        return f"{column}::text"
    # A cast to text would cut the padding of char(n), which belongs to the value.
    return f"CASE WHEN {column} IS NOT NULL THEN format('%s', {column}) END"


def _history(spark: SparkSession, table: str) -> list[tuple[int, int]]:
    """For each epoch in a table's history its LSN and how many rows it added."""
    found = spark.sql(
        "SELECT summary['postgres.lsn'], coalesce(bigint(summary['added-records']), 0) "
        f"FROM {_CATALOG}.{_NAMESPACE}.{table}.snapshots WHERE summary['icestream.batch-id'] != ''"
    ).collect()
    return [(parse_lsn(row[0]), row[1]) for row in found if row[0]]


def _tables(pipeline: Pipeline) -> Mapping[str, Mapping[str, Any]]:
    health: Mapping[str, Any] = pipeline.health.to_json()
    tables: Mapping[str, Mapping[str, Any]] = health["tables"]
    return tables


def _lsn(commit: Mapping[str, Any]) -> int:
    return parse_lsn(str(commit["position"]).partition(",")[0])


def _as_table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(f"  | {line.rstrip()}" for line in lines)


def configuration(home: Path, dsn: str) -> Config:
    """The demo's pipeline, with all that it keeps in a folder."""
    catalog = {
        "type": "jdbc",
        "name": _CATALOG,
        "uri": f"jdbc:sqlite:{home.resolve() / 'catalog.db'}",
        "warehouse": str(home.resolve() / "warehouse"),
    }
    source = {"postgres": {"dsn": dsn, "tables": [f"public.{table}" for table in TABLES]}}
    sink = {"iceberg": {"catalog": catalog, "namespace": _NAMESPACE}}
    return parse({"demo": {"source": source, "sink": sink, "commit_interval": _COMMIT_SECONDS}})


def _fresh_folder(home: Path) -> Path:
    if home.exists() and not (home / _MARK).exists() and any(home.iterdir()):
        raise ConfigInvalid(
            f"{home} exists and is not a demo's folder", hint="Name another with --folder."
        )
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / _MARK).touch()
    return home


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
