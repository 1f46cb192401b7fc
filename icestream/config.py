"""The pipeline file: read, checked against the options that connectors declare, and made to run.

An unknown key is refused with the nearest known one. `${env:NAME}` stands for a secret, which is
never printed or logged. The same options can be given in Python: `PipelineConfig` mirrors the file.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from pyspark.sql import SparkSession

from icestream import spark as sessions
from icestream.errors import ConfigInvalid, keep_secret
from icestream.iceberg.catalog import Catalog, catalog_properties
from icestream.iceberg.handle import TableName
from icestream.iceberg.table import Table
from icestream.names import ANY_TABLE
from icestream.pipeline import Cadence, Pipeline
from icestream.schema import parse_type
from icestream.sinks.iceberg import IcebergSink, IcebergSinkOptions, TableOptions, table_names_of
from icestream.sinks.iceberg.letters import IcebergLetterBox
from icestream.sinks.opensearch import OpenSearchOptions, OpenSearchSink
from icestream.sinks.transformed import TransformedSink
from icestream.sources import Source
from icestream.sources.cockroachdb import CockroachdbOptions, TopicsOptions
from icestream.sources.cockroachdb.files import CockroachdbFiles
from icestream.sources.cockroachdb.topics import CockroachdbTopics
from icestream.sources.iceberg import IcebergSource, IcebergSourceOptions, IcebergTableOptions
from icestream.sources.kafka import KafkaOptions, KafkaSource
from icestream.sources.kafka.route import Route
from icestream.sources.kafka.split import Keys, Reading
from icestream.sources.postgres import PostgresOptions, PostgresSource
from icestream.transform import Selects
from icestream.worker import map_tasks, write_epoch, write_events, write_transformed

SOURCES: dict[str, type] = {
    "cockroachdb": CockroachdbOptions,
    "iceberg": IcebergSourceOptions,
    "kafka": KafkaOptions,
    "postgres": PostgresOptions,
}
SINKS: dict[str, type] = {"iceberg": IcebergSinkOptions, "opensearch": OpenSearchOptions}
# How often a slot moves on while the pipeline's own tables are idle and others are not.
SLOT_HEARTBEAT_SECONDS = 300.0
# Topics of an idle changefeed fill with resolved timestamps, and retention takes the old ones away.
RESOLVED_HEARTBEAT_SECONDS = 3600.0
# What becomes of records that cannot be taken.
STOP = "stop"
DEAD_LETTER = "dead_letter"
_RESERVED = "spark"
# Stands at the top of Data Prepper's files and says nothing about a pipeline.
_FILE_VERSION = "version"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SECRET = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_DURATION = re.compile(
    r"P(?:(?P<days>\d+)D)?(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?"
    r"(?:(?P<seconds>\d+(?:\.\d+)?)S)?)?",
    re.IGNORECASE,
)
_SHORT_DURATION = re.compile(r"(?P<number>\d+)(?P<unit>ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SINK_URL = "iceberg"
# Options of a Kafka source that say the same of a changefeed, and are about its tables.
_CHANGEFEED_ENVELOPE = "cockroachdb"
_CHANGEFEED_TABLES = ("keys", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """Settings of the Spark session."""

    master: str = field(default="local[*]", metadata={"doc": "Where Spark runs."})
    conf: Mapping[str, str] = field(default_factory=dict, metadata={"doc": "Spark's own settings."})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """One pipeline: a source, a sink, and how often."""

    name: str
    source: CockroachdbOptions | PostgresOptions | KafkaOptions | IcebergSourceOptions
    sink: IcebergSinkOptions | OpenSearchOptions
    cadence: Cadence = field(default_factory=Cadence)
    on_error: str = field(
        default=STOP,
        metadata={
            "doc": "What becomes of a record of a topic that cannot be taken: `stop`, or "
            "`dead_letter`, which keeps it in the table `<table>__dead_letters`."
        },
    )

    transform: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "doc": "A select in Spark SQL by table, by its name at the source: "
            "`select <expressions> from changes [where <condition>]`."
        },
    )

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigInvalid(
                f"{self.name!r} cannot be a pipeline's name",
                hint="Use letters, digits, '_', '-' and '.', and begin with a letter or digit.",
            )
        out = isinstance(self.source, IcebergSourceOptions)
        if out != isinstance(self.sink, OpenSearchOptions):
            raise ConfigInvalid(
                f"pipeline {self.name} joins a source and a sink that do not fit",
                hint="Changes go from an iceberg source to an opensearch sink, and from every "
                "other source to an iceberg sink.",
            )
        self._refuse_kafka_options()
        self._refuse_unknown_transforms()

    def _refuse_unknown_transforms(self) -> None:
        """A select whose table is misspelled would let through what it was to mask."""
        if self.transform and isinstance(self.sink, OpenSearchOptions):
            raise ConfigInvalid(
                f"pipeline {self.name} sets `transform`, which is for changes on their way into "
                "Iceberg",
                hint="Leave it out: documents hold the rows of the Iceberg table as they are.",
            )
        for table in self.transform:
            names = _table_names(self.source, self.sink)
            if names is not None and not any(map(partial(_matches, table), names)):
                raise _unknown("table", table, names, f"{self.name}.transform")

    def _refuse_kafka_options(self) -> None:
        """What only records of topics have must not be set for anything else."""
        if self.on_error not in (STOP, DEAD_LETTER):
            raise ConfigInvalid(f"{self.name}.on_error must be `{STOP}` or `{DEAD_LETTER}`")
        routed = isinstance(self.sink, IcebergSinkOptions) and self.sink.route is not None
        if isinstance(self.source, KafkaOptions) or not (routed or self.on_error == DEAD_LETTER):
            return
        if isinstance(self.source, CockroachdbOptions) and not routed:
            raise ConfigInvalid(
                f"pipeline {self.name} cannot set `on_error: {DEAD_LETTER}`",
                detail="A snapshot of a changefeed holds all changes up to its timestamp, or none.",
                hint="Leave `on_error` out: the pipeline stops at a row that cannot be taken.",
            )
        raise ConfigInvalid(
            f"pipeline {self.name} sets `{'route' if routed else 'on_error'}`, "
            "which is for Kafka sources",
            hint="Leave it out: other sources tell the table of each row, and stop at rows that "
            "cannot be taken.",
        )


def _table_names(source: object, sink: object) -> Sequence[str] | None:
    """The names, or patterns, of all tables that a source may have; None when they are open."""
    if isinstance(source, PostgresOptions | CockroachdbOptions):
        return source.tables or None
    if isinstance(source, KafkaOptions) and isinstance(sink, IcebergSinkOptions):
        if sink.route is not None:
            return list(sink.route.tables) or None
        return None if source.topic_pattern else source.topics
    return None


def _matches(table: str, pattern: str) -> bool:
    return table == pattern or fnmatchcase(table, pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All pipelines of a file, and the Spark session they share."""

    pipelines: Sequence[PipelineConfig]
    spark: SparkOptions = field(default_factory=SparkOptions)

    def pick(self, names: Sequence[str]) -> Sequence[PipelineConfig]:
        """The pipelines of these names; all when none is named."""
        known = {pipeline.name: pipeline for pipeline in self.pipelines}
        for name in names:
            if name not in known:
                raise _unknown("pipeline", name, list(known), "the file")
        return [known[name] for name in names] if names else self.pipelines


