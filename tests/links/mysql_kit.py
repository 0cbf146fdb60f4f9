"""A MariaDB and a MySQL for the tests: one server of each for each pytest process (tests/servers/mysql.py).

    pytestmark = [pytest.mark.mysql, pytest.mark.servers]

    async def test_this(mysql_database: str) -> None:     # twice: the URL of an empty database of each
    async def test_that(mariadb_database: str) -> None:   # once

`TEST_MARIADB_URL`, `TEST_MYSQL_URL` name other servers, whose users may create databases.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

import pymysql
import pytest

from tests.servers.mysql import KINDS, Kind, NotHere, a_server

__all__ = ["a_database", "connect", "mariadb_database", "mysql_database", "mysql_databases", "mysqls", "run"]

GIVEN: Final = {kind: os.environ.get(f"TEST_{kind.upper()}_URL", "") for kind in KINDS}
_WITHIN: Final = 10.0
"""Seconds for the connections of a test to end in."""


def connect(url: str, **more: Any) -> pymysql.Connection[Any]:
    """A connection of somebody else's, in autocommit."""
    parts = urlsplit(url)
    given: dict[str, Any] = {"autocommit": True, **more}
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        database=parts.path.lstrip("/") or None,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        **given,
    )


def run(url: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """One statement of somebody else, in autocommit; its rows, where it gives some."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall())


class Mysqls:
    """The servers of this process, each started when it is asked for."""

    def __init__(self) -> None:
        self._urls: dict[Kind, str] = {}
        self._running: list[Any] = []

    def url(self, kind: Kind) -> str:
        """The server's, as a user who may do all. What cannot be had is a skip, or a failure where it is required."""
        if kind not in self._urls:
            if GIVEN[kind]:
                self._urls[kind] = GIVEN[kind]
            else:
                block = a_server(kind)
                try:
                    self._urls[kind] = block.__enter__().url
                except NotHere as why:
                    pytest.skip(str(why))
                self._running.append(block)
        return self._urls[kind]

    def close(self) -> None:
        """End them."""
        while self._running:
            self._running.pop().__exit__(None, None, None)


@pytest.fixture(scope="session")
def mysqls() -> Generator[Mysqls, None, None]:
    made = Mysqls()
    yield made
    made.close()


@contextmanager
def a_database(server: str) -> Generator[str, None, None]:
    """The URL of an empty database, dropped behind the block, with whoever is still connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    run(server, f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    finally:
        _end_connections(server, name)
        run(server, f"DROP DATABASE IF EXISTS {name}")


def _end_connections(server: str, name: str) -> None:
    """Of this database, and wait until they are gone: they may hold locks."""
    end = time.monotonic() + _WITHIN
    query = "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = %s"
    while found := run(server, query, name):
        assert time.monotonic() < end, f"connections of {name} do not end"
        for (number,) in found:
            try:
                run(server, f"KILL {number}")
            except pymysql.OperationalError:  # it has ended meanwhile
                continue
        time.sleep(0.002)


@pytest.fixture
def mysql_databases(mysqls: Mysqls) -> Generator[Callable[[Kind], str], None, None]:
    """The URL of an empty database of the kind that is asked for."""
    with ExitStack() as stack:
        yield lambda kind: stack.enter_context(a_database(mysqls.url(kind)))


@pytest.fixture(params=KINDS)
def mysql_database(request: pytest.FixtureRequest, mysqls: Mysqls) -> Generator[str, None, None]:
    """The URL of an empty database, on MariaDB and on MySQL; what a test leaves in it is gone behind the test."""
    with a_database(mysqls.url(request.param)) as url:
        yield url


@pytest.fixture
def mariadb_database(mysqls: Mysqls) -> Generator[str, None, None]:
    """The same on MariaDB alone."""
    with a_database(mysqls.url("mariadb")) as url:
        yield url
