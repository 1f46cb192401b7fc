"""A changefeed's topics are cut at resolved timestamps that have come to every partition."""

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from icestream.change import AT, BEFORE, OP, SEQ, Op
from icestream.epoch import Epoch
from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    HistoryLost,
    SchemaRejected,
    SourceUnavailable,
)
from icestream.frontier import START, Frontier
from icestream.schema import Reads
from icestream.sources import Budget
from icestream.sources.cockroachdb import CockroachdbOptions, TopicsOptions, topics
from icestream.sources.cockroachdb.hlc import resolved_of
from icestream.sources.cockroachdb.topics import CockroachdbTopics
from icestream.sources.kafka.consumer import PartitionStalled
from icestream.sources.named_columns import refuse_gone
from tests.asking import EPOCH, remembered
from tests.changefeed import UNBOUNDED, Hlc, MemoryTopics, Message, hlc_text, marker, wrapped

SECOND = 1_000_000_000
NOON = 1_700_000_000 * SECOND
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "v", LongType(), required=False),
    identifier_field_ids=[1],
).model_dump_json()


@pytest.fixture
def memory() -> Iterator[MemoryTopics]:
    """A topic of two partitions, in place of a broker."""
    memory = MemoryTopics(t=2)
    with memory.in_place_of_kafka():
        yield memory


def at(seconds: int, logical: int = 0) -> Hlc:
    return NOON + seconds * SECOND, logical


def row(key: int, when: Hlc, **columns: Any) -> Message:
    return wrapped([key], {"id": key, **columns}, when)


def resolve(memory: MemoryTopics, when: Hlc, *but: int) -> None:
    """Write a resolved timestamp to all partitions, but for some."""
    for topic, count in memory.counts.items():
        for number in set(range(count)) - set(but):
            memory.send(topic, number, [marker(when)])


def resolved(frontiers: Any) -> list[Hlc | None]:
    return [resolved_of(frontier) for frontier in frontiers]


def epoch(lower: Frontier, upper: Frontier) -> Epoch:
    return Epoch(number=1, lower=lower, upper=upper)


def changes(source: CockroachdbTopics, lower: Frontier, upper: Frontier) -> list[tuple[Any, ...]]:
    """Key, value and timestamp of all changes of an epoch, in order."""
    found = []
    for split in source.plan(epoch(lower, upper)).parts:
        # Workers get it by way of pickle.
        for batch in pickle.loads(pickle.dumps(split)).read(SCHEMA, ["id"]):
            for each in batch.to_pylist():
                value = each.get("v") if each[OP] == Op.UPSERT else "gone"
                found.append((each["id"], value, (each[AT], each[SEQ])))
    return sorted(found, key=str)


def test_a_timestamp_is_complete_when_every_partition_has_it_or_a_later_one(memory):
    """C4: the minimum over partitions of the last one seen."""
    source = memory.source()
    memory.send("t", 0, [row(1, at(1), v=1), marker(at(2)), row(1, at(3), v=3), marker(at(4))])
    memory.send("t", 1, [row(2, at(1), v=1), marker(at(2)), row(2, at(3), v=3)])
    (first,) = source.available(START)
    assert resolved_of(first) == at(2)
    assert changes(source, START, first) == [(1, 1, at(1)), (2, 1, at(1))]
    assert source.available(first) == []
    memory.send("t", 1, [marker(at(5))])
    (second,) = source.available(first)
    assert resolved_of(second) == at(4)
    assert changes(source, first, second) == [(1, 3, at(3)), (2, 3, at(3))]


