"""Values of a real PostgreSQL come out as PostgreSQL itself says they are, in every form it sends.

Each type's edge values and random ones are written to a server. It then tells each value in an
exact spelling (bits of floats, microseconds of timestamps, digits), and what was decoded from COPY
and from replication, in text and in binary form, is spelled the same way and compared.
"""

import itertools
import json
import os
import random
import signal
import socket
import string
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pg8000.native
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    IcebergType,
    ListType,
    LongType,
    NestedField,
    StringType,
    TimestamptzType,
)

from icestream.errors import SchemaRejected, SourceUnavailable
from icestream.samples import postgres
from icestream.samples.postgres import EmbeddedPostgres
from icestream.schema import arrow_schema
from icestream.sources.postgres.values.decode import decode
from icestream.sources.postgres.values.kinds import (
    TYPES_QUERY,
    PgType,
    copy_expression,
    iceberg_type,
    in_binary,
    kinds_by_oid,
)
from icestream.sources.postgres.values.places import SentAs
from icestream.sources.postgres.values.tuples import Tuples, copy_tuples, tuples_at
from tests.servers import wait_until

RANDOM_VALUES = 150
READY, COPY_DATA, FAILED = b"Z", b"d", b"E"


class Database:
    """A session that speaks SQL, and hands out what the server sends."""

    def __init__(self, dsn: str) -> None:
        at = urlparse(dsn)
        self._socket = socket.create_connection((at.hostname, at.port))
        self._sql = pg8000.native.Connection(
            user=at.username, password=at.password, database="postgres", sock=self._socket
        )
        for setting in ("timezone to 'UTC'", "bytea_output to 'hex'", "datestyle to 'ISO'"):
            self.run(f"set {setting}")
        self._numbers = itertools.count()

    def run(self, sql: str, **values: Any) -> list[list[Any]]:
        return self._sql.run(sql, **values) or []

    def copied(self, query: str) -> bytes:
        """The messages with which the server answers COPY, from the first row on."""
        body = f"copy ({query}) to stdout (format binary)".encode() + b"\0"
        self._socket.sendall(b"Q" + struct.pack("!i", len(body) + 4) + body)
        stream, messages = self._socket.makefile("rb"), []
        while True:
            head = stream.read(5)
            rest = stream.read(struct.unpack("!i", head[1:])[0] - 4)
            assert head[:1] != FAILED, rest
            messages.append(head + rest)
            if head[:1] == READY:
                break
        assert messages.pop(0)[:1] == b"H"
        return b"".join(messages)

    def replicated(self, binary: bool) -> list[bytes]:
        """The pgoutput messages since the slot was made."""
        found = self.run(
            "select data from pg_logical_slot_peek_binary_changes('s', null, null, "
            "'proto_version', '1', 'publication_names', 'p', 'binary', :binary)",
            binary=str(binary).lower(),
        )
        return [bytes(row[0]) for row in found]

    def new_table(self, declared: str, values: Sequence[str | None]) -> str:
        """A table with these values in column v, written after a fresh slot was made."""
        name = f"t{next(self._numbers)}"
        self.run(f"create table {name} (id int primary key, v {declared})")
        self.run("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        self.run("select pg_create_logical_replication_slot('s', 'pgoutput')")
        self.run(
            f"insert into {name} select n, v::{declared} "
            "from unnest(cast(:given as text[])) with ordinality as u(v, n) order by n",
            given=list(values),
        )
        return name

    def type_of(self, table: str) -> tuple[PgType, int]:
        """The type and modifier of column v."""
        [[oid, typmod]] = self.run(
            "select atttypid::int8, atttypmod from pg_attribute "
            "where attrelid = cast(:name as regclass) and attname = 'v'",
            name=table,
        )
        return kinds_by_oid(self.run(TYPES_QUERY))[oid], typmod


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A server with a publication of everything and some types of its own."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres")) as server:
        session = Database(server.dsn)
        session.run("create publication p for all tables")
        for statement in (
            "create extension citext",
            "create extension hstore",
            "create type mood as enum ('sad', 'so so', 'très \"content\"')",
            "create type pair as (a int, b text)",
            "create domain cents as numeric(12,2)",
            "create domain price as cents check (value >= 0)",
            "create domain tags as text[]",
        ):
            session.run(statement)
        yield session


