"""Somebody rolls a table back: the pipeline says so and goes on only when it was told how."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from icestream.errors import RolledBack
from icestream.failpoints import FailpointError
from tests.faults.checking import assert_exact, published, resolved
from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop
from tests.integration import conftest as integration
from tests.integration.pipelines import Shell
from tests.oracle import RandomFeed

shell = integration.shell

SetFailpoints = Callable[[str], None]
NEEDS_OPERATOR = 3
TWO_TABLES = ("items", "orders")


def refuse_to_run(shop: Shop) -> None:
    """The next run stops and names both ways out; it leaves the table as it is."""
    before = {table: shop.lake.snapshots(shop.name(table)) for table in shop.tables}
    with pytest.raises(RolledBack) as rolled_back:
        shop.run()
    assert_names_both_ways(rolled_back.value)
    assert before == {table: shop.lake.snapshots(shop.name(table)) for table in shop.tables}


def assert_names_both_ways(error: RolledBack) -> None:
    assert error.exit_code == NEEDS_OPERATOR
    assert "orders was rolled back" in error.message
    assert "icestream rollback --replay" in str(error)
    assert "icestream rollback --accept" in str(error)


def without(feed: RandomFeed, table: str, undone: list[str]) -> RandomFeed:
    """The feed as if the changes of a table that these timestamps brought had never been."""
    spans = zip([(0, 0), *feed.resolved], feed.resolved, strict=False)
    lost = [span for span in spans if f"{span[1][0]}.{span[1][1]:010d}" in undone]
    kept = [
        change
        for change in feed.log
        if change.table != table or not any(low < change.at <= high for low, high in lost)
    ]
    return replace(feed, log=kept)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_replay_brings_back_every_snapshot_that_was_undone(shop: Shop, epochs: int) -> None:
    """E8: one snapshot for each resolved timestamp after the point rolled back to."""
    shop.epochs(4)
    shop.run()
    shop.roll_back("orders", epochs)
    refuse_to_run(shop)
    shop.settle_rollback("orders", replay=True)
    shop.epochs(1)
    shop.run()
    shop.assert_exact()


def test_a_replay_after_a_rollback_to_before_the_first_epoch(shop: Shop) -> None:
    """E8: what is left is the claim, and the whole history comes again."""
    shop.epochs(3)
    shop.run()
    claim = published(shop.lake, shop.name())[0]["parent_id"]
    shop.call("rollback_to_snapshot", "orders", f"snapshot_id => {claim}")
    refuse_to_run(shop)
    shop.settle_rollback("orders", replay=True)
    shop.run()
    shop.assert_exact()


def test_an_accepted_rollback_goes_on_without_what_was_undone(shop: Shop) -> None:
    """E8: the undone changes stay undone, all later ones come."""
    shop.epochs(4)
    shop.run()
    undone = resolved(shop.lake, shop.name())[2:]
    shop.roll_back("orders", 2)
    refuse_to_run(shop)
    shop.settle_rollback("orders", replay=False)
    shop.epochs(2)
    shop.run()
    assert_exact(shop.lake, shop.namespace, without(shop.feed, "orders", undone))


@pytest.mark.parametrize("replay", [True, False])
def test_one_of_two_tables_is_rolled_back(make_shop: MakeShop, replay: bool) -> None:
    """E8: the other table keeps what it has, in either way of going on."""
    shop = make_shop(tables=TWO_TABLES, seed=2)
    shop.epochs(4, changes=16)
    shop.run()
    undone = resolved(shop.lake, shop.name())[1:]
    # Both tables took part in the last epoch: it must not be taken for one that was cut short.
    assert undone[-1] == resolved(shop.lake, shop.name("items"))[-1]
    shop.roll_back("orders", 1)
    refuse_to_run(shop)
    shop.settle_rollback("orders", replay=replay)
    shop.epochs(1)
    shop.run()
    feed = shop.feed if replay else without(shop.feed, "orders", undone)
    assert_exact(shop.lake, shop.namespace, feed)


def test_crashes_during_a_replay_of_one_of_two_tables(
    make_shop: MakeShop, set_failpoints: SetFailpoints
) -> None:
    """E3, E8: a replay that is cut short is taken up where it was, in order."""
    shop = make_shop(tables=TWO_TABLES, seed=3)
    shop.epochs(4, changes=16)
    shop.run()
    shop.roll_back("orders", 1)
    shop.settle_rollback("orders", replay=True)
    for number in (3, 4, 4):
        # Two claims come first; then each pass is one epoch of the replay.
        set_failpoints(f"after-swap=error@{number}")
        with pytest.raises(FailpointError, match="after-swap"):
            shop.run()
        set_failpoints("")
        shop.epochs(1)
    shop.run()
    shop.assert_exact()


def test_both_tables_are_rolled_back_to_different_epochs(make_shop: MakeShop) -> None:
    """E8: each is brought forward from where it is."""
    shop = make_shop(tables=TWO_TABLES, seed=4)
    shop.epochs(4, changes=16)
    shop.run()
    shop.roll_back("orders", 1)
    shop.roll_back("items", 3)
    for table in TWO_TABLES:
        shop.settle_rollback(table, replay=True)
    shop.epochs(1)
    shop.run()
    shop.assert_exact()


def test_a_rollback_while_the_pipeline_runs_stops_it(make_shop: MakeShop) -> None:
    """E3, E8: the next commit to the table meets it; the other table's part is kept."""
    shop = make_shop(tables=TWO_TABLES, seed=5)
    shop.epochs(3, changes=16)
    shop.run()
    shop.epochs(2, changes=16)
    # The claim is the first commit, the next epoch the second.
    shop.on_commit(
        "orders",
        2,
        lambda: shop.proxy.on("POST", shop.commit_path()).call_before(
            lambda: shop.roll_back("orders", 2)
        ),
    )
    with pytest.raises(RolledBack) as rolled_back:
        shop.run()
    assert_names_both_ways(rolled_back.value)
    shop.settle_rollback("orders", replay=True)
    shop.run()
    shop.assert_exact()


