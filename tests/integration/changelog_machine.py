"""Random tables, random changes, and every snapshot's changelog against the states it lies between.

A play makes one table and changes it by Spark SQL, by maintenance, and by equality deletes written
by hand. Of every snapshot that appears, wherever it was committed, the changelog from its parent is
taken and applied to the parent's rows in plain Python; what comes out must be the snapshot's rows,
by as few changes as there can be. In some plays rows share identifiers: then a document must be one
of the rows of its identifier. All that is chosen comes from the seed:
`python -m tests.integration.changelog_machine --seed 7 --plays 1`.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from icestream.iceberg.catalog import Catalog
from icestream.iceberg.handle import TableName
from icestream.iceberg.snapshots import Stage
from icestream.iceberg.table import Table
from icestream.sources.iceberg.changelog import Changelog, changelog
from icestream.spark import session
from tests.integration.equality_deletes import commit_by_hand
from tests.lake import Lake
from tests.running import QUICK

NAMESPACE = "plays"
STEPS_MAX = 9
ID = 1

# What values a column of a type may take: few, so that rows meet and repeat; null is one of them.
VALUES: dict[str, Sequence[str]] = {
    "int": ("1", "2", "3"),
    "bigint": ("1", "2", "30000000000"),
    "float": ("CAST('NaN' AS FLOAT)", "CAST(0.5 AS FLOAT)", "CAST(1 AS FLOAT)"),
    "double": ("CAST('NaN' AS DOUBLE)", "0.0D", "CAST('-0.0' AS DOUBLE)", "0.5D", "-1.25D"),
    "decimal(9,2)": ("1.50", "2.00", "-7.25"),
    "string": ("''", "'a'", "'b'", "'a|b'", "'x\\\\\\\\y'"),
    "binary": ("X''", "X'00'", "X'00FF'"),
    "boolean": ("true", "false"),
    "date": ("DATE'2024-02-29'", "DATE'1969-12-31'"),
    "timestamp": ("TIMESTAMP'2024-02-29 12:00:00.000001'", "TIMESTAMP'1969-12-31 23:59:59.9'"),
    "struct<a:int,b:string,c:string>": (
        "named_struct('a',1,'b','x','c',CAST(NULL AS STRING))",
        "named_struct('a',1,'b',CAST(NULL AS STRING),'c','x')",
        "named_struct('a',CAST(NULL AS INT),'b',CAST(NULL AS STRING),'c',CAST(NULL AS STRING))",
    ),
    "array<string>": ("array('x')", "array('x',NULL)", "array(NULL,'x')", "array()"),
    "array<array<int>>": ("array(array(1),array(2))", "array(array(1,2))", "array(array())"),
    "map<string,int>": ("map('a',1,'b',2)", "map('b',2,'a',1)", "map('a',NULL)", "map()"),
    "map<string,array<int>>": ("map('a',array(1))", "map('a',array(1),'b',NULL)"),
}
WIDER = {"int": "bigint", "float": "double", "decimal(9,2)": "decimal(18,2)"}
PARTITIONED = {
    "int": ("{}", "bucket(2, {})"),
    "string": ("{}", "truncate(1, {})", "bucket(2, {})"),
    "boolean": ("{}",),
    "date": ("days({})", "{}"),
    "timestamp": ("days({})",),
}
NAMES = ("value", "Value 2", "dot.ted", "row", "key", "document_id", "hash", "sign", "ü", "q`t")
MODES = ("copy-on-write", "merge-on-read")
# What an engine may rightly refuse in one state of a table or another.
REFUSED = ("Cannot", "cannot", "Unsupported", "unsupported", "already", "not supported", "Invalid")

Values = dict[int, Any]
Rows = Mapping[str | None, Sequence[Values]]
Event = tuple[str, str | None, Values]


class Wrong(AssertionError):
    """The changelog does not lead from one state to the next."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The rows of one snapshot: by field id, and with their row ids where the table has them."""

    rows: Sequence[Values]
    row_ids: Sequence[int | None]

    def under(self, field_ids: Iterable[int]) -> "State":
        """The same rows with the columns of another schema."""
        rows = [{number: row.get(number) for number in field_ids} for row in self.rows]
        return State(rows=rows, row_ids=self.row_ids)


