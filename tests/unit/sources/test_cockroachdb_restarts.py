"""Runs over a folder of changefeed files, one after the other, into a lake in memory."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from icestream.epoch import Epoch
from icestream.errors import HistoryLost
from icestream.frontier import START, Frontier, Position
from icestream.iceberg.closed import DATA, FileClosed
from icestream.pipeline import Cadence, Pipeline
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.publishing import EpochPublisher
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sources import EpochPlan
from icestream.sources.cockroachdb import numbered
from icestream.sources.cockroachdb.feed_file import FeedFile
from icestream.sources.cockroachdb.file_shapes import FileShapes
from icestream.sources.cockroachdb.files import CockroachdbFiles
from icestream.sources.cockroachdb.hlc import after, parse_file_time
from icestream.sources.cockroachdb.numbered import FOLDER, Numbered, Numbers, beginning, remembered
from icestream.sources.cockroachdb.tables_read import without_rows
from icestream.worker import Outcome
from tests.asking import EPOCH
from tests.captures import FeedFolder
from tests.property.memory import Lake, MemoryCatalog
from tests.unit.sources.test_cockroachdb import at, feed, hlc, read, source, wrapped


class Shop:
    """A folder, a lake and workers; each `run` is a new one over them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.feed: FeedFolder = feed(folder)
        self.lake = Lake()
        self.files: dict[str, list[int]] = {}

    def round(self, number: int, *tables: str) -> None:
        """A row of each table, and a marker nine seconds later."""
        for table in tables:
            row = wrapped(number, 10 * number + 1, name="x")
            self.feed.data(table, [row], at(10 * number + 1))
        self.feed.resolved(at(10 * number + 9))

    def run(self, *tables: str, **options: Any) -> None:
        """A single run that takes these tables, or all."""
        sink = IcebergSink(MemoryCatalog(self.lake), IcebergSinkOptions(namespace="n"), "p")
        given = source(self.folder, tables=tables, **options)
        cadence = Cadence(commit_interval=0.0)
        Pipeline("p", given, sink, cadence, self._write).run(once=True)

    def snapshots(self, table: str) -> list[list[int]]:
        """The ids that each snapshot with rows brought, the oldest first."""
        metadata = next(made for name, made in self.lake.tables.items() if name.name == table)
        found = [[i for path in s.paths for i in self.files[path]] for s in metadata.ancestry()]
        return [ids for ids in reversed(found) if ids]

    def prune(self, seconds: float) -> None:
        """Remove all that was written before a time."""
        for path in [*self.folder.rglob("*.ndjson"), *self.folder.rglob("*.RESOLVED")]:
            if parse_file_time(path.name) < at(seconds):
                path.unlink()

    def _write(self, splits: Sequence[Any], writer: Any, keyed: bool, description: str) -> Outcome:
        reports, learned = [], []
        for number, split in enumerate(splits):
            table = split.table
            batches = split.read(writer.schema_json(table), writer.key(table))
            ids = [row["id"] for batch in batches for row in batch.to_pylist()]
            learned.append(split.learned())
            if ids:
                path = f"{table}/{writer.epoch}/{writer.run}/{number}"
                self.files[path] = ids
                closed = FileClosed(
                    table=table,
                    epoch=writer.epoch,
                    worker=f"w{number}",
                    schema_id=writer.targets[table].schema_id,
                    spec_id=0,
                    path=path,
                    kind=DATA,
                    record_count=len(ids),
                    size_bytes=1,
                    partition={},
                )
                reports.append(closed.report())
        return Outcome(reports=reports, rows=1, learned=learned)


@pytest.fixture
def shop(tmp_path) -> Shop:
    return Shop(tmp_path)


BOTH = ("customers", "orders")


class OtherSession(FeedFolder):
    """The same changefeed after a restart: another writer, which counts from 0 again."""

    def data_name(self, topic: str, at: Position, schema: int, extension: str) -> str:
        """The next free name for a data file of this writer."""
        return super().data_name(topic, at, schema, extension).replace("-1-72-", "-1-73-")


