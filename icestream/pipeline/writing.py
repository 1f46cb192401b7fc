"""An epoch's files are written: tables made ready, columns added, values looked up, and again.

What a table lacks is found by reading. So an epoch may have to be read several times until its
tables take all of it; each time some columns or tables are there that were not.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from icestream import failpoints, metrics
from icestream.epoch import Epoch
from icestream.errors import DataRejected, SchemaRejected
from icestream.schema import (
    Column,
    TableShape,
    distinct_columns,
    joined_columns,
    joined_shapes,
)
from icestream.sinks import (
    Evolves,
    LooksUpRows,
    RefusesItself,
    Sink,
    StaleWrite,
    Writer,
    Written,
)
from icestream.sources import (
    EpochPlan,
    Part,
    Source,
    Split,
    TableSplit,
    TablesUnready,
    ValuesNeeded,
)
from icestream.sources.abilities import FindsTables, IdentifiesTables
from icestream.worker import Outcome, Unready

T = TypeVar("T")

WriteEpoch = Callable[[Sequence[Any], Writer, bool, str], Outcome]
"""Has parts of an epoch read and written by workers; see `icestream.worker`."""

# A table's schema may need several steps until it takes an epoch; each adds columns.
REWRITES_MAX = 50
TABLES_IN_PARALLEL = 8


class Retry(Protocol):
    """Calls again until trouble has passed."""

    def __call__(self, call: Callable[[], T]) -> T:
        """What the call returns."""
        ...


class EpochRunner:
    """Has epochs written for one run of a pipeline; several threads may ask at once.

    `await_turn` returns once all epochs before one are durable. Tables in `left_alone` lie behind
    and are not brought forward now: nothing is written for them.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        sink: Sink,
        write_epoch: WriteEpoch,
        retry: Retry,
        await_turn: Callable[[Epoch], None],
    ):
        self._name = name
        self._source = source
        self._sink = sink
        self._write_epoch = write_epoch
        self._retry = retry
        self._await_turn = await_turn
        self._tables_lock = threading.Lock()
        self.left_alone: frozenset[str] = frozenset()

    def write(
        self,
        epoch: Epoch,
        plan: EpochPlan,
        takes_part: Callable[[str], bool] | None = None,
        looked_up: Callable[[str], bool] | None = None,
    ) -> Written:
        """Have an epoch's files written, however many tries it takes within bounds.

        Tables that do not take part may be read and written to, but nothing of it is reported.
        Rows are looked up only in tables that stand where the epoch begins, or have just taken it.
        By default both are all tables but those that are left alone.
        """
        takes_part = takes_part or all_but(self.left_alone)
        looked_up = looked_up or all_but(self.left_alone)
        parts = plan.parts
        truncated = frozenset(filter(takes_part, plan.truncated))
        named = {table for part in parts for table in part.tables} | truncated
        for _ in range(REWRITES_MAX):
            with self._tables_lock:
                tables = self._retry(partial(self._prepared, named))
                # Changes of tables that cannot be made yet do nothing. A split that may be of many
                # tables finds out by reading which ones it needs.
                usable = [p for p in parts if _of_many(p) or not {*p.tables}.isdisjoint(tables)]
                writer = self._retry(partial(self._sink.writer, epoch, tables))
            for table in itertools.filterfalse(looked_up, tables):
                usable = [_with_stored(part, table, None) for part in usable]
            failpoints.reach(failpoints.BEFORE_WRITE)
            try:
                outcome = self._retry(partial(self._write_once, epoch, usable, writer))
            except Unready as unready:
                named |= self._made_ready(unready)
                continue
            except ValuesNeeded as need:
                parts = self._with_stored(epoch, parts, need)
                continue
            failpoints.reach(failpoints.AFTER_WRITE)
            metrics.ROWS_READ.labels(self._name).inc(outcome.rows)
            metrics.BYTES_READ.labels(self._name).inc(sum(part.size_bytes for part in usable))
            labels = self._source.was_read(epoch, outcome.learned)
            return Written(
                epoch=epoch,
                reports=[r for r in outcome.reports if takes_part(r.table)],
                writer=writer,
                labels=labels,
                truncated=truncated & set(tables),
                changes=outcome.rows,
            )
        raise StaleWrite(epoch)

    def _made_ready(self, unready: Unready) -> set[str]:
        """Have tables take what splits found lacking; returns those that have yet to be made."""
        shapes: dict[str, TableShape] = {}
        gaps: dict[str, Sequence[Column]] = {}
        for lack in unready.lacks:
            if isinstance(lack, TablesUnready):
                shapes = joined_shapes(shapes, lack.shapes)
            found = lack.gaps if isinstance(lack, TablesUnready) else {lack.table: lack.columns}
            for table, columns in found.items():
                # Of names that readers do not tell apart the first is added, others are refused.
                gaps[table] = distinct_columns(joined_columns(gaps.get(table, ()), columns))
        for table, columns in gaps.items():
            if not isinstance(self._sink, Evolves):
                raise _cannot_evolve(table, columns)
            with self._tables_lock:
                self._retry(partial(self._sink.evolve, table, columns))
        if isinstance(self._source, FindsTables):
            self._source.tables_met(shapes)
        return set(shapes)

    def _with_stored(
        self, epoch: Epoch, parts: Sequence[Part], needed: ValuesNeeded
    ) -> Sequence[Part]:
        """Look up the rows that splits ask for, as the epochs before left them."""
        sink = self._sink
        if not isinstance(sink, LooksUpRows):
            raise _cannot_look_up(needed)
        self._await_turn(epoch)
        for need in needed.needs:
            ask = partial(sink.stored, need.table, need.keys, need.columns, epoch.lower)
            stored = self._retry(ask)
            parts = [_with_stored(part, need.table, stored) for part in parts]
        return parts

    def _write_once(self, epoch: Epoch, parts: Sequence[Part], writer: Writer) -> Outcome:
        description = f"icestream {self._name} epoch {epoch.number}"
        return self._write_epoch(parts, writer, self._source.key_in_one_split, description)

    def _prepared(self, tables: Iterable[str]) -> list[str]:
        """The tables that are ready to be written to; some may have to be created first."""

        source, sink = self._source, self._sink

        def prepare(table: str) -> bool:
            ready = sink.prepare(table, lambda: source.shape(table))
            if ready and isinstance(source, IdentifiesTables) and isinstance(sink, RefusesItself):
                sink.refuse_itself(table, source.table_id(table))
            return ready

        names = sorted(tables)
        # One table comes first: it makes the namespace, and decides between two runs that start
        # at once. Side by side each run could claim some of the tables, and both would stop.
        ready = [prepare(name) for name in names[:1]]
        with ThreadPoolExecutor(TABLES_IN_PARALLEL, "prepare") as pool:
            ready += pool.map(prepare, names[1:])
        return [table for table, there in zip(names, ready, strict=True) if there]


