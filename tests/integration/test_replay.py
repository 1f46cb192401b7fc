"""Dead letters are tried again on a real broker; Spark SQL and the log itself are asked."""

import json
import random
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from icestream.config import open_sink, parse
from icestream.errors import ConfigInvalid, HistoryLost, SchemaRejected
from icestream.failpoints import FailpointError
from icestream.iceberg.table import OWNER_PROPERTY
from icestream.sources import LettersTried
from tests.integration.pipelines import Document, Shell, assert_refused
from tests.integration.topics import NAMESPACE, PIPELINE, Topics, created, updated

LETTERS = "orders__dead_letters"
DEBEZIUM = {"value": {"format": "json", "envelope": "debezium"}}
# `put` and `drop` are unknown at first: records that say so are letters.
FIRST = {"i": "insert", "u": "update", "d": "delete"}
LATER = {**FIRST, "put": "update", "drop": "delete", "new": "insert"}


def told(operations: dict[str, str]) -> dict[str, Any]:
    """A source whose records tell their operation by a field."""
    value = {"envelope": "cdc_field", "cdc_field": "op", "operations": operations}
    return {"topics": ["orders"], "value": value}


def documents(topics: Topics, **top: Any) -> tuple[Document, Document]:
    """The pipeline before and after its operator has said what the other operations mean."""
    first, later = (
        topics.document(told(operations), on_error="dead_letter", **top)
        for operations in (FIRST, LATER)
    )
    return first, later


def change(key: int, op: str, v: Any = None) -> tuple[Any, Any]:
    """A record of one key."""
    return {"id": key}, {"id": key, "op": op, "v": v}


def replay(topics: Topics, document: Document, **options: Any) -> list[LettersTried]:
    """Try letters again in this process."""
    return list(topics.pipeline(document).replay(**options))


def expected(topics: Topics, operations: dict[str, str], partitions: int) -> dict[int, Any]:
    """What the log leaves when these operations are understood, by key."""
    rows: dict[int, Any] = {}
    for key, value in topics.log("orders", partitions):
        meaning = operations.get(value["op"])
        if meaning == "delete":
            rows.pop(key["id"], None)
        elif meaning:
            rows[key["id"]] = value["v"]
    return rows


def stored(topics: Topics) -> dict[int, Any]:
    """What the table has, by key; each key once."""
    rows = topics.rows("orders")
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["v"] for row in rows}


def positions(topics: Topics, table: str = LETTERS) -> list[str]:
    """Where the letters are that are left."""
    return [row["position"] for row in topics.rows(table, "position")]


def test_letters_that_can_be_taken_now_leave_the_table_as_the_log_says(topics):
    """E10, K8: four partitions, any order of letters and others; then the pipeline goes on."""
    topics.create("orders", 4)
    generator = random.Random(1)

    def some(count: int) -> list[tuple[Any, Any]]:
        ops = list(FIRST)[1:] * 3 + ["put", "drop"]
        return [
            change(generator.randrange(60), generator.choice(ops), generator.randrange(1000))
            for _ in range(count)
        ]

    first, later = documents(topics)
    for _ in range(2):
        topics.send("orders", some(300))
        topics.run(first)
    assert stored(topics) != expected(topics, LATER, 4)
    letters = len(positions(topics))
    assert {text.split("/")[1] for text in positions(topics)} == {"0", "1", "2", "3"}
    before = topics.epochs("orders")[-1]["summary"]
    [tried] = replay(topics, later)
    assert (tried.read, tried.taken, tried.rejected) == (letters, letters, {})
    assert stored(topics) == expected(topics, LATER, 4)
    assert positions(topics) == []
    offsets = json.loads(before["icestream.frontier"])
    after = json.loads(topics.epochs("orders")[-1]["summary"]["icestream.frontier"])
    assert {name: at for name, at in after.items() if name in offsets} == offsets
    topics.send("orders", some(100))
    topics.run(later)
    assert stored(topics) == expected(topics, LATER, 4)
    newest = topics.epochs("orders")[-1]["summary"]
    assert json.loads(newest["icestream.lower"]) == after


