"""Checks of a link itself, through `links.abc`."""

# K-18 is in `life`; K-24, K-25; these are this suite's own:
# L-1  `receive` is all or nothing under cancellation
# L-2  `give_back` returns what was never started
# L-3  a lease is kept by `extend`
# L-4  a lost lease is a `LeaseLost` verdict, and changes nothing
# L-5  after `stop` nothing is taken, and what is in hand can be settled
# L-6  a link that ends gives back everything that is unsettled, and nothing else
# L-7  a link that was told its limit hands over that many, and goes on when it has been told what became of them
# L-8  a source renews its leases in time
# L-9  a delivery carries its transport's handle, decoded or not

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import trio

from actors import open_runtime
from links.abc import Link, Received, Source
from links.errors import LeaseLost
from links.testing.trial import Recorder, Trial, check, numbered
from settlement import Ack, Delivery, Drop


@check("K-24", "K-26")
async def settling_out_of_order(trial: Trial) -> None:
    """Verbs said out of order are carried out for the right messages, with one verdict for each; those for which
    nothing was said return.
    """
    name, broker = await trial.queue(), trial.harness.broker()
    async with broker.connect(), trial.attached(broker, name) as (source, link):
        await trial.publish(broker, name, *numbered(5))
        held = {each.delivery.body: each for each in await trial.take(link, 5)}
        trial.equal(sorted(held), numbered(5), "received")
        verdicts = await trial.say(source, link, Ack(), held[b"m3"], held[b"m1"])
        verdicts += await trial.say(source, link, Drop(), held[b"m0"])
        trial.equal(verdicts, [None] * 3, "verdicts")
    await trial.remains(name, b"m2", b"m4")


@check("K-25", "L-6", "K-26")
async def a_link_that_ends_gives_back(trial: Trial) -> None:
    """The goodbye of a link gives back what is unsettled, each message once, and nothing that was settled."""
    name, broker = await trial.queue(), trial.harness.broker()
    async with broker.connect(), trial.attached(broker, name) as (source, link):
        await trial.publish(broker, name, *numbered(4))
        held = await trial.take(link, 4, room=2)
        settled = next(each for each in held if each.delivery.body == b"m2")
        trial.equal(await trial.say(source, link, Ack(), settled), [None], "verdicts")
    await trial.remains(name, b"m0", b"m1", b"m3")


@check("L-1")
async def receive_is_all_or_nothing(trial: Trial) -> None:
    """Whenever `receive` is cancelled, each message was handed over or comes again on the same link, and none does
    both.
    """
    name, broker = await trial.queue(), trial.harness.broker()
    rounds, taken = 20, list[Received[Any]]()
    async with broker.connect(), trial.attached(broker, name) as (source, link):
        publisher = trial.harness.publisher(broker, name)
        for number in range(rounds):
            async with trio.open_nursery() as nursery:
                scope = await nursery.start(_take_some, link, taken)
                await publisher.publish(b"m%d" % number)
                for _ in range(number % 5):  # as far as so many steps of the scheduler
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        taken += await trial.take(link, rounds - len(taken))
        trial.equal(sorted(each.delivery.body for each in taken), sorted(numbered(rounds)), "handed over, once each")
        for each in taken:
            trial.equal(await trial.say(source, link, Ack(), each), [None], "verdicts of what was handed over")
    await trial.remains(name)


