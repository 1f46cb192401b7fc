"""A pipeline file on a Spark cluster whose machines share nothing but an object store."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml
from pyspark.sql import SparkSession

from icestream.java import jars, java_home, quiet_java
from icestream.samples.postgres import LOOPBACK, EmbeddedPostgres
from icestream.spark import packages
from tests.cluster import SparkCluster
from tests.faults.shop import REPOSITORY, RUN_SECONDS_MAX
from tests.integration.pipelines import embedded_catalog
from tests.integration.postgres_world import Load, World, free_name, session
from tests.integration.topics import Topics, created, updated
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.servers import KafkaBroker, RestCatalog, S3Server, wait_until

BOTH = ["public.item", "public.part"]
ROWS, RECORDS, PARTITIONS = 4000, 3000, 3
INVALID = 2
ARRIVAL_SECONDS_MAX = 240.0
SETTINGS = {
    "spark.driver.host": LOOPBACK,
    "spark.executor.memory": "600m",
    # Tasks that stand still are tried elsewhere after a moment.
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.speculation.task.duration.threshold": "2s",
}


class Coordinator:
    """`icestream` with a folder for temporary files that no worker sees."""

    def __init__(self, folder: Path, document: Mapping[str, Any]):
        self._folder = folder
        self._log = folder.parent / "coordinator.log"
        folder.mkdir(exist_ok=True)
        (folder / "pipelines.yaml").write_text(yaml.safe_dump(dict(document)))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command about the pipeline file."""
        command, *options = arguments
        with open(self._log, "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "icestream", command, "pipelines.yaml", *options],
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self._folder)},
                stdout=log,
                stderr=log,
                text=True,
            )

    def ended(self, *arguments: str) -> tuple[int, str]:
        """Run a command to its end; its exit code and all that was logged."""
        process = self.start(*arguments)
        try:
            process.wait(RUN_SECONDS_MAX)
        finally:
            process.kill()
        return process.returncode, self._log.read_text()

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[str]"]:
        """`run` while the block does; it must not end before it is told to."""
        process = self.start("run")
        try:
            yield process
            assert process.poll() is None, self._log.read_text()[-3000:]
            process.terminate()
            process.wait(RUN_SECONDS_MAX)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def world(
    postgres_server: EmbeddedPostgres, spark: SparkSession, rest: RestCatalog, tmp_path: Path
) -> Iterator[World]:
    """A database of the test's own, and the lake in the object store."""
    world = World(postgres_server, free_name(tmp_path), spark, rest.catalog_properties())
    try:
        yield world
    finally:
        world.close()


class Flow:
    """Two tables and a topic that change all the time, and what the lake has of them."""

    def __init__(self, world: World, broker: KafkaBroker, rest: RestCatalog, namespace: str):
        self.world = world
        self.namespace = namespace
        self.lake = Lake(world.spark, rest.catalog_properties())
        self.load = Load(session(world.dsn), random.Random(7), ROWS)
        self.load.create()
        self._topics = Topics(broker, world.name, world.spark, rest.catalog_properties())
        self._topics.create("clicks", PARTITIONS)
        self._topics.send("clicks", [created(n, v=f"v{n}") for n in range(RECORDS)])
        self._marker = session(world.dsn)
        self._marks: list[int] = []

    def document(self, master: str, **source: Any) -> dict[str, Any]:
        """The pipeline file: both pipelines, on the cluster."""
        sink, quick = {"namespace": self.namespace}, {"commit_interval": 0.5}
        topics = {"topics": ["clicks"], "value": {"envelope": "debezium"}}
        return {
            **self.world.document(BOTH, sink=sink, cadence=quick, **source),
            **self._topics.document(topics, sink, **quick),
            "spark": {"master": master, "conf": SETTINGS},
        }

    def wait_for_changes(self) -> None:
        """Both sources are followed up to a change that is made now."""
        mark = len(self._marks) + 1
        self._marks.append(mark)
        self._marker.run(f"insert into item values (-{mark}, 0, 'mark')")
        self._topics.send("clicks", [created(-mark, v="mark")])
        for table in ("item", "clicks"):
            there = partial(self._arrived, table, mark)
            wait_until(there, ARRIVAL_SECONDS_MAX, f"change {mark} of {table}")

    def change_records(self) -> None:
        """Change a third of the records."""
        self._topics.send("clicks", [updated(n, v="again") for n in range(0, RECORDS, 3)])

    def assert_exact(self) -> None:
        """The lake has what the sources have, each row once."""
        for table, columns in (("item", "id, amount, note"), ("part", "code, number, note")):
            here = sorted(self._rows(table, columns), key=repr)
            assert here == self.world.source_rows(table, columns), table
        wanted = {n: "again" if n % 3 == 0 else f"v{n}" for n in range(RECORDS)}
        wanted |= {-mark: "mark" for mark in self._marks}
        found = self._rows("clicks", "id, v")
        assert len(found) == len(wanted) and dict(found) == wanted

    def _arrived(self, table: str, mark: int) -> bool:
        name = self.lake.table(f"{self.namespace}.{table}")
        if not self.world.spark.catalog.tableExists(name):
            return False
        return bool(self.lake.sql(f"SELECT id FROM {name} WHERE id = -{mark}"))

    def _rows(self, table: str, columns: str) -> list[Any]:
        name = self.lake.table(f"{self.namespace}.{table}")
        return [tuple(row.values()) for row in self.lake.sql(f"SELECT {columns} FROM {name}")]


