"""Values that Debezium does not send because they did not change are kept; Spark SQL is asked."""

import inspect
import json
import random
from typing import Any

import pytest

from icestream import failpoints
from icestream.errors import DataRejected
from icestream.formats.options import UNAVAILABLE_VALUE
from tests.integration.test_kafka import avro
from tests.integration.topics import NAMESPACE, Topics, created, deleted, updated
from tests.registry import StandInRegistry

DEBEZIUM = {"value": {"format": "json", "envelope": "debezium"}}
KEPT = UNAVAILABLE_VALUE
TOO_LARGE_FOR_ONE_BATCH = 20


def found(topics: Topics, table: str) -> dict[int, tuple[Any, Any]]:
    rows = topics.rows(table)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: (row["n"], row["big"]) for row in rows}


def test_a_value_that_was_not_sent_is_kept(topics):
    """P7, K3: from an earlier epoch, after a restart, from an earlier change; in two tables."""
    for topic in ("orders", "users"):
        topics.create(topic, 2)
        topics.send(topic, [created(key, n=0, big=f"{topic} {key}") for key in range(8)])
    document = topics.document({"topics": ["orders", "users"], **DEBEZIUM})
    topics.run(document)
    for topic in ("orders", "users"):
        topics.send(topic, [updated(key, n=1, big=KEPT) for key in range(6)])
        topics.send(topic, [updated(0, n=2, big=f"{topic} new"), updated(0, n=3, big=KEPT)])
        topics.send(topic, [created(9, n=0, big=f"{topic} 9"), updated(9, n=1, big=KEPT)])
        topics.send(topic, [deleted(1), updated(2, n=2, big=KEPT)])
    topics.run(document)
    for topic in ("orders", "users"):
        stored = {key: (1, f"{topic} {key}") for key in (3, 4, 5)}
        assert found(topics, topic) == {
            **stored,
            0: (3, f"{topic} new"),
            2: (2, f"{topic} 2"),
            6: (0, f"{topic} 6"),
            7: (0, f"{topic} 7"),
            9: (1, f"{topic} 9"),
        }
        assert len(topics.epochs(topic)) == 2


def test_random_events_end_as_the_database_has_the_rows(topics):
    """P7, K3: many small epochs at once; a lookup waits for those before it."""
    topics.create("orders", 3)
    generator = random.Random(7)
    rows: dict[int, tuple[int, str]] = {}
    document = topics.document({"topics": ["orders"], **DEBEZIUM}, epoch_rows_max=40)
    for _ in range(2):
        events = []
        for number in range(200):
            key = generator.randrange(30)
            if key not in rows:
                rows[key] = (number, f"{number}")
                events.append(created(key, n=number, big=f"{number}"))
            elif generator.random() < 0.2:
                del rows[key]
                events.append(deleted(key))
            elif generator.random() < 0.7:
                rows[key] = (number, rows[key][1])
                events.append(updated(key, n=number, big=KEPT))
            else:
                rows[key] = (number, f"{number}")
                events.append(updated(key, n=number, big=f"{number}"))
        topics.send("orders", events)
        topics.run(document)
        assert found(topics, "orders") == rows
    assert len(topics.epochs("orders")) > 4


def test_the_change_before_may_be_in_another_batch(topics):
    """P7: more than a worker reads at once lies between the two."""
    topics.create("orders")
    topics.send("orders", [created(1, n=1, big="old")])
    document = topics.document({"topics": ["orders"], **DEBEZIUM})
    topics.run(document)
    topics.send("orders", [updated(1, n=2, big="new")])
    text = "x" * 950_000
    others = [created(10 + key, n=0, big=text) for key in range(TOO_LARGE_FOR_ONE_BATCH)]
    topics.send("orders", [*others, updated(1, n=3, big=KEPT)])
    topics.run(document)
    rows = found(topics, "orders")
    assert rows[1] == (3, "new")
    assert len(topics.epochs("orders")) == 2
    assert [len(rows[10 + key][1]) for key in range(TOO_LARGE_FOR_ONE_BATCH)] == (
        [len(text)] * TOO_LARGE_FOR_ONE_BATCH
    )


