"""Requests that wait for news, woken one after the other: the most urgent first."""

from __future__ import annotations

import asyncio
import bisect
import itertools

PROBES = 8
"""How many ask again without news. Each may cost a start that is refused, and thousands wait."""


class WaitingLine:
    """Lives on one loop. Whoever is woken runs before whoever is woken after it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._later: asyncio.TimerHandle | None = None

    async def wait(self, priority: int = 0) -> None:
        """Until `wake`. Of equal priorities the one that came first goes first."""
        place = (priority, next(self._numbers), asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, place)
        try:
            await place[2]
        finally:
            self._waiting.remove(place)

    def wake(self) -> None:
        """There is news for all who wait now."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for _, _, woken in self._waiting:
            if not woken.done():
                woken.set_result(None)

    def wake_first(self, count: int) -> None:
        """There is news for no more than the first `count` of those who wait."""
        asleep = (woken for _, _, woken in self._waiting if not woken.done())
        for woken in list(itertools.islice(asleep, count)):
            woken.set_result(None)

    def wake_within(self, seconds: float) -> None:
        """Wake the first PROBES then even if there is no news; and again, while anybody waits."""
        if self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(seconds, self._wake_some, seconds)

    def _wake_some(self, seconds: float) -> None:
        self._later = None
        self.wake_first(PROBES)
        if any(not woken.done() for _, _, woken in self._waiting):
            self.wake_within(seconds)
