"""Phi-3, Phi-4 and Phi-4-mini: their checkpoints keep q, k, v and gate, up in one matrix each."""

from __future__ import annotations

from engine.models.families.common import llama_like
from engine.models.fields import Fields
from engine.models.stored import Stored, renamed
from engine.models.traits import LayerKind, Traits

_NAMES = renamed(
    q="self_attn.qkv_proj",
    k="self_attn.qkv_proj",
    v="self_attn.qkv_proj",
    gate="mlp.gate_up_proj",
    up="mlp.gate_up_proj",
)


def phi3(fields: Fields) -> Traits:
    # transformers' default, and not the length that longrope has stretched it to.
    fields = fields.with_defaults(original_max_position_embeddings=4096)
    window = fields.integer_or_none("sliding_window", None)
    kinds = (LayerKind(window=window),) * fields.integer("num_hidden_layers")
    return llama_like(
        fields,
        kinds=kinds,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=False,
        output_bias=False,
        stored=Stored(_NAMES),
    )
