"""A prompt's log-probabilities: put together from what a worker tells, and as answers have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoint.tokenizer import Tokenizer
from engine.types import PromptLogprobs, SequenceId, TokenLogprobs
from router.logprobs import completion_logprobs
from router.output import ScoredToken

_INLINE_TOKENS = 256
"""Fewer are told in less time than a thread switch is worth."""


class PromptScores:
    """The pieces of one attempt, each token's once.

    Args:
        count: prompt tokens that have log-probabilities: all but the first.
    """

    def __init__(self, count: int) -> None:
        self._missing = count
        self._pieces: dict[int, PromptLogprobs] = {}

    @property
    def complete(self) -> bool:
        return self._missing <= 0

    def add(self, piece: PromptLogprobs) -> None:
        """Take a piece in whatever order; one that is there already is ignored."""
        if piece.start not in self._pieces:
            self._pieces[piece.start] = piece
            self._missing -= len(piece.logprobs)

    def whole(self, sequence: SequenceId) -> PromptLogprobs:
        """All pieces as one; once `complete`."""
        pieces = [self._pieces[start] for start in sorted(self._pieces)]
        if not pieces:
            none = np.zeros((0, 0), np.float32)
            return PromptLogprobs(sequence, 1, none.ravel(), none.astype(np.int32), none)
        return PromptLogprobs(
            sequence,
            pieces[0].start,
            np.concatenate([piece.logprobs for piece in pieces]),
            np.concatenate([piece.top_ids for piece in pieces]),
            np.concatenate([piece.top_logprobs for piece in pieces]),
        )


async def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    scores: PromptLogprobs,
    *,
    skip_special_tokens: bool,
) -> dict[str, list[Any]]:
    """The prompt's part of a completion's `logprobs`, null for the first token.

    Long ones are told in a thread: they would hold up every other stream.
    """
    if len(prompt) <= _INLINE_TOKENS:
        return _told(tokenizer, prompt, scores, skip_special_tokens)
    return await asyncio.to_thread(_told, tokenizer, prompt, scores, skip_special_tokens)


def _told(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptLogprobs, skip_special_tokens: bool
) -> dict[str, list[Any]]:
    decoder = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    offset, offsets = 0, []
    for token in prompt:
        offsets.append(offset)
        offset += len(decoder.push((token,)))
    rows = zip(
        prompt[1:],
        scores.logprobs.tolist(),
        scores.top_ids.tolist(),
        scores.top_logprobs.tolist(),
        offsets[1:],
        strict=True,
    )
    told = completion_logprobs(
        tokenizer,
        [
            ScoredToken(token, TokenLogprobs(own, tuple(ids), tuple(values)), at)
            for token, own, ids, values, at in rows
        ],
    )
    first = {
        "tokens": tokenizer.token_text(prompt[0]),
        "token_logprobs": None,
        "top_logprobs": None,
        "text_offset": 0,
    }
    return {name: [first[name], *values] for name, values in told.items()}
