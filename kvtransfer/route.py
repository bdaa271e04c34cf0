"""A fetch's way to its source: which endpoint it takes, and which next when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvtransfer.books import NO_TRANSPORT, TransferBooks
from kvtransfer.channel import Channel, ChannelClosed
from kvtransfer.endpoints import Endpoint
from kvtransfer.errors import SourceUnreachable


class AvoidedEndpoints:
    """Endpoints that failed lately. A reader tries them last, so that no second attempt runs
    into what the first one failed by, and comes back to them when `avoid_s` have passed."""

    def __init__(self, avoid_s: float) -> None:
        self._avoid_s = avoid_s
        self._until: dict[Endpoint, float] = {}

    def add(self, endpoint: Endpoint) -> None:
        now = asyncio.get_running_loop().time()
        self._until = {other: until for other, until in self._until.items() if until > now}
        self._until[endpoint] = now + self._avoid_s

    def last(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """`endpoints` in their order, the avoided ones behind the others."""
        now = asyncio.get_running_loop().time()
        return sorted(endpoints, key=lambda endpoint: self._until.get(endpoint, 0.0) > now)


class Route:
    """The endpoints of one fetch, best first; each is tried once.

    `transport` is that of the endpoint taken or tried last.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        refusal: str,
        open_channel: Callable[[Endpoint], Awaitable[Channel]],
        avoided: AvoidedEndpoints,
        books: TransferBooks,
    ) -> None:
        """`refusal` begins the message when no endpoint is left."""
        self.transport = NO_TRANSPORT
        self.books = books
        self._left = avoided.last(endpoints)
        self._refusal = refusal
        self._open = open_channel
        self._avoided = avoided
        self._current: Endpoint | None = None
        self._failed: list[tuple[Endpoint, str]] = []

    @property
    def has_more(self) -> bool:
        return bool(self._left)

    async def connect(self) -> Channel:
        """A connection by the next endpoint that answers. Raises SourceUnreachable."""
        while self._left:
            self._current = self._left.pop(0)
            self.transport = self._current.transport
            try:
                return await self._open(self._current)
            except (ChannelClosed, OSError) as error:  # TimeoutError is an OSError
                self.broke(error)
        reasons = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in self._failed)
        raise SourceUnreachable(f"{self._refusal}: {reasons}" if reasons else self._refusal)

    def broke(self, error: Exception) -> None:
        """The endpoint taken last did not lead to an answer: another may."""
        assert self._current is not None
        self._failed.append((self._current, str(error) or type(error).__name__))

    def answered(self) -> None:
        """The source has spoken: so what failed before were the endpoints, and not itself."""
        for endpoint, _ in self._failed:
            self._avoided.add(endpoint)
            self.books.of(endpoint.transport).fallbacks += 1
        self._failed.clear()

    def avoid(self) -> None:
        """The endpoint taken last moves no KV: later fetches try it last."""
        if self._current is not None:
            self._avoided.add(self._current)
