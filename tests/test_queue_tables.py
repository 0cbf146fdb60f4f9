"""docs/queue-tables.md: its program runs, its SQL is what `Table.ddl` gives, and a link attaches without a word."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from links.sql import AdvisoryLock, SqlBroker
from settlement import Policy
from tests.links.postgres_tables import PostgresTables
from tests.links.sqlite_kit import attached

PAGE = (Path(__file__).parent.parent / "docs" / "queue-tables.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def normal(sql: str) -> str:
    return " ".join(re.sub(r"--.*", "", sql).split())


@pytest.mark.sqlite
async def test_the_page_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The Python block prints the first SQL block; its tables attach, with a dead letter, without a warning."""
    names: dict[str, Any] = {}
    (program, _), (sql, _) = blocks("python"), blocks("sql")
    exec(program, names)  # noqa: S102 -- our own page
    assert normal(capsys.readouterr().out) == normal(sql)
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(sql)
    queue = SqlBroker(f"sqlite:///{path}").queue(names["ORDERS"])
    async with queue.broker.connect(), attached(queue, policy=Policy(max_attempts=3, dead_letter="dead_orders")):
        pass
    assert caplog.records == []


@pytest.mark.postgres
@pytest.mark.servers
async def test_the_page_is_true_of_postgresql(database: str, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The second SQL block is what `ddl("postgresql")` gives, also a second time; a link attaches without a warning."""
    names: dict[str, Any] = {}
    (program, _), (_, sql) = blocks("python"), blocks("sql")
    exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    assert normal(names["ORDERS"].ddl("postgresql")) == normal(sql)
    tables = PostgresTables(database)
    for _ in range(2):
        tables.run(names["ORDERS"].ddl("postgresql"))
    queue = tables.broker().queue(names["ORDERS"])
    async with queue.broker.connect(), attached(queue, policy=Policy(max_attempts=3, dead_letter="dead_orders")):
        pass
    assert caplog.records == []


@pytest.mark.sqlite
async def test_the_fifo_table_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """Its own ddl attaches without a warning; what the page says is refused is refused."""
    names: dict[str, Any] = {}
    for program in blocks("python"):
        exec(program, names)  # noqa: S102 -- our own page
    capsys.readouterr()
    path = tmp_path / "q.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(names["LEDGERS"].ddl("sqlite"))
    broker = SqlBroker(f"sqlite:///{path}")
    async with broker.connect(), attached(broker.queue(names["LEDGERS"], group="alice")):
        pass
    assert caplog.records == []
    with pytest.raises(ValueError, match="limit must be 1"):
        broker.queue(names["LEDGERS"], group="alice", limit=2)
    with pytest.raises(ValueError, match="put the group into the key"):
        broker.queue(names["LEDGERS"], group="alice", claim=AdvisoryLock("alice"))
