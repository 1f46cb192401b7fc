"""What a relation message of the stream says of a followed table: its columns, types and key.

The server sends one before a table's first change, and again when the table was altered.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from icestream.errors import SchemaRejected, SourceUnavailable
from icestream.sources.postgres.changes import Relation, RelationColumn, other_identity
from icestream.sources.postgres.run import PostgresRun, made_anew
from icestream.sources.postgres.tables import PgTable, table_name
from icestream.sources.postgres.values.kinds import PgType, in_binary

log = logging.getLogger(__name__)


class TextNeeded(SourceUnavailable):
    """The stream must be read again, as text."""


def relation_of(table: PgTable) -> Relation:
    """A table as the server's catalog describes it."""
    names = [column.name for column in table.columns]
    return Relation(
        table=table.name,
        oid=table.oid,
        columns=table.columns,
        key=[names.index(column) for column in table.key],
    )


def all_in_binary(columns: Sequence[RelationColumn]) -> bool:
    """Whether the stream's binary form has values of all these columns that can be decoded."""
    return all(in_binary(column.type, column.iceberg()) for column in columns)


def described(message: bytes, run: PostgresRun, binary: bool) -> Relation | None:
    """A relation message as the pipeline's table, None for others.

    A table that has another name now is still the one with its oid. Raises `TextNeeded` when the
    stream comes in its binary form and the table has a column that is only decoded as text.
    Thread: that which reads the stream.
    """
    told = _parse(message)
    tables = run.tables.by_name
    table = next((each for each in tables.values() if each.oid == told.oid), None)
    if table is None and told.table in tables:
        raise made_anew(told.table, "The stream goes on with another table of the same name.")
    if table is None:
        return None
    if told.table != table.name:
        log.warning("table %s is called %s now: it is followed as before", table.name, told.table)
    columns = _columns(told, table, run)
    names = [column.name for column in columns]
    missing = [column for column in table.key if column not in names]
    if missing:
        raise SchemaRejected(
            f"table {table.name} lost column {missing[0]} of its key",
            hint="Give the table its key back, or copy it anew under another pipeline.",
        )
    _refuse_other_key(told, table, run)
    if binary and not all_in_binary(columns):
        raise TextNeeded(f"table {table.name} has a type that is read as text")
    return Relation(
        table=table.name,
        oid=told.oid,
        columns=columns,
        key=[names.index(column) for column in table.key],
        to_come=_to_come(table, names, run),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """`sent` are the columns of a row that goes; `in_full` says that these are all, because the
    replica identity is the whole row. `columns` are name, type and typmod of each."""

    oid: int
    table: str
    sent: Sequence[str]
    in_full: bool
    columns: Sequence[tuple[str, int, int]]


def _parse(message: bytes) -> _Message:
    oid = struct.unpack_from(">I", message, 1)[0]
    place = 5

    def text() -> str:
        nonlocal place
        end = message.index(b"\0", place)
        found = message[place:end].decode()
        place = end + 1
        return found

    schema, name = text() or "pg_catalog", text()
    in_full = message[place : place + 1] == b"f"
    count = struct.unpack_from(">h", message, place + 1)[0]
    place += 3
    columns, sent = [], []
    for _ in range(count):
        flagged = message[place] & 1
        place += 1
        column = text()
        kind, typmod = struct.unpack_from(">Ii", message, place)
        place += 8
        columns.append((column, kind, typmod))
        if flagged or in_full:
            sent.append(column)
    table = table_name(schema, name)
    return _Message(oid=oid, table=table, sent=sent, in_full=in_full, columns=columns)


def _columns(told: _Message, table: PgTable, run: PostgresRun) -> list[RelationColumn]:
    types = run.server.tables.kinds_with([kind for _, kind, _ in told.columns])
    declared = {column.name: column.declared for column in table.columns}
    return [
        RelationColumn(
            name=column,
            # A type that was dropped since is known by its text form alone.
            type=types.get(kind) or PgType(oid=kind, name=f"type {kind}"),
            typmod=typmod,
            declared=declared.get(column),
        )
        for column, kind, typmod in told.columns
    ]


def _refuse_other_key(told: _Message, table: PgTable, run: PostgresRun) -> None:
    """Stop when the table's changes name their rows by something else than its key."""
    if not set(table.key) <= set(told.sent):
        raise other_identity(
            table.name, f"Its changes no longer name their row by {', '.join(table.key)}."
        )
    sent = None if told.in_full else told.sent
    reason = run.server.tables.unidentified(table, sent) if table.key else ""
    if reason:
        raise other_identity(table.name, reason)


def _to_come(table: PgTable, names: Sequence[str], run: PostgresRun) -> frozenset[str]:
    """Columns of the table that are younger than a version of it with these columns.

    New columns stand behind all others, and a renamed one stays where it is. So they are
    those behind the version's own, if it still has all of these under their names.
    """
    if list(names) == [column.name for column in table.columns]:
        return frozenset()
    now = run.server.tables.column_names(table.oid)
    if not set(names) <= set(now):
        return frozenset()
    return frozenset(now[1 + max(now.index(name) for name in names) :])
