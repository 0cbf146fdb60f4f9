"""Headers in a column: one JSON object, values as text where they are UTF-8, else `{"base64": …}`. Pure."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Mapping
from typing import Any

from settlement.delivery import NO_HEADERS

__all__ = ["dump", "dump_row", "load", "load_row"]


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


def _object(what: str, text: str | bytes) -> dict[str, Any]:
    loaded: Any = json.loads(text)
    if not isinstance(loaded, dict):
        raise ValueError(f"{what} must be a JSON object, not {type(loaded).__name__}")
    return loaded  # pyright: ignore[reportUnknownVariableType] -- names of a JSON object are texts


def load(column: object) -> Mapping[str, bytes]:
    """The headers in a column; NULL or an empty text is none. Any other JSON value of a name is kept as JSON text.

    Raises `ValueError` where the column holds no JSON object.
    """
    if column is None or column in ("", b""):
        return NO_HEADERS
    if not isinstance(column, str | bytes):
        raise ValueError("headers must be a JSON object, not a number")
    return {name: _bytes(value) for name, value in _object("headers", column).items()}


def _plain(value: object) -> object:
    """What JSON has no form for: bytes as in a header, times as ISO 8601, the rest as its text."""
    match value:
        case bytes():
            return _value(value)
        case dt.date() | dt.time():
            return value.isoformat()
        case _:
            return str(value)


def _finite(value: Any) -> Any:
    """The same, with texts for the numbers that JSON has not: NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    found: Any = value  # of a list or a dict nothing is known of what is in it
    if isinstance(value, list):
        return [_finite(each) for each in found]
    if isinstance(value, dict):  # a JSON column may hold 1e400, which Python reads as infinity
        return {name: _finite(each) for name, each in found.items()}
    return found


def dump_row(row: Mapping[str, Any]) -> bytes:
    """The body of a delivery in row mode: the row as a JSON object. What JSON has no form for is a text."""
    try:
        text = json.dumps(row, default=_plain, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(dict(row)), default=_plain, allow_nan=False)
    return text.encode()


def load_row(body: bytes) -> dict[str, Any]:
    """A row out of such a body. Raises `ValueError` where it is no JSON object of plain values."""
    return {column: _cell(column, value) for column, value in _object("the body", body).items()}


def _cell(column: str, value: Any) -> Any:
    match value:
        case None | int() | float() | str():
            return value
        case {"base64": str()}:
            return _bytes(value)
        case _:
            raise ValueError(f"column {column!r} cannot hold {type(value).__name__}")
