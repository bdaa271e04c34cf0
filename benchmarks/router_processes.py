"""The two processes under test: a paced worker, and the router that a user would start."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from benchmarks.logged_process import POLL_S, LoggedProcess, running_module

_START_S = 60.0
"""Far more than a start takes."""


@contextlib.asynccontextmanager
async def running_router(
    folder: Path, stamps: Path, address: str, interval: float
) -> AsyncIterator[str]:
    """A paced worker at `address` and a router that has found it; yields the router's URL.

    Args:
        folder: where their output goes.
        stamps, interval: see benchmarks.paced_worker.

    Raises:
        StartError: one of them does not come up.
    """
    with (
        running_module(
            folder / "worker.log",
            "benchmarks.paced_worker",
            f"--address={address}",
            f"--stamps={stamps}",
            f"--interval={interval}",
        ) as worker,
        running_module(
            folder / "router.log",
            "router",
            "--model=fake",
            f"--workers={address}",
            "--host=127.0.0.1",
            "--port=0",
        ) as router,
    ):
        yield await _ready_url(worker, router)


async def _ready_url(worker: LoggedProcess, router: LoggedProcess) -> str:
    deadline = time.monotonic() + _START_S
    async with httpx.AsyncClient(trust_env=False, timeout=_START_S) as http:
        while True:
            worker.check(deadline)
            router.check(deadline)
            if found := re.search(r"listening at (http://\S+),", router.output):
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{found[1]}/ping")).status_code == 200:
                        return found[1]
            await asyncio.sleep(POLL_S)
