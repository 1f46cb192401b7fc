"""K3: in checked mode a kernel that leaves its memory says so by its name."""

import os
import subprocess
import sys
from pathlib import Path

from icestream.sources.iceberg import row_hashes

ROOT = Path(__file__).parents[3]
PROGRAM = """
import numpy as np
from icestream.errors import Broken
from icestream.kernels import *

@part
def inner(data, position):
    return data[position]

@kernel
def one(content, position): return inner(pointer(content), position)
@kernel
def put(content, position): pointer(content)[position] = 7
@kernel
def word(content, position): return load_word(pointer(content), position)
@kernel
def number(content, position): return int32(pointer(content), position)
@kernel
def put_word(content, position): store_word(pointer(content), position, np.uint64(1))
@kernel
def copied(content, position): copy_bytes(pointer(content), position, pointer(content), 4)
@kernel
def addressed(address, position): return at_address(address, 16)[position]
@kernel
def indexed(content, position): return content[position]
@kernel
def made(content, position):
    own = np.zeros(content.size, np.uint8)
    data = pointer(own)
    return data[position]

def tried(run, given, position):
    try:
        run(given, position)
    except Broken as error:
        return str(error)
    return ""

content = np.zeros(16, np.uint8)
sizes = {one: 1, put: 1, word: 8, number: 4, put_word: 8, copied: 4, indexed: 1}
for run, size in sizes.items():
    name = run.__name__
    assert tried(run, content, 0) == tried(run, content, 16 - size) == "", name
    for position in (16 - size + 1, 16, 2**40, -17, -(2**40)):
        assert f".{name} left its memory" in tried(run, content, position), (name, position)
    if run is not indexed:
        assert "before the first byte" in tried(run, content, -1), name
address = content.ctypes.data
assert tried(addressed, address, 15) == ""
assert "addressed" in tried(addressed, address, 16)
assert "made itself" in tried(made, content, 0)
print("all seen")
"""


def checked(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"ICESTREAM_CHECKED_KERNELS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_every_way_to_leave_memory_is_seen(tmp_path):
    """K3: loads, stores and copies, before the first byte and beyond the last one."""
    (tmp_path / "leaving.py").write_text(PROGRAM)
    done = checked(str(tmp_path / "leaving.py"))
    assert done.stdout == "all seen\n", done.stderr


def test_kernels_are_not_checked_unless_asked_to():
    """K3: without the variable Python calls the compiled code itself, without bounds checks."""
    assert row_hashes._finish.targetoptions["boundscheck"] is False
    assert row_hashes._mixed.targetoptions["boundscheck"] is False
