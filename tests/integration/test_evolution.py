"""Tables that were there before, and that change while a pipeline feeds them: nothing is lost."""

from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.integration.changelog import Changelog, by_key
from tests.integration.pipelines import Shell, assert_refused, document, run_once
from tests.lake import Lake

OPERATOR, CONFIG = 3, 2


def create(lake: Lake, name: str, columns: str) -> str:
    """Create a table with Spark SQL and return its name in SQL."""
    lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {lake.name}.shop")
    lake.sql(f"CREATE TABLE {lake.table(name)} ({columns}) USING iceberg")
    return lake.table(name)


def into(name: str) -> dict[str, Any]:
    """The setting that asks for a table that is there already, so that it may be written."""
    return {"tables": {name: {"table": name}}}


def test_rows_of_others_are_updated_and_deleted_by_their_key_in_every_type_of_column(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I8, I10: Spark wrote the first rows; lists and structs of the table are filled from JSON."""
    columns = (
        "id BIGINT, name STRING, tags ARRAY<BIGINT>, home STRUCT<city: STRING, zip: INT>, "
        "prices MAP<STRING, DECIMAL(9,2)>, r FLOAT"
    )
    table = create(local, "shop.people", columns)
    local.sql(
        f"INSERT INTO {table} VALUES "
        "(1, 'one', array(1), named_struct('city', 'rome', 'zip', 1), map('a', 1.5), 0.5), "
        "(2, 'two', null, null, null, null), (3, 'three', array(), null, map(), null)"
    )
    log = Changelog.at(tmp_path / "feed")
    changed = {
        "id": 1,
        "name": "changed",
        "tags": [1, None, 3],
        "home": {"city": 'o"slo', "zip": None},
        "prices": {"b": Decimal("2.50"), "c": Decimal("-0.10")},
        "r": 0.25,
    }
    log.put("people", changed, {**changed, "id": 4, "home": None, "tags": []})
    log.remove("people", 2)
    log.resolve()
    run_once(spark, document(tmp_path / "feed", embedded, sink=into("people")))
    found = by_key(local.rows("shop.people"), ["id"])
    untouched = {"id": 3, "name": "three", "tags": [], "prices": {}}
    assert found == {**log.expected("people"), (3,): untouched}


def test_a_value_beyond_its_column_stops_the_epoch_and_a_widened_column_takes_it(
    shell: Shell, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I11, E3: earlier epochs stay, nothing of this one is there, and then all of it is, once."""
    table = create(local, "shop.orders", "id BIGINT, qty INT, price DECIMAL(5,2)")
    log = Changelog.at(tmp_path / "feed")
    price = Decimal("1.50")
    log.put("orders", {"id": 1, "qty": 1, "price": price}, {"id": 2, "qty": -2, "price": price})
    log.resolve()
    log.remove("orders", 1)
    log.put("orders", {"id": 3, "qty": 3_000_000_000, "price": price})
    log.resolve()
    log.put("orders", {"id": 4, "qty": 4, "price": Decimal("12345.00")})
    log.resolve()
    pipelines = document(tmp_path / "feed", embedded, sink=into("orders"))
    for column, kind in (("qty", "BIGINT"), ("price", "DECIMAL(12,2)")):
        answer = shell.run(pipelines)
        assert_refused(answer, OPERATOR, f"column {column} does not fit", "do not fit.")
        assert "3000000000" not in answer.err
        assert "12345" not in answer.err
        epochs = local.epochs("shop.orders")
        at = log.resolved[len(epochs) - 1]
        assert by_key(local.rows("shop.orders"), ["id"]) == log.expected("orders", at)
        local.sql(f"ALTER TABLE {table} ALTER COLUMN {column} TYPE {kind}")
    assert shell.run(pipelines).code == 0
    assert by_key(local.rows("shop.orders"), ["id"]) == log.expected("orders")
    assert len(local.epochs("shop.orders")) == len(log.resolved)


def test_a_column_that_the_source_drops_becomes_null_unless_the_table_requires_it(
    shell: Shell, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I11: a dropped column stays and is null; a required one is refused until it is optional."""
    table = create(local, "shop.orders", "id BIGINT NOT NULL, kept STRING NOT NULL, free STRING")
    local.sql(f"ALTER TABLE {table} SET IDENTIFIER FIELDS id")
    log = Changelog.at(tmp_path / "feed")
    log.put("orders", {"id": 1, "kept": "a", "free": "b"})
    log.resolve()
    log.put("orders", {"id": 2, "kept": "c"})
    log.resolve()
    pipelines = document(tmp_path / "feed", embedded, sink=into("orders"))
    assert shell.run(pipelines).code == 0
    assert by_key(local.rows("shop.orders"), ["id"]) == log.expected("orders")
    log.put("orders", {"id": 1, "free": "d"})
    log.resolve()
    assert_refused(shell.run(pipelines), OPERATOR, "column kept is required")
    local.sql(f"ALTER TABLE {table} ALTER COLUMN kept DROP NOT NULL")
    assert shell.run(pipelines).code == 0
    assert by_key(local.rows("shop.orders"), ["id"]) == log.expected("orders")


def test_deleting_by_columns_that_deletes_do_not_tell_is_refused(
    shell: Shell, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I8: a changefeed's delete has only the primary key; by another column it would miss rows."""
    log = Changelog.at(tmp_path / "feed")
    log.put("people", {"id": 1, "mail": "a"}, {"id": 2, "mail": "b"})
    log.resolve()
    log.remove("people", 1)
    log.put("people", {"id": 2, "mail": "c"})
    log.resolve()
    source = {"keys": {"people": ["id"]}}
    by_mail = document(tmp_path / "feed", embedded, source=source)
    by_mail["feed"]["sink"]["iceberg"]["equality_delete_by"] = ["mail"]
    assert_refused(shell.run(by_mail), CONFIG, "equality_delete_by")
    assert local.epochs("shop.people") == []
    assert shell.run(document(tmp_path / "feed", embedded, source=source)).code == 0
    assert by_key(local.rows("shop.people"), ["id"]) == log.expected("people")
