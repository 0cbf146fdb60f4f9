"""Runs the cases and prints a line for each: ours, the peer, the ratio (above 1: ours is better)."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path

import attrs

from benchmarks.result import Result

MODULES = {
    "memory-dispatch": "memory_dispatch",
    "sqlite-lease": "sqlite_lease",
    "sqlite-growth": "sqlite_growth",
    "postgres-lease": "postgres_lease",
    "postgres-row-lock": "postgres_row_lock",
    "postgres-batch": "postgres_hundred",
    "postgres-single": "postgres_hundred",
    "postgres-publish": "postgres_publish",
    "postgres-growth": "postgres_growth",
    "mysql-lease": "mysql_lease",
    "mysql-row-lock": "mysql_row_lock",
    "mysql-advisory": "mysql_advisory",
    "mysql-batch": "mysql_hundred",
    "amqp-consume": "amqp_consume",
    "amqp-read": "amqp_read",
    "amqp-publish": "amqp_publish",
}
"""The beginning of a case's name, and the file that measures it."""


def main(arguments: list[str]) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="CASE", help="cases whose name begins so (memory, sqlite-lease-1, …)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer messages and rounds: within 4 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(arguments)
    named = [name for name in MODULES if name.startswith(options.only) or options.only.startswith(name)]
    chosen = dict.fromkeys(MODULES[name] for name in named)
    if not chosen:
        parser.error(f"no case begins with {options.only!r}; there are: {', '.join(MODULES)}")
    began = time.monotonic()
    print(f"Python {platform.python_version()}, {platform.machine()}; ratios are medians over interleaved rounds")
    results: list[Result] = []
    for name in chosen:
        try:
            found: list[Result] = importlib.import_module(f"benchmarks.{name}").run(quick=options.quick)
        except ModuleNotFoundError as error:
            if error.name not in {"proton", "psycopg", "pymysql"}:
                raise
            print(f"{name}: left out: {error.name} is not installed")
            continue
        for result in found:
            if result.case.startswith(options.only):
                print(
                    f"{result.case:28} ours {result.ours:10.1f}  peer {result.peer:10.1f} {result.unit}"
                    f"  ratio {result.ratio:5.2f}  ({result.peer_name})",
                    flush=True,
                )
                if result.aside:
                    print(f"{'':28} {result.aside}")
                results.append(result)
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                [attrs.asdict(result, filter=lambda field, _: field.name != "aside") for result in results], indent=2
            )
            + "\n"
        )
    print(f"{len(results)} cases in {time.monotonic() - began:.0f} s; load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
