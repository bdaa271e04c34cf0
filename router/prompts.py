"""From a request's prompts or messages to token ids, without stalling the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from checkpoint.errors import ChatTemplateError
from router.completion_request import CompletionRequest
from router.context import GatewayContext
from router.errors import BadRequest

_INLINE_CHARACTERS = 8192
"""Shorter text is tokenized in less time than a thread switch is worth."""
_INLINE_TOKENS = 2048
"""Fewer are decoded in less."""


async def completion_tokens(context: GatewayContext, request: CompletionRequest) -> list[list[int]]:
    """Each prompt's token ids.

    Raises:
        BadRequest: a prompt has none.
    """

    def encode() -> list[list[int]]:
        return [
            context.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in request.prompts
        ]

    characters = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str))
    prompts = encode() if characters <= _INLINE_CHARACTERS else await asyncio.to_thread(encode)
    for tokens in prompts:
        _not_empty(tokens, "prompt")
    return prompts


async def text_tokens(context: GatewayContext, text: str, *, add_special_tokens: bool) -> list[int]:
    """The token ids of a text, perhaps none."""
    if len(text) <= _INLINE_CHARACTERS:
        return context.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(context.tokenizer.encode, text, add_special_tokens)


async def tokens_text(
    context: GatewayContext, tokens: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """The text of token ids."""
    decode = context.tokenizer.decode
    if len(tokens) <= _INLINE_TOKENS:
        return decode(tokens, skip_special_tokens)
    return await asyncio.to_thread(decode, tokens, skip_special_tokens)


async def token_texts(context: GatewayContext, tokens: Sequence[int]) -> list[str]:
    """How each of the tokens reads alone."""

    def read() -> list[str]:
        return list(map(context.tokenizer.token_text, tokens))

    return read() if len(tokens) <= _INLINE_TOKENS else await asyncio.to_thread(read)


async def chat_tokens(
    context: GatewayContext, messages: list[dict[str, Any]], param: str
) -> list[int]:
    """The prompt that a conversation is; as `message_tokens`, and never empty."""
    return _not_empty(await message_tokens(context, messages, param), param)


async def message_tokens(
    context: GatewayContext,
    messages: list[dict[str, Any]],
    param: str = "messages",
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
) -> list[int]:
    """The token ids of messages as the model's chat template writes them.

    `add_special_tokens` is mostly wrong: the template has written them already.

    Raises:
        BadRequest: the template refuses the messages, or the model has none.
    """
    template = context.require_chat_template()

    def encode() -> list[int]:
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        return context.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    characters = sum(len(message["content"]) for message in messages)
    # What tools were called with is as long as it likes, and is not text yet.
    known = not any("tool_calls" in message for message in messages)
    try:
        if known and characters <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.to_thread(encode)
    except ChatTemplateError as error:
        raise BadRequest(
            f"the model's chat template refuses {param}: {error}", param=param
        ) from error


def _not_empty(tokens: list[int], param: str) -> list[int]:
    if not tokens:
        raise BadRequest(f"{param} has no tokens", param=param)
    return tokens
