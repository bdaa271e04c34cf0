"""Kernels in plain jax.numpy: right on every platform, and the oracle of the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import sampling
from engine.kernels.reference import experts as mixture
from engine.kernels.reference import kv
from engine.kernels.reference import linear as matmul
from engine.kernels.reference.attention import attention


class ReferenceKernels:
    """See engine.kernels.interface.Kernels."""

    name = "reference"

    def __init__(self, platform: str) -> None:
        self._platform = platform

    def check(
        self, dtype: np.dtype, *, heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int
    ) -> None:
        """Every shape is computed."""

    def pool_dtype(self, dtype: Any) -> np.dtype:
        return kv.storage_dtype(dtype, self._platform)

    def settle(self, array: Any) -> None:
        """Nothing to do."""

    pack_linear = staticmethod(matmul.pack_linear)
    packed_axes = staticmethod(matmul.packed_axes)
    pack_head = staticmethod(matmul.pack_head)
    head_axes = staticmethod(matmul.head_axes)
    embed = staticmethod(matmul.embed)
    rms_norm = staticmethod(matmul.rms_norm)
    head_norm = staticmethod(matmul.head_norm)
    linear = staticmethod(matmul.linear)
    gated_linear = staticmethod(matmul.gated_linear)
    route = staticmethod(mixture.route)
    experts = staticmethod(mixture.experts)
    logits = staticmethod(matmul.logits)
    rotate = staticmethod(matmul.rotate)
    write_kv = staticmethod(kv.write_kv)
    attention = staticmethod(attention)
    export_kv = staticmethod(kv.export_kv)
    import_kv = staticmethod(kv.import_kv)
    sample = staticmethod(sampling.sample)
    score = staticmethod(sampling.score)
    copy_blocks = staticmethod(kv.copy_blocks)
