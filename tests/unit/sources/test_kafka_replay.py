"""What dead letters that are tried again do, given a log that the test writes."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from icestream import dead_letters
from icestream.change import OP, SEQ, Op
from icestream.errors import HistoryLost
from icestream.formats.options import ValueOptions
from icestream.formats.rows import Records
from icestream.frontier import Frontier
from icestream.sources.kafka import replay
from icestream.sources.kafka.consumer import Range
from icestream.sources.kafka.replay import LetterGroup, LetterSplit, by_partition, groups, order
from icestream.sources.kafka.route import Route
from icestream.sources.kafka.split import Keys, Reading

LETTERS = "t__dead_letters"
OLD = "the reason of then"


class Targets:
    """One table of three columns, the first two its key."""

    def __init__(self, key: tuple[str, ...] = ("id", "part")):
        self._key = key

    def tables(self):
        return ("t", LETTERS)

    def schema_json(self, table):
        fields = [("id", LongType()), ("part", StringType()), ("v", LongType())]
        return Schema(
            *[
                NestedField(field_id=n, name=name, field_type=kind, required=False)
                for n, (name, kind) in enumerate(fields, 1)
            ]
        ).model_dump_json()

    def reads(self, table):
        return None

    def refused(self, table):
        return None

    def key(self, table):
        return self._key


def row(key: int, v: Any, part: str = "a") -> tuple[Any, Any]:
    return {"id": key, "part": part}, None if v is None else {"id": key, "part": part, "v": v}


def records(written: dict[int, tuple[Any, Any]]) -> Records:
    pairs = [[None if x is None else json.dumps(x).encode() for x in p] for p in written.values()]
    return Records(
        keys=pa.array([key for key, _ in pairs], pa.binary()),
        values=pa.array([value for _, value in pairs], pa.binary()),
        offsets=np.array(list(written), dtype=np.int64),
        timestamps=np.zeros(len(pairs), dtype=np.int64),
    )


def letter_rows(written: dict[int, tuple[Any, Any]], topic: str = "t") -> pa.Table:
    read = records(written)
    return pa.table(
        {
            "position": pa.array([f"{topic}/0/{n}" for n in written], pa.large_string()),
            "error": pa.array([OLD] * len(written), pa.large_string()),
            "key": read.keys.cast(pa.large_binary()),
            "payload": read.values.cast(pa.large_binary()),
            "at": pa.array([1_000_000] * len(written), pa.timestamp("us", tz="UTC")),
        }
    )


def split(letters: dict[int, tuple[Any, Any]], end: int | None, **value: str) -> LetterSplit:
    reading = Reading(
        settings={},
        value=ValueOptions(**(value or {"envelope": "upsert"})),
        registry=None,
        route=Route(),
        keys=Keys(by_table={}, otherwise=()),
        declared={},
        read_timeout=1.0,
        dead_letters=True,
        keyed=True,
    )
    (own,) = by_partition(letter_rows(letters))
    log = [Range(topic="t", partition=0, start=min(letters), end=end)] if end else None
    return LetterSplit(
        letters_table=LETTERS, owner=None, letters=[own], logs=log, reading=reading, tables={"t"}
    )


def outcome(one: LetterSplit, targets: Targets | None = None) -> dict[str, list[dict[str, Any]]]:
    """The changes of each table in the order of their places."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table, batch in one.changes(targets or Targets()):
        found.setdefault(table, []).extend(batch.to_pylist())
    return {table: sorted(rows, key=lambda r: r[SEQ]) for table, rows in found.items()}


@pytest.fixture
def log(monkeypatch):
    """Sets what the log has from the first letter on."""

    def write(written: dict[int, tuple[Any, Any]]) -> None:
        # A broker is read in the integration tests; what comes from it is chosen here.
        monkeypatch.setattr(replay, "read_range", lambda *_, **__: iter([records(written)]))

    return write


def test_only_changes_of_the_letters_keys_are_taken_from_the_log(log):
    """E10: keys of two columns are compared as a whole."""
    log({3: row(1, 3), 4: row(1, 4, "b"), 5: row(2, 5), 6: row(2, 6, "b"), 7: row(1, 7)})
    changes = outcome(split({3: row(1, 3), 6: row(2, 6, "b")}, end=8))
    places = [(r[SEQ], r["id"], r["part"], r["v"]) for r in changes["t"]]
    assert places == [(3, 1, "a", 3), (6, 2, "b", 6), (7, 1, "a", 7)]
    assert [r["position"] for r in changes[LETTERS]] == ["t/0/3", "t/0/6"]
    assert {r[OP] for r in changes[LETTERS]} == {Op.DELETE}


def test_a_letter_that_compaction_took_from_the_log_was_overtaken(log):
    """E10, K1: the record that overtook it was a delete, and that is gone by now as well."""
    log({9: row(5, 9)})
    one = split({3: row(1, 3), 4: row(2, None)}, end=10)
    changes = outcome(one)
    assert [(r[SEQ], r["id"], r[OP]) for r in changes["t"]] == [(4, 2, Op.DELETE)]
    assert one.learned().taken == 2


def test_a_letter_that_was_overtaken_by_what_cannot_be_taken_is_not_lost(log):
    """E10, Mend h5: compaction keeps the newest record of a key, although no table takes it."""
    log({9: row(1, "text"), 12: row(2, "text"), 13: row(2, 13), 14: (None, "no key, no row")})
    one = split({3: row(1, 3), 4: row(2, 4), 5: row(3, 5)}, end=15)
    changes = outcome(one)
    assert [(r[SEQ], r["id"], r["v"]) for r in changes["t"]] == [(3, 1, 3), (4, 2, 4), (13, 2, 13)]
    assert [r["position"] for r in changes[LETTERS]] == ["t/0/3", "t/0/4", "t/0/5"]


