"""Options of the CockroachDB source, and how it is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from icestream.destination import Destination
from icestream.errors import ConfigInvalid
from icestream.sources import Source
from icestream.sources.options import Opening, SourceOptions

# Topics of an idle changefeed fill with resolved timestamps, and retention takes the old ones away.
RESOLVED_HEARTBEAT_SECONDS = 3600.0


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
class CockroachdbOptions(SourceOptions):
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

    def open(self, opening: Opening) -> Source:
        """The source; see `SourceOptions.open`."""
        from icestream.sources.cockroachdb.files import CockroachdbFiles
        from icestream.sources.cockroachdb.topics import CockroachdbTopics

        pipeline, run, budget = opening.pipeline, opening.run_tasks, opening.budget
        if self.kafka is not None:
            return CockroachdbTopics(self, pipeline, run, opening.parallelism, budget)
        return CockroachdbFiles(self, pipeline, run, budget)

    def named(self) -> Sequence[str]:
        """Its tables, or one for each of its topics."""
        return self.tables or (self.kafka.topics if self.kafka else ())

    def possible(self, destination: Destination) -> Sequence[str] | None:
        """Without `tables` all that the changefeed has."""
        return self.tables or None

    def heartbeat_seconds(self) -> float | None:
        """Topics lose the timestamps that progress would go on from."""
        return None if self.kafka is None else RESOLVED_HEARTBEAT_SECONDS

    def refuse_dead_letters(self, pipeline: str) -> None:
        """A snapshot could not leave a row out."""
        raise ConfigInvalid(
            f"pipeline {pipeline} cannot set `on_error: dead_letter`",
            detail="A snapshot of a changefeed holds all changes up to its timestamp, or none.",
            hint="Leave `on_error` out: the pipeline stops at a row that cannot be taken.",
        )


OPTIONS = CockroachdbOptions
