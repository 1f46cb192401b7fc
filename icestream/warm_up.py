"""What a machine has to do once, done before it matters: `icestream warm-up`.

A small pipeline runs in a temporary folder, from an Iceberg table into another. Its JVM notes the
classes that it loads, for the archive of `class_archive`. The next `icestream` starts with it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from pyspark import SparkContext
from pyspark.sql import SparkSession

from icestream.config import load, open_pipeline
from icestream.errors import SparkFailed
from icestream.spark import attach_catalog, class_archive, session

TRAINING_SECONDS_MAX = 600.0
STOP_SECONDS_MAX = 300.0
# What of a catalog's properties decides on jars.
_KINDS = ("type", "uri", "warehouse", "catalog-impl", "io-impl")
# A port that nobody listens at: the clients of a catalog and of a storage are loaded all the same.
_NOBODY = "http://127.0.0.1:9"
_REST = {"type": "rest", "uri": _NOBODY}
_S3 = {
    "s3.endpoint": _NOBODY,
    "s3.access-key-id": "none",
    "s3.secret-access-key": "none",
    "s3.path-style-access": "true",
    "s3.retry.num-retries": "0",
    "client.region": "us-east-1",
}


def warm_up(catalogs: Sequence[Mapping[str, str]]) -> Path:
    """Make the archive for pipelines with these catalogs unless it is there; returns its path."""
    archive = class_archive(catalogs)
    if not archive.file.exists():
        # A warehouse's kind decides on jars; what else a catalog has may be secret.
        kinds = [{name: each[name] for name in _KINDS if name in each} for each in catalogs]
        archive.make(partial(_train, kinds))
    return archive.file


def _train(catalogs: Sequence[Mapping[str, str]], options: Sequence[str]) -> None:
    """Run this module in a process of its own, whose JVM has the options."""
    command = [sys.executable, "-m", "icestream.warm_up", json.dumps([catalogs, options])]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=TRAINING_SECONDS_MAX, check=False
    )
    if ended.returncode != 0:
        raise SparkFailed(
            "the pipeline that warms up has failed", detail=ended.stderr.strip()[-1000:]
        )


def _work(spark: SparkSession, folder: Path) -> None:
    """Make a table, copy it by a pipeline, change it, and copy the changes."""
    catalog = {"type": "hadoop", "warehouse": str(folder / "lake")}
    attach_catalog(spark, "warm", catalog)
    spark.sql("CREATE NAMESPACE warm.db")
    spark.sql("CREATE TABLE warm.db.t (id BIGINT, s STRING) USING iceberg")
    spark.sql("INSERT INTO warm.db.t VALUES (1, 'a'), (2, 'b')")
    table = {"table_name": "db.t", "identifier_columns": ["id"]}
    source = {"iceberg": {"catalog": catalog, "tables": [table]}}
    sink = {"iceberg": {"catalog": catalog, "namespace": "copy"}}
    file = folder / "warm-up.json"
    file.write_text(json.dumps({"warm-up": {"source": source, "sink": [sink]}}))
    config = load(file)
    for statement in ("UPDATE warm.db.t SET s = 'c' WHERE id = 1", "DELETE FROM warm.db.t"):
        open_pipeline(config.pipelines[0], spark).run(once=True)
        spark.sql(statement)
    spark.sql("SELECT s, count(*) FROM warm.copy.t GROUP BY s ORDER BY s").collect()


def _meet_nobody(spark: SparkSession) -> None:
    """Load the clients of a REST catalog and of S3, which find nobody to talk to."""
    jvm: Any = spark._jvm
    hadoop = cast(Any, spark)._jsparkSession.sessionState().newHadoopConf()
    util = jvm.org.apache.iceberg.CatalogUtil
    with suppress(Exception):
        util.buildIcebergCatalog("nobody", _REST, hadoop)
    with suppress(Exception):
        storage = util.loadFileIO("org.apache.iceberg.aws.s3.S3FileIO", _S3, hadoop)
        storage.newInputFile("s3://lake/none").exists()


def main(catalogs: Sequence[Mapping[str, str]], options: Sequence[str]) -> None:
    """Run the pipeline, within a JVM that has the options."""
    conf = {"spark.driver.defaultJavaOptions": " ".join(f'"{each}"' for each in options)}
    with tempfile.TemporaryDirectory() as name:
        spark = session(catalogs, "local[2]", conf)
        _meet_nobody(spark)
        _work(spark, Path(name))
        gateway: Any = SparkContext._gateway
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(STOP_SECONDS_MAX)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
    os._exit(0)
