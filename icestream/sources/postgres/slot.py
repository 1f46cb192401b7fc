"""The pipeline's replication slot: how it is made, what it keeps, and whether that is enough."""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass

from icestream import metrics
from icestream.errors import ConfigInvalid, HistoryLost, IcestreamError, SourceUnavailable
from icestream.patience import Deadline
from icestream.sources.postgres.connection import (
    Connection,
    Dsn,
    lsn_text,
    parse_lsn,
    quoted,
    text_literal,
)
from icestream.sources.postgres.witness import COPY_ANEW

log = logging.getLogger(__name__)

# A slot's creation waits for transactions that write; who they are is told this often.
_SLOT_LOOK_SECONDS = 5.0
SLOT_SECONDS_MAX = 600.0
# Below this share of the log that a slot may hold, someone should look.
_SAFE_SHARE_MIN = 0.25
# A reader that has just ended may hold the slot for a moment.
_FREE_SECONDS_MAX = 5.0


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


class ReplicationSlot:
    """The slot of a name at the server behind a DSN, whether it is there or not.

    Thread: any; it is looked at by the loop's and by that which watches it.
    """

    def __init__(self, dsn: Dsn, name: str):
        self.name = name
        self._dsn = dsn
        self._danger = ""

    def look(self) -> Slot | None:
        """The pipeline's slot, or None when there is none."""
        with Connection(self._dsn) as connection:
            rows = connection.rows(
                "SELECT confirmed_flush_lsn::text, active, coalesce(wal_status, 'reserved')::text, "
                "plugin::text, coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), "
                "confirmed_flush_lsn), 0)::bigint, safe_wal_size, database = current_database(), "
                "pg_current_wal_insert_lsn()::text, (SELECT setting::int8 FROM pg_settings "
                "WHERE name = 'wal_sender_timeout') "
                "FROM pg_replication_slots WHERE slot_name = :name",
                name=self.name,
            )
        if not rows:
            return None
        confirmed, active, status, plugin, lag, safe, here, end, sender = rows[0]
        if plugin != "pgoutput" or not here:
            raise ConfigInvalid(
                f"slot {self.name} is not one that this pipeline can use",
                detail=f"Its plugin is {plugin}, and it belongs to "
                f"{'this' if here else 'another'} database.",
                hint="Name another slot with `slot`.",
            )
        return Slot(
            name=self.name,
            confirmed=parse_lsn(str(confirmed)) if confirmed else 0,
            log_end=parse_lsn(str(end)),
            sender_seconds=int(sender or 0) / 1000,
            active=bool(active),
            wal_status=str(status),
            plugin=str(plugin),
            lag_bytes=int(lag),
            safe_bytes=None if safe is None else int(safe),
        )

    def free(self) -> Slot | None:
        """The slot, once the server has noticed that its last reader is gone."""
        deadline = Deadline(_FREE_SECONDS_MAX)
        while (slot := self.look()) and slot.active and deadline.look_again():
            pass
        return slot

    def create(self, stopping: threading.Event) -> tuple[Connection, int, str]:
        """Create the slot; the snapshot it exports lives as long as the connection is not used.

        This waits for transactions that write at the moment, whatever they wait for, so the caller
        must hold no lock.
        """
        connection = Connection(self._dsn, replication=True)
        pid = 0
        try:
            pid = int(connection.one("SELECT pg_backend_pid()"))
            wait = _SlotWait(self, pid, stopping)
            command = f"CREATE_REPLICATION_SLOT {quoted(self.name)} LOGICAL pgoutput"
            rows = connection.answer(f"{command} (SNAPSHOT 'export')", wait.look)
            return connection, parse_lsn(rows[0][1]), rows[0][2]
        except BaseException:
            # A session that waits does not notice that its client is gone.
            with contextlib.suppress(IcestreamError), Connection(self._dsn) as other:
                if pid:
                    other.rows("SELECT pg_terminate_backend(:pid)", pid=pid)
            connection.close()
            raise

    def drop(self) -> None:
        """Drop the slot: nothing was read from it."""
        with Connection(self._dsn) as connection:
            connection.rows(f"SELECT pg_drop_replication_slot({text_literal(self.name)})")

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
                detail=f"Slot {self.name}. {lost}",
                hint=COPY_ANEW,
            )

    def note(self, slot: Slot | None) -> None:
        """The slot's lag as a metric, and a warning before the server gives it up."""
        if slot is None:
            return
        metrics.SLOT_LAG_BYTES.labels(slot.name).set(slot.lag_bytes)
        if slot.danger and slot.danger != self._danger:
            log.warning("slot %s is about to be lost: %s", slot.name, slot.danger)
        self._danger = slot.danger

    def blockers(self, pid: int) -> list[int]:
        """The processes that a process waits for."""
        with Connection(self._dsn) as connection:
            return [int(each) for each in connection.one("SELECT pg_blocking_pids(:p)", p=pid)]


class _SlotWait:
    """Watches a slot's creation: who holds it up is told, and it ends in time."""

    def __init__(self, slot: ReplicationSlot, pid: int, stopping: threading.Event):
        self._slot = slot
        self._pid = pid
        self._stopping = stopping
        self._began = self._looked = time.monotonic()

    def look(self) -> None:
        """Raise when it is time to give up."""
        now = time.monotonic()
        name = self._slot.name
        if self._stopping.is_set():
            raise SourceUnavailable(f"the run was stopped before slot {name} was created")
        if now - self._looked < _SLOT_LOOK_SECONDS:
            return
        self._looked = now
        pids = ", ".join(map(str, self._slot.blockers(self._pid))) or "unknown"
        if now - self._began > SLOT_SECONDS_MAX:
            raise SourceUnavailable(
                f"slot {name} could not be created in {SLOT_SECONDS_MAX:.0f} s",
                detail=f"It waits for the transactions of server processes {pids} to end.",
                hint="End them with pg_terminate_backend, or wait: it is tried again.",
            )
        log.warning("slot %s waits for the transactions of server processes %s", name, pids)
