"""A split of topics that reads what it is given, and a destination in memory that it is read for.

The destination is told changes one by one, in their order, and knows nothing of folding.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from icestream import dead_letters
from icestream.change import AT, OP, SEQ, Op
from icestream.formats.options import ValueOptions
from icestream.formats.rows import Records
from icestream.schema import TableShape, arrow_schema, new_schema, schema_from_json
from icestream.sources import ValuesNeeded
from icestream.sources.kafka.consumer import Range
from icestream.sources.kafka.route import Route
from icestream.sources.kafka.split import KafkaSplit, Keys, Reading

Row = dict[str, Any]
# A split asks once for all of its tables; whoever asks again does not take the answer.
ASKED_MAX = 1


def records(*pairs: tuple[Any, Any], first: int = 0, at: int = 0) -> Records:
    """Records of JSON, or of bytes as they are, with offsets from `first` on."""
    written = [
        [
            part if part is None or isinstance(part, bytes) else json.dumps(part).encode()
            for part in pair
        ]
        for pair in pairs
    ]
    return Records(
        keys=pa.array([key for key, _ in written], pa.binary()),
        values=pa.array([value for _, value in written], pa.binary()),
        offsets=np.arange(first, first + len(pairs)),
        timestamps=np.full(len(pairs), at, dtype=np.int64),
    )


def reading(**options: Any) -> Reading:
    """How records are read: Debezium's, a table for each topic."""
    given: dict[str, Any] = {
        "settings": {},
        "value": ValueOptions(envelope="debezium"),
        "registry": None,
        "route": Route(),
        "keys": Keys(by_table={}, otherwise=()),
        "declared": {},
        "read_timeout": 1.0,
        "dead_letters": True,
        "keyed": True,
    }
    return Reading(**{**given, **options})


@dataclass(slots=True, kw_only=True)
class GivenSplit(KafkaSplit):
    """A split whose batches are given instead of being asked for at a broker."""

    batches: Mapping[tuple[str, int], Sequence[Records]] = field(default_factory=dict)

    def _records(self, each: Range) -> Any:
        return iter(self.batches[each.topic, each.partition])


def split_of(
    batches: Mapping[tuple[str, int], Sequence[Records]], how: Reading | None = None
) -> GivenSplit:
    """A split that reads these batches of partitions."""
    ranges = [Range(topic=t, partition=number, start=0, end=10**6) for t, number in batches]
    how = how or reading()
    return GivenSplit(ranges=ranges, reading=how, tables=(), bytes_max=10**9, batches=batches)


class Destination:
    """Tables by name, with their rows by key; and their dead letters."""

    def __init__(self, **shapes: TableShape):
        self._shapes = dict(shapes)
        for name in shapes:
            self._shapes[dead_letters.table_of(name)] = dead_letters.SHAPE
        self._schemas = {
            name: new_schema(shape).model_dump_json() for name, shape in self._shapes.items()
        }
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = {name: {} for name in shapes}
        self.letters: list[Row] = []
        self.asked: list[ValuesNeeded] = []

    def tables(self) -> Collection[str]:
        return self._shapes.keys()

    def schema_json(self, table: str) -> str:
        return self._schemas[table]

    def reads(self, table: str) -> None:
        return None

    def refused(self, table: str) -> str | None:
        return None

    def key(self, table: str) -> Sequence[str]:
        return self._shapes[table].key

    def read(self, split: KafkaSplit) -> dict[str, list[Row]]:
        """The changes of a split by table, once it was given the rows that it asks for."""
        for _ in range(ASKED_MAX + 1):
            found: dict[str, list[Row]] = {}
            try:
                for table, changes in split.changes(self):
                    found.setdefault(table, []).extend(changes.to_pylist())
                return found
            except ValuesNeeded as needed:
                self.asked.append(needed)
                for need in needed.needs:
                    stored = self.stored(need.table, need.keys, need.columns)
                    split = split.with_stored(need.table, stored)
        raise AssertionError("the split asks again for what it was told")

    def take(self, *splits: KafkaSplit) -> None:
        """An epoch: all splits are read before anything is changed."""
        for found in [self.read(split) for split in splits]:
            for table, changes in found.items():
                if table not in self.rows:
                    self.letters += changes
                    continue
                for change in sorted(changes, key=lambda each: (each[AT], each[SEQ])):
                    self._apply(table, change)

    def stored(self, table: str, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """The rows under these keys, in no order."""
        schema = arrow_schema(schema_from_json(self._schemas[table]))
        wanted = {tuple(row.values()) for row in keys.to_pylist()}
        assert len(wanted) == keys.num_rows, "a key is asked for once"
        names = [*keys.column_names, *columns]
        rows = [
            {name: row.get(name) for name in names}
            for key, row in reversed(self.rows[table].items())
            if key in wanted
        ]
        return pa.Table.from_pylist(rows, pa.schema([schema.field(name) for name in names]))

    def _apply(self, table: str, change: Row) -> None:
        key = tuple(change[name] for name in self.key(table))
        row = {name: value for name, value in change.items() if name not in (OP, AT, SEQ)}
        if change[OP] == Op.DELETE:
            self.rows[table].pop(key, None)
        else:
            self.rows[table][key] = row
