"""Answers of the catalog that are lost, cut, late or wrong: read back, then decide."""

from collections.abc import Callable

import pytest

from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop
from tests.proxy import Rule

Fault = Callable[[Rule], Rule]

# The client gives up before the proxy does; both leave a busy machine time for all other answers.
CLIENT_PATIENCE = {"rest.client.socket-timeout-ms": "4000"}
STALL_SECONDS = 6.0

FAULTS: dict[str, Fault] = {
    "500 after success": lambda rule: rule.answer_500_after(500),
    # The client sends such a request again by itself.
    "503 after success": lambda rule: rule.answer_500_after(503),
    # What a gateway says that sent the request twice.
    "409 after success": lambda rule: rule.answer_500_after(409),
    "cut after success": lambda rule: rule.lose_answer(),
    "cut before the catalog heard of it": lambda rule: rule.cut_before(),
}


def every_other_commit(shop: Shop, fault: Fault) -> list[int]:
    """Let the fault happen to a table's first commit, its third and so on; claims count too."""
    happened: list[int] = []

    def arm() -> None:
        happened.append(len(happened))
        fault(shop.proxy.on("POST", shop.commit_path()))

    passed: list[int] = []

    def count() -> None:
        passed.append(len(passed))
        if len(passed) % 2 == 0:
            arm()

    shop.proxy.on("POST", shop.commit_path(), times=None).call_before(count)
    arm()
    return happened


@pytest.mark.parametrize("name", FAULTS)
def test_a_commit_whose_answer_is_wrong_or_lost_lands_exactly_once(shop: Shop, name: str) -> None:
    """E3, I5, I6: landed or not, the epoch is published once, and so is the claim."""
    shop.epochs(3)
    happened = every_other_commit(shop, FAULTS[name])
    shop.run()
    assert len(happened) >= 2
    shop.assert_exact()


def test_a_commit_whose_answer_comes_too_late_lands_exactly_once(make_shop: MakeShop) -> None:
    """E3, I6: a timeout is an unknown outcome, not a failure."""
    shop = make_shop(catalog=CLIENT_PATIENCE)
    shop.epochs(1)
    shop.run()
    shop.epochs(2)
    late = []
    # The first commit of the next run is its claim, the second its first epoch.
    for number in (1, 2):
        shop.on_commit(
            "orders",
            number,
            lambda: late.append(
                shop.proxy.on("POST", shop.commit_path()).stall_after(STALL_SECONDS)
            ),
        )
    shop.run()
    assert [rule.reached.is_set() for rule in late] == [True, True]
    shop.assert_exact()


def test_a_table_whose_creation_was_not_answered_is_created_once(shop: Shop) -> None:
    """E3, I10: what the lost request made is found and used."""
    shop.epochs(2)
    lost = shop.proxy.on("POST", rf"/namespaces/{shop.namespace}/tables$").answer_500_after()
    shop.run()
    assert lost.reached.is_set()
    shop.assert_exact()


def test_a_column_whose_addition_was_not_answered_is_added_once(make_shop: MakeShop) -> None:
    """E3, I11: the schema change is looked for before it is made again."""
    shop = make_shop(seed=4)
    shop.epochs(1)
    shop.run()
    shop.lake.sql(f"ALTER TABLE {shop.sql_name()} DROP COLUMN note")
    shop.epochs(2)
    # The claim comes first, then the column that the table lacks.
    shop.on_commit(
        "orders", 2, lambda: shop.proxy.on("POST", shop.commit_path()).answer_500_after()
    )
    shop.run()
    shop.assert_exact(ignoring=["note"])