def test_a_later_record_of_the_key_wins(topics):
    """E10, E3: an update, a delete, a delete and a new row after the letter; and none."""
    topics.create("orders")
    first, later = documents(topics)
    topics.send("orders", [change(n, "i", "old") for n in range(1, 6)])
    topics.send("orders", [change(n, "put", "letter") for n in range(1, 5)])
    topics.send("orders", [change(5, "drop")])
    topics.send("orders", [change(1, "u", "new"), change(2, "d")])
    topics.send("orders", [change(3, "d"), change(3, "i", "again")])
    topics.run(first)
    assert stored(topics) == {1: "new", 3: "again", 4: "old", 5: "old"}
    replay(topics, later)
    assert stored(topics) == {1: "new", 3: "again", 4: "letter"}
    assert positions(topics) == []


def test_an_insert_that_is_late_does_not_double_the_row(topics):
    """E10: the row came by a later record, so that the key is no longer new."""
    topics.create("orders")
    first, later = documents(topics)
    topics.send("orders", [change(1, "new", "first"), change(1, "u", "second")])
    topics.run(first)
    replay(topics, later)
    assert stored(topics) == {1: "second"}
    assert positions(topics) == []


def test_what_cannot_be_taken_yet_stays_and_says_why(topics, shell: Shell):
    """E10, K8, U2: with its new reason; counts for people and for programs."""
    topics.create("orders")
    first, later = documents(topics)
    broken = (b'{"id": 9}', b"{")
    topics.send("orders", [change(1, "i", "x"), change(2, "put", "y"), broken])
    topics.send("orders", [change(3, "what", "z"), change(4, "drop")])
    topics.run(first)
    answer = shell("replay", shell.write(later), "--json")
    assert answer.code == 0, answer.err
    [row] = answer.rows()
    assert (row["letters"], row["read"]) == (f"{topics.name('orders')}__dead_letters", 4)
    assert (row["taken"], row["rejected"]) == (2, 2)
    assert sorted(row["reasons"].values()) == [1, 1]
    assert stored(topics) == {1: "x", 2: "y"}
    name = topics.name("orders")
    assert positions(topics) == [f"{name}/0/2", f"{name}/0/3"]
    payloads = [bytes(row["payload"]) for row in topics.rows(LETTERS, "position")]
    assert payloads[0] == broken[1]
    epochs = len(topics.epochs("orders")), len(topics.epochs(LETTERS))
    again = shell("replay", shell.write(later), "--table", topics.name("orders"))
    assert "2 read, 0 taken, 2 still rejected\n  1: " in again.out
    assert (len(topics.epochs("orders")), len(topics.epochs(LETTERS))) == epochs
    # The reason is the one of the last try.
    changed = topics.document(
        {**told(LATER), "value": {**told(LATER)["value"], "cdc_field": "kind"}},
        on_error="dead_letter",
    )
    [tried] = replay(topics, changed)
    assert tried.taken == 0
    errors = [row["error"] for row in topics.rows(LETTERS, "position")]
    assert "lacks the member kind" in errors[1]
    assert positions(topics) == [f"{name}/0/2", f"{name}/0/3"]


def test_without_letters_nothing_is_touched(topics, shell: Shell):
    """E10, U2: no claim either, so that a running pipeline goes on."""
    topics.create("orders")
    first, later = documents(topics)
    topics.send("orders", [change(1, "i", "x")])
    topics.run(first)
    before = topics.lake.snapshots(f"{NAMESPACE}.orders")
    answer = shell("replay", shell.write(later))
    assert (answer.code, answer.out) == (0, "")
    assert "no dead letters" in answer.err
    assert topics.lake.snapshots(f"{NAMESPACE}.orders") == before
    assert_refused(
        shell("replay", shell.write(later), "--table", "other"), 2, "table other has no dead"
    )
    stops = topics.document(told(LATER))
    assert_refused(shell("replay", shell.write(stops)), 2, "keeps no dead letters")


