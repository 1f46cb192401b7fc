"""Random changes of tables with selects, and every epoch against the select over the source.

A play sends events of Debezium for three tables through one topic of two partitions, in turn. Two
of the tables have a select. In between columns are renamed, values are not sent, records are
rejected, and runs of the pipeline end anywhere and are followed by others. What a select makes of
the source's rows is worked out in plain Python for every offset, and every snapshot must be that.
All that is chosen comes from the seed:
`python -m tests.integration.select_machine --seed 7 --plays 1`.
"""

import argparse
import copy
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icestream import failpoints
from icestream.errors import SchemaRejected
from icestream.failpoints import FailpointError
from icestream.formats.options import UNAVAILABLE_VALUE
from icestream.spark import session
from tests.integration.pipelines import Document, embedded_catalog
from tests.integration.topics import Topics, created, deleted, updated
from tests.servers import KafkaBroker

RUNS = 3
PARTITIONS = 2
KEYS = 6
TABLES = ("a", "b", "c")
SELECTS = {
    "a": "select id, upper(name) as name, n * 2 as twice, big as large from changes "
    "where state = 'on'",
    "b": "select id, {n} + 1 as following from changes where {n} % 3 <> 0",
}
EITHER = "coalesce(m, n)"
# Where a run of the pipeline may end; a pass beyond the last one lets it go on.
PLACES = (
    failpoints.BEFORE_WRITE,
    failpoints.AFTER_WRITE,
    failpoints.BEFORE_PUBLISH,
    failpoints.AFTER_PUBLISH,
    failpoints.AFTER_COMMIT,
    failpoints.AFTER_CLAIM,
)

Row = dict[str, Any]
# By table and id.
State = dict[str, dict[int, Row]]


class Wrong(AssertionError):
    """A table does not hold what its select makes of the source."""


def selected(table: str, rows: dict[int, Row]) -> dict[int, Row]:
    """What must be in the lake: the select, said once more."""
    if table == "a":
        return {
            key: {
                "id": key,
                "name": row["name"] and row["name"].upper(),
                "twice": row["n"] * 2,
                "large": row["big"],
            }
            for key, row in rows.items()
            if row["state"] == "on"
        }
    if table == "b":
        return {
            key: {"id": key, "following": row["n"] + 1} for key, row in rows.items() if row["n"] % 3
        }
    return {key: {name: row[name] for name in ("id", "n", "big")} for key, row in rows.items()}


