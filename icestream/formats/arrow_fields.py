"""Fields whose values are Arrow arrays, of formats that know their types (Avro, Protobuf).

A field has the column type that its schema declares beside its array, because the two may differ:
an instant that is written as text is an array of strings, but wants to be a timestamptz.

Casting is exact or refused with `SchemaRejected`: no value is rounded, cut or made null. Text goes
into any column that it spells a value of, and anything goes into a string column as text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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

from icestream.errors import SchemaRejected, check
from icestream.formats.rows import Field, Indices, Mask
from icestream.formats.text_fields import json_strings
from icestream.kernels.arrays import validity
from icestream.kernels.decimals import DECIMAL_DIGITS_MAX
from icestream.schema import cast_text

# A whole number of 64 bits has at most as many digits.
_LONG_DIGITS = 19
_HEX = np.frombuffer(b"".join(f"{byte:02x}".encode() for byte in range(256)), dtype=np.uint16)
_SIMPLE: Mapping[pa.DataType, IcebergType] = {
    pa.bool_(): BooleanType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.date32(): DateType(),
    pa.string(): StringType(),
    pa.large_string(): StringType(),
    pa.binary(): BinaryType(),
    pa.large_binary(): BinaryType(),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowField:
    """One value for each of some records, in an Arrow array; see `Field`.

    `kind` is the column that its schema declares, None for what is always null. `outside` is where
    the record that the field belongs to is itself null.
    """

    array: pa.Array
    kind: IcebergType | None
    outside: Mask | None = None

    def __len__(self) -> int:
        return len(self.array)

    def missing(self) -> Mask:
        """Where the field belongs to an object that is null."""
        return np.zeros(len(self), dtype=np.bool_) if self.outside is None else self.outside

    def null(self) -> Mask:
        """Where the field is missing or null."""
        return _mask(self.array)

    def take(self, indices: Indices) -> "ArrowField":
        """The values at these places, in this order."""
        outside = None if self.outside is None else self.outside[indices]
        array = self.array.take(pa.array(indices))
        return ArrowField(array=array, kind=self.kind, outside=outside)

    def where(self, chosen: Mask, other: Field) -> "ArrowField":
        """Its own values where `chosen`, those of the other field elsewhere.

        Raises `SchemaRejected` when the two have different types.
        """
        check(isinstance(other, ArrowField), "fields that are joined have one format")
        assert isinstance(other, ArrowField)
        outside = np.where(chosen, self.missing(), other.missing())
        kind = self.kind or other.kind
        # What is always null goes with anything.
        ours = _filled(self, other.array.type)
        theirs = _filled(other, ours.type)
        if ours.type != theirs.type or (other.kind or kind) != kind:
            raise SchemaRejected(
                f"a field of type {self.kind} cannot be joined with one of type {other.kind}",
                hint="The two parts of a record that describe the same column must agree.",
            )
        places = np.arange(len(self)) + np.where(chosen, 0, len(self))
        # Unlike `if_else` this knows every type.
        array = pa.concat_arrays([ours, theirs]).take(pa.array(places))
        return ArrowField(array=array, kind=kind, outside=outside)

    def without(self, chosen: Mask) -> "ArrowField":
        """Its values, missing where `chosen`."""
        places = pa.array(np.arange(len(self)), mask=chosen)
        outside = self.missing() | chosen
        return ArrowField(array=self.array.take(places), kind=self.kind, outside=outside)

    def is_any(self, spellings: Sequence[str]) -> Mask:
        """Where a value's text is one of these; see `Field.is_any`."""
        found = np.zeros(len(self), dtype=np.bool_)
        places = _as_long_as(self.array, spellings)
        if len(places):
            text = _text(self.array.take(pa.array(places)))
            same = pc.is_in(text, value_set=pa.array(spellings, text.type))
            found[places] = same.to_numpy(zero_copy_only=False)
        return found

    def slim(self, names_max: int) -> tuple["ArrowField", Mask]:
        """The field as it is: no record has names of its own."""
        return self, np.zeros(len(self), dtype=np.bool_)

    def members(self) -> Mapping[str, "ArrowField"]:
        """The fields of a record by name; none for what is not a record."""
        if not pa.types.is_struct(self.array.type) or not isinstance(self.kind, StructType):
            return {}
        kinds = {field.name: field.field_type for field in self.kind.fields}
        outside = self.null()
        return {
            field.name: ArrowField(array=array, kind=kinds.get(field.name), outside=outside)
            for field, array in zip(self.array.type, self.array.flatten(), strict=True)
        }

    def type(self) -> IcebergType | None:
        """The column that the schema declares."""
        return self.kind

    def text(self) -> pa.Array:
        """The values as text, records, lists and maps as JSON; null where the field is null."""
        return _text(self.array).cast(pa.string())

    def cast(self, name: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
        """The values in the type of a table's column; `SchemaRejected` when one does not fit."""
        try:
            return _cast(self.array, name, kind, arrow_type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            # Arrow quotes the value it fails on; rows are nobody's business in a log.
            raise SchemaRejected(
                f"values of column {name} do not fit its type {kind}",
                detail=f"Their schema declares {self.kind}.",
                hint="Change the table's column to a type that holds every value of the field; a "
                "column of type string takes any.",
            ) from error


def _as_long_as(array: pa.Array, spellings: Sequence[str]) -> Indices:
    """The values that may have one of these texts, by how many bytes or elements they have."""
    sizes = {len(text.encode()) for text in spellings}
    if _is_text(array.type):
        lengths = pc.binary_length(array)
    elif _is_bytes(array.type):
        # Their text has a mark of two characters, and two for each byte.
        lengths, sizes = pc.binary_length(array), {size // 2 - 1 for size in sizes}
    elif _is_list(array.type) or pa.types.is_map(array.type):
        lengths, sizes = _lengths(array), {text.count(",") + 1 for text in spellings}
    else:
        return np.zeros(0, dtype=np.int64)
    # Nulls have no length, and are nothing that is looked for.
    length = pc.fill_null(lengths, -1).to_numpy(zero_copy_only=False)
    return np.flatnonzero(np.isin(length, list(sizes)))


def arrow_field(array: pa.Array) -> ArrowField:
    """A field whose column type follows from its Arrow type."""
    return ArrowField(array=array, kind=iceberg_type(array.type))


def iceberg_type(arrow: pa.DataType) -> IcebergType | None:
    """The Iceberg type that an Arrow type is by itself; None for the type null."""
    if arrow in _SIMPLE:
        return _SIMPLE[arrow]
    if pa.types.is_null(arrow):
        return None
    if pa.types.is_decimal128(arrow):
        return DecimalType(arrow.precision, arrow.scale)
    if pa.types.is_time(arrow):
        return TimeType()
    if pa.types.is_timestamp(arrow):
        nanos, zoned = arrow.unit == "ns", arrow.tz is not None
        if nanos:
            return TimestamptzNanoType() if zoned else TimestampNanoType()
        return TimestamptzType() if zoned else TimestampType()
    if isinstance(arrow, pa.UuidType):
        return UUIDType()
    if pa.types.is_fixed_size_binary(arrow):
        return FixedType(arrow.byte_width)
    return _iceberg_nested(arrow)


def _iceberg_nested(arrow: pa.DataType) -> IcebergType:
    if pa.types.is_struct(arrow):
        fields = [
            NestedField(field_id=place, name=field.name, field_type=kind, required=False)
            for place, field in enumerate(arrow, start=1)
            if (kind := iceberg_type(field.type)) is not None
        ]
        return StructType(*fields)
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return ListType(1, iceberg_type(arrow.value_type) or StringType(), False)
    if pa.types.is_map(arrow):
        key = iceberg_type(arrow.key_type) or StringType()
        return MapType(1, key, 2, iceberg_type(arrow.item_type) or StringType(), False)
    raise SchemaRejected(f"there is no Iceberg type for values of Arrow's type {arrow}")


def _mask(array: pa.Array) -> Mask:
    found: Mask = array.is_null().to_numpy(zero_copy_only=False)
    return found


def _filled(field: ArrowField, arrow: pa.DataType) -> pa.Array:
    return pa.nulls(len(field), arrow) if field.kind is None else field.array


def _is_text(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow) or pa.types.is_large_string(arrow))


def _is_list(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_list(arrow) or pa.types.is_large_list(arrow))


def _is_bytes(arrow: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(arrow)
        or pa.types.is_large_binary(arrow)
        or pa.types.is_fixed_size_binary(arrow)
    )


# --- values as text ---------------------------------------------------------------------------


def _text(array: pa.Array) -> pa.Array:
    """Text that `cast_text` reads as the same value."""
    arrow = array.type
    if isinstance(arrow, pa.BaseExtensionType):
        return _text(array.storage)
    if _is_text(arrow):
        return array.cast(pa.large_string())
    if pa.types.is_null(arrow):
        return pa.nulls(len(array), pa.large_string())
    if _is_bytes(arrow):
        return _hexadecimal(array)
    if pa.types.is_nested(arrow):
        return _json(array)
    return pc.cast(array, pa.large_string())


def _hexadecimal(array: pa.Array) -> pa.Array:
    values = pc.fill_null(array.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(values.buffers()[1], dtype=np.int64)[values.offset :][: len(values) + 1]
    content = np.frombuffer(values.buffers()[2] or b"", dtype=np.uint8)[: int(offsets[-1])]
    digits = pa.LargeStringArray.from_buffers(
        len(values), pa.py_buffer(offsets * 2), pa.py_buffer(_HEX[content])
    )
    prefixed = _joined(_piece("\\x"), digits)
    return pc.if_else(array.is_valid(), prefixed, pa.scalar(None, digits.type))


def _json(array: pa.Array) -> pa.Array:
    """JSON of any array, null where it is null."""
    arrow = array.type
    if pa.types.is_struct(arrow):
        shown = _json_objects(array)
    elif _is_list(arrow):
        shown = _json_lists(array, _json_or_null(array.flatten()))
    elif pa.types.is_map(arrow):
        keys, items = _entries(array)
        entries = _joined(json_strings(_text(keys)), _piece(":"), _json_or_null(items))
        shown = _json_lists(array, entries, "{}")
    elif pa.types.is_boolean(arrow) or pa.types.is_integer(arrow) or pa.types.is_decimal(arrow):
        return _text(array)
    elif pa.types.is_floating(arrow):
        # JSON has no number for what is not finite.
        return pc.if_else(pc.is_finite(array), _text(array), json_strings(_text(array)))
    else:
        return json_strings(_text(array))
    return pc.if_else(array.is_valid(), shown, pa.scalar(None, pa.large_string()))


def _json_or_null(array: pa.Array) -> pa.Array:
    return pc.fill_null(_json(array), "null")


def _json_objects(array: pa.Array) -> pa.Array:
    if not array.type.num_fields:
        return pa.repeat(pa.scalar("{}", pa.large_string()), len(array))
    pieces: list[Any] = []
    for place, (field, values) in enumerate(zip(array.type, array.flatten(), strict=True)):
        name = json_strings(pa.array([field.name], pa.large_string()))[0].as_py()
        pieces += [_piece(("," if place else "{") + name + ":"), _json_or_null(values)]
    return _joined(*pieces, _piece("}"))


def _json_lists(array: pa.Array, items: pa.Array, marks: str = "[]") -> pa.Array:
    """The items of each list joined; `items` are those of all lists that are not null."""
    lengths = pc.fill_null(_lengths(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), items)
    return _joined(_piece(marks[0]), pc.binary_join(lists, _piece(",")), _piece(marks[1]))


def _lengths(array: pa.Array) -> pa.Array:
    return pc.list_value_length(_as_list(array))


def _as_list(array: pa.Array) -> pa.Array:
    """A map as the list of its entries, which more functions know."""
    if not pa.types.is_map(array.type):
        return array
    entry = pa.struct([array.type.key_field, array.type.item_field])
    return array.cast(pa.list_(pa.field("entries", entry, nullable=False)))


def _entries(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The keys and items of all maps that are not null."""
    keys, items = _as_list(array).flatten().flatten()
    return keys, items


def _piece(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _joined(*pieces: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*pieces, _piece(""))


# --- values in a table's column ---------------------------------------------------------------


def _cast(array: pa.Array, name: str, kind: IcebergType, arrow: pa.DataType) -> pa.Array:
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), arrow)
    if isinstance(kind, StringType):
        return _text(array).cast(arrow)
    if _is_text(array.type):
        return cast_text(array.cast(pa.string()), name, kind, arrow)
    if isinstance(kind, StructType | ListType | MapType):
        return _cast_nested(array, name, kind, arrow)
    if array.type == arrow:
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    steps: Sequence[tuple[bool, Callable[[], pa.Array]]] = (
        (pa.types.is_integer(array.type), lambda: _cast_whole(array, kind, arrow)),
        (pa.types.is_floating(array.type), lambda: _cast_float(array, kind, arrow)),
        (pa.types.is_decimal(array.type), lambda: _cast_decimal(array, name, kind, arrow)),
        (_is_bytes(array.type), lambda: _cast_bytes(array, kind, arrow)),
        (pa.types.is_timestamp(array.type), lambda: _cast_timestamp(array, arrow)),
        (pa.types.is_time(array.type), lambda: _cast_time(array, kind, arrow)),
    )
    for fits, convert in steps:
        if fits:
            return convert()
    raise ValueError("types do not go together")


def _refuse_unless(fits: bool) -> None:
    if not fits:
        raise ValueError("types do not go together")


def _cast_whole(array: pa.Array, kind: IcebergType, arrow: pa.DataType) -> pa.Array:
    _refuse_unless(isinstance(kind, IntegerType | LongType | FloatType | DoubleType | DecimalType))
    if isinstance(kind, DecimalType):
        wide = pa.decimal128(DECIMAL_DIGITS_MAX, min(kind.scale, _LONG_DIGITS))
        return pc.cast(pc.cast(array.cast(pa.int64()), wide), arrow, safe=True)
    return pc.cast(array, arrow, safe=True)


def _cast_float(array: pa.Array, kind: IcebergType, arrow: pa.DataType) -> pa.Array:
    _refuse_unless(isinstance(kind, IntegerType | LongType | FloatType | DoubleType))
    found = pc.cast(array, arrow, safe=True)
    back = pc.cast(found, array.type)
    same = pc.or_(pc.equal(back, array), pc.and_(pc.is_nan(back), pc.is_nan(array)))
    _refuse_unless(bool(pc.all(same, min_count=0).as_py()))
    return found


def _cast_decimal(array: pa.Array, name: str, kind: IcebergType, arrow: pa.DataType) -> pa.Array:
    if isinstance(kind, FloatType | DoubleType):
        return cast_text(pc.cast(array, pa.string()), name, kind, arrow)
    _refuse_unless(isinstance(kind, IntegerType | LongType | DecimalType))
    return pc.cast(array, arrow, safe=True)


def _cast_bytes(array: pa.Array, kind: IcebergType, arrow: pa.DataType) -> pa.Array:
    _refuse_unless(isinstance(kind, BinaryType | FixedType | UUIDType))
    if isinstance(arrow, pa.BaseExtensionType):
        storage = array.cast(arrow.storage_type)
        return pa.ExtensionArray.from_storage(arrow, storage)
    return array.cast(arrow)


def _cast_timestamp(array: pa.Array, arrow: pa.DataType) -> pa.Array:
    # An instant is no reading of a clock on a wall, nor the other way round.
    _refuse_unless(pa.types.is_timestamp(arrow) and (arrow.tz is None) == (array.type.tz is None))
    return pc.cast(array, arrow, safe=True)


def _cast_time(array: pa.Array, kind: IcebergType, arrow: pa.DataType) -> pa.Array:
    _refuse_unless(isinstance(kind, TimeType))
    return pc.cast(array, arrow, safe=True)


def _cast_nested(
    array: pa.Array, name: str, kind: StructType | ListType | MapType, arrow: pa.DataType
) -> pa.Array:
    if isinstance(kind, StructType):
        _refuse_unless(pa.types.is_struct(array.type))
        return _cast_structs(array, name, kind, arrow)
    mask = pa.array(_mask(array))
    lengths = pc.fill_null(_lengths(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if isinstance(kind, ListType):
        _refuse_unless(_is_list(array.type))
        items = _cast(array.flatten(), f"{name}.element", kind.element_type, arrow.value_type)
        make = pa.LargeListArray if pa.types.is_large_list(arrow) else pa.ListArray
        offsets_of = offsets if pa.types.is_large_list(arrow) else offsets.astype(np.int32)
        return make.from_arrays(pa.array(offsets_of), items, type=arrow, mask=mask)
    _refuse_unless(pa.types.is_map(array.type))
    inside = _entries(array)
    keys = _cast(inside[0], f"{name}.key", kind.key_type, arrow.key_type)
    values = _cast(inside[1], f"{name}.value", kind.value_type, arrow.item_type)
    return pa.MapArray.from_arrays(
        pa.array(offsets.astype(np.int32)), keys, values, type=arrow, mask=mask
    )


def _cast_structs(array: pa.Array, name: str, kind: StructType, arrow: pa.DataType) -> pa.Array:
    members = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
    wanted = {field.name for field in kind.fields}
    # What is always null is in no table's column; all else must have its place.
    _refuse_unless(
        all(key in wanted or pa.types.is_null(each.type) for key, each in members.items())
    )
    nothing = pa.nulls(len(array))
    columns = [
        _cast(
            members.get(field.name, nothing),
            f"{name}.{field.name}",
            field.field_type,
            arrow.field(field.name).type,
        )
        for field in kind.fields
    ]
    return pa.Array.from_buffers(arrow, len(array), [validity(~_mask(array))], children=columns)
