"""Which Iceberg table a source table goes into: one name each, decided here and nowhere else.

The configuration gives the name, else it is the last part of the source table's name. The way
back, from an Iceberg table to its source table, is never guessed from a name: the table itself
remembers it (`icestream.sinks.iceberg.owners`).

Names become folders, and parts of requests. So a name that leads elsewhere, cannot be written down
or belongs to dead letters is no table's name.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from icestream import dead_letters
from icestream.errors import ConfigInvalid

# What file systems allow for the name of a folder.
NAME_BYTES_MAX = 255
# Options under this name hold for every table that has none of its own.
ANY_TABLE = "*"
_QUOTED_END = re.compile(r'(?:^|\.)"((?:[^"]|"")*)"\Z')
# Folders end at a slash; readers of S3 locations cut them at the other two.
_CUTTING = frozenset("/\\?#")
# Control characters, line and paragraph separators, halves of characters.
_UNWRITABLE = frozenset({"Cc", "Zl", "Zp", "Cs"})


def last_part(table: str) -> str:
    """The table's own name; parts that hold dots stand in quotes."""
    quoted = _QUOTED_END.search(table)
    return quoted[1].replace('""', '"') if quoted else table.rsplit(".", 1)[-1]


def unusable(name: str, bytes_max: int = NAME_BYTES_MAX) -> str | None:
    """Why this cannot be the name of an Iceberg table; None when it can.

    The name itself is not told: it may be the value of a record.
    """
    if not name.strip("."):
        return "the name of its table is empty or consists of dots"
    if name != name.strip():
        return "the name of its table begins or ends with a blank"
    if any(unicodedata.category(character) in _UNWRITABLE for character in name):
        return "the name of its table has a control character or a line break"
    if not _CUTTING.isdisjoint(name):
        return "the name of its table has one of the characters / \\ ? #"
    if len(name.encode()) > bytes_max:
        return f"the name of its table is longer than {bytes_max} bytes"
    if name.endswith(dead_letters.SUFFIX):
        return f"the name of its table ends with {dead_letters.SUFFIX}, as those of dead letters do"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableNames:
    """The mapping of a pipeline; `given` are names by source table, `otherwise` one for all."""

    given: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""

    def of(self, table: str) -> str:
        """The name of a source table's Iceberg table, usable or not."""
        if table.endswith(dead_letters.SUFFIX):
            return dead_letters.table_of(self.of(table.removesuffix(dead_letters.SUFFIX)))
        return self._chosen(table) or last_part(table)

    def chosen(self, table: str) -> bool:
        """Whether the configuration names the Iceberg table itself."""
        return not table.endswith(dead_letters.SUFFIX) and bool(self._chosen(table))

    def unusable(self, table: str) -> str | None:
        """Why a table that records name cannot be; its dead letters need a name as well.

        Some catalogs take no percent sign. The name of a source's own table is tried with it; a
        record's value shall not stop all others.
        """
        room = len(dead_letters.SUFFIX.encode())
        if "%" in self.of(table):
            return "the name of its table has a percent sign"
        if table.endswith(dead_letters.SUFFIX):
            return unusable(table)
        return unusable(self.of(table), NAME_BYTES_MAX - room)

    def by_name(self, tables: Iterable[str]) -> dict[str, str]:
        """Source tables by the names of their Iceberg tables.

        Raises `ConfigInvalid` for a name that cannot be, and for two tables of one name.
        """
        found: dict[str, str] = {}
        for table in sorted(set(tables)):
            name = self.of(table)
            self._refuse_unusable(table, name)
            if name in found:
                raise ConfigInvalid(
                    "two source tables go into one Iceberg table",
                    detail=f"{found[name]}, {table} go into {name}.",
                    hint=f"Give one of them another name with {self.option(table)}.",
                )
            found[name] = table
        return found

    def option(self, table: str, name: str = "<name>") -> str:
        """How the configuration names the Iceberg table of a source table."""
        return f"`tables: {{{table.removesuffix(dead_letters.SUFFIX)}: {{table: {name}}}}}`"

    def _chosen(self, table: str) -> str:
        return self.given.get(table, self.otherwise)

    def _refuse_unusable(self, table: str, name: str) -> None:
        letters = table.endswith(dead_letters.SUFFIX)
        room = len(dead_letters.SUFFIX.encode()) if letters else 0
        reason = unusable(name.removesuffix(dead_letters.SUFFIX), NAME_BYTES_MAX - room)
        if reason is None and not letters:
            reason = unusable(name)
        if reason:
            raise ConfigInvalid(
                f"source table {table!r} cannot become an Iceberg table",
                detail=f"{reason[0].upper()}{reason[1:]}.",
                hint=f"Give it another name with {self.option(table)}, or leave it out.",
            )
