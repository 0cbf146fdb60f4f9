"""A MariaDB or a MySQL on loopback, in a folder of its own, ended with its block.

MariaDB is the system's own, else Debian's package, which apt installs where we are root: programs alone, no service.
MySQL is out of Debian unstable, in a root folder of its own (tests/servers/mysql-root). Both run as nobody where we are
root. What they hold is thrown away, so they wait for no disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import pymysql

from tests.servers.pgbouncer import NotHere
from tests.servers.postgres import NOBODY, free_port, run_as

__all__ = ["KINDS", "Kind", "NotHere", "Server", "a_server"]

Kind: TypeAlias = Literal["mariadb", "mysql"]
KINDS: Final[tuple[Kind, Kind]] = ("mariadb", "mysql")

START: Final = 60.0
"""Seconds within which a server answers."""
STOP: Final = 30.0
"""Seconds within which it ends."""
PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PACKAGES: Final = ("mariadb-server-core", "mariadb-client-core")
_ROOT: Final = Path(__file__).parent / "mysql-root"
_SETTINGS: Final = {
    "bind-address": "127.0.0.1",
    "innodb-buffer-pool-size": "64M",
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-doublewrite": "0",
    "skip-log-bin": None,
    "max-connections": "300",
    "performance-schema": "OFF",
}


@cache
def _mariadb() -> Path:
    """The server's program. Raises `NotHere`."""
    if found := _which():
        return found
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        raise NotHere("MariaDB is not installed, and this is no Debian")
    if os.getuid() != 0:
        raise NotHere(f"MariaDB is not installed; as root: apt-get install {' '.join(_PACKAGES)}")
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trio-settlement"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := _which():  # somebody else was first
            return found
        try:
            for _ in range(3):
                if _apt("update") and _apt("install", "-y", "--no-install-recommends", *_PACKAGES):
                    break
        except (subprocess.SubprocessError, OSError) as error:
            raise NotHere(f"apt-get cannot install MariaDB: {error}") from None
    if found := _which():
        return found
    raise NotHere(f"apt-get cannot install {' '.join(_PACKAGES)}")


def _which() -> Path | None:
    needed = [shutil.which(name, path=PATH) for name in ("mariadbd", "mariadb-install-db", "my_print_defaults")]
    return Path(needed[0]) if needed[0] is not None and all(needed) else None


def _apt(*arguments: str) -> bool:
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=100", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, capture_output=True, timeout=600, check=False, env=environment).returncode == 0


@cache
def _mysql() -> Path:
    """The root folder. Raises `NotHere`."""
    made = subprocess.run([_ROOT], capture_output=True, text=True, timeout=1000, check=False)
    if made.returncode == os.EX_TEMPFAIL:
        raise NotHere(f"not in Debian stable: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


class Server:
    """One server in a folder, which may be stopped and started again, on the same port.

    Not from another thread than the one that ends last: a server ends with the thread that has started it.
    """

    def __init__(self, kind: Kind, **settings: str) -> None:
        """Make its files. `settings`: options of the server, with _ for -. Raises `NotHere`."""
        self._root = _mysql() if kind == "mysql" else None
        self._mariadb = _mariadb() if kind == "mariadb" else None  # installed, where it is not there
        parent = None if self._root is None else self._root / "tmp"
        self.kind = kind
        self._port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="trio-settlement-mysql-", dir=parent))
        self._folder.chmod(0o755)
        self._within = "/" + str(self._folder.relative_to(self._root)) if self._root else str(self._folder)
        self._data = self._folder / "data"
        # a server that starts deletes all temporary tables in its folder for these, whoever's they are
        for each in (self._data, self._folder / "temporary"):
            each.mkdir()
            if os.getuid() == 0:
                os.chown(each, NOBODY, NOBODY)
        options = {**_SETTINGS, **{name.replace("_", "-"): value for name, value in settings.items()}}
        self._arguments = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self._made = False
        self.url = f"{kind}://tests:secret@127.0.0.1:{self._port}/"
        """Its own, as a user who may do all; the database is left out."""

    def _command(self, *arguments: str) -> list[str]:
        data = f"{self._within}/data"
        if self._root is not None:
            program = ["chroot", str(self._root), *run_as("TERM"), "/usr/sbin/mysqld"]
            own = ["--mysqlx=OFF", "--secure-file-priv=NULL"]
        else:
            program, own = [*run_as("TERM"), str(self._mariadb)], []
        paths = [f"--datadir={data}", f"--tmpdir={self._within}/temporary", f"--port={self._port}"]
        paths += [f"--socket={data}/socket", f"--pid-file={data}/pid"]
        return [*program, "--no-defaults", *paths, *own, *self._arguments, *arguments]

    def _make(self) -> None:
        if self.kind == "mysql":
            command: Sequence[str] = self._command("--initialize-insecure")
        else:
            install = shutil.which("mariadb-install-db", path=PATH) or ""
            only = ["--no-defaults", "--force", "--auth-root-authentication-method=normal", "--skip-test-db"]
            paths = [f"--datadir={self._data}", f"--tmpdir={self._folder / 'temporary'}"]
            command = [*run_as(), install, *only, *paths, "--skip-name-resolve"]
        made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self._folder, timeout=120)
        assert made.returncode == 0, f"{made.stdout}\n{made.stderr}"
        self._made = True

    def start(self) -> None:
        """Start it, and wait until it answers."""
        first = not self._made
        if first:
            self._make()
        log = self._folder / "log"
        with log.open("ab") as written:
            self._process = process = subprocess.Popen(
                self._command(), stdout=written, stderr=written, cwd=self._folder, env={**os.environ, "PATH": PATH}
            )
        until = time.monotonic() + START
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=2):
                    pass  # PyMySQL leaves a socket open where nobody listens
                self._begin(first=first)
            except (OSError, pymysql.OperationalError):
                assert process.poll() is None, log.read_text()
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return

    def _begin(self, *, first: bool) -> None:
        user, password = ("root", "") if first else ("tests", "secret")
        where: dict[str, Any] = {"host": "127.0.0.1", "port": self._port}
        if first:
            where = {"unix_socket": str(self._data / "socket")}
        connection = pymysql.connect(user=user, password=password, connect_timeout=2, autocommit=True, **where)
        with connection, connection.cursor() as cursor:
            if first:
                cursor.execute("CREATE USER tests@'%' IDENTIFIED BY 'secret'")
                cursor.execute("GRANT ALL ON *.* TO tests@'%' WITH GRANT OPTION")

    def stop(self, *, crash: bool = False) -> None:
        """End it: what is under way is rolled back; as in a `crash`, nobody is told."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL if crash else signal.SIGTERM)
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP)

    @property
    def process(self) -> int:
        """Its number."""
        assert self._process is not None
        return self._process.pid

    def discard(self) -> None:
        """It has ended, and its files go."""
        self.stop(crash=True)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def a_server(kind: Kind, **settings: str) -> Generator[Server, None, None]:
    """A server that runs; it has ended behind the block. Parameters as of `Server`. Raises `NotHere`."""
    made = Server(kind, **settings)
    try:
        made.start()
        yield made
    finally:
        made.discard()
