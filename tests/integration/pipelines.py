"""Pipelines as tests run them: in this process, on the Spark session that all tests share."""

import itertools
import json
import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pyspark.sql import SparkSession

from icestream import cli, patience
from icestream import spark as sessions
from icestream.config import open_pipeline, parse
from icestream.pipeline import Pipeline
from tests.running import for_pipelines

_catalogs = itertools.count()

Document = dict[str, Any]


def embedded_catalog(folder: Path) -> dict[str, str]:
    """A SQLite catalog and a warehouse on local disk, under a name that no other test has."""
    return {
        "type": "jdbc",
        "name": f"embedded{next(_catalogs)}",
        "uri": f"jdbc:sqlite:{folder}/catalog.db",
        "warehouse": f"{folder}/warehouse",
        "jdbc.schema-version": "V1",
    }


def document(
    files: Path | str,
    catalog: Mapping[str, str],
    namespace: str = "shop",
    source: Mapping[str, Any] = {},
    sink: Mapping[str, Any] = {},
) -> Document:
    """A pipeline file with one pipeline, `feed`, that takes a folder into a namespace."""
    return {
        "feed": {
            "source": {"cockroachdb": {"files": str(files), **source}},
            "sink": {"iceberg": {"catalog": dict(catalog), "namespace": namespace, **sink}},
        }
    }


def run_once(spark: SparkSession, pipelines: Document) -> Pipeline:
    """Run the only pipeline of a file until all that is there is committed."""
    config = parse(pipelines)
    started = open_pipeline(config.pipelines[0], for_pipelines(spark))
    started.run(once=True)
    return started


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def rows(self) -> list[dict[str, Any]]:
        """The lines on stdout, each a JSON object."""
        return [json.loads(line) for line in self.out.splitlines()]

    def logged(self) -> list[dict[str, Any]]:
        """The lines on stderr, each a JSON object."""
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]


class Shell:
    """The command line in this process: as installed, but on the session that all tests share."""

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ):
        self.folder = folder
        self._capfd = capfd
        # A session takes seconds to start, and one process can have only one.
        monkeypatch.setattr(cli, "open_session", lambda *_: _Kept(for_pipelines(spark)))
        monkeypatch.setattr(sessions, "session", lambda *_: _Kept(for_pipelines(spark)))

    def __call__(self, *arguments: str) -> Answer:
        """Run one command and say what it returned and printed."""
        self._capfd.readouterr()
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = cli.main(arguments)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            for number, handler in signals.items():
                signal.signal(number, handler)
        printed = self._capfd.readouterr()
        return Answer(code, printed.out, printed.err)

    def run(self, pipelines: Document, *options: str) -> Answer:
        """`icestream run --once` of a document."""
        return self("run", self.write(pipelines), "--once", *options)

    def write(self, pipelines: Document | str) -> str:
        """Write a pipeline file and return its path."""
        path = self.folder / "pipelines.yaml"
        text = pipelines if isinstance(pipelines, str) else yaml.safe_dump(pipelines)
        path.write_text(text)
        return str(path)


class _Kept:
    """A session that outlives the command that was given it."""

    def __init__(self, spark: Any):
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Others need it after this."""


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries end after the second try."""
    monkeypatch.setattr(patience, "TRIES_MAX", 2)  # trouble in these tests passes by nobody's wait
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.01)  # so a pause would only cost time
    monkeypatch.setattr(patience, "RETRY_SECONDS_MAX", 0.2)  # also where a run has no end
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.01, 0.02))  # the same below the loop


def assert_refused(answer: Answer, code: int, *texts: str) -> None:
    """The command ended with the code, and told a person why and what to do, without a trace."""
    assert answer.code == code, answer.err
    assert "Traceback" not in answer.err
    assert "hint: " in answer.err
    missing = [text for text in texts if text not in answer.err]
    assert not missing, answer.err
    assert answer.out == ""


def names_of(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    """One column of some rows."""
    return [row[column] for row in rows]
