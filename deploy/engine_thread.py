"""Runs an engine's steps on a thread of its own and hands results to an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from deploy.signals import in_daemon_thread
from engine.engine import Engine
from engine.events import StepResult

_T = TypeVar("_T")

log = logging.getLogger("hexserve.worker")

CHECK_INTERVAL_S = 1.0


class EngineThread:
    """Steps `engine` until stopped. `on_result` and `on_death` are called on the loop."""

    def __init__(
        self,
        engine: Engine,
        on_result: Callable[[StepResult], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_result = on_result
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End after the running step; cancelled, the wait leaves nothing for the loop to join."""
        self._stopping = True
        self._engine.wake()
        await in_daemon_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except BaseException as error:  # nothing may end this thread in silence
            log.exception("the engine has failed")
            self._tell(self._on_death, error)

    def _tell(self, hear: Callable[[_T], None], news: _T) -> None:
        # A close that has not waited for a long step may have ended the loop by now.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(hear, news)

    def _step_until_stopped(self) -> None:
        checked = 0.0
        while True:
            self._engine.wait_for_work()
            if self._stopping:
                return
            result = self._engine.step()
            if result.events:
                self._tell(self._on_result, result)
            load = result.load
            idle = not (load.waiting or load.running or load.exported_blocks)
            if idle and time.monotonic() - checked > CHECK_INTERVAL_S:
                checked = time.monotonic()
                self._engine.check_invariants()
