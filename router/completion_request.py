"""The body of `/v1/completions`, and of an instance of `/generate`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from engine.types import ModelLimits
from router.errors import BadRequest
from router.fields import Fields, check_text, show
from router.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    RequestOptions,
    check_token_ids,
    read_options,
)

MAX_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A prompt, as text or as token ids, and what to do with it."""

    prompt: str | list[int]
    options: RequestOptions


def read_completion(
    fields: Fields,
    *,
    model: str,
    limits: ModelLimits,
    defaults: Mapping[str, float],
    seeds: random.Random,
) -> CompletionRequest:
    """Read and check a completion request.

    Raises:
        BadRequest: a field is wrong, unknown, or its feature is not there.
    """
    prompt = _prompt(fields, limits)
    fields.only("echo", [False], "the prompt cannot be part of the answer")
    fields.only("suffix", [""], "text cannot be filled in before a suffix")
    fields.only("best_of", [1], "one choice per request is generated")
    options = read_options(
        fields,
        model=model,
        limits=limits,
        defaults=defaults,
        seeds=seeds,
        max_tokens=fields.optional_integer("max_tokens", low=1),
        max_tokens_param=fields.param("max_tokens"),
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        top_logprobs=fields.optional_integer("logprobs", low=0, high=MAX_LOGPROBS),
    )
    fields.finish()
    return CompletionRequest(prompt, options)


def _prompt(fields: Fields, limits: ModelLimits) -> str | list[int]:
    value, param = fields.raw("prompt"), fields.param("prompt")
    if value is None:
        raise BadRequest(f"{param} is required", param=param)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise BadRequest(
                f"{param} is a list of {len(value)} prompts, the limit is 1 per request",
                param=param,
            )
        value = value[0]
    if not isinstance(value, str | list):
        raise BadRequest(
            f"{param} must be a string or a list of token ids, got {show(value)}", param=param
        )
    if not value:
        raise BadRequest(f"{param} must not be empty", param=param)
    if isinstance(value, str):
        return check_text(value, param)
    if len(value) >= limits.max_model_len:
        return value  # refused for its length by `fit`, without a look at millions of ids
    return check_token_ids(value, param, limits.vocab_size)
