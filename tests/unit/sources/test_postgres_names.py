"""What the slot and the publications of a pipeline are called."""

import pytest

from icestream.sources.postgres.connection import parse_dsn
from icestream.sources.postgres.server import Server

LONG = "production-warehouse-replication-of-the-shop-databases-"
EVEN = "warehouse_replication_of_all_the_shop_databases_"


def server(pipeline: str, slot: str = "") -> Server:
    return Server(parse_dsn("postgresql://u@localhost/d"), pipeline, slot, "")


@pytest.mark.parametrize(
    "pipelines",
    [
        ["orders-eu", "orders_eu", "Orders_EU", "orders.eu"],
        [f"{LONG}eu", f"{LONG}us"],
        [f"{EVEN}eu", f"{EVEN}us"],
    ],
)
def test_no_two_pipelines_share_a_slot_or_a_publication(pipelines: list[str]):
    """P10, Mend of names: letters that a slot cannot have, and names that begin alike."""
    made = [server(each) for each in pipelines]
    slots = [each.slot.name for each in made]
    publications = [name for each in made for name in each.publications.names]
    assert len(set(slots)) == len(slots)
    assert len(set(publications)) == len(publications)
    assert all(len(name.encode()) <= 63 for name in [*slots, *publications])
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_") for name in slots)


def test_a_name_that_fits_is_kept():
    """P10, Mend of names: slots and publications of earlier versions stay valid."""
    assert server("shop_1").slot.name == "icestream_shop_1"
    assert server("shop_1").publications.names == ["icestream_shop_1", "icestream_shop_1_inserts"]
    assert server("orders-eu").publications.names[0] == "icestream_orders-eu"


def test_who_names_the_former_slot_keeps_the_former_publications():
    """P10, Mend of names: a long name goes on with what an earlier version made."""
    former = f"icestream_{LONG}eu".replace("-", "_")[:63]
    assert server(f"{LONG}eu", former).publications.names[0] == f"icestream_{LONG}eu"[:55]
