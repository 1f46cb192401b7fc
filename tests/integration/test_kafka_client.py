"""Ranges of offsets, topics and bounds, on a real broker."""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from icestream.errors import ConfigInvalid, HistoryLost, SourceUnavailable
from icestream.formats.rows import Records
from icestream.sources.kafka.client import Cluster, Topic
from icestream.sources.kafka.consumer import PartitionStalled, Range, fetched_offset, read_range
from tests.servers import KafkaBroker, wait_until

SECONDS_MAX = 30.0
# Longer than a busy machine takes for anything that does go on.
READ_TIMEOUT = 20.0
# For reads that are meant to stall.
SHORT_TIMEOUT = 2.0
BATCH_BYTES = 1_000_000
NOBODY_LISTENS = "127.0.0.1:1"
Row = tuple[bytes | None, bytes | None]


@pytest.fixture
def cluster(broker: KafkaBroker) -> Iterator[Cluster]:
    cluster = Cluster(settings(broker))
    yield cluster
    cluster.close()


@pytest.fixture
def topic(broker: KafkaBroker, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, with one partition."""
    name = topic_name(request)
    broker.create_topic(name)
    return name


def topic_name(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def settings(broker: KafkaBroker) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap_servers}


def producing(broker: KafkaBroker) -> dict[str, str]:
    """A producer that is not idempotent may change the order when it has to send again."""
    return {**settings(broker), "enable.idempotence": "true"}


def produce(broker: KafkaBroker, topic: str, rows: Sequence[Row], partition: int = 0) -> None:
    """Write records outside of any transaction."""
    producer = Producer(producing(broker))
    for key, value in rows:
        producer.produce(topic, key=key, value=value, partition=partition)
    assert producer.flush(SECONDS_MAX) == 0


class Writer:
    """A producer with transactions."""

    def __init__(self, broker: KafkaBroker, topic: str) -> None:
        self.topic = topic
        self.producer = Producer({**settings(broker), "transactional.id": f"to-{topic}"})
        self.producer.init_transactions(SECONDS_MAX)

    def begin(self, rows: Sequence[Row]) -> None:
        self.producer.begin_transaction()
        for key, value in rows:
            self.producer.produce(self.topic, key=key, value=value, partition=0)
        assert self.producer.flush(SECONDS_MAX) == 0

    def commit(self, rows: Sequence[Row]) -> None:
        self.begin(rows)
        self.producer.commit_transaction(SECONDS_MAX)

    def abort(self, rows: Sequence[Row]) -> None:
        self.begin(rows)
        self.producer.abort_transaction(SECONDS_MAX)


def rows(first: int, stop: int) -> list[Row]:
    return [(b"k%d" % number, b"v%d" % number) for number in range(first, stop)]


def batches(
    broker: KafkaBroker,
    topic: str,
    start: int,
    end: int,
    *,
    batch_bytes: int = BATCH_BYTES,
    read_timeout: float = READ_TIMEOUT,
    **more: str,
) -> Iterator[Records]:
    wanted = Range(topic=topic, partition=0, start=start, end=end)
    given = {**settings(broker), **{name.replace("_", "."): value for name, value in more.items()}}
    return read_range(given, wanted, read_timeout=read_timeout, batch_bytes=batch_bytes)


def read(broker: KafkaBroker, topic: str, start: int, end: int, **more: Any) -> list[Row]:
    return [row for batch in batches(broker, topic, start, end, **more) for row in pairs(batch)]


def pairs(batch: Records) -> list[Row]:
    return list(zip(batch.keys.to_pylist(), batch.values.to_pylist(), strict=True))


def offsets(broker: KafkaBroker, topic: str, start: int, end: int) -> list[int]:
    return [int(at) for batch in batches(broker, topic, start, end) for at in batch.offsets]


def end_of(cluster: Cluster, topic: str) -> int:
    return cluster.bounds([(topic, 0)])[topic, 0][1]


def wait_for_end(cluster: Cluster, topic: str, end: int) -> None:
    """A transaction may be over for its producer a moment before its mark is in the log."""
    wait_until(lambda: end_of(cluster, topic) == end, SECONDS_MAX, f"offset {end} of {topic}")


# Ranges


def test_ten_thousand_records_come_back_as_they_were_written_in_batches_of_the_wanted_size(
    broker: KafkaBroker, topic: str
) -> None:
    """K1, E1: nothing is lost, added, changed or out of order, and memory is bounded."""
    written: list[Row] = [(b"%d" % number, b"x" * (number % 997)) for number in range(10_000)]
    produce(broker, topic, written)
    found = list(batches(broker, topic, 0, 10_000, batch_bytes=50_000))
    assert [row for batch in found for row in pairs(batch)] == written
    assert [at for batch in found for at in batch.offsets] == list(range(10_000))
    sizes = [len(b"".join(part for row in pairs(batch) for part in row if part)) for batch in found]
    assert max(sizes) <= 50_000
    # Full ones, not many small ones.
    assert len(sizes) <= sum(sizes) // 49_000 + 1


def test_a_range_holds_its_start_and_not_its_end(broker: KafkaBroker, topic: str) -> None:
    """K1: the ranges of two epochs meet without gap or overlap."""
    produce(broker, topic, rows(0, 100))
    assert read(broker, topic, 0, 40) == rows(0, 40)
    assert read(broker, topic, 40, 41) == rows(40, 41)
    assert read(broker, topic, 41, 100) == rows(41, 100)
    assert read(broker, topic, 50, 50) == []


def test_a_range_read_again_is_the_same_while_the_log_grows(
    broker: KafkaBroker, topic: str
) -> None:
    """K6: a worker that dies is replaced by one that reads the same."""
    produce(broker, topic, rows(0, 500))
    first = read(broker, topic, 100, 400)
    produce(broker, topic, rows(500, 600))
    assert read(broker, topic, 100, 400, batch_bytes=100) == first == rows(100, 400)


def test_null_and_empty_keys_and_values_are_told_apart_and_headers_do_no_harm(
    broker: KafkaBroker, topic: str
) -> None:
    """K1: a record without a value is a tombstone, which an empty value is not."""
    written: list[Row] = [(None, b"v"), (b"k", None), (None, None), (b"", b""), (b"k", b"")]
    producer = Producer(producing(broker))
    for key, value in written:
        producer.produce(topic, key=key, value=value, headers=[("trace", b"1"), ("none", None)])
    assert producer.flush(SECONDS_MAX) == 0
    (batch,) = batches(broker, topic, 0, 5)
    assert pairs(batch) == written
    assert (batch.keys.null_count, batch.values.null_count) == (2, 2)
    batch.keys.validate(full=True)
    batch.values.validate(full=True)


def test_timestamps_are_the_producers(broker: KafkaBroker, topic: str) -> None:
    """K5: the valid-through timestamp is made of them."""
    producer = Producer(producing(broker))
    written = [1_600_000_000_000 + number for number in (5, 3, 9)]
    for milliseconds in written:
        producer.produce(topic, value=b"v", timestamp=milliseconds)
    assert producer.flush(SECONDS_MAX) == 0
    (batch,) = batches(broker, topic, 0, 3)
    assert list(batch.timestamps) == written


def test_records_larger_than_a_batch_come_alone(
    broker: KafkaBroker, request: pytest.FixtureRequest
) -> None:
    """K1: the largest record bounds a batch that is set too small for it."""
    name = topic_name(request)
    broker.create_topic(name, config={"max.message.bytes": "3000000"})
    written: list[Row] = [(b"k", bytes([number]) * 1_000_000) for number in range(20)]
    producer = Producer({**producing(broker), "message.max.bytes": "3000000"})
    for key, value in written:
        producer.produce(name, key=key, value=value)
    assert producer.flush(SECONDS_MAX) == 0
    found = list(batches(broker, name, 0, 20, batch_bytes=1_000))
    assert [len(batch) for batch in found] == [1] * 20
    assert [row for batch in found for row in pairs(batch)] == written
    assert read(broker, name, 0, 20, batch_bytes=3_000_000) == written


# Offsets that hold nothing


def test_a_range_ends_where_its_last_offsets_belong_to_an_aborted_transaction(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K1, E1: what was aborted is never seen, and reading does not wait for it."""
    writer = Writer(broker, topic)
    writer.commit(rows(0, 10))
    writer.abort(rows(10, 20))
    # Ten records and ten more, and the mark that ends each transaction.
    end = 22
    wait_for_end(cluster, topic, end)
    started = time.monotonic()
    assert read(broker, topic, 0, end) == rows(0, 10)
    # The mark of the commit, and the aborted records alone.
    assert read(broker, topic, 10, end) == []
    assert read(broker, topic, 12, 15) == []
    assert time.monotonic() - started < READ_TIMEOUT


def test_aborted_records_amid_a_range_are_left_out(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K1, E1: only what was committed counts, whatever lies between."""
    writer = Writer(broker, topic)
    writer.commit(rows(0, 3))
    writer.abort(rows(3, 6))
    writer.commit(rows(6, 9))
    end = 12
    wait_for_end(cluster, topic, end)
    assert read(broker, topic, 0, end) == rows(0, 3) + rows(6, 9)
    assert offsets(broker, topic, 0, end) == [0, 1, 2, 8, 9, 10]
    # Ends amid the aborted ones: the next record lies past the end.
    assert read(broker, topic, 0, 6) == rows(0, 3)


def test_passing_over_aborted_records_is_seen_as_progress(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K9: a long aborted transaction is no stall, though no record comes of it."""
    Writer(broker, topic).abort(rows(0, 1_000))
    end = 1_001
    wait_for_end(cluster, topic, end)
    wanted = Range(topic=topic, partition=0, start=0, end=end)
    fetched = [-1]

    def note(statistics: str) -> None:
        fetched.append(fetched_offset(statistics.encode(), wanted))

    watched = {"statistics.interval.ms": 50, "stats_cb": note, "group.id": "nobody"}
    consumer = Consumer({**settings(broker), **watched, "isolation.level": "read_committed"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        records = []

        def passed() -> bool:
            if (message := consumer.poll(0.05)) is not None:
                records.append(message)
            return fetched[-1] == end

        wait_until(passed, SECONDS_MAX, "the end of the aborted transaction")
    finally:
        consumer.close()
    assert records == []


def test_an_open_transaction_holds_the_bound_back_until_it_ends(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K1, E1: a range never ends behind something that is not decided yet."""
    produce(broker, topic, rows(0, 5))
    writer = Writer(broker, topic)
    writer.begin(rows(5, 8))
    produce(broker, topic, rows(8, 10))
    assert cluster.bounds([(topic, 0)])[topic, 0] == (0, 5)
    assert read(broker, topic, 0, 5) == rows(0, 5)
    writer.producer.commit_transaction(SECONDS_MAX)
    wait_for_end(cluster, topic, 11)
    assert read(broker, topic, 0, 11) == rows(0, 10)


def test_a_compacted_topic_is_read_over_its_gaps(
    broker: KafkaBroker, cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    """K1: offsets that compaction took away are passed over, amid a range and at its end."""
    name = topic_name(request)
    quick = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.01", "max.compaction.lag.ms": "1"}
    broker.create_topic(name, config={"cleanup.policy": "compact", **quick})
    produce(broker, name, [(b"same", b"%d" % number) for number in range(100)])

    def compacted() -> bool:
        # A segment is compacted only after another one has begun.
        produce(broker, name, [(b"other", b"")])
        return 0 not in offsets(broker, name, 0, end_of(cluster, name))

    wait_until(compacted, SECONDS_MAX, "compaction")
    found = offsets(broker, name, 0, end_of(cluster, name))
    assert found[0] == 99 and found == sorted(set(found))
    assert read(broker, name, 0, 100) == [(b"same", b"99")]
    assert read(broker, name, 10, 90) == []


# What is not there


def test_a_start_that_retention_took_is_lost_history(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """E6, K6: reading never goes on somewhere else in silence."""
    produce(broker, topic, rows(0, 50))
    admin = AdminClient(settings(broker))
    for answer in admin.delete_records([TopicPartition(topic, 0, 20)]).values():
        answer.result(SECONDS_MAX)
    assert cluster.bounds([(topic, 0)])[topic, 0] == (20, 50)
    with pytest.raises(HistoryLost) as lost:
        read(broker, topic, 10, 50)
    assert "offsets 10 to 50" in str(lost.value)
    assert "offsets 20 to 50" in str(lost.value.detail)
    assert read(broker, topic, 20, 50) == rows(20, 50)


def test_a_start_past_the_end_of_the_log_is_lost_history(broker: KafkaBroker, topic: str) -> None:
    """E6: a log that is shorter than what was read of it is another log."""
    produce(broker, topic, rows(0, 10))
    with pytest.raises(HistoryLost):
        read(broker, topic, 11, 20)


def test_offsets_past_the_end_of_the_log_are_waited_for_only_so_long(
    broker: KafkaBroker, topic: str
) -> None:
    """K9: what comes is handed out, and then the partition counts as stalled."""
    produce(broker, topic, rows(0, 10))
    started = time.monotonic()
    with pytest.raises(PartitionStalled) as stalled:
        read(broker, topic, 0, 11, read_timeout=SHORT_TIMEOUT)
    assert SHORT_TIMEOUT <= time.monotonic() - started < READ_TIMEOUT
    assert (stalled.value.topic, stalled.value.partition) == (topic, 0)
    assert "from offset 10" in str(stalled.value.detail)


def test_a_topic_that_cannot_have_its_name_cannot_be_read(broker: KafkaBroker) -> None:
    """O3: an error, and not the end of the process."""
    wanted = Range(topic="x" * 1_000, partition=0, start=0, end=1)
    with pytest.raises(ConfigInvalid):
        list(read_range(settings(broker), wanted, read_timeout=SHORT_TIMEOUT, batch_bytes=1_000))


@pytest.mark.parametrize("partition", [0, 7])
def test_a_topic_or_partition_that_is_not_there_could_not_be_read(
    broker: KafkaBroker, cluster: Cluster, topic: str, partition: int
) -> None:
    """K6, K9: it may come back; nothing is created by asking."""
    name = topic if partition else f"no-{topic}"
    wanted = Range(topic=name, partition=partition, start=0, end=1)
    with pytest.raises(SourceUnavailable) as missing:
        list(read_range(settings(broker), wanted, read_timeout=SHORT_TIMEOUT, batch_bytes=1_000))
    assert name in str(missing.value)
    assert set(cluster.topics([], f".*{topic}")) == {topic}


# Brokers that come and go


def test_a_broker_that_goes_away_stalls_the_partition_and_a_restart_mends_it(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K6, K9: an outage ends a read in time, and the same range is read after it."""
    written: list[Row] = [(b"%d" % number, b"x" * 5_000) for number in range(6_000)]
    produce(broker, topic, written)
    reading = batches(broker, topic, 0, 6_000, read_timeout=SHORT_TIMEOUT)
    first = next(reading)
    broker.kill()
    try:
        started = time.monotonic()
        with pytest.raises(PartitionStalled) as stalled:
            list(reading)
        assert time.monotonic() - started < READ_TIMEOUT
        assert "Kafka says" in str(stalled.value.detail)
    finally:
        broker.start()
    again = batches(broker, topic, 0, 6_000)
    assert pairs(next(again))[: len(first)] == pairs(first)
    assert read(broker, topic, 0, 6_000) == written
    # A client that was there before the outage goes on as well.
    assert end_of(cluster, topic) == 6_000


def test_a_broker_that_comes_back_in_time_is_not_noticed(broker: KafkaBroker, topic: str) -> None:
    """K6: a read outlives a restart of the broker."""
    written: list[Row] = [(b"%d" % number, b"x" * 5_000) for number in range(6_000)]
    produce(broker, topic, written)
    reading = batches(broker, topic, 0, 6_000, read_timeout=SECONDS_MAX)
    first = next(reading)
    broker.stop()
    broker.start()
    assert pairs(first) + [row for batch in reading for row in pairs(batch)] == written


def test_a_reader_that_is_given_up_lets_go(broker: KafkaBroker, topic: str) -> None:
    """E8: a task that is cancelled amid a range leaves no client and no message behind."""
    produce(broker, topic, rows(0, 10_000))
    # Other tests of this process may have left clients behind: they let a pipeline crash.
    before = client_threads()
    for _ in range(20):
        reading = batches(broker, topic, 0, 10_000, batch_bytes=1_000)
        next(reading)
        reading.close()  # type: ignore[attr-defined]
    assert client_threads() - before < 20


def client_threads() -> int:
    """The threads of clients in this process; 0 where the system does not tell them."""
    threads = Path("/proc/self/task")
    names = []
    for task in threads.iterdir() if threads.exists() else ():
        with suppress(FileNotFoundError):
            names.append((task / "comm").read_text())
    return sum(name.startswith("rdk:") for name in names)


# Topics


def test_topics_come_by_name_and_by_pattern_but_not_kafkas_own(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K1: a pattern matches whole names; internal topics must be named."""
    broker.create_topic(f"{topic}-more", partitions=3)
    cluster.commit_offsets("makes-the-internal-topic", {(topic, 0): 0})
    assert set(cluster.topics([], topic)) == {topic}
    both = cluster.topics([topic], f"{topic}-m.*")
    assert list(both) == [topic, f"{topic}-more"]
    assert both[f"{topic}-more"].partitions == 3
    assert not any(name.startswith("__") for name in cluster.topics([], ".*"))
    assert set(cluster.topics(["__consumer_offsets"])) == {"__consumer_offsets"}
    assert cluster.topics([], "nothing-like-it") == {}


def test_a_topic_that_is_not_there_is_named_and_not_created(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K1: it may be created later, by someone else."""
    with pytest.raises(SourceUnavailable) as missing:
        cluster.topics([topic, "missing"])
    assert "missing" in missing.value.message and missing.value.hint
    with pytest.raises(SourceUnavailable):
        cluster.bounds([("missing", 0)])
    assert "missing" not in cluster.topics([], ".*")


def test_a_topic_created_anew_has_another_id(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """E6: the offsets of the old one mean nothing in the new one."""
    old = cluster.topics([topic])[topic]
    assert cluster.topics([topic])[topic] == old
    broker.delete_topic(topic)
    broker.create_topic(topic)
    new = cluster.topics([topic])[topic]
    assert old == Topic(name=topic, id=old.id, partitions=1)
    assert new.id != old.id


def test_added_partitions_are_seen(broker: KafkaBroker, cluster: Cluster, topic: str) -> None:
    """K1: a topic that grows is read whole."""
    before = cluster.topics([topic])[topic]
    broker.add_partitions(topic, 3)
    assert cluster.topics([topic])[topic] == Topic(name=topic, id=before.id, partitions=3)
    produce(broker, topic, rows(0, 7), partition=2)
    bounds = cluster.bounds([(topic, number) for number in range(3)])
    assert bounds == {(topic, 0): (0, 0), (topic, 1): (0, 0), (topic, 2): (0, 7)}


# Offsets of a group


def committed(broker: KafkaBroker, group: str, topic: str) -> int:
    """What a plain client finds; a broker that was just restarted may need a moment to tell."""
    consumer = Consumer({**settings(broker), "group.id": group})
    found: list[TopicPartition] = []

    def told() -> bool:
        with suppress(KafkaException):
            found.extend(consumer.committed([TopicPartition(topic, 0)], timeout=SECONDS_MAX))
        return bool(found)

    try:
        wait_until(told, SECONDS_MAX, f"the offsets of group {group}")
    finally:
        consumer.close()
    return found[0].offset


def test_published_offsets_are_seen_by_a_plain_client(
    broker: KafkaBroker, cluster: Cluster, topic: str
) -> None:
    """K2: tools that watch lag need nothing of icestream."""
    produce(broker, topic, rows(0, 10))
    for offset in (4, 9):
        cluster.commit_offsets("pipeline", {(topic, 0): offset})
        assert committed(broker, "pipeline", topic) == offset


def test_offsets_that_cannot_be_published_are_only_a_warning(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """K2: nothing depends on them."""
    with caplog.at_level(logging.WARNING):
        cluster.commit_offsets("pipeline", {("missing", 0): 5})
        Cluster({"bootstrap.servers": NOBODY_LISTENS}, request_seconds=1.0).commit_offsets(
            "pipeline", {("missing", 0): 5}
        )
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_reading_leaves_no_trace_in_any_group(broker: KafkaBroker, topic: str) -> None:
    """K2: the group's offsets are what the pipeline has committed, never what a worker has read."""
    produce(broker, topic, rows(0, 10))
    assert read(broker, topic, 0, 10, group_id="watched") == rows(0, 10)
    assert committed(broker, "watched", topic) < 0


# Errors


class StuckClient:
    """Stands in for a client that no longer finds the controller, as real ones were seen to."""

    def poll(self, _seconds: float) -> None:
        pass

    def describe_topics(self, topics: TopicCollection, **_settings: Any) -> dict[str, Future[Any]]:
        timed_out = KafkaException(KafkaError(KafkaError._TIMED_OUT, "waiting for controller"))
        answers: dict[str, Future[Any]] = {name: Future() for name in topics.topic_names}
        for answer in answers.values():
            answer.set_exception(timed_out)
        return answers


def test_a_client_that_does_not_find_its_brokers_is_replaced(cluster: Cluster, topic: str) -> None:
    """K6 E13: a client that no broker answers once may never be answered again."""
    cluster._admin = StuckClient()
    with pytest.raises(SourceUnavailable, match=f"could not find topic {topic}"):
        cluster.topics([topic])
    assert cluster.topics([topic])[topic].partitions == 1


def test_a_client_that_a_broker_answers_is_kept(cluster: Cluster) -> None:
    """K6: an error of the broker's is no reason to connect anew."""
    before = cluster._admin
    with pytest.raises(SourceUnavailable, match="could not find topic missing"):
        cluster.topics(["missing"])
    with pytest.raises(SourceUnavailable, match="could not find topic missing"):
        cluster.topics(["missing"])
    assert cluster._admin is before


def test_a_broker_that_nobody_runs_could_not_be_reached(capfd: pytest.CaptureFixture[str]) -> None:
    """E8, O3: the error says where, and nothing else is printed."""
    unreachable = {"bootstrap.servers": NOBODY_LISTENS}
    cluster = Cluster(unreachable, request_seconds=1.0)
    for ask in (
        lambda: cluster.topics(["orders"]),
        lambda: cluster.topics([], ".*"),
        lambda: cluster.bounds([("orders", 0)]),
    ):
        with pytest.raises(SourceUnavailable) as away:
            ask()
        assert NOBODY_LISTENS in away.value.message
        assert "Connection refused" in str(away.value.detail)
    wanted = Range(topic="orders", partition=0, start=0, end=1)
    with pytest.raises(PartitionStalled) as stalled:
        list(read_range(unreachable, wanted, read_timeout=1.0, batch_bytes=1_000))
    assert "Connect" in str(stalled.value.detail) or "down" in str(stalled.value.detail)
    # Others in this process may print: clients of pipelines that crashed, for other brokers.
    assert f"{NOBODY_LISTENS}/" not in "".join(capfd.readouterr())


def test_a_refused_sign_on_is_for_the_operator_and_shows_no_password(broker: KafkaBroker) -> None:
    """O3: trying again does not help, and no error shows a secret."""
    signing_on = {
        **settings(broker),
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "icestream",
        "sasl.password": "correct-horse",
    }
    wanted = Range(topic="orders", partition=0, start=0, end=1)
    for ask in (
        lambda: Cluster(signing_on, request_seconds=6.0).topics(["orders"]),
        lambda: list(read_range(signing_on, wanted, read_timeout=6.0, batch_bytes=1_000)),
    ):
        with pytest.raises(ConfigInvalid) as refused:
            ask()
        assert "sasl" in str(refused.value.hint)
        assert "correct-horse" not in str(refused.value)
