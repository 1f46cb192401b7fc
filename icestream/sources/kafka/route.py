"""Which table, or which tables, a record belongs to.

By its topic; by a field's value and one regular expression per table; by a field that holds the
table's name; or to every table. A record that belongs to none is rejected, unless it is said that
such records are to be dropped: nothing is lost in silence. A delete that has its key and nothing
else goes to every table of the rule, for the row may be in any of them.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from icestream.change import Op
from icestream.errors import ConfigInvalid
from icestream.formats.rows import Field, Indices, Mask, Rows

REJECT = "reject"
DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A rule; without one a record's topic is its table."""

    field: str = ""
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unmatched: str = REJECT

    def __post_init__(self) -> None:
        for table, pattern in self.tables.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigInvalid(
                    f"the pattern of table {table} is not a regular expression",
                    detail=f"{error}.",
                ) from error
        if self.unmatched not in (REJECT, DROP):
            raise ConfigInvalid(f"route.unmatched must be `{REJECT}` or `{DROP}`")

    def by_topic(self) -> bool:
        """Whether the topic alone decides."""
        return not self.field and not self.tables

    def by_records(self) -> bool:
        """Whether records name their tables themselves."""
        return bool(self.field) and not self.tables

    def cut(self, topic: str, rows: Rows) -> Iterator[tuple[str, Rows]]:
        """The rows of each table; a row is in none, one or several of them."""
        if self.by_topic():
            yield topic, rows
        elif not self.field:
            for table in self.tables:
                yield table, rows
        elif len(rows):
            yield from self._by_field(rows)

    def strays(self, rows: Rows) -> Indices:
        """The places of rows that belong to no table."""
        if not self.field or self.unmatched == DROP or not len(rows):
            return np.zeros(0, dtype=np.int64)
        placed = np.zeros(len(rows), dtype=bool)
        for mask in self._masks(rows).values():
            placed |= mask
        return np.flatnonzero(~placed)

    def undecided(self, rows: Rows) -> Indices:
        """The places of rows whose table would be told by a value that was not sent."""
        whole = self.field.partition(".")[0]
        return np.flatnonzero(rows.unsent(self.field) | rows.unsent(whole))

    def _by_field(self, rows: Rows) -> Iterator[tuple[str, Rows]]:
        for table, mask in self._masks(rows).items():
            if mask.all():
                yield table, rows
            elif mask.any():
                yield table, rows.take(np.flatnonzero(mask))

    def _masks(self, rows: Rows) -> dict[str, Mask]:
        """Where the rows of each table are; a value that occurs often is looked at once."""
        found = _at_path(rows.columns, self.field)
        if found is None:
            return dict.fromkeys(self.tables, rows.ops == Op.DELETE)
        values = pc.dictionary_encode(found.text())
        texts = values.dictionary.to_pylist()
        codes = pc.fill_null(values.indices, len(texts)).to_numpy(zero_copy_only=False)
        if not self.tables:
            return {text: codes == code for code, text in enumerate(texts) if text}
        # The last code stands for null, which matches nothing.
        anywhere = (codes == len(texts)) & (rows.ops == Op.DELETE)
        masks = {}
        for table, pattern in self.tables.items():
            matches = [bool(re.search(pattern, text)) for text in texts]
            masks[table] = np.array([*matches, False])[codes] | anywhere
        return masks


def _at_path(columns: Mapping[str, Field], path: str) -> Field | None:
    """The field of that name, or inside objects at a dotted path."""
    if path in columns:
        return columns[path]
    first, _, rest = path.partition(".")
    if not rest or first not in columns:
        return None
    return _at_path(columns[first].members(), rest)
