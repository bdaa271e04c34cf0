"""What who runs the server may ask of it: `/admin/drain`. Only where it was switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from router.body import read_object
from router.context import GatewayContext
from router.fields import Fields, check_text


def admin_routes(context: GatewayContext, drain_worker: Callable[[str], None]) -> APIRouter:
    """The routes under `/admin`; `drain_worker` takes a worker's address as `/health` tells it."""
    routes = APIRouter(prefix="/admin")

    @routes.post("/drain")
    async def drain(request: Request) -> dict[str, Any]:
        """Have a worker take no new work, and end when what runs has ended."""
        fields = Fields(await read_object(request, context))
        worker = check_text(fields.raw("worker"), "worker")
        fields.finish()
        drain_worker(worker)
        return {"worker": worker, "state": "draining"}

    return routes
