"""Iceberg tables as a source: a load of one snapshot, then every change, snapshot by snapshot.

Each table is a stream of its own. The frontier has for each `table <name> <uuid> <identifiers>`
where it stands (`positions`). Sequence numbers only rise, and the name carries the table's identity
and that of its rows, so a rollback, an expired history (`History.since`), a table replaced under
the same name and other identifier columns are all noticed.

An epoch moves one table: by a group of files while it is loaded, later by one snapshot, or by
several that are there and small (`group_bytes`), or by all that are there with `net_changes`.
Several are taken as the difference that they make together.

What a run sends may be seen before its progress is. An example: run 1 sends snapshot 13 and dies.
Row 5 is in snapshot 13 and was deleted in 14. If run 2 went from 12 straight to 14, it would see no
change of row 5, and document 5 would stay. So run 1 first writes `(12, 1, 13)`, by an epoch without
changes, and run 2 takes 13 before 14. Before a load `(number, 0, 0)` is written. When the branch
is rolled back to before a snapshot that was chosen, the run that takes over stops: documents of
that snapshot may be there, and nobody knows which.
"""

import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from pyiceberg.types import IcebergType, NestedField, StructType, UnknownType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tqdm import tqdm

from icestream.change import Op
from icestream.destination import Destination
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid, SourceUnavailable, TableReplaced, TargetUnavailable
from icestream.frontier import MINIMUM, Frontier, Position
from icestream.iceberg.gateway import replaced
from icestream.iceberg.snapshots import Files, Snapshot, Stage
from icestream.iceberg.table import Table
from icestream.schema import Column, TableShape, schema_from_json
from icestream.sources import (
    FRAME_ID,
    FRAME_OP,
    FRAME_ROW,
    EpochPlan,
    FramePart,
    Purpose,
    Remembered,
    Source,
    Standing,
    StartPlan,
    always,
    never,
)
from icestream.sources.iceberg.changelog import (
    ACTION,
    BY_PLACE,
    BY_ROW_ID,
    DELETE,
    DOCUMENT_ID,
    INSERT,
    OPERATION,
    ROW,
    Changelog,
)
from icestream.sources.iceberg.options import IcebergSourceOptions, IcebergTableOptions
from icestream.sources.iceberg.positions import (
    BEFORE_ALL,
    FOLLOWING,
    LOADING,
    aimed,
    begins_load,
    grouped,
    is_choice,
    load_anew,
    loads,
)

log = logging.getLogger(__name__)

_MILLISECONDS = 1000.0
_ANEW = (
    "remove the pipeline's progress and what it has written, so that the table is loaded anew. "
    "Where it fills Iceberg tables, each of them is progress: drop all of them, or have this table "
    "filled by a pipeline of another name"
)


# What most of these pipelines fill.
_INDICES = Destination(seen_early=True)


