"""What a split of topics does with tables that are not there yet, and with values not sent."""

from collections.abc import Sequence
from typing import Any

import pytest
from pyiceberg.types import BinaryType, LongType, StringType

from icestream import dead_letters
from icestream.change import AT, OP, SEQ, Op, fold
from icestream.errors import DataRejected
from icestream.formats import decoding as formats
from icestream.formats.options import UNAVAILABLE_VALUE, ValueOptions
from icestream.formats.rows import Records
from icestream.schema import Column, TableShape, distinct_columns, grown, new_schema
from icestream.sources import TablesUnready
from icestream.sources.kafka import split as splits
from icestream.sources.kafka.route import Route
from icestream.sources.kafka.split import KafkaSplit
from tests.property.kafka_reading import Destination, Row, reading, records, split_of

KEPT = UNAVAILABLE_VALUE
UPSERT = ValueOptions(envelope="upsert")


class NoTables:
    """Targets before anything was made."""

    def tables(self):
        return ()


def lacking(value: ValueOptions, *batches: Records) -> TablesUnready:
    """What a split says that reads these batches."""
    split = split_of({("t", 0): batches}, reading(value=value))
    with pytest.raises(TablesUnready) as caught:
        list(split.changes(NoTables()))
    return caught.value


def test_what_is_lacking_is_told_before_everything_is_read(monkeypatch):
    """K7: what comes later is read when the table is there; news is waited for once more."""
    # The batches are tiny.
    monkeypatch.setattr(splits, "SAMPLE_BYTES", 0)
    one = records(({"id": 1}, {"id": 1, "v": 1}))
    news = records(({"id": 2}, {"id": 2, "w": "x"}))
    unready = lacking(UPSERT, one, news, one, one, one, records(({"id": 3}, {"id": 3, "z": 1})))
    assert [column.name for column in unready.shapes["t"].columns] == ["id", "v", "w"]


def test_a_table_is_made_from_all_records_that_are_read():
    """K7: not from the first batch alone."""
    one = records(({"id": 1}, {"id": 1, "v": 1}))
    other = records(({"id": 2}, {"id": 2, "v": 1.5, "w": "x"}))
    shape = lacking(UPSERT, one, other).shapes["t"]
    found = {column.name: str(column.type) for column in shape.columns}
    assert found == {"id": "long", "v": "double", "w": "string"}
    assert list(shape.key) == ["id"]


def test_deletes_are_never_dropped_because_their_table_is_not_there_yet():
    """E3, E5: an epoch before it, on its way at the same time, may hold the rows they delete."""
    shape = lacking(UPSERT, records(({"id": 1}, None), ({"id": 2}, None))).shapes["t"]
    assert [column.name for column in shape.columns] == ["id"]


@pytest.mark.parametrize(
    ("named", "letters", "op"),
    [
        ({"c": "insert"}, False, Op.INSERT),
        ({"c": "insert"}, True, Op.UPSERT),
        ({}, False, Op.UPSERT),
        ({}, True, Op.UPSERT),
    ],
)
def test_an_insert_replaces_the_row_unless_somebody_promised_that_it_is_new(named, letters, op):
    """K3, Mend h9: snapshots repeat inserts, and the delete before one may be a dead letter."""
    value = ValueOptions(envelope="cdc_field", cdc_field="v", operations=named)
    split = split_of(
        {("t", 0): [records(({"id": 1}, {"id": 1, "v": "c"}))]},
        reading(value=value, dead_letters=letters),
    )
    destination = Destination(t=shape(v=StringType()))
    ((_, batch),) = split.changes(destination)
    assert batch.column(OP).to_pylist() == [op]


def shape(**more: Any) -> TableShape:
    columns = {"id": LongType(), "n": LongType(), "big": StringType(), **more}
    named = [Column(name=name, type=kind) for name, kind in columns.items()]
    return TableShape(columns=named, key=["id"])