def test_an_epoch_begins_where_something_later_may_stand(memory):
    """C2: rows that came before the marker of an earlier timestamp; others are not read again."""
    memory.send("t", 0, [row(n, at(1), v=n) for n in range(5)])
    memory.send("t", 0, [marker(at(1)), row(9, at(4), v=9), row(8, at(2), v=8), marker(at(3))])
    resolve(memory, at(3), 0)
    memory.send("t", 0, [row(7, at(4), v=7), marker(at(5))])
    resolve(memory, at(5), 0)
    source = memory.source()
    uppers = source.available(START)
    assert resolved(uppers) == [at(1), at(3), at(5)]
    assert [upper["t 0 id"] for upper in uppers] == [(6, 6, 0), (9, 6, 0), (11, 11, 0)]
    assert changes(source, uppers[0], uppers[1]) == [(8, 8, at(2))]
    memory.reads.clear()
    assert changes(source, uppers[1], uppers[2]) == [(7, 7, at(4)), (9, 9, at(4))]
    assert [(each.start, each.end) for each in memory.reads] == [(6, 10)]


def test_a_row_without_a_column_that_a_select_names_is_refused(memory):
    """E11, C5, Mend h2: in topics as in files."""
    memory.send("t", 0, [row(1, at(1), v=1), row(2, at(1)), marker(at(2))])
    resolve(memory, at(2), 0)
    source = memory.source()
    (upper,) = source.available(START)
    named = Reads(columns=frozenset(["id", "v"]), named=frozenset(["id", "v"]))
    with pytest.raises(SchemaRejected, match="t reads column v, which"):
        [list(s.read(SCHEMA, ["id"], named)) for s in source.plan(epoch(START, upper)).parts]


@pytest.mark.parametrize("lacking_at, refused", [(2, True), (1, False)])
def test_partitions_of_the_first_epoch_are_held_against_each_other(memory, lacking_at, refused):
    """E11, C5, Mend h2: a column was dropped, or added, between rows of two partitions."""
    with_at = 3 - lacking_at
    memory.send("t", 0, [row(1, at(with_at), v=1)])
    memory.send("t", 1, [row(2, at(lacking_at))])
    resolve(memory, at(3))
    source = memory.source(split_bytes=1)
    (upper,) = source.available(START)
    names = frozenset(["id", "v"])
    splits = source.plan(epoch(START, upper)).parts
    for split in splits:
        assert list(split.read(SCHEMA, ["id"], Reads(columns=names, named=names, beginning=True)))
    assert len(splits) == 2
    seen = [pickle.loads(pickle.dumps(split.columns_seen())) for split in splits]
    if not refused:
        refuse_gone(seen)
        return
    with pytest.raises(SchemaRejected, match="t reads column v, which"):
        refuse_gone(seen)


def test_a_restart_needs_nothing_but_the_frontier(memory):
    """C2, E3: also of a timestamp that a partition has only by way of a later one."""
    memory.send("t", 0, [row(1, at(1), v=1), marker(at(2)), row(1, at(3), v=3), marker(at(4))])
    memory.send("t", 1, [row(2, at(3), v=3), row(2, at(9), v=9), marker(at(4))])
    one = memory.source()
    first, second = one.available(START)
    assert resolved([first, second]) == [at(2), at(4)]
    other = memory.source()
    assert other.available(Frontier.from_json(first.to_json())) == [second]
    assert changes(other, first, second) == changes(one, first, second)


def test_idle_time_costs_one_epoch_however_many_timestamps_it_has(memory):
    """C2: those that bring no row are passed over, and nothing is read for them."""
    source = memory.source()
    for second in range(50):
        resolve(memory, at(second))
    (idle,) = source.available(START)
    assert resolved_of(idle) == at(49)
    assert source.plan(epoch(START, idle)).parts == []
    for second in range(50, 100):
        if second == 70:
            memory.send("t", 1, [row(1, at(second), v=1)])
        resolve(memory, at(second))
    busy, idle_again = source.available(idle)
    assert resolved([busy, idle_again]) == [at(70), at(99)]
    assert changes(source, idle, busy) == [(1, 1, at(70))]


