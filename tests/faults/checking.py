"""What exactly once means, checked from outside: by Spark SQL, against the oracle.

`assert_exact` reads a table's history as the catalog tells it, from the branch's head back to the
first snapshot, and compares the state at each published snapshot with what the oracle says.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.lake import Lake
from tests.oracle import Hlc, RandomFeed

PIPELINE = "shop"
BRANCH = "main"
TAG = f"icestream-{PIPELINE}"
COLUMNS = ("id", "region", "note", "amount", "ok")
# The feed's keys are small; rows from here on belong to rivals and are theirs to check.
FOREIGN_IDS_FROM = 1_000_000

Row = dict[str, Any]


class NotExact(AssertionError):
    """A table is not what the oracle says; the message names the table and the difference."""


def assert_exact(
    lake: Lake,
    namespace: str,
    feed: RandomFeed,
    tables: Sequence[str] = (),
    ignoring: Sequence[str] = (),
) -> None:
    """Every table has one snapshot for each resolved timestamp that changes it, each as it was.

    None is missing, none doubled, all are in order, and the state at each of them equals the
    oracle's row for row. Columns in `ignoring` are not compared, nor are the rows of rivals.
    """
    for table in tables or feed.tables:
        _assert_table(lake, f"{namespace}.{table}", feed, table, ignoring)


def ancestry(lake: Lake, name: str) -> list[Row]:
    """The snapshots of the branch from the first to its head; undone ones are not among them."""
    by_id = {snapshot["snapshot_id"]: snapshot for snapshot in lake.snapshots(name)}
    chain: list[Row] = []
    at = lake.references(name).get(BRANCH)
    while at is not None:
        chain.append(by_id[at])
        at = by_id[at]["parent_id"]
    return chain[::-1]


def published(lake: Lake, name: str) -> list[Row]:
    """The snapshots of the branch that publish an epoch's changes, in order."""
    return [s for s in ancestry(lake, name) if _has_changes(s["summary"])]


def _has_changes(summary: dict[str, str]) -> bool:
    """Claims have no batch id; a frontier that is published without changes has no files."""
    return "icestream.batch-id" in summary and any(
        summary[f"icestream.{kind}-files"] != "0" for kind in ("data", "delete")
    )


def resolved(lake: Lake, name: str) -> list[str]:
    """The resolved timestamps that a table has snapshots of, in the order of its history."""
    return [snapshot["summary"]["crdb.resolved_hlc"] for snapshot in published(lake, name)]


def hlc(at: Hlc) -> str:
    """A timestamp as snapshots spell it."""
    return f"{at[0]}.{at[1]:010d}"


def exists(lake: Lake, name: str) -> bool:
    """Whether the catalog has the table."""
    return bool(lake.spark.catalog.tableExists(lake.table(name)))


def _assert_table(
    lake: Lake, name: str, feed: RandomFeed, table: str, ignoring: Sequence[str]
) -> None:
    wanted, optional = _wanted(feed, table)
    if not exists(lake, name):
        _must(not wanted, name, f"it does not exist and lacks {[hlc(at) for at in wanted]}")
        return
    history = ancestry(lake, name)
    snapshots = [s for s in history if _has_changes(s["summary"])]
    found = [s["summary"]["crdb.resolved_hlc"] for s in snapshots]
    counted = [at for at in found if at not in optional]
    _must(counted == [hlc(at) for at in wanted], name, f"it has snapshots of {found}")
    _must(len(found) == len(set(found)), name, f"it has a snapshot twice: {found}")
    _assert_summaries(name, history, snapshots)
    own = [s["snapshot_id"] for s in history if s["summary"].get("icestream.pipeline") == PIPELINE]
    _must(lake.references(name).get(TAG) == own[-1], name, "its tag is not at the last commit")
    times = {hlc(at): at for at in feed.published(table)}
    # What others committed since the last epoch must not have changed what is in the table.
    heads = [*((s["snapshot_id"], times[at]) for s, at in zip(snapshots, found, strict=True))]
    heads += [(history[-1]["snapshot_id"], heads[-1][1])] if heads else []
    states = _states(lake, name, [snapshot_id for snapshot_id, _ in heads])
    for snapshot_id, at in heads:
        expected = feed.expected(table, at)
        _compare(f"{name} at {hlc(at)}", states.get(snapshot_id, []), expected, ignoring)


