"""Every kind of body that is posted, and the least that is right of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router import request_schemas as schemas
from tests.router.schema_cases import Schema

MESSAGES = [{"role": "user", "content": "x"}]
MARKED = {"messages": MESSAGES, "@requestFormat": "chatCompletions"}
_ALONE: Schema = {"type": "object"}


def _as_it_is(value: Any) -> Any:
    return value


def _as_instance(value: Any) -> Any:
    return {"instances": [value]}


@dataclass(frozen=True)
class Body:
    """A kind of body, or of what is inside of one at `prefix`."""

    path: str
    schema: Schema
    base: dict[str, Any]
    wrap: Callable[[Any], Any] = _as_it_is
    prefix: str = ""
    instead: str | None = None
    """A field that conflicts with one of `base` before anything else is wrong with it."""


def _prediction() -> Schema:
    """Without what is in its instances."""
    whole: Schema = schemas.PREDICTION["anyOf"][0]
    instances = {**whole["properties"]["instances"], "items": _ALONE}
    return {**whole, "properties": {**whole["properties"], "instances": instances}}


TEXT_INSTANCE, CHAT_INSTANCE = schemas.PREDICTION["anyOf"][0]["properties"]["instances"]["items"][
    "anyOf"
]
BODIES = {
    # With echo the least of max_tokens is what the schema says.
    "completion": Body("/v1/completions", schemas.COMPLETION, {"prompt": "p", "echo": True}),
    "chat": Body("/v1/chat/completions", schemas.CHAT, {"messages": MESSAGES}),
    "invoked chat": Body("/invoke/v1/chat/completions", schemas.CHAT, {"messages": MESSAGES}),
    "response": Body("/v1/responses", schemas.RESPONSE, {"input": "x"}),
    "text to tokenize": Body(
        "/tokenize", schemas.TOKENIZE["anyOf"][0], {"prompt": "p"}, instead="messages"
    ),
    # Without both it is the prompt that is missed.
    "chat to tokenize": Body(
        "/tokenize",
        schemas.TOKENIZE["anyOf"][1] | {"required": []},
        {"messages": MESSAGES},
        instead="prompt",
    ),
    "detokenize": Body("/detokenize", schemas.DETOKENIZE, {"tokens": [1]}),
    "drain": Body("/admin/drain", schemas.DRAIN, {"worker": "h:1"}),
    "prediction": Body("/generate", _prediction(), {"instances": [{"prompt": "p"}]}),
    # Without its mark it is no chat.
    "marked chat": Body(
        "/generate", schemas.PREDICTION["anyOf"][1] | {"required": ["messages"]}, MARKED
    ),
    "text instance": Body(
        "/generate", TEXT_INSTANCE, {"prompt": "p"}, _as_instance, "instances[0]."
    ),
    "chat instance": Body("/generate", CHAT_INSTANCE, MARKED, _as_instance, "instances[0]."),
}
