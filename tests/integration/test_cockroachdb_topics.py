"""A changefeed that writes to Kafka, on a real broker: one snapshot per resolved timestamp.

The changefeed is a stand-in that plays what a real server sent, since the server's own Kafka sink
needs a licence. Spark SQL reads the snapshots; what they must hold is worked out from the log.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from icestream.errors import DataRejected, HistoryLost, SourceUnavailable
from tests.captures import capture
from tests.changefeed import (
    Feed,
    Hlc,
    Message,
    RandomChangefeed,
    hlc,
    hlc_text,
    marker,
    tables_of,
    wrapped,
)
from tests.integration.changelog import by_key, comparable
from tests.integration.pipelines import Document
from tests.integration.topics import FLUSH_SECONDS, NAMESPACE, PIPELINE, Topics
from tests.servers import KafkaBroker

SECOND = 1_000_000_000
NOON: Hlc = (1_700_000_000 * SECOND, 0)
CAPTURES = [
    "01_wrapped_updated_diff_mvcc_resolved.jsonl",
    "06_bare.jsonl",
    "09_schema_change_backfill.jsonl",
    "17_two_tables.jsonl",
]


@dataclass
class World:
    """Topics that a changefeed writes to, a pipeline that reads them, and the lake."""

    topics: Topics
    feed: Feed = field(init=False)
    _producer: Producer = field(init=False)

    def __post_init__(self) -> None:
        self.feed = Feed(send=self.send, partitions={})
        self._producer = self._new_producer()

    def _new_producer(self) -> Producer:
        servers = self.topics.broker.bootstrap_servers
        return Producer({"bootstrap.servers": servers, "linger.ms": 5, "enable.idempotence": True})

    def create(self, table: str, partitions: int) -> None:
        """A topic of the changefeed."""
        self.topics.create(table, partitions)
        self.feed.partitions[table] = partitions

    def grow(self, table: str, partitions: int) -> None:
        """More partitions for a topic."""
        self.topics.broker.add_partitions(self.topics.name(table), partitions)
        self.feed.partitions[table] = partitions
        # A producer that was there before does not know of new partitions.
        self.flush()
        self._producer = self._new_producer()

    def send(self, table: str, partition: int, messages: Sequence[Message]) -> None:
        """Append to a partition; see `flush`."""
        for key, value in messages:
            self._producer.produce(self.topics.name(table), value, key, partition)

    def document(self, **source: Any) -> Document:
        """The pipeline file."""
        kafka = {
            "bootstrap_servers": self.topics.broker.bootstrap_servers,
            "topics": [self.topics.name(table) for table in self.feed.partitions],
        }
        whole = self.topics.document()
        whole[PIPELINE]["source"] = {"cockroachdb": {"kafka": kafka, **source}}
        return whole

    def run(self, document: Document | None = None) -> None:
        """Read all that is complete."""
        self.flush()
        self.topics.run(document or self.document())

    def flush(self) -> None:
        """Wait until all that was sent is there."""
        assert self._producer.flush(FLUSH_SECONDS) == 0

    def times(self, table: str) -> list[Hlc]:
        """The resolved timestamps of the table's snapshots that have changes."""
        return [hlc(each["summary"]["crdb.resolved_hlc"]) for each in self.snapshots(table)]

    def snapshots(self, table: str) -> list[dict[str, Any]]:
        """The table's snapshots with changes: a heartbeat adds none."""
        return [
            each
            for each in self.topics.epochs(table)
            if int(each["summary"]["crdb.data_file_count"])
            + int(each["summary"]["crdb.delete_file_count"])
        ]

    def assert_equal(self, resolved: Sequence[Hlc] | None = None) -> None:
        """Every snapshot of every table holds what the log says, and there is no other."""
        for table in self.feed.partitions:
            assert self.times(table) == self.feed.published(table, resolved)
            for at, snapshot in zip(self.times(table), self.snapshots(table), strict=True):
                rows = self.topics.lake.rows(f"{NAMESPACE}.{table}", snapshot["snapshot_id"])
                expected = self.feed.expected(table, at)
                assert by_key(rows, ["id"]) == {k: comparable(r) for k, r in expected.items()}


@pytest.fixture
def world(
    broker: KafkaBroker, spark: SparkSession, embedded: dict[str, str], tmp_path: Path
) -> World:
    """Topics of the test's own, and a lake."""
    return World(Topics(broker, tmp_path.name, spark, embedded))


