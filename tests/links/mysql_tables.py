"""Queue tables on MariaDB and MySQL for the tests: the shapes of tests/links/sqlite_kit.py, in a database each."""

from __future__ import annotations

from typing import Any, Self

import attrs
from pymysql.cursors import DictCursor

from links.sql import SqlBroker, Table
from tests.links.mysql_kit import connect, run

__all__ = ["MysqlTables"]


@attrs.define
class MysqlTables:
    """`url`: of the database. `counts`: with an attempt column; so `grouped`, `marks` (processed_at), `leased`.

    `stamps`: times are TIMESTAMP, not DATETIME.
    """

    url: str
    counts: bool = True
    grouped: bool = False
    marks: bool = False
    leased: bool = True
    stamps: bool = False

    def create(self) -> Self:
        time = "TIMESTAMP(6)" if self.stamps else "DATETIME(6)"
        columns = [
            "id BIGINT AUTO_INCREMENT PRIMARY KEY",
            "payload LONGBLOB",
            "headers JSON",
            "lane VARCHAR(100)",
            f"retry_after {time} NOT NULL DEFAULT '2000-01-01'",
            *([f"locked_until {time} NULL"] if self.leased else []),
            *(["attempt INT NOT NULL DEFAULT 1"] if self.counts else []),
            *(["grp VARCHAR(100) COLLATE utf8mb4_bin"] if self.grouped else []),
            *([f"processed_at {time} NULL"] if self.marks else []),
        ]
        due = ", ".join([*(["grp"] if self.grouped else []), *(["processed_at"] if self.marks else []), "retry_after"])
        self.run(f"CREATE TABLE jobs ({', '.join(columns)}, INDEX due ({due}))")
        self.run(f"CREATE TABLE dead ({', '.join(columns)})")
        return self

    def table(self, name: str = "jobs", **roles: Any) -> Table[bytes]:
        given: dict[str, Any] = {
            "headers": "headers",
            "partition_key": "lane",
            "retry_after": "retry_after",
            "locked_until": "locked_until" if self.leased else None,
            "attempt": "attempt" if self.counts else None,
            "group": "grp" if self.grouped else None,
            "processed_at": "processed_at" if self.marks else None,
            "generated": ["id"],
            **roles,
        }
        return Table(name, id="id", payload="payload", **given)

    def broker(self, poll_interval: float = 0.05) -> SqlBroker:
        return SqlBroker(self.url, poll_interval=poll_interval)

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement of somebody else, in autocommit; its rows, where it gives some."""
        return run(self.url, statement, *values)

    def add(self, *payloads: bytes, group: str | None = None) -> None:
        for payload in payloads:
            if group is None:
                self.run("INSERT INTO jobs (payload) VALUES (%s)", payload)
            else:
                self.run("INSERT INTO jobs (payload, grp) VALUES (%s, %s)", payload, group)

    def add_to(self, table: str, **values: Any) -> None:
        columns, places = ", ".join(values), ", ".join(["%s"] * len(values))
        self.run(f"INSERT INTO {table} ({columns}) VALUES ({places})", *values.values())  # noqa: S608

    def rows(self, table: str = "jobs") -> list[dict[str, Any]]:
        with connect(self.url, cursorclass=DictCursor) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table} ORDER BY id")  # noqa: S608
            found: Any = cursor.fetchall()
            return list(found)

    def row(self, table: str = "jobs") -> dict[str, Any]:
        (row,) = self.rows(table)
        return row
