"""Tiny models with random weights, and JAX engines on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from engine.engine import Engine
from engine.jax_runner import JaxRunner, PoolSpec
from engine.loading import dummy_params
from engine.models.decoder import Params
from engine.models.traits import Traits, traits_of
from engine.programs import Extent, Paddings, program_shapes
from engine.sharding import make_mesh
from engine.types import COLOCATED, Role
from tests.engine.helpers import make_engine

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MAX_MODEL_LEN = 80
MAX_SEQS = 4
CHUNK_TOKENS = 12
POOL_TOKENS = 512


def tiny_traits(**changes: object) -> Traits:
    return traits_of(CONFIG | changes)


def lively(params: Params) -> Params:
    """Weights so wide that the answers vary; biases and norms are drawn too."""
    result = {}
    for index, (name, array) in enumerate(sorted(params.items())):
        noise = np.random.default_rng(index).standard_normal(array.shape).astype(np.float32)
        host = np.asarray(array).astype(np.float32)
        if "norm" in name:
            host = 1 + 0.2 * noise
        elif name.endswith("bias"):
            host = 0.5 * noise
        else:
            host = host * 10
        result[name] = jax.device_put(host.astype(array.dtype), array.sharding)
    return result


def make_runner(
    params: Params,
    traits: Traits,
    roles: Role = COLOCATED,
    block_size: int = 8,
    dtype: Any = np.float32,
    prefill_len: int = 88,
) -> JaxRunner:
    blocks = POOL_TOKENS // block_size
    extent = Extent(MAX_MODEL_LEN + MAX_SEQS, MAX_SEQS, MAX_SEQS, -(-MAX_MODEL_LEN // block_size))
    shapes = program_shapes(roles, extent, Paddings(prefill_len, 4, 4, 8))
    return JaxRunner(
        params,
        traits,
        make_mesh(jax.devices()[:1]),
        PoolSpec(blocks, block_size, dtype),
        shapes,
        max_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
        chunk_tokens=CHUNK_TOKENS,
    )


def tiny_engine(runner: JaxRunner, vocab_size: int = CONFIG["vocab_size"]) -> Engine:
    """A new engine on `runner`, whose pools may hold what an earlier engine left."""
    block_size = runner._block_size
    return make_engine(
        POOL_TOKENS // block_size,
        block_size,
        runner,
        max_seqs=MAX_SEQS,
        max_batch_tokens=MAX_MODEL_LEN + MAX_SEQS,
        max_waiting=32,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=vocab_size,
    )


def tiny_params(traits: Traits, dtype: Any = np.float32) -> Params:
    return lively(dummy_params(traits, dtype, make_mesh(jax.devices()[:1]), seed=0))


def changed(config: Mapping[str, Any], **changes: object) -> dict[str, Any]:
    """`config` with `changes`; None leaves a field out."""
    return {k: v for k, v in (dict(config) | changes).items() if v is not None}
