"""`make bench`: speed as ratios within one run, both sides warm and repeated equally.

    python -m bench [--scale 0.1] [--only write,json,commit,postgres,kafka,changelog,load]

Prints a table and keeps it as JSON in `bench/results/`, with the machine and the commit.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.changes import SHAPE, ParquetSplit, by_key, changes, rows, write_feed
from bench.kafka import KafkaBench
from bench.measure import Measured, median, repeat, resident_bytes
from bench.postgres import JDBC_DRIVER, PostgresBench
from bench.search import ChangelogBench, LoadBench
from icestream.change import AT, OP, SEQ, Op, fold
from icestream.config import PipelineConfig, open_pipeline, open_sink, parse
from icestream.epoch import Epoch
from icestream.frontier import Frontier
from icestream.java import jars
from icestream.sinks import Written
from icestream.spark import attach_catalog, packages, session
from icestream.worker import write_epoch

WARM_UPS = 2
REPETITIONS = 4
TABLE_ROWS = 5_000_000
CHANGES = 1_000_000
PARTS = ("write", "json", "commit", "postgres", "kafka", "changelog", "load")


class Bench:
    """One run: a session, a lake in a temporary folder, and what was found."""

    def __init__(self, folder: Path, scale: float):
        self.folder = folder
        self.table_rows, self.changes = int(TABLE_ROWS * scale), int(CHANGES * scale)
        self.catalog = {
            "type": "jdbc",
            "name": "bench",
            "uri": f"jdbc:sqlite:{folder / 'catalog.db'}",
            "warehouse": str(folder / "warehouse"),
            "jdbc.schema-version": "V1",
        }
        # The last jar is for a rival: Spark's own way to read PostgreSQL.
        needed = jars([*packages([self.catalog]), JDBC_DRIVER])
        conf = {"spark.driver.memory": "6g", "spark.jars": ",".join(map(str, needed))}
        self.spark: SparkSession = session([self.catalog], "local[2]", conf)
        attach_catalog(self.spark, "bench", self.catalog)
        self.spark.sql("CREATE NAMESPACE IF NOT EXISTS bench.db")
        self.found: list[dict[str, Any]] = []

    def config(self, name: str, files: Path) -> PipelineConfig:
        types = {column.name: str(column.type) for column in SHAPE.columns}
        document = {
            name: {
                "source": {
                    "cockroachdb": {
                        "files": str(files),
                        "columns": {name: types},
                        "keys": {name: ["id"]},
                    }
                },
                "sink": {"iceberg": {"catalog": self.catalog, "namespace": "db"}},
            }
        }
        return parse(document).pipelines[0]

    def note(self, what: str, ours: Measured, other: Measured, wanted: float, cpu: bool) -> None:
        """Keep and print how many times faster than the other we are."""
        wall = other.wall_seconds / ours.wall_seconds
        processor = other.cpu_seconds / ours.cpu_seconds
        met = wall >= wanted and (not cpu or processor >= wanted)
        self.found.append(
            {
                "what": what,
                "ours": [ours.wall_seconds, ours.cpu_seconds],
                "other": [other.wall_seconds, other.cpu_seconds],
                "wall_ratio": wall,
                "cpu_ratio": processor,
                "wanted": wanted,
                "met": met,
            }
        )
        _say(
            f"{what}: ours {ours.wall_seconds:.2f}/{ours.cpu_seconds:.2f} s wall/CPU, other "
            f"{other.wall_seconds:.2f}/{other.cpu_seconds:.2f}: {wall:.2f}x wall, "
            f"{processor:.2f}x CPU (wanted {wanted}x{' both' if cpu else ' wall'}): "
            f"{'met' if met else 'MISSED'}"
        )

    def note_number(self, what: str, number: float, wanted: str, met: bool) -> None:
        """Keep and print a number that is no comparison of two times."""
        self.found.append({"what": what, "number": number, "wanted": wanted, "met": met})
        _say(f"{what}: {number:.2f} (wanted {wanted}): {'met' if met else 'MISSED'}")

    def write_path(self) -> None:
        """Changes that lie as Parquet, from read to committed."""
        rounds = WARM_UPS + REPETITIONS
        parts = self._change_files("write", rounds)
        ours = self._ours(parts)
        bare = repeat(lambda n: self._bare(parts[n], n), WARM_UPS, REPETITIONS)
        merge = self._merge("merged", [f"parquet.`{p[0].parent}`" for p in parts])
        self.note("write path against MERGE INTO", ours, merge, 4.0, cpu=True)
        self.note("write path against bare pyarrow", ours, bare, 0.5, cpu=False)

    def json_files(self) -> None:
        """Changefeed JSON files, from listing to committed."""
        rounds = WARM_UPS + REPETITIONS
        feeds = []
        for number in range(rounds):
            folder = self.folder / "json" / str(number)
            write_feed(folder, self._changes(number), "feed", 8, number)
            feeds.append(folder)
        self._load("feed")
        ours = repeat(lambda n: self._run_feed(feeds[n]), WARM_UPS, REPETITIONS)
        merge = self._merge("json_merged", [self._json_view(feed) for feed in feeds])
        self.note("changefeed JSON against from_json and MERGE INTO", ours, merge, 2.0, cpu=False)

    def commits(self, count: int) -> None:
        """A thousand commits: time and the coordinator's memory must not grow."""
        config = self.config("many", self.folder / "none")
        sink = open_sink(config, self.spark)
        sink.claim([])
        sink.prepare("many", lambda: SHAPE)
        seconds, memory = [], {}
        lower = Frontier()
        for number in range(1, count + 1):
            upper = Frontier({"resolved": (number, 0)})
            epoch = Epoch(number=number, lower=lower, upper=upper)
            writer = sink.writer(epoch, ["many"])
            batch = self._tiny(number)
            reports = list(writer.write("many", "00000", batch))
            started = time.perf_counter()
            sink.commit(Written(epoch=epoch, reports=reports, writer=writer, labels={}))
            seconds.append(time.perf_counter() - started)
            lower = upper
            if number in (count // 10, count):
                gc.collect()
                memory[number] = resident_bytes(os.getpid()), self._heap_bytes()
        early, late = median(seconds[10:110]), median(seconds[count - 100 :])
        ratio = late / early
        grown = [after - before for before, after in zip(*memory.values(), strict=True)]
        self.found.append(
            {
                "what": f"commit {count} against commit 60",
                "early_seconds": early,
                "late_seconds": late,
                "ratio": ratio,
                "wanted": 1.5,
                "met": ratio <= 1.5,
                "python_grown_bytes": grown[0],
                "jvm_grown_bytes": grown[1],
            }
        )
        _say(
            f"commits: median {early * 1000:.0f} ms early, {late * 1000:.0f} ms late, "
            f"{ratio:.2f}x (wanted at most 1.5x): {'met' if ratio <= 1.5 else 'MISSED'}; "
            f"Python grew by {grown[0] / 2**20:.0f} MiB, "
            f"the JVM's heap by {grown[1] / 2**20:.0f} MiB"
        )

    def _heap_bytes(self) -> int:
        """What is alive in the JVM; its resident size says only how much garbage it may keep."""
        runtime = self.spark._jvm.java.lang.Runtime.getRuntime()
        for _ in range(3):
            runtime.gc()
        return int(runtime.totalMemory() - runtime.freeMemory())

    def _change_files(self, name: str, rounds: int) -> list[list[Path]]:
        found = []
        for number in range(rounds):
            folder = self.folder / name / str(number)
            folder.mkdir(parents=True)
            parts = by_key(self._changes(number), 2)
            paths = [folder / f"{part}.parquet" for part in range(len(parts))]
            for path, part in zip(paths, parts, strict=True):
                pq.write_table(part, path)
            found.append(paths)
        return found

    def _changes(self, number: int) -> pa.Table:
        return changes(self.changes, self.table_rows, number)

    def _ours(self, parts: list[list[Path]]) -> Measured:
        self._load("ours")
        sink = open_sink(self.config("ours", self.folder / "none"), self.spark)
        sink.claim(["ours"])
        sink.prepare("ours", lambda: SHAPE)

        def work(number: int) -> None:
            lower = Frontier({"resolved": (10 + number, 0)})
            upper = Frontier({"resolved": (11 + number, 0)})
            epoch = Epoch(number=10 + number, lower=lower, upper=upper)
            splits = [ParquetSplit(table="ours", path=str(path)) for path in parts[number]]
            writer = sink.writer(epoch, ["ours"])
            outcome = write_epoch(self.spark, splits, writer, True, "bench")
            written = Written(epoch=epoch, reports=outcome.reports, writer=writer, labels={})
            sink.commit(written)

        return repeat(work, WARM_UPS, REPETITIONS)

    def _bare(self, paths: list[Path], number: int) -> None:
        """What a script without any guarantee would do: fold, and write two files."""
        table = pa.concat_tables([pq.read_table(path, memory_map=True) for path in paths])
        folded = fold(table, ["id"])
        folder = self.folder / "bare"
        folder.mkdir(exist_ok=True)
        kept = folded.kept.drop_columns([OP, AT, SEQ])
        pq.write_table(kept, folder / f"data-{number}.parquet", compression="zstd")
        keys = folded.deleted.select(["id"])
        pq.write_table(keys, folder / f"deletes-{number}.parquet", compression="zstd")

    def _load(self, name: str) -> None:
        """A table of the pipeline's own with the rows that the changes refer to."""
        sink = open_sink(self.config(name, self.folder / "none"), self.spark)
        sink.claim([])
        sink.prepare(name, lambda: SHAPE)
        base = self._table_rows()
        count = base.num_rows
        whole = base.append_column(OP, pa.array(np.full(count, Op.INSERT, np.int8)))
        whole = whole.append_column(AT, pa.array(np.zeros(count, np.int64)))
        whole = whole.append_column(SEQ, pa.array(np.zeros(count, np.int64)))
        epoch = Epoch(number=1, lower=Frontier(), upper=Frontier({"resolved": (1, 0)}))
        writer = sink.writer(epoch, [name])
        reports = list(writer.write(name, "00000", whole))
        sink.commit(Written(epoch=epoch, reports=reports, writer=writer, labels={}))

    def change(self, name: str, count: int, rows_there: int) -> None:
        """Commit a second epoch of changes to a table that was loaded: deletes by value."""
        sink = open_sink(self.config(name, self.folder / "none"), self.spark)
        sink.claim([name])
        sink.prepare(name, lambda: SHAPE)
        lower, upper = (Frontier({"resolved": (number, 0)}) for number in (1, 2))
        epoch = Epoch(number=2, lower=lower, upper=upper)
        writer = sink.writer(epoch, [name])
        reports = list(writer.write(name, "00000", changes(count, rows_there, 1)))
        sink.commit(Written(epoch=epoch, reports=reports, writer=writer, labels={}))

    def _table_rows(self) -> pa.Table:
        return rows(np.arange(self.table_rows, dtype=np.int64), 99)

    def _merge(self, name: str, sources: list[str]) -> Measured:
        """What a user would write by hand: the last change per key, merged on read."""
        path = self.folder / f"{name}.parquet"
        pq.write_table(self._table_rows(), path)
        self.spark.sql(
            f"CREATE TABLE bench.db.{name} USING iceberg TBLPROPERTIES "
            "('format-version'='2', 'write.merge.mode'='merge-on-read', "
            "'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read') "
            f"AS SELECT * FROM parquet.`{path}`"
        )
        names = [column.name for column in SHAPE.columns]
        assignments = ", ".join(f"t.{column} = s.{column}" for column in names)
        values = ", ".join(f"s.{column}" for column in names)

        def work(number: int) -> None:
            self.spark.sql(
                f"""MERGE INTO bench.db.{name} t USING (
                  SELECT * FROM (SELECT *, row_number() OVER (
                    PARTITION BY id ORDER BY `{AT}` DESC) AS rank FROM {sources[number]})
                  WHERE rank = 1) s ON t.id = s.id
                WHEN MATCHED AND s.`{OP}` = {int(Op.DELETE)} THEN DELETE
                WHEN MATCHED THEN UPDATE SET {assignments}
                WHEN NOT MATCHED AND s.`{OP}` <> {int(Op.DELETE)}
                  THEN INSERT ({", ".join(names)}) VALUES ({values})"""
            )

        return repeat(work, WARM_UPS, REPETITIONS)

    def _json_view(self, folder: Path) -> str:
        """The same files as a user would read them with Spark."""
        kinds = {"timestamptz": "timestamp", "long": "bigint"}
        columns = [(c.name, kinds.get(str(c.type), str(c.type))) for c in SHAPE.columns]
        row = ", ".join(f"{name}: {kind}" for name, kind in columns)
        schema = f"after struct<{row}>, key array<bigint>, updated string"
        names = ", ".join(f"row.after.{name}" for name, _ in columns if name != "id")
        view = f"feed_{folder.name}"
        self.spark.sql(
            f"""CREATE OR REPLACE TEMP VIEW {view} AS
            SELECT row.key[0] AS id, {names},
              CAST(row.updated AS DECIMAL(38, 10)) AS `{AT}`,
              IF(row.after IS NULL, {int(Op.DELETE)}, {int(Op.UPSERT)}) AS `{OP}`
            FROM (SELECT from_json(value, '{schema}') AS row
                  FROM text.`{folder}/*/*.ndjson`)"""
        )
        return view

    def _run_feed(self, folder: Path) -> None:
        pipeline = open_pipeline(self.config("feed", folder), self.spark)
        pipeline.run(once=True)

    def _tiny(self, number: int) -> pa.Table:
        batch = rows(np.arange(3, dtype=np.int64), number)
        batch = batch.append_column(OP, pa.array(np.full(3, Op.UPSERT, np.int8)))
        batch = batch.append_column(AT, pa.array(np.full(3, number, np.int64)))
        return batch.append_column(SEQ, pa.array(np.zeros(3, np.int64)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--only", default=",".join(PARTS), help="which parts to run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="icestream-bench-") as folder:
        bench = Bench(Path(folder), options.scale)
        parts = {
            "write": bench.write_path,
            "json": bench.json_files,
            "commit": lambda: bench.commits(max(300, int(1000 * options.scale))),
            "postgres": lambda: PostgresBench(bench, Path(folder), options.scale).run(),
            "kafka": lambda: KafkaBench(bench, Path(folder), options.scale).run(),
            "changelog": lambda: ChangelogBench(bench, options.scale).run(),
            "load": lambda: LoadBench(bench, Path(folder), options.scale).run(),
        }
        for name in options.only.split(","):
            parts[name]()
        bench.spark.stop()
    _keep(bench.found, options.scale)
    return 0


def _keep(found: list[dict[str, Any]], scale: float) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {
        "commit": commit,
        "machine": {"cores": os.cpu_count(), "processor": platform.processor()},
        "scale": scale,
        "results": found,
    }
    path = results / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1))
    _say(f"kept in {path.name}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
