"""Records of a changefeed's topic, told apart: resolved timestamps, and rows with their own.

The changefeed writes `{"resolved":"<timestamp>"}` without a key to every partition of every topic:
no change up to it will appear in this partition that has not appeared before. All other records
are rows. Telling them apart decodes no row beyond the members of its envelope.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from icestream.formats.json_cells import Cells, Kind, values
from icestream.formats.rows import Indices, Mask, Records
from icestream.frontier import Position
from icestream.sources.cockroachdb.hlc import HLC_PATTERN, hlc_parts
from icestream.sources.cockroachdb.rows import top_of, updated_of

_MARKER = (
    r'^\s*\{\s*(?:"__crdb__"\s*:\s*\{\s*)?"resolved"\s*:\s*'
    rf'"(?P<resolved>{HLC_PATTERN})"\s*\}}?\s*\}}\s*$'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What records are.

    `markers` and `rows` are places among the records; `resolved` are the timestamps of the markers.
    `top` holds the members of the rows' messages, `walls` and `logicals` their timestamps, which
    count only where they are `known`. `broken` says of places among the records why they are not
    JSON.
    """

    markers: Indices
    resolved: list[Position]
    rows: Indices
    top: Mapping[str, Cells]
    walls: npt.NDArray[np.int64]
    logicals: npt.NDArray[np.int64]
    known: Mask
    broken: Mapping[int, str]


def told_apart(records: Records) -> Messages:
    """Which records are resolved timestamps, and when the rows among the others were changed."""
    markers, resolved = _markers(records)
    rows = np.delete(np.arange(len(records)), markers)
    cells, broken = values(records.values)
    top = top_of(cells.take(rows).only(Kind.OBJECT))
    updated = updated_of(top)
    text = pa.nulls(len(rows), pa.string())
    if updated is not None:
        text = updated.only(Kind.STRING).text()
    walls, logicals, known = hlc_parts(text)
    return Messages(
        markers=markers,
        resolved=resolved,
        rows=rows,
        top=top,
        walls=walls,
        logicals=logicals,
        known=known,
        broken=broken,
    )


def _markers(records: Records) -> tuple[Indices, list[Position]]:
    keyless = np.flatnonzero(records.keys.is_null().to_numpy(zero_copy_only=False))
    found = pc.extract_regex(records.values.take(pa.array(keyless)), _MARKER)
    text = pc.cast(found.field("resolved").filter(found.is_valid()), pa.string())
    walls, logicals, _ = hlc_parts(text)
    resolved: list[Position] = list(zip(walls.tolist(), logicals.tolist(), strict=True))
    return keyless[found.is_valid().to_numpy(zero_copy_only=False)], resolved
