"""What a PostgreSQL server has and allows: tables, publications, the slot, and what is missing.

Every check that fails says what to run at the server. Publications are made and kept in step with
the configuration unless the configuration names one of its own, which is then left alone.
"""

import contextlib
import difflib
import fnmatch
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pyiceberg.types import IcebergType

from icestream.errors import (
    ConfigInvalid,
    HistoryLost,
    IcestreamError,
    NeedsOperator,
    SourceUnavailable,
)
from icestream.sources.postgres.backfill import LAYOUT, Leaf
from icestream.sources.postgres.changes import RelationColumn
from icestream.sources.postgres.connection import (
    Connection,
    Dsn,
    lsn_text,
    parse_lsn,
    quoted,
    text_literal,
)
from icestream.sources.postgres.decode import TYPES_QUERY, PgType, kinds_by_oid
from icestream.sources.postgres.publications import (
    Coverage,
    coverage,
    next_transaction,
    running,
)
from icestream.sources.postgres.wal import COPY_ANEW

log = logging.getLogger(__name__)

VERSION_MIN = 150_000
# A slot's creation waits for transactions that write; who they are is told this often.
_SLOT_LOOK_SECONDS = 5.0
SLOT_SECONDS_MAX = 600.0
# Below this share of the log that a slot may hold, someone should look.
_SAFE_SHARE_MIN = 0.25
# The longest name that another one is made from, by adding `_inserts`; PostgreSQL takes 63 bytes.
_NAME_BYTES_MAX = 55
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
_BLOCKS = """
select exists (
  select from pg_catalog.pg_locks
  where not granted and waitstart < clock_timestamp() - make_interval(secs => :seconds)
    and :blocker = any(pg_blocking_pids(pid)))
"""
# A role that may not see the state sees null.
_STANDBYS = """
select count(*) from pg_catalog.pg_stat_replication where sync_state is distinct from 'async'
"""
_ALL_OPERATIONS = ("insert", "update", "delete", "truncate")
_OPERATIONS = """
select pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
from pg_catalog.pg_publication where pubname = :name
"""
_PUBLISHED = """
select p.schemaname::text, p.tablename::text, p.attnames::text[], p.rowfilter::text
from pg_catalog.pg_publication_tables p where p.pubname = :name
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The replication slot as the server describes it.

    `log_end` is where the server's log ends now; it speaks to a reader at least every
    `sender_seconds`, 0 when it does not say.
    """

    name: str
    confirmed: int
    log_end: int
    sender_seconds: float
    active: bool
    wal_status: str
    plugin: str
    lag_bytes: int
    safe_bytes: int | None

    @property
    def danger(self) -> str:
        """Why the server may soon give the slot up; empty when it is safe."""
        if self.wal_status in ("unreserved", "lost"):
            return f"the server keeps no more log for it (wal_status {self.wal_status})"
        safe = self.safe_bytes
        if safe is not None and safe < _SAFE_SHARE_MIN * (safe + self.lag_bytes):
            return "it lags by most of what the server keeps for it (max_slot_wal_keep_size)"
        return ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What a pipeline's slot and publication are called.

    A name that cannot be taken as it is gets a hash of the whole, so that two pipelines never share
    one. Earlier versions only replaced letters and cut it.
    """

    slot: str
    publication: str
    former_slot: str
    former_publication: str

    @staticmethod
    def of(pipeline: str) -> "_Names":
        whole = f"icestream_{pipeline}"
        plain = re.sub("[^a-z0-9_]", "_", whole.lower())
        hashed = hashlib.sha256(pipeline.encode()).hexdigest()[:8]
        fits = len(whole.encode()) <= _NAME_BYTES_MAX
        short = f"{plain[: _NAME_BYTES_MAX - len(hashed) - 1]}_{hashed}"
        return _Names(
            slot=whole if fits and plain == whole else short,
            publication=whole if fits else short,
            former_slot=plain[:63],
            former_publication=whole[:_NAME_BYTES_MAX],
        )


class Server:
    """The server behind a DSN, asked over one connection at a time."""

    def __init__(self, dsn: Dsn, pipeline: str, slot: str, publication: str):
        self.dsn = dsn
        self._given = publication
        self._names = _Names.of(pipeline)
        self.slot_name = slot or self._names.slot
        self._slot_given = bool(slot)
        # Who names the slot of an earlier version says that its publications are the pipeline's.
        former = slot == self._names.former_slot
        self._own = self._names.former_publication if former else self._names.publication
        self.types: Mapping[int, PgType] = {}

    @property
    def publications(self) -> list[str]:
        """The publications that the stream asks for."""
        return [self._given] if self._given else [self._own, f"{self._own}_inserts"]

    def identity(self) -> str:
        """What tells this cluster from every other one."""
        with Connection(self.dsn, replication=True) as connection:
            return str(connection.rows("IDENTIFY_SYSTEM")[0][0])

    def check(self) -> None:
        """Refuse a server that cannot serve changes, with what to do about it."""
        with Connection(self.dsn) as connection:
            version = int(connection.one("SHOW server_version_num"))
            if version < VERSION_MIN:
                raise ConfigInvalid(
                    f"PostgreSQL at {self.dsn} is too old",
                    detail=f"Its version is {connection.one('SHOW server_version')}.",
                    hint="Use PostgreSQL 15 or newer.",
                )
            level = connection.one("SHOW wal_level")
            if level != "logical":
                raise ConfigInvalid(
                    f"PostgreSQL at {self.dsn} does not write logical changes",
                    detail=f"Its wal_level is {level}.",
                    hint="Run `ALTER SYSTEM SET wal_level = logical` and restart the server.",
                )
            allowed = connection.one(
                "SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user"
            )
            # Hosted servers give the privilege through roles of their own.
            member = connection.one(
                "SELECT count(*) FROM pg_roles WHERE pg_has_role(current_user, oid, 'member') "
                "AND rolname IN ('rds_replication', 'cloudsqlsuperuser', 'azure_pg_admin')"
            )
            if not allowed and not member:
                role = connection.one("SELECT current_user::text")
                raise ConfigInvalid(
                    f"role {role} may not follow changes",
                    hint=f"Run `ALTER ROLE {quoted(str(role))} REPLICATION` as a superuser.",
                )
            self._refuse_former_slot(connection)
            awaited = connection.one("SHOW synchronous_standby_names")
            if awaited and not connection.one(_STANDBYS):
                log.warning(
                    "commits at PostgreSQL wait for a standby (synchronous_standby_names is %s), "
                    "and none is there; icestream does not count as one",
                    awaited,
                )

    def _refuse_former_slot(self, connection: Connection) -> None:
        """Leave no slot behind that this pipeline may have made under another name."""
        former = self._names.former_slot
        sql = "SELECT slot_name::text FROM pg_replication_slots WHERE slot_name IN (:name, :former)"
        found = [row[0] for row in connection.rows(sql, name=self.slot_name, former=former)]
        if self._slot_given or self.slot_name in found or former not in found:
            return
        raise ConfigInvalid(
            f"slot {former} may be this pipeline's",
            detail="Earlier versions called the pipeline's slot so, and pipelines with similar "
            f"names shared it. Now it is called {self.slot_name}.",
            hint=f"If the pipeline used it, write `slot: {former}` and all goes on. If it belongs "
            f"to another pipeline, write `slot: {self.slot_name}`.",
        )

    def tables(
        self,
        patterns: Sequence[str],
        identifiers: Callable[[str], Sequence[str]],
        declared: Mapping[str, Mapping[str, IcebergType]],
    ) -> list[PgTable]:
        """The tables that the configuration names, each pattern in its turn."""
        with Connection(self.dsn) as connection:
            self.types = kinds_by_oid(connection.rows(TYPES_QUERY))
            listed = connection.rows(_TABLES)
            chosen: dict[str, list[object]] = {}
            for pattern in patterns:
                found = [row for row in listed if _matches(pattern, str(row[0]), str(row[1]))]
                if not found:
                    raise _no_table(pattern, listed, str(self.dsn))
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
        with Connection(self.dsn) as connection:
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
        with Connection(self.dsn) as connection:
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

    def column_names(self, oid: int) -> list[str]:
        """The columns that a table has now, in their order."""
        with Connection(self.dsn) as connection:
            return [str(row[0]) for row in connection.rows(_COLUMNS, oid=oid)]

    def supplanted(self, tables: Sequence[PgTable]) -> str | None:
        """A table whose name another table bears now, None without any."""
        wanted = {(table.schema, table.relation): table for table in tables}
        if not wanted:
            return None
        with Connection(self.dsn) as connection:
            schemas, names = (sorted({each[n] for each in wanted}) for n in range(2))
            rows = connection.rows(_CALLED, schemas=schemas, names=names)
        found = {(str(schema), str(name)): int(oid) for schema, name, oid in rows}
        return next((t.name for at, t in wanted.items() if found.get(at, t.oid) != t.oid), None)

    def publication_of(self, table: PgTable) -> str:
        """The publication that has to publish a table."""
        return self.publications[-1] if not table.key else self.publications[0]

    def coverage(self, tables: Sequence[PgTable]) -> dict[str, Coverage]:
        """What publishes each of these tables, by name; tables that are gone are left out."""
        found: dict[str, Coverage] = {}
        with Connection(self.dsn) as connection:
            for name in self.publications:
                chosen = {t.name: t.oid for t in tables if self.publication_of(t) == name}
                found.update(coverage(connection, name, chosen) if chosen else {})
        return found

    def unkeyed(self, before: Mapping[str, Coverage], tables: Sequence[PgTable]) -> Sequence[str]:
        """Tables that our own publication covers as ones with a key, and that have none now."""
        found = {t.name: t.oid for t in tables if self.publication_of(t) != self.publications[0]}
        if not found:
            return ()
        with Connection(self.dsn) as connection:
            now = coverage(connection, self.publications[0], found)
        return sorted(name for name, each in now.items() if each and each == before[name])

    def next_transaction(self) -> int:
        """Every transaction that writes and began before now has a lower number."""
        with Connection(self.dsn) as connection:
            return next_transaction(connection)

    def running(self, before: int) -> Sequence[int] | None:
        """Processes with transactions before this one that have not ended; None without any."""
        with Connection(self.dsn) as connection:
            return running(connection, before)

    def publish(self, tables: Sequence[PgTable]) -> None:
        """Make the publications cover exactly these tables.

        A table whose rows cannot be identified is published for inserts alone: PostgreSQL would
        refuse updates of it at the source.
        """
        with Connection(self.dsn) as connection:
            if self._given:
                self._check_given(connection, tables)
                return
            keyed = [table for table in tables if table.key]
            keyless = [table for table in tables if not table.key]
            main, inserts = self.publications
            self._cover(connection, main, keyed, ("insert", "update", "delete", "truncate"))
            self._cover(connection, inserts, keyless, ("insert", "truncate"))

    def _cover(
        self,
        connection: Connection,
        name: str,
        tables: Sequence[PgTable],
        operations: Sequence[str],
    ) -> None:
        wanted = {(table.schema, table.relation) for table in tables}
        exists = connection.rows(_OPERATIONS, name=name)
        found = {(str(r[0]), str(r[1])) for r in connection.rows(_PUBLISHED, name=name)}
        published = text_literal(", ".join(operations))
        options = f"(publish = {published}, publish_via_partition_root = true)"
        commands = []
        if not exists:
            targets = ", ".join(quoted(*table) for table in sorted(wanted))
            commands = [
                f"CREATE PUBLICATION {quoted(name)}{' FOR TABLE ' + targets if wanted else ''} "
                f"WITH {options}"
            ]
        elif exists[0] != [*(each in operations for each in _ALL_OPERATIONS), True]:
            commands.append(f"ALTER PUBLICATION {quoted(name)} SET {options}")
        for verb, names in (("ADD", wanted - found), ("DROP", found - wanted)):
            if exists and names:
                targets = ", ".join(quoted(*table) for table in sorted(names))
                commands.append(f"ALTER PUBLICATION {quoted(name)} {verb} TABLE {targets}")
        if not commands:
            return
        connection.rows("SET synchronous_commit = 'local'")
        connection.rows("BEGIN")
        try:
            for command in commands:
                connection.rows(command)
            connection.rows("COMMIT")
        except NeedsOperator as error:
            raise ConfigInvalid(
                f"could not make publication {name}",
                detail=error.detail,
                hint="Let an owner of the tables run: " + "; ".join(commands) + ".",
            ) from error

    def verify_publication(self, tables: Sequence[PgTable]) -> None:
        """Refuse a publication of the user's own that does not cover the tables."""
        if self._given:
            with Connection(self.dsn) as connection:
                self._check_given(connection, tables)

    def _check_given(self, connection: Connection, tables: Sequence[PgTable]) -> None:
        name = self._given
        rows = connection.rows(
            "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot "
            "FROM pg_publication WHERE pubname = :name",
            name=name,
        )
        if not rows:
            targets = ", ".join(quoted(table.schema, table.relation) for table in tables)
            raise ConfigInvalid(
                f"there is no publication {name}",
                hint=f"Run `CREATE PUBLICATION {quoted(name)} FOR TABLE {targets} "
                "WITH (publish_via_partition_root = true)`.",
            )
        everything, via_root = rows[0]
        if not everything and any(table.key for table in tables):
            raise ConfigInvalid(
                f"publication {name} does not publish all changes",
                detail="What it leaves out would be missing in the lake.",
                hint=f"Run `ALTER PUBLICATION {quoted(name)} SET "
                "(publish = 'insert, update, delete, truncate')`.",
            )
        if not via_root and any(leaf.oid != t.oid for t in tables for leaf in t.leaves):
            raise ConfigInvalid(
                f"publication {name} publishes partitions under their own names",
                hint=f"Run `ALTER PUBLICATION {quoted(name)} SET "
                "(publish_via_partition_root = true)`.",
            )
        found = {(str(r[0]), str(r[1])) for r in connection.rows(_PUBLISHED, name=name)}
        for table in tables:
            if (table.schema, table.relation) not in found:
                raise ConfigInvalid(
                    f"publication {name} lacks table {table.name}",
                    hint=f"Run `ALTER PUBLICATION {quoted(name)} ADD TABLE "
                    f"{quoted(table.schema, table.relation)}`.",
                )

    def published(self, tables: Sequence[PgTable]) -> list[PgTable]:
        """The tables with the columns and rows that their publication lets through."""
        with Connection(self.dsn) as connection:
            found = {
                (str(row[0]), str(row[1])): (row[2], row[3])
                for name in self.publications
                for row in connection.rows(_PUBLISHED, name=name)
            }
        result = []
        for table in tables:
            names, row_filter = found.get((table.schema, table.relation), (None, None))
            kept = [c for c in table.columns if names is None or c.name in names]
            result.append(
                replace(table, columns=kept, row_filter=str(row_filter) if row_filter else None)
            )
        return result

    def slot(self) -> Slot | None:
        """The pipeline's slot, or None when there is none."""
        with Connection(self.dsn) as connection:
            rows = connection.rows(
                "SELECT confirmed_flush_lsn::text, active, coalesce(wal_status, 'reserved')::text, "
                "plugin::text, coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), "
                "confirmed_flush_lsn), 0)::bigint, safe_wal_size, database = current_database(), "
                "pg_current_wal_insert_lsn()::text, (SELECT setting::int8 FROM pg_settings "
                "WHERE name = 'wal_sender_timeout') "
                "FROM pg_replication_slots WHERE slot_name = :name",
                name=self.slot_name,
            )
        if not rows:
            return None
        confirmed, active, status, plugin, lag, safe, here, end, sender = rows[0]
        if plugin != "pgoutput" or not here:
            raise ConfigInvalid(
                f"slot {self.slot_name} is not one that this pipeline can use",
                detail=f"Its plugin is {plugin}, and it belongs to "
                f"{'this' if here else 'another'} database.",
                hint="Name another slot with `slot`.",
            )
        return Slot(
            name=self.slot_name,
            confirmed=parse_lsn(str(confirmed)) if confirmed else 0,
            log_end=parse_lsn(str(end)),
            sender_seconds=int(sender or 0) / 1000,
            active=bool(active),
            wal_status=str(status),
            plugin=str(plugin),
            lag_bytes=int(lag),
            safe_bytes=None if safe is None else int(safe),
        )

    def create_slot(self, stopping: threading.Event) -> tuple[Connection, int, str]:
        """Create the slot; the snapshot it exports lives as long as the connection is not used.

        This waits for transactions that write at the moment, whatever they wait for, so the caller
        must hold no lock.
        """
        connection = Connection(self.dsn, replication=True)
        pid = 0
        try:
            pid = int(connection.one("SELECT pg_backend_pid()"))
            wait = _SlotWait(self, pid, stopping)
            command = f"CREATE_REPLICATION_SLOT {quoted(self.slot_name)} LOGICAL pgoutput"
            rows = connection.answer(f"{command} (SNAPSHOT 'export')", wait.look)
            return connection, parse_lsn(rows[0][1]), rows[0][2]
        except BaseException:
            # A session that waits does not notice that its client is gone.
            with contextlib.suppress(IcestreamError), Connection(self.dsn) as other:
                if pid:
                    other.rows("SELECT pg_terminate_backend(:pid)", pid=pid)
            connection.close()
            raise

    def drop_slot(self) -> None:
        """Drop the slot: nothing was read from it."""
        with Connection(self.dsn) as connection:
            connection.rows(f"SELECT pg_drop_replication_slot({text_literal(self.slot_name)})")

    def layout(self, oids: Sequence[int]) -> list[list[object]]:
        """How tables are laid out now: see `LAYOUT`."""
        with Connection(self.dsn) as connection:
            return connection.rows(LAYOUT, oids=list(oids))

    def blockers(self, pid: int) -> list[int]:
        """The processes that a process waits for."""
        with Connection(self.dsn) as connection:
            return [int(each) for each in connection.one("SELECT pg_blocking_pids(:p)", p=pid)]

    def blocks(self, pid: int, seconds: float) -> bool:
        """Whether someone has waited for so long for a lock that a process holds."""
        with Connection(self.dsn) as connection:
            return bool(connection.one(_BLOCKS, blocker=pid, seconds=seconds))

    def require_history(self, slot: Slot | None, durable: int, needed: int) -> None:
        """Refuse to go on when the server no longer has what follows a position.

        `needed` is the place from which on the server must send: that of the position's witness,
        or the position itself.
        """
        lost = None
        if slot is None:
            lost = "The slot does not exist: it was dropped, or the server is a restored copy."
        elif slot.wal_status == "lost":
            lost = "The server has removed log files that the slot needed (max_slot_wal_keep_size)."
        elif slot.log_end < durable:
            lost = (
                f"The server's log ends at {lsn_text(slot.log_end)}: it was restored from an older "
                "copy, or promoted before it had everything. The lake may hold rows that the "
                "server never had."
            )
        elif slot.confirmed > needed:
            lost = (
                f"It stands at {lsn_text(slot.confirmed)}, past {lsn_text(needed)} where the lake "
                "needs it: the lake was rolled back or restored after it had told that these "
                "changes are durable, or someone else moved the slot on."
            )
        if lost:
            raise HistoryLost(
                f"PostgreSQL no longer has the changes that follow {lsn_text(durable)}",
                detail=f"Slot {self.slot_name}. {lost}",
                hint=COPY_ANEW,
            )

    def mark(self) -> int:
        """Write a mark into the log and return its position: all that was committed is before."""
        with Connection(self.dsn) as connection:
            connection.rows("SET synchronous_commit = 'local'")
            text = connection.one("SELECT pg_logical_emit_message(true, 'icestream', '')::text")
            return parse_lsn(str(text))


class _SlotWait:
    """Watches a slot's creation: who holds it up is told, and it ends in time."""

    def __init__(self, server: Server, pid: int, stopping: threading.Event):
        self._server = server
        self._pid = pid
        self._stopping = stopping
        self._began = self._looked = time.monotonic()

    def look(self) -> None:
        """Raise when it is time to give up."""
        now = time.monotonic()
        name = self._server.slot_name
        if self._stopping.is_set():
            raise SourceUnavailable(f"the run was stopped before slot {name} was created")
        if now - self._looked < _SLOT_LOOK_SECONDS:
            return
        self._looked = now
        pids = ", ".join(map(str, self._server.blockers(self._pid))) or "unknown"
        if now - self._began > SLOT_SECONDS_MAX:
            raise SourceUnavailable(
                f"slot {name} could not be created in {SLOT_SECONDS_MAX:.0f} s",
                detail=f"It waits for the transactions of server processes {pids} to end.",
                hint="End them with pg_terminate_backend, or wait: it is tried again.",
            )
        log.warning("slot %s waits for the transactions of server processes %s", name, pids)


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
