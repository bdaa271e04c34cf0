"""Mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.kernels.cpu.linear import gated_linear, linear
from engine.kernels.interface import Activation, Linear, Routing, RoutingSpec
from engine.kernels.reference.experts import choose


def route(x: Array, router: Linear, layer: Any, live: Any, spec: RoutingSpec) -> Routing:
    """See engine.kernels.interface.Kernels."""
    (scores,) = linear(x, (router,), layer, live, wide=True)
    return choose(scores, spec)


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
    """See engine.kernels.interface.Kernels."""
    count = jax.tree.leaves(gate.matrix)[0].shape[1]

    def flat(weight: Linear) -> Linear:
        """[layers * experts, ...]: an expert is a layer."""
        parts = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (weight.matrix, weight.bias))
        return dataclasses.replace(weight, matrix=parts[0], bias=parts[1])

    def add_expert(expert: Array, out: Array) -> Array:
        place = layer * count + expert
        mine = routing.experts == expert
        weight = jnp.where(mine, routing.weights, 0).sum(axis=-1, keepdims=True)
        inputs = (x.astype(jnp.float32) * weight).astype(x.dtype) if weigh_inputs else x
        h = gated_linear(inputs, flat(gate), flat(up), place, live, activation)
        (y,) = linear(h, (flat(down),), place, live, wide=True)
        y = y if weigh_inputs else y * weight
        return out + jnp.where(mine.any(axis=-1, keepdims=True), y, 0)

    start = jnp.zeros((x.shape[0], down.features), jnp.float32)
    return lax.fori_loop(0, count, add_expert, start)