def test_a_table_that_was_altered_takes_its_letters(topics):
    """E10, I11: the operator gives the column another type; each record is one row, once."""
    topics.create("orders", 2)
    document = topics.document({"topics": ["orders"]}, on_error="dead_letter")
    topics.send("orders", [(None, {"id": n, "v": n}) for n in range(4)])
    topics.run(document)
    # Without keys the producer chooses the partitions, so they are named.
    topics.send("orders", [(None, {"id": n, "v": "text"}) for n in (4, 5)], 0)
    topics.send("orders", [(None, {"id": 6, "v": "text"}), (None, {"id": 7, "v": 7})], 1)
    topics.run(document)
    assert [row["id"] for row in topics.rows("orders", "id")] == [0, 1, 2, 3, 7]
    assert len(positions(topics)) == 3
    table = topics.lake.table(f"{NAMESPACE}.orders")
    topics.lake.sql(f"ALTER TABLE {table} RENAME COLUMN v TO v_number")
    topics.lake.sql(f"ALTER TABLE {table} ADD COLUMN v STRING")
    for _ in range(2):
        replay(topics, document)
    rows = topics.rows("orders", "id")
    assert [row["id"] for row in rows] == list(range(8))
    assert {row["id"]: row["v"] for row in rows if row["v"]} == dict.fromkeys((4, 5, 6), "text")
    assert positions(topics) == []


def test_a_log_that_does_not_reach_back_is_said_before_anything_is_done(topics, shell: Shell):
    """E7, E10: rows by key need it; --as-is applies the letters over what is there."""
    name = topics.create("orders")
    first, later = documents(topics)
    topics.send("orders", [change(1, "put", "letter"), change(2, "put", "letter")])
    topics.send("orders", [change(1, "u", "new"), change(3, "i", "x")])
    topics.run(first)
    forget(topics, name, 2)
    before = topics.lake.snapshots(f"{NAMESPACE}.orders")
    with pytest.raises(HistoryLost, match="no longer reaches back") as caught:
        replay(topics, later)
    assert "--as-is" in str(caught.value)
    assert topics.lake.snapshots(f"{NAMESPACE}.orders") == before
    answer = shell("replay", shell.write(later), "--as-is")
    assert answer.code == 0, answer.err
    assert stored(topics) == {1: "letter", 2: "letter", 3: "x"}
    assert positions(topics) == []


def test_rows_that_are_only_added_need_no_log(topics):
    """E10: the letters have all that it takes."""
    name = topics.create("orders")
    document = topics.document({"topics": ["orders"]}, on_error="dead_letter")
    topics.send("orders", [(None, {"id": 1}), (None, b"{"), (None, b"\xff"), (None, {"id": 2})])
    topics.run(document)
    forget(topics, name, 4)
    plain = {"topics": ["orders"], "value": {"format": "string"}}
    replay(topics, topics.document(plain, on_error="dead_letter"))
    rows = topics.rows("orders")
    assert sorted(str(row["id"] or row["value"]) for row in rows) == ["1", "2", "{"]
    assert positions(topics) == [f"{name}/0/2"]


def forget(topics: Topics, name: str, offset: int, partition: int = 0) -> None:
    """Let the broker lose the records of a partition before an offset."""
    admin = AdminClient({"bootstrap.servers": topics.broker.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(name, partition, offset)]).values():
        future.result(30)


