"""The Kafka source cuts topics into epochs, and refuses what is no longer there."""

import pickle

import pyarrow as pa
import pytest

from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, DataRejected, HistoryLost, SourceUnavailable
from icestream.formats.options import ValueOptions
from icestream.frontier import START, Frontier
from icestream.iceberg.progress import VALID_THROUGH
from icestream.names import TableNames
from icestream.schema import TableShape
from icestream.sources import Budget, CatchUp, Finish
from icestream.sources.kafka import topics
from icestream.sources.kafka.boundaries import EPOCHS_AHEAD
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.consumer import PartitionStalled, Range
from icestream.sources.kafka.route import Route
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.source import KafkaOptions, KafkaSource
from icestream.sources.kafka.split import Keys, RangeRead, RangesTooLarge, Reading
from tests.asking import EPOCH, remembered


class FakeCluster:
    """What a cluster says, as a test sets it."""

    def __init__(self):
        self.ids = {"t": "one"}
        self.ends = {("t", 0): (0, 10), ("t", 1): (0, 10)}
        self.committed = {}
        self.deletes_kept = None
        self.trouble = None

    def topics(self, names, pattern):
        return {
            name: Topic(name=name, id=id_, partitions=sum(t == name for t, _ in self.ends))
            for name, id_ in self.ids.items()
        }

    def bounds(self, partitions):
        return {partition: self.ends[partition] for partition in partitions}

    def stable_ends(self, partitions):
        if self.trouble:
            raise self.trouble
        return {partition: self.ends[partition][1] for partition in partitions}

    def delete_retention(self, topics):
        return {topic: self.deletes_kept for topic in topics if self.deletes_kept is not None}

    def commit_offsets(self, group, offsets):
        self.committed[group] = dict(offsets)

    def close(self):
        pass


@pytest.fixture
def cluster(monkeypatch):
    cluster = FakeCluster()
    # A real one is asked in the integration tests; here its answers are chosen.
    monkeypatch.setattr("icestream.sources.kafka.source.Cluster", lambda settings: cluster)
    return cluster


def source(rows=1000, size=10**9, workers=2, route=None, **options) -> KafkaSource:
    given = KafkaOptions(bootstrap_servers="x:1", topics=["t"], **options)
    reading = Reading(
        settings=given.settings(),
        value=ValueOptions(),
        registry=None,
        route=route or Route(),
        keys=Keys(by_table={}, otherwise=()),
        declared={},
        read_timeout=1.0,
        dead_letters=False,
        keyed=given.keyed,
    )
    return KafkaSource(given, "p", reading, Budget(rows=rows, bytes=size), lambda: workers)


def offsets(frontier: Frontier) -> dict[str, int]:
    return {name.split(" ")[1]: at[0] for name, at in frontier.positions.items()}


def ranges(splits) -> list[tuple[int, int, int]]:
    return sorted((r.partition, r.start, r.end) for split in splits for r in split.ranges)


def epoch(lower: Frontier, upper: Frontier) -> Epoch:
    return Epoch(number=1, lower=lower, upper=upper)