@dataclass(kw_only=True)
class Play:
    """One table and what happens to it."""

    lake: Lake
    table: Table
    random: random.Random
    keyed: bool
    # Whether rows may share an identifier: nothing keeps them from it.
    twins: bool = False
    story: list[str] = field(default_factory=list)
    # Snapshots whose equality deletes name ids: the source does not look up what was there.
    blind: set[int] = field(default_factory=set)
    states: dict[int, State] = field(default_factory=dict)
    fresh_id: int = 0
    checks: int = 0

    def run(self, steps: int) -> str:
        """Play some steps; returns what happened, raises `Wrong` when a changelog is."""
        self._do("insert", self._insert)
        for _ in range(steps):
            name = self.random.choice(sorted(ACTIONS))
            self._do(name, ACTIONS[name].__get__(self))
        if self.keyed:
            # Too rare for a short budget if left to chance: ids that may not be there, or twice.
            self._do("upsert by id", self._upsert_by_id)
        if self.twins:
            self._do("delete a twin", self._delete_a_twin)
        return f"{self.checks} checks: {' '.join(self.story)}"

    def _do(self, name: str, action: Callable[[], None]) -> None:
        self.story.append(name)
        try:
            action()
        except (PySparkException, Py4JError) as error:
            if not any(word in str(error) for word in REFUSED):
                raise
            self.story[-1] += ":refused"
        try:
            self._check()
        except Exception as error:
            raise Wrong(
                f"{type(error).__name__}: {error}\nafter {' | '.join(self.story)}"
            ) from error

    # What can happen.

    def _insert(self) -> None:
        rows = [self._row() for _ in range(self.random.randrange(1, 6))]
        if self.twins:
            rows += [self._row(self._known_id()) for _ in range(self.random.randrange(4))]
        if not self.keyed:
            rows += self.random.choices(rows, k=self.random.randrange(3))
        self._sql(f"INSERT INTO {self.name} SELECT /*+ COALESCE(1) */ * FROM VALUES {_list(rows)}")

    def _update(self) -> None:
        number, (column, kind) = self.random.choice(self._others())
        assert number != ID
        value = self._value(kind)
        self._sql(f"UPDATE {self.name} SET {_quoted(column)} = {value} WHERE {self._some()}")

    def _update_id(self) -> None:
        self._sql(
            f"UPDATE {self.name} SET {_quoted(self._columns()[ID][0])} = "
            f"{self._known_id() if self.twins else self._id()} "
            f"WHERE {_quoted(self._columns()[ID][0])} = {self._known_id()}"
        )

    def _delete(self) -> None:
        self._sql(f"DELETE FROM {self.name} WHERE {self._some()}")

    def _delete_a_twin(self) -> None:
        """Two rows of one id, one all null besides and one not: the one that is null goes."""
        if not self.twins:
            return
        number, columns = self._known_id(), self._columns()
        for empty in (True, False):
            values = [
                number if n == ID else f"CAST({'NULL' if empty else _values(kind)[0]} AS {kind})"
                for n, (_, kind) in columns.items()
            ]
            self._sql(f"INSERT INTO {self.name} VALUES ({', '.join(values)})")
        _, (column, _) = self.random.choice(self._others())
        condition = f"{_quoted(columns[ID][0])} = {number} AND {_quoted(column)} IS NULL"
        self._sql(f"DELETE FROM {self.name} WHERE {condition}")

    def _merge(self) -> None:
        ids = sorted({self._known_id() for _ in range(3)})
        rows = [self._row(each) for each in ids]
        columns = [name for name, _ in self._columns().values()]
        alias = ", ".join(f"x{n}" for n in range(len(columns)))
        source = f"SELECT * FROM VALUES {_list(rows)} AS v({alias})"
        at = list(self._columns()).index(ID)
        number, (column, _) = self.random.choice(self._others())
        place = list(self._columns()).index(number)
        when = self.random.choice(
            [
                "WHEN MATCHED THEN DELETE",
                f"WHEN MATCHED THEN UPDATE SET {_quoted(column)} = s.x{place}",
                f"WHEN MATCHED AND s.x{at} = {ids[0]} THEN DELETE "
                f"WHEN MATCHED THEN UPDATE SET {_quoted(column)} = s.x{place}",
            ]
        )
        names = ", ".join(_quoted(name) for name in columns)
        values = ", ".join(f"s.x{n}" for n in range(len(columns)))
        self._sql(
            f"MERGE INTO {self.name} t USING ({source}) s ON t.{_quoted(columns[at])} = s.x{at} "
            f"{when} WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({values})"
        )

    def _overwrite(self) -> None:
        rows = [self._row() for _ in range(2)]
        self._sql(f"INSERT OVERWRITE {self.name} SELECT * FROM VALUES {_list(rows)}")

    def _truncate(self) -> None:
        self._sql(f"TRUNCATE TABLE {self.name}")

    def _add_column(self) -> None:
        kind = self.random.choice(sorted(VALUES))
        place = self.random.choice(["", " FIRST"])
        self._sql(f"ALTER TABLE {self.name} ADD COLUMN {_quoted(self._name())} {kind}{place}")

    def _drop_column(self) -> None:
        if len(self._others()) > 1:
            _, (column, _) = self.random.choice(self._others())
            self._sql(f"ALTER TABLE {self.name} DROP COLUMN {_quoted(column)}")

    def _rename_column(self) -> None:
        number = self.random.choice(list(self._columns()))
        column = _quoted(self._columns()[number][0])
        self._sql(f"ALTER TABLE {self.name} RENAME COLUMN {column} TO {_quoted(self._name())}")

    def _widen_column(self) -> None:
        able = [(name, kind) for name, kind in self._columns().values() if kind in WIDER]
        if able:
            name, kind = self.random.choice(able)
            self._sql(f"ALTER TABLE {self.name} ALTER COLUMN {_quoted(name)} TYPE {WIDER[kind]}")

    def _reorder_columns(self) -> None:
        column = _quoted(self.random.choice(list(self._columns().values()))[0])
        self._sql(f"ALTER TABLE {self.name} ALTER COLUMN {column} FIRST")

    def _partition(self) -> None:
        able = [(name, kind) for name, kind in self._columns().values() if kind in PARTITIONED]
        if able:
            name, kind = self.random.choice(able)
            term = self.random.choice(PARTITIONED[kind]).format(_quoted(name))
            self._sql(f"ALTER TABLE {self.name} ADD PARTITION FIELD {term}")

    def _modes(self) -> None:
        modes = [
            f"'write.{verb}.mode'='{self.random.choice(MODES)}'"
            for verb in ("delete", "update", "merge")
        ]
        self._sql(f"ALTER TABLE {self.name} SET TBLPROPERTIES ({', '.join(modes)})")

    def _upgrade(self) -> None:
        self._sql(f"ALTER TABLE {self.name} SET TBLPROPERTIES ('format-version'='3')")

    def _rewrite(self) -> None:
        options = "options => map('rewrite-all','true','use-starting-sequence-number','true')"
        self._call("rewrite_data_files", options)

    def _rewrite_deletes(self) -> None:
        self._call("rewrite_position_delete_files", "options => map('rewrite-all','true')")

    def _roll_back(self) -> None:
        earlier = self._ancestors(self._head())[1:]
        if earlier:
            self._call("rollback_to_snapshot", f"snapshot_id => {self.random.choice(earlier)}")
            self._insert()

    def _branch(self) -> None:
        branch = f"b{len(self.story)}"
        self._sql(f"ALTER TABLE {self.name} CREATE BRANCH {branch}")
        rows = [self._row()]
        self._sql(f"INSERT INTO {self.name}.branch_{branch} SELECT * FROM VALUES {_list(rows)}")
        if self.random.random() < 0.5:
            self._sql(f"DELETE FROM {self.name}.branch_{branch} WHERE {self._some()}")
        if self.random.random() < 0.5:
            self._call("fast_forward", f"branch => 'main', to => '{branch}'")

    def _upsert_by_id(self) -> None:
        """Ids deleted by value, wherever they are, and some of them inserted anew."""
        if self._columns()[ID][1] in ("bigint", "int"):
            ids = sorted({int(self._known_id()) for _ in range(3)})
            added = [{ID: each} for each in ids if self.random.random() < 0.6]
            added += added[:1] if self.twins else []
            self._by_hand([{ID: each} for each in ids], added)
            self.blind.add(self._head())

    def _delete_by_value(self) -> None:
        """Rows deleted by the value of another column, and perhaps some inserted."""
        able = {"int": [1, 2, None], "string": ["a", "", None], "boolean": [True, None]}
        kinds = [(n, kind) for n, (_, kind) in self._others() if kind in able]
        if kinds:
            number, kind = self.random.choice(kinds)
            added = [{ID: int(self._id())}] if self._columns()[ID][1] == "bigint" else []
            self._by_hand([{number: self.random.choice(able[kind])}], added)

    # What they are made of.

    @property
    def name(self) -> str:
        return self.lake.table(str(self.table.name))

    def _sql(self, text: str) -> None:
        self.story[-1] += f" [{text.replace(self.name, 't')}]"
        self.lake.spark.sql(text)

    def _call(self, procedure: str, options: str) -> None:
        table = ".".join((*self.table.name.namespace, self.table.name.name))
        self._sql(f"CALL {self.lake.name}.system.{procedure}(table => '{table}', {options})")

    def _by_hand(self, deleted: Sequence[Values], added: Sequence[Values]) -> None:
        self.story[-1] += f" [{deleted} {added}]"
        self.table.java.refresh()
        commit_by_hand(self.table, deleted, added)

    def _columns(self) -> dict[int, tuple[str, str]]:
        self.table.java.refresh()
        return _columns(self.table.java.schema())

    def _others(self) -> list[tuple[int, tuple[str, str]]]:
        return [(n, column) for n, column in self._columns().items() if n != ID]

    def _name(self) -> str:
        taken = {name.lower() for name, _ in self._columns().values()}
        free = [name for name in NAMES if name.lower() not in taken]
        return self.random.choice(free) if free else f"c{len(self.story)}"

    def _id(self) -> str:
        self.fresh_id += 1
        return self._as_id(self.fresh_id)

    def _known_id(self) -> str:
        return self._as_id(self.random.randrange(1, self.fresh_id + 2))

    def _as_id(self, number: int) -> str:
        self.fresh_id = max(self.fresh_id, number)
        return f"'|{number}\\\\\\\\'" if self._columns()[ID][1] == "string" else str(number)

    def _value(self, kind: str) -> str:
        if self.random.random() < 0.4:
            return f"CAST(NULL AS {kind})"
        return f"CAST({self.random.choice(_values(kind))} AS {kind})"

    def _row(self, number: str | None = None) -> str:
        values = [
            (number or self._id()) if n == ID else self._value(kind)
            for n, (_, kind) in self._columns().items()
        ]
        return f"({', '.join(values)})"

    def _some(self) -> str:
        """A condition for some of the rows."""
        _, (column, kind) = self.random.choice(self._others())
        choices = [
            f"{_quoted(self._columns()[ID][0])} = {self._known_id()}",
            f"{_quoted(self._columns()[ID][0])} IN ({self._known_id()}, {self._known_id()})",
            f"{_quoted(column)} IS NULL",
            f"{_quoted(column)} IS NOT NULL",
        ]
        if "map" not in kind:
            choices.append(f"{_quoted(column)} <=> {self._value(kind)}")
        return self.random.choice(choices)

    # What is checked.

    def _head(self) -> int:
        self.table.java.refresh()
        return int(self.table.java.currentSnapshot().snapshotId())

    def _ancestors(self, snapshot_id: int) -> list[int]:
        found, at = [], self.table.java.snapshot(snapshot_id)
        while at is not None:
            found.append(int(at.snapshotId()))
            at = None if at.parentId() is None else self.table.java.snapshot(at.parentId())
        return found

    def _check(self) -> None:
        self.table.java.refresh()
        appeared = sorted(
            (each for each in self.table.java.snapshots() if each.snapshotId() not in self.states),
            key=lambda each: each.sequenceNumber(),
        )
        for each in appeared:
            number, parent = int(each.snapshotId()), each.parentId()
            self.states[number] = self._read(number)
            self._compare(parent, number, net=False)
            far = self._ancestors(number)[2:]
            if far and self.random.random() < 0.4:
                start = self.random.choice([*far, None])
                self._compare(start, number, net=True)

    def _compare(self, start: int | None, end: int, net: bool) -> None:
        columns = _columns(self._schema(end))
        ids = {name: number for number, (name, _) in columns.items()}
        old = self.states[start].under(columns) if start else State(rows=[], row_ids=[])
        new = self.states[end]
        ways: list[list[str]] = [[]]
        if self.keyed:
            # By the name that the column bears today, whatever it was called then.
            ways.append([self._columns()[ID][0]])
        for identifier in ways:
            frame = changelog(self.lake.spark, self.table, start, end, identifier, net)
            events = [_event(row, ids) for row in frame.collect()]
            self.checks += 1
            try:
                if identifier:
                    before, after = _keyed(old, self.twins), _keyed(new, self.twins)
                    _check_keyed(before, after, events)
                    if not net:
                        # As the source has it, which looks up no identifier that deletes name.
                        sent = self._sent(start, end, identifier, ids)
                        _check_documents(before, after, sent, exact=end not in self.blind)
                elif self.table.java.operations().current().formatVersion() >= 3 and not any(
                    number is None for number in (*old.row_ids, *new.row_ids)
                ):
                    before, after = (
                        {str(at): [row] for at, row in zip(each.row_ids, each.rows, strict=True)}
                        for each in (old, new)
                    )
                    _check_keyed(before, after, events)
                else:
                    _check_counted(old, new, events)
            except AssertionError as error:
                raise Wrong(f"{start} to {end} by {identifier}, net {net}: {error}") from error

    def _sent(
        self, start: int | None, end: int, identifier: Sequence[str], ids: Mapping[str, int]
    ) -> list[Event]:
        log = Changelog(self.lake.spark, self.table, identifier)
        older, newer = (log.history.snapshot(each) if each else None for each in (start, end))
        assert newer is not None
        if newer.keeps_rows:
            return []
        stage = Stage(self.table, newer.schema_id)
        frame = log.changes(older, [newer], stage)
        found = [_event(row, ids) for row in frame.collect()] if frame is not None else []
        stage.close()
        return found

    def _schema(self, snapshot_id: int) -> Any:
        schema_id = self.table.java.snapshot(snapshot_id).schemaId()
        return self.table.java.schemas().get(schema_id)

    def _read(self, snapshot_id: int) -> State:
        columns = _columns(self._schema(snapshot_id))
        lineage = self.table.java.operations().current().formatVersion() >= 3
        names = ", ".join([*(["_row_id"] if lineage else []), "*"])
        found = self.lake.spark.sql(
            f"SELECT {names} FROM {self.name} VERSION AS OF {snapshot_id}"
        ).collect()
        first = 1 if lineage else 0
        return State(
            rows=[
                {n: _plain(v) for n, v in zip(columns, tuple(row)[first:], strict=True)}
                for row in found
            ],
            row_ids=[row[0] if lineage else None for row in found],
        )


