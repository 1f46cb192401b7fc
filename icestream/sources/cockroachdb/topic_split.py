"""Ranges of one topic, read by a worker: the rows of a span of timestamps become changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from pyiceberg.types import IcebergType

from icestream.errors import DataRejected
from icestream.formats.json_cells import MalformedJson, values
from icestream.formats.json_columns import infer_type
from icestream.formats.rows import Records
from icestream.frontier import Position
from icestream.schema import Column, Reads, TableShape, joined_columns, schema_from_json
from icestream.sources import TableSplit
from icestream.sources.cockroachdb.feed import refuse_other_key
from icestream.sources.cockroachdb.index import BATCH_BYTES
from icestream.sources.cockroachdb.messages import told_apart
from icestream.sources.cockroachdb.rows import KeySearch, Reader, Rows, plain_key, rows_of
from icestream.sources.kafka.consumer import Range, read_range
from icestream.sources.named_columns import ColumnsSeen, Seen

SAMPLE_BYTES = 4 * 1024**2
WRITE_AS = "CREATE CHANGEFEED ... INTO 'kafka://...' WITH updated, resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Some records of a partition, as errors name them."""

    range: Range
    offsets: np.ndarray

    @property
    def name(self) -> str:
        return str(replace(self.range, start=int(self.offsets[0]), end=int(self.offsets[-1]) + 1))

    def damaged(self, what: str) -> DataRejected:
        return DataRejected(
            f"cannot read {self.name}",
            detail=what,
            hint="Nothing of the epoch was committed. Only rows of a changefeed may be in a topic.",
        )

    def refused(self, place: int, why: str) -> DataRejected:
        """The error for one of the records."""
        return DataRejected(
            f"a record of topic {self.range.topic} is not a row of a changefeed with timestamps",
            detail=f"Partition {self.range.partition}, offset {self.offsets[place]}: {why}.",
            hint=f"Write the topic with {WRITE_AS}, in the envelope wrapped, enriched (with "
            "enriched_properties=source) or bare.",
        )


def rows_within(where: Range, records: Records, lower: Position, upper: Position) -> Rows | None:
    """The rows among records whose timestamps lie in `[lower, upper)`; None when there is none.

    A record that is neither a row with a timestamp nor a resolved timestamp is refused.
    """
    messages = told_apart(records)
    place = _Place(range=where, offsets=records.offsets)
    if messages.broken:
        raise place.refused(*min(messages.broken.items()))
    lacking = messages.rows[~messages.known]
    if len(lacking):
        there = records.values[int(lacking[0])].is_valid
        why = "the row has no `updated` timestamp" if there else "the record has no value"
        raise place.refused(int(lacking[0]), why)
    keyless = messages.rows[records.keys.is_null().to_numpy(zero_copy_only=False)[messages.rows]]
    if len(keyless):
        raise place.refused(int(keyless[0]), "the row has no key")
    walls, logicals = messages.walls, messages.logicals
    inside = _from(walls, logicals, lower) & ~_from(walls, logicals, upper)
    chosen = np.flatnonzero(inside)
    if len(chosen) == 0:
        return None
    keys, broken_keys = values(records.keys.take(pa.array(messages.rows[chosen])))
    if broken_keys:
        row, why = min(broken_keys.items())
        raise place.refused(int(messages.rows[chosen[row]]), f"in the key: {why}")
    try:
        rows = rows_of(place, {name: cells.take(chosen) for name, cells in messages.top.items()})
        return replace(rows, key=plain_key(keys))
    except MalformedJson as error:
        raise place.damaged(f"{error.reason}.") from error


def _from(walls: np.ndarray, logicals: np.ndarray, bound: Position) -> np.ndarray:
    wall, logical = bound
    return np.asarray((walls > wall) | ((walls == wall) & (logicals >= logical)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSplit(TableSplit):
    """Ranges of one topic, of which the rows within `[lower, upper)` are read."""

    table: str
    settings: Mapping[str, str] = field(repr=False)
    read_timeout: float
    ranges: Sequence[Range]
    lower: Position
    upper: Position
    declared: Mapping[str, IcebergType]
    source_key: Sequence[str]
    size_bytes: int
    each_key_once: bool = False
    seen: dict[tuple[str, str], Seen] = field(default_factory=dict, compare=False)

    def read(
        self, schema_json: str, key: Sequence[str], reads: Reads | None = None
    ) -> Iterator[pa.Table]:
        """Change batches, some for each range."""
        schema = schema_from_json(schema_json)
        reader = Reader(self.table, schema, list(self.source_key or key), self.declared, reads)
        refuse_other_key(self.table, self.source_key, key)
        for where, records in self.records():
            rows = rows_within(where, records, self.lower, self.upper)
            if rows is not None:
                place = _Place(range=where, offsets=records.offsets)
                try:
                    yield reader.read_rows(place, rows)
                except MalformedJson as error:
                    raise place.damaged(f"{error.reason}.") from error
        self.seen.update(reader.seen)

    def records(self) -> Iterator[tuple[Range, Records]]:
        """The records of its ranges."""
        for where in self.ranges:
            batches = read_range(
                self.settings, where, read_timeout=self.read_timeout, batch_bytes=BATCH_BYTES
            )
            yield from ((where, records) for records in batches)

    def with_stored(self, table: str, values: pa.Table | None) -> "TopicSplit":
        """Itself: a changefeed leaves nothing out."""
        return self

    def learned(self) -> str:
        """That the table was there to be read for."""
        return self.table

    def columns_seen(self) -> ColumnsSeen:
        """What its rows tell of columns; see `ComparedSplit`."""
        return self.seen


def shape_from(samples: Sequence[TopicSplit]) -> TableShape | None:
    """Columns and key of a table from its first rows, given as splits of it; None without any."""
    if not samples:
        return None
    table, declared, named = samples[0].table, samples[0].declared, samples[0].source_key
    columns: list[Column] = []
    search = KeySearch()
    read = 0
    for split, where, records in ((s, *each) for s in samples for each in s.records()):
        try:
            rows = rows_within(where, records, split.lower, split.upper)
        except DataRejected:
            # It may be of a later epoch; this one can be written if enough is known.
            if columns and (named or search.settled):
                break
            raise
        read += records.values.nbytes
        if rows is None:
            continue
        columns = joined_columns(columns, _columns(rows, declared))
        if not named:
            search.look(_Place(range=where, offsets=records.offsets), table, rows)
        if read > SAMPLE_BYTES and columns and (named or search.settled):
            break
    key = named or search.key(table)
    if not columns or not key:
        return None
    return TableShape(columns=sorted(columns, key=lambda column: column.name), key=key)


def _columns(rows: Rows, declared: Mapping[str, IcebergType]) -> list[Column]:
    kinds = {name: declared.get(name) or infer_type(cells) for name, cells in rows.columns.items()}
    return [Column(name=name, type=kind) for name, kind in kinds.items() if kind]
