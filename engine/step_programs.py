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
from engine.models.decoder import Decoder, Params, Pools
from engine.placing import Placement
from engine.programs import ProgramShape
from engine.prompt_scores import score_prompt
from engine.sharding import MODEL_AXIS, sharding_of

POOL_AXES = ("layer", "blocks", "block", "kv_heads", "head_dim")
_CHUNK_AXES = ("layer", None, "kv_heads", "head_dim")
_REPLICATED = PartitionSpec()


class StepPrograms:
    """Compiles on demand and keeps what it compiled. All programs update the pools in place.

    There is one pool for all layers; or one for those that see the whole context and one for the
    windowed ones, with slots and block tables for each.

    A chunk of KV enters and leaves as arrays [layers, chunk_tokens, heads, head_dim] of the
    model's own layers and heads and the KV's own dtype, laid out by `chunk_sharding`: by heads, or
    whole on every device where the pools hold other heads than the model. Without its `windowed`
    layers it has the others alone.
    """

    def __init__(
        self, placement: Placement, params: Params, dtype: Any, kv_dtype: Any, groups: int = 1
    ) -> None:
        """`dtype` is that of the activations, `kv_dtype` that of K and V, however stored.

        `groups`: how many pools there are.
        """
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

        traits = placement.traits
        self._whole = np.array(traits.whole_layers, np.int32)
        every = np.arange(traits.layers, dtype=np.int32)
        split = (self._whole, np.array(traits.windowed_layers, np.int32))
        self._layers = split if groups > 1 else (every,)  # of each pool
        pools = (KVPools(*[sharding_of(POOL_AXES, mesh).spec] * 2),) * groups
        chunk = (sharding_of(_CHUNK_AXES, mesh).spec,) * 2
        shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
        param_specs = jax.tree.map(lambda array: array.sharding.spec, params)
        self._forward_pass = partial(
            shard,
            in_specs=(param_specs, pools, _REPLICATED, _REPLICATED),
            out_specs=(_REPLICATED, pools, _REPLICATED),
        )
        copy = _REPLICATED, _REPLICATED
        exported = shard(self._export_shard, in_specs=(pools, *copy), out_specs=chunk)
        imported = shard(self._import_shard, in_specs=(pools, *copy, chunk), out_specs=pools)
        self._export, self._import = exported, imported
        self._kv_dtype = kv_dtype
        self._kv_places, self._pool_heads = placement.kv_places, placement.heads.kv
        self._heads_differ = self._kv_places != self._pool_heads
        self.chunk_sharding = sharding_of((None,) * 4 if self._heads_differ else _CHUNK_AXES, mesh)
        in_place = (KVPools(*[sharding_of(POOL_AXES, mesh)] * 2),) * groups
        everywhere = sharding_of((), mesh)
        self.export_kv: Callable[..., tuple[Array, ...]] = jax.jit(
            self._export_chunk, out_shardings=self.chunk_sharding, static_argnames="windowed"
        )
        self.import_kv: Callable[..., Pools] = jax.jit(
            self._import_chunk,
            in_shardings=(in_place, everywhere, everywhere, (self.chunk_sharding,) * 2),
            donate_argnums=0,
        )
        self.copy_blocks: Callable[..., Pools] = jax.jit(
            shard(self._copy_shard, in_specs=(pools, *copy, _REPLICATED), out_specs=pools),
            donate_argnums=0,
        )
        self.load_counts = jax.jit(sampling.load_counts, donate_argnums=0)
        self.load_biases = jax.jit(sampling.load_biases, donate_argnums=0)

    @property
    def forwards(self) -> dict[ProgramShape, Any]:
        """The forward programs compiled so far."""
        return self._forward

    def forward(self, shape: ProgramShape, params: Params, pools: Pools, last_tokens: Array) -> Any:
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

    def _export_chunk(
        self, pools: Pools, slots: tuple[Array, ...], live: Array, windowed: bool = True
    ) -> tuple[Array, ...]:
        """`slots` of each pool that has some of the layers."""
        chunk = tuple(self._exported(stored) for stored in self._export(pools, slots, live))
        if not windowed and len(pools) == 1:
            return tuple(_take_layers(values, self._whole) for values in chunk)
        return chunk

    def _exported(self, stored: Array) -> Array:
        values = lax.bitcast_convert_type(stored, self._kv_dtype)
        return _take_heads(values, self._kv_places) if self._heads_differ else values

    def _import_chunk(
        self, pools: Pools, slots: tuple[Array, ...], live: Array, chunk: tuple[Array, ...]
    ) -> Pools:
        stored = tuple(self._stored(values, pools[0].k.dtype) for values in chunk)
        return self._import(pools, slots, live, stored)

    def _stored(self, values: Array, storage: Any) -> Array:
        if self._heads_differ:  # no query head sees a head of zeros: any value will do there
            values = _take_heads(values, tuple(max(head, 0) for head in self._pool_heads))
        return lax.bitcast_convert_type(values, storage)

    # ---- one shard's part ----

    def _run_shard(
        self, shape: ProgramShape, params: Params, pools: Pools, words: Array, last: Array
    ) -> tuple[Array, Pools, sampling.Scores | None]:
        batches, slots, targets = unpack_batch(words, shape)
        batch = batches[0]
        sampled = last[slots[row_of_token(batch)]]  # [T]
        tokens = jnp.where(batch.tokens < 0, sampled, batch.tokens)
        batches = tuple(each._replace(tokens=tokens) for each in batches)
        x, pools = self._decoder.forward(params, pools, batches)
        scores = score_prompt(self._decoder, params, x, targets) if shape.targets else None
        last = x[jnp.maximum(batch.starts[1:] - 1, 0)]  # [S, hidden]
        return self._decoder.logits(params, last, batch.num_rows), pools, scores

    def _export_shard(
        self, pools: Pools, slots: tuple[Array, ...], live: Array
    ) -> tuple[Array, ...]:
        parts = [
            [self._kernels.export_kv(pool, own, live, *_all_of(pool)) for pool in pair]
            for pair, own in zip(pools, slots, strict=False)
        ]
        if len(parts) == 1:
            return tuple(parts[0])
        order = np.argsort(np.concatenate(self._layers))
        return tuple(
            _take_layers(jnp.concatenate(arrays), order) for arrays in zip(*parts, strict=True)
        )

    def _import_shard(
        self, pools: Pools, slots: tuple[Array, ...], live: Array, values: tuple[Array, ...]
    ) -> Pools:
        written = [
            KVPools(
                *(
                    self._kernels.import_kv(
                        pool, own, live, v if len(slots) == 1 else _take_layers(v, layers), 0, 0
                    )
                    for pool, v in zip(pair, values, strict=True)
                )
            )
            for pair, own, layers in zip(pools, slots, self._layers, strict=False)
        ]
        return (*written, *pools[len(written) :])

    def _copy_shard(self, pools: Pools, sources: Array, targets: Array, live: Array) -> Pools:
        (pair,) = pools
        return (KVPools(*(self._kernels.copy_blocks(p, sources, targets, live) for p in pair)),)


def _all_of(pool: Array) -> tuple[tuple[int, int], tuple[int, int]]:
    """All layers and heads, as export_kv takes them."""
    return (0, pool.shape[0]), (0, pool.shape[3])


def _take_layers(values: Array, layers: np.ndarray) -> Array:
    return jnp.take(values, layers, axis=0)


def _take_heads(values: Array, heads: tuple[int, ...]) -> Array:
    return jnp.take(values, np.array(heads, np.int32), axis=2)