async def _take_some(  # noqa: ASYNC114 -- used here alone
    link: Link[Any], taken: list[Received[Any]], *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        taken += await link.receive(3)


@check("L-2")
async def giving_back(trial: Trial) -> None:
    """`give_back` returns at once, and uncounted, what was never started; where it cannot, the detach does."""
    name, broker = await trial.queue(), trial.harness.broker()
    async with broker.connect(), trial.attached(broker, name) as (source, link):
        await trial.publish(broker, name, *numbered(2))
        held = await trial.take(link, 2)
        await link.give_back([each for each in held if each.delivery.body == b"m1"])
        if trial.can.gives_back:
            again = await trial.take(link, 1)
            trial.equal([(each.delivery.body, each.delivery.attempt) for each in again], [(b"m1", 1)], "given back")
            await trial.say(source, link, Ack(), *again)
    await trial.remains(name, *(numbered(1) if trial.can.gives_back else numbered(2)))


@check("L-3")
async def extending(trial: Trial) -> None:
    """A lease that is extended in time is kept beyond its length: nobody else gets the message, and it can be settled.
    Without leases `expires` is None.
    """
    name, broker, lease = await trial.queue(), trial.harness.broker(), trial.can.lease
    async with broker.connect(), trial.attached(broker, name, lease=lease) as (source, link):
        await trial.publish(broker, name, b"held")
        held = await trial.take(link, 1)
        if lease is None:
            trial.equal(held[0].expires, None, "expires")
        else:
            await _keep(trial, link, held, lease)
        trial.equal(await trial.say(source, link, Ack(), *held), [None], "verdicts")
    await trial.remains(name)


async def _keep(trial: Trial, link: Link[Any], held: list[Received[Any]], lease: float) -> None:
    others: list[Received[Any]] = []
    lost: Sequence[Received[Any]] = []
    before = 0.0
    until = trio.current_time() + 1.5 * lease
    async with trio.open_nursery() as nursery:
        scope = await nursery.start(_take_some, link, others)
        while trio.current_time() < until:
            await trio.sleep(lease / 8)
            before = held[0].expires or 0.0
            lost = await link.extend(held)
            if lost or (held[0].expires or 0.0) <= before:
                break
        scope.cancel()
    trial.equal(list(lost), [], "lost leases")
    trial.holds((held[0].expires or 0.0) > before, f"a later expiry than {before:.2f}", held[0].expires)
    trial.equal([each.delivery.body for each in others], [], "received by others meanwhile")


@check("L-4")
async def losing_a_lease(trial: Trial) -> None:
    """A lease that ran out, and that another link has taken, is somebody else's: settling and extending the late
    delivery changes nothing, and the verdict is `LeaseLost`. Without leases a delivery stays ours.
    """
    name, broker, lease = await trial.queue(), trial.harness.broker(), trial.can.lease
    async with broker.connect(), trial.attached(broker, name, lease=lease) as (source, link):
        await trial.publish(broker, name, b"slow")
        late = await trial.take(link, 1)
        if lease is None:
            trial.equal(await trial.say(source, link, Ack(), *late), [None], "verdicts")
        else:
            async with AsyncExitStack() as stack:
                other = trial.harness.broker()  # where a queue is subscribed once per broker
                if other is not broker:
                    await stack.enter_async_context(other.connect())
                _, taker = await stack.enter_async_context(trial.attached(other, name, lease=lease))
                await _lose(trial, source, link, late[0], taker)
    await trial.remains(name)


@check("L-4")
async def letting_a_lease_lapse(trial: Trial) -> None:
    """A lease that ran out and that nobody has taken is still ours: the link does not take the delivery a second time,
    and its verb is carried out. What the link was told to forget comes again.
    """
    name, broker, lease = await trial.queue(), trial.harness.broker(), trial.can.lease
    async with broker.connect(), trial.attached(broker, name, lease=lease) as (source, link):
        await trial.publish(broker, name, b"slow")
        (late,) = await trial.take(link, 1)
        if lease is not None:
            twice: list[Received[Any]] = []
            with trio.move_on_at((late.expires or 0.0) + lease / 2):
                twice += await link.receive(1)
            trial.equal([each.delivery.body for each in twice], [], "received a second time")
        trial.equal(await trial.say(source, link, Ack(), late), [None], "verdicts")
        if lease is not None:
            await trial.publish(broker, name, b"given up")
            (late,) = await trial.take(link, 1)
            link.forget(late)
            await trio.sleep_until(late.expires or 0.0)
            again = await trial.take(link, 1)
            trial.equal([each.delivery.body for each in again], [b"given up"], "received again")
            trial.equal(await trial.say(source, link, Ack(), *again), [None], "its verdict")
    await trial.remains(name)


async def _lose(trial: Trial, source: Source[Any], link: Link[Any], late: Received[Any], taker: Link[Any]) -> None:
    ended = late.expires or 0.0
    await trio.sleep_until(ended)
    again = await trial.take(taker, 1)
    trial.equal([each.delivery.body for each in again], [b"slow"], "received again")
    trial.equal(again[0].delivery.attempt, 2 if trial.can.counts else 1, "its attempt")
    trial.equal(list(await link.extend([late])), [late], "lost leases")
    (verdict,) = await trial.say(source, link, Drop(), late)
    trial.holds(isinstance(verdict, LeaseLost), "LeaseLost, the verdict of the late one", repr(verdict))
    trial.holds((again[0].expires or 0.0) > ended, "a later expiry of the new one", again[0].expires)
    trial.equal(await trial.say(source, taker, Ack(), *again), [None], "verdicts of the new one")


@check("L-5")
async def stopping(trial: Trial) -> None:
    """After `stop` what is in hand can be settled, and what is published waits for the next link, uncounted."""
    name, broker = await trial.queue(), trial.harness.broker()
    async with broker.connect(), trial.attached(broker, name) as (source, link):
        await trial.publish(broker, name, b"before")
        held = await trial.take(link, 1)
        link.stop()
        await trial.publish(broker, name, b"behind")
        trial.equal(await trial.say(source, link, Ack(), *held), [None], "verdicts")
    found = await trial.remaining(name)
    wanted = [(b"behind", 1)] if trial.can.backlog else []
    trial.equal([(each.body, each.attempt) for each in found], wanted, "a new connection finds, and its attempt")


@check("L-7")
async def a_limit_and_what_left_without_a_verb(trial: Trial) -> None:
    """A link that was told its limit hands over as many, and takes the places back: of what was settled, of what it was
    given back, and of what it was told to forget. That comes back with the link's end, if not before.
    """
    name, broker = await trial.queue(), trial.harness.broker()
    async with broker.connect(), trial.attached(broker, name, limit=3) as (source, link):
        await trial.publish(broker, name, *numbered(5))
        one, two, three = await trial.take(link, 3)
        link.forget(two)
        trial.equal(await trial.say(source, link, Ack(), one), [None], "its verdict")
        await link.give_back([three])
        again = await trial.take(link, 1)
        trial.equal(await trial.say(source, link, Ack(), *again), [None], "the next one's verdict")
    left = [body for body in numbered(5) if body not in (one.delivery.body, again[0].delivery.body)]
    found = sorted(each.body for each in await trial.remaining(name))  # in any order: they went back at several times
    trial.equal(found, left if trial.can.backlog else [], "a new connection finds")


@check("L-8")
async def renewing_in_time(trial: Trial) -> None:
    """A source with a lease asks for each renewal well before its end: between nothing and half of a lease."""
    name, broker, lease = await trial.queue(), trial.harness.broker(), trial.can.lease
    source = trial.harness.source(broker, name, lease=lease)
    if source.lease is not None:
        renewals = [source.renewal() for _ in range(100)]
        within = all(0 < each <= 0.6 * source.lease for each in renewals)
        trial.holds(within, f"renewals above 0 and up to six tenths of {source.lease:g} s", max(renewals))


@check("L-9")
async def a_handle_is_kept(trial: Trial) -> None:
    """A delivery that is decoded has the handle that its link gave it: copies and dead letters find their way by it."""
    name, broker = await trial.queue(), trial.harness.broker()
    plain, decoded = Recorder(trial), Recorder(trial)
    for recorder, decode in ((plain, None), (decoded, repr)):
        async with open_runtime(trial.subscription(broker, name, recorder, decode=decode)):
            await trial.publish(broker, name, b"x")
            await recorder.sees(b"x")
    first, second = (_handle_of(each.deliveries[0]) for each in (plain, decoded))
    trial.equal(second, first, "the class of the handle of a decoded delivery")


def _handle_of(delivery: Delivery[Any]) -> str:
    handle: object = delivery._handle  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- users shall not see it
    return type(handle).__name__