class FakeLetters:
    """Tables of letters of one snapshot, by table: the positions that they have.

    `times` are milliseconds by position, where they are known.
    """

    def __init__(self, **tables: list[str]):
        self.tables = tables
        self.times: dict[str, int] = {}

    def at(self, positions):
        times = [self.times.get(each) for each in positions]
        return pa.array(times, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC"))

    def newest(self, table):
        return 77 if table in self.tables else None

    def positions(self, table, snapshot_id):
        found = sorted(self.tables[table])
        return pa.table({"position": found, "size": [1] * len(found), "at": self.at(found)})

    def read(self, table, snapshot_id, spans):
        found = [
            text
            for text in sorted(self.tables[table])
            if any(first <= text <= last and len(text) == len(first) for first, last in spans)
        ]
        nothing = pa.nulls(len(found), pa.binary())
        names = ["position", "error", "key", "payload", "at"]
        columns = [pa.array(found), pa.array(found), nothing, nothing, self.at(found)]
        return pa.table(columns, names=names)


def read(partition: int, end: int, newest: int, rows=1, size=1) -> RangeRead:
    span = Range(topic="t", partition=partition, start=0, end=end)
    return RangeRead(range=span, rows=rows, bytes=size, newest=newest)


def test_an_epoch_ends_at_what_is_stable_now(cluster):
    """K1: offsets per partition are the frontier."""
    one = source()
    (upper,) = one.available(START)
    assert offsets(upper) == {"0": 10, "1": 10}
    assert ranges(one.plan(epoch(START, upper)).parts) == [(0, 0, 10), (1, 0, 10)]
    assert one.available(upper) == []
    cluster.ends["t", 1] = (0, 12)
    (later,) = one.available(upper)
    assert ranges(one.plan(epoch(upper, later)).parts) == [(1, 10, 12)]


def test_an_epoch_holds_no_more_rows_than_it_may(cluster):
    """E9: and every partition gets its share."""
    cluster.ends = {("t", 0): (0, 100), ("t", 1): (0, 4)}
    one = source(rows=20)
    uppers = one.available(START)
    assert [offsets(upper) for upper in uppers] == [
        {"0": 16, "1": 4},
        {"0": 36, "1": 4},
        {"0": 56, "1": 4},
        {"0": 76, "1": 4},
        {"0": 96, "1": 4},
        {"0": 100, "1": 4},
    ]


@pytest.mark.parametrize(("rows", "size"), [(20, 10**9), (10**6, 20 * 1024)])
def test_a_full_epoch_is_a_backlog(cluster, rows, size):
    """E9, Mend c10: as many rows or bytes as an epoch may hold wait after the last one."""
    one = source(rows=rows, size=size)
    (upper,) = one.available(START)
    assert offsets(upper) == {"0": 10, "1": 10}
    assert not one.backlog(upper)
    cluster.ends["t", 0] = (0, 29)
    assert not one.backlog(upper)
    cluster.ends["t", 1] = (0, 11)
    assert one.backlog(upper)
    assert not one.backlog(one.available(upper)[-1])


def test_what_an_answer_leaves_out_is_a_backlog(cluster):
    """E9, Mend c10: no more epochs are named at once than some; the others do not wait."""
    cluster.ends = {("t", 0): (0, EPOCHS_AHEAD + 1)}
    one = source(rows=1)
    uppers = one.available(START)
    assert len(uppers) == EPOCHS_AHEAD
    assert one.backlog(uppers[-1])
    (last,) = one.available(uppers[-1])
    assert not one.backlog(last)


def test_a_broker_that_does_not_answer_is_no_backlog(cluster):
    """E9, Mend c10: what is wrong is told when the time has come to look."""
    one = source()
    (upper,) = one.available(START)
    cluster.trouble = SourceUnavailable("no broker")
    assert not one.backlog(upper)


def test_the_size_of_records_is_learned(cluster):
    """E9: bytes bound an epoch as well."""
    cluster.ends = {("t", 0): (0, 1000)}
    one = source(rows=10**6, size=102_400)
    assert offsets(one.available(START)[0]) == {"0": 100}
    for _ in range(30):
        one.was_read(EPOCH, [[read(0, 100, 1, rows=10, size=102_400)]])
    assert offsets(one.available(START)[0]) == {"0": 10}


@pytest.mark.parametrize(
    ("route", "fed"),
    [
        (Route(), {"t"}),
        (Route(field="f", tables={"a": "x"}), {"a"}),
        (Route(field="f"), {"t", "a", "b"}),
    ],
)
def test_a_source_tells_which_tables_it_feeds(cluster, route, fed):
    """E8, Mend, read F1: where records name their tables it may be any of them."""
    one = source(route=route)
    tables = {"t", "a", "b"}
    assert tables - one.resume(remembered(*tables)).unfed == fed


def test_an_epoch_that_was_too_large_is_cut_where_it_was(cluster):
    """E9: an outlier is not in the average."""
    one = source()
    one.available(START)
    one.give_up(pickle.loads(pickle.dumps(RangesTooLarge({("t", 0): 3, ("t", 1): 0}))))
    first, *_ = one.available(START)
    assert offsets(first) == {"0": 3, "1": 10}


def test_an_epoch_that_some_tables_carry_is_read_however_large_it_is(cluster):
    """I14, Mend, read F10: else more workers, or a lower limit, refuse it at each start."""
    (upper,) = source(size=10**6, workers=1).available(START)
    one = source(size=10**4, workers=2)
    limits = [split.bytes_max for split in one.plan(epoch(START, upper)).parts]
    assert limits == [10**4, 10**4]
    one.available(START, Finish(epoch=epoch(START, upper)))
    assert all(split.bytes_max > 10**18 for split in one.plan(epoch(START, upper)).parts)
    later = Epoch(number=2, lower=START, upper=upper)
    assert [split.bytes_max for split in one.plan(later).parts] == limits


def test_a_first_epoch_that_is_read_again_begins_where_it_began(cluster):
    """K6: a position says where reading began, also when the topic has forgotten its start."""
    cluster.ends = {("t", 0): (5, 10)}
    one = source()
    (upper,) = one.available(START)
    cluster.ends = {("t", 0): (7, 10)}
    assert ranges(source().plan(epoch(START, upper)).parts) == [(0, 5, 10)]


def test_latest_begins_where_the_first_start_found_the_ends(cluster):
    """K10, Mend b8: what comes after the start is read, however often the source is asked."""
    one = source(start="latest")
    (begun,) = one.available(START)
    assert offsets(begun) == {"0": 10, "1": 10}
    assert one.plan(epoch(START, begun)).parts == []
    assert one.plan(epoch(START, begun)).milestone(START)
    cluster.ends["t", 0] = (0, 12)
    # Nothing was made durable, and what was not is given up.
    again, later = one.available(START)
    assert again == begun
    assert ranges(one.plan(epoch(again, later)).parts) == [(0, 10, 12)]
    assert not one.plan(epoch(again, later)).milestone(again)
    (resumed,) = source(start="latest").available(begun)
    assert offsets(resumed) == {"0": 12, "1": 10}


def test_a_partition_that_appears_later_is_read_from_its_beginning(cluster):
    """K1, K10: `start: latest` is for those that are there at the first start."""
    one = source(start="latest")
    known = Frontier({"t 0 one": (10, 10)})
    cluster.ends["t", 1] = (0, 3)
    cluster.ends["t", 0] = (0, 12)
    (upper,) = one.available(known)
    assert ranges(one.plan(epoch(known, upper)).parts) == [(0, 10, 12), (1, 0, 3)]


@pytest.mark.parametrize(
    ("ends", "ids", "text"),
    [
        ((6, 10), "one", "no longer has offset 5"),
        ((0, 4), "one", "ends at offset 4, before 5"),
        ((0, 10), "two", "deleted and created anew"),
    ],
)
def test_what_is_lost_is_said(cluster, ends, ids, text):
    """E7: never skipped in silence."""
    cluster.ends = {("t", 0): ends}
    cluster.ids = {"t": ids}
    durable = Frontier({"t 0 one": (5, 0)})
    with pytest.raises(HistoryLost, match=text):
        source().available(durable)
    with pytest.raises(HistoryLost, match=text):
        source().verify(durable)


@pytest.mark.parametrize("oldest", [5_000, 15_000], ids=["too late", "in time"])
def test_deletes_that_a_compacted_topic_may_have_forgotten_are_said(
    cluster, monkeypatch, caplog, oldest
):
    """E7, Mend b11: once, and only of what goes on from an earlier run."""
    cluster.deletes_kept = 10_000
    # The age of records is told by the clock.
    monkeypatch.setattr(KafkaRun, "now_ms", lambda _: 20_000)
    late = RangeRead(
        range=Range(topic="t", partition=0, start=5, end=9),
        rows=4,
        bytes=4,
        newest=20_000,
        oldest=oldest,
    )
    one, first = source(), source()
    one.available(Frontier({"t 0 one": (5, 0), "t 1 one": (5, 0)}))
    first.available(START)
    for each in (one, first):
        each.was_read(EPOCH, [[late]])
        each.was_read(EPOCH, [[late]])
    said = [r for r in caplog.records if "later than it keeps deletes" in r.getMessage()]
    assert len(said) == (1 if oldest == 5_000 else 0)


def test_a_topic_created_anew_may_be_gone_on_with(cluster):
    """K6: from its beginning, when that is what the operator wants."""
    cluster.ends = {("t", 0): (0, 4)}
    cluster.ids = {"t": "two"}
    one = source(on_recreated="continue")
    durable = Frontier({"t 0 one": (5, 0)})
    (upper,) = one.available(durable)
    assert upper.covers(durable)
    assert ranges(one.plan(epoch(durable, upper)).parts) == [(0, 0, 4)]


def test_a_partition_that_gives_nothing_is_left_out(cluster, monkeypatch):
    """K9: the others go on, its part of the frontier stays, and it is tried again later."""
    one = source(read_timeout=30.0)
    one.available(START)
    one.give_up(PartitionStalled("t", 1))
    assert "partition 1 of topic t" in str(one.standing(START).trouble)
    (upper,) = one.available(START)
    assert offsets(upper) == {"0": 10}
    one.was_read(EPOCH, [[read(0, 10, 5)]])
    assert one.was_read(epoch(START, upper), []) == {}
    clock = topics.time.monotonic() + 31
    # Half a minute is waited for in no test.
    monkeypatch.setattr(topics.time, "monotonic", lambda: clock)
    (later,) = one.available(upper)
    assert offsets(later) == {"0": 10, "1": 10}
    assert one.standing(START).trouble is None


def test_the_valid_through_time_is_that_of_the_slowest_partition(cluster):
    """K5: of what lies before the epoch's end, not of epochs that were read ahead of it."""
    one = source()
    (upper,) = one.available(START)
    one.was_read(EPOCH, [[read(0, 10, 3000), read(1, 10, 2000)]])
    cluster.ends = {("t", 0): (0, 20), ("t", 1): (0, 20)}
    (later,) = one.available(upper)
    one.was_read(EPOCH, [[read(0, 20, 9000), read(1, 20, 8000)]])
    assert one.was_read(epoch(START, upper), []) == {VALID_THROUGH: "1970-01-01T00:00:02.000+00:00"}
    assert one.was_read(epoch(upper, later), []) == {VALID_THROUGH: "1970-01-01T00:00:08.000+00:00"}
    one.ack(upper)
    assert cluster.committed == {"icestream-p": {("t", 0): 10, ("t", 1): 10}}
    assert one.was_read(epoch(upper, later), []) == {VALID_THROUGH: "1970-01-01T00:00:08.000+00:00"}


def test_partitions_share_the_workers(cluster):
    """E5: many small partitions are few splits, and so few files."""
    cluster.ends = {("t", number): (0, 10 + number) for number in range(64)}
    one = source(rows=10**6, workers=2)
    (upper,) = one.available(START)
    splits = one.plan(epoch(START, upper)).parts
    sizes = [sum(r.end - r.start for r in split.ranges) for split in splits]
    assert len(splits) == 2 and abs(sizes[0] - sizes[1]) < 80
    assert len(ranges(splits)) == 64


def test_a_run_once_ends_at_what_was_there(cluster):
    """U2: although more keeps coming."""
    one = source()
    (upper,) = one.available(START)
    assert not one.standing(START).caught_up
    cluster.ends["t", 0] = (0, 99)
    one.available(upper)
    assert one.standing(upper).caught_up


def test_tables_are_known_by_topic_or_route(cluster):
    """K4, K7: splits name the tables that are there, and those that reading has found."""
    one = source()
    assert one.tables() == ["t"]
    (upper,) = one.available(START)
    assert one.plan(epoch(START, upper)).parts[0].tables == frozenset()
    one.resume(remembered("t", "other"))
    one.tables_met({"t__dead_letters": TableShape(columns=[], key=[])})
    assert one.plan(epoch(START, upper)).parts[0].tables == {"t", "t__dead_letters"}
    routed = source(route=Route(field="kind", tables={"a": "x", "b": "y"}))
    assert routed.tables() == ["a", "b"]
    assert routed.resume(remembered(durable=upper)).behind == {}
    assert one.resume(remembered(durable=upper)).behind == {"t": START}
    assert one.resume(remembered(durable=START)).behind == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": ["t"]}, "lacks `bootstrap_servers`"),
        ({"bootstrap_servers": "x:1"}, "lacks `topics`"),
        ({"bootstrap_servers": "x:1", "topics": ["t"], "start": "now"}, "start cannot be `now`"),
        ({"bootstrap_servers": "x:1", "topic_pattern": "("}, "not a regular expression"),
        ({"bootstrap_servers": "x:1", "topics": ["t"], "on_recreated": "x"}, "on_recreated"),
    ],
)
def test_bad_options_are_refused(options, text):
    """U3: with what is wrong."""
    with pytest.raises(ConfigInvalid, match=text):
        KafkaOptions(**options)


