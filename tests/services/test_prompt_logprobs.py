"""A prompt's log-probabilities from whole deployments, also where workers die."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import TokenDelta
from tests.services.deployment import (
    TOPOLOGIES,
    Deployment,
    deployment,
    eventually,
    expected,
    prompt_of,
)


async def scored(served: Deployment, prompt: tuple[int, ...], **sampling: object) -> None:
    """Ask, and check all of the answer against the fake model's."""
    deltas: list[TokenDelta] = []
    async for delta in served.stream(prompt, **{"prompt_logprobs": 1, **sampling}):
        deltas.append(delta)
    check(prompt, deltas)


def check(prompt: tuple[int, ...], deltas: list[TokenDelta]) -> None:
    tokens = [token for delta in deltas for token in delta.tokens]
    assert tokens == expected(prompt, len(tokens))
    told = deltas[0].prompt_logprobs
    assert told is not None
    assert told.logprobs.tolist() == [-p for p in range(1, len(prompt))]
    likeliest = [expected(prompt[:n], 1)[0] for n in range(1, len(prompt))]
    assert told.top_ids.ravel().tolist() == likeliest
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("most", [11, 68])
async def test_every_placement_tells_the_same(topology: str, most: int) -> None:
    """Of prompts that are computed whole and in chunks, and where the first token is the last."""
    async with deployment(topology, max_batch_tokens=most) as served:
        await asyncio.gather(*(scored(served, prompt_of(1 + 7 * n, n)) for n in range(8)))
        await scored(served, prompt_of(30), max_tokens=1)
        await served.until_idle()


async def test_a_prefill_worker_that_dies_half_way_costs_nothing() -> None:
    """What it told is dropped, and told again by another."""
    async with deployment("2,1", max_batch_tokens=8) as served:
        members = [m for name, m in served.members.items() if name.startswith("prefill")]
        for member in members:
            member.runner.shut(2)
        asking = asyncio.create_task(scored(served, prompt_of(40)))
        await eventually(lambda: any(m.runner.held for m in members))
        (victim,) = [m for m in members if m.runner.held]
        (flight,) = served.dispatcher._flights.values()
        await eventually(lambda: flight._scores is not None and len(flight._scores._pieces) > 0)
        await victim.kill()
        for member in members:
            member.runner.open()
        await asyncio.wait_for(asking, 10)


async def test_they_are_told_once_where_a_decode_worker_dies() -> None:
    async with deployment("1,2") as served:
        decoding = [m for name, m in served.members.items() if name.startswith("decode")]
        for member in decoding:
            member.runner.shut(3)
        prompt, deltas = prompt_of(21), list[TokenDelta]()

        async def ask() -> None:
            async for delta in served.stream(prompt, prompt_logprobs=1, max_tokens=20):
                deltas.append(delta)

        asking = asyncio.create_task(ask())
        await eventually(lambda: any(m.runner.held for m in decoding))
        (victim,) = [m for m in decoding if m.runner.held]
        await eventually(lambda: len(deltas) > 1)
        await victim.kill()
        for member in decoding:
            member.runner.open()
        await asyncio.wait_for(asking, 10)
        check(prompt, deltas)
        assert sum(len(delta.tokens) for delta in deltas) == 20
