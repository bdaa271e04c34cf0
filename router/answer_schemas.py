"""The answers as JSON Schema, for the API's description."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKENS: Schema = {"type": "array", "items": _COUNT}
_FINISH: Schema = {"enum": ["stop", "length"]}


def _object(**properties: Schema) -> Schema:
    """All of them are there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _constant(value: str) -> Schema:
    return {"type": "string", "enum": [value]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = _object(
    error=_object(
        message=_TEXT,
        type=_TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    )
)

_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)

_COMPLETION_LOGPROBS = _object(
    tokens=_list(_TEXT),
    # null for the first token of a prompt that is told as well
    token_logprobs=_list(_or_null({"type": "number"})),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": {"type": "number"}})),
    text_offset=_list(_COUNT),
)
COMPLETION = _object(
    id=_TEXT,
    object=_constant("text_completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(
        _object(
            index=_COUNT,
            text=_TEXT,
            logprobs=_or_null(_COMPLETION_LOGPROBS),
            finish_reason=_FINISH,
        )
    ),
    usage=_USAGE,
)

_SCORED = _object(token=_TEXT, logprob={"type": "number"}, bytes=_TOKENS)
_SCORED_WITH_TOP: Schema = {
    **_SCORED,
    "properties": {**_SCORED["properties"], "top_logprobs": _list(_SCORED)},
    "required": [*_SCORED["required"], "top_logprobs"],
}
CHAT = _object(
    id=_TEXT,
    object=_constant("chat.completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(
        _object(
            index=_COUNT,
            message=_object(role=_constant("assistant"), content=_TEXT, refusal={"type": "null"}),
            logprobs=_or_null(_object(content=_list(_SCORED_WITH_TOP), refusal={"type": "null"})),
            finish_reason=_FINISH,
        )
    ),
    usage=_USAGE,
)

RESPONSE = _object(
    id=_TEXT,
    object=_constant("response"),
    created_at=_COUNT,
    status={"enum": ["completed", "incomplete"]},
    model=_TEXT,
    output=_list(
        _object(
            id=_TEXT,
            type=_constant("message"),
            role=_constant("assistant"),
            status={"enum": ["completed", "incomplete"]},
            content=_list(
                _object(
                    type=_constant("output_text"),
                    text=_TEXT,
                    annotations={"type": "array", "maxItems": 0},
                    logprobs=_list(_SCORED_WITH_TOP),
                )
            ),
        )
    ),
    incomplete_details=_or_null(_object(reason=_constant("max_output_tokens"))),
    usage=_object(
        input_tokens=_COUNT,
        input_tokens_details=_object(cached_tokens=_COUNT),
        output_tokens=_COUNT,
        output_tokens_details=_object(reasoning_tokens=_COUNT),
        total_tokens=_COUNT,
    ),
)

PREDICTION: Schema = {
    "anyOf": [
        _object(predictions={"anyOf": [_list({"anyOf": [_TEXT, CHAT]}), CHAT]}),
        CHAT,
    ]
}

EVENT: Schema = {
    "description": "Each server-sent event of an answer with stream=true. `data` is a chunk's "
    "JSON, an error's, or [DONE].",
    "type": "object",
    "properties": {"event": _TEXT, "data": _TEXT},
    "required": ["data"],
}

MODEL = _object(
    id=_TEXT,
    object=_constant("model"),
    created=_COUNT,
    owned_by=_TEXT,
    max_model_len={"type": ["integer", "null"]},
)
MODELS = _object(object=_constant("list"), data=_list(MODEL))

TOKENIZE = _object(
    count=_COUNT,
    max_model_len=_COUNT,
    tokens=_TOKENS,
    token_strs=_or_null(_list(_TEXT)),
)
DETOKENIZE = _object(prompt=_TEXT)
DRAIN = _object(worker=_TEXT, state=_TEXT)
VERSION = _object(version=_TEXT)
HEALTH: Schema = {"type": "object"}
