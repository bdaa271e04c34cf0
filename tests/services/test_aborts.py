"""A client that leaves, at whatever moment: nothing of its request stays on any worker."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from kvtransfer.protocol import State
from tests.services.deployment import (
    EACH_TRANSPORT,
    TOPOLOGIES,
    Deployment,
    Member,
    collect,
    deployment,
    eventually,
    expected,
    prompt_of,
)

everywhere = pytest.mark.parametrize("topology", TOPOLOGIES)
PROMPT = prompt_of(21)


def of_role(served: Deployment, role: str) -> list[Member]:
    """Its workers of that role; the colocated one has every role."""
    return [m for name, m in served.members.items() if name.startswith((role, "worker"))]


def shut(served: Deployment, role: str, passes: int = 0) -> None:
    for member in of_role(served, role):
        member.runner.shut(passes)


def open_all(served: Deployment) -> None:
    for member in served.members.values():
        member.runner.open()


def computing(members: list[Member]) -> bool:
    return any(m.runner.held for m in members)


async def cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def check_whole(served: Deployment) -> None:
    """Idle, and still of use. Leaving the deployment recounts every engine's blocks."""
    open_all(served)
    await served.until_idle()
    assert await served.ask(PROMPT) == expected(PROMPT, 8)
    await served.until_idle()


@everywhere
async def test_before_the_first_token(topology: str) -> None:
    async with deployment(topology) as served:
        shut(served, "prefill")
        task = asyncio.create_task(served.ask(PROMPT))
        await eventually(lambda: computing(of_role(served, "prefill")))
        await cancelled(task)
        await check_whole(served)


@everywhere
async def test_in_the_same_moment_as_it_starts(topology: str) -> None:
    async with deployment(topology) as served:
        for _ in range(10):
            task = asyncio.create_task(served.ask(PROMPT))
            await asyncio.sleep(0)
            await cancelled(task)
        await check_whole(served)


@everywhere
@pytest.mark.parametrize("tokens", [1, 2, 5])
async def test_after_some_tokens(topology: str, tokens: int) -> None:
    async with deployment(topology, step_s=0.002) as served:
        stream = served.stream(PROMPT, max_tokens=40)
        taken = [(await anext(stream)).tokens for _ in range(tokens)]
        await stream.aclose()
        assert [t for piece in taken for t in piece][:tokens] == expected(PROMPT, tokens)
        await check_whole(served)


@everywhere
async def test_right_after_the_last_token(topology: str) -> None:
    """The consumer need not ask once more for the end to be known."""
    async with deployment(topology) as served:
        stream = served.stream(PROMPT, max_tokens=3)
        while (await anext(stream)).finish is None:
            pass
        assert not served.dispatcher._flights
        await stream.aclose()
        await check_whole(served)


@everywhere
async def test_queued_behind_others(topology: str) -> None:
    limits = {"max_seqs": 1, "max_prefill_seqs": 1}
    async with deployment(topology, **limits) as served:
        shut(served, "prefill")
        tasks = [asyncio.create_task(served.ask(prompt_of(9, salt=i))) for i in range(8)]
        workers = of_role(served, "prefill")
        await eventually(lambda: sum(m.host._sessions.attempts for m in workers) == 8)
        await eventually(lambda: computing(workers))
        for task in tasks[1::2]:
            await cancelled(task)
        await eventually(lambda: sum(m.host._sessions.attempts for m in workers) == 4)
        open_all(served)
        answers = await asyncio.gather(*tasks[::2])
        assert answers == [expected(prompt_of(9, salt=i), 8) for i in range(0, 8, 2)]
        await check_whole(served)


@pytest.mark.parametrize("transports", EACH_TRANSPORT)
async def test_the_reader_leaves_while_its_prefill_is_queued(transports: tuple[str]) -> None:
    """The decode worker's word reaches the prefill worker before the router's does."""
    limits = {"max_seqs": 1, "max_prefill_seqs": 1}
    async with deployment("1,1", transports=transports, **limits) as served:
        prefill, decode = served["prefill-0"], served["decode-0"]
        prefill.runner.shut()
        running = asyncio.create_task(served.ask(PROMPT))
        await eventually(lambda: computing([prefill]))
        queued = asyncio.create_task(served.ask(prompt_of(9)))
        sessions = prefill.source._sessions
        # The first one's prefill has been admitted, and its reader may have heard of it.
        read = (State.CLAIMED, State.ADMITTED, State.STREAMING)
        await eventually(lambda: sum(s.state in read for s in sessions) == 2)
        (attempt,) = [a for a in decode.host._decode._fetches if a.request_id == "request-1"]
        decode.host._decode.abort(attempt)
        await eventually(lambda: prefill.source.active() == 1)
        await cancelled(queued)
        prefill.runner.open()
        assert await running == expected(PROMPT, 8)
        await check_whole(served)


