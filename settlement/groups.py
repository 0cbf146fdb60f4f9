"""What to do with exception groups: look at their leaves, and raise what is alone in one without it. Pure."""

from __future__ import annotations

from typing import NoReturn, TypeVar, cast

__all__ = ["alone", "leaves", "raise_bare"]

E = TypeVar("E", bound=BaseException)


def leaves(error: E) -> list[E]:
    """The exceptions in a group, however deep; of anything else, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[E]", error)
    return [leaf for each in group.exceptions for leaf in leaves(cast("E", each))]


def alone(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a group holds, where that is one thing; else the group."""
    first, *others = group.exceptions
    return group if others else first


def raise_bare(error: BaseException) -> NoReturn:
    """Raise `error` out of the group that it came in, with the context it had before."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
