"""The coordinator dies anywhere on an epoch's way; whoever starts it again finds it exact."""

from collections.abc import Callable

import pytest

from icestream.failpoints import PLACES, FailpointError
from tests.faults.conftest import MakeShop

SetFailpoints = Callable[[str], None]
TWO_TABLES = ("items", "orders")


def test_kill_9_at_every_place_and_the_restarts_end_exact(make_shop: MakeShop) -> None:
    """E3, E4: a real process and its JVM die at each place in turn; the next one takes over."""
    shop = make_shop(tables=TWO_TABLES, sink={"tables": {"orders": {"partition_by": ["region"]}}})
    shop.epochs(6)
    # Both tables are claimed at every start, and each claim is a swap of its own.
    kills = [
        "before-write=kill",
        "after-write=kill",
        "before-swap=kill@4",
        "after-swap=kill@3",
        "before-publish=kill@2",
        "after-publish=kill",
        "after-commit=kill",
        "after-ack=kill",
        "after-claim=kill",
    ]
    assert {kill.partition("=")[0] for kill in kills} == set(PLACES)
    for kill in kills:
        ended = shop.command("run", "--once", failpoints=kill)
        ended.assert_killed_at(kill)
    last = shop.command("run", "--once")
    assert last.exit_code == 0, last.stderr
    shop.assert_exact()


@pytest.mark.parametrize("place", ["before-swap", "after-swap"])
def test_a_crash_at_a_swap_of_any_kind(
    make_shop: MakeShop, set_failpoints: SetFailpoints, place: str
) -> None:
    """E3, I14: claims and epochs that some tables carry and others do not are brought to an end."""
    shop = make_shop(tables=TWO_TABLES, seed=2)
    shop.epochs(3)
    # At first the swaps are two claims, then claims and the tables of an epoch.
    for number in (1, 3, 4):
        set_failpoints(f"{place}=error@{number}")
        with pytest.raises(FailpointError, match=place):
            shop.run()
    set_failpoints("")
    shop.run()
    shop.assert_exact()


def test_a_crash_between_the_tables_of_an_epoch_does_not_publish_it_twice(
    make_shop: MakeShop, set_failpoints: SetFailpoints
) -> None:
    """E3, I14: the tables that carry an unfinished epoch keep it, the others get it."""
    shop = make_shop(tables=TWO_TABLES)
    shop.epochs(3)
    # Two claims, then the first table of the first epoch.
    set_failpoints("after-swap=error@3")
    with pytest.raises(FailpointError, match="after-swap"):
        shop.run()
    set_failpoints("")
    shop.epochs(1)
    shop.run()
    shop.assert_exact()


def test_crashes_between_appended_epochs_leave_every_resolved_timestamp_its_snapshot(
    make_shop: MakeShop, set_failpoints: SetFailpoints
) -> None:
    """E4, C2: a restart takes up what was added meanwhile, one snapshot for each marker."""
    shop = make_shop(tables=TWO_TABLES, seed=3, with_before=True, sink={"format_version": 3})
    for place in ("after-commit", "before-write"):
        shop.epochs(2)
        set_failpoints(f"{place}=error")
        with pytest.raises(FailpointError, match=place):
            shop.run()
    set_failpoints("")
    shop.run()
    shop.assert_exact()
