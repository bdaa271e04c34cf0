"""The API's description says what the application does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from router import request_schemas as schemas
from router.app import create_app
from router.chat_request import read_chat
from router.completion_request import read_completion
from router.context import GatewayContext
from router.errors import BadRequest
from router.fields import Fields
from router.response_request import read_response
from tests.router.conftest import Client
from tests.router.fakes import LIMITS

Reader = Callable[..., Any]

BODIES: list[tuple[Reader, dict[str, Any], dict[str, Any]]] = [
    (read_completion, {"prompt": "p"}, schemas.COMPLETION),
    (read_chat, {"messages": [{"role": "user", "content": "x"}]}, schemas.CHAT),
    (read_response, {"input": "x"}, schemas.RESPONSE),
]


@pytest.mark.parametrize(("read", "body", "schema"), BODIES)
def test_a_schema_has_the_fields_that_are_read(
    read: Reader, body: dict[str, Any], schema: dict[str, Any]
) -> None:
    """`finish` refuses what has not been read, so every described field alone must pass it."""
    neutral = {name: None for name in schema["properties"] if name not in body}

    def reads(fields: dict[str, Any]) -> None:
        taken = Fields(fields)
        taken.raw("model")
        read(taken, model="m", limits=LIMITS, defaults={})

    reads({**body, **neutral})
    seen = Fields(body)
    seen.raw("model")
    read(seen, model="m", limits=LIMITS, defaults={})
    assert seen._taken == set(schema["properties"])
    with pytest.raises(BadRequest, match="huh"):
        reads({**body, "huh": None})


def test_every_route_is_described(context: GatewayContext) -> None:
    app = create_app(context)
    routes = FastAPI.openapi(app)["paths"]  # what FastAPI itself finds
    assert methods_of(app.openapi()["paths"]) == methods_of(routes)


def methods_of(paths: dict[str, Any]) -> set[tuple[str, str]]:
    return {(path, method) for path in paths for method in paths[path] if method != "parameters"}


async def test_the_description_is_served(client: Client) -> None:
    described = (await client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    assert described["components"]["schemas"]["ModelName"]["enum"][:2] == ["org/model", "alias"]
    assert "security" not in described
    assert (await client.get("/docs")).status_code == 200
    keyed = client.with_context(api_keys=("k",), predict_route="/p", health_route="/h")
    described = (await keyed.get("/openapi.json")).json()
    assert described["security"] == [{"key": []}]
    assert described["paths"]["/h"]["get"]["security"] == []
    assert "security" not in described["paths"]["/p"]["post"]
