"""Kill -9 at random while topics are read, then compare the lake with the log.

    python -m tests.faults.kafka_kills [--kills 50] [--seed N]

A producer writes transactions to a topic of four partitions all the time, some of them aborted.
Records belong to three tables by a field. In one kind of pipeline each record is a new row, so
that anything read twice or not at all shows; in the other it replaces or deletes its key's row.
The topic itself, read by a client that is not icestream, is the oracle.
"""

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.faults.killing import Place, Victim, kill_and_compare
from tests.servers import KafkaBroker

TABLES = ("red", "green", "blue")
PARTITIONS = 4
KEYS = 200
ANSWER_SECONDS = 60.0
# A killed run must find work, but not more than the next one can do while the producer goes on.
PAUSE_SECONDS = 0.2
PAUSE_SECONDS_HERE = 0.02
ABORTED_SHARE = 0.1
# Small epochs, so that a kill finds several on their way.
EPOCH_ROWS_MAX = 300
EPOCH_ROWS_MAX_HERE = 60


class TopicWriter(threading.Thread):
    """Produces transactions until it is stopped."""

    def __init__(self, broker: KafkaBroker, topic: str, seed: int, pause_seconds: float):
        super().__init__(name="producer", daemon=True)
        self._pause_seconds = pause_seconds
        self._topic = topic
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._number = 0
        self.transactions, self.transactions_max = 0, sys.maxsize
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic}
        self._producer = Producer(settings)
        self._producer.init_transactions(ANSWER_SECONDS)

    def run(self) -> None:
        """One small transaction after another."""
        while not self._ended.wait(self._pause_seconds):
            if self.transactions >= self.transactions_max:
                continue
            self._producer.begin_transaction()
            for _ in range(self._random.randrange(1, 15)):
                self._produce()
            if self._random.random() < ABORTED_SHARE:
                self._producer.abort_transaction(ANSWER_SECONDS)
            else:
                self._producer.commit_transaction(ANSWER_SECONDS)
            self.transactions += 1

    def _produce(self) -> None:
        self._number += 1
        key = self._random.randrange(KEYS)
        row = {"id": key, "table": TABLES[key % len(TABLES)], "n": self._number}
        gone = self._random.random() < 0.1
        value = {**row, "op": "delete" if gone else "update"}
        self._producer.produce(self._topic, json.dumps(value), json.dumps({"id": key}))

    def stop(self) -> None:
        """End after the transaction it is in."""
        self._ended.set()
        self.join()


@dataclass(kw_only=True)
class TopicVictim(Victim):
    """One topic, named like its victim, and the pipeline that reads it."""

    broker: KafkaBroker
    only_added: bool
    transactions_each: ClassVar[int] = 8

    def __post_init__(self) -> None:
        self.broker.create_topic(self.place.name, PARTITIONS)

    def pipeline(self) -> Mapping[str, Any]:
        """Routes records to three tables, in small epochs."""
        changing = {"envelope": "cdc_field", "cdc_field": "op"}
        kafka = {
            "bootstrap_servers": self.broker.bootstrap_servers,
            "topics": [self.place.name],
            "value": {"envelope": "none"} if self.only_added else changing,
        }
        route = {"field": "table", "tables": {table: f"^{table}$" for table in TABLES}}
        sink = {"catalog": dict(self.place.catalog), "namespace": self.place.name, "route": route}
        return {
            "source": {"kafka": kafka},
            "sink": {"iceberg": sink},
            "commit_interval": "PT0.2S",
            "epoch_rows_max": EPOCH_ROWS_MAX_HERE if self.here else EPOCH_ROWS_MAX,
        }

    def writer(self, seed: int) -> TopicWriter:
        """Produces to the topic."""
        pause_seconds = PAUSE_SECONDS_HERE if self.here else PAUSE_SECONDS
        return TopicWriter(self.broker, self.place.name, seed, pause_seconds)

    def settle(self) -> None:
        """The mark of a transaction may come after it is over."""
        self.broker.wait_for_transactions(self.place.name, PARTITIONS)

    def assert_equal(self) -> None:
        """The lake has what the log says: no row more, none less, none other."""
        for table in TABLES:
            wanted = Counter(self._expected(table))
            rows = self.place.lake.rows(f"{self.place.name}.{table}")
            found = Counter((row["id"], row["n"]) for row in rows)
            assert found == wanted, (
                f"{table}: {len(found - wanted)} rows too many, {len(wanted - found)} missing: "
                f"{self.story}"
            )

    def _expected(self, table: str) -> list[tuple[int, int]]:
        """Key and number of each row that the table has to have."""
        rows: dict[Any, tuple[int, int]] = {}
        for value in self._log():
            if value["table"] == table:
                key = value["n"] if self.only_added else value["id"]
                rows[key] = (value["id"], value["n"])
                if value["op"] == "delete" and not self.only_added:
                    del rows[key]
        return list(rows.values())

    def _log(self) -> Iterator[dict[str, Any]]:
        """Everything that was committed to the topic, each partition in order."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": f"oracle-{self.place.name}",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            consumer.assign([TopicPartition(self.place.name, n, 0) for n in range(PARTITIONS)])
            ended = 0
            while ended < PARTITIONS:
                message = consumer.poll(ANSWER_SECONDS)
                assert message is not None, "the broker does not answer"
                if message.error():
                    ended += 1
                    continue
                yield json.loads(message.value() or b"")
        finally:
            consumer.close()


@contextmanager
def victims(folder: Path) -> Iterator[Callable[[Place, int], Victim]]:
    """A broker, and topics of their own on it, of both kinds in turn."""
    with KafkaBroker(folder) as broker:
        yield lambda place, seed: TopicVictim(place=place, broker=broker, only_added=seed % 2 == 0)


if __name__ == "__main__":
    sys.exit(kill_and_compare("tests.faults.kafka_kills", victims))
