"""A Kafka broker's topics, a pipeline that reads them, and the lake, as tests use them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import SparkSession

from icestream.config import open_pipeline, parse
from icestream.pipeline import Pipeline
from tests.integration.pipelines import Document
from tests.lake import Lake
from tests.running import for_pipelines
from tests.servers import KafkaBroker

NAMESPACE = "shop"
PIPELINE = "topics"
FLUSH_SECONDS = 30.0

Row = dict[str, Any]


def as_bytes(value: Any) -> bytes | None:
    """Bytes as they are, None as none, anything else as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    return json.dumps(value).encode()


class Topics:
    """Produces records, runs a pipeline over them, and reads what became of them."""

    def __init__(
        self, broker: KafkaBroker, prefix: str, spark: SparkSession, catalog: Mapping[str, str]
    ):
        self.broker = broker
        self._prefix = prefix
        self._spark = spark
        self._catalog = catalog
        self.lake = Lake(spark, catalog)

    def name(self, topic: str) -> str:
        """The topic's full name: all tests share the broker."""
        return f"{self._prefix}.{topic}"

    def create(self, topic: str, partitions: int = 1, config: Mapping[str, str] = {}) -> str:
        """A new topic."""
        self.broker.create_topic(self.name(topic), partitions, config)
        return self.name(topic)

    def send(
        self, topic: str, records: Iterable[tuple[Any, Any]], partition: int = -1, at: int = 0
    ) -> None:
        """Records of key and value; a key decides the partition unless one is named."""
        # A producer that was there before would not know of new partitions, and one that is not
        # idempotent may change the order of records when it has to send some of them again.
        producer = Producer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "linger.ms": 5,
                "enable.idempotence": True,
            }
        )
        for key, value in records:
            producer.produce(
                self.name(topic), as_bytes(value), as_bytes(key), partition, timestamp=at
            )
            producer.poll(0)
        assert producer.flush(FLUSH_SECONDS) == 0

    def transaction(self, topic: str, records: Iterable[tuple[Any, Any]], *, commit: bool) -> None:
        """Records of a transaction of their own."""
        producer = Producer(
            {"bootstrap.servers": self.broker.bootstrap_servers, "transactional.id": self._prefix}
        )
        producer.init_transactions(FLUSH_SECONDS)
        producer.begin_transaction()
        for key, value in records:
            producer.produce(self.name(topic), as_bytes(value), as_bytes(key))
        producer.flush(FLUSH_SECONDS)
        if commit:
            producer.commit_transaction(FLUSH_SECONDS)
        else:
            producer.abort_transaction(FLUSH_SECONDS)
        self.broker.wait_for_transactions(self.name(topic), 1)

    def log(self, topic: str, partitions: int) -> Iterator[tuple[Any, Any]]:
        """Keys and values of a topic by a client that is not icestream, each partition in order."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": f"log-{self._prefix}",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            consumer.assign([TopicPartition(self.name(topic), n, 0) for n in range(partitions)])
            ended = 0
            while ended < partitions:
                message = consumer.poll(FLUSH_SECONDS)
                assert message is not None, "the broker does not answer"
                if message.error():
                    ended += 1
                else:
                    yield tuple(
                        None if part is None else json.loads(part)
                        for part in (message.key(), message.value())
                    )
        finally:
            consumer.close()

    def document(
        self, source: Mapping[str, Any] = {}, sink: Mapping[str, Any] = {}, **top: Any
    ) -> Document:
        """A pipeline file with one pipeline; topics are named without the test's prefix."""
        options = dict(source)
        options["topics"] = [self.name(topic) for topic in options.get("topics", [])]
        kafka = {"bootstrap_servers": self.broker.bootstrap_servers, **options}
        iceberg = {"catalog": dict(self._catalog), "namespace": NAMESPACE, **sink}
        return {PIPELINE: {"source": {"kafka": kafka}, "sink": {"iceberg": iceberg}, **top}}

    def pipeline(self, document: Document) -> Pipeline:
        """A new run of the only pipeline, not started yet."""
        return open_pipeline(parse(document).pipelines[0], for_pipelines(self._spark))

    def run(self, document: Document) -> Pipeline:
        """Run until all that is there is committed."""
        pipeline = self.pipeline(document)
        pipeline.run(once=True)
        return pipeline

    def rows(self, table: str, *order: str) -> list[Row]:
        """The table's rows, ordered by columns."""
        rows = self.lake.rows(f"{NAMESPACE}.{table}")
        return sorted(rows, key=lambda row: tuple(str(row[name]) for name in order or sorted(row)))

    def epochs(self, table: str) -> list[dict[str, Any]]:
        """The table's snapshots that publish an epoch; none while there is no table."""
        if not self._spark.catalog.tableExists(self.lake.table(f"{NAMESPACE}.{table}")):
            return []
        return self.lake.epochs(f"{NAMESPACE}.{table}")


def created(key: int, **columns: Any) -> tuple[Row, Row]:
    """A Debezium record without schemas: key, and value of an insert."""
    after = {"id": key, **columns}
    return {"id": key}, {"before": None, "after": after, "op": "c", "ts_ms": 1, "source": {}}


def updated(key: int, **columns: Any) -> tuple[Row, Row]:
    """The same of an update."""
    row_key, value = created(key, **columns)
    return row_key, {**value, "op": "u"}


def deleted(key: int) -> tuple[Row, Row]:
    """The same of a delete, with the key alone as before-image."""
    row_key, value = created(key)
    return row_key, {**value, "op": "d", "before": {"id": key}, "after": None}
