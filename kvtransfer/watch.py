"""Waiting for a condition over plain fields, or for a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watch:
    """Whoever changes a field calls `notify`; whoever waits says for what.

    A failure wakes every wait, now and later, and is raised there.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.failure: Exception | None = None

    def notify(self) -> None:
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        """The first failure stays; later ones are ignored."""
        if self.failure is None:
            self.failure = failure
            self.notify()

    async def until(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Returns when `predicate()` holds. Raises the failure, or TimeoutError."""
        if self._holds(predicate):
            return
        if timeout_s is None:  # a chunk has several such waits
            await self._until(predicate)
            return
        async with asyncio.timeout(timeout_s):
            await self._until(predicate)

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            await self._changed.wait()
            if self._holds(predicate):
                return

    def _holds(self, predicate: Callable[[], bool]) -> bool:
        if self.failure is not None:
            # Raised again and again: its traceback must not pile up and hold frames.
            raise self.failure.with_traceback(None)
        return predicate()
