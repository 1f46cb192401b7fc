"""Each rule of the commit protocol is needed: without it, a scenario that was exact is not.

A scenario ends with the pipeline's work done, after whatever restarts and decisions it takes with
all rules on. The same scenario is then played with a rule switched off, together with the one that
covers for it where there is one.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from icestream.errors import Fenced, IcestreamError, RolledBack
from tests.faults.checking import NotExact
from tests.faults.shop import Shop
from tests.faults.test_fencing import WAIT_SECONDS_MAX, start_zombie

SetFailpoints = Callable[[str], None]
Scenario = Callable[[Shop], None]


def begin(shop: Shop) -> None:
    """A table with one epoch in it, and two more in the feed."""
    shop.epochs(1)
    shop.run()
    shop.epochs(2)


def zombie_swaps_late(shop: Shop) -> None:
    """A run's swap is held back until its successor has finished; it then tries again."""
    begin(shop)
    paused, released = threading.Event(), threading.Event()

    def stall() -> None:
        rule = shop.proxy.on("POST", shop.commit_path())
        rule.reached = paused
        rule.stall(released)

    shop.on_commit("orders", 3, stall)
    let_it_finish_after_its_successor(shop, paused, released)


def zombie_checked_early(shop: Shop) -> None:
    """A run's look at the table is answered before its successor starts and seen after it ended."""
    begin(shop)
    paused, released = threading.Event(), threading.Event()

    def stall() -> None:
        rule = shop.proxy.on("GET", shop.commit_path())
        rule.reached = paused
        rule.stall_after(released)

    shop.proxy.on("POST", shop.commit_path()).call_before(stall)
    let_it_finish_after_its_successor(shop, paused, released)


def let_it_finish_after_its_successor(
    shop: Shop, paused: threading.Event, released: threading.Event
) -> None:
    zombie = start_zombie(shop, paused)
    shop.successor().run()
    released.set()
    error = zombie.exception(WAIT_SECONDS_MAX)
    assert error is None or isinstance(error, Fenced), error


def answer_is_lost(shop: Shop) -> None:
    """The answer to a commit that landed is lost."""
    begin(shop)
    shop.on_commit(
        "orders", 2, lambda: shop.proxy.on("POST", shop.commit_path()).answer_500_after()
    )
    with suppress(Fenced):
        shop.run()


def table_is_rolled_back(shop: Shop) -> None:
    """A table is rolled back between two of its epochs; the operator asks for a replay."""
    begin(shop)
    shop.on_commit(
        "orders",
        3,
        lambda: shop.proxy.on("POST", shop.commit_path()).call_before(
            lambda: shop.roll_back("orders", 1)
        ),
    )
    try:
        shop.run()
    except RolledBack:
        shop.settle_rollback("orders", replay=True)
        shop.run()


CASES = [
    (zombie_checked_early, ["rule-swap"]),
    (table_is_rolled_back, ["rule-continuity"]),
    (zombie_swaps_late, ["rule-fence", "rule-continuity"]),
    (answer_is_lost, ["rule-read-back", "rule-continuity"]),
]


@pytest.mark.parametrize(("scenario", "rules"), CASES)
def test_a_scenario_is_exact_with_all_rules_and_not_without(
    shop: Shop, set_failpoints: SetFailpoints, scenario: Scenario, rules: list[str]
) -> None:
    """E3, E6, I5, I6: swap; continuity; fence (continuity covers it); read-back (as well)."""
    scenario(shop)
    shop.assert_exact()
    other = shop.elsewhere()
    set_failpoints(",".join(f"{rule}=off" for rule in rules))
    scenario(other)
    set_failpoints("")
    with pytest.raises(NotExact):
        other.assert_exact()


def test_without_read_back_a_run_takes_its_own_commit_for_a_rivals(
    shop: Shop, set_failpoints: SetFailpoints
) -> None:
    """I5, I6: continuity alone keeps it exact, but stops a run that nobody has replaced."""
    begin(shop)
    set_failpoints("rule-read-back=off")
    shop.on_commit(
        "orders", 2, lambda: shop.proxy.on("POST", shop.commit_path()).answer_500_after()
    )
    with pytest.raises(IcestreamError, match="ahead of this run"):
        shop.run()
    set_failpoints("")
    shop.run()
    shop.assert_exact()


def test_without_the_fence_continuity_still_stops_a_zombie(
    shop: Shop, set_failpoints: SetFailpoints
) -> None:
    """E6: the progress it last saw is not the one it finds, whoever left it there."""
    set_failpoints("rule-fence=off")
    zombie_swaps_late(shop)
    set_failpoints("")
    shop.assert_exact()
