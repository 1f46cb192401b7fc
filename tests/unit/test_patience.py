"""Passing trouble is waited out by one rule, told of sparingly, and never hides a stop."""

import threading

import pytest

from icestream import patience
from icestream.errors import SchemaRejected, SourceUnavailable, TargetUnavailable
from icestream.patience import Bridge, Deadline, Patience, Stopped, Trouble, bridged

AWAY = TargetUnavailable("the catalog is away", hint="Look there.")


class Clock:
    """Time that passes only in pauses, and an event that is never set but by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.stopped = False

    def __call__(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.stopped

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.pauses.append(seconds)
        return self.stopped


def patient(clock: Clock, bounded: bool = False) -> Patience:
    found = Patience("p", clock, lambda: None, clock)
    found.bounded = bounded
    return found


def test_a_running_pipeline_waits_without_end_at_growing_intervals():
    """E13, Mend f2: half a second at first, half a minute at most."""
    clock, trouble = Clock(), Trouble()
    waiting = patient(clock)
    for _ in range(500):
        waiting.wait(trouble, AWAY)
    assert clock.pauses[0] <= 0.5
    assert 15.0 <= min(clock.pauses[10:]) <= max(clock.pauses) <= 30.0


def test_a_single_run_gives_up_after_the_bound():
    """E13, Mend f2: the one bound, two minutes or so many tries; the error is the last one met."""
    clock, trouble = Clock(), Trouble()
    waiting = patient(clock, bounded=True)
    with pytest.raises(TargetUnavailable, match="is away"):
        for _ in range(500):
            waiting.wait(trouble, AWAY)
    assert 60.0 <= clock.now - 1000.0 <= patience.ONCE_SECONDS_MAX
    # Tries that take long themselves count by their time.
    clock, trouble = Clock(), Trouble()
    waiting = patient(clock, bounded=True)
    waiting.wait(trouble, AWAY)
    clock.now += patience.ONCE_SECONDS_MAX
    with pytest.raises(TargetUnavailable):
        waiting.wait(trouble, AWAY)


def test_trouble_is_told_when_it_begins_again_less_and_less_often_and_when_it_ends(caplog):
    """E13, Mend f2, f4: with the reason; a day of it is some lines."""
    caplog.set_level("INFO", "icestream.patience")
    clock, trouble = Clock(), Trouble()
    waiting = patient(clock)
    while clock.now < 1000.0 + 86_400:
        waiting.wait(trouble, AWAY)
    waiting.end(trouble)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "stalled: the catalog is away\nhint: Look there."
    assert lines[1].startswith("still stalled after ")
    assert "the catalog is away" in lines[1]
    assert 20 <= len(lines) <= 35
    assert lines[-1].startswith("goes on after 864")
    assert lines[-1].endswith("s: the catalog is away")


def test_one_trouble_that_ends_does_not_hide_another():
    """E13, Mend f2: health is never better than the truth."""
    waiting = patient(Clock())
    source, target = Trouble(), Trouble()
    waiting.tell(source, SourceUnavailable("the source is away"))
    waiting.tell(target, AWAY)
    assert waiting.trouble() is AWAY
    waiting.end(target)
    assert str(waiting.trouble()) == "the source is away"
    waiting.end(source)
    assert waiting.trouble() is None


def test_a_run_that_is_stopped_does_not_wait_to_the_end_of_a_pause(monkeypatch):
    """U2, Mend f2: a stop is quick however long the trouble lasts."""
    monkeypatch.setattr(patience, "RETRY_SECONDS", 3600.0)  # a pause that nobody waits for
    monkeypatch.setattr(patience, "RETRY_SECONDS_MAX", 3600.0)  # and that is not cut short
    stop = threading.Event()
    waiting = Patience("p", stop, lambda: None)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(Stopped):
            waiting.wait(Trouble(), AWAY)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not ended.wait(0.1)
    stop.set()
    assert ended.wait(60)
    with pytest.raises(Stopped):
        waiting.wait(Trouble(), AWAY)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in pauses."""
    clock = Clock()
    monkeypatch.setattr(patience.time, "sleep", clock.wait)  # nobody waits for real seconds
    monkeypatch.setattr(patience.time, "monotonic", clock)  # the time of these pauses
    return clock


def failures(bridge: Bridge) -> int:
    """How often the trouble is bridged before it is raised."""
    before = bridge.tries
    with pytest.raises(TargetUnavailable, match="is away"):
        for _ in range(500):
            bridge.wait(AWAY)
    return bridge.tries - before - 1


def test_below_the_loop_a_moment_of_trouble_is_bridged_and_no_more(clock):
    """E13, Mend f2: what lasts some seconds is told by the loop, which alone waits for it."""
    assert failures(Bridge()) == len(patience.PAUSES_SECONDS)
    assert all(
        most / 2 <= pause <= most
        for pause, most in zip(clock.pauses, patience.PAUSES_SECONDS, strict=True)
    )
    assert clock.now - 1000.0 <= patience.BRIDGED_SECONDS_MAX


def test_tries_that_take_long_themselves_are_not_repeated_often(clock):
    """E13, Mend f2: the time counts from the first failure."""
    bridge = Bridge()
    bridge.wait(AWAY)
    clock.now += patience.BRIDGED_SECONDS_MAX
    with pytest.raises(TargetUnavailable):
        bridge.wait(AWAY)
    assert bridge.tries == 2


def test_what_goes_on_has_its_time_anew(clock):
    """O11: a large load on a busy cluster ends only when nothing at all is taken."""
    bridge = Bridge()
    for _ in range(100):
        bridge.wait(AWAY)
        bridge.refresh()
    assert failures(bridge) == len(patience.PAUSES_SECONDS)
    assert bridge.tries == 101 + len(patience.PAUSES_SECONDS)


def test_a_wait_for_what_others_do_ends_with_its_time(clock):
    """E13: looks are some moments apart, and none comes after the time."""
    deadline, looks = Deadline(1.0), 0
    while deadline.look_again():
        looks += 1
    assert deadline.passed
    assert looks == pytest.approx(1.0 / patience.POLL_SECONDS, abs=2)


def test_only_passing_trouble_is_tried_again(clock):
    """E13: what a person must decide, and what is no trouble of this kind, is told at once."""
    answers = iter([AWAY, AWAY, "here", SchemaRejected("no such column"), AWAY])

    def attempt() -> str:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    assert bridged(attempt) == "here"
    with pytest.raises(SchemaRejected):
        bridged(attempt)
    with pytest.raises(TargetUnavailable):
        bridged(attempt, lambda error: "loading" in str(error))
