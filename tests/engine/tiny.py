"""Tiny models with random weights, and JAX engines on them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from engine.engine import Engine
from engine.jax_runner import JaxRunner, PoolSpec
from engine.kernels.choose import KernelsUnavailable, choose_kernels
from engine.models.decoder import Params
from engine.models.families import traits_of
from engine.models.traits import Traits
from engine.models.weights import declare_weights
from engine.pace import Pace
from engine.placing import Placement, place_params, plan_placement
from engine.programs import Extent, Paddings, program_shapes
from engine.sharding import make_mesh
from engine.types import COLOCATED, Role
from tests.engine.helpers import make_engine

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
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


def tiny_tensors(traits: Traits) -> dict[str, np.ndarray]:
    """A checkpoint with weights so wide that the answers vary; float32, by tensor name."""
    tensors = {}
    for weight in declare_weights(traits).values():
        for name in weight.source_names():
            noise = np.random.default_rng(zlib.crc32(name.encode()))
            values = noise.standard_normal(weight.shape).astype(np.float32)
            if "norm" in name:
                values = 1 + 0.2 * values
            else:
                values *= 0.5 if name.endswith("bias") else 0.2
            tensors[name] = values
    return tensors


def tiny_placement(
    traits: Traits,
    kernels: str = "reference",
    shards: int = 1,
    dtype: Any = np.float32,
    first_device: int = 0,
) -> Placement:
    """Skips the test where these kernels do not run."""
    try:
        chosen = choose_kernels("cpu", kernels)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    mesh = make_mesh(jax.devices()[first_device : first_device + shards])
    return plan_placement(traits, chosen, mesh, dtype)


def make_runner(
    params: Params,
    placement: Placement,
    roles: Role = COLOCATED,
    block_size: int = 8,
    dtype: Any = np.float32,
    prefill_len: int = 88,
    max_model_len: int = MAX_MODEL_LEN,
    windowed_blocks: int | None = None,
) -> JaxRunner:
    blocks = POOL_TOKENS // block_size
    extent = Extent(max_model_len + MAX_SEQS, MAX_SEQS, MAX_SEQS, -(-max_model_len // block_size))
    shapes = program_shapes(roles, extent, Paddings(prefill_len, 4, 4, 8))
    return JaxRunner(
        params,
        placement,
        PoolSpec(blocks, block_size, dtype, windowed_blocks),
        shapes,
        max_seqs=MAX_SEQS,
        max_model_len=max_model_len,
        chunk_tokens=CHUNK_TOKENS,
    )


def tiny_engine(
    runner: JaxRunner,
    vocab_size: int = CONFIG["vocab_size"],
    pace: Pace | None = None,
    **limits: int,
) -> Engine:
    """A new engine on `runner`, whose pools may hold what an earlier engine left."""
    block_size = runner._block_size
    return make_engine(
        POOL_TOKENS // block_size,
        block_size,
        runner,
        pace,
        **{
            "max_seqs": MAX_SEQS,
            "max_batch_tokens": MAX_MODEL_LEN + MAX_SEQS,
            "max_waiting": 32,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": vocab_size,
            **limits,
        },
    )


def tiny_params(
    placement: Placement,
    dtype: Any = np.float32,
    positions: int = MAX_MODEL_LEN,
    quantization: str = "none",
) -> Params:
    tensors = tiny_tensors(placement.traits)
    return place_params(placement, tensors.__getitem__, dtype, positions, quantization)


def changed(config: Mapping[str, Any], **changes: object) -> dict[str, Any]:
    """`config` with `changes`; None leaves a field out."""
    return {k: v for k, v in (dict(config) | changes).items() if v is not None}
