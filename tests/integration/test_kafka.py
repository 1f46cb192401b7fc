"""Kafka topics on a real broker become Iceberg tables; Spark SQL and the log itself are asked."""

import contextlib
import hashlib
import io
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal

import fastavro
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from icestream import failpoints, patience
from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    HistoryLost,
    SchemaRejected,
    SourceUnavailable,
    TargetUnavailable,
)
from icestream.frontier import Frontier
from icestream.pipeline import Pipeline
from icestream.sources import Purpose
from tests.examples import with_more
from tests.integration.pipelines import Document, Shell, assert_refused
from tests.integration.topics import NAMESPACE, PIPELINE, created, deleted, updated
from tests.registry import StandInRegistry
from tests.running import running, wait_for_state
from tests.servers import wait_until

DEBEZIUM = {"value": {"format": "json", "envelope": "debezium"}}
UPSERT = {"value": {"envelope": "upsert"}}


@pytest.mark.spark_jobs
def test_a_debezium_topic_becomes_a_table(topics):
    """K1, K3, K7: inserts, updates, deletes, tombstones; the table is made from the records."""
    topics.create("orders", 3)
    topics.send("orders", [created(n, name=f"row {n}", price=n + 0.5) for n in range(10)])
    document = topics.document({"topics": ["orders"], **DEBEZIUM})
    topics.run(document)
    assert [row["id"] for row in topics.rows("orders", "id")] == list(range(10))
    topics.send("orders", [updated(3, name="new", price=1.0), deleted(4), ({"id": 5}, None)])
    topics.send("orders", [created(11, name=None, price=None)])
    topics.run(document)
    rows = {row["id"]: row for row in topics.rows("orders")}
    assert sorted(rows) == [0, 1, 2, 3, 6, 7, 8, 9, 11]
    assert rows[3] == {"id": 3, "name": "new", "price": 1.0}
    assert rows[11] == {"id": 11, "name": None, "price": None}
    assert len(topics.epochs("orders")) == 2
    identifiers = topics.lake.sql(f"DESCRIBE EXTENDED {topics.lake.table('shop.orders')}")
    assert any("id" in str(row) for row in identifiers)


def test_progress_is_mirrored_in_the_consumer_group(topics):
    """K2, K5: lag tools see the group's offsets; the summary has the valid-through timestamp."""
    name = topics.create("orders", 2)
    for partition in (0, 1):
        records = [created(10 * partition + n, v=n) for n in range(5)]
        topics.send("orders", records, partition, at=1_700_000_000_000 + partition)
    topics.run(topics.document({"topics": ["orders"], **DEBEZIUM}))
    consumer = Consumer(
        {
            "bootstrap.servers": topics.broker.bootstrap_servers,
            "group.id": f"icestream-{PIPELINE}",
        }
    )
    try:
        found = consumer.committed([TopicPartition(name, n) for n in (0, 1)], timeout=30)
    finally:
        consumer.close()
    assert [partition.offset for partition in found] == [5, 5]
    summary = topics.epochs("orders")[-1]["summary"]
    assert summary["icestream.valid-through"] == "2023-11-14T22:13:20.000+00:00"


def test_a_partition_without_records_leaves_the_time_open(topics):
    """K5: nobody knows how far a partition is that never had a record."""
    topics.create("orders", 2)
    topics.send("orders", [created(1, v=1)], 0)
    topics.run(topics.document({"topics": ["orders"], **DEBEZIUM}))
    assert "icestream.valid-through" not in topics.epochs("orders")[-1]["summary"]


@pytest.mark.spark_jobs
@pytest.mark.parametrize("partitions", with_more([4], [64]))
def test_random_upserts_end_as_the_log_says(topics, partitions):
    """K1, E3: many runs over a growing log of inserts, updates and deletes."""
    topics.create("orders", partitions)
    generator = random.Random(partitions)
    document = topics.document({"topics": ["orders"], **UPSERT}, epoch_rows_max=150)
    for _ in range(3):
        records = []
        for _ in range(400):
            key = generator.randrange(200)
            row = {"id": key, "v": generator.randrange(1000)} if generator.random() < 0.8 else None
            records.append(({"id": key}, row))
        topics.send("orders", records)
        topics.run(document)
        last = {key["id"]: row for key, row in topics.log("orders", partitions)}
        expected = {key: row for key, row in last.items() if row}
        assert {row["id"]: row for row in topics.rows("orders")} == expected


def test_aborted_transactions_are_never_seen(topics):
    """K1: read_committed, also where a range ends with what was aborted."""
    topics.create("orders")
    topics.transaction("orders", [({"id": 1}, {"id": 1, "v": 1})], commit=True)
    topics.transaction("orders", [({"id": 2}, {"id": 2, "v": 2})], commit=False)
    document = topics.document({"topics": ["orders"], **UPSERT})
    topics.run(document)
    assert [row["id"] for row in topics.rows("orders")] == [1]
    topics.transaction("orders", [({"id": 3}, {"id": 3, "v": 3})], commit=True)
    topics.run(document)
    assert [row["id"] for row in topics.rows("orders", "id")] == [1, 3]