@pytest.mark.parametrize("first", [BOTH, ()])
def test_a_table_that_was_left_out_for_a_while_gets_what_came_meanwhile(shop, first):
    """C8, Mend f2: snapshot by snapshot, and before the pipeline goes on."""
    shop.round(0, *BOTH)
    shop.run(*first)
    for number in (1, 2):
        shop.round(number, *BOTH)
        shop.run("orders")
    shop.round(3, *BOTH)
    shop.run(*first)
    shop.round(4, *BOTH)
    shop.run(*first)
    assert shop.snapshots("orders") == [[0], [1], [2], [3], [4]]
    assert shop.snapshots("customers") == [[0], [1], [2], [3], [4]]


class Crash(BaseException):
    """The process is gone."""


def test_a_table_that_is_left_out_while_it_lies_behind_gets_all_once_it_is_put_back(
    shop, monkeypatch
):
    """C8, E8, Mend, read F1: its replay was cut short; without its rows it is not replayed."""
    shop.round(0, *BOTH)
    shop.run(*BOTH)
    for number in (1, 2, 3):
        shop.round(number, *BOTH)
        shop.run("orders")
    publish, published = EpochPublisher._publish, []

    def crashing(sink: EpochPublisher, table: str, commit: Any) -> None:
        if published:
            raise Crash
        published.append(table)
        publish(sink, table, commit)

    monkeypatch.setattr(EpochPublisher, "_publish", crashing)  # a kill after one of three epochs
    with pytest.raises(Crash):
        shop.run(*BOTH)
    monkeypatch.setattr(EpochPublisher, "_publish", publish)  # the next run is not killed
    assert shop.snapshots("customers") == [[0], [1]]
    shop.round(4, *BOTH)
    shop.run("orders")
    shop.round(5, *BOTH)
    shop.run(*BOTH)
    assert shop.snapshots("customers") == [[0], [1], [2], [3], [4], [5]]
    assert shop.snapshots("orders") == [[0], [1], [2], [3], [4], [5]]


def test_a_table_that_comes_back_while_nothing_is_new_is_read_and_not_twice(shop):
    """C8, Mend f2: what it lacks lies before the frontier, and is brought once."""
    shop.round(0, *BOTH)
    shop.run(*BOTH)
    shop.round(1, *BOTH)
    shop.run("orders")
    for _ in range(2):
        shop.run(*BOTH)
    assert shop.snapshots("customers") == [[0], [1]]


def test_a_table_that_comes_back_after_its_files_went_is_history_lost(shop):
    """C8, Mend f2: what was removed while a table was left out is not passed over."""
    for number in range(4):
        shop.round(number, *BOTH)
        shop.run(*(BOTH if number == 0 else ("orders",)))
    shop.prune(25)
    with pytest.raises(HistoryLost, match="before they were read") as caught:
        shop.run(*BOTH)
    assert f"accept_lost_after: {hlc(9)}" in (caught.value.hint or "")
    shop.run(*BOTH, accept_lost_after=hlc(9))
    assert shop.snapshots("customers") == [[0], [3]]


def test_a_table_that_merely_had_no_changes_needs_no_old_files(shop):
    """C8, Mend f2: idle is not left out."""
    shop.round(0, *BOTH)
    shop.run(*BOTH)
    for number in range(1, 5):
        shop.round(number, "orders")
        shop.run(*BOTH)
    shop.prune(35)
    shop.round(5, *BOTH)
    shop.run(*BOTH)
    assert shop.snapshots("customers") == [[0], [5]]


def idle_hours(shop: Shop, hours: range) -> None:
    """Runs over a feed that has nothing to tell but the time."""
    for hour in hours:
        shop.feed.resolved(at(3600 * hour))
        shop.run()


