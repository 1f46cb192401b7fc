"""Rows without a column that the select of their table names.

    {"id": 1, "region": "eu"}     select ... where region = 'eu'
    {"id": 1, "area": "eu"}       no null stands in for `region`: the pipeline stops

A source that sends whole rows leaves out a column only where the table has none: it was renamed or
dropped, or the row is older than the column. In a table's first epoch the latter is believed, as
far as what is read does not show otherwise. A column whose type is declared may be absent.

A split may have only rows from before a rename, and another only rows from after it: what each has
seen of a first epoch is brought together before the epoch is committed (`refuse_gone`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from icestream.errors import SchemaRejected
from icestream.schema import Reads

Mask = npt.NDArray[np.bool_]

_DECLARE = (
    "Name it in the select as the source does now. If rows with and without it are to come, "
    "declare it in the source's `columns`, such as `columns: {{{table}: {{{column}: string}}}}`: "
    "it is then null where it is absent, as in `coalesce(new_name, old_name)`."
)


def gone(table: str, column: str, hint: str = _DECLARE) -> SchemaRejected:
    """The error for rows that lack a column."""
    return SchemaRejected(
        f"the transform of table {table} reads column {column}, which rows of the table come "
        "without",
        detail="The column was renamed or dropped at the source, or rows from before it was there "
        "are read. Null in its place would take rows out of the table, or values out of rows.",
        hint=hint.format(table=table, column=column),
    )


@dataclass(slots=True)
class Seen:
    """What was read of a table's first epoch, of rows with a column and of rows without it."""

    names_with: set[str] = field(default_factory=set)
    names_without: set[str] = field(default_factory=set)
    first_with: dict[str, int] = field(default_factory=dict)
    last_without: dict[str, int] = field(default_factory=dict)

    def renamed_or_dropped(self) -> bool:
        """Whether rows without the column have one that the others lack, or are later."""
        if self.names_with and self.names_without - self.names_with:
            return True
        return any(at > self.first_with.get(g, at) for g, at in self.last_without.items())

    def add(self, other: "Seen") -> None:
        """Take in what was seen elsewhere."""
        self.names_with |= other.names_with
        self.names_without |= other.names_without
        for group, first in other.first_with.items():
            self.first_with[group] = min(first, self.first_with.get(group, first))
        for group, last in other.last_without.items():
            self.last_without[group] = max(last, self.last_without.get(group, last))


# By table and named column.
ColumnsSeen = Mapping[tuple[str, str], Seen]


def refuse_gone(splits: Iterable[ColumnsSeen]) -> None:
    """Refuse rows of a first epoch as a single split with all of them would."""
    together: dict[tuple[str, str], Seen] = {}
    for seen in splits:
        for place, each in seen.items():
            together.setdefault(place, Seen()).add(each)
    for (table, column), each in sorted(together.items(), key=lambda item: item[0]):
        if each.renamed_or_dropped():
            raise gone(table, column)


class NamedColumns:
    """Looks at the rows of one table that a worker reads."""

    def __init__(self, table: str, reads: Reads | None, declared: Collection[str] = ()):
        self._table = table
        self._wanted = sorted(reads.named.difference(declared)) if reads else []
        self._seen = {name: Seen() for name in self._wanted} if reads and reads.beginning else {}

    @property
    def seen(self) -> ColumnsSeen:
        """What was seen of the table's first epoch; empty in others."""
        return {(self._table, name): seen for name, seen in self._seen.items()}

    def lacking(self, present: Mapping[str, Mask], rows: Mask) -> dict[str, npt.NDArray[np.int64]]:
        """The places of rows without a named column, by the column."""
        masks = {name: rows & ~present[name] if name in present else rows for name in self._wanted}
        return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}

    def look(
        self,
        present: Mapping[str, Mask],
        rows: Mask,
        orders: Mapping[str, npt.NDArray[np.int64]],
    ) -> None:
        """Refuse rows without a named column; `present` tells which rows have a column.

        `rows` are those that count. `orders` has a place for each row, by the name of what the
        places are comparable in, such as a partition: the greater place is the later row.
        """
        for name in self._wanted if rows.any() else ():
            without = rows & ~present[name] if name in present else rows
            if name in self._seen:
                seen = self._seen[name]
                seen.add(_seen(present, rows & ~without, without, orders))
                refused = seen.renamed_or_dropped()
            else:
                refused = bool(without.any())
            if refused:
                raise gone(self._table, name)


def _seen(
    present: Mapping[str, Mask],
    having: Mask,
    lacking: Mask,
    orders: Mapping[str, npt.NDArray[np.int64]],
) -> Seen:
    """What rows that have a column, and rows that lack it, tell of it."""
    seen = Seen(
        names_with={name for name, mask in present.items() if (mask & having).any()},
        names_without={name for name, mask in present.items() if (mask & lacking).any()},
    )
    if having.any():
        seen.first_with = {group: int(order[having].min()) for group, order in orders.items()}
    if lacking.any():
        seen.last_without = {group: int(order[lacking].max()) for group, order in orders.items()}
    return seen
