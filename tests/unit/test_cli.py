"""The command line: data on stdout, talk on stderr, an exit code for each kind of trouble."""

import json
import logging
import os
import signal
import threading

import pytest

from icestream import cli
from icestream.cli import _run_all, main
from icestream.errors import HistoryLost, IcestreamError, SourceUnavailable, TargetUnavailable


@pytest.fixture(autouse=True)
def own_logging():
    """The command line sets up logging for its process; tests share theirs."""
    root, package = logging.getLogger(), logging.getLogger("icestream")
    before = (list(root.handlers), root.level, package.level)
    yield
    root.handlers[:], root.level = before[0], before[1]
    package.setLevel(before[2])


@pytest.mark.parametrize("command", ["run", "check", "status"])
def test_a_wrong_configuration_ends_with_code_2_before_anything_starts(command, tmp_path, capsys):
    """U2, U3: said on stderr, with a hint; stdout is for data."""
    path = tmp_path / "pipelines.yaml"
    path.write_text("orders: {sorce: {}}\n")
    assert main([command, str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "unknown key `sorce`" in output.err
    assert "hint: Did you mean `source`?" in output.err


def test_an_error_is_json_for_programs(tmp_path, capsys):
    """U2: `--json`."""
    assert main(["run", str(tmp_path / "missing.yaml"), "--json"]) == 2
    error = json.loads(capsys.readouterr().err)
    assert error["error"] == "ConfigInvalid"
    assert "missing.yaml" in error["message"]


def test_an_unknown_pipeline_is_refused(tmp_path, capsys):
    """U2: `--pipeline`."""
    path = tmp_path / "pipelines.yaml"
    path.write_text("a: {source: {cockroachdb: {files: x}}, sink: {iceberg: {}}}\n")
    assert main(["check", str(path), "--pipeline", "b"]) == 2
    assert "unknown pipeline `b`" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run"], ["rollback", "x", "--table", "t"]])
def test_a_command_that_is_not_understood_shows_its_usage(arguments, capsys):
    """U2: rollback wants one of its two ways."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: icestream" in capsys.readouterr().err


def test_every_command_has_help(capsys):
    """U8: the reference page is made from it."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    for command in ("run", "check", "status", "rollback", "demo"):
        assert f"    {command} " in output


class Stopping:
    """A pipeline that stops."""

    name = "orders"

    def __init__(self, error: IcestreamError | None = None):
        self._error = error or HistoryLost("what was there is gone")

    def run(self, once: bool) -> None:
        raise self._error


def test_a_pipeline_that_stops_beside_others_says_why_at_once(caplog):
    """E13, Mend f1: the others may run for years before the command ends and shows its error."""
    assert [error.message for error in _run_all([Stopping()], once=False)]
    assert "pipeline orders stopped: what was there is gone" in caplog.text


@pytest.mark.parametrize("turn", [1, -1])
def test_of_several_pipelines_that_stopped_the_worst_is_told_first(turn):
    """U2, Mend f3: its exit code is the command's, whichever of them stopped first."""
    errors = [SourceUnavailable("is away"), HistoryLost("is lost")]
    found = _run_all([Stopping(error) for error in errors[::turn]], once=True)
    assert [error.message for error in found] == ["is lost", "is away"]


SPARED = """
{name}:
  source: {{postgres: {{dsn: "postgresql://nobody@127.0.0.1:1/{name}", tables: [t]}}}}
  sink: {{iceberg: {{}}}}
"""


class NoSession:
    """No pipeline that is checked here comes as far as to need one."""

    def stop(self) -> None:
        """Nothing was started."""


def test_check_goes_on_after_a_faulty_pipeline_and_lists_all_faults(tmp_path, capsys, monkeypatch):
    """U2, Mend f3: each with its pipeline's name; the worst code counts."""
    path = tmp_path / "pipelines.yaml"
    path.write_text("".join(SPARED.format(name=name) for name in ("one", "two", "three")))
    faults = {"one": SourceUnavailable("is away"), "two": HistoryLost("is lost", hint="Look.")}

    def check_one(pipeline, spark):
        if pipeline.name in faults:
            raise faults[pipeline.name]
        return {"pipeline": pipeline.name, "tables": ["t"], "existing": []}

    # Which faults there are is for other tests to find; here they are told.
    monkeypatch.setattr(cli, "_check_one", check_one)
    monkeypatch.setattr(cli, "open_session", lambda *_: NoSession())  # Spark takes seconds
    assert main(["check", str(path)]) == HistoryLost.exit_code
    output = capsys.readouterr()
    assert output.out == "three: ok, tables ['t']\n"
    assert output.err.splitlines() == [
        "icestream: pipeline one: is away",
        "icestream: pipeline two: is lost",
        "hint: Look.",
    ]
    assert main(["check", str(path), "--json"]) == HistoryLost.exit_code
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["pipeline"], each["message"]) for each in told] == [
        ("one", "is away"),
        ("two", "is lost"),
    ]
    assert main(["check", str(path), "--pipeline", "three"]) == 0


