"""A spool that is a folder of this machine: of one run, for its user's eyes only.

A run that is killed cannot remove its folder, and the folder holds rows of the source. So each
folder has a lock that is held for as long as its process lives, and the next run of the pipeline
removes every folder of the pipeline whose lock nobody holds. The lock tells the machine too:
whether a process of another machine lives cannot be known for sure.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from icestream.errors import ConfigInvalid
from icestream.sources.spool import reason, written_later

_LOCK = "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class LocalSpool:
    """A folder of a run's own in `parent`, or among the system's temporary ones.

    What killed runs left goes first, for the disk may be full of it; not with `looks_only`.
    """

    storage: Mapping[str, str] = {}

    def __init__(self, parent: str, pipeline: str, looks_only: bool = False):
        # The name's end is random and has no dash, so no pipeline's name begins another's.
        self._prefix = f"icestream-spool-{re.sub('[^A-Za-z0-9_]', '_', pipeline)}-"
        self._parent = Path(parent or tempfile.gettempdir()).absolute()
        self._number = 0
        with written_later(str(self._parent)):
            try:
                if not looks_only:
                    self._remove_dead()
                self.folder, self._lock = self._made()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise
                raise ConfigInvalid(
                    f"could not make a spool in {self._parent}",
                    detail=reason(error),
                    hint="Name a folder that can be written to with `spool`.",
                ) from error

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.folder)

    def create(self) -> tuple[str, pa.NativeFile]:
        """See `Spool.create`. Only its owner may read the file."""
        self._number += 1
        path = str(self.folder / f"{self._number:08d}.arrow")
        with written_later(self.where):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            return path, pa.OSFile(path, "wb")

    def remove(self, path: str) -> None:
        """See `Spool.remove`."""
        with contextlib.suppress(OSError):
            os.unlink(path)

    def renew(self) -> None:
        """See `Spool.renew`."""
        if not self.folder.is_dir():
            with written_later(str(self._parent)):
                made = self._made()
            self.close()
            self.folder, self._lock = made

    def left(self) -> Sequence[str]:
        """See `Spool.left`."""
        return sorted(str(folder) for folder in self._of_pipeline() if folder != self.folder)

    def reap(self) -> None:
        """Nothing: locks tell who is dead, so that it was done at the start."""

    def close(self) -> None:
        """Remove the folder, then let go of its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _made(self) -> tuple[Path, int]:
        """A new folder and its lock; what is made in part is removed."""
        folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
        try:
            return folder, _locked(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _of_pipeline(self) -> list[Path]:
        found = self._parent.glob(f"{self._prefix}*")
        return [each for each in found if "-" not in each.name.removeprefix(self._prefix)]

    def _remove_dead(self) -> None:
        for folder in self._of_pipeline():
            # What is another user's, or is being removed, is left alone.
            with contextlib.suppress(OSError):
                _remove_unlocked(folder)


def _locked(folder: Path) -> int:
    """Make a folder's lock; it has its name only when it is held."""
    early = folder / f"{_LOCK}.new"
    file = os.open(early, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, socket.gethostname().encode())
        early.rename(folder / _LOCK)
    except OSError:
        os.close(file)
        raise
    return file


def _remove_unlocked(folder: Path) -> None:
    """Remove a spool whose process on this machine has ended; raises when it may be alive."""
    file = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(file, 1024) == socket.gethostname().encode():
            shutil.rmtree(folder)
    finally:
        os.close(file)
