"""Types of PostgreSQL, and the Iceberg type that a column of each has.

What has an Iceberg type becomes it exactly, everything else a string in PostgreSQL's own text form:
`TYPE_RULES` is the whole list.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.kernels.decimals import DECIMAL_DIGITS_MAX


class Codec(StrEnum):
    """How the values of a scalar type are read; `OTHER` is known by its text form alone."""

    BOOL = "bool"
    INT2 = "int2"
    INT4 = "int4"
    INT8 = "int8"
    OID = "oid"
    FLOAT4 = "float4"
    FLOAT8 = "float8"
    NUMERIC = "numeric"
    TEXT = "text"
    JSONB = "jsonb"
    UUID = "uuid"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    BYTEA = "bytea"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class PgType:
    """A type of a PostgreSQL database; a domain is what it is made of, under its own name.

    `typmod` is the one that a domain declares, `element` and `delimiter` are those of an array,
    `output` is the function that makes the text form, ready to be called in SQL.
    """

    oid: int
    name: str
    kind: str = "base"
    codec: Codec = Codec.OTHER
    typmod: int = -1
    element: "PgType | None" = None
    delimiter: str = ","
    output: str = ""


# The oids of built-in types are the same in every server.
_CODECS: Mapping[int, Codec] = {
    16: Codec.BOOL,
    17: Codec.BYTEA,
    19: Codec.TEXT,  # name
    20: Codec.INT8,
    21: Codec.INT2,
    23: Codec.INT4,
    25: Codec.TEXT,
    26: Codec.OID,
    28: Codec.OID,  # xid
    114: Codec.TEXT,  # json
    700: Codec.FLOAT4,
    701: Codec.FLOAT8,
    1042: Codec.TEXT,  # bpchar
    1043: Codec.TEXT,  # varchar
    1082: Codec.DATE,
    1083: Codec.TIME,
    1114: Codec.TIMESTAMP,
    1184: Codec.TIMESTAMPTZ,
    1700: Codec.NUMERIC,
    2950: Codec.UUID,
    3802: Codec.JSONB,
}
_NATURAL: Mapping[Codec, IcebergType] = {
    Codec.BOOL: BooleanType(),
    Codec.INT2: IntegerType(),
    Codec.INT4: IntegerType(),
    Codec.INT8: LongType(),
    Codec.OID: LongType(),
    Codec.FLOAT4: FloatType(),
    Codec.FLOAT8: DoubleType(),
    Codec.UUID: UUIDType(),
    Codec.DATE: DateType(),
    Codec.TIME: TimeType(),
    Codec.TIMESTAMP: TimestampType(),
    Codec.TIMESTAMPTZ: TimestamptzType(),
    Codec.BYTEA: BinaryType(),
}

TYPE_RULES: Sequence[tuple[str, str, str]] = (
    ("boolean", "boolean", ""),
    ("smallint, integer", "int", ""),
    ("bigint", "long", ""),
    ("oid, xid", "long", ""),
    ("real", "float", ""),
    ("double precision", "double", ""),
    (
        "numeric(p,s) with p <= 38 and 0 <= s <= p",
        "decimal(p,s)",
        "NaN is refused: declare the column as string if it can occur.",
    ),
    (
        "any other numeric",
        "string",
        "All digits as PostgreSQL prints them; also NaN, Infinity and -Infinity.",
    ),
    ("text, varchar, char, name, citext", "string", "char keeps its padding."),
    ("json, jsonb", "string", ""),
    ("enum", "string", "The label."),
    ("uuid", "uuid", ""),
    ("bytea", "binary", ""),
    (
        "date",
        "date",
        "infinity and -infinity become the greatest and the least date; years before 1 stay.",
    ),
    ("time", "time", "24:00:00 is refused: declare the column as string if it can occur."),
    (
        "timestamp",
        "timestamp",
        "infinity and -infinity become the greatest and the least timestamp; finite ones after "
        "the year 294246 are refused.",
    ),
    ("timestamptz", "timestamptz", "As timestamp."),
    (
        "array",
        "list of its element's type",
        "Values of several dimensions are refused: declare the column as string. Lower bounds "
        "other than 1 are not kept.",
    ),
    ("domain", "that of its underlying type", "Also a domain over a domain or an array."),
    (
        "timetz, interval, inet, cidr, macaddr, money, bit, varbit, xml, ranges, multiranges, "
        "geometry, tsvector, tsquery, pg_lsn, hstore, composite and every other type",
        "string",
        "PostgreSQL's own text form.",
    ),
)

TYPES_QUERY = """
select t.oid::int8, t.typname::text, t.typtype::text, t.typbasetype::int8, t.typtypmod,
       coalesce(e.oid, 0)::int8, coalesce(e.typdelim, ',')::text,
       pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(p.proname)
