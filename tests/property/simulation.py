"""Seeded simulation of the whole commit protocol: the real loop and sink in a hostile world.

    Pipeline ──► IcebergSink ──► publish_epoch, publish_claim     the product, as it is
       │              │
    Stream        MemoryCatalog                                   in memory, behind a faulty wire

Several processes run the same pipeline, as after a split brain: each is a thread, and so is each
epoch that it writes. Only one of them runs at a time, and the seed decides at every call to the
catalog, the source or a worker who goes on. A process may die there for good, or sleep and wake up
long after its successor took over. Requests are refused, lost, answered into the void, sent twice,
or arrive when nobody waits for them any more; so do the files of a task's twin. Rivals commit
snapshots, compact, evolve schemas, expire snapshots, remove orphans, drop tables and set them back.

Some rows a table does not take: they go into a table beside it, and which rows these are depends on
the table's schema. Some leave out a value that has to be looked up in the table. The source loses
what it was to read and serves it anew, or is itself set back to an earlier state.

Rows are positions of the stream, and nothing identifies them, so every change that is applied
twice shows. The checker reads the tables alone.

`python -m tests.property.simulation --minutes 5` runs seeds until the time is up;
`--seed S` runs one seed and prints what happened in it.
"""

import argparse
import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyiceberg.types import LongType

import icestream.patience
import icestream.pipeline
import icestream.sinks.iceberg
import icestream.sinks.iceberg.commit
from icestream import dead_letters
from icestream.epoch import Epoch, Progress
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    Fenced,
    HistoryLost,
    IcestreamError,
    ProgressLost,
    Retryable,
    RolledBack,
    TargetUnavailable,
)
from icestream.frontier import Frontier, Position
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import DATA, FileClosed
from icestream.iceberg.handle import TableName
from icestream.pipeline import Cadence, Pipeline
from icestream.report import Report
from icestream.schema import Column, SchemaGap, TableShape
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sinks.iceberg.writer import IcebergWriter
from icestream.sources import (
    CatchUp,
    EpochPlan,
    Need,
    Purpose,
    Remembered,
    Source,
    SplitsLost,
    Standing,
    StartPlan,
    TablesUnready,
    Targets,
    ValuesNeeded,
    without_history,
)
from icestream.worker import Outcome, Unready
from tests.property.memory import Lake, MemoryCatalog, Metadata, Snapshot, Wire, progress_in
from tests.property.stage import Crash, SeededExecutor, Stage, Threading, wait

T = TypeVar("T")

PIPELINE = "simulated"
NAMESPACE = "lake"
PARTITION = "log"
PROCESSES_MAX = 3
# After this many moments faults end, so that every run comes to a verdict.
MOMENTS_WILD = 700
RUNS_MAX = 80
EXACT = "exact"
# Rows that were written after the source was set back are told apart from those before.
TIMELINE = 1000


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
    drop: float
    restore: float
    expire: float
    twin: float
    splits_lost: float
    refusing: bool
    withholding: bool
    large_frontiers: bool
    forgetful: bool
    copies: bool
    heartbeats: bool
    tables_named: bool
    epochs_in_flight: int
    atomic: bool

    @staticmethod
    def draw(rng: random.Random) -> "Weather":
        """A world of its own for each seed: some know only one kind of trouble, some all."""

        def odds(usual: float) -> float:
            return usual * rng.choice([0.0, 0.5, 1.0, 1.0, 3.0])

        # Each of these has to be told from what the others do, so a world knows one of them.
        kind = rng.choice([*[""] * 4, "rolls back", "rolls back", "drops", "drops", "restores"])
        copies = kind == "drops" and rng.random() < 0.5
        expires = kind in ("", "rolls back") and rng.random() < 0.5
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
            roll_back=0.004 if kind == "rolls back" else 0.0,
            drop=0.003 if kind == "drops" else 0.0,
            restore=0.003 if kind == "restores" else 0.0,
            expire=odds(0.02) if expires else 0.0,
            twin=odds(0.2),
            splits_lost=odds(0.02),
            # Whoever fills a table anew does not know what went beside it before.
            refusing=kind in ("", "restores") and rng.random() < 0.5,
            # What is looked up is looked up in the past, which is then kept.
            withholding=not expires and rng.random() < 0.5,
            large_frontiers=rng.random() < 0.3,
            # What is gone from a table can only be replayed from a source that keeps its history.
            forgetful=copies or kind in ("", "restores"),
            # Or from one that copies a table anew, as its rows are now.
            copies=copies,
            heartbeats=rng.random() < 0.5,
            # A table that nobody names is not missed when it is dropped.
            tables_named=kind == "drops" or rng.random() < 0.5,
            epochs_in_flight=rng.choice([1, 2, 3]),
            atomic=rng.random() < 0.3,
        )


