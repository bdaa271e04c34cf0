"""Does a deployment lose anything when workers die, hang, are cut off, or told to end?

    python -m benchmarks.chaos [--minutes 1] [--seed 1] [--disagg_topo 2,2] [--model fake]
        [--dtype float32] [--every-s 5] [--clients 6] [--json FILE] [--check]
    python -m benchmarks.chaos --aborts 10000 [--seed 1] [--disagg_topo 2,2] ...

First every request is answered undisturbed, once. Then clients repeat them while faults happen
to the worker processes, their sessions and their transfers, and each answer is compared. With
--aborts, nothing but their clients disturbs the requests: most leave, at random moments.

The seed draws requests, faults and leavings. With --check, exit status 1 when a client saw an
error other than 429 and 503 (before its answer began), when an answer differs, when blocks,
processes, sockets, threads or shared memory are left, or when memory grows under aborts.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_aborts import draw_leaving, leave_at_random
from benchmarks.chaos_faults import Victims, plan_faults, running
from benchmarks.chaos_leaks import Held, held_by, surplus
from benchmarks.chaos_orders import interpose
from benchmarks.chaos_report import Outcome
from benchmarks.chaos_requests import Answer, ask, draw_bodies, keep_asking
from benchmarks.logged_process import LoggedProcess, StartError, running_command
from benchmarks.report import print_line
from benchmarks.stats import host_info

_WORKER_WAIT_S = 120
"""Where one worker alone has a role, fault upon fault can keep it away longer than the default."""
_MAX_LOST_ATTEMPTS = 100
"""There, a prefill that takes longer than the faults are apart is lost again and again."""
_START_S = 900.0
_WHOLE_AGAIN_S = 90.0
_SETTLED_S = 60.0
_ANSWER_S = 120.0
_BODIES = 24
_POLL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    status = Console(stderr=True)
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        try:
            pids, sockets = asyncio.run(_deployment(args, Path(folder), outcome, status))
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
    parser.add_argument("--aborts", type=int, default=0, help="requests; then without faults")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--dtype", help="of the model; only float32 gives equal texts on CPUs")
    parser.add_argument("--disagg_topo", default="2,2")
    parser.add_argument("--every-s", type=float, default=5.0, help="mean time between faults")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--log", type=Path, help="keep the deployment's log here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


async def _deployment(
    args: argparse.Namespace, folder: Path, outcome: Outcome, status: Console
) -> tuple[list[int], list[str]]:
    """A run from start to end; the ids of all processes that there were, and their sockets."""
    limits = httpx.Limits(max_connections=None)
    interpose(folder)
    command = [
        sys.executable, "-m", "hex_llm.server.api_server", "--host=127.0.0.1", "--port=0",
        f"--worker_wait_s={_WORKER_WAIT_S}", f"--max_lost_attempts={_MAX_LOST_ATTEMPTS}",
        f"--model={args.model}", f"--disagg_topo={args.disagg_topo}",
        *([f"--dtype={args.dtype}"] if args.dtype else []),
    ]  # fmt: skip
    log = args.log or folder / "serve.log"
    with running_command(log, "the server", command, {"PYTHONPATH": str(folder)}) as server:
        await asyncio.to_thread(server.wait_for, "ready at http", time.monotonic() + _START_S)
        found = re.search(r"ready at (http://\S+)", server.output)
        assert found is not None
        async with httpx.AsyncClient(trust_env=False, timeout=_ANSWER_S, limits=limits) as http:
            victims = Victims(http, found[1], lambda: server.output, folder)
            await _run(args, http, found[1], victims, outcome, server, status)
            sockets = [w["address"].removeprefix("unix:") for w in await victims.workers()]
            pids = victims.pids()
            victims.close()
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
    names = [worker["name"] for worker in await victims.workers()]

    def pids() -> dict[str, int]:
        return {"router": server.pid} | {name: victims.pids(name)[-1] for name in names}

    first = _held(pids())
    if args.aborts:
        print_line(status, f"{args.aborts} requests, most of which are given up")
        leaving = draw_leaving(rng, args.aborts, len(bodies))
        await leave_at_random(http, url, bodies, undisturbed, leaving, pids, outcome)
    else:
        print_line(status, f"{args.minutes:g} minutes of faults")
        await _faults(args, rng, http, url, bodies, undisturbed, victims, outcome, server, status)
    outcome.leaks += await _leaked_blocks(victims)
    outcome.leaks += await _surplus(first, pids())


async def _faults(
    args: argparse.Namespace,
    rng: random.Random,
    http: httpx.AsyncClient,
    url: str,
    bodies: Sequence[dict[str, Any]],
    undisturbed: Sequence[Answer],
    victims: Victims,
    outcome: Outcome,
    server: LoggedProcess,
    status: Console,
) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(args.clients):
            client_rng = random.Random(rng.random())
            group.create_task(
                keep_asking(http, url, bodies, undisturbed, client_rng, stop, outcome.tally)
            )
        deadline = time.monotonic() + 60 * args.minutes
        recoveries = group.create_task(_note_recoveries(victims, outcome, stop))
        for plan in plan_faults(random.Random(rng.random()), args.every_s):
            await asyncio.sleep(plan.after_s)
            if time.monotonic() > deadline:
                break
            server.check(deadline + 1)
            done = await victims.do(plan)
            if done is not None:
                outcome.faults.append(done)
                what = f"{done.worker} is {done.fault.value}, {done.point}"
                print_line(status, what + ("" if done.met else " (not met)"))
        await victims.settle()
        outcome.leaks += await _whole_again(victims)
        stop.set()
        await recoveries


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


def _held(pids: dict[str, int]) -> dict[str, Held]:
    found = {name: held_by(pid) for name, pid in pids.items()}
    return {name: held for name, held in found.items() if held is not None}


async def _surplus(first: dict[str, Held], pids: dict[str, int]) -> list[str]:
    """What is held for good; connections that are kept for the next transfer go after a while."""
    deadline = time.monotonic() + _SETTLED_S
    while True:
        left = surplus(first, _held(pids))
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