class Anything(UnknownType):
    """The type of a column whose values may have any shape; as text it is an unknown type."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnknownType)

    def __hash__(self) -> int:
        return hash(UnknownType)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """A table of the pipeline."""

    name: str
    options: IcebergTableOptions
    table: Table
    changelog: Changelog

    @property
    def partition(self) -> str:
        return f"table {self.name} {self.changelog.history.uuid} {self.changelog.identifiers}"


@dataclass(frozen=True, slots=True)
class EventFrame:
    """The changes of one epoch, read by Spark; `events` makes them anew each time it is asked."""

    table: str
    version: int
    identified: bool
    columns: Sequence[Column]
    size_bytes: int
    events: Callable[[Stage], DataFrame | None]
    stage: Stage

    @property
    def tables(self) -> Collection[str]:
        """The one table."""
        return (self.table,)

    def frame(self) -> DataFrame | None:
        """The changes; None when there are none. They can be used until `close`."""
        events = self.events(self.stage)
        if events is None:
            return None
        deleted, added = F.col(ACTION) == DELETE, F.col(OPERATION) == INSERT
        op = F.when(deleted, int(Op.DELETE)).when(added, int(Op.INSERT)).otherwise(int(Op.UPSERT))
        return events.select(
            op.alias(FRAME_OP), F.col(DOCUMENT_ID).alias(FRAME_ID), F.col(ROW).alias(FRAME_ROW)
        )

    def close(self) -> None:
        """Let go of what was staged."""
        self.stage.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChanges:
    """A table without changes, whose copy has to be there nevertheless."""

    table: str
    version: int
    identified: bool
    columns: Sequence[Column]
    size_bytes: int = 0

    @property
    def tables(self) -> Collection[str]:
        """The one table."""
        return (self.table,)

    def frame(self) -> DataFrame | None:
        """None: there are no changes."""
        return None

    def close(self) -> None:
        """Nothing was staged."""
        return None


class IcebergSource(Source):
    """See the module and `icestream.sources.Source`."""

    key_in_one_split = True

    def __init__(
        self,
        options: IcebergSourceOptions,
        spark: SparkSession,
        open_table: Callable[[IcebergTableOptions], Table],
        destination: Destination = _INDICES,
    ):
        self._options = options
        self._spark = spark
        self._open_table = open_table
        self._destination = destination
        self._followed: dict[str, _Followed] = {}
        self._shapes: dict[str, TableShape] = {}
        self._heads: dict[str, Position] = {}
        # When each snapshot of a table that may be waited for was made, by sequence numbers.
        self._times: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._looked_for_shared: set[str] = set()
        # Where the tables stood that the destination lacks, by their partitions.
        self._dropped: Mapping[str, Position] = {}
        self._bars: dict[str, tuple[tqdm, Sequence[int]]] = {}

    def tables(self) -> Sequence[str]:
        """The tables that the configuration names; each must exist."""
        return [self._follow(table).name for table in self._options.tables]

    def known_tables(self) -> Sequence[str]:
        """The same names, without asking for the tables."""
        return [table.table_name for table in self._options.tables]

    def shape(self, table: str) -> TableShape | None:
        """Columns and key of the snapshot that is read."""
        return self._shapes.get(table)

    def table_id(self, table: str) -> str:
        """The uuid of the table."""
        return self._followed[table].changelog.history.uuid

    def resume(self, remembered: Remembered) -> StartPlan:
        """No table lies behind: one that was added or dropped is loaded in its turn."""
        stood = remembered.durable.positions.items()
        self._dropped = {name: at for name, at in stood if _table_of(name) in remembered.missing}
        return StartPlan(unfed=frozenset(remembered.progress.keys() - {*self.known_tables()}))

    def available(self, lower: Frontier, purpose: Purpose | None = None) -> Sequence[Frontier]:
        """Groups of files while a table is loaded, then one snapshot after the other."""
        with _as_source():
            self._refuse_replaced(self._options.tables, lower)
            streams = [
                [(each.partition, position) for position in self._positions(each, lower)]
                for each in map(self._follow, self._options.tables)
            ]
        bounds, at = [], lower
        # Side by side: a long load of one table does not keep the others waiting.
        for found in chain.from_iterable(zip_longest(*streams)):
            if found is not None:
                at = at.join(Frontier(dict([found])))
                bounds.append(at)
        if not self._heads:
            self._heads = dict(at.positions)
        return bounds

    def verify(self, durable: Frontier) -> None:
        """Raise what would stop a run: a missing table, an expired or rolled-back history."""
        self.available(durable)

    def verify_table(self, table: str, durable: Frontier) -> None:
        """The same for one table; nothing for one that the configuration does not name."""
        named = [options for options in self._options.tables if options.table_name == table]
        with _as_source():
            self._refuse_replaced(named, durable)
            for options in named:
                self._positions(self._follow(options), durable)

    def plan(self, epoch: Epoch) -> EpochPlan:
        """The one table that an epoch moves, and what to read of it.

        A milestone: what was looked at without finding a change need not be looked at again. A
        choice is one where what is sent can be seen before it is committed, and where no load
        follows: a later start would choose another snapshot and skip what lies between.
        """
        found, looked = [], self._destination.seen_early
        for each in map(self._follow, self._options.tables):
            before, after = epoch.lower[each.partition], epoch.upper[each.partition]
            if before != after:
                split = self._split(each, before, after)
                found += [split] if split else []
                looked |= split is not None or not is_choice(before, after)
        return EpochPlan(parts=found, milestone=always if looked else never)

    def standing(self, frontier: Frontier) -> Standing:
        """Where each table stands, by sequence numbers.

        Caught up is what has all that was there at the first look. A load that goes on, of a newer
        snapshot, has not.
        """
        ours = [frontier[each.partition] for each in self._followed.values()]
        loading = any(loads(at) for at in ours if at)
        return Standing(
            position=self._position(frontier),
            lag_seconds=self._lag_seconds(frontier),
            caught_up=bool(self._heads) and not loading and frontier.covers(Frontier(self._heads)),
        )

    def _position(self, frontier: Frontier) -> str:
        texts = []
        for partition, at in sorted(frontier.positions.items()):
            name = _table_of(partition)
            loading = f" ({at[2]} files loaded)" if at and loads(at) else ""
            texts.append(f"{name} {max(at[0], 0)}{loading}" if at else f"{name} -")
        return ", ".join(texts)

    def _lag_seconds(self, durable: Frontier) -> float | None:
        """Time from the durable snapshot to the newest, of the table that is behind most."""
        lags = []
        for each in self._followed.values():
            times, at = self._times[each.name], durable[each.partition]
            mine = times.get(at[0]) if at else None
            if mine is not None:
                lags.append((times[max(times)] - mine) / _MILLISECONDS)
        return max(lags, default=None)

    def ack(self, durable: Frontier) -> None:
        """Show how far a load has come; how long history is kept, the table's owner decides."""
        for each in self._followed.values():
            at = durable[each.partition]
            if not at:
                continue
            times = self._times[each.name]
            for number in [number for number in times if number < at[0]]:
                del times[number]
            bar, sizes = self._bars.get(each.name, (None, ()))
            if bar is not None:
                bar.update(sum(sizes[: at[2]] if loads(at) else sizes) - bar.n)
                if not loads(at):
                    bar.close()
                    del self._bars[each.name]

    def close(self) -> None:
        """Take the bars away."""
        for bar, _ in self._bars.values():
            bar.close()

    def _follow(self, options: IcebergTableOptions) -> _Followed:
        found = self._followed.get(options.table_name)
        if found is None:
            table = self._open_table(options)
            key = self._key(options)
            # A destination of rows has no place for names that are made of files.
            places = self._destination.seen_early
            changelog = Changelog(self._spark, table, key, places=places)
            if not changelog.identified:
                log.warning(
                    "table %s has no identifier columns: only inserts can be taken",
                    options.table_name,
                )
            found = _Followed(
                name=options.table_name, options=options, table=table, changelog=changelog
            )
            self._followed[options.table_name] = found
        return found

    def _key(self, options: IcebergTableOptions) -> Sequence[str]:
        """The identifier columns, which the destination may name as well, but not others."""
        own, asked = options.identifier_columns, self._destination.key(options.table_name)
        if own and asked and list(own) != list(asked):
            raise ConfigInvalid(
                f"source and sink name other columns that identify a row of {options.table_name}",
                detail=f"The source: {', '.join(own)}; the sink: {', '.join(asked)}.",
                hint="Leave them out at the sink.",
            )
        return own or asked

    def _refuse_replaced(self, tables: Sequence[IcebergTableOptions], lower: Frontier) -> None:
        """A table that was read under another identity must not be taken for the same."""
        current = {each.name: each.partition for each in map(self._follow, tables)}
        for partition in lower.positions:
            name, identity = _table_of(partition), partition.split(" ")[-2]
            if name not in current or current[name] == partition:
                continue
            if self._nothing_written(lower[partition]):
                continue
            if current[name].split(" ")[-2] == identity:
                raise _called_otherwise(name, partition, current[name])
            raise replaced(name)

    def _nothing_written(self, at: Position) -> bool:
        """Whether the load of a table has yet to bring its first row, so that none can stay."""
        return begins_load(at) and not self._destination.seen_early

    def _positions(self, each: _Followed, lower: Frontier) -> list[Position]:
        """All positions of a table that lie ahead and can be reached now."""
        at, history, branch = lower[each.partition], each.changelog.history, self._options.branch
        head = history.head(branch)
        if each.changelog.identifiers_now() != each.changelog.identifiers:
            raise _called_otherwise(each.name, BY_PLACE, each.changelog.identifiers_now())
        if head is not None:
            self._times[each.name][head.sequence_number] = head.time_ms
        if at == MINIMUM and (head is None or each.options.disable_export):
            return [(head.sequence_number if head else BEFORE_ALL, FOLLOWING)]
        begin = self._load_ahead(each, at, head)
        ahead = [begin] if begin else []
        number, state, *rest = begin or at
        if loads(begin or at):
            # What came since the load began is there as well.
            ahead += self._load_positions(each, history.at(branch, number), state, rest.pop())
            state += FOLLOWING
        if rest:
            # Raises when the snapshot that was chosen is no longer there.
            history.at(branch, rest[0])
        newer = self._newer(each, number)
        for snapshot in newer:
            self._times[each.name][snapshot.sequence_number] = snapshot.time_ms
        return [*ahead, *aimed((number, state), rest, newer, self._steps)]

    def _load_ahead(self, each: _Followed, at: Position, head: Snapshot | None) -> Position | None:
        """Where the load of a table begins that is new, or whose copy is gone; None for others."""
        if head is None:
            return None
        if at == MINIMUM:
            return (head.sequence_number, LOADING, 0)
        gone = self._dropped.get(each.partition) == at and not each.options.disable_export
        return load_anew(at, head.sequence_number) if gone else None

    def _steps(self, ahead: Sequence[Snapshot]) -> list[Sequence[Snapshot]]:
        """The snapshots that are ahead, in the groups that are taken in one step each."""
        if self._options.net_changes:
            return [ahead] if ahead else []
        return grouped(ahead, self._options.group_bytes)

    def _newer(self, each: _Followed, number: int) -> list[Snapshot]:
        """The snapshots after the one of this number."""
        history, branch = each.changelog.history, self._options.branch
        return history.since(branch, None if number == BEFORE_ALL else number)

    def _load_positions(
        self, each: _Followed, snapshot: Snapshot, state: int, done: int
    ) -> list[Position]:
        """Groups of files of about `load_bytes`, and last the end of the load."""
        self._times[each.name][snapshot.sequence_number] = snapshot.time_ms
        sizes = each.changelog.history.files(snapshot).sizes
        self._show(each, sizes, done)
        positions: list[Position] = []
        gathered = 0
        for number in range(done, len(sizes)):
            gathered += sizes[number]
            if gathered >= self._options.load_bytes and number + 1 < len(sizes):
                positions.append((snapshot.sequence_number, state, number + 1))
                gathered = 0
        return [*positions, (snapshot.sequence_number, state + FOLLOWING)]

    def _show(self, each: _Followed, sizes: Sequence[int], done: int) -> None:
        """A bar for the load of a table, where somebody can see it."""
        if sys.stderr.isatty() and each.name not in self._bars:
            bar = tqdm(
                total=sum(sizes),
                initial=sum(sizes[:done]),
                unit="B",
                unit_scale=True,
                desc=f"loading {each.name}",
                file=sys.stderr,
                leave=False,
            )
            self._bars[each.name] = bar, sizes

    def _split(self, each: _Followed, before: Position, after: Position) -> FramePart | None:
        if before == MINIMUM and not loads(after) and each.options.disable_export:
            return self._beginning(each, after)
        if is_choice(before, after):
            return None
        if loads(before):
            return self._load_split(each, before, after)
        return self._change_split(each, before[0], after[0])

    def _beginning(self, each: _Followed, after: Position) -> FramePart | None:
        """Has the copy made that remembers where it begins; others remember that by themselves."""
        if self._destination.seen_early:
            return None
        with _as_source():
            shape = self._shape(each, each.table.schema_json())
        return NoChanges(
            table=each.name,
            version=max(after[0], 0),
            identified=each.changelog.identified,
            columns=shape.columns,
        )

    def _load_split(self, each: _Followed, before: Position, after: Position) -> FramePart:
        history = each.changelog.history
        snapshot = history.at(self._options.branch, after[0])
        files: Files = history.files(snapshot)
        start = before[2]
        end = after[2] if loads(after) else len(files.sizes)

        def events(stage: Stage) -> DataFrame | None:
            with _as_source():
                history.at(self._options.branch, after[0])
            if not loads(after) and each.name not in self._looked_for_shared:
                each.changelog.tell_shared(files.tasks, snapshot, stage)
                self._looked_for_shared.add(each.name)
            return each.changelog.load(files.part(start, end), snapshot, stage)

        return self._event_split(each, snapshot, events, sum(files.sizes[start:end]))

    def _change_split(self, each: _Followed, before: int, after: int) -> FramePart | None:
        def found() -> tuple[Snapshot | None, list[Snapshot]]:
            start = None if before == BEFORE_ALL else before
            with _as_source():
                return each.changelog.history.path(self._options.branch, start, after)

        _, path = found()
        newest = path[-1]
        if len(path) == 1 and newest.keeps_rows:
            return None

        def events(stage: Stage) -> DataFrame | None:
            # Looked up each time: files that cannot be read may belong to expired snapshots.
            return each.changelog.changes(*found(), stage)

        return self._event_split(each, newest, events, 0)

    def _event_split(
        self,
        each: _Followed,
        snapshot: Snapshot,
        events: Callable[[Stage], DataFrame | None],
        size_bytes: int,
    ) -> FramePart:
        shape = self._shape(each, each.changelog.history.schema_json(snapshot))
        return EventFrame(
            each.name,
            snapshot.sequence_number,
            each.changelog.identified,
            shape.columns,
            size_bytes,
            events,
            Stage(each.table, snapshot.schema_id),
        )

    def _shape(self, each: _Followed, schema_json: str) -> TableShape:
        """The table by one of its schemas, for whoever has to make its copy."""
        uuid, key = each.changelog.history.uuid, self._key(each.options)
        shape = TableShape(columns=_columns(schema_json), key=key, table_id=uuid)
        self._shapes[each.name] = shape
        return shape