def test_a_row_that_is_not_there_is_a_dead_letter(topics):
    """P7, K8: by default the pipeline stops and says what to set."""
    topics.create("orders")
    topics.send("orders", [updated(1, n=1, big=KEPT)])
    with pytest.raises(DataRejected, match="cannot be taken") as caught:
        topics.run(topics.document({"topics": ["orders"], **DEBEZIUM}))
    assert "offset 0: the value of column big" in str(caught.value)
    assert "REPLICA IDENTITY" in str(caught.value)
    topics.send("orders", [created(2, n=1, big="a"), updated(2, n=2, big=KEPT)])
    # A change of a key: the value is that of a row to which nothing leads.
    topics.send("orders", [deleted(2), created(3, n=2, big=KEPT)])
    topics.send("orders", [created(4, n=1, big="b")])
    document = topics.document({"topics": ["orders"], **DEBEZIUM}, on_error="dead_letter")
    topics.run(document)
    topics.send("orders", [updated(4, n=2, big=KEPT)])
    topics.run(document)
    assert found(topics, "orders") == {4: (2, "b")}
    letters = topics.rows("orders__dead_letters", "position")
    assert [json.loads(row["payload"])["after"]["id"] for row in letters] == [1, 3]
    assert all("REPLICA IDENTITY" in row["error"] for row in letters)


def test_letters_that_are_tried_again_keep_values_too(topics):
    """E10, P7: what was not sent after a letter is the letter's, and before it the stored row's."""
    topics.create("orders")
    document = topics.document({"topics": ["orders"], **DEBEZIUM}, on_error="dead_letter")
    topics.send("orders", [created(key, n=0, big=f"old {key}", flag=0) for key in (1, 2, 3)])
    topics.run(document)
    topics.send("orders", [updated(1, n=1, big="new", flag="x"), updated(1, n=2, big=KEPT)])
    topics.send("orders", [updated(2, n=1, big=KEPT, flag="x")])
    topics.send("orders", [updated(3, n=1, big=KEPT, flag="x"), updated(3, n=2, big="sent")])
    topics.run(document)
    assert found(topics, "orders") == {1: (2, "old 1"), 2: (0, "old 2"), 3: (2, "sent")}
    table = topics.lake.table(f"{NAMESPACE}.orders")
    topics.lake.sql(f"ALTER TABLE {table} RENAME COLUMN flag TO flag_number")
    topics.lake.sql(f"ALTER TABLE {table} ADD COLUMN flag STRING")
    [tried] = topics.pipeline(document).replay()
    assert (tried.read, tried.taken) == (3, 3)
    assert found(topics, "orders") == {1: (2, "new"), 2: (1, "old 2"), 3: (2, "sent")}
    assert topics.rows("orders__dead_letters") == []


def test_a_value_that_a_select_lets_pass_is_kept(topics):
    """E11, P7: under another name too; what only the select has seen nobody can tell."""
    name = topics.create("orders")
    topics.send("orders", [created(key, n=1, big=f"old {key}") for key in (1, 2)])
    text = "select id, n * 10 as n, big as large from changes"
    passing = topics.document({"topics": ["orders"], **DEBEZIUM}, transform={name: text})
    topics.run(passing)
    topics.send("orders", [updated(1, n=2, big=KEPT)])
    topics.run(passing)
    rows = {row["id"]: (row["n"], row["large"]) for row in topics.rows("orders")}
    assert rows == {1: (20, "old 1"), 2: (10, "old 2")}
    topics.send("orders", [updated(2, n=2, big=KEPT)])
    text = "select id, n * 10 as n, upper(big) as large from changes"
    with pytest.raises(DataRejected, match="cannot be taken") as caught:
        topics.run(topics.document({"topics": ["orders"], **DEBEZIUM}, transform={name: text}))
    assert "the value of column big did not change and was not sent" in str(caught.value)
    assert "on_error: dead_letter" in str(caught.value.hint)


