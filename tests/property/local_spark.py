"""As much of Spark as `icestream.spark.run_tasks` uses, in one process and without a JVM.

Rows that are shuffled arrive in an order that the seed decides, as they do on a cluster, and
everything that Spark would pickle is pickled.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

Batches = list[pa.RecordBatch]
Function = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]


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
        numbers = list(range(start, end, step))
        parts = [numbers[n::slices] for n in range(slices)]
        return LocalFrame(self, [[pa.record_batch({"id": part})] for part in parts])


class LocalFrame:
    """Batches by partition."""

    def __init__(self, spark: LocalSpark, partitions: list[Batches]):
        self._spark = spark
        self._partitions = partitions

    def mapInArrow(self, function: Function, schema: str) -> "LocalFrame":
        return LocalFrame(self._spark, [list(function(iter(part))) for part in self._partitions])

    def repartition(self, count: int, column: str) -> "LocalFrame":
        rows = list(self._rows())
        self._spark.rng.shuffle(rows)
        parts: list[Batches] = [[] for _ in range(count)]
        for row in rows:
            parts[row.column(column)[0].as_py() % count].append(row)
        return LocalFrame(self._spark, parts)

    def sortWithinPartitions(self, column: str) -> "LocalFrame":
        by_column = [
            sorted(p, key=lambda row: row.column(column)[0].as_py()) for p in self._partitions
        ]
        return LocalFrame(self._spark, by_column)

    def collect(self) -> list[dict[str, Any]]:
        return [row.to_pylist()[0] for row in self._rows()]

    def _rows(self) -> Iterator[pa.RecordBatch]:
        for part in self._partitions:
            for batch in part:
                for number in range(batch.num_rows):
                    yield batch.slice(number, 1)


def travelled(thing: Any) -> Any:
    """What arrives on a worker."""
    return pickle.loads(pickle.dumps(thing))
