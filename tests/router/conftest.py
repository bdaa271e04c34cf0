from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from checkpoint.chat_template import ChatTemplate
from checkpoint.fake import write_fake_model
from checkpoint.tokenizer import Tokenizer
from deploy.connections import PromptHTTPProtocol
from router.app import create_app
from router.context import GatewayContext
from router.metrics import RouterMetrics
from tests.router.described import check_described
from tests.router.fakes import ScriptedGenerator


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture
def generator() -> ScriptedGenerator:
    return ScriptedGenerator()


@pytest.fixture
def context(
    generator: ScriptedGenerator, tokenizer: Tokenizer, model_folder: Path
) -> GatewayContext:
    return GatewayContext(
        generator=generator,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(model_folder),
        served_model_names=("org/model", "alias"),
        metrics=RouterMetrics("org/model"),
    )


class Client:
    """The app under test, without a network. Each of its answers is held to its description."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context

    def with_context(self, **changes: Any) -> Client:
        return Client(replace(self.context, **changes))

    async def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        app = create_app(self.context)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.request(method, path, **kwargs)
        check_described(app.openapi(), method, path, response)
        return response

    async def get(self, path: str) -> httpx.Response:
        return await self.request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.request("POST", path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        return _ok(await self.post("/v1/completions", {"prompt": "p", "max_tokens": 60, **body}))

    async def chat(self, **body: Any) -> dict[str, Any]:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return _ok(await self.post("/v1/chat/completions", body))

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """A stream's events, parsed; the last one is "[DONE]" unless it broke."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        return parse_events(response.text)

    async def stream_completion(self, **body: Any) -> list[Any]:
        return await self.events("/v1/completions", {"prompt": "p", "max_tokens": 60, **body})

    async def stream_chat(self, **body: Any) -> list[Any]:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return await self.events("/v1/chat/completions", body)


def parse_events(text: str) -> list[Any]:
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def _ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def client(context: GatewayContext) -> Client:
    return Client(context)


@pytest.fixture
async def server_url(context: GatewayContext) -> AsyncIterator[str]:
    """The app on a real server, for what needs a real connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(context), http=PromptHTTPProtocol, log_level="warning", lifespan="off"
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task
