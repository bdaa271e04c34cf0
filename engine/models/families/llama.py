"""Llama 2 to 3.3, Llama Guard and SmolLM2; SmolLM3, which leaves positions out of some layers."""

from __future__ import annotations

from engine.models.families.common import (
    FULL,
    SLIDING,
    head_dim_of,
    layer_types_of,
    llama_like,
)
from engine.models.fields import Fields
from engine.models.rope_fields import rope_of
from engine.models.traits import LayerKind, Traits


def llama(fields: Fields) -> Traits:
    return llama_like(fields, mlp_bias=fields.flag("mlp_bias", False))


def smollm3(fields: Fields) -> Traits:
    layers = fields.integer("num_hidden_layers")
    rotated = rotated_layers(fields, layers)
    window = fields.integer_or_none("sliding_window", None)
    if not fields.flag("use_sliding_window", False):
        window = None
    default = [SLIDING if window and not turned else FULL for turned in rotated]
    types = layer_types_of(fields, default, (SLIDING, FULL))
    return llama_like(
        fields,
        mlp_bias=fields.flag("mlp_bias", False),
        tied=fields.flag("tie_word_embeddings", True),
        ropes=(rope_of(fields, head_dim_of(fields), theta=2e6),),
        kinds=tuple(
            LayerKind(rope=0 if turned else None, window=window if each == SLIDING else None)
            for turned, each in zip(rotated, types, strict=True)
        ),
    )


def rotated_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have rotary embeddings: no_rope_layers has 1 for those that do."""
    listed = fields.per_layer("no_rope_layers", layers)
    if listed is not None:
        return [bool(item) for item in listed]
    interval = fields.integer("no_rope_layer_interval", 4)
    return [(layer + 1) % interval != 0 for layer in range(layers)]