ACTIONS: Mapping[str, Callable[[Play], None]] = {
    "insert": Play._insert,
    "update": Play._update,
    "update again": Play._update,
    "update id": Play._update_id,
    "delete": Play._delete,
    "delete again": Play._delete,
    "merge": Play._merge,
    "overwrite": Play._overwrite,
    "truncate": Play._truncate,
    "add": Play._add_column,
    "drop": Play._drop_column,
    "rename": Play._rename_column,
    "widen": Play._widen_column,
    "reorder": Play._reorder_columns,
    "partition": Play._partition,
    "modes": Play._modes,
    "upgrade": Play._upgrade,
    "rewrite": Play._rewrite,
    "rewrite deletes": Play._rewrite_deletes,
    "roll back": Play._roll_back,
    "branch": Play._branch,
    "upsert by id": Play._upsert_by_id,
    "delete a twin": Play._delete_a_twin,
    "delete by value": Play._delete_by_value,
}


def _event(row: Any, ids: Mapping[str, int]) -> Event:
    values = dict(zip(row["row"].__fields__, tuple(row["row"]), strict=True))
    actions = {"DELETE": "DELETE", "UPDATE_BEFORE": None}
    assert row["bulk_action"] == actions.get(row["iceberg_operation"], "INDEX")
    return (
        row["iceberg_operation"],
        row["document_id"],
        {ids[name]: _plain(value) for name, value in values.items()},
    )


