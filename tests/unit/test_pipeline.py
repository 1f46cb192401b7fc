"""The loop orders mint, write, commit and ack, and goes on exactly where the tables are."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import REGISTRY
from pyiceberg.types import LongType

import icestream.patience
import icestream.pipeline
from icestream import dead_letters, metrics
from icestream.abilities import members
from icestream.epoch import Epoch, Progress, resume_point, table_id
from icestream.errors import (
    CommitUnknown,
    ConfigInvalid,
    DataRejected,
    Fenced,
    HistoryLost,
    IcestreamError,
    SchemaRejected,
    SourceUnavailable,
    TargetUnavailable,
)
from icestream.failpoints import FailpointError
from icestream.frontier import START, Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import DATA, FileClosed
from icestream.iceberg.handle import TableName
from icestream.pipeline import Cadence, Pipeline, State, brief, missing_tables
from icestream.report import Report
from icestream.schema import Column, SchemaGap, TableShape
from icestream.sinks import SINK_ABILITIES, Sink
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sources import (
    EpochPlan,
    Need,
    Purpose,
    Remembered,
    Source,
    SplitsLost,
    Standing,
    StartPlan,
    TableSplit,
    Targets,
    ValuesNeeded,
    without_history,
)
from icestream.sources.abilities import SOURCE_ABILITIES
from icestream.worker import Outcome, Unready
from tests.property.memory import Lake, MemoryCatalog, Snapshot, Wire
from tests.servers import wait_until

SHAPE = TableShape(columns=[Column(name="id", type=LongType())], key=["id"])
# Long enough for any machine; a test that waits for it has failed.
DEADLINE_SECONDS = 30.0
# Long enough for what must not happen to happen.
EARLY_SECONDS = 0.5


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Retries wait for trouble to pass, which here it does at once."""
    # How long a pause is changes nothing but the time that the test takes.
    monkeypatch.setattr(icestream.patience, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(icestream.pipeline, "BACKLOG_LOOK_SECONDS", 0.0)  # a pause as well


@dataclass(frozen=True)
class LogSplit(TableSplit):
    """Positions of one table."""

    table: str
    positions: tuple[int, ...]

    def read(self, schema_json: str, key: Sequence[str], reads: Any = None) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        return 1

    @property
    def each_key_once(self) -> bool:
        return False

    def with_stored(self, table: str, values: pa.Table | None) -> "LogSplit":
        return self

    def learned(self) -> str:
        return f"read {self.table}"


def frontier(position: int) -> Frontier:
    return Frontier({"log": (position,)}) if position else START


class LogSource(Source):
    """A log of table names with fixed boundaries; it notes what it is asked and told."""

    key_in_one_split = True

    def __init__(self, log: str, bounds: Sequence[int], notes: list[str]):
        self.log, self.bounds, self.notes = log, list(bounds), notes
        self.called: dict[str, str] = {}
        self.named = True
        self.left_out: set[str] = set()
        self.troubles: list[Exception] = []
        self.forgotten = 0
        self.closed = 0
        self.interrupted = threading.Event()
        self.on_empty: Callable[[], None] = lambda: None
        self.on_resume: Callable[[], object] = lambda: None
        self.unfed: set[str] = set()

    def tables(self) -> Sequence[str]:
        found = self._tables_in(range(len(self.log))) - {".", *self.left_out}
        return sorted(found) if self.named else []

    def shape(self, table: str) -> TableShape | None:
        return dead_letters.SHAPE if table.endswith(dead_letters.SUFFIX) else SHAPE

    def resume(self, remembered: Remembered) -> StartPlan:
        tables = self.tables()
        behind = without_history(tables, remembered, self._has_history)
        strange = {*remembered.progress} - {*tables} if self.named else set()
        self.on_resume()
        return StartPlan(behind=behind, unfed=frozenset(strange | self.unfed))

    def _has_history(self, table: str, before: Frontier) -> bool:
        upper = before["log"][0] if before["log"] else 0
        return table in self._tables_in(range(self.forgotten, upper))

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        if self.troubles:
            raise self.troubles.pop(0)
        start = lower["log"][0] if lower["log"] else 0
        if start < self.forgotten:
            raise HistoryLost("forgotten")
        found = [frontier(bound) for bound in self.bounds if bound > start]
        if not found:
            self.on_empty()
        return found

    def plan(self, epoch: Epoch) -> EpochPlan:
        lower = epoch.lower["log"][0] if epoch.lower["log"] else 0
        span = range(lower, epoch.upper["log"][0])
        parts = [
            LogSplit(table, tuple(at for at in span if table in self._tables_in([at])))
            for table in sorted(self._tables_in(span) - {".", *self.left_out})
        ]
        return EpochPlan(parts=parts)

    def _tables_in(self, span: Iterable[int]) -> set[str]:
        return {self.called.get(self.log[at], self.log[at]) for at in span}

    def was_read(self, epoch: Epoch, lessons: Sequence[Any]) -> Mapping[str, str]:
        self.notes += [f"learn {learned}" for learned in lessons]
        return {}

    def standing(self, at: Frontier) -> Standing:
        return Standing(position=str(at["log"][0]) if at["log"] else "", lag_seconds=1.5)

    def ack(self, durable: Frontier) -> None:
        self.notes.append(f"ack {durable['log'][0]}")

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.closed += 1


class Workers:
    """Writes splits in memory, and can be made to fail."""

    def __init__(self, notes: list[str]):
        self.files: dict[str, tuple[int, ...]] = {}
        self.troubles: list[Exception] = []
        self.needs: set[str] = set()
        self.turned: Callable[[LogSplit], LogSplit | None] = lambda split: split
        self.before: Callable[[int], object] = lambda epoch: None
        self.after: Callable[[int], object] = lambda epoch: None
        self._notes = notes

    def __call__(self, splits, writer, keyed, description) -> Outcome:
        self._notes.append(f"write {writer.epoch}")
        self.before(writer.epoch)
        if self.troubles:
            raise self.troubles.pop(0)
        for split in splits:
            for name in self.needs:
                if f'"{name}"' not in writer.schema_json(split.table):
                    column = Column(name=name, type=LongType())
                    raise Unready([SchemaGap(split.table, [column])])
        turned = [kept for split in splits if (kept := self.turned(split))]
        reports = [self._report(split, writer) for split in turned]
        self.after(writer.epoch)
        return Outcome(
            reports=reports,
            rows=sum(len(split.positions) for split in splits),
            learned=[split.learned() for split in splits],
        )

    def _report(self, split: LogSplit, writer: Any) -> Report:
        path = f"{split.table}/{writer.epoch}/{writer.run}"
        self.files[path] = split.positions
        target = writer.targets[split.table]
        return FileClosed(
            table=split.table,
            epoch=writer.epoch,
            worker="w",
            schema_id=target.schema_id,
            spec_id=0,
            path=path,
            kind=DATA,
            record_count=len(split.positions),
            size_bytes=1,
            partition={},
        ).report()


class Scene:
    """A source, a lake and workers; each `pipeline()` is a new run over them."""

    def __init__(self, log: str, bounds: Sequence[int]):
        self.notes: list[str] = []
        self.lake = Lake()
        self.source = LogSource(log, bounds, self.notes)
        self.workers = Workers(self.notes)

    def pipeline(self, **cadence: Any) -> Pipeline:
        given = {"commit_interval": 0.0, **cadence}
        return Pipeline("p", self.source, self.sink(), Cadence(**given), self.workers)

    def sink(self) -> IcebergSink:
        return IcebergSink(MemoryCatalog(self.lake), IcebergSinkOptions(namespace="n"), "p")

    def run(self, **cadence: Any) -> Pipeline:
        pipeline = self.pipeline(**cadence)
        pipeline.run(once=True)
        return pipeline

    def history(self, table: str) -> list[Snapshot]:
        return list(self.lake.tables[name(table)].ancestry())[::-1]

    def epochs(self, table: str) -> list[tuple[int, list[int]]]:
        """Number and positions of each epoch that the table has."""
        published = [s for s in self.history(table) if summaries.BATCH_ID in s.summary]
        return [
            (int(s.summary[summaries.EPOCH]), [at for p in s.paths for at in self.workers.files[p]])
            for s in published
        ]

    def positions(self, table: str) -> list[int]:
        return [at for _, positions in self.epochs(table) for at in positions]

    def carry(self, table: str, progress: Progress, positions: Sequence[int] = ()) -> None:
        """Somebody left a table with this progress."""
        sink = self.sink()
        sink.claim([])
        sink.prepare(table, lambda: SHAPE)
        path = f"{table}/before"
        self.workers.files[path] = tuple(positions)
        summary = summaries.to_entries(progress).summary
        metadata = self.lake.tables[name(table)]
        head = metadata.head("main")
        snapshot = Snapshot(
            id=self.lake.next_id(),
            parent=head.id if head else None,
            operation="append",
            summary={**summary, summaries.BATCH_ID: "before"},
            paths=[path],
        )
        self.lake.tables[name(table)] = metadata.with_snapshot(snapshot, "main", "icestream-p")


def name(table: str) -> TableName:
    return TableName(namespace=("n",), name=table)


def progress(number: int, lower: int, upper: int, tables: int, **more: Any) -> Progress:
    return Progress(
        pipeline="p",
        generation=1,
        epoch=number,
        lower=frontier(lower),
        upper=frontier(upper),
        tables=tables,
        **more,
    )


def test_every_epoch_is_written_committed_and_then_acknowledged():
    """E1: mint, write, commit with its frontier, then acknowledge."""
    scene = Scene("aab.b", [2, 5])
    pipeline = scene.run(epochs_in_flight=1)
    assert scene.epochs("a") == [(1, [0, 1])]
    assert scene.epochs("b") == [(2, [2, 4])]
    assert [note for note in scene.notes if not note.startswith("learn")] == [
        *("write 1", "ack 2", "write 2", "ack 5")
    ]
    assert pipeline.health.to_json()["state"] == State.ENDED
    assert scene.source.closed == 1


def test_an_error_that_nobody_foresaw_shows_in_the_health():
    """E13: a pipeline that has ended is never shown as running."""
    scene = Scene("ab", [2])
    scene.workers.troubles = [KeyError("unforeseen")]
    pipeline = scene.pipeline()
    with pytest.raises(KeyError):
        pipeline.run(once=True)
    health = pipeline.health.to_json()
    assert health["state"] == State.HALTED
    assert "KeyError" in str(health["error"])


def test_what_reading_has_taught_goes_back_to_the_source():
    """E4: a source may remember what its splits found."""
    scene = Scene("ab", [2])
    scene.run()
    assert sorted(note for note in scene.notes if note.startswith("learn")) == [
        "learn read a",
        "learn read b",
    ]


def test_a_restart_goes_on_after_what_is_durable():
    """E2, E4: the tables remember, nothing else."""
    scene = Scene("aaaa", [2])
    scene.run()
    scene.source.bounds.append(4)
    scene.run()
    assert scene.epochs("a") == [(1, [0, 1]), (2, [2, 3])]


def test_a_run_without_work_leaves_the_tables_as_they_are():
    """E9: no snapshot when nothing has changed, not even a claim."""
    scene = Scene("aa", [2])
    scene.run()
    before = scene.lake.tables[name("a")]
    assert scene.run().health.to_json()["state"] == State.ENDED
    assert scene.lake.tables[name("a")] is before


def test_an_epoch_without_changes_makes_no_snapshot_and_is_not_acknowledged():
    """E9: its frontier advances in memory, and becomes durable with the next epoch."""
    scene = Scene("a...a", [1, 3, 5])
    scene.run()
    assert scene.epochs("a") == [(1, [0]), (3, [4])]
    assert [note for note in scene.notes if note.startswith("ack")] == ["ack 1", "ack 5"]


def test_a_heartbeat_publishes_a_frontier_without_changes():
    """E9: published at least every heartbeat_interval when it is set."""
    scene = Scene("a...", [1, 4])
    scene.run(heartbeat_interval=1e-9)
    assert scene.epochs("a") == [(1, [0]), (2, [])]
    assert scene.history("a")[-1].summary["icestream.frontier"] == '{"log":[4]}'
    assert scene.notes[-1] == "ack 4"


class BeginningSource(LogSource):
    """One whose beginning must be remembered, as that of a topic from `start: latest` on."""

    def plan(self, epoch: Epoch) -> EpochPlan:
        return replace(super().plan(epoch), milestone=lambda durable: durable == START)


def test_a_beginning_that_no_table_can_remember_is_told(caplog):
    """E9, K10: the next start begins elsewhere; a table that is there remembers it."""
    for log, told in (("..", 1), ("a.", 0)):
        scene = Scene(log, [1, 2])
        scene.source = BeginningSource(log, [1, 2], scene.notes)
        caplog.clear()
        scene.run()
        lines = [record for record in caplog.records if "could remember" in record.getMessage()]
        assert len(lines) == told


class DatedSource(LogSource):
    """One that knows when each of its epochs was committed, but for the first, a copy."""

    def plan(self, epoch: Epoch) -> EpochPlan:
        committed_at = time.time() - 100.0 * epoch.number if epoch.number > 1 else None
        return replace(super().plan(epoch), committed_at=committed_at)


def test_the_freshness_of_each_epoch_with_changes_is_counted():
    """E15: once it is durable; neither a copy nor an epoch without changes."""
    scene = Scene("aa.a", bounds=[1, 2, 3, 4])
    scene.source = DatedSource(scene.source.log, scene.source.bounds, scene.notes)
    found = metrics.FRESHNESS_SECONDS.labels("p")
    before = found._sum.get(), sum(bucket.get() for bucket in found._buckets)
    scene.run()
    assert sum(bucket.get() for bucket in found._buckets) - before[1] == 2
    assert 600.0 <= found._sum.get() - before[0] <= 660.0


class SteadySource(LogSource):
    """There is always one more position; `backlogs` says whether a full epoch waits, in turn."""

    def __init__(self, backlogs: Sequence[bool], notes: list[str]):
        super().__init__("a" * 100, [1], notes)
        self.backlogs = list(backlogs)
        self.pipeline: Pipeline | None = None

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        position = lower["log"][0] if lower["log"] else 0
        self.bounds = [position + 1]
        return super().available(lower, purpose)

    def backlog(self, lower: Frontier) -> bool:
        if not self.backlogs:
            assert self.pipeline is not None
            self.pipeline.stop()
        return self.backlogs.pop(0) if self.backlogs else False


@pytest.mark.parametrize(
    ("backlogs", "epochs"),
    [
        ([False, False, False], 1),
        ([False, True, False], 2),
        ([True, True, True, False], 4),
    ],
)
def test_an_epoch_begins_when_its_time_has_come_or_a_backlog_is_there(backlogs, epochs):
    """E9, Mend c10: there is always something new, and the interval of an hour is never over."""
    scene = Scene("a", [1])
    scene.source = steady = SteadySource(backlogs, scene.notes)
    steady.pipeline = scene.pipeline(commit_interval=3600.0)
    steady.pipeline.run()
    assert scene.positions("a") == list(range(epochs))


def test_epochs_that_were_given_up_are_asked_for_at_once():
    """E9, Mend c10: their changes have waited for their time already."""
    scene = Scene("a", [1])
    scene.source = steady = SteadySource([False], scene.notes)
    scene.workers.troubles = [SplitsLost("gone")]
    steady.pipeline = scene.pipeline(commit_interval=3600.0)
    steady.pipeline.run()
    assert scene.positions("a") == [0]


def test_a_single_run_does_not_wait():
    """E9, Mend c10: it asks until there is nothing more, however long the interval is."""
    scene = Scene("aaa", [1])
    grow = scene.source.bounds.append
    scene.workers.after = lambda epoch: grow(epoch + 1) if epoch < 3 else None
    scene.run(commit_interval=3600.0)
    assert scene.positions("a") == [0, 1, 2]


def test_several_epochs_are_written_at_once_and_committed_in_order():
    """E5: up to epochs_in_flight; commits stay strictly in order."""
    scene = Scene("aaaaaa", [1, 2, 3, 4, 5, 6])
    together = threading.Barrier(3, timeout=DEADLINE_SECONDS)
    # The first three can only pass when they are under way at the same time.
    scene.workers.before = lambda epoch: together.wait() if epoch <= 3 else None
    scene.run(epochs_in_flight=3)
    assert scene.epochs("a") == [(number, [number - 1]) for number in range(1, 7)]


LOOP_ALONE, LOOP, EPOCHS = "the loop's, while no epoch is written", "the loop's", "those of epochs"


def promised_threads() -> dict[str, str]:
    """What the docstring of each method says of the thread that calls it."""
    found = {}
    for protocol in (Source, *SOURCE_ABILITIES, Sink, *SINK_ABILITIES):
        for method in members(protocol) - {"key_in_one_split"}:
            told = " ".join(getattr(protocol, method).__doc__.split())
            assert "Raises " in told, method
            thread = told.split("Thread: ")[1].split(".")[0]
            found[method] = thread
    return found


def called_alone() -> set[str]:
    return {name for name, thread in promised_threads().items() if thread.startswith(LOOP_ALONE)}


def test_the_docstring_of_each_question_says_who_asks_it_and_what_it_may_raise():
    """E5: whoever writes a source sees from the contract what must bear two threads."""
    threads = promised_threads()
    known = (LOOP, EPOCHS, "any", "outside of runs")
    assert [name for name, thread in threads.items() if not thread.startswith(known)] == []
    assert len(members(Source) - {"key_in_one_split"}) <= 9
    assert len(members(Sink)) == 7


PROMISED = promised_threads()
ALONE = called_alone()


class ThreadedSource(LogSource):
    """Notes which thread calls what, and what is called while workers write."""

    def __init__(self, scene: Scene, log: str, bounds: Sequence[int]):
        super().__init__(log, bounds, scene.notes)
        self.workers = scene.workers
        self.loop = threading.current_thread()
        self.elsewhere: set[str] = set()
        self.beside_epochs: set[str] = set()
        self.writing = 0
        self.lock = threading.Lock()
        self.asked_early = threading.Event()

    def __getattribute__(self, name: str) -> Any:
        if name in PROMISED:
            if threading.current_thread() is not self.loop:
                self.elsewhere.add(name)
            elif self.writing:
                self.beside_epochs.add(name)
                if name in ALONE:
                    self.asked_early.set()
        return super().__getattribute__(name)

    def write(self, parts: Any, writer: Any, *rest: Any) -> Outcome:
        """What workers do, which is noted."""
        with self.lock:
            self.writing += 1
        try:
            if writer.epoch == len(self.bounds):
                # A loop that asks too early has the time to do so.
                self.asked_early.wait(EARLY_SECONDS)
            return self.workers(parts, writer, *rest)
        finally:
            with self.lock:
                self.writing -= 1


def test_threads_of_epochs_call_what_a_source_expects_of_them():
    """E5, Mend c8: no other method is called beside the loop, and none that must be alone is called
    while an epoch is being written."""
    scene = Scene("ab" * 6, [2, 4, 6, 8, 10, 12])
    source = ThreadedSource(scene, "ab" * 6, [2, 4, 6, 8, 10, 12])
    sink = scene.sink()
    cadence = Cadence(commit_interval=0.0, epochs_in_flight=3)
    Pipeline("p", source, sink, cadence, source.write).run(once=True)
    by_epochs = {name for name, thread in PROMISED.items() if thread.startswith(EPOCHS)}
    assert {"shape", "was_read"} <= source.elsewhere
    assert source.elsewhere <= by_epochs | {"key_in_one_split"}
    assert source.beside_epochs.isdisjoint(ALONE)


def test_an_epoch_that_only_some_tables_carry_is_brought_to_the_others_alone():
    """I14: a partial commit recovers by itself, and the stream goes on after the epoch."""
    scene = Scene("abab" + "ab", [2, 4, 6])
    scene.carry("a", progress(2, 2, 4, 2), [0, 2])
    scene.carry("b", progress(1, 0, 2, 2), [1])
    scene.run()
    assert scene.positions("a") == [0, 2, 4]
    assert scene.positions("b") == [1, 3, 5]
    assert [number for number, _ in scene.epochs("b")] == [1, 2, 3]
    finished = [s for s in scene.history("b") if s.summary.get(summaries.EPOCH) == "2"]
    assert {s.summary[summaries.EPOCH_TABLES] for s in finished if s.paths} == {"2"}


def test_a_table_that_is_dropped_while_the_pipeline_starts_ends_the_start():
    """E4, Mend c2: the source was told that the table is there, and would not bring it anew."""
    scene = Scene("abab", [2])
    scene.run()
    scene.source.bounds.append(4)
    # Between the look at the tables and the claim: a source is told of them there.
    scene.source.on_resume = lambda: scene.lake.drop(name("a"))
    with pytest.raises(TargetUnavailable, match="table a was dropped, made or filled while"):
        scene.run()
    scene.source.on_resume = lambda: None
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2], [1, 3])