def test_a_value_that_only_a_select_has_seen_makes_a_letter_and_no_stop(topics):
    """E11, K8, P7, Mend k2: also of a row outside of the condition; a whole one puts it right."""
    name = topics.create("orders")
    text = "select id, length(big) as size, tail, region from changes where region = 'eu'"
    source = {"topics": ["orders"], **DEBEZIUM}
    document = topics.document(source, transform={name: text}, on_error="dead_letter")
    topics.send("orders", [created(1, big="one", tail="t1", region="eu")])
    topics.send("orders", [created(2, big="two", tail="t2", region="us")])
    topics.run(document)
    topics.send("orders", [updated(2, big=KEPT, tail="t3", region="us")])
    topics.send("orders", [updated(1, big=KEPT, tail=KEPT, region="eu")])
    # The change before it, in the same epoch, has the value.
    topics.send("orders", [created(3, big="three", tail="t4", region="eu")])
    topics.send("orders", [updated(3, big=KEPT, tail="t5", region="eu")])
    topics.run(document)

    def rows() -> dict[int, tuple[Any, Any]]:
        return {row["id"]: (row["size"], row["tail"]) for row in topics.rows("orders")}

    assert rows() == {1: (3, "t1"), 3: (5, "t5")}
    letters = topics.rows("orders__dead_letters", "position")
    assert [json.loads(row["payload"])["after"]["id"] for row in letters] == [2, 1]
    assert all("the value of column big did not change" in row["error"] for row in letters)
    # The table's REPLICA IDENTITY is FULL from here on.
    topics.send("orders", [updated(1, big="large", tail="t6", region="eu")])
    topics.send("orders", [updated(2, big="large", tail="t7", region="us")])
    topics.run(document)
    assert rows() == {1: (5, "t6"), 3: (5, "t5")}


@pytest.mark.parametrize("keyed", [True, False])
def test_a_value_that_a_select_does_not_read_is_not_missed(topics, keyed):
    """E11, P7, Mend h3: the record is taken, whatever the value was and wherever it is."""
    name = topics.create("orders", 2)
    topics.send("orders", [created(key, n=1, big=f"old {key}") for key in (1, 2)])
    text = "select id, n * 10 as n from changes"
    source = {"topics": ["orders"], **DEBEZIUM, "keyed": keyed}
    document = topics.document(source, transform={name: text}, on_error="dead_letter")
    topics.run(document)
    topics.send("orders", [updated(1, n=2, big=KEPT), updated(3, n=3, big=KEPT)])
    topics.run(document)
    assert {row["id"]: row["n"] for row in topics.rows("orders")} == {1: 20, 2: 10, 3: 30}
    assert len(topics.epochs("orders")) == 2
    assert topics.epochs("orders__dead_letters") == []


def test_without_keyed_partitions_such_a_record_is_refused(topics):
    """P7, K1: the change before it may be in a partition that another worker reads."""
    topics.create("orders", 2)
    topics.send("orders", [created(1, n=1, big="a"), created(2, n=1, big="b")], 0, at=1000)
    topics.send("orders", [updated(1, n=2, big=KEPT), updated(2, n=2, big="c")], 1, at=2000)
    source = {"topics": ["orders"], **DEBEZIUM, "keyed": False}
    topics.run(topics.document(source, on_error="dead_letter"))
    assert found(topics, "orders") == {1: (1, "a"), 2: (2, "c")}
    [letter] = topics.rows("orders__dead_letters")
    assert "`keyed: false`" in letter["error"]


