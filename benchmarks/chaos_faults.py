"""Faults for the chaos run: what is done to a worker's process, and at which moment.

A moment is named by the state that a sequence of the worker is in then; /health shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

POINT_WITHIN_S = 2.0
"""How long a point is waited for; then the fault is done anyway."""
_POLL_S = 0.005
_STOPPED_S = (0.2, 2.0)

Health = Mapping[str, Any]
"""One worker of /health's list."""


class Fault(enum.Enum):
    """What happens to a process."""

    KILL = "killed"
    STOP = "stopped for a while"
    HANG = "stopped for good"
    DRAIN = "told to end"


WEIGHTS = {Fault.KILL: 5, Fault.STOP: 4, Fault.DRAIN: 2, Fault.HANG: 1}


def _blocks(worker: Health, state: str) -> int:
    count: int = worker["blocks"][state]
    return count


POINTS: dict[str, tuple[str, Callable[[Health], bool]]] = {
    "waiting": ("prefill", lambda w: w["waiting"] > 0),
    "prefilling": ("prefill", lambda w: _blocks(w, "running") > 0),
    "exported": ("prefill", lambda w: _blocks(w, "exported") > 0),
    "importing": ("decode", lambda w: _blocks(w, "running") > 0 and w["running"] == 0),
    "decoding": ("decode", lambda w: w["running"] > 0),
}
"""State of a sequence → the role whose worker it is looked for at, and how it shows."""


@dataclass(frozen=True, slots=True)
class DoneFault:
    """A fault that was done: when (monotonic), and whether its point was met."""

    fault: Fault
    point: str
    worker: str
    at: float
    met: bool


class Victims:
    """The worker processes of a launcher, by what its log and its router tell."""

    def __init__(self, http: httpx.AsyncClient, url: str, log: Callable[[], str]) -> None:
        self._http = http
        self._url = url
        self._log = log
        self._conts: list[asyncio.Task[None]] = []

    def pids(self, name: str = r"\S+") -> list[int]:
        """The ids of a worker's processes, or of all, in the order of their starts."""
        return [int(pid) for pid in re.findall(rf" {name}: process (\d+) on ", self._log())]

    async def workers(self) -> list[dict[str, Any]]:
        """/health's list; each with its `name`."""
        answer = await self._http.get(f"{self._url}/health")
        workers: list[dict[str, Any]] = answer.json()["workers"]
        for worker in workers:
            worker["name"] = os.path.basename(worker["address"]).removesuffix(".sock")
        return workers

    async def do(self, fault: Fault, point: str, rng: random.Random) -> DoneFault | None:
        """Wait for a point and do a fault there; None when no worker of the role is ready."""
        role, shows = POINTS[point]
        deadline = time.monotonic() + POINT_WITHIN_S
        while True:
            workers = await self.workers()
            able = [w for w in workers if w["state"] == "ready" and role in w["roles"]]
            there = [w for w in able if shows(w)]
            if there or time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        if not able:
            return None
        name = rng.choice(there or able)["name"]
        pid = self.pids(name)[-1]
        at = time.monotonic()
        match fault:
            case Fault.KILL:
                send(pid, signal.SIGKILL)
            case Fault.DRAIN:
                send(pid, signal.SIGTERM)
            case Fault.HANG:
                send(pid, signal.SIGSTOP)
            case Fault.STOP:
                send(pid, signal.SIGSTOP)
                waking = asyncio.create_task(_wake(pid, rng.uniform(*_STOPPED_S)))
                self._conts.append(waking)
        return DoneFault(fault, point, name, at, bool(there))

    async def settle(self) -> None:
        """Until every process that was stopped for a while has been woken."""
        await asyncio.gather(*self._conts)


async def _wake(pid: int, after_s: float) -> None:
    await asyncio.sleep(after_s)
    send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def running(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
