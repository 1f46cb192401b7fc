"""Values of rows in forms that Spark compares by their bits, and hashes of whole rows.

Spark takes both zeros for one, cannot compare maps, and passes over nulls where it hashes. Two rows
that a reader can tell apart must not look alike here.
"""

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

HASHES = ("h1", "h2", "h3")
_LOW_BITS = 0xFFFF_FFFF
_BITS = 62
FLOATS = T.FloatType | T.DoubleType


def row_hashes(rows: DataFrame, places: Sequence[str], named: Column) -> list[Column]:
    """Three hashes of 32 bits: sums of them over any number of rows do not overflow.

    Spark's hash functions pass over nulls, so that (null, x) and (x, null) hash alike, and lists
    run into one another: nulls and lengths are hashed as well. The hashes are zero where only the
    identifier of a row is known (`named`): it never cancels a real row.
    """
    kinds = {field.name: field.dataType for field in rows.schema.fields}
    values = [(F.col(place), kinds[place]) for place in places if place in kinds]
    nested = [isinstance(kind, T.ArrayType | T.MapType | T.StructType) for _, kind in values]
    told = [
        _told(comparable_form(value, kind), _comparable_kind(kind))
        if deep
        else comparable_form(value, kind)
        for (value, kind), deep in zip(values, nested, strict=True)
    ]
    plain = [value for (value, _), deep in zip(values, nested, strict=True) if not deep]
    for start in range(0, len(plain), _BITS):
        bits = [
            F.when(value.isNull(), F.lit(1 << place)).otherwise(F.lit(0)).cast("long")
            for place, value in enumerate(plain[start : start + _BITS])
        ]
        told.append(reduce(Column.bitwiseOR, bits))
    whole, other = F.xxhash64(*told), F.hash(*told)
    parts = [
        F.shiftrightunsigned(whole, 32),
        whole.bitwiseAND(F.lit(_LOW_BITS)),
        other.cast("long").bitwiseAND(F.lit(_LOW_BITS)),
    ]
    return [
        F.when(named, F.lit(0).cast("long")).otherwise(part).alias(name)
        for name, part in zip(HASHES, parts, strict=True)
    ]


def _told(value: Column, kind: T.DataType) -> Column:
    """The value with its nulls and lengths spelled out, for hashing."""
    if isinstance(kind, T.ArrayType):
        each = F.transform(value, lambda item: _told(item, kind.elementType))
        return F.struct(value.isNull(), F.size(value), each)
    if isinstance(kind, T.StructType):
        inner = (_told(value.getField(field.name), field.dataType) for field in kind.fields)
        return F.struct(value.isNull(), *inner)
    return F.struct(value.isNull(), value)


def is_negative_zero(value: Column) -> Column:
    """Whether it is -0.0, which Spark groups and hashes as 0.0."""
    return F.coalesce((value == 0) & value.cast("string").startswith("-"), F.lit(False))


def comparable_form(value: Column, kind: T.DataType) -> Column:
    """The value in a form that can be compared by its bits and hashed.

    Maps and variants cannot, and both zeros would be one.
    """
    if _is_comparable(kind):
        return value
    if isinstance(kind, FLOATS):
        return F.struct(value.alias("value"), is_negative_zero(value).alias("negative"))
    if isinstance(kind, T.MapType):
        entries = F.transform(
            F.map_entries(value),
            lambda entry: F.struct(
                entry.getField("key").alias("key"),
                comparable_form(entry.getField("value"), kind.valueType).alias("value"),
            ),
        )
        return F.array_sort(entries)
    if isinstance(kind, T.ArrayType):
        return F.transform(value, lambda each: comparable_form(each, kind.elementType))
    if isinstance(kind, T.StructType):
        inner = F.struct(
            *(
                comparable_form(value.getField(field.name), field.dataType).alias(field.name)
                for field in kind.fields
            )
        )
        return F.when(value.isNotNull(), inner)
    return F.to_json(value)


def _comparable_kind(kind: T.DataType) -> T.DataType:
    """The type of what `comparable_form` makes of a value."""
    if _is_comparable(kind):
        return kind
    if isinstance(kind, FLOATS):
        return T.StructType().add("value", kind).add("negative", T.BooleanType())
    if isinstance(kind, T.MapType):
        entry = T.StructType().add("key", kind.keyType)
        return T.ArrayType(entry.add("value", _comparable_kind(kind.valueType)))
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_comparable_kind(kind.elementType))
    if isinstance(kind, T.StructType):
        fields = [T.StructField(each.name, _comparable_kind(each.dataType)) for each in kind.fields]
        return T.StructType(fields)
    return T.StringType()


def _is_comparable(kind: T.DataType) -> bool:
    if isinstance(kind, T.ArrayType):
        return _is_comparable(kind.elementType)
    if isinstance(kind, T.StructType):
        return all(_is_comparable(field.dataType) for field in kind.fields)
    return not isinstance(kind, T.MapType | T.VariantType | FLOATS)
