"""A worker's profile, taken while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from deploy.signals import in_daemon_thread

log = logging.getLogger("hexserve.worker")

PROFILE_S = 5.0
"""Some hundred steps of most models, and a file that viewers still open."""


def profile_on_signal(folder: Path) -> None:
    """From now on SIGUSR2 has jax's profiler record PROFILE_S seconds of this process.

    Each trace goes to `folder`/worker-<process id>, under its time. A signal that comes while one
    is recorded is ignored. To be called on the process's loop.
    """
    running: set[asyncio.Task[None]] = set()

    def begin() -> None:
        if running:
            log.info("a profile is being recorded already")
            return
        task = asyncio.create_task(_record(folder / f"worker-{os.getpid()}"))
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, begin)


async def _record(folder: Path) -> None:
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would show, and make every step slower
    try:
        # Both load and write for longer than the loop may be held up.
        await in_daemon_thread(lambda: jax.profiler.start_trace(folder, profiler_options=options))
        log.info("recording a profile for %.0f s", PROFILE_S)
        await asyncio.sleep(PROFILE_S)
        await in_daemon_thread(jax.profiler.stop_trace)
        log.info("profile written to %s", folder)
    except Exception:  # a full disk must not cost more than the profile
        log.exception("no profile")
