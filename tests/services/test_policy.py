"""Which workers are chosen: the least loaded, ties at random but seeded, draining ones never."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from engine.types import Load, ModelLimits
from router.policy import choose_colocated, choose_decode, choose_prefill
from tests.services.deployment import Deployment, deployment, eventually, expected, prompt_of


@dataclass(eq=False)
class Info:
    limits: ModelLimits = field(default_factory=lambda: ModelLimits("m", 10, 100, 4, 100, 8))


@dataclass(eq=False)
class FakeWorker:
    load: Load = field(default_factory=lambda: Load(free_blocks=100))
    prefill_tokens: int = 0
    sequences: int = 0
    info: Info = field(default_factory=Info)


def rng() -> random.Random:
    return random.Random(7)


def test_no_worker_no_choice() -> None:
    for choose in (choose_prefill, choose_decode, choose_colocated):
        assert choose([], rng()) is None


def test_prefill_goes_where_the_fewest_tokens_are_ahead() -> None:
    told = FakeWorker(Load(waiting_tokens=50, free_blocks=100))
    sent = FakeWorker(prefill_tokens=40)
    few = FakeWorker(Load(waiting_tokens=30, free_blocks=100), prefill_tokens=20)
    assert choose_prefill([told, sent, few], rng()) is few
    few.prefill_tokens = 45  # what was sent since the last load counts as well
    assert choose_prefill([told, sent, few], rng()) is sent


def test_prefill_goes_past_a_worker_whose_exports_are_not_fetched() -> None:
    limited = FakeWorker(Load(export_limited=True))
    busy = FakeWorker(Load(waiting_tokens=5000))
    assert choose_prefill([limited, busy], rng()) is busy
    assert choose_prefill([limited], rng()) is limited


def test_decode_goes_to_the_emptiest_batch_or_pool() -> None:
    full_batch = FakeWorker(Load(running=7, free_blocks=100))
    full_pool = FakeWorker(Load(running=1, free_blocks=10, running_blocks=90))
    just_sent = FakeWorker(sequences=6)
    half = FakeWorker(Load(running=4, free_blocks=60))
    assert choose_decode([full_batch, full_pool, just_sent, half], rng()) is half


def test_cached_blocks_are_room() -> None:
    cached = FakeWorker(Load(free_blocks=10, cached_blocks=80))
    used = FakeWorker(Load(free_blocks=50))
    assert choose_decode([used, cached], rng()) is cached


def test_colocated_weighs_decode_before_prefill() -> None:
    busy = FakeWorker(Load(running=4, free_blocks=100))
    queued = FakeWorker(prefill_tokens=500)
    idle = FakeWorker(prefill_tokens=20)
    assert choose_colocated([busy, queued, idle], rng()) is idle
    assert choose_colocated([busy, queued], rng()) is queued


def test_ties_are_broken_at_random_and_alike_for_equal_seeds() -> None:
    workers = [FakeWorker() for _ in range(3)]
    for choose in (choose_prefill, choose_decode, choose_colocated):
        runs = []
        for _ in range(2):
            source = rng()
            runs.append([workers.index(choose(workers, source)) for _ in range(60)])
        assert runs[0] == runs[1]
        assert set(runs[0]) == {0, 1, 2}


def count_starts(served: Deployment) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, member in served.members.items():
        start = member.host.start

        def counted(order, name=name, start=start) -> None:
            counts[name] += 1
            start(order)

        member.host.start = counted
    return counts


async def test_every_prefill_worker_gets_work() -> None:
    prompts = [prompt_of(9, salt=i) for i in range(30)]
    async with deployment("3,1") as served:
        counts = count_starts(served)
        answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
        assert answers == [expected(prompt, 8) for prompt in prompts]
        assert counts["decode-0"] == 30
        assert all(counts[f"prefill-{i}"] >= 8 for i in range(3)), counts


async def test_every_decode_worker_gets_work() -> None:
    prompts = [prompt_of(9, salt=i) for i in range(30)]
    async with deployment("1,3") as served:
        counts = count_starts(served)
        await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
        assert all(counts[f"decode-{i}"] >= 8 for i in range(3)), counts


async def test_a_draining_worker_is_left_out() -> None:
    async with deployment("2,2") as served:
        counts = count_starts(served)
        for name in ("prefill-0", "decode-1"):
            served[name].host._sessions.drain()
        await eventually(lambda: sum(w.draining for w in served.pool._workers.values()) == 2)
        await asyncio.gather(*(served.ask(prompt_of(9, salt=i)) for i in range(12)))
        assert counts == {"prefill-1": 12, "decode-0": 12}


async def test_one_token_needs_no_decode_worker() -> None:
    async with deployment("1,1") as served:
        counts = count_starts(served)
        assert await served.ask(prompt_of(9), max_tokens=1) == expected(prompt_of(9), 1)
        assert counts == {"prefill-0": 1}
        await served.until_idle()
