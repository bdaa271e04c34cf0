"""What needs a real connection: the official client, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from router.context import GatewayContext
from router.errors import GenerationFailed
from tests.router.fakes import Pause, ScriptedGenerator, batches


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for is no event
            await asyncio.sleep(0.005)


@pytest.fixture
async def client(server_url: str) -> Any:
    async with openai.AsyncOpenAI(
        base_url=f"{server_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_the_official_client_reads_everything(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hé 👍", 3)
    models = await client.models.list()
    assert [model.id for model in models.data] == ["org/model", "alias"]
    assert (await client.models.retrieve("alias")).id == "alias"

    completion = await client.completions.create(model="alias", prompt="p", logprobs=1)
    assert completion.choices[0].text == "Hé 👍"
    assert completion.choices[0].logprobs is not None
    assert completion.usage is not None

    messages: Any = [{"role": "user", "content": "hi"}]
    chat = await client.chat.completions.create(
        model="", messages=messages, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].message.content == "Hé 👍"
    assert chat.choices[0].finish_reason == "stop"
    # An answer can be sent back whole.
    messages += [chat.choices[0].message.model_dump(), {"role": "user", "content": "?"}]
    generator.script = batches("x")
    await client.chat.completions.create(model="hexllm", messages=messages[1:])

    generator.script = batches("Hé 👍", 3)
    text, usage = "", None
    async for chunk in await client.chat.completions.create(
        model="hexllm",
        messages=messages[:1],
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Hé 👍"
    assert usage == chat.usage

    text = ""
    async for part in await client.completions.create(model="alias", prompt="p", stream=True):
        text += part.choices[0].text
        assert part.usage is None
    assert text == "Hé 👍"


async def test_the_official_client_raises_our_errors(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        await client.completions.create(model="", prompt="p", temperature=5)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        await client.completions.create(model="gpt-5", prompt="p")
    generator.script = [[97], GenerationFailed("lost")]
    stream = await client.completions.create(model="", prompt="p", stream=True)
    with pytest.raises(openai.APIError, match="lost"):
        async for _ in stream:
            pass


BODIES = [
    ("/v1/completions", {"prompt": "p", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}], "stream": True}),
    ("/v1/completions", {"prompt": "p"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
    ("/generate", {"instances": [{"prompt": "p"}, {"prompt": "q"}]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
async def test_a_client_that_leaves_is_an_abort(
    server_url: str,
    context: GatewayContext,
    generator: ScriptedGenerator,
    path: str,
    body: dict[str, Any],
    running: bool,
) -> None:
    generator.script = [[97], [98], Pause()] if running else [Pause()]
    host, port = server_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    expected = len(body.get("instances", "1"))
    await until(lambda: len(generator.calls) == expected)
    if running and body.get("stream"):
        await reader.readuntil(b'"b"')
    await asyncio.sleep(0.02)
    assert not any(call.closed.is_set() for call in generator.calls)
    writer.close()
    await writer.wait_closed()
    await until(lambda: all(call.closed.is_set() for call in generator.calls))
    assert not any(call.finished for call in generator.calls)
    aborted = b'finished_reason="abort",model_name="org/model"} %.1f' % expected
    await until(lambda: aborted in context.metrics.render())


async def test_a_client_that_leaves_a_pipelined_request_is_an_abort(
    server_url: str, generator: ScriptedGenerator
) -> None:
    generator.script = [[97], [98], Pause()]
    host, port = server_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"prompt": "p", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b'"b"')
    writer.close()
    await writer.wait_closed()
    await until(lambda: generator.calls[0].closed.is_set())
    assert not generator.calls[0].finished


async def test_leaving_does_not_disturb_the_next_request(
    server_url: str, generator: ScriptedGenerator
) -> None:
    async with httpx.AsyncClient(base_url=server_url) as client:
        generator.script = [[97], Pause()]
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"prompt": "p"}, timeout=0.2)
        generator.script = batches("x")
        for _ in range(3):  # on a connection that is kept
            response = await client.post("/v1/completions", json={"prompt": "p"})
            assert response.json()["choices"][0]["text"] == "x"


async def test_pieces_are_sent_as_they_come(server_url: str, generator: ScriptedGenerator) -> None:
    pauses = [Pause(), Pause()]
    generator.script = [[97], pauses[0], [98], pauses[1], [256]]
    async with (
        httpx.AsyncClient(base_url=server_url) as client,
        client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        for text, pause in zip("ab", pauses, strict=True):
            line = await asyncio.wait_for(anext(lines), 5)
            assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == text
            assert await anext(lines) == ""
            pause.event.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_large_body_is_refused_on_a_connection(
    server_url: str, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    async with httpx.AsyncClient(base_url=server_url, timeout=30) as client:
        for _ in range(3):
            body = b'{"prompt": "' + b"x" * 30_000_000 + b'"}'
            response = await client.post("/v1/completions", content=body)
            assert response.status_code == 413
            response = await client.post("/v1/completions", json={"prompt": "p"})
            assert response.status_code == 200


async def test_a_fault_of_ours_is_an_openai_error(
    server_url: str, generator: ScriptedGenerator
) -> None:
    generator.script = [RuntimeError("secret")]
    async with httpx.AsyncClient(base_url=server_url) as client:
        response = await client.post("/v1/completions", json={"prompt": "p"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"


async def test_a_long_prompt_is_tokenized_beside_the_event_loop(
    server_url: str, generator: ScriptedGenerator
) -> None:
    async with httpx.AsyncClient(base_url=server_url, timeout=30) as client:
        response = await client.post("/v1/completions", json={"prompt": "漢" * 100_000})
    assert response.status_code == 400
    assert "300000 tokens" in response.json()["error"]["message"]
