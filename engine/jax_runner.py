"""Executes step plans with JAX: packs batches, owns the pools."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine import sampling
from engine.batches import pack_batch, pack_sampling
from engine.compiles import CompileCounter
from engine.kernels.interface import KVPools
from engine.models.decoder import Params
from engine.placing import Placement
from engine.plan import (
    BatchRow,
    CopyBlocks,
    ExportKV,
    ImportKV,
    LoadBiases,
    LoadTokenCounts,
    RunBatch,
    StepOutcome,
    StepPlan,
)
from engine.programs import ProgramShape, smallest
from engine.readback import Readback
from engine.sharding import copies_directly, sharding_of, views_directly
from engine.step_programs import POOL_AXES, StepPrograms
from engine.types import KVArrays
from telemetry.progress import progress

log = logging.getLogger("hexserve.engine")

BLOCK_COPIES = 16
"""Blocks of one run of the copy program."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The KV pool of one engine. `dtype` is that of K and V, however they are stored.

    `windowed_blocks`: those of a pool of their own for the windowed layers, in a model that has
    others as well; None: all layers have the one pool.
    """

    num_blocks: int
    block_size: int
    dtype: Any
    windowed_blocks: int | None = None


class JaxRunner:
    """One model's parameters, KV pools and compiled programs on one mesh."""

    def __init__(
        self,
        params: Params,
        placement: Placement,
        pool: PoolSpec,
        shapes: tuple[ProgramShape, ...],
        *,
        max_seqs: int,
        max_model_len: int,
        chunk_tokens: int,
    ) -> None:
        """Allocate the pools.

        Args:
            params: placed by `placement`.
            shapes: the batch programs to compile.
            max_seqs: slots, each with its penalty counts and biases.
            max_model_len: most tokens that LoadTokenCounts names.
            chunk_tokens: most tokens of one export or import.
        """
        traits, mesh = placement.traits, placement.mesh
        self._params = params
        whole, windowed = len(traits.whole_layers), len(traits.windowed_layers)
        self._mixed = bool(whole and windowed)
        sizes = [(traits.layers, pool.num_blocks)]
        if pool.windowed_blocks is not None:
            assert self._mixed, "all layers are of one kind"
            sizes = [(whole, pool.num_blocks), (windowed, pool.windowed_blocks)]
        self._shapes = tuple(replace(shape, groups=len(sizes)) for shape in shapes)
        self._block_size = pool.block_size
        self._num_blocks = pool.num_blocks
        self._num_slots = pool.num_blocks * pool.block_size
        self._chunk_tokens = chunk_tokens
        self._count_tokens = max_model_len
        self._dtype = jnp.dtype(pool.dtype)
        storage = placement.kernels.pool_dtype(self._dtype)
        token = (pool.block_size, placement.pool_heads, traits.head_dim)
        zeros = partial(jnp.zeros, dtype=storage, device=sharding_of(POOL_AXES, mesh))
        shaped = [(layers, blocks, *token) for layers, blocks in sizes]
        self._pools = jax.block_until_ready(tuple(KVPools(zeros(s), zeros(s)) for s in shaped))
        for each in self._pools:
            for array in each:
                placement.kernels.settle(array)
        replicated = sharding_of((None, None), mesh)
        self._counts = jnp.zeros((max_seqs, traits.vocab), jnp.int32, device=replicated)
        entries = (max_seqs, sampling.BIASES)
        self._biases = sampling.SlotBiases(
            jnp.zeros(entries, jnp.int32, device=replicated),
            jnp.zeros(entries, jnp.float32, device=replicated),
        )
        self._last_tokens = jnp.zeros(max_seqs, jnp.int32, device=sharding_of((None,), mesh))
        self._compiles = CompileCounter()
        self._programs = StepPrograms(
            placement, params, placement.dtype, self._dtype, len(self._pools)
        )

    def warm_up(self) -> None:
        """Compile and run every program once, on no live rows."""
        for shape in progress(self._shapes, "warm-up: programs", log):
            self._run_rows((), shape)
        nowhere, none = np.zeros(self._chunk_tokens, np.int32), np.int32(0)
        two = len(self._pools) > 1
        for windowed in (True, False) if self._mixed else (True,):
            slots = (nowhere,) * (1 + (two and windowed))
            exported = self._programs.export_kv(self._pools, slots, none, windowed=windowed)
            if not windowed and not two:
                continue  # it is other engines that have no use for the rest
            for chunk in exported, jax.device_get(exported):  # two programs to jax
                self._pools = self._programs.import_kv(self._pools, slots, none, chunk)
        if not two:
            self._run_copy_blocks(CopyBlocks((), ()))
        self._run_load_counts(LoadTokenCounts(0, (), ()))
        self._run_load_biases(LoadBiases(0, (), ()))
        self.wait()
        self._compiles.reset()

    def wait(self) -> None:
        """Until all that was run has been done: a step may return before its copies have."""
        jax.block_until_ready((self._pools, self._counts, self._biases))

    @property
    def compiles_after_warm_up(self) -> int:
        """See engine.runner.Runner."""
        return self._compiles.count

    def run(self, plan: StepPlan) -> StepOutcome:
        """Dispatch and wait."""
        return self.dispatch(plan)()

    def dispatch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        """See engine.runner.Runner."""
        self._compiles.watch_this_thread()
        readback = Readback()
        for entry in plan.entries:
            match entry:
                case RunBatch():
                    readback.batches.append((entry, *self._run_batch(entry)))
                case ImportKV():
                    self._run_import(entry)
                case ExportKV():
                    readback.exports.append((entry, self._run_export(entry)))
                case CopyBlocks():
                    self._run_copy_blocks(entry)
                case LoadTokenCounts():
                    self._run_load_counts(entry)
                case LoadBiases():
                    self._run_load_biases(entry)
        if not readback.batches and any(isinstance(entry, ImportKV) for entry in plan.entries):
            # What tells that they have been read: a batch computes on the pools after them.
            jax.block_until_ready(self._pools)
        return readback.outcome

    # ---- batches ----

    def _run_rows(
        self, rows: tuple[BatchRow, ...], shape: ProgramShape
    ) -> tuple[sampling.Sampled, sampling.Scores | None]:
        last, biases = self._last_tokens, self._biases
        forward = self._programs.forward(shape, self._params, self._pools, last)
        sample = self._programs.sample(shape.seqs, self._counts, biases, last)
        batch, how = pack_batch(rows, shape), pack_sampling(rows, shape.seqs)
        logits, self._pools, scores = forward(self._params, self._pools, batch, last)
        sampled, self._counts, self._last_tokens = sample(logits, how, self._counts, biases, last)
        return sampled, scores

    def _run_batch(self, entry: RunBatch) -> tuple[sampling.Sampled, sampling.Scores | None]:
        rows = entry.rows
        tokens = sum(len(row.tokens) for row in rows)
        if any(row.targets for row in rows):  # the programs of one-token rows compute no scores
            tokens = max(tokens, len(rows) + 1)
        shape = smallest(
            self._shapes,
            tokens=tokens,
            seqs=len(rows),
            blocks=max(len(row.blocks) for row in rows),
        )
        return self._run_rows(rows, shape)

    # ---- copies ----

    def _slots(self, entry: ExportKV | ImportKV) -> tuple[np.ndarray, ...]:
        """Padded, for each pool that holds some of the entry's layers."""
        given = (entry.slots, entry.windowed_slots)
        padding = self._chunk_tokens - len(entry.slots)
        return tuple(np.pad(slots, (0, padding)) for slots in given if slots is not None)

    def _run_export(self, entry: ExportKV) -> KVArrays:
        count = np.int32(entry.stop - entry.start)
        return self._programs.export_kv(
            self._pools, self._slots(entry), count, windowed=entry.windowed
        )

    def _run_import(self, entry: ImportKV) -> None:
        count = np.int32(len(entry.slots))
        chunk = tuple(self._whole(array) for array in entry.arrays)
        self._pools = self._programs.import_kv(self._pools, self._slots(entry), count, chunk)

    def _whole(self, array: Any) -> Any:
        """One whole chunk, on this engine's devices or the host, ready to be imported."""
        target = self._programs.chunk_sharding
        if isinstance(array, jax.Array):
            if copies_directly(array, target) and not views_directly(array, target):
                return jax.device_put(array, target)
            # A view; or a copy, where the other engine has its heads on more devices, or fewer.
            array = np.asarray(array)
        if array.shape[1] < self._chunk_tokens:
            layers, count, *rest = array.shape
            whole = np.zeros((layers, self._chunk_tokens, *rest), array.dtype)
            whole[:, :count] = array
            array = whole
        return array

    def _run_copy_blocks(self, entry: CopyBlocks) -> None:
        for begin in range(0, max(1, len(entry.sources)), BLOCK_COPIES):
            sources, targets = (
                np.array(blocks[begin : begin + BLOCK_COPIES], np.int32)
                for blocks in (entry.sources, entry.targets)
            )
            padding = (0, BLOCK_COPIES - len(sources))
            self._pools = self._programs.copy_blocks(
                self._pools,
                np.pad(sources, padding),
                np.pad(targets, padding),
                np.int32(len(sources)),
            )

    def _run_load_counts(self, entry: LoadTokenCounts) -> None:
        tokens = np.zeros(self._count_tokens, np.int32)
        added = np.zeros(self._count_tokens, np.int32)
        prompt = sorted(set(entry.prompt))
        tokens[: len(prompt)] = prompt
        added[: len(prompt)] = 1
        stop = len(prompt) + len(entry.output)
        tokens[len(prompt) : stop] = entry.output
        added[len(prompt) : stop] = sampling.COUNT_STEP
        self._counts = self._programs.load_counts(self._counts, np.int32(entry.slot), tokens, added)

    def _run_load_biases(self, entry: LoadBiases) -> None:
        ids = np.zeros(sampling.BIASES, np.int32)
        values = np.zeros(sampling.BIASES, np.float32)
        ids[: len(entry.ids)] = entry.ids
        values[: len(entry.values)] = entry.values
        self._biases = self._programs.load_biases(self._biases, np.int32(entry.slot), ids, values)
