"""The one place that touches python-qpid-proton's C binding, so the one place whose types are `Any`.

What leaves it is a plain Python value, copied out of proton's memory: a binary of proton is a memoryview of memory that
the next decode overwrites.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import cproton  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import proton

from links.amqp.engine.events import Condition
from links.amqp.wire.values import Timestamp

__all__ = [
    "Pointer",
    "condition_of",
    "data_of",
    "errors_of",
    "ffi",
    "lib",
    "map_of",
    "put_condition",
    "put_data",
    "put_map",
    "put_symbols",
    "symbols_of",
    "text_of",
]

Pointer: TypeAlias = Any
"""An object of proton's; false if it is NULL. Compared and hashed by address."""

_proton: Any = proton
_cproton: Any = cproton
ffi: Any = _cproton.ffi
lib: Any = _cproton.lib


def errors_of(transport: Pointer) -> list[str]:
    """Where the errors of this transport go from now on, and warnings, which proton would print on stderr and no more.

    What somebody traces by `PN_TRACE_FRM` is printed as ever.
    """
    lines: list[str] = []

    def hear(_: Pointer, line: str) -> None:
        if line.startswith(("ERROR: ", "WARNING: ")):
            lines.append(line)
        else:
            sys.stderr.write(f"{line}\n")

    record = lib.pn_transport_attachments(transport)
    _cproton.pn_record_def_py(record)
    _cproton.pn_record_set_py(record, {})
    _cproton.pn_transport_set_pytracer(transport, hear)
    return lines


def text_of(string: Pointer) -> str | None:
    """A C string; bytes that are no UTF-8 become replacement characters."""
    return cast(bytes, ffi.string(string)).decode(errors="replace") if string else None


def _plain(value: Any) -> Any:
    """A value of `proton.Data`, with nothing of proton in it."""
    kind = value.__class__
    if issubclass(kind, memoryview):
        return bytes(value)
    if issubclass(kind, _proton.timestamp):
        return Timestamp(int(value))
    if issubclass(kind, str):
        return str(value)
    if issubclass(kind, bool | float | bytes):
        return value
    if issubclass(kind, int):
        return int(value)
    if issubclass(kind, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if issubclass(kind, _proton.Described):
        return _plain(value.value)
    if issubclass(kind, _proton.Array):
        return [_plain(each) for each in value.elements]
    if issubclass(kind, list | tuple):
        return [_plain(each) for each in value]
    return value


def data_of(data: Pointer) -> Any:
    """What a `pn_data_t` holds, as plain values; None if it is NULL, empty, or cannot be read."""
    if not data:
        return None
    wrapped = _proton.Data(data)
    wrapped.rewind()
    if wrapped.next() is None:
        return None
    try:
        return _plain(wrapped.get_object())
    except Exception:  # noqa: BLE001 -- peers put what they like in: keys without a hash, no Unicode, a thousand levels
        return None
    finally:
        wrapped.rewind()


def map_of(data: Pointer) -> dict[str, Any]:
    """A field that holds a map; empty if it holds none."""
    found = data_of(data)
    return {str(key): value for key, value in found.items()} if issubclass(type(found), dict) else {}


def symbols_of(data: Pointer) -> tuple[str, ...]:
    """A field that holds one symbol or many."""
    found = data_of(data)
    if issubclass(type(found), list):
        return tuple(str(each) for each in found)
    return () if found is None else (str(found),)


def _symbolic(value: Any) -> Any:
    if isinstance(value, Timestamp):
        return _proton.timestamp(int(value))
    return value


def put_data(data: Pointer, value: Any) -> None:
    """Write a plain value."""
    wrapped = _proton.Data(data)
    wrapped.clear()
    wrapped.put_object(_symbolic(value))


def put_map(data: Pointer, values: Mapping[str, object]) -> None:
    """Write a map with symbols as keys; nothing if it is empty."""
    if values:
        put_data(data, {_proton.symbol(key): _symbolic(value) for key, value in values.items()})


def put_symbols(data: Pointer, symbols: Sequence[str]) -> None:
    """Write an array of symbols; nothing if there is none."""
    if symbols:
        described = _proton.UNDESCRIBED
        put_data(data, _proton.Array(described, _proton.Data.SYMBOL, *[_proton.symbol(each) for each in symbols]))


def condition_of(condition: Pointer) -> Condition | None:
    """An error condition, or None where none is set."""
    if not lib.pn_condition_is_set(condition):
        return None
    name = text_of(lib.pn_condition_get_name(condition)) or ""
    return Condition(name, text_of(lib.pn_condition_get_description(condition)) or "")


def put_condition(condition: Pointer, value: Condition | None) -> None:
    """Set an error condition."""
    if value is not None:
        _cproton.pn_condition_set_name(condition, value.name)
        _cproton.pn_condition_set_description(condition, value.description)
