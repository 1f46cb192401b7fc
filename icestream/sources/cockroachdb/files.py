"""Changefeeds that write files to cloud storage: one epoch per resolved timestamp.

A changefeed writes data files and, now and then, a marker `<timestamp>.RESOLVED`: every change up
to that timestamp R is in files that were there before the marker. So an epoch is the span between
two markers, and it may be read as soon as its marker was seen.

What looks like order is none: a file's name gives a lower bound of its rows at best, rows within
it are unsorted, rows later than R lie in files that sort before R's marker, and everything may be
delivered again at any time. Hence rows are chosen by their own `updated` timestamp alone, never by
file name or arrival, and duplicates vanish because two changes of a key at one timestamp are one.

The obvious listing is a race: a file and a marker that appear while the pages of a listing are
fetched may show the marker and hide the file. Files are therefore taken from a second listing that
began after the marker had been seen.

What the folder must still hold is in `folder`, what its files hold in `file_index`, what tables
look like in `file_shapes`; workers read a `file_split`.
"""

import bisect
import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from icestream.epoch import Epoch
from icestream.errors import SourceUnavailable
from icestream.frontier import START, Frontier, Position
from icestream.schema import TableShape
from icestream.sources import Budget, EpochPlan, Purpose, Remembered, Standing, StartPlan
from icestream.sources.cockroachdb import CockroachdbOptions
from icestream.sources.cockroachdb.feed import Changefeed, packed
from icestream.sources.cockroachdb.feed_file import FeedFile
from icestream.sources.cockroachdb.file_index import IndexFiles, IndexTask
from icestream.sources.cockroachdb.file_shapes import FileShapes
from icestream.sources.cockroachdb.file_split import FileSplit
from icestream.sources.cockroachdb.folder import MARKER_SUFFIX, Folder, Listing, named_earliest
from icestream.sources.cockroachdb.hlc import RESOLVED, after, resolved_of
from icestream.sources.cockroachdb.numbered import FOLDER, Numbered, beginning, remembered
from icestream.sources.cockroachdb.tables_read import only_deletes, tables_read, takes, without_rows

log = logging.getLogger(__name__)

# A frontier without changes is published after so much of the feed's time: the marker that the lake
# stands at must not grow so old that a lifecycle rule takes it.
PUBLISHED_SECONDS = 3600


