"""Faults between `links.sql` and a PostgreSQL, and what the database itself writes down of each row.

`faulty_connections` lets a connection to a watched database break before a statement that writes, or behind it, when
its answer is lost; what was ordered by `Faults.order` befalls the next one that it fits. Everything else befalls on the
server: tests/weather/test_weather_postgres.py. A broker of ours is told from a thief by its application_name, one
connection from another by its backend's process.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
import pytest
from psycopg import AsyncClientCursor
from psycopg.pq import PipelineStatus

from links.sql.postgres.trio_connection import TrioConnection

__all__ = ["AUDIT", "COMMITS", "FAULTS", "OURS", "PINNED", "QUIET", "Faults", "faulty_connections"]

FAULTS = ("sever", "lose_answer", "lose_verdict", "deadlock")
PINNED = ("sever", "lose_answer", "lose_verdict", "end_before_commit", "end_behind_commit", "end_amid")
"""Those of forms that hold a connection: the server may end it amid what it is told."""
_HELD = b"WITH held"
"""So begins a settlement, an extension or a release."""
OURS = "life"
"""How the application_name of a broker under test begins."""

QUIET = """
CREATE TABLE notes (call integer, id bigint, tx text DEFAULT pg_current_xact_id()::text);
CREATE FUNCTION closed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'closed'; END $$;
"""
"""Of a table without triggers, of which nothing is written down. `notes` is for handlers; `closed` for a trigger that
the weather makes."""

AUDIT = (
    QUIET  # noqa: S608 -- the test's own words
    + """
CREATE TABLE audit (
    what text, id bigint, attempt integer, payload bytea, tx text DEFAULT pg_current_xact_id()::text
);
CREATE TABLE claims (
    n bigint GENERATED ALWAYS AS IDENTITY, id bigint, attempt integer, pid integer, at timestamptz,
    tx text DEFAULT pg_current_xact_id()::text
);
CREATE TABLE holders (id bigint PRIMARY KEY, who text, pid integer);
CREATE TABLE most (pid integer PRIMARY KEY, n bigint);

CREATE FUNCTION gone() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit VALUES ('gone', OLD.id, OLD.attempt, OLD.payload);
    DELETE FROM holders WHERE id = OLD.id;
    RETURN NULL;
END $$;
CREATE TRIGGER gone AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION gone();

CREATE FUNCTION buried() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit VALUES ('buried', NEW.id, NEW.attempt, NEW.payload);
    RETURN NULL;
END $$;
CREATE TRIGGER buried AFTER INSERT ON dead FOR EACH ROW EXECUTE FUNCTION buried();

CREATE FUNCTION written() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    who text := current_setting('application_name');
    before jsonb := to_jsonb(OLD);
    after jsonb := to_jsonb(NEW);
BEGIN
    IF NEW.attempt < OLD.attempt THEN
        INSERT INTO audit VALUES ('restored', NEW.id, OLD.attempt, NEW.payload);
    ELSIF NEW.attempt > OLD.attempt AND who LIKE 'life%' THEN
        INSERT INTO claims (id, attempt, pid, at) VALUES (NEW.id, NEW.attempt, pg_backend_pid(), clock_timestamp());
    END IF;
    IF after->>'processed_at' IS NOT NULL AND before->>'processed_at' IS NULL THEN
        INSERT INTO audit VALUES ('gone', NEW.id, NEW.attempt, NEW.payload);
    END IF;
    IF after->>'grp' IS DISTINCT FROM before->>'grp' THEN
        INSERT INTO audit VALUES ('gone', NEW.id, NEW.attempt, NEW.payload);
        INSERT INTO audit VALUES ('buried', NEW.id, NEW.attempt, NEW.payload);
    END IF;
    IF after->>'locked_until' IS NULL THEN
        DELETE FROM holders WHERE id = NEW.id;
    ELSE
        INSERT INTO holders VALUES (NEW.id, who, pg_backend_pid())
        ON CONFLICT (id) DO UPDATE SET who = EXCLUDED.who, pid = EXCLUDED.pid;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER written AFTER UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION written();

CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF current_setting('application_name') LIKE 'life%' THEN
        INSERT INTO most SELECT pg_backend_pid(), count(*) FROM holders WHERE pid = pg_backend_pid()
        ON CONFLICT (pid) DO UPDATE SET n = GREATEST(most.n, EXCLUDED.n);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER counted AFTER UPDATE ON jobs FOR EACH STATEMENT EXECUTE FUNCTION counted();
"""
)
"""What becomes of each row, in the test's own tables."""

COMMITS = """
CREATE SEQUENCE refusals MINVALUE -9 START 1;
CREATE FUNCTION refused() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('refusals') <= 0 THEN RAISE 'refused'; END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER refused AFTER UPDATE OR DELETE ON jobs DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION refused();
"""
"""COMMIT can be refused: `SELECT setval('refusals', -2)` refuses two writes."""


