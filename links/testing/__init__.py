"""The conformance suite: what an author of a transport runs, on the real clock with a real server as on a virtual one.

Write a `Harness`, and run `CHECKS`:

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_conformance(check: Check) -> None:
        await check(MyHarness())

or, without pytest, `trio.run(run_all, MyHarness())`. A check that fails raises `ConformanceError`, whose text names the
rule, what was expected, and what was seen. Where `Capabilities` exclude what a check asks for, it asserts the
documented alternative instead. Sources that settle a message on its arrival (at most once) are not for this suite.
"""

from __future__ import annotations

from collections.abc import Sequence

from links.testing import batches, deliveries, life, link, outcomes
from links.testing.harness import Capabilities as Capabilities
from links.testing.harness import Caps as Caps
from links.testing.harness import Harness as Harness
from links.testing.harness import Routing as Routing
from links.testing.trial import Check as Check
from links.testing.trial import ConformanceError as ConformanceError
from links.testing.trial import Recorder as Recorder
from links.testing.trial import Trial as Trial
from links.testing.trial import check as check

__all__ = [
    "CHECKS",
    "Capabilities",
    "Caps",
    "Check",
    "ConformanceError",
    "Harness",
    "Recorder",
    "Routing",
    "Trial",
    "check",
    "run_all",
]

CHECKS: Sequence[Check] = tuple(
    each
    for module in (deliveries, life, outcomes, link, batches)
    for each in vars(module).values()
    if isinstance(each, Check)
)
"""Every check, in the order of reading. An author's own are made by `check` and run in the same way."""


async def run_all(harness: Harness, checks: Sequence[Check] = CHECKS) -> None:
    """Run all checks, one after the other. Raises one `ExceptionGroup` of `ConformanceError` for those that failed.

    Cancellation: as `Check.__call__`.
    """
    failed: list[ConformanceError] = []
    for each in checks:
        try:
            await each(harness)
        except ConformanceError as error:
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(checks)} checks failed", failed)
