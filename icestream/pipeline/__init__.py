"""The loop: mint an epoch, let workers write it, commit it in order, acknowledge it.

    Source.available ─ mint ─► Epoch [lower, upper) ─► plan ──► workers write files nobody sees
                                                                         │ reports
    Source.ack ◄─ durable ◄─ Sink.commit, epoch after epoch  ◄───────────┘

This is the only place that orders these steps, and the only one that waits for trouble to pass
(`icestream.patience`): what it calls tries again at once, for some seconds at most, or not at all.

Up to `epochs_in_flight` epochs are read and written at once; epoch n+1 starts to be committed only
when every table of epoch n has committed, which is what lets a restart derive from the tables alone
where to go on (`icestream.epoch.resume_point`).

The source is told only what a destination remembers. An epoch without changes makes no snapshot:
its frontier advances in memory, and becomes durable with the next epoch or heartbeat.

Longer than 600 lines because the order of all steps is read in one place: of a start, of tables
that catch up, of dead letters that are tried again, and of the stream.
"""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from icestream import dead_letters, failpoints, metrics
from icestream.abilities import refuse_halves
from icestream.epoch import Epoch, Progress, Resume, resume_point
from icestream.errors import (
    Broken,
    CommitUnknown,
    Fenced,
    HistoryLost,
    IcestreamError,
    Retryable,
    SourceUnavailable,
    TargetUnavailable,
    check,
)
from icestream.frontier import Frontier
from icestream.patience import Patience, Stopped, Trouble
from icestream.pipeline.cadence import Cadence
from icestream.pipeline.health import Health, State, brief
from icestream.pipeline.writing import REWRITES_MAX, EpochRunner, WriteEpoch, all_but
from icestream.report import describe
from icestream.sinks import (
    SINK_ABILITIES,
    Sink,
    StaleWrite,
    Writer,
    Written,
    of_tables,
)
from icestream.sources import (
    CatchUp,
    EpochPlan,
    Finish,
    LettersTried,
    Remembered,
    Source,
    SplitsLost,
    StartPlan,
)
from icestream.sources.abilities import (
    SOURCE_ABILITIES,
    HasBacklog,
    Interruptible,
    RegroupsSplits,
    TakesLetters,
)
from icestream.worker import Outcome

__all__ = ["Cadence", "Health", "Pipeline", "State", "brief", "missing_tables"]

log = logging.getLogger(__name__)

T = TypeVar("T")

InFlight = tuple[Epoch, EpochPlan, Future[Written]]

# An epoch whose bounds are settled is read so often with splits that were lost.
LOST_MAX = 10
# While an epoch's time has not come, the source is asked this often whether a whole one waits.
BACKLOG_LOOK_SECONDS = 1.0


