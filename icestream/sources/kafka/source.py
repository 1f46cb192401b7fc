"""Kafka topics: each epoch is a range of offsets per partition.

Offsets are the frontier, and the destination remembers it; what a consumer group has committed is
a mirror for lag tools and never the truth. An epoch ends at the offsets that were stable when it
was minted, so that it holds whole transactions only, and workers read its ranges by themselves.

A position is `(next offset, first offset)`: the second is where reading began, so that an epoch
that must be read again is read from the same place. The name of a partition holds its topic's id:
a topic that was deleted and created anew counts from zero again and must not be taken for the old
one. Beside partitions a frontier names tables of dead letters, once these were tried again; such an
epoch leaves the offsets where they are (`icestream.sources.kafka.replay`). It also names spans in
which a topic is read in the order of time, because keys have moved to other partitions
(`icestream.sources.kafka.growth`).

Each room answers for its part: `topics` what the brokers have, `boundaries` where epochs end,
`reads` what reading has taught, `known_tables` whose the records are, `letters` dead letters that
are tried again. `run` is what they share.
"""

from collections.abc import Callable, Mapping, Sequence

from pyiceberg.types import IcebergType

from icestream.epoch import Epoch
from icestream.frontier import Frontier
from icestream.schema import TableShape
from icestream.sources import (
    Budget,
    CatchUp,
    EpochPlan,
    Finish,
    LettersTried,
    Part,
    Purpose,
    Remembered,
    Source,
    SplitsLost,
    Standing,
    StartPlan,
    always,
    never,
    without_history,
)
from icestream.sources.kafka.boundaries import Boundaries
from icestream.sources.kafka.client import Cluster
from icestream.sources.kafka.consumer import PartitionStalled, Range
from icestream.sources.kafka.growth import topics_by_time
from icestream.sources.kafka.known_tables import KnownTables
from icestream.sources.kafka.letters import TriedAgain
from icestream.sources.kafka.options import KafkaOptions
from icestream.sources.kafka.partitions import (
    balanced,
    in_words,
    of_partitions,
    partition_name,
    partition_parts,
)
from icestream.sources.kafka.reads import ReadSoFar
from icestream.sources.kafka.replay import LetterGroup
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.split import KafkaSplit, RangeRead, RangesTooLarge, Reading
from icestream.sources.kafka.topics import TopicsNow


