"""The pipeline file: read, checked against the options that connectors declare, and made to run.

An unknown key is refused with the nearest known one. `${env:NAME}` stands for a secret, which is
never printed or logged. The same options can be given in Python: `PipelineConfig` mirrors the file.
Which connectors there are is known to `icestream.connectors` alone; what differs between them is
asked of their options.
"""

import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pyspark.sql import SparkSession

from icestream import spark as sessions
from icestream.connectors import SINKS, SOURCES
from icestream.dead_letters import LetterBox
from icestream.errors import ConfigInvalid, keep_secret
from icestream.iceberg.catalog import catalog_properties
from icestream.iceberg.session import open_catalog, open_table
from icestream.options import checked_map, parse_duration, parse_options, unknown
from icestream.pipeline import Cadence, Pipeline
from icestream.sinks import Sink
from icestream.sinks.options import SinkOptions
from icestream.sinks.shaped import shaped
from icestream.sources import Source
from icestream.sources.abilities import declared
from icestream.sources.options import Opening, SourceOptions, refused_for_topics
from icestream.transform import WHOLE_ROWS, Selects
from icestream.worker import map_tasks, write_epoch

log = logging.getLogger(__name__)

# What becomes of records that cannot be taken.
STOP = "stop"
DEAD_LETTER = "dead_letter"
_RESERVED = "spark"
# Stands at the top of Data Prepper's files and says nothing about a pipeline.
_FILE_VERSION = "version"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SECRET = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """Settings of the Spark session."""

    master: str = field(
        default="",
        metadata={
            "doc": "Where Spark runs, such as `spark://host:7077`. When empty it is what "
            "`spark-submit` was told, or this machine, `local[*]`."
        },
    )
    conf: Mapping[str, str] = field(default_factory=dict, metadata={"doc": "Spark's own settings."})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """One pipeline: a source, a sink, and how often."""

    name: str
    source: SourceOptions
    sink: SinkOptions
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
        self._refuse_topic_options()
        self._refuse_unknown_transforms()
        for table in self.source.named():
            if (catalog := self.source.catalog_of(table)) is not None:
                self.sink.refuse_itself(table, catalog)

    def _refuse_unknown_transforms(self) -> None:
        """A select whose table is misspelled would let through what it was to mask."""
        names = self.source.possible(self.sink.destination())
        for table in self.transform:
            if names is not None and not any(map(partial(_matches, table), names)):
                raise unknown("table", table, names, f"{self.name}.transform")

    def _refuse_topic_options(self) -> None:
        """What only records of topics have must not be set for anything else."""
        if self.on_error not in (STOP, DEAD_LETTER):
            raise ConfigInvalid(f"{self.name}.on_error must be `{STOP}` or `{DEAD_LETTER}`")
        if self.sink.destination().route is not None and not self.source.from_topics:
            raise refused_for_topics(self.name, "route")
        if self.on_error == DEAD_LETTER:
            self.source.refuse_dead_letters(self.name)
            if not self.sink.keeps_letters:
                raise ConfigInvalid(
                    f"pipeline {self.name} sets `on_error: {DEAD_LETTER}`, and its sink keeps no "
                    "records that cannot be taken",
                    hint="Leave it out, or use a sink that keeps them, such as `iceberg`.",
                )


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
                raise unknown("pipeline", name, list(known), "the file")
        return [known[name] for name in dict.fromkeys(names)] if names else self.pipelines


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

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The map as it was written, each key once; what `<<` merges in later is no matter."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                key, line = key_node.value, key_node.start_mark.line + 1
                if key in lines:
                    raise _KeyTwice(key, line, lines[key])
                lines[key] = line
        return node


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
    spark = parse_options(SparkOptions, given, _RESERVED)
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
            raise unknown("pipeline", name, known, "the file")
    return list(dict.fromkeys(names)) or (known[:1] if first else known)


def _pipeline(name: str, body: object) -> PipelineConfig:
    if not isinstance(body, Mapping):
        raise ConfigInvalid(
            f"pipeline {name} is not a map", hint="Give it a `source` and a `sink`."
        )
    cadence_fields = {option.name for option in dataclasses.fields(Cadence)}
    known = ["source", "sink", "on_error", "transform", *sorted(cadence_fields)]
    for key in body:
        if key not in known:
            raise unknown("key", str(key), known, name)
    for key in ("source", "sink"):
        if key not in body:
            raise ConfigInvalid(f"pipeline {name} has no {key}", hint=f"Add `{key}:` to it.")
    cadence = {key: value for key, value in body.items() if key in cadence_fields}
    source = _source(body["source"], f"{name}.source")
    sink = _sink(body["sink"], f"{name}.sink")
    _one_table_for_a_url(body["sink"], source, name)
    return PipelineConfig(
        name=name,
        source=source,
        sink=sink,
        cadence=parse_options(Cadence, cadence, name),
        on_error=str(body.get("on_error", STOP)),
        transform=checked_map(body.get("transform") or {}, f"{name}.transform"),
    )


def _source(body: object, place: str) -> SourceOptions:
    kind, given = _kind(body, SOURCES.kinds(), place)
    options, within = SOURCES.options(kind, place), f"{place}.{kind}"
    meant = options.stands_for(given, within) if isinstance(given, Mapping) else None
    found: SourceOptions = _source(meant, place) if meant else parse_options(options, given, within)
    return found


