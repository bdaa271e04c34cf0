"""The body of `/v1/responses`, in its stateless form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.types import MAX_TOP_LOGPROBS, ModelLimits
from router.chat_request import MAX_MESSAGES, read_content
from router.errors import BadRequest
from router.fields import Fields, check_text, show
from router.sampling import RequestOptions, read_options

_ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"
PARTS = ("input_text", "output_text")
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits: pairs, and characters in each one's name and value."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A conversation and what to do with it.

    Attributes:
        messages: as chat templates expect them, the instructions first.
        echoed: fields that the answer repeats as they came.
    """

    messages: list[dict[str, Any]]
    options: RequestOptions
    echoed: dict[str, Any]


def read_response(
    fields: Fields, *, model: str, limits: ModelLimits, defaults: Mapping[str, float]
) -> ResponseRequest:
    """Read and check a response's request.

    Raises:
        BadRequest: a field is wrong, unknown, or its feature is not there.
    """
    messages = _messages(fields)
    _refuse_missing_features(fields)
    max_tokens = fields.optional_integer("max_output_tokens", low=1)
    metadata = _metadata(fields)
    options = read_options(
        fields,
        model=model,
        limits=limits,
        defaults=defaults,
        max_tokens=max_tokens,
        max_tokens_param="max_output_tokens",
        default_max_tokens=None,
        top_logprobs=_top_logprobs(fields),
    )
    fields.finish()
    if options.n != 1:
        raise BadRequest(f"n={options.n} is not supported: a response has one output", param="n")
    echoed = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": max_tokens,
        "metadata": metadata,
    }
    return ResponseRequest(messages, options, echoed)


def _metadata(fields: Fields) -> dict[str, str]:
    value = fields.raw("metadata")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"metadata must be an object, got {show(value)}", param="metadata")
    if len(value) > MAX_METADATA:
        raise BadRequest(
            f"metadata has {len(value)} pairs, the limit is {MAX_METADATA}", param="metadata"
        )
    for name, text in value.items():
        for part, limit in ((name, MAX_METADATA_NAME), (text, MAX_METADATA_VALUE)):
            length = len(check_text(part, "metadata"))
            if length > limit:
                raise BadRequest(
                    f"metadata has a text of {length} characters, the limit is "
                    f"{MAX_METADATA_NAME} in names and {MAX_METADATA_VALUE} in values: "
                    f"{show(part)}",
                    param="metadata",
                )
    return value


def _messages(fields: Fields) -> list[dict[str, Any]]:
    value = fields.raw("input")
    if value is None:
        raise BadRequest("input is required", param="input")
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest(f"input must be a string or a list, got {show(value)}", param="input")
    if not value:
        raise BadRequest("input must not be empty", param="input")
    if len(value) > MAX_MESSAGES:
        raise BadRequest(
            f"input has {len(value)} items, the limit is {MAX_MESSAGES}", param="input"
        )
    messages = [_message(item, f"input[{number}]") for number, item in enumerate(value)]
    instructions = fields.raw("instructions")
    if instructions is not None:
        system = {"role": "system", "content": check_text(instructions, "instructions")}
        messages.insert(0, system)
    return messages


def _message(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be an object, got {show(value)}", param=param)
    fields = Fields(value, prefix=f"{param}.")
    fields.only("type", ["message"], "an item can only be a message")
    role = fields.raw("role")
    if role not in _ROLES:
        raise BadRequest(
            f"{param}.role must be one of {', '.join(_ROLES)}, got {show(role)}",
            param=f"{param}.role",
        )
    content = read_content(fields.raw("content"), f"{param}.content", PARTS)
    fields.ignore(("id", "status", "phase"))  # an earlier answer may be sent back whole
    fields.finish()
    return {"role": "system" if role == "developer" else role, "content": content}


def _top_logprobs(fields: Fields) -> int | None:
    """The number of alternatives per token, or None for no log-probabilities."""
    include = fields.raw("include")
    if include is None:
        include = []
    if not isinstance(include, list) or any(item != LOGPROBS for item in include):
        raise BadRequest(
            f'include may only have "{LOGPROBS}", got {show(include)}', param="include"
        )
    alternatives = fields.optional_integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if include:
        return alternatives or 0
    if alternatives:
        raise BadRequest(
            f'top_logprobs={alternatives} is only allowed with include=["{LOGPROBS}"]',
            param="top_logprobs",
        )
    return None


def _refuse_missing_features(fields: Fields) -> None:
    stateless = "nothing is stored between responses; send the whole conversation as input"
    fields.only("previous_response_id", [], stateless)
    fields.only("conversation", [], stateless)
    fields.only("prompt", [], stateless)
    fields.only("background", [False], "a response is answered at once")
    fields.only("background_options", [], "a response is answered at once")
    fields.only("context_management", [[]], "input is never cut")
    fields.only("image", [], "the model reads text")
    fields.only("access_programs", [], "there are no access programs")
    fields.only("tools", [[]], "tools cannot be called")
    fields.only("tool_choice", ["none", "auto"], "tools cannot be called")
    fields.flag("parallel_tool_calls")
    fields.ignore(("max_tool_calls",))
    fields.only("truncation", ["disabled"], "input is never cut")
    fields.only(
        "reasoning", [{}, {"effort": "none"}, {"effort": None}], "the model has no reasoning"
    )
    fields.only("text", [{}, {"format": {"type": "text"}}], "only plain text can be generated")
