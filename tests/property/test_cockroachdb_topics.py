"""Random changefeeds over topics: every epoch holds exactly the changes that the log says."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from icestream.change import fold
from icestream.epoch import Epoch
from icestream.errors import SourceUnavailable
from icestream.frontier import START, Frontier
from icestream.sources.cockroachdb import index
from icestream.sources.cockroachdb.hlc import resolved_of
from icestream.sources.cockroachdb.topics import CockroachdbTopics
from tests.changefeed import Feed, Hlc, MemoryTopics, RandomChangefeed, published
from tests.examples import examples

TABLES = ("one", "two")
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "n", LongType(), required=False),
    identifier_field_ids=[1],
).model_dump_json()
seeds = st.integers(0, 2**32)


class MemoryFeed(RandomChangefeed):
    """A random changefeed into topics in memory."""

    def __init__(self, generator: random.Random, memory: MemoryTopics):
        feed = Feed(send=memory.send, partitions=dict(memory.counts))
        super().__init__(generator, feed, memory.counts.__setitem__)
        self.memory = memory
        self.reached: Hlc = (0, 0)

    def complete(self) -> list[Hlc]:
        """The timestamps that have come everywhere, by the definition."""
        lasts, named = [], set()
        for table, count in self.memory.counts.items():
            for number in range(count):
                log = self.memory.logs[table, number]
                said = [json.loads(v or b"") for k, v in log if k is None]
                texts = [each.get("__crdb__", each)["resolved"] for each in said]
                times = [tuple(map(int, text.split("."))) for text in texts]
                lasts.append(max(times, default=(0, 0)))
                named.update(times)
        # A partition that is new holds back what comes, not what was.
        self.reached = max(self.reached, min(lasts))
        # One that no partition was sent, because later ones came first, is nobody's boundary.
        return [at for at in self.feed.resolved if at <= self.reached and at in named]


class Lake:
    """Applies epochs to tables that are dictionaries."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Any, dict[str, Any]]] = {table: {} for table in TABLES}
        self.snapshots: list[tuple[str, Hlc, dict[Any, dict[str, Any]]]] = []

    def take(self, source: CockroachdbTopics, epoch: Epoch) -> None:
        """Read an epoch and apply what it does to each table."""
        at = resolved_of(epoch.upper)
        for table in TABLES:
            splits = [split for split in source.plan(epoch).parts if split.table == table]
            batches = [batch for split in splits for batch in split.read(SCHEMA, ["id"])]
            rows = self.tables[table]
            changed = False
            folded = [fold(batch, ["id"]) for batch in _together(batches)]
            for each in folded:
                changed = True
                for key in each.deleted.column("id").to_pylist():
                    rows.pop((key,), None)
                for row in each.kept.to_pylist():
                    rows[row["id"],] = {name: row[name] for name in ("id", "n")}
            if changed:
                self.snapshots.append((table, at, dict(rows)))


@contextmanager
def runs_of(rows: int) -> Iterator[None]:
    """Let the index sum up so many rows at a time."""
    before, index.RUN_ROWS = index.RUN_ROWS, rows
    try:
        yield
    finally:
        index.RUN_ROWS = before


def available(source: CockroachdbTopics, lower: Frontier) -> list[Frontier]:
    """The next boundaries; none as long as there are rows and no timestamp anywhere."""
    try:
        return list(source.available(lower))
    except SourceUnavailable:
        return []


def _together(batches: list[Any]) -> list[Any]:
    whole = [pa.concat_tables(batches, promote_options="permissive")] if batches else []
    return [each for each in whole if each.num_rows]


@examples(40)
@given(seeds)
def test_every_epoch_of_a_random_changefeed_holds_exactly_what_its_log_says(seed):
    """C2, C3, C4: late rows, duplicates, lagging markers, new partitions, restarts in between."""
    generator = random.Random(seed)
    memory = MemoryTopics(one=generator.randrange(1, 4), two=1)
    memory.batch_records = generator.randrange(1, 20)
    feed, lake = MemoryFeed(generator, memory), Lake()
    with runs_of(generator.choice([1, 2, 3, 1024])), memory.in_place_of_kafka():
        source, lower, number = memory.source(), START, 0
        for _ in range(generator.randrange(1, 12)):
            for _ in range(generator.randrange(30)):
                feed.step()
            if generator.random() < 0.4:
                # Nothing but the frontier survives a restart.
                source, lower = memory.source(), Frontier.from_json(lower.to_json())
            for upper in available(source, lower):
                number += 1
                epoch = Epoch(number=number, lower=lower, upper=upper)
                lake.take(source, epoch)
                lower = upper
            complete = feed.complete()
            assert resolved_of(lower) == (complete[-1] if complete else None)
            for table in TABLES:
                found = [(at, rows) for name, at, rows in lake.snapshots if name == table]
                times = published(feed.feed.changes, table, complete)
                assert [at for at, _ in found] == times
                for at, rows in found:
                    assert rows == feed.feed.expected(table, at)


@examples(40)
@given(seeds)
def test_an_epoch_read_again_by_anyone_gives_the_same_changes(seed):
    """C2, E3: a source that knows nothing but the epoch, however much has come meanwhile."""
    generator = random.Random(seed)
    memory = MemoryTopics(one=2, two=1)
    feed = MemoryFeed(generator, memory)
    with memory.in_place_of_kafka():
        source, lower, number = memory.source(), START, 0
        for _ in range(4):
            for _ in range(25):
                feed.step()
            for upper in available(source, lower):
                number += 1
                epoch = Epoch(number=number, lower=lower, upper=upper)
                one, other = Lake(), Lake()
                one.take(source, epoch)
                for _ in range(10):
                    feed.step()
                other.take(memory.source(), epoch)
                assert one.snapshots == other.snapshots
                lower = upper
