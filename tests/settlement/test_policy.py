"""What a subscription wants done: the cap, and the answers to failures."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from settlement.delays import Copies, Hold, Native, Scheduled, Stored
from settlement.delivery import Delivery
from settlement.outcomes import Ack, Drop, Retry, RetryAfter
from settlement.policy import Answer, DeadLetter, FailFast, Policy, Turn, positive

DELIVERY = Delivery(
    body=b"", message=b"", headers={}, attempt=2, redelivery_count=None, source="orders", id="7", key=None
)


@attrs.frozen
class Elsewhere:
    name: str


class Busy(Exception):
    """A failure that passes."""


class VeryBusy(Busy):
    """One of its kinds."""


class Broken(Exception):
    """A failure that stays."""


# --- construction


@pytest.mark.parametrize("cap", [0, -1, True, False, 1.0, 2.5, "3", float("nan")])
def test_a_cap_that_is_none_is_refused(cap: Any) -> None:
    """C-3.1: n is 1 or more; the message names the argument and its range."""
    with pytest.raises(ValueError, match=r"^max_attempts must be a whole number, 1 or more, not "):
        Policy(max_attempts=cap)


@pytest.mark.parametrize("cap", [None, 1, 2, 10**9])
def test_caps(cap: int | None) -> None:
    """C-3.1: any whole number from 1 on, or none."""
    assert cap == Policy(max_attempts=cap).max_attempts


def test_a_policy_is_written_with_names() -> None:
    """DESIGN 2: `Policy(5)` would not say what 5 is."""
    with pytest.raises(TypeError):
        Policy(5)  # type: ignore[call-arg]


@pytest.mark.parametrize("empty", ["", Elsewhere("")])
def test_an_empty_dead_letter_is_refused(empty: Any) -> None:
    """C-3.1: a dead letter has a name."""
    with pytest.raises(ValueError, match=r"^dead_letter must be a name of 1 character or more"):
        Policy(dead_letter=empty)


@pytest.mark.parametrize("wrong", [b"dead", 5, object(), ["dead"]])
def test_a_dead_letter_that_is_none_is_refused(wrong: Any) -> None:
    """DESIGN 2: a name on the own broker, or a publisher."""
    with pytest.raises(ValueError, match=r"^dead_letter must be a name or a publisher, not "):
        Policy(dead_letter=wrong)


@pytest.mark.parametrize("half", [Policy(max_attempts=3), Policy(dead_letter="dead")])
def test_half_a_cap_is_a_policy(half: Policy) -> None:
    """C-3.6: AMQP takes either half alone; SQL and Pub/Sub refuse it where a subscription is made (their `check`)."""
    assert (half.max_attempts is None) != (half.dead_letter is None)


@pytest.mark.parametrize("wrong", [Retry, DeadLetter, "drop", None, 5])
def test_an_answer_that_is_none_is_refused(wrong: Any) -> None:
    """DESIGN 2: an outcome, FailFast(), DeadLetter() or a function; a class instead of a value is a slip."""
    with pytest.raises(ValueError, match=r"^failures\[Busy\] must be Ack, Retry, .*, not "):
        Policy(failures={Busy: wrong})
    if wrong is not None:
        with pytest.raises(ValueError, match=r"^on_error must be Ack, Retry, .*, not "):
            Policy(on_error=wrong)
        with pytest.raises(ValueError, match=r"^on_undecodable must be Ack, Retry, .*, not "):
            Policy(on_undecodable=wrong)


@pytest.mark.parametrize("key", [KeyboardInterrupt, BaseException, Busy(), "Busy", int])
def test_a_key_of_failures_is_a_class_of_exceptions(key: Any) -> None:
    """C-6.8: cancellation and Ctrl-C are no failures, so nothing can be answered to them."""
    with pytest.raises(ValueError, match=r"^a key of failures must be a class of exceptions, not "):
        Policy(failures={key: Drop()})


def test_dead_letter_needs_one() -> None:
    """DESIGN 2: `DeadLetter()` without `dead_letter` has nowhere to go."""
    with pytest.raises(ValueError, match=r"^on_error is DeadLetter\(\), so dead_letter must name one$"):
        Policy(on_error=DeadLetter())
    with pytest.raises(ValueError, match=r"^on_undecodable is DeadLetter\(\)"):
        Policy(on_undecodable=DeadLetter(), max_attempts=3)
    with pytest.raises(ValueError, match=r"^failures\[Busy\] is DeadLetter\(\)"):
        Policy(failures={Busy: DeadLetter()})


def test_a_policy_does_not_change_with_the_dict_that_it_was_made_of() -> None:
    """DESIGN 2: a value."""
    failures: dict[type[Exception], Answer] = {Busy: Retry()}
    policy = Policy(failures=failures)
    failures[Busy] = Drop()

    assert Retry() == policy.failed(DELIVERY, Busy())
    with pytest.raises(TypeError):
        policy.failures[Busy] = Drop()  # type: ignore[index]


def test_the_dead_letters_name() -> None:
    """C-3.5: what the warning names."""
    named = Policy(dead_letter="dead"), Policy(dead_letter=Elsewhere("audit")), Policy()

    assert [policy.dead_letter_name for policy in named] == ["dead", "audit", None]


# --- the cap


@pytest.mark.parametrize(
    ("cap", "dead_letter", "attempt", "turn"),
    [
        (None, None, 1, Turn.BACK),
        (None, None, 10**6, Turn.BACK),
        (None, "dead", 1, Turn.DEAD_LETTER),
        (None, "dead", 10**6, Turn.DEAD_LETTER),
        (3, None, 1, Turn.BACK),
        (3, None, 2, Turn.BACK),
        (3, None, 3, Turn.DISCARD),
        (3, None, 4, Turn.DISCARD),
        (3, "dead", 1, Turn.BACK),
        (3, "dead", 2, Turn.BACK),
        (3, "dead", 3, Turn.DEAD_LETTER),
        (3, "dead", 4, Turn.DEAD_LETTER),
        (1, None, 1, Turn.DISCARD),
        (1, "dead", 1, Turn.DEAD_LETTER),
    ],
)
def test_what_becomes_of_a_retry(cap: int | None, dead_letter: str | None, attempt: int, turn: Turn) -> None:
    """C-3.4, C-3.2: the table, row by row; n = 1 ends at the first retry."""
    assert turn is Policy(max_attempts=cap, dead_letter=dead_letter).turn(attempt)


# --- the answers to failures


@pytest.mark.parametrize(
    ("policy", "answer"),
    [
        (Policy(), FailFast()),
        (Policy(max_attempts=3), Retry()),
        (Policy(dead_letter="dead"), Retry()),
        (Policy(max_attempts=3, dead_letter="dead"), Retry()),
        (Policy(on_error=Drop()), Drop()),
        (Policy(on_error=Retry()), Retry()),
        (Policy(on_error=FailFast(), max_attempts=3), FailFast()),
        (Policy(on_error=RetryAfter(2)), RetryAfter(2)),
        (Policy(on_error=Ack()), Ack()),
        (Policy(on_error=DeadLetter(), dead_letter="dead"), DeadLetter()),
    ],
)
def test_what_an_exception_is_answered_with(policy: Policy, answer: Answer) -> None:
    """C-1.3, C-6.1, DESIGN 2: by default fail fast, but retry where a cap or a dead letter bounds it."""
    assert answer == policy.failed(DELIVERY, Broken())


def test_failures_are_looked_up_along_the_mro() -> None:
    """DESIGN 2: the nearest class wins, whatever the order in the mapping; then `on_error`."""
    policy = Policy(failures={Exception: Ack(), Busy: Retry(), VeryBusy: RetryAfter(9)}, on_error=Drop())

    assert RetryAfter(9) == policy.failed(DELIVERY, VeryBusy())
    assert Retry() == policy.failed(DELIVERY, Busy())
    assert Ack() == policy.failed(DELIVERY, Broken())
    assert Drop() == Policy(failures={Busy: Retry()}, on_error=Drop()).failed(DELIVERY, Broken())


def test_a_function_sees_the_delivery_and_the_error() -> None:
    """DESIGN 2: an answer may depend on both."""
    seen = []

    def answer(delivery: Delivery[Any], error: Exception) -> Answer:
        seen.append((delivery, error))
        return RetryAfter(delivery.attempt)

    error = Busy("later")

    assert RetryAfter(2) == Policy(on_error=answer).failed(DELIVERY, error)
    assert seen == [(DELIVERY, error)]


@pytest.mark.parametrize("wrong", [None, "retry", Retry, 5])
def test_a_function_that_answers_wrongly_is_told_the_menu(wrong: Any) -> None:
    """DESIGN 2: who asked treats it as FailFast; the cause is the handler's own error."""
    error = Busy()
    with pytest.raises(TypeError, match=r"must return Ack, Retry, RetryAfter, Drop, DeadLetter, FailFast") as caught:
        Policy(on_error=lambda *_: wrong).failed(DELIVERY, error)
    assert caught.value.__cause__ is error


