"""From a request's prompt or messages to token ids, without stalling the event loop."""

from __future__ import annotations

import asyncio

from checkpoint.errors import ChatTemplateError
from router.chat_request import ChatRequest
from router.completion_request import CompletionRequest
from router.context import GatewayContext
from router.errors import BadRequest

_INLINE_CHARACTERS = 8192
"""Shorter text is tokenized in less time than a thread switch is worth."""


async def completion_tokens(context: GatewayContext, request: CompletionRequest) -> list[int]:
    """The prompt's token ids.

    Raises:
        BadRequest: there are none.
    """
    prompt = request.prompt
    if not isinstance(prompt, str):
        return prompt
    if len(prompt) <= _INLINE_CHARACTERS:
        tokens = context.tokenizer.encode(prompt)
    else:
        tokens = await asyncio.to_thread(context.tokenizer.encode, prompt)
    return _not_empty(tokens, "prompt")


async def chat_tokens(context: GatewayContext, request: ChatRequest) -> list[int]:
    """The token ids of the conversation as the model's chat template writes it.

    Raises:
        BadRequest: the template refuses the messages.
    """
    template = context.require_chat_template()

    def encode() -> list[int]:
        text = template.render(request.messages, add_generation_prompt=True)
        # The template has written the special tokens already.
        return context.tokenizer.encode(text, add_special_tokens=False)

    characters = sum(len(message["content"]) for message in request.messages)
    try:
        if characters <= _INLINE_CHARACTERS:
            tokens = encode()
        else:
            tokens = await asyncio.to_thread(encode)
    except ChatTemplateError as error:
        raise BadRequest(
            f"the model's chat template refuses messages: {error}", param="messages"
        ) from error
    return _not_empty(tokens, "messages")


def _not_empty(tokens: list[int], param: str) -> list[int]:
    if not tokens:
        raise BadRequest(f"{param} has no tokens", param=param)
    return tokens
