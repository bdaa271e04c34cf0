"""`hexserve demo`: serve the demo model, ask it a question over HTTP, show the answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence

import httpx

from deploy.local import go_on, running_deployment, wait_until_ready
from deploy.signals import Stop, unless_stopped
from settings.config import ServeConfig

QUESTION = "What is the capital of France, and what is it known for?"
MAX_TOKENS = 120


class DemoFailed(RuntimeError):
    """The question was not answered."""


async def demo(config: ServeConfig, worker_flags: Sequence[str], stop: Stop, *, once: bool) -> None:
    """Serve, ask, print; then end (`once`) or go on until `stop`.

    Raises:
        ConfigError, CheckpointError, WorkerDied: the deployment could not be started.
        RoleGivenUp, RouterFailed: it cannot go on.
        DemoFailed: the question was not answered.
        Stopped: `stop` was set before the model was there.
    """
    async with running_deployment(config, worker_flags, stop) as (router, workers):
        await unless_stopped(wait_until_ready(router, workers), stop)
        if stop.is_set():
            return
        await unless_stopped(_show(router.url, config.http.api_keys), stop)
        if not once and not stop.is_set():
            print(_HINT.format(url=router.url), flush=True)
            await unless_stopped(go_on(router, workers), stop)


_HINT = """
Serving at {url} until Ctrl-C. Try:
  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages":[{{"role":"user","content":"Tell me a story."}}],"stream":true}}'"""


async def _show(url: str, api_keys: Sequence[str]) -> None:
    print(f"\n> {QUESTION}\n", flush=True)
    began = time.perf_counter()
    first = last = 0.0
    events = 0
    async for text in _stream(url, api_keys):
        last = time.perf_counter()
        first = first or last
        events += 1
        print(text, end="", flush=True)
    print(
        f"\n\nfirst text after {1000 * (first - began):.0f} ms, "
        f"then {1000 * (last - first) / max(events - 1, 1):.0f} ms a piece, {events} pieces",
        flush=True,
    )


async def _stream(url: str, api_keys: Sequence[str]) -> AsyncIterator[str]:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {api_keys[0]}"} if api_keys else {}
    async with (
        # This process's own server: whom its certificate names does not matter.
        httpx.AsyncClient(timeout=120, trust_env=False, verify=False, headers=headers) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            raise DemoFailed(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise DemoFailed(event["error"]["message"])
                yield event["choices"][0]["delta"].get("content") or ""
