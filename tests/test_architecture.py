"""Who may import whom: the table that import-linter cannot say in full (pyproject.toml has the rest)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SHARED = {"trio", "attrs", "settlement", "links.abc", "links.errors"}
ROOMS: dict[str, set[str]] = {
    "settlement": {"attrs"},
    "actors": SHARED,
    "links.abc": {"trio", "attrs", "settlement", "links.errors"},
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

MODULES = sorted(path for top in ("settlement", "actors", "links") for path in (ROOT / top).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def within(module: str, room: str) -> bool:
    return module == room or (module.startswith(room + ".") and room != "links")


def room_of(module: str) -> str | None:
    return next((room for room in ROOMS if within(module, room)), None)


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, anywhere in it; `from links import abc` is links.abc."""
    package = name_of(path).split(".") if path.stem == "__init__" else name_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from ([f"{origin}.{alias.name}" for alias in node.names] if origin == "links" else [origin])


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


@pytest.mark.parametrize("path", [path for path in MODULES if within(name_of(path), "settlement")], ids=name_of)
def test_settlement_never_awaits(path: Path) -> None:
    """A decision is a plain function: nothing in settlement is async."""
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, waits)]
