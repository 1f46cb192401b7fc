"""A spool is its run's own, and what a killed run left goes with the next one."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.sources.spool.local import LocalSpool
from icestream.sources.spool.places import open_spool

_HOLDER = """
import sys, time
from icestream.sources.spool.local import LocalSpool
spool = LocalSpool(sys.argv[1], sys.argv[2])
spool.create()
print(spool.folder, flush=True)
time.sleep(600)
"""


def another_run(parent: Path, pipeline: str) -> tuple["subprocess.Popen[str]", Path]:
    """A process that has a spool, with a file in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(parent), pipeline], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def mode(path: Path) -> int:
    """The permissions of a file or folder."""
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_reads_what_is_spooled(tmp_path: Path):
    """P10, Mend d5: rows of the source lie there, in a folder that everybody may list."""
    spool = LocalSpool(str(tmp_path), "shop")
    spool.create()
    assert mode(spool.folder) == 0o700
    assert {mode(path) for path in spool.folder.iterdir()} == {0o600}
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed(tmp_path: Path):
    """P10, Mend d5: by the next run of the pipeline, and not while the process lives."""
    process, folder = another_run(tmp_path, "shop")
    stranger, other = another_run(tmp_path, "shop-2")
    try:
        LocalSpool(str(tmp_path), "shop").close()
        assert (folder / "00000001.arrow").exists()
        for each in (process, stranger):
            os.kill(each.pid, signal.SIGKILL)
            each.wait()
        assert (folder / "00000001.arrow").exists()
        LocalSpool(str(tmp_path), "shop").close()
        assert not folder.exists()
        assert (other / "00000001.arrow").exists()
    finally:
        process.kill()
        stranger.kill()


def test_spools_that_may_be_alive_are_left_alone(tmp_path: Path):
    """P10, Mend d5: of another machine, or without a lock yet."""
    process, folder = another_run(tmp_path, "shop")
    process.kill()
    process.wait()
    (folder / "lock").write_text("another machine")
    early = tmp_path / "icestream-spool-shop-abcdefgh"
    early.mkdir()
    LocalSpool(str(tmp_path), "shop").close()
    assert folder.exists()
    assert early.exists()


def test_folder_that_cannot_be_written_to(tmp_path: Path):
    """P10: the hint names the option."""
    with pytest.raises(ConfigInvalid, match="could not make a spool") as refused:
        LocalSpool(str(tmp_path / "nowhere"), "shop")
    assert "spool" in str(refused.value.hint)


def test_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """E13, Mend F4: passing trouble, and nothing is left behind that nobody would remove."""

    def no_room(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # A folder of its own without room would have to be mounted.
    with monkeypatch.context() as patched:
        patched.setattr("icestream.sources.spool.local.os.write", no_room)
        with pytest.raises(SourceUnavailable, match="could not write the spool") as refused:
            LocalSpool(str(tmp_path), "shop")
    assert str(tmp_path) in refused.value.message
    assert refused.value.detail == "No space left on device."
    assert list(tmp_path.iterdir()) == []


def test_folder_that_someone_removed(tmp_path: Path):
    """E13, Mend F4: it is made again when it is needed, as soon as that is possible."""
    parent = tmp_path / "parent"
    parent.mkdir()
    spool = LocalSpool(str(parent), "shop")
    shutil.rmtree(parent)
    with pytest.raises(SourceUnavailable, match="No such file"):
        spool.renew()
    parent.mkdir()
    spool.renew()
    assert [path.name for path in spool.folder.iterdir()] == ["lock"]
    spool.close()
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("begins", ["file://", "file://localhost", "file:", ""])
def test_a_folder_may_be_named_as_a_url(tmp_path: Path, begins: str):
    """P10: as Spark and Iceberg write them."""
    spool = open_spool(f"{begins}{tmp_path}", {}, "shop", "a stream")
    assert Path(spool.where).parent == tmp_path
    assert spool.left() == []
    spool.close()


def test_a_relative_folder_does_not_take_itself_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """P10: `check` would tell of a run that is not there."""
    monkeypatch.chdir(tmp_path)  # a relative path is read from where the program runs
    (tmp_path / "spools").mkdir()
    spool = open_spool("spools", {}, "shop", "a stream")
    assert spool.left() == [] and Path(spool.where).is_absolute()
    spool.close()