def load(path: str | Path, names: Sequence[str] = (), first: bool = False) -> Config:
    """Read the named pipelines of a file, all when none is named, or the `first` alone.

    Raises `ConfigInvalid` with the place of whatever is wrong. See `parse`.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigInvalid(
            f"could not read {path}", detail=error.strerror, hint="Name a pipeline file."
        ) from error
    try:
        document = yaml.load(text, _EachKeyOnce)
    except _KeyTwice as error:
        raise ConfigInvalid(
            f"{path} has the key `{error.key}` twice",
            detail=f"At line {error.line}, and before that at line {error.line_before}.",
            hint="Leave one of them out: only the last would count.",
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigInvalid(f"{path} is not YAML", detail=f"At {where}.") from error
    return parse(document, names, first)


class _KeyTwice(Exception):
    """A map of the file has one key in two lines, counted from one."""

    def __init__(self, key: str, line: int, line_before: int):
        super().__init__(key)
        self.key, self.line, self.line_before = key, line, line_before


class _EachKeyOnce(yaml.SafeLoader):
    """YAML forbids a key that comes twice; the library would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The map, of which each key was written once; what is merged in by `<<` may differ."""
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                key, line = key_node.value, key_node.start_mark.line + 1
                if key in lines:
                    raise _KeyTwice(key, line, lines[key])
                lines[key] = line
        return super().construct_mapping(node, deep)


def parse(document: object, names: Sequence[str] = (), first: bool = False) -> Config:
    """The configuration that a parsed YAML document describes, with the pipelines that are wanted.

    Only they need their secrets. Another pipeline of the document is checked as well, unless one
    of its secrets is not there.
    """
    if not isinstance(document, Mapping) or not document:
        raise ConfigInvalid(
            "the pipeline file names no pipeline",
            hint="Write `<name>: {source: ..., sink: ...}` for each pipeline.",
        )
    given = _with_secrets(document.get(_RESERVED) or {}, _RESERVED)
    spark = _options(SparkOptions, given, _RESERVED)
    bodies = {str(name): body for name, body in document.items() if name != _RESERVED}
    if isinstance(bodies.get(_FILE_VERSION), str | int):
        del bodies[_FILE_VERSION]
    if not bodies:
        raise ConfigInvalid("the pipeline file names no pipeline")
    wanted = _wanted(list(bodies), names, first)
    found = {
        name: _pipeline(name, _with_secrets(body, name))
        for name, body in bodies.items()
        if name in wanted or not _secrets_lacking(body)
    }
    return Config(pipelines=[found[name] for name in wanted], spark=spark)


def _wanted(known: Sequence[str], names: Sequence[str], first: bool) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise _unknown("pipeline", name, known, "the file")
    return names or (known[:1] if first else known)


def _pipeline(name: str, body: object) -> PipelineConfig:
    if not isinstance(body, Mapping):
        raise ConfigInvalid(
            f"pipeline {name} is not a map", hint="Give it a `source` and a `sink`."
        )
    cadence_fields = {option.name for option in dataclasses.fields(Cadence)}
    known = ["source", "sink", "on_error", "transform", *sorted(cadence_fields)]
    for key in body:
        if key not in known:
            raise _unknown("key", str(key), known, name)
    for key in ("source", "sink"):
        if key not in body:
            raise ConfigInvalid(f"pipeline {name} has no {key}", hint=f"Add `{key}:` to it.")
    cadence = {key: value for key, value in body.items() if key in cadence_fields}
    source = _connector(_as_changefeed(body["source"], name), SOURCES, f"{name}.source")
    sink = _sink(body["sink"], f"{name}.sink")
    _one_table_for_a_url(body["sink"], source, name)
    return PipelineConfig(
        name=name,
        source=source,
        sink=sink,
        cadence=_options(Cadence, cadence, name),
        on_error=str(body.get("on_error", STOP)),
        transform=_value(Mapping[str, str], body.get("transform") or {}, f"{name}.transform"),
    )


def _as_changefeed(source: object, name: str) -> object:
    """The source; topics in CockroachDB's envelope are the same as `cockroachdb: {kafka: ...}`."""
    if not isinstance(source, Mapping) or list(source) != ["kafka"]:
        return source
    kafka = source["kafka"]
    value = kafka.get("value") if isinstance(kafka, Mapping) else None
    if not isinstance(kafka, Mapping) or not isinstance(value, Mapping):
        return source
    if value.get("envelope") != _CHANGEFEED_ENVELOPE:
        return source
    place = f"{name}.source.kafka"
    if set(value) - {"envelope", "format"} or value.get("format", "json") != "json":
        raise ConfigInvalid(
            f"{place}.value can only be `{{format: json, envelope: {_CHANGEFEED_ENVELOPE}}}`",
            hint="Create the changefeed with format=json, the default.",
        )
    tables = {key: kafka[key] for key in _CHANGEFEED_TABLES if key in kafka}
    topics = {key: v for key, v in kafka.items() if key != "value" and key not in tables}
    known = [option.name for option in dataclasses.fields(TopicsOptions)]
    for key in topics:
        if key not in known:
            raise ConfigInvalid(
                f"{place}.{key} does not go with `envelope: {_CHANGEFEED_ENVELOPE}`",
                hint=f"Known there: {', '.join([*known, *_CHANGEFEED_TABLES])}; "
                "`source.cockroachdb` has more options for a changefeed.",
            )
    return {"cockroachdb": {"kafka": topics, **tables}}


