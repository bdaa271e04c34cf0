"""Matmuls by packed weights; csrc/linear.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from checkpoint.host_array import empty_pages
from engine.kernels.cpu.native import absent, target
from engine.kernels.interface import Activation, Linear, UnsupportedShape
from engine.kernels.quantized import Quantized, dequantize

PANEL = 32
"""Outputs that lie side by side in a packed weight."""


def pack_linear(weight: np.ndarray) -> np.ndarray:
    """[panels, in, 32] in float32 and int8, [panels, in / 2, 32, 2] in bfloat16.

    See csrc/linear_table.h.

    Raises:
        UnsupportedShape: bfloat16 with an odd number of inputs, or another dtype.
    """
    features, inputs = weight.shape
    pairs = weight.dtype == ml_dtypes.bfloat16
    if not pairs and weight.dtype not in (np.float32, np.int8):
        raise UnsupportedShape(
            f"a weight of {weight.dtype}: the CPU kernels take float32, bfloat16 and int8"
        )
    if pairs and inputs % 2:
        raise UnsupportedShape(
            f"a bfloat16 weight [{features}, {inputs}] has an odd number of inputs: the CPU "
            "kernels take them in pairs"
        )
    # What lies together moves together: a value, or a pair.
    steps = _pairs(weight) if pairs else weight
    whole, rest = divmod(features, PANEL)
    packed = empty_pages((whole + bool(rest), steps.shape[1], PANEL), steps.dtype)
    packed[:whole] = steps[: features - rest].reshape(whole, PANEL, steps.shape[1]).swapaxes(1, 2)
    if rest:
        packed[whole, :, :rest] = steps[features - rest :].T
        packed[whole, :, rest:] = 0
    return packed.view(weight.dtype).reshape(*packed.shape, *([2] if pairs else []))


def _pairs(weight: np.ndarray) -> np.ndarray:
    """uint32 [out, in / 2] of a bfloat16 weight [out, in]: two inputs each."""
    if not weight.T.flags.c_contiguous:
        return np.ascontiguousarray(weight).view(np.uint32)
    # Stored as [in, out], it stays so: to turn it value by value takes three times as long.
    bits = weight.T.view(np.uint16)
    pairs = bits[1::2].astype(np.uint32)
    pairs <<= 16
    pairs |= bits[::2]
    return pairs.T


def packed_axes(out_axis: str | None, in_axis: str | None) -> tuple[str | None, ...]:
    """See engine.kernels.interface.Kernels."""
    return out_axis, in_axis, None


def pack_head(weight: np.ndarray) -> np.ndarray:
    """The layout of `pack_linear`."""
    return pack_linear(weight)


def head_axes() -> tuple[str | None, ...]:
    """See engine.kernels.interface.Kernels."""
    return packed_axes("vocab", "hidden")


def embed(head: Linear, tokens: Array) -> Array:
    """See engine.kernels.interface.Kernels."""
    matrix = head.matrix
    if isinstance(matrix, Quantized):
        return dequantize(_rows(matrix.values, tokens), matrix.scales[tokens], matrix.dtype)
    return _rows(matrix, tokens)


def linear(
    x: Array,
    weights: tuple[Linear, ...],
    layer: Any,
    live: Any,
    residual: Array | None = None,
    wide: bool = False,
) -> tuple[Array, ...]:
    """See engine.kernels.interface.Kernels."""
    return _linear(x, weights, layer, live, residual, jnp.float32 if wide else x.dtype)


def logits(hidden: Array, head: Linear, live: Any, soft_cap: float | None = None) -> Array:
    """See engine.kernels.interface.Kernels."""
    one_layer = jax.tree.map(lambda a: a[None], head)
    return _linear(hidden, (one_layer,), 0, live, None, jnp.float32, soft_cap or 0)[0]


def gated_linear(
    x: Array, gate: Linear, up: Linear, layer: Any, live: Any, activation: Activation = "silu"
) -> Array:
    """See engine.kernels.interface.Kernels."""
    result = jax.ShapeDtypeStruct((x.shape[0], gate.features), x.dtype)
    call = jax.ffi.ffi_call(target("gated_linear"), result)
    operands = *operands_of(x, gate), *operands_of(x, up)
    return call(x, jnp.int32(layer), jnp.int32(live), *operands, activation=activation)


def _rows(matrix: Array, tokens: Array) -> Array:
    rows = matrix[tokens // PANEL, :, tokens % PANEL]
    return rows.reshape(tokens.shape[0], -1)


def _linear(
    x: Array,
    weights: tuple[Linear, ...],
    layer: Any,
    live: Any,
    residual: Array | None,
    dtype: Any,
    soft_cap: float = 0,
) -> tuple[Array, ...]:
    results = [jax.ShapeDtypeStruct((x.shape[0], w.features), dtype) for w in weights]
    call = jax.ffi.ffi_call(target("linear"), results)
    operands = [operand for weight in weights for operand in operands_of(x, weight)]
    added = absent(x.dtype) if residual is None else residual
    scalars = jnp.int32(layer), jnp.int32(live)
    return tuple(call(x, *scalars, added, *operands, soft_cap=np.float32(soft_cap)))


def operands_of(x: Array, weight: Linear) -> tuple[Array, Array, Array]:
    """The weight, its scales and the bias of a call."""
    bias = absent(x.dtype) if weight.bias is None else weight.bias
    if isinstance(weight.matrix, Quantized):
        return weight.matrix.values, weight.matrix.scales, bias
    return weight.matrix, absent(x.dtype), bias
