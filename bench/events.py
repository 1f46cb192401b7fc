"""Debezium's events for the benchmarks: 80 % updates, 15 % inserts, 5 % deletes, without schemas.

A value is JSON of about 280 bytes, as Debezium writes it for a table of eight columns: whole
numbers, texts, a decimal, a double and a timestamp as text. A log knows what it leaves.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer
from pyiceberg.types import DecimalType, DoubleType, LongType, StringType, TimestamptzType

from icestream.schema import Column, TableShape

SHAPE = TableShape(
    columns=[
        Column(name="id", type=LongType(), required=True),
        Column(name="customer", type=LongType()),
        Column(name="quantity", type=LongType()),
        Column(name="price", type=DecimalType(12, 2)),
        Column(name="weight", type=DoubleType()),
        Column(name="status", type=StringType()),
        Column(name="note", type=StringType()),
        Column(name="updated_at", type=TimestamptzType()),
    ],
    key=["id"],
)
ARROW_TYPES = {
    "id": pa.int64(),
    "customer": pa.int64(),
    "quantity": pa.int64(),
    "price": pa.decimal128(12, 2),
    "weight": pa.float64(),
    "status": pa.string(),
    "note": pa.string(),
    "updated_at": pa.timestamp("us", "UTC"),
}
UPDATES, INSERTS = 0.80, 0.15
# Updates and deletes are of this share of as many keys as there are events.
KEYS = 0.2
FLUSH_SECONDS = 60.0
# Room for what the producer has not sent yet.
QUEUE_MESSAGES, QUEUE_KILOBYTES = 1_000_000, 512 * 1024
_STATES = pa.array(["new", "paid", "sent", "done", "returned"])
_SOURCE = '{"name":"pg","db":"shop","schema":"public","table":"orders"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Events in their order, and the rows of a table that has taken all of them."""

    keys: pa.Array
    values: pa.Array
    left: pa.Table


def log(count: int, seed: int) -> Log:
    """So many events."""
    random = np.random.default_rng(seed)
    keys = max(1, int(count * KEYS))
    draw = random.random(count)
    inserted, deleted = draw < INSERTS, draw >= INSERTS + UPDATES
    ids = np.where(inserted, keys + np.arange(count), random.integers(0, keys, count))
    rows, texts = _rows(ids, random)
    after = _object({name: texts[name] for name in rows.column_names})
    identity = _object({"id": texts["id"]})
    gone, null = pa.array(deleted), pa.scalar("null")
    event = {
        "before": pc.if_else(gone, identity, null),
        "after": pc.if_else(gone, null, after),
        "source": pa.scalar(_SOURCE),
        "op": pc.if_else(gone, '"d"', pc.if_else(pa.array(inserted), '"c"', '"u"')),
        "ts_ms": pa.array(1_780_000_000_000 + np.arange(count)).cast(pa.string()),
    }
    return Log(keys=identity, values=_object(event), left=_left(rows, deleted))


def produce(bootstrap_servers: str, topic: str, events: Log) -> None:
    """Send a log to a topic; keys choose the partitions."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "linger.ms": 20,
            "queue.buffering.max.messages": QUEUE_MESSAGES,
            "queue.buffering.max.kbytes": QUEUE_KILOBYTES,
        }
    )
    for start in range(0, len(events.keys), QUEUE_MESSAGES):
        part = slice(start, start + QUEUE_MESSAGES)
        keys, values = events.keys[part].to_pylist(), events.values[part].to_pylist()
        for key, value in zip(keys, values, strict=True):
            producer.produce(topic, value, key)
        if producer.flush(FLUSH_SECONDS):
            raise RuntimeError("the broker does not take the events")


def _rows(ids: np.ndarray, random: np.random.Generator) -> tuple[pa.Table, dict[str, pa.Array]]:
    """A row for each id, as values and as JSON writes them."""
    count = len(ids)
    numbers = random.integers(0, 10**9, count)
    cents = random.integers(0, 10**7, count)
    price = _joined(_text(cents // 100), ".", pc.utf8_lpad(_text(cents % 100), 2, "0"))
    eighths = random.integers(0, 10**6, count) / 8.0
    moments = pa.array(1_780_000_000_000_000 + numbers).cast(ARROW_TYPES["updated_at"])
    note = _joined("order note ", _text(numbers), "")
    status = _STATES.take(pa.array(random.integers(0, len(_STATES), count)))
    customer, quantity = random.integers(0, 10**6, count), random.integers(1, 100, count)
    columns = {
        "id": (pa.array(ids), _text(ids)),
        "customer": (pa.array(customer), _text(customer)),
        "quantity": (pa.array(quantity), _text(quantity)),
        "price": (price.cast(ARROW_TYPES["price"]), price),
        "weight": (pa.array(eighths), _text(eighths)),
        "status": (status, _joined('"', status, '"')),
        "note": (note, _joined('"', note, '"')),
        "updated_at": (moments, _joined('"', pc.strftime(moments, "%Y-%m-%dT%H:%M:%SZ"), '"')),
    }
    rows = pa.table({name: values for name, (values, _) in columns.items()})
    return rows, {name: text for name, (_, text) in columns.items()}


def _left(rows: pa.Table, deleted: np.ndarray) -> pa.Table:
    """The last row of each id whose last change is no delete."""
    places = pa.table({"id": rows.column("id"), "place": np.arange(rows.num_rows)})
    last = places.group_by("id").aggregate([("place", "max")]).column("place_max").to_numpy()
    return rows.take(pa.array(np.sort(last[~deleted[last]])))


def _object(members: dict[str, pa.Array]) -> pa.Array:
    """JSON objects of members that are JSON already."""
    parts = []
    for number, (name, value) in enumerate(members.items()):
        parts += [pa.scalar(f'{"," if number else "{"}"{name}":'), value]
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), pa.scalar(""))


def _joined(before: pa.Array | str, text: pa.Array | str, after: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(before, text, after, "")


def _text(numbers: np.ndarray) -> pa.Array:
    return pa.array(numbers).cast(pa.string())
