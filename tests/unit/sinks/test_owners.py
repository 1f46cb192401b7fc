"""A table remembers who feeds it; strangers' tables are never touched, and none has two feeders."""

import json
import logging
from collections import UserDict
from dataclasses import replace

import pytest

from icestream import dead_letters, patience
from icestream.epoch import Progress
from icestream.errors import (
    CommitConflict,
    ConfigInvalid,
    NeedsOperator,
    TargetUnavailable,
)
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.new_table import NewTable
from icestream.iceberg.table import OWNER_PROPERTY
from icestream.names import TableNames
from icestream.schema import new_schema
from icestream.sinks.iceberg.options import IcebergSinkOptions, RouteOptions, TableOptions
from icestream.sinks.iceberg.owners import TableOwner, TableToClaim
from icestream.sinks.iceberg.sink import IcebergSink
from tests.property.memory import Lake, MemoryCatalog
from tests.unit.sinks.test_iceberg import SHAPE, commit, epoch, name, paths, sink

BY_RECORDS = RouteOptions(field="tab")


def made_by_someone(lake: Lake, *tables: str) -> None:
    """Tables of nobody's, each with a snapshot of its own."""
    for table in tables:
        schema = new_schema(SHAPE).model_dump_json()
        MemoryCatalog(lake).create(name(table), NewTable(schema_json=schema))
        lake.foreign_commit(name(table), "append")


def owner(lake: Lake, table: str) -> dict[str, str] | None:
    text = lake.tables[name(table)].properties.get(OWNER_PROPERTY)
    return json.loads(text) if text else None


def set_owner(lake: Lake, table: str, text: str | None) -> None:
    metadata = lake.tables[name(table)]
    others = {k: v for k, v in metadata.properties.items() if k != OWNER_PROPERTY}
    given = {} if text is None else {OWNER_PROPERTY: text}
    lake.tables[name(table)] = replace(metadata, properties={**others, **given})


def other_pipeline(lake: Lake, **options: object) -> IcebergSink:
    given = IcebergSinkOptions(**{"namespace": "shop", **options})
    return IcebergSink(MemoryCatalog(lake), given, "q")


def test_a_strangers_table_of_the_sources_name_is_never_touched():
    """I16, Mend a1: the source table has another name, and `orders` only looks like it."""
    lake = Lake()
    made_by_someone(lake, "orders")
    before = lake.tables[name("orders")]
    options = {"tables": {"orders": TableOptions(table="orders_cdc")}}
    first = sink(lake, **options)
    assert first.durable(["orders"]) == {}
    first.claim(["orders"])
    commit(first, epoch(1, 0, 5), "orders")
    assert paths(lake, "orders_cdc") == ["orders-1.parquet"]
    again = sink(lake, **options)
    assert set(again.durable(["orders"])) == {"orders"}
    assert set(again.claim(["orders"])) == {"orders"}
    commit(again, epoch(2, 5, 9), "orders")
    assert paths(lake, "orders_cdc") == ["orders-1.parquet", "orders-2.parquet"]
    assert lake.tables[name("orders")] is before
    shown = sink(lake, **options).heads(["orders"], refuse=False)
    assert [str(handle.name) for handle, _ in shown.values()] == ["shop.orders_cdc"]


def test_a_table_that_merely_has_the_name_is_refused_until_it_is_named():
    """I16, U3, Mend a1: both ways out of the hint work; `check` says the same as `run`."""
    lake = Lake()
    made_by_someone(lake, "orders")
    before = lake.tables[name("orders")]
    for ask in (lambda s: s.durable(["db.orders"]), lambda s: s.claim(["db.orders"])):
        with pytest.raises(ConfigInvalid, match=r"shop\.orders is there already") as caught:
            ask(sink(lake))
    assert "`tables: {db.orders: {table: orders}}`" in caught.value.hint
    assert sink(lake).heads(["db.orders"], refuse=False) == {}
    assert lake.tables[name("orders")] is before
    elsewhere = sink(lake, tables={"db.orders": TableOptions(table="mine")})
    elsewhere.claim(["db.orders"])
    commit(elsewhere, epoch(1, 0, 5), "db.orders")
    assert lake.tables[name("orders")] is before
    del lake.tables[name("mine")]
    adopting = sink(lake, tables={"db.orders": TableOptions(table="orders")})
    adopting.claim(["db.orders"])
    commit(adopting, epoch(1, 0, 5), "db.orders")
    assert paths(lake, "orders") == ["db.orders-1.parquet"]
    assert owner(lake, "orders") == {"pipeline": "p", "table": "db.orders"}


