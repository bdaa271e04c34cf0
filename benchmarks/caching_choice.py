"""Part d: what the router's choice of workers costs it, in a large deployment.

The fleet and the index of cached blocks are made up; what is timed is the router's own `place`.
The hashes of a prompt's blocks are known beforehand: tokenizing and hashing are not the choice.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.caching_part import Part
from benchmarks.stats import median, percentile
from engine.types import COLOCATED, Load, ModelLimits, Role
from protos.codec import NO_ROLES, WorkerInfo
from router.cached_prefixes import CachedPrefixes
from router.fleet import DEFAULT_PREFILL_RATE, Fleet
from router.placement import Placement, place

MOST_US = 100.0
"""Median of a choice, in microseconds."""
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Counts; `chain` and `asked` are blocks of BLOCK_SIZE tokens.

    Attributes:
        blocks: distinct hashes in the index.
        chain: of a prompt with its answers, as the worker keeps it that has computed it.
        holders: further workers that hold a chain, each up to somewhere.
        asked: of the prompts that are placed. They begin with a chain, up to somewhere.
        choices: that are timed.
    """

    workers: int = 1000
    blocks: int = 1_000_000
    chain: int = 250
    holders: int = 4
    asked: int = 128
    choices: int = 5000


class _Worker:
    """A row of the fleet; nothing is sent to it."""

    def __init__(self, row: int) -> None:
        self.row: int | None = row


class _Hashed(CachedPrefixes):
    """`asked` are the hashes of the prompt that is placed."""

    asked: Sequence[int] = ()

    def chains(self, tokens: Sequence[int]) -> Mapping[int, Sequence[int]]:
        return {BLOCK_SIZE: self.asked}


def measure_choice(
    args: argparse.Namespace, progress: Callable[[str], None], shape: FleetShape | None = None
) -> Part:
    """Colocated workers, and as many as prefill and decode workers by halves."""
    shape = shape or FleetShape()
    ways: dict[str, list[float]] = {}
    for way, roles, spare in (
        ("colocated", (COLOCATED,), NO_ROLES),
        ("pairs", (Role.PREFILL, Role.DECODE), NO_ROLES),
        ("pairs, decode may prefill", (Role.PREFILL, Role.DECODE), Role.PREFILL),
    ):
        progress(f"d: {shape.workers} workers, {shape.blocks} cached blocks, {way}")
        ways[way] = Deployment(shape, roles, spare, args.seed).times()
    return summary(shape, ways)


def summary(shape: FleetShape, ways: Mapping[str, Sequence[float]]) -> Part:
    """The figures of each way, from seconds; the median of each is held against the target."""

    def in_us(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e6

    medians = {way: in_us(median(times)) for way, times in ways.items()}
    return Part(
        f"d: a choice among {shape.workers} workers with {shape.blocks} cached blocks",
        tuple(ways),
        {
            "p50 us": tuple(medians.values()),
            "p99 us": tuple(in_us(percentile(times, 99)) for times in ways.values()),
        },
        {f"p50 us, {way}": (value, MOST_US) for way, value in medians.items()},
    )


class Deployment:
    """Workers with the given roles in turn, and what they have cached."""

    def __init__(self, shape: FleetShape, roles: Sequence[Role], spare: Role, seed: int) -> None:
        self._shape = shape
        self._rng = random.Random(seed)
        self._fleet = Fleet()
        self._prefixes = _Hashed(self._fleet)
        self._join(roles, spare)
        hashes = [self._rng.getrandbits(64) for _ in range(shape.blocks)]
        length = shape.chain
        self._chains = [hashes[at : at + length] for at in range(0, len(hashes), length)]
        held: list[list[int]] = [[] for _ in range(shape.workers)]
        for chain in self._chains:
            first, *others = self._rng.sample(range(shape.workers), shape.holders + 1)
            held[first] += chain
            for other in others:
                held[other] += chain[: self._rng.randrange(len(chain) + 1)]
        for worker, its in enumerate(held):
            self._prefixes.index.replace(worker, its)

    def _join(self, roles: Sequence[Role], spare: Role) -> None:
        rng, fleet = self._rng, self._fleet
        limits = ModelLimits("m", 50_000, 16_384, BLOCK_SIZE, 20_000, 64)
        for number in range(self._shape.workers):
            role = roles[number % len(roles)]
            more = spare if role is Role.DECODE else NO_ROLES
            row = fleet.join(_Worker(number), WorkerInfo(1, role, limits, (), more))  # type: ignore[arg-type]
            assert row == number
            running = rng.randrange(64)
            load = Load(running=running, free_blocks=20_000 - 200 * running)
            fleet.loaded(row, load, draining=False)
            fleet.counted(row, rng.randrange(8000), running, DEFAULT_PREFILL_RATE)

    def place(self) -> tuple[Placement, float]:
        """Place a prompt, and tell how many seconds that took."""
        asked = self._shape.asked
        chain = self._rng.choice(self._chains)[:asked]
        known = self._rng.randrange(len(chain) + 1)
        fresh = [self._rng.getrandbits(64) for _ in range(asked - known)]
        self._prefixes.asked = [*chain[:known], *fresh]
        tokens = range(asked * BLOCK_SIZE + 1)
        began = time.perf_counter()
        placement = place(self._fleet, self._prefixes, tokens, (), self._rng, only_first=False)
        return placement, time.perf_counter() - began

    def times(self) -> list[float]:
        """Seconds of each choice; without those of the collector, which has a million objects."""
        gc.collect()
        gc.disable()
        try:
            return [self.place()[1] for _ in range(self._shape.choices)]
        finally:
            gc.enable()
