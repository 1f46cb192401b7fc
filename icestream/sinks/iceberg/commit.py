"""Publishing an epoch in its tables: exactly once, or not at all and said so.

An attempt reads fresh metadata, checks it, and swaps against exactly that metadata. Four rules make
it exact; leaving out any one of them (or the pair that covers for it) loses or doubles rows, which
tests show by switching them off:

1. Swap: the catalog replaces the metadata only if it still is the one that was checked.
2. Continuity: the progress found there is exactly the one this run last saw or made there, and the
   epoch is newer. So the epoch joins on to what is durable, whoever else wrote in between, and no
   table takes an epoch twice, whoever asks for it.
3. Fence: no newer generation of the pipeline has claimed the table. A starting run claims with a
   commit of its own, which also makes every commit prepared before it fail.
4. Read-back: after an answer was lost, and before every further attempt, look for the own batch id
   first. A refusal does not prove that the commit was not ours: the client may have sent it twice.

Tables are published one by one, or all in one request that the catalog takes or refuses as a whole.
Both ways go by the same rules.

The obvious wrong way is to check first and commit with the library's own retry: it rebases onto
newer metadata that nobody checked.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from icestream import failpoints, metrics
from icestream.epoch import Progress, batch_id, table_id
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    Fenced,
    IcestreamError,
    ProgressLost,
    RolledBack,
    TargetUnavailable,
)
from icestream.iceberg import progress as summaries
from icestream.iceberg.files import DATA, FileClosed
from icestream.iceberg.gateway import replaced
from icestream.iceberg.head import Head
from icestream.sinks import Committed, StaleWrite

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")

# Conflicts are settled by trying again at once. A lost answer is looked up at once, too; a catalog
# that is silent then is waited for by the pipeline, which calls again.
CONFLICTS_MAX = 20
SILENCES_MAX = 3


class ClaimTable(Protocol):
    """A table that can be read afresh and take a claim, which has no files."""

    @property
    def name(self) -> object: ...

    def head(self, pipeline: str, branch: str) -> Head: ...

    def publish(
        self, head: Head, branch: str, files: Sequence[FileClosed], entries: summaries.Entries
    ) -> int: ...


class CommitTable(ClaimTable, Protocol):
    """A table that can be read afresh and swapped; Iceberg's, or a simulated one."""

    def publish(
        self,
        head: Head,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        emptied: bool = False,
    ) -> int: ...

    def prepare(
        self,
        head: Head,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        emptied: bool = False,
    ) -> Any: ...


class CommitCatalog(Protocol):
    """A catalog that takes the prepared snapshots of many tables, all or none."""

    def publish_together(self, prepared: Sequence[Any]) -> None: ...


class Each(Protocol):
    """Runs over items in parallel and raises the worst error when all are done."""

    def __call__(self, items: Mapping[K, V], work: Callable[[K, V], R]) -> dict[K, R]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One epoch for one table, ready to be published; `emptied` removes all older rows.

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
    emptied: bool = False
    recount: bool = False

    @property
    def batch_id(self) -> str:
        """What the snapshot is found by."""
        return batch_id(self.new.pipeline, self.table, self.new.upper)


def publish_epoch(table: CommitTable, commit: Commit) -> Committed:
    """Publish the epoch; when this returns it is durable exactly once.

    Raises `Fenced`, `ProgressLost`, `RolledBack` or `StaleWrite` with nothing published, and
    `CommitUnknown` or `TargetUnavailable` when the catalog does not answer: the same call, or a
    restart, finds out.
    """
    started = time.monotonic()
    entries = _entries(commit)
    attempted, attempts = False, _Attempts(commit.table)
    while True:
        try:
            head = table.head(commit.new.pipeline, commit.branch)
            if _published(head, commit, attempted):
                return _duplicate(commit, head, started)
            _check(head, commit)
            failpoints.reach(failpoints.BEFORE_PUBLISH)
            snapshot_id = table.publish(head, commit.branch, commit.files, entries, commit.emptied)
            failpoints.reach(failpoints.AFTER_PUBLISH)
            return _committed(commit, snapshot_id, started)
        except CommitConflict as error:
            metrics.COMMIT_CONFLICTS.labels(commit.table).inc()
            attempts.failed(error)
        except (CommitUnknown, TargetUnavailable) as error:
            attempts.failed(error)
        attempted = True


