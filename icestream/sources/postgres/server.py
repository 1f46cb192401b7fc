"""The server that a pipeline reads from: whether it can serve changes, and what belongs to whom.

What it has of tables, publications and slots is in rooms of their own: `tables`, `publications`,
`slot`. Every check that fails says what to run at the server.
"""

import hashlib
import logging
import re
from dataclasses import dataclass

from icestream.errors import ConfigInvalid
from icestream.sources.postgres.connection import Connection, Dsn, parse_lsn, quoted
from icestream.sources.postgres.publications import Publications
from icestream.sources.postgres.slot import ReplicationSlot
from icestream.sources.postgres.tables import ServerTables

log = logging.getLogger(__name__)

VERSION_MIN = 150_000
# The longest name that another one is made from, by adding `_inserts`; PostgreSQL takes 63 bytes.
_NAME_BYTES_MAX = 55
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
    """The server behind a DSN, asked over one connection at a time, by any thread."""

    def __init__(self, dsn: Dsn, pipeline: str, slot: str, publication: str):
        self.dsn = dsn
        self._names = _Names.of(pipeline)
        self._slot_given = bool(slot)
        # Who names the slot of an earlier version says that its publications are the pipeline's.
        former = slot == self._names.former_slot
        own = self._names.former_publication if former else self._names.publication
        self.slot = ReplicationSlot(dsn, slot or self._names.slot)
        self.publications = Publications(dsn, publication, own)
        self.tables = ServerTables(dsn)

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
        found = [row[0] for row in connection.rows(sql, name=self.slot.name, former=former)]
        if self._slot_given or self.slot.name in found or former not in found:
            return
        raise ConfigInvalid(
            f"slot {former} may be this pipeline's",
            detail="Earlier versions called the pipeline's slot so, and pipelines with similar "
            f"names shared it. Now it is called {self.slot.name}.",
            hint=f"If the pipeline used it, write `slot: {former}` and all goes on. If it belongs "
            f"to another pipeline, write `slot: {self.slot.name}`.",
        )

    def blocks(self, pid: int, seconds: float) -> bool:
        """Whether someone has waited for so long for a lock that a process holds."""
        with Connection(self.dsn) as connection:
            return bool(connection.one(_BLOCKS, blocker=pid, seconds=seconds))

    def mark(self) -> int:
        """Write a mark into the log and return its position: all that was committed is before."""
        with Connection(self.dsn) as connection:
            connection.rows("SET synchronous_commit = 'local'")
            text = connection.one("SELECT pg_logical_emit_message(true, 'icestream', '')::text")
            return parse_lsn(str(text))
