"""No compiled program copies a KV pool: seen in the programs themselves.

A copy inside a program keeps the buffer's address, so pointers alone do not show it.
"""

from __future__ import annotations

import re

import pytest

from engine.jax_runner import JaxRunner, PoolSpec
from engine.programs import ProgramShape
from tests.engine.tiny import tiny_params, tiny_placement, tiny_traits

SHAPES = tuple(ProgramShape(*s) for s in ((1, 1, 8), (2, 2, 8), (4, 4, 8), (64, 5, 8), (512, 5, 8)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_program_copies_a_pool(dtype: str) -> None:
    placement = tiny_placement(tiny_traits())
    runner = JaxRunner(
        tiny_params(placement, dtype),
        placement,
        PoolSpec(64, 8, dtype),
        SHAPES,
        max_seqs=4,
        max_model_len=64,
        chunk_tokens=12,
    )
    runner.warm_up()
    layers, blocks, block_size, heads, width = runner._pools.k.shape
    pool = rf"(?:{layers},{blocks},{block_size}|{layers},{blocks * block_size}),{heads},{width}"
    programs = {
        str(shape): program.as_text() for shape, program in runner._programs.forwards.items()
    }
    assert len(programs) == len(SHAPES)
    for shape, text in programs.items():
        assert re.search(rf"\[{pool}\]", text), "the pattern finds the pool"
        copies = re.findall(rf"= \w+\[{pool}\]\S* copy\(", text)
        assert not copies, f"{shape}: {len(copies)} copies of a pool"