def publish_together(
    catalog: CommitCatalog,
    tables: Mapping[str, CommitTable],
    commits: Mapping[str, Commit],
    each: Each,
) -> dict[str, Committed]:
    """Publish the epoch in all its tables by one request; the promise of `publish_epoch` for all.

    Every attempt looks at all tables afresh. Those that carry the epoch already, by an attempt
    whose answer was lost, are left as they are; all others are checked before any is swapped.
    """
    started = time.monotonic()
    entries = {table: _entries(commit) for table, commit in commits.items()}
    attempted, attempts = False, _Attempts(", ".join(sorted(commits)))
    while True:
        try:
            heads = each(
                commits,
                lambda table, commit: tables[table].head(commit.new.pipeline, commit.branch),
            )
            missing = {
                table: commit
                for table, commit in commits.items()
                if not _published(heads[table], commit, attempted)
            }
            for table, commit in missing.items():
                _check(heads[table], commit)
            prepared = each(missing, _Preparing(tables, heads, entries))
            if prepared:
                failpoints.reach(failpoints.BEFORE_PUBLISH)
                catalog.publish_together(list(prepared.values()))
                failpoints.reach(failpoints.AFTER_PUBLISH)
            return {
                table: _committed(commit, prepared[table].snapshot_id, started)
                if table in prepared
                else _duplicate(commit, heads[table], started)
                for table, commit in commits.items()
            }
        except CommitConflict as error:
            for table in commits:
                metrics.COMMIT_CONFLICTS.labels(table).inc()
            attempts.failed(error)
        except (CommitUnknown, TargetUnavailable) as error:
            attempts.failed(error)
        attempted = True


@dataclass(frozen=True, slots=True)
class _Preparing:
    """Prepares a table's snapshot on the head that was checked."""

    tables: Mapping[str, CommitTable]
    heads: Mapping[str, Head]
    entries: Mapping[str, summaries.Entries]

    def __call__(self, table: str, commit: Commit) -> Any:
        head, entries = self.heads[table], self.entries[table]
        return self.tables[table].prepare(
            head, commit.branch, commit.files, entries, commit.emptied
        )


def publish_claim(table: ClaimTable, branch: str, claim: Progress, claim_id: str) -> Progress:
    """Publish this run's generation in a table, with the progress found there carried forward.

    Raises `Fenced` when a run of the same or a newer generation was faster.
    """
    attempts = _Attempts(str(table.name))
    while True:
        try:
            head = table.head(claim.pipeline, branch)
            refuse_rollback(head, str(table.name), claim.pipeline)
            found = head.progress or Progress(pipeline=claim.pipeline)
            found = replace(found, table_id=table_id(head.uuid))
            if head.claim_id == claim_id:
                return found
            if found.generation >= claim.generation:
                raise _fenced(str(table.name), found, claim.generation)
            mine = replace(found, generation=claim.generation)
            entries = summaries.to_entries(mine).plus({summaries.CLAIM: claim_id})
            table.publish(head, branch, [], entries)
            return mine
        except (CommitConflict, CommitUnknown, TargetUnavailable) as error:
            attempts.failed(error)


def refuse_rollback(head: Head, table: str, pipeline: str) -> None:
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


def refuse_successor(head: Head, table: str, generation: int) -> None:
    """Raise `Fenced` when a newer run than that of `generation` has claimed the table."""
    if head.progress is not None and head.progress.generation > generation:
        raise _fenced(table, head.progress, generation)


def rival_run(table: str) -> Fenced:
    """The error for a table that another run of the same pipeline has made meanwhile."""
    return Fenced(
        f"another run of the same pipeline has made table {table}",
        hint="Nothing is lost; start again when only one run is active.",
    )


