"""Names, places and partition terms, as far as they can be told without Iceberg's library."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from icestream.errors import Broken, ConfigInvalid, Retryable, TargetUnavailable
from icestream.iceberg.catalog import local_path
from icestream.iceberg.handle import TableName
from icestream.iceberg.new_table import partition_spec
from icestream.iceberg.table import Table


def test_a_table_name_is_told_with_its_namespace():
    """I10: parts may hold anything, so only people read the joined form."""
    assert str(TableName(namespace=("a", "b"), name="t")) == "a.b.t"
    assert TableName(namespace=("a.b",), name="t") != TableName(namespace=("a", "b"), name="t")


@pytest.mark.parametrize("location", ["s3://lake/x", "file:/lake", "gs://lake", "hdfs://n/x"])
def test_a_location_with_a_scheme_stays_as_it_is(location):
    """I1: handed to Iceberg as it is."""
    assert local_path(location) == location


def test_a_plain_path_becomes_absolute():
    """U7: every process means the same place."""
    assert local_path("data/lake") == os.path.abspath("data/lake")
    assert local_path("/data/lake") == "/data/lake"


class RecordingBuilder:
    """As much of Iceberg's builder of partition specs as is used; it notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "build":
            return lambda: self.calls

        def call(*arguments: Any) -> "RecordingBuilder":
            self.calls.append((name, *arguments))
            return self

        return call


def partition_calls(*terms: str) -> list[tuple[Any, ...]]:
    builder = RecordingBuilder()
    spec = SimpleNamespace(builderFor=lambda schema: builder)
    iceberg = SimpleNamespace(PartitionSpec=spec, SortOrder=spec)
    jvm = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(iceberg=iceberg)))
    return partition_spec(jvm, None, terms)


def test_partition_terms_become_calls_of_icebergs_builder():
    """I9, I10: every transform, in the words that people use for it."""
    assert partition_calls(
        *("region", "identity(id)", "bucket(16, id)", "truncate(4,name)", "year(at)"),
        *("months(at)", " day( at ) ", "HOUR(at)", "void(x)"),
    ) == [
        ("identity", "region"),
        ("identity", "id"),
        ("bucket", "id", 16),
        ("truncate", "name", 4),
        ("year", "at"),
        ("month", "at"),
        ("day", "at"),
        ("hour", "at"),
        ("alwaysNull", "x"),
    ]


@pytest.mark.parametrize(
    "term", ["week(at)", "bucket(id)", "bucket(id, 16)", "bucket(x, id)", "day(at", "truncate(3)"]
)
def test_a_term_that_is_not_understood_is_refused(term):
    """U3: with how it is written."""
    with pytest.raises(ConfigInvalid, match="cannot partition by") as caught:
        partition_calls(term)
    assert caught.value.hint


class IoTrouble(SimpleNamespace):
    """What Java raises when the catalog or its storage does not answer."""

    _target_id = "o1"
    _gateway_client = SimpleNamespace(send_command=lambda command: "")

    def getClass(self) -> Any:
        return SimpleNamespace(getSimpleName=lambda: "UncheckedIOException")

    def getCause(self) -> None:
        return None

    def getMessage(self) -> str:
        return "connection reset"


class HiccupingTable:
    """As much of Iceberg's table as is asked; the first request for anything is lost."""

    def __init__(self) -> None:
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        if not self.lost:
            self.lost += 1
            raise Py4JJavaError("lost", IoTrouble())
        empty = SimpleNamespace(keySet=list)
        metadata = SimpleNamespace(
            uuid=lambda: "u",
            property=lambda key, default: default,
            refs=lambda: empty,
            ref=lambda branch: None,
            currentSnapshot=lambda: None,
            snapshots=list,
        )
        operations = SimpleNamespace(current=lambda: metadata, refresh=lambda: metadata)
        return {
            "operations": lambda: operations,
            "schema": lambda: SimpleNamespace(schemaId=lambda: 7),
        }[name]


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda table: table.last_epoch_snapshot("p", "main"), None),
        (lambda table: table.fed("p", "main", "t"), None),
        (Table.uuid, "u"),
        (Table.owner, None),
        (Table.pipelines, []),
        (Table.schema_id, 7),
        (Table.never_held_rows, True),
    ],
)
def test_one_request_that_is_lost_is_passing_trouble(ask: Callable[[Table], Any], answer: Any):
    """I5, Mend c8: it may be asked again, and if it is not it ends a run as passing trouble."""
    table = Table(None, TableName(namespace=("n",), name="t"), HiccupingTable())
    with pytest.raises(TargetUnavailable, match="could not read") as found:
        ask(table)
    assert isinstance(found.value, Retryable)
    assert found.value.exit_code != Broken.exit_code
    assert ask(table) == answer
