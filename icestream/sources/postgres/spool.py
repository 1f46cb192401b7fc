"""The folder where changes lie on their way: of one run, for its user's eyes only.

A run that is killed cannot remove its folder, and the folder holds rows of the source. So each
folder has a lock that is held for as long as its process lives, and the next run of the pipeline
removes every folder of the pipeline whose lock nobody holds. The lock tells the machine too:
whether a process of another machine lives cannot be known for sure.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from icestream.errors import ConfigInvalid

_LOCK = "lock"


class Spool:
    """A folder of a run's own in `parent`, or among the system's temporary ones."""

    def __init__(self, parent: str, pipeline: str):
        # The name's end is random and has no dash, so no pipeline's name begins another's.
        self._prefix = f"icestream-spool-{re.sub('[^A-Za-z0-9_]', '_', pipeline)}-"
        where = Path(parent or tempfile.gettempdir())
        try:
            self._remove_dead(where)
            self.folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=where))
            self._lock = self._locked()
        except OSError as error:
            raise ConfigInvalid(
                f"could not make a spool in {where}",
                detail=f"{error.strerror}.",
                hint="Name a folder that can be written to with `spool`.",
            ) from error

    def close(self) -> None:
        """Remove the folder, then let go of its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _locked(self) -> int:
        """Make the folder's lock; it has its name only when it is held."""
        early = self.folder / f"{_LOCK}.new"
        file = os.open(early, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, socket.gethostname().encode())
        early.rename(self.folder / _LOCK)
        return file

    def _remove_dead(self, where: Path) -> None:
        for folder in where.glob(f"{self._prefix}*"):
            if "-" not in folder.name.removeprefix(self._prefix):
                # What is another user's, or is being removed, is left alone.
                with contextlib.suppress(OSError):
                    _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    """Remove a spool whose process on this machine has ended; raises when it may be alive."""
    file = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(file, 1024) == socket.gethostname().encode():
            shutil.rmtree(folder)
    finally:
        os.close(file)


def create_private(path: str) -> None:
    """Make an empty file that only its owner may read."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
