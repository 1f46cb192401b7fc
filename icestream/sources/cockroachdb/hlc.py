"""Timestamps of CockroachDB, and the frontiers that they make.

A timestamp is a pair: nanoseconds of the wall clock, and a counter for what happens within one of
them. Both are whole numbers and are compared as such, never by way of a float.
"""

import re
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from icestream.errors import DataRejected
from icestream.frontier import Frontier, Position

RESOLVED = "resolved"
LOGICAL_DIGITS = 10
FILE_NAME_DIGITS = 33
_HLC = re.compile(r"(\d+)\.(\d{10})\??")
# A wall clock that 64 bits hold; the mark behind it says that no clock has shown it yet.
HLC_PATTERN = r"(?:\d{1,18}|[0-8]\d{18})\.\d{10}\??"


def parse_hlc(text: str) -> Position:
    """`<wall nanoseconds>.<logical, 10 digits>` as a position; never by way of a float."""
    found = _HLC.fullmatch(text)
    if not found:
        raise DataRejected(
            f"{text[:40]!r} is not a CockroachDB timestamp",
            hint="A timestamp has the form 1701102296662969433.0000000000.",
        )
    return int(found[1]), int(found[2])


def format_hlc(position: Position) -> str:
    """The inverse of `parse_hlc`."""
    wall, logical = position
    return f"{wall}.{logical:0{LOGICAL_DIGITS}d}"


def parse_file_time(digits: str) -> Position:
    """The 33 digits of a file name: date and time in UTC, nanoseconds, logical counter."""
    at = datetime.strptime(digits[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    wall = int(at.timestamp()) * 1_000_000_000 + int(digits[14:23])
    return wall, int(digits[23:FILE_NAME_DIGITS])


def file_time(at: Position) -> str:
    """The inverse of `parse_file_time`."""
    seconds, nanoseconds = divmod(at[0], 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y%m%d%H%M%S}{nanoseconds:09d}{at[1]:0{LOGICAL_DIGITS}d}"


def after(resolved: Position) -> Frontier:
    """The frontier that includes everything up to and with a resolved timestamp."""
    wall, logical = resolved
    return Frontier({RESOLVED: (wall, logical + 1)})


def resolved_of(frontier: Frontier) -> Position | None:
    """The resolved timestamp that a frontier includes; None before the first."""
    at = frontier[RESOLVED]
    return (at[0], at[1] - 1) if at else None


def hlc_parts(
    text: pa.Array,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """A column of timestamps as whole numbers, and which texts are timestamps at all."""
    known = pc.fill_null(pc.match_substring_regex(text, f"^{HLC_PATTERN}$"), False)
    exact = pc.if_else(known, pc.utf8_rtrim(text, "?"), format_hlc((0, 0)))
    wall = pc.cast(pc.utf8_slice_codeunits(exact, 0, -(LOGICAL_DIGITS + 1)), pa.int64())
    logical = pc.cast(pc.utf8_slice_codeunits(exact, -LOGICAL_DIGITS), pa.int64())
    return (
        wall.to_numpy(zero_copy_only=False),
        logical.to_numpy(zero_copy_only=False),
        known.to_numpy(zero_copy_only=False),
    )
