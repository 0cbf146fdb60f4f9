"""What `help()` and an editor show: every field by its name, and no number of a rule that a reader has no book for."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import pytest

import actors
import actors.events
import actors.testing
import links.abc
import links.memory
from settlement import Delivery, Hold, Ledger, Letter, Plan, Policy

ROOT = Path(__file__).parent.parent

RULE = re.compile(r"\b(?:[A-Z]-[0-9]+(?:\.[0-9]+)?|DESIGN|CORE|SPEC)\b|(?<=\s)\([0-9]\.[0-9]+\)")
"""The number of a rule, or the name of a page that is not delivered: C-1.2, K-50, DESIGN 3.4, (3.6)."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    name_of(path): path for top in ("settlement", "actors", "links") for path in sorted((ROOT / top).rglob("*.py"))
}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Every text that stands where a docstring may: of a module, a class, a function, or below a field."""
    for node in ast.walk(ast.parse(path.read_text())):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text
                case _:
                    pass


def values() -> list[type[Any]]:
    """The public classes of these modules that are made of fields."""
    found: list[type[Any]] = []
    for name in MODULES:
        for each, value in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            if value.__module__ == name and not each.startswith("_") and attrs.has(value):
                found.append(value)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_docstring_cites_a_rule(module: str) -> None:
    """A docstring says what holds; the number of a rule stands in a comment or in a test."""
    assert not [(line, text) for line, text in docstrings(MODULES[module]) if RULE.search(text)]


@pytest.mark.parametrize("text", ["said so (C-1.2).", "K-1 to K-9", "as DESIGN 3 has it", "stops the line (3.6)"])
def test_what_a_rule_looks_like(text: str) -> None:
    """The check above would find these."""
    assert RULE.search(text)


@pytest.mark.parametrize("text", ["a value that is no UTF-8", "AMQP", "RabbitMQ (4.3 or 4.0)", "RetryAfter(1.5)"])
def test_what_is_no_rule(text: str) -> None:
    """The check above lets these be."""
    assert not RULE.search(text)


@pytest.mark.parametrize("value", values(), ids=lambda value: f"{value.__module__}.{value.__name__}")
def test_a_value_tells_its_fields(value: type[Any]) -> None:
    """`help(Policy)` says what each of its fields means."""
    public = [field.name for field in attrs.fields(value) if not field.name.startswith("_")]
    told = re.findall(
        r"^ {4}(\w+): \S", inspect.cleandoc(value.__doc__ or "").partition("Attributes:\n")[2], re.MULTILINE
    )

    assert told == public


@pytest.mark.parametrize(
    "enum",
    [
        each
        for name in MODULES
        for each in vars(importlib.import_module(name)).values()
        if inspect.isclass(each) and issubclass(each, Enum) and each.__module__ == name
    ],
    ids=lambda enum: f"{enum.__module__}.{enum.__name__}",
)
def test_a_choice_tells_its_members(enum: type[Enum]) -> None:
    """`help(Line)` says what each line means: in its docstring, or by its value."""
    told = re.findall(r"^ {4}(\w+): \S", inspect.cleandoc(enum.__doc__ or ""), re.MULTILINE)

    assert all(each.name in told or (isinstance(each.value, str) and " " in each.value) for each in enum)


@pytest.mark.parametrize(
    "call",
    [
        actors.Runtime,
        actors.open_runtime,
        actors.connected,
        actors.testing.run_once,
        actors.testing.a_delivery,
        links.memory.MemoryBroker,
        links.memory.MemoryBroker("memory").queue,
    ],
)
def test_a_call_tells_its_arguments(call: Any) -> None:
    """What a newcomer calls first says each of its arguments."""
    told = re.findall(r"^ {4}\*?(\w+): \S", inspect.getdoc(call) or "", re.MULTILINE)

    assert set(inspect.signature(call).parameters) <= set(told)


def test_what_a_newcomer_meets_is_among_them() -> None:
    """The list above is of everything: it has what the first hour needs."""
    met = {
        Delivery,
        Letter,
        Policy,
        Plan,
        Ledger,
        Hold,
        actors.Statistics,
        actors.Subscription,
        actors.BatchSubscription,
        actors.events.GivenUp,
        links.abc.Received,
    }

    assert met <= set(values())
