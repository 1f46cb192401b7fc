"""What tests share: one Spark session, one S3 store, one REST catalog, each started when needed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from icestream.spark import session
from tests.lake import Lake
from tests.servers import RestCatalog, S3Server, running

# No test depends on how busy the machine is. What is compiled at its first call is slow once.
settings.register_profile("icestream", deadline=None)
settings.load_profile("icestream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks come from the folder a test lies in."""
    for item in items:
        folder = Path(str(item.path)).relative_to(Path(__file__).parent).parts[0]
        if folder in ("unit", "property", "integration", "faults"):
            item.add_marker(folder)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with every jar that a test's catalog may need."""
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent))
    jars_for = [{"uri": "jdbc:sqlite:", "warehouse": "s3://lake"}]
    spark = session(jars_for, "local[2]", {"spark.driver.memory": "2g"})
    yield spark
    spark.stop()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with a bucket `lake`."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with running(server):
        server.create_bucket("lake")
        yield server


@pytest.fixture(scope="session")
def rest(store: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    """Iceberg's reference REST catalog with its warehouse on the S3 server."""
    server = RestCatalog(
        tmp_path_factory.mktemp("rest"),
        warehouse="s3://lake/warehouse",
        storage=store.iceberg_properties(),
    )
    with running(server):
        yield server


@pytest.fixture
def lake(spark: SparkSession, rest: RestCatalog) -> Lake:
    """The REST catalog as Spark SQL sees it."""
    return Lake(spark, rest.catalog_properties())


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own, so that tests do not meet in the shared catalog."""
    return f"n{abs(hash((request.node.nodeid, os.getpid()))) % 10**10}"
