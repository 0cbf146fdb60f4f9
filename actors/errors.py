"""What leaves a runtime when it fails. Everything else that leaves it is a bug of ours, under its own type."""

from __future__ import annotations

from typing import Any

from settlement.delivery import Delivery

__all__ = ["HandlerFailed", "LinkGaveUp", "ObserverFailed"]


class HandlerFailed(Exception):
    """A handler, a decoder or a policy's function failed and the answer was `FailFast`; its error is `__cause__`.

    The delivery was left unsettled: the broker brings it back.
    """

    def __init__(self, subscription: str, delivery: Delivery[Any]) -> None:
        super().__init__(
            f"{subscription}: delivery {delivery.id} of {delivery.source} (attempt {delivery.attempt}) failed and is "
            "left unsettled; declare on_error, a cap or a dead letter in its Policy to go on instead"
        )
        self.subscription = subscription
        self.delivery = delivery


class LinkGaveUp(Exception):
    """A supervisor has seen too much bad weather; the last break is `__cause__`."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} gave up: {why}")
        self.name = name
        self.why = why


class ObserverFailed(Exception):
    """An observer raised; its error is `__cause__`. An observer that may fail catches what it expects itself."""

    def __init__(self, observer: object, event: object) -> None:
        super().__init__(f"observer {observer!r} failed at {type(event).__name__}")
        self.observer = observer
        self.event = event