def with_letters(cluster, *positions: str, **options) -> KafkaSource:
    one = source(**options)
    one.run.letter_box = FakeLetters(t__dead_letters=list(positions))
    one.resume(remembered("t", "t__dead_letters"))
    return one


def letter_spans(splits) -> list[tuple[int, list[int]]]:
    found = [(each.partition, each.records.offsets) for s in splits for each in s.letters]
    return sorted((partition, offsets.tolist()) for partition, offsets in found)


def test_a_frontier_that_tells_of_letters_goes_on_by_its_offsets(cluster):
    """E10, K2: they are carried along, and nobody takes them for partitions."""
    one = with_letters(cluster, "t/0/3")
    (upper,) = one.available(START)
    (group,) = one.letters(upper, None, as_is=False)
    replayed = group.after(upper)
    assert one.standing(replayed).position == one.standing(upper).position
    assert one.available(replayed) == []
    one.verify(replayed)
    one.ack(replayed)
    assert cluster.committed == {"icestream-p": {("t", 0): 10, ("t", 1): 10}}
    assert [
        ranges([s]) for s in one.plan(epoch(upper, replayed)).parts if hasattr(s, "ranges")
    ] == []
    cluster.ends["t", 1] = (0, 12)
    (later,) = one.available(replayed)
    assert later.covers(replayed)
    assert ranges(one.plan(epoch(replayed, later)).parts) == [(1, 10, 12)]


