"""The first copy of a table: page ranges of one pinned snapshot, read by workers.

A holder session keeps the exported snapshot alive and holds ACCESS SHARE locks, so that no
TRUNCATE or rewrite empties the table under the readers. It never waits while it holds a lock: whom
it waits for may wait for that lock, and the server would not see it.

Tables are cut into ranges of pages (`ctid`), the last one open-ended; a round of ranges of one
table is one epoch. A round never spans tables, so that an epoch of a copy can never be committed in
part.

Two kinds of rounds differ in what their snapshot is:

* the initial ones read the snapshot that the replication slot was created with. The stream waits
  at that point, so every row is new.
* later ones (after a crash, or for a table that was added) read a snapshot of their own. The stream
  has moved on past it before the round is committed, so rows whose keys the stream has touched in
  between are left out: for them the stream's row is the newer one. All others replace what is
  there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyiceberg.types import IcebergType

from icestream.change import AT, OP, SEQ, Op
from icestream.errors import SourceUnavailable
from icestream.schema import Reads, SchemaGap, arrow_schema, gaps, schema_from_json
from icestream.sources import SplitsLost, TableSplit
from icestream.sources.completion import places_among
from icestream.sources.postgres.changes import (
    Relation,
    RelationColumn,
    WalSplit,
    refuse_gone,
    refuse_other_key,
    relation_columns,
)
from icestream.sources.postgres.connection import (
    Connection,
    Dsn,
    LockTimeout,
    PostgresError,
    quoted,
)
from icestream.sources.postgres.values.decode import decode
from icestream.sources.postgres.values.kinds import copy_expression, in_binary
from icestream.sources.postgres.values.tuples import Tuples

PAGE_BYTES = 8192
# One worker's part of a round; what it writes is about one file of Iceberg's usual size.
SPLIT_PAGES = 16_384
SPLITS_PER_ROUND = 8
# A command that waits for the holder's lock makes readers wait behind it: the holder must yield.
LOCK_SECONDS = 10
# Splits that start later would each wait as long again, one behind the other.
_LOCK_WANTED = """
select exists (
  select from pg_catalog.pg_locks
  where relation::int8 = any(:oids) and not granted
    and waitstart < clock_timestamp() - make_interval(secs => :seconds))