def test_letters_are_tried_in_bounded_groups(topics):
    """E9, E10: each group is an epoch of its own."""
    topics.create("orders", 2)
    first, later = documents(topics, epoch_rows_max=3)
    topics.send("orders", [change(n, "put", n) for n in range(8)])
    topics.send("orders", [change(n, "u", -n) for n in range(4)])
    topics.run(first)
    before = len(topics.epochs(LETTERS))
    [tried] = replay(topics, later)
    assert tried.taken == 8
    assert len(topics.epochs(LETTERS)) == before + 3
    assert stored(topics) == {0: 0, 1: -1, 2: -2, 3: -3, 4: 4, 5: 5, 6: 6, 7: 7}


def test_letters_of_several_groups_are_applied_in_their_order(topics):
    """E10, Mend h6: --as-is; of twelve letters of a key the last is the row."""
    topics.create("orders", 1)
    first, later = documents(topics, epoch_rows_max=5)
    topics.send("orders", [change(1, "put", n) for n in range(12)])
    topics.run(first)
    [tried] = replay(topics, later, as_is=True)
    assert tried.taken == 12
    assert stored(topics) == {1: 11}


def test_a_letter_belongs_to_the_table_that_refused_it(topics):
    """E10, K4: other tables have taken the record already."""
    topics.create("orders")
    sink = {"route": {"tables": {"one": "", "two": ""}}, "tables": {"two": {"table": "two"}}}
    document = topics.document({"topics": ["orders"]}, sink, on_error="dead_letter")
    topics.lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {topics.lake.name}.{NAMESPACE}")
    two = topics.lake.table(f"{NAMESPACE}.two")
    topics.lake.sql(f"CREATE TABLE {two} (id BIGINT, v BIGINT) USING iceberg")
    topics.send("orders", [(None, {"id": 1, "v": "a"}), (None, {"id": 2}), (None, b"{")])
    topics.run(document)
    assert [row["id"] for row in topics.rows("one", "id")] == [1, 2]
    assert [row["id"] for row in topics.rows("two", "id")] == [2]
    topics.lake.sql(f"ALTER TABLE {two} RENAME COLUMN v TO w")
    topics.lake.sql(f"ALTER TABLE {two} ADD COLUMN v STRING")
    tried = {each.table: each.taken for each in replay(topics, document)}
    assert tried == {"two__dead_letters": 1, f"{topics.name('orders')}__dead_letters": 0}
    assert [row["id"] for row in topics.rows("one", "id")] == [1, 2]
    assert [row["id"] for row in topics.rows("two", "id")] == [1, 2]
    assert positions(topics, "two__dead_letters") == []
    assert positions(topics) == [f"{topics.name('orders')}/0/2"]


def test_letters_of_a_topic_may_belong_to_any_table(topics):
    """E10, K4: the route has changed; what a table refuses becomes a letter of that table."""
    topics.create("orders")

    def document(**tables: str) -> Document:
        sink = {"route": {"field": "kind", "tables": tables}, "tables": {"two": {"table": "two"}}}
        return topics.document({"topics": ["orders"]}, sink, on_error="dead_letter")

    rows = [{"id": n, "kind": kind} for n, kind in enumerate(["a", "b", "c", "c"])]
    topics.send("orders", [(None, row) for row in rows])
    topics.send("orders", [(None, {"id": 4, "kind": "b", "v": "text"})])
    topics.run(document(one="^a$"))
    assert len(positions(topics)) == 4
    two = topics.lake.table(f"{NAMESPACE}.two")
    topics.lake.sql(f"CREATE TABLE {two} (id BIGINT, kind STRING, v BIGINT) USING iceberg")
    replay(topics, document(one="^a$", two="^b$"))
    assert [row["id"] for row in topics.rows("one")] == [0]
    assert [row["id"] for row in topics.rows("two")] == [1]
    name = topics.name("orders")
    assert positions(topics) == [f"{name}/0/2", f"{name}/0/3"]
    assert positions(topics, "two__dead_letters") == [f"{name}/0/4"]


