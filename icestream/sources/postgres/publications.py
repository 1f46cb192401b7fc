"""Whether a publication has let through all changes of a table, for as long as we follow it.

PostgreSQL decides by its catalog as it was at the time of a change whether the change is sent.
What a publication left out then never comes, whatever the publication says now. Two things follow:

* The frontier remembers the catalog rows that publish a table (`Coverage`). A row that is another
  one now was removed or altered in between, and changes may be missing.
* A table is copied only when every transaction has ended that was running when the table was
  first seen in the publication. Such a transaction may have written to the table before it was
  published, and may commit after the copy's snapshot: its rows would come by neither way.
"""

from collections.abc import Mapping, Sequence

from icestream.errors import HistoryLost, SourceUnavailable
from icestream.frontier import Position
from icestream.sources.postgres.connection import Connection

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
