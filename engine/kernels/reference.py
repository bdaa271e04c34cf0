"""Kernels in plain jax.numpy: right on every platform, and the oracle of the others.

Batches are padded to a program's shape. Live counts are run-time scalars that bound the
loops here, so padding costs little: rows beyond `num_tokens` are skipped in tiles, and
attention reads no block beyond a sequence's length.

Pools are [layers, blocks, block_size, kv_heads, head_dim]. A bfloat16 pool is stored as
uint16 on CPU, where a bfloat16 scatter would copy the whole pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

ROW_TILE = 256  # rows of one matmul tile
QUERY_TILE = 64  # query tokens of one attention tile
KV_TILE_TOKENS = 256  # KV tokens of one attention tile

_MASKED = -1e30


class Batch(NamedTuple):
    """A ragged batch, padded to T tokens, S rows and B table entries; all int32.

    Attributes:
        tokens: [T] token ids, row after row.
        starts: [S + 1] cumulative query lengths; padding rows repeat the last value.
        tables: [S, B] block tables.
        kv_lens: [S] tokens of each row whose KV is there after this step.
        num_rows: live rows. Rows of one token come first.
        num_single: how many of them have one token.
        num_tokens: live tokens, equal to starts[num_rows].
    """

    tokens: Any
    starts: Any
    tables: Any
    kv_lens: Any
    num_rows: Any
    num_single: Any
    num_tokens: Any


def storage_dtype(dtype: Any, platform: str) -> Any:
    """The dtype that a pool of `dtype` is stored in."""
    if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def to_storage(values: Array, storage: Any) -> Array:
    """Bits of `values` as the pool stores them."""
    if values.dtype == storage:
        return values
    return lax.bitcast_convert_type(values, storage)


def from_storage(stored: Array, dtype: Any) -> Array:
    """The inverse of `to_storage`."""
    if stored.dtype == dtype:
        return stored
    return lax.bitcast_convert_type(stored, dtype)


def map_live_rows(
    function: Callable[..., Any], live: Array, *arrays: Array, tile: int = ROW_TILE
) -> Any:
    """`function(*arrays)` row by row, skipping tiles that hold no live row.

    Args:
        function: maps arrays [n, ...] to a pytree of arrays [n, ...], each row on its own.
        live: scalar; rows from here on are padding and come out as zeros or as anything.
        arrays: [T, ...] each.
    """
    rows = arrays[0].shape[0]
    if rows <= tile:
        return function(*arrays)
    sliced = [jax.ShapeDtypeStruct((tile, *a.shape[1:]), a.dtype) for a in arrays]
    shapes = jax.eval_shape(function, *sliced)
    empty = jax.tree.map(lambda s: jnp.zeros((rows, *s.shape[1:]), s.dtype), shapes)

    def one_tile(index: Array, out: Any) -> Any:
        # The last tile may be moved back to fit; its rows are computed twice, alike.
        start = index * tile
        result = function(*(lax.dynamic_slice_in_dim(a, start, tile) for a in arrays))
        return jax.tree.map(
            lambda o, r: lax.dynamic_update_slice_in_dim(o, r, start, 0), out, result
        )

    return lax.fori_loop(0, (live + tile - 1) // tile, one_tile, empty)


def row_of_token(batch: Batch) -> Array:
    """[T] the row that each token belongs to; padding tokens get the last row."""
    tokens, rows = batch.tokens.shape[0], batch.kv_lens.shape[0]
    row = jnp.searchsorted(batch.starts[1:], jnp.arange(tokens, dtype=jnp.int32), side="right")
    return jnp.minimum(row, rows - 1)


def positions_and_slots(batch: Batch, block_size: int, num_slots: int) -> tuple[Array, Array]:
    """[T] the position of each token and its slot in the pool; padding has slot num_slots."""
    index = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    row = row_of_token(batch)
    query_len = batch.starts[row + 1] - batch.starts[row]
    positions = batch.kv_lens[row] - query_len + index - batch.starts[row]
    live = index < batch.num_tokens
    positions = jnp.where(live, positions, 0)
    slots = batch.tables[row, positions // block_size] * block_size + positions % block_size
    return positions, jnp.where(live, slots, num_slots)


def _by_slot(pool: Array) -> Array:
    """View [layers, blocks, block_size, ...] as [layers, slots, ...]; free of cost."""
    return pool.reshape(pool.shape[0], pool.shape[1] * pool.shape[2], *pool.shape[3:])


def write_kv(pool: Array, layer: Array, slots: Array, values: Array) -> Array:
    """Put `values` [T, kv_heads, head_dim] at `slots` [T] of one layer, in place.

    Slots outside the pool are dropped.
    """
    stored = to_storage(values, pool.dtype)
    if slots.shape[0] == 1:
        # XLA turns a scatter of one row into something that copies the whole pool, twice a
        # layer: add a second row that is dropped.
        outside = jnp.full((1,), jnp.iinfo(slots.dtype).max, slots.dtype)
        slots = jnp.concatenate([slots, outside])
        stored = jnp.concatenate([stored, stored])
    return _by_slot(pool).at[layer, slots].set(stored, mode="drop").reshape(pool.shape)


def export_kv(pool: Array, slots: Array) -> Array:
    """[layers, n, kv_heads, head_dim]: a copy of what lies at `slots` [n], in every layer."""
    return jnp.take(_by_slot(pool), slots, axis=1, mode="clip")


def import_kv(pool: Array, slots: Array, values: Array) -> Array:
    """The inverse of `export_kv`, in place; slots outside the pool are dropped."""
    return _by_slot(pool).at[:, slots].set(values, mode="drop").reshape(pool.shape)


def attention(
    queries: Array,
    k_pool: Array,
    v_pool: Array,
    layer: Array,
    batch: Batch,
    *,
    scale: float,
    dtype: Any,
) -> Array:
    """Causal attention of a ragged batch over its blocks.

    Args:
        queries: [T, heads, head_dim]; heads is a multiple of kv_heads.
        k_pool, v_pool: pools that hold the KV of this step's tokens already.
        scale: multiplies the scores.
        dtype: what the pools hold, however they store it.

    Returns:
        [T, heads, head_dim] in queries.dtype; padding rows are zero.
    """
    total, heads, head_dim = queries.shape
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
        last_position = first + jnp.arange(count, dtype=jnp.int32)
        length = jnp.minimum(batch.kv_lens[row], first + count)

        def one_kv_tile(index: Array, carry: tuple[Array, Array, Array]) -> Any:
            top, total_weight, mixed = carry
            blocks = lax.dynamic_slice(tables[row], (index * table_blocks,), (table_blocks,))
            keys = from_storage(k_pool[layer, blocks], dtype)
            values = from_storage(v_pool[layer, blocks], dtype)
            keys = keys.reshape(kv_tile, kv_heads, head_dim)
            values = values.reshape(kv_tile, kv_heads, head_dim)
            scores = scale * jnp.einsum(
                "nhgd,thd->hgnt", tile, keys, preferred_element_type=jnp.float32
            )
            position = index * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)
            # Slots not written yet may hold another sequence's NaN, and 0 * NaN is NaN.
            values = jnp.where((position < length)[:, None, None], values, 0)
            visible = position[None, :] <= last_position[:, None]
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
