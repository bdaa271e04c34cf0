"""SamplingParams ↔ the wire's Sampling. What comes from the wire is checked here, once."""

from __future__ import annotations

import math

from engine.types import (
    MAX_HELD_STOPS,
    MAX_LOGIT_BIASES,
    MAX_TOKEN_ID,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from protos import worker_pb2 as wire
from protos.errors import WireError


def encode_sampling(sampling: SamplingParams) -> wire.Sampling:
    return wire.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        bias_ids=[token for token, _ in sampling.logit_bias],
        bias_values=[value for _, value in sampling.logit_bias],
        top_logprobs=sampling.top_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def decode_sampling(message: wire.Sampling) -> SamplingParams:
    """The inverse of `encode_sampling`.

    Raises:
        WireError: a field is out of range; names it.
    """
    if len(message.bias_ids) != len(message.bias_values):
        raise WireError(
            f"sampling: {len(message.bias_values)} biases for {len(message.bias_ids)} tokens"
        )
    top_logprobs = message.top_logprobs if message.HasField("top_logprobs") else None
    of_prompt = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    sampling = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        min_tokens=message.min_tokens,
        logit_bias=tuple(zip(message.bias_ids, message.bias_values, strict=True)),
        top_logprobs=top_logprobs,
        prompt_logprobs=of_prompt,
    )
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    checks = {
        "temperature": 0 <= sampling.temperature < math.inf,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "penalties": all(math.isfinite(p) for p in penalties),
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
        "max_tokens": sampling.max_tokens >= 1,
        "min_tokens": sampling.min_tokens <= sampling.max_tokens,
        "stop_token_ids": max(sampling.stop_token_ids, default=0) <= MAX_TOKEN_ID
        and (not sampling.min_tokens or len(sampling.stop_token_ids) <= MAX_HELD_STOPS),
        "logit_bias": len(dict(sampling.logit_bias)) == len(sampling.logit_bias) <= MAX_LOGIT_BIASES
        and max(message.bias_ids, default=0) <= MAX_TOKEN_ID
        and all(math.isfinite(value) for _, value in sampling.logit_bias),
        "top_k": sampling.top_k < 2**31,
        "top_logprobs": (top_logprobs or 0) <= MAX_TOP_LOGPROBS,
        "prompt_logprobs": (of_prompt or 0) <= MAX_TOP_LOGPROBS,
    }
    wrong = [name for name, holds in checks.items() if not holds]
    if wrong:
        raise WireError(f"sampling: {', '.join(wrong)} out of range")
    return sampling
