"""Qwen 2, 2.5 and 3, and Qwen3's mixture of experts."""

from __future__ import annotations

import dataclasses

from engine.models.families.common import (
    FULL,
    SLIDING,
    experts_of,
    layer_types_of,
    llama_like,
    windowed_kinds,
)
from engine.models.fields import Fields
from engine.models.traits import Experts, LayerKind, Traits


def qwen2(fields: Fields) -> Traits:
    return llama_like(fields, kinds=_kinds(fields), qkv_bias=True, output_bias=False)


def qwen3(fields: Fields) -> Traits:
    kinds = tuple(dataclasses.replace(kind, head_norm=True) for kind in _kinds(fields))
    return llama_like(fields, kinds=kinds)


def qwen3_moe(fields: Fields) -> Traits:
    layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.layers("mlp_only_layers") or []
    window = fields.integer_or_none("sliding_window", 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    # transformers 5 writes num_local_experts where it had read num_experts.
    count = fields.integer_or_none("num_local_experts", None) or fields.integer("num_experts")
    return llama_like(
        fields,
        kinds=tuple(
            LayerKind(
                window=window,
                head_norm=True,
                experts=layer not in dense and (layer + 1) % step == 0,
            )
            for layer in range(layers)
        ),
        experts=Experts(
            *experts_of(fields, count),
            ffn=fields.integer("moe_intermediate_size"),
            normed=fields.flag("norm_topk_prob", False),
        ),
    )


def _kinds(fields: Fields) -> tuple[LayerKind, ...]:
    """Windows, where they are used at all, begin with layer max_window_layers."""
    layers = fields.integer("num_hidden_layers")
    window = fields.integer_or_none("sliding_window", 4096)
    if window is None or not fields.flag("use_sliding_window", False):
        return (LayerKind(),) * layers
    full = fields.count("max_window_layers", 28)
    default = [FULL if layer < full else SLIDING for layer in range(layers)]
    return windowed_kinds(layer_types_of(fields, default, (SLIDING, FULL)), window)
