"""How often a pipeline commits, and how much at once."""

from dataclasses import dataclass, field

from icestream.errors import ConfigInvalid
from icestream.sources import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often and how much at once."""

    commit_interval: float = field(
        default=10.0,
        metadata={
            "doc": "While running, the source is asked for new changes this often, and what has "
            "come becomes an epoch. Sooner when `epoch_rows_max` or `epoch_bytes_max` has come "
            "(PostgreSQL, Kafka), while tables are copied (PostgreSQL), and while not all that was "
            "there has become epochs (Kafka, changefeeds over Kafka). An Iceberg source has "
            "`polling_interval` instead, and this one has no effect.",
            "unit": "duration",
        },
    )
    epochs_in_flight: int = field(
        default=3,
        metadata={
            "doc": "Epochs that are read and written at the same time. Always one with an Iceberg "
            "source or an OpenSearch sink."
        },
    )
    epoch_rows_max: int = field(
        default=2_000_000,
        metadata={
            "doc": "About how many rows an epoch has at most. Kafka: never more, unless more "
            "partitions than that have new records: each gives at least one. PostgreSQL: the "
            "epoch may exceed it by about a quarter, or by one large transaction, which is never "
            "cut. Changefeeds with `resolved_every`: the epoch ends at the next resolved "
            "timestamp; without it this option has no effect. Where nobody has counted the rows "
            "(copies of tables, files of changefeeds) only `epoch_bytes_max` counts. An Iceberg "
            "source uses neither."
        },
    )
    epoch_bytes_max: int = field(
        default=1024**3,
        metadata={
            "doc": "The same in bytes of the source; see `epoch_rows_max`. Kafka may exceed it. A "
            "copy may, too: it reads at least `chunk_pages` pages, and values that lie outside of "
            "a table's pages (TOAST) are not counted.",
            "unit": "bytes",
        },
    )
    heartbeat_interval: float | None = field(
        default=None,
        metadata={
            "doc": "Longest time that a frontier without changes stays unpublished; 0 is never. "
            "By default PT5M for PostgreSQL, whose slot could not move on otherwise, PT1H for "
            "changefeeds over Kafka, whose topics fill while nothing changes, else 0.",
            "unit": "duration",
        },
    )

    def __post_init__(self) -> None:
        if self.epochs_in_flight < 1:
            raise ConfigInvalid("epochs_in_flight must be at least 1")
        if self.epoch_rows_max < 1 or self.epoch_bytes_max < 1:
            raise ConfigInvalid("epoch_rows_max and epoch_bytes_max must be at least 1")

    @property
    def budget(self) -> Budget:
        """How much an epoch may hold."""
        return Budget(rows=self.epoch_rows_max, bytes=self.epoch_bytes_max)