def test_a_table_that_is_made_anew_is_not_taken_for_one_that_awaits_an_unfinished_epoch():
    """E4, Mend c2: it has no part in the epoch, and the source has to bring it as a whole."""
    owned = {"generation": 1, "members": frozenset(["a", "b"]), "tables": 2}
    found = {
        "a": Progress(pipeline="p", epoch=2, table_id="a", **owned),
        "b": Progress(pipeline="p", generation=1, table_id="b"),
        "c": Progress(pipeline="p", generation=1, table_id="c"),
    }
    assert missing_tables(["a", "b", "c", "d"], found, resume_point(found)) == ["c", "d"]


class Crash(BaseException):
    """The process is gone."""


class CrashingWire(Wire):
    """The process ends when it sends a change of this kind."""

    def __init__(self, at: str):
        self._at = at

    def send(self, request: Callable[[], Any], lost: type[IcestreamError], what: str) -> Any:
        if what.startswith(self._at):
            raise Crash
        return request()


class TwiceWritten(Scene):
    """Epoch 1 is written twice, as its tables `stale` change after the first time.

    What a writing brings are the tables named for it; `l` stands for the dead letters of `a`.
    """

    LETTERS = "a__dead_letters"

    def __init__(self, first: str, second: str, stale: str):
        super().__init__("abcl" + "abcl", [4])
        self.source.called["l"] = self.LETTERS
        # Tables are found by reading.
        self.source.named = False
        self.writings = 0
        self.crash_at: str | None = None
        names = [{self.source.called.get(t, t) for t in tables} for tables in (first, second)]

        def changes(epoch: int) -> None:
            if self.writings == 0:
                for table in stale:
                    self.lake.evolve(name(self.source.called.get(table, table)))
            self.writings += 1

        def turned(split: LogSplit) -> LogSplit | None:
            return split if split.table in names[min(self.writings, 1)] else None

        self.workers.after, self.workers.turned = changes, turned

    def sink(self) -> IcebergSink:
        wire = CrashingWire(self.crash_at) if self.crash_at else None
        return IcebergSink(MemoryCatalog(self.lake, wire), IcebergSinkOptions(namespace="n"), "p")

    def check(self, tables: str) -> None:
        """Each of these has epoch 1 once, they agree about it, and a restart finds it whole."""
        for short in tables:
            assert self.positions(self.source.called.get(short, short)) == ["abcl".index(short)]
        names = [self.source.called.get(short, short) for short in tables]
        carried = [mine for mine in self.sink().durable(names).values() if mine.epoch]
        assert {(mine.epoch, mine.tables) for mine in carried} == {(1, len(tables))}
        assert len({mine.members for mine in carried}) == 1
        self.source.bounds.append(8)
        self.source.forgotten = 4
        self.workers.turned = lambda split: split
        self.run()
        for short in tables:
            at = "abcl".index(short)
            assert self.positions(self.source.called.get(short, short)) == [at, at + 4]


