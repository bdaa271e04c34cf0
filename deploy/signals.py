"""Runs a process's main coroutine until it ends or a signal asks it to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import uvloop

_T = TypeVar("_T")


class Stopped(Exception):
    """A signal has come before what was to be done was done."""


class Stop(asyncio.Event):
    """Set when the process is to end, and `now` when it is to do so without grace."""

    def __init__(self) -> None:
        super().__init__()
        self.now = asyncio.Event()

    def ask(self) -> None:
        """Set it, and `now` the second time."""
        if self.is_set():
            self.now.set()
        self.set()


def run_until_signalled(main: Callable[[Stop], Awaitable[None]]) -> None:
    """Run `main(stop)`; SIGINT and SIGTERM ask `stop`, and `main` is to return soon after."""

    async def with_signals() -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.ask)
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


async def within(seconds: float, work: Coroutine[Any, Any, None], now: asyncio.Event) -> bool:
    """Whether `work` ends in time and before `now` is set; else it is cancelled."""
    task, hurry = asyncio.create_task(work), asyncio.create_task(now.wait())
    try:
        await asyncio.wait((task, hurry), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()
        hurry.cancel()


async def in_daemon_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Like asyncio.to_thread, but neither the loop's end nor the process's waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("_T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


def leave(code: int) -> NoReturn:
    """End the process now, without waiting for threads of libraries that may still run.

    Children that such threads have started, such as a download's, are told to end.
    """
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _children() -> list[int]:
    """This process's children, whichever thread started them; none where /proc has no list."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found += map(int, path.read_text().split())
    return found
