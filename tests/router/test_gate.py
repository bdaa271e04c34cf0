"""API keys, limits on what is served at once, other sites' scripts, slow bodies, the log line."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from router.app import create_app
from router.errors import GenerationFailed
from tests.router.conftest import Client
from tests.router.fakes import Pause, ScriptedGenerator, batches
from tests.router.test_bad_input import check_error

COMPLETION = "/v1/completions"


async def ask(client: Client, path: str = COMPLETION, **headers: str) -> Any:
    return await client.request("POST", path, json={"prompt": "p"}, headers=headers)


async def test_any_of_several_keys_lets_in(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("x")
    client = client.with_context(api_keys=("first", "sécond"))
    for key in ("first", "sécond"):
        response = await client.request(
            "POST",
            COMPLETION,
            json={"prompt": "p"},
            headers={"Authorization": f"Bearer {key}".encode()},
        )
        assert response.status_code == 200
    assert (await ask(client, authorization="bearer first")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer "},
     {"authorization": "Bearer firs"}, {"authorization": "Bearer first2"},
     {"authorization": "Basic first"}, {"authorization": "first"}, {"x-api-key": "first"}],
)  # fmt: skip
async def test_without_a_key_nothing_is_served(
    client: Client, generator: ScriptedGenerator, headers: dict[str, str]
) -> None:
    client = client.with_context(api_keys=("first", "second"), health_route="/h")
    for path in (COMPLETION, "/v1/chat/completions", "/v1/responses", "/generate", "/tokenize",
                 "/invoke/v1/completions", "/v1/models", "/nothing"):  # fmt: skip
        response = await ask(client, path, **headers)
        check_error(response, 401, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "first" not in response.text
    assert generator.calls == []
    for path in ("/ping", "/h", "/health", "/metrics", "/version"):
        assert (await client.get(path)).status_code == 200


def test_keys_are_not_shown(client: Client) -> None:
    assert "secret" not in repr(client.with_context(api_keys=("secret",)).context)


async def test_requests_beyond_the_limit_are_told_to_come_back(
    client: Client, generator: ScriptedGenerator
) -> None:
    pause = Pause()
    generator.script = [pause, *batches("x")]
    app = create_app(client.with_context(max_requests=2).context)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        running = [
            asyncio.create_task(http.post(COMPLETION, json={"prompt": "p"})) for _ in range(2)
        ]
        async with asyncio.timeout(5):
            while len(generator.calls) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        response = await http.post(COMPLETION, json={"prompt": "p"})
        check_error(response, 429, "2 requests")
        assert response.headers["retry-after"] == "1"
        assert (await http.get("/ping")).status_code == 200
        pause.event.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await http.post(COMPLETION, json={"prompt": "p"})).status_code == 200


async def test_other_sites_may_ask_only_where_they_are_named(client: Client) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = await client.request("OPTIONS", COMPLETION, headers=asked)
    check_error(response, 405)
    assert "access-control-allow-origin" not in response.headers
    client = client.with_context(allowed_origins=("https://a.example",), api_keys=("k",))
    response = await client.request("OPTIONS", COMPLETION, headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = await ask(client, origin="https://a.example")
    check_error(response, 401)  # a script can read why
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = await ask(client, origin="https://b.example")
    assert "access-control-allow-origin" not in response.headers


async def test_a_body_that_does_not_arrive_in_time(client: Client) -> None:
    client = client.with_context(body_timeout_s=0.01)

    async def chunks() -> Any:
        yield b'{"prompt":'
        await asyncio.Event().wait()

    response = await client.request("POST", COMPLETION, content=chunks())
    check_error(response, 408, "0.01 s")
    assert response.headers["connection"] == "close"


# ---- the log line ----


async def test_each_request_has_a_line_without_content(
    client: Client, generator: ScriptedGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hexserve.request")
    generator.script = batches("OUTPUT", 2)
    body = {"prompt": ["INPUT", "INPUT2"], "max_tokens": 20}
    response = await client.request("POST", COMPLETION, json=body, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    (line,) = caplog.messages
    assert line.startswith(f"mine: POST {COMPLETION} 200, 11 prompt and 14 output tokens, first ")
    assert line.endswith(" s in all, stop")
    caplog.clear()
    response = await client.post(COMPLETION, {"prompt": "INPUT", "temperature": "INPUT"})
    (line,) = caplog.messages
    assert f"{response.headers['x-request-id']}: POST {COMPLETION} 400, " in line
    caplog.clear()
    generator.script = [[97], GenerationFailed("INPUT")]
    await client.stream_completion()
    (line,) = caplog.messages
    assert line.endswith("error")
    assert "200, 1 prompt and 1 output tokens" in line
    assert "INPUT" not in caplog.text


async def test_the_log_keeps_to_one_line_and_out_of_probes(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hexserve.request")
    for path in ("/ping", "/health", "/metrics"):
        await client.get(path)
    assert caplog.messages == []
    await client.get("/a%0Ab" + "x" * 200)
    (line,) = caplog.messages
    assert "\n" not in line
    assert len(line) < 250


@pytest.mark.parametrize("sent", ["", "x" * 129, "a\x07b", "é"])
async def test_an_id_that_cannot_be_used_is_replaced(client: Client, sent: str) -> None:
    response = await client.request(
        "GET", "/v1/models", headers=[(b"x-request-id", sent.encode("latin-1"))]
    )
    assert len(response.headers["x-request-id"]) == 32
