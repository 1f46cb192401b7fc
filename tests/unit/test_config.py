"""The pipeline file is taken exactly as it was meant, or refused with what would be right."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from icestream.config import (
    Config,
    PipelineConfig,
    SparkOptions,
    catalogs,
    load,
    open_source,
    parse,
    parse_duration,
    parse_sink_url,
    tell_overruled,
)
from icestream.errors import ConfigInvalid
from icestream.pipeline import Cadence
from icestream.sinks.iceberg.options import IcebergSinkOptions, TableOptions
from icestream.sinks.opensearch.sink import OpenSearchOptions
from icestream.sources.cockroachdb import CockroachdbOptions, TopicsOptions
from icestream.sources.iceberg.source import IcebergSourceOptions

SECRET = "hunter2"
OPENSEARCH = {"opensearch": {"hosts": ["http://localhost:9200"]}}
ICEBERG = {"iceberg": {"tables": [{"table_name": "shop.orders", "identifier_columns": ["id"]}]}}
POSTGRES = {"postgres": {"dsn": "postgresql://x@y/z", "tables": ["public.orders"]}}


def document(**changes: Any) -> dict[str, Any]:
    """A file with one pipeline; a change may reach into it with `a__b`."""
    pipeline: dict[str, Any] = {
        "source": {"cockroachdb": {"files": "s3://feeds/shop/"}},
        "sink": {"iceberg": {"namespace": "shop"}},
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        place = pipeline
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return {"orders": pipeline}


def only(given: object) -> PipelineConfig:
    (pipeline,) = parse(given).pipelines
    return pipeline


def refused(given: object) -> ConfigInvalid:
    with pytest.raises(ConfigInvalid) as caught:
        parse(given)
    return caught.value


def test_the_smallest_file_has_defaults_for_everything_else():
    """U3: one YAML file holds one or more pipelines."""
    pipeline = only(document())
    assert pipeline.name == "orders"
    assert pipeline.source == CockroachdbOptions(files="s3://feeds/shop/")
    assert pipeline.sink == IcebergSinkOptions(namespace="shop")
    assert pipeline.cadence == Cadence()
    assert pipeline.cadence.commit_interval == 10.0
    assert pipeline.cadence.epochs_in_flight == 3


def test_every_option_reaches_its_place():
    """U3: options are those that the connectors declare."""
    pipeline = only(
        document(
            source__cockroachdb__tables=["orders"],
            source__cockroachdb__keys={"orders": ["id"]},
            source__cockroachdb__columns={"orders": {"price": "decimal(10,2)"}},
            source__cockroachdb__resolved_every="PT1M",
            sink__iceberg__tables={"orders": {"partition_by": ["day(at)"], "properties": {"a": 1}}},
            sink__iceberg__format_version=3,
            commit_interval="PT5S",
            epochs_in_flight=1,
        )
    )
    assert pipeline.source.keys == {"orders": ["id"]}
    assert pipeline.source.columns == {"orders": {"price": "decimal(10,2)"}}
    assert pipeline.source.resolved_every == 60.0
    assert pipeline.sink.tables == {
        "orders": TableOptions(partition_by=["day(at)"], properties={"a": "1"})
    }
    assert pipeline.sink.format_version == 3
    assert (pipeline.cadence.commit_interval, pipeline.cadence.epochs_in_flight) == (5.0, 1)


@pytest.mark.parametrize(
    ("source", "sink", "changes", "told"),
    [
        (ICEBERG, OPENSEARCH, {"commit_interval": "PT5S"}, ["commit_interval"]),
        (ICEBERG, {"iceberg": {}}, {"epochs_in_flight": 2}, ["epochs_in_flight"]),
        (ICEBERG, OPENSEARCH, {"commit_interval": "PT30S", "epochs_in_flight": 1}, []),
        (POSTGRES, OPENSEARCH, {"commit_interval": "PT5S"}, []),
    ],
)
def test_an_option_that_a_connector_overrules_is_told(source, sink, changes, told, caplog):
    """E9, U3: it would be ignored in silence."""
    document = {"p": {"source": source, "sink": sink, **changes}}
    (pipeline,) = parse(document).pipelines
    tell_overruled(pipeline)
    assert [name for name in changes if f"`{name}`" in caplog.text] == told


def test_a_source_is_opened_with_the_limits_that_connectors_decide(monkeypatch):
    """E9: whoever decides how large an epoch is decides it for the source, too."""
    (pipeline,) = parse({"p": {"source": POSTGRES, "sink": {"iceberg": {}}}}).pipelines
    opened = []
    # The options decide nothing of this by themselves, and no server is there to be opened.
    monkeypatch.setattr(type(pipeline.source), "cadence", lambda _: {"epoch_rows_max": 7})
    monkeypatch.setattr(type(pipeline.source), "open", lambda _, opening: opened.append(opening))
    open_source(pipeline, None)
    assert (opened[0].budget.rows, opened[0].budget.bytes) == (7, 1024**3)


def test_several_pipelines_share_one_spark():
    """U3: `spark` is a reserved name."""
    config = parse(
        {**document(), "other": document()["orders"], "spark": {"master": "local[2]", "conf": {}}}
    )
    assert [pipeline.name for pipeline in config.pipelines] == ["orders", "other"]
    assert config.spark == SparkOptions(master="local[2]")


def test_the_python_api_mirrors_the_file():
    """U4: the same options can be given in Python."""
    made = PipelineConfig(
        name="orders",
        source=CockroachdbOptions(files="s3://feeds/shop/"),
        sink=IcebergSinkOptions(namespace="shop"),
    )
    assert made == only(document())


@pytest.mark.parametrize(
    ("changes", "key", "nearest"),
    [
        ({"sorce": {}}, "sorce", "source"),
        ({"comit_interval": 1}, "comit_interval", "commit_interval"),
        ({"source__cockroachdb__tabels": []}, "tabels", "tables"),
        ({"sink__iceberg__namespac": "x"}, "namespac", "namespace"),
        ({"sink__iceberg__tables__t__partiton_by": []}, "partiton_by", "partition_by"),
        ({"source": {"cockroach": {}}}, "cockroach", "cockroachdb"),
        ({"sink": {"icebreg": {}}}, "icebreg", "iceberg"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(changes, key, nearest):
    """U3: a typo is never passed over."""
    error = refused(document(**changes))
    assert f"`{key}`" in error.message
    assert f"Did you mean `{nearest}`?" in error.hint


def test_a_key_that_is_like_none_lists_what_is_known():
    """U3: the hint helps even without a near one."""
    error = refused(document(zzz=1))
    assert "Did you mean" not in error.hint
    assert "commit_interval" in error.hint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "names no pipeline"),
        ([], "names no pipeline"),
        ("text", "names no pipeline"),
        ({"spark": {"master": "local"}}, "names no pipeline"),
        ({"orders": None}, "orders is not a map"),
        ({"orders": {"sink": {"iceberg": {}}}}, "orders has no source"),
        ({"orders": {"source": {"cockroachdb": {"files": "x"}}}}, "orders has no sink"),
        (document(source={"cockroachdb": {}}), "lacks `files`"),
        (document(source={"cockroachdb": None}), "lacks `files`"),
        (
            document(source__cockroachdb__kafka={"bootstrap_servers": "x:1", "topics": ["t"]}),
            "has both `files` and `kafka`",
        ),
        (document(source={"cockroachdb": {"kafka": {"topics": ["t"]}}}), "lacks `bootstrap_"),
        (
            document(source={"cockroachdb": {"kafka": {"bootstrap_servers": "x:1"}}}),
            "lacks `topics`",
        ),
        (document(on_error="dead_letter"), "cannot set `on_error: dead_letter`"),
        (document(source={}), "must name one kind"),
        (document(source={"cockroachdb": {}, "kafka": {}}), "must name one kind"),
        (document(source="text"), "must name one kind"),
        (document(sink=[]), "must name one sink"),
        (document(sink__iceberg__format_version=1), "must be 2 or 3"),
        ({"a b": document()["orders"]}, "cannot be a pipeline's name"),
        ({"-x": document()["orders"]}, "cannot be a pipeline's name"),
    ],
)
def test_what_is_missing_or_wrong_is_named(given, message):
    """U3: the place of whatever is wrong."""
    assert message in refused(given).message


@pytest.mark.parametrize(
    "changes",
    [
        {"source__cockroachdb__files": [SECRET]},
        {"source__cockroachdb__tables": {SECRET: SECRET}},
        {"source__cockroachdb__keys": SECRET},
        {"source__cockroachdb__keys": {"t": 5}},
        {"source__cockroachdb__split_bytes": SECRET},
        {"source__cockroachdb__split_bytes": True},
        {"source__cockroachdb__split_bytes": 1.5},
        {"source__cockroachdb__storage": SECRET},
        {"source__cockroachdb__storage": {"s3.secret": [SECRET]}},
        {"source__cockroachdb__resolved_every": SECRET},
        {"sink__iceberg__catalog": SECRET},
        {"sink__iceberg__catalog": {"token": {"a": SECRET}}},
        {"sink__iceberg__tables": {"t": SECRET}},
        {"sink__iceberg__tables": {"t": [SECRET]}},
        {"sink__iceberg": SECRET},
        {"sink": f"iceberg:{SECRET}"},
        {"commit_interval": SECRET},
        {"commit_interval": -1},
        {"epochs_in_flight": SECRET},
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_never_shown(changes):
    """U3: secrets are never printed or logged, also not in errors about them."""
    error = refused(document(**changes))
    assert SECRET not in str(error)


@pytest.mark.parametrize("number", [0, -1])
def test_at_least_one_epoch_is_in_flight(number):
    """E5: a number that cannot work is refused at once."""
    assert "epochs_in_flight" in refused(document(epochs_in_flight=number)).message


def test_a_single_text_may_stand_for_a_list():
    """U3: both forms mean the same."""
    one = only(document(source__cockroachdb__tables="orders"))
    assert one == only(document(source__cockroachdb__tables=["orders"]))


def test_a_sink_may_stand_in_a_list():
    """U3: both forms mean the same."""
    sink = {"iceberg": {"namespace": "shop"}}
    assert only(document(sink=[sink])) == only(document(sink=sink))
    assert "must name one sink" in refused(document(sink=[sink, sink])).message


def test_values_of_maps_that_go_to_iceberg_become_text():
    """I1: handed to Iceberg as it is."""
    catalog = {"type": "rest", "uri": "http://localhost:8181", "retries": 3, "ssl": True}
    found = only(document(sink__iceberg__catalog=catalog)).sink.catalog
    assert found == {**catalog, "retries": "3", "ssl": "true"}


def test_a_secret_comes_from_the_environment(monkeypatch):
    """U3: ${env:NAME} for secrets, anywhere in a text."""
    # A secret comes from the environment.
    monkeypatch.setenv("LAKE_TOKEN", SECRET)
    catalog = {"type": "rest", "header": "Bearer ${env:LAKE_TOKEN}!"}
    pipeline = only(document(sink__iceberg__catalog=catalog, sink__iceberg__branch="${env:X"))
    assert pipeline.sink.catalog["header"] == f"Bearer {SECRET}!"
    assert pipeline.sink.branch == "${env:X"


def test_a_secret_that_is_not_set_is_named_with_its_place(monkeypatch):
    """U3: the operator learns what to set."""
    # The developer may have set it.
    monkeypatch.delenv("LAKE_TOKEN", raising=False)
    error = refused(document(sink__iceberg__catalog={"token": "${env:LAKE_TOKEN}"}))
    assert "orders.sink.iceberg.catalog.token" in error.message
    assert "LAKE_TOKEN" in error.message


SECRETIVE = {"iceberg": {"catalog": {"token": "${env:LAKE_TOKEN}"}}}


def two_pipelines() -> dict[str, Any]:
    return {"mine": document()["orders"], "theirs": document(sink=SECRETIVE)["orders"]}


def test_only_a_pipeline_that_runs_asks_for_its_secrets(monkeypatch):
    """U3: a file may be shared by people who do not know each other's secrets."""
    # The developer may have set it.
    monkeypatch.delenv("LAKE_TOKEN", raising=False)
    for wanted in (parse(two_pipelines(), ["mine"]), parse(two_pipelines(), first=True)):
        assert [each.name for each in wanted.pipelines] == ["mine"]
    for names in (["theirs"], []):
        with pytest.raises(ConfigInvalid, match=r"catalog\.token needs"):
            parse(two_pipelines(), names)


