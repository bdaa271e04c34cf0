"""Published models of every family: what their config.json says, and their parameter counts.

A tied embedding counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """A release; `shards` are the numbers of devices that it is to be served on."""

    config: dict[str, Any]
    parameters: int
    shards: tuple[int, ...] = (1, 2, 4, 8)


def model(
    model_type: str,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    ffn: int,
    vocab: int,
    tied: bool,
    **more: Any,
) -> dict[str, Any]:
    """A config.json. Of models whose heads make up the hidden width, it has no head_dim."""
    config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        **more,
    }
    if heads[0] * head_dim != hidden:
        config["head_dim"] = head_dim
    return config


_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": _LLAMA31, "max_position_embeddings": 131072}
_LLAMA32 = _LLAMA3 | {"rope_scaling": _LLAMA31 | {"factor": 32.0}}
_GEMMA2 = {
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
_PHI4_MINI = {
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}
_SCOUT = {
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA31,
}

PUBLISHED: dict[str, Published] = {
    "Gemma 2B": Published(
        model("gemma", 2048, 18, (8, 1), 256, 16384, 256000, True), 2_506_172_416
    ),
    "Gemma 7B": Published(
        model("gemma", 3072, 28, (16, 16), 256, 24576, 256000, True), 8_537_680_896
    ),
    "Gemma-2 9B": Published(
        model("gemma2", 3584, 42, (16, 8), 256, 14336, 256000, True, **_GEMMA2), 9_241_705_984
    ),
    "Gemma-2 27B": Published(
        model(
            "gemma2", 4608, 46, (32, 16), 128, 36864, 256000, True,
            **_GEMMA2, query_pre_attn_scalar=144,
        ),
        27_227_128_320,
    ),
    "Llama-2 7B": Published(
        model("llama", 4096, 32, (32, 32), 128, 11008, 32000, False), 6_738_415_616
    ),
    "Llama-2 13B": Published(
        model("llama", 5120, 40, (40, 40), 128, 13824, 32000, False), 13_015_864_320
    ),
    "Llama-2 70B": Published(
        model("llama", 8192, 80, (64, 8), 128, 28672, 32000, False),
        68_976_648_192,
        (1, 2, 4, 8, 16),
    ),
    "Llama-3/3.1 8B": Published(
        model("llama", 4096, 32, (32, 8), 128, 14336, 128256, False, **_LLAMA3), 8_030_261_248
    ),
    "Llama-3/3.1/3.3 70B": Published(
        model("llama", 8192, 80, (64, 8), 128, 28672, 128256, False, **_LLAMA3),
        70_553_706_496,
        (1, 2, 4, 8, 16),
    ),
    "Llama-3.2 1B": Published(
        model("llama", 2048, 16, (32, 8), 64, 8192, 128256, True, **_LLAMA32), 1_235_814_400
    ),
    "Llama-3.2 3B": Published(
        model("llama", 3072, 28, (24, 8), 128, 8192, 128256, True, **_LLAMA32), 3_212_749_824
    ),
    "Mistral 7B v0.1": Published(
        model("mistral", 4096, 32, (32, 8), 128, 14336, 32000, False, sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral 7B v0.3": Published(
        model("mistral", 4096, 32, (32, 8), 128, 14336, 32768, False, sliding_window=None),
        7_248_023_552,
    ),
    "Mixtral 8x7B": Published(
        model("mixtral", 4096, 32, (32, 8), 128, 14336, 32000, False, num_local_experts=8),
        46_702_792_704,
    ),
    "Mixtral 8x22B": Published(
        model("mixtral", 6144, 56, (48, 8), 128, 16384, 32768, False, num_local_experts=8),
        140_630_071_296,
    ),
    "Phi-3 mini": Published(
        model("phi3", 3072, 32, (32, 32), 96, 8192, 32064, False, sliding_window=2047),
        3_821_079_552,
    ),
    "Phi-3 medium": Published(
        model("phi3", 5120, 40, (40, 10), 128, 17920, 32064, False, sliding_window=2047),
        13_960_238_080,
    ),
    "Phi-4": Published(
        model("phi3", 5120, 40, (40, 10), 128, 17920, 100352, False, rope_theta=250000),
        14_659_507_200,
    ),
    "Phi-4-mini": Published(
        model("phi3", 3072, 32, (24, 8), 128, 8192, 200064, True, **_PHI4_MINI), 3_836_021_760
    ),
    "Qwen-2/2.5 0.5B": Published(
        model("qwen2", 896, 24, (14, 2), 64, 4864, 151936, True), 494_032_768
    ),
    "Qwen-2/2.5 1.5B": Published(
        model("qwen2", 1536, 28, (12, 2), 128, 8960, 151936, True), 1_543_714_304
    ),
    "Qwen-2/2.5 7B": Published(
        model("qwen2", 3584, 28, (28, 4), 128, 18944, 152064, False), 7_615_616_512
    ),
    "Qwen-2.5 14B": Published(
        model("qwen2", 5120, 48, (40, 8), 128, 13824, 152064, False), 14_770_033_664
    ),
    "Qwen-2.5 32B": Published(
        model("qwen2", 5120, 64, (40, 8), 128, 27648, 152064, False), 32_763_876_352
    ),
    "Llama-4 Scout": Published(
        {
            "model_type": "llama4",
            "text_config": model(
                "llama4_text", 5120, 48, (40, 8), 128, 8192, 202048, False, **_SCOUT
            ),
        },
        107_769_861_120,
    ),
}  # fmt: skip