def test_letters_are_split_by_partition(cluster):
    """E10: of those that lie before the frontier; others come with the log."""
    one = with_letters(cluster, "t/0/3", "t/0/10", "t/0/9", "t/1/2")
    (upper,) = one.available(START)
    (group,) = one.letters(upper, "t", as_is=False)
    splits = one.plan(epoch(upper, group.after(upper))).parts
    assert letter_spans(splits) == [(0, [3, 9]), (1, [2])]
    assert all(split.tables == {"t", "t__dead_letters"} for split in splits)
    # A table that begins anew finds all of them in the log.
    assert one.plan(epoch(START, group.after(START))).parts == []


def test_a_table_that_lies_behind_takes_letters_first_and_others_never_from_the_log(cluster):
    """E8, E10: a record among the letters comes by being tried again, and in no other way."""
    one = with_letters(cluster, "t/0/3", "t/1/9")
    (upper,) = one.available(START)
    (group,) = one.letters(upper, None, as_is=False)
    durable = group.after(upper)
    assert one.available(START, CatchUp(table="t", durable=upper)) == [upper]
    assert one.available(START, CatchUp(table="t", durable=durable)) == [group.after(START)]
    (split, other) = one.plan(epoch(START, upper)).parts
    skipped = {**split.skipped, **other.skipped}
    assert {at: found.tolist() for at, found in skipped.items()} == {("t", 0): [3], ("t", 1): [9]}


