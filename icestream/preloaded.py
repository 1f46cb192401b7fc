"""Spark's Python daemon, which every worker is forked from, made ready for work that is short.

A worker that imports by itself spends seconds of processor time before it does anything. After
every task Spark has a worker look for garbage among all that was ever imported, and before every
task it has Python read the tables of contents of all archives on its path, jars among them. Both
together take half a second; what is done here, before the fork, does away with it.
"""

import gc
import sys
from typing import Any, cast
from zipimport import zipimporter

from pyspark import daemon

from icestream import config  # noqa: F401


def _forget_archives() -> None:
    """Look for modules in no archive; jars have none, and Spark's own are imported by now."""
    sys.path[:] = [place for place in sys.path if not place.endswith(".jar")]
    archives = [p for p, f in sys.path_importer_cache.items() if isinstance(f, zipimporter)]
    for place in archives:
        del sys.path_importer_cache[place]


if __name__ == "__main__":
    _forget_archives()
    gc.freeze()
    cast(Any, daemon).manager()
