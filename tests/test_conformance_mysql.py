"""The conformance suite of `links.testing` on queue tables of MariaDB and MySQL."""

from __future__ import annotations

from functools import partial

import attrs
import pytest

from links.abc import Broker, Settles
from links.sql import AdvisoryLock, Lease, RowLock, SqlBroker, SqlPublisher, SqlQueue, Table
from links.testing import CHECKS, Capabilities, Caps, Check, Harness
from tests.links.mysql_kit import run

pytestmark = [pytest.mark.mysql, pytest.mark.servers]


@attrs.define
class MysqlHarness(Harness):
    """Queues in one database: a table each, or a group each of one table."""

    url: str
    grouped: bool = False
    bare: bool = False
    """Without the columns that may be left out: nothing counts, no delay is kept."""
    marks: bool = False
    """Finished rows stay."""
    stamps: bool = False
    """Times are TIMESTAMP, not DATETIME."""
    locks: bool = False
    """No lease: row locks."""
    keyed: bool = False
    """No lease: advisory locks."""
    capabilities: Capabilities = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        can = Capabilities(lease=1.0, caps=Caps.BOTH, twice=False)
        if self.locks or self.keyed:
            can = attrs.evolve(can, lease=None, settles=Settles.ALONE)
        if self.bare:
            can = attrs.evolve(can, caps=Caps.NONE, counts=False, counts_redeliveries=False, delays=False)
        self.capabilities = can

    def table(self, name: str) -> Table[bytes]:
        return Table(
            "queues" if self.grouped else name,
            id="id",
            payload="body",
            headers="headers",
            partition_key="lane",
            locked_until=None if self.locks or self.keyed else "lease",
            group="name" if self.grouped else None,
            attempt=None if self.bare else "attempt",
            retry_after=None if self.bare else "due",
            processed_at="done" if self.marks else None,
        )

    async def prepare(self, name: str) -> None:
        time = "TIMESTAMP(6)" if self.stamps else "DATETIME(6)"
        now = "CURRENT_TIMESTAMP(6)" if self.stamps else "(UTC_TIMESTAMP(6))"
        columns = [
            "id BIGINT AUTO_INCREMENT PRIMARY KEY",
            "name VARCHAR(100) COLLATE utf8mb4_bin",
            "body LONGBLOB",
            "headers JSON",
            "lane VARCHAR(100)",
            f"lease {time} NULL",
        ]
        if not self.bare:
            columns += ["attempt INT NOT NULL DEFAULT 1", f"due {time} NOT NULL DEFAULT {now}"]
        if self.marks:
            columns += [f"done {time} NULL", "INDEX (name, done, due, id)"]
        elif not self.bare:
            columns += ["INDEX (due, id)"]
        run(self.url, f"CREATE TABLE IF NOT EXISTS `{self.table(name).name}` ({', '.join(columns)})")

    def broker(self) -> SqlBroker:
        return SqlBroker(self.url, poll_interval=0.05)

    def source(self, broker: Broker, name: str, *, lease: float | None = None) -> SqlQueue[bytes]:
        assert isinstance(broker, SqlBroker)
        claim = RowLock() if self.locks else AdvisoryLock("key {id}") if self.keyed else Lease(lease or 30.0)
        return broker.queue(self.table(name), group=name if self.grouped else None, claim=claim)

    def publisher(self, broker: Broker, name: str) -> SqlPublisher:
        assert isinstance(broker, SqlBroker)
        return broker.publisher(self.table(name), group=name if self.grouped else None)


SHAPES = {
    "tables": partial(MysqlHarness),
    "stamps": partial(MysqlHarness, stamps=True),
    "groups": partial(MysqlHarness, grouped=True, marks=True),
    "bare": partial(MysqlHarness, bare=True),
    "row locks": partial(MysqlHarness, locks=True),
    "advisory locks": partial(MysqlHarness, keyed=True),
}


@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        "tables",
        "row locks",
        "advisory locks",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("stamps", "groups", "bare")),
    ],
)
async def test_mysql_conforms(shape: str, check: Check, mysql_database: str) -> None:
    await check(SHAPES[shape](mysql_database))
