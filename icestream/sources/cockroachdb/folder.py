"""The folder of a changefeed: what a listing shows of it, and what it lacks.

What was removed before it was read is history lost, never a gap: the marker of the last committed
timestamp must be there when a later one is, and so must every number of a file that may be needed
(`icestream.sources.cockroachdb.numbered`).
"""

import bisect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import pyarrow.fs as pafs

from icestream.errors import ConfigInvalid, HistoryLost, SourceUnavailable
from icestream.frontier import Frontier, Position
from icestream.iceberg.files import filesystem
from icestream.sources.cockroachdb import CockroachdbOptions
from icestream.sources.cockroachdb.feed_file import FORMATS, FeedFile
from icestream.sources.cockroachdb.hlc import (
    FILE_NAME_DIGITS,
    file_time,
    format_hlc,
    parse_file_time,
    resolved_of,
)
from icestream.sources.cockroachdb.numbered import FORGOTTEN, Numbers

log = logging.getLogger(__name__)

MARKER_SUFFIX = ".RESOLVED"
# Between a table and its column family, in the names of files.
FAMILY_MARK = "+"
# What `accept_lost_after` says when nothing was read yet.
FROM_THE_START = "start"
# A feed that restarts from its checkpoint may name files somewhat earlier than the last marker.
# An hour of files is looked at again after a restart; rows decide what is new in them.
REWIND_SECONDS = 3600


@dataclass(slots=True)
class Listing:
    """What the folder has: files and markers that may matter, and all numbers and markers."""

    files: dict[str, FeedFile] = field(default_factory=dict)
    markers: set[Position] = field(default_factory=set)
    numbers: Numbers = field(default_factory=Numbers)
    marked: set[Position] = field(default_factory=set)


