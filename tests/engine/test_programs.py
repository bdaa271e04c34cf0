"""The list of program shapes: short, and with room for every batch."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.programs import (
    BLOCK_GROWTH,
    MAX_PROGRAMS,
    SEQ_GROWTH,
    Extent,
    Paddings,
    ProgramShape,
    TooManyPrograms,
    program_shapes,
    round_up,
    sizes,
    smallest,
)
from engine.types import COLOCATED, Role

ROLES = [Role.PREFILL, Role.DECODE, COLOCATED]
CPU = (Extent(8192 + 32, 1, 32, 256), Paddings(64, 1, 1, 8))
TPU = (Extent(8192 + 256, 8, 256, 256), Paddings(512, 8, 8, 128))


@pytest.mark.parametrize(
    ("padding", "largest", "growth", "wanted"),
    [
        (1, 32, 2, [1, 2, 4, 8, 16, 32]),
        (8, 256, 2, [8, 16, 32, 64, 128, 256]),
        (128, 256, 8, [128, 256]),
        (8, 256, 8, [8, 64, 256]),
        (64, 50, 2, [64]),
        (64, 64, 2, [64]),
        (64, 65, 2, [64, 128]),
        (1, 5, 2, [1, 2, 5]),  # 4 is so near to 5 that it is left out
        (3, 100, 2, [3, 6, 12, 24, 48, 102]),
    ],
)
def test_sizes(padding: int, largest: int, growth: int, wanted: list[int]) -> None:
    assert sizes(padding, largest, growth) == wanted


@given(st.integers(1, 600), st.integers(1, 40_000), st.sampled_from([2, 8]))
def test_sizes_are_multiples_that_grow_geometrically(
    padding: int, largest: int, growth: int
) -> None:
    found = sizes(padding, largest, growth)
    assert found[0] == padding or found == [round_up(largest, padding)]
    assert all(size % padding == 0 for size in found)
    assert largest <= found[-1] < largest + padding
    assert all(a < b <= a * growth * 5 / 4 for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("extent", "paddings"), [CPU, TPU], ids=["cpu", "tpu"])
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_the_defaults_make_few_programs(roles: Role, extent: Extent, paddings: Paddings) -> None:
    shapes = program_shapes(roles, extent, paddings)
    assert 1 <= len(shapes) <= MAX_PROGRAMS
    assert list(shapes) == sorted(set(shapes))
    if roles is Role.PREFILL:
        assert all(shape.tokens > shape.seqs for shape in shapes)
    if roles is Role.DECODE:
        assert all(shape.tokens == shape.seqs for shape in shapes)


def test_the_defaults_of_tpu_are_hex_llms_sizes() -> None:
    extent, paddings = TPU
    assert program_shapes(Role.PREFILL, extent, paddings) == tuple(
        ProgramShape(tokens, 8, 256) for tokens in (512, 1024, 2048, 4096, 8704)
    )
    assert program_shapes(Role.DECODE, extent, paddings) == tuple(
        ProgramShape(seqs, seqs, blocks)
        for seqs in (8, 16, 32, 64, 128, 256)
        for blocks in (128, 256)
    )


def test_too_many_programs_are_refused_with_the_sums() -> None:
    extent, paddings = Extent(9000, 8, 2000, 4096), Paddings(16, 8, 1, 1)
    with pytest.raises(TooManyPrograms) as error:
        program_shapes(COLOCATED, extent, paddings)
    message = str(error.value)
    seqs, blocks = sizes(1, 2000, SEQ_GROWTH), sizes(1, 4096, BLOCK_GROWTH)
    assert f"{len(seqs)} batch sizes (--decode_seqs_padding=1 up to 2000)" in message
    assert f"x {len(blocks)} table sizes (--decode_blocks_padding=1 up to 4096)" in message
    # Prompt programs must have more tokens than the 2008 rows.
    prompts = [t for t in sizes(16, 9000, 2) if t > 2008]
    assert f"+ {len(prompts)} prompt sizes (--prefill_len_padding=16 up to 9008)" in message
    total = len(seqs) * len(blocks) + len(prompts)
    assert f"= {total} programs, more than {MAX_PROGRAMS}: raise a padding" in message


@st.composite
def batches(draw: st.DrawFn) -> tuple[Role, Extent, Paddings, list[int], int]:
    """A worker's programs, and a batch that its scheduler can make: row lengths and blocks."""
    roles = draw(st.sampled_from(ROLES))
    model_len = draw(st.integers(2, 3000))
    decode_seqs = draw(st.integers(1, 64))
    prefill_seqs = draw(st.integers(1, 8))
    decode = decode_seqs if Role.DECODE in roles else 0
    tokens = model_len + decode
    extent = Extent(tokens, prefill_seqs, decode_seqs, draw(st.integers(1, 500)))
    paddings = Paddings(
        draw(st.sampled_from([16, 64, 512, 4096])),
        draw(st.integers(1, 8)),
        draw(st.sampled_from([2, 8, 16, 100])),
        draw(st.sampled_from([8, 128, 1000])),
    )
    rows = [1] * draw(st.integers(0, decode))
    if Role.PREFILL in roles:
        most = min(prefill_seqs, (decode or prefill_seqs) - len(rows))
        for _ in range(draw(st.integers(0, most))):
            left = min(tokens - sum(rows), model_len - 1)
            if left:
                rows.append(draw(st.integers(1, left)))
    return roles, extent, paddings, rows or [1], draw(st.integers(1, extent.max_blocks))


@settings(max_examples=300, deadline=None)
@given(batches())
def test_every_batch_has_a_program(
    batch: tuple[Role, Extent, Paddings, list[int], int],
) -> None:
    roles, extent, paddings, rows, blocks = batch
    shapes = program_shapes(roles, extent, paddings)
    shape = smallest(shapes, sum(rows), len(rows), blocks)
    assert shape in shapes
    assert (shape.tokens, shape.seqs, shape.blocks) >= (sum(rows), len(rows), blocks)
    assert shape.seqs >= len(rows)
    assert shape.blocks >= blocks
    if max(rows) > 1:
        assert shape.tokens > shape.seqs  # a program of equals takes one-token rows alone


def test_one_token_rows_take_the_cheapest_program() -> None:
    shapes = program_shapes(COLOCATED, Extent(512, 2, 16, 64), Paddings(64, 1, 4, 8))
    assert smallest(shapes, tokens=3, seqs=3, blocks=8) == ProgramShape(4, 4, 8)
    assert smallest(shapes, tokens=5, seqs=5, blocks=9) == ProgramShape(8, 8, 64)
    assert smallest(shapes, tokens=4, seqs=3, blocks=1) == ProgramShape(64, 16, 64)


def test_a_batch_that_is_too_large_is_named() -> None:
    shapes = program_shapes(Role.DECODE, Extent(512, 2, 16, 64), Paddings(64, 1, 4, 8))
    with pytest.raises(LookupError, match="no program holds 17 tokens in 17 rows of 3 blocks"):
        smallest(shapes, 17, 17, 3)
    with pytest.raises(LookupError, match="no program holds 5 tokens in 2 rows of 3 blocks"):
        smallest(shapes, 5, 2, 3)
