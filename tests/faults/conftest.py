"""Fixtures of the fault tests: the pipeline `shop` behind a proxy, failpoints in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from icestream import failpoints
from tests.faults.shop import Shop
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import RestCatalog

MakeShop = Callable[..., Shop]


@pytest.fixture
def proxy(rest: RestCatalog) -> Iterator[Proxy]:
    """A proxy before the catalog; only the pipeline goes through it."""
    with Proxy(rest.uri) as proxy:
        yield proxy


@pytest.fixture
def make_shop(
    lake: Lake, rest: RestCatalog, proxy: Proxy, namespace: str, tmp_path: Path
) -> MakeShop:
    """Makes the test's pipeline, with options of `Shop`."""

    def make(**options: Any) -> Shop:
        return Shop(
            lake=lake, rest=rest, proxy=proxy, namespace=namespace, folder=tmp_path, **options
        )

    return make


@pytest.fixture
def shop(make_shop: MakeShop) -> Shop:
    """A pipeline of one table."""
    return make_shop()


@pytest.fixture
def set_failpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the failpoints of this process; the passes are counted anew from then on."""

    def set_them(text: str) -> None:
        failpoints._passes.clear()
        # Read at every failpoint, so that it works in a process that runs already.
        monkeypatch.setenv("ICESTREAM_FAILPOINTS", text)

    yield set_them
    failpoints._passes.clear()
