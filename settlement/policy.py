"""What a subscription wants done with retries that run out and with failures that are no outcome.

Pure: a policy answers, somebody else carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs

from settlement.delivery import Delivery, Destination, name_of
from settlement.groups import leaves
from settlement.outcomes import Ack, Drop, Retry, RetryAfter

__all__ = ["Answer", "DeadLetter", "Ending", "FailFast", "FailureAnswer", "Policy", "Turn", "positive"]


def positive(name: str, value: object) -> int:
    """Return `value` as an int of 1 or more, or raise `ValueError` that names the argument and its range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more, not {value!r}")
    return value


@attrs.frozen
class FailFast:
    """Leave the delivery unsettled and end the runtime with `HandlerFailed`."""


@attrs.frozen
class DeadLetter:
    """To the dead letter now, whatever the attempt. Needs a policy with `dead_letter`."""


Ending: TypeAlias = Ack | Retry | RetryAfter | Drop | DeadLetter
"""What a decision table decides about: the four outcomes, and a policy's `DeadLetter`."""

Answer: TypeAlias = Ack | Retry | RetryAfter | Drop | DeadLetter | FailFast
"""What a policy answers to a failure."""

FailureAnswer: TypeAlias = Answer | Callable[[Delivery[Any], Exception], Answer]
"""An answer, or a function of the delivery and the error that gives one."""

_ANSWERS = (Ack, Retry, RetryAfter, Drop, DeadLetter, FailFast)
_LEGAL = "Ack, Retry, RetryAfter, Drop, DeadLetter, FailFast, or a function of (delivery, error) giving one of them"


class Turn(Enum):
    """What becomes of a delivery that shall be retried.

    Attributes:
        BACK: Back to the subscription.
        DEAD_LETTER: To the dead letter.
        DISCARD: Refused without requeue: the broker's own policy decides.
    """

    # C-3.4

    BACK = "back to the subscription"
    DEAD_LETTER = "to the dead letter"
    DISCARD = "refused without requeue: the broker's own policy decides"


def _frozen(failures: Mapping[type[Exception], FailureAnswer]) -> Mapping[type[Exception], FailureAnswer]:
    return MappingProxyType(dict(failures))


@attrs.frozen(kw_only=True)
class Policy:
    """The cap, the dead letter, and the answers to failures of one subscription.

    Raises `ValueError` for a cap below 1, an empty dead letter, an answer that is none, or `DeadLetter()` without
    `dead_letter`. Some transports need both halves of a cap (SQL, Pub/Sub); they say so when a subscription is made.

    Attributes:
        max_attempts: How many calls of the handler a message gets, 1 or more; None, the default: no cap. Read only when
            a retry is asked for.
        dead_letter: A name on the delivery's own broker, 1 character or more, or a publisher of another one; None, the
            default: none of ours.
        on_error: The answer to an exception. None: `Retry()` where a cap or a dead letter is declared, else
            `FailFast()`.
        on_undecodable: The answer to a message that cannot be decoded; the handler is not called. None: `DeadLetter()`
            where a dead letter is declared, so that a message that nobody could read is kept, else `Drop()`.
        failures: Answers by exception class, looked up along the exception's MRO; before `on_error`. Empty by default.
    """

    max_attempts: int | None = None  # C-3.3
    dead_letter: str | Destination | None = None
    on_error: FailureAnswer | None = None
    on_undecodable: FailureAnswer | None = None
    failures: Mapping[type[Exception], FailureAnswer] = attrs.field(default=MappingProxyType({}), converter=_frozen)

    def __attrs_post_init__(self) -> None:
        if self.max_attempts is not None:
            positive("max_attempts", self.max_attempts)
        if self.dead_letter is not None:
            if not isinstance(self.dead_letter, str | Destination):
                raise ValueError(f"dead_letter must be a name or a publisher, not {self.dead_letter!r}")
            if not name_of(self.dead_letter):
                raise ValueError("dead_letter must be a name of 1 character or more, not an empty one")
        for error in self.failures:
            if not (isinstance(error, type) and issubclass(error, Exception)):
                raise ValueError(f"a key of failures must be a class of exceptions, not {error!r}")
        if self.on_undecodable is not None:
            self._check("on_undecodable", self.on_undecodable)
        if self.on_error is not None:
            self._check("on_error", self.on_error)
        for error, answer in self.failures.items():
            self._check(f"failures[{error.__name__}]", answer)

    def _check(self, name: str, answer: object) -> None:
        if not (isinstance(answer, _ANSWERS) or (callable(answer) and not isinstance(answer, type))):
            raise ValueError(f"{name} must be {_LEGAL}, not {answer!r}")
        if isinstance(answer, DeadLetter) and self.dead_letter is None:
            raise ValueError(f"{name} is DeadLetter(), so dead_letter must name one")

    @property
    def dead_letter_name(self) -> str | None:
        """The dead letter's name, for logs."""
        return None if self.dead_letter is None else name_of(self.dead_letter)

    def turn(self, attempt: int) -> Turn:
        """What a retry of a delivery of this attempt becomes."""
        # the table of C-3.4
        if self.max_attempts is None:
            return Turn.BACK if self.dead_letter is None else Turn.DEAD_LETTER
        if attempt < self.max_attempts:
            return Turn.BACK
        return Turn.DISCARD if self.dead_letter is None else Turn.DEAD_LETTER

    def failed(self, delivery: Delivery[Any], error: Exception) -> Answer:
        """The answer to an exception out of the handler.

        An exception group is answered by its leaves when all of them have the same answer, else by `on_error`.
        What a function of the user raises or returns wrongly comes out as it is: who asks treats it as `FailFast`.
        """
        answers = [self._evaluate(self._chosen(leaf), delivery, leaf) for leaf in leaves(error)]
        if all(answer == answers[0] for answer in answers):
            return answers[0]
        return self._evaluate(self._default, delivery, error)

    def undecodable(self, delivery: Delivery[Any], error: Exception) -> Answer:
        """The answer to a message that cannot be decoded."""
        answer = self.on_undecodable
        if answer is None:
            answer = Drop() if self.dead_letter is None else DeadLetter()
        return self._evaluate(answer, delivery, error)

    @property
    def _default(self) -> FailureAnswer:
        if self.on_error is not None:
            return self.on_error
        return FailFast() if self.max_attempts is None and self.dead_letter is None else Retry()

    def _chosen(self, error: Exception) -> FailureAnswer:
        for cls in type(error).__mro__:
            if cls in self.failures:
                return self.failures[cls]
        return self._default

    def _evaluate(self, answer: FailureAnswer, delivery: Delivery[Any], error: Exception) -> Answer:
        given: object = answer if isinstance(answer, _ANSWERS) else answer(delivery, error)
        if not isinstance(given, _ANSWERS):
            raise TypeError(f"a function that answers a failure must return {_LEGAL}, not {given!r}") from error
        if isinstance(given, DeadLetter) and self.dead_letter is None:
            raise ValueError("a function answered DeadLetter(), but the policy declares no dead_letter") from error
        return given
