"""The processes under test: a paced worker, the router that a user would start, a bare app."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from benchmarks.cores import on_cores
from benchmarks.logged_process import POLL_S, LoggedProcess, running_module

_START_S = 60.0
"""Far more than a start takes."""
_LISTENING = re.compile(r"listening at (http://[^\s,]+)")


@contextlib.asynccontextmanager
async def running_router(
    folder: Path, stamps: Path, address: str, interval: float, core: int | None = None
) -> AsyncIterator[str]:
    """A paced worker at `address` and a router that has found it; yields the router's URL.

    Args:
        folder: where their output goes.
        stamps, interval: see benchmarks.paced_worker.
        core: the only one that the router may run on.

    Raises:
        StartError: one of them does not come up.
    """
    with contextlib.ExitStack() as processes:
        worker = processes.enter_context(
            running_module(
                folder / "worker.log",
                "benchmarks.paced_worker",
                f"--address={address}",
                f"--stamps={stamps}",
                f"--interval={interval}",
            )
        )
        with on_cores(None if core is None else {core}):
            router = processes.enter_context(
                running_module(
                    folder / "router.log",
                    "router",
                    "--model=fake",
                    f"--workers={address}",
                    "--host=127.0.0.1",
                    "--port=0",
                )
            )
        yield await _ready_url(worker, router)


@contextlib.asynccontextmanager
async def running_bare_app(folder: Path, events: Path, core: int) -> AsyncIterator[str]:
    """A benchmarks.bare_app on one core; yields its URL. Raises StartError."""
    with contextlib.ExitStack() as processes:
        with on_cores({core}):
            app = processes.enter_context(
                running_module(folder / "bare.log", "benchmarks.bare_app", f"--events={events}")
            )
        deadline = time.monotonic() + _START_S
        while (found := _LISTENING.search(app.output)) is None:
            app.check(deadline)
            await asyncio.sleep(POLL_S)
        yield found[1]


async def _ready_url(worker: LoggedProcess, router: LoggedProcess) -> str:
    deadline = time.monotonic() + _START_S
    async with httpx.AsyncClient(trust_env=False, timeout=_START_S) as http:
        while True:
            worker.check(deadline)
            router.check(deadline)
            if found := _LISTENING.search(router.output):
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{found[1]}/ping")).status_code == 200:
                        return found[1]
            await asyncio.sleep(POLL_S)
