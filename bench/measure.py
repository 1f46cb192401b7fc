"""Wall and CPU time of this process and all that descend from it, JVM and workers included."""

import os
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The best of several repetitions: on a shared machine the others measure the neighbours."""

    wall_seconds: float
    cpu_seconds: float


def repeat(
    work: Callable[[int], object], warm_ups: int, repetitions: int, apart: Collection[int] = ()
) -> Measured:
    """Run `work` with a running number, first unmeasured, then measured.

    Processes `apart` are not charged for: servers that all sides use.
    """
    walls, processors = [], []
    for number in range(warm_ups + repetitions):
        wall, before = time.perf_counter(), cpu_seconds()
        work(number)
        if number >= warm_ups:
            walls.append(time.perf_counter() - wall)
            after = {pid: s for pid, s in cpu_seconds().items() if pid not in apart}
            processors.append(_spent(before, after))
    return Measured(wall_seconds=min(walls), cpu_seconds=min(processors))


def cpu_seconds() -> dict[int, float]:
    """CPU time so far of each process of the tree."""
    return {pid: _ticks(pid) / _TICKS for pid in _tree(os.getpid())}


def _spent(before: dict[int, float], after: dict[int, float]) -> float:
    """What the living processes have used; idle ones that Spark ended meanwhile do not count."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += children.get(pid, [])
    return found


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return sum(int(field) for field in fields[11:13]) if fields else 0


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