def test_partitions_and_topics_that_appear_later_are_read(topics):
    """K1: also those that a pattern matches."""
    name = topics.create("a.one")
    topics.send("a.one", [created(1, v=1)])
    pattern = name.replace("a.one", "").replace(".", r"\.") + r"a\..*"
    document = topics.document({"topic_pattern": pattern, **DEBEZIUM})
    topics.run(document)
    topics.broker.add_partitions(name, 3)
    topics.create("a.two")
    topics.send("a.one", [created(2, v=2)], partition=2)
    topics.send("a.two", [created(3, v=3)])
    topics.run(document)
    assert [row["id"] for row in topics.rows("one", "id")] == [1, 2]
    assert [row["id"] for row in topics.rows("two")] == [3]


@pytest.mark.parametrize(
    ("seen", "keyed", "rows"),
    [(True, True, 120), (False, True, 120), (False, True, 2_000_000), (True, False, 200)],
    ids=["many epochs", "grown before the start", "one epoch", "not keyed"],
)
def test_no_key_goes_back_when_its_topic_is_given_partitions(
    topics, monkeypatch, seen, keyed, rows
):
    """K10, Mend b9: keys move to other partitions while older records of them wait to be read."""
    name = topics.create("orders", 2)
    generator = random.Random(rows)
    expected: dict[int, dict[str, int]] = {}
    options = {"topics": ["orders"], **UPSERT, "keyed": keyed}
    document = topics.document(options, epoch_rows_max=rows)

    def write(version: int) -> None:
        records = []
        for number in range(300):
            key = number if number < 200 else generator.randrange(200)
            kept = generator.random() < 0.8
            row = {"id": key, "v": 1000 * version + number} if kept else None
            records.append(({"id": key}, row))
            expected.pop(key, None)
            expected.update({key: row} if row else {})
        topics.send("orders", records)

    write(0)
    if seen:
        topics.run(document)
        write(1)
    for version, partitions in ((2, 5), (3, 9)):
        topics.broker.add_partitions(name, partitions)
        write(version)
    commits = 0

    def stop_at_the_second(place: str) -> None:
        nonlocal commits
        commits += place == failpoints.AFTER_COMMIT
        if commits == 2:
            commits += 1
            raise TargetUnavailable("stopped by the test")

    # A run that ends between two epochs; the next one is its restart.
    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "reach", stop_at_the_second)
        with contextlib.suppress(TargetUnavailable):
            topics.run(document)
    topics.run(document)
    assert {row["id"]: row for row in topics.rows("orders")} == expected
    assert len(topics.rows("orders")) == len(expected)
    assert (commits > 2) == (rows < 1000), "the run was stopped between two epochs"
    write(4)
    topics.run(document)
    assert {row["id"]: row for row in topics.rows("orders")} == expected


@pytest.mark.parametrize("there", [True, False], ids=["table is there", "no table"])
def test_latest_takes_all_that_comes_after_the_first_start(topics, there):
    """K10, Mend b8: also after a restart, once a table is there that can remember the start."""
    topics.create("orders", 2)
    if there:
        table = topics.lake.table("shop.orders")
        topics.lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {topics.lake.table('shop')}")
        topics.lake.sql(f"CREATE TABLE {table} (id BIGINT NOT NULL, v BIGINT) USING iceberg")
        topics.lake.sql(f"ALTER TABLE {table} SET IDENTIFIER FIELDS id")
    topics.send("orders", [({"id": n}, {"id": n, "v": 0}) for n in range(50)])
    options = {"topics": ["orders"], **UPSERT, "start": "latest"}
    named = {"tables": {topics.name("orders"): {"table": "orders"}}}
    document = topics.document(options, named, commit_interval="PT0.2S")
    if there:
        topics.run(document)
        topics.send("orders", [({"id": n}, {"id": n, "v": 1}) for n in range(100, 120)])
        topics.run(document)
        assert [row["id"] for row in topics.rows("orders", "id")] == list(range(100, 120))
    pipeline = topics.pipeline(document)
    thread = threading.Thread(target=pipeline.run)
    thread.start()
    try:
        wait_until(lambda: pipeline.health.to_json()["state"] == "running", 60, "the start")
        asked = wait_for_looks(pipeline)
        wait_until(asked, 60, "the source to be asked")
        topics.send("orders", [({"id": n}, {"id": n, "v": 2}) for n in range(200, 240)])
        wait_until(lambda: len(topics.epochs("orders")) > (2 if there else 0), 60, "an epoch")
    finally:
        pipeline.stop()
        thread.join(60)
    topics.send("orders", [({"id": n}, {"id": n, "v": 3}) for n in range(300, 310)])
    topics.run(document)
    expected = [*range(100, 120)] if there else []
    expected += [*range(200, 240), *range(300, 310)]
    assert sorted(row["id"] for row in topics.rows("orders")) == expected


