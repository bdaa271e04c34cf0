"""The decoder: token ids and KV pools in, hidden states and KV pools out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.kernels import reference as kernels
from engine.kernels.reference import Batch
from engine.models.rope import inverse_frequencies, rotate
from engine.models.traits import Traits

Params = dict[str, Array]

_LAYER_WEIGHTS = (
    "attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down",
    "q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip


class KVPools(NamedTuple):
    """[layers, blocks, block_size, kv_heads, head_dim] each, in their storage dtype."""

    k: Array
    v: Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root mean square norm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def linear(x: Array, weights: Params, name: str) -> Array:
    """x [n, in] times weight [in, out], plus its bias if it has one."""
    y = jnp.dot(x, weights[name], preferred_element_type=jnp.float32)
    bias = weights.get(f"{name}_bias")
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def forward(
    params: Params, traits: Traits, pools: KVPools, batch: Batch, dtype: Any
) -> tuple[Array, KVPools]:
    """Run all layers over a ragged batch.

    Writes the KV of the batch's tokens into `pools` (donate them).

    Returns:
        hidden [S, hidden]: the state of each row's last token, normed for `logits`;
        and the pools.
    """
    t = traits
    blocks, block_size = pools.k.shape[1:3]
    positions, slots = kernels.positions_and_slots(batch, block_size, blocks * block_size)
    with jax.named_scope("embed"):
        x = params["embedding"][batch.tokens].astype(dtype)  # [T, hidden]
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(t)
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # [T, head_dim / 2]

    def project(weights: Params) -> Any:
        def rows(x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
            n = x.shape[0]
            h = rms_norm(x, weights["attention_norm"], t.norm_eps)
            q = linear(h, weights, "q").reshape(n, t.heads, t.head_dim)
            k = linear(h, weights, "k").reshape(n, t.kv_heads, t.head_dim)
            v = linear(h, weights, "v").reshape(n, t.kv_heads, t.head_dim)
            return rotate(q, cos, sin), rotate(k, cos, sin), v

        return rows

    def finish(weights: Params) -> Any:
        def rows(x: Array, mixed: Array) -> Array:
            x = x + linear(mixed.reshape(x.shape[0], t.heads * t.head_dim), weights, "o")
            h = rms_norm(x, weights["mlp_norm"], t.norm_eps)
            gate = jax.nn.silu(linear(h, weights, "gate"))
            return x + linear(gate * linear(h, weights, "up"), weights, "down")

        return rows

    def layer(carry: tuple[Array, KVPools], scanned: tuple[Params, Array]) -> Any:
        (x, (k_pool, v_pool)), (weights, index) = carry, scanned
        with jax.named_scope("qkv"):
            q, k, v = kernels.map_live_rows(project(weights), batch.num_tokens, x, cos, sin)
        with jax.named_scope("attention"):
            k_pool = kernels.write_kv(k_pool, index, slots, k)
            v_pool = kernels.write_kv(v_pool, index, slots, v)
            mixed = kernels.attention(
                q, k_pool, v_pool, index, batch, scale=t.head_dim**-0.5, dtype=dtype
            )
        with jax.named_scope("mlp"):
            x = kernels.map_live_rows(finish(weights), batch.num_tokens, x, mixed)
        return (x, KVPools(k_pool, v_pool)), None

    layer_weights = {name: params[name] for name in _LAYER_WEIGHTS if name in params}
    scanned = (layer_weights, jnp.arange(t.layers, dtype=jnp.int32))
    (x, pools), _ = lax.scan(layer, (x, pools), scanned)
    last = x[jnp.maximum(batch.starts[1:] - 1, 0)]  # [S, hidden]
    return rms_norm(last, params["final_norm"], t.norm_eps), pools


def logits(params: Params, hidden: Array) -> Array:
    """float32 [S, vocab] from normed hidden states [S, hidden]."""
    head = params.get("head", params["embedding"])  # [vocab, hidden]
    with jax.named_scope("logits"):
        return jnp.einsum("se,ve->sv", hidden, head, preferred_element_type=jnp.float32)
