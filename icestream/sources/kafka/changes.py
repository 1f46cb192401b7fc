"""Rows of records as change batches in a table's columns.

What the table lacks and can be given is asked for (`SchemaGap`). A row that no safe change of the
table makes fit is named with the reason, and the others go on without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType

from icestream.change import AT, OP, SEQ, Op
from icestream.errors import ConfigInvalid, SchemaRejected
from icestream.formats.envelope import SEND_WHOLE_ROWS
from icestream.formats.rows import Field, Indices, Mask, Rows
from icestream.schema import (
    Column,
    Names,
    SchemaGap,
    TableShape,
    arrow_schema,
    evolution,
    reserved,
    schema_from_json,
)

# So often rows are looked at that bring columns; what is left then brings too many.
ADMISSIONS_MAX = 2_000

Reasons = Mapping[int, str]
"""Why rows cannot be taken, by their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRows:
    """Change batch of the rows that the table takes, the places of these, and why not others.

    `withheld` tells for each column, also where the table has none, which changes of the batch lack
    its value.
    """

    batch: pa.Table
    accepted: Indices
    rejected: Reasons
    withheld: Mapping[str, Mask]


class TableFit:
    """One table as rows of records meet it."""

    def __init__(
        self,
        table: str,
        schema_json: str,
        key: Sequence[str],
        declared: Mapping[str, IcebergType],
        columns_max: int,
    ):
        self._table = table
        self._columns_max = columns_max
        self._schema: Schema = schema_from_json(schema_json)
        self._kinds = {field.name: field.field_type for field in self._schema.fields}
        self._arrow = arrow_schema(self._schema)
        self._key = list(key)
        self._declared = declared

    def refuse_unfit(self, *, only_added: bool) -> None:
        """Rows that are only ever added need a table without a key, all others one with a key."""
        if only_added and self._key:
            raise ConfigInvalid(
                f"table {self._table} has a key, {', '.join(self._key)}, and its records only add",
                detail="Two records of one key would be two rows.",
                hint="Set `value.envelope: upsert`, or take the table's key away.",
            )
        if not only_added and not self._key:
            raise no_key(self._table)

    def fitted(self, rows: Rows) -> FittedRows:
        """The rows as changes, without `AT` and `SEQ`; raises `SchemaGap` for what is lacking."""
        columns, rejected = self._cast_columns(rows)
        accepted = np.arange(len(rows), dtype=np.int64)
        if rejected:
            accepted = np.setdiff1d(accepted, list(rejected))
            rows = rows.take(accepted)
            # What fits now may be of another type than before: it is cast once more.
            columns, _ = self._cast_columns(rows)
        self._refuse_required(columns, rows)
        batch = pa.table({OP: pa.array(rows.ops, pa.int8()), **columns})
        return FittedRows(batch=batch, accepted=accepted, rejected=rejected, withheld=rows.withheld)

    def _cast_columns(self, rows: Rows) -> tuple[dict[str, pa.Array], dict[int, str]]:
        columns: dict[str, pa.Array] = {}
        rejected: dict[int, str] = {}
        lacking: list[Column] = []
        new = {name: each for name, each in rows.columns.items() if name not in self._kinds}
        if new:
            names = Names(self._schema.fields)
            found = Admission(names, self._columns_max, self._declared).of(new)
            lacking, rejected = found.columns, found.rejected
        for name, field in rows.columns.items():
            if name in new:
                continue
            try:
                columns[name] = field.cast(name, self._kinds[name], self._arrow.field(name).type)
            except SchemaRejected:
                for place in self._failing(name, field):
                    wider = self._wider(name, field.take(np.array([place])))
                    lacking += [wider] if wider else []
                    reason = f"the value of column {name} does not fit its type"
                    rejected.setdefault(place, f"{reason} {self._kinds[name]}")
        if lacking:
            raise SchemaGap(self._table, lacking)
        for name in self._key:
            for place in np.flatnonzero(_nulls(columns.get(name), len(rows))).tolist():
                rejected.setdefault(place, f"column {name} of the key is missing or null")
        return columns, rejected

    def _failing(self, name: str, field: Field) -> list[int]:
        """The places of values that do not fit, found by halving."""
        failing, pending = [], [np.arange(len(field), dtype=np.int64)]
        while pending:
            places = pending.pop()
            try:
                field.take(places).cast(name, self._kinds[name], self._arrow.field(name).type)
            except SchemaRejected:
                if len(places) == 1:
                    failing.append(int(places[0]))
                else:
                    pending += np.array_split(places, 2)
        return sorted(failing)

    def _wider(self, name: str, field: Field) -> Column | None:
        """The column that the table's must become to take a value; None when it cannot."""
        kind = field.type()
        column = Column(name=name, type=kind) if kind is not None else None
        try:
            steps = evolution(self._schema, [column] if column else [], self._key, self._table)
        except SchemaRejected:
            return None
        return column if steps else None

    def _refuse_required(self, columns: Mapping[str, pa.Array], rows: Rows) -> None:
        """A column that records leave out has to become optional first.

        A value that was not sent is one that the row has.
        """
        kept = rows.ops != Op.DELETE
        lost = [
            Column(name=field.name, type=field.field_type, absent=True)
            for field in self._schema.fields
            if field.required
            and field.name not in self._key
            and pc.any(
                pc.and_(
                    _nulls(columns.get(field.name), len(rows)),
                    pa.array(kept & ~rows.unsent(field.name)),
                )
            ).as_py()
        ]
        if lost:
            raise SchemaGap(self._table, lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Columns that a table may be given, and why rows that bring others cannot be taken."""

    columns: list[Column]
    rejected: dict[int, str]


class Admission:
    """Decides which new columns a table is given.

    A row that brings a column whose name readers take for that of another, or columns that make the
    table too wide, is rejected, and adds nothing. Rows count in their order.
    """

    def __init__(self, names: Names, columns_max: int, declared: Mapping[str, IcebergType]):
        self._names = names
        self._columns_max = columns_max
        self._declared = declared
        self._columns: list[Column] = []
        self._rejected: dict[int, str] = {}

    def of(self, fields: Mapping[str, Field]) -> Admitted:
        """What becomes of columns, in their order, that the table does not have."""
        kinds = {name: self._declared.get(name) or field.type() for name, field in fields.items()}
        columns = {n: Column(name=n, type=kind) for n, kind in kinds.items() if kind is not None}
        places = {name: np.flatnonzero(~fields[name].null()) for name in columns}
        pending = {name: found for name, found in places.items() if len(found)}
        for _ in range(ADMISSIONS_MAX):
            pending = self._left(pending)
            if not pending or len(self._names) >= self._columns_max:
                break
            row = min(int(found[0]) for found in pending.values())
            first = [name for name, found in pending.items() if found[0] == row]
            group = [self._of_row(columns[name], fields[name], row) for name in first]
            reason = self._refusal(group)
            if reason is None:
                self._take(group)
                pending = {name: found for name, found in pending.items() if name not in first}
                continue
            self._rejected[row] = reason
            for column in group:
                # No row can have what the table itself does not let in.
                if not Names().clash(column) and (why := self._refusal([column])):
                    of_column = pending[column.name].tolist()
                    self._rejected.update(dict.fromkeys(of_column, why))
        for found in self._left(pending).values():
            self._rejected.update(dict.fromkeys(found.tolist(), self._too_many()))
        # Columns that a schema tells and no row has a value in.
        for name in (name for name, found in places.items() if not len(found)):
            if self._refusal([columns[name]]) is None:
                self._take([columns[name]])
        return Admitted(columns=self._columns, rejected=self._rejected)

    def _left(self, pending: Mapping[str, Indices]) -> dict[str, Indices]:
        """The rows that are not rejected yet, by the columns that they bring."""
        if not self._rejected:
            return dict(pending)
        gone = np.fromiter(self._rejected, np.int64, len(self._rejected))
        left = {name: found[~np.isin(found, gone)] for name, found in pending.items()}
        return {name: found for name, found in left.items() if len(found)}

    def _of_row(self, column: Column, field: Field, row: int) -> Column:
        """The column as one row has it, where all rows together do not make one."""
        if not Names().clash(column):
            return column
        kind = field.take(np.array([row])).type()
        return Column(name=column.name, type=kind) if kind is not None else column

    def _refusal(self, columns: Sequence[Column]) -> str | None:
        """Why a table cannot have these columns; None when it can."""
        names = self._names.copy()
        for column in columns:
            if why := reserved(column):
                return why
            if taken := names.clash(column):
                return f"columns {taken[1]} and {taken[0]} cannot be told apart by their names"
            names.add(column)
        return self._too_many() if len(names) > self._columns_max else None

    def _take(self, columns: Sequence[Column]) -> None:
        for column in columns:
            self._names.add(column)
            self._columns.append(column)

    def _too_many(self) -> str:
        return (
            "the record brings more columns than its table may have: "
            f"`value.columns_max` is {self._columns_max}"
        )


def shape_of(
    rows: Rows, key: Sequence[str], declared: Mapping[str, IcebergType], columns_max: int
) -> tuple[TableShape, dict[int, str]]:
    """How a table of these rows would be created, and which of them could not be taken."""
    ordered = {n: rows.columns[n] for n in [*key, *rows.columns] if n in rows.columns}
    found = Admission(Names(), columns_max, declared).of(ordered)
    return TableShape(columns=found.columns, key=list(key)), found.rejected


def replacing(changes: pa.Table) -> pa.Table:
    """The changes without promises that a key is new: its row may be there by another record."""
    ops = changes.column(OP).combine_chunks()
    insert, upsert = pa.scalar(int(Op.INSERT), pa.int8()), pa.scalar(int(Op.UPSERT), pa.int8())
    place = changes.column_names.index(OP)
    return changes.set_column(place, OP, pc.if_else(pc.equal(ops, insert), upsert, ops))


def not_stored(column: str) -> str:
    """The reason for a change whose value is neither sent nor found."""
    return (
        f"the value of column {column} did not change and was not sent, and nothing stored has it; "
        f"{SEND_WHOLE_ROWS}"
    )


def no_key(table: str) -> ConfigInvalid:
    """The error for changes of rows that nothing identifies."""
    return ConfigInvalid(
        f"nothing tells what identifies a row of table {table}",
        detail="Its records have no keys that are objects.",
        hint=f"Name the columns: `source.kafka.keys: {{{table}: [id]}}`, "
        "or set `value.envelope: none` to add every record as a row.",
    )


def _nulls(column: pa.Array | None, count: int) -> pa.Array:
    if column is None:
        return pa.array(np.ones(count, dtype=bool))
    return pc.is_null(column)


def ordered(batch: pa.Table, at: Indices, seq: Indices) -> pa.Table:
    """The change batch with the places of its changes."""
    return batch.append_column(AT, pa.array(at)).append_column(SEQ, pa.array(seq))