def wait_for_looks(pipeline: Pipeline) -> Callable[[], bool]:
    """Tells whether the pipeline has asked its source what there is since now."""
    source, looks = pipeline._source, []
    ask = source.available

    def available(lower: Frontier, purpose: Purpose | None) -> Sequence[Frontier]:
        found = ask(lower, purpose)
        looks.append(found)
        return found

    # The pipeline shows nothing of a look that finds nothing.
    source.available = available
    return lambda: len(looks) > 0


def test_a_topic_that_was_created_anew_stops_the_pipeline(topics):
    """K6, E7: its offsets count from zero again and must not be taken for the old ones."""
    name = topics.create("orders")
    topics.send("orders", [created(n, v=n) for n in range(3)])
    document = topics.document({"topics": ["orders"], **DEBEZIUM})
    topics.run(document)
    topics.broker.delete_topic(name)
    topics.create("orders")
    topics.send("orders", [created(n, v=n) for n in range(10, 20)])
    with pytest.raises(HistoryLost, match="deleted and created anew"):
        topics.run(document)
    assert len(topics.rows("orders")) == 3
    topics.run(topics.document({"topics": ["orders"], **DEBEZIUM, "on_recreated": "continue"}))
    assert len(topics.rows("orders")) == 13


def test_retention_that_overtakes_the_frontier_stops_the_pipeline(topics):
    """E7: what is lost is said, nothing is skipped in silence."""
    name = topics.create("orders")
    topics.send("orders", [created(n, v=n) for n in range(10)])
    document = topics.document({"topics": ["orders"], **DEBEZIUM})
    topics.run(document)
    topics.send("orders", [created(n, v=n) for n in range(10, 20)])
    admin = AdminClient({"bootstrap.servers": topics.broker.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(name, 0, 15)]).values():
        future.result(30)
    with pytest.raises(HistoryLost, match="no longer has offset 10") as caught:
        topics.run(document)
    assert "5 offsets are lost" in str(caught.value)


def test_a_compacted_topic_with_gaps_is_read(topics):
    """K1: offsets that were compacted away are nobody's loss."""
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "200",
    }
    name = topics.create("orders", config=config)
    for version in range(5):
        topics.send("orders", [({"id": n}, {"id": n, "v": version}) for n in range(20)])
    consumer_settings = {"bootstrap.servers": topics.broker.bootstrap_servers, "group.id": "x"}

    def compacted() -> bool:
        topics.send("orders", [({"id": 99}, {"id": 99, "v": 0})])
        consumer = Consumer({**consumer_settings, "enable.partition.eof": True})
        consumer.assign([TopicPartition(name, 0, 0)])
        try:
            first = consumer.consume(1, timeout=10)
            return bool(first) and not first[0].error() and first[0].offset() > 0
        finally:
            consumer.close()

    wait_until(compacted, 60, "the topic to be compacted")
    topics.run(topics.document({"topics": ["orders"], **UPSERT}))
    rows = {row["id"]: row["v"] for row in topics.rows("orders")}
    assert rows == {**dict.fromkeys(range(20), 4), 99: 0}


COMPACTED = {"cleanup.policy": "compact"}
SHORT = {"delete.retention.ms": "100"}


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({**COMPACTED, **SHORT}, True),
        ({"cleanup.policy": "compact,delete", **SHORT}, True),
        (COMPACTED, False),
        (SHORT, False),
    ],
    ids=["compacted", "both", "kept for a day", "not compacted"],
)
def test_a_compacted_topic_that_is_read_too_late_is_warned_of(topics, caplog, config, warned):
    """K1, Mend b11: the broker tells how long it keeps deletes; some may have gone unread."""
    topics.create("orders", config=config)
    document = topics.document({"topics": ["orders"], **UPSERT})
    topics.send("orders", [({"id": n}, {"id": n, "v": 1}) for n in range(3)])
    topics.run(document)
    assert "later than it keeps deletes" not in caplog.text, "nothing was read before the first run"
    late = int(1000 * time.time()) - 10_000
    topics.send("orders", [({"id": n}, {"id": n, "v": 2}) for n in range(3)], at=late)
    topics.run(document)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    about = [text for text in told if "later than it keeps deletes" in text]
    assert len(about) == (1 if warned else 0)
    assert all(topics.name("orders") in text for text in about)


def test_a_key_in_two_partitions_is_ordered_by_time(topics):
    """K1: `keyed: false` re-keys by one shuffle; the newer record wins."""
    topics.create("orders", 2)
    topics.send("orders", [({"id": n}, {"id": n, "v": "new"}) for n in range(50)], 0, at=2000)
    topics.send("orders", [({"id": n}, {"id": n, "v": "old"}) for n in range(80)], 1, at=1000)
    topics.run(topics.document({"topics": ["orders"], **UPSERT, "keyed": False}))
    rows = {row["id"]: row["v"] for row in topics.rows("orders")}
    assert rows == {**dict.fromkeys(range(80), "old"), **dict.fromkeys(range(50), "new")}


