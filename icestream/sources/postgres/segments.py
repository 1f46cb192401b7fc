"""What has come of the stream, as segments: Arrow files of raw messages, cut at transaction ends.

    walk ──► rows of a buffer ──by key hash──► batches of the open segment's file ──► closed segment

Rows gather in a buffer. They are written to the open segment when the buffer is full, or when the
segment is closed. A segment that is closed ends with a transaction.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from icestream.sources import Budget
from icestream.sources.postgres.changes import MOVED_IN, MOVED_OUT
from icestream.sources.postgres.framing import SHARES, State, gather
from icestream.sources.postgres.witness import EPOCH_2000, Witness
from icestream.sources.spool import Spool, written_later

# Rows are written out when this much has gathered; a segment in shares can be decoded in parallel.
_BUFFER_BYTES = 32 * 1024**2
_BUFFER_ROWS = 1 << 18
# A segment below this is not worth being cut into shares.
_SHARED_BYTES_MIN = 4 * 1024**2
# An epoch is made of segments, so that it ends not long after it is full.
_SEGMENTS_PER_EPOCH = 4
_SPOOL_SCHEMA = pa.schema(
    [
        ("relation", pa.int32()),
        ("kind", pa.uint8()),
        ("at", pa.int64()),
        ("seq", pa.int64()),
        ("message", pa.large_binary()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One record batch of a segment's file: a share of the keys, or all of them (-1)."""

    number: int
    share: int
    relations: frozenset[int]


@dataclass(slots=True, kw_only=True)
class Segment:
    """Whole transactions in a file; the unit in which the stream is handed on."""

    lower: int
    upper: int = 0
    path: str = ""
    batches: list[Batch] = field(default_factory=list)
    bytes_by_relation: dict[int, int] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    truncated: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: int = 0
    first_committed_at: float = 0.0
    committed_at: float = 0.0
    witness: Witness | None = None

    @property
    def size_bytes(self) -> int:
        """The size of its messages."""
        return sum(self.bytes_by_relation.values())

    @property
    def empty(self) -> bool:
        """Whether the segment moves the frontier and nothing else."""
        return not self.batches and not self.truncated


def epochs(segments: Sequence[Segment], budget: Budget) -> list[list[Segment]]:
    """Segments in groups, each of which but the last is as much as an epoch may hold."""
    found: list[list[Segment]] = []
    for segment in segments:
        if found and not fills_epoch(found[-1], budget):
            found[-1].append(segment)
        else:
            found.append([segment])
    return found


def fills_epoch(segments: Sequence[Segment], budget: Budget) -> bool:
    """Whether segments are as much as an epoch may hold."""
    rows, size = sum(each.rows for each in segments), sum(each.size_bytes for each in segments)
    return budget.spent(rows, size)


