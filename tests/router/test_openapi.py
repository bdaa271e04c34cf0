"""The API's description says what the application does."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from router.app import create_app
from router.context import GatewayContext
from tests.router.conftest import Client


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
