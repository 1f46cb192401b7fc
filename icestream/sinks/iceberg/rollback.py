"""A table that was rolled back, or that lacks epochs, settled as its operator wants it.

Either the undone epochs are applied again (`replay`), from the progress that the table has now, or
they stay undone and the newer progress is written down as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from icestream.epoch import (
    Progress,
)
from icestream.errors import (
    HistoryLost,
)
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.head import TableHead
from icestream.iceberg.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A table as it is, the newer progress that it had before, and the claim that settles it."""

    table: str
    handle: Table
    head: TableHead
    newer: Progress
    claim_id: str


def settle(
    rollback: Rollback, pipeline: str, branch: str, replay: bool, verify: Callable[[Frontier], None]
) -> Progress:
    """Publish what counts from now on; `verify` raises when the source cannot serve a replay."""
    table, handle, head, newer = rollback.table, rollback.handle, rollback.head, rollback.newer
    if replay and head.forgotten:
        raise HistoryLost(
            f"the epochs after the snapshot that table {table} was rolled back to cannot be "
            "applied again",
            detail="The table keeps large frontiers of its newest snapshots only, and what was "
            "expired only as long as older metadata files are there.",
            hint="Run `icestream rollback --accept` to leave the undone epochs undone, or roll "
            "the table back to a newer snapshot, or drop it and start anew.",
        )
    older = head.progress or Progress(pipeline=pipeline)
    if replay:
        _refuse_unserved(table, older.upper, verify)
    kept = replace(older, catching_up=True) if replay else newer
    newest = max(older.generation, newer.generation)
    progress = replace(kept, generation=newest + 1)
    entries = summaries.to_entries(progress).plus({summaries.CLAIM: rollback.claim_id})
    handle.publish(head, branch, [], entries)
    return progress


def _refuse_unserved(table: str, after: Frontier, verify: Callable[[Frontier], None]) -> None:
    """Raise `HistoryLost` when the source no longer has what a replay would need."""
    try:
        verify(after)
    except HistoryLost as lost:
        raise HistoryLost(
            f"the undone epochs of table {table} cannot be applied again: {lost.message}",
            detail=lost.detail,
            hint="Run `icestream rollback --accept` to leave them undone, or drop this one table: "
            "the pipeline then builds it anew from what the source has.",
        ) from lost
