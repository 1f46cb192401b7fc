"""The PostgreSQL source: a consistent copy of every table, then every change.

    slot and snapshot ──► copies, round by round ──► change stream from the slot's point on

The frontier has one position for the stream, an LSN, and one for each table's copy: see
`positions`. Copies and changes are never in one epoch; a copy's epoch leaves the stream where it
is. The first copies read the snapshot that the slot was created with and come before any change. A
copy that begins later (a table was added, a crash ended the snapshot) alternates with the stream.

Each room answers for its part: `start` what a run finds, `copies` which copies are due, `stream`
what has come of the changes, `watch` what is looked at meanwhile. `run` is what they share.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyiceberg.types import IcebergType

from icestream.epoch import Epoch
from icestream.frontier import Frontier
from icestream.schema import TableShape
from icestream.sources import (
    Budget,
    EpochPlan,
    Purpose,
    Remembered,
    Source,
    SplitsLost,
    Standing,
    StartPlan,
    always,
    never,
)
from icestream.sources.postgres.changes import relation_columns
from icestream.sources.postgres.connection import lsn_text, parse_dsn
from icestream.sources.postgres.copies import Copies
from icestream.sources.postgres.options import PostgresOptions
from icestream.sources.postgres.positions import in_words
from icestream.sources.postgres.relation_messages import relation_of
from icestream.sources.postgres.run import FollowedTables, PostgresRun
from icestream.sources.postgres.server import Server
from icestream.sources.postgres.slot import Slot
from icestream.sources.postgres.start import RunStart
from icestream.sources.postgres.stream import ChangeStream
from icestream.sources.postgres.watch import SlotWatch
from icestream.sources.spool import SpoolUnreadable


class PostgresSource(Source):
    """See the module and `icestream.sources.Source`, which says by which thread each is called."""

    key_in_one_split = True

    def __init__(
        self,
        options: PostgresOptions,
        pipeline: str,
        budget: Budget,
        parallelism: Callable[[], int] = lambda: 2,
        delete_columns: Callable[[str], Sequence[str]] = lambda _: (),
        run_tasks: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ):
        server = Server(parse_dsn(options.dsn), pipeline, options.slot, options.publication)
        self._run = PostgresRun(
            pipeline=pipeline,
            options=options,
            budget=budget,
            parallelism=parallelism,
            server=server,
            tables=FollowedTables(server, options, delete_columns),
            run_tasks=run_tasks,
        )
        self._start = RunStart(self._run)
        self._stream = ChangeStream(self._run, self._reader_opens, self._reader_closed)
        self._copies = Copies(self._run, self._stream)
        self._watch = SlotWatch(self._run, self._start, self._stream, self._copies)

    # --- tables -------------------------------------------------------------------------------

    def tables(self) -> Sequence[str]:
        """The tables that the configuration names, found at the server."""
        return self._run.tables.find()

    def known_tables(self) -> Sequence[str]:
        """Those that the configuration names in full."""
        return [name for name in self._run.options.tables if not set(name) & set("*?[")]

    def shape(self, table: str) -> TableShape | None:
        """Columns and key of a table that must be created."""
        found = self._run.tables.by_name[table]
        return TableShape(columns=relation_columns(relation_of(found), found.key), key=found.key)

    def declared(self, table: str) -> Mapping[str, IcebergType]:
        """The types that the configuration gives columns of the table."""
        return self._run.tables.declared(table)

    # --- from the start to the next epoch -----------------------------------------------------

    def resume(self, remembered: Remembered) -> StartPlan:
        """Tables that the lake has nothing of are copied, again if need be."""
        rebuilt = self._start.remember_missing(remembered.missing)
        unfed = remembered.progress.keys() - {*self.tables()}
        return StartPlan(rebuilt=rebuilt, unfed=frozenset(unfed))

    def verify(self, durable: Frontier) -> None:
        """Raise what would stop a run: checks of the server, and whether its history is there."""
        self.tables()
        self._start.refuse_other_server(durable)
        self._start.refuse_left_out(durable)
        self._run.server.publications.verify(self._run.tables.all())
        if durable[self._run.wal]:
            self._stream.verify(durable[self._run.wal])
        self._run.verify_spool()

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """The next rounds of copies, or the ends of what has come of the stream."""
        self.tables()
        self._watch.refuse()
        self._stream.refuse_unreadable()
        at = self._started(lower)
        bounds = self._copies.bounds(at)
        return self._stream.bounds(at, self._stream.target) if bounds is None else bounds

    def _started(self, lower: Frontier) -> Frontier:
        """Be ready to serve what follows `lower`; returns it with what the start decided."""
        self._start.refuse_other_server(lower)
        if not self._stream.reading and not self._copies.first_begun:
            self._start.refuse_left_out(lower)
            self._start.publish()
            self._copies.published_now()
            self._run.tables.narrow()
        at = self._start.positions(lower)
        wal = self._run.wal
        if not at[wal]:
            self._stream.first = (self._copies.begin(),)
        elif self._start.any_gone and not self._stream.reading:
            self._stream.first = self._stream.slot_position(at[wal])
        at = at.join(Frontier({wal: self._stream.first}))
        self._stream.read(at[wal])
        return at

    def _reader_opens(self, slot: Slot | None) -> None:
        self._run.server.slot.note(slot)
        self._watch.begin()

    def _reader_closed(self) -> None:
        self._copies.end_later()

    def backlog(self, lower: Frontier) -> bool:
        """Whether tables are being copied, or the stream holds a full epoch after `lower`."""
        return self._copies.under_way(lower) or self._stream.full(lower[self._run.wal])

    # --- an epoch -----------------------------------------------------------------------------

    def plan(self, epoch: Epoch) -> EpochPlan:
        """Ranges of pages for an epoch of a copy, shares of keys for one of the stream."""
        lower, upper = self._stream.span(epoch)
        # First: the segments of the stream are there once its splits are known.
        parts = (self._copies if lower == upper else self._stream).splits(epoch)
        return EpochPlan(
            parts=parts,
            truncated=frozenset(self._copies.begun_again(epoch) | self._stream.truncated(epoch)),
            milestone=always if self._copies.ends_one(epoch) else never,
            committed_at=self._stream.committed_at(epoch),
        )

    def was_read(self, epoch: Epoch, lessons: Sequence[Any]) -> Mapping[str, str]:
        """Show how far the copy is; the position is for those who read the table's history."""
        self._copies.show(lessons)
        position = epoch.upper[self._run.wal]
        return {"postgres.lsn": lsn_text(position[0])} if position else {}

    def standing(self, frontier: Frontier) -> Standing:
        """The LSN; trouble are transactions that a copy waits for."""
        position = frontier[self._run.wal]
        # Every table is copied and the stream has passed where it was at the start.
        passed = self._stream.passed_target(position)
        return Standing(
            position=in_words(frontier),
            lag_seconds=self._stream.lag_seconds(position),
            caught_up=passed and self._copies.complete(frontier),
            trouble=self._copies.trouble,
        )

    def ack(self, durable: Frontier) -> None:
        """Let the server forget what is durable."""
        position = durable[self._run.wal]
        if position:
            self._stream.ack(position, self._copies.kept_from(position[0]))

    # --- the end ------------------------------------------------------------------------------

    def give_up(self, lost: SplitsLost) -> None:
        """Let go of the snapshots: someone may wait for the locks that come with them.

        What could not be read back from the spool is read from the server again.
        """
        self._copies.give_up()
        if isinstance(lost, SpoolUnreadable):
            self._stream.lose(lost)

    def interrupt(self) -> None:
        """End waits for the server soon: the run is being stopped."""
        self._run.stopping.set()

    def close(self) -> None:
        """Let go of connections and of the spool."""
        self._watch.close()
        self._copies.close()
        self._stream.close()
