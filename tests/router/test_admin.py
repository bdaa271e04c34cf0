"""`/admin/drain`: only where it was switched on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from router.app import create_app
from router.context import GatewayContext
from router.errors import BadRequest, Unavailable
from tests.router.conftest import Client
from tests.router.test_bad_input import check_error
from tests.router.test_openapi import methods_of

PATH = "/admin/drain"


async def test_without_it_there_is_no_such_path(client: Client) -> None:
    assert (await client.post(PATH, {"worker": "h:1"})).status_code == 404
    assert PATH not in (await client.get("/openapi.json")).json()["paths"]


async def test_a_worker_is_drained_by_its_address(client: Client) -> None:
    told: list[str] = []
    client = client.with_context(drain_worker=told.append)
    answer = await client.post(PATH, {"worker": "h:1"})
    assert (answer.status_code, answer.json()) == (200, {"worker": "h:1", "state": "draining"})
    assert told == ["h:1"]


@pytest.mark.parametrize(
    ("body", "error", "status"),
    [
        ({}, None, 400),
        ({"worker": 3}, None, 400),
        ({"worker": "h:1", "now": True}, None, 400),
        ({"worker": "h:1"}, BadRequest("no worker"), 400),
        ({"worker": "h:1"}, Unavailable("it is away"), 503),
    ],
)
async def test_what_cannot_be_drained(
    client: Client, body: dict, error: Exception | None, status: int
) -> None:
    def drain(_: str) -> None:
        assert error is not None, "nothing is to be drained"
        raise error

    check_error(await client.with_context(drain_worker=drain).post(PATH, body), status)


@pytest.mark.parametrize("path", [PATH, f"/invoke{PATH}"])
@pytest.mark.parametrize(
    ("api_keys", "admin_keys"), [(("k",), ()), (("k",), ("a", "b")), ((), ("a", "b"))]
)
async def test_it_wants_a_key_that_is_no_clients(
    client: Client, path: str, api_keys: tuple[str, ...], admin_keys: tuple[str, ...]
) -> None:
    told: list[str] = []
    client = client.with_context(drain_worker=told.append, api_keys=api_keys, admin_keys=admin_keys)

    async def post(path: str, key: str, body: dict) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return await client.request("POST", path, json=body, headers=headers)

    for key in ("", "k", "c"):
        check_error(await post(path, key, {"worker": "h:1"}), 401, "admin key")
    assert told == []
    for key in admin_keys:
        assert (await post(path, key, {"worker": "h:1"})).status_code == 200
        served = await post("/v1/completions", key, {"prompt": "p"})
        assert served.status_code == (401 if api_keys else 200)
    assert len(told) == len(admin_keys)
    client = client.with_context(max_requests=0)
    for key in admin_keys:  # load does not lock the operator out
        assert (await post(path, key, {"worker": "h:1"})).status_code == 200
    assert "admin_keys" not in repr(client.context)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 400),
        ({"content-type": "application/x-www-form-urlencoded"}, 400),
        ({}, 400),
        ({"content-type": "application/json", "origin": "https://evil.example"}, 403),
        ({"content-type": "application/json", "origin": "null"}, 403),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
async def test_a_web_page_drains_nothing(
    client: Client, headers: dict[str, str], status: int
) -> None:
    told: list[str] = []
    client = client.with_context(drain_worker=told.append)
    answer = await client.request("POST", PATH, content='{"worker": "h:1"}', headers=headers)
    assert (answer.status_code, len(told)) == (status, status == 200)


def test_it_is_described(context: GatewayContext) -> None:
    app = create_app(replace(context, drain_worker=lambda _: None))
    assert methods_of(app.openapi()["paths"]) == methods_of(FastAPI.openapi(app)["paths"])
