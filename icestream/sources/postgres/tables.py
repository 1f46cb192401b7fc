"""The tables that a PostgreSQL server has: their columns, keys and pages, and what became of them.

Every check that fails says what to run at the server.
"""

import difflib
import fnmatch
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.types import IcebergType

from icestream.errors import ConfigInvalid
from icestream.sources.postgres.backfill import LAYOUT, Leaf
from icestream.sources.postgres.changes import RelationColumn
from icestream.sources.postgres.connection import Connection, Dsn, quoted
from icestream.sources.postgres.values.kinds import TYPES_QUERY, PgType, kinds_by_oid

log = logging.getLogger(__name__)

_PART = re.compile(r'"((?:[^"]|"")*)"|([^".]+)')
_PLAIN = re.compile(r"[^\".]+")

_TABLES = """
select n.nspname::text, c.relname::text, c.oid::int8,
       has_table_privilege(c.oid, 'SELECT')
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence = 'p'
  and n.nspname not in ('pg_catalog', 'information_schema') and n.nspname !~ '^pg_'
order by 1, 2
"""
_COLUMNS = """
select a.attname::text, a.atttypid::int8, a.atttypmod, a.attgenerated::text
from pg_catalog.pg_attribute a
where a.attrelid = :oid and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
# Columns that an index merely includes are not part of it; one that is checked late identifies no
# row while a transaction runs.
_INDEXES = """
select array(select a.attname::text from unnest(i.indkey) with ordinality as k(attnum, place)
             join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
             where k.place <= i.indnkeyatts order by k.place),
       i.indisprimary, i.indisreplident,
       not exists (select from unnest(i.indkey) with ordinality as k(attnum, place)
                   left join pg_catalog.pg_attribute a
                     on a.attrelid = i.indrelid and a.attnum = k.attnum
                   where k.place <= i.indnkeyatts and not coalesce(a.attnotnull, false)),
       c.relreplident::text
from pg_catalog.pg_class c
left join pg_catalog.pg_index i on i.indrelid = c.oid and i.indisvalid and i.indisunique
  and i.indimmediate and i.indpred is null
where c.oid = :oid
"""
_CHILDREN = """
select i.inhparent::int8, i.inhrelid::int8, n.nspname::text, c.relname::text
from pg_catalog.pg_inherits i
join pg_catalog.pg_class p on p.oid = i.inhparent
join pg_catalog.pg_class c on c.oid = i.inhrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where p.relkind = 'r' and i.inhparent::int8 = any(:oids) order by 3, 4
"""
_CALLED = """
select n.nspname::text, c.relname::text, c.oid::int8
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname::text = any(:schemas) and c.relname::text = any(:names)
"""
_LEAVES = """
select c.oid::int8, n.nspname::text, c.relname::text,
       greatest(0, pg_relation_size(c.oid) / current_setting('block_size')::int)::int8
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r' and (c.oid = :oid or c.oid in (
  select t.relid from pg_catalog.pg_partition_tree(:oid) t where t.isleaf))
order by 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PgTable:
    """A table to be copied and followed.

    `key` are the columns by which the stream identifies rows; without any, rows are only added.
    With `on_trust` no unique index says that they identify one.
    """

    name: str
    schema: str
    relation: str
    oid: int
    columns: Sequence[RelationColumn]
    key: Sequence[str]
    leaves: Sequence[Leaf]
    on_trust: bool = False
    row_filter: str | None = None

    @property
    def pages(self) -> int:
        """How many pages there are to copy."""
        return sum(leaf.pages for leaf in self.leaves)


def table_name(schema: str, relation: str) -> str:
    """`schema.table`, with quotes where a part would otherwise be misread."""
    parts = (part if _PLAIN.fullmatch(part) else quoted(part) for part in (schema, relation))
    return ".".join(parts)


def name_parts(text: str) -> list[str]:
    """The parts of a name or pattern as it is written in the configuration."""
    return [
        inner.replace('""', '"') if inner or not plain else plain
        for inner, plain in _PART.findall(text)
    ]


