"""Queue tables in a SQL database: SQLite, PostgreSQL, MySQL and MariaDB; rows are leased, or locked one by one.

The table is yours; the library makes none and changes none. One on SQLite that has everything, with the index that a
claim walks along (where finished rows stay, keep them out of it):

    CREATE TABLE orders (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        body BLOB NOT NULL,
        headers TEXT,
        customer TEXT,
        attempt INTEGER NOT NULL DEFAULT 1,
        retry_after REAL NOT NULL DEFAULT (julianday('now') * 86400.0 - 210866760000.0),
        locked_until REAL,
        processed_at REAL
    );
    CREATE INDEX orders_due ON orders (retry_after, id) WHERE processed_at IS NULL;

and what to say of it:

    orders = Table(
        "orders", id="id", payload="body", headers="headers", partition_key="customer", attempt="attempt",
        retry_after="retry_after", locked_until="locked_until", processed_at="processed_at", generated=["id"],
    )

`orders.ddl("postgresql")` or `("mysql")` is its like there. With groups the index begins with the group's column, with
priorities the priority comes before retry_after. No index holds locked_until or attempt: every claim writes both.

To write data and a message in one transaction, whatever carries the message: `insert` into a queue table, which
`forward` relays to another transport, or an `Outbox`, whose records the consumer marks (docs/outbox.md).
"""

from links.sql.broker import SqlBroker as SqlBroker
from links.sql.forward import forward as forward
from links.sql.inserting import insert as insert
from links.sql.inserting import insert_statement as insert_statement
from links.sql.outbox import OUTBOX_ID as OUTBOX_ID
from links.sql.outbox import Outbox as Outbox
from links.sql.outbox_publisher import OutboxPublisher as OutboxPublisher
from links.sql.outbox_table import OutboxTable as OutboxTable
from links.sql.publisher import SqlPublisher as SqlPublisher
from links.sql.queue import SqlQueue as SqlQueue
from links.sql.table import Table as Table
from links.sql.transaction import transaction as transaction
from settlement.sql import AdvisoryLock as AdvisoryLock
from settlement.sql import Lease as Lease
from settlement.sql import RowLock as RowLock