class SegmentWriter:
    """The buffer that the walk fills, the open segment, and those that are closed.

    `state` is what the walk knows of where it is. Thread: whoever holds the reader's lock.
    """

    def __init__(self, spool: Spool, lower: int, budget: Budget):
        self._spool = spool
        self._budget = budget
        self.state = np.zeros(len(State), dtype=np.int64)
        # A segment is closed only where the buffer is full.
        rows, size = (n // _SEGMENTS_PER_EPOCH for n in (budget.rows, budget.bytes))
        self.rows = np.empty((7, max(1, min(_BUFFER_ROWS, rows))), dtype=np.int64)
        self.content = np.empty(max(1, min(_BUFFER_BYTES, size)), dtype=np.uint8)
        self._truncates: list[tuple[int, int, int]] = []
        self._seq = 0
        self._file: Any = None
        self._batches: Any = None
        self.closed: deque[Segment] = deque()
        self._open = Segment(lower=lower)

    @property
    def lower(self) -> int:
        """Where what has come begins."""
        return self.closed[0].lower if self.closed else self._open.lower

    @property
    def upper(self) -> int:
        """Where the last closed segment ends; 0 without any."""
        return self.closed[-1].upper if self.closed else 0

    def full(self, after: int) -> bool:
        """Whether as much has come after a position as an epoch may hold."""
        closed = [segment for segment in self.closed if segment.upper > after]
        rows = sum(segment.rows for segment in closed)
        size = sum(segment.size_bytes for segment in closed)
        if not self.state[State.TORN]:
            rows += self._open.rows + int(self.state[State.ROWS_WHOLE])
            size += self._open.size_bytes + int(self.state[State.BYTES])
        return self._budget.spent(rows, size)

    def truncate(self, relations: Sequence[int]) -> None:
        """Tables are truncated by the transaction that is open, given by their relations."""
        at = int(self.state[State.COMMIT_LSN])
        # Rows that came so far are older, those that follow are newer.
        seq = self._seq + int(self.state[State.ROWS])
        self._truncates += [(number, at, seq) for number in relations]

    def forget(self, before: int) -> None:
        """Remove the files of segments that end at or before this position."""
        while self.closed and self.closed[0].upper <= before:
            self._remove(self.closed.popleft())

    def make_room(self, message_bytes: int, sent_lsn: int) -> None:
        """Write rows out, and close the segment when it is large enough.

        A message of so many bytes comes next, and must fit in.
        """
        state = self.state
        if state[State.ROWS_WHOLE]:
            self._flush(int(state[State.ROWS_WHOLE]), closing=False)
            rows, size = _SEGMENTS_PER_EPOCH * self._open.rows, self._open.size_bytes
            if self._budget.spent(rows, _SEGMENTS_PER_EPOCH * size):
                self.cut(sent_lsn)
        elif state[State.ROWS]:
            # The open transaction is larger than the buffer: what came before it goes on alone.
            self.cut(sent_lsn)
            self._flush(int(state[State.ROWS]), closing=False)
            state[State.TORN] = 1
        else:
            self.content = np.empty(max(message_bytes, 2 * self.content.size), dtype=np.uint8)

    def cut(self, sent_lsn: int) -> None:
        """Close the segment after the last whole transaction, if there is anything to close.

        Between transactions it ends where the server says that all was sent.
        """
        state = self.state
        if state[State.TORN]:
            return
        upper = int(state[State.END_LSN])
        if not state[State.INSIDE]:
            upper = max(upper, sent_lsn)
        segment = self._open
        if upper <= segment.lower:
            return
        if state[State.ROWS_WHOLE]:
            self._flush(int(state[State.ROWS_WHOLE]), closing=True)
        if self._file is not None:
            with written_later(self._spool.where):
                self._batches.close()
                self._file.close()
            self._file = None
        segment.truncated = {number: (at, seq) for number, at, seq in self._truncates if at < upper}
        self._truncates = [each for each in self._truncates if each[1] >= upper]
        segment.upper = upper
        if state[State.LAST_LSN]:
            last = (State.LAST_LSN, State.LAST_XID, State.TIME)
            at, xid, when = (int(state[each]) for each in last)
            segment.witness = Witness(at=at, xid=xid, time=when)
        segment.committed_at = float(state[State.TIME]) / 1e6 + EPOCH_2000
        first = state[State.FIRST_TIME] or state[State.TIME]
        segment.first_committed_at = float(first) / 1e6 + EPOCH_2000
        state[State.FIRST_TIME] = 0
        if segment.empty and self.closed and self.closed[-1].empty:
            # Nothing but movement: one segment that says so is enough.
            segment.lower = self.closed.pop().lower
        self.closed.append(segment)
        self._open = Segment(lower=upper)

    def _flush(self, count: int, closing: bool) -> None:
        """Write the first rows of the buffer to the segment's file and keep the rest."""
        rows, used = self.rows, int(self.state[State.BYTES])
        total = int(self.state[State.ROWS])
        size = int(rows[3, count]) if count < total else used
        # In an epoch with other segments, it would keep these from being decoded in parallel.
        alone = not self._open.batches and all(each.empty for each in self.closed)
        small = closing and alone and size < _SHARED_BYTES_MIN
        if self._file is None:
            self._open.path, self._file = self._spool.create()
            with written_later(self._spool.where):
                self._batches = pa.ipc.new_file(self._file, _SPOOL_SCHEMA)
        self._write_batches(rows[:, :count], self.content[:size], 1 if small else SHARES)
        self._seq += count
        self._open.rows += count
        rest = total - count
        rows[:, :rest] = rows[:, count:total].copy()
        rows[3, :rest] -= size
        self.content[: used - size] = self.content[size:used].copy()
        self.state[State.ROWS] = rest
        self.state[State.ROWS_WHOLE] = max(0, int(self.state[State.ROWS_WHOLE]) - count)
        self.state[State.BYTES] = used - size

    def _write_batches(self, rows: np.ndarray, content: np.ndarray, shares: int) -> None:
        relation, kind, at, start, length, share, moved = rows
        numbers = np.arange(len(relation), dtype=np.int64)
        leaving = moved >= 0
        order = np.concatenate([numbers, numbers[leaving]])
        kinds = np.concatenate(
            [np.where(leaving, MOVED_IN, kind), np.full(int(leaving.sum()), MOVED_OUT)]
        )
        target = np.concatenate([share, moved[leaving]]) if shares > 1 else np.zeros(len(order))
        self._open.moved.update(int(each) for each in np.unique(relation[leaving]))
        for each in np.unique(relation):
            size = int(length[relation == each].sum())
            known = self._open.bytes_by_relation
            known[int(each)] = known.get(int(each), 0) + size
        for number in np.unique(target):
            chosen = np.flatnonzero(target == number)
            # Within a share changes stay in the order in which they came.
            chosen = chosen[np.argsort(order[chosen], kind="stable")]
            picked = order[chosen]
            batch = _spool_batch(
                relation[picked],
                kinds[chosen],
                at[picked],
                self._seq + picked,
                _messages(content, start[picked], length[picked]),
            )
            with written_later(self._spool.where):
                self._batches.write_batch(batch)
            self._open.batches.append(
                Batch(
                    number=len(self._open.batches),
                    share=int(number) if shares > 1 else -1,
                    relations=frozenset(int(each) for each in np.unique(relation[picked])),
                )
            )

    def drop_open(self) -> None:
        """Remove what is not closed: its last transaction may be cut short."""
        file, self._file = self._file, None
        if file is not None:
            # A file that could not be written cannot be closed well either; it is removed.
            with contextlib.suppress(OSError):
                file.close()
            self._spool.remove(self._open.path)

    def remove_closed(self) -> None:
        """Remove all that is closed."""
        for segment in self.closed:
            self._remove(segment)
        self.closed.clear()

    def _remove(self, segment: Segment) -> None:
        # One that only moves the frontier has no file.
        if segment.path:
            self._spool.remove(segment.path)


def _messages(content: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Pieces of a buffer as an Arrow column."""
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = np.empty(int(offsets[-1]), dtype=np.uint8)
    gather(content, starts, lengths, out)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.large_binary(), len(starts), buffers)


def _spool_batch(
    relation: np.ndarray, kind: np.ndarray, at: np.ndarray, seq: np.ndarray, messages: pa.Array
) -> pa.RecordBatch:
    columns = [
        pa.array(relation.astype(np.int32)),
        pa.array(kind.astype(np.uint8)),
        pa.array(at),
        pa.array(seq),
        messages,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SPOOL_SCHEMA)
