"""docs/brokers.md says what brokers do, and this measures it: each cell of its tables, on each broker.

tests/run --only amqp -- -k matrix                      # the page is right, or the test says which cell is not
UPDATE_MATRIX=1 tests/run --only amqp -- -k matrix      # the page is written anew, cell by cell
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import pytest
import trio
from trio.abc import Clock

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from links.amqp.addresses import Address, Queue, Raw
from links.amqp.broker import AmqpBroker
from links.amqp.engine.events import ACCEPTED, FAILED, REJECTED, RELEASED, Disposition, State
from links.amqp.engine.handles import Arrival
from links.amqp.engine.receiver import Receiver
from links.amqp.engine.session import Session
from links.amqp.wire.sections import Sections, split
from links.amqp.wire.values import Timestamp
from links.errors import ConnectionBroken, LinkBroken, LinkRefused
from tests.links.amqp_kit import PATIENCE, Place, never_lost, places

pytestmark = pytest.mark.amqp

PAGE: Final = Path(__file__).parents[2] / "docs" / "brokers.md"
TRIES: Final = 25
"""More than any broker allows where nothing was declared."""
UNDELIVERABLE: Final = Disposition(State.MODIFIED, failed=True, undeliverable=True)
SHAPES: Final = ("embedded", "4.3-quorum", "4.3-classic", "4.0-quorum", "4.0-classic")
UNFLAGGED: Final = Disposition(State.MODIFIED)


# --- the page


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def compare(shape: str, measured: dict[str, str]) -> None:
    """Hold the column of a shape to what was measured, or write it into the page."""
    column = shape.replace("-", " ")
    with PAGE.open("r+") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        lines = page.read().split("\n")
        found: dict[str, str] = {}
        header: list[str] = []
        for at, line in enumerate(lines):
            row = cells(line) if line.startswith("|") else []
            header = header or row if row else []
            if row and row[0] in measured and column in header:
                where = header.index(column)
                found[row[0]], row[where] = row[where], measured[row[0]]
                lines[at] = f"| {' | '.join(row)} |"
        if os.environ.get("UPDATE_MATRIX"):
            assert found.keys() == measured.keys(), "rows and columns of the page are made by hand"
            page.seek(0)
            page.truncate()
            page.write("\n".join(lines))
            return
    assert found == measured, f"docs/brokers.md, column {column}: the head of this file says how to write it anew"


# --- measuring


@attrs.define
class Rig:
    """A connection, and a session on it."""

    broker: AmqpBroker
    session: Session

    def attach(self, address: Address) -> Receiver:
        life = self.broker.life
        return life.connection.attach_receiver(self.session, address.on(life.peer), name=life.link_name("matrix"))

    async def receiver(self, name: str) -> Receiver:
        """With a credit of one."""
        receiver = self.attach(Queue(name))
        await receiver.attached()
        receiver.grant(1)
        return receiver

    async def said(self, address: Address, raw: bytes) -> State:
        """What the broker says of a message, on a link in this session."""
        life = self.broker.life
        sender = life.connection.attach_sender(self.session, address.on(life.peer), name=life.link_name("matrix"))
        await sender.attached()
        outcome = await (await sender.send(raw)).answered()
        assert outcome is not None
        return outcome.state


@asynccontextmanager
async def rig(place: Place) -> AsyncGenerator[Rig, None]:
    broker = place.broker()
    with trio.fail_after(PATIENCE):
        async with broker.connect():
            yield Rig(broker, await broker.life.connection.begin())


async def waiting(place: Place, name: str, count: int) -> list[Sections]:
    """The messages of a queue, on a connection of its own."""
    found: list[Sections] = []
    async with rig(place) as rigged:
        receiver = await rigged.receiver(name)
        receiver.grant(count - 1)
        while len(found) < count:
            found += [split(arrival.raw) for arrival in await receiver.receive(count)]
    return found


# --- what becomes of a message


async def becomes(place: Place, said: Disposition | str) -> str:
    """What becomes of the first of three messages that wait in a queue."""
    dead = await place.queue()
    name = await place.queue(dead, limited=True)
    with contextlib.suppress(ConnectionBroken):
        async with rig(place) as rigged:
            for number in (1, 2, 3):
                await rigged.broker.publisher(name).publish(b"%d" % number)
            receiver = await rigged.receiver(name)
            (arrival,) = await receiver.receive(1)
            await say(place, rigged, receiver, arrival, said)
    buried = said in (REJECTED, UNDELIVERABLE)
    left = 2 if buried or said == ACCEPTED else 3
    await place.until_ready(name, left)
    await place.until_ready(dead, int(buried))
    found = await waiting(place, name, left)
    if left == 3:
        position = {b"1": "first", b"2": "last"}[found[0].body]
        count = next(each.delivery_count for each in found if each.body == b"1")
        return f"{position}, {'counted' if count else 'not counted'}"
    assert [each.body for each in found] == [b"2", b"3"]
    return f"dead letter, count {(await waiting(place, dead, 1))[0].delivery_count or 0}" if buried else "gone"


async def say(place: Place, rigged: Rig, receiver: Receiver, arrival: Arrival, said: Disposition | str) -> None:
    match said:
        case Disposition():
            receiver.settle(arrival, said)
            assert await receiver.proved()
        case "detach":
            receiver.detach()
            await receiver.detached()
        case "end":
            rigged.session.end()
            await rigged.session.ended()
        case "cut":
            await place.cut()
            await trio.sleep_forever()
        case _:
            pass  # the connection is closed, anyway


DISPOSITIONS: Final[dict[str, Disposition | str]] = {
    "*accepted*": ACCEPTED,
    "*modified*, delivery-failed": FAILED,
    "*modified*, delivery-failed, undeliverable-here": UNDELIVERABLE,
    "*modified* without a flag": UNFLAGGED,
    "*released*": RELEASED,
    "*rejected*": REJECTED,
    "the link is detached": "detach",
    "the session is ended": "end",
    "the connection is closed": "close",
    "the connection breaks": "cut",
}


@places(*SHAPES)
async def test_the_page_says_what_becomes_of_a_message(place: Place, clock: Clock | None) -> None:
    """A-1.1 to A-1.6, K-61, K-62, K-64: the first of three messages is unsettled, then this is said or done."""
    compare(place.shape, {row: await becomes(place, said) for row, said in DISPOSITIONS.items()})


# --- what else differs


async def tries(place: Place, said: Disposition | str) -> int:
    """How often the first of two messages is delivered that ends in this way each time; no more than `TRIES`."""
    name = await place.queue(limited=True)
    async with rig(place) as rigged:
        for body in (b"1", b"2"):
            await rigged.broker.publisher(name).publish(body)
        receiver = await rigged.receiver(name)
        for count in range(TRIES):
            (arrival,) = await receiver.receive(1)
            if split(arrival.raw).body == b"2":
                return count
            await say(place, rigged, receiver, arrival, said)
            if isinstance(said, Disposition):
                receiver.grant(1)
            else:
                receiver = await rigged.receiver(name)
    return TRIES


async def limit(place: Place) -> str:
    count = await tries(place, FAILED)
    return "none" if count == TRIES else f"{count} tries"


async def counts_released(place: Place) -> str:
    return "yes" if await tries(place, RELEASED) < TRIES else "no"


async def counts_detach(place: Place) -> str:
    return "yes" if await tries(place, "detach") < TRIES else "no"


async def has_header(place: Place) -> str:
    name = await place.queue()
    async with rig(place) as rigged:
        await rigged.broker.publisher(name).publish(b"x")
    return "no" if (await waiting(place, name, 1))[0].delivery_count is None else "yes"


async def keeps_annotations(place: Place) -> str:
    name = await place.queue()
    async with rig(place) as rigged:
        await rigged.broker.publisher(name).publish(b"x")
        receiver = await rigged.receiver(name)
        (arrival,) = await receiver.receive(1)
        receiver.settle(arrival, Disposition(State.MODIFIED, failed=True, annotations={"x-opt-mark": 7}))
        assert await receiver.proved()
    return "yes" if b"x-opt-mark" in (await waiting(place, name, 1))[0].raw else "no"


async def delays(place: Place) -> str:
    name = await place.queue()
    async with rig(place) as rigged:
        await rigged.broker.publisher(name).publish(b"x")
        receiver = await rigged.receiver(name)
        (arrival,) = await receiver.receive(1)
        due, began = Timestamp(round((time.time() + 0.4) * 1000)), trio.current_time()
        receiver.settle(arrival, Disposition(State.MODIFIED, failed=True, annotations={"x-opt-delivery-time": due}))
        receiver.grant(1)
        await receiver.receive(1)
        return "yes" if trio.current_time() - began > 0.3 else "no"


async def missing_queue(place: Place) -> str:
    async with rig(place) as rigged:
        receiver = rigged.attach(Queue("nobody-made-it"))
        with contextlib.suppress(LinkRefused):
            await receiver.attached()
            return "makes it"
        return how_it_ended(rigged.session)


def how_it_ended(session: Session) -> str:
    return "ends the link" if session.broken is None else "ends the session"


async def ends(place: Place, raw: bytes) -> str:
    """What a message does to the link on which it is published, or its session."""
    name = await place.queue()
    async with rig(place) as rigged:
        with contextlib.suppress(LinkBroken):
            return str(Disposition(await rigged.said(Queue(name), raw)))
        return how_it_ended(rigged.session)


async def foreign_user(place: Place) -> str:
    return await ends(place, b"\x00\x53\x73\xc0\x0a\x02\x40\xa0\x06nobody\x00\x53\x75\xa0\x01x")


async def garbage(place: Place) -> str:
    return await ends(place, b"\xff\x00 no message")


async def unrouted(place: Place) -> str:
    to = Raw("/exchanges/amq.direct/nowhere") if place.is_rabbitmq else Queue("nobody takes from it")
    async with rig(place) as rigged:
        return str(Disposition(await rigged.said(to, b"\x00\x53\x75\xa0\x01x")))


async def topic(place: Place) -> str:
    async with rig(place) as rigged:
        with contextlib.suppress(LinkRefused):
            async with rigged.broker.topic("news").attach("matrix", never_lost, 5.0):
                return "yes"
        return "refused"


async def echoes(place: Place) -> str:
    name = await place.queue()
    async with rig(place) as rigged:
        return "yes" if await (await rigged.receiver(name)).proved() else "no"


DIFFERENCES: Final[dict[str, Callable[[Place], Awaitable[str]]]] = {
    "a first delivery has a header section (a count)": has_header,
    "*modified* with `x-opt-delivery-time` waits": delays,
    "other annotations of *modified* stay with the message": keeps_annotations,
    "delivery limit where none was declared": limit,
    "*released* counts to it": counts_released,
    "a detach counts to it": counts_detach,
    "a flow with echo is answered": echoes,
    "`broker.topic(…)` to take from": topic,
    "a link to a queue that is not there": missing_queue,
    "a message that no queue gets": unrouted,
    "a message with the user-id of another": foreign_user,
    "a message that is none": garbage,
}


@places(*SHAPES)
async def test_the_page_says_what_else_differs(place: Place, clock: Clock | None) -> None:
    compare(place.shape, {row: await measure(place) for row, measure in DIFFERENCES.items()})
