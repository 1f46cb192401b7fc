"""How a pipeline is: its state, and what its tables got last."""

import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from icestream import metrics
from icestream.errors import IcestreamError
from icestream.sinks import Committed

# A topic has hundreds of partitions; a log line is for people.
POSITION_PARTS_SHOWN = 8


class State(StrEnum):
    """How a pipeline is."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    HALTED = "halted"
    FENCED = "fenced"
    ENDED = "ended"


class Health:
    """The state of a pipeline and its tables, for those who watch it; safe between threads."""

    def __init__(self, pipeline: str):
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._error: IcestreamError | None = None
        self._tables: dict[str, dict[str, object]] = {}
        self.become(State.STARTING)

    def become(self, state: State, error: IcestreamError | None = None) -> None:
        """Enter a state, with the error that led there."""
        with self._lock:
            self._enter(state, error)

    def go_on(self, state: State, trouble: Callable[[], IcestreamError | None]) -> None:
        """Enter a state, or be stalled while there is trouble."""
        with self._lock:
            error = trouble()
            self._enter(State.STALLED if error else state, error)

    def _enter(self, state: State, error: IcestreamError | None) -> None:
        self._state, self._error = state, error
        for each in State:
            metrics.HEALTH.labels(self._pipeline, each.value).set(each == state)

    def committed(self, epoch: int, position: str, results: Sequence[Committed]) -> None:
        """Note what an epoch brought to its tables."""
        with self._lock:
            for result in results:
                self._tables[result.table] = {
                    "epoch": epoch,
                    "position": position,
                    "snapshot_id": result.snapshot_id,
                    "committed_at": time.time(),
                }

    def to_json(self) -> dict[str, object]:
        """The health as plain data."""
        with self._lock:
            error = self._error.to_json() if self._error else None
            tables = {name: {"state": self._state, **t} for name, t in self._tables.items()}
            return {"state": self._state, "error": error, "tables": tables}


def brief(position: str) -> str:
    """A position for people: of many parts, such as partitions, the first and how many follow."""
    parts = position.split(", ")
    if len(parts) <= POSITION_PARTS_SHOWN:
        return position
    shown = ", ".join(parts[:POSITION_PARTS_SHOWN])
    return f"{shown}, and {len(parts) - POSITION_PARTS_SHOWN:,} more"
