"""What a real CockroachDB wrote becomes exactly the tables it had, at every resolved timestamp.

The folders are made from captures of a real server; what the tables must hold is worked out here,
from the captures' own lines.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from tests.captures import FeedFolder, Row, capture, capture_names, play
from tests.integration import clickhouse
from tests.integration.changelog import Hlc, by_key, comparable, hlc_text
from tests.integration.pipelines import Shell, assert_refused, document, run_once
from tests.lake import Lake

RUN_SECONDS_MAX = 180
WITHOUT_UPDATED = [
    "02_wrapped_plain.jsonl",
    "03_row.jsonl",
    "05_row_resolved.jsonl",
    "07_full_table_name.jsonl",
    "14_types.jsonl",
]
WITH_UPDATED = [name for name in capture_names() if name not in WITHOUT_UPDATED]
SOME_TIME = 1_794_771_300_000_000_000


@dataclass(frozen=True)
class Captured:
    """One row of a capture, as plain Python reads it."""

    table: str
    key: tuple[Any, ...]
    at: Hlc
    row: dict[str, Any] | None


def hlc(text: str) -> Hlc:
    wall, logical = text.split(".")
    return int(wall), int(logical)


def read_capture(name: str) -> tuple[list[Captured], list[Hlc]]:
    """The changes and the resolved timestamps of a capture."""
    changes, resolved = [], []
    for row in capture(name):
        message = json.loads(row.value, parse_float=Decimal)
        meta = message.pop("__crdb__", message)
        if row.table is None:
            resolved.append(hlc(meta["resolved"]))
            continue
        after = message["after"] if "after" in message else message or None
        changes.append(Captured(row.table, tuple(json.loads(row.key)), hlc(meta["updated"]), after))
    return changes, resolved


def expected_rows(
    changes: Sequence[Captured], table: str, at: Hlc
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last version up to a timestamp of each key; a delete removes it."""
    last: dict[tuple[Any, ...], Captured] = {}
    for change in changes:
        known = last.get(change.key)
        if change.table == table and change.at <= at and (not known or known.at <= change.at):
            last[change.key] = change
    return {key: comparable(change.row) for key, change in last.items() if change.row is not None}


def published(changes: Sequence[Captured], resolved: Sequence[Hlc], table: str) -> list[Hlc]:
    """The resolved timestamps with changes of the table since the one before."""
    spans = zip([(0, 0), *resolved], resolved, strict=False)
    times = [change.at for change in changes if change.table == table]
    return [upper for lower, upper in spans if any(lower < at <= upper for at in times)]


