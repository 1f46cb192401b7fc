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
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from icestream import dead_letters, failpoints, metrics
from icestream.abilities import refuse_halves
from icestream.epoch import Epoch, Progress, Resume, resume_point
from icestream.errors import (
    Broken,
    CommitUnknown,
    ConfigInvalid,
    DataRejected,
    Fenced,
    HistoryLost,
    IcestreamError,
    Retryable,
    SchemaRejected,
    SourceUnavailable,
    TargetUnavailable,
    check,
)
from icestream.frontier import Frontier
from icestream.patience import Patience, Stopped, Trouble
from icestream.report import describe
from icestream.schema import (
    Column,
    TableShape,
    distinct_columns,
    joined_columns,
    joined_shapes,
)
from icestream.sinks import (
    SINK_ABILITIES,
    Committed,
    Evolves,
    LooksUpRows,
    Sink,
    StaleWrite,
    Writer,
    Written,
    of_tables,
)
from icestream.sources import (
    Budget,
    CatchUp,
    EpochPlan,
    Finish,
    LettersTried,
    Part,
    Remembered,
    Source,
    Split,
    SplitsLost,
    StartPlan,
    TableSplit,
    TablesUnready,
    ValuesNeeded,
)
from icestream.sources.abilities import (
    SOURCE_ABILITIES,
    FindsTables,
    HasBacklog,
    Interruptible,
    RegroupsSplits,
    TakesLetters,
)
from icestream.worker import Outcome, Unready

log = logging.getLogger(__name__)

T = TypeVar("T")

WriteEpoch = Callable[[Sequence[Any], Writer, bool, str], Outcome]
"""Has parts of an epoch read and written by workers; see `icestream.worker`."""

InFlight = tuple[Epoch, EpochPlan, Future[Written]]

# An epoch whose bounds are settled is read so often with splits that were lost.
LOST_MAX = 10
# A table's schema may need several steps until it takes an epoch; each adds columns.
REWRITES_MAX = 50
TABLES_IN_PARALLEL = 8
# A topic has hundreds of partitions; a log line is for people.
POSITION_PARTS_SHOWN = 8
# While an epoch's time has not come, the source is asked this often whether a whole one waits.
BACKLOG_LOOK_SECONDS = 1.0


