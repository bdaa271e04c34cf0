"""Greedy texts of the demo model equal those of transformers, token for token.

The default run takes a few prompts on two placements. All of them on every placement:

    python -m pytest -m full tests/model
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.model.chat_logprobs import check_chats
from tests.model.conftest import PLACEMENTS

FEW = (0, 1, 4, 7, 11, 13, 15)
Server = tuple[str, str]


async def complete(client: httpx.AsyncClient, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def check_prompt(url: str, case: dict[str, Any]) -> None:
    """The golden output, sent as the end of a prompt, is as likely there."""
    count = len(case["output"])
    prompt = [*case["prompt"], *case["output"]]
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        asked = {"max_tokens": 1, "echo": True, "logprobs": 5}
        logprobs = (await complete(client, prompt, **asked))["logprobs"]
    told = {name: values[:-1] for name, values in logprobs.items()}  # without the new token
    assert told["token_logprobs"][0] is None
    assert len(told["token_logprobs"]) == len(prompt)
    assert told["token_logprobs"][-count:] == pytest.approx(case["logprobs"], abs=1e-3)
    for best, top in zip(told["top_logprobs"][-count:], case["top"], strict=True):
        assert sorted(best.values(), reverse=True) == pytest.approx([p for _, p in top], abs=1e-3)
        # What lm-eval asks of a greedy token: it is the largest, to the bit.
    greedy = zip(told["token_logprobs"][-count:], told["top_logprobs"][-count:], strict=True)
    assert all(own == max(best.values()) for own, best in greedy)


def check(case: dict[str, Any], choice: dict[str, Any]) -> None:
    assert choice["token_ids"] == case["output"], f"a prompt of {len(case['prompt'])} tokens"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(case["logprobs"], abs=1e-3)
    for best, top in zip(logprobs["top_logprobs"], case["top"], strict=True):
        assert list(best.values()) == sorted(best.values(), reverse=True)
        assert list(best.values()) == pytest.approx([p for _, p in top], abs=1e-3)


async def run(url: str, cases: Sequence[dict[str, Any]], at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:

        async def one(case: dict[str, Any]) -> None:
            async with gate:
                wanted = len(case["output"])
                check(case, await complete(client, case["prompt"], max_tokens=wanted, logprobs=5))

        await asyncio.gather(*(one(case) for case in cases))


@pytest.mark.model
@pytest.mark.parametrize("server", ["colocated", "1,1 on 2 devices each"], indirect=True)
class TestFew:
    async def test_golden_alone_and_together(self, server: Server, golden: dict[str, Any]) -> None:
        cases = [golden["cases"][i] for i in FEW]
        await run(server[1], cases[:3], at_once=1)
        await run(server[1], cases, at_once=16)

    async def test_log_probabilities_of_prompts(
        self, server: Server, golden: dict[str, Any]
    ) -> None:
        for i in FEW[:4]:
            await check_prompt(server[1], golden["cases"][i])

    async def test_same_seed_same_text(self, server: Server) -> None:
        await check_sampled(*server)

    async def test_streamed_text_is_the_whole_text(self, server: Server) -> None:
        await check_streamed(server[1])

    async def test_chat_prompt_is_that_of_transformers(
        self, server: Server, golden: dict[str, Any]
    ) -> None:
        chat = golden["chat"]
        async with httpx.AsyncClient(base_url=server[1], timeout=280, trust_env=False) as client:
            body = {"messages": chat["messages"], "max_tokens": 4, "return_token_ids": True}
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["prompt_token_ids"] == chat["ids"]

    async def test_log_probabilities_of_chats(self, server: Server) -> None:
        await check_chats(server[1])

    async def test_edges_of_the_context(self, server: Server) -> None:
        await check_edges(server[1])

    async def test_nothing_was_compiled_after_ready(self, server: Server) -> None:
        await check_compiles(server[1])


@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("server", list(PLACEMENTS), indirect=True)
class TestAll:
    async def test_golden_alone(self, server: Server, golden: dict[str, Any]) -> None:
        await run(server[1], golden["cases"], at_once=1)

    async def test_golden_together(self, server: Server, golden: dict[str, Any]) -> None:
        await run(server[1], golden["cases"], at_once=16)

    async def test_same_seed_same_text(self, server: Server) -> None:
        await check_sampled(*server)

    async def test_streamed_text_is_the_whole_text(self, server: Server) -> None:
        await check_streamed(server[1])

    async def test_log_probabilities_of_chats(self, server: Server) -> None:
        await check_chats(server[1])

    async def test_edges_of_the_context(self, server: Server) -> None:
        await check_edges(server[1])

    async def test_nothing_was_compiled_after_ready(self, server: Server) -> None:
        await check_compiles(server[1])


SAMPLED: dict[str, list[list[int]]] = {}
"""What each placement has sampled."""


async def check_sampled(placement: str, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        choices = await asyncio.gather(
            *(
                complete(
                    client, f"Once upon a time, {i}", max_tokens=24, temperature=1.0,
                    seed=2**40 + i, top_p=0.95, top_k=i, presence_penalty=0.5 * i,
                    repetition_penalty=1 + 0.1 * i,
                )
                for i in range(5)
            )
        )  # fmt: skip
    SAMPLED[placement] = [choice["token_ids"] for choice in choices]
    assert len({tuple(tokens) for tokens in SAMPLED[placement]}) == 5
    for other, tokens in SAMPLED.items():
        assert SAMPLED[placement] == tokens, f"{placement} and {other} differ"


async def check_streamed(url: str) -> None:
    prompts = ("Repeat: 👩‍👩‍👧‍👦 🇫🇷 日本語 é́ →", "한국어 🙂🙃")
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        for prompt in prompts:
            options: dict[str, Any] = {"max_tokens": 48, "temperature": 1.5, "seed": 3}
            whole = await complete(client, prompt, **options)
            body = {"prompt": prompt, "stream": True, "ignore_eos": True} | options
            pieces = []
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = httpx.Response(200, content=line[6:]).json()
                        pieces.append(event["choices"][0]["text"])
            assert len(pieces) > 4
            assert "".join(pieces) == whole["text"]


async def check_compiles(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        workers = (await client.get("/health")).json()["workers"]
    assert {worker["compiles_after_ready"] for worker in workers} == {0}


async def check_edges(url: str) -> None:
    """A prompt that leaves room for one token, and one that leaves none."""
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        choice = await complete(client, [504] * 2047, max_tokens=1)
        assert len(choice["token_ids"]) == 1
        assert choice["finish_reason"] == "length"
        answer = await client.post("/v1/completions", json={"prompt": [504] * 2048})
        assert answer.status_code == 400
        assert "2048" in answer.json()["error"]["message"]