from pg_catalog.pg_type t
join pg_catalog.pg_proc p on p.oid = t.typoutput
join pg_catalog.pg_namespace n on n.oid = p.pronamespace
left join pg_catalog.pg_type e on e.typarray = t.oid
"""
_KINDS = {"e": "enum", "c": "composite", "r": "range", "m": "multirange", "p": "pseudo"}


def kinds_by_oid(rows: Sequence[Sequence[Any]]) -> dict[int, PgType]:
    """The types of a database by oid, from the rows of `TYPES_QUERY`."""
    listed = {int(row[0]): row for row in rows}
    built: dict[int, PgType] = {}

    def resolve(oid: int) -> PgType:
        if oid not in built:
            built[oid] = build(oid)
        return built[oid]

    def build(oid: int) -> PgType:
        _, name, letter, underlying, typmod, element, delimiter, output = listed[oid]
        if letter == "d":
            below = resolve(int(underlying))
            chosen = below.typmod if typmod == -1 else typmod
            return replace(below, oid=oid, name=name, typmod=chosen)
        kind = "array" if element else _KINDS.get(letter, "base")
        citext = kind == "base" and name == "citext"
        textual = Codec.TEXT if kind == "enum" or citext else Codec.OTHER
        return PgType(
            oid=oid,
            name=name,
            kind=kind,
            codec=_CODECS.get(oid, textual),
            element=resolve(int(element)) if element else None,
            delimiter=delimiter,
            output=output,
        )

    return {oid: resolve(oid) for oid in listed}


def iceberg_type(kind: PgType, typmod: int, ids: Iterator[int]) -> IcebergType:
    """The Iceberg type of a column, by `TYPE_RULES`; `ids` gives those of list elements."""
    chosen = kind.typmod if typmod == -1 else typmod
    if kind.element is not None:
        element_id = next(ids)
        element = iceberg_type(kind.element, chosen, ids)
        return ListType(element_id=element_id, element_type=element, element_required=False)
    if kind.codec == Codec.NUMERIC and chosen != -1:
        precision = (chosen - 4) >> 16 & 0xFFFF
        # Eleven bits with a sign: since PostgreSQL 15 a scale can be negative.
        scale = ((chosen - 4 & 0x7FF) ^ 0x400) - 0x400
        if precision <= DECIMAL_DIGITS_MAX and 0 <= scale <= precision:
            return DecimalType(precision, scale)
    return _NATURAL.get(kind.codec, StringType())


def in_binary(kind: PgType, to: IcebergType) -> bool:
    """Whether `decode` reads the type's binary form into this type.

    What only PostgreSQL can write as a string is asked for as text.
    """
    if kind.element is not None:
        return isinstance(to, ListType) and in_binary(kind.element, to.element_type)
    if isinstance(to, StringType):
        return kind.codec in (Codec.TEXT, Codec.JSONB, Codec.NUMERIC)
    return kind.codec != Codec.OTHER


def copy_expression(column: str, kind: PgType, to: IcebergType) -> str:
    """What to select in COPY ... (FORMAT binary) so that `decode` can read the column.

    The text form comes from the type's output function, as replication sends it: a cast to text
    writes some types in another way (inet with its mask, char without its padding).
    """
    quoted = '"' + column.replace('"', '""') + '"'
    return quoted if in_binary(kind, to) else f"pg_catalog.textin({kind.output}({quoted}))"
