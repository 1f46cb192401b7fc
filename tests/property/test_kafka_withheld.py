"""Events that leave out values give the rows that the database has, whatever is left out where."""

import base64
from collections.abc import Collection
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.types import BinaryType, ListType, LongType, StringType

from icestream.formats.options import UNAVAILABLE_VALUE
from icestream.formats.rows import Records
from icestream.schema import Column, TableShape
from tests.examples import examples
from tests.property.kafka_reading import Destination, Row, records, split_of

TABLES = ("t", "u")
WITH_SCHEMAS = "u"
PARTITIONS = 2
TEXTS = ListType(element_id=1, element_type=StringType(), element_required=False)
SHAPE = TableShape(
    columns=[
        Column(name="id", type=LongType()),
        Column(name="n", type=LongType()),
        Column(name="big", type=StringType()),
        Column(name="raw", type=BinaryType()),
        Column(name="many", type=TEXTS),
    ],
    key=["id"],
)
STAND_INS: Row = {
    "big": UNAVAILABLE_VALUE,
    "raw": base64.b64encode(UNAVAILABLE_VALUE.encode()).decode(),
    "many": [UNAVAILABLE_VALUE],
}


FIELDS = [
    {"field": "id", "type": "int64"},
    {"field": "n", "type": "int64", "optional": True},
    {"field": "big", "type": "string", "optional": True},
    {"field": "raw", "type": "bytes", "optional": True},
    {"field": "many", "type": "array", "items": {"type": "string"}, "optional": True},
]
ROW = {"type": "struct", "fields": FIELDS, "optional": True}
EVENT = {
    "type": "struct",
    "fields": [
        {**ROW, "field": "before"},
        {**ROW, "field": "after"},
        {"field": "op", "type": "string"},
    ],
}


class Database:
    """Rows as they are, and the events that tell how they came to be."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, Row]] = {table: {} for table in TABLES}

    def event(self, table: str, key: int, action: dict[str, Any]) -> tuple[Row, Row]:
        """Change a row, and what Debezium says of it: unchanged large values may be left out."""
        rows = self.rows[table]
        row = rows.get(key)
        if action["delete"] and row is not None:
            del rows[key]
            return written(table, key, "d", written_row(table, row, action["withheld"]))
        if row is None:
            rows[key] = {"id": key, **action["values"]}
            return written(table, key, "c", written_row(table, rows[key], ()))
        # Only what is large is stored apart, and a null is not.
        kept = {name for name in action["withheld"] if row[name] is not None}
        sent = {name: value for name, value in action["values"].items() if name not in kept}
        rows[key] = {**row, **sent}
        return written(table, key, "u", written_row(table, rows[key], kept))


def written_row(table: str, row: Row, kept: Collection[str]) -> Row:
    """A row as JSON: with a schema bytes are base64, without one as the table reads them."""
    raw = row["raw"]
    if raw is not None:
        raw = base64.b64encode(raw).decode() if table == WITH_SCHEMAS else f"\\x{raw.hex()}"
    return {**row, "raw": raw, **{name: STAND_INS[name] for name in kept}}


def written(table: str, key: int, op: str, row: Row) -> tuple[Row, Row]:
    """The record of an event."""
    before, after = (row, None) if op == "d" else (None, row)
    value: Row = {"before": before, "after": after, "op": op}
    if table == WITH_SCHEMAS:
        value = {"schema": EVENT, "payload": value}
    return {"id": key}, value


VALUES = st.fixed_dictionaries(
    {
        "n": st.integers(0, 99),
        "big": st.none() | st.sampled_from(["a", "b", "c"]),
        "raw": st.none() | st.sampled_from([b"", b"\0", b"\xff"]),
        "many": st.none() | st.lists(st.sampled_from(["x", "y"]), max_size=2),
    }
)
ACTIONS = st.fixed_dictionaries(
    {
        "delete": st.sampled_from([True, *[False] * 4]),
        "withheld": st.sets(st.sampled_from(sorted(STAND_INS))),
        "values": VALUES,
    }
)
CHANGES = st.tuples(st.sampled_from(TABLES), st.integers(0, 3), ACTIONS)
# Each epoch is a list of batches, each batch a list of changes.
EPOCHS = st.lists(st.lists(st.lists(CHANGES, max_size=5), max_size=4), max_size=4)


@examples(60)
@given(EPOCHS)
def test_the_destination_has_the_rows_of_the_database(epochs):
    """P7, K3: however changes are cut into epochs, batches, partitions and tables."""
    database, destination = Database(), Destination(**dict.fromkeys(TABLES, SHAPE))
    offset = 0
    for batches in epochs:
        parts: dict[tuple[str, int], list[Records]] = {
            (table, number): [] for table in TABLES for number in range(PARTITIONS)
        }
        for batch in batches:
            events: dict[tuple[str, int], list[tuple[Row, Row]]] = {}
            for table, key, action in batch:
                pair = database.event(table, key, action)
                events.setdefault((table, key % PARTITIONS), []).append(pair)
            for part, pairs in events.items():
                parts[part].append(records(*pairs, first=offset))
                offset += len(pairs)
        by_split = [
            {(table, number): parts[table, number] for table in TABLES}
            for number in range(PARTITIONS)
        ]
        destination.take(*(split_of(each) for each in by_split))
        assert destination.letters == []
        for table in TABLES:
            expected = {(key,): row for key, row in database.rows[table].items()}
            assert plain(destination.rows[table]) == plain(expected)


def plain(rows: dict[Any, Row]) -> dict[Any, Row]:
    """Without nulls: a table has them as well where no record of a split had the column."""
    return {key: {n: v for n, v in row.items() if v is not None} for key, row in rows.items()}
