"""The main job end to end, with embedded parts: real changefeed captures into a local lake.

Captures of a real CockroachDB are written as a growing changefeed folder while a pipeline turns
each resolved timestamp into one Iceberg snapshot per table. At the end source and lake are
compared: the lake is read by Spark SQL, the source's state is worked out from the captured lines.
"""

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from icestream.config import Config, catalogs, open_pipeline, open_session, parse
from icestream.errors import ConfigInvalid, IcestreamError
from icestream.pipeline import Pipeline
from icestream.samples import FeedFolder, Row, capture, play, resolved_of
from icestream.spark import attach_catalog

# Captures with timestamps, in the order in which the server made them: they continue each other.
CAPTURES = (
    "01_wrapped_updated_diff_mvcc_resolved.jsonl",
    "06_bare.jsonl",
    "09_schema_change_backfill.jsonl",
    "10_schema_change_stop.jsonl",
    "12_truncate.jsonl",
    "17_two_tables.jsonl",
    "20_cursor.jsonl",
)
_MARK = ".icestream-demo"
_PACE_SECONDS = 0.3
_SETTLE_SECONDS_MAX = 120.0
_HLC = re.compile(r"\b(\d{19})\.(\d{10})\b")
_DAY = 86_400_000_000_000

State = dict[str, dict[str, dict[str, Any]]]


def run_demo(folder: str, seconds: float | None) -> int:
    """Run the demo; returns 0 only when source and lake are equal."""
    home = _fresh_folder(Path(folder))
    endless = seconds is None and sys.stdout.isatty()
    config = _config(home)
    _say(f"a changefeed grows in {home / 'feed'}, the lake in {home / 'warehouse'}")
    _say("starting Spark (the first start also fetches Iceberg's jar) ...")
    spark = open_session(config, config.pipelines)
    try:
        return _Demo(home, config, spark).run(endless, seconds or 0.0)
    finally:
        spark.stop()


class _Demo:
    def __init__(self, home: Path, config: Config, spark: SparkSession):
        self._spark = spark
        self._feed = FeedFolder(home / "feed")
        self._pipeline = open_pipeline(config.pipelines[0], spark)
        self._error: IcestreamError | None = None
        self._rows: list[Row] = []
        self._shown: set[Any] = set()
        attach_catalog(spark, "icestream", catalogs(config.pipelines)[0])

    def run(self, endless: bool, seconds: float) -> int:
        worker = threading.Thread(target=self._run_pipeline, name="pipeline")
        worker.start()
        started = time.monotonic()
        try:
            for shift in _rounds(endless, seconds):
                self._play(shift)
            self._wait()
        except KeyboardInterrupt:
            self._wait()
        finally:
            elapsed = time.monotonic() - started
            self._pipeline.stop()
            worker.join()
        if self._error:
            raise self._error
        return self._compare(elapsed)

    def _run_pipeline(self) -> None:
        try:
            self._pipeline.run()
        except IcestreamError as error:
            self._error = error

    def _play(self, shift: int) -> None:
        """Write all captures, moved in time, at a pace that one can watch."""
        rows = [_shifted(row, shift) for name in CAPTURES for row in capture(name)]
        self._rows += rows
        for _ in play(rows, self._feed):
            time.sleep(_PACE_SECONDS)
            self._show_commits()

    def _wait(self) -> None:
        """Until everything written is durable."""
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        wanted = _last_positions(self._rows)
        while time.monotonic() < deadline and not self._error:
            self._show_commits()
            tables = _tables(self._pipeline)
            if all(str(tables.get(t, {}).get("position", "")) >= p for t, p in wanted.items()):
                return
            time.sleep(_PACE_SECONDS)

    def _show_commits(self) -> None:
        for table, commit in sorted(_tables(self._pipeline).items()):
            if commit["snapshot_id"] in self._shown:
                continue
            self._shown.add(commit["snapshot_id"])
            _say(
                f"  resolved {commit['position']}  ->  {table:4} epoch {commit['epoch']:<4} "
                f"snapshot {commit['snapshot_id']}"
            )

    def _compare(self, elapsed: float) -> int:
        expected, changes = _state(self._rows), sum(row.table is not None for row in self._rows)
        equal, rows, snapshots = True, 0, 0
        for table, wanted in sorted(expected.items()):
            name = f"icestream.demo.{table}"
            found = {
                str([row["id"]]): _comparable(row)
                for row in (r.asDict() for r in self._spark.table(name).collect())
            }
            count = self._spark.sql(
                f"SELECT count(*) FROM {name}.snapshots WHERE summary['icestream.batch-id'] != ''"
            ).collect()[0][0]
            same = found == {key: _comparable(row) for key, row in wanted.items()}
            equal, rows, snapshots = equal and same, rows + len(found), snapshots + count
            _say(f"  {table:4} {len(found)} rows, {count} snapshots: {_verdict(same)}")
        _say(
            f"{changes} changes became {snapshots} snapshots and {rows} rows in {elapsed:.0f} s; "
            f"the last resolved timestamp was durable {self._lag()} after it was written"
        )
        sys.stdout.write(f"source and lake are {'equal' if equal else 'NOT equal'}\n")
        return 0 if equal else 1

    def _lag(self) -> str:
        newest = max((p.stat().st_mtime for p in self._feed.path.rglob("*.RESOLVED")), default=0.0)
        commits = [float(str(t["committed_at"])) for t in _tables(self._pipeline).values()]
        return f"{max(0.0, max(commits, default=newest) - newest):.1f} s"


