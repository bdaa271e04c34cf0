"""How many requests are with the generator."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from router.record import RequestRecord


class RunningRequests:
    """Counts requests that have sequences under way; one that has several counts once."""

    def __init__(self) -> None:
        self._sequences = Counter[int]()  # id of a record, which its sequences keep alive
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, record: RequestRecord) -> None:
        """A sequence of the request begins."""
        self._sequences[id(record)] += 1
        self._idle.clear()

    def end(self, record: RequestRecord) -> None:
        """It has ended. Once."""
        self._sequences[id(record)] -= 1
        if not self._sequences[id(record)]:
            del self._sequences[id(record)]
        if not self._sequences:
            self._idle.set()

    @contextlib.contextmanager
    def kept(self, record: RequestRecord) -> Iterator[None]:
        """The request has sequences to begin inside, be it that none is under way."""
        self.begin(record)
        try:
            yield
        finally:
            self.end(record)

    async def wait_until_idle(self) -> None:
        """Until there is none."""
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._sequences)
