"""Faults for the chaos run: what is done to a worker, and at which moment.

A moment is named by the state that a sequence of the worker enters then, or a transfer is in.
Only the worker's process knows it, so it is the one that acts, by order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos_orders import (
    ANSWERS_AT,
    MESSAGES,
    PROCESS,
    SESSION,
    Harm,
    Order,
    role_of,
)

POINT_WITHIN_S = 2.0
"""How long a point is waited for; then the fault is done anyway, or not at all to a transfer."""
_LASTS_S = (0.2, 4.0)
"""Of a stop and of a delay: some are shorter than the silence that routers bear, some longer."""


class Fault(enum.Enum):
    """What happens to a process, to its sessions, or to one of its transfers."""

    KILL = "killed"
    STOP = "stopped for a while"
    HANG = "stopped for good"
    DRAIN = "told to end"
    RESET_SESSION = "cut off from routers"
    DELAY_SESSION = "told or heard late"
    CORRUPT_SESSION = "garbled to or by routers"
    RESET_TRANSFER = "cut off from a transfer"
    DELAY_TRANSFER = "late in a transfer"
    CORRUPT_TRANSFER = "garbled in a transfer"


WEIGHTS = {
    Fault.KILL: 5, Fault.STOP: 4, Fault.DRAIN: 2, Fault.HANG: 1,
    Fault.RESET_SESSION: 3, Fault.DELAY_SESSION: 2, Fault.CORRUPT_SESSION: 2,
    Fault.RESET_TRANSFER: 3, Fault.DELAY_TRANSFER: 2, Fault.CORRUPT_TRANSFER: 3,
}  # fmt: skip
ON_SESSIONS = {
    Fault.RESET_SESSION: Harm.RESET,
    Fault.DELAY_SESSION: Harm.DELAY,
    Fault.CORRUPT_SESSION: Harm.CORRUPT,
}
ON_TRANSFERS = {
    Fault.RESET_TRANSFER: Harm.RESET,
    Fault.DELAY_TRANSFER: Harm.DELAY,
    Fault.CORRUPT_TRANSFER: Harm.CORRUPT,
}


ON_PROCESSES = {
    Fault.KILL: Harm.KILL,
    Fault.STOP: Harm.STOP,
    Fault.HANG: Harm.STOP,
    Fault.DRAIN: Harm.END,
}
POINTS = {
    "waiting": "prefill",
    "prefilling": "prefill",
    "exported": "prefill",
    "importing": "decode",
    "decoding": "decode",
}
"""State of a sequence → the role whose worker has it then."""
TRANSFER_POINTS = {state.value: state for state in MESSAGES}
"""State of a transfer, by its name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A fault to come: `after_s` after the one before it, by the seed alone.

    `pick` in [0, 1) says which of the workers that are able; `lasts_s` is that of stops and
    delays.
    """

    after_s: float
    fault: Fault
    point: str
    pick: float
    lasts_s: float


def plan_faults(rng: random.Random, every_s: float) -> Iterator[Plan]:
    """Faults without end."""
    while True:
        fault = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        points = TRANSFER_POINTS if fault in ON_TRANSFERS else POINTS
        yield Plan(
            rng.expovariate(1 / every_s),
            fault,
            rng.choice(list(points)),
            rng.random(),
            rng.uniform(*_LASTS_S),
        )


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

    def __init__(
        self, http: httpx.AsyncClient, url: str, log: Callable[[], str], folder: Path
    ) -> None:
        """`folder` is where worker processes take orders, see chaos_orders.interpose."""
        self._http = http
        self._url = url
        self._log = log
        self._folder = folder
        self._conts: list[asyncio.Task[None]] = []
        self._orders = 0
        self._answers = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._answers.setblocking(False)
        self._answers.bind(str(folder / ANSWERS_AT))

    def close(self) -> None:
        """Hear no more answers."""
        self._answers.close()

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

    async def do(self, plan: Plan) -> DoneFault | None:
        """Have a worker do a plan's fault to itself at its point.

        Where the point is not reached in time, it is done then; but not to a transfer, as there
        was none. None for that, and when no worker of the role is ready.
        """
        order, role = self._order(plan)
        able = [w for w in await self.workers() if w["state"] == "ready" and role in w["roles"]]
        if not able:
            return None
        name = able[int(plan.pick * len(able))]["name"]
        pid = self.pids(name)[-1]
        met = done = await self._obeyed(pid, order)
        if not met and order.at:
            done = await self._obeyed(pid, dataclasses.replace(order, at=""))
        if not done:
            return None
        if plan.fault is Fault.STOP:
            self._conts.append(asyncio.create_task(_wake(pid, plan.lasts_s)))
        return DoneFault(plan.fault, plan.point, name, time.monotonic(), met)

    def _order(self, plan: Plan) -> tuple[Order, str]:
        """What is to be done, and by a worker of which role."""
        self._orders += 1
        if (harm := ON_TRANSFERS.get(plan.fault)) is not None:
            state = TRANSFER_POINTS[plan.point]
            what = MESSAGES[state].__name__
            return Order(self._orders, harm, what, plan.lasts_s), role_of(state, harm)
        harm = ON_PROCESSES.get(plan.fault)
        what = SESSION if harm is None else PROCESS
        harm = harm or ON_SESSIONS[plan.fault]
        return Order(self._orders, harm, what, plan.lasts_s, plan.point), POINTS[plan.point]

    async def _obeyed(self, pid: int, order: Order) -> bool:
        """Whether a worker has done it in time; if not, it is taken back."""
        to = str(self._folder / str(pid))
        loop = asyncio.get_running_loop()
        try:
            self._answers.sendto(order.encode(), to)
            async with asyncio.timeout(POINT_WITHIN_S):
                while int(await loop.sock_recv(self._answers, 64)) != order.number:
                    pass  # of an order that was taken back as it was done
        except TimeoutError:
            with contextlib.suppress(OSError):
                self._answers.sendto(b"", to)
            return False
        except OSError:  # it has just died
            return False
        return True

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
