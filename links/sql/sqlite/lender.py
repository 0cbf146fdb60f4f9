"""The transaction of a handler on SQLite."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["SqliteLender"]


class SqliteLender:
    """Refuses: not built yet."""

    whole = True

    def loan(self) -> NoReturn:
        """As `Lender.loan`. Raises `ValueError`."""
        raise ValueError("a delivery of a table on SQLite has no transaction to lend: not built yet")

    def close(self) -> None:
        """As `Lender.close`."""