def test_markers_of_a_feed_that_was_started_again_do_not_lead_back(memory):
    """C3: it repeats rows and earlier timestamps; both change nothing."""
    source = memory.source()
    memory.send("t", 0, [row(1, at(1), v=1), row(1, at(3), v=3)])
    resolve(memory, at(4))
    (first,) = source.available(START)
    memory.send("t", 0, [row(1, at(1), v=1), marker(at(2)), row(1, at(5), v=5)])
    assert source.available(first) == []
    resolve(memory, at(6))
    (second,) = source.available(first)
    assert changes(source, first, second) == [(1, 5, at(5))]


def test_a_schema_change_boundary_is_a_timestamp_like_any_other(memory):
    """C3, C5: its logical part is the largest there is, and the backfill follows one tick later."""
    before = (NOON, 2147483647)
    memory.send("t", 0, [row(1, (NOON, 5), v=1)])
    resolve(memory, before)
    memory.send("t", 0, [row(1, (NOON + 1, 0), v=2)])
    resolve(memory, (NOON + 1, 0))
    source = memory.source()
    first, second = source.available(START)
    assert resolved([first, second]) == [before, (NOON + 1, 0)]
    assert changes(source, START, first) == [(1, 1, (NOON, 5))]
    assert changes(source, first, second) == [(1, 2, (NOON + 1, 0))]
    # The scan's rows are exactly at the timestamp: they must not be read again.
    assert second["t 0 id"] == (4, 4, 0)


def test_a_partition_without_a_timestamp_holds_all_back_and_is_named(memory):
    """C4, U1: until the changefeed has noticed it."""
    source = memory.source()
    resolve(memory, at(1))
    (first,) = source.available(START)
    assert source.standing(START).trouble is None
    memory.counts["t"] = 3
    resolve(memory, at(2), 2)
    memory.send("t", 2, [row(1, at(3), v=3)])
    assert source.available(first) == []
    assert "partition 2 of topic t has no resolved timestamp" in str(source.standing(START).trouble)
    resolve(memory, at(4))
    (second,) = source.available(first)
    assert source.standing(START).trouble is None
    assert resolved_of(second) == at(4)
    assert changes(source, first, second) == [(1, 3, at(3))]


def test_a_partition_that_appears_while_markers_are_looked_for_is_not_passed_over(memory):
    """C4: rows that a marker speaks of may be in it."""
    memory.send("t", 0, [marker(at(2))])
    memory.send("t", 1, [marker(at(2))])

    def index(tasks):
        found = [task.run() for task in tasks]
        if memory.counts["t"] == 2:
            memory.counts["t"] = 3
            memory.send("t", 2, [row(1, at(1), v=1)])
        return found

    options = CockroachdbOptions(kafka=TopicsOptions(bootstrap_servers="x:1", topics=["t"]))
    source = CockroachdbTopics(options, "p", index, lambda: 2, UNBOUNDED)
    assert source.available(START) == []
    assert source.standing(START).trouble is not None
    resolve(memory, at(3))
    upper = source.available(START)[0]
    assert changes(source, START, upper) == [(1, 1, at(1))]


def test_rows_without_any_timestamp_are_refused_with_the_statement_to_use(memory):
    """C4: and topics without anything are only empty."""
    source = memory.source()
    assert source.available(START) == []
    memory.send("t", 0, [row(1, at(1), v=1)])
    with pytest.raises(SourceUnavailable, match="WITH updated, resolved"):
        source.available(START)


def test_a_new_topic_is_taken_whole_and_a_new_partition_is_not(memory):
    """C2: a table's first scan may be of a time that has passed; a repeated row is old."""
    source = memory.source()
    memory.send("t", 0, [row(1, at(1), v=1), row(1, at(4), v=4)])
    resolve(memory, at(5))
    (first,) = source.available(START)
    memory.counts |= {"t": 3, "late": 1}
    memory.ids["late"] = "x"
    memory.send("t", 2, [row(1, at(1), v=1)])
    memory.send("late", 0, [row(1, at(2), v=2)])
    resolve(memory, at(6))
    (second,) = source.available(first)
    assert changes(source, first, second) == [(1, 2, at(2))]
    assert source.resume(remembered(durable=first)).behind == {"t": START}


