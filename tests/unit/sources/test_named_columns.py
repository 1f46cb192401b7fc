"""Rows without a column that a select names: which of them stop a pipeline."""

import numpy as np
import pytest

from icestream.errors import SchemaRejected
from icestream.schema import Reads
from icestream.sources.named_columns import NamedColumns, refuse_gone

Row = tuple[int, str]


def look(columns: NamedColumns, *rows: Row, group: str = "") -> None:
    """Rows as when they were written and the letters of the columns that they have."""
    names = sorted({name for _, has in rows for name in has})
    present = {name: np.array([name in has for _, has in rows]) for name in names}
    order = np.array([at for at, _ in rows])
    columns.look(present, np.ones(len(rows), dtype=bool), {group: order})


def named(*names: str, beginning: bool = False, declared: tuple[str, ...] = ()) -> NamedColumns:
    """What a select with these names is held against."""
    reads = Reads(columns=frozenset("kabc"), named=frozenset(names), beginning=beginning)
    return NamedColumns("t", reads, declared)


def test_a_row_without_a_named_column_stops_after_the_first_epoch():
    """E11, Mend h2: other columns may be absent, and so may a declared one."""
    look(named("k", "a"), (1, "ka"), (2, "kab"), (3, "ka"))
    look(named("k", "a", declared=("a",)), (1, "k"))
    look(NamedColumns("t", None), (1, "k"))
    with pytest.raises(SchemaRejected, match="t reads column a, which") as caught:
        look(named("k", "a"), (1, "ka"), (2, "k"))
    assert "columns: {t: {a: string}}" in str(caught.value.hint)


FIRST = {
    "older": ([(1, "kb"), (2, "kab")], True),
    "older, in batches": ([(1, "kb")], [(2, "kab"), (3, "kab")], True),
    "renamed": ([(1, "kb"), (2, "ka")], False),
    "renamed, in batches": ([(1, "kb")], [(2, "ka")], False),
    "dropped": ([(1, "kab"), (2, "kb")], False),
    "dropped, in batches that come in another order": ([(2, "kb")], [(1, "kab")], False),
    "alone": ([(1, "kb"), (2, "kb")], True),
}


@pytest.mark.parametrize("case", FIRST)
def test_rows_of_the_first_epoch_may_be_older_than_a_column(case: str):
    """E11, Mend h2: unless what is read shows that it was renamed or dropped."""
    *batches, passes = FIRST[case]
    columns = named("k", "a", beginning=True)
    if passes:
        for batch in batches:
            look(columns, *batch)
        return
    with pytest.raises(SchemaRejected, match="reads column a"):
        for batch in batches:
            look(columns, *batch)


@pytest.mark.parametrize("case", FIRST)
def test_splits_of_the_first_epoch_are_told_together_what_one_is_told(case: str):
    """E11, Mend h2: each row is read by another worker, which notices nothing."""
    *batches, passes = FIRST[case]
    seen = []
    for row in (row for batch in batches for row in batch):
        columns = named("k", "a", beginning=True)
        look(columns, row)
        seen.append(columns.seen)
    if passes:
        refuse_gone(seen)
        return
    with pytest.raises(SchemaRejected, match="t reads column a, which"):
        refuse_gone(seen)


def test_splits_of_later_epochs_and_of_other_tables_are_not_compared():
    """E11, Mend h2: a later epoch is refused row by row, and needs no comparison."""
    later = named("k", "a")
    look(later, (1, "ka"))
    assert later.seen == {}
    reads = Reads(columns=frozenset("kab"), named=frozenset("a"), beginning=True)
    one, other = NamedColumns("t", reads), NamedColumns("u", reads)
    look(one, (1, "ka"))
    look(other, (2, "kb"))
    refuse_gone([one.seen, other.seen])


def test_what_came_later_is_told_within_a_partition_alone():
    """E11, Mend h2: offsets of two partitions say nothing of each other."""
    columns = named("k", "a", beginning=True)
    look(columns, (1, "kab"), group="0")
    look(columns, (2, "kb"), group="1")
    with pytest.raises(SchemaRejected):
        look(columns, (2, "kb"), group="0")
