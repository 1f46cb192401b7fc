"""As much of Spark as `icestream.spark.run_tasks` uses, in one process and without a JVM.

Rows that are shuffled arrive in an order that the seed decides, as they do on a cluster, and
nothing is computed before the rows are collected. `LocalSpark` calls functions as they are, so that
a test may note what they did. `OneProcess` is for whole pipelines: what Spark would send to workers
is pickled, and a task that fails is tried again.
"""

import pickle
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from icestream import failpoints
from icestream.failpoints import FailpointError
from icestream.spark import ROW_SCHEMA, TASK_ATTEMPTS_MAX

Batches = list[pa.RecordBatch]
Bounds = tuple[int, int, int, int]
Function = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]
Run = Callable[[Function], Callable[[Batches], Batches]]


class LocalContext:
    """The part of a `SparkContext` that is used."""

    def __init__(self, parallelism: int):
        self.defaultParallelism = parallelism
        self.descriptions: list[str] = []

    def setLocalProperty(self, name: str, value: str) -> None:
        self.descriptions.append(value)


class LocalSpark:
    """The part of a `SparkSession` that is used."""

    def __init__(self, parallelism: int = 2, seed: int = 0):
        self.sparkContext = LocalContext(parallelism)
        self.rng = random.Random(seed)

    def range(self, start: int, end: int, step: int, slices: int) -> "LocalFrame":
        return numbers(self.rng, (start, end, step, slices), _called)


class OneProcess:
    """A Spark session whose tasks over splits run in this process.

    A job of Spark's takes much processor time, however few rows it has. What Spark itself has to do
    with rows (selects, changelogs, stored rows) it does, as in any session.
    """

    def __init__(self, spark: SparkSession, seed: int = 0):
        self._spark = spark
        self._rng = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def range(self, start: int, end: int, step: int, slices: int) -> "Tasks":
        return Tasks(self._spark, self._rng, (start, end, step, slices))


class Tasks:
    """The numbers of tasks, before it is known whether Spark has to see what comes of them."""

    def __init__(self, spark: SparkSession, rng: random.Random, bounds: Bounds):
        self._spark = spark
        self._rng = rng
        self._bounds = bounds

    def mapInArrow(self, function: Function, schema: str | StructType) -> "LocalFrame | DataFrame":
        if schema != ROW_SCHEMA:
            return self._spark.range(*self._bounds).mapInArrow(function, schema)
        return numbers(self._rng, self._bounds, _sent).mapInArrow(function, schema)


class LocalFrame:
    """Batches by partition, computed when they are collected."""

    def __init__(
        self,
        rng: random.Random,
        run: Run,
        compute: Callable[[], list[Batches]],
    ):
        self._rng = rng
        self._run = run
        self._compute = compute

    def mapInArrow(self, function: Function, schema: str | StructType) -> "LocalFrame":
        run = self._run(function)
        return self._then(lambda: [run(part) for part in self._compute()])

    def repartition(self, count: int, column: str) -> "LocalFrame":
        def shuffled() -> list[Batches]:
            rows = list(_rows(self._compute()))
            self._rng.shuffle(rows)
            parts: list[Batches] = [[] for _ in range(count)]
            for row in rows:
                parts[row.column(column)[0].as_py() % count].append(row)
            return parts

        return self._then(shuffled)

    def sortWithinPartitions(self, column: str) -> "LocalFrame":
        def place(row: pa.RecordBatch) -> Any:
            return row.column(column)[0].as_py()

        return self._then(lambda: [sorted(part, key=place) for part in self._compute()])

    def collect(self) -> list[dict[str, Any]]:
        return [row.to_pylist()[0] for row in _rows(self._compute())]

    def _then(self, compute: Callable[[], list[Batches]]) -> "LocalFrame":
        return LocalFrame(self._rng, self._run, compute)


def numbers(rng: random.Random, bounds: Bounds, run: Run) -> LocalFrame:
    """Whole numbers in partitions; `run` says how functions are applied to a partition."""
    start, end, step, slices = bounds
    found = list(range(start, end, step))
    parts = [found[n::slices] for n in range(slices)]
    return LocalFrame(rng, run, lambda: [[pa.record_batch({"id": part})] for part in parts])


def _called(function: Function) -> Callable[[Batches], Batches]:
    """The function itself."""
    return lambda part: list(function(iter(part)))


def _sent(function: Function) -> Callable[[Batches], Batches]:
    """The function as it arrives on a worker, tried as often as Spark does."""
    pickled = cloudpickle.dumps(function)

    def attempts(part: Batches) -> Batches:
        for attempt in range(1, TASK_ATTEMPTS_MAX + 1):
            try:
                return list(pickle.loads(pickled)(iter(part)))
            except Exception as error:
                if isinstance(error, FailpointError) and failpoints.crashes():
                    # The process is to be dead: nobody is left who would try a task again.
                    raise
                if attempt == TASK_ATTEMPTS_MAX:
                    raise PythonException(traceback.format_exc()) from None
        raise AssertionError("a task is tried once at least")

    return attempts


def _rows(partitions: list[Batches]) -> Iterator[pa.RecordBatch]:
    for part in partitions:
        for batch in part:
            for number in range(batch.num_rows):
                yield batch.slice(number, 1)


def travelled(thing: Any) -> Any:
    """What arrives on a worker."""
    return pickle.loads(pickle.dumps(thing))