def test_options_alone_claim_no_table():
    """I16, Mend a1: the source has no such table yet; it is adopted when it has."""
    lake = Lake()
    made_by_someone(lake, "orders")
    before = lake.tables[name("orders")]
    early = sink(lake, tables={"orders": TableOptions(table="orders")})
    assert early.claim([]) == {}
    assert lake.tables[name("orders")] is before
    commit(early, epoch(1, 0, 5), "orders")
    assert owner(lake, "orders") == {"pipeline": "p", "table": "orders"}


def test_a_strangers_table_that_is_made_later_stops_nobody():
    """I16, Mend a1: a working pipeline that is not mapped to it goes on, and starts again."""
    lake = Lake()
    options = {"tables": {"orders": TableOptions(table="orders_cdc")}}
    first = sink(lake, **options)
    first.claim(["orders"])
    commit(first, epoch(1, 0, 5), "orders")
    made_by_someone(lake, "orders", "orders_cdc__old")
    commit(first, epoch(2, 5, 9), "orders")
    assert set(sink(lake, **options).claim(["orders"])) == {"orders"}
    assert owner(lake, "orders") is None


def test_a_new_table_says_who_feeds_it_from_the_beginning():
    """I16: in the request that makes it, so that a kill right after leaves no doubt."""
    lake = Lake()
    first = sink(lake, properties={OWNER_PROPERTY: "me"})
    first.claim([])
    made: list[dict[str, str] | None] = []
    first.prepare("db.t", lambda: SHAPE)
    made.append(owner(lake, "t"))
    assert made == [{"pipeline": "p", "table": "db.t"}]


def test_a_table_of_another_pipeline_is_refused_until_that_one_gives_it_away():
    """I16, U3: the error says whose it is; the way out is tried."""
    lake = Lake()
    first = other_pipeline(lake)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a.orders")
    named = {"tables": {"b.orders": TableOptions(table="orders")}}
    with pytest.raises(ConfigInvalid, match="belongs to someone else") as caught:
        sink(lake, **named).claim(["b.orders"])
    assert "pipeline q, source table a.orders" in caught.value.detail
    assert f"SET TBLPROPERTIES ('{OWNER_PROPERTY}' = '')" in caught.value.hint
    set_owner(lake, "orders", "")
    with pytest.raises(ConfigInvalid, match="is there already"):
        sink(lake).claim(["b.orders"])
    taking = sink(lake, **named)
    taking.claim(["b.orders"])
    commit(taking, epoch(1, 0, 5), "b.orders")
    assert owner(lake, "orders") == {"pipeline": "p", "table": "b.orders"}
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        other_pipeline(lake).claim(["a.orders"])


def test_of_two_pipelines_that_adopt_a_table_at_once_one_gets_it():
    """I16: whose it is, is decided by the swap of the claim."""
    lake = Lake()
    made_by_someone(lake, "orders")
    named = {"tables": {"orders": TableOptions(table="orders")}}
    mine, theirs = sink(lake, **named), other_pipeline(lake, **named)
    for each in (mine, theirs):
        each.durable(["orders"])
    handle = MemoryCatalog(lake).load(name("orders"))
    old_head = handle.head("p", "main")
    theirs.claim(["orders"])
    claim = Progress(pipeline="p", generation=1)
    late = TableToClaim(
        handle, TableOwner(pipeline="p", table="orders"), TableNames(given={"orders": "orders"})
    )
    with pytest.raises(CommitConflict):
        late.publish(old_head, "main", [], summaries.to_entries(claim))
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        mine.claim(["orders"])
    assert owner(lake, "orders") == {"pipeline": "q", "table": "orders"}


