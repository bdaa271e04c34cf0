"""Executes step plans with JAX: packs batches, keeps the programs, owns the pools."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from engine import sampling
from engine.batches import pack_batch, pack_sampling
from engine.compiles import CompileCounter
from engine.kernels import reference as kernels
from engine.models import decoder
from engine.models.decoder import KVPools, Params
from engine.models.traits import Traits
from engine.plan import (
    ExportKV,
    ImportKV,
    LoadTokenCounts,
    RunBatch,
    StepOutcome,
    StepPlan,
)
from engine.programs import ProgramShape, smallest
from engine.sharding import sharding_of
from engine.types import TokenLogprobs
from telemetry.progress import progress

log = logging.getLogger("hexserve.engine")

POOL_AXES = ("layer", "blocks", "block", "kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The KV pool of one engine. `dtype` is that of K and V, however they are stored."""

    num_blocks: int
    block_size: int
    dtype: Any


class JaxRunner:
    """One model's parameters, KV pools and compiled programs on one mesh."""

    def __init__(
        self,
        params: Params,
        traits: Traits,
        mesh: Mesh,
        pool: PoolSpec,
        shapes: tuple[ProgramShape, ...],
        *,
        max_seqs: int,
        max_model_len: int,
        chunk_tokens: int,
    ) -> None:
        """Allocate the pools.

        Args:
            shapes: the batch programs to compile.
            max_seqs: rows of the penalty counts.
            max_model_len: most tokens that LoadTokenCounts names.
            chunk_tokens: most tokens of one export or import.
        """
        self._params = params
        self._traits = traits
        self._shapes = shapes
        self._block_size = pool.block_size
        self._num_slots = pool.num_blocks * pool.block_size
        self._chunk_tokens = chunk_tokens
        self._count_tokens = max_model_len
        self._dtype = jnp.dtype(pool.dtype)
        platform = mesh.devices.flat[0].platform
        # Accelerators multiply float32 in fewer bits unless they are told not to.
        self._precision = "highest" if self._dtype == jnp.float32 else "default"
        self._storage = kernels.storage_dtype(self._dtype, platform)
        shape = (
            traits.layers, pool.num_blocks, pool.block_size, traits.kv_heads, traits.head_dim
        )  # fmt: skip
        zeros = partial(jnp.zeros, shape, self._storage, device=sharding_of(POOL_AXES, mesh))
        self._pools = KVPools(zeros(), zeros())
        self._replicated = sharding_of((None, None), mesh)
        self._counts = jnp.zeros((max_seqs, traits.vocab), jnp.int32, device=self._replicated)
        self._compiles = CompileCounter()
        self._forward: dict[ProgramShape, Any] = {}
        self._sample: dict[int, Any] = {}
        self._export = jax.jit(_export)
        self._import = jax.jit(_import, donate_argnums=0)
        self._load_counts = jax.jit(sampling.load_counts, donate_argnums=0)

    def warm_up(self) -> None:
        """Compile and run every program once, on no live rows."""
        for shape in progress(self._shapes, "warm-up: programs", log):
            self._run_padded(shape, pack_batch((), shape), pack_sampling((), shape))
        nowhere = np.full(self._chunk_tokens, self._num_slots, np.int32)
        exported = self._export(self._pools, nowhere)
        zeros = tuple(np.zeros(e.shape, e.dtype) for e in exported)
        self._pools = self._import(self._pools, nowhere, zeros)
        self._run_load_counts(LoadTokenCounts(0, (), ()))
        jax.block_until_ready((self._pools, self._counts))
        self._compiles.reset()

    @property
    def compiles_after_warm_up(self) -> int:
        """See engine.runner.Runner."""
        return self._compiles.count

    def run(self, plan: StepPlan) -> StepOutcome:
        """See engine.runner.Runner."""
        outcome = StepOutcome()
        for entry in plan.entries:
            match entry:
                case RunBatch():
                    self._run_batch(entry, outcome)
                case ImportKV():
                    self._run_import(entry)
                case ExportKV():
                    self._run_export(entry, outcome)
                case LoadTokenCounts():
                    self._run_load_counts(entry)
        return outcome

    # ---- batches ----

    def _programs(self, shape: ProgramShape) -> tuple[Any, Any]:
        """The compiled forward pass of `shape`, and the sampling of its rows.

        Sampling depends on the number of rows alone: apart, it is compiled far less often.
        """
        forward = self._forward.get(shape)
        if forward is None:
            step = partial(_forward, traits=self._traits, dtype=self._dtype)
            batch = pack_batch((), shape)
            with jax.default_matmul_precision(self._precision):
                lowered = jax.jit(step, donate_argnums=1).lower(self._params, self._pools, batch)
            forward = lowered.compile()
            self._forward[shape] = forward
        sample = self._sample.get(shape.seqs)
        if sample is None:
            logits = jax.ShapeDtypeStruct(
                (shape.seqs, self._traits.vocab), jnp.float32, sharding=self._replicated
            )
            arguments = (logits, pack_sampling((), shape), self._counts, np.int32(0))
            sample = jax.jit(sampling.sample, donate_argnums=2).lower(*arguments).compile()
            self._sample[shape.seqs] = sample
        return forward, sample

    def _run_padded(
        self, shape: ProgramShape, batch: kernels.Batch, rows: sampling.RowParams
    ) -> sampling.Sampled:
        forward, sample = self._programs(shape)
        logits, self._pools = forward(self._params, self._pools, batch)
        sampled, self._counts = sample(logits, rows, self._counts, batch.num_rows)
        return sampled

    def _run_batch(self, entry: RunBatch, outcome: StepOutcome) -> None:
        rows = entry.rows
        shape = smallest(
            self._shapes,
            tokens=sum(len(row.tokens) for row in rows),
            seqs=len(rows),
            blocks=max(len(row.blocks) for row in rows),
        )
        batch = pack_batch(rows, shape)
        sampled = self._run_padded(shape, batch, pack_sampling(rows, shape))
        tokens, logprobs, top_ids, top_logprobs = jax.device_get(sampled)
        for index, row in enumerate(rows):
            if row.sampling is None:
                continue
            outcome.tokens[row.id] = int(tokens[index])
            best = row.sampling.params.top_logprobs
            if best is not None:
                outcome.logprobs[row.id] = TokenLogprobs(
                    float(logprobs[index]),
                    tuple(top_ids[index, :best].tolist()),
                    tuple(top_logprobs[index, :best].tolist()),
                )

    # ---- copies ----

    def _padded_slots(self, slots: np.ndarray) -> np.ndarray:
        padded = np.full(self._chunk_tokens, self._num_slots, np.int32)
        padded[: len(slots)] = slots
        return padded

    def _run_export(self, entry: ExportKV, outcome: StepOutcome) -> None:
        count = entry.stop - entry.start
        exported = self._export(self._pools, self._padded_slots(entry.slots))
        outcome.exported[entry.read_id] = tuple(
            np.asarray(array)[:, :count].view(self._dtype) for array in exported
        )

    def _run_import(self, entry: ImportKV) -> None:
        count = len(entry.slots)
        padded = []
        for array in entry.arrays:
            if count < self._chunk_tokens:
                whole = np.zeros(
                    (array.shape[0], self._chunk_tokens, *array.shape[2:]), array.dtype
                )
                whole[:, :count] = array
                array = whole
            padded.append(array.view(self._storage))
        self._pools = self._import(self._pools, self._padded_slots(entry.slots), tuple(padded))
        # The arrays may be shared memory that is reused once this step has returned.
        jax.block_until_ready(self._pools)

    def _run_load_counts(self, entry: LoadTokenCounts) -> None:
        tokens = np.zeros(self._count_tokens, np.int32)
        added = np.zeros(self._count_tokens, np.int32)
        prompt = sorted(set(entry.prompt))
        tokens[: len(prompt)] = prompt
        added[: len(prompt)] = 1
        stop = len(prompt) + len(entry.output)
        tokens[len(prompt) : stop] = entry.output
        added[len(prompt) : stop] = sampling.COUNT_STEP
        self._counts = self._load_counts(self._counts, np.int32(entry.slot), tokens, added)


def _forward(
    params: Params, pools: KVPools, batch: kernels.Batch, *, traits: Traits, dtype: Any
) -> tuple[jax.Array, KVPools]:
    hidden, pools = decoder.forward(params, traits, pools, batch, dtype)
    return decoder.logits(params, hidden), pools


def _export(pools: KVPools, slots: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(kernels.export_kv(pool, slots) for pool in pools)


def _import(pools: KVPools, slots: jax.Array, values: tuple[jax.Array, ...]) -> KVPools:
    written = (kernels.import_kv(p, slots, v) for p, v in zip(pools, values, strict=True))
    return KVPools(*written)
