"""Several runs of one pipeline: one goes on, the others end fenced, and nothing is doubled."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from icestream.errors import Fenced
from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop
from tests.proxy import Proxy
from tests.servers import wait_until

FENCED = 4
MEET_SECONDS_MAX = 120.0
WAIT_SECONDS_MAX = 120.0


def side_by_side(runs: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    """Run all at once, each in a thread; returns what each of them ended with."""
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run) for run in runs]
    return [future.exception() for future in futures]


def meet(shop: Shop, method: str, path: str) -> None:
    """Let the next two such requests, one of each run, arrive before either goes on."""
    barrier = threading.Barrier(2, timeout=MEET_SECONDS_MAX)
    shop.proxy.on(method, path, times=2).call_before(barrier.wait)


def start_zombie(shop: Shop, paused: threading.Event) -> Future[None]:
    """Start a run in a thread and await the moment in which a rule stalls it."""
    pool = ThreadPoolExecutor(1)
    zombie = pool.submit(shop.run)
    pool.shutdown(wait=False)
    wait_until(lambda: paused.is_set() or zombie.done(), WAIT_SECONDS_MAX, "the run stalls")
    assert not zombie.done()
    return zombie


def assert_fenced(error: BaseException | None) -> None:
    assert isinstance(error, Fenced), error
    assert error.exit_code == FENCED
    assert "a newer run of pipeline shop has taken over" in str(error)
    assert "Nothing is lost" in str(error)


def test_two_runs_that_claim_at_the_same_moment(shop: Shop) -> None:
    """E6: one of them is refused its claim and stops; the other does all the work."""
    shop.epochs(1)
    shop.run()
    shop.epochs(2)
    meet(shop, "POST", shop.commit_path())
    ends = side_by_side([shop.run, shop.run])
    (loser,) = [end for end in ends if end is not None]
    assert_fenced(loser)
    shop.assert_exact()


def test_two_runs_that_create_the_tables_at_the_same_moment(make_shop: MakeShop) -> None:
    """E6, I10: each table is created once, and one of the runs goes on."""
    shop = make_shop(tables=("items", "orders"))
    shop.epochs(3)
    meet(shop, "POST", rf"/namespaces/{shop.namespace}/tables$")
    ends = side_by_side([shop.run, shop.run])
    (loser,) = [end for end in ends if end is not None]
    assert isinstance(loser, Fenced) and loser.exit_code == FENCED
    shop.assert_exact()


def test_two_processes_run_the_same_pipeline(make_shop: MakeShop) -> None:
    """E6: real processes; the exit codes and messages tell who was fenced."""
    shop = make_shop(tables=("orders", "items"))
    shop.epochs(1)
    shop.run()
    shop.epochs(3)
    meet(shop, "POST", shop.commit_path("items"))
    processes = [shop.start("run", "--once") for _ in range(2)]
    winner, loser = sorted((p.wait() for p in processes), key=lambda ended: ended.exit_code)
    assert (winner.exit_code, loser.exit_code) == (0, FENCED), winner.stderr + loser.stderr
    assert "icestream: a newer run of pipeline shop has taken over" in loser.stderr
    assert "hint: Nothing is lost" in loser.stderr
    shop.assert_exact()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_zombie_whose_commit_arrives_after_its_successor_finished(
    shop: Shop, number: int
) -> None:
    """E6: its claim, its first epoch or its second are held back and refused afterwards."""
    shop.epochs(1)
    shop.run()
    shop.epochs(3)
    paused, released = threading.Event(), threading.Event()

    def stall() -> None:
        rule = shop.proxy.on("POST", shop.commit_path())
        rule.reached = paused
        rule.stall(released)

    shop.on_commit("orders", number, stall)
    zombie = start_zombie(shop, paused)
    shop.successor().run()
    shop.assert_exact()
    released.set()
    assert_fenced(zombie.exception(WAIT_SECONDS_MAX))
    shop.assert_exact()


def test_a_zombie_that_checked_before_its_successor_started(shop: Shop) -> None:
    """E3, E6: what it saw of the table is old when it swaps, and the swap says so."""
    shop.epochs(1)
    shop.run()
    shop.epochs(2)
    paused, released = threading.Event(), threading.Event()

    def stall() -> None:
        rule = shop.proxy.on("GET", shop.commit_path())
        rule.reached = paused
        rule.stall_after(released)

    # After the claim the next look at the table is that of the first epoch's checks.
    shop.proxy.on("POST", shop.commit_path()).call_before(stall)
    zombie = start_zombie(shop, paused)
    shop.successor().run()
    released.set()
    assert_fenced(zombie.exception(WAIT_SECONDS_MAX))
    shop.assert_exact()


def test_a_zombie_cannot_bring_its_successor_a_table_with_an_epoch_in_it(
    make_shop: MakeShop, proxy: Proxy
) -> None:
    """E6: a table that did not exist when the successor claimed is still not written twice."""
    shop = make_shop(tables=("orders", "items"))
    shop.feed.tables = ("orders",)
    shop.epochs(1)
    shop.run()
    shop.feed.tables = ("items",)
    shop.epochs(2)
    shop.feed.tables = shop.tables
    looked, released = threading.Event(), threading.Event()
    creates = rf"/namespaces/{shop.namespace}/tables$"
    rule = shop.proxy.on("POST", creates)
    rule.reached = looked
    rule.stall(released)
    zombie = start_zombie(shop, looked)
    # The successor has claimed what there is and is about to create the table when the zombie,
    # which knows nothing of it, does so.
    with Proxy(shop.rest.uri) as way:
        successor = make_shop(tables=("orders", "items"), catalog={"uri": way.url})
        successor.feed = shop.feed

        def let_the_zombie_finish() -> None:
            released.set()
            wait_until(zombie.done, WAIT_SECONDS_MAX, "the zombie ends")

        way.on("POST", creates).call_before(let_the_zombie_finish)
        ended = side_by_side([successor.run])[0]
    assert isinstance(zombie.exception(WAIT_SECONDS_MAX), Fenced)
    if ended is not None:
        assert isinstance(ended, Fenced), ended
        shop.successor().run()
    shop.assert_exact()
