"""Takes a way with many streams at once; when each token was sent, and when it arrived."""

import asyncio
from dataclasses import dataclass

from benchmarks.token_stamps import Nanoseconds
from benchmarks.token_ways import Way, WayError


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Nanoseconds, [streams, tokens]; `sent` is 0 where nobody noted it."""

    sent: Nanoseconds
    arrived: Nanoseconds

    @property
    def on_the_way(self) -> Nanoseconds:
        """How long each token took, [streams, tokens]."""
        return self.arrived - self.sent

    @property
    def on_the_way_together(self) -> Nanoseconds:
        """How long each token took that was sent while all streams were under way, [tokens].

        All streams begin at once here, and what that costs is no token's way.
        """
        begun = self.arrived[:, 0].max()
        taken: Nanoseconds = self.on_the_way[self.sent > begun]
        return taken

    @property
    def rate(self) -> float:
        """Tokens/s from the last stream's first token until the first stream's last.

        Raises:
            WayError: there is no such time; the streams must be longer.
        """
        begun, ended = self.arrived[:, 0].max(), self.arrived[:, -1].min()
        if begun >= ended:
            raise WayError("the first stream has ended before the last has begun")
        counted = ((self.arrived > begun) & (self.arrived <= ended)).sum()
        return float(counted / (ended - begun) * 1e9)


class Requests:
    """Sends requests of ever new numbers, whose tokens a worker stamps.

    Args:
        limit_s: how long a way may take.
    """

    def __init__(self, stamps: Nanoseconds, limit_s: float) -> None:
        self._stamps = stamps
        self._next = 0
        self._limit_s = limit_s

    async def __call__(self, way: Way, streams: int) -> TokenTimes:
        """The times of `streams` new requests' tokens. Raises WayError."""
        first, self._next = self._next, self._next + streams
        try:
            async with asyncio.timeout(self._limit_s):
                arrived = await way(range(first, self._next), self._stamps.shape[1])
        except TimeoutError:
            raise WayError(f"tokens are missing after {self._limit_s:.0f} s") from None
        return TokenTimes(self._stamps[first : self._next], arrived)
