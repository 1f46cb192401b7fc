"""Iceberg tables that Spark changes, a pipeline that follows them, and the index that it keeps.

What the index must hold is made of the table's rows in plain Python; nothing of it is icestream's
own code.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

import numpy as np
import requests
from prometheus_client import REGISTRY
from pyspark.sql import types as T

from icestream.config import PipelineConfig, open_pipeline, parse
from icestream.pipeline import Pipeline
from tests.lake import Lake
from tests.servers import OpenSearch

PIPELINE = "search"
TABLE = "shop.orders"
DOCUMENTS_MAX = 10_000
REQUEST_SECONDS_MAX = 60.0

Document = dict[str, Any]


@dataclass(kw_only=True)
class Search:
    """The pipeline `search`; its options may be changed between runs."""

    lake: Lake
    catalog: Mapping[str, str]
    node: OpenSearch
    url: str = ""
    tables: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {TABLE: {"identifier_columns": ["id"]}}
    )
    source: dict[str, Any] = field(default_factory=dict)
    sink: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The pipeline file."""
        tables = [{"table_name": name, **options} for name, options in self.tables.items()]
        source = {"catalog": dict(self.catalog), "tables": tables, **self.source}
        sink = {"hosts": [self.url or self.node.url], **self.sink}
        pipeline = {"source": {"iceberg": source}, "sink": [{"opensearch": sink}]}
        return {PIPELINE: pipeline, "spark": {"master": "local[2]"}}

    def config(self) -> PipelineConfig:
        """The pipeline's configuration."""
        return parse(self.document()).pipelines[0]

    def pipeline(self) -> Pipeline:
        """A new run, not started yet."""
        return open_pipeline(self.config(), self.lake.spark)

    def run(self) -> None:
        """Follow until nothing is new."""
        self.pipeline().run(once=True)

    # The tables

    def sql(self, text: str) -> list[dict[str, Any]]:
        """Run a statement; tables are called `shop.<name>` and procedures `system.<name>`."""
        for schema in ("shop.", "system."):
            text = text.replace(schema, f"{self.lake.name}.{schema}")
        return self.lake.sql(text)

    def create(self, columns: str = "id BIGINT, name STRING", **options: Any) -> None:
        """A table of the format version 2; `table`, `version`, `mode` and `rest` say otherwise."""
        version, mode = options.get("version", 2), options.get("mode", "copy-on-write")
        modes = ", ".join(
            f"'write.{operation}.mode' = '{mode}'" for operation in ("delete", "update", "merge")
        )
        self.sql(
            f"CREATE TABLE {options.get('table', TABLE)} ({columns}) USING iceberg "
            f"{options.get('rest', '')} "
            f"TBLPROPERTIES ('format-version' = '{version}', {modes})"
        )

    def insert(self, *ids: int, name: str = "first", table: str = TABLE) -> None:
        """Add rows in one snapshot of one file."""
        values = ", ".join(f"({id_}, '{name}')" for id_ in ids)
        self.sql(f"INSERT INTO {table} SELECT /*+ COALESCE(1) */ * FROM VALUES {values}")

    def sequence_number(self, table: str = TABLE) -> int:
        """The table's last sequence number."""
        return int(self.lake.metadata(table)["last-sequence-number"])

    def snapshot_ids(self, table: str = TABLE) -> list[int]:
        """The table's snapshots, oldest first."""
        return [each["snapshot_id"] for each in self.lake.snapshots(table)]

    def expected(self, table: str = TABLE, key: tuple[str, ...] = ("id",)) -> dict[str, Document]:
        """The documents that a table's rows are, by their ids."""
        frame = self.lake.spark.table(self.lake.table(table))
        found = {}
        for row in frame.collect():
            document = plain(row, frame.schema)
            id_ = "|".join(str(row[name]) for name in key)
            assert id_ not in found
            found[id_] = document
        return found

    # The index

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """A request to the node itself."""
        answer = requests.request(
            method, f"{self.node.url}{path}", json=body, timeout=REQUEST_SECONDS_MAX
        )
        assert answer.ok or method in ("GET", "HEAD"), answer.text
        return answer.json()

    def hits(self, index: str = TABLE) -> list[dict[str, Any]]:
        """All documents of an index as OpenSearch has them."""
        self.ask("POST", f"/{index}/_refresh")
        path = f"/{index}/_search?size={DOCUMENTS_MAX}&version=true"
        found: list[dict[str, Any]] = self.ask("GET", path)["hits"]["hits"]
        return found

    def documents(self, index: str = TABLE) -> dict[str, Document]:
        """All documents of an index by their ids."""
        return {hit["_id"]: hit["_source"] for hit in self.hits(index)}

    def versions(self, index: str = TABLE) -> dict[str, int]:
        """The versions of all documents by their ids."""
        return {hit["_id"]: hit["_version"] for hit in self.hits(index)}

    def exists(self, index: str = TABLE) -> bool:
        """Whether there is such an index."""
        return "error" not in self.ask("GET", f"/{index}")

    def progress(self) -> dict[str, Any]:
        """What the pipeline remembers; nothing when it never ran."""
        found: dict[str, Any] = self.ask("GET", f"/icestream-progress/_doc/{PIPELINE}")
        return dict(found.get("_source", {}))

    def positions(self) -> dict[str, list[int]]:
        """How far each table is, by its name."""
        upper = self.progress()["upper"]
        return {partition.split()[1]: at for partition, at in upper.items()}

    def assert_equal(self, table: str = TABLE, key: tuple[str, ...] = ("id",)) -> None:
        """The index holds exactly the table's rows, every column of them."""
        documents, expected = self.documents(table), self.expected(table, key)
        ids = sorted(documents.keys() | expected.keys())
        wrong = [id_ for id_ in ids if documents.get(id_) != expected.get(id_)]
        shown = [(id_, documents.get(id_), expected.get(id_)) for id_ in wrong[:3]]
        assert not wrong, f"{len(wrong)} documents differ, such as (found, expected) {shown}"


