"""What the coordinator asks a Kafka cluster: which topics there are, and how far they go.

It never creates a topic and never joins a group. The only thing that it writes are offsets of a
group that nobody has to join, so that tools for watching lag have something to see. What a
pipeline has read is known by what it has committed, not by them.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as AnswerMissing
from dataclasses import dataclass
from typing import Any, TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    OffsetSpec,
)

from icestream.errors import ConfigInvalid, IcestreamError, SourceUnavailable, shown
from icestream.patience import bridged
from icestream.sources.kafka.errors import (
    keep_settings_secret,
    needs_operator,
    setting_refused,
    translated,
)

REQUEST_SECONDS = 20.0
# A request times out by itself; this much later its answer counts as lost.
GRACE_SECONDS = 5.0
# What the broker of a group says while it reads what it knows of groups.
LOADING = "COORDINATOR_LOAD_IN_PROGRESS"
INTERNAL_PREFIX = "__"
# How the names of errors begin that come from the client itself, not from a broker.
CLIENTS_OWN_PREFIX = "_"

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as it is now. One that was deleted and created anew has another `id`."""

    name: str
    id: str
    partitions: int


class Cluster:
    """A Kafka cluster, reached with the settings of librdkafka; used by one thread at a time.

    Errors are `ConfigInvalid` when only another configuration helps, else `SourceUnavailable`.
    """

    def __init__(self, settings: Mapping[str, str], *, request_seconds: float = REQUEST_SECONDS):
        keep_settings_secret(settings)
        self._servers = settings.get("bootstrap.servers", "")
        self._request_seconds = request_seconds
        self._trouble: tuple[str, str] | None = None
        self._settings: dict[str, Any] = {**settings, "error_cb": self._note_trouble}
        self._admin: Any = self._client()
        self._lost = False

    def _client(self) -> Any:
        try:
            return AdminClient(self._settings, logger=_ClientLog())
        except KafkaException as error:
            raise setting_refused(error.args[0].str()) from error
        except (TypeError, ValueError) as error:
            raise setting_refused(str(error)) from error

    def topics(self, names: Collection[str], pattern: str | None = None) -> Mapping[str, Topic]:
        """The named topics, and those whose whole name a regular expression matches, in order.

        Kafka's own topics come by name only. Raises `SourceUnavailable` when a named one is not
        there.
        """
        wanted = set(names)
        if pattern is not None:
            wanted |= self._matching(pattern)
        if not wanted:
            return {}
        asked = self._request(
            "describe topics",
            lambda: self._admin.describe_topics(
                TopicCollection(sorted(wanted)), request_timeout=self._request_seconds
            ),
        )
        found = {}
        for name in sorted(wanted):
            described = self._answer(f"find topic {name}", asked[name])
            id_ = str(described.topic_id)
            found[name] = Topic(name=name, id=id_, partitions=len(described.partitions))
        return found

    def _matching(self, pattern: str) -> set[str]:
        try:
            matches = re.compile(pattern).fullmatch
        except re.error as error:
            raise ConfigInvalid(
                f"the pattern of topics is no regular expression: {error}",
                hint="Write it as Python does; it must match the whole name.",
            ) from error
        listed = self._request(
            "list topics", lambda: self._admin.list_topics(timeout=self._request_seconds)
        )
        return {
            name for name in listed.topics if matches(name) and not name.startswith(INTERNAL_PREFIX)
        }

    def bounds(
        self, partitions: Sequence[tuple[str, int]]
    ) -> Mapping[tuple[str, int], tuple[int, int]]:
        """The earliest offset of each partition, and the one up to which all is decided.

        The latter is the last stable offset: no transaction that is still open began before it.
        Two requests to each broker, whatever the number of partitions. The earliest offsets are
        asked for first, so that they never lie past the ends.
        """
        if not partitions:
            return {}
        earliest = self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        ends = self.stable_ends(partitions)
        return {partition: (earliest[partition], ends[partition]) for partition in partitions}

    def stable_ends(self, partitions: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """The offset of each partition up to which all is decided; one request to each broker."""
        if not partitions:
            return {}
        return self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def offsets_at(
        self, partitions: Sequence[tuple[str, int]], milliseconds: int
    ) -> Mapping[tuple[str, int], tuple[int, int]]:
        """The first offset of each partition with this timestamp or a later one, and its timestamp.

        -1 for both where no record has one. One request to each broker.
        """
        if not partitions:
            return {}
        which = OffsetSpec.for_timestamp(milliseconds)
        found = self._listed(partitions, which, least=-1)
        return {place: (int(each.offset), int(each.timestamp)) for place, each in found.items()}

    def _offsets(
        self, partitions: Sequence[tuple[str, int]], which: OffsetSpec
    ) -> dict[tuple[str, int], int]:
        return {place: int(e.offset) for place, e in self._listed(partitions, which).items()}

    def _listed(
        self, partitions: Sequence[tuple[str, int]], which: OffsetSpec, least: int = 0
    ) -> dict[tuple[str, int], Any]:
        """The brokers' answers. An offset below `least` is none: it is not known yet."""
        asked = self._request(
            "ask for offsets",
            lambda: self._admin.list_offsets(
                {TopicPartition(*partition): which for partition in partitions},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=self._request_seconds,
            ),
        )
        found = {}
        for place, answer in asked.items():
            what = f"find the offsets of partition {place.partition} of topic {place.topic}"
            listed = self._answer(what, answer)
            if listed.offset < least:
                # A broker that has just come back may answer so, without any error.
                raise _unknown_yet(f"{what} at Kafka {self._servers}", listed.offset)
            found[place.topic, place.partition] = listed
        return found

    def delete_retention(self, topics: Collection[str]) -> Mapping[str, int]:
        """How long compacted topics keep deletes, in milliseconds; other topics are left out.

        Nothing depends on it: what the broker does not tell is left out as well.
        """
        found: dict[str, int] = {}
        if not topics:
            return found
        try:
            wanted = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in sorted(topics)]
            asked = self._request(
                "ask for settings",
                lambda: self._admin.describe_configs(wanted, request_timeout=self._request_seconds),
            )
            for topic, answer in asked.items():
                settings = self._answer(f"ask for settings of topic {topic.name}", answer)
                if "compact" in settings["cleanup.policy"].value:
                    found[topic.name] = int(settings["delete.retention.ms"].value)
        except (IcestreamError, KeyError, ValueError) as error:
            logger.debug("could not ask how long deletes are kept: %s", error)
        return found

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Show what is durable as the offsets of a consumer group, for tools that watch lag.

        Nothing depends on it: a failure is logged and forgotten.
        """
        places = [
            TopicPartition(topic, partition, offset)
            for (topic, partition), offset in offsets.items()
        ]
        if not places:
            return
        try:
            # A broker that has just been started says for a moment that it is loading.
            bridged(lambda: self._publish(group, places), lambda error: LOADING in str(error))
        except IcestreamError as error:
            logger.warning("could not publish the offsets of group %s: %s", group, error)

    def _publish(self, group: str, places: Sequence[TopicPartition]) -> None:
        asked = self._request(
            "publish offsets",
            lambda: self._admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, list(places))],
                request_timeout=self._request_seconds,
            ),
        )
        for answer in asked.values():
            refused = [
                place.error
                for place in self._answer("publish offsets", answer).topic_partitions
                if place.error
            ]
            if refused:
                raise translated(refused[0].name(), refused[0].str(), "publish offsets")

    def close(self) -> None:
        """Let go of connections; nothing can be asked after it."""
        # The client has no other way to close than to be forgotten.
        self._admin = None

    def _request(self, what: str, send: Callable[[], Answer]) -> Answer:
        if self._lost:
            self._admin, self._lost = self._client(), False
        # Log lines and errors of earlier requests wait in the client until they are asked for.
        self._admin.poll(0)
        self._trouble = None
        try:
            return send()
        except KafkaException as error:
            raise self._translated(error.args[0], what) from error
        except (TypeError, ValueError) as error:
            raise translated("_INVALID_ARG", str(error), what) from error

    def _answer(self, what: str, asked: "Future[Any]") -> Any:
        try:
            return asked.result(self._request_seconds + GRACE_SECONDS)
        except KafkaException as error:
            raise self._translated(error.args[0], what) from error
        except AnswerMissing as error:
            self._lost = True
            raise translated("_TIMED_OUT", "no answer", what) from error

    def _translated(self, error: KafkaError, what: str) -> IcestreamError:
        # What is behind a time-out, such as a wrong password, is only told on the side.
        self._admin.poll(0)
        name, reason = error.name(), error.str()
        # One in a hundred clients does not find a broker again that was started anew: it waits
        # for the cluster's controller for ever. So what no broker said is asked of a new client.
        self._lost = self._lost or name.startswith(CLIENTS_OWN_PREFIX)
        if self._trouble is not None and not needs_operator(name):
            operators = needs_operator(self._trouble[0])
            reason = self._trouble[1] if operators else f"{reason} ({self._trouble[1]})"
            name = self._trouble[0] if operators else name
        return translated(name, reason, f"{what} at Kafka {self._servers}")

    def _note_trouble(self, error: KafkaError) -> None:
        if self._trouble is None or not needs_operator(self._trouble[0]):
            self._trouble = error.name(), error.str()


def _unknown_yet(what: str, offset: int) -> SourceUnavailable:
    return SourceUnavailable(
        f"could not {what}",
        detail=f"Kafka says {offset}, which is no offset: the partition's leader does not know it "
        "yet.",
        hint="It is asked again. If it stays so, check that the partition has a leader.",
    )


class _ClientLog:
    """Takes the client's log lines. It tells of each of many tries; what matters is raised."""

    def log(self, _level: int, text: str, *arguments: Any) -> None:
        logger.debug("kafka client: %s", shown(text % arguments if arguments else text))
