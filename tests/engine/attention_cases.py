"""Random ragged batches over paged KV, and what dense attention makes of them in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from engine.kernels.interface import AttentionSpec, Batch, KVPools

LAYERS, LAYER = 2, 1
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """A batch: rows are (query tokens, tokens before them)."""

    rows: tuple[tuple[int, int], ...]
    spec: AttentionSpec
    group: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    pool_type: Any = np.float32
    query_type: Any = np.float32
    seed: int = 0

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.pool_type == self.query_type == np.float32 else 1e-2


def first_seen(position: int, spec: AttentionSpec) -> int:
    by_window = position - spec.window + 1 if spec.window else 0
    by_chunk = position // spec.chunk * spec.chunk if spec.chunk else 0
    return max(0, by_window, by_chunk)


@dataclass
class Built:
    """The operands of a case, and what lies behind them."""

    q: np.ndarray
    pools: KVPools
    batch: Batch
    keys: list[np.ndarray]
    values: list[np.ndarray]


def build(case: Case) -> Built:
    """Every slot that no row sees is NaN, every table entry that no row needs is no block."""
    rng = np.random.default_rng(case.seed)
    size, width = case.block_size, (case.kv_heads, case.head_dim)
    lengths = [count + before for count, before in case.rows]
    needed = [-(-length // size) for length in lengths]
    order = rng.permutation(sum(needed) + 2).astype(np.int32)
    pools = [np.full((LAYERS, len(order) * size, *width), np.nan, case.pool_type) for _ in "kv"]
    tables = np.full((len(case.rows) + 1, max(needed, default=0) + 1), -7, np.int32)
    contents: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for row, ((count, before), length) in enumerate(zip(case.rows, lengths, strict=True)):
        blocks, order = order[: needed[row]], order[needed[row] :]
        low = first_seen(before, case.spec) if count else length
        tables[row, low // size : needed[row]] = blocks[low // size :]
        positions = np.arange(low, length)
        slots = blocks[positions // size] * size + positions % size
        for pool, content in zip(pools, contents, strict=True):
            content.append(rng.standard_normal((length, *width)).astype(case.pool_type))
            pool[LAYER, slots] = content[-1][low:]
    counts = [count for count, _ in case.rows]
    total = sum(counts)
    starts = np.cumsum([0, *counts, 0]).astype(np.int32)
    q = rng.standard_normal((total + 3, case.kv_heads * case.group, case.head_dim))
    q[total:] = np.nan
    batch = Batch(
        np.zeros(total + 3, np.int32), starts, tables, np.array([*lengths, -9], np.int32),
        np.int32(len(case.rows)), np.int32(0), np.int32(total),
    )  # fmt: skip
    paged = KVPools(*(pool.reshape(LAYERS, -1, size, *width) for pool in pools))
    return Built(q.astype(case.query_type), paged, batch, *contents)


def oracle(case: Case, built: Built) -> np.ndarray:
    """float64 [tokens, heads, head_dim]."""
    spec, out = case.spec, np.zeros(built.q.shape)
    for row, (count, before) in enumerate(case.rows):
        if count == 0:
            continue
        start = built.batch.starts[row]
        position, key = before + np.arange(count)[:, None], np.arange(before + count)[None, :]
        seen = key <= position
        if spec.window:
            seen &= key > position - spec.window
        if spec.chunk:
            seen &= key // spec.chunk == position // spec.chunk
        for head in range(case.kv_heads * case.group):
            q = built.q[start : start + count, head].astype(np.float64)
            k, v = (
                content[row][:, head // case.group].astype(np.float64)
                for content in (built.keys, built.values)
            )
            scores = spec.scale * (q @ k.T)
            if spec.soft_cap:
                scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[start : start + count, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out[: built.batch.num_tokens]


specs = st.builds(
    AttentionSpec,
    # Up to five times head_dim**-0.5 for the widest heads: beyond, scores of 40 would leave float32
    # too few digits, whoever adds them up.
    scale=st.sampled_from([0.0625, 0.125, 0.2, 0.3]),
    soft_cap=st.sampled_from([None, None, 2.0, 30.0]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    chunk=st.one_of(st.none(), st.integers(1, 300)),
)
rows = st.tuples(
    st.sampled_from([0, 1, 1, 1, 2, 5, 13, 70, 200]),
    st.one_of(st.integers(0, 20), st.integers(0, 400)),
)
cases = st.builds(
    Case,
    rows=st.lists(rows, max_size=6).map(tuple),
    spec=specs,
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(8, 128).map(lambda n: 2 * n),
    block_size=st.sampled_from([8, 16, 32, 5]),
    pool_type=st.sampled_from(list(TYPES.values())),
    query_type=st.sampled_from(list(TYPES.values())),
    seed=st.integers(0, 1000),
)
