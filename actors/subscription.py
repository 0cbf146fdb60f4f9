"""What a user declares: a source, a handler, and what shall become of what goes wrong. Values; they do no I/O."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeAlias, TypeVar, overload

import attrs

from links.abc import Publisher, Source
from settlement.delivery import Delivery
from settlement.outcomes import Outcome, seconds
from settlement.policy import Policy, positive

__all__ = ["AnySubscription", "BatchSubscription", "Subscription", "check_handler"]

R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M")


@attrs.frozen(init=False, eq=False)
class Subscription(Generic[T]):
    """One source, and the handler that gets its deliveries one by one.

    Constructing one does no I/O. Raises `TypeError` for a handler that is neither an async function nor declared to
    return an awaitable (a plain function would act, and answer nothing), and for what is no source, decoder or policy;
    `ValueError` for an empty name, a `concurrency` below 1, a `within` not above 0, half a cap where the transport
    needs both halves, and a `dead_letter` that is neither a name nor a publisher.

    Attributes:
        source: A queue, topic or table of a broker; what it hands out is decoded.
        handler: An async function of a `Delivery`; it returns an outcome, or None for `Ack()`.
        name: For logs, errors and `Runtime.ledger`, 1 character or more; by default the source's.
        decode: Makes a message of what the source hands out (bytes, or a row); called once per delivery, before the
            handler. None: the handler gets what the source hands out. What it raises is answered by
            `Policy.on_undecodable`.
        policy: The cap, the dead letter and the answers to failures; `Policy()` by default.
        concurrency: Handlers running at once, 1 or more; at 1, the default, deliveries are handled and settled in
            arrival order.
        within: Seconds above 0 for one call of the handler; longer is a `trio.TooSlowError`, a failure like any other.
            None, the default: no limit.
    """

    source: Source[Any]
    handler: Callable[[Delivery[T]], Awaitable[Outcome | None]]
    name: str
    decode: Callable[[Any], T] | None
    policy: Policy
    concurrency: int
    within: float | None

    @overload
    def __init__(
        self: Subscription[R],
        source: Source[R],
        handler: Callable[[Delivery[R]], Awaitable[Outcome | None]],
        *,
        name: str | None = None,
        decode: None = None,
        policy: Policy = Policy(),
        concurrency: int = 1,
        within: float | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: Subscription[M],
        source: Source[R],
        handler: Callable[[Delivery[M]], Awaitable[Outcome | None]],
        *,
        name: str | None = None,
        decode: Callable[[R], M],
        policy: Policy = Policy(),
        concurrency: int = 1,
        within: float | None = None,
    ) -> None: ...

    def __init__(
        self,
        source: Source[Any],
        handler: Callable[[Delivery[Any]], Awaitable[Outcome | None]],
        *,
        name: str | None = None,
        decode: Callable[[Any], Any] | None = None,
        policy: Policy = Policy(),
        concurrency: int = 1,
        within: float | None = None,
    ) -> None:
        self.__attrs_init__(  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  # attrs makes it
            source,
            handler,
            _checked(source, handler, decode, name, policy),
            decode,
            policy,
            positive("concurrency", concurrency),
            None if within is None else seconds("within", within, zero=False),
        )
        source.limit(concurrency)  # which may refuse so many


@attrs.frozen(init=False, eq=False)
class BatchSubscription(Generic[T]):
    """One source, and the handler that gets its deliveries in lists of 1 to `size`.

    The handler returns one outcome for all, or a sequence with one for each in order; an element without one is
    retried, with an error logged. A message that cannot be decoded is taken out and settled alone. A failure of the
    handler is answered for each element. Raises `ValueError` and `TypeError` as `Subscription`.

    Attributes:
        source: A queue, topic or table of a broker.
        handler: An async function of a list of deliveries; see above.
        size: Deliveries in a batch, at most; 1 or more.
        wait: Seconds, 0 or more, 0.01 by default, after its first delivery when a batch that is not full is handed out.
        name: For logs, errors and `Runtime.ledger`; by default the source's.
        decode: As of a `Subscription`: called once per delivery.
        policy: The cap, the dead letter and the answers to failures; `Policy()` by default.
        concurrency: Batches that are handled at once, 1 or more; 1 by default.
        within: Seconds above 0 for one call of the handler; None, the default: no limit.
    """

    # C-7.4; C-7.5; C-7.6

    source: Source[Any]
    handler: Callable[[list[Delivery[T]]], Awaitable[Outcome | Sequence[Outcome | None] | None]]
    size: int
    wait: float  # C-7.7
    name: str
    decode: Callable[[Any], T] | None
    policy: Policy
    concurrency: int
    within: float | None

    @overload
    def __init__(
        self: BatchSubscription[R],
        source: Source[R],
        handler: Callable[[list[Delivery[R]]], Awaitable[Outcome | Sequence[Outcome | None] | None]],
        *,
        size: int,
        wait: float = 0.01,
        name: str | None = None,
        decode: None = None,
        policy: Policy = Policy(),
        concurrency: int = 1,
        within: float | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: BatchSubscription[M],
        source: Source[R],
        handler: Callable[[list[Delivery[M]]], Awaitable[Outcome | Sequence[Outcome | None] | None]],
        *,
        size: int,
        wait: float = 0.01,
        name: str | None = None,
        decode: Callable[[R], M],
        policy: Policy = Policy(),
        concurrency: int = 1,
        within: float | None = None,
    ) -> None: ...

    def __init__(
        self,
        source: Source[Any],
        handler: Callable[[list[Delivery[Any]]], Awaitable[Outcome | Sequence[Outcome | None] | None]],
        *,
        size: int,
        wait: float = 0.01,
        name: str | None = None,
        decode: Callable[[Any], Any] | None = None,
        policy: Policy = Policy(),
        concurrency: int = 1,
        within: float | None = None,
    ) -> None:
        self.__attrs_init__(  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  # attrs makes it
            source,
            handler,
            positive("size", size),
            seconds("wait", wait),
            _checked(source, handler, decode, name, policy),
            decode,
            policy,
            positive("concurrency", concurrency),
            None if within is None else seconds("within", within, zero=False),
        )
        source.limit(concurrency, size)  # which may refuse so many


AnySubscription: TypeAlias = Subscription[Any] | BatchSubscription[Any]


def check_handler(name: str, handler: object) -> None:
    """Raise `TypeError` for what is no async function, nor a callable that is declared to return an awaitable.

    A plain function is refused before it is called: called once for each delivery, it would act, and answer nothing.
    """
    if not callable(handler):
        raise TypeError(f"{name}: handler must be an async function, not {handler!r}")
    if not _is_async(handler):
        raise TypeError(
            f"{name}: handler {_name_of(handler)} must be an async function (async def), or be declared to return an "
            "Awaitable; a plain function is called from one by trio.to_thread.run_sync"
        )


def _is_async(handler: Callable[..., object]) -> bool:
    while isinstance(handler, functools.partial | MethodType):
        handler = handler.func if isinstance(handler, functools.partial) else handler.__func__
    if not isinstance(handler, FunctionType | BuiltinFunctionType | type):
        if inspect.iscoroutinefunction(handler):  # marked as one
            return True
        handler = type(handler).__call__
    if inspect.iscoroutinefunction(handler):
        return True
    wrapped = getattr(handler, "__wrapped__", None)
    declared = getattr(handler, "__annotations__", {}).get("return") if wrapped is None else None
    return (wrapped is not None and _is_async(wrapped)) or _is_awaitable(declared)


def _is_awaitable(declared: object) -> bool:
    """Is this annotation, a text it may be, one of an awaitable?"""
    if isinstance(declared, str):
        return re.search(r"\b(Awaitable|Coroutine)\b", declared) is not None
    origin = typing.get_origin(declared) or declared
    return isinstance(origin, type) and issubclass(origin, Awaitable)


def _name_of(handler: object) -> str:
    return getattr(handler, "__qualname__", None) or repr(handler)


def _checked(source: Source[Any], handler: object, decode: object, name: str | None, policy: Policy) -> str:
    if not isinstance(source, Source):
        raise TypeError(f"source must be a queue, topic or subscription of a broker, not {source!r}")
    check_handler(source.name, handler)
    if decode is not None and not callable(decode):
        raise TypeError(f"{source.name}: decode must be a function, not {decode!r}")
    if not isinstance(policy, Policy):
        raise TypeError(f"{source.name}: policy must be a Policy, not {policy!r}")
    named = source.name if name is None else name
    if not isinstance(named, str) or not named:
        raise ValueError(f"name must be a text of 1 character or more, not {named!r}")
    if policy.dead_letter is not None and not isinstance(policy.dead_letter, str | Publisher):
        raise ValueError(
            f"{named}: dead_letter must be a name on {source.broker.name} or a publisher of a broker, "
            f"not {policy.dead_letter!r}"
        )
    source.check(policy)
    return named
