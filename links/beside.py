"""A task that runs beside a block, such as a connection's: shared by `links.abc` and the transports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from settlement.groups import alone, raise_bare

__all__ = ["beside"]


@asynccontextmanager
async def beside(task: Callable[..., Any]) -> AsyncGenerator[None, None]:
    """Run `task` (which reports started) beside the block, cancel it after the block; what it raises cancels the block.

    Errors leave as their writers expect: the block's own exception bare, the task's own bare when it is alone, both
    as a group. Cancellation: both are cancelled; the task is waited for.
    """
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(task)
            yield
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise_bare(alone(group))