def _wanted(feed: RandomFeed, table: str) -> tuple[list[Hlc], set[str]]:
    """Timestamps that must have a snapshot, and those that may.

    Deletes of a table that never had a row do nothing, whether it exists already or not.
    """
    times = feed.published(table)
    rows = [change.at for change in feed.log if change.table == table and change.row is not None]
    first = min(rows, default=None)
    wanted = [at for at in times if first is not None and first <= at]
    return wanted, {hlc(at) for at in times if at not in wanted}


def _assert_summaries(name: str, history: Sequence[Row], snapshots: Sequence[Row]) -> None:
    """The summaries agree with each other and their numbers only rise."""
    own = [s["summary"] for s in history if s["summary"].get("icestream.pipeline") == PIPELINE]
    generations = [int(summary["icestream.generation"]) for summary in own]
    _must(generations == sorted(generations), name, f"generations went back: {generations}")
    batches = [s["summary"]["icestream.batch-id"] for s in snapshots]
    _must(len(set(batches)) == len(batches), name, "two snapshots have one batch id")
    epochs = [int(s["summary"]["icestream.epoch"]) for s in snapshots]
    _must(epochs == sorted(set(epochs)), name, f"epochs are out of order: {epochs}")
    for snapshot in snapshots:
        summary = snapshot["summary"]
        _must(summary["crdb.batch_id"] == summary["icestream.batch-id"], name, "batch ids differ")
        _must(summary["crdb.job_id"] == PIPELINE, name, "another pipeline's snapshot")
        for kind, key in (("data", "added-data-files"), ("delete", "added-delete-files")):
            counted = summary[f"icestream.{kind}-files"]
            _must(counted == summary.get(key, "0"), name, f"{kind} files do not add up")


def _states(lake: Lake, name: str, snapshot_ids: Sequence[int]) -> dict[int, list[Row]]:
    """The rows of the table at each of these snapshots, fetched in one Spark job."""
    frames = [
        lake.spark.sql(f"SELECT * FROM {lake.table(name)} VERSION AS OF {each}").withColumn(
            "$snapshot", F.lit(each)
        )
        for each in dict.fromkeys(snapshot_ids)
    ]
    if not frames:
        return {}
    together = functools.reduce(_union, frames)
    states: dict[int, list[Row]] = {}
    for row in together.collect():
        values = row.asDict(recursive=True)
        states.setdefault(values.pop("$snapshot"), []).append(values)
    return states


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other, allowMissingColumns=True)


def _compare(
    where: str, found: Sequence[Row], expected: dict[int, Row], ignoring: Sequence[str]
) -> None:
    columns = [column for column in COLUMNS if column not in ignoring]
    own = [row for row in found if row["id"] < FOREIGN_IDS_FROM]
    others = {name for row in own for name in row} - set(COLUMNS) - set(ignoring)
    filled = [name for name in others if any(row[name] is not None for row in own)]
    _must(not filled, where, f"foreign columns {filled} have values")
    actual = [tuple(row.get(column) for column in columns) for row in own]
    wanted = [tuple(row[column] for column in columns) for row in expected.values()]
    extra = [row for row in actual if row not in wanted]
    missing = [row for row in wanted if row not in actual]
    same = not extra and not missing and len(actual) == len(wanted)
    _must(same, where, f"{len(actual)} rows, extra {extra[:3]}, missing {missing[:3]}")


def _must(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise NotExact(f"{where}: {what}")
