"""An epoch becomes one snapshot in each of its tables, with the progress that it makes durable.

Each table is told of the epoch's other tables: which they are, and where they were before. A start
reads this to find out which tables lack an epoch (`icestream.epoch`). The rules by which a snapshot
is published are in the module `commit`.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from icestream import dead_letters, metrics
from icestream.epoch import Epoch, Progress, furthest, name_id
from icestream.errors import Broken, check
from icestream.iceberg import progress as summaries
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.closed import DATA, FileClosed
from icestream.report import Report
from icestream.sinks import Committed, StaleWrite, Written
from icestream.sinks.iceberg.claimed import ClaimedTables
from icestream.sinks.iceberg.commit import (
    TableEpoch,
    publish_epoch,
    publish_together,
)
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.state import TableState, in_parallel
from icestream.sinks.iceberg.writer import IcebergWriter


class EpochPublisher:
    """Publishes epochs in tables that this run has claimed."""

    def __init__(
        self, catalog: Catalog, options: IcebergSinkOptions, pipeline: str, tables: ClaimedTables
    ):
        self._catalog = catalog
        self._options = options
        self._pipeline = pipeline
        self._tables = tables

    @property
    def _states(self) -> dict[str, TableState]:
        return self._tables.states

    def commit(self, written: Written) -> Sequence[Committed]:
        """Publish the epoch in every table that it changes; see `Sink.commit`.

        Tables come before their dead letters: a table that has the epoch says which records are
        letters, and letters that have it say that all rows are there. So an epoch that is written
        again by another schema brings no record twice, and none is left out.
        """
        epoch = written.epoch
        carriers, complete = self._carriers(epoch), self._complete(epoch)
        files = collect(written.reports, epoch.number)
        files.update({table: files.get(table, []) for table in sorted(written.truncated)})
        files = {table: closed for table, closed in files.items() if table not in complete}
        new = replace(
            self._progress_of(epoch, {*carriers, *files}), catching_up=written.catching_up
        )
        commits = {
            table: self._commit(table, new, closed, written)
            for table, closed in files.items()
            if table not in carriers
        }
        self._make_known(commits)
        try:
            if self._options.atomic and len(commits) > 1:
                self._publish_together(commits)
            else:
                self._publish_in_turn(commits)
        except StaleWrite:
            for state in list(self._states.values()):
                state.target = None
            raise
        self._recount(epoch, new)
        # Not before: what fails for a moment is published once more, with the same files.
        for file in itertools.chain.from_iterable(files.values()):
            metrics.FILES_CLOSED.labels(file.table, file.kind).inc()
        found = {table: self._states[table].committed or _kept(table) for table in files}
        return [replace(one, duplicate=True) if t in carriers else one for t, one in found.items()]

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Publish the frontier of an epoch without changes, in the first table by default.

        Only in a table that the source feeds: one that left the configuration stays as it is, and
        so does one that lies behind.
        """
        up_to_date = [
            t for t, state in list(self._states.items()) if not state.progress.catching_up
        ]
        where = table or min(filter(self._tables.is_fed, up_to_date), default=None)
        if where not in self._states:
            return False
        self._make_known([where])
        new = self._progress_of(epoch, {where})
        nothing = Written(epoch=epoch, reports=[], writer=None, labels=labels)
        self._publish(where, self._commit(where, new, [], nothing))
        return True

    def lacking_letters(self, epoch: Epoch, tables: Sequence[str]) -> dict[str, TableState]:
        """Those of the tables that carry the epoch while their dead letters have yet to take it."""
        carriers = frozenset(self._carriers(epoch))
        return {
            t: s for t in carriers.intersection(tables) if (s := self._lacks_letters(t, carriers))
        }

    def _lacks_letters(self, table: str, carriers: Collection[str]) -> TableState | None:
        """The state of a table that carries an epoch which its dead letters have yet to take."""
        letters = self._states.get(dead_letters.table_of(table))
        if letters is None or dead_letters.table_of(table) in carriers:
            return None
        state = self._states[table]
        lacking = letters.progress.table_id in state.progress.members
        return state if lacking and state.progress.schema_id is not None else None

    def _carriers(self, epoch: Epoch) -> list[str]:
        """The tables that have taken the epoch already: in this run, or before a restart."""
        span = Progress(
            pipeline=self._pipeline, epoch=epoch.number, lower=epoch.lower, upper=epoch.upper
        )
        return [t for t, state in list(self._states.items()) if state.progress.same_epoch(span)]

    def _complete(self, epoch: Epoch) -> set[str]:
        """Tables that must not take the epoch any more, for it was written without them.

        An example: table `orders` has taken epoch 7 and says that the tables of epoch 7 are
        {orders}. So `orders__dead_letters` must not take epoch 7, even if a second reading, by
        another schema, finds letters. The same holds with both names exchanged.
        """
        carriers, complete = self._carriers(epoch), set()
        for table in carriers:
            other = dead_letters.counterpart(table)
            state, members = (
                self._states.get(other),
                self._states[table].progress.members,
            )
            if state is not None and members and other not in carriers:
                complete |= {other} if state.progress.table_id not in members else set()
        return complete

    def _commit(
        self, table: str, new: Progress, files: Sequence[FileClosed], written: Written
    ) -> TableEpoch:
        writer = written.writer
        target = writer.targets.get(table) if isinstance(writer, IcebergWriter) else None
        new = replace(new, schema_id=target.schema_id if target else None)
        truncated = table in written.truncated
        # Where no older row stays there is nothing to delete.
        kept = [file for file in files if not truncated or file.kind == DATA]
        return TableEpoch(
            table=table,
            branch=self._options.branch,
            expected=self._states[table].progress,
            new=new,
            files=kept,
            written_for=(target.uuid, target.schema_id, target.spec_id) if target else None,
            labels=written.labels,
            truncated=truncated,
        )

    def _progress_of(self, epoch: Epoch, tables: Collection[str]) -> Progress:
        """The progress that an epoch of these tables makes durable."""
        ids = frozenset(self._states[table].progress.table_id for table in tables)
        known = [state.progress for state in list(self._states.values())]
        before = {
            # A table that has taken the epoch already knows where it was before.
            each.table_id: each.before.get(each.table_id, 0)
            if each.epoch == epoch.number
            else each.epoch
            for each in known
        }
        new = summaries.progress_of(epoch, self._pipeline, self._tables.generation, len(tables))
        before = {name: number for name, number in before.items() if number}
        return replace(new, members=ids, before=before, names=self._own_names())

    def _own_names(self) -> frozenset[str]:
        states = list(self._states.values())
        return frozenset(name_id(state.handle.name.name) for state in states)

    def _make_known(self, tables: Iterable[str]) -> None:
        """Have a table of the last epoch name tables that are new, before they take an epoch.

        Where records name the tables only the tables themselves tell which ones there are. A start
        that cannot read one of them must know that it is there: it may hold the last epoch alone.
        """
        if not self._tables.named_by_records:
            return
        states = list(self._states.items())
        last = furthest(state.progress for _, state in states)
        new = {name_id(self._states[table].handle.name.name) for table in tables}
        if last is None or new <= last.names:
            return
        witness = next(table for table, state in states if state.progress is last)
        naming = self._correction(witness, replace(last, names=last.names | self._own_names()))
        self._publish(witness, naming)

    def _recount(self, epoch: Epoch, new: Progress) -> None:
        """Have all tables of an epoch say the same of its tables.

        An epoch that is written a second time may have other tables than the first time. What the
        tables said that took it then is corrected, by commits without files. The source is told
        that the epoch is durable only afterwards, so whoever finds an epoch whose tables do not
        agree can write it once more.
        """
        corrected = {}
        for table in self._carriers(epoch):
            state = self._states[table]
            right = replace(state.progress, tables=new.tables, members=new.members)
            if right != state.progress:
                corrected[table] = self._correction(table, right)
        in_parallel(corrected, self._publish)

    def _correction(self, table: str, right: Progress) -> TableEpoch:
        """A commit without files, with which a table says something else of its last epoch."""
        return TableEpoch(
            table=table,
            branch=self._options.branch,
            expected=self._states[table].progress,
            new=right,
            files=[],
            written_for=None,
            labels={},
            recount=True,
        )

    def _publish(self, table: str, commit: TableEpoch) -> None:
        self._note(commit, publish_epoch(self._states[table].handle, commit))

    def _publish_in_turn(self, commits: Mapping[str, TableEpoch]) -> None:
        """Publish the epoch in its tables, and then in those of their dead letters."""
        letters = {t: c for t, c in commits.items() if t.endswith(dead_letters.SUFFIX)}
        in_parallel({t: c for t, c in commits.items() if t not in letters}, self._publish)
        in_parallel(letters, self._publish)

    def _publish_together(self, commits: Mapping[str, TableEpoch]) -> None:
        handles = {table: self._states[table].handle for table in commits}
        committed = publish_together(self._catalog, handles, commits, in_parallel)
        for table, commit in commits.items():
            self._note(commit, committed[table])

    def _note(self, commit: TableEpoch, committed: Committed) -> None:
        """Remember what a table holds now that its commit is durable."""
        state, new = self._states[commit.table], commit.new
        if committed.duplicate:
            # An earlier attempt brought the epoch, and may have said something else of its tables.
            new = state.handle.head(self._pipeline, self._options.branch).progress or new
        state.progress = replace(new, table_id=state.progress.table_id)
        if commit.recount:
            return
        state.committed = committed
        state.renames = 0
        table = commit.table
        for file in commit.files:
            metrics.ROWS_WRITTEN.labels(table, file.kind).inc(file.record_count)
            metrics.BYTES_WRITTEN.labels(table, file.kind).inc(file.size_bytes)


def _kept(table: str) -> Committed:
    """The result for a table that took the epoch in an earlier run."""
    return Committed(table=table, snapshot_id=None, duplicate=True, seconds=0.0)


def collect(reports: Iterable[Report], epoch: int) -> dict[str, list[FileClosed]]:
    """Reported files by table; a repeated report is dropped, one that differs is refused.

    Of a task that ran twice the files of one attempt count: the first that is met.
    """
    by_path: dict[str, FileClosed] = {}
    attempts: dict[tuple[str, str], str] = {}
    for report in reports:
        file = FileClosed.of(report)
        check(file.epoch == epoch, f"{file.path} belongs to epoch {epoch}")
        if attempts.setdefault((file.table, file.worker), file.attempt) != file.attempt:
            continue
        known = by_path.get(file.path)
        if known is not None and known.sha256 != file.sha256:
            raise Broken(
                f"two different files were reported under {file.path}",
                detail="A task that ran twice did not write the same file twice.",
            )
        if known is None:
            by_path[file.path] = file
    tables: dict[str, list[FileClosed]] = {}
    for _, file in sorted(by_path.items()):
        tables.setdefault(file.table, []).append(file)
    return tables
