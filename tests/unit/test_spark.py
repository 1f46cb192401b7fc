"""The session gets the jars that catalogs and their storages need, and tasks their rows."""

import sys

import pytest

from icestream.spark import (
    ICEBERG_RUNTIME,
    SQLITE,
    _workers_python,
    attempt_number,
    packages,
    run_tasks,
)
from tests.property.local_spark import LocalSpark


def names(*catalogs: dict[str, str]) -> set[str]:
    return {coordinate.split(":")[1] for coordinate in packages(catalogs)}


@pytest.mark.parametrize(
    ("properties", "bundle"),
    [
        ({"type": "rest", "uri": "http://x", "warehouse": "s3://lake"}, "iceberg-aws-bundle"),
        ({"type": "rest", "uri": "http://x", "s3.endpoint": "http://y"}, "iceberg-aws-bundle"),
        ({"type": "glue"}, "iceberg-aws-bundle"),
        ({"type": "rest", "warehouse": "gs://lake"}, "iceberg-gcp-bundle"),
        ({"type": "rest", "warehouse": "abfss://lake@x"}, "iceberg-azure-bundle"),
        ({"type": "jdbc", "uri": "jdbc:sqlite:x.db"}, "sqlite-jdbc"),
    ],
)
def test_a_catalog_brings_what_it_needs(properties, bundle):
    """I1: REST, JDBC, Glue; local, S3, GCS, Azure."""
    assert names(properties) == {"iceberg-spark-runtime-4.1_2.13", bundle}


def test_a_plain_catalog_needs_only_iceberg():
    """I1: nothing is fetched in vain."""
    assert packages([{"type": "rest", "uri": "http://x", "warehouse": "prod"}]) == [ICEBERG_RUNTIME]
    assert packages([]) == [ICEBERG_RUNTIME]


def test_what_several_catalogs_need_is_asked_for_once():
    """I1: one session serves all pipelines of a file."""
    sqlite = {"type": "jdbc", "uri": "jdbc:sqlite:x.db"}
    assert packages([sqlite, sqlite]) == [ICEBERG_RUNTIME, SQLITE]


@pytest.mark.parametrize(
    ("master", "conf", "variable", "python"),
    [
        ("spark://h:7077", {}, None, sys.executable),
        ("spark://h:7077", {}, "/opt/env/bin/python", "/opt/env/bin/python"),
        (
            "k8s://h",
            {"spark.pyspark.python": "./env/python"},
            "/opt/python",
            "./env/python",
        ),
        ("", {}, "/opt/env/bin/python", "/opt/env/bin/python"),
        ("local[2]", {}, "/opt/env/bin/python", sys.executable),
    ],
)
def test_workers_elsewhere_run_the_python_that_a_user_names(
    master, conf, variable, python, monkeypatch
):
    """U7: on this machine it is the one that runs already, which has all that is needed."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)  # tests of this process have a session
    if variable is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", variable)  # as a user has it in the shell
    assert _workers_python(master, conf) == python


def test_rows_of_a_bucket_pass_through_one_call_in_a_row():
    """E1: what is gathered was brought together first."""
    calls: list[list[int]] = []

    def work(number):
        for bucket in range(4):
            yield "x", bucket, bytes([number])

    def gather(rows):
        seen = list(rows)
        calls.append([bucket for _, bucket, _ in seen])
        yield from seen

    rows = run_tasks(LocalSpark(parallelism=3), [1, 2, 3], work, gather, "d")
    assert sorted(rows) == sorted(("x", b, bytes([n])) for n in (1, 2, 3) for b in range(4))
    seen = [sorted(set(call)) for call in calls]
    assert sorted(bucket for call in seen for bucket in call) == [0, 1, 2, 3]
    assert all(call == sorted(call) for call in calls)


def test_payloads_cross_as_they_are():
    """E1: bytes stay bytes, of any content and length."""
    payloads = [b"", b"\x00\xff" * 1000, "ä".encode()]
    rows = run_tasks(LocalSpark(), payloads, lambda payload: iter([("k", 0, payload)]))
    assert sorted(payload for _, _, payload in rows) == sorted(payloads)


def test_no_tasks_start_no_job():
    """E9: an epoch without splits costs nothing."""
    spark = LocalSpark()
    assert run_tasks(spark, [], lambda task: iter(()), description="d") == []
    assert spark.sparkContext.descriptions == []


def test_outside_a_task_the_attempt_is_the_first():
    """E3: a failpoint in a worker is reached by its first attempt only."""
    assert attempt_number() == 0
