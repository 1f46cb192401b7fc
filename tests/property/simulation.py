"""Seeded simulation of the whole commit protocol: the real loop and sink in a hostile world.

    Pipeline ──► IcebergSink ──► publish_epoch, publish_claim     the product, as it is
       │              │
    Stream        MemoryCatalog                                   in memory, behind a faulty wire

Several processes run the same pipeline, as after a split brain: each is a thread, only one of
which runs at a time, and the seed decides at every call to the catalog, the source or a worker who
goes on. A process may die there for good, or sleep and wake up long after its successor took over.
Requests are refused, lost, answered into the void, sent twice, or arrive when nobody waits for them
any more. Rivals commit snapshots, compact, evolve schemas and set tables back.

Rows are positions of the stream, and nothing identifies them, so every change that is applied
twice shows. The checker reads the tables alone.

`python -m tests.property.simulation --minutes 5` runs seeds until the time is up;
`--seed S` runs one seed and prints what happened in it.
"""

import argparse
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from pyiceberg.types import LongType

import icestream.pipeline
import icestream.sinks.iceberg
import icestream.sinks.iceberg.commit
from icestream.epoch import Epoch, Progress
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    Fenced,
    HistoryLost,
    IcestreamError,
    Retryable,
    RolledBack,
    TargetUnavailable,
)
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.catalog import TableName
from icestream.iceberg.files import DATA, FileClosed
from icestream.pipeline import Cadence, Pipeline
from icestream.schema import Column, SchemaGap, TableShape
from icestream.sinks.iceberg import IcebergSink, IcebergSinkOptions
from icestream.sinks.iceberg.writer import IcebergWriter
from icestream.sources import Source, TableSplit
from icestream.worker import Outcome, Unready
from tests.property.memory import Lake, MemoryCatalog, Snapshot, Wire, progress_in

T = TypeVar("T")

PIPELINE = "simulated"
NAMESPACE = "lake"
PARTITION = "log"
PROCESSES_MAX = 3
# After this many moments faults end, so that every run comes to a verdict.
MOMENTS_WILD = 700
RUNS_MAX = 80
# A run takes a fraction of a second; one that takes this long waits for itself.
RUN_SECONDS_MAX = 120.0
EXACT = "exact"


class Crash(BaseException):
    """The process is gone; like kill -9 nothing of the product may catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How likely each kind of trouble is at one moment, and what this world is like."""

    crash: float
    unavailable: float
    request_lost: float
    answer_lost: float
    request_late: float
    sent_twice: float
    successor: float
    sleep: float
    foreign: float
    evolve: float
    roll_back: float
    forgetful: bool
    heartbeats: bool
    tables_named: bool
    epochs_in_flight: int
    atomic: bool

    @staticmethod
    def draw(rng: random.Random) -> "Weather":
        """A world of its own for each seed: some know only one kind of trouble, some all."""

        def odds(usual: float) -> float:
            return usual * rng.choice([0.0, 0.5, 1.0, 1.0, 3.0])

        rolls_back = rng.random() < 0.2
        return Weather(
            crash=odds(0.01),
            unavailable=odds(0.01),
            request_lost=odds(0.03),
            answer_lost=odds(0.05),
            request_late=odds(0.05),
            sent_twice=odds(0.03),
            successor=odds(0.01),
            sleep=odds(0.02),
            foreign=odds(0.03),
            evolve=odds(0.005),
            roll_back=0.004 if rolls_back else 0.0,
            # What was rolled back can only be replayed from a source that keeps its history.
            forgetful=not rolls_back,
            heartbeats=rng.random() < 0.5,
            tables_named=rng.random() < 0.5,
            epochs_in_flight=rng.choice([1, 2, 3]),
            atomic=rng.random() < 0.3,
        )


class Stage:
    """Runs processes one at a time, in an order that only the seed decides."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._live: list[Process] = []
        self._over = threading.Semaphore(0)

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, process: "Process") -> None:
        """Let a process wait for its turn."""
        self._live.append(process)
        threading.Thread(target=self._play, args=(process,), daemon=True).start()

    def run(self) -> None:
        """Let processes run until none is left."""
        if self._live:
            self._next().turn.release()
            if not self._over.acquire(timeout=RUN_SECONDS_MAX):
                raise TimeoutError("a simulated process hangs")

    def pause(self, process: "Process") -> None:
        """Give the others a chance; returns when it is this process's turn again."""
        chosen = self._next()
        if chosen is not process:
            chosen.turn.release()
            process.turn.acquire()

    def _play(self, process: "Process") -> None:
        process.turn.acquire()
        try:
            process.run()
        finally:
            self._live.remove(process)
            (self._next().turn if self._live else self._over).release()

    def _next(self) -> "Process":
        awake = [process for process in self._live if not process.asleep()]
        return self._rng.choice(awake or self._live)


