"""What the Kafka client does without a broker."""

import ctypes
import json
import pickle
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from confluent_kafka import OFFSET_INVALID

from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.sources import SplitsLost
from icestream.sources.kafka import librdkafka
from icestream.sources.kafka.client import Cluster
from icestream.sources.kafka.consumer import PartitionStalled, Range, fetched_offset, read_range
from icestream.sources.kafka.errors import keep_settings_secret, translated
from icestream.sources.kafka.kernels import copy_records, measure
from icestream.sources.kafka.librdkafka import Message, library

NOWHERE = {"bootstrap.servers": "127.0.0.1:1"}
WANTED = Range(topic="orders", partition=3, start=10, end=20)


def message(offset, value=None, key=None, err=0):
    """A message as the library would hand it over; the bytes are kept by the caller."""
    found = Message(err=err, offset=offset)
    for name, size, content in (("payload", "len", value), ("key", "key_len", key)):
        if content is not None:
            kept = ctypes.create_string_buffer(content, len(content) + 1)
            setattr(found, name, ctypes.addressof(kept))
            setattr(found, size, len(content))
            setattr(found, f"kept_{name}", kept)
    return found


def addresses(messages):
    return np.array([ctypes.addressof(found) for found in messages], dtype=np.int64)


def columns(count, size):
    return np.zeros(count + 1, np.int32), np.empty(count, np.bool_), np.empty(size, np.uint8)


def test_the_layout_of_a_message_is_that_of_the_header():
    """K1: a wrong place would read another field's bytes."""
    places = {name: Message.place(name) for name, _ in Message._fields_}
    assert list(places.values()) == [0, 8, 16, 24, 32, 40, 48, 56, 64]
    assert list(places)[3:8] == ["payload", "len", "key", "key_len", "offset"]
    assert ctypes.sizeof(Message) == 72


def test_messages_are_copied_into_columns():
    """K1: null is not empty, and every byte is in its place."""
    given = [message(5, b"one", b"a"), message(6), message(9, b"", b""), message(10, b"\0\xff")]
    found = addresses(given)
    assert measure(found, 100, 1_000, 0) == (4, 5, 1)
    values, keys, offsets = columns(4, 5), columns(4, 1), np.empty(4, np.int64)
    copy_records(found, values, keys, offsets)
    assert values[0].tolist() == [0, 3, 3, 3, 5] and keys[0].tolist() == [0, 1, 1, 1, 1]
    assert values[1].tolist() == [True, False, True, True]
    assert keys[1].tolist() == [True, False, True, False]
    assert bytes(values[2]) == b"one\0\xff" and bytes(keys[2]) == b"a"
    assert offsets.tolist() == [5, 6, 9, 10]


def test_records_are_counted_up_to_the_end_an_error_or_the_room():
    """K1: what does not belong to a batch stays where it is."""
    given = [message(5, b"12345", b"k"), message(6, b"12345", b"k"), message(7, b"", b"")]
    found = addresses(given)
    assert measure(found, 6, 1_000, 0) == (1, 5, 1)
    assert measure(found, 5, 1_000, 1) == (0, 0, 0)
    assert measure(found, 100, 11, 0) == (1, 5, 1)
    assert measure(found, 100, 12, 0) == (3, 10, 2)
    assert measure(found, 100, 5, 0) == (0, 0, 0)
    assert measure(found, 100, 5, 1) == (1, 5, 1)
    given[1].err = -191
    assert measure(found, 100, 1_000, 0) == (1, 5, 1)


def test_a_stalled_partition_travels_from_worker_to_coordinator():
    """K9: the coordinator learns which partition to leave behind."""
    stalled = PartitionStalled("orders", 3, detail="Nothing came.", hint="Look.")
    again = pickle.loads(pickle.dumps(stalled))
    assert isinstance(again, SplitsLost) and isinstance(again, PartitionStalled)
    assert (again.topic, again.partition, str(again)) == ("orders", 3, str(stalled))


def test_an_empty_range_asks_nobody():
    """K1: a partition where nothing is new costs nothing."""
    empty = Range(topic="orders", partition=0, start=7, end=7)
    assert list(read_range({"no.such": "setting"}, empty, read_timeout=1, batch_bytes=1)) == []


@pytest.mark.parametrize(
    "wrong", [{"no.such.setting": "1"}, {"security.protocol": "1"}, {"ssl.ca.location": "nowhere"}]
)
def test_a_setting_that_the_client_does_not_take_is_named(wrong):
    """O3: only another configuration helps; the coordinator and the worker agree."""
    given = {**NOWHERE, "security.protocol": "ssl", **wrong}
    with pytest.raises(ConfigInvalid) as on_coordinator:
        Cluster(given)
    with pytest.raises(ConfigInvalid) as on_worker:
        list(read_range(given, WANTED, read_timeout=1, batch_bytes=1_000))
    for refused in (on_coordinator, on_worker):
        assert next(iter(wrong)) in str(refused.value)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    """K1, O3: before anything is asked."""
    with pytest.raises(ConfigInvalid, match="regular expression"):
        Cluster(NOWHERE).topics([], "orders-(")


