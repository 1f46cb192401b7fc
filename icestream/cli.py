"""The command line: run, check, status, changes, rollback, replay, schema, warm-up, demo.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 could not (may succeed later), 2 the
configuration is wrong, 3 an operator must decide, 4 fenced by a newer run, 5 an invariant broke;
130 interrupted (143 by SIGTERM) before the work was done. A `run` without end is done when it is
stopped, and ends with 0. Of several pipelines that failed the highest code counts.
"""

import argparse
import contextlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from icestream import spark as sessions
from icestream.config import (
    DEAD_LETTER,
    Config,
    PipelineConfig,
    SparkOptions,
    behind_selects,
    catalogs,
    load,
    open_pipeline,
    open_session,
    open_sink,
    open_source,
    open_table,
    tell_overruled,
)
from icestream.documents import rows_as_json
from icestream.epoch import resume_point
from icestream.errors import ConfigInvalid, IcestreamError, Retryable
from icestream.iceberg.catalog import catalog_properties
from icestream.iceberg.snapshots import History
from icestream.iceberg.table import Table
from icestream.pipeline import Pipeline, brief, missing_tables
from icestream.sinks import of_tables
from icestream.sources import LettersTried, Remembered
from icestream.sources.abilities import verify
from icestream.status import JsonFormatter, StatusServer, TextFormatter, pipeline_status

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
EXIT_BROKEN = 5
# As shells count: 128 and the signal's number.
EXIT_SIGNAL = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    _set_up_logging(options.log, options.json)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except IcestreamError as error:
        _show_error(error, options.json)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except Exception:
        # Python would print its text, which may show a row's value.
        log.exception("an unforeseen error")
        return EXIT_BROKEN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="icestream",
        description="Change data capture into and out of Apache Iceberg, exactly once.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    with_file = argparse.ArgumentParser(add_help=False, parents=[_shared_options("info")])
    with_file.add_argument("file", help="the pipeline file")
    with_file.add_argument(
        "--pipeline", action="append", default=[], metavar="NAME", help="only this pipeline"
    )
    run = commands.add_parser("run", parents=[with_file], help="run pipelines")
    run.add_argument(
        "--once",
        action="store_true",
        help="take what is there, then end; what is away is waited for, for one to two minutes",
    )
    run.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="",
        help="serve /metrics and /health there while running",
    )
    run.set_defaults(command=_run)
    check = commands.add_parser(
        "check", parents=[with_file], help="check the file, its sources and its catalogs"
    )
    check.set_defaults(command=_check)
    status = commands.add_parser(
        "status",
        parents=[with_file],
        help="show what is durable in each table",
        description="Show what is durable in each table. What the next run would stop at is told "
        "with what to do, and is the exit code: a table that was rolled back, an index that is "
        "gone, an Iceberg table as the source that lost its history. Other sources are not asked "
        "here, but by `check`.",
    )
    status.set_defaults(command=_status)
    rollback = commands.add_parser(
        "rollback", parents=[with_file], help="go on after a table was rolled back"
    )
    rollback.add_argument("--table", required=True, help="the table, by its name at the source")
    way = rollback.add_mutually_exclusive_group(required=True)
    way.add_argument("--replay", action="store_true", help="apply the undone epochs again")
    way.add_argument("--accept", action="store_true", help="leave them undone and go on")
    rollback.set_defaults(command=_rollback)
    _add_replay(commands, with_file)
    _add_changes(commands)
    schema = commands.add_parser(
        "schema",
        parents=[_shared_options("warning")],
        help="print the JSON Schema of the pipeline file, for editors",
    )
    schema.set_defaults(command=_schema)
    _add_warm_up(commands, with_file)
    demo = commands.add_parser(
        "demo", parents=[_shared_options("warning")], help="show the main job end to end"
    )
    demo.add_argument("--seconds", type=float, default=None, help="end after about this time")
    demo.add_argument("--folder", default="icestream-demo", help="where the demo keeps its files")
    demo.set_defaults(command=_demo)
    return parser


def _add_replay(commands: Any, with_file: argparse.ArgumentParser) -> None:
    replay = commands.add_parser(
        "replay",
        parents=[with_file],
        help="try the dead letters of a Kafka pipeline again",
        description="Try the dead letters of a Kafka pipeline again, exactly once. A run of the "
        "pipeline that is active is fenced and ends: start it again afterwards.",
    )
    replay.add_argument("--table", help="only letters of this table, or topic")
    replay.add_argument(
        "--as-is",
        action="store_true",
        help="let letters replace the rows of their keys, though later records may have changed "
        "them; for letters that the topic no longer reaches back to",
    )
    replay.set_defaults(command=_replay)