def _keyed(state: State, twins: bool) -> Rows:
    found: dict[str | None, list[Values]] = {}
    for row in state.rows:
        found.setdefault(_text(row[ID]), []).append(row)
    assert twins or len(found) == len(state.rows), "the play made an id twice"
    return found


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _check_keyed(old: Rows, new: Rows, events: Sequence[Event]) -> None:
    """The changes lead to the documents, and tell of each row that went what it was."""
    updated = sorted(str(key) for operation, key, _ in events if operation == "UPDATE_AFTER")
    before = sorted(str(key) for operation, key, _ in events if operation == "UPDATE_BEFORE")
    assert updated == before, f"updates of {updated}, and what was before of {before}"
    for operation, key, row in events:
        if operation in ("DELETE", "UPDATE_BEFORE"):
            assert row in old.get(key, []), f"{operation} of {row}, was {old.get(key)}"
    applied = [event for event in events if event[0] != "UPDATE_BEFORE"]
    _check_documents(old, new, applied, exact=True)


def _check_documents(old: Rows, new: Rows, events: Sequence[Event], exact: bool) -> None:
    """Each identity that has rows has a document, which is one of them; no other has any.

    One change for each identity whose rows differ; `exact` if ids deleted by value were looked up.
    """
    counted = Counter(key for _, key, _ in events)
    assert not counted or max(counted.values()) == 1, f"several changes of one id: {events}"
    documents = dict(old)
    for operation, key, row in events:
        before = documents.pop(key, [])
        if operation == "DELETE":
            assert before or not exact, f"deleted what was not there: {key}"
            known = {n: v for n, v in row.items() if v is not None}.items()
            fits = [each for each in before if known <= each.items()]
            assert fits or not before, f"deleted {row}, was {before}"
            continue
        if exact:
            # A row that comes beside others of its identifier is an insert all the same.
            more = len(new.get(key, [])) > len(before)
            right = bool(before) if operation == "UPDATE_AFTER" else not before or more
            assert right, f"{operation} of {key}, there: {before}"
            assert not _same(before, new.get(key, [])), f"{operation} of {key} changes nothing"
        documents[key] = [row]
    assert documents.keys() == new.keys(), f"came to {documents}, should be {new}, by {events}"
    for key, rows in documents.items():
        right = rows[0] in new[key] if key in counted else _same(rows, new[key])
        assert right, f"came to {documents}, should be {new}, by {events}"