def test_the_index_runs_ahead_only_so_far(memory, monkeypatch):
    """E9: what it remembers is bounded, and a far marker is found all the same."""
    # A real bound would take millions of records to reach.
    monkeypatch.setattr(topics, "RECORDS_AHEAD", 10)
    monkeypatch.setattr(topics, "INDEX_RECORDS", 3)
    memory.send("t", 0, [row(n, at(1), v=n) for n in range(40)])
    resolve(memory, at(2))
    memory.send("t", 0, [row(n, at(3), v=n) for n in range(40)])
    resolve(memory, at(4))
    source = memory.source()
    (first,) = source.available(START)
    assert resolved_of(first) == at(2)
    assert max(each.end for each in memory.reads) < 60
    assert max(each.end - each.start for each in memory.reads) <= 3
    assert not source.standing(first).caught_up
    (second,) = source.available(first)
    assert len(changes(source, first, second)) == 40
    assert source.standing(second).caught_up


def test_a_single_run_ends_at_what_was_complete_when_it_began(memory):
    """U2: although more keeps coming."""
    source = memory.source()
    resolve(memory, at(1))
    memory.send("t", 0, [marker(at(2))])
    (first,) = source.available(START)
    resolve(memory, at(3))
    assert source.standing(first).caught_up


def test_splits_are_of_bounded_size_and_of_one_table(memory):
    """E9: cut where runs of rows end."""
    memory.batch_records = 3
    memory.send("t", 0, [row(n, at(1), v=n) for n in range(9)])
    resolve(memory, at(2))
    size = len(row(1, at(1), v=1)[1])
    source = memory.source(split_bytes=3 * size)
    (upper,) = source.available(START)
    splits = source.plan(epoch(START, upper)).parts
    ranges = [(each.start, each.end) for split in splits for each in split.ranges]
    assert sorted(ranges) == [(0, 3), (3, 6), (6, 9)]
    assert [split.tables for split in splits] == [("t",)] * 3
    assert len(changes(source, START, upper)) == 9


def test_thinned_timestamps_keep_all_rows(memory):
    """C2: `resolved_every`, and an end before it when there are bytes enough."""
    for second in range(1, 12):
        memory.send("t", 0, [row(second, at(second), v=second)])
        resolve(memory, at(second))
    source = memory.source(resolved_every=5.0)
    uppers = source.available(START)
    assert resolved(uppers) == [at(1), at(6), at(11)]
    found = [changes(source, *both) for both in zip([START, *uppers], uppers, strict=False)]
    assert [len(each) for each in found] == [1, 5, 5]
    size = len(row(1, at(1), v=1)[1])
    many = memory.source(resolved_every=5.0)
    many._budget = Budget(rows=100, bytes=2 * size)
    assert resolved(many.available(START)) == [at(1), at(3), at(5), at(7), at(9), at(11)]


def test_a_backlog_is_thinned_as_if_it_had_come_slowly(memory, monkeypatch):
    """C2, Mend c10: however little of it is looked at in one go; and none of it waits."""
    # A real bound would take millions of records to reach.
    monkeypatch.setattr(topics, "RECORDS_AHEAD", 4)
    for second in range(1, 12):
        memory.send("t", 0, [row(second, at(second), v=second)])
        resolve(memory, at(second))
    source, lower, found = memory.source(resolved_every=5.0), START, []
    while uppers := source.available(lower):
        assert source.backlog(lower) == (resolved(uppers)[-1] < at(11))
        found += resolved(uppers)
        lower = uppers[-1]
    assert found == [at(1), at(6), at(11)]