def test_a_writer_that_was_idle_for_days_goes_on_where_it_stopped(shop):
    """C8, Mend f6: a lifecycle rule removed what it had written, which was read long ago."""
    shop.round(0, "orders")
    shop.round(1, "orders")
    shop.run()
    idle_hours(shop, range(1, 49))
    shop.prune(24 * 3600)
    shop.feed.data("orders", [wrapped(2, 3600 * 48 + 1, name="x")], at(3600 * 48 + 1))
    idle_hours(shop, range(49, 51))
    assert shop.snapshots("orders") == [[0], [1], [2]]


def test_the_next_file_of_an_idle_writer_is_missed(shop):
    """C8, Mend f6: what it goes on with is known, so that a file that was removed is noticed."""
    shop.round(0, "orders")
    shop.run()
    idle_hours(shop, range(1, 4))
    files = [
        shop.feed.data("orders", [wrapped(n, 3600 * 3 + n, name="x")], at(3600 * 3 + n))
        for n in (1, 2)
    ]
    files[0].unlink()
    with pytest.raises(HistoryLost, match="before they were read") as caught:
        idle_hours(shop, range(4, 5))
    assert "File 00000001" in (caught.value.detail or "")


def test_writers_that_are_long_gone_drop_out_of_the_frontier():
    """C8, Mend f6: what is remembered does not grow; the longest idle are forgotten first."""
    most = numbered.IDLE_WRITERS_MAX
    lower = START
    for writer in range(1, most + 4):
        file = Numbered(writer=writer, number=writer, at=(10 * writer, 0), last=10 * writer + 1)
        (folder,) = remembered([(10 * writer + 5, 0)], [file], lower, [10 * writer + 2])
        lower = Frontier({FOLDER: folder})
    writers = folder[3::3]
    assert list(writers) == list(range(most + 3, 3, -1))
    assert folder[4] == folder[5] == most + 4


def ghosts(shop: Shop, *rounds: int) -> None:
    """Rounds of orders, and of a table that only ever loses rows."""
    for number in rounds:
        shop.feed.data("ghosts", [wrapped(number, 10 * number + 1)], at(10 * number + 1))
        shop.round(number, "orders")
        shop.run()


def test_a_table_that_only_had_deletes_needs_no_old_files(shop):
    """C8, Mend f8: it is made nowhere, and yet was read: a restart after pruning goes on."""
    ghosts(shop, 0, 1, 2, 3, 4, 5)
    shop.prune(40)
    for number in (6, 7, 8):
        shop.round(number, "orders")
        shop.run()
    shop.prune(70)
    ghosts(shop, 9)
    assert shop.snapshots("orders") == [[number] for number in range(10)]


def test_a_table_that_only_had_deletes_is_made_with_its_first_row(shop):
    """C8, Mend f8: and if it is dropped then, it is read from the beginning, or the error asks."""
    ghosts(shop, 0, 1, 2)
    for number in (3, 4, 5):
        shop.round(number, "orders", "ghosts")
        shop.run()
    assert shop.snapshots("ghosts") == [[3], [4], [5]]
    ghost = next(name for name in shop.lake.tables if name.name == "ghosts")
    del shop.lake.tables[ghost]
    shop.run()
    assert shop.snapshots("ghosts") == [[3], [4], [5]]
    del shop.lake.tables[ghost]
    shop.prune(40)
    shop.round(6, "orders")
    with pytest.raises(HistoryLost, match="before they were read"):
        shop.run()


def test_a_row_after_deletes_alone_is_found_by_whoever_starts_next(shop):
    """C8, Mend f8: what came since the deletes were seen is read again, into a table made anew."""
    ghosts(shop, 0, 1, 2)
    shop.round(3, "orders", "ghosts")
    shop.run()
    ghost = next(name for name in shop.lake.tables if name.name == "ghosts")
    del shop.lake.tables[ghost]
    shop.prune(20)
    shop.run()
    assert shop.snapshots("ghosts") == [[3]]


