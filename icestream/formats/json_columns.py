"""Types for columns of JSON cells, told by what the cells hold.

A guess that holds every value that was seen, exactly; later values may refuse it. Where values
disagree in kind the column is text, which takes anything.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import (
    BooleanType,
    DecimalType,
    DoubleType,
    IcebergType,
    ListType,
    NestedField,
    StringType,
    StructType,
)

from icestream.formats.json_cells import Cells, Kind, MalformedJson, items, members
from icestream.schema import infer_number

# An object with more names than this has data for names, and is kept as text.
STRUCT_FIELDS_MAX = 1000


def kinds_in(cells: Cells) -> set[int]:
    """The kinds of the cells that are neither null nor missing."""
    counts = np.bincount(cells.kinds, minlength=len(Kind))
    return set(np.flatnonzero(counts).tolist()) - {Kind.MISSING, Kind.NULL}


def infer_type(cells: Cells) -> IcebergType | None:
    """A type for JSON values: None when all are null; text for what is not all of one kind."""
    kinds = kinds_in(cells)
    if not kinds:
        return None
    if kinds <= {Kind.TRUE, Kind.FALSE}:
        return BooleanType()
    if kinds == {Kind.NUMBER}:
        text = cells.text()
        return infer_number(text.filter(pc.is_valid(text)))
    if Kind.NUMBER in kinds and kinds <= {Kind.NUMBER, Kind.STRING}:
        # NaN and the infinities come as strings, in columns of floats and of decimals.
        text = cells.text()
        numbers = text.filter(pa.array(cells.kinds == Kind.NUMBER))
        others = text.filter(pa.array(cells.kinds == Kind.STRING))
        special = pa.array(["NaN", "Infinity", "-Infinity"])
        if pc.all(pc.is_in(others, value_set=special), min_count=0).as_py():
            guess = infer_number(numbers)
            # No decimal holds these; text keeps both them and the digits.
            return StringType() if isinstance(guess, DecimalType) else DoubleType()
    return StringType()


def infer_nested_type(cells: Cells, ids: Iterator[int] | None = None) -> IcebergType | None:
    """As `infer_type`, but objects are structs and arrays are lists.

    An array without a value tells no type for its elements, which are text then. An object without
    one is text itself: Iceberg has no struct without fields.
    """
    ids = ids or itertools.count(1)
    kinds = kinds_in(cells)
    if kinds == {Kind.OBJECT}:
        return _infer_struct(cells, ids)
    if kinds == {Kind.ARRAY}:
        _, flat = items(cells)
        number = next(ids)
        element = infer_nested_type(flat, ids) or StringType()
        return ListType(element_id=number, element_type=element, element_required=False)
    return infer_type(cells)


def _infer_struct(cells: Cells, ids: Iterator[int]) -> IcebergType:
    try:
        parts = members(cells.only(Kind.OBJECT))
    except MalformedJson:
        return StringType()
    if len(parts) > STRUCT_FIELDS_MAX:
        return StringType()
    fields = []
    for name, part in parts.items():
        number = next(ids)
        if (kind := infer_nested_type(part, ids)) is not None:
            fields.append(NestedField(field_id=number, name=name, field_type=kind, required=False))
    return StructType(*fields) if fields else StringType()