class Stream:
    """The source's log: for each position the table it belongs to, or nobody's."""

    def __init__(self, rng: random.Random):
        tables = [f"t{number}" for number in range(rng.randint(1, 4))]
        self.tables = tables
        self.log = [rng.choice([*tables, *tables, None]) for _ in range(rng.randint(15, 40))]
        self.visible = rng.randint(1, len(self.log))
        self.acked = 0
        # From some position on a table's rows have one more column.
        self.widened_at = {table: rng.randrange(2 * len(self.log)) for table in tables}

    def positions(self, table: str, lower: int = 0, upper: int | None = None) -> list[int]:
        """Where the table's changes lie within a span."""
        span = range(lower, len(self.log) if upper is None else upper)
        return [position for position in span if self.log[position] == table]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit(TableSplit):
    """Positions of one table; the simulated workers read them directly."""

    table: str
    positions: Sequence[int]
    columns: frozenset[str]

    def read(self, schema_json: str, key: Sequence[str]) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        return 1

    def learned(self) -> None:
        return None


class StreamSource(Source):
    """The `Source` of one process; what it was told to forget it no longer serves."""

    keyed = True

    def __init__(self, process: "Process"):
        self._process = process
        self._world = process.world
        self._stream = process.world.stream

    def tables(self) -> Sequence[str]:
        return self._stream.tables if self._world.weather.tables_named else []

    def shape(self, table: str) -> TableShape:
        return TableShape(columns=[Column(name="position", type=LongType())], key=["position"])

    def has_history(self, table: str, before: Frontier) -> bool:
        upper = before[PARTITION][0] if before[PARTITION] else 0
        return bool(self._stream.positions(table, self._stream.acked, upper))

    def available(self, lower: Frontier) -> Sequence[Frontier]:
        self._process.moment()
        stream, rng = self._stream, self._world.rng
        start = self._served(lower)
        stream.visible = min(len(stream.log), stream.visible + rng.randrange(6))
        if self._world.calm:
            stream.visible = len(stream.log)
        bounds = []
        while start < stream.visible and len(bounds) < 4:
            start = min(stream.visible, start + rng.randint(1, 8))
            bounds.append(Frontier({PARTITION: (start,)}))
        if not bounds:
            self._process.nothing_new()
        return bounds

    def splits(self, epoch: Epoch) -> Sequence[StreamSplit]:
        self._process.moment()
        lower, upper = self._served(epoch.lower), epoch.upper[PARTITION][0]
        found = []
        for table in self._stream.tables:
            positions = self._stream.positions(table, lower, upper)
            cut = self._world.rng.randint(0, len(positions))
            wide = any(position >= self._stream.widened_at[table] for position in positions)
            found += [
                StreamSplit(
                    table=table, positions=part, columns=frozenset(["extra"] if wide else [])
                )
                for part in (positions[:cut], positions[cut:])
                if part
            ]
        return found

    def summary(self, epoch: Epoch) -> Mapping[str, str]:
        return {"simulated.files": "{data}"}

    def position(self, frontier: Frontier) -> str:
        return str(frontier[PARTITION])

    def ack(self, durable: Frontier) -> None:
        self._process.moment()
        upper = durable[PARTITION][0]
        self._world.check_durable(upper)
        self._world.note(self._process, f"acknowledges {upper}")
        if self._world.weather.forgetful:
            self._stream.acked = max(self._stream.acked, upper)
        self._process.moment()

    def _served(self, lower: Frontier) -> int:
        start = lower[PARTITION][0] if lower[PARTITION] else 0
        if start < self._stream.acked:
            raise HistoryLost(f"position {start} was forgotten")
        return start


