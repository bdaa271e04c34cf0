"""Prefixes that workers keep: what the router is told, what travels, and that nothing is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from engine.types import TokenDelta
from router.metrics import RouterMetrics
from tests.services.deployment import (
    BLOCK_SIZE,
    EACH_TRANSPORT,
    Deployment,
    deployment,
    eventually,
    expected,
    prompt_of,
)

SYSTEM = prompt_of(24)
HIT = 2 * BLOCK_SIZE


async def turn(served: Deployment, prompt: list[int], count: int = 9) -> int:
    """The cached tokens that are told of a prompt; its answer must be right."""
    deltas: list[TokenDelta] = [d async for d in served.stream(prompt, max_tokens=count)]
    assert [t for d in deltas for t in d.tokens] == expected(prompt, count)
    assert not any(delta.cached_tokens for delta in deltas[1:])
    return deltas[0].cached_tokens


@pytest.mark.parametrize("topology", ["1,1", "colocated"])
async def test_the_next_turn_of_a_chat_computes_what_is_new(topology: str) -> None:
    async with deployment(topology, hit_tokens=HIT) as served:
        metrics = RouterMetrics("m")
        metrics.export_prefixes(served.pool.prefix_totals)
        first = [*SYSTEM, 1, 2, 3]
        assert await turn(served, first) == 0
        second = [*first, *expected(first, 9), 4, 5]
        # Whoever has decoded has KV of 35 of the 38 tokens before the last.
        assert await turn(served, second) == {"1,1": 24, "colocated": 32}[topology]
        assert await turn(served, [*SYSTEM, 9]) == 24
        asked = len(first) + len(second) + len(SYSTEM) + 1
        await eventually(lambda: served.pool.prefix_totals.queries == asked)
        shown = metrics.render().decode()
        hits = float({"1,1": 24 + 24, "colocated": 32 + 24}[topology])
        assert f'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {asked:.1f}' in shown
        assert f'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}' in shown
        await served.until_idle()


@pytest.mark.parametrize("transports", EACH_TRANSPORT, ids=lambda t: t[0])
async def test_only_what_the_decode_worker_lacks_travels(transports: tuple[str, ...]) -> None:
    async with deployment("1,1", transports=transports, hit_tokens=HIT) as served:
        first = list(SYSTEM)
        await turn(served, first)
        second = [*first, *expected(first, 9), 5]
        await turn(served, second)  # 34 tokens, of which 8 blocks are there
        await turn(served, first)  # all of them
        await served.until_idle()
        counts = served["decode-0"].host._decode.counts()[transports[0]]
        assert counts.transfers == 3
        assert counts.skipped_tokens == 32 + 24


async def test_a_prompt_that_must_be_scored_is_not_sent_for_what_is_cached() -> None:
    """All of it is computed wherever it goes."""
    async with deployment("1,1", hit_tokens=HIT) as served:
        prefixes = served.pool.prefixes
        await turn(served, list(SYSTEM))
        await eventually(lambda: len(prefixes.index) > 0)
        scored = served.stream([*SYSTEM, 5], max_tokens=2, prompt_logprobs=0)
        assert [d.cached_tokens async for d in scored] == [0, 0]
        assert set(prefixes.hit_tokens.values()) == {0}
        assert await turn(served, [*SYSTEM, 6]) == len(SYSTEM)
        assert prefixes.hit_tokens["prefill"] == len(SYSTEM)


async def test_a_worker_that_starts_anew_takes_nothing_back_from_the_sums() -> None:
    async with deployment("1,1", hit_tokens=HIT) as served:
        for _ in range(2):
            await turn(served, list(SYSTEM))
        await eventually(lambda: served.pool.prefix_totals.hits == 16)
        await served["prefill-0"].kill()
        await served.revive("prefill-0")
        assert await turn(served, list(SYSTEM)) == 0
        assert await turn(served, list(SYSTEM)) == 16
        await eventually(lambda: served.pool.prefix_totals.hits == 32)
        assert served.pool.prefix_totals.queries == 4 * len(SYSTEM)


@pytest.mark.parametrize("topology", ["1,1", "2,1", "1,2", "colocated"])
async def test_a_storm_of_aborts_on_shared_prefixes(topology: str) -> None:
    """With a pool that holds few of them, so that blocks are evicted all the time."""
    chance = random.Random(4)
    async with deployment(topology, hit_tokens=BLOCK_SIZE, num_blocks=24) as served:

        async def one(number: int) -> None:
            kept, more = chance.randrange(25), chance.randrange(1, 12)
            prompt = [*SYSTEM[:kept], *prompt_of(more, number % 5)]
            count = chance.randrange(1, 12)
            task = asyncio.create_task(served.ask(prompt, max_tokens=count))
            if number % 2:
                await asyncio.sleep(chance.random() * 0.02)
                task.cancel()
            with suppress(asyncio.CancelledError):
                assert await task == expected(prompt, count)

        for start in range(0, 60, 12):
            await asyncio.gather(*(one(number) for number in range(start, start + 12)))
            await served.until_idle()
        assert sum(m.engine.load().prefix_hits for m in served.members.values())


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_death_while_prefixes_are_shared(name: str) -> None:
    async with deployment("2,2", hit_tokens=BLOCK_SIZE, step_s=0.002) as served:
        prompts = [[*SYSTEM, *prompt_of(5, salt)] for salt in range(8)]
        tasks = [asyncio.create_task(served.ask(prompt, max_tokens=20)) for prompt in prompts]
        await eventually(lambda: served[name].engine.load().running > 0)
        await served[name].kill()
        for prompt, task in zip(prompts, tasks, strict=True):
            assert await task == expected(prompt, 20)
        await served.until_idle()
