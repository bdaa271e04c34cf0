"""Ends a worker process that hangs, so that whoever has started it may start it again.

A hung process cannot be trusted to end itself: this is done by a thread of C, which needs
neither the loop nor the interpreter's lock, and which first writes every thread's stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
from collections.abc import AsyncIterator, Callable

log = logging.getLogger("hexserve.worker")

LOOP_LIMIT_S = 30.0
"""A loop that does nothing for so long hangs; routers have given the worker up long before."""
BEAT_S = 1.0


@contextlib.asynccontextmanager
async def watchdog(step_age_s: Callable[[], float], step_limit_s: float) -> AsyncIterator[None]:
    """Inside, the process ends with code 1 when its loop hangs or a step takes too long.

    `step_age_s()` tells how long the running step has been running, 0 without one.
    """

    async def beat() -> None:
        while (age := step_age_s()) <= step_limit_s:
            faulthandler.dump_traceback_later(LOOP_LIMIT_S, exit=True)
            await asyncio.sleep(BEAT_S)
        log.error("a step has been running for %.0f s: ending, every thread's stack follows", age)
        faulthandler.dump_traceback_later(0.1, exit=True)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        faulthandler.cancel_dump_traceback_later()