class Stream:
    """The source's log: for each position the table it belongs to, or nobody's.

    A frontier has a position and the timeline that it is of: when the log is set back to an earlier
    state, another timeline begins, and what was written after that point is not in it.
    """

    def __init__(self, rng: random.Random, weather: Weather):
        self.tables = [f"t{number}" for number in range(rng.randint(1, 4))]
        self._rng = rng
        length = rng.randint(15, 40)
        self.logs = [[self._draw() for _ in range(length)]]
        self.forks: list[int] = []
        self.visible = rng.randint(1, length)
        self.acked = 0
        # From some position on a table's rows have one more column.
        self.widened_at = {table: rng.randrange(2 * length) for table in self.tables}
        odd = range(length) if weather.refusing else ()
        # These a table takes only with some of its schemas.
        self.refused = frozenset(position for position in odd if rng.random() < 0.3)
        kept = range(length) if weather.withholding else ()
        # These leave out a value that an earlier row of their table has.
        self.withheld = frozenset(position for position in kept if rng.random() < 0.2)

    def _draw(self) -> str | None:
        return self._rng.choice([*self.tables, *self.tables, None])

    @property
    def timeline(self) -> int:
        """The newest timeline."""
        return len(self.forks)

    @property
    def log(self) -> list[str | None]:
        """The log as it is now."""
        return self.logs[-1]

    def restore(self) -> None:
        """The log is set back, and goes on otherwise."""
        fork = self._rng.randrange(self.visible + 1)
        self.logs.append([*self.log[:fork], *(self._draw() for _ in self.log[fork:])])
        self.forks.append(fork)
        self.visible = fork
        self.acked = min(self.acked, fork)

    def has(self, frontier: Frontier) -> bool:
        """Whether what lies before a frontier is what the log has there now."""
        position, timeline = at(frontier)
        return all(position <= fork for fork in self.forks[timeline:])

    def rows(
        self, table: str, lower: int = 0, upper: int | None = None, timeline: int | None = None
    ) -> list[int]:
        """The rows of a table's changes within a span."""
        timeline = self.timeline if timeline is None else timeline
        log = self.logs[timeline]
        span = range(lower, len(log) if upper is None else upper)
        return [self._row(position, timeline) for position in span if log[position] == table]

    def _row(self, position: int, timeline: int) -> int:
        while timeline and position < self.forks[timeline - 1]:
            timeline -= 1
        return timeline * TIMELINE + position

    def wanted_before(self, table: str, row: int) -> int | None:
        """The earlier row that has the value which this one leaves out."""
        position, timeline = row % TIMELINE, row // TIMELINE
        if position not in self.withheld:
            return None
        older = self.rows(table, 0, position, timeline)
        taken = [each for each in older if each % TIMELINE not in self.refused]
        return taken[-1] if taken else None


def at(frontier: Frontier) -> tuple[int, int]:
    """The position and the timeline of a frontier."""
    found = frontier[PARTITION]
    return (found[0], found[1]) if found else (0, 0)


def _copy(table: str) -> str:
    return f"copy of {table}"


def _copied(epoch: Epoch, table: str) -> bool:
    """Whether the epoch brings all rows of a table, in place of those it has."""
    return epoch.upper[_copy(table)] > epoch.lower[_copy(table)]


def beside(table: str) -> str:
    """Where rows go that a table does not take."""
    return dead_letters.table_of(table)