@pytest.mark.parametrize("names", [["mine"], []])
def test_a_pipeline_that_does_not_run_is_checked_if_its_secrets_are_there(names, monkeypatch):
    """U3: a typo in the file is told as soon as it can be."""
    # A secret comes from the environment.
    monkeypatch.setenv("LAKE_TOKEN", SECRET)
    given = two_pipelines()
    given["theirs"]["comit_interval"] = 1
    with pytest.raises(ConfigInvalid, match="unknown key `comit_interval` in theirs"):
        parse(given, names)


@pytest.mark.parametrize(
    ("text", "key", "line", "before"),
    [
        (f"a: {{token: {SECRET}}}\nb: 1\na: {SECRET}\n", "a", 3, 1),
        (f"a:\n  sink:\n    token: {SECRET}\n    'token': {SECRET}\n", "token", 4, 3),
        (f"a: [{{x: 1, x: {SECRET}}}]\n", "x", 1, 1),
        ("1: x\n'1': y\n", "1", 2, 1),
    ],
)
def test_a_key_that_comes_twice_is_refused_by_its_line(text, key, line, before, tmp_path):
    """U3: otherwise the last would count and the first be passed over; no value is shown."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=f"has the key `{key}` twice") as caught:
        load(path)
    assert caught.value.detail == f"At line {line}, and before that at line {before}."
    assert SECRET not in str(caught.value)


def test_a_map_that_is_merged_in_may_have_keys_of_its_own(tmp_path):
    """U3: an anchor and `<<` are YAML's way to say a thing once."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(
        "a: &a {source: {cockroachdb: {files: x}}, sink: {iceberg: {}}, commit_interval: 1}\n"
        "b: {<<: *a, commit_interval: 2}\n"
    )
    assert [each.cadence.commit_interval for each in load(path).pipelines] == [1.0, 2.0]


