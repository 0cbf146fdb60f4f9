"""What every test may use, and what `tests/run --require` means."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.links.mysql_kit import mariadb_database, mysql_database, mysql_databases, mysqls
from tests.links.postgres_kit import WHERE_THERE_IS_ONE, database, databases, pooled, pooler, postgres
from tests.links.rabbit_kit import NOT_IN_STABLE, rabbit

__all__ = [
    "database",
    "databases",
    "mariadb_database",
    "mysql_database",
    "mysql_databases",
    "mysqls",
    "pooled",
    "pooler",
    "postgres",
    "rabbit",
]

REQUIRED = frozenset(filter(None, os.environ.get("SETTLEMENT_REQUIRE", "").split(",")))
"""Transports whose tests may not be skipped, but for want of what Debian stable does not have."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, in the random order that they have: else one worker has them at the end, the others none."""
    items.sort(key=lambda item: "weather" not in item.path.parts and item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    names = [name for name in REQUIRED if item.get_closest_marker(name)]
    if report.skipped and names and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not why.removeprefix("Skipped: ").startswith((NOT_IN_STABLE, WHERE_THERE_IS_ONE)):
            report.outcome, report.longrepr = "failed", f"{', '.join(names)} is required, and this was skipped: {why}"
    return report


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say a line at the end of the run: a figure that the test has measured."""

    def say(line: str) -> None:
        record_property("told", line)

    return say


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, line in getattr(report, "user_properties", ()):
                if name == "told" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {line}")