class ServerTables:
    """The tables of the server behind a DSN, asked over one connection at a time.

    Thread: any. `types` is replaced as a whole.
    """

    def __init__(self, dsn: Dsn):
        self._dsn = dsn
        self.types: Mapping[int, PgType] = {}

    def find(
        self,
        patterns: Sequence[str],
        identifiers: Callable[[str], Sequence[str]],
        declared: Mapping[str, Mapping[str, IcebergType]],
    ) -> list[PgTable]:
        """The tables that the configuration names, each pattern in its turn."""
        with Connection(self._dsn) as connection:
            self.types = kinds_by_oid(connection.rows(TYPES_QUERY))
            listed = connection.rows(_TABLES)
            chosen: dict[str, list[object]] = {}
            for pattern in patterns:
                found = [row for row in listed if _matches(pattern, str(row[0]), str(row[1]))]
                if not found:
                    raise _no_table(pattern, listed, str(self._dsn))
                chosen.update({table_name(str(r[0]), str(r[1])): r for r in found})
            return [
                self._table(connection, row, identifiers(name), declared.get(name, {}))
                for name, row in chosen.items()
            ]

    def strays(self, tables: Sequence[PgTable], alone: Collection[str]) -> ConfigInvalid | None:
        """The error for a table with inheritance children that nobody follows, None without any.

        A child's rows show in the parent's, but their changes come under the child's name.
        """
        by_oid = {table.oid: table for table in tables if table.name not in alone}
        if not by_oid:
            return None
        with Connection(self._dsn) as connection:
            rows = connection.rows(_CHILDREN, oids=list(by_oid))
        followed = {table.oid for table in tables}
        strays = [row for row in rows if int(row[1]) not in followed]
        if not strays:
            return None
        parent = by_oid[int(strays[0][0])].name
        children = [table_name(str(r[2]), str(r[3])) for r in strays if r[0] == strays[0][0]]
        shown = ", ".join(children[:10]) + (" ..." if len(children) > 10 else "")
        return ConfigInvalid(
            f"table {parent} has inheritance children that are not followed",
            detail=f"Their rows would be missing without a word: {shown}.",
            hint="Name them in `tables` too: each goes into a table of its own. If the parent's "
            f"own rows are enough, name it in `parents_alone: [{parent}]`.",
        )

    def _table(
        self,
        connection: Connection,
        row: Sequence[object],
        identifiers: Sequence[str],
        declared: Mapping[str, IcebergType],
    ) -> PgTable:
        schema, relation, oid = str(row[0]), str(row[1]), int(str(row[2]))
        name = table_name(schema, relation)
        if not row[3]:
            raise ConfigInvalid(
                f"table {name} may not be read",
                hint=f"Run `GRANT SELECT ON {quoted(schema, relation)} TO ...` for the DSN's role.",
            )
        columns = [
            RelationColumn(
                name=str(column),
                type=self.types[int(kind)],
                typmod=int(typmod),
                declared=declared.get(str(column)),
            )
            for column, kind, typmod, generated in connection.rows(_COLUMNS, oid=oid)
            if not generated
        ]
        leaves = [
            Leaf(oid=int(leaf), schema=str(space), name=str(part), pages=int(pages))
            for leaf, space, part, pages in connection.rows(_LEAVES, oid=oid)
        ]
        oids = [oid, *(leaf.oid for leaf in leaves)]
        key, on_trust = _key(connection, name, oids, list(identifiers))
        return PgTable(
            name=name,
            schema=schema,
            relation=relation,
            oid=oid,
            columns=columns,
            key=key,
            leaves=leaves,
            on_trust=on_trust,
        )

    def unidentified(self, table: PgTable, sent: Collection[str] | None) -> str:
        """Why a table's key does not identify a row of it any more; empty when it does.

        `sent` are the columns by which changes name their rows, None for all of them. They are
        what identified a row when the change was made. The catalog tells of now: it is asked
        where they do not tell, because whole rows are sent or a smaller key was chosen.
        """
        key = ", ".join(table.key)
        if sent is not None and set(sent) <= set(table.key):
            return ""
        with Connection(self._dsn) as connection:
            now = _identity(connection, table.oid)
        if sent is not None and set(sent) != set(now.key):
            return (
                f"A row was told apart by {', '.join(sent)}, and is deleted in the lake by {key}."
            )
        if any(set(columns) <= set(table.key) for columns in now.unique):
            return ""
        if now.unique:
            return (
                f"A row is told apart by {', '.join(now.unique[0])} now, and is deleted in the "
                f"lake by {key}: a change of one row would delete others."
            )
        if table.on_trust or not now.there:
            return ""
        return f"No unique index says any more that a row is the only one with its {key}."

    def kinds_with(self, kinds: Collection[int]) -> Mapping[int, PgType]:
        """The server's types; they are asked for again when these are not all among them."""
        if any(kind not in self.types for kind in kinds):
            with Connection(self._dsn) as connection:
                self.types = kinds_by_oid(connection.rows(TYPES_QUERY))
        return self.types

    def column_names(self, oid: int) -> list[str]:
        """The columns that a table has now, in their order."""
        with Connection(self._dsn) as connection:
            return [str(row[0]) for row in connection.rows(_COLUMNS, oid=oid)]

    def supplanted(self, tables: Sequence[PgTable]) -> str | None:
        """A table whose name another table bears now, None without any."""
        wanted = {(table.schema, table.relation): table for table in tables}
        if not wanted:
            return None
        with Connection(self._dsn) as connection:
            schemas, names = (sorted({each[n] for each in wanted}) for n in range(2))
            rows = connection.rows(_CALLED, schemas=schemas, names=names)
        found = {(str(schema), str(name)): int(oid) for schema, name, oid in rows}
        return next((t.name for at, t in wanted.items() if found.get(at, t.oid) != t.oid), None)

    def layout(self, oids: Sequence[int]) -> list[list[object]]:
        """How tables are laid out now: see `LAYOUT`."""
        with Connection(self._dsn) as connection:
            return connection.rows(LAYOUT, oids=list(oids))


