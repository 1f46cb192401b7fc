"""The folder where changes lie on their way: of one run, for its user's eyes only.

A run that is killed cannot remove its folder, and the folder holds rows of the source. So each
folder has a lock that is held for as long as its process lives, and the next run of the pipeline
removes every folder of the pipeline whose lock nobody holds. The lock tells the machine too:
whether a process of another machine lives cannot be known for sure.

A spool that has no room, or cannot be reached, is passing trouble: PostgreSQL keeps all that is not
durable, so what did not get here is read again from there.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.sources import SplitsLost

_LOCK = "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SpoolUnreadable(SplitsLost):
    """A worker could not read changes back; PostgreSQL is asked for them once more."""


@contextlib.contextmanager
def written_later(folder: Path) -> Iterator[None]:
    """What cannot be written to a folder of the spool now is passing trouble."""
    try:
        yield
    except OSError as error:
        raise SourceUnavailable(
            f"could not write the spool in {folder}",
            detail=_reason(error),
            hint="Make room there or make it writable: reading goes on by itself. Or name another "
            "folder with `spool` and start again.",
        ) from error


@contextlib.contextmanager
def read_again(path: str) -> Iterator[None]:
    """What cannot be read back from a file of the spool is read from PostgreSQL once more."""
    try:
        yield
    except OSError as error:
        raise SpoolUnreadable(
            f"could not read {path} of the spool",
            detail=_reason(error),
            hint="See that nothing else removes files there, and that every worker reaches the "
            "folder under this name. What is missing is read from PostgreSQL again.",
        ) from error


def _reason(error: OSError) -> str:
    return f"{os.strerror(error.errno) if error.errno else error}."


class Spool:
    """A folder of a run's own in `parent`, or among the system's temporary ones."""

    def __init__(self, parent: str, pipeline: str):
        # The name's end is random and has no dash, so no pipeline's name begins another's.
        self._prefix = f"icestream-spool-{re.sub('[^A-Za-z0-9_]', '_', pipeline)}-"
        self._where = Path(parent or tempfile.gettempdir())
        with written_later(self._where):
            try:
                self._remove_dead(self._where)
                self.folder, self._lock = self._made()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise
                raise ConfigInvalid(
                    f"could not make a spool in {self._where}",
                    detail=_reason(error),
                    hint="Name a folder that can be written to with `spool`.",
                ) from error

    def renew(self) -> None:
        """Have a folder again if someone has removed it."""
        if not self.folder.is_dir():
            with written_later(self._where):
                made = self._made()
            self.close()
            self.folder, self._lock = made

    def close(self) -> None:
        """Remove the folder, then let go of its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _made(self) -> tuple[Path, int]:
        """A new folder and its lock; what is made in part is removed."""
        folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._where))
        try:
            return folder, _locked(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _remove_dead(self, where: Path) -> None:
        for folder in where.glob(f"{self._prefix}*"):
            if "-" not in folder.name.removeprefix(self._prefix):
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


def create_private(path: str) -> None:
    """Make an empty file that only its owner may read."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))


def remove(path: str) -> None:
    """Remove a file, if it is there and if that is possible; the folder goes later anyway."""
    with contextlib.suppress(OSError):
        os.unlink(path)