SHAPE = TableShape(columns=[Column(name="position", type=LongType())], key=["position"])


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit:
    """Rows of one table, some of which may go beside it; the simulated workers read them directly.

    `lacking` are rows that have to be looked up, `stored` those that were, by table.
    """

    table: str
    tables: Sequence[str]
    rows: Sequence[int]
    columns: frozenset[str]
    lacking: frozenset[int]
    stored: Mapping[str, pa.Table | None] = field(default_factory=dict)
    each_key_once: bool = True
    size_bytes: int = 1

    def changes(self, targets: Targets) -> Iterator[tuple[str, pa.Table]]:
        raise NotImplementedError

    def with_stored(self, table: str, values: pa.Table | None) -> "StreamSplit":
        return replace(self, stored={**self.stored, table: values})

    def learned(self) -> None:
        return None

    def divided(self, refusing: bool, refused: frozenset[int]) -> dict[str, list[int]]:
        """The rows by the table that they go into, given whether the table refuses any."""
        parts: dict[str, list[int]] = {}
        for row in self.rows:
            away = refusing and row % TIMELINE in refused
            parts.setdefault(beside(self.table) if away else self.table, []).append(row)
        return parts


class StreamSource(Source):
    """The `Source` of one process; what it was told to forget it no longer serves."""

    key_in_one_split = True

    def __init__(self, process: "Process"):
        self._process = process
        self._world = process.world
        self._stream = process.world.stream
        self._found: set[str] = set()
        self._again: set[str] = set()
        self._copies: dict[str, Position] = {}
        self._skipped: frozenset[int] = frozenset()
        self._ahead = Frontier()

    def tables(self) -> Sequence[str]:
        return self._stream.tables if self._world.weather.tables_named else []

    def resume(self, remembered: Remembered) -> StartPlan:
        self._found |= {*remembered.progress}
        self._again = {*remembered.missing} if self._world.weather.copies else set()
        behind = without_history(self.tables(), remembered, self._has_history)
        return StartPlan(rebuilt=frozenset(self._again), behind=behind)

    def tables_met(self, shapes: Mapping[str, TableShape]) -> None:
        self._found |= {*shapes}

    def shape(self, table: str) -> TableShape:
        return SHAPE

    def _has_history(self, table: str, before: Frontier) -> bool:
        if self._world.weather.copies:
            return False
        return bool(self._stream.rows(table, self._stream.acked, at(before)[0], at(before)[1]))

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        if isinstance(purpose, CatchUp):
            # What lies beside a table stays there when the table is read again.
            self._skipped = self._world.rows_beside(purpose.table)
            self._ahead = purpose.durable
        self._process.moment()
        stream, rng = self._stream, self._world.rng
        start = self._served(lower)
        stream.visible = min(len(stream.log), stream.visible + rng.randrange(6))
        if self._world.calm:
            stream.visible = len(stream.log)
        bounds = []
        # What the destination has nothing of is brought as a whole, once, and a frontier says so.
        self._copies = {_copy(table): (self._process.number,) for table in self._again}
        copied = lower.join(Frontier(self._copies)).positions
        if start and not lower.covers(Frontier(self._copies)):
            bounds.append(Frontier({**copied, PARTITION: (start, stream.timeline)}))
        while start < stream.visible and len(bounds) < 4:
            start = min(stream.visible, start + rng.randint(1, 8))
            bounds.append(Frontier({**copied, PARTITION: (start, stream.timeline)}))
        if not bounds:
            self._process.nothing_new()
        return bounds

    def plan(self, epoch: Epoch) -> EpochPlan:
        copied = frozenset(t for t in self._stream.tables if _copied(epoch, t))
        return EpochPlan(parts=self._splits(epoch), truncated=copied)

    def _splits(self, epoch: Epoch) -> Sequence[StreamSplit]:
        self._process.moment()
        self._served(epoch.upper)
        lower, upper = self._served(epoch.lower), at(epoch.upper)[0]
        stream = self._stream
        found = []
        for table in stream.tables:
            rows = stream.rows(table, 0 if _copied(epoch, table) else lower, upper)
            if self._ahead.covers(epoch.upper):
                rows = [row for row in rows if row not in self._skipped]
            cut = self._world.rng.randint(0, len(rows))
            wide = any(row % TIMELINE >= stream.widened_at[table] for row in rows)
            before = {stream.wanted_before(table, row) for row in rows} - {None, *rows}
            tables = [table, *({beside(table)} & self._found)]
            found += [
                StreamSplit(
                    table=table,
                    tables=tables,
                    rows=part,
                    columns=frozenset(["extra"] if wide else []),
                    lacking=frozenset(row for row in before if row is not None),
                )
                for part in (rows[:cut], rows[cut:])
                if part
            ]
        return found

    def was_read(self, epoch: Epoch, lessons: Sequence[Any]) -> Mapping[str, str]:
        return {"simulated.files": "{data}"}

    def standing(self, frontier: Frontier) -> Standing:
        return Standing(position=str(frontier[PARTITION]))

    def ack(self, durable: Frontier) -> None:
        self._process.moment()
        self._world.check_durable(durable)
        self._world.note(self._process, f"acknowledges {at(durable)}")
        if self._world.weather.forgetful and self._stream.has(durable):
            self._stream.acked = max(self._stream.acked, at(durable)[0])
        self._process.moment()

    def _served(self, frontier: Frontier) -> int:
        position, _ = at(frontier)
        if not self._stream.has(frontier):
            raise HistoryLost(f"position {position} is of a timeline that has ended")
        if position < self._stream.acked:
            # The first epoch begins with copies of all tables, and needs no history.
            begins = self._world.weather.copies and not frontier[PARTITION]
            if not self._again and not begins:
                raise HistoryLost(f"position {position} was forgotten")
            # A table that is gone may have known it alone; those that are left lack nothing.
            return self._stream.acked
        return position