@contextmanager
def _as_source() -> Iterator[None]:
    """Say what goes wrong with a table in the words of one who reads it."""
    try:
        yield
    except TargetUnavailable as error:
        # A catalog that does not answer is the source here.
        raise SourceUnavailable(error.message, detail=error.detail, hint=error.hint) from error
    except TableReplaced as error:
        raise TableReplaced(
            error.message,
            detail="The table of this name is another one than the pipeline has read.",
            hint=f"{_ANEW[0].upper()}{_ANEW[1:]}.",
        ) from error


def _called_otherwise(name: str, before: str, now: str) -> ConfigInvalid:
    """What to say of a table whose documents would be called by something else than so far."""
    was, becomes = before.split(" ")[-1], now.split(" ")[-1]
    if (was, becomes) == (BY_PLACE, BY_ROW_ID):
        return ConfigInvalid(
            f"table {name} was upgraded to format version 3",
            detail="Its documents are called by the places of their rows so far, and would be "
            "called by row ids from now on: each row that is written again would be there twice.",
            hint=f"Set `identifier_columns` or let it be, and {_ANEW}.",
        )
    return ConfigInvalid(
        f"table {name} was read with other identifier columns",
        detail="What was written under the old identifiers would stay for ever.",
        hint=f"Put them back; or {_ANEW}.",
    )


def _columns(schema_json: str) -> list[Column]:
    fields = json.loads(schema_json)["fields"]
    return [Column(name=each["name"], type=_type(each)) for each in fields]


def _type(field_json: Mapping[str, Any]) -> IcebergType:
    """A field's type; where it is not known here, such as a variant, it may be anything."""
    try:
        whole = json.dumps({"type": "struct", "fields": [field_json]})
        return schema_from_json(whole).fields[0].field_type
    except ValueError:
        kind = field_json["type"]
    if isinstance(kind, dict) and kind["type"] == "struct":
        parts = [
            NestedField(field_id=each["id"], name=each["name"], field_type=_type(each))
            for each in kind["fields"]
        ]
        return StructType(*parts)
    return Anything()


def _table_of(partition: str) -> str:
    """The table's name in the name of its partition; it may hold blanks."""
    return partition.removeprefix("table ").rsplit(" ", 2)[0]
