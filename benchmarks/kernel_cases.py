"""What benchmarks.kernels measures: each kernel beside its floor and beside the reference.

Everything runs over several layers inside one program, so that dispatch does not count and
that weights and KV come from memory, not from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.expert_cases import EXPERTS, experts
from benchmarks.kernel_floors import (
    COLD_BYTES,
    DTYPES,
    MIB,
    Case,
    Run,
    copying,
    library_matmul,
    reading,
    settled,
    timed,
    timed_in_place,
)
from engine.batches import pack_sampling, unpack_sampling
from engine.kernels.batch import Batch
from engine.kernels.cpu import CpuKernels
from engine.kernels.interface import AttentionSpec, Kernels, KVPools, Linear
from engine.kernels.quantized import Quantized, quantize
from engine.kernels.reference import ReferenceKernels
from engine.plan import BatchRow, RowSampling
from engine.sampling import BIASES, SlotBiases
from engine.types import AttemptId, SamplingParams, SequenceId

BLOCK_SIZE = 32


# (in, out): the demo model's and an 8B model's.
MATMULS = ((576, 576), (576, 1536), (1536, 576), (4096, 4096), (4096, 14336))
# (rows, context, query heads, KV heads, head_dim)
DECODES = ((16, 1024, 9, 3, 64), (1, 8192, 9, 3, 64), (16, 1024, 32, 8, 128))
PREFILLS = ((2048, 9, 3, 64), (2048, 32, 8, 128))


def every_case(threads: int, only: str = "") -> Iterator[Case]:
    """The cases whose name and dtype hold `only`, each built when its turn comes.

    `threads` are used by every contender.
    """
    for dtype in DTYPES:
        for name, build in _builders(dtype, threads):
            if only in f"{name} {dtype}":
                yield build(name)


def _builders(dtype: str, threads: int) -> Iterator[tuple[str, Callable[[str], Case]]]:
    """(name, what builds the case of that name)."""
    for rows, least in ((1, 0.8), (16, None), (512, 0.7)):
        for into, out in MATMULS:
            yield (
                f"linear {rows} x {into} -> {out}",
                partial(_linear, dtype, rows, into, out, threads, least, None),
            )
    for rows, least in ((1, 0.8), (512, 0.6)):
        for into, out in MATMULS:
            # One of less than 1 MiB is read in the time that another core takes to wake.
            target = None if rows == 1 and into * out < MIB else least
            yield (
                f"linear {rows} x {into} -> {out} int8",
                partial(_linear, dtype, rows, into, out, threads, target, "int8"),
            )
    for rows in (1, 512):
        yield f"experts {rows} x {EXPERTS}", partial(experts, dtype, rows, threads)
    for decode in DECODES:
        rows, context, heads, kv_heads, width = decode
        yield (
            f"decode attention {rows} x {context}, {heads}/{kv_heads} x {width}",
            partial(_decode_attention, dtype, *decode),
        )
    for prefill in PREFILLS:
        tokens, heads, kv_heads, width = prefill
        yield (
            f"prefill attention {tokens}, {heads}/{kv_heads} x {width}",
            partial(_prefill_attention, dtype, *prefill, threads),
        )
    yield "KV export", partial(_kv_chunks, dtype, threads, _export)
    yield "KV import", partial(_kv_chunks, dtype, threads, _import)
    yield "KV write", partial(_kv_write, dtype, threads)
    if dtype == "float32":
        for name, own in SAMPLINGS.items():
            yield f"sample {ROWS} x {VOCAB}, {name}", partial(_sample, dtype, own)


# ---- matmul ----


def _linear(
    dtype: str, rows: int, into: int, out: int, threads: int, target: float | None,
    quantization: str | None, name: str,
) -> Case:  # fmt: skip
    kind = DTYPES[dtype]
    weight_bytes = into * out * kind.itemsize if quantization is None else (into + 4) * out
    layers = max(2, -(-COLD_BYTES // weight_bytes))
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((out, into), np.float32) * into**-0.5).astype(kind)
    x = rng.standard_normal((rows, into), np.float32).astype(kind)

    def run_with(kernels: Kernels) -> Run:
        def stacked(packed: np.ndarray) -> jax.Array:
            return settled(
                kernels, jax.device_put(np.broadcast_to(packed, (layers, *packed.shape)))
            )

        if quantization is None:
            linear = Linear(stacked(kernels.pack_linear(weight, 1)), None, out)
        else:
            int8 = quantize(weight, kind)
            values = stacked(kernels.pack_linear(int8.values, 1))
            linear = Linear(Quantized(values, stacked(int8.scales), kind), None, out)

        def program(x: Any, linear: Linear) -> Any:
            def layer(index: Any, _: Any) -> Any:
                return kernels.linear(x, (linear,), index, np.int32(rows))[0]

            return lax.fori_loop(0, layers, layer, jnp.zeros((rows, out), x.dtype))

        return timed(program, x, linear)

    if rows < 64:
        amount: float = layers * weight_bytes
        return Case(
            name, dtype, "memory", target, amount,
            run_with(CpuKernels()), reading(amount), run_with(ReferenceKernels("cpu")),
        )  # fmt: skip
    amount = 2.0 * layers * rows * into * out
    return Case(
        name, dtype, "matmul", target, amount,
        run_with(CpuKernels()), library_matmul(x, weight, layers, threads),
        run_with(ReferenceKernels("cpu")),
    )  # fmt: skip


# ---- attention ----


def _paged_batch(rows: int, queries: int, context: int) -> Batch:
    """`rows` rows of `queries` tokens each at the end of `context`, with shuffled blocks."""
    blocks = -(-context // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(rows * blocks).astype(np.int32)
    total = rows * queries
    return Batch(
        tokens=np.zeros(total, np.int32),
        starts=np.arange(0, total + 1, queries, dtype=np.int32),
        tables=table.reshape(rows, blocks),
        kv_lens=np.full(rows, context, np.int32),
        num_rows=np.int32(rows),
        num_single=np.int32(rows if queries == 1 else 0),
        num_tokens=np.int32(total),
    )


def _attention_run(
    kernels: Kernels, dtype: str, batch: Batch, layers: int, heads: int, kv_heads: int, width: int
) -> Run:
    blocks = batch.tables.size
    shape = (layers, blocks, BLOCK_SIZE, kv_heads, width)
    storage = kernels.pool_dtype(DTYPES[dtype])
    values = np.random.default_rng(1).standard_normal(shape[1:], np.float32)
    pool = np.broadcast_to(values.astype(DTYPES[dtype]).view(storage), shape)
    pools = KVPools(*(settled(kernels, jnp.array(pool)) for _ in "kv"))
    q = np.random.default_rng(2).standard_normal((len(batch.tokens), heads, width), np.float32)
    q = q.astype(DTYPES[dtype])  # as a model in that dtype has it
    spec = AttentionSpec(width**-0.5)

    def program(q: Any, pools: KVPools, batch: Batch) -> Any:
        def layer(index: Any, _: Any) -> Any:
            return kernels.attention(q, pools, index, batch, spec)

        return lax.fori_loop(0, layers, layer, q)

    return timed(program, q, pools, batch)


def _decode_attention(
    dtype: str, rows: int, context: int, heads: int, kv_heads: int, width: int, name: str
) -> Case:
    batch = _paged_batch(rows, 1, context)
    layer_bytes = 2 * rows * context * kv_heads * width * DTYPES[dtype].itemsize
    layers = -(-COLD_BYTES // layer_bytes)
    run = partial(
        _attention_run, dtype=dtype, batch=batch, layers=layers, heads=heads,
        kv_heads=kv_heads, width=width,
    )  # fmt: skip
    amount = float(layers * layer_bytes)
    return Case(
        name, dtype, "memory", 0.5, amount,
        run(CpuKernels()), reading(amount), run(ReferenceKernels("cpu")),
    )  # fmt: skip


def _prefill_attention(
    dtype: str, tokens: int, heads: int, kv_heads: int, width: int, threads: int, name: str
) -> Case:
    batch = _paged_batch(1, tokens, tokens)
    run = partial(
        _attention_run, dtype=dtype, batch=batch, layers=1, heads=heads, kv_heads=kv_heads,
        width=width,
    )  # fmt: skip
    amount = 2.0 * heads * width * tokens * (tokens + 1)
    side = 1024
    square = np.random.default_rng(0).standard_normal((side, side), np.float32)
    times = 8
    matmul = library_matmul(square, square, times, threads)
    scale = amount / (2.0 * times * side**3)
    return Case(
        name, dtype, "matmul", None, amount,
        run(CpuKernels()), lambda: matmul() * scale, run(ReferenceKernels("cpu")),
    )  # fmt: skip


# ---- KV copies ----

LAYERS, KV_HEADS, WIDTH = 30, 3, 64  # the demo model's


Move = Callable[[Kernels, Any, Any, Any, Any], Any]


def _export(kernels: Kernels, slots: Any, live: Any, pool: Any, rows: Any) -> Any:
    everything = (0, LAYERS), (0, KV_HEADS)
    return pool, kernels.export_kv(pool, slots, live, *everything)


def _import(kernels: Kernels, slots: Any, live: Any, pool: Any, rows: Any) -> Any:
    return kernels.import_kv(pool, slots, live, rows, 0, 0), rows


def _kv_chunks(dtype: str, threads: int, move: Move, name: str) -> Case:
    """Transfer chunks of 3 MiB, K and V, to or from ever new places."""
    kind = DTYPES[dtype]
    token_bytes = KV_HEADS * WIDTH * kind.itemsize
    chunk = 3 * MIB // (2 * LAYERS * token_bytes)
    blocks = -(-COLD_BYTES // (LAYERS * token_bytes * BLOCK_SIZE))
    places = blocks * BLOCK_SIZE // chunk
    slots = _slots(blocks)[: places * chunk].reshape(places, chunk)
    rows = np.ones((LAYERS, chunk, KV_HEADS, WIDTH), kind)
    copied = float(places * LAYERS * chunk * token_bytes)

    def run_with(kernels: Kernels) -> Run:
        storage = kernels.pool_dtype(kind)
        pool = jnp.zeros((LAYERS, blocks, BLOCK_SIZE, KV_HEADS, WIDTH), storage)
        settled(kernels, pool)

        def program(pool: Any, rows: Any) -> Any:
            def once(place: Any, carry: Any) -> Any:
                return move(kernels, jnp.asarray(slots)[place], np.int32(chunk), *carry)

            return lax.fori_loop(0, places, once, (pool, rows))

        return timed_in_place(program, pool, jnp.array(rows.view(storage)))

    return Case(
        name, dtype, "memcpy", 0.7, copied,
        run_with(CpuKernels()), copying(copied, threads, into=move is _import),
        run_with(ReferenceKernels("cpu")),
    )  # fmt: skip


def _slots(blocks: int) -> np.ndarray:
    """Every slot of the pool once, whole blocks in a random order."""
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    offsets = np.arange(BLOCK_SIZE, dtype=np.int32)
    return (table[:, None] * BLOCK_SIZE + offsets).reshape(-1)


def _kv_write(dtype: str, threads: int, name: str) -> Case:
    kind, tokens, layers = DTYPES[dtype], 512, 64
    blocks = 4 * tokens // BLOCK_SIZE
    slots = _slots(blocks)[:tokens]
    values = np.ones((tokens, KV_HEADS, WIDTH), kind)
    written = 2.0 * layers * tokens * KV_HEADS * WIDTH * kind.itemsize

    def run_with(kernels: Kernels) -> Run:
        shape = (layers, blocks, BLOCK_SIZE, KV_HEADS, WIDTH)
        zeros = (jnp.zeros(shape, kernels.pool_dtype(kind)) for _ in "kv")
        pools = KVPools(*(settled(kernels, pool) for pool in zeros))

        def program(pools: KVPools, values: Any) -> Any:
            def layer(index: Any, pools: KVPools) -> KVPools:
                return kernels.write_kv(pools, index, slots, values, values, np.int32(tokens))

            return lax.fori_loop(0, layers, layer, pools), values

        return timed_in_place(program, pools, jnp.array(values))

    return Case(
        name, dtype, "memcpy", 0.7, written,
        run_with(CpuKernels()), copying(written, threads, into=True),
        run_with(ReferenceKernels("cpu")),
    )  # fmt: skip


# ---- sampling ----

ROWS, VOCAB = 16, 49152
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "top-k 20, top-p 0.8": SamplingParams(top_k=20, top_p=0.8),
}


def _sample(dtype: str, own: SamplingParams, name: str) -> Case:
    """The floor reads the logits once; but for greedy rows, computing takes longer."""
    logits_bytes = ROWS * VOCAB * 4
    batches = -(-COLD_BYTES // logits_bytes)
    rng = np.random.default_rng(0)
    logits = tuple(3 * rng.standard_normal((ROWS, VOCAB), np.float32) for _ in range(batches))
    table = np.zeros(1, np.int32)
    rows = [
        BatchRow(SequenceId(AttemptId("", 0), row), (0,), 0, table, 0, RowSampling(own, row, 1))
        for row in range(ROWS)
    ]
    biases = SlotBiases(jnp.zeros((ROWS, BIASES), jnp.int32), jnp.zeros((ROWS, BIASES)))
    params = jax.device_put(unpack_sampling(pack_sampling(rows, ROWS), ROWS)[0])

    def run_with(kernels: Kernels) -> Run:
        def program(counts: Any, logits: tuple[Any, ...]) -> Any:
            for each in logits:  # a loop over one array would copy each batch out of it
                counts = kernels.sample(each, params, counts, biases, np.int32(ROWS))[1]
            return counts, logits

        counts = jnp.zeros((ROWS, VOCAB), jnp.int32)
        return timed_in_place(program, counts, jax.tree.map(jnp.array, logits))

    amount = float(batches * logits_bytes)
    return Case(
        name, dtype, "memory", None, amount,
        run_with(CpuKernels()), reading(amount), run_with(ReferenceKernels("cpu")),
    )  # fmt: skip