def _cannot_evolve(table: str, columns: Sequence[Column]) -> SchemaRejected:
    names = ", ".join(column.name for column in columns)
    return SchemaRejected(
        f"table {table} does not take all columns of its source",
        detail=f"Columns: {names}. The sink cannot change what a table takes.",
        hint="Give the destination these columns by hand and start again, leave them out at the "
        "source, or use a sink that evolves its tables, such as `iceberg`.",
    )


def _cannot_look_up(needed: ValuesNeeded) -> DataRejected:
    tables = ", ".join(need.table for need in needed.needs)
    names = sorted({column for need in needed.needs for column in need.columns})
    return DataRejected(
        f"changes of {tables} leave out values, and the sink cannot look them up",
        detail=f"Columns: {', '.join(names)}.",
        hint="Have the source send whole rows (for PostgreSQL: ALTER TABLE ... REPLICA IDENTITY "
        "FULL), or use a sink that gives rows back, such as `iceberg`.",
    )


def _with_stored(part: Part, table: str, stored: pa.Table | None) -> Part:
    """The part with rows of a table, unless all of its changes are of another one.

    A split of many tables may meet more of them than it knows.
    """
    elsewhere = isinstance(part, TableSplit) and part.table != table
    return part.with_stored(table, stored) if isinstance(part, Split) and not elsewhere else part


def _of_many(part: Part) -> bool:
    """Whether a part may have changes of tables that it does not name."""
    return not part.tables or (isinstance(part, Split) and not isinstance(part, TableSplit))


def all_but(tables: Collection[str]) -> Callable[[str], bool]:
    """Whether a table is none of these."""
    return lambda table: table not in tables