def test_large_records_make_more_epochs_not_more_memory(topics):
    """E9: an epoch that turns out too large is cut shorter."""
    topics.create("orders", config={"max.message.bytes": "2000000"})
    text = "x" * 900_000
    topics.send("orders", [({"id": n}, {"id": n, "v": text}) for n in range(12)])
    topics.run(topics.document({"topics": ["orders"], **UPSERT}, epoch_bytes_max=2_000_000))
    assert [len(row["v"]) for row in topics.rows("orders")] == [900_000] * 12
    assert len(topics.epochs("orders")) >= 3


BROKEN = [
    (b'{"id": 1}', b'{"id": 1, "v": '),
    (b'{"id": 2}', b"\xff\xfe"),
    (b'{"id": 3}', b"[1]"),
    (None, b'{"id": 4, "v": 1}'),
    (b'{"id": null}', b'{"id": null, "v": 1}'),
]


@pytest.mark.parametrize("record", BROKEN, ids=["json", "utf8", "array", "no key", "null key"])
def test_a_record_that_cannot_be_taken_stops_the_pipeline(topics, record):
    """E10: by default nothing is left out; the error says where, and quotes nothing."""
    topics.create("orders")
    topics.send("orders", [({"id": 0}, {"id": 0, "v": 0}), record])
    with pytest.raises(DataRejected, match="cannot be taken") as caught:
        topics.run(topics.document({"topics": ["orders"], "keys": {}, **UPSERT}))
    assert "Partition 0, offset 1" in str(caught.value)


def test_dead_letters_are_kept_beside_the_table(topics):
    """E10, K8: position, error and payload, in the same epoch, however often it is read."""
    topics.create("orders")
    good = [({"id": n}, {"id": n, "v": n}) for n in range(10, 15)]
    topics.send("orders", [good[0], *BROKEN, *good[1:]], at=1_700_000_000_000)
    document = topics.document({"topics": ["orders"], **UPSERT}, on_error="dead_letter")
    topics.run(document)
    topics.run(document)
    assert [row["id"] for row in topics.rows("orders", "id")] == [10, 11, 12, 13, 14]
    letters = topics.rows("orders__dead_letters", "position")
    name = topics.name("orders")
    assert [row["position"] for row in letters] == [f"{name}/0/{n}" for n in range(1, 6)]
    assert [bytes(row["payload"]) for row in letters] == [value for _, value in BROKEN]
    assert [row["key"] and bytes(row["key"]) for row in letters] == [key for key, _ in BROKEN]
    assert all(row["error"] for row in letters)
    assert {str(row["at"]) for row in letters} == {"2023-11-14 22:13:20"}
    epochs = {e["summary"]["icestream.epoch"] for e in topics.epochs("orders__dead_letters")}
    assert epochs <= {e["summary"]["icestream.epoch"] for e in topics.epochs("orders")}


def test_dead_letters_alone_are_not_doubled_by_another_run(topics):
    """E10: a topic whose table never came to be is read again, its letters are not."""
    topics.create("orders")
    topics.send("orders", BROKEN)
    document = topics.document({"topics": ["orders"], **UPSERT}, on_error="dead_letter")
    topics.run(document)
    topics.send("orders", BROKEN[:1])
    topics.run(document)
    assert len(topics.rows("orders__dead_letters")) == len(BROKEN) + 1


def test_a_value_that_does_not_fit_is_a_dead_letter_too(topics):
    """K8, I11: what no safe change of the table takes."""
    topics.create("orders")
    topics.send("orders", [({"id": 1}, {"id": 1, "v": 1})])
    document = topics.document({"topics": ["orders"], **UPSERT})
    topics.run(document)
    topics.send("orders", [({"id": 2}, {"id": 2, "v": "text"}), ({"id": 3}, {"id": 3, "v": 3})])
    with pytest.raises((DataRejected, SchemaRejected)):
        topics.run(document)
    topics.run(topics.document({"topics": ["orders"], **UPSERT}, on_error="dead_letter"))
    assert [row["id"] for row in topics.rows("orders", "id")] == [1, 3]
    assert [json.loads(row["payload"])["id"] for row in topics.rows("orders__dead_letters")] == [2]


def test_a_table_without_an_epoch_takes_the_types_that_are_declared_later(topics):
    """Mend c7, I10: what was refused left an empty table behind; its key changes as well."""
    name = topics.create("orders")
    topics.send("orders", [({"id": n}, {"id": n, "v": f"text {n}", "w": 1}) for n in range(3)])

    def document(**declared: str) -> Document:
        return topics.document({"topics": ["orders"], **UPSERT, "columns": {name: declared}})

    with pytest.raises(DataRejected, match="cannot be taken"):
        topics.run(document(id="string", v="date"))
    assert topics.epochs("orders") == []
    with pytest.raises(DataRejected, match="cannot be taken"):
        topics.run(document(id="int", v="long"))
    topics.run(document())
    assert topics.rows("orders", "id") == [{"id": n, "v": f"text {n}", "w": 1} for n in range(3)]
    # From its first epoch on a table stays as it is.
    topics.send("orders", [({"id": 3}, {"id": 3, "v": "3", "w": 1})])
    topics.run(document(v="long"))
    assert [row["v"] for row in topics.rows("orders", "id")][3:] == ["3"]


