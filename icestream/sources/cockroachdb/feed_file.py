"""A data file of a changefeed: what its name tells, and its content."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.fs as pafs

from icestream.errors import DataRejected, HistoryLost, SourceUnavailable
from icestream.frontier import Position
from icestream.sources.cockroachdb.hlc import parse_file_time
from icestream.sources.cockroachdb.numbered import number_of

PARQUET = "parquet"
FORMATS = ("ndjson", PARQUET)
PARQUET_UPDATED = "__crdb__updated"
_DATA_NAME = re.compile(
    r"(?P<at>\d{33})-(?P<uniquer>.+?)-(?P<file>[0-9a-f]{8})-(?P<topic>.+)-(?P<schema>[0-9a-f]+)"
    r"\.(?P<format>[a-z]+)(?P<compression>\.gz|\.zst)?"
)
# Names that copying leaves behind for a moment.
_UNFINISHED = ("part", "tmp", "crc")
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# Compressed rows take about this many times their size once read.
_COMPRESSION_RATIO = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedFile:
    """One data file of the feed, as its name tells it."""

    path: str
    topic: str
    at: Position
    format: str
    compression: str
    size_bytes: int
    writer: int = 0
    number: int = 0

    @staticmethod
    def parse(path: str, size_bytes: int) -> "FeedFile | None":
        """The data file of that name, or None if the name is not one of a data file."""
        found = _DATA_NAME.fullmatch(PurePosixPath(path).name)
        if not found or found["format"] in _UNFINISHED:
            return None
        return FeedFile(
            path=path,
            topic=found["topic"],
            at=parse_file_time(found["at"]),
            format=found["format"],
            compression=found["compression"] or "",
            size_bytes=size_bytes,
            writer=number_of(found["uniquer"]),
            number=int(found["file"], 16),
        )

    @property
    def name(self) -> str:
        """Where it lies."""
        return self.path

    def row_bytes(self) -> int:
        """About how much the file holds once it is unpacked."""
        packed = self.compression or self.format == PARQUET
        return self.size_bytes * (_COMPRESSION_RATIO if packed else 1)

    def content(self, files: pafs.FileSystem) -> bytes:
        """The whole content, unpacked."""
        try:
            with files.open_input_stream(
                self.path, compression=_CODECS.get(self.compression)
            ) as stream:
                return bytes(stream.read())
        except (OSError, pa.ArrowInvalid) as error:
            if isinstance(error, FileNotFoundError):
                raise HistoryLost(
                    f"file {self.path} of the changefeed is gone",
                    detail="It was there when the epoch was planned and may hold its changes.",
                    hint="Restore it from the bucket's versions, or keep files until icestream has "
                    "committed them.",
                ) from error
            if _corrupt(error):
                raise self.damaged(str(error)) from error
            raise SourceUnavailable(
                f"could not read {self.path}",
                detail=str(error),
                hint="Check the storage's credentials and that it can be reached.",
            ) from error

    def damaged(self, what: str) -> DataRejected:
        """The error for a file whose content is not what its name says."""
        return DataRejected(
            f"file {self.path} of the changefeed is damaged",
            detail=what,
            # It may be needed although its rows are in the lake: a new table is made from it.
            hint="What is committed stays, and nothing more is until the file can be read. Restore "
            "it and start again. If `icestream status` shows a later time, it may be one that the "
            "guide's rule on removing files lets you remove.",
        )


def _corrupt(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("zlib", "zstd", "gzip", "truncated", "corrupt", "inflate"))
