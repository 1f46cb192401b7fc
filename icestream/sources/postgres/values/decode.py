"""One column of tuples at a time, as the Arrow column of its table.

Promise: a value comes out as it is or is refused, `SchemaRejected` when the column's type cannot
hold it, `DataRejected` when its bytes are not what they claim to be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
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
from icestream.kernels import WORD_BYTES, Bytes
from icestream.kernels.arrays import validity
from icestream.kernels.decimals import DECIMAL_LIMITS
from icestream.schema import cast_text
from icestream.sources.postgres.values.array_kernels import (
    count_elements,
    count_written,
    find_elements,
    unescape_elements,
)
from icestream.sources.postgres.values.kinds import Codec, PgType, in_binary
from icestream.sources.postgres.values.numeric_kernels import (
    parse_numerics,
    read_numerics,
    show_numerics,
    size_numerics,
)
from icestream.sources.postgres.values.places import (
    Lengths,
    Places,
    Positions,
    SentAs,
    new_places,
    readable,
)
from icestream.sources.postgres.values.scalar_kernels import (
    UUID_BYTES,
    copy_values,
    parse_hex,
    parse_integers,
    parse_uuids,
    read_bools,
    read_fixed,
    read_uuids,
)
from icestream.sources.postgres.values.time_kernels import (
    DAY_MICROS,
    DAYS_MAX,
    DAYS_MIN,
    EPOCH_DAYS,
    parse_dates,
    parse_times,
    parse_timestamps,
    shift_timestamps,
)
from icestream.sources.postgres.values.tuples import Tuples

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

    def bytes_of(self, form: SentAs) -> int:
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
    present = np.bincount(cells.forms, minlength=len(SentAs))
    if not present[SentAs.TEXT]:
        return _of_form(cells, kind, target, SentAs.BINARY)
    if not present[SentAs.BINARY]:
        return _of_form(cells, kind, target, SentAs.TEXT)
    both = [_of_form(cells, kind, target, form) for form in (SentAs.BINARY, SentAs.TEXT)]
    rows = np.arange(len(cells))
    chosen = np.where(cells.forms == SentAs.TEXT, rows + len(cells), rows)
    return pa.concat_arrays(both).take(pa.array(chosen))


def _of_form(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    """The values that came in this form; all others are null."""
    to, arrow_type = target.to, target.arrow_type
    if form == SentAs.BINARY and not in_binary(kind, to) and np.any(cells.forms == form):
        raise SchemaRejected(
            f"column {target.name} of type {kind.name} came in binary form",
            detail=f"For a column of type {to} it is read in text form only.",
            hint="The column had another type before. "
            + (
                "Run once without the table in `tables`, drop its Iceberg table, and add it again: "
                "it is copied anew."
                if isinstance(to, ListType)
                else "Declare the one that it has in the lake, "
                f"`columns: {{<schema.table>: {{{target.name}: {to}}}}}`, and start again: its "
                "values are then asked for in text form."
            ),
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
    buffers = [validity(present), pa.py_buffer(values)]
    return pa.Array.from_buffers(arrow_type, len(present), buffers)


def _strings(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    """Large strings of PostgreSQL's text form, checked to be UTF-8."""
    if form == SentAs.BINARY and kind.codec == Codec.NUMERIC:
        sizes = np.empty(len(cells), dtype=np.int64)
        faults = size_numerics(cells.content, cells.places, form, sizes)
        target.judge(cells, kind, faults)
        offsets, buffer = _text_buffers(len(cells), int(sizes.sum()))
        size = show_numerics(cells.content, cells.places, form, offsets, buffer)
    else:
        prefix = int(form == SentAs.BINARY and kind.codec == Codec.JSONB)
        offsets, buffer = _text_buffers(len(cells), cells.bytes_of(form))
        size, damaged = copy_values(cells.content, cells.places, (form, prefix), offsets, buffer)
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
    offsets, content = buffers
    return pa.Array.from_buffers(
        arrow_type,
        len(present),
        [validity(present), pa.py_buffer(offsets), pa.py_buffer(content)],
    )


