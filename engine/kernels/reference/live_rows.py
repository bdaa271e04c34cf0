"""Rows computed in tiles, so that the padding of a batch costs little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

ROW_TILE = 256  # rows of one matmul tile


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