@dataclass(kw_only=True)
class Play:
    """One topic, the source's rows, and a pipeline that is started again and again."""

    topics: Topics
    name: str
    random: random.Random
    story: list[str] = field(default_factory=list)
    rows: State = field(default_factory=lambda: {table: {} for table in TABLES})
    # The source's rows of each partition after each of its events.
    history: list[list[State]] = field(default_factory=list)
    note: str = "note"
    renamed: bool = False
    # Rows of `b` were sent that lack the column which its select names.
    gone: bool = False
    either: bool = False
    letters: Counter[str] = field(default_factory=Counter)
    compared: set[int] = field(default_factory=set)
    checks: int = 0

    def run(self) -> str:
        """Play; returns what happened, raises `Wrong` when a table is."""
        self.topics.create(self.name, PARTITIONS)
        self.history = [[copy.deepcopy(self.rows)] for _ in range(PARTITIONS)]
        self._send([self._put(table, key) for table in TABLES for key in range(3)])
        # The types of columns are told by what comes first: there, nothing is rejected.
        self._follow(unharmed=True)
        for _ in range(RUNS):
            self._burst()
            self._follow()
        # Whatever ended the last run, the next one brings everything.
        self._follow(unharmed=True)
        self._compare_letters()
        return f"{self.checks} checks: {' '.join(self.story)}"

    # What happens at the source.

    def _burst(self) -> None:
        events = []
        for _ in range(self.random.randrange(5, 25)):
            if self.random.random() < 0.06:
                self.note = f"note{self.random.randrange(100)}"
                self.story.append("rename")
            if not self.renamed and self.random.random() < 0.03:
                self.renamed = True
                self.story.append("rename-named")
            events.append(self._event())
        self._send(events)

    def _event(self) -> tuple[Any, Any]:
        table, key = self.random.choice(TABLES), self.random.randrange(KEYS)
        there = self._id(table, key) in self.rows[table]
        if there and self.random.random() < 0.2:
            return self._remove(table, key)
        if self.random.random() < 0.08 and not (table == "b" and self.renamed):
            return self._reject(table, key)
        return self._put(table, key)

    def _put(self, table: str, key: int) -> tuple[Any, Any]:
        number = self._id(table, key)
        before = self.rows[table].get(number)
        row: Row = {
            "id": number,
            "kind": table,
            # A column that began with nulls alone would have no type.
            "name": self.random.choice(["ada", "Änne", *([None] if before else [])]),
            "n": self.random.randrange(9),
            "state": self.random.choice(["on", "on", "off"]),
            "big": f"{self.random.randrange(10**6)}" * 3,
            self.note: "x",
        }
        sent = dict(row)
        if self._may_withhold(table, before) and self.random.random() < 0.4:
            assert before is not None
            row["big"] = before["big"]
            sent["big"] = UNAVAILABLE_VALUE
        if table == "b" and self.renamed:
            sent["m"] = sent.pop("n")
            self.gone |= not self.either
        self.rows[table][number] = row
        return self._noted(number, (updated if before else created)(**_named(sent)))

    def _may_withhold(self, table: str, before: Row | None) -> bool:
        # The lake has no value of a row that the select of `a` leaves out; that of `b` reads none.
        return before is not None and (table != "a" or before["state"] == "on")

    def _remove(self, table: str, key: int) -> tuple[Any, Any]:
        number = self._id(table, key)
        del self.rows[table][number]
        return self._noted(number, deleted(number))

    def _reject(self, table: str, key: int) -> tuple[Any, Any]:
        """A record that no table takes: its row stays as it was."""
        number = self._id(table, key)
        self.letters[table] += 1
        wrong = {"id": number, "kind": table, "name": "x", "n": "text", "state": "on", "big": "y"}
        return self._noted(number, updated(**_named(wrong)))

    def _noted(self, number: int, event: tuple[Any, Any]) -> tuple[Any, Any]:
        self.history[number % PARTITIONS].append(copy.deepcopy(self.rows))
        return event

    def _id(self, table: str, key: int) -> int:
        return 100 * TABLES.index(table) + key

    def _send(self, events: Sequence[tuple[Any, Any]]) -> None:
        for partition in range(PARTITIONS):
            own = [event for event in events if event[0]["id"] % PARTITIONS == partition]
            self.topics.send(self.name, own, partition)

    # What the pipeline does.

    def _follow(self, unharmed: bool = False) -> None:
        """One run, which may be ended anywhere, and the snapshots that it leaves."""
        place, after = self.random.choice(PLACES), self.random.randrange(1, 5)
        harm = not unharmed and self.random.random() < 0.6
        try:
            with ended_at(f"{place}=error@{after}" if harm else ""):
                self.topics.run(self._document())
            self.story.append("run")
            if self.gone and not self.either:
                raise Wrong(f"rows without a named column passed: {' '.join(self.story)}")
        except FailpointError:
            self.story.append(f"{place}@{after}")
        except SchemaRejected as error:
            if not self.gone or self.either or "reads column n, which" not in str(error):
                raise
            self.story.append("stopped")
            self.either = True
            self._compare()
            self._follow(unharmed)
        self._compare()

    def _document(self) -> Document:
        texts = {
            table: text.format(n=EITHER if self.either else "n") for table, text in SELECTS.items()
        }
        source: Row = {
            "topics": [self.name],
            "value": {"format": "json", "envelope": "debezium"},
            "keyed": True,
        }
        if self.either:
            source["columns"] = {"b": {"n": "long", "m": "long"}}
        tables = {table: f"^{table}$" for table in TABLES}
        sink = {"namespace": self.name, "route": {"field": "kind", "tables": tables}}
        return self.topics.document(
            source,
            sink,
            transform=texts,
            on_error="dead_letter",
            epoch_rows_max=self.random.choice([8, 20, 1000]),
        )

    # What must be in the lake.

    def _compare(self) -> None:
        for table in TABLES:
            for snapshot in self._epochs(table):
                number = snapshot["snapshot_id"]
                if number not in self.compared:
                    self.compared.add(number)
                    self._compare_one(table, snapshot)

    def _compare_one(self, table: str, snapshot: Row) -> None:
        offsets = json.loads(snapshot["summary"]["icestream.frontier"])
        expected: dict[int, Row] = {}
        # Named `topic partition id`, beside entries of other kinds, which begin with a slash.
        places = {int(name.split()[1]): at[0] for name, at in offsets.items() if name[0] != "/"}
        for partition in range(PARTITIONS):
            state = self.history[partition][places.get(partition, 0)]
            own = {k: row for k, row in state[table].items() if k % PARTITIONS == partition}
            expected |= selected(table, own)
        found = self.topics.lake.rows(f"{self.name}.{table}", snapshot["snapshot_id"])
        columns = {"a": ("id", "name", "twice", "large"), "b": ("id", "following")}
        names = columns.get(table, ("id", "n", "big"))
        here = sorted(tuple(row[name] for name in names) for row in found)
        there = sorted(tuple(row[name] for name in names) for row in expected.values())
        self.checks += 1
        if here != there:
            lacking = [row for row in there if row not in here]
            spare = [row for row in here if row not in there]
            raise Wrong(f"{table} lacks {lacking}, has {spare}: {' '.join(self.story)}")

    def _compare_letters(self) -> None:
        found = {
            table: len(self.topics.lake.rows(f"{self.name}.{table}__dead_letters"))
            for table in TABLES
            if self._epochs(f"{table}__dead_letters")
        }
        if Counter(found) != self.letters:
            raise Wrong(f"letters are {found}, not {self.letters}: {' '.join(self.story)}")

    def _epochs(self, table: str) -> list[Row]:
        name = f"{self.name}.{table}"
        lake = self.topics.lake
        return lake.epochs(name) if lake.spark.catalog.tableExists(lake.table(name)) else []


