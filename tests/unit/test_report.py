"""What workers tell: typed, small, read as it was sent, with what they counted."""

import pytest
from pyiceberg.types import LongType

from icestream import metrics
from icestream.errors import Broken, DataRejected
from icestream.report import Done, Raised, Report, decode, describe, encode, encode_counts
from icestream.schema import Column, SchemaGap

REPORT = Report(table="t", kind="data", rows=3, size_bytes=10, payload={"path": "/lake/f"})


@pytest.fixture
def as_worker(monkeypatch):
    """This process counts as a worker does, until `metrics._untold` is None again."""
    monkeypatch.setattr(metrics, "_untold", {})  # a real worker is another process


def shown(index):
    return metrics.BULK_RETRIES.labels(index)._value.get()


def test_messages_arrive_as_they_were_sent():
    """I3: a worker hands the coordinator all that a commit needs."""
    done = Done(rows=7, learned={"p": 1}, columns_seen={("t", "a"): "x"})
    messages = [REPORT, done, Done()]
    assert decode(map(encode, messages)) == messages


def test_errors_and_what_a_split_asks_for_arrive_whole():
    """E13: a task that raised them would be tried again, and the message lost in Spark's."""
    refused = DataRejected("no", detail="Because.", hint="Do this.")
    gap = SchemaGap("t", [Column(name="a", type=LongType())])
    first, second = decode([encode(Raised(refused)), encode(Raised(gap))])
    assert (str(first.error), type(first.error)) == (str(refused), DataRejected)
    assert (second.error.table, second.error.columns) == (gap.table, gap.columns)


def test_a_report_is_small():
    """E9: an epoch has one of them for each file, and names of fields are not among its bytes."""
    _, _, payload = encode(REPORT)
    assert len(payload) < 150
    assert b"size_bytes" not in payload


def test_only_messages_are_decoded():
    """I3: changes that travel between workers never end at the coordinator."""
    with pytest.raises(ValueError, match="kind changes"):
        decode([("changes", 1, b"")])


def test_what_a_worker_counts_travels_with_its_report_once(monkeypatch, as_worker):
    """U5: a worker's metric was lost, and nobody said so."""
    before = shown("i")
    metrics.BULK_RETRIES.labels("i").inc(2)
    metrics.BULK_RETRIES.labels("i").inc()
    rows = [encode(REPORT), *encode_counts()]
    assert list(encode_counts()) == []
    monkeypatch.setattr(metrics, "_untold", None)  # on the coordinator again
    assert shown("i") == before
    assert decode(rows) == [REPORT]
    assert shown("i") == before + 3


def test_the_coordinator_has_nothing_to_tell_itself():
    """U5: what it counts is shown as it is, and only once."""
    before = shown("j")
    metrics.BULK_RETRIES.labels("j").inc()
    assert shown("j") == before + 1
    assert list(encode_counts()) == []


@pytest.mark.parametrize(
    "touch",
    [
        lambda: metrics.LAG_SECONDS.labels("p").set(1),
        lambda: metrics.LAG_SECONDS.labels("p").inc(),
        lambda: metrics.LAG_SECONDS.labels("p").dec(),
        lambda: metrics.LAG_SECONDS.labels("p").set_function(lambda: 1.0),
        lambda: metrics.FRESHNESS_SECONDS.labels("p").observe(1),
    ],
)
def test_a_metric_that_cannot_be_added_up_is_refused_on_a_worker(touch, as_worker):
    """U5: it would be lost, and nobody would say so."""
    with pytest.raises(Broken, match="is not used on a worker"):
        touch()


def test_reports_are_counted_for_the_log():
    """U5: structured logs with counts."""
    reports = [Report(table="t", kind="data", rows=n, size_bytes=10 * n) for n in (1, 2)]
    assert describe(reports) == {"files": 2, "bytes": 30}
