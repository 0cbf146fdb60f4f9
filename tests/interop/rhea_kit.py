"""Clients that nobody here wrote, in processes of their own: rhea (JavaScript), and proton's blocking one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

__all__ = ["Fact", "Program", "Rhea", "digest", "install", "only", "seen", "until"]

HERE = Path(__file__).parent
PATIENCE = 30.0
"""Seconds for what is awaited of a program, its end too: far more than it takes."""

Fact = dict[str, Any]
"""A line that a program tells."""


def install() -> Rhea:
    """Install rhea, once for each checkout. Skips the test where it cannot be had."""
    done = subprocess.run([str(HERE / "install")], capture_output=True, text=True, timeout=2000, check=False)
    if done.returncode == 75:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    node, modules = done.stdout.splitlines()
    return Rhea(node, modules)


def only(facts: list[Fact], name: str) -> list[Any]:
    """What the facts that say this say of it, in order."""
    return [fact[name] for fact in facts if name in fact]


def seen(facts: list[Fact]) -> list[tuple[int, int | None]]:
    """The messages that came, in order: which, and with what delivery-count; None: none was said."""
    return [(fact["n"], fact.get("delivery_count")) for fact in facts if "n" in fact]


def digest(n: int, size: int = 1024) -> str:
    """Of the body of message n, `n.n.n.…`."""
    return hashlib.sha256((b"%d." % n * size)[:size]).hexdigest()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.01)


@attrs.define
class Program:
    """One that runs."""

    process: trio.Process
    facts: list[Fact] = attrs.field(factory=list[Fact])
    """What it has told."""
    _told: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _over: bool = False

    async def hear(self) -> None:
        stdout, kept = self.process.stdout, b""
        assert stdout is not None
        async with stdout:
            async for chunk in stdout:
                *lines, kept = (kept + chunk).split(b"\n")
                self.facts += [json.loads(line) for line in lines]
                self._told.unpark_all()
        self._over = True
        self._told.unpark_all()

    @contextmanager
    def _patiently(self) -> Generator[None, None, None]:
        try:
            with trio.fail_after(PATIENCE):
                yield
        except trio.TooSlowError:
            pytest.fail(f"it told no more than {self.facts}")

    async def tells(self, name: str, times: int = 1) -> list[Any]:
        """Wait until so many facts say this; what they all say of it."""
        with self._patiently():
            while len(said := only(self.facts, name)) < times:
                assert not self._over, self.facts
                await self._told.park()
        return said

    async def ends(self, code: int = 0) -> list[Fact]:
        """Wait for its end, with this exit code; all that it has told."""
        with self._patiently():
            ended = await self.process.wait()
            while not self._over:
                await self._told.park()
        assert ended == code, self.facts
        return self.facts


@attrs.frozen
class Rhea:
    """Where it is."""

    node: str
    modules: str

    @asynccontextmanager
    async def running(self, program: str, url: str, address: str, *options: str) -> AsyncGenerator[Program, None]:
        """A program of this folder, for the block; if it still runs at the end, it is killed."""
        run = partial(
            trio.run_process,
            [sys.executable if program.endswith(".py") else self.node, str(HERE / program), url, address, *options],
            stdout=subprocess.PIPE,
            env={**os.environ, "NODE_PATH": self.modules},
            check=False,
        )
        async with trio.open_nursery() as nursery:
            running = Program(await nursery.start(run))
            nursery.start_soon(running.hear)
            try:
                yield running
            finally:
                if running.process.returncode is None:
                    running.process.kill()

    async def run(self, program: str, url: str, address: str, *options: str, code: int = 0) -> list[Fact]:
        """A program of this folder, to its end; what it told."""
        async with self.running(program, url, address, *options) as running:
            return await running.ends(code)