def event(op: str, **row: Any) -> tuple[Row, Row]:
    before, after = (row, None) if op == "d" else (None, row)
    return {"id": row["id"]}, {"before": before, "after": after, "op": op}


def taken(destination: Destination, *batches: Sequence[tuple[Row, Row]], **options: Any) -> None:
    """An epoch of one partition in batches."""
    first, parts = 0, []
    for batch in batches:
        parts.append(records(*batch, first=first))
        first += len(batch)
    destination.take(split_of({("t", 0): parts}, reading(**options)))


def with_row(**row: Any) -> Destination:
    """A table with one row, which an earlier epoch brought."""
    destination = Destination(t=shape())
    taken(destination, [event("c", **{"id": 1, "n": 1, "big": "stored", **row})])
    return destination


def reasons(destination: Destination) -> list[str]:
    return [letter["error"] for letter in destination.letters]


def bigs(destination: Destination) -> list[tuple[int, str | None]]:
    return [(row["n"], row.get("big")) for row in destination.rows["t"].values()]


def test_a_value_not_sent_is_that_of_the_change_before():
    """P7: in the same batch, through others that did not send it either, or batches ago."""
    first = [event("u", id=1, n=2, big="new"), event("u", id=1, n=3, big=KEPT)]
    others = [event("c", id=2, n=1, big="other"), event("u", id=1, n=4, big=KEPT)]
    destination = with_row()
    taken(destination, first, others, [event("u", id=1, n=5, big=KEPT)])
    assert bigs(destination) == [(5, "new"), (1, "other")]
    assert (destination.asked, destination.letters) == ([], [])


def test_a_value_not_sent_is_the_stored_one_when_nothing_is_before():
    """P7: never null, never what stands in for it; a change that comes later counts for nothing."""
    destination = with_row()
    changes = [event("u", id=1, n=2, big=KEPT), event("c", id=2, n=1, big="x")]
    taken(destination, changes, [event("u", id=1, n=3, big=KEPT)])
    assert bigs(destination) == [(3, "stored"), (1, "x")]
    [needed] = destination.asked
    assert [(n.table, n.keys.to_pylist(), n.columns) for n in needed.needs] == [
        ("t", [{"id": 1}], ["big"])
    ]
    taken(destination, [event("u", id=1, n=4, big=KEPT), event("u", id=1, n=5, big="later")])
    assert bigs(destination) == [(5, "later"), (1, "x")]


def test_tables_that_lack_values_are_asked_for_at_once():
    """P7: the values of one table are kept when those of another come."""
    destination = Destination(t=shape(), u=shape())
    both = {table: [event("c", id=1, n=1, big=f"of {table}")] for table in "tu"}
    destination.take(split_of({(table, 0): [records(*both[table])] for table in "tu"}))
    kept = records(event("u", id=1, n=2, big=KEPT))
    destination.take(split_of({("t", 0): [kept], ("u", 0): [kept]}))
    assert {name: rows[1,]["big"] for name, rows in destination.rows.items()} == {
        "t": "of t",
        "u": "of u",
    }
    [needed] = destination.asked
    assert [need.table for need in needed.needs] == ["t", "u"]


@pytest.mark.parametrize(
    "before",
    [
        [],
        [event("c", id=2, n=1, big="x"), event("d", id=2, n=1, big="x")],
        [event("c", id=2, n=1, big=None)],
        [event("c", id=2, n=1)],
    ],
    ids=["no row", "deleted", "null", "without the column"],
)
def test_a_value_that_nothing_has_makes_a_dead_letter(before):
    """P7, K8: it is never guessed; the others go on."""
    for epochs in (before, []), ([], before):
        destination = with_row()
        taken(destination, epochs[0])
        bad = [event("u", id=2, n=2, big=KEPT), event("u", id=2, n=3, big=KEPT)]
        taken(destination, epochs[1], [*bad, event("u", id=1, n=2, big=KEPT)])
        assert (2, "stored") in bigs(destination)
        assert KEPT not in {big for _, big in bigs(destination)}
        assert len(destination.letters) == 2
        assert all(
            "column big" in why and "REPLICA IDENTITY" in why for why in reasons(destination)
        )
        assert KEPT in destination.letters[0]["payload"].decode()
        destination = with_row()
        taken(destination, epochs[0])
        with pytest.raises(DataRejected, match="cannot be taken") as caught:
            taken(destination, epochs[1], bad, dead_letters=False)
        assert f"offset {len(epochs[1])}: the value of column big" in str(caught.value)


