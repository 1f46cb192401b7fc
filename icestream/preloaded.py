"""Spark's Python daemon, which every worker is forked from, made ready for work that is short.

A worker that imports by itself spends seconds of processor time before it does anything. After
every task Spark has a worker look for garbage among all that was ever imported, and before every
task it has Python read the tables of contents of all archives on its path, jars among them. Both
together take half a second; what is done here, before the fork, does away with it.
"""

import gc
import sys
from pathlib import Path
from typing import Any, cast
from zipimport import zipimporter

from pyspark import daemon

from icestream import config, metrics  # noqa: F401
from icestream.connectors import SINKS, SOURCES


def _forget_archives() -> None:
    """Look for modules neither in jars, which have none, nor in the archives of Spark's packages.

    Spark's packages are imported by now; their other modules are found through the packages. An
    archive that stayed on the path would be read again for each module that a task imports.
    """
    spark = {str(Path(sys.modules[name].__path__[0]).parent) for name in ("py4j", "pyspark")}
    places = (place for place in sys.path if not place.endswith(".jar"))
    sys.path[:] = [place for place in places if place not in spark or Path(place).is_dir()]
    archives = [p for p, f in sys.path_importer_cache.items() if isinstance(f, zipimporter)]
    for place in archives:
        del sys.path_importer_cache[place]


def _import_connectors() -> None:
    """A worker does not know yet which of them its tasks are about."""
    SOURCES.import_all()
    SINKS.import_all()


if __name__ == "__main__":
    _import_connectors()
    _forget_archives()
    metrics.become_worker()
    gc.freeze()
    cast(Any, daemon).manager()
