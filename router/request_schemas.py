"""The requests' bodies as JSON Schema, for the API's description; the checks are elsewhere.

What a schema cannot say (that a prompt fits the context, that a field is only allowed beside
another) is told by 400. null stands for an absent field throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types import MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS
from protos.codec import MAX_CHOICES
from router.chat_request import MAX_MESSAGES
from router.completion_request import MAX_LOGPROBS, MAX_PROMPTS
from router.logit_bias import LARGEST_BIAS
from router.response_request import (
    LOGPROBS,
    MAX_METADATA,
    MAX_METADATA_NAME,
    MAX_METADATA_VALUE,
    PARTS,
)
from router.sampling import (
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
    WITHOUT_EFFECT,
)
from router.urgency import MOST_DEADLINE_MS, MOST_PRIORITY
from router.vertex_api import CHAT_FORMAT, MAX_INSTANCES

Schema = dict[str, Any]

MODEL_NAME = "ModelName"
"""The component that lists the names of the served model; which they are is known at run time."""

_MODEL: Schema = {"$ref": f"#/components/schemas/{MODEL_NAME}"}
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _integer(low: int | None = None, high: int | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": ["integer", "null"]} | {k: v for k, v in bounds.items() if v is not None}


def _only(*values: Any) -> Schema:
    """A field whose feature is not there: what asks for nothing is taken."""
    return {"enum": [None, *values]}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _object(properties: Schema, required: Sequence[str] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}

_SHARED: Schema = {
    "model": _MODEL,
    **{
        name: {"type": ["number", "null"], "minimum": low, "maximum": high}
        for name, (low, high) in NUMBERS.items()
    },
    "top_k": _integer(-1),
    "seed": _integer(),
    "n": _integer(1, MAX_CHOICES),
    "stop": _or_null(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}),
    "stop_token_ids": _or_null({**_TOKENS, "maxItems": MAX_STOP_TOKEN_IDS}),
    "ignore_eos": _FLAG,
    "priority": _integer(-MOST_PRIORITY - 1, MOST_PRIORITY),
    "deadline_ms": _integer(1, MOST_DEADLINE_MS),
    "skip_special_tokens": _FLAG,
    "return_token_ids": _FLAG,
    "stream": _FLAG,
    "stream_options": _or_null(
        _object(
            {
                "include_usage": _FLAG,
                "continuous_usage_stats": _FLAG,
                "include_obfuscation": _FLAG,
            }
        )
    ),
    "logit_bias": _or_null(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -LARGEST_BIAS,
                "maximum": LARGEST_BIAS,
            },
            "maxProperties": MAX_LOGIT_BIASES,
        }
    ),
    "min_tokens": _integer(0),
    "moderation": _only(),
    "response_format": _only({"type": "text"}),
    **{name: {"description": "has no effect"} for name in WITHOUT_EFFECT},
}
"""Of completions, chats and responses."""

_PROMPT: Schema = {"type": "string", "minLength": 1}
_TOKEN_PROMPT: Schema = {**_TOKENS, "minItems": 1}


def _content(kinds: Sequence[str]) -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, "text": _TEXT},
        "required": ["type", "text"],
    }
    return {"anyOf": [_TEXT, {"type": "array", "items": part, "minItems": 1}]}


def _message(roles: Sequence[str], **more: Schema) -> Schema:
    neutral = _only([])
    return _object(
        {
            "role": {"enum": list(roles)},
            "content": _content(("text",)),
            "name": {"type": ["string", "null"]},
            "function_call": neutral,
            "annotations": neutral,
            "audio": neutral,
            "refusal": neutral,
            "tool_calls": neutral,
            **more,
        },
        ("role", "content"),
    )


_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": _TEXT,
                "arguments": {"type": "string", "description": "the JSON of an object"},
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_CALLING = _message(
    ("assistant",),
    content=_or_null(_content(("text",))),
    tool_calls={"type": "array", "items": _CALL, "minItems": 1},
) | {"required": ["role", "tool_calls"]}
_ANSWERED = _message(("tool",), tool_call_id=_TEXT) | {
    "required": ["role", "content", "tool_call_id"]
}
_MESSAGES: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            _message(("system", "developer", "user", "assistant")),
            _CALLING,
            _ANSWERED,
        ]
    },
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}

COMPLETION = _object(
    {
        **_SHARED,
        "prompt": {
            "anyOf": [
                _PROMPT,
                _TOKEN_PROMPT,
                {
                    "type": "array",
                    "items": {"anyOf": [_PROMPT, _TOKEN_PROMPT]},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        },
        "max_tokens": _integer(0),
        "logprobs": _integer(0, MAX_LOGPROBS),
        "echo": _FLAG,
        "best_of": _integer(1, MAX_CHOICES),
        "suffix": _only(""),
    },
    ("prompt",),
)

CHAT = _object(
    {
        **_SHARED,
        "messages": _MESSAGES,
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "tools": _only([]),
        "tool_choice": _only("none", "auto"),
        "parallel_tool_calls": _FLAG,
        "functions": _only([]),
        "function_call": _only("none", "auto"),
        "modalities": _only(["text"]),
        "audio": _only(),
        "prediction": _only(),
        "web_search_options": _only(),
        "reasoning_effort": _only("none"),
        "verbosity": _only("medium"),
    },
    ("messages",),
)

_ITEM = _object(
    {
        "type": _only("message"),
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": _content(PARTS),
        "id": {},
        "status": {},
        "phase": {},
    },
    ("role", "content"),
)

RESPONSE = _object(
    {
        **_SHARED,
        "n": _only(1),
        "input": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_MESSAGES},
            ]
        },
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": _integer(1),
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": MAX_METADATA,
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
            "description": f"names have {MAX_METADATA_NAME} characters at most",
        },
        "include": _or_null({"type": "array", "items": {"enum": [LOGPROBS]}}),
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "previous_response_id": _only(),
        "conversation": _only(),
        "prompt": _only(),
        "background": _only(False),
        "background_options": _only(),
        "context_management": _only([]),
        "image": _only(),
        "access_programs": _only(),
        "tools": _only([]),
        "tool_choice": _only("none", "auto"),
        "parallel_tool_calls": _FLAG,
        "max_tool_calls": {"description": "has no effect"},
        "truncation": _only("disabled"),
        "reasoning": _only({}, {"effort": "none"}, {"effort": None}),
        "text": _only({}, {"format": {"type": "text"}}),
    },
    ("input",),
)

TOKENIZE: Schema = {
    "anyOf": [
        _object(
            {
                "model": _MODEL,
                "prompt": _TEXT,
                "messages": _only(),
                "add_special_tokens": _FLAG,
                "return_token_strs": _FLAG,
            },
            ("prompt",),
        ),
        _object(
            {
                "model": _MODEL,
                "prompt": _only(),
                "messages": _MESSAGES,
                "add_generation_prompt": _FLAG,
                "add_special_tokens": _FLAG,
                "return_token_strs": _FLAG,
            },
            ("messages",),
        ),
    ]
}

DETOKENIZE = _object({"model": _MODEL, "tokens": _TOKENS}, ("tokens",))
DRAIN = _object({"worker": _TEXT}, ("worker",))

_NO_ADAPTER = _only("")
_TEXT_INSTANCE = _object(
    {
        **_SHARED,
        "n": _only(1),
        "@requestFormat": _only(),
        "dynamic-lora": _NO_ADAPTER,
        "prompt": {"anyOf": [_PROMPT, _TOKEN_PROMPT]},
        "raw_response": _FLAG,
        "max_tokens": _integer(1),
        "best_of": _only(1),
        "echo": _only(False),
        "suffix": _only(""),
        "logprobs": _only(),
        "return_token_ids": _only(False),
    }
)
_CHAT_INSTANCE: Schema = {
    **CHAT,
    "properties": {
        **CHAT["properties"],
        "@requestFormat": {"enum": [CHAT_FORMAT]},
        "dynamic-lora": _NO_ADAPTER,
    },
    "required": ["messages", "@requestFormat"],
}

PREDICTION: Schema = {
    "anyOf": [
        _object(
            {
                "instances": {
                    "type": "array",
                    # Nothing is required of one: parameters may hold it.
                    "items": {"anyOf": [_TEXT_INSTANCE, {**_CHAT_INSTANCE, "required": []}]},
                    "minItems": 1,
                    "maxItems": MAX_INSTANCES,
                    "examples": [[{"prompt": "What is a car?", "max_tokens": 50}]],
                },
                "parameters": {"type": ["object", "null"]},
                "@requestFormat": _only(),
            },
            ("instances",),
        ),
        _CHAT_INSTANCE,
    ]
}
