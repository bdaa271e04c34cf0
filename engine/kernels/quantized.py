"""Weights of int8, each output with a scale of its own: what they stand for is values * scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from checkpoint.tensor_reader import NotFinite

LARGEST = 127
"""Values are within ± this; -128 would not be symmetric."""
_ROWS_AT_ONCE = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix, or the matrices of all layers.

    Attributes:
        values: int8, laid out as the kernels lay out a matrix.
        scales: float32 [..., features], in the order of the outputs.
        dtype: of the activations beside it, and of rows that are taken out of it.
    """

    values: Any
    scales: Any
    dtype: np.dtype = field(metadata={"static": True})

    def __getitem__(self, layer: Any) -> Quantized:
        """The matrix of one layer."""
        return Quantized(self.values[layer], self.scales[layer], self.dtype)


def quantize(weight: np.ndarray, dtype: np.dtype) -> Quantized:
    """int8 [out, in] and scales [out] of a weight [out, in]: each output's largest is ±127.

    Computes in float32. An output of zeros has scale 0.

    Raises:
        NotFinite: the weight holds NaN or infinity.
    """
    values = np.empty(weight.shape, np.int8)
    scales = np.empty(len(weight), np.float32)
    # By pieces: a whole float32 copy of an embedding would be a large part of the model.
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = weight[first : first + _ROWS_AT_ONCE].astype(np.float32)
        scale = np.abs(rows).max(axis=1, initial=0.0) / np.float32(LARGEST)
        if not np.isfinite(scale).all():
            raise NotFinite("NaN or infinity cannot be quantized to int8")
        scales[first : first + len(rows)] = scale
        # A scale that is denormal is not exact, and its row's largest may come out above 127.
        scale[scale == 0] = 1
        rows /= scale[:, None]
        np.clip(np.rint(rows, out=rows), -LARGEST, LARGEST, out=rows)
        values[first : first + len(rows)] = rows
    return Quantized(values, scales, dtype)


def dequantize(values: Array, scales: Array, dtype: Any) -> Array:
    """values [n, in] times scales [n], rounded once to `dtype`."""
    return (values.astype(jnp.float32) * scales[:, None]).astype(dtype)


def take_rows(table: Array | Quantized, rows: Array) -> Array:
    """[T, width]: rows [T] of a table [n, width] that is laid out as in a checkpoint."""
    if isinstance(table, Quantized):
        return dequantize(table.values[rows], table.scales[rows], table.dtype)
    return table[rows]