def test_a_second_source_table_of_the_same_name_halts_before_it_writes():
    """I16, Mend a2: also when it appears while the first one streams, and after a restart."""
    lake = Lake()
    first = sink(lake)
    first.claim(["eu.orders"])
    commit(first, epoch(1, 0, 5), "eu.orders")
    for running in (first, sink(lake)):
        if running is not first:
            running.claim(["eu.orders"])
        with pytest.raises(ConfigInvalid, match="two source tables go into one") as caught:
            running.prepare("us.orders", lambda: SHAPE)
        assert "fed by eu.orders; us.orders would" in caught.value.detail
    with pytest.raises(ConfigInvalid, match="two source tables go into one"):
        sink(lake).claim(["us.orders"])
    assert paths(lake, "orders") == ["eu.orders-1.parquet"]
    apart = sink(lake, tables={"us.orders": TableOptions(table="us_orders")})
    apart.claim(["eu.orders", "us.orders"])
    commit(apart, epoch(2, 5, 9), "us.orders")
    assert paths(lake, "us_orders") == ["us.orders-2.parquet"]


def test_a_source_table_that_was_replaced_by_another_takes_its_place_when_told():
    """I16, U3, Mend a2: the way out when the first source table is no more; progress is kept."""
    lake = Lake()
    first = sink(lake)
    first.claim(["v1.orders"])
    commit(first, epoch(1, 0, 5), "v1.orders")
    set_owner(lake, "orders", "")
    second = sink(lake, tables={"v2.orders": TableOptions(table="orders")})
    assert second.claim(["v2.orders"])["v2.orders"].epoch == 1
    commit(second, epoch(2, 5, 9), "v2.orders")
    assert owner(lake, "orders") == {"pipeline": "p", "table": "v2.orders"}


def test_tables_that_records_name_are_found_again_under_their_own_names():
    """I16, Mend a3: a restart reads from the table which source table feeds it."""
    lake = Lake()
    first = sink(lake, route=BY_RECORDS)
    first.claim([])
    commit(first, epoch(1, 0, 5), "shop.orders", "shop.items")
    again = sink(lake, route=BY_RECORDS)
    assert set(again.durable([])) == {"shop.orders", "shop.items"}
    assert {t: p.epoch for t, p in again.claim([]).items()} == {"shop.orders": 1, "shop.items": 1}
    commit(again, epoch(2, 5, 9), "shop.orders")
    assert paths(lake, "orders") == ["shop.orders-1.parquet", "shop.orders-2.parquet"]


def test_a_second_table_that_records_name_is_refused_and_the_first_goes_on():
    """I16, Mend a3: the worker is told why, so that the record is rejected and nothing else."""
    lake = Lake()
    made_by_someone(lake, "foreign")
    first = sink(lake, route=BY_RECORDS)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a.orders")
    assert not first.prepare("b.orders", lambda: SHAPE)
    assert not first.prepare("x.foreign", lambda: SHAPE)
    writer = first.writer(epoch(2, 5, 9), ["a.orders"])
    assert "fed by source table a.orders" in writer.refused("b.orders")
    assert "made by someone else" in writer.refused("x.foreign")
    assert "made by someone else" in writer.refused("foreign")
    assert writer.refused("..")
    assert writer.refused("a.orders") is None
    assert writer.refused("new") is None
    assert [each.summary for each in lake.tables[name("foreign")].ancestry()] == [{}]


def test_letters_of_a_strangers_name_are_refused_though_records_name_tables():
    """I16, K5: letters must have a place, so the pipeline stops and says what to do."""
    lake = Lake()
    made_by_someone(lake, "t__dead_letters")
    with pytest.raises(ConfigInvalid, match="is there already") as caught:
        sink(lake, route=BY_RECORDS).claim(["t__dead_letters"])
    assert "Rename or drop it" in caught.value.hint
    assert "`tables: {t: {table: <name>}}`" in caught.value.hint
    elsewhere = sink(lake, route=BY_RECORDS, tables={"t": TableOptions(table="u")})
    elsewhere.claim(["t__dead_letters"])
    assert elsewhere.prepare("t__dead_letters", lambda: dead_letters.SHAPE)
    assert owner(lake, "u__dead_letters") == {"pipeline": "p", "table": "t__dead_letters"}


