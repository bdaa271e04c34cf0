"""Mixtures of experts in jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.kernels.interface import Activation, Linear, Routing, RoutingSpec
from engine.kernels.reference.linear import affine, gated, linear, of_layer

ROW_TILE = 64  # routed rows of one expert's matmul


def route(x: Array, router: Linear, layer: Any, live: Any, spec: RoutingSpec) -> Routing:
    (scores,) = linear(x, (router,), layer, live, wide=True)
    top, chosen = lax.top_k(scores, spec.top_k)  # of equal scores the lower id comes first
    if spec.gate == "sigmoid":
        weights = jax.nn.sigmoid(top)
    else:
        weights = jnp.take_along_axis(jax.nn.softmax(scores), chosen, axis=-1)
    if spec.normalized:
        weights /= weights.sum(axis=-1, keepdims=True)
    return Routing(chosen, weights)


def experts(
    x: Array,
    routing: Routing,
    gate: Linear,
    up: Linear,
    down: Linear,
    layer: Any,
    live: Any,
    activation: Activation = "silu",
    weigh_inputs: bool = False,
) -> Array:
    total, top_k = routing.experts.shape
    count = jax.tree.leaves(gate.matrix)[0].shape[1]
    # Row r is token r // top_k's; sorted by expert, with the padding behind the last one.
    live_row = jnp.arange(total * top_k, dtype=jnp.int32) < live * top_k
    expert_of_row = jnp.where(live_row, routing.experts.reshape(-1), count)
    order = jnp.argsort(expert_of_row, stable=True)
    starts = jnp.searchsorted(expert_of_row[order], jnp.arange(count + 1))
    tile = min(ROW_TILE, total * top_k)
    order = jnp.pad(order, (0, tile))  # so that no slice is moved back to fit
    weights = routing.weights.reshape(-1)

    def one_expert(expert: Array, out: Array) -> Array:
        begin, end = starts[expert], starts[expert + 1]

        def one_tile(index: Array, out: Array) -> Array:
            start = begin + index * tile
            rows = lax.dynamic_slice_in_dim(order, start, tile)
            token, weight = rows // top_k, weights[rows][:, None]
            inputs = x[token]
            if weigh_inputs:
                inputs = (inputs.astype(jnp.float32) * weight).astype(x.dtype)
            own_gate, own_up, own_down = (of_layer(w, (layer, expert)) for w in (gate, up, down))
            y = affine(gated(inputs, own_gate, own_up, activation), *own_down)
            y = y if weigh_inputs else y * weight
            mine = start + jnp.arange(tile) < end
            return out.at[token].add(jnp.where(mine[:, None], y, 0))

        return lax.fori_loop(0, (end - begin + tile - 1) // tile, one_tile, out)

    return lax.fori_loop(0, count, one_expert, jnp.zeros((total, down.features), jnp.float32))
