"""Runs a process's main coroutine until it ends or a signal asks it to."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

_T = TypeVar("_T")


def run_until_signalled(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stop)`; SIGINT and SIGTERM set `stop`, and `main` is to return soon after."""

    async def with_signals() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    uvloop.run(with_signals())


async def unless_stopped(work: Coroutine[Any, Any, _T], stop: asyncio.Event) -> _T | None:
    """What `work` returns or raises; None, and `work` cancelled, when `stop` comes first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
