"""The endpoints of the OpenAI API: completions, chat completions, models."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.body import read_object
from router.context import GatewayContext
from router.disconnect import cancelled_on_disconnect
from router.event_stream import EventStream
from router.fields import Fields
from router.prepare import PreparedRequest, prepare_chat, prepare_completion

_MAX_ID_LENGTH = 128


def openai_routes(context: GatewayContext) -> APIRouter:
    """The routes under `/v1`."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        arrived = time.perf_counter()
        body = await read_object(request, context.max_body_bytes)
        async with cancelled_on_disconnect(request.receive):
            prepared = await prepare_completion(
                context, Fields(body), public_id=public_id(request), arrived=arrived
            )
            return await respond(prepared)

    @routes.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived = time.perf_counter()
        body = await read_object(request, context.max_body_bytes)
        async with cancelled_on_disconnect(request.receive):
            prepared = await prepare_chat(
                context, Fields(body), public_id=public_id(request), arrived=arrived
            )
            return await respond(prepared)

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        """List the served model under each of its names."""
        return {
            "object": "list",
            "data": [_model(context, name) for name in context.served_model_names],
        }

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe one served model."""
        return _model(context, context.resolve_model(name))

    return routes


async def respond(prepared: PreparedRequest) -> Response:
    """Generate the answer, whole or as a stream that has begun.

    Raises:
        ServingError: generation failed before there was anything to send.
    """
    if not prepared.options.stream:
        piece = await prepared.whole()
        return JSONResponse(prepared.answer.whole(piece, prepared.sequence.usage()))
    pieces = prepared.sequence.pieces()
    first = await anext(pieces)
    return EventStream(
        first,
        pieces,
        sequence=prepared.sequence,
        answer=prepared.answer,
        options=prepared.options,
    )


def public_id(request: Request) -> str:
    """The answer's id: what the client asks for by X-Request-Id, else random."""
    wanted = request.headers.get("x-request-id", "")
    if wanted and wanted.isascii() and wanted.isprintable() and len(wanted) <= _MAX_ID_LENGTH:
        return wanted
    return secrets.token_hex(16)


def _model(context: GatewayContext, name: str) -> dict[str, Any]:
    limits = context.generator.limits
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "hexserve",
        "max_model_len": None if limits is None else limits.max_model_len,
    }
