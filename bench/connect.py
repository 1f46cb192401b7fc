"""Apache's own way: the Iceberg sink of Kafka Connect, one standalone worker in a JVM of its own.

It appends every event as a row, flattened by its `DebeziumTransform`, and leaves it to others to
make a table of it: it neither finds the last change of a key nor deletes anything. So it has less
to do, and only processor time per event is compared.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from icestream.java import jars, java_home, pyspark_jars
from icestream.samples.postgres import LOOPBACK, free_port

# The sink loads all of its file formats, and its artifact names none of them as a dependency.
COORDINATES = (
    "org.apache.iceberg:iceberg-kafka-connect:1.11.0",
    "org.apache.iceberg:iceberg-kafka-connect-transforms:1.11.0",
    "org.apache.iceberg:iceberg-parquet:1.11.0",
    "org.apache.iceberg:iceberg-orc:1.11.0",
    "org.apache.kafka:connect-runtime:4.3.1",
    "org.apache.kafka:connect-json:4.3.1",
    "org.apache.kafka:connect-transforms:4.3.1",
    "org.slf4j:slf4j-simple:2.0.17",
    "org.xerial:sqlite-jdbc:3.50.3.0",
)
FROM_PYSPARK = ("hadoop-client-api-*.jar", "hadoop-client-runtime-*.jar")
JAVA_OPTIONS = ("-Xmx2g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
COMMIT_MILLISECONDS = 3000
STOP_SECONDS = 30.0
LOG_TAIL_LINES = 30


class ConnectWorker:
    """A worker that appends what comes to a topic to a table that is there."""

    def __init__(self, folder: Path, bootstrap_servers: str, catalog: Mapping[str, str]):
        self._folder = folder
        self._servers = bootstrap_servers
        self._catalog = catalog
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The worker's process."""
        self.refuse_dead()
        return self._process.pid if self._process else 0

    def refuse_dead(self) -> None:
        """Raise, with what it said last, unless the worker runs."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"Kafka Connect does not run:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """What the worker said last."""
        lines = (self._folder / "connect.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def start(self, topic: str, table: str, partitions: int) -> Self:
        """Begin at the topic's beginning."""
        self._folder.mkdir(parents=True)
        worker, sink = self._folder / "worker.properties", self._folder / "sink.json"
        worker.write_text("".join(f"{name}={value}\n" for name, value in self._worker().items()))
        connector = {"name": "sink", "config": self._sink(topic, table, partitions)}
        sink.write_text(json.dumps(connector))
        classpath = [*jars(COORDINATES), *pyspark_jars(*FROM_PYSPARK)]
        command = [str(java_home() / "bin" / "java"), *JAVA_OPTIONS]
        command += ["-cp", os.pathsep.join(map(str, classpath))]
        command += ["org.apache.kafka.connect.cli.ConnectStandalone", str(worker), str(sink)]
        with open(self._folder / "connect.log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)

    def _worker(self) -> dict[str, str]:
        converter = "org.apache.kafka.connect.json.JsonConverter"
        return {
            "bootstrap.servers": self._servers,
            "key.converter": converter,
            "value.converter": converter,
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "offset.storage.file.filename": str(self._folder / "offsets"),
            "listeners": f"http://{LOOPBACK}:{free_port()}",
            "plugin.discovery": "only_scan",
            "consumer.auto.offset.reset": "earliest",
        }

    def _sink(self, topic: str, table: str, partitions: int) -> dict[str, str]:
        catalog = {f"iceberg.catalog.{name}": value for name, value in self._catalog.items()}
        return {
            **catalog,
            "connector.class": "org.apache.iceberg.connect.IcebergSinkConnector",
            "tasks.max": str(partitions),
            "topics": topic,
            "iceberg.catalog": self._catalog["name"],
            "iceberg.tables": table,
            "iceberg.control.topic": f"control-{topic}",
            "iceberg.control.commit.interval-ms": str(COMMIT_MILLISECONDS),
            "transforms": "debezium",
            "transforms.debezium.type": "org.apache.iceberg.connect.transforms.DebeziumTransform",
        }