def _matches(pattern: str, schema: str, relation: str) -> bool:
    if pattern == table_name(schema, relation):
        return True
    parts = name_parts(pattern)
    if len(parts) == 1:
        parts = ["public", *parts]
    if len(parts) != 2:
        raise ConfigInvalid(
            f"{pattern!r} does not name a table", hint="Write schema.table, or a pattern schema.*."
        )
    return fnmatch.fnmatchcase(schema, parts[0]) and fnmatch.fnmatchcase(relation, parts[1])


def _no_table(pattern: str, listed: Sequence[Sequence[object]], server: str) -> ConfigInvalid:
    names = [table_name(str(row[0]), str(row[1])) for row in listed]
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
    return ConfigInvalid(
        f"PostgreSQL at {server} has no table {pattern}",
        hint=f"Did you mean `{near[0]}`?" if near else "Check `tables`, the database and the role.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """How changes of a table, or of a partition of it, name their row.

    `sent` are the columns of a row that goes; None for all of them. `unique` are sets of columns
    which identify a row. A table that is gone has none.
    """

    there: bool
    sent: Sequence[str] | None
    key: Sequence[str]
    unique: Sequence[Sequence[str]]

    def sends(self, columns: Sequence[str]) -> bool:
        return self.sent is None or set(columns) <= set(self.sent)


def _identity(connection: Connection, oid: int) -> _Identity:
    rows = connection.rows(_INDEXES, oid=oid)
    identity = str(rows[0][4]) if rows else "n"
    chosen = 2 if identity == "i" else 1
    key = next(([str(name) for name in row[0]] for row in rows if row[chosen]), [])
    if identity == "n":
        key = []
    return _Identity(
        there=bool(rows),
        sent=None if identity == "f" else key,
        key=key,
        unique=[[str(name) for name in row[0]] for row in rows if row[0] and row[3]],
    )


def _key(
    connection: Connection, name: str, oids: Sequence[int], given: list[str]
) -> tuple[list[str], bool]:
    """The columns by which changes identify rows, and whether that is taken on trust.

    Every delete must send them, also that of a partition, whose replica identity is its own, and
    they must identify one row.
    """
    identities = [_identity(connection, oid) for oid in dict.fromkeys(oids)]
    root = identities[0]
    key = given or list(root.key)
    if not all(each.sends(key) for each in identities):
        raise ConfigInvalid(
            f"rows of table {name} cannot be identified by {', '.join(key)}",
            detail="Its replica identity, or that of a partition, does not send these columns of "
            "a row that goes.",
            hint=f"Run `ALTER TABLE {name} REPLICA IDENTITY FULL`, for partitions too, or leave "
            "`identifier_columns` and `equality_delete_by` out for it.",
        )
    if not given or any(set(columns) <= set(given) for columns in root.unique):
        return key, False
    if root.unique:
        raise ConfigInvalid(
            f"rows of table {name} cannot be identified by {', '.join(given)}",
            detail="No unique index says that a row is the only one with its values there, and a "
            "change of one row would delete others.",
            hint=f"Name the columns of its key, {', '.join(root.unique[0])}, or have a unique "
            "index over columns that are not null.",
        )
    log.warning(
        "table %s has no unique index: that %s identify a row is taken on trust",
        name,
        ", ".join(given),
    )
    return key, True
