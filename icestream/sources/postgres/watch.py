"""What is looked at from time to time beside the loop, also while epochs wait.

The slot grows old just then, someone may wait for a lock that a copy holds, and a publication may
be altered.
"""

import threading

from icestream.errors import IcestreamError, NeedsOperator
from icestream.sources.postgres.connection import NotAccepting
from icestream.sources.postgres.copies import Copies
from icestream.sources.postgres.run import PostgresRun
from icestream.sources.postgres.start import RunStart
from icestream.sources.postgres.stream import ChangeStream

# How often the slot is looked at.
_SLOT_SECONDS = 10.0


class SlotWatch:
    """A thread of its own. What it finds that ends the run is raised by `refuse`, in the loop's."""

    def __init__(self, run: PostgresRun, start: RunStart, stream: ChangeStream, copies: Copies):
        self._run = run
        self._start = start
        self._stream = stream
        self._copies = copies
        self._refused: NeedsOperator | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_again, name="slot", daemon=True)
            self._thread.start()

    def refuse(self) -> None:
        """Raise what was found that ends the run."""
        if self._refused is not None:
            raise self._refused

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _look_again(self) -> None:
        while not self._closed.wait(_SLOT_SECONDS):
            try:
                self._copies.yield_locks()
                slot = self._run.server.slot
                slot.note(slot.look())
                self._refused = self._start.broken_since()
            except NotAccepting:
                # It shuts down, and would wait until all of its log is sent; we may not read now.
                self._stream.let_go()
            except IcestreamError:
                pass  # A server that does not answer is told of where changes are read.
