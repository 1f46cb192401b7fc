"""What the coordinator must know of topics to find resolved timestamps: where they stand, and where
rows stand that are later than one.

Workers look at each record once and report markers and, for runs of rows between them, the span of
their timestamps. That is little, whatever the rows hold.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from icestream.formats.rows import Records
from icestream.frontier import Position
from icestream.sources.cockroachdb.messages import Messages, told_apart
from icestream.sources.kafka.consumer import Range, read_range

BATCH_BYTES = 16 * 1024**2
# The finer the runs, the less is read in vain: an epoch begins to read at the start of one.
RUN_ROWS = 1024
# Rows that do not say when they were changed may belong anywhere.
EARLIEST: Position = (0, 0)
LATEST: Position = (2**62, 0)


class Marker(NamedTuple):
    """A resolved timestamp and where it stands."""

    offset: int
    resolved: Position


class RowRun(NamedTuple):
    """Rows in a row: their offsets `[start, end)`, first and last timestamps, and their size."""

    start: int
    end: int
    first: Position
    last: Position
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """What was found in a range."""

    range: Range
    markers: Sequence[Marker]
    runs: Sequence[RowRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRanges:
    """Ranges that a worker is to look through."""

    settings: Mapping[str, str] = field(repr=False)
    read_timeout: float
    ranges: Sequence[Range]

    def run(self) -> list[Indexed]:
        """What is in each of them."""
        return [
            indexed(
                each,
                read_range(
                    self.settings, each, read_timeout=self.read_timeout, batch_bytes=BATCH_BYTES
                ),
            )
            for each in self.ranges
        ]


def indexed(where: Range, batches: Iterator[Records]) -> Indexed:
    """The markers and runs in the records of a range."""
    markers: list[Marker] = []
    runs: list[RowRun] = []
    for records in batches:
        messages = told_apart(records)
        offsets = records.offsets[messages.markers].tolist()
        markers += map(Marker, offsets, messages.resolved)
        runs += _runs(records, messages)
    return Indexed(range=where, markers=_rising(markers), runs=runs)


def _rising(markers: Sequence[Marker]) -> list[Marker]:
    """Only those that say more than all before: a feed that was started again may repeat some."""
    rising: list[Marker] = []
    for marker in markers:
        if not rising or marker.resolved > rising[-1].resolved:
            rising.append(marker)
    return rising


def _runs(records: Records, messages: Messages) -> list[RowRun]:
    """The rows cut into runs, at every marker and after so many rows."""
    rows = messages.rows
    if len(rows) == 0:
        return []
    behind_markers = np.flatnonzero(np.diff(rows) > 1) + 1
    starts = np.unique(np.concatenate([np.arange(0, len(rows), RUN_ROWS), behind_markers]))
    ends = np.append(starts[1:], len(rows)) - 1
    offsets = records.offsets[rows]
    # Pairs have no minimum in numpy; their ranks do.
    order = np.lexsort((messages.logicals, messages.walls))
    ranks = np.empty(len(rows), dtype=np.int64)
    ranks[order] = np.arange(len(rows))
    firsts = order[np.minimum.reduceat(ranks, starts)]
    lasts = order[np.maximum.reduceat(ranks, starts)]
    sizes = pc.fill_null(pc.binary_length(records.values), 0).to_numpy(zero_copy_only=False)
    known = np.logical_and.reduceat(messages.known, starts).tolist()
    walls, logicals = messages.walls, messages.logicals
    runs = map(
        RowRun,
        offsets[starts].tolist(),
        (offsets[ends] + 1).tolist(),
        zip(walls[firsts].tolist(), logicals[firsts].tolist(), strict=True),
        zip(walls[lasts].tolist(), logicals[lasts].tolist(), strict=True),
        np.add.reduceat(sizes[rows], starts, dtype=np.int64).tolist(),
    )
    return [
        run if sure else run._replace(first=EARLIEST, last=LATEST)
        for run, sure in zip(runs, known, strict=True)
    ]


class PartitionIndex:
    """What is known of a partition's offsets from `start` up to `end`."""

    def __init__(self, start: int):
        self.start = start
        self.end = start
        self.markers: list[Marker] = []
        self.runs: list[RowRun] = []

    def add(self, found: Indexed) -> None:
        """Take in what was found in the range that comes next."""
        self.markers = _rising([*self.markers, *found.markers])
        self.runs += found.runs
        self.end = found.range.end

    def forget(self, start: int) -> None:
        """Keep only what stands from an offset on."""
        self.start = max(self.start, start)
        self.markers = [marker for marker in self.markers if marker.offset >= start]
        self.runs = [run for run in self.runs if run.end > start]

    def last(self) -> Position | None:
        """The last resolved timestamp; None when there is none."""
        return self.markers[-1].resolved if self.markers else None

    def place(self, resolved: Position) -> tuple[int, int]:
        """Where reading up to a resolved timestamp ends, and where reading after it begins.

        The first is after the marker that says that all is there. The second may be earlier: it is
        the first offset at which a row stands, or may stand, that is later than the timestamp.
        """
        number = bisect.bisect_left(self.markers, resolved, key=lambda marker: marker.resolved)
        end = self.markers[number].offset + 1
        later = next((run.start for run in self.runs if run.last > resolved), end)
        return end, min(end, later)

    def runs_within(self, where: Range, lower: Position, upper: Position) -> list[RowRun] | None:
        """The runs of a range that may have rows in `[lower, upper)`; None if it is not indexed."""
        if where.start < self.start or where.end > self.end:
            return None
        return [
            run
            for run in self.runs
            if run.start < where.end
            and run.end > where.start
            and run.first < upper
            and run.last >= lower
        ]