"""
# What changes when a table is rewritten, truncated, altered, or gets or loses a partition.
LAYOUT = """
select 'table', c.oid::int8, 0, c.xmin::text, c.relfilenode::int8
from pg_catalog.pg_class c where c.oid::int8 = any(:oids)
union all
select 'column', a.attrelid::int8, a.attnum, a.xmin::text, 0
from pg_catalog.pg_attribute a where a.attrelid::int8 = any(:oids) and a.attnum > 0
union all
select 'child', i.inhrelid::int8, 0, i.xmin::text, i.inhparent::int8
from pg_catalog.pg_inherits i where i.inhparent::int8 = any(:oids)
order by 1, 2, 3
"""
# An older snapshot sees a table that was rewritten or truncated as empty. The catalog is asked as
# that snapshot has it, and the function tells which file the table has now.
_REWRITTEN = """
select c.relname::text from pg_catalog.pg_class c
where c.oid::int8 = any(:oids) and c.relfilenode is distinct from pg_relation_filenode(c.oid)
"""
_XID_MASK = 0xFFFFFFFF
_INVALID_SNAPSHOT = ("22023", "42704")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A table with pages of its own: the table itself, or a partition of it."""

    oid: int
    schema: str
    name: str
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRange:
    """Pages `[first, last)` of a leaf; open-ended when `last` is None."""

    leaf: Leaf
    first: int
    last: int | None

    def condition(self) -> str:
        """The range as SQL."""
        lower = f"ctid >= '({self.first},0)'::tid"
        return lower if self.last is None else f"{lower} AND ctid < '({self.last},0)'::tid"

    @property
    def pages(self) -> int:
        """How many pages were there when the range was planned."""
        end = self.leaf.pages if self.last is None else self.last
        return max(1, end - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one epoch of a copy reads, and the position after it; `after` is None at the end."""

    ranges: Sequence[PageRange]
    after: tuple[int, int] | None


def rounds(
    leaves: Sequence[Leaf], begin: tuple[int, int], chunk_pages: int, pages_max: int
) -> list[Round]:
    """Cut what lies after `begin`, a leaf's oid and a page, into rounds of at most `pages_max`.

    Leaves follow each other by oid. A table without pages still has one, open-ended range: rows may
    come between planning and reading.
    """
    found: list[Round] = []
    current: list[PageRange] = []
    pending = sorted((leaf for leaf in leaves if leaf.oid >= begin[0]), key=lambda leaf: leaf.oid)
    pages = 0
    for leaf in pending:
        first = begin[1] if leaf.oid == begin[0] else 0
        while True:
            last = first + chunk_pages
            part = PageRange(leaf=leaf, first=first, last=last if last < leaf.pages else None)
            if current and pages + part.pages > pages_max:
                found.append(Round(ranges=current, after=(leaf.oid, first)))
                current, pages = [], 0
            current.append(part)
            pages += part.pages
            if part.last is None:
                break
            first = last
    return [*found, Round(ranges=current, after=None)]


def shares(ranges: Sequence[PageRange], count: int) -> list[list[PageRange]]:
    """Ranges dealt out in runs of about equal size, in order."""
    total = sum(part.pages for part in ranges)
    count = max(1, min(count, len(ranges)))
    found: list[list[PageRange]] = [[] for _ in range(count)]
    done = 0
    for part in ranges:
        found[min(count - 1, done * count // max(1, total))].append(part)
        done += part.pages
    return [share for share in found if share]


class Holder:
    """The session that keeps a snapshot and locks for as long as a copy reads.

    The locks are had at once, or `LockTimeout` is raised. The snapshot is the `exported` one, which
    is older than the locks, or a new one, which is younger.
    """

    def __init__(self, dsn: Dsn, tables: Sequence[tuple[str, str]], exported: str | None = None):
        self._connection = Connection(dsn)
        try:
            self.pid = int(self._connection.one("SELECT pg_backend_pid()"))
            self._connection.rows("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if exported is not None:
                self._connection.rows(f"SET TRANSACTION SNAPSHOT '{exported}'")
            names = ", ".join(quoted(*table) for table in tables)
            self._connection.rows(f"LOCK TABLE {names} IN ACCESS SHARE MODE NOWAIT")
            self.snapshot = str(self._connection.one("SELECT pg_export_snapshot()"))
        except BaseException:
            self._connection.close()
            raise

    def layout(self, oids: Sequence[int]) -> list[list[object]]:
        """How tables were laid out when the snapshot was taken: see `LAYOUT`."""
        return self._connection.rows(LAYOUT, oids=list(oids))

    def lacks(self, xids: set[int]) -> bool:
        """Whether any of these transactions, as the stream names them, is not in the snapshot."""
        text = str(self._connection.one("SELECT pg_current_snapshot()::text"))
        _, first_unborn, listed = text.split(":")
        running = {int(xid) & _XID_MASK for xid in listed.split(",") if xid}
        # Half of the numbers lie ahead of any one: they go round.
        unborn = int(first_unborn) & _XID_MASK
        return any(xid in running or (xid - unborn) & _XID_MASK < 2**31 for xid in xids)

    def any_row(self, schema: str, name: str) -> bool:
        """Whether a table has rows in the snapshot."""
        query = f"SELECT EXISTS (SELECT FROM {quoted(schema, name)})"
        return bool(self._connection.one(query))

    def alive(self) -> bool:
        """Whether the snapshot can still be read."""
        try:
            return bool(self._connection.one("SELECT true"))
        except SourceUnavailable:
            return False

    def close(self) -> None:
        """Let go of snapshot and locks."""
        self._connection.close()


@dataclass(slots=True, kw_only=True)
class CopySplit(TableSplit):
    """Page ranges of one table, read from a pinned snapshot."""

    table: str
    dsn: Dsn = field(repr=False)
    snapshot: str
    ranges: Sequence[PageRange]
    relation: Relation
    row_filter: str | None
    replaces: bool
    touched: WalSplit | None = None
    each_key_once: bool = True
    rows_read: int = 0

    @property
    def size_bytes(self) -> int:
        """The size of its pages."""
        return PAGE_BYTES * sum(part.pages for part in self.ranges)

    def read(
        self, schema_json: str, key: Sequence[str], reads: Reads | None = None
    ) -> Iterator[pa.Table]:
        """The rows, some megabytes at a time."""
        self.rows_read = 0
        schema = schema_from_json(schema_json)
        refuse_other_key(self.relation, key)
        missing = gaps(schema, relation_columns(self.relation, key))
        if missing:
            raise SchemaGap(self.table, missing)
        refuse_gone(self.relation, reads)
        kinds = {each.name: each.field_type for each in schema.fields}
        arrow = arrow_schema(schema)
        touched = self._touched_keys(kinds, arrow, key)
        read = [c for c in self.relation.columns if not reads or c.name in reads.columns]
        # Rows count, also for a select that reads nothing of them.
        read = read or list(self.relation.columns[:1])
        for tuples in self._pinned(read, kinds):
            columns = {
                column.name: decode(
                    tuples,
                    number,
                    column.type,
                    kinds[column.name],
                    arrow.field(column.name).type,
                    column.name,
                )
                for number, column in enumerate(read)
            }
            rows = _changes(columns, Op.UPSERT if self.replaces else Op.INSERT)
            self.rows_read += rows.num_rows
            yield rows if touched is None else _without(rows, touched, key)

    def with_stored(self, table: str, values: pa.Table | None) -> "CopySplit":
        """Itself: a copy has all values."""
        return self

    def learned(self) -> Mapping[str, int]:
        """How much was read, for the progress bar."""
        return {"rows": self.rows_read, "bytes": self.size_bytes}

    def _pinned(
        self, columns: Sequence[RelationColumn], kinds: Mapping[str, IcebergType]
    ) -> Iterator[Tuples]:
        """Columns of the rows of all ranges as the snapshot has them."""
        wanted = ", ".join(copy_expression(c.name, c.type, kinds[c.name]) for c in columns)
        texts = [n for n, c in enumerate(columns) if not in_binary(c.type, kinds[c.name])]
        with Connection(self.dsn) as connection:
            connection.rows("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                connection.rows(f"SET TRANSACTION SNAPSHOT '{self.snapshot}'")
            except PostgresError as error:
                if error.code not in _INVALID_SNAPSHOT:
                    raise
                raise SplitsLost(
                    "the snapshot of the copy is gone",
                    detail="PostgreSQL was restarted, or the session that held it was ended.",
                ) from error
            oids = sorted({part.leaf.oid for part in self.ranges})
            if connection.rows(_LOCK_WANTED, oids=oids, seconds=LOCK_SECONDS)[0][0]:
                raise self._yielding()
            connection.rows(f"SET lock_timeout = '{LOCK_SECONDS}s'")
            for part in self.ranges:
                source = quoted(part.leaf.schema, part.leaf.name)
                extra = f" AND ({self.row_filter})" if self.row_filter else ""
                query = f"SELECT {wanted} FROM ONLY {source} WHERE {part.condition()}{extra}"
                try:
                    yield from connection.copy(query, len(columns), texts)
                except LockTimeout as error:
                    raise self._yielding() from error
            # From here on the locks of this session keep the tables as they were read.
            if rewritten := connection.rows(_REWRITTEN, oids=oids):
                raise SplitsLost(
                    f"table {rewritten[0][0]} was rewritten or truncated while it was copied",
                    detail="The copy continues with another snapshot.",
                )

    def _yielding(self) -> SplitsLost:
        return SplitsLost(
            f"someone waits for a lock on table {self.table} that the copy holds",
            detail="The copy lets it go and continues with another snapshot.",
        )

    def _touched_keys(
        self, kinds: Mapping[str, IcebergType], arrow: pa.Schema, key: Sequence[str]
    ) -> pa.Table | None:
        if self.touched is None or not key:
            return None
        keys = self.touched.keys({name: kinds[name] for name in key}, arrow)
        return keys if keys.num_rows else None


def _changes(columns: Mapping[str, pa.Array], op: Op) -> pa.Table:
    count = len(next(iter(columns.values())))
    zeros = pa.array(np.zeros(count, dtype=np.int64))
    head = {OP: pa.array(np.full(count, op, dtype=np.int8)), AT: zeros, SEQ: zeros}
    return pa.table({**head, **columns})


def _without(rows: pa.Table, touched: pa.Table, key: Sequence[str]) -> pa.Table:
    """The rows whose keys are not among the touched ones."""
    left = np.ones(rows.num_rows, dtype=bool)
    left[places_among(rows, touched, key)] = False
    return rows.filter(pa.array(left))
