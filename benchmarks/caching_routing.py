"""Part b: how much of the prompts' prefixes two prefill workers find, by how they are chosen.

Prompts begin with one of many prefixes. The joint memory of both workers holds all prefixes, that
of one does not: so it matters that a prefix lies with one of them and its prompts go there. The
router's `place` and the engine's scheduler and prefix cache do what they do when serving; only
what is between them, wire and steps in time, is left out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.caching_part import Part
from benchmarks.stats import ratio
from engine.batching import derive_limits
from engine.block_hash import root_hash
from engine.blocks import BlockPool
from engine.events import CacheChanged, Prefilled
from engine.fake import FakeRunner
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from engine.types import (
    AttemptId,
    Load,
    ModelLimits,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
)
from protos.block_codec import BlockChanges
from protos.codec import StartOrder, WorkerInfo
from router.cached_prefixes import CachedPrefixes
from router.fleet import Fleet
from router.placement import place
from router.worker import Worker
from settings.config import EngineConfig, with_platform_defaults

LEAST = 0.9
"""Share of tokens found by both workers, of that of one with the joint memory."""
BLOCK_SIZE = 16
_VOCAB, _MAX_MODEL_LEN = 512, 4096


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """`prefix` and `tail` are tokens of each prompt, `blocks` those of one prefill worker."""

    prefixes: int = 50
    prefix: int = 512
    tail: int = 48
    requests: int = 1000
    at_once: int = 4
    blocks: int = 1100


class _Session:
    """What a worker has told, and nothing to tell it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.load = Load()
        self.draining = False

    def start(self, order: StartOrder) -> None: ...

    def abort(self, attempt: AttemptId) -> None: ...

    def resync(self) -> None:
        raise AssertionError(f"{self.address} contradicts what it has told")


class _Prefill:
    """A prefill worker's engine, and what the router knows of it."""

    def __init__(self, number: int, blocks: int, fleet: Fleet) -> None:
        config = EngineConfig(block_size=BLOCK_SIZE)
        sizes = with_platform_defaults(config, "cpu")
        limits = derive_limits(Role.PREFILL, sizes, _MAX_MODEL_LEN, _VOCAB, config)
        pool = BlockPool(blocks, BLOCK_SIZE)
        cache = PrefixCache(pool, root_hash(b"m"), BLOCK_SIZE)
        self.scheduler = Scheduler(limits, pool, cache)
        self._runner = FakeRunner(blocks, BLOCK_SIZE, _VOCAB)
        self._session = _Session(f"prefill-{number}")
        self.worker = Worker(self._session, _info(Role.PREFILL, blocks), fleet)

    def run(self, prefixes: CachedPrefixes | None) -> None:
        """Compute what is queued; what is then cached is told to `prefixes`."""
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            if plan.entries:
                self.scheduler.commit(self._runner.run(plan))
            for event in self.scheduler.take_events():
                if isinstance(event, Prefilled):
                    self.scheduler.release_export(event.transfer_id)
                elif isinstance(event, CacheChanged) and prefixes is not None:
                    changes = BlockChanges(event.added, event.evicted)
                    prefixes.changed(self.worker, changes)
        self._session.load = self.scheduler.load()
        self.worker.told()


def measure_routing(
    args: argparse.Namespace, progress: Callable[[str], None], shape: RoutingShape | None = None
) -> Part:
    """Two prefill workers by cached prefixes and by load alone, and one with their memory."""
    shape = shape or RoutingShape()
    progress(f"b: {shape.requests} prompts with {shape.prefixes} prefixes")
    shares = {
        "2,1": play(shape, args.seed, workers=2, told=True),
        "2,1 by load alone": play(shape, args.seed, workers=2, told=False),
        "one with the joint memory": play(shape, args.seed, workers=1, told=True),
    }
    return summary(shape, shares)


def summary(shape: RoutingShape, shares: dict[str, float]) -> Part:
    """The first way is held against the last."""
    joint = list(shares.values())[-1]
    return Part(
        f"b: {shape.requests} prompts with {shape.prefixes} prefixes of {shape.prefix} tokens",
        tuple(shares),
        {
            "share of tokens cached": tuple(shares.values()),
            "of one worker's": tuple(ratio(share, joint) for share in shares.values()),
        },
        floors={
            "share of tokens cached, of one worker's": (
                ratio(next(iter(shares.values())), joint),
                LEAST,
            )
        },
    )


def play(shape: RoutingShape, seed: int, *, workers: int, told: bool) -> float:
    """The share of prompt tokens that `workers` find, which have the memory of two together.

    `told`: the router hears what they have cached.
    """
    rng = random.Random(seed)
    fleet = Fleet()
    prefixes = CachedPrefixes(fleet)
    blocks = 2 * shape.blocks // workers
    prefill = [_Prefill(number, blocks, fleet) for number in range(workers)]
    Worker(_Session("decode-0"), _info(Role.DECODE, 10**6), fleet)
    by_worker = {each.worker: each for each in prefill}
    if told:
        for each in prefill:
            prefixes.snapshot(each.worker, ())
    shared = [_tokens(rng, shape.prefix) for _ in range(shape.prefixes)]
    choices = random.Random(seed)  # apart from the prompts', which are to be the same each time
    for first in range(0, shape.requests, shape.at_once):
        sent: list[tuple[Worker, int]] = []
        for number in range(first, min(first + shape.at_once, shape.requests)):
            prompt = (*rng.choice(shared), *_tokens(rng, shape.tail))
            placement = place(fleet, prefixes, prompt, (), choices, only_first=False)
            worker = placement.workers[0][0]
            by_worker[worker].scheduler.add(_request(number, prompt))
            worker.began()
            worker.prefill_began(placement.uncached)
            sent.append((worker, placement.uncached))
        for each in prefill:
            each.run(prefixes if told else None)
        for worker, uncached in sent:
            worker.prefill_ended(uncached, computed=None)
            worker.ended()
    loads = [each.scheduler.load() for each in prefill]
    return sum(load.prefix_hits for load in loads) / sum(load.prefix_queries for load in loads)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_VOCAB) for _ in range(count))


def _request(number: int, prompt: tuple[int, ...]) -> SequenceRequest:
    attempt = AttemptId(str(number), 0)
    transfer = number.to_bytes(16, "little")
    return SequenceRequest(
        SequenceId(attempt, 0), Role.PREFILL, prompt, SamplingParams(), (), transfer
    )


def _info(role: Role, blocks: int) -> WorkerInfo:
    limits = ModelLimits("m", _VOCAB, _MAX_MODEL_LEN, BLOCK_SIZE, blocks, 64)
    return WorkerInfo(1, role, limits, ())
