"""Changes for the benchmarks: ten mixed columns, 30 % inserts, 60 % updates, 10 % deletes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.types import (
    BooleanType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    TimestamptzType,
)

from icestream.change import AT, OP, SEQ, Op
from icestream.schema import Column, TableShape
from icestream.sources import TableSplit
from tests.captures import FeedFolder

SHAPE = TableShape(
    columns=[
        Column(name="id", type=LongType(), required=True),
        Column(name="customer", type=LongType()),
        Column(name="quantity", type=IntegerType()),
        Column(name="price", type=DoubleType()),
        Column(name="weight", type=DoubleType()),
        Column(name="status", type=StringType()),
        Column(name="note", type=StringType()),
        Column(name="city", type=StringType()),
        Column(name="paid", type=BooleanType()),
        Column(name="created_at", type=TimestamptzType()),
    ],
    key=["id"],
)
_STATES = pa.array(["new", "paid", "sent", "done", "returned"])
_CITIES = pa.array([f"city-{number:03d}" for number in range(300)])


def rows(ids: np.ndarray, seed: int) -> pa.Table:
    """One row for each id."""
    random = np.random.default_rng(seed)
    count = len(ids)
    number = pa.array(random.integers(0, 10**9, count)).cast(pa.string())
    return pa.table(
        {
            "id": pa.array(ids),
            "customer": pa.array(random.integers(0, 10**6, count)),
            "quantity": pa.array(random.integers(1, 100, count).astype(np.int32)),
            "price": pa.array(np.round(random.random(count) * 1000, 2)),
            "weight": pa.array(random.integers(0, 10**6, count) / 8.0),
            "status": _STATES.take(pa.array(random.integers(0, 5, count))),
            "note": pc.binary_join_element_wise(pa.scalar("order note "), number, pa.scalar("")),
            "city": _CITIES.take(pa.array(random.integers(0, 300, count))),
            "paid": pa.array(random.random(count) < 0.5),
            "created_at": pa.array(
                random.integers(1_600_000_000_000_000, 1_700_000_000_000_000, count)
            ).cast(pa.timestamp("us", "UTC")),
        }
    )


def changes(count: int, existing: int, seed: int) -> pa.Table:
    """Changes against a table that holds the ids below `existing`; inserts take new ids."""
    random = np.random.default_rng(seed)
    inserts, deletes = int(count * 0.3), int(count * 0.1)
    updates = count - inserts - deletes
    new = existing + seed * count + np.arange(inserts)
    ids = np.concatenate([new, random.integers(0, existing, updates + deletes)])
    ops = np.concatenate(
        [
            np.full(inserts, Op.UPSERT, np.int8),
            np.full(updates, Op.UPSERT, np.int8),
            np.full(deletes, Op.DELETE, np.int8),
        ]
    )
    order = random.permutation(count)
    table = rows(ids[order], seed)
    at = pa.array(np.arange(count, dtype=np.int64) + seed * count)
    table = table.append_column(OP, pa.array(ops[order]))
    return table.append_column(AT, at).append_column(SEQ, pa.array(np.zeros(count, np.int64)))


def by_key(table: pa.Table, parts: int) -> list[pa.Table]:
    """The table cut by key, as a keyed source would deliver it."""
    share = pc.bit_wise_and(table.column("id"), parts - 1)
    return [table.filter(pc.equal(share, part)) for part in range(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSplit(TableSplit):
    """Changes that lie as a Parquet file."""

    table: str
    path: str

    def read(self, schema_json: str, key: Sequence[str]) -> Iterator[pa.Table]:
        """The file's changes."""
        yield pq.read_table(self.path, memory_map=True)

    @property
    def size_bytes(self) -> int:
        """The file's size."""
        return Path(self.path).stat().st_size

    @property
    def each_key_once(self) -> bool:
        """Not so: keys repeat."""
        return False

    def with_stored(self, table: str, values: pa.Table | None) -> "ParquetSplit":
        """Itself."""
        return self

    def learned(self) -> Any:
        """Nothing."""
        return None


def write_feed(folder: Path, table: pa.Table, topic: str, files: int, seed: int) -> int:
    """Write changes as a changefeed's files and a marker; returns the bytes written."""
    feed = FeedFolder(folder)
    wall = 1_700_000_000_000_000_000 + seed * 10**12
    lines = _lines(table, wall)
    size = (len(lines) + files - 1) // files
    total = 0
    for start in range(0, len(lines), size):
        total += feed.data(topic, lines[start : start + size], (wall, 0)).stat().st_size
    feed.resolved((wall + table.num_rows, 0))
    return total


def _lines(table: pa.Table, wall: int) -> list[str]:
    names = [column.name for column in SHAPE.columns]
    values = table.select(names)
    created = values.column_names.index("created_at")
    text = pc.strftime(values.column("created_at"), format="%Y-%m-%dT%H:%M:%SZ")
    plain = values.set_column(created, "created_at", text).to_pylist()
    ops = table.column(OP).to_pylist()
    return [
        json.dumps(
            {
                "after": None if op == Op.DELETE else row,
                "key": [row["id"]],
                "updated": f"{wall + number}.0000000000",
            }
        )
        for number, (row, op) in enumerate(zip(plain, ops, strict=True))
    ]