def natural(database: Database, table: str) -> IcebergType:
    kind, typmod = database.type_of(table)
    return iceberg_type(kind, typmod, itertools.count(100))


def arrow_of(to: IcebergType) -> pa.DataType:
    return arrow_schema(Schema(NestedField(1, "v", to))).field("v").type


def from_copy(database: Database, table: str, to: IcebergType) -> pa.Array:
    """Column v as COPY sends it."""
    kind, _ = database.type_of(table)
    expression = copy_expression("v", kind, to)
    raw = np.frombuffer(
        database.copied(f"select id, {expression} from {table} order by id"), dtype=np.uint8
    )
    texts = () if in_binary(kind, to) else (1,)
    tuples, used = copy_tuples(raw, 2, texts)
    assert raw[used : used + 1].tobytes() == b"c"
    return decode(tuples, 1, kind, to, arrow_of(to), "v")


def streamed(database: Database, binary: bool) -> Tuples:
    """The rows of all inserts since the slot was made."""
    messages = database.replicated(binary)
    ends = np.cumsum([0, *map(len, messages)])
    # A letter, the relation and the letter N come before the tuple.
    inserts = [end + 6 for end, message in zip(ends, messages, strict=False) if message[:1] == b"I"]
    content = np.frombuffer(b"".join(messages), dtype=np.uint8)
    return tuples_at(content, np.array(inserts, dtype=np.int64), 2)


def from_stream(database: Database, table: str, to: IcebergType, binary: bool) -> pa.Array:
    """Column v as replication sends it."""
    kind, _ = database.type_of(table)
    return decode(streamed(database, binary), 1, kind, to, arrow_of(to), "v")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A type, how PostgreSQL spells its values exactly, and how the same is done to Arrow's."""

    declared: str
    sql: str
    spell: Callable[[pa.Array], list[str | None]]
    edges: Sequence[str]
    more: Callable[[random.Random], str] | None = None

    def values(self) -> list[str | None]:
        source = random.Random(self.declared)
        drawn = [self.more(source) for _ in range(RANDOM_VALUES)] if self.more else []
        return [None, *self.edges, *drawn, None]


def plain(values: pa.Array) -> list[str | None]:
    return [None if each is None else str(each) for each in values.to_pylist()]


def lowered(values: pa.Array) -> list[str | None]:
    return [None if each is None else each.lower() for each in plain(values)]


def whole(values: pa.Array) -> list[str | None]:
    """Dates, times and timestamps as the number that they are stored as."""
    wide = pa.int32() if values.type == pa.date32() else pa.int64()
    return plain(values.view(wide))


def fixed_point(values: pa.Array) -> list[str | None]:
    return [None if each is None else format(each, "f") for each in values.to_pylist()]


def hexadecimal(values: pa.Array) -> list[str | None]:
    return [None if each is None else bytes(each).hex() for each in values.to_pylist()]


def bits(code: str) -> Callable[[pa.Array], list[str | None]]:
    def spell(values: pa.Array) -> list[str | None]:
        wanted = {"d": pa.float64(), "f": pa.float32()}[code]
        assert values.type == wanted
        numbers = values.to_pylist()
        return [None if each is None else struct.pack(f">{code}", each).hex() for each in numbers]

    return spell


def integers(size: int) -> Callable[[random.Random], str]:
    def draw(source: random.Random) -> str:
        return str(source.randint(-(2**size), 2**size - 1) >> source.randrange(size))

    return draw


def a_float(code: str) -> Callable[[random.Random], str]:
    def draw(source: random.Random) -> str:
        size = struct.calcsize(code)
        value = float("nan")
        while value != value or value in (float("inf"), float("-inf")):
            [value] = struct.unpack(code, source.randbytes(size))
        return repr(value)

    return draw


