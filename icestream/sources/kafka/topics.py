"""The topics and partitions that the brokers have now, and those that are left out for a while."""

import logging
import time
from collections.abc import Collection, Mapping

from icestream import dead_letters
from icestream.errors import ConfigInvalid
from icestream.frontier import Frontier
from icestream.sources.kafka.client import Topic
from icestream.sources.kafka.consumer import PartitionStalled
from icestream.sources.kafka.options import GO_ON
from icestream.sources.kafka.partitions import (
    Partition,
    of_partitions,
    partition_name,
    partition_parts,
    recreated,
    refuse_lost,
)
from icestream.sources.kafka.run import KafkaRun

log = logging.getLogger(__name__)


class TopicsNow:
    """What the brokers said when they were asked last.

    Thread: the loop's changes it, while no epoch is written; any reads it.
    """

    def __init__(self, run: KafkaRun):
        self._run = run
        self.by_name: Mapping[str, Topic] = {}
        # Of each partition the first offset that is there, and the end of what is stable.
        self.bounds: Mapping[Partition, tuple[int, int]] = {}
        # Partitions that gave nothing, and when they are tried again.
        self._stalled: dict[Partition, tuple[float, PartitionStalled]] = {}
        self._once_stalled: set[Partition] = set()

    def find(self) -> None:
        """Ask the brokers unless they were asked before."""
        if not self.by_name:
            self.look()

    def look(self) -> None:
        """Ask the brokers what there is now."""
        options = self._run.options
        topics = self._run.cluster.topics(options.topics, options.topic_pattern or None)
        known: Mapping[str, Topic] | None = None
        # Ends must be from before a topic grows: keys that have moved are read in another way.
        while topics != known:
            known = topics
            everything = [
                (t.name, number) for t in known.values() for number in range(t.partitions)
            ]
            self.bounds = self._run.cluster.bounds(everything)
            topics = self._run.cluster.topics(options.topics, options.topic_pattern or None)
        self.by_name = topics
        self._refuse_names()
        now = time.monotonic()
        for partition in [p for p, (again, _) in self._stalled.items() if again <= now]:
            del self._stalled[partition]

    def verify(self, durable: Frontier) -> None:
        """Refuse a frontier whose records are gone, or are no longer the ones it counted."""
        self.find()
        for name, position in of_partitions(durable).items():
            if not position:
                continue
            topic, number, topic_id = partition_parts(name)
            now = self.by_name.get(topic)
            if now is None:
                log.warning("topic %s is gone", topic)
            elif now.id != topic_id:
                self._refuse_recreated(topic)
            elif (topic, number) in self.bounds:
                refuse_lost(topic, number, position[0], self.bounds[topic, number])

    def partitions(self) -> list[tuple[Topic, int]]:
        """All partitions of all topics."""
        return [(t, number) for t in self.by_name.values() for number in range(t.partitions)]

    def readable(self, whole: Collection[str] = ()) -> list[tuple[Topic, int]]:
        """All partitions but those that are left out for now.

        In topics of `whole` keys may be in any partition: all are read or none is.
        """
        held = {topic for topic, _ in self._stalled if topic in whole}
        return [
            (topic, number)
            for topic, number in self.partitions()
            if (topic.name, number) in self.bounds
            and (topic.name, number) not in self._stalled
            and topic.name not in held
        ]

    def leave_out(self, lost: PartitionStalled) -> None:
        """Leave out a partition that gives nothing, for as long as a read may take."""
        again = time.monotonic() + self._run.options.read_timeout
        self._stalled[lost.topic, lost.partition] = (again, lost)
        self._once_stalled.add((lost.topic, lost.partition))

    def was_left_out(self, partition: Partition) -> bool:
        """Whether a partition was left out in this run, be it read again by now."""
        return partition in self._once_stalled

    @property
    def left_out(self) -> set[str]:
        """The names of partitions that are left out now."""
        stalled = [(t, n) for t, n in self._stalled if t in self.by_name]
        return {partition_name(self.by_name[t], n) for t, n in stalled}

    @property
    def trouble(self) -> PartitionStalled | None:
        """Why a partition is left out; None when none is."""
        return next((error for _, error in self._stalled.values()), None)

    def _refuse_names(self) -> None:
        """Refuse topics that cannot be tables of their own, as soon as they are there."""
        by_topic = self._run.reading.route.by_topic()
        for name in {*self.by_name, *self._run.reading.route.tables}:
            if name.endswith(dead_letters.SUFFIX):
                raise ConfigInvalid(
                    f"{'topic' if name in self.by_name else 'table'} {name} has a name of dead "
                    "letters",
                    detail=f"Tables that end with {dead_letters.SUFFIX} hold records that others "
                    "do not take.",
                    hint="Leave the topic out, or give the table of `route.tables` another name.",
                )
        if self._run.table_names is not None:
            self._run.table_names.by_name(
                self.by_name if by_topic else self._run.reading.route.tables
            )

    def _refuse_recreated(self, topic: str) -> None:
        if self._run.options.on_recreated == GO_ON:
            return
        raise recreated(
            topic,
            "Set `on_recreated: continue` to go on with the new topic from its beginning; "
            "rows of the old one stay in the table.",
        )