def test_a_table_of_an_earlier_version_is_ours_and_says_so_after_the_claim():
    """I16: it has the pipeline's tag and no property."""
    lake = Lake()
    first = sink(lake)
    first.claim([])
    commit(first, epoch(1, 0, 5), "db.a", "b")
    for table in ("a", "b"):
        set_owner(lake, table, None)
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        other_pipeline(lake, tables={"a": TableOptions(table="a")}).claim(["a"])
    assert set(sink(lake).claim(["db.a"])) == {"db.a", "b"}
    assert owner(lake, "a") == {"pipeline": "p", "table": "db.a"}
    # Its last epoch proves the name.
    assert owner(lake, "b") == {"pipeline": "p", "table": "b"}


def after_an_upgrade(lake: Lake, table: str, name: str) -> IcebergSink:
    """A new run; an earlier version filled a table, and did not write down its source table."""
    first = sink(lake, route=BY_RECORDS)
    first.claim([])
    commit(first, epoch(1, 0, 5), table)
    set_owner(lake, name, None)
    return sink(lake, route=BY_RECORDS)


def test_what_an_earlier_version_made_for_a_dotted_value_finds_its_source_table():
    """I16, Mend a3: its last epoch proves it; a start later everything has its own name."""
    lake = Lake()
    upgraded = after_an_upgrade(lake, "shop.orders", "orders")
    assert set(upgraded.claim([])) == {"orders"}
    assert owner(lake, "orders") is None
    assert not upgraded.prepare("orders", lambda: SHAPE)
    assert not upgraded.prepare("other.orders", lambda: SHAPE)
    with pytest.raises(NeedsOperator, match="remembers it from now on"):
        upgraded.prepare("shop.orders", lambda: SHAPE)
    again = sink(lake, route=BY_RECORDS)
    assert set(again.claim([])) == {"shop.orders"}
    commit(again, epoch(2, 5, 9), "shop.orders")
    assert paths(lake, "orders") == ["shop.orders-1.parquet", "shop.orders-2.parquet"]


def test_a_table_whose_source_table_goes_elsewhere_now_is_left_as_it_is(caplog):
    """I16: a copy under another name, or a changed option; it counts for nothing."""
    lake = Lake()
    first = sink(lake)
    first.claim(["a"])
    commit(first, epoch(1, 0, 5), "a")
    lake.tables[name("a_copy")] = copy = lake.tables[name("a")]
    with caplog.at_level(logging.WARNING):
        assert set(sink(lake).claim(["a"])) == {"a"}
    assert lake.tables[name("a_copy")] is copy
    assert "a_copy is left as it is" in caplog.text


class FoldedNames(UserDict):
    """A stand-in for catalogs that know tables by their names in lower case, as Glue and Hive."""

    def __getitem__(self, table):
        return super().__getitem__(replace(table, name=table.name.lower()))

    def __setitem__(self, table, metadata):
        super().__setitem__(replace(table, name=table.name.lower()), metadata)

    def __contains__(self, table):
        return super().__contains__(replace(table, name=table.name.lower()))


def folding_lake() -> Lake:
    lake = Lake()
    lake.tables = FoldedNames()
    return lake