def test_a_map_that_was_merged_may_be_merged_again_further_out(tmp_path):
    """U3: what counts is how a map was written, not what it becomes while others are built."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(
        "a:\n"
        "  source: {cockroachdb: &feed {<<: &base {files: x}, files: y}}\n"
        "  sink: {iceberg: {}}\n"
        "b:\n"
        "  source:\n"
        "    cockroachdb: {<<: *feed}\n"
        "  sink: {iceberg: {}}\n"
    )
    assert [each.source.files for each in load(path).pipelines] == ["y", "y"]


@pytest.mark.parametrize("key", ["on", "1", "~"])
def test_a_key_that_yaml_does_not_take_for_a_text_is_an_unknown_one(key, tmp_path):
    """U3: `on` is a truth value in YAML, and still no option."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(
        f"a: {{source: {{cockroachdb: {{files: x, {key}: 1}}}}, sink: {{iceberg: {{}}}}}}\n"
    )
    with pytest.raises(ConfigInvalid, match=r"unknown key `\w+` in a\.source") as caught:
        load(path)
    assert "files" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("PT10S", 10.0),
        ("PT0.5S", 0.5),
        ("PT1M30S", 90.0),
        ("PT2H", 7200.0),
        ("P1D", 86400.0),
        ("P1DT1S", 86401.0),
        ("pt5m", 300.0),
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_durations_are_iso_8601_or_seconds(text, seconds):
    """E9: commit_interval, heartbeat_interval, resolved_every."""
    assert parse_duration(text, "x") == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "P",
        "PT",
        "10",
        "10 s",
        "10x",
        "PT10",
        "P1M",
        "-PT1S",
        "PT1.5M",
        -1,
        True,
        None,
        [1],
        float("nan"),
    ],
)
def test_what_is_no_duration_is_refused(text):
    """E9: the hint shows how durations are written."""
    with pytest.raises(ConfigInvalid, match="place is not a duration") as caught:
        parse_duration(text, "place")
    assert "PT10S" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("1500ms", 1.5), ("2m", 120.0), ("1h", 3600.0)]
)
def test_durations_may_be_written_as_data_prepper_does(text, seconds):
    """O13: its pipeline files load unchanged."""
    assert parse_duration(text, "place") == seconds


