"""Selects between source and sink: what they may be, and that the lake holds what they say."""

import datetime as dt
import hashlib
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)
from pyspark.errors import ArithmeticException
from pyspark.sql import SparkSession

from icestream.change import AT, OP, SEQ, Op
from icestream.config import open_catalog
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, DataRejected, SchemaRejected
from icestream.frontier import Frontier
from icestream.iceberg.closed import FileClosed
from icestream.report import Report
from icestream.schema import TableShape, arrow_schema, schema_from_json
from icestream.sinks import Written
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.sink import IcebergSink
from icestream.sinks.shaped import SOURCE_PROPERTY, shaped
from icestream.sources import Targets
from icestream.spark import stored_rows
from icestream.transform import Selects
from icestream.worker import write_epoch
from tests.examples import with_more
from tests.integration.changelog import Changelog
from tests.integration.hand_fed import array, shape
from tests.integration.pipelines import document, run_once
from tests.lake import Lake

PIPELINE, NAMESPACE = "feed", "shop"
PLACE = StructType(
    NestedField(1, "city", StringType(), required=False),
    NestedField(2, "gate", UUIDType(), required=False),
)
SHAPE = shape(
    ["id"], id=LongType(), name=StringType(), region=StringType(), amount=DecimalType(9, 2)
)
NESTED = shape(
    ["id"],
    id=LongType(),
    at=TimestamptzType(),
    place=PLACE,
    tags=ListType(element_id=3, element_type=StringType(), element_required=False),
)

