"""Workers that die, run twice or report what cannot be: one epoch stays one commit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from icestream.config import open_sink, open_source
from icestream.errors import Broken
from icestream.iceberg.closed import FileClosed
from icestream.pipeline import Cadence, Pipeline
from icestream.report import Report
from icestream.sinks import Writer
from icestream.sources import Split
from icestream.worker import Outcome, write_epoch
from tests.faults.checking import PIPELINE, exists, resolved
from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop

pytestmark = pytest.mark.spark_jobs

Alter = Callable[[Sequence[Report], Sequence[Report]], Sequence[Report]]


@pytest.fixture
def dying_workers(spark: SparkSession) -> Iterator[None]:
    """The Python worker of every task's first attempt kills itself."""
    environment = spark.sparkContext.environment
    environment["ICESTREAM_FAILPOINTS"] = "in-worker=kill"
    yield
    del environment["ICESTREAM_FAILPOINTS"]


def failed_tasks(spark: SparkSession) -> int:
    """How many tasks the session has seen fail."""
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(False)
    return int(executors.head().failedTasks())


def pipeline_with(shop: Shop, alter: Alter) -> Pipeline:
    """A run whose workers do all their work twice; `alter` makes up what is reported again."""
    config, spark = shop.config(), shop.lake.spark

    def write_twice(splits: Sequence[Split], writer: Writer, keyed: bool, text: str) -> Outcome:
        first, second = (write_epoch(spark, splits, writer, keyed, text) for _ in range(2))
        reports = [*first.reports, *alter(first.reports, second.reports)]
        return Outcome(reports=reports, rows=first.rows, learned=first.learned)

    source, sink = open_source(config, spark), open_sink(config, spark)
    return Pipeline(PIPELINE, source, sink, Cadence(), write_twice)


def test_a_worker_that_dies_is_replaced_and_nothing_is_doubled(
    make_shop: MakeShop, dying_workers: None
) -> None:
    """E3, I17: what the first attempt of a task left is not committed."""
    shop = make_shop(tables=("orders", "items"), sink={"format_version": 3})
    shop.epochs(1)
    failed_before = failed_tasks(shop.lake.spark)
    shop.run()
    assert failed_tasks(shop.lake.spark) > failed_before
    shop.assert_exact()


def test_the_files_of_a_task_that_runs_twice_count_once(make_shop: MakeShop) -> None:
    """E3, I4, I17: of two attempts one counts, and a repeated report is dropped."""
    by_region = {"tables": {"orders": {"partition_by": ["region"]}}}
    shop = make_shop(tables=("orders", "items"), sink=by_region)
    shop.epochs(2)
    pipeline_with(shop, lambda first, second: [*second, *first]).run(once=True)
    shop.assert_exact()


def test_one_path_with_two_contents_stops_the_run_before_anything_is_committed(shop: Shop) -> None:
    """I4: a repeated path with another hash is refused."""
    shop.epochs(2)

    def one_row_more(first: Sequence[Report], _: Sequence[Report]) -> list[Report]:
        file = FileClosed.of(first[0])
        return [replace(file, record_count=file.record_count + 1).report()]

    with pytest.raises(Broken, match="two different files were reported under s3://") as broken:
        pipeline_with(shop, one_row_more).run(once=True)
    assert broken.value.exit_code == 5
    assert exists(shop.lake, shop.name()) and not resolved(shop.lake, shop.name())
    shop.run()
    shop.assert_exact()


def test_a_report_that_was_altered_on_its_way_is_refused(shop: Shop) -> None:
    """I3: the hash covers everything that is reported."""
    shop.epochs(1)

    def altered(_: Sequence[Report], second: Sequence[Report]) -> list[Report]:
        file = replace(FileClosed.of(second[0]), record_count=1_000)
        return [replace(second[0], payload=file)]

    with pytest.raises(Broken, match="arrives as it was sent"):
        pipeline_with(shop, altered).run(once=True)
    shop.run()
    shop.assert_exact()
