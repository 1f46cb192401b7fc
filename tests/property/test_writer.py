"""What the writer leaves in files, read back by hand, is what applying the changes leaves."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    IdentityTransform,
    TruncateTransform,
    VoidTransform,
)
from pyiceberg.types import DateType, LongType, NestedField, StringType

from icestream.change import AT, BEFORE, OP, SEQ, Op
from tests.examples import examples
from tests.property.tables import LocalTable

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "region", StringType(), required=False),
    NestedField(3, "day", DateType(), required=False),
    NestedField(4, "value", LongType(), required=False),
)
COLUMNS = ("region", "day", "value")
SPECS: list[list[tuple[str, Any]]] = [
    [],
    [("region", IdentityTransform())],
    [("id", BucketTransform(3))],
    [("day", DayTransform()), ("region", TruncateTransform(1))],
    [("value", TruncateTransform(10))],
    [("region", VoidTransform())],
]
rows = st.fixed_dictionaries(
    {
        "region": st.sampled_from(["eu", "us", "", None]),
        "day": st.sampled_from([0, 1, -1, None]),
        "value": st.integers(-20, 20) | st.none(),
    }
)
Row = dict[str, Any]
# Operation, id, row and before-image; the image may be unknown.
Change = tuple[Op, int, Row | None, Row | None]


@st.composite
def epochs(draw: st.DrawFn) -> list[list[Change]]:
    """Epochs of changes that a database could have made."""
    current: dict[int, Row] = {}
    made = []
    for _ in range(draw(st.integers(1, 4))):
        changes = []
        for _ in range(draw(st.integers(0, 6))):
            key = draw(st.integers(1, 4))
            row = draw(rows | st.none())
            before = current.get(key)
            op = Op.DELETE if row is None else Op.UPSERT
            if row is not None and before is None and draw(st.booleans()):
                op = Op.INSERT
            image = before if draw(st.booleans()) else None
            changes.append((op, key, row, image))
            current.pop(key, None)
            if row is not None:
                current[key] = row
        made.append(changes)
    return made


def change_table(changes: list[Change], images: bool) -> pa.Table:
    types = {"region": pa.string(), "day": pa.date32(), "value": pa.int64()}
    table = {
        OP: pa.array([op for op, _, _, _ in changes], pa.int8()),
        AT: pa.array(range(len(changes)), pa.int64()),
        SEQ: pa.array([0] * len(changes), pa.int64()),
        "id": pa.array([key for _, key, _, _ in changes], pa.int64()),
        **{
            name: pa.array([row and row[name] for _, _, row, _ in changes], types[name])
            for name in COLUMNS
        },
    }
    if images:
        struct = pa.struct([("id", pa.int64()), *types.items()])
        known = [image and {"id": key, **image} for _, key, _, image in changes]
        table[BEFORE] = pa.array(known, struct)
    return pa.table(table)


def applied(history: list[list[Change]]) -> dict[int, Row]:
    """The oracle: changes one by one, in plain Python."""
    table: dict[int, Row] = {}
    for changes in history:
        for _, key, row, _ in changes:
            table.pop(key, None)
            if row is not None:
                table[key] = row
    return table


def plain(row: Row) -> Row:
    day = row["day"]
    return {**row, "day": None if day is None else (day - pa.scalar(0, pa.date32()).as_py()).days}


@examples(60)
@given(epochs(), st.sampled_from(SPECS), st.booleans(), st.randoms(use_true_random=False))
def test_files_hold_what_applying_the_changes_leaves(history, terms, images, rng):
    """I8, I9: random tables, partitions and before-images; no copy stays behind, none is lost."""
    with tempfile.TemporaryDirectory() as folder:
        local = LocalTable(folder=Path(folder), schema=SCHEMA, key=["id"], terms=terms)
        for changes in history:
            table = change_table(changes, images)
            order = rng.sample(range(table.num_rows), table.num_rows)
            local.write(table.take(pa.array(order, pa.int64())))
        found = local.rows()
    assert len(found) == len({row["id"] for row in found})
    assert {row.pop("id"): plain(row) for row in found} == applied(history)


keyed_changes = st.tuples(
    st.sampled_from([Op.UPSERT, Op.DELETE]),
    st.sampled_from(["eu", "us", ""]),
    st.integers(1, 3),
    st.integers(0, 99),
)


@examples(30)
@given(st.lists(st.lists(keyed_changes, max_size=6), min_size=1, max_size=4))
def test_a_key_that_decides_the_partition_reaches_its_rows_and_no_others(history):
    """I9: deletes bound to a partition by the key."""
    terms = [("region", IdentityTransform())]
    expected: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        local = LocalTable(folder=Path(folder), schema=SCHEMA, key=["region", "id"], terms=terms)
        for changes in history:
            made: list[Change] = []
            for op, region, key, value in changes:
                made.append((op, key, {"region": region, "day": None, "value": value}, None))
                expected.pop((region, key), None)
                if op != Op.DELETE:
                    expected[region, key] = value
            local.write(change_table(made, images=False))
        found = local.rows()
    assert len(found) == len(expected)
    assert {(row["region"], row["id"]): row["value"] for row in found} == expected


@examples(20)
@given(epochs(), st.sampled_from(SPECS), st.sampled_from(SPECS))
def test_a_changed_partition_spec_leaves_no_copy_behind(history, old, new):
    """I9: also right after the table's partition spec was changed."""
    with tempfile.TemporaryDirectory() as folder:
        local = LocalTable(folder=Path(folder), schema=SCHEMA, key=["id"], terms=old)
        for changes in history:
            local.write(change_table(changes, images=True))
            local = local.repartitioned(new)
        found = local.rows()
    assert {row.pop("id"): plain(row) for row in found} == applied(history)