def test_what_is_gone_is_refused(memory):
    """E7: by retention, by another topic of the name, by a broker that lost its tail."""
    source = memory.source()
    memory.send("t", 0, [row(1, at(5), v=1)])
    resolve(memory, at(1))
    memory.send("t", 0, [row(1, at(6), v=1)])
    resolve(memory, at(2))
    first, second = memory.source().available(START)[0], memory.source().available(START)[-1]
    assert first["t 0 id"] == (4, 0, 0)
    memory.earliest["t", 0] = 1
    for refused in (source.verify, source.available):
        with pytest.raises(HistoryLost, match="no longer has offset 0") as caught:
            refused(second)
        assert "1 offsets are lost" in str(caught.value)
    memory.earliest["t", 0] = 0
    del memory.logs["t", 0][2:]
    with pytest.raises(HistoryLost, match="ends at offset 2"):
        source.available(second)
    memory.ids["t"] = "other"
    with pytest.raises(HistoryLost, match="created anew"):
        source.available(second)


def test_a_first_epoch_is_read_again_from_where_it_began_or_not_at_all(memory):
    """E7: what retention took away meanwhile may be part of what only some tables have."""
    memory.send("t", 0, [row(1, at(1), v=1), row(2, at(1), v=2)])
    resolve(memory, at(2))
    (upper,) = memory.source().available(START)
    memory.earliest["t", 0] = 1
    source = memory.source()
    source.available(START)
    with pytest.raises(HistoryLost):
        changes(source, START, upper)


def test_a_stalled_partition_is_tried_again_later(memory):
    """E5, U1: without it nothing is complete; the run does not spin, and shows it."""
    source = memory.source()
    memory.send("t", 0, [row(1, at(1), v=1)])
    resolve(memory, at(2))
    assert source.available(START)
    source.give_up(PartitionStalled("t", 0))
    assert source.available(START) == []
    assert "partition 0 of topic t" in str(source.standing(START).trouble)
    source.was_read(EPOCH, ["t"])
    assert source.standing(START).trouble is None
    assert source.available(START)


def test_progress_is_shown_in_the_feeds_own_words(memory):
    """C6, U1: the resolved timestamp, the mirror in the consumer group, the lag."""
    source = memory.source()
    memory.send("t", 0, [row(1, at(1), v=1)])
    resolve(memory, at(2))
    (upper,) = source.available(START)
    resolve(memory, at(5))
    source.available(upper)
    assert source.standing(upper).position == hlc_text(at(2))
    assert source.was_read(epoch(START, upper), [])["crdb.resolved_hlc"] == hlc_text(at(2))
    assert source.standing(upper).lag_seconds == 3.0
    source.ack(upper)
    assert memory.mirrored == {"icestream-p": {("t", 0): 2, ("t", 1): 1}}


def test_tables_and_their_shapes_come_from_topics_and_rows(memory):
    """C5: a key that one row leaves open is settled by another, in whatever partition."""
    memory.send("t", 0, [row(1, at(1), v=1), wrapped([3], None, at(1))])
    memory.send("t", 1, [row(2, at(1), v=5, note="x")])
    resolve(memory, at(2))
    source = memory.source()
    assert source.tables() == ["t"]
    (upper,) = source.available(START)
    assert source.shape("t") is None
    source.plan(epoch(START, upper))
    shape = source.shape("t")
    assert [(c.name, c.type) for c in shape.columns] == [
        ("id", LongType()),
        ("note", StringType()),
        ("v", LongType()),
    ]
    assert shape.key == ["id"]


def test_a_table_that_is_only_deleted_from_has_no_shape_yet(memory):
    """C5: until rows come; they count whichever epoch they are of."""
    source = memory.source()
    memory.send("t", 0, [wrapped([3], None, at(1))])
    resolve(memory, at(2))
    (first,) = source.available(START)
    source.plan(epoch(START, first))
    assert source.shape("t") is None
    memory.send("t", 0, [row(4, at(3), v=1)])
    resolve(memory, at(4))
    (second,) = source.available(first)
    source.plan(epoch(first, second))
    assert source.shape("t").key == ["id"]


