"""Norms, matmuls and rotary embeddings in jax.numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from engine.kernels.interface import Activation, Linear
from engine.kernels.quantized import Quantized, take_rows
from engine.kernels.reference.live_rows import map_live_rows

_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


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
    return (_normed(x, eps) * weight[layer].astype(jnp.float32)).astype(x.dtype)


def head_norm(x: Array, weight: Array | None, layer: Any, live: Any, eps: float) -> Array:
    if weight is None:
        return _normed(x, eps).astype(x.dtype)
    return rms_norm(x, weight, layer, live, eps)


def linear(
    x: Array,
    weights: tuple[Linear, ...],
    layer: Any,
    live: Any,
    residual: Array | None = None,
    wide: bool = False,
) -> tuple[Array, ...]:
    chosen = [of_layer(weight, layer) for weight in weights]
    dtype = jnp.float32 if wide else x.dtype

    def rows(x: Array, *residuals: Array) -> tuple[Array, ...]:
        results = (affine(x, matrix, bias) for matrix, bias in chosen)
        return tuple(sum(residuals, start=result).astype(dtype) for result in results)

    residuals = () if residual is None else (residual,)
    results: tuple[Array, ...] = map_live_rows(rows, live, x, *residuals)
    return results


def gated_linear(
    x: Array, gate: Linear, up: Linear, layer: Any, live: Any, activation: Activation = "silu"
) -> Array:
    chosen = of_layer(gate, layer), of_layer(up, layer)
    result: Array = map_live_rows(lambda x: gated(x, *chosen, activation), live, x)
    return result


def logits(hidden: Array, head: Linear, live: Any, soft_cap: float | None = None) -> Array:
    result = _product("se,ve->sv", hidden, head.matrix)
    return result if soft_cap is None else soft_cap * jnp.tanh(result / soft_cap)


def rotate(q: Array, k: Array, angles: Array, positions: Array, live: Any) -> tuple[Array, Array]:
    half = angles.shape[-1] // 2
    cos, sin = jnp.split(angles[positions][:, None, :], 2, axis=-1)

    def turned(values: Array) -> Array:
        wide = values.astype(jnp.float32)
        one, other, rest = jnp.split(wide, (half, 2 * half), axis=-1)
        pair = [one * cos - other * sin, other * cos + one * sin, rest]
        return jnp.concatenate(pair, axis=-1).astype(values.dtype)

    return turned(q), turned(k)


Affine = tuple[Array | Quantized, Array | None]
"""The matrix [in, out] and the float32 bias [out] of one layer."""


def of_layer(weight: Linear, layer: Any) -> Affine:
    """`layer` may be an expert's (layer, expert)."""
    bias = None if weight.bias is None else weight.bias[layer].astype(jnp.float32)
    return weight.matrix[layer], bias


def affine(x: Array, matrix: Array | Quantized, bias: Array | None) -> Array:
    """float32 [n, out]."""
    y = _product("ni,io->no", x, matrix)
    return y if bias is None else y + bias


def gated(x: Array, gate: Affine, up: Affine, activation: Activation) -> Array:
    """[n, out] in x.dtype."""
    return (_ACTIVATIONS[activation](affine(x, *gate)) * affine(x, *up)).astype(x.dtype)


def _normed(x: Array, eps: float) -> Array:
    """float32, like x."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def _product(axes: str, x: Array, matrix: Array | Quantized) -> Array:
    """float32 [n, out]; int8 is exact in x's dtype, and the scales multiply the sums."""
    if isinstance(matrix, Quantized):
        return _product(axes, x, matrix.values.astype(x.dtype)) * matrix.scales
    return jnp.einsum(axes, x, matrix, preferred_element_type=jnp.float32)
