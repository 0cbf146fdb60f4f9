"""A PostgreSQL for the tests: one server for each pytest process (tests/servers/postgres.py).

    pytestmark = [pytest.mark.postgres, pytest.mark.servers]

    async def test_this(database: str) -> None:     # the URL of an empty database
    async def test_that(pooled: str) -> None:       # the same through a pgbouncer in transaction mode

`TEST_POSTGRES_URL` names another server, whose user may create databases.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from tests.servers.pgbouncer import NotHere, pgbouncer
from tests.servers.postgres import server

TURNS: Final = {"server_round_robin": "1", "min_pool_size": "3", "max_client_conn": "500"}
"""So each transaction soon gets another session than the one before."""
WHERE_THERE_IS_ONE: Final = "where there is one: "
"""How the reason begins why a test of the system's own server is skipped."""
GIVEN: Final = os.environ.get("TEST_POSTGRES_URL", "")

_SAID: Final = b"""
SELECT datallowconn, datconnlimit, datdba, datacl::text,
    (SELECT array_agg(setrole || setconfig::text ORDER BY setrole) FROM pg_db_role_setting WHERE setdatabase = d.oid),
    (SELECT concat(nspowner, nspacl, obj_description(oid)) FROM pg_namespace WHERE nspname = 'public'),
    (SELECT array_agg(nspname ORDER BY nspname) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp_'),
    (SELECT count(*) FROM pg_am), (SELECT count(*) FROM pg_cast), (SELECT count(*) FROM pg_class),
    (SELECT count(*) FROM pg_collation), (SELECT count(*) FROM pg_conversion), (SELECT count(*) FROM pg_default_acl),
    (SELECT count(*) FROM pg_event_trigger), (SELECT count(*) FROM pg_extension),
    (SELECT count(*) FROM pg_foreign_data_wrapper), (SELECT count(*) FROM pg_foreign_server),
    (SELECT count(*) FROM pg_language), (SELECT count(*) FROM pg_largeobject_metadata),
    (SELECT count(*) FROM pg_opclass), (SELECT count(*) FROM pg_operator), (SELECT count(*) FROM pg_proc),
    (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM pg_transform), (SELECT count(*) FROM pg_ts_config),
    (SELECT count(*) FROM pg_ts_dict), (SELECT count(*) FROM pg_type)
FROM pg_database d WHERE datname = current_database()"""
"""What may be said of a database, and how many things of each kind are there."""
_CLEAN: Final = b"""
SET client_min_messages = warning;
DROP SCHEMA IF EXISTS public CASCADE;
CREATE SCHEMA public AUTHORIZATION pg_database_owner;
COMMENT ON SCHEMA public IS 'standard public schema';
GRANT USAGE ON SCHEMA public TO PUBLIC"""
_WITHIN: Final = 10.0
"""Seconds for the backends of a test to end in."""


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
    with psycopg.connect(server, autocommit=True) as connection, _made(server, connection) as url:
        yield url


@contextmanager
def _made(server: str, connection: psycopg.Connection[Any]) -> Generator[str, None, None]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    connection.execute(f'CREATE DATABASE "{name}"'.encode())
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    finally:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())


class Databases:
    """Empty databases, one at a time: the same one again where it is as it was when it was new.

    Behind a test its backends are ended, and schema public is made again. Whatever else a test may leave in a database
    (schemas, extensions, event triggers, large objects) or say of it (settings, limits, rights) is found by a look at
    its catalogs, and then the database is dropped. Roles are the server's, and their tests'.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._connection = psycopg.connect(server, autocommit=True)
        self._stack = ExitStack()
        self._url: str | None = None
        self._new: Any = None

    @contextmanager
    def one(self) -> Generator[str, None, None]:
        """The URL of an empty database, for the block."""
        if self._url is None:
            self._url = self._stack.enter_context(_made(self._server, self._connection))
            with psycopg.connect(self._url) as connection:
                self._new = connection.execute(_SAID).fetchone()
        try:
            yield self._url
        finally:
            self._end_backends(urlsplit(self._url).path.lstrip("/"))
            if not self._as_new(self._url):
                self._drop()

    def _as_new(self, url: str) -> bool:
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(_CLEAN)
                return bool(connection.execute(_SAID).fetchone() == self._new)
        except psycopg.Error:  # it lets nobody in, takes no writes, gives a statement no time
            return False

    def _end_backends(self, name: str) -> None:
        """Of this database, and wait until they are gone: they may hold locks."""
        end = time.monotonic() + _WITHIN
        query = b"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s"
        while self._connection.execute(query, [name]).fetchone() != (0,):
            assert time.monotonic() < end, f"backends of {name} do not end"
            time.sleep(0.002)

    def _drop(self) -> None:
        self._url = None
        self._stack.close()

    def close(self) -> None:
        """Drop what there is."""
        self._drop()
        self._connection.close()


@pytest.fixture(scope="session")
def databases(postgres: str) -> Generator[Databases, None, None]:
    """The databases of this process."""
    made = Databases(postgres)
    yield made
    made.close()


@pytest.fixture
def database(databases: Databases) -> Generator[str, None, None]:
    """The URL of an empty database; what a test leaves in it is gone behind the test."""
    with databases.one() as url:
        yield url


@pytest.fixture(scope="session")
def pooler(postgres: str) -> Generator[str, None, None]:
    """The URL of a pgbouncer in front of that server, in transaction mode.

    Where it cannot be had that is a skip, and under `--require postgres` a failure: Debian stable has it.
    """
    with ExitStack() as stack:
        try:
            url = stack.enter_context(pgbouncer(postgres, **TURNS))
        except NotHere as why:
            pytest.skip(str(why))
        yield url


def through(pooler: str, database: str) -> str:
    """The database, through the pooler."""
    return urlunsplit(urlsplit(database)._replace(netloc=urlsplit(pooler).netloc))


@pytest.fixture
def pooled(pooler: str, database: str) -> str:
    """The URL of `database` through a pooler: two transactions of one connection may be in two sessions."""
    return through(pooler, database)
