"""A pipeline at work in a thread, as tests watch it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from icestream.pipeline import Pipeline
from tests.servers import wait_until

# A run takes seconds; on a busy machine it may take minutes.
SECONDS_MAX = 240.0


@contextmanager
def running(pipeline: Pipeline) -> Iterator[None]:
    """Runs while the block does, without end; then it is stopped, and what ended it is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            pipeline.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="running", daemon=True)
    thread.start()
    try:
        yield
    finally:
        pipeline.stop()
        thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_for_state(pipeline: Pipeline, state: str, reason: str = "") -> None:
    """Wait until the health says so, with the reason in the error's message."""

    def there() -> bool:
        health = pipeline.health.to_json()
        error = health["error"]
        message = str(error["message"]) if isinstance(error, dict) else ""
        return health["state"] == state and reason in message

    wait_until(there, SECONDS_MAX, f"{state} {reason}")