def test_a_table_that_lies_behind_several_replays_is_refused(cluster):
    """E8, E10: which letters the first of them took is no longer known."""
    one = with_letters(cluster, "t/0/3")
    (upper,) = one.available(START)
    (group,) = one.letters(upper, None, as_is=False)
    (split,) = one.plan(epoch(upper, group.after(group.after(upper)))).parts
    assert isinstance(split.problem, HistoryLost)


def test_letters_whose_snapshot_is_gone_stop_only_the_tables_that_need_them(cluster):
    """E7, E10: the split says so when it is read."""
    one = with_letters(cluster, "t/0/3")
    (upper,) = one.available(START)
    (group,) = one.letters(upper, None, as_is=False)

    def gone(table, snapshot_id):
        raise HistoryLost("expired")

    one.run.letter_box.positions = gone
    (split,) = one.plan(epoch(upper, group.after(upper))).parts
    assert "expired" in str(split.problem)
    assert split.tables == {"t", "t__dead_letters"}


def test_letters_that_nothing_tells_apart_are_refused(cluster):
    """E10: a topic of old and a topic of now with the same offsets."""
    one = with_letters(cluster, "t/0/3", "t/0/3")
    (upper,) = one.available(START)
    with pytest.raises(DataRejected, match="two letters of one position"):
        one.letters(upper, None, as_is=False)
    with pytest.raises(DataRejected, match="old and of the new topic"):
        old = Frontier({**upper.positions, "t 0 old": (5, 0)})
        one.available(START, CatchUp(table="t", durable=old))
    routed = with_letters(cluster, "t/0/3", route=Route(tables={"t": "", "u": ""}))
    with pytest.raises(ConfigInvalid, match="lie in one table"):
        routed.letters(upper, None, as_is=False)


