"""How many streamed tokens/s a router on one core gives, beside a bare ASGI application.

The worker sends a token of every stream as soon as the router has taken the last ones, so the
router is always busy. The bare application then sends the very bytes of one of the router's
streams to as many clients from the same core. Last the worker sends at half of the router's
rate, and a token's way to the client is compared with that over a bare session.
"""

import contextlib
import gc
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cores import core_for_one, without_core
from benchmarks.router_processes import running_bare_app, running_router
from benchmarks.stats import median, percentile
from benchmarks.token_stamps import Nanoseconds, create_stamps
from benchmarks.token_times import Requests
from benchmarks.token_ways import DirectWay, RoutedWay, WayError, streamed_events

_PATIENCE_S = 60.0
"""How much longer than its pace a way may take."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SpeedSize:
    """How much is measured: `streams` at once, each of `tokens`, as often as `rounds`."""

    streams: int
    tokens: int
    rounds: int


@dataclass(slots=True)
class RouterSpeed:
    """What was found, one entry per round.

    Attributes:
        router, bare: streamed tokens/s, one event each.
        added_p99_ms: what the router adds to a token's way at half of its rate: the way's 99th
            percentile less the median of the direct way.
    """

    router: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    added_p99_ms: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The router's rate as a share of the bare application's, median over rounds."""
        return median(r / b for r, b in zip(self.router, self.bare, strict=True)) or 0.0

    @property
    def added(self) -> float:
        """Median of `added_p99_ms`."""
        return median(self.added_p99_ms) or 0.0

    def lines(self) -> list[str]:
        """What was found, for a person."""
        router, bare = median(self.router) or 0.0, median(self.bare) or 0.0
        return [
            f"one core, saturated: {router:,.0f} tokens/s, {self.share:.2f} of a bare ASGI "
            f"application's {bare:,.0f}",
            f"one core, {router / 2:,.0f} tokens/s: the router adds {self.added:.1f} ms at the "
            "99th percentile",
        ]

    def missed(self, least_share: float, limit_ms: float) -> list[str]:
        """One line for each target that is missed."""
        lines = []
        if self.share < least_share:
            lines.append(
                f"saturated: {self.share:.2f} of a bare application's tokens/s, the target is "
                f"{least_share:g}"
            )
        if self.added >= limit_ms:
            lines.append(
                f"at half of its rate the router adds {self.added:.1f} ms at the 99th percentile, "
                f"the target is under {limit_ms:g} ms"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Medians and every round."""
        return {
            "share_of_bare": self.share,
            "added_p99_ms": self.added,
            "rounds": {
                "router_tok_s": self.router,
                "bare_tok_s": self.bare,
                "added_p99_ms": self.added_p99_ms,
            },
        }


async def measure_speed(size: SpeedSize, tell: Tell) -> RouterSpeed:
    """Saturate router and bare application in turns, then pace the router.

    `tell` hears what is being done.

    Raises:
        StartError, WayError: a process does not come up, or tokens do not come through.
    """
    core, speed = core_for_one(), RouterSpeed()
    with without_core(core), _uncollected():
        await _saturate(size, core, speed, tell)
        await _pace(size, core, speed, tell)
    return speed


async def _saturate(size: SpeedSize, core: int, speed: RouterSpeed, tell: Tell) -> None:
    async with _routed(size, core, 0.0, rounds=2 * size.rounds + 1) as (folder, url, stamps):
        run, routed = Requests(stamps, _PATIENCE_S), RoutedWay(url)
        await run(routed, size.streams)  # not counted
        events = folder / "events"
        events.write_bytes(streamed_events(routed.last_answer))
        async with running_bare_app(folder, events, core) as bare_url:
            bare = RoutedWay(bare_url)
            for number in range(size.rounds):
                tell(f"{size.streams} streams, saturated, round {number + 1}/{size.rounds}")
                speed.router.append((await run(routed, size.streams)).rate)
                speed.bare.append((await run(bare, size.streams)).rate)


async def _pace(size: SpeedSize, core: int, speed: RouterSpeed, tell: Tell) -> None:
    rate = (median(speed.router) or 0.0) / 2
    interval = size.streams / rate
    async with _routed(size, core, interval, rounds=2 * size.rounds + 1) as (folder, url, stamps):
        run = Requests(stamps, size.tokens * interval + _PATIENCE_S)
        direct, routed = DirectWay(_address(folder)), RoutedWay(url)
        await run(routed, size.streams)  # not counted
        for number in range(size.rounds):
            tell(f"{size.streams} streams, half of the rate, round {number + 1}/{size.rounds}")
            straight = (await run(direct, size.streams)).on_the_way_together
            by_router = (await run(routed, size.streams)).on_the_way_together
            speed.added_p99_ms.append(_ms(by_router, 99) - _ms(straight, 50))


def _ms(taken: Nanoseconds, percent: float) -> float:
    value = percentile(taken.tolist(), percent)
    if value is None:
        raise WayError("no token was sent while all streams were under way")
    return value / 1e6


@contextlib.asynccontextmanager
async def _routed(
    size: SpeedSize, core: int, interval: float, *, rounds: int
) -> AsyncIterator[tuple[Path, str, Nanoseconds]]:
    """A worker and a router on `core`: their folder, the router's URL, the worker's stamps."""
    with tempfile.TemporaryDirectory(prefix="hexserve-") as name:
        folder = Path(name)
        stamps = create_stamps(folder / "stamps.npy", rounds * size.streams, size.tokens)
        async with running_router(
            folder, folder / "stamps.npy", _address(folder), interval, core
        ) as url:
            yield folder, url, stamps


def _address(folder: Path) -> str:
    return f"unix:{folder / 'worker.sock'}"


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection in this process, whose pauses are not the router's."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
