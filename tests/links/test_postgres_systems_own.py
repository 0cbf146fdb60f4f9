"""What is shown on the newest PostgreSQL holds on the system's own, too, where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.links.postgres_kit import WHERE_THERE_IS_ONE
from tests.servers.postgres import server

pytestmark = [pytest.mark.postgres, pytest.mark.servers, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FILES = ["settle", "row_lock", "advisory", "prepared"]


def test_on_the_systems_own() -> None:
    """S-3: every cell of each form, and what is prepared, on what Debian has in /usr/lib/postgresql."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not binaries:
        pytest.skip(f"{WHERE_THERE_IS_ONE}no /usr/lib/postgresql/*/bin/initdb")
    with server(binaries[-1].parent, max_connections="200", fsync="off", full_page_writes="off") as url:
        files = [f"tests/links/test_postgres_{name}.py" for name in FILES]
        said = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
            cwd=ROOT,
            env={**os.environ, "TEST_POSTGRES_URL": url},
            check=False,
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert said.returncode == 0, said.stdout + said.stderr
