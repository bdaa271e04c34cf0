"""The body of `/v1/completions`, and of an instance of `/generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.types import ModelLimits
from protos.codec import MAX_CHOICES
from router.errors import BadRequest
from router.fields import Fields, check_text, show
from router.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    RequestOptions,
    check_token_ids,
    read_options,
)

MAX_LOGPROBS = 5
MAX_PROMPTS = 1024
MAX_SEQUENCES = 2048
"""Prompts of a request times the candidates of each."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Prompts, each as text or as token ids, and what to do with them.

    Attributes:
        candidates: outputs computed for each prompt, of which `options.n` are kept.
        echo: each answer begins with its prompt.
    """

    prompts: list[str | list[int]]
    options: RequestOptions
    candidates: int
    echo: bool


def read_completion(
    fields: Fields,
    *,
    model: str,
    limits: ModelLimits,
    defaults: Mapping[str, float],
) -> CompletionRequest:
    """Read and check a completion request.

    Raises:
        BadRequest: a field is wrong, unknown, or its feature is not there.
    """
    prompts = _prompts(fields, limits)
    fields.only("suffix", [""], "text cannot be filled in before a suffix")
    echo = fields.flag("echo")
    options = read_options(
        fields,
        model=model,
        limits=limits,
        defaults=defaults,
        # With echo, 0 asks for the prompt alone.
        max_tokens=fields.optional_integer("max_tokens", low=0 if echo else 1),
        max_tokens_param=fields.param("max_tokens"),
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        top_logprobs=fields.optional_integer("logprobs", low=0, high=MAX_LOGPROBS),
    )
    if echo:
        sampling = options.sampling
        sampling = dataclasses.replace(sampling, prompt_logprobs=sampling.top_logprobs)
        options = dataclasses.replace(options, sampling=sampling)
    candidates = _candidates(fields, options)
    fields.finish()
    if len(prompts) * candidates > MAX_SEQUENCES:
        param = fields.param("prompt")
        raise BadRequest(
            f"{param} has {len(prompts)} prompts, of {candidates} choices each: the limit is "
            f"{MAX_SEQUENCES} choices per request",
            param=param,
        )
    return CompletionRequest(prompts, options, candidates, echo)


def _candidates(fields: Fields, options: RequestOptions) -> int:
    """How many outputs of a prompt are computed."""
    best_of = fields.optional_integer("best_of", low=1, high=MAX_CHOICES)
    if best_of is None or best_of == options.n:
        return options.n
    param = fields.param("best_of")
    if best_of < options.n:
        raise BadRequest(
            f"{param}={best_of} is less than {fields.param('n')}={options.n}", param=param
        )
    if options.stream:
        raise BadRequest(
            f"{param}={best_of} cannot be streamed: which outputs are best is known at their end",
            param=param,
        )
    return best_of


def _prompts(fields: Fields, limits: ModelLimits) -> list[str | list[int]]:
    value, param = fields.raw("prompt"), fields.param("prompt")
    if value is None:
        raise BadRequest(f"{param} is required", param=param)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise BadRequest(
                f"{param} is a list of {len(value)} prompts, the limit is {MAX_PROMPTS}",
                param=param,
            )
        return [_prompt(item, f"{param}[{n}]", limits) for n, item in enumerate(value)]
    return [_prompt(value, param, limits)]


def _prompt(value: Any, param: str, limits: ModelLimits) -> str | list[int]:
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