class Process(Wire):
    """One run of the pipeline, and the wire between it and the catalog."""

    def __init__(self, world: "World", number: int):
        self.world = world
        self.number = number
        self.turn = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.succeeded = False
        self._dead = False
        self._wakes_at = 0
        self._once = world.rng.random() < 0.7
        catalog = MemoryCatalog(world.lake, self)
        options = IcebergSinkOptions(namespace=NAMESPACE, atomic=world.weather.atomic)
        self._pipeline = Pipeline(
            PIPELINE,
            StreamSource(self),
            IcebergSink(catalog, options, PIPELINE),  # type: ignore[arg-type]
            Cadence(
                commit_interval=0.0,
                epochs_in_flight=world.weather.epochs_in_flight,
                heartbeat_interval=1e-12 if world.weather.heartbeats else 0.0,
            ),
            self.write_epoch,
        )

    def run(self) -> None:
        """The life of the process."""
        try:
            self._pipeline.run(once=self._once)
        except BaseException as error:
            self.error = error
        # A run without tables has claimed nothing, and a claim by anybody else succeeds it.
        self.succeeded = bool(self.world.claims) and self.world.claims[-1] is not self
        self.world.note(self, f"ends with {type(self.error).__name__ if self.error else 'nothing'}")

    def asleep(self) -> bool:
        return self._wakes_at > self.world.clock and not self.world.calm

    def nothing_new(self) -> None:
        """A pipeline that would run for ever is told to stop once the stream is used up."""
        if self.world.calm or self.world.rng.random() < 0.5:
            self._pipeline.stop()

    def moment(self) -> None:
        """Between two steps of the process anything may happen, its own death included."""
        world = self.world
        if not self._dead:
            world.pass_time(self)
            if world.happens(world.weather.sleep):
                self._wakes_at = world.clock + world.rng.randrange(200)
            world.stage.pause(self)
            if world.happens(world.weather.crash):
                self._dead = True
        if self._dead:
            raise Crash

    def ask(self, request: Callable[[], T]) -> T:
        self.moment()
        if self.world.happens(self.world.weather.unavailable):
            raise TargetUnavailable("the catalog did not answer")
        answer = request()
        self.moment()
        return answer

    def send(self, request: Callable[[], T], lost: type[IcestreamError], what: str) -> T:
        self.moment()
        world = self.world
        if world.happens(world.weather.request_lost):
            world.note(self, f"lost on the way: {what}")
            raise lost("the request was lost")
        if world.happens(world.weather.request_late):
            world.note(self, f"late: {what}")
            world.late.append((self, request, what))
            raise lost("the request is late")
        try:
            answer = request()
            world.done(self, what)
        except CommitConflict:
            world.note(self, f"refused: {what}")
            raise
        self.moment()
        if world.happens(world.weather.sent_twice):
            # The client's own retry after a broken connection: what is refused is the repetition.
            return request()
        if world.happens(world.weather.answer_lost):
            world.note(self, f"answer lost: {what}")
            raise lost("the answer was lost")
        return answer

    def write_epoch(
        self, splits: Sequence[Any], writer: Any, keyed: bool, description: str
    ) -> Outcome:
        """What workers do, in this process and without Parquet."""
        reports: list[str] = []
        for number, split in enumerate(splits):
            self.moment()
            if self.world.happens(self.world.weather.unavailable):
                raise TargetUnavailable("the storage did not answer")
            missing = [
                name for name in split.columns if f'"{name}"' not in writer.schema_json(split.table)
            ]
            if missing:
                columns = [Column(name=n, type=LongType()) for n in missing]
                raise Unready([SchemaGap(split.table, columns)])
            reports.append(self.world.write_file(writer, split, number))
        # A speculative task reports what its twin has reported already.
        reports += self.world.rng.sample(reports, min(len(reports), 1))
        return Outcome(
            reports=reports, rows=sum(len(split.positions) for split in splits), learned=[]
        )


