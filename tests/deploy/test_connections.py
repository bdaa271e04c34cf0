"""Connections that bring no request are cut; those that do are not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from deploy import connections
from deploy.connections import PromptHTTPProtocol

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[str, int]]:
    config = uvicorn.Config(app, http=PromptHTTPProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize("said", [b"", REQUEST[:9]], ids=["nothing", "half a head"])
async def test_a_connection_without_a_request_is_cut(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.02)
    async with serving(answer) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_request_may_take_longer_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()
    check = PromptHTTPProtocol._check_head

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await looked.wait()
        await answer(scope, receive, send)

    def look(protocol: PromptHTTPProtocol) -> None:
        check(protocol)
        looked.set()

    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.02)
    monkeypatch.setattr(PromptHTTPProtocol, "_check_head", look)
    async with serving(slow) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(REQUEST)
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 204 No Content\r\n"
        writer.close()
