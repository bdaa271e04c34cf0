"""Attention and what prepares its operands; csrc/attention.cc, csrc/rotate.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.kernels.cpu.native import target
from engine.kernels.interface import AttentionSpec, Batch, KVPools, UnsupportedShape

_LEAST_HEAD_DIM, _MOST_HEAD_DIM = 16, 256


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse heads that `attention` does not compute.

    Raises:
        UnsupportedShape: names the size and the limit.
    """
    if head_dim % 2 or not _LEAST_HEAD_DIM <= head_dim <= _MOST_HEAD_DIM:
        raise UnsupportedShape(
            f"head_dim={head_dim}: the CPU kernels take even ones from {_LEAST_HEAD_DIM} to "
            f"{_MOST_HEAD_DIM}"
        )
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise UnsupportedShape(
            f"{heads} heads share {kv_heads} KV heads: the CPU kernels take multiples alone"
        )


def rotate(q: Array, k: Array, angles: Array, positions: Array, live: Any) -> tuple[Array, Array]:
    """See engine.kernels.interface.Kernels."""
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
    # Not in place: XLA would copy q and k before, on one thread.
    call = jax.ffi.ffi_call(target("rotate"), like)
    q, k = call(q, k, angles, positions, jnp.int32(live))
    return q, k


def attention(q: Array, pools: KVPools, layer: Any, batch: Batch, spec: AttentionSpec) -> Array:
    """See engine.kernels.interface.Kernels."""
    check_heads(q.shape[1], pools.k.shape[3], q.shape[2])
    call = jax.ffi.ffi_call(target("attention"), jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        pools.k,
        pools.v,
        jnp.int32(layer),
        batch.starts,
        batch.tables,
        batch.kv_lens,
        jnp.int32(batch.num_rows),
        scale=np.float32(spec.scale),
        soft_cap=np.float32(spec.soft_cap or 0),
        window=np.int64(spec.window or 0),
        chunk=np.int64(spec.chunk or 0),
    )
