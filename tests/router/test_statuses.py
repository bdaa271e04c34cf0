"""Each status that the API's description has, at each path, really occurs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.app import create_app
from router.context import GatewayContext
from router.errors import DeadlinePassed, GenerationFailed, Overloaded, ServingError, Unavailable
from tests.router.bodies import BODIES
from tests.router.conftest import Client, parse_events
from tests.router.fakes import ScriptedGenerator, batches
from tests.router.test_bad_input import check_error

POSTED = {body.path: body.wrap(body.base) for body in BODIES.values()}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate")


class Broken:
    """Stands for a tokenizer that has a fault."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("secret")


async def never() -> Any:
    yield b"{"
    await asyncio.Event().wait()


def drain(_: str) -> None:
    pass


def refuse_to_drain(_: str) -> None:
    raise Unavailable("it is away")


async def provoked(client: Client, generator: ScriptedGenerator, path: str, status: int) -> Any:
    """The answer to what should be answered by this status."""
    method = "POST" if path in POSTED else "GET"
    body: dict[str, Any] = POSTED.get(path, {})
    path = path.replace("{name}", "alias")
    content: Any = json.dumps(body).encode() if body else None
    headers = {"content-type": "application/json"} if body else {}
    match status:
        case 400:
            content = b'{"huh": 1}'
        case 401:
            client = client.with_context(api_keys=("k",))
        case 403:
            headers["origin"] = "https://a.example"
        case 404 if method == "GET":
            path = path.replace("alias", "gpt-5")
        case 404:
            inner = body["instances"][0] if "instances" in body else body
            asked = {**inner, "model": "gpt-5"}
            content = json.dumps({"instances": [asked]} if inner is not body else asked).encode()
        case 405:
            method = "DELETE"
        case 408:
            client, content = client.with_context(body_timeout_s=0.01), never()
        case 413:
            client = client.with_context(max_body_bytes=1)
        case 429:
            client = client.with_context(max_requests=0)
        case 500:
            client = client.with_context(tokenizer=Broken(), drain_worker=lambda _: 1 / 0)
        case 503:
            generator.ready = False
            client = client.with_context(drain_worker=refuse_to_drain)
    return await client.request(method, path, content=content, headers=headers)


def described(context: GatewayContext) -> list[tuple[str, int]]:
    paths = create_app(context).openapi()["paths"]
    return [
        (path, int(status))
        for path, operations in paths.items()
        for method, operation in operations.items()
        if method != "parameters"
        for status in operation["responses"]
    ]


async def test_each_described_status_occurs(client: Client, generator: ScriptedGenerator) -> None:
    client = client.with_context(drain_worker=drain)
    generator.script = batches("x")
    for path, status in described(client.context):
        response = await provoked(client, generator, path, status)
        assert response.status_code == status, f"{path}: {response.status_code}, not {status}"
        if status >= 400 and path not in ("/ping", "/health"):
            check_error(response, status)
            assert "secret" not in response.text
        if status in (429, 503):
            assert response.headers["retry-after"] == "1"
        generator.ready = True


def test_what_is_asked_for_is_described_with_its_statuses(client: Client) -> None:
    found = set(described(client.with_context(drain_worker=drain).context))
    for path in POSTED.keys() - {"/admin/drain"}:
        path = path.removeprefix("/invoke")
        assert {status for each, status in found if each == path} == {
            *(200, 400, 401, 404, 405, 408, 413, 429, 500, 503)
        }


@pytest.mark.parametrize(
    "error", [GenerationFailed("lost"), Unavailable("gone"), Overloaded("full"), DeadlinePassed()]
)
@pytest.mark.parametrize("path", STREAMED)
async def test_an_error_inside_a_stream_is_its_end(
    client: Client, generator: ScriptedGenerator, path: str, error: ServingError
) -> None:
    generator.script = [[97], [98], error]
    base = POSTED[path] if path != "/generate" else {"instances": [{"prompt": "p"}]}
    asked = base if path != "/generate" else {**base, "parameters": {"stream": True}}
    asked = asked if path == "/generate" else {**asked, "stream": True}
    response = await client.post(path, asked)
    assert response.status_code == 200
    text = response.text
    if path == "/v1/responses":  # has typed events
        text = "\n\n".join(event.partition("\n")[2] for event in text.split("\n\n"))
    *before, last = parse_events(text)
    assert before
    assert not any("error" in event and event["error"] for event in before)
    assert last["error"] == error.body()["error"]
    assert "[DONE]" not in text
    # What comes before the first piece has a status of its own.
    generator.script = [error]
    check_error(await client.post(path, asked), error.status, str(error))