@pytest.mark.parametrize("made_by", ["its rows", "hand"])
def test_a_table_that_is_there_is_no_longer_said_to_have_had_only_deletes(tmp_path, made_by):
    """C8, Mend f8: or rows would be missed when it is dropped later."""
    writer, feed_source = feed(tmp_path), source(tmp_path)
    lower = START

    def look(number: int, *rows: str) -> Frontier:
        nonlocal lower
        writer.data("t", rows, at(10 * number))
        writer.resolved(at(10 * number + 9))
        (upper,) = feed_source.available(lower)
        splits = feed_source.plan(Epoch(number=1, lower=lower, upper=upper)).parts
        if made_by == "hand" and number == 2:
            for split in splits:
                read(split)
                feed_source.was_read(EPOCH, [split.learned()])
        else:
            feed_source.shape("t")
        lower = upper
        return without_rows(upper, "t")

    assert look(0, wrapped(1, 1)) == START
    assert look(1, wrapped(1, 11)) == after(at(9))
    assert look(2, wrapped(2, 21, name="x")) == after(at(19))
    assert look(3, wrapped(1, 31)) == START


def drop(shop: Shop, table: str) -> None:
    del shop.lake.tables[next(name for name in shop.lake.tables if name.name == table)]


@pytest.mark.parametrize("how", ["added", "dropped"])
@pytest.mark.parametrize("sessions", [1, 2])
def test_a_table_whose_old_files_are_all_gone_is_asked_about(shop, how, sessions):
    """C8, Mend, read F5: nothing that is left tells that it had rows before, and yet it may."""
    first = BOTH if how == "dropped" else ("orders",)
    shop.round(0, *BOTH)
    shop.run(*first)
    if sessions == 2:
        # All that the first writer wrote goes, and the second one begins at 0.
        shop.feed = OtherSession(shop.folder)
    for number in (1, 2, 3):
        shop.round(number, "orders")
        shop.run(*first)
    shop.prune(5 if sessions == 2 else 25)
    if how == "dropped":
        drop(shop, "customers")
    shop.round(4, *BOTH)
    for _ in range(2):
        with pytest.raises(HistoryLost, match="before they were read") as caught:
            shop.run(*BOTH)
        assert "accept_lost_after: start" in (caught.value.hint or "")
    shop.run(*BOTH, accept_lost_after="start")
    shop.round(5, *BOTH)
    shop.run(*BOTH)
    assert shop.snapshots("customers") == [[4], [5]]
    assert shop.snapshots("orders") == [[number] for number in range(6)]


def test_a_table_that_is_really_new_does_not_stop_a_folder_that_is_whole(shop):
    """C8, Mend, read F5: all numbers from 0 on are there, of both writers, so it had nothing."""
    for number in (0, 1):
        shop.round(number, "orders")
        shop.run()
    shop.feed = OtherSession(shop.folder)
    shop.round(2, "orders")
    shop.run()
    shop.round(3, *BOTH)
    shop.run()
    assert shop.snapshots("customers") == [[3]]


@pytest.mark.parametrize("idle", [numbered.IDLE_WRITERS_MAX - 1, numbered.IDLE_WRITERS_MAX])
def test_writers_that_are_forgotten_are_asked_about(idle):
    """C8, Mend, read F5: a whole writer may have gone that nobody remembers."""
    parts = [part for writer in range(idle) for part in (writer, 1, 1)]
    listed = Numbers()
    for writer in range(idle):
        listed.add(writer, 0, (5, 0))
    gone = listed.first_gone(listed.needed(beginning(Frontier({FOLDER: (9, 1, 6, *parts)}))))
    assert (gone is not None) == (idle == numbered.IDLE_WRITERS_MAX)


