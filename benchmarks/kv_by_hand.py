"""What limits the `device` transport: KV moved from pool to pool by jax.numpy alone.

A gather from one device's pool, `jax.device_put` to the other device, and a scatter into its pool,
which is donated; nothing is waited for until the end.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.kernels.interface import Kernels

Pools = tuple[jax.Array, ...]
"""K and V, each [layers, slots, heads, width], float32."""


class ByHand:
    """Two such pools, on the first device and on the second, of random values and of zeros."""

    def __init__(
        self, kernels: Kernels, pool: tuple[int, ...], source: np.ndarray, target: np.ndarray
    ) -> None:
        """`pool` is the shape of K; the KV moves from the slots `source` to `target`, int32 [n]."""
        here, self._there = jax.devices()[:2]
        rng = np.random.default_rng(0)
        self._source = tuple(
            jax.device_put(rng.standard_normal(pool, np.float32), here) for _ in "kv"
        )
        self._target = tuple(jnp.zeros(pool, device=self._there) for _ in "kv")
        for each in jax.block_until_ready((*self._source, *self._target)):
            kernels.settle(each)  # as an engine's
        self._places = source, target

    def run(self, chunk_tokens: int) -> float:
        """The seconds that it takes in chunks of so many tokens; the last one may be shorter."""
        source, target = self._places
        began = time.perf_counter()
        for start in range(0, len(source), chunk_tokens):
            span = slice(start, start + chunk_tokens)
            moved = jax.device_put(_gather(self._source, source[span]), self._there)
            self._target = _scatter(self._target, target[span], moved)
        jax.block_until_ready(self._target)
        return time.perf_counter() - began

    def check(self) -> None:
        """Raises RuntimeError unless the last run has moved all; forgets it then."""
        source, target = self._places
        wanted, found = _gather(self._source, source), _gather(self._target, target)
        if not all(map(np.array_equal, wanted, found)):
            raise RuntimeError("the KV moved by hand has not arrived")
        nothing = jax.tree.map(jnp.zeros_like, found)
        self._target = _scatter(self._target, target, nothing)


@jax.jit
def _gather(pools: Pools, slots: Any) -> Pools:
    return tuple(jnp.take(pool, slots, axis=1, mode="clip") for pool in pools)


@partial(jax.jit, donate_argnums=0)
def _scatter(pools: Pools, slots: Any, rows: Pools) -> Pools:
    def put(pool: jax.Array, values: jax.Array) -> jax.Array:
        return pool.at[:, slots].set(values, mode="drop", unique_indices=True)

    return tuple(map(put, pools, rows))
