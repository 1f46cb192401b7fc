"""Kafka topics into Iceberg, against a bare script, Spark with MERGE INTO, and Kafka Connect.

All read the same topic: events of Debezium, four partitions, on a real broker whose processor time
nobody is charged for. Every table and every file that comes out is compared with what the log
leaves, so that nobody wins by being wrong.

Spark's own connector for Kafka is not used by the rival: it needs a jar that pyspark lacks, and it
makes a row of every record in the JVM. Here Python tasks read by librdkafka into Arrow batches.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.connect import ConnectWorker
from bench.events import ARROW_TYPES, FLUSH_SECONDS, SHAPE, log, produce
from bench.measure import Measured, cpu_seconds, median, repeat
from icestream.change import AT, OP, SEQ, Op, fold
from icestream.config import PipelineConfig, open_catalog, open_pipeline, open_sink, parse
from icestream.formats.json_cells import members, values
from icestream.iceberg.handle import TableName
from icestream.pipeline import Pipeline
from icestream.schema import cast_text
from tests.servers import KafkaBroker, wait_until

if TYPE_CHECKING:
    from bench.__main__ import Bench

EVENTS = 1_000_000
PARTITIONS = 4
WORKERS = 2
WARM_UPS, REPETITIONS = 1, 3
SEED = 7
TOPIC = "events"
# The script decodes this many messages at once; more would not be quicker.
MESSAGES = 50_000
ENDED_SECONDS = 60.0
COMMIT_SECONDS = 2
LATENCY_EVENTS = 20
LATENCY_SECONDS_MAX = 4.0
POLL_SECONDS = 0.05
WAIT_SECONDS = 300.0
SQL_TYPES = {"long": "bigint", "timestamptz": "timestamp"}
COLUMNS = {column.name: str(column.type).replace(" ", "") for column in SHAPE.columns}


class KafkaBench:
    """One broker and a topic with a log; each way to take it, and what came out."""

    def __init__(self, bench: "Bench", folder: Path, scale: float):
        self._bench, self._spark = bench, bench.spark
        self._folder = folder
        self._log = log(int(EVENTS * scale), SEED)
        self._broker = KafkaBroker(folder / "kafka")
        pq.write_table(self._log.left, folder / "left.parquet")

    def run(self) -> None:
        """Measure throughput, then the time until an event can be seen."""
        before = set(cpu_seconds())
        with self._broker:
            self._apart = set(cpu_seconds()) - before
            self._broker.create_topic(TOPIC, PARTITIONS, {"retention.ms": "-1"})
            produce(self._broker.bootstrap_servers, TOPIC, self._log)
            there = self._throughput()
            self._latency()
            self._connect(there)

    # Throughput

    def _throughput(self) -> Measured:
        """The topic from its first to its last event; returns the time of a table that is there."""
        new = self._measured("new", self._ours)
        for number in range(WARM_UPS + REPETITIONS):
            self._make(f"there{number}")
        there = self._measured("there", self._ours)
        with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
            floor = self._measured("bare", lambda name: self._bare(pool, name))
        merge = self._measured("merged", self._merge)
        note = self._bench.note
        for what, ours in (("a new table", new), ("a table that is there", there)):
            note(f"topic into {what} against a bare script", ours, floor, 0.7, cpu=False)
            note(f"topic into {what} against from_json and MERGE INTO", ours, merge, 2.0, cpu=True)
        return there

    def _measured(self, name: str, work: Callable[[str], object]) -> Measured:
        """Repeat the work, each time with a name of its own, and check what came out."""
        found = repeat(lambda n: work(f"{name}{n}"), WARM_UPS, REPETITIONS, self._apart)
        for number in range(WARM_UPS + REPETITIONS):
            files = self._folder / f"{name}{number}" / "data"
            relation = f"parquet.`{files}`" if files.exists() else f"bench.db.{name}{number}"
            self._check(relation)
        return found

    def _check(self, relation: str) -> None:
        """Raise unless a relation has exactly the rows that the log leaves."""
        names = ", ".join(COLUMNS)
        expected = f"parquet.`{self._folder / 'left.parquet'}`"
        differing = self._spark.sql(
            f"""SELECT count(*) FROM (SELECT {names} FROM (
              SELECT {names}, 1 AS side FROM {relation} UNION ALL
              SELECT {names}, -1 AS side FROM {expected})
            GROUP BY {names} HAVING sum(side) <> 0)"""
        ).collect()[0][0]
        if differing:
            raise RuntimeError(f"{relation} differs from the log in {differing} rows")

    def _config(self, name: str, topic: str = TOPIC, **more: Any) -> PipelineConfig:
        """A pipeline that makes a table of its own name from a topic."""
        told = ("price", "weight", "updated_at")
        kafka = {
            "bootstrap_servers": self._broker.bootstrap_servers,
            "topics": [topic],
            "value": {"format": "json", "envelope": "debezium"},
            "columns": {topic: {column: COLUMNS[column] for column in told}},
        }
        iceberg = {
            "catalog": self._bench.catalog,
            "namespace": "db",
            "tables": {topic: {"table": name}},
        }
        document = {name: {"source": {"kafka": kafka}, "sink": {"iceberg": iceberg}, **more}}
        return parse(document).pipelines[0]

    def _ours(self, name: str) -> None:
        open_pipeline(self._config(name), self._spark).run(once=True)

    def _make(self, name: str) -> None:
        """An empty table that belongs to the pipeline of its name."""
        sink = open_sink(self._config(name), self._spark)
        sink.claim([])
        sink.prepare(TOPIC, lambda: SHAPE)

    def _bare(self, pool: ProcessPoolExecutor, name: str) -> None:
        """A script without any guarantee: two processes read, decode, fold, write two files each.

        The processes stay between rounds, as Spark's do.
        """
        for kind in ("data", "deletes"):
            (self._folder / name / kind).mkdir(parents=True)
        shares = [range(number, PARTITIONS, WORKERS) for number in range(WORKERS)]
        servers = self._broker.bootstrap_servers
        tasks = [pool.submit(write_bare, servers, part, self._folder / name) for part in shares]
        for task in tasks:
            task.result()

    def _merge(self, name: str) -> None:
        """What a user would write by hand: the last event per key, merged on read."""
        self._spark.sql(
            f"CREATE TABLE bench.db.{name} ({_sql_columns(' ')}) USING iceberg TBLPROPERTIES "
            "('format-version'='2', 'write.merge.mode'='merge-on-read')"
        )
        servers = self._broker.bootstrap_servers

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for part in consumed(servers, batch.column(0).to_pylist()):
                    texts = pa.array([message.value() for message in part], pa.binary())
                    places = pa.array([message.offset() for message in part], pa.int64())
                    yield pa.record_batch({"value": texts, "place": places})

        partitions = self._spark.range(0, PARTITIONS, 1, PARTITIONS)
        raw = partitions.mapInArrow(read, "value binary, place bigint")
        raw.createOrReplaceTempView("raw_events")
        schema = f"before struct<id: bigint>, after struct<{_sql_columns(': ')}>, op string"
        assignments = ", ".join(f"t.{column} = s.after.{column}" for column in COLUMNS)
        after = ", ".join(f"s.after.{column}" for column in COLUMNS)
        self._spark.sql(
            f"""MERGE INTO bench.db.{name} t USING (
              SELECT * FROM (SELECT *, row_number() OVER (
                PARTITION BY key ORDER BY place DESC) AS rank FROM (
                  SELECT e.*, coalesce(e.after.id, e.before.id) AS key, place FROM (
                    SELECT from_json(CAST(value AS STRING), '{schema}') AS e, place
                    FROM raw_events)))
              WHERE rank = 1) s ON t.id = s.key
            WHEN MATCHED AND s.op = 'd' THEN DELETE
            WHEN MATCHED THEN UPDATE SET {assignments}
            WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT ({", ".join(COLUMNS)}) VALUES ({after})"""
        )

    # Latency

    def _latency(self) -> None:
        """From before an event is sent until a catalog that is asked anew has a snapshot with it.

        Whether the snapshots really have the events is looked up at the end.
        """
        self._broker.create_topic("moments", PARTITIONS, {"retention.ms": "-1"})
        producer = Producer({"bootstrap.servers": self._broker.bootstrap_servers, "linger.ms": 0})
        _send(producer, 0)
        config = self._config("moments", "moments", commit_interval=f"PT{COMMIT_SECONDS}S")
        moments, snapshots = random.Random(SEED), []
        seconds = []
        with _running(open_pipeline(config, self._spark)) as alive:
            seen = self._next_snapshot(None, alive)
            for number in range(1, LATENCY_EVENTS + 1):
                time.sleep(moments.uniform(0, COMMIT_SECONDS))
                started = time.perf_counter()
                _send(producer, number)
                seen = self._next_snapshot(seen, alive)
                seconds.append(time.perf_counter() - started)
                snapshots.append(seen)
        for number, snapshot in enumerate(snapshots, 1):
            rows = f"bench.db.moments VERSION AS OF {snapshot} WHERE id = {number}"
            if self._spark.sql(f"SELECT count(*) FROM {rows}").collect()[0][0] != 1:
                raise RuntimeError("a snapshot lacks the event that it was waited for")
        middle = median(seconds)
        self._bench.note_number(
            f"median seconds until an event is seen, commit_interval {COMMIT_SECONDS} s "
            f"(slowest {max(seconds):.2f})",
            middle,
            f"at most {LATENCY_SECONDS_MAX}",
            middle <= LATENCY_SECONDS_MAX,
        )

    def _next_snapshot(self, seen: int | None, alive: Callable[[], bool]) -> int:
        """The snapshot of the table's newest epoch, once it is another one."""
        catalog = open_catalog(self._bench.catalog, self._spark)
        name = TableName(namespace=("db",), name="moments")
        deadline = time.monotonic() + WAIT_SECONDS
        try:
            while alive() and time.monotonic() < deadline:
                table = catalog.load(name)
                newest = table.last_epoch_snapshot("moments", "main") if table else None
                if newest is not None and newest != seen:
                    return newest
                time.sleep(POLL_SECONDS)
        finally:
            catalog.close()
        raise RuntimeError("the pipeline ended, or commits nothing")

    # Kafka Connect

    def _connect(self, ours: Measured) -> None:
        """Processor time per event of Apache's sink, the second time it takes the same events."""
        self._spark.sql(
            f"CREATE TABLE bench.db.appended ({_sql_columns(' ')}) USING iceberg "
            "TBLPROPERTIES ('format-version'='2')"
        )
        count = len(self._log.keys)
        servers = self._broker.bootstrap_servers
        self._broker.create_topic(f"control-{TOPIC}")
        worker = ConnectWorker(self._folder / "connect", servers, self._bench.catalog)
        with worker.start(TOPIC, "db.appended", WORKERS):
            self._wait_for_rows(worker, count)
            before = cpu_seconds()[worker.pid]
            produce(servers, TOPIC, self._log)
            self._wait_for_rows(worker, 2 * count)
            spent = cpu_seconds()[worker.pid] - before
        ratio = spent / ours.cpu_seconds
        self._bench.note_number(
            f"events per CPU second, times those of Kafka Connect's Iceberg sink "
            f"({count / ours.cpu_seconds:.0f} against {count / spent:.0f})",
            ratio,
            "at least 1.5",
            ratio >= 1.5,
        )

    def _wait_for_rows(self, worker: ConnectWorker, count: int) -> None:
        """Wait until the sink has appended so many rows, among them all that the log leaves."""

        def appended() -> int:
            worker.refuse_dead()
            rows = self._spark.sql("SELECT count(*) FROM bench.db.appended").collect()
            return int(rows[0][0])

        try:
            wait_until(lambda: appended() >= count, WAIT_SECONDS, "Kafka Connect")
        except TimeoutError as error:
            raise RuntimeError(f"Kafka Connect appends nothing:\n{worker.log_tail()}") from error
        names = ", ".join(COLUMNS)
        lost = self._spark.sql(
            f"""SELECT count(*) FROM (SELECT {names} FROM parquet.`{self._folder}/left.parquet`
            EXCEPT SELECT {names} FROM bench.db.appended)"""
        ).collect()[0][0]
        if lost or appended() != count:
            raise RuntimeError(f"Kafka Connect lost {lost} rows, or appended some twice")


