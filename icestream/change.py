"""Change batches: Arrow tables with one row per change, and folding them to the last per key.

A change batch has the columns `OP`, `AT`, `SEQ`, the table's own columns, and optionally
`BEFORE`, a struct with the columns the table is partitioned by as they were before the change
(null when unknown). `(AT, SEQ)` orders the changes of a key; two changes of a key at the same
place are one change delivered twice.
"""

import os
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Spark's buffers are unaligned. With this setting Arrow copies them where it must; without it Arrow
# also writes a line of advice to stderr for each column. It reads the setting at its first use.
os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "reallocate")

# No user's column is called like these: `icestream.schema.reserved` refuses a zero byte in a name.
OP = "\0op"
AT = "\0at"
SEQ = "\0seq"
BEFORE = "\0before"


class Op(IntEnum):
    """What happened to a row."""

    INSERT = 0  # The source guarantees that the key was not there before.
    UPSERT = 1  # Whatever was there under this key is replaced.
    DELETE = 2


class Folded:
    """The net effect of a batch: rows to write, and rows whose key must be deleted first.

    `kept` has the last change of each key that leaves a row. `deleted` has each key that may exist
    already, and its first change's before-image: the row as the table has it.
    """

    __slots__ = ("deleted", "kept")

    def __init__(self, kept: pa.Table, deleted: pa.Table):
        self.kept = kept
        self.deleted = deleted


def fold(changes: pa.Table, key: Sequence[str], each_key_once: bool = False) -> Folded:
    """Reduce changes to one per key: what remains is what applying them one by one would leave.

    Without a key nothing can be identified: every row is kept and none deleted. Where each key is
    known to occur once, nothing needs to be brought together.
    """
    if not key:
        return Folded(changes, changes.slice(0, 0))
    if changes.num_rows == 0:
        return Folded(changes, changes)
    if each_key_once:
        ops = changes.column(OP).combine_chunks().to_numpy(zero_copy_only=False)
        kept, deleted = np.flatnonzero(ops != Op.DELETE), np.flatnonzero(ops != Op.INSERT)
        return _folded(changes, key, kept, deleted)
    ordered = _in_order(changes)
    first, last = _edges(ordered, key)
    ops = ordered.column(OP).combine_chunks().to_numpy(zero_copy_only=False)
    kept = np.sort(last[ops[last] != Op.DELETE])
    deleted = np.sort(first[ops[first] != Op.INSERT])
    return _folded(ordered, key, kept, deleted)


def last_of_each(changes: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last change of each key, deletes among them, for destinations that keep one per key.

    An insert that is not the only change of its key is an upsert: the key may have been there. A
    delete stays even after an insert: what an earlier attempt has shown must go.
    """
    if changes.num_rows == 0:
        return changes
    ordered = _in_order(changes)
    first, last = _edges(ordered, key)
    order = np.argsort(last)
    first, last = first[order], last[order]
    found = _take(ordered, last)
    ops = found.column(OP).combine_chunks().to_numpy(zero_copy_only=False)
    several = (ops == Op.INSERT) & (first != last)
    replaced = pa.array(np.where(several, np.int8(Op.UPSERT), ops).astype(np.int8))
    return found.set_column(found.column_names.index(OP), OP, replaced)


def _edges(ordered: pa.Table, key: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The places of the first and of the last change of each key."""
    # Numbers for names: Arrow would take a name such as `.id` for a path.
    parts = {str(number): _groupable(ordered.column(name)) for number, name in enumerate(key)}
    rows = pa.array(np.arange(ordered.num_rows, dtype=np.int64))
    groups = pa.table({**parts, "row": rows}).group_by(list(parts), use_threads=False)
    edges = groups.aggregate([("row", "min"), ("row", "max")])
    first = edges.column("row_min").combine_chunks().to_numpy(zero_copy_only=False)
    last = edges.column("row_max").combine_chunks().to_numpy(zero_copy_only=False)
    return first, last


def _folded(changes: pa.Table, key: Sequence[str], kept: np.ndarray, deleted: np.ndarray) -> Folded:
    identity = [*key, BEFORE] if BEFORE in changes.column_names else list(key)
    return Folded(_take(changes, kept), _take(changes.select(identity), deleted))


def _groupable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Arrow groups by plain types only; a uuid's bytes tell it as well."""
    if isinstance(column.type, pa.BaseExtensionType):
        return column.cast(column.type.storage_type)
    return column


def _in_order(changes: pa.Table) -> pa.Table:
    at = changes.column(AT).combine_chunks().to_numpy(zero_copy_only=False)
    seq = changes.column(SEQ).combine_chunks().to_numpy(zero_copy_only=False)
    ascending = (at[1:] > at[:-1]) | ((at[1:] == at[:-1]) & (seq[1:] >= seq[:-1]))
    if ascending.all():
        return changes
    # A stable sort: of two deliveries of one change the later read is as good as the earlier.
    return changes.take(pa.array(np.lexsort((seq, at))))


def _take(rows: pa.Table, indices: np.ndarray) -> pa.Table:
    if len(indices) == rows.num_rows:
        return rows
    return rows.take(pa.array(indices))


def only_within(changes: pa.Table, lower: tuple[int, int], upper: tuple[int, int]) -> pa.Table:
    """The changes at `(AT, SEQ)` in the half-open span `[lower, upper)`."""
    return changes.filter(within(changes.column(AT), changes.column(SEQ), lower, upper))


def within(
    at: pa.ChunkedArray, seq: pa.ChunkedArray, lower: tuple[int, int], upper: tuple[int, int]
) -> pa.ChunkedArray:
    """Which places `(at, seq)` lie in the half-open span `[lower, upper)`."""
    return pc.and_(_not_before(at, seq, lower), pc.invert(_not_before(at, seq, upper)))


def _not_before(at: pa.ChunkedArray, seq: pa.ChunkedArray, bound: tuple[int, int]) -> pa.Array:
    wall, logical = bound
    same = pc.and_(pc.equal(at, wall), pc.greater_equal(seq, logical))
    return pc.or_(pc.greater(at, wall), same)
