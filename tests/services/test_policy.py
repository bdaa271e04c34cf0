"""Which workers are chosen: the soonest, ties at random but seeded, draining ones never."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.types import Load, ModelLimits, Role
from protos.codec import NO_ROLES, WorkerInfo
from router.fleet import Fleet
from router.policy import (
    DECODE_S,
    FETCH_RATE,
    HANDOFF_S,
    LOCAL_MOST_TOKENS,
    Ask,
    choose_colocated,
    choose_pair,
    choose_prefill,
)
from tests.services.deployment import Deployment, deployment, eventually, expected, prompt_of


@dataclass(eq=False)
class FakeWorker:
    """The load that it tells, and what the router knows of it."""

    load: Load = field(default_factory=lambda: Load(free_blocks=100))
    prefill_tokens: int = 0
    sequences: int = 0
    rate: float = 1000.0
    cached: int = 0
    roles: Role = Role.PREFILL
    spare: bool = False


class Choice:
    """Workers in a fleet, for a prompt of which each has its `cached` tokens."""

    def __init__(self, *workers: FakeWorker, tokens: int = 10) -> None:
        self.workers = workers
        self.fleet = Fleet()
        self.ask = Ask(tokens, np.zeros(64, np.int64))
        for worker in workers:
            limits = ModelLimits("m", 10, 1000, 4, 100, 8)
            spare = Role.PREFILL if worker.spare else NO_ROLES
            info = WorkerInfo(1, worker.roles, limits, (), spare)
            row = self.fleet.join(worker, info)  # type: ignore[arg-type]
            self.fleet.loaded(row, worker.load, draining=False)
            self.fleet.counted(row, worker.prefill_tokens, worker.sequences, worker.rate)
            self.ask.cached[row] = worker.cached

    def prefill(self, rng: random.Random | None = None) -> Any:
        rows = self.fleet.taking(Role.PREFILL)
        return self._worker(choose_prefill(self.fleet, rows, self.ask, rng or seeded()))

    def colocated(self, rng: random.Random | None = None) -> Any:
        rows = self.fleet.taking(Role.PREFILL)
        return self._worker(choose_colocated(self.fleet, rows, self.ask, rng or seeded()))

    def pair(self, rng: random.Random | None = None) -> Any:
        fleet = self.fleet
        prefill, decode = fleet.taking(Role.PREFILL), fleet.taking(Role.DECODE)
        rows = choose_pair(fleet, prefill, decode, fleet.standing_in, self.ask, rng or seeded())
        return None if rows is None else tuple(map(self._worker, rows))

    def _worker(self, row: int | None) -> FakeWorker | None:
        return None if row is None else self.workers[row]


def seeded() -> random.Random:
    return random.Random(7)


def decoding(**fields: Any) -> FakeWorker:
    return FakeWorker(roles=Role.DECODE, **fields)


def test_no_worker_no_choice() -> None:
    nobody = Choice()
    assert (nobody.prefill(), nobody.colocated(), nobody.pair()) == (None, None, None)
    assert Choice(FakeWorker()).pair() is None
    assert Choice(decoding()).pair() is None


def test_prefill_goes_where_the_fewest_tokens_are_ahead() -> None:
    told = FakeWorker(Load(waiting_tokens=50, free_blocks=100))
    sent = FakeWorker(prefill_tokens=40)
    few = FakeWorker(Load(waiting_tokens=30, free_blocks=100), prefill_tokens=20)
    assert Choice(told, sent, few).prefill() is few
    few.prefill_tokens = 45  # what was sent since the last load counts as well
    assert Choice(told, sent, few).prefill() is sent


def test_prefill_weighs_what_is_cached_against_what_is_queued() -> None:
    hit = FakeWorker(cached=600, prefill_tokens=500)
    idle = FakeWorker()
    assert Choice(hit, idle, tokens=1000).prefill() is hit, "900 tokens to compute before 1,000"
    hit.prefill_tokens = 700
    assert Choice(hit, idle, tokens=1000).prefill() is idle


def test_prefill_weighs_how_fast_a_worker_is() -> None:
    fast = FakeWorker(prefill_tokens=900, rate=4000.0)
    slow = FakeWorker(rate=1000.0)
    assert Choice(fast, slow, tokens=1000).prefill() is fast, "0.475 s before 1 s"
    assert Choice(fast, slow, tokens=100).prefill() is slow, "0.1 s before 0.25 s"


def test_estimates_that_hardly_differ_are_equal_and_the_fewest_sequences_decide() -> None:
    one = FakeWorker(rate=1030.0, sequences=2)
    other = FakeWorker(rate=1000.0, sequences=1)
    assert Choice(one, other).prefill() is other


def test_prefill_goes_past_a_worker_whose_exports_are_not_fetched() -> None:
    limited = FakeWorker(Load(export_limited=True))
    busy = FakeWorker(Load(waiting_tokens=5000))
    assert Choice(limited, busy).prefill() is busy
    assert Choice(limited).prefill() is limited


def test_decode_goes_to_the_emptiest_batch_or_pool() -> None:
    full_batch = decoding(load=Load(running=7, free_blocks=100))
    full_pool = decoding(load=Load(running=1, free_blocks=10, running_blocks=90))
    just_sent = decoding(sequences=6)
    half = decoding(load=Load(running=4, free_blocks=60))
    assert Choice(FakeWorker(), full_batch, full_pool, just_sent, half).pair()[1] is half


def test_several_choices_go_where_there_is_room_for_all() -> None:
    small, large = decoding(), decoding(load=Load(running=4, free_blocks=100))
    choice = Choice(FakeWorker(), small, large)
    choice.fleet.table["max_seqs"][1] = 2
    assert choice.pair()[1] is small
    choice.ask = dataclasses.replace(choice.ask, choices=4, shared=9)
    assert choice.pair()[1] is large


def test_decode_goes_past_a_worker_without_room() -> None:
    full = decoding(load=Load(free_blocks=2))  # 3 blocks hold 10 tokens and the next
    busy = decoding(load=Load(running=8, waiting=3, free_blocks=3))
    assert Choice(FakeWorker(), full, busy).pair()[1] is busy
    assert Choice(FakeWorker(), full).pair()[1] is full


def test_cached_blocks_are_room() -> None:
    cached = decoding(load=Load(free_blocks=10, cached_blocks=80))
    used = decoding(load=Load(free_blocks=50))
    assert Choice(FakeWorker(), used, cached).pair()[1] is cached


def test_decode_weighs_what_need_not_be_fetched_against_a_fuller_batch() -> None:
    fetch_s = 0.5 * DECODE_S / 8  # half of what one more sequence costs
    hit = decoding(load=Load(running=1, free_blocks=100), cached=int(FETCH_RATE * fetch_s))
    idle = decoding(load=Load(running=1, free_blocks=100))
    tokens = hit.cached + 8
    roomy = [FakeWorker()]
    for worker in (hit, idle):  # the pool is none too small for the prompt
        worker.load = Load(running=1, free_blocks=10**9)
    assert Choice(*roomy, idle, hit, tokens=tokens).pair()[1] is hit
    hit.load = Load(running=2, free_blocks=10**9)
    assert Choice(*roomy, idle, hit, tokens=tokens).pair()[1] is idle


def test_colocated_weighs_decode_before_prefill() -> None:
    busy = FakeWorker(Load(running=4, free_blocks=100))
    queued = FakeWorker(prefill_tokens=500)
    idle = FakeWorker(prefill_tokens=20)
    assert Choice(busy, queued, idle).colocated() is idle
    assert Choice(busy, queued).colocated() is queued


def test_colocated_goes_where_the_prompt_is_cached() -> None:
    hit = FakeWorker(Load(free_blocks=1000), cached=360)
    idle = FakeWorker(Load(free_blocks=1000))
    assert Choice(hit, idle, tokens=400).colocated() is hit


@pytest.mark.parametrize(
    ("remote_cached", "running", "queued", "alone"),
    [
        (380, 0, 0, True),  # 20 ms on either, and no handoff
        (380, 0, 10, False),  # 10 ms more than the remote one and its handoff
        (380, 1, 0, False),  # the sequence there would lose 20 ms
        (320, 1, 0, True),  # and remote takes 60 ms longer
        (0, 9, 100, True),  # 300 ms here, 400 there
        (0, 18, 100, False),
    ],
)
def test_few_uncached_tokens_are_prefilled_where_they_decode(
    remote_cached: int, running: int, queued: int, alone: bool
) -> None:
    """At 1,000 tokens/s; a decode worker with 380 of 400 tokens has 20 to compute, 20 ms."""
    load = Load(running=running, free_blocks=10**6)
    decode = decoding(load=load, cached=380, spare=True, prefill_tokens=queued)
    prefill = FakeWorker(cached=remote_cached)
    pair = Choice(prefill, decode, tokens=400).pair()
    assert pair == ((decode, decode) if alone else (prefill, decode))


def test_a_decode_worker_prefills_neither_many_tokens_nor_without_the_programs() -> None:
    busy = FakeWorker(prefill_tokens=10**6)
    load = Load(free_blocks=10**6)
    for tokens, spare, alone in (
        (LOCAL_MOST_TOKENS, True, True),
        (LOCAL_MOST_TOKENS + 1, True, False),
        (1, False, False),
    ):
        decode = decoding(load=load, spare=spare)
        pair = Choice(busy, decode, tokens=tokens).pair()
        assert pair == ((decode if alone else busy), decode)


def test_the_hit_may_lie_with_another_decode_worker_than_the_emptiest() -> None:
    """Computed alone there, 0.01 s and 0.5 s of a fuller batch, beside 0.9 s of remote prefill."""
    empty = decoding(load=Load(free_blocks=10**6), spare=True)
    hit = decoding(load=Load(waiting=1, free_blocks=10**6), spare=True, cached=890)
    prefill = FakeWorker()
    assert Choice(prefill, empty, hit, tokens=900).pair() == (hit, hit)
    assert HANDOFF_S < 0.9
    prefill.rate = 3000.0
    assert Choice(prefill, empty, hit, tokens=900).pair() == (prefill, empty)


def test_ties_are_broken_at_random_and_alike_for_equal_seeds() -> None:
    prefill, decode = [FakeWorker() for _ in range(3)], [decoding() for _ in range(3)]
    choice = Choice(*prefill, *decode)
    for choose, workers in ((choice.prefill, prefill), (choice.colocated, prefill)):
        runs = []
        for _ in range(2):
            source = seeded()
            runs.append([workers.index(choose(source)) for _ in range(60)])
        assert runs[0] == runs[1]
        assert set(runs[0]) == {0, 1, 2}
    runs = []
    for _ in range(2):
        source = seeded()
        runs.append([choice.pair(source) for _ in range(60)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 9


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
