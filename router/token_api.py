"""The tokenizer over HTTP, and the version: `/tokenize`, `/detokenize`, `/version`."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.body import read_object
from router.chat_request import read_messages
from router.context import GatewayContext
from router.errors import BadRequest
from router.fields import Fields, check_text
from router.json_parts import written
from router.prompts import message_tokens, text_tokens, token_texts, tokens_text
from router.sampling import check_token_ids

_PART = 8192
"""Items that are written in a millisecond or two."""


def token_routes(context: GatewayContext) -> APIRouter:
    """The routes; their bodies are vLLM's."""
    routes = APIRouter()
    this_version = version("hexserve")

    @routes.get("/version")
    async def tell_version() -> dict[str, str]:
        """Tell hexserve's version."""
        return {"version": this_version}

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Give the token ids of a text, or of a conversation as the chat template writes it."""
        fields = Fields(await read_object(request, context))
        limits = context.ready_limits()
        context.resolve_model(fields.raw("model"))
        tokens = await _tokens(context, fields)
        strings = fields.flag("return_token_strs")
        fields.finish()
        told = {
            "count": len(tokens),
            "max_model_len": limits.max_model_len,
            "tokens": tokens,
            "token_strs": await token_texts(context, tokens) if strings else None,
        }
        body = await asyncio.to_thread(written, told, _PART)
        return Response(body, media_type="application/json")

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        """Give the text of token ids, special tokens included."""
        fields = Fields(await read_object(request, context))
        limits = context.ready_limits()
        context.resolve_model(fields.raw("model"))
        tokens = check_token_ids(fields.raw("tokens"), "tokens", limits.vocab_size)
        fields.finish()
        return {"prompt": await tokens_text(context, tokens, skip_special_tokens=False)}

    return routes


async def _tokens(context: GatewayContext, fields: Fields) -> list[int]:
    prompt = fields.raw("prompt")
    if prompt is None:
        if fields.raw("messages") is None:
            raise BadRequest("prompt is required, or messages", param="prompt")
        messages = read_messages(fields)
        return await message_tokens(
            context,
            messages,
            add_generation_prompt=fields.flag("add_generation_prompt", True),
            add_special_tokens=fields.flag("add_special_tokens"),
        )
    if fields.raw("messages") is not None:
        raise BadRequest("messages is not allowed beside prompt", param="messages")
    special = fields.flag("add_special_tokens", True)
    return await text_tokens(context, check_text(prompt, "prompt"), add_special_tokens=special)