def test_the_commands_that_an_operator_types(make_shop: MakeShop, shell: Shell) -> None:
    """E8, U2, Mend f1: run, status, then rollback, with their exit codes and words."""
    shop = make_shop()
    shop.epochs(3)
    shop.run()
    shop.roll_back("orders", 1)
    file = shell.write(shop.document())
    refused = shell("run", file, "--once")
    assert refused.code == NEEDS_OPERATOR, refused.err
    assert "icestream rollback --replay" in refused.err
    assert "icestream rollback --accept" in refused.err
    status = shell("status", file)
    assert status.code == NEEDS_OPERATOR, status.err
    assert status.out.endswith("  rolled back\n")
    assert "icestream rollback --replay" in status.err
    settled = shell("rollback", file, "--replay", "--table", "orders")
    assert settled.code == 0, settled.err
    goes_on_after = resolved(shop.lake, shop.name())[-1]
    assert settled.out == f"orders: goes on after {goes_on_after}\n"
    shop.run()
    shop.assert_exact()


def expire_all_but_heads(shop: Shop) -> None:
    everything = "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1"
    shop.call("expire_snapshots", "orders", everything)


@pytest.mark.parametrize("foreign", [1, 2])
def test_a_rollback_beneath_foreign_snapshots_is_noticed_after_expiry(
    shop: Shop, foreign: int
) -> None:
    """E8, Mend c1: nothing that is left shows the rollback; older metadata files still tell it."""
    shop.epochs(3)
    shop.run()
    shop.roll_back("orders", 2)
    for _ in range(foreign):
        shop.append_foreign_row()
    expire_all_but_heads(shop)
    assert len(shop.lake.snapshots(shop.name())) == 2
    refuse_to_run(shop)
    shop.settle_rollback("orders", replay=True)
    shop.epochs(1)
    shop.run()
    rows = {row["id"]: row for row in shop.lake.rows(shop.name())}
    own = {key: rows[key] for key in rows if key not in shop.foreign_ids()}
    assert own == shop.feed.expected("orders", shop.feed.resolved[-1])
