"""Row changes as the stream sends them: where their tuples lie, and their columns on workers.

A split decodes spooled messages of one table into change batches. An update does not send large
values that it left as they are (TOAST): they are taken from the row's change before, from the old
row where the table's replica identity sends it in full, or, for a row's first change, from the
destination. The obvious shortcut, a null, would destroy the value.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.types import IcebergType

from icestream.change import AT, OP, SEQ, Op
from icestream.errors import Broken, DataRejected, SchemaRejected
from icestream.schema import (
    Column,
    Reads,
    SchemaGap,
    arrow_schema,
    calendar_day,
    gaps,
    schema_from_json,
)
from icestream.sources import Need, TableSplit, ValuesNeeded
from icestream.sources.completion import Completion, plain
from icestream.sources.named_columns import gone
from icestream.sources.postgres.connection import Connection, Dsn, quoted, text_literal
from icestream.sources.postgres.framing import row_tuples
from icestream.sources.postgres.values.decode import decode
from icestream.sources.postgres.values.kinds import (
    Codec,
    PgType,
    copy_expression,
    iceberg_type,
    in_binary,
)
from icestream.sources.postgres.values.places import SentAs
from icestream.sources.postgres.values.tuples import Tuples, tuples_at
from icestream.sources.spool import spooled

COPY_TABLE_ANEW = (
    "Run once without the table in `tables`, then add it again: it is emptied and copied anew. If "
    "it is the pipeline's only table, drop its Iceberg table and the replication slot instead, and "
    "start again."
)
# The Iceberg table remembers the columns that its rows are deleted by.
UNDER_ANOTHER_KEY = (
    f"{COPY_TABLE_ANEW} To keep its new key, drop its Iceberg table before you add it again."
)
# Above those of columns, of which a table has at most 1,600; Iceberg numbers them anew.
_NESTED_IDS = 10_000
_DAY_MICROSECONDS = 86_400_000_000

_INSERT, _DELETE = ord("I"), ord("D")
# The old row as the replica identity's columns, others as null.
_KEY_ONLY = ord("K")
# A key change is two changes: the old key goes, in its share, and the new one comes in its own.
MOVED_OUT, MOVED_IN = ord("o"), ord("i")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationColumn:
    """A column as the stream describes it."""

    name: str
    type: PgType
    typmod: int
    declared: IcebergType | None = None

    def iceberg(self) -> IcebergType:
        """The type of the column in a table that is made for it."""
        return self.declared or iceberg_type(self.type, self.typmod, itertools.count(_NESTED_IDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One version of a table as the stream describes it; `key` are positions of key columns.

    `to_come` are columns that were added to the table after this version of it.
    """

    table: str
    oid: int
    columns: Sequence[RelationColumn]
    key: Sequence[int]
    to_come: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAtServer:
    """Where the rows of a table can be read, whatever the table is called by now."""

    dsn: Dsn = field(repr=False)
    oid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolPart:
    """Record batches of one segment's file that a split reads."""

    path: str
    batches: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WalSplit(TableSplit):
    """The changes of one table's keys, or a share of them, in one epoch.

    `emptied_at` is where the table was truncated last within the epoch: what came before is moot.
    `stored` are values that the changes left out and that were looked up in the destination.
    `storage` is what reading the spool takes.
    """

    table: str
    parts: Sequence[SpoolPart]
    relations: Mapping[int, Relation]
    lower: int
    upper: int
    size_bytes: int
    emptied_at: tuple[int, int] | None = None
    append_only: bool = False
    stored: bytes | None = None
    at_server: TableAtServer | None = None
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    each_key_once: bool = False

    def read(
        self, schema_json: str, key: Sequence[str], reads: Reads | None = None
    ) -> Iterator[pa.Table]:
        """Change batches; raises `ValuesNeeded` for what only the destination has."""
        schema = schema_from_json(schema_json)
        for relation in self.relations.values():
            refuse_other_key(relation, key)
            missing = gaps(schema, relation_columns(relation, key))
            if missing:
                raise SchemaGap(self.table, missing)
        # What is not read is not decoded, and not looked up where it was not sent.
        kinds = {
            f.name: f.field_type for f in schema.fields if not reads or f.name in reads.columns
        }
        arrow = arrow_schema(schema)
        pieces = []
        for rows in self._rows():
            if not rows.leaving.all():
                refuse_gone(rows.relation, reads)
            pieces.append(_decoded(rows, kinds, arrow, key))
        if self.append_only:
            pieces = [piece.only(piece.ops == Op.INSERT) for piece in pieces]
        if any(piece.unsent for piece in pieces):
            whole = _joined(pieces)
            yield _completed(whole, self, key, arrow, reads.hidden if reads else frozenset())
            return
        for piece in pieces:
            yield piece.table

    def learned(self) -> Any:
        """Nothing."""
        return None

    def with_stored(self, table: str, values: pa.Table | None) -> "WalSplit":
        """The same split with values that it asked for."""
        if values is None:
            raise Broken(f"table {table} is not read where it does not stand")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, values.schema) as stream:
            stream.write_table(values)
        return replace(self, stored=sink.getvalue().to_pybytes())

    def keys(self, key_types: Mapping[str, Any], arrow: pa.Schema) -> pa.Table:
        """The keys that the changes touch, in the columns of the table's schema."""
        names = list(key_types)
        pieces = [
            _decoded(rows, key_types, arrow, names).table.select(names) for rows in self._rows()
        ]
        empty = pa.schema([arrow.field(name) for name in names]).empty_table()
        return pa.concat_tables([empty, *pieces], promote_options="permissive")

    def stored_rows(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """The destination's rows under these keys; raises `ValuesNeeded` to have them looked up."""
        if keys.num_rows == 0:
            names = {name: pa.null() for name in columns}
            return pa.schema([*keys.schema, *names.items()]).empty_table()
        if self.stored is None:
            raise ValuesNeeded(Need(table=self.table, keys=keys, columns=columns))
        return pa.ipc.open_stream(self.stored).read_all()

    def fetched_rows(self, keys: pa.Table, columns: Sequence[str], arrow: pa.Schema) -> pa.Table:
        """Rows that the destination lacks, from the server as they are now.

        A table lacks rows whose changes came before their copy. What is newer than the change comes
        again with the changes that follow, and a row that is gone is deleted or moved by them.
        """
        relation = self.relations[max(self.relations)]
        names = [*keys.column_names, *columns]
        if keys.num_rows == 0:
            return pa.schema([arrow.field(name) for name in names]).empty_table()
        assert self.at_server is not None
        return _fetched(self.at_server, relation, keys, columns, arrow)

    def _rows(self) -> Iterator["_Rows"]:
        """The split's messages, one relation version at a time."""
        for part in self.parts:
            for batch in spooled(part.path, self.storage, part.batches):
                yield from self._rows_of(batch)

    def _rows_of(self, batch: pa.RecordBatch) -> Iterator["_Rows"]:
        of_relation, kind, at, seq = (
            batch.column(n).to_numpy(zero_copy_only=False) for n in range(4)
        )
        inside = (at >= self.lower) & (at < self.upper)
        if self.emptied_at is not None:
            wall, number = self.emptied_at
            inside &= (at > wall) | ((at == wall) & (seq >= number))
        messages = batch.column(4)
        offsets = np.frombuffer(messages.buffers()[1], dtype=np.int64)
        content = np.frombuffer(messages.buffers()[2], dtype=np.uint8)
        for number, relation in self.relations.items():
            chosen = np.flatnonzero(inside & (of_relation == number))
            if not len(chosen):
                continue
            yield _Rows(
                relation=relation,
                kind=kind[chosen],
                at=at[chosen],
                seq=seq[chosen],
                content=content,
                starts=offsets[chosen],
                ends=offsets[chosen + 1],
            )


def refuse_other_key(relation: Relation, key: Sequence[str]) -> None:
    """Refuse delete columns other than the key that changes name their rows by."""
    own = [relation.columns[number].name for number in relation.key]
    if set(own) != set(key):
        if not own:
            raise other_identity(
                relation.table,
                f"It has no key now, and its rows in the lake are told apart by {', '.join(key)}.",
            )
        by = ", ".join(key) or "no column"
        raise SchemaRejected(
            f"rows of table {relation.table} cannot be deleted by {by}",
            detail=f"Its changes name their rows by {', '.join(own)}.",
            hint="The table has another key or replica identity than before: give it the old one "
            f"back, or, if {by} still identify a row, say so in `identifier_columns`. "
            f"{UNDER_ANOTHER_KEY}",
        )


def refuse_gone(relation: Relation, reads: Reads | None) -> None:
    """Refuse rows without a column that the select of their table names, unless they are older."""
    there = {column.name for column in relation.columns} | relation.to_come
    lacking = sorted(reads.named - there) if reads else []
    if lacking:
        raise gone(
            relation.table,
            lacking[0],
            "Name it in the select as the source does now. If the same is said of the new name, "
            f"changes from before it are still to come: keep the new name. {COPY_TABLE_ANEW}",
        )


def other_identity(table: str, detail: str) -> SchemaRejected:
    """The error for a table whose changes no longer name their rows as they did."""
    return SchemaRejected(
        f"the replica identity of table {table} has changed",
        detail=detail,
        hint=f"Give the table its key or replica identity back. {UNDER_ANOTHER_KEY}",
    )


def relation_columns(relation: Relation, key: Sequence[str]) -> list[Column]:
    """The relation's columns as a table would be created with."""
    return [
        Column(
            name=column.name,
            type=column.iceberg(),
            required=column.name in key,
        )
        for column in relation.columns
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    relation: Relation
    kind: np.ndarray
    at: np.ndarray
    seq: np.ndarray
    content: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @property
    def leaving(self) -> np.ndarray:
        """Rows that go, from their key at least."""
        return np.isin(self.kind, (_DELETE, MOVED_OUT))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Decoded changes; `unsent` tells per column which values were left out, `moved_in` which
    changes are the row under its new key, after a change of the key."""

    table: pa.Table
    ops: np.ndarray
    unsent: Mapping[str, np.ndarray]
    moved_in: np.ndarray

    def only(self, mask: np.ndarray) -> "_Piece":
        return _Piece(
            table=self.table.filter(pa.array(mask)),
            ops=self.ops[mask],
            unsent={},
            moved_in=self.moved_in[mask],
        )


def _decoded(rows: _Rows, kinds: Mapping[str, Any], arrow: pa.Schema, key: Sequence[str]) -> _Piece:
    """One relation version's messages as changes in the table's columns."""
    old, new, damaged = row_tuples(rows.content, rows.starts, rows.ends)
    if damaged >= 0:
        raise DataRejected(f"a spooled change of table {rows.relation.table} is damaged")
    width = len(rows.relation.columns)
    leaving = rows.leaving
    tuples = tuples_at(rows.content, np.where(leaving, old, new), width)
    _refuse_unnamed(rows, tuples, leaving, old)
    before = tuples_at(rows.content, old, width)
    _fill_unsent(tuples, before)
    columns, unsent = {}, {}
    for number, column in enumerate(rows.relation.columns):
        if column.name not in kinds:
            continue
        to, wanted = kinds[column.name], arrow.field(column.name).type
        columns[column.name] = decode(tuples, number, column.type, to, wanted, column.name)
        absent = tuples.forms[number] == SentAs.UNSENT
        if absent.any():
            unsent[column.name] = absent
    ops = np.where(
        leaving,
        np.int8(Op.DELETE),
        np.where(rows.kind == _INSERT, np.int8(Op.INSERT), np.int8(Op.UPSERT)),
    )
    head = {OP: pa.array(ops), AT: pa.array(rows.at), SEQ: pa.array(rows.seq)}
    return _Piece(
        table=pa.table({**head, **columns}),
        ops=ops,
        unsent=unsent,
        moved_in=rows.kind == MOVED_IN,
    )


def _refuse_unnamed(rows: _Rows, tuples: Tuples, leaving: np.ndarray, old: np.ndarray) -> None:
    """Refuse a row that goes and does not send its key.

    A partition has a replica identity of its own, which nothing but its rows tells.
    """
    if not rows.relation.key or not leaving.any():
        return
    brief = leaving & (rows.content[np.maximum(old - 1, 0)] == _KEY_ONLY)
    if (tuples.forms[list(rows.relation.key)][:, brief] == SentAs.NULL).any():
        raise SchemaRejected(
            f"a delete or key change of table {rows.relation.table} does not send its key",
            detail="A partition has another replica identity than the table.",
            hint=f"Give the partition the table's replica identity. {COPY_TABLE_ANEW}",
        )


def _fill_unsent(tuples: Tuples, before: Tuples) -> None:
    """Take values that the new tuple leaves out from the old one where that was sent in full."""
    fill = (tuples.forms == SentAs.UNSENT) & (before.forms != SentAs.UNSENT)
    fill &= before.forms != SentAs.NULL
    if fill.any():
        tuples.starts[fill] = before.starts[fill]
        tuples.lengths[fill] = before.lengths[fill]
        tuples.forms[fill] = before.forms[fill]


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    """All pieces as one, in the order of the stream."""
    table = pa.concat_tables([piece.table for piece in pieces], promote_options="permissive")
    names = {name for piece in pieces for name in piece.unsent}
    unsent = {
        name: np.concatenate(
            [p.unsent.get(name, np.zeros(p.table.num_rows, dtype=bool)) for p in pieces]
        )
        for name in names
    }
    moved_in = np.concatenate([piece.moved_in for piece in pieces])
    seq = table.column(SEQ).combine_chunks().to_numpy(zero_copy_only=False)
    # Of the two changes that a key change is, the old key's comes first.
    order = np.lexsort((moved_in, seq))
    table = table.take(pa.array(order))
    ops = table.column(OP).combine_chunks().to_numpy(zero_copy_only=False)
    return _Piece(
        table=table,
        ops=ops,
        unsent={name: absent[order] for name, absent in unsent.items()},
        moved_in=moved_in[order],
    )


def _completed(
    piece: _Piece,
    split: "WalSplit",
    key: Sequence[str],
    arrow: pa.Schema,
    hidden: Collection[str],
) -> pa.Table:
    """Put in the values that were left out; a change whose row is nowhere any more is dropped.

    Raises `ValuesNeeded` when the destination was not asked yet, and `SchemaRejected` for values of
    columns that are `hidden` from it.
    """
    open_changes = Completion(piece.table, key, piece.unsent, piece.moved_in)
    columns, keys = open_changes.columns(), open_changes.keys()
    lacking = sorted(set(columns).intersection(hidden))
    if lacking and keys.num_rows:
        raise SchemaRejected(
            f"changes of table {split.table} leave out values of column {lacking[0]}, which its "
            "transform reads",
            detail="Large values that an update did not touch are not sent, and the table holds "
            "only what the transform made of them.",
            hint=f"Run ALTER TABLE {split.table} REPLICA IDENTITY FULL in PostgreSQL: changes that "
            f"come then are whole. For those that are in the log already: {COPY_TABLE_ANEW}",
        )
    stored = split.stored_rows(keys, columns)
    found = open_changes.completed(stored, lambda keys: split.fetched_rows(keys, columns, arrow))
    nowhere = np.logical_or.reduce([*found.lost.values()])
    return found.table.filter(pa.array(~nowhere))


def _fetched(
    at_server: TableAtServer,
    relation: Relation,
    keys: pa.Table,
    columns: Sequence[str],
    arrow: pa.Schema,
) -> pa.Table:
    """Rows of the table as they are now, by their keys."""
    names = [*keys.column_names, *columns]
    described = {column.name: column for column in relation.columns}
    kinds = {name: described[name].iceberg() for name in names}
    chosen = ", ".join(copy_expression(n, described[n].type, kinds[n]) for n in names)
    texts = [n for n, name in enumerate(names) if not in_binary(described[name].type, kinds[name])]
    texts_of = [_texts(keys.column(name), described[name]) for name in keys.column_names]
    wanted = ", ".join(
        "(" + ", ".join(map(text_literal, row)) + ")" for row in zip(*texts_of, strict=True)
    )
    where = f"({', '.join(quoted(name) for name in keys.column_names)}) IN ({wanted})"
    schema = pa.schema([arrow.field(name) for name in names])
    with Connection(at_server.dsn) as connection:
        called = connection.one(
            "SELECT CAST(CAST(:oid AS oid) AS regclass)::text", oid=at_server.oid
        )
        # A partitioned table has its rows in others; one with children may share a key with them.
        cut = connection.one(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid::int8 = :oid "
            "AND relkind = 'p')",
            oid=at_server.oid,
        )
        query = f"SELECT {chosen} FROM {'' if cut else 'ONLY '}{called} WHERE {where}"
        pieces = [
            pa.table(
                [
                    decode(tuples, n, described[name].type, kinds[name], schema.field(n).type, name)
                    for n, name in enumerate(names)
                ],
                schema=schema,
            )
            for tuples in connection.copy(query, len(names), texts)
        ]
    return pa.concat_tables([schema.empty_table(), *pieces])


def _texts(values: pa.ChunkedArray, column: RelationColumn) -> list[str]:
    """Values of a key as PostgreSQL reads them."""
    kind = values.type
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        return [_moment(value.value, kind) for value in values]
    found = plain(pa.table({"key": values})).column("key").to_pylist()
    return [_text(value, column) for value in found]


def _text(value: Any, column: RelationColumn) -> str:
    if not isinstance(value, bytes):
        return str(value)
    return value.hex() if column.type.codec == Codec.UUID else f"\\x{value.hex()}"


def _moment(number: int, kind: pa.DataType) -> str:
    """A date or timestamp as PostgreSQL reads it, in any year, endless ones too."""
    dated = pa.types.is_date32(kind)
    limit = 2 ** (31 if dated else 63)
    if number in (limit - 1, -limit):
        return "infinity" if number > 0 else "-infinity"
    days, rest = (number, 0) if dated else divmod(number, _DAY_MICROSECONDS)
    year, month, day = calendar_day(days)
    # There is no year 0: the one before 1 is 1 BC.
    shown, era = (year, "") if year > 0 else (1 - year, " BC")
    second, fraction = divmod(rest, 1_000_000)
    clock = f" {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{fraction:06d}"
    zone = "" if dated or not kind.tz else "+00"
    return f"{shown:04d}-{month:02d}-{day:02d}{'' if dated else clock}{zone}{era}"
