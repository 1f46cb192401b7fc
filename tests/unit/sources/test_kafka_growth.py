"""Topics that are given more partitions are read in the order of time around it."""

import random
from dataclasses import replace

import pytest

from icestream.errors import HistoryLost
from icestream.formats.options import ValueOptions
from icestream.frontier import START, Frontier
from icestream.sources import CatchUp
from icestream.sources.kafka import boundaries
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.consumer import PartitionStalled
from icestream.sources.kafka.growth import GRACE_MS, end_of_unknown, span_of
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.source import KafkaSource
from icestream.sources.kafka.split import RangesTooLarge
from tests.asking import remembered
from tests.unit.sources.test_kafka_source import FakeCluster, FakeLetters, epoch, ranges, source

TOPIC = "t"
NOW = 1_700_000_000_000


class TimedCluster(FakeCluster):
    """A cluster that knows the timestamps of its records."""

    def __init__(self, partitions: int):
        super().__init__()
        self.log: dict[tuple[str, int], list[int]] = {}
        self.grow(partitions)

    def grow(self, partitions: int) -> None:
        for number in range(partitions):
            self.log.setdefault((TOPIC, number), [])
        self._count()

    def write(self, at: int, partition: int) -> None:
        self.log[TOPIC, partition].append(at)
        self._count()

    def _count(self) -> None:
        self.ends = {place: (0, len(times)) for place, times in self.log.items()}

    def offsets_at(self, partitions, milliseconds):
        found = {}
        for place in partitions:
            later = ((n, at) for n, at in enumerate(self.log[place]) if at >= milliseconds)
            found[place] = next(later, (-1, -1))
        return found


@pytest.fixture
def clock(monkeypatch):
    """The time in milliseconds, as a list of one number."""
    now = [NOW]
    # Ten minutes are waited for in no test.
    monkeypatch.setattr(KafkaRun, "now_ms", lambda _: now[0])
    monkeypatch.setattr(boundaries, "SETTLE_SECONDS", 0)
    return now


@pytest.fixture
def cluster(monkeypatch):
    cluster = TimedCluster(2)
    # A real one is asked in the integration tests; here its answers are chosen.
    monkeypatch.setattr("icestream.sources.kafka.source.Cluster", lambda settings: cluster)
    return cluster


def upserting(**options) -> KafkaSource:
    one = source(**options)
    one.run.reading = replace(one.run.reading, value=ValueOptions(envelope="upsert"))
    return one


def read_all(one: KafkaSource, cluster: TimedCluster, lower: Frontier):
    """Epochs as lists of (time, partition), each with whether one split reads all of it."""
    found = []
    while uppers := one.available(lower):
        for upper in uppers:
            splits = one.plan(epoch(lower, upper)).parts
            places = [
                (cluster.log[TOPIC, number][offset], number)
                for number, start, end in ranges(splits)
                for offset in range(start, end)
            ]
            found.append((places, len(splits) == 1 and splits[0].by_time))
            lower = upper
    return found, lower


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keyed", [True, False])
def test_older_records_never_come_in_a_later_epoch(cluster, clock, seed, keyed):
    """K10, Mend b9: whatever was written to how many partitions; each record comes once."""
    generator = random.Random(seed)
    at = NOW - 3_600_000
    for partitions in (2, 5, 9):
        cluster.grow(partitions)
        for _ in range(generator.randrange(20, 200)):
            at += generator.choice([0, 0, 1, 1, 50, 4000])
            cluster.write(at, generator.randrange(partitions))
    one = upserting(rows=generator.choice([7, 40, 1000]), workers=2, keyed=keyed)
    epochs, lower = read_all(one, cluster, START)
    assert sum(len(places) for places, _ in epochs) == sum(map(len, cluster.log.values()))
    assert one.standing(lower).caught_up
    span = span_of(lower, Topic(name=TOPIC, id="one", partitions=9))
    newest = NOW - 3_600_000
    for places, together in epochs:
        if span is None or min(places)[0] < span.until:
            assert min(places)[0] >= newest
            newest = max(places)[0]
            assert together or not keyed
    if span is not None:
        firsts = [times[0] for times in cluster.log.values() if times]
        assert span.until >= max(firsts)


