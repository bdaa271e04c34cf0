"""Log-probabilities of prompt tokens, on the device, in bounded memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.batches import PromptTargets
from engine.models.decoder import Decoder, Params
from engine.programs import SCORED_TOKENS
from engine.sampling import Scores
from engine.types import MAX_TOP_LOGPROBS


def score_prompt(decoder: Decoder, params: Params, x: Array, targets: PromptTargets) -> Scores:
    """Scores of the first `targets.count` targets; those of the others are zeros or anything.

    The logits of SCORED_TOKENS tokens are there at once. Without a target nothing is computed.

    Args:
        x: [T, hidden], states of the batch's tokens as `Decoder.forward` gives them.
    """
    rows, best = targets.tokens.shape[0], min(MAX_TOP_LOGPROBS, decoder.traits.vocab)
    empty = Scores(
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, best), jnp.int32),
        jnp.zeros((rows, best), jnp.float32),
    )

    def one_tile(index: Array, out: Scores) -> Any:
        start = index * SCORED_TOKENS  # in `rows`, a multiple of it: no slice is moved back
        places, tokens = (
            lax.dynamic_slice_in_dim(part, start, SCORED_TOKENS)
            for part in (targets.places, targets.tokens)
        )
        live = jnp.minimum(targets.count - start, SCORED_TOKENS)
        scores = decoder.kernels.score(decoder.logits(params, x[places], live), tokens, live)
        return jax.tree.map(
            lambda o, s: lax.dynamic_update_slice_in_dim(o, s, start, 0), out, scores
        )

    tiles = (targets.count + SCORED_TOKENS - 1) // SCORED_TOKENS
    result: Scores = lax.fori_loop(0, tiles, one_tile, empty)
    return result
