"""The four rules of every commit, written once for every destination.

    read the head ──► published already? ──► fence, continuity ──► swap exactly this head
         ▲                                                              │
         └────────────── conflict, or the answer was lost ◄─────────────┘

A destination does five things (`Swappable`): it reads its head afresh, tells the progress on it,
refuses a head with another history, refuses what does not fit a head, and swaps a head, if it still
is the one that was read. The head of an Iceberg table is its metadata, that of OpenSearch a
document. An attempt reads, checks and swaps. Four rules make it exact. Without a rule rows are lost
or doubled, which tests show by switching rules off. Continuity also stops what the fence stops (a
zombie) and what the read-back stops (an epoch that is committed twice): tests of these two switch
continuity off as well.

1. Swap: the destination replaces its head only if it still is the one that was checked.
2. Continuity: the progress found there is exactly the one this run last saw or made there, and the
   epoch is newer. So the epoch joins on to what is durable, whoever else wrote in between, and no
   destination takes an epoch twice, whoever asks for it.
3. Fence: no newer generation of the pipeline has claimed it. A starting run claims with a commit of
   its own, which also makes every commit prepared before it fail. Zombies end here.
4. Read-back: before every attempt, check whether the destination already has this epoch, written
   by this run. A refusal does not prove the contrary: the client may have sent the commit twice.

An attempt lands, is refused, or its outcome is unknown. Unknown deletes nothing: the next attempt
reads back. The obvious wrong way is to check first and commit with a library's own retry: it
rebases onto a newer head that nobody checked.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from icestream import failpoints
from icestream.epoch import Progress
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    Fenced,
    IcestreamError,
    ProgressLost,
    TargetUnavailable,
)
from icestream.patience import Bridge

K = TypeVar("K")
H = TypeVar("H")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Failed = Callable[[IcestreamError], None]
"""Told of an attempt that failed; returns for another one, or raises."""

# A conflict is settled by another try at once. This many mean a rival that is always faster.
CONFLICTS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What errors call a destination: a table, or the pipeline whose document it is.

    `over` follows "has taken over"; `meddling` follows "who else".
    """

    name: str
    over: str
    meddling: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The progress that a destination has, as this run knows it, and the one that it is to have.

    `recount` corrects what is said of an epoch that is there already.
    """

    expected: Progress
    new: Progress
    subject: Subject
    recount: bool = False


@dataclass(frozen=True, slots=True)
class Landed(Generic[H, R]):
    """A move that is durable: the head it was read from, and what the swap gave.

    Without a result an earlier attempt, whose answer was lost, turns out to have landed.
    """

    head: H
    result: R | None


class Swappable(Protocol[K, H, R_co]):
    """What can take an epoch: one place that has a head, or several that are swapped at once."""

    def heads(self, keys: Collection[K]) -> Mapping[K, H]:
        """The heads as they are now, read afresh."""
        ...

    def progress(self, head: H) -> Progress | None:
        """The progress that stands on a head; None when there is none."""
        ...

    def refuse_broken_history(self, key: K, head: H, broken: IcestreamError | None) -> None:
        """Raise if the head does not continue what this run knows.

        `broken` is what the progress on the head tells; it is raised after this call. None: the
        progress joins on. A destination raises here what tells more (the table was rolled back),
        or what its progress cannot show (the table is another one).
        """
        ...

    def fits(self, key: K, head: H) -> None:
        """Raise unless what was written can be published on this head."""
        ...

    def swap(self, heads: Mapping[K, H]) -> Mapping[K, R_co]:
        """Publish on exactly these heads, all or none.

        Raises `CommitConflict` when one of them is another by now, `CommitUnknown` when the answer
        was lost.
        """
        ...


def publish(
    destination: Swappable[K, H, R], moves: Mapping[K, Move], failed: Failed
) -> dict[K, Landed[H, R]]:
    """Make the moves; when this returns each is durable exactly once.

    Every attempt looks at all heads afresh. Those that carry their move already are left as they
    are; all others are checked before any is swapped. Raises `Fenced` and `ProgressLost`, and what
    the destination refuses with, with nothing published; and whatever `failed` raises.
    """

    def attempt(attempted: bool) -> dict[K, Landed[H, R]]:
        heads = destination.heads(moves.keys())
        missing = {
            key: heads[key]
            for key, move in moves.items()
            if not published(destination.progress(heads[key]), move, attempted)
        }
        for key, head in missing.items():
            _check(destination, key, head, moves[key])
        results = destination.swap(missing) if missing else {}
        return {key: Landed(heads[key], results.get(key)) for key in moves}

    return insist(attempt, failed)


def insist(attempt: Callable[[bool], R], failed: Failed) -> R:
    """Try until an attempt has an answer; an attempt is told whether there was one before it."""
    attempted = False
    while True:
        try:
            return attempt(attempted)
        except (CommitConflict, CommitUnknown, TargetUnavailable) as error:
            failed(error)
        attempted = True


def bounded(noted: Failed | None = None, conflicts_max: int = CONFLICTS_MAX) -> Failed:
    """Ends attempts that fail too often; `noted` is told of each.

    A conflict is tried again at once. After a lost answer, or none, a moment is waited; a
    destination that stays silent is waited for by the pipeline, which calls again.
    """
    bridge, conflicts = Bridge(), 0

    def failed(error: IcestreamError) -> None:
        nonlocal conflicts
        if noted is not None:
            noted(error)
        if not isinstance(error, CommitConflict):
            bridge.wait(error)
            return
        conflicts += 1
        if conflicts >= conflicts_max:
            raise error

    return failed


def published(found: Progress | None, move: Move, attempted: bool) -> bool:
    """Read-back: whether the epoch is there already, by a lost attempt or an earlier one.

    What is said there of the epoch's other tables does not matter: its rows are there.
    """
    if attempted and not failpoints.rule_on(failpoints.RULE_READ_BACK):
        return False
    if found is None or found.generation != move.new.generation:
        return False
    return found == move.new if move.recount else found.same_epoch(move.new)


def refuse_newer(found: Progress, generation: int, subject: Subject) -> None:
    """Fence: raise `Fenced` when a newer run than that of `generation` has claimed it."""
    if failpoints.rule_on(failpoints.RULE_FENCE) and found.generation > generation:
        raise fenced(found, generation, subject)


def fenced(found: Progress, generation: int, subject: Subject) -> Fenced:
    """The error of a run that is not the newest."""
    return Fenced(
        f"a newer run of pipeline {found.pipeline} has taken over{subject.over}",
        detail=f"Generation {found.generation} has claimed it, this run is {generation}.",
        hint="Nothing is lost; let the newer run work, or stop it before you start this one.",
    )


def _discontinued(found: Progress, move: Move) -> IcestreamError | None:
    """What is wrong with the progress that was found; None when the epoch joins on."""
    name = move.subject.name
    if found.epoch >= move.new.epoch and not (move.recount and found == move.expected):
        return Fenced(
            f"{name} is ahead of this run",
            detail=f"It holds epoch {found.epoch} while this run is at {move.new.epoch}.",
            hint="Another run of the same pipeline is active; stop one of them.",
        )
    if found != move.expected:
        return _not_left(found, move.expected, move.subject)
    return None


def refuse_others(found: Progress, mine: Progress, subject: Subject) -> None:
    """Continuity, for what leaves the progress as it is: it must be this run's."""
    if failpoints.rule_on(failpoints.RULE_CONTINUITY) and found != mine:
        raise _not_left(found, mine, subject)


def _not_left(found: Progress, expected: Progress, subject: Subject) -> ProgressLost:
    return ProgressLost(
        f"the progress of {subject.name} is not the one this run left there",
        detail=f"Epoch {expected.epoch} was expected and epoch {found.epoch} found.",
        hint=f"Check who else {subject.meddling}, then start again.",
    )


def swap_rule() -> bool:
    """Swap: whether a destination holds against the head that was checked; off only in tests."""
    return failpoints.rule_on(failpoints.RULE_SWAP)


def _check(destination: Swappable[K, H, R], key: K, head: H, move: Move) -> None:
    """Fence, continuity and what the destination itself asks for, on the head to be swapped."""
    found = destination.progress(head) or Progress(pipeline=move.new.pipeline)
    refuse_newer(found, move.new.generation, move.subject)
    if failpoints.rule_on(failpoints.RULE_CONTINUITY):
        broken = _discontinued(found, move)
        destination.refuse_broken_history(key, head, broken)
        if broken:
            raise broken
    destination.fits(key, head)
