"""Checks of what arrives: order, backlog, headers, routing, and books that balance."""
# K-1 to K-9, K-11, K-12

from __future__ import annotations

from collections.abc import Mapping

import attrs

from actors import Subscription, open_runtime
from links.abc import Broker
from links.errors import LinkRefused, PublishNotAccepted
from links.testing.harness import Routing
from links.testing.trial import MARKER, Recorder, Trial, check, numbered
from settlement import Drop, Retry, RetryAfter

HEADERS: Mapping[str, Mapping[str, bytes]] = {
    "many": {f"header-{number}": b"%d" % number for number in range(24)},
    "empty": {"empty": b""},
    "binary": {"binary": b"\xff\x00\xfe", "after": b"1"},
    "traced": {"traceparent": b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
}
"""What a transport carries byte for byte, or refuses; `traced` gets a retry header besides."""
# C-10.2


@check("K-1")
async def arrives_in_order(trial: Trial) -> None:
    """What is published in order arrives in order at one subscription of concurrency 1."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    bodies = numbered(20)
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, *bodies)
        await recorder.sees(*bodies)
    trial.bodies(recorder.bodies, bodies, "handled")


@check("K-2")
async def backlog_arrives(trial: Trial) -> None:
    """What is published before anybody subscribed arrives where the transport has a backlog, else it never does."""
    name, broker, recorder = await trial.stored(b"early"), trial.harness.broker(), Recorder(trial)
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.quiet(broker, name, recorder)
    trial.bodies(recorder.bodies, [b"early", MARKER] if trial.can.backlog else [MARKER], "handled")


@check("K-3")
async def ack_consumes(trial: Trial) -> None:
    """After `Ack` nothing comes again on the same subscription."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    bodies = numbered(5)
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, *bodies)
        await recorder.sees(*bodies)
        await trial.quiet(broker, name, recorder)
    trial.bodies(recorder.bodies, [*bodies, MARKER], "handled")


@check("K-4")
async def retry_brings_it_again(trial: Trial) -> None:
    """After `Retry` the message comes again on the same subscription, once, and the broker's count says so."""
    name, broker = await trial.queue(), trial.harness.broker()
    recorder = Recorder(trial, {b"again": [Retry()]})
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, b"again")
        await recorder.sees(b"again", b"again")
        await trial.quiet(broker, name, recorder)
    trial.equal(recorder.bodies, [b"again", b"again", MARKER], "handled")
    counts = [delivery.redelivery_count for delivery in recorder.of(b"again")]
    first = 0 if trial.can.counts_at_first else None
    trial.equal(counts, [first, 1] if trial.can.counts_redeliveries else [None, None], "redelivery counts")


@check("K-5")
async def drop_does_not_bring_it_again(trial: Trial) -> None:
    """After `Drop` the message does not come again on the same subscription."""
    name, broker = await trial.queue(), trial.harness.broker()
    recorder = Recorder(trial, {b"gone": [Drop("conformance")]})
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, b"gone")
        await recorder.sees(b"gone")
        await trial.quiet(broker, name, recorder)
    trial.equal(recorder.bodies, [b"gone", MARKER], "handled")


@check("K-6")
async def headers_arrive(trial: Trial) -> None:
    """Headers arrive with names and bytes as sent, and so does the body."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    headers = {"content-type": b"application/json", "correlation-id": b"42", "tenant": "ö".encode()}
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.harness.publisher(broker, name).publish(b'{"id": 1}\x00', headers)
        await recorder.sees(b'{"id": 1}\x00')
    trial.headers(recorder.deliveries[0], headers, "headers")
    trial.equal(recorder.deliveries[0].attempt, 1, "the first attempt")


@check("K-7")
async def every_confirmed_publish_is_there(trial: Trial) -> None:
    """Every confirmed publish, of several publishers in turn, arrives in order, with its own headers."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    publishers = [trial.harness.publisher(broker, name) for _ in range(2)]
    bodies = numbered(10)
    async with open_runtime(trial.subscription(broker, name, recorder)):
        for number, body in enumerate(bodies):
            await publishers[number % 2].publish(body, {"number": b"%d" % number})
        await recorder.sees(*bodies)
    trial.bodies(recorder.bodies, bodies, "handled")
    for number, body in enumerate(bodies):
        trial.headers(recorder.of(body)[0], {"number": b"%d" % number}, f"headers of {body!r}")


