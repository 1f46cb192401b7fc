"""Real changefeed output of a CockroachDB v22.2.10 server, and folders made from it.

Line 1 of a capture tells the statement and what was done to the tables meanwhile; then one line per
row, `[table, key, value]`, where a resolved timestamp is `[null, null, value]`.
"""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pyarrow as pa

from icestream.frontier import Position
from icestream.sources.cockroachdb.folder import MARKER_SUFFIX
from icestream.sources.cockroachdb.hlc import file_time, parse_hlc

_SESSION = "56087568dba1e6b8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One message of a capture; a resolved timestamp has no table."""

    table: str | None
    key: str
    value: str


def capture_names() -> list[str]:
    """The names of all captures."""
    folder = resources.files(__name__)
    return sorted(item.name for item in folder.iterdir() if item.name.endswith(".jsonl"))


def capture(name: str) -> list[Row]:
    """The messages of one capture, in the order they came."""
    text = (resources.files(__name__) / name).read_text()
    rows = [json.loads(line) for line in text.splitlines()[1:] if line]
    return [Row(table=table, key=key or "", value=value) for table, key, value in rows]


def resolved_of(value: str) -> Position | None:
    """The timestamp of a resolved message, in either envelope."""
    message = json.loads(value)
    text = message.get("resolved") or message.get("__crdb__", {}).get("resolved")
    return parse_hlc(text) if text else None


def with_key(row: Row) -> str:
    """The value as cloud storage has it: there every row carries its key."""
    if '"key"' in row.value:
        return row.value
    return f'{row.value[:-1]}, "key": {row.key}}}'


class FeedFolder:
    """Writes a folder as a changefeed into cloud storage does."""

    def __init__(self, path: Path | str, compression: str = ""):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._compression = compression
        self._number = -1

    def data(self, topic: str, rows: Sequence[str], at: Position, schema: int = 1) -> Path:
        """Write one data file; `at` is a lower bound of its rows' timestamps."""
        content = "".join(f"{row}\n" for row in rows).encode()
        if self._compression == ".gz":
            content = gzip.compress(content)
        if self._compression == ".zst":
            content = pa.Codec("zstd").compress(content).to_pybytes()
        name = self.data_name(topic, at, schema, f".ndjson{self._compression}")
        return self._write(name, content)

    def data_name(self, topic: str, at: Position, schema: int, extension: str) -> str:
        """The next free name for a data file."""
        self._number += 1
        return f"{file_time(at)}-{_SESSION}-1-72-{self._number:08x}-{topic}-{schema:x}{extension}"

    def resolved(self, at: Position) -> Path:
        """Write the marker of a resolved timestamp."""
        text = json.dumps({"resolved": f"{at[0]}.{at[1]:010d}"})
        return self._write(f"{file_time(at)}{MARKER_SUFFIX}", text.encode())

    def _write(self, name: str, content: bytes) -> Path:
        folder = self.path / f"{name[:4]}-{name[4:6]}-{name[6:8]}"
        folder.mkdir(exist_ok=True)
        # A reader must never see half a file; object stores behave the same.
        staged = folder / f".{name}.part"
        staged.write_bytes(content)
        os.replace(staged, folder / name)
        return folder / name


def play(rows: Sequence[Row], folder: FeedFolder) -> Iterator[Position]:
    """Write a capture as files, one for each table between two markers; yields each marker."""
    waiting: dict[str, list[str]] = {}
    lower: Position = (0, 0)
    for row in rows:
        if row.table is not None:
            waiting.setdefault(row.table, []).append(with_key(row))
            continue
        resolved = resolved_of(row.value)
        if resolved is None:
            continue
        for table, values in waiting.items():
            folder.data(table, values, lower if lower[0] else (resolved[0] - 1, 0))
        waiting = {}
        folder.resolved(resolved)
        lower = (resolved[0], resolved[1] + 1) if resolved[1] < 2**31 - 1 else (resolved[0] + 1, 0)
        yield resolved
