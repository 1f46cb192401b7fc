"""Rows of a changefeed, in whichever envelope, become change batches.

Envelopes differ in where a row's columns, its key and its `updated` timestamp stand; `Rows` has
them by what they are. A `Reader` casts them to the columns of a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType

from icestream.change import AT, BEFORE, OP, SEQ, Op, within
from icestream.errors import ConfigInvalid, DataRejected
from icestream.formats.json_cells import Cells, Kind, elements, members
from icestream.formats.json_columns import infer_type
from icestream.schema import Column, Reads, SchemaGap, arrow_schema, cast_text
from icestream.sources.cockroachdb.hlc import hlc_parts
from icestream.sources.named_columns import ColumnsSeen, NamedColumns

_BARE = "__crdb__"
Span = tuple[tuple[int, int], tuple[int, int]]


class NamedPlace(Protocol):
    """Where rows come from, as errors name it."""

    @property
    def name(self) -> str:
        """What is to be looked at."""
        ...

    def damaged(self, what: str) -> DataRejected:
        """The error for content that is not what it should be."""
        ...


class Reader:
    """Casts rows of one table to its columns: change batches.

    With `span` only rows in it are held against what the table's select reads.
    """

    def __init__(
        self,
        table: str,
        schema: Schema,
        key: list[str],
        declared: Mapping[str, IcebergType],
        reads: Reads | None = None,
        span: Span | None = None,
    ):
        self.table = table
        self._span = span
        self._named = NamedColumns(table, reads, declared)
        self.key = key
        self.declared = declared
        self.kinds = {column.name: column.field_type for column in schema.fields}
        self.arrow = arrow_schema(schema)

    @property
    def seen(self) -> ColumnsSeen:
        """What was seen of the columns that the table's select names; see `named_columns`."""
        return self._named.seen

    def read_rows(self, place: NamedPlace, rows: "Rows") -> pa.Table:
        """The rows as changes; raises `SchemaGap` for columns that the table lacks."""
        at, seq = timestamps(place, rows)
        key = self._key_columns(place, rows)
        columns: dict[str, pa.Array] = dict(key)
        unknown = []
        for name, cells in rows.columns.items():
            if name in key:
                continue
            if name in self.kinds:
                columns[name] = self._cast(cells, name)
            elif (kind := self._infer(cells, name)) is not None:
                unknown.append(Column(name=name, type=kind))
        if unknown:
            raise SchemaGap(self.table, unknown)
        present = {name: cells.kinds != Kind.MISSING for name, cells in rows.columns.items()}
        present.update({name: np.ones(len(at), dtype=bool) for name in key})
        self._refuse_gone(present, rows.deleted, at, seq)
        if rows.bare:
            self._refuse_ambiguous(place, rows)
        ops = np.where(rows.deleted, np.int8(Op.DELETE), np.int8(Op.UPSERT))
        table = {OP: pa.array(ops), AT: at, SEQ: seq, **columns}
        if rows.before is not None:
            table[BEFORE] = self._before(rows.before)
        return pa.table(table)

    def _refuse_gone(
        self, present: Mapping[str, np.ndarray], deleted: np.ndarray, at: pa.Array, seq: pa.Array
    ) -> None:
        """Refuse rows that lack a column which the table's select names."""
        counted = ~deleted
        if self._span is not None:
            counted = counted & within(at, seq, *self._span).to_numpy(zero_copy_only=False)
        self._named.look(present, counted, {"": at.to_numpy(zero_copy_only=False)})

    def _key_columns(self, place: NamedPlace, rows: "Rows") -> dict[str, pa.Array]:
        """The key's columns from the key, which deletes have as well."""
        if not self.key or not len(rows.deleted):
            return {}
        parts = key_parts(rows.key, self.key)
        if len(parts) != len(self.key):
            raise no_key(place, self.table, self.key, len(parts))
        columns = {}
        for name in self.key:
            part = parts.get(name)
            if part is None or np.isin(part.kinds, (Kind.MISSING, Kind.NULL)).any():
                raise no_key(place, self.table, self.key, len(parts))
            text = part.text()
            if name in rows.columns:
                self._agree(name, text, rows.columns[name].text())
            columns[name] = cast_text(text, name, self.kinds[name], self.arrow.field(name).type)
        return columns

    def _refuse_ambiguous(self, place: NamedPlace, rows: "Rows") -> None:
        """Newer servers send a bare delete as its key and nulls, just like a row of nulls."""
        others = [cells for name, cells in rows.columns.items() if name not in self.key]
        valued = np.zeros(len(rows.deleted), dtype=bool)
        for cells in others:
            valued |= (cells.kinds != Kind.MISSING) & (cells.kinds != Kind.NULL)
        if others and (~valued & ~rows.deleted).any():
            raise DataRejected(
                f"cannot tell a delete from a row of nulls in {place.name}",
                detail="In the bare envelope both have a key and nothing else.",
                hint="Create the changefeed with envelope=wrapped.",
            )

    def _agree(self, name: str, text: pa.Array, column: pa.Array) -> None:
        """Rows that carry their key twice prove that the key is these columns in this order."""
        if pc.any(pc.not_equal(text, column), min_count=0).as_py():
            raise DataRejected(
                f"the key of table {self.table} is not {', '.join(self.key)} in this order",
                detail=f"Column {name} and its place in the key array differ.",
                hint="Name the primary key's columns in order: "
                f"`source.cockroachdb.keys: {{{self.table}: [...]}}`.",
            )

    def _cast(self, cells: Cells, name: str) -> pa.Array:
        return cast_text(cells.text(), name, self.kinds[name], self.arrow.field(name).type)

    def _before(self, before: Cells) -> pa.Array:
        """The before-images, in the columns that the table has; null where there is none.

        One that lacks a column counts as none: a column that was dropped at the source still has
        its old value in the table, and nobody knows which.
        """
        known = {name: cells for name, cells in members(before).items() if name in self.kinds}
        if len(known) < len(self.kinds):
            return pa.nulls(len(before), pa.struct([]))
        columns = [self._cast(cells, name) for name, cells in known.items()]
        absent = before.kinds != Kind.OBJECT
        for cells in known.values():
            absent = absent | (cells.kinds == Kind.MISSING)
        return pa.StructArray.from_arrays(columns, names=list(known), mask=pa.array(absent))

    def _infer(self, cells: Cells, name: str) -> IcebergType | None:
        return self.declared.get(name) or infer_type(cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows by their parts, whatever the envelope."""

    updated: Cells | None
    key: Cells | None
    deleted: np.ndarray
    columns: Mapping[str, Cells]
    before: Cells | None
    bare: bool = False


def top_of(messages: Cells) -> Mapping[str, Cells]:
    """The members of messages; those of their payload where a schema stands beside it."""
    top = members(messages)
    if "payload" in top and "schema" in top and "after" not in top and _BARE not in top:
        return members(top["payload"].only(Kind.OBJECT))
    return top


def updated_of(top: Mapping[str, Cells]) -> Cells | None:
    """When rows were changed; None when no row says it."""
    if _BARE in top:
        return members(top[_BARE].only(Kind.OBJECT)).get("updated")
    if "updated" not in top and "source" in top:
        return members(top["source"].only(Kind.OBJECT)).get("ts_hlc")
    return top.get("updated")


def rows_of(place: NamedPlace, top: Mapping[str, Cells]) -> Rows:
    """The rows in the members of messages: wrapped, enriched or bare."""
    if _BARE in top:
        return _bare_rows(top)
    if not top:
        nothing = np.zeros(0, dtype=bool)
        return Rows(updated=None, key=None, deleted=nothing, columns={}, before=None)
    row = top.get("after")
    # A message that does not speak of a row's state must not pass for a delete.
    if row is None or not np.isin(row.kinds, (Kind.OBJECT, Kind.NULL)).all():
        raise DataRejected(
            f"rows of {place.name} are in none of the envelopes wrapped, enriched and bare",
            hint="Create the changefeed with envelope=wrapped, the default.",
        )
    return Rows(
        updated=updated_of(top),
        key=top.get("key"),
        deleted=row.kinds != Kind.OBJECT,
        columns=members(row),
        before=top.get("before"),
    )


def _bare_rows(top: Mapping[str, Cells]) -> Rows:
    meta = members(top[_BARE].only(Kind.OBJECT))
    columns = {name: cells for name, cells in top.items() if name != _BARE}
    present = np.zeros(len(top[_BARE]), dtype=bool)
    for cells in columns.values():
        present |= cells.kinds != Kind.MISSING
    return Rows(
        updated=meta.get("updated"),
        key=meta.get("key"),
        deleted=~present,
        columns=columns,
        before=None,
        bare=True,
    )


def timestamps(place: NamedPlace, rows: Rows) -> tuple[pa.Array, pa.Array]:
    """Both parts of the rows' timestamps; refused when one has none."""
    if rows.updated is not None:
        return split_hlc(place, rows.updated.text())
    if len(rows.deleted):
        raise no_timestamps(place)
    return pa.array([], pa.int64()), pa.array([], pa.int64())


def split_hlc(place: NamedPlace, text: pa.Array) -> tuple[pa.Array, pa.Array]:
    """`wall.logical` cut into two whole numbers, for a whole column at once."""
    if text.null_count:
        raise no_timestamps(place)
    walls, logicals, known = hlc_parts(text)
    if not known.all():
        raise place.damaged("A row's `updated` is not a timestamp.")
    return pa.array(walls), pa.array(logicals)


def no_timestamps(place: NamedPlace) -> DataRejected:
    """The error for rows that do not say when they were changed."""
    return DataRejected(
        f"rows of {place.name} have no `updated` timestamp",
        detail="Without it nobody can tell which of two changes of a row is the later one.",
        hint="Create the changefeed WITH updated, resolved.",
    )


def no_key(place: NamedPlace, table: str, key: Sequence[str], found: int) -> DataRejected:
    """The error for a row whose key has too many parts, or too few."""
    return DataRejected(
        f"a row of {place.name} has no key",
        detail=f"Table {table} has the key {', '.join(key)}; the row's key has {found} parts.",
        hint="Create the changefeed WITH key_in_value, and name the primary key's columns with "
        f"`source.cockroachdb.keys: {{{table}: [...]}}`.",
    )


def plain_key(key: Cells) -> Cells:
    """The keys themselves, where a schema stands beside each of them."""
    if (key.kinds == Kind.OBJECT).any():
        parts = members(key)
        if parts.keys() == {"payload", "schema"}:
            return parts["payload"]
    return key


def key_parts(key: Cells | None, names: Sequence[str] = ()) -> dict[str, Cells]:
    """The parts of keys by column: objects have their names, arrays are in the key's order.

    Parts of an array beyond the given names are named by their place.
    """
    if key is None:
        return {}
    if (key.kinds == Kind.OBJECT).any():
        return members(key)
    places = elements(key)
    return dict(zip([*names, *map(str, range(len(names), len(places)))], places, strict=False))


def _same(one: Cells, other: Cells) -> bool:
    """Whether cells hold the same values; the text `1` is not the number."""
    return np.array_equal(one.kinds, other.kinds) and bool(one.text().equals(other.text()))


class KeySearch:
    """Finds which columns are the key, by comparing rows with their keys."""

    def __init__(self) -> None:
        self.candidates: list[list[str]] | None = None

    def look(self, place: NamedPlace, table: str, rows: Rows) -> None:
        """Strike out columns that differ from the key in some row; deletes tell nothing."""
        live = np.flatnonzero(~rows.deleted)
        if len(live) == 0:
            return
        if rows.key is None:
            raise no_key(place, table, ["unknown"], 0)
        key = rows.key.take(live)
        if (key.kinds == Kind.OBJECT).any():
            self.candidates = [[name] for name in members(key)]
            return
        columns = {name: cells.take(live) for name, cells in rows.columns.items()}
        fitting = [
            [name for name, cells in columns.items() if _same(cells, part)]
            for part in elements(key)
        ]
        known = self.candidates or fitting
        if len(known) != len(fitting):
            raise no_key(place, table, ["unknown"], len(fitting))
        self.candidates = [
            [name for name in one if name in other]
            for one, other in zip(known, fitting, strict=True)
        ]

    @property
    def settled(self) -> bool:
        """Whether there is one choice and no other."""
        return bool(self.candidates) and all(len(part) == 1 for part in self.candidates or ())

    def key(self, table: str) -> list[str]:
        """The key's columns; empty when no row was seen, refused when more than one choice fits."""
        for number, names in enumerate(self.candidates or (), start=1):
            if len(names) != 1:
                raise ConfigInvalid(
                    f"cannot tell which columns are the key of table {table}",
                    detail=f"Part {number} of the key equals "
                    + (f"the columns {', '.join(names)}." if names else "no column."),
                    hint="Name the primary key's columns in order: "
                    f"`source.cockroachdb.keys: {{{table}: [...]}}`.",
                )
        return [names[0] for names in self.candidates or ()]