def test_a_half_committed_epoch_is_finished_in_a_table_that_it_only_deletes_from(shop, monkeypatch):
    """E4, Mend, read F2: the table is there and was counted, though its part tells no types."""
    both_planned = threading.Event()
    shop.feed.data("ghosts", [wrapped(7, 1)], at(1))
    shop.round(0, "orders")
    shop.round(1, "orders", "ghosts")
    publish, prepare, plan = EpochPublisher._publish, IcebergSink.prepare, CockroachdbFiles.plan

    def planned(self: CockroachdbFiles, epoch: Epoch) -> EpochPlan:
        found = plan(self, epoch)
        if epoch.number == 2:
            both_planned.set()
        return found

    def late(self: IcebergSink, table: str, shape: Any) -> bool:
        assert both_planned.wait(10)
        return prepare(self, table, shape)

    def killed(self: EpochPublisher, table: str, commit: Any) -> None:
        if table == "ghosts":
            raise Crash
        publish(self, table, commit)

    # The second epoch is mostly planned before the first one is written: here always. And a kill
    # between two tables' commits of one epoch.
    with monkeypatch.context() as patched:
        patched.setattr(CockroachdbFiles, "plan", planned)
        patched.setattr(IcebergSink, "prepare", late)
        patched.setattr(EpochPublisher, "_publish", killed)
        with pytest.raises(Crash):
            shop.run()
    shop.run()
    assert shop.snapshots("orders") == [[0], [1]]
    assert shop.snapshots("ghosts") == [[7], [1]]


@pytest.mark.parametrize("first_rounds", [1, 6])
def test_a_table_that_only_had_deletes_needs_no_old_files_after_a_backlog(shop, first_rounds):
    """C8, Mend, read F6: the rule for removing files holds however many boundaries a run had."""
    for number in range(6):
        shop.feed.data("ghosts", [wrapped(number, 10 * number + 1)], at(10 * number + 1))
        shop.round(number, "orders")
        if number + 1 == first_rounds:
            shop.run()
    shop.run()
    shop.prune(49)
    shop.round(6, "orders", "ghosts")
    shop.run()
    assert shop.snapshots("ghosts") == [[6]]


def test_a_row_that_waits_in_a_backlog_ends_what_is_said_of_deletes(tmp_path):
    """C8, Mend, read F6: or it would be missed when its table is dropped later."""
    writer, feed_source = feed(tmp_path), source(tmp_path)
    for number, columns in enumerate(({}, {}, {"name": "x"}, {}, {})):
        writer.data("t", [wrapped(1, 10 * number + 1, **columns)], at(10 * number + 1))
        writer.resolved(at(10 * number + 9))
    said = [without_rows(upper, "t") for upper in feed_source.available(START)]
    assert said == [START, after(at(9)), after(at(19)), after(at(19)), after(at(19))]


def test_a_table_that_is_written_to_is_not_sampled(tmp_path):
    """E5, Mend, read F11: what is kept does not grow with the files that were read."""
    writer, feed_source = feed(tmp_path), source(tmp_path)
    lower = START
    for number in range(40):
        seconds = 600 * number
        writer.data("t", [wrapped(number, seconds + 1, name="x")], at(seconds + 1))
        writer.resolved(at(seconds + 9))
        (upper,) = feed_source.available(lower)
        for split in feed_source.plan(Epoch(number=1, lower=lower, upper=upper)).parts:
            read(split)
            feed_source.was_read(EPOCH, [split.learned()])
        lower = upper
    assert feed_source._file_shapes._files == {}


def test_a_file_of_deletes_is_sampled_once(tmp_path, monkeypatch):
    """E5, Mend, read F11: a table that only has deletes does not read all of them each time."""
    writer, feed_source = feed(tmp_path), source(tmp_path)
    sampled: list[str] = []
    inner = FileShapes._sampled

    def counted(self: FileShapes, table: str, file: FeedFile, *rest: Any) -> Any:
        sampled.append(file.path)
        return inner(self, table, file, *rest)

    monkeypatch.setattr(FileShapes, "_sampled", counted)  # only counts what is read
    lower = START
    for number in range(20):
        seconds = 600 * number
        writer.data("t", [wrapped(number, seconds + 1)], at(seconds + 1))
        writer.resolved(at(seconds + 9))
        (upper,) = feed_source.available(lower)
        feed_source.plan(Epoch(number=1, lower=lower, upper=upper))
        assert feed_source.shape("t") is None
        lower = upper
    assert len(sampled) == len(set(sampled)) == 20
    assert len(feed_source._file_shapes.deletes) < 10
