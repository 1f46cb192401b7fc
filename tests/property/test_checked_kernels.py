"""The property tests of all kernels once more, in the mode that checks every load and store."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# All tests here that reach a kernel. Bytes of PostgreSQL's values have their own in the unit tests.
FILES = (
    "tests/property/test_avro.py",
    "tests/property/test_framing.py",
    "tests/property/test_hostile_bytes.py",
    "tests/property/test_json_cells.py",
    "tests/property/test_protobuf.py",
    "tests/property/test_row_hashes.py",
    "tests/unit/sources/test_kafka_client.py",
    "tests/unit/sources/test_postgres_decode.py",
)


def test_no_kernel_leaves_its_memory():
    """K3: whatever bytes come, no read and no write lies outside of its array."""
    environment = os.environ | {"ICESTREAM_CHECKED_KERNELS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
