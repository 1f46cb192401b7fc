"""Values of PostgreSQL as Arrow columns, from either form in which the server sends them.

`copy_tuples` walks the answer to COPY ... (FORMAT binary), `tuples_at` the tuples of pgoutput
messages. Both only note where each value lies; `decode` then makes one column at a time. What
has an Iceberg type becomes it exactly, everything else a string in PostgreSQL's own text form:
`TYPE_RULES` is the whole list.

Promise: a value comes out as it is or is refused, `SchemaRejected` when the column's type cannot
hold it, `DataRejected` when its bytes are not what they claim to be. No read leaves the buffer,
whatever is in it. The buffer must not change while tuples point into it.

The text form is that of a session with DateStyle ISO, IntervalStyle postgres, TimeZone UTC,
bytea_output hex, extra_float_digits 1 or more, and client_encoding UTF8.

Kernels are compiled by numba at their first call and cached on disk, so only the first process
that ever calls them waits.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any, NoReturn, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba.extending import intrinsic
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import DataRejected, SchemaRejected
from icestream.schema import cast_text

Function = TypeVar("Function", bound=Callable[..., Any])
Array = TypeVar("Array", bound=npt.NDArray[Any])
Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
# What the kernels see of one column: starts, lengths and forms.
Places = tuple[Positions, Lengths, Bytes]

DECIMAL_DIGITS_MAX = 38
# Days from Iceberg's epoch, 1970-01-01, to PostgreSQL's, 2000-01-01.
EPOCH_DAYS = 10_957
DAY_MICROS = 86_400_000_000
# PostgreSQL keeps these for infinity, and so does the table.
DAYS_MIN, DAYS_MAX = -(2**31), 2**31 - 1
MICROS_MIN, MICROS_MAX = -(2**63), 2**63 - 1
UUID_BYTES, UUID_TEXT_BYTES = 16, 36
WORD_BYTES = 8


class Form(IntEnum):
    """How a value was sent; `UNSENT` is a large value that an update did not touch."""

    NULL = 0
    TEXT = 1
    BINARY = 2
    UNSENT = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuples:
    """Rows as places in one buffer: per column and row where the value is and in which form.

    Made by `copy_tuples` and `tuples_at`, which have checked that no place leads out of it.
    """

    content: Bytes
    starts: Positions
    lengths: Lengths
    forms: Bytes

    def __len__(self) -> int:
        return int(self.starts.shape[1])

    def take(self, indices: npt.NDArray[Any]) -> "Tuples":
        """The rows at these indices, in this order."""
        return Tuples(
            content=self.content,
            starts=np.take(self.starts, indices, axis=1),
            lengths=np.take(self.lengths, indices, axis=1),
            forms=np.take(self.forms, indices, axis=1),
        )


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
_WHOLE = (IntegerType, LongType, FloatType, DoubleType, DecimalType)
# What a codec's values may become besides a string. Text is cast to any type, or refused.
_FITTING: Mapping[Codec, tuple[type[IcebergType], ...]] = {
    Codec.BOOL: (BooleanType,),
    Codec.INT2: _WHOLE,
    Codec.INT4: _WHOLE,
    Codec.INT8: _WHOLE,
    Codec.OID: _WHOLE,
    Codec.FLOAT4: (FloatType, DoubleType),
    Codec.FLOAT8: (FloatType, DoubleType),
    Codec.NUMERIC: (DecimalType, IntegerType, LongType),
    Codec.UUID: (UUIDType,),
    Codec.DATE: (DateType,),
    Codec.TIME: (TimeType,),
    Codec.TIMESTAMP: (TimestampType, TimestampNanoType),
    Codec.TIMESTAMPTZ: (TimestamptzType, TimestamptzNanoType),
    Codec.BYTEA: (BinaryType, FixedType),
}
_TEXTUAL = (Codec.TEXT, Codec.JSONB, Codec.OTHER)
_INTEGER_BYTES = {Codec.INT2: 2, Codec.INT4: 4, Codec.OID: 4, Codec.INT8: 8}
_FLOATS = {Codec.FLOAT4: (4, np.float32), Codec.FLOAT8: (8, np.float64)}

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
    ("date", "date", "infinity and -infinity become the greatest and the least date."),
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


# The name under which it was asked for.


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


def copy_tuples(raw: Bytes, columns: int, texts: Collection[int] = ()) -> tuple[Tuples, int]:
    """The rows of the whole CopyData messages at the front, and how many bytes they take.

    Ends before the first message that is incomplete or another one. `texts` are the numbers of
    the columns that `copy_expression` selected by their text form.
    """
    content = _readable(raw)
    messages, end = _count_messages(content)
    if messages < 0:
        raise _damaged_copy()
    places = _new_places(columns, messages)
    form_of = np.full(columns, Form.BINARY, dtype=np.uint8)
    form_of[list(texts)] = Form.TEXT
    rows = _walk_copy(content, end, form_of, places)
    if rows < 0:
        raise _damaged_copy()
    starts, lengths, forms = places
    found = Tuples(
        content=content,
        starts=starts[:, :rows],
        lengths=lengths[:, :rows],
        forms=forms[:, :rows],
    )
    return found, int(end)


def tuples_at(content: Bytes, places: Positions, columns: int) -> Tuples:
    """The pgoutput tuples at these places, all of them null where the place is -1.

    A tuple with fewer columns leaves the rest null.
    """
    readable = _readable(content)
    starts, lengths, forms = found = _new_places(columns, len(places))
    wanted = np.ascontiguousarray(places, dtype=np.int64)
    if not _walk_tuples(readable, wanted, found):
        raise DataRejected(
            "a replication message does not hold the tuple that it should",
            detail=f"It is one of {len(places)} messages with {columns} columns.",
        )
    return Tuples(content=readable, starts=starts, lengths=lengths, forms=forms)


def _readable(content: Bytes) -> Bytes:
    # Numba compiles once more for writable arrays, so all buffers look read-only to it.
    view = np.ascontiguousarray(content).view()
    view.flags.writeable = False
    return view


def _new_places(columns: int, rows: int) -> Places:
    return (
        np.empty((columns, rows), dtype=np.int64),
        np.empty((columns, rows), dtype=np.int32),
        np.empty((columns, rows), dtype=np.uint8),
    )


def _damaged_copy() -> DataRejected:
    return DataRejected(
        "the answer to COPY is not in binary format",
        detail="A message does not hold exactly one row with the columns that were asked for.",
    )


def decode(
    tuples: Tuples,
    column: int,
    kind: PgType,
    to: IcebergType,
    arrow_type: pa.DataType,
    name: str,
) -> pa.Array:
    """One column as the table has it; what was not sent is null.

    Raises `SchemaRejected` when a value does not fit, `DataRejected` when it is damaged.
    """
    cells = _Cells(
        content=tuples.content,
        starts=tuples.starts[column],
        lengths=tuples.lengths[column],
        forms=tuples.forms[column],
    )
    return _decoded(cells, kind, _Target(name=name, to=to, arrow_type=arrow_type))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cells:
    """One column of tuples, or all elements of a column of arrays."""

    content: Bytes
    starts: Positions
    lengths: Lengths
    forms: Bytes

    def __len__(self) -> int:
        return len(self.forms)

    @property
    def places(self) -> Places:
        return self.starts, self.lengths, self.forms

    def bytes_of(self, form: Form) -> int:
        return int(np.sum(self.lengths, where=self.forms == form, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The table's column that values are made for, and the words for what does not fit it."""

    name: str
    to: IcebergType
    arrow_type: pa.DataType

    def judge(self, cells: _Cells, kind: PgType, faults: tuple[int, int]) -> None:
        """Raise unless no value is damaged and all fit; `faults` counts both kinds."""
        damaged, unfit = faults
        if damaged:
            self.distrust(f"{damaged} of {len(cells)} values are damaged.", kind)
        if unfit:
            self.refuse(f"{unfit} of {len(cells)} values do not fit.", kind)

    def distrust(self, detail: str, kind: PgType) -> NoReturn:
        """Say that values are not what they claim to be."""
        raise DataRejected(
            f"a value of column {self.name} is not what PostgreSQL sends as {kind.name}",
            detail=detail,
        )

    def refuse(self, detail: str, kind: PgType) -> NoReturn:
        """Say that values do not fit, and what to do about it."""
        hint = (
            f"Declare the column's type with `columns: {{{self.name}: ...}}` before the table is "
            "created, or change the table's column to a type that holds the source's values."
        )
        if special := _SPECIAL.get("array" if kind.element is not None else kind.codec):
            hint = f"{special} {hint}"
        raise SchemaRejected(
            f"a value of column {self.name} does not fit its type {self.to}",
            detail=detail,
            hint=hint,
        )