@pytest.mark.parametrize("first", ["run", "replay"])
def test_a_table_that_never_came_to_be_has_each_letter_once(topics, first):
    """E3, E10: its topic is read again from the beginning, and the letters are tried again."""
    topics.create("orders")
    wrong = {"topics": ["orders"], "value": {"envelope": "upsert"}}
    topics.send("orders", [(None, {"id": n}) for n in range(3)])
    topics.run(topics.document(wrong, on_error="dead_letter"))
    assert len(positions(topics)) == 3
    topics.send("orders", [(None, {"id": 3})])
    right = topics.document({"topics": ["orders"]}, on_error="dead_letter")
    for command in (first, "replay", "run"):
        topics.run(right) if command == "run" else replay(topics, right)
    assert [row["id"] for row in topics.rows("orders", "id")] == [0, 1, 2, 3]
    assert positions(topics) == []


def test_a_dropped_table_is_built_anew_with_each_letter_once(topics):
    """E3, E10: those that were taken before come from the log, the others when they are tried."""
    topics.create("orders")
    document = topics.document({"topics": ["orders"]}, on_error="dead_letter")
    plain = topics.document(
        {"topics": ["orders"], "value": {"format": "string"}}, on_error="dead_letter"
    )
    topics.send("orders", [(None, {"id": 1}), (None, b"one"), (None, b"\xff")])
    topics.run(document)
    replay(topics, plain)
    topics.send("orders", [(None, b"two")])
    topics.run(document)
    assert len(positions(topics)) == 2
    topics.lake.sql(f"DROP TABLE {topics.lake.table(f'{NAMESPACE}.orders')}")
    topics.run(plain)
    assert [row["value"] for row in topics.rows("orders", "value")] == ["one", '{"id": 1}']
    replay(topics, plain)
    rows = topics.rows("orders", "value")
    assert [row["value"] for row in rows] == ["one", "two", '{"id": 1}']
    assert positions(topics) == [f"{topics.name('orders')}/0/2"]


@pytest.mark.parametrize("envelope", ["none", "upsert"])
def test_a_table_that_was_rolled_back_gets_its_letters_again(topics, envelope):
    """E8, E10: to before the replay, and to before records that came ahead of it."""
    topics.create("orders")
    source = {"topics": ["orders"], "value": {"envelope": envelope}}
    document = topics.document(source, on_error="dead_letter")
    for records in (
        [({"id": 1}, {"id": 1, "v": 1})],
        [({"id": 2}, {"id": 2, "v": "text"}), ({"id": 3}, {"id": 3, "v": 3})],
        [({"id": 4}, {"id": 4, "v": 4}), ({"id": 1}, b"{")],
    ):
        topics.send("orders", records)
        topics.run(document)
    table = topics.lake.table(f"{NAMESPACE}.orders")
    topics.lake.sql(f"ALTER TABLE {table} RENAME COLUMN v TO v_number")
    topics.lake.sql(f"ALTER TABLE {table} ADD COLUMN v STRING")
    replay(topics, document)
    assert [row["id"] for row in topics.rows("orders", "id")] == [1, 2, 3, 4]
    # The letter lies before the point rolled back to, then behind it.
    for snapshot_id in [each["snapshot_id"] for each in reversed(topics.epochs("orders")[:3])]:
        call = f"CALL {topics.lake.name}.system.rollback_to_snapshot"
        topics.lake.sql(f"{call}(table => '{NAMESPACE}.orders', snapshot_id => {snapshot_id})")
        sink = open_sink(parse(document).pipelines[0], topics.lake.spark)
        sink.settle_rollback(topics.name("orders"), replay=True)
        topics.run(document)
        assert [row["id"] for row in topics.rows("orders", "id")] == [1, 2, 3, 4]
        assert positions(topics) == [f"{topics.name('orders')}/0/4"]


