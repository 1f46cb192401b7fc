"""A change log that a test writes by hand: as files of a changefeed, and as what must come of it.

Values are Python's; the log turns them into JSON as CockroachDB does. What a table must hold is
found by applying the log change by change; nothing of it is icestream's own code.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.captures import FeedFolder

SECOND = 1_000_000_000
Hlc = tuple[int, int]
Row = dict[str, Any]
Key = tuple[Any, ...]

_NUMBER = re.compile(r'"\\u0000([^"]*)"')


def hlc_text(at: Hlc) -> str:
    """A timestamp as CockroachDB prints it."""
    return f"{at[0]}.{at[1]:010d}"


def json_text(value: Any) -> str:
    """JSON as CockroachDB writes it: decimals keep their zeros, what JSON lacks becomes text."""
    return _NUMBER.sub(r"\1", json.dumps(_plain(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        # The mark is taken off again once the text is made: JSON has no literal decimals.
        return f"\0{value}" if value.is_finite() else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, bytes | bytearray):
        return "\\x" + value.hex()
    if isinstance(value, datetime):
        text = value.isoformat()
        return text.replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    return value


def comparable(row: Mapping[str, Any]) -> Row:
    """A row without its nulls and with values that equal themselves."""
    return {name: _equatable(value) for name, value in row.items() if value is not None}


def _equatable(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return value


def by_key(rows: Iterable[Mapping[str, Any]], key: Sequence[str]) -> dict[Key, Row]:
    """Rows by their key; a key that comes twice is an error."""
    found: dict[Key, Row] = {}
    for row in rows:
        at = tuple(_equatable(row[name]) for name in key)
        assert at not in found, f"key {at} is there twice"
        found[at] = comparable(row)
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change; `row` is None for a delete."""

    table: str
    key: Key
    at: Hlc
    row: Row | None
    before: Row | None

    def wrapped(self, with_before: bool = False) -> str:
        """The change in the wrapped envelope."""
        message = {"after": self.row, "key": list(self.key), "updated": hlc_text(self.at)}
        if with_before:
            message["before"] = self.before
        return json_text(message)

    def bare(self) -> str:
        """The change in the bare envelope."""
        meta = {"key": list(self.key), "updated": hlc_text(self.at)}
        return json_text({"__crdb__": meta, **(self.row or {})})


@dataclass(kw_only=True)
class Changelog:
    """Collects changes, writes them as files of a feed, and knows what tables must hold."""

    folder: FeedFolder
    key: Sequence[str] = ("id",)
    with_before: bool = False
    now: int = 1_750_000_000 * SECOND
    log: list[Change] = field(default_factory=list)
    resolved: list[Hlc] = field(default_factory=list)
    _rows: dict[tuple[str, Key], Row] = field(default_factory=dict)
    _pending: list[Change] = field(default_factory=list)

    @staticmethod
    def at(path: Path, **options: Any) -> "Changelog":
        """A log whose feed is written to a folder."""
        return Changelog(folder=FeedFolder(path), **options)

    def put(self, table: str, *rows: Row) -> None:
        """Insert or update rows."""
        for row in rows:
            self._change(table, tuple(row[name] for name in self.key), row)

    def remove(self, table: str, *keys: Any) -> None:
        """Delete rows, there or not; a key of one column may be given as it is."""
        for key in keys:
            self._change(table, key if isinstance(key, tuple) else (key,), None)

    def resolve(self) -> Hlc:
        """Write what was changed as files, one for each table, and then a marker."""
        pending = self.take()
        for table in dict.fromkeys(change.table for change in pending):
            mine = [change for change in pending if change.table == table]
            lines = [change.wrapped(self.with_before) for change in mine]
            self.folder.data(table, lines, min(change.at for change in mine))
        return self.mark()

    def take(self) -> list[Change]:
        """The changes not yet written, for a test that writes them itself before `mark`."""
        pending, self._pending = self._pending, []
        return pending

    def mark(self) -> Hlc:
        """Write a marker for all changes so far."""
        self.now += SECOND
        resolved = (self.now, 0)
        self.folder.resolved(resolved)
        self.resolved.append(resolved)
        return resolved

    def tables(self) -> list[str]:
        """The tables in the order of their first change."""
        return list(dict.fromkeys(change.table for change in self.log))

    def expected(self, table: str, at: Hlc | None = None) -> dict[Key, Row]:
        """The table's rows by key, now or as of a timestamp."""
        rows: dict[Key, Row] = {}
        for change in self.log:
            if change.table != table or (at is not None and change.at > at):
                continue
            key = tuple(_equatable(part) for part in change.key)
            rows.pop(key, None)
            if change.row is not None:
                rows[key] = comparable(change.row)
        return rows

    def published(self, table: str) -> list[Hlc]:
        """The resolved timestamps that bring changes to the table: one snapshot each."""
        times = [change.at for change in self.log if change.table == table]
        bounds = zip([(0, 0), *self.resolved], self.resolved, strict=False)
        return [upper for lower, upper in bounds if any(lower < at <= upper for at in times)]

    def _change(self, table: str, key: Key, row: Row | None) -> None:
        self.now += 1000
        before = self._rows.pop((table, key), None)
        if row is not None:
            self._rows[table, key] = row
        change = Change(table=table, key=key, at=(self.now, 0), row=row, before=before)
        self.log.append(change)
        self._pending.append(change)


def instant(text: str) -> datetime:
    """A moment in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)
