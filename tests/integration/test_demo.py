"""The demo shows the main job on embedded parts, and its verdict can be trusted."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from icestream.config import catalogs
from icestream.demo import compare, configuration
from icestream.samples.postgres import EmbeddedPostgres
from icestream.samples.shop import TABLES, Business, open_shop
from icestream.sources.postgres.connection import Connection, parse_dsn
from icestream.spark import attach_catalog
from tests.integration.postgres_world import World
from tests.servers import wait_until

SECONDS_MAX = 400
CONTENT = "SELECT md5(string_agg(t::text, '' ORDER BY t::text)) FROM {} t"


def test_demo_moves_the_shop_and_its_verdict_follows_the_data(spark: SparkSession, tmp_path: Path):
    """U1: without a terminal the demo ends by itself and proves that source and lake are equal.

    What it left is looked at again: a change of one row at the source is found.
    """
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "icestream", "demo", "--seconds", "2", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "source and lake are equal"
    assert re.search(r"[1-9][\d,]* changes in [1-9]\d* transactions", done.stdout)
    assert re.search(r"[1-9]\d* x a key changed, \d+ x a table truncated", done.stdout)
    assert re.search(r"http://127\.0\.0\.1:\d+/health", done.stderr)
    assert re.search(r"running +public\.orders +\w+/\w+ +\d+ +\d+", done.stderr)
    # A session keeps a catalog's first settings, and other tests use this name as well.
    spark = spark.newSession()
    with EmbeddedPostgres(folder / "postgres") as server:
        attach_catalog(spark, "icestream", catalogs(configuration(folder, server.dsn).pipelines)[0])
        with Connection(parse_dsn(server.dsn)) as connection:
            assert {t: list(compare(spark, connection, t).texts) for t in TABLES} == {
                table: [] for table in TABLES
            }
            connection.rows(
                "UPDATE items SET exact_tax = 98765 WHERE (order_id, line) = "
                "(SELECT order_id, line FROM items ORDER BY 1, 2 LIMIT 1)"
            )
            connection.rows(
                "DELETE FROM baskets WHERE session = "
                "(SELECT session FROM baskets ORDER BY 1 LIMIT 1)"
            )
            assert "1 only in the lake, with differences in exact_tax" in _text(
                spark, connection, "items"
            )
            assert "0 rows only in the source, 1 only in the lake" in _text(
                spark, connection, "baskets"
            )
            connection.rows("ALTER TABLE customers ADD COLUMN shoe_size int")
            assert "shoe_size" in _text(spark, connection, "customers")


def _text(spark: SparkSession, connection: Connection, table: str) -> str:
    return "; ".join(compare(spark, connection, table).texts)


def test_ctrl_c_closes_the_shop_and_compares(tmp_path: Path):
    """U1: the demo that goes on for long ends with Ctrl-C, and then compares as well."""
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "icestream", "demo", "--seconds", "9999"]
    log = tmp_path / "log"
    with log.open("w") as talk:
        process = subprocess.Popen(
            [*command, "--folder", str(folder)], stdout=subprocess.PIPE, stderr=talk, text=True
        )
    try:
        wait_until(lambda: "->" in log.read_text(), SECONDS_MAX, "a commit is shown")
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()
    assert shown.splitlines()[-1] == "source and lake are equal"


def test_the_same_seed_does_the_same_things(world: World):
    """U1: what happens in the shop is random but can be repeated."""
    contents = [_traded(world, seed) for seed in (1, 1, 2)]
    assert contents[0] == contents[1] != contents[2]


def _traded(world: World, seed: int) -> list[str]:
    with Connection(parse_dsn(world.dsn)) as connection:
        connection.rows("DROP SCHEMA public CASCADE")
        connection.rows("CREATE SCHEMA public")
        open_shop(world.dsn)
        shop = Business(world.dsn, seed, 0.0)
        shop.trade(130)
        shop.close()
        assert min(shop.events.values()) >= 1
        return [str(connection.one(CONTENT.format(table))) for table in TABLES]