def test_a_catalog_that_folds_names_answers_with_one_table_for_two_spellings(caplog):
    """I16, Mend, leftover: the first spelling has the table, also after restarts; the second is
    refused record by record, and never takes or stops the first."""
    lake = folding_lake()
    spellings = ["Orders", "orders"]
    for number, order in enumerate([spellings, spellings[::-1], spellings], start=1):
        running = sink(lake, route=BY_RECORDS)
        expected = {} if number == 1 else {"Orders": number - 1}
        assert {t: p.epoch for t, p in running.durable([]).items()} == expected
        assert {t: p.epoch for t, p in running.claim([]).items()} == expected
        ready = {table: running.prepare(table, lambda: SHAPE) for table in order}
        assert ready == {"Orders": True, "orders": False}
        commit(running, epoch(number, 5 * number - 5, 5 * number), "Orders")
        writer = running.writer(epoch(number + 1, 5 * number, 5 * number + 5), ["Orders"])
        assert "fed by source table Orders" in writer.refused("orders")
        assert writer.refused("Orders") is None
    assert paths(lake, "Orders") == [f"Orders-{number}.parquet" for number in (1, 2, 3)]
    assert owner(lake, "Orders") == {"pipeline": "p", "table": "Orders"}
    assert "is left as it is" not in caplog.text


def test_a_folding_catalog_refuses_the_second_of_two_source_tables_at_once():
    """I16, Mend, leftover: tables of the source itself are a matter of the configuration."""
    lake = folding_lake()
    first = sink(lake)
    first.claim(["a.Orders", "b.orders"])
    commit(first, epoch(1, 0, 5), "a.Orders")
    for ask in (
        lambda: first.prepare("b.orders", lambda: SHAPE),
        lambda: sink(lake).durable(["a.Orders", "b.orders"]),
    ):
        with pytest.raises(ConfigInvalid, match="two source tables go into one") as caught:
            ask()
        assert "fed by a.Orders; b.orders would" in caught.value.detail
    assert set(sink(lake).claim(["a.Orders"])) == {"a.Orders"}


def test_a_folded_name_of_an_earlier_version_finds_its_spelling():
    """I16, Mend, leftover: the table does not say its source table, but its last epoch does."""
    lake = folding_lake()
    upgraded = after_an_upgrade(lake, "Orders", "Orders")
    upgraded.claim([])
    with pytest.raises(NeedsOperator, match="remembers it from now on"):
        upgraded.prepare("Orders", lambda: SHAPE)
    again = sink(lake, route=BY_RECORDS)
    assert set(again.claim([])) == {"Orders"}
    assert not again.prepare("orders", lambda: SHAPE)
    commit(again, epoch(2, 5, 9), "Orders")
    assert paths(lake, "Orders") == ["Orders-1.parquet", "Orders-2.parquet"]


class Counting(MemoryCatalog):
    """Counts loads, and fails for some tables."""

    def __init__(self, lake: Lake, **failing: Exception):
        super().__init__(lake)
        self.loads: list[str] = []
        self._failing = failing

    def load_listed(self, table):
        self.loads.append(table.name)
        if table.name in self._failing:
            raise self._failing[table.name]
        return super().load_listed(table)


def test_strangers_are_looked_at_once_and_an_unreadable_one_stops_nobody(monkeypatch, caplog):
    """I16, Mend a6: one that may not be read, or is broken, is passed over with a warning."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.0,))  # it never comes back: no wait
    lake = Lake()
    owned = sink(lake)
    owned.claim(["a"])
    commit(owned, epoch(1, 0, 5), "a")
    made_by_someone(lake, "s1", "s2", "secret", "broken")
    catalog = Counting(
        lake, secret=ConfigInvalid("forbidden"), broken=TargetUnavailable("no metadata")
    )
    started = IcebergSink(catalog, IcebergSinkOptions(namespace="shop"), "p")
    with caplog.at_level(logging.WARNING):
        started.durable(["a"])
        assert set(started.claim(["a"])) == {"a"}
    assert sorted(catalog.loads) == ["broken", "broken", "s1", "s2", "secret"]
    assert "shop.secret is passed over" in caplog.text
    assert "shop.broken is passed over" in caplog.text


def test_a_table_of_ours_that_could_not_be_read_at_the_start_is_not_written_twice(monkeypatch):
    """I16, Mend a6: it was passed over, so where it stands is not known."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", ())  # a second look would find it readable
    lake = Lake()
    first = sink(lake, route=BY_RECORDS)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a.t")
    options = IcebergSinkOptions(namespace="shop", route=BY_RECORDS)
    started = IcebergSink(Counting(lake, t=TargetUnavailable("hiccup")), options, "p")
    assert started.claim([]) == {}
    with pytest.raises(TargetUnavailable, match="when the pipeline started"):
        started.prepare("a.t", lambda: SHAPE)
    assert paths(lake, "t") == ["a.t-1.parquet"]


