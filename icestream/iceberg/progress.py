"""Progress as it stands in a table: names, reading, writing.

The summary of every snapshot that icestream commits says which pipeline made it, under which
generation, and which span of the source it holds. A claim (the empty commit with which a starting
pipeline takes over) repeats the table's progress under the next generation and has no batch id,
for it publishes no epoch.

    both frontiers as JSON fit        icestream.lower, icestream.frontier
    packed they fit                   icestream.bounds
    else                              icestream.bounds-property names properties of the table
    the pipeline's tables fit too     icestream.epoch-ids, icestream.epochs-before,
                                      icestream.table-names
    else                              these lie in the same properties

Summaries are copied into every metadata file for as long as their snapshot lives, so that they stay
small. What is larger lies in properties of the table that the same swap sets: neither expiry nor
the removal of orphan files touches them. The obvious place, a file beside the metadata, is an
orphan to every tool. Only the newest are kept; an older snapshot's frontiers matter only when
somebody rolls the table back to it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from icestream.epoch import Epoch, Progress
from icestream.errors import FrontierLost
from icestream.frontier import Frontier
from icestream.iceberg.bounds import packed, unpacked

PIPELINE = "icestream.pipeline"
GENERATION = "icestream.generation"
EPOCH = "icestream.epoch"
BATCH_ID = "icestream.batch-id"
LOWER = "icestream.lower"
FRONTIER = "icestream.frontier"
BOUNDS = "icestream.bounds"
BOUNDS_PROPERTY = "icestream.bounds-property"
EPOCH_TABLES = "icestream.epoch-tables"
# Earlier versions wrote ids of another kind under `icestream.epoch-members`.
EPOCH_IDS = "icestream.epoch-ids"
EPOCHS_BEFORE = "icestream.epochs-before"
TABLE_NAMES = "icestream.table-names"
EPOCH_SCHEMA = "icestream.epoch-schema"
VALID_THROUGH = "icestream.valid-through"
DATA_FILES = "icestream.data-files"
DELETE_FILES = "icestream.delete-files"
# The word of an older version, which tables have.
CATCHING_UP = "icestream.replaying"
CLAIM = "icestream.claim"
# Earlier versions kept large frontiers in files beside the metadata.
_FILE_SUFFIX = "-file"
_HASH_SUFFIX = "-sha256"
_FILE_KEYS = tuple(key + end for key in (LOWER, FRONTIER) for end in (_FILE_SUFFIX, _HASH_SUFFIX))
KEYS = (
    *(PIPELINE, GENERATION, EPOCH, BATCH_ID, LOWER, FRONTIER, BOUNDS, BOUNDS_PROPERTY),
    *(EPOCH_TABLES, EPOCH_IDS, EPOCHS_BEFORE, TABLE_NAMES, EPOCH_SCHEMA, CATCHING_UP),
    *_FILE_KEYS,
)

# What both frontiers and the tables of a pipeline may take in a summary, as a metadata file shows
# them. With everything else that a snapshot adds to the metadata it stays below 2 KiB.
SUMMARY_BYTES_MAX = 1024
# Metastores take values of 4,000 characters.
CHUNK_CHARACTERS = 3500
# What all kept frontiers of a pipeline may take in a table's properties, but for the last two.
KEPT_BYTES_MAX = 64 * 1024
KEPT_MIN = 2
_DIGEST_CHARACTERS = 32

ReadFile = Callable[[str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """What a commit writes down of its progress: in the summary, and in the table's properties."""

    summary: Mapping[str, str]
    properties: Mapping[str, str] = field(default_factory=dict)

    def plus(self, summary: Mapping[str, str]) -> "Entries":
        """The same with further entries of the summary."""
        return Entries(summary={**self.summary, **summary}, properties=self.properties)


def tag_name(pipeline: str) -> str:
    """The tag that follows a pipeline's last commit in a table and keeps it from being expired."""
    return f"icestream-{pipeline}"


