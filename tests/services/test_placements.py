"""Every placement gives the fake model's answers, worked out by hand."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.types import AttemptId, FinishReason, SamplingParams, SequenceId
from router.errors import BadRequest, Overloaded, Unavailable
from router.generation import NOT_URGENT
from router.placement import place
from tests.services.deployment import (
    CHUNK_TOKENS,
    EACH_TRANSPORT,
    MAX_MODEL_LEN,
    TOPOLOGIES,
    collect,
    deployment,
    eventually,
    expected,
    prompt_of,
)

everywhere = pytest.mark.parametrize("topology", TOPOLOGIES)


@everywhere
async def test_alone_and_sixteen_at_once(topology: str) -> None:
    prompts = [prompt_of(1 + 3 * i, salt=i) for i in range(16)]
    async with deployment(topology) as served:
        for prompt in prompts:
            assert await served.ask(prompt) == expected(prompt, 8)
        answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
        assert answers == [expected(prompt, 8) for prompt in prompts]
        await served.until_idle()


@everywhere
async def test_any_choice_is_served(topology: str) -> None:
    sampling = SamplingParams(max_tokens=8)
    async with deployment(topology) as served:
        streams = [
            served.dispatcher.generate(prompt_of(9), sampling, request_id=f"r{n}", choice=n)
            for n in (0, 1, 127)
        ]
        for tokens, _ in await asyncio.gather(*map(collect, streams)):
            assert tokens == expected(prompt_of(9), 8)
        await served.until_idle()


@pytest.mark.parametrize("topology", ["1,1", "2,1", "1,2"])
@pytest.mark.parametrize("transports", EACH_TRANSPORT)
async def test_kv_by_one_transport_alone(topology: str, transports: tuple[str]) -> None:
    prompts = [prompt_of(1 + 3 * i, salt=i) for i in range(16)]
    async with deployment(topology, transports=transports) as served:
        answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
        assert answers == [expected(prompt, 8) for prompt in prompts]
        await served.until_idle()


@everywhere
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_few_tokens(topology: str, max_tokens: int) -> None:
    prompt = prompt_of(9)
    async with deployment(topology) as served:
        tokens, finish = await collect(served.stream(prompt, max_tokens=max_tokens))
        assert (tokens, finish) == (expected(prompt, max_tokens), FinishReason.LENGTH)
        await served.until_idle()


@everywhere
@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_stop_token_ends_the_stream(topology: str, position: int) -> None:
    prompt = prompt_of(9)
    answer = expected(prompt, position + 1)
    assert answer.index(answer[-1]) == position, "the stop token must not come earlier"
    async with deployment(topology) as served:
        stops = frozenset({answer[-1]})
        for _ in range(5):
            tokens, finish = await collect(served.stream(prompt, stop_token_ids=stops))
            assert (tokens, finish) == (answer, FinishReason.STOP)
        await served.until_idle()


@everywhere
async def test_a_prompt_that_leaves_room_for_one_token(topology: str) -> None:
    prompt = prompt_of(MAX_MODEL_LEN - 1)
    async with deployment(topology) as served:
        tokens, finish = await collect(served.stream(prompt))
        assert (tokens, finish) == (expected(prompt, 1), FinishReason.LENGTH)
        await served.until_idle()


@everywhere
async def test_a_prompt_without_room_is_refused_with_both_numbers(topology: str) -> None:
    async with deployment(topology) as served:
        with pytest.raises(BadRequest, match=rf"{MAX_MODEL_LEN} tokens .* {MAX_MODEL_LEN}"):
            await served.ask(prompt_of(MAX_MODEL_LEN))
        assert await served.ask(prompt_of(5)) == expected(prompt_of(5), 8)
        await served.until_idle()


@pytest.mark.parametrize("transports", EACH_TRANSPORT)
@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_a_prompt_of_several_chunks(transports: tuple[str], over: int) -> None:
    prompt = prompt_of(6 * CHUNK_TOKENS + over)
    async with deployment("1,1", transports=transports) as served:
        assert await served.ask(prompt) == expected(prompt, 8)


@everywhere
async def test_earlier_output_is_gone_on_from(topology: str) -> None:
    prompt = prompt_of(9)
    whole = expected(prompt, 8)
    async with deployment(topology) as served:
        for count in range(1, 8):
            known = (*prompt, *whole[:count])
            pool, only_first = served.pool, count == 7
            flight = served.dispatcher._take_off(
                place(
                    pool.fleet, pool.prefixes, known, (), random.Random(1), only_first=only_first
                ),
                SequenceId(AttemptId(f"resumed-{count}", 3), 0),
                prompt,
                tuple(whole[:count]),
                SamplingParams(max_tokens=8),
                NOT_URGENT,
            )
            rest: list[int] = []
            finish = None
            while finish is None:
                delta = await flight.next()
                assert delta.index == count + len(rest)
                rest += delta.tokens
                finish = delta.finish
            assert rest == whole[count:]


@everywhere
async def test_two_requests_with_the_same_text(topology: str) -> None:
    prompt = prompt_of(21)
    async with deployment(topology) as served:
        answers = await asyncio.gather(*(served.ask(prompt) for _ in range(2)))
        assert answers == [expected(prompt, 8)] * 2
        await served.until_idle()


@everywhere
async def test_what_can_never_fit_is_refused(topology: str) -> None:
    async with deployment(topology, num_blocks=6) as served:  # 24 tokens
        with pytest.raises(BadRequest, match="KV blocks"):
            await served.ask(prompt_of(20), max_tokens=20)
        prompt = prompt_of(10)
        assert await served.ask(prompt) == expected(prompt, 8)
        await served.until_idle()


async def test_what_the_wire_cannot_carry_costs_only_itself() -> None:
    """A value that turns to 0 as a 32-bit float is the client's fault, not the session's."""
    prompt = prompt_of(9)
    async with deployment("1,1") as served:
        served["decode-0"].runner.shut()
        other = asyncio.create_task(served.ask(prompt))
        with pytest.raises(BadRequest, match="top_p"):
            await served.ask(prompt, top_p=1e-50)
        with pytest.raises((OverflowError, ValueError)):
            await served.ask((2**40,))
        served["decode-0"].runner.open()
        assert await other == expected(prompt, 8)
        await served.until_idle()


@pytest.mark.parametrize("topology", ["1,1", "colocated"])
async def test_a_full_queue_is_overload(topology: str) -> None:
    name = "worker-0" if topology == "colocated" else "prefill-0"
    limits = {"max_waiting": 1, "max_seqs": 1, "max_prefill_seqs": 1}
    async with deployment(topology, only={name: limits}) as served:
        first = served[name]
        first.runner.shut()
        running = asyncio.create_task(served.ask(prompt_of(5)))
        await eventually(lambda: first.runner.held)
        # A prefill that ends with this step leaves its room to one more.
        prompts = [prompt_of(6)] if topology == "colocated" else [prompt_of(6), prompt_of(8)]
        waiting = [asyncio.create_task(served.ask(prompt)) for prompt in prompts]
        await eventually(lambda: first.host._sessions.attempts == 1 + len(prompts))
        refused = asyncio.create_task(served.ask(prompt_of(7)))
        await eventually(lambda: first.host._sessions.attempts == 2 + len(prompts))
        first.runner.open()
        with pytest.raises(Overloaded):
            await refused
        assert await running == expected(prompt_of(5), 8)
        assert await asyncio.gather(*waiting) == [expected(prompt, 8) for prompt in prompts]
        await served.until_idle()


async def test_a_rejected_request_is_served_by_the_other_worker() -> None:
    prompts = [prompt_of(5, salt=i) for i in range(2)]
    async with deployment("2,1", only={"prefill-0": {"max_waiting": 0}}) as served:
        for _ in range(6):
            answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
            assert answers == [expected(prompt, 8) for prompt in prompts]
        await served.until_idle()


async def test_a_draining_worker_gets_no_new_work_and_ends_the_old() -> None:
    prompt = prompt_of(9)
    async with deployment("1,1") as served:
        served["decode-0"].runner.shut()
        running = asyncio.create_task(served.ask(prompt))
        await eventually(lambda: served["decode-0"].runner.held)
        served["prefill-0"].host._sessions.drain()
        served["decode-0"].host._sessions.drain()
        with pytest.raises((Unavailable, Overloaded)):
            await served.ask(prompt)
        await eventually(lambda: not served.pool.complete)
        with pytest.raises(Unavailable, match=r"no (prefill |decode |)worker is ready"):
            await served.ask(prompt)
        served["decode-0"].runner.open()
        assert await running == expected(prompt, 8)
        await served.until_idle()


@pytest.mark.parametrize("topology", ["1,0", "0,1"])
async def test_a_role_without_workers_is_unavailable(topology: str) -> None:
    async with deployment(topology) as served:
        missing = "decode" if topology == "1,0" else "prefill"
        assert not served.dispatcher.ready
        with pytest.raises(Unavailable, match=missing):
            await served.ask(prompt_of(5))