DATA_PREPPER = """
version: "2"
iceberg-cdc-pipeline:
  source:
    iceberg:
      tables:
        - table_name: "my_database.my_table"
          catalog:
            type: rest
            uri: "https://example.com/api/catalog"
            warehouse: "my_warehouse"
          disable_export: false
          polling_interval: "PT30S"
          identifier_columns: ["region", "category"]
  sink:
    - opensearch:
        hosts: ["https://opensearch:9200"]
        document_id_field: "document_id"
        action: "${getMetadata(\\"bulk_action\\")}"
"""


def test_a_pipeline_file_of_data_prepper_loads_unchanged(tmp_path):
    """O13: an `iceberg` source with an `opensearch` sink, by the names of its RFC."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(DATA_PREPPER)
    (pipeline,) = load(path).pipelines
    assert isinstance(pipeline.source, IcebergSourceOptions)
    assert isinstance(pipeline.sink, OpenSearchOptions)
    (table,) = pipeline.source.tables
    assert table.table_name == "my_database.my_table"
    assert table.identifier_columns == ["region", "category"]
    assert pipeline.source.interval == 30.0
    assert pipeline.sink.index_name(table.table_name) == "my_database.my_table"
    assert catalogs([pipeline])[0]["uri"] == "https://example.com/api/catalog"


SOURCES = {
    "iceberg": {"tables": [{"table_name": "a.b"}]},
    "cockroachdb": {"files": "feed"},
    "kafka": {"bootstrap_servers": "b:9092", "topics": ["a.b"]},
    "postgres": {"dsn": "postgresql://h/db", "tables": ["a.b"]},
}
SINKS = {"iceberg": {}, "opensearch": {"hosts": ["http://search:9200"]}}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_goes_with_every_sink_selects_included(source, sink):
    """U3, E11: the file says which; nothing else asks."""
    document = {
        "p": {
            "source": {source: SOURCES[source]},
            "sink": {sink: SINKS[sink]},
            "transform": {"a.b": SELECT} if source != "cockroachdb" else {},
        }
    }
    (pipeline,) = parse(document).pipelines
    assert type(pipeline.source).__name__.lower().startswith(source)
    assert type(pipeline.sink).__name__.lower().startswith(sink)


def test_records_that_cannot_be_taken_need_a_sink_that_keeps_them():
    """K7, U3: an index of documents has no place for them."""
    document = {
        "p": {
            "source": {"kafka": SOURCES["kafka"]},
            "sink": {"opensearch": SINKS["opensearch"]},
            "on_error": "dead_letter",
        }
    }
    error = refused(document)
    assert "keeps no records that cannot be taken" in error.message
    del document["p"]["on_error"]
    parse(document)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "lacks a table's name"),
        ([{"identifier_columns": ["id"]}], "lacks a table's name"),
        ([{"table_name": "a.b"}, {"table_name": "a.b"}], "named twice"),
    ],
)
def test_an_iceberg_source_names_each_table_once(tables, message):
    """O13: `tables[].table_name` is what a pipeline reads."""
    sink = {"opensearch": {"hosts": ["http://search:9200"]}}
    error = refused({"search": {"source": {"iceberg": {"tables": tables}}, "sink": sink}})
    assert message in error.message


def test_a_sink_url_names_catalog_namespace_and_table():
    """C7: iceberg://<rest-endpoint>/<namespace>/<table>?warehouse=...&equality_delete_by=..."""
    url = "iceberg://localhost:8181/shop/orders?warehouse=s3://lake&equality_delete_by=id,region"
    sink = only(document(sink=url)).sink
    assert sink == parse_sink_url(url)
    assert sink.catalog == {
        "type": "rest",
        "uri": "http://localhost:8181",
        "warehouse": "s3://lake",
    }
    assert (sink.namespace, sink.branch) == ("shop", "main")
    assert sink.tables == {"*": TableOptions(table="orders", equality_delete_by=["id", "region"])}


