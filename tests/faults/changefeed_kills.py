"""Kill -9 at random while a changefeed's topics are read, then compare every snapshot with the log.

    python -m tests.faults.changefeed_kills [--kills 50] [--seed N]

A stand-in changefeed writes two tables to topics of four partitions all the time: late rows,
duplicates, markers that come late. The topics themselves, read by a client that is not icestream,
are the oracle: each table must have one snapshot for each resolved timestamp that brings it
changes, with exactly the rows as of that timestamp.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.changefeed import (
    Change,
    Feed,
    Hlc,
    Message,
    RandomChangefeed,
    change_of,
    expected,
    hlc,
    published,
    resolved_in,
)
from tests.faults.killing import Place, Victim, kill_and_compare
from tests.servers import KafkaBroker

TABLES = ("one", "two")
PARTITIONS = 4
ANSWER_SECONDS = 60.0
# A killed run must find work, but not more than the next one can do while the feed goes on.
PAUSE_SECONDS = 0.2
PAUSE_SECONDS_HERE = 0.02
# Some fifty timestamps, each a commit: however slow the machine is, the last run has an end.
STEPS_MAX = 500
# Of many snapshots so many have their rows compared; all have their timestamps compared.
SNAPSHOTS_READ = 25


class FeedWriter(threading.Thread):
    """A random changefeed that goes on until it is stopped, and is complete then."""

    def __init__(self, broker: KafkaBroker, prefix: str, seed: int, pause_seconds: float):
        super().__init__(name="changefeed", daemon=True)
        self._pause_seconds = pause_seconds
        self._prefix = prefix
        self._ended = threading.Event()
        self._producer = Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True}
        )
        feed = Feed(send=self._send, partitions=dict.fromkeys(TABLES, PARTITIONS))
        self._feed = RandomChangefeed(random.Random(seed), feed, lambda *_: None)
        self.transactions, self.transactions_max = 0, STEPS_MAX

    def run(self) -> None:
        """One step after another."""
        self._feed.catch_up()
        # A run that finds a partition without any timestamp cannot go on.
        assert self._producer.flush(ANSWER_SECONDS) == 0
        while not self._ended.wait(self._pause_seconds):
            if self.transactions >= self.transactions_max:
                continue
            feed = self._feed
            # Partitions stay as they are: a new one would hold back a single run.
            feed.random.choice([*[feed.change] * 8, feed.repeat, feed.resolve])()
            self._producer.poll(0)
            self.transactions += 1
        self._feed.catch_up()
        assert self._producer.flush(ANSWER_SECONDS) == 0

    def stop(self) -> None:
        """End with a resolved timestamp in every partition."""
        self._ended.set()
        self.join()

    def _send(self, table: str, partition: int, messages: Sequence[Message]) -> None:
        for key, value in messages:
            self._producer.produce(f"{self._prefix}.{table}", value, key, partition)


@dataclass(kw_only=True)
class FeedVictim(Victim):
    """Topics named like the victim, and the pipeline that reads them."""

    broker: KafkaBroker
    # One step in ten resolves a timestamp, and less than half of these reach every partition.
    transactions_each: ClassVar[int] = 60

    def __post_init__(self) -> None:
        for table in TABLES:
            self.broker.create_topic(self._topic(table), PARTITIONS)

    def pipeline(self) -> Mapping[str, Any]:
        """Every resolved timestamp is an epoch."""
        kafka = {
            "bootstrap_servers": self.broker.bootstrap_servers,
            "topics": [self._topic(table) for table in TABLES],
        }
        sink = {"catalog": dict(self.place.catalog), "namespace": self.place.name}
        return {
            "source": {"cockroachdb": {"kafka": kafka}},
            "sink": {"iceberg": sink},
            "commit_interval": "PT0.2S",
        }

    def writer(self, seed: int) -> FeedWriter:
        """The changefeed."""
        pause_seconds = PAUSE_SECONDS_HERE if self.here else PAUSE_SECONDS
        return FeedWriter(self.broker, self.place.name, seed, pause_seconds)

    def assert_equal(self) -> None:
        """Each table has the snapshots that the log says, each with the rows that it says."""
        changes: list[Change] = []
        resolved: set[Hlc] = set()
        for table in TABLES:
            for message in self._log(table):
                if message[0] is None:
                    resolved.add(resolved_in(message))
                else:
                    changes.append(change_of(table, message))
        for table in TABLES:
            wanted = published(changes, table, sorted(resolved))
            found = [
                (hlc(each["summary"]["crdb.resolved_hlc"]), each["snapshot_id"])
                for each in self.place.lake.epochs(f"{self.place.name}.{table}")
                if "added-data-files" in each["summary"] or "added-delete-files" in each["summary"]
            ]
            assert [at for at, _ in found] == wanted, self.story
            for at, snapshot_id in found[:: -(-len(found) // SNAPSHOTS_READ)] + found[-1:]:
                rows = self.place.lake.rows(f"{self.place.name}.{table}", snapshot_id)
                assert {(row["id"],): row for row in rows} == expected(changes, table, at)

    def _topic(self, table: str) -> str:
        return f"{self.place.name}.{table}"

    def _log(self, table: str) -> Iterator[Message]:
        """Everything in a topic, each partition in order."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": f"oracle-{self.place.name}",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            topic = self._topic(table)
            consumer.assign([TopicPartition(topic, n, 0) for n in range(PARTITIONS)])
            ended = 0
            while ended < PARTITIONS:
                message = consumer.poll(ANSWER_SECONDS)
                assert message is not None, "the broker does not answer"
                if message.error():
                    ended += 1
                else:
                    yield message.key(), message.value()
        finally:
            consumer.close()


@contextmanager
def victims(folder: Path) -> Iterator[Callable[[Place, int], Victim]]:
    """A broker, and topics of their own on it."""
    with KafkaBroker(folder) as broker:
        yield lambda place, seed: FeedVictim(place=place, broker=broker)


if __name__ == "__main__":
    sys.exit(kill_and_compare("tests.faults.changefeed_kills", victims))