SECOND_WRITINGS = [
    pytest.param("abc", "abc", "b", "abc", id="same"),
    pytest.param("ab", "abc", "b", "abc", id="one-more"),
    pytest.param("abl", "ab", "bl", "ab", id="vanished"),
    pytest.param("al", "a", "l", "a", id="vanished-and-nothing-left"),
    pytest.param("abl", "acb", "bl", "abc", id="another-instead"),
]


@pytest.mark.parametrize(("first", "second", "stale", "tables"), SECOND_WRITINGS)
def test_a_second_writing_with_other_tables_doubles_nothing(first, second, stale, tables):
    """E3, Mend c3: tables that carry the epoch keep it, and all agree about which ones they are."""
    scene = TwiceWritten(first, second, stale)
    scene.run()
    assert scene.writings == 2
    scene.check(tables)


@pytest.mark.parametrize(("first", "second", "stale", "tables"), SECOND_WRITINGS)
@pytest.mark.parametrize("moment", ["second writing", "recount"])
def test_a_crash_in_a_second_writing_with_other_tables_recovers(
    first, second, stale, tables, moment
):
    """E3, Mend c3: before anything of it is committed, and before the first are corrected."""
    scene = TwiceWritten(first, second, stale)
    if moment == "recount":
        scene.crash_at = "claim 1 at epoch 1"
    else:

        def crash(epoch: int) -> None:
            if scene.writings == 1 and "crashed" not in scene.notes:
                scene.notes.append("crashed")
                raise Crash

        scene.workers.before = crash
    if moment == "recount" and first == second:
        scene.run()
    else:
        with pytest.raises(Crash):
            scene.run()
    scene.crash_at = None
    scene.run()
    scene.check(tables)