def test_a_table_that_its_owner_changed_is_not_shaped_anew(topics):
    """Mend c7, I10: the other way out, changing the column, is not undone by the next run."""
    name = topics.create("orders")
    topics.send("orders", [({"id": 1}, {"id": 1, "v": "text"})])
    declared = {"topics": ["orders"], **UPSERT, "columns": {name: {"v": "date"}}}
    with pytest.raises(DataRejected, match="cannot be taken"):
        topics.run(topics.document(declared))
    table = topics.lake.table("shop.orders")
    topics.lake.sql(f"ALTER TABLE {table} DROP COLUMN v")
    topics.lake.sql(f"ALTER TABLE {table} ADD COLUMN v STRING")
    topics.run(topics.document(declared))
    assert topics.rows("orders") == [{"id": 1, "v": "text"}]


def test_letters_of_a_table_without_an_epoch_are_taken_once_a_type_is_declared(topics):
    """Mend c7, E10: all its records were refused, so its topic is read again."""
    name = topics.create("orders")
    topics.send("orders", [({"id": n}, {"id": n, "v": f"text {n}"}) for n in range(3)])
    source = {"topics": ["orders"], **UPSERT}
    declared = {**source, "columns": {name: {"v": "date"}}}
    topics.run(topics.document(declared, on_error="dead_letter"))
    assert topics.epochs("orders") == []
    assert len(topics.rows("orders__dead_letters")) == 3
    topics.pipeline(topics.document(source, on_error="dead_letter")).replay()
    assert topics.rows("orders", "id") == [{"id": n, "v": f"text {n}"} for n in range(3)]
    assert topics.rows("orders__dead_letters") == []


def test_names_that_no_table_can_have_make_letters_and_no_columns(topics):
    """K8, E14, Mend a5, d1: names that readers do not tell apart, and too many of them."""
    topics.create("orders")
    wide = {f"n{number}": number for number in range(20_000)}
    records = [
        (1, {"v": 1}),
        (2, {"V": 2}),
        (3, {"v": 3, "V": 3}),
        (4, {"a.b": 1, "a": {"b": 2}}),
        (5, {"s": {"x": 1, "X": 2}}),
        (6, wide),
        (7, dict(list(wide.items())[:5_000])),
        (8, {"v": 8, "s": {"x": 8}, "later": "text"}),
    ]
    rows = [({"id": key}, {"id": key, **row}) for key, row in records]
    options = {"topics": ["orders"], **UPSERT}
    document = topics.document(options, on_error="dead_letter")
    topics.send("orders", rows)
    topics.run(document)
    assert [row["id"] for row in topics.rows("orders", "id")] == [1, 8]
    # The table is there now, and gains no such column either.
    topics.send("orders", [*rows[1:7], ({"id": 9}, {"id": 9, "v": 9, "S": 1})])
    topics.run(document)
    found = topics.rows("orders", "id")
    assert [row["id"] for row in found] == [1, 8]
    assert sorted(found[0]) == ["id", "later", "s", "v"]
    letters = topics.rows("orders__dead_letters", "position")
    assert len(letters) == 13
    reasons = {letter["error"].partition(":")[0] for letter in letters}
    assert "columns v and V cannot be told apart by their names" in reasons
    assert any("more names than a table may have columns" in text for text in map(str, letters))
    with pytest.raises(DataRejected, match="cannot be taken"):
        topics.send("orders", [({"id": 10}, {"id": 10, "V": 1})])
        topics.run(topics.document(options))


def test_the_schema_may_change_in_the_middle_of_an_epoch(topics):
    """I11, K7: columns appear, vanish and grow wider."""
    topics.create("orders")
    topics.send("orders", [({"id": 1}, {"id": 1, "a": 1})])
    document = topics.document({"topics": ["orders"], **UPSERT})
    topics.run(document)
    topics.send("orders", [({"id": 2}, {"id": 2, "a": 2, "b": "x"})])
    topics.send("orders", [({"id": 3}, {"id": 3, "b": "y", "c": {"d": [1, 2]}})])
    numbers = [({"id": n}, {"id": n, "n": n if n < 9 else 9.5}) for n in range(4, 10)]
    topics.send("orders", numbers)
    topics.run(document)
    assert [row["n"] for row in topics.rows("orders", "id")][3:] == [4.0, 5.0, 6.0, 7.0, 8.0, 9.5]
    rows = topics.rows("orders", "id")
    assert rows[0] == {"id": 1, "a": 1, "b": None, "c": None, "n": None}
    assert rows[1] == {"id": 2, "a": 2, "b": "x", "c": None, "n": None}
    assert (rows[2]["a"], rows[2]["b"]) == (None, "y")
    assert rows[2]["c"] is not None