def test_nothing_is_asked_when_nothing_is_wanted():
    """K1: a cluster that is away does not matter then."""
    cluster = Cluster(NOWHERE)
    assert (cluster.topics([]), cluster.bounds([])) == ({}, {})
    cluster.commit_offsets("group", {})


class Brokers:
    """Stands in for the admin client: its brokers answer with these offsets, partition by
    partition, without an error."""

    def __init__(self, *offsets):
        self.offsets = offsets

    def poll(self, _seconds):
        pass

    def list_offsets(self, asked, **_settings):
        answers = {}
        for place in asked:
            found = SimpleNamespace(offset=self.offsets[place.partition], timestamp=-1)
            answers[place] = Future()
            answers[place].set_result(found)
        return answers


@pytest.mark.parametrize(
    ("ask", "offset"),
    [
        (lambda cluster, places: cluster.bounds(places), OFFSET_INVALID),
        (lambda cluster, places: cluster.stable_ends(places), OFFSET_INVALID),
        (lambda cluster, places: cluster.offsets_at(places, 0), OFFSET_INVALID),
        (lambda cluster, places: cluster.bounds(places), -1),
        (lambda cluster, places: cluster.stable_ends(places), -1),
    ],
)
def test_an_offset_that_is_not_known_yet_is_waited_for(ask, offset):
    """K1 E7, Mend F3: a broker that has just come back may answer without an error and without an
    offset. That says nothing about the partition's history, and is never taken for its end."""
    cluster = Cluster(NOWHERE)
    cluster._admin = Brokers(100, offset)
    with pytest.raises(SourceUnavailable) as refused:
        ask(cluster, [("orders", 0), ("orders", 1)])
    assert "partition 1 of topic orders" in str(refused.value)
    assert str(offset) in refused.value.detail


def test_a_time_after_every_record_is_an_answer():
    """K1, Mend F3: -1 is Kafka's word for it, and no trouble."""
    cluster = Cluster(NOWHERE)
    cluster._admin = Brokers(100, -1)
    found = cluster.offsets_at([("orders", 0), ("orders", 1)], 5)
    assert found == {("orders", 0): (100, -1), ("orders", 1): (-1, -1)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_AUTHENTICATION", ConfigInvalid),
        ("_SSL", ConfigInvalid),
        ("TOPIC_AUTHORIZATION_FAILED", ConfigInvalid),
        ("_TIMED_OUT", SourceUnavailable),
        ("_TRANSPORT", SourceUnavailable),
        ("UNKNOWN_TOPIC_OR_PART", SourceUnavailable),
        ("LEADER_NOT_AVAILABLE", SourceUnavailable),
    ],
)
def test_errors_are_sorted_by_who_can_mend_them(name, kind):
    """O3: time, or the operator."""
    error = translated(name, "because", "read")
    assert type(error) is kind
    assert "because" in error.detail and error.hint


@pytest.mark.parametrize(
    "setting", ["sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"]
)
def test_no_error_shows_a_secret_setting(setting):
    """O3: even when the client's own text does."""
    secret = f"tell-nobody-{setting}"
    keep_settings_secret({setting: secret})
    assert secret not in str(translated("_FAIL", f"{secret} is wrong", "sign on"))


def test_progress_is_read_from_the_librarys_statistics():
    """K9: and a partition that they do not name is no progress."""
    partitions = {"3": {"next_offset": 17}, "-1": {"next_offset": 0}}
    told = json.dumps({"topics": {"orders": {"partitions": partitions}}}).encode()
    assert fetched_offset(told, WANTED) == 17
    assert fetched_offset(b"{}", WANTED) == -1


def test_a_missing_library_is_said_to_be_missing(monkeypatch):
    """O3: the error says what to install."""
    library.cache_clear()
    # As on a machine without the client.
    monkeypatch.setattr(librdkafka.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid) as missing:
        library()
    assert "confluent-kafka" in str(missing.value)


@pytest.mark.parametrize(
    "place", ["confluent_kafka.libs/librdkafka-1.so.1", "confluent_kafka/.dylibs/librdkafka.dylib"]
)
def test_a_library_that_does_not_load_is_named(tmp_path, monkeypatch, place):
    """O3: wherever wheels carry it."""
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no library")
    library.cache_clear()
    # A client that lies somewhere else.
    monkeypatch.setattr(librdkafka, "_package", lambda: tmp_path / "confluent_kafka")
    with pytest.raises(ConfigInvalid) as broken:
        library()
    assert str(file) in str(broken.value)
