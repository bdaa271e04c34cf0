"""No step, import, export or block copy copies a KV pool: seen in the compiled programs, in the
pools' addresses, and in the memory of the process.

A copy inside a program keeps the buffer's address, so addresses alone do not show it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from engine.jax_runner import JaxRunner, PoolSpec
from engine.plan import BatchRow, CopyBlocks, Entry, ExportKV, ImportKV, RunBatch, StepPlan
from engine.programs import ProgramShape
from engine.types import AttemptId, SequenceId
from tests.engine.tiny import tiny_params, tiny_placement, tiny_traits

SHAPES = tuple(ProgramShape(*s) for s in ((1, 1, 8), (2, 2, 8), (4, 4, 8), (64, 5, 8), (512, 5, 8)))
HEADS, WIDTH, BLOCK_SIZE, CHUNK = 2, 16, 8, 12
POOL_MIB = 64
KERNELS = pytest.mark.parametrize("kernels", ["reference", "cpu"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@functools.cache
def runner_of(kernels: str, dtype: str, blocks: int) -> JaxRunner:
    traits = tiny_traits(head_dim=WIDTH, num_key_value_heads=HEADS)
    placement = tiny_placement(traits, kernels)
    runner = JaxRunner(
        tiny_params(placement, dtype),
        placement,
        PoolSpec(blocks, BLOCK_SIZE, dtype),
        SHAPES,
        max_seqs=4,
        max_model_len=64,
        chunk_tokens=CHUNK,
    )
    runner.warm_up()
    return runner


@KERNELS
@DTYPES
def test_no_program_copies_a_pool(kernels: str, dtype: str) -> None:
    runner = runner_of(kernels, dtype, 64)
    layers, blocks, block_size, heads, width = runner._pools[0].k.shape
    pool = rf"(?:{layers},{blocks},{block_size}|{layers},{blocks * block_size}),{heads},{width}"
    programs = {
        str(shape): program.as_text() for shape, program in runner._programs.forwards.items()
    }
    assert len(programs) == len(SHAPES)
    for shape, text in programs.items():
        assert re.search(rf"\[{pool}\]", text), "the pattern finds the pool"
        copies = re.findall(rf"= \w+\[{pool}\]\S* copy\(", text)
        assert not copies, f"{shape}: {len(copies)} copies of a pool"


def entries(dtype: str) -> dict[str, Entry]:
    """One of each entry that touches the pools."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    slots = np.arange(CHUNK, dtype=np.int32) + 3
    arrays = tuple(np.ones((2, CHUNK, HEADS, WIDTH), kind) for _ in "kv")

    def row(name: str, tokens: int, start: int, blocks: tuple[int, ...]) -> BatchRow:
        ids = tuple(range(1, tokens + 1))
        table = np.array(blocks, np.int32)
        return BatchRow(SequenceId(AttemptId(name, 0), 0), ids, start, table, 0, None)

    return {
        "one token": RunBatch((row("a", 1, 5, (3,)),)),
        "decode": RunBatch(tuple(row(str(i), 1, 5, (i,)) for i in range(3))),
        "prefill": RunBatch((row("a", 30, 0, (0, 1, 2, 3)),)),
        "mixed": RunBatch((row("a", 1, 5, (4,)), row("b", 30, 0, (0, 1, 2, 3)))),
        "export": ExportKV(0, 0, CHUNK, slots),
        "import": ImportKV(0, 0, slots, arrays),
        "copy blocks": CopyBlocks((1, 2), (5, 6)),
    }


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


@KERNELS
@DTYPES
def test_pools_stay_where_they_are_and_memory_does_not_grow(kernels: str, dtype: str) -> None:
    token_bytes = (
        2 * HEADS * WIDTH * np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).itemsize
    )  # of the two layers
    blocks = POOL_MIB * 2**20 // (token_bytes * BLOCK_SIZE)
    runner = runner_of(kernels, dtype, blocks)
    assert runner._pools[0].k.nbytes == POOL_MIB * 2**20
    for name, entry in entries(dtype).items():
        runner.run(StepPlan((entry,)))
        before = [pool.unsafe_buffer_pointer() for pool in runner._pools[0]]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        level = peak_mib()
        runner.run(StepPlan((entry,)))
        assert peak_mib() - level < POOL_MIB / 2, f"{name} takes the memory of a pool"
        after = [pool.unsafe_buffer_pointer() for pool in runner._pools[0]]
        assert after == before, f"{name} moves a pool"
