"""Somebody drops a table, or makes a new one of its name: it is rebuilt whole, or said to be gone.

The other tables of the pipeline hold its progress, the new table none: going on from theirs would
silently leave its history out.
"""

from collections.abc import Callable

import pytest

from icestream.errors import ProgressLost
from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop

NEEDS_OPERATOR = 3
TWO_TABLES = ("items", "orders")
# A table that somebody else makes is taken only if it is named.
NAMED = {"tables": {"orders": {"table": "orders"}}}
COLUMNS = "id BIGINT, region STRING, note STRING, amount BIGINT, ok BOOLEAN"


def drop(shop: Shop) -> None:
    shop.lake.sql(f"DROP TABLE {shop.sql_name()}")


def create(shop: Shop) -> None:
    shop.lake.sql(f"CREATE TABLE {shop.sql_name()} ({COLUMNS}) USING iceberg")


def drop_and_create(shop: Shop) -> None:
    drop(shop)
    create(shop)


@pytest.mark.parametrize(
    ("replace_table", "tables"),
    [(drop, TWO_TABLES), (drop_and_create, TWO_TABLES), (drop_and_create, ("orders",))],
)
def test_a_table_dropped_between_two_runs_gets_its_whole_history_again(
    make_shop: MakeShop, replace_table: Callable[[Shop], None], tables: tuple[str, ...]
) -> None:
    """E3, E7: its snapshots come again one by one; the other table goes on."""
    shop = make_shop(tables=tables, seed=6, sink=NAMED)
    shop.epochs(3, changes=16)
    shop.run()
    replace_table(shop)
    shop.epochs(1, changes=16)
    shop.run()
    shop.assert_exact()


@pytest.mark.parametrize(
    ("replace_table", "method"),
    [(drop, "GET"), (drop_and_create, "GET"), (drop_and_create, "POST")],
)
def test_a_table_dropped_in_mid_run_stops_the_run(
    make_shop: MakeShop, replace_table: Callable[[Shop], None], method: str
) -> None:
    """E3, I6: before the check or between check and swap; the next run builds the table anew."""
    shop = make_shop(tables=TWO_TABLES, seed=7, sink=NAMED)
    shop.epochs(2, changes=16)
    shop.run()
    shop.epochs(2, changes=16)

    def arm() -> None:
        shop.proxy.on(method, shop.commit_path()).call_before(lambda: replace_table(shop))

    if method == "POST":
        # The claim is the first commit, the next epoch the second.
        shop.on_commit("orders", 2, arm)
    else:
        shop.proxy.on("POST", shop.commit_path()).call_before(arm)
    with pytest.raises(ProgressLost) as lost:
        shop.run()
    assert lost.value.exit_code == NEEDS_OPERATOR
    assert "orders" in lost.value.message
    assert any(word in lost.value.message for word in ("is gone", "created anew"))
    assert lost.value.hint
    shop.run()
    shop.assert_exact()


def test_a_table_dropped_while_its_epoch_was_cut_short(make_shop: MakeShop) -> None:
    """E3, I14: the table lacks more than the unfinished epoch, which is not all it gets."""
    shop = make_shop(tables=TWO_TABLES, seed=8, sink=NAMED)
    shop.epochs(2, changes=16)
    shop.run()
    shop.epochs(1, changes=16)
    # The other table takes the epoch while this one is dropped.
    shop.on_commit(
        "orders",
        2,
        lambda: shop.proxy.on("POST", shop.commit_path()).call_before(lambda: drop(shop)),
    )
    with pytest.raises(ProgressLost):
        shop.run()
    create(shop)
    shop.run()
    shop.assert_exact()


def test_a_table_that_joins_the_pipeline_later_gets_its_whole_history(make_shop: MakeShop) -> None:
    """E3, C2: it was in the feed all the time, but not in the configuration."""
    shop = make_shop(tables=TWO_TABLES, seed=9)
    shop.epochs(3, changes=16)
    shop.tables = ("orders",)
    shop.run()
    shop.tables = TWO_TABLES
    shop.epochs(1, changes=16)
    shop.run()
    shop.assert_exact()
