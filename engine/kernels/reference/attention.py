"""Ragged paged attention in jax.numpy.

Live counts are run-time scalars that bound the loops, so padding costs little: no block
beyond a sequence's length is read.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from engine.kernels.batch import Batch
from engine.kernels.interface import AttentionSpec, KVPools
from engine.kernels.reference.kv import from_storage

QUERY_TILE = 64  # query tokens of one attention tile
KV_TILE_TOKENS = 256  # KV tokens of one attention tile

_MASKED = -1e30


def _visible(query: Array, key: Array, spec: AttentionSpec) -> Array:
    """Which keys [.., t] at positions `key` the queries at `query` [n, ..] see."""
    seen = key <= query
    if spec.window is not None:
        seen &= key > query - spec.window
    if spec.chunk is not None:
        seen &= key // spec.chunk == query // spec.chunk
    return seen


def _first_visible(query: Array, spec: AttentionSpec) -> Any:
    """The first position that a query at `query`, or any later one, sees."""
    first = jnp.int32(0)
    if spec.window is not None:
        first = jnp.maximum(first, query - spec.window + 1)
    if spec.chunk is not None:
        first = jnp.maximum(first, query // spec.chunk * spec.chunk)
    return first


def attention(
    queries: Array, pools: KVPools, layer: Any, batch: Batch, spec: AttentionSpec
) -> Array:
    """See engine.kernels.interface.Kernels; here padding rows are zero."""
    total, heads, head_dim = queries.shape
    k_pool, v_pool = pools
    block_size, kv_heads = k_pool.shape[2], k_pool.shape[3]
    group = heads // kv_heads
    table_blocks = max(1, KV_TILE_TOKENS // block_size)
    kv_tile = table_blocks * block_size
    # A slice of a table must never be moved back to fit: pad to whole tiles.
    pad = -batch.tables.shape[1] % table_blocks
    tables = jnp.pad(batch.tables, ((0, 0), (0, pad)))
    grouped = queries.reshape(total, kv_heads, group, head_dim)

    def attend(tile: Array, row: Array, first: Array) -> Array:
        """[n, kv_heads, group, head_dim] for queries of one row at positions first + i."""
        count = tile.shape[0]
        query_position = first + jnp.arange(count, dtype=jnp.int32)
        length = jnp.minimum(batch.kv_lens[row], first + count)

        def one_kv_tile(index: Array, carry: tuple[Array, Array, Array]) -> Any:
            top, total_weight, mixed = carry
            blocks = lax.dynamic_slice(tables[row], (index * table_blocks,), (table_blocks,))
            keys = from_storage(k_pool[layer, blocks])
            values = from_storage(v_pool[layer, blocks])
            keys = keys.reshape(kv_tile, kv_heads, head_dim)
            values = values.reshape(kv_tile, kv_heads, head_dim)
            scores = spec.scale * jnp.einsum(
                "nhgd,thd->hgnt", tile, keys, preferred_element_type=jnp.float32
            )
            if spec.soft_cap is not None:
                scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
            position = index * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)
            # Other slots may hold another sequence's NaN, and 0 * NaN is NaN.
            own = (position < length) & (position >= _first_visible(first, spec))
            values = jnp.where(own[:, None, None], values, 0)
            visible = _visible(query_position[:, None], position[None, :], spec)
            scores = jnp.where(visible, scores, _MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
            faded = jnp.exp(top - new_top)
            added = jnp.einsum(
                "hgnt,thd->hgnd",
                weights.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            total_weight = total_weight * faded + weights.sum(axis=-1)
            return new_top, total_weight, mixed * faded[..., None] + added

        start = (
            jnp.full((kv_heads, group, count), _MASKED, jnp.float32),
            jnp.zeros((kv_heads, group, count), jnp.float32),
            jnp.zeros((kv_heads, group, count, head_dim), jnp.float32),
        )
        tiles = (length + kv_tile - 1) // kv_tile
        _, total_weight, mixed = lax.fori_loop(0, tiles, one_kv_tile, start)
        result = mixed / jnp.maximum(total_weight, 1e-30)[..., None]
        return result.transpose(2, 0, 1, 3).astype(queries.dtype)

    def single(row: Array, out: Array) -> Array:
        tile = lax.dynamic_slice_in_dim(grouped, row, 1)
        mixed = attend(tile, row, batch.kv_lens[row] - 1)
        return lax.dynamic_update_slice_in_dim(out, mixed, row, 0)

    out = lax.fori_loop(0, batch.num_single, single, jnp.zeros_like(grouped))
    if total == batch.kv_lens.shape[0]:  # a program for one-token rows alone
        return out.reshape(queries.shape)

    # One tile more than there are tokens, so that no slice is moved back to fit.
    padded = jnp.pad(grouped, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))

    def longer(row: Array, out: Array) -> Array:
        begin, end = batch.starts[row], batch.starts[row + 1]
        offset = batch.kv_lens[row] - end  # position = flat index + offset

        def one_query_tile(index: Array, out: Array) -> Array:
            start = begin + index * QUERY_TILE
            tile = lax.dynamic_slice_in_dim(padded, start, QUERY_TILE)
            mixed = attend(tile, row, start + offset)
            mine = (start + jnp.arange(QUERY_TILE, dtype=jnp.int32) < end)[:, None, None, None]
            before = lax.dynamic_slice_in_dim(out, start, QUERY_TILE)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, mixed, before), start, 0)

        return lax.fori_loop(0, (end - begin + QUERY_TILE - 1) // QUERY_TILE, one_query_tile, out)

    out = lax.fori_loop(batch.num_single, batch.num_rows, longer, out)
    return out[:total].reshape(queries.shape)