@dataclass(frozen=True)
class AskingSplit(LogSplit):
    """Positions that need a stored value."""

    stored: object = None

    def with_stored(self, table: str, values: pa.Table | None) -> "AskingSplit":
        assert table == self.table
        return replace(self, stored=values)


class AskingScene(Scene):
    """Every split asks for stored rows first; `asked` is where tables were looked up, and when."""

    def __init__(self, log: str, bounds: Sequence[int]):
        super().__init__(log, bounds)
        self.asked: list[tuple[str, int, list[int]]] = []
        plan, write = self.source.plan, self.workers.__call__

        def asking(epoch: Epoch) -> EpochPlan:
            parts = plan(epoch).parts
            return EpochPlan(parts=[AskingSplit(each.table, each.positions) for each in parts])

        def writing(parts, *rest) -> Outcome:
            needs = [
                Need(table=p.table, keys=NO_KEYS, columns=["v"]) for p in parts if not p.stored
            ]
            if needs:
                raise ValuesNeeded(*needs)
            return write(parts, *rest)

        self.source.plan, self.written = asking, writing

    def pipeline(self, **cadence: Any) -> Pipeline:
        given = {"commit_interval": 0.0, **cadence}
        return Pipeline("p", self.source, self.sink(), Cadence(**given), self.written)

    def sink(self) -> IcebergSink:
        scene = self

        class Remembering(IcebergSink):
            def stored(self, table, keys, columns, before=None):
                at = before["log"][0] if before["log"] else 0
                there = scene.positions(table) if name(table) in scene.lake.tables else []
                scene.asked.append((table, at, there))
                return pa.table({"v": [1]})

        return Remembering(MemoryCatalog(self.lake), IcebergSinkOptions(namespace="n"), "p")


NO_KEYS = pa.table({"id": pa.array([], pa.int64())})


class PlainSink:
    """An Iceberg sink without its abilities: the seven methods that every sink has."""

    def __init__(self, inner: IcebergSink):
        for method in members(Sink):
            setattr(self, method, getattr(inner, method))


def test_a_sink_that_cannot_evolve_stops_at_a_new_column_with_what_to_do():
    """E14: the column and the table are named, and nothing of the epoch is visible."""
    scene = Scene("ab", [2])
    scene.workers.needs = {"extra"}
    sink = PlainSink(scene.sink())
    pipeline = Pipeline("p", scene.source, sink, Cadence(commit_interval=0.0), scene.workers)
    with pytest.raises(SchemaRejected, match="table a does not take all columns") as caught:
        pipeline.run(once=True)
    assert "extra" in caught.value.detail
    assert "by hand" in caught.value.hint
    assert scene.epochs("a") == scene.epochs("b") == []


def test_a_sink_that_cannot_look_up_rows_stops_at_values_that_are_left_out():
    """P7, E14: an epoch with holes is never written."""
    scene = AskingScene("ab", [2])
    sink = PlainSink(scene.sink())
    pipeline = Pipeline("p", scene.source, sink, Cadence(commit_interval=0.0), scene.written)
    with pytest.raises(DataRejected, match="changes of a, b leave out values") as caught:
        pipeline.run(once=True)
    assert caught.value.detail == "Columns: v."
    assert "REPLICA IDENTITY" in caught.value.hint
    assert scene.epochs("a") == scene.epochs("b") == []


def test_a_source_with_half_of_an_ability_is_refused_when_its_pipeline_is_opened():
    """U9: letters would never be tried, and nothing would say so."""

    class Half(LogSource):
        def tried(self) -> Sequence[Any]:
            return ()

    scene = Scene("ab", [2])
    scene.source = Half("ab", [2], scene.notes)
    with pytest.raises(TypeError, match="Half is half of TakesLetters: it lacks letters"):
        scene.pipeline()


def test_rows_are_looked_up_when_all_epochs_before_are_committed():
    """P7: epochs that are written at once wait for each other, and each table is asked once."""
    scene = AskingScene("abab" + "ab", [2, 4, 6])
    scene.run(epochs_in_flight=3)
    assert sorted(scene.asked) == [
        *[("a", 0, []), ("a", 2, [0]), ("a", 4, [0, 2])],
        *[("b", 0, []), ("b", 2, [1]), ("b", 4, [1, 3])],
    ]


