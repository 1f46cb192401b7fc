"""What all rooms of this source share in a run."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from icestream.dead_letters import LetterBox
from icestream.names import TableNames
from icestream.sources import Budget
from icestream.sources.kafka.client import Cluster
from icestream.sources.kafka.options import KafkaOptions
from icestream.sources.kafka.split import Reading


@dataclass(slots=True, kw_only=True)
class KafkaRun:
    """How topics are read, and who is asked. Thread: any.

    `table_names` and `letter_box` are the destination's: how its tables are called, and its tables
    of dead letters, when there are any.
    """

    options: KafkaOptions
    reading: Reading
    budget: Budget
    parallelism: Callable[[], int]
    cluster: Cluster
    table_names: TableNames | None = None
    letter_box: LetterBox | None = None

    @property
    def workers(self) -> int:
        """How many tasks run at the same time now."""
        return self.parallelism()

    @property
    def ordered(self) -> bool:
        """Whether partitions are read by themselves, and keys that move have to be looked for."""
        return self.options.keyed and not self.reading.only_added

    @property
    def unordered(self) -> bool:
        """Whether changes of a key may be in any partition, and have to be brought together."""
        return not self.options.keyed and not self.reading.only_added

    def now_ms(self) -> int:
        """The time, in milliseconds since 1970."""
        return int(time.time() * 1000)