class Folder:
    """Lists the folder, and refuses what it lacks. Thread: the loop's."""

    def __init__(self, options: CockroachdbOptions, wanted: Callable[[str], bool]):
        self._options = options
        self._wanted = wanted
        self.filesystem, self._path = filesystem(options.files, options.storage)

    def everything(self) -> Listing:
        """All that the folder has."""
        return self.since((), ())

    def since(self, start: Position, markers: Sequence[Position]) -> Listing:
        """Data files and markers of the folder, but for what lies well before `start`.

        How much before, is told by the markers that are known, in ascending order.
        """
        earliest = named_earliest(markers, start)
        listing = Listing()
        for path, size_bytes in self._walk(earliest):
            name = PurePosixPath(path).name
            if name.endswith(MARKER_SUFFIX) and name[:FILE_NAME_DIGITS].isdigit():
                listing.marked.add(parse_file_time(name))
            elif file := FeedFile.parse(path, size_bytes):
                listing.numbers.add(file.writer, file.number, file.at)
                if file.at >= earliest:
                    self._refuse_unreadable(file)
                    listing.files[path] = file
        listing.markers = {marker for marker in listing.marked if marker >= earliest}
        return listing

    def refuse_gap(self, lower: Frontier, listing: Listing) -> None:
        """Raise `HistoryLost` when the folder lacks what lies between `lower` and what is there."""
        if lost := self.lost(lower, listing):
            reached = _named_place(lower)
            raise HistoryLost(
                f"files of the changefeed were removed from {self._options.files} before they "
                "were read",
                detail=f"{lost} What was read ends at {reached}.",
                hint="Restore them from the bucket's versions. If you know that no row is lost, or "
                f"accept it, set `source.cockroachdb.accept_lost_after: {reached}`; else let a new "
                "changefeed write to a new folder, and read it into new tables.",
            )

    def lost(self, lower: Frontier, listing: Listing) -> str:
        """What the folder lacks for who goes on after `lower`; empty if nothing, or accepted."""
        resolved = resolved_of(lower)
        lost = ""
        if resolved and resolved not in listing.marked:
            marker = f"{file_time(resolved)}{MARKER_SUFFIX}"
            lost = f"The marker {marker}, which was committed last, is gone; later ones are there."
        needed = listing.numbers.needed(lower)
        if not lost and listing.numbers.first_gone(needed):
            # Older folders were not looked into, and a name may have come while others were listed.
            if gone := self.everything().numbers.first_gone(needed):
                lost = _gone(listing.files, *gone)
        if lost and self._options.accept_lost_after == _named_place(lower):
            log.warning("going on although files were removed: %s", lost)
            return ""
        return lost

    def _refuse_unreadable(self, file: FeedFile) -> None:
        """A file of a table that is wanted is read or refused, never passed over."""
        if not self._wanted(file.topic):
            return
        if file.format not in FORMATS:
            raise ConfigInvalid(
                f"files of the changefeed in {self._options.files} have the format {file.format}",
                detail=f"{PurePosixPath(file.path).name} cannot be read.",
                hint="Create the changefeed with format=json or format=parquet, into a new folder.",
            )
        if FAMILY_MARK in file.topic and file.topic not in self._options.tables:
            table, _, family = file.topic.rpartition(FAMILY_MARK)
            raise ConfigInvalid(
                f"the changefeed splits table {table} into column families",
                detail=f"{PurePosixPath(file.path).name} has the columns of family {family} alone. "
                "Each file has a part of its rows, and no table is made of the parts.",
                hint="Name the tables to take in `source.cockroachdb.tables` and leave this one "
                f"out; or name families there as tables of their own, such as `{file.topic}`, with "
                f"the primary key in `source.cockroachdb.keys: {{{file.topic}: [...]}}`.",
            )

    def _walk(self, earliest: Position) -> Iterator[tuple[str, int]]:
        """All files of the folder; dated folders before `earliest` are not entered."""
        pending = [self._path]
        oldest_day = datetime.fromtimestamp(earliest[0] / 1e9, UTC).date() if earliest else None
        while pending:
            try:
                entries = self.filesystem.get_file_info(pafs.FileSelector(pending.pop()))
            except OSError as error:
                raise SourceUnavailable(
                    f"could not list {self._options.files}",
                    detail=str(error),
                    hint="Check that the folder exists, and the storage's credentials.",
                ) from error
            for entry in entries:
                if entry.type == pafs.FileType.File:
                    yield entry.path, entry.size
                elif entry.type == pafs.FileType.Directory:
                    if _current(entry.base_name, oldest_day):
                        pending.append(entry.path)


def _gone(files: Mapping[str, FeedFile], writer: int, number: int) -> str:
    """What is said of a file that is missed; its writer is told by another file's name."""
    if writer == FORGOTTEN:
        return "So many writers are idle that the first ones are forgotten; files may be gone."
    names = sorted(path for path, file in files.items() if file.writer == writer)
    beside = f", of the writer of {PurePosixPath(names[0]).name}" if names else ""
    return f"File {number:08x}{beside}, is gone; later ones are there."


def named_earliest(markers: Sequence[Position], start: Position) -> Position:
    """Files named earlier than this hold nothing from `start` on; the markers are ascending.

    A file is begun after the marker before the one that closes it. So whatever may reach past
    `start` was begun after the last marker before it; some time is added for restarted feeds.
    """
    place = bisect.bisect_left(markers, start, key=lambda marker: (marker[0], marker[1] + 1))
    return (markers[place - 1][0] - REWIND_SECONDS * 10**9, 0) if place else ()


def _named_place(frontier: Frontier) -> str:
    """How `accept_lost_after` names the place that a frontier stands at."""
    resolved = resolved_of(frontier)
    return format_hlc(resolved) if resolved else FROM_THE_START


def _current(folder: str, oldest_day: Any) -> bool:
    """Whether a folder may hold current files: dated ones by their date, others always."""
    if oldest_day is None or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", folder):
        return True
    return folder >= str(oldest_day)
