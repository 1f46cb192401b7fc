"""All tables of an epoch in one request to the catalog: all of them are seen, or none."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from pyiceberg.types import LongType, StringType
from pyspark.sql import SparkSession

from icestream import metrics, patience
from icestream.errors import CommitConflict, ConfigInvalid, Fenced, ProgressLost, RolledBack
from icestream.sinks import StaleWrite
from tests.integration.hand_fed import HandFed, gone, put, shape
from tests.lake import Lake
from tests.proxy import Proxy
from tests.servers import RestCatalog

TABLES = ("a", "b", "c")
SHAPES = {table: shape(["id"], id=LongType(), v=StringType()) for table in TABLES}
TRANSACTION = "/transactions/commit$"


class Shop:
    """Three tables behind a proxy, with one epoch in each."""

    def __init__(self, spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str):
        self.spark, self.lake, self.namespace = spark, lake, namespace
        self.proxy = Proxy(rest.uri)
        self.catalog = rest.catalog_properties(uri=self.proxy.url)

    def start(self) -> HandFed:
        return HandFed(self.spark, self.catalog, SHAPES, namespace=self.namespace, atomic=True)

    def rows(self, table: str) -> dict[int, str]:
        found = self.lake.rows(f"{self.namespace}.{table}")
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: row["v"] for row in found}

    def epochs(self) -> dict[str, list[int]]:
        """The numbers of the epochs that each table's history holds."""
        return {
            table: [
                int(snapshot["summary"]["icestream.epoch"])
                for snapshot in self.lake.epochs(f"{self.namespace}.{table}")
            ]
            for table in TABLES
        }

    def sql(self, text: str, table: str) -> None:
        self.lake.sql(text.format(self.lake.table(f"{self.namespace}.{table}")))


@pytest.fixture
def shop(spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str) -> Iterator[Shop]:
    opened = Shop(spark, rest, lake, namespace)
    with opened.proxy:
        yield opened


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal, a lost answer and a success make three attempts."""
    monkeypatch.setattr(patience, "TRIES_MAX", 4)  # this folder's two would end before the faults


def everywhere(number: int, value: str) -> dict[str, list[object]]:
    return {table: [put(id=number, v=value + table)] for table in TABLES}


def in_all(numbers: list[int]) -> dict[str, list[int]]:
    """The same epochs in every table."""
    return {table: list(numbers) for table in TABLES}


def assert_two_epochs(shop: Shop) -> None:
    assert shop.epochs() == in_all([1, 2])
    for table in TABLES:
        assert shop.rows(table) == {1: f"x{table}", 2: f"y{table}"}


def test_one_request_publishes_an_epoch_in_all_its_tables(shop: Shop) -> None:
    """I14: rows, deletes, a truncated table, tags and counts, without a commit of its own each."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    shop.proxy.clear()
    changes = {"a": [put(id=1, v="new"), put(id=2, v="two")], "b": [gone(id=1)]}
    results = fed.commit(changes, truncated=["c"])
    assert shop.proxy.count("POST", TRANSACTION) == 1
    assert shop.proxy.count("POST", r"/tables/\w+$") == 0
    assert shop.rows("a") == {1: "new", 2: "two"}
    assert shop.rows("b") == shop.rows("c") == {}
    assert {result.table: result.duplicate for result in results} == dict.fromkeys(TABLES, False)
    for result in results:
        name = f"{shop.namespace}.{result.table}"
        last = shop.lake.snapshots(name)[-1]
        assert last["snapshot_id"] == result.snapshot_id
        assert last["summary"]["icestream.epoch-tables"] == "3"
        both = dict.fromkeys(("main", "icestream-hand"), result.snapshot_id)
        assert shop.lake.references(name) == both
    again = shop.start()
    assert again.number == 2


def test_a_rival_on_one_table_refuses_all_and_the_next_attempt_lands_all(shop: Shop) -> None:
    """I14, I6: the commit that was checked before the rival's is refused as a whole."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    seen: dict[str, list[int]] = {}

    def rival() -> None:
        shop.sql("INSERT INTO {} VALUES (77, 'rival')", "b")

    def look() -> None:
        seen.update(shop.epochs())

    before = metrics.COMMIT_CONFLICTS.labels("a")._value.get()
    shop.proxy.on("POST", TRANSACTION).call_before(rival)
    shop.proxy.on("POST", TRANSACTION, times=None).call_before(look)
    fed.commit(everywhere(2, "y"))
    assert shop.proxy.count("POST", TRANSACTION) == 3
    assert seen == in_all([1]), "the refused attempt has left nothing behind"
    assert shop.epochs() == in_all([1, 2])
    assert shop.rows("a") == {1: "xa", 2: "ya"}
    assert shop.rows("b") == {1: "xb", 2: "yb", 77: "rival"}
    assert metrics.COMMIT_CONFLICTS.labels("a")._value.get() == before + 1


Loss = Callable[[Proxy], object]
LOSSES: dict[str, Loss] = {
    "answer lost": lambda proxy: proxy.on("POST", TRANSACTION).lose_answer(),
    "500 after success": lambda proxy: proxy.on("POST", TRANSACTION).answer_500_after(),
    "409 after success": lambda proxy: proxy.on("POST", TRANSACTION).answer_500_after(409),
    "request lost": lambda proxy: proxy.on("POST", TRANSACTION).cut_before(),
    "503 before": lambda proxy: proxy.on("POST", TRANSACTION).refuse(503),
    "409 before": lambda proxy: proxy.on("POST", TRANSACTION).refuse(409),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_commit_without_an_answer_lands_once_in_every_table(shop: Shop, loss: str) -> None:
    """I14, I5, I6: reading back tells whether it landed; nothing is doubled, nothing missed."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    LOSSES[loss](shop.proxy)
    results = fed.commit(everywhere(2, "y"))
    landed = "after" in loss or loss == "answer lost"
    assert {result.duplicate for result in results} == {landed}
    assert_two_epochs(shop)


