"""Options of the Kafka source, and how it is opened."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from icestream.destination import Destination
from icestream.errors import ConfigInvalid
from icestream.formats.options import REGISTERED, RegistryOptions, ValueOptions
from icestream.schema import parse_type
from icestream.sources import Source
from icestream.sources.cockroachdb.options import TopicsOptions
from icestream.sources.options import Opening, SourceOptions

EARLIEST = "earliest"
LATEST = "latest"
STOP = "stop"
GO_ON = "continue"
# Options that say the same of a changefeed, and are about its tables.
_CHANGEFEED_ENVELOPE = "cockroachdb"
_CHANGEFEED_TABLES = ("keys", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaOptions(SourceOptions):
    """Options of the Kafka source."""

    from_topics = True

    bootstrap_servers: str = field(
        default="", metadata={"doc": "Brokers to begin with, as `host:port,host:port`."}
    )
    topics: Sequence[str] = field(default=(), metadata={"doc": "Topics to read."})
    topic_pattern: str = field(
        default="",
        metadata={"doc": "Regular expression; topics that match it as a whole are read as well."},
    )
    value: ValueOptions = field(
        default_factory=ValueOptions, metadata={"doc": "What records are, and what they mean."}
    )
    schema_registry: RegistryOptions | None = field(
        default=None, metadata={"doc": "Where the schemas of Avro and Protobuf records are."}
    )
    keys: Mapping[str, Sequence[str]] = field(
        default_factory=dict,
        metadata={"doc": "Columns that identify a row, by table; the record's key by default."},
    )
    columns: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict,
        metadata={"doc": "Iceberg types by table and column, where records do not tell them."},
    )
    keyed: bool = field(
        default=True,
        metadata={
            "doc": "All records of a key are in one partition, unless the topic is given more "
            "partitions. When that is not so, `false` has changes ordered by the records' "
            "timestamps, at the price of a shuffle."
        },
    )
    start: str = field(
        default=EARLIEST,
        metadata={
            "doc": "Where partitions begin that are there at the first run: `earliest`, `latest`."
        },
    )
    group_id: str = field(
        default="",
        metadata={"doc": "Consumer group that mirrors progress; `icestream-<pipeline>` if empty."},
    )
    read_timeout: float = field(
        default=60.0,
        metadata={
            "doc": "A partition that gives nothing for so long is left out for a while.",
            "unit": "duration",
        },
    )
    on_recreated: str = field(
        default=STOP,
        metadata={
            "doc": "When a topic was deleted and created anew: `stop`, or `continue` with the new "
            "one from its beginning."
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
                f"the Kafka source lacks `{lacking}`",
                hint="Write `kafka: {bootstrap_servers: localhost:9092, topics: [orders]}`.",
            )
        formats = {self.value.format, self.value.keys_format()}
        if not formats.isdisjoint(REGISTERED) and not (
            self.schema_registry and self.schema_registry.url
        ):
            raise ConfigInvalid(
                f"records in {self.value.format} need a schema registry",
                hint="Write `schema_registry: {url: http://localhost:8081}`.",
            )
        _refuse_unknown("start", self.start, (EARLIEST, LATEST))
        _refuse_unknown("on_recreated", self.on_recreated, (STOP, GO_ON))
        for table, columns in self.columns.items():
            lower = Counter(name.lower() for name in columns)
            if alike := [name for name in columns if lower[name.lower()] > 1]:
                raise ConfigInvalid(
                    f"columns {' and '.join(alike)} of table {table} cannot be told apart",
                    detail="Readers do not mind the case of letters.",
                    hint="Declare one of them.",
                )
        try:
            re.compile(self.topic_pattern)
        except re.error as error:
            raise ConfigInvalid(
                "topic_pattern is not a regular expression", detail=f"{error}."
            ) from error

    def settings(self) -> dict[str, str]:
        """What the client is told."""
        return {**self.properties, "bootstrap.servers": self.bootstrap_servers}

    def open(self, opening: Opening) -> Source:
        """The source; see `SourceOptions.open`."""
        from icestream.sources.kafka.source import KafkaSource

        pipeline, budget = opening.pipeline, opening.budget
        reading = self._reading(opening)
        source = KafkaSource(self, pipeline, reading, budget, opening.parallelism)
        source.run.table_names = opening.destination.names
        source.run.letter_box = opening.letter_box
        return source

    def _reading(self, opening: Opening) -> Any:
        from icestream.sources.kafka.route import Route
        from icestream.sources.kafka.split import Keys, Reading

        destination = opening.destination
        return Reading(
            settings=self.settings(),
            value=self.value,
            registry=self.schema_registry,
            route=Route(**destination.route) if destination.route else Route(),
            keys=Keys(by_table={**destination.keys, **self.keys}, otherwise=destination.key_of_all),
            declared={
                table: {name: parse_type(text) for name, text in types.items()}
                for table, types in self.columns.items()
            },
            read_timeout=self.read_timeout,
            dead_letters=opening.dead_letters,
            keyed=self.keyed,
        )

    @classmethod
    def stands_for(cls, given: Mapping[str, Any], place: str) -> Mapping[str, Any] | None:
        """Topics in CockroachDB's envelope are the same as `cockroachdb: {kafka: ...}`."""
        value = given.get("value")
        if not isinstance(value, Mapping) or value.get("envelope") != _CHANGEFEED_ENVELOPE:
            return None
        if set(value) - {"envelope", "format"} or value.get("format", "json") != "json":
            raise ConfigInvalid(
                f"{place}.value can only be `{{format: json, envelope: {_CHANGEFEED_ENVELOPE}}}`",
                hint="Create the changefeed with format=json, the default.",
            )
        tables = {key: given[key] for key in _CHANGEFEED_TABLES if key in given}
        topics = {key: v for key, v in given.items() if key != "value" and key not in tables}
        known = [option.name for option in fields(TopicsOptions)]
        for key in topics:
            if key not in known:
                raise ConfigInvalid(
                    f"{place}.{key} does not go with `envelope: {_CHANGEFEED_ENVELOPE}`",
                    hint=f"Known there: {', '.join([*known, *_CHANGEFEED_TABLES])}; "
                    "`source.cockroachdb` has more options for a changefeed.",
                )
        return {"cockroachdb": {"kafka": topics, **tables}}

    def named(self) -> Sequence[str]:
        """Its topics."""
        return self.topics

    def possible(self, destination: Destination) -> Sequence[str] | None:
        """Its topics, or the tables of the route, unless records or a pattern tell them."""
        if destination.route is not None:
            return list(destination.route["tables"]) or None
        return None if self.topic_pattern else self.topics

    def refuse_dead_letters(self, pipeline: str) -> None:
        """A record is a dead letter by itself."""
        return None


def _refuse_unknown(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigInvalid(
            f"source.kafka.{option} cannot be `{value}`", hint=f"Known: {', '.join(known)}."
        )


OPTIONS = KafkaOptions
