"""What the configurations of all families have in common."""

from __future__ import annotations

from typing import Any

from engine.kernels.activation import Activation
from engine.models.fields import Fields
from engine.models.rope_fields import rope_of
from engine.models.traits import LayerKind, Traits, UnsupportedModel

_ACTIVATIONS: dict[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def llama_like(fields: Fields, **different: Any) -> Traits:
    """The traits of a decoder built as Llama's, but for those in `different`."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = head_dim_of(fields)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"config.json: num_key_value_heads={kv_heads} does not divide "
            f"num_attention_heads={heads}"
        )
    if "ropes" not in different:
        different["ropes"] = (rope_of(fields, head_dim),)
    if "activation" not in different:
        different["activation"] = activation_of(fields, "hidden_act", "silu")
    attention_bias = fields.flag("attention_bias", False)
    traits = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": fields.integer("intermediate_size"),
        "vocab": fields.integer("vocab_size"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "kinds": (LayerKind(),) * fields.integer("num_hidden_layers"),
        "score_scale": head_dim**-0.5,
        "tied": fields.flag("tie_word_embeddings", False),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
    }
    return Traits(**{**traits, **different})


def head_dim_of(fields: Fields) -> int:
    """`head_dim`, or the heads' part of `hidden_size`."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.raw("head_dim") is None and hidden % heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, "
            "and head_dim is missing"
        )
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(
            f"config.json: head_dim={head_dim} is odd, rotary embeddings turn pairs"
        )
    return head_dim


def activation_of(fields: Fields, name: str, default: str) -> Activation:
    """The activation that the field `name` asks for."""
    asked = fields.raw(name) or default
    found = _ACTIVATIONS.get(asked) if isinstance(asked, str) else None
    if found is None:
        raise UnsupportedModel(
            f"config.json: {name}={asked!r} is not supported (supported: {', '.join(_ACTIVATIONS)})"
        )
    return found


def experts_of(fields: Fields, count: int, default: int | None = None) -> tuple[int, int]:
    """(experts of a layer, those that see each token)."""
    name = "num_experts_per_tok"
    top_k = fields.integer(name) if default is None else fields.integer(name, default)
    if top_k > count:
        raise UnsupportedModel(f"config.json: {name}={top_k} of {count} experts")
    return count, top_k


def layer_types_of(fields: Fields, default: list[str], supported: tuple[str, ...]) -> list[str]:
    """Each layer's attention as `layer_types` names it, or the `default`."""
    types = fields.per_layer("layer_types", len(default)) or default
    for each in types:
        if each not in supported:
            raise UnsupportedModel(
                f"config.json: layer_types has {each!r} (supported: {', '.join(supported)})"
            )
    return types


SLIDING, FULL = "sliding_attention", "full_attention"


def windowed_kinds(types: list[str], window: int | None) -> tuple[LayerKind, ...]:
    """Layers that differ by their window alone."""
    return tuple(LayerKind(window=window if each == SLIDING else None) for each in types)