def _add_warm_up(commands: Any, with_file: argparse.ArgumentParser) -> None:
    warm_up = commands.add_parser(
        "warm-up",
        parents=[with_file],
        help="make this machine ready, so that pipelines start sooner",
        description="Make this machine ready, so that pipelines start sooner: the jars that the "
        "file's pipelines need are fetched, and Java's classes are written into an archive in the "
        "cache folder. It takes about a minute and is needed once for each version of icestream, "
        "for example when an image is built. No source and no catalog is asked.",
    )
    warm_up.set_defaults(command=_warm_up)


def _add_changes(commands: Any) -> None:
    changes = commands.add_parser(
        "changes", parents=[_shared_options("warning")], help="print the changes of a table"
    )
    changes.add_argument("table", help="the table, with its namespace")
    changes.add_argument(
        "--from", dest="start", type=int, metavar="SNAPSHOT", help="after this one; else all"
    )
    changes.add_argument(
        "--to", dest="end", type=int, metavar="SNAPSHOT", help="up to this one; else the newest"
    )
    changes.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="identifier column; repeat it"
    )
    changes.add_argument("--net", action="store_true", help="only the difference between the two")
    changes.add_argument("--file", help="a pipeline file whose catalog has the table")
    changes.add_argument("--pipeline", help="the pipeline in it")
    changes.add_argument(
        "--catalog", action="append", default=[], metavar="KEY=VALUE", help="property of a catalog"
    )
    changes.set_defaults(command=_changes)


