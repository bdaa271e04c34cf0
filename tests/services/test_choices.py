"""The choices of one prompt: it is computed once and fetched once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import pytest

from engine.types import TokenDelta
from tests.services.deployment import (
    BLOCK_SIZE,
    Deployment,
    collect,
    deployment,
    eventually,
    expected,
    prompt_of,
)

COUNT = 4
everywhere = pytest.mark.parametrize("topology", ["colocated", "1,1", "2,2"])
cached = pytest.mark.parametrize("hit_tokens", [None, 2 * BLOCK_SIZE])


async def answers(
    served: Deployment, prompt: Sequence[int], count: int = COUNT, **sampling: object
) -> list[list[int]]:
    streams = served.choices(prompt, count, **sampling)
    return [tokens for tokens, _ in await asyncio.gather(*map(collect, streams))]


def computed(served: Deployment, prompt: Sequence[int]) -> list[int]:
    """Tokens of the prompt that each worker has computed, of those that have any."""
    counts = (member.runner.computed(len(prompt)) for member in served.members.values())
    return [count for count in counts if count]


def imported(served: Deployment) -> list[int]:
    """Tokens that each worker has fetched, of those that have any."""
    return [m.runner.imported for m in served.members.values() if m.runner.imported]


def tail(prompt: Sequence[int]) -> int:
    """What each choice computes for itself: its last token at least, whose logits it needs."""
    return (len(prompt) - 1) % BLOCK_SIZE + 1


@everywhere
@cached
@pytest.mark.parametrize("length", [17, 20, 21, 3])
async def test_a_prompt_is_computed_once(
    topology: str, hit_tokens: int | None, length: int
) -> None:
    prompt = prompt_of(length)
    async with deployment(topology, hit_tokens=hit_tokens) as served:
        assert await answers(served, prompt) == [expected(prompt, 8)] * COUNT
        once = length + (COUNT - 1) * tail(prompt)
        assert computed(served, prompt) == [once]
        if topology != "colocated":
            partial = length % BLOCK_SIZE  # a whole last block is shared here
            assert imported(served) == [length + (COUNT - 1) * partial]
        await served.until_idle()


@everywhere
async def test_what_siblings_share_does_not_count_as_cached(topology: str) -> None:
    """A request's count is that of the choice that had most to compute."""
    prompt = prompt_of(21)
    async with deployment(topology, hit_tokens=BLOCK_SIZE) as served:

        async def first(stream: AsyncGenerator[TokenDelta, None]) -> int:
            async with aclosing(stream):
                return (await anext(stream)).cached_tokens

        for wanted in (0, 20):
            counts = await asyncio.gather(*map(first, served.choices(prompt, COUNT)))
            assert (counts[0], min(counts)) == (wanted, wanted)
            await served.until_idle()


@everywhere
async def test_two_prompts_of_one_request(topology: str) -> None:
    prompts = [prompt_of(21, salt) for salt in range(2)]
    async with deployment(topology) as served:
        both = await asyncio.gather(*(answers(served, prompt, 2) for prompt in prompts))
        assert both == [[expected(prompt, 8)] * 2 for prompt in prompts]
        assert sum(computed(served, prompts[0])) == 2 * (21 + tail(prompts[0]))
        await served.until_idle()


@everywhere
async def test_more_choices_than_slots_wait(topology: str) -> None:
    """Where there are two workers to decode they are spread, and each has the prompt once."""
    prompt, count = prompt_of(21), 6
    async with deployment(topology, max_seqs=3) as served:
        assert await answers(served, prompt, count) == [expected(prompt, 8)] * count
        spread = len([name for name in served.members if name != "worker-0"]) // 2 or 1
        assert computed(served, prompt) == [21 + (count - 1) * tail(prompt)]
        if topology != "colocated":
            fetched = 21 * spread + (count - spread) * 1
            assert sum(imported(served)) == fetched
            assert len(imported(served)) == spread
        await served.until_idle()


@everywhere
@cached
async def test_choices_that_share_too_few_blocks(topology: str, hit_tokens: int | None) -> None:
    prompt = prompt_of(21)
    async with deployment(topology, hit_tokens=hit_tokens, num_blocks=18, step_s=0.0005) as served:
        decoding = [m for name, m in served.members.items() if "prefill" not in name]
        for member in decoding:
            member.runner.shut()
        asking = asyncio.create_task(answers(served, prompt, max_tokens=40))
        await eventually(lambda: sum(m.host._sessions.attempts for m in decoding) == COUNT)
        for member in decoding:
            member.runner.open()
        assert await asking == [expected(prompt, 40)] * COUNT
        assert served.pool.preemptions > 0
        await served.until_idle()


@everywhere
async def test_one_that_is_left_alone_does_not_end_the_others(topology: str) -> None:
    prompt = prompt_of(21)
    async with deployment(topology) as served:
        first = served["worker-0" if topology == "colocated" else "prefill-0"]
        if topology == "2,2":
            await served["prefill-1"].kill()
        first.runner.shut()
        tasks = [asyncio.create_task(collect(s)) for s in served.choices(prompt, COUNT)]
        await eventually(lambda: first.runner.held)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        await eventually(lambda: first.host._sessions.attempts == COUNT - 1)
        first.runner.open()
        assert [(await task)[0] for task in tasks[1:]] == [expected(prompt, 8)] * (COUNT - 1)
        await served.until_idle()


@cached
@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_worker_is_killed_midway(name: str, hit_tokens: int | None) -> None:
    """All choices go on together: what they share is computed and fetched once more, not four
    times."""
    prompt = prompt_of(21)
    async with deployment("2,2", hit_tokens=hit_tokens) as served:
        gated = [served[f"{name}-{number}"] for number in range(2)]
        for member in gated:
            member.runner.shut(passes=0 if name == "prefill" else 2)
        tasks = [asyncio.create_task(collect(s)) for s in served.choices(prompt, COUNT)]
        await eventually(lambda: any(member.runner.held for member in gated))
        (victim,) = [member for member in gated if member.runner.held]
        survivor = next(member for member in gated if member is not victim)
        survivor.runner.open()
        await victim.kill()
        assert [(await task)[0] for task in tasks] == [expected(prompt, 8)] * COUNT
        if name == "prefill":
            assert survivor.runner.computed(21) == 21 + (COUNT - 1) * tail(prompt)
        else:
            assert survivor.runner.imported <= 21 + COUNT * (BLOCK_SIZE + 8)
            first = max(served[f"prefill-{number}"].runner.computed(20) for number in range(2))
            assert first == 20
        await served.until_idle()


@everywhere
@cached
async def test_a_storm_of_aborted_choices(topology: str, hit_tokens: int | None) -> None:
    """With few blocks and slots, so that choices are spread, preempted and evicted."""
    chance = random.Random(6)
    async with deployment(topology, hit_tokens=hit_tokens, num_blocks=24, max_seqs=3) as served:

        async def one(stream: AsyncGenerator[TokenDelta, None], wanted: list[int]) -> None:
            task = asyncio.create_task(collect(stream))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.02)
                task.cancel()
            with suppress(asyncio.CancelledError):
                tokens, _ = await task
                assert tokens == wanted

        for _ in range(5):
            asked = []
            for salt in range(4):
                prompt, most = prompt_of(chance.randrange(1, 30), salt), chance.randrange(1, 20)
                wanted = expected(prompt, most)
                streams = served.choices(prompt, chance.randrange(2, 6), max_tokens=most)
                asked += [one(stream, wanted) for stream in streams]
            await asyncio.gather(*asked)
            await served.until_idle()