def test_records_of_a_key_in_several_partitions_are_refused(topics):
    """E10, K1: nothing tells whether a letter is older than its row."""
    topics.create("orders", 2)
    first, later = documents(topics)
    topics.send("orders", [change(1, "put", "letter")])
    topics.run(first)
    later[PIPELINE]["source"]["kafka"]["keyed"] = False
    with pytest.raises(ConfigInvalid, match="keyed: false"):
        replay(topics, later)
    replay(topics, later, as_is=True)
    assert stored(topics) == {1: "letter"}


def grown_topic(topics: Topics, first: Document) -> str:
    """A topic that was given partitions; letters lie before and after, and later records."""
    name = topics.create("orders")
    topics.send("orders", [change(n, "i", "old") for n in range(40)])
    topics.send("orders", [change(n, "put", "letter") for n in range(30)])
    topics.run(first)
    topics.broker.add_partitions(name, 4)
    topics.send("orders", [change(n, "u" if n % 2 else "d", "new") for n in range(10)])
    topics.send("orders", [change(n, "put", "second letter") for n in range(5, 20)])
    topics.run(first)
    assert {place.split("/")[1] for place in positions(topics)} == {"0", "1", "2", "3"}
    return name


def test_a_letter_of_a_key_that_has_moved_is_older_than_its_later_records(topics):
    """E10, K10, Mend b9: the topic was given partitions, and all of them tell what is newer."""
    first, later = documents(topics)
    grown_topic(topics, first)
    replay(topics, later)
    expected = {n: "new" for n in range(5) if n % 2}
    expected |= dict.fromkeys(range(5, 20), "second letter")
    expected |= dict.fromkeys(range(20, 30), "letter")
    expected |= dict.fromkeys(range(30, 40), "old")
    assert stored(topics) == expected
    assert positions(topics) == []
    topics.send("orders", [change(0, "i", "last"), change(1, "u", "last")])
    topics.run(later)
    assert stored(topics) == {**expected, 0: "last", 1: "last"}


def test_letters_of_a_key_in_two_partitions_are_one_row_as_they_are(topics):
    """E10, E3, Mend b9: --as-is; the last letter is the row, whatever was there."""
    first, later = documents(topics)
    name = grown_topic(topics, first)
    forget(topics, name, 50)
    replay(topics, later, as_is=True)
    expected = dict.fromkeys(range(30), "letter") | dict.fromkeys(range(5, 20), "second letter")
    assert stored(topics) == {**expected, **dict.fromkeys(range(30, 40), "old")}
    assert positions(topics) == []


def test_a_partition_that_the_key_may_have_moved_to_must_reach_back_too(topics, shell: Shell):
    """E7, E10, Mend b9: what it has lost may have been newer than the letter."""
    first, later = documents(topics)
    name = grown_topic(topics, first)
    forget(topics, name, 1, partition=2)
    before = topics.lake.snapshots(f"{NAMESPACE}.orders")
    answer = shell("replay", shell.write(later))
    assert_refused(answer, 3, "partition 2", "no longer reaches back", "--as-is")
    assert topics.lake.snapshots(f"{NAMESPACE}.orders") == before
    assert positions(topics) != []


def test_letters_of_an_older_version_leave_too(topics):
    """E10: its tables of letters were made without a key."""
    topics.create("orders")
    first, later = documents(topics)
    topics.lake.sql(f"CREATE NAMESPACE IF NOT EXISTS {topics.lake.name}.{NAMESPACE}")
    columns = "position STRING, error STRING, key BINARY, payload BINARY, at TIMESTAMP"
    table = topics.lake.table(f"{NAMESPACE}.{LETTERS}")
    owner = json.dumps({"pipeline": PIPELINE, "table": topics.name(LETTERS)})
    topics.lake.sql(
        f"CREATE TABLE {table} ({columns}) USING iceberg "
        f"TBLPROPERTIES ('{OWNER_PROPERTY}' = '{owner}')"
    )
    topics.send("orders", [change(1, "put", "letter"), change(2, "what")])
    topics.run(first)
    replay(topics, later)
    assert stored(topics) == {1: "letter"}
    assert positions(topics) == [f"{topics.name('orders')}/0/1"]