def _same(one: Sequence[Values], other: Sequence[Values]) -> bool:
    return Counter(map(_frozen, one)) == Counter(map(_frozen, other))


def _check_counted(old: State, new: State, events: Sequence[Event]) -> None:
    """Each row as many times more or less as it is there more or less often."""
    before, after = (Counter(_frozen(row) for row in each.rows) for each in (old, new))
    came = Counter(_frozen(row) for operation, _, row in events if operation == "INSERT")
    went = Counter(_frozen(row) for operation, _, row in events if operation == "DELETE")
    assert len(events) == came.total() + went.total(), f"an update without an identity: {events}"
    assert came == after - before, f"inserted {came}, should be {after - before}"
    assert went == before - after, f"deleted {went}, should be {before - after}"


def _frozen(row: Values) -> tuple[tuple[int, Any], ...]:
    return tuple(sorted(row.items(), key=lambda item: item[0]))


def _plain(value: Any) -> Any:
    """The value in a form that equals itself and can be counted."""
    if isinstance(value, float):
        # Both zeros are equal, and told apart by their signs.
        return "NaN" if value != value else str(value)
    if isinstance(value, bytearray | bytes):
        return bytes(value)
    if hasattr(value, "__fields__"):
        return ("struct", *(_plain(each) for each in value))
    if isinstance(value, list):
        return ("list", *(_plain(each) for each in value))
    if isinstance(value, dict):
        return ("map", *sorted((key, repr(_plain(each))) for key, each in value.items()))
    return value


