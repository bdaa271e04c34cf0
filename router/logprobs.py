"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpoint.tokenizer import Tokenizer
from router.output import ScoredToken

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def completion_logprobs(
    tokenizer: Tokenizer, scored: Sequence[ScoredToken], before: int = 0
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of a completion, `before` characters of which come before the output.

    `top_logprobs` holds the chosen token as well, also where it is not among the likeliest.
    """
    return {
        "tokens": [tokenizer.token_text(item.token) for item in scored],
        "token_logprobs": [_finite(item.logprobs.logprob) for item in scored],
        "top_logprobs": [_top_by_text(tokenizer, item) for item in scored],
        "text_offset": [before + item.text_offset for item in scored],
    }


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for item in scored:
        entry = _chat_entry(tokenizer, item.token, item.logprobs.logprob)
        entry["top_logprobs"] = [
            _chat_entry(tokenizer, token, logprob)
            for token, logprob in zip(
                item.logprobs.top_ids, item.logprobs.top_logprobs, strict=True
            )
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _top_by_text(tokenizer: Tokenizer, item: ScoredToken) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, logprob in zip(item.logprobs.top_ids, item.logprobs.top_logprobs, strict=True):
        # Tokens may share a text (parts of characters do): the likeliest is kept.
        top.setdefault(tokenizer.token_text(token), _finite(logprob))
    top.setdefault(tokenizer.token_text(item.token), _finite(item.logprobs.logprob))
    return top


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