def test_a_sink_url_may_have_a_prefix_tls_a_branch_and_catalog_options():
    """C7: other parameters are handed to the catalog as they are."""
    sink = parse_sink_url("iceberg://lake/api/catalog/shop/orders?tls=true&branch=audit&token=t")
    assert sink.catalog == {"type": "rest", "uri": "https://lake/api/catalog", "token": "t"}
    assert (sink.namespace, sink.branch) == ("shop", "audit")
    assert sink.tables["*"].equality_delete_by == []


@pytest.mark.parametrize(
    "url",
    ["", "http://localhost/shop/orders", "iceberg://localhost/orders", "iceberg:///shop/orders"],
)
def test_a_sink_url_that_is_not_understood_is_refused(url):
    """C7: the hint shows its form."""
    with pytest.raises(ConfigInvalid, match="URL is not understood") as caught:
        parse_sink_url(url)
    assert "iceberg://<rest-endpoint>/<namespace>/<table>" in caught.value.hint


@pytest.mark.parametrize("parameter", ["atomic=true", "format_version=3", "partition_by=day(at)"])
def test_an_option_that_a_sink_url_cannot_have_is_refused(parameter):
    """C7, U3: the catalog would get it, and nobody would say that it does nothing."""
    with pytest.raises(ConfigInvalid, match=f"parameter `{parameter.partition('=')[0]}`") as caught:
        parse_sink_url(f"iceberg://lake/shop/orders?{parameter}")
    assert "`iceberg: {" in caught.value.hint