def test_epochs_that_are_given_up_do_not_wait_for_those_before_them():
    """E5, Mend c4: splits are lost while a later epoch waits to look up rows; both begin anew."""
    scene = AskingScene("ab", [1, 2])
    later_asks = threading.Event()
    write = scene.written

    def losing(parts, writer, *rest) -> Outcome:
        if "lost" not in scene.notes:
            if writer.epoch == 1:
                assert later_asks.wait(DEADLINE_SECONDS)
                scene.notes.append("lost")
                raise SplitsLost("gone")
            later_asks.set()
        return write(parts, writer, *rest)

    scene.written = losing
    pipeline = scene.pipeline(epochs_in_flight=2)
    thread = threading.Thread(target=lambda: pipeline.run(once=True), daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert (scene.positions("a"), scene.positions("b")) == ([0], [1])


def test_rows_are_looked_up_for_epochs_that_are_finished_or_replayed():
    """P7, I14: before the stream goes on nothing else is under way, and nothing is waited for."""
    scene = AskingScene("ab" * 4, [2, 4, 6, 8])
    scene.carry("a", progress(3, 4, 6, 2), [0, 2, 4])
    scene.carry("b", progress(2, 2, 4, 2), [1, 3])
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert ("b", 4, [1, 3]) in scene.asked
    scene = AskingScene("ab" * 3, [2, 4, 6])
    scene.carry("a", progress(3, 4, 6, 1), [0, 2, 4])
    scene.run()
    assert scene.positions("b") == [1, 3, 5]
    assert [each for each in scene.asked if each[0] == "b"] == [
        *[("b", 0, []), ("b", 2, [1]), ("b", 4, [1, 3])]
    ]


def test_an_unfinished_epoch_whose_new_table_was_never_made_makes_it():
    """I14: the table that is missing may not exist yet."""
    scene = Scene("abab", [2, 4])
    scene.carry("a", progress(1, 0, 2, 2), [0])
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2], [1, 3])


def test_an_unfinished_epoch_that_the_source_has_lost_stops_the_pipeline():
    """E7: said before anything of it is committed."""
    scene = Scene("a.ab", [2, 4])
    scene.carry("a", progress(1, 0, 2, 2), [0])
    with pytest.raises(HistoryLost, match="no longer has all of epoch 1"):
        scene.run()
    assert scene.positions("a") == [0]
    assert name("b") not in scene.lake.tables


def test_who_lacks_an_epoch_that_the_source_has_lost_is_named():
    """E7, Mend, read F12: with the way out, which is another for a table that was left out."""
    scene = Scene("abc", [3])
    for table in "abc":
        scene.carry(table, progress(0, 0, 0, 0))
    members = frozenset(table_id(scene.lake.tables[name(table)].uuid) for table in "abc")
    scene.carry("a", progress(1, 0, 3, 3, members=members), [0])
    scene.source.left_out = {"b", "c"}
    with pytest.raises(HistoryLost) as caught:
        scene.run()
    assert caught.value.detail == "Tables that lack it: b, c."
    assert caught.value.hint == (
        "Put b, c back in `tables`, or in `topics`, until the epoch is finished."
    )
    scene.source.left_out = {"b"}
    scene.source.log = "ab." + "abc"
    with pytest.raises(HistoryLost, match="Tables that lack it: b, c") as caught:
        scene.run()
    assert (caught.value.hint or "").startswith("Put b back in `tables`")
    assert (caught.value.hint or "").endswith("or build these tables anew.")
    scene.source.left_out, scene.source.log = set(), "abc"
    scene.run()
    assert (scene.positions("b"), scene.positions("c")) == ([1], [2])


def test_a_rolled_back_table_is_replayed_and_then_all_go_on():
    """E8: boundary by boundary, before anything new."""
    scene = Scene("ababab" + "ab", [2, 4, 6, 8])
    scene.carry("a", progress(3, 4, 6, 2), [0, 2, 4])
    scene.carry("b", progress(1, 0, 2, 2, catching_up=True), [1])
    scene.run()
    assert scene.positions("a") == [0, 2, 4, 6]
    assert scene.positions("b") == [1, 3, 5, 7]


def test_a_replay_whose_splits_are_lost_is_read_in_other_pieces():
    """E8: as while streaming, the source names smaller epochs for what was too large."""
    scene = Scene("aaaabb", [4, 6])
    scene.run()
    del scene.lake.tables[name("a")]
    scene.workers.troubles = [SplitsLost("too large"), SplitsLost("too large")]

    def cut(lost: SplitsLost) -> None:
        scene.source.bounds = [1, *scene.source.bounds] if 1 not in scene.source.bounds else [2, 4]

    # What a source does when it is told that an epoch was too large.
    scene.source.give_up = cut
    scene.run()
    assert scene.positions("a") == [0, 1, 2, 3]
    assert len(scene.epochs("a")) >= 2
    assert scene.positions("b") == [4, 5]


def test_a_replay_whose_splits_are_always_lost_ends():
    """E13: bounded, and told."""
    scene = Scene("aabb", [2, 4])
    scene.run()
    del scene.lake.tables[name("a")]
    scene.workers.troubles = [SplitsLost("gone")] * 1000
    with pytest.raises(SourceUnavailable, match="gone"):
        scene.run()


def test_a_stream_whose_splits_are_always_lost_ends_a_single_run():
    """E13, Mend, read F10: bounded with `--once`, wherever they are lost."""
    scene = Scene("aabb", [2, 4])
    scene.workers.troubles = [SplitsLost("gone")] * 1000
    with pytest.raises(SourceUnavailable, match="gone"):
        scene.run()
    assert len(scene.workers.troubles) > 800


def test_a_replay_whose_splits_are_lost_looks_up_rows_afterwards():
    """E8, Mend, read F3: the epochs that were given up are not waited for."""
    scene = AskingScene("ab" * 3, [2, 4, 6])
    scene.carry("a", progress(3, 4, 6, 1), [0, 2, 4])
    scene.workers.troubles = [SplitsLost("too large")]
    pipeline = scene.pipeline()
    thread = threading.Thread(target=lambda: pipeline.run(once=True), daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert scene.positions("b") == [1, 3, 5]


def test_a_replay_that_is_stopped_ends_after_its_commit_and_goes_on_at_the_next_start():
    """U2, Mend, read F9: it may have hours to go."""
    scene = Scene("ab" * 20, [2 * number for number in range(1, 21)])
    scene.carry("a", progress(20, 38, 40, 1), [0])
    pipeline = scene.pipeline()
    scene.workers.before = lambda epoch: pipeline.stop()
    pipeline.run()
    assert scene.positions("b") == [1]
    assert pipeline.health.to_json()["state"] == State.ENDED
    scene.workers.before = lambda epoch: None
    scene.run()
    assert scene.positions("b") == list(range(1, 40, 2))


def test_a_replay_is_stalled_while_there_is_trouble_and_no_longer():
    """E13, Mend, read F12: what has passed is not shown, nor is a replay fine that cannot read."""
    scene = Scene("ab" * 3, [2, 4, 6])
    scene.carry("a", progress(3, 4, 6, 1), [0, 2, 4])
    scene.workers.troubles = [SplitsLost("lost"), SourceUnavailable("away")]
    pipeline = scene.pipeline()
    shown: list[tuple[object, object]] = []

    def look(epoch: int) -> None:
        health = pipeline.health.to_json()
        shown.append((health["state"], (health["error"] or {}).get("message")))

    scene.workers.before = look
    pipeline.run(once=True)
    starting = (State.STARTING, None)
    assert shown == [
        *(starting, (State.STALLED, "lost"), (State.STALLED, "away")),
        *(starting, starting),
    ]


def unfinished() -> Scene:
    """Epoch 1 is carried by `a` alone."""
    scene = Scene("abab", [2, 4])
    scene.carry("a", progress(1, 0, 2, 2), [0])
    return scene


def test_a_running_pipeline_waits_without_end_for_what_an_unfinished_epoch_needs():
    """E13, I14, Mend, read F10: stalled meanwhile; the bounds stay, and the source is told."""
    scene = unfinished()
    scene.workers.troubles = [SplitsLost("gives nothing")] * 100
    pipeline = scene.pipeline()
    states: set[object] = set()
    told: list[SplitsLost] = []
    scene.workers.before = lambda _: states.add(pipeline.health.to_json()["state"])
    scene.source.give_up = told.append
    scene.source.on_empty = pipeline.stop
    pipeline.run()
    assert (scene.epochs("b"), scene.positions("a")) == ([(1, [1]), (2, [3])], [0, 2])
    assert State.STALLED in states
    assert len(told) == 100
    assert pipeline.health.to_json()["state"] == State.ENDED


def test_a_single_run_ends_when_an_unfinished_epoch_cannot_be_read():
    """E13, I14, Mend, read F10: bounded with `--once`, and a later start finishes it."""
    scene = unfinished()
    scene.workers.troubles = [SplitsLost("gives nothing")] * 100
    with pytest.raises(SourceUnavailable, match=r"epoch 1 could not be .* gives nothing"):
        scene.run()
    assert len(scene.workers.troubles) == 100 - icestream.pipeline.LOST_MAX
    scene.workers.troubles = []
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2], [1, 3])