def test_topics_that_cannot_be_tables_of_their_own_are_refused_as_soon_as_they_are_there(cluster):
    """I16, K2, Mend a2, Mend a4: also when the second appears while the first is read."""
    cluster.ids = {"eu.t": "one"}
    cluster.ends = {("eu.t", 0): (0, 10)}
    reader = source()
    reader.run.table_names = TableNames()
    assert reader.available(START)
    for other, message in [
        ("us.t", "two source tables go into one"),
        ("shop.", "cannot become an Iceberg table"),
        ("x__dead_letters", "has a name of dead letters"),
    ]:
        cluster.ids = {"eu.t": "one", other: "two"}
        cluster.ends = {("eu.t", 0): (0, 10), (other, 0): (0, 0)}
        with pytest.raises(ConfigInvalid, match=message):
            reader.available(START)
    cluster.ids = {"eu.t": "one", "us.t": "two"}
    cluster.ends = {("eu.t", 0): (0, 10), ("us.t", 0): (0, 0)}
    reader.run.table_names = TableNames(given={"us.t": "us_t"})
    assert reader.available(START)


def test_a_topic_that_was_left_out_for_a_while_goes_on_where_it_was_left(cluster):
    """K2, Mend f2: each partition has an offset of its own, which waits meanwhile."""
    cluster.ids["u"], cluster.ends["u", 0] = "two", (0, 5)
    (first,) = source().available(START)
    del cluster.ids["u"]
    cluster.ends |= {("t", 0): (0, 20), ("u", 0): (0, 8)}
    (second,) = source().available(first)
    cluster.ids["u"], cluster.ends["u", 0] = "two", (0, 9)
    again = source()
    (third,) = again.available(second)
    read = [r for split in again.plan(epoch(second, third)).parts for r in split.ranges]
    assert [(r.topic, r.start, r.end) for r in read] == [("u", 5, 9)]
