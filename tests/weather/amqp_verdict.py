"""What must be true of a run on an `EmbeddedBroker` at its end: the invariants of tests/weather/amqp_story.py."""

from __future__ import annotations

from collections import Counter

import attrs

from links.amqp.events import State
from settlement import DeadLetter, Outcome
from settlement.ledger import Line
from tests.weather.amqp_fates import state_of
from tests.weather.amqp_story import AmqpStory, HandOver, publishes
from tests.weather.story import SAID, Consumer

__all__ = ["Verdict", "judge"]


@attrs.frozen
class Verdict:
    """What a test may go on asking."""

    calls: Counter[bytes]
    """Handler calls for each message."""
    doubled: int
    """Messages that there are too many, all together."""
    vanished: int
    """Messages that are gone (each is counted as lost)."""


def judge(story: AmqpStory, *, graveyard: str | None = None) -> Verdict:
    """Raise `AssertionError` for what does not hold. `graveyard`: where the broker puts what is rejected."""
    assert not story.wrong, "\n".join(story.wrong)
    queue = story.broker.store.queue(story.queue)
    assert (len(queue), len(queue.delayed), queue.unsettled) == (0, 0, 0), "the queue is not empty"
    for each in story.handed:
        _judge_ends(story, each)
    finished = Counter(each.message for each in story.handed if each.said in (State.ACCEPTED, State.REJECTED))
    assert set(finished.values()) <= {1}
    assert len(finished) == len(story.stored[story.queue])
    if graveyard is not None:
        rejected = Counter(each.name for each in story.handed if each.said is State.REJECTED)
        assert Counter(story.stored[graveyard]) == rejected, "the broker's own dead letters"
    doubled, vanished = _judge_counts(story)
    assert vanished <= sum(consumer.folded.lost for consumer in story.consumers), f"{vanished} messages are gone"
    for consumer in story.consumers:
        _judge_books(story, consumer)
    return Verdict(Counter(each.name for each in story.handed if each.calls), doubled, vanished)


def _judge_ends(story: AmqpStory, it: HandOver) -> None:
    """1: the two sides of one hand-over."""
    assert (it.said is None) == bool(it.returned), f"neither said nor back, or both: {it}"
    if it.by is None:
        assert it.said is None or story.at_most_once, f"said, and nobody has taken it: {it}"
        return
    fate = it.fate
    assert it.line is not None, f"not booked: {it}"
    if not it.by.size and isinstance(it.ending, Outcome | DeadLetter):
        assert fate is not None, f"answered, and no plan was made: {it}"
    if it.line in SAID:
        assert fate is not None, f"{it.line} without a plan: {it}"
        assert it.line is fate.line or (it.line is Line.RETRIED and fate.before), f"booked something else: {it}"
        right = State.MODIFIED if it.line is not fate.line else state_of(fate.verb)
        both = fate.line is it.line is Line.RETRIED and fate.before and it.said is State.MODIFIED
        assert story.at_most_once or it.said is right or both, f"booked, and something else was said: {it}"
    elif it.line is Line.UNKNOWN:
        assert fate is not None, f"unknown without an order: {it}"
        assert fate.verb is not None, f"unknown without a verb: {it}"
    else:
        assert it.line is (Line.REFUSED if story.at_most_once else Line.UNSETTLED), f"{it}"
        assert it.said is None or story.at_most_once, f"said, and not booked so: {it}"


def _judge_counts(story: AmqpStory) -> tuple[int, int]:
    """2 and 3: what was published, and why; how many are too many, and how many are gone."""
    doubled = vanished = 0
    for what, address in (("copy", story.queue), ("dead", story.dead)):
        due, may, keeps = Counter[bytes](), Counter[bytes](), Counter[bytes]()
        for each in story.handed:
            if each.fate is None or not publishes(each, what):
                continue
            if each.fate.before:
                gone = each.said is State.ACCEPTED
                keeps[each.name] += gone
            elif story.at_most_once:
                gone = each.said is State.ACCEPTED and each.line is each.fate.line
            else:
                gone = each.said is State.REJECTED
            (due if gone else may)[each.name] += 1
        stored, sent = Counter(story.stored[address]), story.sent[address]
        for name in dict.fromkeys([*stored, *due, *sent]):
            told = sent.get(name, "")
            excess = stored[name] - due[name] - (told == "confirmed")
            assert stored[name] >= keeps[name], f"{name!r} was accepted for a letter to {address} that is not there"
            most = may[name] + story.unconfirmed[address, name] + (told == "unknown")
            assert excess <= most, f"{name!r}: {excess} too many at {address}, {most} have a reason"
            doubled += max(0, excess - (told == "unknown"))
            vanished += max(0, -excess)
    for address in story.sent.keys() - {story.queue, story.dead}:
        for name, told in story.sent[address].items():
            count = story.stored[address].count(name)
            assert count in {"confirmed": (1,), "refused": (0,), "unknown": (0, 1)}[told], f"{name!r}: {told}, {count}"
    confirmed = {name for name, told in story.sent[story.queue].items() if told == "confirmed"}
    for published in story.published.values():
        came = [name for name in dict.fromkeys(story.stored[story.queue]) if name in confirmed.intersection(published)]
        assert came == [name for name in published if name in confirmed], f"published {published}, came {came}"
    return doubled, vanished


def _judge_books(story: AmqpStory, consumer: Consumer) -> None:
    """4: they balance, and say what happened."""
    ledger = story.ledgers[consumer.name]
    assert ledger.balanced, f"{ledger.deliveries}; {ledger.copies}"
    assert (ledger.in_hand, ledger.waiting) == (0, 0), f"{ledger.deliveries}; {ledger.copies}"
    assert ledger == consumer.folded, "the books are not the fold of the events"
    own = [each for each in story.handed if each.by is consumer]
    assert ledger.received == len(own)
    after = [each for each in own if each.fate is not None and each.fate.after]
    assert ledger.owed == sum(each.line in (each.fate and each.fate.line, Line.UNKNOWN) for each in after)
    assert consumer.running == 0, "a handler runs on"
