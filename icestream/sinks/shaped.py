"""A sink behind selects: its tables hold what these make of the source's rows.

    source's shape ──select──► derived shape ──► the table
    source's rows  ──read with the source's schema──► select (Spark) ──► written with the table's

The table cannot say what the source's columns are: some are derived, some left out, and an index of
documents has no types that could be read by. So the source's columns are remembered with the table,
under the name `SOURCE_PROPERTY`. Changes are read by these columns. They grow with the source, and
a restart finds them as they were. A type that the pipeline file declares for a column replaces the
remembered one.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import pyarrow as pa
from pyiceberg.types import IcebergType

from icestream.epoch import Epoch, Progress
from icestream.errors import ConfigInvalid, check
from icestream.frontier import Frontier
from icestream.report import Report
from icestream.schema import (
    Column,
    Reads,
    TableShape,
    declared_shape,
    gaps,
    grown,
    new_schema,
    schema_from_json,
)
from icestream.sinks import (
    Committed,
    Evolves,
    LooksUpRows,
    RefusesItself,
    RemembersSources,
    Sink,
    Writer,
    Written,
)
from icestream.transform import Derived, Selects, TableSelect

# The source's columns and key, and the first epoch that the table takes, as JSON.
SOURCE_PROPERTY = "icestream.source"
# A table takes what a select gives after one change of its schema; others may change it meanwhile.
EVOLUTIONS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedWriter:
    """Writes what selects have made of changes, which are read by the source's schemas.

    `keys` are the columns that identify a row at the source, by transformed table, and `used` what
    its select reads.
    """

    inner: Writer
    selects: Sequence[TableSelect]
    keys: Mapping[str, Sequence[str]]
    used: Mapping[str, Reads]

    def tables(self) -> Collection[str]:
        """The tables that it writes to."""
        return self.inner.tables()

    def refused(self, table: str) -> str | None:
        """Why records cannot have a table of this name."""
        return self.inner.refused(table)

    def schema_json(self, table: str) -> str:
        """The schema that changes of the table must be read with: the source's."""
        for each in self.selects:
            if each.table == table:
                return each.source_json
        return self.inner.schema_json(table)

    def reads(self, table: str) -> Reads | None:
        """What the table's select has use for; None without one."""
        return self.used.get(table)

    def key(self, table: str) -> Sequence[str]:
        """The columns that identify a row at the source."""
        return self.keys[table] if table in self.keys else self.inner.key(table)

    def write(
        self, table: str, shard: str, changes: pa.Table, each_key_once: bool = False
    ) -> Iterator[Report]:
        """Write changes as the table takes them, of a transformed table the selected ones."""
        return self.inner.write(table, shard, changes, each_key_once)


class Shapeable(Sink, Evolves, RemembersSources, Protocol):
    """A sink that can stand behind selects."""

    def writer(
        self, epoch: Epoch, tables: Sequence[str], read_otherwise: Collection[str] = ()
    ) -> Writer:
        """A writer for the epoch; changes of some tables are read by another schema."""
        ...


def shaped(
    inner: Sink,
    selects: Selects,
    declared: Callable[[str], Mapping[str, IcebergType]] = lambda table: {},
) -> "ShapedSink":
    """The sink behind selects, with all that it can do; `declared` has types of the file's own."""
    needed = (RemembersSources, Evolves)
    if lacks := [each.__name__ for each in needed if not isinstance(inner, each)]:
        raise _cannot_be_shaped(lacks, bool(selects.of_all))
    kind = ShapedTables if isinstance(inner, LooksUpRows) else ShapedSink
    return kind(cast(Shapeable, inner), selects, declared)


def _cannot_be_shaped(lacks: Sequence[str], of_all: bool) -> ConfigInvalid:
    """The error about a sink that lacks abilities; `of_all`: every table passes a select."""
    detail = f"The class of the sink lacks {' and '.join(lacks)} of `icestream.sinks`."
    if of_all:
        return ConfigInvalid(
            "the sink cannot take rows of this source as documents",
            detail=f"Rows become documents by a select of the whole row. {detail}",
            hint="Use another sink, such as `opensearch`, or give the class these abilities.",
        )
    return ConfigInvalid(
        "the sink cannot stand behind a transform",
        detail=detail,
        hint="Leave `transform` out, or use a sink such as `iceberg` or `opensearch`.",
    )