def _connector(body: object, kinds: Mapping[str, type], place: str) -> Any:
    if not isinstance(body, Mapping) or len(body) != 1:
        raise ConfigInvalid(
            f"{place} must name one kind", hint=f"Known kinds: {', '.join(sorted(kinds))}."
        )
    kind, options = next(iter(body.items()))
    if kind not in kinds:
        raise _unknown("kind", str(kind), list(kinds), place)
    return _options(kinds[kind], options or {}, f"{place}.{kind}")


def _sink(body: object, place: str) -> IcebergSinkOptions | OpenSearchOptions:
    if isinstance(body, list):
        if len(body) != 1:
            raise ConfigInvalid(f"{place} must name one sink")
        body = body[0]
    if isinstance(body, str):
        return parse_sink_url(body)
    options: IcebergSinkOptions | OpenSearchOptions = _connector(body, SINKS, place)
    if isinstance(options, IcebergSinkOptions) and options.format_version not in (2, 3):
        raise ConfigInvalid(f"{place}.iceberg.format_version must be 2 or 3")
    return options


def parse_sink_url(url: str) -> IcebergSinkOptions:
    """`iceberg://<rest-endpoint>/<namespace>/<table>?warehouse=...&equality_delete_by=...`.

    Other parameters are handed to the catalog as they are; `tls=true` speaks HTTPS to it.
    """
    parts = urlsplit(url)
    path = [part for part in parts.path.split("/") if part]
    if parts.scheme != _SINK_URL or not parts.netloc or len(path) < 2:
        raise ConfigInvalid(
            "the sink's URL is not understood",
            hint="Write iceberg://<rest-endpoint>/<namespace>/<table>?warehouse=s3://...",
        )
    parameters = dict(parse_qsl(parts.query))
    key = [name for name in parameters.pop("equality_delete_by", "").split(",") if name]
    scheme = "https" if parameters.pop("tls", "false") == "true" else "http"
    branch = parameters.pop("branch", "main")
    prefix = "".join(f"/{part}" for part in path[:-2])
    catalog = {"type": "rest", "uri": f"{scheme}://{parts.netloc}{prefix}", **parameters}
    return IcebergSinkOptions(
        catalog=catalog,
        namespace=path[-2],
        branch=branch,
        tables={ANY_TABLE: TableOptions(table=path[-1], equality_delete_by=key)},
    )


