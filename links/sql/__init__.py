"""Queue tables in a SQL database: today SQLite, in the lease form."""

from links.sql.broker import SqlBroker as SqlBroker
from links.sql.publisher import SqlPublisher as SqlPublisher
from links.sql.queue import SqlQueue as SqlQueue
from links.sql.table import Table as Table
from settlement.sql import AdvisoryLock as AdvisoryLock
from settlement.sql import Lease as Lease
from settlement.sql import RowLock as RowLock
