"""Norms; csrc/norm.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.kernels.cpu.native import target
from engine.kernels.reference import linear as reference


def rms_norm(x: Array, weight: Array, layer: Any, live: Any, eps: float) -> Array:
    """See engine.kernels.interface.Kernels."""
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, layer, live, eps)
    call = jax.ffi.ffi_call(target("rms_norm"), jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, jnp.int32(layer), jnp.int32(live), eps=np.float32(eps))


def head_norm(x: Array, weight: Array | None, layer: Any, live: Any, eps: float) -> Array:
    """See engine.kernels.interface.Kernels."""
    return reference.head_norm(x, weight, layer, live, eps)
