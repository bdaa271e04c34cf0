"""The CPU attention against NumPy in float64, and against itself, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.attention import attention, check_heads, rotate
from engine.kernels.cpu.linear import linear, pack_linear
from engine.kernels.interface import AttentionSpec, Batch, KVPools, Linear, UnsupportedShape
from tests.engine.attention_cases import LAYER, LAYERS, TYPES, Built, Case, build, cases, oracle

pytestmark = pytest.mark.usefixtures("native")

# The one where a program runs at once, the other where it runs behind.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)

attend = jax.jit(attention, static_argnums=4)


def check(native: ModuleType, case: Case) -> None:
    built = build(case)
    wanted = oracle(case, built)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        result = attend(built.q, built.pools, np.int32(LAYER), built.batch, case.spec)
        assert result.dtype == case.query_type
        result = np.asarray(result)[: len(wanted)].astype(np.float64)
        error = (np.abs(result - wanted) / largest).max(initial=0)
        assert error <= case.tolerance, f"{name}: {error}"


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_attention_is_dense_attention(native: ModuleType, case: Case) -> None:
    check(native, case)


# Queries and pools that are both bfloat16 are multiplied in another way than all others.
of_each_type = pytest.mark.parametrize(
    ("query_type", "pool_type"),
    list(product(TYPES.values(), repeat=2)),
    ids=[f"{query} over {pool}" for query, pool in product(TYPES, repeat=2)],
)


@pytest.mark.parametrize("threads", [1, 2])
@of_each_type
def test_long_contexts(native: ModuleType, query_type: Any, pool_type: Any, threads: int) -> None:
    native.limit_threads(threads)
    case = Case(
        rows=((1, 8191), (1, 3000), (1, 2), (9, 5000), (0, 0), (300, 1000)),
        spec=AttentionSpec(0.125),
        query_type=query_type,
        pool_type=pool_type,
    )
    check(native, case)
    check(native, replace(case, spec=AttentionSpec(0.125, window=1000), block_size=32))


def test_many_heads_share_one(native: ModuleType) -> None:
    check(native, Case(((1, 200), (40, 3)), AttentionSpec(0.1), group=32, kv_heads=1, head_dim=16))


def test_an_empty_batch_is_no_work() -> None:
    built = build(Case((), AttentionSpec(1.0)))
    attend(built.q, built.pools, np.int32(0), built.batch, AttentionSpec(1.0)).block_until_ready()


def as_bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint16 if array.dtype == TYPES["bfloat16"] else np.uint32)


def run_parts(
    case: Case, built: Built, parts: Iterable[tuple[int, int]], together: bool
) -> np.ndarray:
    """Tokens [begin, end) of the one row of `case` for each of `parts`, in one batch or in many."""
    parts = list(parts)
    if not together:
        return np.concatenate([run_parts(case, built, [part], True) for part in parts])
    begins, ends = np.array(parts).T
    q = np.concatenate([built.q[begin:end] for begin, end in parts])
    batch = Batch(
        np.zeros(len(q), np.int32), np.cumsum([0, *(ends - begins)]).astype(np.int32),
        np.repeat(built.batch.tables[:1], len(parts), axis=0), ends.astype(np.int32),
        np.int32(len(parts)), np.int32(0), np.int32(len(q)),
    )  # fmt: skip
    return as_bits(attend(q, built.pools, np.int32(LAYER), batch, case.spec))


def chunks(total: int, size: int, first: int = 0) -> list[tuple[int, int]]:
    return [(begin, min(begin + size, total)) for begin in range(first, total, size)]


@of_each_type
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.2),
        AttentionSpec(0.2, soft_cap=3.0, window=150),
        AttentionSpec(0.2, chunk=70),
    ],
    ids=["full", "window", "chunk"],
)
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (1, 26), (7, 128)])
def test_a_token_gets_the_same_bits_in_any_company(
    native: ModuleType,
    group: int,
    head_dim: int,
    spec: AttentionSpec,
    query_type: Any,
    pool_type: Any,
) -> None:
    total = 600
    case = Case(
        ((total, 0),), spec, group=group, head_dim=head_dim, query_type=query_type,
        pool_type=pool_type,
    )  # fmt: skip
    built = build(case)
    company = build(replace(case, rows=tuple((1 + 11 * i % 40, 31 * i) for i in range(16))))
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        native.limit_threads(1)
        whole = run_parts(case, built, [(0, total)], True)
        for threads in (1, 2):
            native.limit_threads(threads)
            for size in (1, 64, 512):
                cut = run_parts(case, built, chunks(total, size), True)
                assert np.array_equal(cut, whole), f"{name}: chunks of {size} in one batch"
            last = chunks(total, 1, total - 3)
            assert np.array_equal(run_parts(case, built, last, False), whole[-3:]), name
            cut = run_parts(case, built, chunks(total, 200), False)
            assert np.array_equal(cut, whole), f"{name}: chunks of 200, one batch each"

            joined = join(built, company)
            result = as_bits(attend(joined.q, joined.pools, np.int32(LAYER), joined.batch, spec))
            assert np.array_equal(result[:total], whole), f"{name}: in a batch of others"


def join(one: Built, others: Built) -> Built:
    """The row of `one`, then the rows of `others`, in one batch."""
    shift, total = one.pools.k.shape[1], int(one.batch.num_tokens)
    most = max(one.batch.tables.shape[1], others.batch.tables.shape[1])

    def widened(tables: np.ndarray) -> np.ndarray:
        return np.pad(tables, ((0, 0), (0, most - tables.shape[1])), constant_values=-7)

    shifted = np.where(others.batch.tables < 0, -7, others.batch.tables + shift)
    batch = Batch(
        np.zeros(total + len(others.q), np.int32),
        np.concatenate([[0], total + others.batch.starts]).astype(np.int32),
        np.concatenate([widened(one.batch.tables[:1]), widened(shifted)]),
        np.concatenate([one.batch.kv_lens[:1], others.batch.kv_lens]),
        np.int32(1 + others.batch.num_rows), np.int32(0), np.int32(total + others.batch.num_tokens),
    )  # fmt: skip
    pools = KVPools(
        *(np.concatenate(pair, axis=1) for pair in zip(one.pools, others.pools, strict=True))
    )
    return Built(np.concatenate([one.q[:total], others.q]), pools, batch, [], [])


@of_each_type
def test_the_future_does_not_reach_the_past(
    native: ModuleType, query_type: Any, pool_type: Any
) -> None:
    """Not even where it overflowed, and is multiplied by a weight of zero."""
    case = Case(((100, 100),), AttentionSpec(0.125), query_type=query_type, pool_type=pool_type)
    built = build(case)
    block, offset = divmod(150, case.block_size)
    poisoned = KVPools(*(pool.copy() for pool in built.pools))
    for pool in poisoned:
        pool[LAYER, built.batch.tables[0, block], offset] = np.inf
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        clean, dirty = (
            as_bits(attend(built.q, pools, np.int32(LAYER), built.batch, case.spec))
            for pools in (built.pools, poisoned)
        )
        assert np.array_equal(clean[:50], dirty[:50]), name
        assert not np.array_equal(clean[50:100], dirty[50:100])


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 9), live=st.integers(0, 9), heads=st.integers(1, 9),
    half=st.integers(1, 128), dtype=st.sampled_from(list(TYPES.values())),
)  # fmt: skip
def test_rotate_turns_pairs(
    native: ModuleType, tokens: int, live: int, heads: int, half: int, dtype: Any
) -> None:
    live = min(live, tokens)
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((tokens, n, 2 * half)).astype(dtype) for n in (heads, 1)]
    angles = rng.uniform(-3, 3, (20, half))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = rng.integers(0, 20, tokens).astype(np.int32)
    positions[live:] = -1
    turn = np.exp(1j * angles[positions[:live]])[:, None, :]
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        rotated = jax.jit(rotate)(*x, table, positions, np.int32(live))
        for before, after in zip(x, rotated, strict=True):
            wide = before[:live].astype(np.float64)
            wanted = (wide[..., :half] + 1j * wide[..., half:]) * turn
            wanted = np.concatenate([wanted.real, wanted.imag], axis=-1)
            assert after.dtype == dtype
            after = np.asarray(after)[:live].astype(np.float64)
            tolerance = 1e-6 if dtype == np.float32 else 2e-2
            np.testing.assert_allclose(after, wanted, rtol=tolerance, atol=tolerance)


def test_rotate_needs_no_copy() -> None:
    """Of what another kernel gave, as in a model."""
    matrix = pack_linear(np.ones((32, 8), np.float32))[None]
    weights = (Linear(matrix, None, 32), Linear(matrix, None, 32))

    def program(x: Any, angles: Any, positions: Any) -> Any:
        q, k = linear(x, weights, 0, 5)
        return rotate(q.reshape(5, 2, 16), k.reshape(5, 2, 16), angles, positions, 5)

    operands = (np.ones((5, 8), np.float32), np.ones((8, 16), np.float32), np.zeros(5, np.int32))
    compiled = jax.jit(program).lower(*operands).compile().as_text()
    assert "hexserve_rotate" in compiled
    assert "copy(" not in compiled


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "complaint"),
    [
        (4, 2, 8, "head_dim=8: .* from 16 to 256"),
        (4, 2, 264, "head_dim=264"),
        (4, 2, 21, "head_dim=21: .* even"),
        (5, 2, 64, "5 heads share 2 KV heads"),
    ],
)
def test_unsupported_heads_are_named(
    heads: int, kv_heads: int, head_dim: int, complaint: str
) -> None:
    check_heads(kv_heads * 3, kv_heads, 64)
    with pytest.raises(UnsupportedShape, match=complaint):
        check_heads(heads, kv_heads, head_dim)


def changed(built: Built, **changes: Any) -> Built:
    return replace(built, batch=built.batch._replace(**changes))


GOOD = build(Case(((3, 20), (1, 40)), AttentionSpec(1.0)))
BLOCKS = GOOD.pools.k.shape[1]


@pytest.mark.parametrize(
    ("built", "layer", "complaint"),
    [
        (GOOD, LAYERS, "layer"),
        (GOOD, -1, "layer"),
        (replace(GOOD, q=np.ones_like(GOOD.q, np.int32)), 0, "q"),
        (replace(GOOD, pools=GOOD.pools._replace(v=GOOD.pools.v[:1])), 0, "k and v"),
        (changed(GOOD, num_rows=np.int32(4)), 0, "num_rows"),
        (changed(GOOD, num_rows=np.int32(-1)), 0, "num_rows"),
        (changed(GOOD, starts=GOOD.batch.starts[:-1]), 0, "starts"),
        (changed(GOOD, starts=np.array([0, 3, 2, 2], np.int32)), 0, "starts"),
        (changed(GOOD, starts=np.array([-1, 3, 4, 4], np.int32)), 0, "starts"),
        (changed(GOOD, starts=np.array([0, 3, 8, 8], np.int32)), 0, "starts"),
        (changed(GOOD, kv_lens=np.array([2, 41, 0], np.int32)), 0, "kv_lens"),
        (changed(GOOD, kv_lens=np.array([23, 99999, 0], np.int32)), 0, "kv_lens"),
        (changed(GOOD, kv_lens=GOOD.batch.kv_lens.astype(np.float32)), 0, "kv_lens"),
        (changed(GOOD, tables=GOOD.batch.tables * 0 - 1), 0, "tables"),
        (changed(GOOD, tables=GOOD.batch.tables * 0 + BLOCKS), 0, "tables"),
    ],
)
def test_wrong_operands_are_errors(built: Built, layer: int, complaint: str) -> None:
    with pytest.raises(REFUSED, match=f"INVALID_ARGUMENT.*{complaint}"):
        attend(
            built.q, built.pools, np.int32(layer), built.batch, AttentionSpec(1.0)
        ).block_until_ready()


@pytest.mark.parametrize(
    ("positions", "live", "complaint"),
    [
        ([0, 8], 2, "positions"),
        ([0, -1], 2, "positions"),
        ([0, 1], 3, "live"),
        ([0], 1, "positions"),
    ],
)
def test_rotate_reads_no_angle_that_is_not_there(
    positions: list[int], live: int, complaint: str
) -> None:
    x, angles = np.ones((2, 1, 16), np.float32), np.ones((8, 16), np.float32)
    with pytest.raises(REFUSED, match=f"INVALID_ARGUMENT.*{complaint}"):
        jax.block_until_ready(rotate(x, x, angles, np.array(positions, np.int32), live))


@pytest.mark.parametrize("width", [18, 15])
def test_rotate_refuses_angles_that_no_head_has(width: int) -> None:
    x, angles = np.ones((2, 1, 16), np.float32), np.ones((8, width), np.float32)
    with pytest.raises(REFUSED, match=r"INVALID_ARGUMENT.*width even and at most head_dim"):
        jax.block_until_ready(rotate(x, x, angles, np.zeros(2, np.int32), 2))
