"""tests/servers/pgbouncer.py: what cannot be had is said so, and what does not start is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import pgbouncer as module
from tests.servers.pgbouncer import NotHere, pgbouncer

pytestmark = [pytest.mark.postgres, pytest.mark.servers]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with these commands alone, and no cache."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PATH", str(commands))
    return commands


def add(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_there_is_no_apt(bare: Path) -> None:
    """That is a reason to skip."""
    assert not [*bare.iterdir()]
    with pytest.raises(NotHere, match="not installed, and this is no Debian"):
        module.find()


@pytest.mark.skipif(not Path("/etc/debian_version").exists(), reason="not in Debian stable: this is no Debian")
def test_apt_finds_nothing(bare: Path) -> None:
    """The skip says what apt said, and nothing is left in the cache."""
    add(bare, "apt-get", "echo E: no network >&2; exit 100")
    with pytest.raises(NotHere, match="cannot download pgbouncer: E: no network"):
        module.find()
    assert [each.name for each in (bare.parent / "cache" / "trio-settlement").iterdir()] == ["pgbouncer.lock"]


def test_the_system_has_one(bare: Path) -> None:
    """It is taken."""
    add(bare, "pgbouncer", "exit 0")
    assert module.find() == bare / "pgbouncer"


@pytest.mark.usefixtures("pooler")
def test_it_does_not_start(postgres: str) -> None:
    """An error, with what it said."""
    with pytest.raises(AssertionError, match="nonsense"), pgbouncer(postgres, pool_mode="nonsense"):
        pass
