"""How passing trouble is waited out: one rule for every part of a pipeline.

| who | class | how long |
|---|---|---|
| the loop | `Patience` | without end; with `--once` `TRIES_MAX` or `ONCE_SECONDS_MAX` |
| all below it, workers too | `Bridge`, `bridged` | `PAUSES_SECONDS`, within `BRIDGED_SECONDS_MAX` |
| who polls for what others do, for example a lock | `Deadline` | the time given; it is no retry |
| who waits for PostgreSQL's change stream | none | until the server is silent for 120 s |

**The loop.** A part that is away (source, registry, catalog, storage, OpenSearch) is asked again,
at intervals that grow from half a second to half a minute. A single run (`--once`) gives up after
so many tries in a row, or so many seconds, whichever is first. Trouble is told in the log when it
begins, again at growing intervals, and when it ends. While there is any the pipeline is stalled. A
run that is stopped does not wait to the end of a pause.

**Below the loop.** A moment of trouble is bridged where it is met. What lasts is raised to the
loop: a worker could not tell that it waits, and would not hear that the run is stopped.

What an operator must decide is no passing trouble and never comes here.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from icestream.errors import IcestreamError, Retryable

log = logging.getLogger(__name__)

R = TypeVar("R")

RETRY_SECONDS = 0.5
RETRY_SECONDS_MAX = 30.0
DOUBLINGS_MAX = 16
# If each try fails at once, the nine pauses between them take 61 to 122 s: 121.5 s, scattered.
TRIES_MAX = 10
ONCE_SECONDS_MAX = 120.0
# Who reads the log later sees that it lasts; who watches it is not flooded.
TOLD_AGAIN_SECONDS = 60.0
TOLD_AGAIN_SECONDS_MAX = 3600.0
# Below the loop: the pauses between tries, and when the last try may begin. The first one is short
# because a lost answer is most often looked up with success; all of them take under five seconds.
PAUSES_SECONDS = (0.1, 0.3, 0.6, 1.2, 2.4)
BRIDGED_SECONDS_MAX = 5.0
# Between two looks at what others do.
POLL_SECONDS = 0.05


class Stopped(Exception):
    """A run ends early, in good order: it was asked to."""


@dataclass(eq=False, slots=True)
class Trouble:
    """One stretch of passing trouble, from the first failure until something succeeds."""

    tries: int = 0
    began_at: float = 0.0
    tell_at: float = 0.0
    error: IcestreamError | None = None
    given_up: bool = False


class Patience:
    """Waits for trouble to pass and tells of it; safe between threads.

    `changed` is called when trouble begins or ends; `bounded` is true for a single run.
    """

    def __init__(
        self,
        pipeline: str,
        stop: threading.Event,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.bounded = True
        self._fields = {"pipeline": pipeline}
        self._stop = stop
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[Trouble] = []

    def trouble(self) -> IcestreamError | None:
        """The trouble that was met last and has not passed."""
        with self._lock:
            return self._open[-1].error if self._open else None

    def wait(self, trouble: Trouble, error: IcestreamError) -> None:
        """Pause before the next try.

        Raises the error when a single run has tried enough, and `Stopped` in a run that is stopped.
        """
        if self._stop.is_set():
            raise self._given_up(trouble) from error
        self.tell(trouble, error)
        trouble.tries += 1
        since = self._clock() - trouble.began_at
        if self.bounded and (trouble.tries >= TRIES_MAX or since >= ONCE_SECONDS_MAX):
            trouble.given_up = True
            raise error
        pause = min(RETRY_SECONDS_MAX, RETRY_SECONDS * 2 ** min(trouble.tries - 1, DOUBLINGS_MAX))
        if self._stop.wait(_scattered(pause)):
            raise self._given_up(trouble) from error

    def tell(self, trouble: Trouble, error: IcestreamError) -> None:
        """Show trouble, and log it unless that was done a short while ago."""
        now = self._clock()
        if trouble.error is None:
            trouble.began_at = now
            trouble.tell_at = now + TOLD_AGAIN_SECONDS
            log.warning("stalled: %s", error, extra=self._fields)
        elif now >= trouble.tell_at:
            lasts = now - trouble.began_at
            trouble.tell_at = now + min(lasts, TOLD_AGAIN_SECONDS_MAX)
            log.warning("still stalled after %.0f s: %s", lasts, error, extra=self._fields)
        with self._lock:
            trouble.error = error
            self._open = [*(each for each in self._open if each is not trouble), trouble]
        self._changed()

    def end(self, trouble: Trouble) -> None:
        """The trouble has passed, if there was any and it was not given up."""
        if trouble.error is None or trouble.given_up:
            return
        lasted, message = self._clock() - trouble.began_at, trouble.error.message
        with self._lock:
            self._open = [each for each in self._open if each is not trouble]
            trouble.error, trouble.tries = None, 0
        log.info("goes on after %.1f s: %s", lasted, message, extra=self._fields)
        self._changed()

    def _given_up(self, trouble: Trouble) -> Stopped:
        trouble.given_up = True
        return Stopped()


class Bridge:
    """Tries again for a moment, below the loop; then the trouble is the loop's.

    `tries` counts all failures that were met.
    """

    def __init__(self) -> None:
        self.tries = 0
        self._failures = 0
        self._deadline: Deadline | None = None

    def wait(self, error: IcestreamError) -> None:
        """Pause before the next try; raises the error when the time for it is over."""
        self.tries += 1
        self._failures += 1
        if self._deadline is None:
            self._deadline = Deadline(BRIDGED_SECONDS_MAX)
        if self._failures > len(PAUSES_SECONDS) or self._deadline.passed:
            raise error
        time.sleep(_scattered(PAUSES_SECONDS[self._failures - 1]))

    def refresh(self) -> None:
        """Something went on: the next failure is a first one."""
        self._failures, self._deadline = 0, None


def bridged(
    attempt: Callable[[], R],
    passing: Callable[[IcestreamError], bool] = lambda error: isinstance(error, Retryable),
) -> R:
    """What the attempt gives, which is tried again for a moment after trouble that is `passing`."""
    bridge = Bridge()
    while True:
        try:
            return attempt()
        except IcestreamError as error:
            if not passing(error):
                raise
            bridge.wait(error)


class Deadline:
    """The end of a wait for what others do; nothing has failed, and so nothing is tried again."""

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._at

    def look_again(self) -> bool:
        """Whether to look again, after a short pause; not when the time is over."""
        if self.passed:
            return False
        time.sleep(POLL_SECONDS)
        return True


def let_pass(seconds: float) -> None:
    """Wait for a time that must have passed, whatever happens meanwhile."""
    time.sleep(seconds)


def _scattered(pause: float) -> float:
    """Several that lost the same server do not come back in the same moment."""
    return pause * random.uniform(0.5, 1.0)