def _one_table_for_a_url(body: object, source: Any, name: str) -> None:
    if isinstance(source, CockroachdbOptions) and source.kafka and not source.tables:
        source = source.kafka
    tables: Sequence[object] = getattr(source, "topics", ()) or getattr(source, "tables", ())
    if isinstance(body, str) and len(tables) > 1:
        raise ConfigInvalid(
            f"{name}.sink names one table and {name}.source has {len(tables)}",
            hint="Write the sink as `iceberg: {catalog: ..., namespace: ...}`.",
        )


def catalogs(configs: Sequence[PipelineConfig]) -> list[dict[str, str]]:
    """The properties of every catalog that these pipelines use."""
    maps: list[Mapping[str, str]] = []
    for config in configs:
        if isinstance(config.sink, IcebergSinkOptions):
            maps.append(config.sink.catalog)
        if isinstance(config.source, IcebergSourceOptions):
            maps += [table.catalog or config.source.catalog for table in config.source.tables]
    return [catalog_properties(each) for each in maps]


def open_session(config: Config, pipelines: Sequence[PipelineConfig]) -> SparkSession:
    """A Spark session that fits the pipelines."""
    return sessions.session(catalogs(pipelines), config.spark.master, config.spark.conf)


def open_catalog(catalog: Mapping[str, str], spark: SparkSession) -> Catalog:
    """The catalog that a map describes."""
    properties = catalog_properties(catalog)
    _make_folders(properties)
    return Catalog(spark._jvm, spark._jsparkSession.sessionState().newHadoopConf(), properties)


