"""Columns of plain text: values that are no more than the characters they are, and JSON of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import IcebergType, StringType

from icestream.errors import Broken
from icestream.formats.rows import Field, Indices, Mask
from icestream.schema import cast_text

_CONTROLS = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextField:
    """Text, null where a record has none, as a `Field`."""

    array: pa.StringArray

    def __len__(self) -> int:
        return len(self.array)

    def missing(self) -> Mask:
        """Where a record does not have this field at all."""
        return np.asarray(self.array.is_null().to_numpy(zero_copy_only=False))

    def null(self) -> Mask:
        """Where the field is missing, which is the only way for it to be null."""
        return self.missing()

    def take(self, indices: Indices) -> "TextField":
        """The values at these places, in this order."""
        return TextField(array=self.array.take(pa.array(indices)))

    def where(self, chosen: Mask, other: Field) -> "TextField":
        """Its own values where `chosen`, those of another field of the same records elsewhere."""
        if not isinstance(other, TextField):
            raise Broken("fields of one format are mixed with each other alone")
        return TextField(array=pc.if_else(pa.array(chosen), self.array, other.array))

    def without(self, chosen: Mask) -> "TextField":
        """Its values, missing where `chosen`."""
        nothing = pa.scalar(None, self.array.type)
        return TextField(array=pc.if_else(pa.array(chosen), nothing, self.array))

    def is_any(self, spellings: Sequence[str]) -> Mask:
        """Where a value is one of these."""
        same = pc.is_in(self.array, value_set=pa.array(spellings, self.array.type))
        return np.asarray(same.to_numpy(zero_copy_only=False))

    def slim(self, names_max: int) -> tuple["TextField", Mask]:
        """The field as it is: no record has names of its own."""
        return self, np.zeros(len(self), dtype=np.bool_)

    def members(self) -> Mapping[str, "TextField"]:
        """None: text has no parts."""
        return {}

    def type(self) -> IcebergType | None:
        """Text, always."""
        return StringType()

    def text(self) -> pa.Array:
        """The values themselves."""
        return self.array

    def cast(self, name: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
        """The values in the type of a table's column; `SchemaRejected` when one does not fit."""
        return cast_text(self.array, name, kind, arrow_type)


def json_strings(text: pa.Array) -> pa.Array:
    """Texts as JSON strings, in quotes and escaped, as an array of the same type."""
    escaped = pc.replace_substring(text, "\\", "\\\\")
    escaped = pc.replace_substring(escaped, '"', '\\"')
    if pc.any(pc.match_substring_regex(escaped, r"[\x00-\x1f]"), min_count=0).as_py():
        for number in range(0x20):
            mark = chr(number)
            escaped = pc.replace_substring(escaped, mark, _CONTROLS.get(mark, f"\\u{number:04x}"))
    quote, nothing = pa.scalar('"', text.type), pa.scalar("", text.type)
    return pc.binary_join_element_wise(quote, escaped, quote, nothing)