def sent(index: str = TABLE) -> dict[str, int]:
    """How many operations on documents were acknowledged and committed so far, by their kind."""
    kinds = ("indexed", "deleted", "superseded", "dead_letter")
    name = "icestream_documents_total"
    return {
        kind: int(REGISTRY.get_sample_value(name, {"index": index, "operation": kind}) or 0)
        for kind in kinds
    }


def since(before: Mapping[str, int], index: str = TABLE) -> dict[str, int]:
    """What was sent since then; kinds without any are left out."""
    now = sent(index)
    return {kind: now[kind] - before[kind] for kind in now if now[kind] != before[kind]}


def plain(value: Any, kind: T.DataType) -> Any:
    """A value of a row as its document has it."""
    if value is None:
        return None
    if isinstance(kind, T.StructType):
        items = {each.name: plain(value[each.name], each.dataType) for each in kind}
        return {name: item for name, item in items.items() if item is not None}
    if isinstance(kind, T.ArrayType):
        return [plain(item, kind.elementType) for item in value]
    if isinstance(kind, T.MapType):
        return {str(name): plain(item, kind.valueType) for name, item in value.items()}
    if isinstance(kind, T.DecimalType):
        return f"{value:f}"
    if isinstance(kind, T.TimestampType):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(kind, T.TimestampNTZType | T.DateType):
        precise = isinstance(kind, T.TimestampNTZType)
        return value.isoformat(timespec="microseconds") if precise else value.isoformat()
    if isinstance(kind, T.BinaryType):
        return base64.b64encode(value).decode()
    if isinstance(kind, T.FloatType | T.DoubleType):
        single = isinstance(kind, T.FloatType)
        special = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        return special.get(str(value)) or (float(str(np.float32(value))) if single else value)
    return value
