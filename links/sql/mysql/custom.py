"""Statements of the user's own on MySQL and MariaDB, in place of a claim's and an extension's. Runs in a thread.

Each runs in a transaction that is open already, and our own look at the rows follows in the same one: so what the
statement gave is worked on only where this transaction holds it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pymysql

from links.errors import CallBroken
from links.sql.custom import fetched, ids_of, ours_of
from links.sql.jobs import Passing
from links.sql.mysql.codes import first_line, is_again, is_reshaped
from links.sql.mysql.session import MysqlSession, Raw, text_of
from links.sql.rows import Row, Token

__all__ = ["asked", "claimed", "leased_again", "values_of"]

_PART: Final = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `[^`]*` | --\s[^\n]* | \#[^\n]* | /\*.*?\*/
    | :(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)
"""Texts, quoted names and comments, in which a colon is no name's; and names."""
_SAID: Final = {"now": Raw("UTC_TIMESTAMP(6)")}
"""A name that is more than bound: the time is the server's, when the statement runs."""


def values_of(text: str, values: Mapping[str, Any]) -> str:
    """The statement with its values in it. Pure. Raises `ValueError` for a value that has no form."""
    given = {**values, **_SAID}

    def said(part: re.Match[str]) -> str:
        name = part["name"]
        return part[0] if name is None or name not in given else text_of(given[name])

    return _PART.sub(said, text)


def asked(
    session: MysqlSession, event: str, text: str, values: Mapping[str, Any]
) -> tuple[Sequence[str], Sequence[tuple[Any, ...]]]:
    """Carry out the statement for this event: the names of its columns, and its rows; of one that gives none, neither.

    Raises `CallBroken`, and `pymysql.MySQLError` for what is tried again.
    """
    try:
        answers = session.say(values_of(text, values))
    except (pymysql.MySQLError, ValueError) as error:
        if session.closed or is_again(error) or is_reshaped(error):
            raise
        raise CallBroken(f"the statement for {event!r}: {first_line(error)}") from error
    for answer in answers:  # of a CALL: what it selects, then that it is done
        if answer.columns:
            return answer.columns, answer.rows
    return (), ()


_UNTIL: Final = "SELECT CAST(UTC_TIMESTAMP(6) + INTERVAL %(lease)s MICROSECOND AS CHAR)"


def claimed(form: Any, session: MysqlSession, room: int, passing: Passing) -> list[Row]:
    """By a transaction of its own: the rows that the statement for claim has leased, as that for fetch gives them.

    `form`: a `MysqlLease`. Raises `CallBroken`, and `pymysql.MySQLError` for what is tried again.
    """
    _, end = session.say("START TRANSACTION", form.text(_UNTIL, lease=int(form.lease * 1_000_000)))
    until = str(end.rows[0][0])
    names, found = asked(session, "claim", form.own["claim"], {"group": form.group, "room": room, "until": until})
    if not names:
        raise CallBroken("the statement for 'claim' gives no rows, and must give ids")
    ids = ids_of(found, room)
    passing.complete = len(ids) < room
    looked: list[Row] = []
    if ids:
        (chosen,) = session.say(form.text(form.texts.chosen, ids=ids))
        places = {key: place for place, key in enumerate(ids)}
        there = [row for row in chosen.rows if row[1] == until and row[2] in places]
        looked = sorted(((places[row[2]], row[0], *_row(form, row)) for row in there), key=lambda each: int(each[0]))
    rows = ours_of(ids, looked, passing, "not there, or not leased until :until")
    if "fetch" in form.own:
        rows = [_fetched(form, session, row) for row in rows]
    session.say("COMMIT")
    return rows


def _row(form: Any, row: Sequence[Any]) -> Row:
    """As the statement has left it; in row mode it is as it was before the claim."""
    made: Row = form.row(row[2:], row[1])
    if form.table.payload is None and form.table.attempt is not None and "fetch" not in form.own:
        made[6][form.schema[form.table.attempt].name] = None if made[2] is None else made[2] - 1
    return made


def _fetched(form: Any, session: MysqlSession, row: Row) -> Row:
    values = {"id": row[0], "group": form.group}
    return fetched(form.table, row, *asked(session, "fetch", form.own["fetch"], values))


def leased_again(form: Any, session: MysqlSession, tokens: Sequence[Token], until: str) -> set[Token]:
    """Those that the statement for extend has leased until then, in the transaction that is open; else it is undone."""
    done: set[Token] = set()
    for token in tokens:
        key, expiry, attempt = token
        names = {"id": key, "token": expiry, "attempt": attempt, "group": form.group, "until": until}
        session.say("SAVEPOINT extending")
        session.say(values_of(form.own["extend"], names))
        (read,) = session.say(form.text(form.texts.read, ids=[key]))
        if any(row[:3] == (key, until, attempt) for row in read.rows):
            done.add(token)
        else:
            session.say("ROLLBACK TO SAVEPOINT extending")
    return done