def test_a_pipeline_that_waits_for_an_unfinished_epoch_can_be_stopped():
    """U2, Mend, read F10: in good order."""
    scene = unfinished()
    scene.workers.troubles = [SplitsLost("gives nothing")] * 100
    pipeline = scene.pipeline()
    scene.source.give_up = lambda lost: pipeline.stop()
    pipeline.run()
    assert len(scene.workers.troubles) == 99
    assert pipeline.health.to_json()["state"] == State.ENDED


@pytest.mark.parametrize("quiet", [False, True])
def test_a_table_that_was_set_back_to_older_metadata_is_noticed(quiet):
    """E8, E4: other tables know which epoch it had; dropped, it is built anew."""
    scene = Scene("ababab" + "bb", [2])
    scene.run()
    older = scene.lake.tables[name("a")]
    scene.source.bounds += [4, 6, *([] if quiet else [7])]
    scene.run()
    scene.lake.tables[name("a")] = older
    scene.source.bounds.append(8)
    for _ in range(2):
        with pytest.raises(HistoryLost, match="table a was set back"):
            scene.run()
    assert scene.positions("b") == [1, 3, 5, *([] if quiet else [6])]
    del scene.lake.tables[name("a")]
    scene.run()
    assert scene.positions("a") == [0, 2, 4]
    assert scene.positions("b") == [1, 3, 5, 6, 7]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_table_that_was_renamed_away_and_back_is_noticed(quiet):
    """E8, E4, Mend, leftover: another one was built in its place meanwhile, so the last epoch does
    not know it, and says which tables were there; dropped, it is built anew."""
    scene = Scene("ababab" + "bb", [2])
    scene.run()
    older = scene.lake.tables.pop(name("a"))
    scene.source.bounds += [4, 6, *([] if quiet else [7])]
    scene.run()
    assert scene.positions("a") == [0, 2, 4]
    scene.lake.tables[name("a")] = older
    scene.source.bounds.append(8)
    for _ in range(2):
        with pytest.raises(HistoryLost, match="table a was away while") as caught:
            scene.run()
        assert "drop the table" in caught.value.hint
    del scene.lake.tables[name("a")]
    scene.run()
    assert scene.positions("a") == [0, 2, 4]
    assert scene.positions("b") == [1, 3, 5, 6, 7]


@pytest.mark.parametrize(("replay", "expected"), [(True, [0, 2, 4, 6]), (False, [0, 6])])
@pytest.mark.parametrize("came_back", [True, False], ids=["came back", "was set back"])
def test_a_table_that_lacks_epochs_is_settled_as_a_rollback_is(came_back, replay, expected):
    """E8, U3, Mend, leftover: the way out for a table that cannot be built anew as a whole."""
    scene = Scene("ababababab", [2])
    scene.run()
    older = scene.lake.tables[name("a")]
    if came_back:
        del scene.lake.tables[name("a")]
    scene.source.bounds += [4, 6]
    scene.run()
    scene.lake.tables[name("a")] = older
    with pytest.raises(ConfigInvalid, match="was not rolled back"):
        scene.sink().settle_rollback("b", replay=replay)
    scene.sink().settle_rollback("a", replay=replay)
    scene.source.bounds.append(8)
    scene.run()
    with pytest.raises(ConfigInvalid, match="was not rolled back"):
        scene.sink().settle_rollback("a", replay=replay)
    scene.source.bounds.append(10)
    scene.run()
    assert scene.positions("a") == [*expected, 8]
    assert scene.positions("b") == [1, 3, 5, 7, 9]


def test_a_table_that_was_away_while_nothing_was_committed_goes_on():
    """E4, Mend, leftover: the last epoch knows it; a rename while the pipeline rests is no harm."""
    scene = Scene("ababab", [2, 4])
    scene.run()
    renamed = scene.lake.tables.pop(name("a"))
    scene.lake.tables[name("a")] = renamed
    scene.source.bounds.append(6)
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2, 4], [1, 3, 5])


def test_the_only_table_of_a_pipeline_goes_on_from_where_it_is():
    """E4, Mend, leftover: nobody knows better, and the source has what follows, or says so."""
    scene = Scene("aaaa", [1])
    scene.run()
    older = scene.lake.tables.pop(name("a"))
    scene.source.bounds += [2, 3]
    scene.run()
    scene.lake.tables[name("a")] = older
    scene.source.bounds.append(4)
    scene.run()
    assert scene.positions("a") == [0, 1, 2, 3]


def test_a_table_that_was_set_back_by_the_last_epoch_alone_gets_it_again():
    """I14: it lacks what an epoch that was cut short would have left out."""
    scene = Scene("abab", [2])
    scene.run()
    older = scene.lake.tables[name("a")]
    scene.source.bounds.append(4)
    scene.run()
    scene.lake.tables[name("a")] = older
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2], [1, 3])


def test_a_rolled_back_table_without_changes_to_replay_is_settled():
    """E8: the end of the replay is published even when there is nothing to apply."""
    scene = Scene("abaa", [2, 4])
    scene.carry("a", progress(2, 2, 4, 1), [0, 2, 3])
    scene.carry("b", progress(1, 0, 2, 2, catching_up=True), [1])
    scene.run()
    assert scene.positions("b") == [1]
    assert "icestream.replaying" not in scene.history("b")[-1].summary


def half_replayed() -> Scene:
    """Table `a` lies behind `b`: its replay was cut short, or its operator has asked for one."""
    scene = Scene("ababab" + "ab.", [2, 4, 6])
    scene.carry("a", progress(1, 0, 2, 2, catching_up=True), [0])
    scene.carry("b", progress(3, 4, 6, 1), [1, 3, 5])
    return scene


def test_a_table_that_lies_behind_and_is_left_out_stays_there_until_it_is_put_back():
    """E8, Mend, read F1: without its rows it must not count as replayed."""
    scene = half_replayed()
    scene.source.left_out = {"a"}
    before = scene.lake.tables[name("a")]
    scene.run()
    assert scene.lake.tables[name("a")] is before
    scene.source.bounds.append(8)
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0], [1, 3, 5, 7])
    scene.source.left_out = set()
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2, 4, 6], [1, 3, 5, 7])


