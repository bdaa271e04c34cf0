"""The openai package, synchronous and asynchronous, streamed and whole, at every endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from router.context import GatewayContext
from router.errors import GenerationFailed, Overloaded
from tests.router.fakes import ScriptedGenerator, batches

TEXT = "Hé 👍"
MESSAGES: Any = [
    {"role": "developer", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


@pytest.fixture(autouse=True)
def script(generator: ScriptedGenerator) -> None:
    generator.script = batches(TEXT, 3)


def synchronous(url: str, work: Callable[[openai.OpenAI], Any]) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return work(client)


async def in_thread(url: str, work: Callable[[openai.OpenAI], Any]) -> Any:
    return await asyncio.to_thread(synchronous, url, work)


async def test_completions(server_url: str) -> None:
    wanted: dict[str, Any] = {"model": "alias", "prompt": ["p", "q"], "n": 2, "echo": True}

    def work(client: openai.OpenAI) -> None:
        whole = client.completions.create(**wanted)
        assert [c.text for c in whole.choices] == [f"{p}{TEXT}" for p in "ppqq"]
        assert whole.usage is not None
        texts, usage = [""] * 4, None
        options = {"include_usage": True}
        for chunk in client.completions.create(**wanted, stream=True, stream_options=options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
        assert texts == [c.text for c in whole.choices]
        assert usage == whole.usage
        kept = client.completions.create(model="", prompt=[1, 2], best_of=3, logprobs=2)
        assert kept.choices[0].logprobs is not None

    await in_thread(server_url, work)


async def test_chat(server_url: str) -> None:
    wanted: dict[str, Any] = {"model": "hexllm", "messages": MESSAGES, "n": 2}

    def work(client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(
            **wanted, logprobs=True, top_logprobs=3, max_completion_tokens=10, seed=1
        )
        assert [c.message.content for c in whole.choices] == [TEXT, TEXT]
        with client.chat.completions.stream(**wanted) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert [c.message.content for c in final.choices] == [TEXT, TEXT]

    await in_thread(server_url, work)


async def test_responses(server_url: str) -> None:
    def work(client: openai.OpenAI) -> None:
        whole = client.responses.create(model="", input="hi", instructions="s")
        assert whole.output_text == TEXT
        assert whole.usage is not None
        again = client.responses.create(
            model="",
            input=[*whole.output, {"role": "user", "content": "?"}],  # type: ignore[list-item]
        )
        assert again.output_text == TEXT
        with client.responses.stream(model="", input="hi") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert final.output_text == TEXT

    await in_thread(server_url, work)


async def test_asynchronous(server_url: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server_url}/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == ["org/model", "alias"]
        whole, chat, response = await asyncio.gather(
            client.completions.create(model="", prompt="p"),
            client.chat.completions.create(model="", messages=MESSAGES),
            client.responses.create(model="", input="hi"),
        )
        assert whole.choices[0].text == chat.choices[0].message.content == response.output_text
        text = ""
        async for event in await client.responses.create(model="", input="hi", stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == TEXT
        text = ""
        async for chunk in await client.chat.completions.create(
            model="", messages=MESSAGES, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == TEXT


async def test_models(server_url: str) -> None:
    def work(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["org/model", "alias"]
        assert client.models.retrieve("org/model").owned_by == "hexserve"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-5")

    await in_thread(server_url, work)


async def test_errors_are_the_clients_own(
    server_url: str, generator: ScriptedGenerator, context: GatewayContext
) -> None:
    def work(client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="", input="hi", temperature=5)
        assert caught.value.param == "temperature"
        generator.script = [Overloaded("full")]
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="", prompt="p")
        generator.script = [[97], GenerationFailed("lost")]
        with pytest.raises(openai.APIError, match="lost"):
            list(client.responses.create(model="", input="hi", stream=True))
        generator.ready = False
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="", messages=MESSAGES)

    await in_thread(server_url, work)


async def test_a_retry_waits_as_it_is_told(server_url: str, generator: ScriptedGenerator) -> None:
    attempts: list[int] = []

    def script(prompt: list[int]) -> Any:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise Overloaded("full")
        yield [97, 256]

    generator.script = script

    def work() -> str:
        with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=1) as client:
            return client.completions.create(model="", prompt="p").choices[0].text

    assert await asyncio.to_thread(work) == "a"
    assert len(attempts) == 2