def test_a_sink_url_takes_one_source_table():
    """C7: it names one table."""
    error = refused(
        document(source__cockroachdb__tables=["a", "b"], sink="iceberg://lake/shop/orders")
    )
    assert "names one table" in error.message


def test_pipelines_are_picked_by_name():
    """U2: `--pipeline`."""
    config = parse({**document(), "other": document()["orders"]})
    assert [pipeline.name for pipeline in config.pick(["other"])] == ["other"]
    assert [each.name for each in config.pick(["other", "orders", "other"])] == ["other", "orders"]
    assert config.pick([]) == config.pipelines
    with pytest.raises(ConfigInvalid, match="unknown pipeline `oders`") as caught:
        config.pick(["oders"])
    assert "Did you mean `orders`?" in caught.value.hint


def test_a_file_is_loaded(tmp_path):
    """U3: YAML."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(
        "orders:\n"
        "  source: {cockroachdb: {files: ./feed}}\n"
        "  sink: {iceberg: {namespace: shop}}\n"
        "  commit_interval: PT1S\n"
    )
    config = load(path)
    assert isinstance(config, Config)
    assert config.pipelines[0].cadence.commit_interval == 1.0
    assert [each.name for each in load(path, ["orders", "orders"]).pipelines] == ["orders"]


def test_a_file_that_is_not_there_is_told(tmp_path):
    """U3: the path and why."""
    with pytest.raises(ConfigInvalid, match=r"could not read .*missing\.yaml") as caught:
        load(tmp_path / "missing.yaml")
    assert caught.value.detail == "No such file or directory"


def test_a_file_that_is_not_yaml_is_told_by_its_place_and_not_by_its_content(tmp_path):
    """U3: secrets are never printed."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(f"orders:\n  token: {SECRET}\n  - {SECRET}\n")
    with pytest.raises(ConfigInvalid, match="is not YAML") as caught:
        load(path)
    assert caught.value.detail == "At line 3, column 3."
    assert SECRET not in str(caught.value)


def test_the_catalogs_of_pipelines_are_known_before_spark_starts():
    """I1: their jars must be there when the session is made."""
    pipelines = parse(document()).pipelines
    (properties,) = catalogs(pipelines)
    assert properties["uri"].startswith("jdbc:sqlite:/")


@pytest.mark.parametrize(
    "options", [CockroachdbOptions, IcebergSinkOptions, TableOptions, Cadence, SparkOptions]
)
def test_every_option_is_documented_where_it_is_declared(options):
    """U8: the reference page is made from there; times and sizes say their unit."""
    for option in dataclasses.fields(options):
        assert option.metadata["doc"].endswith("."), option.name
        timed = option.name.endswith(("_interval", "_every", "_seconds"))
        assert not timed or option.metadata.get("unit") == "duration", option.name
        sized = option.name.endswith(("_bytes", "_bytes_max"))
        assert not sized or option.metadata.get("unit") == "bytes", option.name


def test_a_relative_path_is_read_from_where_the_program_runs(tmp_path, monkeypatch):
    """U3: paths may be given either way."""
    # The path is relative to where the program runs.
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("a: {source: {cockroachdb: {files: x}}, sink: {iceberg: {}}}\n")
    assert load("p.yaml") == load(tmp_path / "p.yaml")


