"""The two destinations as one suite sees them: a sink to write with, and other eyes to look with.

A row is an id and a name. Both destinations are reached through a proxy by the sink, and directly
by everybody else: strangers, rivals, and the test that compares.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
import requests
from pyiceberg.types import LongType, StringType
from pyspark.sql import SparkSession

from icestream.change import AT, OP, SEQ, Op
from icestream.iceberg.catalog import Catalog
from icestream.schema import Column, TableShape
from icestream.sinks import Sink
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sinks.opensearch.sink import OpenSearchOptions, OpenSearchSink
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import OpenSearch, RestCatalog

PIPELINE = "pipe"
REQUEST_SECONDS_MAX = 60.0
Rows = Mapping[int, str | None]

SHAPE = TableShape(
    columns=[Column(name="id", type=LongType()), Column(name="name", type=StringType())],
    key=["id"],
)


class Destination(Protocol):
    """What the suite asks of a destination; `table` is the source's name of the table."""

    table: str
    proxy: Proxy

    def sink(self) -> Sink:
        """A new run's sink, not claimed yet."""
        ...

    def batch(self, rows: Rows, version: int) -> pa.Table:
        """Changes as a source hands them over; a name of None is a delete."""
        ...

    def rows(self) -> dict[int, str]:
        """What a reader sees."""
        ...

    def stranger(self, rows: Rows) -> None:
        """Somebody else makes, or has made, the destination, and puts rows there."""
        ...

    def lose_progress(self) -> None:
        """What the pipeline remembers is gone; its rows are not."""
        ...

    def make_anew(self) -> None:
        """The destination is dropped, and another one made under its name."""
        ...


class LakeTable:
    """A table of a REST catalog."""

    def __init__(self, spark: SparkSession, lake: Lake, rest: RestCatalog, proxy: Proxy, name: str):
        self.table, self.proxy = "orders", proxy
        self._spark, self._lake, self._namespace = spark, lake, name
        self._properties = rest.catalog_properties(uri=proxy.url)
        lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {lake.name}.{name}")

    @property
    def _name(self) -> str:
        return self._lake.table(f"{self._namespace}.{self.table}")

    def sink(self) -> Sink:
        """See `Destination`."""
        hadoop = self._spark._jsparkSession.sessionState().newHadoopConf()
        options = IcebergSinkOptions(catalog=self._properties, namespace=self._namespace)
        return IcebergSink(Catalog(self._spark._jvm, hadoop, self._properties), options, PIPELINE)

    def batch(self, rows: Rows, version: int) -> pa.Table:
        """See `Destination`."""
        return pa.table(
            {
                **_head(rows, version),
                SEQ: pa.array([0] * len(rows), pa.int64()),
                "id": pa.array(rows, pa.int64()),
                "name": pa.array(rows.values(), pa.string()),
            }
        )

    def rows(self) -> dict[int, str]:
        """See `Destination`."""
        found = self._lake.sql(f"SELECT id, name FROM {self._name}")
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: row["name"] for row in found}

    def stranger(self, rows: Rows) -> None:
        """See `Destination`."""
        self._lake.sql(f"CREATE TABLE IF NOT EXISTS {self._name} (id BIGINT, name STRING)")
        for id_, name in rows.items():
            self._lake.sql(f"INSERT INTO {self._name} VALUES ({id_}, '{name}')")

    def lose_progress(self) -> None:
        """See `Destination`."""
        kept = self.rows()
        self._lake.sql(f"CREATE OR REPLACE TABLE {self._name} (id BIGINT, name STRING)")
        self.stranger(kept)

    def make_anew(self) -> None:
        """See `Destination`."""
        self._lake.sql(f"DROP TABLE {self._name} PURGE")
        self.stranger({})


class SearchIndex:
    """An index of an OpenSearch node."""

    def __init__(self, node: OpenSearch, proxy: Proxy):
        self.table, self.proxy = "shop.orders", proxy
        self._node = node
        for path in ("shop.*", "icestream-progress"):
            self._ask("DELETE", f"/{path}?ignore_unavailable=true")
        self._ask("DELETE", "/_index_template/*")

    def sink(self) -> Sink:
        """See `Destination`."""
        return OpenSearchSink(OpenSearchOptions(hosts=[self.proxy.url]), PIPELINE)

    def batch(self, rows: Rows, version: int) -> pa.Table:
        """See `Destination`."""
        documents = [
            json.dumps({"id": id_, "name": name}) if name is not None else None
            for id_, name in rows.items()
        ]
        return pa.table(
            {
                **_head(rows, version),
                "id": pa.array(map(str, rows), pa.string()),
                "document": pa.array(documents, pa.string()),
            }
        )

    def rows(self) -> dict[int, str]:
        """See `Destination`."""
        self._ask("POST", f"/{self.table}/_refresh")
        found = self._ask("GET", f"/{self.table}/_search?size=1000")["hits"]["hits"]
        return {int(each["_id"]): each["_source"]["name"] for each in found}

    def stranger(self, rows: Rows) -> None:
        """See `Destination`."""
        self._ask("PUT", f"/{self.table}")
        for id_, name in rows.items():
            body = {"id": id_, "name": name}
            assert "result" in self._ask("PUT", f"/{self.table}/_doc/{id_}", body)

    def lose_progress(self) -> None:
        """See `Destination`."""
        assert self._ask("DELETE", f"/icestream-progress/_doc/{PIPELINE}")["result"] == "deleted"

    def make_anew(self) -> None:
        """See `Destination`."""
        self._ask("DELETE", f"/{self.table}")
        self.stranger({})

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        answer = requests.request(
            method, f"{self._node.url}{path}", json=body, timeout=REQUEST_SECONDS_MAX
        )
        return answer.json()


def _head(rows: Rows, version: int) -> dict[str, pa.Array]:
    ops: Sequence[Op] = [Op.DELETE if name is None else Op.UPSERT for name in rows.values()]
    return {OP: pa.array(ops, pa.int8()), AT: pa.array([version] * len(rows), pa.int64())}
