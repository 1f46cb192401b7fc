"""CockroachDB changefeeds: every resolved timestamp becomes a snapshot of each table it changes.

`files` reads what a changefeed writes to cloud storage, `topics` what it writes to Kafka; `feed`
has what both have in common, `rows` what their messages mean. Here is what the pipeline file says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from icestream.errors import ConfigInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsOptions:
    """The topics that a changefeed writes to."""

    bootstrap_servers: str = field(
        default="", metadata={"doc": "Brokers to begin with, as `host:port,host:port`."}
    )
    topics: Sequence[str] = field(
        default=(), metadata={"doc": "Topics of the changefeed, one for each table."}
    )
    topic_pattern: str = field(
        default="",
        metadata={"doc": "Regular expression; topics that match it as a whole are read as well."},
    )
    group_id: str = field(
        default="",
        metadata={"doc": "Consumer group that mirrors progress; `icestream-<pipeline>` if empty."},
    )
    read_timeout: float = field(
        default=60.0,
        metadata={
            "doc": "When a partition gives nothing for so long, reading is tried again later.",
            "unit": "duration",
        },
    )
    properties: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"doc": "Settings of the Kafka client (librdkafka), such as `sasl.username`."},
    )

    def __post_init__(self) -> None:
        if not self.bootstrap_servers or not (self.topics or self.topic_pattern):
            lacking = "topics" if self.bootstrap_servers else "bootstrap_servers"
            raise ConfigInvalid(
                f"the changefeed's Kafka lacks `{lacking}`",
                hint="Write `kafka: {bootstrap_servers: localhost:9092, topics: [orders]}`.",
            )

    def settings(self) -> dict[str, str]:
        """What the client is told."""
        return {**self.properties, "bootstrap.servers": self.bootstrap_servers}


@dataclass(frozen=True, slots=True, kw_only=True)
class CockroachdbOptions:
    """Options of the CockroachDB source: one of `files` and `kafka`, and what is said of tables."""

    files: str = field(
        default="", metadata={"doc": "Folder or bucket that the changefeed writes to."}
    )
    kafka: TopicsOptions | None = field(
        default=None, metadata={"doc": "Topics that the changefeed writes to."}
    )
    tables: Sequence[str] = field(
        default=(), metadata={"doc": "Tables to take; all that the changefeed has by default."}
    )
    keys: Mapping[str, Sequence[str]] = field(
        default_factory=dict,
        metadata={"doc": "Primary-key columns by table, in order; found from the rows by default."},
    )
    columns: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict,
        metadata={"doc": "Iceberg types by table and column, where JSON does not tell them."},
    )
    resolved_every: float = field(
        default=0.0,
        metadata={
            "doc": "Least time between the resolved timestamps that become snapshots.",
            "unit": "duration",
        },
    )
    storage: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"doc": "Access to the files, named as Iceberg does: `s3.endpoint` ..."},
    )
    accept_lost_after: str = field(
        default="",
        metadata={
            "doc": "Go on although files were removed before they were read: the timestamp, or "
            "`start`, that the error names. It holds for that place alone."
        },
    )
    split_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={"doc": "Bytes of rows that one worker reads at a time.", "unit": "bytes"},
    )

    def __post_init__(self) -> None:
        if bool(self.files) == (self.kafka is not None):
            said = "has both `files` and" if self.files else "lacks `files` or"
            raise ConfigInvalid(
                f"the CockroachDB source {said} `kafka`",
                hint="Say where the changefeed writes to: a folder such as "
                "`files: s3://feeds/shop/`, or `kafka: {bootstrap_servers: ..., topics: [...]}`.",
            )
