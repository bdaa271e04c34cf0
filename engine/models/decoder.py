"""The decoder: token ids and KV pools in, hidden states and KV pools out.

Runs on each device's shard of the model; what the shards have in parts is summed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.kernels.batch import Batch, positions_and_slots
from engine.kernels.interface import AttentionSpec, Kernels, KVPools, Linear, RoutingSpec
from engine.kernels.quantized import take_rows
from engine.models.layers import Segment, segments_of
from engine.models.traits import LayerKind, Traits

Params = dict[str, Any]  # Array, Quantized or Linear; tuples of tables


Pools = tuple[KVPools, ...]
"""One for all layers; or one for those that see the whole context, and one for the others."""
_Forwarded = tuple[Array, Pools]


class _Step(NamedTuple):
    """What all layers of one step share; batches and slots differ by layer group."""

    params: Params
    batches: tuple[Batch, ...]
    positions: Array
    slots: tuple[Array, ...]

    @property
    def live(self) -> Array:
        """Live tokens."""
        live: Array = self.batches[0].num_tokens
        return live


class _Result(NamedTuple):
    """What attention or an MLP ends with on one shard: the sum of its parts.

    Attributes:
        product: (h, weight, which of the weight's matrices): h times the matrix.
        routed: float32 [T, hidden], of routed experts.
    """

    product: tuple[Array, Linear, Array] | None
    routed: Array | None = None


def _group(kind: LayerKind, pools: Pools) -> int:
    """Which of the pools a layer has its KV in."""
    return int(len(pools) > 1 and kind.reach is not None)


@dataclass(frozen=True, slots=True)
class Decoder:
    """One shard's computation.

    Attributes:
        traits: of the shard: its heads, its part of the MLPs; the whole vocabulary.
        kernels: what computes it.
        axis: the mesh axis that the shards lie on; None where there is one shard.
    """

    traits: Traits
    kernels: Kernels
    axis: str | None

    def forward(self, params: Params, pools: Pools, batches: tuple[Batch, ...]) -> _Forwarded:
        """Run all layers over a ragged batch.

        Writes the KV of the batch's tokens into `pools` (donate them).

        Args:
            pools: of all layers; or of those that see the whole context and of the others.
            batches: the batch with the tables of each of these.

        Returns:
            the state [T, hidden] of each token, for `logits`; and the pools.
        """
        t = self.traits
        slots: list[Array] = []
        for own, batch in zip(pools, batches, strict=True):
            blocks, block_size = own.k.shape[1:3]
            positions, places = positions_and_slots(batch, block_size, blocks * block_size)
            slots.append(places)
        with jax.named_scope("embed"):
            x = self._embed(params, batch.tokens)  # [T, hidden]
        step = _Step(params, batches, positions, tuple(slots))
        for segment in segments_of(t.kinds):
            unit = partial(self._unit, step, segment)
            repeats = jnp.arange(segment.repeats, dtype=jnp.int32)
            (x, pools), _ = lax.scan(unit, (x, pools), repeats)
        return x, pools

    def logits(self, params: Params, x: Array, live: Array) -> Array:
        """float32 [S, vocab] from the states [S, hidden] of some tokens, the first `live` rows."""
        with jax.named_scope("logits"):
            hidden = self._norm(x, params["final_norm"], jnp.int32(0), live)
            cap = self.traits.logit_soft_cap
            own = self.kernels.logits(hidden, params["head"], live, cap)
            if self.axis is None:
                return own
            return lax.all_gather(own, self.axis, axis=1, tiled=True)[:, : self.traits.vocab]

    # ---- layers ----

    def _unit(
        self, step: _Step, segment: Segment, carry: _Forwarded, repeat: Array
    ) -> tuple[_Forwarded, None]:
        """One repeat of a segment's layers."""
        x, pools = carry
        params, live = step.params, step.live
        routed = [kind.experts for kind in self.traits.kinds]
        groups = [_group(kind, pools) for kind in self.traits.kinds]
        for place, kind in enumerate(segment.kinds):
            first = segment.first + place
            layer = first + repeat * len(segment.kinds)
            group = groups[first]
            each = sum(_group(other, pools) == group for other in segment.kinds)
            in_pool = groups[:first].count(group) + repeat * each
            with jax.named_scope("attention"):
                mixed, pools = self._attention(step, x, pools, kind, layer, in_pool)
                x = self._add(step, x, mixed, "attention_post_norm", layer)
            with jax.named_scope("mlp"):
                h = self._norm(x, params["mlp_norm"], layer, live)
                # Experts lie apart from MLPs, each for those layers alone that have them.
                each = sum(other.experts == kind.experts for other in segment.kinds)
                own = routed[:first].count(kind.experts) + repeat * each
                result = (self._experts if kind.experts else self._mlp)(step, h, own)
                x = self._add(step, x, result, "mlp_post_norm", layer)
        return (x, pools), None

    def _attention(
        self, step: _Step, x: Array, pools: Pools, kind: LayerKind, layer: Array, in_pool: Array
    ) -> tuple[_Result, Pools]:
        """`layer` is `in_pool` of its group's pool."""
        t, ops, params, live = self.traits, self.kernels, step.params, step.live
        total = x.shape[0]
        h = self._norm(x, params["attention_norm"], layer, live)
        q, k, v = ops.linear(h, (params["q"], params["k"], params["v"]), layer, live)
        q = q.reshape(total, t.heads, t.head_dim)
        k = k.reshape(total, t.kv_heads, t.head_dim)
        v = v.reshape(total, t.kv_heads, t.head_dim)
        if kind.head_norm:
            q = ops.head_norm(q, params.get("q_norm"), layer, live, t.norm_eps)
            k = ops.head_norm(k, params.get("k_norm"), layer, live, t.norm_eps)
        if kind.rope is not None:
            q, k = ops.rotate(q, k, params["angles"][kind.rope], step.positions, live)
        if kind.temperature is not None:
            scales = params["query_scales"][step.positions][:, None, None]
            q = (q.astype(jnp.float32) * scales).astype(q.dtype)
        group = _group(kind, pools)
        own = ops.write_kv(pools[group], in_pool, step.slots[group], k, v, live)
        spec = AttentionSpec(t.score_scale, t.attention_soft_cap, kind.window, kind.chunk)
        mixed = ops.attention(q, own, in_pool, step.batches[group], spec)
        pools = (*pools[:group], own, *pools[group + 1 :])
        mixed = mixed.reshape(total, t.heads * t.head_dim)
        return _Result((mixed, params["o"], layer)), pools

    def _mlp(self, step: _Step, h: Array, index: Array, name: str = "") -> _Result:
        """The gated MLP `index`, or of experts that all tokens share."""
        params, live = step.params, step.live
        gate, up, down = (params[name + part] for part in ("gate", "up", "down"))
        h = self.kernels.gated_linear(h, gate, up, index, live, self.traits.activation)
        return _Result((h, down, index))

    def _experts(self, step: _Step, h: Array, index: Array) -> _Result:
        experts, params, live = self.traits.experts, step.params, step.live
        assert experts is not None
        spec = RoutingSpec(experts.top_k, experts.scores, experts.normed)
        routing = self.kernels.route(h, params["router"], index, live, spec)
        gate, up, down = (params[f"expert_{part}"] for part in ("gate", "up", "down"))
        routed = self.kernels.experts(
            h, routing, gate, up, down, index, live, self.traits.activation, experts.scale_input
        )
        if experts.shared_ffn is None:
            return _Result(None, routed)
        return self._mlp(step, h, index, "shared_")._replace(routed=routed)

    # ---- parts ----

    def _norm(self, x: Array, weight: Array, layer: Array, live: Array) -> Array:
        return self.kernels.rms_norm(x, weight, layer, live, self.traits.norm_eps)

    def _add(self, step: _Step, x: Array, result: _Result, post_norm: str, layer: Array) -> Array:
        """x plus a result whose inputs lie on all shards, normed before if the model does so."""
        live = step.live
        total = result.routed
        if result.product is not None:
            h, weight, index = result.product
            alone = total is None and self.axis is None
            if alone and not self.traits.post_norms:
                return self.kernels.linear(h, (weight,), index, live, residual=x)[0]
            (product,) = self.kernels.linear(h, (weight,), index, live, wide=not alone)
            total = product if total is None else product + total
        assert total is not None
        if self.axis is not None:
            total = lax.psum(total, self.axis)
        if self.traits.post_norms:
            return x + self._norm(total.astype(x.dtype), step.params[post_norm], layer, live)
        # Rounded once, as on one device.
        return (x.astype(jnp.float32) + total).astype(x.dtype)

    def _embed(self, params: Params, tokens: Array) -> Array:
        """[T, hidden]; the vocabulary lies on all shards."""
        table, head = params.get("embedding"), params["head"]
        size = head.features  # of a table of its own as well

        def rows(own: Array) -> Array:
            return self.kernels.embed(head, own) if table is None else take_rows(table, own)

        if self.axis is None:
            x = rows(tokens)
        else:
            own = tokens - lax.axis_index(self.axis) * size
            here = (own >= 0) & (own < size)
            found = jnp.where(here[:, None], rows(jnp.where(here, own, 0)), 0)
            x = lax.psum(found, self.axis)
        scale = self.traits.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)