class ShapedSink:
    """A sink behind the selects of a pipeline; see the module and `icestream.sinks`."""

    def __init__(
        self,
        inner: Shapeable,
        selects: Selects,
        declared: Callable[[str], Mapping[str, IcebergType]] = lambda table: {},
    ):
        self._inner = inner
        self._selects = selects
        self._types = declared
        self._sources: dict[str, TableShape] = {}
        self._derived: dict[str, Derived] = {}
        # The first epoch that each table takes.
        self._first: dict[str, int] = {}

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """The progress of each table; see `Sink.durable`."""
        return self._inner.durable(tables)

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Take the pipeline over; see `Sink.claim`."""
        return self._inner.claim(tables)

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Make sure that the table is there and the source's columns are known.

        False while neither the table nor the source tells them: they are found by reading.
        """
        if table not in self._selects:
            return self._inner.prepare(table, shape)

        def known() -> bool:
            return table in self._sources or self._recall(table, shape)

        def derived_shape() -> TableShape | None:
            return self._derived[table].shape if known() else None

        if not self._inner.prepare(table, derived_shape) or not known():
            return False
        self._remember(table)
        return True

    def refuse_itself(self, table: str, table_id: str) -> None:
        """Raise for a table that would be filled from itself, if the sink can tell."""
        if isinstance(self._inner, RefusesItself):
            self._inner.refuse_itself(table, table_id)

    def _recall(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Know the source's columns from the table, or from the source; False if neither knows."""
        remembered = self._inner.recalled(table, SOURCE_PROPERTY)
        if not remembered:
            known = shape()
            if known is not None:
                self._take(table, known)
            return known is not None
        known, self._first[table] = _shape_from_json(remembered)
        try:
            self._take(table, known)
        except ConfigInvalid:
            # The select may name a column that was added or renamed since.
            now = shape()
            if now is None:
                raise
            self._take(table, grown(known, now.columns, table))
        return True

    def evolve(self, table: str, columns: Sequence[Column]) -> None:
        """Let the table take columns of the source, as far as the select has use for them."""
        if table not in self._selects:
            self._inner.evolve(table, columns)
            return
        self._take(table, grown(self._sources[table], columns, table))
        self._remember(table)

    def writer(self, epoch: Epoch, tables: Sequence[str]) -> ShapedWriter:
        """A writer for the epoch; tables that lack what their selects give are evolved first."""
        own = [table for table in tables if table in self._selects]
        for table in own:
            if table not in self._first:
                self._first[table] = epoch.number
                self._remember(table)
        decided = self._inner.decided(epoch, own)
        for table in own:
            if table not in decided:
                self._declare(table)
        for _ in range(EVOLUTIONS_MAX):
            # Their changes are read by the source's columns, whatever the table has.
            inner = self._inner.writer(epoch, tables, read_otherwise=own)
            lacking = {table: self._lacking(table, inner) for table in own}
            if not any(lacking.values()):
                break
            for table, columns in lacking.items():
                if columns:
                    self._inner.evolve(table, columns)
        check(not any(lacking.values()), "a table that was evolved takes what its select gives")
        for table in own:
            # Not before: what the table refuses to take is not remembered.
            self._remember(table)
        keys = {table: self._source_key(table, inner.key(table)) for table in own}
        selects = [self._table_select(table, inner) for table in own]
        used = {table: self._reads(table, epoch) for table in own}
        return ShapedWriter(inner=inner, selects=selects, keys=keys, used=used)

    def commit(self, written: Written) -> Sequence[Committed]:
        """Make the epoch durable; see `Sink.commit`."""
        if isinstance(written.writer, ShapedWriter):
            written = replace(written, writer=written.writer.inner)
        return self._inner.commit(written)

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Make the frontier of an epoch without changes durable; see `Sink.heartbeat`."""
        return self._inner.heartbeat(epoch, labels, table)

    def close(self) -> None:
        """Let go of connections."""
        self._inner.close()

    def _take(self, table: str, source: TableShape) -> Derived:
        """Know the source's columns from here on, if the select takes them."""
        derived = self._selects.derived(table, source)
        self._sources[table], self._derived[table] = source, derived
        return derived

    def _declare(self, table: str) -> None:
        """Give the source's columns the types that are declared for them."""
        known = self._sources[table]
        wanted = declared_shape(known, self._types(table), table)
        if wanted != known:
            self._take(table, wanted)

    def _reads(self, table: str, epoch: Epoch) -> Reads:
        derived = self._derived[table]
        return Reads(
            columns=derived.used,
            named=derived.named,
            beginning=epoch.number <= self._first[table],
            hidden=derived.used.difference(derived.names()),
        )

    def _remember(self, table: str) -> None:
        """Keep what is known of the source in the table, once an epoch of it is read."""
        if table not in self._first:
            return
        text = _shape_to_json(self._sources[table], self._first[table])
        if self._inner.recalled(table, SOURCE_PROPERTY) != text:
            self._inner.remember(table, SOURCE_PROPERTY, text)

    def _lacking(self, table: str, inner: Writer) -> list[Column]:
        schema = schema_from_json(inner.schema_json(table))
        return gaps(schema, self._derived[table].shape.columns, inner.key(table))

    def _source_key(self, table: str, key: Sequence[str]) -> list[str]:
        """The source's columns that the table's key comes from."""
        plain = self._derived[table].plain
        for name in key:
            if name not in plain:
                raise ConfigInvalid(
                    f"the transform of table {table} gives no column {name} to delete by",
                    detail=f"The table's key is {', '.join(key)}, and each of its columns has to "
                    "be one of the source's, unchanged.",
                    hint="Select it under that name, or set `equality_delete_by`.",
                )
        return [plain[name] for name in key]

    def _table_select(self, table: str, inner: Writer) -> TableSelect:
        outputs = [column.name for column in self._derived[table].shape.columns]
        schema = schema_from_json(inner.schema_json(table))
        kinds = {field.name: field.field_type for field in schema.fields}
        return TableSelect(
            table=table,
            source_json=new_schema(self._sources[table]).model_dump_json(),
            outputs=outputs,
            key=list(inner.key(table)),
            kinds=[kinds[name] for name in outputs],
        )


class ShapedTables(ShapedSink):
    """The same for a sink that gives rows back."""

    def stored(
        self, table: str, keys: pa.Table, columns: Sequence[str], before: Frontier | None = None
    ) -> pa.Table:
        """The rows under the source's keys, with columns that the table holds as the source does.

        Others are `Reads.hidden`, and sources do not ask for them.
        """
        if table not in self._selects:
            return self._rows.stored(table, keys, columns, before)
        names = self._derived[table].names()
        check(names.keys() >= set(columns), "no source asks for values that a select hides")
        asked = keys.rename_columns([names[name] for name in keys.column_names])
        found = self._rows.stored(table, asked, [names[name] for name in columns], before)
        wanted = [*keys.column_names, *columns]
        return pa.table({name: found.column(names[name]) for name in wanted})

    @property
    def _rows(self) -> LooksUpRows:
        assert isinstance(self._inner, LooksUpRows)
        return self._inner


def _shape_to_json(shape: TableShape, first_epoch: int) -> str:
    schema = json.loads(new_schema(shape).model_dump_json())
    told = {
        "schema": schema,
        "key": list(shape.key),
        "first_epoch": first_epoch,
        **({"table_id": shape.table_id} if shape.table_id else {}),
    }
    return json.dumps(told, separators=(",", ":"))


def _shape_from_json(text: str) -> tuple[TableShape, int]:
    """The source's columns and key, and the first epoch that was read for the table."""
    document = json.loads(text)
    columns = [
        Column(name=field.name, type=field.field_type, required=field.required)
        for field in schema_from_json(json.dumps(document["schema"])).fields
    ]
    shape = TableShape(columns=columns, key=document["key"], table_id=document.get("table_id", ""))
    return shape, document.get("first_epoch", 0)