class CockroachdbFiles(Changefeed):
    """The source over a folder of changefeed files; see the module and `Source`.

    The files are the feed's and stay, so nothing is given up. What they hold of a
    table that is new to the lake is found by `resume`, and a truncation is told row by row.
    """

    def __init__(
        self,
        options: CockroachdbOptions,
        pipeline: str,
        index: IndexFiles,
        budget: Budget,
    ):
        super().__init__(options, pipeline, budget)
        self._index = index
        self._files: dict[str, FeedFile] = {}
        self._markers: set[Position] = set()
        self._spans: dict[str, tuple[Position, Position]] = {}
        # A listing of everything, kept while a start asks for one table after the other.
        self._whole: Listing | None = None
        self._resumed = False
        self._folder = Folder(options, self._wanted)
        self._file_shapes = FileShapes(self._folder.filesystem, self.declared, self.named_key)

    def tables(self) -> Sequence[str]:
        """The tables that the folder has files of."""
        if not self._files:
            listing = self._everything()
            self._files, self._markers = listing.files, listing.markers
        found = sorted({file.topic for file in self._files.values()})
        return [topic for topic in found if self._wanted(topic)]

    def known_tables(self) -> Sequence[str]:
        """The tables, as far as they can be known; none when the folder cannot be read."""
        try:
            return self.tables()
        except SourceUnavailable:
            return list(self._options.tables)

    def shape(self, table: str) -> TableShape | None:
        """Columns and key from the rows of the table's first epoch; None if it only deletes."""
        return self._file_shapes.shape(table)

    def resume(self, remembered: Remembered) -> StartPlan:
        """Tables that lack rows which the folder still has are read from there.

        A table is fed when `tables` names it; the files that are known now may be the newest alone.
        Asked again after the claim, the folder is listed anew: until then another run may have
        gone past the first file of a table that it did not want.
        """
        if self._resumed:
            self._files, self._whole = {}, None
        self._resumed = True
        places = {
            table: self._read_from(table, remembered.upper(table), remembered.durable)
            for table in self.tables()
        }
        return StartPlan(
            behind={table: at for table, at in places.items() if at is not None},
            unfed=frozenset(itertools.filterfalse(self._wanted, remembered.progress)),
        )

    def _has_history(self, table: str, before: Frontier) -> bool:
        """Whether the folder has files of the table that were begun before a frontier."""
        files = self._everything().files.values()
        return any(file.topic == table and file.at < before[RESOLVED] for file in files)

    def _read_from(self, table: str, own: Frontier, durable: Frontier) -> Frontier | None:
        """What the table remembers, also when `tables` did not name it for a while.

        A table that is not there is read from the beginning, or from where it is known to have had
        nothing but deletes. It may also be new, and then nothing lies before; but in a folder that
        lacks files nobody can tell, and `available` has to ask.
        """
        if own != START:
            away = not own.covers(durable) and not takes(durable, table)
            return own if away else None
        if durable == START:
            return None
        known = without_rows(durable, table)
        if known == START:
            known = beginning(durable)
        else:
            self._file_shapes.without_rows.add(table)
        unsure = self._has_history(table, durable) or self._folder.lost(known, self._everything())
        return known if unsure else None

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """One boundary for each resolved timestamp after `lower`, thinned by `resolved_every`."""
        start = lower[RESOLVED]
        self._whole = None
        listing = self._folder.since(start, sorted(self._markers))
        markers = listing.markers
        if markers - self._markers:
            # Files that were uploaded before a marker are sure to be in a listing begun after it.
            listing = self._folder.since(start, sorted(self._markers))
        files = listing.files
        self._files, self._markers = files, markers
        # Other threads may learn meanwhile.
        self._spans = {p: span for p, span in list(self._spans.items()) if p in files}
        self._file_shapes.forget_but(files)
        if files and not markers:
            raise SourceUnavailable(
                f"there is no resolved timestamp in {self._options.files}",
                detail=f"It holds {len(files)} data files and no {MARKER_SUFFIX} file.",
                hint="Create the changefeed WITH updated, resolved; or wait for its first one.",
            )
        waiting = sorted(m for m in markers if (m[0], m[1] + 1) > start)
        if waiting:
            self._folder.refuse_gap(lower, listing)
        boundaries = self.thinned(
            start, waiting, [(0, size) for size in self._bytes_before(waiting)]
        )
        if boundaries:
            self._index_unknown(start, several=len(boundaries) > 1)
        return self._frontiers(boundaries, lower)

    def plan(self, epoch: Epoch) -> EpochPlan:
        """The files that hold rows of the epoch, or may, in splits of one table each."""
        return EpochPlan(parts=self._splits(epoch), milestone=partial(_long_idle, epoch))

    def _splits(self, epoch: Epoch) -> list[FileSplit]:
        lower, upper = epoch.lower[RESOLVED], epoch.upper[RESOLVED]
        wanted: dict[str, list[FeedFile]] = {}
        begun: dict[str, list[FeedFile]] = {}
        for file in sorted(self._files.values(), key=lambda file: file.path):
            first, last = self._spans.get(file.path, ((), (2**62, 0)))
            if self._wanted(file.topic) and first < upper:
                begun.setdefault(file.topic, []).append(file)
                if last > lower:
                    wanted.setdefault(file.topic, []).append(file)
        for table in wanted:
            self._file_shapes.keep(table, begun[table])
        return [
            self._split(table, files, lower, upper)
            for table, whole in wanted.items()
            for files in packed(whole, FeedFile.row_bytes, self._options.split_bytes)
        ]

    def verify(self, durable: Frontier) -> None:
        """Look once for what comes next."""
        self.available(durable)

    def was_read(
        self, epoch: Epoch, lessons: Sequence[Mapping[str, tuple[Position, Position]]]
    ) -> Mapping[str, str]:
        """Remember the span of timestamps of files that were read, so that none is read in vain.

        Only files of tables that are there are read, and these need no sample any more.
        """
        for learned in lessons:
            self._note_spans(learned)
        return self._labels(epoch)

    def standing(self, frontier: Frontier) -> Standing:
        """The resolved timestamp of a frontier."""
        return Standing(position=self._position(frontier), lag_seconds=self._lag_seconds(frontier))

    def _note_spans(self, learned: Mapping[str, tuple[Position, Position]]) -> None:
        self._spans.update(learned)
        for table in {file.topic for path in learned if (file := FeedFile.parse(path, 0))}:
            self._file_shapes.written(table)

    def _lag_seconds(self, durable: Frontier) -> float | None:
        """Time from the durable resolved timestamp to the newest one in the folder."""
        resolved = resolved_of(durable)
        if resolved is None or not self._markers:
            return None
        return max(0.0, (max(self._markers)[0] - resolved[0]) / 1e9)

    def _frontiers(self, boundaries: Sequence[Position], lower: Frontier) -> list[Frontier]:
        """The frontiers of resolved timestamps, with what the folder must keep after each."""
        files = [
            Numbered(
                writer=file.writer,
                number=file.number,
                at=file.at,
                **({"last": self._spans[path][1][0]} if path in self._spans else {}),
                # Nobody reads it after this frontier.
                **({} if self._wanted(file.topic) else {"last": 0}),
            )
            for path, file in self._files.items()
        ]
        known = sorted(self._markers)
        reached = [after(boundary) for boundary in boundaries]
        earliest = [named_earliest(known, at[RESOLVED]) for at in reached]
        since = [max(0, at[0]) if at else 0 for at in earliest]
        folders = remembered(boundaries, files, lower, since)
        seen = self._seen_without_rows([at[RESOLVED] for at in reached], lower)
        return [
            Frontier({**at.positions, FOLDER: folder})
            .join(tables_read(at[RESOLVED], self._options.tables, lower))
            .join(only_deletes(at[RESOLVED], tables, lower))
            for at, folder, tables in zip(reached, folders, seen, strict=True)
        ]

    def _seen_without_rows(
        self, bounds: Sequence[Position], lower: Frontier
    ) -> list[dict[str, Position]]:
        """For each bound the tables that only had deletes, and up to when that is sure.

        Mostly up to the bound before: what lies there may be removed by now, and the start asks for
        what came since. But epochs are planned ahead, and a row may wait in one of them.
        """
        candidates = set(self._file_shapes.without_rows)
        if not lower[RESOLVED]:
            candidates |= {file.topic for file in self._files.values() if self._wanted(file.topic)}
        first_row: dict[str, Position] = {}
        for path, file in self._files.items():
            if file.topic in candidates and path not in self._file_shapes.deletes:
                first = self._spans[path][0] if path in self._spans else file.at
                first_row[file.topic] = min(first, first_row.get(file.topic, first))
        seen = {t: at for t in candidates if (at := without_rows(lower, t)[RESOLVED])}
        found = []
        for before in [lower[RESOLVED], *bounds][:-1]:
            sure = {t for t in candidates if t not in first_row or before <= first_row[t]}
            seen = seen | (dict.fromkeys(sure, before) if before else {})
            found.append(seen)
        return found

    def _everything(self) -> Listing:
        """All that the folder has."""
        if self._whole is None:
            self._whole = self._folder.everything()
        return self._whole

    def _bytes_before(self, markers: Sequence[Position]) -> list[int]:
        """About how many bytes each marker brings: those of files begun since the one before."""
        sizes = [0] * len(markers)
        for file in self._files.values():
            number = bisect.bisect_left(markers, file.at)
            if number < len(markers):
                sizes[number] += file.size_bytes
        return sizes

    def _index_unknown(self, start: Position, several: bool) -> None:
        """Learn the spans of files that several pending epochs would otherwise all have to read.

        And of those begun before `start`: most have nothing new, which spares the epoch to read
        them, and the frontier to say that they must stay.
        """
        unknown = [
            IndexTask(location=self._options.files, storage=self._options.storage, file=file)
            for file in self._files.values()
            if file.path not in self._spans
            and self._wanted(file.topic)
            and (several or file.at < start)
        ]
        for path, first, last, rowless in self._index(unknown) if unknown else ():
            self._spans[path] = (first, last)
            if rowless:
                self._file_shapes.deletes.add(path)

    def _split(
        self, table: str, files: Sequence[FeedFile], lower: Position, upper: Position
    ) -> FileSplit:
        return FileSplit(
            table=table,
            location=self._options.files,
            storage=self._options.storage,
            files=files,
            lower=lower,
            upper=upper,
            declared=self.declared(table),
            source_key=self.named_key(table),
        )


def _long_idle(epoch: Epoch, durable: Frontier) -> bool:
    """Whether so much time of the feed has passed that an idle frontier is published."""
    before, now = durable[RESOLVED], epoch.upper[RESOLVED]
    return bool(before) and now[0] - before[0] >= PUBLISHED_SECONDS * 10**9
