"""Pipelines as tests run them: where their tasks run, and one at work in a thread."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from icestream.pipeline import Pipeline
from tests.property.local_spark import OneProcess
from tests.servers import wait_until

# A run takes seconds; on a busy machine it may take minutes.
SECONDS_MAX = 240.0
# Set to 1, it has the tasks of all pipelines run as jobs of Spark's.
SPARK_JOBS_VARIABLE = "ICESTREAM_SPARK_JOBS"

# Tables of a few rows: making plans and compiling them is all that takes time.
QUICK = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}
# As a session of the product's has them.
COMPILED = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.shuffle.partitions": "8",
}

_jobs: list[bool] = []


@contextmanager
def compiled_plans(spark: SparkSession) -> Iterator[None]:
    """Queries in the block are planned and compiled as the product has it."""
    for name, value in COMPILED.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in QUICK.items():
            spark.conf.set(name, value)


@contextmanager
def spark_jobs() -> Iterator[None]:
    """Pipelines that are opened in the block have their tasks run as jobs of Spark's."""
    _jobs.append(True)
    try:
        yield
    finally:
        _jobs.pop()


def for_pipelines(spark: SparkSession) -> Any:
    """The session that a test gives to its pipelines.

    Their tasks run in this process unless the test, or all its file, is marked `spark_jobs`: those
    whose subject is a job, a worker or a whole way from a source to a sink.
    """
    jobs = _jobs or os.environ.get(SPARK_JOBS_VARIABLE) == "1"
    return spark if jobs else OneProcess(spark)


@contextmanager
def running(pipeline: Pipeline) -> Iterator[None]:
    """Runs while the block does, without end; then it is stopped, and what ended it is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            pipeline.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="running", daemon=True)
    thread.start()
    try:
        yield
    finally:
        pipeline.stop()
        thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_for_state(pipeline: Pipeline, state: str, reason: str = "") -> None:
    """Wait until the health says so, with the reason in the error's message."""

    def there() -> bool:
        health = pipeline.health.to_json()
        error = health["error"]
        message = str(error["message"]) if isinstance(error, dict) else ""
        return health["state"] == state and reason in message

    wait_until(there, SECONDS_MAX, f"{state} {reason}")
