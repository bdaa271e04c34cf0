"""Where windows and chunks end, by hand: as Hugging Face's transformers masks them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from engine.kernels.batch import Batch
from engine.kernels.interface import AttentionSpec, Kernels, KVPools

TOKENS, HEAD_DIM = 8, 16

CASES = {
    "causal": (AttentionSpec(1.0), {0: {0}, 5: {0, 1, 2, 3, 4, 5}, 7: set(range(8))}),
    # A window of n is the token itself and the n - 1 before it: key > query - n.
    "window": (AttentionSpec(1.0, window=3), {0: {0}, 2: {0, 1, 2}, 3: {1, 2, 3}, 7: {5, 6, 7}}),
    "window of one": (AttentionSpec(1.0, window=1), {0: {0}, 1: {1}, 7: {7}}),
    # key // n == query // n.
    "chunk": (AttentionSpec(1.0, chunk=3), {2: {0, 1, 2}, 3: {3}, 5: {3, 4, 5}, 7: {6, 7}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_query_sees_what_its_layer_lets_it_see(kernels: Kernels, case: str) -> None:
    spec, wanted = CASES[case]
    # Queries of zero weigh alike what they see; the value at position p is 1 in dimension p alone.
    values = np.eye(TOKENS, HEAD_DIM, dtype=np.float32).reshape(1, 1, TOKENS, 1, HEAD_DIM)
    q = np.zeros((TOKENS, 1, HEAD_DIM), np.float32)
    batch = Batch(
        np.zeros(TOKENS, np.int32), np.array([0, TOKENS], np.int32), np.zeros((1, 1), np.int32),
        np.array([TOKENS], np.int32), np.int32(1), np.int32(0), np.int32(TOKENS),
    )  # fmt: skip
    attend = jax.jit(kernels.attention, static_argnums=4)
    out = np.asarray(attend(q, KVPools(values, values), np.int32(0), batch, spec))
    seen = {query: set(np.flatnonzero(out[query, 0])) for query in wanted}
    assert seen == wanted