# Values that PostgreSQL's type has and Iceberg's has not. A string holds them all.
_SPECIAL = {
    Codec.NUMERIC: "NaN, Infinity and digits beyond the type's fit a string.",
    Codec.TIME: "24:00:00 fits a string.",
    Codec.TIMESTAMP: "Timestamps after the year 294246 fit a string.",
    Codec.TIMESTAMPTZ: "Timestamps after the year 294246 fit a string.",
    "array": "Arrays of several dimensions fit a string.",
}


def _decoded(cells: _Cells, kind: PgType, target: _Target) -> pa.Array:
    present = np.bincount(cells.forms, minlength=len(Form))
    if not present[Form.TEXT]:
        return _of_form(cells, kind, target, Form.BINARY)
    if not present[Form.BINARY]:
        return _of_form(cells, kind, target, Form.TEXT)
    both = [_of_form(cells, kind, target, form) for form in (Form.BINARY, Form.TEXT)]
    rows = np.arange(len(cells))
    chosen = np.where(cells.forms == Form.TEXT, rows + len(cells), rows)
    return pa.concat_arrays(both).take(pa.array(chosen))


def _of_form(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    """The values that came in this form; all others are null."""
    to, arrow_type = target.to, target.arrow_type
    if form == Form.BINARY and not in_binary(kind, to) and np.any(cells.forms == form):
        raise SchemaRejected(
            f"column {target.name} of type {kind.name} came in binary form",
            detail=f"For a column of type {to} it is read in text form only.",
            hint="Start the pipeline again: it then asks for the text form.",
        )
    if isinstance(to, StringType):
        return _cast(_strings(cells, kind, target, form), arrow_type)
    if kind.element is not None and isinstance(to, ListType):
        return _lists(cells, kind, target, form)
    if kind.element is None and kind.codec in _TEXTUAL:
        texts = _strings(cells, kind, target, form)
        return cast_text(texts.cast(pa.string()), target.name, to, arrow_type)
    if kind.element is not None or not isinstance(to, _FITTING[kind.codec]):
        raise SchemaRejected(
            f"column {target.name} cannot be brought from {kind.name} to {to}",
            hint="Change the table's column to a type that holds the source's values.",
        )
    return _SCALARS[kind.codec](cells, kind, target, form)


def _cast(values: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    return values if values.type == arrow_type else pc.cast(values, arrow_type)


def _filled(values: npt.NDArray[Any], arrow_type: pa.DataType, present: Bytes) -> pa.Array:
    """An Arrow array over these values, null where they are not present."""
    validity, absent = _validity(present)
    return pa.Array.from_buffers(arrow_type, len(present), [validity, pa.py_buffer(values)], absent)


def _validity(present: npt.NDArray[Any]) -> tuple[pa.Buffer | None, int]:
    absent = len(present) - int(np.count_nonzero(present))
    return (pa.py_buffer(np.packbits(present, bitorder="little")) if absent else None), absent


def _strings(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    """Large strings of PostgreSQL's text form, checked to be UTF-8."""
    if form == Form.BINARY and kind.codec == Codec.NUMERIC:
        sizes = np.empty(len(cells), dtype=np.int64)
        faults = _size_numerics(cells.content, cells.places, form, sizes)
        target.judge(cells, kind, faults)
        offsets, buffer = _text_buffers(len(cells), int(sizes.sum()))
        size = _show_numerics(cells.content, cells.places, form, offsets, buffer)
    else:
        prefix = int(form == Form.BINARY and kind.codec == Codec.JSONB)
        offsets, buffer = _text_buffers(len(cells), cells.bytes_of(form))
        size, damaged = _copy_values(cells.content, cells.places, (form, prefix), offsets, buffer)
        target.judge(cells, kind, (damaged, 0))
    texts = _variable(pa.large_string(), (offsets, buffer[:size]), cells.forms == form)
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataRejected(
            f"a text of column {target.name} is not UTF-8",
            hint="A database with the encoding SQL_ASCII can hold such bytes: correct them there.",
        ) from error
    return texts


def _text_buffers(rows: int, size: int) -> tuple[Positions, Bytes]:
    """Room for offsets and texts. Arrow's pool hands out pages that are already mapped."""
    offsets = pa.allocate_buffer((rows + 1) * np.dtype(np.int64).itemsize)
    content = pa.allocate_buffer(size + WORD_BYTES)
    return np.frombuffer(offsets, dtype=np.int64), np.frombuffer(content, dtype=np.uint8)


def _variable(
    arrow_type: pa.DataType, buffers: tuple[Positions, Bytes], present: npt.NDArray[Any]
) -> pa.Array:
    validity, absent = _validity(present)
    offsets, content = buffers
    return pa.Array.from_buffers(
        arrow_type,
        len(present),
        [validity, pa.py_buffer(offsets), pa.py_buffer(content)],
        absent,
    )


def _lists(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    assert kind.element is not None and isinstance(target.to, ListType)
    counts = np.empty(len(cells), dtype=np.int64)
    delimiter = ord(kind.delimiter)
    if form == Form.BINARY:
        faults = _count_elements(cells.content, cells.places, form, counts)
    else:
        faults = _count_written(cells.content, cells.places, (form, delimiter), counts)
    target.judge(cells, kind, faults)
    offsets = np.zeros(len(cells) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    places = _new_places(1, int(offsets[-1]))
    found = (places[0][0], places[1][0], places[2][0])
    if form == Form.BINARY:
        content = cells.content
        damaged = _find_elements(content, cells.places, form, found)
        target.judge(cells, kind, (damaged, 0))
    else:
        unescaped = np.empty(cells.bytes_of(form) + WORD_BYTES, dtype=np.uint8)
        _unescape_elements(cells.content, cells.places, (form, delimiter), found, unescaped)
        content = _readable(unescaped)
    starts, lengths, forms = found
    elements = _Cells(content=content, starts=starts, lengths=lengths, forms=forms)
    arrow_type = target.arrow_type
    inner = replace(target, to=target.to.element_type, arrow_type=arrow_type.value_type)
    values = _decoded(elements, kind.element, inner)
    array = pa.LargeListArray if pa.types.is_large_list(arrow_type) else pa.ListArray
    if array is pa.ListArray:
        offsets = offsets.astype(np.int32)
    return array.from_arrays(
        pa.array(offsets), values, type=arrow_type, mask=pa.array(cells.forms != form)
    )


def _integers(cells: _Cells, kind: PgType, target: _Target, form: Form) -> npt.NDArray[Any]:
    """Whole numbers of any width as they were sent."""
    values = np.empty(len(cells), dtype=np.int64)
    if form == Form.BINARY:
        width = _INTEGER_BYTES[kind.codec]
        damaged = _read_fixed(cells.content, cells.places, (form, width), values)
        if kind.codec == Codec.OID:
            values &= 0xFFFF_FFFF
    else:
        damaged = _parse_integers(cells.content, cells.places, form, values)
    target.judge(cells, kind, (damaged, 0))
    return values


def _whole(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    values = _integers(cells, kind, target, form)
    present = cells.forms == form
    if isinstance(target.to, IntegerType):
        narrow = values.astype(np.int32)
        target.judge(cells, kind, (0, int(np.count_nonzero(narrow != values))))
        return _filled(narrow, target.arrow_type, present)
    natural = _filled(values, pa.int64(), present)
    try:
        if isinstance(target.to, DecimalType):
            natural = pc.cast(natural, pa.decimal128(19, 0))
        return _cast(natural, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values does not fit.", kind)


def _floats(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    width, numeric = _FLOATS[kind.codec]
    arrow_type = pa.from_numpy_dtype(numeric)
    if form == Form.BINARY:
        bits = np.empty(len(cells), dtype=np.int64 if width == 8 else np.int32)
        damaged = _read_fixed(cells.content, cells.places, (form, width), bits)
        target.judge(cells, kind, (damaged, 0))
        natural = _filled(bits.view(numeric), arrow_type, cells.forms == form)
    else:
        texts = _strings(cells, kind, target, form)
        try:
            natural = pc.cast(texts, arrow_type)
        except pa.ArrowInvalid:
            target.distrust(f"At least one of {len(cells)} values is damaged.", kind)
    if natural.type == target.arrow_type:
        return natural
    fitted = pc.cast(natural, target.arrow_type)
    same = pc.equal(pc.cast(fitted, arrow_type), natural)
    kept = pc.or_(same, pc.is_nan(natural))
    if not pc.all(kept, min_count=0).as_py():
        target.judge(cells, kind, (0, len(kept) - pc.sum(kept).as_py() - kept.null_count))
    return fitted


def _decimals(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    decimal = target.to if isinstance(target.to, DecimalType) else DecimalType(19, 0)
    words = np.empty((len(cells), 2), dtype=np.uint64)
    kernel = _read_numerics if form == Form.BINARY else _parse_numerics
    faults = kernel(
        cells.content, cells.places, (form, decimal.scale), _LIMITS[decimal.precision], words
    )
    target.judge(cells, kind, faults)
    arrow_type = pa.decimal128(decimal.precision, decimal.scale)
    values = _filled(words, arrow_type, cells.forms == form)
    try:
        return _cast(values, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values does not fit.", kind)


def _bools(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    values = np.empty(len(cells), dtype=np.uint8)
    damaged = _read_bools(cells.content, cells.places, form, values)
    target.judge(cells, kind, (damaged, 0))
    bits = np.packbits(values, bitorder="little")
    return _filled(bits, target.arrow_type, cells.forms == form)


def _uuids(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    values = np.empty((len(cells), UUID_BYTES), dtype=np.uint8)
    kernel = _read_uuids if form == Form.BINARY else _parse_uuids
    target.judge(cells, kind, (kernel(cells.content, cells.places, form, values), 0))
    storage = _filled(values, pa.binary(UUID_BYTES), cells.forms == form)
    if isinstance(target.arrow_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(target.arrow_type, storage)
    return storage


def _binaries(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    offsets, buffer = _text_buffers(len(cells), cells.bytes_of(form))
    if form == Form.BINARY:
        size, damaged = _copy_values(cells.content, cells.places, (form, 0), offsets, buffer)
    else:
        size, damaged = _parse_hex(cells.content, cells.places, form, offsets, buffer)
    target.judge(cells, kind, (damaged, 0))
    values = _variable(pa.large_binary(), (offsets, buffer[:size]), cells.forms == form)
    try:
        return _cast(values, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values has another length.", kind)


def _dates(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    days = np.empty(len(cells), dtype=np.int32)
    if form == Form.BINARY:
        damaged = _read_fixed(cells.content, cells.places, (form, 4), days)
        finite = (days != DAYS_MIN) & (days != DAYS_MAX)
        # No date comes near the end of the range, so this cannot overflow.
        np.add(days, EPOCH_DAYS, out=days, where=finite)
    else:
        damaged = _parse_dates(cells.content, cells.places, form, days)
    target.judge(cells, kind, (damaged, 0))
    return _filled(days, target.arrow_type, cells.forms == form)


def _times(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    micros = np.empty(len(cells), dtype=np.int64)
    if form == Form.BINARY:
        damaged = _read_fixed(cells.content, cells.places, (form, 8), micros)
    else:
        damaged = _parse_times(cells.content, cells.places, form, micros)
    unfit = int(np.count_nonzero((micros < 0) | (micros >= DAY_MICROS)))
    target.judge(cells, kind, (damaged, unfit))
    return _filled(micros, target.arrow_type, cells.forms == form)


def _timestamps(cells: _Cells, kind: PgType, target: _Target, form: Form) -> pa.Array:
    micros = np.empty(len(cells), dtype=np.int64)
    if form == Form.BINARY:
        damaged = _read_fixed(cells.content, cells.places, (form, 8), micros)
        unfit = _shift_timestamps(micros)
    else:
        damaged, unfit = _parse_timestamps(cells.content, cells.places, form, micros)
    target.judge(cells, kind, (damaged, unfit))
    zone = "UTC" if kind.codec == Codec.TIMESTAMPTZ else None
    values = _filled(micros, pa.timestamp("us", tz=zone), cells.forms == form)
    try:
        return _cast(values, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values does not fit.", kind)


_SCALARS: Mapping[Codec, Callable[[_Cells, PgType, _Target, Form], pa.Array]] = {
    Codec.BOOL: _bools,
    Codec.INT2: _whole,
    Codec.INT4: _whole,
    Codec.INT8: _whole,
    Codec.OID: _whole,
    Codec.FLOAT4: _floats,
    Codec.FLOAT8: _floats,
    Codec.NUMERIC: _decimals,
    Codec.UUID: _uuids,
    Codec.DATE: _dates,
    Codec.TIME: _times,
    Codec.TIMESTAMP: _timestamps,
    Codec.TIMESTAMPTZ: _timestamps,
    Codec.BYTEA: _binaries,
}


# From here on: kernels. They answer with counts of damaged and of unfit values, because numba's
# exceptions carry no facts, and write a zero where a value is not of the wanted form.
_NULL, _TEXT, _BINARY, _UNSENT = (int(form) for form in Form)
_COPY_DATA = ord("d")
_SIGNATURE = np.frombuffer(b"PGCOPY\n\xff\r\n\0", dtype=np.uint8)
_SIGNATURE_BYTES, _HEADER_BYTES = 11, 19
_MARK_NULL, _MARK_UNSENT, _MARK_TEXT, _MARK_BINARY = (ord(mark) for mark in "nutb")
_ZERO, _NINE, _MINUS, _PLUS, _POINT, _COLON, _SPACE = (ord(mark) for mark in "09-+.: ")
_OPEN, _CLOSE, _BRACKET, _EQUALS, _QUOTE, _BACKSLASH = (ord(mark) for mark in '{}[="\\')
_LOWER_I, _LOWER_T, _LOWER_F, _LOWER_X, _UPPER_B = (ord(mark) for mark in "itfxB")
_UPPER_I, _UPPER_N = (ord(mark) for mark in "IN")
_HEX = np.full(256, -1, dtype=np.int16)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)

# A numeric is a header of four 16-bit numbers and digits to the base 10,000.
_NUMERIC_HEADER_BYTES = 8
_GROUP = 4
_NEGATIVE, _NAN, _INFINITE, _MINUS_INFINITE = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL_TEXTS = np.frombuffer(b"NaN      Infinity -Infinity", dtype=np.uint8).reshape(3, 9)
_SPECIAL_SIZES = np.array([3, 8, 9])
_DISPLAY_SCALE_MASK = 0x3FFF

# Arithmetic on unsigned words: numba makes a float of an unsigned and a signed number.
_HALF, _MASK = np.uint64(32), np.uint64(0xFFFF_FFFF)
_ONE, _NONE = np.uint64(1), np.uint64(0)
_TEN = np.uint64(10)
_POWERS = np.array([1, 10, 100, 1000, 10_000], dtype=np.uint64)
# Ten times this, and a digit, still fit one word.
_ROOMY = np.uint64(10**18)
# A higher word would overflow when it is multiplied by that power of ten.
_HIGHS_MAX = np.uint64(2**63 - 1) // _POWERS
# For each precision the least number that has too many digits, high and low word.
_LIMITS = np.array(
    [divmod(10**digits, 2**64) for digits in range(DECIMAL_DIGITS_MAX + 1)], dtype=np.uint64
)
_LAST_DAY, _LAST_MICROS = divmod(MICROS_MAX, DAY_MICROS)
# The least number of 64 bits without its last digit, which is 8.
_NEAR_MIN = -(2**63 // 10)
_MICROS_SHIFT = EPOCH_DAYS * DAY_MICROS
_DAY_MICROS = DAY_MICROS
# Any year that needs more digits is no date of PostgreSQL.
_YEAR_DIGITS_MAX = 7


def _kernel(function: Function) -> Function:
    """Compile a function that Python calls, once per machine, to run without Python's lock."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


def _part(function: Function) -> Function:
    """Compile a function that only kernels call, into each of them."""
    return cast(Function, numba.njit(forceinline=True)(function))


def _typed_pointer(_: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    # Numba annotates most of what it exports, but not this.
    pointer = numba.types.CPointer(array.dtype)  # type: ignore[no-untyped-call]
    return pointer(array), generate


def _typed_load(number: Any, swapped: bool) -> Any:
    """A load of this type from any position, in the order of the network if `swapped`."""
    whole = numba.types.int64 if swapped else number

    def typed(_: Any, data: Any, position: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.gep(arguments[0], [arguments[1]])
            narrow = context.get_value_type(number)
            value = builder.load(builder.bitcast(place, narrow.as_pointer()), align=1)
            if swapped:
                value = builder.sext(builder.bswap(value), context.get_value_type(whole))
            return value

        return whole(data, position), generate

    return typed


def _typed_store(_: Any, data: Any, position: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        builder.store(arguments[2], builder.bitcast(place, arguments[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return numba.types.void(data, position, word), generate


# Kernels hand the bare pointer of an array to their parts. Arrays would be reference counted at
# every call and searched for negative positions at every byte.
_pointer = cast(Callable[[Array], Array], intrinsic(_typed_pointer))
# Signed numbers from any position on, which indexing cannot express.
_int16 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int16, True)))
_int32 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int32, True)))
_int64 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int64, True)))
_load_word = cast(Callable[[Bytes, int], Any], intrinsic(_typed_load(numba.types.uint64, False)))
_store_word = cast(Callable[[Bytes, int, Any], None], intrinsic(_typed_store))


@_kernel
def _count_messages(raw: Bytes) -> tuple[int, int]:
    """How many whole CopyData messages come first and where they end; -1 if one is damaged."""
    data = _pointer(raw)
    position = count = 0
    while position + 5 <= raw.size and data[position] == _COPY_DATA:
        size = _int32(data, position + 1)
        if size < 4:
            return -1, position
        if size > raw.size - position - 1:
            break
        position += 1 + size
        count += 1
    return count, position


@_part
def _skip_header(data: Bytes, at: int, stop: int) -> int:
    """The position after the header of COPY, if it is here; no row has as many columns."""
    if stop - at < _HEADER_BYTES:
        return at
    for place in range(_SIGNATURE_BYTES):
        if data[at + place] != _SIGNATURE[place]:
            return at
    extension = _int32(data, at + _HEADER_BYTES - 4)
    # Beyond the message if the length is damaged, which the caller finds out.
    return at + _HEADER_BYTES + (extension if extension >= 0 else stop)


@_kernel
def _walk_copy(raw: Bytes, end: int, form_of: Bytes, places: Places) -> int:
    """Note the values of all rows up to `end`; returns the number of rows, -1 if one is damaged."""
    starts, lengths, forms = places
    data, columns = _pointer(raw), form_of.size
    position = row = 0
    while position < end:
        stop = position + 1 + _int32(data, position + 1)
        at = _skip_header(data, position + 5, stop)
        position = stop
        if at == stop:
            continue
        if at + 2 > stop:
            return -1
        count = _int16(data, at)
        at += 2
        if count == -1 and at == stop:
            continue
        if count != columns:
            return -1
        for column in range(columns):
            if at + 4 > stop:
                return -1
            size = _int32(data, at)
            at += 4
            if size < -1 or size > stop - at:
                return -1
            starts[column, row] = at
            lengths[column, row] = max(size, 0)
            forms[column, row] = _NULL if size < 0 else form_of[column]
            at += max(size, 0)
        if at != stop:
            return -1
        row += 1
    return row


@_kernel
def _walk_tuples(content: Bytes, wanted: Positions, places: Places) -> bool:
    """Note the values of the tuples at these places; returns whether none is damaged."""
    starts, lengths, forms = places
    data, end, columns = _pointer(content), content.size, starts.shape[0]
    for row in range(wanted.size):
        at, count = wanted[row], 0
        if at != -1:
            if at < 0 or at + 2 > end:
                return False
            count = _int16(data, at)
            at += 2
            if count < 0 or count > columns:
                return False
        for column in range(count):
            if at >= end:
                return False
            mark = data[at]
            at += 1
            size = 0
            form = _UNSENT if mark == _MARK_UNSENT else _NULL
            if mark == _MARK_TEXT or mark == _MARK_BINARY:
                form = _TEXT if mark == _MARK_TEXT else _BINARY
                if at + 4 > end:
                    return False
                size = _int32(data, at)
                at += 4
                if size < 0 or size > end - at:
                    return False
            elif mark != _MARK_NULL and mark != _MARK_UNSENT:
                return False
            starts[column, row] = at
            lengths[column, row] = size
            forms[column, row] = form
            at += size
        for column in range(count, columns):
            starts[column, row] = 0
            lengths[column, row] = 0
            forms[column, row] = _NULL
    return True


@_kernel
def _read_fixed(
    content: Bytes, places: Places, wanted: tuple[int, int], values: npt.NDArray[Any]
) -> int:
    """Signed numbers of `wanted[1]` bytes, 2, 4 or 8; returns how many have another size."""
    starts, lengths, forms = places
    form, width = wanted
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        if forms[row] != form:
            values[row] = 0
        elif lengths[row] != width:
            damaged += 1
        elif width == 8:
            values[row] = _int64(data, starts[row])
        elif width == 4:
            values[row] = _int32(data, starts[row])
        else:
            values[row] = _int16(data, starts[row])
    return damaged


@_kernel
def _shift_timestamps(micros: Positions) -> int:
    """From PostgreSQL's epoch to Iceberg's, in place; returns how many leave the range."""
    unfit = 0
    for row in range(micros.size):
        value = micros[row]
        if value != MICROS_MIN and value != MICROS_MAX:
            if value >= MICROS_MAX - _MICROS_SHIFT:
                unfit += 1
            else:
                micros[row] = value + _MICROS_SHIFT
    return unfit


@_kernel
def _read_bools(content: Bytes, places: Places, form: int, values: Bytes) -> int:
    """One byte, or a word that begins with t or f; returns how many are neither."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] == form:
            mark = data[starts[row]] if lengths[row] == 1 else 255
            yes, no = (_LOWER_T, _LOWER_F) if form == _TEXT else (1, 0)
            values[row] = mark == yes
            damaged += mark != yes and mark != no
    return damaged


@_kernel
def _read_uuids(content: Bytes, places: Places, form: int, values: Bytes) -> int:
    """Sixteen bytes each; returns how many have another size."""
    starts, lengths, forms = places
    data, target = _pointer(content), _pointer(values)
    damaged = 0
    for row in range(forms.size):
        if forms[row] == form and lengths[row] == UUID_BYTES:
            for word in range(0, UUID_BYTES, WORD_BYTES):
                _store_word(target, row * UUID_BYTES + word, _load_word(data, starts[row] + word))
        else:
            damaged += forms[row] == form
            for word in range(0, UUID_BYTES, WORD_BYTES):
                _store_word(target, row * UUID_BYTES + word, _NONE)
    return damaged


@_kernel
def _parse_uuids(content: Bytes, places: Places, form: int, values: Bytes) -> int:
    """Thirty-two digits with dashes between; returns how many are not."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        start, fine = starts[row], forms[row] == form and lengths[row] == UUID_TEXT_BYTES
        damaged += forms[row] == form and not fine
        at = 0
        for place in range(UUID_BYTES):
            values[row, place] = 0
            if not fine:
                continue
            if at == 8 or at == 13 or at == 18 or at == 23:
                at += 1
            both = _HEX[data[start + at]] * 16 + _HEX[data[start + at + 1]]
            if _HEX[data[start + at]] < 0 or _HEX[data[start + at + 1]] < 0:
                damaged += 1
                fine = False
            else:
                values[row, place] = both
            at += 2
    return damaged


@_part
def _copy(data: Bytes, span: tuple[int, int, int], target: Bytes, size: int) -> int:
    """Write these bytes as they are; returns the target's new size.

    Whole words, because most texts are one or two. What the last one holds too much is
    overwritten by the next text, and the target has a word to spare for the last text. Words are
    read up to the position `span[2]`.
    """
    position, end, last = span
    while position < end and position <= last:
        _store_word(target, size, _load_word(data, position))
        position += WORD_BYTES
        size += WORD_BYTES
    while position < end:
        target[size] = data[position]
        position += 1
        size += 1
    return size - (position - end)


@_kernel
def _copy_values(
    content: Bytes, places: Places, wanted: tuple[int, int], offsets: Positions, texts: Bytes
) -> tuple[int, int]:
    """Write values one after the other; returns their size and how many are damaged.

    `wanted[1]` is the size of a prefix that is left out: the version that jsonb has, which is 1.
    """
    starts, lengths, forms = places
    form, prefix = wanted
    data, target = _pointer(content), _pointer(texts)
    last = content.size - WORD_BYTES
    size = damaged = 0
    for row in range(forms.size):
        offsets[row] = size
        if forms[row] == form:
            start, end = starts[row], starts[row] + lengths[row]
            if prefix and (start == end or data[start] != 1):
                damaged += 1
            else:
                size = _copy(data, (start + prefix, end, last), target, size)
    offsets[forms.size] = size
    return size, damaged


@_kernel
def _parse_hex(
    content: Bytes, places: Places, form: int, offsets: Positions, values: Bytes
) -> tuple[int, int]:
    """Bytes written as \\x and digits; returns their size and how many values are damaged."""
    starts, lengths, forms = places
    data = _pointer(content)
    size = damaged = 0
    for row in range(forms.size):
        offsets[row] = size
        if forms[row] != form:
            continue
        start, length = starts[row], lengths[row]
        if length < 2 or length % 2 or data[start] != _BACKSLASH or data[start + 1] != _LOWER_X:
            damaged += 1
            continue
        wrong = False
        for at in range(start + 2, start + length, 2):
            high, low = _HEX[data[at]], _HEX[data[at + 1]]
            wrong |= high < 0 or low < 0
            values[size] = (high * 16 + low) & 255
            size += 1
        damaged += wrong
    offsets[forms.size] = size
    return size, damaged


@_kernel
def _parse_integers(content: Bytes, places: Places, form: int, values: Positions) -> int:
    """Whole decimal numbers of 64 bits; returns how many are not."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        negative = at < end and data[at] == _MINUS
        at += negative
        # Below zero there is one number more.
        value, fine = 0, at < end and end - at <= 19
        while at < end and fine:
            digit = int(data[at]) - _ZERO
            fine = 0 <= digit <= 9 and (value > _NEAR_MIN or (value == _NEAR_MIN and digit <= 8))
            value = value * 10 - digit
            at += 1
        if not fine or (not negative and value == MICROS_MIN):
            damaged += 1
        else:
            values[row] = value if negative else -value
    return damaged


@_part
def _times_plus(high: Any, low: Any, factor: Any, more: Any) -> tuple[Any, Any]:
    """Two words times a factor of at most 10,000, and some more."""
    first = (low & _MASK) * factor + more
    second = (low >> _HALF) * factor + (first >> _HALF)
    return high * factor + (second >> _HALF), (second << _HALF) | (first & _MASK)


@_part
def _scaled(high: Any, low: Any, places: int) -> tuple[Any, Any, bool]:
    """Two words times a power of ten, and whether they hold it."""
    while places > 0 and (high | low) != _NONE:
        step = min(places, _GROUP)
        if high > _HIGHS_MAX[step]:
            return high, low, False
        high, low = _times_plus(high, low, _POWERS[step], _NONE)
        places -= step
    return high, low, True


@_part
def _put_decimal(
    words: Words, row: int, value: tuple[Any, Any], negative: bool, limit: Words
) -> bool:
    """Write two words as a signed number, and say whether it has few enough digits."""
    high, low = value
    if high > limit[0] or (high == limit[0] and low >= limit[1]):
        return False
    if negative:
        low = ~low + _ONE
        high = ~high + (_ONE if low == _NONE else _NONE)
    words[row, 0] = low
    words[row, 1] = high
    return True


@_part
def _numeric_size(data: Bytes, start: int, length: int) -> int:
    """How many groups of digits a numeric has, -1 if it is damaged."""
    if length < _NUMERIC_HEADER_BYTES:
        return -1
    groups = _int16(data, start)
    if groups < 0 or length != _NUMERIC_HEADER_BYTES + 2 * groups:
        return -1
    sign = _int16(data, start + 4) & 0xFFFF
    plain = sign == 0 or sign == _NEGATIVE
    special = sign == _NAN or sign == _INFINITE or sign == _MINUS_INFINITE
    if not plain and not special:
        return -1
    for group in range(groups):
        digits = _int16(data, start + _NUMERIC_HEADER_BYTES + 2 * group)
        if digits < 0 or digits > 9999:
            return -1
    return groups


@_part
def _numeric_value(data: Bytes, start: int, groups: int, scale: int) -> tuple[Any, Any, bool]:
    """The digits up to the scale as two words, and whether there are no others."""
    high = low = _NONE
    # The power of ten of the group at hand, in units of the last digit that is kept.
    power = _GROUP * _int16(data, start + 2) + scale
    for group in range(groups):
        digits = np.uint64(_int16(data, start + _NUMERIC_HEADER_BYTES + 2 * group))
        kept = min(_GROUP, max(0, _GROUP + power))
        if high > _HIGHS_MAX[kept]:
            return high, low, False
        if kept < _GROUP:
            cut = _POWERS[_GROUP - kept]
            if digits % cut != _NONE:
                return high, low, False
            digits //= cut
        high, low = _times_plus(high, low, _POWERS[kept], digits)
        power -= _GROUP
    return _scaled(high, low, power + _GROUP)


@_kernel
def _read_numerics(
    content: Bytes, places: Places, wanted: tuple[int, int], limit: Words, words: Words
) -> tuple[int, int]:
    """Numerics as decimals of the scale `wanted[1]`, below the limit."""
    starts, lengths, forms = places
    form, scale = wanted
    data = _pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        words[row, 0] = words[row, 1] = 0
        if forms[row] != form:
            continue
        start = starts[row]
        groups = _numeric_size(data, start, lengths[row])
        if groups < 0:
            damaged += 1
            continue
        sign = _int16(data, start + 4) & 0xFFFF
        if sign != 0 and sign != _NEGATIVE:
            unfit += 1
            continue
        high, low, fits = _numeric_value(data, start, groups, scale)
        if not fits or not _put_decimal(words, row, (high, low), sign == _NEGATIVE, limit):
            unfit += 1
    return damaged, unfit


@_kernel
def _parse_numerics(
    content: Bytes, places: Places, wanted: tuple[int, int], limit: Words, words: Words
) -> tuple[int, int]:
    """Decimal numbers as decimals of the scale `wanted[1]`, below the limit."""
    starts, lengths, forms = places
    form, scale = wanted
    data = _pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        words[row, 0] = words[row, 1] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        negative = at < end and data[at] == _MINUS
        at += negative
        if at < end and (data[at] == _UPPER_N or data[at] == _UPPER_I):
            unfit += 1
            continue
        high, low, missing, code = _decimal_value(data, at, end, scale)
        if code == 0:
            high, low, fits = _scaled(high, low, missing)
            if not fits or not _put_decimal(words, row, (high, low), negative, limit):
                unfit += 1
        else:
            damaged += code < 0
            unfit += code > 0
    return damaged, unfit


@_part
def _decimal_value(data: Bytes, at: int, end: int, scale: int) -> tuple[Any, Any, int, int]:
    """The digits as two words, how many are missing to the scale, and a code.

    The code is 0, or 1 if there are more digits than are kept, or -1 if it is no number.
    """
    high = low = _NONE
    missing, fraction, code = scale, False, 0
    if at >= end or data[end - 1] == _POINT:
        return high, low, missing, -1
    while at < end:
        byte = data[at]
        at += 1
        if byte == _POINT and not fraction:
            fraction = True
            continue
        if byte < _ZERO or byte > _NINE:
            return high, low, missing, -1
        digit = np.uint64(byte - _ZERO)
        if fraction and missing == 0:
            if digit != _NONE:
                code = 1
        elif high == _NONE and low < _ROOMY:
            low = low * _TEN + digit
            missing -= fraction
        elif high > _HIGHS_MAX[1]:
            code = 1
        else:
            high, low = _times_plus(high, low, _TEN, digit)
            missing -= fraction
    return high, low, missing, code


@_kernel
def _size_numerics(content: Bytes, places: Places, form: int, sizes: Positions) -> tuple[int, int]:
    """At most how many bytes each numeric takes as text; returns how many are damaged."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        sizes[row] = 0
        if forms[row] == form:
            if _numeric_size(data, starts[row], lengths[row]) < 0:
                damaged += 1
                continue
            weight = _int16(data, starts[row] + 2)
            scale = _int16(data, starts[row] + 6) & _DISPLAY_SCALE_MASK
            # A sign, the groups before the point, the point, the groups after it.
            sizes[row] = 2 + _GROUP * max(weight + 1, 2) + scale + _GROUP
    return damaged, 0


@_kernel
def _show_numerics(
    content: Bytes, places: Places, form: int, offsets: Positions, texts: Bytes
) -> int:
    """Write numerics with all their digits, as PostgreSQL does; returns the size of all."""
    starts, _, forms = places
    data, target = _pointer(content), _pointer(texts)
    size = 0
    for row in range(forms.size):
        offsets[row] = size
        if forms[row] == form:
            sign = _int16(data, starts[row] + 4) & 0xFFFF
            if sign != 0 and sign != _NEGATIVE:
                special = 0 if sign == _NAN else 1 if sign == _INFINITE else 2
                for place in range(_SPECIAL_SIZES[special]):
                    target[size] = _SPECIAL_TEXTS[special, place]
                    size += 1
            else:
                if sign == _NEGATIVE:
                    target[size] = _MINUS
                    size += 1
                size = _show_numeric(data, starts[row], target, size)
    offsets[forms.size] = size
    return size


@_part
def _show_numeric(data: Bytes, start: int, target: Bytes, size: int) -> int:
    groups, weight = _int16(data, start), _int16(data, start + 2)
    scale = _int16(data, start + 6) & _DISPLAY_SCALE_MASK
    first = size
    for group in range(weight + 1):
        value = _group_at(data, start, groups, group)
        size = _show_group(value, target, size)
        if group == 0:
            # The first group has no zeros in front, but one digit at least.
            zeros = (value < 10) + (value < 100) + (value < 1000)
            for place in range(zeros, _GROUP):
                target[first + place - zeros] = target[first + place]
            size -= zeros
    if weight < 0:
        target[size] = _ZERO
        size += 1
    if scale:
        target[size] = _POINT
        size += 1
        stop = size + scale
        group = weight + 1
        while size < stop:
            size = _show_group(_group_at(data, start, groups, group), target, size)
            group += 1
        size = stop
    return size


@_part
def _group_at(data: Bytes, start: int, groups: int, group: int) -> int:
    if group < 0 or group >= groups:
        return 0
    return _int16(data, start + _NUMERIC_HEADER_BYTES + 2 * group)


@_part
def _show_group(value: int, target: Bytes, size: int) -> int:
    target[size] = _ZERO + value // 1000
    target[size + 1] = _ZERO + value // 100 % 10
    target[size + 2] = _ZERO + value // 10 % 10
    target[size + 3] = _ZERO + value % 10
    return size + _GROUP


@_part
def _two_digits(data: Bytes, at: int, end: int) -> int:
    """The number that two digits make, or one so negative that no sum hides it."""
    if at + 2 > end:
        return -1_000_000
    tens, ones = int(data[at]) - _ZERO, int(data[at + 1]) - _ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1_000_000


@_part
def _parse_day(data: Bytes, at: int, end: int, before: bool) -> tuple[int, int]:
    """The days since 1970 of a date before or after Christ, and the position after it or -1."""
    year = digits = 0
    while at < end and _ZERO <= data[at] <= _NINE:
        year = year * 10 + (int(data[at]) - _ZERO)
        digits += 1
        at += 1
        if digits > _YEAR_DIGITS_MAX:
            return 0, -1
    if digits < 4 or end - at < 6 or data[at] != _MINUS or data[at + 3] != _MINUS:
        return 0, -1
    month, day = _two_digits(data, at + 1, end), _two_digits(data, at + 4, end)
    if month < 1 or month > 12 or day < 1 or day > 31:
        return 0, -1
    if before:
        year = 1 - year
    # Years that begin in March end with the leap day; 146,097 days make 400 years.
    year -= month <= 2
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + (9 if month <= 2 else -3)) + 2) // 5 + day - 1
    days = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days, at + 6


@_part
def _parse_clock(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The microseconds of a time of day, and the position after it or -1."""
    hours, minutes = _two_digits(data, at, end), _two_digits(data, at + 3, end)
    seconds = _two_digits(data, at + 6, end)
    if hours < 0 or minutes < 0 or seconds < 0 or hours > 24 or minutes > 59 or seconds > 60:
        return 0, -1
    if data[at + 2] != _COLON or data[at + 5] != _COLON:
        return 0, -1
    micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
    at += 8
    if at < end and data[at] == _POINT:
        at += 1
        weight = 100_000
        while at < end and _ZERO <= data[at] <= _NINE:
            if weight == 0:
                return 0, -1
            micros += (int(data[at]) - _ZERO) * weight
            weight //= 10
            at += 1
    return micros, at


@_part
def _parse_zone(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The microseconds east in +hh, +hh:mm or +hh:mm:ss, and the position after it or -1."""
    if at >= end or (data[at] != _PLUS and data[at] != _MINUS):
        return 0, at
    negative = data[at] == _MINUS
    total, unit, at = 0, 3600, at + 1
    while unit > 0:
        number = _two_digits(data, at, end)
        if number < 0:
            return 0, -1
        total += number * unit
        unit //= 60
        at += 2
        if at >= end or data[at] != _COLON:
            break
        at += 1
    return (-total if negative else total) * 1_000_000, at


@_part
def _infinity(data: Bytes, at: int, end: int) -> int:
    """1 for infinity, -1 for -infinity, else 0."""
    if end - at == 8 and data[at] == _LOWER_I:
        return 1
    return -1 if end - at == 9 and data[at] == _MINUS and data[at + 1] == _LOWER_I else 0


@_part
def _end_of_moment(data: Bytes, at: int, end: int) -> int:
    """Where the text ends without the era before Christ."""
    return end - 3 if end - at > 3 and data[end - 2] == _UPPER_B else end


@_kernel
def _parse_dates(content: Bytes, places: Places, form: int, values: Lengths) -> int:
    """ISO dates as days since 1970; returns how many are not."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        endless = _infinity(data, at, end)
        if endless:
            values[row] = DAYS_MAX if endless > 0 else DAYS_MIN
            continue
        stop = _end_of_moment(data, at, end)
        days, at = _parse_day(data, at, stop, stop != end)
        values[row] = days
        damaged += at != stop
    return damaged


@_kernel
def _parse_times(content: Bytes, places: Places, form: int, values: Positions) -> int:
    """Times of day in microseconds; returns how many are not."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] == form:
            end = starts[row] + lengths[row]
            values[row], at = _parse_clock(data, starts[row], end)
            damaged += at != end
    return damaged


@_kernel
def _parse_timestamps(
    content: Bytes, places: Places, form: int, values: Positions
) -> tuple[int, int]:
    """ISO timestamps, with or without a zone, as microseconds since 1970."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        endless = _infinity(data, at, end)
        if endless:
            values[row] = MICROS_MAX if endless > 0 else MICROS_MIN
            continue
        stop = _end_of_moment(data, at, end)
        days, at = _parse_day(data, at, stop, stop != end)
        if at < 0 or at >= stop or data[at] != _SPACE:
            damaged += 1
            continue
        micros, at = _parse_clock(data, at + 1, stop)
        if at >= 0:
            shift, at = _parse_zone(data, at, stop)
            micros -= shift
        if at != stop:
            damaged += 1
        elif days > _LAST_DAY or (days == _LAST_DAY and micros >= _LAST_MICROS):
            unfit += 1
        else:
            values[row] = days * _DAY_MICROS + micros
    return damaged, unfit


@_kernel
def _count_elements(
    content: Bytes, places: Places, form: int, counts: Positions
) -> tuple[int, int]:
    """How many elements each array has; those of several dimensions do not fit."""
    starts, lengths, forms = places
    data = _pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        counts[row] = 0
        if forms[row] != form:
            continue
        start, length = starts[row], lengths[row]
        dimensions = _int32(data, start) if length >= 12 else -1
        if dimensions > 1:
            unfit += 1
        elif dimensions < 0 or length < 12 + 8 * dimensions:
            damaged += 1
        elif dimensions == 1:
            count = _int32(data, start + 12)
            # Each element has a length at least, so a damaged count takes no memory.
            if count < 0 or 4 * count > length - 20:
                damaged += 1
            else:
                counts[row] = count
    return damaged, unfit


@_kernel
def _find_elements(content: Bytes, places: Places, form: int, elements: Places) -> int:
    """Note the elements of all arrays; returns how many arrays are damaged."""
    starts, lengths, forms = places
    element_starts, element_lengths, element_forms = elements
    data = _pointer(content)
    damaged = element = 0
    for row in range(forms.size):
        if forms[row] != form or _int32(data, starts[row]) == 0:
            continue
        at, end = starts[row] + 20, starts[row] + lengths[row]
        for _ in range(_int32(data, starts[row] + 12)):
            size = _int32(data, at) if at + 4 <= end else -2
            at += 4
            if size < -1 or size > end - at:
                return damaged + 1
            element_starts[element] = at
            element_lengths[element] = max(size, 0)
            element_forms[element] = _BINARY if size >= 0 else _NULL
            at += max(size, 0)
            element += 1
        damaged += at != end
    return damaged


@_part
def _enter(data: Bytes, at: int, end: int) -> int:
    """The position after the opening brace, behind lower bounds if there are any, or -1."""
    if at < end and data[at] == _BRACKET:
        while at < end and data[at] != _EQUALS:
            at += 1
        at += 1
    if at >= end or data[at] != _OPEN or data[end - 1] != _CLOSE or end - at < 2:
        return -1
    return at + 1


@_part
def _skip_element(data: Bytes, at: int, end: int, delimiter: int) -> int:
    """The position after an element, or -1; `end` is that of the closing brace."""
    if at < end and data[at] == _QUOTE:
        at += 1
        while at < end and data[at] != _QUOTE:
            at += 2 if data[at] == _BACKSLASH else 1
        at += 1
        return at if at <= end and (at == end or data[at] == delimiter) else -1
    first = at
    while at < end and data[at] != delimiter:
        byte = data[at]
        if byte == _QUOTE or byte == _BACKSLASH or byte == _OPEN or byte == _CLOSE:
            return -1
        at += 1
    return at if at > first else -1


@_kernel
def _count_written(
    content: Bytes, places: Places, wanted: tuple[int, int], counts: Positions
) -> tuple[int, int]:
    """How many elements each array has; those of several dimensions do not fit."""
    starts, lengths, forms = places
    form, delimiter = wanted
    data = _pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        counts[row] = 0
        if forms[row] != form:
            continue
        end = starts[row] + lengths[row]
        at = _enter(data, starts[row], end)
        end -= 1
        if at < 0:
            damaged += 1
        elif at < end and data[at] == _OPEN:
            unfit += 1
        else:
            count = 0
            while at < end:
                at = _skip_element(data, at, end, delimiter)
                # A delimiter at the very end leaves one element too few.
                if at < 0 or at == end - 1:
                    at = -1
                    break
                at += 1
                count += 1
            damaged += at < 0
            counts[row] = count
    return damaged, unfit


@_part
def _is_null(data: Bytes, at: int, size: int) -> bool:
    """Whether a word that is not quoted means null; or-ing 32 makes letters lower."""
    return (
        size == 4
        and data[at] | 32 == 110
        and data[at + 1] | 32 == 117
        and data[at + 2] | 32 == 108
        and data[at + 3] | 32 == 108
    )


@_kernel
def _unescape_elements(
    content: Bytes, places: Places, wanted: tuple[int, int], elements: Places, texts: Bytes
) -> None:
    """Write the elements of arrays that `_count_written` has checked one after the other."""
    starts, lengths, forms = places
    form, delimiter = wanted
    element_starts, element_lengths, element_forms = elements
    data, target = _pointer(content), _pointer(texts)
    size = element = 0
    for row in range(forms.size):
        if forms[row] != form:
            continue
        end = starts[row] + lengths[row]
        at = _enter(data, starts[row], end)
        end -= 1
        while at < end:
            stop = _skip_element(data, at, end, delimiter)
            element_starts[element] = size
            element_forms[element] = _TEXT
            if data[at] == _QUOTE:
                at += 1
                while at < stop - 1:
                    at += data[at] == _BACKSLASH
                    target[size] = data[at]
                    size += 1
                    at += 1
            elif _is_null(data, at, stop - at):
                element_forms[element] = _NULL
            else:
                while at < stop:
                    target[size] = data[at]
                    size += 1
                    at += 1
            element_lengths[element] = size - element_starts[element]
            element += 1
            at = stop + 1
