"""A pgbouncer in front of a PostgreSQL, in transaction mode, in a folder of its own, ended with its block.

The system's own, else Debian's package, which apt downloads into a cache folder: nothing is installed, and root is not
needed. As root it runs as nobody, for pgbouncer does not run as root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.servers.postgres import NOBODY, free_port, run_as

__all__ = ["NotHere", "find", "pgbouncer"]

START: Final = 20.0
"""Seconds within which it answers."""
PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class NotHere(Exception):
    """It cannot be had on this machine; says why."""


@cache
def _binary() -> Path:
    return find()


def find() -> Path:
    """The program: the system's, or the cached one. Raises `NotHere`."""
    if found := shutil.which("pgbouncer", path=PATH):
        return Path(found)
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        raise NotHere("pgbouncer is not installed, and this is no Debian")
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trio-settlement"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "pgbouncer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / "pgbouncer").exists():
            try:
                _download(kept)
            except (subprocess.SubprocessError, OSError) as error:
                said = getattr(error, "stderr", None) or str(error)
                raise NotHere(f"apt-get cannot download pgbouncer: {' '.join(said.split())}") from None
    return kept / "pgbouncer" / "usr" / "sbin" / "pgbouncer"


def _download(kept: Path) -> None:
    """The package and what it needs and the machine has not, by lists of our own: those of the machine stay."""
    with tempfile.TemporaryDirectory(dir=kept, prefix="pgbouncer.") as name:
        folder, root = Path(name), Path(name) / "root"
        for each in ("lists/partial", "archives/partial", "root"):
            (folder / each).mkdir(parents=True)
        options = [f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}", "APT::Sandbox::User=root"]
        options += [f"Dir::Cache::archives={folder}/archives", "Debug::NoLocking=1"]
        apt = ["apt-get", "-qq", "-y", *(f"-o{option}" for option in options)]
        for order in (["update"], ["install", "--download-only", "--no-install-recommends", "pgbouncer"]):
            subprocess.run([*apt, *order], check=True, capture_output=True, text=True, timeout=180)
        for package in (folder / "archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True, capture_output=True, text=True, timeout=60)
        root.rename(kept / "pgbouncer")


def _program(folder: Path) -> tuple[Path, dict[str, str]]:
    """It, and its environment: copied to where everybody may read it."""
    binary = _binary()
    root = binary.parents[2]
    if root == Path("/"):
        return binary, {}
    shutil.copytree(root, folder / "root")
    libraries = {str(each.parent) for each in (folder / "root").rglob("*.so*")}
    return folder / "root" / binary.relative_to(root), {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}


@contextmanager
def pgbouncer(url: str, **settings: str) -> Generator[str, None, None]:
    """The URL of the same database through a pgbouncer. `settings`: lines of pgbouncer.ini.

    Any user may come in, and is the one of `url` to the server. Raises `NotHere`.
    """
    with tempfile.TemporaryDirectory(prefix="trio-settlement-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        program, environment = _program(folder)
        port = free_port()
        to = {key: value for key, value in conninfo_to_dict(url).items() if key in {"host", "port", "user", "password"}}
        lines = {"listen_addr": "127.0.0.1", "listen_port": port, "unix_socket_dir": "", "auth_type": "any"}
        lines |= {"pool_mode": "transaction", **settings}
        configured = folder / "pgbouncer.ini"
        configured.write_text(
            f"[databases]\n* = {' '.join(f'{key}={value}' for key, value in to.items())}\n"
            "[pgbouncer]\n" + "\n".join(f"{key} = {value}" for key, value in lines.items())
        )
        configured.chmod(0o600)
        if os.getuid() == 0:
            os.chown(configured, NOBODY, NOBODY)
        log = folder / "log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                [*run_as(), program, configured],
                stdout=written,
                stderr=written,
                cwd=folder,
                env={**os.environ, **environment},
            )
        through = urlunsplit(urlsplit(url)._replace(netloc=f"{to.get('user', 'postgres')}@127.0.0.1:{port}"))
        try:
            _wait_for(through, process, log)
            yield through
        finally:
            process.send_signal(signal.SIGTERM)  # at once, with all clients
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START
    while True:
        try:
            with psycopg.connect(url, connect_timeout=2, prepare_threshold=None) as connection:
                connection.execute(b"SELECT 1")
        except psycopg.OperationalError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        else:
            return
