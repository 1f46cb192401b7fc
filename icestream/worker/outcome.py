"""What the tasks of an epoch tell the coordinator, and what it makes of that.

What a worker tells is typed in `icestream.report`. Errors that a person must decide on are reported
as values: a task that raised them would be retried for nothing and its message lost in Spark's. So
are icestream's own defects. A task reports that it is done only after all its files are reported.
"""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icestream.errors import Broken, IcestreamError, check
from icestream.report import Done, Raised, Report, Row, decode, encode, encode_counts
from icestream.schema import SchemaGap
from icestream.sources import TablesUnready, ValuesNeeded, joined_needs
from icestream.sources.named_columns import refuse_gone

# What no second attempt makes go away: the same changes give them again, on every worker.
_DEFECTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
# What a split asks for, and what a person must decide.
_TOLD = (IcestreamError, SchemaGap, TablesUnready, ValuesNeeded)
_FRAMES_SHOWN = 3


class Unready(Exception):
    """The tables do not take an epoch yet: what each split found lacking, columns or tables."""

    def __init__(self, lacks: Sequence[SchemaGap | TablesUnready]):
        super().__init__("; ".join(map(str, lacks)))
        self.lacks = lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all tasks of an epoch reported."""

    reports: Sequence[Report]
    rows: int
    learned: Sequence[object]


def outcome_of(rows: Iterable[Row], tasks: int) -> Outcome:
    """What all tasks reported; raises the first error among it."""
    messages = decode(rows)
    errors = [message.error for message in messages if isinstance(message, Raised)]
    for error in errors:
        if isinstance(error, IcestreamError):
            raise error
    needed = [error for error in errors if isinstance(error, ValuesNeeded)]
    lacks = [error for error in errors if isinstance(error, SchemaGap | TablesUnready)]
    check(len(needed) + len(lacks) == len(errors), "a worker tells what the coordinator knows")
    if lacks:
        raise Unready(lacks)
    if needed:
        raise joined_needs(needed)
    done = [message for message in messages if isinstance(message, Done)]
    check(len(done) >= tasks, "every task of the epoch reports that it is done")
    refuse_gone([each.columns_seen for each in done])
    return Outcome(
        reports=[message for message in messages if isinstance(message, Report)],
        rows=sum(each.rows for each in done),
        learned=[each.learned for each in done],
    )


def errors_as_messages(work: Iterator[Any]) -> Iterator[Any]:
    """What a task gives; an error that no second attempt makes go away is its last message."""
    try:
        yield from work
    except _TOLD as error:
        yield encode(Raised(error))
    except _DEFECTS as error:
        yield encode(Raised(_broken(error)))


def with_counts(work: Iterator[Any]) -> Iterator[Any]:
    """What a task gives, and then what it has counted."""
    yield from work
    yield from encode_counts()


def _broken(error: Exception) -> Broken:
    """Where a worker broke; what the error says is left out, for it may quote a row."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return Broken(
        "a worker met an error that nobody foresaw",
        detail=f"{type(error).__name__} at {', '.join(places)}.",
        hint="Nothing of the epoch was committed. Please report this as a defect of icestream.",
    )