def _named(row: Row) -> Row:
    return {("key" if name == "id" else name): value for name, value in row.items()}


@contextmanager
def ended_at(setting: str) -> Iterator[None]:
    """Have the program end at a place, in this process."""
    failpoints._passes.clear()
    os.environ["ICESTREAM_FAILPOINTS"] = setting
    try:
        yield
    finally:
        del os.environ["ICESTREAM_FAILPOINTS"]


def play(seed: int, topics: Topics) -> str:
    """Play a seed; returns what happened."""
    return Play(topics=topics, name=f"play{seed}", random=random.Random(seed)).run()


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Play seeds until the time or their number is used up; 1 when a table was wrong."""
    parser = argparse.ArgumentParser(description="Selects, against the source at every epoch.")
    parser.add_argument("--minutes", type=float, default=5.0, help="start no play after this time")
    parser.add_argument("--plays", type=int, default=10**9, help="play no more than this")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first play")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    deadline, played = time.monotonic() + options.minutes * 60, 0
    with tempfile.TemporaryDirectory(prefix="icestream-selects-") as folder:
        broker = KafkaBroker(Path(folder) / "broker")
        broker.start()
        try:
            catalog = embedded_catalog(Path(folder))
            topics = Topics(broker, "plays", session([catalog], "local[2]", {}), catalog)
            while played < options.plays and time.monotonic() < deadline:
                try:
                    say(f"seed {seed + played}: {play(seed + played, topics)}")
                except Exception as error:
                    say(f"seed {seed + played}: {type(error).__name__}: {str(error)[:4000]}")
                    say(f"again: python -m {__spec__.name} --seed {seed + played} --plays 1")
                    return 1
                played += 1
        finally:
            broker.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