@check("K-8")
async def two_subscriptions_share_or_both_get(trial: Trial) -> None:
    """Two subscriptions of one name get each message as the routing says: one of them, or both."""
    name, broker = await trial.queue(), trial.harness.broker()
    both = Recorder(trial)
    one, two, second = Recorder(trial, beside=both), Recorder(trial, beside=both), broker
    if not trial.can.twice:
        await _refused(trial, broker, name)
        broker, second = trial.harness.broker(), trial.harness.broker()
    bodies = numbered(20)
    async with open_runtime(
        trial.subscription(broker, name, one, name="one"), trial.subscription(second, name, two, name="two")
    ):
        await trial.publish(broker, name, *bodies)
        if trial.can.routing is Routing.BOTH:
            await one.sees(*bodies)
            await two.sees(*bodies)
        else:
            await both.sees(*bodies)
    if trial.can.routing is Routing.BOTH:
        trial.bodies(one.bodies, bodies, "the first handled")
        trial.bodies(two.bodies, bodies, "the second handled")
    else:
        trial.equal(sorted(both.bodies), sorted(bodies), "both together handled")
        await trial.remains(name)


async def _refused(trial: Trial, broker: Broker, name: str) -> None:
    recorder = Recorder(trial)
    expected = "a second subscription of one name is a LinkRefused that names it"
    try:
        async with open_runtime(
            trial.subscription(broker, name, recorder, name="one"),
            trial.subscription(broker, name, recorder, name="two"),
        ):
            pass
    except LinkRefused as error:
        trial.holds("one" in str(error) or "two" in str(error), expected, error)
    else:
        trial.fail(expected, "both were attached")


@check("K-9")
async def books_balance(trial: Trial) -> None:
    """After a mix of all outcomes, delayed ones included, nothing is pending and both books balance."""
    name, broker = await trial.queue(), trial.harness.broker()
    bodies = numbered(12)
    recorder = Recorder(
        trial, {b"m0": [Retry()], b"m1": [RetryAfter(0.2)], b"m2": [Drop()], b"m3": [Retry(), RetryAfter(0), Drop()]}
    )
    async with open_runtime(trial.subscription(broker, name, recorder, name="books", concurrency=3)) as runtime:
        await trial.publish(broker, name, *bodies)
        await recorder.sees(*bodies, b"m0", b"m1", b"m3", b"m3")
    ledger = runtime.ledger("books")
    trial.holds(ledger.balanced, "both books balance", f"{ledger.deliveries}; {ledger.copies}")
    seen = attrs.asdict(ledger)
    retried, delayed = (2, 2) if trial.can.delays else (4, 0)
    copies = 0 if trial.can.native_delay else delayed
    wanted = {"received": 16, "acked": 10, "retried": retried, "delayed": delayed, "dropped": 2}
    wanted |= {"owed": copies, "published": copies, "in_hand": 0, "waiting": 0}
    trial.equal({line: seen[line] for line in wanted}, wanted, "the ledger")
    await trial.remains(name)


@check("K-11")
async def headers_arrive_whole_or_not_at_all(trial: Trial) -> None:
    """24 headers, an empty value, a value that is no UTF-8, a retry count beside a trace: byte for byte, or refused at
    `publish`, and then the message never arrives.
    """
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    cases = {case: dict(headers) for case, headers in HEADERS.items()}
    cases["traced"][trial.can.retry_header] = b"2"
    taken: list[bytes] = []
    async with open_runtime(trial.subscription(broker, name, recorder)):
        for case, headers in cases.items():
            try:
                await trial.harness.publisher(broker, name).publish(case.encode(), headers)
            except PublishNotAccepted as error:
                trial.holds(not trial.can.byte_headers, f"the headers {headers!r} are taken", error)
            else:
                taken.append(case.encode())
        await trial.quiet(broker, name, recorder)
    trial.holds(trial.can.byte_headers or len(taken) < len(cases), "at least one case is refused", "all were taken")
    trial.bodies(recorder.bodies, [*taken, MARKER], "what was taken arrives, and nothing else")
    for delivery in recorder.deliveries:
        if delivery.body != MARKER:
            trial.headers(delivery, cases[delivery.body.decode()], f"headers of case {delivery.body.decode()}")


@check("K-12")
async def messages_without_a_key_all_arrive(trial: Trial) -> None:
    """32 messages without a key all arrive, each once, at four handlers."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    bodies = numbered(32)
    async with open_runtime(Subscription(trial.harness.source(broker, name), recorder, concurrency=4)):
        await trial.publish(broker, name, *bodies)
        await recorder.sees(*bodies)
    trial.equal(sorted(recorder.bodies), sorted(bodies), "handled")
    trial.equal({delivery.key for delivery in recorder.deliveries}, {None}, "keys")
    await trial.remains(name)
