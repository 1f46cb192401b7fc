"""What a folder of changefeed files must still hold, told by the numbers in the files' names.

A changefeed has one writer or more: a sink of a node in a session of its job. Each writer numbers
its files 0, 1, 2 ... over all tables, and uploads them in this order; a writer that fails is
followed by another one, which begins at 0 again. So a number that is missing below one that is
there was removed, and so was one that was there before.

With each resolved timestamp R the frontier remembers, beside R, which numbers of which writers may
still be needed after it: `folder: (wall, logical, since, writer, low, next, writer, low ...)`.
Files `low` to `next - 1` were there when R was, and may hold rows later than R. All writers with a
file named `since` or later are named, so that one which is not named is new and begins at 0.
After them come those that have been idle for longer: a writer lives as long as its session, and
goes on with `next` after days, when all before that was read and removed. The longest idle drop
out.

An example: writer w has the files 0 to 4. Files 0 to 2 have only rows up to R, files 3 and 4 have
later ones. The frontier of R has `w, 3, 5`: files 3 and 4 must still be there, 0 to 2 may be
removed. If a later look finds 4 and 6, files 3 and 5 were removed.

So it is also known what a table that has to be read from the beginning wants: all numbers from 0 on
of every writer that is named or there. Once writers have dropped out nobody knows any more.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from icestream.frontier import START, Frontier, Position

FOLDER = "folder"
_UNKNOWN = 2**62
# A session has about one writer for each node; those of sessions that are over are here as well.
IDLE_WRITERS_MAX = 128
# Stands for the writers that have dropped out, as one whose files are always missed.
FORGOTTEN = _UNKNOWN
Needed = Mapping[int, tuple[int, int]]
"""By writer: the first number that is needed, and the one after the last."""


@lru_cache(maxsize=4096)
def number_of(name: str) -> int:
    """A number that stands for a name: a table's, or what the names of a writer's files share."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def triples(parts: Position) -> dict[int, tuple[int, int]]:
    """Numbers that come in threes, in their order: the second and third by the first."""
    return dict(zip(parts[::3], zip(parts[1::3], parts[2::3], strict=True), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A file's number and writer, when it was begun, and how far its rows reach as is known."""

    writer: int
    number: int
    at: Position
    last: int = _UNKNOWN


@dataclass(slots=True)
class Numbers:
    """The numbers that a folder has, by writer, and the newest time in the names of each."""

    found: dict[int, set[int]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)

    def add(self, writer: int, number: int, at: Position) -> None:
        """Take in a file's name."""
        self.found.setdefault(writer, set()).add(number)
        self.newest[writer] = max(self.newest.get(writer, 0), at[0])

    def first_gone(self, needed: Needed) -> tuple[int, int] | None:
        """A writer and the first number of it that is needed and not there; None when all are."""
        for writer, (low, end) in sorted(needed.items()):
            there = np.array(sorted(n for n in self.found.get(writer, ()) if low <= n < end))
            if len(there) == end - low:
                continue
            moved = np.flatnonzero(there != low + np.arange(len(there)))
            return writer, low + int(moved[0] if len(moved) else len(there))
        return None

    def needed(self, lower: Frontier) -> Needed:
        """What must be there for one who goes on after a frontier; see the module.

        A frontier that remembers nothing was made by an earlier version: only numbers between
        those that are there can be missed.
        """
        known = lower[FOLDER]
        if not known and lower.positions:
            return {writer: (min(have), max(have) + 1) for writer, have in self.found.items()}
        since = known[2] if known else 0
        remembered = _named(lower)
        needed = dict(remembered)
        for writer, have in self.found.items():
            low, end = remembered.get(writer, (0, 0))
            if writer in remembered or self.newest[writer] >= since:
                needed[writer] = (low, max(end, max(have) + 1))
        return needed


def beginning(reached: Frontier) -> Frontier:
    """The start, with what a folder must have from there on that was read up to a frontier."""
    named = _named(reached)
    if not named:
        return START
    idle = sum(low == end for low, end in named.values())
    ends = {writer: end for writer, (_, end) in named.items()}
    if idle >= IDLE_WRITERS_MAX:
        ends[FORGOTTEN] = 1
    return Frontier({FOLDER: (0, 0, 0, *(p for w, end in ends.items() for p in (w, 0, end)))})


def remembered(
    boundaries: Sequence[Position],
    files: Iterable[Numbered],
    lower: Frontier,
    since: Sequence[int],
) -> list[Position]:
    """The positions of `FOLDER` for ascending resolved timestamps, from the files that are there.

    `since` is, for each, how old files are at most that may matter after it.
    """
    named = {writer: span for writer, span in _named(lower).items() if writer != FORGOTTEN}
    ordered = sorted(files, key=lambda file: -file.last)
    begun: dict[int, Position] = {}
    newest: dict[int, int] = {}
    firsts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for file in ordered:
        begun[file.writer] = min(begun.get(file.writer, file.at), file.at)
        newest[file.writer] = max(newest.get(file.writer, 0), file.at[0])
        firsts[file.writer] = min(firsts.get(file.writer, file.number), file.number)
        ends[file.writer] = max(ends.get(file.writer, 0), file.number + 1)
    # Files that are too old to be looked at hold nothing that is needed.
    quiet = {writer: end for writer, (_, end) in named.items() if writer not in ends}
    needed: dict[int, int] = {}
    place, found = 0, []
    # From the last boundary to the first more and more files reach past it.
    for resolved, oldest in zip(reversed(boundaries), reversed(since), strict=True):
        while place < len(ordered) and ordered[place].last > resolved[0]:
            file = ordered[place]
            needed[file.writer] = min(needed.get(file.writer, file.number), file.number)
            place += 1
        active: list[int] = []
        idle: dict[int, int] = {}
        for writer in sorted(ends, key=lambda writer: (-newest[writer], writer)):
            low_before, end_before = named.get(writer, (0, 0))
            low, end = max(needed.get(writer, ends[writer]), low_before), ends[writer]
            if begun[writer] > resolved:
                # It is new and begins at 0, or goes on after numbers that are not needed any more.
                low, end = firsts[writer], max(firsts[writer], end_before)
                active += [writer, low, end] if low else []
            elif low < end or newest[writer] >= oldest:
                active += [writer, low, end]
            else:
                idle[writer] = end
        kept = list((idle | quiet).items())[:IDLE_WRITERS_MAX]
        resting = [part for writer, end in kept for part in (writer, end, end)]
        found.append((resolved[0], resolved[1] + 1, oldest, *active, *resting))
    return found[::-1]


def _named(lower: Frontier) -> dict[int, tuple[int, int]]:
    """By writer that a frontier names, in its order: the numbers that it names."""
    return triples(lower[FOLDER][3:])
