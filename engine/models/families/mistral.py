"""Mistral (7B, Nemo, Small) and Mixtral."""

from __future__ import annotations

from engine.models.families.common import experts_of, head_dim_of, llama_like
from engine.models.fields import Fields
from engine.models.rope_fields import rope_of
from engine.models.stored import Stored, renamed
from engine.models.traits import Experts, LayerKind, Traits

_MIXTRAL_NAMES = renamed(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)


def mistral(fields: Fields) -> Traits:
    window = fields.integer_or_none("sliding_window", 4096)
    kinds = (LayerKind(window=window),) * fields.integer("num_hidden_layers")
    return llama_like(fields, kinds=kinds)


def mixtral(fields: Fields) -> Traits:
    kind = LayerKind(window=fields.integer_or_none("sliding_window", None), experts=True)
    return llama_like(
        fields,
        kinds=(kind,) * fields.integer("num_hidden_layers"),
        ropes=(rope_of(fields, head_dim_of(fields), theta=1e6),),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        experts=Experts(
            *experts_of(fields, fields.integer("num_local_experts", 8), 2),
            ffn=fields.integer("intermediate_size"),
        ),
        stored=Stored(_MIXTRAL_NAMES),
    )
