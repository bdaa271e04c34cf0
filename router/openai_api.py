"""The endpoints of the OpenAI API: completions, chat completions, responses, models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.body import read_object
from router.context import GatewayContext
from router.disconnect import cancelled_on_disconnect
from router.event_stream import EventStream
from router.fields import Fields
from router.prepare import (
    PreparedRequest,
    prepare_chat,
    prepare_completion,
    prepare_response,
)
from router.request_log import record_of


def openai_routes(context: GatewayContext) -> APIRouter:
    """The routes under `/v1`."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        body = await read_object(request, context)
        async with cancelled_on_disconnect(request.receive):
            return await respond(
                await prepare_completion(context, Fields(body), record_of(request))
            )

    @routes.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_object(request, context)
        async with cancelled_on_disconnect(request.receive):
            return await respond(await prepare_chat(context, Fields(body), record_of(request)))

    @routes.post("/responses")
    async def responses(request: Request) -> Response:
        """Answer a conversation in the shape of the responses API; nothing is stored."""
        body = await read_object(request, context)
        async with cancelled_on_disconnect(request.receive):
            return await respond(await prepare_response(context, Fields(body), record_of(request)))

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
    if prepared.options.stream:
        return await EventStream.begin(prepared.choices, prepared.answer)
    return Response(await prepared.whole(), media_type="application/json")


def _model(context: GatewayContext, name: str) -> dict[str, Any]:
    limits = context.generator.limits
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "hexserve",
        "max_model_len": None if limits is None else limits.max_model_len,
    }
