"""Sampling and log-probabilities; csrc/sample.cc, csrc/score.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from engine.kernels.cpu.native import target
from engine.sampling import RowParams, Sampled, Scores, SlotBiases
from engine.types import MAX_TOP_LOGPROBS


def sample(
    logits: Array, params: RowParams, counts: Array, biases: SlotBiases, num_rows: Any
) -> tuple[Sampled, Array]:
    """See engine.sampling.sample. No two live rows have the same slot."""
    rows, vocab = logits.shape
    best = (rows, min(MAX_TOP_LOGPROBS, vocab))
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct(best, jnp.int32),
        jax.ShapeDtypeStruct(best, jnp.float32),
        jax.ShapeDtypeStruct(counts.shape, counts.dtype),
    )
    operands = (logits, *params, *biases, counts, jnp.int32(num_rows))
    aliases = {len(operands) - 2: len(results) - 1}
    call = jax.ffi.ffi_call(target("sample"), results, input_output_aliases=aliases)
    *sampled, after = call(*operands)
    return Sampled(*sampled), after


def score(logits: Array, tokens: Array, num_rows: Any) -> Scores:
    """See engine.sampling.score."""
    rows, vocab = logits.shape
    best = (rows, min(MAX_TOP_LOGPROBS, vocab))
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct(best, jnp.int32),
        jax.ShapeDtypeStruct(best, jnp.float32),
    )
    call = jax.ffi.ffi_call(target("score"), results)
    return Scores(*call(logits, tokens, jnp.int32(num_rows)))