def test_a_record_that_is_refused_later_does_not_keep_a_table_from_being_made(memory):
    """E5: epochs before it are written, although they are planned together."""
    memory.send("t", 0, [row(1, at(1), v=7)])
    resolve(memory, at(2))
    memory.send("t", 0, [(b"[1]", b"{")])
    resolve(memory, at(3))
    source = memory.source()
    first, second = source.available(START)
    source.plan(epoch(START, first))
    source.plan(epoch(first, second))
    assert source.shape("t").key == ["id"]


def test_a_key_that_cannot_be_told_is_asked_for(memory):
    """C5: and one that is named is believed; a text is never taken for a number."""
    memory.send("t", 0, [row(1, at(1), v=1, text="1")])
    resolve(memory, at(2))
    source = memory.source()
    source.plan(epoch(START, source.available(START)[0]))
    with pytest.raises(ConfigInvalid, match="equals the columns id, v") as caught:
        source.shape("t")
    assert "text" not in str(caught.value)
    with pytest.raises(ConfigInvalid, match="cannot tell which columns are the key"):
        source.shape("t")
    told = memory.source(keys={"t": ["v"]})
    told.plan(epoch(START, told.available(START)[0]))
    assert told.shape("t").key == ["v"]


def test_rows_before_the_change_are_taken_with_diff(memory):
    """C5: `diff` adds the row as it was."""
    before = {"id": 1, "v": 1}
    memory.send("t", 0, [wrapped([1], {"id": 1, "v": 2}, at(1), before=before)])
    resolve(memory, at(2))
    source = memory.source()
    (split,) = source.plan(epoch(START, source.available(START)[0])).parts
    (batch,) = split.read(SCHEMA, ["id"])
    assert batch.column(BEFORE).to_pylist() == [before]


@pytest.mark.parametrize("schema", [False, True])
def test_the_enriched_envelope_has_its_time_and_key_elsewhere(memory, schema):
    """C5: `source.ts_hlc` counts, never `ts_ns`; the key is an object."""

    def enriched(key, after, when, op):
        told = {"ts_hlc": hlc_text(when), "ts_ns": when[0], "primary_keys": ["id"]}
        payload = {"after": after, "op": op, "source": told, "ts_ns": NOON + 77}
        parts = [{"id": key}, payload]
        if schema:
            parts = [{"payload": part, "schema": {"type": "struct"}} for part in parts]
        return tuple(json.dumps(part).encode() for part in parts)

    memory.send("t", 0, [enriched(1, {"id": 1, "v": 1}, at(1), "c"), enriched(2, None, at(1), "d")])
    resolve(memory, at(2))
    source = memory.source()
    (upper,) = source.available(START)
    assert changes(source, START, upper) == [(1, 1, at(1)), (2, "gone", at(1))]
    assert source.shape("t").key == ["id"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ((b"[1]", b'{"after": '), "offset 2"),
        ((b"[1", wrapped([1], {"id": 1}, at(2))[1]), "in the key"),
        ((b"[1]", b"17"), "no `updated` timestamp"),
        ((b"[1]", None), "the record has no value"),
        ((b"[1]", b'{"id": 1, "v": 1}'), "no `updated` timestamp"),
        ((None, wrapped([1], {"id": 1}, at(2))[1]), "the row has no key"),
        ((b"[1]", b'{"after": {"id": 1}, "updated": "yesterday"}'), "no `updated` timestamp"),
    ],
)
def test_what_is_no_row_is_refused_where_it_stands(memory, message, why):
    """C5, E5: the epoch that would pass over it stops; those before it do not."""
    memory.send("t", 0, [row(5, at(1), v=5), marker(at(1)), message])
    resolve(memory, at(1), 0)
    resolve(memory, at(3))
    source = memory.source()
    first, second = source.available(START)
    assert changes(source, START, first) == [(5, 5, at(1))]
    with pytest.raises(DataRejected, match="offset 2") as caught:
        changes(source, first, second)
    assert why in str(caught.value)