def at(seconds: int, logical: int = 0) -> Hlc:
    return NOON[0] + seconds * SECOND, logical


def row(key: int, when: Hlc, v: int) -> Message:
    # Text, so that no value is taken for the key.
    return wrapped([key], {"id": key, "v": str(v)}, when)


def gone(key: int, when: Hlc) -> Message:
    return wrapped([key], None, when)


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("name", CAPTURES)
def test_each_resolved_timestamp_of_a_capture_is_one_snapshot_with_exactly_its_rows(
    world: World, name: str, partitions: int
):
    """C1, C2, C3, C5: wrapped, bare, schema changes at boundaries, key changes, two tables."""
    for table in tables_of(name):
        world.create(table, partitions)
    world.feed.play(name)
    world.run()
    world.assert_equal()


@pytest.mark.spark_jobs
def test_a_random_changefeed_is_followed_through_restarts(world: World):
    """C2, C3, C4, E3: late rows, duplicates, markers that lag, new partitions."""
    world.create("one", 2)
    world.create("two", 1)
    generator = random.Random(11)
    feed = RandomChangefeed(generator, world.feed, world.grow)
    for _ in range(3):
        for _ in range(60):
            feed.step()
        # What lags behind comes at last; only then is everything complete.
        feed.catch_up()
        world.run()
        world.assert_equal()


def test_rows_behind_the_marker_wait_and_duplicates_change_nothing(world: World):
    """C2, C3: rows are chosen by their own timestamp, not by where they stand."""
    world.create("t", 2)
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.row("t", row(1, at(5), v=5))
    world.feed.row("t", gone(7, at(2)))
    world.feed.resolve(at(3))
    world.run()
    world.assert_equal()
    assert by_key(world.topics.rows("t"), ["id"]) == {(1,): {"id": 1, "v": "1"}}
    for message in (row(1, at(5), v=5), row(1, at(1), v=1)):
        world.feed.row("t", message)
    world.feed.resolve(at(6))
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.resolve(at(7))
    world.run()
    world.assert_equal()
    assert by_key(world.topics.rows("t"), ["id"]) == {(1,): {"id": 1, "v": "5"}}


def test_the_slowest_partition_decides(world: World):
    """C4: R is the minimum over partitions of the last one seen there."""
    world.create("t", 4)
    for key in range(20):
        world.feed.row("t", row(key, at(1), v=1))
    world.feed.resolve(at(2))
    for key in range(20):
        world.feed.row("t", row(key, at(3), v=2))
    world.feed.resolve(at(4), but=[("t", 3)])
    world.run()
    world.assert_equal([at(2)])
    world.send("t", 3, [marker(at(5))])
    world.run()
    world.assert_equal([at(2), at(4)])


def test_a_partition_without_a_resolved_timestamp_holds_all_back(world: World):
    """C4, U1: rows may be in it that belong to any timestamp, and the error names it."""
    world.create("t", 1)
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.resolve(at(2))
    world.run()
    world.grow("t", 2)
    world.feed.row("t", row(1, at(3), v=3))
    world.feed.resolve(at(4), but=[("t", 1)])
    with pytest.raises(SourceUnavailable, match=r"partition 1 of topic \S+ has no resolved"):
        world.run()
    world.assert_equal([at(2)])
    world.feed.row("t", row(2, at(4, 1), v=4))
    world.feed.resolve(at(5))
    world.run()
    world.assert_equal()


def test_a_table_that_is_added_later_comes_whole(world: World):
    """C2: its scan may be of a time that the pipeline has passed already."""
    world.create("t", 1)
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.resolve(at(10))
    world.run()
    world.create("late", 2)
    for key in range(5):
        world.feed.row("late", row(key, at(10), v=1))
    world.feed.resolve(at(11))
    world.run()
    assert len(world.topics.rows("late")) == 5
    assert world.times("late") == [at(11)]


