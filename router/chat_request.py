"""The body of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.types import MAX_TOP_LOGPROBS, ModelLimits
from router.errors import BadRequest
from router.fields import Fields, check_json, check_text, show
from router.sampling import RequestOptions, read_options

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2048
"""A body may hold hundreds of thousands; reading them would hold up every other stream."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and what to do with it.

    Each message is as chat templates expect it: `role`, `content` (a string), and where there
    are any `tool_calls` (their arguments as objects) and `tool_call_id`.
    """

    messages: list[dict[str, Any]]
    options: RequestOptions


def read_chat(
    fields: Fields,
    *,
    model: str,
    limits: ModelLimits,
    defaults: Mapping[str, float],
) -> ChatRequest:
    """Read and check a chat request.

    Raises:
        BadRequest: a field is wrong, unknown, or its feature is not there.
    """
    messages = read_messages(fields)
    _refuse_missing_features(fields)
    older = fields.optional_integer("max_tokens", low=1)
    newer = fields.optional_integer("max_completion_tokens", low=1)
    name = "max_tokens" if newer is None else "max_completion_tokens"
    options = read_options(
        fields,
        model=model,
        limits=limits,
        defaults=defaults,
        max_tokens=older if newer is None else newer,
        max_tokens_param=fields.param(name),
        default_max_tokens=None,
        top_logprobs=_top_logprobs(fields),
    )
    fields.finish()
    return ChatRequest(messages, options)


def _top_logprobs(fields: Fields) -> int | None:
    """The number of alternatives per token, or None for no log-probabilities."""
    wanted = fields.flag("logprobs")
    alternatives = fields.optional_integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if wanted:
        return alternatives or 0
    if alternatives:
        param = fields.param("top_logprobs")
        raise BadRequest(f"{param}={alternatives} is only allowed with logprobs=true", param=param)
    return None


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The field `messages`; see ChatRequest.

    Raises:
        BadRequest: it is missing, or something in it is wrong.
    """
    value, param = fields.raw("messages"), fields.param("messages")
    if value is None:
        raise BadRequest(f"{param} is required", param=param)
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a list, got {show(value)}", param=param)
    if not value:
        raise BadRequest(f"{param} must not be empty", param=param)
    if len(value) > MAX_MESSAGES:
        raise BadRequest(
            f"{param} has {len(value)} messages, the limit is {MAX_MESSAGES}", param=param
        )
    return [_message(item, f"{param}[{number}]") for number, item in enumerate(value)]


def _message(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be an object, got {show(value)}", param=param)
    fields = Fields(value, prefix=f"{param}.")
    role = fields.raw("role")
    if role not in ROLES:
        raise BadRequest(
            f"{param}.role must be one of {', '.join(ROLES)}, got {show(role)}",
            param=f"{param}.role",
        )
    fields.text("name")
    # Clients send an earlier answer back whole, with its empty fields.
    for name in ("function_call", "annotations", "audio", "refusal"):
        fields.only(name, [[]], "messages can only hold text and tool calls")
    # Chat templates know the role by its older name.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "tool":
        message["tool_call_id"] = check_text(fields.raw("tool_call_id"), f"{param}.tool_call_id")
    calls = fields.raw("tool_calls") if role == "assistant" else None
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
    else:
        fields.only("tool_calls", [[]], "only an assistant's message has tool calls")
    content = fields.raw("content")
    # A message that calls tools may have no text; templates expect a string all the same.
    message["content"] = (
        "" if content is None and calls else read_content(content, f"{param}.content")
    )
    fields.finish()
    return message


def _tool_calls(value: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a list, got {show(value)}", param=param)
    return [_tool_call(call, f"{param}[{number}]") for number, call in enumerate(value)]


def _tool_call(value: Any, param: str) -> dict[str, Any]:
    """A call as templates expect it: its arguments are an object, not its JSON."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        raise BadRequest(
            f'{param} must be an object of type "function" with a function, got {show(value)}',
            param=param,
        )
    name = check_text(function.get("name"), f"{param}.function.name")
    text = check_text(function.get("arguments"), f"{param}.function.arguments")
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"{param}.function.arguments must be the JSON of an object, got {show(text)}",
            param=f"{param}.function.arguments",
        )
    check_json(arguments, f"{param}.function.arguments")  # templates write it
    call_id = check_text(value.get("id"), f"{param}.id")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read_content(value: Any, param: str, kinds: Collection[str] = ("text",)) -> str:
    """A message's content as one string: a string, or a list of text parts of these `kinds`.

    Raises:
        BadRequest: it is neither, or a part is no text.
    """
    if value is None:
        raise BadRequest(f"{param} is required", param=param)
    if isinstance(value, list):
        if not value:
            raise BadRequest(f"{param} must not be an empty list", param=param)
        return "\n".join(_part(part, f"{param}[{n}]", kinds) for n, part in enumerate(value))
    if not isinstance(value, str):
        raise BadRequest(
            f"{param} must be a string or a list of text parts, got {show(value)}", param=param
        )
    return check_text(value, param)


def _part(value: Any, param: str, kinds: Collection[str]) -> str:
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be an object, got {show(value)}", param=param)
    kind = value.get("type")
    if kind not in kinds:
        raise BadRequest(
            f"{param}.type={show(kind)} is not supported: the model reads text, in parts of type "
            f"{' or '.join(map(show, kinds))}",
            param=f"{param}.type",
        )
    return check_text(value.get("text"), f"{param}.text")


def _refuse_missing_features(fields: Fields) -> None:
    fields.only("tools", [[]], "tools cannot be called")
    fields.only("tool_choice", ["none", "auto"], "tools cannot be called")
    fields.flag("parallel_tool_calls")
    fields.only("functions", [[]], "functions cannot be called")
    fields.only("function_call", ["none", "auto"], "functions cannot be called")
    fields.only("modalities", [["text"]], "only text can be generated")
    fields.only("audio", [], "only text can be generated")
    fields.only("prediction", [], "predicted outputs are not used")
    fields.only("web_search_options", [], "the web cannot be searched")
    fields.only("reasoning_effort", ["none"], "the model has no reasoning effort")
    fields.only("verbosity", ["medium"], "the model has no verbosity")