def _published(head: Head, commit: Commit, attempted: bool) -> bool:
    """Whether the epoch is in the table already: by an attempt whose answer was lost, or earlier.

    What the table says of the epoch's other tables does not matter: it has the epoch's rows.
    """
    if attempted and not failpoints.rule_on(failpoints.RULE_READ_BACK):
        return False
    found = head.progress
    if found is None or found.generation != commit.new.generation:
        return False
    return found == commit.new if commit.recount else found.same_epoch(commit.new)


def _check(head: Head, commit: Commit) -> None:
    """Continuity, fence and preconditions, on the very metadata that will be swapped."""
    found = head.progress or Progress(pipeline=commit.new.pipeline)
    if failpoints.rule_on(failpoints.RULE_FENCE) and found.generation > commit.new.generation:
        raise _fenced(commit.table, found, commit.new.generation)
    if commit.written_for is not None and head.uuid != commit.written_for[0]:
        raise replaced(commit.table)
    if failpoints.rule_on(failpoints.RULE_CONTINUITY):
        refuse_rollback(head, commit.table, commit.new.pipeline)
        if found != commit.expected:
            raise _discontinued(commit, found)
        if not commit.recount and found.epoch >= commit.new.epoch:
            raise _discontinued(commit, found)
    if commit.written_for is not None and commit.files:
        if (head.schema_id, head.spec_id) != commit.written_for[1:]:
            raise StaleWrite(commit.table)


def _discontinued(commit: Commit, found: Progress) -> IcestreamError:
    if found.epoch >= commit.new.epoch:
        return Fenced(
            f"table {commit.table} is ahead of this run",
            detail=f"It holds epoch {found.epoch} while this run is at {commit.new.epoch}.",
            hint="Another run of the same pipeline is active; stop one of them.",
        )
    return ProgressLost(
        f"the progress of table {commit.table} is not the one this run left there",
        detail=f"Epoch {commit.expected.epoch} was expected and epoch {found.epoch} found.",
        hint="Check who else writes snapshots with icestream's summary keys, then start again.",
    )


def _fenced(table: str, found: Progress, generation: int) -> Fenced:
    return Fenced(
        f"a newer run of pipeline {found.pipeline} has taken over table {table}",
        detail=f"The table is claimed by generation {found.generation}, this run is {generation}.",
        hint="Nothing is lost; let the newer run work, or stop it before you start this one.",
    )


def _entries(commit: Commit) -> summaries.Entries:
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


def _committed(commit: Commit, snapshot_id: int, started: float) -> Committed:
    seconds = time.monotonic() - started
    metrics.COMMIT_LATENCY.labels(commit.table).observe(seconds)
    metrics.EPOCH_FILES.labels(commit.table).inc(len(commit.files))
    metrics.MANIFEST_BYTES.labels(commit.table).inc(
        sum(len(file.content_json()) for file in commit.files)
    )
    return Committed(table=commit.table, snapshot_id=snapshot_id, duplicate=False, seconds=seconds)


def _duplicate(commit: Commit, head: Head, started: float) -> Committed:
    metrics.DUPLICATE_EPOCHS.labels(commit.table).inc()
    log.info("epoch found published", extra={"table": commit.table, "epoch": commit.new.epoch})
    return Committed(
        table=commit.table,
        snapshot_id=head.progress_snapshot_id,
        duplicate=True,
        seconds=time.monotonic() - started,
    )


class _Attempts:
    """Tries that failed; ends them when there were too many."""

    def __init__(self, table: str):
        self._table = table
        self._conflicts = 0
        self._silences = 0

    def failed(self, error: IcestreamError) -> None:
        """Return for another try, or raise the error."""
        conflict = isinstance(error, CommitConflict)
        self._conflicts += conflict
        self._silences += not conflict
        over = self._conflicts >= CONFLICTS_MAX or self._silences >= SILENCES_MAX
        log.debug("commit attempt failed: %s", error, extra={"table": self._table})
        if over:
            raise error