class Process(Wire):
    """One run of the pipeline, and the wire between it and the catalog."""

    def __init__(self, world: "World", number: int):
        self.world = world
        self.number = number
        # Whether the tables hold what the source never had, as this process starts.
        self.begins_astray = world.astray()
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
            IcebergSink(catalog, options, PIPELINE, self.read_rows),  # type: ignore[arg-type]
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
            world.stage.pause()
            if world.happens(world.weather.crash):
                self._dead = True
        if self._dead or world.stage.hung:
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
        reports: list[Report] = []
        unready: list[SchemaGap | TablesUnready] = []
        needs: dict[str, set[int]] = {}
        world = self.world
        for number, split in enumerate(splits):
            self.moment()
            if world.happens(world.weather.unavailable):
                raise TargetUnavailable("the storage did not answer")
            if world.happens(world.weather.splits_lost):
                world.note(self, "splits are lost")
                raise SplitsLost("what was to be read is gone")
            parts = split.divided(world.refuses(writer, split.table), world.stream.refused)
            schema = writer.schema_json(split.table)
            missing = [name for name in split.columns if f'"{name}"' not in schema]
            if missing:
                columns = [Column(name=n, type=LongType()) for n in missing]
                unready.append(SchemaGap(split.table, columns))
            if new := parts.keys() - {*writer.tables()}:
                unready.append(TablesUnready(dict.fromkeys(new, SHAPE)))
            if split.lacking and split.table not in split.stored:
                needs.setdefault(split.table, set()).update(split.lacking)
            elif not unready and not needs:
                for table, rows in parts.items():
                    report = world.write_file(self, writer, table, rows, number)
                    world.check_stored(split, FileClosed.of(report).path)
                    reports.append(report)
        if unready:
            raise Unready(unready)
        if needs:
            world.note(self, "values are needed")
            raise ValuesNeeded(*(_need(table, rows) for table, rows in sorted(needs.items())))
        # A speculative task reports what its twin has reported already.
        reports += world.rng.sample(reports, min(len(reports), 1))
        return Outcome(reports=reports, rows=sum(len(s.rows) for s in splits), learned=[])

    def read_rows(self, staged: str, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """What Spark would read of a snapshot under these keys."""
        held = self.world.held(int(staged))
        wanted = [row for row in keys.column(0).to_pylist() if row in held]
        return pa.table({name: pa.array(wanted, pa.int64()) for name in columns})


def _need(table: str, rows: set[int]) -> Need:
    keys = pa.table({"position": pa.array(sorted(rows), pa.int64())})
    return Need(table=table, keys=keys, columns=["position"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file holds; two writings of the same rows need not have the same bytes."""

    rows: Sequence[int]
    size_bytes: int


@dataclass(slots=True)
class World:
    """Everything that outlives a process, and what happens to it."""

    seed: int
    rng: random.Random = field(init=False)
    weather: Weather = field(init=False)
    stream: Stream = field(init=False)
    stage: Stage = field(init=False)
    lake: Lake = field(default_factory=Lake)
    files: dict[str, Content] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    twins: list[Callable[[], object]] = field(default_factory=list)
    late: list[tuple[Process, Callable[[], object], str]] = field(default_factory=list)
    claims: list[Process] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    older: list[tuple[TableName, Metadata]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    clock: int = 0
    calm: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.weather = Weather.draw(self.rng)
        self.stream = Stream(self.rng, self.weather)
        self.stage = Stage(self.rng)

    def run(self) -> str:
        """Live through all of it; returns `exact`, or what went wrong."""
        with in_process(self.rng, self.stage, self.weather):
            for _ in range(RUNS_MAX):
                self.start()
                self.stage.run()
                self._alarms()
                settled = self._operator()
                # The way of the guide: between two runs.
                if self.weather.drop and self.lake.tables and self.happens(0.3):
                    self._drop(self.rng.choice(sorted(self.lake.tables, key=str)))
                if self.weather.drop and not self.weather.copies:
                    self._set_back()
                if self.problems or (self._drained() and self.calm and not settled):
                    break
                self.calm = self.calm or self._drained()
                if self.calm:
                    self._late_land(everything=True)
                    self._twins_end(everything=True)
            else:
                self.problems.append("stuck")
            self._twins_end(everything=True)
        # A run that was cut short by a problem has not lost what it did not get to.
        self._check_tables(whole=not self.problems)
        return ", ".join(dict.fromkeys(self.problems)) or EXACT

    def start(self) -> None:
        """Another process of the pipeline starts, whoever else is still running."""
        process = Process(self, len(self.processes) + 1)
        self.processes.append(process)
        self.note(process, "starts")
        self.stage.enter(process, process.run)

    def note(self, process: Process | None, what: str) -> None:
        who = f"process {process.number}" if process else "world"
        self.trace.append(f"{self.clock:5} {who}: {what}")

    def done(self, process: Process, what: str) -> None:
        """A change has landed, whether or not the process learns of it."""
        self.note(process, f"done: {what}")
        if what.startswith("claim"):
            self.claims.append(process)
        if self.weather.atomic and not self._replays():
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
        if self.twins and self.happens(0.1):
            self._twins_end(everything=False)
        if self.happens(self.weather.successor) and self.stage.owners() < PROCESSES_MAX:
            self.start()
        self._rivals()

    def refuses(self, writer: IcebergWriter, table: str) -> bool:
        """Whether a table does not take all rows, as its schema is now."""
        return bool(json.loads(writer.schema_json(table))["schema-id"] % 2 == 0)

    def write_file(
        self, process: Process, writer: IcebergWriter, table: str, rows: Sequence[int], number: int
    ) -> Report:
        """A worker closes a file, at the place where the real one would put it."""
        target = writer.targets[table]

        def write() -> tuple[str, str, Content]:
            # The same rows in other batches make a file of another size.
            content = Content(rows=rows, size_bytes=8 * len(rows) + self.rng.randrange(8))
            attempt = self.attempt()
            shard = f"{writer.run}-{number}{attempt}"
            path = f"{target.location}/epoch={writer.epoch}/{shard}/data-0.parquet"
            if path in self.files and self.files[path].rows != rows:
                self.problems.append("two files under one name")
            self.files[path] = content
            return attempt, path, content

        attempt, path, content = write()
        if self.happens(self.weather.twin):
            self.note(process, f"a twin of {path} goes on")
            self.twins.append(write)
        self.sizes[path] = content.size_bytes
        return FileClosed(
            table=table,
            epoch=writer.epoch,
            worker=f"{writer.run}-{number}",
            attempt=attempt,
            schema_id=target.schema_id,
            spec_id=target.spec_id,
            path=path,
            kind=DATA,
            record_count=len(rows),
            size_bytes=content.size_bytes,
            partition={},
        ).report()

    def attempt(self) -> str:
        """What tells an attempt at a task from all others, as the real writer draws it."""
        return f"-{self.rng.getrandbits(64):016x}"

    def check_stored(self, split: StreamSplit, path: str) -> None:
        """What was looked up is what the epochs before have left, or the file is never seen."""
        stored = split.stored.get(split.table)
        if stored is None or self._replays():
            return
        if not split.lacking <= {*stored.column("position").to_pylist()}:
            self.early.add(path)

    def check_durable(self, durable: Frontier) -> None:
        """The source may be told to forget only what the tables hold."""
        if self._replays():
            return
        upper, timeline = at(durable)
        for table in self.stream.tables:
            if not self._held(table).keys() >= {*self.stream.rows(table, 0, upper, timeline)}:
                self.problems.append("acknowledged too early")

    def held(self, snapshot_id: int) -> set[int]:
        """The rows of a table at a snapshot."""
        for metadata in (*self.lake.tables.values(), *self.lake.dropped):
            snapshots = {**self.lake.expired, **metadata.snapshots}
            if snapshot_id in metadata.snapshots:
                return {row for each in _way(snapshots, snapshot_id) for row in self._rows(each)}
        raise AssertionError("a snapshot that is read is there")

    def astray(self) -> bool:
        """Whether a table holds what the source, set back meanwhile, does not have."""
        names = (*self.stream.tables, *map(beside, self.stream.tables))
        uppers = [progress.upper for table in names for progress, _ in self._epochs(table)]
        return not all(map(self.stream.has, uppers))

    def _replays(self) -> bool:
        """Whether tables may lie behind others and be brought forward."""
        return bool(self.weather.roll_back or self.weather.drop)

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
        self._neighbours(name)

    def _neighbours(self, name: TableName) -> None:
        """What those do who look after tables, and those who look after the source."""
        if self.happens(self.weather.expire):
            self.note(None, f"snapshots of {name} are expired")
            self.lake.expire(name, self.rng.randrange(4))
        if self.happens(self.weather.drop):
            self._drop(name)
        if self.happens(self.weather.restore):
            self.stream.restore()
            self.note(None, f"the source is set back to {self.stream.forks[-1]}")

    def _drop(self, name: TableName) -> None:
        if name.name.endswith(dead_letters.SUFFIX):
            return
        anew = self.rng.random() < 0.5
        self.note(None, f"somebody drops {name}{' and makes it anew' if anew else ''}")
        gone = self.lake.drop(name)
        if anew:
            self.lake.create(name, _first_schema(gone.schema_json), gone.properties)

    def _set_back(self) -> None:
        """Somebody puts older metadata of a table in its place; what is there now is kept too.

        Of a table that was dropped since it is as if it had been renamed, and came back.
        """
        older = list(self.older)
        self.older += self.lake.tables.items()
        if not older or not self.happens(0.2):
            return
        name, chosen = self.rng.choice(older)
        there = {each.uuid for each in self.lake.tables.values()}
        how = "sets {} back to older metadata" if chosen.uuid in there else "brings {} back"
        self.note(None, f"somebody {how.format(name)}")
        self.lake.tables[name] = chosen

    def _late_land(self, everything: bool) -> None:
        while self.late:
            process, request, what = self.late.pop(self.rng.randrange(len(self.late)))
            try:
                request()
                self.done(process, what)
            except (CommitConflict, ProgressLost):
                self.note(None, f"refused late: {what}")
            if not everything:
                return

    def _twins_end(self, everything: bool) -> None:
        """Tasks that were given up, or had a faster twin, close their files."""
        while self.twins:
            self.twins.pop(self.rng.randrange(len(self.twins)))()
            self.note(None, "a twin ends late")
            if not everything:
                return

    def _drained(self) -> bool:
        last = self.processes[-1]
        if isinstance(last.error, HistoryLost) and last.begins_astray:
            # Somebody has to decide; until then it is right that nothing goes on.
            return True
        return last.error is None and self.stream.visible == len(self.stream.log)

    def _alarms(self) -> None:
        """Errors that a process may end with in such a world; any other is a false alarm."""
        expected = (Crash, Fenced, Retryable, CommitUnknown)
        if self.stage.hung:
            self.problems.append("a process waits for itself")
        for process in self.processes:
            error = process.error
            if error is None and process.begins_astray:
                self.problems.append("history was lost in silence")
            if error is None or isinstance(error, expected):
                continue
            if isinstance(error, ProgressLost) and self.weather.drop:
                continue
            if isinstance(error, HistoryLost) and _set_back_table(error):
                continue
            if isinstance(error, HistoryLost) and self.stream.forks:
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
        error = self.processes[-1].error
        if isinstance(error, HistoryLost) and (table := _set_back_table(error)):
            self.note(None, f"the operator drops {table}, which lacks epochs")
            self.lake.drop(TableName(namespace=(NAMESPACE,), name=table))
            settled = True
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
        head = metadata.head("main") if metadata else None
        if metadata is None or head is None:
            return []
        return _way({**self.lake.expired, **metadata.snapshots}, head.id)[::-1]

    def _current(self, table: str) -> list[Snapshot]:
        """The snapshots since all older rows of the table were removed."""
        history = self._history(table)
        truncated = [number for number, snapshot in enumerate(history) if snapshot.truncated]
        return history[truncated[-1] :] if truncated else history

    def _rows(self, snapshot: Snapshot) -> list[int]:
        return [row for path in snapshot.paths for row in self.files[path].rows]

    def rows_beside(self, table: str) -> frozenset[int]:
        """The rows that a table did not take."""
        snapshots = self._current(beside(table))
        return frozenset(row for snapshot in snapshots for row in self._rows(snapshot))

    def _held(self, table: str) -> Counter[int]:
        """The rows that a table has, and those that went beside it."""
        both = (table, beside(table))
        return Counter(row for t in both for s in self._current(t) for row in self._rows(s))

    def _check_tables(self, whole: bool) -> None:
        for table in self.stream.tables:
            self._check_rows(table, whole)
            for each in (table, beside(table)):
                self._check_epochs(each, table)
                self._check_files(each)
        if not self._replays() and not self.stream.forks:
            self._check_agreement()

    def _check_rows(self, table: str, whole: bool) -> None:
        """Every change of the stream is in the table, or beside it, exactly once."""
        rows = self._held(table)
        upper, timeline = len(self.stream.log), self.stream.timeline
        if self.astray():
            # What was committed before the source was set back stays, as it was then.
            names = (*self.stream.tables, *map(beside, self.stream.tables))
            epochs = [progress for name in names for progress, _ in self._epochs(name)]
            last = max(epochs, key=lambda progress: progress.epoch)
            upper, timeline = at(last.lower)
        every = range(self.stream.timeline + 1)
        known = {row for each in every for row in self.stream.rows(table, timeline=each)}
        if rows - Counter(known):
            self.problems.append("duplicate")
        if whole and Counter(self.stream.rows(table, 0, upper, timeline)) - rows:
            self.problems.append("lost")

    def _own(self, table: str) -> list[Snapshot]:
        history = self._history(table)
        return [s for s in history if s.summary.get(summaries.PIPELINE) == PIPELINE]

    def _epochs(self, table: str) -> list[tuple[Progress, Snapshot]]:
        published = [s for s in self._own(table) if summaries.BATCH_ID in s.summary]
        return [(self._progress(s), s) for s in published]

    def _progress(self, snapshot: Snapshot) -> Progress:
        return progress_in(self.lake.written, snapshot)

    def _check_epochs(self, table: str, owner: str) -> None:
        """Each epoch is one snapshot with changes of its span, in order."""
        end, number, generation = 0, 0, 0
        for progress, snapshot in self._epochs(table):
            lower, _ = at(progress.lower)
            upper, timeline = at(progress.upper)
            if lower < end or progress.epoch <= number or progress.generation < generation:
                self.problems.append("epochs out of order")
            first = 0 if snapshot.truncated else lower
            if not {*self._rows(snapshot)} <= {*self.stream.rows(owner, first, upper, timeline)}:
                self.problems.append("a snapshot holds other changes than its epoch")
            end, number, generation = upper, progress.epoch, progress.generation

    def _check_files(self, table: str) -> None:
        """Files are as they were reported, and were written for the schema that they came to."""
        for snapshot in self._history(table):
            if any(self.files[path].size_bytes != self.sizes[path] for path in snapshot.paths):
                self.problems.append("a committed file was overwritten")
            if not self.early.isdisjoint(snapshot.paths):
                self.problems.append("looked up too early")
        if self.lake.strayed:
            self.problems.append("files of another schema")

    def _check_agreement(self) -> None:
        """Tables agree about each epoch, each epoch is whole, and epochs do not overlap."""
        epochs: dict[int, list[Progress]] = {}
        filled = set()
        for table in (*self.stream.tables, *map(beside, self.stream.tables)):
            # What a table said last: which tables an epoch has may be corrected.
            last = {p.epoch: p for p in map(self._progress, self._own(table))}
            for progress, snapshot in self._epochs(table):
                epochs.setdefault(progress.epoch, []).append(last[progress.epoch])
                filled |= {progress.epoch} if snapshot.paths else set()
        end = 0
        for number, carriers in sorted(epochs.items()):
            spans = {(p.lower, p.upper, p.tables) for p in carriers}
            if len(spans) > 1 or len(carriers) != carriers[0].tables:
                self.problems.append("tables disagree about an epoch")
            if number in filled:
                if at(carriers[0].lower)[0] < end:
                    self.problems.append("epochs overlap")
                end = at(carriers[0].upper)[0]

    def _check_whole(self) -> None:
        """Nobody ever sees the newest epoch in some of its tables and not in the others."""
        newest = []
        for table in (*self.stream.tables, *map(beside, self.stream.tables)):
            history = self._history(table)[::-1]
            own = [s for s in history if s.summary.get(summaries.PIPELINE) == PIPELINE][:1]
            newest += map(self._progress, own)
        last = max((progress.epoch for progress in newest), default=0)
        carriers = [progress for progress in newest if progress.epoch == last]
        if last and len(carriers) != carriers[0].tables:
            self.problems.append("a part of an epoch was seen")


def _way(snapshots: Mapping[int, Snapshot], head: int) -> list[Snapshot]:
    """The snapshots from one back to the first."""
    found = []
    step: int | None = head
    while step is not None:
        found.append(snapshots[step])
        step = found[-1].parent
    return found


def _first_schema(schema_json: str) -> str:
    """The same columns in a table that is new."""
    return json.dumps({**json.loads(schema_json), "schema-id": 0})


@contextmanager
def in_process(rng: random.Random, stage: Stage, weather: Weather) -> Iterator[None]:
    """The product with threads that the seed orders, and without waiting.

    Threads of the machine would make a run depend on it instead of the seed, and pauses between
    attempts only cost time in a world whose clock is the number of steps.
    """

    def executor(max_workers: int = 1, thread_name_prefix: str = "") -> SeededExecutor:
        # Epochs wait for each other; all else just runs.
        owner = stage.current() if thread_name_prefix == "epoch" else None
        return SeededExecutor(stage, rng, owner)

    rooms = (icestream.pipeline.__name__, icestream.sinks.iceberg.__name__)
    modules = [module for name, module in sys.modules.items() if name.startswith(rooms)]
    seeded = {"ThreadPoolExecutor": executor, "threading": Threading(stage)}
    changed: list[tuple[Any, str, Any]] = [
        (icestream.pipeline, "wait", partial(wait, stage)),
        (icestream.patience, "RETRY_SECONDS", 0.0),
        (icestream.patience, "PAUSES_SECONDS", (0.0, 0.0)),
        *((m, name, value) for m in modules for name, value in seeded.items() if hasattr(m, name)),
    ]
    if weather.large_frontiers:
        changed.append((summaries, "SUMMARY_BYTES_MAX", 1))
        if not weather.roll_back:
            # Only what is needed is kept.
            changed.append((summaries, "KEPT_BYTES_MAX", 1))
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


def _set_back_table(error: HistoryLost) -> str:
    """The table that an error says was set back, or came back; empty for other errors."""
    lacking = r"was set back to an older state|was away while the pipeline went on"
    found = re.fullmatch(rf"table (\S+) (?:{lacking})", error.message)
    return found[1] if found else ""


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