@pytest.mark.spark_jobs
@pytest.mark.parametrize("name", WITH_UPDATED)
def test_each_resolved_timestamp_of_a_capture_is_one_snapshot_with_exactly_its_rows(
    name: str, spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C2, C3, C5: Spark and ClickHouse see at each snapshot what the capture's lines say."""
    changes, resolved = read_capture(name)
    assert list(play(capture(name), FeedFolder(tmp_path / "feed"))) == resolved
    run_once(spark, document(tmp_path / "feed", embedded))
    for table in {change.table for change in changes}:
        epochs = local.epochs(f"shop.{table}")
        times = [hlc(epoch["summary"]["crdb.resolved_hlc"]) for epoch in epochs]
        assert times == published(changes, resolved, table)
        for at, epoch in zip(times, epochs, strict=True):
            expected = expected_rows(changes, table, at)
            snapshot_id = epoch["snapshot_id"]
            assert by_key(local.rows(f"shop.{table}", snapshot_id), ["id"]) == expected
            location = f"{embedded['warehouse']}/shop/{table}"
            assert by_key(clickhouse.rows(location, snapshot_id), ["id"]) == expected


def write_epoch(folder: Path, rows: Sequence[Row], lines: Sequence[str]) -> None:
    """Put lines into files of one epoch, under the tables of their capture."""
    feed = FeedFolder(folder)
    for table in dict.fromkeys(row.table for row in rows if row.table):
        mine = [line for row, line in zip(rows, lines, strict=True) if row.table == table]
        feed.data(table, mine, (SOME_TIME, 0))
    feed.resolved((SOME_TIME + 10**9, 0))


def with_key(row: Row) -> str:
    """The row as cloud storage has it, with the key in the value."""
    return json_with(row.value or "{}", f'"key": {row.key}')


def json_with(value: str, member: str) -> str:
    """A JSON object with one member more; its text stays as the server wrote it."""
    body = value.strip()[1:-1]
    return f"{{{body}, {member}}}" if body else f"{{{member}}}"


@pytest.mark.parametrize("name", WITHOUT_UPDATED)
def test_a_capture_without_timestamps_is_refused_with_a_hint_how_to_make_the_changefeed(
    name: str, shell: Shell, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C3, U2: without `updated` nobody can order the changes, so nothing is taken."""
    rows = [row for row in capture(name) if row.table]
    write_epoch(tmp_path / "feed", rows, [with_key(row) for row in rows])
    answer = shell.run(document(tmp_path / "feed", embedded))
    reason = "none of the envelopes wrapped" if "row" in name else "no `updated` timestamp"
    assert_refused(answer, 3, reason, "hint: Create the changefeed")
    assert not local.spark.catalog.tableExists(local.table(f"shop.{rows[0].table}"))


def test_plain_row_and_full_name_captures_load_once_they_carry_timestamps(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C1, C5: the wrapped and bare envelopes and full table names, with `updated` added."""
    expected = {(1,): ("a2", Decimal("1.50")), (30,): ("x2", Decimal("3.00"))}
    for name, table in (
        ("02_wrapped_plain.jsonl", "t"),
        ("03_row.jsonl", "t"),
        ("07_full_table_name.jsonl", "t"),
    ):
        rows = [row for row in capture(name) if row.table]
        lines = []
        for number, row in enumerate(rows):
            updated = f'"updated": "{hlc_text((SOME_TIME + number, 0))}"'
            meta = f'"key": {row.key}, {updated}'
            member = f'"__crdb__": {{{meta}}}' if "row" in name else meta
            lines.append(json_with(row.value or "{}", member))
        write_epoch(tmp_path / name, rows, lines)
        namespace = f"from{name[:2]}"
        run_once(spark, document(tmp_path / name, embedded, namespace))
        found = by_key(local.rows(f"{namespace}.{table}"), ["id"])
        assert {key: (row["name"], row["amt"]) for key, row in found.items()} == expected


DECLARED = {
    "id": "uuid",
    "by": "binary",
    "d2": "decimal(20,4)",
    "dt": "date",
    "ts": "timestamp",
    "tz": "timestamptz",
    "i2": "int",
}
TYPED_ROW = {
    "arr": "[1, null, 3]",
    "b": True,
    "bit": "1011",
    "by": b"\x00\xff\x10",
    "d": "123.4500",
    "d2": Decimal("1.2000"),
    "dt": date(2024, 2, 29),
    "e": "ok",
    "f": 1.5,
    "i2": -5,
    "i8": 9223372036854775807,
    "id": "00000000-0000-0000-0000-000000000001",
    "inet": "10.0.0.1",
    "iv": "1 day 02:03:04",
    "j": '{"a": null, "b": [1, 2.50]}',
    "s": 'hé "q" \u2028',
    "tm": "01:02:03.5",
    "ts": datetime(2024, 2, 29, 1, 2, 3, 123000),
    "ttz": "01:02:03+02:00:00",
    "tz": datetime(2024, 2, 28, 23, 2, 3, 120000, tzinfo=UTC),
}


def types_folder(path: Path) -> Path:
    """The capture of all types, with the timestamps and the marker that it lacks."""
    rows = [row for row in capture("14_types.jsonl") if row.table]
    lines = [
        json_with(with_key(row), f'"updated": "{hlc_text((SOME_TIME + number, 0))}"')
        for number, row in enumerate(rows)
    ]
    write_epoch(path, rows, lines)
    return path


def test_every_type_arrives_with_its_exact_value(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C1, I10: values of all types, NaN, Infinity and null, with types declared and inferred."""
    files = types_folder(tmp_path / "feed")
    run_once(spark, document(files, embedded, "declared", {"columns": {"ty": DECLARED}}))
    run_once(spark, document(files, embedded, "inferred"))
    keys = [f"00000000-0000-0000-0000-00000000000{number}" for number in (1, 2, 3)]
    specials = {"id": keys[1], "d": "Infinity", "f": "NaN"}
    expected = [comparable(TYPED_ROW), specials, {"id": keys[2]}]
    declared = by_key(local.rows("declared.ty"), ["id"])
    assert declared == {(key,): row for key, row in zip(keys, expected, strict=True)}
    as_text = {
        "by": "\\x00ff10",
        "dt": "2024-02-29",
        "ts": "2024-02-29T01:02:03.123",
        "tz": "2024-02-28T23:02:03.12Z",
    }
    inferred = by_key(local.rows("inferred.ty"), ["id"])
    expected[0] |= as_text
    assert inferred == {(key,): row for key, row in zip(keys, expected, strict=True)}
    kinds = dict(spark.table(local.table("declared.ty")).dtypes)
    assert kinds["d2"] == "decimal(20,4)"
    assert kinds["ts"] == "timestamp_ntz"
    assert kinds["tz"] == "timestamp"
    assert (kinds["i2"], kinds["i8"], kinds["f"]) == ("int", "bigint", "double")


def test_status_shows_the_last_resolved_timestamp_and_its_snapshot_of_each_table(
    shell: Shell, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """C6, U2: as `SHOW CHANGEFEED` would, as text and as JSON, before and after a run."""
    name = "17_two_tables.jsonl"
    changes, resolved = read_capture(name)
    list(play(capture(name), FeedFolder(tmp_path / "feed")))
    pipelines = document(tmp_path / "feed", embedded)
    file = shell.write(pipelines)
    before = shell("status", file, "--json")
    assert (before.code, before.out) == (0, "")
    assert shell("run", file, "--once").code == 0
    as_json = shell("status", file, "--json")
    as_text = shell("status", file)
    assert as_json.code == as_text.code == 0
    assert [row["table"] for row in as_json.rows()] == ["shop.sc", "shop.t"]
    for row, line in zip(as_json.rows(), as_text.out.splitlines(), strict=True):
        last = published(changes, resolved, row["source_table"])[-1]
        epoch = local.epochs(row["table"])[-1]
        assert row["pipeline"] == "feed"
        assert row["state"] == "durable"
        assert row["position"] == hlc_text(last) == epoch["summary"]["crdb.resolved_hlc"]
        assert row["snapshot_id"] == epoch["snapshot_id"]
        assert row["epoch"] == int(epoch["summary"]["icestream.epoch"])
        for shown in (row["table"], hlc_text(last), str(row["snapshot_id"]), row["committed_at"]):
            assert shown in line


def test_run_once_in_an_empty_folder_with_only_a_pipeline_file_fills_the_default_catalog(
    spark: SparkSession, tmp_path: Path
) -> None:
    """U2, U3, I1, Mend f4: the installed command, the embedded catalog, nothing else; Spark and
    Java have nothing to say at its start."""
    name = "01_wrapped_updated_diff_mvcc_resolved.jsonl"
    changes, resolved = read_capture(name)
    list(play(capture(name), FeedFolder(tmp_path / "feed")))
    pipelines = {"feed": {"source": {"cockroachdb": {"files": "feed"}}, "sink": {"iceberg": {}}}}
    (tmp_path / "pipelines.yaml").write_text(yaml.safe_dump(pipelines))
    command = [sys.executable, "-m", "icestream", "run", "pipelines.yaml", "--once"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    assert [line for line in ended.stderr.splitlines() if not re.match(r"\d\d:\d\d:", line)] == []
    assert "committed 1794771128376485568.0000000000" in ended.stderr
    folder = tmp_path / "icestream-data"
    catalog = {
        "type": "jdbc",
        "name": "icestream",
        "uri": f"jdbc:sqlite:{folder}/catalog.db",
        "warehouse": str(folder / "warehouse"),
        "jdbc.schema-version": "V1",
    }
    lake = Lake(spark, catalog)
    expected = expected_rows(changes, "t", resolved[-1])
    assert by_key(lake.rows("default.t"), ["id"]) == expected
    assert by_key(clickhouse.rows(folder / "warehouse/default/t"), ["id"]) == expected
    assert len(lake.epochs("default.t")) == len(published(changes, resolved, "t"))