def _sink(body: object, place: str) -> SinkOptions:
    if isinstance(body, list):
        if len(body) != 1:
            raise ConfigInvalid(f"{place} must name one sink")
        body = body[0]
    if isinstance(body, str):
        return parse_sink_url(body)
    kind, given = _kind(body, SINKS.kinds(), place)
    found: SinkOptions = parse_options(SINKS.options(kind, place), given, f"{place}.{kind}")
    return found


def _kind(body: object, kinds: Sequence[str], place: str) -> tuple[str, object]:
    if not isinstance(body, Mapping) or len(body) != 1:
        raise ConfigInvalid(f"{place} must name one kind", hint=f"Known kinds: {', '.join(kinds)}.")
    ((kind, given),) = body.items()
    return str(kind), given


def parse_sink_url(url: str) -> SinkOptions:
    """The sink that a text describes, `<kind>://...`."""
    scheme = urlsplit(url).scheme
    forms = {kind: SINKS.options(kind).url_form for kind in SINKS.kinds()}
    if not forms.get(scheme):
        hint = f"Write {' or '.join(form for form in forms.values() if form)}"
        raise ConfigInvalid("the sink's URL is not understood", hint=hint)
    return SINKS.options(scheme).from_url(url)


def _one_table_for_a_url(body: object, source: SourceOptions, name: str) -> None:
    tables = source.named()
    if isinstance(body, str) and len(tables) > 1:
        raise ConfigInvalid(
            f"{name}.sink names one table and {name}.source has {len(tables)}",
            hint="Write the sink as `iceberg: {catalog: ..., namespace: ...}`.",
        )


def catalogs(configs: Sequence[PipelineConfig]) -> list[dict[str, str]]:
    """The properties of every catalog that these pipelines use."""
    maps = [
        each
        for config in configs
        for end in (config.sink, config.source)
        for each in end.catalogs()
    ]
    return [catalog_properties(each) for each in maps]


def open_session(config: Config, pipelines: Sequence[PipelineConfig]) -> SparkSession:
    """A Spark session that fits the pipelines.

    Spark takes seconds to start, and so do the imports of connectors: both go on at the same time.
    """
    importing = threading.Thread(target=_import_connectors, args=(pipelines,), name="importing")
    importing.start()
    try:
        return sessions.session(catalogs(pipelines), config.spark.master, config.spark.conf)
    finally:
        importing.join()


def _import_connectors(pipelines: Sequence[PipelineConfig]) -> None:
    # Whoever opens the connector meets the same error, and tells it.
    with contextlib.suppress(Exception):
        for pipeline in pipelines:
            SOURCES.import_folder_of(pipeline.source)
            SINKS.import_folder_of(pipeline.sink)


def open_sink(config: PipelineConfig, spark: SparkSession) -> Any:
    """The pipeline's sink, with what only it can."""
    return config.sink.open(config.name, spark)


def open_source(
    config: PipelineConfig, spark: SparkSession, letter_box: LetterBox | None = None
) -> Source:
    """The pipeline's source."""
    opening = Opening(
        pipeline=config.name,
        budget=_cadence(config).budget,
        spark=spark,
        run_tasks=partial(map_tasks, spark),
        destination=config.sink.destination(),
        transformed=frozenset(config.transform),
        dead_letters=config.on_error == DEAD_LETTER,
        letter_box=letter_box,
    )
    return config.source.open(opening)


def open_pipeline(config: PipelineConfig, spark: SparkSession) -> Pipeline:
    """The pipeline, ready to run."""
    tell_overruled(config)
    sink = open_sink(config, spark)
    source = open_source(config, spark, config.sink.letter_box(sink, config.name, spark))
    cadence = _cadence(config)
    into, selects = behind_selects(config, sink, source, spark)
    write = partial(write_epoch, spark, selects=selects)
    return Pipeline(config.name, source, into, cadence, write)


def behind_selects(
    config: PipelineConfig, sink: Sink, source: Source, spark: SparkSession
) -> tuple[Sink, Selects | None]:
    """The sink with the selects that stand before it, if any do.

    Rows that workers read become documents in Spark: they pass a select of the whole row.
    """
    whole = WHOLE_ROWS if config.sink.documents and not config.source.frames else ""
    if not config.transform and not whole:
        return sink, None
    selects = Selects(spark, config.transform, of_all=whole)
    return shaped(sink, selects, partial(declared, source)), selects


def tell_overruled(config: PipelineConfig) -> None:
    """Warn of options that the file sets and that the source or the sink decides otherwise."""
    usual = Cadence()
    for end in (config.source, config.sink):
        for name, decided in end.cadence().items():
            if getattr(config.cadence, name) not in (getattr(usual, name), decided):
                log.warning(
                    "`%s` of the file has no effect: %s decides it, and it is %s",
                    *(name, type(end).__name__, decided),
                    extra={"pipeline": config.name},
                )


def _cadence(config: PipelineConfig) -> Cadence:
    """As the file says, with what source and sink decide and the source's default heartbeat."""
    decided = {**config.source.cadence(), **config.sink.cadence()}
    cadence = dataclasses.replace(config.cadence, **decided)
    if cadence.heartbeat_interval is not None:
        return cadence
    return dataclasses.replace(cadence, heartbeat_interval=config.source.heartbeat_seconds())


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


__all__ = [
    "DEAD_LETTER",
    "STOP",
    "Config",
    "PipelineConfig",
    "SparkOptions",
    "catalogs",
    "load",
    "open_catalog",
    "open_pipeline",
    "open_session",
    "open_sink",
    "open_source",
    "open_table",
    "parse",
    "parse_duration",
    "parse_sink_url",
    "tell_overruled",
]
