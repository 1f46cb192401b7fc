"""One suite for all sinks: whose destination is it, what is lost, who else writes, lost answers."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from pyspark.sql import SparkSession

from icestream import patience
from icestream.epoch import Epoch
from icestream.errors import CommitUnknown, Fenced, NeedsOperator, Retryable
from icestream.frontier import START, Frontier
from icestream.sinks import Sink, Written
from tests.integration.destinations import SHAPE, Destination, LakeTable, Rows, SearchIndex
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import RestCatalog

T = TypeVar("T")

TRIES_MAX = 10
# Requests that change something; all others may be lost without any doubt about what happened.
CHANGING = ("POST", "PUT")


@pytest.fixture(params=["iceberg", "opensearch"])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, spark: SparkSession, lake: Lake
) -> Iterator[Callable[[], Destination]]:
    """Makes an empty destination, as often as it is called."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.01,) * 5)  # longer ones cost only time
    number = 0

    def made() -> Destination:
        nonlocal number
        number += 1
        if isinstance(server, RestCatalog):
            return LakeTable(spark, lake, server, proxy, f"{namespace}_{number}")
        return SearchIndex(server, proxy)

    namespace = request.getfixturevalue("namespace")
    server = request.getfixturevalue("rest" if request.param == "iceberg" else "node")
    with Proxy(server.uri if isinstance(server, RestCatalog) else server.url) as proxy:
        yield made


@pytest.fixture
def destination(make: Callable[[], Destination]) -> Destination:
    """An empty destination."""
    return make()


class Run:
    """One run of the pipeline, which calls again after passing trouble as the loop does."""

    def __init__(self, destination: Destination):
        self._destination, self._table = destination, destination.table
        self._sink: Sink = destination.sink()
        progress = _again(lambda: self._sink.claim([self._table])).get(self._table)
        self.number = progress.epoch if progress else 0

    def write(self, rows: Rows) -> Written:
        """Have the next epoch written, not committed."""
        self.number += 1
        epoch = Epoch(number=self.number, lower=_at(self.number - 1), upper=_at(self.number))
        assert _again(lambda: self._sink.prepare(self._table, lambda: SHAPE))
        writer = self._sink.writer(epoch, [self._table])
        batch = self._destination.batch(rows, self.number)
        reports = _again(lambda: list(writer.write(self._table, "0", batch)))
        return Written(epoch=epoch, reports=reports, writer=writer, labels={})

    def commit(self, written: Written) -> bool:
        """Commit what was written; whether it was found committed."""
        (committed,) = _again(lambda: self._sink.commit(written))
        return committed.duplicate

    def take(self, rows: Rows) -> None:
        """Write and commit the next epoch."""
        self.commit(self.write(rows))


def _again(call: Callable[[], T]) -> T:
    for _ in range(TRIES_MAX):
        try:
            return call()
        except (Retryable, CommitUnknown) as error:
            last = error
    raise last


def _at(number: int) -> Frontier:
    return Frontier({"hand": (number,)}) if number else START


def lose_answer(proxy: Proxy, method: str, number: int) -> Callable[[], bool]:
    """Lose the answer to the request of this number, from 1, by its method; tells whether it was.

    A rule that is added while a request passes is for those that follow.
    """
    passed, lost = 0, []

    def count() -> None:
        nonlocal passed
        passed += 1
        if passed == number - 1:
            lost.append(proxy.on(method).lose_answer())

    if number == 1:
        lost.append(proxy.on(method).lose_answer())
    else:
        proxy.on(method, times=number - 1).call_before(count)
    return lambda: bool(lost) and lost[0].reached.is_set()


@pytest.mark.parametrize("method", CHANGING)
def test_an_answer_that_is_lost_at_any_step_changes_nothing(
    make: Callable[[], Destination], method: str
) -> None:
    """E3, O12, Mend: the first answer of a run is lost, then the second, and so on to the last."""
    for number in range(1, 100):
        destination = make()
        was_lost = lose_answer(destination.proxy, method, number)
        for rows in ({1: "a", 2: "b"}, {1: None, 3: "c"}):
            Run(destination).take(rows)
        assert destination.rows() == {2: "b", 3: "c"}, f"request {number}"
        if not was_lost():
            break
    assert number > (2 if method == "POST" or isinstance(destination, SearchIndex) else 0)


def test_the_older_of_two_runs_is_fenced(destination: Destination) -> None:
    """E5, O12, Mend: it commits nothing more, and puts nothing old over what is new."""
    older = Run(destination)
    older.take({1: "a"})
    late = older.write({1: "late"})
    newer = Run(destination)
    newer.take({1: "b", 2: "b"})
    newer.take({2: "c"})
    with pytest.raises(Fenced):
        older.commit(late)
    with pytest.raises(Fenced):
        # Both read the same source: what comes third is the same for both.
        older.take({2: "c"})
    assert destination.rows() == {1: "b", 2: "c"}
    newer.take({2: None})
    assert destination.rows() == {1: "b"}


def test_an_epoch_that_is_committed_again_counts_once(destination: Destination) -> None:
    """E1, I6, Mend: the same reports, by the same run."""
    run = Run(destination)
    written = run.write({1: "a"})
    assert [run.commit(written), run.commit(written)] == [False, True]
    assert destination.rows() == {1: "a"}
    run.take({1: "b"})
    assert destination.rows() == {1: "b"}


def test_a_destination_with_a_strangers_rows_is_refused(destination: Destination) -> None:
    """O15, Mend a1, i1: before anything is written, and every time."""
    destination.stranger({1: "theirs", 9: "theirs"})
    for _ in range(2):
        with pytest.raises(NeedsOperator):
            Run(destination).take({1: "mine"})
    assert destination.rows() == {1: "theirs", 9: "theirs"}


def test_progress_that_was_lost_is_noticed(destination: Destination) -> None:
    """E8, O15, Mend i1: rows that nobody answers for are not taken for the pipeline's own."""
    Run(destination).take({1: "a", 2: "a"})
    destination.lose_progress()
    for _ in range(2):
        with pytest.raises(NeedsOperator):
            Run(destination).take({1: "b"})
    assert destination.rows() == {1: "a", 2: "a"}


def test_a_destination_that_was_made_anew_is_noticed(destination: Destination) -> None:
    """E8, Mend: by the run that is on its way and by the next one; nothing goes into the new."""
    run = Run(destination)
    run.take({1: "a"})
    written = run.write({2: "b"})
    destination.make_anew()
    with pytest.raises(NeedsOperator):
        run.commit(written)
        run.take({3: "c"})
    with pytest.raises(NeedsOperator):
        Run(destination).take({2: "b"})
    assert destination.rows() == {}


def test_rows_that_somebody_else_adds_stay(destination: Destination) -> None:
    """E4, Mend: rivals may write beside the pipeline, between any two of its steps."""
    run = Run(destination)
    run.take({1: "a"})
    written = run.write({1: "b"})
    destination.stranger({7: "theirs"})
    run.commit(written)
    Run(destination).take({2: "c"})
    assert destination.rows() == {1: "b", 2: "c", 7: "theirs"}