def test_without_a_key_the_letters_alone_are_added(log):
    """E10: nothing is read from the log."""
    changes = outcome(split({3: row(1, 3), 4: row(2, 4)}, end=None, envelope="none"), Targets(()))
    assert [(r["id"], r[OP]) for r in changes["t"]] == [(1, Op.INSERT), (2, Op.INSERT)]


@pytest.mark.parametrize("end", [5, None], ids=["by the log", "as is"])
def test_an_insert_that_is_late_promises_nothing(log, end):
    """E10: the key may be there by now."""
    written = {3: row(1, 3, "insert")}
    log(written)
    changes = outcome(split(written, end, envelope="cdc_field", cdc_field="part"))
    assert [r[OP] for r in changes["t"]] == [Op.UPSERT]


def test_a_letter_that_stays_has_the_newest_reason(log):
    """E10: and the others of its kind are not held up by it."""
    log({3: row(1, 3), 4: row(2, "text")})
    one = split({3: row(1, 3), 4: row(2, "text")}, end=5)
    changes = outcome(one)
    assert [r["id"] for r in changes["t"]] == [1]
    told = {r["position"]: (r[OP], r.get("error")) for r in changes[LETTERS]}
    assert told["t/0/3"][0] == Op.DELETE
    assert told["t/0/4"][0] == Op.UPSERT
    assert "does not fit" in told["t/0/4"][1] and OLD not in told["t/0/4"][1]
    assert (one.learned().read, one.learned().taken) == (2, 1)
    assert list(one.learned().rejected.values()) == [1]


def test_a_problem_is_raised_by_who_reads(log):
    """E8: tables that the letters do not concern are not stopped by it."""
    one = split({3: row(1, 3)}, end=5)
    one.problem = HistoryLost("gone")
    with pytest.raises(HistoryLost):
        outcome(one)


def test_letters_are_read_partition_by_partition_in_order():
    """E10: positions are texts, but offsets are numbers; what is none is left alone."""
    rows = letter_rows({10: row(1, 1), 9: row(2, 2)})
    strange = rows.slice(0, 1).set_column(0, "position", pa.array(["by hand"], pa.large_string()))
    other = letter_rows({2: row(3, 3)}, "a/b")
    found = by_partition(pa.concat_tables([rows, strange, other]))
    assert [(each.topic, each.records.offsets.tolist()) for each in found] == [
        ("a/b", [2]),
        ("t", [9, 10]),
    ]
    assert found[1].rows.column("position").to_pylist() == ["t/0/9", "t/0/10"]
    assert found[1].records.timestamps.tolist() == [1000, 1000]
    assert found[1].before(10).records.offsets.tolist() == [9]


def test_groups_are_bounded_by_rows_and_bytes():
    """E9: a letter that is larger than a group is one by itself."""
    assert groups([1, 1, 1, 1], rows_max=3, bytes_max=100) == [(0, 3), (3, 4)]
    assert groups([5, 5, 50, 5], rows_max=10, bytes_max=10) == [(0, 2), (2, 3), (3, 4)]
    assert groups([], rows_max=10, bytes_max=10) == []


def test_an_epoch_of_letters_moves_no_offset():
    """E10, E3: it names a snapshot and a span, and its number rises."""
    lower = Frontier({"t 0 id": (5, 0)})
    group = LetterGroup(table=LETTERS, snapshot_id=7, start=2, end=4, as_is=False)
    upper = group.after(lower)
    assert upper["t 0 id"] == (5, 0)
    assert upper.covers(lower) and upper != lower
    ((name, at),) = [(n, at) for n, at in upper.positions.items() if n != "t 0 id"]
    assert LetterGroup.at(name, at) == group
    again = group.after(upper)
    assert again.covers(upper) and again != upper


def test_groups_follow_the_offsets_of_a_partition():
    """E10, Mend h6: of two letters of a key the later one is tried later, and wins."""
    texts = sorted([*(f"t/0/{n}" for n in range(8, 12)), "t/1/9", "made by hand"])
    known = pa.table({"position": pa.array(texts, pa.large_string())})
    in_order = [texts[n] for n in order(known).to_pylist()]
    assert in_order == ["t/0/8", "t/0/9", "t/0/10", "t/0/11", "t/1/9", "made by hand"]
    group = LetterGroup(table=LETTERS, snapshot_id=7, start=1, end=5, as_is=True)
    assert group.spans(known) == [("t/0/9", "t/0/9"), ("t/0/10", "t/0/11"), ("t/1/9", "t/1/9")]
    last = replace(group, start=5, end=6)
    assert last.spans(known) == [("made by hand", "made by hand")]
    # As an older version counted them: by their texts.
    ((name, at),) = group.after(Frontier()).positions.items()
    older = LetterGroup.at(name, (*at[:-1], 1))
    assert older == replace(group, by_offset=False)
    assert older.spans(known) == [("t/0/10", "t/0/11"), ("t/0/8", "t/0/9")]


def test_letters_that_change_are_found_by_their_position():
    """E10: what is written first is a plain insert, which deletes nothing."""
    new = dead_letters.letters(
        ["t/0/1"], ["why"], pa.array([b"k"]), pa.array([b"v"]), np.array([-1], dtype=np.int64)
    )
    assert dead_letters.SHAPE.key == ["position"]
    assert new.column(OP).to_pylist() == [Op.INSERT]
    assert dead_letters.removed(new.column("position")).column(OP).to_pylist() == [Op.DELETE]
