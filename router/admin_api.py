"""What who runs the server may ask of it: `/admin/drain`. Only where it was switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from router.body import read_object
from router.context import GatewayContext
from router.errors import BadRequest, Forbidden
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
        _refuse_pages(request)
        drain_worker(worker)
        return {"worker": worker, "state": "draining"}

    return routes


def _refuse_pages(request: Request) -> None:
    """Refuse what a web page may have sent, of whatever site: on this machine no key is wanted.

    Browsers name the page's site in Origin, and send JSON to another site only if that agrees.
    """
    if "origin" in request.headers:
        raise Forbidden("a web page has sent this: requests to /admin have no Origin header")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest("the header Content-Type: application/json is wanted")