def test_a_column_that_the_table_never_had_is_no_value():
    """P7: its row is there, but not what was not sent of it."""
    destination = with_row()
    taken(destination, [event("u", id=1, n=2, big="x", late=KEPT)])
    assert bigs(destination) == [(1, "stored")]
    assert "column late" in reasons(destination)[0]


def test_without_keyed_partitions_a_value_not_sent_is_refused():
    """P7, K1: the change before it may be in another split."""
    destination = with_row()
    changes = [event("u", id=1, n=2, big="new"), event("u", id=1, n=3, big=KEPT)]
    taken(destination, changes, keyed=False)
    assert bigs(destination) == [(2, "new")]
    assert "`keyed: false`" in reasons(destination)[0]


@pytest.mark.parametrize("row", [{"big": KEPT}, {"late": KEPT}], ids=str)
def test_a_table_that_stands_elsewhere_has_nothing_rejected(row):
    """E4: while another table is replayed nobody knows what this one had, and nobody asks."""
    split = split_of({("t", 0): [records(event("u", id=7, n=2, **row))]})
    destination = with_row()
    found = list(split.with_stored("t", None).changes(destination))
    assert sum(changes.num_rows for _, changes in found) == 0


def test_a_record_whose_table_was_not_sent_is_rejected():
    """K4: even where records of no table are dropped."""
    route = Route(field="big", tables={"t": "^st"}, unmatched="drop")
    destination = with_row()
    taken(destination, [event("u", id=1, n=2, big=KEPT)], route=route)
    assert bigs(destination) == [(1, "stored")]
    assert "tells the table" in reasons(destination)[0]


def test_dead_letters_of_values_not_sent_have_their_table_made():
    """K8, K7: it is asked for as any other."""

    class WithoutLetters(Destination):
        def tables(self):
            return ["t"]

    with pytest.raises(TablesUnready) as caught:
        WithoutLetters(t=shape()).read(
            split_of({("t", 0): [records(event("u", id=1, n=1, big=KEPT))]})
        )
    assert list(caught.value.shapes) == [dead_letters.table_of("t")]


def test_what_stands_for_a_value_tells_no_type():
    """K7: a table is made of what was sent; a column of another type is not widened."""
    kept = records(event("u", id=1, n=1, big=KEPT), event("u", id=1, n=KEPT, big=1))
    found = lacking(ValueOptions(envelope="debezium"), kept).shapes["t"]
    assert {column.name: str(column.type) for column in found.columns} == {
        "id": "long",
        "n": "long",
        "big": "long",
    }
    destination = Destination(t=shape(raw=BinaryType()))
    taken(destination, [event("c", id=1, n=1, big="a", raw="\\x00ff")])
    taken(destination, [event("u", id=1, n=2, big=KEPT, raw=KEPT)])
    assert destination.rows["t"][1,] == {"id": 1, "n": 2, "big": "a", "raw": b"\x00\xff"}


def test_a_required_column_stays_so_when_its_value_is_not_sent():
    """I11: the row has the value."""
    required = TableShape(
        columns=[
            Column(name="id", type=LongType()),
            Column(name="big", type=StringType(), required=True),
        ],
        key=["id"],
    )
    destination = Destination(t=required)
    taken(destination, [event("c", id=1, big="a")])
    taken(destination, [event("u", id=1, big=KEPT)])
    assert destination.rows["t"] == {(1,): {"id": 1, "big": "a"}}