class State(StrEnum):
    """How a pipeline is."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    HALTED = "halted"
    FENCED = "fenced"
    ENDED = "ended"


class Health:
    """The state of a pipeline and its tables, for those who watch it; safe between threads."""

    def __init__(self, pipeline: str):
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._error: IcestreamError | None = None
        self._tables: dict[str, dict[str, object]] = {}
        self.become(State.STARTING)

    def become(self, state: State, error: IcestreamError | None = None) -> None:
        """Enter a state, with the error that led there."""
        with self._lock:
            self._enter(state, error)

    def go_on(self, state: State, trouble: Callable[[], IcestreamError | None]) -> None:
        """Enter a state, or be stalled while there is trouble."""
        with self._lock:
            error = trouble()
            self._enter(State.STALLED if error else state, error)

    def _enter(self, state: State, error: IcestreamError | None) -> None:
        self._state, self._error = state, error
        for each in State:
            metrics.HEALTH.labels(self._pipeline, each.value).set(each == state)

    def committed(self, epoch: int, position: str, results: Sequence[Committed]) -> None:
        """Note what an epoch brought to its tables."""
        with self._lock:
            for result in results:
                self._tables[result.table] = {
                    "epoch": epoch,
                    "position": position,
                    "snapshot_id": result.snapshot_id,
                    "committed_at": time.time(),
                }

    def to_json(self) -> dict[str, object]:
        """The health as plain data."""
        with self._lock:
            error = self._error.to_json() if self._error else None
            tables = {name: {"state": self._state, **t} for name, t in self._tables.items()}
            return {"state": self._state, "error": error, "tables": tables}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often and how much at once."""

    commit_interval: float = field(
        default=10.0,
        metadata={
            "doc": "While running, the source is asked for new changes this often, and what has "
            "come becomes an epoch. Sooner when `epoch_rows_max` or `epoch_bytes_max` has come, or "
            "a backlog is there.",
            "unit": "duration",
        },
    )
    epochs_in_flight: int = field(
        default=3, metadata={"doc": "Epochs that are read and written at the same time."}
    )
    epoch_rows_max: int = field(
        default=2_000_000,
        metadata={
            "doc": "An epoch ends at the first boundary of the source after so many rows: a record "
            "of Kafka, the end of a transaction, a resolved timestamp. Where nobody has counted "
            "the rows (copies of tables, files of changefeeds) only `epoch_bytes_max` counts."
        },
    )
    epoch_bytes_max: int = field(
        default=1024**3,
        metadata={
            "doc": "An epoch ends at the first boundary of the source after so many bytes of it.",
            "unit": "bytes",
        },
    )
    heartbeat_interval: float | None = field(
        default=None,
        metadata={
            "doc": "Longest time that a frontier without changes stays unpublished; 0 is never. "
            "By default PT5M for PostgreSQL, whose slot could not move on otherwise, PT1H for "
            "changefeeds over Kafka, whose topics fill while nothing changes, else 0.",
            "unit": "duration",
        },
    )

    def __post_init__(self) -> None:
        if self.epochs_in_flight < 1:
            raise ConfigInvalid("epochs_in_flight must be at least 1")
        if self.epoch_rows_max < 1 or self.epoch_bytes_max < 1:
            raise ConfigInvalid("epoch_rows_max and epoch_bytes_max must be at least 1")

    @property
    def budget(self) -> Budget:
        """How much an epoch may hold."""
        return Budget(rows=self.epoch_rows_max, bytes=self.epoch_bytes_max)


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
        self._source = source
        self._sink = sink
        self._cadence = cadence
        self._tables_lock = threading.Lock()
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
        self._left_alone: frozenset[str] = frozenset()
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
        behind = resume.unfinished or self._fed(resume.replays)
        if not behind and not source.letters(resume.at, table, as_is):
            return
        self._take_over()
        for letters in source.letters(self._durable, table, as_is):
            self._end_if_stopped()
            epoch = self._mint(self._durable, letters.after(self._durable))
            plan = self._retry(partial(self._source.plan, epoch))
            self._settle(epoch, plan, self._write(epoch, plan))
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
        behind = {**self._without_history(progress), **self._fed(resume.replays)}
        self._leave_alone(resume.replays.keys() - behind.keys())
        self._finish(resume, {*behind, *self._left_alone})
        for table, mine in behind.items():
            self._replay(table, mine)
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
        behind = resume.unfinished or self._fed(resume.replays) or self._without_history(progress)
        try:
            return not behind and not self._retry(partial(self._source.available, resume.at, None))
        except HistoryLost:
            # Another run may have moved on since the tables were read; a claim settles it.
            return False

    def _finish(self, resume: Resume, behind: Collection[str]) -> None:
        """Bring an epoch that only some tables carry to the others, with the same bounds.

        Tables in `behind` lack more than this epoch: they get it in its turn, by their replay.
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
            written = self._write(
                epoch, plan, takes_part=_all_but(others), looked_up=_all_but(excused)
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

    def _fed(self, replays: Mapping[str, Progress]) -> dict[str, Progress]:
        """Of tables that lie behind those that the source has changes of, as things are now."""
        return {table: mine for table, mine in replays.items() if table not in self._start.unfed}

    def _leave_alone(self, tables: Collection[str]) -> None:
        """Let tables that lie behind stay as they are: only a replay may bring them an epoch.

        They left the configuration. Without their rows they would count as replayed, and what they
        lack would never come.
        """
        self._left_alone = frozenset(tables)
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

    def _replay(self, table: str, progress: Progress) -> None:
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
                self._replay_epoch(table, self._mint(lower, upper))
                lower = upper
                self._show(State.STARTING)
            except SplitsLost as lost:
                # The source names other bounds now: an epoch that was too large becomes smaller.
                self._give_up(lost)
                bounds.clear()

    def _replay_epoch(self, table: str, epoch: Epoch) -> None:
        """Bring one epoch to a table that lies behind."""
        plan = self._retry(partial(self._source.plan, epoch))
        plan = _only(plan, lambda tables: table in tables)
        last = epoch.upper == self._durable
        own = table.__eq__
        write = partial(self._write, epoch, plan, takes_part=own, looked_up=own)
        written = replace(write(), replaying=not last)
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
                        future = pool.submit(self._write, epoch, plan)
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
            self._commit(epoch, written, partial(self._write, epoch, plan))
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
        named = sorted({t for part in plan.parts for t in part.tables} - self._left_alone)
        if milestone and len(named) == 1 and self._publish_frontier(epoch, named[0]):
            return True
        return self._publish_frontier(epoch)

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

    def _write(
        self,
        epoch: Epoch,
        plan: EpochPlan,
        takes_part: Callable[[str], bool] | None = None,
        looked_up: Callable[[str], bool] | None = None,
    ) -> Written:
        """Have an epoch's files written, however many tries it takes within bounds.

        Tables that do not take part may be read and written to, but nothing of it is reported.
        Rows are looked up only in tables that stand where the epoch begins, or have just taken it.
        By default both are all tables but those that are left alone.
        """
        takes_part = takes_part or _all_but(self._left_alone)
        looked_up = looked_up or _all_but(self._left_alone)
        splits = plan.parts
        truncated = frozenset(filter(takes_part, plan.truncated))
        named = {table for split in splits for table in split.tables} | truncated
        for _ in range(REWRITES_MAX):
            with self._tables_lock:
                tables = self._retry(partial(self._prepared, named))
                # Changes of tables that cannot be made yet do nothing. A split that may be of many
                # tables finds out by reading which ones it needs.
                usable = [s for s in splits if _of_many(s) or not {*s.tables}.isdisjoint(tables)]
                writer = self._retry(partial(self._sink.writer, epoch, tables))
            for table in itertools.filterfalse(looked_up, tables):
                usable = [_with_stored(split, table, None) for split in usable]
            failpoints.reach(failpoints.BEFORE_WRITE)
            try:
                outcome = self._retry(partial(self._write_once, epoch, usable, writer))
            except Unready as unready:
                named |= self._made_ready(unready)
                continue
            except ValuesNeeded as need:
                splits = self._with_stored(epoch, splits, need)
                continue
            failpoints.reach(failpoints.AFTER_WRITE)
            metrics.ROWS_READ.labels(self.name).inc(outcome.rows)
            metrics.BYTES_READ.labels(self.name).inc(sum(split.size_bytes for split in usable))
            labels = self._source.was_read(epoch, outcome.learned)
            return Written(
                epoch=epoch,
                reports=[r for r in outcome.reports if takes_part(r.table)],
                writer=writer,
                labels=labels,
                truncated=truncated & set(tables),
                changes=outcome.rows,
            )
        raise StaleWrite(epoch)

    def _made_ready(self, unready: Unready) -> set[str]:
        """Have tables take what splits found lacking; returns those that have yet to be made."""
        shapes: dict[str, TableShape] = {}
        gaps: dict[str, Sequence[Column]] = {}
        for lack in unready.lacks:
            if isinstance(lack, TablesUnready):
                shapes = joined_shapes(shapes, lack.shapes)
            found = lack.gaps if isinstance(lack, TablesUnready) else {lack.table: lack.columns}
            for table, columns in found.items():
                # Of names that readers do not tell apart the first is added, others are refused.
                gaps[table] = distinct_columns(joined_columns(gaps.get(table, ()), columns))
        for table, columns in gaps.items():
            if not isinstance(self._sink, Evolves):
                raise _cannot_evolve(table, columns)
            with self._tables_lock:
                self._retry(partial(self._sink.evolve, table, columns))
        if isinstance(self._source, FindsTables):
            self._source.tables_met(shapes)
        return set(shapes)

    def _with_stored(
        self, epoch: Epoch, splits: Sequence[Part], needed: ValuesNeeded
    ) -> Sequence[Part]:
        """Look up the rows that splits ask for, as the epochs before left them."""
        sink = self._sink
        if not isinstance(sink, LooksUpRows):
            raise _cannot_look_up(needed)
        with self._settled:
            while self._settled_number < epoch.number - 1 and not self._stop.is_set():
                if epoch.number <= self._given_up_number:
                    raise _GivenUp(f"epoch {epoch.number}")
                self._settled.wait(1.0)
        for need in needed.needs:
            ask = partial(sink.stored, need.table, need.keys, need.columns, epoch.lower)
            stored = self._retry(ask)
            splits = [_with_stored(split, need.table, stored) for split in splits]
        return splits

    def _write_once(self, epoch: Epoch, splits: Sequence[Part], writer: Writer) -> Outcome:
        description = f"icestream {self.name} epoch {epoch.number}"
        return self._write_epoch(splits, writer, self._source.keyed, description)

    def _prepared(self, tables: Iterable[str]) -> list[str]:
        """The tables that are ready to be written to; some may have to be created first."""

        def prepare(table: str) -> bool:
            return self._sink.prepare(table, lambda: self._source.shape(table))

        names = sorted(tables)
        # One table comes first: it makes the namespace, and decides between two runs that start
        # at once. Side by side each run could claim some of the tables, and both would stop.
        ready = [prepare(name) for name in names[:1]]
        with ThreadPoolExecutor(TABLES_IN_PARALLEL, "prepare") as pool:
            ready += pool.map(prepare, names[1:])
        return [table for table, there in zip(names, ready, strict=True) if there]

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
                written = replace(again, replaying=written.replaying)
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


def brief(position: str) -> str:
    """A position for people: of many parts, such as partitions, the first and how many follow."""
    parts = position.split(", ")
    if len(parts) <= POSITION_PARTS_SHOWN:
        return position
    shown = ", ".join(parts[:POSITION_PARTS_SHOWN])
    return f"{shown}, and {len(parts) - POSITION_PARTS_SHOWN:,} more"


class _GivenUp(Exception):
    """An epoch ends early: it was given up while it waited for those before it."""


def _cannot_evolve(table: str, columns: Sequence[Column]) -> SchemaRejected:
    names = ", ".join(column.name for column in columns)
    return SchemaRejected(
        f"table {table} does not take all columns of its source",
        detail=f"Columns: {names}. The sink cannot change what a table takes.",
        hint="Give the destination these columns by hand and start again, leave them out at the "
        "source, or use a sink that evolves its tables, such as `iceberg`.",
    )


def _cannot_look_up(needed: ValuesNeeded) -> DataRejected:
    tables = ", ".join(need.table for need in needed.needs)
    names = sorted({column for need in needed.needs for column in need.columns})
    return DataRejected(
        f"changes of {tables} leave out values, and the sink cannot look them up",
        detail=f"Columns: {', '.join(names)}.",
        hint="Have the source send whole rows (for PostgreSQL: ALTER TABLE ... REPLICA IDENTITY "
        "FULL), or use a sink that gives rows back, such as `iceberg`.",
    )


def _with_stored(part: Part, table: str, stored: pa.Table | None) -> Part:
    """The part with rows of a table, unless all of its changes are of another one.

    A split of many tables may meet more of them than it knows.
    """
    elsewhere = isinstance(part, TableSplit) and part.table != table
    return part.with_stored(table, stored) if isinstance(part, Split) and not elsewhere else part


def _only(plan: EpochPlan, wanted: Callable[[Collection[str]], bool]) -> EpochPlan:
    """The plan with the parts whose tables are wanted, and those that only reading tells of."""
    parts = [part for part in plan.parts if not part.tables or wanted(part.tables)]
    return replace(plan, parts=parts)


def _of_many(part: Part) -> bool:
    """Whether a part may have changes of tables that it does not name."""
    return not part.tables or (isinstance(part, Split) and not isinstance(part, TableSplit))


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
        return bool(mine.epoch or mine.replaying or expects)

    return [name for name in tables if not owned(name)]


def _all_but(tables: Collection[str]) -> Callable[[str], bool]:
    return lambda table: table not in tables