def test_a_table_that_exists_is_used_as_it_is(topics):
    """I10, I11: an int column grows to long, a required one becomes optional."""
    topics.lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {topics.lake.name}.{NAMESPACE}")
    topics.lake.sql(
        f"CREATE TABLE {topics.lake.table('shop.orders')} "
        "(id INT NOT NULL, v INT, w STRING NOT NULL) USING iceberg"
    )
    name = topics.create("orders")
    topics.send("orders", [({"id": 1}, {"id": 1, "v": 1, "w": "x"})])
    named = {"tables": {name: {"table": "orders"}}}
    document = topics.document({"topics": ["orders"], **UPSERT, "keys": {}}, named)
    document[PIPELINE]["sink"]["iceberg"]["equality_delete_by"] = ["id"]
    topics.run(document)
    topics.send("orders", [({"id": 2}, {"id": 2, "v": 2**40})])
    topics.run(document)
    assert topics.rows("orders", "id") == [
        {"id": 1, "v": 1, "w": "x"},
        {"id": 2, "v": 2**40, "w": None},
    ]


def test_fifty_tables_come_out_of_one_topic(topics):
    """K4: by a field that holds the table's name."""
    topics.create("all", 4)
    records = [({"id": n}, {"id": n, "table": f"t{n % 50}", "v": n}) for n in range(500)]
    topics.send("all", records)
    sink = {"route": {"field": "table"}}
    topics.run(topics.document({"topics": ["all"], **UPSERT}, sink))
    for number in range(50):
        expected = [n for n in range(500) if n % 50 == number]
        assert sorted(row["id"] for row in topics.rows(f"t{number}")) == expected


def test_records_are_routed_by_regular_expressions(topics):
    """K4: one expression per table; what matches none is not lost in silence."""
    topics.create("events")
    kinds = ["click.left", "click.right", "order", "other"]
    topics.send("events", [({"id": n}, {"id": n, "type": kind}) for n, kind in enumerate(kinds)])
    sink = {"route": {"field": "type", "tables": {"clicks": "^click", "orders": "^order"}}}
    with pytest.raises(DataRejected, match="cannot be taken"):
        topics.run(topics.document({"topics": ["events"], **UPSERT}, sink))
    dropping = {"route": {**sink["route"], "unmatched": "drop"}}
    document = topics.document({"topics": ["events"], **UPSERT}, dropping)
    topics.run(document)
    assert [row["id"] for row in topics.rows("clicks", "id")] == [0, 1]
    assert [row["id"] for row in topics.rows("orders")] == [2]
    topics.send("events", [({"id": 0}, None)])
    topics.run(document)
    assert [row["id"] for row in topics.rows("clicks", "id")] == [1]


def test_without_a_field_every_record_goes_to_every_table(topics):
    """K4."""
    topics.create("events")
    topics.send("events", [({"id": 1}, {"id": 1})])
    sink = {"route": {"tables": {"one": "", "two": ""}}}
    topics.run(topics.document({"topics": ["events"], **UPSERT}, sink))
    assert topics.rows("one") == topics.rows("two") == [{"id": 1}]


def test_records_that_only_add_are_all_kept(topics):
    """K3: without an envelope every record is a row, also twice the same."""
    topics.create("clicks", 2)
    topics.send("clicks", [(None, {"page": "a", "n": 1})] * 3)
    document = topics.document({"topics": ["clicks"]})
    topics.run(document)
    topics.send("clicks", [(None, {"page": "b", "n": 2})] * 2)
    topics.run(document)
    assert sorted(row["page"] for row in topics.rows("clicks")) == ["a", "a", "a", "b", "b"]


def test_operations_are_read_from_a_field(topics):
    """K3: `cdc_field` and a mapping of its values."""
    topics.create("orders")
    value = {
        "envelope": "cdc_field",
        "cdc_field": "_op",
        "operations": {"new": "insert", "upd": "update", "del": "delete"},
    }
    records = [("new", 1, 1), ("new", 2, 1), ("upd", 1, 2), ("del", 2, None)]
    topics.send("orders", [({"id": key}, {"_op": op, "id": key, "v": v}) for op, key, v in records])
    topics.run(topics.document({"topics": ["orders"], "value": value}))
    rows = topics.rows("orders")
    assert [(row["id"], row["v"]) for row in rows] == [(1, 2)]


def test_an_epoch_that_only_some_tables_took_is_finished(topics, monkeypatch):
    """I14, K6: each table has its own progress, and none takes the epoch twice."""
    topics.create("all", 2)
    records = [(None, {"id": n, "table": f"t{n % 3}"}) for n in range(30)]
    topics.send("all", records)
    document = topics.document({"topics": ["all"]}, {"route": {"field": "table"}})
    commits = []

    def crash(place: str) -> None:
        if place == failpoints.AFTER_SWAP:
            commits.append(place)
            if len(commits) == 5:
                raise MemoryError("the coordinator dies here")

    # A failpoint in this process: the same place as in a killed one.
    monkeypatch.setattr(failpoints, "reach", crash)
    with pytest.raises(MemoryError):
        topics.run(document)
    # From here on nothing dies.
    monkeypatch.undo()
    topics.run(document)
    for number in range(3):
        expected = [n for n in range(30) if n % 3 == number]
        assert sorted(row["id"] for row in topics.rows(f"t{number}")) == expected


