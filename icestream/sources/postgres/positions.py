"""What a frontier of PostgreSQL is made of: the names of its positions, and what is in each.

    wal <cluster>             (lsn, then of its witness: place, xid, time, hash of publications)
    copy <table> <oid>        (number of the copy, state, oid of a leaf, page)
    published <table> <oid>   (number of the copy, then what published the table since)

The names carry identities: another server behind the same DSN, or a table that was dropped and
created anew, is never mistaken for the old one. All functions are pure.
"""

from icestream.frontier import Frontier, Position
from icestream.sources.postgres.backfill import Round
from icestream.sources.postgres.connection import lsn_text
from icestream.sources.postgres.segments import Segment
from icestream.sources.postgres.tables import PgTable
from icestream.sources.postgres.witness import Witness

# States of a table's copy, the second part of its position; the first counts the copies.
EMPTYING, COPYING, DONE = 0, 1, 2
WAL, COPY, PUBLISHED = "wal ", "copy ", "published "


def wal_name(identity: str) -> str:
    """The name of the stream's position at a cluster."""
    return f"{WAL}{identity}"


def copy_name(table: PgTable) -> str:
    """The name of the position of a table's copy."""
    return f"{COPY}{table.name} {table.oid}"


def published_name(table: PgTable) -> str:
    """The name of what published a table since its copy."""
    return f"{PUBLISHED}{table.name} {table.oid}"


def is_copied(at: Frontier, table: PgTable) -> bool:
    """Whether a table's copy is complete."""
    return at[copy_name(table)][1:2] == (DONE,)


def stamped(at: Frontier, table: PgTable) -> bool:
    """Whether the frontier remembers what published the table since its present copy."""
    stamp = at[published_name(table)]
    return bool(stamp) and stamp[:1] == at[copy_name(table)][:1]


def after_round(number: int, plan: Round) -> Position:
    """Where the n-th copy of a table is after a round of it."""
    return (number, DONE) if plan.after is None else (number, COPYING, *plan.after)


def begins_again(lower: Position, upper: Position) -> bool:
    """Whether a copy that is not the first one begins within an epoch."""
    return lower != upper and upper[:1] > (0,) and upper[1:] == (COPYING, 0, 0)


def witness_of(position: Position, publications: int) -> Witness | None:
    """The witness that a position of the stream is remembered with, if it has one.

    Under other publications the server would send other transactions: then there is none.
    """
    if len(position) < 5 or position[4] != publications:
        return None
    return Witness(at=position[1], xid=position[2], time=position[3])


def with_witness(lsn: int, witness: Witness | None, publications: int) -> Position:
    """A position of the stream, with its witness if there is one."""
    if witness is None:
        return (lsn,)
    return (lsn, witness.at, witness.xid, witness.time, publications)


def position_after(segment: Segment, publications: int) -> Position:
    """The end of a segment with its witness."""
    return with_witness(segment.upper, segment.witness, publications)


def in_words(frontier: Frontier) -> str:
    """The LSN, and how many tables are not yet copied."""
    lsn = next((at for name, at in frontier.positions.items() if name.startswith(WAL)), ())
    if not lsn:
        return ""
    copies = [at for name, at in frontier.positions.items() if name.startswith(COPY)]
    # A table that is to be emptied first is not followed now.
    open_copies = sum(at[1:2] == (COPYING,) for at in copies)
    return lsn_text(lsn[0]) + (f", {open_copies} tables to copy" if open_copies else "")
