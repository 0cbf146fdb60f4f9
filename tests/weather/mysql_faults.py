"""Faults between `links.sql` and a MySQL or MariaDB, and what the database itself writes down of each row.

`faulty_connections` lets a connection to a watched database break before a message that writes, amid it or behind it,
when its answer is lost; what was ordered by `Faults.order` befalls the next one that it fits. Everything else befalls
on the server: tests/weather/mysql_world.py. A broker of ours is told from a thief by its user, one connection from
another by its number.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pymysql
import pytest

from links.sql.mysql.session import MysqlSession

__all__ = ["FAULTS", "OURS", "PINNED", "QUIET", "Faults", "audit", "faulty_connections"]

FAULTS = ("sever", "cut_amid", "lose_answer", "lose_verdict", "deadlock")
PINNED = (*FAULTS, "kill_before_commit", "kill_behind_commit", "kill_amid")
"""Those of forms that hold a connection: it may be killed amid what it is told."""
OURS = "life"
"""The user of a broker under test."""

QUIET = ["CREATE TABLE notes (number INT, id BIGINT)"]
"""Of a table without triggers, of which nothing is written down. `notes` is for handlers."""

_TABLE = """CREATE TABLE audit (
    n BIGINT AUTO_INCREMENT PRIMARY KEY, what VARCHAR(20), id BIGINT, attempt INT, payload LONGBLOB,
    pid BIGINT, at DOUBLE
)"""
_WRITES = re.compile(r"SKIP LOCKED|^UPDATE |^DELETE FROM |\bCOMMIT$|GET_LOCK")
_FINISHES = re.compile(r"^DELETE FROM |`processed_at` = ")


def audit(*, grouped: bool, marks: bool, leased: bool) -> list[str]:
    """What becomes of each row, in the test's own table: rows are only added, so nobody waits there for anybody.

    `pid` is a connection's number; a thief's is 0.
    """
    note = (
        "INSERT INTO audit (what, id, attempt, payload, pid, at) VALUES ('{what}', {row}.id, {count}.attempt, "  # noqa: S608 -- the test's own words
        f"{{row}}.payload, IF(USER() LIKE '{OURS}@%', CONNECTION_ID(), 0), UNIX_TIMESTAMP(NOW(6)));"
    )
    told = {what: note.format(what=what, row="NEW", count="NEW") for what in ("claimed", "gone", "buried", "freed")}
    gone = note.format(what="gone", row="OLD", count="OLD")
    restored = note.format(what="restored", row="NEW", count="OLD")
    written = [
        f"IF NEW.attempt < OLD.attempt THEN {restored} END IF;",
        f"IF NEW.attempt > OLD.attempt THEN {told['claimed']} END IF;",
        *([f"IF NEW.processed_at IS NOT NULL AND OLD.processed_at IS NULL THEN {told['gone']} END IF;"] * marks),
        *([f"IF NOT (NEW.grp <=> OLD.grp) THEN {told['gone']} {told['buried']} END IF;"] * grouped),
        *([f"IF NEW.locked_until IS NULL THEN {told['freed']} END IF;"] * leased),
    ]
    return [
        *QUIET,
        _TABLE,
        f"CREATE TRIGGER gone AFTER DELETE ON jobs FOR EACH ROW BEGIN {gone} END",
        f"CREATE TRIGGER buried AFTER INSERT ON dead FOR EACH ROW BEGIN {told['buried']} END",
        f"CREATE TRIGGER written AFTER UPDATE ON jobs FOR EACH ROW BEGIN {' '.join(written)} END",
    ]


class Faults:
    """What shall befall the connections to one database. Used in trio and in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ordered: list[str] = []
        self.happened: list[str] = []
        self.broken: set[int] = set()
        """Connections that broke, or were rolled back: what they have claimed last may be known to nobody."""

    def order(self, name: str) -> None:
        """Let this befall the next message that it fits."""
        with self._lock:
            self._ordered.append(name)

    def clear(self) -> None:
        """Fair weather."""
        with self._lock:
            self._ordered.clear()

    def befalls(self, name: str) -> bool:
        """Does it happen now?"""
        with self._lock:
            if name not in self._ordered:
                return False
            self._ordered.remove(name)
            self.happened.append(name)
            return True


def _fatal(texts: Sequence[str], number: int, faults: Faults) -> Sequence[str]:
    """The same statements, with the server's end of the connection among them, where that is due."""
    kill = f"KILL {number}"
    if "COMMIT" in texts:
        at = texts.index("COMMIT")
        if faults.befalls("kill_before_commit"):
            return [*texts[:at], kill, *texts[at:]]
        if faults.befalls("kill_behind_commit"):
            return [*texts[: at + 1], kill, *texts[at + 1 :]]
    return [*texts, kill] if faults.befalls("kill_amid") else texts


@contextmanager
def faulty_connections(watched: Mapping[str, Faults]) -> Generator[None, None, None]:
    """Inside, connections of `links.sql` to these databases, by name, have faults."""
    say: Any = MysqlSession.say
    execute: Any = MysqlSession.execute

    def faults_of(session: MysqlSession) -> Faults | None:
        return watched.get(session.server.database) if hasattr(session, "server") and not session.closed else None

    def lost(session: MysqlSession, faults: Faults) -> pymysql.OperationalError:
        faults.broken.add(session.server.number)
        session.close()
        return pymysql.OperationalError(2013, "the answer was lost (by the test)")

    def undone(session: MysqlSession, faults: Faults) -> pymysql.OperationalError:
        """As a deadlock's victim is."""
        faults.broken.add(session.server.number)
        say(session, "ROLLBACK")
        session.done = 0
        return pymysql.OperationalError(1213, "deadlock (by the test)")

    def shut(session: MysqlSession, faults: Faults, how: int) -> None:
        faults.broken.add(session.server.number)
        session.socket.shutdown(how)

    def saying(session: MysqlSession, *texts: str) -> Any:
        faults = faults_of(session)
        if faults is None or texts[0].startswith("EXPLAIN") or not any(map(_WRITES.search, texts)):
            return say(session, *texts)
        number = session.server.number
        if faults.befalls("sever"):
            shut(session, faults, socket.SHUT_RDWR)
        elif faults.befalls("cut_amid"):  # the server hears it, and may still be at it while others go on
            shut(session, faults, socket.SHUT_RD)
        elif faults.befalls("deadlock"):
            raise undone(session, faults)
        told = _fatal(texts, number, faults)
        if told is not texts:
            faults.broken.add(number)
        answers = say(session, *told)
        finishes = "COMMIT" in texts and any(map(_FINISHES.search, texts))
        if faults.befalls("lose_answer") or (finishes and faults.befalls("lose_verdict")):
            raise lost(session, faults)
        return answers

    def executing(session: MysqlSession, *arguments: Any) -> Any:
        faults = faults_of(session)
        if faults is not None and faults.befalls("deadlock"):
            raise undone(session, faults)
        return execute(session, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MysqlSession, "say", saying)
        patch.setattr(MysqlSession, "execute", executing)
        yield
