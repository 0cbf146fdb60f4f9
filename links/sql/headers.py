"""Headers in a column: one JSON object, values as text where they are UTF-8, else `{"base64": …}`. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from settlement.delivery import NO_HEADERS

__all__ = ["dump", "dump_row", "load"]


def _value(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def dump(headers: Mapping[str, bytes]) -> str:
    """The text of a header column."""
    return json.dumps({name: _value(value) for name, value in headers.items()})


def _bytes(value: Any) -> bytes:
    match value:
        case str():
            return value.encode()
        case {"base64": str(text), **rest} if not rest:
            return base64.b64decode(text, validate=True)
        case _:
            return json.dumps(value).encode()


def load(column: str | bytes | None) -> Mapping[str, bytes]:
    """The headers in a column; NULL or an empty text is none. Any other JSON value of a name is kept as JSON text.

    Raises `ValueError` where the column holds no JSON object.
    """
    if not column:
        return NO_HEADERS
    loaded: object = json.loads(column)
    if not isinstance(loaded, dict):
        raise ValueError(f"headers must be a JSON object, not {type(loaded).__name__}")
    return {str(name): _bytes(value) for name, value in loaded.items()}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return _value(value)
    raise TypeError(f"a column value of type {type(value).__name__} has no JSON form")


def dump_row(row: Mapping[str, Any]) -> bytes:
    """The body of a delivery in row mode: the row as a JSON object."""
    return json.dumps(row, default=_plain).encode()