def test_a_function_that_answers_dead_letter_needs_one() -> None:
    """DESIGN 2: the same as at construction, only later."""
    with pytest.raises(ValueError, match=r"the policy declares no dead_letter$"):
        Policy(on_undecodable=lambda *_: DeadLetter()).undecodable(DELIVERY, Busy())

    policy = Policy(on_undecodable=lambda *_: DeadLetter(), dead_letter="dead")
    assert DeadLetter() == policy.undecodable(DELIVERY, Busy())


def test_what_a_function_raises_comes_out() -> None:
    """DESIGN 2: as it is; who asked treats it as FailFast."""

    def answer(delivery: Delivery[Any], error: Exception) -> Answer:
        raise Broken

    with pytest.raises(Broken):
        Policy(on_error=answer).failed(DELIVERY, Busy())


def test_a_group_is_answered_by_its_leaves_when_they_agree() -> None:
    """DESIGN 2: whatever the nesting."""
    policy = Policy(failures={Busy: RetryAfter(3)}, on_error=Drop())
    group = ExceptionGroup("two", [Busy(), ExceptionGroup("one", [VeryBusy()])])

    assert RetryAfter(3) == policy.failed(DELIVERY, group)


def test_a_group_is_answered_by_on_error_when_they_do_not() -> None:
    """DESIGN 2: different delays are different answers."""
    policy = Policy(failures={Busy: Retry(), Broken: Drop()}, on_error=FailFast())

    assert FailFast() == policy.failed(DELIVERY, ExceptionGroup("both", [Busy(), Broken()]))