def a_number(digits: int, scale: int) -> Callable[[random.Random], str]:
    def draw(source: random.Random) -> str:
        kept = source.randint(1, digits)
        number = str(source.randrange(10**kept)).rjust(scale + 1, "0")
        text = f"{number[:-scale]}.{number[-scale:]}" if scale else number
        return source.choice("-+") + text

    return draw


def a_text(source: random.Random) -> str:
    alphabet = string.ascii_letters + " \\\"{},\n\t;é€😀'%" + "NUL"
    return "".join(source.choice(alphabet) for _ in range(source.randrange(40)))


def a_day(source: random.Random) -> str:
    year = source.choice([source.randint(1, 9999), source.randint(1900, 2100), 20_000])
    era = source.choice(["", "", " BC"]) if year <= 4000 else ""
    return f"{year:04d}-{source.randint(1, 12):02d}-{source.randint(1, 28):02d}{era}"


def a_clock(source: random.Random) -> str:
    micros = source.choice(["", f".{source.randrange(10**6):06d}", ".5"])
    hour, minute, second = source.randrange(24), source.randrange(60), source.randrange(60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{micros}"


def a_moment(source: random.Random) -> str:
    day, _, era = a_day(source).partition(" ")
    return f"{day} {a_clock(source)} {era}"


def a_uuid(source: random.Random) -> str:
    return source.randbytes(16).hex()


def some_bytes(source: random.Random) -> str:
    return "\\x" + source.randbytes(source.randrange(30)).hex()


DAYS = (
    "case v when 'infinity' then 2147483647 when '-infinity' then -2147483648 "
    "else v - date '1970-01-01' end::text"
)
MICROS = (
    "case v when 'infinity' then 9223372036854775807 when '-infinity' then -9223372036854775808 "
    "else trunc(extract(epoch from v) * 1000000) end::text"
)
MOMENTS = [
    *("infinity", "-infinity", "epoch", "2000-01-01 00:00:00", "1999-12-31 23:59:59.999999"),
    *("4714-11-24 00:00:00 BC", "0001-01-01 00:00:00 BC", "0001-12-31 23:59:59.5 BC"),
    *("294246-12-31 23:59:59.999999", "10000-01-01", "2024-02-29 12:00:00.000001"),
    *("0001-01-01", "1970-01-01 00:00:00.1", "1900-02-28 01:02:03"),
]
BIG = "123456789012345678901234567890"

SCALARS = {
    kind.declared: kind
    for kind in (
        Kind(declared="bool", sql="v::text", spell=lowered, edges=["t", "f"]),
        Kind(
            declared="int2",
            sql="v::text",
            spell=plain,
            edges=["0", "-32768", "32767"],
            more=integers(15),
        ),
        Kind(
            declared="int4",
            sql="v::text",
            spell=plain,
            edges=["0", "-2147483648", "2147483647"],
            more=integers(31),
        ),
        Kind(
            declared="int8",
            sql="v::text",
            spell=plain,
            edges=["0", "-9223372036854775808", "9223372036854775807"],
            more=integers(63),
        ),
        Kind(declared="oid", sql="v::text", spell=plain, edges=["0", "2147483648", "4294967295"]),
        Kind(declared="xid", sql="v::text", spell=plain, edges=["0", "2147483648", "4294967295"]),
        Kind(
            declared="float4",
            sql="encode(float4send(v), 'hex')",
            spell=bits("f"),
            edges=["0", "-0", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "0.1"],
            more=a_float("f"),
        ),
        Kind(
            declared="float8",
            sql="encode(float8send(v), 'hex')",
            spell=bits("d"),
            edges=["0", "-0", "NaN", "Infinity", "-Infinity", "5e-324", "1e23", "0.1"],
            more=a_float("d"),
        ),
        Kind(
            declared="numeric(12,2)",
            sql="v::text",
            spell=fixed_point,
            edges=["0", "-0.01", "9999999999.99", "-9999999999.99", "100", "10000", "0.5"],
            more=a_number(12, 2),
        ),
        Kind(
            declared="numeric(38,0)",
            sql="v::text",
            spell=fixed_point,
            edges=["0", "9" * 38, "-" + "9" * 38, "1" + "0" * 37],
            more=a_number(38, 0),
        ),
        Kind(
            declared="numeric(38,37)",
            sql="v::text",
            spell=fixed_point,
            edges=["0", "9." + "9" * 37, "-0." + "0" * 36 + "1", "1"],
            more=a_number(38, 37),
        ),
        Kind(
            declared="numeric(38,38)",
            sql="v::text",
            spell=fixed_point,
            edges=["0", "0." + "9" * 38, "-0." + "0" * 37 + "1"],
            more=a_number(38, 38),
        ),
        Kind(
            declared="numeric(5,5)",
            sql="v::text",
            spell=fixed_point,
            edges=["0", "0.99999", "-0.00001", "0.1"],
            more=a_number(5, 5),
        ),
        Kind(
            declared="numeric",
            sql="v::text",
            spell=plain,
            edges=[
                *("0", "0.000", "NaN", "Infinity", "-Infinity", "1e1000", "-1e-1000", "1.50"),
                *(f"{BIG * 9}.{BIG * 9}", f"-0.{'0' * 99}1", "10000", "9999.9999", "0.00010000"),
            ],
            more=a_number(60, 17),
        ),
        Kind(
            declared="numeric(50,10)",
            sql="v::text",
            spell=plain,
            edges=["0", "NaN", "9" * 40, "-0.0000000001"],
            more=a_number(50, 10),
        ),
        Kind(
            declared="numeric(3,-2)",
            sql="v::text",
            spell=plain,
            edges=["0", "99900", "-100", "12345"],
        ),
        Kind(
            declared="numeric(2,5)",
            sql="v::text",
            spell=plain,
            edges=["0", "0.00099", "-0.00001"],
        ),
        Kind(
            declared="text",
            sql="v",
            spell=plain,
            edges=["", "NULL", "a" * 100_000, "ß€😀", "\\N"],
            more=a_text,
        ),
        Kind(declared="varchar(60)", sql="v::text", spell=plain, edges=["", "x"], more=a_text),
        Kind(
            declared="char(60)", sql="textin(bpcharout(v))", spell=plain, edges=["x"], more=a_text
        ),
        Kind(declared='"char"', sql="textin(charout(v))", spell=plain, edges=["", "x", "\\200"]),
        Kind(declared="name", sql="v::text", spell=plain, edges=["pg_class", ""]),
        Kind(declared="citext", sql="v::text", spell=plain, edges=["Ab", "aB", ""], more=a_text),
        Kind(declared="mood", sql="v::text", spell=plain, edges=["sad", 'très "content"']),
        Kind(declared="json", sql="v::text", spell=plain, edges=['{"a" :  [1,null]}', "null", "1"]),
        Kind(declared="jsonb", sql="v::text", spell=plain, edges=['{"b":1.50,"a":"é"}', "[]"]),
        Kind(declared="uuid", sql="v::text", spell=plain, edges=["0" * 32], more=a_uuid),
        Kind(
            declared="bytea",
            sql="encode(v, 'hex')",
            spell=hexadecimal,
            edges=["", "\\x00ff", "\\x" + "00" * 9000],
            more=some_bytes,
        ),
        Kind(
            declared="date",
            sql=DAYS,
            spell=whole,
            edges=[
                *("infinity", "-infinity", "epoch", "4714-11-24 BC", "5874897-12-31"),
                *("0001-01-01", "0001-12-31 BC", "2000-02-29", "10000-01-01", "1969-12-31"),
            ],
            more=a_day,
        ),
        Kind(
            declared="time",
            sql="trunc(extract(epoch from v) * 1000000)::text",
            spell=whole,
            edges=["00:00:00", "23:59:59.999999", "12:30:00.5"],
            more=a_clock,
        ),
        Kind(
            declared="timestamp",
            sql=MICROS,
            spell=whole,
            edges=MOMENTS,
            more=a_moment,
        ),
        Kind(
            declared="timestamptz",
            sql=MICROS,
            spell=whole,
            edges=[*MOMENTS, "2020-05-05 05:05:05+05:45", "1800-01-01 00:00:00-11:30"],
            more=a_moment,
        ),
        Kind(declared="price", sql="v::text", spell=fixed_point, edges=["0", "12.5", "9999.99"]),
    )
}

# Types without one of Iceberg's: the function that writes their text, and some values.
SHOWN_AS_TEXT = {
    "timetz": ("timetz_out", ["24:00:00", "12:00:00.5+05:45", "00:00:00-15:59"]),
    "interval": ("interval_out", ["1 year 2 mons -3 days 04:05:06.7", "-1 us", "0", "infinity"]),
    "inet": ("inet_out", ["192.168.1.1", "10.0.0.0/8", "::1", "fe80::/10"]),
    "cidr": ("cidr_out", ["10.0.0.0/8", "192.168.1.1"]),
    "macaddr": ("macaddr_out", ["08:00:2b:01:02:03"]),
    "money": ("cash_out", ["1234.56", "-0.01"]),
    "bit(5)": ("bit_out", ["10101"]),
    "varbit": ("varbit_out", ["", "1", "1010101010"]),
    "int4range": ("range_out", ["empty", "[1,5)", "(,)", "[7,)"]),
    "tsrange": ("range_out", ["[2020-01-01,infinity)", '("2020-01-01 00:00:00",]']),
    "nummultirange": ("multirange_out", ["{}", "{[1.5,2],(3,)}"]),
    "point": ("point_out", ["(1.5,-2)", "(NaN,Infinity)"]),
    "box": ("box_out", ["(1,2),(3,4)"]),
    "polygon": ("poly_out", ["((0,0),(1,1),(2,0))"]),
    "tsvector": ("tsvectorout", ["'a':1A 'b''c':2,3", ""]),
    "tsquery": ("tsqueryout", ["'a' & !'b'"]),
    "pg_lsn": ("pg_lsn_out", ["0/0", "FF/1234ABCD"]),
    "xid8": ("xid8out", ["18446744073709551615"]),
    "hstore": ("hstore_out", ['"a"=>"1", "b"=>NULL']),
    "pair": ("record_out", ["(1,x)", '(,"a ""b"", c")', "(,)"]),
    "int2vector": ("int2vectorout", ["1 2 3"]),
    "regclass": ("regclassout", ["pg_class"]),
}


def expected(database: Database, table: str, sql: str) -> list[str | None]:
    return [row[0] for row in database.run(f"select {sql} from {table} order by id")]


def forms(database: Database, table: str, to: IcebergType) -> dict[str, pa.Array]:
    """Column v in all forms that are decoded."""
    kind, _ = database.type_of(table)
    found = {
        "copy": from_copy(database, table, to),
        "text stream": from_stream(database, table, to, binary=False),
    }
    if in_binary(kind, to):
        found["binary stream"] = from_stream(database, table, to, binary=True)
    return found


@pytest.mark.parametrize("name", sorted(SCALARS))
def test_every_value_is_what_postgresql_says(database, name):
    """P8: in COPY and in both forms of replication."""
    kind = SCALARS[name]
    table = database.new_table(name, kind.values())
    wanted = expected(database, table, kind.sql)
    assert len(wanted) > 2 and wanted[0] is None
    for form, values in forms(database, table, natural(database, table)).items():
        values.validate(full=True)
        assert kind.spell(values) == wanted, form


@pytest.mark.parametrize("name", sorted(SHOWN_AS_TEXT))
def test_what_has_no_iceberg_type_is_postgresqls_own_text(database, name):
    """P8: the same text from COPY and from replication, also where a cast to text differs."""
    function, given = SHOWN_AS_TEXT[name]
    table = database.new_table(name, [None, *given])
    wanted = expected(database, table, f"textin({function}(v))")
    to = natural(database, table)
    assert to == StringType()
    found = forms(database, table, to)
    assert set(found) == {"copy", "text stream"}
    for form, values in found.items():
        assert plain(values) == wanted, form


def element_lists(kind: Kind) -> list[str | None]:
    """Array literals of some lengths, with nulls between."""
    source = random.Random(f"{kind.declared}[]")
    pool = [value for value in kind.values() if value is None or len(value) < 500]
    found: list[str | None] = [None, "{}", "{NULL}"]
    for _ in range(80):
        chosen = [source.choice(pool) for _ in range(source.randrange(6))]
        found.append("{" + ",".join(map(quoted, chosen)) + "}")
    return found


def quoted(value: str | None) -> str:
    if value is None:
        return "NULL"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def spelled_lists(values: pa.Array, spell: Callable[[pa.Array], list[str | None]]) -> list[Any]:
    found = []
    for place in range(len(values)):
        scalar = values[place]
        found.append(spell(scalar.values) if scalar.is_valid else None)
    return found


@pytest.mark.parametrize("name", sorted(set(SCALARS) - {"price"}))
def test_arrays_hold_the_same_elements(database, name):
    """P8: nulls, empty arrays and whatever needs quotes included."""
    kind = SCALARS[name]
    table = database.new_table(f"{name}[]", element_lists(kind))
    lists = (
        f"case when v is null then null else coalesce((select json_agg({kind.sql} order by n) "
        "from unnest(t.v) with ordinality as u(v, n)), '[]') end::text"
    )
    wanted = [
        None if row[0] is None else json.loads(row[0])
        for row in database.run(f"select {lists} from {table} t order by id")
    ]
    to = natural(database, table)
    assert isinstance(to, ListType) and sum(map(bool, wanted)) > 10
    for form, values in forms(database, table, to).items():
        values.validate(full=True)
        assert spelled_lists(values, kind.spell) == wanted, form


@pytest.mark.parametrize(
    ("name", "literal", "wanted"),
    [
        ("inet[]", "{192.168.1.1,NULL,10.0.0.0/8}", ["192.168.1.1", None, "10.0.0.0/8"]),
        ("box[]", "{(1,2),(3,4);(5,6),(7,8)}", ["(3,4),(1,2)", "(7,8),(5,6)"]),
        ("int4range[]", '{"[1,5)",empty}', ["[1,5)", "empty"]),
        ("pair[]", '{"(1,x)",NULL}', ["(1,x)", None]),
        ("tags", '{a,"b c",NULL,"NULL"}', ["a", "b c", None, "NULL"]),
        ("cents[]", "{1.50,NULL}", ["1.50", None]),
        ("text[]", '[5:7]={a,"{b}","c\\\\"}', ["a", "{b}", "c\\"]),
    ],
)
def test_arrays_of_other_types_are_lists(database, name, literal, wanted):
    """P8: other delimiters, domains on either side, lower bounds."""
    table = database.new_table(name, [literal])
    for form, values in forms(database, table, natural(database, table)).items():
        assert [plain(each.values) for each in values] == [wanted], form


def test_types_of_domains_and_arrays_are_those_of_what_they_are_made_of(database):
    """P8: a domain over a domain over numeric(12,2) is a decimal, alone and in arrays."""
    for declared, wanted in (
        ("price", DecimalType(12, 2)),
        ("price[]", ListType(100, DecimalType(12, 2), element_required=False)),
        ("numeric(7,3)[]", ListType(100, DecimalType(7, 3), element_required=False)),
        ("tags", ListType(100, StringType(), element_required=False)),
        ("numeric(39,2)", StringType()),
    ):
        assert natural(database, database.new_table(declared, [])) == wanted


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A value that the natural Iceberg type cannot hold, and what the error must tell."""

    declared: str
    value: str
    hint: str
    to: IcebergType | None = field(default=None)


@pytest.mark.parametrize(
    "case",
    [
        Refused(declared="numeric(10,2)", value="NaN", hint="NaN"),
        Refused(declared="time", value="24:00:00", hint="24:00:00"),
        Refused(declared="timestamp", value="294276-12-31 23:59:59", hint="294246"),
        Refused(declared="timestamptz", value="294247-01-10 04:00:54.775807", hint="294246"),
        Refused(declared="int4[]", value="{{1,2},{3,4}}", hint="dimensions"),
        Refused(declared="text[]", value="{{a},{b}}", hint="dimensions"),
        Refused(declared="numeric(10,2)", value="1.25", hint="string", to=DecimalType(10, 1)),
        Refused(declared="int8", value=str(2**53 + 1), hint="columns", to=DoubleType()),
    ],
    ids=lambda case: f"{case.declared} {case.value}",
)
def test_what_does_not_fit_is_refused_and_told_as_string(database, case):
    """P8: never rounded, cut or made null; and a string column takes what was refused."""
    table = database.new_table(case.declared, [case.value])
    to = case.to or natural(database, table)
    kind, _ = database.type_of(table)
    readers = [
        lambda: from_copy(database, table, to),
        lambda: from_stream(database, table, to, binary=False),
        lambda: from_stream(database, table, to, binary=True),
    ]
    for read in readers:
        with pytest.raises(SchemaRejected) as refused:
            read()
        assert case.hint in (refused.value.hint or "")
        assert case.value not in str(refused.value).replace(case.hint, "")
    wanted = expected(database, table, f"textin({kind.output}(v))")
    for form, values in forms(database, table, StringType()).items():
        assert plain(values) == wanted, form


@pytest.mark.parametrize("name", sorted(SCALARS))
def test_a_string_column_holds_any_type_as_postgresql_prints_it(database, name):
    """P8: what COPY and replication put there is the same text."""
    table = database.new_table(name, SCALARS[name].values())
    kind, _ = database.type_of(table)
    wanted = expected(database, table, f"textin({kind.output}(v))")
    for form, values in forms(database, table, StringType()).items():
        assert plain(values) == wanted, form


@pytest.mark.parametrize(
    ("declared", "to", "value", "wanted"),
    [
        ("int2", LongType(), "-5", "-5"),
        ("int4", LongType(), "2147483647", "2147483647"),
        ("int4", DecimalType(12, 2), "7", "7.00"),
        ("float4", DoubleType(), "0.1", "0.10000000149011612"),
        ("numeric(10,2)", DecimalType(20, 2), "12345678.90", "12345678.90"),
        ("numeric(10,2)", DecimalType(20, 4), "-0.01", "-0.0100"),
        ("numeric", DecimalType(38, 10), "1.5", "1.5000000000"),
        ("numeric(18,0)", LongType(), "123456789012345678", "123456789012345678"),
        ("text", LongType(), "42", "42"),
    ],
)
def test_a_wider_column_holds_the_same_value(database, declared, to, value, wanted):
    """P8, I11: what the table was widened to, or declared as."""
    table = database.new_table(declared, [value, None])
    for form, values in forms(database, table, to).items():
        assert plain(values) == [wanted, None], form


@pytest.mark.parametrize("to", [DateType(), TimestamptzType(), LongType()])
def test_a_column_of_another_kind_is_refused(database, to):
    """P8: a timestamp without zone is not silently one with a zone."""
    table = database.new_table("timestamp", ["2020-01-01"])
    with pytest.raises(SchemaRejected):
        from_copy(database, table, to)


def test_a_binary_form_that_is_not_decoded_is_refused(database):
    """P8: a column that was added while the stream runs in binary form is never misread."""
    table = database.new_table("inet", ["10.0.0.1"])
    with pytest.raises(SchemaRejected, match="binary form"):
        from_stream(database, table, StringType(), binary=True)


def test_large_values_that_an_update_leaves_out_are_told_apart_from_null(database):
    """P7: they come as not sent, and decode as null."""
    table = database.new_table("text", [None, "".join(map(str, range(9000)))])
    database.run(f"alter table {table} alter v set storage external")
    database.run(f"alter table {table} add w int")
    database.run(f"update {table} set w = 1")
    messages = [each for each in database.replicated(binary=False) if each[:1] == b"U"]
    content = np.frombuffer(b"".join(messages), dtype=np.uint8)
    places = np.cumsum([0, len(messages[0])]) + 6
    tuples = tuples_at(content, places, 3)
    assert list(tuples.forms[1]) == [SentAs.NULL, SentAs.UNSENT]
    assert list(tuples.forms[2]) == [SentAs.TEXT, SentAs.TEXT]
    kind, _ = database.type_of(table)
    assert decode(tuples, 1, kind, StringType(), pa.large_string(), "v").null_count == 2


def test_a_copy_cut_anywhere_is_read_in_pieces(database):
    """P2: what is not whole yet is left for the next piece."""
    table = database.new_table("text", ["a", None, "bb", ""])
    kind, _ = database.type_of(table)
    raw = np.frombuffer(database.copied(f"select id, v from {table} order by id"), dtype=np.uint8)
    for cut in range(len(raw)):
        first, used = copy_tuples(raw[:cut], 2)
        assert used <= cut
        second, _ = copy_tuples(raw[used:], 2)
        found = [
            value
            for tuples in (first, second)
            for value in decode(tuples, 1, kind, StringType(), pa.large_string(), "v").to_pylist()
        ]
        assert found == ["a", None, "bb", ""]


def test_an_empty_table_has_no_rows(database):
    """P1: only the header and the trailer come."""
    table = database.new_table("int4", [])
    raw = np.frombuffer(database.copied(f"select id, v from {table}"), dtype=np.uint8)
    tuples, used = copy_tuples(raw, 2)
    assert len(tuples) == 0 and raw[used] == ord("c")


def test_the_server_keeps_data_and_address_over_a_crash(tmp_path):
    """U1: also for another object on the same folder."""
    server = EmbeddedPostgres(tmp_path / "pg", {"max_connections": "11"})
    server.start()
    try:
        session = Database(server.dsn)
        assert session.run("show wal_level") == [["logical"]]
        assert session.run("show max_connections") == [["11"]]
        session.run("create table kept as select 7 as v")
        server.stop("immediate")
        again = EmbeddedPostgres(tmp_path / "pg")
        assert again.dsn == server.dsn
        with again:
            assert Database(again.dsn).run("select v from kept") == [[7]]
    finally:
        server.stop()


def test_the_server_asks_for_a_password(tmp_path):
    """U1: a private server lets nobody else in."""
    with EmbeddedPostgres(tmp_path / "pg") as server:
        with pytest.raises(pg8000.native.DatabaseError):
            Database(server.dsn.replace(server.password, "wrong"))


def test_the_server_that_cannot_start_shows_its_log(tmp_path):
    """U1: the reason is in the error, not in a file that one has to find."""
    server = EmbeddedPostgres(tmp_path / "pg", {"no_such_setting": "1"})
    with pytest.raises(SourceUnavailable) as failed:
        server.start()
    assert "no_such_setting" in (failed.value.detail or "")


def test_the_server_dies_with_the_process_that_started_it(tmp_path):
    """U1: even when that one is killed."""
    dying = (
        "import os, pathlib, sys; from icestream.samples.postgres import EmbeddedPostgres; "
        "server = EmbeddedPostgres(pathlib.Path(sys.argv[1])); server.start(); "
        "print(server.port, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", dying, str(tmp_path / "pg")], stdout=subprocess.PIPE, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL
    port = int(ended.stdout)

    def gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until(gone, 30.0, "the end of the server")


# For other users the programs are where they are installed, and nothing is copied.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs programs as another user")
def test_programs_out_of_reach_are_copied(tmp_path, monkeypatch):
    """U1: an environment under root's own folder works as well."""
    # Where this environment lies is not for a test to choose.
    monkeypatch.setattr(postgres, "_reachable", lambda path: False)
    with EmbeddedPostgres(tmp_path / "pg") as server:
        [[programs]] = Database(server.dsn).run(
            "select setting from pg_config where name = 'BINDIR'"
        )
    assert "icestream-postgres-" in programs
