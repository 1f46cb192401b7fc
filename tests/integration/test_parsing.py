"""Spark's parser, as selects use it."""

from concurrent.futures import ThreadPoolExecutor

from pyspark.sql import SparkSession

from icestream.spark import parsed

SUBSTITUTE = "spark.sql.variable.substitute"
TEXT = "select '${sheep}' as s"


def test_a_query_is_parsed_by_the_settings_of_its_own_session(spark: SparkSession) -> None:
    """E11: also in a thread in which another session is active, or none."""
    own = spark.newSession()
    own.conf.set(SUBSTITUTE, "false")
    own.conf.set("sheep", "dolly")
    other = spark.newSession()
    other.conf.set("sheep", "dolly")

    def both() -> tuple[str, str]:
        return parsed(own, TEXT).toString(), parsed(other, TEXT).toString()

    with ThreadPoolExecutor(1) as pool:
        as_written, substituted = pool.submit(both).result()
    assert "${sheep}" in as_written
    assert "dolly" in substituted
