"""What a sequence needs of its slot on the devices, beside its last token. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.plan import LoadBiases, LoadTokenCounts
from engine.sequence import Sequence


def slot_loads(sequence: Sequence) -> Iterator[LoadTokenCounts | LoadBiases]:
    """The entries that fill the slot of a sequence that has just got it."""
    sampling = sequence.sampling
    if sampling.needs_token_counts:
        prompt = sequence.request.prompt
        yield LoadTokenCounts(sequence.slot, prompt, tuple(sequence.tokens[len(prompt) :]))
    # Stop tokens are last: without them, once they are allowed, fewer entries apply.
    held = sorted(sampling.stop_token_ids) if sampling.min_tokens else []
    if sampling.logit_bias or held:
        ids = (*(token for token, _ in sampling.logit_bias), *held)
        values = (*(value for _, value in sampling.logit_bias), *(-math.inf for _ in held))
        yield LoadBiases(sequence.slot, ids, values)


def biases_at(sequence: Sequence, position: int) -> int:
    """How many of the slot's biases apply to the token that is sampled for `position`."""
    sampling = sequence.sampling
    held = position - len(sequence.request.prompt) < sampling.min_tokens
    return len(sampling.logit_bias) + (len(sampling.stop_token_ids) if held else 0)