def _shared_options(log_level: str) -> argparse.ArgumentParser:
    """Options of every command; one parser each, for a shared one would share its defaults."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON for programs")
    shared.add_argument(
        "--log", default=log_level, choices=["debug", "info", "warning", "error"], help="log level"
    )
    return shared


def _run(options: argparse.Namespace) -> int:
    config = load(options.file, options.pipeline)
    chosen = config.pipelines
    spark = open_session(config, chosen)
    try:
        pipelines = [open_pipeline(pipeline, spark) for pipeline in chosen]
        server = _serve(options.listen, pipelines)
        received = _stop_on_signals(pipelines)
        errors = _run_all(pipelines, options.once)
        if server:
            server.close()
    finally:
        spark.stop()
    if errors:
        for error in errors[1:]:
            _show_error(error, options.json)
        raise errors[0]
    return EXIT_SIGNAL + received[0] if options.once and received else 0


def _run_all(pipelines: Sequence[Pipeline], once: bool) -> list[IcestreamError]:
    """Run each pipeline in a thread of its own; one that fails does not stop the others."""
    errors: list[IcestreamError] = []

    def run(pipeline: Pipeline) -> None:
        try:
            pipeline.run(once=once)
        except IcestreamError as error:
            extra = {"pipeline": pipeline.name}
            log.error("pipeline %s stopped: %s", pipeline.name, error.message, extra=extra)
            errors.append(error)
        except Exception as error:
            log.exception("pipeline %s broke", pipeline.name, extra={"pipeline": pipeline.name})
            detail = f"{type(error).__name__}. The log tells where it came from."
            broken = IcestreamError(f"pipeline {pipeline.name} broke", detail=detail)
            broken.exit_code = EXIT_BROKEN
            errors.append(broken)

    threads = [threading.Thread(target=run, args=(p,), name=p.name) for p in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(timeout=0.5)
    return sorted(errors, key=lambda error: -error.exit_code)


def _serve(listen: str, pipelines: Sequence[Pipeline]) -> StatusServer | None:
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    if not port.isdigit():
        raise ConfigInvalid("--listen needs host:port", hint="For example 127.0.0.1:9464.")
    server = StatusServer(host or "127.0.0.1", int(port), pipelines)
    log.info("serving /metrics and /health at %s", server.address)
    return server


def _stop_on_signals(pipelines: Sequence[Pipeline]) -> list[int]:
    """Let signals stop the pipelines; the list has those that came."""
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        log.info("stopping after the current epoch")
        for pipeline in pipelines:
            pipeline.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return received


def _check(options: argparse.Namespace) -> int:
    config = load(options.file, options.pipeline)
    chosen = config.pipelines
    spark = open_session(config, chosen)
    try:
        found, faults = _answers(chosen, lambda each: _check_one(each, spark), options.json)
    finally:
        spark.stop()
    _print(found, options.json, lambda row: f"{row['pipeline']}: ok, tables {row['tables']}")
    return max((error.exit_code for error in faults), default=0)


def _answers(
    chosen: Sequence[PipelineConfig], ask: Callable[[PipelineConfig], Answer], as_json: bool
) -> tuple[list[Answer], list[IcestreamError]]:
    """What the pipelines answer. One that cannot is told of and does not keep the others."""
    found, faults = [], []
    for pipeline in chosen:
        try:
            found.append(ask(pipeline))
        except IcestreamError as error:
            faults.append(error)
            _show_error(error, as_json, pipeline.name)
    return found, faults


def _check_one(pipeline: PipelineConfig, spark: Any) -> dict[str, Any]:
    tell_overruled(pipeline)
    sink = open_sink(pipeline, spark)
    with contextlib.closing(open_source(pipeline, spark)) as source:
        behind_selects(pipeline, sink, source, spark)
        tables = list(source.tables())
        progress = sink.durable(tables)
        resume = resume_point(progress)
        missing = missing_tables(tables, progress, resume)
        there = of_tables(progress)
        source.resume(Remembered(progress=there, durable=resume.at, missing=missing))
        verify(source, resume.at)
    return {"pipeline": pipeline.name, "tables": tables, "existing": sorted(there)}


def _status(options: argparse.Namespace) -> int:
    config = load(options.file, options.pipeline)
    chosen = config.pipelines
    spark = open_session(config, chosen)
    try:
        found, faults = _answers(chosen, lambda each: pipeline_status(each, spark), options.json)
    finally:
        spark.stop()
    rows = [row for answer in found for row in answer]
    troubles = []
    for row in rows:
        if row["trouble"] is not None:
            troubles.append(row["trouble"])
            row["trouble"] = row["trouble"].to_json()
            _show_error(troubles[-1], options.json, row["pipeline"])
    _print(rows, options.json, _status_line)
    # What is away may be back before the next run: nothing is wrong with what is durable.
    lasting = [error for error in troubles if not isinstance(error, Retryable)]
    return max((error.exit_code for error in [*lasting, *faults]), default=0)


def _status_line(row: dict[str, Any]) -> str:
    # An index has no snapshots.
    snapshot = f"snapshot {row['snapshot_id']}  " if row["snapshot_id"] else ""
    return (
        f"{row['pipeline']}  {row['table']}  epoch {row['epoch']}  at {brief(row['position'])}  "
        f"{snapshot}committed {row['committed_at']}  {row['state']}"
    )


def _rollback(options: argparse.Namespace) -> int:
    config = load(options.file, options.pipeline)
    chosen = _only_one(config)
    chosen[0].sink.refuse_rollback(chosen[0].name)
    spark = open_session(config, chosen)
    try:
        sink = open_sink(chosen[0], spark)
        with contextlib.closing(open_source(chosen[0], spark)) as source:
            progress = sink.settle_rollback(options.table, options.replay, partial(verify, source))
            position = source.standing(progress.upper).position or "the beginning"
        row = {"table": options.table, "goes_on_after": position}
    finally:
        spark.stop()
    _print([row], options.json, lambda row: f"{row['table']}: goes on after {row['goes_on_after']}")
    return 0


def _only_one(config: Config) -> Sequence[PipelineConfig]:
    """The pipeline that is meant, alone in a list."""
    if len(config.pipelines) != 1:
        raise ConfigInvalid("the file has several pipelines", hint="Name one with --pipeline.")
    return config.pipelines


def _replay(options: argparse.Namespace) -> int:
    config = load(options.file, options.pipeline)
    chosen = _only_one(config)
    if chosen[0].on_error != DEAD_LETTER:
        raise ConfigInvalid(
            f"pipeline {chosen[0].name} keeps no dead letters in tables",
            hint="Only pipelines that read Kafka topics with `on_error: dead_letter` do.",
        )
    spark = open_session(config, chosen)
    try:
        tried = open_pipeline(chosen[0], spark).replay(options.table, options.as_is)
    finally:
        spark.stop()
    rows = [_tried_row(each) for each in tried]
    if not rows:
        log.info("no dead letters to try again", extra={"pipeline": chosen[0].name})
    _print(rows, options.json, _tried_line)
    return 0


def _tried_row(tried: LettersTried) -> dict[str, Any]:
    reasons = dict(sorted(tried.rejected.items(), key=lambda item: -item[1]))
    left = sum(reasons.values())
    return {
        "letters": tried.table,
        "read": tried.read,
        "taken": tried.taken,
        "rejected": left,
        "reasons": reasons,
    }


def _tried_line(row: dict[str, Any]) -> str:
    reasons = "".join(f"\n  {count}: {text}" for text, count in row["reasons"].items())
    counts = f"{row['read']} read, {row['taken']} taken, {row['rejected']} still rejected"
    return f"{row['letters']}: {counts}{reasons}"


def _changes(options: argparse.Namespace) -> int:
    # Changes of an Iceberg table are what its folder among the sources is about.
    from icestream.sources.iceberg.changelog import changelog

    catalog, settings = _catalog_of(options)
    spark = sessions.session([catalog_properties(catalog)], settings.master, settings.conf)
    try:
        table = open_table(catalog, options.table, spark)
        end = options.end or _newest(table)
        events = changelog(spark, table, options.start, end, options.by, options.net)
        for row in rows_as_json(events):
            line = json.dumps(row, ensure_ascii=False) if options.json else _change_line(row)
            sys.stdout.write(f"{line}\n")
    finally:
        spark.stop()
    return 0


def _newest(table: Table) -> int:
    head = History(table).head("main")
    if head is None:
        raise ConfigInvalid(f"table {table.name} has no snapshot")
    return head.id


def _catalog_of(options: argparse.Namespace) -> tuple[Mapping[str, str], SparkOptions]:
    """The catalog that the options name, and the settings of the session."""
    given = [text.partition("=") for text in options.catalog]
    if any(not equals for _, equals, _ in given):
        raise ConfigInvalid("--catalog needs key=value", hint="For example --catalog type=rest.")
    if not options.file:
        return {key: value for key, _, value in given}, SparkOptions()
    named = [options.pipeline] if options.pipeline else []
    config = load(options.file, named, True)
    chosen = config.pipelines[0]
    catalog = chosen.source.catalog_of(options.table)
    if catalog is None:
        catalog = chosen.sink.catalog_of(options.table) or {}
    return {**catalog, **{key: value for key, _, value in given}}, config.spark


def _change_line(row: dict[str, Any]) -> str:
    found = {name: value for name, value in row["row"].items() if value is not None}
    values = "  ".join(f"{name}={value}" for name, value in found.items())
    number, name = row["iceberg_snapshot_id"], row["iceberg_operation"]
    return f"{number}  {name:13}  {row['document_id'] or '-'}  {values}"


def _schema(options: argparse.Namespace) -> int:
    # It imports every connector there is.
    from icestream.file_schema import file_schema

    sys.stdout.write(json.dumps(file_schema(), indent=None if options.json else 1) + "\n")
    return 0


def _warm_up(options: argparse.Namespace) -> int:
    # Spark is imported for it, which other commands do without.
    from icestream.warm_up import warm_up

    config = load(options.file, options.pipeline)
    archive = warm_up(catalogs(config.pipelines))
    _print([{"archive": str(archive)}], options.json, lambda row: f"classes in {row['archive']}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    # It brings a PostgreSQL server along.
    from icestream.demo import run_demo

    return run_demo(
        options.folder, options.seconds, lambda pipelines: StatusServer("127.0.0.1", 0, pipelines)
    )


def _print(
    rows: Sequence[dict[str, Any]], as_json: bool, line: Callable[[dict[str, Any]], str]
) -> None:
    for row in rows:
        sys.stdout.write((json.dumps(row) if as_json else line(row)) + "\n")


def _show_error(error: IcestreamError, as_json: bool, pipeline: str = "") -> None:
    named = {"pipeline": pipeline} if pipeline else {}
    of = f"pipeline {pipeline}: " if pipeline else ""
    text = json.dumps({**named, **error.to_json()}) if as_json else f"icestream: {of}{error}"
    sys.stderr.write(text + "\n")


def _set_up_logging(level: str, as_json: bool) -> None:
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [stream]
    root.setLevel(logging.WARNING)
    logging.getLogger("icestream").setLevel(level.upper())


def entry_point() -> NoReturn:
    """What the `icestream` command runs."""
    sys.exit(main())


__all__ = ["Config", "entry_point", "main"]
