"""The two books."""

from __future__ import annotations

import pytest

from settlement.ledger import CopiesLost, CopiesOwed, CopiesPublished, Ended, Entry, Ledger, Line, Took


def test_every_line_has_a_place_of_its_own() -> None:
    """DESIGN 3.9: a delivery ends in exactly one line; each counts on its own."""
    ledger = Ledger()
    for count, line in enumerate(Line, start=1):
        ledger.enter(Ended(line, count))

    assert (ledger.acked, ledger.retried, ledger.delayed, ledger.dropped, ledger.dead_lettered) == (1, 2, 3, 4, 5)
    assert (ledger.refused, ledger.superseded, ledger.unsettled, ledger.unknown) == (6, 7, 8, 9)
    assert ledger.received == 0


def test_received_is_entered_and_not_derived() -> None:
    """DESIGN 3.9: a delivery that was taken and ended in no line shows as a difference."""
    ledger = Ledger()
    ledger.enter(Took(3))
    ledger.enter(Ended(Line.ACKED))

    assert (ledger.received, ledger.acked) == (3, 1)
    assert not ledger.balanced
    assert ledger.deliveries.difference == 2
    assert ledger.snapshot(in_hand=2, waiting=0).balanced
    assert not ledger.snapshot(in_hand=3, waiting=0).balanced


def test_the_book_of_copies() -> None:
    """DESIGN 3.9: owed = published + lost + waiting."""
    ledger = Ledger()
    for entry in (CopiesOwed(5), CopiesPublished(), CopiesPublished(2), CopiesLost()):
        ledger.enter(entry)

    assert ledger.copies.difference == 1
    assert ledger.snapshot(in_hand=0, waiting=1).copies.difference == 0
    assert not ledger.balanced
    assert ledger.snapshot(in_hand=0, waiting=1).balanced


def test_an_entry_without_a_count_counts_one() -> None:
    """DESIGN 3.9: one delivery, one copy."""
    entries = (Ended(Line.ACKED), CopiesOwed(), CopiesPublished(), CopiesLost())

    assert [entry.count for entry in entries] == [1, 1, 1, 1]


def test_an_empty_ledger_balances() -> None:
    """DESIGN 3.9: at every stop."""
    assert Ledger().balanced


@pytest.mark.parametrize(
    "entry",
    [
        Took(0),
        Took(-1),
        Ended(Line.ACKED, 0),
        Ended(Line.UNKNOWN, -2),
        CopiesOwed(0),
        CopiesPublished(-1),
        CopiesLost(0),
    ],
)
def test_an_entry_counts_something(entry: Entry) -> None:
    """DESIGN 3.9: nothing is ever taken back out of the books."""
    ledger = Ledger()
    with pytest.raises(ValueError, match=r"^an entry counts 1 or more, not -?\d$"):
        ledger.enter(entry)
    assert Ledger() == ledger


def test_a_snapshot_does_not_change() -> None:
    """DESIGN 2: `runtime.ledger(name)` is a value of its moment."""
    ledger = Ledger()
    ledger.enter(Took(1))
    before = ledger.snapshot(in_hand=1, waiting=0)
    ledger.enter(Ended(Line.DROPPED))

    assert (before.dropped, before.in_hand, before.received) == (0, 1, 1)
    assert (ledger.dropped, ledger.in_hand) == (1, 0)


def test_a_book_reads_as_its_equation() -> None:
    """DESIGN 3.9: what a log line shows, every line of it in order."""
    ledger = Ledger(received=3, acked=2, unsettled=1, owed=2, published=1)

    assert str(ledger.deliveries) == (
        "3 received = 2 acked + 0 retried + 0 delayed + 0 dropped + 0 dead-lettered + 0 refused + 0 superseded"
        " + 1 unsettled + 0 unknown + 0 in hand"
    )
    assert str(ledger.copies) == "2 owed = 1 published + 0 lost + 0 waiting  (does not balance: 2 ≠ 1)"


def test_the_lines_are_the_designs() -> None:
    """DESIGN 3.9: *lost* is no line of a delivery."""
    assert [line.value for line in Line] == [
        "acked",
        "retried",
        "delayed",
        "dropped",
        "dead-lettered",
        "refused",
        "superseded",
        "unsettled",
        "unknown",
    ]