def test_letters_of_a_table_with_a_select_are_taken_by_a_type_that_is_declared(topics):
    """E10, E11, Mend k1: the table is altered, and the source's column declared; once is enough."""
    name = topics.create("orders")
    text = "select id, upper(name) as name, v, region from changes where region = 'eu'"
    source = {"topics": ["orders"], **DEBEZIUM}
    top = {"on_error": "dead_letter", "transform": {name: text}}
    document = topics.document(source, **top)
    topics.send("orders", [created(n, name=f"n{n}", v=n, region="eu") for n in (7, 8, 10, 13)])
    topics.run(document)
    late = [(8, "eu"), (7, "us"), (13, "eu")]
    topics.send("orders", [updated(n, name=f"l{n}", v="bad", region=r) for n, r in late])
    topics.run(document)
    assert len(topics.rows(LETTERS)) == 3
    declared = topics.document({**source, "columns": {name: {"v": "string"}}}, **top)
    with pytest.raises(SchemaRejected, match=r"column v .* cannot become string") as caught:
        topics.pipeline(declared).replay()
    assert "Rename the table's column" in str(caught.value.hint)
    table = topics.lake.table(f"{NAMESPACE}.orders")
    # The new column is added by the first epoch that has it.
    topics.lake.sql(f"ALTER TABLE {table} RENAME COLUMN v TO v_old")
    [tried] = topics.pipeline(declared).replay()
    assert (tried.read, tried.taken) == (3, 3)
    wanted = {8: ("L8", "bad"), 10: ("N10", None), 13: ("L13", "bad")}
    assert {r["id"]: (r["name"], r["v"]) for r in topics.rows("orders")} == wanted
    assert topics.rows(LETTERS) == []
    # The table remembers the type: the declaration may go again.
    topics.send("orders", [created(1, name="n1", v=1, region="eu")])
    topics.send("orders", [created(2, name="n2", v="text", region="eu")])
    topics.run(document)
    wanted |= {1: ("N1", "1"), 2: ("N2", "text")}
    assert {r["id"]: (r["name"], r["v"]) for r in topics.rows("orders")} == wanted
    assert topics.rows(LETTERS) == []


def test_a_type_that_is_declared_in_the_middle_of_an_epoch_counts_for_the_next(topics, fail):
    """E3, I17, Mend k1: else a record would be neither a row nor a letter."""
    name = topics.create("orders")
    source = {"topics": ["orders"], **DEBEZIUM}
    top = {"on_error": "dead_letter", "transform": {name: "select id, v from changes where id < 9"}}
    topics.send("orders", [created(1, v=1), created(2, v=2)])
    topics.run(topics.document(source, **top))
    topics.send("orders", [updated(1, v="late"), updated(2, v=3)])
    # The table has the epoch then, and its letters do not.
    fail("after-publish=error@1")
    with pytest.raises(FailpointError):
        topics.run(topics.document(source, **top))
    fail("")
    assert {row["id"]: row["v"] for row in topics.rows("orders")} == {1: 1, 2: 3}
    table = topics.lake.table(f"{NAMESPACE}.orders")
    topics.lake.sql(f"ALTER TABLE {table} RENAME COLUMN v TO v_old")
    topics.lake.sql(f"ALTER TABLE {table} ADD COLUMN v STRING")
    declared = topics.document({**source, "columns": {name: {"v": "string"}}}, **top)
    topics.run(declared)
    assert len(topics.rows(LETTERS)) == 1
    [tried] = topics.pipeline(declared).replay()
    assert (tried.read, tried.taken) == (1, 1)
    assert {row["id"]: row["v"] for row in topics.rows("orders")} == {1: "late", 2: None}
