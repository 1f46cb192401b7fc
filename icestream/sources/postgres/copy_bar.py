"""The progress bar of copies, on a terminal alone."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from icestream.sources.postgres.backfill import PAGE_BYTES
from icestream.sources.postgres.tables import PgTable


class CopyBar:
    """Thread: the loop's shows and closes it; those of epochs move it on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: tqdm | None = None
        self._rows = 0

    def show(self, tables: Sequence[PgTable]) -> None:
        """Show one for the copy of these tables, if none is shown."""
        if not sys.stderr.isatty():
            return
        total = sum(table.pages for table in tables) * PAGE_BYTES
        with self._lock:
            if self._bar is not None:
                return
            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="copying", file=sys.stderr, leave=False
            )

    def move(self, lessons: Sequence[Any]) -> None:
        """Move on by what splits of copies have read; others taught nothing."""
        with self._lock:
            for learned in filter(None, lessons):
                if self._bar is not None:
                    self._bar.update(learned["bytes"])
                    self._rows += learned["rows"]
                    self._bar.set_postfix_str(f"{self._rows:,} rows")

    def close(self) -> None:
        """Take it away, if it is shown."""
        with self._lock:
            bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