def test_a_broker_that_restarts_is_waited_for(topics):
    """K6: a running pipeline goes on where it was."""
    topics.create("orders")
    topics.send("orders", [created(1, v=1)])
    document = topics.document(
        {"topics": ["orders"], **DEBEZIUM, "read_timeout": "PT5S"}, commit_interval="PT0.2S"
    )
    pipeline = topics.pipeline(document)
    with running(pipeline):
        wait_until(lambda: bool(topics.epochs("orders")), 90, "the first epoch")
        topics.broker.stop()
        topics.broker.start()
        topics.send("orders", [created(2, v=2)])
        wait_until(lambda: len(topics.rows("orders")) == 2, 300, "the second row")


def test_a_table_that_was_dropped_comes_back_whole(topics):
    """E4: what the topic still has of it is read again; other tables take nothing twice."""
    topics.create("one")
    topics.create("two")
    for topic in ("one", "two"):
        topics.send(topic, [created(n, v=n) for n in range(5)])
    document = topics.document({"topics": ["one", "two"], **DEBEZIUM})
    topics.run(document)
    topics.lake.sql(f"DROP TABLE {topics.lake.table('shop.one')}")
    topics.send("two", [created(9, v=9)])
    topics.run(document)
    assert [row["id"] for row in topics.rows("one", "id")] == list(range(5))
    assert [row["id"] for row in topics.rows("two", "id")] == [0, 1, 2, 3, 4, 9]


def test_a_key_that_nothing_tells_is_asked_for(topics):
    """K3: before a table is made."""
    topics.create("orders")
    topics.send("orders", [(None, {"id": 1, "_op": "u"})])
    value = {"envelope": "cdc_field", "cdc_field": "_op"}
    with pytest.raises((ConfigInvalid, DataRejected)):
        topics.run(topics.document({"topics": ["orders"], "value": value}))
    topics.run(
        topics.document(
            {"topics": ["orders"], "value": value, "keys": {topics.name("orders"): ["id"]}}
        )
    )
    assert [row["id"] for row in topics.rows("orders")] == [1]


def test_bad_input_gets_a_clear_error(topics, shell: Shell):
    """U3: what, where, what to do."""
    absent = topics.document({"topics": ["absent"], **DEBEZIUM})
    assert_refused(shell.run(absent), 1, topics.name("absent"))
    unknown = topics.document({"topics": ["x"], "value": {"envelope": "debezum"}})
    assert_refused(shell.run(unknown), 2, "debezium")
    wrong = topics.document({"topics": ["x"], "properties": {"no.such.setting": "1"}})
    assert_refused(shell.run(wrong), 2, "no.such.setting")


