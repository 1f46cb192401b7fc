"""Where a table stands that is read snapshot by snapshot, and what comes next.

A position is `(sequence number, state, files)`. While the snapshot of that number is loaded the
state is 0 and `files` of its files are done, in the order of their places; then it is 1, and all
changes up to that snapshot are included. `(5, 1, 9)` has chosen to take the changes up to snapshot
9 in one step.

A table whose copy was dropped is loaded anew, while the other copies remember where it was. The
load is of the newest snapshot: from `(5, 1)` to `(7, 0, 0)`. If that is the one where the table
stood, the states go up by two: from `(5, 1)` to `(5, 2, 0)` and, when it is loaded, to `(5, 3)`. So
an even state is a load, and a position never goes back.
"""

from collections.abc import Callable, Sequence
from math import inf

from icestream.frontier import MINIMUM, Position
from icestream.iceberg.snapshots import Snapshot

LOADING, FOLLOWING = 0, 1
# Where a table without any snapshot stands: all that it will ever have are changes.
BEFORE_ALL = -1
# A snapshot counts for at least this much in a group: planning takes time for each, however small.
_SNAPSHOT_BYTES_MIN = 64 * 1024


def is_choice(before: Position, after: Position) -> bool:
    """Whether an epoch only chooses a snapshot, and nothing is read."""
    if before == MINIMUM or (loads(after) and before[:2] != after[:2]):
        return True
    return before[0] == after[0] and not loads(before)


def loads(at: Position) -> bool:
    """Whether a snapshot is loaded there, once more or for the first time."""
    return at[1] % 2 == LOADING


def begins_load(at: Position) -> bool:
    """Whether a table is to be loaded there, and no file of it has been."""
    return len(at) == 3 and loads(at) and not at[2]


def load_anew(at: Position, newest: int) -> Position | None:
    """Where the load begins of a table that stood there and whose copy is gone.

    None when it goes on from there: it has yet to take its first file, or changes bring everything,
    or the branch was rolled back to before it.
    """
    number, state, *rest = at
    if begins_load(at) or number == BEFORE_ALL:
        return None
    # Rows of a snapshot that was chosen may be at the destination: no other comes before it.
    chosen = rest[0] if rest and not loads(at) else newest
    if chosen <= number:
        return (number, state - state % 2 + 2, 0) if chosen == number else None
    return (chosen, LOADING, 0)


def aimed(
    stands: tuple[int, int],
    aim: Sequence[int],
    newer: Sequence[Snapshot],
    steps: Callable[[Sequence[Snapshot]], Sequence[Sequence[Snapshot]]],
) -> list[Position]:
    """The way to the newest snapshot, step by step, each chosen before it is taken.

    What another run has chosen comes first. A single snapshot that keeps all rows sends nothing.
    """
    positions: list[Position] = [(aim[0], FOLLOWING)] if aim else []
    at = positions[-1] if aim else stands
    for step in steps([snapshot for snapshot in newer if snapshot.sequence_number > at[0]]):
        last = step[-1].sequence_number
        if len(step) > 1 or not step[0].keeps_rows:
            positions.append((*at, last))
        at = (last, FOLLOWING)
        positions.append(at)
    return positions


def grouped(ahead: Sequence[Snapshot], bytes_max: int) -> list[Sequence[Snapshot]]:
    """Small neighbours with the same columns together, every other snapshot alone."""
    groups: list[list[Snapshot]] = []
    room = 0.0
    for each in ahead:
        weight = _weight(each)
        if weight <= room and _alike(each, groups[-1][-1]):
            groups[-1].append(each)
            room -= weight
        else:
            groups.append([each])
            room = bytes_max - weight
    return list(groups)


def _weight(snapshot: Snapshot) -> float:
    """The bytes that a snapshot adds to a group; without end when it is to be taken alone.

    One that only replaces files is alone because nothing has to be read of it then.
    """
    if snapshot.keeps_rows or snapshot.changed_bytes is None:
        return inf
    return max(snapshot.changed_bytes, _SNAPSHOT_BYTES_MIN)


def _alike(one: Snapshot, other: Snapshot) -> bool:
    """Whether rows of both have the same columns and are told apart by the same."""
    return (one.schema_id, one.has_row_ids) == (other.schema_id, other.has_row_ids)
