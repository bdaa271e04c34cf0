"""Events that are written on the spot are those that a task of the stream's own would send."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from router.app import create_app
from router.context import GatewayContext
from router.direct_write import SCOPE_KEY
from router.errors import GenerationFailed
from tests.router.fakes import ScriptedGenerator, batches

TEXT = "Hé 👍, this is <stop> the end"
MESSAGES = [{"role": "user", "content": "p"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "p"}),
    ("/v1/completions", {"prompt": "p", "return_token_ids": True, "echo": True}),
    ("/v1/completions", {"prompt": "p", "logprobs": 2}),
    ("/v1/completions", {"prompt": "p", "stop": ["<stop>"]}),
    ("/v1/completions", {"prompt": "p", "n": 2}),
    ("/v1/completions", {"prompt": "p", "max_tokens": 5}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "stop": "the"}),
    ("/v1/responses", {"input": "p"}),
]


class Direct:
    """A DirectWrite of which `room` says, call by call, whether it has room."""

    def __init__(self, send: Callable[[bytes], None], room: Callable[[int], bool]) -> None:
        self._send, self._room = send, room
        self._asked = self.writes = 0

    @property
    def has_room(self) -> bool:
        self._asked += 1
        return self._room(self._asked)

    def write(self, body: bytes) -> None:
        assert body
        self.writes += 1
        self._send(body)


async def streamed(
    context: GatewayContext, path: str, body: dict[str, Any], room: Callable[[int], bool]
) -> tuple[bytes, int]:
    """A stream's bytes in the order in which they were sent, and how many writes were direct."""
    sent: list[bytes] = []
    app, direct = create_app(context), Direct(sent.append, room)

    async def offering(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            sent.append(message.get("body", b""))
            await send(message)

        await app({**scope, SCOPE_KEY: direct}, receive, noting)

    transport = httpx.ASGITransport(app=offering)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"X-Request-Id": "one"}
        answer = await client.post(path, json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200
    return same(b"".join(sent)), direct.writes


def same(stream: bytes) -> bytes:
    """A stream without the time of its making."""
    return re.sub(rb'"(created|created_at|completed_at)":\d+', rb'"\1":0', stream)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_is_the_same_whoever_writes_it(
    context: GatewayContext, generator: ScriptedGenerator, path: str, body: dict[str, Any]
) -> None:
    generator.script = batches(TEXT, 1, 2)
    body = {"max_tokens": 40, **body} if path != "/v1/responses" else body
    plain, none = await streamed(context, path, body, lambda _: False)
    assert not none
    whole, most = await streamed(context, path, body, lambda _: True)
    assert whole == plain
    assert (most > 0) == ("n" not in body)
    mixed, some = await streamed(context, path, body, lambda asked: asked % 3 > 0)
    assert mixed == plain
    assert some <= most


async def test_a_stream_on_a_connection_is_the_same(
    context: GatewayContext, server_url: str, generator: ScriptedGenerator
) -> None:
    generator.script = batches(TEXT)
    body = {"prompt": "p", "max_tokens": 60, "return_token_ids": True}
    plain, _ = await streamed(context, "/v1/completions", body, lambda _: False)
    assert not generator.tapped
    async with httpx.AsyncClient(base_url=server_url) as client:
        for _ in range(2):  # on one connection
            answer = await client.post(
                "/v1/completions",
                json={**body, "stream": True},
                headers={"X-Request-Id": "one"},
            )
            assert same(answer.content) == plain
    assert generator.tapped > 2 * len(TEXT)


async def test_an_error_amid_what_was_written_is_the_last_event(
    server_url: str, generator: ScriptedGenerator
) -> None:
    generator.script = [*batches("abc", end=()), GenerationFailed("lost")]
    async with httpx.AsyncClient(base_url=server_url) as http:
        body = {"prompt": "p", "stream": True}
        answer = await http.post("/v1/completions", json=body)
    assert generator.tapped
    events = answer.text.strip().split("\n\n")
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]] == [*"abc"]
    assert '"message":"lost"' in events[-1]


async def test_figures_count_what_was_written(
    context: GatewayContext, server_url: str, generator: ScriptedGenerator
) -> None:
    generator.script = batches("abcdef")
    async with httpx.AsyncClient(base_url=server_url) as http:
        await http.post("/v1/completions", json={"prompt": "p", "stream": True})
    assert generator.tapped
    metrics = context.metrics.render().decode()
    assert re.search(r"^vllm:generation_tokens_total\{[^}]*\} 7\.0$", metrics, re.MULTILINE)
    assert re.search(
        r"^vllm:inter_token_latency_seconds_count\{[^}]*\} 6\.0$", metrics, re.MULTILINE
    )
