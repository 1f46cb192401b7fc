"""What people and programs see of running pipelines: health, metrics, logs, durable progress."""

import json
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pyspark.sql import SparkSession

from icestream.config import PipelineConfig, open_sink, open_source
from icestream.errors import (
    ConfigInvalid,
    HistoryLost,
    IcestreamError,
    ProgressLost,
    Retryable,
    RolledBack,
    shown,
)
from icestream.frontier import Frontier
from icestream.pipeline import Pipeline, State
from icestream.sources import Source
from icestream.sources.abilities import known_tables, verify_table

# The first that fits counts.
_STATES: dict[type[IcestreamError], str] = {
    RolledBack: "rolled back",
    ProgressLost: "lost",
    HistoryLost: "history lost",
    Retryable: "source away",
    IcestreamError: str(State.HALTED),
}
_PLAIN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class StatusServer:
    """Serves `/metrics` in Prometheus' form and `/health` as JSON, from a thread of its own.

    `/health` answers with 503 when a pipeline has stopped and will not go on by itself.
    """

    def __init__(self, host: str, port: int, pipelines: Sequence[Pipeline]):
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest()),
            "/health": lambda: _health(pipelines),
        }

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                nowhere = (404, "text/plain", b"/metrics /health\n")
                code, kind, body = page() if page else nowhere
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Requests are not worth a line each."""

        try:
            self._server = ThreadingHTTPServer((host, port), Page)
        except OSError as error:
            raise ConfigInvalid(
                f"cannot listen at {host}:{port}", detail=error.strerror, hint="Take another port."
            ) from error
        self.address = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="status", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _health(pipelines: Sequence[Pipeline]) -> tuple[int, str, bytes]:
    found = {p.name: p.health.to_json() for p in pipelines}
    stopped = any(each["state"] in (State.HALTED, State.FENCED) for each in found.values())
    return 503 if stopped else 200, "application/json", json.dumps(found, indent=1).encode()


def pipeline_status(config: PipelineConfig, spark: SparkSession) -> list[dict[str, Any]]:
    """What each table of a pipeline remembers: the last epoch, its position and its snapshot.

    `trouble` is the error that the next run would meet at the table, as far as it is told quickly.
    """
    sink = open_sink(config, spark)
    with closing(open_source(config, spark)) as source:
        rows = config.sink.status(sink, known_tables(source), config.name)
        return [*_without_a_place(rows, source, config.name), *(_told(row, source) for row in rows)]


def _without_a_place(
    rows: Sequence[dict[str, Any]], source: Source, pipeline: str
) -> list[dict[str, Any]]:
    """Tables that the destination lacks and that the next run would stop at.

    The others remember where such a table stood, so that it cannot simply begin anew.
    """
    places = [row["upper"] for row in rows if row["upper"] is not None]
    if not places:
        return []
    durable, there = reduce(Frontier.join, places), {row["source_table"] for row in rows}
    found = []
    for table in known_tables(source):
        trouble = _raised(verify_table, source, table, durable) if table not in there else None
        if trouble is not None:
            absent = {"generation": 0, "epoch": 0, "snapshot_id": None, "committed_at": ""}
            named = {"pipeline": pipeline, "table": table, "source_table": table, "position": ""}
            found.append({**named, **absent, "state": _state(trouble), "trouble": trouble})
    return found


def _told(row: dict[str, Any], source: Source) -> dict[str, Any]:
    """A row of the sink with what the source says of it, each thing in words."""
    upper, committed_at = row.pop("upper"), row.pop("committed_at")
    trouble = row["trouble"]
    if trouble is None and upper is not None:
        trouble = _raised(verify_table, source, row["source_table"], upper)
    return {
        **row,
        "state": _state(trouble) if trouble else row["state"],
        "trouble": trouble,
        "position": source.standing(upper).position if upper is not None else "",
        "committed_at": _time(round(committed_at * 1000)) if committed_at else "",
    }


def _raised(look: Callable[..., None], *arguments: Any) -> IcestreamError | None:
    try:
        look(*arguments)
    except IcestreamError as error:
        return error
    return None


def _state(trouble: IcestreamError) -> str:
    """What a table is called that the next run stops at."""
    return next(state for kind, state in _STATES.items() if isinstance(trouble, kind))


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _PLAIN}


def where_from(error: BaseException) -> str:
    """Where an error came from: lines of code and classes, without texts of foreign errors.

    Such a text may quote a value of a row ("could not convert string to float: ..."). Errors of
    icestream's own never do, so theirs is shown.
    """
    said = str(error) if isinstance(error, IcestreamError) else "(its text may show a row's values)"
    lines = "".join(traceback.format_tb(error.__traceback__))
    own = f"{lines}{type(error).__name__}: {said}"
    context = None if error.__suppress_context__ else error.__context__
    before = error.__cause__ or context
    return f"{where_from(before)}\n\nfrom which came:\n\n{own}" if before else own


class TextFormatter(logging.Formatter):
    """One line for people: time, level, text, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, with a traceback below it where there is one."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{at} {record.levelname.lower():7} {record.getMessage()}  {fields}".rstrip()
        error = record.exc_info[1] if record.exc_info else None
        return shown(f"{line}\n{where_from(error)}" if error else line)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        data = {
            "at": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shown(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1]:
            data["traceback"] = where_from(record.exc_info[1])
        return shown(json.dumps(data, default=str))
