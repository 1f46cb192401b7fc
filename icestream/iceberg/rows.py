"""Rows of a table on their way to and from Spark, which knows fewer types than Iceberg.

Spark has a uuid as text, as well as a time of day and a timestamp with nanoseconds, and no large
strings or lists; `for_spark`, `to_spark` and `from_spark` go over and back without loss. `Bound` is
what is known of a key's column before any row is read: it lets Iceberg leave out files and row
groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import TimeType, UUIDType

from icestream.schema import cast_text

# Iceberg looks at no more values than this when it compares a file's bounds with a list.
VALUES_MAX = 200
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint8)
_HEX_PAIRS = _HEX.reshape(256, 2)
_UUID_BYTES, _UUID_CHARACTERS = 16, 36
_DASHES = (8, 13, 18, 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The values of one column that are looked for: all of them, or the least and the greatest."""

    values: Sequence[Any]
    ranged: bool = False


def bound(column: pa.ChunkedArray) -> Bound | None:
    """What can be said of a column of keys in few words; None when that is nothing."""
    if column.null_count or isinstance(column.type, pa.BaseExtensionType):
        # A null key matches rows that no comparison finds; and readers order uuids otherwise than
        # writers do, so that they would pass over files which hold the key.
        return None
    distinct = column.unique()
    if pa.types.is_temporal(distinct.type) and not _within_python(distinct):
        return None
    if len(distinct) <= VALUES_MAX:
        return Bound(values=[_literal(value) for value in distinct])
    if pa.types.is_floating(distinct.type):
        return None
    try:
        ends = pc.min_max(distinct)
    except pa.ArrowNotImplementedError:
        # Arrow does not order this type: nothing is said, and every file is read.
        return None
    return Bound(values=[_literal(ends["min"]), _literal(ends["max"])], ranged=True)


def _within_python(column: pa.Array) -> bool:
    """Whether Python can tell these days or times: it knows the years 1 to 9999."""
    try:
        ends = pc.min_max(column)
        return bool(ends["min"].as_py() and ends["max"].as_py())
    except (OverflowError, ValueError):
        return False


def _literal(value: pa.Scalar) -> Any:
    """A value in a form that Iceberg turns into the column's type by itself."""
    plain = value.as_py()
    if isinstance(plain, bool | int | float | str | bytes):
        return plain
    return plain.isoformat() if hasattr(plain, "isoformat") else str(plain)


def for_spark(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of keys in a type that Spark compares with the table's column."""
    if isinstance(column.type, pa.BaseExtensionType):
        parts = [_uuid_text(part.storage) for part in column.chunks]
        return pa.chunked_array(parts, pa.string())
    if pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    if pa.types.is_large_binary(column.type) or pa.types.is_fixed_size_binary(column.type):
        return column.cast(pa.binary())
    return column


def _uuid_text(storage: pa.Array) -> pa.Array:
    first = storage.offset * _UUID_BYTES
    whole = np.frombuffer(storage.buffers()[1], np.uint8)
    content = whole[first : first + len(storage) * _UUID_BYTES].reshape(-1, _UUID_BYTES)
    text = np.full((len(content), _UUID_CHARACTERS), ord("-"), np.uint8)
    digits = [place for place in range(_UUID_CHARACTERS) if place not in _DASHES]
    text[:, digits] = _HEX_PAIRS[content].reshape(len(content), -1)
    offsets = np.arange(len(content) + 1, dtype=np.int32) * _UUID_CHARACTERS
    found = pa.StringArray.from_buffers(
        len(content), pa.py_buffer(offsets), pa.py_buffer(text.tobytes())
    )
    return pc.if_else(pc.is_null(storage), pa.scalar(None, pa.string()), found)


def to_spark(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """A column of a table in the type that Spark has for it; fields stay in their order."""
    return pa.chunked_array([_to_spark(part, wanted) for part in column.chunks], wanted)


def _to_spark(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if array.type == wanted:
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        return _uuid_text(array.storage)
    nested = _rebuilt(array, wanted, _to_spark, by_name=False)
    return array.cast(wanted) if nested is None else nested


def from_spark(
    column: pa.ChunkedArray, wanted: pa.DataType, by_name: bool = False
) -> pa.ChunkedArray:
    """A column that Spark has read, in the type that the table's column is written with.

    Fields of structs are the table's in its order, or with `by_name` some of them in any order.
    """

    def back(array: pa.Array, wanted: pa.DataType) -> pa.Array:
        if array.type == wanted:
            return array
        if isinstance(wanted, pa.BaseExtensionType):
            return cast_text(array, "uuid", UUIDType(), wanted)
        if pa.types.is_time(wanted):
            return cast_text(array, "time", TimeType(), wanted)
        nested = _rebuilt(array, wanted, back, by_name)
        return array.cast(wanted) if nested is None else nested

    return pa.chunked_array([back(part, wanted) for part in column.chunks], wanted)


def _rebuilt(
    array: pa.Array,
    wanted: pa.DataType,
    convert: Callable[[pa.Array, pa.DataType], pa.Array],
    by_name: bool,
) -> pa.Array | None:
    """A struct, list or map whose parts are converted; None for any other type."""
    if pa.types.is_struct(wanted):
        places = {field.name: number for number, field in enumerate(array.type)}
        inner = []
        for number, field in enumerate(wanted):
            place = places.get(field.name) if by_name else number
            # Beneath a null struct there may be anything; asked this way it is null as well.
            inner.append(
                pa.nulls(len(array), field.type)
                if place is None
                else convert(pc.struct_field(array, [place]), field.type)
            )
        return pa.StructArray.from_arrays(inner, fields=list(wanted), mask=pc.is_null(array))
    if pa.types.is_list(wanted) or pa.types.is_large_list(wanted):
        array = _from_the_start(array)
        kind = pa.LargeListArray if pa.types.is_large_list(wanted) else pa.ListArray
        values = convert(array.values, wanted.value_type)
        offsets = array.offsets.cast(pa.int64() if kind is pa.LargeListArray else pa.int32())
        return kind.from_arrays(offsets, values, type=wanted, mask=pc.is_null(array))
    if pa.types.is_map(wanted):
        array = _from_the_start(array)
        keys = convert(array.keys, wanted.key_type)
        items = convert(array.items, wanted.item_type)
        return pa.MapArray.from_arrays(
            array.offsets, keys, items, type=wanted, mask=pc.is_null(array)
        )
    return None


def _from_the_start(array: pa.Array) -> pa.Array:
    """The same array, but not a part of a larger one: Arrow builds no lists on parts of offsets."""
    return array.take(pa.array(np.arange(len(array)))) if array.offset else array
