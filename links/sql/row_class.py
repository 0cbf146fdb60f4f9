"""Rows of a table as instances of the user's own class: attrs, dataclass or msgspec Struct. Pure.

A column goes to the field of its name; a column that no field has is left out, and a field without a column keeps its
default. msgspec is imported where a class is one of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import attrs

__all__ = ["fields_of", "lacking", "maker"]


def fields_of(row: type[Any]) -> Mapping[str, tuple[str, bool]]:
    """Each field by its name: the argument that takes it, and whether it must be given.

    Raises `ValueError` for what is none of the three, and for a class that no row could become an instance of.
    """
    if inspect.isabstract(row):
        raise ValueError(f"row must be a class that has instances, not {row!r}: it is abstract")
    if isinstance(row, type) and attrs.has(row):
        return {
            each.name: (each.alias or each.name, each.default is attrs.NOTHING)
            for each in attrs.fields(row)
            if each.init
        }
    if isinstance(row, type) and dataclasses.is_dataclass(row):
        return {  # as it is called: with the pseudo-fields of InitVar, too, and those of an __init__ of its own
            name: (name, each.default is each.empty)
            for name, each in inspect.signature(row).parameters.items()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
    if isinstance(row, type) and hasattr(row, "__struct_fields__"):
        if row.__struct_config__.array_like:
            raise ValueError(
                f"row must be a Struct of named fields, not {row!r}: it is array_like, and columns have names"
            )
        structs = import_module("msgspec.structs")
        return {each.name: (each.encode_name, each.required) for each in structs.fields(row)}
    raise ValueError(
        f"row must be an attrs class, a dataclass or a msgspec.Struct, not {row!r}: use decode=… for others"
    )


def lacking(row: type[Any], columns: Iterable[str]) -> list[str]:
    """The fields that must be given, and that no column has."""
    there = frozenset(columns)
    return [name for name, (_, required) in fields_of(row).items() if required and name not in there]


def maker(row: type[Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Makes an instance out of a row by column; it raises what the class raises where the values do not fit."""
    arguments = [(name, argument) for name, (argument, _) in fields_of(row).items()]

    def given(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {argument: columns[name] for name, argument in arguments if name in columns}

    if not hasattr(row, "__struct_fields__"):
        return lambda columns: row(**given(columns))
    convert = import_module("msgspec").convert
    # not strict: SQLite has no bool, no UUID and no datetime
    return lambda columns: convert(given(columns), row, strict=False)
