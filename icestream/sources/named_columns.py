"""Rows without a column that the select of their table names.

    {"id": 1, "region": "eu"}     select ... where region = 'eu'
    {"id": 1, "area": "eu"}       no null stands in for `region`: the pipeline stops

A source that sends whole rows leaves out a column only where the table has none: it was renamed or
dropped, or the row is older than the column. In a table's first epoch the latter is believed, as
far as what is read does not show otherwise. A column whose type is declared may be absent.
"""

from collections.abc import Collection, Mapping
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
class _Seen:
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


class NamedColumns:
    """Looks at the rows of one table that a worker reads."""

    def __init__(self, table: str, reads: Reads | None, declared: Collection[str] = ()):
        self._table = table
        self._wanted = sorted(reads.named.difference(declared)) if reads else []
        self._seen = {name: _Seen() for name in self._wanted} if reads and reads.beginning else {}

    def lacking(self, present: Mapping[str, Mask], rows: Mask) -> dict[str, npt.NDArray[np.int64]]:
        """The places of rows without a named column, by the column."""
        masks = {name: rows & ~present[name] if name in present else rows for name in self._wanted}
        return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}

    def look(
        self,
        present: Mapping[str, Mask],
        rows: Mask,
        order: npt.NDArray[np.int64],
        group: str = "",
    ) -> None:
        """Refuse rows without a named column; `present` tells which rows have a column.

        `rows` are those that count. `order` tells which of a group came later.
        """
        for name in self._wanted if rows.any() else ():
            without = rows & ~present[name] if name in present else rows
            if name in self._seen:
                seen = self._seen[name]
                self._compare(seen, present, (rows & ~without, without), order, group)
                refused = seen.renamed_or_dropped()
            else:
                refused = bool(without.any())
            if refused:
                raise gone(self._table, name)

    def _compare(
        self,
        seen: _Seen,
        present: Mapping[str, Mask],
        rows: tuple[Mask, Mask],
        order: npt.NDArray[np.int64],
        group: str,
    ) -> None:
        having, lacking = rows
        seen.names_with |= {name for name, mask in present.items() if (mask & having).any()}
        seen.names_without |= {name for name, mask in present.items() if (mask & lacking).any()}
        if having.any():
            first = int(order[having].min())
            seen.first_with[group] = min(first, seen.first_with.get(group, first))
        if lacking.any():
            last = int(order[lacking].max())
            seen.last_without[group] = max(last, seen.last_without.get(group, last))
