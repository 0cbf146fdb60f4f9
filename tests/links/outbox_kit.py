"""What the tests of the outbox stand on: a record table on any database, looked at by somebody else."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
import trio

from links.abc import Publisher
from links.memory import MemoryBroker
from links.sql import OUTBOX_ID, Outbox, OutboxTable, SqlBroker
from settlement import Delivery
from settlement.delivery import Letter
from tests.links.mysql_kit import connect
from tests.servers.mysql import KINDS

__all__ = ["BOTH", "RECORDS", "RecordTables", "Sent", "a_delivery", "answering", "made"]

BOTH = [
    pytest.param("sqlite", marks=pytest.mark.sqlite),
    pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.servers]),
    pytest.param("mariadb", marks=[pytest.mark.mysql, pytest.mark.servers]),
    pytest.param("mysql", marks=[pytest.mark.mysql, pytest.mark.servers]),
]
"""Parameters of a test."""

RECORDS = OutboxTable(
    "outbox",
    id="id",
    name="name",
    payload="payload",
    sent_at="sent_at",
    headers="headers",
    partition_key="lane",
    processed_at="processed_at",
)


@attrs.frozen
class RecordTables:
    """`url`: of a database, whose file exists."""

    url: str

    @property
    def lite(self) -> bool:
        return self.url.startswith("sqlite")

    def broker(self) -> SqlBroker:
        return SqlBroker(self.url)

    def outbox(self, table: OutboxTable = RECORDS, **how: Any) -> Outbox:
        """On a broker of its own: as another instance has it."""
        return Outbox(table, self.broker(), **how)

    @contextmanager
    def connection(self) -> Generator[Any, None, None]:
        """The user's own, in a transaction that commits at the block's end."""
        if self.lite:
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=5.0)) as lite, lite:
                yield lite
        elif self.mysql:
            with connect(self.url, autocommit=False) as mysql:
                yield mysql
                mysql.commit()
        else:
            with psycopg.connect(self.url) as connection:
                yield connection

    @property
    def mysql(self) -> bool:
        """Or MariaDB."""
        return self.url.partition(":")[0] in KINDS

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Each in a transaction of its own; the rows of the last one, where it gives some."""
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            with self.connection() as connection:
                cursor = connection.cursor()
                cursor.execute(statement)
                rows = list(cursor.fetchall()) if cursor.description else []
        return rows

    def create(self, table: OutboxTable = RECORDS) -> RecordTables:
        text = "\n".join(line for line in self.outbox(table).ddl().splitlines() if not line.strip().startswith("--"))
        self.run(*filter(str.strip, text.split(";")))
        return self

    def age(self) -> None:
        """All records are old."""
        when = "1000000000" if self.lite else "'2001-09-09 01:46:40'"
        self.run(f"UPDATE outbox SET sent_at = {when}")  # noqa: S608 -- our own

    def rows(self) -> list[tuple[Any, ...]]:
        """Id, name, payload, whether it is processed."""
        found = self.run("SELECT id, name, payload, processed_at IS NOT NULL FROM outbox ORDER BY id")
        return [(key, name, bytes(payload), bool(done)) for key, name, payload, done in found]


def made(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> RecordTables:
    """An empty database of this dialect."""
    if dialect == "postgresql":
        return RecordTables(request.getfixturevalue("database"))
    if dialect in KINDS:
        return RecordTables(request.getfixturevalue("mysql_databases")(dialect))
    path = tmp_path / "o.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    return RecordTables(f"sqlite:///{path}")


class Sent(Publisher):
    """Keeps what is sent; refuses or breaks where it is told to."""

    def __init__(self, name: str = "orders") -> None:
        self.broker, self.name = MemoryBroker(), name
        self.letters: list[Letter] = []
        self.fail: Callable[[Letter], Exception | None] = lambda _: None
        self.pause = 0.0

    async def send(self, letter: Letter) -> None:
        await trio.sleep(self.pause)
        error = self.fail(letter)
        if error is not None:
            raise error
        self.letters.append(letter)

    @property
    def ids(self) -> list[int]:
        return [int(letter.headers[OUTBOX_ID]) for letter in self.letters]

    @property
    def bodies(self) -> list[bytes]:
        return [letter.body for letter in self.letters]


def answering(*outcomes: Any) -> Any:
    """A handler that answers so, one after the other; `calls` counts."""
    left = list(outcomes)

    async def handler(delivery: Delivery[bytes]) -> Any:
        handler.calls.append(delivery.body)  # type: ignore[attr-defined]
        await trio.lowlevel.checkpoint()
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    handler.calls = []  # type: ignore[attr-defined]
    return handler


def a_delivery(key: int | bytes | None, source: str = "orders") -> Delivery[bytes]:
    value = key if isinstance(key, bytes) else str(key).encode()
    headers = {} if key is None else {OUTBOX_ID: value}
    return Delivery(
        body=b"a", message=b"a", headers=headers, attempt=1, redelivery_count=None, source=source, id="1", key=None
    )
