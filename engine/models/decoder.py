"""The decoder: token ids and KV pools in, hidden states and KV pools out.

Runs on each device's shard of the model; what the shards have in parts is summed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.kernels.batch import Batch, positions_and_slots
from engine.kernels.interface import AttentionSpec, Kernels, KVPools, Linear
from engine.kernels.quantized import take_rows
from engine.models.traits import Traits

Params = dict[str, Any]  # Array, Quantized or Linear


@dataclass(frozen=True, slots=True)
class Decoder:
    """One shard's computation.

    Attributes:
        traits: of the shard: its heads, its part of the MLP; the whole vocabulary.
        kernels: what computes it.
        axis: the mesh axis that the shards lie on; None where there is one shard.
    """

    traits: Traits
    kernels: Kernels
    axis: str | None

    def forward(self, params: Params, pools: KVPools, batch: Batch) -> tuple[Array, KVPools]:
        """Run all layers over a ragged batch.

        Writes the KV of the batch's tokens into `pools` (donate them).

        Returns:
            hidden [S, hidden]: the state of each row's last token, normed for `logits`;
            and the pools.
        """
        t, ops, live = self.traits, self.kernels, batch.num_tokens
        blocks, block_size = pools.k.shape[1:3]
        positions, slots = positions_and_slots(batch, block_size, blocks * block_size)
        spec = AttentionSpec(scale=t.head_dim**-0.5)
        with jax.named_scope("embed"):
            x = self._embed(params, batch.tokens)  # [T, hidden]
        total = x.shape[0]

        def layer(carry: tuple[Array, KVPools], index: Array) -> tuple[tuple[Array, KVPools], None]:
            x, pools = carry
            with jax.named_scope("qkv"):
                h = ops.rms_norm(x, params["attention_norm"], index, live, t.norm_eps)
                weights = (params["q"], params["k"], params["v"])
                q, k, v = ops.linear(h, weights, index, live)
                q = q.reshape(total, t.heads, t.head_dim)
                k = k.reshape(total, t.kv_heads, t.head_dim)
                v = v.reshape(total, t.kv_heads, t.head_dim)
                q, k = ops.rotate(q, k, params["angles"], positions, live)
            with jax.named_scope("attention"):
                pools = ops.write_kv(pools, index, slots, k, v, live)
                mixed = ops.attention(q, pools, index, batch, spec)
                mixed = mixed.reshape(total, t.heads * t.head_dim)
                x = self._add_parts(x, mixed, params["o"], index, live)
            with jax.named_scope("mlp"):
                h = ops.rms_norm(x, params["mlp_norm"], index, live, t.norm_eps)
                h = ops.gated_linear(h, params["gate"], params["up"], index, live)
                x = self._add_parts(x, h, params["down"], index, live)
            return (x, pools), None

        layers = jnp.arange(t.layers, dtype=jnp.int32)
        (x, pools), _ = lax.scan(layer, (x, pools), layers)
        last = x[jnp.maximum(batch.starts[1:] - 1, 0)]  # [S, hidden]
        first_layer = jnp.int32(0)
        hidden = ops.rms_norm(last, params["final_norm"], first_layer, batch.num_rows, t.norm_eps)
        return hidden, pools

    def logits(self, params: Params, hidden: Array, live: Array) -> Array:
        """float32 [S, vocab] from normed hidden states [S, hidden], the first `live` rows."""
        with jax.named_scope("logits"):
            own = self.kernels.logits(hidden, params["head"], live)
            if self.axis is None:
                return own
            return lax.all_gather(own, self.axis, axis=1, tiled=True)[:, : self.traits.vocab]

    def _add_parts(self, x: Array, h: Array, weight: Linear, index: Array, live: Array) -> Array:
        """x plus h times a weight whose inputs lie on all shards."""
        if self.axis is None:
            return self.kernels.linear(h, (weight,), index, live, residual=x)[0]
        (part,) = self.kernels.linear(h, (weight,), index, live, wide=True)
        # Rounded once, as on one device.
        return (x.astype(jnp.float32) + lax.psum(part, self.axis)).astype(x.dtype)

    def _embed(self, params: Params, tokens: Array) -> Array:
        """[T, hidden]; the vocabulary lies on all shards."""
        table, head = params.get("embedding"), params["head"]
        size = head.features  # of a table of its own as well

        def rows(own: Array) -> Array:
            return self.kernels.embed(head, own) if table is None else take_rows(table, own)

        if self.axis is None:
            return rows(tokens)
        own = tokens - lax.axis_index(self.axis) * size
        here = (own >= 0) & (own < size)
        return lax.psum(jnp.where(here[:, None], rows(jnp.where(here, own, 0)), 0), self.axis)
