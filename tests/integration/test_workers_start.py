"""Spark's Python workers are ready when they are asked for."""

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from zipimport import zipimporter

import pytest
from pyspark.sql import SparkSession

from icestream import metrics
from icestream.errors import Broken, Retryable
from icestream.report import Row
from icestream.spark import run_tasks
from icestream.worker import map_tasks

MODULES = (
    "icestream.worker",
    "icestream.sources.kafka.source",
    "icestream.sinks.iceberg.sink",
    "pandas",
)
# Modules that nothing else imports: Python searches its path for them.
RARE_MODULES = ("nturl2path", "sndhdr", "chunk", "sunau")


def looked_at(module: str) -> Iterator[Row]:
    """What a worker has before it does anything, but for one module that it imports."""
    import_module(module)
    finders = list(sys.path_importer_cache.values())
    found = {
        "imported": [name for name in MODULES if name in sys.modules],
        "archives": sum(isinstance(finder, zipimporter) for finder in finders),
        "jars": sum(place.endswith(".jar") for place in sys.path),
        "left_alone": gc.get_freeze_count() > len(gc.get_objects()),
    }
    yield "found", 0, json.dumps(found).encode()


def test_a_task_neither_imports_nor_searches_what_was_there_before(spark: SparkSession) -> None:
    """E9: an epoch of few rows must not cost more than its rows."""
    for _ in range(2):
        for _, _, payload in run_tasks(spark, RARE_MODULES, looked_at):
            found = json.loads(payload)
            assert found["imported"] == list(MODULES)
            assert (found["archives"], found["jars"]) == (0, 0)
            assert found["left_alone"]


def killed(_task: int) -> Iterator[Row]:
    """A task whose worker ends as it would when there is no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)
    yield "never", 0, b""


def test_a_worker_that_is_killed_again_and_again_is_passing_trouble(spark: SparkSession) -> None:
    """E13, Mend f2: Spark gives the job up; the epoch is tried again, and the reason told."""
    with pytest.raises(Retryable) as stopped:
        run_tasks(spark, [1], killed)
    assert "exited unexpectedly" in str(stopped.value.detail)


@dataclass(frozen=True)
class Counting:
    """A task that counts on its worker, and one that sets what no worker may set."""

    amount: int
    gauge: bool = False

    def run(self) -> int:
        """Count, and tell the process."""
        metrics.BULK_RETRIES.labels("counted on workers").inc(self.amount)
        if self.gauge:
            metrics.LAG_SECONDS.labels("p").set(1)
        return os.getpid()


def test_what_a_worker_counts_is_shown_by_the_coordinator(spark: SparkSession) -> None:
    """U5: a worker is another process; what it counted was lost, and nobody said so."""
    shown = metrics.BULK_RETRIES.labels("counted on workers")
    for total in (15, 30):
        processes = map_tasks(spark, [Counting(amount) for amount in (1, 2, 3, 4, 5)])
        assert os.getpid() not in processes
        assert shown._value.get() == total
    with pytest.raises(Broken, match="icestream_lag_seconds is not used on a worker"):
        map_tasks(spark, [Counting(1, gauge=True)])
    assert shown._value.get() == 31
