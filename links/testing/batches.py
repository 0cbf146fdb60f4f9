"""Checks of batches."""
# K-50

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from actors import BatchSubscription, open_runtime
from links.abc import Broker
from links.testing.trial import MARKER, Recorder, Trial, check, numbered
from settlement import Delivery, Drop, Outcome, Retry

SIZE = 3


class _Batches:
    """A batch handler: records how long each batch was, and answers each element by the recorder's script."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sizes: list[int] = []

    async def __call__(self, deliveries: list[Delivery[Any]]) -> Sequence[Outcome]:
        await trio.lowlevel.checkpoint()
        self.sizes.append(len(deliveries))
        return [self.recorder.note(delivery) for delivery in deliveries]


def _subscription(trial: Trial, broker: Broker, name: str, handler: _Batches) -> BatchSubscription[Any]:
    return BatchSubscription(trial.harness.source(broker, name), handler, size=SIZE, wait=0.1, name="batches")


def _refused(trial: Trial, broker: Broker, name: str) -> bool:
    """Are there no batches? Then that is a `ValueError` at construction."""
    if not trial.can.batch:
        batches = _Batches(Recorder(trial))
        trial.refuses(lambda: _subscription(trial, broker, name, batches), "a batch is refused", "size", "batch")
    return not trial.can.batch


@check("K-50")
async def batches_are_of_one_to_size_in_order(trial: Trial) -> None:
    """A batch has 1 to `size` elements, never none, in the order of arrival; a partial batch does not wait for ever."""
    name, broker = await trial.queue(), trial.harness.broker()
    if _refused(trial, broker, name):
        return
    batches = _Batches(Recorder(trial))
    bodies = numbered(7)
    async with open_runtime(_subscription(trial, broker, name, batches)):
        await trial.publish(broker, name, *bodies)
        await batches.recorder.sees(*bodies)
        await trial.quiet(broker, name, batches.recorder)
    trial.holds(all(1 <= size <= SIZE for size in batches.sizes), f"batches of 1 to {SIZE}", batches.sizes)
    trial.bodies(batches.recorder.bodies, [*bodies, MARKER], "handled")
    await trial.remains(name)


@check("K-50")
async def each_element_is_settled_for_itself(trial: Trial) -> None:
    """Each element of a batch has its own outcome: one is retried and comes again, one is dropped, the others go."""
    name, broker = await trial.queue(), trial.harness.broker()
    if _refused(trial, broker, name):
        return
    batches = _Batches(Recorder(trial, {b"m1": [Retry()], b"m2": [Drop("conformance")]}))
    bodies = numbered(6)
    async with open_runtime(_subscription(trial, broker, name, batches)) as runtime:
        await trial.publish(broker, name, *bodies)
        await batches.recorder.sees(*bodies, b"m1")
        await trial.quiet(broker, name, batches.recorder)
    trial.equal(sorted(batches.recorder.bodies), sorted([*bodies, b"m1", MARKER]), "handled")
    ledger = runtime.ledger("batches")
    seen = (ledger.acked, ledger.retried, ledger.dropped, ledger.balanced)
    trial.equal(seen, (6, 1, 1, True), "acked, retried, dropped, balanced")
    await trial.remains(name)


@check("K-50", "K-13", bounded=False)
async def a_batch_is_fed_through_the_portal(trial: Trial) -> None:
    """What a worker thread publishes by `trio.from_thread.run` arrives in batches as everything else does."""
    name, broker = await trial.queue(), trial.harness.broker()
    if _refused(trial, broker, name):
        return
    batches = _Batches(Recorder(trial))
    async with open_runtime(_subscription(trial, broker, name, batches)):
        publish = partial(trio.from_thread.run, trial.publish, broker, name, *numbered(4))
        await trio.to_thread.run_sync(publish)
        await batches.recorder.sees(*numbered(4))
    trial.bodies(batches.recorder.bodies, numbered(4), "handled")
