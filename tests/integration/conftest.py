"""What the integration tests share beside the servers: embedded catalogs and the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.samples.postgres import EmbeddedPostgres
from tests.integration.pipelines import Shell, embedded_catalog, give_up_soon
from tests.integration.postgres_world import World, free_name
from tests.integration.topics import Topics
from tests.lake import Lake
from tests.servers import KafkaBroker


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is down for a while here: what fails twice fails for good."""
    give_up_soon(monkeypatch)


@pytest.fixture
def embedded(tmp_path: Path) -> dict[str, str]:
    """The properties of a SQLite catalog with its warehouse on local disk."""
    return embedded_catalog(tmp_path)


@pytest.fixture
def local(spark: SparkSession, embedded: dict[str, str]) -> Lake:
    """The embedded catalog as Spark SQL sees it."""
    return Lake(spark, embedded)


@pytest.fixture
def shell(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Shell:
    """The command line in this process."""
    return Shell(spark, tmp_path, monkeypatch, capfd)


@pytest.fixture
def world(
    postgres_server: EmbeddedPostgres,
    spark: SparkSession,
    embedded: dict[str, str],
    tmp_path: Path,
) -> Iterator[World]:
    """A database of the test's own, and a lake."""
    world = World(postgres_server, free_name(tmp_path), spark, embedded)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def topics(
    broker: KafkaBroker, spark: SparkSession, embedded: dict[str, str], tmp_path: Path
) -> Topics:
    """Topics of the test's own, and a lake."""
    return Topics(broker, tmp_path.name, spark, embedded)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Arms a failpoint, or none with an empty text."""

    def arm(text: str) -> None:
        monkeypatch.setattr(failpoints, "_passes", {})  # an earlier run in this process has passed
        monkeypatch.setenv("ICESTREAM_FAILPOINTS", text)  # what the test asks for

    return arm