def _lists(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    assert kind.element is not None and isinstance(target.to, ListType)
    counts = np.empty(len(cells), dtype=np.int64)
    delimiter = ord(kind.delimiter)
    if form == SentAs.BINARY:
        faults = count_elements(cells.content, cells.places, form, counts)
    else:
        faults = count_written(cells.content, cells.places, (form, delimiter), counts)
    target.judge(cells, kind, faults)
    offsets = np.zeros(len(cells) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    places = new_places(1, int(offsets[-1]))
    found = (places[0][0], places[1][0], places[2][0])
    if form == SentAs.BINARY:
        content = cells.content
        damaged = find_elements(content, cells.places, form, found)
        target.judge(cells, kind, (damaged, 0))
    else:
        unescaped = np.empty(cells.bytes_of(form) + WORD_BYTES, dtype=np.uint8)
        unescape_elements(cells.content, cells.places, (form, delimiter), found, unescaped)
        content = readable(unescaped)
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


def _integers(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> npt.NDArray[Any]:
    """Whole numbers of any width as they were sent."""
    values = np.empty(len(cells), dtype=np.int64)
    if form == SentAs.BINARY:
        width = _INTEGER_BYTES[kind.codec]
        damaged = read_fixed(cells.content, cells.places, (form, width), values)
        if kind.codec == Codec.OID:
            values &= 0xFFFF_FFFF
    else:
        damaged = parse_integers(cells.content, cells.places, form, values)
    target.judge(cells, kind, (damaged, 0))
    return values


def _whole(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
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


def _floats(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    width, numeric = _FLOATS[kind.codec]
    arrow_type = pa.from_numpy_dtype(numeric)
    if form == SentAs.BINARY:
        bits = np.empty(len(cells), dtype=np.int64 if width == 8 else np.int32)
        damaged = read_fixed(cells.content, cells.places, (form, width), bits)
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


def _decimals(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    decimal = target.to if isinstance(target.to, DecimalType) else DecimalType(19, 0)
    words = np.empty((len(cells), 2), dtype=np.uint64)
    kernel = read_numerics if form == SentAs.BINARY else parse_numerics
    faults = kernel(
        cells.content, cells.places, (form, decimal.scale), DECIMAL_LIMITS[decimal.precision], words
    )
    target.judge(cells, kind, faults)
    arrow_type = pa.decimal128(decimal.precision, decimal.scale)
    values = _filled(words, arrow_type, cells.forms == form)
    try:
        return _cast(values, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values does not fit.", kind)


def _bools(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    values = np.empty(len(cells), dtype=np.uint8)
    damaged = read_bools(cells.content, cells.places, form, values)
    target.judge(cells, kind, (damaged, 0))
    bits = np.packbits(values, bitorder="little")
    return _filled(bits, target.arrow_type, cells.forms == form)


def _uuids(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    values = np.empty((len(cells), UUID_BYTES), dtype=np.uint8)
    kernel = read_uuids if form == SentAs.BINARY else parse_uuids
    target.judge(cells, kind, (kernel(cells.content, cells.places, form, values), 0))
    storage = _filled(values, pa.binary(UUID_BYTES), cells.forms == form)
    if isinstance(target.arrow_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(target.arrow_type, storage)
    return storage


def _binaries(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    offsets, buffer = _text_buffers(len(cells), cells.bytes_of(form))
    if form == SentAs.BINARY:
        size, damaged = copy_values(cells.content, cells.places, (form, 0), offsets, buffer)
    else:
        size, damaged = parse_hex(cells.content, cells.places, form, offsets, buffer)
    target.judge(cells, kind, (damaged, 0))
    values = _variable(pa.large_binary(), (offsets, buffer[:size]), cells.forms == form)
    try:
        return _cast(values, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values has another length.", kind)


def _dates(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    days = np.empty(len(cells), dtype=np.int32)
    if form == SentAs.BINARY:
        damaged = read_fixed(cells.content, cells.places, (form, 4), days)
        finite = (days != DAYS_MIN) & (days != DAYS_MAX)
        # No date comes near the end of the range, so this cannot overflow.
        np.add(days, EPOCH_DAYS, out=days, where=finite)
    else:
        damaged = parse_dates(cells.content, cells.places, form, days)
    target.judge(cells, kind, (damaged, 0))
    return _filled(days, target.arrow_type, cells.forms == form)


def _times(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    micros = np.empty(len(cells), dtype=np.int64)
    if form == SentAs.BINARY:
        damaged = read_fixed(cells.content, cells.places, (form, 8), micros)
    else:
        damaged = parse_times(cells.content, cells.places, form, micros)
    unfit = int(np.count_nonzero((micros < 0) | (micros >= DAY_MICROS)))
    target.judge(cells, kind, (damaged, unfit))
    return _filled(micros, target.arrow_type, cells.forms == form)


def _timestamps(cells: _Cells, kind: PgType, target: _Target, form: SentAs) -> pa.Array:
    micros = np.empty(len(cells), dtype=np.int64)
    if form == SentAs.BINARY:
        damaged = read_fixed(cells.content, cells.places, (form, 8), micros)
        unfit = shift_timestamps(micros)
    else:
        damaged, unfit = parse_timestamps(cells.content, cells.places, form, micros)
    target.judge(cells, kind, (damaged, unfit))
    zone = "UTC" if kind.codec == Codec.TIMESTAMPTZ else None
    values = _filled(micros, pa.timestamp("us", tz=zone), cells.forms == form)
    try:
        return _cast(values, target.arrow_type)
    except pa.ArrowInvalid:
        target.refuse(f"At least one of {len(cells)} values does not fit.", kind)


_SCALARS: Mapping[Codec, Callable[[_Cells, PgType, _Target, SentAs], pa.Array]] = {
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