class KafkaSource(Source):
    """See the module and `icestream.sources.Source`, which says by which thread each is called."""

    def __init__(
        self,
        options: KafkaOptions,
        pipeline: str,
        reading: Reading,
        budget: Budget,
        parallelism: Callable[[], int],
    ):
        self.key_in_one_split = options.keyed
        self.run = KafkaRun(
            options=options,
            reading=reading,
            budget=budget,
            parallelism=parallelism,
            cluster=Cluster(options.settings()),
        )
        self._group = options.group_id or f"icestream-{pipeline}"
        self._topics = TopicsNow(self.run)
        self._reads = ReadSoFar(self.run, self._topics)
        self._tables = KnownTables(self.run, self._topics)
        self._boundaries = Boundaries(self.run, self._topics, self._reads)
        self._letters = TriedAgain(self.run, self._topics, self._tables)
        self._unfinished: Epoch | None = None

    # --- tables -------------------------------------------------------------------------------

    def tables(self) -> Sequence[str]:
        """The tables that the route names, or one for each topic, and those met on the way."""
        return self._tables.names()

    def known_tables(self) -> Sequence[str]:
        """Those that the configuration names."""
        route = self.run.reading.route
        return [*(self.run.options.topics if route.by_topic() else ()), *route.tables]

    def shape(self, table: str) -> TableShape | None:
        """What its records have shown so far."""
        return self._tables.shape(table)

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives columns of the table."""
        return self.run.reading.declared.get(table, {})

    def tables_met(self, shapes: Mapping[str, TableShape]) -> None:
        """Remember tables that records were found for; rows that change need a key."""
        self._tables.met(shapes)

    # --- from the start to the next epoch -----------------------------------------------------

    def resume(self, remembered: Remembered) -> StartPlan:
        """Remember which tables the destination has.

        A table is fed when its topic or the route names it, any table where records name theirs.
        """
        tables = self.tables()
        self._tables.at_destination(remembered.progress.keys())
        by_records = self.run.reading.route.by_records()
        unfed = set() if by_records else {*remembered.progress} - {*tables}
        behind = without_history(tables, remembered, self._has_history)
        return StartPlan(behind=behind, unfed=frozenset(unfed))

    def _has_history(self, table: str, before: Frontier) -> bool:
        """Whether the table's topic still has records that were read before."""
        topic = self._topics.by_name.get(table) if self.run.reading.route.by_topic() else None
        if topic is None:
            return False
        return any(
            # What lies before the place where reading began was never wanted.
            at[0] > max(at[1], self._topics.bounds[topic.name, number][0])
            for number in range(topic.partitions)
            if (topic.name, number) in self._topics.bounds
            and (at := before[partition_name(topic, number)])
        )

    def verify(self, durable: Frontier) -> None:
        """Refuse a frontier whose records are gone, or are no longer the ones it counted."""
        self._topics.verify(durable)

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """Bounds of epochs up to what is stable now, each within the budget.

        An epoch that is finished is as large as it is: other workers or limits may have cut it.
        """
        if isinstance(purpose, Finish):
            self._unfinished = purpose.epoch
        if isinstance(purpose, CatchUp):
            self._boundaries.ahead = purpose.durable
            if letters := self._letters.first(purpose, lower):
                return letters
        self._topics.look()
        self._topics.verify(lower)
        self._reads.note_compacted(lower)
        return self._boundaries.after(lower)

    def backlog(self, lower: Frontier) -> bool:
        """Whether records wait that were left out of the last answer, or fill an epoch."""
        return self._boundaries.backlog(lower)

    # --- an epoch -----------------------------------------------------------------------------

    def plan(self, epoch: Epoch) -> EpochPlan:
        """Ranges of all partitions, in as many splits as there are workers, or dead letters.

        Where `start: latest` begins is a milestone: a restart must not begin anywhere else.
        """
        parts: list[Part] = [*self._range_splits(epoch), *self._letters.splits(epoch)]
        milestone = always if self._boundaries.begins_at_end(epoch.lower) else never
        return EpochPlan(parts=parts, milestone=milestone)

    def _range_splits(self, epoch: Epoch) -> list[KafkaSplit]:
        in_time = topics_by_time(epoch) if self.run.ordered else set()
        workers = self.run.workers
        shares = balanced(_ranges(epoch), workers, in_time)
        # A topic that is read in the order of time has one split, which must fit into a worker.
        parts = workers if in_time else len(shares)
        # Averages have outliers, and an epoch that is read again must fit again.
        bytes_max = max(1, 2 * self.run.budget.bytes // parts) if parts else 1
        if epoch == self._unfinished:
            bytes_max = 2**63 - 1
        return [
            KafkaSplit(
                ranges=group,
                reading=self.run.reading,
                tables=frozenset(self._tables.of_topics({each.topic for each in group})),
                bytes_max=bytes_max,
                skipped=self._letters.skipped(group),
                by_time=not in_time.isdisjoint(each.topic for each in group),
            )
            for group in shares
        ]

    def was_read(
        self, epoch: Epoch, lessons: Sequence[Sequence[RangeRead] | LettersTried]
    ) -> Mapping[str, str]:
        """Note how large records are and how new, for the epochs to come."""
        for learned in lessons:
            if isinstance(learned, LettersTried):
                self._letters.note(learned)
            else:
                self._reads.note(learned)
        return self._reads.labels(epoch)

    def standing(self, frontier: Frontier) -> Standing:
        """Offsets by topic and partition; trouble is a partition that is left out."""
        return Standing(
            position=in_words(frontier),
            lag_seconds=self._reads.lag_seconds(frontier),
            caught_up=self._boundaries.passed_goal(frontier),
            trouble=self._topics.trouble,
        )

    def ack(self, durable: Frontier) -> None:
        """Mirror progress in the consumer group, and forget what only earlier epochs needed."""
        positions = {
            (t.name, n): durable[partition_name(t, n)] for t, n in self._topics.partitions()
        }
        offsets = {partition: at[0] for partition, at in positions.items() if at}
        self._reads.forget(offsets)
        self.run.cluster.commit_offsets(self._group, offsets)

    # --- dead letters -------------------------------------------------------------------------

    def letters(self, durable: Frontier, table: str | None, as_is: bool) -> Sequence[LetterGroup]:
        """Groups of letters, each within the budget; raises what keeps them from being tried."""
        return self._letters.waiting(durable, table, as_is)

    def tried(self) -> Sequence[LettersTried]:
        """What became of letters, by table."""
        return self._letters.tried()

    # --- the end ------------------------------------------------------------------------------

    def give_up(self, lost: SplitsLost) -> None:
        """Leave out a partition that gives nothing, or end epochs before they grow too large."""
        if isinstance(lost, PartitionStalled):
            self._topics.leave_out(lost)
        if isinstance(lost, RangesTooLarge):
            self._boundaries.shorten(lost)

    def close(self) -> None:
        """Let go of the brokers."""
        self.run.cluster.close()


def _ranges(epoch: Epoch) -> list[Range]:
    """The offsets of each partition that an epoch holds."""
    ranges = []
    for name, upper in of_partitions(epoch.upper).items():
        topic, number, _ = partition_parts(name)
        start = epoch.lower[name][0] if epoch.lower[name] else upper[1]
        if start < upper[0]:
            ranges.append(Range(topic=topic, partition=number, start=start, end=upper[0]))
    return ranges
