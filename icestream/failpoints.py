"""Named places where a test may stop, kill or slow the program, or take a commit rule out.

Nothing happens unless the environment variable `ICESTREAM_FAILPOINTS` names a point, as
`name=action[@n]` separated by commas: `kill` ends the process as kill -9 would, `error` raises,
`crash` raises there and from then on at every place in every thread, as if the process were gone,
`off` switches the rule of that name off. `@n` lets the first n-1 passes go by. A kill says on
standard error where it was, so that a test can tell it from any other.
"""

import os
import signal
import threading

# Places on the way of an epoch, in order.
BEFORE_WRITE = "before-write"
IN_WORKER = "in-worker"
AFTER_WRITE = "after-write"
BEFORE_SWAP = "before-swap"
AFTER_SWAP = "after-swap"
# Claims are swaps too; these two stand around the swaps that publish an epoch, and no others.
BEFORE_PUBLISH = "before-publish"
AFTER_PUBLISH = "after-publish"
AFTER_COMMIT = "after-commit"
AFTER_ACK = "after-ack"
AFTER_CLAIM = "after-claim"
AFTER_SLOT = "after-slot"

# The four rules of the commit protocol; a test that takes one out must see the damage.
RULE_SWAP = "rule-swap"
RULE_CONTINUITY = "rule-continuity"
RULE_FENCE = "rule-fence"
RULE_READ_BACK = "rule-read-back"

PLACES = (
    BEFORE_WRITE,
    AFTER_WRITE,
    BEFORE_SWAP,
    AFTER_SWAP,
    BEFORE_PUBLISH,
    AFTER_PUBLISH,
    AFTER_COMMIT,
    AFTER_ACK,
    AFTER_CLAIM,
)
RULES = (RULE_SWAP, RULE_CONTINUITY, RULE_FENCE, RULE_READ_BACK)

_VARIABLE = "ICESTREAM_FAILPOINTS"
_STANDARD_ERROR = 2
_passes: dict[str, int] = {}
_lock = threading.Lock()


class FailpointError(Exception):
    """Raised by a failpoint whose action is `error` or `crash`."""


def reach(name: str) -> None:
    """Do what the environment asks for at this place; nothing when it asks for nothing."""
    settings = _settings()
    if not settings:
        return
    action, from_pass = settings.get(name, ("", 1))
    with _lock:
        _passes[name] = _passes.get(name, 0) + 1
        here = _passes[name] == from_pass
        crashed = [p for p, (a, n) in settings.items() if a == "crash" and _passes.get(p, 0) >= n]
    if crashed:
        raise FailpointError(f"failpoint {crashed[0]}")
    if not here:
        return
    if action == "kill":
        # Past all buffers: nothing is flushed after this.
        os.write(_STANDARD_ERROR, f"{killed_at(name, from_pass)}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "error":
        raise FailpointError(f"failpoint {name}")


def killed_at(name: str, from_pass: int) -> str:
    """What a process says on standard error before it is killed at a pass of a place."""
    return f"killed at failpoint {name}, pass {from_pass}"


def crashes() -> bool:
    """Whether a crash is asked for somewhere: then an error of a failpoint is the end of all."""
    return any(action == "crash" for action, _ in _settings().values())


def rule_on(name: str) -> bool:
    """True unless a test switched this rule of the commit protocol off."""
    return _settings().get(name, ("", 1))[0] != "off"


def _settings() -> dict[str, tuple[str, int]]:
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return {}
    settings = {}
    for part in text.split(","):
        name, _, action = part.partition("=")
        action, _, number = action.partition("@")
        settings[name.strip()] = (action.strip(), int(number or 1))
    return settings
