"""The ragged batch that every kernel takes, and where its tokens lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


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
