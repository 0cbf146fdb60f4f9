"""Checks of the life cycle: constructing, threads, time, shutting down, and what is there afterwards."""
# K-10 to K-19

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from actors import open_runtime
from links.errors import LinkError, NotConnected
from links.testing.trial import EARLY, GOODBYE, MARKER, Recorder, Trial, check
from settlement import Ack, RetryAfter

AT_MOST = 10.0
"""Seconds that a shutdown may take, and that a delayed message may be late."""
# C-9.11


@check("K-10", bounded=False)
async def constructing_needs_no_loop(trial: Trial) -> None:
    """Broker, source and publisher are made outside of any event loop in less than a second, and say what they are."""
    name = await trial.queue()

    def construct() -> float:
        began = time.monotonic()
        broker = trial.harness.broker()
        trial.harness.publisher(broker, name)
        trial.subscription(broker, name, Recorder(trial))
        return time.monotonic() - began

    took = await trio.to_thread.run_sync(construct)
    trial.holds(took < 1.0, "less than a second", f"{took:.1f} s")
    source = trial.harness.source(trial.harness.broker(), name)
    trial.equal(source.settles, trial.can.settles, "Source.settles")
    trial.equal(source.lease is not None, trial.can.lease is not None, "the source has a lease")
    trial.equal(source.copies == 0, trial.can.native_delay, "the source publishes no copies")
    trial.holds(source.limit(4, 3) >= 1, "a limit of 1 or more", source.limit(4, 3))


@check("K-13", bounded=False)
async def other_threads_come_through_the_portal(trial: Trial) -> None:
    """A worker thread publishes by `trio.from_thread.run`. A `trio.run` of its own, in another thread, is refused."""
    name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
    async with open_runtime(trial.subscription(broker, name, recorder)):
        publisher = trial.harness.publisher(broker, name)

        def through_the_portal() -> None:
            trio.from_thread.run(publisher.publish, b"portal")

        def in_a_run_of_its_own() -> None:
            trio.run(publisher.publish, b"foreign")

        await trio.to_thread.run_sync(through_the_portal)
        await recorder.sees(b"portal")
        await _refused(trial, partial(trio.to_thread.run_sync, in_a_run_of_its_own), RuntimeError)
        await trial.quiet(broker, name, recorder)
    trial.bodies(recorder.bodies, [b"portal", MARKER], "handled")


@check("K-14")
async def a_delayed_retry_comes_in_time(trial: Trial) -> None:
    """`RetryAfter(1.5)` brings the message again after 1.5 s, at most 10 s later; where no delay is kept, at once."""
    name, broker = await trial.queue(), trial.harness.broker()
    recorder = Recorder(trial, {b"later": [RetryAfter(1.5)]})
    async with open_runtime(trial.subscription(broker, name, recorder)):
        await trial.publish(broker, name, b"later")
        await recorder.sees(b"later", b"later", within=AT_MOST)
    first, second = recorder.times
    earliest = 1.5 if trial.can.delays else 0.0
    trial.holds(
        earliest - EARLY <= second - first <= earliest + AT_MOST,
        f"the second delivery {earliest:g} to {earliest + AT_MOST:g} s after the first",
        f"{second - first:.3f} s",
    )


@check("K-16")
async def shutdown_ends(trial: Trial) -> None:
    """Leaving the runtime takes at most 10 s: idle, after work, and by an exception."""
    for how in ("idle", "after work", "by an exception"):
        name, broker, recorder = await trial.queue(), trial.harness.broker(), Recorder(trial)
        left = trio.current_time()
        try:
            async with open_runtime(trial.subscription(broker, name, recorder), goodbye=GOODBYE):
                if how != "idle":
                    await trial.publish(broker, name, b"work")
                    await recorder.sees(b"work")
                left = trio.current_time()
                if how == "by an exception":
                    raise _LeftError
        except _LeftError:
            pass
        took = trio.current_time() - left
        trial.holds(took <= AT_MOST, f"{how}: a shutdown of at most {AT_MOST:g} s", f"{took:.1f} s")


class _LeftError(Exception):
    """How a block is left."""


@check("K-17")
async def publishing_needs_an_open_broker(trial: Trial) -> None:
    """Before the broker is opened and after it was closed `publish` raises `NotConnected`, for a publisher that was
    used and for one that never was; one that was made before works once the broker is open.
    """
    name, broker = await trial.queue(), trial.harness.broker()
    used, unused = trial.harness.publisher(broker, name), trial.harness.publisher(broker, name)
    await _refused(trial, partial(used.publish, b"before"), NotConnected)
    async with broker.connect():
        await used.publish(b"while")
    await _refused(trial, partial(used.publish, b"after"), NotConnected)
    await _refused(trial, partial(unused.publish, b"after"), NotConnected)
    await trial.remains(name, b"while")


async def _refused(trial: Trial, call: Callable[[], Awaitable[object]], kind: type[Exception]) -> None:
    try:
        await call()
    except kind:
        return
    trial.fail(kind.__name__, "it was taken")


@check("K-18")
async def nothing_is_settled_after_the_detach(trial: Trial) -> None:
    """A delivery held over the detach is no silent success: its settlement raises, or its verdict says no, and the
    message comes back.
    """
    name, broker = await trial.stored(), trial.harness.broker()
    async with broker.connect():
        async with trial.attached(broker, name) as (source, link):
            await trial.publish(broker, name, b"held")
            held = await trial.take(link, 1)
        await _says_no(trial, partial(trial.say, source, link, Ack(), *held))
    await _says_no(trial, partial(trial.say, source, link, Ack(), *held))
    await trial.remains(name, b"held")


async def _says_no(trial: Trial, settle: Callable[[], Awaitable[list[object]]]) -> None:
    try:
        verdicts = await settle()
    except LinkError:
        return
    trial.holds(None not in verdicts, "a LinkError, or a verdict that says no", verdicts)


@check("K-19")
async def a_publish_before_the_shutdown_is_kept(trial: Trial) -> None:
    """What was published just before the shutdown is there for a new connection."""
    name, broker = await trial.queue(), trial.harness.broker()
    async with broker.connect():
        await trial.publish(broker, name, b"last")
    await trial.remains(name, b"last")
