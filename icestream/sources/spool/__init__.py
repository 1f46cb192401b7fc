"""The spool: where a stream that only one reader may hold lies until it is durable.

    coordinator: reads the stream ──► Spool.create ──► segment 1, segment 2, ...
    workers:                                             └──► spooled(path) ──► batches

The coordinator reads the stream, because the server gives it to one reader alone. It writes what
has come to files, called segments. Workers read the segments, as often as they need to. When an
epoch is durable, its segments are removed.

There are two kinds. `local` is a folder: the coordinator and the workers must reach it under the
same name, so all of them run on one machine or share a disk. `storage` is a place in an object
store, which workers on any machine reach.

A spool holds nothing that the source has not: what did not get here, or is gone from here, is read
from the source again. So trouble with the spool is passing trouble.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.sources import SplitsLost

_PROBED = b"icestream"


class SpoolUnreadable(SplitsLost):
    """A worker could not read changes back; the source is asked for them once more."""


class Spool(Protocol):
    """A place of one run's own. Thread: one at a time."""

    @property
    def where(self) -> str:
        """The place, for messages."""
        ...

    @property
    def storage(self) -> Mapping[str, str]:
        """What `spooled` needs to read a segment; it goes to workers with the segment's path."""
        ...

    def create(self) -> tuple[str, pa.NativeFile]:
        """A new file and its path; no two files of a run have one path.

        Raises `SourceUnavailable` when there is no room, or the place cannot be reached.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file, if it is there and if that is possible; what stays is removed later."""
        ...

    def renew(self) -> None:
        """Have a place again if someone has removed it."""
        ...

    def left(self) -> Sequence[str]:
        """What other runs of the pipeline have here: one that runs, or ones that were killed."""
        ...

    def reap(self) -> None:
        """Remove what runs before this one left. The caller holds the stream: nobody else can."""
        ...

    def close(self) -> None:
        """Remove all that is the run's own."""
        ...


@contextlib.contextmanager
def written_later(where: str) -> Iterator[None]:
    """What cannot be written to the spool now is passing trouble."""
    try:
        yield
    except OSError as error:
        mend = "Make room there or make it writable"
        if not is_folder(where):
            mend = "Check that the bucket is there, and the keys in `spool_storage`"
        raise SourceUnavailable(
            f"could not write the spool in {where}",
            detail=reason(error),
            hint=f"{mend}: a run goes on by itself. Or name another place with `spool` and start "
            "again.",
        ) from error


def spooled(
    path: str, storage: Mapping[str, str], batches: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """These batches of a file of a spool, on a worker.

    Raises `SpoolUnreadable` for a file that is gone, cut short, or cannot be reached.
    """
    with _readable(path), _opened(path, storage) as file:
        reader = pa.ipc.open_file(file)
        for number in batches:
            yield reader.get_batch(number)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """What cannot be read from the spool is read from the source once more."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise SpoolUnreadable(
            f"could not read {path} of the spool",
            detail=reason(error),
            hint="See that nothing else removes files there, and that every worker reaches the "
            "place under this name. What is missing is read from the source again.",
        ) from error


def _opened(path: str, storage: Mapping[str, str]) -> pa.NativeFile:
    if is_folder(path):
        return pa.memory_map(path)
    from icestream.iceberg.files import filesystem

    files, inner = filesystem(path, storage)
    return files.open_input_file(inner)


def is_folder(where: str) -> bool:
    """Whether a place is a folder of this machine, and not one in an object store."""
    return "://" not in where


def reason(error: OSError | pa.ArrowInvalid) -> str:
    """What an error of the system, or of an object store, says."""
    number = getattr(error, "errno", None)
    return f"{os.strerror(number) if number else error}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Reads a file of the spool on a worker, and tells what keeps it from that."""

    path: str
    storage: Mapping[str, str] = field(repr=False)

    def run(self) -> str:
        """The reason why the file cannot be read; empty when it can."""
        try:
            with _readable(self.path), _opened(self.path, self.storage) as file:
                return "" if file.read() == _PROBED else "The file there is another one."
        except SpoolUnreadable as error:
            return str(error.detail)


def refuse_unreachable(
    spool: Spool, run_tasks: Callable[[Sequence[Any]], Sequence[Any]], count: int
) -> None:
    """Raise unless workers read what the coordinator writes; `count` of them are asked.

    Otherwise every epoch would be read again and again, and never be written.
    """
    path, file = spool.create()
    with written_later(spool.where), file:
        file.write(_PROBED)
    try:
        answers = run_tasks([Probe(path=path, storage=spool.storage)] * count)
    finally:
        spool.remove(path)
    if not (said := sorted({str(each) for each in answers if each})):
        return
    message = f"workers cannot read the spool in {spool.where}"
    if not is_folder(spool.where):
        raise SourceUnavailable(message, detail=said[0], hint="Check the storage's properties.")
    raise ConfigInvalid(
        message,
        detail=said[0],
        hint="Workers on other machines need a place that they reach. Name it with `spool`: an "
        "object store, such as s3://bucket/folder, or a folder that is mounted everywhere.",
    )
