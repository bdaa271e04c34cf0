"""The reference kernels against plain NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax import Array

from engine.kernels.batch import Batch, positions_and_slots, row_of_token
from engine.kernels.interface import AttentionSpec, KVPools
from engine.kernels.reference import ReferenceKernels
from engine.kernels.reference.kv import from_storage, storage_dtype, to_storage
from engine.kernels.reference.live_rows import map_live_rows
from tests.engine import attention_cases
from tests.engine.attention_cases import cases

KERNELS = ReferenceKernels("cpu")
LAYERS, LAYER = 2, 1
MAX_KV = 700


@dataclass(frozen=True)
class Case:
    """The shapes of one compiled attention."""

    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int = 256
    seqs: int = 6
    dtype: type = np.float32

    @property
    def table(self) -> int:
        return -(-MAX_KV // self.block_size) + 1


CASES = [
    Case(4, 4, 2, 16),
    Case(8, 3, 1, 16),
    Case(32, 8, 2, 64),
    Case(100, 4, 4, 16),  # no divisor of a KV tile
    Case(2048, 2, 2, 16),  # a block larger than a KV tile
    Case(32, 4, 2, 16, tokens=6),  # a program for one-token rows alone
    Case(32, 4, 2, 16, dtype=ml_dtypes.bfloat16),
]


def compiled(case: Case) -> Callable[..., jax.Array]:
    return jax.jit(partial(KERNELS.attention, spec=AttentionSpec(case.head_dim**-0.5)))


def random_rows(rng: np.random.Generator, case: Case) -> list[tuple[int, int]]:
    """(query length, KV length) of each row, one-token rows first, within the case's shape."""
    if case.tokens == case.seqs:
        return [(1, int(rng.integers(1, MAX_KV + 1))) for _ in range(rng.integers(1, case.seqs))]
    rows, left = [], case.tokens
    for _ in range(rng.integers(1, case.seqs + 1)):
        length = min(int(rng.choice([1, 1, 2, 3, 63, 64, 65, 130])), left)
        if length == 0:
            break
        left -= length
        rows.append((length, length + int(rng.integers(0, MAX_KV - length + 1))))
    return sorted(rows, key=lambda row: row[0] > 1)


