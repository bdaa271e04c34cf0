"""Requests that have begun and wait for room at workers whose queues are full.

They cannot be refused any more, so they go before new ones, which can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from router.errors import Overloaded
from router.waiting_line import WaitingLine
from router.worker import Worker


class Room:
    """Of one dispatcher. `line`: where its requests wait."""

    def __init__(self, line: WaitingLine) -> None:
        self._line = line
        self._waiting = 0
        self._queued: dict[Worker, int] = {}  # of those that have refused: told last

    def check_newcomer(self) -> None:
        """Raise Overloaded where a new request would pass one that has begun and waits."""
        if self._waiting:
            raise Overloaded("every worker's queue is full, and requests that have begun wait")

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """A request that has begun waits in the line inside."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def refused(self, worker: Worker) -> None:
        """Its queue is full, by what it tells now."""
        self._queued[worker] = worker.load.waiting

    def told(self, worker: Worker) -> None:
        """Its load is news: as many as have left its queue may come."""
        queued = self._queued.get(worker)
        if queued is None:
            return
        now = self._queued[worker] = worker.load.waiting
        if now < queued and self._waiting:
            self._line.wake_first(queued - now)

    def left(self, worker: Worker) -> None:
        """It is lost."""
        self._queued.pop(worker, None)
