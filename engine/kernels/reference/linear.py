"""Norms, matmuls and rotary embeddings in jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from engine.kernels.interface import Linear
from engine.kernels.quantized import Quantized, take_rows
from engine.kernels.reference.live_rows import map_live_rows


def pack_linear(weight: np.ndarray, shards: int) -> np.ndarray:
    """[in, out]; a slice of it is a shard already. See engine.kernels.interface.Kernels."""
    return weight.T


def packed_axes(out_axis: str | None, in_axis: str | None) -> tuple[str | None, ...]:
    return in_axis, out_axis


def pack_head(weight: np.ndarray, shards: int) -> np.ndarray:
    """[vocab, hidden], as it comes."""
    return weight


def head_axes() -> tuple[str | None, ...]:
    return "vocab", "hidden"


def embed(head: Linear, tokens: Array) -> Array:
    return take_rows(head.matrix, tokens)


def rms_norm(x: Array, weight: Array, layer: Any, live: Any, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight[layer].astype(jnp.float32)).astype(x.dtype)


def linear(
    x: Array,
    weights: tuple[Linear, ...],
    layer: Any,
    live: Any,
    residual: Array | None = None,
    wide: bool = False,
) -> tuple[Array, ...]:
    chosen = [_of_layer(weight, layer) for weight in weights]
    dtype = jnp.float32 if wide else x.dtype

    def rows(x: Array, *residuals: Array) -> tuple[Array, ...]:
        results = (_affine(x, matrix, bias) for matrix, bias in chosen)
        return tuple(sum(residuals, start=result).astype(dtype) for result in results)

    residuals = () if residual is None else (residual,)
    results: tuple[Array, ...] = map_live_rows(rows, live, x, *residuals)
    return results


def gated_linear(x: Array, gate: Linear, up: Linear, layer: Any, live: Any) -> Array:
    gate_of_layer, up_of_layer = _of_layer(gate, layer), _of_layer(up, layer)

    def rows(x: Array) -> Array:
        gated = jax.nn.silu(_affine(x, *gate_of_layer)) * _affine(x, *up_of_layer)
        return gated.astype(x.dtype)

    result: Array = map_live_rows(rows, live, x)
    return result


def logits(hidden: Array, head: Linear, live: Any) -> Array:
    return _product("se,ve->sv", hidden, head.matrix)


def rotate(q: Array, k: Array, angles: Array, positions: Array, live: Any) -> tuple[Array, Array]:
    cos, sin = jnp.split(angles[positions][:, None, :], 2, axis=-1)

    def turned(values: Array) -> Array:
        one, other = jnp.split(values.astype(jnp.float32), 2, axis=-1)
        pair = [one * cos - other * sin, other * cos + one * sin]
        return jnp.concatenate(pair, axis=-1).astype(values.dtype)

    return turned(q), turned(k)


def _of_layer(weight: Linear, layer: Any) -> tuple[Array | Quantized, Array | None]:
    bias = None if weight.bias is None else weight.bias[layer].astype(jnp.float32)
    return weight.matrix[layer], bias


def _affine(x: Array, matrix: Array | Quantized, bias: Array | None) -> Array:
    """float32 [n, out]."""
    y = _product("ni,io->no", x, matrix)
    return y if bias is None else y + bias


def _product(axes: str, x: Array, matrix: Array | Quantized) -> Array:
    """float32 [n, out]; int8 is exact in x's dtype, and the scales multiply the sums."""
    if isinstance(matrix, Quantized):
        return _product(axes, x, matrix.values.astype(x.dtype)) * matrix.scales
    return jnp.einsum(axes, x, matrix, preferred_element_type=jnp.float32)
