"""Records that lack what the select of their table reads, or what it does not."""

import io
import json
import pickle
from typing import Any

import fastavro
import numpy as np
import pytest
from pyiceberg.types import LongType, StringType

from icestream.errors import SchemaRejected
from icestream.formats.options import UNAVAILABLE_VALUE, RegistryOptions, ValueOptions
from icestream.schema import Column, Reads, TableShape
from icestream.sources.kafka.consumer import Range
from icestream.sources.kafka.split import RecordRouter
from icestream.sources.named_columns import refuse_gone
from tests.property.kafka_reading import Destination, reading, records, split_of
from tests.registry import StandInRegistry

SHAPE = TableShape(
    columns=[
        Column(name="id", type=LongType(), required=True),
        Column(name="region", type=StringType()),
        Column(name="area", type=StringType()),
    ],
    key=["id"],
)


class Selecting(Destination):
    """A destination whose table has a select."""

    def __init__(self, *named: str, beginning: bool = False):
        super().__init__(t=SHAPE)
        names = frozenset(named)
        self._reads = Reads(columns=names, named=names, beginning=beginning)

    def reads(self, table: str) -> Any:
        return self._reads if table == "t" else None


def event(key: int, **columns: Any) -> tuple[Any, Any]:
    """A record of Debezium."""
    return {"id": key}, {"before": None, "after": {"id": key, **columns}, "op": "u"}


def avro(registry: StandInRegistry, key: int, **columns: str) -> tuple[bytes, bytes]:
    """A record of Avro with a schema of its own."""
    parts = []
    for row in ({"id": key}, {"id": key, **columns}):
        kinds = {"id": "long", **dict.fromkeys(columns, "string")}
        fields = [{"name": name, "type": kinds[name]} for name in row]
        schema = {"type": "record", "name": "Row", "fields": fields}
        number = registry.register("v", json.dumps(schema))
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
        parts.append(b"\0" + number.to_bytes(4, "big") + out.getvalue())
    return parts[0], parts[1]


def found(destination: Destination, *pairs: Any, **options: Any) -> list[int]:
    """The ids of the changes that a split of these records gives for the table."""
    changes = destination.read(split_of({("t", 0): [records(*pairs)]}, reading(**options)))
    return [row["id"] for row in changes.get("t", [])]


def test_a_whole_row_without_a_named_column_is_refused():
    """E11, K3, Mend h2: events of Debezium, and rows of Avro; deletes have only their key."""
    gone = {"id": 1}, {"before": {"id": 1}, "after": None, "op": "d"}
    assert found(Selecting("id", "region"), event(1, region="eu"), gone) == [1, 1]
    assert found(Selecting("id"), event(1, area="eu")) == [1]
    with pytest.raises(SchemaRejected, match="t reads column region, which"):
        found(Selecting("id", "region"), event(1, area="eu"))
    declared = {"t": {"region": StringType()}}
    assert found(Selecting("id", "region"), event(1, area="eu"), declared=declared) == [1]
    with StandInRegistry() as registry:
        options = {
            "value": ValueOptions(format="avro", envelope="upsert"),
            "registry": RegistryOptions(url=registry.url),
        }
        old, new = avro(registry, 1, region="eu"), avro(registry, 1, area="eu")
        assert found(Selecting("id", "region"), old, **options) == [1]
        with pytest.raises(SchemaRejected, match="t reads column region, which"):
            found(Selecting("id", "region"), new, **options)


def test_a_field_that_plain_json_leaves_out_is_null():
    """E11, K3, Mend h2: nothing tells it from a field that is gone."""
    options = {"value": ValueOptions(envelope="upsert")}
    assert found(Selecting("id", "region"), ({"id": 1}, {"id": 1}), **options) == [1]
    split = split_of({("t", 0): [records(({"id": 1}, {"id": 1}))]}, reading(**options))
    Selecting("id", "region", beginning=True).read(split)
    assert split.columns_seen() == {}


APART = {
    "renamed, sent at once": ({"area": "eu"}, 5, True),
    "dropped": ({}, 6, True),
    "older": ({}, 4, False),
    "at one time": ({}, 5, False),
}


@pytest.mark.parametrize("together", [True, False], ids=["one split", "two splits"])
@pytest.mark.parametrize("case", APART)
def test_partitions_of_the_first_epoch_are_held_against_each_other(case: str, together: bool):
    """E11, K3, Mend h2: by names, and by the times of records; both have the offset 0."""
    columns, time, refused = APART[case]
    batches = {
        ("t", 0): [records(event(1, region="eu"), at=5)],
        ("t", 1): [records(event(2, **columns), at=time)],
    }
    splits = [split_of(batches)] if together else [split_of({p: b}) for p, b in batches.items()]

    def read() -> None:
        for split in splits:
            assert Selecting("id", "region", beginning=True).read(split)["t"]
        refuse_gone(pickle.loads(pickle.dumps(split.columns_seen())) for split in splits)

    if not refused:
        read()
        return
    with pytest.raises(SchemaRejected, match="t reads column region, which"):
        read()


def test_the_times_of_one_partition_do_not_belie_its_offsets():
    """E11, K3, Mend h2: a writer's clock went back as the column was added."""
    older, newer = records(event(1), at=9), records(event(2, region="eu"), first=1, at=5)
    split = split_of({("t", 0): [older, newer]})
    assert len(Selecting("id", "region", beginning=True).read(split)["t"]) == 2
    refuse_gone([split.columns_seen()])


def test_a_letter_without_a_named_column_stays_one():
    """E10, E11, Mend h2: it may be older than the column, and must not stop what comes after."""
    tables = RecordRouter(reading(), Selecting("id", "region"))
    tables.tries_letters = True
    batch = records(event(1, area="eu"), event(2, region="eu"))
    where = Range(topic="t", partition=0, start=0, end=2)
    given = dict(tables.by_table(where, batch, np.zeros(2, dtype=np.int64)))
    assert given["t"].column("id").to_pylist() == [2]
    [letter] = given["t__dead_letters"].to_pylist()
    assert "no column region, which the select reads" in letter["error"]


@pytest.mark.parametrize("keyed", [True, False])
def test_a_value_that_no_select_reads_is_not_missed(keyed: bool):
    """E11, P7, Mend h3: nothing is looked up, and the record is no letter."""
    destination = Selecting("id", "region")
    unsent = event(1, region="eu", area=UNAVAILABLE_VALUE)
    assert found(destination, unsent, keyed=keyed) == [1]
    assert destination.asked == [] and destination.letters == []


@pytest.mark.parametrize("keyed", [True, False])
def test_a_lost_value_that_no_select_reads_is_not_missed(keyed):
    """E11, P7, Mend h3: Debezium tells a key's change as a creation without its large values."""
    created = {"id": 1}, {"before": None, "after": {"id": 1, "area": UNAVAILABLE_VALUE}, "op": "c"}
    assert found(Selecting("id"), created, keyed=keyed) == [1]
    destination = Selecting("id", "area")
    given = destination.read(split_of({("t", 0): [records(created)]}, reading(keyed=keyed)))
    [letter] = given["t__dead_letters"]
    for word in ("key has changed", "column area", "REPLICA IDENTITY"):
        assert word in letter["error"]