def test_an_epoch_that_only_some_tables_took_is_finished_alike(topics, monkeypatch):
    """E3, K6: a table that took the epoch is looked up as it was before it."""
    topics.create("orders")
    topics.send("orders", [created(key, n=0, big=f"{key}") for key in range(3)])
    document = topics.document({"topics": ["orders"], **DEBEZIUM}, on_error="dead_letter")
    topics.run(document)
    topics.send("orders", [updated(0, n=1, big=KEPT), deleted(0), updated(1, n=1, big=KEPT)])
    topics.send("orders", [updated(9, n=1, big=KEPT), created(9, n=2, big="9")])
    seen: list[str] = []

    def crash(place: str) -> None:
        if place == failpoints.BEFORE_SWAP and failpoints.AFTER_WRITE in seen:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            if str(frame.f_back.f_locals["handle"].name).endswith("__dead_letters"):
                raise MemoryError("the coordinator dies here")
        seen.append(place)

    # A failpoint in this process: the same place as in a killed one.
    monkeypatch.setattr(failpoints, "reach", crash)
    with pytest.raises(MemoryError):
        topics.run(document)
    # From here on nothing dies.
    monkeypatch.undo()
    expected = {1: (1, "1"), 2: (0, "2"), 9: (2, "9")}
    assert found(topics, "orders") == expected
    assert topics.epochs("orders__dead_letters") == []
    topics.run(document)
    assert found(topics, "orders") == expected
    letters = topics.rows("orders__dead_letters")
    assert [json.loads(row["payload"])["after"]["id"] for row in letters] == [9]
    assert len(topics.epochs("orders")) == 2


def test_a_table_that_is_replayed_gets_its_values_again(topics):
    """E4: out of its own rows; of tables that are further nothing is asked, and nothing refused."""
    for topic in ("one", "two"):
        topics.create(topic)
        topics.send(topic, [created(key, n=0, big=f"{topic} {key}") for key in range(3)])
    document = topics.document({"topics": ["one", "two"], **DEBEZIUM})
    topics.run(document)
    for topic in ("one", "two"):
        topics.send(topic, [updated(key, n=1, big=KEPT) for key in range(3)])
    topics.run(document)
    for topic in ("one", "two"):
        topics.send(topic, [updated(0, n=2, big=KEPT), deleted(1)])
    topics.run(document)
    topics.lake.sql(f"DROP TABLE {topics.lake.table('shop.one')}")
    topics.run(topics.document({"topics": ["one", "two"], **DEBEZIUM}, epoch_rows_max=4))
    for topic in ("one", "two"):
        assert found(topics, topic) == {0: (2, f"{topic} 0"), 2: (1, f"{topic} 2")}


def test_avro_values_that_were_not_sent_are_kept(topics):
    """P7, K3: as text, as bytes, as a list and as a map, in columns of these types."""
    topics.create("orders")
    kinds: dict[str, Any] = {
        "text": "string",
        "raw": "bytes",
        "many": {"type": "array", "items": "string"},
        "named": {"type": "map", "values": "string"},
    }
    fields = [{"name": name, "type": ["null", kind]} for name, kind in kinds.items()]
    identity = [{"name": "id", "type": "long"}, {"name": "n", "type": "long"}]
    row = {"type": "record", "name": "Value", "fields": [*identity, *fields]}
    parts = [
        {"name": "before", "type": ["null", row]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
    ]
    event = {"type": "record", "name": "Envelope", "fields": parts}
    key = {"type": "record", "name": "Key", "fields": identity[:1]}
    values = {"text": "a", "raw": b"\x00\xff", "many": ["x", "y"], "named": {"k": "v"}}
    kept = {"text": KEPT, "raw": KEPT.encode(), "many": [KEPT], "named": {KEPT: KEPT}}
    with StandInRegistry() as registry:
        key_id, id_ = (registry.register(n, json.dumps(s)) for n, s in (("k", key), ("v", event)))

        def send(op: str, number: int, row: dict[str, Any]) -> None:
            after = {"id": 1, "n": number, **row}
            value = avro(event, id_, {"before": None, "after": after, "op": op})
            topics.send("orders", [(avro(key, key_id, {"id": 1}), value)])

        source = {
            "topics": ["orders"],
            "value": {"format": "avro", "envelope": "debezium"},
            "schema_registry": {"url": registry.url},
        }
        send("c", 1, values)
        topics.run(topics.document(source))
        send("u", 2, kept)
        topics.run(topics.document(source))
        send("u", 3, {**values, "text": "b"})
        send("u", 4, {**kept, "many": None})
        topics.run(topics.document(source))
    [found] = topics.rows("orders")
    expected = {"id": 1, "n": 4, **values, "text": "b", "many": None}
    assert {**found, "raw": bytes(found["raw"])} == expected
