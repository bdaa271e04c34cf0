"""The CPU kernels that move KV, against NumPy's indexing, and that they do it in place."""

from __future__ import annotations

import re
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.attention import attention
from engine.kernels.cpu.kv import copy_blocks, export_kv, import_kv, write_kv
from engine.kernels.interface import AttentionSpec, Batch, KVPools

pytestmark = pytest.mark.usefixtures("native")

LAYERS, BLOCKS, SIZE, HEADS, WIDTH = 3, 6, 4, 3, 24
SLOTS = BLOCKS * SIZE
TOKENS = 16
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
# The one where a program runs at once, the other where it runs behind.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)

write = jax.jit(write_kv, donate_argnums=0)
copy = jax.jit(copy_blocks, donate_argnums=0)
import_ = jax.jit(import_kv, donate_argnums=0)
export = jax.jit(
    lambda pool, slots, live, layer, head, layers, heads: export_kv(
        pool, slots, live, (layer, layers), (head, heads)
    ),
    static_argnums=(5, 6),
)

types = st.sampled_from(list(TYPES.values()))
parts = st.sampled_from([(0, 3), (1, 2), (2, 1)])
slot_lists = st.one_of(
    st.permutations(range(SLOTS)).map(lambda slots: slots[:TOKENS]),
    # Runs that follow one another, some of them beyond either end of the pool.
    st.integers(-5, SLOTS - 8).map(lambda first: list(range(first, first + TOKENS))),
)


def random_pool(seed: int, dtype: Any) -> np.ndarray:
    shape = (LAYERS, BLOCKS, SIZE, HEADS, WIDTH)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def by_slot(pool: Any) -> np.ndarray:
    """[layers, slots, heads, width], a view or a copy."""
    return np.asarray(pool).reshape(LAYERS, SLOTS, HEADS, WIDTH)