class Naming(Destination):
    """Tables whose names records give; other names are refused by their last character."""

    def refused(self, table: str) -> str | None:
        return "no such table" if table.endswith("!") else None


def test_records_that_name_a_table_that_cannot_be_are_letters_of_their_topic():
    """I16, K4, Mend a4: each for itself, and the others are taken."""
    destination = Naming(t=shape(), a=shape())
    route = Route(field="tab")
    how = reading(value=UPSERT, route=route)
    tabs = ["a", "b!", "a", "t__dead_letters", ""]
    pairs = [({"id": n}, {"id": n, "n": n, "big": "x", "tab": tab}) for n, tab in enumerate(tabs)]
    with pytest.raises(TablesUnready):
        destination.read(split_of({("t", 0): [records(*pairs)]}, how))
    stopping = reading(value=UPSERT, route=route, dead_letters=False)
    with pytest.raises(DataRejected, match="cannot be taken") as caught:
        destination.read(split_of({("t", 0): [records(pairs[1])]}, stopping))
    assert "offset 0: no such table" in caught.value.detail
    assert "b!" not in str(caught.value)
    del pairs[3]
    columns = {"tab": StringType()}
    destination = Naming(t=shape(), a=shape(**columns))
    found = destination.read(split_of({("t", 0): [records(*pairs)]}, how))
    assert [row["id"] for row in found["a"]] == [0, 2]
    letters = found[dead_letters.table_of("t")]
    assert sorted(row["error"] for row in letters) == [
        "no such table",
        "the record belongs to no table",
    ]


def test_a_value_with_a_line_break_is_another_value():
    """K4, Mend a4: `a` and `a\\n` are two tables, not one in the other."""
    texts = ["a", "a\n", "b", "a"]
    pairs = [({"id": n}, {"id": n, "tab": text}) for n, text in enumerate(texts)]
    with pytest.raises(TablesUnready) as caught:
        how = reading(value=UPSERT, route=Route(field="tab"))
        list(split_of({("t", 0): [records(*pairs)]}, how).changes(Naming()))
    assert set(caught.value.shapes) == {"a", "a\n", "b"}
    [part] = formats.decoded(records(*pairs), how.value, None)
    cut = {table: rows.records.tolist() for table, rows in how.route.cut("t", part.rows)}
    assert cut == {"a": [0, 3], "a\n": [1], "b": [2]}


class Growing(Destination):
    """Tables that are made and evolved as the coordinator does it."""

    def take(self, *splits: KafkaSplit) -> None:
        for _ in range(10):
            try:
                return super().take(*splits)
            except TablesUnready as unready:
                for table, shape in unready.shapes.items():
                    columns = distinct_columns(shape.columns)
                    self._shapes[table] = TableShape(columns=columns, key=shape.key)
                    if not table.endswith(dead_letters.SUFFIX):
                        self.rows[table] = {}
                for table, columns in unready.gaps.items():
                    wanted = distinct_columns(columns)
                    self._shapes[table] = grown(self._shapes[table], wanted, table)
                for table, shape in self._shapes.items():
                    self._schemas[table] = new_schema(shape).model_dump_json()
        raise AssertionError("the tables do not come to rest")

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows["t"].values()]

    def columns(self) -> set[str]:
        return {column.name for column in self._shapes["t"].columns}


def test_rows_whose_names_clash_are_rejected_and_add_no_column():
    """K8, Mend a5: of two names that readers do not tell apart the first one counts."""
    value = ValueOptions(envelope="upsert")
    pairs = [
        (1, {"v": 1}),
        (2, {"V": 2, "other": 1}),
        (3, {"v": 3, "V": 3}),
        (4, {"a.b": 1, "a": {"b": 2}}),
        (5, {"s": {"x": 1, "X": 2}}),
        (6, {"s": {"x": 1}}),
        (7, {"s": {"X": 1}}),
        (8, {"V": None}),
        (9, {"_pos": 1, "v": 9}),
        (10, {"_FILE": "f"}),
    ]
    batch = [({"id": key}, {"id": key, **row}) for key, row in pairs]
    destination = Growing()
    taken(destination, batch, value=value)
    assert destination.ids() == [1, 6, 8]
    assert destination.columns() == {"id", "v", "s"}
    assert len(reasons(destination)) == 7
    taken(destination, batch[1:5], value=value)
    assert destination.ids() == [1, 6, 8]


