"""What every test may use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


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
