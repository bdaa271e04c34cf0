"""KV write, export, import and block copy in jax.numpy, in place.

A bfloat16 pool is stored as uint16 on CPU, where a bfloat16 scatter would copy the whole pool.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from engine.kernels.interface import KVPools


def storage_dtype(dtype: Any, platform: str) -> np.dtype:
    """The dtype that a pool of `dtype` is stored in."""
    if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16:
        return np.dtype(np.uint16)
    return jnp.dtype(dtype)


def to_storage(values: Array, storage: Any) -> Array:
    """`values` as the pool stores them: rounded to its dtype, or the bits of that."""
    if storage == jnp.uint16:
        return lax.bitcast_convert_type(values.astype(jnp.bfloat16), storage)
    return values.astype(storage)


def from_storage(stored: Array) -> Array:
    """The inverse of `to_storage`."""
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def write_kv(pools: KVPools, layer: Any, slots: Array, k: Array, v: Array, live: Any) -> KVPools:
    slots = _live_only(slots, live)
    pairs = zip(pools, (k, v), strict=True)
    return KVPools(*(_scatter(pool, (layer,), slots, rows) for pool, rows in pairs))


def export_kv(
    pool: Array, slots: Array, live: Any, layers: tuple[Any, int], heads: tuple[Any, int]
) -> Array:
    by_slot = _by_slot(pool)
    if layers[1] == pool.shape[0]:
        rows = jnp.take(by_slot, slots, axis=1, mode="clip")
    else:
        rows = by_slot.at[_span(layers)[:, None], slots[None, :]].get(mode="clip")
    if heads[1] == pool.shape[3]:
        return rows
    return lax.dynamic_slice_in_dim(rows, heads[0], heads[1], axis=2)


def import_kv(
    pool: Array, slots: Array, live: Any, values: Array, first_layer: Any, first_head: Any
) -> Array:
    slots = _live_only(slots, live)
    layers, heads = (first_layer, values.shape[0]), (first_head, values.shape[2])
    if layers[1] == pool.shape[0] and heads[1] == pool.shape[3]:
        return _by_slot(pool).at[:, slots].set(values, mode="drop").reshape(pool.shape)
    index = (
        _span(layers)[:, None, None], slots[None, :, None], _span(heads)[None, None, :]
    )  # fmt: skip
    return _by_slot(pool).at[index].set(values, mode="drop").reshape(pool.shape)


def copy_blocks(pool: Array, sources: Array, targets: Array, live: Any) -> Array:
    copied = jnp.take(pool, sources, axis=1, mode="clip")
    return pool.at[:, _live_only(targets, live)].set(copied, mode="drop")


def _by_slot(pool: Array) -> Array:
    """View [layers, blocks, block_size, ...] as [layers, slots, ...]; free of cost."""
    return pool.reshape(pool.shape[0], pool.shape[1] * pool.shape[2], *pool.shape[3:])


def _span(first_and_count: tuple[Any, int]) -> Array:
    first, count = first_and_count
    return first + jnp.arange(count, dtype=jnp.int32)


def _live_only(places: Array, live: Any) -> Array:
    """`places`, those from `live` on moved outside of any pool."""
    outside = jnp.iinfo(jnp.int32).max
    return jnp.where(jnp.arange(places.shape[0], dtype=jnp.int32) < live, places, outside)


def _scatter(pool: Array, index: tuple[Any, ...], slots: Array, values: Array) -> Array:
    stored = to_storage(values, pool.dtype)
    if slots.shape[0] == 1:
        # XLA turns a scatter of one row into something that copies the whole pool, twice a
        # layer: add a second row that is dropped.
        outside = jnp.full((1,), jnp.iinfo(slots.dtype).max, slots.dtype)
        slots = jnp.concatenate([slots, outside])
        stored = jnp.concatenate([stored, stored])
    return _by_slot(pool).at[(*index, slots)].set(stored, mode="drop").reshape(pool.shape)
