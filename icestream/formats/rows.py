"""Records of a topic as columns, and what they say, whatever format they are written in.

`Records` is what the client reads. A format turns their values and keys into a `Field` each; an
envelope takes fields apart and says which change each record is (`Rows`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.types import IcebergType

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Some records of one partition, in the order of their offsets.

    `keys` and `values` are binary, null where a record has none; `timestamps` are milliseconds,
    -1 where the broker has none.
    """

    keys: pa.Array
    values: pa.Array
    offsets: Indices
    timestamps: Indices

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, indices: Indices) -> "Records":
        """The records at these places."""
        places = pa.array(indices)
        return Records(
            keys=self.keys.take(places),
            values=self.values.take(places),
            offsets=self.offsets[indices],
            timestamps=self.timestamps[indices],
        )


class Field(Protocol):
    """One value for each of some records. Values know their type, or tell it by what they are."""

    def __len__(self) -> int: ...

    def missing(self) -> Mask:
        """Where a record does not have this field at all."""
        ...

    def null(self) -> Mask:
        """Where the field is missing or null."""
        ...

    def take(self, indices: Indices) -> "Field":
        """The values at these places, in this order."""
        ...

    def where(self, chosen: Mask, other: "Field") -> "Field":
        """Its own values where `chosen`, those of another field of the same records elsewhere."""
        ...

    def without(self, chosen: Mask) -> "Field":
        """Its values, missing where `chosen`; these take no part in anything any more."""
        ...

    def is_any(self, spellings: Sequence[str]) -> Mask:
        """Where a value's text is one of these, found without making the text of them all.

        Blanks inside of arrays and objects do not count.
        """
        ...

    def slim(self, names_max: int) -> tuple["Field", Mask]:
        """The field without objects that have too many names all in all, and which these are."""
        ...

    def members(self) -> Mapping[str, "Field"]:
        """The parts of objects by name; missing where the object is null or lacks the part."""
        ...

    def type(self) -> IcebergType | None:
        """What a new column for these values should be; None when all are null and untyped."""
        ...

    def text(self) -> pa.Array:
        """The values as text, null where the field is null."""
        ...

    def cast(self, name: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
        """The values in the type of a table's column; `SchemaRejected` when one does not fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The changes that records are: for each the record it comes from, what it does, and its row.

    `records` are places in the `Records`, ascending. A delete has the columns that are known of
    its row, at least those of its key. `keys` tells for each column which changes have it in their
    key; records of one topic may belong to several tables, whose keys differ. `withheld` tells for
    each column which changes left its value as it was and did not send it; it is missing there.
    `lost` tells the same of changes for which nobody can know that value.
    """

    records: Indices
    ops: npt.NDArray[np.int8]
    columns: Mapping[str, Field]
    keys: Mapping[str, Mask] = field(default_factory=dict)
    withheld: Mapping[str, Mask] = field(default_factory=dict)
    lost: Mapping[str, Mask] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def key(self) -> Sequence[str]:
        """The columns that all keys have; empty when they do not tell what identifies a row."""
        keyed = np.zeros(len(self.records), dtype=np.bool_)
        for here in self.keys.values():
            keyed |= here
        return [n for n, here in self.keys.items() if here.any() and np.array_equal(here, keyed)]

    def take(self, indices: Indices) -> "Rows":
        """The changes at these places."""
        return replace(
            self,
            records=self.records[indices],
            ops=self.ops[indices],
            columns={name: each.take(indices) for name, each in self.columns.items()},
            keys={name: here[indices] for name, here in self.keys.items()},
            withheld=_any({name: here[indices] for name, here in self.withheld.items()}),
            lost=_any({name: here[indices] for name, here in self.lost.items()}),
        )

    def unsent(self, column: str) -> Mask:
        """Which changes have a value there that was not sent."""
        nowhere = np.zeros(len(self), dtype=np.bool_)
        return self.withheld.get(column, nowhere) | self.lost.get(column, nowhere)


def _any(masks: Mapping[str, Mask]) -> dict[str, Mask]:
    """Those that choose anything."""
    return {name: mask for name, mask in masks.items() if mask.any()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What some records say, and why others say nothing that can be understood.

    `rejected` maps places in the `Records` to the reason; reasons never quote a record.
    """

    rows: Rows
    rejected: Mapping[int, str]
