"""The wait for workers: who has begun waits for room, and everybody for workers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from router.errors import Overloaded, Unavailable
from router.placement import Placement, place
from router.room import Room
from router.siblings import Siblings
from router.urgency import Urgency
from router.worker import Worker
from router.workers import WorkerPool

MAX_WAITING = 4096
"""How many requests may wait for workers to come back."""
FULL_RETRY_S = 0.1
"""When workers whose queues are full are asked again for a request that has begun."""


class WorkerSearch:
    """Places the sequences of one dispatcher.

    Attributes:
        waiting: sequences that wait here for a worker.
    """

    def __init__(self, pool: WorkerPool, room: Room, rng: random.Random) -> None:
        self._pool = pool
        self._room = room
        self._rng = rng
        self.waiting = 0

    async def workers_for(
        self,
        tokens: tuple[int, ...],
        refusing: set[Worker],
        *,
        deadline: float,
        only_first: bool,
        reuses: bool,
        begun: Callable[[], bool],
        urgency: Urgency,
        siblings: Siblings | None,
    ) -> Placement:
        """As `place`, but waits for workers that are lost, until `deadline` on the loop's clock.

        A request that has `begun` also waits for room, as it cannot be refused any more, and
        new ones do not pass it.

        Raises:
            DeadlinePassed: the request's own has.
        """
        pool = self._pool

        def choose() -> Placement:
            return place(
                pool.fleet,
                pool.prefixes,
                tokens,
                refusing,
                self._rng,
                only_first=only_first,
                reuses=reuses,
                siblings=siblings,
            )

        loop = asyncio.get_running_loop()
        if self.waiting >= MAX_WAITING:
            return choose()
        self.waiting += 1
        try:
            while True:
                urgency.check()
                left = deadline - loop.time()
                for_room: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                try:
                    return choose()
                except Unavailable:
                    if left <= 0 or pool.closing:
                        raise
                except Overloaded:
                    if left <= 0 or not begun():
                        raise
                    refusing.clear()
                    for_room = self._room.waited_for()
                    pool.waiting.wake_within(FULL_RETRY_S)
                with for_room, contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(urgency.before(deadline)):
                        await pool.wait_for_change(urgency.priority)
        finally:
            self.waiting -= 1
