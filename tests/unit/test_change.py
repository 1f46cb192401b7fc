"""Folding leaves the last change of each key, and says which keys may exist already."""

import uuid

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icestream.change import AT, BEFORE, OP, SEQ, Op, fold, last_of_each, only_within

INSERT, UPSERT, DELETE = Op.INSERT, Op.UPSERT, Op.DELETE


def changes(*rows: tuple[Op, int, int, object, str | None]) -> pa.Table:
    """Changes as `(op, at, seq, key, value)`."""
    ops, ats, seqs, keys, values = zip(*rows, strict=True) if rows else ([],) * 5
    return pa.table(
        {
            OP: pa.array(ops, pa.int8()),
            AT: pa.array(ats, pa.int64()),
            SEQ: pa.array(seqs, pa.int64()),
            "id": pa.array(keys, pa.int64() if not rows else None),
            "value": pa.array(values, pa.string()),
        }
    )


def kept(table: pa.Table) -> dict[object, str]:
    rows = fold(table, ["id"]).kept.to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["value"] for row in rows}


def deleted(table: pa.Table) -> list[object]:
    return fold(table, ["id"]).deleted.column("id").to_pylist()


def test_the_last_change_of_a_key_is_kept():
    """I8: within an epoch changes of one key are folded to the last one."""
    table = changes((UPSERT, 1, 0, 1, "a"), (UPSERT, 2, 0, 1, "b"), (UPSERT, 1, 5, 2, "c"))
    assert kept(table) == {1: "b", 2: "c"}
    assert deleted(table) == [1, 2]


def test_order_is_by_timestamp_and_not_by_arrival():
    """C3: a file read earlier may hold the later change."""
    table = changes((UPSERT, 2, 0, 1, "new"), (UPSERT, 1, 9, 1, "old"))
    assert kept(table) == {1: "new"}


def test_the_logical_part_orders_changes_of_the_same_wall_time():
    """C3: timestamps are pairs."""
    table = changes((UPSERT, 1, 2147483647, 1, "new"), (UPSERT, 1, 3, 1, "old"))
    assert kept(table) == {1: "new"}


def test_a_delete_leaves_no_row_and_deletes_the_key():
    """I8: delete writes an equality delete by the identifier columns."""
    table = changes((UPSERT, 1, 0, 1, "a"), (DELETE, 2, 0, 1, None))
    assert kept(table) == {}
    assert deleted(table) == [1]


def test_a_row_written_again_after_its_delete_is_kept():
    """I8: update is both a delete and an insert."""
    table = changes((DELETE, 1, 0, 1, None), (UPSERT, 2, 0, 1, "b"))
    assert kept(table) == {1: "b"}
    assert deleted(table) == [1]


def test_an_insert_that_the_source_guarantees_to_be_new_writes_no_delete():
    """I8: nothing can lie under a key that is new."""
    assert deleted(changes((INSERT, 1, 0, 1, "a"))) == []
    assert deleted(changes((INSERT, 1, 0, 1, "a"), (UPSERT, 2, 0, 1, "b"))) == []
    assert kept(changes((INSERT, 1, 0, 1, "a"), (UPSERT, 2, 0, 1, "b"))) == {1: "b"}


def test_a_row_that_came_and_went_within_the_batch_leaves_nothing():
    """I8: no file deletes a row of its own commit."""
    table = changes((INSERT, 1, 0, 1, "a"), (DELETE, 2, 0, 1, None))
    assert kept(table) == {}
    assert deleted(table) == []


def test_an_insert_after_a_delete_of_an_older_row_still_deletes_the_older_row():
    """I8: the first change of the key tells whether the table may hold it."""
    table = changes((DELETE, 1, 0, 1, None), (INSERT, 2, 0, 1, "b"))
    assert kept(table) == {1: "b"}
    assert deleted(table) == [1]


def test_a_change_delivered_twice_is_one_change():
    """C3: duplicates are dropped by key and timestamp."""
    row = (UPSERT, 1, 0, 1, "a")
    assert kept(changes(row, row, row)) == {1: "a"}
    assert deleted(changes(row, row)) == [1]


