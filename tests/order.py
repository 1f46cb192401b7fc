"""The order of the test files: those that take longest come first.

Two processes share the tests of `make test`. Each begins with half of them, and who is done takes
over some of the other's last ones. A long test that comes last keeps one process busy while the
other has nothing to do. `durations.json` says how many seconds each file took;
`make test-durations` measures again. A file that is not listed is taken for a long one if it needs
servers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DURATIONS = Path(__file__).parent / "durations.json"
WITH_SERVERS = ("tests/integration/", "tests/faults/")
# Seconds of a file that was not measured yet.
WITH_SERVERS_SECONDS = 60.0


def durations() -> dict[str, float]:
    """The seconds of each file that was measured, by its path from the root."""
    found: dict[str, float] = json.loads(DURATIONS.read_text())
    return found


def longest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Sort tests by how long their file takes; the tests of a file keep their order."""

    def seconds_of(item: pytest.Item) -> float:
        file = _file(item.nodeid)
        return seconds.get(file, WITH_SERVERS_SECONDS if file.startswith(WITH_SERVERS) else 0.0)

    items.sort(key=seconds_of, reverse=True)


class Stopwatch:
    """A pytest plugin that writes down how long each file took, and keeps what it did not run."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file(report.nodeid)
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        known = {file: each for file, each in durations().items() if (ROOT / file).exists()}
        measured = {file: round(each, 1) for file, each in self._seconds.items()}
        longest = sorted({**known, **measured}.items(), key=lambda entry: (-entry[1], entry[0]))
        DURATIONS.write_text(json.dumps(dict(longest), indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