CHANGEFEED = {
    "bootstrap_servers": "x:1",
    "topics": ["orders"],
    "value": {"format": "json", "envelope": "cockroachdb"},
}


def test_topics_in_cockroachdbs_envelope_are_a_changefeed():
    """C1: the pipeline file may say it either way."""
    keys = {"orders": ["id"]}
    by_envelope = only(document(source={"kafka": {**CHANGEFEED, "keys": keys}}))
    topics = {"bootstrap_servers": "x:1", "topics": ["orders"]}
    by_name = only(document(source={"cockroachdb": {"kafka": topics, "keys": keys}}))
    assert by_envelope == by_name
    assert by_name.source == CockroachdbOptions(kafka=TopicsOptions(**topics), keys=keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "latest"}, "kafka.start does not go with `envelope: cockroachdb`"),
        ({"keyed": False}, "kafka.keyed does not go with"),
        ({"value": {**CHANGEFEED["value"], "format": "avro"}}, "kafka.value can only be"),
        ({"value": {**CHANGEFEED["value"], "cdc_field": "op"}}, "kafka.value can only be"),
    ],
)
def test_what_a_changefeed_has_no_use_for_is_refused(changes, message):
    """C1, U3: an option that would do nothing is never passed over."""
    assert message in refused(document(source={"kafka": {**CHANGEFEED, **changes}})).message


def test_a_changefeed_over_topics_fits_a_sink_url():
    """C7: one topic, one table."""
    url = "iceberg://localhost:8181/shop/orders?warehouse=s3://lake&equality_delete_by=id"
    pipeline = only(document(source={"kafka": CHANGEFEED}, sink=url))
    assert pipeline.sink == parse_sink_url(url)
    many = {**CHANGEFEED, "topics": ["orders", "customers"]}
    assert "names one table" in refused(document(source={"kafka": many}, sink=url)).message


SELECT = "select id from changes"
INTO_ICEBERG = {"iceberg": {"namespace": "shop"}}


@pytest.mark.parametrize(
    ("source", "sink", "table"),
    [
        ({"postgres": {"dsn": "x", "tables": ["public.a", "other.*"]}}, {}, "public.a"),
        ({"postgres": {"dsn": "x", "tables": ["public.a", "other.*"]}}, {}, "other.b"),
        ({"kafka": {"bootstrap_servers": "b", "topics": ["a"]}}, {}, "a"),
        ({"kafka": {"bootstrap_servers": "b", "topic_pattern": ".*"}}, {}, "any"),
        ({"kafka": {"bootstrap_servers": "b", "topics": ["a"]}}, {"field": "kind"}, "any"),
        ({"cockroachdb": {"files": "feed"}}, {}, "any"),
    ],
)
def test_a_select_is_given_by_the_tables_name_at_the_source(source, sink, table):
    """E11: one whose table the source cannot have would let through what it was to mask."""
    routed = {"iceberg": {"namespace": "shop", **({"route": sink} if sink else {})}}
    given = {"p": {"source": source, "sink": routed, "transform": {table: SELECT}}}
    assert parse(given).pipelines[0].transform == {table: SELECT}


@pytest.mark.parametrize(
    ("source", "table", "told"),
    [
        ({"postgres": {"dsn": "x", "tables": ["public.orders"]}}, "public.order", "public.orders"),
        ({"kafka": {"bootstrap_servers": "b", "topics": ["orders"]}}, "ordrs", "orders"),
        ({"cockroachdb": {"files": "feed", "tables": ["orders"]}}, "order", "orders"),
    ],
)
def test_a_select_for_a_table_that_the_source_cannot_have_is_refused(source, table, told):
    """E11, U5: with the nearest name."""
    given = {"p": {"source": source, "sink": INTO_ICEBERG, "transform": {table: SELECT}}}
    error = refused(given)
    assert f"unknown table `{table}`" in str(error)
    assert f"Did you mean `{told}`?" in str(error)


@pytest.mark.parametrize("wrong", [SELECT, {"a": {"sql": SELECT}}, [SELECT]])
def test_a_transform_that_is_no_map_of_texts_is_refused(wrong):
    """E11, U5: by its place."""
    given = document()
    next(iter(given.values()))["transform"] = wrong
    assert ".transform" in str(refused(given))