@dataclass(slots=True)
class World:
    """Everything that outlives a process, and what happens to it."""

    seed: int
    rng: random.Random = field(init=False)
    weather: Weather = field(init=False)
    stream: Stream = field(init=False)
    stage: Stage = field(init=False)
    lake: Lake = field(default_factory=Lake)
    files: dict[str, Sequence[int]] = field(default_factory=dict)
    late: list[tuple[Process, Callable[[], object], str]] = field(default_factory=list)
    claims: list[Process] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    clock: int = 0
    calm: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.weather = Weather.draw(self.rng)
        self.stream = Stream(self.rng)
        self.stage = Stage(self.rng)

    def run(self) -> str:
        """Live through all of it; returns `exact`, or what went wrong."""
        with in_process(self.rng):
            for _ in range(RUNS_MAX):
                self.start()
                self.stage.run()
                self._alarms()
                settled = self._operator()
                if self.problems or (self._drained() and self.calm and not settled):
                    break
                self.calm = self.calm or self._drained()
                if self.calm:
                    self._late_land(everything=True)
            else:
                self.problems.append("stuck")
        # A run that was cut short by a problem has not lost what it did not get to.
        self._check_tables(whole=not self.problems)
        return ", ".join(dict.fromkeys(self.problems)) or EXACT

    def start(self) -> None:
        """Another process of the pipeline starts, whoever else is still running."""
        process = Process(self, len(self.processes) + 1)
        self.processes.append(process)
        self.note(process, "starts")
        self.stage.enter(process)

    def note(self, process: Process | None, what: str) -> None:
        who = f"process {process.number}" if process else "world"
        self.trace.append(f"{self.clock:5} {who}: {what}")

    def done(self, process: Process, what: str) -> None:
        """A change has landed, whether or not the process learns of it."""
        self.note(process, f"done: {what}")
        if what.startswith("claim"):
            self.claims.append(process)
        if self.weather.atomic and not self.weather.roll_back:
            self._check_whole()

    def happens(self, odds: float) -> bool:
        return not self.calm and self.rng.random() < odds

    def pass_time(self, process: Process) -> None:
        self.clock += 1
        if self.clock >= MOMENTS_WILD and not self.calm:
            self.calm = True
            self.note(None, "the weather calms down")
        if self.late and self.happens(0.1):
            self._late_land(everything=False)
        if self.happens(self.weather.successor) and len(self.stage) < PROCESSES_MAX:
            self.start()
        self._rivals()

    def write_file(self, writer: IcebergWriter, split: StreamSplit, number: int) -> str:
        """A worker closes a file, at the place where the real one would put it."""
        target = writer.targets[split.table]
        path = f"{target.location}/epoch={writer.epoch}/{writer.run}-{number}/data-0.parquet"
        if self.files.setdefault(path, split.positions) != split.positions:
            self.problems.append("two files under one name")
        return FileClosed(
            table=split.table,
            epoch=writer.epoch,
            batch_id=writer.batch_ids[split.table],
            worker=f"{writer.run}-{number}",
            schema_id=target.schema_id,
            spec_id=target.spec_id,
            path=path,
            kind=DATA,
            record_count=len(split.positions),
            size_bytes=8 * len(split.positions),
            partition={},
        ).to_json()

    def check_durable(self, upper: int) -> None:
        """The source may be told to forget only what the tables hold."""
        if self.weather.roll_back:
            return
        for table in self.stream.tables:
            held = {
                position for snapshot in self._history(table) for position in self._rows(snapshot)
            }
            if not held.issuperset(self.stream.positions(table, 0, upper)):
                self.problems.append("acknowledged too early")

    def _rivals(self) -> None:
        if not self.lake.tables:
            return
        name = self.rng.choice(sorted(self.lake.tables, key=str))
        if self.happens(self.weather.foreign):
            kind = self.rng.choice(["append", "replace", "other pipeline"])
            self.note(None, f"{kind} by somebody else on {name}")
            if kind == "other pipeline":
                other = Progress(pipeline="other", generation=99, epoch=99, tables=1)
                summary = summaries.to_entries(other).summary
                self.lake.foreign_commit(name, "append", {**summary, summaries.BATCH_ID: "other"})
            else:
                self.lake.foreign_commit(name, kind)
        if self.happens(self.weather.evolve):
            self.note(None, f"somebody changes the schema of {name}")
            self.lake.evolve(name)
        if self.happens(self.weather.roll_back):
            ancestors = [snapshot.id for snapshot in self.lake.tables[name].ancestry()]
            to = self.rng.choice([*ancestors[:6], None])
            self.note(None, f"somebody rolls {name} back")
            self.lake.roll_back(name, to)

    def _late_land(self, everything: bool) -> None:
        while self.late:
            process, request, what = self.late.pop(self.rng.randrange(len(self.late)))
            try:
                request()
                self.done(process, what)
            except CommitConflict:
                self.note(None, f"refused late: {what}")
            if not everything:
                return

    def _drained(self) -> bool:
        last = self.processes[-1]
        return last.error is None and self.stream.visible == len(self.stream.log)

    def _alarms(self) -> None:
        """Errors that a process may end with in such a world; any other is a false alarm."""
        expected = (Crash, Fenced, Retryable, CommitUnknown)
        for process in self.processes:
            error = process.error
            if error is None or isinstance(error, expected):
                continue
            if isinstance(error, RolledBack) and self.weather.roll_back:
                continue
            if isinstance(error, HistoryLost) and process.succeeded:
                # It may ask for what its successor had the source forget.
                continue
            text = error.message if isinstance(error, IcestreamError) else repr(error)
            self.problems.append(f"false alarm {type(error).__name__}: {text}")

    def _operator(self) -> bool:
        """Someone who asks for a replay of what was rolled back; True when there was something."""
        settled = False
        sink = IcebergSink(
            MemoryCatalog(self.lake),  # type: ignore[arg-type]
            IcebergSinkOptions(namespace=NAMESPACE),
            PIPELINE,
        )
        for table, (_, head) in sink.heads(self.stream.tables).items():
            if head.rolled_back_from is not None:
                self.note(None, f"the operator replays {table}")
                sink.settle_rollback(table, replay=True)
                settled = True
        return settled

    def _history(self, table: str) -> list[Snapshot]:
        """The table's snapshots from the first to the last."""
        metadata = self.lake.tables.get(TableName(namespace=(NAMESPACE,), name=table))
        return list(metadata.ancestry())[::-1] if metadata else []

    def _rows(self, snapshot: Snapshot) -> list[int]:
        return [position for path in snapshot.paths for position in self.files[path]]

    def _check_tables(self, whole: bool) -> None:
        for table in self.stream.tables:
            self._check_rows(table, whole)
            self._check_epochs(table)
        if not self.weather.roll_back:
            self._check_agreement()

    def _check_rows(self, table: str, whole: bool) -> None:
        """Every change of the stream is in the table exactly once."""
        rows = Counter(row for snapshot in self._history(table) for row in self._rows(snapshot))
        wanted = Counter(self.stream.positions(table))
        if rows - wanted:
            self.problems.append("duplicate")
        if whole and wanted - rows:
            self.problems.append("lost")

    def _epochs(self, table: str) -> list[tuple[Progress, Snapshot]]:
        own = [s for s in self._history(table) if s.summary.get(summaries.PIPELINE) == PIPELINE]
        published = [s for s in own if summaries.BATCH_ID in s.summary]
        return [(self._progress(table, s), s) for s in published]

    def _progress(self, table: str, snapshot: Snapshot) -> Progress:
        return progress_in(
            self.lake.tables[TableName(namespace=(NAMESPACE,), name=table)], snapshot
        )

    def _check_epochs(self, table: str) -> None:
        """Each epoch is one snapshot with exactly the changes of its span, in order."""
        end, number, generation = 0, 0, 0
        for progress, snapshot in self._epochs(table):
            lower = progress.lower[PARTITION][0] if progress.lower[PARTITION] else 0
            upper = progress.upper[PARTITION][0]
            if lower < end or progress.epoch <= number or progress.generation < generation:
                self.problems.append("epochs out of order")
            if sorted(self._rows(snapshot)) != self.stream.positions(table, lower, upper):
                self.problems.append("a snapshot holds other changes than its epoch")
            end, number, generation = upper, progress.epoch, progress.generation

    def _check_agreement(self) -> None:
        """Tables agree about each epoch, each epoch is whole, and epochs do not overlap."""
        epochs: dict[int, list[Progress]] = {}
        for table in self.stream.tables:
            for progress, _ in self._epochs(table):
                epochs.setdefault(progress.epoch, []).append(progress)
        end = 0
        for _, carriers in sorted(epochs.items()):
            spans = {(p.lower, p.upper, p.tables) for p in carriers}
            if len(spans) > 1 or len(carriers) != carriers[0].tables:
                self.problems.append("tables disagree about an epoch")
            lower = carriers[0].lower[PARTITION][0] if carriers[0].lower[PARTITION] else 0
            if lower < end:
                self.problems.append("epochs overlap")
            end = carriers[0].upper[PARTITION][0]

    def _check_whole(self) -> None:
        """Nobody ever sees the newest epoch in some of its tables and not in the others."""
        newest = []
        for table in self.stream.tables:
            history = self._history(table)[::-1]
            own = [s for s in history if s.summary.get(summaries.PIPELINE) == PIPELINE][:1]
            newest += [self._progress(table, s) for s in own]
        last = max((progress.epoch for progress in newest), default=0)
        carriers = [progress for progress in newest if progress.epoch == last]
        if last and len(carriers) != carriers[0].tables:
            self.problems.append("a part of an epoch was seen")


