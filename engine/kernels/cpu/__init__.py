"""CPU kernels in C++, called through XLA FFI. Bit for bit independent of the batch.

What the engine computes for one token depends on that token and its KV alone: not on what
else is in the batch, on how a prompt was cut into chunks, or on the number of threads. Each
instruction set rounds in its own way, but for sampling, which is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.kernels.cpu import attention as attending
from engine.kernels.cpu import experts as mixture
from engine.kernels.cpu import kv, native, norm, sampling
from engine.kernels.cpu import linear as matmul
from engine.kernels.interface import UnsupportedShape


class CpuKernels:
    """See engine.kernels.interface.Kernels."""

    def __init__(self) -> None:
        """Load the native module.

        Raises:
            NoNativeKernels, WrongBuild: see engine.kernels.cpu.native.
        """
        self._instruction_set = native.load().instruction_set()

    @property
    def name(self) -> str:
        return f"cpu ({self._instruction_set})"

    def check(
        self, dtype: np.dtype, *, heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int
    ) -> None:
        _check_dtype("--dtype", dtype)
        attending.check_heads(heads, kv_heads, head_dim)
        for name, width in (("hidden_size", hidden), ("intermediate_size", ffn)):
            if dtype == jnp.bfloat16 and width % 2:
                raise UnsupportedShape(
                    f"{name}={width} on a shard: the CPU kernels take bfloat16 in pairs"
                )

    def pool_dtype(self, dtype: Any) -> np.dtype:
        _check_dtype("--kv_cache_dtype", jnp.dtype(dtype))
        return jnp.dtype(dtype)

    def settle(self, array: jax.Array) -> None:
        """Back it with huge pages: a decode step is 10 to 15 percent faster by them."""
        for shard in array.addressable_shards:
            native.load().use_huge_pages(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)

    def pack_linear(self, weight: np.ndarray, shards: int) -> np.ndarray:
        return _packed_by_shard(matmul.pack_linear, weight, shards)

    def pack_head(self, weight: np.ndarray, shards: int) -> np.ndarray:
        return _packed_by_shard(matmul.pack_head, weight, shards)

    packed_axes = staticmethod(matmul.packed_axes)
    head_axes = staticmethod(matmul.head_axes)
    embed = staticmethod(matmul.embed)
    rms_norm = staticmethod(norm.rms_norm)
    head_norm = staticmethod(norm.head_norm)
    linear = staticmethod(matmul.linear)
    gated_linear = staticmethod(matmul.gated_linear)
    route = staticmethod(mixture.route)
    experts = staticmethod(mixture.experts)
    logits = staticmethod(matmul.logits)
    rotate = staticmethod(attending.rotate)
    write_kv = staticmethod(kv.write_kv)
    attention = staticmethod(attending.attention)
    export_kv = staticmethod(kv.export_kv)
    import_kv = staticmethod(kv.import_kv)
    sample = staticmethod(sampling.sample)
    score = staticmethod(sampling.score)
    copy_blocks = staticmethod(kv.copy_blocks)


def _check_dtype(flag: str, dtype: np.dtype) -> None:
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise UnsupportedShape(f"{flag}={dtype}: the CPU kernels take float32 and bfloat16")


def _packed_by_shard(
    pack: Callable[[np.ndarray], np.ndarray], weight: np.ndarray, shards: int
) -> np.ndarray:
    """Panels of each shard's outputs by themselves, so that no panel lies on two shards."""
    if shards == 1:
        return pack(weight)
    return np.concatenate([pack(part) for part in np.split(weight, shards)])
