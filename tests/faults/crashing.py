"""A crash in this process: the pipeline stops at a failpoint, and nothing of it cleans up.

It is what kill -9 leaves behind, without the start of another process: no thread of the pipeline
comes past another failpoint, its source is never closed, and the next run is a new pipeline over
the same source and the same catalog.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from icestream import failpoints
from icestream.failpoints import FailpointError
from icestream.pipeline import Pipeline

_VARIABLE = "ICESTREAM_FAILPOINTS"


@contextmanager
def armed(failpoint: str) -> Iterator[None]:
    """Failpoints of this process, passes counted anew, as in a process that has just started."""
    before = os.environ.get(_VARIABLE)
    failpoints._passes.clear()
    os.environ[_VARIABLE] = failpoint
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before
        failpoints._passes.clear()


def crashes(pipeline: Pipeline, failpoint: str) -> bool:
    """Run once; True when it crashed at the failpoint, False when it ended by itself before."""
    with armed(failpoint):
        return ends_in_a_crash(pipeline)


def ends_in_a_crash(pipeline: Pipeline) -> bool:
    """Run once, closing nothing if it crashes; True when it did. Other errors are raised."""
    source = pipeline._source
    close = source.close
    crashed = False
    # A process that is killed does not close its source; what the system closes, the test does.
    source.close = lambda: None  # type: ignore[method-assign]
    try:
        pipeline.run(once=True)
    except FailpointError:
        crashed = True
    finally:
        if not crashed:
            close()
    return crashed
