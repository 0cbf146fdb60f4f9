"""The database that tests are given, one after the other: nothing of one is left for the next."""

from __future__ import annotations

from collections.abc import Generator

import psycopg
import pytest

from tests.links.postgres_kit import Databases
from tests.links.postgres_tables import PostgresTables

pytestmark = [pytest.mark.postgres, pytest.mark.servers]

REUSED = {
    "a table": "CREATE TABLE jobs (id serial PRIMARY KEY, body text)",
    "a view, a type and a function": (
        "CREATE TYPE mood AS ENUM ('ok'); CREATE VIEW v AS SELECT 'ok'::mood AS m; "
        "CREATE FUNCTION f() RETURNS mood LANGUAGE sql AS $$ SELECT m FROM v $$"
    ),
    "a right on the schema": "GRANT CREATE ON SCHEMA public TO PUBLIC",
    "no schema": "DROP SCHEMA public",
}
REPLACED = {
    "a setting": 'ALTER DATABASE "{name}" SET work_mem = 12345',
    "a setting of a role": 'ALTER ROLE postgres IN DATABASE "{name}" SET work_mem = 12345',
    "no writes": 'ALTER DATABASE "{name}" SET default_transaction_read_only = on',
    "no time": "ALTER DATABASE \"{name}\" SET statement_timeout = '1ms'",
    "nobody let in": 'ALTER DATABASE "{name}" ALLOW_CONNECTIONS off',
    "a limit": 'ALTER DATABASE "{name}" CONNECTION LIMIT 3',
    "a right": 'REVOKE CONNECT ON DATABASE "{name}" FROM PUBLIC',
    "an extension": "CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext",
    "a schema": "CREATE SCHEMA app",
    "an event trigger": (
        "CREATE FUNCTION public.f() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN END $$; "
        "CREATE SCHEMA app; ALTER FUNCTION public.f SET SCHEMA app; "
        "CREATE EVENT TRIGGER t ON ddl_command_start EXECUTE FUNCTION app.f()"
    ),
    "a large object": "SELECT lo_from_bytea(0, 'a')",
    "a default right": "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC",
    "a wrapper": "CREATE FOREIGN DATA WRAPPER w",
}
LOOKS = (
    "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace",
    "SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
    "SELECT current_setting('work_mem'), current_setting('statement_timeout')",
    "SELECT count(*) FROM pg_largeobject_metadata",
    "SELECT count(*) FROM pg_namespace WHERE oid >= 16384 AND nspname <> 'public'",
    "SELECT array_agg(extname) FROM pg_extension",
    "SELECT nspacl::text FROM pg_namespace WHERE nspname = 'public'",
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
)


@pytest.fixture
def mine(postgres: str) -> Generator[Databases, None, None]:
    made = Databases(postgres)
    yield made
    made.close()


def seen(url: str) -> list[object]:
    """What a test could notice."""
    tables = PostgresTables(url)
    return [tables.run(look) for look in LOOKS]


@pytest.mark.parametrize("what", [*REUSED, *REPLACED])
def test_nothing_is_left_for_the_next_one(what: str, mine: Databases, postgres: str) -> None:
    """What can be cleaned is, and the database is the same; of the rest nothing is kept, the database included."""
    with mine.one() as first:
        before = seen(first)
        for statement in (REUSED | REPLACED)[what].format(name=first.rpartition("/")[2]).split("; "):
            PostgresTables(postgres if statement.startswith("ALTER DATABASE") else first).run(statement)
    with mine.one() as second:
        assert seen(second) == before
        assert (second == first) == (what in REUSED)


def test_whoever_is_still_there_is_ended(mine: Databases) -> None:
    """Also one that holds a lock on what is to be dropped."""
    with mine.one() as first:
        PostgresTables(first).run("CREATE TABLE jobs ()")
        left = psycopg.connect(first)
        left.execute(b"LOCK TABLE jobs")
    with pytest.raises(psycopg.OperationalError):
        left.execute(b"SELECT 1")
    left.close()
    with mine.one() as second:
        assert (second, seen(second)[-1]) == (first, [(0,)])


def test_a_test_may_drop_it(mine: Databases, postgres: str) -> None:
    with mine.one() as first:
        PostgresTables(postgres).run(f'DROP DATABASE "{first.rpartition("/")[2]}"')
    with mine.one() as second:
        assert second != first
