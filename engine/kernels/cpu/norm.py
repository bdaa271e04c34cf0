"""Norms; csrc/norm.cc."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from engine.kernels.cpu.native import target


def rms_norm(x: Array, weight: Array, layer: Any, live: Any, eps: float) -> Array:
    """See engine.kernels.interface.Kernels."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(target("rms_norm"), result)
    return call(
        x, weight, np.int32(layer) if isinstance(layer, int) else layer, live, eps=np.float32(eps)
    )