def tagged_property(pipeline: str) -> str:
    """The property that says that the pipeline's tag must be there."""
    return f"icestream.{pipeline}.tagged"


def to_entries(progress: Progress) -> Entries:
    """What a commit writes down of a progress."""
    bounds, large_bounds = _bounds_entries(progress)
    members = " ".join(sorted(progress.members))
    before = " ".join(f"{name}:{number}" for name, number in sorted(progress.before.items()))
    names = " ".join(sorted(progress.names))
    tables = (members, before, names)
    shown = sum(len(json.dumps(text)) for text in (*bounds.values(), *tables))
    many = any(tables) and shown > SUMMARY_BYTES_MAX
    kept = _kept(progress, ",".join((large_bounds, *tables)) if many else large_bounds)
    entries = {
        PIPELINE: progress.pipeline,
        GENERATION: str(progress.generation),
        EPOCH: str(progress.epoch),
        EPOCH_TABLES: str(progress.tables),
        **bounds,
        **kept.summary,
    }
    if members and not many:
        entries[EPOCH_IDS] = members
    if before and not many:
        entries[EPOCHS_BEFORE] = before
    if names and not many:
        entries[TABLE_NAMES] = names
    if progress.schema_id is not None:
        entries[EPOCH_SCHEMA] = str(progress.schema_id)
    if progress.catching_up:
        entries[CATCHING_UP] = "true"
    return Entries(summary=entries, properties=kept.properties)


def from_summary(
    summary: Mapping[str, str], properties: Mapping[str, str], read_file: ReadFile, table: str
) -> Progress:
    """The inverse of `to_entries`.

    Raises `FrontierLost` when the frontiers are no longer where the summary says. Tables of an
    epoch that are no longer there count as unknown: their number is in the summary.
    """
    parts = [*_chunks_together(summary, properties).split(","), "", "", ""]
    bounds, members, before, names = parts[:4]
    lower, upper = _bounds(summary, bounds, read_file, table)
    schema_id = summary.get(EPOCH_SCHEMA)
    return Progress(
        pipeline=summary[PIPELINE],
        generation=int(summary[GENERATION]),
        epoch=int(summary[EPOCH]),
        lower=lower,
        upper=upper,
        tables=int(summary[EPOCH_TABLES]),
        catching_up=summary.get(CATCHING_UP) == "true",
        members=frozenset(summary.get(EPOCH_IDS, members).split()),
        schema_id=None if schema_id is None else int(schema_id),
        names=frozenset(summary.get(TABLE_NAMES, names).split()),
        before={
            name: int(number)
            for each in summary.get(EPOCHS_BEFORE, before).split()
            for name, number in [each.split(":")]
        },
    )


def outdated(
    properties: Mapping[str, str], new: Entries, needed: Collection[str | None]
) -> list[str]:
    """The names of those properties that the commit of `new` removes: old frontiers of the same
    pipeline. `needed` are values of `BOUNDS_PROPERTY` in summaries that must stay readable."""
    wanted = re.compile(re.escape(_prefix(new.summary[PIPELINE])) + r"((\d+)-[0-9a-f]+)\.\d+")
    there = {**properties, **new.properties}
    stems = {name: match for name in there if (match := wanted.fullmatch(name))}
    sizes: dict[str, int] = {}
    for name, match in stems.items():
        sizes[match[1]] = sizes.get(match[1], 0) + len(name) + len(there[name])
    epochs = {match[1]: int(match[2]) for match in stems.values()}
    kept = sizes.keys() & {new.summary.get(BOUNDS_PROPERTY), *needed}
    space = KEPT_BYTES_MAX - sum(sizes[stem] for stem in kept)
    for stem in sorted(epochs.keys() - kept, key=lambda stem: (epochs[stem], stem), reverse=True):
        space -= sizes[stem]
        if space < 0 and len(kept) >= KEPT_MIN:
            break
        kept.add(stem)
    return sorted(name for name, match in stems.items() if match[1] not in kept)


