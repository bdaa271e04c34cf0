"""Does a deployment lose anything when its workers die, hang, or are told to end?

    python -m benchmarks.chaos [--minutes 1] [--seed 1] [--disagg_topo 2,2] [--model fake]
        [--every-s 5] [--clients 6] [--json FILE] [--check]

First every request is answered undisturbed, once. Then clients repeat them while faults happen
to the worker processes, and each answer is compared. The seed draws requests and faults. With
--check, exit status 1 when a client saw an error other than 429 and 503 (before its answer
began), when an answer differs, or when blocks, processes or sockets are left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_faults import POINTS, WEIGHTS, DoneFault, Victims, running
from benchmarks.chaos_requests import Tally, ask, draw_bodies, keep_asking
from benchmarks.logged_process import LoggedProcess, StartError, running_module
from benchmarks.report import print_line
from benchmarks.stats import host_info, percentile

_START_S = 900.0
_WHOLE_AGAIN_S = 90.0
_ANSWER_S = 120.0
_BODIES = 24
_POLL_S = 0.05


@dataclass(slots=True)
class Outcome:
    """What a run has shown. Times in seconds."""

    tally: Tally = field(default_factory=Tally)
    faults: list[DoneFault] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """Of each stream that a fault fell into: from its event before it to that after it."""
        gaps = (a.gap_around(f.at) for f in self.faults for a in self.tally.answers)
        return [gap for gap in gaps if gap is not None]

    def figures(self) -> dict[str, Any]:
        """Everything as numbers and short texts."""
        return {
            "requests": len(self.tally.answers),
            "refused": self.tally.refused,
            "client_errors": self.tally.errors,
            "mismatches": self.tally.mismatches,
            "leaks": self.leaks,
            "faults": dict(Counter(f.fault.value for f in self.faults)),
            "points": dict(Counter(f.point for f in self.faults if f.met)),
            "recovery_p50_s": percentile(self.recoveries, 50),
            "recovery_p99_s": percentile(self.recoveries, 99),
            "gap_p50_s": percentile(self.gaps, 50),
            "gap_p99_s": percentile(self.gaps, 99),
        }

    def failures(self) -> list[str]:
        """What --check does not forgive."""
        tally = self.tally
        counted = ((tally.errors, "client errors"), (tally.mismatches, "other answers"))
        found = [f"{len(each)} {what}, such as {each[0]}" for each, what in counted if each]
        return found + self.leaks + ([] if self.faults else ["no fault was done"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    status = Console(stderr=True)
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        try:
            log = Path(folder) / "serve.log"
            pids, sockets = asyncio.run(_deployment(args, log, outcome, status))
        except StartError as error:
            print_line(status, str(error), style="red")
            return 1
    outcome.leaks += [f"process {pid} is left" for pid in pids if running(pid)]
    outcome.leaks += [f"{path} is left" for path in sockets if os.path.exists(path)]
    figures = outcome.figures()
    table = Table("figure", "value", title=f"{args.model}, {args.disagg_topo}, seed {args.seed}")
    for name, value in figures.items():
        if isinstance(value, list):
            value = f"{len(value)}" + "".join(f"\n{each}" for each in value[:5])
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"host": host_info(), **figures}, indent=2))
    for failure in outcome.failures():
        print_line(status, f"missed: {failure}", style="red")
    return 1 if args.check and outcome.failures() else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--disagg_topo", default="2,2")
    parser.add_argument("--every-s", type=float, default=5.0, help="mean time between faults")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--log", type=Path, help="keep the deployment's log here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


async def _deployment(
    args: argparse.Namespace, log: Path, outcome: Outcome, status: Console
) -> tuple[list[int], list[str]]:
    """A run from start to end; the ids of all processes that there were, and their sockets."""
    limits = httpx.Limits(max_connections=None)
    with running_module(
        args.log or log,
        "hex_llm.server.api_server",
        "--host=127.0.0.1",
        "--port=0",
        f"--model={args.model}",
        f"--disagg_topo={args.disagg_topo}",
    ) as server:
        await asyncio.to_thread(server.wait_for, "ready at http", time.monotonic() + _START_S)
        found = re.search(r"ready at (http://\S+)", server.output)
        assert found is not None
        async with httpx.AsyncClient(trust_env=False, timeout=_ANSWER_S, limits=limits) as http:
            victims = Victims(http, found[1], lambda: server.output)
            await _run(args, http, found[1], victims, outcome, server, status)
            sockets = [w["address"].removeprefix("unix:") for w in await victims.workers()]
            pids = victims.pids()
    return pids, sockets


async def _run(
    args: argparse.Namespace,
    http: httpx.AsyncClient,
    url: str,
    victims: Victims,
    outcome: Outcome,
    server: LoggedProcess,
    status: Console,
) -> None:
    rng = random.Random(args.seed)
    bodies = draw_bodies(rng, _BODIES)
    print_line(status, f"{len(bodies)} requests undisturbed")
    undisturbed = [await ask(http, url, body) for body in bodies]
    for answer in undisturbed:
        if answer.error is not None:
            raise StartError(f"an undisturbed request failed: {answer.error}")
    print_line(status, f"{args.minutes:g} minutes of faults")
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(args.clients):
            client_rng = random.Random(rng.random())
            group.create_task(
                keep_asking(http, url, bodies, undisturbed, client_rng, stop, outcome.tally)
            )
        deadline = time.monotonic() + 60 * args.minutes
        recoveries = group.create_task(_note_recoveries(victims, outcome, stop))
        while True:
            await asyncio.sleep(rng.expovariate(1 / args.every_s))
            fault = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            point = rng.choice(list(POINTS))
            if time.monotonic() > deadline:
                break
            server.check(deadline + 1)
            done = await victims.do(fault, point, rng)
            if done is not None:
                outcome.faults.append(done)
                what = f"{done.worker} is {fault.value}, {point}{'' if done.met else ' (not met)'}"
                print_line(status, what)
        await victims.settle()
        outcome.leaks += await _whole_again(victims)
        stop.set()
        await recoveries
    outcome.leaks += await _leaked_blocks(victims)


async def _note_recoveries(victims: Victims, outcome: Outcome, stop: asyncio.Event) -> None:
    """Note how long workers were away, each time one comes back."""
    away: dict[str, float] = {}
    while not stop.is_set():
        now = time.monotonic()
        for worker in await victims.workers():
            name = worker["name"]
            if worker["state"] != "ready":
                away.setdefault(name, now)
            elif name in away:
                outcome.recoveries.append(now - away.pop(name))
        await asyncio.sleep(_POLL_S)


async def _whole_again(victims: Victims) -> list[str]:
    deadline = time.monotonic() + _WHOLE_AGAIN_S
    while any(worker["state"] != "ready" for worker in await victims.workers()):
        if time.monotonic() > deadline:
            return [f"not all workers are ready after {_WHOLE_AGAIN_S:.0f} s"]
        await asyncio.sleep(_POLL_S)
    return []


async def _leaked_blocks(victims: Victims) -> list[str]:
    """What is not free though nothing runs; leases may hold blocks for a while."""
    deadline = time.monotonic() + _WHOLE_AGAIN_S
    while True:
        blocks = {w["name"]: w["blocks"] for w in await victims.workers() if "blocks" in w}
        held = {
            name: each["total"] - each["free"] - each["cached"] for name, each in blocks.items()
        }
        if not any(held.values()):
            return []
        if time.monotonic() > deadline:
            return [f"{name} holds {count} blocks" for name, count in held.items() if count]
        await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
