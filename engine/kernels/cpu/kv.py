"""What moves KV, in and out of the pools and within; csrc/kv.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from engine.kernels.cpu.native import target
from engine.kernels.interface import KVPools


def write_kv(pools: KVPools, layer: Any, slots: Array, k: Array, v: Array, live: Any) -> KVPools:
    """See engine.kernels.interface.Kernels."""
    like = tuple(_like(pool) for pool in pools)
    call = jax.ffi.ffi_call(target("write_kv"), like, input_output_aliases={0: 0, 1: 1})
    return KVPools(*call(pools.k, pools.v, jnp.int32(layer), slots, k, v, jnp.int32(live)))


def export_kv(
    pool: Array, slots: Array, live: Any, layers: tuple[Any, int], heads: tuple[Any, int]
) -> Array:
    """See engine.kernels.interface.Kernels. What has no slot in the pool comes out as zeros."""
    (first_layer, layer_count), (first_head, head_count) = layers, heads
    shape = (layer_count, slots.shape[0], head_count, pool.shape[4])
    call = jax.ffi.ffi_call(target("export_kv"), jax.ShapeDtypeStruct(shape, pool.dtype))
    return call(pool, slots, jnp.int32(live), jnp.int32(first_layer), jnp.int32(first_head))


def import_kv(
    pool: Array, slots: Array, live: Any, values: Array, first_layer: Any, first_head: Any
) -> Array:
    """See engine.kernels.interface.Kernels. What has no slot in the pool is dropped."""
    call = jax.ffi.ffi_call(target("import_kv"), _like(pool), input_output_aliases={0: 0})
    return call(pool, slots, jnp.int32(live), values, jnp.int32(first_layer), jnp.int32(first_head))


def copy_blocks(pool: Array, sources: Array, targets: Array, live: Any) -> Array:
    """See engine.kernels.interface.Kernels."""
    call = jax.ffi.ffi_call(target("copy_blocks"), _like(pool), input_output_aliases={0: 0})
    return call(pool, sources, targets, jnp.int32(live))


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
