"""What the integration tests share beside the servers: embedded catalogs and the command line."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.integration.pipelines import Shell, embedded_catalog, give_up_soon
from tests.lake import Lake


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
