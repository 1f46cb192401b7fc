"""Threads of which one runs at a time, in an order that only a seed decides.

    Stage ── gives the turn to ──► Actor (the main thread of a process, or one of its epochs)

What the product has of threads (locks, conditions, events, executors) is replaced by parts that
hand the turn on instead of blocking. So a run depends on its seed and not on the machine, and a
program that waits for itself is found out: nobody can go on, and time passes in vain.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

# A run takes a fraction of a second; one that takes this long waits for something real.
RUN_SECONDS_MAX = 120.0
# Nobody could go on but those whose time was up, so many times in a row: they wait for each other.
TIMEOUTS_MAX = 100


class Crash(BaseException):
    """The process is gone; like kill -9 nothing of the product may catch it."""


class Owner(Protocol):
    """What threads belong to: a process."""

    def asleep(self) -> bool:
        """Whether it gets no turn while others can go on."""
        ...


class Actor:
    """A thread that runs when it is its turn; while it waits, `ready` says whether it may go on."""

    def __init__(self, owner: Owner):
        self.owner = owner
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = _always
        self.timed = False


def _always() -> bool:
    return True


class Stage:
    """Gives the turn to one actor after the other."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._live: list[Actor] = []
        self._current: Actor | None = None
        self._timeouts = 0
        self._over = threading.Semaphore(0)
        self.hung = False

    def owners(self) -> int:
        """How many processes are running."""
        return len({id(actor.owner) for actor in self._live})

    def enter(self, owner: Owner, work: Callable[[], None]) -> None:
        """Let a thread wait for its turn."""
        actor = Actor(owner)
        self._live.append(actor)
        threading.Thread(target=self._play, args=(actor, work), daemon=True).start()

    def run(self) -> None:
        """Let actors run until none is left."""
        if self._live:
            self._give_turn()
            if not self._over.acquire(timeout=RUN_SECONDS_MAX):
                raise TimeoutError("a simulated process hangs")
        self._current = None

    def current(self) -> Owner | None:
        """Whose turn it is."""
        return self._current.owner if self._current else None

    def pause(self) -> None:
        """Give the others a chance; returns when it is this actor's turn again."""
        actor = self._current
        if actor is not None:
            self._give_turn()
            actor.turn.acquire()
            self._current = actor

    def wait_until(self, ready: Callable[[], bool], timed: bool = False) -> bool:
        """Let the others go on until something is so; False when time was up before."""
        if self.hung:
            raise Crash
        if ready():
            return True
        actor = self._current
        assert actor is not None, "whoever waits is an actor"
        actor.ready, actor.timed = ready, timed
        self.pause()
        actor.ready, actor.timed = _always, False
        if self.hung:
            raise Crash
        return ready()

    def _play(self, actor: Actor, work: Callable[[], None]) -> None:
        actor.turn.acquire()
        self._current = actor
        try:
            work()
        finally:
            self._live.remove(actor)
            if self._live:
                self._give_turn()
            else:
                self._over.release()

    def _give_turn(self) -> None:
        ready = [actor for actor in self._live if actor.ready()]
        self._timeouts = 0 if ready else self._timeouts + 1
        waiting = [actor for actor in self._live if actor.timed]
        if not ready and (not waiting or self._timeouts > TIMEOUTS_MAX):
            self.hung = True
        awake = [actor for actor in ready if not actor.owner.asleep()]
        self._rng.choice(awake or ready or waiting or self._live).turn.release()


class StagedLock:
    """Like `threading.Lock`."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> bool:
        """Wait until nobody holds it."""
        self._stage.wait_until(lambda: not self._held)
        self._held = True
        return True

    def release(self) -> None:
        """Let it go."""
        self._held = False


class StagedCondition:
    """Like `threading.Condition`."""

    def __init__(self, stage: Stage, lock: StagedLock | None = None):
        self._stage = stage
        self._lock = lock or StagedLock(stage)
        self._told = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until somebody tells; with a timeout also until nobody else can go on."""
        before = self._told
        self._lock.release()
        try:
            return self._stage.wait_until(lambda: self._told > before, timeout is not None)
        finally:
            with suppress(Crash):
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until somebody tells and it is so."""
        while not predicate():
            if not self.wait(timeout) and timeout is not None:
                return predicate()
        return True

    def notify_all(self) -> None:
        """Tell all that wait."""
        self._told += 1

    def notify(self, n: int = 1) -> None:
        """Tell one that waits: that others wake up as well must do no harm."""
        self._told += 1


class StagedEvent:
    """Like `threading.Event`; pauses take no time."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._set = False

    def set(self) -> None:
        """From now on it is set."""
        self._set = True

    def clear(self) -> None:
        """From now on it is not set."""
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; with a timeout the others get a chance, and that is all."""
        if timeout is None:
            return self._stage.wait_until(self.is_set)
        self._stage.pause()
        return self._set


class Threading:
    """What the product takes from the module `threading`."""

    def __init__(self, stage: Stage):
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> StagedLock:
        return StagedLock(self._stage)

    def Condition(self, lock: StagedLock | None = None) -> StagedCondition:
        return StagedCondition(self._stage, lock)

    def Event(self) -> StagedEvent:
        return StagedEvent(self._stage)


class Pending:
    """A call that was handed to an executor."""

    def __init__(self, pool: "SeededExecutor", call: Callable[[], Any]):
        self._pool = pool
        self._call = call
        self._error: BaseException | None = None
        self._answer: Any = None
        self._begun = False
        self._done = False

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        self._begun = True
        if not self._done:
            try:
                self._answer = self._call()
            except BaseException as error:
                self._error = error
            self._done = True

    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._done

    def exception(self) -> BaseException | None:
        """The error that it ended with, once it has ended."""
        self._pool.run_until(self)
        return self._error

    def result(self) -> Any:
        """What it returned, once it has ended."""
        if error := self.exception():
            raise error
        return self._answer

    def cancel(self) -> bool:
        """Take it back, unless it has begun."""
        if self._begun:
            return False
        self._done = True
        return True


class SeededExecutor:
    """Runs what a thread pool would, in an order that the seed decides.

    With an owner each call is an actor of its own; else all run in the thread that asks for them.
    """

    def __init__(self, stage: Stage, rng: random.Random, owner: Owner | None):
        self._stage = stage
        self._rng = rng
        self._owner = owner
        self._calls: list[Pending] = []

    def __enter__(self) -> "SeededExecutor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for call in self._calls:
            self.run_until(call)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Pending:
        """Have it called."""
        pending = Pending(self, lambda: call(*arguments))
        self._calls.append(pending)
        if self._owner is not None:
            self._stage.enter(self._owner, pending.run)
        return pending

    def map(self, call: Callable[..., Any], *items: Sequence[Any]) -> Iterator[Any]:
        """Have it called with each of the items."""
        futures = [self.submit(call, *arguments) for arguments in zip(*items, strict=True)]
        return (future.result() for future in futures)

    def run_until(self, pending: Pending) -> None:
        """Return when the call has ended."""
        if self._owner is not None:
            self._stage.wait_until(pending.done)
            return
        while not pending.done():
            self._rng.choice([call for call in self._calls if not call.done()]).run()


def wait(stage: Stage, futures: Iterable[Pending]) -> None:
    """Return when all of these have ended."""
    for future in futures:
        stage.wait_until(future.done)
