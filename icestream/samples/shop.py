"""A small shop in PostgreSQL, and customers who never stop.

The shop has columns of many types, among them one whose values are so large that PostgreSQL keeps
them apart (TOAST). What happens in it is random, but the same for the same seed as long as no lock
is in its way: all choices come from one generator, and no statement asks the server for a random
number or the time.

Among the orders, payments and cancellations are the events that a change stream finds hard: a key
that changes and takes its items along, a table that is truncated, a column that is added.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from icestream.errors import IcestreamError, SourceUnavailable
from icestream.sources.postgres.connection import Connection, parse_dsn, parse_lsn

TABLES = ("baskets", "customers", "items", "orders")
CUSTOMERS, ORDERS, BASKETS = 2_000, 4_000, 60
# The transactions, by number, with which the events fall due that are not left to chance.
NEW_COLUMN_AT, TRUNCATE_EVERY, KEY_CHANGE_EVERY = 40, 60, 15
_OPENED = "timestamptz '2026-01-05 08:00:00+00'"
# A statement that waits for a table's strongest lock holds up all who come after it, the readers of
# a copy among them. So it gives up soon, and is tried again some transactions later.
_LOCK_TIMEOUT, _RETRY_EVERY = "100ms", 10

_SCHEMA = """
CREATE TYPE membership AS ENUM ('guest', 'regular', 'gold');
CREATE TYPE order_state AS ENUM ('placed', 'paid', 'sent', 'returned');
CREATE DOMAIN email AS text CHECK (value LIKE '%@%');
CREATE TABLE customers (
  id bigint PRIMARY KEY, name varchar(60) NOT NULL, address email, kind membership NOT NULL,
  born date, newsletter boolean, last_seen_from inet, interests text[], settings jsonb,
  picture bytea, biography text, joined_at timestamptz NOT NULL
);
ALTER TABLE customers ALTER biography SET STORAGE EXTERNAL;
CREATE TABLE orders (
  id bigint PRIMARY KEY, customer_id bigint NOT NULL, code uuid NOT NULL,
  state order_state NOT NULL, total numeric(12,2) NOT NULL, weight_kg double precision,
  discount real, deliver_within interval, delivery tstzrange, note text,
  placed_at timestamptz NOT NULL, printed_at timestamp
);
CREATE TABLE items (
  order_id bigint REFERENCES orders ON UPDATE CASCADE ON DELETE CASCADE, line smallint,
  sku char(8) NOT NULL, quantity integer NOT NULL, price numeric(10,2) NOT NULL, exact_tax numeric,
  sizes integer[], PRIMARY KEY (order_id, line)
);
CREATE TABLE baskets (session uuid PRIMARY KEY, quantity smallint, seen_at timestamptz)
"""
_ADD_CUSTOMERS = f"""
INSERT INTO customers SELECT g, 'Customer ' || g, 'c' || g || '@shop.example',
  (enum_range(null::membership))[1 + g % 3], date '1950-01-01' + (g * 37 % 20000)::int,
  CASE WHEN g % 7 > 0 THEN g % 2 = 0 END, ('10.0.' || g % 200 || '.' || g % 250)::inet,
  ARRAY['books', NULL, 'tea "' || g % 9 || '"'],
  jsonb_build_object('theme', g % 4, 'name', 'ü' || g),
  decode(md5(g::text), 'hex'), CASE WHEN g % 40 = 0 THEN repeat(md5(g::text), 200) END,
  {_OPENED} + g * interval '61.000001 seconds'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) g
"""
_ADD_ORDERS = f"""
INSERT INTO orders SELECT g, 1 + g * 7919 % CAST(:customers AS bigint), md5('order' || g)::uuid,
  'placed', (g % 9973) + 0.25, g / 7.0, CASE WHEN g % 5 = 0 THEN 0.1 END,
  make_interval(days => (g % 5)::int, hours => 6),
  tstzrange({_OPENED} + g * interval '1 hour', {_OPENED} + (g + 8) * interval '1 hour'),
  CASE WHEN g % 3 = 0 THEN 'leave it at door ' || g % 11 END,
  {_OPENED} + g * interval '7.25 seconds',
  timestamp '2026-01-05 09:00:00.000001' + g * interval '3 minutes'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) g
"""
_ADD_ITEMS = """
INSERT INTO items SELECT g, l, 'S' || lpad((g * l % 9999)::text, 5, '0'), 1 + g % 4, g % 89 + 0.99,
  (g % 89 + 0.99) * 0.19 / (l + 2), ARRAY[g % 40, l]
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) g,
  generate_series(1, 1 + g % 3) l
"""
_ADD_BASKETS = f"""
INSERT INTO baskets SELECT md5('basket' || g)::uuid, g % 12, {_OPENED} + g * interval '1 second'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) g
"""
_EVENTS = {
    "_change_key": "a key changed",
    "_truncate": "a table truncated",
    "_add_column": "a column added",
}


def open_shop(dsn: str) -> None:
    """Make the shop's tables and fill them."""
    with Connection(parse_dsn(dsn)) as connection:
        for statement in _SCHEMA.split(";"):
            connection.rows(statement)
        connection.rows(_ADD_CUSTOMERS, first=1, last=CUSTOMERS)
        connection.rows(_ADD_ORDERS, first=1, last=ORDERS, customers=CUSTOMERS)
        connection.rows(_ADD_ITEMS, first=1, last=ORDERS)
        connection.rows(_ADD_BASKETS, first=1, last=BASKETS)


@dataclass(frozen=True, slots=True)
class Sale:
    """A transaction of the shop: the log's position just before it ended, when, and its changes."""

    lsn: int
    at: float
    changes: int


