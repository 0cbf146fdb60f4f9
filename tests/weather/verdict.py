"""What must be true of a run at its end, on any transport: the invariants of tests/weather/story.py."""

from __future__ import annotations

from collections import Counter

import attrs

from settlement import DeadLetter, Outcome
from settlement.ledger import Line
from tests.weather.fates import Say
from tests.weather.story import SAID, Consumer, HandOver, Story

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
    lost: int
    """What the books say of that."""


def judge(story: Story) -> Verdict:
    """Raise `AssertionError` for what does not hold."""
    assert not story.wrong, "\n".join(story.wrong)
    story.judge_broker()
    for each in story.handed:
        _judge_ends(story, each)
    finished = Counter(each.message for each in story.handed if each.said in (Say.ACCEPTED, Say.REJECTED))
    assert set(finished.values()) <= {1}
    assert len(finished) == len(story.stored[story.queue])
    doubled, vanished = _judge_counts(story)
    lost = sum(consumer.folded.lost for consumer in story.consumers)
    assert vanished <= lost, f"{vanished} messages are gone, {lost} are counted as lost"
    for consumer in story.consumers:
        _judge_books(story, consumer)
    return Verdict(Counter(each.name for each in story.handed if each.calls), doubled, vanished, lost)


def _judge_ends(story: Story, it: HandOver) -> None:
    """1 and 8: the two sides of one hand-over."""
    assert (it.said is None) == bool(it.returned), f"neither said nor back, or both: {it}"
    if it.by is None:
        assert not story.exact, f"delivered, and not taken: {it}"
        assert it.said is None or story.at_most_once or it.taken_back, f"said, and nobody has taken it: {it}"
        return
    fate = it.fate
    assert it.line is not None, f"not booked: {it}"
    if not it.by.size and isinstance(it.ending, Outcome | DeadLetter):
        assert fate is not None, f"answered, and no plan was made: {it}"
    if it.line in SAID:
        assert fate is not None, f"{it.line} without a plan: {it}"
        right = [(fate.line, it.rules.says(fate.verb)), *[(Line.RETRIED, Say.BACK)] * bool(fate.before)]
        assert story.at_most_once or (it.line, it.said) in right, f"booked, and something else was said: {it}"
        assert it.line in [line for line, _ in right], f"booked something else: {it}"
    elif it.line is Line.UNKNOWN:
        assert fate is not None, f"unknown without an order: {it}"
        assert fate.verb is not None, f"unknown without a verb: {it}"
    elif it.line is Line.SUPERSEDED:
        assert it.taken_back or story.exact, f"superseded, and nobody took it: {it}"
        assert it.said is None or it.taken_back, f"said, and booked as superseded: {it}"
    else:
        assert it.line is (Line.REFUSED if story.at_most_once else Line.UNSETTLED), f"{it}"
        assert it.said is None or story.at_most_once or it.taken_back, f"said, and not booked so: {it}"


def _judge_counts(story: Story) -> tuple[int, int]:
    """2 and 3: what was published, and why; how many are too many, and how many are gone."""
    doubled = vanished = 0
    for what, address in (("copy", story.queue), ("dead", story.dead)):
        due, may, keeps = Counter[bytes](), Counter[bytes](), Counter[bytes]()
        for each in story.handed:
            if each.fate is None or not each.publishes(what):
                continue
            ours = each.line is not Line.SUPERSEDED
            if each.fate.before:
                gone = each.said is Say.ACCEPTED and ours
                keeps[each.name] += gone
            elif story.at_most_once:
                gone = each.said is Say.ACCEPTED and each.line is each.fate.line
            else:
                gone = each.said is Say.REJECTED and ours
            if gone:
                due[each.name] += 1
            elif each.fate.before or each.line is Line.UNKNOWN:
                may[each.name] += 1
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
    for published in story.published:
        came = [name for name in dict.fromkeys(story.stored[story.queue]) if name in confirmed.intersection(published)]
        assert came == [name for name in published if name in confirmed], f"published {published}, came {came}"
    there = len(story.stored[story.queue]) - len(confirmed) + len(story.stored[story.dead]) * story.at_most_once
    assert sum(each.folded.published for each in story.consumers) <= there, "copies booked that are not there"
    return doubled, vanished


def _judge_books(story: Story, consumer: Consumer) -> None:
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
