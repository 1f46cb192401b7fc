"""Partitioned tables: rows that move leave no copy behind, and no reader's pruning loses a row.

Every table has the same columns and its own partitioning; rows change at random, so that most
changes move a row to another partition. What must be there is worked out by the change log.
"""

import math
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.integration.changelog import Changelog, Row, by_key
from tests.integration.pipelines import document, run_once
from tests.lake import Lake

COLUMNS = {
    "region": "string",
    "name": "string",
    "qty": "int",
    "price": "decimal(12,2)",
    "wide": "decimal(30,5)",
    "d": "double",
    "born": "date",
    "ts": "timestamp",
    "tz": "timestamptz",
    "u": "uuid",
    "flag": "boolean",
    "bin": "binary",
}
# Values on both sides of zero, of 1970, of a truncated bound and of a code point's border.
VALUES: Mapping[str, Sequence[Any]] = {
    "region": ["eu", "us", "", "ünï=/%", None],
    "name": [
        "a",
        "a long text that no bound of sixteen characters holds",
        "fifteen letters\ud7ff and more",
        "\U0010ffff" * 20,
        "größe ☃ und noch viel mehr",
        None,
    ],
    "qty": [-2147483640, -11, -1, 0, 9, 2147483647, None],
    "price": [Decimal("-123.45"), Decimal("-0.01"), Decimal("0.00"), Decimal("99999.99"), None],
    "wide": [Decimal("-1234567890123456789012.00001"), Decimal("3.00000"), None],
    "d": [-math.inf, -1.5, 0.0, 2.25, math.inf, math.nan, None],
    "born": [date(1969, 12, 31), date(1970, 1, 1), date(2024, 2, 29), None],
    "ts": [datetime(1969, 12, 31, 23, 59, 59, 999999), datetime(2024, 2, 29, 12, 30), None],
    "tz": [
        datetime(1965, 7, 1, 0, 0, 0, 1, tzinfo=UTC),
        datetime(2024, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        None,
    ],
    "u": [str(uuid.UUID(int=number)) for number in (0, 2**127, 2**128 - 1)],
    "flag": [True, False, None],
    "bin": [b"", b"\x00\x01", b"\xff" * 20, None],
}
TERMS: Mapping[str, Sequence[str]] = {
    "plain": [],
    "identity_string": ["region"],
    "identity_int": ["identity(qty)"],
    "identity_decimal": ["price"],
    "identity_wide": ["wide"],
    "identity_double": ["d"],
    "identity_date": ["born"],
    "identity_timestamp": ["ts"],
    "identity_timestamptz": ["tz"],
    "identity_uuid": ["u"],
    "identity_boolean": ["flag"],
    "identity_binary": ["bin"],
    "bucket_key": ["bucket(4, id)"],
    "bucket_string": ["bucket(4, name)"],
    "bucket_decimal": ["bucket(3, price)"],
    "truncate_string": ["truncate(2, name)"],
    "truncate_int": ["truncate(10, qty)"],
    "truncate_decimal": ["truncate(50, price)"],
    "truncate_binary": ["truncate(1, bin)"],
    "year_date": ["year(born)"],
    "month_timestamp": ["month(ts)"],
    "day_timestamptz": ["day(tz)"],
    "day_date": ["day(born)"],
    "hour_timestamp": ["hour(ts)"],
    "void_string": ["void(name)"],
    "several": ["bucket(2, id)", "month(tz)", "region"],
}
# One table for each transform; the others differ only in the type it is applied to.
TRANSFORMS = [
    "plain",
    "identity_string",
    "bucket_key",
    "bucket_string",
    "truncate_string",
    "year_date",
    "month_timestamp",
    "day_timestamptz",
    "hour_timestamp",
    "void_string",
    "several",
]
KEYS = 6
BRANCHES_MAX = 60


def random_row(generator: random.Random, key: int) -> Row:
    return {"id": key, **{name: generator.choice(values) for name, values in VALUES.items()}}


def write_epoch(log: Changelog, generator: random.Random, tables: Iterable[str]) -> None:
    """Change most rows of every table, some of them twice, and remove a few."""
    for table in tables:
        for key in generator.sample(range(KEYS), 4):
            log.put(table, random_row(generator, key))
        log.put(table, random_row(generator, generator.randrange(KEYS)))
        log.remove(table, *generator.sample(range(KEYS + 1), 2))
    log.resolve()


def all_tables(lake: Lake, tables: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of every table, read in one query."""
    parts = [f"SELECT '{table}' AS t, * FROM {lake.table(f'shop.{table}')}" for table in tables]
    found: dict[str, list[Row]] = {table: [] for table in tables}
    for row in lake.sql(" UNION ALL ".join(parts)):
        found[row.pop("t")].append(row)
    return found


def assert_exact(lake: Lake, log: Changelog) -> None:
    for table, rows in all_tables(lake, log.tables()).items():
        assert by_key(rows, ["id"]) == log.expected(table), table


def change_specs(lake: Lake) -> None:
    """Partition every table in another way; old files keep their old partitioning."""
    for number, table in enumerate(TRANSFORMS):
        terms = TERMS[table]
        alter = f"ALTER TABLE {lake.table(f'shop.{table}')}"
        old = terms[0].replace("identity(qty)", "qty") if terms else ""
        if number % 3 == 0 or not terms or "void" in old:
            lake.sql(f"{alter} ADD PARTITION FIELD truncate(1, region)")
        elif number % 3 == 1:
            lake.sql(f"{alter} REPLACE PARTITION FIELD {old} WITH bucket(5, name)")
        else:
            lake.sql(f"{alter} DROP PARTITION FIELD {old}")


@pytest.mark.parametrize(
    ("version", "with_before"), [(2, False), (3, True)], ids=["v2-keys", "v3-before-images"]
)
def test_rows_that_move_between_partitions_leave_no_copy_behind(
    version: int, with_before: bool, spark: SparkSession, embedded: dict[str, str], tmp_path: Path
) -> None:
    """I9, I8: every transform, both format versions, with and without before-images; also right
    after the partitioning was changed."""
    generator = random.Random(version * 2 + with_before)
    log = Changelog.at(tmp_path / "feed", with_before=with_before)
    pipelines = document(
        tmp_path / "feed",
        embedded,
        source={"columns": dict.fromkeys(TERMS, COLUMNS)},
        sink={
            "format_version": version,
            "tables": {table: {"partition_by": list(terms)} for table, terms in TERMS.items()},
        },
    )
    lake = Lake(spark, embedded)
    for _ in range(2):
        write_epoch(log, generator, TRANSFORMS)
    run_once(spark, pipelines)
    assert_exact(lake, log)
    change_specs(lake)
    for _ in range(2):
        write_epoch(log, generator, TRANSFORMS)
    run_once(spark, pipelines)
    assert_exact(lake, log)


def literal(value: Any) -> str:
    """A value in Spark's SQL."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, float):
        return f"double('{value}')"
    if isinstance(value, Decimal):
        return f"{value}BD"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, datetime):
        return f"TIMESTAMP{'' if value.tzinfo else '_NTZ'}'{value}'"
    return f"DATE'{value}'" if isinstance(value, date) else str(value)


Test = Callable[[Any], bool]


def filters(column: str) -> Iterator[tuple[str, Test]]:
    """Conditions on a column in SQL, each with what it means of a value that is there."""
    yield f"`{column}` IS NULL", lambda value: False
    for bound in VALUES[column]:
        if bound is None:
            continue
        if bound != bound:
            yield f"isnan(`{column}`)", lambda value: value != value
            continue
        text = literal(bound)
        yield f"`{column}` = {text}", lambda value, at=bound: value == at
        if column not in ("flag", "u"):
            # Spark takes NaN for the largest number and Iceberg for none: no two agree on it.
            no_nan = f" AND NOT isnan(`{column}`)" if column == "d" else ""
            yield f"`{column}` < {text}", lambda value, at=bound: value < at
            yield f"`{column}` >= {text}{no_nan}", lambda value, at=bound: value >= at
    if column == "name":
        yield "`name` LIKE 'gr%'", lambda value: value.startswith("gr")


def assert_filters_find(
    lake: Lake, cases: Sequence[tuple[str, str]], rows: Mapping[str, Sequence[Row]]
) -> None:
    """Each condition on a (table, column) finds the rows that a look at every row finds."""
    parts, expected = [], []
    for table, column in cases:
        for condition, holds in filters(column):
            at = f"{len(expected)} AS n, id FROM {lake.table(f'shop.{table}')}"
            parts.append(f"SELECT {at} WHERE {condition}")
            values = {row["id"]: with_zone(row[column], column) for row in rows[table]}
            nulls = condition.endswith("IS NULL")
            found = {
                key
                for key, value in values.items()
                if (value is None and nulls) or holds_for(holds, value)
            }
            expected.append((table, condition, found))
    actual: dict[int, set[int]] = {}
    for start in range(0, len(parts), BRANCHES_MAX):
        for row in lake.sql(" UNION ALL ".join(parts[start : start + BRANCHES_MAX])):
            actual.setdefault(row["n"], set()).add(row["id"])
    for number, (table, condition, found) in enumerate(expected):
        assert actual.get(number, set()) == found, f"{table}: {condition}"


def with_zone(value: Any, column: str) -> Any:
    """Spark hands out moments as local times of its session, which is in UTC."""
    return value.replace(tzinfo=UTC) if column == "tz" and value is not None else value


def holds_for(holds: Test, value: Any) -> bool:
    return value is not None and holds(value)


def test_filters_on_partitions_and_bounds_find_every_row(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I3, I9: partition values and column metrics never let a reader skip a file that it needs."""
    log = Changelog.at(tmp_path / "feed", with_before=True)
    generator = random.Random(17)
    for table in TERMS:
        log.put(table, *(random_row(generator, key) for key in range(KEYS)))
    # Every value of every column comes up at least once, each in a file of its own.
    longest = max(len(values) for values in VALUES.values())
    for number in range(longest):
        row = {name: values[number % len(values)] for name, values in VALUES.items()}
        log.put("plain", {"id": 100 + number, **row})
    log.resolve()
    write_epoch(log, generator, TERMS)
    tables = {table: {"partition_by": list(terms)} for table, terms in TERMS.items()}
    one_row_per_file = {"write.target-file-size-bytes": "1"}
    sink = {"tables": tables, "properties": one_row_per_file}
    source = {"columns": dict.fromkeys(TERMS, COLUMNS)}
    run_once(spark, document(tmp_path / "feed", embedded, source=source, sink=sink))
    assert_exact(local, log)
    cases = [("plain", column) for column in COLUMNS]
    for table, terms in TERMS.items():
        words = re.findall(r"\w+", " ".join(terms))
        cases += [(table, column) for column in COLUMNS if column in words]
    assert_filters_find(local, cases, all_tables(local, list(TERMS)))


def test_a_value_too_long_for_statistics_does_not_hide_behind_the_bounds_of_others(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
) -> None:
    """I3: Parquet keeps no statistics of a very long value; its file's bounds must allow for it."""
    texts = ["m", "a" * 5000, "z" * 5000, "n"]
    log = Changelog.at(tmp_path / "feed")
    log.put("notes", *({"id": number, "text": text} for number, text in enumerate(texts)))
    log.resolve()
    # One file with a row group for each row.
    sink = {"properties": {"write.parquet.row-group-size-bytes": "1"}}
    run_once(spark, document(tmp_path / "feed", embedded, sink=sink))
    table = local.table("shop.notes")
    assert len(local.sql(f"SELECT * FROM {table}.data_files")) == 1
    for number, text in enumerate(texts):
        found = local.sql(f"SELECT id FROM {table} WHERE text = '{text}'")
        assert found == [{"id": number}]
