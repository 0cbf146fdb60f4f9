"""A PostgreSQL for the tests: one server for each pytest process (tests/servers/postgres.py).

    pytestmark = [pytest.mark.postgres, pytest.mark.servers]

    async def test_this(database: str) -> None:     # the URL of an empty database

`TEST_POSTGRES_URL` names another server, whose user may create databases.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from tests.servers.postgres import server

GIVEN: Final = os.environ.get("TEST_POSTGRES_URL", "")


@pytest.fixture(scope="session")
def postgres() -> Generator[str, None, None]:
    """The URL of a server, as its superuser."""
    if GIVEN:
        yield GIVEN
        return
    with server(max_connections="200", fsync="off", full_page_writes="off") as url:  # it is thrown away
        yield url


@contextmanager
def a_database(server: str) -> Generator[str, None, None]:
    """The URL of an empty database, dropped behind the block, with whoever is still connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
        try:
            yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


@pytest.fixture
def database(postgres: str) -> Generator[str, None, None]:
    """The URL of an empty database, dropped behind the test."""
    with a_database(postgres) as url:
        yield url
