"""A spool in an object store, for workers on other machines.

    s3://lake/spool/icestream-spool-shop-1f0c2ab34d5e/0b6f.../00000001.arrow
                    └─ the pipeline and its stream ─┘ └ run ┘ └─ segment ─┘

An object store has no locks, so nobody sees there whether a run is alive. But the server lets one
reader at a time have the stream. Whoever reads the stream is the pipeline's only run, or the others
no longer count: all that lies under the stream's name and is not its own can go.
"""

import contextlib
import hashlib
import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.fs as pafs

from icestream.errors import ConfigInvalid
from icestream.iceberg.files import filesystem
from icestream.sources.spool import reason, written_later

log = logging.getLogger(__name__)

_WITH_FOLDERS = ("hdfs", "viewfs")


class StorageSpool:
    """A run's own place below `where`; `stream` names the stream, whichever pipeline reads it."""

    def __init__(self, where: str, storage: Mapping[str, str], pipeline: str, stream: str):
        self.where = where.rstrip("/")
        scheme, _, rest = self.where.partition("://")
        if not rest or "" in rest.split("/")[scheme in _WITH_FOLDERS :]:
            raise ConfigInvalid(
                f"there is no spool in {where}",
                detail="The place has an empty name in it.",
                hint="Name a bucket and a folder, such as s3://bucket/folder.",
            )
        self.storage = dict(storage)
        name = re.sub("[^A-Za-z0-9_]", "_", pipeline)
        told = hashlib.sha256(f"{pipeline} {stream}".encode()).hexdigest()[:12]
        self._of_stream = f"{self.where}/icestream-spool-{name}-{told}"
        self._own = f"{self._of_stream}/{uuid.uuid4().hex}"
        self._number = 0
        self._used = self._told = False
        try:
            with written_later(self.where):
                self._files = _in_turn(filesystem(self.where, self.storage)[0])
        except ValueError as error:
            raise ConfigInvalid(
                f"there is no spool in {self.where}",
                detail="Its kind of storage is not known.",
                hint="Name a folder, or a place that begins with s3://, gs:// or hdfs://",
            ) from error

    def create(self) -> tuple[str, pa.NativeFile]:
        """See `Spool.create`. The file is there when it is closed."""
        self._number += 1
        path = f"{self._own}/{self._number:08d}.arrow"
        with written_later(self.where):
            if self.where.startswith(_WITH_FOLDERS):
                self._files.create_dir(self._inner(self._own))
            file = self._files.open_output_stream(self._inner(path))
        self._used = True
        return path, file

    def remove(self, path: str) -> None:
        """See `Spool.remove`."""
        self._removed(self._files.delete_file, path)

    def renew(self) -> None:
        """Nothing: an object needs no folder."""

    def left(self) -> Sequence[str]:
        """See `Spool.left`."""
        with written_later(self.where):
            others = {path[: len(self._own)] for path in self._others()}
        return sorted(others)

    def reap(self) -> None:
        """See `Spool.reap`. What cannot be removed now is removed by the next run."""
        for run in self._runs():
            if run != self._own:
                self._removed(self._files.delete_dir, run)

    def close(self) -> None:
        """See `Spool.close`."""
        if self._used:
            self._removed(self._files.delete_dir, self._own)

    def _removed(self, remove: Callable[[str], None], path: str) -> None:
        """Remove something, if it is there; say once if that cannot be done."""
        try:
            remove(self._inner(path))
        except FileNotFoundError:
            return
        except OSError as error:
            if self._told:
                return
            self._told = True
            log.warning(
                "could not remove %s, which may hold rows of the source: %s", path, reason(error)
            )

    def _runs(self) -> list[str]:
        """The places of all runs, and what is left of those that were emptied."""
        inner = self._inner(self._of_stream)
        with contextlib.suppress(OSError):
            found = self._files.get_file_info(pafs.FileSelector(inner, allow_not_found=True))
            return [f"{self._of_stream}{each.path.removeprefix(inner)}" for each in found]
        return []

    def _others(self) -> list[str]:
        return [path for path in self._all() if not path.startswith(f"{self._own}/")]

    def _all(self) -> list[str]:
        """All files of the stream, whichever run's they are."""
        inner = self._inner(self._of_stream)
        beneath = pafs.FileSelector(inner, allow_not_found=True, recursive=True)
        found = self._files.get_file_info(beneath)
        files = [each.path for each in found if each.type == pafs.FileType.File]
        return [f"{self._of_stream}{path.removeprefix(inner)}" for path in files]

    def _inner(self, path: str) -> str:
        """The path as the file system has it: without its scheme, and a host that it knows."""
        scheme, _, rest = path.partition("://")
        return rest.removeprefix(rest.partition("/")[0]) if scheme in _WITH_FOLDERS else rest


def _in_turn(files: pafs.FileSystem) -> pafs.FileSystem:
    """The same file system, where a write ends when the store has what was written.

    Otherwise Arrow takes all that it is given and uploads it later: a store that is slower than the
    source would fill the coordinator's memory.
    """
    rebuild, (options, *_) = files.__reduce__()
    if isinstance(options, dict) and options.get("background_writes"):
        return rebuild({**options, "background_writes": False})
    return files
