"""Progress as it stands in a snapshot's summary: names, reading, writing.

The summary of every snapshot that icestream commits says which pipeline made it, under which
generation, and which span of the source it holds. A claim (the empty commit with which a starting
pipeline takes over) repeats the table's progress under the next generation and has no batch id,
for it publishes no epoch.
"""

import hashlib
import json
from collections.abc import Callable, Mapping

from icestream.epoch import Epoch, Progress
from icestream.errors import check
from icestream.frontier import Frontier

PIPELINE = "icestream.pipeline"
GENERATION = "icestream.generation"
EPOCH = "icestream.epoch"
BATCH_ID = "icestream.batch-id"
LOWER = "icestream.lower"
FRONTIER = "icestream.frontier"
EPOCH_TABLES = "icestream.epoch-tables"
VALID_THROUGH = "icestream.valid-through"
DATA_FILES = "icestream.data-files"
DELETE_FILES = "icestream.delete-files"
REPLAYING = "icestream.replaying"
CLAIM = "icestream.claim"
KEYS = (PIPELINE, GENERATION, EPOCH, BATCH_ID, LOWER, FRONTIER, EPOCH_TABLES, REPLAYING)

# Summaries are copied into every metadata file of the table for as long as the snapshot lives.
FRONTIER_BYTES_MAX = 4096
_FILE_SUFFIX = "-file"
_HASH_SUFFIX = "-sha256"

ReadFile = Callable[[str], bytes]
WriteFile = Callable[[str, bytes], str]


def tag_name(pipeline: str) -> str:
    """The tag that follows a pipeline's last commit in a table and keeps it from being expired."""
    return f"icestream-{pipeline}"


def to_summary(progress: Progress, write_file: WriteFile) -> dict[str, str]:
    """The summary entries of a progress; a frontier too large for them goes into a side file."""
    entries = {
        PIPELINE: progress.pipeline,
        GENERATION: str(progress.generation),
        EPOCH: str(progress.epoch),
        EPOCH_TABLES: str(progress.tables),
        **_frontier_entries(LOWER, progress.lower, write_file),
        **_frontier_entries(FRONTIER, progress.upper, write_file),
    }
    if progress.replaying:
        entries[REPLAYING] = "true"
    return entries


def from_summary(summary: Mapping[str, str], read_file: ReadFile) -> Progress:
    """The inverse of `to_summary`."""
    return Progress(
        pipeline=summary[PIPELINE],
        generation=int(summary[GENERATION]),
        epoch=int(summary[EPOCH]),
        lower=_frontier(LOWER, summary, read_file),
        upper=_frontier(FRONTIER, summary, read_file),
        tables=int(summary[EPOCH_TABLES]),
        replaying=summary.get(REPLAYING) == "true",
    )


def side_file_keys() -> tuple[str, ...]:
    """The entries that stand in for a frontier kept in a side file."""
    return tuple(key + end for key in (LOWER, FRONTIER) for end in (_FILE_SUFFIX, _HASH_SUFFIX))


def _frontier_entries(key: str, frontier: Frontier, write_file: WriteFile) -> dict[str, str]:
    text = json.dumps(frontier.to_json(), separators=(",", ":"))
    if len(text) <= FRONTIER_BYTES_MAX:
        return {key: text}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {
        key + _FILE_SUFFIX: write_file(f"frontier-{digest}.json", text.encode()),
        key + _HASH_SUFFIX: digest,
    }


def _frontier(key: str, summary: Mapping[str, str], read_file: ReadFile) -> Frontier:
    if key in summary:
        return Frontier.from_json(json.loads(summary[key]))
    content = read_file(summary[key + _FILE_SUFFIX])
    digest = hashlib.sha256(content).hexdigest()
    check(digest == summary[key + _HASH_SUFFIX], f"the side file of {key} is unchanged")
    return Frontier.from_json(json.loads(content))


def progress_of(epoch: Epoch, pipeline: str, generation: int, tables: int) -> Progress:
    """The progress that committing an epoch makes durable."""
    return Progress(
        pipeline=pipeline,
        generation=generation,
        epoch=epoch.number,
        lower=epoch.lower,
        upper=epoch.upper,
        tables=tables,
    )