def test_a_cluster_that_shares_nothing_but_an_object_store(
    world: World,
    broker: KafkaBroker,
    rest: RestCatalog,
    store: S3Server,
    namespace: str,
    tmp_path: Path,
):
    """U7, I17, E3, P5: workers die, stand still and come too late while changes go on.

    A spool that they do not reach is refused before anything is read.
    """
    flow = Flow(world, broker, rest, namespace)
    folder = tmp_path / "coordinator"
    folder.mkdir()
    spool = {"spool": "s3://lake/spools", "spool_storage": store.iceberg_properties()}
    with SparkCluster(tmp_path / "cluster", [folder]) as cluster:
        first, second = cluster.add_workers(2)
        code, said = Coordinator(folder, flow.document(cluster.master)).ended("check")
        assert code == INVALID and "workers cannot read the spool in" in said, said
        coordinator = Coordinator(folder, flow.document(cluster.master, **spool))
        with flow.load.running(), coordinator.running():
            flow.wait_for_changes()
            # Tasks of one worker stand still; those that overtook them are committed first.
            with cluster.held_up(first) as held:
                assert held > 0
                flow.wait_for_changes()
            flow.change_records()
            with cluster.held_up(second):
                cluster.kill_worker(second)
                flow.wait_for_changes()
            cluster.add_workers(1)
            flow.wait_for_changes()
        code, said = coordinator.ended("run", "--once")
        assert code == 0, said[-3000:]
    flow.assert_exact()


def test_spark_submit_decides_where_and_with_which_jars(tmp_path: Path):
    """U7: what it was told counts; jars that it was not given are named."""
    feed = RandomFeed.create(tmp_path / "feed", 3)
    feed.epoch(20)
    catalog = embedded_catalog(tmp_path)
    sink = {"iceberg": {"catalog": catalog, "namespace": "shop"}}
    source = {"cockroachdb": {"files": str(feed.folder.path), "tables": ["orders"]}}
    (tmp_path / "pipelines.yaml").write_text(
        yaml.safe_dump({"p": {"source": source, "sink": sink}})
    )
    (tmp_path / "run.py").write_text("from icestream.cli import entry_point\n\nentry_point()\n")
    needed = packages([catalog])
    code, said = _submitted(tmp_path)
    assert code == INVALID and f"--packages {','.join(needed)}" in said, said[-3000:]
    code, said = _submitted(tmp_path, "--jars", ",".join(map(str, jars(needed))))
    assert code == 0 and "committed" in said, said[-3000:]
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as lake:
        assert lake.execute("select table_name from iceberg_tables").fetchall() == [("orders",)]


def _submitted(folder: Path, *options: str) -> tuple[int, str]:
    """`icestream run --once` by spark-submit, on this machine."""
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[1]"]
    environment = {**os.environ, "JAVA_HOME": str(quiet_java(java_home()))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYSPARK_DRIVER_PYTHON": sys.executable}
    ended = subprocess.run(
        [*command, *options, "run.py", "run", "--once", "pipelines.yaml"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
    )
    return ended.returncode, ended.stdout + ended.stderr