def test_a_table_that_carries_the_epoch_already_keeps_it_and_the_others_get_it(shop: Shop) -> None:
    """I14, E3: an epoch that was half published table by table is completed in one request."""
    plain = HandFed(shop.spark, shop.catalog, SHAPES, namespace=shop.namespace, atomic=False)
    plain.commit(everywhere(1, "x"))
    # A run that goes table by table gets through to one of them only.
    written = plain.write(everywhere(2, "y"))
    refusals = shop.proxy.on("POST", r"/tables/[ac]$", times=None).refuse(409)
    with pytest.raises(CommitConflict):
        plain.sink.commit(written)
    refusals.remove()
    assert shop.epochs() == {"a": [1], "b": [1, 2], "c": [1]}
    plain.sink._publisher._options = replace(plain.sink._options, atomic=True)
    results = {result.table: result.duplicate for result in plain.sink.commit(written)}
    assert results == {"a": False, "b": True, "c": False}
    assert_two_epochs(shop)


def test_no_table_is_changed_when_a_newer_run_has_claimed_one_of_them(shop: Shop) -> None:
    """I14, E6: every table is checked before any is swapped, and the swap is one."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    written = fed.write(everywhere(2, "y"))
    successor = HandFed(
        shop.spark, shop.catalog, {"c": SHAPES["c"]}, namespace=shop.namespace, atomic=True
    )
    assert successor.number == 1
    with pytest.raises(Fenced):
        fed.sink.commit(written)
    assert shop.epochs() == in_all([1])


def test_a_claim_between_check_and_commit_refuses_all(shop: Shop) -> None:
    """I14, E6: a zombie whose request is late changes no table."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    shop.proxy.on("POST", TRANSACTION).call_before(shop.start)
    with pytest.raises(Fenced):
        fed.commit(everywhere(2, "y"))
    assert shop.epochs() == in_all([1])
    shop.start().commit(everywhere(2, "y"))
    assert_two_epochs(shop)


def test_no_table_is_changed_when_one_of_them_is_dropped(shop: Shop) -> None:
    """I14: before the check or between check and commit; the error names the table."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    shop.proxy.on("POST", TRANSACTION).call_before(lambda: shop.sql("DROP TABLE {}", "b"))
    with pytest.raises(ProgressLost, match=r"\.b is gone"):
        fed.commit(everywhere(2, "y"))
    assert shop.rows("a") == {1: "xa"}
    assert shop.rows("c") == {1: "xc"}


def test_no_table_is_changed_when_one_of_them_was_rolled_back(shop: Shop) -> None:
    """I14, E8: continuity is checked in all of them."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    first = shop.lake.snapshots(f"{shop.namespace}.c")[0]["snapshot_id"]
    written = fed.write(everywhere(2, "y"))
    shop.lake.sql(
        f"CALL {shop.lake.name}.system.rollback_to_snapshot('{shop.namespace}.c', {first})"
    )
    with pytest.raises(RolledBack):
        fed.sink.commit(written)
    assert shop.epochs()["a"] == shop.epochs()["b"] == [1]


def test_files_that_no_longer_fit_one_table_are_written_again_for_all(shop: Shop) -> None:
    """I14, I6: a schema that changed after the files were written commits nothing."""
    fed = shop.start()
    fed.commit(everywhere(1, "x"))
    written = fed.write(everywhere(2, "y"))
    shop.sql("ALTER TABLE {} ADD COLUMN extra STRING", "a")
    with pytest.raises(StaleWrite):
        fed.sink.commit(written)
    assert shop.epochs() == in_all([1])
    fed.number -= 1
    fed.commit(everywhere(2, "y"))
    assert shop.epochs() == in_all([1, 2])


CHANGES_WITHOUT_A_SNAPSHOT = {
    "schema": "ALTER TABLE {} ADD COLUMN extra STRING",
    "spec": "ALTER TABLE {} ADD PARTITION FIELD bucket(4, id)",
}


@pytest.mark.parametrize("change", CHANGES_WITHOUT_A_SNAPSHOT)
@pytest.mark.parametrize("atomic", [True, False])
def test_a_schema_that_a_rival_changes_between_check_and_swap_refuses_the_swap(
    shop: Shop, atomic: bool, change: str
) -> None:
    """I6, I14, Mend c8: no reference moves, and yet the files no longer fit the table."""
    fed = HandFed(shop.spark, shop.catalog, SHAPES, namespace=shop.namespace, atomic=atomic)
    fed.commit(everywhere(1, "x"))
    written = fed.write(everywhere(2, "y"))
    swap = TRANSACTION if atomic else r"/tables/b$"
    changed = CHANGES_WITHOUT_A_SNAPSHOT[change]
    shop.proxy.on("POST", swap).call_before(lambda: shop.sql(changed, "b"))
    with pytest.raises(StaleWrite):
        fed.sink.commit(written)
    assert shop.epochs()["b"] == [1]
    if atomic:
        assert shop.epochs() == in_all([1])
    fed.number -= 1
    fed.commit(everywhere(2, "y"))
    assert_two_epochs(shop)


def test_a_catalog_without_transactions_is_refused_at_the_start(
    spark: SparkSession, embedded: dict[str, str]
) -> None:
    """I14: before anything is claimed, with what to do instead."""
    with pytest.raises(ConfigInvalid, match="cannot commit to many tables at once") as caught:
        HandFed(spark, embedded, SHAPES, atomic=True)
    assert "atomic" in str(caught.value.hint)
