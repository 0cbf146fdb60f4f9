"""Checks of settlement and retries, as a user sees them."""
# K-15, K-21 to K-26, K-30 to K-34

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import trio

from actors import open_runtime
from links.abc import Broker
from links.testing.harness import Caps
from links.testing.trial import MARKER, Recorder, Trial, check
from settlement import Delivery, Drop, Outcome, Policy, Retry, RetryAfter
from settlement.ledger import Ledger


@check("K-21", "K-26")
async def ack_consumes_for_good(trial: Trial) -> None:
    """After `Ack` a new connection finds nothing."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, b"done")
        await recorder.sees(b"done")
    await trial.remains(name)


@check("K-22", "K-15", "K-26")
async def drop_drops_for_good(trial: Trial) -> None:
    """After `Drop` a new connection finds nothing."""
    name, broker = await trial.queue(), trial.harness.broker()
    recorder = Recorder(trial, {b"gone": repeat(Drop("conformance"))})
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, b"gone")
        await recorder.sees(b"gone")
    await trial.remains(name)


@check("K-23", "K-15", "K-26")
async def retry_returns_to_a_new_connection(trial: Trial) -> None:
    """A message that was answered `Retry` just before the end is there for a new connection, once, and counted."""
    name, broker = await trial.queue(), trial.harness.broker()
    again = _Last(trial)
    async with open_runtime(trial.subscription(broker, name, again)) as runtime:
        again.before = runtime.drain
        await trial.publish(broker, name, b"again")
        await again.sees(b"again")
        await runtime.finished()
    found = await trial.remaining(name)
    trial.equal([each.body for each in found], [b"again"] if trial.can.backlog else [], "a new connection finds")
    if trial.can.backlog:
        least = 2 if trial.can.counts and trial.can.counts_redeliveries else 1
        most = least + 1 if trial.can.counts_detach else least  # it may have come once more before the detach
        attempt = found[0].attempt
        trial.holds(least <= attempt <= most, f"its attempt: {least} to {most}", attempt)


class _Last(Recorder):
    """Begins the drain before it answers `Retry`, so that nobody takes the message again on this connection."""

    before: Callable[[], None]

    async def __call__(self, delivery: Delivery[object]) -> Outcome:
        self.note(delivery)
        self.before()
        await trio.lowlevel.checkpoint()
        return Retry()


@check("K-25", "K-26")
async def what_has_no_outcome_returns(trial: Trial) -> None:
    """A delivery whose handler was cancelled has no outcome: the message is there for a new connection."""
    name, broker = await trial.queue(), trial.harness.broker()
    hangs = _Hangs(trial)
    runtime = None
    try:
        async with open_runtime(trial.subscription(broker, name, hangs, name="hangs")) as runtime:
            await trial.publish(broker, name, b"unsettled")
            await hangs.sees(b"unsettled")
            raise _LeftError
    except _LeftError:
        pass
    ledger = Ledger() if runtime is None else runtime.ledger("hangs")
    trial.equal((ledger.received, ledger.unsettled), (1, 1), "received and unsettled")
    await trial.remains(name, b"unsettled")


class _LeftError(Exception):
    """How the block is left."""


class _Hangs(Recorder):
    async def __call__(self, delivery: Delivery[object]) -> Outcome:
        self.note(delivery)
        await trio.sleep_forever()


@check("K-30")
async def a_delayed_message_comes_once(trial: Trial) -> None:
    """After `RetryAfter` the message comes once more, headers intact: itself, or where the transport publishes copies,
    a copy that counts in its retry header.
    """
    name, broker = await trial.queue(), trial.harness.broker()
    recorder = Recorder(trial, {b"copied": [RetryAfter(0.1)]})
    headers = {"tenant": b"7", "traceparent": b"00-1-2-01"}
    async with open_runtime(trial.subscription(broker, name, recorder, name="copies")) as runtime:
        await trial.harness.publisher(broker, name).publish(b"copied", headers)
        await recorder.sees(b"copied", b"copied")
        await trial.quiet(broker, name, recorder)
    trial.equal(recorder.bodies, [b"copied", b"copied", MARKER], "handled")
    for delivery in recorder.of(b"copied"):
        trial.headers(delivery, headers, "headers")
    counted = recorder.deliveries[1].headers.get(trial.can.retry_header)
    trial.equal(counted, None if trial.can.native_delay else b"1", "the retry header of the second delivery")
    ledger = runtime.ledger("copies")
    copies = 0 if trial.can.native_delay else 1
    trial.equal((ledger.owed, ledger.published, ledger.lost), (copies, copies, 0), "copies owed, published, lost")
    await trial.remains(name)


@check("K-31")
async def attempts_are_counted(trial: Trial) -> None:
    """Across `Retry` and `RetryAfter` in any mix the attempts read 1, 2, 3; where nothing counts, 1, 1, 1. Where only
    copies count, a cap makes every retry one.
    """
    name, broker = await trial.queue(), trial.harness.broker()
    mixes: dict[bytes, Sequence[Outcome]] = {
        b"rr": [Retry(), Retry()],
        b"rd": [Retry(), RetryAfter(0.05)],
        b"dr": [RetryAfter(0.05), Retry()],
        b"dd": [RetryAfter(0.05), RetryAfter(0)],
    }
    recorder = Recorder(trial, mixes)
    copied = trial.can.counts and not trial.can.counts_redeliveries
    policy = Policy(max_attempts=max(9, trial.can.least_cap)) if copied else Policy()
    async with open_runtime(trial.subscription(broker, name, recorder, policy=policy)):
        await trial.publish(broker, name, *mixes)
        await recorder.sees(*[body for body in mixes for _ in range(3)])
    for body in mixes:
        attempts = [delivery.attempt for delivery in recorder.of(body)]
        trial.equal(attempts, [1, 2, 3] if trial.can.counts else [1, 1, 1], f"attempts of {body!r}")


@check("K-32")
async def a_cap_moves_the_message_once(trial: Trial) -> None:
    """Under a cap of n the handler is called n times, then the message is in the dead letter once, as it arrived; where
    nothing counts, a cap is a `ValueError`.
    """
    name, dead, broker = await trial.queue(), await trial.queue(), trial.harness.broker()
    cap = max(3, trial.can.least_cap)
    policy = Policy(max_attempts=cap, dead_letter=dead)
    mix: list[Outcome] = [Retry() if call % 2 else RetryAfter(0.05) for call in range(cap + 2)]
    recorder, buried = Recorder(trial, {b"poison": mix}), Recorder(trial)
    if trial.can.caps is Caps.NONE:
        make = partial(trial.subscription, broker, name, recorder, policy=policy)
        trial.refuses(make, "a cap is refused", "max_attempts")
        return
    headers = {"tenant": b"7"}
    async with open_runtime(
        trial.subscription(broker, name, recorder, name="capped", policy=policy),
        trial.subscription(broker, dead, buried, name="dead"),
    ) as runtime:
        await trial.harness.publisher(broker, name).publish(b"poison", headers)
        await buried.sees(b"poison")
        await trial.quiet(broker, name, recorder)
        await trial.quiet(broker, dead, buried)
    trial.equal(recorder.bodies, [b"poison"] * cap + [MARKER], "handled")
    trial.equal(buried.bodies, [b"poison", MARKER], "in the dead letter")
    trial.headers(buried.deliveries[0], headers, "headers in the dead letter")
    trial.equal(runtime.ledger("capped").dead_lettered, 1, "dead-lettered")
    await trial.remains(name)


@check("K-33")
async def half_a_cap(trial: Trial) -> None:
    """Half a cap is a `ValueError` at construction where a transport needs both halves; where each may stand alone, a
    cap without a dead letter drops at the cap, and a dead letter without a cap takes the first retry.
    """
    name, dead, broker = await trial.queue(), await trial.queue(), trial.harness.broker()
    cap = Policy(max_attempts=max(2, trial.can.least_cap))
    letter = Policy(dead_letter=dead)
    if trial.can.caps is not Caps.EITHER:
        for policy in (cap, letter):
            make = partial(trial.subscription, broker, name, Recorder(trial), policy=policy)
            trial.refuses(make, "half a cap is refused", "max_attempts", "dead_letter")
        return
    dropped = await _answers(trial, broker, name, cap)
    trial.equal(dropped, [b"poison"] * (cap.max_attempts or 0) + [MARKER], "handled under a cap without a dead letter")
    moved = await _answers(trial, trial.harness.broker(), name, letter)
    trial.equal(moved, [b"poison", MARKER], "handled with a dead letter without a cap")
    await trial.remains(name)
    await trial.remains(dead, b"poison")


async def _answers(trial: Trial, broker: Broker, name: str, policy: Policy) -> list[bytes]:
    calls = policy.max_attempts or 1
    recorder = Recorder(trial, {b"poison": [Retry()] * (calls + 2)})
    async with open_runtime(trial.subscription(broker, name, recorder, policy=policy)):
        await trial.publish(broker, name, b"poison")
        await recorder.sees(*[b"poison"] * calls)
        await trial.quiet(broker, name, recorder)
    return recorder.bodies


@check("K-34")
async def nothing_comes_before_its_delay(trial: Trial) -> None:
    """While a message waits for its delay others are handled, and it is not; where none is kept it comes at once."""
    name, broker = await trial.queue(), trial.harness.broker()
    recorder = Recorder(trial, {b"later": [RetryAfter(3 * trial.can.patience)]})
    async with open_runtime(trial.subscription(broker, name, recorder), grace=0.0) as runtime:
        await trial.publish(broker, name, b"later")
        await recorder.sees(b"later")
        await trial.publish(broker, name, b"other")
        await recorder.sees(b"other", *([] if trial.can.delays else [b"later", b"later"]))
        seen = recorder.bodies
        runtime.drain()
    if trial.can.delays:
        trial.equal(seen, [b"later", b"other"], "handled before the delay was over")