class _Pending:
    """A call that was handed to an executor and has not run yet."""

    def __init__(self, pool: "SeededExecutor", call: Callable[[], Any]):
        self._pool = pool
        self._call = call
        self._error: BaseException | None = None
        self._answer: Any = None

    def run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:
            self._error = error

    def exception(self) -> BaseException | None:
        self._pool.run_until(self)
        return self._error

    def result(self) -> Any:
        if error := self.exception():
            raise error
        return self._answer

    def cancel(self) -> bool:
        return self._pool.forget(self)


class SeededExecutor:
    """Runs what a thread pool would, in one thread and in an order that the seed decides."""

    def __init__(self, rng: random.Random, max_workers: int = 1, thread_name_prefix: str = ""):
        self._rng = rng
        self._waiting: list[_Pending] = []

    def __enter__(self) -> "SeededExecutor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._waiting:
            self._run_any()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> _Pending:
        pending = _Pending(self, lambda: call(*arguments))
        self._waiting.append(pending)
        return pending

    def map(self, call: Callable[..., Any], *items: Sequence[Any]) -> Iterator[Any]:
        futures = [self.submit(call, *arguments) for arguments in zip(*items, strict=True)]
        return (future.result() for future in futures)

    def run_until(self, pending: _Pending) -> None:
        while pending in self._waiting:
            self._run_any()

    def forget(self, pending: _Pending) -> bool:
        """A call that a thread has begun cannot be taken back."""
        begun = self._rng.random() < 0.5
        if not begun and pending in self._waiting:
            self._waiting.remove(pending)
        return not begun

    def _run_any(self) -> None:
        self._waiting.pop(self._rng.randrange(len(self._waiting))).run()