def avro(schema: dict, number: int, value: object) -> bytes:
    """A record as Confluent's serializer writes it."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return b"\0" + number.to_bytes(4, "big") + out.getvalue()


def row_schema(*more: dict) -> dict:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
    moment = {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}
    fields = [
        {"name": "id", "type": "long"},
        {"name": "price", "type": ["null", price], "default": None},
        {"name": "at", "type": moment},
        *more,
    ]
    return {"type": "record", "name": "Value", "fields": fields}


def event_schema(*more: dict) -> dict:
    return {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": ["null", row_schema(*more)], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "op", "type": "string"},
        ],
    }


@pytest.mark.spark_jobs
def test_avro_events_of_debezium_become_rows(topics):
    """K3, I11: keys too; a new schema version adds its column in the middle of an epoch."""
    topics.create("orders", 2)
    key = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
    wide = event_schema({"name": "note", "type": ["null", "string"], "default": None})
    moment = datetime(2024, 2, 29, 12, 30, 1, 5)
    micros = 1_709_209_801_000_005
    with StandInRegistry() as registry:
        key_id = registry.register("k", json.dumps(key))
        old, new = (registry.register("v", json.dumps(s)) for s in (event_schema(), wide))

        def event(number: int, schema: dict, version: int, **columns: object) -> tuple:
            row = {"id": number, "price": Decimal("12.50"), "at": micros, **columns}
            value = {"before": None, "after": row, "op": "c"}
            return avro(key, key_id, {"id": number}), avro(schema, version, value)

        gone = {"before": None, "after": None, "op": "d"}
        topics.send("orders", [event(n, event_schema(), old) for n in range(6)])
        topics.send("orders", [event(7, wide, new, note="x")])
        topics.send("orders", [(avro(key, key_id, {"id": 1}), None)])
        topics.send("orders", [(avro(key, key_id, {"id": 2}), avro(wide, new, gone))])
        source = {
            "topics": ["orders"],
            "value": {"format": "avro", "envelope": "debezium"},
            "schema_registry": {"url": registry.url},
        }
        topics.run(topics.document(source))
        topics.send("orders", [(None, b"no header")])
        with pytest.raises(DataRejected, match="cannot be taken"):
            topics.run(topics.document(source))
    rows = {row["id"]: row for row in topics.rows("orders")}
    assert sorted(rows) == [0, 3, 4, 5, 7]
    assert rows[7] == {"id": 7, "price": Decimal("12.50"), "at": moment, "note": "x"}
    assert rows[0]["note"] is None


def test_a_schema_registry_that_is_away_is_waited_for(topics):
    """E13, Mend f2: while running without end; a single run ends with the reason."""
    topics.create("orders")
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
    with StandInRegistry() as registry:
        number = registry.register("v", json.dumps(schema))
        topics.send("orders", [(None, avro(schema, number, {"id": n})) for n in range(3)])
        value = {"format": "avro", "envelope": "upsert", "key": ["id"]}
        source = {"topics": ["orders"], "value": value, "schema_registry": {"url": registry.url}}
        document = topics.document(source, commit_interval="PT0.2S")
        registry.fail_with = 503
        with pytest.raises(SourceUnavailable, match="schema registry") as ended:
            topics.run(document)
        assert ended.value.exit_code == 1
        asked = len(registry.requests)
        pipeline = topics.pipeline(document)
        with running(pipeline):
            wait_for_state(pipeline, "stalled", "schema registry")
            tries = asked + 3 * patience.TRIES_MAX
            wait_until(lambda: len(registry.requests) > tries, 240, "more tries than the bound")
            registry.fail_with = None
            wait_for_state(pipeline, "running")
            wait_until(lambda: topics.epochs("orders"), 240, "the records")
    assert [row["id"] for row in topics.rows("orders", "id")] == [0, 1, 2]


def test_protobuf_records_are_upserted_by_text_keys(topics):
    """K3: Protobuf values with plain keys."""
    topics.create("orders")
    proto = 'syntax = "proto3"; message Order { string id = 1; int64 cents = 2; bool ok = 3; }'

    def order(name: bytes, cents: int) -> bytes:
        body = b"\x0a" + bytes([len(name)]) + name + b"\x10" + bytes([cents])
        return b"\0" + number.to_bytes(4, "big") + b"\0" + body

    with StandInRegistry() as registry:
        number = registry.register("v", proto, "PROTOBUF")
        topics.send("orders", [(b"a", order(b"a", 1)), (b"b", order(b"b", 2))])
        topics.send("orders", [(b"a", order(b"a", 3)), (b"b", None)])
        value = {"format": "protobuf", "key_format": "string", "envelope": "upsert", "key": ["id"]}
        source = {"topics": ["orders"], "value": value, "schema_registry": {"url": registry.url}}
        topics.run(topics.document(source))
    assert topics.rows("orders") == [{"id": "a", "cents": 3, "ok": False}]


def test_records_are_filtered_masked_renamed_and_derived_on_their_way(topics):
    """E11, K1: rows move in and out of the filter; deletes reach them; other topics pass by."""
    name = topics.create("orders", 3)
    topics.create("plain")
    text = (
        "select id as order_id, sha2(email, 256) as email, upper(region) as region, "
        "price * 2 as twice from changes where region = 'eu'"
    )
    document = topics.document(
        {"topics": ["orders", "plain"], **DEBEZIUM},
        on_error="dead_letter",
        transform={name: text},
    )
    row = {"email": "a@b.c", "region": "eu", "price": 1.5}
    topics.send("orders", [created(n, **row) for n in range(4)])
    topics.send("orders", [created(4, **{**row, "region": "us"}), ({"id": 9}, b"no json")])
    topics.send("plain", [created(1, v=1)])
    topics.run(document)
    assert [row["order_id"] for row in topics.rows("orders", "order_id")] == [0, 1, 2, 3]
    topics.send("orders", [updated(0, **{**row, "region": "us"}), updated(4, **row), deleted(1)])
    topics.send("orders", [deleted(4), updated(2, **{**row, "price": 2}), created(5, **row)])
    # A restart, and a column that the select does not name.
    topics.send("orders", [updated(5, note="new", **row), ({"id": 3}, None)])
    topics.run(document)
    masked = hashlib.sha256(b"a@b.c").hexdigest()
    assert topics.rows("orders", "order_id") == [
        {"order_id": 2, "email": masked, "region": "EU", "twice": 4.0},
        {"order_id": 5, "email": masked, "region": "EU", "twice": 3.0},
    ]
    assert topics.rows("plain") == [{"id": 1, "v": 1}]
    assert len(topics.rows("orders__dead_letters")) == 1


def test_a_select_over_a_table_that_was_there_before_loses_no_record(topics):
    """E11, K7: what the columns at the source are is found by reading, then everything is read."""
    topics.lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {topics.lake.name}.shop")
    table = topics.lake.table("shop.orders")
    topics.lake.sql(f"CREATE TABLE {table} (id BIGINT, name STRING) USING iceberg")
    name = topics.create("orders")
    topics.send("orders", [created(1, first="a", last="b"), created(2, first="c", last="d")])
    text = "select id, concat(first, ' ', last) as name from changes"
    topics.run(
        topics.document(
            {"topics": ["orders"], **DEBEZIUM},
            {"equality_delete_by": ["id"], "tables": {name: {"table": "orders"}}},
            transform={name: text},
        )
    )
    assert topics.rows("orders") == [{"id": 1, "name": "a b"}, {"id": 2, "name": "c d"}]