def test_a_table_becomes_no_wider_than_it_may():
    """E14, Mend d1: records that would add more columns are rejected, and others go on."""
    value = ValueOptions(envelope="upsert", columns_max=10)
    wide = {f"n{number}": number for number in range(9)}
    batch = [({"id": 1}, {"id": 1, **wide}), ({"id": 2}, {"id": 2, "v": 1, **wide})]
    batch += [({"id": 3}, {"id": 3, "n1": 3}), ({"id": 4}, {"id": 4, "s": {"x": 1}})]
    destination = Growing()
    taken(destination, batch, value=value)
    assert destination.ids() == [1, 3]
    assert all("`value.columns_max` is 10" in reason for reason in reasons(destination))


@pytest.mark.parametrize("names", [5_000, 20_000])
@pytest.mark.parametrize("envelope", ["upsert", "debezium"])
def test_a_record_with_very_many_names_is_a_letter(names, envelope):
    """E14, Mend d1: it costs no column, and the records around it are taken."""
    monster = {f"n{number}": number for number in range(names)}
    rows = [{"id": 1, "v": 1}, {"id": 2, **monster}, {"id": 3, "v": 3, "w": 1}]
    values = rows if envelope == "upsert" else [{"op": "c", "after": row} for row in rows]
    batch = [({"id": row["id"]}, value) for row, value in zip(rows, values, strict=True)]
    destination = Growing()
    taken(destination, batch, value=ValueOptions(envelope=envelope))
    assert destination.ids() == [1, 3]
    assert destination.columns() == {"id", "v", "w"}
    assert len(reasons(destination)) == 1


def test_many_records_with_a_name_each_are_bounded_too():
    """E14, Mend d1: what comes after as many names as there may be brings none."""
    batch = [({"id": n}, {"id": n, f"n{n}": 1}) for n in range(3_000)]
    batch.append(({"id": 5_000}, {"id": 5_000, "n1": 1}))
    destination = Growing()
    taken(destination, batch, value=ValueOptions(envelope="upsert", columns_max=100))
    assert destination.ids() == [*range(99), 5_000]
    assert len(reasons(destination)) == 3_000 - 99


def test_the_four_records_of_the_guide_become_a_row_two_deletes_and_a_letter():
    """U9, K3: the numbers of "The way of a record" in ARCHITECTURE.md."""
    cut_short = ({"id": 3}, b'{"op": "c", "aft')
    told = [event("c", id=1, amount=5), event("u", id=1, amount=7), event("d", id=2, amount=3)]
    split = split_of({("orders", 0): [records(*told, cut_short, first=100)]})
    columns = [Column(name=name, type=LongType()) for name in ("id", "amount")]
    orders = Destination(orders=TableShape(columns=columns, key=["id"]))
    found = dict(split.changes(orders))
    places = [found["orders"].column(name).to_pylist() for name in (OP, AT, SEQ)]
    assert places == [[Op.UPSERT, Op.UPSERT, Op.DELETE], [100, 101, 102], [100, 101, 102]]
    folded = fold(found["orders"], ["id"])
    assert folded.kept.select(["id", "amount"]).to_pylist() == [{"id": 1, "amount": 7}]
    assert folded.deleted.to_pylist() == [{"id": 1}, {"id": 2}]
    (letter,) = found[dead_letters.table_of("orders")].to_pylist()
    assert letter[dead_letters.POSITION] == "orders/0/103"
    assert letter["error"].startswith("the record's value is not JSON: ")
    assert letter[OP] == Op.INSERT