def _columns(schema: Any) -> dict[int, tuple[str, str]]:
    return {
        int(column.fieldId()): (str(column.name()), _kind(str(column.type().toString())))
        for column in schema.columns()
    }


def _kind(text: str) -> str:
    """The type as SQL spells it, by what Iceberg prints: `list<string>`, `struct<4: a: ...`."""
    for kind in VALUES:
        if kind.startswith("struct") and text.startswith("struct"):
            return kind
    plain = text.replace("list<", "array<").replace("long", "bigint").replace(", ", ",")
    return {"timestamptz": "timestamp"}.get(plain, plain)


def _values(kind: str) -> Sequence[str]:
    return VALUES.get(kind) or ("CAST(1.50 AS decimal(18,2))", "CAST(9 AS decimal(18,2))")


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _list(rows: Sequence[str]) -> str:
    return ", ".join(rows)


def play(seed: int, lake: Lake, catalog: Catalog, steps: int | None = None) -> str:
    """Play one seed to its end; returns one line about it."""
    generator = random.Random(seed)
    keyed, version = generator.random() < 0.7, generator.choice([2, 2, 3])
    name = TableName(namespace=(NAMESPACE,), name=f"t{seed}")
    kinds = generator.sample(sorted(VALUES), generator.randrange(2, 6))
    identity = generator.choice(["bigint", "bigint", "bigint", "int", "string"])
    columns = [f"id {identity}", *(f"c{n} {kind}" for n, kind in enumerate(kinds))]
    modes = [f"'write.{v}.mode'='{generator.choice(MODES)}'" for v in ("delete", "update", "merge")]
    lake.spark.sql(
        f"CREATE TABLE {lake.table(str(name))} ({', '.join(columns)}) USING iceberg "
        f"TBLPROPERTIES ('format-version'='{version}', {', '.join(modes)})"
    )
    table = catalog.load(name)
    assert table is not None
    twins = keyed and generator.random() < 0.5
    played = Play(lake=lake, table=table, random=generator, keyed=keyed, twins=twins)
    if generator.random() < 0.5:
        played.story.append("partition")
        played._partition()
    line = played.run(generator.randrange(4, STEPS_MAX) if steps is None else steps)
    lake.spark.sql(f"DROP TABLE {lake.table(str(name))}")
    kind = "twins" if twins else "keyed" if keyed else "unkeyed"
    return f"v{version} {kind} {columns}, {line}"


