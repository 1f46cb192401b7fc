"""The command line: data on stdout, talk on stderr, an exit code for each kind of trouble."""

import json
import logging

import pytest

from icestream.cli import _run_all, main
from icestream.errors import HistoryLost


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

    def run(self, once: bool) -> None:
        raise HistoryLost("what was there is gone")


def test_a_pipeline_that_stops_beside_others_says_why_at_once(caplog):
    """E13, Mend f1: the others may run for years before the command ends and shows its error."""
    assert [error.message for error in _run_all([Stopping()], once=False)]
    assert "pipeline orders stopped: what was there is gone" in caplog.text
