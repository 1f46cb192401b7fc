"""Others write to the table at the worst moment: between the check and the swap, or before it."""

from collections.abc import Callable

import pytest

from tests.faults.checking import ancestry, hlc
from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop

# Each start claims the table first; the second commit is the first epoch.
FIRST_EPOCH = 2


def run_with_rival(shop: Shop, rival: Callable[[], object], method: str = "POST") -> None:
    """Run while the rival acts just before the first epoch's files are committed.

    POST is the swap itself; GET is the look at the table that comes before the checks.
    """
    shop.epochs(1)
    shop.run()
    shop.epochs(2)
    acted = []

    def arm() -> None:
        acted.append(shop.proxy.on(method, shop.commit_path()).call_before(rival))

    if method == "POST":
        shop.on_commit("orders", FIRST_EPOCH, arm)
    else:
        # After the claim the next look at the table is that of the first epoch's checks.
        shop.proxy.on("POST", shop.commit_path()).call_before(arm)
    shop.run()
    assert acted and acted[0].reached.is_set()


def test_a_rival_that_appends_between_check_and_swap_keeps_its_row(shop: Shop) -> None:
    """E3, I6: the swap is refused, and the next attempt joins on to the rival's snapshot."""
    ids: set[int] = set()
    run_with_rival(shop, lambda: ids.add(shop.append_foreign_row()))
    assert 409 in [request.status for request in shop.proxy.requests]
    assert shop.foreign_ids() == ids != set()
    shop.assert_exact()


@pytest.mark.parametrize("version", [2, 3])
def test_a_compaction_between_check_and_swap_loses_nothing(
    make_shop: MakeShop, version: int
) -> None:
    """E3, E4: a replace snapshot is stepped over, deletes written before it still hold."""
    shop = make_shop(seed=version, sink={"format_version": version})
    run_with_rival(shop, shop.compact)
    assert "replace" in [snapshot["operation"] for snapshot in ancestry(shop.lake, shop.name())]
    shop.assert_exact()


def test_rivals_before_every_commit_of_several_tables(make_shop: MakeShop) -> None:
    """E3: conflicts in all tables of all epochs, and every snapshot still is what it must be."""
    shop = make_shop(tables=("orders", "items"))
    shop.epochs(1)
    shop.run()
    shop.epochs(3)
    for table in shop.tables:
        path = shop.commit_path(table)
        shop.proxy.on("POST", path, times=2).call_before(lambda t=table: shop.compact(t))
        shop.proxy.on("POST", path, times=4).call_before(lambda t=table: shop.append_foreign_row(t))
    shop.run()
    assert [len(shop.foreign_ids(table)) for table in shop.tables] == [4, 4]
    shop.assert_exact()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_column_that_somebody_adds_before_the_commit_stays_empty(shop: Shop, method: str) -> None:
    """I6, I11: files for the older schema are written again, or taken as Iceberg takes them."""
    add_column = f"ALTER TABLE {shop.sql_name()} ADD COLUMN extra STRING"
    run_with_rival(shop, lambda: shop.lake.sql(add_column), method)
    assert "extra" in shop.lake.rows(shop.name())[0]
    shop.assert_exact()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_column_that_somebody_renames_before_the_commit_does_not_disturb_the_others(
    make_shop: MakeShop, method: str
) -> None:
    """I6, I11: the source's column is found missing, added, and the epoch written again."""
    shop = make_shop(seed=5)
    rename = f"ALTER TABLE {shop.sql_name()} RENAME COLUMN note TO remark"
    run_with_rival(shop, lambda: shop.lake.sql(rename), method)
    assert {"note", "remark"} <= set(shop.lake.rows(shop.name())[0])
    shop.assert_exact(ignoring=["note", "remark"])


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_partition_field_that_somebody_adds_before_the_commit_leaves_no_copies(
    make_shop: MakeShop, method: str
) -> None:
    """I6, I9: deletes reach the rows of both partition specs."""
    by_bucket = {"tables": {"orders": {"partition_by": ["bucket(4, id)"]}}}
    shop = make_shop(sink=by_bucket, with_before=True)
    add_field = f"ALTER TABLE {shop.sql_name()} ADD PARTITION FIELD region"
    run_with_rival(shop, lambda: shop.lake.sql(add_field), method)
    specs = shop.lake.sql(f"SELECT DISTINCT spec_id FROM {shop.sql_name()}.data_files")
    assert len(specs) > 1
    shop.assert_exact()


def test_progress_survives_the_expiry_of_every_snapshot_but_the_head(shop: Shop) -> None:
    """E4, I7: the tag keeps the snapshot that carries the progress, behind foreign ones."""
    shop.epochs(2)
    shop.run()
    shop.append_foreign_row()
    everything = "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1"
    shop.call("expire_snapshots", "orders", everything)
    assert len(shop.lake.snapshots(shop.name())) == 2
    shop.run()
    shop.epochs(2)
    shop.run()
    at = shop.feed.resolved
    found = [s["summary"]["crdb.resolved_hlc"] for s in shop.lake.epochs(shop.name())]
    assert found == [hlc(each) for each in at[-3:]]
    rows = {row["id"]: row for row in shop.lake.rows(shop.name())}
    own = {key: rows[key] for key in rows if key not in shop.foreign_ids()}
    assert own == shop.feed.expected("orders", at[-1])
