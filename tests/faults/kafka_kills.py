"""Kill -9 at random while topics are read, then compare the lake with the log.

    python -m tests.faults.kafka_kills [--kills 50] [--seed N]

A producer writes transactions to a topic of four partitions all the time, some of them aborted.
Records belong to three tables by a field. In one kind of pipeline each record is a new row, so
that anything read twice or not at all shows; in the other it replaces or deletes its key's row.
The pipeline runs as a process of its own and is killed at a failpoint; at the end a last run takes
what is left. The topic itself, read by a client that is not icestream, is the oracle.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Consumer, Producer, TopicPartition

from icestream import failpoints
from icestream.errors import IcestreamError
from icestream.spark import session
from tests.faults.kills import catalog_in, say
from tests.faults.shop import KILLED, SPARK, Process, random_seed
from tests.lake import Lake
from tests.servers import KafkaBroker

TABLES = ("red", "green", "blue")
PARTITIONS = 4
KEYS = 200
ANSWER_SECONDS = 60.0
# A killed run must find work, but not more than the next one can do while the producer goes on.
PAUSE_SECONDS = 0.2
ABORTED_SHARE = 0.1
# Small epochs, so that a kill finds several on their way.
CADENCE = {"commit_interval": "PT0.2S", "epoch_rows_max": 300}


class Writer(threading.Thread):
    """Produces transactions until it is stopped."""

    def __init__(self, broker: KafkaBroker, topic: str, seed: int):
        super().__init__(name="producer", daemon=True)
        self._topic = topic
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._number = 0
        self.transactions = 0
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic}
        self._producer = Producer(settings)
        self._producer.init_transactions(ANSWER_SECONDS)

    def run(self) -> None:
        """One small transaction after another."""
        while not self._ended.wait(PAUSE_SECONDS):
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
class Victim:
    """One topic, its pipeline and the lake that it fills."""

    broker: KafkaBroker
    folder: Path
    lake: Lake
    catalog: Mapping[str, str]
    name: str
    only_added: bool
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.broker.create_topic(self.name, PARTITIONS)

    def start(self, failpoint: str = "") -> Process:
        """Start the pipeline."""
        changing = {"envelope": "cdc_field", "cdc_field": "op"}
        kafka = {
            "bootstrap_servers": self.broker.bootstrap_servers,
            "topics": [self.name],
            "value": {"envelope": "none"} if self.only_added else changing,
        }
        route = {"field": "table", "tables": {table: f"^{table}$" for table in TABLES}}
        iceberg = {"catalog": dict(self.catalog), "namespace": self.name, "route": route}
        pipeline = {"source": {"kafka": kafka}, "sink": {"iceberg": iceberg}, **CADENCE}
        file = self.folder / "pipelines.yaml"
        file.write_text(yaml.safe_dump({self.name: pipeline, "spark": SPARK}))
        return Process(["run", "--once", str(file)], failpoint)

    def run_until_killed(self, failpoint: str) -> None:
        """Run, be killed at a failpoint; a run that never comes there ends by itself."""
        ended = self.start(failpoint).wait()
        self.story.append(f"{failpoint} {'killed' if ended.exit_code == KILLED else ''}".strip())
        assert ended.exit_code in (0, KILLED), ended.stderr[-3000:]

    def finish(self) -> None:
        """Let a last run take what is left."""
        self.broker.wait_for_transactions(self.name, PARTITIONS)
        ended = self.start().wait()
        assert ended.exit_code == 0, ended.stderr[-3000:]

    def assert_equal(self) -> None:
        """The lake has what the log says: no row more, none less, none other."""
        for table in TABLES:
            wanted = Counter(self._expected(table))
            rows = self.lake.rows(f"{self.name}.{table}")
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
                "group.id": f"oracle-{self.name}",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            consumer.assign([TopicPartition(self.name, n, 0) for n in range(PARTITIONS)])
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


def play(victim: Victim, seed: int, kills: int) -> str:
    """Kill so many times at random places, then compare; returns what happened."""
    generator = random.Random(seed)
    writer = Writer(victim.broker, victim.name, seed)
    writer.start()
    try:
        for _ in range(kills):
            place = generator.choice(failpoints.PLACES)
            victim.run_until_killed(f"{place}=kill@{generator.choice([1, 1, 2, 3, 5, 8])}")
    finally:
        writer.stop()
    victim.finish()
    victim.assert_equal()
    kind = "added" if victim.only_added else "changed"
    return f"{writer.transactions} transactions, rows {kind}; {', '.join(victim.story)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill so many times in a row, ten for each topic; 1 when lake and log differ."""
    parser = argparse.ArgumentParser(description="Kill at random, then compare with the log.")
    parser.add_argument("--kills", type=int, default=50, help="how often")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first ten")
    options = parser.parse_args(arguments)
    seed = random_seed() if options.seed is None else options.seed
    say(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="icestream-kills-") as name:
        folder = Path(name)
        catalog = catalog_in(folder)
        spark = session([catalog], "local[2]")
        try:
            lake = Lake(spark, catalog)
            with KafkaBroker(folder / "kafka") as broker:
                for number, start in enumerate(range(0, options.kills, 10)):
                    begun = time.monotonic()
                    kills = min(10, options.kills - start)
                    victim = Victim(
                        broker=broker,
                        folder=folder / str(number),
                        lake=lake,
                        catalog=catalog,
                        name=f"kills{number}",
                        only_added=(seed + number) % 2 == 0,
                    )
                    line = play(victim, seed + number, kills)
                    seconds = time.monotonic() - begun
                    say(f"{start + kills} kills, seed {seed + number}: {seconds:.0f} s, {line}")
        except (AssertionError, IcestreamError) as error:
            again = "python -m tests.faults.kafka_kills --kills 10 --seed"
            say(f"{error}\nagain: {again} {seed + number}")
            return 1
        finally:
            spark.stop()
    say(f"{options.kills} kills, lake and log equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