def named_by_records(lake: Lake, **failing: Exception) -> IcebergSink:
    """A start whose catalog cannot read some of the tables."""
    options = IcebergSinkOptions(namespace="shop", route=BY_RECORDS)
    return IcebergSink(Counting(lake, **failing), options, "p")


@pytest.mark.parametrize("alone", ["b", "new"])
@pytest.mark.parametrize(
    "problem", [TargetUnavailable("no answer"), ConfigInvalid("forbidden")], ids=lambda e: e.message
)
def test_a_start_waits_for_an_own_table_that_only_its_name_tells(monkeypatch, alone, problem):
    """I16, Mend, leftover: it may hold the last epoch, whose number would be used twice; so also
    when that was its first epoch and no other table has a part in it."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", ())  # a second look would find it readable
    lake = Lake()
    first = sink(lake, route=BY_RECORDS)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a", "b")
    commit(first, epoch(2, 5, 9), alone)
    made_by_someone(lake, "secret")
    failing = {alone: problem, "secret": problem}
    for ask in (IcebergSink.durable, IcebergSink.claim):
        started = named_by_records(lake, **failing)
        with pytest.raises(type(problem).__mro__[1], match=rf"shop\.{alone} .*pipeline") as caught:
            ask(started, [])
        assert problem.message in caught.value.detail
        assert "secret" not in str(caught.value)
        del failing[alone]
        started._catalog._failing = failing
        assert ask(started, [])[alone].epoch == 2
        failing[alone] = problem


def test_a_strangers_unreadable_table_stops_nobody_though_one_of_ours_was_dropped(monkeypatch):
    """I16, Mend, leftover: the name tells it from a table that the last epoch knew."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", ())  # it never comes back: no use to wait
    lake = Lake()
    first = sink(lake, route=BY_RECORDS)
    first.claim([])
    commit(first, epoch(1, 0, 5), "a", "b", "c")
    lake.drop(name("b"))
    made_by_someone(lake, "secret")
    started = named_by_records(lake, secret=TargetUnavailable("no metadata"))
    assert set(started.durable([])) == {"a", "c"}
    assert set(started.claim([])) == {"a", "c"}
    commit(started, epoch(2, 5, 9), "a")
    # The name is free: what somebody else makes there is a stranger's.
    made_by_someone(lake, "b")
    later = named_by_records(lake, b=TargetUnavailable("no metadata"))
    assert set(later.claim([])) == {"a", "c"}


def test_heartbeats_go_to_a_table_that_the_source_still_feeds():
    """I16, Mend a6: one that left the configuration keeps its progress and gets no heartbeat."""
    lake = Lake()
    first = sink(lake)
    first.claim(["a", "b"])
    commit(first, epoch(1, 0, 5), "a", "b")
    later = sink(lake)
    assert set(later.claim(["b"])) == {"a", "b"}
    assert later.heartbeat(epoch(2, 5, 9), {})
    assert remembered_upper(lake, "a") == Frontier({"log": (5,)})
    assert remembered_upper(lake, "b") == Frontier({"log": (9,)})
    nobody = sink(lake)
    nobody.claim(["c"])
    assert not nobody.heartbeat(epoch(3, 9, 10), {})


def remembered_upper(lake: Lake, table: str) -> Frontier:
    found = MemoryCatalog(lake).load(name(table))
    assert found is not None
    progress = found.head("p", "main").progress
    assert progress is not None
    return progress.upper


def test_a_rollback_is_settled_only_in_a_table_of_the_pipeline():
    """I16, Mend a1: the error says where to look."""
    lake = Lake()
    made_by_someone(lake, "t")
    with pytest.raises(ConfigInvalid, match=r"has no table shop\.t") as caught:
        sink(lake).settle_rollback("t", replay=True)
    assert "icestream status" in caught.value.hint