REFUSED = {
    "select c.id from changes c join changes d on c.id = d.id": "joins",
    "select c.id from changes c, changes d": "joins",
    "select id, count(*) from changes group by id": "aggregates",
    "select max(id) as id from changes": "aggregates",
    "select id from changes group by id having id > 1": "aggregates",
    "select distinct id from changes": "distinct",
    "select id from changes order by id": "order by",
    "select id from changes limit 5": "limit",
    "select id, row_number() over (order by id) as n from changes": "window",
    "select id, explode(array(1, 2)) as n from changes": "explode",
    "select id from changes lateral view explode(array(1)) x as y": "explode",
    "select id from changes union all select id from changes": "union",
    "select id from changes except select id from changes": "union",
    "with c as (select * from changes) select id from c": "with",
    "select id from (select id from changes)": "other queries",
    "select id, (select 1) as one from changes": "subqueries",
    "select id from changes where id in (select 1)": "subqueries",
    "select id from changes where exists (select 1)": "subqueries",
    "select id from changes tablesample (10 percent)": "tablesample",
    "select id * 2 as a, a + 1 as b, id from changes": "name of another",
    "select id from orders": "anything but `changes`",
    "select 1 as id": "other queries",
    "drop table changes": "other queries",
    "insert into t select id from changes": "other queries",
    "select id, rand() as r from changes": "read again",
    "select id, uuid() as u from changes": "read again",
    "select id, now() as n from changes": "read again",
    "select id, current_timestamp() as n from changes": "read again",
    "select id from changes where at < current_date": "read again",
    "select id, current_user() as u from changes": "read again",
    # Mend h4: words of the clock, as literals, in casts, and where Spark casts by itself.
    "select id, date'today' as d from changes": "read again",
    "select id, TIMESTAMP 'Now' as d from changes": "read again",
    # Mend h4: however it is written.
    "select id, date /* x */ 'today' as d from changes": "read again",
    "select id, date -- x\n 'today' as d from changes": "read again",
    "select id, date r'today' as d from changes": "read again",
    "select id, date'\\u0074oday' as d from changes": "read again",
    'select id from changes where at < timestamp"\x01now"': "read again",
    "select id, '${x}' as x, transform(tags, t -> date/**/'today') as d from changes": "read again",
    "select id, cast('today' as date) as d from changes": "read again",
    "select id, to_date(' tomorrow ') as d from changes": "read again",
    "select id, to_timestamp('now') as d from changes": "read again",
    "select id from changes where at < 'yesterday'": "read again",
    "select id, cast(concat('to', 'day') as timestamp) as d from changes": "read again",
    "select id, unix_timestamp() as u from changes": "read again",
    "select id, aes_encrypt(place.city, '0000111122223333') as c from changes": "read again",
    # Mend h4, decision 027: columns that are read must be named, or their renaming goes unnoticed.
    "select id, identifier('place') from changes": "does not say which columns",
    "select id from changes where identifier('at') is null": "does not say which columns",
    "select id, struct(*).place as p from changes": "does not say which columns",
    "select id, hash(changes.*) as h from changes": "does not say which columns",
    "select id from changes where struct(*).place.city = 'x'": "does not say which columns",
    "select id, monotonically_increasing_id() as m from changes": "read again",
    "select place from changes": "loses column id of the key",
    "select id + 0 as id from changes": "loses column id of the key",
    "select cast(id as string) as id from changes": "loses column id of the key",
    "select id, at as x, place as x from changes": "two columns the name x",
    "select id, null as n from changes": "Cast it",
    "select id, at - at as i from changes": "Cast it",
    "select id, plce.city from changes": "Did you mean `place`?",
    "select id, upper(city) as c from changes": "which the source does not have",
    "select id, nosuch(id) as n from changes": "nosuch",
    "selec id from changes": "not understood",
    "": "not understood",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_more_than_rows_into_rows_is_refused(spark: SparkSession, text: str):
    """E11: each form is refused before anything is read, in words that say why."""
    with pytest.raises(ConfigInvalid) as caught:
        Selects(spark, {"orders": text}).derived("orders", NESTED)
    assert REFUSED[text] in str(caught.value)
    assert caught.value.hint


ALLOWED: dict[str, tuple[list[str], list[str]]] = {
    "select * from changes": (["id", "at", "place", "tags"], ["id"]),
    "SELECT * EXCEPT (tags, at) FROM Changes c": (["id", "place"], ["id"]),
    "select ID as order_id, c.place.city from changes c": (["order_id", "city"], ["order_id"]),
    # A constant that fails is told when a row comes.
    "select id, cast(concat('a', cast('x' as int)) as date) as d from changes": (
        ["id", "d"],
        ["id"],
    ),
    # A text that is no time, and texts that are the same time each time.
    "select id, 'today' as word from changes where place.city = 'now' and at > 'epoch'": (
        ["id", "word"],
        ["id"],
    ),
    'select id, "date \'today\'" as word from changes where at > timestamp "epoch"': (
        ["id", "word"],
        ["id"],
    ),
    "select '😀${x}' as face, id from changes where at > timestamp_ntz '2020-01-01'": (
        ["face", "id"],
        ["id"],
    ),
    "select place.*, id from changes": (["city", "gate", "id"], ["id"]),
    "select tags[0] as first, id from changes where at > timestamp '2020-01-01' or id = 1": (
        ["first", "id"],
        ["id"],
    ),
    "select id, id as other, transform(tags, t -> upper(t)) as tags from changes": (
        ["id", "other", "tags"],
        ["id"],
    ),
    "select id, case when id > 5 then 'big' else '{small}' end as size from changes": (
        ["id", "size"],
        ["id"],
    ),
}


@pytest.mark.parametrize("text", ALLOWED)
def test_rows_into_rows_is_allowed(spark: SparkSession, text: str):
    """E11: columns and key of the result come out of Spark's own analysis."""
    derived = Selects(spark, {"orders": text}).derived("orders", NESTED)
    names, key = ALLOWED[text]
    assert [column.name for column in derived.shape.columns] == names
    assert derived.shape.key == key


def test_columns_of_odd_names_are_told_apart(spark: SparkSession):
    """E11: dots, blanks, quotes and other scripts; names that differ in case are not guessed."""
    odd = shape([".id", "a b"], **{".id": LongType(), "a b": LongType(), "größe": StringType()})
    text = "select `.id`, `a b` as `x.y`, upper(`größe`) as `o``k`, `größe` as kind from changes"
    derived = Selects(spark, {"t": text}).derived("t", odd)
    assert [c.name for c in derived.shape.columns] == [".id", "x.y", "o`k", "kind"]
    assert derived.shape.key == [".id", "x.y"]
    twins = shape(["id"], id=LongType(), Id=LongType(), kind=StringType())
    every = Selects(spark, {"t": "select * from changes"}).derived("t", twins)
    assert every.plain == {"id": "id", "Id": "Id", "kind": "kind"}
    with pytest.raises(ConfigInvalid, match="not understood") as caught:
        Selects(spark, {"t": "select id from changes"}).derived("t", twins)
    assert "ambiguous" in str(caught.value)


def test_settings_of_the_session_do_not_change_what_a_select_means(spark: SparkSession):
    """E11, Mend h4: the same rows come out in whatever session the pipeline runs."""
    other = spark.newSession()
    other.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    other.conf.set("spark.sql.ansi.enabled", "false")
    other.conf.set("spark.sql.caseSensitive", "true")
    selects = Selects(other, {"t": "select ID, hour(at) as h, id / 0 as d from changes"})
    assert [c.name for c in selects.derived("t", NESTED).shape.columns] == ["ID", "h", "d"]
    midnight = "select hour(timestamp '2020-01-01 00:00:00Z') as h"
    assert selects.spark.sql(midnight).collect()[0]["h"] == 0
    with pytest.raises(ArithmeticException):
        selects.spark.sql("select 1 / 0 as d").collect()


def test_a_key_that_the_source_lacks_is_refused(spark: SparkSession):
    """E11: a key under the name that the select gives it is not the source's."""
    wrong = TableShape(columns=SHAPE.columns, key=["order_id"])
    with pytest.raises(ConfigInvalid, match="order_id of the key is not among those"):
        Selects(spark, {"t": "select id as order_id from changes"}).derived("t", wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Changes of many tables that only reading tells, as `(op, at, row)`."""

    batches: Sequence[tuple[str, Sequence[tuple[Op, int, Mapping[str, Any]]]]]
    each_key_once: bool = False
    tables: Sequence[str] = ()
    size_bytes: int = 0

    def changes(self, targets: Targets) -> Iterator[tuple[str, pa.Table]]:
        """The batches, in the columns of the tables' schemas."""
        for table, rows in self.batches:
            fields = arrow_schema(schema_from_json(targets.schema_json(table)))
            columns: dict[str, pa.Array] = {
                OP: pa.array([int(op) for op, _, _ in rows], pa.int8()),
                AT: pa.array([at for _, at, _ in rows], pa.int64()),
                SEQ: pa.array([0] * len(rows), pa.int64()),
            }
            for field in fields:
                values = [row.get(field.name) for *_, row in rows]
                known = any(value is not None for value in values)
                columns[field.name] = (
                    array(values, field.type) if known else pa.nulls(len(rows), field.type)
                )
            yield table, pa.table(columns)

    def with_stored(self, table: str, values: pa.Table | None) -> "Mixed":
        """Itself."""
        return self

    def learned(self) -> Any:
        """How many batches there were."""
        return len(self.batches)


class Fed:
    """A transformed sink fed by hand; each one is a new run of the same pipeline."""

    def __init__(
        self,
        spark: SparkSession,
        properties: Mapping[str, str],
        texts: Mapping[str, str],
        shapes: Mapping[str, TableShape],
        **options: Any,
    ):
        given = IcebergSinkOptions(catalog=properties, namespace=NAMESPACE, **options)
        catalog = open_catalog(properties, spark)
        inner = IcebergSink(catalog, given, PIPELINE, partial(stored_rows, spark))
        self.spark, self.selects = spark, Selects(spark, texts)
        self.sink = shaped(inner, self.selects)
        self.shapes = shapes
        found = self.sink.claim(list(shapes)).values()
        self.number = max((progress.epoch for progress in found), default=0)

    def schema(self, table: str) -> Schema:
        """The table's schema."""
        epoch = Epoch(number=self.number + 1, lower=Frontier(), upper=Frontier())
        return schema_from_json(self.sink.writer(epoch, [table]).inner.schema_json(table))

    def commit(self, splits: Sequence[Mixed], keyed: bool = False) -> int:
        """Write an epoch, twice, and commit it; returns how many rows were read."""
        self.number += 1
        bounds = [Frontier({"hand": (number,)}) for number in (self.number - 1, self.number)]
        epoch = Epoch(number=self.number, lower=bounds[0], upper=bounds[1])
        for table, known in self.shapes.items():
            assert self.sink.prepare(table, lambda known=known: known)
        writer = self.sink.writer(epoch, list(self.shapes))
        write = partial(
            write_epoch, self.spark, splits, writer, keyed, "by hand", selects=self.selects
        )
        outcome, again = write(), write()
        assert _digests(outcome.reports) == _digests(again.reports)
        assert outcome.learned == again.learned
        self.sink.commit(Written(epoch=epoch, reports=outcome.reports, writer=writer, labels={}))
        return outcome.rows


def _digests(reports: Sequence[Report]) -> dict[str, tuple[Any, ...]]:
    """What a file holds, by its path without the name of the attempt."""
    files = [FileClosed.of(report) for report in reports]
    return {
        file.path.replace(file.attempt, ""): (
            file.record_count,
            file.size_bytes,
            str(file.metrics),
        )
        for file in files
    }


Row = dict[str, Any]


class Log:
    """Random changes of a table, and its rows as they are at the end."""

    def __init__(self, generator: random.Random, keys: int):
        self.generator = generator
        self.keys = keys
        self.rows: dict[int, Row] = {}
        self._at = 0

    def changes(self, count: int) -> list[tuple[Op, int, Row]]:
        """The next changes."""
        found = []
        for _ in range(count):
            self._at += 1
            key = self.generator.randrange(self.keys)
            if key in self.rows and self.generator.random() < 0.3:
                del self.rows[key]
                found.append((Op.DELETE, self._at, {"id": key}))
                continue
            op = Op.UPSERT if key in self.rows or self.generator.random() < 0.5 else Op.INSERT
            self.rows[key] = self._row(key)
            found.append((op, self._at, self.rows[key]))
        return found

    def _row(self, key: int) -> Row:
        pick = self.generator.choice
        return {
            "id": key,
            "name": pick([None, "ada", "Änne", "x" * 30]),
            "region": pick(["eu", "us", None]),
            "amount": pick([None, Decimal("1.50"), Decimal("7.25"), Decimal("-3.00")]),
        }


def shares(changes: Sequence[Any], count: int, keyed: bool) -> list[list[Any]]:
    """The changes in several splits: by their keys, or just anyhow."""
    cut: list[list[Any]] = [[] for _ in range(count)]
    for number, change in enumerate(changes):
        cut[(change[2]["id"] if keyed else number) % count].append(change)
    return cut


@pytest.mark.parametrize("keyed", with_more([False], [True]))
def test_the_lake_holds_what_the_selects_make_of_the_rows_at_the_end(
    spark: SparkSession, embedded: dict[str, str], local: Lake, keyed: bool
):
    """E11, E3, Mend h1: random changes, rows that come and go by the condition, restarts, tables
    in turn."""
    texts = {
        "orders": "select id as order_id, upper(name) as name, amount * 2 as twice, "
        "sha2(region, 256) as region from changes where region = 'eu' and amount > -1",
        "every": "select * from changes where id % 3 <> 0",
    }
    shapes = dict.fromkeys(["orders", "every", "plain"], SHAPE)
    logs = {table: Log(random.Random(f"{table}{keyed}"), 40) for table in shapes}
    for _ in range(3):
        fed = Fed(spark, embedded, texts, shapes)
        for _ in range(2):
            parts = {table: shares(log.changes(120), 3, keyed) for table, log in logs.items()}
            splits = [
                Mixed(
                    batches=[(table, cut[n][m::2]) for m in (0, 1) for table, cut in parts.items()]
                )
                for n in range(3)
            ]
            assert fed.commit(splits, keyed) == 360
    assert by_id(local.rows("shop.plain")) == logs["plain"].rows
    kept = {key: row for key, row in logs["every"].rows.items() if key % 3}
    assert by_id(local.rows("shop.every")) == kept
    chosen = {
        key: {
            "order_id": key,
            "name": row["name"] and row["name"].upper(),
            "twice": row["amount"] * 2,
            "region": hashlib.sha256(b"eu").hexdigest(),
        }
        for key, row in logs["orders"].rows.items()
        if row["region"] == "eu" and row["amount"] is not None and row["amount"] > -1
    }
    assert len(chosen) > 3
    assert by_id(local.rows("shop.orders"), "order_id") == chosen


def by_id(rows: Sequence[Row], key: str = "id") -> dict[int, Row]:
    """Rows by their key, which must not be there twice."""
    assert len({row[key] for row in rows}) == len(rows)
    return {row[key]: row for row in rows}


def test_expressions_are_evaluated_for_rows_that_meet_the_condition_alone(
    spark: SparkSession, embedded: dict[str, str], local: Lake
):
    """E11: a delete has nulls, and a row that is left out may have anything."""
    text = (
        "select id, 10 / amount as part, cast(name as int) as number, "
        "if(name is null, raise_error('none'), name) as name "
        "from changes where if(region is null, raise_error('none'), region) = 'eu'"
    )
    fed = Fed(spark, embedded, {"t": text}, {"t": SHAPE})
    good = {"id": 1, "name": "5", "region": "eu", "amount": Decimal(4)}
    left_out = {"id": 2, "name": "x", "region": "us", "amount": Decimal(0)}
    fed.commit([Mixed(batches=[("t", [(Op.UPSERT, 1, good), (Op.UPSERT, 2, left_out)])])])
    fed.commit([Mixed(batches=[("t", [(Op.DELETE, 3, {"id": 2}), (Op.DELETE, 4, {"id": 3})])])])
    assert [(row["id"], row["number"]) for row in local.rows("shop.t")] == [(1, 5)]


def test_rows_that_are_only_ever_added_are_filtered(
    spark: SparkSession, embedded: dict[str, str], local: Lake
):
    """E11: without a key there is nothing to delete by; what is left out just does not come."""
    known = {"t": TableShape(columns=SHAPE.columns, key=())}
    fed = Fed(spark, embedded, {"t": "select name from changes where region = 'eu'"}, known)
    rows = [{"id": n, "name": f"n{n}", "region": "eu" if n % 2 else None} for n in range(6)]
    ops = [(Op.INSERT, n, row) for n, row in enumerate(rows)]
    fed.commit([Mixed(batches=[("t", ops[:3])]), Mixed(batches=[("t", ops[3:])])])
    assert sorted(row["name"] for row in local.rows("shop.t")) == ["n1", "n3", "n5"]


def test_an_expression_that_fails_says_so_without_the_value(
    spark: SparkSession, embedded: dict[str, str]
):
    """E11: the pipeline stops at the row, and no log or error shows what was in it."""
    text = "select id, cast(name as int) as number from changes"
    fed = Fed(spark, embedded, {"t": text}, {"t": SHAPE})
    with pytest.raises(DataRejected, match="fails on a row") as caught:
        fed.commit([Mixed(batches=[("t", [(Op.UPSERT, 1, {"id": 1, "name": "secret"})])])])
    assert "CAST_INVALID_INPUT" in str(caught.value)
    assert "secret" not in str(caught.value)


ZONED = dt.datetime(2024, 2, 29, 12, 30, 15, 123456, dt.UTC)
LOCAL = ZONED.replace(tzinfo=None)
VALUES: dict[str, tuple[Any, Any]] = {
    "flag": (BooleanType(), True),
    "small": (IntegerType(), -(2**31)),
    "big": (LongType(), 2**63 - 1),
    "single": (FloatType(), 0.1),
    "double": (DoubleType(), 1e300),
    "price": (DecimalType(38, 9), Decimal("12345678901234567890123456789.123456789")),
    "day": (DateType(), dt.date(1, 1, 1)),
    "clock": (TimeType(), dt.time(23, 59, 59, 999999)),
    "local": (TimestampType(), LOCAL),
    "zoned": (TimestamptzType(), ZONED),
    "text": (StringType(), "ünï\0code" * 1000),
    "code": (UUIDType(), uuid.UUID(int=2**127 + 5)),
    "raw": (BinaryType(), b"\x00\xff"),
    "fixed": (FixedType(3), b"abc"),
    "tags": (ListType(element_id=9, element_type=LongType(), element_required=False), [1, None]),
    "home": (
        StructType(
            NestedField(1, "city", StringType(), required=False),
            NestedField(2, "deep", ListType(3, DecimalType(5, 2), False), required=False),
        ),
        {"city": "rome", "deep": [Decimal("1.25")]},
    ),
    "prices": (MapType(4, StringType(), 5, DoubleType(), False), [("a", 0.5)]),
}
NANOS = {"ns": TimestampNanoType(), "nz": TimestamptzNanoType()}


def test_columns_that_pass_keep_their_type_and_every_value(
    spark: SparkSession, embedded: dict[str, str]
):
    """E11, I10: also those that Spark has no type for; the files themselves are read."""
    kinds = {"id": LongType(), **{name: kind for name, (kind, _) in VALUES.items()}, **NANOS}
    known = {"t": shape(["id"], **kinds)}
    fed = Fed(spark, embedded, {"t": "select * from changes"}, known, format_version=3)
    nanos = dict.fromkeys(NANOS, 1_700_000_000_123_456_789)
    row = {"id": 1, **{name: value for name, (_, value) in VALUES.items()}, **nanos}
    fed.commit([Mixed(batches=[("t", [(Op.INSERT, 1, row), (Op.INSERT, 2, {"id": 2})])])])
    schema = fed.schema("t")
    plain = {
        n: str(k) for n, k in kinds.items() if not isinstance(k, ListType | StructType | MapType)
    }
    assert {f.name: str(f.field_type) for f in schema.fields if f.name in plain} == plain
    data = next(Path(embedded["warehouse"]).rglob("data-*.parquet"))
    written = parquet.read_table(data).sort_by("id")
    for field in arrow_schema(schema):
        expected = array([row[field.name], 2 if field.name == "id" else None], field.type)
        found = written.column(field.name).combine_chunks()
        assert stored(found).to_pylist() == stored(expected).to_pylist(), field.name


def stored(column: pa.Array) -> pa.Array:
    """A column without an extension type."""
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def test_columns_that_spark_has_no_type_for_are_text_in_expressions(
    spark: SparkSession, embedded: dict[str, str], local: Lake
):
    """E11: uuid and time of day can be compared and worked on; what comes out is text."""
    known = {"t": shape(["id"], id=UUIDType(), clock=TimeType(), place=PLACE)}
    text = (
        "select id, left(id, 8) as head, concat(clock, '!') as clock, place.gate from changes "
        "where clock >= '08:00:00'"
    )
    fed = Fed(spark, embedded, {"t": text}, known)
    one, two = uuid.UUID(int=1), uuid.UUID(int=2)
    rows = [
        (Op.UPSERT, 1, {"id": one, "clock": dt.time(9, 0, 0, 5), "place": None}),
        (Op.UPSERT, 2, {"id": two, "clock": dt.time(7)}),
    ]
    fed.commit([Mixed(batches=[("t", rows)])])
    assert local.rows("shop.t") == [
        {"id": str(one), "head": "00000000", "clock": "09:00:00.000005!", "gate": None}
    ]
    assert [str(field.field_type) for field in fed.schema("t").fields] == [
        *("uuid", "string", "string", "string")
    ]


def feed(texts: Mapping[str, str], files: Path, catalog: Mapping[str, str], **sink: Any) -> Any:
    """The pipeline file of a changefeed's folder with selects."""
    file = document(files, catalog, sink=sink)
    file["feed"]["transform"] = texts
    return file


def test_a_changefeed_is_transformed_through_restarts_and_changes_of_its_columns(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
):
    """E11, I11: `*` takes a new column in, a list does not; types are remembered, not guessed."""
    texts = {
        "every": "select * from changes where qty is not null",
        "some": "select id, qty * 2 as twice from changes where qty <> 4",
    }
    log = Changelog.at(tmp_path / "feed")
    for table in texts:
        log.put(table, {"id": 1, "qty": 1.5}, {"id": 2, "qty": 2.5})
    log.resolve()
    run_once(spark, feed(texts, tmp_path / "feed", embedded))
    # A whole number alone would be taken for a long, and its double not for a double's.
    for table in texts:
        log.put(table, {"id": 1, "qty": 3}, {"id": 3, "qty": 4, "kind": "b"})
        log.remove(table, 2)
    log.resolve()
    run_once(spark, feed(texts, tmp_path / "feed", embedded))
    assert by_id(local.rows("shop.every")) == {
        1: {"id": 1, "qty": 3.0, "kind": None},
        3: {"id": 3, "qty": 4.0, "kind": "b"},
    }
    assert by_id(local.rows("shop.some")) == {1: {"id": 1, "twice": 6.0}}
    # Another select holds for the rows to come; `kind` becomes a column of the table.
    texts["some"] = "select id, qty * 2 as twice, kind from changes"
    log.put("some", {"id": 3, "qty": 5, "kind": "b"})
    log.resolve()
    run_once(spark, feed(texts, tmp_path / "feed", embedded))
    assert by_id(local.rows("shop.some"))[3] == {"id": 3, "twice": 10.0, "kind": "b"}


def test_a_table_that_was_there_before_takes_the_selects_columns_or_says_why_not(
    spark: SparkSession, embedded: dict[str, str], local: Lake, tmp_path: Path
):
    """E11, I8: other columns stay and are null; a column of another type is refused."""
    local.sql(f"CREATE NAMESPACE IF NOT EXISTS {local.name}.shop")
    table = local.table("shop.orders")
    local.sql(f"CREATE TABLE {table} (note STRING, name STRING, order_id BIGINT) USING iceberg")
    log = Changelog.at(tmp_path / "feed")
    log.put("orders", {"id": 1, "qty": 5})
    log.resolve()
    texts = {"orders": "select id as order_id, qty as name, qty from changes"}
    keyed = {"tables": {"orders": {"table": "orders", "equality_delete_by": ["order_id"]}}}
    run_once(spark, feed(texts, tmp_path / "feed", embedded, **keyed))
    assert local.rows("shop.orders") == [{"note": None, "name": "5", "order_id": 1, "qty": 5}]
    assert SOURCE_PROPERTY in str(local.sql(f"SHOW TBLPROPERTIES {table}"))
    log.put("orders", {"id": 1, "qty": 6})
    log.resolve()
    texts = {"orders": "select id as order_id, cast(qty as string) as qty from changes"}
    with pytest.raises(SchemaRejected, match="column qty of table"):
        run_once(spark, feed(texts, tmp_path / "feed", embedded, **keyed))
    texts = {"orders": "select id, qty from changes"}
    with pytest.raises(ConfigInvalid, match="gives no column order_id to delete by"):
        run_once(spark, feed(texts, tmp_path / "feed", embedded, **keyed))