def consumed(bootstrap_servers: str, partitions: Sequence[int]) -> Iterator[list[Message]]:
    """All messages of some partitions, by the usual client.

    Its patience is cut short, as ours is: by default it waits for a second when its queue is full.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 5,
            "fetch.wait.max.ms": 50,
            "queued.min.messages": 1_000_000,
        }
    )
    try:
        places = [TopicPartition(TOPIC, partition, 0) for partition in partitions]
        left = sum(consumer.get_watermark_offsets(place)[1] for place in places)
        consumer.assign(places)
        while left:
            part = consumer.consume(min(left, MESSAGES), timeout=ENDED_SECONDS)
            if not part or any(message.error() for message in part):
                raise RuntimeError("the broker gave nothing, or an error")
            left -= len(part)
            yield part
    finally:
        consumer.close()


def write_bare(bootstrap_servers: str, partitions: Sequence[int], folder: Path) -> None:
    """One process of the bare script."""
    parts, count = [], 0
    for messages in consumed(bootstrap_servers, partitions):
        parts.append(_decoded([message.value() for message in messages], count))
        count += len(messages)
    folded = fold(pa.concat_tables(parts), ["id"])
    name = f"{partitions[0]}.parquet"
    kept = folded.kept.drop_columns([OP, AT, SEQ])
    pq.write_table(kept, folder / "data" / name, compression="zstd")
    pq.write_table(folded.deleted.select(["id"]), folder / "deletes" / name, compression="zstd")


def _decoded(texts: Sequence[bytes], first: int) -> pa.Table:
    """Events as changes; icestream's JSON cells are a little faster here than `pyarrow.json`."""
    cells, broken = values(pa.array(texts, pa.binary()))
    if broken:
        raise RuntimeError("an event is no JSON")
    event = members(cells)
    gone = pc.equal(event["op"].text(), "d")
    after, before = members(event["after"]), members(event["before"])
    columns: dict[str, pa.Array] = {}
    for column in SHAPE.columns:
        text = after[column.name].text()
        if column.name == "id" and "id" in before:
            text = pc.coalesce(text, before["id"].text())
        columns[column.name] = cast_text(text, column.name, column.type, ARROW_TYPES[column.name])
    columns[OP] = pc.if_else(gone, pa.scalar(int(Op.DELETE), pa.int8()), int(Op.UPSERT))
    columns[AT] = pa.array(np.arange(first, first + len(texts)))
    columns[SEQ] = pa.array(np.zeros(len(texts), np.int64))
    return pa.table(columns)


@contextmanager
def _running(pipeline: Pipeline) -> Iterator[Callable[[], bool]]:
    """A pipeline in a thread of its own, and whether it still runs."""
    thread = threading.Thread(target=pipeline.run)
    thread.start()
    try:
        yield thread.is_alive
    finally:
        pipeline.stop()
        thread.join(WAIT_SECONDS)


def _send(producer: Producer, number: int) -> None:
    row: Mapping[str, Any] = {"id": number, "note": f"moment {number}"}
    event = {"before": None, "after": row, "source": {}, "op": "c", "ts_ms": 1}
    producer.produce("moments", json.dumps(event), json.dumps({"id": number}))
    if producer.flush(FLUSH_SECONDS):
        raise RuntimeError("the broker does not take an event")


def _sql_columns(between: str) -> str:
    """The columns with their types, as Spark SQL names them."""
    return ", ".join(f"{name}{between}{SQL_TYPES.get(t, t)}" for name, t in COLUMNS.items())
