"""The rows of one link: those that it holds, and those that nobody works on any more and that are still leased."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import trio

from links.abc import Received

__all__ = ["Holdings"]

R = TypeVar("R")


class Holdings(Generic[R]):
    """Plain calls. `lease`: seconds."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self.held: dict[Any, Received[R]] = {}
        """By id, what was handed over or claimed ahead and has not ended: no claim takes these rows, by any clock."""
        self._left: dict[Received[R], None] = {}
        """To be let go; a claim may take these when their lease has ended."""

    def __len__(self) -> int:
        return len(self.held) + len(self._left)

    def __contains__(self, received: Received[R]) -> bool:
        return self.held.get(received.token[0]) is received

    @property
    def all(self) -> list[Received[R]]:
        """Held or left."""
        return [*self.held.values(), *self._left]

    def hold(self, received: Received[R]) -> None:
        """It was claimed."""
        self.held[received.token[0]] = received

    def leave(self, held: Iterable[Received[R]]) -> None:
        """Nobody works on these any more. What a later claim of this process took is not in the way."""
        old = trio.current_time() - self._lease
        for received in [each for each in self._left if each.expires is not None and each.expires < old]:
            del self._left[received]  # ours no more by any clock
        for received in held:
            if received in self:
                del self.held[received.token[0]]
            self._left[received] = None

    def left(self, some: Iterable[Received[R]]) -> list[Received[R]]:
        """Those of them that were left."""
        return [received for received in some if received in self._left] if self._left else []

    def drop(self, received: Received[R]) -> None:
        """It is ours no more."""
        if received in self:
            del self.held[received.token[0]]
        if self._left:
            self._left.pop(received, None)
