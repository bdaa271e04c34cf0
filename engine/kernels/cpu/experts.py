"""Mixtures of experts; csrc/route.cc, csrc/experts.cc."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from engine.kernels.cpu.linear import linear, operands_of
from engine.kernels.cpu.native import absent, target
from engine.kernels.interface import Activation, Linear, Routing, RoutingSpec


def route(x: Array, router: Linear, layer: Any, live: Any, spec: RoutingSpec) -> Routing:
    """See engine.kernels.interface.Kernels."""
    (scores,) = linear(x, (router,), layer, live, wide=True)
    shape = x.shape[0], spec.top_k
    results = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    call = jax.ffi.ffi_call(target("route"), results)
    is_sigmoid = spec.gate == "sigmoid"
    chosen = call(scores, jnp.int32(live), sigmoid=is_sigmoid, normalized=spec.normalized)
    return Routing(*chosen)


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
    tokens, top_k = routing.experts.shape
    scalars = jnp.int32(layer), jnp.int32(live)
    unweighed = routing._replace(weights=absent(jnp.float32))
    first, then = (routing, unweighed) if weigh_inputs else (unweighed, routing)
    h = jax.ffi.ffi_call(
        target("gated_experts"), jax.ShapeDtypeStruct((tokens * top_k, gate.features), x.dtype)
    )(x, *scalars, *first, *operands_of(x, gate), *operands_of(x, up), activation=activation)
    add_up = jax.ffi.ffi_call(
        target("expert_sums"), jax.ShapeDtypeStruct((tokens, down.features), jnp.float32)
    )
    return add_up(h, *scalars, *then, *operands_of(h, down))
