"""Two routers side by side on the same workers: neither knows of the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from router.dispatch import Dispatcher
from router.errors import ServingError
from router.workers import WorkerPool
from tests.services.deployment import (
    TOPOLOGIES,
    Deployment,
    collect,
    deployment,
    eventually,
    expected,
    prompt_of,
)

COUNT = 30
PROMPTS = [prompt_of(5 + 4 * n, n) for n in range(4)]


@contextlib.asynccontextmanager
async def beside(served: Deployment) -> AsyncIterator[Deployment]:
    """A deployment with the same workers and a router of its own."""
    pool = WorkerPool([session.address for session in served.pool._sessions])
    other = Deployment(served.members, pool, Dispatcher(pool, 2), served._start)
    other._ids = itertools.count(1000)  # names are random in earnest
    pool.open()
    try:
        async with asyncio.timeout(5):
            await pool.wait_until_all_open()
        yield other
    finally:
        await pool.close()


def stream_all(served: Deployment) -> tuple[list[list[int]], list[asyncio.Task[object]]]:
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    streams = [served.stream(prompt, max_tokens=COUNT) for prompt in PROMPTS]
    pairs = zip(streams, tokens, strict=True)
    return tokens, [asyncio.create_task(collect(stream, into)) for stream, into in pairs]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_both_serve_at_once(topology: str) -> None:
    async with deployment(topology, num_blocks=160, max_seqs=8) as served, beside(served) as other:
        mine, my_tasks = stream_all(served)
        theirs, their_tasks = stream_all(other)
        await asyncio.wait_for(asyncio.gather(*my_tasks, *their_tasks), 10)
        answers = [expected(prompt, COUNT) for prompt in PROMPTS]
        assert mine == theirs == answers
        await served.until_idle()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("begun", [True, False])
async def test_what_one_that_dies_had_is_freed_and_the_others_go_on(
    topology: str, begun: bool
) -> None:
    """While both decode, or while the prompts of both are computed and wait."""
    async with deployment(topology, step_s=0.002, num_blocks=160, max_seqs=8) as served:
        gates = [m.runner for name, m in served.members.items() if not name.startswith("decode")]
        async with beside(served) as other:
            if not begun:
                for gate in gates:
                    gate.shut(passes=1)
            mine, my_tasks = stream_all(served)
            _, their_tasks = stream_all(other)
            if begun:
                await eventually(lambda: all(mine))
            else:
                await eventually(lambda: any(gate.held for gate in gates))
            await other.pool.close()
            for gate in gates:
                gate.open()
            ends = await asyncio.wait_for(asyncio.gather(*their_tasks, return_exceptions=True), 5)
            assert all(isinstance(end, ServingError) for end in ends)
            await asyncio.wait_for(asyncio.gather(*my_tasks), 10)
            assert mine == [expected(prompt, COUNT) for prompt in PROMPTS]
            await served.until_idle()
