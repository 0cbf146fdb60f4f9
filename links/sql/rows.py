"""A claimed row, as every dialect gives it, and the delivery that it is read as. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from links.abc import Received
from links.sql.headers import dump_row, load
from links.sql.row_class import maker
from links.sql.table import Table
from settlement.attempts import attempt, header_count
from settlement.delivery import NO_HEADERS, Delivery, made

__all__ = ["BadText", "Row", "RowReader", "Token", "body_of", "name_of"]

R = TypeVar("R")

Row: TypeAlias = tuple[Any, ...]
"""What a claim gives: id, locked_until, attempt after the claim, payload, headers, key; in row mode the row as a `dict`
by column, as it was before the claim, with an empty lease. An error in place of the payload, or of the `dict`: why
there is none."""

Token: TypeAlias = tuple[Any, Any, Any]
"""(id, locked_until, attempt), as they are stored; attempt is None where the table has none."""


class BadText(bytes):
    """A text of the database that is not UTF-8: one row's trouble, not the claim's."""

    __slots__ = ()


def body_of(payload: object) -> bytes:
    """A payload as bytes. Raises `ValueError` where it is neither bytes nor a text, and an error that it is."""
    match payload:
        case bytes():
            return bytes(payload)
        case str():
            return payload.encode("utf-8", "surrogatepass")
        case Exception():
            raise payload
        case _:
            raise ValueError(f"the payload is {'NULL' if payload is None else 'a number'}, not bytes or text")


def name_of(value: object) -> str:
    """An id or a key as a text."""
    if type(value) is int:
        return str(value)
    match value:
        case str():
            return value
        case BadText():
            return value.decode(errors="backslashreplace")
        case bytes():
            return value.hex()
        case _:
            return str(value)


class RowReader(Generic[R]):
    """Reads the rows of one queue. A row that cannot be read is a delivery with `unreadable` set."""

    def __init__(self, table: Table[R], source: str) -> None:
        self._source = source
        self._counted = table.attempt is not None
        self._whole = table.payload is None
        self._made = None if table.row is None else maker(table.row)

    def read(self, row: Row, expires: float | None, handle: object = None) -> Received[R]:
        """One delivery; its token is (id, locked_until, attempt) as they are stored now.

        `handle`: what its row has of its own, such as a connection.
        """
        key, until, count, payload, column, partition = row[:6]
        unreadable: Exception | None = None
        headers: Mapping[str, bytes] = NO_HEADERS
        body = b""
        message: Any = body
        # whatever stands in a row is that row's trouble, never that of the rows that were claimed with it
        if column is not None:
            try:
                headers = load(column)
            except Exception as error:  # noqa: BLE001
                unreadable = error
        try:
            if self._whole:
                if isinstance(row[6], Exception):
                    raise row[6]
                message = row[6]
                body = dump_row(message)
                if self._made is not None:
                    message = self._made(message)
            else:
                body = message = payload if type(payload) is bytes else body_of(payload)
        except Exception as error:  # noqa: BLE001
            unreadable = error
        redeliveries: int | None = None
        if not self._counted:
            before = attempt(header_count(headers), None)
        elif type(count) is int:
            before = max(count - 1, 1)
            redeliveries = before - 1
        else:  # the header counts, as where there is no such column (S-4.9)
            before = attempt(header_count(headers), None)
            unreadable = ValueError(f"the attempt is no whole number: {count!r} after this claim")
        delivery: Delivery[R] = made(
            body,
            message,
            headers,
            before,
            redeliveries,
            self._source,
            name_of(key),
            None if partition is None else name_of(partition),
            handle,
        )
        return Received(delivery, (key, until, count), expires, False, unreadable)
