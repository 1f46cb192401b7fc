"""Out of Iceberg: the changelog against Spark's own view, and a load into a real OpenSearch."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import urllib3
from opensearchpy import OpenSearch as RivalClient
from opensearchpy import helpers

from bench.changes import SHAPE, rows
from bench.measure import Measured, repeat
from icestream.config import open_pipeline, open_table, parse
from icestream.sources.iceberg.changelog import changelog
from tests.servers import OpenSearch

if TYPE_CHECKING:
    from bench.__main__ import Bench

TABLE_ROWS = 5_000_000
FILES = 10
CHANGED_KEYS = 10_000
DOCUMENTS = 200_000
WARM_UPS, REPETITIONS = 2, 3
BULK_DOCUMENTS = 5000


class ChangelogBench:
    """Tables that Spark makes and changes, and what it costs to tell how."""

    def __init__(self, bench: "Bench", scale: float):
        self._bench, self._spark = bench, bench.spark
        self._rows = int(TABLE_ROWS * scale)
        self._keys = int(CHANGED_KEYS * scale)

    def run(self) -> None:
        """Measure rewritten files and equality deletes."""
        self._copy_on_write()
        self._equality_deletes()

    def _copy_on_write(self) -> None:
        """One in a hundred rows updated everywhere: every file is written anew."""
        name = self._table("rewritten", self._rows, "'write.update.mode'='copy-on-write'")
        before = self._head(name)
        self._spark.sql(f"UPDATE bench.{name} SET note = 'changed' WHERE id % 100 = 7")
        after = self._head(name)
        view = self._spark.sql(
            f"CALL bench.system.create_changelog_view(table => '{name}', "
            f"options => map('start-snapshot-id', '{before}', 'end-snapshot-id', '{after}'), "
            "identifier_columns => array('id'), compute_updates => true)"
        ).collect()[0][0]
        ours = repeat(lambda _: self._ours(name, before, after), WARM_UPS, REPETITIONS)
        other = repeat(lambda _: _drain(self._spark.table(view)), WARM_UPS, REPETITIONS)
        self._bench.note(
            "changelog of rewritten files against create_changelog_view",
            ours,
            other,
            3.0,
            cpu=False,
        )

    def _equality_deletes(self) -> None:
        """The same changed keys on a table of ten times the rows must cost about the same."""
        small = self._changed_by_value("small", self._rows // 10)
        large = self._changed_by_value("large", self._rows)
        # How many times as fast the large one is; 1.5 times as slow is what is allowed.
        self._bench.note(
            "changelog of equality deletes, 5 M rows against 500 k",
            large,
            small,
            1 / 1.5,
            cpu=False,
        )

    def _changed_by_value(self, name: str, count: int) -> Measured:
        bench = self._bench
        bench.table_rows, kept = count, bench.table_rows
        try:
            bench._load(name)
        finally:
            bench.table_rows = kept
        before = self._head(f"db.{name}")
        bench.change(name, self._keys, count)
        after = self._head(f"db.{name}")
        return repeat(lambda _: self._ours(f"db.{name}", before, after), WARM_UPS, REPETITIONS)

    def _ours(self, name: str, before: int, after: int) -> None:
        table = open_table(self._bench.catalog, name, self._spark)
        _drain(changelog(self._spark, table, before, after, ["id"]))

    def _table(self, name: str, count: int, properties: str) -> str:
        self._spark.sql(
            f"CREATE TABLE bench.db.{name} (id bigint, {_columns()}) USING iceberg "
            f"TBLPROPERTIES ('format-version'='2', {properties})"
        )
        source = self._spark.createDataFrame(rows(np.arange(count, dtype=np.int64), 99))
        source.repartition(FILES, "id").writeTo(f"bench.db.{name}").append()
        return f"db.{name}"

    def _head(self, name: str) -> int:
        found = self._spark.sql(
            f"SELECT snapshot_id FROM bench.{name}.refs WHERE name = 'main'"
        ).collect()
        return int(found[0][0])


class LoadBench:
    """The same rows into one node: by a pipeline, by hand, and by OpenSearch's own helper."""

    def __init__(self, bench: "Bench", folder: Path, scale: float):
        self._bench, self._spark = bench, bench.spark
        self._folder = folder
        self._count = int(DOCUMENTS * scale)

    def run(self) -> None:
        """Measure the three."""
        table = ChangelogBench(self._bench, 1.0)._table("documents", self._count, "'a'='b'")
        with OpenSearch(self._folder / "opensearch") as node:
            ours = repeat(lambda n: self._ours(table, node.url, n), 1, REPETITIONS)
            lines = self._lines(table)
            by_hand = repeat(lambda n: _by_hand(lines, node.url, n), 1, REPETITIONS)
            helper = repeat(lambda n: self._helper(table, node.url, n), 1, REPETITIONS)
        self._bench.note("load against two threads of bulk requests", ours, by_hand, 0.9, cpu=False)
        self._bench.note(
            "load against helpers.bulk in foreachPartition", ours, helper, 2.0, cpu=True
        )

    def _ours(self, table: str, url: str, number: int) -> None:
        source = {"tables": [{"table_name": table, "identifier_columns": ["id"]}]}
        document = {
            f"load{number}": {
                "source": {"iceberg": {"catalog": self._bench.catalog, **source}},
                "sink": {"opensearch": {"hosts": [url], "index": f"ours{number}"}},
            }
        }
        open_pipeline(parse(document).pipelines[0], self._spark).run(once=True)

    def _lines(self, table: str) -> list[tuple[str, str]]:
        """Documents that are ready to be sent: the floor makes nothing."""
        found = self._spark.sql(f"SELECT id, to_json(struct(*)) FROM bench.{table}")
        return [(str(row[0]), row[1]) for row in found.collect()]

    def _helper(self, table: str, url: str, number: int) -> None:
        index = f"helper{number}"

        def send(partition: Iterator[Any]) -> None:
            client = RivalClient([url])
            actions = (
                {"_index": index, "_id": str(row["id"]), **row.asDict(True)} for row in partition
            )
            helpers.bulk(client, actions, chunk_size=BULK_DOCUMENTS)

        self._spark.table(f"bench.{table}").foreachPartition(send)


def _by_hand(lines: list[tuple[str, str]], url: str, number: int) -> None:
    def send(part: list[tuple[str, str]]) -> None:
        pool = urllib3.PoolManager()
        for start in range(0, len(part), BULK_DOCUMENTS):
            body = "".join(
                f'{{"index":{{"_index":"hand{number}","_id":"{key}"}}}}\n{text}\n'
                for key, text in part[start : start + BULK_DOCUMENTS]
            )
            headers = {"Content-Type": "application/x-ndjson"}
            answer = pool.request("POST", f"{url}/_bulk", body=body.encode(), headers=headers)
            if json.loads(answer.data)["errors"]:
                raise RuntimeError("the node refused documents")

    half = len(lines) // 2
    threads = [threading.Thread(target=send, args=(p,)) for p in (lines[:half], lines[half:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _drain(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _columns() -> str:
    kinds = {"timestamptz": "timestamp", "long": "bigint"}
    columns = [(c.name, kinds.get(str(c.type), str(c.type))) for c in SHAPE.columns]
    return ", ".join(f"{name} {kind}" for name, kind in columns if name != "id")
