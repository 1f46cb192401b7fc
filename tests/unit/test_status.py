"""What people and programs see: one line or one object per record, health, metrics."""

import json
import logging
import sys
import urllib.error
import urllib.request

import pytest

from icestream.errors import ConfigInvalid
from icestream.pipeline import Health, State
from icestream.status import JsonFormatter, StatusServer, TextFormatter


def record(**fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "icestream.x", "levelno": 20, "levelname": "INFO", "msg": "committed %s"}
    )
    made.args = ("5",)
    made.__dict__.update(fields)
    return made


def failed_record() -> logging.LogRecord:
    value = "a value of a row"
    try:
        try:
            float(value)
        except ValueError as error:
            raise ConfigInvalid("it broke") from error
    except ConfigInvalid:
        return record(exc_info=sys.exc_info())


def test_a_text_line_has_the_fields_behind_the_message():
    """U5: structured logs with pipeline, table, epoch, counts."""
    line = TextFormatter().format(record(pipeline="orders", epoch=3))
    assert line.split(maxsplit=1)[1] == "info    committed 5  pipeline=orders epoch=3"
    assert "\n" not in line


def test_a_json_line_is_one_object():
    """U5: for programs."""
    data = json.loads(JsonFormatter().format(record(pipeline="orders", epoch=3)))
    at = data.pop("at")
    assert at.endswith("+00:00")
    assert data == {
        "level": "info",
        "logger": "icestream.x",
        "message": "committed 5",
        "pipeline": "orders",
        "epoch": 3,
    }


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_a_traceback_follows_in_either_form_and_shows_no_value_of_a_row(kind):
    """U3, U5: what nobody expected is shown line by line, with the texts of our own errors."""
    line = kind().format(failed_record())
    text = json.loads(line)["traceback"] if kind is JsonFormatter else line
    assert text.count("in failed_record") == 2
    assert "ValueError: " in text and text.endswith("ConfigInvalid: it broke")
    assert "a value of a row" not in line


class Watched:
    """As much of a pipeline as the server shows."""

    def __init__(self, name: str):
        self.name = name
        self.health = Health(name)


@pytest.fixture
def server():
    watched = Watched("orders")
    watched.health.become(State.STALLED, ConfigInvalid("it broke"))
    made = StatusServer("127.0.0.1", 0, [watched])
    yield made
    made.close()


def get(address: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_health_is_served_as_json(server):
    """E12: per pipeline and table, with the error."""
    status, kind, body = get(f"{server.address}/health?x")
    assert (status, kind) == (200, "application/json")
    health = json.loads(body)["orders"]
    assert (health["state"], health["error"]["message"]) == ("stalled", "it broke")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        *((State.STARTING, 200), (State.RUNNING, 200), (State.STALLED, 200), (State.ENDED, 200)),
        *((State.HALTED, 503), (State.FENCED, 503)),
    ],
)
def test_a_probe_sees_by_the_code_that_a_pipeline_will_not_go_on(state, code):
    """E13, Mend f1: one that is halted beside others that run, too."""
    watched = [Watched("orders"), Watched("customers")]
    watched[0].health.become(State.RUNNING)
    watched[1].health.become(state)
    server = StatusServer("127.0.0.1", 0, watched)
    try:
        assert get(f"{server.address}/health")[0] == code
    finally:
        server.close()


def test_metrics_are_served_in_prometheus_form(server):
    """U5: Prometheus at /metrics, with the documented names."""
    status, _, body = get(f"{server.address}/metrics")
    assert status == 200
    for name in (
        "iceberg_files_closed_total",
        "iceberg_epoch_files_total",
        "iceberg_commit_latency_seconds",
        "iceberg_commit_conflicts_total",
        "iceberg_duplicate_epochs_skipped_total",
        "iceberg_manifest_entries_bytes",
        "icestream_lag_seconds",
        "icestream_epoch_age_seconds",
        "icestream_freshness_seconds",
    ):
        assert f"# TYPE {name}".encode() in body
    assert b'icestream_health{pipeline="orders",state="stalled"} 1.0' in body


def test_other_pages_are_not_there(server):
    """U5: and the answer says which are."""
    status, _, body = get(f"{server.address}/nothing")
    assert (status, body) == (404, b"/metrics /health\n")


def test_a_port_that_is_taken_is_told(server):
    """U2: exit code 2, with what to change."""
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigInvalid, match="cannot listen at"):
        StatusServer("127.0.0.1", port, [])
