"""What the machine allows, measured between the servers' runs: memory's bandwidth and matmul.

Each number of cores is measured in a process of its own that may use no others and sleeps
between two measurements.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.stats import median

_REPEATS = 5
_READ_BYTES = 256.0 * 2**20

_run: Callable[[], dict[str, float]] | None = None
"""What a child measures; set when it starts."""


class Floors:
    """The children, by how many cores they use; made by `measuring`."""

    def __init__(self, children: Mapping[int, Any]) -> None:
        self._children = children

    def measure(self) -> dict[str, float]:
        """`read_N` in bytes a second and `matmul_N` in FLOP/s, for each number N of cores."""
        return {
            f"{name}_{cores}": value
            for cores, child in self._children.items()
            for name, value in child.apply(_measure).items()
        }


@contextlib.contextmanager
def measuring(
    counts: tuple[int, ...], matmuls: Mapping[tuple[int, int], int], rows: tuple[int, ...]
) -> Iterator[Floors]:
    """Children for so many cores each.

    Args:
        matmuls: (in, out) of a matrix → how often it counts.
        rows: numbers of rows to multiply by; the best of them counts.
    """
    usable = sorted(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        children = {
            count: stack.enter_context(spawn.Pool(1, _start, (usable[:count], dict(matmuls), rows)))
            for count in counts
        }
        yield Floors(children)


def _start(cores: list[int], matmuls: Mapping[tuple[int, int], int], rows: tuple[int, ...]) -> None:
    """In the child, before jax counts the cores to make its thread pool."""
    global _run
    os.sched_setaffinity(0, cores)
    import ml_dtypes
    import numpy as np

    from benchmarks.kernel_floors import library_matmul, reading

    read = reading(_READ_BYTES)
    rng = np.random.default_rng(0)
    multiply = {}
    for into, out in matmuls:
        weight = rng.standard_normal((out, into), np.float32).astype(ml_dtypes.bfloat16)
        for count in rows:
            x = rng.standard_normal((count, into), np.float32).astype(ml_dtypes.bfloat16)
            # As many rows for every count: a run of few is too short to be timed.
            times = max(rows) // count
            multiply[into, out, count] = (times, library_matmul(x, weight, times, len(cores)))

    def best_rate(into: int, out: int) -> float:
        rates = []
        for count in rows:
            times, run = multiply[into, out, count]
            seconds = median(run() for _ in range(_REPEATS)) or math.inf
            rates.append(2.0 * times * count * into * out / seconds)
        return max(rates)

    def run() -> dict[str, float]:
        bandwidth = _READ_BYTES / (median(read() for _ in range(_REPEATS)) or math.inf)
        work = {shape: 2.0 * shape[0] * shape[1] * count for shape, count in matmuls.items()}
        seconds = sum(work[shape] / best_rate(*shape) for shape in work)
        return {"read": bandwidth, "matmul": sum(work.values()) / seconds}

    _run = run
    run()  # the first one also compiles


def _measure() -> dict[str, float]:
    assert _run is not None
    return _run()