def test_a_growth_that_is_seen_is_remembered_until_producers_know_of_it(cluster, clock):
    """K10: a restart reads as the run before it did, and after the grace all is as it was."""
    for number in range(10):
        cluster.write(NOW - 50_000 + number, number % 2)
    clock[0] += 100_000
    _, lower = read_all(upserting(), cluster, START)
    cluster.write(clock[0], 0)
    ((_, together),), lower = read_all(upserting(), cluster, lower)
    assert not together
    cluster.grow(4)
    cluster.write(clock[0], 0)
    cluster.write(clock[0] + 1, 3)
    clock[0] += 2
    ((places, together),), lower = read_all(upserting(), cluster, lower)
    assert together and len(places) == 2
    until = clock[0] + GRACE_MS
    span = span_of(lower, Topic(name=TOPIC, id="one", partitions=4))
    assert (span.until, span.grown, span.passed) == (until, True, False)
    clock[0] = until - 10
    cluster.write(clock[0], 1)
    ((_, together),), lower = read_all(upserting(), cluster, lower)
    assert together, "a restart within the grace"
    clock[0] = until + 5000
    cluster.write(until - 1, 2)
    cluster.write(until + 1, 2)
    ((_, together),), lower = read_all(upserting(), cluster, lower)
    assert together
    cluster.write(until + 2, 2)
    cluster.write(until + 2, 1)
    ((_, together),), lower = read_all(upserting(), cluster, lower)
    assert not together


def grown(cluster: TimedCluster, clock: list[int]) -> tuple[Frontier, int]:
    """Two partitions with a record each second, four from then on; where reading is, and until."""
    for second in range(10):
        cluster.write(NOW + 1000 * second, second % 2)
    clock[0] = NOW + 10_000
    _, lower = read_all(upserting(), cluster, START)
    cluster.grow(4)
    for second in range(10, 30):
        cluster.write(NOW + 1000 * second, second % 4)
    clock[0] = NOW + 30_000
    _, lower = read_all(upserting(), cluster, lower)
    until = clock[0] + GRACE_MS
    for second in range(8):
        cluster.write(until + 1000 * second, second % 4)
    clock[0] = until + 10_000
    _, lower = read_all(upserting(), cluster, lower)
    span = span_of(lower, Topic(name=TOPIC, id="one", partitions=4))
    assert span is not None and span.passed
    return lower, span.until


def tried(cluster: TimedCluster, lower: Frontier, *letters: tuple[int, int], as_is: bool = False):
    """Which letters (partition, offset) are tried in which splits, with which parts of the log."""
    one = upserting()
    one.run.letter_box = FakeLetters(t__dead_letters=[f"t/{n}/{offset}" for n, offset in letters])
    one.run.letter_box.times = {f"t/{n}/{at}": cluster.log[TOPIC, n][at] for n, at in letters}
    one.resume(remembered("t", "t__dead_letters"))
    (group,) = one.letters(lower, None, as_is)
    return [
        (
            [each.partition for each in split.letters],
            None if split.logs is None else [(r.partition, r.start, r.end) for r in split.logs],
            split.by_time,
        )
        for split in one.plan(epoch(lower, group.after(lower))).parts
    ]


def test_letters_are_held_against_every_partition_that_their_keys_may_be_in(cluster, clock):
    """E10, K10, Mend b9: all of them from the letter's time on, if it is from before the growth."""
    lower, until = grown(cluster, clock)
    ends = {number: len(cluster.log[TOPIC, number]) for number in range(4)}
    # Seconds 0, 2, 4 ... are in partition 0; the letter is of second 6.
    since = {0: 3, 1: 3, 2: 0, 3: 0}
    everything = [(number, since[number], ends[number]) for number in range(4)]
    assert tried(cluster, lower, (0, 3)) == [([0], everything, True)]
    assert tried(cluster, lower, (0, 3), (2, 1)) == [([0, 2], everything, True)]
    assert tried(cluster, lower, (0, 3), (2, 1), as_is=True) == [([0, 2], None, True)]
    late = {
        number: next(n for n, at in enumerate(cluster.log[TOPIC, number]) if at >= until)
        for number in range(4)
    }
    expected = [([n], [(n, late[n], ends[n])], False) for n in (1, 3)]
    assert tried(cluster, lower, (1, late[1]), (3, late[3])) == expected


