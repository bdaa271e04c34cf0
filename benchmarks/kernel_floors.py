"""What limits a kernel, measured: memory's bandwidth, memcpy, the best library's matmul."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from engine.kernels.cpu import CpuKernels
from engine.kernels.cpu.native import target
from engine.kernels.interface import Kernels

MIB = 2**20
READ_BYTES = 256 * MIB
"""Read once to measure the memory's bandwidth; far more than any cache holds."""
COLD_BYTES = 96 * MIB
"""What a case walks over before it sees the same bytes again; more than a cache holds."""
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Seconds = float
Run = Callable[[], Seconds]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape.

    Attributes:
        floor: what limits it: "memory" (one read of its bytes), "matmul" (the best library's
            matmul of the same shape) or "memcpy" (of as many bytes).
        target: the least share of the floor's speed; None is not checked.
        amount: bytes, or floating-point operations where the floor is a matmul.
        kernel, baseline, reference: take the time that `amount` takes them.
    """

    name: str
    dtype: str
    floor: str
    target: float | None
    amount: float
    kernel: Run
    baseline: Run
    reference: Run | None


def reading(amount: float) -> Run:
    """The time in which memory gives `amount` bytes, from one read of READ_BYTES."""
    words = settled(CpuKernels(), jnp.ones(READ_BYTES // 4, jnp.float32))
    digest = jax.ShapeDtypeStruct((64,), jnp.uint32)
    run = timed(jax.ffi.ffi_call(target("read_all"), digest), words)
    return lambda: run() * amount / READ_BYTES


def copying(amount: float, threads: int, into: bool) -> Run:
    """memcpy of `amount` bytes in chunks of 3 MiB, each thread its own part.

    Args:
        into: the chunk is the source and ever new places are written; else the reverse.
    """
    chunk = 3 * MIB // 2
    places = int(COLD_BYTES // chunk)
    far, near = np.ones((places, chunk), np.uint8), np.ones(chunk, np.uint8)
    pool = ThreadPoolExecutor(threads)
    bounds = [chunk * i // threads for i in range(threads + 1)]

    def part(begin: int, end: int) -> None:
        for place in far:
            source, sink = (near, place) if into else (place, near)
            np.copyto(sink[begin:end], source[begin:end])

    def run() -> Seconds:
        began = time.perf_counter()
        list(pool.map(part, bounds[:-1], bounds[1:]))
        return (time.perf_counter() - began) * amount / (places * chunk)

    return run


def settled(kernels: Kernels, array: jax.Array) -> jax.Array:
    """`array`, after what an engine does for its weights and pools."""
    kernels.settle(jax.block_until_ready(array))
    return array


def timed(program: Callable[..., Any], *arguments: Any) -> Run:
    compiled = jax.jit(program)
    arguments = jax.device_put(arguments)
    jax.block_until_ready(compiled(*arguments))

    def run() -> Seconds:
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - began

    return run


def timed_in_place(program: Callable[..., Any], pool: Any, rest: Any) -> Run:
    """As `timed`; `program` gives (pool, rest) anew and updates the pool in place."""
    compiled = jax.jit(program, donate_argnums=(0, 1))
    state = jax.block_until_ready(compiled(pool, rest))

    def run() -> Seconds:
        nonlocal state
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(*state))
        return time.perf_counter() - began

    return run


def library_matmul(x: np.ndarray, weight: np.ndarray, times: int, threads: int) -> Run:
    """x [rows, in] times weight [out, in], `times` over, by torch where it is installed.

    Otherwise by XLA, in float32: it has no fast bfloat16 on CPU.
    """
    try:
        import torch
    except ImportError:
        return _xla_matmul(x.astype(np.float32), weight.T.astype(np.float32), times)
    torch.set_num_threads(threads)
    kind = torch.float32 if x.dtype == np.float32 else torch.bfloat16
    inputs = torch.from_numpy(x.astype(np.float32)).to(kind)
    weights = [torch.from_numpy(weight.astype(np.float32)).to(kind) for _ in range(times)]

    def run() -> Seconds:
        began = time.perf_counter()
        with torch.inference_mode():
            for each in weights:
                torch.nn.functional.linear(inputs, each)
        return time.perf_counter() - began

    return run


def _xla_matmul(x: np.ndarray, weight: np.ndarray, times: int) -> Run:
    def program(x: Any, weight: Any) -> Any:
        def once(_: Any, previous: Any) -> Any:
            return x @ weight + previous[:1] * 0  # each waits for the one before

        start = jnp.zeros((x.shape[0], weight.shape[1]), x.dtype)
        return lax.fori_loop(0, times, once, start)

    return timed(program, x, weight)
