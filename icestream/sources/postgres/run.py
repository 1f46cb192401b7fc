"""What all rooms of this source share in a run: the tables that it follows, and the server."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.types import IcebergType

from icestream.errors import ConfigInvalid, HistoryLost, SourceUnavailable
from icestream.patience import POLL_SECONDS
from icestream.schema import parse_type
from icestream.sources import Budget
from icestream.sources.postgres.changes import COPY_TABLE_ANEW
from icestream.sources.postgres.options import PostgresOptions
from icestream.sources.postgres.positions import wal_name
from icestream.sources.postgres.server import Server
from icestream.sources.postgres.tables import PgTable
from icestream.sources.spool import Spool, refuse_unreachable
from icestream.sources.spool.places import open_spool

log = logging.getLogger(__name__)


class FollowedTables:
    """The tables that the configuration names, as the server has them.

    Thread: the loop's changes them, others read `by_name`, which is replaced as a whole but for
    a table that is read anew.
    """

    def __init__(
        self,
        server: Server,
        options: PostgresOptions,
        delete_columns: Callable[[str], Sequence[str]],
    ):
        self._server = server
        self._options = options
        self._delete_columns = delete_columns
        self.by_name: dict[str, PgTable] = {}
        self.identity = ""

    def find(self) -> Sequence[str]:
        """Ask the server for them once; returns their names."""
        if not self.by_name:
            self._server.check()
            self.identity = self._server.identity()
            found = self._as_they_are(self._options.tables)
            strays = self._server.tables.strays(found, self._options.parents_alone)
            if strays is not None:
                raise strays
            for table in found:
                if not table.key:
                    log.warning(
                        "table %s has no key: rows are only added, updates and deletes of it are "
                        "not followed",
                        table.name,
                    )
            self.by_name = {table.name: table for table in found}
        return list(self.by_name)

    def all(self) -> list[PgTable]:
        """Each of them."""
        return list(self.by_name.values())

    def narrow(self) -> None:
        """Keep the columns and rows alone that the publications let through."""
        published = self._server.publications.published(self.all())
        self.by_name = {table.name: table for table in published}

    def renew_all(self) -> list[PgTable]:
        """Look again at all of them; returns them as they are without publications."""
        found = self._as_they_are(list(self.by_name))
        self.by_name = {t.name: t for t in self._server.publications.published(found)}
        return found

    def renew(self, table: PgTable) -> PgTable:
        """Look again at one table; raises when another one bears its name."""
        fresh = self._as_they_are([table.name])
        if fresh[0].oid != table.oid:
            raise made_anew(table.name, "Another table bears its name now.")
        self.by_name[table.name] = renewed = self._server.publications.published(fresh)[0]
        return renewed

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives columns of the table."""
        return self._declared().get(table, {})

    def _as_they_are(self, patterns: Sequence[str]) -> list[PgTable]:
        return self._server.tables.find(patterns, self._identifiers, self._declared())

    def _declared(self) -> dict[str, dict[str, IcebergType]]:
        return {
            table: {column: parse_type(kind) for column, kind in kinds.items()}
            for table, kinds in self._options.columns.items()
        }

    def _identifiers(self, table: str) -> Sequence[str]:
        """The columns that the configuration says to identify a row; none for the table's key."""
        given = self._options.identifier_columns.get(table, ())
        deleted_by = self._delete_columns(table)
        if given and deleted_by and set(given) != set(deleted_by):
            raise ConfigInvalid(
                f"`identifier_columns` and `equality_delete_by` differ for table {table}",
                hint="Leave one of them out: both say which columns identify a row.",
            )
        return given or deleted_by


@dataclass(slots=True, kw_only=True)
class PostgresRun:
    """What the rooms of this source share. Thread: any.

    `run_tasks` runs tasks on workers of other machines; None when all run on this one.
    """

    pipeline: str
    options: PostgresOptions
    budget: Budget
    parallelism: Callable[[], int]
    server: Server
    tables: FollowedTables
    run_tasks: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def wal(self) -> str:
        """The name of the stream's position."""
        return wal_name(self.tables.identity)

    def open_spool(self) -> Spool:
        """A place for the stream; raises when workers of other machines do not reach it."""
        spool = self._spool()
        if self.run_tasks is not None:
            self._refuse_unreachable(spool)
        return spool

    def verify_spool(self) -> None:
        """Raise what keeps changes from being spooled; tell what other runs have spooled."""
        spool = self._spool(looks_only=True)
        for place in spool.left():
            log.warning(
                "%s holds changes of another run: it is running, or was killed; what killed runs "
                "left is removed by the next run",
                place,
                extra={"pipeline": self.pipeline},
            )
        self._refuse_unreachable(spool)
        spool.close()

    def _spool(self, looks_only: bool = False) -> Spool:
        stream = f"{self.tables.identity} {self.server.slot.name}"
        where, storage = self.options.spool, self.options.spool_storage
        return open_spool(where, storage, self.pipeline, stream, looks_only)

    def _refuse_unreachable(self, spool: Spool) -> None:
        try:
            refuse_unreachable(spool, self.run_tasks or _run_here, self.parallelism())
        except BaseException:
            spool.close()
            raise

    def pause(self) -> None:
        """A moment between two looks; raises when the run is being stopped."""
        if self.stopping.wait(POLL_SECONDS):
            raise SourceUnavailable("the run is being stopped")


def _run_here(tasks: Sequence[Any]) -> Sequence[Any]:
    return [task.run() for task in tasks]


def made_anew(table: str, detail: str) -> HistoryLost:
    """The error for a table that is not the one which was followed."""
    return HistoryLost(
        f"table {table} was dropped and created anew at the source",
        detail=detail,
        hint=f"If it only got another name, give it its name back. {COPY_TABLE_ANEW}",
    )
