"""Whose an Iceberg table is: it says so itself, in a property.

`icestream.owner` names the pipeline and the source table that feed a table. It is set when a table
is created, and in the same swap as the claim when a table is adopted or an earlier version made
it; so of two pipelines that want one table only one gets it. Tables of earlier versions have only
a pipeline's tag: the pipeline is known then, the source table is not.

A table that says nothing is a stranger's. Only one that the configuration names is adopted. An
empty property says that a table was given away: it is nobody's, whatever tags it has.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from icestream import dead_letters
from icestream.errors import ConfigInvalid
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import FileClosed
from icestream.iceberg.handle import TableName
from icestream.iceberg.head import TableHead
from icestream.iceberg.table import OWNER_PROPERTY, Table
from icestream.names import TableNames


class TableRefused(ConfigInvalid):
    """A table that this pipeline must not write to; `reason` is said of a record."""

    reason = "its table belongs to someone else"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOwner:
    """Who feeds a table; the source table is None where only the pipeline is known."""

    pipeline: str
    table: str | None = None

    def to_text(self) -> str:
        """The owner as the property has it."""
        return json.dumps({"pipeline": self.pipeline, "table": self.table}, ensure_ascii=False)

    def __str__(self) -> str:
        who = f"pipeline {self.pipeline}" if self.pipeline else "someone unknown"
        return f"{who}, source table {self.table}" if self.table else who


def owner_of(handle: Table) -> TableOwner | None:
    """Who feeds a table, as it was seen last; None when it is nobody's."""
    text = handle.owner()
    if text is not None:
        return _parsed(text)
    pipelines = handle.pipelines()
    return TableOwner(pipeline=pipelines[0]) if pipelines else None


def _parsed(text: str) -> TableOwner | None:
    if not text.strip():
        return None
    try:
        document = json.loads(text)
        return TableOwner(pipeline=str(document["pipeline"]), table=str(document["table"]))
    except (ValueError, TypeError, KeyError):
        # Whatever it means, it is not ours.
        return TableOwner(pipeline="")


def refuse_stranger(
    name: TableName, found: TableOwner | None, mine: TableOwner, names: TableNames
) -> None:
    """Raise `TableRefused` unless a table is the source table's own, or free and asked for."""
    table = mine.table or ""
    elsewhere = f"Give source table {table} another name with {names.option(table)}."
    if found is None:
        if not names.chosen(table):
            raise _not_asked_for(name, table, names)
        return
    given_away = (
        f"run `ALTER TABLE {name} SET TBLPROPERTIES ('{OWNER_PROPERTY}' = '')` and name the table: "
        f"{names.option(table, name.name)}."
    )
    if found.pipeline != mine.pipeline:
        raise _refused(
            f"table {name} belongs to someone else",
            f"It is fed by {found}. Source table {table} of pipeline {mine.pipeline} would go into "
            "it, too.",
            f"{elsewhere} If nobody feeds it any more, {given_away}",
            f"table {name} belongs to {found}",
        )
    if found.table not in (None, table):
        raise _refused(
            "two source tables go into one Iceberg table",
            f"Table {name} is fed by {found.table}; {table} would go into it, too.",
            f"{elsewhere} If {found.table} is no more, {given_away}",
            f"table {name} is fed by source table {found.table}",
        )


def _not_asked_for(name: TableName, table: str, names: TableNames) -> TableRefused:
    if table.endswith(dead_letters.SUFFIX):
        owner = table.removesuffix(dead_letters.SUFFIX)
        hint = f"Rename or drop it, or give source table {owner} another name with "
        hint += f"{names.option(table)}."
    else:
        hint = f"To write into it, name it: {names.option(table, name.name)}. To leave it alone, "
        hint += "write another name there."
    return _refused(
        f"table {name} is there already and is not this pipeline's",
        f"Source table {table} would go into it only because the names are the same.",
        hint,
        f"table {name} was made by someone else",
    )


def _refused(message: str, detail: str, hint: str, reason: str) -> TableRefused:
    refused = TableRefused(message, detail=detail, hint=hint)
    refused.reason = reason
    return refused


class TableToClaim:
    """A table during its claim: the owner is checked on, and set in, what is swapped."""

    def __init__(self, handle: Table, mine: TableOwner, names: TableNames):
        self.name = handle.name
        self._handle = handle
        self._mine = mine
        self._names = names

    def head(self, pipeline: str, branch: str) -> TableHead:
        """Fresh metadata of a table that may be claimed."""
        head = self._handle.head(pipeline, branch)
        found = owner_of(self._handle)
        if self._mine.table is not None:
            refuse_stranger(self.name, found, self._mine, self._names)
        return head

    def publish(
        self, head: TableHead, branch: str, files: Sequence[FileClosed], entries: summaries.Entries
    ) -> int:
        """Publish the claim, and in the same swap whose the table is."""
        if self._mine.table is not None:
            owner = {OWNER_PROPERTY: self._mine.to_text()}
            entries = replace(entries, properties={**entries.properties, **owner})
        return self._handle.publish(head, branch, files, entries)
