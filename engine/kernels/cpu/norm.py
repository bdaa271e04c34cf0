"""Norms; csrc/norm.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.kernels.cpu.native import absent, target


def rms_norm(x: Array, weight: Array | None, layer: Any, live: Any, eps: float) -> Array:
    """See engine.kernels.interface.Kernels; here no weight is ones."""
    call = jax.ffi.ffi_call(target("rms_norm"), jax.ShapeDtypeStruct(x.shape, x.dtype))
    scale = absent(x.dtype) if weight is None else weight
    return call(x, scale, jnp.int32(layer), jnp.int32(live), eps=np.float32(eps))


def head_norm(x: Array, weight: Array | None, layer: Any, live: Any, eps: float) -> Array:
    """See engine.kernels.interface.Kernels."""
    tokens, heads, width = x.shape
    rows = x.reshape(tokens * heads, width)
    return rms_norm(rows, weight, layer, live * heads, eps).reshape(x.shape)