def test_the_deleted_row_carries_the_before_image_of_the_first_change():
    """I9: the first before-image is the row as the table has it."""
    table = changes((UPSERT, 2, 0, 1, "b"), (UPSERT, 1, 0, 1, "a")).append_column(
        BEFORE, pa.array([{"region": "us"}, {"region": "eu"}])
    )
    assert fold(table, ["id"]).deleted.column(BEFORE).to_pylist() == [{"region": "eu"}]


def test_without_a_key_every_row_is_kept_and_none_deleted():
    """I8: rows that nothing identifies are only ever added."""
    table = changes((UPSERT, 1, 0, 1, "a"), (UPSERT, 1, 0, 1, "a"))
    folded = fold(table, [])
    assert (folded.kept.num_rows, folded.deleted.num_rows) == (2, 0)


def test_nothing_folds_to_nothing():
    """E9: an epoch without changes makes no file."""
    folded = fold(changes(), ["id"])
    assert (folded.kept.num_rows, folded.deleted.num_rows) == (0, 0)


def test_a_key_of_several_columns_is_one_key():
    """I8: composite primary keys."""
    table = pa.table(
        {
            OP: pa.array([UPSERT] * 3, pa.int8()),
            AT: [1, 2, 3],
            SEQ: [0, 0, 0],
            "city": ["a", "a", "b"],
            "id": [1, 1, 1],
            "value": ["x", "y", "z"],
        }
    )
    rows = fold(table, ["city", "id"]).kept.select(["city", "value"]).to_pylist()
    assert rows == [{"city": "a", "value": "y"}, {"city": "b", "value": "z"}]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(["a", "a", "b"], pa.large_string()),
        pa.array([b"a", b"a", b"b"], pa.large_binary()),
        pa.array([b"a", b"a", b"b"], pa.binary(1)),
        pa.array([True, True, False]),
        pa.array([1, 1, 2], pa.timestamp("us", "UTC")),
        pa.array([1, 1, 2], pa.date32()),
        pa.array([1, 1, 2], pa.time64("us")),
        pa.array([1, 1, 2], pa.decimal128(10, 2)),
        pa.ExtensionArray.from_storage(
            pa.uuid(), pa.array([uuid.UUID(int=n).bytes for n in (1, 1, 2)], pa.binary(16))
        ),
    ],
    ids=lambda keys: str(keys.type),
)
def test_keys_of_every_type_fold(keys):
    """I8: any column may be the key, uuids among them."""
    table = pa.table(
        {OP: pa.array([UPSERT, UPSERT, DELETE], pa.int8()), AT: [1, 2, 3], SEQ: [0] * 3, "id": keys}
    )
    folded = fold(table, ["id"])
    assert folded.kept.column("id").to_pylist() == keys[1:2].to_pylist()
    assert folded.deleted.column("id").to_pylist() == [keys[0].as_py(), keys[2].as_py()]


def test_a_span_holds_its_lower_bound_and_not_its_upper_one():
    """C2: an epoch holds exactly the changes of its half-open span."""
    table = changes(*[(UPSERT, at, seq, at, "x") for at in (1, 2, 3) for seq in (0, 7)])
    inside = only_within(table, (1, 7), (3, 0))
    places = zip(inside.column(AT).to_pylist(), inside.column(SEQ).to_pylist(), strict=True)
    assert list(places) == [(1, 7), (2, 0), (2, 7)]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from(list(Op)))))
def test_the_last_change_of_each_key_is_left_deletes_among_them(made):
    """E9, O12: as a plain loop over the changes in their order has it."""
    changes = pa.table(
        {
            OP: pa.array([int(op) for _, _, op in made], pa.int8()),
            AT: pa.array([at for at, _, _ in made], pa.int64()),
            SEQ: pa.array(range(len(made)), pa.int64()),
            "id": pa.array([key for _, key, _ in made], pa.int64()),
        }
    )
    expected: dict[int, tuple[int, int, Op]] = {}
    count: dict[int, int] = {}
    for seq, (at, key, op) in sorted(enumerate(made), key=lambda each: (each[1][0], each[0])):
        expected[key] = at, seq, op
        count[key] = count.get(key, 0) + 1
    found = last_of_each(changes, ["id"]).to_pylist()
    assert len(found) == len(expected)
    for row in found:
        at, seq, op = expected[row["id"]]
        again = op == Op.INSERT and count[row["id"]] > 1
        assert (row[AT], row[SEQ], row[OP]) == (at, seq, Op.UPSERT if again else op)
