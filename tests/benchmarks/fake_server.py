"""A tiny OpenAI-compatible server in a thread, with faults a test can ask for."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse


@dataclass
class FakeServer:
    """Its behaviour, which tests may change between requests, and what it was asked."""

    name: str = "fake"
    ttft: float = 0.0
    tpot: float = 0.0
    tokens_per_event: int = 1
    usage: bool = True
    fault: str | None = None
    """`http`, `event`, `cut`, `garbage` or `silent`."""
    healthy_requests: int = 0
    """So many requests are answered before `fault` sets in."""
    compiles: int = 0
    """After ready, as hexserve counts them."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    journal: list[str] = field(default_factory=list)
    """Names of the servers asked, in order; tests share one list between servers."""

    def reset(self) -> None:
        """Back to a healthy server that was asked nothing."""
        vars(self).update(vars(FakeServer(name=self.name, url=self.url)))

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": f"{self.name}-model"}]}

        @app.get("/metrics", response_class=PlainTextResponse)
        def metrics() -> str:
            return f'hexserve:compiles_after_ready{{model_name="m"}} {self.compiles}.0\n'

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            return self._answer(body, len(body["prompt"].split()), chat=False)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            return self._answer(body, len(body["messages"][0]["content"].split()), chat=True)

        return app

    def _answer(self, body: dict[str, Any], prompt_tokens: int, chat: bool) -> Response:
        self.bodies.append(body)
        self.journal.append(self.name)
        fault = self.fault if len(self.bodies) > self.healthy_requests else None
        if fault == "http":
            return JSONResponse({"error": {"message": "no room left"}}, status_code=503)
        events = self._events(body, prompt_tokens, chat, fault)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, body: dict[str, Any], prompt_tokens: int, chat: bool, fault: str | None
    ) -> AsyncIterator[str]:
        total = body["max_tokens"]
        if fault != "silent":
            await asyncio.sleep(self.ttft)
            for index in range(0, total, self.tokens_per_event):
                if index:
                    await asyncio.sleep(self.tpot)
                text = " tok" * min(self.tokens_per_event, total - index)
                choice = {"delta": {"content": text}} if chat else {"text": text}
                yield _event({"choices": [{"index": 0, **choice}]})
                if fault == "garbage":
                    yield "data: {half\n\n"
                if fault == "event":
                    yield _event({"error": {"message": "engine died"}})
                    return
                if fault == "cut":
                    return
        if self.usage:
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": total}
            yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextlib.contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free port while the context is open."""
    config = uvicorn.Config(
        fake.app(), port=0, log_level="error", ws="none", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        if time.monotonic() > deadline:
            raise TimeoutError("the fake server did not start")
        time.sleep(0.005)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
