"""Exact casts from text.

Sources that carry no types (JSON) deliver text. Casting it is exact or refused: a value that does
not fit its column without loss raises `SchemaRejected`, it is never rounded, cut or made null.
"""

import json
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from icestream.errors import SchemaRejected

# Any decimal text of at most this many digits survives the way through the type and back.
_DIGITS_EXACT = {pa.float32(): 6, pa.float64(): 15}
# Leaves that Arrow's JSON reader gets right; it rounds floats and does not know the others.
_READ_BY_ARROW = (
    BooleanType,
    IntegerType,
    LongType,
    DecimalType,
    StringType,
    TimestampType,
    TimestamptzType,
)


def infer_number(text: pa.Array) -> IcebergType:
    """A type that holds these JSON numbers exactly; a guess that later values may refuse.

    Whole numbers are long. A trailing zero after the point (`1.50`) is what a decimal with a fixed
    scale prints and a float never does, so it means decimal; other fractions are double.
    """
    fractional = pc.match_substring_regex(text, r"[.eE]")
    if not pc.any(fractional, min_count=0).as_py():
        longest = pc.max(pc.utf8_length(pc.utf8_ltrim(text, "-"))).as_py() or 0
        return LongType() if longest <= 18 or _fits_long(text) else DecimalType(38, 0)
    if pc.any(pc.match_substring_regex(text, r"\.\d*0$"), min_count=0).as_py():
        fraction = pc.extract_regex(text, r"\.(?P<fraction>\d+)$")
        scale = pc.max(pc.utf8_length(pc.struct_field(fraction, 0))).as_py()
        return DecimalType(38, scale)
    return DoubleType()


def _fits_long(text: pa.Array) -> bool:
    try:
        pc.cast(text, pa.int64())
        return True
    except pa.ArrowInvalid:
        return False


