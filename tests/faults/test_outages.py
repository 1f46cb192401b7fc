"""The catalog or the storage is away for a while: bridged within bounds, else said clearly."""

import threading
from collections.abc import Callable, Iterator

import pytest

from icestream import patience
from icestream.errors import CommitUnknown, TargetUnavailable
from tests.faults.checking import exists, resolved
from tests.faults.conftest import MakeShop
from tests.faults.shop import Shop
from tests.proxy import Proxy
from tests.running import running, wait_for_state
from tests.servers import S3Server, wait_until

COULD_NOT = 1
OUTAGE_SECONDS = 15.0
SHORT_OUTAGE_SECONDS = 4.0


@pytest.fixture
def storage_proxy(store: S3Server) -> Iterator[Proxy]:
    """A proxy before the object store."""
    with Proxy(store.endpoint) as proxy:
        yield proxy


def outage(proxy: Proxy, seconds: float) -> Callable[[], None]:
    """Take the proxy down when called; it comes back by itself."""

    def begin() -> None:
        proxy.down()
        threading.Timer(seconds, proxy.up).start()

    return begin


def test_an_outage_of_the_catalog_in_mid_run_is_bridged(shop: Shop) -> None:
    """E3, E12: the commit that met it has landed, and is found when the catalog is back."""
    shop.epochs(1)
    shop.run()
    shop.epochs(3)
    shop.on_commit(
        "orders",
        2,
        lambda: shop.proxy.on("POST", shop.commit_path()).call_before(
            outage(shop.proxy, OUTAGE_SECONDS)
        ),
    )
    shop.run()
    shop.assert_exact()


@pytest.mark.parametrize(
    "path",
    ["/tables$", "/tables/orders$"],
    ids=["creating it", "claiming it"],
)
def test_an_outage_of_the_catalog_while_a_table_is_prepared_is_bridged(
    shop: Shop, path: str
) -> None:
    """E3, I10: a table that appears in mid-run needs the catalog before any file is written."""
    shop.epochs(2)
    shop.proxy.on("POST", path).call_before(outage(shop.proxy, SHORT_OUTAGE_SECONDS))
    shop.run()
    shop.assert_exact()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries end after three tries."""
    monkeypatch.setattr(patience, "TRIES_MAX", 3)  # that there is a bound is tested, not which


def lose_the_catalog_at_the_next_commit(shop: Shop) -> None:
    """Epochs wait, and the catalog goes away when the first of them is committed."""
    shop.epochs(1)
    shop.run()
    shop.epochs(2)
    # The first commit of the next run is its claim.
    shop.on_commit(
        "orders",
        2,
        lambda: shop.proxy.on("POST", shop.commit_path()).call_before(shop.proxy.down),
    )


def test_a_catalog_that_stays_away_ends_the_run_with_a_clear_error(
    shop: Shop, impatient: None
) -> None:
    """E3, U2: nobody knows then whether the last commit landed; a restart finds out."""
    lose_the_catalog_at_the_next_commit(shop)
    with pytest.raises((CommitUnknown, TargetUnavailable)) as unavailable:
        shop.run()
    assert unavailable.value.exit_code == COULD_NOT
    assert "orders" in unavailable.value.message
    shop.proxy.up()
    shop.run()
    shop.assert_exact()


def test_a_running_pipeline_waits_for_its_catalog_longer_than_any_bound(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E13, Mend f2: stalled with the reason, told when it begins, again, and when it ends."""
    monkeypatch.setattr(patience, "TRIES_MAX", 1)  # a run that kept to this would end at once
    monkeypatch.setattr(patience, "ONCE_SECONDS_MAX", 0.0)  # and so would one that kept to this
    monkeypatch.setattr(patience, "TOLD_AGAIN_SECONDS", 1.0)  # a test does not wait for a minute
    caplog.set_level("INFO", "icestream")
    lose_the_catalog_at_the_next_commit(shop)
    pipeline = shop.pipeline()
    with running(pipeline):
        wait_for_state(pipeline, "stalled", "orders")
        wait_until(lambda: "still stalled after" in caplog.text, 240, "the second telling")
        assert pipeline.health.to_json()["state"] == "stalled"
        shop.proxy.up()
        wait_for_state(pipeline, "running")
        wait_until(lambda: "goes on after" in caplog.text, 240, "the end to be told")
    shop.run()
    shop.assert_exact()
    begun = [told for told in caplog.messages if told.startswith("stalled: ")]
    ended = [told for told in caplog.messages if told.startswith("goes on after ")]
    assert len(begun) == len(ended) > 0


@pytest.mark.parametrize("what", ["/data/icestream/", "/metadata/.*[.]avro"])
def test_storage_that_refuses_writes_ends_the_run_with_a_clear_error(
    make_shop: MakeShop, store: S3Server, storage_proxy: Proxy, impatient: None, what: str
) -> None:
    """E3, I6: nothing of the epoch is visible; when writes are allowed again it comes once."""
    through_proxy = store.iceberg_properties(endpoint=storage_proxy.url)
    shop = make_shop(catalog=through_proxy)
    shop.epochs(1)
    shop.run()
    shop.epochs(2)
    before = resolved(shop.lake, shop.name())
    refusal = storage_proxy.on("PUT", what, times=None).refuse(403)
    with pytest.raises(TargetUnavailable) as refused:
        shop.run()
    assert refusal.reached.is_set()
    assert refused.value.exit_code == COULD_NOT
    assert "could not" in refused.value.message
    assert refused.value.hint and "storage" in refused.value.hint
    assert exists(shop.lake, shop.name()) and resolved(shop.lake, shop.name()) == before
    refusal.remove()
    shop.run()
    shop.assert_exact()
