"""The compiled programs that a runner executes: one model, one mesh, one set of kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from engine import sampling
from engine.batches import pack_batch, pack_sampling, unpack_batch, unpack_sampling
from engine.kernels.batch import row_of_token
from engine.kernels.interface import KVPools
from engine.models.decoder import Decoder, Params
from engine.placing import Placement
from engine.programs import ProgramShape
from engine.prompt_scores import score_prompt
from engine.sharding import MODEL_AXIS, sharding_of

POOL_AXES = ("layer", "blocks", "block", "kv_heads", "head_dim")
_CHUNK_AXES = ("layer", None, "kv_heads", "head_dim")
_REPLICATED = PartitionSpec()


class StepPrograms:
    """Compiles on demand and keeps what it compiled. All programs update the pools in place.

    A chunk of KV enters and leaves as arrays [layers, chunk_tokens, heads, head_dim] of the
    model's own heads and the KV's own dtype, laid out by `chunk_sharding`: by heads, or whole
    on every device where the pools hold other heads than the model.
    """

    def __init__(self, placement: Placement, params: Params, dtype: Any, kv_dtype: Any) -> None:
        """`dtype` is that of the activations, `kv_dtype` that of K and V, however stored."""
        mesh = placement.mesh
        self._decoder = Decoder(
            placement.shard, placement.kernels, MODEL_AXIS if mesh.size > 1 else None
        )
        self._kernels = placement.kernels
        self._replicated = sharding_of((None, None), mesh)
        # Accelerators multiply float32 in fewer bits unless they are told not to.
        self._precision = "highest" if dtype == jnp.float32 else "default"
        self._vocab = placement.traits.vocab
        self._forward: dict[ProgramShape, Any] = {}
        self._sample: dict[int, Any] = {}

        pools = KVPools(*[sharding_of(POOL_AXES, mesh).spec] * 2)
        chunk = (sharding_of(_CHUNK_AXES, mesh).spec,) * 2
        shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
        param_specs = jax.tree.map(lambda array: array.sharding.spec, params)
        self._forward_pass = partial(
            shard,
            in_specs=(param_specs, pools, _REPLICATED, _REPLICATED),
            out_specs=(_REPLICATED, pools, _REPLICATED),
        )
        copy = _REPLICATED, _REPLICATED
        self._kv_dtype = kv_dtype
        self._kv_places, self._pool_heads = placement.kv_places, placement.heads.kv
        self._heads_differ = self._kv_places != self._pool_heads
        self.chunk_sharding = sharding_of((None,) * 4 if self._heads_differ else _CHUNK_AXES, mesh)
        self._export = shard(self._export_shard, in_specs=(pools, *copy), out_specs=chunk)
        self._import = shard(self._import_shard, in_specs=(pools, *copy, chunk), out_specs=pools)
        in_place = KVPools(*[sharding_of(POOL_AXES, mesh)] * 2)
        everywhere = sharding_of((), mesh)
        self.export_kv: Callable[..., tuple[Array, ...]] = jax.jit(
            self._export_chunk, out_shardings=self.chunk_sharding
        )
        self.import_kv: Callable[..., KVPools] = jax.jit(
            self._import_chunk,
            in_shardings=(in_place, everywhere, everywhere, (self.chunk_sharding,) * 2),
            donate_argnums=0,
        )
        self.copy_blocks: Callable[..., KVPools] = jax.jit(
            shard(self._copy_shard, in_specs=(pools, *copy, _REPLICATED), out_specs=pools),
            donate_argnums=0,
        )
        self.load_counts = jax.jit(sampling.load_counts, donate_argnums=0)
        self.load_biases = jax.jit(sampling.load_biases, donate_argnums=0)

    @property
    def forwards(self) -> dict[ProgramShape, Any]:
        """The forward programs compiled so far."""
        return self._forward

    def forward(
        self, shape: ProgramShape, params: Params, pools: KVPools, last_tokens: Array
    ) -> Any:
        """(params, pools, packed batch, last tokens) -> (float32 logits [S, vocab], pools, scores).

        The scores are those of the batch's targets; None in a program without prompts.
        """
        program = self._forward.get(shape)
        if program is None:
            step = jax.jit(self._forward_pass(partial(self._run_shard, shape)), donate_argnums=1)
            with jax.default_matmul_precision(self._precision):
                lowered = step.lower(params, pools, pack_batch((), shape), last_tokens)
            program = self._forward[shape] = lowered.compile()
        return program

    def sample(
        self, seqs: int, counts: Array, biases: sampling.SlotBiases, last_tokens: Array
    ) -> Any:
        """(logits, packed sampling, counts, biases, last tokens) -> (sampled, counts, last tokens).

        Sampling depends on the number of rows alone: apart, it is compiled far less often.
        """
        program = self._sample.get(seqs)
        if program is None:
            logits = jax.ShapeDtypeStruct(
                (seqs, self._vocab), jnp.float32, sharding=self._replicated
            )
            arguments = (logits, pack_sampling((), seqs), counts, biases, last_tokens)
            jitted = jax.jit(partial(self._sample_rows, seqs), donate_argnums=2)
            program = self._sample[seqs] = jitted.lower(*arguments).compile()
        return program

    def _sample_rows(
        self,
        seqs: int,
        logits: Array,
        words: Array,
        counts: Array,
        biases: sampling.SlotBiases,
        last_tokens: Array,
    ) -> tuple[sampling.Sampled, Array, Array]:
        params, slots, live = unpack_sampling(words, seqs)
        sampled, counts = self._kernels.sample(logits, params, counts, biases, live)
        # [S, slots]: a scatter of a few tokens would be a loop on some platforms.
        kept = slots[:, None] == jnp.arange(last_tokens.shape[0], dtype=jnp.int32)
        new = jnp.where(kept, sampled.tokens[:, None], 0).sum(0, dtype=jnp.int32)
        return sampled, counts, jnp.where(kept.any(0), new, last_tokens)

    # ---- chunks of KV, in the model's heads ----

    def _export_chunk(self, pools: KVPools, slots: Array, live: Array) -> tuple[Array, ...]:
        return tuple(self._exported(stored) for stored in self._export(pools, slots, live))

    def _exported(self, stored: Array) -> Array:
        values = lax.bitcast_convert_type(stored, self._kv_dtype)
        return _take_heads(values, self._kv_places) if self._heads_differ else values

    def _import_chunk(
        self, pools: KVPools, slots: Array, live: Array, chunk: tuple[Array, ...]
    ) -> KVPools:
        stored = tuple(self._stored(values, pools.k.dtype) for values in chunk)
        return self._import(pools, slots, live, stored)

    def _stored(self, values: Array, storage: Any) -> Array:
        if self._heads_differ:  # no query head sees a head of zeros: any value will do there
            values = _take_heads(values, tuple(max(head, 0) for head in self._pool_heads))
        return lax.bitcast_convert_type(values, storage)

    # ---- one shard's part ----

    def _run_shard(
        self, shape: ProgramShape, params: Params, pools: KVPools, words: Array, last: Array
    ) -> tuple[Array, KVPools, sampling.Scores | None]:
        batch, slots, targets = unpack_batch(words, shape)
        sampled = last[slots[row_of_token(batch)]]  # [T]
        batch = batch._replace(tokens=jnp.where(batch.tokens < 0, sampled, batch.tokens))
        x, pools = self._decoder.forward(params, pools, batch)
        scores = score_prompt(self._decoder, params, x, targets) if shape.targets else None
        last = x[jnp.maximum(batch.starts[1:] - 1, 0)]  # [S, hidden]
        return self._decoder.logits(params, last, batch.num_rows), pools, scores

    def _export_shard(self, pools: KVPools, slots: Array, live: Array) -> tuple[Array, ...]:
        layers, heads = (0, pools.k.shape[0]), (0, pools.k.shape[3])
        return tuple(self._kernels.export_kv(pool, slots, live, layers, heads) for pool in pools)

    def _import_shard(
        self, pools: KVPools, slots: Array, live: Array, values: tuple[Array, ...]
    ) -> KVPools:
        pairs = zip(pools, values, strict=True)
        return KVPools(*(self._kernels.import_kv(p, slots, live, v, 0, 0) for p, v in pairs))

    def _copy_shard(self, pools: KVPools, sources: Array, targets: Array, live: Array) -> KVPools:
        return KVPools(*(self._kernels.copy_blocks(p, sources, targets, live) for p in pools))


def _take_heads(values: Array, heads: tuple[int, ...]) -> Array:
    return jnp.take(values, np.array(heads, np.int32), axis=2)