def test_a_partition_that_lost_what_a_moved_key_may_have_is_said(cluster, clock):
    """E7, E10, Mend b9: unless what is left of it is older than the letter."""
    lower, _ = grown(cluster, clock)

    def lose(partition: int, begins: int) -> None:
        cluster.ends[TOPIC, partition] = (begins, len(cluster.log[TOPIC, partition]))
        cluster.log[TOPIC, partition][:begins] = [-1] * begins

    lose(1, 2)
    assert tried(cluster, lower, (0, 3))[0][1][1] == (1, 3, len(cluster.log[TOPIC, 1]))
    lose(1, 3)
    with pytest.raises(HistoryLost, match="partition 1 of topic t no longer reaches back"):
        tried(cluster, lower, (0, 3))
    assert tried(cluster, lower, (0, 3), as_is=True) == [([0], None, True)]


def test_letters_without_a_time_are_held_against_all_that_was_read(cluster, clock):
    """E10, Mend b9: nothing tells that they are from after the growth."""
    lower, _ = grown(cluster, clock)
    one = upserting()
    one.run.letter_box = FakeLetters(t__dead_letters=["t/0/3"])
    one.resume(remembered("t", "t__dead_letters"))
    (group,) = one.letters(lower, None, as_is=False)
    (split,) = one.plan(epoch(lower, group.after(lower))).parts
    assert [(r.partition, r.start) for r in split.logs] == [(n, 0) for n in range(4)]


def test_a_partition_that_stalls_holds_its_topic_while_keys_move(cluster, clock):
    """K9, K10: what it has may be older than what the others have."""
    cluster.write(NOW - 9, 0)
    cluster.write(NOW - 8, 1)
    _, lower = read_all(upserting(), cluster, START)
    cluster.grow(3)
    cluster.write(NOW, 0)
    cluster.write(NOW + 1, 2)
    one = upserting()
    assert len(one.available(lower)) == 1
    one.give_up(PartitionStalled(TOPIC, 0))
    assert one.available(lower) == []
    assert "partition 0" in str(one.standing(START).trouble)


def test_records_that_are_too_large_together_are_still_cut_at_a_time(cluster, clock):
    """E9, K10: an epoch becomes smaller, and no key goes back."""
    for number in range(64):
        cluster.write(NOW - 1000 + number, number % 2)
    one = upserting(rows=128, workers=2)
    assert len(one.available(START)) == 1
    one.give_up(RangesTooLarge({(TOPIC, 0): 20, (TOPIC, 1): 0}))
    epochs, _ = read_all(one, cluster, START)
    assert len(epochs) > 1
    times = [at for places, _ in epochs for at, _ in sorted(places)]
    assert times == sorted(times)


def test_a_table_that_is_read_again_keeps_to_what_the_others_know(cluster, clock):
    """E6, K10: its epochs lie within the frontier of the others."""
    for number in range(100):
        cluster.write(NOW - 1000 + number, number % 2)
    _, lower = read_all(upserting(rows=20), cluster, START)
    cluster.grow(4)
    for number in range(100):
        cluster.write(NOW + number, number % 4)
    clock[0] = NOW + 200
    _, durable = read_all(upserting(rows=20), cluster, lower)
    clock[0] += 3 * GRACE_MS
    again = upserting(rows=20)
    behind = CatchUp(table="t", durable=durable)
    at, epochs = START, 0
    while at != durable:
        ahead = [upper for upper in again.available(at, behind) if durable.covers(upper)]
        # What no bound covers is taken in one epoch; it is no more than one.
        upper = ahead[0] if ahead else durable
        splits = again.plan(epoch(at, upper)).parts
        assert sum(end - start for _, start, end in ranges(splits)) <= 20
        assert len(splits) == 1 and splits[0].by_time
        at, epochs = upper, epochs + 1
    assert epochs > 5


@pytest.mark.parametrize(
    ("firsts", "until"),
    [
        ({0: 100, 1: 100}, 100),
        ({0: 100, 1: 5000}, 9900),
        ({0: 100, 1: 10**10}, 10**10 + GRACE_MS),
        ({0: 100, 1: -1}, 2 * NOW - 100 if NOW < GRACE_MS else NOW + GRACE_MS),
        ({0: -1, 1: -1}, NOW),
        ({0: 100, 1: 1000 * NOW}, NOW + GRACE_MS),
    ],
    ids=["at once", "soon", "later", "no record", "no records", "in microseconds"],
)
def test_a_topic_may_have_grown_until_each_partition_has_a_record(firsts, until):
    """K10: and producers learn of it late."""
    assert end_of_unknown(firsts, NOW) == until
