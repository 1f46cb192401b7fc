"""A changefeed made at random, and what every table must hold at each resolved timestamp.

The oracle applies the change log one by one in plain Python; it shares no code with icestream.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.captures import FeedFolder

SECOND = 1_000_000_000
Hlc = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LoggedChange:
    """One change as the database made it; `row` is None for a delete."""

    table: str
    key: int
    at: Hlc
    row: dict[str, object] | None
    before: dict[str, object] | None

    def line(self, with_before: bool) -> str:
        """The change in the wrapped envelope."""
        message: dict[str, object] = {
            "after": self.row,
            "key": [self.key],
            "updated": f"{self.at[0]}.{self.at[1]:010d}",
        }
        if with_before:
            message["before"] = self.before
        return json.dumps(message)


@dataclass(kw_only=True)
class RandomFeed:
    """Writes epochs of random changes as files: duplicated, unsorted, spread, partly early."""

    folder: FeedFolder
    random: random.Random
    tables: Sequence[str] = ("orders",)
    keys: int = 20
    with_before: bool = False
    now: int = 1_700_000_000 * SECOND
    log: list[LoggedChange] = field(default_factory=list)
    resolved: list[Hlc] = field(default_factory=list)
    _current: dict[tuple[str, int], dict[str, object]] = field(default_factory=dict)
    _early: list[LoggedChange] = field(default_factory=list)

    @staticmethod
    def create(path: Path, seed: int, **options: object) -> "RandomFeed":
        return RandomFeed(
            folder=FeedFolder(path),
            random=random.Random(seed),
            **options,  # type: ignore[arg-type]
        )

    def epoch(self, changes: int) -> Hlc:
        """Write the files of one epoch and then its marker; returns the resolved timestamp."""
        lower = (self.now, 0)
        made = [self._change() for _ in range(changes)]
        self.now += SECOND
        resolved = (self.now, self.random.choice([0, 0, 2147483647]))
        self.now += SECOND
        # Some changes after the resolved timestamp lie in files that come before its marker.
        early = [self._change() for _ in range(self.random.randrange(3))]
        old = self.random.sample(self.log, min(len(self.log), self.random.randrange(4)))
        delivered = [*self._early, *made, *early, *old]
        delivered += self.random.sample(delivered, min(len(delivered), 3))
        self._early = early if self.random.random() < 0.5 else []
        self.random.shuffle(delivered)
        self._write(delivered, lower)
        self.folder.resolved(resolved)
        self.resolved.append(resolved)
        return resolved

    def expected(self, table: str, at: Hlc) -> dict[int, dict[str, object]]:
        """The table's rows by key as of a timestamp."""
        rows: dict[int, dict[str, object]] = {}
        for change in sorted(self.log, key=lambda change: change.at):
            if change.table != table or change.at > at:
                continue
            rows.pop(change.key, None)
            if change.row is not None:
                rows[change.key] = change.row
        return rows

    def published(self, table: str) -> list[Hlc]:
        """The resolved timestamps that bring changes to the table: one snapshot each."""
        bounds = list(zip([(0, 0), *self.resolved], self.resolved, strict=False))
        times = [change.at for change in self.log if change.table == table]
        return [upper for lower, upper in bounds if any(lower < at <= upper for at in times)]

    def _change(self) -> LoggedChange:
        table = self.random.choice(self.tables)
        key = self.random.randrange(self.keys)
        self.now += self.random.randrange(1, 1000)
        row = None
        if self.random.random() < 0.75:
            row = {
                "id": key,
                "region": self.random.choice(["eu", "us", "asia"]),
                "note": self.random.choice(["", 'ä "quoted" \\ text', "plain", None]),
                "amount": self.random.randrange(10**6),
                "ok": self.random.random() < 0.5,
            }
        before = self._current.get((table, key))
        change = LoggedChange(
            table=table, key=key, at=(self.now, self.random.randrange(3)), row=row, before=before
        )
        self._current.pop((table, key), None)
        if row is not None:
            self._current[table, key] = row
        self.log.append(change)
        return change

    def _write(self, changes: Sequence[LoggedChange], lower: Hlc) -> None:
        for table in self.tables:
            lines = [c.line(self.with_before) for c in changes if c.table == table]
            files = self.random.randrange(1, 4)
            for number in range(files):
                part = lines[number::files]
                if part:
                    self.folder.data(table, part, lower)