def make_batch(rng: np.random.Generator, case: Case, rows: list[tuple[int, int]]) -> Batch:
    """Blocks of all rows are different, and in no order."""
    starts = np.cumsum([0, *(length for length, _ in rows)])
    total = int(starts[-1])
    starts = np.pad(starts, (0, case.seqs - len(rows)), mode="edge").astype(np.int32)
    tables = np.zeros((case.seqs, case.table), np.int32)
    kv_lens = np.zeros(case.seqs, np.int32)
    numbers = rng.permutation(case.table * case.seqs)
    for index, (_, kv_len) in enumerate(rows):
        used = -(-kv_len // case.block_size)
        tables[index, :used], numbers = numbers[:used], numbers[used:]
        kv_lens[index] = kv_len
    single = sum(length == 1 for length, _ in rows)
    return Batch(
        np.zeros(case.tokens, np.int32), starts, tables, kv_lens,
        np.int32(len(rows)), np.int32(single), np.int32(total),
    )  # fmt: skip


def make_pool(
    rng: np.random.Generator, case: Case, batch: Batch, poison: float
) -> tuple[np.ndarray, list[np.ndarray]]:
    """A pool that holds `poison` wherever no row has KV, and each row's KV [n, heads, width]."""
    blocks = case.table * case.seqs
    width = (case.kv_heads, case.head_dim)
    pool = np.full((LAYERS, blocks * case.block_size, *width), poison, case.dtype)
    rows = []
    for table, kv_len in zip(batch.tables, batch.kv_lens, strict=True):
        position = np.arange(kv_len)
        slots = table[position // case.block_size] * case.block_size + position % case.block_size
        rows.append(rng.standard_normal((kv_len, *width)).astype(case.dtype))
        pool[LAYER, slots] = rows[-1]
    return pool.reshape(LAYERS, blocks, case.block_size, *width), rows


def oracle(
    case: Case, queries: np.ndarray, batch: Batch, keys: list[np.ndarray], values: list[np.ndarray]
) -> np.ndarray:
    """Dense causal attention in float64; padding is zero."""
    out = np.zeros(queries.shape)
    group = case.heads // case.kv_heads
    for row in range(batch.num_rows):
        begin, end = batch.starts[row], batch.starts[row + 1]
        position = batch.kv_lens[row] - (end - begin) + np.arange(end - begin)
        hidden = np.arange(batch.kv_lens[row])[None, :] > position[:, None]
        for head in range(case.heads):
            q = queries[begin:end, head].astype(np.float64)
            k, v = (a[row][:, head // group].astype(np.float64) for a in (keys, values))
            scores = np.where(hidden, -np.inf, q @ k.T * case.head_dim**-0.5)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[begin:end, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_dense_attention(case: Case) -> None:
    rng = np.random.default_rng(7)
    attention = compiled(case)
    storage = storage_dtype(case.dtype, "cpu")
    tolerance = 2e-5 if case.dtype is np.float32 else 2e-2
    for round_ in range(5):
        batch = make_batch(rng, case, random_rows(rng, case))
        # What other sequences have left behind must not be seen, not even as 0 * NaN.
        poison = (np.nan, np.inf, 1e30)[round_ % 3]
        k_pool, keys = make_pool(rng, case, batch, poison)
        v_pool, values = make_pool(rng, case, batch, poison)
        queries = rng.standard_normal((case.tokens, case.heads, case.head_dim)).astype(case.dtype)
        pools = KVPools(k_pool.view(storage), v_pool.view(storage))
        result = attention(queries, pools, np.int32(LAYER), batch)
        result = np.asarray(result).astype(np.float64)
        wanted = oracle(case, queries, batch, keys, values)
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
        assert not result[batch.num_tokens :].any()


def test_attention_of_an_empty_batch_is_zero() -> None:
    case = CASES[0]
    rng = np.random.default_rng(0)
    batch = make_batch(rng, case, [])
    pool, _ = make_pool(rng, case, batch, np.nan)
    queries = np.ones((case.tokens, case.heads, case.head_dim), np.float32)
    assert not np.asarray(compiled(case)(queries, KVPools(pool, pool), np.int32(0), batch)).any()


@settings(max_examples=15, deadline=None)
@given(case=cases)
def test_attention_sees_what_its_spec_says(case: attention_cases.Case) -> None:
    built = attention_cases.build(case)
    assume(len(built.q) != len(built.batch.kv_lens))  # that is a program for one-token rows
    storage = KERNELS.pool_dtype(case.pool_type)
    pools = KVPools(*(pool.view(storage) for pool in built.pools))
    attend = jax.jit(KERNELS.attention, static_argnums=4)
    result = attend(built.q, pools, np.int32(attention_cases.LAYER), built.batch, case.spec)
    wanted = attention_cases.oracle(case, built)
    result = np.asarray(result)[: len(wanted)].astype(np.float64)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    assert (np.abs(result - wanted) / largest).max(initial=0) <= 2 * case.tolerance


def test_storage_is_uint16_for_bfloat16_on_cpu_alone() -> None:
    assert storage_dtype(jnp.bfloat16, "cpu") == np.uint16
    assert storage_dtype(jnp.bfloat16, "tpu") == jnp.bfloat16
    assert storage_dtype(jnp.float32, "cpu") == np.float32
    values = jnp.array([1.5, -0.0, 3e38], jnp.bfloat16)
    stored = to_storage(values, jnp.dtype(np.uint16))
    assert stored.dtype == np.uint16
    assert np.array_equal(np.asarray(stored), np.asarray(values).view(np.uint16))
    assert np.array_equal(from_storage(stored), values)
    assert to_storage(values, values.dtype) is values


POOL_LAYERS, BLOCKS, SIZE, HEADS, WIDTH = 3, 5, 4, 2, 8
OUTSIDE = BLOCKS * SIZE


def filled_pool(rng: np.random.Generator, dtype: type) -> tuple[Array, np.ndarray]:
    """A pool of random KV as it is stored, and the same by layer and slot."""
    flat = rng.standard_normal((POOL_LAYERS, OUTSIDE, HEADS, WIDTH)).astype(dtype)
    pool = flat.reshape(POOL_LAYERS, BLOCKS, SIZE, HEADS, WIDTH)
    return jnp.asarray(pool.view(storage_dtype(dtype, "cpu"))), flat


def by_slot(pool: Array, dtype: type) -> np.ndarray:
    return np.asarray(pool).view(dtype).reshape(POOL_LAYERS, OUTSIDE, HEADS, WIDTH)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("live", [0, 1, 5])
def test_kv_is_written_at_its_slots(dtype: type, live: int) -> None:
    """Slots outside the pool, and those from `live` on, are padding."""
    rng = np.random.default_rng(1)
    pool, k_wanted = filled_pool(rng, dtype)
    v_pool, v_wanted = filled_pool(rng, dtype)
    pools, layer = KVPools(pool, v_pool), 1
    slots = np.array([17, 3, OUTSIDE, 0, OUTSIDE + 99, 8], np.int32)
    k, v = (rng.standard_normal((6, HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    for wanted, values in ((k_wanted, k), (v_wanted, v)):
        for index in range(live):
            if slots[index] < OUTSIDE:
                wanted[layer, slots[index]] = values[index].astype(dtype)
    written = jax.jit(KERNELS.write_kv)(pools, np.int32(layer), slots, k, v, np.int32(live))
    assert np.array_equal(by_slot(written.k, dtype), k_wanted)
    assert np.array_equal(by_slot(written.v, dtype), v_wanted)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("layers", "heads"), [((0, 3), (0, 2)), ((1, 2), (0, 2)), ((0, 3), (1, 1)), ((2, 1), (0, 1))]
)
def test_what_is_exported_is_imported(
    dtype: type, layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    rng = np.random.default_rng(2)
    pool, flat = filled_pool(rng, dtype)
    slots, live = np.array([17, 3, 0, 8, 1], np.int32), 4
    layer_span, head_span = (slice(first, first + n) for first, n in (layers, heads))
    part = flat[layer_span][:, slots][:, :, head_span]

    export = jax.jit(
        lambda pool, first_layer, first_head: KERNELS.export_kv(
            pool, slots, np.int32(live), (first_layer, layers[1]), (first_head, heads[1])
        )
    )
    exported = export(pool, np.int32(layers[0]), np.int32(heads[0]))
    assert exported.dtype == pool.dtype
    assert np.array_equal(np.asarray(exported).view(dtype)[:, :live], part[:, :live])

    target, wanted = filled_pool(rng, dtype)
    other = np.array([1, 2, OUTSIDE, 5, 6], np.int32)
    for index in range(live):
        if other[index] < OUTSIDE:
            wanted[layer_span, other[index], head_span] = part[:, index]
    imported = jax.jit(KERNELS.import_kv)(
        target, other, np.int32(live), exported, np.int32(layers[0]), np.int32(heads[0])
    )
    assert np.array_equal(by_slot(imported, dtype), wanted)


@pytest.mark.parametrize("live", [0, 1, 2])
def test_blocks_are_copied_in_every_layer(live: int) -> None:
    pool, flat = filled_pool(np.random.default_rng(3), ml_dtypes.bfloat16)
    sources, targets = np.array([4, 1, 0], np.int32), np.array([0, 3, 2], np.int32)
    copied = jax.jit(KERNELS.copy_blocks)(pool, sources, targets, np.int32(live))
    wanted = flat.reshape(POOL_LAYERS, BLOCKS, SIZE, HEADS, WIDTH).copy()
    wanted[:, targets[:live]] = wanted[:, sources[:live]]
    found = by_slot(copied, ml_dtypes.bfloat16)
    assert np.array_equal(found, wanted.reshape(flat.shape))


def test_heads_are_rotated_by_the_angles_of_their_positions() -> None:
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 6, (9, 4)).astype(np.float32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    positions = np.array([8, 0, 3], np.int32)
    q, k = (rng.standard_normal((3, heads, 8)).astype(np.float32) for heads in (4, 2))
    rotated = jax.jit(KERNELS.rotate)(q, k, table, positions, np.int32(3))
    for before, after in zip((q, k), rotated, strict=True):
        turns = np.exp(1j * angles[positions])[:, None, :]
        turned = (before[..., :4] + 1j * before[..., 4:]) * turns
        np.testing.assert_allclose(after[..., :4], turned.real, atol=1e-5)
        np.testing.assert_allclose(after[..., 4:], turned.imag, atol=1e-5)


@pytest.mark.parametrize("rows", [40, 64, 100, 128])
def test_map_live_rows_skips_padding(rows: int) -> None:
    tile = 64
    x = np.arange(1, 2 * rows + 1, dtype=np.float32).reshape(rows, 2)
    y = np.arange(rows, dtype=np.int32)

    def function(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        return {"sum": x.sum(axis=1) + y, "twice": 2 * y}

    mapped = jax.jit(partial(map_live_rows, function, tile=tile))
    for live in {0, 1, tile - 1, tile, tile + 1, rows - 1, rows}:
        if not 0 <= live <= rows:
            continue
        result = mapped(np.int32(live), x, y)
        assert np.array_equal(result["sum"][:live], (x.sum(axis=1) + y)[:live])
        assert np.array_equal(result["twice"][:live], 2 * y[:live])
        computed = -(-live // tile) * tile
        if rows > tile and computed < rows:
            assert not np.asarray(result["sum"][computed:]).any()


def test_positions_and_slots() -> None:
    """Rows: one token at position 5; three tokens from 2 on; nothing; then padding."""
    size, num_slots = 4, 40
    batch = Batch(
        tokens=np.zeros(8, np.int32),
        starts=np.array([0, 1, 4, 4, 4], np.int32),
        tables=np.array([[7, 2], [9, 1], [0, 0], [0, 0]], np.int32),
        kv_lens=np.array([6, 5, 0, 0], np.int32),
        num_rows=np.int32(2),
        num_single=np.int32(1),
        num_tokens=np.int32(4),
    )
    positions, slots = positions_and_slots(batch, size, num_slots)
    assert positions.tolist() == [5, 2, 3, 4, 0, 0, 0, 0]
    assert slots.tolist() == [2 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 1 * 4 + 0, *[num_slots] * 4]
    assert row_of_token(batch)[:4].tolist() == [0, 1, 1, 1]
