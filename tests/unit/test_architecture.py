"""The guide to the architecture agrees with the tree: its rooms, the functions and files it names.

It also says of every known mechanism what does its job here.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "ARCHITECTURE.md"
PACKAGE = ROOT / "icestream"
# A function, class or constant of a module, as the guide names it: `epoch.py:resume_point`.
NAMED = re.compile(r"`([\w/]+\.py):([\w.]+)`")
EVERY_ROOM = "every room"
NO_ROOM = "nothing"
COLUMNS = ["mechanism", "known from", "here", "why"]
MECHANISMS = (
    *("control topic", "channel", "leader election", "resend buffer", "minting", "capabilities"),
    *("source coordinator", "leases", "acknowledgement"),
)


def section(heading: str) -> str:
    """The text behind a heading of the guide, up to the next one."""
    return re.split(r"^## ", GUIDE.read_text().partition(f"\n## {heading}\n")[2], flags=re.M)[0]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """What some statements define, each with the statements inside of it."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update((each.id, []) for each in targets if isinstance(each, ast.Name))
    return found


def is_there(path: Path, dotted: str) -> bool:
    """Whether a module defines a name, or a class in it a member."""
    body = parsed(path).body if path.is_file() else []
    for name in dotted.split("."):
        inside = defined(body)
        if name not in inside:
            return False
        body = inside[name]
    return True


def rooms() -> dict[str, tuple[set[str], str]]:
    """The modules of each room, and what it may import, as the guide's table says."""
    lines = [line for line in section("The rooms").splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {room: (set(re.findall(r"`(\w+)`", own)), allowed) for room, own, allowed in cells}


def imports() -> Iterator[tuple[str, str]]:
    """Which first-level module imports which other one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(parsed(path)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                inner = node.module == "icestream"
                names = [f"icestream.{n.name}" if inner else node.module or "" for n in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "icestream" and len(parts) > 1 and parts[1] != here:
                    yield here, parts[1]


def test_every_function_that_the_guide_names_is_there():
    """U9: who follows the way of a record finds each step in the code."""
    named = NAMED.findall(GUIDE.read_text())
    assert len(set(named)) > 50
    assert [f"{file}:{name}" for file, name in named if not is_there(PACKAGE / file, name)] == []


def test_every_module_is_in_one_room_and_in_the_picture():
    """U9: a newcomer who opens the tree can name the rooms."""
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    placed = [module for modules, _ in rooms().values() for module in modules]
    assert sorted(placed) == sorted(there - {"__init__", "__pycache__"})
    picture = section("The rooms").split("```")[1]
    assert [module for module in placed if not re.search(rf"\b{module}\b", picture)] == []


def test_rooms_import_what_the_guide_says_they_may():
    """U9: the picture's arrows are the tree's."""
    room_of = {module: room for room, (modules, _) in rooms().items() for module in modules}
    wrong = []
    for here, there in sorted(set(imports())):
        mine, its = room_of[here], room_of[there]
        allowed = rooms()[mine][1].replace("'s ", ", ").split(", ")
        if mine != its and allowed != [EVERY_ROOM] and _short(its) not in allowed:
            wrong.append(f"{here} ({mine}) imports {there} ({its})")
    assert wrong == []
    assert rooms()["model"][1] == NO_ROOM


def _short(room: str) -> str:
    return room.removeprefix("engine, ")


def test_every_file_of_the_package_that_the_guide_lists_is_there():
    """U9: the list of modules names no file that has moved."""
    wrong = []
    for line in section("Where things are").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or "`" not in cells[1]:
            continue
        own = re.findall(r"`([\w/.]+)`", cells[1])
        wrong += [name for name in own if not (PACKAGE / name).exists()]
        folders = {
            PACKAGE / name if name.endswith("/") else (PACKAGE / name).parent for name in own
        }
        for name in re.findall(r"`(\w+\.py)`", cells[2]):
            if not any((folder / name).exists() for folder in folders):
                wrong.append(f"{cells[1]}: {name}")
    assert wrong == []


def last_section() -> list[str]:
    """The lines behind the guide's last heading."""
    return re.split(r"^## .*$", GUIDE.read_text(), flags=re.MULTILINE)[-1].strip().splitlines()


def rows() -> list[list[str]]:
    """The cells of the section's table, its heading first."""
    lines = [line for line in last_section() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def test_the_guide_ends_with_a_table_of_known_mechanisms():
    """U9: nothing follows it, and every row says what does the job here, and why."""
    assert last_section()[-1].startswith("|")
    heading, *body = rows()
    assert heading == COLUMNS
    assert all(len(cells) == len(COLUMNS) for cells in body)
    assert [cells for cells in body if not all(cells)] == []


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_known_mechanism_is_mapped_to_what_does_its_job_here(mechanism):
    """U9: those who know another design find their way into this one."""
    assert any(mechanism in cells[0] for cells in rows()[1:])
