"""The pipeline that the fault tests hurt: `shop`, from a random changefeed into a REST catalog.

It runs in this process, where a crash is an error that nobody catches, or as a process of its own,
where a crash is kill -9. Its catalog is reached through a proxy that can lose answers.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from icestream.config import PipelineConfig, open_pipeline, open_sink, parse
from icestream.epoch import Progress
from icestream.failpoints import killed_at
from icestream.pipeline import Pipeline
from tests.faults.checking import FOREIGN_IDS_FROM, PIPELINE, assert_exact, published
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.proxy import Proxy
from tests.running import QUICK, for_pipelines
from tests.servers import RestCatalog

REPOSITORY = Path(__file__).parents[2]
KILLED = -signal.SIGKILL
# A run takes seconds; on a busy machine the start of Spark alone may take minutes.
RUN_SECONDS_MAX = 480.0
# A process that lives for seconds has nothing of a compiler that pays off later.
SPARK = {
    "master": "local[2]",
    "conf": {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **QUICK,
    },
}


@dataclass(kw_only=True)
class Shop:
    """One pipeline, its changefeed and the way to its catalog."""

    lake: Lake
    rest: RestCatalog
    proxy: Proxy
    namespace: str
    folder: Path
    seed: int = 1
    tables: Sequence[str] = ("orders",)
    sink: Mapping[str, Any] = field(default_factory=dict)
    catalog: Mapping[str, str] = field(default_factory=dict)
    with_before: bool = False
    feed: RandomFeed = field(init=False)

    def __post_init__(self) -> None:
        self.feed = RandomFeed.create(
            self.folder / "feed", self.seed, tables=self.tables, with_before=self.with_before
        )

    def epochs(self, count: int, changes: int = 10) -> None:
        """Let the feed go on by so many resolved timestamps."""
        for _ in range(count):
            self.feed.epoch(changes)

    def name(self, table: str = "orders") -> str:
        """A table's name for the lake."""
        return f"{self.namespace}.{table}"

    def sql_name(self, table: str = "orders") -> str:
        """A table's name in SQL."""
        return self.lake.table(self.name(table))

    # In this process

    def config(self) -> PipelineConfig:
        """The pipeline's configuration."""
        return parse(self.document()).pipelines[0]

    def pipeline(self) -> Pipeline:
        """A new run of the pipeline, not started yet."""
        return open_pipeline(self.config(), for_pipelines(self.lake.spark))

    def run(self) -> None:
        """Run once in this process."""
        self.pipeline().run(once=True)

    def successor(self) -> "Shop":
        """The same pipeline on another way to the catalog, where nothing happens to it."""
        catalog = {**self.catalog, "uri": self.rest.uri}
        other = replace(self, catalog=catalog)
        other.feed = self.feed
        return other

    def elsewhere(self) -> "Shop":
        """A pipeline like this one with nothing done yet, in a namespace of its own."""
        folder, namespace = self.folder / "elsewhere", f"{self.namespace}x"
        return replace(self, folder=folder, namespace=namespace)

    def settle_rollback(self, table: str, *, replay: bool) -> Progress:
        """What `icestream rollback` does."""
        return open_sink(self.config(), self.lake.spark).settle_rollback(table, replay)

    # As a process of its own

    def document(self) -> dict[str, Any]:
        """The pipeline file."""
        catalog = {**self.rest.catalog_properties(uri=self.proxy.url), **self.catalog}
        sink = {"catalog": catalog, "namespace": self.namespace, **self.sink}
        source = {"files": str(self.feed.folder.path), "tables": list(self.tables)}
        pipeline = {"source": {"cockroachdb": source}, "sink": {"iceberg": sink}}
        return {PIPELINE: pipeline, "spark": SPARK}

    def start(self, *arguments: str, failpoints: str = "") -> "Process":
        """Start `icestream` with these arguments and the pipeline file."""
        file = self.folder / "pipelines.yaml"
        file.write_text(yaml.safe_dump(self.document()))
        return Process([*arguments, str(file)], failpoints)

    def command(self, *arguments: str, failpoints: str = "") -> "Ended":
        """Run `icestream` with these arguments and the pipeline file to its end."""
        return self.start(*arguments, failpoints=failpoints).wait()

    # What happens to it

    def on_commit(self, table: str, number: int, arm: Callable[[], object]) -> None:
        """Call `arm` so that the rules it adds meet the table's commit of that number first.

        Every commit from now on counts: claims and schema changes as well as epochs.
        """
        if number == 1:
            arm()
            return
        passed = []

        def count() -> None:
            passed.append(table)
            if len(passed) == number - 1:
                arm()

        self.proxy.on("POST", self.commit_path(table), times=number - 1).call_before(count)

    def commit_path(self, table: str = "orders") -> str:
        """What the path of a commit to the table matches."""
        return rf"/namespaces/{self.namespace}/tables/{table}$"

    def roll_back(self, table: str, epochs: int) -> None:
        """Take a table back, by Spark, to the snapshot of an epoch counted from one."""
        snapshot_id = published(self.lake, self.name(table))[epochs - 1]["snapshot_id"]
        self.call("rollback_to_snapshot", table, f"snapshot_id => {snapshot_id}")

    def compact(self, table: str = "orders") -> None:
        """Rewrite all data files of a table, by Spark."""
        self.call("rewrite_data_files", table, "options => map('rewrite-all', 'true')")

    def call(self, procedure: str, table: str, arguments: str) -> None:
        """Call one of Iceberg's procedures on a table, in Spark."""
        named = f"table => '{self.name(table)}', {arguments}"
        self.lake.sql(f"CALL {self.lake.name}.system.{procedure}({named})")

    def append_foreign_row(self, table: str = "orders") -> int:
        """Append a row as somebody else; returns its id."""
        row_id = FOREIGN_IDS_FROM + random.SystemRandom().randrange(FOREIGN_IDS_FROM)
        self.lake.sql(f"INSERT INTO {self.sql_name(table)} (id) VALUES ({row_id})")
        return row_id

    def foreign_ids(self, table: str = "orders") -> set[int]:
        """The ids of the rows that somebody else appended."""
        rows = self.lake.rows(self.name(table))
        return {row["id"] for row in rows if row["id"] >= FOREIGN_IDS_FROM}

    def assert_exact(self, ignoring: Sequence[str] = ()) -> None:
        """The lake holds exactly what the oracle says."""
        assert_exact(self.lake, self.namespace, self.feed, self.tables, ignoring)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended, and what it said."""

    exit_code: int
    stdout: str
    stderr: str

    def killed_at(self, failpoint: str) -> bool:
        """Whether the failpoint's kill ended it: by its signal, and at its place and pass."""
        name, _, action = failpoint.partition("=")
        kind, _, number = action.partition("@")
        assert kind == "kill", failpoint
        said = f"{killed_at(name, int(number or 1))}\n" in self.stderr
        # One without the other is a kill that nobody asked for, or one that failed.
        assert said == (self.exit_code == KILLED), f"{failpoint}: {self.exit_code} {self.stderr}"
        return said

    def assert_killed_at(self, failpoint: str) -> None:
        """A test that names a place has been there."""
        assert self.killed_at(failpoint), f"{failpoint}: {self.exit_code} {self.stderr[-3000:]}"


class Process:
    """A running `icestream` command."""

    def __init__(self, arguments: Sequence[str], failpoints: str):
        environment = {**os.environ, "ICESTREAM_FAILPOINTS": failpoints}
        environment["PYTHONPATH"] = str(REPOSITORY)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "icestream", *arguments],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> Ended:
        """Await its end."""
        try:
            stdout, stderr = self._process.communicate(timeout=RUN_SECONDS_MAX)
        finally:
            self._process.kill()
        return Ended(exit_code=self._process.returncode, stdout=stdout, stderr=stderr)

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None


def random_seed() -> int:
    """A seed that nobody chose."""
    return random.SystemRandom().randrange(1_000_000)
