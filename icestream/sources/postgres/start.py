"""What a run finds when it starts: the lake's positions, held against what the server has.

A table of the lake may be the copy of one that is gone; a publication may have left out changes
while nobody looked; the lake may have lost a table. Each is refused, or leads to another copy.

Worked example. Tables a and b are followed, c was followed once and is not wanted now:

    position at the lake          found                       becomes
    copy a 11: (0, DONE)          the lake has the table      the same: its changes go on
    copy b 12: (0, DONE)          the lake lost the table     (1, EMPTYING): it is copied anew
    copy c 13: (0, DONE)          nobody names it now         (1, EMPTYING): so it would be, if
                                                              somebody names it again
    none for d 14                 it is new                   (0, COPYING, 0, 0): its first copy
"""

from collections.abc import Mapping, Sequence

from icestream.errors import ConfigInvalid, HistoryLost
from icestream.frontier import Frontier, Position
from icestream.sources.postgres.changes import other_identity
from icestream.sources.postgres.positions import (
    COPY,
    COPYING,
    EMPTYING,
    WAL,
    copy_name,
    published_name,
    stamped,
)
from icestream.sources.postgres.publications import Coverage, left_out
from icestream.sources.postgres.run import PostgresRun, made_anew
from icestream.sources.postgres.tables import PgTable


class RunStart:
    """What the destination remembers of each table, and whether the server can go on from there.

    Thread: the loop's, but for `broken_since`, which that of the watch calls.
    """

    def __init__(self, run: PostgresRun):
        self._run = run
        self._missing: frozenset[str] | None = None
        self._unclaimed: set[str] = set()
        self._again: dict[str, Position] = {}
        self._covered: dict[str, Coverage] = {}
        # Whether the lake has lost a table, which may have known alone how far the stream was read.
        self.any_gone = False

    def remember_missing(self, missing: Sequence[str]) -> frozenset[str]:
        """Told which tables the destination has nothing of; returns those that are copied anew."""
        if self._missing is None:
            # Told twice, and taken up once: copies may have begun in between.
            self._missing = frozenset(missing)
            self._unclaimed = set(missing)
        return self._missing

    def refuse_other_server(self, lower: Frontier) -> None:
        """Stop when the lake was made from another server, or from another table of a name."""
        wal = self._run.wal
        others = [n for n in lower.positions if n.startswith(WAL) and n != wal]
        if others and wal not in lower.positions:
            raise HistoryLost(
                f"another PostgreSQL answers at {self._run.server.dsn}",
                detail=f"Its identity is {self._run.tables.identity}, the lake's is "
                f"{others[0].removeprefix(WAL)}.",
                hint="Correct the DSN. If the server was replaced, drop the pipeline's Iceberg "
                "tables and start again.",
            )
        names = {copy_name(table): table.name for table in self._run.tables.all()}
        for name in lower.positions:
            if not name.startswith(COPY) or name in names:
                continue
            table = name.removeprefix(COPY).rsplit(" ", 1)[0]
            if table in self._run.tables.by_name and lower[name][1:2] != (EMPTYING,):
                raise made_anew(table, "What the lake holds is the old table.")

    def refuse_left_out(self, lower: Frontier) -> None:
        """Stop when a publication was not the same all the time since a table's copy."""
        followed = [
            table
            for table in self._run.tables.all()
            if stamped(lower, table)
            and lower[copy_name(table)][1:2] != (EMPTYING,)
            and table.name not in self._unclaimed
            and copy_name(table) not in self._again
        ]
        before = {table.name: lower[published_name(table)][1:] for table in followed}
        unkeyed = self._run.server.publications.unkeyed(before, followed)
        if unkeyed:
            raise other_identity(unkeyed[0], "It had a key and has none now.")
        lost = self._lost(before, followed) if followed else None
        if lost is not None:
            raise lost

    def publish(self) -> None:
        """Have all tables published, and remember by what.

        Called before anything is read: what changes from now on is found to be another one.
        """
        publications, tables = self._run.server.publications, self._run.tables.all()
        publications.publish(tables)
        self._covered = publications.coverage(tables)

    def positions(self, lower: Frontier) -> Frontier:
        """The frontier with a position for every table, and retired ones marked for later."""
        positions: dict[str, Position] = {}
        names = {copy_name(table): table for table in self._run.tables.all()}
        for name, table in names.items():
            at = lower[name]
            if not at:
                former = [n for n in lower.positions if n.startswith(f"{COPY}{table.name} ")]
                positions[name] = (1, EMPTYING) if former else (0, COPYING, 0, 0)
            elif table.name in self._unclaimed:
                # The lake lost it, or never got it: unless its copy has yet to begin, another does.
                self.any_gone = True
                stamp = lower[published_name(table)]
                other = bool(stamp) and stamp[1:] != self._covered.get(table.name)
                if at[1:] != (COPYING, 0, 0) or other:
                    self._again[name] = (at[0] + 1, EMPTYING)
        for name in lower.positions:
            if name.startswith(COPY) and name not in names and lower[name][1:2] != (EMPTYING,):
                # Its changes are no longer followed: if it comes back, it is copied anew.
                positions[name] = (lower[name][0] + 1, EMPTYING)
        self._unclaimed = set()
        found = lower.join(Frontier({**positions, **self._again}))
        stamps = {
            published_name(table): (*found[name][:1], *self._covered[table.name])
            for name, table in names.items()
            if table.name in self._covered and not stamped(found, table)
        }
        return found.join(Frontier(stamps))

    def broken_since(self) -> HistoryLost | ConfigInvalid | None:
        """What keeps the run from going on as it began: a table that is no longer published, that
        is another one, or that was never asked for."""
        covered = dict(self._covered)
        tables = [table for table in self._run.tables.all() if table.name in covered]
        of_server = self._run.server.tables
        strays = of_server.strays(tables, self._run.options.parents_alone)
        other = of_server.supplanted(tables)
        anew = made_anew(other, "Another table bears its name now.") if other else None
        return self._lost(covered, tables) or anew or strays

    def _lost(
        self, before: Mapping[str, Coverage], tables: Sequence[PgTable]
    ) -> HistoryLost | None:
        """What publications may have left out of these tables, by what covered them before."""
        publications = self._run.server.publications
        now = publications.coverage(tables)
        for publication in publications.names:
            pairs = {
                t.name: (before[t.name], now[t.name])
                for t in tables
                if t.name in now and publications.of(t) == publication
            }
            lost = left_out(publication, pairs)
            if lost is not None:
                return lost
        return None