@contextmanager
def in_process(rng: random.Random) -> Iterator[None]:
    """The product without threads of its own and without waiting.

    Threads would make a run depend on the machine instead of the seed, and pauses between attempts
    only cost time in a world whose clock is the number of steps.
    """

    def executor(max_workers: int = 1, thread_name_prefix: str = "") -> SeededExecutor:
        return SeededExecutor(rng, max_workers, thread_name_prefix)

    commit = icestream.sinks.iceberg.commit
    changed: list[tuple[Any, str, Any]] = [
        (icestream.pipeline, "ThreadPoolExecutor", executor),
        (icestream.pipeline, "RETRY_SECONDS", 0.0),
        (icestream.sinks.iceberg, "ThreadPoolExecutor", executor),
        (commit, "BACKOFF_SECONDS", 0.0),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def simulate(seed: int) -> str:
    """The verdict on one seed: `exact`, or what went wrong."""
    return World(seed).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds until the time is up, or one seed with its trace."""
    parser = argparse.ArgumentParser(description="Simulate the commit protocol.")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=None, help="run this seed alone and trace it")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        world = World(options.seed)
        verdict = world.run()
        sys.stdout.write("\n".join([*world.trace, f"seed {options.seed}: {verdict}"]) + "\n")
        return 0 if verdict == EXACT else 1
    first = time.time_ns() // 1_000_000 * 1_000_000
    verdicts: Counter[str] = Counter()
    ends = time.monotonic() + 60 * options.minutes
    for seed in itertools.count(first):
        if time.monotonic() >= ends:
            break
        verdict = simulate(seed)
        verdicts[verdict] += 1
        if verdict != EXACT:
            sys.stdout.write(f"seed {seed}: {verdict}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{verdicts.total()} runs, {verdicts[EXACT]} exact\n")
    return 0 if verdicts.total() == verdicts[EXACT] else 1


if __name__ == "__main__":
    sys.exit(main())