def open_table(catalog: Mapping[str, str], name: str, spark: SparkSession) -> Table:
    """A table of a catalog, by its name with its namespace; it must exist."""
    *namespace, last = name.split(".")
    table = open_catalog(catalog, spark).load(TableName(namespace=tuple(namespace), name=last))
    if table is None:
        raise ConfigInvalid(
            f"there is no table {name}", hint="Name it with its namespace, as in `shop.orders`."
        )
    return table


def open_sink(config: PipelineConfig, spark: SparkSession) -> IcebergSink | OpenSearchSink:
    """The pipeline's sink, connected."""
    if isinstance(config.sink, OpenSearchOptions):
        return OpenSearchSink(config.sink, config.name)
    catalog = open_catalog(config.sink.catalog, spark)
    read_rows = partial(sessions.stored_rows, spark, bytes_max=config.sink.lookup_bytes_max)
    return IcebergSink(catalog, config.sink, config.name, read_rows)


def open_source(config: PipelineConfig, spark: SparkSession) -> Source:
    """The pipeline's source."""
    options = config.source
    if isinstance(options, IcebergSourceOptions):
        shared = options.catalog

        def table(named: IcebergTableOptions) -> Table:
            return open_table(named.catalog or shared, named.table_name, spark)

        return IcebergSource(options, spark, table)
    if isinstance(options, KafkaOptions):
        return _kafka_source(config, options, spark.sparkContext.defaultParallelism)
    if isinstance(options, PostgresOptions):
        parallelism = spark.sparkContext.defaultParallelism
        by = partial(_delete_columns, config)
        return PostgresSource(options, config.name, config.cadence.budget, parallelism, by)

    def index(tasks: Sequence[Any]) -> Sequence[Any]:
        return map_tasks(spark, tasks)

    budget = config.cadence.budget
    if options.kafka is not None:
        workers = spark.sparkContext.defaultParallelism
        return CockroachdbTopics(options, config.name, index, workers, budget)
    return CockroachdbFiles(options, config.name, index, budget)


def _delete_columns(config: PipelineConfig, table: str) -> Sequence[str]:
    """The columns that the sink deletes rows of a table by, as the source names them.

    None when the source's key decides, or a transform may have given them other names.
    """
    sink = config.sink
    if not isinstance(sink, IcebergSinkOptions) or table in config.transform:
        return ()
    options = sink.tables.get(table) or sink.tables.get(ANY_TABLE) or TableOptions()
    return options.equality_delete_by or sink.equality_delete_by


def _kafka_source(config: PipelineConfig, options: KafkaOptions, workers: int) -> KafkaSource:
    assert isinstance(config.sink, IcebergSinkOptions)
    sink, route = config.sink, config.sink.route
    given = {table: each.equality_delete_by for table, each in sink.tables.items()}
    reading = Reading(
        settings=options.settings(),
        value=options.value,
        registry=options.schema_registry,
        route=Route(**dataclasses.asdict(route)) if route else Route(),
        keys=Keys(by_table={**given, **options.keys}, otherwise=sink.equality_delete_by),
        declared={
            table: {name: parse_type(text) for name, text in types.items()}
            for table, types in options.columns.items()
        },
        read_timeout=options.read_timeout,
        dead_letters=config.on_error == DEAD_LETTER,
        keyed=options.keyed,
    )
    source = KafkaSource(options, config.name, reading, config.cadence.budget, workers)
    source.table_names = table_names_of(sink)
    return source


def open_pipeline(config: PipelineConfig, spark: SparkSession) -> Pipeline:
    """The pipeline, ready to run."""
    sink, source = open_sink(config, spark), open_source(config, spark)
    if isinstance(sink, IcebergSink) and isinstance(source, KafkaSource):
        read_staged = partial(sessions.staged_rows, spark)
        source.letter_box = IcebergLetterBox(sink, config.name, read_staged)
    cadence = config.cadence
    if cadence.heartbeat_interval is None and isinstance(config.source, PostgresOptions):
        cadence = dataclasses.replace(cadence, heartbeat_interval=SLOT_HEARTBEAT_SECONDS)
    feed = isinstance(config.source, CockroachdbOptions) and config.source.kafka is not None
    if cadence.heartbeat_interval is None and feed:
        cadence = dataclasses.replace(cadence, heartbeat_interval=RESOLVED_HEARTBEAT_SECONDS)
    if isinstance(config.source, IcebergSourceOptions):
        # One after the other: what a document becomes must never depend on which epoch is faster.
        cadence = dataclasses.replace(
            cadence, commit_interval=config.source.interval, epochs_in_flight=1
        )
        return Pipeline(config.name, source, sink, cadence, partial(write_events, spark))
    if config.transform and isinstance(sink, IcebergSink):
        selects = Selects(spark, config.transform)
        into = TransformedSink(sink, selects, source.declared)
        return Pipeline(config.name, source, into, cadence, partial(write_transformed, selects))
    return Pipeline(config.name, source, sink, cadence, partial(write_epoch, spark))


