"""Gemma, Gemma 2, and the text part of Gemma 3."""

from __future__ import annotations

from typing import Any

from engine.models.families.common import (
    FULL,
    SLIDING,
    activation_of,
    layer_types_of,
    llama_like,
    windowed_kinds,
)
from engine.models.fields import Fields
from engine.models.rope_fields import rope_of, scaling_of
from engine.models.stored import Stored, renamed
from engine.models.traits import LayerKind, Rope, Traits, UnsupportedModel

_POST_NORM_NAMES = renamed(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def gemma(fields: Fields) -> Traits:
    # The first releases say "gelu" and mean its approximation, as transformers reads them.
    legacy = fields.raw("hidden_act") == "gelu"
    activation = "gelu_tanh" if legacy else activation_of(fields, "hidden_act", "gelu_pytorch_tanh")
    stored = Stored(norm_offset=1.0)
    return llama_like(fields, **_all(fields), activation=activation, stored=stored)


def gemma2(fields: Fields) -> Traits:
    layers = fields.integer("num_hidden_layers")
    default = [SLIDING if layer % 2 == 0 else FULL for layer in range(layers)]
    types = layer_types_of(fields, default, (SLIDING, FULL))
    window = fields.integer_or_none("sliding_window", 4096)
    return llama_like(
        fields,
        **_all(fields),
        **_since_gemma2(fields),
        kinds=windowed_kinds(types, window),
        attention_soft_cap=fields.number_or_none("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.number_or_none("final_logit_softcapping", 30.0),
    )


def gemma3(fields: Fields) -> Traits:
    """Its multimodal releases leave out of config.json what is as in the 4B."""
    fields = fields.with_defaults(
        vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256
    )
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("config.json: use_bidirectional_attention is not supported")
    layers = fields.integer("num_hidden_layers")
    every = fields.integer("sliding_window_pattern", 6)
    default = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
    types = layer_types_of(fields, default, (SLIDING, FULL))
    window = fields.integer_or_none("sliding_window", 4096)
    # transformers passes no attention soft cap on, whatever config.json says.
    return llama_like(
        fields,
        **_all(fields),
        **_since_gemma2(fields),
        kinds=tuple(
            LayerKind(rope=1, window=window, head_norm=True)
            if each == SLIDING
            else LayerKind(rope=0, head_norm=True)
            for each in types
        ),
        ropes=_gemma3_ropes(fields, fields.integer("head_dim")),
        logit_soft_cap=fields.number_or_none("final_logit_softcapping", None),
    )


def _all(fields: Fields) -> dict[str, Any]:
    return {
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "tied": fields.flag("tie_word_embeddings", True),
    }


def _since_gemma2(fields: Fields) -> dict[str, Any]:
    return {
        "activation": activation_of(fields, "hidden_activation", "gelu_pytorch_tanh"),
        "score_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "post_norms": True,
        "stored": Stored(_POST_NORM_NAMES, norm_offset=1.0),
    }


def _gemma3_ropes(fields: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """Of the layers that see all, and of those with a window."""
    parameters = fields.part("rope_parameters")
    full = parameters and parameters.part(FULL)
    sliding = parameters and parameters.part(SLIDING)
    if full is None or sliding is None:
        local = Rope(fields.number("rope_local_base_freq", 1e4), head_dim)
        return rope_of(fields, head_dim, theta=1e6), local
    return (
        Rope(full.number("rope_theta", 1e6), head_dim, scaling_of(full, fields, head_dim)),
        Rope(sliding.number("rope_theta", 1e4), head_dim, scaling_of(sliding, fields, head_dim)),
    )