@pytest.mark.parametrize("transports", EACH_TRANSPORT)
async def test_while_decode_waits_for_room(transports: tuple[str]) -> None:
    """The prefill is done and exported; the pool of the decode worker is full."""
    async with deployment(
        "1,1", transports=transports, only={"decode-0": {"max_seqs": 1}}
    ) as served:
        decode = served["decode-0"]
        decode.runner.shut()
        running = asyncio.create_task(served.ask(PROMPT))
        await eventually(lambda: computing([decode]))
        stream = served.stream(prompt_of(9))
        await anext(stream)
        await eventually(lambda: served["prefill-0"].engine.load().exported_blocks > 0)
        await stream.aclose()
        await eventually(lambda: served["prefill-0"].idle)
        decode.runner.open()
        assert await running == expected(PROMPT, 8)
        await check_whole(served)


@pytest.mark.parametrize("transports", EACH_TRANSPORT)
@pytest.mark.parametrize("seed", range(4))
async def test_at_random_moments_of_the_transfer(transports: tuple[str], seed: int) -> None:
    """Long prompts, small chunks, and pools that hold two of them."""
    rng = random.Random(seed)
    prompt = prompt_of(54)
    async with deployment("1,1", transports=transports, num_blocks=32) as served:
        for _ in range(12):
            task = asyncio.create_task(served.ask(prompt))
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            await cancelled(task)
        await check_whole(served)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("passes", range(7))
async def test_at_every_step_boundary(role: str, passes: int) -> None:
    """A client's timeout may land just as the prefill ends: three steps, here, of 16 tokens."""
    async with deployment("1,1", max_batch_tokens=16) as served:
        shut(served, role, passes)
        tokens: list[int] = []
        stream = served.stream(prompt_of(40), max_tokens=12)
        task = asyncio.create_task(collect(stream, tokens))
        (member,) = of_role(served, role)
        await eventually(lambda: member.runner.held or (role == "prefill" and task.done()))
        await cancelled(task)
        assert tokens == expected(prompt_of(40), 12)[: len(tokens)]
        open_all(served)
        await eventually(lambda: member.idle, 1.0)
        await check_whole(served)


async def storm(served: Deployment, rng: random.Random, number: int) -> bool:
    """One request that may be given up anywhere; True when it was served to the end."""
    prompt = prompt_of(rng.randrange(1, 24), salt=number)
    count = rng.randrange(1, 10)
    leave_after = rng.choice([None, None, 0, 1, 2, 5])
    stream = served.stream(prompt, max_tokens=count)
    tokens: list[int] = []
    patience = rng.choice([0.0005, 0.003, 0.02]) if leave_after == 0 else None
    try:
        async with asyncio.timeout(patience):
            async for delta in stream:
                assert delta.index == len(tokens)
                tokens += delta.tokens
                if leave_after is not None and len(tokens) >= leave_after:
                    break
    except TimeoutError:
        pass
    finally:
        await stream.aclose()
    assert tokens == expected(prompt, count)[: len(tokens)]
    if leave_after is None:
        assert len(tokens) == count
    return len(tokens) == count


@pytest.mark.timeout(60)
@pytest.mark.parametrize("topology", ["2,1", "colocated"])
async def test_a_thousand_requests_with_random_aborts(topology: str) -> None:
    rng = random.Random(42)
    places = asyncio.Semaphore(24)

    async with deployment(topology, num_blocks=40, max_waiting=1000) as served:

        async def one(number: int) -> bool:
            async with places:
                return await storm(served, rng, number)

        async with asyncio.timeout(30):
            whole = await asyncio.gather(*(one(number) for number in range(1000)))
        assert 300 < sum(whole) < 950, "some, and not all, must have been given up"
        await check_whole(served)
