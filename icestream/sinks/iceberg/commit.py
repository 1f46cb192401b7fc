"""Publishing an epoch in its tables: exactly once, or not at all and said so.

The four rules are those of every commit (`icestream.commit_protocol`). Here is what a table is to
them: its head is fresh metadata with the progress on it, and the swap is one of exactly that
metadata. Tables are published one by one, or all in one request that the catalog takes or refuses
as a whole. Both ways go by the same rules.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from icestream import failpoints, metrics
from icestream.commit_protocol import Move, Subject, bounded, fenced, insist, publish
from icestream.epoch import Progress, batch_id, table_id
from icestream.errors import (
    CommitConflict,
    Fenced,
    IcestreamError,
    RolledBack,
)
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import DATA, FileClosed
from icestream.iceberg.gateway import replaced
from icestream.iceberg.head import TableHead
from icestream.sinks import Committed, StaleWrite

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


class ClaimTable(Protocol):
    """A table that can be read afresh and take a claim, which has no files."""

    @property
    def name(self) -> object: ...

    def head(self, pipeline: str, branch: str) -> TableHead: ...

    def publish(
        self, head: TableHead, branch: str, files: Sequence[FileClosed], entries: summaries.Entries
    ) -> int: ...


class CommitTable(ClaimTable, Protocol):
    """A table that can be read afresh and swapped; Iceberg's, or a simulated one."""

    def publish(
        self,
        head: TableHead,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        truncated: bool = False,
    ) -> int: ...

    def prepare(
        self,
        head: TableHead,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        truncated: bool = False,
    ) -> Any: ...


class CommitCatalog(Protocol):
    """A catalog that takes the prepared snapshots of many tables, all or none."""

    def publish_together(self, prepared: Sequence[Any]) -> None: ...


class InParallel(Protocol):
    """Runs over items in parallel and raises the worst error when all are done."""

    def __call__(self, items: Mapping[K, V], work: Callable[[K, V], R]) -> dict[K, R]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEpoch:
    """One epoch for one table, ready to be published; `truncated` removes all older rows.

    `recount` corrects what a table that carries the epoch says of the epoch's tables; it has no
    files.
    """

    table: str
    branch: str
    expected: Progress
    new: Progress
    files: Sequence[FileClosed]
    written_for: tuple[str, int, int] | None
    labels: Mapping[str, str]
    truncated: bool = False
    recount: bool = False

    @property
    def move(self) -> Move:
        """What the commit does to the table's progress."""
        subject = _subject(self.table)
        return Move(expected=self.expected, new=self.new, subject=subject, recount=self.recount)

    @property
    def batch_id(self) -> str:
        """What the snapshot is found by."""
        return batch_id(self.new.pipeline, self.table, self.new.upper)


def publish_epoch(table: CommitTable, commit: TableEpoch) -> Committed:
    """Publish the epoch; when this returns it is durable exactly once.

    Raises `Fenced`, `ProgressLost`, `RolledBack` or `StaleWrite` with nothing published, and
    `CommitUnknown` or `TargetUnavailable` when the catalog does not answer: the same call, or a
    restart, finds out.
    """

    def read() -> dict[str, TableHead]:
        return {commit.table: table.head(commit.new.pipeline, commit.branch)}

    def swap(heads: Mapping[str, TableHead]) -> dict[str, int]:
        head, entries = heads[commit.table], _entries(commit)
        failpoints.reach(failpoints.BEFORE_PUBLISH)
        snapshot_id = table.publish(head, commit.branch, commit.files, entries, commit.truncated)
        failpoints.reach(failpoints.AFTER_PUBLISH)
        return {commit.table: snapshot_id}

    return _publish(_Tables({commit.table: commit}, read, swap))[commit.table]


def publish_together(
    catalog: CommitCatalog,
    tables: Mapping[str, CommitTable],
    commits: Mapping[str, TableEpoch],
    in_parallel: InParallel,
) -> dict[str, Committed]:
    """Publish the epoch in all its tables by one request; the promise of `publish_epoch` for all.

    Those that carry the epoch already, by an attempt whose answer was lost, are left as they are;
    all others are checked before any is swapped.
    """

    def head(table: str, commit: TableEpoch) -> TableHead:
        return tables[table].head(commit.new.pipeline, commit.branch)

    def swap(heads: Mapping[str, TableHead]) -> dict[str, int]:
        def prepare(table: str, head: TableHead) -> Any:
            commit = commits[table]
            entries = _entries(commit)
            return tables[table].prepare(
                head, commit.branch, commit.files, entries, commit.truncated
            )

        prepared = in_parallel(heads, prepare)
        failpoints.reach(failpoints.BEFORE_PUBLISH)
        catalog.publish_together(list(prepared.values()))
        failpoints.reach(failpoints.AFTER_PUBLISH)
        return {table: each.snapshot_id for table, each in prepared.items()}

    return _publish(_Tables(commits, lambda: in_parallel(commits, head), swap))


def _publish(tables: "_Tables") -> dict[str, Committed]:
    commits = tables.commits
    started = time.monotonic()

    def noted(error: IcestreamError) -> None:
        _note(", ".join(sorted(commits)), error)
        if isinstance(error, CommitConflict):
            for table in commits:
                metrics.COMMIT_CONFLICTS.labels(table).inc()

    moves = {table: commit.move for table, commit in commits.items()}
    landed = publish(tables, moves, bounded(noted))
    return {
        table: _duplicate(commit, landed[table].head, started)
        if (snapshot_id := landed[table].result) is None
        else _committed(commit, snapshot_id, started)
        for table, commit in commits.items()
    }