def test_a_table_that_is_fed_again_while_the_pipeline_runs_is_brought_forward_by_the_next_start():
    """E8, Mend, read F1: new changes and heartbeats alone would hide what it lacks."""
    scene = half_replayed()
    scene.source.bounds += [8, 9]
    # Its topic, say, is found a moment after the start.
    scene.source.unfed = {"a"}
    scene.run(heartbeat_interval=1e-9)
    assert (scene.positions("a"), scene.positions("b")) == ([0], [1, 3, 5, 7])
    assert scene.history("b")[-1].summary["icestream.frontier"] == '{"log":[9]}'
    scene.source.unfed = set()
    scene.run()
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2, 4, 6], [1, 3, 5, 7])


def test_tables_that_only_records_name_are_replayed_too():
    """E8, Mend, read F1: nobody can list them, and the source says that it feeds them."""
    scene = half_replayed()
    scene.source.named = False
    scene.run()
    assert scene.positions("a") == [0, 2, 4]


def test_a_table_that_was_added_later_is_caught_up_first():
    """E7, P9: what the source still has of it comes before what is new."""
    scene = Scene("abab" + "ab", [2, 4, 6])
    scene.carry("a", progress(2, 2, 4, 1), [0, 2])
    scene.run()
    assert scene.positions("a") == [0, 2, 4]
    assert scene.positions("b") == [1, 3, 5]


def test_history_that_is_lost_stops_the_pipeline():
    """E7: never skipped silently."""
    scene = Scene("aaaa", [2, 4])
    scene.run()
    scene.source.log += "aa"
    scene.source.bounds.append(6)
    scene.source.forgotten = 5
    pipeline = scene.pipeline()
    with pytest.raises(HistoryLost):
        pipeline.run(once=True)
    health = pipeline.health.to_json()
    assert (health["state"], health["error"]["error"]) == (State.HALTED, "HistoryLost")
    assert scene.source.closed == 2


def test_columns_that_a_table_lacks_are_added_and_the_epoch_written_again():
    """I11: add column."""
    scene = Scene("aa", [2])
    scene.workers.needs = {"extra"}
    scene.run()
    assert scene.positions("a") == [0, 1]
    assert '"extra"' in scene.lake.tables[name("a")].schema_json


def test_files_that_a_table_no_longer_takes_are_written_again():
    """I6: a table that took the epoch already keeps it as it is."""
    scene = Scene("abab", [2, 4])
    scene.run()
    scene.source.log += "ab"
    scene.source.bounds.append(6)
    evolutions = iter([name("b")])
    scene.workers.after = lambda epoch: [scene.lake.evolve(table) for table in evolutions]
    scene.run()
    assert scene.notes.count("write 3") == 2
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2, 4], [1, 3, 5])


@pytest.mark.parametrize("losses", [1, 100])
def test_splits_that_are_lost_while_an_epoch_is_written_again_are_read_with_the_same_bounds(losses):
    """E13, E3, Mend, read F10: some tables may carry it; epochs after it are read anew."""
    scene = AskingScene("abab" + "ababab", [2, 4])
    scene.run()
    scene.source.bounds += [6, 8, 10]
    evolutions = iter([name("b")])
    lost = [SplitsLost("gives nothing")] * losses

    def evolve(epoch: int) -> None:
        if epoch == 3 and (table := next(evolutions, None)):
            scene.lake.evolve(table)
            # The second time.
            scene.workers.troubles = lost

    scene.workers.after = evolve
    if losses > 1:
        with pytest.raises(SourceUnavailable, match="epoch 3 could not be written again"):
            scene.run(epochs_in_flight=1)
        scene.workers.troubles = []
    scene.run(epochs_in_flight=1 if losses > 1 else 3)
    assert not scene.workers.troubles
    assert scene.positions("a") == [0, 2, 4, 6, 8]
    assert scene.positions("b") == [1, 3, 5, 7, 9]
    assert [number for number, _ in scene.epochs("a")][:3] == [1, 2, 3]


@dataclass(frozen=True)
class MixedSplit:
    """Positions of several tables, as a topic has them."""

    parts: Sequence[LogSplit]
    size_bytes: int = 1
    each_key_once: bool = False

    @property
    def tables(self) -> Sequence[str]:
        return [part.table for part in self.parts]

    def changes(self, targets: Targets) -> Iterator[Any]:
        raise NotImplementedError

    def with_stored(self, table: str, values: pa.Table | None) -> "MixedSplit":
        return self

    def learned(self) -> None:
        return None


def test_a_replay_that_is_written_again_is_for_its_table_alone():
    """E4, I6: others have passed the epoch long ago, and would get its old rows once more."""
    scene = Scene("abab", [2, 4])
    scene.carry("a", progress(2, 2, 4, 1), [0, 2])
    plan, evolutions = scene.source.plan, iter([name("b")])
    scene.source.plan = lambda epoch: EpochPlan(parts=[MixedSplit(plan(epoch).parts)])
    scene.workers.after = lambda epoch: [scene.lake.evolve(table) for table in evolutions]

    def write(mixed: Sequence[MixedSplit], *rest: Any) -> Outcome:
        return scene.workers([part for each in mixed for part in each.parts], *rest)

    Pipeline("p", scene.source, scene.sink(), Cadence(commit_interval=0.0), write).run(once=True)
    assert scene.notes.count("write 3") == 2
    assert (scene.positions("a"), scene.positions("b")) == ([0, 2], [1, 3])


def test_passing_trouble_is_bridged():
    """E12: bounded retry in the pipeline."""
    scene = Scene("aa", [2])
    scene.workers.troubles = [TargetUnavailable("no"), SourceUnavailable("no")]
    assert scene.run().health.to_json()["state"] == State.ENDED
    assert scene.positions("a") == [0, 1]


def test_trouble_that_does_not_pass_ends_the_run():
    """E12: the retry has a bound, and health says what it was."""
    scene = Scene("aa", [2])
    scene.workers.troubles = [TargetUnavailable("no")] * 100
    pipeline = scene.pipeline()
    with pytest.raises(TargetUnavailable):
        pipeline.run(once=True)
    assert scene.notes.count("write 1") == icestream.patience.TRIES_MAX
    assert pipeline.health.to_json()["error"]["message"] == "no"


@pytest.mark.parametrize("place", ["durable", "claim", "prepare", "writer", "commit", "heartbeat"])
def test_a_running_pipeline_waits_without_end_for_its_destination(place):
    """E13, Mend f2: whatever the destination is asked; stalled meanwhile, with the reason."""
    scene = Scene("aa.", [2, 3])
    sink = scene.sink()
    pipeline = Pipeline(
        "p",
        scene.source,
        sink,
        Cadence(commit_interval=0.0, heartbeat_interval=1e-9),
        scene.workers,
    )
    ask, shown = getattr(sink, place), []
    troubles = iter(range(5 * icestream.patience.TRIES_MAX))

    def away(*arguments: Any) -> Any:
        if next(troubles, None) is not None:
            raise (TargetUnavailable if len(shown) % 2 else CommitUnknown)("away")
        shown.append(pipeline.health.to_json())
        return ask(*arguments)

    setattr(sink, place, away)
    scene.source.on_empty = pipeline.stop
    pipeline.run()
    assert scene.positions("a") == [0, 1]
    assert shown[0]["state"] == State.STALLED
    assert shown[0]["error"]["message"] == "away"
    assert pipeline.health.to_json() | {"tables": {}} == {
        "state": State.ENDED,
        "error": None,
        "tables": {},
    }