class Pipeline:
    """One source, one sink, many tables."""

    def __init__(
        self, name: str, source: Source, sink: Sink, cadence: Cadence, write_epoch: WriteEpoch
    ):
        refuse_halves(source, SOURCE_ABILITIES)
        refuse_halves(sink, SINK_ABILITIES)
        self.name = name
        self.health = Health(name)
        self._write_epoch = write_epoch
        self._runner = EpochRunner(
            *(name, source, sink, self._write_parts, self._retry, self._await_turn)
        )
        self._source = source
        self._sink = sink
        self._cadence = cadence
        self._stop = threading.Event()
        self._number = 0
        self._durable = Frontier()
        self._durable_at = time.monotonic()
        self._looked_at = -math.inf
        self._settled = threading.Condition()
        self._settled_number = 0
        self._given_up_number = 0
        self._in_flight: deque[InFlight] = deque()
        self._stage = State.STARTING
        self._patience = Patience(name, self._stop, self._refresh)
        # Splits that were lost since an epoch was settled, and parts of the source that are away.
        self._lost, self._partial = Trouble(), Trouble()
        self._once = True
        self._pending: deque[Frontier] = deque()
        self._named: Sequence[str] = ()
        self._missing: Sequence[str] = ()
        self._start = StartPlan()
        self._told_forgetful = False
        self._freshness = metrics.FRESHNESS_SECONDS.labels(name)
        age = metrics.EPOCH_AGE_SECONDS.labels(name)
        age.set_function(lambda: time.monotonic() - self._durable_at)
        self._lag, self._lag_known_at = 0.0, time.monotonic()
        metrics.LAG_SECONDS.labels(name).set_function(self._lag_now)
        metrics.LAG_EPOCHS.labels(name).set_function(self._epochs_behind)

    def stop(self) -> None:
        """Ask the loop to end after the commit it is in; callable from any thread."""
        self._stop.set()
        if isinstance(self._source, Interruptible):
            self._source.interrupt()

    def run(self, once: bool = False) -> None:
        """Work until stopped, or with `once` until all that is available now is committed."""
        self._watched(partial(self._run, once))

    def replay(self, table: str | None = None, as_is: bool = False) -> Sequence[LettersTried]:
        """Try dead letters again, of one table or of all, each group of them in an epoch.

        Tells what became of them. Without any nothing is claimed, and a running pipeline goes on.
        """
        tried: list[LettersTried] = []
        self._watched(partial(self._try_letters, table, as_is, tried))
        return tried

    def _watched(self, work: Callable[[], None]) -> None:
        """Work, show how it ends, and let the source go."""
        try:
            with suppress(Stopped):
                work()
            self.health.become(State.ENDED)
        except Fenced as error:
            self.health.become(State.FENCED, error)
            raise
        except IcestreamError as error:
            self.health.become(State.HALTED, error)
            raise
        except BaseException as error:
            # Its text may hold values of rows.
            unforeseen = Broken("an unforeseen error", detail=f"{type(error).__name__}.")
            self.health.become(State.HALTED, unforeseen)
            raise
        finally:
            self._source.close()

    def _run(self, once: bool) -> None:
        self._once = self._patience.bounded = once
        before, resume = self._found()
        if once and self._nothing_to_do(before, resume):
            if trouble := self._source.standing(resume.at).trouble:
                raise trouble
            return
        self._take_over()
        self._stream(once)

    def _try_letters(
        self, table: str | None, as_is: bool, tried: MutableSequence[LettersTried]
    ) -> None:
        """Try letters again; what became of those of the groups so far is in `tried`."""
        source = self._source
        if not isinstance(source, TakesLetters):
            return
        _, resume = self._found()
        behind = resume.unfinished or self._fed(resume.behind)
        if not behind and not source.letters(resume.at, table, as_is):
            return
        self._take_over()
        for letters in source.letters(self._durable, table, as_is):
            self._end_if_stopped()
            epoch = self._mint(self._durable, letters.after(self._durable))
            plan = self._retry(partial(self._source.plan, epoch))
            self._settle(epoch, plan, self._runner.write(epoch, plan))
            tried[:] = source.tried()

    def _found(self) -> tuple[Mapping[str, Progress], Resume]:
        """What the tables that are there remember; the source is told of them."""
        tables = self._retry(self._source.tables)
        before = self._retry(partial(self._sink.durable, tables))
        resume = resume_point(before)
        self._named, self._missing = tables, missing_tables(tables, before, resume)
        self._ask_start(before, resume)
        return before, resume

    def _ask_start(self, progress: Mapping[str, Progress], resume: Resume) -> None:
        """Tell the source what the destination remembers, and know what that means for tables."""
        told = of_tables(progress)
        remembered = Remembered(progress=told, durable=resume.at, missing=self._missing)
        self._start = self._retry(partial(self._source.resume, remembered))

    def _take_over(self) -> None:
        """Claim the tables, finish what an earlier run left, bring forward what lies behind."""
        progress = self._retry(lambda: self._sink.claim(self._source.tables()))
        resume = resume_point(progress)
        self._refuse_change(progress, resume)
        self._ask_start(progress, resume)
        self._number, self._durable = resume.number, resume.at
        self._settled_number = self._number
        log.info(
            "resuming after %s",
            brief(self._source.standing(resume.at).position) or "the beginning",
            extra={"pipeline": self.name, "epoch": resume.number},
        )
        behind = {**self._without_history(progress), **self._fed(resume.behind)}
        self._leave_alone(resume.behind.keys() - behind.keys())
        self._finish(resume, {*behind, *self._runner.left_alone})
        for table, mine in behind.items():
            self._catch_up(table, mine)
        self._show(State.RUNNING)
        self._settled_number = self._number

    def _refuse_change(self, progress: Mapping[str, Progress], resume: Resume) -> None:
        """Raise when tables were dropped, made or filled since the source was told of them.

        It has decided by what it was told which tables it brings as a whole.
        """
        changed = sorted({*missing_tables(self._named, progress, resume)} ^ {*self._missing})
        if changed:
            raise TargetUnavailable(
                f"table {changed[0]} was dropped, made or filled while the pipeline started",
                detail=f"Tables: {', '.join(changed)}.",
                hint="Nothing is lost; start the pipeline again.",
            )

    def _nothing_to_do(self, progress: Mapping[str, Progress], resume: Resume) -> bool:
        """Whether a run would leave everything as it is; then it need not even claim the tables."""
        self._durable = resume.at
        behind = resume.unfinished or self._fed(resume.behind) or self._without_history(progress)
        try:
            return not behind and not self._retry(partial(self._source.available, resume.at, None))
        except HistoryLost:
            # Another run may have moved on since the tables were read; a claim settles it.
            return False

    def _finish(self, resume: Resume, behind: Collection[str]) -> None:
        """Bring an epoch that only some tables carry to the others, with the same bounds.

        Tables in `behind` lack more than this epoch: they get it in its turn, as they catch up.
        Tables that the source builds anew get it with all the rest.
        """
        epoch = resume.unfinished
        if epoch is None:
            return
        excused = {*behind, *self._start.rebuilt}
        others = {*resume.carriers, *excused}
        # The newest: an epoch is planned anew each time that it is written.
        plans = [EpochPlan()]

        def write() -> Written:
            self._retry(partial(self._source.available, epoch.lower, Finish(epoch=epoch)))
            plans.append(self._retry(partial(self._source.plan, epoch)))
            plan = _only(plans[-1], lambda tables: not others.issuperset(tables))
            # Values are looked up in tables that have the epoch as these were before it. Tables
            # that lag are not asked: they have not reached the epoch's start.
            written = self._runner.write(
                epoch, plan, takes_part=all_but(others), looked_up=all_but(excused)
            )
            found = {report.table for report in written.reports}
            self._refuse_loss(resume, epoch, found | written.truncated, excused)
            return written

        written = self._insist(epoch, write, bounded=self._once)
        # Without files, too: the tables of an epoch must agree about which ones they are.
        self._commit(epoch, written, write)
        self._observe_freshness(plans[-1])
        self._durable = epoch.upper
        self._mark_settled(epoch)

    def _refuse_loss(
        self, resume: Resume, epoch: Epoch, found: Collection[str], excused: Collection[str]
    ) -> None:
        """Raise `HistoryLost` when the source no longer has changes for tables that lack them.

        Whether a record is a dead letter depends on its table, which may have changed meanwhile:
        letters may have become rows, and rows letters.
        """
        missing = resume.tables - len(resume.carriers)
        lost = missing - len(found) - len(excused)
        detail = f"{missing} tables lack it and the source has changes for {len(found)}."
        hint = "Restore what was removed from the source, or build these tables anew."
        if resume.lacking is not None:
            owners = {table.removesuffix(dead_letters.SUFFIX) for table in found}
            lacking = resume.lacking - owners - {*found, *excused}
            names = sorted(t for t in lacking if not t.endswith(dead_letters.SUFFIX))
            lost, detail = len(names), f"Tables that lack it: {', '.join(names)}."
            if left_out := [table for table in names if table in self._start.unfed]:
                back = f"Put {', '.join(left_out)} back in `tables`, or in `topics`, until the "
                back += "epoch is finished."
                hint = back if left_out == names else f"{back} {hint}"
        if lost > 0:
            raise HistoryLost(
                f"the source no longer has all of epoch {epoch.number}", detail=detail, hint=hint
            )

    def _fed(self, behind: Mapping[str, Progress]) -> dict[str, Progress]:
        """Of tables that lie behind those that the source has changes of, as things are now."""
        return {table: mine for table, mine in behind.items() if table not in self._start.unfed}

    def _leave_alone(self, tables: Collection[str]) -> None:
        """Let tables that lie behind stay as they are: only catching up may bring them an epoch.

        They left the configuration. Without their rows they would count as level, and what they
        lack would never come.
        """
        self._runner.left_alone = frozenset(tables)
        for table in sorted(tables):
            log.warning(
                "table %s lies behind and is not fed now: it stays as it is, and is brought "
                "forward once the source feeds it again",
                table,
                extra={"pipeline": self.name},
            )

    def _without_history(self, progress: Mapping[str, Progress]) -> dict[str, Progress]:
        """Tables of the source that lack changes although the pipeline is past them.

        They were added to the pipeline, or dropped and created anew, or left out for a while: what
        the source still has of them must come first, or something would silently be missing.
        """
        nothing = Progress(pipeline=self.name)
        behind = self._start.behind.items()
        return {table: replace(progress.get(table, nothing), upper=at) for table, at in behind}

    def _catch_up(self, table: str, progress: Progress) -> None:
        """Bring a table that lies behind forward to the others, boundary by boundary."""
        lower = progress.upper
        purpose = CatchUp(table=table, durable=self._durable)
        bounds: deque[Frontier] = deque()
        while lower != self._durable:
            self._end_if_stopped()
            if not bounds:
                ahead = self._retry(partial(self._source.available, lower, purpose))
                bounds.extend(upper for upper in ahead if self._durable.covers(upper))
            upper = bounds.popleft() if bounds else self._durable
            try:
                self._catch_up_epoch(table, self._mint(lower, upper))
                lower = upper
                self._show(State.STARTING)
            except SplitsLost as lost:
                # The source names other bounds now: an epoch that was too large becomes smaller.
                self._give_up(lost)
                bounds.clear()

    def _catch_up_epoch(self, table: str, epoch: Epoch) -> None:
        """Bring one epoch to a table that lies behind."""
        plan = self._retry(partial(self._source.plan, epoch))
        plan = _only(plan, lambda tables: table in tables)
        last = epoch.upper == self._durable
        own = table.__eq__
        write = partial(self._runner.write, epoch, plan, takes_part=own, looked_up=own)
        written = replace(write(), catching_up=not last)
        if written.reports or written.truncated:
            self._commit(epoch, written, write)
        elif last:
            self._publish_frontier(epoch, table)
        self._mark_settled(epoch)

    def _stream(self, once: bool) -> None:
        in_flight, lower = self._in_flight, self._durable
        with ThreadPoolExecutor(self._cadence.epochs_in_flight, "epoch") as pool:
            try:
                while not self._stop.is_set():
                    while len(in_flight) < self._cadence.epochs_in_flight:
                        upper = self._next_boundary(lower, once, bool(in_flight))
                        if upper is None:
                            break
                        epoch = self._mint(lower, upper)
                        plan = self._retry(partial(self._source.plan, epoch))
                        future = pool.submit(self._runner.write, epoch, plan)
                        in_flight.append((epoch, plan, future))
                        lower = upper
                    if in_flight:
                        epoch, plan, future = in_flight.popleft()
                        try:
                            self._settle(epoch, plan, future.result())
                        except SplitsLost as lost:
                            self._give_up(lost)
                        if epoch.number <= self._given_up_number:
                            lower = self._durable
                    elif once:
                        self._last_heartbeat(lower)
                        if trouble := self._source.standing(self._durable).trouble:
                            raise trouble
                        return
                    else:
                        self._stop.wait(min(self._seconds_left(), BACKLOG_LOOK_SECONDS))
            finally:
                # Whatever is still being written is given up; nobody sees it.
                self._stop.set()
                for _, _, future in in_flight:
                    future.cancel()

    def _give_up(self, lost: SplitsLost) -> None:
        """Splits were lost: forget all epochs that nobody has seen anything of, and wait a little.

        The source is told, and will name epochs anew. Meanwhile the pipeline is stalled: as long as
        it takes while running, within bounds in a single run. Ends a run that is being stopped.
        """
        self._patience.tell(self._lost, lost)
        with self._settled:
            self._given_up_number = self._number
            self._settled.notify_all()
        futures = [future for _, _, future in self._in_flight]
        for future in futures:
            future.cancel()
        wait(futures)
        self._in_flight.clear()
        self._pending.clear()
        if isinstance(self._source, RegroupsSplits):
            self._source.give_up(lost)
        self._looked_at = -math.inf
        with self._settled:
            self._settled_number = self._number
        try:
            self._patience.wait(self._lost, lost)
        except SplitsLost:
            raise SourceUnavailable(lost.message, detail=lost.detail, hint=lost.hint) from lost

    def _insist(self, epoch: Epoch, write: Callable[[], Written], bounded: bool) -> Written:
        """Write an epoch however often its splits are lost: its bounds are settled.

        Some tables may carry it. With other bounds it would come to them a second time.
        """
        for tries in itertools.count(1):
            try:
                return write()
            except SplitsLost as lost:
                if bounded and tries == LOST_MAX:
                    raise SourceUnavailable(
                        f"epoch {epoch.number} could not be written again: {lost.message}",
                        detail="A part of its tables may hold it already; a new start finishes it.",
                        hint="Start the pipeline again.",
                    ) from lost
                self._give_up(lost)
        raise AssertionError("unreachable")

    def _end_if_stopped(self) -> None:
        """End the run here if it is being stopped: the next start goes on."""
        if self._stop.is_set():
            raise Stopped

    def _next_boundary(self, lower: Frontier, once: bool, busy: bool) -> Frontier | None:
        """The next upper bound; the source is asked only when all it named are used up.

        A running pipeline asks once per `commit_interval`: what came meanwhile is one epoch. It
        asks at once when a whole epoch waits.
        """
        if once and self._source.standing(lower).caught_up:
            self._pending.clear()
        elif not self._pending and not busy and (once or self._is_time(lower)):
            self._looked_at = time.monotonic()
            self._pending.extend(self._retry(partial(self._source.available, lower, None)))
            self._show(State.RUNNING)
            if not self._pending:
                self._observe_lag()
        return self._pending.popleft() if self._pending else None

    def _seconds_left(self) -> float:
        """The time until the source is asked again, unless a backlog comes before."""
        since = time.monotonic() - self._looked_at
        return max(0.0, self._cadence.commit_interval - since)

    def _is_time(self, lower: Frontier) -> bool:
        source = self._source
        return self._seconds_left() == 0.0 or (
            isinstance(source, HasBacklog) and source.backlog(lower)
        )

    def _show(self, state: State) -> None:
        """Be in a state, or stalled while something is in trouble: a part of the source, too."""
        self._stage = state
        if trouble := self._source.standing(self._durable).trouble:
            self._patience.tell(self._partial, trouble)
        else:
            self._patience.end(self._partial)
        self._refresh()

    def _refresh(self) -> None:
        self.health.go_on(self._stage, self._patience.trouble)

    def _mint(self, lower: Frontier, upper: Frontier) -> Epoch:
        self._number += 1
        return Epoch(number=self._number, lower=lower, upper=upper)

    def _settle(self, epoch: Epoch, plan: EpochPlan, written: Written) -> None:
        """Make an epoch that was written durable, and tell the source."""
        if written.reports or written.truncated:
            self._commit(epoch, written, partial(self._runner.write, epoch, plan))
            self._observe_freshness(plan)
        elif not self._heartbeat(epoch, plan):
            self._mark_settled(epoch)
            return
        self._durable = epoch.upper
        self._durable_at = time.monotonic()
        failpoints.reach(failpoints.AFTER_COMMIT)
        self._source.ack(epoch.upper)
        failpoints.reach(failpoints.AFTER_ACK)
        self._mark_settled(epoch)
        self._observe()

    def _mark_settled(self, epoch: Epoch) -> None:
        with self._settled:
            # Numbers that were given up while the epoch was committed are settled too.
            self._settled_number = max(self._settled_number, epoch.number)
            self._settled.notify_all()
        self._patience.end(self._lost)

    def _heartbeat(self, epoch: Epoch, plan: EpochPlan) -> bool:
        """Publish a frontier without changes when it is due; False when it stays in memory.

        A milestone of one table is published in that table. So a table whose copy brought no row
        remembers that it was copied, and differs from one that was made anew and never filled.
        """
        interval = self._cadence.heartbeat_interval or 0.0
        due = interval > 0 and time.monotonic() - self._durable_at >= interval
        milestone = plan.milestone(self._durable)
        if not due and not milestone:
            return False
        named = sorted({t for part in plan.parts for t in part.tables} - self._runner.left_alone)
        if milestone and len(named) == 1 and self._publish_frontier(epoch, named[0]):
            return True
        published = self._publish_frontier(epoch)
        if milestone and not published and not self._told_forgetful:
            self._told_forgetful = True
            log.warning(
                "no table is there yet that could remember where the pipeline stands: until one is "
                "made, a new start begins as the first one did",
                extra={"pipeline": self.name},
            )
        return published

    def _publish_frontier(self, epoch: Epoch, table: str | None = None) -> bool:
        labels = self._source.was_read(epoch, ())
        return self._retry(partial(self._sink.heartbeat, epoch, labels, table))

    def _last_heartbeat(self, lower: Frontier) -> None:
        """Publish at the end of a single run what it found: the next may be long in coming."""
        if not self._cadence.heartbeat_interval or lower == self._durable:
            return
        epoch = self._mint(self._durable, lower)
        if self._publish_frontier(epoch):
            self._durable = lower
            self._source.ack(lower)

    def _write_parts(
        self, parts: Sequence[Any], writer: Writer, key_in_one_split: bool, description: str
    ) -> Outcome:
        return self._write_epoch(parts, writer, key_in_one_split, description)

    def _await_turn(self, epoch: Epoch) -> None:
        """Return once all epochs before this one are settled; raises when it was given up."""
        with self._settled:
            while self._settled_number < epoch.number - 1 and not self._stop.is_set():
                if epoch.number <= self._given_up_number:
                    raise _GivenUp(f"epoch {epoch.number}")
                self._settled.wait(1.0)

    def _commit(self, epoch: Epoch, written: Written, write: Callable[[], Written]) -> None:
        """Commit what was written; files that a table no longer takes are written again."""
        for attempt in range(1, REWRITES_MAX):
            try:
                results = self._retry(partial(self._sink.commit, written))
                break
            except StaleWrite as stale:
                check(attempt + 1 < REWRITES_MAX, "a table's schema comes to rest")
                log.info("writing again: %s changed", stale, extra={"epoch": epoch.number})
                # A table that took the epoch already is found to carry it, and keeps it as it is.
                again = self._insist(epoch, write, bounded=True)
                written = replace(again, catching_up=written.catching_up)
        position = self._source.standing(epoch.upper).position
        self.health.committed(epoch.number, position, results)
        log.info(
            "committed %s",
            brief(position),
            extra={
                "pipeline": self.name,
                "epoch": epoch.number,
                "tables": len(results),
                "changes": written.changes,
                **describe(written.reports),
            },
        )

    def _retry(self, call: Callable[[], T]) -> T:
        """Call again until trouble has passed; see `icestream.patience` for how long."""
        trouble = Trouble()
        try:
            while True:
                try:
                    return call()
                except SplitsLost:
                    raise
                except (Retryable, CommitUnknown) as error:
                    self._patience.wait(trouble, error)
        finally:
            self._patience.end(trouble)

    def _observe_freshness(self, plan: EpochPlan) -> None:
        if plan.committed_at is not None:
            # The clocks of two machines may differ.
            self._freshness.observe(max(0.0, time.time() - plan.committed_at))

    def _observe(self) -> None:
        self._show(State.RUNNING)
        self._observe_lag()

    def _observe_lag(self) -> None:
        self._lag = self._source.standing(self._durable).lag_seconds or 0.0
        self._lag_known_at = time.monotonic()

    def _epochs_behind(self) -> float:
        """Epochs that wait, that are being written and the one that is being committed."""
        return len(self._pending) + max(0, self._number - self._settled_number)

    def _lag_now(self) -> float:
        """The lag as it was last known, and the time that nothing has moved since.

        Between two looks at the source nothing has to move.
        """
        since = time.monotonic() - self._lag_known_at
        return self._lag + max(0.0, since - self._cadence.commit_interval)


def _only(plan: EpochPlan, wanted: Callable[[Collection[str]], bool]) -> EpochPlan:
    """The plan with the parts whose tables are wanted, and those that only reading tells of."""
    parts = [part for part in plan.parts if not part.tables or wanted(part.tables)]
    return replace(plan, parts=parts)


def missing_tables(
    tables: Iterable[str], progress: Mapping[str, Progress], resume: Resume
) -> list[str]:
    """Tables that hold nothing of what other tables say is durable.

    They were never this pipeline's, or were dropped. One that has taken no epoch was made anew and
    never filled, unless it is one of those that the last epoch has yet to be brought to.
    """

    def owned(table: str) -> bool:
        mine = progress.get(table)
        if mine is None:
            return False
        expects = bool(resume.unfinished and mine.generation)
        if resume.lacking is not None:
            expects = table in resume.lacking
        return bool(mine.epoch or mine.catching_up or expects)

    return [name for name in tables if not owned(name)]


class _GivenUp(Exception):
    """An epoch ends early: it was given up while it waited for those before it."""