def test_status_shows_other_pipelines_when_one_cannot_be_asked(tmp_path, capsys, monkeypatch):
    """U2, E13, Mend f1: its index or catalog may be away."""
    path = tmp_path / "pipelines.yaml"
    path.write_text("".join(SPARED.format(name=name) for name in ("one", "two")))
    row = {
        "pipeline": "two",
        "table": "t",
        "epoch": 1,
        "position": "5",
        "snapshot_id": 7,
        "committed_at": "now",
        "state": "ok",
        "trouble": None,
    }

    def told(pipeline, spark):
        if pipeline.name == "one":
            raise TargetUnavailable("is away")
        return [row]

    monkeypatch.setattr(cli, "pipeline_status", told)  # no server is asked
    monkeypatch.setattr(cli, "open_session", lambda *_: NoSession())  # Spark takes seconds
    assert main(["status", str(path)]) == TargetUnavailable.exit_code
    output = capsys.readouterr()
    assert output.out.startswith("two  t  epoch 1  at 5  snapshot 7")
    assert output.err == "icestream: pipeline one: is away\n"


@pytest.mark.parametrize("command", ["check", "status", "replay", "changes", "rollback", "run"])
def test_an_interrupted_command_does_not_end_as_if_it_were_done(command, monkeypatch):
    """U2, Mend f3: 130, as a shell expects after Ctrl-C."""

    def interrupted(*_):
        raise KeyboardInterrupt

    # Where the interrupt comes does not matter.
    monkeypatch.setattr(cli, "load", interrupted)
    more = {"rollback": ["--table", "t", "--accept"], "changes": ["--file", "f"]}
    assert main([command, "f", *more.get(command, [])]) == 128 + signal.SIGINT


def test_an_unforeseen_error_shows_no_value_of_a_row(monkeypatch, capsys):
    """U2, U3: neither does the traceback; the exit code is that of a broken invariant."""
    value = "a value of a row"
    # What breaks, and where, does not matter.
    monkeypatch.setattr(cli, "load", lambda *_: float(value))
    assert main(["check", "f"]) == 5
    told = capsys.readouterr().err
    assert "an unforeseen error" in told and "ValueError" in told and value not in told


def test_a_pipeline_that_breaks_shows_no_value_of_a_row():
    """U3, E13: the error of a library may quote one."""
    (error,) = _run_all([Stopping(ValueError("a value of a row"))], once=True)
    assert error.exit_code == 5
    assert "ValueError" in str(error) and "a value of a row" not in str(error)


class Interrupted:
    """A pipeline that works until a signal comes."""

    name = "orders"

    def __init__(self, number: int):
        self._number = number
        self._stopped = threading.Event()

    def run(self, once: bool) -> None:
        os.kill(os.getpid(), self._number)
        assert self._stopped.wait(60)

    def stop(self) -> None:
        """As a pipeline is stopped."""
        self._stopped.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("once", [False, True])
def test_a_single_run_that_was_cut_does_not_end_as_if_it_were_done(
    number, once, tmp_path, monkeypatch
):
    """U2, Mend f3: what was to be copied is not; a run without end has done all when stopped."""
    path = tmp_path / "pipelines.yaml"
    path.write_text(SPARED.format(name="orders"))
    # What the pipeline does does not matter, but that it is stopped.
    monkeypatch.setattr(cli, "open_pipeline", lambda *_: Interrupted(number))
    monkeypatch.setattr(cli, "open_session", lambda *_: NoSession())  # Spark takes seconds
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = main(["run", str(path), *(["--once"] if once else [])])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert code == (128 + number if once else 0)