def test_a_commit_that_is_waited_for_can_be_stopped(monkeypatch):
    """U2, Mend f2: in good order; the next start finds out what became of it."""
    # A pause that nobody would wait for.
    monkeypatch.setattr(icestream.patience, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(icestream.patience, "RETRY_SECONDS_MAX", 3600.0)  # the same
    scene = Scene("aa", [2])
    sink = scene.sink()
    pipeline = Pipeline("p", scene.source, sink, Cadence(), scene.workers)

    def away(written: Any) -> Any:
        threading.Timer(0.1, pipeline.stop).start()
        raise CommitUnknown("nobody knows")

    # What a catalog that is away does.
    monkeypatch.setattr(sink, "commit", away)
    thread = threading.Thread(target=pipeline.run, daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert pipeline.health.to_json()["state"] == State.ENDED
    scene.run()
    assert scene.positions("a") == [0, 1]


def test_a_single_run_waits_for_its_source_within_the_bound():
    """E13, Mend f2: the same bound as for all else, and the reason at its end."""
    scene = Scene("aa", [2])
    scene.source.troubles = [SourceUnavailable("away")] * (icestream.patience.TRIES_MAX - 1)
    scene.run()
    assert scene.positions("a") == [0, 1]
    scene = Scene("aa", [2])
    scene.source.troubles = [SourceUnavailable("away")] * 100
    with pytest.raises(SourceUnavailable, match="away"):
        scene.run()
    assert len(scene.source.troubles) == 100 - icestream.patience.TRIES_MAX


def test_a_fenced_run_stops_and_says_so():
    """E6, E12: a state of its own."""
    scene = Scene("aaaa", [2, 4])
    scene.workers.before = lambda epoch: scene.sink().claim([]) if epoch == 2 else None
    pipeline = scene.pipeline(epochs_in_flight=1)
    with pytest.raises(Fenced):
        pipeline.run(once=True)
    assert pipeline.health.to_json()["state"] == State.FENCED
    assert scene.positions("a") == [0, 1]
    assert [note for note in scene.notes if note.startswith("ack")] == ["ack 2"]


def test_a_running_pipeline_goes_on_until_it_is_stopped():
    """U2: without --once new changes are looked for again and again."""
    scene = Scene("aaaa", [2])
    pipeline = scene.pipeline()
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            scene.source.bounds.append(4)
        if len(looks) == 3:
            pipeline.stop()

    scene.source.on_empty = look
    pipeline.run()
    assert scene.epochs("a") == [(1, [0, 1]), (2, [2, 3])]
    assert pipeline.health.to_json()["state"] == State.ENDED


def lag() -> float:
    return float(REGISTRY.get_sample_value("icestream_lag_seconds", {"pipeline": "p"}) or 0.0)


def test_the_lag_grows_while_nothing_moves():
    """E13, Mend f1: the source is away, and nobody knows what it has by now."""
    scene = Scene("a", [1])
    pipeline = scene.pipeline()
    seen: list[float] = []

    def away() -> None:
        before = lag()
        wait_until(lambda: lag() > before, DEADLINE_SECONDS, "a lag that grows")
        seen.append(before)
        if len(seen) == 3:
            pipeline.stop()
        raise SourceUnavailable("away")

    scene.source.on_empty = away
    pipeline.run()
    assert 1.5 <= seen[0] < seen[1] < seen[2]


def test_the_epochs_that_are_behind_are_those_not_yet_committed():
    """U5, Mend f5: epochs that are being written count; what is committed does not."""
    scene = Scene("aaaaaaaa", [2, 4, 6, 8])
    seen: list[float] = []

    def behind(_: object = None) -> None:
        labels = {"pipeline": "p"}
        seen.append(REGISTRY.get_sample_value("icestream_lag_epochs", labels) or 0.0)

    scene.workers.before = behind
    scene.run(epochs_in_flight=1)
    behind()
    assert seen == [4, 3, 2, 1, 0]


def test_the_lag_of_an_idle_pipeline_stays_what_the_source_says():
    """E13, Mend f1: while there is nothing to do, nothing has to move."""
    Scene("a", [1]).run(commit_interval=3600.0)
    assert lag() == 1.5


def test_a_source_that_waits_is_told_of_the_stop():
    """Mend e1, P13: the run ends in good order although the source waited for its server."""
    scene = Scene("aa", [2])
    pipeline = scene.pipeline()

    def wait() -> None:
        threading.Thread(target=pipeline.stop).start()
        assert scene.source.interrupted.wait(60)
        raise SourceUnavailable("the run is being stopped")

    scene.source.on_empty = wait
    pipeline.run()
    assert scene.epochs("a") == [(1, [0, 1])]
    assert pipeline.health.to_json()["state"] == State.ENDED


def test_a_running_pipeline_waits_for_its_source_and_is_stalled_meanwhile():
    """E12: stalled, with the error, then running again."""
    scene = Scene("aa", [2])
    pipeline = scene.pipeline()
    states: list[tuple[object, object]] = []
    available = scene.source.available

    def watched(lower: Frontier, purpose: object) -> Sequence[Frontier]:
        health = pipeline.health.to_json()
        states.append((health["state"], (health["error"] or {}).get("message")))
        return available(lower)

    scene.source.available = watched
    scene.source.troubles = [SourceUnavailable("away"), SourceUnavailable("away")]
    scene.source.on_empty = pipeline.stop
    pipeline.run()
    assert states[1:3] == [(State.STALLED, "away"), (State.STALLED, "away")]
    assert states[3] == (State.RUNNING, None)
    assert scene.positions("a") == [0, 1]


def test_a_line_of_the_log_is_short_and_counts_changes_as_the_source_does(caplog):
    """U5, Mend f4: hundreds of partitions, and an update that is written as two rows."""
    caplog.set_level("INFO", "icestream.pipeline")
    scene = Scene("aaaa", [2, 4])
    # What a topic of many partitions says.
    many = Standing(position=", ".join(f"orders/{n}@{10**9 + n}" for n in range(300)))
    scene.source.standing = lambda at: many
    scene.run()
    lines = [r for r in caplog.records if r.getMessage().startswith(("committed", "resuming"))]
    assert len(lines) == 3
    assert max(len(line.getMessage()) for line in lines) < 250
    assert lines[1].getMessage().startswith("committed orders/0@1000000000, orders/1@1000000001, ")
    assert lines[1].getMessage().endswith(", and 292 more")
    assert [line.changes for line in lines[1:]] == [2, 2]
    assert brief("a/0@1, a/1@2") == "a/0@1, a/1@2"


def test_health_tells_what_each_table_got():
    """C6, E12: last committed epoch, its position and its snapshot, per table."""
    scene = Scene("aab", [2, 3])
    tables = scene.run().health.to_json()["tables"]
    assert {table: (t["epoch"], t["position"]) for table, t in tables.items()} == {
        "a": (1, "2"),
        "b": (2, "3"),
    }
    assert tables["a"]["snapshot_id"] == scene.history("a")[-1].id


@pytest.mark.parametrize("point", ["before-write", "after-write", "after-commit"])
def test_a_run_that_dies_before_the_ack_leaves_the_source_its_history(monkeypatch, point):
    """E1, E3: the source is told only what a destination remembers."""
    # Passes are counted for the life of a process, and other tests have run in it.
    monkeypatch.setattr("icestream.failpoints._passes", {})
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", f"{point}=error")
    scene = Scene("aa", [2])
    with pytest.raises(FailpointError):
        scene.run()
    assert [note for note in scene.notes if note.startswith("ack")] == []
    # The next run is not to fail.
    monkeypatch.delenv("ICESTREAM_FAILPOINTS")
    scene.run()
    assert scene.positions("a") == [0, 1]


def test_a_cadence_without_room_for_an_epoch_is_refused():
    """E5: also when it is given in Python."""
    with pytest.raises(ConfigInvalid, match="epochs_in_flight must be at least 1"):
        Cadence(epochs_in_flight=0)