def without_frontiers(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties that are no frontiers: every task is given a copy of them."""
    frontier = re.compile(r"icestream\..+\.frontier\.\d+-[0-9a-f]+\.\d+")
    return {name: value for name, value in properties.items() if not frontier.fullmatch(name)}


def _bounds_entries(progress: Progress) -> tuple[dict[str, str], str]:
    """Both frontiers as entries of a summary, or as a text that is too large for it."""
    plain = {
        LOWER: json.dumps(progress.lower.to_json(), separators=(",", ":")),
        FRONTIER: json.dumps(progress.upper.to_json(), separators=(",", ":")),
    }
    if sum(len(json.dumps(text)) for text in plain.values()) <= SUMMARY_BYTES_MAX:
        return plain, ""
    text = packed(progress.lower, progress.upper)
    return ({BOUNDS: text}, "") if len(text) <= SUMMARY_BYTES_MAX else ({}, text)


def _kept(progress: Progress, text: str) -> Entries:
    """A text in properties, and in the summary their name; nothing for no text."""
    if not text:
        return Entries(summary={})
    stem = f"{progress.epoch}-{_digest(text)}"
    return Entries(
        summary={BOUNDS_PROPERTY: stem},
        properties={
            f"{_prefix(progress.pipeline)}{stem}.{number}": text[start : start + CHUNK_CHARACTERS]
            for number, start in enumerate(range(0, len(text), CHUNK_CHARACTERS))
        },
    )


def _bounds(
    summary: Mapping[str, str], large: str, read_file: ReadFile, table: str
) -> tuple[Frontier, Frontier]:
    if BOUNDS in summary or large:
        return unpacked(summary.get(BOUNDS, large))
    if BOUNDS_PROPERTY in summary and FRONTIER not in summary:
        prefix = f"{_prefix(summary[PIPELINE])}{summary[BOUNDS_PROPERTY]}."
        raise FrontierLost(
            f"the frontier of epoch {summary[EPOCH]} is no longer in the properties of table "
            f"{table}",
            detail=f"Somebody removed or changed properties whose names begin with {prefix}",
            hint="Set them again as an older metadata file of the table has them, or drop the "
            "table and start anew: it is then built from the source.",
        )
    lower, upper = (_frontier(key, summary, read_file, table) for key in (LOWER, FRONTIER))
    return lower, upper


def _chunks_together(summary: Mapping[str, str], properties: Mapping[str, str]) -> str:
    """What lies in properties; nothing when it is no longer what was put there."""
    stem = summary.get(BOUNDS_PROPERTY, "")
    prefix = f"{_prefix(summary[PIPELINE])}{stem}."
    chunks: list[str] = []
    while (chunk := properties.get(f"{prefix}{len(chunks)}")) is not None:
        chunks.append(chunk)
    text = "".join(chunks)
    return text if _digest(text) == stem.partition("-")[2] else ""


def _frontier(key: str, summary: Mapping[str, str], read_file: ReadFile, table: str) -> Frontier:
    if key in summary:
        return Frontier.from_json(json.loads(summary[key]))
    path = summary[key + _FILE_SUFFIX]
    lost = FrontierLost(
        f"the frontier of epoch {summary[EPOCH]} of table {table} lies in a file that is gone",
        detail=f"An earlier version wrote {path}; the removal of orphan files takes such files.",
        hint="Put the file back as it was, or drop the table and start anew: it is then built "
        "from the source.",
    )
    try:
        content = read_file(path)
    except FileNotFoundError as error:
        raise lost from error
    if hashlib.sha256(content).hexdigest() != summary[key + _HASH_SUFFIX]:
        raise lost
    return Frontier.from_json(json.loads(content))


def _prefix(pipeline: str) -> str:
    return f"icestream.{pipeline}.frontier."


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


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