def opened(spark: SparkSession, folder: Path) -> tuple[Lake, Catalog]:
    """A catalog in a folder, as Spark SQL and as icestream see it."""
    properties = {"type": "hadoop", "warehouse": str(folder)}
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    return Lake(spark, properties), Catalog(spark._jvm, hadoop, properties)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play seeds until the time or their number is used up; 1 when a changelog was wrong."""
    parser = argparse.ArgumentParser(description="Random changes, against the states they make.")
    parser.add_argument("--minutes", type=float, default=5.0, help="start no play after this time")
    parser.add_argument("--plays", type=int, default=10**9, help="play no more than this")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first play")
    parser.add_argument("--all", action="store_true", help="go on after one that was wrong")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    say(f"seed {seed}")
    deadline, wrong, played = time.monotonic() + options.minutes * 60, 0, 0
    with tempfile.TemporaryDirectory(prefix="icestream-plays-") as folder:
        compiled_once = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
        spark = session([], "local[2]", {**QUICK, **compiled_once})
        lake, catalog = opened(spark, Path(folder))
        while played < options.plays and time.monotonic() < deadline:
            started = time.monotonic()
            try:
                line = play(seed + played, lake, catalog)
                say(f"seed {seed + played}: {time.monotonic() - started:.0f} s, {line}")
            except Exception as error:
                wrong += 1
                say(f"seed {seed + played}: {type(error).__name__}: {str(error)[:4000]}")
                say(
                    "again: python -m tests.integration.changelog_machine "
                    f"--plays 1 --seed {seed + played}"
                )
                if not options.all:
                    return 1
            played += 1
        spark.stop()
    say(f"{played} plays, {wrong} wrong")
    return int(wrong > 0)


def say(line: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
