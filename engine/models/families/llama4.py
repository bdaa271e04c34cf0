"""The text part of Llama 4."""

from __future__ import annotations

from engine.models.families.common import experts_of, head_dim_of, layer_types_of, llama_like
from engine.models.families.llama import rotated_layers
from engine.models.fields import Fields
from engine.models.rope_fields import rope_of
from engine.models.stored import Stored, renamed
from engine.models.traits import Experts, LayerKind, Temperature, Traits

_NAMES = renamed(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate="feed_forward.experts.gate_up_proj",
    expert_up="feed_forward.experts.gate_up_proj",
    expert_down="feed_forward.experts.down_proj",
    shared_gate="feed_forward.shared_expert.gate_proj",
    shared_up="feed_forward.shared_expert.up_proj",
    shared_down="feed_forward.shared_expert.down_proj",
)
_CHUNKED, _FULL = "chunked_attention", "full_attention"


def llama4(fields: Fields) -> Traits:
    layers = fields.integer("num_hidden_layers")
    rotated = rotated_layers(fields, layers)
    chunk = fields.integer_or_none("attention_chunk_size", 8192)
    default = [_CHUNKED if turned and chunk else _FULL for turned in rotated]
    types = layer_types_of(fields, default, (_CHUNKED, _FULL))
    routed = fields.layers("moe_layers")
    if routed is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        routed = [*range(step - 1, layers, step)]
    normed = fields.flag("use_qk_norm", True)
    temperature = None
    # Scout's releases say 4, and mean true.
    if fields.raw("attn_temperature_tuning", True) not in (None, False, 0):
        temperature = Temperature(
            fields.number("floor_scale", 8192), fields.number("attn_scale", 0.1)
        )
    width = fields.integer("intermediate_size")
    return llama_like(
        fields,
        ffn=fields.integer("intermediate_size_mlp", 16384),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        ropes=(rope_of(fields, head_dim_of(fields), theta=5e5),),
        kinds=tuple(
            LayerKind(
                rope=0 if turned else None,
                chunk=chunk if each == _CHUNKED else None,
                # transformers norms after the rotation, which leaves a head's length as it is.
                head_norm=normed and turned,
                temperature=None if turned else temperature,
                experts=layer in routed,
            )
            for layer, (turned, each) in enumerate(zip(rotated, types, strict=True))
        ),
        head_norm_weights=False,
        experts=Experts(
            *experts_of(fields, fields.integer("num_local_experts", 16), 1),
            ffn=width,
            scores="sigmoid",
            normed=False,
            scale_input=True,
            shared_ffn=width,
        ),
        stored=Stored(_NAMES, interleaved=True),
    )