def test_a_function_answers_a_divided_group_as_a_whole() -> None:
    """DESIGN 2: `on_error` gets the group itself then."""
    group = ExceptionGroup("both", [Busy(), Broken()])
    policy = Policy(failures={Busy: Retry()}, on_error=lambda _, error: Drop(type(error).__name__))

    assert Drop("ExceptionGroup") == policy.failed(DELIVERY, group)


def test_what_cannot_be_decoded_is_dropped() -> None:
    """C-6.2, S-4.10, P-2.9: the default of the seed; `on_error` and `failures` have no say."""
    policy = Policy(on_error=Retry(), failures={Busy: Ack()})

    assert Drop() == policy.undecodable(DELIVERY, Busy())
    assert Retry() == Policy(on_undecodable=Retry()).undecodable(DELIVERY, Busy())


# --- the choices of a delay (settlement/delays.py) and the number they share


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1", None])
def test_counts_that_are_none(count: Any) -> None:
    """DESIGN 6: a bound is a whole number, 1 or more; the message names the argument and its range."""
    for name, make in (("Copies(max_waiting)", Copies), ("Hold(max_held)", Hold)):
        with pytest.raises(
            ValueError, match=rf"^{name[:4]}\w*\(\w+\) must be a whole number, 1 or more, not "
        ) as caught:
            make(count)
        assert str(caught.value).startswith(name)
    with pytest.raises(ValueError, match=r"^size must be a whole number, 1 or more, not "):
        positive("size", count)


@pytest.mark.parametrize("delay", [0, -1.0, float("nan"), float("inf"), True, "5"])
def test_a_hold_lasts_for_some_time(delay: Any) -> None:
    """DESIGN 6: max_delay is a duration above 0."""
    with pytest.raises(ValueError, match=r"^Hold\(max_delay\) must be a finite number of seconds above 0, not "):
        Hold(1, delay)


def test_an_annotation_has_a_name() -> None:
    """DESIGN 6: `Scheduled` writes it on the wire."""
    with pytest.raises(ValueError, match=r"^Scheduled\(annotation\) must be a name of 1 character or more"):
        Scheduled("")


def test_the_defaults_of_delays() -> None:
    """DESIGN 6: 10 000 copies, ten minutes."""
    assert (Copies().max_waiting, Hold(1).max_delay) == (10_000, 600.0)
    assert (Native(), Stored(Elsewhere("waiting"))) == (Native(), Stored(Elsewhere("waiting")))