def _tables(pipeline: Pipeline) -> Mapping[str, Mapping[str, Any]]:
    health: Mapping[str, Any] = pipeline.health.to_json()
    tables: Mapping[str, Mapping[str, Any]] = health["tables"]
    return tables


def _rounds(endless: bool, seconds: float) -> Iterator[int]:
    """How far each round of captures is moved in time."""
    started = time.monotonic()
    yield 0
    number = 1
    while endless or time.monotonic() - started < seconds:
        yield number * _DAY
        number += 1


def _shifted(row: Row, shift: int) -> Row:
    value = _HLC.sub(lambda found: f"{int(found[1]) + shift}.{found[2]}", row.value)
    return Row(table=row.table, key=row.key, value=value)


def _state(rows: list[Row]) -> State:
    """What the captured lines leave in each table, up to the last resolved timestamp."""
    resolved = max(at for row in rows if row.table is None and (at := resolved_of(row.value)))
    changes: dict[tuple[str, str], tuple[str, dict[str, Any] | None]] = {}
    for row in rows:
        if row.table is None:
            continue
        updated, after = _change(row.value)
        if updated > f"{resolved[0]}.{resolved[1]:010d}":
            continue
        if updated >= changes.get((row.table, row.key), ("", None))[0]:
            changes[row.table, row.key] = (updated, after)
    state: State = {}
    for (table, key), (_, after) in changes.items():
        state.setdefault(table, {})
        if after is not None:
            state[table][key] = after
    return state


def _change(value: str) -> tuple[str, dict[str, Any] | None]:
    message = json.loads(value, parse_float=Decimal)
    if "__crdb__" not in message:
        return message["updated"], message["after"]
    meta = message.pop("__crdb__")
    return meta["updated"], message or None


def _last_positions(rows: list[Row]) -> dict[str, str]:
    """For each table the timestamp of its last change that is resolved."""
    resolved = max(at for row in rows if row.table is None and (at := resolved_of(row.value)))
    limit = f"{resolved[0]}.{resolved[1]:010d}"
    last: dict[str, str] = {}
    for row in rows:
        if row.table is not None and (updated := _change(row.value)[0]) <= limit:
            last[row.table] = max(last.get(row.table, ""), updated)
    return last


def _comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its nulls: a column that the source dropped stays in the lake as null."""
    return {name: value for name, value in row.items() if value is not None}


def _verdict(same: bool) -> str:
    return "equal to the source" if same else "DIFFERENT from the source"


def _config(home: Path) -> Config:
    catalog = {
        "type": "jdbc",
        "name": "icestream",
        "uri": f"jdbc:sqlite:{home.resolve() / 'catalog.db'}",
        "warehouse": str(home.resolve() / "warehouse"),
    }
    source = {"cockroachdb": {"files": str(home.resolve() / "feed")}}
    sink = {"iceberg": {"catalog": catalog, "namespace": "demo"}}
    return parse({"demo": {"source": source, "sink": sink, "commit_interval": "PT0.5S"}})


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