class Faults:
    """What shall befall the connections to one database. Used in trio and in threads: each step is one of Python's."""

    def __init__(self) -> None:
        self._ordered: list[str] = []
        self.happened: list[str] = []
        self.broken: set[int] = set()
        """Backends whose connection broke: what they have claimed last may be known to nobody."""

    def order(self, name: str) -> None:
        """Let this befall the next statement that it fits."""
        self._ordered.append(name)

    def clear(self) -> None:
        """Fair weather."""
        self._ordered.clear()

    def befalls(self, name: str) -> bool:
        """Does it happen now?"""
        if name not in self._ordered:
            return False
        self._ordered.remove(name)
        self.happened.append(name)
        return True


def _writes(query: object) -> bool:
    """A claim or a settlement of ours: each begins with what it may touch."""
    return isinstance(query, bytes) and query.startswith((b"WITH due", _HELD))


_COMMIT = re.compile(rb"\bCOMMIT\b")


def _commits(query: bytes) -> bool:
    return _COMMIT.search(query) is not None


_END = b"SELECT pg_terminate_backend(pg_backend_pid())"


def _fatal(query: bytes, faults: Faults) -> bytes:
    """The same statements, with the server's end of the connection among them, where that is due."""
    if _commits(query):
        if faults.befalls("end_before_commit"):
            return _COMMIT.sub(_END + b"; COMMIT", query)
        if faults.befalls("end_behind_commit"):
            return _COMMIT.sub(b"COMMIT; " + _END, query)
    return query + b"; " + _END if faults.befalls("end_amid") else query


def _finishes(query: bytes) -> bool:
    return query.startswith(_HELD) and (b"DELETE" in query or b"processed_at" in query)


@contextmanager
def faulty_connections(watched: Mapping[str, Faults]) -> Generator[None, None, None]:
    """Inside, connections of `links.sql` to these databases, by name, have faults."""
    execute: Any = TrioConnection.execute
    pipeline: Any = TrioConnection.pipeline
    send: Any = AsyncClientCursor.execute
    finishing: WeakKeyDictionary[TrioConnection, bool] = WeakKeyDictionary()
    """In the pipeline of this connection, is there something that finishes?"""

    def breaks(connection: TrioConnection, faults: Faults, what: str) -> psycopg.OperationalError:
        faults.broken.add(connection.info.backend_pid)
        connection.finish()
        return psycopg.OperationalError(f"{what} (by the test)")

    @asynccontextmanager
    async def pipelining(connection: TrioConnection) -> AsyncGenerator[Any, None]:
        async with pipeline(connection) as made:
            yield made
        faults = watched.get(connection.info.dbname)
        finishes = finishing.pop(connection, False)
        if faults and (faults.befalls("lose_answer") or (finishes and faults.befalls("lose_verdict"))):
            raise breaks(connection, faults, "the answers were lost")

    async def executing(connection: TrioConnection, query: Any, *arguments: Any, **options: Any) -> Any:
        faults = None if connection.closed else watched.get(connection.info.dbname)
        if faults is None or not _writes(query):
            return await execute(connection, query, *arguments, **options)
        if faults.befalls("sever"):
            raise breaks(connection, faults, "severed")
        if faults.befalls("deadlock"):
            raise psycopg.errors.DeadlockDetected("deadlock (by the test)")
        cursor = await execute(connection, query, *arguments, **options)
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:  # nothing is answered before its end
            finishing[connection] = _finishes(query) or finishing.get(connection, False)
            return cursor
        if faults.befalls("lose_answer") or (_finishes(query) and faults.befalls("lose_verdict")):
            raise breaks(connection, faults, "the answer was lost")
        return cursor

    async def sending(cursor: Any, query: bytes, *arguments: Any, **options: Any) -> Any:
        """As the forms that hold a connection do it."""
        connection = cursor.connection
        faults = None if connection.closed else watched.get(connection.info.dbname)
        if faults is None:
            return await send(cursor, query, *arguments, **options)
        if faults.befalls("sever"):
            raise breaks(connection, faults, "severed")
        pid = connection.info.backend_pid
        try:
            answer = await send(cursor, _fatal(query, faults), *arguments, **options)
        except psycopg.Error:
            if connection.closed:
                faults.broken.add(pid)
            raise
        if faults.befalls("lose_answer") or (_commits(query) and faults.befalls("lose_verdict")):
            raise breaks(connection, faults, "the answer was lost")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncClientCursor, "execute", sending)
        patch.setattr(TrioConnection, "execute", executing)
        patch.setattr(TrioConnection, "pipeline", pipelining)
        yield