def _make_folders(properties: Mapping[str, str]) -> None:
    """SQLite makes its file, but not the folder that it lies in."""
    uri = properties.get("uri", "")
    if uri.startswith("jdbc:sqlite:/"):
        Path(uri.removeprefix("jdbc:sqlite:")).parent.mkdir(parents=True, exist_ok=True)


def _options(kind: type, given: object, place: str) -> Any:
    """An options dataclass from a map, each value as its declaration wants it."""
    if not isinstance(given, Mapping):
        raise ConfigInvalid(f"{place} must be a map of options")
    declared = {option.name: option for option in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in given.items():
        if key not in declared:
            raise _unknown("key", str(key), list(declared), place)
        option = declared[key]
        wanted = f"{place}.{key}"
        if option.metadata.get("unit") == "duration":
            values[key] = parse_duration(value, wanted)
        else:
            values[key] = _value(hints[key], value, wanted)
    return kind(**values)


def _value(hint: Any, value: object, place: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        hint = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _value(hint, value, place)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _options(hint, value or {}, place)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigInvalid(f"{place} must be a map")
        return {str(k): _value(arguments[1], v, f"{place}.{k}") for k, v in value.items()}
    if origin is not None and issubclass(origin, Sequence):
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise ConfigInvalid(f"{place} must be a list")
        return [_value(arguments[0], item, place) for item in value]
    return _scalar(hint, value, place)


def _scalar(hint: type, value: object, place: str) -> Any:
    if hint is str and isinstance(value, str | int | float | bool):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is bool and isinstance(value, bool):
        return value
    # The value itself is not shown: it may be a secret.
    raise ConfigInvalid(f"{place} must be a {hint.__name__}, not a {type(value).__name__}")


def parse_duration(value: object, place: str) -> float:
    """Seconds from an ISO 8601 duration (`PT10S`, `PT1M30S`, `P1D`), `30s` or a number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    short = _SHORT_DURATION.fullmatch(value) if isinstance(value, str) else None
    if short:
        return float(short["number"]) * _UNIT_SECONDS[short["unit"]]
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if not found or not any(found.groups()):
        raise ConfigInvalid(
            f"{place} is not a duration", hint="Write it as ISO 8601 does: PT10S, PT5M, P1D."
        )
    parts = {unit: float(number or 0) for unit, number in found.groupdict().items()}
    return parts["days"] * 86400 + parts["hours"] * 3600 + parts["minutes"] * 60 + parts["seconds"]


def _with_secrets(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _with_secrets(v, f"{place}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_with_secrets(item, place) for item in value]
    if not isinstance(value, str):
        return value

    def secret(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigInvalid(
                f"{place} needs the environment variable {found[1]}",
                hint=f"Set it: export {found[1]}=...",
            )
        keep_secret(os.environ[found[1]])
        return os.environ[found[1]]

    return _SECRET.sub(secret, value)


def _secrets_lacking(value: Any) -> bool:
    """Whether a value refers to a secret that is not there."""
    if isinstance(value, Mapping):
        return any(map(_secrets_lacking, value.values()))
    if isinstance(value, list):
        return any(map(_secrets_lacking, value))
    named = _SECRET.findall(value) if isinstance(value, str) else []
    return any(name not in os.environ for name in named)


def _unknown(what: str, key: str, known: Sequence[str], place: str) -> ConfigInvalid:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean `{near[0]}`? " if near else ""
    return ConfigInvalid(
        f"unknown {what} `{key}` in {place}", hint=f"{hint}Known: {', '.join(sorted(known))}."
    )
