"""What the options of a sink tell a source of the tables that its changes go to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icestream.names import ANY_TABLE, TableNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The names of the tables, the columns that identify their rows, and which records are whose.

    `keys` has those columns by source table, or under `*`, and `key_of_all` those of every table
    that has none there; the source's own key counts where both are empty. `route` has the options
    of a rule by which records of topics belong to tables; None when it is the topic that decides.
    `seen_early` says that what is written can be seen before its epoch is committed.
    """

    names: TableNames = field(default_factory=TableNames)
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    key_of_all: Sequence[str] = ()
    route: Mapping[str, Any] | None = None
    seen_early: bool = False

    def key(self, table: str) -> Sequence[str]:
        """The columns that identify a table's rows; empty when the source's key does."""
        given = self.keys[table] if table in self.keys else self.keys.get(ANY_TABLE, ())
        return given or self.key_of_all