@dataclass(frozen=True, slots=True)
class _Tables:
    """What the rules ask of Iceberg tables, however many are read and swapped at once."""

    commits: Mapping[str, TableEpoch]
    read: Callable[[], Mapping[str, TableHead]]
    replace: Callable[[Mapping[str, TableHead]], Mapping[str, int]]

    def heads(self, keys: Collection[str]) -> Mapping[str, TableHead]:
        """The metadata of the tables, read afresh."""
        return self.read()

    def swap(self, heads: Mapping[str, TableHead]) -> Mapping[str, int]:
        """Publish a snapshot on each metadata, all or none; their ids."""
        return self.replace(heads)

    def progress(self, head: TableHead) -> Progress | None:
        """The progress on the metadata."""
        return head.progress

    def refuse_broken_history(
        self, key: str, head: TableHead, broken: IcestreamError | None
    ) -> None:
        """Another table, or an older state of this one, explains a progress that was not left."""
        self._refuse_another(key, head)
        refuse_rollback(head, key, self.commits[key].new.pipeline)

    def fits(self, key: str, head: TableHead) -> None:
        """Files are published only in the table, and with the schema and spec, they are for."""
        self._refuse_another(key, head)
        commit = self.commits[key]
        if commit.written_for is not None and commit.files:
            if (head.schema_id, head.spec_id) != commit.written_for[1:]:
                raise StaleWrite(key)

    def _refuse_another(self, key: str, head: TableHead) -> None:
        written_for = self.commits[key].written_for
        if written_for is not None and head.uuid != written_for[0]:
            raise replaced(key)


def publish_claim(table: ClaimTable, branch: str, claim: Progress, claim_id: str) -> Progress:
    """Publish this run's generation in a table, with the progress found there carried forward.

    Raises `Fenced` when a run of the same or a newer generation was faster.
    """
    name = str(table.name)

    def attempt(attempted: bool) -> Progress:
        head = table.head(claim.pipeline, branch)
        refuse_rollback(head, name, claim.pipeline)
        found = head.progress or Progress(pipeline=claim.pipeline)
        found = replace(found, table_id=table_id(head.uuid))
        if head.claim_id == claim_id:
            return found
        if found.generation >= claim.generation:
            raise fenced(found, claim.generation, _subject(name))
        mine = replace(found, generation=claim.generation)
        entries = summaries.to_entries(mine).plus({summaries.CLAIM: claim_id})
        table.publish(head, branch, [], entries)
        return mine

    return insist(attempt, bounded(lambda error: _note(name, error)))


def refuse_rollback(head: TableHead, table: str, pipeline: str) -> None:
    """Raise `RolledBack` when the pipeline's last commit is no longer in the branch's history."""
    if head.rolled_back_from is None:
        return
    lost, found = head.rolled_back_from, head.progress
    older = f"epoch {found.epoch}" if found else "before the pipeline's first epoch"
    if head.forgotten:
        older = "a snapshot whose history or frontier is no longer kept"
    raise RolledBack(
        f"table {table} was rolled back",
        detail=f"Pipeline {pipeline} committed epoch {lost.epoch}, but the table is at {older}.",
        hint="Run `icestream rollback --replay` to apply the undone epochs again, or "
        "`icestream rollback --accept` to leave them undone and go on from here.",
    )


def refuse_successor(head: TableHead, table: str, generation: int) -> None:
    """Raise `Fenced` when a newer run than that of `generation` has claimed the table."""
    if head.progress is not None and head.progress.generation > generation:
        raise fenced(head.progress, generation, _subject(table))


def rival_run(table: str) -> Fenced:
    """The error for a table that another run of the same pipeline has made meanwhile."""
    return Fenced(
        f"another run of the same pipeline has made table {table}",
        hint="Nothing is lost; start again when only one run is active.",
    )


def _subject(table: str) -> Subject:
    return Subject(
        name=f"table {table}",
        over=f" table {table}",
        meddling="writes snapshots with icestream's summary keys",
    )


def _entries(commit: TableEpoch) -> summaries.Entries:
    if commit.recount:
        # Like a claim it publishes no epoch, and so it has no batch id.
        return summaries.to_entries(commit.new)
    data_files = sum(file.kind == DATA for file in commit.files)
    delete_files = len(commit.files) - data_files
    counts = {"data": str(data_files), "delete": str(delete_files), "batch": commit.batch_id}
    return summaries.to_entries(commit.new).plus(
        {
            summaries.BATCH_ID: commit.batch_id,
            summaries.DATA_FILES: counts["data"],
            summaries.DELETE_FILES: counts["delete"],
            # A source's own labels may refer to what only the commit knows.
            **{name: value.format_map(counts) for name, value in commit.labels.items()},
        }
    )


def _committed(commit: TableEpoch, snapshot_id: int, started: float) -> Committed:
    seconds = time.monotonic() - started
    metrics.COMMIT_LATENCY.labels(commit.table).observe(seconds)
    metrics.EPOCH_FILES.labels(commit.table).inc(len(commit.files))
    metrics.MANIFEST_BYTES.labels(commit.table).inc(
        sum(len(file.content_json()) for file in commit.files)
    )
    return Committed(table=commit.table, snapshot_id=snapshot_id, duplicate=False, seconds=seconds)


def _duplicate(commit: TableEpoch, head: TableHead, started: float) -> Committed:
    metrics.DUPLICATE_EPOCHS.labels(commit.table).inc()
    log.info("epoch found published", extra={"table": commit.table, "epoch": commit.new.epoch})
    return Committed(
        table=commit.table,
        snapshot_id=head.progress_snapshot_id,
        duplicate=True,
        seconds=time.monotonic() - started,
    )


def _note(table: str, error: IcestreamError) -> None:
    log.debug("commit attempt failed: %s", error, extra={"table": table})
