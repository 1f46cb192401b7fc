"""What a worker tells the coordinator: typed here, encoded here, decoded here.

    worker ── Report, Done, Raised ──encode──► rows of a Spark frame ──decode──► coordinator

A `Report` is something that a sink's writer made and that the commit needs: a file, or documents
that were sent. `Done` ends a task, after all its reports. `Raised` is an error that a person must
decide on, or something that a split asks for: as a value it arrives whole, while a task that raised
it would be tried again for nothing.

What a worker counts (`icestream.metrics`) travels with what it reports and is added up when that is
decoded. Reports live as long as an epoch and are stored nowhere.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icestream import metrics

REPORT = "report"

Row = tuple[str, int, bytes]
"""What tasks hand on: a kind, a bucket and a payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something that was written for a table, and waits for its commit.

    The engine reads `table`, the table's name at the source, and `size_bytes`, for the log. The
    sink whose writer made the report gives `kind`, `rows` and `payload` their meaning. `payload` is
    plain data and has all else that the commit needs, such as the shard and the attempt.
    """

    table: str
    kind: str
    rows: int
    size_bytes: int
    payload: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A task has reported all that it wrote: the changes it read, and what it tells its source.

    `columns_seen` are the columns of a table's first epoch that were met; see
    `icestream.sources.named_columns`.
    """

    rows: int = 0
    learned: object = None
    columns_seen: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Raised:
    """What a task ended with instead of being done."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a worker has counted since it last said so."""

    counts: metrics.Counts


Message = Report | Done | Raised


def encode(message: Message) -> Row:
    """The message as it leaves a worker."""
    return _row(message)


def encode_counts() -> Iterator[Row]:
    """What this worker has counted, if it has; to be sent after all else of a task."""
    if counts := metrics.drained_counts():
        yield _row(_Counted(counts))


def decode(rows: Iterable[Row]) -> list[Message]:
    """The messages of workers, in the order of the rows; what they counted is added up."""
    messages = []
    for kind, _, payload in rows:
        if kind != REPORT:
            raise ValueError(f"a row of kind {kind} is no message")
        message = pickle.loads(payload)
        if isinstance(message, _Counted):
            metrics.add(message.counts)
        else:
            messages.append(message)
    return messages


def describe(reports: Sequence[Report]) -> dict[str, int]:
    """Counts of what was reported, for the log."""
    return {"files": len(reports), "bytes": sum(report.size_bytes for report in reports)}


def _row(message: Message | _Counted) -> Row:
    return REPORT, 0, pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
