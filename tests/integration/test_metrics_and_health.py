"""What a running pipeline shows: metrics, health, logs; and what it never shows."""

import json
import urllib.request
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from icestream.config import open_pipeline, parse
from icestream.errors import SourceUnavailable
from icestream.status import StatusServer
from tests.integration.pipelines import Shell, document
from tests.oracle import RandomFeed

SECRET = "a-secret-nobody-shows"
VALUE = "a-value-nobody-shows"


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())


def test_metrics_and_health_are_served_while_a_pipeline_runs(
    spark: SparkSession, embedded: dict[str, str], tmp_path: Path
) -> None:
    """U5, E12: the six iceberg metrics, lag, rows and bytes at /metrics, the state at /health."""
    feed = RandomFeed.create(tmp_path / "feed", 11, tables=["watched"])
    feed.epoch(20)
    feed.epoch(20)
    config = parse(document(feed.folder.path, embedded))
    pipeline = open_pipeline(config.pipelines[0], spark)
    server = StatusServer("127.0.0.1", 0, [pipeline])
    try:
        assert json.loads(_get(f"{server.address}/health"))["feed"]["state"] == "starting"
        pipeline.run(once=True)
        health = json.loads(_get(f"{server.address}/health"))["feed"]
        metrics = _get(f"{server.address}/metrics")
    finally:
        server.close()
    assert health["state"] == "ended"
    last = feed.resolved[-1]
    assert health["tables"]["watched"]["position"] == f"{last[0]}.{last[1]:010d}"
    assert health["tables"]["watched"]["snapshot_id"] > 0
    for line in (
        'iceberg_files_closed_total{kind="data",table="watched"} 2.0',
        'iceberg_files_closed_total{kind="equality-deletes",table="watched"} 2.0',
        'iceberg_epoch_files_total{table="watched"} 4.0',
        'iceberg_commit_latency_seconds_count{table="watched"} 2.0',
        'icestream_health{pipeline="feed",state="ended"} 1.0',
    ):
        assert line in metrics
    for name in (
        "iceberg_commit_conflicts_total",
        "iceberg_duplicate_epochs_skipped_total",
        'iceberg_manifest_entries_bytes_total{table="watched"}',
        'icestream_lag_seconds{pipeline="feed"} 0.0',
        'icestream_rows_read_total{pipeline="feed"}',
        'icestream_bytes_read_total{pipeline="feed"}',
        'icestream_rows_written_total{kind="data",table="watched"}',
        'icestream_bytes_written_total{kind="data",table="watched"}',
        'icestream_epoch_age_seconds{pipeline="feed"}',
    ):
        assert name in metrics


def test_a_pipeline_that_stops_says_why(
    spark: SparkSession, embedded: dict[str, str], tmp_path: Path
) -> None:
    """E12: halted, with the error, its detail and its hint."""
    feed = RandomFeed.create(tmp_path / "feed", 12)
    feed.folder.data("orders", ['{"after": null, "key": [1]}'], (feed.now, 0))
    config = parse(document(feed.folder.path, embedded))
    pipeline = open_pipeline(config.pipelines[0], spark)
    with pytest.raises(SourceUnavailable):
        pipeline.run(once=True)
    health = pipeline.health.to_json()
    assert health["state"] == "halted"
    assert health["error"]["error"] == "SourceUnavailable"
    assert "WITH updated, resolved" in health["error"]["hint"]


def test_logs_are_structured_and_show_neither_rows_nor_secrets(
    shell: Shell, embedded: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U3, U5: pipeline, epoch and counts in each record; values and secrets nowhere."""
    # A secret comes from the environment.
    monkeypatch.setenv("LAKE_SECRET", SECRET)
    feed = RandomFeed.create(tmp_path / "feed", 13)
    row = '{"after": {"id": 1, "note": "%s"}, "key": [1], "updated": "%s.0000000000"}'
    feed.folder.data("orders", [row % (VALUE, feed.now)], (feed.now, 0))
    feed.folder.resolved((feed.now + 1, 0))
    pipelines = document(feed.folder.path, {**embedded, "secret": "${env:LAKE_SECRET}"})
    answer = shell.run(pipelines, "--json")
    assert answer.code == 0
    committed = [r for r in answer.logged() if r["message"].startswith("committed")]
    assert [(r["pipeline"], r["epoch"], r["tables"]) for r in committed] == [("feed", 1, 1)]
    assert committed[0]["files"] == 2
    # The next row does not fit the column that the first one made.
    feed.folder.data("orders", [(row % (VALUE, feed.now + 2)).replace(": 1,", ': "x",')], (1, 0))
    feed.folder.resolved((feed.now + 3, 0))
    refused = shell.run(pipelines, "--json", "--log", "debug")
    assert refused.code == 3
    assert refused.logged()[-1]["error"] in ("SchemaRejected", "DataRejected")
    for text in (answer.err, answer.out, refused.err, refused.out):
        assert SECRET not in text
        assert VALUE not in text