def cast_text(text: pa.Array, column: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    """Text of one column as the table's type; raises `SchemaRejected` when a value does not fit."""
    try:
        return _cast(text, kind, arrow_type)
    except (pa.ArrowInvalid, ValueError, InvalidOperation) as error:
        raise SchemaRejected(
            f"a value of column {column} does not fit its type {kind}",
            # Arrow quotes the value it fails on; rows are nobody's business in a log.
            detail=f"{_failing_rows(text, kind, arrow_type)} of {len(text)} values do not fit.",
            hint=f"Declare the column's type with `columns: {{{column}: ...}}` before the table is "
            "created, or change the table's column to a type that holds the source's values.",
        ) from error


def _failing_rows(text: pa.Array, kind: IcebergType, arrow_type: pa.DataType) -> int:
    """How many values fail, found by halving, at most the first thousand."""
    failing, pending = 0, [text]
    while pending and failing < 1000:
        part = pending.pop()
        try:
            _cast(part, kind, arrow_type)
        except (pa.ArrowInvalid, ValueError, InvalidOperation):
            if len(part) == 1:
                failing += 1
            else:
                half = len(part) // 2
                pending += [part[half:], part[:half]]
    return failing


def _cast(text: pa.Array, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    if isinstance(kind, ListType | MapType | StructType):
        return _nested(text, kind, arrow_type)
    special: dict[type, Callable[[pa.Array, pa.DataType], pa.Array]] = {
        StringType: lambda values, to: values.cast(to),
        FloatType: _exact_floats,
        DoubleType: _exact_floats,
        TimeType: lambda values, to: _times(values),
        UUIDType: lambda values, to: _uuids(values, to),
        BinaryType: lambda values, to: _bytes(values).cast(to),
        FixedType: lambda values, to: _bytes(values).cast(to),
    }
    convert = special.get(type(kind))
    return convert(text, arrow_type) if convert else pc.cast(text, arrow_type)


def _exact_floats(text: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    values = pc.cast(text, arrow_type)
    shown = pc.cast(values, pa.string())
    long = pc.greater(pc.utf8_length(text), _DIGITS_EXACT[arrow_type])
    # An exponent leads out of the range that the type has digits for, however short the text is.
    doubtful = pc.or_(long, pc.match_substring_regex(text, "[eE]"))
    differs = pc.and_(doubtful, pc.not_equal(shown, text))
    # The same number has several spellings; only what is spelled otherwise is compared by value.
    for original, shortest in zip(
        text.filter(differs).to_pylist(), shown.filter(differs).to_pylist(), strict=True
    ):
        if Decimal(original).is_finite() and Decimal(original) != Decimal(shortest):
            raise ValueError("a number has more digits than its type keeps")
    return values


def _times(text: pa.Array) -> pa.Array:
    midnight = pa.scalar("1970-01-01T")
    joined = pc.binary_join_element_wise(midnight, text, pa.scalar(""))
    return pc.cast(pc.cast(joined, pa.timestamp("us")), pa.time64("us"))


def _uuids(text: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    digits = pc.replace_substring(text, "-", "")
    lengths = pc.utf8_length(digits)
    if not pc.all(pc.equal(lengths, 32), min_count=0).as_py():
        raise ValueError("a uuid has another length")
    storage = _from_hex(digits).cast(pa.binary(16))
    if isinstance(arrow_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow_type, storage)
    return storage


def _bytes(text: pa.Array) -> pa.Array:
    if not pc.all(pc.starts_with(text, "\\x"), min_count=0).as_py():
        raise ValueError("a binary value does not start with \\x")
    return _from_hex(pc.utf8_slice_codeunits(text, 2))


def _from_hex(digits: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.utf8_length(digits), 0).to_numpy(zero_copy_only=False)
    if (lengths % 2).any():
        raise ValueError("an odd number of hexadecimal digits")
    whole = "".join(pc.fill_null(digits, "").to_pylist())
    content = bytes.fromhex(whole)
    if 2 * len(content) != len(whole):
        raise ValueError("blanks between hexadecimal digits")
    offsets = np.zeros(len(digits) + 1, dtype=np.int32)
    np.cumsum(lengths // 2, out=offsets[1:])
    mask = pc.is_null(digits)
    values = pa.Array.from_buffers(
        pa.binary(), len(digits), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )
    return pc.if_else(mask, pa.scalar(None, pa.binary()), values)


def _nested(text: pa.Array, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    """JSON text of lists, maps and structs."""
    if not _read_by_arrow(kind):
        return _assembled([_loads(each) for each in text.to_pylist()], kind, arrow_type)
    if len(text) == 0:
        return pa.array([], arrow_type)
    lines = pc.binary_join_element_wise(
        pa.scalar('{"v":'), pc.fill_null(text, "null"), pa.scalar("}\n"), pa.scalar("")
    )
    content = "".join(lines.to_pylist()).encode()
    plain = _small(arrow_type)
    parsed = pajson.read_json(
        pa.py_buffer(content),
        read_options=pajson.ReadOptions(block_size=max(len(content), 1)),
        parse_options=pajson.ParseOptions(
            explicit_schema=pa.schema([("v", plain)]), unexpected_field_behavior="error"
        ),
    )
    return parsed.column("v").combine_chunks().cast(arrow_type)


def _read_by_arrow(kind: IcebergType) -> bool:
    if isinstance(kind, ListType):
        return _read_by_arrow(kind.element_type)
    if isinstance(kind, StructType):
        return all(_read_by_arrow(field.field_type) for field in kind.fields)
    return isinstance(kind, _READ_BY_ARROW)


def _loads(text: str | None) -> Any:
    """A JSON value whose numbers are the digits as they were written."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return dict(pairs)

    if text is None:
        return None
    return json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=distinct)


def _assembled(values: Sequence[Any], kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
    """A column put together from its leaves, each of which is cast as a column of its own."""
    if isinstance(kind, StructType):
        return _assembled_structs(values, kind, arrow_type)
    if isinstance(kind, ListType | MapType):
        return _assembled_lists(values, kind, arrow_type)
    _refuse_unless(all(value is None or isinstance(value, str | bool) for value in values))
    texts = [str(value).lower() if isinstance(value, bool) else value for value in values]
    return _cast(pa.array(texts, pa.string()), kind, arrow_type)


def _assembled_structs(
    values: Sequence[Any], kind: StructType, arrow_type: pa.DataType
) -> pa.Array:
    names = {field.name for field in kind.fields}
    _refuse_unless(all(v is None or (isinstance(v, dict) and v.keys() <= names) for v in values))
    columns = [
        _assembled(
            [None if value is None else value.get(field.name) for value in values],
            field.field_type,
            arrow_type.field(field.name).type,
        )
        for field in kind.fields
    ]
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(arrow_type), mask=missing)


def _assembled_lists(
    values: Sequence[Any], kind: ListType | MapType, arrow_type: pa.DataType
) -> pa.Array:
    wanted = list if isinstance(kind, ListType) else dict
    _refuse_unless(all(value is None or isinstance(value, wanted) for value in values))
    missing = pa.array([value is None for value in values], pa.bool_())
    offsets = np.cumsum([0, *(len(value or ()) for value in values)])
    flat = [item for value in values for item in value or ()]
    if isinstance(kind, ListType):
        items = _assembled(flat, kind.element_type, arrow_type.value_type)
        array = pa.LargeListArray if pa.types.is_large_list(arrow_type) else pa.ListArray
        return array.from_arrays(offsets, items, type=arrow_type, mask=missing)
    keys = _assembled(flat, kind.key_type, arrow_type.key_type)
    under = [item for value in values for item in (value or {}).values()]
    items = _assembled(under, kind.value_type, arrow_type.item_type)
    return pa.MapArray.from_arrays(offsets, keys, items, type=arrow_type, mask=missing)


def _refuse_unless(fits: bool) -> None:
    if not fits:
        raise ValueError("a value has another shape than its type")


def _small(kind: pa.DataType) -> pa.DataType:
    """What Arrow's JSON reader is asked for: it knows neither large nor extension types.

    Timestamps are read as text: it would shift those with a zone and give a zone to others, where
    the cast refuses them.
    """
    if pa.types.is_large_string(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(pa.field("element", _small(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _small(field.type)) for field in kind])
    return kind
