"""The OpenSearch sink on a real node: mappings, documents, progress, and what must not happen."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
import requests
from prometheus_client import REGISTRY
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from icestream import patience
from icestream.change import AT, OP, Op
from icestream.epoch import Epoch, resume_point
from icestream.errors import (
    ConfigInvalid,
    DataRejected,
    Fenced,
    NeedsOperator,
    ProgressLost,
    SchemaRejected,
    TargetUnavailable,
)
from icestream.failpoints import FailpointError
from icestream.frontier import START, Frontier
from icestream.schema import Column, TableShape
from icestream.sinks import BESIDE, Written, of_tables
from icestream.sinks.opensearch.sink import (
    OpenSearchOptions,
    OpenSearchSink,
    OpenSearchWriter,
)
from tests.proxy import Proxy
from tests.servers import OpenSearch, wait_until

TABLE = "shop.Orders"
SECONDS_MAX = 120.0
COLUMNS = (
    Column(name="id", type=LongType()),
    Column(name="name", type=StringType()),
    Column(name="price", type=DecimalType(10, 2)),
    Column(name="ratio", type=DoubleType()),
    Column(name="count", type=IntegerType()),
    Column(name="at", type=TimestamptzType()),
)
SetRules = Callable[..., None]


@pytest.fixture
def proxy(node: OpenSearch) -> Iterator[Proxy]:
    with Proxy(node.url) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between requests are short."""
    # Nobody needs to wait as long as a busy cluster does.
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.01,) * 5)


@pytest.fixture
def rules_off(monkeypatch: pytest.MonkeyPatch) -> SetRules:
    """Switches rules of the commit protocol off."""

    def switch(*rules: str) -> None:
        text = ",".join(f"rule-{rule}=off" for rule in rules)
        # The rule that is taken out is named by the test.
        monkeypatch.setenv("ICESTREAM_FAILPOINTS", text)

    return switch


def ask(node: OpenSearch, method: str, path: str, body: object = None) -> Any:
    answer = requests.request(method, f"{node.url}{path}", json=body, timeout=60)
    assert method != "PUT" or answer.ok, answer.text
    return answer.json()


def sink_on(node: OpenSearch | Proxy, **options: Any) -> OpenSearchSink:
    return OpenSearchSink(OpenSearchOptions(hosts=[node.url], **options), "pipe")


def prepared(node: OpenSearch | Proxy, **options: Any) -> OpenSearchSink:
    """A sink that owns the pipeline and whose index is there."""
    sink = sink_on(node, **options)
    sink.claim([TABLE])
    assert sink.prepare(TABLE, shape)
    return sink


def started(node: OpenSearch | Proxy, **options: Any) -> OpenSearchSink:
    """A sink whose index is named by the progress, and so takes documents."""
    sink = prepared(node, **options)
    sink.writer(epoch(1), [TABLE])
    return sink


def shape(*more: Column) -> TableShape:
    return TableShape(columns=[*COLUMNS, *more], key=["id"], table_id="id-1")


def changes(ids: list[str | None], version: int = 5, **fields: Any) -> pa.Table:
    """Documents of these ids; `deletes` names those that are deleted, `poison` spoils one."""
    deletes, poison = fields.pop("deletes", ()), fields.pop("poison", "")
    documents = [
        None
        if id_ in deletes
        else json.dumps({"id": id_ == poison or place, "name": f"v{version}", **fields})
        for place, id_ in enumerate(ids)
    ]
    ops = [Op.UPSERT if document else Op.DELETE for document in documents]
    return pa.table(
        {
            OP: pa.array(ops, pa.int8()),
            AT: pa.array([version] * len(ids), pa.int64()),
            "id": pa.array(ids, pa.string()),
            "document": pa.array(documents, pa.string()),
        }
    )


def epoch(number: int, lower: Frontier | None = None) -> Epoch:
    before = at(number - 1) if number > 1 else START
    return Epoch(number=number, lower=before if lower is None else lower, upper=at(number))


def at(number: int) -> Frontier:
    return Frontier({"snapshots ..of .shop": (number,)})


def send(sink: OpenSearchSink, table: pa.Table, number: int = 1) -> list[str]:
    return list(sink.writer(epoch(number), [TABLE]).write(TABLE, "0", table))


def commit(sink: OpenSearchSink, number: int, table: pa.Table | None = None) -> bool:
    """Write and commit an epoch; whether it was found published."""
    reports = send(sink, table if table is not None else changes(["a"], version=number), number)
    written = Written(epoch=epoch(number), reports=reports, writer=None, labels={})
    (committed,) = sink.commit(written)
    assert committed.table == TABLE
    return committed.duplicate


def count(node: OpenSearch, index: str = "shop.orders") -> int:
    ask(node, "POST", f"/{index}/_refresh")
    return int(ask(node, "GET", f"/{index}/_count")["count"])


