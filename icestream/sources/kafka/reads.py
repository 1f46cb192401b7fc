"""What reading has taught: how large records are, and how new."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from icestream.epoch import Epoch
from icestream.frontier import Frontier
from icestream.iceberg.progress import VALID_THROUGH
from icestream.sources.kafka.partitions import (
    Partition,
    of_partitions,
    partition_name,
    partition_parts,
)
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.split import RangeRead
from icestream.sources.kafka.topics import TopicsNow

log = logging.getLogger(__name__)

# Before anything was read a record is taken to be this large.
RECORD_BYTES = 1024


class ReadSoFar:
    """Ranges that were read and are not durable, and the newest record of those that are.

    Thread: those of epochs tell it what they have read, side by side; the loop's asks.
    """

    def __init__(self, run: KafkaRun, topics: TopicsNow):
        self._run = run
        self._topics = topics
        self._lock = threading.Lock()
        self._record_bytes = float(RECORD_BYTES)
        self._reads: dict[Partition, list[RangeRead]] = {}
        # Compacted topics that an earlier run has read, and how long they keep deletes.
        self._compacted: Mapping[str, int] | None = None

    def note(self, learned: Sequence[RangeRead]) -> None:
        """Note what a split has read."""
        self._warn_of_lost_deletes(learned)
        rows, size = sum(read.rows for read in learned), sum(read.bytes for read in learned)
        with self._lock:
            if rows:
                self._record_bytes = 0.5 * self._record_bytes + 0.5 * size / rows
            for read in learned:
                partition = (read.range.topic, read.range.partition)
                self._reads.setdefault(partition, []).append(read)

    def rows_at_once(self) -> int:
        """How many rows an epoch may have, by the size of records so far."""
        return max(1, min(self._run.budget.rows, int(self._run.budget.bytes / self._record_bytes)))

    def labels(self, epoch: Epoch) -> Mapping[str, str]:
        """The time up to which all partitions were read; absent when that is not known."""
        newest = []
        for topic, number in self._topics.partitions():
            position = epoch.upper[partition_name(topic, number)]
            with self._lock:
                reads = list(self._reads.get((topic.name, number), []))
            known = [r.newest for r in reads if position and r.range.end <= position[0]]
            newest.append(max(known, default=-1))
        if self._topics.trouble or min(newest, default=-1) < 0:
            return {}
        moment = datetime.fromtimestamp(min(newest) / 1000, UTC)
        return {VALID_THROUGH: moment.isoformat(timespec="milliseconds")}

    def lag_seconds(self, durable: Frontier) -> float | None:
        """The age of the newest record that is durable, while there are others."""
        behind = any(
            durable[partition_name(topic, number)] < (self._topics.bounds[topic.name, number][1],)
            for topic, number in self._topics.readable()
        )
        with self._lock:
            newest = [read.newest for reads in self._reads.values() for read in reads]
        if not behind or not newest:
            return 0.0
        return max(0.0, time.time() - max(newest) / 1000)

    def forget(self, offsets: Mapping[Partition, int]) -> None:
        """Keep of durable ranges only the one with the newest record, for each partition."""
        for partition, durable in offsets.items():
            self._forget(partition, durable)

    def note_compacted(self, lower: Frontier) -> None:
        """Find out once which topics that were read before are compacted."""
        if self._compacted is None:
            read = {partition_parts(name)[0] for name, at in of_partitions(lower).items() if at}
            known = read & self._topics.by_name.keys()
            self._compacted = self._run.cluster.delete_retention(known)

    def _warn_of_lost_deletes(self, reads: Sequence[RangeRead]) -> None:
        """Say when a compacted topic is read later than it keeps deletes: some may be gone."""
        for read in reads:
            kept = (self._compacted or {}).get(read.range.topic)
            if kept is not None and 0 <= read.oldest < self._run.now_ms() - kept:
                log.warning(
                    "topic %s is compacted and was read later than it keeps deletes: rows that "
                    "were deleted meanwhile may have stayed; raise delete.retention.ms, and build "
                    "the table anew to be sure",
                    read.range.topic,
                )
                self._compacted = {
                    topic: kept
                    for topic, kept in (self._compacted or {}).items()
                    if topic != read.range.topic
                }

    def _forget(self, partition: Partition, durable: int) -> None:
        with self._lock:
            reads = self._reads.get(partition, [])
            done = [read for read in reads if read.range.end <= durable]
            if done:
                newest = max(done, key=lambda read: read.newest)
                later = [read for read in reads if read.range.end > durable]
                self._reads[partition] = [newest, *later]