class Business:
    """Keeps a shop busy from a thread of its own until it is closed.

    `sales` grows by one for each transaction; `events` counts those that were not left to chance.
    """

    def __init__(self, dsn: str, seed: int, pause_seconds: float):
        self.sales: list[Sale] = []
        self.events = dict.fromkeys(_EVENTS.values(), 0)
        self.failed: IcestreamError | None = None
        self._connection = Connection(parse_dsn(dsn))
        self._connection.rows(f"SET lock_timeout = '{_LOCK_TIMEOUT}'")
        self._random = random.Random(seed)
        self._pause_seconds = pause_seconds
        self._customers, self._orders, self._baskets = CUSTOMERS, ORDERS, BASKETS
        self._number = 0
        self._waiting: list[Callable[[], int]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._trade, name="shop", daemon=True)

    def open(self) -> None:
        """Begin to trade."""
        self._thread.start()

    def close(self) -> None:
        """Return when the last transaction is over."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._connection.close()

    def trade(self, transactions: int) -> None:
        """Do so many transactions, one after the other, in the caller's thread."""
        for _ in range(transactions):
            self._number += 1
            self._transaction(self._number)

    def _trade(self) -> None:
        try:
            while not self._closed.wait(self._pause_seconds):
                self.trade(1)
        except IcestreamError as error:
            self.failed = error

    def _transaction(self, number: int) -> None:
        """The n-th transaction, and what has been waiting for a lock."""
        if number == NEW_COLUMN_AT:
            self._waiting.append(self._add_column)
        if number % TRUNCATE_EVERY == 0:
            self._waiting.append(self._truncate)
        if self._waiting and number % _RETRY_EVERY == 0 and self._done(self._waiting[0]):
            self._waiting.pop(0)
        steps = (self._order, self._pay, self._cancel, self._move, self._join, self._browse)
        self._done(
            self._change_key if number % KEY_CHANGE_EVERY == 0 else self._random.choice(steps)
        )

    def _done(self, step: Callable[[], int]) -> bool:
        """Run a step as one transaction; False when a lock was in its way and it was undone."""
        self._connection.rows("BEGIN")
        try:
            changes = step()
            lsn = parse_lsn(str(self._connection.one("SELECT pg_current_wal_insert_lsn()::text")))
            self._connection.rows("COMMIT")
        except SourceUnavailable:
            self._connection.rows("ROLLBACK")
            return False
        self.sales.append(Sale(lsn, time.time(), changes))
        event = _EVENTS.get(step.__name__)
        if event:
            self.events[event] += 1
        return True

    def _changed(self, statement: str, **values: int) -> int:
        """Run a statement; returns how many rows it changed, without those that went along."""
        counted = f"WITH changed AS ({statement} RETURNING 1) SELECT count(*) FROM changed"
        return int(self._connection.one(counted, **values))

    def _orders_around(self) -> dict[str, int]:
        """Some orders that lie next to each other, of any age."""
        first = self._random.randint(1, self._orders)
        return {"first": first, "last": first + self._random.randint(1, 25)}

    def _order(self) -> int:
        first = self._orders + 1
        self._orders += self._random.randint(1, 30)
        span = {"first": first, "last": self._orders}
        return self._changed(_ADD_ORDERS, **span, customers=self._customers) + self._changed(
            _ADD_ITEMS, **span
        )

    def _pay(self) -> int:
        return self._changed(
            "UPDATE orders SET state = (enum_range(null::order_state))[CAST(:state AS int)], "
            "total = total + 1.5, discount = CAST(:state AS int) / 7.0 "
            "WHERE id BETWEEN :first AND :last",
            state=self._random.randint(2, 4),
            **self._orders_around(),
        )

    def _cancel(self) -> int:
        first = self._random.randint(1, self._orders)
        span = {"first": first, "last": first + 4}
        items = self._changed("DELETE FROM items WHERE order_id BETWEEN :first AND :last", **span)
        return items + self._changed("DELETE FROM orders WHERE id BETWEEN :first AND :last", **span)

    def _move(self) -> int:
        """Customers are updated; their large values stay as they are, and are not sent."""
        first = self._random.randint(1, self._customers)
        return self._changed(
            "UPDATE customers SET last_seen_from = last_seen_from + 1, kind = 'gold' "
            "WHERE id BETWEEN :first AND :last",
            first=first,
            last=first + 30,
        )

    def _join(self) -> int:
        first = self._customers + 1
        self._customers += self._random.randint(1, 8)
        return self._changed(_ADD_CUSTOMERS, first=first, last=self._customers)

    def _browse(self) -> int:
        first = self._baskets + 1
        self._baskets += self._random.randint(1, 10)
        return self._changed(_ADD_BASKETS, first=first, last=self._baskets)

    def _change_key(self) -> int:
        """An order gets another number, and its items follow it."""
        return self._changed(
            "UPDATE orders SET id = :new WHERE id = (SELECT min(id) FROM orders WHERE id >= :old)",
            old=self._random.randint(1, self._orders),
            new=10_000_000 + self._random.getrandbits(40),
        )

    def _truncate(self) -> int:
        """The small table is emptied, and a basket comes after that."""
        self._connection.rows("TRUNCATE baskets")
        return 1 + self._browse()

    def _add_column(self) -> int:
        self._connection.rows("ALTER TABLE orders ADD COLUMN gift_for text")
        return self._changed(
            "UPDATE orders SET gift_for = 'a friend' WHERE id BETWEEN :first AND :last",
            **self._orders_around(),
        )
