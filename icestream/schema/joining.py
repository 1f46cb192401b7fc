"""Columns that were seen in several places, each of a type for all the values seen."""

from collections.abc import Mapping, Sequence

from pyiceberg.types import (
    DecimalType,
    DoubleType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
)

from icestream.schema.columns import Column, TableShape
from icestream.schema.widening import widened

# Pairs of numbers that JSON writes alike.
_FRACTIONS = ({IntegerType, DoubleType}, {LongType, DoubleType}, {DecimalType, DoubleType})


def united(one: IcebergType, other: IcebergType) -> IcebergType:
    """The narrowest type for the values of two types; text when there is no other.

    Whole numbers among fractions are doubles; one that no double holds is refused when it comes.
    """
    if isinstance(one, StructType) and isinstance(other, StructType):
        return _united_structs(one, other)
    if isinstance(one, ListType) and isinstance(other, ListType):
        element = united(one.element_type, other.element_type)
        return ListType(element_id=one.element_id, element_type=element, element_required=False)
    if {type(one), type(other)} in _FRACTIONS:
        return DoubleType()
    return widened(one, other) or widened(other, one) or StringType()


def _united_structs(one: StructType, other: StructType) -> StructType:
    fields = {field.name: field for field in other.fields}
    fields.update({field.name: field for field in one.fields})
    there = {field.name: field.field_type for field in other.fields}
    both = {field.name for field in one.fields} & there.keys()
    # Numbers of fields are the source's own affair; those of two types may clash.
    return StructType(
        *(
            NestedField(
                field_id=number,
                name=name,
                field_type=united(field.field_type, there[name])
                if name in both
                else field.field_type,
                required=False,
            )
            for number, (name, field) in enumerate(fields.items(), start=1)
        )
    )


def joined_shapes(
    one: Mapping[str, TableShape], other: Mapping[str, TableShape]
) -> dict[str, TableShape]:
    """The shapes of tables that rows were seen of in two places."""
    joined = dict(one)
    for table, shape in other.items():
        known = joined.get(table)
        joined[table] = _joined_shape(known, shape) if known else shape
    return joined


def _joined_shape(one: TableShape, other: TableShape) -> TableShape:
    columns = joined_columns(one.columns, other.columns)
    return TableShape(columns=columns, key=one.key or other.key)


def joined_columns(one: Sequence[Column], other: Sequence[Column]) -> list[Column]:
    """Columns that values were seen of in two places, each of a type for all of them."""
    columns = {column.name: column for column in one}
    for column in other:
        known = columns.setdefault(column.name, column)
        if known is column:
            continue
        columns[column.name] = Column(
            name=column.name,
            type=united(known.type, column.type),
            required=known.required and column.required,
            absent=known.absent and column.absent,
        )
    return list(columns.values())