def document(node: OpenSearch, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = ask(node, "GET", f"/shop.orders/_doc/{quote(id_, safe='')}")
    return found


def progress(node: OpenSearch) -> dict[str, Any]:
    found: dict[str, Any] = ask(node, "GET", "/icestream-progress/_doc/pipe")
    return found


def mapping(node: OpenSearch, index: str = "shop.orders") -> dict[str, Any]:
    found: dict[str, Any] = ask(node, "GET", f"/{index}/_mapping")[index]["mappings"]
    return found


# Mapping


def test_an_index_is_created_with_the_tables_types(node: OpenSearch) -> None:
    """O10: by a template that the sink installs, not by guesses from values."""
    started(node)
    found = mapping(node)["properties"]
    kinds = {name: found[name]["type"] for name in found}
    assert kinds == {
        "id": "long",
        "name": "text",
        "price": "keyword",
        "ratio": "double",
        "count": "long",
        "at": "date",
    }
    (template,) = ask(node, "GET", "/_index_template")["index_templates"]
    assert template["name"] == "icestream-pipe-shop.orders"
    assert template["index_template"]["index_patterns"] == ["shop.orders"]
    settings = ask(node, "GET", "/shop.orders/_settings")["shop.orders"]["settings"]
    assert settings["index"]["gc_deletes"] == "1h"


def test_values_keep_their_digits_and_are_found(node: OpenSearch) -> None:
    """O10: large doubles, NaN as text, exact decimals, microseconds."""
    sink = started(node)
    values = {"ratio": 1e300, "price": "12345678.90", "at": "2024-02-29T12:00:00.123456+00:00"}
    send(sink, changes(["a"], **values))
    send(sink, changes(["b"], **{**values, "ratio": "NaN"}))
    assert document(node, "b")["_source"]["ratio"] == "NaN"
    ask(node, "POST", "/shop.orders/_refresh")
    for query in (
        {"range": {"ratio": {"gte": 9e299}}},
        {"term": {"price": "12345678.90"}},
        {"range": {"at": {"gte": "2024-02-29", "lt": "2024-03-01"}}},
    ):
        found = ask(node, "GET", "/shop.orders/_search", {"query": query})["hits"]["hits"]
        assert "a" in {hit["_id"] for hit in found}, query


def test_the_users_own_template_wins(node: OpenSearch) -> None:
    """O10: what the user maps stays; the rest is added."""
    own = {"mappings": {"properties": {"price": {"type": "double"}}}}
    body = {"index_patterns": ["shop.*"], "priority": 1, "template": own}
    ask(node, "PUT", "/_index_template/own", body)
    started(node)
    found = mapping(node)["properties"]
    assert found["price"]["type"] == "double"
    assert found["ratio"]["type"] == "double"
    settings = ask(node, "GET", "/shop.orders/_settings")["shop.orders"]["settings"]
    assert settings["index"]["gc_deletes"] == "1h"


@pytest.mark.parametrize("dynamic", ["strict", False, "templates"])
def test_a_users_mapping_that_says_what_comes_of_new_fields_is_left_alone(
    node: OpenSearch, dynamic: object
) -> None:
    """O10: fields are added only where the owner leaves that to others."""
    rule = {"texts": {"match_mapping_type": "string", "mapping": {"type": "keyword"}}}
    rest = {"dynamic_templates": [rule]} if dynamic == "templates" else {"dynamic": dynamic}
    own = {"mappings": {"properties": {"id": {"type": "keyword"}}, **rest}}
    ask(node, "PUT", "/_index_template/own", body_of("shop.*", own, 7))
    started(node)
    assert set(mapping(node)["properties"]) == {"id"}


def body_of(pattern: str, template: object, priority: int) -> dict[str, object]:
    return {"index_patterns": [pattern], "priority": priority, "template": template}


def test_a_strict_mapping_takes_a_new_column_after_its_owner_has_added_it(
    node: OpenSearch,
) -> None:
    """O10, E10, Mend g2: the way out that the error names; its owner is named there too."""
    fields = {name: {"type": "keyword"} for name in ("id", "name")}
    own = {"mappings": {"properties": fields, "dynamic": "strict"}}
    ask(node, "PUT", "/_index_template/own", body_of("shop.*", own, 7))
    sink = started(node)
    commit(sink, 1)
    assert owner(node)["pipeline"] == "pipe"
    with pytest.raises(DataRejected) as refused:
        send(sink, changes(["b"], version=2, discount=5), 2)
    assert "strict_dynamic_mapping_exception" in str(refused.value.detail)
    assert "can be added" in str(refused.value.hint)
    ask(node, "PUT", "/shop.orders/_mapping", {"properties": {"discount": {"type": "long"}}})
    commit(sink, 2, changes(["b"], version=2, discount=5))


def test_a_users_template_of_the_old_kind_wins_too(node: OpenSearch) -> None:
    """O10: a template of the new kind would make OpenSearch forget it."""
    own = {"index_patterns": ["shop.*"], "mappings": {"properties": {"price": {"type": "double"}}}}
    ask(node, "PUT", "/_template/own", own)
    started(node)
    assert mapping(node)["properties"]["price"]["type"] == "double"


def test_a_template_of_the_same_priority_is_named(node: OpenSearch) -> None:
    """O10: which one would win is not left to chance."""
    ask(node, "PUT", "/_index_template/own", body_of("shop.*", {}, 0))
    sink = sink_on(node)
    sink.claim([TABLE])
    with pytest.raises(ConfigInvalid) as refused:
        sink.prepare(TABLE, shape)
    assert "own" in str(refused.value)
    assert "priority above 0" in str(refused.value.hint)


def test_more_indices_than_fit_into_one_request_are_looked_at(node: OpenSearch) -> None:
    """O12, O15: a pipeline of many tables is started a second time as well."""
    names = [
        f"shop.a_table_whose_name_is_of_the_usual_length_{number:03d}" for number in range(200)
    ]
    for name in (names[0], names[120], names[-1]):
        ask(node, "PUT", f"/{name}", {"settings": {"number_of_replicas": 0}})
    found = sink_on(node)._document.look(names)
    assert list(found) == [names[0], names[120], names[-1]]


def test_columns_that_are_widened_still_fit_their_fields(node: OpenSearch) -> None:
    """O7, O10, Mend g2: int to long and float to double, at any depth, need no other mapping."""

    def columns(whole: IcebergType, real: IcebergType) -> TableShape:
        inner = StructType(NestedField(1, "whole", whole), NestedField(2, "real", real))
        return TableShape(
            columns=[
                Column(name="whole", type=whole),
                Column(name="real", type=real),
                Column(name="inner", type=ListType(3, inner)),
            ],
            key=["whole"],
        )

    sink = sink_on(node)
    sink.claim([TABLE])
    sink.prepare(TABLE, lambda: columns(IntegerType(), FloatType()))
    commit(sink, 1)
    sink.prepare(TABLE, lambda: columns(LongType(), DoubleType()))
    large = {"whole": 2**40, "real": 1e300}
    commit(sink, 2, changes(["a"], version=2, **large, inner=[large]))
    ask(node, "POST", "/shop.orders/_refresh")
    for name in ("whole", "real", "inner.whole", "inner.real"):
        query = {"query": {"range": {name: {"gte": 2**39}}}}
        found = ask(node, "GET", "/shop.orders/_search", query)["hits"]["hits"]
        assert [hit["_id"] for hit in found] == ["a"], name


def of_an_earlier_version(node: OpenSearch) -> None:
    """An index in which an int column is an integer."""
    own = {"mappings": {"properties": {"count": {"type": "integer"}}}}
    ask(node, "PUT", "/shop.orders", own)


def widened() -> TableShape:
    kept = [column for column in COLUMNS if column.name != "count"]
    return TableShape(columns=[*kept, Column(name="count", type=LongType())], key=["id"])


def test_a_narrow_index_takes_all_values_that_fit_and_names_the_way_out_for_others(
    node: OpenSearch, caplog: pytest.LogCaptureFixture
) -> None:
    """O7, O10, E10, Mend g2: an index that an earlier version made, whose column is widened."""
    of_an_earlier_version(node)
    sink = started(node)
    assert "hold less" not in caplog.text
    assert sink.prepare(TABLE, widened)
    assert "fields ['count'] hold less" in caplog.text
    commit(sink, 1, changes(["a"], version=1, count=5))
    with pytest.raises(DataRejected) as refused:
        send(sink, changes(["b"], version=2, count=2**40), 2)
    assert "[count] of type [integer]" in str(refused.value.detail)
    assert "delete the index and the pipeline's progress" in str(refused.value.hint)
    for path in ("shop.orders", "icestream-progress/_doc/pipe"):
        ask(node, "DELETE", f"/{path}")
    sink = sink_on(node)
    sink.claim([TABLE])
    sink.prepare(TABLE, widened)
    commit(sink, 1, changes(["a", "b"], version=2, count=2**40))
    assert count(node) == 2


def test_new_columns_reach_an_index_that_exists(node: OpenSearch, proxy: Proxy) -> None:
    """O7, O10: before documents with them do; without new columns nothing is asked."""
    sink = started(proxy)
    proxy.clear()
    assert sink.prepare(TABLE, shape)
    assert proxy.requests == []
    discount = Column(name="discount", type=DoubleType())
    sink.prepare(TABLE, lambda: shape(discount))
    assert mapping(node)["properties"]["discount"]["type"] == "double"


def test_a_mapping_in_which_a_column_has_no_place_is_refused(node: OpenSearch) -> None:
    """O10: an object where a value comes."""
    own = {"mappings": {"properties": {"price": {"properties": {"net": {"type": "long"}}}}}}
    ask(node, "PUT", "/shop.orders", own)
    sink = sink_on(node)
    sink.claim([TABLE])
    with pytest.raises(SchemaRejected, match="field price"):
        sink.prepare(TABLE, shape)


def test_nothing_is_made_before_the_source_knows_its_columns(node: OpenSearch) -> None:
    """O11: an index that exists can be written to all the same."""
    sink = sink_on(node)
    sink.claim([TABLE])
    assert not sink.prepare(TABLE, lambda: None)
    ask(node, "PUT", "/shop.orders")
    assert sink.prepare(TABLE, lambda: None)


def test_an_alias_of_one_index_leads_there(node: OpenSearch) -> None:
    """O11: the index is known by what it is, not by what it is called."""
    ask(node, "PUT", "/mine", {"aliases": {"shop.orders": {}}})
    sink = started(node)
    commit(sink, 1)
    assert count(node, "mine") == 1
    assert progress(node)["_source"]["indices"][TABLE]["index"] == "mine"


def test_a_data_stream_is_no_index(node: OpenSearch) -> None:
    """O11, O15, Mend i1: it would refuse each document, or all would become letters."""
    body = {"index_patterns": ["shop.*"], "data_stream": {}, "priority": 5}
    ask(node, "PUT", "/_index_template/own", body)
    ask(node, "PUT", "/_data_stream/shop.orders")
    try:
        said = refused_at_start(sink_on(node))
    finally:
        ask(node, "DELETE", "/_data_stream/shop.orders")
    assert said.message == "shop.orders is a data stream"


def test_two_tables_do_not_share_an_index(node: OpenSearch) -> None:
    """O11, O12: their versions are not comparable."""
    with pytest.raises(ConfigInvalid, match="go into one index"):
        sink_on(node, index="mine").claim(["shop.orders", "shop.customers"])


# Whose index it is


def other_sink(node: OpenSearch | Proxy, pipeline: str = "other", **options: Any) -> OpenSearchSink:
    return OpenSearchSink(OpenSearchOptions(hosts=[node.url], **options), pipeline)


def put_documents(node: OpenSearch, *ids: str, index: str = "shop.orders") -> None:
    """Documents that no pipeline has brought, not yet found by searches."""
    ask(node, "PUT", f"/{index}", {"settings": {"refresh_interval": "-1"}})
    for id_ in ids:
        ask(node, "PUT", f"/{index}/_doc/{id_}", {"name": "stranger"})


def owner(node: OpenSearch, index: str = "shop.orders") -> dict[str, Any]:
    return dict(mapping(node, index).get("_meta", {}).get("icestream", {}))


def refused_at_start(sink: OpenSearchSink) -> NeedsOperator:
    """What `check` and the start of a run say; a run that comes later to the table says it too."""
    with pytest.raises(NeedsOperator) as early:
        sink.durable([TABLE])
    sink.claim([TABLE])
    with pytest.raises(NeedsOperator) as late:
        sink.prepare(TABLE, shape)
    assert str(early.value) == str(late.value)
    return early.value


def test_an_index_says_whose_it_is_from_the_start(node: OpenSearch) -> None:
    """O15, Mend i1: pipeline and table, in the request that creates it; nobody else gets it."""
    sink = prepared(node)
    assert owner(node) == {"pipeline": "pipe", "table": TABLE, "table_id": "id-1"}
    said = refused_at_start(other_sink(node))
    assert isinstance(said, ConfigInvalid)
    assert "belongs to someone else" in said.message
    assert f"pipeline pipe, table {TABLE} (id-1)" in str(said.detail)
    commit(sink, 1)
    assert count(node) == 1


def test_a_first_load_over_a_strangers_documents_is_refused(node: OpenSearch) -> None:
    """O15, Mend i1: they would stay for ever; another index, or none, is a way out."""
    put_documents(node, "x", "y")
    sink = sink_on(node)
    said = refused_at_start(sink)
    assert isinstance(said, ConfigInvalid)
    assert "index shop.orders holds documents that pipeline pipe has not brought" in said.message
    assert "There are 2" in str(said.detail)
    for way in ("another index with `index`", "delete this one"):
        assert way in str(said.hint)
    assert owner(node) == {}
    assert ask(node, "GET", "/_index_template")["index_templates"] == []
    elsewhere = started(node, index="mine")
    commit(elsewhere, 1)
    assert (count(node, "mine"), count(node)) == (1, 2)
    ask(node, "DELETE", "/icestream-progress")
    ask(node, "DELETE", "/shop.orders")
    commit(started(node), 1)
    assert {hit["_id"] for hit in searched(node, "shop.orders")} == {"a"}


def test_an_index_is_adopted_with_all_that_it_holds_when_a_person_says_so(
    node: OpenSearch,
) -> None:
    """O15, Mend i1: by the request that the error names; it is permission for one time."""
    put_documents(node, "x")
    ask(node, "PUT", "/shop.orders/_mapping", {"_meta": {"mine": 1}})
    hint = str(refused_at_start(sink_on(node)).hint)
    path, body = hint.split("`PUT ")[1].split("` with the body ")
    ask(node, "PUT", path, json.loads(body))
    sink = prepared(node)
    assert owner(node)["adopt"] is True
    commit(sink, 1)
    assert owner(node) == {"pipeline": "pipe", "table": TABLE, "table_id": "id-1"}
    assert {hit["_id"] for hit in searched(node, "shop.orders")} == {"a", "x"}
    ask(node, "DELETE", "/icestream-progress/_doc/pipe")
    assert "knows nothing of them" in refused_at_start(sink_on(node)).message


def test_documents_whose_progress_was_lost_are_not_loaded_over(node: OpenSearch) -> None:
    """O15, E3, Mend i1: some of them may have no row any more; without the index it goes on."""
    commit(started(node), 1, changes(["gone", "old"], version=9))
    ask(node, "DELETE", "/icestream-progress/_doc/pipe")
    said = refused_at_start(sink_on(node))
    assert isinstance(said, ProgressLost)
    assert "progress of pipeline pipe knows nothing of them" in said.message
    assert "delete the index" in str(said.hint)
    ask(node, "DELETE", "/shop.orders")
    commit(started(node), 1, changes(["new"], version=2))
    assert {hit["_id"] for hit in searched(node, "shop.orders")} == {"new"}


@pytest.mark.parametrize("same_name", [True, False])
def test_tables_of_two_catalogs_do_not_share_an_index(node: OpenSearch, same_name: bool) -> None:
    """O15, Mend i1: neither does a table that was made anew under the name of another."""
    commit(started(node), 1, changes(["a", "b"], version=9))
    made_anew = TableShape(columns=COLUMNS, key=["id"], table_id="id-2")
    pipeline = "pipe" if same_name else "other"
    sink = other_sink(node, pipeline, progress_index="shop.progress")
    sink.claim([TABLE])
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        sink.prepare(TABLE, lambda: made_anew)


def test_an_index_of_an_earlier_version_goes_on(node: OpenSearch) -> None:
    """O15, E2, Mend i1: the progress names it; what else its mapping says stays."""
    commit(started(node), 1)
    ask(node, "PUT", "/shop.orders/_mapping", {"_meta": {"mine": {"team": "search"}}})
    assert owner(node) == {}
    sink = sink_on(node)
    assert set(of_tables(sink.durable([TABLE]))) == {TABLE}
    sink = started(node)
    commit(sink, 2)
    assert owner(node)["table_id"] == "id-1"
    assert mapping(node)["_meta"]["mine"] == {"team": "search"}


def test_an_index_is_known_again_after_a_kill_in_the_first_epoch(
    node: OpenSearch, proxy: Proxy
) -> None:
    """O15, E2, Mend i1: documents are there before any commit, the index's name is before them."""
    for id_ in ("a", "b"):
        sink = started(proxy)
        send(sink, changes(["a", "b"]))
        assert progress(node)["_source"]["epoch"] == 0, id_
    puts = [asked for asked in proxy.requests if asked.method == "PUT" and "_doc" in asked.path]
    assert len(puts) == 2, "one for the second claim, one for the name of the index"
    assert not commit(sink, 1, changes(["a", "b"]))
    assert count(node) == 2


def test_a_name_whose_answer_was_lost_is_written_once_more(node: OpenSearch, proxy: Proxy) -> None:
    """O15, E3, Mend i1: and a run that was fenced meanwhile sends no document."""
    sink = prepared(proxy)
    proxy.on("PUT", "_doc/pipe").lose_answer()
    send(sink, changes(["a"]))
    assert set(progress(node)["_source"]["indices"]) == {TABLE}
    ask(node, "DELETE", "/icestream-progress")
    ask(node, "DELETE", "/shop.orders")
    sink = prepared(node)
    sink_on(node).claim([TABLE])
    with pytest.raises(Fenced):
        send(sink, changes(["a"]))
    assert count(node) == 0


def test_a_conflict_that_no_replay_explains_is_an_error(node: OpenSearch) -> None:
    """O15, O12, Mend i1: somebody else's newer version is not taken for done."""
    sink = started(node)
    commit(sink, 1, changes(["a", "b", "c"], version=1))
    external = "version=8&version_type=external"
    ask(node, "PUT", f"/shop.orders/_doc/b?{external}", {"name": "stranger"})
    with pytest.raises(ProgressLost) as refused:
        commit(sink, 2, changes(["a", "b"], version=2))
    assert f"newer documents than table {TABLE} gives" in refused.value.message
    assert "There are 1, such as b." in str(refused.value.detail)
    assert progress(node)["_source"]["epoch"] == 1
    # The way out.
    ask(node, "DELETE", "/icestream-progress/_doc/pipe")
    ask(node, "DELETE", "/shop.orders")
    commit(started(node), 1, changes(["a", "b"], version=2))
    assert document(node, "b")["_source"]["name"] == "v2"


def test_a_load_into_an_emptied_index_that_remembers_newer_versions_is_an_error(
    node: OpenSearch,
) -> None:
    """O15, O12, Mend i1: deletes that OpenSearch still knows would swallow documents."""
    sink = started(node)
    commit(sink, 1, changes(["a"], version=9))
    commit(sink, 2, changes(["a"], version=10, deletes=["a"]))
    ask(node, "DELETE", "/icestream-progress/_doc/pipe")
    with pytest.raises(ProgressLost, match="newer documents"):
        commit(started(node), 1, changes(["a"], version=2))


def test_a_run_that_was_overtaken_says_that_and_not_conflict(node: OpenSearch) -> None:
    """O15, E6, Mend i1: a newer run has newer versions by right."""
    older = started(node)
    commit(older, 1, changes(["a"], version=1))
    newer = started(node)
    commit(newer, 2, changes(["a"], version=3))
    reports = list(
        OpenSearchWriter(
            options=OpenSearchOptions(hosts=[node.url]), indices={TABLE: "shop.orders"}
        ).write(TABLE, "0", changes(["a"], version=2))
    )
    with pytest.raises(Fenced, match="newer run"):
        older.commit(Written(epoch=epoch(2), reports=reports, writer=None, labels={}))


def test_an_index_that_gets_another_owner_takes_no_epoch_more(node: OpenSearch) -> None:
    """O15, Mend i1: somebody gives it away while the pipeline runs."""
    sink = started(node)
    commit(sink, 1)
    meta = {**mapping(node)["_meta"], "icestream": {"pipeline": "other", "table": TABLE}}
    ask(node, "PUT", "/shop.orders/_mapping", {"_meta": meta})
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        commit(sink, 2)
    assert progress(node)["_source"]["epoch"] == 1
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        sink_on(node).claim([TABLE])


# Documents


def test_the_same_changes_again_change_nothing_and_older_ones_are_superseded(
    node: OpenSearch,
) -> None:
    """O12: replays and late zombies cannot overwrite newer documents."""
    sink = started(node)
    newer = changes(["a", "b", "c"], version=8, deletes=["c"])
    first = send(sink, newer)
    assert send(sink, newer) == first
    (late,) = send(sink, changes(["a", "b", "c"], version=7))
    assert (late.payload.superseded, late.payload.indexed) == (3, 0)
    assert document(node, "a")["_source"]["name"] == "v8"
    assert document(node, "a")["_version"] == 8
    assert document(node, "c")["found"] is False
    assert count(node) == 2


def test_a_document_that_is_missing_can_be_deleted(node: OpenSearch) -> None:
    """O12: its delete is acknowledged, and an older version does not come after it."""
    sink = started(node)
    (report,) = send(sink, changes(["never"], version=5, deletes=["never"]))
    assert (report.payload.deleted, report.payload.dead_letters) == (1, 0)
    (report,) = send(sink, changes(["never"], version=4))
    assert report.payload.superseded == 1
    assert count(node) == 0


def test_odd_ids_come_back_as_they_were(node: OpenSearch) -> None:
    """O9: any text is an id."""
    ids = [
        'say "hi"',
        "back\\slash",
        "two\nlines\r\n",
        "nul\0",
        "größe 🐘\u2028",
        "a/b?c#d%20",
        "+",
    ]
    sink = started(node)
    send(sink, changes(list(ids)))
    assert [document(node, id_)["_id"] for id_ in ids] == ids
    send(sink, changes(list(ids), version=6, deletes=ids))
    assert count(node) == 0


def test_documents_without_an_id_are_given_one(node: OpenSearch) -> None:
    """O9: a table without identifier columns takes inserts."""
    sink = started(node)
    send(sink, changes([None, None, "a"]))
    assert count(node) == 3


def poisoned(count: int) -> pa.Table:
    return changes([f"k{number}" for number in range(count)], poison="k7777")


def test_a_document_that_is_refused_stops_the_pipeline(node: OpenSearch) -> None:
    """E10: on_error: stop names index, id and reason; nothing is committed."""
    sink = started(node)
    with pytest.raises(DataRejected) as refused:
        send(sink, poisoned(10_000))
    for text in ("shop.orders", "k7777", "[id] of type [long]", "dead_letter"):
        assert text in str(refused.value)
    assert "Preview" not in str(refused.value)
    assert progress(node)["_source"]["epoch"] == 0


def test_a_document_that_is_refused_becomes_a_dead_letter_once(node: OpenSearch) -> None:
    """E10: on_error: dead_letter keeps it with all that is needed, and the others go on."""
    sink = started(node, on_error="dead_letter")
    for _ in range(2):
        (report,) = send(sink, poisoned(10_000))
        assert (report.payload.indexed, report.payload.dead_letters) == (9999, 1)
    assert count(node) == 9999
    assert count(node, "shop.orders__dead_letters") == 1
    (hit,) = ask(node, "GET", "/shop.orders__dead_letters/_search")["hits"]["hits"]
    letter = hit["_source"]
    assert (letter["index"], letter["document_id"], letter["version"]) == (
        "shop.orders",
        "k7777",
        5,
    )
    assert json.loads(letter["document"]) == {"id": True, "name": "v5"}
    assert letter["error_type"] == "mapper_parsing_exception"
    assert mapping(node, "shop.orders__dead_letters")["dynamic"] == "false"


def test_an_update_that_became_a_dead_letter_leaves_no_old_document(node: OpenSearch) -> None:
    """E10, O12, Mend g2: also when the epoch is sent again; the next good update brings it back."""
    sink = started(node, on_error="dead_letter")
    commit(sink, 1, changes(["a", "b", "c"], version=1))
    refused = changes(["a", "b", "new"], version=2, poison="b")
    send(sink, refused, 2)
    assert document(node, "b")["found"] is False
    # The run dies, and its successor sends the epoch again.
    sink = started(node, on_error="dead_letter")
    commit(sink, 2, refused)
    assert {hit["_id"] for hit in searched(node, "shop.orders")} == {"a", "c", "new"}
    (letter,) = searched(node, "shop.orders__dead_letters")
    assert (letter["_source"]["document_id"], letter["_source"]["version"]) == ("b", 2)
    assert json.loads(letter["_source"]["document"]) == {"id": True, "name": "v2"}
    commit(sink, 3, changes(["b"], version=3))
    assert document(node, "b")["_source"]["name"] == "v3"


@pytest.mark.parametrize(
    ("id_", "lines"),
    [
        ("x" * 513, [{"index": {"_id": "x" * 513}}, {}]),
        ("", [{"delete": {"_id": ""}}]),
    ],
    ids=["long", "empty"],
)
def test_an_id_that_opensearch_does_not_take_does_not_spoil_others(
    node: OpenSearch, id_: str, lines: list[object]
) -> None:
    """E10: the node refuses a whole request because of such an id."""
    body = "".join(f"{json.dumps(line)}\n" for line in lines)
    headers = {"Content-Type": "application/x-ndjson"}
    answer = requests.post(f"{node.url}/mine/_bulk", data=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    sink = started(node, on_error="dead_letter")
    (report,) = send(sink, changes(["a", id_, "x" * 512]))
    assert (report.payload.indexed, report.payload.dead_letters) == (2, 1)
    (hit,) = searched(node, "shop.orders__dead_letters")
    assert hit["_source"]["document_id"] == id_
    (report,) = send(sink, changes(["a", id_], version=6, deletes=["a", id_]))
    assert (report.payload.deleted, report.payload.dead_letters) == (2, 0)


def searched(node: OpenSearch, index: str) -> list[dict[str, Any]]:
    ask(node, "POST", f"/{index}/_refresh")
    found: list[dict[str, Any]] = ask(node, "GET", f"/{index}/_search")["hits"]["hits"]
    return found


def test_a_request_that_is_larger_than_the_node_takes_is_split(node: OpenSearch) -> None:
    """O11: 413, and 429 for more than a node's share of memory, never succeed as they are."""
    sink = started(node, on_error="dead_letter", bulk_bytes_max=300 * 1024**2)
    parts = ["x" * 40_000_000] * 3
    table = changes(["a", "b", "c"])
    documents = [json.dumps({"id": place, "text": text}) for place, text in enumerate(parts)]
    table = table.set_column(3, "document", pa.array(documents))
    (report,) = send(sink, table)
    assert report.payload.indexed == 3


def test_answers_that_are_lost_or_refused_in_the_middle_double_nothing(
    node: OpenSearch, proxy: Proxy
) -> None:
    """O11, O12: what was taken is recognised by its version."""
    sink = started(proxy, bulk_documents_max=100)
    proxy.on("POST", "_bulk").lose_answer()
    proxy.on("POST", "_bulk").refuse(429)
    proxy.on("POST", "_bulk").answer_500_after(503)
    proxy.on("POST", "_bulk").cut_before()
    (report,) = send(sink, changes([f"k{number}" for number in range(1000)]))
    assert (report.payload.indexed, report.payload.retries) == (1000, 4)
    assert count(node) == 1000


def test_a_node_that_restarts_in_mid_write_delays_it(
    node: OpenSearch, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O11: kill -9 of the node, and what it acknowledged is there."""
    monkeypatch.setattr(patience, "BRIDGED_SECONDS_MAX", 120.0)  # no loop is here to wait
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.5,) * 240)  # the node takes its time
    sink = started(proxy, bulk_documents_max=100)
    send(sink, changes(["before"]))
    killed = threading.Event()

    def kill() -> None:
        node.stop()
        killed.set()

    def revive() -> None:
        wait_until(killed.is_set, SECONDS_MAX, "the kill")
        node.start()

    reviver = threading.Thread(target=revive)
    reviver.start()
    try:
        proxy.on("POST", "_bulk").stall(0.0)
        proxy.on("POST", "_bulk").stall(0.0)
        proxy.on("POST", "_bulk").call_before(kill)
        (report,) = send(sink, changes([f"k{number}" for number in range(1000)]))
    finally:
        reviver.join()
    assert report.payload.indexed == 1000
    assert report.payload.retries > 0
    assert count(node) == 1001


# Progress


def test_an_epoch_is_durable_with_its_frontier_and_found_by_the_next_run(
    node: OpenSearch,
) -> None:
    """E2: one document beside the indices; nothing of it is indexed."""
    sink = sink_on(node)
    assert sink.durable([TABLE]) == {}
    claimed = sink.claim([TABLE])
    # No table is there yet; the document speaks for itself.
    assert set(claimed) == {BESIDE}
    assert (claimed[BESIDE].generation, claimed[BESIDE].epoch) == (1, 0)
    sink.prepare(TABLE, shape)
    assert not commit(sink, 1)
    assert not commit(sink, 2)
    found = sink_on(node).durable([TABLE, "shop.customers"])
    # A table that was never sent anything lacks all of it.
    assert set(of_tables(found)) == {TABLE}
    resume = resume_point(found)
    assert (resume.number, resume.at, resume.unfinished) == (2, at(2), None)
    assert mapping(node, "icestream-progress").get("properties") is None
    (row,) = sink_on(node).status([TABLE])
    assert (row["table"], row["source_table"], row["state"]) == ("shop.orders", TABLE, "ok")
    assert (row["generation"], row["epoch"], row["upper"]) == (1, 2, at(2))


def test_a_heartbeat_moves_the_frontier_alone(node: OpenSearch) -> None:
    """E2: an epoch without changes."""
    sink = started(node)
    commit(sink, 1)
    assert sink.heartbeat(epoch(2), {"note": "quiet"})
    assert progress(node)["_source"]["upper"] == at(2).to_json()
    assert not commit(sink, 3)


def test_commits_count_what_the_reports_say(node: OpenSearch) -> None:
    """U5: metrics by index and operation."""

    def counted(operation: str) -> float:
        labels = {"index": "shop.orders", "operation": operation}
        return REGISTRY.get_sample_value("icestream_documents_total", labels) or 0.0

    before = {name: counted(name) for name in ("indexed", "deleted")}
    commit(started(node), 1, changes(["a", "b", "c"], deletes=["c"]))
    assert counted("indexed") - before["indexed"] == 2
    assert counted("deleted") - before["deleted"] == 1


def test_a_successor_fences_its_predecessor(node: OpenSearch) -> None:
    """E6: the older run stops at once, and the newer one goes on."""
    zombie = started(node)
    commit(zombie, 1)
    successor = started(node)
    with pytest.raises(Fenced):
        commit(zombie, 2)
    assert not commit(successor, 2)
    assert progress(node)["_source"]["generation"] == 2


def test_a_claim_whose_answer_was_lost_is_found(node: OpenSearch, proxy: Proxy) -> None:
    """E6: by the claim's own id; no second generation is taken."""
    started(node)
    proxy.on("PUT", "_doc/pipe").lose_answer()
    assert sink_on(proxy).claim([TABLE])[TABLE].generation == 2
    assert progress(node)["_source"]["generation"] == 2


def test_of_two_first_claims_both_count(node: OpenSearch, proxy: Proxy) -> None:
    """E6: the loser of the race reads again and takes the generation after it."""
    rival = sink_on(node)
    proxy.on("PUT", "_create/pipe").call_before(lambda: rival.claim([TABLE]))
    assert sink_on(proxy).claim([TABLE])[BESIDE].generation == 2


def test_a_claim_gives_way_to_a_rival_that_always_wins(node: OpenSearch, proxy: Proxy) -> None:
    """E6: within a bound."""
    rival = sink_on(node)
    rival.claim([TABLE])
    proxy.on("PUT", "_doc/pipe", times=None).call_before(lambda: rival.claim([TABLE]))
    with pytest.raises(Fenced):
        sink_on(proxy).claim([TABLE])


@pytest.mark.parametrize("fault", ["lose_answer", "answer_500_after"])
def test_a_commit_whose_answer_was_lost_is_found_and_not_repeated(
    node: OpenSearch, proxy: Proxy, fault: str
) -> None:
    """E3: read-back."""
    sink = started(proxy)
    getattr(proxy.on("PUT", "_doc/pipe"), fault)()
    assert commit(sink, 1)
    # The claim, the name of the index, and the epoch once.
    assert progress(node)["_version"] == 3
    assert not commit(sink, 2)


@pytest.mark.parametrize("fault", ["cut_before", "refuse"])
def test_a_commit_that_did_not_arrive_is_made_again(
    node: OpenSearch, proxy: Proxy, fault: str
) -> None:
    """E3: an unknown outcome is settled by reading back."""
    sink = started(proxy)
    rule = proxy.on("PUT", "_doc/pipe")
    rule.refuse(503) if fault == "refuse" else rule.cut_before()
    assert not commit(sink, 1)
    # The claim, the name of the index, and the epoch once.
    assert progress(node)["_version"] == 3


def test_a_conflict_with_ones_own_commit_is_a_success(node: OpenSearch, proxy: Proxy) -> None:
    """E3: the request was sent twice on its way, and the second copy is answered."""
    sink = started(proxy)
    reports = send(sink, changes(["a"]))
    written = Written(epoch=epoch(1), reports=reports, writer=None, labels={})
    twin = started_twin(node, sink)
    proxy.on("PUT", "_doc/pipe").call_before(lambda: twin.commit(written))
    (committed,) = sink.commit(written)
    assert committed.duplicate
    # The claim, the name of the index, and the epoch once.
    assert progress(node)["_version"] == 3


def started_twin(node: OpenSearch, sink: OpenSearchSink) -> OpenSearchSink:
    """A sink that knows and does all that another one does."""
    twin = sink_on(node)
    twin._state = sink._state
    return twin


def test_an_epoch_that_does_not_join_on_is_refused(node: OpenSearch) -> None:
    """E3: continuity; somebody put the progress back."""
    sink = started(node)
    commit(sink, 1)
    older = progress(node)["_source"]
    commit(sink, 2)
    ask(node, "PUT", "/icestream-progress/_doc/pipe", older)
    with pytest.raises(ProgressLost):
        commit(sink, 3)
    ask(node, "DELETE", "/icestream-progress/_doc/pipe")
    with pytest.raises(ProgressLost):
        commit(sink, 3)


def test_an_index_that_was_deleted_or_made_anew_is_noticed(node: OpenSearch) -> None:
    """E3: progress without its documents is none; at a commit and at a start."""
    sink = started(node)
    commit(sink, 1)
    ask(node, "DELETE", "/shop.orders")
    with pytest.raises(ProgressLost, match="is gone"):
        sink_on(node).claim([TABLE])
    # The worker's request makes the index anew.
    with pytest.raises(ProgressLost, match="made anew"):
        commit(sink, 2)
    with pytest.raises(ProgressLost) as refused:
        sink_on(node).claim([TABLE])
    assert "delete document pipe of index icestream-progress" in str(refused.value.hint)
    assert progress(node)["_source"]["epoch"] == 1
    assert "made anew" in str(sink.status([TABLE])[0]["trouble"])
    # A run that does not have the table goes on.
    assert sink_on(node).claim(["shop.customers"])[BESIDE].epoch == 1
    ask(node, "DELETE", "/icestream-progress/_doc/pipe")
    assert set(sink_on(node).claim([TABLE])) == {BESIDE}


def test_a_crash_after_the_swap_is_found_durable(
    node: OpenSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3: before the swap nothing is durable, after it everything."""
    sink = started(node)
    # The program itself fails there, as it would by a crash.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", "before-swap=error")
    with pytest.raises(FailpointError):
        commit(sink, 1)
    assert sink_on(node).durable([TABLE])[TABLE].epoch == 0
    # The program itself fails there, as it would by a crash.
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", "after-swap=error")
    with pytest.raises(FailpointError):
        commit(sink, 1)
    assert sink_on(node).durable([TABLE])[TABLE].epoch == 1


def test_hosts_that_are_down_are_unavailable(
    node: OpenSearch, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O11: a start without a cluster, and a commit that outlives one."""
    # The trouble lasts for ever here; some seconds of it would prove no more.
    monkeypatch.setattr(patience, "BRIDGED_SECONDS_MAX", 0.2)
    sink = started(proxy)
    proxy.down()
    with pytest.raises(TargetUnavailable):
        sink_on(proxy).durable([TABLE])
    with pytest.raises(TargetUnavailable):
        commit(sink, 1)
    proxy.up()
    assert not commit(sink, 1)


# Each rule is needed


def test_without_the_swap_a_zombie_takes_the_pipeline_back(
    node: OpenSearch, proxy: Proxy, rules_off: SetRules
) -> None:
    """E6: a claim between check and swap is lost, and two runs believe to own the pipeline."""
    zombie = started(proxy)
    proxy.on("PUT", "_doc/pipe").call_before(lambda: sink_on(node).claim([TABLE]))
    with pytest.raises(Fenced):
        commit(zombie, 1)
    assert progress(node)["_source"]["generation"] == 2
    rules_off("swap")
    zombie = started(proxy)
    proxy.on("PUT", "_doc/pipe").call_before(lambda: sink_on(node).claim([TABLE]))
    commit(zombie, 1)
    assert progress(node)["_source"]["generation"] == 3


def test_without_fence_and_continuity_a_zombie_puts_the_frontier_back(
    node: OpenSearch, rules_off: SetRules
) -> None:
    """E3, E6: each of the two covers for the other."""
    zombie = started(node)
    successor = started(node)
    commit(successor, 1)
    commit(successor, 2)
    for rules in (("fence",), ("continuity",)):
        rules_off(*rules)
        with pytest.raises(Fenced):
            commit(zombie, 1)
    rules_off("fence", "continuity")
    commit(zombie, 1)
    found = progress(node)["_source"]
    assert (found["generation"], found["epoch"]) == (1, 1)


def test_without_continuity_an_epoch_is_left_out(node: OpenSearch, rules_off: SetRules) -> None:
    """E3: the frontier jumps over what was undone."""
    sink = started(node)
    commit(sink, 1)
    older = progress(node)["_source"]
    commit(sink, 2)
    ask(node, "PUT", "/icestream-progress/_doc/pipe", older)
    rules_off("continuity")
    commit(sink, 3)
    assert progress(node)["_source"]["lower"] == at(2).to_json()


def test_without_read_back_an_epoch_that_landed_is_taken_for_a_rivals(
    node: OpenSearch, proxy: Proxy, rules_off: SetRules
) -> None:
    """E3: and with continuity off as well it is published twice."""
    sink = started(proxy)
    rules_off("read-back")
    proxy.on("PUT", "_doc/pipe").lose_answer()
    with pytest.raises(Fenced):
        commit(sink, 1)
    sink = started(proxy)
    rules_off("read-back", "continuity")
    before = progress(node)["_version"]
    proxy.on("PUT", "_doc/pipe").lose_answer()
    commit(sink, 2)
    assert progress(node)["_version"] == before + 2
