"""Whether a publication has let through all changes of a table, for as long as we follow it.

PostgreSQL decides by its catalog as it was at the time of a change whether the change is sent.
What a publication left out then never comes, whatever the publication says now. Two things follow:

* The frontier remembers the catalog rows that publish a table (`Coverage`). A row that is another
  one now was removed or altered in between, and changes may be missing.
* A table is copied only when every transaction has ended that was running when the table was
  first seen in the publication. Such a transaction may have written to the table before it was
  published, and may commit after the copy's snapshot: its rows would come by neither way.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from icestream.errors import ConfigInvalid, HistoryLost, NeedsOperator, SourceUnavailable
from icestream.frontier import Position
from icestream.sources.postgres.connection import Connection, Dsn, quoted, text_literal
from icestream.sources.postgres.tables import PgTable

Coverage = Position
"""What publishes a table: the publication's oid, its row's version, the oids of the rows that name
the table and the table's schema. Empty when nothing does."""

# ALTER PUBLICATION gives its row another version (xmin). Another row filter or column list gives
# the table's row another oid, and so does a table that is taken out and put back.
_COVERAGE = """
select c.oid::int8, p.oid::int8, p.xmin::text::int8, coalesce(r.oid, 0)::int8,
       coalesce(n.oid, 0)::int8, p.puballtables or r.oid is not null or n.oid is not null
from pg_catalog.pg_class c
left join pg_catalog.pg_publication p on p.pubname = :name
left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid
left join pg_catalog.pg_publication_namespace n on n.pnpubid = p.oid and n.pnnspid = c.relnamespace
where c.oid::int8 = any(:oids)
"""
# Sessions of other databases cannot have written to the table.
_RUNNING = """
select x.id::text, l.pid
from (select pg_snapshot_xip(pg_current_snapshot()) as id) x
left join pg_catalog.pg_locks l on l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'
  and l.granted and l.transactionid = x.id::xid
left join pg_catalog.pg_stat_activity a on a.pid = l.pid
left join pg_catalog.pg_prepared_xacts p on p.transaction = x.id::xid
where x.id::text::int8 < :before
  and coalesce(a.datname = current_database(), p.database = current_database(), true)
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


class Publications:
    """The publications that a pipeline's stream asks for.

    With `given` it is one of the user's own, which is left alone. Else there are two of the
    pipeline's own, `own` and another one for tables without a key: they are made, and kept in step
    with the configuration. Thread: any.
    """

    def __init__(self, dsn: Dsn, given: str, own: str):
        self._dsn = dsn
        self._given = given
        self.names = [given] if given else [own, f"{own}_inserts"]

    def of(self, table: PgTable) -> str:
        """The publication that has to publish a table."""
        return self.names[-1] if not table.key else self.names[0]

    @property
    def names_hash(self) -> int:
        """What tells these publications from others."""
        return zlib.crc32("\0".join(self.names).encode())

    def coverage(self, tables: Sequence[PgTable]) -> dict[str, Coverage]:
        """What publishes each of these tables, by name; tables that are gone are left out."""
        found: dict[str, Coverage] = {}
        with Connection(self._dsn) as connection:
            for name in self.names:
                chosen = {t.name: t.oid for t in tables if self.of(t) == name}
                found.update(coverage(connection, name, chosen) if chosen else {})
        return found

    def unkeyed(self, before: Mapping[str, Coverage], tables: Sequence[PgTable]) -> Sequence[str]:
        """Tables that our own publication covers as ones with a key, and that have none now."""
        found = {t.name: t.oid for t in tables if self.of(t) != self.names[0]}
        if not found:
            return ()
        with Connection(self._dsn) as connection:
            now = coverage(connection, self.names[0], found)
        return sorted(name for name, each in now.items() if each and each == before[name])

    def next_transaction(self) -> int:
        """Every transaction that writes and began before now has a lower number."""
        with Connection(self._dsn) as connection:
            return next_transaction(connection)

    def running(self, before: int) -> Sequence[int] | None:
        """Processes with transactions before this one that have not ended; None without any."""
        with Connection(self._dsn) as connection:
            return running(connection, before)

    def publish(self, tables: Sequence[PgTable]) -> None:
        """Make the publications cover exactly these tables.

        A table whose rows cannot be identified is published for inserts alone: PostgreSQL would
        refuse updates of it at the source.
        """
        with Connection(self._dsn) as connection:
            if self._given:
                self._check_given(connection, tables)
                return
            with_key = [table for table in tables if table.key]
            keyless = [table for table in tables if not table.key]
            main, inserts = self.names
            self._cover(connection, main, with_key, _ALL_OPERATIONS)
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

    def verify(self, tables: Sequence[PgTable]) -> None:
        """Refuse a publication of the user's own that does not cover the tables."""
        if self._given:
            with Connection(self._dsn) as connection:
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
        with Connection(self._dsn) as connection:
            found = {
                (str(row[0]), str(row[1])): (row[2], row[3])
                for name in self.names
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


def coverage(
    connection: Connection, publication: str, tables: Mapping[str, int]
) -> dict[str, Coverage]:
    """What publishes each of these tables, given by oid; a table that is gone is left out."""
    by_oid = {oid: name for name, oid in tables.items()}
    rows = connection.rows(_COVERAGE, name=publication, oids=list(by_oid))
    return {
        by_oid[int(row[0])]: tuple(int(each) for each in row[1:5]) if row[5] else () for row in rows
    }


def next_transaction(connection: Connection) -> int:
    """Every transaction that writes and began before now has a lower number."""
    sql = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    return int(connection.one(sql))


def running(connection: Connection, before: int) -> Sequence[int] | None:
    """The processes whose transactions have lower numbers and have not ended, None without any.

    A prepared transaction has no process.
    """
    rows = connection.rows(_RUNNING, before=before)
    return sorted({int(pid) for _, pid in rows if pid is not None}) if rows else None


def left_out(
    publication: str, tables: Mapping[str, tuple[Coverage, Coverage]]
) -> HistoryLost | None:
    """The error for tables whose coverage, before and now, is not the same; None without any."""
    found = {name: each for name, each in tables.items() if each[0] != each[1]}
    if not found:
        return None
    names = ", ".join(sorted(found))
    before, now = next(iter(found.values()))
    if not now:
        what = "It is not there, or lacks the table."
    elif before[:1] != now[:1]:
        what = "It was dropped and created anew, or another one took its place."
    elif before[1] != now[1]:
        what = "It was altered while the table was followed."
    else:
        what = "The table was taken out of it and put back, or its row filter or columns changed."
    return HistoryLost(
        f"publication {publication} may have left out changes of {names}",
        detail=f"{what} PostgreSQL does not send again what was not published at its time.",
        hint="See that the publication is as it shall be, drop the Iceberg tables of these "
        "tables, and start again: they are copied anew.",
    )


def waiting(table: str, pids: Sequence[int]) -> SourceUnavailable:
    """What is said while a table cannot be copied yet."""
    processes = ", ".join(map(str, pids)) or "none: a prepared transaction"
    return SourceUnavailable(
        f"waiting for transactions to end before table {table} can be copied",
        detail="They began before the table was seen in the publication, and what they wrote to it "
        f"may not be published. Processes: {processes}.",
        hint="Look for them in `pg_stat_activity`; the other tables go on.",
    )
