"""Failpoints do nothing unless the environment names them, and then exactly what it asks for."""

import os
import signal
import subprocess
import sys

import pytest

from icestream import failpoints
from icestream.failpoints import FailpointError, reach, rule_on


@pytest.fixture(autouse=True)
def first_pass(monkeypatch):
    """Passes are counted for the life of a process; each test is a process of its own."""
    # What earlier tests passed must not count here, nor what the developer has set.
    monkeypatch.setattr(failpoints, "_passes", {})
    monkeypatch.delenv("ICESTREAM_FAILPOINTS", raising=False)


def passes_that_fail(name: str, passes: int) -> list[int]:
    failed = []
    for number in range(1, passes + 1):
        try:
            reach(name)
        except FailpointError as error:
            assert str(error) == f"failpoint {name}"
            failed.append(number)
    return failed


def test_without_the_variable_nothing_happens():
    """E3: failpoints cost nothing in production."""
    assert passes_that_fail(failpoints.BEFORE_SWAP, 3) == []
    assert all(rule_on(rule) for rule in failpoints.RULES)


def test_an_error_is_raised_at_the_first_pass(monkeypatch):
    """E3: a place may be made to fail."""
    # The variable is the switch that is under test; so in the tests that follow.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", "before-swap=error")
    assert passes_that_fail(failpoints.BEFORE_SWAP, 3) == [1]
    assert passes_that_fail(failpoints.AFTER_SWAP, 3) == []


def test_after_a_crash_every_place_raises(monkeypatch):
    """E3: other threads do not go on either, as they would not in a process that was killed."""
    # The second pass is the crash; the first goes by, there and elsewhere.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", "after-write=crash@2")
    assert passes_that_fail(failpoints.BEFORE_SWAP, 1) == []
    assert passes_that_fail(failpoints.AFTER_WRITE, 3) == [2, 3]
    for place in failpoints.PLACES:
        with pytest.raises(FailpointError, match="failpoint after-write"):
            reach(place)


def test_a_number_lets_earlier_passes_go_by(monkeypatch):
    """E3: a fault can be placed in any epoch."""
    # The third pass, not the first.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", "after-ack=error@3")
    assert passes_that_fail(failpoints.AFTER_ACK, 5) == [3]


def test_several_points_are_separated_by_commas(monkeypatch):
    """E3: rules and places can be combined."""
    # Both kinds, with blanks that people write.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", " rule-fence=off , after-swap=error@2")
    assert not rule_on(failpoints.RULE_FENCE)
    assert rule_on(failpoints.RULE_SWAP)
    assert passes_that_fail(failpoints.AFTER_SWAP, 3) == [2]


@pytest.mark.parametrize("rule", failpoints.RULES)
def test_each_rule_can_be_switched_off_alone(rule, monkeypatch):
    """E3: a test can take one rule of the commit protocol out."""
    # One rule, the others stay.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", f"{rule}=off")
    assert [name for name in failpoints.RULES if not rule_on(name)] == [rule]


def test_kill_ends_the_process_as_kill_9_would():
    """E3: nothing runs after the point, neither handlers nor cleanup; and it says where it was."""
    source = (
        "import atexit, sys\n"
        "from icestream import failpoints\n"
        "atexit.register(print, 'cleaned up')\n"
        "try:\n"
        "    failpoints.reach(failpoints.AFTER_SWAP)\n"
        "finally:\n"
        "    print('went on')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "ICESTREAM_FAILPOINTS": "after-swap=kill", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (-signal.SIGKILL, "")
    assert run.stderr == failpoints.killed_at(failpoints.AFTER_SWAP, 1) + "\n"
