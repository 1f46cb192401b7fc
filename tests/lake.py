"""Reading the lake with something that is not icestream: Spark SQL through Iceberg's own reader.

What a table says of itself (snapshots, branches and tags) is read by Iceberg's library: a query of
Spark's over so little costs a hundred times as much.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from icestream.spark import active, attach_catalog

_numbers = itertools.count()


class Lake:
    """A catalog as Spark SQL sees it; every look reads fresh metadata."""

    def __init__(self, spark: SparkSession, properties: Mapping[str, str]):
        self.spark = spark
        # A JDBC catalog keeps its tables apart by the catalog's name.
        jdbc = properties.get("type") == "jdbc"
        self.name = properties["name"] if jdbc else f"lake{next(_numbers)}"
        attach_catalog(spark, self.name, properties)

    def table(self, name: str) -> str:
        """A table's name in SQL; `name` is namespace and table joined by a dot."""
        return f"{self.name}." + ".".join(f"`{part}`" for part in name.split("."))

    def sql(self, text: str) -> list[dict[str, Any]]:
        """The rows of a query."""
        return [row.asDict(recursive=True) for row in self.spark.sql(text).collect()]

    def rows(self, name: str, snapshot_id: int | None = None) -> list[dict[str, Any]]:
        """All rows of a table, now or as of a snapshot."""
        at = f" VERSION AS OF {snapshot_id}" if snapshot_id is not None else ""
        return self.sql(f"SELECT * FROM {self.table(name)}{at}")

    def snapshots(self, name: str) -> list[dict[str, Any]]:
        """All snapshots in the order they were committed, each with its summary."""
        found = self.metadata(name).get("snapshots", [])
        return [
            {
                "snapshot_id": each["snapshot-id"],
                "parent_id": each.get("parent-snapshot-id"),
                "operation": each["summary"].pop("operation"),
                "summary": each["summary"],
            }
            for each in sorted(found, key=lambda each: each["timestamp-ms"])
        ]

    def references(self, name: str) -> dict[str, int]:
        """Branches and tags of a table, each with the snapshot it stands for."""
        found = self.metadata(name).get("refs", {})
        return {reference: each["snapshot-id"] for reference, each in found.items()}

    def metadata(self, name: str) -> dict[str, Any]:
        """A table's metadata as the catalog has it now, by the names of Iceberg's format."""
        jvm: Any = self.spark._jvm
        load = getattr(jvm, "org.apache.iceberg.spark.Spark3Util").loadIcebergTable
        as_json = getattr(jvm, "org.apache.iceberg.TableMetadataParser").toJson
        # A thread of a proxy has run no query: another session would be asked for the catalog.
        with active(self.spark):
            table = load(self.spark._jsparkSession, self.table(name))
        found: dict[str, Any] = json.loads(as_json(table.operations().current()))
        return found

    def epochs(self, name: str) -> list[dict[str, Any]]:
        """The snapshots that publish an epoch: claims and foreign ones are left out."""
        return [s for s in self.snapshots(name) if "icestream.batch-id" in s["summary"]]