def test_the_kafka_source_with_cockroachdbs_envelope_is_the_same(world: World):
    """C1: the pipeline file may say it either way; the consumer group follows."""
    world.create("t", 2)
    for key in range(6):
        world.feed.row("t", row(key, at(1), v=1))
    world.feed.resolve(at(2))
    world.flush()
    value = {"format": "json", "envelope": "cockroachdb"}
    world.run(world.topics.document({"topics": ["t"], "value": value}))
    world.assert_equal()
    group = {"bootstrap.servers": world.topics.broker.bootstrap_servers}
    consumer = Consumer({**group, "group.id": f"icestream-{PIPELINE}"})
    try:
        places = [TopicPartition(world.topics.name("t"), n) for n in range(2)]
        ends = [consumer.get_watermark_offsets(place)[1] for place in places]
        assert [place.offset for place in consumer.committed(places, timeout=30)] == ends
    finally:
        consumer.close()


def test_snapshots_can_be_thinned_out(world: World):
    """C2: `resolved_every` is the least time between two of them."""
    world.create("t", 2)
    for second in range(1, 13):
        world.feed.row("t", row(second % 3, at(second), v=second))
        world.feed.resolve(at(second, 5))
    world.run(world.document(resolved_every="PT5S"))
    times = world.times("t")
    world.assert_equal(times)
    assert [(wall - NOON[0]) // SECOND for wall, _ in times] == [1, 6, 11, 12]


def test_history_that_retention_took_away_stops_the_pipeline(world: World):
    """E7: it says what is lost; nothing is committed."""
    world.create("t", 1)
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.resolve(at(2))
    world.run()
    world.feed.row("t", row(1, at(3), v=3))
    world.feed.resolve(at(4))
    world.flush()
    admin = AdminClient({"bootstrap.servers": world.topics.broker.bootstrap_servers})
    place = TopicPartition(world.topics.name("t"), 0, 3)
    for answer in admin.delete_records([place]).values():
        answer.result(30)
    with pytest.raises(HistoryLost, match="no longer has offset 2") as caught:
        world.run()
    assert "1 offsets are lost" in str(caught.value)
    world.assert_equal([at(2)])


def test_a_topic_that_was_created_anew_is_not_taken_for_the_old_one(world: World):
    """E7: its offsets count from zero again."""
    world.create("t", 1)
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.resolve(at(2))
    world.run()
    world.topics.broker.delete_topic(world.topics.name("t"))
    world.topics.create("t", 1)
    world.feed.resolve(at(4))
    with pytest.raises(HistoryLost, match="deleted and created anew"):
        world.run()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ((b"[1]", b'{"after": {"id": 1}'), "offset 2"),
        ((b"[1]", None), "the record has no value"),
        ((b"[1]", b'{"after": {"id": 1, "v": 1}}'), "no `updated` timestamp"),
        ((None, wrapped([1], {"id": 1, "v": "1"}, (NOON[0] + 3 * SECOND, 0))[1]), "no key"),
    ],
)
def test_what_is_no_row_of_a_changefeed_stops_before_its_snapshot(
    world: World, message: Message, why: str
):
    """C5, E5: the place is named, no value is shown, and all before it is committed."""
    world.create("t", 1)
    world.feed.row("t", row(1, at(1), v=1))
    world.feed.resolve(at(2))
    world.send("t", 0, [message])
    world.feed.resolve(at(4))
    with pytest.raises(DataRejected) as caught:
        world.run()
    assert why in str(caught.value)
    assert "Partition 0, offset 2" in str(caught.value)
    world.assert_equal([at(2)])


@pytest.mark.parametrize("name", ["05_row_resolved.jsonl", "07_full_table_name.jsonl"])
def test_feeds_without_timestamps_are_refused_with_the_statement_to_use(world: World, name: str):
    """C5: the envelope `row` and feeds without `updated`, as a real server sent them."""
    for table in tables_of(name):
        world.create(table, 1)
    for each in capture(name):
        key, value = each.key.encode() or None, each.value.encode() or None
        for table in [each.table] if each.table else world.feed.partitions:
            world.send(table, 0, [(key if each.table else None, value)])
    with pytest.raises(DataRejected, match="WITH updated, resolved"):
        world.run()


def test_rows_without_any_resolved_timestamp_are_refused_with_the_statement_to_use(world: World):
    """C4: nobody knows when they are complete."""
    world.create("t", 2)
    world.feed.row("t", row(1, at(1), v=1))
    with pytest.raises(SourceUnavailable, match="WITH updated, resolved"):
        world.run()
    assert hlc_text(at(1)) not in str(world.topics.epochs("t"))
