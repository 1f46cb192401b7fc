"""What tests share: one Spark session and one server of each kind, each started when needed.

A test has topics, indices, databases and namespaces of its own on servers that all tests of a
process share. A test that stops a server starts it again; one that harms it has a server of its
own.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.samples.postgres import EmbeddedPostgres
from icestream.spark import session
from tests.examples import tries
from tests.lake import Lake
from tests.order import Stopwatch, durations, longest_first
from tests.running import QUICK, compiled_plans, spark_jobs
from tests.servers import KafkaBroker, OpenSearch, RestCatalog, S3Server, running

# No test depends on how busy the machine is. What is compiled at its first call is slow once.
settings.register_profile("icestream", deadline=None, max_examples=tries(100))
settings.load_profile("icestream")

# Tests handle few rows, and a JVM spends more on its best compiler than on them. Spark's launcher
# reads these variables, so they hold for the session of the tests and for every `icestream` that
# a test starts; the product's own settings are left as they are.
# Without room for all compiled code the JVM would throw some away, and compile it again.
SMALL_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC -XX:-UsePerfData "
    "-Xshare:auto"
)
os.environ.setdefault("SPARK_SUBMIT_OPTS", SMALL_JVM)
os.environ.setdefault("SPARK_LAUNCHER_OPTS", SMALL_JVM)
# Spark keeps the code of a hundred queries and compiles the others again whenever they come.
SPARK_SETTINGS = {"spark.driver.memory": "2g", "spark.sql.codegen.cache.maxEntries": "5000"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-durations` measures each file for `tests/durations.json`."""
    parser.addoption("--write-durations", action="store_true", help="measure the test files anew")


def pytest_configure(config: pytest.Config) -> None:
    """One process measures: the one that hears of all tests."""
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks come from the folder a test lies in; the order is shuffled but for long files."""
    longest_first(items, durations())
    for item in items:
        folder = Path(str(item.path)).relative_to(Path(__file__).parent).parts[0]
        if folder in ("unit", "property", "integration", "faults"):
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Python looks for garbage all the time: it need not look at all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def passes_are_counted_anew() -> None:
    """A failpoint counts for the life of a process, and other tests have run in it."""
    failpoints._passes.clear()


@pytest.fixture(autouse=True)
def where_tasks_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Jobs of Spark's where a test asks for them, this process elsewhere."""
    asked = request.node.get_closest_marker("spark_jobs") is not None
    with spark_jobs() if asked else nullcontext():
        yield


@pytest.fixture(autouse=True)
def how_plans_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """As the product has it where a test asks for that, and without compiling them elsewhere."""
    asked = request.node.get_closest_marker("compiled_plans") is not None
    with compiled_plans(request.getfixturevalue("spark")) if asked else nullcontext():
        yield


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with every jar that a test's catalog may need."""
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent))
    jars_for = [{"uri": "jdbc:sqlite:", "warehouse": "s3://lake"}]
    spark = session(jars_for, "local[2]", SPARK_SETTINGS)
    # Selects have sessions of their own, which begin with the product's settings.
    for name, value in QUICK.items():
        spark.conf.set(name, value)
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


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL that all tests share, each with a database of its own."""
    settings = {"max_replication_slots": "50", "max_wal_senders": "50", "max_connections": "200"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), settings) as server:
        yield server


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A Kafka broker that all tests share, each with topics of its own."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSearch]:
    """The OpenSearch node behind `node`."""
    with OpenSearch(tmp_path_factory.mktemp("opensearch")) as node:
        yield node


@pytest.fixture
def node(shared_node: OpenSearch) -> OpenSearch:
    """An OpenSearch node on which nothing of another test is left."""
    shared_node.clear()
    return shared_node