def test_a_message_that_tells_no_state_is_not_a_delete(memory):
    """C5: neither a row nor null stands under `after`."""
    lost = b'{"updated": "%s", "topic": "t"}' % hlc_text(at(1)).encode()
    memory.send("t", 0, [row(1, at(1), v=1), (b"[2]", lost)])
    resolve(memory, at(2))
    source = memory.source()
    with pytest.raises(DataRejected, match="none of the envelopes"):
        changes(source, START, source.available(START)[0])


def test_rows_are_not_deleted_by_other_columns_than_their_key(memory):
    """C5: a delete tells nothing else."""
    memory.send("t", 0, [row(1, at(1), v=1)])
    resolve(memory, at(2))
    source = memory.source(keys={"t": ["id"]})
    (split,) = source.plan(epoch(START, source.available(START)[0])).parts
    with pytest.raises(ConfigInvalid, match="cannot be deleted by v"):
        list(split.read(SCHEMA, ["v"]))


def test_trouble_that_an_epoch_takes_away_meanwhile():
    """E5, Mend c8: epochs tell what they have read while the loop asks what holds it back."""

    class Reading(CockroachdbTopics):
        """Whenever it has been looked at, an epoch has read something."""

        @property
        def _stalled(self) -> Any:
            found, self._kept = self.__dict__.get("_kept"), None
            return found

        @_stalled.setter
        def _stalled(self, found: Any) -> None:
            self._kept = found

    options = CockroachdbOptions(kafka=TopicsOptions(bootstrap_servers="x:1", topics=["t"]))
    source = Reading(options, "p", lambda tasks: [], 2, UNBOUNDED)
    lost = PartitionStalled("t", 0)
    source.give_up(lost)
    assert source.standing(START).trouble is lost
    assert source.standing(START).trouble is None


# Topics that were left out


def test_a_topic_that_was_left_out_for_a_while_comes_with_what_came_meanwhile(memory):
    """C8, Mend f2: its rows are new from where it was left, not from where the others stand."""
    memory.counts["u"], memory.ids["u"] = 1, "y"
    memory.send("u", 0, [row(1, at(1), v=1), row(2, at(7), v=7)])
    resolve(memory, at(5))
    (first,) = memory.source().available(START)
    memory.send("t", 0, [row(3, at(8), v=8)])
    memory.send("u", 0, [row(4, at(9), v=9)])
    resolve(memory, at(10))
    without = memory.source(tables=["t"])
    (second,) = without.available(first)
    # The row of 7 stands before the marker of 5: a table that is left out must not get it alone.
    assert changes(without, first, second) == [(3, 8, at(8))]
    memory.send("u", 0, [row(5, at(11), v=11)])
    resolve(memory, at(15))
    again = memory.source()
    (third,) = again.available(Frontier.from_json(json.loads(json.dumps(second.to_json()))))
    assert changes(again, second, third) == [(2, 7, at(7)), (4, 9, at(9)), (5, 11, at(11))]
    resolve(memory, at(20))
    (fourth,) = again.available(third)
    assert changes(again, third, fourth) == []


def test_a_topic_that_was_left_out_while_its_records_went_is_history_lost(memory):
    """C8, Mend f2: what it lacks is known by its own offsets."""
    memory.counts["u"], memory.ids["u"] = 1, "y"
    memory.send("u", 0, [row(1, at(1), v=1)])
    resolve(memory, at(5))
    (first,) = memory.source().available(START)
    memory.send("u", 0, [row(2, at(8), v=8)])
    resolve(memory, at(10))
    (second,) = memory.source(tables=["t"]).available(first)
    memory.earliest["u", 0] = 3
    with pytest.raises(HistoryLost, match="no longer has offset 2"):
        memory.source().available(second)
