"""Who may import whom: the table that import-linter cannot say in full (pyproject.toml has the rest)."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SHARED = {"trio", "attrs", "settlement", "links.abc", "links.errors"}
ROOMS: dict[str, set[str]] = {
    "settlement": {"attrs"},
    "actors": SHARED,
    "links.abc": {"trio", "attrs", "settlement", "links.errors", "links.beside"},
    "links.beside": {"trio", "settlement"},
    "links.errors": {"attrs", "settlement"},
    "links.memory": SHARED,
    "links.sql": SHARED | {"psycopg", "pymysql"},
    "links.amqp": SHARED | {"cproton", "proton"},
    "links.pubsub": SHARED | {"asyncio", "trio_asyncio", "grpc", "google"},
    "links.testing": SHARED | {"actors", "pytest"},
    "links": set(),  # links/__init__.py itself: importing one transport must not bring in another
}
"""Each room and what it may import besides itself and the standard library without asyncio."""

IMPURE = {"random", "secrets", "select", "selectors", "signal", "socket", "ssl", "subprocess", "threading", "time"}
"""What a module without a clock, dice and IO has no use for."""

FOLDERS: dict[str, set[str]] = {
    "links.amqp.wire": set(),
    "links.amqp.engine": {"links.amqp.wire"},
    "links.amqp.embedded": {"links.amqp.engine", "links.amqp.wire"},
}
"""Folders of a room, and which others of this room each may import; what stands at the room's top may import all."""

MODULES = sorted(path for top in ("settlement", "actors", "links") for path in (ROOT / top).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def within(module: str, room: str) -> bool:
    return module == room or (module.startswith(room + ".") and room != "links")


def room_of(module: str) -> str | None:
    return next((room for room in ROOMS if within(module, room)), None)


def folder_of(module: str) -> str | None:
    return next((folder for folder in FOLDERS if within(module, folder)), None)


def imports(path: Path) -> Iterator[str]:
    """All that the file imports, anywhere in it, a name behind its module: `from links import abc` is links.abc."""
    package = name_of(path).split(".") if path.stem == "__init__" else name_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    """Every import of a module is its own room, the standard library without asyncio, or in its room's row."""
    room = room_of(name_of(path))
    assert room, f"{name_of(path)} is in no room"
    standard = sys.stdlib_module_names - {"asyncio"} - (IMPURE if room == "settlement" else set())
    strangers = {
        module
        for module in imports(path)
        if not within(module, room)
        and module.split(".")[0] not in standard
        and not any(within(module, allowed) for allowed in ROOMS[room])
    }
    assert not strangers


@pytest.mark.parametrize("path", [path for path in MODULES if folder_of(name_of(path))], ids=name_of)
def test_a_folder_imports_only_the_folders_below_it(path: Path) -> None:
    """Within a room imports go one way: from its top to the folder that knows least."""
    folder = folder_of(name_of(path))
    assert folder is not None
    room = room_of(folder) or ""
    inside = {module for module in imports(path) if within(module, room) and not within(module, folder)}
    assert not {module for module in inside if not any(within(module, below) for below in FOLDERS[folder])}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Every import of ours counts, also one inside a function, or for a type checker alone."""
    names = {name_of(path) for path in MODULES}
    graph = {
        name_of(path): {
            module
            for name in imports(path)
            for module in [name if name in names else name.rpartition(".")[0]]
            if module in names
        }
        for path in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("path", [path for path in MODULES if within(name_of(path), "settlement")], ids=name_of)
def test_settlement_never_awaits(path: Path) -> None:
    """A decision is a plain function: nothing in settlement is async."""
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, waits)]


def imported(path: Path) -> set[str]:
    """The modules of this project that the file imports, also for the eyes of a type checker alone."""
    known = {name_of(each) for each in MODULES}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return (found & known) - {name_of(path)}


@pytest.mark.parametrize("room", ["links.sql"])
def test_no_import_goes_in_a_circle(room: str) -> None:
    """Within the room every module can be read before those that import it: also what only a type checker imports."""
    waiting = {name_of(path): imported(path) for path in MODULES if within(name_of(path), room)}
    waiting = {module: {each for each in others if each in waiting} for module, others in waiting.items()}
    while ready := {module for module, others in waiting.items() if not others & waiting.keys()}:
        waiting = {module: others for module, others in waiting.items() if module not in ready}
    assert not waiting


@pytest.mark.parametrize("path", [path for path in MODULES if within(name_of(path), "links.sql")], ids=name_of)
def test_a_dialect_stands_behind_its_door(path: Path) -> None:
    """Only the folder of a dialect knows its driver and its modules; `Table.ddl` alone asks for its text."""
    inside = within(name_of(path), "links.sql.sqlite")
    driver = [module for module in imports(path) if module.split(".")[0] == "sqlite3"]
    modules = {module for module in imported(path) if within(module, "links.sql.sqlite")} - {"links.sql.sqlite.ddl"}
    assert inside or not (driver or modules)
    assert inside or name_of(path) == "links.sql.table" or "links.sql.sqlite.ddl" not in imported(path)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    """400 lines at most."""
    assert len(path.read_text().splitlines()) <= 400