def same_bits(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def inside(slots: list[int], live: int) -> list[tuple[int, int]]:
    """(index, slot) of what is live and in the pool."""
    return [(i, slot) for i, slot in enumerate(slots[:live]) if 0 <= slot < SLOTS]


@settings(max_examples=40, deadline=None)
@given(
    slots=slot_lists, live=st.integers(0, TOKENS), layer=st.integers(0, LAYERS - 1),
    pool_type=types, value_type=types,
)  # fmt: skip
def test_write_is_an_assignment(
    native: ModuleType, slots: list[int], live: int, layer: int, pool_type: Any, value_type: Any
) -> None:
    """Values take the pool's type, rounded to nearest even; the rest of it stays."""
    k, v = (
        np.random.default_rng(seed).standard_normal((TOKENS, HEADS, WIDTH)).astype(value_type)
        for seed in (2, 3)
    )
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        wanted = [random_pool(seed, pool_type) for seed in (0, 1)]
        pools = KVPools(*(jnp.asarray(pool) for pool in wanted))
        written = write(pools, np.int32(layer), np.array(slots, np.int32), k, v, np.int32(live))
        for pool, values, result in zip(wanted, (k, v), written, strict=True):
            for index, slot in inside(slots, live):
                by_slot(pool)[layer, slot] = values[index].astype(pool_type)
            assert same_bits(result, pool), name


@settings(max_examples=40, deadline=None)
@given(
    slots=slot_lists, live=st.integers(0, TOKENS), dtype=types,
    layers=parts, heads=parts,
)  # fmt: skip
def test_export_and_import_are_indexing(
    slots: list[int], live: int, dtype: Any, layers: tuple[int, int], heads: tuple[int, int]
) -> None:
    source = random_pool(0, dtype)
    numbers = np.array(slots, np.int32)
    (layer, layer_count), (head, head_count) = layers, heads
    part = (slice(layer, layer + layer_count), slice(head, head + head_count))
    wanted = np.zeros((layer_count, live, head_count, WIDTH), dtype)
    landed = random_pool(1, dtype)
    for index, slot in inside(slots, live):
        wanted[:, index] = by_slot(source)[part[0], slot, part[1]]
        by_slot(landed)[part[0], slot, part[1]] = wanted[:, index]

    exported = export(
        source, numbers, np.int32(live), np.int32(layer), np.int32(head), layer_count, head_count
    )
    assert exported.shape == (layer_count, TOKENS, head_count, WIDTH)
    assert same_bits(np.asarray(exported)[:, :live], wanted)
    pool = jnp.asarray(random_pool(1, dtype))
    imported = import_(pool, numbers, np.int32(live), exported, np.int32(layer), np.int32(head))
    assert same_bits(imported, landed)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_large_copies_are_whole(native: ModuleType, threads: int, dtype: Any) -> None:
    """More than one task for each layer."""
    native.limit_threads(threads)
    rng = np.random.default_rng(0)
    shape = (2, 80, 16, 4, 64)
    pool = rng.standard_normal(shape).astype(dtype)
    blocks = rng.permutation(80)[:60]
    slots = (blocks[:, None] * 16 + np.arange(16)).reshape(-1).astype(np.int32)
    live = np.int32(len(slots))
    exported = export(pool, slots, live, np.int32(0), np.int32(0), 2, 4)
    flat = pool.reshape(2, -1, 4, 64)
    assert same_bits(exported, flat[:, slots])
    imported = import_(jnp.zeros(shape, dtype), slots, live, exported, np.int32(0), np.int32(0))
    assert same_bits(
        imported, np.where(np.isin(np.arange(80), blocks)[None, :, None, None, None], pool, 0)
    )
    k, v = (rng.standard_normal((len(slots), 4, 64)).astype(dtype) for _ in range(2))
    pools = write(KVPools(jnp.asarray(pool), jnp.asarray(pool)), np.int32(1), slots, k, v, live)
    for result, values in zip(pools, (k, v), strict=True):
        assert same_bits(np.asarray(result).reshape(flat.shape)[1, slots], values)
        assert same_bits(result[0], pool[0])


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_blocks_are_copied_in_all_layers(dtype: Any) -> None:
    wanted = random_pool(0, dtype)
    sources, targets = np.array([5, 0, 2, 9], np.int32), np.array([1, 3, 4, 9], np.int32)
    result = copy(jnp.asarray(wanted), sources, targets, np.int32(3))
    wanted[:, targets[:3]] = wanted[:, sources[:3]]
    assert same_bits(result, wanted)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("tokens", [1, 8])
def test_layers_write_and_attend_without_a_copy_of_a_pool(tokens: int, dtype: Any) -> None:
    spec = AttentionSpec(scale=WIDTH**-0.5)

    def step(pools: KVPools, x: jax.Array, slots: jax.Array, batch: Batch) -> Any:
        def layer(carry: Any, index: jax.Array) -> Any:
            x, pools = carry
            pools = write_kv(pools, index, slots, x, x + 1, batch.num_tokens)
            return (x + attention(x, pools, index, batch, spec), pools), None

        return jax.lax.scan(layer, (x, pools), jnp.arange(LAYERS))[0]

    pools = KVPools(*(jnp.asarray(random_pool(seed, dtype)) for seed in (0, 1)))
    x = np.ones((tokens, HEADS, WIDTH), dtype)
    slots = np.arange(tokens, dtype=np.int32)
    batch = Batch(
        np.zeros(tokens, np.int32), np.array([0, tokens], np.int32), np.array([[0, 1]], np.int32),
        np.array([tokens], np.int32), np.int32(1), np.int32(tokens == 1), np.int32(tokens),
    )  # fmt: skip
    program = jax.jit(step, donate_argnums=0).lower(pools, x, slots, batch).compile()
    shape = rf"\[{LAYERS},{BLOCKS},{SIZE},{HEADS},{WIDTH}\]"
    assert re.search(shape, program.as_text()), "the pattern finds the pool"
    assert not re.findall(rf"= \w+{shape}\S* copy\(", program.as_text())
    before = [pool.unsafe_buffer_pointer() for pool in pools]
    after = program(pools, x, slots, batch)[1]
    assert [pool.unsafe_buffer_pointer() for pool in after] == before


POOL = np.zeros((LAYERS, BLOCKS, SIZE, HEADS, WIDTH), np.float32)
NUMBERS = np.zeros(TOKENS, np.int32)
VALUES = np.zeros((TOKENS, HEADS, WIDTH), np.float32)
CHUNK = np.zeros((LAYERS, TOKENS, HEADS, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("kernel", "operands", "complaint"),
    [
        (write_kv, (KVPools(POOL, POOL[:2]), 0, NUMBERS, VALUES, VALUES, 1), "one shape"),
        (write_kv, (KVPools(POOL, POOL), 0, NUMBERS, VALUES[:, :2], VALUES[:, :2], 1), "fit the"),
        (write_kv, (KVPools(POOL, POOL), 0, NUMBERS[:3], VALUES, VALUES, 1), "slots"),
        (write_kv, (KVPools(POOL, POOL), LAYERS, NUMBERS, VALUES, VALUES, 1), "layer"),
        (write_kv, (KVPools(POOL, POOL), -1, NUMBERS, VALUES, VALUES, 1), "layer"),
        (write_kv, (KVPools(POOL, POOL), 0, NUMBERS, VALUES, VALUES, TOKENS + 1), "live"),
        (import_kv, (POOL, NUMBERS, 1, CHUNK[..., :8], 0, 0), "values"),
        (import_kv, (POOL, NUMBERS, 1, CHUNK.astype(TYPES["bfloat16"]), 0, 0), "values"),
        (import_kv, (POOL, NUMBERS, -1, CHUNK, 0, 0), "live"),
        (import_kv, (POOL, NUMBERS, 1, CHUNK, 1, 0), "first_layer"),
        (import_kv, (POOL, NUMBERS, 1, CHUNK, 0, -1), "first_head"),
        (partial(export_kv, heads=(0, 1)), (POOL, NUMBERS, 1, (2, 2)), "first_layer"),
        (partial(export_kv, heads=(3, 1)), (POOL, NUMBERS, 1, (0, 1)), "first_head"),
        (copy_blocks, (POOL, NUMBERS, NUMBERS[:2], 1), "sources"),
        (copy_blocks, (POOL, NUMBERS - 1, NUMBERS, 1), "sources"),
        (copy_blocks, (POOL, NUMBERS, NUMBERS + BLOCKS, 1), "targets"),
        (copy_blocks, (POOL, NUMBERS, NUMBERS, TOKENS + 1), "live"),
    ],
)
def test_wrong_operands_are_errors(kernel: Any, operands: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(REFUSED, match=f"INVALID_ARGUMENT.*{complaint}"):
        jax.block_until_ready(kernel(*operands))
