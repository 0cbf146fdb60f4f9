"""Places, and the room among those that wait: what nobody works on any more gives back all that it took."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from actors import Subscription, open_runtime
from actors.books import Books
from actors.drain import Drain
from actors.events import Tell
from actors.in_flight import InFlight
from actors.letterbox import Letterbox
from actors.owed_copies import OwedCopies
from actors.testing import a_delivery
from links.abc import Received, Settlement
from settlement import Delivery, Plan, Policy, Wait
from settlement.ledger import Line
from settlement.policy import Ending
from tests.actors.scenery import Clock, StageBroker, answers, lines, numbered
from tests.actors.test_taken_back import TakingQueue


@pytest.mark.parametrize("line", [Line.SUPERSEDED, Line.UNSETTLED])
async def test_one_that_is_taken_back_while_it_waits_makes_room_for_the_next(line: Line, autojump_clock: Clock) -> None:
    """`Hold(1)`: the second delivery waits for the first one's room, and has it when that is lost (DESIGN 3.1)."""
    decided: list[bytes] = []

    def held(_: Ending, delivery: Delivery[Any], __: Policy) -> Plan[str]:
        decided.append(delivery.body)
        return Plan(Line.DELAYED, "modify", before=(Wait(50.0),), instead="modify")

    queue = TakingQueue(StageBroker(), numbered(2), table=held)
    queue.held = 1
    async with open_runtime(Subscription(queue, answers(), concurrency=2)) as runtime:
        await trio.sleep(10.0)
        first, second = decided
        queue.take_back([each.delivery.body for each in queue.told.handed].index(first), line)
        await trio.sleep(49.0)
        assert queue.said == []
        await trio.sleep(2.0)
        assert queue.said == [(second, "modify")]
    assert lines(runtime.ledger("q")) == {"received": 2, line.name.lower(): 1, "delayed": 1}


@pytest.mark.parametrize(("proves", "ended"), [(False, {}), (True, {"superseded": 1})])
async def test_once_its_verb_is_with_the_link_only_a_link_that_proves_can_lose_it(
    proves: bool, ended: dict[str, int]
) -> None:
    """The verdict decides, and no log line says meanwhile that a lease was lost (DESIGN 3.4)."""
    books, drain = Books("q", Tell(())), Drain(0.0, 1.0)
    in_flight = InFlight(1, books, OwedCopies(0, Letterbox(StageBroker()), books, drain), Line.UNSETTLED)
    in_flight.proves = proves
    received = Received(a_delivery(b""))
    in_flight.take([received])
    in_flight.open[received] = Settlement(received, Plan(Line.ACKED, "accept"))

    assert in_flight.lose(Line.SUPERSEDED, received) is proves
    assert (received in in_flight.open) is not proves
    assert lines(books.ledger) == {"received": 1, **ended}
