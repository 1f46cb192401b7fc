"""U1: compiled code on disk is never older than the source it was made of."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "icestream"
CALLER = """
from icestream.kernels import kernel
from icestream.steps import SIZE, step

@kernel
def stepped(number):
    return step(number) * SIZE

compiled = getattr(stepped, "compiled", stepped)
print(stepped(1), sum(compiled.stats.cache_hits.values()))
"""
STEPS = """
from icestream.kernels import part

SIZE = 10

@part
def step(number):
    return number + 1
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A package with the ground rules of kernels, one kernel, and its part in another module."""
    package = tmp_path / "icestream"
    shutil.copytree(PACKAGE / "kernels", package / "kernels")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, package / name)
    (package / "caller.py").write_text(CALLER)
    (package / "steps.py").write_text(STEPS)
    return package


def ran(package: Path, **environment: str) -> list[str]:
    """What the kernel says in a process of its own, and whether it was found on disk."""
    done = subprocess.run(
        [sys.executable, "-m", "icestream.caller"],
        cwd=package.parent,
        env=os.environ | {"ICESTREAM_CHECKED_KERNELS": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_edit_of_one_file_leaves_no_stale_code_in_another(copied):
    """U1: a part and a constant that a kernel takes from another module are always the new ones."""
    assert ran(copied) == ["20", "0"]
    assert ran(copied) == ["20", "1"]
    steps, when = copied / "steps.py", (copied / "steps.py").stat()
    steps.write_text(STEPS.replace("+ 1", "+ 2"))
    # Not even the time and the size of the edited file tell that it was edited.
    os.utime(steps, ns=(when.st_atime_ns, when.st_mtime_ns))
    # Python itself would not see it either.
    for stale in (copied / "__pycache__").glob("steps.*.pyc"):
        stale.unlink()
    assert ran(copied) == ["30", "0"]
    steps.write_text(STEPS.replace("10", "70"))
    assert ran(copied) == ["140", "0"]
    assert ran(copied) == ["140", "1"]


def test_both_modes_keep_code_of_their_own(copied):
    """U1: code without bounds checks is never taken for checked code, nor thrown away by it."""
    assert ran(copied) == ["20", "0"]
    assert ran(copied, ICESTREAM_CHECKED_KERNELS="1") == ["20", "0"]
    assert ran(copied) == ["20", "1"]
    assert ran(copied, ICESTREAM_CHECKED_KERNELS="1") == ["20", "1"]
