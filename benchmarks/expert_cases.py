"""The mixtures of experts that benchmarks.kernels measures: a decode step's and a prefill's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_floors import DTYPES, Case, Run, library_matmul, reading, settled, timed
from engine.kernels.cpu import CpuKernels
from engine.kernels.interface import Kernels, Linear, Routing
from engine.kernels.reference import ReferenceKernels

# Much as one layer of Qwen3 30B, with fewer experts: all of them are more than a cache holds.
COUNT, TOP_K, HIDDEN, FFN = 32, 4, 2048, 768
EXPERTS = f"{HIDDEN} -> {FFN}, {TOP_K} of {COUNT}"


def experts(dtype: str, rows: int, threads: int, name: str) -> Case:
    """Of one row, as many steps as read every expert once; of many rows, all experts at once.

    The floor of many rows is one matmul by each expert of as many rows as it gets.
    """
    kind = DTYPES[dtype]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, HIDDEN), np.float32).astype(kind)
    steps = COUNT // TOP_K if rows == 1 else 1
    chosen = np.arange(steps * rows * TOP_K, dtype=np.int32).reshape(steps, rows, TOP_K) % COUNT
    weights = jnp.full((rows, TOP_K), 1 / TOP_K, jnp.float32)
    up_weight = (rng.standard_normal((FFN, HIDDEN), np.float32) * HIDDEN**-0.5).astype(kind)

    def run_with(kernels: Kernels) -> Run:
        def stacked(weight: np.ndarray) -> Linear:
            packed = kernels.pack_linear(weight, 1)
            matrix = jax.device_put(np.broadcast_to(packed, (1, COUNT, *packed.shape)))
            return Linear(settled(kernels, matrix), None, len(weight))

        def program(x: Any, gate: Linear, up: Linear, down: Linear) -> Any:
            def step(index: Any, _: Any) -> Any:
                routing = Routing(jnp.asarray(chosen)[index], weights)
                return kernels.experts(x, routing, gate, up, down, 0, np.int32(rows))

            return lax.fori_loop(0, steps, step, jnp.zeros((rows, HIDDEN), jnp.float32))

        matrices = up_weight, up_weight, np.ascontiguousarray(up_weight.T)
        return timed(program, x, *(stacked(weight) for weight in matrices))

    runs = run_with(CpuKernels()), run_with(ReferenceKernels("cpu"))
    if rows == 1:
        amount = 3.0 * COUNT * FFN * HIDDEN * kind.itemsize
        return Case(name, dtype, "memory", None, amount, runs[0], reading(amount), runs[1])
    amount = 2.0 * 3 * rows * TOP_K * FFN * HIDDEN
    of_each = library_matmul(x[: rows * TOP_K // COUNT], up_weight, 3 * COUNT, threads)
    return Case(name, dtype, "matmul", None, amount, runs[0], of_each, runs[1])
