"""Proof that the server's history is the lake's: the transaction that came before a position.

An LSN alone does not tell in which state the server is: a restored copy of it writes other changes
at the same places. So a position is remembered with its witness, the last transaction that came
before it. The server is told only that what comes before the witness is durable. It therefore
sends the witness once more at the next start, and nothing between it and the position. When
anything else comes, the server's history is not the lake's.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from icestream.errors import HistoryLost
from icestream.sources.postgres.connection import lsn_text

# The server is asked for an answer with every status; one that says nothing for so long is gone.
SILENCE_SECONDS = 120.0
# PostgreSQL counts time from 2000 on, in seconds since 1970.
EPOCH_2000 = 946_684_800
COPY_ANEW = (
    "Drop the slot if it is still there, drop the pipeline's Iceberg tables, and start again: all "
    "tables are copied anew."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A transaction that the server sent: its commit record's place, its id, its time in
    microseconds since 2000."""

    at: int
    xid: int
    time: int

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time / 1e6 + EPOCH_2000, UTC)
        return f"transaction {self.xid} at {lsn_text(self.at)}, committed {when:%Y-%m-%d %H:%M:%S}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """Where reading goes on, and for how long the server may be silent before it is given up.

    With `adopts` the witness is not known, but must lie just where reading goes on.
    """

    lsn: int
    witness: Witness | None = None
    adopts: bool = False
    silence_seconds: float = SILENCE_SECONDS

    @property
    def begin(self) -> int:
        """From where on the server is asked to send."""
        return self.witness.at if self.witness else self.lsn

    def expects(self, found: Witness) -> bool:
        """Whether this transaction is the one that must come first."""
        return found.at == self.lsn if self.adopts else found == self.witness

    def other_history(self, found: str) -> HistoryLost:
        """The error for a server that has something else where this must be."""
        if self.adopts:
            return HistoryLost(
                "the replication slot is not where this pipeline left it",
                detail=f"It stands at {lsn_text(self.lsn)}, past the position of the other "
                f"tables. {found} Someone moved it on or made it anew, and these tables may lack "
                "changes.",
                hint=COPY_ANEW,
            )
        known = f"The lake is at {lsn_text(self.lsn)}"
        if self.witness is not None:
            known += f", where the last change was {self.witness}"
        return HistoryLost(
            "PostgreSQL's history is not the one that the lake was made from",
            detail=f"{known}. {found} The server was restored from an older copy, or was promoted "
            "before it had everything: the lake may hold rows that the server never had.",
            hint=COPY_ANEW,
        )
